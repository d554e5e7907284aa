"""Metrics of the app against formulas written out by hand."""

import math

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import (
    multiclass_accuracy,
    multiclass_calibration_error,
)

import driftfilter as df
from driftfilter.app import metrics

LOGP = torch.tensor([[0.9, 0.1], [0.55, 0.45], [0.3, 0.7], [0.52, 0.48]], dtype=torch.float64).log()
LABELS = torch.tensor([0, 1, 1, 0])


def test_accuracy_and_likelihood() -> None:
    assert metrics.accuracy(LOGP, LABELS) == 0.75
    expected = -(math.log(0.9) + math.log(0.45) + math.log(0.7) + math.log(0.52)) / 4
    assert metrics.negative_log_likelihood(LOGP, LABELS) == pytest.approx(expected, rel=1e-14)


def test_calibration_error_pools_the_samples_of_a_bin() -> None:
    # confidences 0.55 (wrong) and 0.52 (right) share the bin (0.5, 0.6] of ten; 0.9 and 0.7 stand
    # alone
    expected = (abs(1 - 0.9) + abs(1 - 0.55 - 0.52) + abs(1 - 0.7)) / 4
    assert metrics.calibration_error(LOGP, LABELS, bins=10) == pytest.approx(expected, rel=1e-12)


def test_calibrated_predictions_have_no_calibration_error() -> None:
    logp = torch.tensor([[0.75, 0.25]] * 4, dtype=torch.float64).log()
    assert metrics.calibration_error(logp, torch.tensor([0, 0, 0, 1])) == pytest.approx(
        0, abs=1e-15
    )


def _predictions(seed: int, n: int, k: int, sharpness: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(n, k, generator=generator)
    return logits.log_softmax(-1), torch.randint(k, (n,), generator=generator)


TIED = torch.tensor([[0.5, 0.5, 0.0], [0.4, 0.2, 0.4]]).log(), torch.tensor([1, 0])
SURE = torch.tensor([[0.0, -200.0]] * 3), torch.tensor([0, 0, 1])  # probabilities of exactly 1
CASES = {
    "many": _predictions(0, 1000, 10, 2.0),
    "sharp": _predictions(1, 1000, 10, 40.0),
    "one sample": _predictions(2, 1, 5, 1.0),
    "two classes": _predictions(3, 50, 2, 1.0),
    "class absent": (_predictions(4, 60, 5, 1.0)[0], _predictions(4, 60, 5, 1.0)[1] % 4),
    "ties": TIED,
    "certain": SURE,
    "rounded above one": (torch.tensor([[1e-7, -20.0], [1e-7, -20.0]]), torch.tensor([0, 0])),
    "on an edge": (torch.full((4, 5), 0.2).log(), torch.tensor([0, 0, 1, 2])),
}


@pytest.mark.parametrize("case", CASES)
def test_quality_is_that_of_torchmetrics_and_of_the_formulas(case: str) -> None:
    logp, labels = CASES[case]
    found, k = metrics.quality(logp, labels), logp.shape[1]
    assert found.n == len(labels)
    assert found.accuracy == pytest.approx(
        multiclass_accuracy(logp.argmax(-1), labels, k, average="micro").item(), abs=1e-6
    )
    # It takes what rounds to more than 1 for logits, and exactly 1 for a bin of its own.
    expected = multiclass_calibration_error(
        logp.float().exp().clamp(max=1 - 2**-24), labels, k, n_bins=15, norm="l1"
    ).item()
    assert found.ece == pytest.approx(expected, abs=2e-6)
    p, y = logp.double().exp().numpy(), labels.numpy()
    assert found.nll == pytest.approx(
        -logp.double().numpy()[np.arange(len(y)), y].mean(), rel=1e-12
    )
    assert found.brier == pytest.approx(
        ((p - np.eye(k)[y]) ** 2).sum(1).mean(), rel=1e-9, abs=1e-15
    )


def test_quality_by_hand() -> None:
    found = metrics.quality(*SURE)
    expected = metrics.Quality(accuracy=2 / 3, nll=200 / 3, brier=2 / 3, ece=1 / 3, n=3)
    assert found == pytest.approx(expected, rel=1e-6)
    assert metrics.quality(*TIED).accuracy == 0.5  # of equal probabilities the first class is taken


def test_labels_beyond_the_classes_are_refused() -> None:
    with pytest.raises(ValueError, match="below the 2 classes"):
        metrics.quality(SURE[0], torch.tensor([0, 1, 2]))


def test_least_share() -> None:
    assert metrics.least_share(LOGP) == 0.5  # three to one: twice a quarter
    assert metrics.least_share(LOGP[:2]) == 0.0


def test_entropy_of_certain_and_even_predictions() -> None:
    logp = torch.tensor([[0.0, -math.inf], [-math.log(2), -math.log(2)]], dtype=torch.float64)
    torch.testing.assert_close(
        metrics.entropy(logp), torch.tensor([0.0, math.log(2)], dtype=torch.float64)
    )


def test_mutual_information_is_what_two_certain_and_opposite_parameters_disagree_about() -> None:
    """θ = ±20 with equal chance, nearly: all of the uncertainty is about θ; at x = 0 none of it
    is.
    """
    belief = df.Belief(
        torch.zeros(1, dtype=torch.float64), df.Full(torch.full((1, 1), 1e6, dtype=torch.float64))
    )
    inputs = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    predictive, mutual = metrics.uncertainty(df.LinearHead(2), belief, inputs, draws=20_000)
    torch.testing.assert_close(
        predictive, torch.full_like(predictive, math.log(2)), atol=1e-3, rtol=0
    )
    assert mutual[0] > 0.68
    assert mutual[1] == pytest.approx(0, abs=1e-12)


def test_uncertainty_of_a_linear_model_is_that_of_the_same_function() -> None:
    belief = df.Belief(
        torch.tensor([0.4, -1.0], dtype=torch.float64),
        df.Full(torch.tensor([[1.0, 0.3], [0.3, 2.0]], dtype=torch.float64)),
    )
    inputs = torch.tensor([[1.0, 2.0], [0.3, -1.0]], dtype=torch.float64)
    head = df.LinearHead(2)
    plain = df.Filter(logits=lambda theta, x: head(theta, x)).logits
    assert isinstance(plain, df.PredictiveModel)
    for ours, other in zip(
        metrics.uncertainty(head, belief, inputs),
        metrics.uncertainty(plain, belief, inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, other, atol=1e-12, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_reliability_counts_every_sample_once(case: str) -> None:
    logp, labels = CASES[case]
    found = metrics.reliability(logp, labels)
    confidence, predicted = (each.numpy() for each in logp.exp().max(-1))
    right = predicted == labels.numpy()
    assert sum(found.samples) == len(labels)
    assert sum(
        n * sure for n, sure in zip(found.samples, found.confidence, strict=True)
    ) == pytest.approx(confidence.sum())
    assert sum(
        n * share for n, share in zip(found.samples, found.accuracy, strict=True)
    ) == pytest.approx(right.sum())
    for place, n in enumerate(found.samples):
        low, high = place / metrics.BINS, (place + 1) / metrics.BINS
        assert n == 0 or low - 1e-6 <= found.confidence[place] <= high + 1e-6


def test_accuracy_by_coverage_is_that_of_the_most_confident() -> None:
    logp = torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.2, 0.8], [0.55, 0.45]]).log()
    labels = torch.tensor([1, 0, 1, 0])  # in order of confidence: right, right, wrong, right
    assert metrics.risk_coverage(logp, labels) == pytest.approx([1, 1, 2 / 3, 3 / 4])
    assert metrics.risk_coverage(logp, labels, points=2) == pytest.approx([1, 3 / 4])
    many = torch.randn(1003, 5, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    truth = torch.arange(1003) % 5
    found = metrics.risk_coverage(many, truth)
    assert len(found) == 20
    assert found[-1] == pytest.approx(metrics.accuracy(many, truth))
    order = sorted(range(1003), key=lambda i: -float(many[i].max()))[: 1003 * 16 // 20]
    kept = [int(many[i].argmax()) == int(truth[i]) for i in order]
    assert found[15] == pytest.approx(sum(kept) / len(kept))

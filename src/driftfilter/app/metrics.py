"""What a run is judged by: accuracy, likelihood, calibration, collapse, and uncertainty near and
far from the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from driftfilter.base.checks import require
from driftfilter.base.inputs import Inputs
from driftfilter.gaussian.belief import Belief
from driftfilter.model.predictive import PredictiveModel

BINS = 15


def accuracy(log_probabilities: Tensor, labels: Tensor) -> float:
    """Share of labels [n] that are the most likely class of log-probabilities [n, k]."""
    return (log_probabilities.argmax(-1) == labels).double().mean().item()


def negative_log_likelihood(log_probabilities: Tensor, labels: Tensor) -> float:
    """-(1/n) Σ log p_i(y_i), for log-probabilities [n, k] and labels [n]."""
    return -log_probabilities.gather(-1, labels[:, None]).mean().item()


class Reliability(NamedTuple):
    """Of predictions in equal bins [low, high) of their confidence; an empty bin has a mean of
    0.
    """

    samples: list[int]
    confidence: list[float]  # mean of each bin
    accuracy: list[float]  # of each bin


def reliability(log_probabilities: Tensor, labels: Tensor, bins: int = BINS) -> Reliability:
    """Confidence and accuracy by bin, of log-probabilities [n, k] and labels [n]."""
    confidence, predicted = log_probabilities.exp().max(-1)
    edges = torch.linspace(0, 1, bins + 1).to(confidence)[1:-1]  # certainty belongs to the last bin
    place = torch.bucketize(confidence, edges, right=True)
    count = torch.bincount(place, minlength=bins)
    sums = [
        confidence.new_zeros(bins, dtype=torch.float64).index_add(0, place, each.double())
        for each in (confidence, predicted == labels)
    ]
    return Reliability(count.tolist(), *((each / count.clamp(min=1)).tolist() for each in sums))


def calibration_error(log_probabilities: Tensor, labels: Tensor, bins: int = BINS) -> float:
    """Expected calibration error Σ_b (n_b/n) |accuracy_b - confidence_b| of [n, k], over equal bins
    [low, high).
    """
    found = reliability(log_probabilities, labels, bins)
    return sum(n * abs(right - sure) for n, sure, right in zip(*found, strict=True)) / len(labels)


def brier(log_probabilities: Tensor, labels: Tensor) -> float:
    """Brier score (1/n) Σ_i Σ_c (p_ic - [c = y_i])², from 0 to 2, for log-probabilities [n, k] and
    labels [n].
    """
    probabilities = log_probabilities.double().exp()
    right = probabilities.gather(-1, labels[:, None]).squeeze(-1)
    return (probabilities.square().sum(-1) - 2 * right + 1).mean().item()


class Quality(NamedTuple):
    """What the benchmark says about predictions."""

    accuracy: float
    nll: float
    brier: float
    ece: float  # 15 bins
    n: int  # samples


def quality(log_probabilities: Tensor, labels: Tensor) -> Quality:
    """Of log-probabilities [n, k], n >= 1, and labels [n], where they are; accuracy and calibration
    by torchmetrics.
    """
    multiclass_accuracy, multiclass_calibration_error = torchmetrics()
    n, k = log_probabilities.shape
    require(
        n > 0 and int(labels.max()) < k,
        "labels",
        labels,
        f"of at least one sample and below the {k} classes predicted",
    )
    # Rounding may lift exp to just above 1, which torchmetrics takes for logits: it would apply a
    # softmax again. And exactly 1 would be a bin of its own.
    probabilities = log_probabilities.float().exp().clamp(max=1 - 2**-24)
    return Quality(
        # of the log-probabilities: what rounds to equal probabilities is no tie there
        multiclass_accuracy(log_probabilities.argmax(-1), labels, k, average="micro").item(),
        negative_log_likelihood(log_probabilities.double(), labels),
        brier(log_probabilities, labels),
        multiclass_calibration_error(probabilities, labels, k, n_bins=BINS, norm="l1").item(),
        n,
    )


def torchmetrics() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Its accuracy and calibration error; an error says how to install it where it is missing."""
    try:
        from torchmetrics.functional.classification import (
            multiclass_accuracy,
            multiclass_calibration_error,
        )
    except ImportError as error:
        raise ImportError(
            "the benchmark's metrics need torchmetrics: pip install 'driftfilter[bench]'"
        ) from error
    return multiclass_accuracy, multiclass_calibration_error


def least_share(log_probabilities: Tensor) -> float:
    """k times the smallest share of a class among the predicted ones [n, k]: 1 is balanced, 0 a
    class that vanished.
    """
    k = log_probabilities.shape[-1]
    return (
        k
        * torch.bincount(log_probabilities.argmax(-1), minlength=k).min().item()
        / len(log_probabilities)
    )


def entropy(log_probabilities: Tensor) -> Tensor:
    """-Σ p log p [..., k] -> [...]."""
    total: Tensor = torch.special.entr(log_probabilities.exp()).sum(-1)
    return total


class Uncertainty(NamedTuple):
    """Of each input [n], in nats."""

    predictive: Tensor  # H(E_q p), all of it
    mutual: Tensor  # H(E_q p) - E_q H(p): the part that knowing θ would remove


def uncertainty(
    model: PredictiveModel, belief: Belief, inputs: Inputs, draws: int = 200, seed: int = 0
) -> Uncertainty:
    """Predictive entropy and mutual information between label and θ, by draws of θ under q =
    belief.
    """
    generator = torch.Generator(belief.mean.device).manual_seed(seed)
    moves = belief.covariance.sample(draws, generator)
    if model.linear:  # all draws in one product
        logits = model(belief.mean, inputs) + model.pushforward(belief.mean, inputs, moves)
    else:
        logits = torch.stack([model(belief.mean + move, inputs) for move in moves])
    logp = logits.log_softmax(-1)  # [s, n, k]
    predictive = entropy(logp.logsumexp(0) - math.log(draws))
    return Uncertainty(predictive, (predictive - entropy(logp).mean(0)).clamp_min(0))

"""Accuracy without labels, against sums over samples, simulated labels and hand-made cases."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import driftfilter as df
from driftfilter.inference.accuracy import (
    BLOCK,
    HOME,
    WINDOW,
    Expectation,
    Home,
    Opinions,
    SecondOpinion,
    SourceCalibration,
)


def predictions(n: int, k: int = 4, seed: int = 0, scale: float = 2.0) -> Tensor:
    """Log-probabilities [n, k]."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(n, k, generator=generator, dtype=torch.float64)).log_softmax(-1)


def follow(batches: list[Tensor]) -> Opinions:
    """What is known after batches, one after the other."""
    known = Opinions.of(batches[0])
    for batch in batches[1:]:
        known = known.extend(Opinions.of(batch))
    return known


def entropy(shares: Tensor) -> float:
    return float(-torch.xlogy(shares, shares).sum())


def by_hand(logp: Tensor, kappa: float = 0.2, stay: float = 0.0) -> tuple[float, float]:
    """Expected error and half of the band, sample by sample."""
    p, n = logp.exp(), len(logp)
    sure = [float(row.max()) for row in p]
    labels = [int(row.argmax()) for row in p]
    said = torch.tensor([labels.count(c) / n for c in range(p.shape[1])], dtype=torch.float64)
    weight = min(1.25, max(1.0, (entropy(p.mean(0)) / entropy(said)) ** 3))
    error = weight * sum(1 - c for c in sure) / n
    chance = (1 + stay) / (1 - stay) * sum(c * (1 - c) for c in sure) / n**2
    return error, 1.96 * math.sqrt(chance + (kappa * error) ** 2)


@pytest.mark.parametrize("sizes", [[300], [200] * 5, [7] * 60, [1] * 250, [90, 20, 500]])
def test_estimate_is_that_of_the_samples_themselves(sizes: list[int]) -> None:
    logp = predictions(sum(sizes))
    found = Expectation(follow(list(logp.split(sizes))), stay=0.5).estimate
    error, reach = by_hand(logp, stay=0.5)
    assert found.samples == len(logp)
    assert found.accuracy == pytest.approx(1 - error, rel=1e-12)
    assert found.low == pytest.approx(max(0, 1 - error - reach), rel=1e-12)
    assert found.high == pytest.approx(min(1, 1 - error + reach), rel=1e-12)


@pytest.mark.parametrize("n", [1, 30, 99, 100, 200, 1700])
def test_what_is_older_than_a_thousand_samples_is_forgotten(n: int) -> None:
    logp = predictions(4 * WINDOW)
    known = follow(list(logp.split(n))[: 3 * WINDOW // n])
    kept = sum(known.counts)
    assert WINDOW <= kept < WINDOW + max(n, BLOCK)
    assert len(known.counts) <= WINDOW // min(max(n, 1), BLOCK) * 2 + 2
    seen = logp[: n * (3 * WINDOW // n)][-kept:]
    expected = Opinions.of(seen).sums
    torch.testing.assert_close(known.sums.sum(0), expected[0], rtol=1e-10, atol=1e-10)


def test_band_covers_what_calibrated_predictions_come_to() -> None:
    covered, generator = 0, torch.Generator().manual_seed(3)
    for seed in range(200):
        logp = predictions(400, seed=seed)
        labels = logp.exp().multinomial(1, generator=generator)[:, 0]
        found = df.Estimate.of(logp)
        truth = float((logp.argmax(-1) == labels).double().mean())
        covered += found.low <= truth <= found.high
        assert abs(found.accuracy - truth) < 0.15
    assert covered >= 190


def test_estimate_is_of_the_last_samples() -> None:
    logp = predictions(1500)
    assert df.Estimate.of(logp) == df.Estimate.of(logp[500:])
    assert df.Estimate.of(logp, last=20) == df.Estimate.of(logp[-20:])
    shaped = df.Estimate.of(logp[:600].reshape(3, 200, -1))
    assert shaped == df.Estimate.of(logp[:600])


def test_labels_that_are_fewer_than_predicted_weigh() -> None:
    even = torch.tensor([[0.6, 0.4], [0.4, 0.6]], dtype=torch.float64).log().repeat(50, 1)
    assert df.Estimate.of(even).accuracy == pytest.approx(0.6)
    rare = torch.tensor([[0.9, 0.1]], dtype=torch.float64).log().repeat(100, 1)
    assert df.Estimate.of(rare).accuracy == pytest.approx(1 - 0.1 * 1.25)  # and no more


def test_source_that_is_less_sure_than_right_counts_beyond_three_points() -> None:
    opinions = Opinions.of(predictions(200))
    plain = Expectation(opinions).estimate
    under = Expectation(opinions, SourceCalibration(0.95, 0.85)).estimate
    over = Expectation(opinions, SourceCalibration(0.85, 0.95)).estimate
    assert under.accuracy - plain.accuracy == pytest.approx(0.07)
    near = Expectation(opinions, SourceCalibration(0.87, 0.85)).estimate
    assert near.accuracy == plain.accuracy
    assert plain.accuracy - over.accuracy == pytest.approx(0.1)
    error, reach = 1 - under.accuracy, under.high - under.accuracy
    chance = (by_hand(predictions(200), kappa=0)[1] / 1.96) ** 2
    assert reach == pytest.approx(1.96 * math.sqrt(chance + (0.15 * error) ** 2), rel=1e-9)


def test_collapsed_model_is_not_believed() -> None:
    sure = torch.tensor([[0.998, 0.001, 0.001]]).log().repeat(300, 1)
    labels = torch.stack((torch.zeros(300), torch.arange(300) % 3)).long()
    found = Expectation(Opinions.of(sure), second=SecondOpinion(labels, math.log(3))).estimate
    assert found.accuracy == pytest.approx(1 - 2 / 3 * (1 - 1 / 3))
    healthy = Expectation(Opinions.of(sure), second=SecondOpinion(labels, -0.1)).estimate
    assert healthy.accuracy > 0.99


def test_nothing_is_known_of_no_samples() -> None:
    found = Expectation().estimate
    assert math.isnan(found.accuracy)
    assert (found.low, found.high, found.samples, str(found)) == (0.0, 1.0, 0, "unknown")


def test_estimate_reads_well() -> None:
    assert str(df.Estimate(0.8, 0.75, 0.85, 1000)) == "0.800 (0.750 to 0.850)"


def test_half_precision_and_extremes_stay_within_bounds() -> None:
    for logp in (predictions(50).half(), torch.eye(3)[[0, 1, 2]].log(), predictions(1)):
        found = df.Estimate.of(logp)
        assert 0 <= found.low <= found.accuracy <= found.high <= 1


def test_tensors_describe_all_of_it() -> None:
    known = follow(list(predictions(330).split(110)))
    named = {"o." + name: value for name, value in known.to_tensors().items()}
    again = Opinions.from_tensors("o.", named)
    assert torch.equal(again.sums, known.sums)
    assert again.counts == known.counts


@pytest.mark.parametrize(
    "wrong",
    [
        {"counts": torch.tensor([110, 110])},
        {"counts": torch.tensor([110, 110, 0])},
        {"counts": torch.tensor([110.0, 110.0, 110.0])},
        {"counts": torch.tensor([1, 110, 110])},
        {"sums": torch.zeros(3, 10, dtype=torch.float64)},
        {"sums": torch.zeros(3, 11)},
        {"sums": torch.full((3, 11), -1.0, dtype=torch.float64)},
        {"sums": torch.full((3, 11), math.nan, dtype=torch.float64)},
        {"sums": torch.full((3, 11), 1e9, dtype=torch.float64)},
    ],
)
def test_tensors_that_describe_nothing_are_refused(wrong: dict[str, Any]) -> None:
    named = {**follow(list(predictions(330).split(110))).to_tensors(), **wrong}
    with pytest.raises(ValueError, match=r"o\.sums"):
        Opinions.from_tensors("o.", {"o." + name: value for name, value in named.items()})


def test_of_no_samples_nothing_is_known() -> None:
    assert df.Estimate.of(torch.zeros(0, 3)).samples == 0
    assert str(df.Estimate.of(torch.zeros(0, 3))) == "unknown"
    with pytest.raises(ValueError, match=r"log_probabilities must be of shape \[..., k\]"):
        df.Estimate.of(torch.zeros(3))
    with pytest.raises(ValueError, match="last must be an integer >= 1"):
        df.Estimate.of(torch.zeros(2, 3), last=0)


@pytest.mark.parametrize(("at_home", "plain"), [(0.9, 0.7), (0.6, 0.95)])
def test_unlabelled_source_data_say_what_the_drop_of_confidence_means(
    at_home: float, plain: float
) -> None:
    """Half of it is 0.05 + 2.2 points for each point of plain confidence lost, 0 or more."""
    logp = predictions(300)
    error, _ = by_hand(logp)
    opinions = Opinions.of(logp, torch.full((300,), plain, dtype=torch.float64))
    found = Expectation(opinions, SourceCalibration(None, at_home)).estimate
    expected = 0.5 * error + 0.5 * max(0.0, 0.05 + 2.2 * (at_home - plain))
    assert found.accuracy == pytest.approx(1 - expected, rel=1e-9)
    reach = found.high - found.accuracy
    assert reach == pytest.approx(by_hand_reach(logp, expected), rel=1e-9)


def test_drop_of_confidence_does_not_count_without_smoothing_nor_of_tables() -> None:
    opinions = Opinions.of(predictions(300))
    corrected = Expectation(opinions, SourceCalibration(None, 0.99, corrected=True)).estimate
    assert corrected == Expectation(opinions).estimate
    home = Home(torch.tensor([40.0, 33.0], dtype=torch.float64), 50)
    found = Expectation(opinions, SourceCalibration(None, 0.99, home)).estimate
    assert found == Expectation(opinions._replace(home=home)).estimate


def by_hand_reach(logp: Tensor, error: float) -> float:
    sure = logp.exp().max(-1)[0]
    chance = float((sure * (1 - sure)).sum()) / len(logp) ** 2
    return 1.96 * math.sqrt(chance + (0.2 * error) ** 2)


def test_plain_confidences_change_nothing_without_source_data() -> None:
    logp = predictions(300)
    other = Opinions.of(logp, torch.full((300,), 0.1))
    assert Expectation(other).estimate == Expectation(Opinions.of(logp)).estimate


def gaussian(x: Tensor, mean: float, variance: float) -> Tensor:
    return torch.exp(-((x - mean) ** 2) / (2 * variance)) / math.sqrt(2 * math.pi * variance)


@pytest.mark.parametrize(
    ("mean", "variance", "own", "own_variance"),
    [(0.8, 0.02, 0.8, 0.02), (0.95, 0.004, 0.7, 0.03), (0.6, 0.01, 0.9, 0.001), (0.99, 0, 0.5, 0)],
)
def test_distance_from_home_is_that_of_hellinger(
    mean: float, variance: float, own: float, own_variance: float
) -> None:
    """H² = 1 - ∫ √(f g), by quadrature."""
    n = 40
    home = Home(n * torch.tensor([own, own_variance + own**2], dtype=torch.float64), n)
    x = torch.linspace(-2, 3, 2_000_001, dtype=torch.float64)
    f, g = gaussian(x, mean, max(variance, 1e-3)), gaussian(x, own, max(own_variance, 1e-3))
    expected = 1 - float(torch.trapezoid((f * g).sqrt(), x))
    assert home.measure(mean, variance + mean**2) ** 2 == pytest.approx(expected, abs=1e-9)


def follow_table(batches: list[Tensor]) -> Opinions:
    known = Opinions.of(batches[0], table=True)
    for batch in batches[1:]:
        known = known.extend(Opinions.of(batch, table=True))
    return known


def test_home_is_the_first_samples_of_a_table() -> None:
    logp = predictions(3 * WINDOW)
    known = follow_table(list(logp.split(70)))
    sure = logp[: 70 * 8].exp().amax(-1)  # the first batches that are 500 together
    assert known.home is not None
    assert HOME <= known.home.samples == 560 < HOME + 70
    torch.testing.assert_close(known.home.sums, torch.stack((sure.sum(), sure.square().sum())))
    assert follow(list(logp.split(70))).home is None


@pytest.mark.parametrize("scale", [0.5, 6.0])
def test_tables_are_expected_to_be_worse_away_from_home(scale: float) -> None:
    """Whether confidence falls or rises: 0.4 H are added to the error, of which κ is a half."""
    first, then = predictions(HOME), predictions(2 * WINDOW, seed=1, scale=scale)
    known = follow_table([first, *then.split(500)])
    seen = then[-WINDOW:]
    means = [each.exp().amax(-1) for each in (seen, first)]
    moments = [(float(each.mean()), float(each.var(correction=0))) for each in means]
    x = torch.linspace(-3, 4, 200_001, dtype=torch.float64)
    alike = (gaussian(x, *moments[0]) * gaussian(x, *moments[1])).sqrt()
    distance = math.sqrt(1 - float(torch.trapezoid(alike, x)))
    assert distance > 0.2
    error = by_hand(seen)[0] + 0.4 * distance
    chance = by_hand(seen, kappa=0)[1] / 1.96
    reach = 1.96 * math.sqrt(chance**2 + (0.5 * error) ** 2)
    found = Expectation(known).estimate
    assert found.accuracy == pytest.approx(1 - error, rel=1e-6)
    assert found.low == pytest.approx(max(0.0, 1 - error - reach), abs=1e-6)
    assert found.high == pytest.approx(min(1.0, 1 - error + reach), abs=1e-6)


def test_tensors_describe_a_home() -> None:
    known = follow_table(list(predictions(330).split(110)))
    again = Opinions.from_tensors("o.", name_all(known))
    assert again.home is not None
    assert known.home is not None
    assert torch.equal(again.home.sums, known.home.sums)
    assert again.home.samples == 330
    more = [each.extend(Opinions.of(predictions(50), table=True)) for each in (known, again)]
    assert Expectation(more[0]).estimate == Expectation(more[1]).estimate


def name_all(known: Opinions) -> dict[str, Tensor]:
    return {"o." + name: value for name, value in known.to_tensors().items()}


@pytest.mark.parametrize(
    "wrong",
    [
        torch.tensor([330.0, 200.0, 150.0]),
        torch.tensor([330.0, 200.0], dtype=torch.float64),
        torch.tensor([0.0, 0.0, 0.0], dtype=torch.float64),
        torch.tensor([3.5, 2.0, 1.0], dtype=torch.float64),
        torch.tensor([330.0, 400.0, 150.0], dtype=torch.float64),
        torch.tensor([330.0, 200.0, 250.0], dtype=torch.float64),
        torch.tensor([330.0, math.nan, 150.0], dtype=torch.float64),
    ],
)
def test_tensors_that_describe_no_home_are_refused(wrong: Tensor) -> None:
    known = follow_table(list(predictions(330).split(110)))
    with pytest.raises(ValueError, match=r"o\.home"):
        Opinions.from_tensors("o.", {**name_all(known), "o.home": wrong})


def test_of_one_class_nothing_is_known() -> None:
    found = df.Estimate.of(torch.zeros(50, 1))
    assert (found.samples, found.low, found.high) == (0, 0.0, 1.0)
    assert math.isnan(found.accuracy)

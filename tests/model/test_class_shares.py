"""Shares of classes that are a stream's own: against Dirichlet–multinomial probabilities of sure
classifiers and plain loops for others; what a chain of labels and an adapter do with them.
"""

from math import exp, lgamma, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import driftfilter as df
from driftfilter.model.class_shares import Shares
from driftfilter.model.label_chain import RUNS
from oracles import array
from small import assert_same, conv, normal, stream

SKEWED = df.LabelChain(skew=0.1)


def polya(labels: tuple[int, ...], a: float, classes: int) -> float:
    """The probability of labels in this order if their shares are of Dirichlet(a, …, a)."""
    counts = [labels.count(label) for label in range(classes)]
    filled = sum(lgamma(a + count) - lgamma(a) for count in counts)
    return exp(filled + lgamma(classes * a) - lgamma(classes * a + len(labels)))


LABELS = (0, 1, 0, 0, 2, 0)


def test_sure_classifiers_are_counted_as_labels() -> None:
    """Counts are those of the labels, and the hypotheses have Dirichlet–multinomial
    probabilities.
    """
    found = Shares.start(3).follow(np.eye(3)[list(LABELS)], 1.0, 5.0)
    np.testing.assert_allclose(found.counts, [[4, 1, 1]] * 2, rtol=1e-12)
    np.testing.assert_allclose(found.ratio, polya(LABELS, 1.0, 3) / polya(LABELS, 5.0, 3))


def entropy(p: list[float]) -> float:
    return -sum(share * log(share) for share in p if share > 0)


def test_unknown_labels_are_counted_by_what_is_known_before_them() -> None:
    """A plain loop of quasi-Bayes over both hypotheses, by certainty and half of it."""
    p = array(normal(5, 3, seed=2).softmax(-1))
    found, ratio = Shares.start(3).follow(p, 0.5, 5.0), 1.0
    for place, a in enumerate((1.0, 5.0)):
        counts = [0.0] * 3
        for sample in p.tolist():
            weight = 0.5 * (1 - entropy(sample) / log(3))
            shares = [(a + count) / (3 * a + sum(counts)) for count in counts]
            chance = sum(own * share for own, share in zip(sample, shares, strict=True))
            ratio *= (chance if a == 1 else 1 / chance) ** weight
            each = zip(counts, sample, shares, strict=True)
            counts = [count + weight * own * share / chance for count, own, share in each]
        np.testing.assert_allclose(found.counts[place], counts)
    np.testing.assert_allclose(found.ratio, ratio)


def test_runs_count_for_nothing() -> None:
    none = Shares.start(3).follow(np.eye(3)[list(LABELS)], 0.0, 5.0)
    assert none.counts.max() == 0
    assert none.ratio == 1


def test_what_is_gained_without_a_bias() -> None:
    """Mutual information of predictions p / m over that of p, in plain loops."""
    p = normal(8, 3, seed=4).softmax(-1).tolist()
    m = [1 + sum(sample[y] for sample in p) for y in range(3)]
    q = [[own / share for own, share in zip(sample, m, strict=True)] for sample in p]
    q = [[own / sum(sample) for own in sample] for sample in q]
    information = []
    for samples in (p, q):
        mean = [sum(sample[y] for sample in samples) / 8 for y in range(3)]
        information.append(entropy(mean) - sum(entropy(sample) for sample in samples) / 8)
    found = Shares.start(3).follow(np.array(p), 1.0, 5.0)
    np.testing.assert_allclose(found.gain(), information[1] - information[0])
    unsure = sum(entropy(sample) for sample in p) / 8 / log(3)
    np.testing.assert_allclose(found.certainty(), 1 - unsure)


def test_what_was_counted_fades() -> None:
    """After 300 samples, or 30 of each class, nothing is left of what was before."""
    first = Shares.start(3).follow(array(normal(40, 3).softmax(-1)), 1.0, 5.0)
    p = array(normal(300, 3, seed=1).softmax(-1))
    third, none = (each.follow(p[:100], 0.0, 5.0) for each in (first, Shares.start(3)))
    np.testing.assert_allclose(third.counts, 2 / 3 * first.counts, atol=1e-14)
    np.testing.assert_allclose(third.ratio, first.ratio ** (2 / 3))
    np.testing.assert_allclose(third.predicted[0] - none.predicted[0], 2 / 3 * first.predicted[0])
    late, anew = (each.follow(p, 1.0, 5.0) for each in (first, Shares.start(3)))
    np.testing.assert_array_equal(late.pack(), anew.pack())
    many = Shares(*(np.ones((2, 20)),) * 2, np.ones(2), 1.0).follow(np.eye(20)[:6], 0.0, 5.0)
    np.testing.assert_allclose(many.counts, 0.99)


@pytest.mark.parametrize(
    ("gain", "trust"), [(-0.1, 1.0), (0.02, 1.0), (0.03, 0.5), (0.04, 0.0), (0.5, 0.0)]
)
@pytest.mark.parametrize(("certainty", "right"), [(0.5, 0.0), (0.65, 0.5), (0.7, 1.0), (0.9, 1.0)])
def test_labels_have_the_mean_share(
    gain: float, trust: float, certainty: float, right: float
) -> None:
    """Less of it the more information there is without a bias, and the less sure samples are."""
    sums = np.array([[4.0, 2.0, 2.0], [4.0, 2.0, 2.0]])
    counts = np.array([[5.0, 2.0, 0.0], [4.0, 2.0, 1.0]])
    entropies = 8 * (log(3) * (1 - certainty) - np.array((0.0, gain)))
    known = Shares(counts, sums, entropies, 3.0)
    chance = trust * right * 0.1 * 3 / (0.1 * 3 + 0.9)
    mean = chance * np.array([6, 3, 1]) / 10 + (1 - chance) / 3
    np.testing.assert_allclose(known.chance(0.1), chance, atol=1e-12)
    np.testing.assert_allclose(known.correct(0.1), 3 * mean)


def test_before_the_first_sample_shares_are_equal() -> None:
    np.testing.assert_array_equal(Shares.start(3).correct(0.1), np.ones(3))


# ------------------------------------------------------------------ in a chain of labels


def draw(shares: tuple[float, ...], n: int = 1000) -> Tensor:
    weights = torch.tensor(shares)
    return weights.multinomial(n, True, generator=torch.Generator().manual_seed(0))


def classify(labels: Tensor, bias: tuple[float, ...] = (0.0,) * 5) -> Tensor:
    """log p(y given x) [n, 5] as they are if shares are equal, but for a bias."""
    noise = normal(len(labels), 5)
    logits = 2.5 * (noise + 2.5 * torch.eye(5).double()[labels])  # log p(x given y)
    return (logits + torch.tensor(bias).double()).log_softmax(-1)


def chance(known: Tensor) -> float:
    """That the shares are skewed."""
    return Shares.unpack(array(known[-1, 5:-1])).chance(0.1)


def measure(log_probabilities: Tensor, labels: Tensor) -> tuple[float, float]:
    """Accuracy and NLL."""
    right = (log_probabilities.argmax(-1) == labels).double().mean()
    return float(right), float(-log_probabilities.gather(1, labels[:, None]).mean())


TAILED = (0.45, 0.25, 0.15, 0.1, 0.05)


@pytest.mark.parametrize("batch", [1, 50])
def test_own_shares_are_found_and_used(batch: int) -> None:
    labels = draw(TAILED)
    alone = classify(labels)
    together, known = stream(SKEWED, alone, batch)
    best = (alone + torch.tensor(TAILED).log()).log_softmax(-1)
    plain, own, ideal = (measure(each, labels)[1] for each in (alone, together, best))
    assert ideal < plain - 0.02
    assert own < plain - 0.6 * (plain - ideal)
    assert measure(together, labels)[0] > measure(alone, labels)[0]
    counts = known[-1, 5:10]
    torch.testing.assert_close(
        counts / counts.sum(), torch.tensor(TAILED).double(), rtol=0, atol=0.08
    )
    assert chance(known) > 0.9


@pytest.mark.parametrize("batch", [1, 50])
@pytest.mark.parametrize(("bias", "most"), [(0.0, 0.1), (0.5, 0.25)], ids=["fair", "biased"])
def test_equal_shares_lose_nothing(bias: float, most: float, batch: int) -> None:
    """Nor if a classifier has some bias."""
    labels = draw((0.2,) * 5)
    alone = classify(labels, (bias, 0.0, 0.0, 0.0, -bias))
    together, known = stream(SKEWED, alone, batch)
    plain, own = measure(alone, labels), measure(together, labels)
    assert own[0] > plain[0] - 0.002
    assert own[1] < plain[1] + 0.005
    assert chance(known) < most


def test_a_large_bias_that_cuts_through_clusters_is_none_of_the_stream() -> None:
    """Two of five samples are called one class: without it there is more information."""
    labels = draw((0.2,) * 5)
    alone = classify(labels, (5.0, 0.0, 0.0, 0.0, 0.0))
    assert float(alone.exp().mean(0)[0]) > 0.4
    together, known = stream(SKEWED, alone, 50)
    shares = Shares.unpack(array(known[-1, 5:-1]))
    assert shares.gain() > 0.04
    assert shares.ratio > 1000
    assert chance(known) == 0
    assert measure(together, labels)[1] < measure(alone, labels)[1] + 0.02


def test_without_skew_nothing_is_new() -> None:
    alone = classify(draw(TAILED, 100))
    plain, skewed = stream(df.LabelChain(), alone, 20), stream(SKEWED, alone, 20)
    assert plain[1].shape == (9, 6)
    assert_same(skewed[1][:, :5], plain[1][:, :5])
    correction = torch.from_numpy(Shares.unpack(array(skewed[1][-1, 5:-1])).correct(0.1))
    expected = plain[0] + correction.log()
    torch.testing.assert_close(skewed[0][-20:], expected.log_softmax(-1)[-20:])


def test_batches_of_one_leave_the_same() -> None:
    """Two batches of one, or one of two: what fades in between is next to nothing."""
    alone = classify(draw(TAILED, 2))
    chain = df.LabelChain((0.0, 1e-9), 1 - 1e-9, window=1e12, skew=0.01)
    whole, single = (stream(chain, alone, batch)[1] for batch in (2, 1))
    torch.testing.assert_close(whole, single, rtol=0, atol=1 / 300)


def test_classes_that_are_impossible_or_sure_are_no_wrong_numbers() -> None:
    alone = torch.tensor([[0.0, -torch.inf, -torch.inf], [-torch.inf, 0.0, 0.0]]).log_softmax(-1)
    together, known = stream(df.LabelChain(skew=0.5, bias=1e6), alone.repeat(300, 1), 100)
    assert bool(known.isfinite().all())
    assert not bool(together.isnan().any())


def test_wrong_numbers_are_refused() -> None:
    for skew in (-0.1, 1.0):
        with pytest.raises(ValueError, match=r"LabelChain\.skew"):
            df.LabelChain(skew=skew)
    with pytest.raises(ValueError, match=r"LabelChain\.bias"):
        df.LabelChain(bias=0.0)
    known = df.LabelChain()(normal(3, 4).log_softmax(-1), None)[1]
    with pytest.raises(ValueError, match=r"LabelChain: known.*shape \[9, 24\]"):
        SKEWED(normal(3, 4).log_softmax(-1), known)
    other = df.LabelChain(skew=0.2)(normal(3, 4).log_softmax(-1), None)[1]
    with pytest.raises(ValueError, match=r"LabelChain: known"):
        SKEWED(normal(3, 4).log_softmax(-1), other)


# ------------------------------------------------------------------ in an adapter


BATCHES = normal(160, 3, 8, 8, seed=2).float().split(20)


def adapter(**options: Any) -> df.Adapter:
    torch.manual_seed(0)
    return df.adapt(conv(), **options)


def test_only_the_default_of_batch_norm_looks_for_shares() -> None:
    """Other networks have biases as large as shares are."""
    recipes = {norms: df.presets.get("driftfilter", norms=norms) for norms in ("batch", "other")}
    skews = {norms: recipe.labels.skew for norms, recipe in recipes.items() if recipe.labels}
    assert skews == {"batch": 0.1, "other": 0.0}


def test_a_stream_goes_on_after_saving(tmp_path: Path) -> None:
    whole, first, second = adapter(), adapter(), adapter()
    expected = [whole(x) for x in BATCHES]
    for x in BATCHES[:3]:
        first(x)
    assert first.state_dict()["labels"].shape == (9, 19)
    df.save(first, tmp_path / "s.safetensors")
    df.load(second, tmp_path / "s.safetensors")
    assert_same(torch.stack([second(x) for x in BATCHES[3:]]), torch.stack(expected[3:]))


@pytest.mark.parametrize(("saved", "loaded"), [(0.0, 0.1), (0.1, 0.0), (0.1, 0.2)])
def test_what_another_chain_knew_is_left_out(tmp_path: Path, saved: float, loaded: float) -> None:
    old, new = (adapter(labels=df.LabelChain(skew=skew)) for skew in (saved, loaded))
    for x in BATCHES[:3]:
        old(x)
    df.save(old, tmp_path / "s.safetensors")
    df.load(new, tmp_path / "s.safetensors", strict=False)
    assert "labels" not in new.state_dict()
    assert RUNS not in new.state.memory
    new(BATCHES[3])


def change(known: Tensor, row: int, column: int, value: float) -> Tensor:
    changed = known.clone()
    changed[row, column] = value
    return changed


@pytest.mark.parametrize(
    "crafted",
    [
        lambda known: change(known, -1, -2, 0.0),
        lambda known: change(known, 0, 4, 0.1),
        lambda known: change(known, -1, 4, -1.0),
        lambda known: change(known, -1, -1, 0.0),
        lambda known: known[:, 1:],
    ],
    ids=["impossible", "not empty", "negative", "of no skew", "a column less"],
)
def test_crafted_shares_are_refused(crafted: Any) -> None:
    adapted = adapter(labels=SKEWED)
    adapted(BATCHES[0])
    before = adapted.state_dict()
    with pytest.raises(ValueError, match="labels"):
        adapted.load_state_dict({**before, "labels": crafted(before["labels"])})
    assert_same(adapted.state_dict()["labels"], before["labels"])

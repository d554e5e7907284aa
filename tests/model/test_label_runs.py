"""Trust in shares of classes: against a plain loop over labels, and for streams in random order, in
runs and biased.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from driftfilter.model.label_runs import count_labels, independence, start_counts
from oracles import LabelRuns


def counted(labels: Tensor, classes: int, size: int, like: Tensor | None = None) -> Tensor:
    """Counts after labels in batches of a size."""
    counts = start_counts(classes, torch.zeros(1).double() if like is None else like)
    for batch in labels.split(size):
        counts = count_labels(counts, batch)
    return counts


def drawn(shares: list[float], samples: int = 3000, seed: int = 0) -> Tensor:
    """Labels of these shares in random order."""
    rng = np.random.default_rng(seed)
    return torch.tensor(rng.choice(len(shares), samples, p=shares))


@pytest.mark.parametrize("sizes", [(1,) * 9, (7, 1, 30, 2), (600, 5, 512, 1)])
@pytest.mark.parametrize("classes", [3, 5])
def test_counts_and_trust_are_those_of_a_loop(sizes: tuple[int, ...], classes: int) -> None:
    labels = drawn([1 / classes] * classes, sum(sizes)).sort().values.roll(3)
    labels[::4] = 0  # neither all in runs nor all shuffled
    counts, plain = start_counts(classes, torch.zeros(1).double()), LabelRuns(classes)
    assert independence(counts).item() == pytest.approx(plain.trust(), rel=1e-12)
    for batch in labels.split(sizes):
        before = counts.clone()
        new = count_labels(counts, batch)
        assert torch.equal(counts, before)  # not written to
        counts = new
        plain.count(batch.tolist())
        expected = [*plain.counts, plain.pairs, plain.equal, plain.last]
        np.testing.assert_allclose(counts, np.array(expected, float), rtol=1e-12)
        assert independence(counts).item() == pytest.approx(plain.trust(), rel=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 100, 1000])
@pytest.mark.parametrize(
    "shares", [[0.1] * 10, [0.5, *[0.5 / 9] * 9], [0.9, *[0.1 / 9] * 9]], ids=["equal", "½", "0.9"]
)
def test_labels_in_random_order_are_trusted_however_biased(
    shares: list[float], size: int, dtype: torch.dtype
) -> None:
    counts = counted(drawn(shares), 10, size, torch.zeros(1, dtype=dtype))
    trust = independence(counts)
    assert trust.dtype == counts.dtype == dtype
    assert trust.item() == pytest.approx(1, abs=0.07)


@pytest.mark.parametrize("size", [1, 16, 100])
def test_labels_in_runs_and_one_label_alone_are_not_trusted(size: int) -> None:
    runs = drawn([0.1] * 10, 60).repeat_interleave(64)
    assert independence(counted(runs, 10, size)) < 0.05
    assert independence(counted(runs[torch.randperm(len(runs))], 10, size)) > 0.85
    assert independence(counted(torch.full((2000,), 3), 10, size)) < 0.02


def test_trust_falls_with_the_length_of_runs() -> None:
    labels = drawn([0.1] * 10, 2000)
    trusts = [
        independence(counted(labels.repeat_interleave(length), 10, 50)).item()
        for length in (1, 2, 4, 16)
    ]
    assert trusts == sorted(trusts, reverse=True)
    assert trusts[0] > 1.05 * trusts[1] > 1.05**2 * trusts[2] > 1.05**3 * trusts[3]


def test_two_classes_are_trusted_only_if_their_shares_are_known() -> None:
    counts, plain = counted(drawn([0.5, 0.5], 300), 2, 300), LabelRuns(2)
    plain.count(drawn([0.5, 0.5], 300).tolist())
    assert independence(counts) == 0
    known = independence(counts, known=True).item()
    assert known == pytest.approx(plain.trust(known=True), rel=1e-10)
    assert known > 0.8

"""What the streams of a fleet have predicted lately, for an estimate of each.

The rules are those of inference/accuracy.py.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from driftfilter.base.checks import require
from driftfilter.inference.accuracy import BLOCK, WINDOW, Opinions, is_old, joins

BLOCKS = 2 * (WINDOW // BLOCK) + 2  # two neighbours have more than BLOCK samples together
SUMS, COUNTS = "opinions", "counts"  # in a file


class FleetOpinions(NamedTuple):
    """``Opinions`` of S streams, a row each; blocks that are not there yet have no samples."""

    sums: Tensor  # [S, BLOCKS, 2k + 3], the newest block last
    counts: Tensor  # [S, BLOCKS]

    @classmethod
    def start(cls, streams: int, classes: int) -> Self:
        """Of streams that have predicted nothing."""
        sums = torch.zeros(streams, BLOCKS, 2 * classes + 3, dtype=torch.float64)
        return cls(sums, torch.zeros(streams, BLOCKS, dtype=torch.int64))

    def join(self, others: Self) -> Self:
        """With more streams behind these."""
        return type(self)(*(torch.cat(pair) for pair in zip(self, others, strict=True)))

    def pick(self, rows: Tensor) -> Self:
        """Of some streams."""
        return type(self)(self.sums[rows], self.counts[rows])

    def of(self, row: int) -> Opinions | None:
        """Those of one stream; None if it has predicted nothing."""
        there = self.counts[row] > 0
        if not there.any():
            return None
        return Opinions(self.sums[row, there], tuple(self.counts[row, there].tolist()))

    def extend(self, rows: Tensor, log_probabilities: Tensor) -> None:
        """Add batches of some streams [m, steps, n, k], one after the other, in place."""
        for batch in log_probabilities.unbind(1):
            self._add(rows, batch)

    def _add(self, rows: Tensor, log_probabilities: Tensor) -> None:
        """Add a batch of each of some streams [m, n, k]."""
        new, n = _sum_up(log_probabilities), log_probabilities.shape[1]
        fit = joins(self.counts[rows, -1], n)
        few, others = rows[fit], rows[~fit]
        self.sums[few, -1] += new[fit]
        self.counts[few, -1] += n
        own = torch.full((len(others), 1), n)
        self.sums[others] = torch.cat((self.sums[others, 1:], new[~fit, None]), 1)
        self.counts[others] = torch.cat((self.counts[others, 1:], own), 1)
        counts = self.counts[rows]
        newer = counts.flip(1).cumsum(1).flip(1) - counts
        where, blocks = (is_old(newer) & (counts > 0)).nonzero(as_tuple=True)
        self.sums[rows[where], blocks] = 0.0
        self.counts[rows[where], blocks] = 0

    def to_tensors(self) -> dict[str, Tensor]:
        """As named tensors, for a file."""
        return {SUMS: self.sums, COUNTS: self.counts}

    @classmethod
    def from_tensors(cls, own: Mapping[str, Tensor]) -> Self:
        """What named tensors of the right shapes describe; refused unless they may be that."""
        known = cls(own[SUMS], own[COUNTS])
        require(bool((known.counts >= 0).all()), f"its {COUNTS!r}", known.counts, "numbers >= 0")
        there = known.counts > 0
        require(not bool(known.sums[~there].any()), f"its {SUMS!r}", "sums of no samples", "0")
        if there.any():  # each block by itself: the rules are the same for all
            sums, counts = known.sums[there], known.counts[there]
            Opinions.from_tensors("its ", {"its sums": sums, "its counts": counts})
        return known


def _sum_up(log_probabilities: Tensor) -> Tensor:
    """The sums of ``Opinions`` of log-probabilities [m, n, k]: [m, 2k + 3]."""
    wide = log_probabilities.detach().to("cpu", torch.float64).exp()
    sure, labels = wide.max(-1)
    said = torch.zeros(len(wide), wide.shape[-1], dtype=wide.dtype)
    said.scatter_add_(1, labels, torch.ones_like(sure))
    moments = torch.stack((sure.sum(1), sure.square().sum(1), sure.sum(1)), 1)
    return torch.cat((wide.sum(1), said, moments), 1)

"""A batch in shards: several processes (ranks) have some of its samples each, and exchange what
depends on all of them.

For the time of a call every rank knows the ``Shards`` of the batch. Whatever sums, averages or
looks over samples asks for them here; outside such a call all of this is the identity. The samples
of rank 0 come first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from driftfilter.base.inputs import Inputs, each


class Ranks(Protocol):
    """The processes of one stream."""

    rank: int  # of this one

    def gather(self, tensor: Tensor) -> Tensor:
        """What every rank has, of one shape [...] everywhere: [ranks, ...]."""

    def total(self, tensor: Tensor) -> Tensor:
        """Its sum over the ranks, the same to the last bit on each."""


class Shards(NamedTuple):
    """How one batch is divided; a rank without a sample computes with one that counts nowhere."""

    ranks: Ranks
    sizes: tuple[int, ...]  # samples of every rank

    @property
    def samples(self) -> int:
        """Samples of this rank."""
        return self.sizes[self.ranks.rank]

    @property
    def mine(self) -> slice:
        """This rank's samples among all of them."""
        start = sum(self.sizes[: self.ranks.rank])
        return slice(start, start + self.samples)

    def cat(self, own: Tensor, dim: int = 0) -> Tensor:
        """The samples of all ranks one after the other, from this rank's [n, ...] (along
        ``dim``).
        """
        own = own.movedim(dim, 0)[: self.samples]
        padded = own.new_zeros(max(self.sizes), *own.shape[1:])
        padded[: len(own)] = own
        pieces = zip(self.ranks.gather(padded), self.sizes, strict=True)
        return torch.cat([piece[:size] for piece, size in pieces]).movedim(0, dim)

    def own(self, every: Tensor, dim: int = 0) -> Tensor:
        """This rank's part of something that all samples have; zeros for the sample that does not
        count.
        """
        part = every.movedim(dim, 0)[self.mine]
        part = part if self.samples else part.new_zeros(1, *part.shape[1:])
        return part.movedim(0, dim)

    def moments(
        self, mean: Tensor, variance: Tensor, values: int, samples: int
    ) -> tuple[Tensor, Tensor, int, int]:
        """Mean and variance [c] of the values of all ranks, and how many these and the samples are;
        differentiable.

        m = Σ_r n_r m_r / n,  v = Σ_r n_r (v_r + (m_r - m)²) / n
        """
        counts = mean.new_tensor([values, samples] if self.samples else [0, 0])
        every: Tensor = _Gathered.apply(torch.cat((mean, variance, counts)), self.ranks)  # type: ignore[no-untyped-call]
        means, variances, counts = every.split([len(mean), len(mean), 2], 1)
        shares = counts[:, :1] / counts[:, :1].sum()
        center = (shares * means).sum(0)
        spread = (shares * (variances + (means - center).square())).sum(0)
        values, samples = (int(count) for count in counts.detach().sum(0).tolist())
        return center, spread, values, samples


class _Gathered(torch.autograd.Function):
    """[...] of each rank -> [ranks, ...]; what is differentiated is the sum of the ranks'
    losses.
    """

    @staticmethod
    def forward(own: Tensor, ranks: Ranks) -> Tensor:
        return ranks.gather(own)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Ranks], output: Tensor) -> None:
        ctx.ranks = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.total(gradient)[ctx.ranks.rank], None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:
        every: Tensor = ctx.ranks.gather(tangent)
        return every


_CURRENT: ContextVar[Shards | None] = ContextVar("shards", default=None)

# The shards of the batch at hand; None if this process has all of it.
current = _CURRENT.get


@contextmanager
def among(shards: Shards | None) -> Iterator[None]:
    """For the time of this block the batch is divided like that; None: this process is by
    itself.
    """
    before = _CURRENT.set(shards)
    try:
        yield
    finally:
        _CURRENT.reset(before)


def gather_samples(own: Tensor) -> Tensor:
    """What all ranks' samples have, from this rank's [n, ...]."""
    shards = current()
    return own if shards is None else shards.cat(own)


def total_samples(own: int) -> int:
    """Samples of all ranks, for a batch of so many here."""
    shards = current()
    return own if shards is None else sum(shards.sizes)


def place_samples(inputs: Inputs) -> Inputs:
    """This rank's samples at their place among zeros for those of others, so that draws are those
    of the whole batch.
    """
    shards = current()
    if shards is None:
        return inputs

    def place(part: Tensor) -> Tensor:
        if part.dim() == 0 or part.shape[0] != max(shards.samples, 1):
            return part
        whole = part.new_zeros(sum(shards.sizes), *part.shape[1:])
        whole[shards.mine] = part[: shards.samples]
        return whole

    return each(inputs, place)


def take_samples(inputs: Inputs) -> Inputs:
    """This rank's samples of a whole batch: the way back."""
    shards = current()
    if shards is None:
        return inputs
    count = sum(shards.sizes)
    return each(
        inputs, lambda part: shards.own(part) if part.dim() > 0 and part.shape[0] == count else part
    )

"""A model of some samples of a batch, for losses that look at augmented views of these alone."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from driftfilter.base.inputs import Inputs, sample
from driftfilter.base.sharding import Shards, among, current
from driftfilter.model.predictive import Draw, ModelAround, Pullback, PullbackAround


@final
@dataclass(frozen=True, eq=False)
class SomeSamples(ModelAround):
    """A model of some samples of a batch, as one of all of them: the logits of the others are 0,
    and nothing flows back from them.

    It is called with the inputs of those samples alone (``take``), so that batch statistics are
    theirs too.
    """

    index: Tensor  # [m], their places among all samples, in order
    samples: int  # n, all of them

    @property
    def _shards(self) -> Shards | None:
        """How these samples are divided among ranks, if the batch is."""
        shards = current()
        if shards is None:
            return None
        ends = torch.tensor(shards.sizes).cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        own = [
            int(((self.index >= start) & (self.index < end)).sum())
            for start, end in zip(starts, ends, strict=True)
        ]
        return Shards(shards.ranks, tuple(own))

    def take(self, inputs: Inputs) -> Inputs:
        """The inputs of these samples, of those that a rank has; of one if it has none."""
        shards, index = current(), self.index
        if shards is not None:
            mine = shards.mine
            index = index[(index >= mine.start) & (index < mine.stop)] - mine.start
        return sample(inputs, index if len(index) else index.new_zeros(1))

    def count_samples(self, inputs: Inputs) -> int:
        return self.samples

    def draw_views(self, draw: Draw, inputs: Inputs) -> tuple[Inputs, ...]:
        own = self.take(inputs)
        with among(self._shards):
            return self.model.draw_views(draw, own)

    def _place(self, own: Tensor) -> Tensor:
        """Logits of these samples [..., m, k] among zeros [..., n, k]."""
        whole = own.new_zeros(*own.shape[:-2], self.samples, own.shape[-1])
        return whole.index_copy(-2, self.index, own)

    def __call__(self, theta: Tensor, inputs: Inputs) -> Tensor:
        with among(self._shards):
            return self._place(self.model(theta, inputs))

    def pullback(self, theta: Tensor, inputs: Inputs) -> tuple[Tensor, Pullback]:
        with among(self._shards):
            logits, inner = self.model.pullback(theta, inputs)
        return self._place(logits), _SomePullback(inner, self)

    def pushforward(self, theta: Tensor, inputs: Inputs, tangents: Tensor) -> Tensor:
        with among(self._shards):
            return self._place(self.model.pushforward(theta, inputs, tangents))


class _SomePullback(PullbackAround):
    def __init__(self, inner: Pullback, model: SomeSamples) -> None:
        super().__init__(inner)
        self.model = model

    def __call__(self, cotangents: Tensor) -> Tensor:
        with among(self.model._shards):
            rows = self.inner(cotangents.index_select(-2, self.model.index))
        return self.model._place(rows)

    def total(self, cotangents: Tensor) -> Tensor:
        with among(self.model._shards):
            return self.inner.total(cotangents[self.model.index])

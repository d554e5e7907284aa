"""Weightings that look at a batch again: at its inputs, changed, through the model."""

import math
from dataclasses import dataclass, field
from typing import Annotated, final

from torch import Tensor

from driftfilter.base.checks import (
    Checked,
    Interval,
    Positive,
    PositiveFraction,
    Role,
    register,
    require,
    unchecked,
)
from driftfilter.base.inputs import sample
from driftfilter.base.randomness import Purpose
from driftfilter.model.views import Augmentation, PatchShuffle, augment
from driftfilter.model.weighting import Batch, Memory, Weighting, entropy


@final
@dataclass(frozen=True)
class ProbabilityDrop(Checked):
    """w_i = β (exp(E₀ - H_i) + exp d_i) if H_i < E₁ and d_i > ``drop``, else 0 (DeYO).

    d_i = p_ŷ(x_i) - p_ŷ(x'_i) is what the most likely class ŷ loses by an augmentation that
    destroys the shape of an object and leaves its colours and textures. E₀ = fraction · ln k, E₁ =
    limit · ln k. Only samples with H_i < E₁ (and a weight) pass through the model again, in a batch
    of their own.
    """

    augmentation: Annotated[Augmentation, Role("augmentation", "PatchShuffle(4)")] = field(
        default_factory=PatchShuffle
    )
    drop: Annotated[float, Interval(-1, 1)] = 0.2
    fraction: PositiveFraction = 0.4
    limit: PositiveFraction = 0.5
    beta: Positive = 1.0

    def look(self, batch: Batch) -> Weighting:
        return unchecked(ProbabilityDrop, **{**self.__dict__, "_batch": batch})

    def __call__(self, logits: Tensor, weights: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        size, uncertain = math.log(max(logits.shape[-1], 2)), entropy(logits)
        kept = ((weights > 0) & (uncertain < self.limit * size)).nonzero()[:, 0]
        drops = weights.new_full(weights.shape, -math.inf)
        if len(kept):
            drops[kept] = self._drops(logits[kept], kept)
        own = (self.fraction * size - uncertain).exp() + drops.exp()
        return weights * (self.beta * own * (drops > self.drop)), memory

    def _drops(self, logits: Tensor, kept: Tensor) -> Tensor:
        """d of some samples [m], by their logits [m, k] and their places in the batch [m]."""
        batch: Batch | None = self.__dict__.get("_batch")
        require(batch is not None, "ProbabilityDrop", "logits alone", "asked to look at a batch")
        assert batch is not None
        generator = batch.randomness.generator(Purpose.WEIGHTING)
        view = augment(self.augmentation, sample(batch.inputs, kept), generator)
        label = logits.argmax(-1, keepdim=True)
        before, after = logits.softmax(-1), batch.model(batch.theta, view).softmax(-1)
        return (before.gather(-1, label) - after.gather(-1, label)).squeeze(-1)


register(weighting=(ProbabilityDrop,))

"""Coordinates of the belief that are held: whatever a step does, their means and variances stay,
and they are independent of all others.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from driftfilter.base.checks import unchecked
from driftfilter.base.inputs import Inputs
from driftfilter.base.memory import remembered
from driftfilter.gaussian.belief import Belief
from driftfilter.model.predictive import ModelAround, PredictiveModel, Pullback, PullbackAround

# In the memory, if some are held: 1 for those and 0 for others, their means, their variances.
HELD = remembered("held", "3", "d")


# In the memory, if the noise renews covariances: the factors of the next prior's.
INFLATED = remembered("inflated", "d")


def inflate(belief: Belief, factors: Tensor) -> Belief:
    """D Σ D with D² = the factors [d]."""
    covariance = belief.covariance.propagate(factors.sqrt(), 0.0)
    return unchecked(Belief, mean=belief.mean, covariance=covariance)


def note_held(belief: Belief, where: Tensor) -> Tensor:
    """HELD [3, d] of a belief, for the coordinates of a mask [d]."""
    mask = where.to(belief.mean)
    return torch.stack((mask, belief.mean * mask, belief.covariance.variance() * mask))


def hold(belief: Belief, held: Tensor) -> Belief:
    """The belief with the held coordinates as they were: G Σ G + W, with G = 0 and W their
    variances there.
    """
    mask, means, variances = held
    mean = torch.where(mask > 0, means, belief.mean)
    covariance = belief.covariance.propagate(1 - mask, variances)
    return unchecked(Belief, mean=mean, covariance=covariance)


@final
@dataclass(frozen=True, eq=False)
class PartlyHeld(ModelAround):
    """A model of whose parameters some do not learn: their derivatives are 0."""

    free: Tensor  # [d], 1 for those that learn and 0 for those held

    def __call__(self, theta: Tensor, inputs: Inputs) -> Tensor:
        return self.model(theta, inputs)

    def pullback(self, theta: Tensor, inputs: Inputs) -> tuple[Tensor, Pullback]:
        logits, inner = self.model.pullback(theta, inputs)
        return logits, _PartlyHeldPullback(inner, self.free)

    def pushforward(self, theta: Tensor, inputs: Inputs, tangents: Tensor) -> Tensor:
        return self.model.pushforward(theta, inputs, tangents)


class _PartlyHeldPullback(PullbackAround):
    def __init__(self, inner: Pullback, free: Tensor) -> None:
        super().__init__(inner)
        self.free = free  # [d]

    def __call__(self, cotangents: Tensor) -> Tensor:
        return self.inner(cotangents) * self.free

    def total(self, cotangents: Tensor) -> Tensor:
        return self.inner.total(cotangents) * self.free


def free_others(model: PredictiveModel, held: Tensor | None) -> PredictiveModel:
    """The model in which only what is not held learns."""
    return model if held is None else PartlyHeld(model, 1 - held[0])

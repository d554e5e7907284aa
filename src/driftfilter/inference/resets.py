"""Upkeep: what is done to the belief after a step, beside the transition: restores and resets.
Filters of the parameters that an optimiser proposes are in iterates.py.

Each belongs to the move to the next step; it comes after the prediction, so that no prediction of
this step sees it. Restored parameters get the source's mean; covariances are left to the
transition, except in a full reset.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, final

import torch
from torch import Tensor

from driftfilter.base.checks import (
    Checked,
    Fraction,
    FractionBelowOne,
    Interval,
    PositiveCount,
    register,
    require,
    require_role,
    role_of,
    unchecked,
)
from driftfilter.base.memory import remembered
from driftfilter.base.randomness import Purpose, Randomness
from driftfilter.gaussian.belief import Belief
from driftfilter.inference.optimizers import GRADIENT, LOSS, OF_OPTIMIZER
from driftfilter.model.observation import Energy
from driftfilter.model.survey import forget
from driftfilter.model.weighting import Memory

# In the memory:
RUNNING_LOSS = remembered("upkeep.loss")  # e of ResetBelow


class Upkeep(Protocol):
    """A change of the belief between two steps."""

    def __call__(
        self, belief: Belief, energy: Energy, memory: Memory, randomness: Randomness
    ) -> tuple[Belief, Memory]:
        """Belief and memory for the next step; the energy is that of this one."""


def as_upkeeps(field: str, upkeep: Any) -> tuple[Upkeep, ...]:
    """None, one upkeep or several, one after the other."""
    if upkeep is None:
        return ()
    several = tuple(upkeep) if isinstance(upkeep, (tuple, list)) else (upkeep,)
    require(len(several) > 0, field, upkeep, "an upkeep, a tuple of one or more, or None")
    for each in several:
        require_role(field, each, "upkeep", "ResetEvery(1000), or a tuple of them")
    kinds = [type(each) for each in several if role_of(each) == "upkeep"]
    allowed = "with one of a kind: they share their memory and their draws"
    require(len(set(kinds)) == len(kinds), field, upkeep, allowed)
    return several


def _restore(belief: Belief, source: Belief, mask: Tensor) -> Belief:
    return unchecked(
        Belief, mean=torch.where(mask, source.mean, belief.mean), covariance=belief.covariance
    )


@final
@dataclass(frozen=True)
class ResetEvery(Checked):
    """Back to the source after every so many steps, whatever was learned (RDumb); all memory goes
    too, but for what is of the source.
    """

    steps: PositiveCount = 1000

    def __call__(
        self, belief: Belief, energy: Energy, memory: Memory, randomness: Randomness
    ) -> tuple[Belief, Memory]:
        return (
            (energy.require_source(), forget(memory))
            if (randomness.step + 1) % self.steps == 0
            else (belief, memory)
        )


@final
@dataclass(frozen=True)
class ResetBelow(Checked):
    """Back to the source when the running mean of the energy falls below ``loss``, a sign of
    collapse (SAR).

    e ← momentum · e + (1 - momentum) · E, from the first E; a step without information leaves it.
    All memory goes too, but for what is of the source and, with ``keep_optimizer``, the
    optimiser's: in SAR's code the momentum goes on.
    """

    loss: Annotated[float, Interval(-math.inf, math.inf)] = 0.2
    momentum: FractionBelowOne = 0.9
    keep_optimizer: bool = False

    def __call__(
        self, belief: Belief, energy: Energy, memory: Memory, randomness: Randomness
    ) -> tuple[Belief, Memory]:
        kept = {name: value for name, value in memory.items() if name != LOSS}
        now = memory.get(LOSS, energy.evaluation.value())
        if energy.samples.used == 0 or now.isnan():
            return belief, kept
        running = self.momentum * memory.get(RUNNING_LOSS, now) + (1 - self.momentum) * now
        if running.item() >= self.loss:
            return belief, {**kept, RUNNING_LOSS: running}
        left = {name: kept[name] for name in OF_OPTIMIZER if name in kept}
        kept = {**forget(memory), **left} if self.keep_optimizer else forget(memory)
        return energy.require_source(), kept


@final
@dataclass(frozen=True)
class RestoreRandomly(Checked):
    """Each parameter goes back to its source value with this probability (CoTTA); the noise Restore
    is its Gaussian form.
    """

    probability: Fraction = 0.01

    def __call__(
        self, belief: Belief, energy: Energy, memory: Memory, randomness: Randomness
    ) -> tuple[Belief, Memory]:
        generator = randomness.generator(Purpose.UPKEEP)
        draws = torch.rand(belief.dimension, generator=generator, device=belief.mean.device)
        return _restore(belief, energy.require_source(), draws < self.probability), memory


@final
@dataclass(frozen=True)
class RestoreIrrelevant(Checked):
    """Parameters whose squared gradient is below its ``quantile`` go back to their source value
    (PETAL).

    Needs ``GradientStep(keep_gradient=True)``.
    """

    quantile: Fraction = 0.03

    def __call__(
        self, belief: Belief, energy: Energy, memory: Memory, randomness: Randomness
    ) -> tuple[Belief, Memory]:
        if energy.samples.used == 0:  # a gradient in the memory would be an earlier step's
            return belief, memory
        gradient = memory.get(GRADIENT)
        require(
            gradient is not None,
            "the gradient in the memory",
            None,
            "there: GradientStep(keep_gradient=True)",
        )
        assert gradient is not None
        fisher = gradient.square()
        position = self.quantile * (len(fisher) - 1)  # torch.quantile, which is limited in size
        low = fisher.kthvalue(int(position) + 1).values
        high = fisher.kthvalue(math.ceil(position) + 1).values
        threshold = torch.lerp(low, high, position - int(position))
        return _restore(belief, energy.require_source(), fisher < threshold), memory


register(upkeep=(ResetEvery, ResetBelow, RestoreRandomly, RestoreIrrelevant))

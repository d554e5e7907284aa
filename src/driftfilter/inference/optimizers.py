"""The point-estimate limit that published methods use: an optimiser's step on the energy."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Protocol, final

import torch
from torch import Tensor

from driftfilter.base.checks import (
    Checked,
    Count,
    FractionBelowOne,
    NotNegative,
    Positive,
    Role,
    register,
    require,
    require_finite,
    require_number,
    unchecked,
)
from driftfilter.base.memory import remembered
from driftfilter.base.randomness import Randomness
from driftfilter.gaussian.belief import Belief
from driftfilter.inference.curvature import NoCurvature
from driftfilter.model.observation import Energy
from driftfilter.model.weighting import Memory

# In the memory:
VELOCITY = remembered("inference.velocity", "d")  # v of SGD
FIRST = remembered("inference.first", "d", beside="inference.second")  # of Adam
SECOND = remembered("inference.second", "d", beside="inference.count")
COUNT = remembered("inference.count", whole=True, beside="inference.first")
OF_OPTIMIZER = (VELOCITY, FIRST, SECOND, COUNT)
LOSS = remembered("inference.loss")  # E at the sharp point; NaN if every sample left there
GRADIENT = remembered("inference.gradient", "d")  # of the last step, if it is kept


class Optimizer(Protocol):
    """How a gradient becomes a step."""

    def __call__(self, gradient: Tensor, memory: Memory, theta: Tensor) -> tuple[Tensor, Memory]:
        """The step to subtract from θ [d], and the memory after it."""


@final
@dataclass(frozen=True)
class SGD(Checked):
    """θ ← θ - lr v, v ← momentum · v + g (g + momentum · v with ``nesterov``), as
    torch.optim.SGD. With ``weight_decay`` λ the gradient is g + λ θ.
    """

    lr: Positive = 1e-3
    momentum: FractionBelowOne = 0.0
    nesterov: bool = False
    weight_decay: NotNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.momentum > 0 or not self.nesterov,
            "SGD.nesterov",
            self.nesterov,
            "False without momentum",
        )

    def __call__(self, gradient: Tensor, memory: Memory, theta: Tensor) -> tuple[Tensor, Memory]:
        """The step to subtract [d], and the memory after it."""
        gradient = _decay(gradient, self.weight_decay, theta)
        if self.momentum == 0:
            return self.lr * gradient, memory
        before = memory.get(VELOCITY)
        velocity = gradient if before is None else self.momentum * before + gradient
        direction = gradient + self.momentum * velocity if self.nesterov else velocity
        return self.lr * direction, {**memory, VELOCITY: velocity}


@final
@dataclass(frozen=True)
class Adam(Checked):
    """Adam with bias correction, as torch.optim.Adam. With ``weight_decay`` λ the gradient is
    g + λ θ, which Adam rescales (``AdamW`` does not).
    """

    lr: Positive = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "betas", _check_betas("Adam.betas", self.betas))

    def __call__(self, gradient: Tensor, memory: Memory, theta: Tensor) -> tuple[Tensor, Memory]:
        """The step to subtract [d], and the memory after it."""
        gradient = _decay(gradient, self.weight_decay, theta)
        return _adapt_rates(gradient, memory, self.lr, self.betas, self.eps)


@final
@dataclass(frozen=True)
class AdamW(Checked):
    """θ ← θ - lr λ θ - Adam's step on g, as torch.optim.AdamW; λ is the ``weight_decay``."""

    lr: Positive = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "betas", _check_betas("AdamW.betas", self.betas))

    def __call__(self, gradient: Tensor, memory: Memory, theta: Tensor) -> tuple[Tensor, Memory]:
        """The step to subtract [d], and the memory after it."""
        step, memory = _adapt_rates(gradient, memory, self.lr, self.betas, self.eps)
        return _decay(step, self.lr * self.weight_decay, theta), memory


def _decay(vector: Tensor, rate: float, theta: Tensor) -> Tensor:
    return torch.add(vector, theta, alpha=rate) if rate else vector


def _check_betas(field: str, betas: object) -> tuple[float, float]:
    require(isinstance(betas, (tuple, list)) and len(betas) == 2, field, betas, "two numbers")
    assert isinstance(betas, (tuple, list))
    for beta in betas:
        require_number(field, beta, 0, 1, open_high=True)
    return betas[0], betas[1]


def _adapt_rates(
    gradient: Tensor, memory: Memory, lr: float, betas: tuple[float, float], eps: float
) -> tuple[Tensor, Memory]:
    """Adam's step: lr m̂ / (√v̂ + ε), and the memory with m, v and the number of steps."""
    count, first, second = 1, (1 - betas[0]) * gradient, (1 - betas[1]) * gradient.square()
    if COUNT in memory:
        count += int(memory[COUNT])
        first = torch.lerp(memory[FIRST], gradient, 1 - betas[0])
        second = second.add_(memory[SECOND], alpha=betas[1])
    scale = (second / (1 - betas[1] ** count)).sqrt() + eps
    step = lr / (1 - betas[0] ** count) * first / scale
    return step, {**memory, FIRST: first, SECOND: second, COUNT: torch.tensor(count)}


@final
@dataclass(frozen=True)
class GradientStep(Checked):
    """The point-estimate limit of published methods: the mean takes an optimiser's step on E, the
    covariance stays.

    SGD without momentum is ``Linearized(NoCurvature())`` from Σ⁻ = lr I; Adam is no filter, and is
    called what it is. ``anchor`` α adds α Λ_S (μ⁻ - μ_S) to the gradient, the pull of a fixed
    source posterior (EATA, PETAL). With a ``radius`` ρ the gradient is taken at μ⁻ + ρ g/|g| (SAM),
    samples being weighed again there. ``keep_gradient`` leaves the gradient in the memory for an
    upkeep that needs it. Steps on fewer than ``reference`` samples shrink in proportion, by n /
    reference, as a rate chosen for large batches should on small ones (0: never).
    """

    rule: Annotated[Optimizer, Role("optimizer", "SGD() or Adam()")] = field(default_factory=SGD)
    anchor: NotNegative = 0.0
    radius: NotNegative = 0.0
    reference: Count = 0
    keep_gradient: bool = False
    curvature = NoCurvature()

    def __call__(
        self, prior: Belief, energy: Energy, memory: Memory, randomness: Randomness
    ) -> tuple[Belief, Memory]:
        gradient = energy.at(prior.mean).gradient()
        if self.radius:
            length = gradient.norm().clamp_min(1e-12)
            sharp = energy.reweigh_at(prior.mean + gradient * (self.radius / length))
            if not sharp.coefficients.any():  # every sample left: there is nothing to step on
                return prior, {**memory, LOSS: torch.full_like(length, math.nan)}
            gradient, memory = sharp.gradient(), {**memory, LOSS: sharp.value()}
        if self.anchor:
            source = energy.source
            require(
                source is not None,
                "GradientStep.anchor",
                self.anchor,
                "0 if the energy does not know the source",
            )
            assert source is not None
            gradient = gradient + self.anchor * source.covariance.solve(prior.mean - source.mean)
        step, memory = self.rule(gradient, memory, prior.mean)
        if self.keep_gradient:
            memory = {**memory, GRADIENT: gradient}
        n = energy.samples.weights.shape[0]
        mean = torch.sub(
            prior.mean, step, alpha=min(1.0, n / self.reference) if self.reference else 1.0
        )
        require_finite("the posterior mean", mean)
        return unchecked(Belief, mean=mean, covariance=prior.covariance), memory


register(inference=(GradientStep,), optimizer=(SGD, Adam, AdamW))

"""Variational Bayes: natural-gradient steps to convergence."""

import math
from dataclasses import dataclass, field
from typing import Annotated, final

import torch
from torch import Tensor

from driftfilter.base.checks import (
    Checked,
    Count,
    NotNegative,
    PositiveCount,
    PositiveFraction,
    Role,
    register,
)
from driftfilter.base.memory import remembered
from driftfilter.base.randomness import Randomness
from driftfilter.gaussian.belief import Belief
from driftfilter.gaussian.covariance import compact
from driftfilter.inference.curvature import Curvature, Hessian
from driftfilter.inference.linearized import Nodes, condition_on, take_expectation
from driftfilter.model.observation import Energy
from driftfilter.model.weighting import Memory

RESIDUAL = remembered("inference.residual")  # length of a further full step


@final
@dataclass(frozen=True)
class Variational(Checked):
    """Variational Bayes: minimise E_q[E(θ)] + KL(q ‖ prior) over Gaussian q by damped
    natural-gradient steps.

    P ← (1 - r) P + r (P⁻ + E_q[H]),  μ ← μ - r P⁻¹ (P⁻(μ - μ⁻) + E_q[g]); the first step from the
    prior with r = 1 is BONG. H is the curvature; a ``Hessian`` is clipped after it is averaged,
    unless its ``clip`` says otherwise. Stops when a full step (r = 1) would move the mean by less
    than ``tolerance`` posterior standard deviations and no variance by more than that fraction, or
    after ``iterations``; ``memory["inference.residual"]`` is the length of a further full step. The
    rate is halved whenever that length grows, as it may under a projected covariance. The fixed
    point is the exact optimum if the curvature is the exact Hessian (a linear head, and no clipping
    there: a loss that is convex, or convex on average). With 0 samples and 0 nodes it is Newton's
    method to the mode and the Laplace approximation there.
    """

    curvature: Annotated[Curvature, Role("curvature", "Hessian()")] = field(default_factory=Hessian)
    samples: Count = 8
    nodes: Nodes = 0
    rate: PositiveFraction = 0.5
    iterations: PositiveCount = 100
    tolerance: NotNegative = 1e-6

    def __call__(
        self, prior: Belief, energy: Energy, memory: Memory, randomness: Randomness
    ) -> tuple[Belief, Memory]:
        posterior, rate, before = prior, float(self.rate), math.inf
        accumulated = removed = prior.mean.new_zeros(0, prior.dimension)
        for _ in range(self.iterations):
            gradient, factor, negative = take_expectation(
                posterior, energy, self.curvature, self.samples, self.nodes, randomness
            )
            accumulated = _blend(accumulated, factor, rate)
            if negative is not None:
                negative = removed = _blend(removed, negative, rate)
            covariance = condition_on(prior.covariance, accumulated, negative)
            slope = prior.covariance.solve(posterior.mean - prior.mean) + gradient
            step = covariance.apply(slope)
            covariance = covariance.truncate()
            changes = covariance.variance() / posterior.covariance.variance() - 1
            posterior = Belief(posterior.mean - rate * step, covariance)
            # Length of the full step in posterior standard deviations.
            residual = (step @ slope).clamp_min(0).sqrt()
            if residual < self.tolerance and changes.abs().max() < self.tolerance * rate:
                break
            if residual > max(before, self.tolerance):
                rate /= 2
            before = residual.item()
        return posterior, {**memory, RESIDUAL: residual}


def _blend(before: Tensor, now: Tensor, rate: float) -> Tensor:
    """A factor of (1 - r) FᵀF + r F'ᵀF', with no more rows than columns."""
    if rate < 1:
        now = torch.cat((before * math.sqrt(1 - rate), now * math.sqrt(rate)))
    return compact(now)


register(inference=(Variational,))

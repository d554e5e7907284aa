"""Upkeep that filters the parameters an optimiser proposes, θ̃, as noisy observations of slow ones.

Each comes after a gradient step from θ⁻ to θ̃, and says where the next one starts. φ is the hidden
parameter, θ_S the source's; φ starts there, and variances at 0.
"""

import math
from dataclasses import dataclass
from typing import Annotated, final

import torch
from torch import Tensor

from driftfilter.base.checks import (
    Checked,
    Fraction,
    Interval,
    NotNegative,
    Positive,
    PositiveCount,
    register,
    unchecked,
)
from driftfilter.base.memory import remembered
from driftfilter.base.randomness import Randomness
from driftfilter.gaussian.belief import Belief
from driftfilter.model.observation import Energy
from driftfilter.model.weighting import Memory

# In the memory:
HIDDEN = remembered("upkeep.hidden", "d")  # φ
VARIANCE = remembered("upkeep.variance")  # P
FIT = remembered("upkeep.fit", "3")  # ℓ of the last step, the sum of earlier Δ², their number
MOVES = remembered("upkeep.moves", "m")  # mean moves of the last steps
SETTLED = remembered("upkeep.settled", "2")  # number of steps; whether the variance has settled

_SIZE = 38400  # parameters of the network for which the authors chose their process noise
_NEARLY_ONE = 0.9999  # from here on the authors count a share as 1


def _noise(process: float, dimension: int) -> float:
    """q of d parameters, below 1: the authors' scale makes no sense beyond."""
    return min(process * dimension / _SIZE, 1.0)


def _moved(belief: Belief, mean: Tensor) -> Belief:
    return unchecked(Belief, mean=mean, covariance=belief.covariance)


@final
@dataclass(frozen=True)
class ContinualMomentum(Checked):
    """CMF: a Kalman filter with scalar variance P on the parameters an optimiser proposes, θ̃
    observed with noise.

    φ' = ρ φ + (1 - ρ) θ_S,  P' = ρ² P + q,  b = clip(r / (P' + r), floor, 1),  φ = b φ' + (1 - b)
    θ̃,  P = b P', θ = ρ θ̃ + (1 - ρ) φ;  q = process · d / 38400, r = 1 - q; φ starts at θ_S, P at
    0; b is 1 from 0.9999 on.
    """

    rho: Fraction = 0.99
    process: NotNegative = 0.005
    floor: Fraction = 0.89

    def __call__(
        self, belief: Belief, energy: Energy, memory: Memory, randomness: Randomness
    ) -> tuple[Belief, Memory]:
        source, proposed = energy.require_source().mean, belief.mean
        q = _noise(self.process, belief.dimension)
        hidden = torch.lerp(source, memory.get(HIDDEN, source), self.rho)
        variance = self.rho**2 * memory.get(VARIANCE, source.new_zeros(())) + q
        share = ((1 - q) / (variance + 1 - q).clamp_min(1e-12)).clamp_min(self.floor)
        share = torch.where(share < _NEARLY_ONE, share, torch.ones_like(share))
        hidden = share * hidden + (1 - share) * proposed
        mean = torch.lerp(hidden, proposed, self.rho)
        return _moved(belief, mean), {**memory, HIDDEN: hidden, VARIANCE: share * variance}


@final
@dataclass(frozen=True)
class LatentWeights(Checked):
    """SLWI: a Kalman filter as in ``ContinualMomentum``, which cuts a step that its own predictive
    density does not expect.

        μ = ρ φ + (1 - ρ) θ_S,   P' = ρ² P + q
        ℓ_t = -½ |θ̃ - μ|² / (P' + r),   Δ_t = ℓ_t - ℓ_{t-1}
        θ̂ = θ̃, or θ⁻ + (θ̃ - θ⁻) / cut if |Δ_t| > limit · √(mean of the Δ² before)
        φ = μ + P' / (P' + r) (θ̂ - μ),   P = P' r / (P' + r),   θ = μ + gain (θ̂ - μ)

    q = process · d / 38400, r = 1 - q. A limit of 2 is an interval of 95 % if the Δ are normal. ℓ
    is the log density of what the optimiser proposes, without the part that depends on t alone. The
    first difference that is tested is the second one.
    """

    rho: Fraction = 0.99
    process: NotNegative = 0.005
    gain: Fraction = 0.99
    limit: Positive = 2.0
    cut: Annotated[float, Interval(1, math.inf)] = 2.0

    def __call__(
        self, belief: Belief, energy: Energy, memory: Memory, randomness: Randomness
    ) -> tuple[Belief, Memory]:
        source, proposed = energy.require_source().mean, belief.mean
        q = _noise(self.process, belief.dimension)
        expected = torch.lerp(source, memory.get(HIDDEN, source), self.rho)
        variance = self.rho**2 * memory.get(VARIANCE, source.new_zeros(())) + q
        spread = (variance + 1 - q).clamp_min(1e-12)
        fit = -(proposed - expected).square().sum() / (2 * spread)
        surprises, kept = self._judge(fit, memory.get(FIT))
        step = proposed - energy.anchor
        observed = torch.where(surprises, energy.anchor + step / self.cut, proposed)
        hidden = torch.lerp(expected, observed, variance / spread)
        left = {HIDDEN: hidden, VARIANCE: variance * (1 - q) / spread, FIT: kept}
        return _moved(belief, torch.lerp(expected, observed, self.gain)), {**memory, **left}

    def _judge(self, fit: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Whether ℓ_t is a surprise, and what is to be known of it."""
        nothing = torch.zeros_like(fit)
        if before is None:
            return nothing.bool(), torch.stack((fit, nothing, nothing))
        last, squares, count = before.unbind()
        difference = (fit - last).square()
        surprises = (count > 0) & (difference * count > self.limit**2 * squares)
        return surprises, torch.stack((fit, squares + difference, count + 1))


@final
@dataclass(frozen=True)
class SteadyState(Checked):
    """SSA: steps shrink or grow until the mean parameter moves with a set ``variance`` S, beside a
    Kalman filter of fixed gains.

        m_t = mean over parameters of θ⁻ - θ̃
        V = variance of m_t and as many s m before as ``moves`` says,   s = √(S / V)
        θ' = θ⁻ + s (θ̃ - θ⁻),   φ = β (ρ φ + (1 - ρ) θ_S) + (1 - β) θ',   θ = (1 - κ) θ' + κ φ

    β = ``retention``, κ = ``pull``. s is 1 until one move more is known and s has once been below
    √2.
    """

    variance: Positive = 1e-12
    moves: PositiveCount = 96
    rho: Fraction = 0.99
    retention: Fraction = 0.94
    pull: Fraction = 0.01

    def __call__(
        self, belief: Belief, energy: Energy, memory: Memory, randomness: Randomness
    ) -> tuple[Belief, Memory]:
        source, step = energy.require_source().mean, belief.mean - energy.anchor
        moves = memory.get(MOVES, source.new_zeros(self.moves))
        count, steady = memory.get(SETTLED, source.new_zeros(2)).unbind()
        move = -step.mean()
        spread = torch.cat((moves, move.view(1))).var(correction=0)
        size = (self.variance / spread.clamp_min(torch.finfo(spread.dtype).tiny)).sqrt()
        steady = torch.where((count > self.moves) & (size < math.sqrt(2)), 1.0, steady)
        size = torch.where(steady > 0, size, 1.0)
        taken = energy.anchor + size * step
        hidden = torch.lerp(source, memory.get(HIDDEN, source), self.rho)
        hidden = torch.lerp(taken, hidden, self.retention)
        left = {
            HIDDEN: hidden,
            MOVES: self._push(moves, size * move, int(count)),
            SETTLED: torch.stack((count + 1, steady)),
        }
        return _moved(belief, torch.lerp(taken, hidden, self.pull)), {**memory, **left}

    def _push(self, moves: Tensor, move: Tensor, count: int) -> Tensor:
        """The last moves with one more, in their order."""
        kept = moves[:count] if count < self.moves else moves[1:]
        pushed = torch.cat((kept, move.view(1)))
        return torch.cat((pushed, moves.new_zeros(self.moves - len(pushed))))


register(upkeep=(ContinualMomentum, LatentWeights, SteadyState))

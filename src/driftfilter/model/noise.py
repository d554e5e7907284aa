"""System noise W of a transition: what a covariance gains between two steps beside the motion."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from driftfilter.base.checks import (
    Checked,
    NotNegative,
    Positive,
    PositiveFraction,
    register,
    require,
)
from driftfilter.gaussian.belief import Belief
from driftfilter.gaussian.covariance import Gain, symmetrize
from driftfilter.model.dynamics import Matrix, Spread, SpreadRule, as_config, as_matrix


class NoiseModel(Protocol):
    """System noise: what the covariance gains beside the motion, Σ⁻ = keep · G Σ Gᵀ + W."""

    def __call__(self, gain: Gain, source: Belief) -> SpreadRule:
        """The spread, or a function that gives it for the belief that moves."""


@final
@dataclass(frozen=True)
class NoNoise:
    """W = 0: the parameters move deterministically."""

    def __call__(self, gain: Gain, source: Belief) -> SpreadRule:
        return Spread(1.0, 0.0)


@final
@dataclass(frozen=True)
class Isotropic(Checked):
    """W = σ² I."""

    variance: NotNegative = 1e-4

    def __call__(self, gain: Gain, source: Belief) -> SpreadRule:
        return Spread(1.0, float(self.variance))


@final
@dataclass(frozen=True)
class FullNoise:
    """W any symmetric positive semi-definite matrix over the (augmented) state, or a vector for its
    diagonal.
    """

    matrix: Matrix | Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "matrix", as_config("FullNoise.matrix", self.matrix))
        dense = torch.tensor(self.matrix, dtype=torch.float64)
        require(
            dense.dim() in (1, 2) and dense.shape[0] == dense.shape[-1],
            "FullNoise.matrix",
            f"shape {list(dense.shape)}",
            "a matrix [d, d] or a vector [d]",
        )
        largest, smallest = dense.abs().max().item(), dense.min().item()
        if dense.dim() == 2:
            asymmetry = (dense - dense.mT).abs().max().item()
            require(
                asymmetry <= 1e-5 * largest,
                "FullNoise.matrix",
                f"asymmetry {asymmetry:.3g}",
                "symmetric",
            )
            smallest = torch.linalg.eigvalsh(dense)[0].item()
        require(
            smallest >= -1e-12 * largest,
            "FullNoise.matrix",
            f"smallest eigenvalue {smallest:g}",
            "positive semi-definite",
        )

    def __call__(self, gain: Gain, source: Belief) -> SpreadRule:
        noise = as_matrix(self.matrix, source.mean)
        assert isinstance(noise, Tensor)
        require(
            noise.shape[0] == source.dimension,
            "FullNoise.matrix",
            f"shape {list(noise.shape)}",
            f"of length {source.dimension} (d) in each dimension",
        )
        return Spread(1.0, symmetrize(noise) if noise.dim() == 2 else noise)


@final
@dataclass(frozen=True)
class Discount(Checked):
    """W = ((1 - δ)/δ) G Σ Gᵀ, that is Σ⁻ = G Σ Gᵀ / δ: evidence fades by δ a step (δ = 1: no
    noise).

    A direction the data never excite winds up as δ⁻ᵗ. As a part of BlockDynamics it inflates its
    own block only.
    """

    delta: PositiveFraction = 0.99

    def __call__(self, gain: Gain, source: Belief) -> SpreadRule:
        return Spread(1 / self.delta, 0.0)


@final
@dataclass(frozen=True)
class Reset(Checked):
    """Σ⁻ = σ² I whatever Σ was, or Σ⁻ = Σ₀ if no variance is given: past curvature is dropped,
    the mean is kept.
    """

    variance: Positive | None = 0.01

    def __call__(self, gain: Gain, source: Belief) -> SpreadRule:
        return Spread(0.0, source.covariance if self.variance is None else float(self.variance))


@final
@dataclass(frozen=True)
class Stationary:
    """W = Σ₀ - G Σ₀ Gᵀ: without data the source belief stays as it is, neither winding up nor
    contracting.
    """

    def __call__(self, gain: Gain, source: Belief) -> SpreadRule:
        covariance = source.covariance
        if isinstance(gain, float):
            require(
                abs(gain) <= 1, "Stationary: the gain", gain, "at most 1 in size (a stable dynamic)"
            )
            if abs(gain) == 1:
                return Spread(1.0, 0.0)
            return Spread(1.0, covariance.propagate(math.sqrt(1 - gain * gain), 0.0))
        if gain.dim() == 1 and covariance.precision().dim() == 1:
            lost = 1 - gain * gain
            smallest = lost.min().item()
            noise = covariance.variance() * lost.clamp_min(0)
        else:
            before = covariance.dense()
            noise = before - covariance.propagate(gain, 0.0).dense()
            smallest = torch.linalg.eigvalsh(noise)[0].item() / before.abs().max().item()
        require(
            smallest >= -(100 * torch.finfo(noise.dtype).eps),
            "Stationary: the gain",
            f"a dynamic that is not stable (smallest eigenvalue of the noise {smallest:.3g} of "
            "the source)",
            "one with G Σ₀ Gᵀ <= Σ₀",
        )
        return Spread(1.0, noise)


@final
@dataclass(frozen=True)
class Restore:
    """CoTTA's stochastic restore, moment-matched; use it with MeanReversion(rho = 1 - p).

    Each parameter jumps back to its source value with probability p = 1 - ρ: G = ρ I, c = p μ₀ and
    W = p (1 - p) diag(Σ_ii + (μ_i - μ₀_i)²).
    """

    def __call__(self, gain: Gain, source: Belief) -> SpreadRule:
        require(
            isinstance(gain, float) and 0 <= gain < 1,
            "Restore: the gain",
            gain,
            "a number in [0, 1), which is 1 - p (use MeanReversion)",
        )
        assert isinstance(gain, float)
        return _Jumps(gain, source)


@dataclass(frozen=True, eq=False)
class _Jumps:
    """The spread of parameters that stay with probability ρ and else jump back to the source."""

    stays: float  # ρ
    source: Belief

    def __call__(self, belief: Belief) -> Spread:
        distance = (belief.mean - self.source.mean).square()
        spread = self.stays * (1 - self.stays) * (belief.covariance.variance() + distance)
        return Spread(1.0, spread)

    def over(self, dt: float) -> SpreadRule:
        """Who stays for a time t stays with probability ρᵗ."""
        return _Jumps(self.stays**dt, self.source)


register(noise=(Isotropic, FullNoise, Discount, Reset, Stationary, Restore, NoNoise))

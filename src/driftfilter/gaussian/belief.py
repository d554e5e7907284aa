"""A Gaussian belief over parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from driftfilter.base.checks import (
    require,
    require_finite,
    require_floating,
    require_shape,
    unchecked,
)
from driftfilter.gaussian.blocks import Blocks
from driftfilter.gaussian.covariance import Covariance, Index, cholesky
from driftfilter.gaussian.diagonal import Diagonal
from driftfilter.gaussian.lowrank import LowRank


@final
@dataclass(frozen=True, eq=False)
class Belief:
    """N(mean, covariance) over the adapted parameters (and the hidden states of their dynamics).

    >>> import torch
    >>> from driftfilter import Belief, Diagonal
    >>> Belief(torch.zeros(3), Diagonal(torch.ones(3))).dimension
    3
    """

    mean: Tensor  # [d]
    covariance: Covariance

    def __post_init__(self) -> None:
        require_shape("Belief.mean", self.mean, "[d]", None)
        require_floating("Belief.mean", self.mean)
        structured = hasattr(self.covariance, "condition")
        require(
            structured, "Belief.covariance", self.covariance, "a covariance such as Full(matrix)"
        )
        size, dtype = self.covariance.dimension, self.covariance.dtype
        require(
            size == self.dimension,
            "Belief.covariance",
            f"dimension {size}",
            f"of dimension {self.dimension}, as the mean",
        )
        require(
            dtype == self.mean.dtype, "Belief.covariance", dtype, f"{self.mean.dtype}, as the mean"
        )
        require_finite("Belief.mean", self.mean)

    @property
    def dimension(self) -> int:
        """d."""
        return self.mean.shape[0]

    def marginal(self, index: Index) -> Belief:
        """The belief over some coordinates."""
        covariance = self.covariance.marginal(index)
        return unchecked(Belief, mean=self.mean[index], covariance=covariance)


def deviation(mean: Tensor, source: Belief) -> Tensor:
    """√((μ - μ_S)ᵀ Σ_S⁻¹ (μ - μ_S) / d), a scalar []: 1 where the mean is where a draw of the
    source would be.

    NaN of a source without variance, which has no scale to measure by.
    """
    moved, variance = mean - source.mean, source.covariance.variance()
    square = (source.covariance.solve(moved) * moved).mean().clamp_min(0)
    return torch.where(variance.min() > 0, square.sqrt(), torch.nan)


def kl_divergence(belief: Belief, source: Belief) -> Tensor:
    """KL(belief ‖ source) = ½ (tr Σ_S⁻¹Σ - d + (μ - μ_S)ᵀ Σ_S⁻¹ (μ - μ_S) + ln |Σ_S| - ln |Σ|) in
    nats, a scalar [].

    O(d) where both are diagonal, O(d r²) from a diagonal source to a low rank, O(d³) else; infinite
    of a point mass.
    """
    new, old, moved = belief.covariance, source.covariance, belief.mean - source.mean
    if new is old:
        spread = torch.zeros_like(moved[0])
    elif _least(new) <= 0 or _least(old) <= 0:
        return torch.full_like(moved[0], torch.inf)
    else:
        spread = _trace(new, old) - belief.dimension + _log_determinant(old) - _log_determinant(new)
    if _least(old) <= 0:
        return torch.where(moved.any(), torch.inf, 0.0).to(moved)
    return ((spread + moved @ old.solve(moved)) / 2).clamp_min(0)


def _least(covariance: Covariance) -> float:
    return covariance.variance().min().item()


def _is_diagonal(covariance: Covariance) -> bool:
    return isinstance(covariance, Diagonal) or (
        isinstance(covariance, LowRank) and not covariance.factor.shape[0]
    )


def _trace(new: Covariance, old: Covariance) -> Tensor:
    """tr Σ_S⁻¹ Σ."""
    if _is_diagonal(old):
        return (new.variance() * old.precision()).sum()
    return old.solve(new.dense()).diagonal().sum()


def _log_determinant(covariance: Covariance) -> Tensor:
    """ln |Σ|."""
    if isinstance(covariance, Blocks):
        return torch.stack([_log_determinant(part) for part in covariance.parts]).sum()
    if isinstance(covariance, Diagonal):
        return covariance.values.log().sum()
    if isinstance(covariance, LowRank):
        return -covariance.diagonal.log().sum() - 2 * covariance._core.diagonal().log().sum()
    return 2 * cholesky(covariance.dense(), "the covariance").diagonal().log().sum()

"""A Gaussian belief over parameters."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from typing_extensions import Self

from driftfilter.base.checks import (
    require,
    require_finite,
    require_floating,
    require_shape,
    unchecked,
)
from driftfilter.gaussian.covariance import Covariance, Index


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
        require(
            isinstance(self.covariance, Covariance),
            "Belief.covariance",
            self.covariance,
            "a covariance such as Full(matrix)",
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

    def marginal(self, index: Index) -> Self:
        """The belief over some coordinates."""
        return unchecked(Belief, mean=self.mean[index], covariance=self.covariance.marginal(index))


def deviation(mean: Tensor, source: Belief) -> Tensor:
    """√((μ - μ_S)ᵀ Σ_S⁻¹ (μ - μ_S) / d), a scalar []: 1 if the mean is as far as draws of the
    source are.

    NaN if the source has no variance, and so no scale to measure by.
    """
    variance = source.covariance.variance()
    if mean is source.mean:  # as it stays if nothing is learned
        return torch.where(variance.min() > 0, 0.0, torch.nan).to(mean)
    moved = mean - source.mean
    square = (source.covariance.solve(moved) * moved).mean().clamp_min(0)
    return torch.where(variance.min() > 0, square.sqrt(), torch.nan)


def kl_divergence(belief: Belief, source: Belief) -> Tensor:
    """KL(belief ‖ source) = ½ (tr Σ_S⁻¹Σ - d + (μ - μ_S)ᵀ Σ_S⁻¹ (μ - μ_S) + ln |Σ_S| - ln |Σ|) in
    nats, a scalar [].

    It costs what the structures cost: O(d) if both are diagonal, O(d r²) for low ranks, O(p³ + q³)
    for Kronecker parts [p, q]. Only a dense source takes O(d³). A point mass is infinitely far.
    """
    new, old, moved = belief.covariance, source.covariance, belief.mean - source.mean
    if new is old:
        spread = torch.zeros_like(moved[0])
    elif new.is_degenerate or old.is_degenerate:
        return torch.full_like(moved[0], torch.inf)
    else:
        trace = old.relative_trace(new)
        spread = trace - belief.dimension + old.log_determinant() - new.log_determinant()
    if old.is_degenerate:
        return torch.where(moved.any(), torch.inf, 0.0).to(moved)
    return ((spread + moved @ old.solve(moved)) / 2).clamp_min(0)

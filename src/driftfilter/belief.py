"""A Gaussian belief over parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from driftfilter.checks import require, require_finite, require_floating, require_shape
from driftfilter.covariance import Covariance, Index


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
        require(structured, "Belief.covariance", self.covariance, "a covariance such as Full(matrix)")
        size, dtype = self.covariance.dimension, self.covariance.dtype
        require(size == self.dimension, "Belief.covariance", f"dimension {size}", f"of dimension {self.dimension}, as the mean")
        require(dtype == self.mean.dtype, "Belief.covariance", dtype, f"{self.mean.dtype}, as the mean")
        require_finite("Belief.mean", self.mean)

    @property
    def dimension(self) -> int:
        """d."""
        return self.mean.shape[0]

    def marginal(self, index: Index) -> Belief:
        """The belief over some coordinates."""
        return Belief(self.mean[index], self.covariance.marginal(index))

"""Independent coordinates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from driftfilter.base.checks import (
    NotPositiveDefiniteError,
    require_finite,
    require_floating,
    require_shape,
    unchecked,
)
from driftfilter.gaussian.blocks import Blocks
from driftfilter.gaussian.covariance import (
    Covariance,
    Gain,
    Index,
    Noise,
    column_energy,
    normals,
    refuse,
)


@final
@dataclass(frozen=True, eq=False)
class Diagonal:
    """Independent coordinates, O(d): the precision-diagonal projection, 1/v ← 1/v + diag(FᵀF).

    It is the mean-field variational fixed point (not moment matching, which would shrink v less).
    """

    values: Tensor  # [d] variances

    def __post_init__(self) -> None:
        require_shape("Diagonal.values", self.values, "[d]", None)
        require_floating("Diagonal.values", self.values)
        object.__setattr__(self, "values", self.values.detach().clone())
        require_finite("Diagonal.values", self.values)
        if not (self.values > 0).all():
            raise NotPositiveDefiniteError(
                f"Diagonal.values must be > 0, got a smallest value of {self.values.min().item():g}"
            )

    @property
    def dimension(self) -> int:
        return self.values.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def apply(self, vectors: Tensor) -> Tensor:
        return vectors * self.values

    def solve(self, vectors: Tensor) -> Tensor:
        return vectors / self.values

    def condition(self, factor: Tensor) -> Diagonal:
        values = self.values / column_energy(factor).mul_(self.values).add_(1)
        if not values.min().item() > 0:
            raise NotPositiveDefiniteError(
                "no posterior variance is left: the prior had none, or the curvature is too large"
            )
        return unchecked(Diagonal, values=values)

    def truncate(self) -> Diagonal:
        return self

    def propagate(self, gain: Gain, noise: Noise) -> Diagonal:
        if isinstance(gain, Tensor) and gain.dim() == 2:
            raise refuse("Diagonal", "a dynamic that mixes coordinates", "Full or Blocks")
        if isinstance(noise, Tensor) and noise.dim() == 2:
            raise refuse("Diagonal", "noise that correlates coordinates", "Full or Blocks")
        if not isinstance(noise, (float, Tensor)):
            if not is_diagonal(noise):
                raise refuse("Diagonal", "noise that correlates coordinates", "Full or Blocks")
            noise = noise.variance()
        return unchecked(Diagonal, values=(self.values * (gain * gain)).add_(noise))

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        return normals(count, self.values, generator) * self.values.sqrt()

    def variance(self) -> Tensor:
        return self.values

    def precision(self) -> Tensor:
        return self.values.reciprocal()

    def marginal(self, index: Index) -> Diagonal:
        return unchecked(Diagonal, values=self.values[index])

    def dense(self) -> Tensor:
        return torch.diag(self.values)


def is_diagonal(covariance: Covariance) -> bool:
    """Whether a covariance, which as a noise may be singular, has no correlations by its
    structure.
    """
    if isinstance(covariance, Blocks):
        return all(is_diagonal(part) for part in covariance.parts)
    return isinstance(covariance, Diagonal)

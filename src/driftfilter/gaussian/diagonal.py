"""Σ = diag(v): independent coordinates, in O(d).

condition  1/v ← 1/v + diag(FᵀF)        propagate  v ← g² v + w
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from typing_extensions import Self

from driftfilter.base.checks import (
    NotPositiveDefiniteError,
    require_floating,
    require_least,
    require_positive,
    require_shape,
    unchecked,
)
from driftfilter.gaussian.covariance import (
    Covariance,
    Gain,
    Index,
    Noise,
    Shapes,
    column_energy,
    normals,
    refuse,
)


@final
@dataclass(frozen=True, eq=False)
class Diagonal(Covariance):
    """Independent coordinates, O(d): the precision-diagonal projection, 1/v ← 1/v + diag(FᵀF).

    It is the mean-field variational fixed point (not moment matching, which would shrink v less).
    """

    values: Tensor  # [d] variances
    is_diagonal = True

    def __post_init__(self) -> None:
        require_shape("Diagonal.values", self.values, "[d]", None)
        require_floating("Diagonal.values", self.values)
        object.__setattr__(self, "values", self.values.detach().clone())
        require_positive("Diagonal.values", self.values)

    @property
    def dimension(self) -> int:
        return self.values.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @classmethod
    def isotropic_like(
        cls, variance: float, mean: Tensor, rank: int = 0, shapes: Shapes = None
    ) -> Self:
        return cls(mean.new_full(mean.shape, variance))

    def apply(self, vectors: Tensor) -> Tensor:
        return vectors * self.values

    def solve(self, vectors: Tensor) -> Tensor:
        return vectors / self.values

    def condition(self, factor: Tensor) -> Self:
        values = self.values / column_energy(factor).mul_(self.values).add_(1)
        require_least(
            values.min(),
            "no posterior variance is left: the prior had none, or the curvature is too large",
        )
        return unchecked(Diagonal, values=values)

    def remove(self, factor: Tensor) -> Self:
        left = 1 - column_energy(factor) * self.values
        if not left.min().item() > 0:
            raise NotPositiveDefiniteError(
                "the precision less negative curvature is not positive definite: a variance would "
                f"be divided by {left.min().item():g}"
            )
        return unchecked(Diagonal, values=self.values / left)

    def inform(self, information: float | Tensor) -> Self:
        if isinstance(information, Tensor):
            return self.condition(information.sqrt()[None])  # only column sums count
        return Diagonal(self.values / (1 + self.values * information))

    def propagate(self, gain: Gain, noise: Noise) -> Self:
        if isinstance(gain, Tensor) and gain.dim() == 2:
            raise refuse("Diagonal", "a dynamic that mixes coordinates", "Full or Blocks")
        if isinstance(noise, Tensor) and noise.dim() == 2:
            raise refuse("Diagonal", "noise that correlates coordinates", "Full or Blocks")
        if not isinstance(noise, (float, Tensor)):
            if not noise.is_diagonal:
                raise refuse("Diagonal", "noise that correlates coordinates", "Full or Blocks")
            noise = noise.variance()
        return unchecked(Diagonal, values=(self.values * (gain * gain)).add_(noise))

    def smooth(self, gain: Gain, prior: Covariance, later: Covariance) -> Self:
        if isinstance(gain, Tensor) and gain.dim() == 2:
            raise refuse("Diagonal", "a dynamic that mixes coordinates", "Full or Blocks")
        after = prior.variance()
        back = self.values * gain / after
        noise = (after - gain * gain * self.values).clamp_min(0)
        kept = (1 - back * gain).square() * self.values
        return unchecked(Diagonal, values=kept + back.square() * (later.variance() + noise))

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        return normals(count, self.values, generator) * self.values.sqrt()

    def variance(self) -> Tensor:
        return self.values

    def precision(self) -> Tensor:
        return self.values.reciprocal()

    def log_determinant(self) -> Tensor:
        return self.values.log().sum()

    def spectrum(self) -> Tensor:
        return self.values.double().reciprocal()

    def relative_trace(self, other: Covariance) -> Tensor:
        return (other.variance() * self.precision()).sum()

    def marginal(self, index: Index) -> Self:
        return unchecked(Diagonal, values=self.values[index])

    def dense(self) -> Tensor:
        return torch.diag(self.values)

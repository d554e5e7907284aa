"""Σ [d, d] as a matrix: every correlation.

    condition  Σ - (F Σ)ᵀ (I + F Σ Fᵀ)⁻¹ (F Σ)        propagate  G Σ Gᵀ + W

It is exact, and the reference for the other structures. The Cholesky factor that proves a result
positive definite is kept with it. If the subtraction cancels too much for that, the same result
comes from a QR decomposition, which subtracts nothing.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import Self

from driftfilter.base.checks import (
    NotPositiveDefiniteError,
    require,
    require_finite,
    require_floating,
    require_shape,
    unchecked,
)
from driftfilter.gaussian.covariance import (
    Covariance,
    Gain,
    Index,
    Noise,
    Shapes,
    cholesky,
    compact,
    identity_like,
    symmetrize,
)


@final
@dataclass(frozen=True, eq=False)
class Full(Covariance):
    """Dense covariance: every correlation, O(d²) memory.

    Condition: Σ - (F Σ)ᵀ (I + F Σ Fᵀ)⁻¹ (F Σ), O(m d²).
    """

    is_dense: ClassVar[bool] = True
    is_exact: ClassVar[bool] = True

    matrix: Tensor  # [d, d]

    def __post_init__(self) -> None:
        require_shape("Full.matrix", self.matrix, "[d, d]", None, None)
        require_shape("Full.matrix", self.matrix, "[d, d]", *[self.matrix.shape[0]] * 2)
        require_floating("Full.matrix", self.matrix)
        require_finite("Full.matrix", self.matrix)
        asymmetry = (self.matrix - self.matrix.mT).abs().max().item()
        require(
            asymmetry <= 1e-5 * self.matrix.abs().max().item(),
            "Full.matrix",
            f"asymmetry {asymmetry:.3g}",
            "symmetric",
        )
        object.__setattr__(self, "matrix", symmetrize(self.matrix.detach()))
        cholesky(self.matrix, "Full.matrix")

    @property
    def dimension(self) -> int:
        return self.matrix.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype

    @classmethod
    def isotropic_like(
        cls, variance: float, mean: Tensor, rank: int = 0, shapes: Shapes = None
    ) -> Self:
        return cls(torch.diag(mean.new_full(mean.shape, variance)))

    def apply(self, vectors: Tensor) -> Tensor:
        matrix: Tensor = self.__dict__.get("precise", self.matrix)
        if vectors.dtype != matrix.dtype:
            vectors = vectors.to(matrix.dtype)
        each = matrix.dim() > 2  # a vector for each of several covariances
        applied = (vectors.unsqueeze(-2) @ matrix).squeeze(-2) if each else vectors @ matrix
        return applied if applied.dtype == self.dtype else applied.to(self.dtype)

    def condition(self, factor: Tensor) -> Self:
        rows, several = factor.shape[-2], factor.dim() > 2
        if rows == 0:
            return self
        if self.dtype == torch.float32:
            # The mean step Σ g would lose eps · F Σ Fᵀ of its accuracy if Σ were rounded first.
            exact = unchecked(Full, matrix=self.matrix.double()).condition(factor.double()).matrix
            root, status = torch.linalg.cholesky_ex(exact.float())
            if not (status.any() if several else status):
                return unchecked(Full, matrix=exact.float(), root=root, precise=exact)
            return unchecked(Full, **self._condition_by_roots(factor).__dict__, precise=exact)
        if rows < self.dimension or several:
            if rows == 1 and not several:
                vector = factor.select(0, 0)
                cross = self.matrix.mv(vector)
                scale = 1 + cross.dot(vector).item()
                if not 0 < scale < math.inf:
                    raise NotPositiveDefiniteError(
                        f"1 + F Σ Fᵀ must be positive and finite, got {scale:g}"
                    )
                cross = cross / math.sqrt(scale)
                matrix = self.matrix - torch.outer(
                    cross, cross
                )  # symmetric to the last bit, as torch.addr is not
            else:
                cross = factor @ self.matrix  # F Σ [m, d]
                inner = cross @ factor.mT
                inner.diagonal(0, -2, -1).add_(1)
                whitened = torch.linalg.solve_triangular(
                    cholesky(inner, "I + F Σ Fᵀ"), cross, upper=False
                )
                subtract = torch.baddbmm if several else torch.addmm
                matrix = symmetrize(subtract(self.matrix, whitened.mT, whitened, alpha=-1.0))
            root, status = torch.linalg.cholesky_ex(matrix)
            if not (status.any() if several else status):
                return unchecked(Full, matrix=matrix, root=root)
        return self._condition_by_roots(factor)

    def _condition_by_roots(self, factor: Tensor) -> Self:
        """L (I + Lᵀ FᵀF L)⁻¹ Lᵀ by QR of [F L; I]: no subtraction, so nothing cancels."""
        eye = identity_like(self.matrix).expand_as(self.matrix)
        _, triangle = torch.linalg.qr(torch.cat((factor @ self.root, eye), -2), mode="r")
        half = torch.linalg.solve_triangular(triangle.mT, self.root.mT, upper=False)
        matrix = symmetrize(half.mT @ half)
        return unchecked(Full, matrix=matrix, root=cholesky(matrix, "the posterior covariance"))

    def remove(self, factor: Tensor) -> Self:
        """Σ + (N Σ)ᵀ (I - N Σ Nᵀ)⁻¹ (N Σ); I - N Σ Nᵀ is positive definite if Σ⁻¹ - NᵀN is."""
        matrix: Tensor = self.__dict__.get("precise", self.matrix).double()
        rows = compact(factor.double())
        cross = rows @ matrix
        inner = identity_like(rows @ rows.mT) - cross @ rows.mT
        whitened = torch.linalg.solve_triangular(
            cholesky(inner, "the precision less negative curvature"), cross, upper=False
        )
        grown = symmetrize(matrix + whitened.mT @ whitened)
        return unchecked(Full, matrix=grown.to(self.dtype), precise=grown)

    def truncate(self) -> Self:
        return (
            unchecked(Full, matrix=self.matrix, root=self.root)
            if "precise" in self.__dict__
            else self
        )

    def propagate(self, gain: Gain, noise: Noise) -> Self:
        if isinstance(gain, float):
            if isinstance(noise, Tensor) and noise.dim() == 2:
                return unchecked(Full, matrix=torch.add(noise, self.matrix, alpha=gain * gain))
            moved = self.matrix * (gain * gain)
        elif gain.dim() == 1:
            moved = self.matrix * torch.outer(gain, gain)
        else:
            moved = symmetrize(gain @ self.matrix @ gain.mT)
        if isinstance(noise, float) or (isinstance(noise, Tensor) and noise.dim() == 1):
            moved.diagonal().add_(noise)
            return unchecked(Full, matrix=moved)
        return unchecked(
            Full, matrix=moved.add_(noise if isinstance(noise, Tensor) else noise.dense())
        )

    def smooth(self, gain: Gain, prior: Covariance, later: Covariance) -> Self:
        """(I - C G) Σ (I - C G)ᵀ + C (Σ' + W) Cᵀ, a sum in which nothing is negative; W = Σ⁻ - G Σ
        Gᵀ.
        """
        before, eye = self.matrix.double(), identity_like(self.matrix.double())
        known = gain.double() if isinstance(gain, Tensor) else eye * gain
        known = torch.diag(known) if known.dim() == 1 else known
        moved, after = known @ before, prior.dense().double()
        root = cholesky(after, "the prior covariance of a step")
        back = torch.cholesky_solve(moved, root).mT  # C
        rest, noise = eye - back @ known, after - moved @ known.mT
        matrix = rest @ before @ rest.mT + back @ (later.dense().double() + noise) @ back.mT
        return unchecked(Full, matrix=symmetrize(matrix).to(self.dtype))

    def inform(self, information: float | Tensor) -> Self:
        if isinstance(information, Tensor):
            return self.condition(torch.diag(information.sqrt()))
        precision = unchecked(Full, matrix=self.matrix.double()).precision()
        precision.diagonal().add_(information)
        inverse = torch.cholesky_inverse(cholesky(precision, "the source precision"))
        return Full(symmetrize(inverse).to(self.dtype))

    def marginal(self, index: Index) -> Self:
        return unchecked(Full, matrix=self.matrix[index][:, index])

    def dense(self) -> Tensor:
        return self.matrix

"""Σ⁻¹ = (U ⊗ V) diag(s) (U ⊗ V)ᵀ: the covariance of a weight matrix.

Its eigenvectors are a Kronecker product, its eigenvalues are of any kind.
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from typing_extensions import Self

from driftfilter.base.checks import (
    NotPositiveDefiniteError,
    require,
    require_floating,
    require_positive,
    require_shape,
    unchecked,
)
from driftfilter.gaussian.blocks import Blocks
from driftfilter.gaussian.covariance import (
    Covariance,
    Gain,
    Index,
    Noise,
    Shapes,
    identity_like,
    normals,
    refuse,
    symmetrize,
)
from driftfilter.gaussian.diagonal import Diagonal
from driftfilter.gaussian.full import Full


def _eigenvectors(matrix: Tensor) -> Tensor:
    """Columns [p, p] of a symmetric matrix, in its dtype; in float32 the decomposition may fail to
    converge.
    """
    if not math.isfinite(matrix.diagonal().sum().item()):
        raise NotPositiveDefiniteError(
            f"the posterior precision is not finite: it overflowed {matrix.dtype}"
        )
    vectors: Tensor = torch.linalg.eigh(symmetrize(matrix.double()))[1]
    return vectors.to(matrix.dtype)


@final
@dataclass(frozen=True, eq=False)
class Kronecker(Covariance):
    """Covariance of a weight matrix [p, q], row by row, with Kronecker eigenvectors: Σ⁻¹ = (U ⊗ V)
    diag(s) (U ⊗ V)ᵀ.

    It holds A ⊗ B + λ I (``from_factors``), and its sum with isotropic noise, exactly; O(p² + q² +
    p q) memory. Conditioning takes for U and V the eigenvectors of the two partial traces of Σ⁻¹ +
    FᵀF, which accumulate factor-wise over batches as in KFAC,

        Tr_q ← Tr_q + Σ_m F_m F_mᵀ [p, p],   Tr_p ← Tr_p + Σ_m F_mᵀ F_m [q, q],
        F_m = row m of F as a matrix [p, q],

    and for s the diagonal of Σ⁻¹ + FᵀF in that basis. Both partial traces (and so the trace) stay
    exact. Exact altogether are p = 1, q = 1 and curvature FᵀF = A ⊗ B in the eigenvectors of Σ,
    such as one row F = a ⊗ b on an isotropic Σ; else what is not diagonal in the new basis is left
    out (on the layers of small trained networks this came closer to the dense curvature than KFAC's
    product of two means, whatever the batches). Cost O(p³ + q³ + m p q (p + q)).
    """

    left: Tensor  # [p, p], U, orthogonal
    right: Tensor  # [q, q], V, orthogonal
    values: Tensor  # [p, q], s: eigenvalues of the precision

    def __post_init__(self) -> None:
        require_shape("Kronecker.values", self.values, "[p, q]", None, None)
        require_floating("Kronecker.values", self.values)
        rows, columns = self.values.shape
        require_positive("Kronecker.values", self.values)
        for name, basis, size in (("left", self.left, rows), ("right", self.right, columns)):
            require_shape(f"Kronecker.{name}", basis, f"[{size}, {size}]", size, size)
            require(
                basis.dtype == self.dtype,
                f"Kronecker.{name}",
                basis.dtype,
                f"{self.dtype}, as the values",
            )
            error = (basis.mT @ basis - identity_like(basis)).abs().max().item()
            require(
                error <= 1e4 * torch.finfo(self.dtype).eps,
                f"Kronecker.{name}",
                f"columns that are off by {error:.3g}",
                "orthogonal",
            )
        for name in ("left", "right", "values"):
            object.__setattr__(self, name, getattr(self, name).detach().clone())

    @classmethod
    def isotropic(
        cls, variance: float, rows: int, columns: int, like: Tensor | None = None
    ) -> Self:
        """σ² I for a weight matrix [rows, columns]; dtype and device as ``like``."""
        like = torch.empty(0) if like is None else like
        require(
            variance > 0 and math.isfinite(variance),
            "Kronecker.variance",
            variance,
            "a finite number > 0",
        )
        left, right = (
            torch.eye(size, dtype=like.dtype, device=like.device) for size in (rows, columns)
        )
        return cls(left, right, like.new_full((rows, columns), 1 / variance))

    @classmethod
    def isotropic_like(
        cls, variance: float, mean: Tensor, rank: int = 0, shapes: Shapes = None
    ) -> Blocks:
        """σ² I with a part for each parameter of two dimensions or more, the rest diagonal."""
        if shapes is None:
            allowed = "'full', 'diagonal' or 'low_rank' for a model without named parameters"
            raise ValueError(f"structure must be {allowed}, got 'kronecker'")
        return Blocks(
            tuple(
                cls.isotropic(variance, shape[0], shape[1:].numel(), mean)
                if len(shape) > 1
                else Diagonal(mean.new_full((shape.numel(),), variance))
                for shape in shapes.values()
            )
        )

    @classmethod
    def from_factors(cls, left: Tensor, right: Tensor, damping: float) -> Self:
        """Σ⁻¹ = A ⊗ B + λ I for positive semi-definite A [p, p] and B [q, q]: KFAC's factors and a
        prior precision.
        """
        (rows, first), (columns, second) = (
            torch.linalg.eigh(symmetrize(factor.double())) for factor in (left, right)
        )
        values = torch.outer(rows.clamp_min(0), columns.clamp_min(0)) + damping
        return cls(first.to(left.dtype), second.to(left.dtype), values.to(left.dtype))

    @property
    def dimension(self) -> int:
        return self.values.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def _scale(self, vectors: Tensor, scale: Tensor) -> Tensor:
        """(U ⊗ V) diag(scale) (U ⊗ V)ᵀ v for rows v [..., d]."""
        matrices = vectors.reshape(*vectors.shape[:-1], *self.values.shape)
        return (
            self.left @ ((self.left.mT @ matrices @ self.right) * scale) @ self.right.mT
        ).reshape(vectors.shape)

    def apply(self, vectors: Tensor) -> Tensor:
        return self._scale(vectors, self.values.reciprocal())

    def solve(self, vectors: Tensor) -> Tensor:
        return self._scale(vectors, self.values)

    def condition(self, factor: Tensor) -> Self:
        if factor.shape[0] == 0:
            return self
        rows = factor.reshape(-1, *self.values.shape)
        long, wide = rows.transpose(0, 1).flatten(1), rows.flatten(0, 1)  # [p, m q], [m p, q]
        left = _eigenvectors(_weigh(self.left, self.values.sum(1)) + long @ long.mT)
        right = _eigenvectors(_weigh(self.right, self.values.sum(0)) + wide.mT @ wide)
        added = (left.mT @ rows @ right).square().sum(0)
        values = self._diagonal_in(left, right, self.values) + added
        return unchecked(Kronecker, left=left, right=right, values=values)

    def inform(self, information: float | Tensor) -> Covariance:
        """Exact for a number; a vector is curvature to condition on."""
        if isinstance(information, Tensor):
            return super().inform(information)
        return Kronecker(self.left, self.right, self.values + information)

    def _diagonal_in(self, left: Tensor, right: Tensor, scale: Tensor) -> Tensor:
        """Diagonal [p, q] of (U ⊗ V) diag(scale) (U ⊗ V)ᵀ in another Kronecker basis."""
        return (left.mT @ self.left).square() @ scale @ (self.right.mT @ right).square()

    def propagate(self, gain: Gain, noise: Noise) -> Self:
        """Exact for a number as gain and isotropic noise, or a Kronecker noise with the same
        eigenvectors.

        Other Kronecker noise is added as ``condition`` adds curvature, in covariance: both partial
        traces of Σ stay exact.
        """
        if isinstance(gain, Tensor):
            raise refuse(
                "Kronecker", "a dynamic that moves coordinates differently", "Full or Diagonal"
            )
        if isinstance(noise, float):
            return self._with_variances(gain * gain / self.values + noise)
        if not isinstance(noise, Kronecker) or noise.values.shape != self.values.shape:
            raise refuse(
                "Kronecker",
                "noise that is neither isotropic nor Kronecker of the same shape",
                "Full or Diagonal",
            )
        own, added = gain * gain / self.values, noise.values.reciprocal()
        if torch.equal(noise.left, self.left) and torch.equal(noise.right, self.right):
            return self._with_variances(own + added)
        low, high = torch.aminmax(added)
        if low.item() == high.item():
            return self._with_variances(own + low)
        left = _eigenvectors(_weigh(self.left, own.sum(1)) + _weigh(noise.left, added.sum(1)))
        right = _eigenvectors(_weigh(self.right, own.sum(0)) + _weigh(noise.right, added.sum(0)))
        variances = self._diagonal_in(left, right, own) + noise._diagonal_in(left, right, added)
        return unchecked(Kronecker, left=left, right=right, values=variances.reciprocal())

    def smooth(self, gain: Gain, prior: Covariance, later: Covariance) -> Covariance:
        why = "smoothing, which mixes the eigenvectors of different steps"
        raise refuse("Kronecker", why, "Full, Diagonal or Blocks of them")

    def _with_variances(self, variances: Tensor) -> Self:
        """Σ with these eigenvectors and other eigenvalues [p, q]."""
        values = variances.reciprocal()
        if not math.isfinite(values.max().item()):
            raise NotPositiveDefiniteError(
                "a gain of 0 without noise leaves no covariance: add noise"
            )
        return unchecked(Kronecker, left=self.left, right=self.right, values=values)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        drawn = normals(count, self.values.flatten(), generator).view(count, *self.values.shape)
        return (self.left @ (drawn * self.values.rsqrt()) @ self.right.mT).flatten(1)

    def variance(self) -> Tensor:
        return (self.left.square() @ self.values.reciprocal() @ self.right.square().mT).flatten()

    def precision(self) -> Tensor:
        return symmetrize(self.solve(self._units(slice(None))))

    def log_determinant(self) -> Tensor:
        return -self.values.log().sum()

    def spectrum(self) -> Tensor:
        return self.values.double().flatten()

    def relative_trace(self, other: Covariance) -> Tensor:
        """s times the diagonal of C in the basis U ⊗ V, without a matrix if C is Kronecker, too."""
        if not isinstance(other, Kronecker) or other.values.shape != self.values.shape:
            return super().relative_trace(other)
        seen = other._diagonal_in(self.left, self.right, other.values.reciprocal())
        return (self.values * seen).sum()

    def marginal(self, index: Index) -> Covariance:
        """The block of Σ, which is dense unless it is all of Σ."""
        wanted = torch.arange(self.dimension, device=self.values.device)[index]
        if len(wanted) == self.dimension and bool((wanted.diff() > 0).all()):
            return self
        return unchecked(Full, matrix=symmetrize(self.apply(self._units(wanted))[:, wanted]))

    def dense(self) -> Tensor:
        return symmetrize(self.apply(self._units(slice(None))))

    def _units(self, index: Index) -> Tensor:
        """Rows [m, d] with a 1 at each of m places."""
        places = torch.arange(self.dimension, device=self.values.device)[index]
        return self.values.new_zeros(len(places), self.dimension).scatter_(1, places[:, None], 1.0)


def _weigh(basis: Tensor, weights: Tensor) -> Tensor:
    """U diag(w) Uᵀ [p, p]."""
    return (basis * weights) @ basis.mT

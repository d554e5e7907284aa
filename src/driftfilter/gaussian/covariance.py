"""Covariance structures: one algebra, so that every rule of the filter is written once.

A structure is an immutable value. A *gain* is a number (g I), a vector (diag g) or a matrix; a
*noise* is any of these or another covariance. What a structure cannot represent it refuses, naming
the structures that can.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor
from typing_extensions import Self

from driftfilter.base.checks import NotPositiveDefiniteError, require

Gain: TypeAlias = "float | Tensor"
Noise: TypeAlias = "float | Tensor | Covariance"
Index: TypeAlias = "slice | Tensor"
Shapes: TypeAlias = "Mapping[str, torch.Size] | None"  # of parameters that have names


class Covariance(ABC):
    """A covariance Σ [d, d] behind the operations that inference, transition and prediction need.

    A structure says its size, how it conditions and moves, and how it looks as a matrix. What it
    does not override works on that matrix, in O(d³) time and O(d²) memory.
    """

    is_dense: ClassVar[bool] = False  # carries any correlation, as a matrix
    is_exact: ClassVar[bool] = False  # conditions without leaving out any curvature
    has_spectrum: ClassVar[bool] = True
    grows: ClassVar[tuple[str, ...]] = ()  # fields whose number of rows depends on the data

    @property
    @abstractmethod
    def dimension(self) -> int:
        """d."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """float32 or float64."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Σ as a matrix [d, d]."""

    @abstractmethod
    def condition(self, factor: Tensor) -> Covariance:
        """(Σ⁻¹ + FᵀF)⁻¹ for F [m, d], before any truncation."""

    def remove(self, factor: Tensor) -> Covariance:
        """(Σ⁻¹ - NᵀN)⁻¹ for N [l, d]; refused if that is not positive definite."""
        raise refuse(
            type(self).__name__, "negative curvature", "Full, Diagonal or Blocks, or clip it"
        )

    @abstractmethod
    def propagate(self, gain: Gain, noise: Noise) -> Covariance:
        """G Σ Gᵀ + W."""

    @abstractmethod
    def marginal(self, index: Index) -> Covariance:
        """The block of Σ for some coordinates."""

    @classmethod
    def isotropic_like(
        cls, variance: float, mean: Tensor, rank: int = 0, shapes: Shapes = None
    ) -> Covariance:
        """σ² I for parameters ``mean`` [d] of these shapes, as ``Gaussian(structure=…)`` starts.

        ``rank`` is the budget of a low rank; other structures leave it aside.
        """
        raise refuse(cls.__name__, "a start by its name", "a structure with isotropic_like")

    def smooth(self, gain: Gain, prior: Covariance, later: Covariance) -> Covariance:
        """Σ + C (Σ' - Σ⁻) Cᵀ, C = Σ Gᵀ (Σ⁻)⁻¹: what is left of Σ once later data are known.

        Σ⁻ is the covariance one move later, Σ' that with all data.
        """
        raise refuse(type(self).__name__, "smoothing", "Full, Diagonal or Blocks of them")

    def truncate(self) -> Self:
        """This covariance within the structure's budget of memory."""
        return self

    def inform(self, information: float | Tensor) -> Covariance:
        """(Σ⁻¹ + diag i)⁻¹ for information i >= 0 [d], or a number that stands for all of it.

        Structures that a Laplace approximation starts from take a negative number, too, as long as
        the result is positive definite.
        """
        if isinstance(information, float):
            name = type(self).__name__
            require(information >= 0, f"{name}.inform: information", information, "a number >= 0")
            information = torch.full_like(self.variance(), information)
        return self.condition(torch.diag(information.sqrt()))

    @cached_property
    def root(self) -> Tensor:
        """Lower Cholesky factor L [d, d], Σ = L Lᵀ."""
        return cholesky(self.dense(), "the covariance")

    def apply(self, vectors: Tensor) -> Tensor:
        """Σ v for rows v [..., d]."""
        return vectors @ self.dense()

    def solve(self, vectors: Tensor) -> Tensor:
        """Σ⁻¹ v for rows v [..., d]."""
        return torch.cholesky_solve(vectors.reshape(-1, self.dimension).mT, self.root).mT.reshape(
            vectors.shape
        )

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws of N(0, Σ), [count, d]."""
        return normals(count, self.root, generator) @ self.root.mT

    def variance(self) -> Tensor:
        """Diagonal of Σ, [d]."""
        return self.dense().diagonal()

    def precision(self) -> Tensor:
        """Σ⁻¹ as a vector [d] if it is diagonal, as a matrix [d, d] otherwise."""
        return torch.cholesky_inverse(self.root)

    def log_determinant(self) -> Tensor:
        """ln |Σ|, a scalar []."""
        return 2 * self.root.diagonal().log().sum()

    def spectrum(self) -> Tensor:
        """Eigenvalues of Σ⁻¹ [d] in float64, in any order."""
        values: Tensor = torch.linalg.eigvalsh(self.dense().double())
        return values.reciprocal()

    def relative_trace(self, other: Covariance) -> Tensor:
        """tr Σ⁻¹ C for another covariance C of the same coordinates, a scalar []."""
        return self.solve(other.dense()).diagonal().sum()

    @property
    def is_diagonal(self) -> bool:
        """Whether it has no correlations by its structure; as a noise it may be singular."""
        return False

    @property
    def is_degenerate(self) -> bool:
        """Whether some coordinate has no variance, as in a point mass."""
        return self.variance().min().item() <= 0

    def independent_parts(self) -> tuple[Covariance, ...]:
        """The covariances of independent groups that it is made of; none if it is one piece."""
        return ()


def refuse(structure: str, what: str, allowed: str) -> ValueError:
    """The error for what a structure cannot represent, naming the structures that can."""
    return ValueError(f"{structure} cannot carry {what}; use {allowed}")


def cholesky(matrix: Tensor, what: str) -> Tensor:
    """Lower Cholesky factor, or an error that names the matrix."""
    root: Tensor
    root, status = torch.linalg.cholesky_ex(matrix)
    if failed := status.max().item() if status.dim() else status.item():
        raise NotPositiveDefiniteError(
            f"{what} is not positive definite (Cholesky failed at row {failed})"
        )
    if not math.isfinite(root.diagonal(0, -2, -1).sum().item()):  # infinite pivots pass
        raise NotPositiveDefiniteError(f"{what} is not finite: it overflowed {matrix.dtype}")
    return root


def identity_like(matrix: Tensor) -> Tensor:
    """I of the same size, dtype and device."""
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def symmetrize(matrix: Tensor) -> Tensor:
    """(M + Mᵀ) / 2: conditioning never shrinks an antisymmetric rounding error, and discounting
    makes it grow as δ⁻ᵗ.
    """
    return (matrix + matrix.mT).mul_(0.5)


def column_energy(rows: Tensor) -> Tensor:
    """Σ_m F_mj² for rows [..., m, d], a few rows at a time so that the squares stay in the
    cache.
    """
    if rows.shape[-2] == 1:
        return rows.select(-2, 0).square()
    if rows.is_cuda or rows.shape[-2] <= 16:
        return rows.square().sum(-2)
    return torch.stack([part.square().sum(-2) for part in rows.split(16, -2)]).sum(0)


def compact(rows: Tensor) -> Tensor:
    """Rows with the same FᵀF, no more of them than columns."""
    return rows if rows.shape[0] <= rows.shape[1] else torch.linalg.qr(rows, mode="r")[1]


def positive_root(matrices: Tensor, averaged: bool = False) -> Tensor:
    """R [..., k, k] with R Rᵀ = the positive part of symmetric matrices: negative eigenvalues
    become 0.

    ``averaged``: so do those of the size of rounding, relative to the largest. Sums that should
    cancel leave some, and their roots would be noise of the size 1e-8.
    """
    values, vectors = torch.linalg.eigh(matrices.double())  # in float32 it may fail to converge
    if averaged:
        rounding = 4 * values.shape[-1] * torch.finfo(matrices.dtype).eps
        noise = rounding * values.abs().amax(-1, keepdim=True)
        values = values.masked_fill(values <= noise, 0.0)
    root: Tensor = vectors * values.clamp_min(0).sqrt()[..., None, :]
    return root.to(matrices.dtype)


def signed_root(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """R [..., k, k] and signs s [..., k] with R diag(s) Rᵀ = symmetric matrices."""
    values, vectors = torch.linalg.eigh(matrices.double())  # in float32 it may fail to converge
    root: Tensor = vectors * values.abs().sqrt()[..., None, :]
    return root.to(matrices.dtype), values.sign().to(matrices.dtype)


def positive_factor(rows: Tensor, signs: Tensor) -> Tensor:
    """F [..., r, d] with FᵀF = the positive part of Σ_j s_j f_jᵀ f_j, for rows f [..., m, d] and
    signs s [..., m]; r is the smaller of m and d.
    """
    basis, triangle = torch.linalg.qr(rows.mT.double())
    core = (triangle * signs[..., None, :]) @ triangle.mT
    factor: Tensor = (basis @ positive_root(core, averaged=True)).mT
    return factor.to(rows.dtype)


def block_diagonal(pieces: Sequence[Tensor]) -> Tensor:
    """Square pieces along the diagonal of one matrix; a vector stands for a diagonal piece."""
    matrix: Tensor = torch.block_diag(
        *[torch.diag(piece) if piece.dim() == 1 else piece for piece in pieces]
    )
    return matrix


def normals(count: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Independent standard normals [count, d] with the last dimension, dtype and device of
    ``like``.
    """
    return torch.randn(
        count, like.shape[-1], generator=generator, dtype=like.dtype, device=like.device
    )


def antithetic(covariance: Covariance, samples: int, generator: torch.Generator) -> Tensor:
    """Draws of N(0, Σ) in pairs z, -z, [samples, d]: odd moments cancel exactly."""
    half = covariance.sample((samples + 1) // 2, generator)
    return torch.cat((half, -half))[:samples]

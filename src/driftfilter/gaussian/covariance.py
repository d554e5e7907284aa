"""Covariance structures: one algebra, so that every rule of the filter is written once.

A structure is an immutable value. A *gain* is a number (g I), a vector (diag g) or a matrix; a
*noise* is any of these or another covariance. What a structure cannot represent it refuses, naming
the structures that can.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from driftfilter.base.checks import (
    NotPositiveDefiniteError,
)

Gain: TypeAlias = "float | Tensor"


Noise: TypeAlias = "float | Tensor | Covariance"


Index: TypeAlias = "slice | Tensor"


class Covariance(Protocol):
    """A covariance Σ [d, d] behind the operations that inference, transition and prediction
    need.
    """

    @property
    def dimension(self) -> int:
        """d."""

    @property
    def dtype(self) -> torch.dtype:
        """float32 or float64."""

    def apply(self, vectors: Tensor) -> Tensor:
        """Σ v for rows v [..., d]."""

    def solve(self, vectors: Tensor) -> Tensor:
        """Σ⁻¹ v for rows v [..., d]."""

    def condition(self, factor: Tensor) -> Covariance:
        """(Σ⁻¹ + FᵀF)⁻¹ for F [m, d], before any truncation."""

    def truncate(self) -> Covariance:
        """The same covariance within the structure's budget of memory."""

    def propagate(self, gain: Gain, noise: Noise) -> Covariance:
        """G Σ Gᵀ + W."""

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws of N(0, Σ), [count, d]."""

    def variance(self) -> Tensor:
        """Diagonal of Σ, [d]."""

    def precision(self) -> Tensor:
        """Σ⁻¹ as a vector [d] where it is diagonal, as a matrix [d, d] otherwise."""

    def marginal(self, index: Index) -> Covariance:
        """The block of Σ for some coordinates."""

    def dense(self) -> Tensor:
        """Σ as a matrix [d, d]."""


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


def symmetrized(matrix: Tensor) -> Tensor:
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


def compacted(rows: Tensor) -> Tensor:
    """Rows with the same FᵀF, no more of them than columns."""
    if rows.shape[0] <= rows.shape[1]:
        return rows
    triangle: Tensor = torch.linalg.qr(rows, mode="r")[1]
    return triangle


def positive_root(matrices: Tensor) -> Tensor:
    """R [..., k, k] with R Rᵀ = the positive part of symmetric matrices: negative eigenvalues
    become 0.
    """
    values, vectors = torch.linalg.eigh(matrices.double())  # in float32 it may fail to converge
    root: Tensor = vectors * values.clamp_min(0).sqrt()[..., None, :]
    return root.to(matrices.dtype)


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

"""Covariance structures: one algebra, so that every rule of the filter is written once.

A structure is an immutable value. A *gain* is a number (g I), a vector (diag g) or a matrix; a *noise* is any of
these or another covariance. What a structure cannot represent it refuses, naming the structures that can.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias, final

import torch
from torch import Tensor

from driftfilter.checks import (
    NotPositiveDefiniteError,
    require,
    require_finite,
    require_floating,
    require_shape,
    unchecked,
)

Gain: TypeAlias = "float | Tensor"
Noise: TypeAlias = "float | Tensor | Covariance"
Index: TypeAlias = "slice | Tensor"


class Covariance(Protocol):
    """A covariance Σ [d, d] behind the operations that inference, transition and prediction need."""

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
    if status.item() != 0:
        raise NotPositiveDefiniteError(f"{what} is not positive definite (Cholesky failed at row {int(status)})")
    if not math.isfinite(root.diagonal().sum().item()):  # infinite pivots pass
        raise NotPositiveDefiniteError(f"{what} is not finite: it overflowed {matrix.dtype}")
    return root


def identity_like(matrix: Tensor) -> Tensor:
    """I of the same size, dtype and device."""
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def symmetrized(matrix: Tensor) -> Tensor:
    """(M + Mᵀ) / 2: conditioning never shrinks an antisymmetric rounding error, and discounting makes it grow as δ⁻ᵗ."""
    return (matrix + matrix.mT).mul_(0.5)


def column_energy(rows: Tensor) -> Tensor:
    """Σ_m F_mj² for rows [m, d], a few rows at a time so that the squares stay in the cache."""
    if rows.is_cuda or rows.shape[0] <= 16:
        return rows.square().sum(0)
    return torch.stack([part.square().sum(0) for part in rows.split(16)]).sum(0)


def compacted(rows: Tensor) -> Tensor:
    """Rows with the same FᵀF, no more of them than columns."""
    if rows.shape[0] <= rows.shape[1]:
        return rows
    triangle: Tensor = torch.linalg.qr(rows, mode="r")[1]
    return triangle


def positive_root(matrices: Tensor) -> Tensor:
    """R [..., k, k] with R Rᵀ = the positive part of symmetric matrices: negative eigenvalues become 0."""
    values, vectors = torch.linalg.eigh(matrices.double())  # in float32 it may fail to converge
    root: Tensor = vectors * values.clamp_min(0).sqrt()[..., None, :]
    return root.to(matrices.dtype)


def block_diagonal(pieces: Sequence[Tensor]) -> Tensor:
    """Square pieces along the diagonal of one matrix; a vector stands for a diagonal piece."""
    matrix: Tensor = torch.block_diag(*[torch.diag(piece) if piece.dim() == 1 else piece for piece in pieces])
    return matrix


@final
@dataclass(frozen=True, eq=False)
class Full:
    """Dense covariance: every correlation, O(d²) memory.

    Condition: Σ - (F Σ)ᵀ (I + F Σ Fᵀ)⁻¹ (F Σ), O(m d²).
    """

    matrix: Tensor  # [d, d]

    def __post_init__(self) -> None:
        require_shape("Full.matrix", self.matrix, "[d, d]", None, None)
        require_shape("Full.matrix", self.matrix, "[d, d]", *[self.matrix.shape[0]] * 2)
        require_floating("Full.matrix", self.matrix)
        require_finite("Full.matrix", self.matrix)
        asymmetry = (self.matrix - self.matrix.mT).abs().max().item()
        require(asymmetry <= 1e-5 * self.matrix.abs().max().item(), "Full.matrix", f"asymmetry {asymmetry:.3g}", "symmetric")
        object.__setattr__(self, "matrix", symmetrized(self.matrix.detach()))
        cholesky(self.matrix, "Full.matrix")

    @property
    def dimension(self) -> int:
        return self.matrix.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype

    @cached_property
    def root(self) -> Tensor:
        """Lower Cholesky factor L, Σ = L Lᵀ."""
        return cholesky(self.matrix, "the covariance")

    def apply(self, vectors: Tensor) -> Tensor:
        matrix: Tensor = self.__dict__.get("precise", self.matrix)
        applied = (vectors if vectors.dtype == matrix.dtype else vectors.to(matrix.dtype)) @ matrix
        return applied if applied.dtype == self.dtype else applied.to(self.dtype)

    def solve(self, vectors: Tensor) -> Tensor:
        return torch.cholesky_solve(vectors.reshape(-1, self.dimension).mT, self.root).mT.reshape(vectors.shape)

    def condition(self, factor: Tensor) -> Full:
        rows = factor.shape[0]
        if rows == 0:
            return self
        if self.dtype == torch.float32:
            # The mean step Σ g would lose eps · F Σ Fᵀ of its accuracy if Σ were rounded first.
            exact = unchecked(Full, matrix=self.matrix.double()).condition(factor.double()).matrix
            root, status = torch.linalg.cholesky_ex(exact.float())
            if status.item() == 0:
                return unchecked(Full, matrix=exact.float(), root=root, precise=exact)
            return unchecked(Full, **self._condition_by_roots(factor).__dict__, precise=exact)
        if rows < self.dimension:
            if rows == 1:
                vector = factor.select(0, 0)
                cross = self.matrix.mv(vector)
                scale = 1 + cross.dot(vector).item()
                if not 0 < scale < math.inf:
                    raise NotPositiveDefiniteError(f"1 + F Σ Fᵀ must be positive and finite, got {scale:g}")
                cross = cross / math.sqrt(scale)
                matrix = self.matrix - torch.outer(cross, cross)  # symmetric to the last bit, as torch.addr is not
            else:
                cross = factor @ self.matrix  # F Σ [m, d]
                inner = cross @ factor.mT
                inner.diagonal().add_(1)
                whitened = torch.linalg.solve_triangular(cholesky(inner, "I + F Σ Fᵀ"), cross, upper=False)
                matrix = symmetrized(torch.addmm(self.matrix, whitened.mT, whitened, alpha=-1.0))
            root, status = torch.linalg.cholesky_ex(matrix)
            if status.item() == 0:
                return unchecked(Full, matrix=matrix, root=root)
        return self._condition_by_roots(factor)

    def _condition_by_roots(self, factor: Tensor) -> Full:
        """L (I + Lᵀ FᵀF L)⁻¹ Lᵀ by QR of [F L; I]: no subtraction, so nothing cancels."""
        stacked = torch.cat((factor @ self.root, identity_like(self.matrix)))
        _, triangle = torch.linalg.qr(stacked, mode="r")
        half = torch.linalg.solve_triangular(triangle.mT, self.root.mT, upper=False)
        matrix = symmetrized(half.mT @ half)
        return unchecked(Full, matrix=matrix, root=cholesky(matrix, "the posterior covariance"))

    def truncate(self) -> Full:
        return unchecked(Full, matrix=self.matrix, root=self.root) if "precise" in self.__dict__ else self

    def propagate(self, gain: Gain, noise: Noise) -> Full:
        if isinstance(gain, float):
            if isinstance(noise, Tensor) and noise.dim() == 2:
                return unchecked(Full, matrix=torch.add(noise, self.matrix, alpha=gain * gain))
            moved = self.matrix * (gain * gain)
        elif gain.dim() == 1:
            moved = self.matrix * torch.outer(gain, gain)
        else:
            moved = symmetrized(gain @ self.matrix @ gain.mT)
        if isinstance(noise, float) or (isinstance(noise, Tensor) and noise.dim() == 1):
            moved.diagonal().add_(noise)
            return unchecked(Full, matrix=moved)
        return unchecked(Full, matrix=moved.add_(noise if isinstance(noise, Tensor) else noise.dense()))

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        return normals(count, self.matrix, generator) @ self.root.mT

    def variance(self) -> Tensor:
        return self.matrix.diagonal()

    def precision(self) -> Tensor:
        return torch.cholesky_inverse(self.root)

    def marginal(self, index: Index) -> Full:
        return unchecked(Full, matrix=self.matrix[index][:, index])

    def dense(self) -> Tensor:
        return self.matrix


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
            raise NotPositiveDefiniteError(f"Diagonal.values must be > 0, got a smallest value of {self.values.min().item():g}")

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
        values = self.values / (1 + self.values * column_energy(factor))
        if not values.min().item() > 0:
            raise NotPositiveDefiniteError("no posterior variance is left: the prior had none, or the curvature is too large")
        return unchecked(Diagonal, values=values)

    def truncate(self) -> Diagonal:
        return self

    def propagate(self, gain: Gain, noise: Noise) -> Diagonal:
        if isinstance(gain, Tensor) and gain.dim() == 2:
            raise refuse("Diagonal", "a dynamic that mixes coordinates", "Full or Blocks")
        if isinstance(noise, Tensor) and noise.dim() == 2:
            raise refuse("Diagonal", "noise that correlates coordinates", "Full or Blocks")
        if not isinstance(noise, (float, Tensor)):
            if not _is_diagonal(noise):
                raise refuse("Diagonal", "noise that correlates coordinates", "Full or Blocks")
            noise = noise.variance()
        return unchecked(Diagonal, values=self.values * (gain * gain) + noise)

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


@final
@dataclass(frozen=True, eq=False)
class Blocks:
    """Independent groups of coordinates, each with a structure of its own, one after the other.

    Conditioning keeps the diagonal blocks of the precision: Σ_b⁻¹ ← Σ_b⁻¹ + F_bᵀF_b.
    """

    parts: tuple[Covariance, ...]

    def __post_init__(self) -> None:
        require(isinstance(self.parts, (tuple, list)), "Blocks.parts", self.parts, "a tuple of covariances")
        object.__setattr__(self, "parts", tuple(self.parts))
        covariances = len(self.parts) > 0 and all(hasattr(part, "condition") for part in self.parts)
        require(covariances, "Blocks.parts", self.parts, "one covariance or more")
        dtypes = [part.dtype for part in self.parts]
        require(len(set(dtypes)) == 1, "Blocks.parts", dtypes, "covariances of one dtype")

    @property
    def dimension(self) -> int:
        return sum(self.sizes)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @cached_property
    def sizes(self) -> list[int]:
        """Coordinates of each part."""
        return [part.dimension for part in self.parts]

    def apply(self, vectors: Tensor) -> Tensor:
        return torch.cat([part.apply(v) for part, v in zip(self.parts, vectors.split(self.sizes, -1), strict=True)], -1)

    def solve(self, vectors: Tensor) -> Tensor:
        return torch.cat([part.solve(v) for part, v in zip(self.parts, vectors.split(self.sizes, -1), strict=True)], -1)

    def condition(self, factor: Tensor) -> Blocks:
        return Blocks(tuple(p.condition(f) for p, f in zip(self.parts, factor.split(self.sizes, -1), strict=True)))

    def truncate(self) -> Blocks:
        return Blocks(tuple(part.truncate() for part in self.parts))

    def propagate(self, gain: Gain, noise: Noise) -> Blocks:
        gains = self._split_matrix(gain, "a dynamic that mixes blocks")
        noises: Sequence[Noise]
        if isinstance(noise, (float, Tensor)):
            noises = self._split_matrix(noise, "noise that correlates blocks")
        elif isinstance(noise, Blocks) and noise.sizes == self.sizes:
            noises = noise.parts
        else:
            noises = self._split_matrix(noise.dense(), "noise that correlates blocks")
        return Blocks(tuple(p.propagate(g, w) for p, g, w in zip(self.parts, gains, noises, strict=True)))

    def _split_matrix(self, value: float | Tensor, what: str) -> Sequence[float | Tensor]:
        if isinstance(value, float):
            return [value] * len(self.parts)
        if value.dim() == 1:
            return list(value.split(self.sizes))
        pieces = [row.split(self.sizes, 1)[position] for position, row in enumerate(value.split(self.sizes, 0))]
        if sum(int(piece.count_nonzero()) for piece in pieces) != int(value.count_nonzero()):
            raise refuse("Blocks", what, "Full, or blocks that match the parts of BlockDynamics")
        return [_simplest(piece) for piece in pieces]

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.cat([part.sample(count, generator) for part in self.parts], -1)

    def variance(self) -> Tensor:
        return torch.cat([part.variance() for part in self.parts])

    def precision(self) -> Tensor:
        pieces = [part.precision() for part in self.parts]
        if all(piece.dim() == 1 for piece in pieces):
            return torch.cat(pieces)
        return block_diagonal(pieces)

    def marginal(self, index: Index) -> Covariance:
        wanted = torch.arange(self.dimension)[index.cpu() if isinstance(index, Tensor) else index]
        starts = torch.tensor([0, *self.sizes]).cumsum(0)
        require(bool((wanted.diff() > 0).all()), "Blocks.marginal index", index, "in ascending order")
        kept: list[Covariance] = []
        for part, start, stop in zip(self.parts, starts[:-1], starts[1:], strict=True):
            inside = wanted[(wanted >= start) & (wanted < stop)]
            if len(inside):
                kept.append(part.marginal(inside - start))
        return kept[0] if len(kept) == 1 else Blocks(tuple(kept))

    def dense(self) -> Tensor:
        return block_diagonal([part.dense() for part in self.parts])


def _is_diagonal(covariance: Covariance) -> bool:
    """Whether a covariance, which as a noise may be singular, has no correlations by its structure."""
    if isinstance(covariance, Blocks):
        return all(_is_diagonal(part) for part in covariance.parts)
    return isinstance(covariance, Diagonal)


def _simplest(matrix: Tensor) -> Tensor:
    """A matrix as the vector of its diagonal where it has nothing else."""
    diagonal = matrix.diagonal()
    return diagonal if int(matrix.count_nonzero()) == int(diagonal.count_nonzero()) else matrix


def normals(count: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Independent standard normals [count, d] with the last dimension, dtype and device of ``like``."""
    return torch.randn(count, like.shape[-1], generator=generator, dtype=like.dtype, device=like.device)


def antithetic(covariance: Covariance, samples: int, generator: torch.Generator) -> Tensor:
    """Draws of N(0, Σ) in pairs z, -z, [samples, d]: odd moments cancel exactly."""
    half = covariance.sample((samples + 1) // 2, generator)
    return torch.cat((half, -half))[:samples]

"""Σ⁻¹ = diag(u) + WᵀW: the covariance of models with too many parameters for a matrix."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import Self

from driftfilter.base.checks import (
    NotPositiveDefiniteError,
    require,
    require_finite,
    require_floating,
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
    cholesky,
    column_energy,
    compact,
    identity_like,
    normals,
    refuse,
)
from driftfilter.gaussian.full import Full


def _gram(rows: Tensor, weights: Tensor | None = None) -> Tensor:
    """F diag(w) Fᵀ for rows F [m, d], w = 1 unless given; from its lower triangle if that is
    faster.
    """
    if weights is not None and weights.shape[0]:
        low, high = torch.aminmax(weights)
        if low.item() == high.item():  # an isotropic prior: no need to scale every row
            return _gram(rows).mul_(low)
    count, width = rows.shape
    if rows.is_cuda or count < 80 or width < 4 * count:
        return (rows if weights is None else rows * weights) @ rows.mT
    gram = rows.new_zeros(count, count)
    # Panels of 40 rows waste few products above the diagonal; slices of 2,048 columns stay in the
    # cache.
    for left in range(0, width, 2048):
        part = rows[:, left : left + 2048]
        scaled = part if weights is None else part * weights[left : left + 2048]
        for start in range(0, count, 40):
            stop = min(start + 40, count)
            gram[start:stop, :stop].addmm_(scaled[start:stop], part[:stop].mT)
    return gram.tril_() + gram.tril(-1).mT


def _root_of_one_plus(gram: Tensor) -> Tensor:
    """Lower Cholesky factor of I + gram."""
    return cholesky(identity_like(gram) + gram, "I + F diag(w) Fᵀ")


@final
@dataclass(frozen=True, eq=False)
class LowRank(Covariance):
    """Diagonal plus low rank in precision form: Σ⁻¹ = diag(u) + WᵀW, O(d r) memory, never d×d.

    Conditioning appends the rows of F; ``truncate`` keeps the ``rank`` strongest directions (in the
    metric u⁻¹, so that one Gram matrix serves the solve and the truncation) and moves what it drops
    into u: diag(Σ⁻¹) is kept.
    """

    is_exact: ClassVar[bool] = True
    has_spectrum: ClassVar[bool] = False
    grows: ClassVar[tuple[str, ...]] = ("factor",)

    diagonal: Tensor  # [d], u: diagonal part of the precision
    factor: Tensor  # [r, d], W
    rank: int

    def __post_init__(self) -> None:
        require_shape("LowRank.diagonal", self.diagonal, "[d]", None)
        dimension = self.diagonal.shape[0]
        require(
            isinstance(self.factor, Tensor),
            "LowRank.factor",
            type(self.factor).__name__,
            "a tensor [r, d]",
        )
        require(
            self.factor.dim() == 2 and self.factor.shape[1] == dimension,
            "LowRank.factor",
            f"shape {list(self.factor.shape)}",
            f"of shape [r, {dimension}]",
        )
        require_floating("LowRank.diagonal", self.diagonal)
        require(
            self.factor.dtype == self.diagonal.dtype,
            "LowRank.factor",
            self.factor.dtype,
            f"{self.diagonal.dtype}",
        )
        self.__dict__.update(
            diagonal=self.diagonal.detach().clone(), factor=self.factor.detach().clone()
        )
        require_positive("LowRank.diagonal", self.diagonal)
        require_finite("LowRank.factor", self.factor)
        require(
            (isinstance(self.rank, int) and not isinstance(self.rank, bool))
            and 0 <= self.rank <= dimension,
            "LowRank.rank",
            self.rank,
            f"an integer in [0, {dimension}] (d)",
        )

    @classmethod
    def isotropic(
        cls, variance: float, dimension: int, rank: int, like: Tensor | None = None
    ) -> Self:
        """σ² I with room for ``rank`` directions; dtype and device as ``like``."""
        like = torch.empty(0) if like is None else like
        require(
            variance > 0 and math.isfinite(variance),
            "LowRank.variance",
            variance,
            "a finite number > 0",
        )
        return cls(like.new_full((dimension,), 1 / variance), like.new_zeros(0, dimension), rank)

    @classmethod
    def isotropic_like(
        cls, variance: float, mean: Tensor, rank: int = 0, shapes: Shapes = None
    ) -> Self:
        return cls.isotropic(variance, len(mean), min(rank, len(mean)), mean)

    @property
    def dimension(self) -> int:
        return self.diagonal.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.diagonal.dtype

    @cached_property
    def _energy(self) -> Tensor:
        """W u⁻¹ Wᵀ [r, r]."""
        return _gram(self.factor, self.diagonal.reciprocal())

    @cached_property
    def _core(self) -> Tensor:
        """Lower Cholesky factor of I + W u⁻¹ Wᵀ [r, r]."""
        return _root_of_one_plus(self._energy)

    def apply(self, vectors: Tensor) -> Tensor:
        """Woodbury: Σ v = v/u - u⁻¹ Wᵀ (I + W u⁻¹ Wᵀ)⁻¹ W v/u."""
        scaled = (vectors / self.diagonal).reshape(-1, self.dimension)
        weights = torch.cholesky_solve(self.factor @ scaled.mT, self._core)  # [r, ...]
        return (scaled - (weights.mT @ self.factor).div_(self.diagonal)).reshape(vectors.shape)

    def solve(self, vectors: Tensor) -> Tensor:
        return vectors * self.diagonal + (vectors @ self.factor.mT) @ self.factor

    def condition(self, factor: Tensor) -> Self:
        if self.factor.shape[0]:
            factor = torch.cat((self.factor, factor))
        return _low_rank(self.diagonal, compact(factor), self.rank)

    def inform(self, information: float | Tensor) -> Self:
        return LowRank(self.diagonal + information, self.factor, self.rank)

    def truncate(self) -> Self:
        if self.factor.shape[0] <= self.rank:
            return self
        # Ascending; in float32 the decomposition may fail to converge.
        _, directions = torch.linalg.eigh(self._energy.double())
        factor = directions[:, directions.shape[1] - self.rank :].mT.to(self.dtype) @ self.factor
        before = column_energy(self.factor)
        dropped = before - column_energy(factor)
        # Rounding would swamp u if W is strong.
        rounding = 16 * torch.finfo(self.dtype).eps * before
        return _low_rank(
            self.diagonal + dropped.masked_fill_(dropped <= rounding, 0.0), factor, self.rank
        )

    def propagate(self, gain: Gain, noise: Noise) -> Self:
        """Exact for diagonal G and W = diag(q) + low rank: with D₁ = g²/u, D₂ = q, u' = 1/(D₁ +
        D₂),

        Σ⁻¹ = diag(u') + Rᵀ (I + A Aᵀ)⁻¹ R,  R = [W g/u ; W₂ D₂] u',  A = [W √(D₂u'/u) ; -W₂ sign(g)
        √(D₁D₂u')].
        """
        if isinstance(gain, Tensor) and gain.dim() == 2:
            raise refuse("LowRank", "a dynamic that mixes coordinates", "Full, or Blocks of Full")
        if isinstance(noise, Tensor) and noise.dim() == 2:
            raise refuse("LowRank", "noise given as a matrix", "Full, or diagonal noise")
        added = None if isinstance(noise, (float, Tensor)) else _as_low_rank(noise)
        variance = noise if added is None else added.diagonal.reciprocal()  # D₂
        assert isinstance(variance, (float, Tensor))
        diagonal = (gain * gain / self.diagonal + variance).reciprocal()  # u'
        if not math.isfinite(diagonal.max().item()):
            raise NotPositiveDefiniteError(
                "a gain of 0 without noise leaves no covariance: add noise"
            )
        if isinstance(variance, float) and variance == 0.0:
            return _low_rank(diagonal, self.factor / gain, self.rank)
        if isinstance(gain, float) and gain == 0.0:
            rows = added.factor if added is not None else self.factor[:0]
            return _low_rank(diagonal, rows, self.rank).truncate()
        shrink = variance * diagonal / self.diagonal
        rows = self.factor * (gain * diagonal / self.diagonal)
        if added is not None and added.factor.shape[0]:
            sign = math.copysign(1.0, gain) if isinstance(gain, float) else gain.sign()
            shared = (gain * gain / self.diagonal * variance * diagonal).sqrt() * sign
            core = _gram(torch.cat((self.factor * shrink.sqrt(), added.factor * -shared)))
            rows = torch.cat((rows, added.factor * (variance * diagonal)))
        else:
            core = _gram(self.factor, shrink)
        solved = torch.linalg.solve_triangular(_root_of_one_plus(core), rows, upper=False)
        return _low_rank(diagonal, solved, self.rank).truncate()

    def smooth(self, gain: Gain, prior: Covariance, later: Covariance) -> Covariance:
        why = "smoothing, which needs the curvature that its truncation dropped"
        raise refuse("LowRank", why, "Full, Diagonal or Blocks of them")

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Matheron's rule: x + u⁻¹ Wᵀ (I + W u⁻¹ Wᵀ)⁻¹ (e - W x), x ~ N(0, u⁻¹), e ~ N(0, I)."""
        plain = normals(count, self.diagonal, generator) * self.diagonal.rsqrt()
        noise = torch.randn(
            count, self.factor.shape[0], generator=generator, dtype=plain.dtype, device=plain.device
        )
        weights = torch.cholesky_solve((noise - plain @ self.factor.mT).mT, self._core)
        return plain + (weights.mT @ self.factor).div_(self.diagonal)

    def variance(self) -> Tensor:
        half = torch.linalg.solve_triangular(self._core, self.factor, upper=False)
        subtracted = (1 - column_energy(half) / self.diagonal) / self.diagonal
        # If the subtraction cancels, Σ_ii >= 1 / (Σ⁻¹)_ii still holds.
        return torch.maximum(subtracted, (self.diagonal + column_energy(self.factor)).reciprocal())

    def precision(self) -> Tensor:
        if self.factor.shape[0]:
            raise refuse("LowRank", "a dense precision", "Full, or a source without low-rank part")
        return self.diagonal

    def log_determinant(self) -> Tensor:
        return -self.diagonal.log().sum() - 2 * self._core.diagonal().log().sum()

    def spectrum(self) -> Tensor:
        raise refuse("LowRank", "a marginal likelihood", "Full, Diagonal or Kronecker")

    def relative_trace(self, other: Covariance) -> Tensor:
        """u · diag C + tr W C Wᵀ."""
        shared = (other.apply(self.factor) * self.factor).sum()
        return (other.variance() * self.diagonal).sum() + shared

    @property
    def is_diagonal(self) -> bool:
        return not self.factor.shape[0]

    def marginal(self, index: Index) -> Self:
        """Schur complement: u_A, W_A and the core of those left out, I + W_B u_B⁻¹ W_Bᵀ."""
        rest = torch.ones(self.dimension, dtype=torch.bool, device=self.diagonal.device)
        rest[index] = False
        root = _root_of_one_plus(_gram(self.factor[:, rest], self.diagonal[rest].reciprocal()))
        factor = torch.linalg.solve_triangular(root, self.factor[:, index], upper=False)
        diagonal = self.diagonal[index]
        return _low_rank(diagonal, factor, min(self.rank, diagonal.shape[0]))

    def dense(self) -> Tensor:
        return self.apply(torch.diag(torch.ones_like(self.diagonal)))


def _low_rank(diagonal: Tensor, factor: Tensor, rank: int) -> LowRank:
    return unchecked(LowRank, diagonal=diagonal, factor=factor, rank=rank)


def _as_low_rank(noise: Covariance) -> LowRank:
    """A noise with few correlations as diagonal plus low rank; a variance of 0 becomes u = ∞."""
    if isinstance(noise, LowRank):
        return noise
    if noise.is_diagonal:
        precision = noise.precision()
        return _low_rank(precision, precision.new_zeros(0, noise.dimension), 0)
    parts = [_as_low_rank(part) for part in noise.independent_parts()]
    if not parts:
        raise refuse("LowRank", "noise that correlates coordinates", "Full")
    factor = torch.block_diag(*[part.factor for part in parts])
    return _low_rank(torch.cat([part.diagonal for part in parts]), factor, 0)


def exact_form(covariance: Covariance) -> Covariance:
    """Σ in a structure that conditions without projection, until it is truncated."""
    if covariance.is_exact:
        return covariance
    if covariance.is_diagonal:
        precision = covariance.precision()
        return LowRank(precision, precision.new_zeros(0, len(precision)), 0)
    return Full(covariance.dense())

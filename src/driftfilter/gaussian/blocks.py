"""Σ = diag(Σ₁, Σ₂, …): independent groups of coordinates, each with a structure of its own.

Every operation acts on each part alone. A gain or a noise that would mix parts is refused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import final

import torch
from torch import Tensor
from typing_extensions import Self

from driftfilter.base.checks import require
from driftfilter.gaussian.covariance import Covariance, Gain, Index, Noise, block_diagonal, refuse


@final
@dataclass(frozen=True, eq=False)
class Blocks(Covariance):
    """Independent groups of coordinates, each with a structure of its own, one after the other.

    Conditioning keeps the diagonal blocks of the precision: Σ_b⁻¹ ← Σ_b⁻¹ + F_bᵀF_b.
    """

    parts: tuple[Covariance, ...]

    def __post_init__(self) -> None:
        require(
            isinstance(self.parts, (tuple, list)),
            "Blocks.parts",
            self.parts,
            "a tuple of covariances",
        )
        object.__setattr__(self, "parts", tuple(self.parts))
        require(
            len(self.parts) > 0 and all(isinstance(part, Covariance) for part in self.parts),
            "Blocks.parts",
            self.parts,
            "one covariance or more",
        )
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

    def _split(self, vectors: Tensor) -> Iterator[tuple[Covariance, Tensor]]:
        """Each part with its piece of vectors [..., d]."""
        return zip(self.parts, vectors.split(self.sizes, -1), strict=True)

    def apply(self, vectors: Tensor) -> Tensor:
        return torch.cat([part.apply(piece) for part, piece in self._split(vectors)], -1)

    def solve(self, vectors: Tensor) -> Tensor:
        return torch.cat([part.solve(piece) for part, piece in self._split(vectors)], -1)

    def condition(self, factor: Tensor) -> Self:
        return Blocks(tuple(part.condition(piece) for part, piece in self._split(factor)))

    def remove(self, factor: Tensor) -> Self:
        return Blocks(tuple(part.remove(piece) for part, piece in self._split(factor)))

    def inform(self, information: float | Tensor) -> Self:
        if isinstance(information, float):
            return Blocks(tuple(part.inform(information) for part in self.parts))
        return Blocks(tuple(part.inform(piece) for part, piece in self._split(information)))

    def truncate(self) -> Self:
        return Blocks(tuple(part.truncate() for part in self.parts))

    def propagate(self, gain: Gain, noise: Noise) -> Self:
        gains = self._split_matrix(gain, "a dynamic that mixes blocks")
        if isinstance(noise, Blocks) and noise.sizes == self.sizes:
            noises: Sequence[Noise] = noise.parts
        else:
            matrix = noise if isinstance(noise, (float, Tensor)) else noise.dense()
            noises = self._split_matrix(matrix, "noise that correlates blocks")
        return Blocks(
            tuple(p.propagate(g, w) for p, g, w in zip(self.parts, gains, noises, strict=True))
        )

    def smooth(self, gain: Gain, prior: Covariance, later: Covariance) -> Self:
        gains = self._split_matrix(gain, "a dynamic that mixes blocks")
        both = zip(prior.independent_parts(), later.independent_parts(), strict=True)
        each = zip(self.parts, gains, both, strict=True)
        return Blocks(tuple(part.smooth(own, *others) for part, own, others in each))

    def _split_matrix(self, value: float | Tensor, what: str) -> Sequence[float | Tensor]:
        if isinstance(value, float):
            return [value] * len(self.parts)
        if value.dim() == 1:
            return list(value.split(self.sizes))
        pieces = [
            row.split(self.sizes, 1)[position]
            for position, row in enumerate(value.split(self.sizes, 0))
        ]
        if sum(int(piece.count_nonzero()) for piece in pieces) != int(value.count_nonzero()):
            raise refuse("Blocks", what, "Full, or blocks that match the parts of BlockDynamics")
        return [_simplify(piece) for piece in pieces]

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.cat([part.sample(count, generator) for part in self.parts], -1)

    def variance(self) -> Tensor:
        return torch.cat([part.variance() for part in self.parts])

    def precision(self) -> Tensor:
        pieces = [part.precision() for part in self.parts]
        return (
            torch.cat(pieces)
            if all(piece.dim() == 1 for piece in pieces)
            else block_diagonal(pieces)
        )

    def log_determinant(self) -> Tensor:
        return torch.stack([part.log_determinant() for part in self.parts]).sum()

    def spectrum(self) -> Tensor:
        return torch.cat([part.spectrum() for part in self.parts])

    def relative_trace(self, other: Covariance) -> Tensor:
        """Σ_b tr Σ_b⁻¹ C_b: only the blocks of C count."""
        traces = [
            part.relative_trace(other.marginal(slice(stop - part.dimension, stop)))
            for part, stop in zip(self.parts, accumulate(self.sizes), strict=True)
        ]
        return torch.stack(traces).sum()

    @property
    def is_diagonal(self) -> bool:
        return all(part.is_diagonal for part in self.parts)

    def independent_parts(self) -> tuple[Covariance, ...]:
        return self.parts

    def marginal(self, index: Index) -> Covariance:
        wanted = torch.arange(self.dimension)[index.cpu() if isinstance(index, Tensor) else index]
        starts = torch.tensor([0, *self.sizes]).cumsum(0)
        require(
            bool((wanted.diff() > 0).all()), "Blocks.marginal index", index, "in ascending order"
        )
        kept: list[Covariance] = []
        for part, start, stop in zip(self.parts, starts[:-1], starts[1:], strict=True):
            inside = wanted[(wanted >= start) & (wanted < stop)]
            if len(inside):
                kept.append(part.marginal(inside - start))
        return kept[0] if len(kept) == 1 else Blocks(tuple(kept))

    def dense(self) -> Tensor:
        return block_diagonal([part.dense() for part in self.parts])


def _simplify(matrix: Tensor) -> Tensor:
    """A matrix as the vector of its diagonal if it has nothing else."""
    diagonal = matrix.diagonal()
    return diagonal if int(matrix.count_nonzero()) == int(diagonal.count_nonzero()) else matrix

"""The transition p(θ_t given θ_{t-1}) = N(G θ + c, W): a dynamic (dynamics.py) and a noise
(noise.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, NamedTuple, final

import torch
from torch import Tensor

from driftfilter.base.checks import Checked, Role, register, require, require_count, unchecked
from driftfilter.gaussian.belief import Belief
from driftfilter.gaussian.blocks import Blocks
from driftfilter.gaussian.covariance import (
    Covariance,
    Gain,
    Noise,
    block_diagonal,
    positive_root,
    refuse,
)
from driftfilter.gaussian.diagonal import Diagonal
from driftfilter.gaussian.full import Full
from driftfilter.model.dynamics import Dynamics, Layout, Motion, RandomWalk, Spread, SpreadRule
from driftfilter.model.noise import NoiseModel, NoNoise


class BoundTransition(NamedTuple):
    """A transition whose constants are worked out for one source."""

    gain: Gain
    drift: float | Tensor
    spread: SpreadRule

    def spread_of(self, belief: Belief) -> Spread:
        """keep and noise for the belief that moves."""
        return self.spread if isinstance(self.spread, Spread) else self.spread(belief)

    def __call__(self, belief: Belief) -> Belief:
        keep, noise = self.spread_of(belief)
        covariance = belief.covariance
        if not (_is(self.gain, 1.0) and _is(keep, 1.0) and _is(noise, 0.0)):
            covariance = covariance.propagate(_scale(self.gain, keep), noise)
        return unchecked(Belief, mean=self._move(belief.mean), covariance=covariance)

    def _move(self, mean: Tensor) -> Tensor:
        if isinstance(self.gain, float) and isinstance(self.drift, Tensor):
            return torch.add(self.drift, mean, alpha=self.gain)
        moved = mean if _is(self.gain, 1.0) else _apply(self.gain, mean)
        return moved if _is(self.drift, 0.0) else moved + self.drift

    def move_sample(self, deviation: Tensor, belief: Belief, generator: torch.Generator) -> Tensor:
        """Deviations from the mean [count, d] after one step: G e + w, where w makes up the rest of
        Σ⁻.
        """
        keep, noise = self.spread_of(belief)
        drawn = _draw(noise, deviation, generator)
        if isinstance(keep, float) and keep > 1:
            extra = belief.covariance.sample(len(deviation), generator) * math.sqrt(keep - 1)
            return drawn + _apply(self.gain, deviation + extra)
        return drawn + _apply(_scale(self.gain, keep), deviation)


@final
@dataclass(frozen=True)
class Transition(Checked):
    """One move of the belief: μ⁻ = G μ + c, Σ⁻ = G Σ Gᵀ + W.

    >>> import torch, driftfilter as df
    >>> source = df.Belief(torch.zeros(2), df.Full(torch.eye(2)))
    >>> transition = df.Transition(df.MeanReversion(rho=0.5), df.Stationary())
    >>> transition(source, source).covariance.variance()
    tensor([1., 1.])
    """

    dynamics: Annotated[Dynamics, Role("dynamics", "RandomWalk()")] = field(
        default_factory=RandomWalk
    )
    noise: Annotated[NoiseModel, Role("noise", "Isotropic(0.01)")] = field(default_factory=NoNoise)

    def __call__(self, belief: Belief, source: Belief) -> Belief:
        return self.bind(source)(belief)

    def bind(self, source: Belief) -> BoundTransition:
        """Everything that depends on the source only, computed once."""
        motion = self.dynamics(source)
        if motion.spread is None:
            return BoundTransition(
                motion.gain, motion.drift, _settle(self.noise(motion.gain, source), source)
            )
        require(
            isinstance(self.noise, NoNoise),
            "Transition.noise",
            self.noise,
            "NoNoise() under BlockDynamics, whose parts have their own",
        )
        return BoundTransition(motion.gain, motion.drift, _settle(motion.spread, source))

    def augment(self, belief: Belief) -> Belief:
        """A belief over parameters as a belief over the states of the dynamic; hidden states start
        around 0.
        """
        layout = self.dynamics.layout(belief.dimension)
        if layout is None:
            return belief
        covariance, dynamics = belief.covariance, self.dynamics
        parts = covariance.independent_parts()
        index, variance = layout.places.to(belief.mean.device), layout.variance.to(belief.mean)
        mean = torch.zeros_like(variance).index_copy(0, index, belief.mean)
        if isinstance(dynamics, BlockDynamics) and dynamics.sizes == tuple(
            part.dimension for part in parts
        ):
            pieces = zip(dynamics.parts, dynamics.split(belief), strict=True)
            return Belief(mean, Blocks(tuple(part.augment(own).covariance for part, own in pieces)))
        if not covariance.is_dense:
            raise refuse(
                type(covariance).__name__,
                f"{type(dynamics).__name__}, whose hidden states correlate with the parameters",
                "Full, or Blocks of Full with BlockDynamics of the same sizes",
            )
        matrix = torch.diag(variance)
        matrix[index[:, None], index] = covariance.dense()
        return Belief(mean, Full(matrix))

    def read_out(self, parameters: int) -> Tensor | None:
        """E [d, states] with θ = E s; None if the state is the parameters."""
        layout = self.dynamics.layout(parameters)
        return None if layout is None else layout.read_out

    def sample_paths(self, belief: Belief, steps: int, count: int, seed: int = 0) -> Tensor:
        """Paths of the parameters without data, [count, steps + 1, d], from a belief over the
        parameters.

        Their moments are those of the filter's own prior, up to what a LowRank belief truncates on
        the way.
        """
        matrix = self.read_out(belief.dimension)
        states = self.sample_states(self.augment(belief), steps, count, seed)
        return states if matrix is None else states @ matrix.to(states).mT

    def sample_states(self, source: Belief, steps: int, count: int, seed: int = 0) -> Tensor:
        """Sampled prior paths with the hidden states, [count, steps + 1, states].

        The source is a belief over the states (see ``augment``).
        """
        require_count("sample_paths: steps", steps, 0)
        require_count("sample_paths: count", count, 1)
        bound = self.bind(source)
        generator = torch.Generator(device=source.mean.device).manual_seed(seed)
        belief = source
        deviation = source.covariance.sample(count, generator)
        paths = [belief.mean + deviation]
        for _ in range(steps):
            deviation = bound.move_sample(deviation, belief, generator)
            belief = bound(belief)
            paths.append(belief.mean + deviation)
        return torch.stack(paths, 1)


@final
@dataclass(frozen=True)
class BlockDynamics(Dynamics):
    """A transition of its own for each part of θ, block-diagonally: the paper's dynamic generalised
    linear model.

    G = diag(G₁, G₂, …), W = diag(W₁, W₂, …); covariances between parts move by the gains alone.
    Part i takes the next ``sizes[i]`` parameters.

    >>> import driftfilter as df
    >>> bias = df.Transition(df.RandomWalk(), df.Isotropic(0.01))
    >>> weights = df.Transition(df.PrecisionReversion(0.001), df.Stationary())
    >>> dynamics = df.Transition(df.BlockDynamics(sizes=(1, 2), parts=(bias, weights)))
    """

    sizes: tuple[int, ...]
    parts: tuple[Transition, ...]

    def __post_init__(self) -> None:
        self.__dict__.update(sizes=tuple(self.sizes), parts=tuple(self.parts))
        require(
            len(self.sizes) > 0 and all(isinstance(size, int) and size >= 1 for size in self.sizes),
            "BlockDynamics.sizes",
            self.sizes,
            "one or more integers >= 1",
        )
        require(
            len(self.parts) == len(self.sizes)
            and all(isinstance(part, Transition) for part in self.parts),
            "BlockDynamics.parts",
            self.parts,
            f"{len(self.sizes)} transitions, one for each size",
        )

    def _states(self) -> list[int]:
        return [
            size if layout is None else len(layout.variance)
            for layout, size in zip(self._layouts(), self.sizes, strict=True)
        ]

    def _layouts(self) -> list[Layout | None]:
        return [
            part.dynamics.layout(size) for part, size in zip(self.parts, self.sizes, strict=True)
        ]

    def split(self, belief: Belief) -> list[Belief]:
        """The belief over each part, given one over parameters or over states."""
        sizes = self.sizes if belief.dimension == sum(self.sizes) else self._states()
        require(
            belief.dimension == sum(sizes),
            "BlockDynamics.sizes",
            self.sizes,
            f"sizes that add up to the {belief.dimension} parameters of the belief",
        )
        return [
            belief.marginal(slice(stop - size, stop))
            for stop, size in zip(accumulate(sizes), sizes, strict=True)
        ]

    def __call__(self, source: Belief) -> Motion:
        sizes, mean = self._states(), source.mean
        bound = [
            part.bind(piece) for part, piece in zip(self.parts, self.split(source), strict=True)
        ]
        gain = _concatenate([part.gain for part in bound], sizes, mean)
        drift = _concatenate([part.drift for part in bound], sizes, mean)

        def spread(belief: Belief) -> Spread:
            moved: list[Spread] = []
            for part, piece in zip(bound, self.split(belief), strict=True):
                keep, noise = part.spread_of(piece)
                if (
                    isinstance(keep, float) and keep > 1
                ):  # inflate this block, leave its cross-covariances alone
                    keep, noise = (
                        1.0,
                        piece.covariance.propagate(_scale(part.gain, keep - 1), noise),
                    )
                moved.append(Spread(keep, noise))
            return Spread(
                _concatenate([part.keep for part in moved], sizes, mean),
                _join([part.noise for part in moved], sizes, mean),
            )

        fixed = [part.spread for part in bound if isinstance(part.spread, Spread)]
        if len(fixed) == len(bound) and all(_is(part.keep, 1.0) for part in fixed):
            return Motion(
                gain, drift, Spread(1.0, _join([part.noise for part in fixed], sizes, mean))
            )
        return Motion(gain, drift, spread)

    def layout(self, parameters: int) -> Layout | None:
        require(
            parameters == sum(self.sizes),
            "BlockDynamics.sizes",
            self.sizes,
            f"sizes that add up to {parameters} parameters",
        )
        layouts = self._layouts()
        if all(layout is None for layout in layouts):
            return None
        pieces = [
            layout
            or Layout(
                torch.eye(size, dtype=torch.float64),
                torch.arange(size),
                torch.zeros(size, dtype=torch.float64),
            )
            for layout, size in zip(layouts, self.sizes, strict=True)
        ]
        stops = accumulate(len(piece.variance) for piece in pieces)
        return Layout(
            block_diagonal([piece.read_out for piece in pieces]),
            torch.cat(
                [
                    piece.places + (stop - len(piece.variance))
                    for piece, stop in zip(pieces, stops, strict=True)
                ]
            ),
            torch.cat([piece.variance for piece in pieces]),
        )


def _settle(spread: SpreadRule, source: Belief) -> SpreadRule:
    """A constant noise as a matrix if the covariance is one: once, instead of at every step."""
    if not isinstance(spread, Spread) or not source.covariance.is_dense or _is(spread.noise, 0.0):
        return spread
    noise = spread.noise
    if isinstance(noise, float):
        noise = source.mean.new_full((source.dimension,), noise)
    if isinstance(noise, Tensor):
        return Spread(spread.keep, torch.diag(noise) if noise.dim() == 1 else noise)
    return Spread(spread.keep, noise.dense())


def _is(value: object, number: float) -> bool:
    return isinstance(value, float) and value == number


def _apply(gain: Gain, vectors: Tensor) -> Tensor:
    """G v for rows v [..., d]."""
    return vectors * gain if isinstance(gain, float) or gain.dim() == 1 else vectors @ gain.mT


def _scale(gain: Gain, keep: float | Tensor) -> Gain:
    """The gain √keep G, whose square multiplies the covariance by keep."""
    if isinstance(keep, float):
        return gain if keep == 1.0 else gain * math.sqrt(keep)
    root = keep.sqrt()
    return root * gain if isinstance(gain, float) or gain.dim() == 1 else root[:, None] * gain


def _draw(noise: Noise, like: Tensor, generator: torch.Generator) -> Tensor:
    """Draws of N(0, W) [count, d] for a W that may be singular."""
    if isinstance(noise, Covariance):
        parts = noise.independent_parts()
        if parts:
            drawn = zip(parts, like.split([part.dimension for part in parts], -1), strict=True)
            return torch.cat([_draw(part, piece, generator) for part, piece in drawn], -1)
        if not noise.is_dense:
            return noise.sample(len(like), generator)
        noise = noise.dense()
    normals = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)
    if isinstance(noise, float):
        return normals * math.sqrt(noise)
    return (
        normals * noise.clamp_min(0).sqrt()
        if noise.dim() == 1
        else normals @ positive_root(noise).mT
    )


def _concatenate(
    values: Sequence[float | Tensor], sizes: Sequence[int], like: Tensor
) -> float | Tensor:
    """Numbers, vectors and matrices of the parts as one number, vector or block-diagonal matrix."""
    if all(isinstance(value, float) and value == values[0] for value in values):
        return values[0]
    pieces = [
        like.new_full((size,), v) if isinstance(v, float) else v
        for v, size in zip(values, sizes, strict=True)
    ]
    return (
        torch.cat(pieces) if all(piece.dim() == 1 for piece in pieces) else block_diagonal(pieces)
    )


def _join(noises: Sequence[Noise], sizes: Sequence[int], like: Tensor) -> Noise:
    """The noises of the parts as one: diagonal if all are, blocks otherwise."""
    plain = [
        noise
        for noise in noises
        if isinstance(noise, float) or (isinstance(noise, Tensor) and noise.dim() == 1)
    ]
    if len(plain) == len(noises):
        return _concatenate(plain, sizes, like)
    parts: list[Covariance] = []
    for noise, size in zip(noises, sizes, strict=True):
        if isinstance(noise, float):
            parts.append(unchecked(Diagonal, values=like.new_full((size,), noise)))
        elif isinstance(noise, Tensor):
            parts.append(
                unchecked(Diagonal, values=noise)
                if noise.dim() == 1
                else unchecked(Full, matrix=noise)
            )
        else:
            parts.append(noise)
    return Blocks(tuple(parts))


register(dynamics=(BlockDynamics,), transition=(Transition,))

"""Dynamics made of transitions: one for each part of the parameters, or several added up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final

import torch
from torch import Tensor

from driftfilter.base.checks import register, require, unchecked
from driftfilter.gaussian.belief import Belief
from driftfilter.gaussian.blocks import Blocks
from driftfilter.gaussian.covariance import Covariance, Noise, block_diagonal
from driftfilter.gaussian.diagonal import Diagonal
from driftfilter.gaussian.full import Full
from driftfilter.model.dynamics import Dynamics, Layout, Motion, Spread, SpreadRule
from driftfilter.model.transition import BoundTransition, Transition, is_number, scale_gain


def _require_one_clock(field: str, parts: tuple[Transition, ...]) -> None:
    """Raise unless parts leave the time to the whole."""
    own = [part.samples for part in parts if part.samples]
    require(not own, f"{field}: samples", own, "0 of each part: the whole has Transition.samples")


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
        _require_one_clock("BlockDynamics.parts", self.parts)

    def _layouts(self) -> list[Layout | None]:
        return [
            part.dynamics.layout(size) for part, size in zip(self.parts, self.sizes, strict=True)
        ]

    def __call__(self, source: Belief) -> Motion:
        layouts = zip(self._layouts(), self.sizes, strict=True)
        states = [len((layout or _plain(size)).variance) for layout, size in layouts]
        require(
            source.dimension == sum(states),
            "BlockDynamics.sizes",
            self.sizes,
            f"sizes that add up to the {source.dimension} parameters of the belief",
        )
        return _bind_parts(self.parts, states, source)

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
        pieces = [layout or _plain(size) for layout, size in zip(layouts, self.sizes, strict=True)]
        stops = accumulate(len(piece.variance) for piece in pieces)
        places = [
            piece.places + (stop - len(piece.variance))
            for piece, stop in zip(pieces, stops, strict=True)
        ]
        return Layout(
            block_diagonal([piece.read_out for piece in pieces]), torch.cat(places), *_start(pieces)
        )

    def augment_parts(self, belief: Belief) -> tuple[Covariance, ...]:
        parts = belief.covariance.independent_parts()
        if self.sizes != tuple(part.dimension for part in parts):
            return ()
        pieces = zip(self.parts, _split(belief, self.sizes), strict=True)
        return tuple(part.augment(own).covariance for part, own in pieces)


@final
@dataclass(frozen=True)
class SumDynamics(Dynamics):
    """Several dynamics of the same parameters added up: a trend and a season, or two seasons.

    θ = E₁ s₁ + E₂ s₂ + …; each part has states and a noise of its own, which start independent of
    the others'. The first part starts at the parameters. Those added to it have no level:
    ``Seasonal(level=False)``.

    >>> import driftfilter as df
    >>> trend = df.Transition(df.LocalTrend(velocity=0.01), df.Isotropic(1e-4))
    >>> week = df.Transition(df.Seasonal(period=7, level=False), df.Isotropic(1e-5))
    >>> dynamics = df.Transition(df.SumDynamics((trend, week)))
    """

    parts: tuple[Transition, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        require(
            len(self.parts) > 0
            and all(
                isinstance(part, Transition) and not isinstance(part.dynamics, BlockDynamics)
                for part in self.parts
            ),
            "SumDynamics.parts",
            self.parts,
            "one transition or more, none of BlockDynamics (of which a sum may be a part)",
        )
        _require_one_clock("SumDynamics.parts", self.parts)

    @property
    def states(self) -> int:
        return sum(part.dynamics.states for part in self.parts)

    def __call__(self, source: Belief) -> Motion:
        require(
            source.dimension % self.states == 0,
            "source belief",
            f"dimension {source.dimension}",
            f"over the augmented state, a multiple of {self.states} (see Transition.augment)",
        )
        parameters = source.dimension // self.states
        sizes = [part.dynamics.states * parameters for part in self.parts]
        return _bind_parts(self.parts, sizes, source)

    def layout(self, parameters: int) -> Layout:
        pieces = [part.dynamics.layout(parameters) or _plain(parameters) for part in self.parts]
        require(
            len(pieces[0].places) == parameters and not any(len(p.places) for p in pieces[1:]),
            "SumDynamics.parts",
            self.parts,
            "a first part that holds the parameters and others without a level, such as "
            "Seasonal(level=False)",
        )
        read_out = torch.cat([piece.read_out for piece in pieces], 1)
        return Layout(read_out, pieces[0].places, *_start(pieces))


def _plain(parameters: int) -> Layout:
    """The layout of a dynamic whose state is the parameters."""
    zeros = torch.zeros(parameters, dtype=torch.float64)
    return Layout(torch.diag(zeros + 1), torch.arange(parameters), zeros)


def _start(pieces: Sequence[Layout]) -> tuple[Tensor, Tensor]:
    """Variances and means of the states of all parts [states]."""
    means = [torch.zeros_like(piece.variance) + piece.mean for piece in pieces]
    return torch.cat([piece.variance for piece in pieces]), torch.cat(means)


def _split(belief: Belief, sizes: Sequence[int]) -> list[Belief]:
    """The belief over each part, of so many coordinates."""
    return [
        belief.marginal(slice(stop - size, stop))
        for stop, size in zip(accumulate(sizes), sizes, strict=True)
    ]


def _bind_parts(parts: Sequence[Transition], sizes: Sequence[int], source: Belief) -> Motion:
    """The motion of parts with so many states each, from a source over the states of all."""
    pieces = zip(parts, _split(source, sizes), strict=True)
    return _join_motions([part.bind(piece) for part, piece in pieces], sizes, source.mean)


def _join_motions(bound: Sequence[BoundTransition], sizes: Sequence[int], like: Tensor) -> Motion:
    """The motions of parts with so many states each as one, and the same over any time."""

    def spread(belief: Belief) -> Spread:
        moved: list[Spread] = []
        for part, piece in zip(bound, _split(belief, sizes), strict=True):
            keep, noise = part.spread_of(piece)
            if isinstance(keep, float) and keep > 1:
                # Inflate this block, leave its cross-covariances alone.
                inflation = piece.covariance.propagate(scale_gain(part.gain, keep - 1), noise)
                keep, noise = 1.0, inflation
            moved.append(Spread(keep, noise))
        return Spread(
            _concatenate([part.keep for part in moved], sizes, like),
            _join([part.noise for part in moved], sizes, like),
        )

    fixed = [part.spread for part in bound if isinstance(part.spread, Spread)]
    rule: SpreadRule = spread
    if len(fixed) == len(bound) and all(is_number(part.keep, 1.0) for part in fixed):
        rule = Spread(1.0, _join([part.noise for part in fixed], sizes, like))
    return Motion(
        _concatenate([part.gain for part in bound], sizes, like),
        _concatenate([part.drift for part in bound], sizes, like),
        rule,
        lambda dt: _join_motions([part.over(dt) for part in bound], sizes, like),
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


register(dynamics=(BlockDynamics, SumDynamics))

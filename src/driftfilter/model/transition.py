"""The transition p(θ_t given θ_{t-1}) = N(G θ + c, W): a dynamic (dynamics.py) and a noise
(noise.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, final

import torch
from torch import Tensor

from driftfilter.base.checks import (
    LATE,
    Checked,
    Count,
    Role,
    register,
    require,
    require_count,
    unchecked,
)
from driftfilter.gaussian.belief import Belief
from driftfilter.gaussian.blocks import Blocks
from driftfilter.gaussian.covariance import Covariance, Gain, Noise, positive_root, refuse
from driftfilter.gaussian.full import Full
from driftfilter.model.closed_forms import share_of
from driftfilter.model.dynamics import (
    Dynamics,
    Motion,
    MovingSpread,
    RandomWalk,
    Spread,
    SpreadRule,
)
from driftfilter.model.elapsed import gather, move_on
from driftfilter.model.noise import NoiseModel, NoNoise


@final
@dataclass(frozen=True, eq=False)
class BoundTransition:
    """A transition whose constants are worked out for one source."""

    gain: Gain
    drift: float | Tensor
    spread: SpreadRule
    motion_over: Callable[[float], Motion] | None = None  # of a dynamic that knows its own

    def spread_of(self, belief: Belief) -> Spread:
        """keep and noise for the belief that moves."""
        return self.spread if isinstance(self.spread, Spread) else self.spread(belief)

    def __call__(self, belief: Belief) -> Belief:
        keep, noise = self.spread_of(belief)
        covariance = belief.covariance
        if not (is_number(self.gain, 1.0) and is_number(keep, 1.0) and is_number(noise, 0.0)):
            covariance = covariance.propagate(scale_gain(self.gain, keep), noise)
        return unchecked(Belief, mean=self._move(belief.mean), covariance=covariance)

    def _move(self, mean: Tensor) -> Tensor:
        if isinstance(self.gain, float) and isinstance(self.drift, Tensor):
            return torch.add(self.drift, mean, alpha=self.gain)
        moved = mean if is_number(self.gain, 1.0) else apply_gain(self.gain, mean)
        return moved if is_number(self.drift, 0.0) else moved + self.drift

    def kept_gain(self, belief: Belief) -> Gain:
        """K with Cov(θ_t, θ_{t-1}) = K Σ: the gain, less what a reset drops; what inflates Σ is
        noise.
        """
        keep = self.spread_of(belief).keep
        return self.gain if isinstance(keep, float) and keep > 1 else scale_gain(self.gain, keep)

    def over(self, dt: float) -> BoundTransition:
        """This transition over ``dt`` units of time: what as many transitions come to one after the
        other, if dt is whole. Over dt = 0 nothing moves.
        """
        if dt == 1:
            return self
        if dt == 0:
            return BoundTransition(1.0, 0.0, Spread(1.0, 0.0))
        if self.motion_over is not None:
            motion = self.motion_over(dt)
            assert motion.spread is not None
            return BoundTransition(motion.gain, motion.drift, motion.spread)
        gain, drift = move_on(self.gain, self.drift, dt)
        return BoundTransition(gain, drift, self._spread_over(dt))

    def _spread_over(self, dt: float) -> SpreadRule:
        spread = self.spread
        if isinstance(spread, MovingSpread):
            return spread.over(dt)
        allowed = "1 for a spread of your own that has no over(dt)"
        keep = spread.keep if isinstance(spread, Spread) else None
        require(isinstance(keep, float), "dt", dt, allowed)
        assert isinstance(spread, Spread)
        assert isinstance(keep, float)
        if keep == 0.0:
            return spread
        return Spread(keep**dt, gather(scale_gain(self.gain, keep), spread.noise, dt))

    def move_sample(self, deviation: Tensor, belief: Belief, generator: torch.Generator) -> Tensor:
        """Deviations from the mean [count, d] after one step: G e + w, where w makes up the rest of
        Σ⁻.
        """
        keep, noise = self.spread_of(belief)
        drawn = _draw(noise, deviation, generator)
        if isinstance(keep, float) and keep > 1:
            extra = belief.covariance.sample(len(deviation), generator) * math.sqrt(keep - 1)
            return drawn + apply_gain(self.gain, deviation + extra)
        return drawn + apply_gain(scale_gain(self.gain, keep), deviation)


@final
@dataclass(frozen=True)
class Transition(Checked):
    """One move of the belief: μ⁻ = G μ + c, Σ⁻ = G Σ Gᵀ + W.

    ``samples`` N > 0: a step on n samples takes min(1, n/N) of a unit of time, so that a stream
    forgets alike in batches of N and smaller ones; a ``dt`` multiplies that, and ``elapse`` counts
    in whole units. A window counts each time that it is learned from. 0: every step takes one.

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
    samples: Count = field(default=0, metadata=LATE)

    def time_of(self, samples: int) -> float:
        """Units of time that so many samples take."""
        return share_of(samples, self.samples) if self.samples else 1.0

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
            f"NoNoise() under {type(self.dynamics).__name__}, whose parts have their own",
        )
        return BoundTransition(
            motion.gain, motion.drift, _settle(motion.spread, source), motion.over
        )

    def augment(self, belief: Belief) -> Belief:
        """A belief over parameters as a belief over the states of the dynamic.

        Hidden states start around 0, or where the dynamic says; the parameters are as given.
        """
        layout = self.dynamics.layout(belief.dimension)
        if layout is None:
            return belief
        require(
            len(layout.places) == belief.dimension,
            "Transition.dynamics",
            self.dynamics,
            "one with a level; without, it is to be added to another one by SumDynamics",
        )
        covariance = belief.covariance
        index, variance = layout.places.to(belief.mean.device), layout.variance.to(belief.mean)
        hidden = (torch.zeros_like(layout.variance) + layout.mean).index_fill(0, layout.places, 0.0)
        level = belief.mean - (layout.read_out @ hidden).to(belief.mean)
        mean = hidden.to(belief.mean).index_copy(0, index, level)
        parts = self.dynamics.augment_parts(belief)
        if parts:
            return Belief(mean, Blocks(parts))
        if not covariance.is_dense:
            raise refuse(
                type(covariance).__name__,
                f"{type(self.dynamics).__name__}, whose hidden states correlate with the "
                "parameters",
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


def _settle(spread: SpreadRule, source: Belief) -> SpreadRule:
    """A constant noise as a matrix if the covariance is one: once, instead of at every step."""
    if (
        not isinstance(spread, Spread)
        or not source.covariance.is_dense
        or is_number(spread.noise, 0.0)
    ):
        return spread
    noise = spread.noise
    if isinstance(noise, float):
        noise = source.mean.new_full((source.dimension,), noise)
    if isinstance(noise, Tensor):
        return Spread(spread.keep, torch.diag(noise) if noise.dim() == 1 else noise)
    return Spread(spread.keep, noise.dense())


def is_number(value: object, number: float) -> bool:
    """Whether a gain or noise is this number."""
    return isinstance(value, float) and value == number


def apply_gain(gain: Gain, vectors: Tensor, transposed: bool = False) -> Tensor:
    """G v for rows v [..., d], or Gᵀ v."""
    if isinstance(gain, float) or gain.dim() == 1:
        return vectors * gain
    return vectors @ (gain if transposed else gain.mT)


def scale_gain(gain: Gain, keep: float | Tensor) -> Gain:
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


register(transition=(Transition,))

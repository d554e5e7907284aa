"""Dynamics: how the mean of the parameters moves between two steps, θ_t = G θ_{t-1} + c + noise.

A dynamic is called with the source belief and gives the affine map. Trend and seasonal dynamics
keep hidden states beside each parameter (velocity, harmonics): the belief is then over the
augmented state s, parameters are read out as θ = E s. For d parameters and m states each, s =
[states 1 of all d, states 2 of all d, …].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Protocol, TypeAlias, final, runtime_checkable

import torch
from torch import Tensor

from driftfilter.base.checks import (
    Checked,
    Count,
    Fraction,
    Interval,
    NotNegative,
    Positive,
    PositiveCount,
    register,
    require,
    require_number,
)
from driftfilter.gaussian.belief import Belief
from driftfilter.gaussian.covariance import Covariance, Gain, Noise, block_diagonal

Matrix: TypeAlias = float | tuple[float, ...] | tuple[tuple[float, ...], ...]


class Spread(NamedTuple):
    """What happens to a covariance besides the gain: Σ⁻ = keep · G Σ Gᵀ + noise."""

    keep: float | Tensor
    noise: Noise


# Constant, or a function of the belief that moves.
SpreadRule: TypeAlias = "Spread | Callable[[Belief], Spread]"


@runtime_checkable
class MovingSpread(Protocol):
    """A spread that depends on the belief, and is known for any length of time."""

    def __call__(self, belief: Belief) -> Spread:
        """The spread for the belief that moves."""

    def over(self, dt: float) -> SpreadRule:
        """The rule for ``dt`` units of time."""


class Motion(NamedTuple):
    """μ⁻ = G μ + c; a dynamic that also decides the noise says so in ``spread``, and ``over`` what
    it is over another length of time.
    """

    gain: Gain
    drift: float | Tensor
    spread: SpreadRule | None = None
    over: Callable[[float], Motion] | None = None


class Layout(NamedTuple):
    """Where the parameters stand in the augmented state."""

    read_out: Tensor  # [d, states], θ = E s
    places: Tensor  # [d], the states that start as the parameters; [0] if the parameters are a sum
    variance: Tensor  # [states], where the hidden states start
    mean: float | Tensor = 0.0  # [states], the same; the parameters make up for what it reads out


class Dynamics(Protocol):
    """An affine map of the parameters, fixed by the source belief."""

    @property
    def states(self) -> int:
        """States of each parameter, of which ``layout`` is made."""
        return 1

    def __call__(self, source: Belief) -> Motion:
        """The motion, for a source belief over the (augmented) state."""

    def layout(self, parameters: int) -> Layout | None:
        """The augmented state for this many parameters; None if the state is the parameters."""
        return None

    def augment_parts(self, belief: Belief) -> tuple[Covariance, ...]:
        """The augmented covariances of parts that are independent in the belief and move on their
        own; none if the parts of the belief are not those of the dynamic.
        """
        return ()


def as_matrix(value: Matrix | Tensor, like: Tensor) -> Gain:
    """A configured number, vector or matrix as the algebra takes it."""
    return float(value) if isinstance(value, (int, float)) else like.new_tensor(value)


def as_config(field: str, value: object) -> Matrix:
    """Numbers, sequences and tensors as plain nested tuples, so that they compare, print and go to
    TOML.
    """
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        require_number(field, value, -math.inf, math.inf)
        return float(value)
    require(
        isinstance(value, Sequence) and not isinstance(value, str),
        field,
        value,
        "a number, vector or matrix",
    )
    assert isinstance(value, Sequence)
    items = tuple(as_config(field, item) for item in value)
    require(
        len({len(item) if isinstance(item, tuple) else 0 for item in items}) == 1,
        field,
        value,
        "a number, a vector or a matrix with rows of equal length",
    )
    return items  # type: ignore[return-value]


def _augment(read_out: Sequence[float], scale: float, start: Tensor, level: bool = True) -> Layout:
    """States of one kind side by side, starting at ``start`` [states, d] with variance scale²; the
    first are the parameters if there is a level.
    """
    parameters = start.shape[1]
    return Layout(
        torch.kron(
            torch.tensor([read_out], dtype=torch.float64),
            torch.eye(parameters, dtype=torch.float64),
        ),
        torch.arange(parameters if level else 0),
        torch.full((len(read_out) * parameters,), scale**2, dtype=torch.float64),
        start.flatten(),
    )


def _spread_out(field: str, value: Matrix | Tensor, rows: int, parameters: int) -> Tensor:
    """A configured start as a matrix [rows, d]: a number or a vector [d] is its first row."""
    given = torch.tensor(value, dtype=torch.float64)
    require(
        given.dim() == 0 or tuple(given.shape) in ((parameters,), (rows, parameters)),
        field,
        f"shape {list(given.shape)}",
        f"a number, a vector [{parameters}] or a matrix [{rows}, {parameters}]",
    )
    start = torch.zeros(rows, parameters, dtype=torch.float64)
    start[: rows if given.dim() == 2 else 1] = given
    return start


def _repeat(block: Tensor, source: Belief) -> Tensor:
    """One small gain for every parameter: block ⊗ I."""
    require(
        source.dimension % block.shape[0] == 0,
        "source belief",
        f"dimension {source.dimension}",
        f"over the augmented state, a multiple of {block.shape[0]} (see Transition.augment)",
    )
    return torch.kron(block, torch.eye(source.dimension // block.shape[0], dtype=torch.float64)).to(
        source.mean
    )


@final
@dataclass(frozen=True)
class RandomWalk(Dynamics):
    """No direction of drift: G = I, c = 0."""

    def __call__(self, source: Belief) -> Motion:
        return Motion(1.0, 0.0)


@final
@dataclass(frozen=True)
class MeanReversion(Checked, Dynamics):
    """Decay to the source mean without evidence: G = ρ I, c = (1 - ρ) μ₀."""

    rho: Fraction = 0.99

    def __call__(self, source: Belief) -> Motion:
        return Motion(float(self.rho), (1 - self.rho) * source.mean)


@final
@dataclass(frozen=True)
class PrecisionReversion(Checked, Dynamics):
    """Decay to the source mean, fastest where the source was certain: G = I - η Λ₀, c = η Λ₀ μ₀.

    Stable only for η λ_max(Λ₀) < 2, which is checked against the source.
    """

    eta: NotNegative = 0.001

    def __call__(self, source: Belief) -> Motion:
        precision = source.covariance.precision()
        largest = (
            precision.max() if precision.dim() == 1 else torch.linalg.eigvalsh(precision)[-1]
        ).item()
        require(
            self.eta * largest < 2,
            "PrecisionReversion.eta",
            self.eta,
            f"below 2 / λ_max = {2 / largest:g} for this source (largest precision {largest:g})",
        )
        if precision.dim() == 1:
            return Motion(1 - self.eta * precision, self.eta * precision * source.mean)
        gain = torch.eye(source.dimension).to(precision) - self.eta * precision
        return Motion(gain, self.eta * (precision @ source.mean))


@final
@dataclass(frozen=True)
class LocalTrend(Checked, Dynamics):
    """Local polynomial trend: θ_t = θ_{t-1} + dt v_{t-1}, v_t = v_{t-1} + dt a_{t-1}, … (order 0 is
    a random walk).

    G = I + dt N, the Jordan block of order + 1 states for each parameter. Hidden states start at
    N(``velocity``, scale²): a number or a vector [d] is the mean of v, a matrix [order, d] those of
    v, a, ….
    """

    order: Count = 1
    dt: Positive = 1.0
    scale: Positive = 0.1
    velocity: Matrix | Tensor = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        velocity = as_config("LocalTrend.velocity", self.velocity)
        object.__setattr__(self, "velocity", velocity)
        allowed = "0 for a trend of order 0, which has none"
        require(self.order > 0 or velocity == 0.0, "LocalTrend.velocity", velocity, allowed)

    @property
    def states(self) -> int:
        return self.order + 1

    def __call__(self, source: Belief) -> Motion:
        block = (
            torch.eye(self.states, dtype=torch.float64)
            + self.dt * torch.diag(torch.ones(self.order), 1).double()
        )
        return Motion(1.0, 0.0) if self.states == 1 else Motion(_repeat(block, source), 0.0)

    def layout(self, parameters: int) -> Layout | None:
        if not self.order:
            return None
        hidden = _spread_out("LocalTrend.velocity", self.velocity, self.order, parameters)
        start = torch.cat((torch.zeros(1, parameters, dtype=torch.float64), hidden))
        return _augment([1.0, *[0.0] * self.order], self.scale, start)


@final
@dataclass(frozen=True)
class Seasonal(Checked, Dynamics):
    """Level plus Fourier harmonics: θ = level + Σ_j a_j, (a_j, b_j) rotates by 2πj/period a step.

    G = diag(1, R(2π/period), R(4π/period), …), R(w) = [[cos w, sin w], [-sin w, cos w]]; the
    harmonic j = period/2 is a single state with gain -1. Harmonics start with variance scale²
    around what is known of them, a_j(t) = A sin(2πjt/period + φ), A = ``amplitude`` and φ =
    ``phase``: a number or a vector [d] for the first harmonic (the others start around 0), or a
    matrix [harmonics, d]. The level starts where level and harmonics together are the parameters
    of the source. Without a ``level`` it is a season to be added to another dynamic
    (``SumDynamics``).
    """

    period: Annotated[float, Interval(2, math.inf)] = 24.0
    harmonics: PositiveCount = 1
    scale: Positive = 0.1
    amplitude: Matrix | Tensor = 0.0
    phase: Matrix | Tensor = 0.0
    level: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("amplitude", "phase"):
            value = as_config(f"Seasonal.{name}", getattr(self, name))
            object.__setattr__(self, name, value)
        require(
            2 * self.harmonics <= self.period,
            "Seasonal.harmonics",
            self.harmonics,
            f"at most period/2 = {self.period / 2:g}",
        )

    @property
    def states(self) -> int:
        return self.level + 2 * self.harmonics - self._is_single(self.harmonics)

    def _is_single(self, harmonic: int) -> bool:
        return 2 * harmonic == self.period

    def __call__(self, source: Belief) -> Motion:
        blocks = [torch.ones(1, 1, dtype=torch.float64)] if self.level else []
        for harmonic in range(1, self.harmonics + 1):
            angle = 2 * math.pi * harmonic / self.period
            cosine, sine = math.cos(angle), math.sin(angle)
            rotation = [[-1.0]] if self._is_single(harmonic) else [[cosine, sine], [-sine, cosine]]
            blocks.append(torch.tensor(rotation, dtype=torch.float64))
        return Motion(_repeat(block_diagonal(blocks), source), 0.0)

    def layout(self, parameters: int) -> Layout:
        shape = (self.harmonics, parameters)
        size = _spread_out("Seasonal.amplitude", self.amplitude, *shape)
        angle = _spread_out("Seasonal.phase", self.phase, *shape)
        read_out = [1.0] if self.level else []
        start = [torch.zeros(parameters, dtype=torch.float64)] if self.level else []
        for harmonic, a, b in zip(
            range(1, self.harmonics + 1), size * angle.sin(), size * angle.cos(), strict=True
        ):
            single = self._is_single(harmonic)
            read_out += [1.0] if single else [1.0, 0.0]
            start += [a] if single else [a, b]
        return _augment(read_out, self.scale, torch.stack(start), self.level)


@final
@dataclass(frozen=True)
class Affine(Dynamics):
    """Any affine map: G a number, a vector (diagonal) or a matrix; c a number or a vector."""

    gain: Matrix | Tensor = 1.0
    drift: Matrix | Tensor = 0.0

    def __post_init__(self) -> None:
        self.__dict__.update(
            gain=as_config("Affine.gain", self.gain), drift=as_config("Affine.drift", self.drift)
        )

    def __call__(self, source: Belief) -> Motion:
        gain, drift = as_matrix(self.gain, source.mean), as_matrix(self.drift, source.mean)
        for field, value, most in (("Affine.gain", gain, 2), ("Affine.drift", drift, 1)):
            if isinstance(value, Tensor):
                require(
                    value.dim() <= most and all(size == source.dimension for size in value.shape),
                    field,
                    f"shape {list(value.shape)}",
                    f"of length {source.dimension} (d) in each dimension",
                )
        return Motion(gain, drift)


register(dynamics=(RandomWalk, MeanReversion, PrecisionReversion, LocalTrend, Seasonal, Affine))

"""Independent answers, written from textbooks in NumPy: dense algebra, an exact Kalman filter,
Monte Carlo bounds.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import driftfilter as df

Array: TypeAlias = npt.NDArray[Any]


def array(values: Tensor) -> Array:
    result: Array = values.detach().double().cpu().numpy().copy()
    return result


def tensor(values: Array, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def normals(*shape: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


def spd(dimension: int, seed: int, floor: float = 0.5) -> Array:
    """A random covariance with correlations and eigenvalues of at least ``floor``."""
    rows = normals(dimension, dimension, seed=seed)
    return rows @ rows.T / dimension + floor * np.eye(dimension)


def block_diagonal(*pieces: Array) -> Array:
    rows, columns = (
        np.cumsum([0, *sizes]) for sizes in zip(*[piece.shape for piece in pieces], strict=True)
    )
    matrix = np.zeros((rows[-1], columns[-1]))
    for piece, row, column in zip(pieces, rows, columns, strict=False):
        matrix[row : row + piece.shape[0], column : column + piece.shape[1]] = piece
    return matrix


def assert_equal(actual: Tensor, expected: Array, tolerance: float = 1e-10) -> None:
    """Equal up to ``tolerance`` of the largest entry (or of 1, where all are smaller)."""
    assert tuple(actual.shape) == expected.shape
    error = np.abs(array(actual) - expected).max(initial=0.0)
    assert error <= tolerance * max(1.0, np.abs(expected).max(initial=0.0)), f"off by {error:.3g}"


# Dense algebra ------------------------------------------------------------------------------------


class Example(NamedTuple):
    """A covariance in some structure, with what it stands for."""

    covariance: df.Covariance
    dense: Array
    # 1 where the structure can hold an entry of the precision, 0 where conditioning drops it
    kept: Array


def conditioned(dense: Array, factor: Array, kept: Array) -> Array:
    """(Σ⁻¹ + the entries of FᵀF that the structure keeps)⁻¹."""
    return np.linalg.inv(np.linalg.inv(dense) + kept * (factor.T @ factor))


def _full(size: int, seed: int) -> Example:
    dense = spd(size, seed)
    return Example(df.Full(tensor(dense)), dense, np.ones((size, size)))


def _diagonal(size: int, seed: int) -> Example:
    values = np.diag(spd(size, seed))
    return Example(df.Diagonal(tensor(values)), np.diag(values), np.eye(size))


def _low_rank(size: int, seed: int) -> Example:
    """Half of the directions in the factor, room for all of them."""
    diagonal, factor = np.diag(spd(size, seed)), normals(size // 2, size, seed=seed + 1)
    dense = np.linalg.inv(np.diag(diagonal) + factor.T @ factor)
    return Example(
        df.LowRank(tensor(diagonal), tensor(factor), rank=size), dense, np.ones((size, size))
    )


def _blocks(*parts: Example) -> Example:
    dense, kept = (
        block_diagonal(*pieces) for pieces in zip(*[part[1:] for part in parts], strict=True)
    )
    return Example(df.Blocks(tuple(part.covariance for part in parts)), dense, kept)


STRUCTURES: dict[str, Callable[[int], Example]] = {  # seed -> an example in six dimensions
    "Full": lambda seed: _full(6, seed),
    "Diagonal": lambda seed: _diagonal(6, seed),
    "LowRank": lambda seed: _low_rank(6, seed),
    "Blocks of Full": lambda seed: _blocks(_full(2, seed), _full(4, seed + 1)),
    "mixed Blocks": lambda seed: _blocks(
        _full(2, seed), _diagonal(1, seed + 1), _low_rank(3, seed + 2)
    ),
    "nested Blocks": lambda seed: _blocks(
        _blocks(_diagonal(2, seed), _full(1, seed + 1)), _full(3, seed + 2)
    ),
}


def _kronecker(rows: int, columns: int, seed: int) -> Example:
    """A ⊗ B + λ I in precision. What conditioning keeps is no matter of single entries."""
    left, right = spd(rows, seed, 0.1), spd(columns, seed + 1, 0.1)
    size = rows * columns
    dense = np.linalg.inv(np.kron(left, right) + 0.3 * np.eye(size))
    covariance = df.Kronecker.from_factors(tensor(left), tensor(right), 0.3)
    return Example(covariance, dense, np.full((size, size), np.nan))


EVERY_STRUCTURE: dict[str, Callable[[int], Example]] = {  # for what does not condition
    **STRUCTURES,
    "flat LowRank": lambda seed: Example(
        df.LowRank.isotropic(0.5, 6, 2, tensor(np.zeros(0))), 0.5 * np.eye(6), np.ones((6, 6))
    ),
    "Blocks of Diagonal": lambda seed: _blocks(_diagonal(2, seed), _diagonal(4, seed + 1)),
    "Kronecker": lambda seed: _kronecker(2, 3, seed),
    "layers": lambda seed: _blocks(_kronecker(2, 2, seed), _diagonal(2, seed + 2)),
}


def assert_represents(covariance: df.Covariance, dense: Array, tolerance: float = 1e-10) -> None:
    """Every operation that reads a covariance agrees with the dense matrix."""
    size, precision = len(dense), np.linalg.inv(dense)
    assert (covariance.dimension, covariance.dtype) == (size, torch.float64)
    assert_equal(covariance.dense(), dense, tolerance)
    assert_equal(covariance.variance(), np.diag(dense), tolerance)
    assert_equal(covariance.log_determinant(), np.linalg.slogdet(dense)[1], tolerance)
    assert not covariance.is_degenerate
    if covariance.is_diagonal:
        assert np.array_equal(dense, np.diag(np.diag(dense)))
    for shape in ((size,), (1, size), (4, size), (2, 3, size), (0, size)):
        vectors = normals(*shape, seed=1)
        assert_equal(covariance.apply(tensor(vectors)), vectors @ dense, tolerance)
        assert_equal(covariance.solve(tensor(vectors)), vectors @ precision, tolerance)


def dense_map(value: float | Tensor, size: int) -> Array:
    """The matrix of a number, a diagonal or a matrix."""
    if isinstance(value, float):
        return value * np.eye(size)
    return np.diag(array(value)) if value.dim() == 1 else array(value)


# The Kalman filter --------------------------------------------------------------------------------


class Moments(NamedTuple):
    mean: Array
    covariance: Array


def kalman_update(prior: Moments, design: Array, targets: Array, variance: float) -> Moments:
    """The posterior given targets = design θ + N(0, variance I); Joseph's form."""
    innovation = design @ prior.covariance @ design.T + variance * np.eye(len(targets))
    gain = np.linalg.solve(innovation, design @ prior.covariance).T
    rest = np.eye(len(prior.mean)) - gain @ design
    covariance = rest @ prior.covariance @ rest.T + variance * gain @ gain.T
    return Moments(prior.mean + gain @ (targets - design @ prior.mean), covariance)


# Monte Carlo --------------------------------------------------------------------------------------


def assert_moments(draws: Array, mean: Array, covariance: Array, sigmas: float = 5.0) -> None:
    """Mean and covariance of draws [count, d] agree with the expected ones within their own Monte
    Carlo error.
    """
    centered = draws - mean
    assert_covariance(centered, np.ones((len(draws), 1)), np.zeros((len(mean), 1)), sigmas)
    assert_covariance(centered, centered, covariance, sigmas)


def assert_covariance(left: Array, right: Array, expected: Array, sigmas: float = 5.0) -> None:
    """The mean of l rᵀ over independent rows agrees with its expectation within ``sigmas`` standard
    errors.
    """
    average = left.T @ right / len(left)
    variance = (left**2).T @ right**2 / len(left) - average**2
    error = np.sqrt(np.maximum(variance, 0.0) / len(left))
    deviation = np.abs(average - expected)
    assert (deviation <= sigmas * error + 1e-12).all(), (
        f"{(deviation / (error + 1e-12)).max():.1f} standard errors off"
    )


# Memory -------------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """Records the largest tensor (in elements, of its storage) that any torch operation gives while
    it is active.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                elements = leaf.untyped_storage().nbytes() // leaf.element_size()
                self.largest = max(self.largest, elements, leaf.numel())
        return result


# Transitions --------------------------------------------------------------------------------------


class Motion(NamedTuple):
    """A dynamic, with the map θ ← G θ + c of its states and the read-out of one parameter that it
    stands for.
    """

    dynamics: df.Dynamics
    gain: Array
    drift: Array | float = 0.0
    read_out: tuple[float, ...] = (1.0,)  # of the states of one parameter; the first is its level
    scale: float = 0.0  # prior standard deviation of the other states


def _rotation(angle: float) -> Array:
    return np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])


def _repeated(
    dynamics: df.Dynamics, block: Array, read_out: tuple[float, ...]
) -> Callable[[Moments], Motion]:
    """The same small system for each parameter, states of one kind side by side."""
    return lambda source: Motion(
        dynamics, np.kron(block, np.eye(len(source.mean))), 0.0, read_out, 0.3
    )


def _precision_reversion(source: Moments) -> Motion:
    step = 0.05 * np.linalg.inv(source.covariance)
    return Motion(df.PrecisionReversion(0.05), np.eye(len(step)) - step, step @ source.mean)


def _affine(source: Moments, gain: Array | float) -> Motion:
    size = len(source.mean)
    drift = np.linspace(-0.2, 0.3, size)
    matrix = gain * np.eye(size) if np.ndim(gain) < 2 else np.asarray(gain)
    return Motion(df.Affine(np.asarray(gain).tolist(), tuple(drift)), matrix, drift)


def _turning(source: Moments) -> Array:
    """A gain that turns and shrinks, and for which the source covariance stays an upper bound."""
    root = np.linalg.cholesky(source.covariance)
    turn = np.linalg.qr(normals(len(root), len(root), seed=4))[0]
    matrix: Array = 0.9 * root @ turn @ np.linalg.inv(root)
    return matrix


MOTIONS: dict[str, Callable[[Moments], Motion]] = {  # source belief over the parameters -> motion
    "RandomWalk": lambda source: Motion(df.RandomWalk(), np.eye(len(source.mean))),
    "MeanReversion": lambda source: Motion(
        df.MeanReversion(0.9), 0.9 * np.eye(len(source.mean)), 0.1 * source.mean
    ),
    "PrecisionReversion": _precision_reversion,
    "LocalTrend 0": lambda source: Motion(df.LocalTrend(0), np.eye(len(source.mean))),
    "LocalTrend 1": _repeated(df.LocalTrend(1, 0.5, 0.3), np.array([[1, 0.5], [0, 1]]), (1.0, 0.0)),
    "LocalTrend 2": _repeated(
        df.LocalTrend(2, 0.5, 0.3), np.array([[1, 0.5, 0], [0, 1, 0.5], [0, 0, 1]]), (1.0, 0.0, 0.0)
    ),
    "Seasonal 1": _repeated(
        df.Seasonal(12, 1, 0.3), block_diagonal(np.eye(1), _rotation(np.pi / 6)), (1.0, 1.0, 0.0)
    ),
    "Seasonal 3": _repeated(
        df.Seasonal(7.5, 3, 0.3),
        block_diagonal(np.eye(1), *[_rotation(2 * np.pi * j / 7.5) for j in (1, 2, 3)]),
        (1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0),
    ),
    "Seasonal Nyquist": _repeated(
        df.Seasonal(4, 2, 0.3),
        block_diagonal(np.eye(1), _rotation(np.pi / 2), -np.eye(1)),
        (1.0, 1.0, 0.0, 1.0),
    ),
    "Affine number": lambda source: _affine(source, -0.8),
    "Affine vector": lambda source: _affine(source, np.linspace(0.95, 0.8, len(source.mean))),
    "Affine matrix": lambda source: _affine(source, _turning(source)),
}

NOISES: dict[str, Callable[[int], df.NoiseModel]] = {  # number of states -> noise
    "NoNoise": lambda states: df.NoNoise(),
    "Isotropic": lambda states: df.Isotropic(0.02),
    "FullNoise": lambda states: df.FullNoise((0.02 * spd(states, 3)).tolist()),
    "Discount": lambda states: df.Discount(0.95),
    "Reset": lambda states: df.Reset(0.05),
    "Stationary": lambda states: df.Stationary(),
    "Restore": lambda states: df.Restore(),
}


class Part(NamedTuple):
    """A dynamic and a noise for some of the parameters."""

    motion: str
    noise: str
    size: int


class System:
    """A transition of one or more parts, and what it must do to mean and covariance."""

    def __init__(self, parts: tuple[Part, ...], parameters: Moments) -> None:
        self.parts = parts
        self.motions: list[Motion] = []
        for part, own in zip(parts, _slices([part.size for part in parts]), strict=True):
            piece = Moments(parameters.mean[own], parameters.covariance[own, own])
            self.motions.append(MOTIONS[part.motion](piece))
        each = list(zip(self.motions, parts, strict=True))
        self.states = [len(motion.gain) for motion in self.motions]
        self.gain = block_diagonal(*[motion.gain for motion in self.motions])
        self.drift = np.concatenate(
            [np.zeros(len(motion.gain)) + motion.drift for motion in self.motions]
        )
        self.read_out = block_diagonal(
            *[np.kron([motion.read_out], np.eye(part.size)) for motion, part in each]
        )
        # The level of each parameter is its first state; the others start around 0.
        levels = block_diagonal(
            *[np.kron(np.eye(len(motion.read_out), 1), np.eye(part.size)) for motion, part in each]
        )
        spread = np.concatenate(
            [np.full(len(motion.gain), motion.scale**2) for motion in self.motions]
        )
        self.source = Moments(
            levels @ parameters.mean,
            levels @ parameters.covariance @ levels.T + np.diag(spread * (1 - levels.sum(1))),
        )

    def transition(self) -> df.Transition:
        """The same in the library."""
        each = [
            df.Transition(motion.dynamics, NOISES[part.noise](states))
            for motion, part, states in zip(self.motions, self.parts, self.states, strict=True)
        ]
        if len(each) == 1:
            return each[0]
        return df.Transition(df.BlockDynamics(tuple(part.size for part in self.parts), tuple(each)))

    def predict(self, state: Moments) -> Moments:
        """One step without data; the noise of a part acts on its own block, or for Reset on its
        rows and columns.
        """
        covariance = self.gain @ state.covariance @ self.gain.T
        for part, own, size in zip(self.parts, _slices(self.states), self.states, strict=True):
            gain, before, source = (
                self.gain[own, own],
                state.covariance[own, own],
                self.source.covariance[own, own],
            )
            if part.noise == "Isotropic":
                covariance[own, own] += 0.02 * np.eye(size)
            elif part.noise == "FullNoise":
                covariance[own, own] += 0.02 * spd(size, 3)
            elif part.noise == "Discount":
                covariance[own, own] /= 0.95
            elif part.noise == "Reset":
                covariance[own], covariance[:, own] = 0.0, 0.0
                covariance[own, own] = 0.05 * np.eye(size)
            elif part.noise == "Stationary":
                covariance[own, own] += source - gain @ source @ gain.T
            elif part.noise == "Restore":
                distance = state.mean[own] - self.source.mean[own]
                covariance[own, own] += (
                    gain[0, 0] * (1 - gain[0, 0]) * np.diag(np.diag(before) + distance**2)
                )
        return Moments(self.gain @ state.mean + self.drift, covariance)


def _slices(sizes: list[int]) -> list[slice]:
    stops = np.cumsum(sizes)
    return [slice(int(stop) - size, int(stop)) for stop, size in zip(stops, sizes, strict=True)]


def belief(moments: Moments) -> df.Belief:
    return df.Belief(tensor(moments.mean), df.Full(tensor(moments.covariance)))


# Labels in runs and class offsets -----------------------------------------------------------------


class LabelRuns:
    """Labels in the order of a stream, counted one by one; older ones fade over 512 samples."""

    def __init__(self, classes: int) -> None:
        self.counts, self.pairs, self.equal = [0.0] * classes, 0.0, 0.0
        self.last: int | None = None

    def count(self, labels: Iterable[int]) -> None:
        batch = list(labels)
        fading = max(0.0, 1 - len(batch) / 512)
        self.counts = [fading * count for count in self.counts]
        self.pairs, self.equal = fading * self.pairs, fading * self.equal
        for label in batch:
            self.counts[label] += 1
            if self.last is not None:
                self.pairs += 1
                self.equal += label == self.last
            self.last = label

    def trust(self, known: bool = False) -> float:
        """(N / (N + k))² over its value at ρ = 0, N = 20 k (1 - ρ) / (1 + ρ); ten labels of equal
        shares and five pairs at chance come first. 0 for two classes of unknown shares.
        """
        k = len(self.counts)
        if k <= 2 and not known:
            return 0.0
        total = sum(self.counts) + 10
        chance = sum(((count + 10 / k) / total) ** 2 for count in self.counts)
        agreement = (self.equal + 5 * chance) / (self.pairs + 5)
        rho = min(1.0, max(0.0, (agreement - chance + 0.01) / (1 - chance + 0.01)))
        samples = 20 * k * (1 - rho) / (1 + rho)
        return (samples / (samples + k) * 21 / 20) ** 2


def softmax(logits: Array) -> Array:
    raised = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(raised / raised.sum(1, keepdims=True))


class ClassOffsets:
    """Offsets of the logits from how often each class is predicted, in two rounds, as far as they
    gain mutual information; shares of the source may be ``known``.
    """

    def __init__(
        self, shares: Array, count: float, window: float, temperature: float, known: bool = False
    ) -> None:
        self.shares, self.count, self.window = shares, count, window
        self.temperature, self.runs, self.known = temperature, LabelRuns(len(shares)), known
        self.seen = [0 * shares, 0 * shares]  # of either round
        self.squares, self.samples = 0.0, 0.0
        self.predicted = [0 * shares, 0 * shares]  # without offsets, and with them
        self.entropies = [0.0, 0.0]

    def _offset(self, seen: Array, scale: float) -> Array:
        posterior = (self.count * self.shares + seen) / (self.count + seen.sum())
        return np.asarray(scale * np.log(posterior / self.shares))

    def needed(self) -> float:
        """g: trust in shares, by how much mutual information is gained and what part of the
        marginal entropy's gain that is.
        """
        total = self.predicted[0].sum()
        if total == 0:
            return 0.0
        marginal = []
        for predicted in self.predicted:
            mean = predicted / total
            marginal.append(-(mean * np.log(mean)).sum())
        more = marginal[1] - marginal[0]
        gained = more - (self.entropies[1] - self.entropies[0]) / total
        part = gained / max(more, np.finfo(float).tiny)
        factors = np.clip([(gained - 0.02) / 0.06, (part - 0.35) / 0.15], 0, 1)
        return float(factors.prod() * self.runs.trust(self.known))

    def predict(self, logits: Array) -> Array:
        """Logits without the offsets that earlier batches have told."""
        if self.samples == 0:
            return logits
        scale = self.temperature * min(4.0, math.sqrt(self.squares / self.samples))
        return np.asarray(
            logits - self.needed() * sum(self._offset(seen, scale) for seen in self.seen)
        )

    def center(self, logits: Array) -> Array:
        """The logits of a batch without the offsets, which have seen it."""
        fading = max(0.0, 1 - len(logits) / self.window)
        deviations = logits - logits.mean(1, keepdims=True)
        self.squares = fading * self.squares + len(logits) * (deviations**2).mean()
        self.samples = fading * self.samples + len(logits)
        sigma = min(4.0, math.sqrt(self.squares / self.samples))
        scale = self.temperature * sigma
        self.runs.count(logits.argmax(1).tolist())
        trust = self.runs.trust(self.known)
        offsets = 0 * self.shares
        for index, seen in enumerate(self.seen):
            own = softmax((logits - offsets) / scale).sum(0)
            self.seen[index] = fading * seen + trust * own
            offsets = offsets + self._offset(self.seen[index], scale)
        for index, each in enumerate((logits, logits - offsets)):
            p = softmax(4 / sigma * each)
            own = -(p * np.log(np.maximum(p, 1e-300))).sum()
            self.predicted[index] = fading * self.predicted[index] + trust * p.sum(0)
            self.entropies[index] = fading * self.entropies[index] + trust * own
        return np.asarray(logits - self.needed() * offsets)

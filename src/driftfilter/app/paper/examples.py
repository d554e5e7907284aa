"""The paper's examples on streams: how their data are drawn, their source, and their filter."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, final

import torch
from torch import Tensor

import driftfilter as df

TIMES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the stream, at which beliefs are kept


class Labeled(NamedTuple):
    """Samples with the labels that only source and evaluation see."""

    inputs: Tensor  # [..., 2]
    labels: Tensor  # [...]


class Problem(NamedTuple):
    """Everything drawn for one seed."""

    source: Labeled  # [N, 2]
    stream: Labeled  # [steps, n, 2]
    current: tuple[
        Labeled, ...
    ]  # fresh samples from where the stream is at each of TIMES; the last is where it ends


def polynomial(inputs: Tensor, degree: int) -> Tensor:
    """All monomials of two coordinates up to a degree, [n, 2] -> [n, (degree + 1)(degree + 2)/2],
    the constant first.
    """
    powers = [torch.ones_like(inputs)]
    for _ in range(degree):
        powers.append(powers[-1] * inputs)
    table = torch.stack(powers)  # [degree + 1, n, 2]
    pairs = torch.tensor(
        [(total - second, second) for total in range(degree + 1) for second in range(total + 1)]
    )
    return (table[pairs[:, 0], :, 0] * table[pairs[:, 1], :, 1]).mT.contiguous()


def draw_labels(
    shape: tuple[int, ...], shares: Sequence[float], generator: torch.Generator
) -> Tensor:
    """Class indices drawn with given shares."""
    weights, count = torch.tensor(shares, dtype=torch.float64), math.prod(shape)
    return torch.multinomial(weights, count, replacement=True, generator=generator).reshape(shape)


def draw_problem(
    draw: Callable[[Tensor, float, torch.Generator], Labeled],
    ends: tuple[float, float],
    shape: tuple[int, int],
    counts: tuple[int, int],
    shares: tuple[float, float],
    seed: int,
) -> Problem:
    """Everything drawn for a seed: ``draw`` takes places between the ``ends`` of the way [...].

    The stream is of ``shape`` (steps, samples a step); ``counts`` are those of the source and of
    each fresh set, ``shares`` those of the last class in the source and in the stream.
    """
    generator, (first, last), (known, share) = torch.Generator().manual_seed(seed), ends, shares
    source = draw(torch.full((counts[0],), first, dtype=torch.float64), known, generator)
    way = torch.linspace(first, last, shape[0], dtype=torch.float64)
    stream = draw(way[:, None].expand(shape), share, generator)
    fresh = (
        torch.full((counts[1],), first + fraction * (last - first), dtype=torch.float64)
        for fraction in TIMES
    )
    return Problem(source, stream, tuple(draw(place, share, generator) for place in fresh))


def unit_prior(dimension: int, structure: str, rank: int = 10) -> df.Belief:
    """N(0, I) in a structure."""
    mean = torch.zeros(dimension, dtype=torch.float64)
    covariances: dict[str, Callable[[], df.Covariance]] = {
        "full": lambda: df.Full(torch.eye(dimension, dtype=torch.float64)),
        "diagonal": lambda: df.Diagonal(torch.ones_like(mean)),
        "low rank": lambda: df.LowRank.isotropic(1.0, dimension, min(rank, dimension), mean),
    }
    return df.Belief(mean, covariances[structure]())


# Each has `chance`, the end accuracy below which a run has collapsed; `window`, the part of the
# plane that is drawn, (left, right) and (low, high); `far`, the distance from every sample beyond
# which a point of it is far; `reach`, the source standard deviations beyond which the filter has
# run away.


@final
@dataclass(frozen=True)
class Linear:
    """2-D logistic regression under a diagonal covariate shift, one sample at a time.

    Class means (∓1.5, 0) and standard deviation 0.7; both classes move by s (1, 1) with s from 0 to
    3 over the stream. The source posterior is the Laplace approximation from labeled samples under
    a unit-precision prior; the bias is a random walk, the weights revert to the source as its
    precision says. Parameters are θ = [bias, weight 1, weight 2].

    The defaults are the paper's.
    """

    steps: int = 1000
    source_samples: int = 100
    test_samples: int = 2000
    shift: float = 3.0
    share: float = 0.5  # of class 1 in the stream
    deviation: float = 0.7
    bias_variance: float = 0.01
    eta: float = 0.001
    beta: float = 1.0
    classes: int = 2
    chance: float = 0.55
    window: tuple[tuple[float, float], tuple[float, float]] = ((-6.0, 9.0), (-6.0, 9.0))
    far: float = 2.5
    reach: float = math.inf  # the bias is a random walk, free to leave

    def draw(self, shifts: Tensor, share: float, generator: torch.Generator) -> Labeled:
        """One sample for each shift [...]."""
        labels = draw_labels(tuple(shifts.shape), (1 - share, share), generator)
        noise = torch.randn((*shifts.shape, 2), generator=generator, dtype=shifts.dtype)
        means = torch.stack((1.5 * (2 * labels - 1), torch.zeros_like(labels)), -1)
        return Labeled(means + self.deviation * noise + shifts[..., None], labels)

    def problem(self, seed: int) -> Problem:
        counts, shares = (self.source_samples, self.test_samples), (0.5, self.share)
        return draw_problem(self.draw, (0.0, self.shift), (self.steps, 1), counts, shares, seed)

    def source(self, data: Labeled) -> df.Belief:
        return df.fit_laplace(
            df.LinearHead(2, intercept=True), unit_prior(3, "full"), data.inputs, data.labels
        )

    def filter(self) -> df.Filter:
        bias = df.Transition(df.RandomWalk(), df.Isotropic(self.bias_variance))
        weights = df.Transition(df.PrecisionReversion(self.eta), df.Stationary())
        return df.Filter(
            logits=df.LinearHead(2, intercept=True),
            transition=df.Transition(df.BlockDynamics(sizes=(1, 2), parts=(bias, weights))),
            observation=df.Gibbs(df.Entropy(), df.Constant(self.beta)),
            inference=df.Linearized(df.Hessian()),
            prediction=df.LinearizedProbit(),
        )


def _moon_features(inputs: Tensor) -> Tensor:
    """Degree-4 polynomial features [n, 2] -> [n, 15]."""
    center, scale = inputs.new_tensor((0.5, 0.25)), inputs.new_tensor((1.0, 0.6))
    return polynomial((inputs - center) / scale, 4)


@final
@dataclass(frozen=True)
class Moons:
    """Two moons whose density moves along both arcs: an entropy filter on polynomial features, by
    BONG.

    Angle φ = π·Beta(8p, 8(1-p)), p from 0.8 to 0.2 over the stream; class 0 at (cos φ, sin φ),
    class 1 at (1 - cos φ, 1/2 - sin φ), plus noise. Features are the monomials up to degree 4 of
    ((x - 0.5)/1.0, (y - 0.25)/0.6).
    """

    steps: int = 200
    batch: int = 10
    source_samples: int = 100
    test_samples: int = 1000
    start: float = 0.8  # p, where along the arcs the data are
    end: float = 0.2
    share: float = 0.5  # of class 1 in the stream
    noise: float = 0.1
    beta: float = 20.0
    rho: float = 0.99
    structure: str = "full"
    nodes: int = 15
    classes: int = 2
    chance: float = 0.55
    window: tuple[tuple[float, float], tuple[float, float]] = ((-2.0, 3.0), (-1.6, 2.1))
    far: float = 0.75
    reach: float = 5.0

    def draw(self, places: Tensor, share: float, generator: torch.Generator) -> Labeled:
        """One sample for each p [...]."""
        labels = draw_labels(tuple(places.shape), (1 - share, share), generator)
        angles = math.pi * _beta(8 * places, 8 * (1 - places), generator)
        upper = torch.stack((angles.cos(), angles.sin()), -1)
        lower = torch.stack((1 - angles.cos(), 0.5 - angles.sin()), -1)
        clean = torch.where(labels[..., None] == 0, upper, lower)
        return Labeled(
            clean + self.noise * torch.randn(clean.shape, generator=generator, dtype=clean.dtype),
            labels,
        )

    def problem(self, seed: int) -> Problem:
        ends, shape = (self.start, self.end), (self.steps, self.batch)
        counts, shares = (self.source_samples, self.test_samples), (0.5, self.share)
        return draw_problem(self.draw, ends, shape, counts, shares, seed)

    def source(self, data: Labeled) -> df.Belief:
        return df.fit_laplace(
            df.LinearHead(2),
            unit_prior(15, self.structure),
            _moon_features(data.inputs),
            data.labels,
        )

    def filter(self) -> df.Filter:
        return df.Filter(
            logits=df.OnFeatures(_moon_features, df.LinearHead(2)),
            transition=df.Transition(df.MeanReversion(self.rho), df.Stationary()),
            observation=df.Gibbs(df.Entropy(), df.Constant(self.beta)),
            inference=df.Bong(df.Hessian(), samples=0, nodes=self.nodes),
            prediction=df.LinearizedProbit(),
        )


def _beta(a: Tensor, b: Tensor, generator: torch.Generator) -> Tensor:
    """Beta(a, b) as a ratio of gammas, from a generator (torch.distributions takes none)."""
    first, second = (
        torch._standard_gamma(part.contiguous(), generator=generator) for part in (a, b)
    )
    return first / (first + second)


def _blade_features(inputs: Tensor) -> Tensor:
    """Degree-7 polynomial features [n, 2] -> [n, 36]."""
    return polynomial(inputs / 1.5, 7)


@final
@dataclass(frozen=True)
class Pinwheel:
    """A pinwheel of three blades that grow outwards, or turn: a consistency filter on polynomial
    features, by BONG.

    A sample of blade c starts as (r + 0.3 e₁, 0.1 e₂) and is rotated by 2πc/3 + 0.25·exp(first
    coordinate) + turn; r goes from 1.0 to 1.9 over the stream (or the turn from 0 to π/2 at r = 1).
    Features are the monomials up to degree 7 of x/1.5; the loss is Brier against the hard label of
    the clean input on 4 copies with Gaussian noise of sd 0.2.
    """

    steps: int = 150
    batch: int = 15
    source_samples: int = 150
    test_samples: int = 1000
    radius: float = 1.9  # r at the end
    turn: float = 0.0  # rotation of all blades at the end
    share: float = 1 / 3  # of class 2 in the stream
    beta: float = 60.0
    rho: float = 0.99
    noise: float = 0.2  # of the augmentation
    copies: int = 4
    structure: str = "full"
    samples: int = 10
    nodes: int = 0
    classes: int = 3
    chance: float = 0.40
    window: tuple[tuple[float, float], tuple[float, float]] = ((-3.4, 3.4), (-3.4, 3.4))
    far: float = 0.75
    reach: float = 5.0

    def draw(self, fractions: Tensor, share: float, generator: torch.Generator) -> Labeled:
        """One sample for each fraction of the way [...]."""
        labels = draw_labels(
            tuple(fractions.shape), ((1 - share) / 2, (1 - share) / 2, share), generator
        )
        noise = torch.randn((*fractions.shape, 2), generator=generator, dtype=fractions.dtype)
        along = 1 + fractions * (self.radius - 1) + 0.3 * noise[..., 0]
        angle = 2 * math.pi * labels / 3 + 0.25 * along.exp() + fractions * self.turn
        cosine, sine, across = angle.cos(), angle.sin(), 0.1 * noise[..., 1]
        return Labeled(
            torch.stack((cosine * along - sine * across, sine * along + cosine * across), -1),
            labels,
        )

    def problem(self, seed: int) -> Problem:
        ends, shape = (0.0, 1.0), (self.steps, self.batch)
        counts, shares = (self.source_samples, self.test_samples), (1 / 3, self.share)
        return draw_problem(self.draw, ends, shape, counts, shares, seed)

    def source(self, data: Labeled) -> df.Belief:
        return df.fit_laplace(
            df.LinearHead(3),
            unit_prior(108, self.structure, 20),
            _blade_features(data.inputs),
            data.labels,
        )

    def filter(self) -> df.Filter:
        loss = df.Consistency(
            df.GaussianNoise(self.noise), divergence="brier", target="hard", copies=self.copies
        )
        return df.Filter(
            logits=df.OnFeatures(_blade_features, df.LinearHead(3)),
            transition=df.Transition(df.MeanReversion(self.rho), df.Stationary()),
            observation=df.Gibbs(loss, df.Constant(self.beta)),
            inference=df.Bong(df.Hessian(), samples=self.samples, nodes=self.nodes),
            prediction=df.LinearizedProbit(),
        )


Example: TypeAlias = Linear | Moons | Pinwheel

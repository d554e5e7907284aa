"""One run of one example on one stream: what is drawn, what is run on it, and what is measured.

An example says how its data are drawn, its model, its filter; all else is written once here.
Labels are seen by the source, by the evaluation, and by the supervised bound that says so.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

import driftfilter as df
from driftfilter.app import metrics
from driftfilter.inference.curvature import Clip

TIMES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the stream, at which beliefs are kept
WINDOWS = 20  # parts of the stream whose accuracy is kept
VANISHED = 0.05  # k times the share of a class among the predictions, below which it has vanished


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


class Example(Protocol):
    """Settings of an example, with defaults that are the paper's."""

    @property
    def steps(self) -> int:
        """Batches in the stream."""

    @property
    def classes(self) -> int:
        """k."""

    @property
    def chance(self) -> float:
        """End accuracy below which a run has collapsed."""

    @property
    def window(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Part of the plane that is drawn, (left, right) and (low, high)."""

    @property
    def far(self) -> float:
        """Distance from every sample beyond which a point of the window is far."""

    @property
    def reach(self) -> float:
        """Source standard deviations beyond which the filter has run away."""

    def problem(self, seed: int) -> Problem:
        """Source, stream and test samples of a seed."""

    def source(self, data: Labeled) -> df.Belief:
        """The Laplace source posterior."""

    def filter(self) -> df.Filter:
        """The filter, over raw inputs [n, 2]."""


class Scores(NamedTuple):
    """One run on one stream."""

    accuracy: float  # over the stream
    end_accuracy: float  # of the last belief, on fresh samples from where the stream ended
    nll: float  # mean negative log-likelihood over the stream
    ece: float  # expected calibration error over the stream
    least_share: float  # of a class among the predictions of the last tenth, times k
    distance: (
        float  # of the last mean from the source's, √(Δᵀ Σ₀⁻¹ Δ / d): source standard deviations
    )


class Doubt(NamedTuple):
    """Mean uncertainty at each of TIMES, predictive entropy and mutual information, in nats."""

    current: list[tuple[float, float]]  # where the stream is at that time
    ahead: list[tuple[float, float]]  # where it will end: fixed points, reached at the last time
    far: list[tuple[float, float]]  # fixed points away from all of it


class Trial(NamedTuple):
    """A run that was refused has no scores, only the step at which it stopped."""

    scores: Scores | None
    windows: list[float]  # accuracy in each part of the stream
    beliefs: list[df.Belief]  # at each of TIMES
    seconds: float  # for the stream alone
    refused_at: int | None = None


def is_alarmed(example: Example, scores: Scores) -> bool:
    """Collapse as seen without labels: a class has vanished from the predictions, or the mean has
    left the source.
    """
    return scores.least_share < VANISHED or scores.distance > example.reach


Runner: TypeAlias = Callable[[Example, df.Belief, Problem, int], Trial]


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


def run_frozen(example: Example, belief: df.Belief, problem: Problem, seed: int) -> Trial:
    """The source, which never learns; its belief does not move either."""
    filt = example.filter()
    state = filt.init(belief, seed)
    start = time.perf_counter()
    logp = filt.predict(state, problem.stream.inputs.flatten(0, 1)).log_probabilities
    seconds = time.perf_counter() - start
    return _score(
        problem,
        logp,
        filt.predict(state, problem.current[-1].inputs),
        [belief] * len(TIMES),
        seconds,
    )


def run_filter(example: Example, belief: df.Belief, problem: Problem, seed: int) -> Trial:
    """The filter on the stream without labels."""
    return _run(example.filter(), belief, problem, seed)


def run_clipped(clip: Clip) -> Runner:
    """The filter with the Hessian clipped before it is averaged, after, or never: then it is
    refused as soon as a posterior precision is not positive.
    """

    def run(example: Example, belief: df.Belief, problem: Problem, seed: int) -> Trial:
        filt = example.filter()
        rule = replace(filt.inference, curvature=df.Hessian(clip))  # type: ignore[type-var]
        return _run(replace(filt, inference=rule), belief, problem, seed)

    return run


def run_changed(**parts: Any) -> Runner:
    """The filter with some of its parts in place of the example's."""

    def run(example: Example, belief: df.Belief, problem: Problem, seed: int) -> Trial:
        return _run(replace(example.filter(), **parts), belief, problem, seed)

    return run


def run_smoothed(example: Example, belief: df.Belief, problem: Problem, seed: int) -> Trial:
    """The filter, and then every batch labelled anew by what the whole stream has told."""
    filt, stream = example.filter(), problem.stream.inputs
    start = time.perf_counter()
    end, outputs = filt.run(filt.init(belief, seed), stream, keep_states=True)
    states = filt.smooth(outputs)
    pairs = zip(states[1:], stream, strict=True)
    logp = torch.cat([filt.predict(state, batch).log_probabilities for state, batch in pairs])
    seconds = time.perf_counter() - start
    beliefs = [states[mark].belief for mark in (0, *_marks(len(stream)))]
    return _score(problem, logp, filt.predict(end, problem.current[-1].inputs), beliefs, seconds)


def run_supervised(example: Example, belief: df.Belief, problem: Problem, seed: int) -> Trial:
    """An upper bound: the same transition, each batch's true labels learned after it was
    predicted.
    """
    filt = example.filter()
    state = filt.init(belief, seed)
    transition = filt.transition.bind(belief)
    logp, beliefs, marks = [], [belief], _marks(len(problem.stream.labels))
    start = time.perf_counter()
    for step, (inputs, labels) in enumerate(zip(*problem.stream, strict=True)):
        prior = transition(state.belief)
        logp.append(filt.predict(replace(state, belief=prior), inputs).log_probabilities)
        state = replace(state, belief=df.fit_laplace(filt.logits, prior, inputs, labels))
        if step + 1 in marks:
            beliefs.append(state.belief)
    seconds = time.perf_counter() - start
    return _score(
        problem, torch.cat(logp), filt.predict(state, problem.current[-1].inputs), beliefs, seconds
    )


def _marks(steps: int) -> list[int]:
    """Steps after which a belief is kept; the first of TIMES is before the stream."""
    return [round(fraction * steps) for fraction in TIMES[1:]]


def _run(filt: df.Filter, belief: df.Belief, problem: Problem, seed: int) -> Trial:
    state = filt.init(belief, seed)
    beliefs, logp, steps = [belief], [], len(problem.stream.labels)
    start = time.perf_counter()
    for first, last in zip([0, *_marks(steps)], _marks(steps), strict=False):
        for batch in problem.stream.inputs[first:last]:
            try:
                state, prediction, _ = filt.step(state, batch)
            except df.NotPositiveDefiniteError:
                return Trial(None, [], [], 0.0, state.step + 1)
            logp.append(prediction.log_probabilities)
        beliefs.append(state.belief)
    seconds = time.perf_counter() - start
    return _score(
        problem, torch.cat(logp), filt.predict(state, problem.current[-1].inputs), beliefs, seconds
    )


def _score(
    problem: Problem, logp: Tensor, end: df.Prediction, beliefs: list[df.Belief], seconds: float
) -> Trial:
    labels = problem.stream.labels.flatten()
    scores = Scores(
        metrics.accuracy(logp, labels),
        metrics.accuracy(end.log_probabilities, problem.current[-1].labels),
        metrics.negative_log_likelihood(logp, labels),
        metrics.calibration_error(logp, labels),
        metrics.least_share(logp[-(len(logp) // 10) :]),
        _distance(beliefs[0], beliefs[-1]),
    )
    pieces = zip(logp.tensor_split(WINDOWS), labels.tensor_split(WINDOWS), strict=True)
    return Trial(
        scores, [metrics.accuracy(*piece) for piece in pieces if len(piece[1])], beliefs, seconds
    )


def _distance(source: df.Belief, belief: df.Belief) -> float:
    move = belief.mean - source.mean
    return (move @ source.covariance.solve(move) / len(move)).sqrt().item()


def grid(example: Example, points: int) -> Tensor:
    """Points of the window [points², 2], y by y."""
    (left, right), (low, high) = example.window
    x, y = (
        torch.linspace(a, b, points, dtype=torch.float64) for a, b in ((left, right), (low, high))
    )
    return torch.cartesian_prod(y, x).flip(-1)


def far_points(example: Example, problem: Problem, points: int = 31) -> Tensor:
    """Points of the window away from every sample of source and stream [m, 2]."""
    seen = torch.cat((problem.source.inputs, problem.stream.inputs.flatten(0, 1)))
    candidates = grid(example, points)
    return candidates[torch.cdist(candidates, seen).amin(-1) > example.far]


def doubt(example: Example, problem: Problem, beliefs: Sequence[df.Belief]) -> Doubt:
    """Uncertainty of beliefs at each of TIMES, where the stream is, where it will end, and far from
    it.
    """
    model = example.filter().logits
    assert isinstance(model, df.PredictiveModel)
    away, end = far_points(example, problem), problem.current[-1].inputs

    def at(belief: df.Belief, inputs: Tensor) -> tuple[float, float]:
        predictive, mutual = metrics.uncertainty(model, belief, inputs[:500])
        return predictive.mean().item(), mutual.mean().item()

    return Doubt(
        [at(belief, place.inputs) for belief, place in zip(beliefs, problem.current, strict=True)],
        [at(belief, end) for belief in beliefs],
        [at(belief, away) for belief in beliefs],
    )

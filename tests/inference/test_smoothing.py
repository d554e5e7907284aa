"""Smoothed beliefs against the joint Gaussian of a whole stream, conditioned at once."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import driftfilter as df
from driftfilter.app.paper.moons import Moons
from oracles import (
    MOTIONS,
    NOISES,
    Array,
    Moments,
    Part,
    System,
    array,
    assert_equal,
    kalman_update,
    normals,
    spd,
    tensor,
)
from small import assert_same, moments, normal, refuses

SOURCE = Moments(normals(3, seed=1), spd(3, 2))
NOISE = 0.25  # variance of an observation


def residual(theta: Tensor, inputs: Tensor) -> Tensor:
    """y - h·θ for inputs [h, y], as a single logit."""
    return inputs[:, -1:] - inputs[:, :-1] @ theta[:, None]


def half_square(logits: Tensor) -> Tensor:
    return 0.5 * logits.square().sum(-1)


class Seen(NamedTuple):
    """What is observed at a step: targets [n] = design [n, d] θ + noise."""

    design: Array
    targets: Array

    def batch(self) -> Tensor:
        scale = np.sqrt(len(self.targets) / NOISE)
        return tensor(scale * np.column_stack([self.design, self.targets]))


class Joint:
    """The Gaussian of the states of all times, as one long vector."""

    def __init__(self, start: Moments) -> None:
        self.mean, self.covariance = start.mean, start.covariance
        self.size = len(start.mean)

    def move(self, gain: Array, constant: Array, noise: Array) -> None:
        """Append θ_{t+1} = K θ_t + b + w."""
        last = slice(len(self.mean) - self.size, None)
        cross = gain @ self.covariance[last]
        corner = cross[:, last] @ gain.T + noise
        self.covariance = np.block([[self.covariance, cross.T], [cross, corner]])
        self.mean = np.concatenate([self.mean, gain @ self.mean[last] + constant])

    def observe(self, design: Array, targets: Array) -> None:
        """Condition all times on what is seen of the last one."""
        rows = np.zeros((len(targets), len(self.mean)))
        rows[:, len(self.mean) - self.size :] = design
        exact = kalman_update(Moments(self.mean, self.covariance), rows, targets, NOISE)
        self.mean, self.covariance = exact

    def at(self, time: int) -> Moments:
        own = slice(time * self.size, (time + 1) * self.size)
        return Moments(self.mean[own], self.covariance[own, own])


def run_both(
    system: System, seen: Sequence[Seen], times: Sequence[int], covariance: df.Covariance
) -> tuple[list[df.FilterState], list[Moments]]:
    """Smoothed states of the filter, and the exact marginals at the same times."""
    filt = df.Filter(
        residual, system.transition(), df.Gibbs(half_square), df.Linearized(df.Hessian())
    )
    start = filt.init(df.Belief(tensor(array_of(system)), covariance))
    end, outputs = filt.run(start, [each.batch() for each in seen], times, keep_states=True)
    assert_same(moments(outputs.states[-1].belief), moments(end.belief))
    states = filt.smooth(outputs)
    resets = np.repeat([part.noise == "Reset" for part in system.parts], system.states)
    kept = np.where(resets[:, None], 0.0, system.gain)
    joint, exact, places = Joint(system.source), system.source, [0]
    for one, steps in zip(seen, times, strict=True):
        for _ in range(steps):
            prior = system.predict(exact)
            noise = prior.covariance - kept @ exact.covariance @ kept.T
            joint.move(kept, prior.mean - kept @ exact.mean, noise)
            exact = prior
        places.append(places[-1] + steps)
        joint.observe(one.design @ system.read_out, one.targets)
        exact = kalman_update(exact, one.design @ system.read_out, one.targets, NOISE)
    assert_equal(end.belief.mean, exact.mean, 1e-10)
    return states, [joint.at(place) for place in places]


def array_of(system: System) -> Array:
    """The parameters that a system starts from."""
    mean: Array = system.read_out @ system.source.mean
    return mean


def assert_smoothed(states: Sequence[df.FilterState], exact: Sequence[Moments]) -> None:
    assert len(states) == len(exact)
    for state, wanted in zip(states, exact, strict=True):
        assert_equal(state.belief.mean, wanted.mean, 1e-10)
        assert_equal(state.belief.covariance.dense(), wanted.covariance, 1e-10)


def stream(steps: int, width: int = 3) -> list[Seen]:
    counts = [(1, 2, 5)[step % 3] for step in range(steps)]
    return [
        Seen(normals(count, width, seed=step), np.sin(step / 3) + normals(count, seed=99 + step))
        for step, count in enumerate(counts)
    ]


def can_smooth(motion: str, noise: str) -> bool:
    if noise == "Stationary":
        return motion not in ("LocalTrend 1", "LocalTrend 2")
    return noise != "Reset" and (noise != "Restore" or motion == "MeanReversion")


PAIRS = [
    (Part(motion, noise, 3),) for motion in MOTIONS for noise in NOISES if can_smooth(motion, noise)
]
BLOCKS = [
    (Part("LocalTrend 1", "Isotropic", 1), Part("MeanReversion", "Discount", 2)),
    (Part("RandomWalk", "Discount", 1), Part("PrecisionReversion", "Stationary", 2)),
    (Part("RandomWalk", "Reset", 1), Part("RandomWalk", "Isotropic", 2)),
    (Part("Seasonal Nyquist", "FullNoise", 2), Part("MeanReversion", "Restore", 1)),
]


def title(parts: tuple[Part, ...]) -> str:
    return " + ".join(f"{part.motion}, {part.noise}" for part in parts)


@pytest.mark.parametrize("parts", [*PAIRS, *BLOCKS], ids=title)
def test_smoothing_is_the_joint_posterior_under_every_dynamic(parts: tuple[Part, ...]) -> None:
    system, seen = System(parts, SOURCE), stream(12)
    covariance = df.Full(tensor(SOURCE.covariance))
    assert_smoothed(*run_both(system, seen, [1] * 12, covariance))


@pytest.mark.parametrize("noise", ["Isotropic", "FullNoise", "NoNoise"])
@pytest.mark.parametrize("motion", ["LocalTrend 1", "MeanReversion", "Affine matrix"])
def test_steps_of_other_times_are_smoothed_too(motion: str, noise: str) -> None:
    """The joint Gaussian has every unit of time, seen or not."""
    system, seen = System((Part(motion, noise, 3),), SOURCE), stream(6)
    covariance = df.Full(tensor(SOURCE.covariance))
    assert_smoothed(*run_both(system, seen, [1, 3, 2, 1, 5, 2], covariance))


VARIANCES = np.array([0.5, 1.0, 2.0, 0.8, 1.5, 0.7])
STRUCTURED: dict[str, df.Covariance] = {
    "Diagonal": df.Diagonal(tensor(VARIANCES)),
    "Blocks of Full": df.Blocks((df.Full(tensor(spd(2, 0))), df.Full(tensor(spd(4, 1))))),
    "mixed Blocks": df.Blocks((df.Full(tensor(spd(2, 0))), df.Diagonal(tensor(VARIANCES[2:])))),
}
SPLIT = [
    (Part("RandomWalk", "Discount", 2), Part("PrecisionReversion", "Stationary", 4)),
    (Part("MeanReversion", "Stationary", 2), Part("MeanReversion", "Restore", 4)),
    (Part("Affine vector", "Isotropic", 2), Part("RandomWalk", "Reset", 4)),
]
SIMPLE = ("RandomWalk", "MeanReversion", "PrecisionReversion", "Affine number", "Affine vector")


@pytest.mark.parametrize("structure", STRUCTURED)
@pytest.mark.parametrize(
    "parts",
    [
        *[
            (Part(motion, noise, 6),)
            for motion in SIMPLE
            for noise in NOISES
            if noise != "FullNoise" and can_smooth(motion, noise)
        ],
        *SPLIT,
    ],
    ids=title,
)
def test_every_structure_smooths_what_it_filters_exactly(
    structure: str, parts: tuple[Part, ...]
) -> None:
    """Observations are of one coordinate, or of the full block, so that nothing is projected."""
    covariance = STRUCTURED[structure]
    source = Moments(normals(6, seed=5), array(covariance.dense()))
    seen = []
    for step in range(12):
        design = np.zeros((1, 6))
        full = {"Blocks of Full": (slice(0, 2), slice(2, 6)), "mixed Blocks": (slice(0, 2),)}
        blocks = full.get(structure, ())
        own = blocks[step % len(blocks)] if blocks and step % 2 else slice(step % 6, step % 6 + 1)
        width = len(range(6)[own])
        design[0, own] = normals(width, seed=step) if width > 1 else 1.5
        seen.append(Seen(design, normals(1, seed=50 + step)))
    states, exact = run_both(System(parts, source), seen, [1] * 12, covariance)
    assert_smoothed(states, exact)
    assert all(type(state.belief.covariance) is type(covariance) for state in states)


# A filter of logits -------------------------------------------------------------------------------


def build(**parts: object) -> df.Filter:
    given = {"transition": df.Transition(df.MeanReversion(0.95), df.Isotropic(0.02)), **parts}
    return df.Filter(df.LinearHead(2), inference=df.Linearized(df.Hessian()), **given)  # type: ignore[arg-type]


def start(structure: type[df.Covariance] = df.Full) -> df.Belief:
    mean = tensor(np.array([1.0, -0.5, 0.2]))
    return df.Belief(mean, structure.isotropic_like(0.5, mean, rank=2))


BATCHES = normal(10, 6, 3, seed=1)


def test_states_one_after_the_other_are_smoothed_as_outputs_are() -> None:
    filt, states = build(), []
    states.append(filt.init(start()))
    for batch in BATCHES:
        states.append(filt.step(states[-1], batch)[0])
    before = [moments(state.belief)[0].clone() for state in states]
    smoothed = filt.smooth(states)
    _, outputs = filt.run(states[0], BATCHES, keep_states=True)
    for one, two, state in zip(smoothed, filt.smooth(outputs), states, strict=True):
        assert_same(moments(one.belief), moments(two.belief))
        assert (one.step, one.seed, one.source, one.memory) == (
            state.step,
            state.seed,
            state.source,
            state.memory,
        )
    assert_same([state.belief.mean for state in states], before)
    assert_same(moments(smoothed[-1].belief), moments(states[-1].belief))
    (alone,) = filt.smooth(states[3:4])
    assert_same(moments(alone.belief), moments(states[3].belief))
    variances = [
        (one.belief.covariance.variance() <= state.belief.covariance.variance() + 1e-12).all()
        for one, state in zip(smoothed, states, strict=True)
    ]
    assert all(variances)


def test_parameters_that_do_not_move_are_known_as_well_at_every_time() -> None:
    filt = build(transition=df.Transition(df.RandomWalk(), df.NoNoise()))
    end, outputs = filt.run(filt.init(start()), BATCHES, keep_states=True)
    for state in filt.smooth(outputs):
        torch.testing.assert_close(moments(state.belief), moments(end.belief), rtol=0, atol=1e-14)


def test_single_precision_smooths_to_its_rounding() -> None:
    single = df.Belief(start().mean.float(), df.Full(start().covariance.dense().float()))
    filt = build()
    both = [
        filt.smooth(filt.run(filt.init(one), BATCHES, keep_states=True)[1])
        for one in (start(), single)
    ]
    for one, two in zip(*both, strict=True):
        assert two.belief.mean.dtype == torch.float32
        torch.testing.assert_close(
            [part.float() for part in moments(one.belief)],
            list(moments(two.belief)),
            rtol=1e-4,
            atol=1e-5,
        )


@pytest.mark.slow
def test_what_has_passed_is_labelled_better_on_the_moons() -> None:
    example = Moons()
    problem = example.problem(2000)
    filt = example.filter()
    state = filt.init(example.source(problem.source), 2000)
    _, outputs = filt.run(state, problem.stream.inputs, keep_states=True)
    smoothed = filt.smooth(outputs)[1:]
    pairs = zip(smoothed, problem.stream.inputs, strict=True)
    labels = torch.cat([filt.predict(state, batch).labels for state, batch in pairs])
    truth = problem.stream.labels.flatten()
    before, after = ((each == truth).double().mean() for each in (outputs.labels, labels))
    assert after > before


def smooth(filt: df.Filter, belief: df.Belief) -> object:
    _, outputs = filt.run(filt.init(belief), BATCHES, keep_states=True)
    return filt.smooth(outputs)


def states() -> list[df.FilterState]:
    filt = build()
    return list(filt.run(filt.init(start()), BATCHES, keep_states=True)[1].states)


MATRIX = df.Belief(
    tensor(normals(4, seed=0)),
    df.Kronecker.isotropic(0.5, 2, 2, torch.zeros(1, dtype=torch.float64)),
)
test_what_cannot_be_is_refused = refuses(
    [
        (
            lambda: smooth(build(), start(df.LowRank)),
            "LowRank cannot carry smoothing, which needs the curvature that its truncation "
            "dropped; use Full, Diagonal or Blocks of them",
        ),
        (
            lambda: MATRIX.covariance.smooth(1.0, MATRIX.covariance, MATRIX.covariance),
            "Kronecker cannot carry smoothing, which mixes the eigenvectors of different steps; ",
        ),
        (
            lambda: smooth(build(transition=df.Transition(df.RandomWalk(), df.Reset())), start()),
            r"Filter.transition must be one that keeps some of it to smooth: .* got 'a noise that "
            r"drops Σ between steps \(Reset\)'",
        ),
        (
            lambda: smooth(build(upkeep=df.ResetEvery(5)), start()),
            "Filter.upkeep must be None to smooth: it changes beliefs .* got ResetEvery",
        ),
        (lambda: build().smooth([]), r"Filter.smooth: states must be one FilterState .* got \[\]"),
        (lambda: build().smooth([1]), "state must be a FilterState .* got 'int'"),  # type: ignore[list-item]
        (lambda: build().smooth(states()[::2]), "states must be one stream's, one after the other"),
        (lambda: build().smooth(states(), dt=[1, 2]), "dt must be a number, or one for each batch"),
        (
            lambda: build().smooth(build().run(build().init(start()), BATCHES)[1]),
            r"Filter.smooth: outputs must be of run\(…, keep_states=True\), got 'no states'",
        ),
    ]
)


def test_a_point_mass_has_nothing_to_smooth() -> None:
    point = df.Belief(start().mean, df.Diagonal(torch.ones(3, dtype=torch.float64)))
    states = [df.FilterState(point, point, 3, 0, step) for step in range(2)]
    zero = replace(point, covariance=point.covariance.propagate(0.0, 0.0))
    filt = build(transition=df.Transition(df.MeanReversion(0.9), df.NoNoise()))
    with pytest.raises(ValueError, match="states must be beliefs with a covariance: a point mass"):
        filt.smooth([replace(state, belief=zero) for state in states])

"""Transitions over other lengths of time: repeated ones, parts of one, and what has no part."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from scipy.linalg import fractional_matrix_power, solve_discrete_lyapunov
from torch import Tensor

import driftfilter as df
from driftfilter.model.dynamics import Spread
from driftfilter.model.elapsed import move_on
from driftfilter.model.transition import BoundTransition
from oracles import MOTIONS, NOISES, Moments, Part, System, array, belief, normals, spd, tensor
from small import assert_same, moments, normal, refuses

SOURCE = Moments(normals(3, seed=1), spd(3, 2))
BLOCKS = [
    (Part("LocalTrend 1", "Isotropic", 1), Part("MeanReversion", "Discount", 2)),
    (Part("RandomWalk", "Discount", 1), Part("PrecisionReversion", "Stationary", 2)),
    (Part("RandomWalk", "Reset", 1), Part("RandomWalk", "NoNoise", 2)),
    (Part("Seasonal 1", "FullNoise", 2), Part("MeanReversion", "Restore", 1)),
]
NEGATIVE = ("Seasonal Nyquist", "Affine number")  # gains without a real root
NO_PART = {  # noises that no noise over half a step adds up to
    ("Seasonal 3", "FullNoise"),
    ("Affine matrix", "FullNoise"),
    ("Affine matrix", "Isotropic"),
}


def can_pair(motion: str, noise: str) -> bool:
    if noise == "Stationary":
        return motion not in ("LocalTrend 1", "LocalTrend 2")
    return noise != "Restore" or motion == "MeanReversion"


PAIRS = [pair for pair in product(MOTIONS, NOISES) if can_pair(*pair)]
SYSTEMS = [*[(Part(*pair, 3),) for pair in PAIRS], *BLOCKS]
DIVISIBLE = [
    parts
    for parts in SYSTEMS
    if not any(part.motion in NEGATIVE or (part.motion, part.noise) in NO_PART for part in parts)
]


def title(parts: tuple[Part, ...]) -> str:
    return " + ".join(f"{part.motion}, {part.noise}" for part in parts)


def bind(parts: tuple[Part, ...]) -> tuple[BoundTransition, df.Belief]:
    """A transition, and a belief that is not its source."""
    system = System(parts, SOURCE)
    source = belief(system.source)
    moved = source.covariance.condition(tensor(normals(2, source.dimension, seed=3)))
    return system.transition().bind(source), df.Belief(source.mean + 0.5, moved)


def repeat(bound: BoundTransition, start: df.Belief, times: int) -> df.Belief:
    for _ in range(times):
        start = bound(start)
    return start


def assert_moments_equal(actual: df.Belief, expected: df.Belief, tolerance: float) -> None:
    scale = float(expected.covariance.dense().abs().max())
    torch.testing.assert_close(
        moments(actual), moments(expected), rtol=tolerance, atol=tolerance * max(scale, 1.0)
    )


@pytest.mark.parametrize("parts", SYSTEMS, ids=title)
@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_a_whole_time_is_as_many_transitions(parts: tuple[Part, ...], steps: int) -> None:
    bound, start = bind(parts)
    assert_moments_equal(bound.over(steps)(start), repeat(bound, start, steps), 1e-12)


@pytest.mark.parametrize("parts", DIVISIBLE, ids=title)
def test_times_add_up(parts: tuple[Part, ...]) -> None:
    """0.3, 1.5 and 1.2 one after the other are three transitions."""
    bound, start = bind(parts)
    moved = start
    for dt in (0.3, 1.5, 1.2):
        moved = bound.over(dt)(moved)
    assert_moments_equal(moved, repeat(bound, start, 3), 1e-11)


def test_one_unit_is_the_transition_itself_and_no_time_moves_nothing() -> None:
    bound, start = bind(BLOCKS[0])
    assert bound.over(1.0) is bound
    still = bound.over(0)(start)
    assert (still.mean is start.mean, still.covariance is start.covariance) == (True, True)


def test_parts_of_a_step_are_the_closed_forms() -> None:
    """ρ^t, δ^-t, t σ² and σ² (1 - ρ^2t)/(1 - ρ²); the trend by t v, the season by an angle of t."""
    source = belief(SOURCE)
    reverting = df.Transition(df.MeanReversion(0.9), df.Isotropic(0.02)).bind(source).over(0.4)
    assert reverting.gain == pytest.approx(0.9**0.4, rel=1e-14)
    assert array(torch.as_tensor(reverting.drift)) == pytest.approx(
        (1 - 0.9**0.4) * SOURCE.mean, rel=1e-14
    )
    assert isinstance(reverting.spread, Spread)
    assert isinstance(reverting.spread.noise, Tensor)
    assert array(reverting.spread.noise) == pytest.approx(
        0.02 * (1 - 0.9**0.8) / (1 - 0.81) * np.eye(3), rel=1e-14
    )
    walking = df.Transition(df.RandomWalk(), df.Discount(0.9)).bind(source).over(0.4)
    assert isinstance(walking.spread, Spread)
    assert walking.spread.keep == pytest.approx(0.9**-0.4, rel=1e-14)
    assert walking.spread.noise == 0.0
    states = df.Transition(df.LocalTrend(2, scale=0.3)).augment(source)
    trend = df.Transition(df.LocalTrend(2, scale=0.3)).bind(states).over(2.5).gain
    expected = np.kron(np.array([[1, 2.5, 2.5 * 1.5 / 2], [0, 1, 2.5], [0, 0, 1]]), np.eye(3))
    assert array(torch.as_tensor(trend)) == pytest.approx(expected, abs=1e-13)
    season = df.Transition(df.Seasonal(12)).bind(df.Transition(df.Seasonal(12)).augment(source))
    cosine, sine = math.cos(0.4 * math.pi / 6), math.sin(0.4 * math.pi / 6)
    block = np.array([[1, 0, 0], [0, cosine, sine], [0, -sine, cosine]])
    assert array(torch.as_tensor(season.over(0.4).gain)) == pytest.approx(
        np.kron(block, np.eye(3)), abs=1e-13
    )


def test_matrices_are_raised_as_scipy_does() -> None:
    system = System((Part("Affine matrix", "Stationary", 3),), SOURCE)
    bound = system.transition().bind(belief(SOURCE))
    part = bound.over(0.37)
    gain = fractional_matrix_power(system.gain, 0.37)
    assert array(torch.as_tensor(part.gain)) == pytest.approx(gain, abs=1e-12)
    fixed = np.linalg.solve(np.eye(3) - system.gain, system.drift)  # G m + c = m
    assert array(torch.as_tensor(part.drift)) == pytest.approx(fixed - gain @ fixed, abs=1e-12)
    # What the noise comes to after all time is the same, however it is cut.
    assert isinstance(part.spread, Spread)
    assert isinstance(part.spread.noise, Tensor)
    noise = array(part.spread.noise)
    assert solve_discrete_lyapunov(gain, noise) == pytest.approx(SOURCE.covariance, abs=1e-11)


VARIANCES = tensor(np.array([0.5, 1.0, 2.0, 0.8, 1.5, 0.7]))
STRUCTURED: dict[str, df.Covariance] = {
    "Diagonal": df.Diagonal(VARIANCES),
    "LowRank": df.LowRank(1 / VARIANCES, tensor(normals(1, 6, seed=9)), rank=6),
    "Blocks": df.Blocks((df.Full(tensor(spd(2, 0))), df.Diagonal(VARIANCES[2:]))),
    "Kronecker": df.Kronecker.isotropic(0.5, 2, 3, VARIANCES),
}
NUMBERS = [("MeanReversion", noise) for noise in NOISES if noise not in ("FullNoise", "Restore")]


@pytest.mark.parametrize("structure", STRUCTURED)
@pytest.mark.parametrize(
    ("motion", "noise"),
    [
        *NUMBERS,
        ("MeanReversion", "Restore"),
        ("Affine vector", "Isotropic"),
        ("Affine vector", "Stationary"),
    ],
)
def test_every_structure_moves_over_any_time(structure: str, motion: str, noise: str) -> None:
    covariance = STRUCTURED[structure]
    if structure == "Kronecker" and (motion, noise) not in NUMBERS:
        pytest.skip("it carries no gain or noise that differs between coordinates")
    if structure == "LowRank" and (motion, noise) == ("Affine vector", "Stationary"):
        pytest.skip("it has no dense precision")
    source = df.Belief(tensor(normals(6, seed=5)), covariance)
    system = System(
        (Part(motion, noise, 6),), Moments(array(source.mean), array(covariance.dense()))
    )
    bound = system.transition().bind(source)
    start = df.Belief(source.mean + 1, covariance.inform(0.5))
    half = bound.over(2.5)(bound.over(1.5)(start))
    for moved in (bound.over(4)(start), half):
        assert type(moved.covariance) is type(covariance)
        assert_moments_equal(moved, repeat(bound, start, 4), 1e-11)


def test_blocks_stay_apart_under_a_matrix() -> None:
    """Reversion by the precision of two blocks is one matrix; no part of a step mixes them."""
    blocks = df.Blocks((df.Full(tensor(spd(2, 0))), df.Full(tensor(spd(3, 1)))))
    source = df.Belief(tensor(normals(5, seed=2)), blocks)
    bound = df.Transition(df.PrecisionReversion(0.05), df.Isotropic(0.02)).bind(source)
    moved = bound.over(0.5)(bound.over(1.5)(source))
    assert isinstance(moved.covariance, df.Blocks)
    assert_moments_equal(moved, repeat(bound, source, 2), 1e-11)


# In a filter --------------------------------------------------------------------------------------


def build(transition: df.Transition, head: int = 2) -> tuple[df.Filter, df.FilterState]:
    filt = df.Filter(df.LinearHead(head), transition, inference=df.Linearized(df.Hessian()))
    mean = tensor(np.array([1.0, -0.5]))
    return filt, filt.init(df.Belief(mean, df.Full(tensor(spd(2, 4)))), seed=3)


TRANSITIONS = {
    "reversion": df.Transition(df.MeanReversion(0.9), df.Stationary()),
    "trend": df.Transition(df.LocalTrend(velocity=0.1), df.Isotropic(0.01)),
    "restore": df.Transition(df.MeanReversion(0.9), df.Restore()),
    "sum": df.Transition(
        df.SumDynamics(
            (
                df.Transition(df.LocalTrend(), df.Isotropic(0.01)),
                df.Transition(df.Seasonal(7, level=False), df.Discount(0.9)),
            )
        )
    ),
}


@pytest.mark.parametrize("name", TRANSITIONS)
def test_a_step_after_a_time_is_transitions_and_then_the_step(name: str) -> None:
    filt, state = build(TRANSITIONS[name])
    state, batch = filt.step(state, normal(6, 2, seed=1))[0], normal(6, 2, seed=2)
    stepped, prediction, info = filt.step(state, batch, dt=4)
    updated, _ = filt.update(state, batch, dt=4)
    waited = filt.elapse(state, 3)
    assert waited.step == state.step
    assert_moments_equal(waited.belief, repeat(filt._bind(state)[0], state.belief, 3), 1e-12)
    expected, same, told = filt.step(waited, batch)
    assert_moments_equal(stepped.belief, expected.belief, 1e-10)
    assert_same(moments(updated.belief), moments(stepped.belief))
    torch.testing.assert_close(prediction.probabilities, same.probabilities)
    assert info.step == told.step
    parts = filt.elapse(filt.elapse(state, 0.75), 2.25)
    assert_moments_equal(parts.belief, waited.belief, 1e-10)


def test_a_run_takes_a_time_for_each_batch() -> None:
    filt, start = build(TRANSITIONS["trend"])
    batches, times = normal(5, 6, 2, seed=1), [1, 0.5, 2, 0, 3.25]
    end, outputs = filt.run(start, batches, dt=times)
    state, rows = start, []
    for batch, dt in zip(batches, times, strict=True):
        state, prediction, _ = filt.step(state, batch, dt)
        rows.append(prediction.log_probabilities)
    assert_same(
        (moments(end.belief), outputs.log_probabilities), (moments(state.belief), torch.cat(rows))
    )
    for same in (torch.tensor(times), iter(times), np.array(times)):
        assert_same(moments(filt.run(start, batches, dt=same)[0].belief), moments(end.belief))
    ones = filt.run(start, batches)[0]
    every: tuple[float | list[float], ...] = (1, [1.0] * 5)
    for given in every:
        assert_same(moments(filt.run(start, batches, dt=given)[0].belief), moments(ones.belief))


def test_streams_of_other_times_are_not_compiled() -> None:
    """Compiled code knows one transition: a long stream with dt falls back, and is right."""
    filt, start = build(TRANSITIONS["reversion"])
    batches = normal(80, 6, 2, seed=1)
    assert filt.run(start, batches)[1].compiled == 80
    end, outputs = filt.run(start, batches, dt=2)
    state = start
    for batch in batches:
        state = filt.step(filt.elapse(state, 1), batch)[0]
    assert outputs.compiled == 0
    assert_moments_equal(end.belief, state.belief, 1e-10)


def own_spread(gain: object, source: df.Belief) -> object:
    return lambda belief: Spread(1.0, belief.covariance.variance())


OWN = df.Transition(df.RandomWalk(), own_spread)  # type: ignore[arg-type]
NYQUIST = df.Transition(df.Seasonal(4, harmonics=2))
BATCH = normal(6, 2, seed=1)


def step(transition: df.Transition, dt: object) -> object:
    filt, state = build(transition)
    return filt.step(state, BATCH, dt)  # type: ignore[arg-type]


WHOLE = "dt must be a whole number if the gain has an eigenvalue that is 0 or negative"
test_what_cannot_be_is_refused = refuses(
    [
        (TRANSITIONS["trend"], -1.0, r"dt must be a finite number in \[0, inf\), got -1.0"),
        (TRANSITIONS["trend"], math.nan, "dt must be a finite number"),
        (TRANSITIONS["trend"], "2", "dt must be a finite number .* got '2'"),
        (TRANSITIONS["trend"], True, "dt must be a finite number .* got True"),
        (df.Transition(df.Affine(-0.8)), 0.5, f"{WHOLE}, .* got 0.5"),
        (df.Transition(df.Affine(((1.0, 0.0), (0.0, 0.0))), df.Isotropic()), 0.5, WHOLE),
        (NYQUIST, 1.5, WHOLE),
        (OWN, 2, r"dt must be 1 for a spread of your own that has no over\(dt\), got 2"),
        (
            df.Transition(df.Affine(((0.0, 1.0), (-1.0, 0.0))), df.FullNoise((1.0, 0.0))),
            0.5,
            "dt must be a whole number for this noise, which over a part of a step is no cov.* 0.5",
        ),
    ],
    by=step,
)


@pytest.mark.parametrize("times", [[1.0, 2.0], [1.0] * 4])
def test_times_must_be_as_many_as_batches(times: list[float]) -> None:
    filt, state = build(TRANSITIONS["reversion"])
    with pytest.raises(ValueError, match="dt must be a number, or one for each batch, got"):
        filt.run(state, normal(3, 6, 2), dt=times)


@pytest.mark.parametrize("name", ["reversion", "trend"])
def test_a_batch_takes_as_much_time_as_its_samples(name: str) -> None:
    """n of N samples take n/N of a unit, more than N one; ``dt`` counts beside it."""
    plain, state = build(TRANSITIONS[name])
    timed = replace(plain, transition=replace(plain.transition, samples=8))
    for n, dt in ((2, 1.0), (6, 1.0), (11, 1.0), (6, 0.5)):
        batch = normal(n, 2, seed=n)
        expected, told, _ = plain.step(state, batch, dt * min(1.0, n / 8))
        found, same, _ = timed.step(state, batch, dt)
        assert_same(
            (moments(found.belief), same.probabilities),
            (moments(expected.belief), told.probabilities),
        )
    slow, fast = (timed.step(state, normal(n, 2))[0].belief.mean for n in (2, 8))
    assert not torch.allclose(slow, fast)


def test_parts_of_time_need_no_default_device() -> None:
    with torch.device("meta"):
        gain, drift = move_on(0.25, 3.0, 0.5)
    assert gain == 0.5
    assert drift == pytest.approx(3 * (1 - 0.5) / (1 - 0.25))


def test_time_by_samples_needs_parts_of_a_unit_and_one_clock() -> None:
    """Said before the stream begins, not by its first batch that is small."""
    with pytest.raises(ValueError, match=r"Transition\.samples must be 0 here: dt must be a whole"):
        build(df.Transition(df.Affine(-0.8), samples=8))
    for part in (df.Transition(samples=8), df.Transition(df.MeanReversion(0.5), samples=2)):
        with pytest.raises(ValueError, match="parts: samples must be 0 of each part"):
            df.BlockDynamics((2, 2), (part, df.Transition()))
        with pytest.raises(ValueError, match="parts: samples must be 0 of each part"):
            df.SumDynamics((df.Transition(), part))


def test_a_stream_that_goes_by_samples_is_not_smoothed() -> None:
    filt, state = build(df.Transition(df.MeanReversion(0.9), samples=8))
    outputs = filt.run(state, normal(3, 6, 2), keep_states=True)[1]
    with pytest.raises(ValueError, match=r"Transition\.samples must be 0 to smooth"):
        filt.smooth(outputs)
    with pytest.raises(ValueError, match=r"Transition.samples must be an integer >= 0, got -1"):
        df.Transition(samples=-1)

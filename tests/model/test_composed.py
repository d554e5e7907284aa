"""Dynamics added up on one parameter, and hidden states that start where they are known to be."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import driftfilter as df
from oracles import (
    Array,
    Moments,
    array,
    assert_equal,
    belief,
    block_diagonal,
    kalman_update,
    normals,
    spd,
    tensor,
)
from small import moments, refuses

SOURCE = Moments(normals(2, seed=1), spd(2, 2))
TWO = belief(SOURCE)
TREND = df.Transition(df.LocalTrend(1, scale=0.3, velocity=(0.2, -0.1)), df.Isotropic(0.02))
WEEK = df.Transition(
    df.Seasonal(7, harmonics=2, scale=0.2, amplitude=0.5, phase=0.3, level=False),
    df.Discount(0.9),
)
SUM = df.Transition(df.SumDynamics((TREND, WEEK)))


def residual(theta: Tensor, inputs: Tensor) -> Tensor:
    """y - h·θ for inputs [h, y], as a single logit."""
    return inputs[:, -1:] - inputs[:, :-1] @ theta[:, None]


def rotation(angle: float) -> Array:
    return np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])


def test_trend_and_season_on_one_parameter_are_the_kalman_filter() -> None:
    """60 steps against dense algebra: 2 states of the trend and 4 of the season for each of 2
    parameters; the discount inflates the season's block alone.
    """
    angle = 2 * math.pi / 7
    block = block_diagonal(np.array([[1.0, 1.0], [0.0, 1.0]]), rotation(angle), rotation(2 * angle))
    gain = np.kron(block, np.eye(2))
    read_out = np.kron(np.array([[1.0, 0.0, 1.0, 0.0, 1.0, 0.0]]), np.eye(2))
    start = np.zeros((6, 2))
    start[1], start[2], start[3] = (0.2, -0.1), 0.5 * math.sin(0.3), 0.5 * math.cos(0.3)
    start[0] = SOURCE.mean - start[2]
    spread = np.repeat([0.3**2, 0.3**2, *[0.2**2] * 4], 2)
    covariance = np.diag(spread)
    covariance[:2, :2] = SOURCE.covariance
    exact = Moments(start.flatten(), covariance)
    filt = df.Filter(
        residual,
        SUM,
        df.Gibbs(lambda logits: 0.5 * logits.square().sum(-1)),
        df.Linearized(df.Hessian()),
    )
    state = filt.init(TWO)
    assert_equal(state.belief.mean, exact.mean)
    assert_equal(state.belief.covariance.dense(), exact.covariance)
    for step in range(60):
        design, targets = normals(2, 2, seed=step), normals(2, seed=100 + step)
        inputs = np.sqrt(2 / 0.25) * np.column_stack([design, targets])
        state, _, _ = filt.step(state, tensor(inputs))
        moved = gain @ exact.covariance @ gain.T
        moved[:4, :4] += 0.02 * np.eye(4)
        moved[4:, 4:] /= 0.9
        prior = Moments(gain @ exact.mean, moved)
        exact = kalman_update(prior, design @ read_out, targets, 0.25)
        assert_equal(state.belief.mean, exact.mean, 1e-10)
        assert_equal(state.belief.covariance.dense(), exact.covariance, 1e-10)


def test_a_level_and_a_season_are_the_season_with_a_level() -> None:
    noise = df.Isotropic(0.02)
    whole = df.Transition(df.Seasonal(6, 3, 0.2, amplitude=0.4, phase=1.0), noise)
    season = df.Transition(df.Seasonal(6, 3, 0.2, amplitude=0.4, phase=1.0, level=False), noise)
    added = df.Transition(df.SumDynamics((df.Transition(df.RandomWalk(), noise), season)))
    one, two = whole.augment(TWO), added.augment(TWO)
    for _ in range(4):
        torch.testing.assert_close(moments(two), moments(one), rtol=0, atol=1e-14)
        one, two = whole(one, whole.augment(TWO)), added(two, added.augment(TWO))
    torch.testing.assert_close(added.read_out(2), whole.read_out(2))


def test_sums_stand_in_blocks_and_draw_paths() -> None:
    walk = df.Transition(df.RandomWalk(), df.Isotropic(0.01))
    mixed = df.Transition(df.BlockDynamics((1, 1), (walk, SUM_OF_ONE)))
    assert mixed.augment(TWO).dimension == 1 + 4
    blocks = df.Belief(
        TWO.mean, df.Blocks((df.Full(tensor(spd(1, 0))), df.Full(tensor(spd(1, 1)))))
    )
    assert isinstance(mixed.augment(blocks).covariance, df.Blocks)
    source = SUM.augment(TWO)
    paths = array(SUM.sample_states(source, steps=3, count=20_000, seed=7))
    moving = source
    for step in range(4):
        spread = np.sqrt(array(moving.covariance.variance()) / 20_000)
        assert (np.abs(paths[:, step].mean(0) - array(moving.mean)) < 5 * spread).all()
        moving = SUM(moving, source)


SUM_OF_ONE = df.Transition(
    df.SumDynamics(
        (
            df.Transition(df.LocalTrend(1), df.Isotropic(0.01)),
            df.Transition(df.Seasonal(7, level=False), df.NoNoise()),
        )
    )
)


def read(transition: df.Transition, steps: int, source: df.Belief = TWO) -> Array:
    """Means of the parameters before the first step and after each [steps + 1, d]."""
    moving = start = transition.augment(source)
    matrix, points = transition.read_out(2), []
    assert matrix is not None
    for _ in range(steps + 1):
        points.append(array(matrix.to(moving.mean) @ moving.mean))
        moving = transition(moving, start)
    return np.array(points)


TIME = np.arange(9)[:, None]


@pytest.mark.parametrize("velocity", [0.3, (0.3, -0.2), torch.tensor([0.3, -0.2])])
def test_a_known_velocity_moves_the_mean(velocity: float) -> None:
    expected = SOURCE.mean + TIME * np.asarray(velocity)
    trend = df.Transition(df.LocalTrend(velocity=velocity))
    assert read(trend, 8) == pytest.approx(expected, abs=1e-6)
    assert hash(trend) == hash(df.Transition(df.LocalTrend(velocity=velocity)))


def test_a_known_acceleration_does_too() -> None:
    trend = df.Transition(df.LocalTrend(2, velocity=((0.3, -0.2), (0.1, 0.0))))
    expected = SOURCE.mean + TIME * [0.3, -0.2] + TIME * (TIME - 1) / 2 * [0.1, 0.0]
    assert read(trend, 8) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("amplitude", "phase"), [(0.5, 0.0), ((0.5, 0.2), 1.0), (0.5, (0.3, 2.0)), (0.0, 1.0)]
)
def test_a_known_season_moves_the_mean_from_the_source(amplitude: float, phase: float) -> None:
    season = df.Transition(df.Seasonal(8, amplitude=amplitude, phase=phase))
    a, p = np.asarray(amplitude), np.asarray(phase)
    expected = SOURCE.mean + a * (np.sin(2 * math.pi * TIME / 8 + p) - np.sin(p))
    points = read(season, 8)
    assert points == pytest.approx(expected, abs=1e-12)
    assert points[0] == pytest.approx(SOURCE.mean, abs=1e-15)


def test_every_harmonic_has_its_own() -> None:
    """The last one, of half the period, has no phase but its sign."""
    amplitude, phase = ((0.5, 0.1), (0.2, 0.0)), ((0.3, 0.0), (math.pi / 2, 0.0))
    season = df.Transition(df.Seasonal(4, harmonics=2, amplitude=amplitude, phase=phase))
    a, p = np.array(amplitude), np.array(phase)
    waves = a[0] * np.sin(math.pi * TIME / 2 + p[0]) + a[1] * np.sin(p[1]) * (-1.0) ** TIME
    assert read(season, 8) == pytest.approx(SOURCE.mean + waves - waves[0], abs=1e-12)


def test_starts_in_single_precision_and_in_a_filter() -> None:
    single = df.Belief(TWO.mean.float(), df.Full(TWO.covariance.dense().float()))
    assert read(SUM, 4, single) == pytest.approx(read(SUM, 4), abs=1e-5)
    filt = df.Filter(df.LinearHead(2), SUM)
    state = filt.init(single)
    assert state.belief.mean.dtype == torch.float32
    assert filt.run(state, torch.randn(3, 5, 2))[0].belief.dimension == 12


SEASON = df.Transition(df.Seasonal(7, level=False))
LEVEL = "a first part that holds the parameters and others without a level"
test_what_cannot_be_is_refused = refuses(
    [
        (lambda: df.SumDynamics(()), "SumDynamics.parts must be one transition or more"),
        (lambda: df.SumDynamics((df.RandomWalk(),)), "SumDynamics.parts must be one trans"),  # type: ignore[arg-type]
        (lambda: df.SumDynamics((SEASON, SEASON)).layout(2), f"SumDynamics.parts must be {LEVEL}"),
        (lambda: df.SumDynamics((TREND, TREND)).layout(2), f"SumDynamics.parts must be {LEVEL}"),
        (
            lambda: df.SumDynamics((df.Transition(df.BlockDynamics((2,), (TREND,))), WEEK)),
            "SumDynamics.parts must be .* none of BlockDynamics",
        ),
        (
            lambda: SUM(TWO, TWO),
            "source belief must be over the augmented state, a multiple of 6",
        ),
        (
            lambda: df.Transition(SUM.dynamics, df.Isotropic()).bind(SUM.augment(TWO)),
            r"Transition.noise must be NoNoise\(\) under SumDynamics, whose parts have their own",
        ),
        (
            lambda: SEASON.augment(TWO),
            "Transition.dynamics must be one with a level; without, it is to be added",
        ),
        (
            lambda: SUM.augment(df.Belief(torch.zeros(2), df.Diagonal(torch.ones(2)))),
            "Diagonal cannot carry SumDynamics, whose hidden states correlate",
        ),
        (
            lambda: df.Transition(df.LocalTrend(velocity=(1.0, 2.0, 3.0))).augment(TWO),
            r"LocalTrend.velocity must be a number, a vector \[2\] or a matrix \[1, 2\], got "
            r"'shape \[3\]'",
        ),
        (
            lambda: df.Transition(df.Seasonal(phase=((1.0, 2.0), (0.0, 0.0)))).augment(TWO),
            r"Seasonal.phase must be .* got 'shape \[2, 2\]'",
        ),
        (lambda: df.LocalTrend(0, velocity=1.0), "LocalTrend.velocity must be 0 for .* order 0"),
        (lambda: df.LocalTrend(velocity=math.nan), "LocalTrend.velocity must be a finite number"),
        (lambda: df.Seasonal(amplitude="1"), "Seasonal.amplitude must be a number, vector or"),  # type: ignore[arg-type]
    ]
)

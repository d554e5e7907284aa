import math

import numpy as np
import pytest
import torch
from torch import Tensor

import driftfilter as df
from oracles import (
    MOTIONS,
    Array,
    Moments,
    Part,
    System,
    array,
    assert_equal,
    belief,
    dense_map,
    normals,
    spd,
    tensor,
)
from small import refuses

SOURCE = Moments(normals(2, seed=1), spd(2, 2))
TWO = belief(SOURCE)


def path(dynamics: df.Dynamics, state: Array, steps: int) -> Array:
    """Parameters read out along the deterministic motion from a state [states], [steps + 1,
    parameters].
    """
    layout = dynamics.layout(2)
    read_out = np.eye(2) if layout is None else array(layout.read_out)
    motion = dynamics(df.Belief(tensor(state), df.Full(torch.eye(len(state)).double())))
    points = [read_out @ state]
    for _ in range(steps):
        drift = motion.drift if isinstance(motion.drift, float) else array(motion.drift)
        state = dense_map(motion.gain, len(state)) @ state + drift
        points.append(read_out @ state)
    return np.array(points)


@pytest.mark.parametrize("name", MOTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gain_drift_and_layout(name: str, dtype: torch.dtype) -> None:
    system = System((Part(name, "NoNoise", 2),), SOURCE)
    (expected,) = system.motions
    size = len(expected.gain)
    source = df.Belief(
        tensor(system.source.mean, dtype), df.Full(tensor(system.source.covariance, dtype))
    )
    motion, layout = expected.dynamics(source), expected.dynamics.layout(2)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    assert_equal(torch.tensor(dense_map(motion.gain, size)), expected.gain, tolerance)
    drift = motion.drift if isinstance(motion.drift, float) else array(motion.drift)
    assert_equal(torch.tensor(np.zeros(size) + drift), np.zeros(size) + expected.drift, tolerance)
    assert all(
        value.dtype == dtype for value in (motion.gain, motion.drift) if isinstance(value, Tensor)
    )
    if layout is None:
        assert size == 2
    else:
        assert_equal(layout.read_out, system.read_out)
        assert layout.places.tolist() == [0, 1]  # the level is the parameter itself
        assert_equal(layout.variance[2:], np.diag(system.source.covariance)[2:])


@pytest.mark.parametrize("order", [0, 1, 2, 3])
@pytest.mark.parametrize("dt", [1.0, 0.25])
def test_trend_is_a_polynomial_of_its_order(order: int, dt: float) -> None:
    """The first difference is dt times the velocity, the last one but none is constant."""
    state = normals(2 * (order + 1), seed=order)
    points = path(df.LocalTrend(order, dt), state, steps=8)
    np.testing.assert_allclose(np.diff(points, order + 1, axis=0), 0.0, atol=1e-12)
    if order:
        np.testing.assert_allclose(points[1] - points[0], dt * state[2:4], atol=1e-12)
        assert (
            np.abs(np.diff(points, order, axis=0)).min() > 1e-4 * dt**order
        )  # it does not stop short of its order


@pytest.mark.parametrize(
    ("period", "harmonics"), [(2, 1), (12, 1), (4, 2), (7, 3), (6, 3), (9.5, 2)]
)
def test_season_is_a_fourier_series(period: float, harmonics: int) -> None:
    """θ_t = level + Σ_j A_j cos(2πjt/period) + B_j sin(2πjt/period); at j = period/2 the sine is 0
    and has no state.
    """
    state = normals(2 * (1 + 2 * harmonics - int(2 * harmonics == period)), seed=3)
    steps, expected = np.arange(31), np.tile(state[:2], (31, 1))
    for harmonic in range(1, harmonics + 1):
        angle = 2 * np.pi * harmonic * steps[:, None] / period
        start = 2 * (2 * harmonic - 1)
        expected = expected + np.cos(angle) * state[start : start + 2]
        if 2 * harmonic < period:
            expected = expected + np.sin(angle) * state[start + 2 : start + 4]
    np.testing.assert_allclose(
        path(df.Seasonal(period, harmonics), state, steps=30), expected, atol=1e-11
    )


@pytest.mark.parametrize(
    ("dynamics", "rho"),
    [
        (df.MeanReversion(0.8), 0.8),
        (df.MeanReversion(0.0), 0.0),
        (df.PrecisionReversion(0.4), None),
    ],
)
def test_reversion_shrinks_the_distance_to_the_source_mean(
    dynamics: df.Dynamics, rho: float | None
) -> None:
    """Along each eigenvector of the source precision by ρ, or by 1 - η λ, a step."""
    values, vectors = np.linalg.eigh(np.linalg.inv(SOURCE.covariance))
    shrink = 1 - 0.4 * values if rho is None else np.full(2, rho)
    start = np.array([2.0, -1.0])
    moving = df.Belief(tensor(SOURCE.mean + vectors @ start), TWO.covariance)
    for step in range(1, 31):
        moving = df.Transition(dynamics, df.Isotropic(0.1))(moving, TWO)
        distance = vectors.T @ (array(moving.mean) - SOURCE.mean)
        np.testing.assert_allclose(distance, shrink**step * start, atol=1e-12)


PRECISIONS = tensor(np.array([2.0, 0.5]))


@pytest.mark.parametrize(
    "covariance",
    [df.Diagonal(1 / PRECISIONS), df.LowRank(PRECISIONS, torch.zeros(0, 2).double(), 1)],
)
def test_precision_reversion_of_an_uncorrelated_source_is_a_vector(
    covariance: df.Covariance,
) -> None:
    """So that Diagonal and LowRank can carry it."""
    motion = df.PrecisionReversion(0.1)(df.Belief(tensor(SOURCE.mean), covariance))
    assert isinstance(motion.gain, Tensor)
    assert_equal(motion.gain, np.array([0.8, 0.95]))


def test_affine_takes_tensors_and_lists_as_values() -> None:
    """They compare and hash by value, so they can stand in a configuration."""
    rows = ((1.0, 2.0), (0.0, 1.0))
    assert df.Affine(torch.tensor(rows), [1, 2]) == df.Affine(rows, (1.0, 2.0))  # type: ignore[arg-type]
    assert hash(df.Affine(torch.tensor(rows))) == hash(df.Affine(rows))


LARGEST = float(np.linalg.eigvalsh(np.linalg.inv(SOURCE.covariance))[-1])


def test_precision_reversion_is_accepted_up_to_its_limit() -> None:
    motion = df.PrecisionReversion(1.999 / LARGEST)(TWO)
    assert isinstance(motion.gain, Tensor)
    assert np.abs(np.linalg.eigvalsh(array(motion.gain))).max() < 1


test_what_cannot_be_is_refused = refuses(
    [
        (
            lambda: df.MeanReversion(1.01),
            r"MeanReversion.rho must be a finite number in \[0, 1\], got 1.01",
        ),
        (
            lambda: df.MeanReversion(-0.1),
            r"MeanReversion.rho must be a finite number in \[0, 1\], got -0.1",
        ),
        (
            lambda: df.MeanReversion(math.nan),
            r"MeanReversion.rho must be a finite number in \[0, 1\], got nan",
        ),
        (
            lambda: df.MeanReversion(True),
            r"MeanReversion.rho must be a finite number in \[0, 1\], got True",
        ),
        (
            lambda: df.MeanReversion("1"),  # type: ignore[arg-type]
            r"MeanReversion.rho must be a finite number in \[0, 1\], got '1'",
        ),
        (
            lambda: df.PrecisionReversion(-0.1),
            r"PrecisionReversion.eta must be a finite number in \[0, inf\), got -0.1",
        ),
        (
            lambda: df.PrecisionReversion(2.001 / LARGEST)(TWO),
            rf"PrecisionReversion.eta must be below 2 / λ_max = {2 / LARGEST:g} .* got "
            rf"{2.001 / LARGEST}",
        ),
        (
            lambda: df.PrecisionReversion(0.5)(
                df.Belief(torch.zeros(2), df.Diagonal(torch.tensor([1.0, 0.25])))
            ),
            "PrecisionReversion.eta must be below 2 / λ_max = 0.5 for this source .largest "
            "precision 4., got 0.5",
        ),
        (lambda: df.LocalTrend(-1), "LocalTrend.order must be an integer >= 0, got -1"),
        (lambda: df.LocalTrend(1.0), "LocalTrend.order must be an integer >= 0, got 1.0"),  # type: ignore[arg-type]
        (
            lambda: df.LocalTrend(1, 0.0),
            r"LocalTrend.dt must be a finite number in \(0, inf\), got 0.0",
        ),
        (
            lambda: df.LocalTrend(1, 1.0, 0.0),
            r"LocalTrend.scale must be a finite number in \(0, inf\), got 0.0",
        ),
        (
            lambda: df.Seasonal(1.5),
            r"Seasonal.period must be a finite number in \[2, inf\), got 1.5",
        ),
        (lambda: df.Seasonal(7, 4), "Seasonal.harmonics must be at most period/2 = 3.5, got 4"),
        (lambda: df.Seasonal(7, 0), "Seasonal.harmonics must be an integer >= 1, got 0"),
        (
            lambda: df.Seasonal(7, 1, -1.0),
            r"Seasonal.scale must be a finite number in \(0, inf\), got -1.0",
        ),
        (
            lambda: df.Affine(math.inf),
            r"Affine.gain must be a finite number in \(-inf, inf\), got inf",
        ),
        (
            lambda: df.Affine((1.0, math.nan)),
            r"Affine.gain must be a finite number in \(-inf, inf\), got nan",
        ),
        (
            lambda: df.Affine(((1.0, 2.0), (3.0,))),
            "Affine.gain must be .* a matrix with rows of equal length, got",
        ),
        (
            lambda: df.Affine((1.0, (3.0,))),  # type: ignore[arg-type]
            "Affine.gain must be .* a matrix with rows of equal length, got",
        ),
        (lambda: df.Affine(()), r"Affine.gain must be .* got \(\)"),
        (lambda: df.Affine("I"), "Affine.gain must be a number, vector or matrix, got 'I'"),  # type: ignore[arg-type]
        (
            lambda: df.Affine((1.0, 1.0, 1.0))(TWO),
            r"Affine.gain must be of length 2 \(d\) .* got 'shape \[3\]'",
        ),
        (
            lambda: df.Affine(((1.0, 1.0),))(TWO),
            r"Affine.gain must be of length 2 \(d\) .* got 'shape \[1, 2\]'",
        ),
        (
            lambda: df.Affine(1.0, (1.0,))(TWO),
            r"Affine.drift must be of length 2 \(d\) .* got 'shape \[1\]'",
        ),
        (
            lambda: df.Affine(1.0, ((1.0, 0.0), (0.0, 1.0)))(TWO),
            r"Affine.drift must be .* got 'shape \[2, 2\]'",
        ),
    ]
)

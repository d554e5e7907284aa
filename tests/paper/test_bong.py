"""BONG on the two moons against a quadrature and a filter written out in NumPy."""

from dataclasses import replace

import numpy as np
import pytest

import driftfilter as df
from driftfilter.app.paper.moons import Moons, features
from driftfilter.inference.curvature import Clip
from oracles import Array, array


def derivatives_of_entropy(logit: Array) -> tuple[Array, Array]:
    """ℓ' = -f s and ℓ'' = -s (1 + f (1 - 2p)), with p = σ(f) and s = p (1 - p)."""
    p = 1 / (1 + np.exp(-logit))
    s = p * (1 - p)
    return -logit * s, -s * (1 + logit * (1 - 2 * p))


def expect(mean: Array, variance: Array, clip: Clip) -> tuple[Array, Array]:
    """E[ℓ'] and E[ℓ''] under N(mean, variance) [n], by Gauss–Legendre in 200 panels of 8 points
    over ±12 standard deviations; the latter cut off at 0 or not.
    """
    points, shares = np.polynomial.legendre.leggauss(8)
    edges = np.linspace(-12, 12, 201)
    half = np.diff(edges) / 2
    line = (edges[:-1] + half)[:, None] + half[:, None] * points
    density = half[:, None] * shares * np.exp(-line * line / 2) / np.sqrt(2 * np.pi)
    logits = mean[:, None] + np.sqrt(variance)[:, None] * line.ravel()
    slope, bend = derivatives_of_entropy(logits)
    averages = bend @ density.ravel()
    return slope @ density.ravel(), np.maximum(averages, 0) if clip == "after" else averages


def run_by_hand(
    source: df.Belief, stream: Array, example: Moons, clip: Clip
) -> list[tuple[Array, Array]]:
    """Mean and covariance after each batch: reversion with stationary noise, then one BONG step in
    information form.
    """
    mean0, matrix0 = array(source.mean), array(source.covariance.dense())
    mean, matrix, beliefs = mean0, matrix0, []
    for phi in stream:
        mean = example.rho * mean + (1 - example.rho) * mean0
        matrix = example.rho**2 * matrix + (1 - example.rho**2) * matrix0
        slope, bend = expect(phi @ mean, np.einsum("nd,de,ne->n", phi, matrix, phi), clip)
        precision = np.linalg.inv(matrix) + example.beta / len(phi) * phi.T @ (bend[:, None] * phi)
        matrix = np.linalg.inv(precision)
        mean = mean - example.beta / len(phi) * matrix @ phi.T @ slope
        beliefs.append((mean, matrix))
    return beliefs


@pytest.mark.parametrize("clip", ["after", "never"])
def test_bong_on_the_two_moons_is_an_independent_quadrature(clip: Clip) -> None:
    """The whole stream, mean and covariance after each batch to 1e-6."""
    example = Moons(nodes=201)
    problem = example.problem(2)
    source = example.source(problem.source)
    filt = replace(example.filter(), inference=df.Bong(df.Hessian(clip), samples=0, nodes=201))
    if clip == "after":
        assert filt == replace(example.filter(), logits=filt.logits)
    state = filt.init(source)
    steps = np.stack([array(features(batch)) for batch in problem.stream.inputs])
    for batch, (mean, matrix) in zip(
        problem.stream.inputs, run_by_hand(source, steps, example, clip), strict=True
    ):
        state, _ = filt.update(state, batch)
        np.testing.assert_allclose(array(state.belief.mean), mean, rtol=0, atol=1e-6)
        covariance = array(state.belief.covariance.dense())
        np.testing.assert_allclose(covariance, matrix, rtol=0, atol=1e-6)

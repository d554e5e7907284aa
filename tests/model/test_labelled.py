"""Labels that are learned, against dense Newton and Kalman updates in NumPy."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import driftfilter as df
from oracles import Array, Moments, assert_equal, kalman_update, normals, softmax, spd, tensor

K, D, N = 3, 2, 5
LABELS = np.array([0, 2, 1, 1, 0])


def head_rows(inputs: Array) -> Array:
    """Jacobians [n, k, d] of a linear head, class by class."""
    return np.stack([np.kron(np.eye(K), row[None]) for row in inputs])


def newton(mean: Array, prior: Array, start: Array, inputs: Array, weight: float) -> Any:
    """One Newton step on w Σ cross-entropy + ½ |θ - m|² in the prior's precision, from start."""
    jacobians, precision = head_rows(inputs), np.linalg.inv(prior)
    p = softmax(np.einsum("nkd,d->nk", jacobians, start))
    gradient = precision @ (start - mean)
    hessian = precision.copy()
    for row, own, label in zip(jacobians, p, LABELS, strict=True):
        gradient = gradient + weight * row.T @ (own - np.eye(K)[label])
        hessian = hessian + weight * row.T @ (np.diag(own) - np.outer(own, own)) @ row
    return start - np.linalg.solve(hessian, gradient), np.linalg.inv(hessian)


def start_of(inference: Any) -> tuple[df.Filter, df.FilterState, Array, Array, Array]:
    inputs, mean, prior = normals(N, D, seed=1), normals(K * D, seed=2), spd(K * D, seed=3)
    filt = df.Filter(df.LinearHead(K), inference=inference)
    state = filt.init(df.Belief(tensor(mean), df.Full(tensor(prior))))
    return filt, state, inputs, mean, prior


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_one_newton_step_of_a_logistic_regression(weight: float) -> None:
    filt, state, inputs, mean, prior = start_of(df.Linearized(df.Hessian()))
    after, info = filt.learn(state, tensor(inputs), torch.from_numpy(LABELS), weight)
    expected, covariance = newton(mean, prior, mean, inputs, weight)
    assert_equal(after.belief.mean, expected)
    assert_equal(after.belief.covariance.dense(), covariance)
    p = softmax(np.einsum("nkd,d->nk", head_rows(inputs), mean))
    losses = -np.log(p[np.arange(N), LABELS])
    assert_equal(info.energy, np.array(weight * losses.sum()))
    assert after.step == state.step  # no time passes


def test_the_laplace_posterior_of_a_logistic_regression() -> None:
    filt, state, inputs, mean, prior = start_of(df.Variational(samples=0, rate=1.0))
    after, _ = filt.learn(state, tensor(inputs), torch.from_numpy(LABELS))
    point, covariance = mean, prior
    for _ in range(50):
        point, covariance = newton(mean, prior, point, inputs, 1.0)
    assert_equal(after.belief.mean, point)
    assert_equal(after.belief.covariance.dense(), covariance)


def test_a_kalman_step_on_a_linear_energy() -> None:
    """At equal logits the energy of two classes is (s/2) y + s²/8 to second order: a Kalman
    observation of s of variance 4, at ±2.
    """
    prior, inputs = spd(D, seed=4), normals(1, D, seed=5)
    filt = df.Filter(df.LinearHead(2), inference=df.Linearized(df.Hessian()))
    state = filt.init(df.Belief(torch.zeros(D).double(), df.Full(tensor(prior))))
    for label, target in ((0, -2.0), (1, 2.0)):
        after, _ = filt.learn(state, tensor(inputs), torch.tensor([label]))
        before, observed = Moments(np.zeros(D), prior), np.array([target])
        mean, covariance = kalman_update(before, inputs, observed, 4.0)
        assert_equal(after.belief.mean, mean)
        assert_equal(after.belief.covariance.dense(), covariance)


def test_a_diagonal_belief_moves_as_the_full_one_does() -> None:
    """One sample moves all parameters together; a diagonal that did not see it would overstep."""
    variances, inputs = np.linspace(0.5, 2.0, K * D), normals(N, D, seed=6)
    filt = df.Filter(df.LinearHead(K), inference=df.Linearized(df.EmpiricalFisher()))
    mean = torch.zeros(K * D).double()
    state = filt.init(df.Belief(mean, df.Diagonal(tensor(variances))))
    for count in (1, N):  # a centred Fisher would say nothing of one
        own, labels = inputs[:count], LABELS[:count]
        after, _ = filt.learn(state, tensor(own), torch.from_numpy(labels))
        p = softmax(np.zeros((count, K)))
        rows = np.einsum("nkd,nk->nd", head_rows(own), p - np.eye(K)[labels])
        precision = np.diag(1 / variances) + rows.T @ rows
        assert_equal(after.belief.mean, -np.linalg.solve(precision, rows.sum(0)))
        assert_equal(after.belief.covariance.variance(), 1 / precision.diagonal())


def test_weights_of_each_label() -> None:
    filt, state, inputs, _, _ = start_of(df.Linearized(df.Hessian()))
    twice = torch.tensor([2.0, 1, 1, 1, 1]).double()
    own, labels = tensor(inputs), torch.from_numpy(LABELS)
    weighed, _ = filt.learn(state, own, labels, twice)
    both, first = torch.cat((own, own[:1])), torch.cat((labels, labels[:1]))
    repeated, _ = filt.learn(state, both, first)
    torch.testing.assert_close(weighed.belief.mean, repeated.belief.mean)


@pytest.mark.parametrize(
    ("labels", "weight", "message"),
    [
        (
            torch.tensor([0, 1, 2, 3, 0]),
            1.0,
            r"in \[0, 2\], got 'values from 0 to 3'",
        ),
        (torch.tensor([0, 1]), 1.0, r"labels must be integers of shape \[5\]"),
        (torch.ones(N), 1.0, r"labels must be integers of shape \[5\], got 'torch.float32"),
        (torch.from_numpy(LABELS), 0.0, r"weight must be a finite number in \(0, inf\), got 0"),
        (torch.from_numpy(LABELS), torch.tensor([-1.0]), "weight must be finite numbers > 0"),
    ],
)
def test_mistakes(labels: Any, weight: Any, message: str) -> None:
    filt, state, inputs, _, _ = start_of(df.Linearized(df.Hessian()))
    with pytest.raises(ValueError, match=message):
        filt.learn(state, tensor(inputs), labels, weight)
    frozen = replace(filt, inference=df.Frozen())
    with pytest.raises(ValueError, match="one that learns from an energy"):
        frozen.learn(state, tensor(inputs), torch.from_numpy(LABELS))

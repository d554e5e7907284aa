"""The source posterior against a general-purpose optimiser and finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

import driftfilter as df


def problem(classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(60, 2, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, classes, (60,), generator=generator)


def negative_log_posterior(theta: Tensor, inputs: Tensor, labels: Tensor, head: df.LinearHead, precision: float) -> Tensor:
    logp = head(theta, inputs).log_softmax(-1)
    return -logp.gather(-1, labels[:, None]).sum() + 0.5 * precision * theta @ theta


@pytest.mark.parametrize(("classes", "parameters"), [(2, 3), (2, 6), (3, 6), (3, 9)])
def test_mode_and_hessian_of_the_log_posterior(classes: int, parameters: int) -> None:
    inputs, labels = problem(classes)
    head = df.LinearHead(classes, intercept=True)
    prior = df.Belief(torch.zeros(parameters, dtype=torch.float64), df.Full(torch.eye(parameters, dtype=torch.float64) / 2))
    belief = df.fit_laplace(head, prior, inputs, labels)

    def objective(values: np.ndarray) -> tuple[float, np.ndarray]:
        theta = torch.tensor(values, requires_grad=True)
        value = negative_log_posterior(theta, inputs, labels, head, 2.0)
        (gradient,) = torch.autograd.grad(value, theta)
        return value.item(), gradient.numpy()

    mode = minimize(objective, np.zeros(parameters), jac=True, method="BFGS", options={"gtol": 1e-9}).x
    np.testing.assert_allclose(belief.mean.numpy(), mode, atol=1e-7)
    hessian = torch.autograd.functional.hessian(
        lambda theta: negative_log_posterior(theta, inputs, labels, head, 2.0), belief.mean
    )
    torch.testing.assert_close(belief.covariance.dense(), torch.linalg.inv(hessian), rtol=1e-8, atol=1e-10)


def test_structure_of_the_prior_is_kept() -> None:
    inputs, labels = problem(2)
    head = df.LinearHead(2, intercept=True)
    prior = df.Belief(torch.zeros(3, dtype=torch.float64), df.Diagonal(torch.ones(3, dtype=torch.float64)))
    belief = df.fit_laplace(head, prior, inputs, labels)
    full = df.fit_laplace(head, df.Belief(prior.mean, df.Full(torch.eye(3, dtype=torch.float64))), inputs, labels)
    torch.testing.assert_close(belief.mean, full.mean, rtol=0, atol=1e-7)  # the mode does not depend on the structure
    torch.testing.assert_close(belief.covariance.precision(), full.covariance.precision().diagonal(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 1]), r"labels must be integers of shape \[60\]"),
        (torch.zeros(60), "labels must be integers"),
        ([0] * 60, "labels must be a tensor of integers, got 'list'"),
        (torch.full((60,), 2), r"labels must be in \[0, 1\], got 'values from 2 to 2'"),
    ],
)
def test_bad_labels(labels: Any, message: str) -> None:
    inputs, _ = problem(2)
    prior = df.Belief(torch.zeros(2, dtype=torch.float64), df.Full(torch.eye(2, dtype=torch.float64)))
    with pytest.raises(ValueError, match=message):
        df.fit_laplace(df.LinearHead(2), prior, inputs, labels)


@pytest.mark.parametrize("structure", ["Full", "Diagonal", "Blocks", "LowRank"])
def test_the_mode_is_reached_under_every_structure_with_correlated_features(structure: str) -> None:
    """Undamped or projected Newton steps diverge here: the mode must be one, and the same for all."""
    generator = torch.Generator().manual_seed(1)
    inputs = 1 + 0.3 * torch.randn(100, 20, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 2, (100,), generator=generator)
    ones = torch.ones(20, dtype=torch.float64)
    structures: dict[str, df.Covariance] = {
        "Full": df.Full(torch.diag(ones)),
        "Diagonal": df.Diagonal(ones),
        "Blocks": df.Blocks((df.Full(torch.diag(ones[:10])), df.Diagonal(ones[10:]))),
        "LowRank": df.LowRank(ones, torch.zeros(0, 20, dtype=torch.float64), 3),
    }
    covariance = structures[structure]
    belief = df.fit_laplace(df.LinearHead(2), df.Belief(0 * ones, covariance), inputs, labels)
    theta = belief.mean.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(negative_log_posterior(theta, inputs, labels, df.LinearHead(2), 1.0), theta)
    assert gradient.norm() < 1e-6
    assert type(belief.covariance) is type(covariance)


@pytest.mark.parametrize("seed", range(5))
def test_a_small_network_reaches_a_mode(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(100, 2, generator=generator, dtype=torch.float64)
    labels = (inputs.prod(-1) > 0).long()

    def network(theta: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x @ theta[:8].reshape(2, 4)) @ theta[8:].reshape(4, 2)

    start = 0.5 * torch.randn(16, generator=generator, dtype=torch.float64)
    prior = df.Belief(start, df.Full(torch.eye(16, dtype=torch.float64)))
    belief = df.fit_laplace(network, prior, inputs, labels, iterations=1000)
    theta = belief.mean.clone().requires_grad_()
    logp = network(theta, inputs).log_softmax(-1)
    objective = -logp.gather(-1, labels[:, None]).sum() + 0.5 * (theta - start).square().sum()
    (gradient,) = torch.autograd.grad(objective, theta)
    assert gradient.norm() < 1e-5


def test_a_mode_that_is_not_reached_is_an_error() -> None:
    inputs, _ = problem(2)
    prior = df.Belief(torch.zeros(2, dtype=torch.float64), df.Full(1e4 * torch.eye(2, dtype=torch.float64)))
    with pytest.raises(ValueError, match="iterations must be enough to reach the mode, got 1: the next Newton step"):
        df.fit_laplace(df.LinearHead(2), prior, 5 * inputs, (inputs[:, 0] > 0).long(), iterations=1)

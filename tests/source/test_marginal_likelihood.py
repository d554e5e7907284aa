"""The evidence of a Laplace approximation, structure by structure, against dense algebra (end to
end: test_posterior.py).
"""

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

import driftfilter as df
from driftfilter.source.marginal_likelihood import marginal_precision, reweight
from oracles import Array, array, assert_equal, normals, tensor
from small import refuses

LAMBDA = 0.5


def posteriors() -> dict[str, df.Covariance]:
    """(λ I + H)⁻¹ in six dimensions, H of less than full rank."""
    like, factor = torch.zeros(0, dtype=torch.float64), tensor(normals(4, 6, seed=0))
    parts = (
        df.Kronecker.isotropic(1 / LAMBDA, 2, 2, like),
        df.Diagonal(tensor(np.full(2, 1 / LAMBDA))),
    )
    priors: dict[str, df.Covariance] = {
        "Full": df.Full(torch.eye(6, dtype=torch.float64) / LAMBDA),
        "Diagonal": df.Diagonal(tensor(np.full(6, 1 / LAMBDA))),
        "LowRank": df.LowRank.isotropic(1 / LAMBDA, 6, 4, like),
        "Kronecker": df.Kronecker.isotropic(1 / LAMBDA, 2, 3, like),
        "Blocks": df.Blocks(parts),
    }
    return {name: prior.condition(factor).truncate() for name, prior in priors.items()}


def curvature(covariance: df.Covariance) -> Array:
    matrix: Array = np.linalg.inv(array(covariance.dense())) - LAMBDA * np.eye(6)
    return matrix


@pytest.mark.parametrize("name", ["Full", "Diagonal", "LowRank", "Kronecker", "Blocks"])
@pytest.mark.parametrize(
    ("after", "weight"), [(0.5, 1.0), (2.0, 1.0), (0.1, 1.0), (0.5, 0.1), (0.5, 7.0), (0.05, 0.1)]
)
def test_reweighting_changes_the_prior_and_the_share_of_the_data(
    name: str, after: float, weight: float
) -> None:
    covariance = posteriors()[name]
    changed = reweight(covariance, LAMBDA, after, weight)
    assert type(changed) is type(covariance)
    assert_equal(
        changed.dense(), np.linalg.inv(after * np.eye(6) + weight * curvature(covariance)), 1e-9
    )


@pytest.mark.parametrize("name", ["Full", "Diagonal", "Kronecker", "Blocks"])
@pytest.mark.parametrize("weight", [1.0, 0.01])
@pytest.mark.parametrize("size", [0.1, 1.0, 10.0])
def test_the_greatest_evidence_is_where_its_slope_vanishes(
    name: str, weight: float, size: float
) -> None:
    covariance, mean = posteriors()[name], size * normals(6, seed=1)
    matrix = weight * curvature(covariance)

    def slope(log_precision: float) -> float:
        """d log Z / d log λ by the trace formula, from the dense matrix."""
        lam = np.exp(log_precision)
        inverse = np.linalg.inv(lam * np.eye(6) + matrix)
        return float(0.5 * (6 - lam * mean @ mean - lam * np.trace(inverse)))

    found = marginal_precision(covariance, LAMBDA, tensor(mean), weight)
    assert found == pytest.approx(np.exp(brentq(slope, -20, 20, xtol=1e-14)), rel=1e-7)


test_low_rank_has_no_spectrum = refuses(
    [("LowRank", "LowRank cannot carry a marginal likelihood; use Full, Diagonal or Kronecker")],
    lambda name: marginal_precision(posteriors()[name], LAMBDA, torch.ones(6)),
)

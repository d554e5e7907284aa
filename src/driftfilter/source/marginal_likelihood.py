"""The evidence of a Laplace approximation: how strong a prior the source data ask for.

    log Z(λ) = log p(D given θ_S) - ½ λ |θ_S|² + ½ d log λ - ½ log det(λ I + H),   prior N(0, I/λ)

Its optimum is the one root of λ |θ_S|² = γ(λ) = Σ_j h_j / (h_j + λ), h the eigenvalues of H: the
left side grows, the right side, the number of parameters that the data determine, falls.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from driftfilter.base.checks import require, unchecked
from driftfilter.gaussian.blocks import Blocks
from driftfilter.gaussian.covariance import Covariance, cholesky, refuse, symmetrized
from driftfilter.gaussian.diagonal import Diagonal
from driftfilter.gaussian.full import Full
from driftfilter.gaussian.kronecker import Kronecker
from driftfilter.gaussian.lowrank import LowRank


def spectrum(covariance: Covariance) -> Tensor:
    """Eigenvalues of Σ⁻¹ [d] in float64, in any order."""
    if isinstance(covariance, Blocks):
        return torch.cat([spectrum(part) for part in covariance.parts])
    if isinstance(covariance, Full):
        values: Tensor = torch.linalg.eigvalsh(covariance.matrix.double())
        return values.reciprocal()
    if isinstance(covariance, Diagonal):
        return covariance.values.double().reciprocal()
    if isinstance(covariance, Kronecker):
        return covariance.values.double().flatten()
    raise refuse(type(covariance).__name__, "a marginal likelihood", "Full, Diagonal or Kronecker")


def log_evidence(
    covariance: Covariance, precision: float, mean: Tensor, log_likelihood: float
) -> float:
    """log Z of N(mean, covariance), the Laplace approximation under the prior N(0, I/λ), λ =
    ``precision``.
    """
    determinant = spectrum(covariance).log().sum().item()
    distance = precision * mean.double().square().sum().item()
    return log_likelihood - 0.5 * (distance - len(mean) * math.log(precision) + determinant)


def marginal_precision(
    covariance: Covariance, precision: float, mean: Tensor, weight: float = 1.0
) -> float:
    """The λ of greatest evidence for H = weight · (Σ⁻¹ - precision I); bisection, to rounding."""
    curvature = weight * (spectrum(covariance) - precision).clamp_min(0)
    distance = mean.double().square().sum().item()
    require(
        distance > 0,
        "Laplace: mean",
        "0",
        "other than 0 for the marginal likelihood, whose prior is around 0",
    )

    def excess(log_precision: float) -> float:
        value = math.exp(log_precision)
        return value * distance - (curvature / (curvature + value)).sum().item()

    high = math.log(len(mean) / distance)  # γ <= d
    low = high - 80.0
    require(excess(low) < 0, "Laplace: data", "no curvature", "data that inform the parameters")
    while high - low > 1e-14 * max(1.0, abs(high)):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return math.exp(0.5 * (low + high))


def reweighted(covariance: Covariance, before: float, after: float, weight: float) -> Covariance:
    """(λ' I + c H)⁻¹ from Σ = (λ I + H)⁻¹, λ = ``before``, λ' = ``after``, c = ``weight``."""
    moved = (
        covariance if after == weight * before else _tightened(covariance, after / weight - before)
    )
    return moved if weight == 1.0 else moved.propagate(1 / math.sqrt(weight), 0.0)


def _tightened(covariance: Covariance, change: float) -> Covariance:
    """(Σ⁻¹ + change · I)⁻¹, for a change that may be negative as long as this is positive
    definite.
    """
    if isinstance(covariance, Blocks):
        return Blocks(tuple(_tightened(part, change) for part in covariance.parts))
    if isinstance(covariance, Diagonal):
        return Diagonal(covariance.values / (1 + covariance.values * change))
    if isinstance(covariance, LowRank):
        return LowRank(covariance.diagonal + change, covariance.factor, covariance.rank)
    if isinstance(covariance, Kronecker):
        return Kronecker(covariance.left, covariance.right, covariance.values + change)
    precision = unchecked(Full, matrix=covariance.dense().double()).precision()
    precision.diagonal().add_(change)
    inverse = torch.cholesky_inverse(cholesky(precision, "the source precision"))
    return Full(symmetrized(inverse).to(covariance.dtype))

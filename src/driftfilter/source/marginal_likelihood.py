"""The evidence of a Laplace approximation: how strong a prior the source data ask for.

    log Z(λ) = log p(D given θ_S) - ½ λ |θ_S|² + ½ d log λ - ½ log det(λ I + H),   prior N(0, I/λ)

Its optimum is the one root of λ |θ_S|² = γ(λ) = Σ_j h_j / (h_j + λ), h the eigenvalues of H. The
left side grows. The right side, the number of parameters that the data determine, falls.
"""

import math

from torch import Tensor

from driftfilter.base.checks import require
from driftfilter.gaussian.covariance import Covariance


def marginal_precision(
    covariance: Covariance, precision: float, mean: Tensor, weight: float = 1.0
) -> float:
    """The λ of greatest evidence for H = weight · (Σ⁻¹ - precision I); bisection, to rounding."""
    curvature = weight * (covariance.spectrum() - precision).clamp_min(0)
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


def reweight(covariance: Covariance, before: float, after: float, weight: float) -> Covariance:
    """(λ' I + c H)⁻¹ from Σ = (λ I + H)⁻¹, λ = ``before``, λ' = ``after``, c = ``weight``."""
    if after != weight * before:
        covariance = covariance.inform(after / weight - before)
    return covariance if weight == 1.0 else covariance.propagate(1 / math.sqrt(weight), 0.0)

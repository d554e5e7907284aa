"""Gaussians of signatures: their densities, how far they are apart, and whether samples lie in two
clusters.
"""

from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import normalize

from driftfilter.base.checks import unchecked
from driftfilter.gaussian.belief import Belief, kl_divergence
from driftfilter.gaussian.full import Full

PRIOR = 32.0  # samples that say that signatures are not correlated
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4  # added to variances
_FREEDOM = 5.0  # of Student's t
_ROUNDS, _RATE = 40, 0.5  # of gradient steps towards the smallest kurtosis

Moments: TypeAlias = tuple[Tensor, Tensor]  # mean [..., D], covariance [..., D, D]


def regularize(covariances: Tensor, counts: Tensor) -> Tensor:
    """C of samples' covariances [..., D, D], so many [...], with 32 that are not correlated."""
    variances = covariances.diagonal(dim1=-2, dim2=-1)
    part = (counts / (counts + PRIOR))[..., None, None]
    more = (1 - part[..., 0] + _RELATIVE) * variances + _ABSOLUTE
    return part * covariances + torch.diag_embed(more)


def log_density(signatures: Tensor, known: Moments) -> Tensor:
    """log t_5 [n, K] of signatures [n, D] with moments m [K, D] and C [K, D, D], up to a constant:
    -½ log|C| - (5 + D)/2 log(1 + (φ - m)ᵀ C⁻¹ (φ - m) / 3).
    """
    means, covariances = known
    factor = torch.linalg.cholesky(covariances)
    apart = (signatures[None] - means[:, None]).mT  # [K, D, n]
    square = torch.linalg.solve_triangular(factor, apart, upper=False).square().sum(1)
    volume = factor.diagonal(dim1=1, dim2=2).log().sum(1, keepdim=True)
    tail = (square / (_FREEDOM - 2)).log1p() * ((_FREEDOM + signatures.shape[1]) / 2)
    density: Tensor = -volume - tail
    return density.mT


def find_moments(signatures: Tensor) -> Moments:
    """Mean [D] and covariance [D, D] of signatures [n, D]."""
    mean = signatures.mean(0)
    apart = signatures - mean
    covariance = apart.mT @ apart / len(signatures)
    return mean, (covariance + covariance.mT) / 2


def distance(batch: Moments, known: Moments) -> float:
    """How far a batch's moments m_b, C_b are from a domain's m, C:
    KL(N(m_b, (C_b + C) / 2) ‖ N(m, C)) / D.
    """
    (mean, covariance), (m, c) = batch, known
    shrunk, own = (
        unchecked(Belief, mean=center, covariance=unchecked(Full, matrix=matrix))
        for center, matrix in ((mean, (covariance + c) / 2), (m, c))
    )
    return float(kl_divergence(shrunk, own)) / len(m)


def find_clusters(signatures: Tensor) -> tuple[float, Tensor]:
    """The smallest kurtosis E[(w·z)⁴] of whitened signatures z over directions w, and on which side
    of the best cut along it each sample lies [n].

    A Gaussian has 3, by chance 1.9 to 2 in the best direction if there are 24 samples a dimension;
    two clusters far from each other have 1. Found by gradient steps from every principal axis.
    ∞ if all samples are the same.
    """
    n = len(signatures)
    mean, covariance = find_moments(signatures)
    scale = (covariance.diagonal() * (1 + _RELATIVE) + _ABSOLUTE**2).sqrt()
    values, axes = torch.linalg.eigh(covariance / scale / scale[:, None])
    kept = values > _RELATIVE
    if not bool(kept.any()):  # all samples look the same
        return torch.inf, torch.zeros(n, dtype=torch.bool)
    z = (signatures - mean) / scale @ axes[:, kept] / values[kept].sqrt()
    directions = torch.eye(z.shape[1], dtype=z.dtype)
    for _ in range(_ROUNDS):
        slope = ((z @ directions.mT) ** 3).mT @ z / n
        slope = slope - (slope * directions).sum(1, keepdim=True) * directions
        step = _RATE * slope / (1 + slope.norm(dim=1, keepdim=True))
        directions = normalize(directions - step, dim=1)
    along = z @ directions.mT
    kurtosis = along.pow(4).mean(0) / along.square().mean(0).square()
    least = int(kurtosis.argmin())
    return float(kurtosis[least]), along[:, least] > _cut(along[:, least])


def _cut(values: Tensor) -> Tensor:
    """Where numbers [n] fall into two parts with the smallest variances within."""
    n, ordered = len(values), values.sort().values
    below, count = ordered.cumsum(0)[:-1], torch.arange(1, n, dtype=values.dtype)
    place = int(((below - count / n * ordered.sum()).square() / (count * (n - count))).argmax())
    return (ordered[place] + ordered[place + 1]) / 2

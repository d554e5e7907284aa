"""A filter in the terms of the compiled steps: kinds of rules as numbers, a transition and a head
as arrays. Needs no numba.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

TINY = 2.2250738585072014e-308

ENTROPY, BOUNDED_RATIO, PSEUDO_LABEL, GENERALIZED, INFORMATION = range(5)
RELIABILITY, WEIGHTED_GATE, GATE = range(3)
NONE, HESSIAN, GAUSS_NEWTON, FISHER, CENTERED_FISHER = range(5)
TEMPERED, PAIRWISE, PER_CLASS = range(3)

GAIN, DRIFT, DIAGONAL, KAPPA, ORIGIN = range(5)  # rows of MotionArrays.vectors
PRIOR, AFTER, STEP, VALUES = range(4)  # rows of Workspace.vectors: μ⁻, μ, anything, anything

Numbers = Any  # an array of the belief's own dtype


class MotionArrays(NamedTuple):
    """μ⁻ = G μ + c; Σ⁻ = A ∘ (G Σ Gᵀ) + W + diag(κ (μ - μ₀)²), with a vector gain of the covariance
    inside A.
    """

    # [5, d]: gain of the mean (if G is no matrix), c, diagonal of W (if it is one), κ, μ₀
    vectors: Floats
    matrix: Floats  # G [d, d], or [0, 0]
    factor: Floats  # A [d, d], or [1, 1]; for a diagonal covariance [1, d]
    noise: Floats  # W [d, d] if it is no diagonal, or [0, 0]
    still: bool  # whether Σ⁻ = Σ
    shrink: float  # a lower bound of Σ⁻'s eigenvalues is shrink · (that of Σ's) + floor
    floor: float


class HeadArrays(NamedTuple):
    """The linear head."""

    first: int  # class of the first row of θ
    read_out: Floats  # E [parameters, d], θ = E s, or [0, 0]


class Rules(NamedTuple):
    """What is done with the logits of a batch."""

    terms: Floats  # [terms, 3] of the loss
    gates: Floats  # [gates, 3] of the weighting
    beta: float  # weight of every sample before the gates
    masked: bool  # whether only samples that a pseudo-label selects have a weight
    kept: bool  # divide by the samples with a weight, not by all
    reference: int
    minimum: int  # samples with a weight below which nothing is learned
    curvature: int
    scale: float  # λ of the empirical Fisher
    radius: float  # of the trust region, 0 for none
    prediction: int
    temperature: float
    variance: float  # of logits that come to the temperature
    posterior: bool  # predict from the posterior

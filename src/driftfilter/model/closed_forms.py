"""Closed forms of losses, weights and predictions, each written once for torch and compiled code.

The names ``exp``, ``where``, … are torch's here and take tensors. compiled/rules.py compiles the
code of these functions with functions of single numbers under the same names.

A loss Σ_c g_c(p_c) is told by first = p g'(p) and second = p² g''(p) of each class, which stay
finite as p -> 0. Added constants in g' cancel, since Σp = 1.
"""

from math import pi

from torch import Tensor, addcmul, clamp_max, clamp_min, exp, expm1, log, rsqrt, where

FLOOR = -1e4  # of log-probabilities: exp underflows far above it, and 0 · log 0 stays 0
TIE = 1e-6  # certainty below which a sample has none: rounding decides what is left of it


def center(first: Tensor, p: Tensor, total: Tensor) -> Tensor:
    """Gradient of a loss in the logit of one class: u = first - p Σfirst."""
    return addcmul(first, p, total, value=-1.0)


def bend(v: Tensor, p: Tensor, total: Tensor) -> Tensor:
    """Curvature a of a loss of two classes, ∇² = a [[1, -1], [-1, 1]]: a = v - 2 p (v - p Σb / 2).

    b = second, v = u + b and p belong to one class, either of them.
    """
    return addcmul(v, p, addcmul(v, p, total, value=-0.5), value=-2.0)


def entropy(p: Tensor, logp: Tensor) -> tuple[Tensor, Tensor]:
    """First, which is also the value, and second of -p log p."""
    minus = -p
    return minus * logp, minus


def cross_entropy(logp: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Value, first and second of -t log p."""
    minus = -target
    return minus * logp, minus, target


def generalized_cross_entropy(logp: Tensor, q: float) -> tuple[Tensor, Tensor]:
    """First and second of (1 - p^q) / q."""
    powered = exp(q * logp)
    return -powered, (1 - q) * powered


def generalized_value(logp: Tensor, q: float) -> Tensor:
    """(1 - p^q) / q, exact as q -> 0."""
    return -expm1(q * logp) / q


def bounded_likelihood_ratio(p: Tensor, ceiling: float) -> tuple[Tensor, Tensor, Tensor]:
    """Value, first and second of g(min(p, ceiling)), g(p) = -p log(r + 1e-5), r = p / (1 - p)."""
    inside, c = p < ceiling, clamp_max(p, ceiling)
    rest = 1 - c
    odds = c / rest + 1e-5
    slope = 1 / (rest * rest)  # r'
    rate = slope / odds
    level = log(odds)
    first = -level - c * rate  # g'
    second = -2 * rate - c * (2 * slope / rest / odds - rate * rate)  # g''
    return -(c * level), p * first * inside, p * p * second * inside


def information(
    p: Tensor, logp: Tensor, share: Tensor, mean: Tensor, tiny: float
) -> tuple[Tensor, Tensor]:
    """First, which is also the value, and second of -KL(p ‖ p̄), p̄ the mean with the sample in it.

    The sample has this share of the mean.
    """
    return p * (clamp_min(log(mean), FLOOR) - logp), share * (p * p) / clamp_min(mean, tiny) - p


def certainty(entropy: Tensor, largest: float) -> Tensor:
    """1 - H / ln k, and 0 for a tie but for rounding."""
    sure = 1 - entropy / largest
    return where(sure > TIE, sure, 0.0)


def gate(margin: Tensor, sharpness: float) -> Tensor:
    """exp(s · margin) if the margin E₀ - H is positive, else 0; s = 0 weighs all the same."""
    return where(margin > 0, exp(sharpness * margin), 0.0)


def kappa(variance: Tensor) -> Tensor:
    """κ = (1 + π v / 8)^(-1/2), by which probit shrinks a logit of variance v."""
    return rsqrt(1 + pi / 8 * variance)


def variance_at(temperature: float) -> float:
    """v = 4 (T² - 1) / π of Gaussian logits that come to this temperature."""
    return 4 / pi * max(temperature**2 - 1, 0.0)


def share_of(samples: int, reference: int) -> float:
    """min(1, n / N): how much n samples tell beside N."""
    return float(min(1.0, samples / max(reference, 1)))

"""Losses, weightings, curvatures and predictions of one logit, compiled: two classes, class 0
fixed, one sample a step.

Everything is a function of the logit f of class 1, with p = 1 / (1 + e⁻ᶠ) and q = 1 - p. A
workspace w [ROWS · BLOCK] has rows of BLOCK places, one for each of many streams, or of many steps
where these do not depend on each other; loops without branches over the places run in vector
registers. The closed forms are those of rules.py for k = 2.
"""

from __future__ import annotations

import math

from driftfilter.compiled.rules import part
from driftfilter.compiled.terms import (
    BOUNDED_RATIO,
    ENTROPY,
    FISHER,
    FLOOR,
    GAUSS_NEWTON,
    GENERALIZED,
    HESSIAN,
    PSEUDO_LABEL,
    RELIABILITY,
    TEMPERED,
    WEIGHTED_GATE,
    Floats,
    Rules,
)
from driftfilter.compiled.vector_math import exp, log
from driftfilter.model.weighting import TIE

BLOCK = 64
LN2 = math.log(2)

# Where the rows of the workspace begin: logit at the prior mean, p, q, weight; gradient u of the
# loss in f, what its second derivative is beside u (q - p), what it counts in a curvature from the
# model alone; xᵀx, xᵀΣ⁻x, the largest variance, whether all are positive and finite (1 or 0), a
# lower bound of Σ's eigenvalues; whether the step is taken, its length along y, and the root of
# what is taken from Σ along y; logit and its variance to predict with.
ROWS = 17
_PLACES = range(0, ROWS * BLOCK, BLOCK)
(
    F,
    P,
    Q,
    WEIGHT,
    U,
    BEND,
    SHARE,
    SIZE,
    SPREAD,
    LARGEST,
    PROPER,
    LOW,
    GOOD,
    STEP,
    TAKEN,
    G,
    VARIANCE,
) = _PLACES
LOG0, LOG1, FIXED = (
    U,
    BEND,
    SHARE,
)  # of the prediction, when the others have been used: log-probabilities, variance of class 0


@part
def probabilities(w: Floats, n: int) -> None:
    """p and q: with e = exp(-abs(f)) the larger one is 1 / (1 + e), the other e / (1 + e)."""
    for i in range(n):
        f = w[F + i]
        e = exp(-abs(f))
        larger = 1 / (1 + e)
        w[P + i] = larger if f > 0 else e * larger
        w[Q + i] = e * larger if f > 0 else larger


@part
def _entropy(f: float, p: float, q: float) -> float:
    """-p log p - q log q: the smaller one's logarithm is abs(f) less than that of the larger
    one.
    """
    return float(min(p, q) * min(abs(f), -FLOOR) - log(max(p, q)))


@part
def weigh(rules: Rules, w: Floats, n: int) -> None:
    """w of every sample; where no threshold of a masking pseudo-label is reached it is 0."""
    lowest = 0.0
    if rules.masked:
        lowest = 1.0
        for t in range(rules.terms.shape[0]):
            lowest = min(lowest, rules.terms[t, 1])
    for i in range(n):
        w[WEIGHT + i] = rules.beta if max(w[P + i], w[Q + i]) >= lowest else 0.0
    for g in range(rules.gates.shape[0]):
        kind, beta, level = rules.gates[g, 0], rules.gates[g, 1], rules.gates[g, 2] * LN2
        for i in range(n):
            entropy = _entropy(w[F + i], w[P + i], w[Q + i])
            margin = level - entropy
            gated = (exp(margin) if kind == WEIGHTED_GATE else 1.0) if margin > 0 else 0.0
            sure = 1 - entropy / LN2
            w[WEIGHT + i] *= beta * (
                (sure if sure > TIE else 0.0) if kind == RELIABILITY else gated
            )


@part
def _ratio(p: float, ceiling: float) -> tuple[float, float]:
    """First and second, as expansion.separable has them, of -p log(p / (1 - p) + 1e-5) of one
    class; 0 above the ceiling.
    """
    capped = min(p, ceiling)
    slope = 1 / ((1 - capped) * (1 - capped))
    odds = capped / (1 - capped) + 1e-5
    rate = slope / odds
    bend = 2 * rate + capped * (2 * slope / (1 - capped) / odds - rate * rate)
    below = 1.0 if p < ceiling else 0.0
    return -below * capped * (log(odds) + capped * rate), -below * capped * capped * bend


@part
def slopes(rules: Rules, w: Floats, n: int) -> None:
    """u = q first₁ - p first₀, the gradient of the loss in f; its second derivative is u (q - p) +
    q² second₁ + p² second₀.
    """
    for i in range(n):
        w[U + i] = w[BEND + i] = w[SHARE + i] = 0.0
    for t in range(rules.terms.shape[0]):
        kind, number, c = rules.terms[t, 0], rules.terms[t, 1], rules.terms[t, 2]
        if kind == ENTROPY:
            for i in range(n):
                both = c * w[P + i] * w[Q + i]
                w[U + i] -= both * min(max(w[F + i], FLOOR), -FLOOR)
                w[BEND + i] -= both
                w[SHARE + i] += c
        elif kind == PSEUDO_LABEL:
            for i in range(n):
                p, q = w[P + i], w[Q + i]
                own = c if max(p, q) >= number else 0.0
                w[U + i] += own * (-q if w[F + i] > 0 else p)
                w[BEND + i] += own * min(p, q) * min(p, q)
                w[SHARE + i] += own
        elif kind == GENERALIZED:
            for i in range(n):
                p, q = w[P + i], w[Q + i]
                power = c * exp(number * log(max(p, q)))
                w[U + i] += power * (-q if w[F + i] > 0 else p)
                w[BEND + i] += (1 - number) * power * min(p, q) * min(p, q)
                w[SHARE + i] += c
        elif kind == BOUNDED_RATIO:
            for i in range(n):
                p, q = w[P + i], w[Q + i]
                one, bend_one = _ratio(p, number)
                other, bend_other = _ratio(q, number)
                w[U + i] += c * (q * one - p * other)
                w[BEND + i] += c * (q * q * bend_one + p * p * bend_other)
                w[SHARE + i] += c


@part
def settle(
    rules: Rules,
    still: bool,
    shrink: float,
    floor: float,
    eps: float,
    warned: bool,
    w: Floats,
    n: int,
) -> None:
    """What the step takes along y = Σ⁻x, s = xᵀy, with h the curvature of the energy in f and γ its
    gradient.

    Σ = Σ⁻ - h y yᵀ / (1 + h s), μ = μ⁻ - γ y / (1 + h s); λ_min(Σ) >= 1 / (1 / λ + h xᵀx) less
    rounding. A step that warns, raises or needs more care with rounding is not good.
    """
    learns = rules.minimum <= 1
    share = 1.0 / max(rules.reference, 1) if learns else 0.0
    hessian = 1.0 if rules.curvature == HESSIAN else 0.0
    newton = 1.0 if rules.curvature == GAUSS_NEWTON else 0.0
    fisher = rules.scale * rules.scale if rules.curvature >= FISHER else 0.0
    for i in range(n):
        p, q, u, spread = w[P + i], w[Q + i], w[U + i], w[SPREAD + i]
        coefficient = w[WEIGHT + i] * share
        h = coefficient * (
            hessian * max(u * (q - p) + w[BEND + i], 0.0)
            + newton * w[SHARE + i] * p * q
            + fisher * u * u
        )
        scale = 1 + h * spread
        inverse = 1 / scale
        low = max(shrink * w[LOW + i] + floor, 0.0)
        rounding = eps * w[LARGEST + i] if h > 0 else 0.0
        low = low / (1 + low * h * w[SIZE + i]) - rounding
        w[LOW + i] = low
        proper = w[PROPER + i] > 0 or (h == 0 and still)
        definite = h == 0 or (0 < scale < math.inf and low > rounding)
        quiet = learns or warned or w[WEIGHT + i] == 0
        w[GOOD + i] *= 1.0 if proper and definite and quiet and abs(w[F + i]) < math.inf else 0.0
        w[STEP + i] = coefficient * u * inverse
        w[TAKEN + i] = math.sqrt(h * inverse)
        w[VARIANCE + i] = spread * inverse if rules.posterior else spread
        w[BEND + i] = math.sqrt(h) * spread if rules.radius > 0 else 0.0
    if rules.radius > 0:
        for i in range(n):  # √h Δf is no longer than the radius
            length = abs(w[STEP + i]) * w[BEND + i]
            w[STEP + i] *= rules.radius / length if length > rules.radius else 1.0


@part
def predict(rules: Rules, w: Floats, n: int) -> None:
    """log p(y given x) and variances from the logit and its own; probit, in either form, divides by
    √(1 + π/8 · variance).
    """
    tempered, cooled = rules.prediction == TEMPERED, 1 / rules.temperature
    hot = 4 / math.pi * max(rules.temperature * rules.temperature - 1, 0.0)
    for i in range(n):
        variance = max(w[VARIANCE + i], 0.0)
        g = w[G + i] * (cooled if tempered else 1 / math.sqrt(1 + math.pi / 8 * variance))
        norm = log(1 + exp(-abs(g)))
        w[LOG0 + i] = min(-g, 0.0) - norm
        w[LOG1 + i] = min(g, 0.0) - norm
        w[FIXED + i] = hot if tempered else 0.0
        w[VARIANCE + i] = hot if tempered else variance
        w[GOOD + i] *= 1.0 if abs(g) < math.inf else 0.0

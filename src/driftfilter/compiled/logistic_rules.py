"""Losses, weightings, curvatures and predictions of one logit, compiled: two classes, class 0
fixed, one sample a step.

Everything is a function of the logit f of class 1, with p = 1 / (1 + e⁻ᶠ) and q = 1 - p. A
workspace w [ROWS · BLOCK] has rows of BLOCK places, one for each of many streams, or of many steps
if these do not depend on each other; loops without branches over the places run in vector
registers. The closed forms are those of model/closed_forms.py, with exp and log of vector_math.py.
"""

import math
from typing import TypeAlias

from driftfilter.compiled.rules import compile_rule, part
from driftfilter.compiled.terms import (
    BOUNDED_RATIO,
    ENTROPY,
    FISHER,
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
from driftfilter.model import closed_forms
from driftfilter.model.closed_forms import FLOOR

_entropy = compile_rule(closed_forms.entropy)
_cross_entropy = compile_rule(closed_forms.cross_entropy)
_generalized = compile_rule(closed_forms.generalized_cross_entropy, exp=exp)
_ratio = compile_rule(closed_forms.bounded_likelihood_ratio, log=log)
_certainty, _gate = compile_rule(closed_forms.certainty), compile_rule(closed_forms.gate, exp=exp)
_kappa = compile_rule(closed_forms.kappa)
_share_of = compile_rule(closed_forms.share_of)

BLOCK = 64
Pair: TypeAlias = tuple[float, float]
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
def _sum_entropy(f: float, p: float, q: float) -> float:
    """H of both classes: log of the smaller p is abs(f) less than log of the larger one."""
    top = log(max(p, q))
    low = max(top - abs(f), FLOOR)
    return float(_entropy(max(p, q), top)[0] + _entropy(min(p, q), low)[0])


@part
def weigh(rules: Rules, w: Floats, n: int) -> None:
    """w of every sample: 0 if no threshold of a masking pseudo-label is reached."""
    lowest = 0.0
    if rules.masked:
        lowest = 1.0
        for t in range(rules.terms.shape[0]):
            lowest = min(lowest, rules.terms[t, 1])
    for i in range(n):
        w[WEIGHT + i] = rules.beta if max(w[P + i], w[Q + i]) >= lowest else 0.0
    for g in range(rules.gates.shape[0]):
        kind, beta, level = rules.gates[g, 0], rules.gates[g, 1], rules.gates[g, 2] * LN2
        sharpness = 1.0 if kind == WEIGHTED_GATE else 0.0
        for i in range(n):
            entropy = _sum_entropy(w[F + i], w[P + i], w[Q + i])
            sure, gated = _certainty(entropy, LN2), _gate(level - entropy, sharpness)
            w[WEIGHT + i] *= beta * (sure if kind == RELIABILITY else gated)


@part
def _add(w: Floats, i: int, c: float, one: Pair, other: Pair) -> None:
    """Add c times a term of the loss with first and second (closed_forms) of class 1 and class 0.

    u = q first₁ - p first₀ is its gradient in f, u (q - p) + q² second₁ + p² second₀ its curvature.
    """
    p, q = w[P + i], w[Q + i]
    w[U + i] += c * (q * one[0] - p * other[0])
    w[BEND + i] += c * (q * q * one[1] + p * p * other[1])
    w[SHARE + i] += c


@part
def expand_loss(rules: Rules, w: Floats, n: int) -> None:
    """Gradient of the loss in f, its curvature beside u (q - p), and what it counts for."""
    for i in range(n):
        w[U + i] = w[BEND + i] = w[SHARE + i] = 0.0
    for t in range(rules.terms.shape[0]):
        kind, number, c = rules.terms[t, 0], rules.terms[t, 1], rules.terms[t, 2]
        if kind == ENTROPY:
            for i in range(n):  # logits do for log-probabilities: constants cancel
                f = min(max(w[F + i], FLOOR), -FLOOR)
                _add(w, i, c, _entropy(w[P + i], f), _entropy(w[Q + i], 0.0))
        elif kind == PSEUDO_LABEL:
            for i in range(n):
                label = 1.0 if w[F + i] > 0 else 0.0
                own = c if max(w[P + i], w[Q + i]) >= number else 0.0
                one, other = _cross_entropy(0.0, label), _cross_entropy(0.0, 1 - label)
                _add(w, i, own, one[1:], other[1:])
        elif kind == GENERALIZED:
            for i in range(n):
                label = 1.0 if w[F + i] > 0 else 0.0
                first, second = _generalized(log(max(w[P + i], w[Q + i])), number)
                one, other = (
                    (label * first, label * second),
                    (
                        (1 - label) * first,
                        (1 - label) * second,
                    ),
                )
                _add(w, i, c, one, other)
        elif kind == BOUNDED_RATIO:
            for i in range(n):
                _add(w, i, c, _ratio(w[P + i], number)[1:], _ratio(w[Q + i], number)[1:])


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
        radius = rules.radius * _share_of(1, rules.reference)
        for i in range(n):  # √h Δf is no longer than the radius
            length = abs(w[STEP + i]) * w[BEND + i]
            w[STEP + i] *= radius / length if length > radius else 1.0


@part
def predict(rules: Rules, w: Floats, n: int) -> None:
    """log p(y given x) and variances from the logit and its own; probit, in either form, divides by
    √(1 + π/8 · variance).
    """
    tempered, cooled = rules.prediction == TEMPERED, 1 / rules.temperature
    for i in range(n):
        variance = max(w[VARIANCE + i], 0.0)
        g = w[G + i] * (cooled if tempered else _kappa(variance))
        norm = log(1 + exp(-abs(g)))
        w[LOG0 + i] = min(-g, 0.0) - norm
        w[LOG1 + i] = min(g, 0.0) - norm
        w[FIXED + i] = rules.variance if tempered else 0.0
        w[VARIANCE + i] = rules.variance if tempered else variance
        w[GOOD + i] *= 1.0 if abs(g) < math.inf else 0.0

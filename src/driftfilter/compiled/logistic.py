"""The compiled steps of logistic regression on single observations with a full covariance:
everything is along x.

With y = Σ⁻ x: Σ and μ change along y alone (logistic_rules.settle). One pass over the lower
triangle of Σ a step takes away what the step before left, moves Σ on, and makes y. Losses and
predictions, which no step depends on, come after the last one.
"""

import math

import numpy as np

from driftfilter.compiled.logistic_rules import (
    BLOCK,
    FIXED,
    GOOD,
    LARGEST,
    LOG0,
    LOG1,
    LOW,
    PROPER,
    ROWS,
    SIZE,
    SPREAD,
    STEP,
    TAKEN,
    VARIANCE,
    WEIGHT,
    F,
    G,
    expand_loss,
    predict,
    probabilities,
    settle,
    weigh,
)
from driftfilter.compiled.rules import kernel, part
from driftfilter.compiled.terms import (
    DIAGONAL,
    DRIFT,
    GAIN,
    KAPPA,
    ORIGIN,
    Floats,
    Integers,
    MotionArrays,
    Rules,
)

PRIOR, Y, WAITING = range(
    3
)  # rows of a workspace v [3, d]: μ⁻, Σ⁻ x, and what waits to be taken from Σ


FEW = 4  # parameters up to which each number of them is worth a compilation of its own


def workspaces(d: int) -> tuple[Floats, Floats]:
    """w (logistic_rules.py) and v."""
    return np.empty(ROWS * BLOCK), np.empty((3, d))


@part
def _variance(gains: Floats, alpha: float, mean: Floats, S: Floats, v: Floats, i: int) -> float:
    """Σ_ii ← α (Σ_ii - z_i²) + W_ii + κ_i (μ_i - μ₀_i)²."""
    away = mean[i] - gains[ORIGIN, i]
    value = (
        alpha * (S[i, i] - v[WAITING, i] * v[WAITING, i])
        + gains[DIAGONAL, i]
        + gains[KAPPA, i] * away * away
    )
    S[i, i] = value
    return float(value)


@part
def _sweep(
    gains: Floats, alpha: float, mean: Floats, S: Floats, v: Floats, x: Floats, d: int
) -> None:
    """Σ ← α (Σ - z zᵀ) + diagonal and y ← Σ x, two rows at a time: what is read and written for a
    row serves both.
    """
    odd = d % 2
    if odd:
        v[Y, 0] = _variance(gains, alpha, mean, S, v, odd - 1) * x[0]
    for i in range(odd, d, 2):
        z, below, x_i, x_below = v[WAITING, i], v[WAITING, i + 1], x[i], x[i + 1]
        total, total_below = 0.0, 0.0
        for j in range(i):
            one = alpha * (S[i, j] - z * v[WAITING, j])
            other = alpha * (S[i + 1, j] - below * v[WAITING, j])
            S[i, j] = one
            S[i + 1, j] = other
            total += one * x[j]
            total_below += other * x[j]
            v[Y, j] += one * x_i + other * x_below
        between = alpha * (S[i + 1, i] - z * below)
        S[i + 1, i] = between
        v[Y, i] = total + _variance(gains, alpha, mean, S, v, i) * x_i + between * x_below
        v[Y, i + 1] = (
            total_below + between * x_i + _variance(gains, alpha, mean, S, v, i + 1) * x_below
        )


@part
def _spread(noise: Floats, alpha: float, S: Floats, v: Floats) -> float:
    """Σ ← α (Σ - z zᵀ) + W if W is no diagonal; returns the α that is left to do."""
    if noise.shape[0] == 0:
        return alpha
    for i in range(noise.shape[0]):
        for j in range(i + 1):
            S[i, j] = alpha * (S[i, j] - v[WAITING, i] * v[WAITING, j]) + noise[i, j]
    for i in range(noise.shape[0]):
        v[WAITING, i] = 0.0
    return 1.0


@part
def _predictions(rules: Rules, w: Floats, out: Floats, begin: int, end: int) -> int:
    """Predictions of steps that left a logit and its variance in their rows of out; returns the
    first that is not finite.
    """
    for start in range(begin, end, BLOCK):
        n = min(BLOCK, end - start)
        for i in range(n):
            w[G + i] = out[start + i, 0]
            w[VARIANCE + i] = out[start + i, 3]
            w[GOOD + i] = 1.0
        predict(rules, w, n)
        for i in range(n):
            if w[GOOD + i] == 0:
                return start + i
            out[start + i, 0] = w[LOG0 + i]
            out[start + i, 1] = w[LOG1 + i]
            out[start + i, 2] = w[FIXED + i]
            out[start + i, 3] = w[VARIANCE + i]
    return end


@kernel
def scan_rank_one(
    rules: Rules, motion: MotionArrays, X: Floats, begin: int, end: int, mean: Floats, S: Floats,
    bounds: Floats, w: Floats,
    v: Floats, warned: bool, out: Floats, used: Integers, few: tuple[int, ...],
) -> int:  # fmt: skip
    """As full.scan_full, for two classes, class 0 fixed, and batches of one; in place of
    losses it leaves logits.

    ``few``: a tuple as long as there are parameters, or () for any number. Its length is known to
    the compiler, which then writes out the loops over parameters: a fifth less time at d = 3.
    """
    gains, _, factor, noise, still, shrink, floor = motion
    d, reached, share = (
        len(few) if len(few) > 0 else mean.shape[0],
        end,
        1.0 / max(rules.reference, 1),
    )
    w[LOW] = bounds[0]
    w[GOOD] = 1.0
    for j in range(d):
        v[WAITING, j] = 0.0
    for t in range(begin, end):
        f, size, spread, largest, proper = 0.0, 0.0, 0.0, 0.0, True
        for j in range(d):
            prior = gains[DRIFT, j] + gains[GAIN, j] * mean[j]
            v[PRIOR, j] = prior
            f += X[t, j] * prior
            size += X[t, j] * X[t, j]
        _sweep(gains, _spread(noise, factor[0, 0], S, v), mean, S, v, X[t], d)
        for j in range(d):
            spread += X[t, j] * v[Y, j]
            largest = max(largest, S[j, j])
            proper = proper and bounds[2] < S[j, j] < bounds[3]
        w[F] = f
        w[SIZE] = size
        w[SPREAD] = spread
        w[LARGEST] = largest
        w[PROPER] = 1.0 if proper else 0.0
        probabilities(w, 1)
        weigh(rules, w, 1)
        expand_loss(rules, w, 1)
        settle(rules, still, shrink, floor, 4 * d * bounds[1], warned, w, 1)
        taken, step, g, total = w[TAKEN], w[STEP], 0.0, 0.0
        for j in range(d):
            after = v[PRIOR, j] - step * v[Y, j]
            v[PRIOR, j] = after
            v[WAITING, j] = taken * v[Y, j]
            g += X[t, j] * after
            total += abs(after)
        if w[GOOD] == 0 or not math.isfinite(total):
            reached = t
            break
        for j in range(d):
            mean[j] = v[PRIOR, j]
        used[t] = w[WEIGHT] != 0
        out[t, 0] = g if rules.posterior else f
        out[t, 3] = w[VARIANCE]
        out[t, 4] = f
        out[t, 5] = w[WEIGHT]
        out[t, 6] = w[WEIGHT] * share
    bounds[0] = w[LOW]
    for i in range(d):
        for j in range(i + 1):
            S[i, j] -= v[WAITING, i] * v[WAITING, j]
            S[j, i] = S[i, j]
    return _predictions(rules, w, out, begin, reached)

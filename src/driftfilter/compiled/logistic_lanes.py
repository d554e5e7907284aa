"""The compiled steps of logistic.py for many streams abreast: vector registers hold numbers of
different streams.

A block of streams goes through its steps together. Its workspace v [rows, BLOCK] has a lane for
each stream, and rows for x [d], μ [d], y = Σ⁻x [d], what waits to be taken from Σ [d], and the
lower triangle of Σ, row by row.
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
    Numbers,
    Rules,
)

# parameters above which a stream fills vector registers by itself, and a block of them no near
# cache
ABREAST = 16


def workspaces(d: int) -> tuple[Floats, Floats]:
    """w (logistic_rules.py) and v."""
    return np.zeros(ROWS * BLOCK), np.zeros((4 * d + d * (d + 1) // 2, BLOCK))


@part
def _load(
    before: Numbers,
    values: Numbers,
    rows: Integers,
    bounds: Floats,
    start: int,
    n: int,
    w: Floats,
    v: Floats,
) -> None:
    """Copy beliefs of n streams into the lanes."""
    d = before.shape[1]
    for s in range(n):
        w[LOW + s] = bounds[start + s, 0]
        w[GOOD + s] = 1.0
        place = 4 * d
        for i in range(d):
            v[d + i, s] = before[rows[start + s], i]
            v[3 * d + i, s] = 0.0
            for j in range(i + 1):
                v[place, s] = values[rows[start + s], i, j]
                place += 1


@part
def _store(
    mean: Numbers, S: Numbers, bounds: Floats, start: int, n: int, w: Floats, v: Floats
) -> None:
    """Copy beliefs of n streams out of the lanes."""
    d = mean.shape[1]
    for s in range(n):
        bounds[start + s, 0] = w[LOW + s]
        place = 4 * d
        for i in range(d):
            mean[start + s, i] = v[d + i, s]
            for j in range(i + 1):
                value = v[place, s] - v[3 * d + i, s] * v[3 * d + j, s]
                S[start + s, i, j] = value
                S[start + s, j, i] = value
                place += 1


@part
def _sweep(
    motion: MotionArrays, X: Floats, first: int, per: int, d: int, n: int, least: float,
    most: float, w: Floats, v: Floats
) -> None:  # fmt: skip
    """As logistic.py's sweep, with μ⁻ and f = xᵀμ⁻; x of lane s is row first + s per of X."""
    gains, _, factor, noise, _, _, _ = motion
    alpha, full, place = factor[0, 0], noise.shape[0] > 0, 4 * d
    for s in range(n):
        w[F + s] = w[SIZE + s] = w[SPREAD + s] = w[LARGEST + s] = 0.0
        w[PROPER + s] = 1.0
    for i in range(d):
        for s in range(n):
            v[i, s] = X[first + s * per, i]
            v[2 * d + i, s] = 0.0
        for j in range(i):
            extra = noise[i, j] if full else 0.0
            for s in range(n):
                value = alpha * (v[place, s] - v[3 * d + i, s] * v[3 * d + j, s]) + extra
                v[place, s] = value
                v[2 * d + i, s] += value * v[j, s]
                v[2 * d + j, s] += value * v[i, s]
            place += 1
        extra = gains[DIAGONAL, i] + (noise[i, i] if full else 0.0)
        kappa, origin, gain, drift = (
            gains[KAPPA, i],
            gains[ORIGIN, i],
            gains[GAIN, i],
            gains[DRIFT, i],
        )
        for s in range(n):
            x, mean, taken = v[i, s], v[d + i, s], v[3 * d + i, s]
            value = (
                alpha * (v[place, s] - taken * taken)
                + extra
                + kappa * (mean - origin) * (mean - origin)
            )
            v[place, s] = value
            v[2 * d + i, s] += value * x
            v[d + i, s] = drift + gain * mean
            w[F + s] += x * (drift + gain * mean)
            w[SIZE + s] += x * x
            w[LARGEST + s] = value if value > w[LARGEST + s] else w[LARGEST + s]  # faster than max
            w[PROPER + s] *= 1.0 if least < value < most else 0.0
        place += 1
    for i in range(d):
        for s in range(n):
            w[SPREAD + s] += v[i, s] * v[2 * d + i, s]


@part
def _move(posterior: bool, d: int, n: int, w: Floats, v: Floats) -> None:
    """μ = μ⁻ - STEP y, what is taken from Σ, and the logits to predict with."""
    for s in range(n):
        w[G + s] = 0.0 if posterior else w[F + s]
    for j in range(d):
        for s in range(n):
            y = v[2 * d + j, s]
            after = v[d + j, s] - w[STEP + s] * y
            v[d + j, s] = after
            v[3 * d + j, s] = w[TAKEN + s] * y
            w[GOOD + s] *= 1.0 if abs(after) < math.inf else 0.0
            w[G + s] += v[j, s] * after if posterior else 0.0


@kernel
def each_abreast(
    rules: Rules, motion: MotionArrays, X: Floats, per: int, begin: int, end: int, rows: Integers,
    before: Numbers, values: Numbers,
    mean: Numbers, S: Numbers, bounds: Floats, w: Floats, v: Floats, warned: bool, out: Floats,
    reached: Integers,
) -> None:  # fmt: skip
    """As fleet_kernels.each_rank_one; out has predictions alone [samples, 4]. A stream that
    refuses a step goes on in vain.
    """
    d = before.shape[1]
    for start in range(begin, end, BLOCK):
        n = min(BLOCK, end - start)
        _load(before, values, rows, bounds, start, n, w, v)
        for t in range(per):
            _sweep(motion, X, start * per + t, per, d, n, bounds[start, 2], bounds[start, 3], w, v)
            probabilities(w, n)
            weigh(rules, w, n)
            expand_loss(rules, w, n)
            settle(
                rules,
                motion.still,
                motion.shrink,
                motion.floor,
                4 * d * bounds[start, 1],
                warned,
                w,
                n,
            )
            _move(rules.posterior, d, n, w, v)
            predict(rules, w, n)
            for s in range(n):
                place = (start + s) * per + t
                out[place, 0] = w[LOG0 + s]
                out[place, 1] = w[LOG1 + s]
                out[place, 2] = w[FIXED + s]
                out[place, 3] = w[VARIANCE + s]
        _store(mean, S, bounds, start, n, w, v)
        for s in range(n):
            reached[start + s] = w[GOOD + s] != 0

"""The compiled steps of logistic.py for many streams abreast: vector registers hold numbers of
different streams.

A block of streams goes through its steps together. Its workspace v [rows, BLOCK] has a lane for
each stream, and rows for x [d], μ [d], y = Σ⁻x [d], what waits to be taken from Σ [d], and the
lower triangle of Σ, row by row.
"""

import math
from typing import Any, TypeAlias

import numpy as np

from driftfilter.compiled.logistic import FEW
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
from driftfilter.compiled.vector_math import local

# What MotionArrays.vectors says of each parameter, in places that the compiler counts; or ().
Few: TypeAlias = tuple[tuple[float, ...], ...]

# parameters above which a stream fills vector registers by itself, and a block of them no near
# cache
ABREAST = 16


def as_few(motion: MotionArrays) -> Few:
    """The transition of few parameters whose noise is a diagonal; () of another."""
    few = motion.vectors.shape[1] <= FEW and len(motion.noise) == 0
    return tuple(map(tuple, motion.vectors.T.tolist())) if few else ()


def workspaces(d: int) -> tuple[Floats, Floats, Floats]:
    """w (logistic_rules.py), v, and v in one line."""
    v = np.zeros((4 * d + d * (d + 1) // 2, BLOCK))
    return np.zeros(ROWS * BLOCK), v, v.reshape(-1)


@part
def _at(row: int, s: int) -> Any:
    """Place of lane s of a row of v in one line; without a sign: an index below zero would count
    from the end, and loops that ask for its sign do not use vector registers.
    """
    return np.uint64(row * BLOCK + s)


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
def _sweep_few(
    alpha: float, few: Few, X: Floats, first: int, per: int, n: int, least: float, most: float,
    w: Floats, flat: Floats
) -> None:  # fmt: skip
    """As _sweep, of few parameters and with a noise that is a diagonal: one loop over the lanes,
    which has their numbers in registers.
    """
    d = len(few)
    own, S = local(4, few), local(0, few)  # of one lane: x, μ, y and z; the lower triangle
    for s in range(n):
        for i in range(d):
            flat[_at(i, s)] = X[first + s * per, i]
    for s in range(n):
        f, size, spread, largest, proper, place = 0.0, 0.0, 0.0, 0.0, 1.0, 4 * d
        for i in range(d):
            own[0, i] = flat[_at(i, s)]
            own[1, i] = flat[_at(d + i, s)]
            own[2, i] = 0.0
            own[3, i] = flat[_at(3 * d + i, s)]
            for j in range(i + 1):
                S[i, j] = alpha * (flat[_at(place, s)] - own[3, i] * own[3, j])
                place += 1
        for i in range(d):
            rule, x, mean = few[i], own[0, i], own[1, i]
            away, prior = mean - rule[ORIGIN], rule[DRIFT] + rule[GAIN] * mean
            value = S[i, i] + rule[DIAGONAL] + rule[KAPPA] * away * away
            own[1, i] = prior
            S[i, i] = value
            own[2, i] += value * x
            for j in range(i):
                own[2, i] += S[i, j] * own[0, j]
                own[2, j] += S[i, j] * x
            f += x * prior
            size += x * x
            largest = value if value > largest else largest
            proper *= 1.0 if least < value < most else 0.0
        place = 4 * d
        for i in range(d):
            spread += own[0, i] * own[2, i]
            flat[_at(d + i, s)] = own[1, i]
            flat[_at(2 * d + i, s)] = own[2, i]
            for j in range(i + 1):
                flat[_at(place, s)] = S[i, j]
                place += 1
        w[F + s] = f
        w[SIZE + s] = size
        w[SPREAD + s] = spread
        w[LARGEST + s] = largest
        w[PROPER + s] = proper


@part
def _move_few(posterior: bool, few: Few, n: int, w: Floats, flat: Floats) -> None:
    """As _move, of few parameters."""
    d, own = len(few), local(2, few)
    for s in range(n):
        g, total, step, taken = 0.0, 0.0, w[STEP + s], w[TAKEN + s]
        for j in range(d):
            y = flat[_at(2 * d + j, s)]
            own[0, j] = flat[_at(d + j, s)] - step * y
            own[1, j] = taken * y
            g += flat[_at(j, s)] * own[0, j]
            total += abs(own[0, j])
        for j in range(d):
            flat[_at(d + j, s)] = own[0, j]
            flat[_at(3 * d + j, s)] = own[1, j]
        w[GOOD + s] *= 1.0 if total < math.inf else 0.0
        w[G + s] = g if posterior else w[F + s]


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
    mean: Numbers, S: Numbers, bounds: Floats, w: Floats, v: Floats, flat: Floats, warned: bool,
    out: Floats, reached: Integers, few: Few,
) -> None:  # fmt: skip
    """As fleet_kernels.each_rank_one; out has predictions alone [samples, 4]. A stream that
    refuses a step goes on in vain. ``flat``: v in one line.
    """
    d, alpha = before.shape[1], motion.factor[0, 0]
    for start in range(begin, end, BLOCK):
        n, least, most = min(BLOCK, end - start), bounds[start, 2], bounds[start, 3]
        _load(before, values, rows, bounds, start, n, w, v)
        for t in range(per):
            if len(few) > 0:
                _sweep_few(alpha, few, X, start * per + t, per, n, least, most, w, flat)
            else:
                _sweep(motion, X, start * per + t, per, d, n, least, most, w, v)
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
            if len(few) > 0:
                _move_few(rules.posterior, few, n, w, flat)
            else:
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

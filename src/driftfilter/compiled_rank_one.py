"""The compiled step of logistic regression on single observations with a full covariance: everything is along x.

With y = Σ⁻ x, q = xᵀ Σ⁻ x and a curvature h of the energy in the logit: Σ = Σ⁻ - h y yᵀ / (1 + h q), μ = μ⁻ - γ y / (1 + h q).
One pass over the lower triangle of Σ a step: it takes away what the step before left, moves Σ on, and makes y.
"""

from __future__ import annotations

import math

from driftfilter.compiled_losses import F, G, U, compiled, expand, kernel, log_softmax, predict, roots, weigh
from driftfilter.compiled_parts import Room
from driftfilter.kernel_terms import (
    AFTER,
    DIAGONAL,
    DRIFT,
    FISHER,
    GAIN,
    GAUSS_NEWTON,
    HESSIAN,
    KAPPA,
    ORIGIN,
    PRIOR,
    Floats,
    Integers,
    Motion,
    Numbers,
    Rules,
)

TAKEN, Y = 0, 1  # rows of Z: what waits to be taken from Σ, and Σ⁻ x


@compiled
def _sweep(gains: Floats, alpha: float, noise: Floats, mean: Numbers, S: Numbers, Z: Floats, X: Floats, t: int) -> float:
    """Σ ← α (Σ - z zᵀ) + W and y ← Σ x; returns the largest variance, or -1 where one is not positive and finite."""
    largest, proper, full = 0.0, True, noise.shape[0] > 0
    for i in range(S.shape[0]):
        own, x, total = Z[TAKEN, i], X[t, i], 0.0
        if full:
            for j in range(i):
                value = alpha * (S[i, j] - own * Z[TAKEN, j]) + noise[i, j]
                S[i, j] = value
                total += value * X[t, j]
                Z[Y, j] += value * x
        else:
            for j in range(i):
                value = alpha * (S[i, j] - own * Z[TAKEN, j])
                S[i, j] = value
                total += value * X[t, j]
                Z[Y, j] += value * x
        away = mean[i] - gains[ORIGIN, i]
        value = alpha * (S[i, i] - own * own) + gains[DIAGONAL, i] + gains[KAPPA, i] * away * away
        value += noise[i, i] if full else 0.0
        S[i, i] = value
        Z[Y, i] = total + value * x
        proper = proper and 0 < value < math.inf
        largest = max(largest, value)
    return largest if proper else -1.0


@compiled
def _metric(rules: Rules, w: Floats, root: Floats, square: Floats, coefficient: float) -> float:
    """h, the curvature of the energy in the logit of class 1."""
    if rules.curvature == HESSIAN or rules.curvature == GAUSS_NEWTON:
        roots(rules, w, 1, root, square)
        return float(coefficient * root[0, 1, 0] * root[0, 1, 0])
    if rules.curvature >= FISHER:
        return float(coefficient * rules.scale * rules.scale * w[0, U, 1] * w[0, U, 1])
    return 0.0


@kernel
def scan_rank_one(
    rules: Rules, motion: Motion, X: Floats, begin: int, end: int, mean: Numbers, S: Numbers, bounds: Floats,
    room: Room, warned: bool, out: Floats, used: Integers,
) -> int:  # fmt: skip
    """As compiled_steps.scan_full, for two classes, class 0 fixed, and batches of one."""
    w, root, square, vectors, _, _, Z, _, _ = room
    gains, _, factor, noise, still, shrink, floor = motion
    low, eps = bounds[0], bounds[1]
    d, row = mean.shape[0], G if rules.posterior else F
    for j in range(d):
        Z[TAKEN, j] = 0.0
    for t in range(begin, end):
        f, size, q = 0.0, 0.0, 0.0
        for j in range(d):
            vectors[PRIOR, j] = gains[DRIFT, j] + gains[GAIN, j] * mean[j]
            f += X[t, j] * vectors[PRIOR, j]
            size += X[t, j] * X[t, j]
        if not math.isfinite(f):
            return t
        largest = _sweep(gains, factor[0, 0], noise, mean, S, Z, X, t)
        for j in range(d):
            q += X[t, j] * Z[Y, j]
        w[0, F, 0] = 0.0
        w[0, F, 1] = f
        log_softmax(w, 0, F)
        used[t] = weigh(rules, w, 1, out, t)
        expand(rules, w, 1, out, t)
        learns = used[t] >= rules.minimum
        if not learns and used[t] > 0 and not warned:
            return t
        h, step = 0.0, 0.0
        if learns:
            h = _metric(rules, w, root, square, out[t, 6])
            step = out[t, 6] * w[0, U, 1] / (1 + h * q)
        if h == 0 and not still and largest < 0:
            return t
        low = shrink * low + floor
        if h > 0:
            rounding = 4 * d * eps * largest
            low = 1 / (1 / low + h * size) - rounding
            if not 0 < 1 + h * q < math.inf or not low > rounding or largest < 0:
                return t
            if rules.radius > 0 and step != 0:
                step *= min(1.0, rules.radius / (math.sqrt(h) * abs(step) * q))
        taken, g, total = math.sqrt(h / (1 + h * q)), 0.0, 0.0
        for j in range(d):
            after = vectors[PRIOR, j] - step * Z[Y, j]
            vectors[AFTER, j] = after
            Z[TAKEN, j] = taken * Z[Y, j]
            g += X[t, j] * after
            total += abs(after)
        w[0, G, 0] = 0.0
        w[0, G, 1] = g
        square[0, 0, 0] = square[0, 0, 1] = square[0, 1, 0] = 0.0
        square[0, 1, 1] = q / (1 + h * q) if rules.posterior else q
        if not math.isfinite(total) or not predict(rules, w, 0, row, square, out, t):
            return t
        for j in range(d):
            mean[j] = vectors[AFTER, j]
    bounds[0] = low
    for i in range(d):
        for j in range(i + 1):
            S[i, j] -= Z[TAKEN, i] * Z[TAKEN, j]
            S[j, i] = S[i, j]
    return end

"""The compiled step for a diagonal covariance: 1/v ← 1/v + diag(FᵀF), μ ← μ⁻ - v ∘ g, with nothing of size d².

For one class and one feature the diagonal of FᵀF is Σ_i a_i M_i[c, c] x_ij², M_i the metric of sample i in its logits.
"""

from __future__ import annotations

import math

from driftfilter.compiled_losses import F, G, U, V, compiled, expand, kernel, log_softmax, predict, roots, weigh
from driftfilter.compiled_parts import Room, logits, move_mean, root_columns, step_length
from driftfilter.kernel_terms import (
    AFTER,
    CENTERED_FISHER,
    DIAGONAL,
    FISHER,
    GAUSS_NEWTON,
    HESSIAN,
    KAPPA,
    NONE,
    ORIGIN,
    PRIOR,
    STEP,
    TEMPERED,
    VALUES,
    Floats,
    Head,
    Integers,
    Motion,
    Numbers,
    Rules,
)


@compiled
def _spread(gains: Floats, factor: Floats, mean: Numbers, v: Numbers, vectors: Floats) -> None:
    """v⁻ into the workspace."""
    for j in range(mean.shape[0]):
        away = mean[j] - gains[ORIGIN, j]
        vectors[VALUES, j] = factor[0, j] * v[j] + gains[DIAGONAL, j] + gains[KAPPA, j] * away * away


@compiled
def _is_proper(vectors: Floats) -> bool:
    """Whether all variances are positive and finite."""
    good = 0
    for j in range(vectors.shape[1]):
        good += 1 if 0 < vectors[VALUES, j] < math.inf else 0
    return bool(good == vectors.shape[1])


@compiled
def _metric(rules: Rules, w: Floats, root: Floats, n: int, out: Floats, start: int) -> None:
    """a_i M_i[c, c] of every sample and class, into row V of the workspace."""
    k = w.shape[2]
    for i in range(n):
        for c in range(k):
            total = 0.0
            if rules.curvature >= FISHER:
                total = rules.scale * rules.scale * w[i, U, c] * w[i, U, c]
            elif rules.curvature != NONE:
                for r in range(root.shape[2]):
                    total += root[i, c, r] * root[i, c, r]
            w[i, V, c] = out[start + i, 2 * k + 2] * total


@compiled
def _condition(
    rules: Rules, first: int, w: Floats, vectors: Floats, X: Floats, n: int, out: Floats, start: int
) -> bool:  # fmt: skip
    """Variances v conditioned on a batch, and v ∘ g, in the vectors VALUES and STEP; whether variances stay positive."""
    k, width, good = w.shape[2], X.shape[1], 0
    total, one = vectors.dtype.type(0), vectors.dtype.type(1)  # in single precision all of it is
    for i in range(n):
        total += out[start + i, 2 * k + 2]
    for c in range(first, k):
        begin, end = (c - first) * width, (c - first + 1) * width
        slope, energy = vectors[STEP, begin:end], vectors[AFTER, begin:end]
        for j in range(width):
            slope[j] = 0.0
            energy[j] = 0.0
        for i in range(n):
            x, own, metric = X[start + i], out[start + i, 2 * k + 2] * w[i, U, c], w[i, V, c]
            for j in range(width):
                slope[j] += own * x[j]
                energy[j] += metric * x[j] * x[j]
        if rules.curvature == CENTERED_FISHER:
            for j in range(width):
                energy[j] = 0.0
            for i in range(n):
                x, own, scale = X[start + i], w[i, U, c], out[start + i, 2 * k + 2] * rules.scale * rules.scale
                for j in range(width):
                    row = own * x[j] - slope[j] / total
                    energy[j] += scale * row * row
    for j in range(vectors.shape[1]):
        value = vectors[VALUES, j]
        value /= one + value * vectors[AFTER, j]
        vectors[VALUES, j] = value
        vectors[STEP, j] *= value
        good += 1 if value > 0 else 0
    return bool(good == vectors.shape[1])


@compiled
def _block(square: Floats, vectors: Floats, first: int, k: int, X: Floats, i: int) -> None:
    """Covariance of the logits of sample i: classes have parameters of their own, and logits without correlation."""
    width = X.shape[1]
    for c in range(k):
        for e in range(k):
            square[0, c, e] = 0.0
        for j in range(width if c >= first else 0):
            square[0, c, c] += X[i, j] * X[i, j] * vectors[VALUES, (c - first) * width + j]


@compiled
def _move(
    rules: Rules, first: int, w: Floats, root: Floats, R: Floats, Q: Floats, vectors: Floats, X: Floats, n: int, out: Floats,
    start: int,
) -> bool:  # fmt: skip
    """μ = μ⁻ - v ∘ g; whether it is finite."""
    d, total, share = vectors.shape[1], vectors.dtype.type(0), vectors.dtype.type(1)
    own, width = w.shape[2] - first, X.shape[1]
    if rules.radius > 0:
        m = root_columns(rules, w, root, n, first, out, start, R)
        for q in range(n * own):
            moved = vectors.dtype.type(0)
            for j in range(width):
                moved += X[start + q // own, j] * vectors[STEP, q % own * width + j]
            Q[2, 0, q] = moved
        share = vectors.dtype.type(step_length(rules.radius, R, m, n * own, Q))
    for j in range(d):
        vectors[AFTER, j] = vectors[PRIOR, j] - share * vectors[STEP, j]
        total += abs(vectors[AFTER, j])
    return math.isfinite(total)


@kernel
def scan_diagonal(
    rules: Rules, motion: Motion, head: Head, X: Floats, offsets: Integers, begin: int, end: int, old: Numbers, values: Numbers,
    mean: Numbers, v: Numbers, room: Room, warned: bool, out: Floats, used: Integers,
) -> int:  # fmt: skip
    """Steps begin to end from mean old and variances values, into mean and v; returns the first step not taken."""
    w, root, square, vectors, theta, R, _, Q, _ = room
    gains, matrix, factor, _, still, _, _ = motion
    first, read_out = head
    k, row = w.shape[2], G if rules.posterior else F
    for t in range(begin, end):
        start, n = offsets[t], offsets[t + 1] - offsets[t]
        move_mean(gains, matrix, old, vectors)
        if not logits(first, read_out, theta, X, start, n, vectors, PRIOR, w, F):
            return t
        _spread(gains, factor, old, values, vectors)
        for i in range(n):
            log_softmax(w, i, F)
        used[t] = weigh(rules, w, n, out, start)
        expand(rules, w, n, out, start)
        learns = used[t] >= rules.minimum
        if not learns and ((used[t] > 0 and not warned) or not (still or _is_proper(vectors))):
            return t
        if learns:
            if rules.curvature == HESSIAN or rules.curvature == GAUSS_NEWTON:
                roots(rules, w, n, root, square)
            _metric(rules, w, root, n, out, start)
        for turn in range(2):  # predictions come before the update or after it
            if turn == rules.posterior:
                if rules.posterior:
                    logits(first, read_out, theta, X, start, n, vectors, AFTER, w, G)
                for i in range(n):
                    if rules.prediction != TEMPERED:
                        _block(square, vectors, first, k, X, start + i)
                    if not predict(rules, w, i, row, square, out, start):
                        return t
            if turn == 0 and learns:
                if not _condition(rules, first, w, vectors, X, n, out, start):
                    return t
                if not _move(rules, first, w, root, R, Q, vectors, X, n, out, start):
                    return t
            elif turn == 0:
                for j in range(mean.shape[0]):
                    vectors[AFTER, j] = vectors[PRIOR, j]
        for j in range(mean.shape[0]):
            mean[j] = vectors[AFTER, j]
        for j in range(mean.shape[0]):
            v[j] = vectors[VALUES, j]
        old, values = mean, v
    return end

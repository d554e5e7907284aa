"""One step of a filter on a linear head, compiled, for a full covariance.

A batch sees the parameters through p = n · classes directions b_ic, the gradients of its logits.
Everything a step needs is in Y = Σ⁻ Bᵀ [d, p] and Q = B Σ⁻ Bᵀ [p, p]. A column r of the curvature's
root, FᵀF = Σ_r (Bᵀr)(Bᵀr)ᵀ, takes away h hᵀ from Σ with h = Y r / √(1 + rᵀQr), and the same from Y
and Q; then the mean moves by -Y γ and the new logits have covariance Q. What is taken from Σ waits
until the next step's transition passes over Σ anyway: memory is used once a step.
"""

import math

from driftfilter.compiled.rules import (
    F,
    G,
    U,
    expand,
    kernel,
    log_softmax,
    part,
    predict,
    roots,
    weigh,
)
from driftfilter.compiled.terms import (
    AFTER,
    DIAGONAL,
    GAUSS_NEWTON,
    HESSIAN,
    KAPPA,
    ORIGIN,
    PRIOR,
    STEP,
    TEMPERED,
    Floats,
    HeadArrays,
    Integers,
    MotionArrays,
    Numbers,
    Rules,
)
from driftfilter.compiled.workspace import Workspace, fill_columns, logits, move_mean, step_length


@part
def _directions(read_out: Floats, X: Floats, start: int, n: int, own: int, Z: Floats) -> None:
    """b_ic: features in the block of class c, read out if there are hidden states."""
    width = X.shape[1]
    for q in range(n * own):
        i, place = start + q // own, q % own * width
        for j in range(Z.shape[1]):
            Z[q, j] = 0.0
        for j in range(width):
            if read_out.shape[0] == 0:
                Z[q, place + j] = X[i, j]
            for e in range(read_out.shape[1]):
                Z[q, e] += X[i, j] * read_out[place + j, e]


@part
def _turn(matrix: Floats, S: Numbers, half: Floats) -> None:
    """G Σ Gᵀ for a matrix gain, in the lower triangle; half holds G Σ."""
    d = matrix.shape[0]
    for i in range(d):
        for j in range(d):
            half[i, j] = 0.0
        for e in range(d):
            own = matrix[i, e]
            if own != 0:
                for j in range(d):
                    half[i, j] += own * (S[e, j] if j <= e else S[j, e])
    for i in range(d):
        for j in range(i + 1):
            total = 0.0
            for e in range(d):
                total += matrix[j, e] * half[i, e]
            S[i, j] = total


@part
def _take(S: Numbers, Z: Floats, begin: int, m: int) -> None:
    """The lower triangle of Σ, less the rows of Z that wait."""
    for i in range(S.shape[0]):
        for r in range(begin, begin + m):
            own = Z[r, i]
            for j in range(i + 1):
                S[i, j] -= own * Z[r, j]


@part
def _sweep(
    gains: Floats,
    factor: Floats,
    noise: Floats,
    mean: Numbers,
    S: Numbers,
    Z: Floats,
    begin: int,
    m: int,
    p: int,
) -> bool:
    """Σ ← the prior's and Y ← Σ Bᵀ in one pass over the lower triangle; whether all variances are
    positive and finite.
    """
    d, proper = S.shape[0], True
    place, alpha = begin // 2, factor[0, 0]
    for q in range(place, place + p):
        for j in range(d):
            Z[q, j] = 0.0
    for i in range(d):
        for r in range(begin, begin + m):
            own = Z[r, i]
            for j in range(i + 1):
                S[i, j] -= own * Z[r, j]
        if factor.shape[0] > 1:
            for j in range(i + 1):
                S[i, j] *= factor[i, j]
        elif alpha != 1:
            for j in range(i + 1):
                S[i, j] *= alpha
        for j in range(i + 1 if noise.shape[0] > 0 else 0):
            S[i, j] += noise[i, j]
        away = mean[i] - gains[ORIGIN, i]
        S[i, i] += gains[DIAGONAL, i] + gains[KAPPA, i] * away * away
        proper = proper and 0 < S[i, i] < math.inf
        for q in range(p):
            own, total = Z[q, i], 0.0
            for j in range(i):
                total += S[i, j] * Z[q, j]
                Z[place + q, j] += S[i, j] * own
            Z[place + q, i] += total + S[i, i] * own
    return proper


@part
def _project(Z: Floats, place: int, p: int, Q: Floats, R: Floats) -> None:
    """Q = B Y, and the lengths of the directions into the last row of R."""
    for q in range(p):
        size = 0.0
        for j in range(Z.shape[1]):
            size += Z[q, j] * Z[q, j]
        R[R.shape[0] - 1, q] = math.sqrt(size)
        for e in range(q + 1):
            value = 0.0
            for j in range(Z.shape[1]):
                value += Z[e, j] * Z[place + q, j]
            Q[0, q, e] = value
            Q[0, e, q] = value


@part
def _absorb(R: Floats, Z: Floats, Q: Floats, m: int, p: int, begin: int) -> float:
    """Condition Y and Q on the columns of R, rows that wait for Σ in Z; a bound of the precision
    gained, -1: refused.
    """
    d, place, gained = Z.shape[1], begin // 2, 0.0
    for r in range(m):
        scale, length = 1.0, 0.0
        for q in range(p):
            value = 0.0
            for e in range(p):
                value += Q[0, q, e] * R[r, e]
            Q[2, 0, q] = value
            scale += value * R[r, q]
            length += abs(R[r, q]) * R[R.shape[0] - 1, q]
        if not 0 < scale < math.inf:
            return -1.0
        gained += length * length
        shrink = 1 / math.sqrt(scale)
        for j in range(d):
            Z[begin + r, j] = 0.0
        for q in range(p):
            own = R[r, q] * shrink
            for j in range(d):
                Z[begin + r, j] += own * Z[place + q, j]
        for q in range(p):
            own = Q[2, 0, q] * shrink
            for j in range(d):
                Z[place + q, j] -= own * Z[begin + r, j]
            for e in range(p):
                Q[0, q, e] -= own * Q[2, 0, e] * shrink
    return gained


@part
def _block(square: Floats, Q: Floats, first: int, k: int, i: int) -> None:
    """Covariance of the logits of sample i, from Q[1]; the logit of class 0 may be fixed."""
    own = k - first
    for c in range(k):
        for e in range(k):
            inside = c >= first and e >= first
            square[0, c, e] = Q[1, i * own + c - first, i * own + e - first] if inside else 0.0


@part
def _move(
    rules: Rules,
    w: Floats,
    R: Floats,
    Z: Floats,
    Q: Floats,
    vectors: Floats,
    n: int,
    first: int,
    m: int,
    out: Floats,
    start: int,
) -> bool:
    """μ = μ⁻ - Y γ, γ_ic = (w_i / n) u_ic; whether it is finite."""
    k, d, total, share = w.shape[2], Z.shape[1], 0.0, 1.0
    own, place = k - first, R.shape[1]
    for j in range(d):
        vectors[STEP, j] = 0.0
    for q in range(n * own):
        gamma = out[start + q // own, 2 * k + 2] * w[q // own, U, first + q % own]
        for j in range(d):
            vectors[STEP, j] += gamma * Z[place + q, j]
    if rules.radius > 0:
        for q in range(n * own):
            value = 0.0
            for j in range(d):
                value += Z[q, j] * vectors[STEP, j]
            Q[2, 0, q] = value
        share = step_length(rules, n, R, m, n * own, Q)
    for j in range(d):
        vectors[AFTER, j] = vectors[PRIOR, j] - share * vectors[STEP, j]
        total += abs(vectors[AFTER, j])
    return math.isfinite(total)


@kernel
def scan_full(
    rules: Rules, motion: MotionArrays, head: HeadArrays, X: Floats, offsets: Integers,
    begin: int, end: int, mean: Numbers, S: Numbers,
    bounds: Floats, space: Workspace, warned: bool, out: Floats, used: Integers,
) -> int:  # fmt: skip
    """Steps begin to end on mean and Σ, which are changed; returns the first step not taken, Σ then
    being of no use.

    ``bounds``: a lower one of Σ's eigenvalues, which is kept up, and the rounding error of a
    number. Rounding may cost Σ its definiteness; if the bound cannot exclude it the step is the
    eager path's, which looks (a Cholesky factor).
    """
    w, root, square, vectors, theta, R, Z, Q, half = space
    gains, matrix, factor, noise, still, shrink, floor = motion
    first, read_out = head
    low, eps = bounds[0], bounds[1]
    k, d, waiting, place = w.shape[2], mean.shape[0], 0, R.shape[1]
    row = G if rules.posterior else F
    for t in range(begin, end):
        start, n = offsets[t], offsets[t + 1] - offsets[t]
        p, m = n * (k - first), 0
        move_mean(gains, matrix, mean, vectors)
        if not logits(first, read_out, theta, X, start, n, vectors, PRIOR, w, F):
            return t
        _directions(read_out, X, start, n, k - first, Z)
        if matrix.shape[0] > 0:
            _take(S, Z, 2 * place, waiting)
            _turn(matrix, S, half)
            waiting = 0
        proper = _sweep(gains, factor, noise, mean, S, Z, 2 * place, waiting, p)
        low, waiting = shrink * low + floor, 0
        _project(Z, place, p, Q, R)
        for i in range(n):
            log_softmax(w, i, F)
        used[t] = weigh(rules, w, n, out, start)
        expand(rules, w, n, out, start)
        learns = used[t] >= rules.minimum
        if not learns and used[t] > 0 and not warned:
            return t
        if learns:
            if rules.curvature == HESSIAN or rules.curvature == GAUSS_NEWTON:
                roots(rules, w, n, root, square)
            m = fill_columns(rules, w, root, n, first, out, start, R)
        if m == 0 and not still and not proper:
            return t
        if not rules.posterior:
            for q in range(p):
                for e in range(p):
                    Q[1, q, e] = Q[0, q, e]
        if m > 0:
            gained, largest = _absorb(R, Z, Q, m, p, 2 * place), 0.0
            for j in range(d):
                largest = max(largest, S[j, j])
            rounding = 4 * d * eps * largest
            low = 1 / (1 / low + gained) - rounding
            if gained < 0 or not low > rounding:
                return t
            waiting = m
        if learns:
            if not _move(rules, w, R, Z, Q, vectors, n, first, m, out, start):
                return t
        else:
            for j in range(d):
                vectors[AFTER, j] = vectors[PRIOR, j]
        if rules.posterior:
            logits(first, read_out, theta, X, start, n, vectors, AFTER, w, G)
            for q in range(p):
                for e in range(p):
                    Q[1, q, e] = Q[0, q, e]
        for i in range(n):
            if rules.prediction != TEMPERED:
                _block(square, Q, first, k, i)
            if not predict(rules, w, i, row, square, out, start):
                return t
        for j in range(d):
            mean[j] = vectors[AFTER, j]
    bounds[0] = low
    _take(S, Z, 2 * place, waiting)
    for i in range(d):
        for j in range(i):
            S[j, i] = S[i, j]
    return end

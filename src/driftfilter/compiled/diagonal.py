"""The compiled step for a diagonal covariance: 1/v ← 1/v + diag(FᵀF), μ ← μ⁻ - v ∘ g, with nothing
of size d².

For one class and one feature the diagonal of FᵀF is Σ_i a_i M_i[c, c] x_ij², M_i the metric of
sample i in its logits. One sample alone, as most steps of a fleet have, needs no sums: it is
learned in one pass over the parameters.
"""

import math
from typing import TypeAlias

from driftfilter.compiled.rules import (
    F,
    G,
    U,
    V,
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
    CENTERED_FISHER,
    DIAGONAL,
    FISHER,
    KAPPA,
    ORIGIN,
    PRIOR,
    STEP,
    TEMPERED,
    VALUES,
    Floats,
    HeadArrays,
    Integers,
    MotionArrays,
    Numbers,
    Rules,
)
from driftfilter.compiled.vector_math import fetch
from driftfilter.compiled.workspace import Workspace, fill_columns, logits, move_mean, step_length

Pair: TypeAlias = tuple[Numbers, Numbers]  # means and variances of one stream, [d] each or []


@part
def is_pulled(gains: Floats) -> bool:
    """Whether v⁻ depends on how far the mean is from the source's."""
    total = 0.0
    for j in range(gains.shape[1]):
        total += abs(gains[KAPPA, j])
    return total > 0


@part
def _spread(
    gains: Floats, factor: Floats, pulled: bool, mean: Numbers, v: Numbers, vectors: Floats
) -> None:
    """v⁻ into the workspace."""
    for j in range(mean.shape[0]):
        vectors[VALUES, j] = factor[0, j] * v[j] + gains[DIAGONAL, j]
    for j in range(mean.shape[0] if pulled else 0):
        away = mean[j] - gains[ORIGIN, j]
        vectors[VALUES, j] += gains[KAPPA, j] * away * away


@part
def _is_proper(v: Numbers) -> bool:
    """Whether all variances are positive and finite."""
    none, one = v.dtype.type(0), v.dtype.type(1)
    lost, total = none, none
    for j in range(v.shape[0]):
        lost += none if v[j] > none else one
        total += v[j]
    return bool(lost == none) and math.isfinite(total)


@part
def _metric(rules: Rules, w: Floats, root: Floats | None, n: int, out: Floats, start: int) -> None:
    """a_i M_i[c, c] of every sample and class, into row V of the workspace."""
    k, scale = w.shape[2], w.dtype.type(rules.scale)
    for i in range(n):
        for c in range(k):
            total = w.dtype.type(0)
            if rules.curvature >= FISHER:
                total = scale * scale * w[i, U, c] * w[i, U, c]
            elif root is not None:
                for r in range(root.shape[2]):
                    total += root[i, c, r] * root[i, c, r]
            w[i, V, c] = out[start + i, 2 * k + 2] * total


@part
def _condition_one(value: float, energy: float, one: float) -> float:
    """1 / (1/v + energy); the 1 comes along in the precision of the others."""
    return value / (one + value * energy)


@part
def _learn_one(
    first: int,
    w: Floats,
    vectors: Floats,
    X: Floats,
    out: Floats,
    start: int,
    ahead: Pair,
    mean: Numbers,
    v: Numbers,
) -> bool:
    """μ and v after one sample, and its logits there; whether they are finite and variances
    positive.
    """
    k, width, x = w.shape[2], X.shape[1], X[start]
    one, total = vectors.dtype.type(1), vectors.dtype.type(0)
    w[0, G, 0] = 0.0
    for c in range(first, k):
        begin, end = (c - first) * width, (c - first + 1) * width
        prior, values, new, own = (
            vectors[PRIOR, begin:end],
            vectors[VALUES, begin:end],
            mean[begin:end],
            v[begin:end],
        )
        slope, metric, value = out[start, 2 * k + 2] * w[0, U, c], w[0, V, c], vectors.dtype.type(0)
        fetch(ahead[0], begin, end)
        fetch(ahead[1], begin, end)
        for j in range(width):
            left = _condition_one(values[j], metric * x[j] * x[j], one)
            after = prior[j] - left * (slope * x[j])
            own[j] = left
            new[j] = after
            value += x[j] * after
        w[0, G, c] = value
        total += abs(value)  # a mean that is not finite shows here, whatever x is
    return _is_proper(v) and math.isfinite(total)


@part
def _sum_up(
    c: int, w: Floats, X: Floats, n: int, out: Floats, start: int, slope: Floats, energy: Floats
) -> None:
    """g and diag(FᵀF) of the parameters of class c."""
    for j in range(X.shape[1]):
        slope[j] = 0.0
        energy[j] = 0.0
    for i in range(n):
        x, own, metric = X[start + i], out[start + i, 2 * w.shape[2] + 2] * w[i, U, c], w[i, V, c]
        for j in range(X.shape[1]):
            slope[j] += own * x[j]
            energy[j] += metric * x[j] * x[j]


@part
def _sum_centered(
    rules: Rules,
    c: int,
    w: Floats,
    X: Floats,
    n: int,
    out: Floats,
    start: int,
    slope: Floats,
    energy: Floats,
) -> None:
    """diag(FᵀF) of gradients less their mean."""
    at, total = 2 * w.shape[2] + 2, w.dtype.type(0)
    for i in range(n):
        total += out[start + i, at]
    for j in range(X.shape[1]):
        energy[j] = 0.0
    for i in range(n):
        x, own, scale = X[start + i], w[i, U, c], out[start + i, at] * rules.scale * rules.scale
        for j in range(X.shape[1]):
            row = own * x[j] - slope[j] / total
            energy[j] += scale * row * row


@part
def _condition(
    rules: Rules,
    first: int,
    w: Floats,
    vectors: Floats,
    X: Floats,
    n: int,
    out: Floats,
    start: int,
    ahead: Pair,
) -> bool:
    """Variances v conditioned on a batch, and v ∘ g, in the vectors VALUES and STEP; whether
    variances stay positive.
    """
    width, one = X.shape[1], vectors.dtype.type(1)
    for c in range(first, w.shape[2]):
        begin, end = (c - first) * width, (c - first + 1) * width
        slope, energy, values = (
            vectors[STEP, begin:end],
            vectors[AFTER, begin:end],
            vectors[VALUES, begin:end],
        )
        fetch(ahead[0], begin, end)
        fetch(ahead[1], begin, end)
        _sum_up(c, w, X, n, out, start, slope, energy)
        if rules.curvature == CENTERED_FISHER:
            _sum_centered(rules, c, w, X, n, out, start, slope, energy)
        for j in range(width):
            values[j] = _condition_one(values[j], energy[j], one)
            slope[j] *= values[j]
    return _is_proper(vectors[VALUES])


@part
def _block(square: Floats, values: Numbers, first: int, k: int, X: Floats, i: int) -> None:
    """Covariance of the logits of sample i: classes have parameters of their own, and logits
    without correlation.
    """
    width = X.shape[1]
    for c in range(k):
        for e in range(k):
            square[0, c, e] = 0.0
        for j in range(width if c >= first else 0):
            square[0, c, c] += X[i, j] * X[i, j] * values[(c - first) * width + j]


@part
def _move(
    rules: Rules, first: int, w: Floats, root: Floats | None, R: Floats | None, Q: Floats,
    vectors: Floats, X: Floats, n: int, out: Floats,
    start: int,
) -> bool:  # fmt: skip
    """μ = μ⁻ - v ∘ g; whether it is finite."""
    d, total, share = vectors.shape[1], vectors.dtype.type(0), vectors.dtype.type(1)
    own, width = w.shape[2] - first, X.shape[1]
    if R is not None:
        m = fill_columns(rules, w, root, n, first, out, start, R)
        for q in range(n * own):
            moved = vectors.dtype.type(0)
            for j in range(width):
                moved += X[start + q // own, j] * vectors[STEP, q % own * width + j]
            Q[2, 0, q] = moved
        share = vectors.dtype.type(step_length(rules, n, R, m, n * own, Q))
    for j in range(d):
        vectors[AFTER, j] = vectors[PRIOR, j] - share * vectors[STEP, j]
        total += abs(vectors[AFTER, j])
    return math.isfinite(total)


@part
def _write(vectors: Floats, which: int, mean: Numbers, v: Numbers) -> None:
    """One of the vectors as the mean, and the variances."""
    for j in range(mean.shape[0]):
        mean[j] = vectors[which, j]
    for j in range(mean.shape[0]):
        v[j] = vectors[VALUES, j]


@part
def _learn(
    rules: Rules,
    head: HeadArrays,
    X: Floats,
    start: int,
    n: int,
    ahead: Pair,
    mean: Numbers,
    v: Numbers,
    space: Workspace,
    out: Floats,
) -> bool:
    """μ and v after a batch, and its logits there; whether they are finite and variances
    positive.
    """
    w, root, _, vectors, theta, R, _, Q, _ = space
    first, read_out = head
    if n == 1 and rules.radius == 0 and theta.shape[0] == 0:
        return _learn_one(first, w, vectors, X, out, start, ahead, mean, v)
    if not _condition(rules, first, w, vectors, X, n, out, start, ahead):
        return False
    if not _move(rules, first, w, root, R, Q, vectors, X, n, out, start):
        return False
    _write(vectors, AFTER, mean, v)
    return logits(first, read_out, theta, X, start, n, vectors, AFTER, w, G)


@part
def step_diagonal(
    rules: Rules, motion: MotionArrays, head: HeadArrays, pulled: bool, X: Floats, start: int,
    n: int, old: Pair, ahead: Pair,
    mean: Numbers, v: Numbers, space: Workspace, warned: bool, out: Floats, used: Integers, t: int,
) -> bool:  # fmt: skip
    """Step t from the belief old into mean and v; whether it was taken. The belief ahead is wanted
    next.
    """
    w, root, square, vectors, theta, _, _, _, _ = space
    gains, matrix, factor, _, still, _, _ = motion
    first, read_out = head
    move_mean(gains, matrix, old[0], vectors)
    if not logits(first, read_out, theta, X, start, n, vectors, PRIOR, w, F):
        return False
    _spread(gains, factor, pulled, old[0], old[1], vectors)
    for i in range(n):
        log_softmax(w, i, F)
    used[t] = weigh(rules, w, n, out, start)
    expand(rules, w, n, out, start)
    learns = used[t] >= rules.minimum
    if not learns and ((used[t] > 0 and not warned) or not (still or _is_proper(vectors[VALUES]))):
        return False
    if learns:  # before a prediction takes the place of p
        roots(rules, w, n, root, square)
        _metric(rules, w, root, n, out, start)
    for turn in range(2):  # predictions come before the update or after it
        if turn == rules.posterior:
            for i in range(n):
                if rules.prediction != TEMPERED and turn == 0:
                    _block(square, vectors[VALUES], first, w.shape[2], X, start + i)
                elif rules.prediction != TEMPERED:
                    _block(square, v, first, w.shape[2], X, start + i)
                if not predict(
                    rules, w, i, G if rules.posterior and learns else F, square, out, start
                ):
                    return False
        if turn == 0 and learns:
            if not _learn(rules, head, X, start, n, ahead, mean, v, space, out):
                return False
        elif turn == 0:
            _write(vectors, PRIOR, mean, v)
    return True


@kernel
def scan_diagonal(
    rules: Rules, motion: MotionArrays, head: HeadArrays, X: Floats, offsets: Integers,
    begin: int, end: int, old: Numbers, values: Numbers,
    mean: Numbers, v: Numbers, space: Workspace, warned: bool, out: Floats, used: Integers,
) -> int:  # fmt: skip
    """Steps begin to end from mean old and variances values, into mean and v; returns the first
    step not taken.
    """
    pulled, belief, ahead = is_pulled(motion.vectors), (old, values), (old[:0], values[:0])
    for t in range(begin, end):
        start, n = offsets[t], offsets[t + 1] - offsets[t]
        if not step_diagonal(
            rules,
            motion,
            head,
            pulled,
            X,
            start,
            n,
            belief,
            ahead,
            mean,
            v,
            space,
            warned,
            out,
            used,
            t,
        ):
            return t
        belief = (mean, v)
    return end

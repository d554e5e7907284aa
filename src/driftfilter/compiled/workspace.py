"""What the compiled steps share: transition, head and workspace as arrays, the logits, the root of
the curvature.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from driftfilter.compiled.rules import U, columns, compile_rule, part
from driftfilter.compiled.terms import (
    CENTERED_FISHER,
    DRIFT,
    FISHER,
    GAIN,
    GAUSS_NEWTON,
    HESSIAN,
    NONE,
    PRIOR,
    Floats,
    HeadArrays,
    Numbers,
    Rules,
)
from driftfilter.model import closed_forms

_share_of = compile_rule(closed_forms.share_of)


class Workspace(NamedTuple):
    """Workspace of a step on up to n samples. With a diagonal covariance, what the rules have no
    use for is None, and the code that would use it is not compiled.
    """

    w: Floats  # [n, 7, k], see rules.py
    root: Any  # [n, k, r], for a curvature from the model
    square: Floats  # [2, k, k]
    vectors: Floats  # [4, d]
    theta: Floats  # [parameters], read out
    # [m + 1, p], columns of the curvature's root, and lengths of the directions; with a diagonal
    # covariance for a trust region alone
    R: Any
    Z: Floats  # [2 p + m, d], rows of B, of Y, and those that wait to be taken from Σ
    Q: Floats  # [3, p, p]: Q, the Q to predict with, and in a row of it anything
    half: Floats  # [d, d] for a matrix gain, or [0, 0]


def allocate(
    rules: Rules,
    n: int,
    k: int,
    d: int,
    head: HeadArrays,
    full: bool,
    turned: bool = False,
    dtype: Any = np.float64,
) -> Workspace:
    """Workspace for batches of up to n samples; turned: by a matrix gain."""
    p, m = n * (k - head.first), n * columns(k)
    wide, square, side = d if full else 0, p if full else 1, d if turned else 0
    small = ((n, 7, k), (n, k, columns(k)), (2, k, k), (4, d), (len(head.read_out),))
    shapes = (*small, (m + 1, p), (2 * p + m, wide), (3, square, p), (side, side))
    space = Workspace(*[np.zeros(shape, dtype) for shape in shapes])
    if full:
        return space
    models = rules.curvature in (HESSIAN, GAUSS_NEWTON)
    return space._replace(
        root=space.root if models else None, R=space.R if rules.radius > 0 else None
    )


@part
def move_mean(gains: Floats, matrix: Floats, mean: Numbers, vectors: Floats) -> None:
    """μ⁻ into the workspace."""
    d = mean.shape[0]
    for i in range(d):
        vectors[PRIOR, i] = gains[DRIFT, i] + gains[GAIN, i] * mean[i]
    for i in range(matrix.shape[0]):
        for j in range(d):
            vectors[PRIOR, i] += matrix[i, j] * mean[j]


@part
def logits(
    first: int,
    read_out: Floats,
    theta: Floats,
    X: Floats,
    start: int,
    n: int,
    vectors: Floats,
    which: int,
    w: Floats,
    row: int,
) -> bool:
    """Logits of samples at one of the vectors, into a row of the workspace; whether all are
    finite.
    """
    total, width = vectors.dtype.type(0), X.shape[1]
    for i in range(theta.shape[0]):
        theta[i] = 0.0
        for j in range(vectors.shape[1]):
            theta[i] += read_out[i, j] * vectors[which, j]
    for i in range(n):
        w[i, row, 0] = 0.0
        x = X[start + i]
        for c in range(w.shape[2] - first):
            own = (
                theta[c * width : (c + 1) * width]
                if theta.shape[0] > 0
                else vectors[which, c * width : (c + 1) * width]
            )
            value = vectors.dtype.type(0)
            for j in range(width):
                value += x[j] * own[j]
            w[i, row, first + c] = value
            total += abs(value)
    return math.isfinite(total)


@part
def fill_columns(
    rules: Rules,
    w: Floats,
    root: Floats | None,
    n: int,
    first: int,
    out: Floats,
    start: int,
    R: Floats,
) -> int:
    """Columns of the curvature's root over the directions, as rows of R [m, p]; returns m."""
    k, total, m = w.shape[2], 0.0, 0
    own = k - first
    if rules.curvature == NONE:
        return 0
    for i in range(n):
        total += out[start + i, 2 * k + 2]
    for i in range(n):
        scale = math.sqrt(out[start + i, 2 * k + 2])
        for r in range(1 if root is None or rules.curvature >= FISHER else root.shape[2]):
            size = 0.0
            for q in range(n * own):
                R[m, q] = 0.0
            for c in range(own):
                if root is None or rules.curvature >= FISHER:
                    R[m, i * own + c] = scale * rules.scale * w[i, U, first + c]
                else:
                    R[m, i * own + c] = scale * root[i, first + c, r]
                if rules.curvature == CENTERED_FISHER:
                    for j in range(n):
                        R[m, j * own + c] -= (
                            scale
                            * rules.scale
                            * out[start + j, 2 * k + 2]
                            / total
                            * w[j, U, first + c]
                        )
            for q in range(n * own):
                size += abs(R[m, q])
            if size != 0:
                m += 1
    return m


@part
def step_length(rules: Rules, n: int, R: Floats, m: int, p: int, Q: Floats) -> float:
    """How much of a step on n samples is taken: min(1, radius / abs(F Δ)); Q[2, 0] [p] is B Δ."""
    total, radius = 0.0, rules.radius * _share_of(n, rules.reference)
    for r in range(m):
        value = 0.0
        for q in range(p):
            value += R[r, q] * Q[2, 0, q]
        total += value * value
    return min(1.0, radius / math.sqrt(total)) if total > 0 else 1.0

"""The compiled steps for many streams: a stream's belief is read and written once, all else stays
in the cache.

Streams begin to end take ``per`` steps each. Their beliefs are rows of before and values, results
go to mean and the other array; reached says which streams took all steps.
"""

from driftfilter.compiled.diagonal import is_pulled, step_diagonal
from driftfilter.compiled.full import scan_full
from driftfilter.compiled.logistic import scan_rank_one
from driftfilter.compiled.rules import kernel, part
from driftfilter.compiled.terms import Floats, HeadArrays, Integers, MotionArrays, Numbers, Rules
from driftfilter.compiled.workspace import Workspace


@kernel
def each_diagonal(
    rules: Rules, motion: MotionArrays, head: HeadArrays, X: Floats, offsets: Integers,
    per: int, begin: int, end: int, rows: Integers,
    before: Numbers, values: Numbers, mean: Numbers, v: Numbers, space: Workspace, warned: bool,
    out: Floats, used: Integers,
    reached: Integers,
) -> None:  # fmt: skip
    """Steps with diagonal covariances."""
    pulled = is_pulled(motion.vectors)
    for s in range(begin, end):
        here, there = rows[s], rows[min(s + 1, end - 1)]
        old, ahead = (before[here], values[here]), (before[there], values[there])
        new, own, t, stop = mean[s], v[s], s * per, (s + 1) * per
        while t < stop:
            start, n = offsets[t], offsets[t + 1] - offsets[t]
            if not step_diagonal(
                rules,
                motion,
                head,
                pulled,
                X,
                start,
                n,
                old,
                ahead,
                new,
                own,
                space,
                warned,
                out,
                used,
                t,
            ):
                break
            old, t = (new, own), t + 1
        reached[s] = t == stop


@part
def _copy(old: Numbers, matrix: Numbers, new: Numbers, own: Numbers) -> None:
    """Copy a belief; of a covariance the lower triangle, for the steps use it alone."""
    for i in range(old.shape[0]):
        new[i] = old[i]
        for j in range(i + 1):
            own[i, j] = matrix[i, j]


@kernel
def each_full(
    rules: Rules, motion: MotionArrays, head: HeadArrays, X: Floats, offsets: Integers,
    per: int, begin: int, end: int, rows: Integers,
    before: Numbers, values: Numbers, mean: Numbers, S: Numbers, bounds: Floats, space: Workspace,
    warned: bool,
    out: Floats, used: Integers, reached: Integers,
) -> None:  # fmt: skip
    """Steps with full covariances, and bounds [streams, 4] as scan.find_limits has them."""
    for s in range(begin, end):
        new, own = mean[s], S[s]
        _copy(before[rows[s]], values[rows[s]], new, own)
        first, stop = s * per, (s + 1) * per
        stream = scan_full(
            rules,
            motion,
            head,
            X,
            offsets,
            first,
            stop,
            new,
            own,
            bounds[s],
            space,
            warned,
            out,
            used,
        )
        reached[s] = stream == stop


@kernel
def each_rank_one(
    rules: Rules, motion: MotionArrays, X: Floats, per: int, begin: int, end: int, rows: Integers,
    before: Numbers, values: Numbers,
    mean: Numbers, S: Numbers, bounds: Floats, w: Floats, v: Floats, warned: bool, out: Floats,
    used: Integers,
    reached: Integers,
) -> None:  # fmt: skip
    """Steps of logistic regression on single observations, with full covariances."""
    for s in range(begin, end):
        new, own = mean[s], S[s]
        _copy(before[rows[s]], values[rows[s]], new, own)
        first, stop = s * per, (s + 1) * per
        stream = scan_rank_one(
            rules, motion, X, first, stop, new, own, bounds[s], w, v, warned, out, used, ()
        )
        reached[s] = stream == stop

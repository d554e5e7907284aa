"""The compiled steps for many streams at once: a stream's belief is read and written once, all else
stays in the cache.
"""

from __future__ import annotations

from driftfilter.compiled.diagonal import is_pulled, step_diagonal
from driftfilter.compiled.full import scan_full
from driftfilter.compiled.logistic import scan_rank_one
from driftfilter.compiled.rules import kernel
from driftfilter.compiled.terms import Floats, Head, Integers, Motion, Numbers, Rules
from driftfilter.compiled.workspace import Room


@kernel
def each_diagonal(
    rules: Rules, motion: Motion, head: Head, X: Floats, offsets: Integers, per: int, begin: int,
    end: int, rows: Integers,
    before: Numbers, values: Numbers, mean: Numbers, v: Numbers, room: Room, warned: bool,
    out: Floats, used: Integers,
    reached: Integers,
) -> None:  # fmt: skip
    """``per`` steps of the streams begin to end, whose beliefs are rows of before and values;
    results go to mean and v.
    """
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
                room,
                warned,
                out,
                used,
                t,
            ):
                break
            old, t = (new, own), t + 1
        reached[s] = t == stop


@kernel
def each_full(
    rules: Rules, motion: Motion, head: Head, X: Floats, offsets: Integers, per: int, begin: int,
    end: int, rows: Integers,
    before: Numbers, values: Numbers, mean: Numbers, S: Numbers, bounds: Floats, room: Room,
    warned: bool,
    out: Floats, used: Integers, reached: Integers,
) -> None:  # fmt: skip
    """The same with full covariances, and bounds [streams, 4] as scan.limits has them."""
    for s in range(begin, end):
        old, matrix, new, own = before[rows[s]], values[rows[s]], mean[s], S[s]
        for i in range(mean.shape[1]):
            new[i] = old[i]
            for j in range(i + 1):  # the steps use the lower triangle alone
                own[i, j] = matrix[i, j]
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
            room,
            warned,
            out,
            used,
        )
        reached[s] = stream == stop


@kernel
def each_rank_one(
    rules: Rules, motion: Motion, X: Floats, per: int, begin: int, end: int, rows: Integers,
    before: Numbers, values: Numbers,
    mean: Numbers, S: Numbers, bounds: Floats, w: Floats, v: Floats, warned: bool, out: Floats,
    used: Integers,
    reached: Integers,
) -> None:  # fmt: skip
    """The same for logistic regression on single observations."""
    for s in range(begin, end):
        old, matrix, new, own = before[rows[s]], values[rows[s]], mean[s], S[s]
        for i in range(mean.shape[1]):
            new[i] = old[i]
            for j in range(i + 1):
                own[i, j] = matrix[i, j]
        first, stop = s * per, (s + 1) * per
        stream = scan_rank_one(
            rules, motion, X, first, stop, new, own, bounds[s], w, v, warned, out, used, ()
        )
        reached[s] = stream == stop

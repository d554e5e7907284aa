"""Losses, weightings, curvatures and predictions in the logits of each sample, compiled.

The closed forms are those of losses.py, expansion.py, weighting.py, curvature.py and prediction.py.
A loss is a list of terms (kind, parameter, coefficient), a weighting a list of gates (kind, β,
fraction); plan.py makes these lists. Plain loops over few arrays, for these compile fast.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba

from driftfilter.compiled.terms import (
    BOUNDED_RATIO,
    ENTROPY,
    FLOOR,
    GAUSS_NEWTON,
    GENERALIZED,
    INFORMATION,
    PAIRWISE,
    PSEUDO_LABEL,
    RELIABILITY,
    TEMPERED,
    TINY,
    WEIGHTED_GATE,
    Floats,
    Rules,
)
from driftfilter.model.weighting import TIE

Call = TypeVar("Call", bound=Callable[..., Any])

# Sums may be reordered, to use vector registers; NaN and infinity keep their meaning, the checks
# rely on it. Without _nrt no references are counted (two atomic operations for each view of an
# array): kernels make no arrays, callers hold them.
_OPTIONS: Any = {
    "_nrt": False,
    "nogil": True,
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
    "error_model": "numpy",
}

# Rows of the workspace w [n, 7, k] of a batch: logits at the prior mean, log p, p, gradient u, u +
# b (expansion.separable), logits at the mean to predict from, and anything
F, LOGP, P, U, V, G, ANY = range(7)


@cache
def _forget_stale(folder: str) -> None:
    """Remove compiled code that is older than a source of the kernels: numba looks at the file of
    the outermost one only.
    """
    sources = list(Path(__file__).parent.glob("*.py"))
    newest = max(source.stat().st_mtime for source in sources)
    for kept in (
        file for source in sources for file in Path(folder).glob(f"{source.stem}.*.nb[ic]")
    ):
        with contextlib.suppress(OSError):  # another process did it, or nobody may
            if kept.stat().st_mtime < newest:
                kept.unlink()


def compiled(function: Call) -> Call:
    """A part of a kernel; only what Python itself calls needs a way in from there (``kernel``)."""
    return _compiled(function, forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def part(function: Call) -> Call:
    """The same, compiled on its own and put into the kernel by LLVM: that takes much less time than
    ``compiled``.
    """
    options: Any = {"forceinline": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    made: Call = numba.njit(**options, **_OPTIONS)(function)
    return made


def kernel(function: Call) -> Call:
    """Compiled to machine code at the first call, kept on disk for later processes where a folder
    can be written.
    """
    return _compiled(function, no_cfunc_wrapper=True)


def _compiled(function: Call, **options: Any) -> Call:
    options |= _OPTIONS
    try:
        made: Any = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder for the cache
        made = numba.njit(**options)(function)
    else:
        _forget_stale(made.stats.cache_path)
    kernel: Call = made
    return kernel


def columns(k: int) -> int:
    """Columns of a metric's root: two classes have one direction."""
    return 1 if k == 2 else k


@compiled
def log_softmax(w: Floats, i: int, row: int) -> None:
    """log p and p of sample i from the logits in a row of the workspace."""
    k = w.shape[2]
    top, total, one = w[i, row, 0], w.dtype.type(0), w.dtype.type(1)
    for c in range(1, k):
        top = max(top, w[i, row, c])
    for c in range(k):
        w[i, P, c] = math.exp(w[i, row, c] - top)
        total += w[i, P, c]
    norm, share = top + math.log(total), one / total
    for c in range(k):
        w[i, LOGP, c] = w[i, row, c] - norm
        w[i, P, c] *= share


@compiled
def weigh(rules: Rules, w: Floats, n: int, out: Floats, start: int) -> int:
    """w_i and w_i / n of the samples from their log-probabilities; returns how many have a
    weight.
    """
    k, used = w.shape[2], 0
    looks = rules.gates.shape[0] > 0 or rules.masked
    largest = math.log(max(k, 2)) if looks else 1.0
    for i in range(n):
        weight, entropy, top = rules.beta, 0.0, 0.0
        for c in range(k if looks else 0):
            top = max(top, w[i, P, c])
            entropy -= w[i, P, c] * max(w[i, LOGP, c], FLOOR)
        for g in range(rules.gates.shape[0]):
            beta, margin = rules.gates[g, 1], rules.gates[g, 2] * largest - entropy
            if rules.gates[g, 0] == RELIABILITY:
                sure = 1 - entropy / largest
                weight *= beta * sure if sure > TIE else 0.0
            elif margin > 0:
                weight *= beta * (math.exp(margin) if rules.gates[g, 0] == WEIGHTED_GATE else 1.0)
            else:
                weight = 0.0
        confident = not rules.masked
        for t in range(rules.terms.shape[0] if rules.masked else 0):
            confident = confident or top >= rules.terms[t, 1]
        out[start + i, 2 * k + 1] = weight if confident else 0.0
        used += out[start + i, 2 * k + 1] != 0
    divisor = max(used if rules.kept else n, rules.reference, 1)
    for i in range(n):
        out[start + i, 2 * k + 2] = out[start + i, 2 * k + 1] / divisor
    return used


@compiled
def _information(w: Floats, n: int, out: Floats, start: int, coefficient: float) -> None:
    """-KL(p_i ‖ p̄) of every sample, p̄ the weighted mean prediction of the batch."""
    k = w.shape[2]
    total = TINY
    for i in range(n):
        total += out[start + i, 2 * k + 1]
    for c in range(k):
        mean = 0.0
        for i in range(n):
            mean += out[start + i, 2 * k + 1] / total * w[i, P, c]
        level = max(math.log(mean), FLOOR) if mean > 0 else FLOOR
        for i in range(n):
            p = w[i, P, c]
            term = coefficient * p * (level - max(w[i, LOGP, c], FLOOR))
            w[i, U, c] += term
            w[i, V, c] += coefficient * (
                out[start + i, 2 * k + 1] / total * p * p / max(mean, TINY) - p
            )
            out[start + i, 2 * k] += term


@compiled
def _labelled(w: Floats, i: int, kind: int, number: float, coefficient: float) -> float:
    """Terms of the most likely class alone: pseudo-label and generalised cross-entropy; returns the
    value.
    """
    top = 0
    for c in range(w.shape[2]):
        top = c if w[i, F, c] > w[i, F, top] else top
    logp = max(w[i, LOGP, top], FLOOR)
    if kind == GENERALIZED:
        power = coefficient * math.exp(number * logp)
        w[i, U, top] -= power
        w[i, V, top] += (1 - number) * power
        return -coefficient * math.expm1(number * logp) / number
    if w[i, P, top] < number:
        w[i, ANY, 0] -= coefficient  # not a part of the curvature from the model alone
        return 0.0
    w[i, U, top] -= coefficient
    w[i, V, top] += coefficient
    return float(-coefficient * logp)


@compiled
def expand(rules: Rules, w: Floats, n: int, out: Floats, start: int) -> None:
    """ℓ_i, its gradient u in the logits, v = u + b, and (in ANY) what it counts in a curvature from
    the model alone.
    """
    k = w.shape[2]
    for i in range(n):
        out[start + i, 2 * k] = 0.0
        w[i, ANY, 0] = 0.0
        for c in range(k):
            w[i, U, c] = 0.0
            w[i, V, c] = 0.0
    for t in range(rules.terms.shape[0]):
        kind, number, coefficient = int(rules.terms[t, 0]), rules.terms[t, 1], rules.terms[t, 2]
        if kind == INFORMATION:
            _information(w, n, out, start, coefficient)
        for i in range(n):
            w[i, ANY, 0] += coefficient
            if kind in (PSEUDO_LABEL, GENERALIZED):
                out[start + i, 2 * k] += _labelled(w, i, kind, number, coefficient)
            elif kind == ENTROPY:
                own, floor, total = w.dtype.type(coefficient), w.dtype.type(FLOOR), w.dtype.type(0)
                for c in range(k):
                    term = -own * w[i, P, c] * max(w[i, LOGP, c], floor)
                    w[i, U, c] += term
                    w[i, V, c] -= own * w[i, P, c]
                    total += term
                out[start + i, 2 * k] += total
            elif kind == BOUNDED_RATIO:
                for c in range(k):
                    p = min(w[i, P, c], number)
                    odds = p / (1 - p) + 1e-5
                    out[start + i, 2 * k] -= coefficient * p * math.log(odds)
                    if w[i, P, c] < number:
                        slope = 1 / ((1 - p) * (1 - p))
                        rate = slope / odds
                        w[i, U, c] -= coefficient * p * (math.log(odds) + p * rate)
                        bend = 2 * rate + p * (2 * slope / (1 - p) / odds - rate * rate)
                        w[i, V, c] -= coefficient * p * p * bend
    for i in range(n):
        whole = w.dtype.type(0)
        for c in range(k):
            whole += w[i, U, c]
        for c in range(k):
            w[i, U, c] -= w[i, P, c] * whole
            w[i, V, c] += w[i, U, c]


@compiled
def roots(rules: Rules, w: Floats, n: int, root: Floats, square: Floats) -> None:
    """R_i [k, r], R_i R_iᵀ the clipped Hessian or the softmax metric, of every sample."""
    k = w.shape[2]
    for i in range(n):
        if rules.curvature == GAUSS_NEWTON:
            scale = math.sqrt(w[i, ANY, 0])
            if k == 2:
                root[i, 0, 0] = scale * math.sqrt(w[i, P, 0] * w[i, P, 1])
                root[i, 1, 0] = -root[i, 0, 0]
            else:
                for c in range(k):
                    for e in range(k):
                        own = math.sqrt(w[i, P, e])
                        root[i, c, e] = scale * ((own if c == e else 0.0) - w[i, P, c] * own)
            continue
        bend = 0.0  # Σb
        for c in range(k):
            bend += w[i, V, c] - w[i, U, c]
        if k == 2:
            for c in range(2):
                p, v = w[i, P, c], w[i, V, c]
                root[i, c, 0] = (1 - 2 * c) * math.sqrt(max(v - 2 * p * (v - 0.5 * p * bend), 0.0))
            continue
        for c in range(k):
            for e in range(k):
                p, q = w[i, P, c], w[i, P, e]
                square[0, c, e] = p * q * bend - w[i, V, c] * q - w[i, V, e] * p
            square[0, c, c] += w[i, V, c]
        _positive_root(square, root, i)


@compiled
def _positive_root(square: Floats, root: Floats, i: int) -> None:
    """R with R Rᵀ = the positive part of square[0], which is used up: cyclic Jacobi rotations."""
    k = square.shape[1]
    for c in range(k):
        for e in range(k):
            square[1, c, e] = 1.0 if c == e else 0.0
    for _ in range(50):
        off, size = 0.0, 0.0
        for c in range(k):
            size += square[0, c, c] * square[0, c, c]
            for e in range(c):
                off += square[0, c, e] * square[0, c, e]
        if not off > 1e-34 * size:
            break
        for c in range(k - 1):
            for e in range(c + 1, k):
                if square[0, c, e] != 0:
                    _rotate(square, c, e)
    for e in range(k):
        length = math.sqrt(max(square[0, e, e], 0.0))
        for c in range(k):
            root[i, c, e] = square[1, c, e] * length


@compiled
def _rotate(square: Floats, c: int, e: int) -> None:
    """One Jacobi rotation, which makes square[0, c, e] zero; square[1] collects the
    eigenvectors.
    """
    slope = (square[0, e, e] - square[0, c, c]) / (2 * square[0, c, e])
    tangent = (1.0 if slope >= 0 else -1.0) / (abs(slope) + math.sqrt(slope * slope + 1))
    cosine = 1 / math.sqrt(tangent * tangent + 1)
    sine = tangent * cosine
    for part in range(2):
        for j in range(square.shape[1]):
            one, other = square[part, j, c], square[part, j, e]
            square[part, j, c] = cosine * one - sine * other
            square[part, j, e] = sine * one + cosine * other
    for j in range(square.shape[1]):
        one, other = square[0, c, j], square[0, e, j]
        square[0, c, j] = cosine * one - sine * other
        square[0, e, j] = sine * one + cosine * other


@compiled
def predict(
    rules: Rules, w: Floats, i: int, row: int, square: Floats, out: Floats, start: int
) -> bool:
    """log p(y given x) and logit variances of sample i from a row of logits and their covariance
    square[0]; whether finite.
    """
    k, temperature = w.shape[2], w.dtype.type(rules.temperature)
    constant = w.dtype.type(4 / math.pi * max(rules.temperature * rules.temperature - 1, 0.0))
    for c in range(k):
        if rules.prediction == TEMPERED:
            out[start + i, k + c] = constant
            w[i, ANY, c] = w[i, row, c] / temperature
        else:
            out[start + i, k + c] = max(square[0, c, c], 0.0)
            w[i, ANY, c] = w[i, row, c] / math.sqrt(1 + math.pi / 8 * out[start + i, k + c])
    if rules.prediction == PAIRWISE:
        _pairwise(w, i, row, square, out, start)
    log_softmax(w, i, ANY)
    total = w.dtype.type(0)
    for c in range(k):
        out[start + i, c] = w[i, LOGP, c]
        total += w[i, LOGP, c]
    return math.isfinite(total)


@compiled
def _pairwise(w: Floats, i: int, row: int, square: Floats, out: Floats, start: int) -> None:
    """Scores -log Σ_j exp(-κ(V_cc + V_jj - 2 V_cj) (f_c - f_j)) of the classes."""
    k = w.shape[2]
    for c in range(k):
        largest, total = 0.0, 0.0  # the exponent of c itself is 0
        for e in range(k):
            spread = max(out[start + i, k + c] + out[start + i, k + e] - 2 * square[0, c, e], 0.0)
            square[1, 0, e] = (w[i, row, e] - w[i, row, c]) / math.sqrt(1 + math.pi / 8 * spread)
            largest = max(largest, square[1, 0, e])
        for e in range(k):
            total += math.exp(square[1, 0, e] - largest)
        w[i, ANY, c] = -largest - math.log(total)

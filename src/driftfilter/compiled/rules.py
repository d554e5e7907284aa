"""Losses, weightings, curvatures and predictions in the logits of each sample, compiled.

Closed forms are those of model/closed_forms.py, compiled from the same code (``compile_rule``). A
loss is a list of terms (kind, parameter, coefficient), a weighting a list of gates (kind, β,
fraction); plan.py makes these lists. Plain loops over few arrays, for these compile fast.
"""

import contextlib
import gc
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import numba
from numba.core.codegen import CPUCodeLibrary, JITCPUCodegen

from driftfilter.compiled.cache import KernelCache
from driftfilter.compiled.terms import (
    BOUNDED_RATIO,
    ENTROPY,
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
from driftfilter.model import closed_forms, sticky_chain
from driftfilter.model.closed_forms import FLOOR

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
    shared = [Path(closed_forms.__file__), Path(sticky_chain.__file__)]
    sources = [*Path(__file__).parent.glob("*.py"), *shared]
    newest = max(source.stat().st_mtime for source in sources)
    for kept in (
        file for source in sources for file in Path(folder).glob(f"{source.stem}.*.nb[ic]")
    ):
        with contextlib.suppress(OSError):  # another process did it, or nobody may
            if kept.stat().st_mtime < newest:
                kept.unlink()


def _leave_parts_to_kernels() -> None:
    """Numba optimises each part with all that it calls and makes machine code of it, as if somebody
    called it by itself, and then the kernel with all of it again, at every depth. Parts go into
    kernels as they are.
    """
    optimize: Any = CPUCodeLibrary._optimize_final_module
    emit: Any = CPUCodeLibrary._finalize_final_module
    connect: Any = JITCPUCodegen.set_env

    def optimize_kernel(library: Any) -> None:
        if not library.name.startswith(_PART):
            optimize(library)

    def emit_kernel(library: Any) -> None:
        if library.name.startswith(_PART):
            library._finalize_dynamic_globals()
            library._finalized = True
        else:
            emit(library)

    def connect_kernel(codegen: Any, name: str, environment: Any) -> None:
        if codegen._engine.get_global_value_address(name):  # of a part there is none
            connect(codegen, name, environment)

    CPUCodeLibrary._optimize_final_module = optimize_kernel  # type: ignore[method-assign]
    CPUCodeLibrary._finalize_final_module = emit_kernel  # type: ignore[method-assign]
    JITCPUCodegen.set_env = connect_kernel  # type: ignore[method-assign]


_PART = "driftfilter part "
_leave_parts_to_kernels()


def part(function: Call) -> Call:
    """A part of kernels, put into them by LLVM; Python itself has no way in."""
    function.__qualname__ = _PART + function.__qualname__  # no other library has such a name
    options: Any = {"forceinline": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    made: Call = numba.njit(**options, **_OPTIONS)(function)
    return made


def _without_collections(work: Callable[..., Any]) -> Callable[..., Any]:
    """Call without the garbage collector: a compilation makes millions of objects that stay until
    its end.
    """

    def quiet(*arguments: Any) -> Any:
        was_on = gc.isenabled()
        gc.disable()
        try:
            return work(*arguments)
        finally:
            if was_on:
                gc.enable()

    return quiet


def kernel(function: Call) -> Call:
    """A kernel: compiled to machine code at the first call, and kept on disk for later processes if
    a folder can be written.
    """
    options: Any = {"no_cfunc_wrapper": True, **_OPTIONS}
    made: Any = numba.njit(**options)(function)
    made.compile = _without_collections(made.compile)
    with contextlib.suppress(RuntimeError, OSError):  # no folder for the cache
        made._cache = KernelCache(function)
        _forget_stale(made.stats.cache_path)
    kernel: Call = made
    return kernel


@part
def _addcmul(x: float, a: float, b: float, value: float) -> float:
    return x + type(x)(value) * a * b  # in the precision of x


@part
def _where(condition: bool, one: float, other: float) -> float:
    return one if condition else other


@part
def _rsqrt(x: float) -> float:
    return 1 / math.sqrt(x)


def compile_rule(rule: Any, **own: Any) -> Any:
    """The code of a closed form for single numbers; ``own``: other functions than math's."""
    names = {"addcmul": _addcmul, "where": _where, "rsqrt": _rsqrt, "expm1": math.expm1}
    names |= {"clamp_min": max, "clamp_max": min, "exp": math.exp, "log": math.log}
    return part(FunctionType(rule.__code__, {**rule.__globals__, **names, **own}, rule.__name__))


_center, _bend = compile_rule(closed_forms.center), compile_rule(closed_forms.bend)
_entropy = compile_rule(closed_forms.entropy)
_cross_entropy = compile_rule(closed_forms.cross_entropy)
_generalized = compile_rule(closed_forms.generalized_cross_entropy)
_generalized_value = compile_rule(closed_forms.generalized_value)
_ratio = compile_rule(closed_forms.bounded_likelihood_ratio)
_information = compile_rule(closed_forms.information)
_certainty, _gate = compile_rule(closed_forms.certainty), compile_rule(closed_forms.gate)
_kappa = compile_rule(closed_forms.kappa)


def columns(k: int) -> int:
    """Columns of a metric's root: two classes have one direction."""
    return 1 if k == 2 else k


@part
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


@part
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
            entropy += _entropy(w[i, P, c], max(w[i, LOGP, c], FLOOR))[0]
        for g in range(rules.gates.shape[0]):
            kind, beta, fraction = rules.gates[g]
            if kind == RELIABILITY:
                weight *= beta * _certainty(entropy, largest)
            else:
                sharpness = 1.0 if kind == WEIGHTED_GATE else 0.0
                weight *= beta * _gate(fraction * largest - entropy, sharpness)
        confident = not rules.masked
        for t in range(rules.terms.shape[0] if rules.masked else 0):
            confident = confident or top >= rules.terms[t, 1]
        out[start + i, 2 * k + 1] = weight if confident else 0.0
        used += out[start + i, 2 * k + 1] != 0
    divisor = max(used if rules.kept else n, rules.reference, 1)
    for i in range(n):
        out[start + i, 2 * k + 2] = out[start + i, 2 * k + 1] / divisor
    return used


@part
def _maximize(w: Floats, n: int, out: Floats, start: int, coefficient: float) -> None:
    """-KL(p_i ‖ p̄) of every sample, p̄ the weighted mean prediction of the batch."""
    k = w.shape[2]
    total = TINY
    for i in range(n):
        total += out[start + i, 2 * k + 1]
    for c in range(k):
        mean = 0.0
        for i in range(n):
            mean += out[start + i, 2 * k + 1] / total * w[i, P, c]
        for i in range(n):
            share, logp = out[start + i, 2 * k + 1] / total, max(w[i, LOGP, c], FLOOR)
            first, second = _information(w[i, P, c], logp, share, mean, TINY)
            w[i, U, c] += coefficient * first
            w[i, V, c] += coefficient * second
            out[start + i, 2 * k] += coefficient * first


@part
def _label(w: Floats, i: int, kind: int, number: float, coefficient: float) -> float:
    """Add a term of the most likely class alone, a pseudo-label or generalised cross-entropy, and
    return its value.
    """
    top = 0
    for c in range(w.shape[2]):
        top = c if w[i, F, c] > w[i, F, top] else top
    logp = max(w[i, LOGP, top], FLOOR)
    if kind == GENERALIZED:
        value = _generalized_value(logp, number)
        first, second = _generalized(logp, number)
    else:
        target = 1.0 if w[i, P, top] >= number else 0.0
        value, first, second = _cross_entropy(logp, target)
        w[i, ANY, 0] -= coefficient * (1 - target)  # no part of a curvature from the model alone
    w[i, U, top] += coefficient * first
    w[i, V, top] += coefficient * second
    return float(coefficient * value)


@part
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
            _maximize(w, n, out, start, coefficient)
        for i in range(n):
            w[i, ANY, 0] += coefficient
            if kind in (PSEUDO_LABEL, GENERALIZED):
                out[start + i, 2 * k] += _label(w, i, kind, number, coefficient)
            elif kind == ENTROPY:
                own, floor, total = w.dtype.type(coefficient), w.dtype.type(FLOOR), w.dtype.type(0)
                for c in range(k):
                    first, second = _entropy(w[i, P, c], max(w[i, LOGP, c], floor))
                    w[i, U, c] += own * first
                    w[i, V, c] += own * second
                    total += own * first
                out[start + i, 2 * k] += total
            elif kind == BOUNDED_RATIO:
                for c in range(k):
                    value, first, second = _ratio(w[i, P, c], number)
                    out[start + i, 2 * k] += coefficient * value
                    w[i, U, c] += coefficient * first
                    w[i, V, c] += coefficient * second
    for i in range(n):
        whole = w.dtype.type(0)
        for c in range(k):
            whole += w[i, U, c]
        for c in range(k):
            w[i, U, c] = _center(w[i, U, c], w[i, P, c], whole)
            w[i, V, c] += w[i, U, c]


@part
def roots(rules: Rules, w: Floats, n: int, root: Floats | None, square: Floats) -> None:
    """R_i [k, r], R_i R_iᵀ the clipped Hessian or the softmax metric, of every sample; None if the
    curvature is neither.
    """
    if root is None:
        return
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
        total = 0.0  # Σb
        for c in range(k):
            total += w[i, V, c] - w[i, U, c]
        if k == 2:
            for c in range(2):
                curvature = max(_bend(w[i, V, c], w[i, P, c], total), 0.0)
                root[i, c, 0] = (1 - 2 * c) * math.sqrt(curvature)
            continue
        for c in range(k):
            for e in range(k):
                p, q = w[i, P, c], w[i, P, e]
                square[0, c, e] = p * q * total - w[i, V, c] * q - w[i, V, e] * p
            square[0, c, c] += w[i, V, c]
        _positive_root(square, root, i)


@part
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


@part
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


@part
def predict(
    rules: Rules, w: Floats, i: int, row: int, square: Floats, out: Floats, start: int
) -> bool:
    """log p(y given x) and logit variances of sample i from a row of logits and their covariance
    square[0]; whether finite.
    """
    k, temperature = w.shape[2], w.dtype.type(rules.temperature)
    for c in range(k):
        if rules.prediction == TEMPERED:
            out[start + i, k + c] = rules.variance
            w[i, ANY, c] = w[i, row, c] / temperature
        else:
            out[start + i, k + c] = max(square[0, c, c], 0.0)
            w[i, ANY, c] = _kappa(out[start + i, k + c]) * w[i, row, c]
    if rules.prediction == PAIRWISE:
        _pairwise(w, i, row, square, out, start)
    log_softmax(w, i, ANY)
    total = w.dtype.type(0)
    for c in range(k):
        out[start + i, c] = w[i, LOGP, c]
        total += w[i, LOGP, c]
    return math.isfinite(total)


@part
def _pairwise(w: Floats, i: int, row: int, square: Floats, out: Floats, start: int) -> None:
    """Scores -log Σ_j exp(-κ(V_cc + V_jj - 2 V_cj) (f_c - f_j)) of the classes."""
    k = w.shape[2]
    for c in range(k):
        largest, total = 0.0, 0.0  # the exponent of c itself is 0
        for e in range(k):
            spread = max(out[start + i, k + c] + out[start + i, k + e] - 2 * square[0, c, e], 0.0)
            square[1, 0, e] = _kappa(spread) * (w[i, row, e] - w[i, row, c])
            largest = max(largest, square[1, 0, e])
        for e in range(k):
            total += math.exp(square[1, 0, e] - largest)
        w[i, ANY, c] = -largest - math.log(total)

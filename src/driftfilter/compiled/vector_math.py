"""What LLVM does beyond numba: exp and log in vector registers, arrays in registers, memory asked
for ahead of its use.

exp and log have no branches or calls, so that loops over them use vector registers; the C library's
take one number at a time. They are right to two units in the last place for what kernels ask of
them: exp of finite numbers below 709 (under -708 it stays at 3e-308), log of normal positive
numbers. What is not finite is for the caller to find.
"""

import math
from typing import Any

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from driftfilter.compiled.rules import part
from driftfilter.compiled.terms import Numbers

_LN2 = (
    0.693147180369123816490,
    1.90821492927058770002e-10,
)  # ln 2 in two parts, the first short: n times it is exact
# 1.5 · 2⁵²: a small number added to it is rounded to a whole one, in its last bits
_WHOLE = 6755399441055744.0
_ROOT_HALF = 0x3FE6A09E667F3BCD  # bits of √½
_EXP = tuple(
    1 / math.factorial(power) for power in range(14)
)  # on |r| <= ln 2 / 2 the next term is 4e-18
_LOG = tuple(2 / power for power in range(23, 1, -2))  # of 2 artanh(s) / s - 2 in s², |s| <= 0.172

# Flags of its own, which a caller's do not overrule: sums must not be reordered here.
_OPTIONS: Any = {"forceinline": True, "fastmath": {"contract"}, "error_model": "numpy"}
_OPTIONS |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


@intrinsic
def _reinterpreted(typing: Any, value: Any) -> Any:
    """The bits of a float64 as an int64, and the other way round."""
    whole = value == types.float64
    result, kind = (types.int64, ir.IntType(64)) if whole else (types.float64, ir.DoubleType())

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], kind)

    return result(value), generate


_bits: Any = _reinterpreted  # called with the value alone


@numba.njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def exp(x: float) -> float:
    """eˣ = 2ⁿ eʳ, r = x - n ln 2."""
    x = max(x, -708.0)
    shifted = x * 1.4426950408889634 + _WHOLE
    n = shifted - _WHOLE
    r = (x - n * _LN2[0]) - n * _LN2[1]
    r2 = r * r
    r4 = r2 * r2
    # In pairs, pairs of pairs, and so on: one power after the other would take as many latencies as
    # there are powers.
    low = (_EXP[0] + _EXP[1] * r) + (_EXP[2] + _EXP[3] * r) * r2
    middle = (_EXP[4] + _EXP[5] * r) + (_EXP[6] + _EXP[7] * r) * r2
    high = (_EXP[8] + _EXP[9] * r) + (_EXP[10] + _EXP[11] * r) * r2
    value = (low + middle * r4) + (high + (_EXP[12] + _EXP[13] * r) * r4) * (r4 * r4)
    scale: float = _bits((_bits(shifted) - _bits(_WHOLE) + 1023) << 52)
    return value * scale


@numba.njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def log(x: float) -> float:
    """ln x = n ln 2 + 2 artanh s, s = (m - 1) / (m + 1), for x = m 2ⁿ with m in [√½, √2)."""
    power = (_bits(x) - _ROOT_HALF) >> 52
    m = _bits(_bits(x) - (power << 52))
    n = _bits(power + _bits(_WHOLE)) - _WHOLE
    s = (m - 1) / (m + 1)
    square, value = s * s, 0.0
    for coefficient in _LOG:
        value = value * square + coefficient
    return float(n * _LN2[0] + (2 * s + (s * square * value + n * _LN2[1])))


@intrinsic
def _local(typing: Any, rows: Any, like: Any) -> Any:
    """An array [rows, len(like)] of a kernel's own; rows 0: as many as columns."""
    if not isinstance(rows, types.IntegerLiteral):
        return None  # numba asks again, with the number
    columns = len(like)
    shape = (rows.literal_value or columns, columns)
    kind = types.Array(types.float64, 2, "C")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number, whole = ir.DoubleType(), ir.IntType(64)
        block = cgutils.alloca_once(builder, ir.ArrayType(number, shape[0] * shape[1]))  # type: ignore[no-untyped-call]
        data = builder.bitcast(block, number.as_pointer())
        array = context.make_array(kind)(context, builder)
        context.populate_array(
            array,
            data=data,
            shape=[whole(size) for size in shape],
            strides=[whole(8 * columns), whole(8)],
            itemsize=whole(8),
            meminfo=None,
        )
        return array._getvalue()

    return kind(rows, like), generate


# Called with a literal and a tuple. What nobody else can reach, LLVM holds in registers if all
# places are constant: no step then waits for what the last one has stored.
local: Any = _local


@intrinsic
def _prefetched(typing: Any, row: Any, j: Any) -> Any:
    """Ask for the bytes around row[j], and do not wait for them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address, whole = (
            builder.bitcast(builder.gep(data, arguments[1:]), cgutils.voidptr_t),
            ir.IntType(32),
        )
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, whole, whole, whole])
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")  # type: ignore[no-untyped-call]
        builder.call(call, [address, whole(0), whole(3), whole(1)])  # to read, in every cache, data
        return context.get_dummy_value()

    return types.void(row, j), generate


_ask: Any = _prefetched  # called with the values alone


@part
def fetch(row: Numbers, begin: int, end: int) -> None:
    """Ask for row[begin:end], as far as the row goes.

    Processors guess what comes next along an array, but not that another stream does. Ask for a
    few lines at a time, for memory answers so many at once.
    """
    for j in range(begin, min(end, row.shape[0]), 16 if row.itemsize == 4 else 8):  # a cache line
        _ask(row, j)

"""Memory ahead of its use: processors guess what comes next along an array, but not that another
stream does.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from driftfilter.compiled.rules import compiled
from driftfilter.compiled.terms import Numbers


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


@compiled
def fetch(row: Numbers, begin: int, end: int) -> None:
    """Ask for row[begin:end], as far as the row goes. A few lines at a time: what is asked of
    memory at once is limited.
    """
    for j in range(begin, min(end, row.shape[0]), 16 if row.itemsize == 4 else 8):  # a cache line
        _ask(row, j)

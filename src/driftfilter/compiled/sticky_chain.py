"""The passes of model/sticky_chain.py and model/class_shares.py in compiled code if numba is
installed, else as they are there.
"""

from functools import cache
from importlib.util import find_spec

import numpy as np

from driftfilter.compiled.plan import give_up, is_working
from driftfilter.model import sticky_chain
from driftfilter.model.class_shares import count_up_by_rows
from driftfilter.model.sticky_chain import Array, Passes, Stickiness


def smooth(start: Array, likelihood: Array, drawn: Array, sticky: Stickiness) -> Passes:
    """``sticky_chain.smooth``: both passes from p(s_0, z_0) [j, k], with l [n, k] and w · l
    [n, k].
    """
    if _can_compile():
        try:
            return _smooth(start, likelihood, drawn, sticky)
        except Exception as error:
            give_up(error)
    return sticky_chain.smooth(start, likelihood, drawn, sticky)


def count_up(filled: Array, p: Array, weights: Array) -> Array:
    """``class_shares.count_up_by_rows``."""
    if _can_compile():
        before = filled.copy()
        try:
            return _count_up(filled, p, weights)
        except Exception as error:
            give_up(error)
            filled[:] = before
    return count_up_by_rows(filled, p, weights)


@cache
def _has_numba() -> bool:
    return find_spec("numba") is not None


def _can_compile() -> bool:
    return _has_numba() and is_working()


def _count_up(filled: Array, p: Array, weights: Array) -> Array:
    from driftfilter.compiled.sticky_kernels import run_count

    chances = np.empty((len(p), 2))
    run_count(filled, np.ascontiguousarray(p), np.ascontiguousarray(weights), chances)
    return chances


def _smooth(start: Array, likelihood: Array, drawn: Array, sticky: Stickiness) -> Passes:
    from driftfilter.compiled.sticky_kernels import run_backward, run_forward

    (n, k), j = likelihood.shape, len(start)
    found = Passes(np.empty((n, j, k)), np.empty(n), np.empty((n, k)))
    arrays = (likelihood, drawn, sticky.values, sticky.shares)
    likelihood, drawn, values, shares = (np.ascontiguousarray(each) for each in arrays)
    begin, beta, column = np.ascontiguousarray(start), np.empty((j, k)), np.empty(k)
    chain = (likelihood, drawn, values, shares, float(sticky.switch))
    run_forward(begin, *chain, found.filtered, found.evidence, column)
    run_backward(found.filtered, found.evidence, *chain, found.smoothed, beta, column)
    return found

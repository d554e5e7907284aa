"""The passes of model/sticky_chain.py in compiled code if numba is installed, else as they are
there.
"""

from importlib.util import find_spec

import numpy as np

from driftfilter.compiled.plan import give_up, is_working
from driftfilter.model import sticky_chain
from driftfilter.model.sticky_chain import Array, Passes, Stickiness


def smooth(start: Array, likelihood: Array, drawn: Array, sticky: Stickiness) -> Passes:
    """``sticky_chain.smooth``: both passes from p(s_0, z_0) [j, k], with l [n, k] and w · l
    [n, k].
    """
    if find_spec("numba") is not None and is_working():
        try:
            return _smooth(start, likelihood, drawn, sticky)
        except Exception as error:
            give_up(error)
    return sticky_chain.smooth(start, likelihood, drawn, sticky)


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

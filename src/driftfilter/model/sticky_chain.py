"""A hidden state that stays for a while, how long being hidden as well: exact passes over a batch.

    stickiness   s_t = s_{t-1}, or with probability ε a new one, drawn from ρ
    state        z_t = z_{t-1} with probability s_t, else drawn from w_t
    evidence     l_t(z_t) ∝ p(x_t given z_t)

What the states are is for the caller to know: labels (label_chain.py), or anything else that
lasts. The two rules below are written once for whole arrays and for compiled code
(compiled/sticky_kernels.py).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


class Stickiness(NamedTuple):
    """What s may be, and how it moves."""

    values: Array  # s [j]
    shares: Array  # ρ [j]
    switch: float  # ε


class Passes(NamedTuple):
    """What a batch of n samples tells of the states."""

    filtered: Array  # p(s_t, z_t given x_1, …, x_t) [n, j, k]
    evidence: Array  # p(x_t given x_1, …, x_{t-1}) [n], in the unit of l
    smoothed: Array  # p(z_t given all samples) [n, k]


Smoother: TypeAlias = Callable[[Array, Array, Array, Stickiness], Passes]


def keep_or_switch(own: Any, anew: Any, switch: float) -> Any:
    """(1 - ε) own + anew; anew has ε in it."""
    return (1 - switch) * own + anew


def stay_or_leave(stays: Any, own: Any, likelihood: Any, left: Any) -> Any:
    """s · own · l + left; left is what comes by another draw."""
    return stays * own * likelihood + left


def smooth(start: Array, likelihood: Array, drawn: Array, sticky: Stickiness) -> Passes:
    """Both passes from p(s_0, z_0) [j, k], with l [n, k] and w · l [n, k]."""
    filtered, evidence = forward(start, likelihood, drawn, sticky)
    smoothed = backward(filtered, evidence, likelihood, drawn, sticky)
    return Passes(filtered, evidence, smoothed)


def forward(
    start: Array, likelihood: Array, drawn: Array, sticky: Stickiness
) -> tuple[Array, Array]:
    """``Passes.filtered`` [n, j, k] and ``Passes.evidence`` [n], from p(s_0, z_0) [j, k], l [n, k]
    and w · l [n, k].
    """
    stays, leaves, anew = _columns(sticky)
    filtered, evidence = np.empty((len(likelihood), *start.shape)), np.empty(len(likelihood))
    for t in range(len(likelihood)):
        before = keep_or_switch(start, anew * start.sum(0), sticky.switch)
        left = leaves * before.sum(1, keepdims=True) * drawn[t]
        joint = stay_or_leave(stays, before, likelihood[t], left)
        evidence[t] = joint.sum()
        start = np.divide(joint, evidence[t], out=filtered[t])
    return filtered, evidence


def backward(
    filtered: Array, evidence: Array, likelihood: Array, drawn: Array, sticky: Stickiness
) -> Array:
    """``Passes.smoothed`` [n, k], from what ``forward`` has found."""
    stays, leaves, anew = _columns(sticky)
    beta = np.ones(filtered.shape[1:])  # p(samples after t given s_t, z_t), over their evidence
    smoothed = np.empty(likelihood.shape)
    for t in range(len(likelihood) - 1, -1, -1):
        smoothed[t] = (filtered[t] * beta).sum(0)
        left = leaves * (beta @ drawn[t])[:, None]
        ahead = stay_or_leave(stays, beta, likelihood[t], left)
        beta = keep_or_switch(ahead, (anew * ahead).sum(0), sticky.switch) / evidence[t]
    smoothed /= smoothed.sum(1, keepdims=True)
    return smoothed


def _columns(sticky: Stickiness) -> tuple[Array, Array, Array]:
    """s, 1 - s and ε ρ, each [j, 1]."""
    stays = sticky.values[:, None]
    return stays, 1 - stays, sticky.switch * sticky.shares[:, None]

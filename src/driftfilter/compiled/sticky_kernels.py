"""The two passes of model/sticky_chain.py, compiled: its rules in loops over single numbers."""

from driftfilter.compiled.rules import compile_rule, kernel
from driftfilter.compiled.terms import Floats
from driftfilter.model import sticky_chain

_keep_or_switch = compile_rule(sticky_chain.keep_or_switch)
_stay_or_leave = compile_rule(sticky_chain.stay_or_leave)


@kernel
def run_forward(
    start: Floats,
    likelihood: Floats,
    drawn: Floats,
    values: Floats,
    shares: Floats,
    switch: float,
    filtered: Floats,
    evidence: Floats,
    column: Floats,
) -> None:
    """``forward`` into filtered [n, j, k] and evidence [n]; column [k] is anything."""
    (n, k), j = likelihood.shape, len(values)
    for t in range(n):
        before = filtered[t - 1] if t > 0 else start
        for z in range(k):
            column[z] = 0.0
        for i in range(j):
            for z in range(k):
                column[z] += before[i, z]
        total = 0.0
        for i in range(j):
            anew, left = switch * shares[i], 0.0
            for z in range(k):
                filtered[t, i, z] = _keep_or_switch(before[i, z], anew * column[z], switch)
                left += filtered[t, i, z]
            left *= 1 - values[i]
            for z in range(k):
                filtered[t, i, z] = _stay_or_leave(
                    values[i], filtered[t, i, z], likelihood[t, z], left * drawn[t, z]
                )
                total += filtered[t, i, z]
        evidence[t] = total
        for i in range(j):
            for z in range(k):
                filtered[t, i, z] /= total


@kernel
def run_backward(
    filtered: Floats,
    evidence: Floats,
    likelihood: Floats,
    drawn: Floats,
    values: Floats,
    shares: Floats,
    switch: float,
    smoothed: Floats,
    beta: Floats,
    column: Floats,
) -> None:
    """``backward`` into smoothed [n, k]; beta [j, k] and column [k] are anything."""
    (n, k), j = likelihood.shape, len(values)
    for i in range(j):
        for z in range(k):
            beta[i, z] = 1.0
    for t in range(n - 1, -1, -1):
        for z in range(k):
            smoothed[t, z] = column[z] = 0.0
        for i in range(j):
            anew, left = switch * shares[i], 0.0
            for z in range(k):
                smoothed[t, z] += filtered[t, i, z] * beta[i, z]
                left += beta[i, z] * drawn[t, z]
            left *= 1 - values[i]
            for z in range(k):
                beta[i, z] = _stay_or_leave(values[i], beta[i, z], likelihood[t, z], left)
                column[z] += anew * beta[i, z]
        total = 0.0
        for z in range(k):
            total += smoothed[t, z]
        for z in range(k):
            smoothed[t, z] /= total
        for i in range(j):
            for z in range(k):
                beta[i, z] = _keep_or_switch(beta[i, z], column[z], switch) / evidence[t]


@kernel
def run_count(filled: Floats, p: Floats, weights: Floats, chances: Floats) -> None:
    """``class_shares.count_up_by_rows`` into chances [n, 2]."""
    n, k = p.shape
    for t in range(n):
        for i in range(2):
            chance = 0.0
            for z in range(k):
                chance += filled[i, z] * p[t, z]
            chances[t, i] = chance
            for z in range(k):
                filled[i, z] *= 1 + weights[t] / chance * p[t, z]

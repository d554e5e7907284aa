"""Whether labels come in runs, from predicted labels in the order of the stream.

    t = (21 (1 - ρ) / (21 - 19 ρ))²,   ρ = (A - S + ε) / (1 - S + ε),

A the share of neighbours in the stream with the same label, S = Σ q² what it would be if labels of
the same shares q came in random order. Runs of length L have ρ = 1 - 1/L or so; a biased
model in a shuffled stream has ρ = 0 however few classes it predicts; one label alone has ρ = 1.
20 samples a class tell as much about the shares of k classes as N = 20 k (1 - ρ) / (1 + ρ)
independent ones, and t is (N / (N + k))², over its value at ρ = 0.
"""

import torch
from torch import Tensor

from driftfilter.base.light import Number, Vector, clip, count, join, numbers, total

_MEMORY = 512  # samples whose labels are remembered, older ones fade
_PRIOR = 10.0  # labels of equal shares, and half as many pairs at chance, before the first sample
_ROUNDING = 0.01  # ε


def start_counts(classes: int, like: Tensor) -> Tensor:
    """No labels yet: counts [k], then pairs, equal pairs and the last label (-1: none)."""
    return torch.cat((like.new_zeros(classes + 2), like.new_full((1,), -1.0)))


def count_labels(counts: Vector, labels: Vector) -> Vector:
    """Counts [k + 3] with the labels [n] of one more batch."""
    n, classes = len(labels), len(counts) - 3
    fading = max(0.0, 1 - n / _MEMORY)
    last = counts[-1:]
    pairs = (last >= 0) + (n - 1)
    equal = (labels[:1] == last) + (labels[1:] == labels[:-1]).sum()
    new = join(count(labels, classes, counts), pairs, equal, like=counts)
    return join(fading * counts[:-1] + new, labels[-1:], like=counts)


def independence(counts: Vector, known: bool = False) -> Number:
    """t, a number in [0, 1]: how far shares of classes in a stream are those of the source.

    0 for two classes unless shares in the source are ``known``: rare events, fraud and rain have
    no equal shares.
    """
    if len(counts) - 3 <= 2 and not known:
        return 0.0 * numbers(counts)[0]
    return trust_in_shares(stickiness(counts))


def stickiness(counts: Vector) -> Number:
    """ρ, a number in [0, 1]."""
    classes = len(counts) - 3
    shares = counts[:classes] + _PRIOR / classes
    shares = shares / shares.sum()
    chance = total(shares * shares)
    pairs, equal = numbers(counts[classes : classes + 2])
    agreement = (equal + _PRIOR / 2 * chance) / (pairs + _PRIOR / 2)
    return clip((agreement - chance + _ROUNDING) / (1 - chance + _ROUNDING), 0.0, 1.0)


def trust_in_shares(rho: Number) -> Number:
    """t of runs with ρ: 1 in a shuffled stream, 0 if a label stays for ever."""
    return (21 * (1 - rho) / (21 - 19 * rho)) ** 2

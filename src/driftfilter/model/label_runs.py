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

_MEMORY = 512  # samples whose labels are remembered, older ones fade
_PRIOR = 10.0  # labels of equal shares, and half as many pairs at chance, before the first sample
_ROUNDING = 0.01  # ε


def start_counts(classes: int, like: Tensor) -> Tensor:
    """No labels yet: counts [k], then pairs, equal pairs and the last label (-1: none)."""
    return torch.cat((like.new_zeros(classes + 2), like.new_full((1,), -1.0)))


def count_labels(counts: Tensor, labels: Tensor) -> Tensor:
    """Counts [k + 3] with the labels [n] of one more batch."""
    n, classes = len(labels), len(counts) - 3
    fading = max(0.0, 1 - n / _MEMORY)
    last = counts[-1:]
    before = torch.cat((last, labels[:-1].to(last)))
    equal = before == labels
    new = counts.new_zeros(classes).scatter_add(
        0, labels, torch.ones_like(labels, dtype=last.dtype)
    )
    pairs = torch.stack(((before >= 0).sum(), equal.sum())).to(last)
    return torch.cat((fading * counts[:-1] + torch.cat((new, pairs)), labels[-1:].to(last)))


def independence(counts: Tensor, known: bool = False) -> Tensor:
    """t, a scalar [] in [0, 1]: how far shares of classes in a stream are those of the source.

    0 for two classes unless shares in the source are ``known``: rare events, fraud and rain have
    no equal shares.
    """
    classes = len(counts) - 3
    if classes <= 2 and not known:
        return torch.zeros_like(counts[0])
    shares = counts[:classes] + _PRIOR / classes
    shares = shares / shares.sum()
    chance = shares.square().sum()
    pairs, equal = counts[classes], counts[classes + 1]
    agreement = (equal + _PRIOR / 2 * chance) / (pairs + _PRIOR / 2)
    excess = (agreement - chance + _ROUNDING) / (1 - chance + _ROUNDING)
    rho = excess.clamp(0, 1)
    return (21 * (1 - rho) / (21 - 19 * rho)).square()

"""What a network that was trained on smoothed labels means by its probabilities.

Its targets were (1 - ε) 1[y] + ε/k. What fits them best says s = (1 - ε) p(y given x) + ε/k, is
never sure, and least so on data of its own; hence

    p(y given x) = (s_y - φ) / (1 - ε),   φ = ε/k

ε is seen in source data without labels. On the three quarters of them of which the network is
surest, what it gives to the other classes is the floor φ, give or take its noise: with m their mean
and g their geometric mean over samples and classes

    ε = k m   if g >= m/2 and k m <= 1/4, and there are five classes or more, else 0

A network trained on plain labels gives to other classes what they deserve, over orders of magnitude
(g/m of 0.01 to 0.2; 0.6 to 0.9 with smoothed labels). One that is unsure of all its data may give
to all alike, but much; with few classes that looks the same.

A noisy s may be below the floor. There q goes to 0 slowly, with value and slope of the line above:

    q = s - φ if s >= 3/2 φ, else φ/2 exp(2 s/φ - 3);   p = q / Σ q

s_y grows with p(y given x), so the most likely class is the same.
"""

import math

import torch
from torch import Tensor

_CLASSES = 5  # at least
_SURE = 0.75  # of the samples
_ALIKE = 0.5  # g/m
_MOST = 0.25  # ε
_TAIL = 0.5  # of the floor, above which the line begins


def find_smoothing(logits: Tensor) -> Tensor:
    """ε [] of a network by its logits [n, k] of source data."""
    k = logits.shape[-1]
    logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    none = logs.new_zeros(())
    if k < _CLASSES:
        return none
    best, label = logs.max(-1)
    sure = best >= best.quantile(1 - _SURE)
    is_other = torch.ones_like(logs, dtype=torch.bool).scatter(-1, label[:, None], False)
    others = logs[sure][is_other[sure]]
    mean, log_mean = others.exp().mean(), others.mean()
    found = (log_mean >= mean.log() + math.log(_ALIKE)) & (k * mean <= _MOST)
    return torch.where(found, k * mean, none)


def unsmooth(log_probabilities: Tensor, smoothing: Tensor) -> Tensor:
    """log p [n, k] of log s [n, k]; ε > 0 []."""
    floor = smoothing / log_probabilities.shape[-1]
    ratio = log_probabilities.exp() / floor  # s/φ
    line = (ratio - 1).clamp_min(_TAIL).log()
    tail = math.log(_TAIL) + (ratio - 1 - _TAIL) / _TAIL
    return torch.where(ratio >= 1 + _TAIL, line, tail).log_softmax(-1)

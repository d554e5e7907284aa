"""What was predicted lately against what was predicted before, in units that hold for any batch size and class count.

A summary of samples is a vector [k + 2]: how many were predicted to be of each class, Σ H_i and Σ H_i² of their predictive
entropies. Summaries add up; a window is a sum in which older batches fade.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

SHORT, LONG = 5, 50  # samples of a class in a window, on average: enough to compare shares, and to see them erode
LEAST = 64  # samples in a window, however few classes there are


class Evidence(NamedTuple):
    """How far windows are from the history, and -ln of the chance of that (at least; 0 where too few samples tell)."""

    signals: tuple[float, ...] = (math.nan,) * 4  # entropy lost, short and long; share gained; rise of uncertainty
    tails: tuple[float, ...] = (0.0,) * 4

    @classmethod
    def of(cls, found: dict[str, float], classes: int) -> Evidence:
        """From what ``compared`` found."""
        n, m = found["short"], found["past"]
        lost = [found[f"lost_{window}"] for window in ("short", "long")]
        tails = [
            improbability(found[f"g_{window}"], (classes - 1) / 2)
            if m >= short(classes) and found[window] >= wanted * classes and found[f"calmer_{window}"] >= 0
            else 0.0
            for window, wanted in (("short", SHORT), ("long", LONG / 2))
        ]
        one, rise = improbability(found["g_class"], 0.5) - math.log(classes), found["rise"]
        surprise = rise * abs(rise) / 2 * n * m / (n + m)
        tails += [one, surprise] if m >= LEAST else [0.0, 0.0]
        return cls((*lost, found["g_class"] / n, rise), tuple(tails))


def improbability(statistic: float, shape: float) -> float:
    """-ln P(X >= g) of X ~ Gamma(shape), half a χ² with 2 · shape degrees of freedom; from below, by Chernoff:

    g - a - a ln(g / a) for g > a, else 0.
    """
    if not statistic > shape or shape <= 0:
        return 0.0
    return statistic - shape - shape * math.log(statistic / shape)


def short(classes: int) -> int:
    """Samples in the short window."""
    return max(SHORT * classes, LEAST)


def summary(log_probabilities: Tensor) -> Tensor:
    """[k + 2]: samples by predicted class, Σ H_i, Σ H_i²."""
    counts = log_probabilities.new_zeros(log_probabilities.shape[1], dtype=torch.float64)
    labels = log_probabilities.argmax(-1)
    counts = counts.scatter_add(0, labels, counts.new_ones(len(labels)))
    certainty = _entropies(log_probabilities)
    return torch.cat((counts, torch.stack((certainty.sum(), certainty.square().sum()))))


def _entropies(log_probabilities: Tensor) -> Tensor:
    """H(p_i) [n]; 0 · ln 0 = 0."""
    entropies: Tensor = torch.special.entr(log_probabilities.exp()).sum(-1).double()
    return entropies


def windows(recent: Tensor | None, batch: Tensor, samples: int) -> Tensor:
    """[2, k + 2]: the windows with a batch in them; older ones fade so that a window has the weight of its samples."""
    if recent is None:
        return torch.stack((batch, batch))
    long = max(LONG * (batch.shape[0] - 2), LEAST)
    return torch.stack((faded(recent[0], batch, samples), recent[1] * max(0.0, 1 - samples / long) + batch))


def faded(window: Tensor | None, batch: Tensor, samples: int) -> Tensor:
    """A short window with a batch in it."""
    return batch if window is None else window * max(0.0, 1 - samples / short(batch.shape[0] - 2)) + batch


def shape_of(batch: Tensor) -> dict[str, Tensor]:
    """Entropy of the predicted classes, share of the largest, mean predictive entropy."""
    counts = batch[:-2]
    n = counts.sum()
    entropy = torch.special.entr(counts / n).sum()
    return {"marginal_entropy": entropy, "largest_share": counts.max() / n, "predictive_entropy": batch[-2] / n}


def compared(recent: Tensor, history: Tensor) -> dict[str, Tensor]:
    """Windows [2, k + 2], short and long, against the history [k + 2]: scalars by name.

    G = N KL(s ‖ m) + M KL(q ‖ m) for shares s of N samples and q of M, pooled m; the same for one class against all others,
    the class that gained most.
    """
    counts, past = recent[:, :-2], history[:-2]
    n, m = counts.sum(1), past.sum()
    s, q = counts / n[:, None], past / m
    pooled = (counts + past) / (n + m)[:, None]
    lost = torch.special.entr(q).sum() - torch.special.entr(s).sum(1)
    g = n * _kl(s, pooled).sum(1) + m * _kl(q.expand_as(s), pooled).sum(1)
    one = n[0] * _binary(s[0], pooled[0]) + m * _binary(q, pooled[0])
    calmer = history[-2] / m - recent[:, -2] / n
    found = {"past": m, "g_class": (one * (s[0] > q)).max(), "rise": rise(recent[0], history)}
    for row, window in enumerate(("short", "long")):
        found |= {window: n[row], f"lost_{window}": lost[row], f"g_{window}": g[row], f"calmer_{window}": calmer[row]}
    return found


def rise(window: Tensor, history: Tensor) -> Tensor:
    """Of the mean predictive entropy, in standard deviations of a sample."""
    n, m = window[:-2].sum(), history[:-2].sum()
    mean = history[-2] / m
    spread = (history[-1] / m - mean.square()).clamp_min(1e-12).sqrt()
    return (window[-2] / n - mean) / spread


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """p ln(p / q), 0 where p is."""
    pieces: Tensor = torch.special.xlogy(p, p) - torch.special.xlogy(p, q)
    return pieces


def _binary(p: Tensor, q: Tensor) -> Tensor:
    """KL of one class against all others."""
    return _kl(p, q) + _kl(1 - p, 1 - q)

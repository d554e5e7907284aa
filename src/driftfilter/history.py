"""What was predicted lately against what was predicted before, in units that hold for any batch size and class count.

A summary of samples is a vector [k + 3]: how many were predicted to be of each class; how many there were, Σ H_i and Σ H_i² of
their predictive entropies. A window is a sum in which older batches fade. In the history the classes never fade, or a slow
collapse would become the rule; the entropies do, for a model that adapts grows more certain.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

SHORT = 64  # samples in the short window, or the batch where that is larger
ENOUGH, LONG = 5, 50  # samples of a class, on average: to compare shares at all, and in the long window


class Evidence(NamedTuple):
    """How far windows are from the history, and -ln of the chance of that (at least; 0 where too few samples tell)."""

    signals: tuple[float, ...] = (math.nan,) * 5  # entropy lost, short and long; share gained; rise, short and long
    tails: tuple[float, ...] = (0.0,) * 5

    @classmethod
    def of(cls, found: dict[str, float], classes: int) -> Evidence:
        """From what ``compared`` found."""
        if found["past"] < SHORT:
            return cls()
        windows = (("short", ENOUGH * classes), ("long", LONG * classes / 2))
        lost, rises = ([found[f"{what}_{window}"] for window, _ in windows] for what in ("lost", "rise"))
        # Shares are compared where there are enough samples for all of them, and the model has not become less certain.
        settled = [found["past"] >= ENOUGH * classes and found[window] >= least for window, least in windows]
        calm = [rise <= 0 for rise in rises]
        entropies = [
            max(improbability(found[f"g_{window}"], (classes - 1) / 2), max(found[f"z_{window}"], 0.0) ** 2 / 2)
            for window, _ in windows
        ]
        entropies = [tail * (a and b) for tail, a, b in zip(entropies, settled, calm, strict=True)]
        share = improbability(found["g_class"], 0.5) - math.log(classes)
        pooled = [found[window] * found["lately"] / (found[window] + found["lately"]) for window, _ in windows]
        surprises = [rise * abs(rise) / 2 * size for rise, size in zip(rises, pooled, strict=True)]
        surprises[1] *= settled[1]
        return cls((*lost, found["g_class"] / found["short"], *rises), (*entropies, share, *surprises))


def improbability(statistic: float, shape: float) -> float:
    """-ln P(X >= g) of X ~ Gamma(shape), half a χ² with 2 · shape degrees of freedom; from below, by Chernoff:

    g - a - a ln(g / a) for g > a, else 0.
    """
    if not statistic > shape or shape <= 0:
        return 0.0
    return statistic - shape - shape * math.log(statistic / shape)


def summary(log_probabilities: Tensor) -> Tensor:
    """[k + 3]: samples by predicted class; samples, Σ H_i, Σ H_i²."""
    counts = log_probabilities.new_zeros(log_probabilities.shape[1], dtype=torch.float64)
    labels = log_probabilities.argmax(-1)
    counts = counts.scatter_add(0, labels, counts.new_ones(len(labels)))
    moments = torch.stack([_entropies(log_probabilities).pow(power).sum() for power in range(3)])
    return torch.cat((counts, moments))


def _entropies(log_probabilities: Tensor) -> Tensor:
    """H(p_i) [n]; 0 · ln 0 = 0."""
    entropies: Tensor = torch.special.entr(log_probabilities.exp()).sum(-1).double()
    return entropies


def windows(recent: Tensor | None, batch: Tensor, samples: int) -> Tensor:
    """[2, k + 3]: the windows with a batch in them; older ones fade so that a window has the weight of its samples."""
    if recent is None:
        return torch.stack((batch, batch))
    long = max(LONG * (batch.shape[0] - 3), SHORT)
    return torch.stack((faded(recent[0], batch, samples), recent[1] * max(0.0, 1 - samples / long) + batch))


def extended(history: Tensor | None, batch: Tensor, samples: int) -> Tensor:
    """The history with a batch in it."""
    if history is None:
        return batch
    share = max(0.0, 1 - samples / (4 * LONG * (batch.shape[0] - 3)))
    return torch.cat((history[:-3], history[-3:] * share)) + batch


def faded(window: Tensor | None, batch: Tensor, samples: int) -> Tensor:
    """A short window with a batch in it."""
    return batch if window is None else window * max(0.0, 1 - samples / SHORT) + batch


def shape_of(batch: Tensor) -> dict[str, Tensor]:
    """Entropy of the predicted classes, share of the largest, mean predictive entropy."""
    counts = batch[:-3]
    n = counts.sum()
    entropy = torch.special.entr(counts / n).sum()
    return {"marginal_entropy": entropy, "largest_share": counts.max() / n, "predictive_entropy": batch[-2] / batch[-3]}


def compared(recent: Tensor, history: Tensor) -> dict[str, Tensor]:
    """Windows [2, k + 3], short and long, against the history [k + 3]: scalars by name.

    G = N KL(s ‖ m) + M KL(q ‖ m) for shares s of N samples and q of M, pooled m; the same for one class against all others,
    the class that gained most. z: how many deviations Σ (s - q) ln q, the loss of entropy to first order, is from 0; it sees
    what happens to classes together that were unlike from the start.
    """
    counts, past = recent[:, :-3], history[:-3]
    n, m = counts.sum(1), past.sum()
    s, q = counts / n[:, None], past / m
    pooled = (counts + past) / (n + m)[:, None]
    lost = torch.special.entr(q).sum() - torch.special.entr(s).sum(1)
    g = n * _kl(s, pooled).sum(1) + m * _kl(q.expand_as(s), pooled).sum(1)
    one = n[0] * _binary(s[0], pooled[0]) + m * _binary(q, pooled[0])
    surprisal = -torch.special.xlogy(q > 0, q)
    spread = ((q * surprisal.square()).sum() - (q * surprisal).sum().square()).clamp_min(1e-12).sqrt()
    z = ((q - s) * surprisal).sum(1) / (spread * (1 / n + 1 / m).sqrt())
    found = {"past": m, "lately": history[-3], "g_class": (one * (s[0] > q)).max()}
    for row, window in enumerate(("short", "long")):
        rose = rise(recent[row], history)
        found |= {window: n[row], f"lost_{window}": lost[row], f"g_{window}": g[row], f"z_{window}": z[row]}
        found[f"rise_{window}"] = rose
    return found


def rise(window: Tensor, history: Tensor) -> Tensor:
    """Of the mean predictive entropy, in standard deviations of a sample."""
    mean = history[-2] / history[-3]
    spread = (history[-1] / history[-3] - mean.square()).clamp_min(1e-12).sqrt()
    return (window[-2] / window[-3] - mean) / spread


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """p ln(p / q), 0 where p is."""
    pieces: Tensor = torch.special.xlogy(p, p) - torch.special.xlogy(p, q)
    return pieces


def _binary(p: Tensor, q: Tensor) -> Tensor:
    """KL of one class against all others."""
    return _kl(p, q) + _kl(1 - p, 1 - q)

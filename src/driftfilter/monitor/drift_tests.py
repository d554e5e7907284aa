"""What was predicted lately against what was predicted before, or would be from the source, for any
batch size and class count.

A summary of samples is a vector [k + 3]: how many were predicted to be of each class; how many
there were, Σ H_i and Σ H_i² of their predictive entropies. A window is a sum in which older batches
fade. In the history the classes never fade, or a slow change would become the rule; the entropies
do, for a model that adapts grows more certain.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from driftfilter.base.light import (
    Number,
    Vector,
    as_torch,
    clip,
    count,
    entropy,
    join,
    lighten,
    match,
    numbers,
    root,
    stack,
    total,
    xlogy,
)

# Samples in a window, or the batch if that is larger; and the fewest that are compared.
SHORT = 64
# Samples whose entropies are in it: garbage may raise them by half a deviation only.
STEADY = 2 * SHORT
LONG = 50  # samples of a class, on average, that are remembered of pairs


class Signals(NamedTuple):
    """What the monitor saw in the last step; NaN if there was nothing to see or to compare
    with.
    """

    # By the belief against the source on the same samples: entropy in nats (see Monitor)
    classes_lost: float = math.nan
    share_gained: float = math.nan  # by the class that gained most, in nats a sample (see Monitor)
    # Rise of the mean predictive entropy of the window, in deviations of a sample.
    uncertainty: float = math.nan
    # Of the mean from the source, in prior standard deviations (see deviation)
    distance: float = math.nan
    # KL(belief ‖ source) / d in nats, if the monitor has a threshold for it.
    divergence: float = math.nan
    marginal_entropy: float = math.nan  # of the classes predicted in this batch, in nats
    largest_share: float = math.nan  # of a class in this batch
    predictive_entropy: float = math.nan  # mean H(p_i) of this batch, in nats
    effective_samples: float = math.nan  # (Σ w)² / Σ w² of this update
    energy: float = math.nan  # E at the prior mean
    # 1 - the expected accuracy before this batch (inference/accuracy.py), if the monitor wants it.
    expected_error: float = math.nan


class Evidence(NamedTuple):
    """How far lately is from before, and -ln of the chance of that (at least; 0 if too few
    samples tell).
    """

    signals: tuple[float, ...] = (math.nan,) * 3  # classes lost, share gained, rise of uncertainty
    tails: tuple[float, ...] = (0.0,) * 3

    @classmethod
    def of(cls, found: dict[str, float], classes: int) -> Self:
        """From what ``count_lost`` and ``compare`` found.

        N samples in runs tell as much as N (1 - R) / (1 + R) independent ones: R is "stayed" of
        labels in the history, or "stay" by what is known now if that is more. A model that has
        collapsed predicts runs, too, so that of classes lost only the history tells.
        """
        signals, tails = [math.nan] * 3, [0.0] * 3
        stayed = found.get("stayed", 0.0)
        if found.get("pairs", 0) >= SHORT:
            signals[0] = found["lost"] - found.get("doubt", 0.0)
            tails[0] = _independent(stayed) * found["lost_tail"]
        if found.get("past", 0) >= SHORT:
            pooled = found["told"] * found["lately"] / (found["told"] + found["lately"])
            signals[1:] = found["g_class"] / found["window"], found["rise"]
            part = _independent(max(found.get("stay", 0.0), stayed))
            tails[1] = improbability(part * found["g_class"]) - math.log(classes)
            reach = (math.log(classes) - found["usual"]) / found["spread"]
            tails[2] = bernstein(found["rise"], part * pooled, reach)
        return cls(tuple(signals), tuple(tails))


def _independent(stay: float) -> float:
    """(1 - R) / (1 + R)."""
    return (1 - stay) / (1 + stay)


def improbability(statistic: float) -> float:
    """-ln P(X >= 2 g) of X ~ χ² with one degree of freedom; from below, by Chernoff: g - ½ - ½ ln 2
    g for g > ½, else 0.
    """
    return statistic - 0.5 - math.log(2 * statistic) / 2 if statistic > 0.5 else 0.0


def bernstein(rise: float, samples: float, reach: float) -> float:
    """-ln of the chance that a mean rises by r deviations of a sample: at least N r² / 2 (1 + r
    reach / 3), 0 if it falls.

    ``reach``: how many deviations a sample can be above the mean. A model that is sure of nearly
    all has few that are far off.
    """
    return samples * rise * rise / 2 / (1 + rise * reach / 3) if rise > 0 else 0.0


def summary(log_probabilities: Tensor) -> Tensor:
    """[k + 3]: samples by predicted class; samples, Σ H_i, Σ H_i²."""
    probabilities = log_probabilities.exp()
    entropies = lighten(torch.special.entr(probabilities).sum(-1).double())  # 0 · ln 0 = 0
    labels = match(log_probabilities.argmax(-1), entropies)
    moments = (len(labels), total(entropies), total(entropies * entropies))
    counts = count(labels, log_probabilities.shape[1], entropies)
    return as_torch(join(counts, moments, like=entropies))


def gather(waiting: Tensor | None, batch: Tensor) -> Tensor:
    """A batch together with samples that wait to be judged."""
    return batch if waiting is None else waiting + batch


def extend(history: Tensor | None, batch: Tensor, samples: int) -> Tensor:
    """The history with a batch in it."""
    if history is None:
        return batch
    share = max(0.0, 1 - samples / (4 * LONG * (batch.shape[0] - 3)))
    return _add(history, batch, 1.0, share)


def fade(window: Tensor | None, batch: Tensor, samples: int, entropies: int = SHORT) -> Tensor:
    """A short window with a batch in it, which remembers the entropies of so many samples."""
    if window is None:
        return batch
    return _add(window, batch, *(max(0.0, 1 - samples / memory) for memory in (SHORT, entropies)))


def _add(known: Tensor, batch: Tensor, classes: float, moments: float) -> Tensor:
    """A batch beside what is left of older ones, of their classes and of their entropies."""
    old, new = lighten(known), lighten(batch)
    return as_torch(join(classes * old[:-3], moments * old[-3:], like=old) + new)


def shape_of(batch: Tensor) -> dict[str, Number]:
    """Entropy of the predicted classes, share of the largest, mean predictive entropy."""
    known = lighten(batch)
    shares = known[:-3] / known[:-3].sum()
    return {
        "marginal_entropy": entropy(shares),
        "largest_share": shares.max(),
        "predictive_entropy": known[-2] / known[-3],
    }


def dominant(window: Tensor) -> dict[str, Number]:
    """The class that most samples of a window [k + 3] were predicted to be of, and its share."""
    counts = lighten(window)[:-3]
    return {"dominant": counts.argmax(), "dominance": counts.max() / counts.sum()}


def compare(recent: Tensor, history: Tensor) -> dict[str, Number]:
    """A window [k + 3] against the history [k + 3]: numbers by name.

    G = N KL(s ‖ m) + M KL(q ‖ m) for the share s of a class among N samples and q among M, pooled
    m, against all others: that of the class that gained most.
    """
    window, past = lighten(recent), lighten(history)
    counts, before = window[:-3], past[:-3]
    n, m = counts.sum(), before.sum()
    s, q, pooled = counts / n, before / m, (counts + before) / (n + m)
    g = n * _binary(s, pooled) + m * _binary(q, pooled)
    entropies = {"told": window[-3], "lately": past[-3], "usual": past[-2] / past[-3]}
    entropies |= {"rise": rise(recent, history), "spread": _spread(past)}
    return {"window": n, "past": m, "g_class": (g * (s > q)).max(), **entropies}


def add_pairs(pairs: Tensor | None, own: Tensor, source: Tensor) -> Tensor:
    """[2, w], the labels that a belief and the source give the same samples: the last 50 k, these
    ones among them.
    """
    new = torch.stack((own.argmax(-1), source.argmax(-1)))
    joined = new if pairs is None else torch.cat((pairs, new), 1)
    return joined[:, -max(LONG * own.shape[1], SHORT) :]


def doubt(window: Tensor, history: Tensor) -> Number:
    """By how many nats the mean predictive entropy of a window [k + 3] is above that of the
    history; 0 if it is below.
    """
    new, old = lighten(window), lighten(history)
    return clip(numbers(new[-2:-1] / new[-3] - old[-2:-1] / old[-3])[0], 0.0, math.inf)


def count_lost(pairs: Tensor, classes: int) -> dict[str, Number]:
    """What the labels a_i have lost in entropy against b_i, pairs [2, w], with -ln of its chance:
    scalars by name.

    L = Σ_i ln m(a_i) - ln m(b_i), m the shares in both together, is w (H(b) - H(a)) up to third
    order in the difference of shares. Were a_i and b_i exchangeable, each term had its sign by
    chance, and P(L >= l) <= exp(-l² / 2 Σ (terms)²), whatever the classes and their number. Labels
    that stay the same ("agreed" is their share) say nothing, nor does a change of the stream, which
    both have seen.
    """
    like = torch.empty(0, dtype=torch.float64, device=pairs.device)
    surprise = -(count(pairs.flatten(), classes, like) / pairs.numel()).log()
    terms = surprise[pairs[1]] - surprise[pairs[0]]
    total = terms.sum()
    return {
        "pairs": pairs.shape[1],
        "lost": total / pairs.shape[1],
        "lost_tail": total.clamp_min(0).square() / (2 * terms.square().sum()).clamp_min(1e-30),
        "agreed": (pairs[0] == pairs[1]).double().mean(),
    }


def rise(window: Tensor, history: Tensor) -> Number:
    """The rise of the mean predictive entropy, in standard deviations of a sample."""
    new, old = lighten(window), lighten(history)
    return (new[-2] / new[-3] - old[-2] / old[-3]) / _spread(old)


def _spread(history: Vector) -> Number:
    """Standard deviation of the predictive entropies of samples, in nats."""
    samples, entropies, squares = numbers(history[-3:])
    return root(clip(squares / samples - (entropies / samples) ** 2, 1e-12, math.inf))


def _binary(p: Vector, q: Vector) -> Vector:
    """KL of one class against all others."""
    own, other = stack(p, 1 - p), stack(q, 1 - q)
    return (xlogy(own, own) - xlogy(own, other)).sum(0)

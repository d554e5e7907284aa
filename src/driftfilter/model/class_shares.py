"""Whether the classes have shares of their own in a stream, or a classifier has a bias.

    skewed   labels are drawn from π ~ Dirichlet(1, …, 1), and p(x given y) ∝ p(y given x)
    equal    labels are drawn from 1/k; what is predicted too often or too seldom is a bias of the
             classifier, as if its labels had shares drawn from Dirichlet(κ, …, κ)

Under either hypothesis, with a = 1 or κ, counts c follow the samples one by one:

    p(x_t given those before) ∝ Σ_y p(y given x_t) π_y,   π = (a + c) / Σ(a + c)
    r_t ∝ p(y given x_t) π_y,   c ← c + v_t r_t

v = u (1 - H(p) / ln k), u the probability that labels come one by one: runs and samples that may be
anything tell little about shares. The ratio of the first line under both, to the power v,
multiplies the odds of the hypotheses, which begin at ρ / (1 - ρ). This is exact for a classifier
that is sure of every label. Otherwise it is quasi-Bayes (Smith and Makov): r stands in the place of
labels that are unknown.

A bias may be larger than κ says. One that a change of domain has made cuts through clusters of
samples, and predictions without it have more mutual information I = H(mean p) - mean H(p) with the
inputs (as in centering.py). And a classifier that is seldom sure is wrong often, so that any share
may be its bias. With ΔI what q ∝ p / m gains over p, m = (1 + Σp) / (k + n), and C the mean of
1 - H(p) / ln k,

    w = p(skewed) · (0.04 - ΔI) / 0.02 · (C - 0.6) / 0.1,   each factor within [0, 1]
    E[π] = w π_skewed + (1 - w) / k
    p(y given x and the stream) ∝ p(y given x) k E[π_y]

All sums, and the logarithm of the ratios, fade before each batch of n by a share n / max(300, 30k):
shares change.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from driftfilter.model.sticky_chain import Array

# A pass over samples: ``count_up_by_rows``, or the same in compiled code.
CountUp: TypeAlias = Callable[[Array, Array, Array], Array]
_OWN = 1.0  # a of shares that are the stream's
_WINDOW, _LEAST = 30, 300  # samples that are not forgotten: of each class, and at least
_SURE = 30.0  # the largest logarithm of a ratio that is kept
_LITTLE, _MUCH = 0.02, 0.04  # nats that predictions gain without a bias: none, or one for certain
_UNSURE, _CERTAIN = 0.6, 0.7  # C of a classifier whose bias may be anything, or is as κ says


def count_up_by_rows(filled: Array, p: Array, weights: Array) -> Array:
    """p(x_t given those before) [n, 2], times the totals, of samples with p [n, k] and weights v
    [n]; a + c [2, k] are changed: c ← c + v r.
    """
    chances, growth = np.empty((len(p), 2)), np.empty_like(filled)
    columns = chances[:, :, None]
    for weight, own, chance, column in zip(weights.tolist(), p, chances, columns, strict=True):
        np.dot(filled, own, out=chance)
        np.multiply(weight / column, own, out=growth)
        np.add(growth, 1, out=growth)
        np.multiply(filled, growth, out=filled)
    return chances


class Shares(NamedTuple):
    """What is known after some samples."""

    counts: Array  # [2, k], c of skewed shares and of equal ones
    predicted: Array  # [2, k], sums of p and of q
    entropies: Array  # [2], sums of H(p) and of H(q)
    ratio: float  # of the probabilities of the samples under both hypotheses

    @classmethod
    def start(cls, classes: int) -> "Shares":
        """Before the first sample."""
        return cls(np.zeros((2, classes)), np.zeros((2, classes)), np.zeros(2), 1.0)

    @classmethod
    def unpack(cls, packed: Array) -> "Shares":
        """From one vector [4k + 3]."""
        rows = packed[:-3].reshape(4, -1)
        return cls(rows[:2], rows[2:], packed[-3:-1], float(packed[-1]))

    def pack(self) -> Array:
        """As one vector [4k + 3]."""
        return np.concatenate((*self.counts, *self.predicted, self.entropies, (self.ratio,)))

    def follow(
        self, p: Array, single: float, bias: float, count_up: CountUp = count_up_by_rows
    ) -> "Shares":
        """After samples with p(y given x) [n, k]; ``single``: u, ``bias``: κ; ``count_up`` runs the
        pass over the samples.
        """
        n, k = p.shape
        fading = max(0.0, 1 - n / max(_LEAST, _WINDOW * k))
        entropies = _entropy(p)
        weights = single * np.clip(1 - entropies / math.log(max(k, 2)), 0.0, 1.0)
        prior = np.array(((_OWN,), (bias,)))
        filled = fading * self.counts + prior
        totals = filled.sum(1) + (weights.cumsum() - weights)[:, None]
        chances = count_up(filled, p, weights)
        skewed, equal = (chances / totals).T
        gained = fading * math.log(self.ratio) + float(weights @ np.log(skewed / equal))
        predicted = fading * self.predicted
        predicted[0] += p.sum(0)
        without = p / (1 + predicted[0])
        without /= without.sum(1, keepdims=True)
        predicted[1] += without.sum(0)
        found = np.array((entropies.sum(), _entropy(without).sum()))
        return Shares(
            np.maximum(filled - prior, 0.0),
            predicted,
            fading * self.entropies + found,
            math.exp(min(max(gained, -_SURE), _SURE)),
        )

    def correct(self, skew: float) -> Array:
        """k E[π] [k]; ``skew``: ρ."""
        filled = _OWN + self.counts[0]
        own: Array = len(filled) * filled / filled.sum()
        return 1 + self.chance(skew) * (own - 1)

    def chance(self, skew: float) -> float:
        """w; ``skew``: ρ."""
        odds = skew * self.ratio
        unbiased = (_MUCH - self.gain()) / (_MUCH - _LITTLE)
        right = (self.certainty() - _UNSURE) / (_CERTAIN - _UNSURE)
        return odds / (odds + 1 - skew) * float(np.clip(unbiased, 0, 1) * np.clip(right, 0, 1))

    def gain(self) -> float:
        """ΔI."""
        samples = self._samples()
        plain, without = _entropy(self.predicted / samples) - self.entropies / samples
        return float(without - plain)

    def certainty(self) -> float:
        """C."""
        most = math.log(max(len(self.predicted[0]), 2))
        return 1 - float(self.entropies[0]) / self._samples() / most

    def _samples(self) -> float:
        return max(float(self.predicted[0].sum()), 1.0)


def _entropy(p: Array) -> Array:
    """H [n] of distributions [n, k]."""
    found: Array = -(p * np.log(np.where(p > 0, p, 1.0))).sum(1)
    return found

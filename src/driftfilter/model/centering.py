"""A filter of class offsets: what moves the logits of all samples alike is taken off them.

A change of domain moves the features z of all samples by nearly one vector. In front of a linear
head only W (m - m_S) of it matters, m and m_S the mean features now and in the source: k offsets of
the logits. They are found from how often each class is predicted, exactly (Dirichlet counts),
without a backward pass and for batches of one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, final

import torch
from torch import Tensor

from driftfilter.base.checks import Checked, Positive, PositiveCount, register, require
from driftfilter.base.inputs import Inputs
from driftfilter.base.light import (
    Number,
    Vector,
    as_torch,
    clip,
    entropy,
    join,
    lighten,
    log,
    match,
    number,
    numbers,
    root,
    total,
)
from driftfilter.base.memory import remembered
from driftfilter.model.label_runs import count_labels, independence, start_counts
from driftfilter.model.predictive import ModelAround, PredictiveModel, Pullback, PullbackAround

CENTER = remembered("centering", "5k+7")  # see Known
_ROUNDS = 2
_SPREAD = 4.0  # of logits whose mutual information is compared
_LARGE = 1e30  # of squares that are summed
_TINY = torch.finfo(torch.float32).tiny
_LITTLE, _MUCH = 0.02, 0.08  # nats of mutual information from which offsets count, and in full
_PART, _MOST = 0.35, 0.5  # the same for what is gained as a part of the marginal entropy gained


@final
@dataclass(frozen=True)
class Centering(Checked):
    """f - g δ in place of the logits f: no class is predicted more often than in the source.

    Shares m of the classes have a Dirichlet prior of ``count`` samples with the source's shares u,
    and are observed through the predictions of samples that fade over a ``window``. Twice, from
    δ = 0,

        δ ← δ + T log(m / u),   m = (count u + c) / (count + Σc),
        c ← (1 - n / window) c + t Σ_i softmax((f_i - δ) / T)

    for a batch of n samples, this one included. T = ``temperature`` · σ, σ² the mean square of the
    logits' deviations from their mean over classes, σ at most 4. t is the trust in shares of
    classes (label_runs.py): labels that come in runs count for nothing.

    u is the mean of softmax(f / T) of source data if there are any, and equal shares otherwise. The
    stream's shares need not be those, and g in [0, 1] asks: offsets that a change of domain has
    made cut through clusters of samples, and without them predictions and inputs have more mutual
    information I = H(mean p) - mean H(p), p = softmax(4 f / σ); those that undo an imbalance of the
    classes cut through clusters themselves, so that of what H(mean p) gains mean H(p) takes most.
    With ΔI and ΔH what I and H(mean p) gain by δ,

        g = t · (ΔI - 0.02) / 0.06 · (ΔI / ΔH - 0.35) / 0.15,   each factor within [0, 1]

    Inputs that are predicted without adapting to them have the offsets of the last batch.
    """

    count: Positive = 30.0
    window: PositiveCount = 2000
    temperature: Positive = 0.75


class Known(NamedTuple):
    """What is remembered, sums over samples that fade."""

    rounds: Vector  # [rounds, k], c
    predicted: Vector  # [2, k], predictions without offsets and with them
    sums: list[Number]  # squares of deviations, samples; entropies without and with offsets, by t
    labels: Vector  # [k + 3], see label_runs.py

    @classmethod
    def of(cls, packed: Tensor | None, logits: Tensor, fading: float = 1.0) -> Known:
        """From one vector, whose sums have faded to a share; nothing yet of None."""
        k = logits.shape[-1]
        shares, sums = (_ROUNDS + 2) * k, (_ROUNDS + 2) * k + 4
        if packed is None:
            packed = torch.cat((logits.new_zeros(sums), start_counts(k, logits)))
        known = lighten(packed)
        faded = fading * known[:sums]  # in one dtype: sums that are divided by each other
        predictions = faded[:shares].reshape(_ROUNDS + 2, k)
        rounds, predicted = predictions[:_ROUNDS], predictions[_ROUNDS:]
        return cls(rounds, predicted, numbers(faded[shares:]), known[sums:])

    def pack(self) -> Tensor:
        """As one vector."""
        shares = (self.rounds.reshape(-1), self.predicted.reshape(-1))
        return as_torch(join(*shares, self.sums, self.labels, like=self.labels))


@final
@dataclass(frozen=True, eq=False)
class Centered(ModelAround):
    """A model whose logits are centred; what is taken off is not differentiated."""

    rule: Centering = field(default_factory=Centering)
    source: Tensor | None = None  # u [k]
    known: Tensor | None = None  # see Known
    is_settled: bool = False  # whether a batch adds nothing to what is known

    @property
    def settled(self) -> PredictiveModel:
        return replace(self, model=self.model.settled, is_settled=True)

    def with_features(self) -> PredictiveModel:
        require(False, "Recipe.centering", self.rule, "None for a rule that sees features")
        return self

    def recall(self, memory: Mapping[str, Tensor]) -> PredictiveModel:
        return replace(self, model=self.model.recall(memory), known=memory.get(CENTER))

    def _center(self, logits: Tensor, novelty: Tensor | float) -> tuple[Tensor, Tensor]:
        """Centred logits [n, k], and what is known then."""
        n = len(logits)
        known = Known.of(self.known, logits, max(0.0, 1 - n / self.rule.window))
        squares, samples, *entropies = known.sums
        square = (logits - logits.mean(-1, keepdim=True)).square().mean()
        squares = squares + n * clip(number(square, known.labels), 0.0, _LARGE)
        samples = samples + n
        sigma = _sigma(squares, samples)
        labels = count_labels(known.labels, match(logits.argmax(-1), known.labels))
        trust = self._trust(labels)
        told = trust * (number(novelty, labels) if isinstance(novelty, Tensor) else novelty)
        offsets = 0.0 * known.rounds[0]
        temperature = self.rule.temperature * sigma
        for counts in known.rounds:
            own = ((logits - as_torch(offsets)) / temperature).softmax(-1).sum(0)
            counts += told * lighten(own)  # of a copy, which has faded
            offsets = offsets + self._offset(counts, sigma)
        both = torch.stack((logits, logits - as_torch(offsets)))
        predicted = (_SPREAD / sigma * both).softmax(-1)
        new = numbers(lighten(torch.special.entr(predicted).sum((1, 2))))
        now = Known(
            known.rounds,
            known.predicted + told * lighten(predicted.sum(1)),
            [
                squares,
                samples,
                *(old + told * own for old, own in zip(entropies, new, strict=True)),
            ],
            labels,
        )
        return logits - as_torch(self._needed(now, trust) * offsets), now.pack()

    def _trust(self, labels: Vector) -> Number:
        """t."""
        return independence(labels, known=self.source is not None)

    def _offset(self, counts: Vector, sigma: Number) -> Vector:
        """T log(m / u) [k] of one round."""
        source = (
            1 / len(counts) if self.source is None else lighten(self.source.to(as_torch(counts)))
        )
        shares = (self.rule.count * source + counts) / (self.rule.count + total(counts))
        return self.rule.temperature * sigma * log(shares / source)

    def _needed(self, known: Known, trust: Number) -> Number:
        """g."""
        without, shifted = known.predicted
        samples = clip(total(without), _TINY, math.inf)
        before, after = entropy(without / samples), entropy(shifted / samples)
        gained = after - before - (known.sums[3] - known.sums[2]) / samples
        much = clip((gained - _LITTLE) / (_MUCH - _LITTLE), 0.0, 1.0)
        part = gained / clip(after - before, _TINY, math.inf)
        most = clip((part - _PART) / (_MOST - _PART), 0.0, 1.0)
        return much * most * trust

    def __call__(self, theta: Tensor, inputs: Inputs) -> Tensor:
        """Logits [n, k] without the offsets that earlier batches have told: each row by itself."""
        return self._without_offsets(self.model(theta, inputs))

    def _without_offsets(self, logits: Tensor) -> Tensor:
        """Logits [n, k] without the offsets that are known."""
        if self.known is None:
            return logits
        known = Known.of(self.known, logits)
        sigma = _sigma(*known.sums[:2])
        first, *others = (self._offset(counts, sigma) for counts in known.rounds)
        return logits - as_torch(
            self._needed(known, self._trust(known.labels)) * sum(others, first)
        )

    def pullback(self, theta: Tensor, inputs: Inputs) -> tuple[Tensor, Pullback]:
        logits, inner = self.model.pullback(theta, inputs)
        if self.is_settled:
            return self._without_offsets(logits), inner
        centred, known = self._center(logits, inner.novelty)
        return centred, _CenteredPullback(inner, known)

    def pushforward(self, theta: Tensor, inputs: Inputs, tangents: Tensor) -> Tensor:
        return self.model.pushforward(theta, inputs, tangents)


def _sigma(squares: Number, samples: Number) -> Number:
    """σ of the logits, from next to nothing to 4."""
    return clip(root(squares / clip(samples, _TINY, math.inf)), _TINY**0.5, _SPREAD)


class _CenteredPullback(PullbackAround):
    def __init__(self, inner: Pullback, known: Tensor) -> None:
        super().__init__(inner)
        self.memory = {**inner.memory, CENTER: known}

    def __call__(self, cotangents: Tensor) -> Tensor:
        return self.inner(cotangents)

    def total(self, cotangents: Tensor) -> Tensor:
        return self.inner.total(cotangents)


register(centering=(Centering,))

"""A filter of class offsets: what moves the logits of all samples alike is taken off them.

A change of domain moves the features z of all samples by nearly one vector. In front of a linear
head only W (m - m_S) of it matters, m and m_S the mean features now and in the source: k offsets of
the logits. They are found from how often each class is predicted, exactly (Dirichlet counts),
without a backward pass and for batches of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch import Tensor

from driftfilter.base.checks import Checked, Positive, PositiveCount, register
from driftfilter.base.inputs import Inputs
from driftfilter.model.label_runs import count_labels, independence, start_counts
from driftfilter.model.predictive import ModelAround, PredictiveModel, Pullback, PullbackAround

CENTER = "centering"  # in the memory: counts [2 k], mean square and its samples, labels [k + 3]
_ROUNDS = 2
_LARGE = 1e15  # of logits whose squares are summed


@final
@dataclass(frozen=True)
class Centering(Checked):
    """f - δ in place of the logits f: no class is predicted more often than in the source.

    Shares m of the classes have a Dirichlet prior of ``count`` samples with the source's shares u,
    and are observed through the predictions of samples that fade over a ``window``. Twice, from
    δ = 0,

        δ ← δ + T log(m / u),   m = (count u + c) / (count + Σc),
        c ← (1 - n / window) c + t Σ_i softmax((f_i - δ) / T)

    for a batch of n samples, this one included. T = ``temperature`` · σ, σ² the mean square of the
    logits' deviations from their mean over classes: for large T the offsets are those of the mean
    logit, for small ones those of the labels, which are few at first. t is the trust in shares of
    classes (label_runs.py): labels that come in runs count for nothing. u is the mean of
    softmax(f / T) of source data if there are any, and equal shares otherwise.
    """

    count: Positive = 30.0
    window: PositiveCount = 2000
    temperature: Positive = 0.75


@final
@dataclass(frozen=True, eq=False)
class Centered(ModelAround):
    """A model whose logits are centred; what is taken off is not differentiated."""

    rule: Centering = field(default_factory=Centering)
    source: Tensor | None = None  # u [k]
    known: Tensor | None = None  # [3 k + 5], see CENTER

    def recall(self, memory: Mapping[str, Tensor]) -> PredictiveModel:
        return replace(self, model=self.model.recall(memory), known=memory.get(CENTER))

    def _center(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Centred logits [n, k], and what is known then."""
        n, k = logits.shape
        known = self.known
        if known is None:
            known = torch.cat((logits.new_zeros(_ROUNDS * k + 2), start_counts(k, logits)))
        counts, spread, labels = known.split((_ROUNDS * k, 2, k + 3))
        fading = max(0.0, 1 - n / self.rule.window)
        square = (logits - logits.mean(-1, keepdim=True)).clamp(-_LARGE, _LARGE).square().mean()
        spread = fading * spread + n * torch.stack((square, torch.ones_like(square)))
        temperature = self.rule.temperature * (spread[0] / spread[1]).sqrt()
        temperature = temperature.clamp_min(torch.finfo(logits.dtype).tiny ** 0.5)
        before = logits - self._offsets(counts.view(_ROUNDS, k), temperature)
        labels = count_labels(labels, before.argmax(-1))
        trust = independence(labels, 200)
        offsets, new = torch.zeros_like(logits[0]), []
        for old in counts.view(_ROUNDS, k):
            own = ((logits - offsets) / temperature).softmax(-1).sum(0)
            new.append(fading * old + trust * own)
            offsets = offsets + self._offset(new[-1], temperature)
        return logits - offsets, torch.cat((*new, spread, labels))

    def _offsets(self, counts: Tensor, temperature: Tensor) -> Tensor:
        """δ [k] of counts [rounds, k]."""
        return torch.stack([self._offset(each, temperature) for each in counts]).sum(0)

    def _offset(self, counts: Tensor, temperature: Tensor) -> Tensor:
        """T log(m / u) [k] of one round."""
        equal = torch.full_like(counts, 1 / len(counts))
        source = equal if self.source is None else self.source.to(counts)
        shares = (self.rule.count * source + counts) / (self.rule.count + counts.sum())
        return temperature * (shares / source).log()

    def __call__(self, theta: Tensor, inputs: Inputs) -> Tensor:
        return self._center(self.model(theta, inputs))[0]

    def pullback(self, theta: Tensor, inputs: Inputs) -> tuple[Tensor, Pullback]:
        logits, inner = self.model.pullback(theta, inputs)
        centred, known = self._center(logits)
        return centred, _CenteredPullback(inner, known)

    def pushforward(self, theta: Tensor, inputs: Inputs, tangents: Tensor) -> Tensor:
        return self.model.pushforward(theta, inputs, tangents)


class _CenteredPullback(PullbackAround):
    def __init__(self, inner: Pullback, known: Tensor) -> None:
        super().__init__(inner)
        self.memory = {**inner.memory, CENTER: known}

    def __call__(self, cotangents: Tensor) -> Tensor:
        return self.inner(cotangents)

    def total(self, cotangents: Tensor) -> Tensor:
        return self.inner.total(cotangents)


register(centering=(Centering,))

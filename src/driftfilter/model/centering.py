"""A filter of class offsets: what moves the logits of all samples alike is taken off them.

A change of domain moves the features z of all samples by nearly one vector. In front of a linear
head only W (m - m_S) of it matters, m and m_S the mean features now and in the source: k offsets of
the logits. They are found from how often each class is predicted, exactly (Dirichlet counts),
without a backward pass and for batches of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, final

import torch
from torch import Tensor

from driftfilter.base.checks import Checked, Positive, PositiveCount, register
from driftfilter.base.inputs import Inputs
from driftfilter.model.label_runs import count_labels, independence, start_counts
from driftfilter.model.predictive import ModelAround, PredictiveModel, Pullback, PullbackAround

CENTER = "centering"  # in the memory: see Known
_ROUNDS = 2
_SPREAD = 4.0  # of logits whose mutual information is compared
_LARGE = 1e15  # of logits whose squares are summed
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

    rounds: Tensor  # [rounds, k], c
    plain: Tensor  # [k], predictions without offsets
    shifted: Tensor  # [k], predictions with them
    sums: Tensor  # [4]: squares of deviations, samples; entropies without and with offsets, by t
    labels: Tensor  # [k + 3], see label_runs.py

    @classmethod
    def of(cls, packed: Tensor | None, logits: Tensor) -> Known:
        """From one vector; nothing yet of None."""
        k = logits.shape[-1]
        sizes = (_ROUNDS * k, k, k, 4, k + 3)
        if packed is None:
            packed = torch.cat((logits.new_zeros(sum(sizes[:-1])), start_counts(k, logits)))
        rounds, *others = packed.split(sizes)
        return cls(rounds.view(_ROUNDS, k), *others)

    def pack(self) -> Tensor:
        """As one vector."""
        return torch.cat((self.rounds.flatten(), *self[1:]))


@final
@dataclass(frozen=True, eq=False)
class Centered(ModelAround):
    """A model whose logits are centred; what is taken off is not differentiated."""

    rule: Centering = field(default_factory=Centering)
    source: Tensor | None = None  # u [k]
    known: Tensor | None = None  # see Known

    def recall(self, memory: Mapping[str, Tensor]) -> PredictiveModel:
        return replace(self, model=self.model.recall(memory), known=memory.get(CENTER))

    def _center(self, logits: Tensor, novelty: Tensor | float) -> tuple[Tensor, Tensor]:
        """Centred logits [n, k], and what is known then."""
        n, known = len(logits), Known.of(self.known, logits)
        fading = max(0.0, 1 - n / self.rule.window)
        square = (logits - logits.mean(-1, keepdim=True)).clamp(-_LARGE, _LARGE).square().mean()
        sums = fading * known.sums[:2] + n * torch.stack((square, torch.ones_like(square)))
        sigma = _sigma(sums)
        labels = count_labels(known.labels, logits.argmax(-1))
        trust = self._trust(labels) * novelty
        offsets, rounds = torch.zeros_like(logits[0]), []
        for counts in known.rounds:
            own = ((logits - offsets) / (self.rule.temperature * sigma)).softmax(-1).sum(0)
            rounds.append(fading * counts + trust * own)
            offsets = offsets + self._offset(rounds[-1], sigma)
        plain, shifted = (
            (_SPREAD / sigma * each).softmax(-1) for each in (logits, logits - offsets)
        )
        entropies = torch.stack([torch.special.entr(each).sum() for each in (plain, shifted)])
        now = Known(
            torch.stack(rounds),
            fading * known.plain + trust * plain.sum(0),
            fading * known.shifted + trust * shifted.sum(0),
            torch.cat((sums, fading * known.sums[2:] + trust * entropies)),
            labels,
        )
        return logits - self._needed(now) * offsets, now.pack()

    def _trust(self, labels: Tensor) -> Tensor:
        """t, a scalar []."""
        return independence(labels, known=self.source is not None)

    def _offset(self, counts: Tensor, sigma: Tensor) -> Tensor:
        """T log(m / u) [k] of one round."""
        source = torch.full_like(counts, 1 / len(counts))
        source = source if self.source is None else self.source.to(counts)
        shares = (self.rule.count * source + counts) / (self.rule.count + counts.sum())
        return self.rule.temperature * sigma * (shares / source).log()

    def _needed(self, known: Known) -> Tensor:
        """g, a scalar []."""
        tiny = torch.finfo(known.plain.dtype).tiny
        samples = known.plain.sum().clamp_min(tiny)
        before, after = (torch.special.entr(each / samples).sum() for each in known[1:3])
        gained = after - before - (known.sums[3] - known.sums[2]) / samples
        much = ((gained - _LITTLE) / (_MUCH - _LITTLE)).clamp(0, 1)
        part = gained / (after - before).clamp_min(tiny)
        most = ((part - _PART) / (_MOST - _PART)).clamp(0, 1)
        needed: Tensor = much * most * self._trust(known.labels)
        return needed

    def __call__(self, theta: Tensor, inputs: Inputs) -> Tensor:
        """Logits [n, k] without the offsets that earlier batches have told: each row by itself."""
        logits = self.model(theta, inputs)
        if self.known is None:
            return logits
        known = Known.of(self.known, logits)
        sigma = _sigma(known.sums)
        offsets = torch.stack([self._offset(counts, sigma) for counts in known.rounds]).sum(0)
        return logits - self._needed(known) * offsets

    def pullback(self, theta: Tensor, inputs: Inputs) -> tuple[Tensor, Pullback]:
        logits, inner = self.model.pullback(theta, inputs)
        centred, known = self._center(logits, inner.novelty)
        return centred, _CenteredPullback(inner, known)

    def pushforward(self, theta: Tensor, inputs: Inputs, tangents: Tensor) -> Tensor:
        return self.model.pushforward(theta, inputs, tangents)


def _sigma(sums: Tensor) -> Tensor:
    """σ of the logits, a scalar [] from next to nothing to 4."""
    tiny: float = torch.finfo(sums.dtype).tiny ** 0.5
    return (sums[0] / sums[1].clamp_min(tiny)).sqrt().clamp(tiny, _SPREAD)


class _CenteredPullback(PullbackAround):
    def __init__(self, inner: Pullback, known: Tensor) -> None:
        super().__init__(inner)
        self.memory = {**inner.memory, CENTER: known}

    def __call__(self, cotangents: Tensor) -> Tensor:
        return self.inner(cotangents)

    def total(self, cotangents: Tensor) -> Tensor:
        return self.inner.total(cotangents)


register(centering=(Centering,))

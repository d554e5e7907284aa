"""Weightings β_{t,i}: how much each sample of a batch counts, from its logits at the prior mean.

A weighting multiplies the weights it is given and may keep small named statistics from step to
step. Every weight is finite for a batch of one and for constant batches. One that must see more
than logits has a ``look`` (looking.py).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, final, runtime_checkable

import torch
from torch import Tensor

from driftfilter.base.checks import (
    Checked,
    Fraction,
    Positive,
    PositiveFraction,
    register,
    require,
    require_role,
    unchecked,
)
from driftfilter.base.inputs import Inputs
from driftfilter.base.memory import remembered
from driftfilter.base.randomness import Randomness
from driftfilter.gaussian.belief import Belief
from driftfilter.model import closed_forms
from driftfilter.model.expansion import log_softmax
from driftfilter.model.label_runs import count_labels, independence, start_counts
from driftfilter.model.predictive import PredictiveModel

Memory: TypeAlias = Mapping[str, Tensor]

_MEAN_PREDICTION = remembered("weighting.mean_prediction", "k")
_AGES = "sample.age"  # in the memory while an update is made of a buffer, see buffers.py
LABELS = remembered("weighting.labels", "k+3")  # counts, see label_runs.py


class Batch(NamedTuple):
    """A batch as a weighting may look at it, beside its logits."""

    model: PredictiveModel  # as the loss sees it
    theta: Tensor  # [d], where the logits are taken
    inputs: Inputs  # [n, ...]
    randomness: Randomness
    source: Belief | None  # where the stream started


class Weighting(Protocol):
    """Weights of the samples of one batch."""

    def __call__(self, logits: Tensor, weights: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """New weights [n] from logits [n, k] and the weights so far [n]; memory is replaced, never
        changed.
        """


@runtime_checkable
class LookingWeighting(Weighting, Protocol):
    """A weighting that must see more than logits: it looks at a batch before it is called."""

    def look(self, batch: Batch) -> Weighting:
        """The weighting for this batch."""


def looks(weighting: Weighting) -> bool:
    """Whether a weighting sees more than logits."""
    if isinstance(weighting, Product):
        return any(map(looks, weighting.factors))
    return isinstance(weighting, LookingWeighting)


def look_at(batch: Batch, weighting: Weighting) -> Weighting:
    """The weighting for this batch; itself if it sees logits alone."""
    return weighting.look(batch) if isinstance(weighting, LookingWeighting) else weighting


def entropy(logits: Tensor) -> Tensor:
    """H(softmax f) for logits [..., k]."""
    logp = log_softmax(logits)
    return closed_forms.entropy(logp.exp(), logp)[0].sum(-1)


@final
@dataclass(frozen=True)
class Constant(Checked):
    """w_i = β."""

    beta: Positive = 1.0

    def __call__(self, logits: Tensor, weights: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        return weights * self.beta, memory


@final
@dataclass(frozen=True)
class Reliability(Checked):
    """w_i = β (1 - H_i / ln k): uncertain samples inject less, β is the ceiling; 0 below 1e-6 β, a
    tie but for rounding.
    """

    beta: Positive = 1.0

    def __call__(self, logits: Tensor, weights: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        sure = closed_forms.certainty(entropy(logits), math.log(max(logits.shape[-1], 2)))
        return weights * (self.beta * sure), memory


@final
@dataclass(frozen=True)
class EntropyGate(Checked):
    """w_i = β exp(E₀ - H_i) if H_i < E₀ = fraction · ln k, else 0; not ``weighted``, w_i = β or
    0.
    """

    fraction: PositiveFraction = 0.4
    beta: Positive = 1.0
    weighted: bool = True

    def __call__(self, logits: Tensor, weights: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        margin = self.fraction * math.log(max(logits.shape[-1], 2)) - entropy(logits)
        return weights * (self.beta * closed_forms.gate(margin, float(self.weighted))), memory


def _running(memory: Memory, p: Tensor) -> Tensor | None:
    """The running mean prediction [k], if there is one yet."""
    running = memory.get(_MEAN_PREDICTION)
    if running is not None:
        require(
            running.shape == p.shape[-1:],
            "logits",
            f"{p.shape[-1]} classes",
            f"{running.shape[0]} classes as before",
        )
    return running


@final
@dataclass(frozen=True)
class DiversityGate(Checked):
    """w_i = 1 if |cos(p_i, p̄)| < similarity, else 0; p̄ is a running mean prediction of the
    samples kept.

    p̄ ← momentum · p̄ + (1 - momentum) · mean of the kept p_i, starting at the first kept mean;
    with no p̄ all are kept.
    """

    similarity: PositiveFraction = 0.4
    momentum: Fraction = 0.9

    def __call__(self, logits: Tensor, weights: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        p = logits.softmax(-1)
        running = _running(memory, p)
        if running is not None:
            cosine = (p @ running) / (p.norm(dim=-1) * running.norm())
            weights = weights * (cosine.abs() < self.similarity)
        kept = weights > 0
        if not kept.any():
            return weights, memory
        mean = p[kept].mean(0)
        updated = mean if running is None else self.momentum * running + (1 - self.momentum) * mean
        return weights, {**memory, _MEAN_PREDICTION: updated}


def _scale(values: Tensor) -> Tensor:
    """Values [n] of order one moved to [0, 1]; 0 if all are the same but for rounding."""
    low, high = values.min(), values.max()
    spread = high - low > 32 * torch.finfo(values.dtype).eps
    return (values - low) * spread / torch.where(spread, high - low, torch.ones_like(high))


@final
@dataclass(frozen=True)
class CertaintyDiversity(Checked):
    """w_i = β exp(d_i c_i / temperature), d_i = 1 - cos(p_i, p̄) and c_i = -H_i each scaled to [0,
    1] in the batch.

    0 if d_i is below its mean; p̄ ← momentum · p̄ + (1 - momentum) · mean p_i, from the uniform
    distribution.
    """

    temperature: Positive = 1 / 3
    momentum: Fraction = 0.9
    beta: Positive = 1.0

    def __call__(self, logits: Tensor, weights: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        p = logits.softmax(-1)
        running = _running(memory, p)
        running = torch.full_like(p[0], 1 / p.shape[-1]) if running is None else running
        diversity = _scale(1 - (p @ running) / (p.norm(dim=-1) * running.norm()))
        certainty = _scale(-entropy(logits))
        own = (diversity * certainty / self.temperature).exp() * (diversity >= diversity.mean())
        updated = self.momentum * running + (1 - self.momentum) * p.mean(0)
        return weights * (self.beta * own), {**memory, _MEAN_PREDICTION: updated}


@final
@dataclass(frozen=True)
class RunGate(Checked):
    """w_i = β t, t in [0, 1] the trust in shares of classes (label_runs.py): labels that come in
    runs teach nothing about a loss that wants all classes.
    """

    beta: Positive = 1.0

    def __call__(self, logits: Tensor, weights: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        counts = memory.get(LABELS)
        counts = start_counts(logits.shape[-1], logits) if counts is None else counts
        counts = count_labels(counts, logits.argmax(-1))
        trust = independence(counts)
        return weights * (self.beta * trust), {**memory, LABELS: counts}


@final
@dataclass(frozen=True)
class Recency(Checked):
    """w_i = β / (1 + exp(a_i / span)), a_i the samples that have come since sample i, if updates
    are made of a buffer of samples; β / 2 otherwise (RoTTA).
    """

    span: Positive = 64.0
    beta: Positive = 1.0

    def __call__(self, logits: Tensor, weights: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        ages = memory.get(_AGES)
        if ages is None:
            return weights * (self.beta / 2), memory
        require(len(ages) == len(weights), _AGES, f"{len(ages)} values", f"{len(weights)} values")
        return weights * (self.beta * torch.sigmoid(-ages.to(weights) / self.span)), memory


@final
@dataclass(frozen=True)
class Product:
    """Several weightings, one after the other; later ones see which samples the earlier ones
    kept.
    """

    factors: tuple[Weighting, ...] = (EntropyGate(), DiversityGate())

    def __post_init__(self) -> None:
        require(
            isinstance(self.factors, (tuple, list)) and len(self.factors) > 0,
            "Product.factors",
            self.factors,
            "a tuple of one weighting or more",
        )
        object.__setattr__(self, "factors", tuple(self.factors))
        for factor in self.factors:
            require_role("Product.factors", factor, "weighting", "EntropyGate()")
        require(
            sum(isinstance(factor, (DiversityGate, CertaintyDiversity)) for factor in self.factors)
            <= 1,
            "Product.factors",
            self.factors,
            "with one DiversityGate or CertaintyDiversity at most: they share their memory",
        )
        require(
            sum(isinstance(factor, RunGate) for factor in self.factors) <= 1,
            "Product.factors",
            self.factors,
            "with one RunGate at most: they share their memory",
        )

    def look(self, batch: Batch) -> Weighting:
        factors = tuple(look_at(batch, factor) for factor in self.factors)
        return unchecked(Product, factors=factors)

    def __call__(self, logits: Tensor, weights: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        for factor in self.factors:
            weights, memory = factor(logits, weights, memory)
        return weights, memory


register(
    weighting=(
        Constant,
        Reliability,
        EntropyGate,
        DiversityGate,
        CertaintyDiversity,
        RunGate,
        Recency,
        Product,
    )
)

"""Losses that samples of a batch enter jointly, by their logits and their features.

``BatchLoss`` makes one of any function of the batch; torch differentiates it. The others are those
of published methods.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor
from torch.nn import functional

from driftfilter.base.checks import (
    Checked,
    Count,
    Positive,
    PositiveCount,
    Role,
    register,
    require,
    unchecked,
)
from driftfilter.base.inputs import Inputs
from driftfilter.base.memory import remembered
from driftfilter.model.expansion import Expansion, couple, log_softmax, pad_features, separable
from driftfilter.model.losses import Loss, Targets, one_hot
from driftfilter.model.survey import SOURCE, SourceBatch, SourceSamples, from_source
from driftfilter.model.views import Augmentation, ImageViews, draw_copies
from driftfilter.model.weighting import Memory

Own = TypeVar("Own", bound=Loss)
_TINY = 1e-30  # in place of a discrepancy that is 0
_SHORT = 1e-12  # of vectors that have no direction
# In the memory of a filter:
QUEUE = remembered("loss.queue", "m", "D")  # features of earlier samples, see MomentAlignment
WINDOW = remembered(
    "loss.window", "w", "o"
)  # outputs [w, k + D] of earlier samples, see CentroidLabel
POSITION = remembered("loss.position", whole=True)  # of the next source sample, see SourceReplay


class Seen(NamedTuple):
    """A batch as a loss of it sees it: the samples that have a weight."""

    logits: Tensor  # [v, n, k], the clean inputs first, then their views
    features: Tensor  # [v, n, D]; D is 0 unless the loss asks for features
    fixed: Tensor  # [n, k], clean logits at the prior mean, or the teacher's; not differentiated
    source: Mapping[str, Tensor]  # what was remembered of the source


@final
@dataclass(frozen=True)
class BatchLoss(Checked, Loss):
    """Any differentiable function of a batch (``Seen``), which gives one number or one a sample.

    The function sees ``copies`` views by the ``augmentation`` after the clean inputs, ``features``
    if it asks for them, and what ``source`` gave: a function of all source samples (logits,
    features, labels) that is called once, before the stream, and gives tensors by name. Gradients
    are exact, samples coupled or not; the Hessian, if a curvature wants it, is the block of each
    sample. A batch of fewer than ``minimum`` samples says nothing.
    """

    function: Callable[[Seen], Tensor]
    augmentation: Annotated[Augmentation, Role("augmentation", "ImageViews()")] | None = None
    copies: Count = 0
    features: bool = False
    source: Callable[[SourceBatch], Mapping[str, Tensor]] | None = None
    minimum: PositiveCount = 2
    is_coupled = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(callable(self.function), "BatchLoss.function", self.function, "a function")
        allowed = "0 without an augmentation, 1 or more with one"
        fits = (self.augmentation is None) == (self.copies == 0)
        require(fits, "BatchLoss.copies", self.copies, allowed)

    @property
    def sees_features(self) -> bool:
        return self.features

    @property
    def needs_source(self) -> bool:
        return self.source is not None

    def survey(self, source: SourceSamples) -> Memory:
        assert self.source is not None
        return {SOURCE + name: value for name, value in self.source(source.gather()).items()}

    def remember(self, memory: Memory) -> Loss:
        if self.source is None:
            return self
        own = {
            name.removeprefix(SOURCE): value
            for name, value in memory.items()
            if name.startswith(SOURCE)
        }
        require(len(own) > 0, "state", "nothing of the source", "one of Filter.init with data=…")
        return _bind(self, _source=own)

    def divide(self, features: int) -> Loss:
        return _bind(self, _features=features)

    def views(self, inputs: Inputs, generator: Callable[[], torch.Generator]) -> tuple[Inputs, ...]:
        if self.augmentation is None:
            return (inputs,)
        return draw_copies(self.augmentation, inputs, self.copies, generator)

    def targets(self, logits: Tensor) -> Tensor:
        return logits[:, : logits.shape[1] - self.__dict__.get("_features", 0)]

    def expand(self, logits: Tensor, targets: Targets, weights: Tensor) -> Expansion:
        assert isinstance(targets, Tensor)
        k, fixed = targets.shape[-1], targets[weights > 0]
        source = self.__dict__.get("_source", {})
        return couple(
            lambda outputs: self.function(Seen(outputs[..., :k], outputs[..., k:], fixed, source)),
            logits,
            weights,
            self.minimum,
        )


@final
@dataclass(frozen=True)
class MomentAlignment(Checked, Loss):
    """s_C |C - C_S|² / 4D² + ½ s_m |m - m_S|² / D: mean m and covariance C of the batch's features
    z [n, D] should be the source's (TTT++).

    1 / s_C and 1 / s_m are what |C - C_1|² / 4D² and |m - m_1|² / D are on average over batches of
    source data, relative to the first of them, so that a source batch has a loss of about 1.5. C_S
    and m_S are the moments of all source batches but the first (of two halves, if there is one
    batch only). With a ``window`` the features of
    earlier samples count too, so many in all, and are not differentiated.
    """

    window: Count = 0
    is_coupled = True
    minimum = 2
    sees_features = True
    needs_source = True

    def survey(self, source: SourceSamples) -> Memory:
        found = [batch.features for batch in source if batch.features is not None]
        pieces = found[0].chunk(2) if len(found) == 1 else found
        batches = [batch for batch in pieces if len(batch) > 1]
        require(
            len(batches) > 1,
            "source data",
            f"{sum(map(len, found))} samples in {len(found)} batches",
            f"two batches or more of two samples or more, which {self} compares",
        )
        first, others = _moments(batches[0]), [_moments(batch) for batch in batches[1:]]
        usual = torch.stack([_discrepancies(first, other) for other in others]).mean(0)
        mean, covariance = _moments(torch.cat(batches[1:]))
        return {
            SOURCE + "mean": mean,
            SOURCE + "covariance": covariance,
            SOURCE + "discrepancies": usual.clamp_min(_TINY),
        }

    def divide(self, features: int) -> Loss:
        return _bind(self, _features=features)

    def recall(self, logits: Tensor, memory: Memory) -> tuple[Loss, Memory]:
        names = ("mean", "covariance", "discrepancies")
        source = tuple(from_source(memory, name, self) for name in names)
        features = logits[:, logits.shape[1] - self.__dict__["_features"] :]
        before = memory.get(QUEUE, features[:0])
        own = _bind(self, _source=source, _before=_last(before, self.window - len(features)))
        if self.window == 0:
            return own, memory
        return own, {**memory, QUEUE: _last(torch.cat((before, features)), self.window)}

    def expand(self, logits: Tensor, targets: Targets, weights: Tensor) -> Expansion:
        mean, covariance, usual = self.__dict__["_source"]
        before, columns = self.__dict__["_before"], self.__dict__["_features"]

        def align(outputs: Tensor) -> Tensor:
            features = outputs[0, :, outputs.shape[-1] - columns :]
            moments = _moments(torch.cat((features, before)))
            spread, shift = _discrepancies((mean, covariance), moments) / usual
            total: Tensor = spread + 0.5 * shift
            return total

        return couple(align, logits, weights)


def _moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [D] and unbiased covariance [D, D] of features [n, D]."""
    mean = features.mean(0)
    centred = features - mean
    return mean, centred.mT @ centred / (len(features) - 1)


def _discrepancies(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """|C - C'|² / 4D² and |m - m'|² / D [2]."""
    spread = (one[1] - other[1]).square().sum() / (4 * len(one[0]) ** 2)
    return torch.stack((spread, (one[0] - other[0]).square().mean()))


@final
@dataclass(frozen=True)
class Contrast(Checked, Loss):
    """-log of the probability that a sample's features pick those of its own other views out of
    the batch: mean over views a and b ≠ a of -log exp(s_ab) / Σ_c exp(s_ac), c ≠ a all views of all
    samples.

    s = z·z' / ``temperature``, z features of length one. The views are the clean input if
    ``clean``, ``copies`` augmented ones and, with ``prototypes``, the mean feature in the source of
    the class whose mean is nearest to the clean input's (SANTA).
    """

    augmentation: Annotated[Augmentation, Role("augmentation", "ImageViews()")] = field(
        default_factory=ImageViews
    )
    copies: PositiveCount = 1
    clean: bool = True
    prototypes: bool = False
    temperature: Positive = 0.1
    is_coupled = True
    minimum = 2
    sees_features = True

    def __post_init__(self) -> None:
        super().__post_init__()
        several = self.clean + self.copies + self.prototypes > 1
        require(several, "Contrast.copies", self.copies, "2 or more if they are the only views")

    @property
    def needs_source(self) -> bool:
        return self.prototypes

    def survey(self, source: SourceSamples) -> Memory:
        if not self.prototypes:
            return {}
        _, labels, logits, features = source.gather()
        assert features is not None
        called = one_hot(logits)
        if labels is not None:
            called = functional.one_hot(labels.to(logits.device), logits.shape[1]).to(features)
        counts = called.sum(0)[:, None].clamp_min(1)  # a class without samples has its mean at 0
        return {SOURCE + "prototypes": called.mT @ features / counts}

    def divide(self, features: int) -> Loss:
        return _bind(self, _features=features)

    def views(self, inputs: Inputs, generator: Callable[[], torch.Generator]) -> tuple[Inputs, ...]:
        return draw_copies(self.augmentation, inputs, self.copies, generator)

    def remember(self, memory: Memory) -> Loss:
        if not self.prototypes:
            return self
        return _bind(self, _prototypes=from_source(memory, "prototypes", self))

    def expand(self, logits: Tensor, targets: Targets, weights: Tensor) -> Expansion:
        start = logits.shape[-1] - self.__dict__["_features"]
        return couple(lambda outputs: self._contrast(outputs[..., start:]), logits, weights)

    def _contrast(self, features: Tensor) -> Tensor:
        """Values [n] of features [v, n, D]."""
        seen = features if self.clean else features[1:]
        if self.prototypes:
            seen = torch.cat((self._nearest(features[0].detach())[None], seen))
        views, n = seen.shape[:2]
        z = _unit(seen.flatten(0, 1))
        own = torch.eye(len(z), dtype=torch.bool, device=z.device)
        similar = (z @ z.mT / self.temperature).masked_fill(own, -torch.inf)
        logp = similar.log_softmax(-1).masked_fill(own, 0.0)
        pairs = logp.unflatten(1, (views, n)).unflatten(0, (views, n)).diagonal(dim1=1, dim2=3)
        values: Tensor = -pairs.sum((0, 1)) / (views * (views - 1))
        return values

    def _nearest(self, features: Tensor) -> Tensor:
        """The prototype [n, D] nearest in direction to features [n, D]."""
        prototypes: Tensor = self.__dict__["_prototypes"]
        alike = functional.normalize(features, dim=-1) @ functional.normalize(prototypes, dim=-1).mT
        alike = alike.masked_fill(~prototypes.any(-1), -torch.inf)
        return prototypes[alike.argmax(-1)]


@final
@dataclass(frozen=True)
class CentroidLabel(Checked, Loss):
    """-log p_ŷ, ŷ the class whose centroid is nearest in direction to a sample's features (SHOT).

    The centroid of a class is the mean of z = (features, 1) of length one over the last ``window``
    samples, the batch among them, weighted first by their probabilities, then, ``rounds`` - 1
    times, by their labels of before. A class that no sample is called takes no part. Labels are
    fixed at the prior mean; features of earlier batches are as they were then.
    """

    window: PositiveCount = 1000
    rounds: PositiveCount = 2
    sees_features = True

    def divide(self, features: int) -> Loss:
        return _bind(self, _features=features)

    def recall(self, logits: Tensor, memory: Memory) -> tuple[Loss, Memory]:
        n = len(logits)
        before = memory.get(WINDOW, logits[:0])
        together = torch.cat((_last(before, self.window - n), logits))
        own = _bind(self, _labels=self._label(together)[-n:])
        return own, {**memory, WINDOW: _last(together, self.window)}

    def _label(self, outputs: Tensor) -> Tensor:
        """ŷ of samples with logits and features [m, k + D], 1 there and 0 elsewhere [m, k]."""
        logits, features = self._split(outputs)
        z = functional.normalize(functional.pad(features, (0, 1), value=1.0), dim=-1)
        shares, labels = logits.softmax(-1), one_hot(logits)
        for _ in range(self.rounds):
            centroids = shares.mT @ z / (1e-8 + shares.sum(0)[:, None])
            alike = z @ functional.normalize(centroids, dim=-1).mT
            shares = labels = one_hot(alike.masked_fill(~labels.any(0), -torch.inf))
        return labels

    def _split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        k = outputs.shape[-1] - self.__dict__.get("_features", 0)
        return outputs[..., :k], outputs[..., k:]

    def targets(self, logits: Tensor) -> Tensor:
        labels: Tensor | None = self.__dict__.get("_labels")
        return self._label(logits) if labels is None else labels

    def expand(self, logits: Tensor, targets: Targets, weights: Tensor) -> Expansion:
        assert isinstance(targets, Tensor)
        own, features = self._split(logits)
        logp = log_softmax(own)
        first = -targets.expand_as(logp)
        expansion = separable((first * logp).sum(-1), logp.exp(), first, targets)
        return pad_features(expansion, features.shape[-1])


@final
@dataclass(frozen=True)
class SourceReplay(Checked, Loss):
    """-log p_y of source samples with labels y: as many in each step as the batch has, one after
    the other of the first ``samples``, again and again.

    They pass through the model in a batch of their own, and are kept in the filter's state. Without
    labels y is what the model calls them before the stream. Source sample i counts as much as
    sample i of the batch.
    """

    samples: PositiveCount = 512
    copies = 1
    needs_source = True

    def survey(self, source: SourceSamples) -> Memory:
        inputs: list[Tensor] = []
        labels: list[Tensor] = []
        for batch in source:
            require(
                isinstance(batch.inputs, Tensor),
                "source data",
                type(batch.inputs).__name__,
                f"one tensor a batch for {self}",
            )
            inputs.append(batch.inputs)
            labels.append(batch.logits.argmax(-1) if batch.labels is None else batch.labels)
            if sum(map(len, inputs)) >= self.samples:
                break
        require(len(inputs) > 0, "source data", "no samples", "one batch or more")
        kept, called = torch.cat(inputs)[: self.samples], torch.cat(labels)[: self.samples]
        return {SOURCE + "inputs": kept, SOURCE + "labels": called.to(kept.device)}

    def remember(self, memory: Memory) -> Loss:
        own = {name: from_source(memory, name, self) for name in ("inputs", "labels")}
        return _bind(self, _source=own, _position=int(memory.get(POSITION, 0)))

    def _places(self, samples: int, device: torch.device) -> Tensor:
        """Of the source samples of a step [n]."""
        start, total = self.__dict__["_position"], len(self.__dict__["_source"]["labels"])
        return torch.arange(start, start + samples, device=device) % total

    def views(self, inputs: Inputs, generator: Callable[[], torch.Generator]) -> tuple[Inputs, ...]:
        kept: Tensor = self.__dict__["_source"]["inputs"]
        return inputs, kept[self._places(len(inputs), kept.device)]

    def recall(self, logits: Tensor, memory: Memory) -> tuple[Loss, Memory]:
        following = self.__dict__["_position"] + len(logits)
        total = len(self.__dict__["_source"]["labels"])
        return self, {**memory, POSITION: torch.tensor(following % total)}

    def targets(self, logits: Tensor) -> Tensor:
        labels: Tensor = self.__dict__["_source"]["labels"]
        own = labels[self._places(len(logits), labels.device)].long()
        return functional.one_hot(own, logits.shape[1]).to(logits)

    def expand(self, logits: Tensor, targets: Targets, weights: Tensor) -> Expansion:
        assert isinstance(targets, Tensor)
        logp = log_softmax(logits)
        share = logits.new_tensor((0.0, 1.0)).view(2, *[1] * (logits.dim() - 1))
        t = share * targets
        return separable(-(t * logp).sum(-1), logp.exp(), -t, t, (0.0, 1.0))


def _unit(vectors: Tensor) -> Tensor:
    """Vectors [n, D] of length one; those next to nothing are multiplied by 1e12 and no more, and
    may be differentiated twice.
    """
    short = vectors.detach().norm(dim=-1, keepdim=True) < _SHORT
    length = vectors.masked_fill(short, 1.0).norm(dim=-1, keepdim=True)
    unit: Tensor = vectors / length.masked_fill(short, _SHORT)
    return unit


def _last(rows: Tensor, count: int) -> Tensor:
    """The last so many rows, or all if there are fewer."""
    return rows[max(len(rows) - max(count, 0), 0) :]


def _bind(loss: Own, **found: Any) -> Own:
    """A loss with what is known of it for the time of a step."""
    return unchecked(type(loss), **{**loss.__dict__, **found})


register(loss=(MomentAlignment, Contrast, CentroidLabel, SourceReplay))

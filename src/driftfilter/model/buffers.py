"""Buffers: which samples of the stream are kept, for updates to be made of in the place of the
last batch.

A buffer sees what was predicted for new samples, and says which of those kept and of the new ones
stay. What it knows of them is saved with them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, final, runtime_checkable

import torch
from torch import Tensor

from driftfilter.base.checks import Checked, NotNegative, PositiveCount, register
from driftfilter.base.memory import remembered

Known: TypeAlias = Mapping[str, Tensor]
SAMPLE = "sample."  # in the memory, while an update is made of a buffer: what is known of samples
# Names of what is known, [m] each:
LABEL, UNCERTAINTY, AGE = "label", "uncertainty", "age"
COUNTS = "counts"  # of samples that were called each class so far [k]
remembered(SAMPLE + LABEL, "m", whole=True, beside=SAMPLE + AGE)
remembered(SAMPLE + AGE, "m", whole=True, beside=SAMPLE + UNCERTAINTY)
remembered(SAMPLE + UNCERTAINTY, "m", beside=SAMPLE + LABEL)
remembered(SAMPLE + COUNTS, "k", whole=True)


@runtime_checkable
class Buffer(Protocol):
    """Which samples are kept."""

    @property
    def every(self) -> int:
        """Samples between two updates."""

    def choose(
        self, known: Known, log_probabilities: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Known]:
        """Places [m] of the samples to keep, among those kept and then the new ones; and what is
        known of them, by name.

        ``known`` is what the last call gave, nothing at first; ``log_probabilities`` [n, k] were
        predicted for the new samples.
        """


@dataclass
class _Item:
    """A sample in a buffer."""

    place: int
    label: int
    uncertainty: float
    age: int = 0


def _items(known: Known) -> list[_Item]:
    columns = (known[name].tolist() for name in (LABEL, UNCERTAINTY, AGE))
    return [_Item(place, *row) for place, row in enumerate(zip(*columns, strict=True))]


def _new_items(known: Known, log_probabilities: Tensor) -> tuple[list[_Item], list[_Item]]:
    """Samples kept, and new ones with their labels and entropies, -Σ p log(p + 1e-6)."""
    kept = _items(known) if LABEL in known else []
    p = log_probabilities.double().exp()
    uncertain = -(p * (p + 1e-6).log()).sum(-1)
    pairs = zip(p.argmax(-1).tolist(), uncertain.tolist(), strict=True)
    return kept, [_Item(len(kept) + place, *pair) for place, pair in enumerate(pairs)]


def _pack(items: list[_Item]) -> tuple[Tensor, dict[str, Tensor]]:
    """Places and what is known, class by class and within a class in the order they came."""
    items = sorted(items, key=lambda item: item.label)
    known = {
        LABEL: torch.tensor([item.label for item in items], dtype=torch.int64),
        UNCERTAINTY: torch.tensor([item.uncertainty for item in items], dtype=torch.float64),
        AGE: torch.tensor([item.age for item in items], dtype=torch.int64),
    }
    return torch.tensor([item.place for item in items], dtype=torch.int64), known


@final
@dataclass(frozen=True)
class CategoryBalanced(Checked):
    """RoTTA's memory: no class has more than its share of the ``capacity``, and the old and the
    uncertain go first.

    A sample has the score λ_t / (1 + exp(-age / capacity)) + λ_u H / ln k, its age in samples that
    came since. A new one of a class that has its share, capacity / k, takes the place of the
    highest score in that class; else, if the buffer is full, of the highest in the largest classes;
    in both cases only if that is above its own. λ_t is ``timeliness``, λ_u ``uncertainty``.
    """

    capacity: PositiveCount = 64
    every: PositiveCount = 64
    timeliness: NotNegative = 1.0
    uncertainty: NotNegative = 1.0

    def choose(
        self, known: Known, log_probabilities: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Known]:
        kept, new = _new_items(known, log_probabilities)
        classes = log_probabilities.shape[-1]
        for item in new:
            if self._make_room(kept, item, classes):
                kept.append(item)
            for each in kept:
                each.age += 1
        return _pack(kept)

    def _make_room(self, kept: list[_Item], new: _Item, classes: int) -> bool:
        """Whether a new sample comes in; another one leaves if need be."""
        counts = [0] * classes
        for item in kept:
            counts[item.label] += 1
        if counts[new.label] < self.capacity / classes:
            if len(kept) < self.capacity:
                return True
            largest = {label for label in range(classes) if counts[label] == max(counts)}
        else:
            largest = {new.label}
        # Of equal scores the last, as the authors' code walks from class to class.
        rivals = sorted((item for item in kept if item.label in largest), key=lambda i: i.label)
        worst = max(reversed(rivals), key=lambda item: self._score(item, classes))
        if self._score(worst, classes) <= self._score(new, classes):
            return False
        kept.remove(worst)
        return True

    def _score(self, item: _Item, classes: int) -> float:
        age = 1 / (1 + math.exp(-item.age / self.capacity))
        unsure = item.uncertainty / math.log(max(classes, 2))
        return self.timeliness * age + self.uncertainty * unsure


@final
@dataclass(frozen=True)
class PredictionBalanced(Checked):
    """NOTE's reservoir: as many samples of each predicted class as there are, by chance which.

    A new sample comes in while there is room. Then one of a class that is not among the largest
    takes the place of a random sample of a random one of these; one of a largest class that of a
    random sample of its own class, with probability m_c / n_c, samples kept and seen of it.
    """

    capacity: PositiveCount = 64
    every: PositiveCount = 64

    def choose(
        self, known: Known, log_probabilities: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Known]:
        kept, new = _new_items(known, log_probabilities)
        classes = log_probabilities.shape[-1]
        seen = known[COUNTS].tolist() if COUNTS in known else [0] * classes
        device = generator.device
        draws = torch.rand(len(new), 3, generator=generator, device=device, dtype=torch.float64)
        for item, chances in zip(new, draws.tolist(), strict=True):
            seen[item.label] += 1
            if self._make_room(kept, item, seen, chances):
                kept.append(item)
            for each in kept:
                each.age += 1
        places, found = _pack(kept)
        return places, {**found, COUNTS: torch.tensor(seen, dtype=torch.int64)}

    def _make_room(
        self, kept: list[_Item], new: _Item, seen: list[int], chances: list[float]
    ) -> bool:
        """Whether a new sample comes in; another one leaves if need be."""
        if len(kept) < self.capacity:
            return True
        counts = [0] * len(seen)
        for item in kept:
            counts[item.label] += 1
        largest = [label for label, count in enumerate(counts) if count == max(counts)]
        label = new.label
        if label not in largest:
            label = largest[int(chances[0] * len(largest))]
        elif chances[2] > counts[label] / seen[label]:
            return False
        rivals = [item for item in kept if item.label == label]
        kept.remove(rivals[int(chances[1] * len(rivals))])
        return True


register(buffer=(CategoryBalanced, PredictionBalanced))

"""The order in which a stream brings its samples and shifts: protocols are values, and plans are
pure functions of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from driftfilter.app.corruptions import CORRUPTIONS
from driftfilter.app.streams import Shift, shift_of
from driftfilter.base.checks import require, require_count, require_number


@final
@dataclass(frozen=True, eq=False)
class Step:
    """One batch of a plan."""

    index: Tensor  # [n], sample numbers
    domain: Tensor  # [n], the shift of each sample: a position in the domains of the plan
    reset: bool  # start again from the source before this step
    round: int = 0  # how often the sequence of corruptions has come before


class StreamPlan(NamedTuple):
    """The batches of a stream, in order, and the shifts that they name by position."""

    steps: tuple[Step, ...]
    domains: tuple[Shift, ...]

    def samples(self) -> tuple[Tensor, Tensor]:
        """Sample numbers and domains of all batches together, each [samples]."""
        index, domain = zip(*((step.index, step.domain) for step in self.steps), strict=True)
        return torch.cat(index), torch.cat(domain)


@final
@dataclass(frozen=True)
class StreamSettings:
    """What all protocols share.

    Under each corruption come its first ``images`` samples (None: all), in the order of the data or
    ``shuffled`` anew; ``order`` is that of the corruptions. Batches never span a change of shift
    (but for ``Mixed``): the last of each is smaller.
    """

    corruptions: tuple[str, ...] = tuple(CORRUPTIONS)
    severity: int = 5
    batch: int = 200
    images: int | None = None
    order: Literal["given", "shuffled"] = "given"
    shuffled: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        named = isinstance(self.corruptions, tuple) and len(self.corruptions) > 0
        distinct = named and len(set(self.corruptions)) == len(self.corruptions)
        require(
            distinct, "corruptions", self.corruptions, "a tuple of distinct names, at least one"
        )
        shift_of(self.corruptions[0], self.severity)
        require_count("batch", self.batch, 1)
        if self.images is not None:
            require_count("images", self.images, 1)
        require(self.order in ("given", "shuffled"), "order", self.order, "'given' or 'shuffled'")
        require(isinstance(self.shuffled, bool), "shuffled", self.shuffled, "a bool")
        require_count("seed", self.seed, 0)


class Visit(NamedTuple):
    """Samples that come under one shift, batch after batch."""

    corruption: str
    severity: int
    samples: Tensor  # [n]
    round: int = 0


@final
@dataclass(frozen=True)
class Episodic:
    """Every corruption by itself, from the source."""

    def __call__(self, stream: StreamSettings, labels: Tensor) -> StreamPlan:
        """The plan for samples with labels [N]."""
        return _plan(stream, _visits(stream, labels, _random(stream)), reset=True)


@final
@dataclass(frozen=True)
class Continual:
    """One corruption after the other, never reset; ``rounds`` > 1: the whole sequence again, the
    same each time.
    """

    rounds: int = 1

    def __post_init__(self) -> None:
        require_count("rounds", self.rounds, 1)

    def __call__(self, stream: StreamSettings, labels: Tensor) -> StreamPlan:
        """The plan for samples with labels [N]."""
        visits = _visits(stream, labels, _random(stream))
        return _plan(
            stream,
            [visit._replace(round=number) for number in range(self.rounds) for visit in visits],
        )


@final
@dataclass(frozen=True)
class Gradual:
    """Each corruption comes and goes by severities 1, 2, …, s, …, 2, 1, never reset; s that of the
    stream, 5 as a rule.

    The samples of a corruption are shared out over its 2s - 1 stages, so that each comes once
    (CoTTA's gradual protocol shows all of them at every stage, nine times the steps).
    """

    def __call__(self, stream: StreamSettings, labels: Tensor) -> StreamPlan:
        """The plan for samples with labels [N]."""
        stages = [*range(1, stream.severity), *range(stream.severity, 0, -1)]
        visits = _visits(stream, labels, _random(stream))
        parts = [
            zip(stages, visit.samples.tensor_split(len(stages)), strict=True) for visit in visits
        ]
        return _plan(
            stream,
            [
                Visit(name, *each)
                for (name, *_), part in zip(visits, parts, strict=True)
                for each in part
            ],
        )


@final
@dataclass(frozen=True)
class Mixed:
    """Every sample of a batch from a corruption of its own, all uniformly mixed, never reset."""

    def __call__(self, stream: StreamSettings, labels: Tensor) -> StreamPlan:
        """The plan for samples with labels [N]."""
        random = _random(stream)
        visits = _visits(stream, labels, random)
        index = torch.cat([visit.samples for visit in visits])
        domain = torch.arange(len(visits)).repeat_interleave(len(visits[0].samples))
        order = torch.from_numpy(random.permutation(len(index)))
        batches = zip(
            index[order].split(stream.batch), domain[order].split(stream.batch), strict=True
        )
        return StreamPlan(
            tuple(Step(*each, False) for each in batches),
            tuple(shift_of(*visit[:2]) for visit in visits),
        )


@final
@dataclass(frozen=True)
class Correlated:
    """Like ``Continual``, but samples near each other share labels: time is cut in slots, class c
    has shares p_c of them.

    p_c ~ Dirichlet(concentration, …, concentration) over the slots, and the classes of a slot come
    one after the other, in an order of its own; the smaller the concentration, the longer the runs
    of one label. As in the streams of NOTE and RoTTA.
    """

    concentration: float = 0.1
    slots: int = 100

    def __post_init__(self) -> None:
        require_number("concentration", self.concentration, 0, np.inf, open_low=True)
        require_count("slots", self.slots, 1)

    def __call__(self, stream: StreamSettings, labels: Tensor) -> StreamPlan:
        """The plan for samples with labels [N]."""
        random = _random(stream)
        visits = _visits(stream, labels, random)
        return _plan(
            stream,
            [visit._replace(samples=self._sort(visit.samples, labels, random)) for visit in visits],
        )

    def _sort(self, index: Tensor, labels: Tensor, random: np.random.Generator) -> Tensor:
        """The samples index [n], slot by slot."""
        members = [index[labels[index] == label] for label in labels[index].unique()]
        shares = random.dirichlet(
            np.full(self.slots, self.concentration), len(members)
        )  # [k, slots]
        parts = [_share_out(each, share) for each, share in zip(members, shares, strict=True)]
        return torch.cat(
            [
                parts[label][slot]
                for slot in range(self.slots)
                for label in random.permutation(len(parts))
            ]
        )


@final
@dataclass(frozen=True)
class Recurring:
    """Short visits that return, never reset: the samples of each corruption are cut in ``rounds``
    parts, one for each round.
    """

    rounds: int = 3

    def __post_init__(self) -> None:
        require_count("rounds", self.rounds, 1)

    def __call__(self, stream: StreamSettings, labels: Tensor) -> StreamPlan:
        """The plan for samples with labels [N]."""
        visits = _visits(stream, labels, _random(stream))
        parts = [visit.samples.tensor_split(self.rounds) for visit in visits]
        each = [
            (number, *pair)
            for number in range(self.rounds)
            for pair in zip(visits, parts, strict=True)
        ]
        return _plan(
            stream,
            [visit._replace(samples=part[number], round=number) for number, visit, part in each],
        )


AnyProtocol: TypeAlias = Episodic | Continual | Gradual | Mixed | Correlated | Recurring

PROTOCOLS: dict[str, type[AnyProtocol]] = {
    "reset": Episodic,
    "continual": Continual,
    "gradual": Gradual,
    "mixed": Mixed,
    "correlated": Correlated,
    "recurring": Recurring,
}


def _random(stream: StreamSettings) -> np.random.Generator:
    return np.random.default_rng(stream.seed)


def _visits(stream: StreamSettings, labels: Tensor, random: np.random.Generator) -> list[Visit]:
    """One visit of each corruption with all its samples, at the severity of the stream."""
    count = len(labels) if stream.images is None else stream.images
    require(
        0 < count <= len(labels), "images", count, f"at most {len(labels)}, the samples there are"
    )
    names = np.array(stream.corruptions)
    ordered = random.permutation(names) if stream.order == "shuffled" else names
    return [
        Visit(str(name), stream.severity, _samples(count, stream.shuffled, random))
        for name in ordered
    ]


def _samples(count: int, shuffled: bool, random: np.random.Generator) -> Tensor:
    return torch.from_numpy(random.permutation(count)) if shuffled else torch.arange(count)


def _plan(stream: StreamSettings, visits: Iterable[Visit], reset: bool = False) -> StreamPlan:
    """Visits cut in batches; ``reset`` before each visit."""
    shifts = [(shift_of(*visit[:2]), visit) for visit in visits if len(visit.samples)]
    domains = tuple(dict.fromkeys(shift for shift, _ in shifts))
    steps = [
        Step(part, torch.full_like(part, domains.index(shift)), reset and number == 0, visit.round)
        for shift, visit in shifts
        for number, part in enumerate(visit.samples.split(stream.batch))
    ]
    return StreamPlan(tuple(steps), domains)


def _share_out(
    index: Tensor, shares: np.ndarray[tuple[int, ...], np.dtype[np.float64]]
) -> tuple[Tensor, ...]:
    """Samples [n] cut in order by shares [slots] that sum to 1."""
    cuts = (len(index) * shares.cumsum()[:-1]).round().astype(int)
    return index.tensor_split(cuts.tolist())

"""The order in which a stream brings its samples and shifts: protocols are values, and plans are
pure functions of them.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from driftfilter.app.corruptions import CORRUPTIONS
from driftfilter.app.readers.stored import CLEAN, Shift, shift_of
from driftfilter.base.checks import Count, Interval, Positive, PositiveCount, check_fields, require


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

    Under each corruption come its first ``images`` samples (None, or more than a domain has: all),
    in the order of the data or ``shuffled`` anew; ``order`` is that of the corruptions. Batches
    never span a change of shift (but for ``Mixed``): the last of each is smaller.
    """

    corruptions: tuple[str, ...] = tuple(CORRUPTIONS)
    severity: int = 5
    batch: PositiveCount = 200
    images: PositiveCount | None = None
    order: Literal["given", "shuffled"] = "given"
    shuffled: bool = False
    seed: Count = 0

    def __post_init__(self) -> None:
        names = self.corruptions
        distinct = isinstance(names, tuple) and 0 < len(names) == len(set(names))
        require(distinct, "corruptions", names, "a tuple of distinct names, at least one")
        shift_of(names[0], self.severity)
        check_fields(self, "")


# Sample numbers [n] by the name of a shift; None in its place: all samples come under every shift.
Members: TypeAlias = Mapping[str, Tensor]


class Visit(NamedTuple):
    """Samples that come under one shift, batch after batch."""

    corruption: str
    severity: int
    samples: Tensor  # [n]
    round: int = 0


class _Checked:
    """Fields are held to their annotations; messages name them as options are written."""

    def __post_init__(self) -> None:
        check_fields(self, "")


@final
@dataclass(frozen=True)
class Clean:
    """The images without corruption."""

    def __call__(
        self, stream: StreamSettings, labels: Tensor, members: Members | None = None
    ) -> StreamPlan:
        """The plan for samples with labels [N], of which each shift has its members."""
        clean = replace(stream, corruptions=(CLEAN.corruption,))
        return _plan(stream, _visits(clean, labels, members, _random(stream)))


@final
@dataclass(frozen=True)
class Episodic:
    """Every corruption by itself, from the source."""

    def __call__(
        self, stream: StreamSettings, labels: Tensor, members: Members | None = None
    ) -> StreamPlan:
        """The plan for samples with labels [N], of which each shift has its members."""
        return _plan(stream, _visits(stream, labels, members, _random(stream)), reset=True)


@final
@dataclass(frozen=True)
class Continual(_Checked):
    """One corruption after the other, never reset; ``rounds`` > 1: the whole sequence again, the
    same each time.
    """

    rounds: PositiveCount = 1

    def __call__(
        self, stream: StreamSettings, labels: Tensor, members: Members | None = None
    ) -> StreamPlan:
        """The plan for samples with labels [N], of which each shift has its members."""
        visits = _visits(stream, labels, members, _random(stream))
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

    def __call__(
        self, stream: StreamSettings, labels: Tensor, members: Members | None = None
    ) -> StreamPlan:
        """The plan for samples with labels [N], of which each shift has its members."""
        stages = [*range(1, stream.severity), *range(stream.severity, 0, -1)]
        return _plan(
            stream,
            [
                visit._replace(severity=stage, samples=part)
                for visit in _visits(stream, labels, members, _random(stream))
                for stage, part in zip(stages, visit.samples.tensor_split(len(stages)), strict=True)
            ],
        )


@final
@dataclass(frozen=True)
class Mixed:
    """Every sample of a batch from a corruption of its own, all uniformly mixed, never reset."""

    def __call__(
        self, stream: StreamSettings, labels: Tensor, members: Members | None = None
    ) -> StreamPlan:
        """The plan for samples with labels [N], of which each shift has its members."""
        random = _random(stream)
        visits = _visits(stream, labels, members, random)
        index = torch.cat([visit.samples for visit in visits])
        sizes = torch.tensor([len(visit.samples) for visit in visits])
        domain = torch.arange(len(visits)).repeat_interleave(sizes)
        return StreamPlan(
            tuple(
                Step(index[some], domain[some], False)
                for some in torch.from_numpy(random.permutation(len(index))).split(stream.batch)
            ),
            tuple(shift_of(*visit[:2]) for visit in visits),
        )


@final
@dataclass(frozen=True)
class Correlated(_Checked):
    """Like ``Continual``, but samples near each other share labels: time is cut in slots, class c
    has shares p_c of them.

    p_c ~ Dirichlet(concentration, …, concentration) over the slots, and the classes of a slot come
    one after the other, in an order of its own; the smaller the concentration, the longer the runs
    of one label. As in the streams of NOTE and RoTTA.
    """

    concentration: Positive = 0.1
    slots: PositiveCount = 100

    def __call__(
        self, stream: StreamSettings, labels: Tensor, members: Members | None = None
    ) -> StreamPlan:
        """The plan for samples with labels [N], of which each shift has its members."""
        return _rearrange(stream, labels, members, self._sort)

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
class Sorted:
    """Like ``Continual``, but the samples of a corruption come class by class."""

    def __call__(
        self, stream: StreamSettings, labels: Tensor, members: Members | None = None
    ) -> StreamPlan:
        """The plan for samples with labels [N], of which each shift has its members."""
        return _rearrange(
            stream,
            labels,
            members,
            lambda index, labels, _: index[labels[index].argsort(stable=True)],
        )


@final
@dataclass(frozen=True)
class Imbalanced(_Checked):
    """Like ``Continual``, with shares of the classes that fall from 1 to 1/``ratio``, the common
    ones drawn anew for each corruption; in random order.
    """

    ratio: Annotated[float, Interval(1, math.inf)] = 10.0

    def __call__(
        self, stream: StreamSettings, labels: Tensor, members: Members | None = None
    ) -> StreamPlan:
        """The plan for samples with labels [N], of which each shift has its members."""
        return _rearrange(stream, labels, members, self._thin_out)

    def _thin_out(self, index: Tensor, labels: Tensor, random: np.random.Generator) -> Tensor:
        """A part of the samples index [n]; of every class one at least."""
        classes = random.permutation(labels[index].unique().numpy())
        shares = np.geomspace(1, 1 / self.ratio, len(classes))
        kept = []
        for label, share in zip(classes, shares, strict=True):
            own = index[labels[index] == int(label)]
            own = own[torch.from_numpy(random.permutation(len(own)))]
            kept.append(own[: max(1, round(share * len(own)))])
        together = torch.cat(kept)
        return together[torch.from_numpy(random.permutation(len(together)))]


@final
@dataclass(frozen=True)
class Returning:
    """Like ``Continual``, but clean images come between the corruptions: the first half of the
    samples of each is corrupted, the other half is not.
    """

    def __call__(
        self, stream: StreamSettings, labels: Tensor, members: Members | None = None
    ) -> StreamPlan:
        """The plan for samples with labels [N], of which each shift has its members."""
        parts: list[Visit] = []
        for visit in _visits(stream, labels, members, _random(stream)):
            bad, good = visit.samples.tensor_split(2)
            clean = Visit(CLEAN.corruption, stream.severity, good)
            parts += [visit._replace(samples=bad), clean]
        return _plan(stream, parts)


@final
@dataclass(frozen=True)
class Recurring(_Checked):
    """Short visits that return, never reset: the samples of each corruption are cut in ``rounds``
    parts, one for each round.
    """

    rounds: PositiveCount = 3

    def __call__(
        self, stream: StreamSettings, labels: Tensor, members: Members | None = None
    ) -> StreamPlan:
        """The plan for samples with labels [N], of which each shift has its members."""
        visits = _visits(stream, labels, members, _random(stream))
        parts = [(visit, visit.samples.tensor_split(self.rounds)) for visit in visits]
        return _plan(
            stream,
            [
                visit._replace(samples=part[number], round=number)
                for number in range(self.rounds)
                for visit, part in parts
            ],
        )


AnyProtocol: TypeAlias = (
    Clean
    | Episodic
    | Continual
    | Gradual
    | Mixed
    | Correlated
    | Sorted
    | Imbalanced
    | Returning
    | Recurring
)

PROTOCOLS: dict[str, type[AnyProtocol]] = {
    "clean": Clean,
    "reset": Episodic,
    "continual": Continual,
    "gradual": Gradual,
    "mixed": Mixed,
    "correlated": Correlated,
    "sorted": Sorted,
    "imbalanced": Imbalanced,
    "returning": Returning,
    "recurring": Recurring,
}


def _random(stream: StreamSettings) -> np.random.Generator:
    return np.random.default_rng(stream.seed)


def _visits(
    stream: StreamSettings, labels: Tensor, members: Members | None, random: np.random.Generator
) -> list[Visit]:
    """One visit of each corruption with all its samples, at the severity of the stream."""
    names = np.array(stream.corruptions)
    return [
        Visit(str(name), stream.severity, _choose(stream, str(name), labels, members, random))
        for name in (random.permutation(names) if stream.order == "shuffled" else names)
    ]


def _choose(
    stream: StreamSettings,
    name: str,
    labels: Tensor,
    members: Members | None,
    random: np.random.Generator,
) -> Tensor:
    """The samples [n] of a corruption, in the order in which they come."""
    if members is None:
        count = len(labels) if stream.images is None else stream.images
        there = f"at most {len(labels)}, the samples there are"
        require(0 < count <= len(labels), "images", count, there)
        own = torch.arange(count)
    else:
        require(name in members, "shift", name, f"one of {', '.join(members)}")
        own = members[name][: stream.images]
    return own[torch.from_numpy(random.permutation(len(own)))] if stream.shuffled else own


def _plan(stream: StreamSettings, visits: Iterable[Visit], reset: bool = False) -> StreamPlan:
    """Visits cut in batches; ``reset`` before each visit."""
    shifts = [(shift_of(*visit[:2]), visit) for visit in visits if len(visit.samples)]
    domains = tuple(dict.fromkeys(shift for shift, _ in shifts))
    steps = (
        Step(part, torch.full_like(part, domains.index(shift)), reset and number == 0, visit.round)
        for shift, visit in shifts
        for number, part in enumerate(visit.samples.split(stream.batch))
    )
    return StreamPlan(tuple(steps), domains)


def _rearrange(
    stream: StreamSettings,
    labels: Tensor,
    members: Members | None,
    order: Callable[[Tensor, Tensor, np.random.Generator], Tensor],
) -> StreamPlan:
    """One corruption after the other, the samples [n] of each in another order, or a part."""
    random = _random(stream)
    return _plan(
        stream,
        [
            visit._replace(samples=order(visit.samples, labels, random))
            for visit in _visits(stream, labels, members, random)
        ],
    )


def _share_out(
    index: Tensor, shares: np.ndarray[tuple[int, ...], np.dtype[np.float64]]
) -> tuple[Tensor, ...]:
    """Samples [n] cut in order by shares [slots] that sum to 1."""
    return index.tensor_split((len(index) * shares.cumsum()[:-1]).round().astype(int).tolist())

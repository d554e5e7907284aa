"""What an adapter remembers of each domain of its stream: a filter state of its own.

Which domain a sample is of, ``model/domains.py`` says. Here states change places: that of the
domain at hand is the adapter's own, all others wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from driftfilter.base.checks import require, unchecked
from driftfilter.base.inputs import Inputs, check_inputs
from driftfilter.filtering import FilterState
from driftfilter.gaussian.belief import Belief
from driftfilter.model.domains import SOURCE, Division, KnownDomains
from driftfilter.monitor.state import MONITOR, MonitorState
from driftfilter.storage.state_tensors import (
    from_tensors,
    read_count,
    samples_from_tensors,
    samples_to_tensors,
    to_tensors,
)

DOMAINS = "domains."  # in a checkpoint
_KNOWN, _ACTIVE, _SHARES, _CALLS = "known.", "active", "shares", "calls"
_STATE = "state."


class Slot(NamedTuple):
    """What an adapter knows in a domain. All that is None begins with the source."""

    state: FilterState | None = None
    recent: Inputs | None = None
    calls: int = 0
    watch: MonitorState = MonitorState()  # what concerns the belief

    @property
    def states(self) -> list[FilterState]:
        """The state, and those that a monitor may go back to."""
        every = (self.state, self.watch.good, self.watch.newer)
        return [state for state in every if state is not None]

    def begin(self, start: FilterState, carry: float) -> Slot:
        """What a new domain begins with: of the belief of another the share ``carry`` of its way
        from the source, and all else of the source.

        Statistics and offsets are a domain's own; those of another one cost a network with batch
        norm up to 30 points on its first batches, the source's never.
        """
        if self.state is None:
            return Slot(watch=self.watch)
        belief, source = self.state.belief, self.state.source
        if carry < 1:
            mean = torch.lerp(source.mean, belief.mean, carry)
            belief = unchecked(Belief, mean=mean, covariance=belief.covariance)
        state = replace(self.state, belief=belief, memory=start.memory)
        return Slot(state, calls=self.calls, watch=self.watch)

    def map_states(self, change: Callable[[FilterState], FilterState], good: bool = False) -> Slot:
        """With another state, and the monitor's where it is; with ``good`` these change, too."""
        if self.state is None:
            return self
        state, watch = change(self.state), self.watch.map_states(change) if good else self.watch
        return self._replace(state=state, watch=watch.move_to(state.belief.mean))

    def to_tensors(self) -> dict[str, Tensor]:
        """As named tensors, for a checkpoint; the source of the states is not repeated."""
        found = {_CALLS: torch.tensor(self.calls), **samples_to_tensors(self.recent)}
        tensors = {} if self.state is None else to_tensors(self.state, with_source=False)
        found |= {_STATE + key: value for key, value in tensors.items()}
        return found | (self.watch.to_tensors() if self.watch.turns else {})

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], beside: Mapping[str, Tensor], like: FilterState
    ) -> Slot:
        """What named tensors describe, for states of the structure of another one; ``beside``: the
        source, and what the monitor knows of the stream.
        """
        own = _below(tensors, _STATE)
        state = from_tensors({**own, **_with(beside, "source.")}, like) if own else None
        watch = MonitorState.from_tensors({**beside, **tensors}, like)
        recent = samples_from_tensors(tensors)
        kept = None if recent is None else check_inputs(recent)
        calls = read_count(_CALLS, tensors)
        return cls(state, kept, calls, MonitorState(**watch.of_belief))


class DomainMemory(NamedTuple):
    """The domains of a stream."""

    known: KnownDomains
    slots: tuple[Slot, ...]  # of each domain; that of the active one is out of date
    active: int = 0  # -1: none, one is to be entered
    shares: Mapping[int, int] = {}  # samples in the last batch, by name
    before: frozenset[int] = frozenset()  # names in the batch before that

    def follow(self, division: Division, start: FilterState, carry: float) -> DomainMemory:
        """With the domains of a division. One that is new begins with a share ``carry`` of what its
        origin has learned, and with the source's statistics of a state to start from.
        """
        slots: list[Slot] = []
        for place, origin in enumerate(division.origins):
            slot = Slot() if origin == SOURCE else self.slots[origin]
            is_new = origin in division.origins[:place]
            slots.append(slot.begin(start, carry) if is_new else slot)
        origins = division.origins
        active = origins.index(self.active) if self.active in origins else -1
        places, counts = division.owners.unique(return_counts=True)
        shares = dict(zip(division.known.names[places].tolist(), counts.tolist(), strict=True))
        return DomainMemory(division.known, tuple(slots), active, shares, frozenset(self.shares))

    @property
    def is_elsewhere(self) -> bool:
        """Whether no domain of the last batch was there in the batch before."""
        return bool(self.before) and self.before.isdisjoint(self.shares)

    def returns(self, place: int) -> bool:
        """Whether a domain was not there in the batch before."""
        return int(self.known.names[place]) not in self.before

    @property
    def states(self) -> list[FilterState]:
        """All that wait."""
        return [state for slot in self.slots for state in slot.states]

    def map_slots(self, change: Any) -> DomainMemory:
        """With other slots."""
        return self._replace(slots=tuple(map(change, self.slots)))

    def to_tensors(self) -> dict[str, Tensor]:
        """As named tensors, for a checkpoint."""
        shares = torch.tensor(list(self.shares.items())).reshape(-1, 2)
        found = {_ACTIVE: torch.tensor(self.active), _SHARES: shares.long()}
        found |= {_KNOWN + name: value for name, value in self.known.to_tensors().items()}
        for place, slot in enumerate(self.slots):
            own = {} if place == self.active else slot.to_tensors()
            found |= {f"{place}.{name}": value for name, value in own.items()}
        return {DOMAINS + name: value for name, value in found.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], like: FilterState) -> DomainMemory | None:
        """What named tensors describe, for states of the structure of another one; None of none."""
        own = _below(tensors, DOMAINS)
        if not own:
            return None
        known = KnownDomains.from_tensors(_below(own, _KNOWN), DOMAINS + _KNOWN)
        active, count = read_count(_ACTIVE, own), len(known.names)
        require(active < count, f"state '{DOMAINS}{_ACTIVE}'", active, f"below {count}")
        beside = _with(tensors, "source.", f"{MONITOR}history")
        slots = tuple(
            Slot() if place == active else Slot.from_tensors(_below(own, f"{place}."), beside, like)
            for place in range(count)
        )
        return cls(known, slots, active, _read_shares(own))


def _read_shares(tensors: Mapping[str, Tensor]) -> dict[int, int]:
    """Samples in the last batch, by name."""
    shares = tensors.get(_SHARES, torch.zeros(0, 2, dtype=torch.int64))
    fits = shares.dtype == torch.int64 and shares.dim() == 2 and shares.shape[1] == 2
    fits = fits and bool((shares >= 0).all())
    found = f"{list(shares.shape)} {shares.dtype}"
    require(fits, f"state '{DOMAINS}{_SHARES}'", found, "torch.int64 [m, 2], >= 0")
    return {int(name): int(count) for name, count in shares.tolist()}


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Tensors whose names begin so, without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


def _with(tensors: Mapping[str, Tensor], *prefixes: str) -> dict[str, Tensor]:
    """Tensors whose names begin with one of these."""
    return {name: value for name, value in tensors.items() if name.startswith(prefixes)}

"""All that calls of an adapter change, as one value: what is replaced whole, saved, and loaded."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from driftfilter.adapter.bind import BoundFilter
from driftfilter.adapter.domains import DOMAINS, DomainMemory, Slot
from driftfilter.adapter.labels import TAUGHT, Taught
from driftfilter.base.checks import require, require_finite
from driftfilter.base.inputs import (
    Inputs,
    batch_size,
    check_inputs,
    each,
    join_batches,
    sample,
    samples,
    tensors,
)
from driftfilter.base.memory import require_forms
from driftfilter.base.randomness import Purpose, Randomness
from driftfilter.base.tensors import as_tensor, as_text
from driftfilter.callbacks import StepRecord
from driftfilter.compiled.sticky_chain import count_up, smooth
from driftfilter.filtering import FilterState, StepInfo
from driftfilter.inference.accuracy import Expectation, Opinions
from driftfilter.inference.prediction import MAP, Prediction, join_predictions
from driftfilter.model.buffers import AGE, LABEL, SAMPLE, UNCERTAINTY, Buffer
from driftfilter.model.domains import Domains
from driftfilter.model.label_chain import RUNS, LabelChain, is_of, require_known, stay
from driftfilter.monitor.state import MONITOR, MonitorState, Signals
from driftfilter.networks.alignment import MOMENTS
from driftfilter.networks.batch_trust import ForgetAtHome
from driftfilter.networks.network import ask_at_once
from driftfilter.recipe import Recipe
from driftfilter.storage.state_tensors import (
    RECENT,
    from_tensors,
    kinds,
    read_count,
    samples_from_tensors,
    samples_to_tensors,
    source_to_tensors,
    to_tensors as state_to_tensors,
)

_MODEL = "model."  # in a checkpoint: what batches told about the model
_BUFFER = "buffer."  # in a checkpoint: what a buffer knows of its samples
_LABELS = "labels"  # in a checkpoint: what is known of the order of labels
_OPINIONS = "opinions."  # in a checkpoint: predictions of the last samples
_SEEN = "seen"  # samples that a buffer has seen []
_FEW = 8
_MEMORIES: dict[int, tuple[Recipe, str]] = {}  # by identity, with that which it is the identity of


class Group(NamedTuple):
    """Samples of a batch that are of one domain."""

    place: int  # of the domain
    which: Tensor | None = None  # [m]; None: all of the batch

    @property
    def size(self) -> int:
        """Samples of a group that is not all of a batch."""
        return 0 if self.which is None else len(self.which)

    def pick(self, inputs: Inputs) -> Inputs:
        """The samples of the group in a batch."""
        if self.which is None:
            return inputs
        return sample(inputs, self.which.to(tensors(inputs)[0].device))


def group(owners: Tensor) -> list[Group]:
    """The samples of each domain, by whose they are [n]."""
    places = owners.unique().tolist()
    if len(places) == 1:
        return [Group(places[0])]
    return [Group(place, (owners == place).nonzero()[:, 0]) for place in places]


def merge(groups: list[Group], found: list[Prediction]) -> Prediction:
    """What is predicted for a batch, by what is predicted for each group of its samples."""
    if len(groups) == 1:
        return found[0]
    places = torch.cat([own.which for own in groups if own.which is not None]).argsort()
    places = places.to(found[0].log_probabilities.device)
    return join_predictions(found).pick(places)


def without_samples(state: FilterState) -> FilterState:
    """The state after an update of a buffer: what is known of samples is kept beside it."""
    memory = {name: value for name, value in state.memory.items() if not name.startswith(SAMPLE)}
    return replace(state, memory=memory)


@lru_cache(maxsize=_FEW)
def _stay_at(labels: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """How often a label stays, there; by the identity of what is known of labels."""
    return stay(labels).to(device, dtype, non_blocking=True)


def _without_runs(state: FilterState) -> FilterState:
    """A state that does not know how often labels stay."""
    if RUNS not in state.memory:
        return state
    memory = {name: value for name, value in state.memory.items() if name != RUNS}
    return replace(state, memory=memory)


class AdapterState(NamedTuple):
    """An adapter between two calls; other threads see one moment or the other."""

    bound: BoundFilter | None = None
    found: Mapping[str, Tensor] = {}  # what the first batch or source data have told of the model
    state: FilterState | None = None  # None: no batch has come
    # Samples seen lately, for a window or until the next update; or those in a buffer.
    recent: Inputs | None = None
    known: Mapping[str, Tensor] = {}  # what a buffer knows of its samples, and how many it has seen
    # that a step could follow, by which update_every counts; of a batch cut into pieces, each
    calls: int = 0
    number: int = 0  # of calls before, adapter(x) or update, as callbacks are told
    info: StepInfo | None = None
    watch: MonitorState = MonitorState()
    labels: Tensor | None = None  # what a LabelChain knows of the stream
    domains: DomainMemory | None = None  # what is known in other domains
    opinions: Opinions | None = None  # of the last samples (inference/accuracy.py)
    taught: Taught = Taught()  # what is known of labels

    @property
    def current(self) -> FilterState:
        """What has been learned, or the state to start from; with how often labels stay."""
        state = self.state
        if state is None:
            assert self.bound is not None
            state = self.bound.start
        if self.labels is not None:
            mean = state.belief.mean
            stays = _stay_at(self.labels, mean.device, mean.dtype)
            return replace(state, memory={**state.memory, RUNS: stays})
        return _without_runs(state)  # of a chain that is no more

    @property
    def told(self) -> dict[str, Tensor]:
        """What the first batch has told about the model."""
        return {name: value for name, value in self.found.items() if name != MOMENTS}

    def start_anew(self) -> Self:
        """As if no batch had come; what only a batch could tell is forgotten."""
        bound = None if self.told else self.bound
        return type(self)(bound, {} if bound is None else bound.found)

    def rest(self) -> Self:
        """Without what no later call reads: diagnostics, and the slot of the domain at hand."""
        domains = self.domains
        if domains is not None and domains.active >= 0:
            slots = list(domains.slots)
            slots[domains.active] = Slot()
            domains = domains._replace(slots=tuple(slots))
        return self._replace(info=None, domains=domains)

    def on(self, bound: BoundFilter) -> Self:
        """What is known, on the model as it was read now; the state goes where the model is."""
        if self.state is None:
            return self._replace(bound=bound, found=bound.found)
        state, domains = bound.taking(self.state), self.domains
        if domains is not None:
            domains = domains.map_slots(lambda slot: slot.map_states(bound.taking))
        return self._replace(
            bound=bound,
            found=bound.found,
            state=state,
            watch=self.watch.move_to(state.belief.mean),
            domains=domains,
        )

    def map_samples(self, change: Callable[[Tensor], Tensor]) -> Self:
        """With the samples that wait in any domain changed, for another device or dtype."""

        def there(recent: Inputs | None) -> Inputs | None:
            return None if recent is None else each(recent, change)

        domains = self.domains
        if domains is not None:
            domains = domains.map_slots(lambda slot: slot._replace(recent=there(slot.recent)))
        return self._replace(recent=there(self.recent), domains=domains)

    def divide(
        self, rule: Domains, signatures: Tensor, chain: LabelChain | None = None
    ) -> tuple[Self, list[Group]]:
        """A batch with signatures [n, D] by its domains, each to be entered.

        If it is of other domains than the batch before, the chain of labels forgets what it knows
        of the classifier (``LabelChain.forget``).
        """
        before = self.domains or DomainMemory(rule.start(signatures.shape[1]), (Slot(),))
        if before.known.means.shape[1] != signatures.shape[1]:
            return self, [Group(before.active)]
        division = rule.divide(signatures, before.known, smooth)
        assert self.bound is not None
        known = before._replace(slots=self._keep(before))
        domains = known.follow(division, self.bound.start, rule.carry)
        labels = self.labels
        if domains.is_elsewhere and labels is not None and chain is not None:
            labels = chain.forget(labels)
        return self._replace(domains=domains, labels=labels), group(division.owners)

    def count_domains(self, before: Self) -> Mapping[int, int]:
        """Samples of each domain in the batch after another state, by name; none if it was not
        divided.
        """
        domains = self.domains
        return {} if domains is None or domains is before.domains else domains.shares

    def recall(self, signatures: Tensor) -> list[Group]:
        """A batch with signatures [n, D] by its domains, to be predicted alone."""
        domains = self.domains
        if domains is None or domains.known.means.shape[1] != signatures.shape[1]:
            return [Group(0 if domains is None else domains.active)]
        return group(domains.known.recall(signatures, smooth))

    def place(self, signatures: Tensor) -> list[Group]:
        """Samples with signatures [n, D] from anywhere in the stream by their domains."""
        domains = self.domains
        if domains is None or domains.known.means.shape[1] != signatures.shape[1]:
            return [Group(0 if domains is None else domains.active)]
        return group(domains.known.place(signatures))

    def map_states(self, change: Callable[[FilterState], FilterState]) -> Self:
        """With another state in every domain, and those changed that a monitor may go back to."""
        domains, watch = self.domains, self.watch.map_states(change)
        if domains is not None:
            domains = domains.map_slots(lambda slot: slot.map_states(change, good=True))
        return self._replace(state=change(self.current), domains=domains, watch=watch)

    def _keep(self, domains: DomainMemory) -> tuple[Slot, ...]:
        """The slots with what is known in the active domain."""
        slots, state = list(domains.slots), self.state
        if state is not None:
            state = _without_runs(state)
        watch = MonitorState(**self.watch.of_belief)
        slots[domains.active] = Slot(state, self.recent, self.calls, watch)
        return tuple(slots)

    def enter(self, place: int, visiting: bool = False) -> Self:
        """In another domain; steps count on. ``visiting``: no batch of the stream comes there."""
        domains = self.domains
        if domains is None or place == domains.active:
            return self
        slots = domains.slots if domains.active < 0 else self._keep(domains)
        slot, state = slots[place], slots[place].state
        if self.state is not None:
            assert self.bound is not None
            known = self.bound.start if state is None else state
            anew = domains.returns(place) and not visiting
            memory = ask_at_once(known.memory) if anew else known.memory
            state = replace(known, step=self.state.step, memory=memory)
        return self._replace(
            state=state,
            recent=slot.recent,
            calls=slot.calls,
            watch=replace(self.watch, **slot.watch.of_belief),
            domains=domains._replace(slots=slots, active=place),
        )

    def seen(self, inputs: Inputs, window: int, waits: bool) -> tuple[Inputs, Inputs | None]:
        """What an update sees, this batch last, and what of it to keep; ``waits``: samples gather
        until the next update.
        """
        if not window and not waits:
            return inputs, None
        together = (
            join_batches([self.recent, inputs])
            if self.recent is not None
            else each(inputs, torch.clone)
        )  # users may write
        if not window:
            return together, together
        total, wanted = batch_size(together), max(window, batch_size(inputs))
        kept = samples(together, total - wanted, total) if total > wanted else together
        return kept, kept

    def believe(self, log_probabilities: Tensor, plain: Tensor, table: bool) -> Self:
        """With the predictions [n, k] that users were given, and their plain confidences [n]."""
        new = Opinions.of(log_probabilities, plain, table)
        return self._replace(opinions=new if self.opinions is None else self.opinions.extend(new))

    @property
    def expectation(self) -> Expectation:
        """What the estimate of the accuracy is worked out from."""
        stays = 0.0 if self.labels is None else float(stay(self.labels))
        calibration = None if self.bound is None else self.bound.calibration
        return Expectation(self.opinions, calibration, stays, self.watch.second_opinion)

    def put_in_order(self, chain: LabelChain, alone: Tensor) -> tuple[Self, Tensor]:
        """log p(y given the stream) [n, k] of a batch, from log p(y given x) [n, k], and what is
        known then.
        """
        together, labels = chain(alone, self.labels, smooth, count_up)
        return self._replace(labels=labels), together

    @property
    def offered(self) -> int:
        """Samples that a buffer has seen."""
        return int(self.known.get(_SEEN, 0))

    def keep(self, inputs: Inputs, log_probabilities: Tensor, buffer: Buffer, seed: int) -> Self:
        """With the samples that a buffer keeps of its own and of new ones, predicted so [n, k]."""
        together = inputs if self.recent is None else join_batches([self.recent, inputs])
        randomness = Randomness(seed, self.offered, torch.device("cpu"))
        known = {name: value for name, value in self.known.items() if name != _SEEN}
        chosen = buffer.choose(known, log_probabilities, randomness.generator(Purpose.BUFFER))
        places, known = chosen[0], dict(chosen[1])
        total = batch_size(together)
        fits = places.dim() == 1 and all(0 <= place < total for place in places.tolist())
        allowed = f"one or more of the {total} samples"
        require(fits and len(places) > 0, "places of a buffer", places, allowed)
        known[_SEEN] = torch.tensor(self.offered + batch_size(inputs))
        device = log_probabilities.device
        return self._replace(recent=sample(together, places.to(device)), known=known)

    @property
    def of_buffer(self) -> FilterState:
        """The state with what is known of the samples in the buffer, for the time of an update."""
        names = {SAMPLE + name: value for name, value in self.known.items() if name != _SEEN}
        return replace(self.current, memory={**self.current.memory, **names})

    def make_record(
        self,
        before: Self,
        n: int,
        ms: float,
        log_probabilities: Tensor | None,
        shares: Mapping[int, int],
    ) -> StepRecord:
        """What callbacks are told of a call, with predictions [n, k] of its own: the caller may
        write to those returned. ``shares``: samples by domain.
        """
        info = None if self.info is before.info else self.info
        told = None if log_probabilities is None else log_probabilities.clone()
        signals = Signals() if self.watch is before.watch else self.watch.signals
        events = self.watch.since(before.watch)
        return StepRecord(
            before.number,
            n,
            ms,
            info,
            told,
            signals,
            events,
            domains=shares,
            expectation=self.expectation,
        )

    def to_tensors(self, recipe: Recipe, watched: bool) -> dict[str, Tensor]:
        """As named tensors, for a checkpoint."""
        return self.own_tensors(watched) | self.shared_tensors(recipe)

    def own_tensors(self, watched: bool) -> dict[str, Tensor]:
        """Named tensors that every call changes."""
        return {
            "calls": torch.tensor(self.calls),
            "number": torch.tensor(self.number),
            **state_to_tensors(self.current, with_source=False),
            **samples_to_tensors(self.recent),
            **{_BUFFER + name: tensor for name, tensor in self.known.items()},
            **({} if self.labels is None else {_LABELS: self.labels}),
            **({} if self.domains is None else self.domains.to_tensors()),
            **_name(_OPINIONS, {} if self.opinions is None else self.opinions.to_tensors()),
            **self.taught.to_tensors(),
            **(self.watch.to_tensors() if watched else {}),
        }

    def shared_tensors(self, recipe: Recipe) -> dict[str, Tensor]:
        """Named tensors that all streams on one model have in common, unless the source moves."""
        return {
            "recipe": as_tensor(_memory_of(recipe)),
            **source_to_tensors(self.current),
            **{_MODEL + name: tensor for name, tensor in self.found.items()},
        }

    @property
    def has_own_source(self) -> bool:
        """Whether the source is no longer that of all streams on the model."""
        assert self.bound is not None
        return self.state is not None and self.state.source is not self.bound.start.source

    def to_compare(self, recipe: Recipe) -> dict[str, Tensor]:
        """Named tensors on which later results depend, for ranks to compare; none before a step.

        A rank may have an event of its own: an input that it alone refused.
        """
        if self.state is None:
            return {}
        silent = self._replace(watch=replace(self.watch, events=()))
        return silent.to_tensors(recipe, watched=True)

    @classmethod
    def from_tensors(
        cls,
        own: Mapping[str, Tensor],
        bound: BoundFilter,
        watched: bool,
        recipe: Recipe,
    ) -> Self:
        """What named tensors describe, on a model that was read by what is ``read_found`` them;
        refused unless all is there. What another chain of labels knew is left out.
        """
        beside = (
            *("recipe", "calls", "number", RECENT, _BUFFER, _MODEL, MONITOR, _LABELS),
            *(DOMAINS, _OPINIONS, TAUGHT),
        )
        state = from_tensors(
            {name: value for name, value in own.items() if not name.startswith(beside)}, bound.start
        )
        bound.filter.require_recalled(state)
        calls = read_count("calls", own) if "calls" in own else 0
        # Older checkpoints have no number: at least so many there were.
        number = read_count("number", own) if "number" in own else max(calls, state.step)
        watch = MonitorState.from_tensors(own, bound.start) if watched else MonitorState()
        recent = samples_from_tensors(own)
        kept = None if recent is None else check_inputs(recent)
        known = {
            name.removeprefix(_BUFFER): value.clone()
            for name, value in own.items()
            if name.startswith(_BUFFER)
        }
        classes = None if watch.history is None else len(watch.history) - 3
        _require_known(known, 0 if kept is None else batch_size(kept), classes)
        # Where a batch would have told more than was saved, none had come: the state is the start.
        learned = state if bound.final else None
        labels = None
        if _LABELS in own:
            told = require_known(f"state {_LABELS!r}", own[_LABELS], classes)
            labels = told if is_of(recipe.labels, told) else None
        domains = None
        if recipe.domains is not None and learned is not None:
            domains = DomainMemory.from_tensors(own, bound.start)
            for state in () if domains is None else domains.states:
                bound.filter.require_recalled(state)
        opinions = None
        if _OPINIONS + "sums" in own:
            opinions = Opinions.from_tensors(_OPINIONS, own, classes)
        before = (bound, bound.found, learned, kept, known, calls, number, None, watch, labels)
        return cls(*before, domains, opinions, Taught.from_tensors(own))


def _name(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in tensors.items()}


def _require_known(known: Mapping[str, Tensor], samples: int, classes: int | None) -> None:
    """Raise unless what a buffer knows is of as many samples as it has, and of classes below k."""
    if not known:
        return
    read_count(_SEEN, known)
    require_forms({SAMPLE + name: value for name, value in known.items()}, _BUFFER, samples)
    for name in (LABEL, AGE, UNCERTAINTY):
        count = len(known[name]) if name in known else samples
        require(count == samples, f"state {_BUFFER + name!r}", count, f"of {samples} samples")
        require_finite(f"state {_BUFFER + name!r}", known.get(name, torch.empty(0)))
    labels = known.get(LABEL, torch.empty(0))
    fits = all(0 <= label < (classes or label + 1) for label in labels.tolist())
    require(fits, f"state {_BUFFER + LABEL!r}", labels, f"of classes 0 … {classes}, without that")


def read_found(own: Mapping[str, Tensor], recipe: Recipe) -> dict[str, Tensor]:
    """What batches had told about the model, by named tensors; these are refused if they are of
    another recipe.
    """
    mine, theirs = _memory_of(recipe), as_text(own["recipe"]) if "recipe" in own else "none"
    require(mine == theirs, "state 'recipe'", theirs, f"the same as the adapter's, {mine}")
    found = {
        name.removeprefix(_MODEL): value for name, value in own.items() if name.startswith(_MODEL)
    }
    for name, value in found.items():
        require_finite(f"state {_MODEL + name!r}", value)
    return found


def _memory_of(recipe: Recipe) -> str:
    """The kind of memory a recipe has; the last few are remembered, for those who load many states
    of one recipe.
    """
    known = _MEMORIES.get(id(recipe))
    if known is None:
        if len(_MEMORIES) >= _FEW:
            _MEMORIES.clear()
        known = _MEMORIES[id(recipe)] = recipe, _read_memory(recipe)
    return known[1]


def _read_memory(recipe: Recipe) -> str:
    """How a recipe predicts leaves nothing for other rules, and may change between runs."""
    kept = None if isinstance(recipe.upkeep, ForgetAtHome) else recipe.upkeep  # remembers nothing
    parts: dict[str, Any] = {
        "predict_from": "posterior",
        "upkeep": kept,
        "labels": None,
        "domains": None,
    }
    kind = kinds(replace(recipe, prediction=MAP(), **parts))
    # Recipes once had no centring, and checkpoints of those without say nothing of it.
    return kind if recipe.centering else kind.removesuffix(", NoneType)") + ")"

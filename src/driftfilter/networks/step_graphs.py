"""A whole step of a filter, or a prediction, as one CUDA graph.

A step on a GPU is hundreds of small kernels beside the network's own passes, and Python takes
longer to launch them than the GPU to run them. It is a function of tensors all the same: belief,
memory and batch in, belief, memory and prediction out. Once batches of a shape have come a few
times, all of it is recorded, and from then on one launch.

Nothing is taken on trust. What a recording gives is held against an ordinary step; a filter that
cannot be recorded, or answers otherwise, runs as ever. A recording looks at no number: if one is
not finite, or too few samples have a weight, the ordinary step runs on the same state, and says so.
What Python decides on the way (is this a batch that the source is asked about?) is a part of what a
recording is good for.

Recordings of one stream of the device share memory: they are replayed one after the other, and what
they give is copied out.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from driftfilter.base.inputs import Inputs, each as change_each, tensors
from driftfilter.base.tensors import list_tensors, map_all
from driftfilter.filtering import Filter, FilterState, StepInfo
from driftfilter.gaussian.belief import Belief
from driftfilter.inference.linearized import Frozen, Linearized
from driftfilter.inference.prediction import Prediction
from driftfilter.model.held import HELD, INFLATED
from driftfilter.networks.cuda_graphs import key_of, possible
from driftfilter.networks.network import Facts, Network
from driftfilter.networks.row_check import tolerance_of

Key: TypeAlias = tuple[Any, ...]
_WARM = 3  # passes before a recording: cuDNN's trials and kernels' compilation cannot be recorded
_REPEATS = 3  # times that a kind of batch has come before it is recorded
_MOST = 24  # recordings, each with memory for what it takes and gives
_STALE = 200  # batches after which a recording that none of them used is freed
STEPS = "whole steps"


class _Pool:
    """Memory that the recordings of one stream of a device share, and whose turn it is."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.turn = threading.RLock()


_POOLS: dict[tuple[int | None, int], _Pool] = {}
_POOLS_LOCK = threading.Lock()


def _pool_of(device: torch.device) -> _Pool:
    stream = torch.cuda.current_stream(device)
    with _POOLS_LOCK:
        return _POOLS.setdefault((device.index, stream.cuda_stream), _Pool())


@final
class Recording:
    """A function of tensors as one graph. It reads copies of what it is given, and what it gives
    is copied, too.
    """

    def __init__(self, call: Callable[[list[Tensor]], list[Tensor]], given: Sequence[Tensor]):
        self._pool, self._given = _pool_of(given[0].device), [own.clone() for own in given]
        self._graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(given[0].device)
        with self._pool.turn:
            torch.cuda.empty_cache()  # or this stream's memory comes on top of the other's
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM):
                    call(self._given)
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(
                self._graph, pool=self._pool.handle, capture_error_mode="thread_local"
            ):
                self._told = call(self._given)

    def __call__(self, given: Sequence[Tensor]) -> list[Tensor]:
        """What the function gives."""
        told = [torch.empty_like(own) for own in self._told]
        with self._pool.turn:
            torch._foreach_copy_(self._given, list(given), non_blocking=True)
            self._graph.replay()
            torch._foreach_copy_(told, self._told)
        return told


class Recorded(NamedTuple):
    """A recording, and what belongs to it that is no tensor."""

    run: Callable[[Sequence[Tensor]], list[Tensor]]
    shape: Any  # of what it gives: a value of the same types, whose tensors are others
    facts: Facts | None  # what the host knows of the state it gives


class Told(NamedTuple):
    """What a recorded step gives."""

    belief: Belief | None
    memory: dict[str, Tensor]
    prediction: Prediction
    info: StepInfo | None
    host: Tensor  # [n (k + 1) + 1]: log-probabilities with plain confidences, and if all is well


@final
class StepGraphs:
    """The recordings of a filter, and of the same under the source's own statistics; ``refused``:
    where it is noted why graphs do not fit, None if somebody has asked for them and is to see what
    goes wrong.
    """

    def __init__(
        self,
        filters: Sequence[Filter],
        network: Network,
        refused: MutableMapping[str, str] | None,
    ) -> None:
        self._filters, self._network, self._refused = filters, network, refused
        self._lock = threading.RLock()
        self._known: dict[Key, Recorded] = {}
        self._used: dict[Key, int] = {}
        self._came = Counter[Key]()
        self._batches = 0

    @staticmethod
    def can_record(filt: Filter) -> bool:
        """Whether a step is a function of tensors: no optimiser that counts steps in Python, nor a
        teacher or an upkeep that draws.
        """
        return isinstance(filt.inference, (Linearized, Frozen)) and not filt.observation.teacher

    def step(self, state: FilterState, inputs: Inputs) -> tuple[FilterState, Prediction, StepInfo]:
        """``Filter.step`` of the first filter."""
        filt = self._filters[0]
        found = self._replay("step", filt, state, inputs)
        if found is None:
            return filt.step(state, inputs)
        belief, memory, prediction, info, _ = found
        assert belief is not None
        assert info is not None
        after = replace(state, belief=belief, memory=memory, step=state.step + 1)
        return after, prediction, info._replace(step=state.step)

    def predict(self, filt: Filter, state: FilterState, inputs: Inputs) -> Prediction:
        """``Filter.predict`` of one of the filters."""
        found = self._replay("predict", filt, state, inputs)
        return filt.predict(state, inputs) if found is None else found.prediction

    def run(self, function: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
        """A function of one tensor that looks at no number."""
        if STEPS in (self._refused or {}) or not possible(given, given):
            return function(given)
        with self._lock:
            key = (function, *key_of(given, given, function))
            known = self._known.get(key)
            if known is None:
                self._came[key] += 1
                if self._came[key] <= _REPEATS or len(self._known) >= _MOST:
                    return function(given)
                made = Recording(lambda own: [function(own[0])], [given])
                known = self._known[key] = Recorded(made, None, None)
            return self._use(key, known, [given])[0]

    def _use(self, key: Key, known: Recorded, given: Sequence[Tensor]) -> list[Tensor]:
        self._batches += 1
        self._used[key] = self._batches
        stale = [each for each, used in self._used.items() if self._batches - used > _STALE]
        for each in stale:
            del self._used[each], self._known[each]
            self._came[each] = 0
        return known.run(given)

    def _replay(self, what: str, filt: Filter, state: FilterState, inputs: Inputs) -> Told | None:
        """What a recording gives, if there is one and all is well; one is made if it is time."""
        if STEPS in (self._refused or {}):
            return None
        if HELD in state.memory or INFLATED in state.memory:
            return None
        if not possible(state.belief.mean, inputs):
            return None
        with self._lock:
            facts = self._network.known_facts(state.memory)
            key = self._key_of(what, filt, state, inputs, facts)
            known = self._known.get(key)
            if known is None:
                known = self._try_to_record(key, what, filt, state, inputs, facts)
            if known is None:
                return None
            told: Told = _fill(known.shape, self._use(key, known, _take(state, inputs)))
        host = told.host.cpu()  # the only look there
        if not bool(host[-1].isfinite()):
            return None
        n, k = told.prediction.log_probabilities.shape
        both = host[:-1].view(n, k + 1)
        told.prediction.__dict__["on_host"] = both[:, :-1], both[:, -1]
        if known.facts is not None:
            self._network.note_facts(told.memory, known.facts.follow(facts))
        return told

    def _key_of(
        self,
        what: str,
        filt: Filter,
        state: FilterState,
        inputs: Inputs,
        facts: Facts | None,
    ) -> Key:
        place = next(i for i, own in enumerate(self._filters) if own is filt)
        forms = tuple((name, own.shape, own.dtype) for name, own in sorted(state.memory.items()))
        decided = None if facts is None else facts.decide(what == "step")
        return (what, place, forms, decided, *key_of(state.belief.mean, inputs, type(filt)))

    def _try_to_record(
        self,
        key: Key,
        what: str,
        filt: Filter,
        state: FilterState,
        inputs: Inputs,
        facts: Facts | None,
    ) -> Recorded | None:
        """A recording that answers as the ordinary way does, if it is time for one."""
        self._came[key] += 1
        if self._came[key] <= _REPEATS or len(self._known) >= _MOST:
            return None
        if self._refused is None:
            self._known[key] = self._make(what, filt, state, inputs, facts)
            return self._known[key]
        stream = torch.cuda.current_stream() if state.belief.mean.is_cuda else None
        try:
            wanted = self._ask(what, filt, state, inputs)
            made = self._make(what, filt, state, inputs, facts)
            found: Told = _fill(made.shape, made.run(_take(state, inputs)))
        except Exception as error:  # whatever a module of somebody's own does
            if stream is not None:
                torch.cuda.set_stream(stream)  # a recording that fails stays on its own
            self._refused[STEPS] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        else:
            if _agree(state, found, wanted):
                self._known[key] = made
                return made
            self._refused[STEPS] = "the network answers otherwise when it is replayed"
        self._known.clear()
        self._network.capturing = "if possible"  # passes may be graphs, if steps may not
        return None

    def _ask(self, what: str, filt: Filter, state: FilterState, inputs: Inputs) -> list[Tensor]:
        """What the ordinary way gives, of all that is compared."""
        if what == "predict":
            return [filt.predict(state, inputs).log_probabilities]
        after, prediction, _ = filt.step(state, inputs)
        memory = [own for _, own in sorted(after.memory.items())]
        return [prediction.log_probabilities, *list_tensors(after.belief), *memory]

    def _make(
        self, what: str, filt: Filter, state: FilterState, inputs: Inputs, facts: Facts | None
    ) -> Recorded:
        """A recording of the step, or of the prediction, of a state like this."""
        shape: list[Told] = []
        after: list[Facts | None] = [None]

        def call(given: list[Tensor]) -> list[Tensor]:
            parts = iter(given)
            own = replace(state, belief=_fill(state.belief, parts), memory=_refill(state, parts))
            batch = change_each(inputs, lambda _: next(parts))
            self._network.note_facts(own.memory, facts)
            with self._network.eagerly():
                belief: Belief | None = None
                if what == "step":
                    new, prediction, info, well = filt.try_step(own, batch)
                    belief, memory = new.belief, dict(sorted(new.memory.items()))
                    after[0] = self._network.known_facts(memory)
                else:
                    prediction, well = filt.try_predict(own, batch)
                    belief, memory, info = None, {}, None
            logs = prediction.log_probabilities
            both = torch.cat((logs, prediction.plain_confidence[:, None].to(logs)), 1)
            host = torch.cat((both.flatten(), well.to(logs)[None]))
            # The variance of a prediction may be one number that is told of all.
            told = Told(belief, memory, map_all(prediction, Tensor.contiguous), info, host)
            shape[:] = [told]
            return list_tensors(told)

        run = Recording(call, _take(state, inputs))
        return Recorded(run, shape[0], after[0])


def _take(state: FilterState, inputs: Inputs) -> list[Tensor]:
    """All tensors that a step depends on, but for the source, which is always the same."""
    memory = [own for _, own in sorted(state.memory.items())]
    return [*list_tensors(state.belief), *memory, *tensors(inputs)]


def _fill(value: Any, found: Sequence[Tensor] | Iterator[Tensor]) -> Any:
    """A value with other tensors, one after the other."""
    own = iter(found)
    return map_all(value, lambda _: next(own))


def _refill(state: FilterState, found: Iterator[Tensor]) -> dict[str, Tensor]:
    return {name: next(found) for name in sorted(state.memory)}


def _agree(state: FilterState, found: Told, wanted: list[Tensor]) -> bool:
    """Whether a recording gives what the ordinary way did; of the mean, as it has moved."""
    own = [found.prediction.log_probabilities]
    if found.info is not None:
        own += [*list_tensors(found.belief), *(part for _, part in sorted(found.memory.items()))]
        before = state.belief.mean
        own[1], wanted[1] = own[1] - before, wanted[1] - before
    pairs = zip(own, wanted, strict=True)
    return bool(found.host[-1].isfinite()) and all(_are_close(*pair) for pair in pairs)


def _are_close(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point() or not other.numel():
        return torch.equal(one, other)
    tolerance, most = tolerance_of(other.dtype, other.device), other.abs().max()
    return bool((one - other).abs().max() <= tolerance * (1e-6 + most))

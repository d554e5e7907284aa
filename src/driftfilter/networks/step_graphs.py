"""A whole step of a filter, or a prediction, as one CUDA graph.

A step on a GPU is hundreds of small kernels beside the network's own passes, and Python takes
longer to launch them than the GPU to run them. It is a function of tensors all the same: belief,
memory and batch in, belief, memory and prediction out. Once batches of a shape have come a few
times, all of it is recorded, and from then on one launch.

Nothing is taken on trust. What a recording gives is held against what the same code has given
before, without one; a filter that cannot be recorded, or answers otherwise, runs as ever. A
recording looks at no number: if one is not finite, or too few samples have a weight, the ordinary
step runs on the same state, and says so. What Python decides on the way (is this a batch that the
source is asked about?) is a part of what a recording is good for.

Recordings of one stream of the device share memory: they are replayed one after the other, and what
they give is copied out.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from driftfilter.base.inputs import Inputs, each, tensors
from driftfilter.base.light import Number
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
# Numbers of a new state and of what is told of its step, by name.
Measure: TypeAlias = Callable[[FilterState, StepInfo], dict[str, Number]]
_WARM = 3  # passes before a recording: cuDNN's trials and kernels' compilation cannot be recorded
_REPEATS = 3  # times that a kind of batch has come before it is recorded
_MOST = 24  # recordings, each with memory for what it takes and gives
_STALE = 200  # batches after which a recording that none of them used is freed
_LARGEST = 1000  # kinds of batches that are counted
STEPS = "whole steps"


class _Pool:
    """Memory that the recordings of one stream of a device share, and whose turn it is."""

    def __init__(self, device: torch.device) -> None:
        self.turn, self.stream = threading.RLock(), torch.cuda.Stream(device)
        self._device, self._handle, self._live = device, torch.cuda.graph_pool_handle(), 0
        self._begun = False  # whether what is not recorded has got some of the memory

    @contextmanager
    def lend(self, recording: Recording) -> Iterator[Any]:
        """The memory, for a recording that is made in this block, on its device. Whether it can be
        made or not, the caller's stream is the current one afterwards.
        """
        if self._live == 0:  # the memory went with the last one
            self._handle = torch.cuda.graph_pool_handle()
        own, handle = torch.cuda.current_stream(self._device), self._handle
        try:
            with torch.cuda.device(self._device):
                yield handle
            self._live += 1
            weakref.finalize(recording, self._forget)
        finally:
            torch.cuda.set_stream(own)
            if self._begun:  # a recording holds the memory now, or nobody
                torch._C._cuda_releasePool(self._device.index, handle)
            self._begun = False

    @contextmanager
    def warming(self, handle: Any) -> Iterator[None]:
        """What runs in this block is in the same memory, where torch can do that, and on the same
        stream as a recording.
        """
        begin = getattr(torch._C, "_cuda_beginAllocateCurrentStreamToPool", None)
        end, index = getattr(torch._C, "_cuda_endAllocateToPool", None), self._device.index
        torch.cuda.empty_cache()
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.stream):
            if begin is None or end is None or index is None:
                yield
            else:
                begin(index, handle)
                self._begun = True
                try:
                    yield
                finally:
                    end(index, handle)
        torch.cuda.current_stream(self._device).wait_stream(self.stream)

    def _forget(self) -> None:
        self._live -= 1


_POOLS: dict[tuple[int | None, int], _Pool] = {}
_POOLS_LOCK = threading.Lock()


def _pool_of(device: torch.device) -> _Pool:
    stream = torch.cuda.current_stream(device)
    with _POOLS_LOCK:
        return _POOLS.setdefault((device.index, stream.cuda_stream), _Pool(device))


@final
class Recording:
    """A function of tensors as one graph. It reads copies of what it is given, and what it gives
    is copied, too. ``once`` is what the function has given by itself, before it was recorded.
    """

    def __init__(self, call: Callable[[list[Tensor]], list[Tensor]], given: Sequence[Tensor]):
        self._graph = torch.cuda.CUDAGraph()
        self._pool, self._given = _pool_of(given[0].device), [own.clone() for own in given]
        with self._pool.turn, self._pool.lend(self) as memory:
            with self._pool.warming(memory):
                for _ in range(_WARM):
                    self.once = [own.clone() for own in call(self._given)]
            with torch.cuda.graph(
                self._graph, memory, self._pool.stream, capture_error_mode="thread_local"
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


class Asked(NamedTuple):
    """What is wanted, and of what."""

    what: Literal["step", "predict"]
    filter: Filter
    state: FilterState
    inputs: Inputs
    measure: Measure | None = None

    def is_that(self, other: Asked) -> bool:
        """Whether the answer is the same as another one's: all tensors are the very same."""
        (_, own, mine, given, _), (_, theirs, state, inputs, _) = self, other
        same = own is theirs and inputs is given and self[::4] == other[::4]
        same = same and state.belief is mine.belief and state.source is mine.source
        same = same and state.memory.keys() == mine.memory.keys()
        return same and all(state.memory[name] is each for name, each in mine.memory.items())

    def take(self) -> list[Tensor]:
        """All tensors that the answer depends on, but for those of the source: a recording is good
        for one source.
        """
        memory = [own for _, own in sorted(self.state.memory.items())]
        return [*list_tensors(self.state.belief), *memory, *tensors(self.inputs)]

    def of(self, given: Sequence[Tensor]) -> Asked:
        """The same of other tensors."""
        parts = iter(given)
        belief = _fill(self.state.belief, parts)
        memory = {name: next(parts) for name in sorted(self.state.memory)}
        state = replace(self.state, belief=belief, memory=memory)
        return self._replace(state=state, inputs=each(self.inputs, lambda _: next(parts)))


class Told(NamedTuple):
    """The answer of a recording."""

    belief: Belief | None
    memory: dict[str, Tensor]
    prediction: Prediction
    info: StepInfo | None
    # [n (k + 1) + m + 1]: log-probabilities with plain confidences, numbers that somebody wants to
    # know, and whether all is well.
    host: Tensor

    def agrees(self, wanted: Told, before: FilterState) -> bool:
        """Whether it is what another one says; of the mean, as it has moved."""
        own, theirs = ([each.prediction.log_probabilities] for each in (self, wanted))
        if self.belief is not None and wanted.belief is not None:
            mean = before.belief.mean
            own += [self.belief.mean - mean, *list_tensors((self.belief.covariance, self.memory))]
            others = (wanted.belief.covariance, wanted.memory)
            theirs += [wanted.belief.mean - mean, *list_tensors(others)]
        sound = bool(self.host[-1].isfinite()) and bool(wanted.host[-1].isfinite())
        return sound and all(map(_are_close, own, theirs))


class Recorded(NamedTuple):
    """A recording, and what belongs to it that is no tensor."""

    run: Recording
    shape: Any = None  # of what it gives: a value of the same types, whose tensors are others
    before: Facts | None = None  # what the host knew of the state it was recorded on
    facts: Facts | None = None  # and of the state it gave
    names: tuple[str, ...] = ()  # of the numbers in what it gives
    kept: Any = None  # whose memory it reads: the network's twin of the thread that recorded


class Begun(NamedTuple):
    """What the device is at."""

    asked: Asked
    told: Told
    recorded: Recorded
    facts: Facts | None  # what the host knows of the state before
    versions: list[int]  # how often the inputs had been written to


@final
class StepGraphs:
    """The recordings of a filter, and of the same under the source's own statistics; ``refused``:
    where it is noted why graphs do not fit, None if somebody has asked for them and is to see what
    goes wrong.

    Steps are made one after the other. Predictions may come from several threads.
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
        self._begun: Begun | None = None
        self._off = False  # whether steps cannot be recorded
        self._measured: tuple[Tensor, dict[str, float]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy records anew."""
        return type(self), (self._filters, self._network, self._refused)

    @staticmethod
    def can_record(filt: Filter) -> bool:
        """Whether a step is a function of tensors: no optimiser that counts steps in Python, nor a
        teacher or an upkeep that draws.
        """
        return isinstance(filt.inference, (Linearized, Frozen)) and not filt.observation.teacher

    def begin(self, state: FilterState, inputs: Inputs, measure: Measure | None = None) -> None:
        """Start a step that may be asked for next, if there is a recording of it; if another one
        is asked for, nobody waits for it.
        """
        self._begun = self._start(Asked("step", self._filters[0], state, inputs, measure), False)

    def step(
        self, state: FilterState, inputs: Inputs, measure: Measure | None = None
    ) -> tuple[FilterState, Prediction, StepInfo]:
        """``Filter.step`` of the first filter. The numbers that ``measure`` gives of the new state
        and info are looked at with the prediction: ``measured``.
        """
        asked = Asked("step", self._filters[0], state, inputs, measure)
        begun, self._begun = self._begun, None
        is_that = begun is not None and begun.asked.is_that(asked)
        if begun is None or not is_that or begun.versions != _versions(inputs):
            begun = self._start(asked)
        told = None if begun is None else self._end(begun)
        if told is None:
            return asked.filter.step(state, inputs)
        belief, memory, prediction, info, _ = told
        assert belief is not None
        assert info is not None
        after = replace(state, belief=belief, memory=memory, step=state.step + 1)
        return after, prediction, info._replace(step=state.step)

    def predict(self, filt: Filter, state: FilterState, inputs: Inputs) -> Prediction:
        """``Filter.predict`` of one of the filters."""
        begun = self._start(Asked("predict", filt, state, inputs))
        told = None if begun is None else self._end(begun)
        return filt.predict(state, inputs) if told is None else told.prediction

    def measured(self, info: StepInfo) -> dict[str, float] | None:
        """The numbers of the last step, if this is what is told of it."""
        known = self._measured
        return known[1] if known is not None and known[0] is info.weights else None

    def run(self, function: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
        """A function of one tensor that looks at no number."""
        if self._off or not possible(given, given):
            return function(given)
        with self._lock:
            key = (function, *key_of(given, given, function), _stream_of(given))
            if key not in self._known:
                if not self._is_time(key):
                    return function(given)
                try:
                    run = Recording(lambda own: [function(own[0])], [given])
                except Exception as error:
                    self._give_up(f"{type(error).__name__}: {error}")
                    return function(given)
                self._known[key] = Recorded(run)
            return self._replay(key, [given])[0]

    def _start(self, asked: Asked, may_record: bool = True) -> Begun | None:
        """Have the device begin, if there is a recording; one is made if it is time."""
        memory = asked.state.memory
        if self._off or HELD in memory or INFLATED in memory or not is_there(asked):
            return None
        with self._lock:
            facts = self._network.known_facts(memory)
            key = self._key_of(asked, facts)
            if key not in self._known and not (may_record and self._can_record(key, asked, facts)):
                return None
            known = self._known[key]
            told: Told = _fill(known.shape, self._replay(key, asked.take()))
        return Begun(asked, told, known, facts, _versions(asked.inputs))

    def _end(self, begun: Begun) -> Told | None:
        """What the device has found; None if the ordinary way is to say what is wrong."""
        told, known = begun.told, begun.recorded
        host = told.host.cpu()  # the only look there
        if not bool(host[-1].isfinite()):
            return None
        n, k = told.prediction.log_probabilities.shape
        both, numbers = host[: n * (k + 1)].view(n, k + 1), host[n * (k + 1) : -1].tolist()
        told.prediction.__dict__["on_host"] = both[:, :-1], both[:, -1]
        if known.facts is not None:
            self._network.note_facts(told.memory, known.facts.follow(begun.facts, known.before))
        if told.info is not None:
            self._measured = told.info.weights, dict(zip(known.names, numbers, strict=True))
        return told

    def _key_of(self, asked: Asked, facts: Facts | None) -> Key:
        what, filt, state, inputs, measure = asked
        place = next(i for i, own in enumerate(self._filters) if own is filt)
        named = sorted(state.memory.items())
        forms = tuple((name, own.shape, own.dtype) for name, own in named)
        widths = tuple((own.shape, own.dtype) for own in list_tensors(state.belief))
        decided = None if facts is None else facts.decide(what == "step")
        general = key_of(state.belief.mean, inputs, type(filt))
        stream = _stream_of(state.belief.mean)
        return (what, place, forms, decided, measure, state.source, widths, stream, *general)

    def _is_time(self, key: Key) -> bool:
        """Whether something that has come once more is to be recorded: the fourth time, or at once
        if that saves the memory of an ordinary pass beside that of a recording of the same shape.
        """
        if len(self._came) > _LARGEST:
            self._came.clear()
        self._came[key] += 1
        alike = any(other[0] == "step" == key[0] and other[5:] == key[5:] for other in self._known)
        return (alike or self._came[key] > _REPEATS) and len(self._known) < _MOST

    def _give_up(self, why: str) -> None:
        """Steps run as ever from now on; passes may be graphs, if steps may not."""
        self._off = True
        self._known.clear()
        self._used.clear()
        if self._refused is None:  # somebody has asked for graphs, and is to see what goes wrong
            self._network.capturing = "yes"
        else:
            self._refused[STEPS] = why.splitlines()[0][:120]
            self._network.capturing = "if possible"

    def _replay(self, key: Key, given: Sequence[Tensor]) -> list[Tensor]:
        """What a recording gives; those that nobody has used for long go."""
        self._batches += 1
        self._used[key] = self._batches
        stale = [each for each, used in self._used.items() if self._batches - used > _STALE]
        for other in stale:
            del self._used[other], self._known[other], self._came[other]
        return self._known[key].run(given)

    def _can_record(self, key: Key, asked: Asked, facts: Facts | None) -> bool:
        """Record what answers as the ordinary way does, if it is time."""
        if not self._is_time(key):
            return False
        try:
            made = self._record(asked, facts)
            told: Told = _fill(made.shape, made.run(asked.take()))
            wanted: Told = _fill(made.shape, made.run.once)
        except Exception as error:  # whatever a module of somebody's own does
            self._give_up(f"{type(error).__name__}: {error}")
            return False
        if not told.agrees(wanted, asked.state):
            self._give_up("the network answers otherwise when it is replayed")
            return False
        self._known[key] = made
        made.run.once = []
        return True

    def _record(self, asked: Asked, facts: Facts | None) -> Recorded:
        """A recording of the answer to questions like this one."""
        network, found = self._network, list[Any]()

        def call(given: list[Tensor]) -> list[Tensor]:
            what, filt, state, inputs, measure = asked.of(given)
            network.note_facts(state.memory, facts)
            belief: Belief | None = None
            memory: dict[str, Tensor] = {}
            info: StepInfo | None = None
            numbers: dict[str, Number] = {}
            with network.eagerly():
                if what == "step":
                    new, prediction, info, well = filt.try_step(state, inputs)
                    belief, memory = new.belief, dict(sorted(new.memory.items()))
                    numbers = {} if measure is None else measure(new, info)
                else:
                    prediction, well = filt.try_predict(state, inputs)
            logs = prediction.log_probabilities
            both = torch.cat((logs, prediction.plain_confidence[:, None].to(logs)), 1)
            beside = [
                own.to(logs) if isinstance(own, Tensor) else logs.new_full((), own)
                for own in (*numbers.values(), well)
            ]
            host = torch.cat((both.flatten(), torch.stack(beside)))
            told = Told(belief, memory, map_all(prediction, Tensor.contiguous), info, host)
            after = network.known_facts(memory) if memory else None
            # The transition and the twin are others if another source, or thread, comes along.
            kept = (filt.__dict__["_bound"], _twin_of(filt))
            found[:] = told, facts, after, tuple(numbers), kept
            return list_tensors(told)

        run = Recording(call, asked.take())
        return Recorded(run, *found)


def is_there(asked: Asked) -> bool:
    """Whether all that an answer depends on is on a GPU."""
    state = asked.state
    there = possible(state.belief.mean, asked.inputs)
    return there and all(
        own.is_cuda for own in (*state.memory.values(), *list_tensors(state.belief))
    )


def _stream_of(tensor: Tensor) -> int:
    """The stream that a recording is replayed on: those of one take turns."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


def _versions(inputs: Inputs) -> list[int]:
    return [own._version for own in tensors(inputs)]


def _twin_of(filt: Filter) -> Any:
    """The network that this thread calls."""
    model: Any = filt.logits
    while not isinstance(model, Network):
        model = model.model
    return model._own()


def _fill(value: Any, found: Sequence[Tensor] | Iterator[Tensor]) -> Any:
    """A value with other tensors, one after the other."""
    own = iter(found)
    return map_all(value, lambda _: next(own))


def _are_close(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point() or not other.numel():
        return torch.equal(one, other)
    tolerance, most = tolerance_of(other.dtype, other.device), other.abs().max()
    return bool((one - other).abs().max() <= tolerance * (1e-6 + most))

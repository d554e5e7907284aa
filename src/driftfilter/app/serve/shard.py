"""A shard: one frozen network, and what each of many tenants knows, as a value.

An acknowledged step is in the state exactly once: it is in the store before it is answered, with
its number and its answer. A number that comes again gets the stored answer and steps nothing; a
number that is not the next one is refused. If the store fails, the tenant is as it was.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias

from numpy.typing import NDArray
from torch import Tensor

import driftfilter as df
from driftfilter.adapter.state import AdapterState
from driftfilter.app.serve.held import Tenant, Tenants
from driftfilter.app.serve.problems import ProblemError
from driftfilter.app.serve.records import Notes, Recorder, Stored
from driftfilter.app.serve.store import Entry, Store, key_of
from driftfilter.base.inputs import Inputs, batch_size, check_inputs, tensors
from driftfilter.storage.sealed import FAILURES

Kind: TypeAlias = Literal["predict", "peek", "learn", "look", "reset", "delete"]
STEPS = ("predict", "learn", "reset")  # those that have a number
_TOGETHER = 256  # samples of several requests in one pass: what it takes grows with them


class Request(NamedTuple):
    """What a client asks of a tenant."""

    kind: Kind
    tenant: str
    inputs: Inputs | None = None
    labels: Tensor | None = None  # [n], to learn from
    sequence: int | None = None  # None: the next one
    digest: str = ""  # of what it was made of


class Reply(NamedTuple):
    """What the tenant answers."""

    sequence: int
    log_probabilities: NDArray[Any] | None = None  # [n, k]
    repeated: bool = False  # the stored answer of an earlier request
    facts: dict[str, Any] | None = None


@dataclass
class Counts:
    """What a shard has done, for metrics."""

    steps: int = 0
    repeated: int = 0
    passes: int = 0  # over the network that several requests shared
    shared: int = 0  # requests in them
    loads: int = 0
    evictions: int = 0
    failures: int = 0  # of the store


class Shard:
    """Tenants over one adapter, of which ``memory`` bytes are held; ``limit``: tenants at most.

    One thread at a time calls it.
    """

    def __init__(
        self,
        adapter: df.Adapter,
        store: Store,
        memory: int = 1 << 30,
        limit: int = 100_000,
    ) -> None:
        self.adapter, self.store, self.limit = adapter, store, limit
        self.counts, self._recorder = Counts(), Recorder(adapter)
        self._fresh = adapter.snapshot()
        self.tenants = Tenants(adapter, memory)
        self._is_mine: Callable[[str], bool] = lambda key: True  # by key

    def find_state(self, tenant: str) -> AdapterState:
        """What a tenant knows; that of a new one if it has never been served."""
        return self._load(key_of(tenant)).state

    def serve(self, requests: Sequence[Request]) -> list[Reply | ProblemError]:
        """Answer requests, those of a tenant in their order; those of several together."""
        replies: list[Reply | ProblemError | None] = [None] * len(requests)
        for wave in _waves(requests):
            found = self._serve_wave([requests[place] for place in wave])
            for place, reply in zip(wave, found, strict=True):
                replies[place] = reply
        self.counts.evictions += self.tenants.tidy()
        return [reply for reply in replies if reply is not None]

    def _serve_wave(self, requests: Sequence[Request]) -> list[Reply | ProblemError]:
        """Answer requests of different tenants: work out what each becomes, keep it, answer."""
        tenants, new = list[Any](), 0  # new: tenants that the store does not count yet
        for own in requests:
            tenants.append(found := self._attempt(partial(self._find, own, new)))
            new += isinstance(found, Tenant) and found.is_new and own.kind != "peek"
        self._share_pass(requests, tenants)
        works = [
            found
            if isinstance(found, (Reply, ProblemError))
            else self._attempt(partial(self._work, own, found))
            for own, found in zip(requests, tenants, strict=True)
        ]
        return self._keep(requests, works)

    def _attempt(self, work: Callable[[], Any]) -> Any:
        """What a piece of work comes to; a model can fail on its inputs in any way."""
        try:
            return work()
        except ProblemError as problem:
            return problem
        except (MemoryError, OSError, df.CheckpointError) as error:
            return ProblemError(503, "the service", type(error).__name__, "able to", str(error))
        except Exception as error:
            told = str(error) or type(error).__name__
            return ProblemError(422, "inputs", type(error).__name__, "what the model takes", told)

    # What a tenant is before a request

    def _find(self, request: Request, new: int) -> Any:
        """The tenant of a request, or the answer if nothing is left to do."""
        key = key_of(request.tenant)
        if not self._is_mine(key):  # it has waited while its tenant moved
            raise ProblemError(503, "tenant", request.tenant, "of this worker", retry_after=1)
        tenant = self._load(key)
        if tenant.is_new and request.kind in ("look", "delete", "reset"):
            raise ProblemError(404, "tenant", request.tenant, "one that has been served before")
        if tenant.is_new and request.kind != "peek" and self.store.count() + new >= self.limit:
            allowed = f"at most {self.limit} tenants"
            raise ProblemError(429, "tenant", request.tenant, allowed, retry_after=3600)
        if request.kind not in STEPS or request.sequence is None:
            return tenant
        return self._check_sequence(request, request.sequence, tenant)

    def _check_sequence(self, request: Request, number: int, tenant: Tenant) -> Any:
        """The tenant if the number is the next one, the stored answer if it is the last one."""
        last = tenant.sequence
        if number == last + 1:
            return tenant
        if number == last and not tenant.is_new:
            if request.digest != tenant.digest:
                allowed = "a new number, or the same request again"
                raise ProblemError(409, "sequence", number, allowed, last=last, done=True)
            self.counts.repeated += 1
            return Reply(last, tenant.answer, repeated=True)
        done = number <= last
        allowed = f"{last + 1}, the next one" + (
            "; that step was taken, and its answer is no longer kept" if done else ""
        )
        raise ProblemError(409, "sequence", number, allowed, last=last, done=done)

    def _load(self, key: str) -> Tenant:
        """A tenant from memory, from the store, or a new one."""
        found = self.tenants.get(key, self._fresh)
        if found is not None:
            return found
        stored = self.store.read(key)
        if stored is None:
            return Tenant(self._fresh, is_new=True)
        self.adapter.restore(self._fresh)
        try:
            notes = self._recorder.load(stored)
        except FAILURES as error:
            raise df.CheckpointError(f"what is stored was not loaded: {error}") from error
        self.counts.loads += 1
        state = self.adapter.snapshot()
        self._learn_model(state)
        tenant = Tenant(state, notes.sequence, notes.answer, notes.digest)
        return self.tenants.hold(key, tenant)

    # What it becomes

    def _share_pass(self, requests: Sequence[Request], tenants: Sequence[Any]) -> None:
        """Run the network once for all requests whose samples are alike, if the recipe lets it.

        One request alone goes the same way: whether it has company changes no bit of a network of
        convolutions, and others to rounding.
        """
        groups: dict[Any, list[list[Inputs]]] = {}  # by their form: those of each pass
        for request, tenant in zip(requests, tenants, strict=True):
            asks = isinstance(tenant, Tenant) and request.inputs is not None
            form = self._attempt(partial(_form, request.inputs)) if asks else None
            if isinstance(form, tuple):  # what cannot be read is refused later, by itself
                _put(request.inputs, groups.setdefault(form, [[]]))
        self.adapter.restore(self._fresh)
        for batches in chain.from_iterable(groups.values()):
            if self._attempt(partial(self.adapter.share_pass, batches)) is True:
                self.counts.passes += 1
                self.counts.shared += len(batches)

    def _work(self, request: Request, tenant: Tenant) -> Any:
        """The tenant after a step, or the answer to a request that changes nothing."""
        adapter = self.adapter
        if request.kind == "look":
            return Reply(tenant.sequence, facts=self._describe(tenant))
        if request.kind == "delete":
            return None
        if request.kind == "reset":
            return Tenant(self._fresh, tenant.sequence + 1, None, request.digest)
        adapter.restore(tenant.state)
        args, named = _arguments(request.inputs)
        if request.kind == "peek":
            said = adapter.predict(*args, **named).log_probabilities
            return Reply(tenant.sequence, said.cpu().numpy())
        answer = None
        if request.kind == "learn":
            assert request.inputs is not None
            assert request.labels is not None
            adapter.learn(request.inputs, request.labels)
        else:
            answer = adapter(*args, **named).cpu().numpy()
        return Tenant(adapter.snapshot(), tenant.sequence + 1, answer, request.digest)

    def _describe(self, tenant: Tenant) -> dict[str, Any]:
        """What is known of a tenant, for people."""
        self.adapter.restore(tenant.state)
        events = self.adapter.events
        facts: dict[str, Any] = {
            "sequence": tenant.sequence,
            "steps": self.adapter.state.step,
            "parameters": self.adapter.belief.dimension,
            "bytes": tenant.size,
            "events": [vars(event) for event in events[-20:]],
            "domains": [{"name": name, "samples": n} for name, n in self.adapter.domains],
            "estimate": _to_dict(self.adapter.estimate),
        }
        return facts

    # Keeping it

    def _keep(
        self, requests: Sequence[Request], works: Sequence[Any]
    ) -> list[Reply | ProblemError]:
        """Bring what has changed to the store, at once, and answer; if that fails, all is as it
        was.
        """
        replies: list[Reply | ProblemError] = list(works)
        entries = dict[int, Entry]()  # by the place of the request
        for place, work in enumerate(works):
            if work is None or _is_tenant(work):
                tenant = requests[place].tenant
                content = self._attempt(partial(self._encode, tenant, work))
                if isinstance(content, ProblemError):  # no other tenant's
                    replies[place] = content
                else:
                    entries[place] = Entry(key_of(tenant), content)
        if not entries:
            return replies
        try:
            self.store.write(list(entries.values()))
        except OSError as error:
            self.counts.failures += 1
            return [
                _refuse(error) if place in entries else own for place, own in enumerate(replies)
            ]
        for place, entry in entries.items():
            replies[place] = self._commit(entry.key, works[place])
        return replies

    def _encode(self, tenant: str, work: Tenant | None) -> Stored | None:
        if work is None:
            return None
        notes = Notes(tenant, work.sequence, work.digest, work.answer)
        return self._recorder.encode(work.state, notes)

    def _commit(self, key: str, work: Tenant | None) -> Reply:
        if work is None:
            self.tenants.drop(key)
            return Reply(0)
        self.counts.steps += 1
        self._learn_model(work.state)
        self.tenants.hold(key, work)
        return Reply(work.sequence, work.answer)

    def _learn_model(self, state: AdapterState) -> None:
        """What the first batch of all told about the network, every new tenant knows."""
        bound = state.bound
        if bound is not None and bound.final and not self._fresh.found:
            self._fresh = AdapterState(bound, bound.found)

    def leave(self, is_mine: Callable[[str], bool]) -> int:
        """Leave tenants that are not this worker's to others, and refuse them from now on; how many
        were known here.
        """
        self._is_mine = is_mine
        keys = [key for key in {*self.store.held(), *self.tenants.keys()} if not is_mine(key)]
        self.store.release(keys)
        for key in keys:
            self.tenants.drop(key)
        return len(keys)


def _waves(requests: Sequence[Request]) -> Iterator[list[int]]:
    """Places of the requests, each wave of different tenants, those of a tenant in their order."""
    waiting = list(range(len(requests)))
    while waiting:
        taken, wave, later = set[str](), list[int](), list[int]()
        for place in waiting:
            tenant = requests[place].tenant
            (later if tenant in taken else wave).append(place)
            taken.add(tenant)
        yield wave
        waiting = later


def _is_tenant(work: Any) -> bool:
    return isinstance(work, Tenant)


def _arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})


def _form(inputs: Inputs) -> Any:
    """What samples must have in common to go through the network together."""
    names = tuple(inputs) if isinstance(inputs, dict) else ()
    parts = tensors(check_inputs(inputs))
    return names, *((part.shape[1:], part.dtype) for part in parts)


def _put(inputs: Inputs, passes: list[list[Inputs]]) -> None:
    """Put a batch into the last pass, or a new one if that had too many samples."""
    samples = sum(map(batch_size, (*passes[-1], inputs)))
    if passes[-1] and samples > _TOGETHER:
        passes.append([])
    passes[-1].append(inputs)


def _to_dict(estimate: df.Estimate) -> dict[str, Any] | None:
    """The expected accuracy; None if no sample has come."""
    return vars(estimate) if estimate.samples else None


def _refuse(error: OSError) -> ProblemError:
    """The disk is full, read-only or gone: the same request may be sent again later."""
    told = error.strerror or str(error)
    detail = f"the step was not taken: the store could not be written to ({told})"
    return ProblemError(503, "store", told, "writable", detail, retry_after=1)

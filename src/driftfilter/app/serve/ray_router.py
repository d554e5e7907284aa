"""Shards as actors of a Ray cluster, and the router to them.

A tenant belongs to one worker, by its name (ring.py). A worker that dies is started again by Ray,
on any node that sees the store, under its name and with its log; requests with a number are sent
again meanwhile, and what had been done gets its stored answer. One router is in front.
"""

import asyncio
import math
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from driftfilter.app.run.reader import Form
from driftfilter.app.serve.command import keep_memory, make_adapter, make_batcher
from driftfilter.app.serve.open_store import hand_over, open_store
from driftfilter.app.serve.options import ServeOptions
from driftfilter.app.serve.problems import ProblemError
from driftfilter.app.serve.ring import find_owner
from driftfilter.app.serve.shard import STEPS, Reply, Request
from driftfilter.app.serve.store import key_of
from driftfilter.base.inputs import each

_ANY = 1000  # workers of a cluster on one machine: they share its processors
PATIENCE = 60.0  # seconds that a request waits for its worker to come back
_MOVING = 3600.0  # seconds that a worker may take to write the files of tenants that it leaves
_FRESH = 1.0  # seconds for which the numbers of workers are not asked for again


class Worker:
    """A shard in a process of Ray."""

    def __init__(self, name: str, options: ServeOptions) -> None:
        keep_memory()
        self.name = name
        # One that was started before may still have the log, on a node that nobody hears of: an
        # actor that cannot begin would never be started again.
        sync = options.durability == "step"
        store = open_store(options.store, name, sync, wait=math.inf)
        self._batcher = make_batcher(options, make_adapter(options)[0], store)

    async def ask(self, request: Request) -> Reply | ProblemError:
        """Answer a request; a problem is an answer, too."""
        if request.inputs is not None:
            # In memory of torch: where numbers lie can change the last bit of a product.
            request = request._replace(inputs=each(request.inputs, lambda part: part.clone()))
        try:
            return await self._batcher.ask(request)
        except ProblemError as problem:
            return problem

    async def release(self, workers: Sequence[str]) -> int:
        """Leave the tenants that belong to others now; their number."""

        def is_mine(key: str) -> bool:
            return find_owner(key, workers) == self.name

        shard = self._batcher.shard
        return await asyncio.wrap_future(self._batcher.call(partial(shard.leave, is_mine)))

    async def facts(self) -> dict[str, float]:
        """Numbers for metrics."""
        return {**self._batcher.facts(), "process": os.getpid()}

    async def close(self) -> None:
        """Finish what waits, and let go of the store."""
        await self._batcher.close()


class Router:
    """Requests to the workers that their tenants belong to."""

    def __init__(self, options: ServeOptions) -> None:
        if "://" not in options.store:  # workers may be in another folder, on any node
            options = replace(options, store=os.path.abspath(options.store))
        self._options = options
        self._workers: dict[str, Any] = {}
        self._down: set[str] = set()
        self._open, self._flying, self._scaling = asyncio.Event(), 0, asyncio.Lock()
        self._open.set()
        self._facts: dict[str, float] = {}
        self._asked = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        names = _names(options.workers)
        hand_over(options.store, names)
        self._workers |= {name: self._make(name) for name in names}

    def _make(self, name: str) -> Any:
        actor = ray.remote(Worker).options(
            max_restarts=-1, max_concurrency=1000, num_cpus=1, scheduling_strategy="SPREAD"
        )
        return actor.remote(name, self._options)

    async def ask(self, request: Request) -> Reply:
        await self._open.wait()
        self._flying += 1
        try:
            reply = await self._send(request)
        finally:
            self._flying -= 1
        self._refresh()
        if isinstance(reply, ProblemError):
            raise reply
        return reply

    async def _send(self, request: Request) -> Reply | ProblemError:
        """Send a request until its worker answers. One that has no number is not sent again: it
        may have been taken.
        """
        until, key = time.monotonic() + PATIENCE, key_of(request.tenant)
        while True:
            name = find_owner(key, list(self._workers))
            try:
                sent = self._workers[name].ask.remote(request)
                found: Reply | ProblemError = await asyncio.wait_for(sent, PATIENCE)
                self._down.discard(name)
                return found
            except (RayError, asyncio.TimeoutError) as error:
                self._down.add(name)
                again = request.kind not in STEPS or request.sequence is not None
                if not again or time.monotonic() > until:
                    return _refuse(name, error, again)
            await asyncio.sleep(0.1)

    async def scale(self, count: int) -> dict[str, int]:
        """Have so many workers: tenants that belong to others then move by way of the store, while
        requests wait. How many moved, by the worker that they left. If it fails, each worker
        serves whom it served.
        """
        async with self._scaling:
            self._open.clear()
            try:
                while self._flying:
                    await asyncio.sleep(0.005)
                return await self._change(_names(count))
            finally:
                self._open.set()

    async def _change(self, names: Sequence[str]) -> dict[str, int]:
        """Have workers of these names, while nobody asks."""
        before, moved = self._workers, dict[str, int]()
        new = {name: self._make(name) for name in names if name not in before}
        try:
            for worker in new.values():
                await asyncio.wait_for(worker.facts.remote(), PATIENCE)
            for name, worker in (before | new).items():
                release = partial(worker.release.remote, names)
                moved[name] = await _insist(release, _MOVING)
        except Exception as error:  # of Ray, or of a worker's store
            for worker in new.values():
                ray.kill(worker)
            for worker in before.values():  # who has left some serves them again
                with suppress(Exception):
                    await _insist(partial(worker.release.remote, list(before)), _MOVING)
            told = f"the workers are as they were: one could not follow ({type(error).__name__})"
            allowed = "a number of workers that can be started"
            raise ProblemError(503, "workers", len(names), allowed, told) from error
        self._workers = {name: worker for name, worker in (before | new).items() if name in names}
        for name in sorted(before.keys() - names):
            with suppress(Exception):  # it has left all that it had
                await asyncio.wait_for(before[name].close.remote(), 10)
            ray.kill(before[name])
            self._down.discard(name)
        return moved

    def facts(self) -> dict[str, float]:
        return {**self._facts, "workers": len(self._workers), "workers_down": len(self._down)}

    def _refresh(self) -> None:
        """Ask the workers for their numbers, now and then: who answers is there."""
        if time.monotonic() - self._asked < _FRESH:
            return
        self._asked = time.monotonic()
        task = asyncio.get_running_loop().create_task(self._gather())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _gather(self) -> None:
        workers = dict(self._workers)
        asked = [worker.facts.remote() for worker in workers.values()]
        found = await asyncio.gather(*asked, return_exceptions=True)
        answers = dict(zip(workers, found, strict=True))
        known = [each for each in answers.values() if isinstance(each, dict)]
        self._down -= {name for name, each in answers.items() if isinstance(each, dict)}
        names = [name for name in (known[0] if known else ()) if name != "process"]
        self._facts = {name: sum(each[name] for each in known) for name in names}

    async def processes(self) -> dict[str, int]:
        """The process of each worker."""
        found = {}
        for name, worker in self._workers.items():
            found[name] = int((await _insist(worker.facts.remote))["process"])
        return found

    def is_ready(self) -> str:
        self._refresh()  # of those that are down nobody may ask anything else
        return f"workers {sorted(self._down)} are starting again" if self._down else ""

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        for worker in self._workers.values():
            with suppress(RayError, asyncio.TimeoutError):  # what was answered is in the store
                await asyncio.wait_for(worker.close.remote(), 10)
        ray.shutdown()


async def _insist(ask: Callable[[], Awaitable[Any]], each: float = PATIENCE) -> Any:
    """The answer of a worker, which may take ``each`` seconds, asked again if it has to start
    anew.
    """
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return await asyncio.wait_for(ask(), each)
        except (RayError, asyncio.TimeoutError):
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.1)


def _names(count: int) -> list[str]:
    """Of so many workers."""
    return [f"w{number}" for number in range(count)]


def _refuse(name: str, error: Exception, again: bool) -> ProblemError:
    told = type(error).__name__
    detail = f"worker {name} did not answer ({told}): " + (
        "send the request again, under its number"
        if again
        else "the step may have been taken; requests with a number can be sent again"
    )
    return ProblemError(503, "worker", name, "alive", detail, retry_after=1)


def connect(options: ServeOptions) -> tuple[Router, Form]:
    """Workers on a cluster, or on one that is started here, and the form of their inputs."""
    if not ray.is_initialized():
        address = None if options.ray in (None, "local") else options.ray
        # Workers import the model from where this process would.
        paths = os.pathsep.join(filter(None, (os.getcwd(), *sys.path)))
        local: dict[str, Any] = {} if address else {"include_dashboard": False, "num_cpus": _ANY}
        env = {"env_vars": {"PYTHONPATH": paths}}
        ray.init(address, log_to_driver=False, runtime_env=env, **local)
    return Router(options), make_adapter(options)[1]

"""Requests that wait together are served together: one thread takes all that are there.

While it computes, others come; nobody waits for company unless ``wait`` says so.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

from driftfilter.app.serve.problems import ProblemError
from driftfilter.app.serve.shard import Reply, Request, Shard

# Of a thread that waits for the answer, or of an event loop that goes on.
Waiting: TypeAlias = "Future[Reply] | asyncio.Future[Reply]"
Settled: TypeAlias = tuple[Waiting, Reply | ProblemError]
_PAUSE = 0.05  # seconds between two looks at what is to be tidied up
_FAILING = 5.0  # seconds after which a store that failed is tried again


class Backend(Protocol):
    """What answers requests: a shard of this process, or a router to those of others."""

    async def ask(self, request: Request) -> Reply:
        """Answer a request, or raise a ProblemError."""

    def facts(self) -> dict[str, float]:
        """Numbers for metrics."""

    def is_ready(self) -> str:
        """Empty if requests can be served, else why not."""

    async def close(self) -> None:
        """Finish what waits, and let go."""


class Batcher:
    """A shard in a thread of its own; ``most`` requests at once, ``waiting`` in its queue.

    ``wait``: seconds that the first of a group may wait for others.
    """

    def __init__(
        self, shard: Shard, most: int = 64, wait: float = 0.0, waiting: int = 1000
    ) -> None:
        self.shard, self.most, self.wait, self.waiting = shard, most, wait, waiting
        self._queue: deque[tuple[Request, Waiting]] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._there = threading.Condition()
        self._closed, self._failing = False, ("", 0.0)  # why the store failed, and when
        self._thread = threading.Thread(target=self._run, name="shard", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> "Future[Reply]":
        """Put a request into the queue."""
        future: Future[Reply] = Future()
        self._add(request, future)
        return future

    def _add(self, request: Request, future: Waiting) -> None:
        with self._there:
            if self._closed:
                raise ProblemError(503, "the service", "closing", "open", retry_after=1)
            if len(self._queue) >= self.waiting:
                allowed = f"with at most {self.waiting} requests waiting"
                raise ProblemError(503, "the queue", len(self._queue), allowed, retry_after=1)
            self._queue.append((request, future))
            self._there.notify()

    def call(self, work: Callable[[], Any]) -> "Future[Any]":
        """Have something done between two groups, by the thread of the shard."""
        future: Future[Any] = Future()
        with self._there:
            self._calls.append((work, future))
            self._there.notify()
        return future

    async def ask(self, request: Request) -> Reply:
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._add(request, future)
        return await future

    def _run(self) -> None:
        pause: float | None = None
        while (group := self._take(pause)) is not None:
            self._answer(group)
            self._call_all()
            pause = self._tend(len(group))

    def _call_all(self) -> None:
        while self._calls:
            work, future = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

    def _take(self, pause: float | None) -> list[tuple[Request, Waiting]] | None:
        """The next group, or after a ``pause`` none of them; None once all is closed."""
        with self._there:
            while not (self._queue or self._calls or self._closed):
                self._there.wait(pause)
                if pause is not None:
                    break
            if self._closed and not (self._queue or self._calls):
                return None
            until = time.monotonic() + self.wait
            while self._queue and len(self._queue) < self.most and not self._closed:
                left = until - time.monotonic()
                if left <= 0 or not self._there.wait(left):
                    break
            return self._pick()

    def _pick(self) -> list[tuple[Request, Waiting]]:
        """Those that wait longest, one of each tenant: others of it go with the next group."""
        group, tenants, later = list[tuple[Request, Waiting]](), set[str](), deque[Any]()
        while self._queue and len(group) < self.most:
            asked = self._queue.popleft()
            (later if asked[0].tenant in tenants else group).append(asked)
            tenants.add(asked[0].tenant)
        self._queue.extendleft(reversed(later))
        return group

    def _answer(self, group: list[tuple[Request, Waiting]]) -> None:
        try:
            replies = self.shard.serve([request for request, _ in group])
        except Exception as error:  # none of a client's doing: those have been answered
            told = f"{type(error).__name__}: {error}"
            replies = [ProblemError(503, "the service", told, "able to answer")] * len(group)
        loops: dict[asyncio.AbstractEventLoop, list[Settled]] = {}
        for (_, future), reply in zip(group, replies, strict=True):
            if isinstance(reply, ProblemError) and reply.field == "store":
                self._failing = reply.detail, time.monotonic()
            if isinstance(future, asyncio.Future):
                loops.setdefault(future.get_loop(), []).append((future, reply))
            elif future.set_running_or_notify_cancel():
                _settle([(future, reply)])
        for loop, settled in loops.items():
            with suppress(RuntimeError):  # a loop that has ended: nobody waits
                loop.call_soon_threadsafe(_settle, settled)  # all at once: it is woken once

    def _tend(self, served: int) -> float | None:
        """Tidy up the store a little; after how many seconds again, if nobody asks for anything."""
        try:
            return _PAUSE if self.shard.store.tend(1 + served // 8) else None
        except Exception:  # whatever it is, requests are served
            self.shard.counts.failures += 1
            return _FAILING

    def facts(self) -> dict[str, float]:
        shard = self.shard
        return {
            **vars(shard.counts),
            "tenants": shard.store.count(),
            "tenants_held": len(shard.tenants),
            "bytes_held": shard.tenants.used,
            "queue": len(self._queue),
        }

    def is_ready(self) -> str:
        why, when = self._failing
        return why if time.monotonic() - when < _FAILING else ""

    async def close(self) -> None:
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """Answer what waits, then end the thread."""
        with self._there:
            self._closed = True
            self._there.notify()
        self._thread.join()
        self.shard.store.close()


def _settle(settled: list[Settled]) -> None:
    """Give the answers to those who still wait for them."""
    for future, reply in settled:
        if future.done():
            continue
        if isinstance(reply, ProblemError):
            future.set_exception(reply)
        else:
            future.set_result(reply)

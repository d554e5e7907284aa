"""Clients of the service on plain sockets, in a process of their own: what they cost is little
beside what the service does, so that it is the service that limits.

    python benchmarks/serve_clients.py PORT --clients 100 --seconds 20 --tenants 10000

Each client has a connection of its own, which stays open, and asks tenants at random without
numbers, the next one as soon as it has its answer. ``--once``: each tenant once, however long it
takes. Prints JSON.
"""

import argparse
import asyncio
import io
import json
import math
import random
import resource
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from driftfilter.app import streams

NPY = "application/x-npy"
_BODIES = 200
_END = b"\r\n\r\n"


class Answer(NamedTuple):
    """What came back, and when it was asked for."""

    status: int
    asked: float
    seconds: float


def make_bodies(n: int) -> list[bytes]:
    """Batches of n images of those that are shipped, as .npy."""
    images = np.asarray(streams.sample_images()[0])
    found = []
    for number in range(_BODIES):
        places = np.random.default_rng(number).integers(0, len(images), n)
        file = io.BytesIO()
        np.save(file, images[places])
        found.append(file.getvalue())
    return found


class Client(asyncio.Protocol):
    """One connection: a request, its answer, the next request, until the time is over."""

    def __init__(
        self, number: int, bodies: list[bytes], tenants: Iterator[int], until: float
    ) -> None:
        self._draws, self._bodies, self._tenants = random.Random(number), bodies, tenants
        self._until, self._got, self._asked, self._over = until, b"", 0.0, False
        self.answers: list[Answer] = []
        self.broken = ""  # why the connection ended before its time
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        tenant = next(self._tenants, None)
        if tenant is None or time.perf_counter() > self._until:
            self._over = True
            self._transport.close()
            return
        body = self._draws.choice(self._bodies)
        head = (
            f"POST /v1/tenants/tenant%20{tenant}/predict HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Content-Type: {NPY}\r\nAccept: {NPY}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._asked = time.perf_counter()
        self._transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, found, rest = self._got.partition(_END)
        if not found:
            return
        length = head.lower().partition(b"content-length:")[2].partition(b"\r")[0]
        if len(rest) < int(length):
            return
        self._got, now = b"", time.perf_counter()
        self.answers.append(Answer(int(head[9:12]), self._asked, now - self._asked))
        self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._over:
            self.broken = str(error) or "closed"
        self.ended.set_result(None)


def choose(number: int, args: argparse.Namespace) -> Iterator[int]:
    """The tenants that a client asks."""
    if args.once:
        return iter(range(number, args.tenants, args.clients))
    draws = random.Random(f"{args.seed} {number}")
    return iter(lambda: draws.randrange(args.tenants), None)


async def ask(args: argparse.Namespace) -> dict[str, Any]:
    """What the clients were answered."""
    bodies, loop = make_bodies(args.batch), asyncio.get_running_loop()
    begun = time.perf_counter()
    until = math.inf if args.once else begun + args.seconds

    found = list[Client]()
    for number in range(args.clients):
        make = partial(Client, number, bodies, choose(number, args), until)
        found.append((await loop.create_connection(make, "127.0.0.1", args.port))[1])
    await asyncio.gather(*(client.ended for client in found))
    return tell(found, begun, time.perf_counter() - begun if args.once else args.seconds)


def tell(clients: list[Client], begun: float, seconds: float) -> dict[str, Any]:
    """Throughput, times and statuses; what was answered after its time is no throughput."""
    answers = [answer for client in clients for answer in client.answers]
    times = np.array([answer.seconds for answer in answers])
    statuses = [answer.status for answer in answers]
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "requests": len(answers),
        "requests_a_second": sum(each.asked + each.seconds <= begun + seconds for each in answers)
        / seconds,
        "p50_ms": 1000 * float(np.quantile(times, 0.5)),
        "p99_ms": 1000 * float(np.quantile(times, 0.99)),
        "statuses": {str(each): statuses.count(each) for each in sorted(set(statuses))},
        "broken": [client.broken for client in clients if client.broken],
        "client_processor_seconds": used.ru_utime + used.ru_stime,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--tenants", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="by which tenants are drawn")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--batch", type=int, default=1, help="images of a request")
    args = parser.parse_args()
    print(json.dumps(asyncio.run(ask(args))))


if __name__ == "__main__":
    main()

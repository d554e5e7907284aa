"""The service: HTTP around a shard or a router (Starlette)."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

import anyio
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request as Call
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from typing_extensions import Self

from driftfilter.app.run.reader import Form
from driftfilter.app.serve import bodies
from driftfilter.app.serve.batching import Backend
from driftfilter.app.serve.limits import Flight, Rate, Tokens, require_name
from driftfilter.app.serve.openapi import PAGE, document
from driftfilter.app.serve.problems import JSON_TYPE, ProblemError
from driftfilter.app.serve.shard import Kind, Reply, Request

Handler: TypeAlias = Callable[[Call], Awaitable[Response]]
_T = TypeVar("_T")
_TOGETHER = 64 << 10  # bytes that are worth a thread to read or write
_PATIENCE = 30.0  # seconds without a byte of a body, after which it is given up


@dataclass(frozen=True)
class Rules:
    """What the service asks of its clients."""

    form: Form
    tokens: Tokens
    rate: Rate
    body: int  # bytes
    flight: Flight
    integers: frozenset[str] = frozenset()
    # For large bodies: numbers in JSON take 20 times the memory of their text while they are read.
    threads: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 2))


class Metrics:
    """What Prometheus is told."""

    def __init__(self, backend: Backend) -> None:
        self.registry, self._backend = CollectorRegistry(), backend
        self.answers = Counter(
            "driftfilter_requests",
            "requests by kind and status",
            ("kind", "status"),
            registry=self.registry,
        )
        self.seconds = Histogram(
            "driftfilter_seconds", "seconds to the answer", ("kind",), registry=self.registry
        )
        self.registry.register(self)

    def collect(self) -> Any:
        """What the shards tell."""
        for name, value in self._backend.facts().items():
            yield GaugeMetricFamily(f"driftfilter_{name}", f"{name} of the shards", value=value)


def make_app(backend: Backend, rules: Rules) -> Starlette:
    """The service around a backend."""
    metrics = Metrics(backend)

    def serve(kind: Kind) -> Handler:
        async def answer(call: Call) -> Response:
            asked = "peek" if kind == "predict" and _only_predicts(call) else kind
            begun, status = time.perf_counter(), 499
            try:
                response = await _serve(backend, rules, call, asked)
                status = response.status_code
                return response
            except ProblemError as problem:
                status = problem.status
                raise
            finally:
                metrics.answers.labels(asked, status).inc()
                metrics.seconds.labels(asked).observe(time.perf_counter() - begun)

        return answer

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await backend.close()
        rules.threads.shutdown(wait=False)

    one = "/v1/tenants/{tenant}"
    return Starlette(
        routes=[
            Route(f"{one}/predict", serve("predict"), methods=["POST"]),
            Route(f"{one}/learn", serve("learn"), methods=["POST"]),
            Route(f"{one}/reset", serve("reset"), methods=["POST"]),
            Route(one, serve("look"), methods=["GET"]),
            Route(one, serve("delete"), methods=["DELETE"]),
            *_routes_beside(backend, rules, metrics),
        ],
        exception_handlers={
            ProblemError: _tell_problem,
            HTTPException: _tell_error,
            Exception: _tell_failure,
        },
        lifespan=lifespan,
    )


def _routes_beside(backend: Backend, rules: Rules, metrics: Metrics) -> list[Route]:
    """What belongs to no tenant."""

    async def health(call: Call) -> Response:
        return JSONResponse({"status": "alive"})

    async def ready(call: Call) -> Response:
        why = backend.is_ready()
        if why:
            raise ProblemError(503, "the service", why, "ready", why, retry_after=1)
        return JSONResponse({"status": "ready"})

    async def show_metrics(call: Call) -> Response:
        rules.tokens.check(call.headers.get("authorization"))
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def scale(call: Call) -> Response:
        rules.tokens.check(call.headers.get("authorization"))
        change = getattr(backend, "scale", None)
        if change is None:
            raise ProblemError(501, "workers", None, "left out without --ray")
        count = call.query_params.get("count", "")
        plain = count.isascii() and count.isdigit() and len(count) < 5
        if not (plain and 1 <= int(count) <= 1000):
            raise ProblemError(400, "count", count, "a whole number from 1 to 1000")
        return JSONResponse({"workers": int(count), "tenants_moved_from": await change(int(count))})

    async def show_document(call: Call) -> Response:
        return JSONResponse(document())

    async def show_page(call: Call) -> Response:
        return HTMLResponse(PAGE)

    return [
        Route("/healthz", health),
        Route("/readyz", ready),
        Route("/metrics", show_metrics),
        Route("/v1/workers", scale, methods=["POST"]),
        Route("/openapi.json", show_document),
        Route("/", show_page),
    ]


def _only_predicts(call: Call) -> bool:
    """Whether a prediction is asked for without a step."""
    adapt = call.query_params.get("adapt", "true")
    if adapt not in ("true", "false"):
        raise ProblemError(400, "adapt", adapt, "true or false")
    return adapt == "false"


async def _serve(backend: Backend, rules: Rules, call: Call, kind: Kind) -> Response:
    rules.tokens.check(call.headers.get("authorization"))
    tenant = require_name(call.path_params["tenant"])
    rules.rate.check(tenant)
    number = call.headers.get("sequence")
    with _Landing(rules.flight) as landing:
        if kind in ("predict", "peek", "learn"):
            data = await _read(call, rules.body, landing)
            args = data, call.headers.get("content-type", ""), number, rules.form, rules.integers
            body = await _do(rules, len(data), partial(bodies.read_body, *args))
            _require_labels(kind, body)
            request = Request(kind, tenant, *body)
        else:
            request = Request(kind, tenant, sequence=bodies.read_sequence(number), digest=kind)
        reply = await backend.ask(request)
        size = 0 if reply.log_probabilities is None else reply.log_probabilities.nbytes
        return await _do(rules, size, partial(_write, call, tenant, reply))


async def _do(rules: Rules, size: int, work: Callable[[], _T]) -> _T:
    """Read or write so many bytes; large ones take time that other requests need."""
    if size <= _TOGETHER:
        return work()
    return await asyncio.get_running_loop().run_in_executor(rules.threads, work)


class _Landing:
    """The bytes of one request in flight, until it is answered."""

    def __init__(self, flight: Flight) -> None:
        self._flight, self._size = flight, 0

    def take(self, size: int) -> None:
        """Let so many in, of this request in all."""
        self._flight.take(max(0, size - self._size))
        self._size = max(size, self._size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._flight.give_back(self._size)


def _require_labels(kind: Kind, body: bodies.Body) -> None:
    if (kind == "learn") != (body.labels is not None):
        allowed = "a list of whole numbers" if kind == "learn" else "left out, but to learn"
        raise ProblemError(400, "labels", "none" if body.labels is None else "given", allowed)


async def _read(call: Call, most: int, landing: _Landing) -> bytes:
    """The body, refused as soon as it is too large, by itself or with all that wait."""
    problem = ProblemError(413, "body", call.headers.get("content-length"), f"at most {most} bytes")
    told = call.headers.get("content-length", "0")
    if not (told.isascii() and told.isdigit()) or len(told) > 18 or int(told) > most:
        raise problem
    landing.take(int(told))
    pieces, size = [], 0
    try:
        with anyio.move_on_after(_PATIENCE) as wait:
            async for piece in call.stream():
                size += len(piece)
                if size > most:
                    raise problem
                landing.take(size)
                pieces.append(piece)
                wait.deadline = anyio.current_time() + _PATIENCE
            return b"".join(pieces)
    except ClientDisconnect as error:
        raise ProblemError(400, "body", f"{size} bytes", "sent to its end") from error
    allowed = f"sent to its end, without a pause of {_PATIENCE:g} seconds"
    raise ProblemError(408, "body", f"{size} bytes", allowed)


def _write(call: Call, tenant: str, reply: Reply) -> Response:
    headers = {"Sequence": str(reply.sequence)} | ({"Repeated": "true"} if reply.repeated else {})
    if reply.log_probabilities is not None and bodies.NPY in call.headers.get("accept", ""):
        data, kind = bodies.write_npy(reply.log_probabilities), bodies.NPY
    else:
        data, kind = bodies.write_json(tenant, reply), bodies.JSON
    return Response(data, media_type=kind, headers=headers)


async def _tell_problem(call: Call, error: Exception) -> Response:
    assert isinstance(error, ProblemError)
    headers = {} if error.status != 401 else {"WWW-Authenticate": "Bearer"}
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after)))
    return JSONResponse(error.to_dict(), error.status, headers, media_type=JSON_TYPE)


async def _tell_error(call: Call, error: Exception) -> Response:
    """What Starlette refuses: paths and methods that there are not."""
    assert isinstance(error, HTTPException)
    what = ("path", call.url.path) if error.status_code == 404 else ("method", call.method)
    response = await _tell_problem(
        call, ProblemError(error.status_code, *what, "one of those in /openapi.json")
    )
    response.headers.update(error.headers or {})  # which methods are allowed
    return response


async def _tell_failure(call: Call, error: Exception) -> Response:
    """What nobody has thought of: the log has all of it, the client its kind."""
    problem = ProblemError(500, "the service", type(error).__name__, "able to answer")
    return await _tell_problem(call, problem)

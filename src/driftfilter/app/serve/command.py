"""From the options of ``driftfilter serve`` to a service that runs until a signal ends it."""

import ctypes
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

import driftfilter as df
from driftfilter.app.machine import choose_machine
from driftfilter.app.networks.load_model import open_model
from driftfilter.app.run.prepare import build_adapter, find_dtype, parse_range
from driftfilter.app.run.reader import Form
from driftfilter.app.serve.batching import Backend, Batcher
from driftfilter.app.serve.http import Rules, make_app
from driftfilter.app.serve.limits import Flight, Rate, Tokens
from driftfilter.app.serve.open_store import hand_over, open_store
from driftfilter.app.serve.options import ServeOptions
from driftfilter.app.serve.shard import Shard
from driftfilter.app.serve.store import Store
from driftfilter.app.terminal import Output
from driftfilter.base.checks import require

_EVERY = 10.0  # seconds between two lines about the service
_IDLE = 120  # seconds after which a connection is closed; a busy machine may need some to read it
_END = 60  # seconds that the service waits at its end for clients that do not take their answers
# Seconds that the thread of the shard computes on while that of HTTP waits for its turn: by
# Python's own 5 ms, reads and writes of sockets take longer than what they bring.
_TURN = 2e-4
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, in malloc.h
_FREE = 32 << 20  # bytes kept for the next pass: for mmap the most that glibc takes


def serve(options: ServeOptions, output: Output) -> int:
    """Serve until a signal comes; the exit status."""
    server, backend = make_server(options)
    ended = threading.Event()
    threading.Thread(target=_tell, args=(server, backend, output, ended), daemon=True).start()
    try:
        with _taking_terminations(server):
            server.run()
    except SystemExit as error:  # uvicorn's, if it cannot listen; it has said why
        where, allowed = f"{options.host}:{options.port}", "an address here that is free"
        raise ValueError(f"--host and --port must be {allowed}, got {where}") from error
    finally:
        ended.set()
    output.note("driftfilter serve: ended; what was answered is in the store")
    return 0 if server.started else 1


def make_server(options: ServeOptions) -> tuple[uvicorn.Server, Backend]:
    """The service, and what answers its requests."""
    require(bool(options.store), "--store", options.store, "a folder for the tenants")
    require(0 <= options.port < 65536, "--port", options.port, "from 0 to 65535")
    for name in ("rate", "wait"):
        value = getattr(options, name)
        require(0 <= value < float("inf"), f"--{name}", value, "a number >= 0")
    tokens = Tokens(None if options.token_file is None else Path(options.token_file))
    keep_memory()
    sys.setswitchinterval(_TURN)
    backend, form = make_backend(options)
    names = frozenset(filter(None, options.integers.split(",")))
    require(
        options.body <= options.bodies, "--bodies", options.bodies, f">= {options.body} (--body)"
    )
    flight = Flight(options.bodies << 20)
    rules = Rules(form, tokens, Rate(options.rate), options.body << 20, flight, names)
    config = uvicorn.Config(
        make_app(backend, rules),
        options.host,
        options.port,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=_IDLE,
        timeout_graceful_shutdown=_END,
        http="h11",  # which bounds headers; httptools, if it is there, takes any number of them
    )
    return uvicorn.Server(config), backend


@contextmanager
def _taking_terminations(server: uvicorn.Server) -> Iterator[None]:
    """Have SIGTERM end a service in order: uvicorn, once it has ended, sends itself the signal
    again, which would kill the process.
    """

    def end(*_: object) -> None:
        server.should_exit = True

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def make_backend(options: ServeOptions) -> tuple[Backend, Form]:
    """What answers requests, and how samples become what the model takes."""
    if options.ray is not None:
        from driftfilter.app.serve.ray_router import connect

        return connect(options)
    adapter, form = make_adapter(options)
    hand_over(options.store, ["0"])
    store = open_store(options.store, sync=options.durability == "step")
    return make_batcher(options, adapter, store), form


def make_batcher(options: ServeOptions, adapter: df.Adapter, store: Store) -> Batcher:
    """A shard over a store, in a thread of its own."""
    shard = Shard(adapter, store, options.memory << 20, options.tenants)
    return Batcher(shard, options.batch, options.wait / 1000)


def make_adapter(options: ServeOptions) -> tuple[df.Adapter, Form]:
    """The adapter of a model and a preset or recipe, and the form of its inputs."""
    machine = choose_machine(options.device)
    weights = None if options.weights is None else Path(options.weights)
    model = machine.place(open_model(options.model, weights).module)
    within = None if options.range is None else parse_range(options.range)
    form = Form(find_dtype(model), machine.device, options.layout, options.scale, within)
    return build_adapter(options, model, form), form


def keep_memory() -> None:
    """Have the C library keep some memory that a pass over the network has freed for the next one:
    pages that come new from the system each time take as long as the pass. Larger blocks go back.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in every C library
        if mallopt is not None:
            mallopt(_TRIM_THRESHOLD, _FREE)
            mallopt(_MMAP_THRESHOLD, _FREE)


def _tell(server: uvicorn.Server, backend: Backend, output: Output, ended: threading.Event) -> None:
    """Say where the service is, then now and then what it has done."""
    while not server.started:
        if ended.wait(0.05):
            return
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    output.say(f"serving at http://{host}:{port}  (Ctrl-C ends it)")
    live, before = sys.stderr.isatty(), -1.0
    while not ended.wait(1.0 if live else _EVERY):
        facts = backend.facts()
        steps = facts.get("steps", 0)
        if not output.quiet and (live or steps != before):
            _write_line(_line(facts, steps - max(before, 0), 1.0 if live else _EVERY), live)
        before = steps


def _line(facts: dict[str, float], new: float, seconds: float) -> str:
    held = facts.get("bytes_held", 0) / 1e6
    return (
        f"{facts.get('steps', 0):.0f} steps ({new / seconds:.1f}/s), "
        f"{facts.get('tenants', 0):.0f} tenants, {facts.get('tenants_held', 0):.0f} in memory "
        f"({held:.1f} MB), {facts.get('queue', 0):.0f} waiting"
    )


def _write_line(line: str, live: bool) -> None:
    """Print a line, on a terminal in the place of the one before."""
    text, end = (f"\r\033[K{line}", "") if live else (line, "\n")
    print(text, end=end, file=sys.stderr, flush=True)

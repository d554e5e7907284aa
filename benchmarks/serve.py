"""The service under load, kills and damage, on loopback only; writes JSON.

    python benchmarks/serve.py kills --kills 100            # SIGKILLs of the embedded service
    python benchmarks/serve.py ray --kills 100              # of workers of a Ray cluster
    python benchmarks/serve.py router --kills 5             # of the router in front of them
    python benchmarks/serve.py nodes                        # two Ray nodes, one killed
    python benchmarks/serve.py disk                         # full and read-only for a while
    python benchmarks/serve.py memory                       # of a tenant
    python benchmarks/serve.py tenants --tenants 10000      # throughput with 1, 10, 100 clients
    python benchmarks/serve.py load --seconds 180           # by httpx, some to be refused
    python benchmarks/serve.py together --batch 1           # a shard alone, 100 at once
    python benchmarks/serve.py fuzz --bodies 10000
    python benchmarks/serve.py export --assets FOLDER       # state dict and ONNX of every network

Every answer and all that is stored in the end is compared with one process that was never killed.
"""

import argparse
import asyncio
import atexit
import ctypes
import io
import json
import multiprocessing
import multiprocessing.process
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from numpy.typing import NDArray

import driftfilter as df
from driftfilter.app import models, streams
from driftfilter.app.cli import main as run_command
from driftfilter.app.serve.batching import Batcher
from driftfilter.app.serve.records import to_checkpoint
from driftfilter.app.serve.shard import Reply, Request, Shard
from driftfilter.app.serve.store import Entry, FolderStore, key_of
from driftfilter.storage.sealed import unseal

NPY = "application/x-npy"
MODEL = "resnet20"


def pixels() -> NDArray[np.uint8]:
    """The 2,000 images that ship with the package [2000, 3, 32, 32]."""
    images = np.asarray(streams.sample_images()[0])
    return np.ascontiguousarray(images)


def pack(array: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


class Plan:
    """What each tenant sends: batches of shipped images, some of them darkened."""

    def __init__(self, tenants: int, steps: int, n: int) -> None:
        self.names = [f"tenant {number}" for number in range(tenants)]
        self.steps, self.n, self._images = steps, n, pixels()

    def batch(self, tenant: int, step: int) -> NDArray[np.uint8]:
        places = np.random.default_rng((tenant, step)).integers(0, len(self._images), self.n)
        images = self._images[places]
        return images // 2 if tenant % 2 else images


def reference(plan: Plan, preset: str, folder: Path) -> tuple[dict[Any, bytes], dict[str, Any]]:
    """Answers and stored tensors of one process that nobody kills, a request at a time."""
    from driftfilter.app.run.reader import Form

    store = FolderStore(folder, sync=False)
    shard = Shard(df.adapt(models.load(MODEL), preset), store)
    answers, form = {}, Form()
    for step in range(plan.steps):
        for tenant, name in enumerate(plan.names):
            inputs = form(plan.batch(tenant, step))
            (found,) = shard.serve([Request("predict", name, inputs)])
            assert isinstance(found, Reply), found
            assert found.log_probabilities is not None
            answers[tenant, step] = found.log_probabilities.tobytes()
    states = read_states(store, plan.names)
    store.close()
    return answers, states


def read_states(store: Any, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        data = store.read(key_of(name))
        assert data is not None, name
        header, tensors = unseal(to_checkpoint(data))
        found[name] = header["notes"]["sequence"], tensors
    return found


def count_different(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Tenants whose number or any tensor differs in a bit."""
    wrong = 0
    for name, (sequence, tensors) in one.items():
        theirs = other[name]
        same = sequence == theirs[0] and tensors.keys() == theirs[1].keys()
        wrong += not (same and all(torch.equal(tensors[key], theirs[1][key]) for key in tensors))
    return wrong


# A process that has imported all there is and runs nothing: services are forks of it, so that what
# is waited for after a kill is theirs, not Python's.
READY = multiprocessing.get_context("forkserver")
IMPORTS = ["__main__", "driftfilter.app.serve.command", "driftfilter.compiled.sticky_kernels"]


def run_service(arguments: list[str]) -> None:
    """``driftfilter serve`` in this process."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.exit(run_command(arguments))


class Service:
    """``driftfilter serve`` in a process of its own."""

    def __init__(self, store: Path, preset: str, *options: str) -> None:
        with socket.socket() as free:  # a port of its own
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.starts = f"http://127.0.0.1:{port}", 0
        command = ["serve", MODEL, "--preset", preset, "--store", str(store)]
        self._command = [*command, "--port", str(port), "--quiet", *options]
        self._process: multiprocessing.process.BaseProcess | None = None
        atexit.register(self._end)

    @property
    def process(self) -> multiprocessing.process.BaseProcess:
        """That which runs now."""
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        """Its number."""
        assert self.process.pid is not None
        return self.process.pid

    def _end(self) -> None:
        """Leave nothing behind if the benchmark fails."""
        if self._process is not None and self._process.is_alive():
            self.kill()

    def start(self, wait: float = 120.0) -> None:
        """Start it, and wait until it answers."""
        self.starts += 1
        self._process = READY.Process(target=run_service, args=(self._command,))
        self._process.start()
        until = time.monotonic() + wait
        while time.monotonic() < until:
            try:
                if httpx.get(f"{self.url}/healthz", timeout=1, trust_env=False).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.02)
            assert self._process.is_alive(), "the service ended by itself"
        raise TimeoutError("the service did not start")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.process.join()

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGTERM)
        self.process.join(60)
        assert self.process.exitcode == 0, self.process.exitcode


@contextmanager
def scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="driftfilter-serve-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Load:
    """Clients that send the plan, each tenant's steps in their order, again until answered."""

    def __init__(self, plan: Plan, url: str, clients: int) -> None:
        self.plan, self.url, self.clients = plan, url, clients
        self.answers: dict[Any, bytes] = {}
        self.repeated, self.retries = 0, 0
        self.statuses: dict[int, int] = {}

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=self.clients, max_keepalive_connections=self.clients)
        options: dict[str, Any] = {"limits": limits, "timeout": 120, "trust_env": False}
        async with httpx.AsyncClient(base_url=self.url, **options) as client:
            own = [
                range(place, len(self.plan.names), self.clients) for place in range(self.clients)
            ]
            await asyncio.gather(*(self._client(client, tenants) for tenants in own))

    async def _client(self, client: httpx.AsyncClient, tenants: range) -> None:
        for step in range(self.plan.steps):
            for tenant in tenants:
                await self._send(client, tenant, step)

    async def _send(self, client: httpx.AsyncClient, tenant: int, step: int) -> None:
        headers = {"content-type": NPY, "accept": NPY, "sequence": str(step + 1)}
        url = f"/v1/tenants/{self.plan.names[tenant]}/predict"
        body = pack(self.plan.batch(tenant, step))
        while True:
            try:
                found = await client.post(url, content=body, headers=headers)
            except httpx.HTTPError:
                self.retries += 1
                await asyncio.sleep(0.05)
                continue
            self.statuses[found.status_code] = self.statuses.get(found.status_code, 0) + 1
            if found.status_code == 200:
                break
            assert found.status_code in (503, 429), found.text
            self.retries += 1
            await asyncio.sleep(0.05)
        self.repeated += "repeated" in found.headers
        self.answers[tenant, step] = np.load(io.BytesIO(found.content)).tobytes()


async def disturb(
    load: Load, kill: Callable[[], Awaitable[bool]], kills: int, pause: tuple[float, float]
) -> int:
    """Kill while the load runs; kills that were done before it ended: those that found somebody."""
    work, done, draws = asyncio.create_task(load.run()), 0, random.Random(0)
    while done < kills and not work.done():
        await asyncio.sleep(draws.uniform(*pause))
        if not work.done():
            done += await kill()
    await work
    return done


def compare(plan: Plan, load: Load, answers: dict[Any, bytes], states: int) -> dict[str, Any]:
    wrong = sum(load.answers[key] != answers[key] for key in answers)
    return {
        "tenants": len(plan.names),
        "steps": plan.steps * len(plan.names),
        "answers_different": wrong,
        "tenants_with_another_state": states,
        "answers_from_the_store": load.repeated,
        "requests_sent_again": load.retries,
        "statuses": {str(key): value for key, value in sorted(load.statuses.items())},
    }


def kills(args: argparse.Namespace) -> dict[str, Any]:
    """SIGKILLs of the embedded service until so many are done: rounds of the same plan, each with
    tenants of its own.
    """
    with scratch() as folder:
        plan = Plan(args.tenants, args.steps, args.batch)
        answers, states = reference(plan, args.preset, folder / "reference")
        rounds, done = list[dict[str, Any]](), 0
        while done < args.kills:
            store = folder / f"store{len(rounds)}"
            service = Service(store, args.preset, "--durability", args.durability)
            service.start()
            load = Load(plan, service.url, args.clients)

            async def kill(service: Service = service) -> bool:
                await asyncio.to_thread(service.kill)
                await asyncio.to_thread(service.start)
                return True

            killed = asyncio.run(disturb(load, kill, args.kills - done, (0.05, args.pause)))
            service.stop()
            done += killed
            with FolderStore(store) as kept:
                different = count_different(read_states(kept, plan.names), states)
            rounds.append({"kills": killed, **compare(plan, load, answers, different)})
            print(rounds[-1], flush=True)
        return {"kills": done, "preset": args.preset, "rounds": rounds}


def ray_kills(args: argparse.Namespace) -> dict[str, Any]:
    """SIGKILLs of Ray workers, one at a time, while the router stays; or of the router itself."""
    with scratch() as folder:
        plan = Plan(args.tenants, args.steps, args.batch)
        answers, states = reference(plan, args.preset, folder / "reference")
        rounds, done = list[dict[str, Any]](), 0
        while done < args.kills:
            store = folder / f"store{len(rounds)}"
            options = ("--ray", "local", "--workers", str(args.workers))
            service = Service(store, args.preset, *options, "--durability", args.durability)
            service.start()
            load, draws = Load(plan, service.url, args.clients), random.Random(1)

            async def kill(service: Service = service, draws: random.Random = draws) -> bool:
                if args.what == "router":
                    await asyncio.to_thread(service.kill)
                    await asyncio.to_thread(service.start)
                    return True
                found = find_workers(service.pid)
                if found:
                    os.kill(draws.choice(found), signal.SIGKILL)
                return bool(found)

            killed = asyncio.run(disturb(load, kill, args.kills - done, (0.3, args.pause)))
            service.stop()
            done += killed
            kept = {}
            for number in range(args.workers):
                with FolderStore(store, f"w{number}") as own:
                    own.release(list(own.held()))
            with FolderStore(store, "reader") as own:
                kept = read_states(own, plan.names)
            different = count_different(kept, states)
            rounds.append({"kills": killed, **compare(plan, load, answers, different)})
            print(rounds[-1], flush=True)
        return {"kills": done, "preset": args.preset, "workers": args.workers, "rounds": rounds}


def find_workers(parent: int) -> list[int]:
    """Processes of workers below a process: Ray names them so."""
    below = {parent}
    listed = subprocess.run(
        ["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()[1:]]
    for _ in range(5):
        below |= {int(pid) for pid, above, *_ in rows if int(above) in below}
    return [int(row[0]) for row in rows if int(row[0]) in below and "ray::Worker" in row[-1]]


def nodes(args: argparse.Namespace) -> dict[str, Any]:
    """Two Ray nodes on this machine, one killed while it serves, and a worker more in the end."""
    import ray
    from ray.cluster_utils import Cluster

    from driftfilter.app.run.reader import Form
    from driftfilter.app.serve.options import ServeOptions
    from driftfilter.app.serve.ray_router import Router

    with scratch() as folder:
        plan = Plan(args.tenants, args.steps, args.batch)
        answers, states = reference(plan, args.preset, folder / "reference")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
        second = cluster.add_node(num_cpus=4)
        env = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
        ray.init(cluster.address, log_to_driver=False, runtime_env=env)
        store, form = folder / "store", Form()
        options = ServeOptions(
            MODEL, store=str(store), preset=args.preset, ray=cluster.address, workers=args.workers
        )
        found: dict[Any, bytes] = {}

        async def run() -> dict[str, Any]:
            router = Router(options)
            before = await router.processes()

            async def client(tenant: int) -> None:
                for step in range(plan.steps):
                    inputs = form(plan.batch(tenant, step))
                    own = Request("predict", plan.names[tenant], inputs, None, step + 1, str(step))
                    reply = await router.ask(own)
                    assert reply.log_probabilities is not None
                    found[tenant, step] = reply.log_probabilities.tobytes()

            load = asyncio.gather(*map(client, range(len(plan.names))))
            while len(found) < len(answers) // 3:
                await asyncio.sleep(0.05)
            await asyncio.to_thread(cluster.remove_node, second, False)
            await load
            after = await router.processes()
            held = router.facts()
            moved = await router.scale(args.workers + 1)
            for tenant, name in enumerate(plan.names):  # everybody is still there
                last = plan.steps - 1
                inputs = form(plan.batch(tenant, last))
                again = Request("predict", name, inputs, None, last + 1, str(last))
                reply = await router.ask(again)
                assert reply.repeated
                assert reply.log_probabilities is not None
                assert reply.log_probabilities.tobytes() == answers[tenant, last]
            await router.close()
            return {
                "workers_started_again": sum(before[name] != after[name] for name in before),
                "tenants_before": held.get("tenants"),
                "moved_to_the_new_worker": sum(moved.values()),
                "moved_from": moved,
            }

        told = asyncio.run(run())
        cluster.shutdown()  # type: ignore[no-untyped-call]
        for number in range(args.workers + 1):
            with FolderStore(store, f"w{number}") as own:
                own.release(list(own.held()))
        with FolderStore(store, "reader") as own:
            different = count_different(read_states(own, plan.names), states)
        wrong = sum(found[key] != answers[key] for key in answers)
        return {
            **told,
            "tenants": len(plan.names),
            "answers_different": wrong,
            "tenants_with_another_state": different,
        }


def disk(args: argparse.Namespace) -> dict[str, Any]:
    """A disk that is full, then one that cannot be written to, for a while each."""
    with scratch() as folder:
        plan = Plan(args.tenants, args.steps, args.batch)
        answers, states = reference(plan, args.preset, folder / "reference")
        service = Service(folder / "store", args.preset)
        service.start()
        load, pid = Load(plan, service.url, args.clients), str(service.pid)

        def limit(size: str) -> None:
            subprocess.run(["prlimit", "--pid", pid, f"--fsize={size}:unlimited"], check=True)

        def protect(sign: str) -> bool:
            logs = list((folder / "store" / "workers" / "0").glob("*.log"))
            command = ["chattr", f"{sign}i", *map(str, logs)]
            return subprocess.run(command, check=False, capture_output=True).returncode == 0

        async def run() -> dict[str, Any]:
            work, told = asyncio.create_task(load.run()), dict[str, Any]()
            await asyncio.sleep(1.0)
            for name, begin, end in (
                ("full", lambda: limit("1"), lambda: limit("unlimited")),
                ("read_only", lambda: protect("+"), lambda: protect("-")),
            ):
                before = load.statuses.get(503, 0)
                if begin() is False:
                    told[name] = "not tried: chattr +i is not allowed here"
                    continue
                await asyncio.sleep(2.0)
                ready = httpx.get(f"{service.url}/readyz", trust_env=False).status_code
                end()
                told[name] = {"refused": load.statuses.get(503, 0) - before, "readyz": ready}
                await asyncio.sleep(0.5)
            await work
            return told

        told = asyncio.run(run())
        service.stop()
        with FolderStore(folder / "store") as kept:
            different = count_different(read_states(kept, plan.names), states)
        return {**told, **compare(plan, load, answers, different)}


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Resident memory that a tenant more costs: the slope over many of them."""
    from driftfilter.app.serve.command import keep_memory

    keep_memory()
    torch.set_num_threads(1)
    with scratch() as folder:
        weights = None if args.assets is None else args.assets / f"models/{args.model}.safetensors"
        model = models.load(args.model, weights if args.model not in models.SHIPPED else None)
        shard = Shard(df.adapt(model, args.preset), FolderStore(folder, sync=False))
        images = torch.from_numpy(pixels()).float() / 255

        for step in range(args.steps):
            places = torch.arange(args.batch) + args.batch * step
            inputs = images[places % len(images)]
            (found,) = shard.serve([Request("predict", "grown", inputs)])
            assert isinstance(found, Reply), found
        content = shard.store.read(key_of("grown"))
        assert content is not None
        marks = []
        for place in range(args.marks + 1):  # others that know as much, each read by itself
            names = [f"tenant {place} {number}" for number in range(args.tenants)]
            shard.store.write([Entry(key_of(name), content) for name in names])
            for name in names:
                shard.serve([Request("look", name)])
            ctypes.CDLL(None).malloc_trim(0)  # what passes have freed would hold them
            marks.append((resident_bytes(), shard.tenants.used))
        slopes = np.diff(np.array(marks), axis=0) / args.tenants
        return {
            "model": args.model,
            "preset": args.preset,
            "steps": args.steps,
            "batch": args.batch,
            "checkpoint_bytes": len(to_checkpoint(content)),
            "record_bytes": len(content.content),
            "resident_bytes_a_tenant": slopes[:, 0].mean().item(),
            "counted_bytes_a_tenant": slopes[:, 1].mean().item(),
            "slopes": slopes.tolist(),
            "resident_bytes": marks[-1][0],
        }


def many(args: argparse.Namespace) -> dict[str, Any]:
    """Many tenants: throughput and times with 1, 10 and 100 clients, served together or one by
    one by turns, and the memory of the service. It runs in this process, so that both find the same
    tenants in memory; its clients have processes of their own.
    """
    found: dict[str, Any] = {"tenants": args.tenants, "preset": args.preset, "runs": []}
    rates: dict[int, list[float]] = {64: [], 1: []}
    with scratch() as folder, serving(folder / "store", args) as (port, batcher):
        found["first"] = ask_many(port, batcher, 100, args, "--once")
        for clients in (1, 10, 100, 100, 100):
            for batch in rates:
                batcher.most = batch
                seed = str(len(found["runs"]))  # or one would find what the other has read
                run = ask_many(port, batcher, clients, args, "--seed", seed)
                rates[batch] += [run["requests_a_second"]] if clients == 100 else []
                found["runs"].append({"served_together": batch, **run})
                print(found["runs"][-1], flush=True)
    return {**found, "faster_together": sum(rates[64]) / sum(rates[1])}


@contextmanager
def serving(store: Path, args: argparse.Namespace) -> Iterator[tuple[int, Batcher]]:
    """The service of ``driftfilter serve`` in this process: its port, and who makes the groups."""
    from driftfilter.app.serve.command import make_server
    from driftfilter.app.serve.options import ServeOptions

    options = ServeOptions(MODEL, store=str(store), preset=args.preset, memory=args.memory, port=0)
    server, backend = make_server(options)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    assert isinstance(backend, Batcher)
    try:
        yield server.servers[0].sockets[0].getsockname()[1], backend
    finally:
        server.should_exit = True
        thread.join()


def ask_many(
    port: int, batcher: Batcher, clients: int, args: argparse.Namespace, *options: str
) -> dict[str, Any]:
    """What clients of another process are answered, and what that takes."""
    command = [sys.executable, str(Path(__file__).with_name("serve_clients.py")), str(port)]
    command += ["--clients", str(clients), "--batch", str(args.batch), *options]
    command += ["--tenants", str(args.tenants), "--seconds", str(args.seconds)]
    facts, used = batcher.facts(), time.process_time()
    done = subprocess.run(command, check=True, capture_output=True)
    told, used, after = json.loads(done.stdout), time.process_time() - used, batcher.facts()
    passes, shared, loads = (after[name] - facts[name] for name in ("passes", "shared", "loads"))
    return {
        "clients": clients,
        **told,
        "processor_ms_a_request": 1000 * used / told["requests"],
        "requests_a_pass": shared / max(passes, 1),
        "read_from_the_store": loads,
        "resident_mb": resident_bytes() / 1e6,
        "tenants_held": after["tenants_held"],
        "mb_held": after["bytes_held"] / 1e6,
    }


def resident_bytes() -> int:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def read_metrics(service: Service) -> dict[str, float]:
    """Numbers of the shard by name."""
    text = httpx.get(f"{service.url}/metrics", trust_env=False).text
    lines = [line.split() for line in text.splitlines() if line.startswith("driftfilter_")]
    plain = [line for line in lines if "{" not in line[0]]
    return {line[0].removeprefix("driftfilter_"): float(line[1]) for line in plain}


def together(args: argparse.Namespace) -> dict[str, Any]:
    """A shard without HTTP: requests of 100 tenants served 100 at once, and one by one."""
    images, found = torch.from_numpy(pixels()).float() / 255, dict[str, Any]()
    for size in (100, 1, 100, 1):
        with scratch() as folder, FolderStore(folder, sync=True) as store:
            shard = Shard(df.adapt(models.load(MODEL), "center"), store)
            wall, used = 0.0, 0.0
            for step in range(args.steps):
                requests = [
                    Request("predict", f"tenant {place}", images[place + step :][: args.batch])
                    for place in range(100)
                ]
                begun = time.perf_counter(), time.process_time()
                for start in range(0, 100, size):
                    shard.serve(requests[start : start + size])
                if step:  # the first makes the tenants
                    wall += time.perf_counter() - begun[0]
                    used += time.process_time() - begun[1]
            count = 100 * (args.steps - 1)
            found.setdefault(f"{size} at once", []).append(
                {"ms_a_request": 1000 * wall / count, "processor_ms": 1000 * used / count}
            )
    return found


class Mixed:
    """Clients of httpx for some minutes: steps under their numbers, predictions alone, questions,
    and what must be refused. Every tenant has one client.
    """

    def __init__(self, tenants: int, url: str, clients: int) -> None:
        self._plan, self._url, self._clients = Plan(tenants, 10**9, 4), url, clients
        self.steps = [0] * tenants
        self.statuses: dict[str, dict[int, int]] = {}  # by what was asked
        self.unasked = list[str]()  # answers that are not what the request asks for
        self.times = list[float]()

    async def run_for(self, seconds: float) -> None:
        until = time.perf_counter() + seconds
        options: dict[str, Any] = {"timeout": 120, "trust_env": False, "base_url": self._url}
        async with httpx.AsyncClient(**options) as client:

            async def go_on(number: int) -> None:
                draws = random.Random(number)
                while time.perf_counter() < until:
                    tenant = draws.choice(range(number, len(self.steps), self._clients))
                    await self._ask(client, tenant, draws)

            await asyncio.gather(*map(go_on, range(self._clients)))
            for tenant, steps in enumerate(self.steps):
                if steps:
                    found = await client.get(f"/v1/tenants/{self._plan.names[tenant]}")
                    if found.json()["sequence"] != steps:
                        self.unasked.append(f"tenant {tenant}: {found.text[:99]}, not {steps}")

    async def _ask(self, client: httpx.AsyncClient, tenant: int, draws: random.Random) -> None:
        path, steps = f"/v1/tenants/{self._plan.names[tenant]}", self.steps[tenant]
        body = pack(self._plan.batch(tenant, steps))
        odds = {"step": 12, "peek": 3, "look": 1, "gap": 1, "damaged": 1, "type": 1, "unknown": 1}
        what = draws.choices(list(odds), list(odds.values()))[0]
        if what == "look" and not steps:
            what = "step"
        url = {"look": path, "peek": f"{path}/predict?adapt=false", "unknown": "/v1/tenants/nobody"}
        allowed = {"gap": 409, "damaged": 400, "type": 415, "unknown": 404}.get(what, 200)
        headers = {"content-type": "image/png" if what == "type" else NPY, "accept": NPY}
        if what in ("step", "gap"):
            headers["sequence"] = str(steps + 1 + (what == "gap") * draws.randrange(1, 9))
        begun = time.perf_counter()
        if what in ("look", "unknown"):
            found = await client.get(url[what])
        else:
            content = body[:-7] if what == "damaged" else body
            found = await client.post(
                url.get(what, f"{path}/predict"), content=content, headers=headers
            )
        self.times.append(time.perf_counter() - begun)
        counts = self.statuses.setdefault(what, {})
        counts[found.status_code] = counts.get(found.status_code, 0) + 1
        if found.status_code != allowed:
            self.unasked.append(f"{what}: {found.status_code} {found.text[:99]}")
        self.steps[tenant] += what == "step" and found.status_code == 200


def load(args: argparse.Namespace) -> dict[str, Any]:
    """Some minutes of a mixed load by httpx: nothing is refused but what asks for it, and every
    step that was answered was taken once.
    """
    with scratch() as folder:
        service = Service(folder / "store", args.preset, "--memory", str(args.memory))
        service.start()
        mixed = Mixed(args.tenants, service.url, args.clients)
        asyncio.run(mixed.run_for(args.seconds))
        facts = read_metrics(service)
        service.stop()
    times = np.array(mixed.times)
    return {
        "preset": args.preset,
        "tenants": args.tenants,
        "clients": args.clients,
        "requests": len(times),
        "steps_answered": sum(mixed.steps),
        "steps_taken": facts["steps"],
        "p50_ms": 1000 * float(np.quantile(times, 0.5)),
        "p99_ms": 1000 * float(np.quantile(times, 0.99)),
        "statuses": mixed.statuses,
        "not_asked_for": mixed.unasked,
    }


def fuzz(args: argparse.Namespace) -> dict[str, Any]:
    """Damaged bodies, headers and paths: never a 500, and what is refused changes nothing."""
    with scratch() as folder:
        service = Service(folder / "store", "center")
        service.start()
        draws, statuses = random.Random(args.seed), dict[int, int]()
        images = pixels()[:2]
        good = [
            pack(images),
            json.dumps({"inputs": (images[:, :, :6, :6] / 255).tolist()}).encode(),
        ]
        kinds, steps = [NPY, "application/json"], 0
        with httpx.Client(base_url=service.url, trust_env=False, timeout=60) as client:
            first = {"content-type": NPY, "sequence": "1"}
            assert client.post("/v1/tenants/a/predict", content=good[0], headers=first).is_success
            for _ in range(args.bodies):
                place = draws.randrange(2)
                headers = {b"content-type": kinds[place].encode()}
                if draws.random() < 0.1:
                    number = draws.choice(["0", "-1", "x", "1", "9" * 40, "1e3", "١"])
                    headers[b"sequence"] = number.encode()
                body = damage(bytearray(good[place]), draws)
                try:
                    found = client.post("/v1/tenants/a/predict", content=body, headers=headers)
                except httpx.HTTPError:
                    statuses[0] = statuses.get(0, 0) + 1
                    continue
                statuses[found.status_code] = statuses.get(found.status_code, 0) + 1
                steps += found.status_code == 200 and "repeated" not in found.headers
            facts = client.get("/v1/tenants/a").json()
        service.stop()
        return {
            "bodies": args.bodies,
            "statuses": {str(key): value for key, value in sorted(statuses.items())},
            "steps_taken": facts["steps"],
            "steps_answered": steps + 1,
        }


def damage(body: bytearray, draws: random.Random) -> bytes:
    """A body with some bytes changed, taken out or put in; most of them near its beginning."""
    for _ in range(draws.randint(1, 5)):
        spot = draws.randrange(min(len(body), 200) if draws.random() < 0.8 else len(body) + 1)
        what = draws.random()
        if what < 0.25:
            del body[spot : spot + draws.randint(1, 30)]
        elif what < 0.5:
            body[spot:spot] = draws.randbytes(draws.randint(1, 8))
        elif what < 0.6:
            body[spot:spot] = draws.choice([b"[", b"{", b"1e999", b"NaN", b"-", b'"', b"null"])
        elif spot < len(body):
            body[spot] = draws.randrange(256)
        if not body:
            return b""
    return bytes(body)


def export(args: argparse.Namespace) -> dict[str, Any]:
    """Every network of the assets, adapted, as a state dict and as ONNX, beside the adapter with
    the batch kept out of its statistics; and both beside the same network in float64.

    On images like those it adapted to, and on such of ten times their contrast, for which batch
    norm has large gains and logits are large.
    """
    found: dict[str, Any] = {}
    noise = torch.randn(2000, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    usual = (torch.from_numpy(pixels()).float() / 255 + 0.06 * noise).clamp(0, 1)
    for name in args.models or models.ARCHITECTURES:
        weights = None if name in models.SHIPPED else args.assets / f"models/{name}.safetensors"
        found[name] = {}
        for contrast in args.contrasts:
            model, images = models.load(name, weights), 0.5 + contrast * (usual - 0.5)
            sizes = (224, 224) if "imagenet" in name else (32, 32)
            images = torch.nn.functional.interpolate(images[: 64 * args.steps + 16], sizes)
            found[name][f"contrast {contrast}"] = compare_export(
                name,
                model,
                images[16:].split(args.batch)[: args.steps],
                (images[:16] - 0.5) / contrast + 0.5,
            )
            print(name, contrast, found[name][f"contrast {contrast}"], flush=True)
    return found


def compare_export(
    name: str, model: torch.nn.Module, batches: Any, inputs: torch.Tensor
) -> dict[str, float]:
    """Largest differences of probabilities, and of log-probabilities relative to the largest
    logit from those of float64.
    """
    from dataclasses import replace

    import onnxruntime
    from safetensors.torch import load_file

    adapter = df.adapt(model)
    for batch in batches:
        adapter(batch)
    with scratch() as folder:
        alone = adapter
        if isinstance(adapter.recipe.statistics, df.Ema):
            alone = df.adapt(model, replace(adapter.recipe, statistics=df.Ema(0.0)))
            df.save(adapter, folder / "state.safetensors")
            df.load(alone, folder / "state.safetensors", strict=False)
        expected = alone.predict(inputs)
        adapter.export(folder / "model.safetensors", inputs[:2])
        plain = models.build(name)
        plain.load_state_dict(load_file(folder / "model.safetensors"))
        adapter.export(folder / "model.onnx", inputs[:2])
        session = onnxruntime.InferenceSession(
            str(folder / "model.onnx"), providers=["CPUExecutionProvider"]
        )
        (said,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    with torch.no_grad():
        by_dict, by_onnx = plain(inputs), torch.from_numpy(said)
        source, exact = model(inputs), plain.double()(inputs.double())

    def apart(logits: torch.Tensor) -> float:
        return float((logits.softmax(-1) - expected.probabilities).abs().max())

    size = exact.abs().max()

    def beside_exact(logs: torch.Tensor) -> float:
        return float((logs.double() - exact.log_softmax(-1)).abs().max() / size)

    return {
        "state_dict": apart(by_dict),
        "onnx": apart(by_onnx),
        "source_model": apart(source),
        "largest_logit": size.item(),
        "float64_onnx": beside_exact(by_onnx.log_softmax(-1)),
        "float64_state_dict": beside_exact(by_dict.log_softmax(-1)),
        "float64_predict": beside_exact(expected.log_probabilities),
    }


WHAT: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "kills": kills,
    "ray": ray_kills,
    "router": ray_kills,
    "nodes": nodes,
    "disk": disk,
    "memory": memory,
    "tenants": many,
    "load": load,
    "together": together,
    "fuzz": fuzz,
    "export": export,
}


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # services end with it
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--tenants", type=int, default=50)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--preset", default="driftfilter")
    parser.add_argument("--durability", default="step")
    parser.add_argument("--pause", type=float, default=1.5, help="seconds between kills at most")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--contrasts", nargs="*", type=float, default=[1.0, 0.1])
    parser.add_argument("--marks", type=int, default=3)
    parser.add_argument("--memory", type=int, default=256, help="megabytes of tenants")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--assets", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    READY.set_forkserver_preload(IMPORTS)
    begun = time.perf_counter()
    result = {**WHAT[args.what](args), "seconds": round(time.perf_counter() - begun, 1)}
    print(json.dumps(result, indent=1))
    if args.json is not None:
        known = json.loads(args.json.read_text()) if args.json.exists() else {}
        options = {key: str(value) for key, value in vars(args).items() if key != "json"}
        name = f"memory {args.model} {args.preset} {args.steps}"
        known[name if args.what == "memory" else args.what] = {
            "options": options,
            "result": result,
        }
        args.json.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()

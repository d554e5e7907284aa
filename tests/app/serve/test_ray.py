"""Workers of a Ray cluster: killed, joined and left, no step is lost or taken twice."""

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import driftfilter as df
from driftfilter.app.networks.load_model import open_model
from driftfilter.app.serve.open_store import RemoteStore, open_store
from driftfilter.app.serve.options import ServeOptions
from driftfilter.app.serve.problems import ProblemError
from driftfilter.app.serve.records import Stored
from driftfilter.app.serve.ring import find_owner
from driftfilter.app.serve.shard import Request, Shard
from driftfilter.app.serve.store import Entry, key_of

KEYS = [key_of(f"tenant {number}") for number in range(2000)]


def test_a_worker_more_takes_its_share_and_nobody_else_moves() -> None:
    names = [f"w{number}" for number in range(4)]
    before = {key: find_owner(key, names) for key in KEYS}
    after = {key: find_owner(key, [*names, "w4"]) for key in KEYS}
    moved = [key for key in KEYS if before[key] != after[key]]
    assert all(after[key] == "w4" for key in moved)
    assert 0.15 < len(moved) / len(KEYS) < 0.25
    assert min(Counter(before.values()).values()) > 0.2 * len(KEYS)
    left = {key: find_owner(key, names[1:]) for key in KEYS}
    assert all(left[key] == before[key] for key in KEYS if before[key] != "w0")


def test_a_store_of_another_file_system(tmp_path: Path) -> None:
    pytest.importorskip("fsspec", reason="the extra ray is not installed")
    store = open_store(f"file://{tmp_path}/store")
    assert isinstance(store, RemoteStore)
    assert store.read(KEYS[0]) is None
    store.write([Entry(KEYS[0], Stored(b"1")), Entry(KEYS[1], Stored(b"2"))])
    store.write([Entry(KEYS[0], Stored(b"3")), Entry(KEYS[1], None)])
    store.write([Entry(KEYS[2], None)])
    other = open_store(f"file://{tmp_path}/store", "other")
    assert [other.read(key) for key in KEYS[:3]] == [Stored(b"3"), None, None]
    assert (store.count(), list(store.held())) == (1, [KEYS[0]])


def test_whatever_another_file_system_raises_is_an_error_of_the_store(tmp_path: Path) -> None:
    """Those of some are no OSErrors: a step that could not be kept is refused, with 503."""
    pytest.importorskip("fsspec", reason="the extra ray is not installed")
    store = open_store(f"file://{tmp_path}/store")
    assert isinstance(store, RemoteStore)

    class Failing:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("503, slow down")

    files, store._files = store._files, Failing()
    with pytest.raises(OSError, match="RuntimeError: 503, slow down"):
        store.write([Entry(KEYS[0], Stored(b"1"))])
    with pytest.raises(OSError, match="RuntimeError: 503, slow down"):
        store.read(KEYS[0])
    store._files = files
    assert store.read(KEYS[0]) is None


def _batch(tenant: int, step: int) -> Tensor:
    draws = np.random.default_rng((tenant, step)).normal(size=(6, 5))
    return torch.from_numpy(draws).float()


def _request(tenant: int, step: int) -> Request:
    return Request(
        "predict", f"t{tenant}", _batch(tenant, step), None, step + 1, f"{tenant} {step}"
    )


class _Actor:
    """A worker that only leaves its tenants, or fails to."""

    def __init__(self, name: str, log: list[str], fails: set[str]) -> None:
        self.name, self._log, self._fails = name, log, fails
        self.killed = False

    def __getattr__(self, what: str) -> Any:
        async def answer(*_: object) -> int:
            self._log.append(f"{self.name} {what}")
            await asyncio.sleep(0.01)
            if f"{self.name} {what}" in self._fails:
                raise OSError("No space left on device")
            return 1

        return SimpleNamespace(remote=answer)


def test_workers_that_cannot_follow_leave_all_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one change waits for the other."""
    pytest.importorskip("ray", reason="the extra ray is not installed")
    from driftfilter.app.serve import ray_router

    log, fails, made = list[str](), {"w1 release"}, dict[str, _Actor]()

    def make(self: ray_router.Router, name: str) -> _Actor:
        made[name] = _Actor(name, log, fails)
        return made[name]

    monkeypatch.setattr(ray_router.Router, "_make", make)
    monkeypatch.setattr("ray.kill", lambda actor: setattr(actor, "killed", True))

    async def run() -> None:
        router = ray_router.Router(ServeOptions("model", store=str(tmp_path), workers=2))
        with pytest.raises(ProblemError, match="the workers are as they were"):
            await router.scale(3)
        assert sorted(router._workers) == ["w0", "w1"]
        assert [name for name, actor in made.items() if actor.killed] == ["w2"]
        assert log[-2:] == ["w0 release", "w1 release"]  # whom they have left they serve again
        assert log.count("w0 release") == 2
        fails.clear()
        fails.add("w2 close")
        log.clear()
        await asyncio.gather(router.scale(3), router.scale(1))
        assert sorted(router._workers) == ["w0"]
        assert log == [
            *("w2 facts", "w0 release", "w1 release", "w2 release"),
            *("w0 release", "w1 release", "w2 release", "w1 close", "w2 close"),
        ]
        assert all(actor.killed == (name != "w0") for name, actor in made.items())

    asyncio.run(run())


def test_a_worker_that_is_back_is_ready_before_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody would ask it: who balances a load waits until the service is ready."""
    pytest.importorskip("ray", reason="the extra ray is not installed")
    from driftfilter.app.serve import ray_router

    class Alive(_Actor):
        def __getattr__(self, what: str) -> Any:
            async def answer() -> dict[str, float]:
                return {"steps": 1.0}

            return SimpleNamespace(remote=answer)

    def make(self: ray_router.Router, name: str) -> Alive:
        return Alive(name, [], set())

    monkeypatch.setattr(ray_router.Router, "_make", make)
    monkeypatch.chdir(tmp_path)

    async def run() -> None:
        router = ray_router.Router(ServeOptions("model", store="here", workers=2))
        assert router._options.store == str(tmp_path / "here")  # whatever folder workers are in
        router._down.add("w1")
        assert router.is_ready() == "workers ['w1'] are starting again"
        await asyncio.sleep(0.05)
        assert router.is_ready() == ""
        assert router.facts()["steps"] == 2

    asyncio.run(run())


@pytest.mark.slow
def test_killed_workers_and_new_ones_answer_as_one_that_lives(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    from driftfilter.app.serve.ray_router import Router, connect

    model, tenants, steps = "run_network:make", 8, 6
    shard = Shard(
        df.adapt(open_model(model).module, "driftfilter"), open_store(str(tmp_path / "alone"))
    )
    expected = {}
    for tenant in range(tenants):
        for step in range(steps):
            (found,) = shard.serve([_request(tenant, step)])
            expected[tenant, step] = found.log_probabilities  # type: ignore[union-attr]

    async def ask(router: Router, step: int) -> None:
        asked = [router.ask(_request(tenant, step)) for tenant in range(tenants)]
        for tenant, reply in enumerate(await asyncio.gather(*asked)):
            assert np.array_equal(reply.log_probabilities, expected[tenant, step])  # type: ignore[arg-type]

    async def run() -> None:
        store, preset = str(tmp_path / "store"), "driftfilter"
        options = ServeOptions(model, store=store, preset=preset, ray="local", workers=2)
        router = connect(options)[0]
        try:
            await ask(router, 0)
            processes = await router.processes()
            later = asyncio.gather(ask(router, 1))
            os.kill(processes["w0"], signal.SIGKILL)
            await later
            await ask(router, 1)  # once more: stored answers
            moved = await router.scale(3)
            own = [key_of(f"t{tenant}") for tenant in range(tenants)]
            names = ["w0", "w1", "w2"]
            assert sum(moved.values()) == sum(find_owner(key, names) == "w2" for key in own)
            await ask(router, 2)
            await router.scale(1)
            await ask(router, 3)
            with pytest.raises(ProblemError, match="sequence must be 5"):
                await router.ask(_request(0, 5))
        finally:
            await router.close()

    asyncio.run(run())

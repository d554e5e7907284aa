"""Workers of a Ray cluster: killed, joined and left, no step is lost or taken twice."""

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

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


def _batch(tenant: int, step: int) -> Tensor:
    draws = np.random.default_rng((tenant, step)).normal(size=(6, 5))
    return torch.from_numpy(draws).float()


def _request(tenant: int, step: int) -> Request:
    return Request(
        "predict", f"t{tenant}", _batch(tenant, step), None, step + 1, f"{tenant} {step}"
    )


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

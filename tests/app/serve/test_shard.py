"""A shard does for each tenant what an adapter of its own would do, and each step once."""

import errno
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import driftfilter as df
from driftfilter.app.serve.batching import Batcher
from driftfilter.app.serve.problems import ProblemError
from driftfilter.app.serve.records import Stored
from driftfilter.app.serve.shard import Kind, Reply, Request, Shard
from driftfilter.app.serve.store import Entry, FolderStore, key_of
from small import conv, tabular

TENANTS = ("a", "b", "c")
RECIPES: dict[str, Any] = {
    "center": (tabular, "center"),
    "default": (tabular, "driftfilter"),
    "images": (conv, "driftfilter"),
    "head": (tabular, replace(df.presets.get("head_bong"), statistics="source")),
    "window": (tabular, "note"),
}


def _batch(number: int, form: tuple[int, ...], n: int = 8) -> Tensor:
    return torch.randn(n, *form, generator=torch.Generator().manual_seed(number))


def _ask(shard: Shard, *requests: Request) -> list[Any]:
    return [
        found.log_probabilities if isinstance(found, Reply) and found.facts is None else found
        for found in shard.serve(requests)
    ]


def _assert_same_state(shard: Shard, tenant: str, adapter: df.Adapter) -> None:
    """All that a checkpoint holds, bit for bit."""
    shard.adapter.restore(shard.find_state(tenant))
    mine, theirs = shard.adapter.state_dict(), adapter.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(mine[name], value), name


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("memory", [1 << 30, 1, 2], ids=["in memory", "always loaded", "packed"])
def test_tenants_are_as_adapters_of_their_own(
    name: str, memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if memory == 2:
        memory = 1 << 30
        monkeypatch.setattr("driftfilter.app.serve.held._AWAKE", 0)
        monkeypatch.setattr("driftfilter.app.serve.held._SMALL", 0)
    build, recipe = RECIPES[name]
    model, form = build().eval(), (3, 8, 8) if build is conv else (4,)
    shard = Shard(df.adapt(model, recipe), FolderStore(tmp_path, sync=False), memory)
    own = {tenant: df.adapt(model, recipe) for tenant in TENANTS}
    for step in range(5):
        batches = {tenant: _batch(10 * step + ord(tenant), form) for tenant in TENANTS}
        requests = [Request("predict", tenant, batch) for tenant, batch in batches.items()]
        for tenant, found in zip(TENANTS, _ask(shard, *requests), strict=True):
            expected = own[tenant](batches[tenant]).numpy()
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    for tenant in TENANTS:
        if shard.counts.shared == 0:  # else the same to rounding
            _assert_same_state(shard, tenant, own[tenant])
        peeked = _ask(shard, Request("peek", tenant, _batch(9, form)))[0]
        expected = own[tenant].predict(_batch(9, form)).log_probabilities
        torch.testing.assert_close(torch.tensor(peeked), expected)
    assert (shard.counts.loads > 0) == (memory == 1)
    assert (shard.counts.passes > 0) == (name in ("center", "head"))


def test_tenants_of_a_new_start_share_one_network(tmp_path: Path) -> None:
    """A head is found by the first batch: all that are loaded stand on one filter."""
    model, recipe = tabular().eval(), RECIPES["head"][1]
    first = Shard(df.adapt(model, recipe), FolderStore(tmp_path, sync=False))
    _ask(first, *(Request("predict", tenant, _batch(1, (4,))) for tenant in TENANTS))
    first.store.close()
    again = Shard(df.adapt(model, recipe), FolderStore(tmp_path, sync=False))
    _ask(again, Request("predict", "new", _batch(2, (4,))))
    bounds = {id(again.find_state(tenant).bound) for tenant in (*TENANTS, "new")}
    assert len(bounds) == 1
    assert again.counts.loads == 3


@pytest.mark.parametrize("n", [1, 2, 5])
def test_company_changes_no_bit(n: int, tmp_path: Path) -> None:
    """Served alone or together, answers and states are the same, for the shipped ResNet-20, too."""
    from driftfilter.app import models, streams

    model = models.load("resnet20")
    images = torch.as_tensor(streams.sample_images()[0][: 12 * n]).float() / 255
    images = images.movedim(-1, 1) if images.shape[-1] == 3 else images
    pieces = [piece.contiguous().clone() for piece in images.split(n)]
    alone = Shard(df.adapt(model, "center"), FolderStore(tmp_path / "a", sync=False))
    company = Shard(df.adapt(model, "center"), FolderStore(tmp_path / "b", sync=False))
    for step in range(0, 12, 4):
        requests = [
            Request("predict", f"t{place}", pieces[step + place].clone()) for place in range(4)
        ]
        one = [_ask(alone, request)[0] for request in requests]
        for mine, theirs in zip(one, _ask(company, *requests), strict=True):
            assert (mine == theirs).all()
    assert company.counts.passes == 3
    assert alone.counts.passes == 12


def _served(tmp_path: Path) -> Shard:
    store = FolderStore(tmp_path, sync=False)
    return Shard(df.adapt(tabular().eval(), "center"), store, limit=3)


def _problem(shard: Shard, request: Request) -> ProblemError:
    (found,) = shard.serve([request])
    assert isinstance(found, ProblemError)
    return found


def test_a_repeated_number_gets_the_stored_answer(tmp_path: Path) -> None:
    shard = _served(tmp_path)
    one, two = _batch(1, (4,)), _batch(2, (4,))
    first = _ask(shard, Request("predict", "a", one, None, 1, "x"))[0]
    for _ in range(2):
        (again,) = shard.serve([Request("predict", "a", one, None, 1, "x")])
        assert isinstance(again, Reply)
        assert again.repeated
        assert (again.log_probabilities == first).all()
        shard.store.close()  # also after a new start
        shard = _served(tmp_path)
    assert _problem(shard, Request("predict", "a", two, None, 1, "y")).status == 409
    gap = _problem(shard, Request("predict", "a", two, None, 3, "y"))
    assert (gap.status, gap.field, gap.value, gap.allowed) == (
        409,
        "sequence",
        3,
        "2, the next one",
    )
    assert gap.to_dict()["done"] is False
    _ask(shard, Request("predict", "a", two, None, 2, "y"), Request("predict", "a", two))
    (look,) = shard.serve([Request("look", "a")])
    assert isinstance(look, Reply)
    assert look.facts is not None
    assert (look.facts["sequence"], look.facts["steps"]) == (3, 3)
    old = _problem(shard, Request("predict", "a", one, None, 1, "x"))
    assert old.to_dict()["done"] is True


def test_one_queue_keeps_the_order_of_a_tenant(tmp_path: Path) -> None:
    shard, batches = _served(tmp_path), [_batch(number, (4,)) for number in range(6)]
    mixed = [Request("predict", "ab"[place % 2], batch) for place, batch in enumerate(batches)]
    found = _ask(shard, *mixed)
    for place in range(2):
        adapter = df.adapt(tabular().eval(), "center")
        for batch, mine in zip(batches[place::2], found[place::2], strict=True):
            torch.testing.assert_close(torch.tensor(mine), adapter(batch))


def test_a_poisoned_tenant_harms_nobody(tmp_path: Path) -> None:
    shard, clean = _served(tmp_path), df.adapt(tabular().eval(), "center")
    clean(_batch(1, (4,)))
    _ask(shard, Request("predict", "a", _batch(1, (4,))), Request("predict", "b", _batch(1, (4,))))
    bad = [
        torch.full((2, 4), torch.nan),
        torch.zeros(2, 5),
        torch.zeros(0, 4),
        torch.zeros(()),
        torch.zeros(2, 4, dtype=torch.complex64),
    ]
    for inputs in bad:
        good = Request("predict", "b", _batch(2, (4,)))
        refused, answered = shard.serve([Request("predict", "a", inputs), good])
        assert isinstance(refused, ProblemError)
        assert refused.status == 422
        assert isinstance(answered, Reply)
        shard.serve([Request("reset", "b"), Request("predict", "b", _batch(1, (4,)))])
    assert shard.find_state("a").number == 1
    batch = _batch(3, (4,))
    found = _ask(shard, Request("predict", "a", batch))[0]
    torch.testing.assert_close(torch.tensor(found), clean(batch))


def test_a_store_that_fails_leaves_all_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, clean = _served(tmp_path), df.adapt(tabular().eval(), "center")
    clean(_batch(1, (4,)))
    _ask(shard, Request("predict", "a", _batch(1, (4,)), None, 1, "x"))

    def fail(entries: list[Entry]) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(shard.store, "write", fail)
        kinds: tuple[Kind, ...] = ("predict", "delete", "reset")
        for kind in kinds:
            inputs = _batch(2, (4,)) if kind == "predict" else None
            problem = _problem(shard, Request(kind, "a", inputs))
            assert (problem.status, problem.field) == (503, "store")
    batch = _batch(2, (4,))
    found = _ask(shard, Request("predict", "a", batch, None, 2, "y"))[0]
    torch.testing.assert_close(torch.tensor(found), clean(batch))


def test_limits_and_lives_of_tenants(tmp_path: Path) -> None:
    shard, batch = _served(tmp_path), _batch(1, (4,))
    first = _ask(shard, Request("predict", "a", batch))[0]
    _ask(shard, *(Request("predict", tenant, batch) for tenant in "bc"))
    assert _problem(shard, Request("predict", "d", batch)).status == 429
    kinds: tuple[Kind, ...] = ("look", "reset", "delete")
    for kind in kinds:
        assert _problem(shard, Request(kind, "d")).status == 404
    shard.serve([Request("delete", "a")])
    assert _problem(shard, Request("look", "a")).status == 404
    again = _ask(shard, Request("predict", "a", batch))[0]
    assert (again == first).all()


def test_labels_teach_a_tenant_as_they_teach_an_adapter(tmp_path: Path) -> None:
    model, batch, labels = tabular().eval(), _batch(1, (4,), 32), torch.arange(32) % 3
    shard = Shard(df.adapt(model), FolderStore(tmp_path, sync=False))
    alone = df.adapt(model)
    alone(batch)
    alone.learn(batch, labels)
    shard.serve([Request("predict", "a", batch), Request("learn", "a", batch, labels)])
    found, (told,) = shard.find_state("a").current.belief, shard.serve([Request("look", "a")])
    torch.testing.assert_close(found.mean, alone.belief.mean)
    assert isinstance(told, Reply)
    assert told.facts is not None
    assert told.facts["estimate"]["accuracy"] == pytest.approx(alone.estimate.accuracy)
    before = shard.find_state("a")
    wrong = Request("learn", "a", batch, torch.full((32,), 77))
    assert _problem(shard, wrong).status == 422
    assert shard.find_state("a") is before


def test_new_tenants_that_come_together_keep_to_the_limit(tmp_path: Path) -> None:
    shard = Shard(df.adapt(tabular().eval(), "center"), FolderStore(tmp_path, sync=False), limit=2)
    requests = [Request("predict", tenant, _batch(0, (4,))) for tenant in ("a", "b", "c")]
    kinds = [type(found) for found in shard.serve(requests)]
    assert kinds == [Reply, Reply, ProblemError]
    assert shard.store.count() == 2


def test_a_call_that_nobody_waits_for_ends_no_thread(tmp_path: Path) -> None:
    shard = Shard(df.adapt(tabular().eval(), "center"), FolderStore(tmp_path, sync=False))
    batcher, begun, go = Batcher(shard), threading.Event(), threading.Event()

    def work() -> bool:
        begun.set()
        return go.wait(10)

    first = batcher.call(work)
    assert begun.wait(10)
    second = batcher.call(lambda: None)
    assert second.cancel()
    go.set()
    first.result(10)
    answer = batcher.submit(Request("predict", "a", _batch(0, (4,)))).result(10)
    assert answer.sequence == 1
    batcher.stop()


def test_a_group_has_one_request_of_each_tenant_and_keeps_their_order(tmp_path: Path) -> None:
    shard = Shard(df.adapt(tabular().eval(), "center"), FolderStore(tmp_path, sync=False))
    batcher, begun, go = Batcher(shard, most=2), threading.Event(), threading.Event()
    groups, serve = list[list[str]](), shard.serve

    def note(requests: Any) -> Any:
        groups.append([f"{each.tenant}{each.sequence}" for each in requests])
        return serve(requests)

    shard.serve = note  # type: ignore[method-assign]

    def work() -> bool:
        begun.set()
        return go.wait(10)

    batcher.call(work)
    assert begun.wait(10)
    asked = [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("c", 1), ("b", 2)]
    waiting = [
        batcher.submit(Request("predict", tenant, _batch(0, (4,)), None, number))
        for tenant, number in asked
    ]
    go.set()
    assert [own.result(10).sequence for own in waiting] == [number for _, number in asked]
    assert [group for group in groups if group] == [["a1", "b1"], ["a2", "c1"], ["a3", "b2"]]
    batcher.stop()


def test_a_tenant_that_cannot_be_written_harms_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = Shard(df.adapt(tabular().eval(), "center"), FolderStore(tmp_path, sync=False))
    whole = shard._encode

    def encode(tenant: str, work: Any) -> Stored | None:
        if tenant == "b":
            raise ValueError("no such number")
        return whole(tenant, work)

    requests = [Request("predict", tenant, _batch(0, (4,))) for tenant in TENANTS]
    with monkeypatch.context() as patch:
        patch.setattr(shard, "_encode", encode)
        kinds = [type(found) for found in shard.serve(requests)]
    assert kinds == [Reply, ProblemError, Reply]
    again = shard.serve(requests)
    assert [found.sequence for found in again if isinstance(found, Reply)] == [2, 1, 2]


def test_a_tenant_that_is_left_is_forgotten_here(tmp_path: Path) -> None:
    """Also if its last record has become a file: another worker goes on from that."""
    model, batch = tabular().eval(), _batch(0, (4,))
    one = Shard(df.adapt(model, "center"), FolderStore(tmp_path, "w0", segment=1))
    other = Shard(df.adapt(model, "center"), FolderStore(tmp_path, "w1"))
    one.serve([Request("predict", "a", batch)])
    one.serve([Request("predict", "b", batch)])
    while one.store.tend(9):
        pass
    assert one.leave(lambda key: key == key_of("b")) == 1
    # One that waited here all the time, and that nobody waits for any more.
    late = _problem(one, Request("predict", "a", batch, None, 2))
    assert (late.status, late.field) == (503, "tenant")
    other.serve([Request("predict", "a", batch, None, 2)])
    assert other.leave(lambda key: False) == 1
    assert one.leave(lambda key: True) == 0
    (found,) = one.serve([Request("predict", "a", batch, None, 3)])
    assert isinstance(found, Reply)
    assert found.sequence == 3


def test_a_store_that_cannot_be_tidied_up_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong with an old record, the thread goes on."""
    shard = Shard(df.adapt(tabular().eval(), "center"), FolderStore(tmp_path, segment=1))
    batcher = Batcher(shard)

    def fail(stored: Stored) -> bytes:
        raise KeyError("digest")

    monkeypatch.setattr("driftfilter.app.serve.store.to_checkpoint", fail)
    for step in range(1, 4):
        asked = batcher.submit(Request("predict", "a", _batch(step, (4,)), None, step))
        assert asked.result(10).sequence == step
        batcher.submit(Request("predict", "b", _batch(step, (4,)), None, step)).result(10)
    batcher.stop()


def test_large_batches_do_not_go_together_without_bound(tmp_path: Path) -> None:
    """What a pass takes grows with its samples: it has no more than one large batch, or some."""
    shard = Shard(df.adapt(tabular().eval(), "center"), FolderStore(tmp_path, sync=False))
    _ask(shard, Request("predict", "a", _batch(0, (4,))))
    asked, run = list[list[int]](), shard.adapter.share_pass

    def note(batches: Any) -> bool:
        asked.append([len(batch) for batch in batches])
        return run(batches)

    shard.adapter.share_pass = note  # type: ignore[method-assign]
    sizes = (100, 100, 100, 600, 8, 8)
    requests = [Request("predict", f"t{n}", _batch(n, (4,), size)) for n, size in enumerate(sizes)]
    assert all(isinstance(found, Reply) for found in shard.serve(requests))
    assert asked == [[100, 100], [100], [600], [8, 8]]


def test_what_could_not_be_tidied_up_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if nobody asks anything: with batch durability answers wait for it."""
    monkeypatch.setattr("driftfilter.app.serve.batching._FAILING", 0.01)
    shard = Shard(df.adapt(tabular().eval(), "center"), FolderStore(tmp_path, sync=False))
    asked, done = list[int](), threading.Event()

    def tend(budget: int) -> bool:
        asked.append(budget)
        if len(asked) < 3:
            raise OSError(errno.EIO, "Input/output error")
        done.set()
        return False

    monkeypatch.setattr(shard.store, "tend", tend)
    batcher = Batcher(shard)
    batcher.submit(Request("predict", "a", _batch(0, (4,)))).result(10)
    assert done.wait(10)
    assert shard.counts.failures == 2
    batcher.stop()

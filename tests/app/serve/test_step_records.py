"""What a step leaves in the log says what a checkpoint says; a log cut anywhere, or of the format
before, is gone on from, bit for bit.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import driftfilter as df
from driftfilter.adapter.checkpoint import encode
from driftfilter.app.serve.records import Notes, Recorder, Stored, to_checkpoint
from driftfilter.app.serve.shard import Reply, Request, Shard
from driftfilter.app.serve.store import FolderStore, key_of
from driftfilter.storage.record_log import read_records
from small import conv, tabular

TENANTS, STEPS = ("a", "b"), 2


def _batch(seed: int, *form: int) -> Tensor:
    return torch.randn(8, *(form or (4,)), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("preset", ["center", "driftfilter", "note", "tent"])
@pytest.mark.parametrize("images", [False, True])
def test_a_record_says_what_a_checkpoint_says(preset: str, images: bool) -> None:
    """Byte for byte; and an adapter that has read it is as the one that wrote it."""
    torch.manual_seed(0)
    model, form = (conv().eval(), (3, 8, 8)) if images else (tabular().eval(), (4,))
    adapter, other = df.adapt(model, preset), df.adapt(model, preset)
    recorder, reader = Recorder(adapter), Recorder(other)
    for step in range(3):
        answer = adapter(_batch(step, *form)).numpy()
        notes = Notes("north", step + 1, "x" * 32, answer)
        stored = recorder.encode(adapter.snapshot(), notes)
        whole = b"".join(encode(adapter, notes.to_dict()))
        assert to_checkpoint(stored) == whole
        for each in (stored, Stored(whole)):
            found = reader.load(each)
            assert found[:3] == notes[:3]
            assert found.answer is not None
            assert (found.answer == answer).all()
            mine, theirs = other.state_dict(), adapter.state_dict()
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert len(recorder.encode(adapter.snapshot(), notes).content) < len(whole)


def test_a_record_of_another_recipe_is_refused() -> None:
    model = tabular().eval()
    one, other = df.adapt(model, "tent"), df.adapt(model, "tent", lr=0.5)
    other(_batch(0))
    stored = Recorder(other).encode(other.snapshot(), Notes("a", 1, "", None))
    before = one.state_dict()
    with pytest.raises(ValueError, match="saved with another recipe: inference"):
        Recorder(one).load(stored)
    assert all(torch.equal(value, before[name]) for name, value in one.state_dict().items())


def _request(tenant: str, step: int) -> Request:
    batch = _batch(10 * step + ord(tenant))
    return Request("predict", tenant, batch, None, step + 1, f"{tenant} {step}")


def _shard(folder: Path) -> Shard:
    return Shard(df.adapt(tabular().eval(), "driftfilter"), FolderStore(folder, sync=False))


def _run(shard: Shard, begin: dict[str, int]) -> dict[Any, Any]:
    """The rest of the plan from the steps that each tenant has."""
    found: dict[Any, Any] = {}
    for step in range(STEPS):
        own = [_request(tenant, step) for tenant in TENANTS if step >= begin[tenant]]
        for request, reply in zip(own, shard.serve(own), strict=True):
            assert isinstance(reply, Reply)
            assert reply.log_probabilities is not None
            found[request.tenant, step] = reply.log_probabilities.tobytes()
    return found


def _states(shard: Shard) -> dict[str, bytes]:
    return {name: to_checkpoint(shard.store.read(key_of(name)) or Stored(b"")) for name in TENANTS}


def test_a_log_cut_anywhere_is_gone_on_from(tmp_path: Path) -> None:
    """As a kill leaves it: in the context, in a record, between two; no step twice, none left out,
    and all answers and states as of a process that lived.
    """
    shard = _shard(tmp_path / "whole")
    answers, states = _run(shard, dict.fromkeys(TENANTS, 0)), _states(shard)
    shard.store.close()
    (log,) = (tmp_path / "whole").glob("workers/0/*.log")
    data, ends = log.read_bytes(), [0, 8]
    kinds = list[tuple[str, str]]()
    for start, content in read_records(log):
        header = json.loads(content.partition(b"\n")[0])
        kinds.append((header["kind"], header.get("key", "")))
        ends.append(start + len(content))
    assert [kind for kind, _ in kinds] == ["context", *["state"] * len(TENANTS) * STEPS]
    cuts = {cut for end in ends for cut in (end - 1, end, end + 9) if cut >= 0}
    for place, cut in enumerate(sorted(cuts)):
        folder = tmp_path / str(place) / "workers" / "0"
        folder.mkdir(parents=True)
        (folder / log.name).write_bytes(data[:cut])
        again = _shard(tmp_path / str(place))
        there = kinds[: sum(end <= cut for end in ends[2:])]
        begin = {name: there.count(("state", key_of(name))) for name in TENANTS}
        for name, count in begin.items():  # the last one is answered from the store
            if count:
                (reply,) = again.serve([_request(name, count - 1)])
                assert isinstance(reply, Reply)
                assert reply.repeated
                assert reply.log_probabilities is not None
                assert reply.log_probabilities.tobytes() == answers[name, count - 1]
        found = _run(again, begin)
        assert all(answers[key] == value for key, value in found.items())
        assert _states(again) == states
        again.store.close()


def test_a_store_of_before_is_gone_on_from(tmp_path: Path) -> None:
    """Its log has whole checkpoints, in frames of the first format; it is left as it is, and goes
    once its tenants have files of their own.
    """
    shard = _shard(tmp_path / "new")
    _run(shard, dict.fromkeys(TENANTS, 0))
    frames = list[bytes]()
    for name, content in _states(shard).items():
        line = json.dumps({"key": key_of(name), "kind": "state"}).encode()
        record = line + b"\n" + content
        length = len(record).to_bytes(8, "little")
        frames.append(zlib.crc32(length + record).to_bytes(4, "little") + length + record)
    folder = tmp_path / "old" / "workers" / "0"
    folder.mkdir(parents=True)
    (folder / "00000001.log").write_bytes(b"".join(frames))
    old = _shard(tmp_path / "old")
    assert _states(old) == _states(shard)
    requests = [_request(name, STEPS) for name in TENANTS]
    for mine, theirs in zip(old.serve(requests), shard.serve(requests), strict=True):
        assert isinstance(mine, Reply)
        assert isinstance(theirs, Reply)
        assert mine.log_probabilities is not None
        assert (mine.log_probabilities == theirs.log_probabilities).all()
    assert (folder / "00000001.log").read_bytes() == b"".join(frames)
    while old.store.tend(9):
        pass
    assert [path.name for path in folder.glob("*.log")] == ["00000002.log"]
    assert _states(old) == _states(shard)

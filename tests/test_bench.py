"""The benchmark: what it measures against the adapter itself, resuming, failures, and its tables."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app import bench, models, tables, task
from driftfilter.app.bench import choices, seeds
from driftfilter.app.claims import claim_of
from driftfilter.app.corruptions import corrupt
from driftfilter.app.machine import Machine
from driftfilter.app.protocols import Stream
from driftfilter.app.streams import CLEAN, Generated, Images, Shift
from driftfilter.app.task import Bench, Choice, Network, Source, Task, run_task, settings

CPU = torch.device("cpu")
NAMES = ("gaussian_noise", "contrast", "brightness")


def _random(*shape: int, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


class _Tiny(nn.Module):
    """Four classes by pooled colours; batch norm gives the presets something to adapt."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.norm, self.head = nn.AvgPool2d(16), nn.BatchNorm1d(12), nn.Linear(12, 4)
        with torch.no_grad():
            self.head.weight.copy_(_random(4, 12, seed=1) * 4 - 2)
            self.head.bias.zero_()
        self.norm.running_mean.fill_(0.5)  # type: ignore[union-attr]
        self.norm.running_var.fill_(0.01)  # type: ignore[union-attr]

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.pool(images).flatten(1)))
        return logits


class _Broken(_Tiny):
    def forward(self, images: Tensor) -> Tensor:
        raise RuntimeError("out of order")


@pytest.fixture(scope="module")
def data() -> Generated:
    coarse = _random(70, 3, 4, 4, seed=2)
    images = nn.functional.interpolate(coarse, size=(32, 32))
    return Generated(Images(images, _Tiny().eval()(images).argmax(-1)))


@pytest.fixture
def shared(data: Generated) -> Bench:
    network = Network("tiny", _Tiny().eval(), "0" * 64)
    return Bench(data, {"tiny": network}, Stream(NAMES, batch=20), Machine(CPU))


def _task(preset: str = "tent:lr=0.05", protocol: str = "reset", seed: int = 0) -> Task:
    return Task(choices(preset)[0], choices(protocol)[0], "tiny", seed)


def _result(shared: Bench, *args: Any) -> dict[str, Any]:
    result: dict[str, Any] = run_task(shared, _task(*args))["result"]
    return result


def _accuracies(result: dict[str, Any]) -> dict[str, float]:
    return {row["corruption"]: row["accuracy"] for row in result["domains"]}


class _Log:
    """A display that remembers."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.seen: list[tuple[int, int, float]] = []

    def begin(self, title: str) -> task.Watch:
        self.begun.append(title)
        return lambda step, steps, accuracy: self.seen.append((step, steps, accuracy()))

    def end(self, line: str) -> None:
        self.ended.append(line)


# What is measured


def test_a_task_measures_what_the_adapter_predicts(shared: Bench, data: Generated) -> None:
    """By hand: an adapter for each corruption from the source, batches of 20 with a last one of 10."""
    result = _result(shared)
    logps = []
    for row, name in zip(result["domains"], NAMES, strict=True):
        adapter = df.adapt(_Tiny().eval(), "tent", lr=0.05)
        batches = [data.take(Shift(name, 5), index, CPU).float() / 255 for index in torch.arange(70).split(20)]
        logp = torch.cat([adapter(batch) for batch in batches]).double()
        logps.append(logp)
        right = logp.argmax(-1) == data.labels
        likelihood = logp[torch.arange(70), data.labels]
        errors = (logp.exp() - nn.functional.one_hot(data.labels, 4)).square().sum(-1)
        assert (row["corruption"], row["severity"], row["n"]) == (name, 5, 70)
        assert row["accuracy"] == pytest.approx(right.double().mean().item(), abs=1e-6)
        assert row["nll"] == pytest.approx(-likelihood.mean().item(), rel=1e-6)
        assert row["brier"] == pytest.approx(errors.mean().item(), rel=1e-6)
    assert result["mean"]["nll"] == pytest.approx(sum(row["nll"] for row in result["domains"]) / 3, rel=1e-12)
    pooled = -torch.cat(logps)[torch.arange(210), data.labels.repeat(3)].mean().item()
    assert result["pooled"]["nll"] == pytest.approx(pooled, rel=1e-6)
    assert (result["pooled"]["n"], result["steps"], result["timed_steps"]) == (210, 12, 7)
    assert [(visit["corruption"], visit["steps"], visit["n"]) for visit in result["visits"]] == [(n, 4, 70) for n in NAMES]
    for visit in result["visits"]:
        assert visit["accuracy"] == pytest.approx(_accuracies(result)[visit["corruption"]], abs=1e-6)


def test_a_reset_stream_is_its_corruptions_alone_and_a_continual_one_is_not(shared: Bench) -> None:
    last = replace(shared, stream=replace(shared.stream, corruptions=NAMES[-1:]))
    alone = _result(last)["domains"][0]
    assert _result(shared)["domains"][-1] == alone
    assert _result(shared, "tent:lr=0.05", "continual")["domains"][-1]["nll"] != pytest.approx(alone["nll"], rel=1e-3)


def test_visits_of_a_second_round_are_told_apart(shared: Bench) -> None:
    result = _result(shared, "bn", "continual:rounds=2")
    assert [visit["corruption"] for visit in result["visits"]] == [*NAMES, *NAMES]
    assert [row["n"] for row in result["domains"]] == [140] * 3
    first, second = result["visits"][:3], result["visits"][3:]
    assert [visit.pop("round") for visit in (*first, *second)] == [0, 0, 0, 1, 1, 1]
    assert first == second  # bn learns nothing


def test_rounds_of_a_single_corruption_are_told_apart(shared: Bench) -> None:
    alone = replace(shared, stream=replace(shared.stream, corruptions=NAMES[:1]))
    visits = _result(alone, "bn", "continual:rounds=3")["visits"]
    assert [(visit["round"], visit["steps"], visit["n"]) for visit in visits] == [(number, 4, 70) for number in range(3)]
    visits = _result(alone, "bn", "recurring:rounds=2")["visits"]
    assert [(visit["round"], visit["steps"], visit["n"]) for visit in visits] == [(0, 2, 35), (1, 2, 35)]


def test_bf16_calls_the_adapter_under_autocast(shared: Bench, data: Generated) -> None:
    exact, rough = _result(shared), _result(replace(shared, machine=Machine(CPU, "bf16")))
    adapter = df.adapt(_Tiny().eval(), "tent", lr=0.05)
    for row, name in zip(rough["domains"], NAMES, strict=True):
        adapter.reset()
        logps = []
        for index in torch.arange(70).split(20):
            with torch.autocast("cpu", torch.bfloat16):
                logps.append(adapter(data.take(Shift(name, 5), index, CPU).float() / 255).double())
        assert row["nll"] == pytest.approx(-torch.cat(logps)[torch.arange(70), data.labels].mean().item(), rel=1e-6)
    assert rough["mean"]["nll"] == pytest.approx(exact["mean"]["nll"], rel=0.05)
    assert rough["mean"]["nll"] != pytest.approx(exact["mean"]["nll"], rel=1e-5)


def test_what_is_predicted_beside_the_steps_is_as_precise(shared: Bench) -> None:
    """Probe and prediction before the update, of a network that tells what it was called under."""
    seen: list[bool] = []

    class Spy(_Tiny):
        def forward(self, images: Tensor) -> Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().forward(images)

    networks = {"tiny": Network("tiny", Spy().eval(), "0" * 64)}
    spied = replace(shared, networks=networks, machine=Machine(CPU, "bf16"), before=True, probe_every=3)
    result = _result(spied, "conjugate")
    assert "before each update" in result["before"]["how"]
    assert len(result["probe"]) == 5
    assert seen[0] is False  # the question how many classes there are
    assert len(seen) > 12 + 12 + 5
    assert all(seen[1:])


def _source(labels: Tensor | None) -> Source:
    images = (255 * _random(50, 3, 32, 32, seed=5)).byte()
    return Source(images, labels, "train.npz", "3" * 64)


def test_source_samples_reach_the_presets_that_want_them(shared: Bench, data: Generated) -> None:
    source = _source(torch.arange(50) % 4)
    given = replace(shared, source=source)
    assert source.labels is not None
    document = run_task(given, _task("eata:lr=0.5,alpha=100.0"))
    with_data, without = document["result"], _result(shared, "eata:lr=0.5,alpha=100.0")
    pair = (source.images.float() / 255, source.labels)
    adapter = df.adapt(_Tiny().eval(), "eata", lr=0.5, alpha=100.0, data=pair)
    logp = torch.cat([adapter(data.take(Shift(NAMES[0], 5), index, CPU).float() / 255) for index in torch.arange(70).split(20)])
    expected = -logp.double()[torch.arange(70), data.labels].mean().item()
    assert with_data["domains"][0]["nll"] == pytest.approx(expected, rel=1e-6)
    assert with_data["domains"][0]["nll"] != pytest.approx(without["domains"][0]["nll"], rel=1e-4)
    assert with_data["warnings"] == []
    described = {"path": "train.npz", "images": 50, "labeled": True, "sha256": "3" * 64}
    assert document["settings"]["source_data"] == described
    assert settings(shared, _task("eata"))["source_data"] is None
    assert settings(given, _task("tent")) == settings(shared, _task("tent"))  # which has no use for them
    assert replace(given, source=_source(None)).source_data.labels is None  # type: ignore[union-attr]
    (table,) = tables.tables([document], "")
    assert "source data of eata:lr=0.5,alpha=100.0: labeled, 50 images of train.npz, sha256 333333333333" in table.notes


def test_labels_that_the_model_does_not_have_are_refused(shared: Bench, data: Generated) -> None:
    more = replace(shared, data=Generated(data.clean._replace(labels=data.labels + 1)))
    message = "labels of data generated must be below 4, the classes of model 'tiny', got 'up to 4'"
    with pytest.raises(ValueError, match=message):
        run_task(more, _task())
    given = replace(shared, source=_source(torch.full((50,), 9)))
    with pytest.raises(ValueError, match=r"labels of source train\.npz must be below 4"):
        run_task(given, _task("eata"))
    run_task(given, _task("bn"))  # has no use for them


def test_tasks_share_what_was_made(shared: Bench, data: Generated, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(images: Tensor, name: str, *rest: Any) -> Tensor:
        made.append(name)
        return corrupt(images, name, *rest)

    monkeypatch.setattr("driftfilter.app.streams.corrupt", counted)
    fresh = replace(shared, data=Generated(data.clean))
    for preset in ("bn", "tent", "source"):
        run_task(fresh, _task(preset))
    assert made == list(NAMES)


def test_mixed_samples_come_from_their_own_corruption(shared: Bench) -> None:
    """The source model predicts each sample by itself, so that the order cannot matter."""
    mixed, apart = _result(shared, "source", "mixed"), _result(shared, "source", "reset")
    for ours, other in zip(mixed["domains"], apart["domains"], strict=True):
        assert ours.pop("corruption") == other.pop("corruption")
        assert ours == pytest.approx(other, rel=1e-5)
    assert [visit["corruption"] for visit in mixed["visits"]] == ["mixed"]


def test_accuracy_before_the_update(shared: Bench, data: Generated) -> None:
    shared = replace(shared, before=True)
    result = _result(shared, "conjugate:lr=1.0", "continual")
    adapter, right = df.adapt(_Tiny().eval(), "conjugate", lr=1.0), []
    for name in NAMES:
        for index in torch.arange(70).split(20):
            images = data.take(Shift(name, 5), index, CPU).float() / 255
            right.append(adapter.predict(images).labels == data.labels[index])
            adapter(images)
    assert result["before"]["accuracy"] == pytest.approx(torch.cat(right).double().mean().item(), abs=1e-12)
    assert result["before"]["accuracy"] != pytest.approx(result["pooled"]["accuracy"], abs=1e-3)
    assert result["domains"][0]["before"] == pytest.approx(torch.cat(right[:4]).double().mean().item(), abs=1e-12)
    free = _result(shared, "tent")
    assert free["before"]["accuracy"] == pytest.approx(free["pooled"]["accuracy"], abs=1e-6)
    assert "prior" in free["before"]["how"]


def test_the_probe_changes_nothing_and_sees_the_source_at_first(shared: Bench, data: Generated) -> None:
    plain, probed = _result(shared), _result(replace(shared, probe_every=5))
    assert probed["domains"] == plain["domains"]
    assert [look["step"] for look in probed["probe"]] == [0, 5, 10]
    clean = data.take(CLEAN, torch.arange(70), CPU).float() / 255
    right = df.adapt(_Tiny().eval(), "tent").predict(clean).labels == data.labels
    assert probed["probe"][0]["accuracy"] == right.double().mean().item()
    assert plain["probe"] == []


def test_the_watch_hears_of_every_step_and_the_accuracy_so_far(shared: Bench) -> None:
    log = _Log()
    result = run_task(shared, _task(), log.begin(""))["result"]
    assert [seen[:2] for seen in log.seen] == [(step, 12) for step in range(1, 13)]
    assert log.seen[-1][2] == pytest.approx(result["pooled"]["accuracy"], abs=1e-6)


def test_settings_say_all_that_a_report_needs(shared: Bench) -> None:
    made = json.loads(json.dumps(settings(shared, _task("conjugate", "continual:rounds=2", 3))))
    assert (made["preset"], made["predict_from"], made["statistics"]) == ("conjugate", "posterior", "batch")
    assert made["protocol"] == {"name": "continual:rounds=2", "rounds": 2}
    assert made["stream"]["seed"] == 3
    assert made["data"]["frost"] == "procedural"
    assert made["versions"]["driftfilter"] == df.__version__


# The run folder


def _run(shared: Bench, folder: Path, *tasks: Task) -> tuple[list[dict[str, Any]], _Log]:
    log = _Log()
    documents = bench.run(shared, tasks, folder, log)
    return [document for document in documents if document is not None], log


def test_what_is_done_is_not_run_again(shared: Bench, tmp_path: Path) -> None:
    tasks = (_task("source"), _task("tent"))
    first, log = _run(shared, tmp_path, *tasks)
    assert len(log.begun) == 2
    again, log = _run(shared, tmp_path, *tasks)
    assert log.begun == []
    assert again == first
    assert bench.done(shared, (*tasks, _task("bn")), tmp_path) == [True, True, False]
    assert all(path.suffix == ".json" for path in tmp_path.iterdir())  # nothing half-written is left


def test_what_another_process_is_at_is_left_to_it(shared: Bench, tmp_path: Path) -> None:
    tasks = (_task("source"), _task("bn"))
    claim = claim_of(bench.path_of(tmp_path, settings(shared, tasks[0])))
    claim.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getppid()}))
    log = _Log()
    documents = bench.run(shared, tasks, tmp_path, log)
    assert documents[0] is None
    assert documents[1] is not None
    assert log.begun == [f"2 of 2: {tasks[1]}"]
    assert claim.exists()
    assert bench.finished(shared, tasks, tmp_path) == documents[1:]


def test_what_others_left_meanwhile_is_done_in_the_end(shared: Bench, tmp_path: Path) -> None:
    """The claim on the first task goes while the second one runs."""
    tasks = (_task("source"), _task("bn"))
    claim = claim_of(bench.path_of(tmp_path, settings(shared, tasks[0])))
    claim.write_text(json.dumps({"host": "another", "pid": 1}))

    class Log(_Log):
        def end(self, line: str) -> None:
            super().end(line)
            claim.unlink(missing_ok=True)

    log = Log()
    documents = bench.run(shared, tasks, tmp_path, log)
    assert None not in documents
    assert log.begun == [f"2 of 2: {tasks[1]}", f"1 of 2: {tasks[0]}"]
    assert all(path.suffix == ".json" for path in tmp_path.iterdir())


def test_all_that_is_finished_in_the_folder_is_shown(shared: Bench, tmp_path: Path) -> None:
    """In tables by condition; what is no document of this version is passed over."""
    small = replace(shared, stream=replace(shared.stream, batch=10))
    (first, other), _ = _run(shared, tmp_path, _task("tent"), _task("tent", seed=1))
    (apart,), _ = _run(small, tmp_path, _task("bn"))
    (tmp_path / "old.json").write_text(json.dumps({"settings": {"preset": "bn"}, "result": {}}))
    (tmp_path / "none.json").write_text("{")
    found = bench.finished(shared, (_task("tent", seed=1), _task("sar")), tmp_path)
    assert found[0] == other
    assert sorted(map(json.dumps, found)) == sorted(map(json.dumps, (first, other, apart)))
    own = next(table for table in tables.tables(found, "") if table.rows[0][0] == "tent")
    assert len(own.rows) == 1
    assert "seed 0, 1: mean ± standard deviation over them" in own.notes
    more, _ = _run(shared, tmp_path, _task("bn"))
    assert "seed tent 0, 1; bn 0: mean ± standard deviation over them" in tables.tables([first, other, *more], "")[0].notes
    assert len(tables.tables(found, "")) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"settings": {}, "result": {}}'], ids=["empty", "cut", "other", "wrong"])
def test_a_file_that_does_not_hold_the_task_is_done_again(text: str, shared: Bench, tmp_path: Path) -> None:
    first, _ = _run(shared, tmp_path, _task("source"))
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    again, log = _run(shared, tmp_path, _task("source"))
    assert len(log.begun) == 1
    assert json.loads(path.read_text()) == again[0]
    assert again[0]["result"]["domains"] == first[0]["result"]["domains"]


CHANGES: dict[str, Callable[[Bench], tuple[Bench, Task]]] = {
    "option": lambda shared: (shared, _task("tent:lr=0.1")),
    "protocol": lambda shared: (shared, _task("tent", "continual")),
    "seed": lambda shared: (shared, _task("tent", seed=1)),
    "precision": lambda shared: (replace(shared, machine=Machine(CPU, "bf16")), _task("tent")),
    "window": lambda shared: (replace(shared, window=30), _task("tent")),
    "batch": lambda shared: (replace(shared, stream=replace(shared.stream, batch=10)), _task("tent")),
    "weights": lambda shared: (replace(shared, networks={"tiny": Network("tiny", _Tiny().eval(), "1" * 64)}), _task("tent")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_a_task_of_its_own(change: str, shared: Bench, tmp_path: Path) -> None:
    _run(shared, tmp_path, _task("tent"))
    _, log = _run(*CHANGES[change](shared)[:1], tmp_path, CHANGES[change](shared)[1])
    assert len(log.begun) == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_a_task_that_fails_does_not_stop_the_others(shared: Bench, tmp_path: Path) -> None:
    networks = {**shared.networks, "broken": Network("broken", _Broken().eval(), "2" * 64)}
    broken = replace(_task("tent"), model="broken")
    shared = replace(shared, networks=networks)
    (failed, good), log = _run(shared, tmp_path, broken, _task("bn"))
    assert "result" in good
    assert failed["error"] == "RuntimeError: out of order"
    assert "failed" in log.ended[0]
    (trace,) = tmp_path.glob("*.failed.txt")
    assert "Traceback" in trace.read_text()
    table, *_ = tables.write([failed, good], tmp_path, "command")
    assert table.failures == ["tent, seed 0: RuntimeError: out of order"]
    assert set(table.rows[0][3:]) == {"failed"}
    assert failed["error"] in tables.plain(table)
    assert bench.done(shared, (broken,), tmp_path) == [False]
    repaired = {**networks, "broken": replace(networks["broken"], module=_Tiny().eval())}
    again, _ = _run(replace(shared, networks=repaired), tmp_path, broken)
    assert "result" in again[0]
    assert not trace.exists()


def test_an_interrupted_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.json"
    bench.write_whole(path, "old")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bench.write_whole(path, "new")
    assert [each.name for each in tmp_path.iterdir()] == ["file.json"]
    assert path.read_text() == "old"


# Tables


def test_the_table_shows_the_numbers_of_the_files(shared: Bench, tmp_path: Path) -> None:
    documents, _ = _run(shared, tmp_path, _task("source"), _task("tent"))
    (table,) = tables.write(documents, tmp_path, "driftfilter bench --quick")
    assert table.head == ["preset", "from", "statistics", "gauss", "contr", "bright", "mean", "ECE", "NLL", "Brier", "ms"]
    for row, document in zip(table.rows, documents, strict=True):
        result, mean = document["result"], document["result"]["mean"]
        numbers = [*_accuracies(result).values(), mean["accuracy"], mean["ece"], mean["nll"], mean["brier"]]
        assert row[3:-1] == [f"{number:.3f}" for number in numbers]
        assert row[-1] == f"{result['ms_per_step']:.1f}"
    assert table.rows[0][:3] == ["source", "prior", "source"]
    page = (tmp_path / "table.md").read_text()
    assert "| " + " | ".join(table.rows[1]) + " |" in page
    for said in (
        "inside the model",
        "batch 20",
        "70 images",
        "frost procedural",
        "seed 0",
        "command: driftfilter bench --quick",
    ):
        assert said in page
    lines = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    assert float(lines[1]["NLL"]) == documents[1]["result"]["mean"]["nll"]
    assert float(lines[0]["contrast"]) == _accuracies(documents[0]["result"])["contrast"]
    assert [line["preset"] for line in lines] == ["source", "tent"]


def test_what_else_was_asked_for_has_its_column(shared: Bench, tmp_path: Path) -> None:
    documents, _ = _run(replace(shared, before=True, probe_every=4), tmp_path, _task("conjugate"), _task("eata"))
    (table,) = tables.tables(documents, "")
    for row, document in zip(table.rows, documents, strict=True):
        result = document["result"]
        cells = dict(zip(table.head, row, strict=True))
        assert cells["before"] == f"{result['before']['accuracy']:.3f}"
        assert cells["clean"] == f"{result['probe'][-1]['accuracy']:.3f}"
    assert documents[1]["result"]["warnings"]  # no source data for its anchor
    assert f"warning of eata: {documents[1]['result']['warnings'][0]}" in table.notes


def test_on_a_terminal_tables_have_rules_or_stay_plain(
    shared: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    documents, _ = _run(shared, tmp_path, _task("source"))
    (table,) = tables.tables(documents, "")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for width, ruled in ((200, True), (40, False)):
        monkeypatch.setenv("COLUMNS", str(width))
        tables.show(table)
        shown = capsys.readouterr().out
        assert ("━" in shown or "─" in shown) == ruled
        assert all(cell in shown for cell in table.rows[0])


def test_the_bar_shows_the_accuracy_so_far(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "150")
    with tables.progress() as display:
        watch = display.begin("1 of 1: tent")
        assert watch is not None
        watch(3, 12, lambda: 0.625)
        watch(4, 12, lambda: pytest.fail("asked again at once"))
        display.end("1 of 1: tent: done")
    shown = capsys.readouterr().err
    assert "1 of 1: tent: done" in shown
    assert "accuracy 0.625" in shown


def test_rounds_have_their_columns(shared: Bench, tmp_path: Path) -> None:
    documents, _ = _run(shared, tmp_path, _task("tent:lr=1.0", "continual:rounds=3"), _task("tent", "continual:rounds=1"))
    long, short, _ = tables.tables(documents, "")
    visits = [visit["accuracy"] for visit in documents[0]["result"]["visits"]]
    cells = dict(zip(long.head, long.rows[0], strict=True))
    assert cells["first round"] == f"{sum(visits[:3]) / 3:.3f}"
    assert cells["last round"] == f"{sum(visits[6:]) / 3:.3f}"
    assert cells["first round"] != cells["last round"]
    assert not any("round" in name for name in short.head)


def test_the_summary_is_across_protocols(shared: Bench, tmp_path: Path) -> None:
    tasks = [_task(preset, protocol) for protocol in ("reset", "mixed") for preset in ("source", "tent")]
    documents, _ = _run(shared, tmp_path, *tasks, _task("bn", "mixed"))
    *_, summary = tables.write(documents, tmp_path, "")
    assert summary.head[3:] == ["reset", "mixed"]
    assert [row[:3] for row in summary.rows] == [[name, "tiny", ""] for name in ("source", "tent", "bn")]
    means = [document["result"]["mean"] for document in documents]
    shown = [f"{mean['accuracy']:.3f} / {mean['ece']:.3f}" for mean in means]
    assert [row[3:] for row in summary.rows] == [[shown[0], shown[2]], [shown[1], shown[3]], ["", shown[4]]]
    assert "| " + " | ".join(summary.rows[1]) + " |" in (tmp_path / "table.md").read_text()
    lines = list(csv.DictReader(io.StringIO((tmp_path / "summary.csv").read_text())))
    assert [(line["preset"], line["protocol"]) for line in lines] == [
        (document["settings"]["preset"], document["settings"]["protocol"]["name"]) for document in documents
    ]
    assert [float(line["ece"]) for line in lines] == [mean["ece"] for mean in means]


def test_seeds_are_averaged(shared: Bench, tmp_path: Path) -> None:
    shuffled = replace(shared, stream=replace(shared.stream, shuffled=True))
    documents, _ = _run(shuffled, tmp_path, *(_task("tent:lr=0.5", "continual", seed) for seed in range(3)))
    values = torch.tensor([document["result"]["mean"]["nll"] for document in documents], dtype=torch.float64)
    (table,) = tables.tables(documents, "")
    assert table.rows[0][table.head.index("NLL")] == f"{values.mean():.3f} ± {values.std():.3f}"
    assert values.std() > 1e-4
    assert len(table.rows) == 1


def test_gradual_severities_are_one_column(shared: Bench, tmp_path: Path) -> None:
    documents, _ = _run(shared, tmp_path, _task("source", "gradual"))
    result = documents[0]["result"]
    (table,) = tables.tables(documents, "")
    assert len(result["domains"]) == 15
    rows = [row for row in result["domains"] if row["corruption"] == "contrast"]
    right = sum(row["accuracy"] * row["n"] for row in rows)
    assert table.rows[0][4] == f"{right / 70:.3f}"


# Options


def test_choices() -> None:
    assert choices("a, b:x=1,y=two,c") == (Choice("a"), Choice("b", (("x", 1), ("y", "two"))), Choice("c"))
    assert [str(choice) for choice in choices("b:x=1;y=0.5;c")] == ["b:x=1,y=0.5", "c"]
    with pytest.raises(ValueError, match="after a name"):
        choices("x=1")
    assert choices("a,b:x=1,a,b:x=1,b") == (Choice("a"), Choice("b", (("x", 1),)), Choice("b"))


def test_weights_that_would_share_a_name_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / name / "weights.safetensors" for name in ("one", "two")]
    for path in paths:
        path.parent.mkdir()
        save_file(models.load("resnet20").state_dict(), path)
    with pytest.raises(ValueError, match="models must be files of distinct names"):
        bench.prepare(bench.Options(models=",".join(f"resnet20={path}" for path in paths)))
    made, tasks = bench.prepare(bench.Options(models=f"resnet20={paths[0]}", presets="bn"))
    assert [task.model for task in tasks] == ["resnet20=weights"]
    assert made.networks["resnet20=weights"].weights == hashlib.sha256(paths[0].read_bytes()).hexdigest()


def test_source_samples_are_read_with_labels_or_without(tmp_path: Path) -> None:
    path = tmp_path / "train.npz"
    images = (np.arange(2 * 32 * 32 * 3) % 251).astype(np.uint8).reshape(2, 32, 32, 3)
    np.savez(path, images=images, labels=np.array([3, 1]))
    made, _ = bench.prepare(bench.Options(source=str(path), presets="bn"))
    assert made.source is not None
    assert made.source.labels is not None
    assert made.source.labels.tolist() == [3, 1]
    assert torch.equal(made.source.images[1, 2], torch.from_numpy(images[1, :, :, 2]))
    np.savez(path, images=images)
    assert bench.open_source(path).labels is None
    assert bench.open_source(path).sha256 != made.source.sha256
    np.savez(path, labels=np.array([3, 1]))
    with pytest.raises(ValueError, match=r"an \.npz with 'images'"):
        bench.open_source(path)


def test_seeds() -> None:
    assert seeds("3") == (0, 1, 2)
    assert seeds("4,7") == (4, 7)
    assert seeds("4,") == (4,)
    for wrong in ("0", "", "x", "1,-2"):
        with pytest.raises(ValueError, match="seeds must be"):
            seeds(wrong)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("presets", "tnt", "did you mean 'tent'"),
        ("presets", "tent:rate=1", "option of preset 'tent'"),
        ("protocols", "continul", "did you mean 'continual'"),
        ("protocols", "continual:round=2", "did you mean 'rounds'"),
        ("models", "resnet21", "did you mean 'resnet20'"),
        ("models", "resnet20=nowhere.safetensors", "weights of model 'resnet20' must be a file"),
        ("models", "wrn28_10", "give its weights file"),
        ("corruptions", "foggy", "did you mean 'fog'"),
        ("severity", 6, "severity must be"),
        ("images", 3000, "images must be at most 2000"),
        ("device", "tpu", "device must be"),
        ("precision", "fp8", "precision must be"),
        ("source", "nowhere.npz", "nowhere.npz"),
        ("seeds", "none", "seeds must be"),
        ("data", "nowhere", "nowhere"),
        ("clean", "nowhere", "nowhere"),
    ],
    ids=lambda value: re.sub(r"\W+", "-", str(value)),
)
def test_wrong_options_are_refused_before_anything_runs(option: str, value: Any, message: str) -> None:
    with pytest.raises((ValueError, OSError), match=re.escape(message)):
        bench.prepare(bench.Options(**{option: value}))


def test_prepared_tasks_are_the_product_in_order() -> None:
    options = bench.Options(presets="bn,tent:lr=0.1", protocols="reset,continual,recurring:rounds=5", seeds="2", rounds=4)
    made, tasks = bench.prepare(replace(options, models="resnet20,resnet20_gn", corruptions="extra"))
    assert len(tasks) == 2 * 3 * 2 * 2
    assert str(tasks[0]) == "bn · reset · resnet20 · seed 0"
    assert str(tasks[-1]) == "tent:lr=0.1 · recurring:rounds=5 · resnet20_gn · seed 1"
    assert "bn · continual:rounds=4 · resnet20 · seed 1" in map(str, tasks)
    assert len({bench.path_of(Path(), settings(made, each)) for each in tasks}) == len(tasks)
    assert made.stream.corruptions == ("speckle_noise", "gaussian_blur", "saturate", "spatter")

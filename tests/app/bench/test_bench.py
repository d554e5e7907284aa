"""The benchmark: resuming, sharing a folder, failures, and its options."""

import hashlib
import json
import os
import re
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from driftfilter.app import models
from driftfilter.app.bench import bench, tables
from driftfilter.app.bench.locks import claim
from driftfilter.app.bench.options import BenchOptions
from driftfilter.app.bench.prepare import open_source, parse_choices, parse_seeds, prepare
from driftfilter.app.bench.task import Bench, Choice, Task, settings
from driftfilter.app.machine import Machine
from driftfilter.app.networks.load_model import NamedNetwork
from driftfilter.storage.atomic import write_atomic
from tiny import CPU, Broken, Log, Tiny, run_all, task_of

# The run folder


def test_what_is_done_is_not_run_again(shared: Bench, tmp_path: Path) -> None:
    tasks = (task_of("source"), task_of("tent"))
    first, log = run_all(shared, tmp_path, *tasks)
    assert len(log.begun) == 2
    again, log = run_all(shared, tmp_path, *tasks)
    assert log.begun == []
    assert again == first
    assert bench.are_done(shared, (*tasks, task_of("bn")), tmp_path) == [True, True, False]
    assert all(
        path.suffix == ".json" for path in tmp_path.iterdir()
    )  # nothing half-written is left


def test_what_another_process_is_at_is_left_to_it(shared: Bench, tmp_path: Path) -> None:
    tasks = (task_of("source"), task_of("bn"))
    path, log = bench.path_of(tmp_path, settings(shared, tasks[0])), Log()
    with claim(path):
        documents = bench.run(shared, tasks, tmp_path, log)
        assert [document is None for document in documents] == [True, False]
        assert log.begun == [f"2 of 2: {tasks[1]}"]
        assert bench.read_finished(shared, tasks, tmp_path) == documents[1:]
        (line,) = bench.describe_undone(shared, tasks, documents, tmp_path)
        for part in (
            str(tasks[0]),
            f"process {os.getpid()} on host {socket.gethostname()}",
            "it is free as soon as that one has ended",
        ):
            assert part in line
    (line,) = bench.describe_undone(shared, tasks, documents, tmp_path)
    assert "left by another process meanwhile; give the command again" in line


def test_what_others_left_meanwhile_is_done_in_the_end(shared: Bench, tmp_path: Path) -> None:
    """The claim on the first task goes while the second one runs."""
    tasks = (task_of("source"), task_of("bn"))
    other = ExitStack()
    other.enter_context(claim(bench.path_of(tmp_path, settings(shared, tasks[0]))))

    class Late(Log):
        def end(self, line: str) -> None:
            super().end(line)
            other.close()

    log = Late()
    assert None not in bench.run(shared, tasks, tmp_path, log)
    assert log.begun == [f"2 of 2: {tasks[1]}", f"1 of 2: {tasks[0]}"]
    assert all(path.suffix == ".json" for path in tmp_path.iterdir())


def test_all_that_is_finished_in_the_folder_is_shown(shared: Bench, tmp_path: Path) -> None:
    """In tables by condition; what is no document of this version is passed over."""
    small = replace(shared, stream=replace(shared.stream, batch=10))
    (first, other), _ = run_all(shared, tmp_path, task_of("tent"), task_of("tent", seed=1))
    (apart,), _ = run_all(small, tmp_path, task_of("bn"))
    (tmp_path / "old.json").write_text(json.dumps({"settings": {"preset": "bn"}, "result": {}}))
    (tmp_path / "none.json").write_text("{")
    found = bench.read_finished(shared, (task_of("tent", seed=1), task_of("sar")), tmp_path)
    assert found[0] == other
    assert sorted(map(json.dumps, found)) == sorted(map(json.dumps, (first, other, apart)))
    own = next(table for table in tables.tables(found) if table.rows[0][0] == "tent")
    assert len(own.rows) == 1
    assert (
        "seed 0, 1 (of corruptions, order, draws): mean ± standard deviation over them" in own.notes
    )
    more, _ = run_all(shared, tmp_path, task_of("bn"))
    (both,) = tables.tables([first, other, *more])
    assert (
        "seed tent 0, 1; bn 0 (of corruptions, order, draws): mean ± standard deviation over them"
        in both.notes
    )
    assert len(tables.tables(found)) == 2


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"settings": {}, "result": {}}'],
    ids=["empty", "cut", "other", "wrong"],
)
def test_a_file_that_does_not_hold_the_task_is_done_again(
    text: str, shared: Bench, tmp_path: Path
) -> None:
    first, _ = run_all(shared, tmp_path, task_of("source"))
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    again, log = run_all(shared, tmp_path, task_of("source"))
    assert len(log.begun) == 1
    assert json.loads(path.read_text()) == again[0]
    assert again[0]["result"]["domains"] == first[0]["result"]["domains"]


CHANGES: dict[str, Callable[[Bench], tuple[Bench, Task]]] = {
    "option": lambda shared: (shared, task_of("tent:lr=0.1")),
    "protocol": lambda shared: (shared, task_of("tent", "continual")),
    "seed": lambda shared: (shared, task_of("tent", seed=1)),
    "precision": lambda shared: (replace(shared, machine=Machine(CPU, "bf16")), task_of("tent")),
    "window": lambda shared: (replace(shared, window=30), task_of("tent")),
    "batch": lambda shared: (
        replace(shared, stream=replace(shared.stream, batch=10)),
        task_of("tent"),
    ),
    "weights": lambda shared: (
        replace(shared, networks={"tiny": NamedNetwork("tiny", Tiny().eval(), "1" * 64)}),
        task_of("tent"),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_a_task_of_its_own(change: str, shared: Bench, tmp_path: Path) -> None:
    run_all(shared, tmp_path, task_of("tent"))
    _, log = run_all(*CHANGES[change](shared)[:1], tmp_path, CHANGES[change](shared)[1])
    assert len(log.begun) == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_a_task_that_fails_does_not_stop_the_others(shared: Bench, tmp_path: Path) -> None:
    networks = {**shared.networks, "broken": NamedNetwork("broken", Broken().eval(), "2" * 64)}
    broken = task_of("tent")._replace(model="broken")
    shared = replace(shared, networks=networks)
    (failed, good), log = run_all(shared, tmp_path, broken, task_of("bn"))
    assert "result" in good
    error = (
        "ValueError: model 'broken' must take the samples of the data (torch.float32 "
        "[2, 3, 32, 32]), got RuntimeError: out of order"
    )
    assert failed["error"] == error
    assert "failed" in log.ended[0]
    (trace,) = tmp_path.glob("*.failed.txt")
    assert "Traceback" in trace.read_text()
    table, *_ = tables.write([failed, good], tmp_path)
    assert table.failures == [f"tent, seed 0: {error}"]
    assert set(table.rows[0][3:]) == {"failed"}
    assert failed["error"] in tables.plain(table)
    assert bench.are_done(shared, (broken,), tmp_path) == [False]
    repaired = {**networks, "broken": networks["broken"]._replace(module=Tiny().eval())}
    again, _ = run_all(replace(shared, networks=repaired), tmp_path, broken)
    assert "result" in again[0]
    assert not trace.exists()


def test_an_interrupted_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.json"
    write_atomic(path, "old")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, "new")
    assert [each.name for each in tmp_path.iterdir()] == ["file.json"]
    assert path.read_text() == "old"


# Options


def test_choices() -> None:
    assert parse_choices("a, b:x=1,y=two,c") == (
        Choice("a"),
        Choice("b", (("x", 1), ("y", "two"))),
        Choice("c"),
    )
    assert [str(choice) for choice in parse_choices("b:x=1;y=0.5;c")] == ["b:x=1,y=0.5", "c"]
    with pytest.raises(ValueError, match="after a name"):
        parse_choices("x=1")
    for wrong in ("tent:lr", "tent:", "tent:lr=", "tent:=1", "tent:lr=1,steps="):
        with pytest.raises(
            ValueError, match="option must be option=value, as in tent:option=value"
        ):
            parse_choices(wrong)
    assert parse_choices("a,b:x=1,a,b:x=1,b") == (
        Choice("a"),
        Choice("b", (("x", 1),)),
        Choice("b"),
    )


def test_weights_that_would_share_a_name_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / name / "weights.safetensors" for name in ("one", "two")]
    for path in paths:
        path.parent.mkdir()
        save_file(models.load("resnet20").state_dict(), path)
    with pytest.raises(ValueError, match="models must be files of distinct names"):
        prepare(BenchOptions(models=",".join(f"resnet20={path}" for path in paths)))
    made, tasks = prepare(BenchOptions(models=f"resnet20={paths[0]}", presets="bn"))
    assert [task.model for task in tasks] == ["resnet20=weights"]
    assert (
        made.networks["resnet20=weights"].weights
        == hashlib.sha256(paths[0].read_bytes()).hexdigest()
    )


def test_source_samples_are_read_with_labels_or_without(tmp_path: Path) -> None:
    path = tmp_path / "train.npz"
    images = (np.arange(2 * 32 * 32 * 3) % 251).astype(np.uint8).reshape(2, 32, 32, 3)
    np.savez(path, images=images, labels=np.array([3, 1]))
    made, _ = prepare(BenchOptions(source=str(path), presets="bn"))
    assert made.source is not None
    assert made.source.labels is not None
    assert made.source.labels.tolist() == [3, 1]
    assert torch.equal(made.source.images[1, 2], torch.from_numpy(images[1, :, :, 2]))
    np.savez(path, images=images)
    assert open_source(path).labels is None
    assert open_source(path).sha256 != made.source.sha256
    np.savez(path, labels=np.array([3, 1]))
    with pytest.raises(ValueError, match=r"an \.npz with 'images'"):
        open_source(path)


def test_seeds() -> None:
    assert parse_seeds("3") == (0, 1, 2)
    assert parse_seeds("4,7") == (4, 7)
    assert parse_seeds("4,") == (4,)
    for wrong in ("0", "", "x", "1,-2", "4,4", "1,2,01"):
        with pytest.raises(ValueError, match="seeds must be"):
            parse_seeds(wrong)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("presets", "tnt", "did you mean 'tent'"),
        ("presets", "tent:rate=1", "option of preset 'tent'"),
        ("protocols", "continul", "did you mean 'continual'"),
        ("protocols", "continual:round=2", "did you mean 'rounds'"),
        ("models", "resnet21", "did you mean 'resnet20'"),
        (
            "models",
            "resnet20=nowhere.safetensors",
            "weights must be a .safetensors, .pt",
        ),
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
def test_wrong_options_are_refused_before_anything_runs(
    option: str, value: Any, message: str
) -> None:
    with pytest.raises((ValueError, OSError), match=re.escape(message)):
        prepare(BenchOptions(**{option: value}))


def test_only_the_files_asked_for_are_needed(tmp_path: Path) -> None:
    np.save(tmp_path / "labels.npy", np.zeros(10, int))
    np.save(tmp_path / "fog.npy", np.full((10, 32, 32, 3), 7, np.uint8))
    (tmp_path / "snow.npy").write_bytes(b"")
    (tmp_path / "spatter.npy").write_bytes(b"")
    made, _ = prepare(BenchOptions(data=str(tmp_path), corruptions="fog", presets="bn"))
    assert made.data.shifts == made.stream.corruptions == ("fog",)
    refused = {
        "fog,snow": "snow.npy must be",
        "all": "gaussian_noise.npy must be",
        "fogg": "did you mean 'fog'",
    }
    for names, message in refused.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            prepare(BenchOptions(data=str(tmp_path), corruptions=names, presets="bn"))


def test_reports_name_the_clean_images_that_were_given(tmp_path: Path) -> None:
    path = tmp_path / "clean.npz"
    np.savez(path, images=np.full((4, 32, 32, 3), 7, np.uint8), labels=np.arange(4))
    for options in (BenchOptions(clean=str(path)), BenchOptions(data=str(path))):
        made, tasks = prepare(options)
        assert settings(made, tasks[0])["data"]["path"] == str(path)
    assert prepare(BenchOptions(presets="bn"))[0].description["path"] == "generated"


def test_prepared_tasks_are_the_product_in_order() -> None:
    options = BenchOptions(
        presets="bn,tent:lr=0.1",
        protocols="reset,continual,recurring:rounds=5",
        seeds="2",
        rounds=4,
    )
    made, tasks = prepare(replace(options, models="resnet20,resnet20_gn", corruptions="extra"))
    assert len(tasks) == 2 * 3 * 2 * 2
    assert str(tasks[0]) == "bn · reset · resnet20 · seed 0"
    assert str(tasks[-1]) == "tent:lr=0.1 · recurring:rounds=5 · resnet20_gn · seed 1"
    assert "bn · continual:rounds=4 · resnet20 · seed 1" in map(str, tasks)
    assert len({bench.path_of(Path(), settings(made, each)) for each in tasks}) == len(tasks)
    assert made.stream.corruptions == ("speckle_noise", "gaussian_blur", "saturate", "spatter")

"""``driftfilter run`` as a user meets it: own model, own data, checkpoints, signals, bad
batches.
"""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.special import entr
from torch import nn

import driftfilter as df
from driftfilter.app.cli import main
from driftfilter.recipe import from_dict
from own_model import (
    BATCH,
    LABELS,
    MODEL,
    N,
    as_lines,
    assert_equal,
    bad,
    batches,
    expected,
    network,
    predictions,
    run,
    samples,
    saving_only,
    steps,
)

# What is written


def test_predictions_log_and_config(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--out", "o", "--labels", "y.npy") == 0
    logs, found = expected(batches()), predictions("o")
    assert found["probabilities"].tobytes() == np.exp(logs).tobytes()
    assert (found["label"] == logs.argmax(1)).all()
    assert (found["probability"] == np.exp(logs).max(1)).all()
    np.testing.assert_allclose(found["entropy"], entr(np.exp(logs)).sum(1), rtol=1e-5)
    lines = steps("o")
    assert [(line["step"], line["n"], line["used"]) for line in lines] == [
        (i, n, n) for i, n in enumerate((10, 10, 10, 10, 6))
    ]
    right = (logs.argmax(1) == LABELS).cumsum()
    assert [line["accuracy"] for line in lines] == [
        right[min(10 * i + 9, N - 1)] / min(10 * i + 10, N) for i in range(5)
    ]
    np.testing.assert_allclose(
        [line["entropy"] for line in lines],
        [found["entropy"][10 * i : 10 * i + 10].mean() for i in range(5)],
        rtol=1e-6,
    )
    adapter = df.adapt(network(), "tent", lr=0.01)
    energies = [adapter.update(piece).energy.item() for piece in batches()]
    assert [line["energy"] for line in lines] == energies
    config = json.loads(Path("o/config.json").read_text())
    assert from_dict(config["recipe"]) == adapter.recipe
    assert config["model"] == adapter.fingerprint._asdict()
    assert (
        f"{N} samples, 5 steps, accuracy {right[-1] / N:.4f}; wrote o/predictions.npz"
        in capsys.readouterr().out
    )
    loaded = df.adapt(network(), "tent", lr=0.01)
    df.load(loaded, "o/state.safetensors")
    assert torch.equal(loaded.belief.mean, adapter.belief.mean)


def test_csv_says_the_same(folder: Path) -> None:
    assert run("--out", "a") == 0
    assert run("--out", "b", "--predictions", "csv") == 0
    table = np.genfromtxt("b/predictions.csv", delimiter=",", names=True)
    found = predictions("a")
    assert (table["row"] == np.arange(N)).all()
    for name in ("label", "probability", "entropy"):
        assert (table[name].astype(np.float32) == found[name]).all()
    assert (
        np.stack([table[f"p{k}"] for k in range(3)], 1).astype(np.float32) == found["probabilities"]
    ).all()


class Stdin:
    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)


@pytest.mark.parametrize("kind", ["npz", "lines"])
def test_other_ways_to_give_the_data(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("--out", "a") == 0
    if kind == "npz":
        np.savez("x.npz", x=samples(), labels=LABELS)
        assert run("--out", "b", data="x.npz") == 0
        assert steps("b")[-1]["accuracy"] == np.mean(predictions("a")["label"] == LABELS)
    else:
        monkeypatch.setattr(sys, "stdin", Stdin(b"\n" + as_lines(samples())))
        assert run("--out", "b", data="-") == 0
    assert (
        predictions("a")["probabilities"].tobytes() == predictions("b")["probabilities"].tobytes()
    )


def test_options_reach_the_adapter(folder: Path) -> None:
    Path("r.toml").write_text(df.to_toml(df.presets.get("tent", lr=0.01)))
    arguments = [
        "run",
        MODEL,
        "x.npy",
        "--recipe",
        "r.toml",
        "--batch",
        "10",
        "--window",
        "15",
        "--update-every",
        "2",
    ]
    assert main([*arguments, "--seed", "3", "--out", "o"]) == 0
    logs = expected(batches(), window=15, update_every=2, seed=3)
    assert predictions("o")["probabilities"].tobytes() == np.exp(logs).tobytes()
    assert [line["energy"] is None for line in steps("o")] == [True, False, True, False, True]


def test_weights_and_source(folder: Path) -> None:
    torch.manual_seed(7)
    trained = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval()
    save_file(trained.state_dict(), "w.safetensors")
    torch.save({"state_dict": trained.state_dict()}, "w.pt")
    np.savez("s.npz", x=samples()[:20], labels=LABELS[:20])
    for number, weights in enumerate(("w.safetensors", "w.pt")):
        assert (
            run("--out", f"o{number}", "--weights", weights, "--source", "s.npz", preset="opgd")
            == 0
        )
        data = df.SourceData(torch.from_numpy(samples()[:20]), torch.from_numpy(LABELS[:20]))
        adapter = df.adapt(trained, "opgd", data=data)
        logs = np.concatenate([adapter(piece).numpy() for piece in batches()])
        assert predictions(f"o{number}")["probabilities"].tobytes() == np.exp(logs).tobytes()


def test_a_shipped_network_on_pictures(folder: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    (folder / "pictures" / "b").mkdir(parents=True)
    for place, name in enumerate(("0.png", "1.png", "2.png", "b/0.png", "b/1.png", "b/2.png")):
        image.fromarray(pixels[place]).save(folder / "pictures" / name)
    np.save("p.npy", pixels)
    np.save("f.npy", pixels.transpose(0, 3, 1, 2).astype(np.float32) / 255)
    for out, data in (("a", "pictures"), ("b", "p.npy"), ("c", "f.npy")):
        assert run("--out", out, model="resnet20", data=data, batch=4) == 0
    assert predictions("a")["probabilities"].shape == (6, 10)
    for other in ("b", "c"):
        assert (
            predictions("a")["probabilities"].tobytes()
            == predictions(other)["probabilities"].tobytes()
        )


# Going on


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["npz", "csv"])
@pytest.mark.parametrize("covered", [0, 2, 3])
def test_a_resumed_run_equals_an_unbroken_one(
    covered: int, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It failed in the step after the next one; what the journals hold beyond the checkpoint is
    said anew.
    """
    options = [
        "--predictions",
        kind,
        "--labels",
        "y.npy",
        "--window",
        "12",
        "--checkpoint-every",
        "1",
    ]
    assert run("--out", "whole", *options) == 0
    with saving_only(covered, monkeypatch):
        assert run("--out", "o", *options) == 1
    assert len(steps("o")) == covered + 1
    assert run("--out", "o", "--resume", *options) == 0
    if kind == "csv":
        assert Path("o/predictions.csv").read_bytes() == Path("whole/predictions.csv").read_bytes()
    else:
        assert_equal("o", "whole")
    one, other = (load_file(f"{out}/state.safetensors") for out in ("o", "whole"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_resuming_what_is_done_and_what_has_not_begun(folder: Path) -> None:
    for out in ("a", "b"):
        assert run("--out", out, "--resume") == 0
    assert run("--out", "a", "--resume") == 0
    assert_equal("a", "b")
    np.save("more.npy", np.concatenate((samples(), samples())))
    assert run("--out", "a", "--resume", data="more.npy") == 0
    assert len(predictions("a")["label"]) == 2 * N
    assert (predictions("a")["label"][:N] == predictions("b")["label"]).all()


@pytest.mark.parametrize("live", [True, False])
def test_stdin_starts_again_or_goes_on(
    live: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("--out", "whole") == 0
    monkeypatch.setattr(sys, "stdin", Stdin(as_lines(samples()[:20])))
    assert run("--out", "o", data="-") == 0
    monkeypatch.setattr(sys, "stdin", Stdin(as_lines(samples()[20:] if live else samples())))
    assert run("--out", "o", "--resume", *(["--stdin-continues"] if live else []), data="-") == 0
    assert_equal("o", "whole")
    monkeypatch.setattr(sys, "stdin", Stdin(as_lines(samples()[:20])))
    assert run("--out", "o", "--resume", data="-") == 1


# Bad batches


@pytest.mark.parametrize("kind", ["nan", "infinity", "range"])
@pytest.mark.parametrize("first", [True, False])
def test_a_skipped_batch_leaves_no_trace(
    kind: str, first: bool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even where it is the first, of which nobody knows yet how many classes there are."""
    array = np.roll(bad(kind), -BATCH, 0) if first else bad(kind)
    place = 0 if first else 1
    np.save("bad.npy", array)
    limits = ["--range=-50,50"] if kind == "range" else []
    for form in ("npz", "csv"):
        options = [
            "--out",
            form,
            "--predictions",
            form,
            "--on-bad-batch",
            "skip",
            "--labels",
            "y.npy",
            *limits,
        ]
        assert run(*options, data="bad.npy") == 3
    good = [
        piece
        for number, piece in enumerate(torch.from_numpy(array).split(BATCH))
        if number != place
    ]
    logs = expected(good)
    rows = slice(place * BATCH, place * BATCH + BATCH)
    found = predictions("npz")
    assert np.delete(found["probabilities"], rows, 0).tobytes() == np.exp(logs).tobytes()
    assert (found["label"][rows] == -1).all()
    assert all(
        np.isnan(found[name][rows]).all() for name in ("probability", "entropy", "probabilities")
    )
    line = steps("npz")[place]
    assert line.keys() == {"step", "n", "skipped"}
    reason = (
        r"inputs must be in [-50, 50], got '100 at index [3, 2]'"
        if kind == "range"
        else "inputs must be finite, got"
    )
    assert line["skipped"].startswith(reason)
    assert f"warning: step {place} skipped: {reason}" in capsys.readouterr().err
    kept = np.delete(np.arange(N), rows)
    assert steps("npz")[-1]["accuracy"] == np.mean(logs.argmax(1) == LABELS[kept])
    table = np.genfromtxt("csv/predictions.csv", delimiter=",", names=True)
    assert (table["row"] == np.arange(N)).all()
    np.testing.assert_array_equal(table["probability"].astype(np.float32), found["probability"])
    adapter = df.adapt(network(), "tent", lr=0.01)
    df.load(adapter, "npz/state.safetensors")
    assert adapter.state.step == 4


def test_a_bad_batch_stops_and_may_be_skipped_then(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save("bad.npy", bad("nan"))
    assert run("--out", "whole", "--on-bad-batch", "skip", data="bad.npy") == 3
    for options in ([], ["--resume"]):
        assert run("--out", "o", *options, data="bad.npy") == 1
        told = capsys.readouterr().err
        assert (
            "error: step 1 (samples 10 to 19): inputs must be finite, got nan at index [3, 2]"
            in told
        )
        assert "--resume --on-bad-batch skip goes on from o without it" in told
        assert len(predictions("o")["label"]) == BATCH
    assert run("--out", "o", "--resume", "--on-bad-batch", "skip", data="bad.npy") == 3
    assert_equal("o", "whole")


LINES: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"[1, 2,\n", "a line must be a JSON array of numbers"),
    "ragged": (b"[[1, 2], [3]]\n", "a line must be a JSON array of numbers"),
    "text": (b'["a", 1, 2, 3, 4]\n', "a line must be a JSON array of numbers"),
    "null": (b"[null, 1, 2, 3, 4]\n", "inputs must be finite, got nan"),
    "object": (b"[{}, 1, 2, 3, 4]\n", "a line must be a JSON array of numbers"),
    "bytes": (b"\xff\xfe\x00\n", "a line must be a JSON array of numbers"),
    "deep": (b"[" * 100_000 + b"\n", "a line must be a JSON array of numbers"),
    "number": (b"3\n", "a line must be an array, or an object of arrays"),
    "empty": (b"{}\n", "a line must be an array, or an object of arrays"),
    "names": (b'{"a": [1]}\n', "lines must be alike: ['']"),
    "NaN": (b"[NaN, 1, 2, 3, 4]\n", "inputs must be finite, got nan"),
    "huge": (b"[1e300, 1, 2, 3, 4]\n", "inputs must be finite, got inf"),
    "short": (b"[1, 2]\n", "samples of a batch must be of one shape"),
}


@pytest.mark.parametrize("case", LINES)
def test_bad_lines(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line, reason = LINES[case]
    good = as_lines(samples()).splitlines(keepends=True)
    monkeypatch.setattr(sys, "stdin", Stdin(b"".join([*good[:13], line, *good[14:]])))
    assert run("--out", "o", "--on-bad-batch", "skip", data="-") == 3
    assert [line["skipped"].startswith(reason) for line in steps("o") if "skipped" in line] == [
        True
    ]
    logs = expected([batches()[0], *batches()[2:]])
    assert (
        np.delete(predictions("o")["probabilities"], slice(10, 20), 0).tobytes()
        == np.exp(logs).tobytes()
    )


def test_a_batch_of_another_shape(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape is that of the first batch that was used, and is known after resuming."""
    good, short = as_lines(samples()[:20]), as_lines(samples()[:10, :3])
    for lines, options in ((good, ["--out", "o"]), (good + short, ["--out", "o", "--resume"])):
        monkeypatch.setattr(sys, "stdin", Stdin(lines))
        status = run(*options, "--on-bad-batch", "skip", data="-")
    assert status == 3
    assert (
        steps("o")[2]["skipped"]
        == "samples must be of the shape of those before, [5], got 'shape [3]'"
    )
    monkeypatch.setattr(sys, "stdin", Stdin(short + good))
    assert run("--out", "p", "--on-bad-batch", "skip", data="-") == 3
    assert steps("p")[0]["skipped"].startswith("the model failed: ")
    assert (
        predictions("p")["probabilities"][10:].tobytes()
        == np.exp(expected(batches()[:2])).tobytes()
    )


# Signals


def started(*arguments: str) -> subprocess.Popen[bytes]:
    code = [
        sys.executable,
        "-m",
        "driftfilter.app.cli",
        "run",
        MODEL,
        "-",
        "--preset",
        "tent:lr=0.01",
        "--batch",
        "10",
    ]
    env = {**os.environ, "PYTHONPATH": str(Path(df.__file__).parents[1])}
    return subprocess.Popen([*code, *arguments], stdin=PIPE, stdout=PIPE, stderr=PIPE, env=env)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"]
)
def test_a_signal_saves_and_ends(number: int, status: int, folder: Path) -> None:
    """While it waits for more lines of a batch; those are not lost to the resumed run, which gets
    them again.
    """
    assert run("--out", "whole") == 0
    process = started("--out", "o")
    assert process.stdin is not None
    process.stdin.write(as_lines(samples()[:33]))
    process.stdin.flush()
    log = folder / "o" / "steps.jsonl"
    until(lambda: log.exists() and log.read_bytes().count(b"\n") == 3)
    process.send_signal(number)
    _, told = process.communicate()
    assert process.returncode == status, told
    assert (
        f"{signal.Signals(number).name}: saved; "
        "the same command with --resume goes on from o".encode()
        in told
    )
    assert len(predictions("o")["label"]) == 30
    assert started("--out", "o", "--resume").communicate(as_lines(samples()))[1] == b""
    assert_equal("o", "whole")


@pytest.mark.slow
def test_two_runs_in_one_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = started("--out", "o")
    assert process.stdin is not None
    process.stdin.write(as_lines(samples()[:10]))
    process.stdin.flush()
    until(lambda: (folder / "o" / "config.json").exists())
    assert run("--out", "o", "--resume") == 1
    assert f"--out o is in use: claimed by process {process.pid}" in capsys.readouterr().err
    process.communicate(as_lines(samples()[10:]))
    assert process.returncode == 0


# Changes

CHANGES: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "preset": ([], {"preset": "eta"}, "saved with another recipe: "),
    "number": (
        [],
        {"preset": "tent:lr=0.5"},
        "another recipe: inference.rule.lr was 0.01, here it is 0.5",
    ),
    "window": (["--window", "3"], {}, "another recipe: window was 0, here it is 3"),
    "batch": ([], {"batch": 7}, "--batch must be 10, as it was when the run began"),
    "seed": (["--seed", "1"], {}, "--seed must be 0, as it was"),
    "predictions": (["--predictions", "csv"], {}, "--predictions must be 'npz', as it was"),
    "labels": (["--labels", "y.npy"], {}, "--labels must be 'none', as it was"),
    "fewer data": (
        [],
        {"data": "short.npy"},
        "samples must be at least the 46 that the checkpoint has seen, got 20",
    ),
    "another model": (
        ["--weights", "w.safetensors"],
        {},
        "saved with another model, of other weights",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_run_does_not_go_on_as_another(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save("short.npy", samples()[:20])
    torch.manual_seed(5)
    save_file({name: value + 1 for name, value in network().state_dict().items()}, "w.safetensors")
    assert run("--out", "o") == 0
    before = {path.name: path.read_bytes() for path in Path("o").iterdir()}
    options, changed, message = CHANGES[case]
    assert run("--out", "o", "--resume", *options, **changed) == 1
    assert message in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in Path("o").iterdir()} == before


def test_a_folder_with_a_run_is_not_overwritten(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--out", "o") == 0
    assert run("--out", "o") == 2
    assert "--out must be a folder without a run (or give --resume" in capsys.readouterr().err


def test_damaged_files_of_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--out", "o", "--checkpoint-every", "1", "--keep", "2") == 0
    whole = {path.name: path.read_bytes() for path in Path("o").iterdir()}
    Path("o/predictions.part").write_bytes(whole["predictions.part"][:-1])
    assert run("--out", "o", "--resume") == 1
    message = (
        "o/predictions.part must be of at least the 552 bytes that the checkpoint covers, got "
        "'551 bytes'"
    )
    assert message in capsys.readouterr().err
    Path("o/predictions.part").write_bytes(whole["predictions.part"])
    Path("o/state.safetensors").write_bytes(whole["state.safetensors"][:-1])
    assert run("--out", "o", "--resume") == 1
    assert "truncated or altered" in (told := capsys.readouterr().err)
    assert "the one before it is o/state.1.safetensors" in told
    os.replace("o/state.1.safetensors", "o/state.safetensors")
    assert run("--out", "o", "--resume") == 0
    assert Path("o/predictions.npz").read_bytes() == whole["predictions.npz"]


def test_alarms_are_found_though_old_ones_are_dropped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.random.default_rng(0).normal(size=(800, 5)).astype(np.float32)
    labels = network()(torch.from_numpy(rows)).argmax(1)
    rows[400:] = rows[(labels == labels.bincount().argmin()).nonzero()[0]]
    np.save("x.npy", rows)
    alone = ("--set", 'labels={kind="None"}')  # one label after the other is no run to be learned
    assert run(*alone, "--out", "whole", preset="center", batch=50) == 0
    monkeypatch.setattr("driftfilter.monitor.state.KEPT", 2)
    assert run(*alone, "--out", "few", preset="center", batch=50) == 0
    found = [[line.get("alarms") for line in steps(out)] for out in ("whole", "few")]
    assert found[0] == found[1]
    assert sum(map(bool, found[0])) >= 5

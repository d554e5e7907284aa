"""``driftfilter run --labels late.csv``: labels that arrive while a run goes on."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import driftfilter as df
from own_model import BATCH, LABELS, N, assert_equal, network, predictions, run, samples, steps

PRESET = "opgd"


def write(name: str, *lines: str) -> None:
    Path(name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def test_labels_are_learned_when_they_have_come(folder: Path) -> None:
    late = {7: 25, 31: 0, 2: 0, 12: 99}  # sample: after how many its label arrives
    rows = [f"{sample},{LABELS[sample]},{after}" for sample, after in late.items()]
    write("late.csv", "sample,label,after", *rows)
    assert run("--out", "o", "--labels", "late.csv", preset=PRESET) == 0
    adapter, done, logs = df.adapt(network(), PRESET), 0, []
    learned = []
    for piece in torch.from_numpy(samples()).split(BATCH):
        logs.append(adapter(piece))
        before, done = done, done + len(piece)
        due = [(max(s + 1, after), s) for s, after in late.items()]
        now = [s for when, s in sorted(due) if before < when <= done]
        for number in now:
            own = torch.from_numpy(samples()[number : number + 1].copy())
            adapter.learn(own, int(LABELS[number]))
        learned.append(len(now))
    assert sum(learned) == 3  # the one that comes after the end is never learned
    expected = np.exp(torch.cat(logs).numpy())
    np.testing.assert_allclose(predictions("o")["probabilities"], expected, rtol=1e-6)
    assert [line.get("learned", 0) for line in steps("o")] == learned


def test_resumed_as_if_never_ended(folder: Path) -> None:
    write("late.csv", *(f"{i},{LABELS[i]},{i + 15}" for i in (40, 3, 22, 9)))
    given = ("--labels", "late.csv", "--checkpoint-every", "1")
    assert run("--out", "whole", *given, preset=PRESET) == 0
    whole = np.load("x.npy")
    np.save("x.npy", whole[:20])
    write("late.csv", *(f"{i},{LABELS[i]},{i + 15}" for i in (3, 9)))
    assert run("--out", "parts", *given, preset=PRESET) == 0
    np.save("x.npy", whole)
    write("late.csv", *(f"{i},{LABELS[i]},{i + 15}" for i in (40, 3, 22, 9)))
    assert run("--out", "parts", "--resume", *given, preset=PRESET) == 0
    assert_equal("whole", "parts")


def test_labels_that_changed_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("late.csv", "3,0")
    assert run("--out", "o", "--labels", "late.csv", preset=PRESET) == 0
    write("late.csv", "3,1")
    assert run("--out", "o", "--labels", "late.csv", "--resume", preset=PRESET) == 1
    assert "--labels must be those that the run has learned" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("3", "late.csv line 2 must be sample,label or sample,label,after: integers >= 0, got '3'"),
        ("3,cat", "late.csv line 2 must be sample,label"),
        ("-1,0", "late.csv line 2 must be sample,label"),
        (f"1,{10**23}", "late.csv line 2 must be sample,label"),
        (f"1,2,{10**23}", "late.csv line 2 must be sample,label"),
        (f"{N},0", f"late.csv line 2 must be one of the data, 0 to {N - 1}, got 'sample {N}'"),
        ("0,1", "late.csv must be one for each sample, got 'two labels of samples [0]'"),
    ],
)
def test_mistakes_in_the_file(
    line: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write("late.csv", "0,1", line)
    assert run("--out", "o", "--labels", "late.csv", preset=PRESET) == 2
    assert message in capsys.readouterr().err
    assert not Path("o").exists()


def test_a_wrong_class_is_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("late.csv", "0,7", "1,2")
    assert run("--out", "o", "--labels", "late.csv", preset=PRESET) == 0
    assert "label 7 of sample 0 is left out: labels must be in [0, 2]" in capsys.readouterr().err
    assert steps("o")[0]["learned"] == 1


def test_stdin_cannot_be_read_again(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    write("late.csv", "0,1")
    assert run("--out", "o", "--labels", "late.csv", data="-", preset=PRESET) == 2
    assert "samples of stdin cannot be read again" in capsys.readouterr().err


def test_a_file_that_is_no_text_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("late.CSV").write_bytes(b"\xff\xfe\x00\x81")
    assert run("--out", "o", "--labels", "late.CSV", preset=PRESET) == 2
    assert "late.CSV must be text, sample,label in a line" in capsys.readouterr().err


def test_a_recipe_that_learns_no_labels_refuses_before_it_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write("late.csv", "0,1", "1,2")
    assert run("--out", "o", "--labels", "late.csv", preset="source") == 2
    assert "one that learns from an energy" in capsys.readouterr().err
    assert not Path("o").exists()

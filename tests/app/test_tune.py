"""``driftfilter tune``: settings beside each other on a user's stream."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from driftfilter.app import tune
from driftfilter.app.cli import main
from own_model import MODEL


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["tune", MODEL, "x.npy", "--batch", "10", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_is_set_has_the_evidence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys)
    settings = found["settings"]
    assert len({each["preset"] for each in settings}) == 9
    assert settings[0]["margin"] == settings[0]["error"] == 0
    assert sum(each["weight"] for each in settings) == pytest.approx(1)
    sure = [each for each in settings if each["margin"] > 2 * each["error"]]
    expected = max(sure, key=lambda each: each["margin"]) if sure else settings[0]
    assert found["chosen"] == expected
    assert (found["samples"], found["batches"]) == (46, 5)
    assert told(capsys, "--limit", "20")["samples"] == 20


def test_margins_are_paired_by_batch() -> None:
    torch.manual_seed(0)
    layers = (nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model = nn.Sequential(*layers).eval()
    batches = [2 * torch.randn(50, 5) + 1 for _ in range(4)]
    found = tune.compare(model, iter(batches), 0, lambda done: None)
    _, bank = tune.make_bank(model)
    own = []
    for batch in batches:
        row = []
        for member in (bank.members[0], bank.members[8]):
            logs = member(batch).double()
            f = logs - logs.mean(-1, keepdim=True)
            p = (4 * f / f.square().mean().sqrt()).softmax(-1)
            marginal, mean = torch.special.entr(p.mean(0)).sum(), torch.special.entr(p).sum() / 50
            row.append(float(marginal - mean))
        own.append(row[1] - row[0])
    assert found.settings[8].margin == pytest.approx(np.mean(own), abs=1e-6)
    assert found.settings[8].error == pytest.approx(np.std(own, ddof=1) / 2, abs=1e-6)


def test_text_and_mistakes(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    assert main(["tune", MODEL, "x.npy", "--batch", "10"]) == 0
    out = capsys.readouterr().out
    assert "46 samples in 5 batches, without labels" in out
    assert "keep the default" in out or "set --preset driftfilter:beta=" in out
    for arguments, message in (
        ((MODEL, "missing.npy"), "missing.npy"),
        ((MODEL, "x.npy", "--batch", "100"), "two batches or more"),
        ((MODEL, "-"), "a file or folder"),
    ):
        assert main(["tune", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_samples_that_the_model_does_not_take(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save("x.npy", np.zeros((20, 7), np.float32))
    assert main(["tune", MODEL, "x.npy", "--batch", "10", "--quiet"]) == 1
    assert "driftfilter tune: error: mat1 and mat2 shapes" in capsys.readouterr().err

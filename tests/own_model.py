"""What tests of ``driftfilter run`` share: a user's network, its data, and what runs write."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import driftfilter as df
from driftfilter.app.cli import main

N, BATCH = 46, 10

MODULE = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
"""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval()


def samples() -> NDArray[np.float32]:
    return np.random.default_rng(0).normal(size=(N, 5)).astype(np.float32)


LABELS = np.random.default_rng(1).integers(0, 3, N)
MODEL = "run_network:make"


def run(
    *arguments: str,
    model: str = MODEL,
    data: str = "x.npy",
    preset: str = "tent:lr=0.01",
    batch: int = BATCH,
) -> int:
    return main(["run", model, data, "--preset", preset, "--batch", str(batch), *arguments])


def predictions(out: str, stem: str = "predictions") -> dict[str, NDArray[Any]]:
    with np.load(Path(out) / f"{stem}.npz") as found:
        return dict(found)


def steps(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(out) / "steps.jsonl").read_text().splitlines()]


def expected(pieces: list[torch.Tensor], **options: Any) -> NDArray[Any]:
    """Log-probabilities [n, k] by the library itself."""
    adapter = df.adapt(network(), "tent", lr=0.01, **options)
    return np.concatenate([adapter(piece.clone()).numpy() for piece in pieces])


def batches() -> list[torch.Tensor]:
    return [piece.clone() for piece in torch.from_numpy(samples()).split(BATCH)]


def assert_equal(one: str, other: str) -> None:
    first, second = predictions(one), predictions(other)
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)
    without = [
        [{key: line[key] for key in line if key != "ms"} for line in steps(out)]
        for out in (one, other)
    ]
    assert without[0] == without[1]


def summary(out: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(out) / "summary.json").read_text(encoding="utf-8"))
    return found


def as_lines(array: NDArray[Any]) -> bytes:
    return "".join(json.dumps(row.tolist()) + "\n" for row in array).encode()


@contextmanager
def saving_only(times: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The disk is full after so many saves."""
    save, calls = df.save, 0

    def fails(*args: Any) -> None:
        nonlocal calls
        if calls == times:
            raise df.CheckpointError("the disk is full")
        calls += 1
        save(*args)

    with monkeypatch.context() as patched:
        patched.setattr(df, "save", fails, raising=False)
        yield


def bad(kind: str) -> NDArray[Any]:
    array = samples()
    array[13, 2] = {"nan": np.nan, "infinity": -np.inf, "range": 100}[kind]
    return array

"""Windows of sensors, and other arrays of numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from driftfilter.app.readers.stored import Shift
from driftfilter.app.readers.windows import open_windows
from small_data import write_windows

CPU = torch.device("cpu")


def test_a_folder_for_each_domain(tmp_path: Path) -> None:
    write_windows(tmp_path, domains=3)
    data = open_windows(tmp_path)
    assert data.shifts == ("1", "2", "3")
    assert data.members is not None
    for name, index in data.members.items():
        inputs, labels = (np.load(tmp_path / name / f"{part}.npy") for part in ("inputs", "labels"))
        taken = data.take(Shift(name), index.flip(0), CPU)
        assert torch.equal(taken, torch.from_numpy(inputs[::-1].copy()))  # type: ignore[arg-type]
        assert data.labels[index].tolist() == labels.tolist()


def test_they_are_mapped_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = []
    load = np.load

    def spy(path: Path, **how: Any) -> Any:
        modes.append(how)
        return load(path, **how)

    monkeypatch.setattr(np, "load", spy)
    write_windows(tmp_path)
    open_windows(tmp_path)
    assert modes == [{"mmap_mode": "r"}] * 4


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("float64", torch.float32),
        ("float16", torch.float32),
        (">f4", torch.float32),
        ("int16", torch.int64),
        (">i4", torch.int64),
    ],
)
def test_one_folder_of_any_numbers(tmp_path: Path, kind: str, expected: torch.dtype) -> None:
    inputs = np.arange(12).reshape(4, 3).astype(kind)
    np.save(tmp_path / "inputs.npy", inputs)
    np.save(tmp_path / "labels.npy", np.arange(4))
    taken = open_windows(tmp_path).take(Shift("stream"), torch.tensor([3, 0]), CPU)
    assert isinstance(taken, torch.Tensor)
    assert taken.dtype == expected
    assert taken.tolist() == [[9, 10, 11], [0, 1, 2]]


def test_an_archive_with_domains(tmp_path: Path) -> None:
    names = np.array(["b", "a", "b"])
    inputs = np.arange(6.0).reshape(3, 2)
    np.savez(tmp_path / "w.npz", inputs=inputs, labels=np.array([2, 0, 1]), domains=names)
    data = open_windows(tmp_path / "w.npz")
    assert data.shifts == ("b", "a")
    assert data.members is not None
    assert data.labels[data.members["b"]].tolist() == [2, 1]
    taken = data.take(Shift("a"), data.members["a"], CPU)
    assert taken.tolist() == [[2.0, 3.0]]  # type: ignore[union-attr]


def test_a_window_that_is_not_finite_is_named(tmp_path: Path) -> None:
    write_windows(tmp_path)
    inputs = np.load(tmp_path / "2" / "inputs.npy")
    inputs[5, 0, 3] = np.inf
    np.save(tmp_path / "2" / "inputs.npy", inputs)
    data = open_windows(tmp_path)
    assert data.members is not None
    data.take(Shift("2"), data.members["2"][:5], CPU)
    with pytest.raises(ValueError, match=r"\(2\): inputs must be finite, got others in row 5"):
        data.take(Shift("2"), data.members["2"], CPU)
    with pytest.raises(ValueError, match="samples of the domain: 12 to 23"):
        data.take(Shift("2"), torch.tensor([3]), CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda root: np.save(root / "labels.npy", np.zeros(11, int)),
            r"2: labels must be 12 integer labels .* got \[11\]",
        ),
        (
            lambda root: np.save(root / "inputs.npy", np.zeros((12, 2, 9))),
            r"inputs of '2' must be \[2, 8\] for each sample, as those of '1', got \[2, 9\]",
        ),
        (
            lambda root: np.save(root / "inputs.npy", np.zeros((12, 2, 8), complex)),
            "floating-point or whole numbers",
        ),
        (
            lambda root: np.save(root / "inputs.npy", np.zeros((0, 2, 8))),
            "floating-point or whole numbers",
        ),
        (lambda root: (root / "labels.npy").unlink(), r"labels\.npy must be an \.npy file"),
        (
            lambda root: (root / "inputs.npy").write_bytes(b"\x93NUMPY"),
            r"inputs\.npy must be an \.npy file",
        ),
    ],
    ids=["length", "shape", "complex", "empty", "no-labels", "cut"],
)
def test_refused(tmp_path: Path, change: Any, message: str) -> None:
    write_windows(tmp_path)
    change(tmp_path / "2")
    with pytest.raises(ValueError, match=message):
        open_windows(tmp_path)

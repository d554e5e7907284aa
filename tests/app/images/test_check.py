"""``driftfilter data``: what it says of folders, whole and damaged."""

import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from driftfilter.app.corruptions import CORRUPTIONS, EXTRA
from driftfilter.app.images import check as data


def _pixels(count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


def examine(path: Path, ok: bool = False) -> str:
    """What is said of a path in which all, or not all, is as it should be."""
    found = list(data.find(path))
    assert all(finding.ok for finding in found) == ok
    return data.describe(path, found)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.save(tmp_path / "labels.npy", np.tile(np.arange(4), 5))
    for name in CORRUPTIONS:
        np.save(tmp_path / f"{name}.npy", _pixels(20))
    return tmp_path


def test_the_explanation_names_archives_and_layouts() -> None:
    text = data.explain()
    for part in (
        "2535967",
        "CIFAR-10-C.tar",
        "cifar-10-python.tar.gz",
        "driftfilter data FOLDER",
        *data.ARCHIVES.values(),
    ):
        assert part in text


def test_a_whole_folder(folder: Path) -> None:
    text = examine(folder, ok=True)
    assert "WRONG" not in text
    for name in ("labels", *CORRUPTIONS):
        line = next(line for line in text.splitlines() if f" {name}.npy" in line)
        assert hashlib.sha256((folder / f"{name}.npy").read_bytes()).hexdigest() in line
    assert all(f"{name}.npy" in text for name in EXTRA)
    assert "4 images at each severity (published: 10000)" in text


def test_all_that_is_wrong_is_said_at_once(folder: Path) -> None:
    (folder / "fog.npy").unlink()
    (folder / "snow.npy").write_bytes((folder / "snow.npy").read_bytes()[:-1])
    np.save(folder / "frost.npy", _pixels(20) / 255)
    np.save(folder / "contrast.npy", _pixels(20).transpose(0, 3, 1, 2))
    text = examine(folder)
    wrong = [line.split()[1] for line in text.splitlines() if line.startswith("WRONG")]
    assert wrong == ["snow.npy", "frost.npy", "fog.npy", "contrast.npy", "all"]
    assert text.splitlines()[-1].endswith("5 of 21 not as they should be")


@pytest.mark.parametrize("length", [15, 19, 25])
def test_labels_of_another_length(folder: Path, length: int) -> None:
    np.save(folder / "labels.npy", np.zeros(length, int))
    assert "WRONG" in examine(folder)


@pytest.mark.parametrize("inside", [True, False])
def test_archives_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    file = tmp_path / "CIFAR-10-C.tar"
    file.write_bytes(b"archive")
    assert (
        "CIFAR-10-C.tar must have md5 56bf5dcef84df0e2308c6dcbcbbd8499, got "
        "888d0ee361af3603736f32131e7b20a2" in examine(tmp_path if inside else file)
    )
    monkeypatch.setitem(data.ARCHIVES, "CIFAR-10-C.tar", hashlib.md5(b"archive").hexdigest())
    examine(tmp_path if inside else file, ok=True)


def test_python_batches(tmp_path: Path) -> None:
    content = {"data": _pixels(3).reshape(3, -1), "labels": [0, 9, 2]}
    (tmp_path / "test_batch").write_bytes(pickle.dumps(content))
    examine(tmp_path, ok=True)
    (tmp_path / "test_batch").write_bytes(b"none")
    assert "CIFAR-10's or CIFAR-100's python version" in examine(tmp_path)


def test_pictures_are_read_to_the_end(tmp_path: Path) -> None:
    for name in ("dusk", "rain"):
        place = tmp_path / name / "cat"
        place.mkdir(parents=True)
        Image.fromarray(_pixels(1)[0]).save(place / "0.png")
    assert "1 samples under dusk, rain" in examine(tmp_path, ok=True)
    file = tmp_path / "rain" / "cat" / "0.png"
    file.write_bytes(file.read_bytes()[:-1000])
    assert str(file) in examine(tmp_path)


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_nothing_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    assert name in examine(tmp_path / name)

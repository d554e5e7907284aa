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


def examine(path: Path) -> tuple[str, bool]:
    """What is said of a path, and whether all is as it should be."""
    found = list(data.find(path))
    return data.describe(path, found), all(finding.ok for finding in found)


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
    text, ok = examine(folder)
    assert ok
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
    text, ok = examine(folder)
    assert not ok
    wrong = [line.split()[1] for line in text.splitlines() if line.startswith("WRONG")]
    assert wrong == ["snow.npy", "frost.npy", "fog.npy", "contrast.npy", "all"]
    assert text.splitlines()[-1].endswith("5 of 21 not as they should be")


@pytest.mark.parametrize("length", [15, 19, 25])
def test_labels_of_another_length(folder: Path, length: int) -> None:
    np.save(folder / "labels.npy", np.zeros(length, int))
    text, ok = examine(folder)
    assert not ok
    assert "WRONG" in text


@pytest.mark.parametrize("inside", [True, False])
def test_archives_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    file = tmp_path / "CIFAR-10-C.tar"
    file.write_bytes(b"archive")
    text, ok = examine(tmp_path if inside else file)
    assert not ok
    assert (
        "CIFAR-10-C.tar must have md5 56bf5dcef84df0e2308c6dcbcbbd8499, got "
        "888d0ee361af3603736f32131e7b20a2" in text
    )
    monkeypatch.setitem(data.ARCHIVES, "CIFAR-10-C.tar", hashlib.md5(b"archive").hexdigest())
    assert examine(tmp_path if inside else file)[1]


def test_python_batches(tmp_path: Path) -> None:
    content = {"data": _pixels(3).reshape(3, -1), "labels": [0, 9, 2]}
    (tmp_path / "test_batch").write_bytes(pickle.dumps(content))
    assert examine(tmp_path)[1]
    (tmp_path / "test_batch").write_bytes(b"none")
    text, ok = examine(tmp_path)
    assert not ok
    assert "CIFAR-10's python version" in text


def test_pictures_are_read_to_the_end(tmp_path: Path) -> None:
    for name in ("dusk", "rain"):
        place = tmp_path / name / "cat"
        place.mkdir(parents=True)
        Image.fromarray(_pixels(1)[0]).save(place / "0.png")
    text, ok = examine(tmp_path)
    assert ok
    assert "1 samples under dusk, rain" in text
    file = tmp_path / "rain" / "cat" / "0.png"
    file.write_bytes(file.read_bytes()[:-1000])
    text, ok = examine(tmp_path)
    assert not ok
    assert str(file) in text


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_nothing_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    text, ok = examine(tmp_path / name)
    assert not ok
    assert name in text

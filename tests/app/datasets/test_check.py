"""``driftfilter data``: what it says of small data sets, whole and damaged."""

import hashlib
import json
import pickle
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from driftfilter.app.arguments import parse
from driftfilter.app.cli import main
from driftfilter.app.commands import COMMANDS
from driftfilter.app.corruptions import CORRUPTIONS, EXTRA
from driftfilter.app.datasets import check
from driftfilter.app.datasets.files import Batch, CorruptedArrays, Table, Windows
from driftfilter.app.datasets.findings import Contents, Finding, Look
from driftfilter.app.datasets.folders import (
    AnnotatedFolder,
    ClassFolders,
    CorruptedFolders,
    DomainFolders,
)
from driftfilter.app.datasets.table import DATA_SETS, Archive, DataSet
from driftfilter.app.readers.columns import Columns
from small_data import (
    WNIDS,
    save_classes,
    save_corruptions,
    save_picture,
    save_tiny_val,
    write_csv,
    write_windows,
)


def _pixels(count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


def wrong(contents: Contents, path: Path, decode: bool = False) -> dict[str, str]:
    """What is said of the parts that are not as they should be."""
    return {each.name: each.text for each in contents.check(path, Look(decode)) if not each.ok}


def own(path: Path) -> Finding:
    (finding,) = check.find(path)
    return finding


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


# Arrays

ARRAYS = CorruptedArrays(4, 4)


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    np.save(tmp_path / "labels.npy", np.tile(np.arange(4), 5))
    for name in CORRUPTIONS:
        np.save(tmp_path / f"{name}.npy", _pixels(20))
    return tmp_path


def test_whole_arrays(arrays: Path) -> None:
    found = {each.name: each for each in ARRAYS.check(arrays, Look())}
    assert all(each.ok for each in found.values())
    for name in ("labels", *CORRUPTIONS):
        digest = hashlib.sha256((arrays / f"{name}.npy").read_bytes()).hexdigest()
        assert digest in found[f"{name}.npy"].text
    assert all("not needed" in found[f"{name}.npy"].text for name in EXTRA)
    assert found["all together"].text == "4 images at each severity, of 4 classes"


def test_all_that_is_wrong_with_arrays_is_said_at_once(arrays: Path) -> None:
    (arrays / "fog.npy").unlink()
    (arrays / "snow.npy").write_bytes((arrays / "snow.npy").read_bytes()[:-1])
    np.save(arrays / "frost.npy", _pixels(20) / 255)
    np.save(arrays / "contrast.npy", _pixels(20).transpose(0, 3, 1, 2))
    found = wrong(ARRAYS, arrays)
    assert list(found) == ["snow.npy", "frost.npy", "fog.npy", "contrast.npy", "all together"]
    assert "truncated" in found["snow.npy"]


@pytest.mark.parametrize("length", [15, 19, 25])
def test_labels_of_another_length(arrays: Path, length: int) -> None:
    np.save(arrays / "labels.npy", np.zeros(length, int))
    assert wrong(ARRAYS, arrays)


def test_arrays_of_fewer_images_are_not_whole(arrays: Path) -> None:
    text = wrong(CorruptedArrays(4, 10), arrays)["all together"]
    assert "must be 10 images of 4 classes, got '4 images at each severity" in text


def test_python_batches(tmp_path: Path) -> None:
    content = {"data": _pixels(3).reshape(3, -1), "labels": [0, 9, 2]}
    (tmp_path / "test_batch").write_bytes(pickle.dumps(content))
    assert not wrong(Batch("test_batch", 3), tmp_path)
    assert (
        "must be 10000 images long, got '3 images'"
        in wrong(Batch("test_batch"), tmp_path)["test_batch"]
    )
    (tmp_path / "test_batch").write_bytes(b"none")
    assert "python version" in wrong(Batch("test_batch", 3), tmp_path)["test_batch"]


@pytest.mark.parametrize("inside", [True, False])
def test_archives_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    file = tmp_path / "CIFAR-10-C.tar"
    file.write_bytes(b"archive")
    path = tmp_path if inside else file
    finding = own(path)
    assert not finding.ok
    assert "of md5 56bf5dcef84df0e2308c6dcbcbbd8499, as published, got 'md5 888d0ee" in finding.text
    archive = Archive(file.name, "7 B", hashlib.md5(b"archive").hexdigest())
    monkeypatch.setattr(
        check, "DATA_SETS", {"c": replace(DATA_SETS["cifar10-c"], archives=(archive,))}
    )
    assert own(path).ok


# Folders of pictures

IMAGENET_C = CorruptedFolders(3, 2)


@pytest.mark.parametrize("group", ["", "noise"])
def test_whole_corruptions(tmp_path: Path, group: str) -> None:
    save_corruptions(tmp_path / group, tuple(CORRUPTIONS), range(1, 6), size=4)
    found = {each.name: each for each in IMAGENET_C.check(tmp_path, Look(decode=True))}
    assert all(each.ok for each in found.values())
    assert found["fog"].text == "5 severities x 3 classes x 2 pictures"
    assert found["spatter"].text == "not there, and not needed"
    assert IMAGENET_C.resembles(tmp_path) == 1
    assert CorruptedFolders(200, 50).resembles(tmp_path) < 0.1


def test_what_corruptions_lack_is_named(tmp_path: Path) -> None:
    save_corruptions(tmp_path, tuple(CORRUPTIONS), range(1, 6), size=16)
    shutil.rmtree(tmp_path / "fog" / "3")
    shutil.rmtree(tmp_path / "snow" / "2" / WNIDS[1])
    (tmp_path / "frost" / "5" / WNIDS[0] / "1.JPEG").unlink()
    halve(tmp_path / "contrast" / "1" / WNIDS[2] / "0.JPEG")
    shutil.rmtree(tmp_path / "zoom_blur")
    found = wrong(IMAGENET_C, tmp_path)
    assert found == {
        "zoom_blur": "missing",
        "fog": "severity 3 is missing",
        "snow": f"severity 2: 1 classes are missing ({WNIDS[1]})",
        "frost": f"severity 5: 1 classes without 2 pictures ({WNIDS[0]} 1)",
        "contrast": "severity 1: 1 pictures are damaged "
        f"({tmp_path / 'contrast' / '1' / WNIDS[2] / '0.JPEG'})",
    }


def test_damage_inside_is_found_by_decoding(tmp_path: Path) -> None:
    save_classes(tmp_path, 0, size=64)
    path = tmp_path / WNIDS[1] / "0.JPEG"
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 200] = bytes(200)
    path.write_bytes(content)
    contents = ClassFolders(3, 6)
    assert wrong(contents, tmp_path) == {}
    assert list(wrong(contents, tmp_path, decode=True)) == ["pictures"]
    seen: list[int] = []
    list(contents.check(tmp_path, Look(seen=seen.append)))
    assert sum(seen) == 6


def test_a_picture_with_something_after_its_end_is_whole(tmp_path: Path) -> None:
    """Cameras and editors write there; what is not plain is decoded."""
    save_classes(tmp_path, 0)
    for name, kind in (("0.JPEG", "JPEG"), ("1.JPEG", "GIF")):
        path = tmp_path / WNIDS[0] / name
        Image.fromarray(_pixels(1)[0]).save(path, format=kind)
        path.write_bytes(path.read_bytes() + bytes(100))
    assert wrong(ClassFolders(3, 6), tmp_path) == {}
    (tmp_path / WNIDS[0] / "0.JPEG").write_bytes(b"")
    assert "1 pictures are damaged" in wrong(ClassFolders(3, 6), tmp_path)["pictures"]


def test_domains(tmp_path: Path) -> None:
    pacs = DomainFolders({"photo": 4, "sketch": 2, "cartoon": 2}, 2)
    save_classes(tmp_path / "photo", 1, ("dog", "horse"))
    for name in ("sketch", "cartoon"):
        save_classes(tmp_path / name, 2, ("dog", "horse"), count=1)
    assert wrong(pacs, tmp_path) == {}
    shutil.rmtree(tmp_path / "sketch" / "dog")
    shutil.rmtree(tmp_path / "cartoon")
    assert wrong(pacs, tmp_path) == {
        "sketch": "1 of 2 pictures; 1 classes are missing (dog)",
        "cartoon": "missing",
    }
    assert pacs.resembles(tmp_path) == pytest.approx(2 / 3)


def test_office_31_lies_below_images(tmp_path: Path) -> None:
    save_classes(tmp_path / "amazon" / "images", 1, ("bike", "mug"))
    assert wrong(DomainFolders({"amazon": 4}, 2), tmp_path) == {}


def test_numbered_classes(tmp_path: Path) -> None:
    """ImageNet-V2 says by itself which class is missing."""
    save_classes(tmp_path, 0, ("0", "1", "3"), count=2)
    assert wrong(ClassFolders(4, 8, 2), tmp_path) == {
        "classes": "1 classes are missing (2)",
        "pictures": "6 of 8",
    }


def test_tiny_imagenet(tmp_path: Path) -> None:
    contents, root = AnnotatedFolder(3, 2, 6), tmp_path / "tiny-imagenet-200"
    save_tiny_val(root / "val")
    assert wrong(contents, root) == wrong(contents, root / "val") == {}
    for name in WNIDS:
        for number in range(2):
            save_picture(root / "train" / name / "images" / f"{name}_{number}.JPEG", number, 8)
    assert wrong(contents, root) == {}
    (root / "train" / WNIDS[0] / "images" / f"{WNIDS[0]}_1.JPEG").unlink()
    halve(root / "val" / "images" / "val_3.JPEG")
    found = wrong(contents, root)
    assert found["train"] == f"1 classes without 2 pictures ({WNIDS[0]} 1)"
    assert "val_3.JPEG" in found["val"]


# Rows and windows


def test_a_table(tmp_path: Path) -> None:
    contents = Table("elec.csv", ("day", "class"), 2)
    write_csv(tmp_path / "elec.csv", "day,class", [[0, "UP"], [1, "DOWN"]])
    assert wrong(contents, tmp_path) == wrong(contents, tmp_path / "elec.csv") == {}
    write_csv(tmp_path / "elec.csv", "day,class", [[0, "UP"]])
    assert "must be 2 rows long, got '1 rows'" in wrong(contents, tmp_path)["elec.csv"]
    write_csv(tmp_path / "elec.csv", "day,label", [[0, "UP"], [1, "DOWN"]])
    assert "class" in wrong(contents, tmp_path)["elec.csv"]
    assert contents.resembles(tmp_path) == 0.25


def test_a_list_of_pictures(tmp_path: Path) -> None:
    contents = Table("metadata.csv", ("file", "y"), 2, "train/{file}.png")
    write_csv(tmp_path / "metadata.csv", "file,y", [["a", 0], ["b", 1]])
    for name in "ab":
        save_picture(tmp_path / "train" / f"{name}.png", 0)
    assert wrong(contents, tmp_path) == {}
    halve(tmp_path / "train" / "a.png")
    assert "damaged: " in wrong(contents, tmp_path)["pictures"]
    (tmp_path / "train" / "b.png").unlink()
    assert "b.png" in wrong(contents, tmp_path)["pictures"]


def test_windows(tmp_path: Path) -> None:
    write_windows(tmp_path)
    contents = Windows(2, 24, (2, 8), 3)
    assert wrong(contents, tmp_path) == {}
    assert contents.resembles(tmp_path) == 1
    assert list(wrong(Windows(3, 36, (2, 8), 3), tmp_path)) == ["all together"]
    np.save(tmp_path / "2" / "labels.npy", np.zeros(5, int))
    assert list(wrong(contents, tmp_path)) == ["2", "all together"]


# Which it is


def save_domains(root: Path, names: Sequence[str], classes: int) -> None:
    for name in names:
        save_classes(root / name, 0, [f"c{i}" for i in range(classes)], count=1, size=2)


@pytest.mark.parametrize(
    ("folder", "make", "name"),
    [
        (
            "x",
            lambda root: save_domains(root, ("photo", "cartoon", "sketch"), 7),
            "pacs",
        ),
        ("x", lambda root: save_domains(root, ("photo", "cartoon", "sketch"), 20), None),
        ("PACS", lambda root: save_domains(root, ("photo",), 7), "pacs"),
        ("x", lambda root: save_domains(root, ("photo",), 7), None),
        ("x", lambda root: save_tiny_val(root / "val"), "tiny-imagenet"),
        ("x", lambda root: save_corruptions(root, ("fog",), (1,), size=4), None),
        (
            "x",
            lambda root: save_corruptions(
                root, ("fog",), (1,), classes=[f"n{i}" for i in range(150)], count=1, size=2
            ),
            "tiny-imagenet-c",
        ),
        (
            "imagenet-a",
            lambda root: save_classes(root, 0, [f"n{i}" for i in range(200)], count=8, size=2),
            "imagenet-a",
        ),
    ],
    ids=["domains", "others", "by name", "too little", "tiny", "too few", "tiny-c", "a"],
)
def test_recognised(
    tmp_path: Path, folder: str, make: Callable[[Path], Any], name: str | None
) -> None:
    (tmp_path / folder).mkdir()
    make(tmp_path / folder)
    assert check.recognise(tmp_path / folder) == name


@pytest.mark.parametrize(("highest", "name"), [(9, "cifar10-c"), (99, "cifar100-c")])
def test_cifar_is_told_by_its_labels(tmp_path: Path, highest: int, name: str) -> None:
    np.save(tmp_path / "labels.npy", np.tile([0, highest], 5))
    np.save(tmp_path / "fog.npy", _pixels(10))
    assert check.recognise(tmp_path) == name


def test_other_data_are_read_to_the_end(tmp_path: Path) -> None:
    for name in ("dusk", "rain"):
        save_picture(tmp_path / name / "cat" / "0.png", 0)
    finding = own(tmp_path)
    assert finding.ok
    assert "1 samples under dusk, rain" in finding.text
    halve(tmp_path / "rain" / "cat" / "0.png")
    finding = own(tmp_path)
    assert not finding.ok
    assert str(tmp_path / "rain" / "cat" / "0.png") in finding.text


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_nothing_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    finding = own(tmp_path / name)
    assert not finding.ok
    assert name in finding.text


# The command


def test_the_list_is_short_and_names_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) < 50
    assert max(map(len, out.splitlines())) <= 100
    assert all(f"\n  {name} " in out for name in DATA_SETS)
    assert out.endswith("driftfilter data FOLDER\n")


@pytest.mark.parametrize("name", DATA_SETS)
def test_a_name_tells_all_of_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data: DataSet = DATA_SETS[name]
    assert main(["data", name]) == 0
    out = capsys.readouterr().out
    for part in (data.licence, data.source, data.layout, *(each.name for each in data.archives)):
        assert part in out
    assert main(["data", name, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["name"], document["licence"]) == (name, data.licence)
    assert data.source.startswith("http")
    assert not any(host in data.source for host in ("pypi", "npmjs", "pythonhosted"))


@pytest.mark.parametrize("name", DATA_SETS)
def test_the_command_of_a_data_set_is_one(name: str) -> None:
    """Its options are known to the bench, and its columns to the file."""
    data = DATA_SETS[name]
    options = parse(["bench", "--data", data.path, *shlex.split(data.options)], COMMANDS).options
    assert options.data == data.path
    if "torchvision:" in options.models:  # which has a head for ImageNet's classes
        assert name.startswith("imagenet")
    if "_tiny=" in options.models:  # benchmarks/train.py numbers classes by name
        assert options.classes is None
    columns = Columns.parse(options.columns)
    if isinstance(data.contents, Table):
        names = list(data.contents.columns)
        assert columns.find(Path("t.csv"), names).label in names
        assert columns.path == data.contents.pattern


def test_a_folder_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(
        DATA_SETS,
        "pacs",
        replace(DATA_SETS["pacs"], contents=DomainFolders({"photo": 4, "sketch": 4}, 2)),
    )
    save_classes(tmp_path / "photo", 1, ("dog", "horse"))
    save_classes(tmp_path / "sketch", 2, ("dog", "horse"))
    assert main(["data", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{tmp_path}: pacs\nok     photo")
    (tmp_path / "sketch" / "dog" / "0.JPEG").unlink()
    assert main(["data", str(tmp_path), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["name"], document["ok"]) == ("pacs", False)
    assert document["files"][1] == {"name": "sketch", "ok": False, "text": "3 of 4 pictures"}
    assert main(["data", str(tmp_path), "--quiet"]) == 1
    assert capsys.readouterr().err == "driftfilter data: error: 3 of 4 pictures\n"
    assert main(["data", str(tmp_path), "--dataset", "imagenet-r", "--decode"]) == 1
    assert "WRONG  classes" in capsys.readouterr().out
    assert main(["data", str(tmp_path / "nowhere"), "--dataset", "imagenet-r"]) == 1
    assert "WRONG  nowhere" in capsys.readouterr().out
    assert main(["data", str(tmp_path), "--dataset", "imagenet-x"]) == 2
    assert "did you mean 'imagenet-" in capsys.readouterr().err

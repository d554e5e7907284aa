"""Files of arrays: what is odd about them is said, and no more is unpacked than is allowed."""

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from driftfilter.app.images import arrays
from driftfilter.app.images.arrays import open_array, open_arrays, require_bounded
from driftfilter.app.networks.load_model import open_weights


def npy(array: Any, shape: tuple[int, ...] | None = None) -> bytes:
    """An .npy file, perhaps of another shape than it says."""
    file = io.BytesIO()
    if shape is None:
        np.save(file, array)
    else:
        described = {"descr": array.dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, described)
        file.write(array.tobytes())
    return file.getvalue()


def archive(path: Path, *members: tuple[str, bytes], packed: bool = True) -> Path:
    kind = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as file:
        for name, data in members:
            file.writestr(name, data)
    return path


X = np.arange(6.0).reshape(3, 2)
ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "a text": (lambda path: path.write_text("hello"), "a file of another kind"),
    "no archive": (lambda path: path.write_bytes(b"PK nothing"), "not a zip file"),
    "objects": (lambda path: np.savez(path, x=np.array([{}])), "an array of numbers"),
    "bytes in the place of an array": (lambda path: archive(path, ("x.npy", b"hello")), "magic"),
    "a shape of many": (
        lambda path: archive(path, ("x.npy", npy(X, (1 << 40, 2)))),
        "17592186044544 bytes long for float64",
    ),
    "a shape below zero": (
        lambda path: archive(path, ("x.npy", npy(X, (-3, -2)))),
        "of lengths >= 0",
    ),
    "more than its shape": (lambda path: archive(path, ("x.npy", npy(X, (2, 2)))), "bytes long"),
    "one name twice": (
        lambda path: archive(path, ("x.npy", npy(X)), ("x.npy", npy(X))),
        "one for each array",
    ),
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("case", ODD)
def test_odd_archives(case: str, tmp_path: Path) -> None:
    make, reason = ODD[case]
    path = tmp_path / "x.npz"
    make(path)
    with pytest.raises(ValueError, match=r"x\.npz must be a whole \.npz file of numbers") as told:
        open_arrays(path)
    assert reason in str(told.value)


def test_members_that_are_no_arrays_are_left_alone(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.npz", ("x.npy", npy(X)), ("readme.txt", b"hello"))
    assert {name: array.tolist() for name, array in open_arrays(path).items()} == {"x": X.tolist()}


def bomb(path: Path, gigabytes: int = 12) -> Path:
    """An archive of 1 MB of zeros whose header and directory promise more."""
    header = npy(np.zeros(0, np.uint8), (gigabytes << 30,))
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file,
        file.open("x.npy", "w", force_zip64=True) as member,
    ):
        member.write(header + bytes(1 << 20))
    data = bytearray(path.read_bytes())
    directory, size = data.rfind(b"PK\x01\x02"), (2 << 30) + (3 << 29)
    data[directory + 24 : directory + 28] = size.to_bytes(4, "little")
    path.write_bytes(data)
    return path


def test_an_archive_that_says_it_is_a_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.npz"
    np.savez_compressed(path, x=np.zeros(1 << 20, np.uint8))
    assert open_arrays(path)["x"].size == 1 << 20
    monkeypatch.setattr(arrays, "UNPACKED", 1 << 20)
    read: list[str] = []
    monkeypatch.setattr(arrays, "_read_member", lambda archive, member: read.append(member))
    with pytest.raises(ValueError, match=r"of at most 1,048,576 bytes when unpacked") as told:
        open_arrays(path)
    assert "got '1,048,704 bytes'" in str(told.value)
    assert read == []  # nothing was unpacked


def test_an_archive_that_does_not_say_so(tmp_path: Path) -> None:
    """Its header promises 12 GB, its directory 3.5: neither is believed."""
    with pytest.raises(ValueError, match=r"bytes long for uint8 \[12884901888\]"):
        open_arrays(bomb(tmp_path / "x.npz"))


def test_members_that_share_their_bytes(tmp_path: Path) -> None:
    """Of a thousand entries of a directory that point at one stored member."""
    path = archive(tmp_path / "x.npz", ("x.npy", npy(X)), packed=False)
    data = path.read_bytes()
    start, end = data.rfind(b"PK\x01\x02"), data.rfind(b"PK\x05\x06")
    entry, tail = data[start:end], bytearray(data[end:])
    tail[8:12] = (1000).to_bytes(2, "little") * 2
    tail[12:16] = (1000 * len(entry)).to_bytes(4, "little")
    path.write_bytes(data[:start] + entry * 1000 + tail)
    with pytest.raises(ValueError, match="within the file's"):
        require_bounded(path)


def test_weights_are_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, packed = tmp_path / "w.pt", tmp_path / "packed.pt"
    torch.save({"w": torch.zeros(1 << 16)}, plain)
    assert open_weights(plain)["w"].shape == (1 << 16,)
    with zipfile.ZipFile(plain) as file:
        archive(packed, *((name, file.read(name)) for name in file.namelist()))
    monkeypatch.setattr(arrays, "UNPACKED", 1 << 16)
    with pytest.raises(ValueError, match=r"packed\.pt must be a whole file of tensors alone"):
        open_weights(packed)


def test_odd_arrays(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    for data in (
        b"",
        b"hello",
        npy(X)[:-1],
        npy(X, (-3, -2)),
        npy(X, (2**70, 0)),
        npy(X).replace(b"\x01\x00", b"\x09\x00", 1),
        npy(X).replace(b"'<f8'", b"'|V0'"),
        b"\x93NUMPY\x01\x00\x60\x00" + b"(" * 95 + b"\n",
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"x\.npy must be "):
            open_array(path)

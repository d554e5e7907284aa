"""Files of arrays, ``.npy`` and ``.npz``: no more is read or unpacked than their headers promise
and than is allowed. Needs no torch.
"""

import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from driftfilter.base.suggest import require

UNPACKED = 4 << 30  # bytes that the compressed members of an archive may unpack to, together


def open_array(path: Path) -> NDArray[Any]:
    """The array of an ``.npy`` file, memory-mapped once its header is known to keep its word about
    the size of the file.
    """
    require(path.is_file(), str(path), "no such file", "an .npy file")
    with path.open("rb") as file:
        _require_size(str(path), file, path.stat().st_size)
    try:
        return np.load(path, mmap_mode="r")  # type: ignore[no-any-return]
    except Exception as error:  # a header that is none of numpy's can fail in any way
        raise ValueError(f"{path} must be an .npy file of numbers, got {error}") from error


def _require_size(name: str, file: IO[bytes], size: int) -> None:
    """Raise unless the header of an ``.npy`` file, of so many bytes, promises as many numbers as
    there are.
    """
    try:
        version = npy.read_magic(file)[0]
        require(version in (1, 2, 3), "its version", version, "1, 2 or 3")
        read = npy.read_array_header_1_0 if version == 1 else npy.read_array_header_2_0
        shape, _, dtype = read(file)
        require(all(length >= 0 for length in shape), "its shape", shape, "of lengths >= 0")
    except Exception as error:  # what is no header can fail in any way
        raise ValueError(f"{name} must be an .npy file, got {error}") from error
    require(not dtype.hasobject, name, dtype, "an array of numbers")
    expected = file.tell() + dtype.itemsize * int(np.prod(shape, dtype=object))
    allowed = f"{expected} bytes long for {dtype} {list(shape)} (truncated copy?)"
    require(size == expected, name, f"{size} bytes", allowed)


def open_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an ``.npz`` file by name, all read; other members are left alone."""
    require(path.is_file(), str(path), "no such file", "an .npz file")
    try:
        require_bounded(path)
        with zipfile.ZipFile(path) as archive:
            members = [each for each in archive.infolist() if each.filename.endswith(".npy")]
            names = [each.filename.removesuffix(".npy") for each in members]
            require(len({*names}) == len(names), "its names", names, "one for each array")
            return {
                name: _read_member(archive, member)
                for name, member in zip(names, members, strict=True)
            }
    except Exception as error:  # what is no archive can fail in any way
        raise ValueError(
            f"{path} must be a whole .npz file of numbers, got {_explain(path, error)}"
        ) from error


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(member) as file:
        _require_size(member.filename, file, member.file_size)
    with archive.open(member) as file:
        return npy.read_array(file)  # no pickles: its default


def require_bounded(path: Path) -> None:
    """Raise if a zip archive says that it unpacks to more than it may: members that are not
    compressed to the size of the file, the others to ``UNPACKED`` bytes.
    """
    with zipfile.ZipFile(path) as archive:
        sizes = [(each.compress_type, each.file_size) for each in archive.infolist()]
    stored = sum(size for kind, size in sizes if kind == zipfile.ZIP_STORED)
    packed, size = sum(size for _, size in sizes) - stored, path.stat().st_size
    require(stored <= size, "its members", f"{stored:,} bytes", f"within the file's {size:,} bytes")
    allowed = f"of at most {UNPACKED:,} bytes when unpacked (numpy.savez stores larger ones as is)"
    require(packed <= UNPACKED, "its compressed members", f"{packed:,} bytes", allowed)


def _explain(path: Path, error: Exception) -> str:
    """What is wrong with it: numpy takes a file of any other kind for a pickle, and says how to
    load that.
    """
    with path.open("rb") as file:
        return str(error) if file.read(2) == b"PK" else "a file of another kind"

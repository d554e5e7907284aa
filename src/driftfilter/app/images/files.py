"""Files of data, read with care: every refusal says which file and what was expected of it."""

import hashlib
import os
import pickle
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from driftfilter.app.images.arrays import (
    open_array as open_array,
    open_arrays as open_arrays,
)
from driftfilter.base.checks import require

Bytes: TypeAlias = NDArray[np.uint8]
Integers: TypeAlias = NDArray[np.int64]

IMAGES = "uint8 images 0 … 255, channels last [n, h, w, 3]"
SUFFIXES = (".png", ".jpg", ".jpeg")
BETWEEN = "images"  # a folder that some archives have between domain and class, or in a class


def open_images(path: Path, classes: int | None = None) -> tuple[Bytes, Integers | None]:
    """Images [n, h, w, 3] of an ``.npz`` file with "images", and "labels" [n] if it has them."""
    found = open_arrays(path)
    require("images" in found, str(path), list(found), "an .npz with 'images'")
    images = require_images(f"{path}: images", found["images"])
    if "labels" not in found:
        return images, None
    return images, require_labels(f"{path}: labels", found["labels"], len(images), classes)


def list_arrays(path: Path) -> list[str]:
    """Names of the arrays of an ``.npz`` file; none if it is no such file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [each.removesuffix(".npy") for each in archive.namelist()]
    except Exception:  # of whatever kind: who reads it says what is wrong with it
        return []


def holds_clean(path: Path) -> bool:
    """Whether an ``.npz`` file holds clean "images", known to be alone; else it may hold an array
    for each corruption.
    """
    if "images" not in list_arrays(path):
        return False
    others = [
        name for name, array in open_arrays(path).items() if name != "images" and array.ndim == 4
    ]
    require(
        not others,
        str(path),
        ["images", *others],
        "an .npz of clean 'images' alone, or of corruptions by their names",
    )
    return True


def require_images(name: str, array: NDArray[Any], count: int | None = None) -> Bytes:
    """The array, known to hold 8-bit RGB images [n, h, w, 3], as many as ``count``."""
    shape = list(array.shape)
    require(array.dtype == np.uint8, name, f"{array.dtype} {shape}{_range(array)}", IMAGES)
    hint = " (channels first: transpose(0, 2, 3, 1))" if len(shape) == 4 and shape[1] == 3 else ""
    require(len(shape) == 4 and shape[3] == 3 and min(shape) > 0, name, f"{shape}{hint}", IMAGES)
    require(
        count in (None, len(array)),
        name,
        f"{len(array)} images",
        f"{count} images, one for each label",
    )
    require(array[:100].max() > 1, name, "0 … 1 in the first images", f"{IMAGES}, not 0 … 1")
    return array


def _range(array: NDArray[Any]) -> str:
    some = array[:100] if array.ndim and array.size and array.dtype.kind in "fiu" else None
    return "" if some is None else f" from {some.min():g} to {some.max():g}"


def require_labels(
    name: str, array: NDArray[Any], count: int | None = None, classes: int | None = None
) -> Integers:
    """Labels [n] as int64, known to be integers from 0 (to ``classes`` - 1), as many as
    ``count``.
    """
    expected = (
        f"{'n' if count is None else count} integer labels from 0 to "
        f"{'k' if classes is None else classes} - 1"
    )
    require(array.dtype.kind in "iu", name, array.dtype, expected)
    require(
        array.ndim == 1 and len(array) > 0 and count in (None, len(array)),
        name,
        list(array.shape),
        expected,
    )
    low, high = int(array.min()), int(array.max())
    require(
        low >= 0 and (classes is None or high < classes),
        name,
        f"labels from {low} to {high}",
        expected,
    )
    return array.astype(np.int64)


def severity_labels(path: Path) -> Integers:
    """Labels [N] of a file that holds them five times over, once for each severity; CIFAR-100-C has
    100 classes.
    """
    labels = require_labels(str(path), open_array(path), None, 100)
    require(
        len(labels) % 5 == 0,
        str(path),
        f"{len(labels)} labels",
        "5 N labels long, N for each severity",
    )
    blocks: Integers = labels.reshape(5, -1)
    require(
        bool((blocks == blocks[0]).all()),
        str(path),
        "blocks that differ",
        "the same N labels for each of 5 severities",
    )
    return labels[: len(labels) // 5]


_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): lambda text, encoding: text.encode(
        "latin1"
    ),  # how Python 3 writes bytes for Python 2
    **{
        (f"numpy.{core}.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0]
        for core in ("core", "_core")
    },
}


class _Unpickler(pickle.Unpickler):
    """Numbers, strings, lists, dictionaries and numpy arrays; a pickle that names anything else is
    refused, not run.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"a pickle that wants {module}.{name}")
        return _ADMITTED[module, name]


def open_batch(path: Path) -> tuple[Bytes, Integers]:
    """Images [n, 32, 32, 3] and labels [n] of a batch of CIFAR's python version, CIFAR-100's the
    fine ones.
    """
    expected = (
        "a batch of CIFAR-10's or CIFAR-100's python version: a pickled dictionary of data, uint8 "
        "[n, 3072], and n labels"
    )
    require(path.is_file(), str(path), "no such file", expected)
    try:
        with path.open("rb") as file:
            batch = _Unpickler(file, encoding="bytes").load()
        entries = {
            key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()
        }
        given = entries["fine_labels" if "fine_labels" in entries else "labels"]
        data, labels = np.asarray(entries["data"]), np.asarray(given)
    except Exception as error:  # a pickle that is none can fail in any way
        raise ValueError(
            f"{path} must be {expected}, got {type(error).__name__}: {error}"
        ) from error
    require(
        data.dtype == np.uint8 and data.ndim == 2 and data.shape[1] == 3072,
        str(path),
        f"data of {data.dtype} {list(data.shape)}",
        expected,
    )
    images = data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return images, require_labels(
        f"{path}: labels", labels, len(images), 10 if path.name == "test_batch" else 100
    )


def pictures(root: Path) -> Iterator[Path]:
    """Every picture under a folder, found as it is asked for."""
    for folder, folders, names in os.walk(root):
        folders.sort()
        yield from (Path(folder) / name for name in sorted(names) if _is_picture(name))


def _is_picture(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def subfolders(folder: Path) -> list[Path]:
    """The folders in a folder, by name; without those that archives of other systems leave."""
    with os.scandir(folder) as entries:
        names = [each.name for each in entries if each.is_dir()]
    return [folder / name for name in sorted(names) if not name.startswith((".", "__MACOSX"))]


def enter(folder: Path) -> Path:
    """The folder or, if "images" is the only one in it, that: some archives have it in between."""
    inside = subfolders(folder)
    return inside[0] if [each.name for each in inside] == [BETWEEN] else folder


def pictures_in(folder: Path) -> list[str]:
    """Names of the pictures in a folder, sorted."""
    with os.scandir(folder) as entries:
        return sorted(each.name for each in entries if _is_picture(each.name))


def pictures_by_class(folder: Path) -> dict[str, list[Path]]:
    """The pictures under each class of ``folder``/<class>/*.png, classes and pictures by name;
    there may be a folder "images" in between.
    """
    classes = {}
    for entry in subfolders(enter(folder)):
        names = pictures_in(entry)
        inner = entry if names else enter(entry)
        classes[entry.name] = [inner / name for name in names or pictures_in(inner)]
    require(bool(classes), str(folder), "none", "a folder of class folders")
    for name, paths in classes.items():
        require(
            bool(paths),
            str(folder / name),
            "none",
            f"a class folder of pictures ({', '.join(SUFFIXES)})",
        )
    return classes


def picture_size(path: Path) -> tuple[int, int]:
    """Height and width, from the header alone."""
    with _open_picture(path) as image:
        return image.height, image.width


def require_one_size(paths: list[Path]) -> None:
    """Raise unless all pictures are as high and as wide as the first."""
    expected = picture_size(paths[0])
    for path in paths:
        size = picture_size(path)
        require(
            size == expected,
            str(path),
            f"{size[0]}x{size[1]}",
            f"{expected[0]}x{expected[1]} pixels, as {paths[0]} is",
        )


def picture(path: Path) -> Bytes:
    """The pixels [h, w, 3] of a picture, in RGB."""
    with _open_picture(path) as image:
        try:
            return np.asarray(image.convert("RGB"))
        except Exception as error:  # such as a decompression bomb
            raise ValueError(f"{path} must be a whole picture, got {error}") from error


# First bytes of a picture, and those of its last ten among which there must be these.
ENDS = ((b"\xff\xd8\xff", b"\xff\xd9"), (b"\x89PNG\r\n\x1a\n", b"IEND"))


def is_whole(path: Path, decode: bool = False) -> bool:
    """Whether a picture has its beginning and its end; it is unpacked if that is not plain, or to
    ``decode`` all.
    """
    try:
        with path.open("rb") as file:
            start = file.read(8)
            file.seek(max(0, path.stat().st_size - 10))
            end = file.read()
        plain = any(start.startswith(first) and last in end for first, last in ENDS)
        if decode or not plain:
            picture(path)
    except (ValueError, OSError):
        return False
    return True


def _open_picture(path: Path) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "folders of pictures need pillow: pip install 'driftfilter[bench]'"
        ) from error
    try:
        return Image.open(path)
    except Exception as error:
        raise ValueError(f"{path} must be a picture that can be read, got {error}") from error


def digest(paths: Iterable[Path], kind: str = "sha256") -> str:
    """Hash of the contents of files, one after the other."""
    found = hashlib.new(kind)
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                found.update(block)
    return found.hexdigest()

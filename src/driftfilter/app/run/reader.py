"""The user's own samples, batch by batch: arrays, folders of pictures, lines of JSON; and how they
become a model's inputs.
"""

import base64
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftfilter.app.images.arrays import open_array, open_arrays
from driftfilter.app.images.files import (
    Integers,
    picture,
    pictures,
    require_labels,
)
from driftfilter.base.checks import require
from driftfilter.base.inputs import Inputs

Raw: TypeAlias = NDArray[Any] | dict[str, NDArray[Any]]
Shapes: TypeAlias = dict[str, list[int]]  # of one sample, by the name of its parts

CHANNELS = (1, 3, 4)
READ = 1 << 16  # bytes of stdin at a time
EXPECTED = "an .npy or .npz file, a folder of pictures, or - for lines of JSON on stdin"


class Batch(NamedTuple):
    """Samples that come together."""

    rows: int
    read: Callable[[], Raw]  # raises ValueError if they cannot be samples


@final
@dataclass(frozen=True, eq=False)
class StoredFeed:
    """Samples that can be had by number."""

    name: str
    count: int
    take: Callable[[int, int], NDArray[Any]]  # from, to
    labels: Integers | None = None

    def batches(self, size: int, start: int) -> Iterator[Batch]:
        """All samples but the first ``start``."""
        require_covered(self.name, self.count, start)
        pieces = (
            (first, min(first + size, self.count)) for first in range(start, self.count, size)
        )
        return (Batch(last - first, partial(self.take, first, last)) for first, last in pieces)


class Place(NamedTuple):
    """How far stdin was read: the number of the first sample that is still to come, and what was
    read of that and of those after it.
    """

    first: int = 0
    rest: bytes = b""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, for a checkpoint."""
        return {"first": self.first, "rest": base64.b64encode(self.rest).decode()}

    @staticmethod
    def from_dict(name: str, found: Any, rows: int) -> "Place":
        """The place in a checkpoint that covers so many samples."""
        try:
            place = Place(found["first"], base64.b64decode(found["rest"], validate=True))
            if not 0 <= place.first <= rows:
                raise ValueError(f"sample {place.first}")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{name}: stdin must be the number of a sample up to {rows} and the base64 of what "
                f"was read of it, got {str(found)[:80]}"
            ) from error
        return place


@final
class Lines:
    """One sample a line: a JSON array, or an object of arrays by the names that the model takes;
    empty lines are no samples.
    """

    count = None
    labels = None

    def __init__(self, stream: io.BufferedIOBase, integers: frozenset[str] = frozenset()) -> None:
        self.stream, self.integers = stream, integers  # names of the parts that are integers
        self._wait: Callable[[io.BufferedIOBase], bool] = lambda stream: True
        self._first, self._lines, self._given = 0, list[bytes](), 0
        self._half, self._ended = bytearray(), False  # the beginning of the line after those

    def begin(self, place: Place, wait: Callable[[io.BufferedIOBase], bool]) -> None:
        """Have the stream go on after a place, and end if ``wait``, which waits for more to read,
        says so by False.
        """
        self._first, self._wait = place.first, wait
        self._split(place.rest)

    def batches(self, size: int, start: int) -> Iterator[Batch]:
        """All samples but the first ``start`` that were not given before."""
        while self._first + self._given < start:
            if not self._take(min(size, start - self._first - self._given)):
                require_covered("stdin", self._first if self._ended else start, start)
                return
        while some := self._take(size):
            yield Batch(len(some), partial(_decode, some, self.integers))

    def place(self, rows: int, ended: bool) -> Place:
        """What was read beyond the first ``rows`` samples.

        The beginning of a line is among it only if the run has ``ended``: after a kill nobody
        knows with what stdin goes on.
        """
        done = min(rows - self._first, len(self._lines))
        rest = b"".join(line + b"\n" for line in self._lines[done:])
        half = bytes(self._half) if ended else b""
        # A whole array goes on with nothing but the end of its line, which may never come.
        return Place(self._first + done, rest + half + (b"\n" if _is_whole(half) else b""))

    def _take(self, count: int) -> list[bytes]:
        """The next lines, fewer at the end of the stream; none if the wait was ended."""
        del self._lines[: self._given]
        self._first, self._given = self._first + self._given, 0
        while len(self._lines) < count and not self._ended:
            if not self._wait(self.stream):
                return []
            data = self.stream.read1(READ)
            self._split(data or b"\n")  # the last line may have no end
            self._ended = not data
        self._given = min(count, len(self._lines))
        return self._lines[: self._given]

    def _split(self, data: bytes) -> None:
        more, *others = data.split(b"\n")
        self._half += more
        for other in others:
            if self._half.strip():
                self._lines.append(bytes(self._half))
            self._half = bytearray(other)


def _is_whole(line: bytes) -> bool:
    """Whether a line is an array or an object."""
    try:
        return isinstance(json.loads(line), (list, dict))
    except (ValueError, RecursionError):
        return False


Feed: TypeAlias = StoredFeed | Lines


def require_covered(name: str, count: int, start: int) -> None:
    """Raise unless there are as many samples as a checkpoint has seen."""
    require(
        count >= start,
        f"{name}: samples",
        count,
        f"at least the {start} that the checkpoint has seen",
    )


def open_feed(text: str, integers: frozenset[str] = frozenset()) -> Feed:
    """The samples at a path, or on stdin."""
    if text == "-":
        require(sys.stdin is not None, "DATA", text, f"{EXPECTED}; stdin is closed")
        assert isinstance(sys.stdin.buffer, io.BufferedIOBase)
        return Lines(sys.stdin.buffer, integers)
    path = Path(text)
    require(path.exists(), "DATA", text, f"{EXPECTED}; there is no such file")
    if path.is_dir():
        return _folder(path)
    require(path.suffix in (".npy", ".npz"), "DATA", text, EXPECTED)
    if path.suffix == ".npy":
        return _array(text, open_array(path))
    found = open_arrays(path)
    labels = next((found.pop(name) for name in ("labels", "y") if name in found), None)
    key = next(
        (name for name in ("x", "images") if name in found),
        next(iter(found)) if len(found) == 1 else None,
    )
    require(
        key is not None,
        text,
        list(found),
        "an .npz with 'x' or 'images', and 'labels' or 'y' if they are known",
    )
    assert key is not None
    return _array(f"{text}: {key}", found[key], labels)


def _array(name: str, array: NDArray[Any], labels: NDArray[Any] | None = None) -> StoredFeed:
    kind = array.dtype
    fits = kind.kind in "fiub" and kind.itemsize <= 8 and array.ndim > 1 and array.size > 0
    require(fits, name, f"{kind} {list(array.shape)}", "an array of numbers [n, ...]")
    take = (
        _read_rows(name, array)
        if isinstance(array, np.memmap)
        else lambda first, last: array[first:last]
    )
    return StoredFeed(
        name,
        len(array),
        lambda first, last: np.array(take(first, last), kind.newbyteorder("=")),
        None if labels is None else require_labels(f"{name}: labels", labels, len(array)),
    )


def _read_rows(name: str, array: "np.memmap[Any, Any]") -> Callable[[int, int], NDArray[Any]]:
    """Rows of a file: read, for a look at the map of a file that is cut kills the process.

    Only an array in Fortran's order is mapped; there a moment is left after the check.
    """
    assert array.filename is not None
    # Open as long as the process lives, and so the same file whatever its name stands for later.
    number = os.open(array.filename, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    length = array.offset + array.nbytes

    def take(first: int, last: int) -> NDArray[Any]:
        size, whole = os.fstat(number).st_size, f"{length} bytes long, as it was at the beginning"
        require(size >= length, name, f"{size} bytes", whole)
        if not array.flags.c_contiguous:
            return array[first:last]
        found = np.empty((last - first, *array.shape[1:]), array.dtype)
        with open(number, "rb", closefd=False) as file:
            file.seek(array.offset + first * array[:1].nbytes)
            got = file.readinto(found.reshape(-1).view(np.uint8).data)
        require(got == found.nbytes, name, f"{got} bytes from sample {first} on", whole)
        return found

    return take


def _folder(root: Path) -> StoredFeed:
    """All pictures under a folder, by name; their pixels are read when their turn comes."""
    paths = list(pictures(root))
    require(bool(paths), str(root), "none", "a folder of pictures (.png, .jpg, .jpeg)")
    return StoredFeed(
        str(root),
        len(paths),
        lambda first, last: _stack([picture(path) for path in paths[first:last]]),
    )


def _stack(samples: list[NDArray[Any]]) -> NDArray[Any]:
    shapes = list(dict.fromkeys(sample.shape for sample in samples))
    require(
        len(shapes) == 1,
        "samples of a batch",
        f"shapes {[list(shape) for shape in shapes[:3]]}",
        "of one shape",
    )
    return np.stack(samples)


def _decode(lines: list[bytes], integers: frozenset[str]) -> Raw:
    samples = [_parse_line(line, integers) for line in lines]
    keys = list(samples[0])
    alike = all(sample.keys() == samples[0].keys() for sample in samples)
    require(alike, "lines", "parts of other names", f"alike: {keys}, as in the first one")
    parts = {key: _stack([sample[key] for sample in samples]) for key in keys}
    return parts[""] if keys == [""] else parts


def _parse_line(line: bytes, integers: frozenset[str]) -> dict[str, NDArray[Any]]:
    """The parts of one line by name; an array is one part without a name."""
    try:
        found = json.loads(line)
        parts = found if isinstance(found, dict) else {"": found}
        made = {
            key: np.asarray(value, np.int64 if key in integers else np.float64)
            for key, value in parts.items()
        }
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        shown = line[:40].decode(errors="replace").strip()
        raise ValueError(
            f"a line must be a JSON array of numbers, or an object of such, got {shown!r}: {error}"
        ) from error
    require(
        bool(made) and all(value.ndim for value in made.values()),
        "a line",
        line[:40],
        "an array, or an object of arrays",
    )
    return made


def open_labels(path: Path, count: int | None) -> Integers:
    """Labels [n] of an ``.npy`` file, or "labels" or "y" of an ``.npz``; as many as there are
    samples.
    """
    if path.suffix == ".npy":
        return require_labels(str(path), open_array(path), count)
    found = open_arrays(path)
    key = next((name for name in ("labels", "y") if name in found), None)
    require(key is not None, str(path), list(found), "an .npz with 'labels' or 'y'")
    assert key is not None
    return require_labels(f"{path}: {key}", found[key], count)


# From samples to inputs


class Form(NamedTuple):
    """How samples become what the model takes.

    8-bit images become floats in [0, 1], channels first; other floats take the dtype of the model,
    integers stay integers. A ``scale`` makes floats of everything and multiplies them. ``within``:
    bounds of what the model may see.
    """

    dtype: torch.dtype = torch.float32
    device: str | torch.device = "cpu"
    layout: Literal["auto", "first", "last"] = "auto"  # where the channels of an image are
    scale: float | None = None
    within: tuple[float, float] | None = None

    def __call__(self, raw: Raw) -> Inputs:
        if isinstance(raw, dict):
            return {name: self._tensor(name, part) for name, part in raw.items()}
        return self._tensor("inputs", raw)

    def _tensor(self, name: str, array: NDArray[Any]) -> Tensor:
        shape, bytes_ = array.shape, array.dtype == np.uint8 and array.ndim > 2
        last = bytes_ and len(shape) == 4 and shape[3] in CHANNELS and shape[1] not in CHANNELS
        if len(shape) == 4 and (self.layout == "last" or (self.layout == "auto" and last)):
            array = np.moveaxis(array, 3, 1)
        whole = array.dtype.kind in "iu" and not bytes_ and self.scale is None
        # A copy in memory of torch, at a multiple of 64 bytes: the address of numbers can change
        # the last bit of a product.
        tensor = torch.from_numpy(np.ascontiguousarray(array, np.int64 if whole else None)).clone()
        if not whole:
            tensor = tensor.to(self.dtype)
            tensor = (
                tensor * self.scale
                if self.scale is not None
                else tensor / 255
                if bytes_
                else tensor
            )
        self._require_within(name, tensor)
        return tensor.to(self.device)

    def _require_within(self, name: str, tensor: Tensor) -> None:
        if self.within is None:
            return
        outside = (tensor < self.within[0]) | (tensor > self.within[1])
        if outside.any():
            where = outside.nonzero()[0].tolist()
            low, high = self.within
            require(
                False,
                name,
                f"{tensor[tuple(where)].item():g} at index {where}",
                f"in [{low:g}, {high:g}]",
            )


def shapes_of(inputs: Inputs) -> Shapes:
    """The shape of a sample, by the name of its parts."""
    parts = inputs if isinstance(inputs, dict) else {"": inputs}
    return {name: list(part.shape[1:]) for name, part in parts.items()}


def require_shapes(inputs: Inputs, known: Shapes | None) -> None:
    """Raise unless samples are of the shapes of those before."""
    found = shapes_of(inputs)
    if known and found != known:
        one, other = (shapes.get("", shapes) for shapes in (found, known))
        require(False, "samples", f"shape {one}", f"of the shape of those before, {other}")

"""The user's own samples, batch by batch: arrays, folders of pictures, lines of JSON; and how they
become a model's inputs.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeAlias, final

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
        _require_covered(self.name, self.count, start)
        pieces = (
            (first, min(first + size, self.count)) for first in range(start, self.count, size)
        )
        return (Batch(last - first, partial(self.take, first, last)) for first, last in pieces)


@final
@dataclass(frozen=True, eq=False)
class Lines:
    """One sample a line: a JSON array, or an object of arrays by the names that the model takes;
    empty lines are no samples.
    """

    stream: IO[bytes]
    integers: frozenset[str] = frozenset()  # names of the parts that are integers
    count = None
    labels = None

    def batches(self, size: int, start: int) -> Iterator[Batch]:
        """All samples but the first ``start``."""
        lines = (line for line in self.stream if line.strip())
        _require_covered("stdin", sum(1 for _ in islice(lines, start)), start)
        while some := list(islice(lines, size)):
            yield Batch(len(some), partial(_decode, some, self.integers))


Feed: TypeAlias = StoredFeed | Lines


def _require_covered(name: str, count: int, start: int) -> None:
    require(
        count >= start,
        f"{name}: samples",
        count,
        f"at least the {start} that the checkpoint has seen",
    )


def open_feed(text: str, integers: frozenset[str] = frozenset()) -> Feed:
    """The samples at a path, or on stdin."""
    if text == "-":
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
    return StoredFeed(
        name,
        len(array),
        lambda first, last: np.array(array[first:last], kind.newbyteorder("=")),
        None if labels is None else require_labels(f"{name}: labels", labels, len(array)),
    )


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

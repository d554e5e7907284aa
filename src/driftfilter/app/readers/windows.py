"""Windows of sensors, or other arrays of numbers: inputs [n, ...] and labels [n], by domain."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from driftfilter.app.images.files import (
    Integers,
    digest,
    open_array,
    open_arrays,
    require_labels,
    subfolders,
)
from driftfilter.app.readers.rows import STREAM
from driftfilter.app.readers.stored import Raw, Rows, Stored, shift_of
from driftfilter.base.checks import require

INPUTS, LABELS, DOMAINS = "inputs", "labels", "domains"
EXPECTED = "floating-point or whole numbers [n, ...], but no 8-bit ones, which are pixels"


def holds_windows(path: Path) -> bool:
    """Whether a folder has inputs.npy, itself or for each domain."""
    return path.is_dir() and any(
        (folder / f"{INPUTS}.npy").is_file() for folder in (path, *subfolders(path))
    )


def open_windows(path: Path, severity: int = 5) -> Stored:
    """Arrays of a folder with inputs.npy and labels.npy (or with a folder for each domain that has
    them), memory-mapped; or of an ``.npz`` with "inputs", "labels" and perhaps "domains" [n].
    """
    parts = _open_archive(path) if path.is_file() else _open_folders(path)
    shapes = {name: list(inputs.shape[1:]) for name, (inputs, _) in parts.items()}
    first = next(iter(shapes))
    for name, shape in shapes.items():
        allowed = f"{shapes[first]} for each sample, as those of {first!r}"
        require(shape == shapes[first], f"{path}: inputs of {name!r}", shape, allowed)
    sizes = [len(labels) for _, labels in parts.values()]
    starts = dict(zip(parts, np.cumsum([0, *sizes]).tolist(), strict=False))
    return Stored(
        "windows",
        path,
        torch.from_numpy(np.concatenate([labels for _, labels in parts.values()])),
        {
            shift_of(name, severity): _read_from(f"{path} ({name})", inputs, starts[name])
            for name, (inputs, _) in parts.items()
        },
        lambda: digest([path] if path.is_file() else sorted(path.rglob("*.npy"))),
        {
            name: torch.arange(starts[name], starts[name] + size)
            for name, size in zip(parts, sizes, strict=True)
        },
    )


def _read_from(name: str, inputs: NDArray[Any], start: int) -> Rows:
    """Samples of one domain, whose first has the number ``start``: in 32 bits if they are no whole
    numbers.
    """

    def read(index: Integers) -> Raw:
        own = index - start
        right = bool(((own >= 0) & (own < len(inputs))).all())
        last = start + len(inputs) - 1
        require(right, "index", index.tolist(), f"samples of the domain: {start} to {last}")
        found = inputs[own].astype(np.float32 if inputs.dtype.kind == "f" else np.int64)
        bad = np.flatnonzero(~np.isfinite(found).reshape(len(found), -1).all(1))
        if len(bad):
            raise ValueError(f"{name}: {INPUTS} must be finite, got others in row {own[bad[0]]}")
        return found

    return read


def _open_folders(root: Path) -> dict[str, tuple[NDArray[Any], Integers]]:
    folders = (
        {STREAM: root}
        if (root / f"{INPUTS}.npy").is_file()
        else {each.name: each for each in subfolders(root)}
    )
    return {
        name: _check(
            str(folder), open_array(folder / f"{INPUTS}.npy"), open_array(folder / f"{LABELS}.npy")
        )
        for name, folder in folders.items()
    }


def _open_archive(path: Path) -> dict[str, tuple[NDArray[Any], Integers]]:
    found = open_arrays(path)
    for name in (INPUTS, LABELS):
        require(name in found, str(path), list(found), f"an .npz with {INPUTS!r} and {LABELS!r}")
    inputs, labels = _check(str(path), found[INPUTS], found[LABELS])
    names = found.get(DOMAINS)
    if names is None:
        return {STREAM: (inputs, labels)}
    require(names.shape == labels.shape, f"{path}: {DOMAINS}", list(names.shape), "[n]")
    texts = names.astype(str)
    return {
        str(name): (inputs[texts == name], labels[texts == name])
        for name in dict.fromkeys(texts.tolist())
    }


def _check(name: str, inputs: NDArray[Any], labels: NDArray[Any]) -> tuple[NDArray[Any], Integers]:
    kind = f"{inputs.dtype} {list(inputs.shape)}"
    right = inputs.dtype.kind in "fiu" and inputs.dtype != np.uint8 and inputs.ndim > 1
    require(right and len(inputs) > 0, f"{name}: {INPUTS}", kind, EXPECTED)
    return inputs, require_labels(f"{name}: {LABELS}", labels, len(inputs))

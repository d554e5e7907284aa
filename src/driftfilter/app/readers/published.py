"""Corrupted images in arrays: CIFAR-10-C and CIFAR-100-C as published, and ``.npz`` files."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from driftfilter.app.corruptions import CORRUPTIONS, EXTRA, SEVERITIES
from driftfilter.app.images.files import (
    Bytes,
    Integers,
    digest,
    open_array,
    open_arrays,
    require_images,
    require_labels,
    severity_labels,
)
from driftfilter.app.readers.stored import CLEAN, Images, Rows, Shift, Stored, shift_of
from driftfilter.base.checks import nearest, require


def open_published(
    folder: Path, clean: Images | None = None, names: Collection[str] | None = None
) -> Stored:
    """CIFAR-10-C or CIFAR-100-C as published: <name>.npy [5N, 32, 32, 3] and labels.npy [5N],
    severity s in rows (s-1)N … sN.

    All of ``names`` must be there, and no other is read; None: the 15, and of the four extra
    corruptions what is there. ``clean``: the images they were made of, for "clean".
    """
    known = [*CORRUPTIONS, *EXTRA]
    for name in names or ():
        require(
            name in (CLEAN.corruption, *known),
            "shift",
            name,
            f"one of {', '.join(known)}{nearest(name, known)}",
        )
    path = folder / "labels.npy"
    labels = severity_labels(path)
    there = [name for name in known if name in CORRUPTIONS or (folder / f"{name}.npy").is_file()]
    found = there if names is None else [name for name in names if name != CLEAN.corruption]
    paths = {name: folder / f"{name}.npy" for name in found}
    images = _require_alike(
        {str(each): open_array(each) for each in paths.values()}, 5 * len(labels)
    )
    rows = {
        Shift(name, each): _block(block, each, len(labels))
        for name, block in zip(found, images, strict=True)
        for each in SEVERITIES
    }
    return Stored(
        "CIFAR-10-C" if labels.max() < 10 else "CIFAR-100-C",
        folder,
        torch.from_numpy(labels),
        rows | _clean_rows(clean, labels),
        lambda: digest([path, *paths.values()]),
    )


def _block(images: Bytes, severity: int, count: int) -> Rows:
    return lambda index: images[(severity - 1) * count + index]


def _clean_rows(clean: Images | None, labels: Integers) -> dict[Shift, Rows]:
    """The first N clean images as rows, once their labels are known to be the same."""
    if clean is None:
        return {}
    require(
        np.array_equal(clean.labels[: len(labels)].cpu().numpy(), labels),
        "clean.labels",
        "others",
        f"the {len(labels)} labels of the shifted images, in their order",
    )
    images = (255 * clean.images[: len(labels)]).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    return {CLEAN: lambda index: images[index]}


def open_npz(file: Path, clean: Images | None = None, severity: int = 5) -> Stored:
    """Images of an ``.npz`` file: one array [N, h, w, 3] for each corruption, all of this severity,
    and "labels" [N].

    If it has no labels they are those of the first N images of ``clean``, of which the arrays were
    made.
    """
    found = open_arrays(file)
    inside = found.pop("labels", None)
    require(bool(found), str(file), "none", "an .npz with an array of images for each corruption")
    images = _require_alike({f"{file}: {name}": array for name, array in found.items()})
    known = _find_labels(file, inside, clean, len(images[0]))
    rows = {
        shift_of(name, severity): array.__getitem__
        for name, array in zip(found, images, strict=True)
    }
    return Stored(
        "arrays",
        file,
        torch.from_numpy(known),
        _clean_rows(clean, known) | rows,
        lambda: digest([file]),
    )


def _require_alike(arrays: Mapping[str, NDArray[Any]], count: int | None = None) -> list[Bytes]:
    """Arrays of images [n, h, w, 3] by name, known to be of one shape."""
    images = [require_images(name, array, count) for name, array in arrays.items()]
    for name, array in zip(arrays, images, strict=True):
        require(
            array.shape == images[0].shape,
            name,
            list(array.shape),
            f"{list(images[0].shape)}, as {next(iter(arrays))} is",
        )
    return images


def _find_labels(
    file: Path, inside: NDArray[Any] | None, clean: Images | None, count: int
) -> Integers:
    """Labels [count] of an ``.npz`` file: those inside, else those of the clean images."""
    if inside is not None:
        return require_labels(f"{file}: labels", inside, count)
    if clean is None:
        raise ValueError(f'{file} must be given with labels: "labels" inside, or clean images')
    return require_labels("clean.labels", clean.labels[:count].cpu().numpy(), count)

"""Folders of pictures: corruptions (ImageNet-C, Tiny-ImageNet-C), domains (PACS, Office,
DomainNet), and class folders alone (ImageNet, and its relatives -R, -A, -V2 and -Sketch).
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from driftfilter.app.corruptions import CORRUPTIONS, EXTRA
from driftfilter.app.images.files import (
    Integers,
    picture,
    pictures,
    pictures_by_class,
    require_one_size,
    subfolders,
)
from driftfilter.app.readers.stored import CLEAN, Raw, Rows, Shift, Stored, shift_of
from driftfilter.base.checks import nearest, require

ANNOTATIONS = "val_annotations.txt"  # of Tiny-ImageNet's validation pictures
ClassNumbers: TypeAlias = Mapping[str, int]  # by the name of a class folder


class Labelled(NamedTuple):
    """A picture and the name of its class."""

    name: str
    path: Path


def open_folders(
    root: Path,
    severity: int = 5,
    numbers: ClassNumbers | None = None,
    fitted: bool = False,
) -> Stored:
    """Pictures in folders: root/<shift>/<class>/*.png, root/<shift>/<severity>/<class>/*.png (also
    with a folder for each group of corruptions, as ImageNet-C has) or, clean, root/<class>/*.png.

    Shifts that hold the same pictures by class and name show the same samples, as corruptions of
    them do. Otherwise each is a domain with samples of its own. ``numbers`` are the labels of class
    folders. Without them a folder whose name is a number has that label, and others count from 0 by
    name. Samples are shuffled once, always alike, so that the first so many are of all classes.
    ``severity`` is that of shifts without one. Pictures must be of one size unless they are
    ``fitted`` to one later; their pixels are read when asked for. The hash is of names and sizes.
    """
    found = {
        shift: find_pictures(folder) for shift, folder in _shift_folders(root, severity).items()
    }
    if not fitted:
        require_one_size([each.path for several in found.values() for each in several])
    known = number_classes(
        root, {each.name for several in found.values() for each in several}, numbers
    )
    if _are_copies(root, found):
        return _open_copies(root, found, known)
    return _open_domains(root, found, known)


def number_classes(root: Path, names: set[str], numbers: ClassNumbers | None) -> dict[str, int]:
    """Labels by the name of the class."""
    if numbers is not None:
        for name in sorted(names):
            require(
                name in numbers,
                f"class folder of {root}",
                name,
                f"one of the {len(numbers)} of --classes{nearest(name, list(numbers))}",
            )
        return {name: numbers[name] for name in sorted(names)}
    if all(name.isdecimal() for name in names):
        return {name: int(name) for name in sorted(names, key=int)}
    return {name: number for number, name in enumerate(sorted(names))}


def read_classes(path: Path) -> dict[str, int]:
    """Labels by the name of a class folder, from a file of names in the order of the labels: a line
    each (what follows a space is left out), a JSON list, or a JSON object {name: label} or
    {label: [name, …]}.
    """
    require(path.is_file(), "--classes", str(path), "a file that is there")
    try:
        text = path.read_text(encoding="utf-8-sig")
        found = json.loads(text) if text.lstrip()[:1] in ("[", "{") else None
        if found is None:
            found = [line.split()[0] for line in text.splitlines() if line.strip()]
        if isinstance(found, list):
            pairs = [(str(name), number) for number, name in enumerate(found)]
        elif all(isinstance(value, list) for value in found.values()):
            pairs = [(str(value[0]), int(key)) for key, value in found.items()]
        else:
            pairs = [(str(key), int(value)) for key, value in found.items()]
    except (ValueError, TypeError, IndexError, OSError) as error:
        raise ValueError(
            f"--classes {path} must be names of class folders in the order of their labels, a line "
            f"each or as JSON, got {error}"
        ) from error
    names = [name for name, _ in pairs]
    require(
        bool(names) and len(set(names)) == len(names) and min(number for _, number in pairs) >= 0,
        f"--classes {path}",
        names[:3],
        "names of class folders, each once, with labels from 0",
    )
    return dict(pairs)


def find_pictures(folder: Path) -> list[Labelled]:
    """The pictures of a folder of class folders, or of Tiny-ImageNet's val/, by class and name."""
    if (folder / ANNOTATIONS).is_file():
        return _read_annotations(folder)
    return [
        Labelled(name, path) for name, paths in pictures_by_class(folder).items() for path in paths
    ]


def _read_annotations(folder: Path) -> list[Labelled]:
    """Tiny-ImageNet's validation pictures: images/*.JPEG, and a line "picture class …" for each."""
    file = folder / ANNOTATIONS
    lines = [line.split() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    expected = "a line for each picture of images/: its name, and its class"
    require(bool(lines) and all(len(line) > 1 for line in lines), str(file), "others", expected)
    found = [Labelled(name, folder / "images" / path) for path, name, *_ in lines]
    missing = [each.path.name for each in found if not each.path.is_file()]
    require(not missing, str(file), f"no picture for {missing[:3]}", expected)
    return sorted(found)


def _are_copies(root: Path, found: Mapping[Shift, list[Labelled]]) -> bool:
    """Whether all shifts hold the same pictures by class and name; corruptions must."""
    corrupted = all(shift.corruption in ("clean", *CORRUPTIONS, *EXTRA) for shift in found)
    first = [(each.name, each.path.stem) for each in next(iter(found.values()))]
    for shift, several in found.items():
        own = [(each.name, each.path.stem) for each in several]
        if own == first:
            continue
        if not corrupted:
            return False
        apart = ["/".join(each) for each in sorted({*own} ^ {*first})]
        require(
            False, f"{root}: {shift}", apart[:3], "the same pictures by name as in the first shift"
        )
    return True


def _open_copies(root: Path, found: Mapping[Shift, list[Labelled]], known: ClassNumbers) -> Stored:
    """The same samples under every shift."""
    labels = np.array([known[each.name] for each in next(iter(found.values()))])
    order = np.random.default_rng(0).permutation(len(labels))
    rows = {
        shift: _read_pictures([several[sample].path for sample in order])
        for shift, several in found.items()
    }
    return Stored(
        "folders", root, torch.from_numpy(labels[order]), rows, lambda: _hash_names(root, found)
    )


def _open_domains(root: Path, found: Mapping[Shift, list[Labelled]], known: ClassNumbers) -> Stored:
    """Samples of its own for every shift, numbered through."""
    every = [each for several in found.values() for each in several]
    random, first, order = np.random.default_rng(0), 0, list[Integers]()
    members = {}
    for shift, several in found.items():
        order.append(first + random.permutation(len(several)))
        members[shift.corruption] = torch.arange(first, first + len(several))
        first += len(several)
    sorted_out = [every[sample] for sample in np.concatenate(order)]
    read = _read_pictures([each.path for each in sorted_out])
    return Stored(
        "domains",
        root,
        torch.tensor([known[each.name] for each in sorted_out]),
        dict.fromkeys(found, read),
        lambda: _hash_names(root, found),
        members,
    )


def _shift_folders(root: Path, severity: int) -> dict[Shift, Path]:
    """Folder of the class folders of each shift, found from how deep the pictures lie."""
    if (root / ANNOTATIONS).is_file():
        return {CLEAN: root}
    first = next(pictures(root), None)
    depth = 0 if first is None else len(first.relative_to(root).parts) - 1
    expected = (
        "CIFAR-10-C (<corruption>.npy), CIFAR-10's python version (test_batch), or pictures in "
        "root/<shift>/<class>/*.png, "
        "root/<shift>/<severity>/<class>/*.png or root/<class>/*.png"
    )
    require(
        depth in (1, 2, 3, 4), str(root), "no picture" if first is None else str(first), expected
    )
    if depth == 1:
        return {CLEAN: root}
    if depth == 2:
        return {shift_of(each.name, severity): each for each in subfolders(root)}
    shifts = subfolders(root)
    if depth == 4:  # a group of corruptions, such as noise/
        shifts = [each for group in shifts for each in subfolders(group)]
    levels = [level for each in shifts for level in subfolders(each)]
    for level in levels:
        allowed = "0" if level.parent.name == CLEAN.corruption else "12345"
        require(
            level.name in tuple(allowed),
            str(level),
            level.name,
            f"named after a severity, one of {', '.join(allowed)}",
        )
    return {Shift(level.parent.name, int(level.name)): level for level in levels}


def _read_pictures(paths: list[Path]) -> Rows:
    def read(index: Integers) -> Raw:
        return [picture(paths[each]) for each in index]

    return read


def _hash_names(root: Path, found: Mapping[Shift, Iterable[Labelled]]) -> str:
    lines = [
        f"{each.path.relative_to(root).as_posix()} {each.path.stat().st_size}"
        for several in found.values()
        for each in several
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()

"""Folders of pictures: corruptions (ImageNet-C, Tiny-ImageNet-C), domains (PACS, Office,
DomainNet), and class folders alone (ImageNet, and its relatives -R, -A, -V2 and -Sketch).
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from driftfilter.app.corruptions import CORRUPTIONS, EXTRA
from driftfilter.app.images.files import (
    BETWEEN,
    Integers,
    enter,
    picture,
    pictures,
    pictures_by_class,
    require_one_size,
    subfolders,
)
from driftfilter.app.readers.classes import ClassNumbers, list_counted, number_classes
from driftfilter.app.readers.stored import (
    CLEAN,
    Raw,
    Rows,
    Shift,
    Stored,
    require_known,
    shift_of,
)
from driftfilter.app.readers.together import do_together
from driftfilter.base.checks import require

ANNOTATIONS = "val_annotations.txt"  # of Tiny-ImageNet's validation pictures
EXPECTED = (
    "a folder of <corruption>.npy (CIFAR-10-C), test_batch (CIFAR-10's python version), inputs.npy "
    "(windows) or pictures in root/<shift>/<class>/*.png, root/<shift>/<severity>/<class>/*.png or "
    "root/<class>/*.png (driftfilter data lists all)"
)


class Labelled(NamedTuple):
    """A picture and the name of its class."""

    name: str
    path: Path


def open_folders(
    root: Path,
    severity: int = 5,
    numbers: ClassNumbers | None = None,
    fitted: bool = False,
    names: Collection[str] | None = None,
    severities: Collection[int] | None = None,
) -> Stored:
    """Pictures in folders: root/<shift>/<class>/*.png, root/<shift>/<severity>/<class>/*.png (also
    with a folder for each group of corruptions, as ImageNet-C has) or, clean, root/<class>/*.png. A
    folder "images" above or below <class> is passed over.

    Shifts that hold the same pictures by class and name show the same samples, as corruptions of
    them do. Otherwise each is a domain with samples of its own. ``numbers`` are the labels of class
    folders. Without them a folder whose name is a number has that label, and others count from 0 by
    name. Samples are shuffled once, always alike, so that the first so many are of all classes.
    ``severity`` is that of shifts without one. Only ``names`` and ``severities`` are looked into
    (None: all; clean pictures always), and all of them must be there. Pictures must be of one size
    unless they are ``fitted`` to one later; their pixels are read when asked for. The hash is of
    names and sizes.
    """
    folders = find_shifts(root, severity)
    found = {
        shift: find_pictures(folder)
        for shift, folder in _choose(root, folders, names, severities).items()
    }
    if not fitted:
        require_one_size([each.path for several in found.values() for each in several])
    # A class may lie in a domain that nobody asked for.
    one_each = {shift.corruption: folder for shift, folder in folders.items() if shift not in found}
    classes = {each.name for several in found.values() for each in several}
    classes |= {name for folder in one_each.values() for name in _list_classes(folder)}
    known = number_classes(root, classes, numbers)
    made = _open_copies if _are_copies(root, found) else _open_domains
    return made(root, found, known, list_counted(known, numbers))


def _choose(
    root: Path,
    folders: Mapping[Shift, Path],
    names: Collection[str] | None,
    severities: Collection[int] | None,
) -> dict[Shift, Path]:
    """The folders asked for, known to be there; of clean pictures alone all can be made."""
    if set(folders) == {CLEAN}:
        return dict(folders)
    every = dict.fromkeys(shift.corruption for shift in folders)
    asked = [name for name in (every if names is None else names) if name != CLEAN.corruption]
    if severities is not None or names is not None:
        if CLEAN.corruption in (names or ()):
            require_known(CLEAN, folders, f" in {root}")
        for name in asked:
            own = [shift.severity for shift in folders if shift.corruption == name]
            for level in own[:1] if severities is None else severities:
                require_known(Shift(name, level), folders, f" in {root}")
    return {
        shift: folder
        for shift, folder in folders.items()
        if shift == CLEAN
        or (shift.corruption in asked and (severities is None or shift.severity in severities))
    }


def _list_classes(folder: Path) -> list[str]:
    return [each.name for each in subfolders(enter(folder))]


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
    found = [Labelled(name, folder / BETWEEN / path) for path, name, *_ in lines]
    missing = [each.path.name for each in found if not each.path.is_file()]
    require(not missing, str(file), f"no picture for {missing[:3]}", expected)
    return sorted(found)


def _are_copies(root: Path, found: Mapping[Shift, list[Labelled]]) -> bool:
    """Whether all shifts hold the same pictures by class and name; corruptions must, and so must
    the severities of any shift.
    """
    names = [shift.corruption for shift in found]
    must = len(set(names)) < len(names) or set(names) <= {"clean", *CORRUPTIONS, *EXTRA}
    first = [(each.name, each.path.stem) for each in next(iter(found.values()))]
    for shift, several in found.items():
        own = [(each.name, each.path.stem) for each in several]
        if own == first:
            continue
        if not must:
            return False
        apart = ["/".join(each) for each in sorted({*own} ^ {*first})]
        require(
            False, f"{root}: {shift}", apart[:3], "the same pictures by name as in the first shift"
        )
    return True


def _open_copies(
    root: Path,
    found: Mapping[Shift, list[Labelled]],
    known: ClassNumbers,
    counted: tuple[str, ...] | None,
) -> Stored:
    """The same samples under every shift."""
    labels = np.array([known[each.name] for each in next(iter(found.values()))])
    order = np.random.default_rng(0).permutation(len(labels))
    rows = {
        shift: read_pictures([several[sample].path for sample in order])
        for shift, several in found.items()
    }
    return Stored(
        "folders",
        root,
        torch.from_numpy(labels[order]),
        rows,
        lambda: _hash_names(root, found),
        counted=counted,
    )


def _open_domains(
    root: Path,
    found: Mapping[Shift, list[Labelled]],
    known: ClassNumbers,
    counted: tuple[str, ...] | None,
) -> Stored:
    """Samples of its own for every shift, numbered through."""
    every = [each for several in found.values() for each in several]
    random, first, order = np.random.default_rng(0), 0, list[Integers]()
    members = {}
    for shift, several in found.items():
        order.append(first + random.permutation(len(several)))
        members[shift.corruption] = torch.arange(first, first + len(several))
        first += len(several)
    sorted_out = [every[sample] for sample in np.concatenate(order)]
    read = read_pictures([each.path for each in sorted_out])
    return Stored(
        "domains",
        root,
        torch.tensor([known[each.name] for each in sorted_out]),
        dict.fromkeys(found, read),
        lambda: _hash_names(root, found),
        members,
        counted=counted,
    )


def find_shifts(root: Path, severity: int = 5) -> dict[Shift, Path]:
    """Folder of the class folders of each shift, found from how deep the pictures lie."""
    if (root / ANNOTATIONS).is_file():
        return {CLEAN: root}
    first = next(pictures(root), None)
    above = () if first is None else first.relative_to(root).parts[:-1]
    depth = len([name for name in above if name != BETWEEN])
    require(
        depth in (1, 2, 3, 4), str(root), "no picture" if first is None else str(first), EXPECTED
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


def read_pictures(paths: list[Path]) -> Rows:
    """The pictures at these paths, by their numbers; several are unpacked at once."""

    def read(index: Integers) -> Raw:
        return do_together(picture, [paths[each] for each in index])

    return read


def _hash_names(root: Path, found: Mapping[Shift, Iterable[Labelled]]) -> str:
    lines = [
        f"{each.path.relative_to(root).as_posix()} {each.path.stat().st_size}"
        for several in found.values()
        for each in several
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()

"""Data sets of arrays, rows and windows: how much a path resembles one, and what is missing or
damaged there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

import numpy as np

from driftfilter.app.corruptions import CORRUPTIONS, EXTRA
from driftfilter.app.datasets.findings import Finding, Look, hash_of, name_some, ratio, try_to
from driftfilter.app.images.files import (
    open_array,
    open_batch,
    require_images,
    severity_labels,
    subfolders,
)
from driftfilter.app.readers.cells import locate_picture
from driftfilter.app.readers.published import open_published
from driftfilter.app.readers.rows import read_rows
from driftfilter.app.readers.windows import holds_windows, open_windows
from driftfilter.base.checks import require


@final
@dataclass(frozen=True)
class CorruptedArrays:
    """CIFAR-10-C or -100-C: <corruption>.npy, and labels.npy five times over."""

    classes: int
    images: int = 10_000

    def resembles(self, path: Path) -> float:
        if not path.is_dir() or not any(path.glob("*.npy")):
            return 0
        named = [name for name in (*CORRUPTIONS, *EXTRA) if (path / f"{name}.npy").is_file()]
        if not named and not (path / "labels.npy").is_file():
            return 0
        try:
            highest = int(severity_labels(path / "labels.npy").max())
        except (ValueError, OSError):
            highest = 0
        return 1 if (highest < 10) == (self.classes <= 10) else 0.5

    def check(self, path: Path, look: Look) -> Iterator[Finding]:
        labels = path / "labels.npy"
        yield try_to(
            labels.name,
            lambda: (
                f"{5 * len(severity_labels(labels))} labels, five times the same" + hash_of(labels)
            ),
        )
        for name in (*CORRUPTIONS, *EXTRA):
            file = path / f"{name}.npy"
            if name in CORRUPTIONS or file.is_file():
                yield try_to(file.name, partial(self._describe, file))
            else:
                yield Finding(file.name, True, "not there, and not needed")
        yield try_to("all together", lambda: self._check_together(path))

    def _describe(self, file: Path) -> str:
        array = require_images(str(file), open_array(file))
        return f"{array.dtype} {list(array.shape)}{hash_of(file)}"

    def _check_together(self, path: Path) -> str:
        labels = open_published(path).labels
        found = f"{len(labels)} images at each severity, of {len(labels.unique())} classes"
        whole = len(labels) == self.images and len(labels.unique()) == self.classes
        require(whole, str(path), found, f"{self.images} images of {self.classes} classes")
        return found


@final
@dataclass(frozen=True)
class Batch:
    """The test images of CIFAR's python version."""

    file: str
    images: int = 10_000

    def resembles(self, path: Path) -> float:
        return float((path / self.file).is_file())

    def check(self, path: Path, look: Look) -> Iterator[Finding]:
        yield try_to(self.file, lambda: self._describe(path / self.file))

    def _describe(self, file: Path) -> str:
        count = len(open_batch(file)[1])
        require(count == self.images, str(file), f"{count} images", f"{self.images} images long")
        return f"{count} images{hash_of(file)}"


@final
@dataclass(frozen=True)
class Table:
    """A file of rows with these columns, itself or in a folder.

    ``pattern`` names the picture of a row (``Columns.path``), "" if there is none.
    """

    file: str
    columns: tuple[str, ...]
    rows: int
    pattern: str = ""

    def resembles(self, path: Path) -> float:
        file = self._find(path)
        if not file.is_file() or file.suffix != Path(self.file).suffix:
            return 0
        try:
            names, _ = read_rows(file)
        except (ValueError, ImportError):
            return float(file.name == self.file)
        share = len({*names} & {*self.columns}) / len(self.columns)
        return share if share == 1 else share / 2  # others have some of these names, too

    def _find(self, path: Path) -> Path:
        return path / self.file if path.is_dir() else path

    def check(self, path: Path, look: Look) -> Iterator[Finding]:
        file = self._find(path)
        yield try_to(file.name, lambda: self._count(file))
        if self.pattern:
            yield try_to("pictures", lambda: self._check_pictures(file, look))

    def _count(self, file: Path) -> str:
        names, rows = read_rows(file)
        missing = [name for name in self.columns if name not in names]
        require(not missing, f"{file}: columns", names, f"these and {name_some(missing)}")
        count = sum(1 for _ in rows)
        require(count == self.rows, str(file), f"{count} rows", f"{self.rows} rows long")
        return f"{count} rows{hash_of(file)}"

    def _check_pictures(self, file: Path, look: Look) -> str:
        names, rows = read_rows(file)
        places = {name: number for number, name in enumerate(names)}
        paths = [file.parent / locate_picture(self.pattern, places, row) for row in rows]
        missing = [path for path in paths if not path.is_file()]
        require(
            not missing, str(file), f"none for {name_some(missing)}", "a list of pictures beside it"
        )
        damaged = look.find_damaged(paths)
        require(not damaged, str(file), f"damaged: {name_some(damaged)}", "of whole pictures")
        return f"{len(paths)}"


@final
@dataclass(frozen=True)
class Windows:
    """A folder for each domain with inputs.npy [n, *shape] and labels.npy [n]."""

    domains: int
    samples: int
    shape: tuple[int, ...]
    classes: int

    def resembles(self, path: Path) -> float:
        if not holds_windows(path) or not subfolders(path):
            return 0
        try:
            shape = open_array(subfolders(path)[0] / "inputs.npy").shape[1:]
        except ValueError:
            shape = ()
        return ratio(len(subfolders(path)), self.domains) if shape in ((), self.shape) else 0

    def check(self, path: Path, look: Look) -> Iterator[Finding]:
        for folder in subfolders(path):
            yield try_to(folder.name, partial(self._describe, folder))
        yield try_to("all together", lambda: self._check_together(path))

    def _describe(self, folder: Path) -> str:
        found = open_windows(folder)
        inputs = open_array(folder / "inputs.npy")
        require(
            inputs.shape[1:] == self.shape, str(folder), list(inputs.shape), f"[n, *{self.shape}]"
        )
        require(bool(np.isfinite(inputs).all()), str(folder), "others", "finite")
        return f"{len(found.labels)} windows"

    def _check_together(self, path: Path) -> str:
        found = open_windows(path)
        classes = int(found.labels.max()) + 1
        text = f"{len(found.shifts)} domains, {len(found.labels)} windows, {classes} classes"
        wanted = f"{self.domains} domains, {self.samples} windows, {self.classes} classes"
        require(text == wanted, str(path), text, f"whole: {wanted}")
        return text

"""The samples of rows, from the cells that are no label: numbers, texts, pictures or arrays."""

import math
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, final

import numpy as np
from numpy.typing import NDArray

from driftfilter.app.images.files import require_one_size
from driftfilter.app.readers.columns import NAMED, Columns
from driftfilter.app.readers.folders import read_pictures
from driftfilter.app.readers.rows import Row
from driftfilter.app.readers.stored import Rows
from driftfilter.base.checks import require


class _Samples(Protocol):
    def add(self, row: Row) -> None: ...

    def finish(self, fitted: bool) -> Rows: ...


def choose_samples(path: Path, names: list[str], columns: Columns, first: Row) -> _Samples:
    """What takes the samples of rows like the first, one after the other."""
    if columns.path:
        return _Pictures(path, names, columns.path)
    if columns.text:
        return _Texts(path, names, columns.text)
    parts = [name for name in names if name not in columns.ignored()]
    require(bool(parts), str(path), names, "columns of numbers, beside the labels")
    if any(isinstance(first.cells[names.index(name)], list) for name in parts):
        return _Arrays(path, names, parts)
    return _Numbers(path, names, parts)


@final
class _Numbers:
    """Columns of finite numbers [n, columns]."""

    def __init__(self, path: Path, names: list[str], parts: list[str]) -> None:
        self._path, self._parts = path, parts
        self._places = [names.index(name) for name in parts]
        self._values, self._rows = array("f"), array("q")

    def add(self, row: Row) -> None:
        cells = [row.cells[place] for place in self._places]
        try:
            values = array("f", map(float, cells))
        except (ValueError, TypeError, OverflowError):
            bad = next(place for place, cell in enumerate(cells) if not _fits(cell))
            self._refuse(row.number, bad, cells)
        self._values += values
        self._rows.append(row.number)

    def _refuse(self, number: int, place: int, cells: Sequence[Any]) -> NoReturn:
        name = self._parts[place]
        raise ValueError(
            f"{self._path}: column {name!r} must hold finite numbers, got {cells[place]!r} in row "
            f"{number} (--columns drop={name} leaves it out)"
        )

    def finish(self, fitted: bool) -> Rows:
        values = np.array(self._values, np.float32).reshape(-1, len(self._parts))
        bad = np.argwhere(~np.isfinite(values))
        if len(bad):
            row, place = bad[0]
            self._refuse(self._rows[row], int(place), values[row].tolist())
        return values.__getitem__


def _fits(cell: Any) -> bool:
    try:
        array("f", [float(cell)])
    except (ValueError, TypeError, OverflowError):
        return False
    return True


@final
class _Texts:
    """A column of texts."""

    def __init__(self, path: Path, names: list[str], column: str) -> None:
        self._title, self._place = f"{path}: {column}", names.index(column)
        self._texts: list[str] = []

    def add(self, row: Row) -> None:
        text = row.cells[self._place]
        if not isinstance(text, str):
            raise ValueError(f"{self._title} must be texts, got {text!r} in row {row.number}")
        self._texts.append(text)

    def finish(self, fitted: bool) -> Rows:
        texts = self._texts
        return lambda index: [texts[each] for each in index]


def locate_picture(pattern: str, places: Mapping[str, int], row: Row) -> str:
    """The path of a row's picture: a pattern filled in with cells, which lie at ``places``."""
    return NAMED.sub(lambda found: str(row.cells[places[found[1]]]), pattern)


@final
class _Pictures:
    """Pictures by their paths: a column, or a pattern with columns in it."""

    def __init__(self, path: Path, names: list[str], pattern: str) -> None:
        self._folder, self._list = path.parent, path
        self._pattern = pattern if NAMED.search(pattern) else f"{{{pattern}}}"
        self._places = {name: names.index(name) for name in NAMED.findall(self._pattern)}
        self._paths: list[Path] = []

    def add(self, row: Row) -> None:
        name = locate_picture(self._pattern, self._places, row)
        path = self._folder / name
        if not path.is_file():
            raise ValueError(
                f"{self._list} must name pictures beside it, got {name!r} in row {row.number}"
            )
        self._paths.append(path)

    def finish(self, fitted: bool) -> Rows:
        if not fitted:
            require_one_size(self._paths)
        return read_pictures(self._paths)


@final
class _Arrays:
    """Arrays by the names of the model's inputs."""

    def __init__(self, path: Path, names: list[str], parts: list[str]) -> None:
        self._path = path
        self._places = {name: names.index(name) for name in parts}
        self._found: dict[str, list[NDArray[Any]]] = {name: [] for name in parts}

    def add(self, row: Row) -> None:
        for name, place in self._places.items():
            cell = row.cells[place]
            if not (isinstance(cell, list) and cell and all(map(_is_finite, cell))):
                raise ValueError(
                    f"{self._path}: {name} must be a list of finite numbers in every row, got "
                    f"{str(cell)[:60]!r} in row {row.number}"
                )
            kind = np.float32 if any(isinstance(each, float) for each in cell) else np.int64
            self._found[name].append(np.array(cell, kind))

    def finish(self, fitted: bool) -> Rows:
        arrays = {name: _as_one_kind(found) for name, found in self._found.items()}
        return lambda index: {
            name: fill_up([found[each] for each in index]) for name, found in arrays.items()
        }


def _is_finite(value: Any) -> bool:
    whole = isinstance(value, int) and -(2**63) <= value < 2**63
    return whole or (isinstance(value, float) and math.isfinite(value))


def _as_one_kind(arrays: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Whole numbers if all are, else floats: whatever is in a batch, a model gets one kind."""
    whole = all(each.dtype == np.int64 for each in arrays)
    return arrays if whole else [each.astype(np.float32) for each in arrays]


def fill_up(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Rows of numbers [n, longest], those that are shorter filled up with 0."""
    filled = np.zeros((len(rows), max(map(len, rows))), rows[0].dtype)
    for row, found in zip(filled, rows, strict=True):
        row[: len(found)] = found
    return filled

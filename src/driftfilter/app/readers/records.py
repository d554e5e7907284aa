"""Rows with named columns, in the order of time: tables, texts, and lists of pictures (WILDS), from
CSV, Parquet or lines of JSON.
"""

import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray

from driftfilter.app.images.files import Integers, digest, picture, require_labels
from driftfilter.app.readers.folders import ClassNumbers, number_classes
from driftfilter.app.readers.stored import Raw, Rows, Stored, shift_of
from driftfilter.base.checks import nearest, require

SUFFIXES = (".csv", ".parquet", ".jsonl")
STREAM = "stream"  # the domain of rows that name none
Table: TypeAlias = Mapping[str, Sequence[Any]]  # columns by name


@final
@dataclass(frozen=True)
class Columns:
    """What columns of rows mean; those not named here are a sample's numbers.

    ``path`` holds pictures, beside the file; ``text`` texts. ``domain`` names the shift of a row,
    if there is such a column. ``where`` ("split:test") keeps the rows with this value in a column.
    ``drop`` are columns that nobody reads ("id+time").
    """

    label: str = "label"
    domain: str = "domain"
    path: str = "path"
    text: str = "text"
    where: str = ""
    drop: str = ""

    @classmethod
    def parse(cls, text: str | None) -> Self:
        """Columns from ``label=y,domain=center,where=split:test``."""
        known = [each.name for each in fields(cls)]
        found: dict[str, str] = {}
        for part in filter(None, (text or "").split(",")):
            key, sign, value = part.partition("=")
            require(
                bool(sign and value) and key in known,
                "--columns",
                part,
                f"MEANING=COLUMN, with a meaning of {', '.join(known)}{nearest(key, known)}",
            )
            found[key] = value
        made = cls(**found)
        require(
            not made.where or all(made.where.partition(":")),
            "--columns where",
            made.where,
            "COLUMN:VALUE, as in split:test",
        )
        return made

    def ignored(self) -> set[str]:
        """Columns that are no part of a sample."""
        column = self.where.partition(":")[0]
        return {self.label, self.domain, column, *self.drop.split("+")}


def open_records(
    path: Path,
    columns: Columns | None = None,
    severity: int = 5,
    numbers: ClassNumbers | None = None,
) -> Stored:
    """Rows of a CSV, Parquet or JSON-lines file, in their order.

    Every row has a label: a whole number, or a name (numbered by name, or by ``numbers``). The rest
    of it is a picture by its path, a text, arrays by the names of the model's inputs (lines of JSON
    only; shorter ones are filled up with 0), or else numbers. The domains of a file come in the
    order in which they first occur; ``severity`` is what the bench calls them by.
    """
    columns = columns or Columns()
    table = _keep_rows(path, _read_table(path), columns)
    labels = _read_labels(path, table, columns, numbers)
    read = _read_samples(path, table, columns)
    names = [str(each) for each in table.get(columns.domain, [STREAM] * len(labels))]
    members = {
        name: torch.from_numpy(np.flatnonzero(np.array(names) == name))
        for name in dict.fromkeys(names)
    }
    return Stored(
        "rows",
        path,
        torch.from_numpy(labels),
        {shift_of(name, severity): read for name in members},
        lambda: digest([path]),
        members,
    )


def _read_table(path: Path) -> Table:
    require(path.is_file(), str(path), "no such file", f"a file of rows ({', '.join(SUFFIXES)})")
    try:
        table = _READERS[path.suffix](path)
    except (OSError, ValueError, csv.Error) as error:
        raise ValueError(
            f"{path} must be a file of rows with named columns, got {error}"
        ) from error
    require(
        bool(table) and any(map(len, table.values())), str(path), "no row", "a header and its rows"
    )
    return table


def _read_csv(path: Path) -> Table:
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file, strict=True)
        head = next(lines, [])
        if len(set(head)) < len(head):
            raise ValueError(f"columns of one name in {head[:6]}")
        rows = list(lines)
    for number, row in enumerate(rows, 2):
        if len(row) != len(head):
            raise ValueError(f"{len(row)} cells in row {number} under {len(head)} columns")
    return {name: [row[place] for row in rows] for place, name in enumerate(head)}


def _read_parquet(path: Path) -> Table:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError("Parquet files need pyarrow: pip install pyarrow") from error
    try:
        table = parquet.read_table(path)
    except Exception as error:  # pyarrow has errors of its own
        raise ValueError(str(error)) from error
    return {name: table[name].to_pylist() for name in table.column_names}


def _read_lines(path: Path) -> Table:
    rows: list[dict[str, Any]] = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            row = json.loads(line)
            if not isinstance(row, dict) or (rows and row.keys() != rows[0].keys()):
                raise ValueError(f"other names in line {number} than in the first: {str(row)[:80]}")
            rows.append(row)
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}


_READERS: dict[str, Callable[[Path], Table]] = {
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".jsonl": _read_lines,
}


def _keep_rows(path: Path, table: Table, columns: Columns) -> Table:
    if not columns.where:
        return table
    column, _, value = columns.where.partition(":")
    _require_column(path, table, "where", column)
    kept = [number for number, each in enumerate(table[column]) if str(each) == value]
    values = list(dict.fromkeys(map(str, table[column])))
    require(bool(kept), f"{path}: {column}", values[:6], f"{value!r} in some row")
    return {name: [cells[number] for number in kept] for name, cells in table.items()}


def _require_column(path: Path, table: Table, meaning: str, column: str) -> None:
    names = list(table)
    require(
        column in table,
        f"{path}: column of the {meaning}",
        column,
        f"one of {names[:12]}{nearest(column, names)} (--columns {meaning}=COLUMN)",
    )


def _read_labels(
    path: Path, table: Table, columns: Columns, numbers: ClassNumbers | None
) -> Integers:
    """Labels [N]: whole numbers, or names."""
    _require_column(path, table, "label", columns.label)
    cells = [str(each).strip() for each in table[columns.label]]
    name = f"{path}: {columns.label}"
    require(all(cells), name, "an empty cell", "a label in every row")
    if numbers is None and any(each.lstrip("-").isdecimal() for each in cells):
        odd = next((each for each in cells if not each.lstrip("-").isdecimal()), None)
        require(odd is None, name, odd, "whole numbers alone, or names alone")
        return require_labels(name, np.array(cells, np.int64))
    known = number_classes(path, set(cells), numbers)
    return np.array([known[each] for each in cells])


def _read_samples(path: Path, table: Table, columns: Columns) -> Rows:
    """The samples of rows, by their numbers."""
    if columns.path in table:
        return _read_pictures(path.parent, table[columns.path])
    if columns.text in table:
        return _read_texts(path, columns.text, table[columns.text])
    parts = {name: cells for name, cells in table.items() if name not in columns.ignored()}
    require(bool(parts), str(path), list(table), "columns of numbers, beside the labels")
    if any(isinstance(cells[0], list) for cells in parts.values()):
        return _read_named(path, parts)
    numbers = np.stack([_read_numbers(path, *each) for each in parts.items()], 1)
    return numbers.__getitem__


def _read_numbers(path: Path, name: str, cells: Sequence[Any]) -> NDArray[np.float32]:
    """A column of finite numbers [N]."""
    try:
        values = np.array(cells, np.float32)
        bad = np.flatnonzero(~np.isfinite(values))
    except (ValueError, TypeError):
        bad = np.array([number for number, cell in enumerate(cells) if not _is_number(cell)])
    if len(bad):
        raise ValueError(
            f"{path}: column {name!r} must hold finite numbers, got {cells[bad[0]]!r} in row "
            f"{bad[0]} after the first (--columns drop={name} leaves it out)"
        )
    return values


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (ValueError, TypeError):
        return False
    return True


def _read_pictures(folder: Path, paths: Sequence[Any]) -> Rows:
    return lambda index: [picture(folder / str(paths[each])) for each in index]


def _read_texts(path: Path, name: str, cells: Sequence[Any]) -> Rows:
    texts = [each for each in cells if isinstance(each, str)]
    require(len(texts) == len(cells), f"{path}: {name}", "others", "texts alone")
    return lambda index: [texts[each] for each in index]


def _read_named(path: Path, parts: Mapping[str, Sequence[Any]]) -> Rows:
    """Arrays by the names of the model's inputs."""
    for name, cells in parts.items():
        odd = next((each for each in cells if not isinstance(each, list)), None)
        require(odd is None, f"{path}: {name}", odd, "an array in every row, as in the first")

    def read(index: Integers) -> Raw:
        return {name: fill_up([cells[each] for each in index]) for name, cells in parts.items()}

    return read


def fill_up(rows: Iterable[Sequence[float]]) -> NDArray[Any]:
    """Rows of numbers [n, longest], those that are shorter filled up with 0."""
    arrays = [np.asarray(row) for row in rows]
    shape = len(arrays), max(map(len, arrays), default=0)
    whole = all(array.dtype.kind in "iu" for array in arrays if len(array))
    filled = np.zeros(shape, np.int64 if whole else np.float32)
    for row, array in zip(filled, arrays, strict=True):
        row[: len(array)] = array
    return filled

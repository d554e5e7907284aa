"""Rows of files with named columns, one after the other: CSV, Parquet, lines of JSON, and lists of
pictures with their labels.
"""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeAlias

from driftfilter.base.checks import require

STREAM = "stream"  # the domain of rows that name none


class Row(NamedTuple):
    """A row and where it is: the line of a text file, else its number from 1."""

    number: int
    cells: Sequence[Any]


# The names of the columns, then the rows.
Parts: TypeAlias = tuple[list[str], Iterator[Row]]


def read_rows(path: Path) -> Parts:
    """Columns and rows of a file by its suffix; the rows are read as they are asked for."""
    require(path.is_file(), str(path), "no such file", f"a file of rows ({', '.join(SUFFIXES)})")
    guarded = _guard(path, _READERS[path.suffix](path))
    names = next(guarded, Row(0, ())).cells
    first = next(guarded, None)
    require(first is not None and bool(names), str(path), "no row", "a header and its rows")
    assert first is not None
    return [str(each) for each in names], chain(first, guarded)


def chain(first: Row, rest: Iterator[Row]) -> Iterator[Row]:
    """The first row, and the rest."""
    yield first
    yield from rest


def _guard(path: Path, rows: Iterator[Row]) -> Iterator[Row]:
    """The rows; what goes wrong in reading them is an error that names the file."""
    try:
        yield from rows
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        raise ValueError(
            f"{path} must be a file of rows with named columns, got {error}"
        ) from error


# Each gives the names of the columns first, as a row.


def _read_csv(path: Path) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file, strict=True)
        head = next(lines, [])
        if len(set(head)) < len(head):
            raise ValueError(f"columns of one name in {head[:6]}")
        yield Row(1, head)
        for row in lines:
            if row and len(row) != len(head):
                raise ValueError(
                    f"{len(row)} cells in line {lines.line_num} under {len(head)} columns"
                )
            if row:
                yield Row(lines.line_num, row)


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(
            "Parquet files need pyarrow: pip install 'driftfilter[parquet]'"
        ) from error
    try:
        file = parquet.ParquetFile(path)
        yield Row(0, file.schema_arrow.names)
        number = 0
        for batch in file.iter_batches():
            for cells in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                number += 1
                yield Row(number, cells)
    except Exception as error:  # pyarrow has errors of its own
        raise ValueError(str(error)) from error


def _read_lines(path: Path) -> Iterator[Row]:
    names: list[str] | None = None
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            row = json.loads(line)
            if not isinstance(row, dict) or (names is not None and row.keys() != set(names)):
                raise ValueError(f"other names in line {number} than in the first: {str(row)[:80]}")
            if names is None:
                names = list(row)
                yield Row(0, names)
            yield Row(number, [row[name] for name in names])


def _read_list(path: Path) -> Iterator[Row]:
    yield Row(0, ["path", "label", "domain"])
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            parts = line.strip().rsplit(maxsplit=1)
            if len(parts) < 2:
                raise ValueError(f"{line.strip()[:80]!r} in line {number}: no picture and label")
            above = PurePosixPath(parts[0]).parts[:-1]
            yield Row(number, [*parts, above[0] if above else STREAM])


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".jsonl": _read_lines,
    ".txt": _read_list,
}
SUFFIXES = tuple(_READERS)

"""Rows with named columns, in the order of time, as samples: tables, texts, and lists of pictures
(WILDS). Numbers and texts are kept in memory, 4 bytes a number; pictures are read when asked for.
"""

import math
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray

from driftfilter.app.images.files import Integers, digest, require_labels
from driftfilter.app.readers.cells import choose_samples
from driftfilter.app.readers.classes import ClassNumbers, list_counted, number_classes
from driftfilter.app.readers.columns import Columns
from driftfilter.app.readers.rows import STREAM, Row, chain, read_rows
from driftfilter.app.readers.stored import Rows, Stored, shift_of
from driftfilter.base.checks import require


def open_records(
    path: Path,
    columns: Columns | None = None,
    severity: int = 5,
    numbers: ClassNumbers | None = None,
    fitted: bool = False,
) -> Stored:
    """Rows of a CSV, Parquet or JSON-lines file or of a list of pictures (.txt: path and label), in
    their order or sorted by time.

    Every row has a label: a whole number, or a name (numbered by name, or by ``numbers``). The rest
    of it is a picture by its path, a text, arrays by the names of the model's inputs (shorter ones
    are filled up with 0), or else numbers. The domains of a file come in the order in which they
    first occur; ``severity`` is what the bench calls them by. Pictures must be of one size unless
    they are ``fitted`` to one later.
    """
    names, rows = read_rows(path)
    columns = (columns or Columns()).find(path, names)
    rows = _keep_rows(path, names, rows, columns)
    first = next(rows)
    samples = choose_samples(path, names, columns, first)
    labels, domains = _Names(path, names, columns.label), _Names(path, names, columns.domain)
    times = _Names(path, names, columns.time)
    for row in chain(first, rows):
        samples.add(row)
        for part in (labels, domains, times):
            part.add(row)
    order = _sort(path, columns, times)
    known = labels.number(numbers)
    return Stored(
        "rows",
        path,
        torch.from_numpy(known.labels[order]),
        dict.fromkeys(
            [shift_of(name, severity) for name in domains.list_members(order)],
            _take_in(order, samples.finish(fitted)),
        ),
        lambda: digest([path]),
        domains.list_members(order),
        counted=known.counted,
        how=str(columns),
    )


def _keep_rows(
    path: Path, names: Sequence[str], rows: Iterator[Row], columns: Columns
) -> Iterator[Row]:
    """The rows that are asked for, of which there is one at least."""
    if not columns.where:
        yield from rows
        return
    column, _, value = columns.where.partition(":")
    place, kept, seen = names.index(column), 0, dict[str, None]()
    value = _write(value)
    for row in rows:
        text = _write(row.cells[place])
        if text == value:
            kept += 1
            yield row
        elif len(seen) < 6:
            seen[text] = None
    require(kept > 0, f"{path}: {column}", list(seen), f"{value!r} in some row")


def _take_in(order: Integers, read: Rows) -> Rows:
    """Samples by their numbers after sorting."""
    return lambda index: read(order[index])


def _sort(path: Path, columns: Columns, times: "_Names") -> Integers:
    """Row numbers [n] in the order of time; of times that are no numbers, of their texts."""
    if not columns.time:
        return np.arange(times.count)
    texts = np.array(list(times.known))[np.array(times.codes)]
    try:
        keys: NDArray[Any] = texts.astype(np.float64)
    except ValueError:
        keys = texts
    return np.argsort(keys, kind="stable")


def _write(cell: Any) -> str:
    """A cell as text: whole numbers without a point, what is missing as nothing."""
    if cell is None or (isinstance(cell, float) and not math.isfinite(cell)):
        return ""
    text = str(cell).strip()
    if isinstance(cell, bool) or not text.rstrip("0").endswith("."):
        return text
    whole = text.rstrip("0").removesuffix(".")  # 3.0, which is how a column with gaps is written
    return whole if whole.lstrip("-").isdecimal() else text


class _Labels(NamedTuple):
    """Labels [n] of rows, and the names of the classes if they were counted."""

    labels: Integers
    counted: tuple[str, ...] | None


@final
class _Names:
    """A column of names: each name once, and for every row which it is."""

    def __init__(self, path: Path, names: Sequence[str], column: str) -> None:
        self._title = f"{path}: {column}"
        self._path, self._place = path, names.index(column) if column else None
        self.known: dict[str, int] = {}
        self.codes, self.count = array("q"), 0

    def add(self, row: Row) -> None:
        self.count += 1
        if self._place is None:
            return
        text = _write(row.cells[self._place])
        if not text:
            raise ValueError(f"{self._title} must be filled in, got an empty cell in row {row[0]}")
        self.codes.append(self.known.setdefault(text, len(self.known)))

    def list_members(self, order: Integers) -> dict[str, torch.Tensor]:
        """Numbers of the samples of each name, in the order in which names first occur."""
        if self._place is None:
            return {STREAM: torch.arange(self.count)}
        codes, names = np.array(self.codes)[order], list(self.known)
        groups = np.split(np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1])
        groups = sorted((each for each in groups if len(each)), key=lambda each: int(each[0]))
        return {names[codes[each[0]]]: torch.from_numpy(each) for each in groups}

    def number(self, numbers: ClassNumbers | None) -> _Labels:
        """Labels of the rows: whole numbers, or counted names, or what ``numbers`` say."""
        odd = [text for text in self.known if not text.lstrip("-").isdecimal()]
        counted = None
        if numbers is None and not odd:
            found = {text: int(text) for text in self.known}
        else:
            mixed = numbers is None and any(map(_is_number, self.known))
            require(not mixed, self._title, odd[:1], "whole numbers alone, or names alone")
            found = number_classes(self._path, list(self.known), numbers)
            counted = list_counted(found, numbers)
        labels = np.array([found[text] for text in self.known], np.int64)[np.array(self.codes)]
        return _Labels(require_labels(self._title, labels), counted)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

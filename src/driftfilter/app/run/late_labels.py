"""Labels that arrive while a run goes on: ``driftfilter run --labels late.csv``.

A line of the file is ``sample,label`` or ``sample,label,after``: the number of a sample in the
data, from 0, its class, and how many samples had come when the label arrived. Lines may be in any
order.
A label is learned after the first step by which its sample and those others have come; the sample
is read again from the data.
"""

import csv
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import Self

import driftfilter as df
from driftfilter.app.run.reader import Feed, Form, StoredFeed
from driftfilter.base.checks import require

_HEADER = ("sample", "label", "after")


class LateLabels(NamedTuple):
    """Labels with the samples they are of, in the order in which they are learned."""

    due: NDArray[np.int64]  # [m], samples that must have come
    samples: NDArray[np.int64]  # [m], numbers
    labels: NDArray[np.int64]  # [m]

    @classmethod
    def open(cls, path: Path, feed: Feed) -> Self:
        """Read a file; refused unless every line is right and no sample has two labels."""
        allowed = "a file or folder: samples of stdin cannot be read again for labels that are late"
        require(isinstance(feed, StoredFeed), "DATA", "-", allowed)
        assert isinstance(feed, StoredFeed)
        require(path.is_file(), "--labels", str(path), "a file that is there")
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows = [(place, row) for place, row in enumerate(csv.reader(file), 1) if row]
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{path} must be text, sample,label in a line: {error}") from error
        if rows and tuple(cell.strip() for cell in rows[0][1]) in (_HEADER, _HEADER[:2]):
            rows = rows[1:]
        found = [_parse(path, place, row, feed.count) for place, row in rows]
        table = np.array(sorted(found), np.int64).reshape(-1, 3)
        numbers, counts = np.unique(table[:, 1], return_counts=True)
        twice = numbers[counts > 1].tolist()
        require(not twice, str(path), f"two labels of samples {twice[:5]}", "one for each sample")
        return cls(*table.T)

    def sum(self, rows: int) -> dict[str, Any]:
        """How many labels are due after so many samples, and their checksum."""
        table = np.stack(self)[:, self.due <= rows]
        return {"count": table.shape[1], "sum": f"{zlib.crc32(table.tobytes()):08x}"}

    def require_same(self, notes: dict[str, Any], rows: int) -> None:
        """Raise unless the labels due so far are those that a checkpoint knows."""
        found, allowed = self.sum(rows), "those that the run has learned"
        require(notes == found, "--labels", f"others ({found})", f"{allowed} ({notes})")

    def learn(
        self,
        adapter: df.Adapter,
        feed: StoredFeed,
        form: Form,
        span: tuple[int, int],
        warn: Callable[[str], None],
    ) -> int:
        """Learn the labels that are due between two numbers of samples; a sample that cannot be
        read is left out with a warning. Returns how many were learned.
        """
        before, after = span
        learned = 0
        for place in np.flatnonzero((self.due > before) & (self.due <= after)):
            number, label = int(self.samples[place]), int(self.labels[place])
            try:
                inputs = form(feed.take(number, number + 1))
                adapter.learn(inputs, torch.tensor([label]))
                learned += 1
            except (ValueError, TypeError) as error:
                warn(f"label {label} of sample {number} is left out: {error}")
        return learned


def _parse(path: Path, place: int, row: list[str], count: int) -> tuple[int, int, int]:
    """When a label is due, the number of its sample, and the label."""
    where, allowed = f"{path} line {place}", "sample,label or sample,label,after: integers >= 0"
    most = np.iinfo(np.int64).max
    try:
        sample, label, *rest = (int(cell) for cell in row)
    except ValueError:
        sample, label, rest = -1, -1, []
    numbers = sample, label, *rest
    fits = min(numbers) >= 0 and max(numbers) <= most and len(rest) < 2
    require(fits, where, ",".join(row), allowed)
    require(sample < count, where, f"sample {sample}", f"one of the data, 0 to {count - 1}")
    return max((sample + 1, *rest)), sample, label

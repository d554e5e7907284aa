"""What a run has read and written, in checksums (CRC-32), so that a resumed run goes on with the
same data, labels and logs or not at all.

The checksum of every batch that was adapted to stands in its line of ``steps.jsonl``, those of the
logs and labels in the checkpoint. They tell accidents, not malice.
"""

import json
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from driftfilter.app.images.files import Integers
from driftfilter.app.run.predictions import log_path
from driftfilter.app.run.prepare import PreparedRun
from driftfilter.app.run.reader import Batch, Feed, Raw, StoredFeed, require_covered
from driftfilter.base.checks import require
from driftfilter.storage.append_log import checksum

STEPS = "steps.jsonl"
SHARE = 0.01  # of the time that the steps took: for reading their data again on resuming
AT_LEAST = 1.0  # seconds


def sum_samples(raw: Raw, dtype: str) -> str:
    """Checksum of samples as they were read: names, types, shapes and numbers; floats as they are
    in the ``dtype`` of the model.
    """
    found = 0
    for name, array in sorted((raw if isinstance(raw, dict) else {"": raw}).items()):
        with np.errstate(over="ignore"):  # that it is not finite is found out later
            part = array.astype(dtype, copy=False) if array.dtype.kind == "f" else array
        found = zlib.crc32(f"{name} {part.dtype.str} {list(part.shape)}".encode(), found)
        found = zlib.crc32(np.ascontiguousarray(part).data, found)
    return f"{found:08x}"


def sum_labels(labels: Integers | None, rows: int) -> dict[str, Any]:
    """How many labels of the first samples are known, and their checksum."""
    known = np.empty(0, np.int64) if labels is None else labels[:rows].astype(np.int64)
    return {"count": len(known), "sum": f"{zlib.crc32(known.tobytes()):08x}"}


class Reads:
    """The batches of a run; ``latest`` is the checksum of the one that was read last."""

    def __init__(self, dtype: str) -> None:
        self.latest, self._dtype = "", dtype

    def each(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches, whose checksum is taken when they are read."""
        return (batch._replace(read=partial(self._read, batch.read)) for batch in batches)

    def _read(self, read: Callable[[], Raw]) -> Raw:
        raw = read()
        self.latest = sum_samples(raw, self._dtype)
        return raw


def require_same(made: PreparedRun, rows: int, notes: Mapping[str, Any]) -> None:
    """Raise unless data, labels and logs are those that the notes of a checkpoint know.

    A checkpoint of an earlier version knows none of them.
    """
    if "sums" not in notes:
        return
    _require_logs(made, notes)
    before = notes["labels"]
    found = sum_labels(made.labels, before["count"])
    require(
        found == before,
        f"labels of the first {before['count']} samples",
        f"others (checksum {found['sum']})",
        f"as they were when the run began (checksum {before['sum']}; or give another --out)",
    )
    if made.options.stdin_continues:  # what was consumed does not come again
        return
    if isinstance(made.feed, StoredFeed):
        require_covered(made.feed.name, made.feed.count, rows)
    steps = _read_steps(made.options.out / STEPS, notes["sizes"]["steps"])
    _require_data(made.feed, steps, made.dtype)


def _require_logs(made: PreparedRun, notes: Mapping[str, Any]) -> None:
    out = made.options.out
    for name, before in notes["sums"].items():
        path = out / STEPS if name == "steps" else log_path(out, made.options.predictions, name)
        size = notes["sizes"][name]
        found = checksum(path, size)
        require(
            found == before,
            str(path),
            f"others (checksum {found:08x})",
            f"the {size} bytes that the checkpoint covers (checksum {before:08x}), and more: it "
            "has changed since, or the checkpoint is another run's",
        )


def _read_steps(path: Path, size: int) -> list[dict[str, Any]]:
    with path.open("rb") as file:
        return [json.loads(line) for line in file.read(size).splitlines()]


def _require_data(feed: Feed, steps: list[dict[str, Any]], dtype: str) -> None:
    """Raise unless the samples of these steps are in the feed, as far as there is time to look:
    then at steps spread over the run, and always at the last one.
    """
    allowed = max(AT_LEAST, SHARE * sum(step.get("ms", 0.0) for step in steps) / 1000)
    row, spent = 0, 0.0
    for place, step in enumerate(steps):
        begun = time.perf_counter()
        batch = _again(feed, row, step["n"])
        is_due = spent <= allowed * (place + 1) / len(steps) or place == len(steps) - 1
        if is_due and "inputs" in step:
            _require_batch(batch, row, step, dtype)
            spent += time.perf_counter() - begun
        row += step["n"]


def _again(feed: Feed, row: int, rows: int) -> Batch:
    """The samples from a row on; of lines the next ones."""
    if isinstance(feed, StoredFeed):
        return Batch(rows, partial(feed.take, row, row + rows))
    batch = next(feed.batches(rows, 0), Batch(0, dict))
    require_covered("stdin", row + batch.rows, row + rows)
    return batch


def _require_batch(batch: Batch, row: int, step: Mapping[str, Any], dtype: str) -> None:
    try:
        found = f"others (checksum {sum_samples(batch.read(), dtype)})"
    except (ValueError, OSError) as error:
        found = str(error)
    require(
        found == f"others (checksum {step['inputs']})",
        f"samples {row} to {row + batch.rows - 1} of the data",
        found,
        f"those of step {step['step']} of the run (checksum {step['inputs']}): the data have "
        "changed or come in another order (or give another --out)",
    )

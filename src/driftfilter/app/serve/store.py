"""Where tenants are kept: a folder with a log for each worker and a checkpoint for each tenant.

    tenants/3f/3fa9….safetensors   a checkpoint as ``df.save`` writes it
    workers/NAME/00000007.log      records since then (records.py), one after the other; the last
                                   one of a tenant counts
    workers/NAME.claim             whose log it is

A step is a record in the log of the worker that took it; what the records of a log share is in it
once. When a log has grown to ``segment`` bytes a new one is begun, and the tenants whose last
record lies in the old one are written to files of their own, a few at a time; then the old one goes
away. Names of tenants never become names of files: these are SHA-256.
"""

import hashlib
import json
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from typing_extensions import Self

from driftfilter.app.bench.locks import claim, describe_holder
from driftfilter.app.serve.records import Stored, to_checkpoint
from driftfilter.base.checks import require
from driftfilter.storage.atomic import atomic_file, make_folder, sync_folder
from driftfilter.storage.record_log import RecordLog, is_old, read_records

SEGMENT = 64 << 20  # bytes of a log before a new one is begun
_NAMES = "[0-9]" * 8 + ".log"
_WAIT = 20.0  # seconds that a killed process may take to end


def key_of(tenant: str) -> str:
    """What stands for the name of a tenant in names of files."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:40]


def path_of(folder: Path, key: str) -> Path:
    """The file of a tenant in a store."""
    return folder / "tenants" / key[:2] / f"{key}.safetensors"


class Entry(NamedTuple):
    """What is to be kept of a tenant: a record, or that there is none any more."""

    key: str
    record: Stored | None


class Store(Protocol):
    """Where tenants are kept. Errors of the disk are OSErrors, and then nothing has changed."""

    def read(self, key: str) -> Stored | None:
        """The last record of a tenant; None if there is none."""

    def write(self, entries: Sequence[Entry]) -> None:
        """Keep records; they are safe when it returns."""

    def count(self) -> int:
        """Tenants that are kept here."""

    def release(self, keys: Sequence[str]) -> None:
        """Leave tenants to another worker."""

    def held(self) -> Iterator[str]:
        """Tenants of which this worker has the last word."""

    def tend(self, budget: int) -> bool:
        """Tidy up a little; whether there is more of it."""

    def close(self) -> None:
        """Let go of it all."""


class _Place(NamedTuple):
    """Of the last record of a tenant."""

    segment: int
    start: int = 0  # of its content
    length: int = -1  # -1: it says that the tenant is gone
    context: bytes = b""  # what it shares with others

    @property
    def gone(self) -> bool:
        return self.length < 0


class _Segment(NamedTuple):
    """A log, and what its records share."""

    log: RecordLog
    contexts: dict[bytes, int]  # their numbers
    is_old: bool = False  # of the first format, which is not added to

    def is_full(self, segment: int) -> bool:
        return self.is_old or self.log.size >= segment


class FolderStore:
    """A folder of this machine, or one that all machines see and that knows locks.

    ``sync``: every write is on the disk (fsync) when it returns. Else it outlasts a kill of the
    process, and a loss of power but for the last second. ``wait``: seconds for another process that
    has the log to end.
    """

    def __init__(
        self,
        folder: Path,
        worker: str = "0",
        sync: bool = True,
        segment: int = SEGMENT,
        wait: float | None = None,
    ) -> None:
        require(worker.isalnum(), "worker", worker, "of letters and digits")
        self.folder, self.sync, self.segment = folder, sync, segment
        self._tenants, self._logs = folder / "tenants", folder / "workers" / worker
        self._stack = ExitStack()
        make_folder(folder / "workers")
        self._claim(worker, _WAIT if wait is None else wait)
        make_folder(self._logs)
        make_folder(self._tenants)
        self._places: dict[str, _Place] = {}
        self._segments: dict[int, _Segment] = {}
        self._retiring: deque[str] = deque()  # tenants to be written before the oldest log may go
        self._synced, self._unsynced = time.monotonic(), set[int]()  # logs, with sync=False
        self._live = {path.stem for path in self._tenants.glob("*/*.safetensors")}
        for path in sorted(self._logs.glob(_NAMES)):
            self._open(path)
        self._live |= {key for key, place in self._places.items() if not place.gone}
        self._live -= {key for key, place in self._places.items() if place.gone}

    def _claim(self, worker: str, wait: float) -> None:
        """Take the log for this process; one that was killed may need a moment to be gone."""
        place, until = self.folder / "workers" / f"{worker}.log", time.monotonic() + wait
        while (mine := self._stack.enter_context(claim(place))) is None:
            if time.monotonic() > until:
                raise ValueError(f"--store {self.folder} is in use: {describe_holder(place)}")
            time.sleep(0.05)
        self._mine = mine

    def _open(self, path: Path) -> None:
        """Read which records a log has; what follows them is cut off."""
        number, size, contexts = int(path.stem), 0, list[bytes]()
        for start, content in read_records(path):
            header, body = _split(content)
            size = start + len(content)
            if header["kind"] == "context":
                contexts.append(body)
            elif header["kind"] == "state":
                context = contexts[header["context"]] if "context" in header else b""
                self._places[header["key"]] = _Place(number, start, len(content), context)
            elif header["kind"] == "gone":
                self._places[header["key"]] = _Place(number)
            else:  # another worker has it
                self._places.pop(header["key"], None)
        numbers = {context: place for place, context in enumerate(contexts)}
        old = is_old(path)
        self._segments[number] = _Segment(RecordLog(path, size), numbers, old)

    @property
    def _current(self) -> tuple[int, _Segment]:
        """The log that grows."""
        last = max(self._segments, default=0)
        if not last or self._segments[last].is_full(self.segment):
            last += 1
            self._segments[last] = _Segment(RecordLog(self._logs / f"{last:08d}.log"), {})
        return last, self._segments[last]

    def read(self, key: str) -> Stored | None:
        if key in self._places:
            place = self._places[key]
            return None if place.gone else self._read_at(place)
        try:
            return Stored(self._path(key).read_bytes())
        except FileNotFoundError:  # any other error is none of a new tenant
            return None

    def _read_at(self, place: _Place) -> Stored:
        content = self._segments[place.segment].log.read(place.start, place.length)
        return Stored(_split(content)[1], place.context)

    def write(self, entries: Sequence[Entry]) -> None:
        """Keep records, all or none."""
        self._mine.check()
        number, (log, contexts, _) = self._current
        known = dict(contexts)
        for _, record in entries:
            if record is not None and record.context:
                known.setdefault(record.context, len(known))
        new = list(known)[len(contexts) :]
        contents = [_join({"kind": "context"}, context) for context in new]
        contents += [_write_entry(entry, known) for entry in entries]
        starts = log.append(contents, self.sync)[len(new) :]
        contexts.update(known)
        if not self.sync:
            self._unsynced.add(number)
        for (key, record), start, content in zip(
            entries, starts, contents[len(new) :], strict=True
        ):
            if record is None:
                self._places[key] = _Place(number)
                self._live.discard(key)
            else:
                self._places[key] = _Place(number, start, len(content), record.context)
                self._live.add(key)

    def _sync(self) -> None:
        """Bring to the disk what was written more than a second ago. It is no part of a write: if
        it fails, what was written is still there.
        """
        if self._unsynced and time.monotonic() - self._synced > 1:
            for number in sorted(self._unsynced & self._segments.keys()):
                self._segments[number].log.sync()
            self._unsynced.clear()
            self._synced = time.monotonic()

    def count(self) -> int:
        return len(self._live)

    def release(self, keys: Sequence[str]) -> None:
        own = [key for key in keys if key in self._places]
        for key in own:
            self._save(key)
        if own:
            contents = [_join({"key": key, "kind": "left"}, b"") for key in own]
            self._current[1].log.append(contents, True)
        for key in own:
            del self._places[key]
        self._live.difference_update(keys)

    def held(self) -> Iterator[str]:
        yield from list(self._places)

    def tend(self, budget: int) -> bool:
        self._sync()
        if len(self._segments) < 2:
            return bool(self._unsynced)
        oldest = min(self._segments)
        if not self._retiring:
            there = [key for key, place in self._places.items() if place.segment == oldest]
            self._retiring.extend(there)
        for _ in range(min(budget, len(self._retiring))):
            key = self._retiring[0]
            place = self._places.get(key)
            if place is not None and place.segment == oldest:
                self._save(key)
                del self._places[key]
            self._retiring.popleft()
        if not self._retiring:
            self._drop(oldest)
        return len(self._segments) > 1 or bool(self._unsynced)

    def _drop(self, number: int) -> None:
        """Remove the oldest log: nobody's last record lies in it."""
        log = self._segments[number].log
        # First: one that stays, or comes back after a loss of power, would be read as the last.
        log.path.unlink(missing_ok=True)
        sync_folder(self._logs)
        del self._segments[number]
        log.close()

    def _save(self, key: str) -> None:
        """Write the file of a tenant from its last record, or remove it if that says so."""
        place, path = self._places[key], self._path(key)
        if place.gone:
            path.unlink(missing_ok=True)
            if path.parent.is_dir():
                sync_folder(path.parent)
            return
        make_folder(path.parent)
        with atomic_file(path) as file:
            file.write(to_checkpoint(self._read_at(place)))

    def _path(self, key: str) -> Path:
        return path_of(self.folder, key)

    def close(self) -> None:
        for log, *_ in self._segments.values():
            log.sync()
            log.close()
        self._segments.clear()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _write_entry(entry: Entry, contexts: Mapping[bytes, int]) -> bytes:
    key, record = entry
    if record is None:
        return _join({"key": key, "kind": "gone"}, b"")
    shared = {"context": contexts[record.context]} if record.context else {}
    return _join({"key": key, "kind": "state", **shared}, record.content)


def _join(header: Mapping[str, Any], body: bytes) -> bytes:
    return json.dumps(header, separators=(",", ":")).encode() + b"\n" + body


def _split(content: bytes) -> tuple[dict[str, Any], bytes]:
    line, _, body = content.partition(b"\n")
    return json.loads(line), body

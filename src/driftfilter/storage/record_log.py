"""A log of records, each whole or not there: a file that grows, of lengths, checksums and contents.

A kill leaves at most the beginning of the last record, which is cut off when the log is opened
again. An error while records are written takes back what was written of them.
"""

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from driftfilter.storage.atomic import sync_folder
from driftfilter.storage.own_file import open_own

_FRAME = struct.Struct("<IQ")  # CRC-32 of length and content, length
_LENGTH = struct.Struct("<Q")


class Record(NamedTuple):
    """Where the content of a record is."""

    start: int
    content: bytes


class DamagedLogError(RuntimeError):
    """A log whose records are not as they were written; the message says where."""


class RecordLog:
    """A log open for writing; ``size`` is that of its whole records."""

    def __init__(self, path: Path, size: int = 0) -> None:
        self.path, self.size = path, size
        is_new = not path.exists()
        self._file = open_own(path, os.O_RDWR | os.O_CREAT)
        if is_new:
            sync_folder(path.parent)
        self._torn = True  # whether something may lie behind the whole records

    def append(self, contents: Sequence[bytes], sync: bool) -> list[int]:
        """Add records to the end, all or none: where the content of each begins. ``sync``: they
        are on the disk then, and outlast a loss of power.
        """
        self._mend()
        pieces, starts, end = [], [], self.size
        for content in contents:
            pieces += [_frame(content), content]
            starts.append(end + _FRAME.size)
            end = starts[-1] + len(content)
        self._torn = True
        try:
            self._write(b"".join(pieces))
            if sync:
                self.sync()
        except OSError as error:
            with suppress(OSError):  # or before the next record
                self._mend()
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.size, self._torn = end, False
        return starts

    def _write(self, data: bytes) -> None:
        place, rest = self.size, memoryview(data)
        while rest:
            count = os.pwrite(self._file, rest, place)
            place, rest = place + count, rest[count:]

    def _mend(self) -> None:
        """Cut off what is no whole record."""
        if self._torn:
            os.ftruncate(self._file, self.size)
            self._torn = False

    def sync(self) -> None:
        """Bring the records to the disk."""
        os.fsync(self._file)

    def read(self, start: int, length: int) -> bytes:
        """Bytes of a record's content; not checked again."""
        return os.pread(self._file, length, start)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _frame(content: bytes) -> bytes:
    length = _LENGTH.pack(len(content))
    return _FRAME.pack(zlib.crc32(content, zlib.crc32(length)), len(content))


def read_records(path: Path) -> Iterator[Record]:
    """The records of a log. What lies behind them is the beginning of one that a kill cut off;
    anything else is damage, and refused.
    """
    place, size = 0, path.stat().st_size
    with path.open("rb") as file:
        while len(frame := file.read(_FRAME.size)) == _FRAME.size:
            _, length = _FRAME.unpack(frame)
            start = place + _FRAME.size
            if length > size - start:
                return
            content = file.read(length)
            if _frame(content) != frame:
                if start + length == size:  # a length that was written before its content
                    return
                if not any(frame) and not any(file.read()):  # a size that was, at a loss of power
                    return
                raise DamagedLogError(f"{path} is damaged at byte {place}: no log was read")
            yield Record(start, content)
            place = start + length

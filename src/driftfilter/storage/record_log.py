"""A log of records, each whole or not there: a file that grows.

    file     MAGIC, then records
    record   CRC-32 of the next twelve bytes, CRC-32 of the content, its length, the content

A kill leaves at most the beginning of the last record, which is cut off when the log is opened
again. So does a loss of power, which may also leave sectors of zeros in it. A length has a checksum
of its own: one that has changed is damage, and no end of the log. An error while records are
written takes back what was written of them.
"""

import errno
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from driftfilter.storage.atomic import sync_folder
from driftfilter.storage.own_file import open_own

MAGIC = b"dflog\x00\x02\n"
_FRAME = struct.Struct("<IIQ")  # CRC-32 of the rest of it, CRC-32 of the content, its length
_HEAD = struct.Struct("<IQ")
_OLD = struct.Struct("<IQ")  # in logs without MAGIC: CRC-32 of length and content, length
_LENGTH = struct.Struct("<Q")
_SECTOR = 512  # bytes that a disk writes at once


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
        try:
            if size == 0:
                self._mend()
                self._write(MAGIC)
                self.size = len(MAGIC)
            self._is_old = is_old(path)
        except OSError:
            os.close(self._file)
            raise

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
        """A record's content, by where it begins; OSError if it is not as it was written."""
        size, frame_of = (_OLD.size, _old_frame) if self._is_old else (_FRAME.size, _frame)
        data = os.pread(self._file, size + length, start - size)
        content = data[size:]
        if frame_of(content) != data[:size]:
            raise OSError(errno.EIO, f"damaged at byte {start - size}", str(self.path))
        return content

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _frame(content: bytes) -> bytes:
    head = _HEAD.pack(zlib.crc32(content), len(content))
    return _FRAME.pack(zlib.crc32(head), *_HEAD.unpack(head))


def _old_frame(content: bytes) -> bytes:
    length = _LENGTH.pack(len(content))
    return _OLD.pack(zlib.crc32(content, zlib.crc32(length)), len(content))


def is_old(path: Path) -> bool:
    """Whether a log has records of the first format, which are read, but not added to."""
    with path.open("rb") as file:
        head = file.read(len(MAGIC))
    return head != MAGIC[: len(head)] and any(head)


def read_records(path: Path) -> Iterator[Record]:
    """The records of a log. What lies behind them is the beginning of one that a kill or a loss of
    power cut off; anything else is damage, and refused.
    """
    if is_old(path):
        yield from _read_old(path)
        return
    place, size = len(MAGIC), path.stat().st_size
    with path.open("rb") as file:
        file.seek(place)
        while len(frame := file.read(_FRAME.size)) == _FRAME.size:
            check, _, length = _FRAME.unpack(frame)
            start = place + _FRAME.size
            if check != zlib.crc32(frame[4:]):
                if any(frame) or any(file.read()):
                    raise _damaged(path, place, "a length that is not as it was written")
                return  # a size that was written before what it is of
            if length > size - start:
                return
            content = file.read(length)
            if _frame(content) != frame:
                if start + length == size and _has_lost_sector(content, start):
                    return
                raise _damaged(path, place, "a record that is not as it was written")
            yield Record(start, content)
            place = start + length


def _damaged(path: Path, place: int, what: str) -> DamagedLogError:
    return DamagedLogError(
        f"{path} is damaged at byte {place}: {what}. No log was read. Restore the file from a "
        f"copy, or cut it there (truncate -s {place}) to lose what was written from there on"
    )


def _has_lost_sector(content: bytes, start: int) -> bool:
    """Whether a part of a record that one sector holds, from a place in the file on, is zeros."""
    edges = [0, *range(-start % _SECTOR, len(content), _SECTOR), len(content)]
    return any(begin < end and not any(content[begin:end]) for begin, end in pairwise(edges))


def _read_old(path: Path) -> Iterator[Record]:
    """The records of a log of the first format, where a changed length looks like an end."""
    place, size = 0, path.stat().st_size
    with path.open("rb") as file:
        while len(frame := file.read(_OLD.size)) == _OLD.size:
            _, length = _OLD.unpack(frame)
            start = place + _OLD.size
            if length > size - start:
                if place == 0:  # or the first bytes of a newer log have changed
                    raise _damaged(path, 0, "no log begins like this")
                return
            content = file.read(length)
            if _old_frame(content) != frame:
                lost = not any(frame) and not any(file.read())
                if start + length == size or lost:
                    return
                raise _damaged(path, place, "a record that is not as it was written")
            yield Record(start, content)
            place = start + length

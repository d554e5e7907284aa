"""Files that only grow, so that what a checkpoint does not cover can be cut off when a run is
resumed.
"""

import os
import zlib
from pathlib import Path

from driftfilter.base.checks import require
from driftfilter.storage.own_file import open_own

_PIECE = 1 << 20  # bytes


class AppendLog:
    """A file that only grows, from the size that is given; ``sum`` is the CRC-32 of it all."""

    def __init__(self, path: Path, size: int = 0) -> None:
        self.sum = checksum(path, size)
        file = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.path, self._file = path, os.fdopen(file, "ab", buffering=0)
        self._file.truncate(size)
        self._file.seek(size)

    def append(self, data: bytes) -> None:
        """Add to the end, for others to see at once."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:  # which does not name the file
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.sum = zlib.crc32(data, self.sum)

    def sync(self) -> int:
        """Bring the file to the disk; its size."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def checksum(path: Path, size: int) -> int:
    """CRC-32 of the first bytes of a file, which must have so many."""
    have = path.stat().st_size if path.exists() else 0
    require(
        have >= size,
        str(path),
        f"{have} bytes",
        f"of at least the {size} bytes that the checkpoint covers",
    )
    found, left = 0, size
    if size:
        with path.open("rb") as file:
            while left and (piece := file.read(min(left, _PIECE))):
                found, left = zlib.crc32(piece, found), left - len(piece)
    return found


def whole_lines(path: Path) -> int:
    """Bytes of a file up to its last whole line; a crash may leave the beginning of another.

    0 if there is no file.
    """
    return path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0

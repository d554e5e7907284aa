"""Files that only grow, so that what a checkpoint does not cover can be cut off when a run is
resumed.
"""

import os
from pathlib import Path

from driftfilter.base.checks import require


class AppendLog:
    """A file that only grows, from the size that is given."""

    def __init__(self, path: Path, size: int = 0) -> None:
        have = path.stat().st_size if path.exists() else 0
        require(
            have >= size,
            str(path),
            f"{have} bytes",
            f"of at least the {size} bytes that the checkpoint covers",
        )
        self.path, self._file = path, path.open("ab", buffering=0)
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

    def sync(self) -> int:
        """Bring the file to the disk; its size."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def whole_lines(path: Path) -> int:
    """Bytes of a file up to its last whole line; a crash may leave the beginning of another.

    0 if there is no file.
    """
    return path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0

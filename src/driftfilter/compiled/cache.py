"""Compiled code on disk, with a checksum: a full disk or a damaged file costs the time to compile
anew, and one warning.

Damaged machine code would else be run.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from numba.core.caching import FunctionCache, IndexDataCacheFile

from driftfilter.base.checks import warn

_SIZE = hashlib.sha256().digest_size


_told: list[str] = []


def _tell(what: str) -> None:
    """Warn, once in a process."""
    if not _told:
        _told.append(what)
        advice = "this process compiles anew (NUMBA_CACHE_DIR names another folder)"
        warn(f"compiled code was not {what}; {advice}")


class _Hashed:
    """A file that is written to, and the hash of what was written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.hash = file, hashlib.sha256()

    def write(self, data: Any) -> int:
        """Write, as a file does."""
        self.hash.update(data)
        return self._file.write(data)


class _Files(IndexDataCacheFile):
    """Numba's files, each with its SHA-256 as the last bytes, which unpickling leaves alone."""

    @contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[IO[bytes]]:
        with super()._open_for_write(filepath) as file:
            hashed = _Hashed(file)
            yield cast(IO[bytes], hashed)
            file.write(hashed.hash.digest())

    def _load_index(self) -> Any:
        own: Any = super()  # numba has no types
        return own._load_index() if _is_whole(Path(self._index_path)) else {}

    def _load_data(self, name: str) -> Any:
        own: Any = super()
        path = Path(own._data_path(name))
        if not _is_whole(path):
            raise OSError(f"{path} is damaged")  # as if it were not there
        return own._load_data(name)


def _is_whole(path: Path) -> bool:
    """Whether a file is as it was written, or not there."""
    if not path.exists():
        return True
    data = path.read_bytes()
    whole = hashlib.sha256(data[:-_SIZE]).digest() == data[-_SIZE:]
    if not whole:
        _tell(f"read from the cache: {path} is damaged")
    return whole


class KernelCache(FunctionCache):
    """Numba's cache of a function, which never fails: what it cannot read is compiled, and what it
    cannot write is left out.
    """

    def __init__(self, function: Any) -> None:
        own: Any = super()
        own.__init__(function)
        files: Any = _Files
        self._cache_file = files(
            self._cache_path, self._impl.filename_base, self._cache_file._source_stamp
        )

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        own: Any = super()
        try:
            return own.load_overload(sig, target_context)
        except Exception as error:  # of whatever kind: it can be compiled
            _tell(f"read from the cache: {type(error).__name__}: {error}")
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        own: Any = super()
        try:
            own.save_overload(sig, data)
        except Exception as error:  # of whatever kind: it has been compiled
            _tell(f"written to the cache: {type(error).__name__}: {error}")

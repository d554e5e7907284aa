"""Which store a place stands for; and stores elsewhere: any file system that fsspec knows, one
object for each tenant.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from driftfilter.app.serve.records import Stored, to_checkpoint
from driftfilter.app.serve.ring import find_owner
from driftfilter.app.serve.store import Entry, FolderStore, Store


class RemoteStore:
    """Objects of a file system such as s3:// or gs://, each written whole before its step is
    answered.

    There are no locks: that one process at a time has a tenant is the router's word.
    """

    def __init__(self, address: str) -> None:
        import fsspec

        self._files, self._root = fsspec.core.url_to_fs(address)
        self._files.makedirs(f"{self._root}/tenants", exist_ok=True)
        self._here: set[str] = set()  # tenants that this worker has written

    def _path(self, key: str) -> str:
        return f"{self._root}/tenants/{key[:2]}/{key}.safetensors"

    def read(self, key: str) -> Stored | None:
        with _failing():
            try:
                return Stored(self._files.cat_file(self._path(key)))
            except FileNotFoundError:
                return None

    def write(self, entries: Sequence[Entry]) -> None:
        """Keep checkpoints; each of them is whole, and one that fails leaves those before it."""
        with _failing():
            for key, record in entries:
                self._write(key, record)

    def _write(self, key: str, record: Stored | None) -> None:
        path = self._path(key)
        if record is None:
            if self._files.exists(path):
                self._files.rm_file(path)
            self._here.discard(key)
            return
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self._files.transaction:  # under its name once it is whole
            self._files.pipe_file(path, to_checkpoint(record))
        self._here.add(key)

    def count(self) -> int:
        return len(self._here)

    def release(self, keys: Sequence[str]) -> None:
        self._here.difference_update(keys)

    def held(self) -> Iterator[str]:
        yield from list(self._here)

    def tend(self, budget: int) -> bool:
        return False

    def close(self) -> None:
        self._here.clear()


@contextmanager
def _failing() -> Iterator[None]:
    """An OSError of whatever a file system raises: those of some are of no kind of their own."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def open_store(
    place: str, worker: str = "0", sync: bool = True, wait: float | None = None
) -> Store:
    """The store of a folder, or of an address such as s3://bucket/folder."""
    if "://" in place:
        return RemoteStore(place)
    return FolderStore(Path(place), worker, sync, wait=wait)


def hand_over(place: str, workers: Sequence[str]) -> None:
    """Write files of the tenants that a log has and its worker no longer serves: of one that is
    not among these workers, or by whom they are now. A store of objects has no logs.
    """
    if "://" in place:
        return
    names = {log.parent.name for log in Path(place).glob("workers/*/*.log")}
    for name in sorted(filter(str.isalnum, names)):
        if name not in workers:
            with FolderStore(Path(place), name, segment=1) as store:
                store.release(list(store.held()))
                while store.tend(100):  # its old logs go
                    pass
        elif len(workers) > 1:
            with FolderStore(Path(place), name) as store:
                store.release([key for key in store.held() if find_owner(key, workers) != name])

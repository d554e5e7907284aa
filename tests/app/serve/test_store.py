"""A store gives back what was written last, across kills, new logs and other workers."""

import errno
import random
from pathlib import Path

import pytest

from driftfilter.app.serve.open_store import hand_over
from driftfilter.app.serve.records import Stored
from driftfilter.app.serve.ring import find_owner
from driftfilter.app.serve.store import Entry, FolderStore, key_of
from driftfilter.storage.record_log import RecordLog

KEYS = [key_of(f"tenant {number}") for number in range(6)]


def _whole(record: Stored) -> bytes:
    return record.content + b" in " * bool(record.context) + record.context


def test_a_store_is_a_dictionary_that_outlasts_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a dictionary: writes, deletions and new openings at random, logs of few records, with
    contexts and without.
    """
    monkeypatch.setattr("driftfilter.app.serve.store.to_checkpoint", _whole)
    draws, expected = random.Random(0), dict[str, bytes]()
    store = FolderStore(tmp_path, sync=False, segment=300)
    for step in range(80):
        entries = []
        for key in draws.sample(KEYS, draws.randint(1, 3)):
            record = Stored(f"{key} {step}".encode(), draws.choice([b"", b"this", b"that"]))
            entries.append(Entry(key, None if draws.random() < 0.2 else record))
        store.write(entries)
        for key, kept in entries:
            expected.pop(key, None)
            expected |= {} if kept is None else {key: _whole(kept)}
        store.tend(draws.randint(0, 2))
        if draws.random() < 0.1:
            store.close()
            store = FolderStore(tmp_path, sync=False, segment=300)
        assert {key: _whole(found) for key in KEYS if (found := store.read(key))} == expected
        assert store.count() == len(expected)
    while store.tend(1):
        pass
    assert len(list((tmp_path / "workers" / "0").glob("*.log"))) == 1
    store.close()


def test_a_tenant_that_is_left_belongs_to_the_other_worker(tmp_path: Path) -> None:
    first, second = FolderStore(tmp_path, "a"), FolderStore(tmp_path, "b")
    first.write(
        [Entry(KEYS[0], Stored(b"1")), Entry(KEYS[1], Stored(b"stays")), Entry(KEYS[2], None)]
    )
    first.release(KEYS[:1] + KEYS[2:3])
    assert second.read(KEYS[0]) == Stored(b"1")
    second.write([Entry(KEYS[0], Stored(b"2")), Entry(KEYS[2], Stored(b"new"))])
    second.release([KEYS[2]])
    first.close()
    first = FolderStore(tmp_path, "a", segment=1)  # its old records say nothing any more
    first.write([Entry(KEYS[1], Stored(b"later"))])
    while first.tend(9):
        pass
    assert second.read(KEYS[0]) == Stored(b"2")
    assert first.read(KEYS[2]) == Stored(b"new")
    first.close()
    second.close()


def test_a_store_is_one_process_s_and_free_once_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("driftfilter.app.serve.store._WAIT", 0.1)
    with FolderStore(tmp_path) as store:
        store.write([Entry(KEYS[0], Stored(b"1"))])
        with pytest.raises(ValueError, match="is in use: claimed by process"):
            FolderStore(tmp_path)
    with FolderStore(tmp_path) as store:
        assert store.read(KEYS[0]) == Stored(b"1")


def test_names_never_become_paths(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with FolderStore(tmp_path / "store", segment=1) as store:
        for name in ("../../x", "/etc/passwd", "..", "a\0b", "ü" * 200):
            store.write([Entry(key_of(name), Stored(b"1"))])
        while store.tend(9):
            pass
    files = [
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()
    ]
    allowed = ("store/tenants/", "store/workers/0")
    assert files
    assert all(path.startswith(allowed) and path.isascii() for path in files)
    stems = [Path(path).stem for path in files if path.startswith("store/tenants/")]
    assert all(len(stem) == 40 and int(stem, 16) >= 0 for stem in stems)


def test_a_log_that_cannot_be_removed_never_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is read-only for a moment, just when an old log should go."""
    store = FolderStore(tmp_path, segment=1)
    store.write([Entry(KEYS[0], Stored(b"1"))])
    store.write([Entry(KEYS[0], Stored(b"2"))])

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        with pytest.raises(OSError, match="Read-only"):
            store.tend(9)
    store.write([Entry(KEYS[1], Stored(b"other"))])
    while store.tend(9):
        pass
    store.close()
    with FolderStore(tmp_path) as store:
        assert store.read(KEYS[0]) == Stored(b"2")


def test_what_is_written_comes_to_the_disk_within_a_second_or_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if nothing more is written; and if that fails, no step is said not to be taken."""
    now, synced, fails = [0.0], list[str](), [True]
    monkeypatch.setattr("driftfilter.app.serve.store.time.monotonic", lambda: now[0])

    def sync(log: RecordLog) -> None:
        if fails[0]:
            raise OSError(errno.EIO, "Input/output error")
        synced.append(log.path.stem)

    with FolderStore(tmp_path, sync=False, segment=1) as store:
        monkeypatch.setattr(RecordLog, "sync", sync)
        store.write([Entry(KEYS[0], Stored(b"1"))])
        now[0] = 5.0
        store.write([Entry(KEYS[0], Stored(b"2"))])
        with pytest.raises(OSError, match="Input/output"):
            store.tend(0)
        fails[0] = False
        while store.tend(0) and len(synced) < 2:
            now[0] += 0.05
        assert synced == ["00000001", "00000002"]


def test_tenants_of_other_workers_are_found_by_those_of_a_new_start(tmp_path: Path) -> None:
    """Another number of workers, or Ray instead of one process and back: nothing is lost. Other
    files may lie there.
    """
    for place in ("workers/0/copy.log", "workers/my-copy/00000001.log"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).touch()
    for number, workers in enumerate((["0"], ["w0", "w1"], ["w0", "w1", "w2"], ["w0"], ["0"])):
        hand_over(str(tmp_path), workers)
        stores = {name: FolderStore(tmp_path, name, segment=300) for name in workers}
        for key in KEYS:
            store = stores[find_owner(key, workers)]
            assert store.read(key) == (Stored(f"{number - 1}".encode()) if number else None)
            store.write([Entry(key, Stored(f"{number}".encode()))])
        assert sum(store.count() for store in stores.values()) >= len(KEYS)
        for store in stores.values():
            store.close()
    others = [len(list(path.glob("*.log"))) for path in (tmp_path / "workers").glob("w*")]
    assert max(others) == 1


def test_a_log_that_cannot_be_begun_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full just when a new log should begin; every request tries again."""
    with FolderStore(tmp_path, segment=1) as store:
        store.write([Entry(KEYS[0], Stored(b"1"))])

        def fail(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        before = len(list(Path("/proc/self/fd").iterdir()))
        with monkeypatch.context() as patch:
            patch.setattr("os.pwrite", fail)
            for _ in range(3):
                with pytest.raises(OSError, match="No space left"):
                    store.write([Entry(KEYS[1], Stored(b"2"))])
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        store.write([Entry(KEYS[1], Stored(b"2"))])
        assert [store.read(key) for key in KEYS[:2]] == [Stored(b"1"), Stored(b"2")]


def test_a_file_that_cannot_be_looked_at_is_no_new_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FolderStore(tmp_path, segment=1) as store:
        store.write([Entry(KEYS[0], Stored(b"1"))])
        store.write([Entry(KEYS[1], Stored(b"2"))])
        while store.tend(9):
            pass

        def fail(path: Path) -> bytes:
            raise OSError(errno.EIO, "Input/output error", str(path))

        monkeypatch.setattr(Path, "is_file", lambda path: False)  # as of Python 3.14
        monkeypatch.setattr(Path, "read_bytes", fail)
        with pytest.raises(OSError, match="Input/output"):
            store.read(KEYS[0])


def test_a_record_that_has_changed_since_the_start_is_refused(tmp_path: Path) -> None:
    with FolderStore(tmp_path) as store:
        store.write([Entry(KEYS[0], Stored(b"whole"))])
        (log,) = tmp_path.glob("workers/0/*.log")
        data = log.read_bytes()
        assert store.read(KEYS[0]) == Stored(b"whole")
        log.write_bytes(data.replace(b"whole", b"while"))
        with pytest.raises(OSError, match="damaged"):
            store.read(KEYS[0])
        log.write_bytes(data)


def test_new_folders_outlast_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is brought to the disk by the folder it is in; the same is asked of a removed log."""
    synced = set[Path]()
    for place in ("storage.atomic", "storage.record_log", "app.serve.store"):
        monkeypatch.setattr(f"driftfilter.{place}.sync_folder", synced.add, raising=False)
    with FolderStore(tmp_path / "a" / "store", segment=1) as store:
        folders = {"a", "a/store", "a/store/workers"}
        assert {tmp_path, *(tmp_path / name for name in folders)} <= synced
        store.write([Entry(KEYS[0], Stored(b"1"))])
        store.write([Entry(KEYS[1], Stored(b"2"))])
        synced.clear()
        while store.tend(9):
            pass
        assert {store.folder / "tenants", store.folder / "workers" / "0"} <= synced

"""Records are whole or not there, whatever a kill or the disk does."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from driftfilter.storage.record_log import DamagedLogError, RecordLog, read_records

RECORDS = [b"one", b"", b"three" * 9]


def _written(path: Path) -> bytes:
    log = RecordLog(path)
    starts = log.append(RECORDS, sync=True)
    assert [
        log.read(start, len(own)) for start, own in zip(starts, RECORDS, strict=True)
    ] == RECORDS
    log.close()
    return path.read_bytes()


def _read(path: Path) -> list[bytes]:
    return [record.content for record in read_records(path)]


def test_a_log_cut_anywhere_has_its_whole_records(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    whole = _written(path)
    assert _read(path) == RECORDS
    ends, size = [], 0
    for own in RECORDS:
        size += 12 + len(own)
        ends.append(size)
    assert size == len(whole)
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        assert _read(path) == RECORDS[: sum(end <= cut for end in ends)]


def test_zeros_behind_the_records_are_of_a_loss_of_power(tmp_path: Path) -> None:
    """A file system may keep the new size of a file without what was written there."""
    path = tmp_path / "a.log"
    whole = _written(path)
    for zeros in (1, 12, 13, 5000):
        path.write_bytes(whole + bytes(zeros))
        assert _read(path) == RECORDS
    path.write_bytes(whole + bytes(12) + whole)
    with pytest.raises(DamagedLogError, match="damaged at byte"):
        _read(path)


def test_a_flipped_bit_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    whole = _written(path)
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 4
        path.write_bytes(damaged)
        found: list[bytes] = []
        try:
            found = _read(path)
        except DamagedLogError:
            continue
        assert len(found) < len(RECORDS)  # taken for a kill at the end
        assert found == RECORDS[: len(found)]


@pytest.mark.parametrize("failing", ["pwrite", "fsync"])
def test_a_failed_write_takes_back_what_it_wrote(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.log"
    log = RecordLog(path)
    log.append([b"first"], sync=True)
    write = os.pwrite

    def fail(*args: Any) -> int:
        if len(args) == 3:
            write(args[0], bytes(args[1])[:3], args[2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, fail)
        with pytest.raises(OSError, match=r"No space left.*a\.log"):
            log.append([b"second"], sync=True)
    assert _read(path) == [b"first"]
    with monkeypatch.context() as patch:  # neither can it be taken back
        patch.setattr(os, failing, fail)
        patch.setattr(os, "ftruncate", fail)
        with pytest.raises(OSError, match="No space left"):
            log.append([b"second"], sync=True)
    log.append([b"third"], sync=False)
    log.close()
    assert _read(path) == [b"first", b"third"]

"""Records are whole or not there, whatever a kill or the disk does."""

import errno
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from driftfilter.storage.record_log import (
    MAGIC,
    DamagedLogError,
    RecordLog,
    is_old,
    read_records,
)

RECORDS = [b"one", b"", b"three" * 9]
FRAME = 16  # bytes beside the content of a record


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
    ends, size = [], len(MAGIC)
    for own in RECORDS:
        size += FRAME + len(own)
        ends.append(size)
    assert size == len(whole)
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        assert _read(path) == RECORDS[: sum(end <= cut for end in ends)]


def test_zeros_behind_the_records_are_of_a_loss_of_power(tmp_path: Path) -> None:
    """A file system may keep the new size of a file without what was written there."""
    path = tmp_path / "a.log"
    whole = _written(path)
    for zeros in (1, FRAME, FRAME + 1, 5000):
        path.write_bytes(whole + bytes(zeros))
        assert _read(path) == RECORDS
    path.write_bytes(whole + bytes(FRAME) + whole)
    with pytest.raises(DamagedLogError, match="damaged at byte"):
        _read(path)


def test_a_flipped_bit_is_said(tmp_path: Path) -> None:
    """Wherever it is, in the last record, too: no record is left out in silence."""
    path = tmp_path / "a.log"
    whole = _written(path)
    for place in range(len(whole)):
        for bit in (1, 4, 128):
            damaged = bytearray(whole)
            damaged[place] ^= bit
            path.write_bytes(damaged)
            with pytest.raises(
                DamagedLogError, match=r"damaged at byte \d+: (a|no) (length|record|log)"
            ):
                _read(path)


def test_a_sector_that_never_came_is_of_a_loss_of_power(tmp_path: Path) -> None:
    """In the last record; before others it is damage."""
    path = tmp_path / "a.log"
    log = RecordLog(path)
    log.append([b"first", b"x" * 2000], sync=True)
    log.close()
    whole = path.read_bytes()
    lost = whole[:1024] + bytes(512) + whole[1536:]
    path.write_bytes(lost)
    assert _read(path) == [b"first"]
    path.write_bytes(lost + whole[len(MAGIC) :])
    with pytest.raises(DamagedLogError, match="damaged at byte 29"):
        _read(path)


def test_a_log_of_the_first_format_is_read(tmp_path: Path) -> None:
    """CRC-32 of length and content, length, content."""
    path = tmp_path / "a.log"
    frames = []
    for own in RECORDS:
        length = len(own).to_bytes(8, "little")
        frames.append(zlib.crc32(length + own).to_bytes(4, "little") + length + own)
    path.write_bytes(b"".join(frames))
    assert is_old(path)
    assert _read(path) == RECORDS
    path.write_bytes(b"".join(frames)[:-1])
    assert _read(path) == RECORDS[:2]


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

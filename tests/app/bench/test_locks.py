"""Claims: one process at a time, whatever was left behind."""

import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from driftfilter.app.bench import locks
from driftfilter.app.bench.locks import claim, claim_path, describe_holder

CLAIMS = (
    "import os, pathlib, sys; from driftfilter.app.bench import locks; "
    "claim = locks.claim(pathlib.Path(sys.argv[1]));"
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "task.json"


def leave(path: Path, text: str) -> Path:
    """A claim that no process has locked."""
    place = claim_path(path)
    place.parent.mkdir(exist_ok=True)
    place.write_text(text)
    return place


def in_another_process(path: Path, code: str) -> int:
    return subprocess.run([sys.executable, "-c", CLAIMS + code, str(path)], check=False).returncode


def test_a_claim_says_whose_it_is_and_goes_with_the_block(path: Path) -> None:
    with claim(path) as mine:
        assert mine
        found = json.loads(path.with_suffix(".claim").read_text())
        assert found == {"host": socket.gethostname(), "pid": os.getpid()}
    assert not list(path.parent.iterdir())
    with pytest.raises(KeyboardInterrupt), claim(path):
        raise KeyboardInterrupt
    assert not list(path.parent.iterdir())


def test_a_live_process_refuses_another(path: Path) -> None:
    with claim(path):
        before = claim_path(path).read_text()
        assert in_another_process(path, "sys.exit(9 if claim.__enter__() else 3)") == 3
        with claim(path) as mine:  # of the same process, too
            assert not mine
        assert claim_path(path).read_text() == before


def test_the_claim_of_a_process_that_died_is_taken_over(path: Path) -> None:
    assert in_another_process(path, "assert claim.__enter__(); os._exit(7)") == 7
    assert json.loads(claim_path(path).read_text())["pid"] != os.getpid()
    with claim(path) as mine:
        assert mine
        assert json.loads(claim_path(path).read_text())["pid"] == os.getpid()
    assert not list(path.parent.iterdir())


def test_what_another_host_claims_is_left_alone(path: Path) -> None:
    """Its lock may not be seen here."""
    place = leave(path, text := json.dumps({"host": "another", "pid": 1}))
    with claim(path) as mine:
        assert not mine
    assert place.read_text() == text
    expected = f"claimed by process 1 on host another; if it runs no more, remove {place} "
    assert describe_holder(path).startswith(expected)


@pytest.mark.parametrize("text", ["", "{", "[]"], ids=["empty", "cut", "other"])
def test_a_claim_that_names_nobody_is_free_after_a_while_unless_locked(
    text: str, path: Path
) -> None:
    """One made a moment ago may be another host's, which has not yet named itself."""
    place = leave(path, text)
    with claim(path) as mine:
        assert not mine
    os.utime(place, (1.0, 1.0))
    with claim(path) as mine:
        assert mine
        place.write_text(text)
        assert "an unknown process" in describe_holder(path)
        with claim(path) as again:
            assert not again


def test_a_claim_removed_before_it_was_locked_is_made_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process ends between the two: a lock on a file without a name would keep nobody out."""
    place, lock, calls = leave(path, ""), fcntl.flock, []

    def flock(file: int, operation: int) -> None:
        calls.append(file)
        if len(calls) == 1:
            place.unlink()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with claim(path) as mine:
        assert mine
        assert len(calls) == 2
        assert in_another_process(path, "sys.exit(9 if claim.__enter__() else 3)") == 3


def test_without_file_locks_an_error_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", fail)
        with pytest.raises(OSError, match=r"no file lock: Function not implemented: .*task\.claim"):
            claim(path).__enter__()
    monkeypatch.setattr(locks, "fcntl", None)
    with pytest.raises(OSError, match=r"need file locks \(fcntl\.flock\)"):
        claim(path).__enter__()

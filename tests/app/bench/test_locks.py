"""Claims: one process at a time, whatever was left behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from driftfilter.app.bench.locks import claim_of, claimed

DIES = (
    "import os, pathlib, sys; from driftfilter.app.bench import locks; claim = "
    "locks.claimed(pathlib.Path(sys.argv[1]));"
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "task.json"


def _left(path: Path, **changes: object) -> Path:
    """A claim of another live process, but for the changes."""
    claim = claim_of(path)
    claim.parent.mkdir(exist_ok=True)
    claim.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getppid(), **changes}))
    return claim


def test_a_claim_says_whose_it_is_and_goes_with_the_block(path: Path) -> None:
    with claimed(path) as mine:
        assert mine
        found = json.loads(path.with_suffix(".claim").read_text())
        assert found == {"host": socket.gethostname(), "pid": os.getpid()}
    assert not list(path.parent.iterdir())
    with pytest.raises(KeyboardInterrupt), claimed(path):
        raise KeyboardInterrupt
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize(
    "changes", [{}, {"host": "another", "pid": 2**22 + 1}], ids=["alive", "elsewhere"]
)
def test_what_another_claims_is_left_alone(changes: dict[str, object], path: Path) -> None:
    claim = _left(path, **changes)
    before = claim.read_text()
    with claimed(path) as mine:
        assert not mine
    assert claim.read_text() == before


def test_the_claim_of_a_process_that_died_is_taken_over(path: Path) -> None:
    code = f"{DIES} assert claim.__enter__(); os._exit(7)"
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 7
    assert json.loads(claim_of(path).read_text())["pid"] != os.getpid()
    with claimed(path) as mine:
        assert mine
        assert json.loads(claim_of(path).read_text())["pid"] == os.getpid()
    assert not list(path.parent.iterdir())


def test_a_live_process_refuses_another(path: Path) -> None:
    with claimed(path):
        code = f"{DIES} sys.exit(9 if claim.__enter__() else 3)"
        assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 3
        assert claim_of(path).exists()


def test_an_earlier_process_of_the_same_number_is_gone(path: Path) -> None:
    _left(path, pid=os.getpid())
    with claimed(path) as mine:
        assert mine


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"host": "x", "pid": -1}'], ids=["empty", "cut", "other", "group"]
)
def test_a_claim_that_cannot_be_read_is_one_for_a_minute(text: str, path: Path) -> None:
    claim = _left(path)
    claim.write_text(text)
    with claimed(path) as mine:
        assert not mine
    os.utime(claim, (0, 0))
    with claimed(path) as mine:
        assert mine


def test_of_two_that_take_over_one_loses(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one has replaced the old claim after it was read here: its claim comes back."""
    claim = _left(path, pid=os.getpid())
    theirs = json.dumps({"host": socket.gethostname(), "pid": os.getppid()})
    rename = Path.rename

    def late(self: Path, target: Path) -> Path:
        self.write_text(theirs)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", late)
    with claimed(path) as mine:
        assert not mine
    assert claim.read_text() == theirs
    assert len(list(path.parent.iterdir())) == 1

"""Claims: one process at a time, whatever was left behind, in whatever container."""

import fcntl
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from containers import CONTAINER, require_containers
from driftfilter.app.bench import locks
from driftfilter.app.bench.locks import claim, claim_path, describe_holder
from driftfilter.storage import own_file

CLAIMS = (
    "import os, pathlib, sys, time; from driftfilter.app.bench import locks; "
    "claim = locks.claim(pathlib.Path(sys.argv[1]));"
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "task.json"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "BEAT", 0.05)
    monkeypatch.setattr(locks, "PATIENCE", 0.5)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No claim may be watched."""

    def watch(*_: object) -> None:
        raise AssertionError("it had to wait")

    monkeypatch.setattr(locks, "_watch", watch)


def leave(path: Path, text: str) -> Path:
    """A claim that no process has locked."""
    place = claim_path(path)
    place.parent.mkdir(exist_ok=True)
    place.write_text(text)
    return place


def left_here(path: Path, host: str, pid: int) -> str:
    """A claim of this kernel."""
    path.parent.mkdir(exist_ok=True)
    kernel = locks._kernel(claim_path(path))
    return json.dumps({"host": host, "pid": pid, "kernel": kernel, "token": "x"})


def in_another_process(path: Path, code: str, *prefix: str) -> int:
    command = [*prefix, sys.executable, "-c", CLAIMS + code, str(path)]
    return subprocess.run(command, check=False).returncode


def test_a_claim_says_whose_it_is_and_goes_with_the_block(path: Path) -> None:
    with claim(path) as mine:
        assert mine
        found = json.loads(path.with_suffix(".claim").read_text())
        assert found["host"] == socket.gethostname()
        assert found["pid"] == os.getpid()
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
        expected = f"claimed by process {os.getpid()} on host {socket.gethostname()}; it is free as"
        assert describe_holder(path).startswith(expected)
    assert describe_holder(path).startswith("left by another process meanwhile")


@pytest.mark.usefixtures("at_once")
def test_the_claim_of_a_process_that_died_is_taken_over(path: Path) -> None:
    assert in_another_process(path, "assert claim.__enter__(); os._exit(7)") == 7
    assert json.loads(claim_path(path).read_text())["pid"] != os.getpid()
    with claim(path) as mine:
        assert mine
        assert json.loads(claim_path(path).read_text())["pid"] == os.getpid()
    assert not list(path.parent.iterdir())


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("host", "pid"),
    [("another", 1), (socket.gethostname(), os.getppid()), (socket.gethostname(), os.getpid())],
    ids=["another name", "recycled", "our own number"],
)
def test_a_claim_of_this_kernel_is_free_at_once_whatever_it_names(
    host: str, pid: int, path: Path
) -> None:
    """A container that was started again may have another name; numbers of processes recur."""
    leave(path, left_here(path, host, pid))
    with claim(path) as mine:
        assert mine
    assert not list(path.parent.iterdir())


@pytest.mark.usefixtures("at_once")
def test_a_forked_child_does_not_keep_its_parents_lock(path: Path) -> None:
    code = (
        "assert claim.__enter__(); child = os.fork();"
        "os.waitpid(child, os.WUNTRACED) and os._exit(7) if child else print(os.getpid());"
        "sys.stdout.flush();"
        "os.kill(os.getpid(), 19); time.sleep(100)"
    )
    command = [sys.executable, "-c", CLAIMS + code, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert parent.wait() == 7
    try:
        with claim(path) as mine:
            assert mine
    finally:
        os.kill(child, signal.SIGKILL)


def test_two_containers_do_not_share_a_claim_and_a_killed_one_frees_it_at_once(path: Path) -> None:
    """Both are process 1 of a host of one name."""
    require_containers()
    hold = "assert claim.__enter__(); print(os.getpid(), flush=True); time.sleep(100)"
    command = [*CONTAINER, sys.executable, "-c", CLAIMS + hold, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert int(first.stdout.readline()) == 1
        ask = "sys.exit(9 if claim.__enter__() else 3)"
        assert in_another_process(path, ask, *CONTAINER) == 3
        first.kill()
    taken = (
        "locks.PATIENCE = 100; begun = time.monotonic();"
        "found = claim.__enter__(); sys.exit(9 if found and time.monotonic() < begun + 50 else 3)"
    )
    assert in_another_process(path, taken, *CONTAINER) == 9


def test_two_containers_with_a_mount_each_do_not_share_a_claim(tmp_path: Path) -> None:
    """One folder through two mounts: the kernel shows neither the lock of the other."""
    require_containers()
    for name in ("lower", "upper", "work0", "work1", "shared"):
        (tmp_path / name).mkdir()

    def mounted(number: int, code: str) -> list[str]:
        parts = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
        mount = f"mount -t overlay overlay -o {parts}{number},index=off {tmp_path}/shared"
        quick = CLAIMS + "locks.BEAT, locks.PATIENCE = 0.1, 1.0;" + code
        python = shlex.join([sys.executable, "-c", quick, f"{tmp_path}/shared/task.json"])
        return [*CONTAINER, "sh", "-c", f"{mount} || exit 40; exec {python}"]

    hold = "print(bool(claim.__enter__()), flush=True); time.sleep(100)"
    ask = mounted(1, "sys.exit(9 if claim.__enter__() else 3)")
    with subprocess.Popen(mounted(0, hold), stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        if not (said := first.stdout.readline()):
            pytest.skip("mount is not permitted here")
        assert said == b"True\n"
        assert subprocess.run(ask, check=False).returncode == 3
        first.kill()
    assert subprocess.run(ask, check=False).returncode == 9


# Locks that are not seen


UNSEEN = pytest.mark.parametrize("kind", ["not shared", "not supported", "no fcntl", "no boot id"])


def hide_locks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another kernel, on file systems or systems without locks, or that do not tell kernels."""

    def fail(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    if kind == "not shared":
        monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    elif kind == "not supported":
        monkeypatch.setattr(fcntl, "flock", fail)
    elif kind == "no fcntl":
        monkeypatch.setattr(own_file, "fcntl", None)
    else:
        monkeypatch.setattr(locks, "_BOOT", Path("not/there"))


@UNSEEN
@pytest.mark.usefixtures("soon")
def test_a_claim_whose_lock_is_not_seen_is_kept_by_its_beats(
    kind: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_locks(kind, monkeypatch)
    with claim(path) as mine:
        assert mine
        if kind == "not shared":
            monkeypatch.setattr(locks, "_kernel", lambda _: "another")
        for _ in range(2):
            with claim(path) as other:
                assert not other
        time.sleep(0.2)
        mine.check()
    assert not list(path.parent.iterdir())


@UNSEEN
@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", json.dumps({"host": socket.gethostname(), "pid": os.getpid()})],
    ids=["empty", "cut", "other", "earlier version"],
)
def test_a_claim_without_beats_is_free_after_a_while(
    kind: str, text: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_locks(kind, monkeypatch)
    leave(path, text)
    begun = time.monotonic()
    with claim(path) as mine:
        assert mine
        assert time.monotonic() > begun + 0.5
    assert not list(path.parent.iterdir())


@pytest.mark.usefixtures("soon")
def test_of_several_that_take_over_at_once_one_has_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_locks("not supported", monkeypatch)
    leave(path, "{}")
    together, ended = threading.Barrier(5), threading.Barrier(5)
    found: list[bool] = []

    def work() -> None:
        together.wait()
        with claim(path) as mine:
            found.append(mine is not None)
            ended.wait()

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(found) == 1


@pytest.mark.usefixtures("soon")
def test_a_claim_that_was_taken_over_while_its_process_stood_still_is_lost(path: Path) -> None:
    taken = json.dumps({"host": "far", "pid": 1, "token": "theirs"})
    with claim(path) as mine:
        assert mine
        claim_path(path).write_text(taken)
        time.sleep(0.3)
        with pytest.raises(OSError, match=r"no longer this process's.*process 1 on host far"):
            next(mine.each(range(3)))
    assert claim_path(path).read_text() == taken


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


@pytest.mark.parametrize("target", ["precious", "not there"])
def test_a_claim_that_is_a_link_is_not_written_through(target: str, path: Path) -> None:
    path.parent.mkdir()
    precious = path.parent.parent / "precious"
    precious.write_text("{}")
    claim_path(path).symlink_to(path.parent.parent / target)
    with pytest.raises(OSError, match=r"symbolic link to .*not written through.*task\.claim"):
        claim(path).__enter__()
    assert precious.read_text() == "{}"
    assert sorted(each.name for each in precious.parent.iterdir()) == ["precious", "run"]

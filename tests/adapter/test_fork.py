"""os.fork while another thread updates or saves: the child has a whole state, and goes on."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import driftfilter as df
from driftfilter.base.fork_lock import ForkLock
from driftfilter.storage.atomic import write_atomic
from fuzzing import batch, made

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
    pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning"),  # of Python 3.12
]
SECONDS = 30  # until a child counts as one that hangs


def status_of_child(work: Callable[[], object]) -> int | None:
    """The status of a forked process after some work: 0 if it ended well, None if it hung."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        ended, code = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(code)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("busy", ["updates", "saves"])
def test_a_child_goes_on_while_a_thread_of_the_parent_is_at_work(busy: str, tmp_path: Path) -> None:
    adapter, done = df.adapt(made("batch_norm"), "driftfilter"), threading.Event()
    adapter.update(batch(8, 0))  # in its first one torch imports parts of itself (docs/gotchas.md)

    def work() -> None:
        while not done.is_set():
            if busy == "updates":
                adapter.update(batch(8, 1))
            else:
                df.save(adapter, tmp_path / "parent.safetensors")

    def go_on() -> None:
        adapter.predict(batch(8, 2))
        adapter.update(batch(8, 3))
        df.save(adapter, tmp_path / "child.safetensors")

    thread = threading.Thread(target=work)
    thread.start()
    try:
        found = []
        for _ in range(8):
            time.sleep(0.01)
            found.append(status_of_child(go_on))
            if found[-1] != 0:
                break
    finally:
        done.set()
        thread.join()
    assert found == [0] * 8
    df.load(df.adapt(made("batch_norm"), "driftfilter"), tmp_path / "child.safetensors")


def test_locks_that_others_hold_are_free_in_a_child(tmp_path: Path) -> None:
    adapter, held, done = df.adapt(made("batch_norm"), "tent"), threading.Event(), threading.Event()
    adapter(batch(8, 0))

    class Waits:
        def on_step(self, record: object) -> None:
            held.set()
            done.wait(60)

    adapter.callbacks.append(Waits())
    thread = threading.Thread(target=lambda: adapter(batch(8, 1)))
    thread.start()
    assert held.wait(60)

    def go_on() -> None:
        adapter.callbacks.clear()
        adapter(batch(8, 2))
        write_atomic(tmp_path / "file", "whole")

    try:
        assert status_of_child(go_on) == 0
    finally:
        done.set()
        thread.join()


def test_a_lock_that_the_forking_thread_holds_stays_its_own() -> None:
    lock = ForkLock()

    def go_on() -> None:
        with lock:  # reentrant
            pass
        free = []
        other = threading.Thread(target=lambda: free.append(lock._lock.acquire(blocking=False)))
        other.start()
        other.join()
        assert free == [False]

    with lock:
        assert status_of_child(go_on) == 0

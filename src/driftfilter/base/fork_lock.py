"""A lock that outlasts os.fork: the thread that held it is not there in the child, and would never
free it.
"""

import os
import threading
from typing import Any, final
from weakref import WeakSet


@final
class ForkLock:
    """A reentrant lock, ``with lock:``; in a child process it is free, unless the thread that
    forked holds it itself.

    What it guards is replaced whole at the end of a block, so that a child has all of it or what
    was before.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _EVERY.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: Any) -> None:
        self._lock.release()

    def renew(self) -> None:
        """In a child process: take a new lock if a thread of the parent holds this one."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = threading.RLock()


_EVERY: WeakSet[ForkLock] = WeakSet()


def _renew_all() -> None:
    for lock in list(_EVERY):
        lock.renew()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_renew_all)

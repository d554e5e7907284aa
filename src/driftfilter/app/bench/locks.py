"""Claims: one process at a time works on a task of a bench, or in the folder of a run.

A claim is a file beside the task's. Its process keeps it locked (flock), names itself in it, and
touches it every ``BEAT`` seconds.

- If another process has it locked, it is taken.
- If nobody has, and it was made under this kernel on this mount, its process is gone: it is free
  at once, whatever container, host name or process number it names.
- Else the lock may be one that is not seen here: of another machine, through another mount, on a
  system or file system without locks. The claim is free if nobody touches it for ``PATIENCE``
  seconds. Clocks are not compared, only looks at the file.

A process that was stopped for longer than that may lose its claim, and finds that out before it
writes more (``Claim.check``).
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from driftfilter.storage.own_file import open_own, try_lock

T = TypeVar("T")

BEAT = 2.0  # seconds; some file systems tell times of files in steps of two
PATIENCE = 20.0  # seconds

_BOOT = Path("/proc/sys/kernel/random/boot_id")  # of the kernel, the same in all its containers
_LOCKED: set[int] = set()  # descriptors that have locks


def claim_path(path: Path) -> Path:
    """The claim of the task whose file is ``path``."""
    return path.with_suffix(".claim")


class Claim:
    """The claim that this process has, alive as long as the context."""

    def __init__(self, place: Path, token: str) -> None:
        self.place, self._token = place, token
        self._lost, self._touched, self._ended = False, time.time(), threading.Event()

    def __enter__(self) -> "Claim":
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT) and not self._lost:
            with suppress(OSError):  # the next one may get through
                self._touch()

    def _touch(self) -> None:
        if self.is_mine():
            os.utime(self.place)
            self._touched = time.time()
        elif not self._ended.is_set():
            self._lost = True

    def is_mine(self) -> bool:
        """Whether the file still names this claim."""
        found = _look(self.place)
        return found is not None and found.holder.get("token") == self._token

    def check(self) -> None:
        """Raise OSError if another process has taken the claim over."""
        if abs(time.time() - self._touched) > PATIENCE / 2:
            self._touch()
        if self._lost:
            raise OSError(
                f"{self.place} is no longer this process's, which stood still for some time or "
                f"whose claim was removed: {describe_holder(self.place)}; nothing more is written"
            )

    def each(self, items: Iterable[T]) -> Iterator[T]:
        """The items, as long as the claim is this process's."""
        for item in items:
            self.check()
            yield item


@contextmanager
def claim(path: Path) -> Iterator[Claim | None]:
    """The claim of the task whose file is ``path``, for the time of the block; None if another
    process has it.
    """
    place = claim_path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    found, file = _acquire(place)
    if found is None:
        yield None
        return
    try:
        with found:
            yield found
    finally:
        with suppress(OSError):  # the error that led here says more
            if found.is_mine():
                place.unlink()
        if file is not None:
            _LOCKED.discard(file)
            os.close(file)  # and with it the lock


class _Look(NamedTuple):
    holder: dict[str, Any]
    touched: int  # ns


class _Opened(NamedTuple):
    file: int
    is_new: bool
    is_locked: bool


def _acquire(place: Path) -> tuple[Claim | None, int | None]:
    """The claim, if it is to be had, and the descriptor that has its lock, if there are locks."""
    watched = None
    while True:
        opened = _open(place)
        if opened is None:
            return None, None
        seen, kernel = _look(place), _kernel(place)
        is_left = opened.is_locked and seen is not None and seen.holder.get("kernel") == kernel
        is_sure = opened.is_new or bool(kernel and is_left)
        if is_sure or (seen is not None and seen == watched):
            return _take(place, opened, kernel, is_sure)
        os.close(opened.file)  # so that a process that has just made it gets its lock
        if seen is None:
            continue
        now = _watch(place, seen)
        if now not in (None, seen):
            return None, None
        watched = now


def _open(place: Path) -> _Opened | None:
    """The file of a claim, locked if there are locks; None if another process has it locked."""
    while True:
        is_new = not os.path.lexists(place)
        try:
            file = open_own(place, os.O_RDWR | (os.O_CREAT | os.O_EXCL if is_new else 0))
        except (FileExistsError, FileNotFoundError):  # made or removed by another meanwhile
            continue
        # Whoever looks at a new claim before it is locked lets go of it at once.
        is_locked = try_lock(file, wait=is_new)
        if is_locked is False:
            os.close(file)
            return None
        # Its process may have removed it between the two lines above.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), place.stat()):
                return _Opened(file, is_new, is_locked is True)
        os.close(file)


def _take(
    place: Path, opened: _Opened, kernel: str, is_sure: bool
) -> tuple[Claim | None, int | None]:
    """Name this process in a claim. Unless it ``is_sure`` to be the only one, wait for others that
    do the same: the last one has it.
    """
    token = secrets.token_hex(8)
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "kernel": kernel, "token": token}
    os.ftruncate(opened.file, 0)
    os.write(opened.file, json.dumps(holder).encode())
    found = Claim(place, token)
    if not is_sure:
        time.sleep(BEAT)
    is_mine = is_sure or found.is_mine()
    if is_mine and opened.is_locked:
        _LOCKED.add(opened.file)
        return found, opened.file
    os.close(opened.file)
    return (found if is_mine else None), None


def _watch(place: Path, seen: _Look) -> _Look | None:
    """What a claim is once it changes or is gone (None), or after the time of patience."""
    until = time.monotonic() + PATIENCE
    while (now := _look(place)) == seen and time.monotonic() < until:
        time.sleep(BEAT / 10)
    return now


def _look(place: Path) -> _Look | None:
    """What a claim says, and when it was touched; None if there is none."""
    try:
        with place.open("rb") as file:  # opened anew: other hosts' changes are seen then
            text, touched = file.read(), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return _Look(found if isinstance(found, dict) else {}, touched)


def _kernel(place: Path) -> str:
    """Which kernel's locks, through which mount, a claim has; empty if that is not known."""
    try:
        return f"{_BOOT.read_text().strip()} {place.parent.stat().st_dev}"
    except OSError:
        return ""


def describe_holder(path: Path) -> str:
    """Who is at the task whose file is ``path``."""
    found = _look(claim_path(path))
    if found is None:
        return "left by another process meanwhile; give the command again"
    holder = {"pid": "(unknown)", "host": "(unknown)", **found.holder}
    return (
        "claimed by process {pid} on host {host}; it is free as soon as that one has ended"
    ).format(**holder)


def _let_go() -> None:
    """Close, in a child that was forked, what would keep its parent's locks after its end."""
    for file in _LOCKED:
        os.close(file)
    _LOCKED.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)

"""Claims of tasks: several processes may work in one run folder, each on tasks of its own.

A claim is a file beside the task's that its process keeps locked (flock) and names itself in. The
lock of a process that is gone is gone, too, and its claim is free. Not every file system shares
locks between hosts: a claim that names another host is left alone, locked or not.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def claim_path(path: Path) -> Path:
    """The claim of the task whose file is ``path``."""
    return path.with_suffix(".claim")


@contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Whether the task whose file is ``path`` is this process's for the time of the block."""
    place = claim_path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    file, here, mine = _lock(place), socket.gethostname(), False
    if file is None:
        yield False
        return
    try:
        mine = _read_holder(place).get("host", here) == here
        if mine:
            os.truncate(file, 0)
            os.write(file, json.dumps({"host": here, "pid": os.getpid()}).encode())
        yield mine
    finally:
        if mine:
            place.unlink(missing_ok=True)
        os.close(file)  # and with it the lock


def _lock(place: Path) -> int | None:
    """Descriptor of a claim, locked; None if another process has locked it."""
    if fcntl is None:
        raise OSError("run folders need file locks (fcntl.flock), which this system does not have")
    while True:
        file = os.open(place, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its process may have removed it between the two lines above.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), place.stat()):
                    return file
        except BlockingIOError:
            os.close(file)
            return None
        except OSError as error:
            os.close(file)
            raise OSError(error.errno, f"no file lock: {error.strerror}", str(place)) from error
        os.close(file)


def _read_holder(place: Path) -> dict[str, Any]:
    """Host and number of the process that a claim names; empty if it names none."""
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
        return {"host": found["host"], "pid": found["pid"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def describe_holder(path: Path) -> str:
    """Who is at the task whose file is ``path``, and what to do if nobody is any more."""
    place = claim_path(path)
    if not place.exists():
        return "left by another process meanwhile; give the command again"
    holder = _read_holder(place)
    who = "process {pid} on host {host}".format(**holder) if holder else "an unknown process"
    return f"claimed by {who}; if it runs no more, remove {place} and give the command again"

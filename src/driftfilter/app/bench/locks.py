"""Claims of tasks: several processes may work in one run folder, each on tasks of its own.

A claim is a file beside the task's that its process keeps locked (flock) and names itself in. The
lock of a process that is gone is gone, too, and its claim is free. Not every file system shares
locks between hosts: a claim that names another host is left alone, locked or not, and so is one
that somebody has made a moment ago and not yet named himself in.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


UNFINISHED = 60  # seconds after which a claim that names nobody was left by a process that is gone


def claim_path(path: Path) -> Path:
    """The claim of the task whose file is ``path``."""
    return path.with_suffix(".claim")


@contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Whether the task whose file is ``path`` is this process's for the time of the block."""
    place = claim_path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    (file, is_new), here, mine = _lock(place), socket.gethostname(), False
    if file is None:
        yield False
        return
    try:
        mine = is_new or _is_free(place, here)
        if mine:
            os.truncate(file, 0)
            os.write(file, json.dumps({"host": here, "pid": os.getpid()}).encode())
        yield mine
    finally:
        if mine:
            place.unlink(missing_ok=True)
        os.close(file)  # and with it the lock


def _is_free(place: Path, here: str) -> bool:
    """Whether a claim that was there before, and that nobody has locked, may be taken over."""
    holder = _read_holder(place)
    return holder["host"] == here if holder else time.time() - place.stat().st_mtime > UNFINISHED


def _lock(place: Path) -> tuple[int | None, bool]:
    """Descriptor of a claim, locked (None: another process has it), and whether it is new."""
    if fcntl is None:
        raise OSError("run folders need file locks (fcntl.flock), which this system does not have")
    while True:
        is_new = not place.exists()
        try:
            file = os.open(place, os.O_RDWR | (os.O_CREAT | os.O_EXCL if is_new else 0), 0o666)
        except (FileExistsError, FileNotFoundError):  # made or removed by another meanwhile
            continue
        try:  # whoever looks at a new claim before it is locked lets go of it at once
            fcntl.flock(file, fcntl.LOCK_EX | (0 if is_new else fcntl.LOCK_NB))
            # Its process may have removed it between the two lines above.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), place.stat()):
                    return file, is_new
        except BlockingIOError:
            os.close(file)
            return None, False
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

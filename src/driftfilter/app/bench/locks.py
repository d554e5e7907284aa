"""Claims of tasks: several processes may work in one run folder, each on tasks of its own.

A claim is a file beside the task's that only one process can create; it names the process, so that
others can take over what a process that is gone has left. Where two take over at the same instant a
task may be run twice, to the same file.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from driftfilter.base.checks import require
from driftfilter.storage.atomic import is_alive

# Seconds; a claim that is empty for longer was not finished by a process that still lives.
WRITTEN_WITHIN = 60


def claim_of(path: Path) -> Path:
    """The claim of the task whose file is ``path``."""
    return path.with_suffix(".claim")


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Whether the task is this process's for the time of the block."""
    claim = claim_of(path)
    mine = _create(claim) or (_abandoned(claim) and _create(claim))
    try:
        yield mine
    finally:
        if mine:
            claim.unlink(missing_ok=True)


def holder(path: Path) -> str:
    """Who is at the task, and what to do where nobody is any more."""
    claim = claim_of(path)
    if not claim.exists():
        return "left by another process meanwhile; give the command again"
    try:
        found = json.loads(_read(claim))
        who = f"process {found['pid']} on host {found['host']}"
    except (ValueError, KeyError, TypeError):
        who = "a process that is not known"
    return f"claimed by {who}; where it runs no more, remove {claim} and give the command again"


def _create(claim: Path) -> bool:
    claim.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    with os.fdopen(file, "w", encoding="utf-8") as stream:
        json.dump({"host": socket.gethostname(), "pid": os.getpid()}, stream)
    return True


def _read(claim: Path) -> str:
    try:
        return claim.read_text(encoding="utf-8")
    except OSError:
        return ""


def _abandoned(claim: Path) -> bool:
    """Remove the claim of a process that is gone; whether it was one."""
    text = _read(claim)
    if not _gone(claim, text):
        return False
    aside = claim.with_name(f".{claim.name}.{os.getpid()}")
    with suppress(FileNotFoundError):  # another removed it
        claim.rename(aside)
        if _read(aside) != text:  # another was faster, and this is its claim
            with suppress(OSError):  # a third one's is there, or no links are
                os.link(aside, claim)
        aside.unlink()
    return True


def _gone(claim: Path, text: str) -> bool:
    """Whether the process that wrote the text is known to have ended; of another host nothing is
    known.
    """
    try:
        found = json.loads(text)
        host, pid = str(found["host"]), int(found["pid"])
        require(pid > 0, "pid", pid, "positive")  # os.kill takes others for groups of processes
    except (ValueError, KeyError, TypeError):
        try:
            return time.time() - claim.stat().st_mtime > WRITTEN_WITHIN
        except FileNotFoundError:
            return True
    # This process's own number, without its claim: an earlier process had it.
    return host == socket.gethostname() and (pid == os.getpid() or not is_alive(pid))

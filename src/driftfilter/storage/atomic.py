"""Files that are there whole or as they were, whatever happens meanwhile: a crash, a full disk.

They are written beside their place under another name and brought to the disk, then renamed, which
happens at once or not at all.
"""

import glob
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from driftfilter.base.fork_lock import ForkLock
from driftfilter.storage.own_file import open_own, try_lock

_WRITING = ForkLock()  # one at a time of a process
_HOUR = 3600  # seconds after which a part was left by a process that is gone, if there are no locks
_PART = re.compile(r"\.([0-9a-f]{16}|\d+-(new|old))\.part")  # the second: of earlier versions


@contextmanager
def atomic_file(path: Path, keep: int = 1) -> Iterator[IO[bytes]]:
    """A file to write to, which becomes ``path`` if the block ends well, and else goes away.

    The last ``keep`` files stay: the one before ``state.safetensors`` as ``state.1.safetensors``,
    and so on. If ``path`` is a link, the file takes its place; what it points to stays as it is.
    """
    with _WRITING:
        _sweep(path)
        part, opened = _open_part(path)
        try:
            with opened as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                if os.name != "posix":
                    file.close()  # there, open files cannot be renamed
                _rotate(path, keep)
                os.replace(part, path)  # before it is closed, and with that no longer locked
            sync_folder(path.parent)
        finally:
            with suppress(OSError):  # the error that led here says more
                part.unlink(missing_ok=True)


def write_atomic(path: Path, text: str) -> None:
    """Write a file so that it is there whole or as it was, whatever happens meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(text.encode())


def earlier(path: Path, number: int) -> Path:
    """Path of the file that was ``number`` files before this one."""
    return path.with_suffix(f".{number}{path.suffix}") if number else path


def _beside(path: Path) -> Path:
    """A new name, which processes of other containers do not choose, too."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")


def _open_part(path: Path) -> tuple[Path, IO[bytes]]:
    """A part of this process, locked, so that others do not sweep it away."""
    while True:
        part = _beside(path)
        file = part.open("xb")
        try_lock(file.fileno(), wait=True)
        if part.exists():
            return part, file
        file.close()  # swept away before it was locked


def _sweep(path: Path) -> None:
    """Remove the parts that killed processes have left: nobody has them locked."""
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        if _PART.fullmatch(part.name.removeprefix(f".{path.name}")):
            with suppress(OSError):
                _remove_left(part)


def _remove_left(part: Path) -> None:
    file = open_own(part, os.O_RDWR)
    try:
        is_locked = try_lock(file)
        if is_locked or (is_locked is None and time.time() - os.fstat(file).st_mtime > _HOUR):
            part.unlink()
    finally:
        os.close(file)


def _rotate(path: Path, keep: int) -> None:
    """Move every file one place back and remove the oldest; ``path`` itself stays until the new one
    takes its place.
    """
    for number in range(keep - 1, 1, -1):
        if earlier(path, number - 1).exists():
            os.replace(earlier(path, number - 1), earlier(path, number))
    if keep > 1 and path.exists():
        _copy(path, earlier(path, 1))
    beyond = max(keep, 1)
    while earlier(path, beyond).exists():
        earlier(path, beyond).unlink()
        beyond += 1


def _copy(path: Path, target: Path) -> None:
    """Give a file a second name, or copy it if the file system knows no such thing."""
    while True:
        aside = _beside(path)
        try:
            os.link(path, aside)
        except OSError:
            shutil.copyfile(path, aside)
        with suppress(FileNotFoundError):  # swept away by another process
            os.replace(aside, target)
            aside.unlink(missing_ok=True)  # left if both were the same file already
            return


def make_folder(folder: Path) -> None:
    """Make a folder, and those it is in, that outlast a loss of power."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Bring the new name, too, to the disk, so that it outlasts a loss of power."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

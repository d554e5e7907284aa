"""Files that are there whole or as they were, whatever happens meanwhile: a crash, a full disk.

They are written beside their place under another name and brought to the disk, then renamed, which
happens at once or not at all.
"""

import glob
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from driftfilter.base.fork_lock import ForkLock

_WRITING = ForkLock()  # a part is named after its process: one at a time of a process


@contextmanager
def atomic_file(path: Path, keep: int = 1) -> Iterator[IO[bytes]]:
    """A file to write to, which becomes ``path`` if the block ends well, and else goes away.

    The last ``keep`` files stay: the one before ``state.safetensors`` as ``state.1.safetensors``,
    and so on.
    """
    part = _beside(path, "new")
    with _WRITING:
        _sweep(path)
        try:
            with part.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            _rotate(path, keep)
            os.replace(part, path)
            _sync_folder(path.parent)
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


def _is_alive(pid: int) -> bool:
    """Whether a process of this host has not ended, as far as can be known."""
    if os.name != "posix":  # there, os.kill kills
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's; or no number of a process
        pass
    return True


def _beside(path: Path, what: str) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{what}.part")


def _sweep(path: Path) -> None:
    """Remove the parts that killed processes have left."""
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        found = re.fullmatch(r"\.(\d+)-(new|old)\.part", part.name.removeprefix(f".{path.name}"))
        if found and (int(found[1]) == os.getpid() or not _is_alive(int(found[1]))):
            part.unlink(missing_ok=True)


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
    aside = _beside(path, "old")
    try:
        os.link(path, aside)
    except OSError:
        shutil.copyfile(path, aside)
    os.replace(aside, target)
    aside.unlink(missing_ok=True)  # left if both were the same file already


def _sync_folder(folder: Path) -> None:
    """Bring the new name, too, to the disk, so that it outlasts a loss of power."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

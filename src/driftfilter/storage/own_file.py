"""Files that are a folder's own: opened without following links, and locked by the kernel.

The lock (flock) belongs to the open file: it holds against all processes of the kernel, in
whatever container they are, and is free once the process that has it is gone, however it ended.
"""

import errno
import os
import stat
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def open_own(path: Path, flags: int) -> int:
    """Descriptor of a file that is no link to another one and no device; raise OSError if it is.

    Writing through a link changes a file that may be anywhere, and is not this folder's.
    """
    try:
        if stat.S_ISLNK(path.lstat().st_mode):  # where O_NOFOLLOW is not known
            raise _refuse_link(path)
    except FileNotFoundError:
        pass
    blocking = getattr(os, "O_NONBLOCK", 0)  # a pipe would wait for its reader
    bits = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0) | blocking
    try:
        file = os.open(path, flags | bits, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:  # made since the look above
            raise _refuse_link(path) from error
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not written to, since it is no regular file", str(path))
    return file


def _refuse_link(path: Path) -> OSError:
    target = os.readlink(path)
    reason = f"a symbolic link to {target}, which is not written through: that file is not this "
    return OSError(errno.ELOOP, f"{reason}folder's; remove the link", str(path))


def try_lock(file: int, wait: bool = False) -> bool | None:
    """Whether an open file is locked for this process now; None if there are no locks here.

    Not every system and file system has them.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True

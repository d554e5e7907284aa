"""What a command prints: text for people, one JSON document for programs, progress, or nothing."""

import errno
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, NamedTuple, TextIO, TypeAlias

OFTEN = 0.5  # seconds between two looks at a task by a bar: a note may have to wait for a device


class Output(NamedTuple):
    """``quiet``: only warnings and errors. ``json``: nothing on stdout but the document."""

    quiet: bool = False
    json: bool = False

    @property
    def plain(self) -> bool:
        """Whether text goes to stdout."""
        return not (self.quiet or self.json)

    def say(self, text: str = "") -> None:
        """Print text on stdout."""
        if self.plain:
            print(text, flush=True)

    def note(self, text: str) -> None:
        """Print on stderr what is neither the result nor an error."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def document(self, document: Any) -> None:
        """Print JSON on stdout."""
        if self.json:
            print(json.dumps(finite(document), indent=1))  # ASCII, which every stdout can take


def finite(value: Any) -> Any:
    """The value with None for NaN and infinities, which JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, (list, tuple)) else value


# Standard streams


class Stream:
    """Standard stream that never fails: what cannot be written goes nowhere, and a character that
    its encoding does not know is escaped.

    ``error``: why something was lost.
    """

    def __init__(self, stream: TextIO, error: OSError | None = None) -> None:
        self._stream, self.error = stream, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            code = self._stream.encoding
            return self.write(text.encode(code, "backslashreplace").decode(code))
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Send to nowhere what is in the buffer and what else comes, also from other code."""
        self.error = self.error or error
        with suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())

    def is_closed(self) -> bool:
        """Whether something was lost because nobody reads it, or nobody ever did."""
        return self.error is not None and self.error.errno in (errno.EPIPE, errno.EBADF)


@contextmanager
def keep_streams() -> Iterator[Stream]:
    """Stdout; for the time of a block, the command goes on if the reader of stdout or stderr goes
    away, or if there never was one.
    """
    with ExitStack() as stack:
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass  # else a file of the run would be opened under the number of stdout
        os.close(number)

        def open_stream(stream: TextIO | None) -> Any:
            if stream is not None:
                return Stream(stream)
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            return Stream(nowhere, OSError(errno.EBADF, "it is closed"))

        stdout, stderr = map(open_stream, (sys.stdout, sys.stderr))
        stack.enter_context(redirect_stdout(stdout))
        stack.enter_context(redirect_stderr(stderr))
        try:
            yield stdout
        finally:
            stdout.flush()
            stderr.flush()


# Progress


# Called after every step: how much is done, of how much (None: nobody knows), and a note that is
# made only if it is shown.
Watch: TypeAlias = Callable[[int, int | None, Callable[[], str]], None]


class Shown(NamedTuple):
    """How a task that runs is followed."""

    watch: Watch | None  # None: nothing is shown before the end
    end: Callable[[str], None]  # with a line that stays


Display: TypeAlias = Callable[[str], Shown]  # begins a task of this title


@contextmanager
def show_progress(quiet: bool = False, every: float = math.inf) -> Iterator[Display]:
    """Display on stderr: bars if that is a terminal, else lines, ``every`` so many seconds and at
    the end of a task; nothing if ``quiet``.
    """
    if quiet:
        yield lambda title: Shown(None, lambda line: None)
    elif not sys.stderr.isatty():
        yield lambda title: _begin_lines(title, every)
    else:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        ) as bars:
            yield lambda title: _begin_bar(title, bars)


def _begin_lines(title: str, every: float) -> Shown:
    last = time.monotonic()

    def watch(done: int, total: int | None, note: Callable[[], str]) -> None:
        nonlocal last
        if time.monotonic() - last >= every:
            last = time.monotonic()
            _print(f"{done} of {total or '?'} {title}: {note()}")

    return Shown(watch if every < math.inf else None, _print)


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _begin_bar(title: str, bars: Any) -> Shown:
    task, last = bars.add_task(title, total=None, note=""), 0.0

    def watch(done: int, total: int | None, note: Callable[[], str]) -> None:
        nonlocal last
        if done == total or time.monotonic() - last > OFTEN:
            last = time.monotonic()
            bars.update(task, completed=done, total=total, note=note(), refresh=True)

    def end(line: str) -> None:
        bars.console.print(line, markup=False, highlight=False)
        bars.remove_task(task)

    return Shown(watch, end)

"""What ``driftfilter run`` says on a terminal or in a log while it runs, and at its end."""

from __future__ import annotations

import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from driftfilter.app.run import Ending, Tally, Watch

EVERY = 5.0  # seconds between two lines of a log
SKIPPED = 3  # exit status


def warn(text: str) -> None:
    """A line on stderr."""
    print(f"driftfilter run: warning: {text}", file=sys.stderr, flush=True)


@contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Warnings without the source line, which would be one of driftfilter's own."""
    before = warnings.showwarning
    warnings.showwarning = lambda message, *_, **__: warn(str(message))
    try:
        yield
    finally:
        warnings.showwarning = before


@contextmanager
def progress(quiet: bool) -> Iterator[Watch]:
    """Shown on stderr: a bar where it is a terminal, a line now and then elsewhere, nothing where asked."""
    if quiet:
        yield lambda tally, count: None
    elif not sys.stderr.isatty():
        yield _lines()
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        shown = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*shown, console=Console(stderr=True)) as bar:
            task = bar.add_task("samples", total=None)
            yield lambda tally, count: bar.update(task, completed=tally.rows, total=count, description=_summary(tally))


def _lines() -> Watch:
    shown = time.monotonic()

    def watch(tally: Tally, count: int | None) -> None:
        nonlocal shown
        if time.monotonic() - shown >= EVERY:
            shown = time.monotonic()
            print(f"{tally.rows} of {count or '?'} samples: {_summary(tally)}", file=sys.stderr, flush=True)

    return watch


def _summary(tally: Tally) -> str:
    accuracy = "" if tally.accuracy is None else f", accuracy {tally.accuracy:.4f}"
    skipped = f" ({tally.skipped} skipped)" if tally.skipped else ""
    return f"{tally.step} steps{skipped}{accuracy}"


def conclude(ending: Ending, out: Path) -> int:
    """Say how a run ended; its exit status."""
    tally = ending.tally
    begun = f", resumed after {ending.begun}" if ending.begun else ""
    print(f"{tally.rows} samples, {_summary(tally)}{begun}; wrote {ending.predictions}")
    if ending.error:
        print(f"driftfilter run: error: {ending.error}", file=sys.stderr)
        print(f"the steps before it are saved; --resume --on-bad-batch skip goes on from {out} without it", file=sys.stderr)
        return 1
    if ending.signal is not None:
        name = signal.Signals(ending.signal).name
        print(f"{name}: saved; the same command with --resume goes on from {out}", file=sys.stderr)
        return 130 if ending.signal == signal.SIGINT else 0
    return SKIPPED if tally.skipped else 0

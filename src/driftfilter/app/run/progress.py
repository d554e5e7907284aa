"""What ``driftfilter run`` says on a terminal or in a log while it runs, and at its end."""

from __future__ import annotations

import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import driftfilter as df
from driftfilter.app.run.run import Ending, Shown, Tally
from driftfilter.app.terminal import Output

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


def progress(quiet: bool, live: bool, classes: Sequence[str]) -> Shown:
    """Shown on stderr: a bar or a dashboard where it is a terminal, a line now and then elsewhere,
    nothing where asked.
    """

    @contextmanager
    def shown(first: Tally, count: int | None) -> Iterator[df.Callback]:
        terminal = sys.stderr.isatty()
        if live and not terminal:
            print(
                "driftfilter run: --live needs a terminal on stderr; progress in lines instead",
                file=sys.stderr,
                flush=True,
            )
        if quiet:
            yield _Nothing()
        elif not terminal:
            yield _Lines(first, count)
        elif live:
            from driftfilter.app.run.dashboard import Dashboard

            with Dashboard(first, count, classes) as dashboard:
                yield dashboard
        else:
            with _bar() as bar:
                yield _Bar(first, count, bar)

    return shown


class _Nothing:
    def on_step(self, step: df.StepRecord) -> None:
        pass


class _Lines:
    """A line of a log now and then."""

    def __init__(self, tally: Tally, count: int | None) -> None:
        self._tally, self._count, self._shown = tally, count, time.monotonic()

    def on_step(self, step: df.StepRecord) -> None:
        self._tally = self._tally.after(step)
        if time.monotonic() - self._shown >= EVERY:
            self._shown = time.monotonic()
            print(
                f"{self._tally.rows} of {self._count or '?'} samples: {steps_of(self._tally)}",
                file=sys.stderr,
                flush=True,
            )


class _Bar:
    def __init__(self, tally: Tally, count: int | None, bar: Any) -> None:
        self._tally, self._bar, self._task = tally, bar, bar.add_task("samples", total=count)

    def on_step(self, step: df.StepRecord) -> None:
        self._tally = self._tally.after(step)
        self._bar.update(self._task, completed=self._tally.rows, description=steps_of(self._tally))


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    shown = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*shown, console=Console(stderr=True))


def steps_of(tally: Tally) -> str:
    """How far a run is, in words."""
    accuracy = "" if tally.accuracy is None else f", accuracy {tally.accuracy:.4f}"
    skipped = f" ({tally.skipped} skipped)" if tally.skipped else ""
    return f"{tally.step} {'step' if tally.step == 1 else 'steps'}{skipped}{accuracy}"


def conclude(ending: Ending, out: Path, output: Output) -> tuple[int, dict[str, Any]]:
    """Say how a run ended; its exit status, and the same as data."""
    tally = ending.tally
    begun = f", resumed after {ending.begun}" if ending.begun else ""
    output.say(f"{tally.rows} samples, {steps_of(tally)}{begun}; wrote {ending.predictions}")
    return _status(ending, out), {
        "samples": tally.rows,
        "steps": tally.step,
        "skipped": tally.skipped,
        "accuracy": tally.accuracy,
        "resumed_after": ending.begun,
        "signal": None if ending.signal is None else signal.Signals(ending.signal).name,
        "error": ending.error or None,
        "predictions": str(ending.predictions),
        "out": str(out),
    }


def _status(ending: Ending, out: Path) -> int:
    if ending.error:
        print(f"driftfilter run: error: {ending.error}", file=sys.stderr)
        if not ending.tally.step:
            print(
                "it was the first batch: does the model take samples like these? (--layout, "
                "--scale)",
                file=sys.stderr,
            )
        print(
            f"the steps before it are saved; --resume --on-bad-batch skip goes on from {out} "
            "without it",
            file=sys.stderr,
        )
        return 1
    if ending.signal is not None:
        name = signal.Signals(ending.signal).name
        print(f"{name}: saved; the same command with --resume goes on from {out}", file=sys.stderr)
        return 130 if ending.signal == signal.SIGINT else 0
    return SKIPPED if ending.tally.skipped else 0

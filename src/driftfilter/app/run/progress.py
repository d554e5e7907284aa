"""What ``driftfilter run`` says on a terminal or in a log while it runs, and at its end."""

import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import driftfilter as df
from driftfilter.app.run.run import Ending, Follow, Tally
from driftfilter.app.terminal import Output, Shown, show_progress

EVERY = 5.0  # seconds between two lines of a log
SKIPPED = 3  # exit status


def warn(text: str) -> None:
    """Print a warning of one line on stderr."""
    print(f"driftfilter run: warning: {text}", file=sys.stderr, flush=True)


@contextmanager
def shorten_warnings() -> Iterator[None]:
    """Show warnings without the source line, which would be one of driftfilter's own."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: warn(str(message))
        yield


def follow(quiet: bool, live: bool, classes: tuple[str, ...]) -> Follow:
    """How a run is shown on stderr: by a dashboard if ``live`` and that is a terminal, else by its
    progress.
    """

    @contextmanager
    def begin(first: Tally, count: int | None) -> Iterator[df.Callback]:
        if live and sys.stderr.isatty():
            from driftfilter.app.run.dashboard import Dashboard

            with Dashboard(first, count, classes) as dashboard:
                yield dashboard
            return
        if live:
            print(
                "driftfilter run: --live needs a terminal on stderr; progress in lines instead",
                file=sys.stderr,
                flush=True,
            )
        with show_progress(quiet, EVERY) as display:
            yield _Progress(first, count, display("samples"))

    return begin


class _Progress:
    """Callback that tells a display how far the run is."""

    def __init__(self, tally: Tally, count: int | None, shown: Shown) -> None:
        self._tally, self._count, self._shown = tally, count, shown

    def on_step(self, step: df.StepRecord) -> None:
        self._tally = tally = self._tally.after(step)
        if self._shown.watch is not None:
            self._shown.watch(tally.rows, self._count, lambda: describe(tally))


def describe(tally: Tally) -> str:
    """How far a run is, in words."""
    accuracy = "" if tally.accuracy is None else f", accuracy {tally.accuracy:.4f}"
    skipped = f" ({tally.skipped} skipped)" if tally.skipped else ""
    return f"{tally.step} {'step' if tally.step == 1 else 'steps'}{skipped}{accuracy}"


def conclude(ending: Ending, out: Path, output: Output) -> tuple[int, dict[str, Any]]:
    """Say how a run ended; its exit status, and how it ended as data."""
    tally = ending.tally
    begun = f", resumed after {ending.begun}" if ending.begun else ""
    expected = ending.estimate if ending.estimate and ending.estimate.samples else None
    if expected is not None:
        output.say(f"accuracy expected of the last {expected.samples} samples: {expected}")
    for line in _remark(ending):
        output.say(line)
    output.say(f"{tally.rows} samples, {describe(tally)}{begun}; wrote {ending.predictions}")
    return _status(ending, out), {
        "samples": tally.rows,
        "steps": tally.step,
        "skipped": tally.skipped,
        "accuracy": tally.accuracy,
        "estimate": None if expected is None else expected.accuracy,
        "resumed_after": ending.begun,
        "signal": None if ending.signal is None else signal.Signals(ending.signal).name,
        "error": ending.error or ending.lost or None,
        "predictions": str(ending.predictions),
        "out": str(out),
    }


def _remark(ending: Ending) -> Iterator[str]:
    """Lines about the frozen model, and about alarms."""
    if ending.frozen is not None:
        yield f"accuracy of the frozen model: {ending.frozen:.4f}"
    if ending.alarms:
        counts = ", ".join(f"{name} {count}" for name, count in Counter(ending.alarms).items())
        yield f"alarms: {counts} (steps.jsonl says when, and what was done)"


def _status(ending: Ending, out: Path) -> int:
    if ending.lost:
        print(f"driftfilter run: error: {ending.lost}", file=sys.stderr)
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
        print(
            f"{signal.Signals(ending.signal).name}: saved; the same command with --resume goes on "
            f"from {out}",
            file=sys.stderr,
        )
        return 1 if ending.lost else 130 if ending.signal == signal.SIGINT else 0
    return SKIPPED if ending.tally.skipped else 0

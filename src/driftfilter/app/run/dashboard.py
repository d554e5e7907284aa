"""``driftfilter run --live``: how a run goes, on a terminal, as it goes."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from types import TracebackType

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

import driftfilter as df
from driftfilter.app.run.run import Tally

EVERY = 0.25  # seconds between two pictures
DRAWN = 60  # steps in the sparkline
LATELY = 20  # steps that the class shares are of
MOST = 8  # classes shown
ALARMS = 3  # shown
LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(values: Iterable[float]) -> str:
    """One character a value, from the lowest to the highest; a space for NaN and infinities."""
    found = list(values)
    known = [value for value in found if math.isfinite(value)]
    low, span = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)

    def level(value: float) -> str:
        return (
            LEVELS[round((value - low) / span * (len(LEVELS) - 1)) if span else 0]
            if math.isfinite(value)
            else " "
        )

    return "".join(map(level, found))


def _describe(estimate: df.Estimate) -> str:
    if not estimate.samples:
        return "unknown"
    return f"{estimate} expected of the last {estimate.samples} samples"


class Dashboard:
    """A callback that draws: progress and rate, accuracy as it is and as it is expected, predictive
    entropy, class shares, distance, alarms.
    """

    def __init__(
        self,
        tally: Tally,
        count: int | None,
        classes: Sequence[str] = (),
        console: Console | None = None,
    ) -> None:
        self._tally, self._begun, self._count, self._classes = tally, tally, count, classes
        self._started = self._shown = time.monotonic()
        self._entropies: deque[float] = deque(maxlen=DRAWN)
        self._shares: deque[tuple[float, ...]] = deque(maxlen=LATELY)
        self._distance, self._alarms = math.nan, 0
        self._estimate = df.Estimate(math.nan, 0.0, 1.0, 0)
        self._last: deque[str] = deque(maxlen=ALARMS)
        self._live = Live(
            self.picture(), console=console or Console(stderr=True), auto_refresh=False
        )

    def __enter__(self) -> Dashboard:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.update(self.picture(), refresh=True)
        self._live.stop()

    def on_step(self, step: df.StepRecord) -> None:
        self._tally = self._tally.after(step)
        self._entropies.append(step.entropy)
        self._shares.extend([step.shares] if step.shares else [])
        self._distance = (
            self._distance if math.isnan(step.signals.distance) else step.signals.distance
        )
        self._estimate = step.estimate if step.estimate.samples else self._estimate
        self._alarms += len(step.events)
        self._last.extend(f"step {step.number}: {event}" for event in step.events)
        if time.monotonic() - self._shown >= EVERY:
            self._shown = time.monotonic()
            self._live.update(self.picture(), refresh=True)

    def picture(self) -> RenderableType:
        """All that is known now."""
        grid = Table.grid(padding=(0, 2))
        for name, shown in self._rows():
            grid.add_row(Text(name, style="dim"), shown)
        return Panel(grid, title="driftfilter run")

    def _rows(self) -> list[tuple[str, RenderableType]]:
        tally = self._tally
        skipped = f", {tally.skipped} skipped" if tally.skipped else ""
        known = [value for value in self._entropies if math.isfinite(value)]
        rows = [
            ("samples", f"{tally.rows} of {self._count or '?'}, {self._rate()}"),
            ("steps", f"{tally.step}{skipped}"),
            (
                "accuracy",
                "unknown: no labels" if tally.accuracy is None else f"{tally.accuracy:.4f}",
            ),
            ("estimate", _describe(self._estimate)),
            ("entropy", f"{known[-1]:.3f} nats  {sparkline(self._entropies)}" if known else ""),
            (
                "distance",
                "unknown"
                if math.isnan(self._distance)
                else f"{self._distance:.3f} prior deviations from the source",
            ),
            ("alarms", "\n".join([str(self._alarms), *self._last])),
        ]
        return [
            (
                "progress",
                ProgressBar(self._count, tally.rows, width=60, pulse=self._count is None),
            ),
            *((name, Text(text)) for name, text in rows),
            ("classes", self._bars()),
        ]

    def _rate(self) -> str:
        seconds, rows = time.monotonic() - self._started, self._tally.rows - self._begun.rows
        if not rows or not seconds:
            return "no rate yet"
        left = (
            ""
            if self._count is None
            else f", {max(0, self._count - self._tally.rows) * seconds / rows:.0f} s left"
        )
        return f"{rows / seconds:.0f} a second{left}"

    def _bars(self) -> RenderableType:
        """Bars of the largest classes among what was predicted lately."""
        if not self._shares:
            return Text("")
        means = [sum(column) / len(self._shares) for column in zip(*self._shares, strict=True)]
        order = sorted(range(len(means)), key=lambda place: -means[place])
        grid = Table.grid(padding=(0, 1))
        for place in order[:MOST]:
            name = self._classes[place] if place < len(self._classes) else str(place)
            grid.add_row(
                Text(name), Text(f"{means[place]:4.0%}"), Text("█" * round(30 * means[place]))
            )
        if len(order) > MOST:
            grid.add_row(
                Text("others"),
                Text(f"{sum(means[place] for place in order[MOST:]):4.0%}"),
                Text(""),
            )
        return grid

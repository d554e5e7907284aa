"""The dashboard of ``driftfilter run --live``: what it shows, and that it steps back where there is
no terminal.
"""

import io
import itertools
import math
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import driftfilter as df
from driftfilter.app.run.dashboard import Dashboard, sparkline
from driftfilter.app.run.run import Tally
from driftfilter.inference.accuracy import Expectation, Opinions
from own_model import run, steps

EVENT = df.Event(3, "uncertainty", 0.5, 0.4, "probation")


def record(number: int, labels: list[int], **known: object) -> df.StepRecord:
    """Predictions that are sure of these labels."""
    logs = torch.full((len(labels), 3), -math.inf, dtype=torch.float64)
    logs[torch.arange(len(labels)), torch.tensor(labels)] = 0.0
    return df.StepRecord(number, len(labels), 1.0, log_probabilities=logs, **known)  # type: ignore[arg-type]


def drawn(dashboard: Dashboard) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(dashboard.picture())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if f"│ {name} " in line)


def test_sparklines() -> None:
    rows: list[list[float]] = [[0, 1, 2, 3, 4, 5, 6, 7], [2.0, math.nan, 3.0], [5.0, 5.0], []]
    assert [*map(sparkline, rows)] == ["▁▂▃▄▅▆▇█", "▁ █", "▁▁", ""]


def test_all_that_is_known_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr("driftfilter.app.run.dashboard.time.monotonic", lambda: float(next(clock)))
    dashboard = Dashboard(
        Tally(5, 40, 1, 20, 40),
        100,
        ("cat", "[red]dog"),
        Console(file=io.StringIO(), force_terminal=True),
    )
    assert "no rate yet" in drawn(dashboard)
    assert "unknown" in row(drawn(dashboard), "distance")
    dashboard.on_step(
        record(
            5,
            [0, 0, 0, 1],
            right=3,
            judged=4,
            accuracy=23 / 44,
            signals=df.Signals(distance=0.25),
            events=(EVENT,),
        )
    )
    dashboard.on_step(df.StepRecord(6, 4, 0.0, notes={"skipped": "bad"}))
    text = drawn(dashboard)
    for name, part in (
        ("samples", "48 of 100"),
        ("samples", "a second"),
        ("steps", "7, 2 skipped"),
        ("accuracy", f"{23 / 44:.4f}"),
        ("entropy", "0.000 nats"),
        ("distance", "0.250 prior deviations"),  # a skipped step tells nothing new
        ("alarms", " 1 "),
        ("classes", "cat"),
        ("classes", " 75% "),
    ):
        assert part in row(text, name)
    assert "step 5: uncertainty 0.5 beyond 0.4: the belief is on probation" in text
    assert "[red]dog" in text  # no markup


def test_the_last_picture_stays_and_others_come_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("driftfilter.app.run.dashboard.time.monotonic", lambda: 0.0)
    file = io.StringIO()
    with Dashboard(
        Tally(), 8, console=Console(file=file, force_terminal=True, width=100)
    ) as dashboard:
        for number in range(4):
            dashboard.on_step(record(number, [number % 3] * 2))
    assert "8 of 8" in file.getvalue()
    assert "4 of 8" not in file.getvalue()  # a quarter of a second has not passed


def test_many_classes_are_put_together() -> None:
    dashboard = Dashboard(Tally(), None)
    dashboard.on_step(
        df.StepRecord(0, 12, 1.0, log_probabilities=torch.eye(12, dtype=torch.float64).log())
    )
    assert row(drawn(dashboard), "samples").split("samples")[1].strip().startswith("12 of ?")
    assert "others  33%" in drawn(dashboard)


@pytest.mark.usefixtures("folder")
def test_without_a_terminal_it_goes_on_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--out", "o", "--live") == 0
    out, err = capsys.readouterr()
    expected, told = out.splitlines()
    assert expected.startswith("accuracy expected of the last 46 samples: 0.")
    assert told == "46 samples, 5 steps; wrote o/predictions.npz"
    assert err == "driftfilter run: --live needs a terminal on stderr; progress in lines instead\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("options", [["--live"], []], ids=["dashboard", "bar"])
def test_on_a_terminal(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert run("--out", "o", "--labels", "y.npy", *options) == 0
    text = terminal.getvalue()
    assert ("driftfilter run" in text) == bool(options)
    assert f"{steps('o')[-1]['accuracy']:.4f}" in text
    assert "46 of 46" in text if options else "46/46" in text
    assert Path("o/summary.json").exists()


def test_expected_accuracy_is_shown_once_it_is_known() -> None:
    dashboard = Dashboard(Tally(), 100)
    assert "unknown" in row(drawn(dashboard), "estimate")
    logs = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log().repeat(20, 1)
    known = Expectation(Opinions.of(logs))
    dashboard.on_step(record(0, [0, 1], expectation=known))
    told = row(drawn(dashboard), "estimate")
    assert "0.900 (" in told
    assert "of the last 40 samples" in told
    dashboard.on_step(df.StepRecord(1, 2, 0.0, notes={"skipped": "bad"}))
    assert row(drawn(dashboard), "estimate") == told

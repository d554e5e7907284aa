"""Progress: bars on a terminal, lines in a log, nothing if quiet."""

import math

import pytest

from driftfilter.app.terminal import show_progress


def test_a_bar_shows_the_note_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "150")
    with show_progress() as display:
        watch, end = display("1 of 1: tent")
        assert watch is not None
        watch(3, 12, lambda: "accuracy 0.625")
        watch(4, 12, lambda: pytest.fail("asked again at once"))
        watch(12, 12, lambda: "accuracy 0.75")  # the last one always
        end("1 of 1: tent: done")
    shown = capsys.readouterr().err
    for part in ("accuracy 0.625", "12/12", "accuracy 0.75", "1 of 1: tent: done"):
        assert part in shown


def test_a_log_has_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter((0.0, 4.0, 5.0, 5.0, 9.0))
    monkeypatch.setattr("driftfilter.app.terminal.time.monotonic", lambda: next(clock))
    with show_progress(every=5.0) as display:
        watch, end = display("samples")
        assert watch is not None
        for done in (10, 20, 30):
            watch(done, None, lambda: "no labels")
        end("all done")
    assert capsys.readouterr().err == "20 of ? samples: no labels\nall done\n"


@pytest.mark.parametrize(("quiet", "expected"), [(True, ""), (False, "done\n")])
def test_nothing_is_watched_in_vain(
    quiet: bool, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with show_progress(quiet, math.inf) as display:
        watch, end = display("task")
        end("done")
    assert watch is None
    assert capsys.readouterr().err == expected

"""A stream in pieces, against sums written out."""

from typing import Any

import pytest

from driftfilter.app.downsample import downsample

STEPS: list[dict[str, Any]] = [
    {"n": 4, "judged": 4, "right": 3, "entropy": 1.0},
    {"n": 2, "judged": 1, "right": 0, "entropy": 0.5},
    {"n": 4, "judged": 0, "right": 0, "entropy": None},
    {"n": 1, "judged": 1, "right": 1, "entropy": 0.25},
    {"n": 3, "judged": 3, "right": 2, "entropy": 2.0},
]


def test_few_steps_are_pieces_of_their_own() -> None:
    pieces = downsample(STEPS)
    assert [piece["step"] for piece in pieces] == [0, 1, 2, 3, 4]
    assert [piece["right"] for piece in pieces] == [3, 0, 0, 1, 2]
    assert "entropy" not in pieces[2]


def test_pieces_are_sums_and_means_over_samples() -> None:
    first, second = downsample(STEPS, 2)
    assert first == {
        "step": 0,
        "steps": 3,
        "n": 10,
        "judged": 5,
        "right": 3,
        "entropy": pytest.approx(5 / 6),
    }
    assert second == {
        "step": 3,
        "steps": 2,
        "n": 4,
        "judged": 4,
        "right": 3,
        "entropy": pytest.approx(6.25 / 4),
    }


def test_pieces_of_pieces_are_pieces() -> None:
    known = [{**step, "entropy": step["entropy"] or 0.0} for step in STEPS * 8]
    once, twice = downsample(known, 10), downsample(downsample(known, 20), 10)
    assert [piece["step"] for piece in twice] == list(range(0, 40, 4))
    assert [{**piece, "entropy": pytest.approx(piece["entropy"])} for piece in once] == twice


def test_nothing_and_what_is_not_known() -> None:
    assert downsample([]) == []
    assert downsample([{"n": 3}, {"n": 4}], 1) == [{"step": 0, "steps": 2, "n": 7}]

"""Fields held to their annotations."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from driftfilter.base.checks import AtLeast, Checked, Interval, Positive


@dataclass(frozen=True)
class Example(Checked):
    share: Annotated[float, Interval(0, 1, open_high=True)] = 0.5
    scale: Positive | None = None
    count: Annotated[int, AtLeast(2)] = 2
    form: Literal["round", "square", "flat"] = "round"
    side: Literal["left", "right"] | None = "left"
    exact: bool = False
    either: float | str = "free"


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("share", 1, r"a finite number in \[0, 1\)"),
        ("share", True, r"a finite number in \[0, 1\)"),
        ("share", None, r"a finite number in \[0, 1\)"),
        ("scale", 0.0, r"a finite number in \(0, inf\)"),
        ("scale", float("inf"), r"a finite number in \(0, inf\)"),
        ("count", 1, "an integer >= 2"),
        ("count", 2.0, "an integer >= 2"),
        ("form", "rond", r"one of \['round', 'square', 'flat'\]"),
        ("side", "up", "'left' or 'right'"),
        ("exact", 1, "True or False"),
    ],
)
def test_a_value_that_breaks_its_annotation_is_named(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"Example\.{field} must be {allowed}, got {value!r}"):
        Example(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("share", 0), ("scale", None), ("scale", 2), ("side", None), ("exact", True), ("either", -1)],
)
def test_a_value_that_keeps_it_stands_as_it_was_given(field: str, value: Any) -> None:
    assert getattr(Example(**{field: value}), field) is value

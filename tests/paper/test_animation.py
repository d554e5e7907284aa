"""The moving picture of the linear example shows what the filter did."""

from xml.etree import ElementTree

import pytest

from driftfilter.app.paper.animation import BAR, HIGH, LOW, MARGIN, PLOT, POINTS, animate, follow
from driftfilter.app.paper.linear import Linear

EXAMPLE, SEED = Linear(steps=200), 3
NAME = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def drawn() -> ElementTree.Element:
    return ElementTree.fromstring(animate(EXAMPLE, SEED))


def _find_line(drawn: ElementTree.Element, color: str) -> ElementTree.Element:
    (line,) = (each for each in drawn.iter(f"{NAME}line") if each.get("stroke") == color)
    return line


def test_boundaries_are_where_both_classes_are_as_likely(drawn: ElementTree.Element) -> None:
    """b + w₁ x + w₂ y = 0 at both ends of a line, of the source and of the last belief."""
    means = follow(EXAMPLE, SEED).means
    for color, mean in (("#7F7F7F", means[0]), ("#009E73", means[-1])):
        line = _find_line(drawn, color)
        for name, y in (("x1", LOW), ("x2", HIGH)):
            x = LOW + (HIGH - LOW) * (float(line.get(name, "")) - MARGIN) / PLOT
            logit = (mean[0] + mean[1] * x + mean[2] * y).item()
            assert abs(logit) <= abs(mean[1].item()) * (HIGH - LOW) / PLOT  # a pixel


def test_only_the_filter_moves(drawn: ElementTree.Element) -> None:
    assert not list(_find_line(drawn, "#7F7F7F"))
    assert len(list(_find_line(drawn, "#009E73"))) == 2


def test_bars_end_at_the_shares_of_the_last_samples(drawn: ElementTree.Element) -> None:
    right = follow(EXAMPLE, SEED).right
    bars = [each for each in drawn.iter(f"{NAME}rect") if each.get("height") == "15"]
    widths = [float(each.get("width", "")) for each in bars if list(each)]
    assert widths == [round(BAR * each.double().mean().item()) for each in right[:, -100:]]


def test_every_class_has_its_samples(drawn: ElementTree.Element) -> None:
    colors = [each.get("fill") for each in drawn.iter(f"{NAME}circle")]
    assert len(colors) == POINTS
    assert len(set(colors)) == 2

"""Charts as inline SVG: lines over time, dots by row, bars, reliability diagrams, heat maps.

Drawn 400 wide, so that their letters can be read on a phone; colours are classes of the page's
style sheet, which knows light, dark and print. ``Markup.format`` escapes whatever is put in.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup

from driftfilter.app.calibration import ReliabilityDiagram

WIDTH = 400
LETTER = 6.1  # width of one, at the size the style sheet gives them
SOURCE = "ref"  # the colour of the frozen source
COLORS = 6
FEW = 0.005  # of the samples: a bin that says little
DASHES = ("", "6 3", "2 3", "8 3 2 3")


class Style(NamedTuple):
    """How something is told from the others: by colour, dash and shape."""

    color: str = SOURCE
    dash: str = "4 3"
    shape: int = 0


def style(place: int) -> Style:
    """Style of the entry in this place; colours come again with other dashes and shapes."""
    return Style(
        f"c{place % COLORS}",
        DASHES[place // COLORS % len(DASHES)],
        1 + (place + place // COLORS) % 4,
    )


class Series(NamedTuple):
    """A line of a chart."""

    name: str
    style: Style
    points: Sequence[tuple[float, float]]


class Band(NamedTuple):
    """The room between two lines of a chart."""

    style: Style
    points: Sequence[tuple[float, float, float]]  # where, from, to


class Axis(NamedTuple):
    """An axis: its name, its ends and how its values are written."""

    name: str
    low: float
    high: float
    text: Callable[[float], str]
    whole: bool = False  # its values are counts

    def ticks(self, count: int = 5) -> list[float]:
        """Round numbers within the ends of the axis."""
        step = _round_step((self.high - self.low) / count)
        step = max(math.ceil(step), 1) if self.whole else step
        first = math.ceil(self.low / step - 1e-9)
        return [step * place for place in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def at(self, value: float, start: float, end: float) -> float:
        """Coordinate of a value between two ends of the axis."""
        return start + (end - start) * (value - self.low) / (self.high - self.low or 1)


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    return next(
        power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9)
    )


def spanning(
    values: Iterable[float], low: float = math.inf, high: float = -math.inf
) -> tuple[float, float]:
    """Round numbers about all values, and about ``low`` and ``high``."""
    known = list(values)
    bottom, top = min([low, *known]), max([high, *known])
    step = _round_step((top - bottom) / 4) if top > bottom else 1.0
    return step * math.floor(bottom / step + 1e-9), step * math.ceil(
        top / step - 1e-9
    ) if top > bottom else bottom + step


def _svg(
    name: str, says: str, height: float, body: Iterable[Markup], width: float = WIDTH
) -> Markup:
    """A picture with a title and a description for those who do not see it."""
    return Markup(
        '<svg viewBox="0 0 {w:g} {h:g}" role="img" '
        'aria-label="{n}"><title>{n}</title><desc>{d}</desc>{body}</svg>'
    ).format(w=width, h=height, n=name, d=says, body=Markup("").join(body))


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" class="{}" text-anchor="{}">{}</text>').format(
        x, y, kind, anchor, text
    )


def _line(x: float, y: float, to_x: float, to_y: float, kind: str) -> Markup:
    return Markup('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" class="{}"/>').format(
        x, y, to_x, to_y, kind
    )


def _box(x: float, y: float, width: float, height: float, kind: str) -> Markup:
    return Markup('<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" class="{}"/>').format(
        x, y, max(width, 0), max(height, 0), kind
    )


_SHAPES = (
    "M-4,0A4,4 0 1 0 4,0A4,4 0 1 0 -4,0Z",
    "M-3.6,-3.6H3.6V3.6H-3.6Z",
    "M0,-5L5,0L0,5L-5,0Z",
    "M0,-4.8L4.6,3.6H-4.6Z",
    "M0,4.8L4.6,-3.6H-4.6Z",
)


def _marker(x: float, y: float, style: Style) -> Markup:
    return Markup('<path d="{}" transform="translate({:.1f} {:.1f})" class="fill {}"/>').format(
        _SHAPES[style.shape], x, y, style.color
    )


def swatch(style: Style) -> Markup:
    """The picture before a name in a legend."""
    return Markup('<svg class="swatch" viewBox="0 0 26 14" aria-hidden="true">{}{}</svg>').format(
        _path([(1, 7), (25, 7)], style), _marker(13, 7, style)
    )


def alarm_swatch(style: Style) -> Markup:
    """The mark of an alarm, for a legend."""
    return Markup('<svg class="swatch" viewBox="0 0 26 14" aria-hidden="true">{}</svg>').format(
        _alarm(13, 1, 14, style)
    )


def _alarm(x: float, top: float, bottom: float, style: Style) -> Markup:
    """A line with a flag, in the colour of whose alarm it is."""
    flag = Markup('<path d="M{:.1f},{:.1f}l9,3.5l-9,3.5Z" class="flag fill {}"/>')
    return _line(x, top, x, bottom, f"alarm line {style.color}") + flag.format(x, top, style.color)


def _path(points: Sequence[tuple[float, float]], style: Style) -> Markup:
    d = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return Markup('<path d="{}" class="line {}" stroke-dasharray="{}"/>').format(
        d, style.color, style.dash or "none"
    )


def _area(points: Sequence[tuple[float, float]], style: Style) -> Markup:
    d = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points) + "Z"
    return Markup('<path d="{}" class="fill band {}"/>').format(d, style.color)


def lines(
    name: str,
    says: str,
    series: Sequence[Series],
    across: Axis,
    up: Axis,
    marks: Sequence[tuple[float, str]] = (),
    alarms: Sequence[tuple[float, Style]] = (),
    bands: Sequence[Band] = (),
) -> Markup:
    """Lines over steps; ``marks`` begin a stretch of this name, ``alarms`` stand on the axis of
    time in the colour of theirs, ``bands`` lie below the lines.
    """
    left, right, top, bottom = 44.0, 392.0, 22.0, 200.0
    body = [
        _line(left, y, right, y, "grid") for y in (up.at(tick, bottom, top) for tick in up.ticks())
    ]
    body += [
        _text(left - 6, up.at(tick, bottom, top) + 4, up.text(tick), "tick", "end")
        for tick in up.ticks()
    ]
    body += [
        _text(across.at(tick, left, right), bottom + 15, across.text(tick), "tick")
        for tick in across.ticks()
    ]
    body += _stretches(marks, across, left, right, top, bottom)
    body += [
        _line(left, bottom, right, bottom, "axis"),
        _text(right, bottom + 30, across.name, "name", "end"),
    ]
    for band in bands:
        edge = [(x, high) for x, _, high in band.points]
        edge += [(x, low) for x, low, _ in reversed(band.points)]
        body += [
            _area([(across.at(x, left, right), up.at(y, bottom, top)) for x, y in edge], band.style)
        ]
    for each in series:
        places = [(across.at(x, left, right), up.at(y, bottom, top)) for x, y in each.points]
        body += [_path(places, each.style)] if len(places) > 1 else []
        body += [_marker(*places[-1], each.style)] if places else []
    body += [_alarm(across.at(step, left, right), top, bottom, each) for step, each in alarms]
    return _svg(name, says, 236, body)


def _stretches(
    marks: Sequence[tuple[float, str]],
    across: Axis,
    left: float,
    right: float,
    top: float,
    bottom: float,
) -> list[Markup]:
    """Lines at the changes of the stream, with names if there is room for all of them."""
    places = [across.at(step, left, right) for step, _ in marks]
    named = [
        (name, x, end)
        for (_, name), x, end in zip(marks, places, [*places, right][1:], strict=True)
    ]
    body = [_line(x, top - 6, x, bottom, "mark") for x in places[1:]]
    if all(LETTER * len(name) <= end - x - 4 for name, x, end in named):
        body += [_text((x + end) / 2, top - 9, name, "tick") for name, x, end in named]
    return body


def _labels(names: Iterable[str], most: int = 24) -> tuple[float, Callable[[str], str]]:
    """The room that names need before a chart, and how they are cut to it."""
    longest = max((min(len(name), most) for name in names), default=0)
    return LETTER * longest + 10, lambda name: name if len(name) <= most else "…" + name[1 - most :]


def dots(
    name: str, says: str, rows: Mapping[str, Sequence[tuple[Style, float]]], across: Axis
) -> Markup:
    """Rows of values on one axis, each joined by a line from the first to the last."""
    left, cut = _labels(rows)
    right, height, top = WIDTH - 16.0, 24.0, 8.0
    bottom = top + height * len(rows)
    ticks = [(tick, across.at(tick, left, right)) for tick in across.ticks(4)]
    body = [_line(x, top, x, bottom, "grid") for _, x in ticks]
    body += [_text(x, bottom + 14, across.text(tick), "tick") for tick, x in ticks]
    for place, (label, values) in enumerate(rows.items()):
        y = top + height * (place + 0.5)
        places = [across.at(value, left, right) for _, value in values]
        body += [_text(left - 10, y + 4, cut(label), "label", "end")]
        body += [_line(min(places), y, max(places), y, "span")] if places else []
        body += [_marker(x, y, each) for x, (each, _) in zip(places, values, strict=True)]
    return _svg(
        name, says, bottom + 34, [*body, _text(right, bottom + 29, across.name, "name", "end")]
    )


def bars(
    name: str,
    says: str,
    rows: Sequence[tuple[str, float, Style]],
    across: Axis,
    errors: Sequence[float] = (),
) -> Markup:
    """A bar a row, with its value; ``errors`` are drawn to both sides of it."""
    left, cut = _labels(label for label, _, _ in rows)
    right, height = WIDTH - 52.0, 20.0 if len(rows) < 12 else 15.0
    body = []
    for place, (label, value, each) in enumerate(rows):
        y = height * place + 2
        error = errors[place] if errors else 0.0
        end, low, high = (
            across.at(at, left, right) for at in (value, max(value - error, 0), value + error)
        )
        body += [
            _text(left - 8, y + height / 2 + 3.5, cut(label), "label", "end"),
            _box(left, y + 2, end - left, height - 5, f"fill {each.color}"),
            _text(max(high, left) + 6, y + height / 2 + 3.5, across.text(value), "value", "start"),
        ]
        middle = y + 2 + (height - 5) / 2
        body += [_line(low, middle, high, middle, "error")] if error else []
    bottom = height * len(rows) + 4
    body += [
        _line(left, 0, left, bottom, "axis"),
        _text(left, bottom + 13, across.name, "name", "start"),
    ]
    return _svg(name, says, bottom + 18, body)


def reliability(name: str, says: str, bins: ReliabilityDiagram, style: Style) -> Markup:
    """Accuracy by confidence: bars up to the accuracy, the gap to the confidence, below them how
    many samples there are.
    """
    left, top, side = 30.0, 6.0, 164.0
    bottom, width, most = top + side, side / len(bins.samples), max(*bins.samples, 1)
    body = []
    for place, (n, sure, right) in enumerate(zip(*bins, strict=True)):
        x, few = left + width * place, " few" if n < FEW * sum(bins.samples) else ""
        if n:
            high, low = max(sure, right), min(sure, right)
            body += [
                _box(
                    x + 0.7,
                    bottom - side * right,
                    width - 1.4,
                    side * right,
                    f"fill {style.color}{few}",
                ),
                _box(x + 0.7, bottom - side * high, width - 1.4, side * (high - low), f"gap{few}"),
                _box(x + 0.7, bottom + 42 - 20 * n / most, width - 1.4, 20 * n / most, "count"),
            ]
    body += [
        _line(left, bottom, left + side, top, "ideal"),
        _line(left, bottom, left + side, bottom, "axis"),
    ]
    for tick in (0, 0.5, 1):
        body += [
            _text(left + side * tick, bottom + 14, f"{tick:g}", "tick"),
            _text(left - 5, bottom - side * tick + 4, f"{tick:g}", "tick", "end"),
        ]
    body += [
        _line(left, bottom + 42, left + side, bottom + 42, "axis"),
        _text(left + side, bottom + 55, "confidence", "name", "end"),
    ]
    return _svg(name, says, bottom + 60, body, 204)


def heat(
    name: str,
    says: str,
    columns: Sequence[str],
    rows: Mapping[str, Sequence[tuple[float, str] | None]],
    better: int,
) -> Markup:
    """Differences in a grid, each with its text: one colour for those of the sign ``better``,
    another for the rest, stronger the larger they are; None leaves a cell empty.
    """
    left, cut = _labels(rows)
    top, height, width = 32.0, 24.0, min((WIDTH - left) / len(columns), 88.0)
    sizes = (abs(each[0]) for row in rows.values() for each in row if each)
    most = max(sizes, default=0.0) or 1.0
    body = []
    for place, title in enumerate(columns):
        for line, part in enumerate(title.split(", ")):
            body += [_text(left + width * (place + 0.5), 11 + 13 * line, part, "tick")]
    for number, (label, row) in enumerate(rows.items()):
        y = top + height * number
        body += [_text(left - 8, y + height / 2 + 4, cut(label), "label", "end")]
        for place, each in enumerate(row):
            value, text = each or (0.0, "–")
            x, kind = left + width * place, "better" if value * better > 0 else "worse"
            body += [
                _shade(x, y, width, height, kind, 0.6 * math.sqrt(abs(value) / most)),
                _text(x + width / 2, y + height / 2 + 4, text, "value"),
            ]
    return _svg(name, says, top + height * len(rows) + 4, body)


def timeline(
    name: str, says: str, rows: Mapping[str, Sequence[tuple[float, float, float]]], across: Axis
) -> Markup:
    """Rows over time: stretches from here to there, stronger the larger a share is."""
    left, cut = _labels(rows)
    right, height, top = WIDTH - 16.0, 14.0, 8.0
    bottom = top + height * len(rows)
    body = []
    for place, (label, stretches) in enumerate(rows.items()):
        y = top + height * place
        body += [_text(left - 8, y + height - 3, cut(label), "label", "end")]
        for start, end, share in stretches:
            x, to = across.at(start, left, right), across.at(end, left, right)
            body += [_shade(x - 1, y, to - x + 2, height, "better", share)]
    for tick in across.ticks(4):
        body += [_text(across.at(tick, left, right), bottom + 15, across.text(tick), "tick")]
    body += [_line(left, bottom, right, bottom, "axis")]
    return _svg(
        name, says, bottom + 34, [*body, _text(right, bottom + 30, across.name, "name", "end")]
    )


def _shade(x: float, y: float, width: float, height: float, kind: str, opacity: float) -> Markup:
    return Markup(
        '<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" class="heat {}" '
        'fill-opacity="{:.2f}"/>'
    ).format(x + 1, y + 1, width - 2, height - 2, kind, opacity)

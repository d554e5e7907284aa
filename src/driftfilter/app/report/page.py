"""The page: charts, tables and sentences of the streams, put into the template."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from driftfilter import __version__
from driftfilter.app.bench.matrix import Matrix
from driftfilter.app.report import matrix as matrix_view, svg as draw
from driftfilter.app.report.content import Entry, StreamReport
from driftfilter.app.report.picture import style_sheet
from driftfilter.app.report.svg import Axis, Series, Style

LAYERS = 40  # bars of a chart
CLASSES = 20  # rows of a table
PICTURES = 1_000_000  # bytes of all of them
ALARMS = 200  # marks of a chart
WINDOW = 1000  # samples that an estimate is of


def render(
    streams: Sequence[StreamReport], matrices: Sequence[Matrix] = (), title: str | None = None
) -> str:
    """The whole page; every string in it is escaped."""
    made = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = (files("driftfilter.app.report") / "page.html.jinja").read_text(encoding="utf-8")
    pictured = _choose_pictured(streams)
    above = [matrix_view.view(each) for each in matrices]
    below = streams[0].title if len(streams) == 1 else f"{len(streams)} streams"
    return made.from_string(source).render(
        charts=Markup(style_sheet()),
        title=title or (above[0]["title"] if above else below),
        matrices=above,
        streams=[_view(stream, place, pictured) for place, stream in enumerate(streams)],
        version=__version__,
        **_SAID,
    )


# Numbers as text


def percent(value: float | None) -> str:
    """A share as text."""
    return "–" if value is None else f"{100 * value:.1f}\u00a0%"


def number(value: float | None) -> str:
    """A number as text, with three digits that count or three places."""
    if value is None:
        return "–"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.3g}"


def points(now: float | None, then: float | None) -> str:
    """The difference of two shares, in points."""
    return "–" if now is None or then is None else f"{100 * (now - then):+.1f}".replace("-", "−")


def duration(ms: float | None) -> str:
    """Milliseconds, or seconds if there are many."""
    if ms is None:
        return "–"
    if ms < 1000:
        return f"{ms:.1f} ms" if ms < 10 else f"{ms:.0f} ms"
    return f"{ms / 1000:.2f} s" if ms < 10_000 else f"{ms / 1000:,.0f} s"


def count(value: int) -> str:
    """An integer with a mark between thousands."""
    return f"{value:,}"


# What the template is given


class Card(NamedTuple):
    """A headline."""

    name: str
    value: str
    note: str
    good: bool | None = None  # better than the source, worse, or neither


def _choose_pictured(streams: Sequence[StreamReport]) -> set[int]:
    """The entries whose examples there is room for, the best of every stream first."""
    room, kept = PICTURES, set()
    first = [best(stream) for stream in streams]
    for entry in (
        *first,
        *(entry for stream in streams for entry in stream.entries if entry not in first),
    ):
        size = sum(len(each.image) for each in entry.examples)
        if size <= room:
            room -= size
            kept.add(id(entry))
    return kept


def _view(stream: StreamReport, place: int, pictured: Set[int]) -> dict[str, Any]:
    styles = {id(entry): draw.style(at) for at, entry in enumerate(stream.entries)}
    styled = [(entry, styles.get(id(entry), Style())) for entry in stream.all]
    return {
        "id": f"stream{place}",
        "stream": stream,
        "cards": _cards(stream),
        "legend": [(draw.swatch(style), entry.name) for entry, style in styled],
        "alarmed": [
            (draw.alarm_swatch(style), f"alarm of {entry.name}")
            for entry, style in styled
            if entry.alarms
        ],
        "ranking": _ranking(styled),
        "accuracy": _over_time(stream, styled, "accuracy"),
        "entropy": _over_time(stream, styled, "entropy"),
        "estimate": _estimates(stream, styled),
        "covered": _covered(styled),
        "domains": [found for entry, _ in styled if (found := _domains(entry)) is not None],
        "parts": _parts(styled, stream.part),
        "reliability": [(entry, _reliability(entry, style)) for entry, style in styled],
        "movement": [
            (entry, *_movement(entry, styles[id(entry)]))
            for entry in stream.entries
            if entry.movement
        ],
        "examples": [_examples(entry, id(entry) in pictured) for entry in stream.entries],
        "best": best(stream),
        "alarms": [(entry.name, *alarm) for entry in stream.entries for alarm in entry.alarms],
        "calibrated": any(entry.bins is not None for entry in stream.all),
        "classes": [_classes(entry) for entry in stream.entries if entry.classes],
        "shares": [found for entry, _ in styled if (found := _shares(entry)) is not None],
    }


def best(stream: StreamReport) -> Entry:
    """The entry of the highest accuracy, or the first if that is not known."""
    return max(stream.entries, key=lambda entry: entry.quality.get("accuracy") or 0.0)


def _cards(stream: StreamReport) -> list[Card]:
    """The headline numbers of one entry against the source."""
    entry, source = best(stream), stream.source
    before = {} if source is None else source.quality
    cards = []
    if entry.quality:
        now, then = entry.quality["accuracy"], before.get("accuracy")
        note = "" if then is None else f"{points(now, then)} points on {percent(then)}"
        cards.append(Card("Accuracy", percent(now), note or _beside(then), _better(now, then, 1)))
        for name, key in (("Calibration error", "ece"), ("Negative log-likelihood", "nll")):
            now, then = entry.quality[key], before.get(key)
            cards.append(Card(name, number(now), _beside(then), _better(now, then, -1)))
    else:
        then = None if source is None else source.entropy
        cards.append(Card("Mean entropy, nats", number(entry.entropy), _beside(then)))
        if entry.changed is not None:
            cards.append(
                Card("Predictions changed", percent(entry.changed), "against the frozen source")
            )
    if entry.cost is not None:
        slow = None if source is None or source.cost is None else source.cost.ms
        steps = f"median of {count(entry.cost.steps)} steps"
        note = f"frozen source {duration(slow)}" if slow else steps
        cards.append(Card("A step takes", duration(entry.cost.ms), note))
    return cards


def _beside(then: float | None) -> str:
    return "frozen source: not recorded" if then is None else f"frozen source {number(then)}"


def _better(now: float | None, then: float | None, sign: int) -> bool | None:
    return None if now is None or then is None or now == then else sign * (now - then) > 0


Styled = Sequence[tuple[Entry, Style]]


def _ranking(styled: Styled) -> Markup | None:
    """Accuracy of each entry as bars, with how far it is uncertain."""
    rows = [
        (entry.name, value, style)
        for entry, style in styled
        if (value := entry.quality.get("accuracy")) is not None
    ]
    if len(rows) < 2:
        return None
    errors = [_error(entry) for entry, _ in styled if entry.quality.get("accuracy") is not None]
    pairs = list(zip(rows, errors, strict=True))
    says = "; ".join(
        f"{name} {percent(value)} ± {100 * error:.1f}" for (name, value, _), error in pairs
    )
    across = Axis("", 0, max(value + error for (_, value, _), error in pairs), percent)
    return draw.bars("Accuracy", says, rows, across, errors)


def _error(entry: Entry) -> float:
    """The standard deviation over seeds, or half of a 95 % interval by the number of labels."""
    if "accuracy" in entry.spread:
        return entry.spread["accuracy"]
    known = sum(piece.get("judged") or 0 for piece in entry.along)
    share = entry.quality["accuracy"] or 0.0
    return 1.96 * math.sqrt(share * (1 - share) / known) if known else 0.0


def _over_time(stream: StreamReport, styled: Styled, what: str) -> Markup | None:
    series = [Series(entry.name, style, _curve(entry, what)) for entry, style in styled]
    known = [each for each in series if each.points]
    if not known:
        return None
    values = [value for each in known for _, value in each.points]
    last = max(piece["step"] + piece["steps"] for entry, _ in styled for piece in entry.along)
    up = (
        _accuracies(values)
        if what == "accuracy"
        else Axis("entropy", *draw.spanning(values, low=0), lambda value: f"{value:g}")
    )
    says = "; ".join(
        f"{each.name} from {up.text(each.points[0][1])} to {up.text(each.points[-1][1])}"
        for each in known
    )
    alarms = sorted({(step, style) for entry, style in styled for step, _ in entry.alarms})
    alarms = alarms[:: math.ceil(len(alarms) / ALARMS) or 1]
    across = _steps(last)
    return draw.lines(
        f"{what.capitalize()} over time", says, known, across, up, stream.marks, alarms
    )


def _steps(last: float) -> Axis:
    return Axis("step", 0, last, lambda value: f"{value:,.0f}", whole=True)


def _estimates(stream: StreamReport, styled: Styled) -> Markup | None:
    """Expected accuracy with its band, and the accuracy that labels tell, over time."""
    bands = [(entry, draw.Band(style, _band(entry))) for entry, style in styled]
    bands = [(entry, band) for entry, band in bands if len(band.points) > 1]
    if not bands:
        return None
    series = []
    for entry, band in bands:
        middle = [
            (_middle(piece), piece["estimate"]) for piece in entry.along if "estimate_low" in piece
        ]
        series.append(Series(f"{entry.name}, expected", band.style._replace(dash="2 3"), middle))
        true = Series(entry.name, band.style._replace(dash="", shape=0), _lately(entry))
        series += [true] if true.points else []
    ends = [end for _, band in bands for _, *pair in band.points for end in pair]
    up = _accuracies([*ends, *(value for each in series for _, value in each.points)])
    last = max(piece["step"] + piece["steps"] for entry, _ in bands for piece in entry.along)
    says = "; ".join(
        f"{each.name} from {up.text(each.points[0][1])} to {up.text(each.points[-1][1])}"
        for each in series
    )
    across = _steps(last)
    found = [band for _, band in bands]
    name = "Expected accuracy over time"
    return draw.lines(name, says, series, across, up, stream.marks, bands=found)


def _middle(piece: Mapping[str, Any]) -> float:
    return float(piece["step"] + piece["steps"] / 2)


def _lately(entry: Entry) -> list[tuple[float, float]]:
    """Points (step, accuracy over the last samples), as far as labels are known."""
    found, pieces = [], [piece for piece in entry.along if "right" in piece]
    for at, piece in enumerate(pieces):
        right = judged = 0
        for earlier in reversed(pieces[: at + 1]):
            if judged < WINDOW:
                right, judged = right + earlier["right"], judged + earlier.get("judged", 0)
        found += [(_middle(piece), right / judged)] if judged else []
    return found


def _band(entry: Entry) -> list[tuple[float, float, float]]:
    """Points (step, low, high) of the estimate, in the middle of each piece of the stream."""
    return [
        (_middle(piece), piece["estimate_low"], piece["estimate_high"])
        for piece in entry.along
        if "estimate_low" in piece
    ]


def _covered(styled: Styled) -> Markup | None:
    """Accuracy among the most confident predictions, by how many are kept."""
    series = [
        Series(
            entry.name,
            style,
            [((at + 1) / len(entry.covered), value) for at, value in enumerate(entry.covered)],
        )
        for entry, style in styled
        if entry.covered
    ]
    if not series:
        return None
    up = _accuracies(value for each in series for _, value in each.points)
    says = "; ".join(
        f"{each.name} {up.text(each.points[-1][1])} of all, {up.text(each.points[0][1])} of the "
        "most confident"
        for each in series
    )
    across = Axis("share of samples kept", 0, 1, lambda value: f"{100 * value:.0f} %")
    return draw.lines("Accuracy by coverage", says, series, across, up)


def _domains(entry: Entry) -> tuple[str, Markup] | None:
    """Which domain samples were of, and when; None if all were of one."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for piece in entry.along:
        start, end = piece["step"], piece["step"] + piece["steps"]
        for name, samples in piece.get("domains", {}).items():
            found.setdefault(str(name), []).append((start, end, samples / piece["n"]))
    if len(found) < 2:
        return None
    rows = {name: found[name] for name in sorted(found, key=int)}
    last = max(end for stretches in rows.values() for _, end, _ in stretches)
    across = _steps(last)
    says = "; ".join(f"domain {name} from step {found[name][0][0]:,} on" for name in rows)
    return entry.name, draw.timeline(f"Domains of {entry.name} over time", says, rows, across)


def _shares(entry: Entry) -> tuple[str, Markup] | None:
    """How often classes were predicted, over time; None if it is not recorded."""
    if not entry.shares:
        return None
    rows = {
        name: [(at / len(along), (at + 1) / len(along), share) for at, share in enumerate(along)]
        for name, along in entry.shares.items()
    }
    says = "; ".join(
        f"{name} from {percent(along[0])} to {percent(along[-1])}"
        for name, along in entry.shares.items()
    )
    across = Axis("share of the stream", 0, 1, lambda value: f"{100 * value:.0f} %")
    return entry.name, draw.timeline(f"Classes of {entry.name} over time", says, rows, across)


def _accuracies(values: Iterable[float]) -> Axis:
    low, high = draw.spanning(values)
    return Axis("accuracy", max(low, 0), min(high, 1), lambda value: f"{100 * value:.0f} %")


def _curve(entry: Entry, what: str) -> list[tuple[float, float]]:
    """Points (step, value) in the middle of each piece of the stream."""
    middles = [(_middle(piece), piece) for piece in entry.along]
    if what == "accuracy":
        return [
            (step, piece["right"] / piece["judged"])
            for step, piece in middles
            if piece.get("judged") and "right" in piece
        ]
    return [(step, piece["entropy"]) for step, piece in middles if piece.get("entropy") is not None]


def _parts(styled: Styled, part: str) -> dict[str, Any] | None:
    """Accuracy by shift or stretch, as dots and as a table."""
    known = [(entry, style) for entry, style in styled if entry.parts]
    if not known:
        return None
    names = list(dict.fromkeys(name for entry, _ in known for name in entry.parts))
    rows = {
        name: [(style, entry.parts[name]) for entry, style in known if name in entry.parts]
        for name in names
    }
    head = [entry.name for entry, _ in known]
    says = f"Accuracy of {', '.join(head)} by {part}; the table has the numbers."
    across = _accuracies(value for values in rows.values() for _, value in values)
    return {
        "chart": draw.dots(f"Accuracy by {part}", says, rows, across),
        "head": head,
        "rows": [(name, [entry.parts.get(name) for entry, _ in known]) for name in names],
        "best": {name: max(value for _, value in values) for name, values in rows.items()},
    }


def _reliability(entry: Entry, style: Style) -> Markup | None:
    if entry.bins is None:
        return None
    says = "; ".join(
        f"confidence {sure:.2f}, accuracy {right:.2f}, {n} samples"
        for n, sure, right in zip(*entry.bins, strict=True)
        if n
    )
    return draw.reliability(f"Reliability of {entry.name}", says, entry.bins, style)


def ece(entry: Entry) -> float | None:
    """Expected calibration error of the samples in the diagram."""
    return None if entry.bins is None else entry.bins.calibration_error()


def spread(entry: Entry, measure: str) -> str:
    """Standard deviation over the seeds as text; empty if there is one."""
    if measure not in entry.spread:
        return ""
    return (
        f" ± {100 * entry.spread[measure]:.1f}"
        if measure == "accuracy"
        else f" ± {number(entry.spread[measure])}"
    )


def _movement(entry: Entry, style: Style) -> tuple[Markup | None, str]:
    """Bars by layer, and what they say."""
    if not any(row["rms"] for row in entry.movement):
        return None, "no parameter moved."
    spread = all(row["sigmas"] is not None for row in entry.movement)
    key = (
        "sigmas"
        if spread
        else "relative"
        if all(row["relative"] is not None for row in entry.movement)
        else "rms"
    )
    shown = _largest(entry.movement, key)
    name, text = _MOVED[key]
    rows = [(row["layer"], row[key], style) for row in shown]
    says = "; ".join(f"{layer} {text(value)}" for layer, value, _ in rows)
    left_out = (
        f" The {LAYERS} of {len(entry.movement)} layers that moved most."
        if len(shown) < len(entry.movement)
        else ""
    )
    why = (
        ""
        if spread
        else " The prior of this recipe has no spread, so that there are no standard deviations to "
        "count in."
    )
    across = Axis(name, 0, max(row[key] for row in shown), text)
    chart = draw.bars(f"Movement of {entry.name} by layer", says, rows, across)
    return chart, f"Root mean square over the parameters of each layer.{why}{left_out}"


# What movement is counted in, and how it is written.
_MOVED: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "sigmas": ("prior standard deviations", lambda value: f"{value:.2f} σ"),
    "relative": ("relative to the start", percent),
    "rms": ("root mean square", number),
}


def _largest(rows: Sequence[Any], key: str) -> list[Any]:
    """The rows of the largest values, in the order of the network."""
    least = sorted((row[key] for row in rows), reverse=True)[:LAYERS][-1]
    return [row for row in rows if row[key] >= least][:LAYERS]


def _examples(entry: Entry, pictured: bool) -> dict[str, Any]:
    if not pictured:
        return {"name": entry.name, "why": "left out, so that the page stays small", "groups": []}
    groups = [
        (name, [each for each in entry.examples if each.most == most])
        for name, most in (("Most certain", True), ("Least certain", False))
    ]
    return {
        "name": entry.name,
        "why": entry.no_examples,
        "groups": [(name, found) for name, found in groups if found],
    }


def _classes(entry: Entry) -> dict[str, Any]:
    """The classes predicted most often."""
    shown = sorted(entry.classes, key=lambda row: -row["predicted"])[:CLASSES]
    return {
        "name": entry.name,
        "rows": shown,
        "total": max(sum(row["predicted"] for row in entry.classes), 1),
        "before": max(sum(row.get("baseline_predicted", 0) for row in entry.classes), 1),
        "left_out": len(entry.classes) - len(shown),
    }


_SAID = {each.__name__: each for each in (percent, number, duration, count, spread, ece)}

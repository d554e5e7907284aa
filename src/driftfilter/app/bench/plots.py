"""Figures of long streams: accuracy by visit, one line a preset; matplotlib is imported only to
draw one.
"""

import hashlib
import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from driftfilter.app.bench.tables import Document, by_condition, by_preset, condition, rounds

# Okabe–Ito, told apart by all readers; if they do not suffice they come again in other dashes.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
DASHES = ("-", "--", ":", "-.")
NAMES_A_COLUMN = 18  # what fits beside the axes


class Curve(NamedTuple):
    """Accuracy along a stream, a mean over seeds."""

    steps: list[float]  # the middle of each visit
    visits: list[float]
    round_steps: list[float]  # the middle of each round
    rounds: list[float]  # mean over its visits
    length: int  # steps in all


def write(documents: Sequence[Document], folder: Path) -> list[str]:
    """stream-NAME.png in the run folder for each model and protocol with more than one round; a
    line for each not drawn.
    """
    found = streams(documents)
    if found and find_spec("matplotlib") is None:
        return [
            f"no figure of {', '.join(found)}: it needs matplotlib, pip install "
            "'driftfilter[report]'"
        ]
    for name, (title, curves) in found.items():
        _draw(title, curves, folder / f"stream-{name}.png")
    return []


def streams(documents: Sequence[Document]) -> dict[str, tuple[str, list[tuple[str, Curve]]]]:
    """Title and curves by preset of each stream of more than one round, by a name for its file."""
    groups = by_condition(
        each
        for each in documents
        if "result" in each and each["settings"]["protocol"].get("rounds", 1) > 1
    )
    names = [_name(group[0]["settings"]) for group in groups]
    return {
        name + (_digest(group[0]["settings"]) if names.count(name) > 1 else ""): (
            _title(group),
            [
                (each[0]["settings"]["preset"], _curve([one["result"]["visits"] for one in each]))
                for each in by_preset(group)
            ],
        )
        for name, group in zip(names, groups, strict=True)
    }


def _name(settings: Mapping[str, Any]) -> str:
    return re.sub(r"[^\w.=-]+", "-", f"{settings['protocol']['name']}_{settings['model']}")


def _digest(settings: Mapping[str, Any]) -> str:
    return "_" + hashlib.sha256(condition(settings).encode()).hexdigest()[:6]


def _title(group: Sequence[Document]) -> str:
    made = group[0]["settings"]
    stream = made["stream"]
    count = len(stream["corruptions"])
    seeds = len({document["settings"]["stream"]["seed"] for document in group})
    return (
        f"{made['model']}, {made['protocol']['name'].partition(':')[0]}, "
        f"{made['protocol']['rounds']} rounds of "
        f"{count} corruption{'s' if count > 1 else ''} at severity {stream['severity']}, batch "
        f"{stream['batch']}" + (f", mean of {seeds} seeds" if seeds > 1 else "")
    )


def _curve(seeds: Sequence[Sequence[Mapping[str, Any]]]) -> Curve:
    """Means over the seeds of their visits, which come at the same steps."""
    ends = list(itertools.accumulate((visit["steps"] for visit in seeds[0]), initial=0))
    visits = [
        statistics.fmean(visit["accuracy"] for visit in each) for each in zip(*seeds, strict=True)
    ]
    places = rounds(seeds[0])
    return Curve(
        [(start + end) / 2 for start, end in itertools.pairwise(ends)],
        visits,
        [(ends[each[0]] + ends[each[-1] + 1]) / 2 for each in places],
        [statistics.fmean(visits[place] for place in each) for each in places],
        ends[-1],
    )


def _draw(title: str, curves: Sequence[tuple[str, Curve]], path: Path) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: Any = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
    }
    looks = itertools.cycle(
        itertools.product(DASHES, COLORS)
    )  # by task: a preset looks alike in all figures of a run
    drawn = sorted(
        zip(curves, looks, strict=False), key=lambda each: -each[0][1].rounds[-1]
    )  # the legend as the lines end
    with mpl.rc_context(style):
        figure = Figure(figsize=(8, 4.2), layout="constrained")
        axes = figure.subplots()
        for (name, curve), (dash, color) in drawn:
            axes.plot(
                curve.steps,
                curve.visits,
                ".",
                color=color,
                alpha=0.25,
                markersize=4,
                markeredgewidth=0,
            )
            axes.plot(curve.round_steps, curve.rounds, dash, color=color, linewidth=1.8, label=name)
        axes.set_title(
            f"{title}\nlines: mean of each round; dots: its visits", fontsize=9, loc="left"
        )
        axes.set_xlabel("step")
        axes.set_ylabel("accuracy")
        axes.set_xlim(0, max(curve.length for _, curve in curves))
        axes.grid(axis="y", color="0.92", linewidth=0.6)
        axes.set_axisbelow(True)
        figure.legend(loc="outside right center", ncols=1 + (len(curves) - 1) // NAMES_A_COLUMN)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160)

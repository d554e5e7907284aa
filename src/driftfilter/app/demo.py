"""What ``driftfilter demo`` prints: two small tables, each with what it says in a sentence."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from driftfilter.app.paper.cases import FILTER, SOURCE

OPENING = (
    "Two trained classifiers meet data that drift away from what they know. Nobody tells them a\n"
    "label. They adapt to every batch as it comes, and predict it."
)
PRESETS = {  # and what a reader who is new to them would call them
    "source": "frozen network",
    "bn": "normalised by each batch (bn)",
    "tent": "TENT",
    "driftfilter": "driftfilter",
    "driftfilter_aug": "driftfilter_aug: mirror images, too",
}


def describe_points(measured: Mapping[str, Any]) -> list[str]:
    """Lines about the linear example, from its metrics."""
    made, count = measured["settings"], len(measured["seeds"])
    shown = {SOURCE: "frozen classifier", FILTER: "driftfilter"}
    scores = {case: measured["cases"][case]["scores"] for case in shown}
    rows = {
        name: [fmean(scores[case][field]) for field in ("accuracy", "end_accuracy")]
        for case, name in shown.items()
    }
    times = f"mean of {count} repetitions" if count > 1 else "one repetition"
    return [
        f"1  Points of two classes move by {made['shift']:g} to the right and up",
        f"   logistic regression, {made['steps']:,} points one at a time, {times}",
        "",
        *_table(("right, all along", "right at the end"), rows),
        "",
        f"   At the end the frozen classifier is right {_percent(rows['frozen classifier'][1])} of "
        f"the time, driftfilter {_percent(rows['driftfilter'][1])}.",
    ]


def describe_images(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines about the image stream, from the documents of its tasks."""
    settings = results[0]["settings"]
    means = {each["settings"]["preset"]: each["result"]["mean"] for each in results}
    rows = {
        PRESETS.get(preset, preset): [mean["accuracy"], mean["ece"]]
        for preset, mean in means.items()
    }
    stream = settings["stream"]
    names = " and ".join(name.replace("_", " ") for name in stream["corruptions"])
    lines = [
        f"2  Photographs under {names}",
        f"   {settings['model']} on {stream['images']:,} CIFAR-10 images each, in batches of "
        f"{stream['batch']}",
        "",
        *_table(("right", "confidence off by"), rows),
    ]
    if {"source", "driftfilter"} <= means.keys():
        lines += ["", f"   {_compare(means)}"]
    return lines


def describe_files(out: Path, report: str | None) -> list[str]:
    """Lines about what was written, and what to try next."""
    return [
        *([f"Report  {report} (open it in a browser)"] if report else []),
        f"Files   {out}: figures of the points in linear, every number as JSON",
        "Next    driftfilter inspect my_package.models:make   what would be adapted in your model",
        "        driftfilter bench --quick                    more presets, more corruptions",
    ]


def _table(heads: Sequence[str], rows: Mapping[str, Sequence[float]]) -> list[str]:
    """Shares by name, in per cent."""
    width = max(map(len, rows)) + 2
    lines = ["   " + " " * width + "".join(f"{head:>19}" for head in heads)]
    lines += [
        f"   {name:<{width}}" + "".join(f"{_percent(value):>19}" for value in values)
        for name, values in rows.items()
    ]
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _compare(means: Mapping[str, Mapping[str, float]]) -> str:
    frozen, ours = means["source"], means["driftfilter"]
    points = 100 * (ours["accuracy"] - frozen["accuracy"])
    return (
        f"driftfilter is right {_percent(ours['accuracy'])} of the time, {abs(points):.1f} points "
        f"{'more' if points >= 0 else 'less'} than the frozen network.\n   Its confidence is off "
        f"by {_percent(ours['ece'])}, the frozen network's by {_percent(frozen['ece'])}."
    )

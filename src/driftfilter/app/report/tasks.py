"""A folder of ``driftfilter bench`` as streams of a report: a stream for each model and protocol,
an entry for each preset.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from driftfilter.app.bench.tables import Document, by_condition, by_preset, group, name_parts
from driftfilter.app.calibration import ReliabilityDiagram
from driftfilter.app.downsample import downsample, merge
from driftfilter.app.report.content import (
    DRAWN,
    MEASURES,
    Cost,
    Entry,
    ShownSample,
    StreamReport,
    flat,
    plural,
    read_json,
)

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def read_tasks(folder: Path) -> list[Document]:
    """The documents of the finished tasks, each with the path of its file."""
    found = [(path, read_json(path)) for path in sorted(folder.glob("*.json"))]
    return [
        {**document, "path": str(path)}
        for path, document in found
        if isinstance(document, dict)
        and isinstance(document.get("settings"), dict)
        and "result" in document
    ]


def streams(documents: Sequence[Document]) -> list[StreamReport]:
    """Streams of a report: tasks measured under one condition side by side."""
    return [_stream(alike) for alike in by_condition(documents)]


def _stream(documents: Sequence[Document]) -> StreamReport:
    entries = sorted(
        map(_entry, by_preset(documents)), key=lambda entry: entry.quality["accuracy"] or 0
    )
    source = (
        next((entry for entry in entries if entry.name == "source"), None)
        if len(entries) > 1
        else None
    )
    made, result = documents[0]["settings"], documents[0]["result"]
    marks, at = [], 0
    for visit in result["visits"]:
        marks.append((at, _words(visit["corruption"])))
        at += visit["steps"]
    others = [entry for entry in entries if entry is not source]
    return StreamReport(
        f"{made['model']}, {made['protocol']['name']} protocol, "
        f"batches of {made['stream']['batch']}",
        _sentence(made, result, len(others)),
        others,
        None if source is None else source._replace(name="frozen source"),
        "shift",
        marks,
    )


def _sentence(made: Mapping[str, Any], result: Mapping[str, Any], count: int) -> str:
    stream = made["stream"]
    kinds = {row["corruption"] for row in result["domains"]}
    shift, sample = name_parts(made)
    many = plural(len(kinds), shift)
    under = f"of {many}" if shift == "domain" else f"under {many} of severity {stream['severity']}"
    return (
        f"{plural(count, 'preset')} adapted {made['model']} to {result['pooled']['n']:,} "
        f"unlabeled {sample}s {'without corruption' if kinds == {'clean'} else under}, "
        f"{stream['batch']} at a time "
        f"({made['protocol']['name']} protocol), on {made['device']}."
    )


def _words(name: str) -> str:
    return name.replace("_", " ")


def _entry(documents: Sequence[Document]) -> Entry:
    """A preset over its seeds."""
    made, results = documents[0]["settings"], [document["result"] for document in documents]
    first = results[0]
    values = {name: [result["mean"][name] for result in results] for name in MEASURES}
    seeds = ", ".join(str(document["settings"]["stream"]["seed"]) for document in documents)
    machine = {key: made[key] for key in ("device", "precision", "layout")}
    rest = {
        key: value for key, value in made.items() if key not in (*machine, "versions", "stream")
    }
    return Entry(
        made["preset"],
        str(Path(documents[0]["path"]).parent),
        {name: statistics.fmean(each) for name, each in values.items()},
        _along(results),
        spread={name: statistics.stdev(each) for name, each in values.items() if len(each) > 1},
        bins=_bins(results),
        parts=_parts(results),
        movement=first.get("movement", ()),
        examples=[_example(made, each) for each in first.get("examples", ())],
        cost=Cost(
            first["steps"],
            first["pooled"]["n"],
            statistics.fmean(result["ms_per_step"] for result in results),
            statistics.fmean(result["seconds"] for result in results),
            max(result["peak_memory_mb"] for result in results),
            first["peak_memory_of"],
        ),
        configuration={
            "command": documents[0].get("command", ""),
            **flat({**rest, "stream": {**made["stream"], "seed": seeds}}),
        },
        environment={**flat(machine), **flat(made["versions"])},
        notes=sorted({text for result in results for text in result["warnings"]}),
    )


def _along(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Pieces of the stream over all seeds; by visit for older results, which have no pieces."""
    each = [downsample(result.get("along") or _visits(result), DRAWN) for result in results]
    return [
        {**merge(pieces), "step": pieces[0]["step"], "steps": pieces[0]["steps"]}
        for pieces in zip(*each, strict=False)
    ]


def _visits(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {**visit, "judged": visit["n"], "right": visit["accuracy"] * visit["n"]}
        for visit in result["visits"]
    ]


def _bins(results: Sequence[Mapping[str, Any]]) -> ReliabilityDiagram | None:
    """Diagram of the samples of all seeds; None if one does not have it."""
    if any("bins" not in result for result in results):
        return None
    each = [result["bins"] for result in results]
    counts = [list(column) for column in zip(*(found["samples"] for found in each), strict=True)]
    means = {
        name: [
            sum(n * value for n, value in zip(ns, column, strict=True)) / max(sum(ns), 1)
            for ns, column in zip(
                counts, zip(*(found[name] for found in each), strict=True), strict=True
            )
        ]
        for name in ("confidence", "accuracy")
    }
    return ReliabilityDiagram([sum(ns) for ns in counts], **means)


def _parts(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Accuracy by corruption, whatever the severity, over all seeds."""
    rows = (row for result in results for row in result["domains"])
    return {
        _words(alike[0]["corruption"]): sum(row["accuracy"] * row["n"] for row in alike)
        / sum(row["n"] for row in alike)
        for alike in group(rows, lambda row: row["corruption"])
    }


def _example(made: Mapping[str, Any], each: Mapping[str, Any]) -> ShownSample:
    data = made["data"]
    ships = data["kind"] == data["path"] == "generated"  # of other images nobody knows the names
    known = (ships or data["kind"] == "CIFAR-10-C") and made.get("outputs") in (None, "all")
    label, truth = (
        CIFAR10[each[key]] if known and each[key] < len(CIFAR10) else str(each[key])
        for key in ("label", "truth")
    )
    return ShownSample(
        each["most"],
        label,
        truth,
        each["probability"],
        _words(each["where"]),
        each["png"],
        each.get("values", ()),
    )

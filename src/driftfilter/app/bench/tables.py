"""The tables of a benchmark: on the terminal, in Markdown and in CSV."""

import csv
import io
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from driftfilter.storage.atomic import write_atomic

T = TypeVar("T")
Document = Mapping[str, Any]  # settings and result, or settings and error

SHORT = {
    "gaussian_noise": "gauss",
    "impulse_noise": "impul",
    "defocus_blur": "defoc",
    "brightness": "bright",
    "contrast": "contr",
    "elastic_transform": "elast",
    "pixelate": "pixel",
    "jpeg_compression": "jpeg",
    "speckle_noise": "speck",
    "gaussian_blur": "gblur",
    "saturate": "satur",
    "spatter": "spatt",
}
ENDS = {"first": 0, "last": -1}
MEASURES = {"mean": "accuracy", "ECE": "ece", "NLL": "nll", "Brier": "brier"}


class Table(NamedTuple):
    """Rows of names and numbers: presets on one model under one protocol, or across several."""

    notes: list[str]  # what it was measured with
    head: list[str]
    rows: list[list[str]]
    failures: Sequence[str] = ()
    conditions: frozenset[str] = frozenset()  # of the documents in it


class Row(NamedTuple):
    """A preset over its seeds; values by column, one a seed that did not fail."""

    settings: Mapping[str, Any]
    seeds: list[int]
    values: dict[str, list[float]]
    errors: list[str]
    warnings: list[str]
    commands: list[str]


# What rows of one table, and columns of one summary, may differ in.
OF_PRESET = frozenset({"preset", "recipe", "statistics", "predict_from", "source_data"})
OF_TABLE = frozenset({"model", "weights_sha256", "transform", "protocol"})


def condition(settings: Mapping[str, Any], apart: Set[str] = OF_PRESET) -> str:
    """What a document was measured under, ``apart`` from these settings and the seed: a text to
    compare.
    """
    shared = {**settings, "stream": {**settings["stream"], "seed": None}}
    return json.dumps(
        {key: value for key, value in shared.items() if key not in apart}, sort_keys=True
    )


def collect(documents: Iterable[Document]) -> list[list[Row]]:
    """Rows for each model and protocol, all under the same condition, in the order of the tasks."""
    return [[_row(seeds) for seeds in by_preset(group)] for group in by_condition(documents)]


def group(items: Iterable[T], key: Callable[[T], object]) -> list[list[T]]:
    """Items of the same key together, in the order in which they come."""
    found: dict[object, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.values())


def by_condition(documents: Iterable[Document]) -> list[list[Document]]:
    """Documents in groups that belong in one table."""
    return group(documents, lambda document: condition(document["settings"]))


def by_preset(documents: Iterable[Document]) -> list[list[Document]]:
    """Documents of one table in groups that differ in their seeds alone."""
    names = sorted(OF_PRESET)
    return group(documents, lambda each: json.dumps([each["settings"].get(name) for name in names]))


def _row(documents: Sequence[Document]) -> Row:
    made = documents[0]["settings"]
    results = [document["result"] for document in documents if "result" in document]
    names = ["clean"] if made["protocol"]["name"] == "clean" else made["stream"]["corruptions"]
    values = {name: [_accuracy(result["domains"], name) for result in results] for name in names}
    values |= {
        title: [result["mean"][name] for result in results] for title, name in MEASURES.items()
    }
    if made["protocol"].get("rounds", 1) > 1:
        values |= {
            f"{title} round": [_round(result["visits"], place) for result in results]
            for title, place in ENDS.items()
        }
    if made["before"]:
        values["before"] = [result["before"]["accuracy"] for result in results]
    if made["probe_every"]:
        values["clean"] = [result["probe"][-1]["accuracy"] for result in results]
    values["ms"] = [result["ms_per_step"] for result in results]
    seeds = [document["settings"]["stream"]["seed"] for document in documents]
    errors = [
        f"{made['preset']}, seed {seed}: {document['error']}"
        for seed, document in zip(seeds, documents, strict=True)
        if "error" in document
    ]
    warned = {f"{made['preset']}: {text}" for result in results for text in result["warnings"]}
    commands = [document["command"] for document in documents if document.get("command")]
    return Row(made, seeds, values, errors, sorted(warned), commands)


def _accuracy(domains: Iterable[Mapping[str, Any]], corruption: str) -> float:
    """Accuracy over all samples of a corruption, whatever their severity."""
    here = [row for row in domains if row["corruption"] == corruption]
    right = math.fsum(row["accuracy"] * row["n"] for row in here)
    return right / math.fsum(row["n"] for row in here)


def rounds(visits: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The places of the visits of each round."""
    return group(range(len(visits)), lambda place: visits[place]["round"])


def _round(visits: Sequence[Mapping[str, Any]], place: int) -> float:
    """Accuracy of a round, a mean over its visits."""
    return statistics.fmean(visits[each]["accuracy"] for each in rounds(visits)[place])


def tables(documents: Sequence[Document]) -> list[Table]:
    """One table for each model and protocol, and a summary across them if there are several."""
    each = collect(documents)
    return [*map(_table, each), *summaries(each)]


def summaries(each: Sequence[Sequence[Row]]) -> list[Table]:
    """Tables across protocols: a row for each model and preset, a column for each protocol."""
    alike = group(
        itertools.chain.from_iterable(each),
        lambda row: condition(row.settings, OF_PRESET | OF_TABLE),
    )
    return [  # of one table it would say nothing new
        _summary(rows)
        for rows in alike
        if len({(row.settings["model"], row.settings["protocol"]["name"]) for row in rows}) > 1
    ]


def _summary(rows: Sequence[Row]) -> Table:
    protocols = list(dict.fromkeys(row.settings["protocol"]["name"] for row in rows))
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        made = row.settings
        data = "" if made["source_data"] is None else f"{made['source_data']['images']:,}"
        text = (
            " / ".join(_cell(name, row.values[name]) for name in ("mean", "ECE"))
            if row.values["mean"]
            else "failed"
        )
        key = (made["preset"], made["model"], data, made["recipe"], made["weights_sha256"])
        cells.setdefault(key, {})[made["protocol"]["name"]] = text
    stream = rows[0].settings["stream"]
    return Table(
        [
            "mean accuracy / ECE over the domains of each protocol",
            f"severity {stream['severity']}, {_count(rows[0].settings)}, batch {stream['batch']}, "
            f"window {rows[0].settings['window']}, {describe_machine(rows[0].settings)}",
            *list_commands(rows),
        ],
        ["preset", "model", "source images", *protocols],
        [[*key[:3], *(found.get(name, "") for name in protocols)] for key, found in cells.items()],
        [],
        _conditions(rows),
    )


def _conditions(rows: Sequence[Row]) -> frozenset[str]:
    return frozenset(condition(row.settings) for row in rows)


def list_commands(rows: Sequence[Row]) -> list[str]:
    """Commands that made the rows, each once."""
    return list(dict.fromkeys(f"command: {command}" for row in rows for command in row.commands))


def describe_machine(made: Mapping[str, Any]) -> str:
    """Device, precision and layout of a task."""
    tried = ", cuDNN benchmark" if made["cudnn_benchmark"] else ""
    return f"{made['device']}, precision {made['precision']}{tried}, {made['layout']}"


def _source(rows: Sequence[Row]) -> list[str]:
    """A line for each preset that used source samples."""
    return [
        f"source data of {row.settings['preset']}: {'' if data['labeled'] else 'un'}labeled, "
        f"{data['images']:,} images of {data['path']}, sha256 {data['sha256'][:12]}"
        for row in rows
        if (data := row.settings["source_data"]) is not None
    ]


def describe_seeds(rows: Sequence[Row]) -> str:
    """The seeds of all rows if they are the same, else those of each: some are not done yet."""
    each = [", ".join(map(str, sorted(row.seeds))) for row in rows]
    named = [f"{row.settings['preset']} {seeds}" for row, seeds in zip(rows, each, strict=True)]
    text = each[0] if len(set(each)) == 1 else "; ".join(named)
    made = (
        "corruptions, order, draws"
        if rows[0].settings["data"]["kind"].startswith("generated")
        else "order, draws"
    )
    return f"seed {text} (of {made})" + (
        ": mean ± standard deviation over them" if any("," in seeds for seeds in each) else ""
    )


def _table(rows: Sequence[Row]) -> Table:
    return Table(
        _notes(rows),
        ["preset", "from", "statistics", *map(_short, rows[0].values)],
        [
            [
                *(row.settings[name] for name in ("preset", "predict_from", "statistics")),
                *map(_cell, row.values, row.values.values()),
            ]
            for row in rows
        ],
        [error for row in rows for error in row.errors],
        _conditions(rows),
    )


def _short(name: str) -> str:
    return SHORT.get(name, name.removesuffix("_noise").removesuffix("_blur"))


def _cell(column: str, values: Sequence[float]) -> str:
    if not values:
        return "failed"
    digits = 1 if column == "ms" else 3
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def name_parts(made: Mapping[str, Any]) -> tuple[str, str]:
    """What a shift of the data is called, and a sample."""
    own = made["data"]["kind"] in ("domains", "rows", "windows")  # each has samples of its own
    return ("domain", "sample") if own else ("corruption", "image")


def _count(made: Mapping[str, Any]) -> str:
    """How many samples come under each shift."""
    shift, sample = name_parts(made)
    most = "up to " if shift == "domain" else ""
    return f"{most}{made['stream']['images']:,} {sample}s a {shift}"


def _notes(rows: Sequence[Row]) -> list[str]:
    made = rows[0].settings
    stream = made["stream"]
    options = ", ".join(
        f"{key} {value}" for key, value in made["protocol"].items() if key != "name"
    )
    shift, sample = name_parts(made)
    order = (
        f"{shift}s in {stream['order']} order, {sample}s "
        f"{'shuffled' if stream['shuffled'] else 'not shuffled'}"
    )
    return [
        f"model {made['model']}, normalisation {made['normalisation']}, weights sha256 "
        f"{made['weights_sha256'][:12]}",
        f"protocol {made['protocol']['name']}"
        + (f" ({options})" if options else "")
        + f", severity {stream['severity']}, "
        f"{_count(made)}, batch {stream['batch']}, window {made['window']}, {order}",
        "data: " + ", ".join(f"{key} {value}" for key, value in made["data"].items()),
        describe_seeds(rows),
        f"accuracy by {shift}; mean, ECE (15 bins), NLL and Brier (sum over classes) are "
        "means over the domains",
        "from: predicted from the prior (before the update on the batch) or posterior; ms: "
        "median step",
        describe_machine(made),
        *_source(rows),
        ", ".join(f"{name} {version}" for name, version in made["versions"].items()),
        *list_commands(rows),
        *(f"warning of {text}" for row in rows for text in row.warnings),
    ]


# Three ways to write a table


def plain(table: Table) -> str:
    """A table as text for a terminal or a pipe."""
    grid = [table.head, *table.rows]
    widths = [max(len(cell) for cell in column) for column in zip(*grid, strict=True)]
    lines = [  # names to the left, numbers to the right
        "  ".join([*map(str.ljust, row[:3], widths), *map(str.rjust, row[3:], widths[3:])]).rstrip()
        for row in grid
    ]
    return "\n".join([*table.notes, "", *lines, *(f"failed: {each}" for each in table.failures)])


def markdown(table: Table) -> str:
    """A table as Markdown."""
    grid = [table.head, ["---"] * 3 + ["---:"] * (len(table.head) - 3), *table.rows]
    notes = [*table.notes, *(f"failed: {error}" for error in table.failures)]
    return "\n".join(
        [*(f"| {' | '.join(row)} |" for row in grid), "", *(f"- {note}" for note in notes)]
    )


def to_csv(documents: Sequence[Document]) -> str:
    """CSV of all numbers in full, one line for each task that did not fail."""
    rows = [_row([document]) for document in documents if "result" in document]
    return _csv(
        [
            {
                **{
                    name: row.settings[name]
                    for name in ("model", "preset", "predict_from", "statistics")
                },
                "protocol": row.settings["protocol"]["name"],
                "seed": row.settings["stream"]["seed"],
                **{name: value for name, (value,) in row.values.items()},
            }
            for row in rows
        ]
    )


def summary_csv(documents: Iterable[Document]) -> str:
    """CSV of means over the seeds in full, one line for each preset, model and protocol."""
    return _csv(
        [
            {
                **{name: row.settings[name] for name in ("model", "preset", "precision")},
                "protocol": row.settings["protocol"]["name"],
                "batch": row.settings["stream"]["batch"],
                "seeds": len(row.values["mean"]),
                "source_images": (row.settings["source_data"] or {"images": 0})["images"],
                **{name: statistics.fmean(row.values[title]) for title, name in MEASURES.items()},
            }
            for row in itertools.chain.from_iterable(collect(documents))
            if row.values["mean"]
        ]
    )


def _csv(lines: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(itertools.chain.from_iterable(lines)))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def write(documents: Sequence[Document], folder: Path) -> list[Table]:
    """Write table.md, table.csv and summary.csv to the run folder if there are documents; the
    tables.
    """
    if not documents:
        return []
    made = tables(documents)
    write_atomic(folder / "table.md", "\n\n".join(map(markdown, made)) + "\n")
    write_atomic(folder / "table.csv", to_csv(documents))
    write_atomic(folder / "summary.csv", summary_csv(documents))
    return made


def show(table: Table) -> None:
    """Print a table, with rules and colours if stdout is a terminal."""
    if not sys.stdout.isatty():
        print(plain(table))
        return
    from rich.console import Console
    from rich.table import Table as Rich

    grid = Rich(*table.head, padding=(0, 0, 0, 1), show_edge=False)
    for place, column in enumerate(grid.columns):
        column.justify, column.no_wrap = ("left" if place < 3 else "right"), True
    for row in table.rows:
        grid.add_row(*row)
    console = Console(highlight=False)
    for line in table.notes:
        console.print(line, style="dim", markup=False)
    body = plain(table).split("\n\n", 1)[1]
    if max(map(len, body.splitlines())) + len(table.head) > console.width:
        print(body)  # a grid that does not fit would lose its columns
        return
    console.print(grid)
    for error in table.failures:
        console.print(f"failed: {error}", style="red", markup=False)

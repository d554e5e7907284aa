"""What a benchmark shows: progress while it runs, and its tables on the terminal, in Markdown and in CSV."""

from __future__ import annotations

import csv
import io
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from driftfilter.app.bench import Display, write_whole
from driftfilter.app.task import Watch

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
MEASURES = {"mean": "accuracy", "ECE": "ece", "NLL": "nll", "Brier": "brier"}


class Table(NamedTuple):
    """Of one model under one protocol."""

    notes: list[str]  # what it was measured with
    head: list[str]
    rows: list[list[str]]
    failures: list[str]


class Row(NamedTuple):
    """A preset over its seeds; values by column, one a seed that did not fail."""

    settings: Mapping[str, Any]
    seeds: list[int]
    values: dict[str, list[float]]
    errors: list[str]
    warnings: list[str]


def collect(documents: Iterable[Document]) -> dict[tuple[str, str], list[Row]]:
    """Rows by (model, protocol), in the order of the tasks."""
    found: dict[tuple[str, str], dict[str, list[Document]]] = {}
    for document in documents:
        made = document["settings"]
        found.setdefault((made["model"], made["protocol"]["name"]), {}).setdefault(made["preset"], []).append(document)
    return {key: [_row(group) for group in presets.values()] for key, presets in found.items()}


def _row(documents: Sequence[Document]) -> Row:
    results = [document["result"] for document in documents if "result" in document]
    names = documents[0]["settings"]["stream"]["corruptions"]
    values = {name: [_accuracy(result["domains"], name) for result in results] for name in names}
    values |= {title: [result["mean"][name] for result in results] for title, name in MEASURES.items()}
    if documents[0]["settings"]["before"]:
        values["before"] = [result["before"]["accuracy"] for result in results]
    if documents[0]["settings"]["probe_every"]:
        values["clean"] = [result["probe"][-1]["accuracy"] for result in results]
    values["ms"] = [result["ms_per_step"] for result in results]
    seeds = [document["settings"]["stream"]["seed"] for document in documents]
    errors = [
        f"{document['settings']['preset']}, seed {seed}: {document['error']}"
        for seed, document in zip(seeds, documents, strict=True)
        if "error" in document
    ]
    warned = {f"{documents[0]['settings']['preset']}: {text}" for result in results for text in result["warnings"]}
    return Row(documents[0]["settings"], seeds, values, errors, sorted(warned))


def _accuracy(domains: Iterable[Mapping[str, Any]], corruption: str) -> float:
    """Over all samples of a corruption, whatever their severity."""
    here = [row for row in domains if row["corruption"] == corruption]
    return statistics.fmean([row["accuracy"] for row in here], [row["n"] for row in here])


def tables(documents: Sequence[Document], command: str) -> list[Table]:
    """One for each model and protocol."""
    return [_table(rows, command) for rows in collect(documents).values()]


def _table(rows: Sequence[Row], command: str) -> Table:
    head = ["preset", "from", "statistics", *map(_short, rows[0].values)]
    own = [[row.settings[name] for name in ("preset", "predict_from", "statistics")] for row in rows]
    cells = [[*first, *map(_cell, row.values, row.values.values())] for first, row in zip(own, rows, strict=True)]
    return Table(_notes(rows, command), head, cells, [error for row in rows for error in row.errors])


def _short(name: str) -> str:
    return SHORT.get(name, name.removesuffix("_noise").removesuffix("_blur"))


def _cell(column: str, values: Sequence[float]) -> str:
    if not values:
        return "failed"
    digits = 1 if column == "ms" else 3
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def _notes(rows: Sequence[Row], command: str) -> list[str]:
    made = rows[0].settings
    stream, versions = made["stream"], made["versions"]
    options = ", ".join(f"{key} {value}" for key, value in made["protocol"].items() if key != "name")
    order = f"corruptions in {stream['order']} order, images {'shuffled' if stream['shuffled'] else 'not shuffled'}"
    tf32 = ", ".join(f"{key} {'on' if value else 'off'}" for key, value in made["tf32"].items())
    several = len(rows[0].seeds) > 1
    return [
        f"model {made['model']}, normalisation {made['normalisation']}, weights sha256 {made['weights_sha256'][:12]}",
        f"protocol {made['protocol']['name']}" + (f" ({options})" if options else "") + f", severity {stream['severity']}, "
        f"{stream['images']:,} images a corruption, batch {stream['batch']}, window {made['window']}, {order}",
        "data: " + ", ".join(f"{key} {value}" for key, value in made["data"].items()),
        f"seed {', '.join(map(str, rows[0].seeds))}" + (": mean ± standard deviation over them" if several else ""),
        "accuracy by corruption; mean, ECE (15 bins), NLL and Brier (sum over classes) are means over the domains",
        f"from: predicted from the prior (before the update on the batch) or posterior; ms: median step on {made['device']}",
        f"driftfilter {versions['driftfilter']}, torch {versions['torch']}, python {versions['python']}; TF32: {tf32}",
        f"command: {command}",
        *(f"warning of {text}" for row in rows for text in row.warnings),
    ]


# Three ways to write a table


def plain(table: Table) -> str:
    """For a terminal or a pipe."""
    grid = [table.head, *table.rows]
    widths = [max(len(cell) for cell in column) for column in zip(*grid, strict=True)]
    lines = ["  ".join(map(_padded, range(len(widths)), row, widths)).rstrip() for row in grid]
    failed = [f"failed: {error}" for error in table.failures]
    return "\n".join([*table.notes, "", *lines, *failed])


def _padded(place: int, cell: str, width: int) -> str:
    return cell.ljust(width) if place < 3 else cell.rjust(width)  # names left, numbers right


def markdown(table: Table) -> str:
    """For a page."""
    grid = [table.head, ["---"] * 3 + ["---:"] * (len(table.head) - 3), *table.rows]
    lines = ["| " + " | ".join(row) + " |" for row in grid]
    notes = [f"- {note}" for note in [*table.notes, *(f"failed: {error}" for error in table.failures)]]
    return "\n".join([*lines, "", *notes])


def comma_separated(documents: Sequence[Document]) -> str:
    """All numbers in full, one line for each task that did not fail."""
    lines = []
    for document in documents:
        made = document["settings"]
        own = {name: made[name] for name in ("model", "preset", "predict_from", "statistics")}
        if "result" in document:
            values = {name: value for name, (value,) in _row([document]).values.items()}
            lines.append({**own, "protocol": made["protocol"]["name"], "seed": made["stream"]["seed"], **values})
    columns = list(dict.fromkeys(itertools.chain.from_iterable(lines)))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def write(documents: Sequence[Document], folder: Path, command: str) -> list[Table]:
    """table.md and table.csv in the run folder; the tables."""
    made = tables(documents, command)
    write_whole(folder / "table.md", "\n\n".join(map(markdown, made)) + "\n")
    write_whole(folder / "table.csv", comma_separated(documents))
    return made


def show(table: Table) -> None:
    """On the terminal, with rules and colours where it is one."""
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


# Progress


class Lines:
    """One line a task, for logs."""

    def begin(self, title: str) -> Watch | None:
        return None

    def end(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class Bar:
    """A bar for the task that runs, with the accuracy so far; finished tasks stand above it."""

    def __init__(self, progress: Any) -> None:
        self._progress, self._current, self._shown = progress, None, 0.0

    def begin(self, title: str) -> Watch | None:
        self._current = self._progress.add_task(title, total=None, accuracy="")
        return self._watch

    def _watch(self, step: int, steps: int, accuracy: Callable[[], float]) -> None:
        now = time.monotonic()
        if now - self._shown > 0.5:  # to ask for the accuracy is to wait for the device
            self._shown = now
            told = {"completed": step, "total": steps, "accuracy": f"accuracy {accuracy():.3f}"}
            self._progress.update(self._current, refresh=True, **told)

    def end(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False)
        self._progress.remove_task(self._current)


@contextmanager
def progress() -> Iterator[Display]:
    """Shown on stderr: a bar where it is a terminal, lines elsewhere."""
    if not sys.stderr.isatty():
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    texts = TextColumn("{task.description}"), TextColumn("{task.fields[accuracy]}")
    console = Console(stderr=True)
    with Progress(texts[0], BarColumn(), MofNCompleteColumn(), texts[1], TimeRemainingColumn(), console=console) as shown:
        yield Bar(shown)

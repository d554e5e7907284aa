"""The matrix of a benchmark: every preset against the frozen network, by network, protocol and
batch size.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from driftfilter.app.bench import tables
from driftfilter.app.bench.tables import Document, Table
from driftfilter.storage.atomic import write_atomic

NAME = "matrix.json"
FROZEN = "source"  # the preset that never learns
WORST = 10  # cells that are listed
HARM = 0.005  # below the frozen accuracy by more: worse than no adaptation
WORST_HEAD = (
    *("batch", "accuracy", "frozen", "points"),
    *("ECE", "frozen ECE", "NLL", "frozen NLL"),
)


class Cell(NamedTuple):
    """A preset on one stream, and the frozen network there; means over the seeds."""

    network: str
    protocol: str
    batch: int
    images: int  # a corruption
    preset: str
    seeds: int
    accuracy: float
    frozen: float
    ece: float
    frozen_ece: float
    nll: float
    frozen_nll: float

    @property
    def gain(self) -> float:
        """Accuracy above the frozen network's."""
        return self.accuracy - self.frozen

    @property
    def excess(self) -> float:
        """ECE above the frozen network's."""
        return self.ece - self.frozen_ece


class Matrix(NamedTuple):
    """All cells, and what they were measured with."""

    notes: Sequence[str]
    cells: Sequence[Cell]


def compare(
    stream: tuple[str, str, int, int], means: Mapping[str, Sequence[Mapping[str, float]]]
) -> list[Cell]:
    """The cells of a stream (network, protocol, batch, images) from the means of each preset, one
    for each seed; none until the frozen network is there.
    """
    found = {
        preset: {name: fmean(seed[name] for seed in seeds) for name in ("accuracy", "ece", "nll")}
        for preset, seeds in means.items()
    }
    frozen = found.pop(FROZEN, None)
    if frozen is None:
        return []
    pairs = {
        preset: itertools.chain.from_iterable(zip(own.values(), frozen.values(), strict=True))
        for preset, own in found.items()
    }
    return [Cell(*stream, preset, len(means[preset]), *values) for preset, values in pairs.items()]


def collect(own: Sequence[Document], documents: Iterable[Document]) -> Matrix:
    """The matrix of a run from its ``own`` documents, and from all others that were measured as
    they were.
    """
    kinds = {_kind(document) for document in own}
    alike = [each for each in documents if _kind(each) in kinds]
    done = [each for each in alike if "result" in each]
    cells = [cell for stream in tables.by_condition(done) for cell in _cells(stream)]
    return Matrix([*_notes(done), *_list_failures(alike)] if cells else [], cells)


def _kind(document: Document) -> str:
    """What all cells of a matrix share."""
    made = document["settings"]
    stream = {**made["stream"], "batch": None, "images": None}
    return tables.condition({**made, "stream": stream}, tables.OF_PRESET | tables.OF_TABLE)


def _cells(documents: Sequence[Document]) -> list[Cell]:
    made = documents[0]["settings"]
    stream = made["stream"]
    means = {
        seeds[0]["settings"]["preset"]: [document["result"]["mean"] for document in seeds]
        for seeds in tables.by_preset(documents)
    }
    name, _, file = made["model"].partition("=")
    network = name if file in ("", name) else made["model"]
    return compare((network, made["protocol"]["name"], stream["batch"], stream["images"]), means)


def _list_failures(documents: Iterable[Document]) -> list[str]:
    """A line for each task that failed, whose cell is empty."""
    failed = [(each["settings"], each["error"]) for each in documents if "error" in each]
    return [
        f"failed: {made['preset']}, {made['model']}, {made['protocol']['name']}, batch "
        f"{made['stream']['batch']}, seed {made['stream']['seed']}: {error}"
        for made, error in failed
    ]


def _notes(documents: Sequence[Document]) -> list[str]:
    made = documents[0]["settings"]
    rows = list(itertools.chain.from_iterable(tables.collect(documents)))
    return [
        f"severity {made['stream']['severity']}, window {made['window']}; accuracy, ECE (15 bins) "
        "and NLL are means over the domains of a stream",
        "data: " + ", ".join(f"{key} {value}" for key, value in made["data"].items()),
        tables.describe_seeds(rows),
        tables.describe_machine(made),
        ", ".join(f"{name} {version}" for name, version in made["versions"].items()),
        *tables.list_commands(rows),
    ]


def rank(cells: Iterable[Cell]) -> list[Cell]:
    """The cells, the worst first: by accuracy, then by ECE."""
    return sorted(cells, key=lambda cell: (cell.gain, -cell.excess))


def lay_out(cells: Sequence[Cell]) -> tuple[list[str], dict[tuple[str, ...], list[Cell | None]]]:
    """Titles of the columns, which are batch sizes; and by preset, network and protocol the cell in
    each column, None if there is none.
    """
    columns = sorted({(cell.batch, cell.images) for cell in cells}, reverse=True)
    names = [(cell.preset, cell.network, cell.protocol) for cell in cells]
    first = [list(dict.fromkeys(part)) for part in zip(*names, strict=True)]
    order = itertools.product(*first)  # by preset, then network, then protocol, as they come
    rows: dict[tuple[str, ...], list[Cell | None]] = {
        name: [None] * len(columns) for name in order if name in names
    }
    for name, cell in zip(names, cells, strict=True):
        row = rows[name]
        place = columns.index((cell.batch, cell.images))
        row[place] = row[place] or cell  # a run's own come first
    return [f"batch {batch}, {images:,} images" for batch, images in columns], rows


def say_gain(cell: Cell | None) -> str:
    """Accuracy above the frozen network, in points."""
    return "–" if cell is None else f"{100 * cell.gain:+.1f}"


def say_excess(cell: Cell | None) -> str:
    """ECE minus the frozen network's."""
    return "–" if cell is None else f"{cell.excess:+.3f}"


def describe_harm(cells: Sequence[Cell]) -> str:
    """How many cells are clearly below the frozen network."""
    harmed = sum(cell.gain < -HARM for cell in cells)
    below = f"more than {100 * HARM:g} points below the frozen network"
    return f"{harmed or 'none'} of {len(cells)} cells {'is' if harmed < 2 else 'are'} {below}"


def draw_up(matrix: Matrix) -> list[Table]:
    """Three tables: the worst cells, accuracy and ECE against the frozen network; the first note of
    each is its title.
    """
    columns, rows = lay_out(matrix.cells)
    worst = rank(matrix.cells)[:WORST]
    names = ["preset", "network", "protocol"]
    gains = [[*name, *(say_gain(each) for each in row)] for name, row in rows.items()]
    excesses = [[*name, *(say_excess(each) for each in row)] for name, row in rows.items()]
    return [
        Table(
            [f"the {len(worst)} worst cells; {describe_harm(matrix.cells)}"],
            [*names, *WORST_HEAD],
            [_list_values(cell) for cell in worst],
        ),
        Table(["accuracy above the frozen network, in points"], [*names, *columns], gains),
        Table(["ECE minus the frozen network's", *matrix.notes], [*names, *columns], excesses),
    ]


def _list_values(cell: Cell) -> list[str]:
    return [
        *(cell.preset, cell.network, cell.protocol, str(cell.batch)),
        *(f"{cell.accuracy:.3f}", f"{cell.frozen:.3f}", say_gain(cell)),
        *(f"{each:.3f}" for each in (cell.ece, cell.frozen_ece, cell.nll, cell.frozen_nll)),
    ]


def markdown(matrix: Matrix) -> str:
    """The three tables as Markdown, each under its title."""
    each = [(table.notes[0], table._replace(notes=table.notes[1:])) for table in draw_up(matrix)]
    return "\n\n".join(f"**{title}**\n\n{tables.markdown(rest).strip()}" for title, rest in each)


def write(matrix: Matrix, folder: Path) -> list[Table]:
    """Write matrix.json and matrix.md to the run folder if there are cells; the tables."""
    if not matrix.cells:
        return []
    document = {"notes": matrix.notes, "cells": [cell._asdict() for cell in matrix.cells]}
    write_atomic(folder / NAME, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    write_atomic(folder / "matrix.md", markdown(matrix) + "\n")
    return draw_up(matrix)


def read(document: Mapping[str, Any]) -> Matrix:
    """The matrix that a file holds."""
    return Matrix(document["notes"], [Cell(**each) for each in document["cells"]])

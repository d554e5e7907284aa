"""The paper's table of accuracies on CIFAR-10-C: its five methods by the benchmark, on the user's
data or on what ships, beside the printed figures.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import driftfilter as df
from driftfilter.app.bench import bench as benchmark, tables
from driftfilter.app.bench.options import QUICK, BenchOptions
from driftfilter.app.bench.prepare import open_source, prepare as prepare_bench
from driftfilter.app.bench.task import Bench, SourceImages, Task
from driftfilter.app.paper.options import ReproduceOptions
from driftfilter.app.samples import open_sample
from driftfilter.app.terminal import Display
from driftfilter.base.checks import require

PAPER = {"source": 0.56, "bn": 0.79, "tent": 0.80, "eata": 0.80, "opgd": 0.82}
MARGINS = (("bn", "source"), ("tent", "bn"), ("eata", "bn"), ("opgd", "bn"), ("opgd", "tent"))
# Of the 2,000 shipped images the first are streamed; the others are for EATA's Fisher.
STREAMED = 1000
SHIPPED = "cifar10_test_first2000.npz"


class Prepared(NamedTuple):
    """The tasks of the table, ready to run."""

    bench: Bench
    tasks: tuple[Task, ...]


class Reproduced(NamedTuple):
    """The table as text, and what is missing in it."""

    table: str
    failures: list[str]


def prepare(options: ReproduceOptions) -> Prepared:
    """The tasks of the five methods.

    A wrong option or a missing file is an error here, before anything runs.
    """
    require("," not in options.model, "--model", options.model, "one network")
    short = options.data is None and options.clean is None
    bench, tasks = prepare_bench(
        BenchOptions(
            presets=",".join(PAPER),
            models=options.model,
            seeds="".join(f"{seed}," for seed in options.list_seeds(1)),
            data=options.data,
            clean=options.clean,
            source=options.source,
            corruptions=options.corruptions or (QUICK["corruptions"] if short else "all"),
            severity=options.severity,
            batch=options.batch,
            images=options.images or (STREAMED if short else None),
            device=options.device,
        )
    )
    return Prepared(bench if bench.source else replace(bench, source=_take_shipped()), tasks)


def _take_shipped() -> SourceImages:
    """The shipped images that are not streamed unless more are asked for, without labels."""
    with open_sample(SHIPPED) as path:
        found = open_source(path)
    named = f"{SHIPPED} (the last {len(found.images) - STREAMED:,})"
    return found._replace(images=found.images[STREAMED:], labels=None, path=named)


def reproduce(
    prepared: Prepared, folder: Path, display: Display, command: str, figures: bool
) -> Reproduced:
    """Run what is not done yet, and write figure, metrics.json and table.txt; the tasks lie in the
    folder's ``tasks``, as those of ``driftfilter bench``.
    """
    from driftfilter.app.paper.reproduce import write

    bench, tasks = prepared
    done = benchmark.run(bench, tasks, folder / "tasks", display, command)
    failures = benchmark.describe_undone(bench, tasks, done, folder / "tasks")
    documents = [document for document in done if document is not None]
    if not documents:
        return Reproduced("", failures)
    (rows,) = tables.collect(documents)
    measured = measure(rows)
    failures += [error for row in rows for error in row.errors]
    if figures and not failures:
        from driftfilter.app.paper.figures import draw_cifar, save

        save(draw_cifar(measured["cases"]), folder / "cifar")
    (table,) = tables.tables(documents)
    return Reproduced(write(folder, measured, _describe(table, measured)), failures)


def measure(rows: Sequence[tables.Row]) -> dict[str, Any]:
    """What metrics.json holds: every number of every seed, by method."""
    made = rows[0].settings
    apart = {*tables.OF_PRESET, "stream"}
    cases = {row.settings["preset"]: _measure_row(row) for row in rows}
    return {
        "example": "cifar",
        "version": df.__version__,
        "seeds": rows[0].seeds,
        "settings": {
            "stream": {key: each for key, each in made["stream"].items() if key != "seed"},
            **{key: each for key, each in made.items() if key not in apart},
        },
        "cases": cases,
        "margins": [_compare(cases, ours, other) for ours, other in MARGINS],
        "seconds": {
            row.settings["preset"]: [each / 1000 for each in row.values["ms"]] for row in rows
        },
    }


def _measure_row(row: tables.Row) -> dict[str, Any]:
    values = row.values
    return {
        "paper": PAPER[row.settings["preset"]],
        "recipe": row.settings["recipe"],
        "source_data": row.settings["source_data"],
        "corruptions": {name: values[name] for name in row.settings["stream"]["corruptions"]},
        **{name: values[title] for title, name in tables.MEASURES.items()},
    }


def _compare(cases: Mapping[str, Any], ours: str, other: str) -> dict[str, Any]:
    """Accuracy of a method less another's, in the paper and here (None if one of them failed)."""
    pairs = [cases[name]["accuracy"] if name in cases else [] for name in (ours, other)]
    here = statistics.fmean(pairs[0]) - statistics.fmean(pairs[1]) if all(pairs) else None
    return {
        "method": ours,
        "over": other,
        "paper": round(PAPER[ours] - PAPER[other], 2),
        "here": here,
    }


def _describe(table: tables.Table, measured: Mapping[str, Any]) -> str:
    """The benchmark's table with the paper's column beside the mean, and the margins."""
    at = table.head.index("mean")
    grid = table._replace(
        head=[*table.head[:at], "paper", *table.head[at:]],
        rows=[[*row[:at], f"{PAPER[row[0]]:.2f}", *row[at:]] for row in table.rows],
    )
    count = len(measured["settings"]["stream"]["corruptions"])
    margins = [
        f"margin  {each['method'] + ' over ' + each['over']:<18}paper {each['paper']:+.2f}   here "
        + ("failed" if each["here"] is None else f"{each['here']:+.3f}")
        for each in measured["margins"]
    ]
    return "\n".join(
        itertools.chain(
            [tables.plain(grid), ""],
            margins,
            [
                "",
                "paper: mean accuracy over the 15 corruptions, to two digits, of a network it "
                'calls "ResNet-28"; severity, batch and images are not said',
                f"here: mean over {count} corruption{'s' if count > 1 else ''}, every one from the "
                "source",
            ],
        )
    )

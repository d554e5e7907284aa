"""The commands: each takes what was asked for and gives its exit status, and what it found as data.

Torch is imported only by those that need it.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from driftfilter.app.arguments import EXAMPLES, FIRST_SEED, parse
from driftfilter.app.terminal import Output

Found: TypeAlias = tuple[
    int, Any
]  # exit status, and what was found; None where the error says it all
DEMO_BENCH = ("bench", "--quick", "--images", "500", "--corruptions", "gaussian_noise,contrast")
_SHARED = ("version", "command", "quiet", "json")  # no options of a command's own


def failed(command: str, error: object, status: int) -> Found:
    """Say why a command came to nothing."""
    print(f"driftfilter {command}: error: {error}", file=sys.stderr)
    return status, None


def demo(parsed: argparse.Namespace, arguments: Sequence[str], output: Output) -> Found:
    """The paper's linear example, and a short image stream."""
    from driftfilter.app.paper.linear import Linear
    from driftfilter.app.paper.reproduce import reproduce

    out, example = parsed.out, Linear()
    output.say(
        "2-D logistic regression; both classes drift diagonally by 3 while no label is ever seen"
    )
    output.say(
        f"{example.source_samples} labeled source samples, {example.steps} single-sample steps, "
        f"{parsed.seeds} seeds\n"
    )
    seeds, figures = (
        range(FIRST_SEED, FIRST_SEED + parsed.seeds),
        find_spec("matplotlib") is not None,
    )
    output.say(
        reproduce(("linear",), seeds, out, os.cpu_count() or 1, _progress(output), figures=figures)[
            "linear"
        ]
    )
    output.say(f"\nwrote {out / 'linear'}\n")
    found: dict[str, Any] = {"out": str(out), "linear": _metrics(out / "linear", output)}
    if find_spec("torchmetrics") is None:
        output.say("the image stream needs torchmetrics: pip install 'driftfilter[bench]'")
        return 0, found
    command = [*DEMO_BENCH, "--out", str(out / "images")]
    status, found["images"] = bench(parse(command), command, output)
    if status:
        return status, found
    status, found["report"] = _reported([out / "images"], None, output)
    return status, found


def _progress(output: Output) -> Callable[[str, int, int], None]:
    """On a terminal one line that changes, elsewhere one line at the end."""

    def shown(name: str, done: int, total: int) -> None:
        line = f"  {name}: seed {done}/{total}"
        if sys.stderr.isatty() and not output.quiet:
            print(f"\r{line:<40}", end="" if done < total else "\n", file=sys.stderr, flush=True)
        elif done == total:
            output.note(line)

    return shown


def _metrics(folder: Path, output: Output) -> Any:
    """What was written there, where it is to be printed."""
    return (
        json.loads((folder / "metrics.json").read_text(encoding="utf-8")) if output.json else None
    )


def reproduce(parsed: argparse.Namespace, arguments: Sequence[str], output: Output) -> Found:
    """The paper's examples."""
    if not parsed.no_figures and find_spec("matplotlib") is None:
        return failed(
            "reproduce",
            "figures need matplotlib: pip install 'driftfilter[report]', or give --no-figures",
            1,
        )
    from driftfilter.app.paper.reproduce import reproduce as run_all

    names, out = EXAMPLES if parsed.example == "all" else (parsed.example,), parsed.out
    seeds, start = range(parsed.first_seed, parsed.first_seed + parsed.seeds), time.perf_counter()
    tables = run_all(
        names, seeds, out, parsed.workers, _progress(output), figures=not parsed.no_figures
    )
    for name, table in tables.items():
        output.say(f"{name}\n\n{table}\n")
    seconds = time.perf_counter() - start
    output.say(f"wrote {', '.join(str(out / name) for name in tables)} in {seconds:.0f} s")
    return 0, {
        "out": str(out),
        "seconds": seconds,
        "examples": {name: _metrics(out / name, output) for name in tables},
    }


def bench(parsed: argparse.Namespace, arguments: Sequence[str], output: Output) -> Found:
    """Presets × protocols × models × seeds."""
    own = ("quick", "out", "list")
    given = {key: value for key, value in vars(parsed).items() if key not in (*_SHARED, *own)}
    from driftfilter.app.bench import bench as benchmark
    from driftfilter.app.bench.ranks import worker
    from driftfilter.app.bench.tables import progress

    me = worker()
    try:
        made, tasks = benchmark.prepare(
            benchmark.Options(**{**(benchmark.QUICK if "quick" in parsed else {}), **given})
        )
    except (ValueError, OSError, ImportError) as error:
        return failed("bench", error, 2)
    folder, done = parsed.out, benchmark.done(made, tasks, parsed.out)
    if parsed.list:
        pairs = list(zip(done, tasks, strict=True))
        output.say("\n".join(f"{'done' if ready else 'to do'}  {task}" for ready, task in pairs))
        return 0, {
            "out": str(folder),
            "tasks": [{"task": str(task), "done": ready} for ready, task in pairs],
        }
    if any(done):
        output.note(f"resumed: {sum(done)} of {len(done)} done")
    try:
        with progress(output.quiet) as display:
            command = shlex.join(["driftfilter", *arguments])
            documents = benchmark.run(made, tasks, folder, display, command, me.first(len(tasks)))
    except KeyboardInterrupt:
        return failed("bench", f"interrupted: the same command goes on from {folder}", 130)
    wrong = [document for document in documents if document is not None and "error" in document]
    shown = [*benchmark.finished(made, tasks, folder), *wrong]
    _show([document for document in documents if document is not None], shown, folder, output)
    left = benchmark.undone(made, tasks, documents, folder)
    told = [
        f"failed: {each['settings']['preset']}: {each['error']}" for each in wrong if output.quiet
    ]
    for line in [*told, *left]:
        print(line, file=sys.stderr)
    if shown:
        output.say(f"wrote {folder}")
    # Among several workers what one leaves is another's; torchrun would end them all for a status
    # that is not 0.
    missing = left and me.workers == 1
    return 1 if wrong or missing else 0, {
        "out": str(folder),
        "not_done": left,
        "results": [each for each in documents if each],
    }


def _show(
    own: Sequence[dict[str, Any]], shown: Sequence[dict[str, Any]], folder: Path, output: Output
) -> None:
    """Write tables and pictures of all that is in the folder, and print the tables of this run."""
    from driftfilter.app.bench import plots, tables

    conditions = {tables.condition(document["settings"]) for document in own}
    for table in tables.write(shown, folder):
        if conditions & table.conditions and output.plain:
            tables.show(table)
            print()
    for line in plots.write(shown, folder):
        output.note(line)


def run(parsed: argparse.Namespace, arguments: Sequence[str], output: Output) -> Found:
    """Adapt a user's model over a user's data."""
    given = {key: value for key, value in vars(parsed).items() if key not in (*_SHARED, "live")}
    if parsed.live and output.quiet:
        return failed("run", "--live and --quiet contradict each other: give one of them", 2)
    from driftfilter.app.run import options, progress as telling
    from driftfilter.app.run.run import run as adapt

    with telling.warnings_in_one_line():
        try:
            made = options.prepare(options.Options(**given))
        except (ValueError, OSError, ImportError) as error:
            return failed("run", error, 2)
        shown = telling.progress(output.quiet, parsed.live, made.classes)
        try:
            ending = adapt(made, shown, telling.warn, shlex.join(["driftfilter", *arguments]))
        except (ValueError, OSError, RuntimeError) as error:
            return failed("run", error, 1)
        except KeyboardInterrupt:
            return failed(
                "run", "interrupted twice: nothing was saved since the last checkpoint", 130
            )
    return telling.conclude(ending, parsed.out, output)


def report(parsed: argparse.Namespace, arguments: Sequence[str], output: Output) -> Found:
    """Runs side by side on one page."""
    status, path = _reported(parsed.runs, parsed.out, output)
    return status, None if path is None else {"report": path}


def _reported(folders: Sequence[Path], out: Path | None, output: Output) -> tuple[int, str | None]:
    from driftfilter.app import report as reports

    try:
        path = reports.write(folders, out)
    except (reports.ReportError, OSError) as error:
        return failed("report", error, 1)
    output.say(f"wrote {path}")
    return 0, str(path)


def data(parsed: argparse.Namespace, arguments: Sequence[str], output: Output) -> Found:
    """Where to get CIFAR-10-C, and whether a folder holds it."""
    from driftfilter.app.images import check as checking

    if parsed.folder is None:
        output.say(checking.explain())
        return 0, {"archives_md5": checking.ARCHIVES, "text": checking.explain()}
    findings = checking.findings(Path(parsed.folder))
    wrong = [finding for finding in findings if not finding.ok]
    output.say(checking.told(parsed.folder, findings))
    if wrong and output.quiet:
        return failed("data", "; ".join(finding.text for finding in wrong), 1)
    found = {
        "path": parsed.folder,
        "ok": not wrong,
        "files": [finding._asdict() for finding in findings],
    }
    return 1 if wrong else 0, found


def look(parsed: argparse.Namespace, arguments: Sequence[str], output: Output) -> Found:
    """What adaptation would change in a model."""
    from driftfilter.app import inspect_model as inspection

    try:
        found = inspection.inspect(parsed.model, parsed.weights, parsed.input, parsed.batch)
    except (ValueError, OSError, TypeError, ImportError) as error:
        return failed("inspect", error, 2)
    output.say("\n".join(inspection.lines(found, parsed.names)))
    return 0, found.to_dict()


def listing(parsed: argparse.Namespace, arguments: Sequence[str], output: Output) -> Found:
    """Every building block and preset."""
    from driftfilter.presets import PRESETS
    from driftfilter.recipe import VARIANTS

    table: dict[str, Mapping[str, object]] = {**VARIANTS, "preset": PRESETS}
    for role, named in table.items():
        output.say(role)
        for name, entry in named.items():
            output.say(f"  {name:<24} {textwrap.shorten(_summary(entry), 120, placeholder=' …')}")
    return 0, [
        _entry(role, name, entry) for role, named in table.items() for name, entry in named.items()
    ]


def _summary(entry: object) -> str:
    return " ".join((entry.__doc__ or "").strip().partition("\n\n")[0].split())


def _entry(role: str, name: str, entry: object) -> dict[str, object]:
    """A line of the list as data; what a field is when it is not given, as Python writes it."""
    given = inspect.signature(entry).parameters.values()  # type: ignore[arg-type]
    fields = {each.name: "" if each.default is each.empty else repr(each.default) for each in given}
    return {"role": role, "name": name, "summary": _summary(entry), "fields": fields}


COMMANDS: dict[str, Callable[[argparse.Namespace, Sequence[str], Output], Found]] = {
    "demo": demo,
    "reproduce": reproduce,
    "bench": bench,
    "run": run,
    "report": report,
    "data": data,
    "inspect": look,
    "list": listing,
}

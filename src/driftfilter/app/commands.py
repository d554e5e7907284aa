"""The commands: each takes its options and gives its exit status, and what it found as data.

Torch is imported only by those that need it.
"""

import inspect
import json
import os
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from driftfilter.app.arguments import (
    MODEL_HELP,
    Command,
    Found,
    argument,
    count_option,
    file,
    folder,
    option,
    parse,
    shape,
)
from driftfilter.app.bench.options import BenchOptions, read_options
from driftfilter.app.paper.options import FIRST_SEED, ReproduceOptions
from driftfilter.app.run.options import CheckOptions, RunOptions, TuneOptions
from driftfilter.app.serve.options import ServeOptions
from driftfilter.app.terminal import Display, Output, Shown, show_progress

DEMO_BENCH = ("bench", "--quick", "--images", "300", "--corruptions", "gaussian_noise,contrast")


def fail(command: str, error: object, status: int) -> Found:
    """Say why a command came to nothing."""
    print(f"driftfilter {command}: error: {error}", file=sys.stderr)
    return status, None


@dataclass(frozen=True)
class DemoOptions:
    """Options of ``driftfilter demo``."""

    seeds: int = count_option("number of seeds (default {default})", 5)
    out: Path = option(
        "where to write (default {default})", Path("runs/demo"), type=folder, metavar="DIR"
    )


def demo(options: DemoOptions, output: Output, arguments: Sequence[str]) -> Found:
    """Run the paper's linear example, and a short image stream."""
    from driftfilter.app import demo as demonstration
    from driftfilter.app.paper.reproduce import reproduce

    out, silent = options.out, output._replace(json=True)  # files hold the whole tables
    output.say(f"{demonstration.OPENING}\n")
    seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
    with show_progress(output.quiet) as display:
        reproduce(
            ("linear",),
            seeds,
            out,
            os.cpu_count() or 1,
            _count_seeds(display),
            figures=find_spec("matplotlib") is not None,
        )
    linear = json.loads((out / "linear" / "metrics.json").read_text(encoding="utf-8"))
    output.say("\n".join(demonstration.describe_points(linear)) + "\n")
    command = [*DEMO_BENCH, "--out", str(out / "images")]
    status, images = bench(parse(command, COMMANDS).options, silent, command)
    found: dict[str, Any] = {"out": str(out), "linear": linear, "images": images}
    if status:
        return status, found
    output.say("\n".join(demonstration.describe_images(images["results"])) + "\n")
    status, found["report"] = _write_report([out / "images"], None, silent)
    output.say("\n".join(demonstration.describe_files(out, found["report"])))
    return status, found


def _count_seeds(display: Display) -> Callable[[str, int, int], None]:
    """Show how many seeds of each example are done."""
    begun: dict[str, Shown] = {}

    def show(name: str, done: int, total: int) -> None:
        watch, end = begun.setdefault(name, begun.get(name) or display(name))
        if watch is not None:
            watch(done, total, lambda: "seeds")
        if done == total:
            end(f"  {name}: seed {done}/{total}")

    return show


def _read_metrics(folder: Path, output: Output) -> Any:
    """What was written there, if it is to be printed."""
    return (
        json.loads((folder / "metrics.json").read_text(encoding="utf-8")) if output.json else None
    )


def reproduce(options: ReproduceOptions, output: Output, arguments: Sequence[str]) -> Found:
    """Run the paper's examples."""
    misplaced = options.find_misplaced()
    if misplaced is not None:
        return fail("reproduce", misplaced, 2)
    if not options.no_figures and find_spec("matplotlib") is None:
        return fail(
            "reproduce",
            "figures need matplotlib: pip install 'driftfilter[report]', or give --no-figures",
            1,
        )
    from driftfilter.app.paper import cifar
    from driftfilter.app.paper.reproduce import reproduce as run_all

    names, out, figures = options.names, options.out, not options.no_figures
    start = time.perf_counter()
    failures: list[str] = []
    try:
        images = cifar.prepare(options) if "cifar" in names else None
    except (ValueError, OSError, ImportError) as error:
        return fail("reproduce", error, 2)
    with show_progress(output.quiet) as display:
        seeds, count = options.list_seeds(), _count_seeds(display)
        tables = run_all(names, seeds, out, options.workers, count, figures=figures)
        if images is not None:
            command = shlex.join(["driftfilter", *arguments])
            found = cifar.reproduce(images, out / "cifar", display, command, figures)
            failures = found.failures
            tables |= {"cifar": found.table} if found.table else {}
    for name, table in tables.items():
        output.say(f"{name}\n\n{table}\n")
    for line in failures:
        print(f"failed: cifar: {line}", file=sys.stderr)
    seconds = time.perf_counter() - start
    output.say(f"wrote {', '.join(str(out / name) for name in tables)} in {seconds:.0f} s")
    return 1 if failures else 0, {
        "out": str(out),
        "seconds": seconds,
        "examples": {name: _read_metrics(out / name, output) for name in tables},
    }


def bench(options: BenchOptions, output: Output, arguments: Sequence[str]) -> Found:
    """Run presets × protocols × models × seeds."""
    from driftfilter.app.bench import bench as benchmark
    from driftfilter.app.bench.prepare import prepare
    from driftfilter.app.bench.ranks import worker

    me, folder = worker(), options.out
    try:
        made, tasks = prepare(options)
    except (ValueError, OSError, ImportError) as error:
        return fail("bench", error, 2)
    _note_transforms(made.networks, output)
    done = benchmark.are_done(made, tasks, folder)
    if options.list:
        pairs = list(zip(done, tasks, strict=True))
        output.say("\n".join(f"{'done' if ready else 'to do'}  {task}" for ready, task in pairs))
        return 0, {
            "out": str(folder),
            "tasks": [{"task": str(task), "done": ready} for ready, task in pairs],
        }
    if any(done):
        output.note(f"resumed: {sum(done)} of {len(done)} done")
    try:
        with show_progress(output.quiet) as display:
            documents = benchmark.run(
                made,
                tasks,
                folder,
                display,
                shlex.join(["driftfilter", *arguments]),
                me.first(len(tasks)),
            )
    except OSError as error:
        return fail("bench", error, 1)
    except KeyboardInterrupt:
        return fail("bench", f"interrupted: the same command goes on from {folder}", 130)
    wrong = [document for document in documents if document is not None and "error" in document]
    shown = [*benchmark.read_finished(made, tasks, folder), *wrong]
    own = [document for document in documents if document is not None]
    _show(own, shown, folder, output, options.matrix)
    left = benchmark.describe_undone(made, tasks, documents, folder)
    failures = [f"failed: {each['settings']['preset']}: {each['error']}" for each in wrong]
    for line in [*(failures if output.quiet else []), *left]:
        print(line, file=sys.stderr)
    found: dict[str, Any] = {"out": str(folder), "not_done": left, "results": own}
    if shown:
        output.say(f"wrote {folder}")
    unreported = 0
    if shown and options.matrix:
        unreported, found["report"] = _write_report([folder], None, output)
    # Among several workers what one leaves is another's; torchrun would end them all for a status
    # that is not 0.
    return 1 if wrong or unreported or (left and me.workers == 1) else 0, found


def _note_transforms(networks: Mapping[str, Any], output: Output) -> None:
    """Say what is done to samples before a network sees them, if anything is."""
    for network in networks.values():
        if network.has_transform:
            output.note(f"{network.name}: transform {network.describe_inputs()}")


def _show(
    own: Sequence[dict[str, Any]],
    shown: Sequence[dict[str, Any]],
    folder: Path,
    output: Output,
    matrix: bool,
) -> None:
    """Write tables and pictures of all that is in the folder, and print the tables of this run, or
    those of its matrix.
    """
    from driftfilter.app.bench import matrix as matrices, plots, tables

    conditions = {tables.condition(document["settings"]) for document in own}
    made = [each for each in tables.write(shown, folder) if conditions & each.conditions]
    if matrix:
        made = matrices.write(matrices.collect(own, shown), folder)
    for table in made if output.plain else ():
        tables.show(table)
        print()
    for line in plots.write(shown, folder):
        output.note(line)


def run(options: RunOptions, output: Output, arguments: Sequence[str]) -> Found:
    """Adapt a user's model over a user's data."""
    if options.live and output.quiet:
        return fail("run", "--live and --quiet contradict each other: give one of them", 2)
    from driftfilter.app.run import progress
    from driftfilter.app.run.prepare import prepare
    from driftfilter.app.run.run import run as adapt
    from driftfilter.app.run.tenants import follow_tenants

    with progress.shorten_warnings():
        try:
            made = prepare(options)
        except (ValueError, OSError, ImportError) as error:
            return fail("run", error, 2)
        if options.tenants is not None:
            return follow_tenants(made, output)
        follow = progress.follow(output.quiet, options.live, made.classes)
        try:
            ending = adapt(made, follow, progress.warn, shlex.join(["driftfilter", *arguments]))
        except (ValueError, OSError, RuntimeError) as error:
            return fail("run", error, 1)
        except KeyboardInterrupt:
            return fail(
                "run", "interrupted twice: nothing was saved since the last checkpoint", 130
            )
    return progress.conclude(ending, options.out, output)


def _count_samples(watch: Any) -> Callable[[int, int], None]:
    """Show how many samples are done, if anybody watches."""

    def show(done: int, total: int) -> None:
        if watch is not None:
            watch(done, total, lambda: "samples")

    return show


def tune(options: TuneOptions, output: Output, arguments: Sequence[str]) -> Found:
    """Choose the default's numbers on a user's stream."""
    from driftfilter.app import tune as tuning

    with show_progress(output.quiet) as display:
        watch, end = display("tune")
        try:
            found = tuning.tune(options, _count_samples(watch))
        except (ValueError, OSError, ImportError, TypeError) as error:
            return fail("tune", error, 2)
        except RuntimeError as error:  # of the model, which takes other samples
            return fail("tune", error, 1)
        end(f"  tune: {found.samples} samples")
    output.say("\n".join(tuning.describe(found)))
    return 0, found.to_dict()


def serve(options: ServeOptions, output: Output, arguments: Sequence[str]) -> Found:
    """Serve a model over HTTP, one posterior for each tenant."""
    needed = ("starlette", "uvicorn", "prometheus_client", *(("ray",) if options.ray else ()))
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        extra = "ray,serve" if "ray" in missing else "serve"
        return fail("serve", f"it needs {missing}: pip install 'driftfilter[{extra}]'", 1)
    from driftfilter.app.serve.command import serve as run_service

    try:
        return run_service(options, output), {"store": options.store}
    except (ValueError, ImportError) as error:
        return fail("serve", error, 2)
    except (OSError, RuntimeError) as error:
        return fail("serve", error, 1)


@dataclass(frozen=True)
class ReportOptions:
    """Options of ``driftfilter report``."""

    runs: Sequence[Path] = argument(
        "RUN", "folder of driftfilter run or bench", nargs="+", type=Path
    )
    out: Path | None = option(
        "to write to (default: report.html in the first folder)", type=file, metavar="FILE"
    )
    title: str | None = option("title (default: what was run)", metavar="TEXT")


def report(options: ReportOptions, output: Output, arguments: Sequence[str]) -> Found:
    """Write runs side by side on one page."""
    status, path = _write_report(options.runs, options.out, output, options.title)
    return status, None if path is None else {"report": path}


def _write_report(
    folders: Sequence[Path], out: Path | None, output: Output, title: str | None = None
) -> tuple[int, str | None]:
    from driftfilter.app import report as reports

    try:
        path = reports.write(folders, out, title)
    except (reports.ReportError, OSError) as error:
        return fail("report", error, 1)
    output.say(f"wrote {path}")
    return 0, str(path)


def check(options: CheckOptions, output: Output, arguments: Sequence[str]) -> Found:
    """Say whether a run is as good as was asked for."""
    from driftfilter.app.report.content import ReportError
    from driftfilter.app.run.check_run import check_run

    if not options.asked:
        return fail("check", f"nothing to check: give one of {', '.join(options.known)}", 2)
    try:
        return check_run(options, output)
    except (ReportError, OSError) as error:
        return fail("check", error, 1)


@dataclass(frozen=True)
class DataOptions:
    """Options of ``driftfilter data``."""

    folder: str | None = option(
        "the folder or file to check, or the name of a data set to be told about (default: list "
        "all)",
        positional=True,
        nargs="?",
        metavar="FOLDER",
    )
    dataset: str | None = option(
        "which data set FOLDER should be (default: the one it resembles)", metavar="NAME"
    )
    decode: bool = option("unpack every picture, not only look at its beginning and end", False)


def data(options: DataOptions, output: Output, arguments: Sequence[str]) -> Found:
    """List data sets, tell about one, or say whether a folder is whole."""
    from driftfilter.app.datasets import check
    from driftfilter.app.datasets.table import DATA_SETS, LAYOUTS, find_data_set

    if options.folder is None:
        output.say(check.explain())
        sets = {name: each.to_dict() for name, each in DATA_SETS.items()}
        return 0, {"data_sets": sets, "layouts": dict(LAYOUTS)}
    path = Path(options.folder)
    if options.folder in DATA_SETS and not path.exists():
        output.say(DATA_SETS[options.folder].describe(options.folder))
        return 0, {"name": options.folder, **DATA_SETS[options.folder].to_dict()}
    try:
        name = options.dataset or check.recognise(path)
        if name is not None:
            find_data_set(name)
    except (ValueError, OSError) as error:
        return fail("data", error, 2)
    findings = _check_data(path, name, options.decode, output)
    wrong = [finding for finding in findings if not finding.ok]
    output.say(f"{options.folder}: {'data of your own' if name is None else name}")
    output.say(check.describe(options.folder, findings))
    if wrong and output.quiet:
        return fail("data", "; ".join(finding.text for finding in wrong), 1)
    return 1 if wrong else 0, {
        "path": options.folder,
        "name": name,
        "ok": not wrong,
        "files": [finding._asdict() for finding in findings],
    }


def _check_data(path: Path, name: str | None, decode: bool, output: Output) -> list[Any]:
    """The findings, with the number of pictures that were looked at on stderr."""
    from driftfilter.app.datasets import check
    from driftfilter.app.datasets.findings import Look

    with show_progress(output.quiet or output.json) as display:
        watch, seen = display("pictures").watch, 0

        def count(more: int) -> None:
            nonlocal seen
            seen += more
            if watch is not None:
                watch(seen, None, lambda: "looked at")

        return list(check.find(path, name, Look(decode, count)))


@dataclass(frozen=True)
class InspectOptions:
    """Options of ``driftfilter inspect``."""

    model: str = argument(
        "MODEL",
        MODEL_HELP,
    )
    weights: Path | None = option(
        ".safetensors, or .pt that holds tensors only", type=Path, metavar="FILE"
    )
    input: tuple[int, ...] | None = option(
        "shape of a sample, as in 3,32,32: has steps timed on random inputs",
        type=shape,
        metavar="A,B",
    )
    batch: int = count_option("samples a step (default {default})", 200)
    names: bool = option("list every parameter of every subset", False)
    speed: Literal["exact", "fast"] = option(
        "fast: the model in bfloat16 where the device computes in it (default {default})", "exact"
    )
    profile: bool = option(
        "the parts of a step of the default on this machine, and what would help", False
    )


def inspect_model(options: InspectOptions, output: Output, arguments: Sequence[str]) -> Found:
    """Say what adaptation would change in a model."""
    from driftfilter.app import inspect_model as inspection

    try:
        found = inspection.inspect(
            options.model,
            options.weights,
            options.input,
            options.batch,
            options.speed,
            options.profile,
        )
    except (ValueError, OSError, TypeError, ImportError) as error:
        return fail("inspect", error, 2)
    output.say("\n".join(inspection.describe(found, options.names)))
    return 0, found.to_dict()


@dataclass(frozen=True)
class ListOptions:
    """Options of ``driftfilter list``: none."""


def list_blocks(options: ListOptions, output: Output, arguments: Sequence[str]) -> Found:
    """Print every building block and preset."""
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
    """A line of the list as data; the default of a field as Python writes it."""
    given = inspect.signature(entry).parameters.values()  # type: ignore[arg-type]
    fields = {each.name: "" if each.default is each.empty else repr(each.default) for each in given}
    return {"role": role, "name": name, "summary": _summary(entry), "fields": fields}


COMMANDS: dict[str, Command] = {
    "demo": Command(demo, DemoOptions, "the paper's linear example, and a short image stream"),
    "reproduce": Command(
        reproduce,
        ReproduceOptions,
        "the paper's examples: figures, metrics.json and a table for each",
    ),
    "bench": Command(
        bench,
        BenchOptions,
        "presets × protocols × models × seeds on corrupted images, as a table",
        read=read_options,
    ),
    "run": Command(
        run,
        RunOptions,
        "adapt your own model over your own data, with checkpoints",
        "exit status: 0 done, or ended by SIGTERM and saved; 1 failed; 2 wrong usage; 3 done, but "
        "batches were skipped; 130 ended by Ctrl-C and saved",
    ),
    "tune": Command(
        tune,
        TuneOptions,
        "choose the default's numbers on your own stream, without labels",
    ),
    "serve": Command(
        serve, ServeOptions, "your own model over HTTP, one posterior for each tenant"
    ),
    "report": Command(
        report,
        ReportOptions,
        "runs and benchmarks side by side, as one HTML file that loads nothing",
    ),
    "check": Command(
        check,
        CheckOptions,
        "whether a finished run is as good as you ask for, for pipelines",
        "exit status: 0 all checks hold; 1 one fails, or cannot be judged; 2 wrong usage",
    ),
    "data": Command(
        data, DataOptions, "published data sets: where to get them, and whether a folder is whole"
    ),
    "inspect": Command(
        inspect_model,
        InspectOptions,
        "what adaptation would change in a model, and what it would cost",
    ),
    "list": Command(
        list_blocks, ListOptions, "every building block and preset, with one line each"
    ),
}

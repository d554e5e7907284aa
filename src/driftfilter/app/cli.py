"""The command line; torch is imported only by the commands that need it, so that help is immediate."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import shlex
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

EXAMPLES = ("dynamics", "linear", "moons", "pinwheel")
DEMO_BENCH = ("bench", "--quick", "--images", "500", "--corruptions", "gaussian_noise,contrast")
FIRST_SEED = 3000  # nothing was chosen on the seeds from here on


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``driftfilter``."""
    try:
        return _run(arguments)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="driftfilter", description="Online test-time adaptation as Gaussian filtering.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="command")
    demo = commands.add_parser("demo", help="the paper's linear example, and a short image stream")
    demo.add_argument("--seeds", type=_count, default=20, metavar="N", help="number of seeds (default 20)")
    demo.add_argument("--out", type=_folder, default="runs/demo", metavar="DIR", help="where to write (default runs/demo)")
    again = commands.add_parser("reproduce", help="the paper's examples: figures, metrics.json and a table for each")
    again.add_argument("example", choices=(*EXAMPLES, "all"), help="which example")
    again.add_argument("--seeds", type=_count, default=20, metavar="N", help="number of seeds (default 20)")
    again.add_argument("--first-seed", type=int, default=FIRST_SEED, metavar="S", help=f"the first of them ({FIRST_SEED})")
    again.add_argument(
        "--out", type=_folder, default="runs/reproduce", metavar="DIR", help="where to write (default runs/reproduce)"
    )
    again.add_argument(
        "--workers", type=_count, default=os.cpu_count() or 1, metavar="N", help="processes (default: one a core)"
    )
    again.add_argument("--no-figures", action="store_true", help="numbers only, without matplotlib")
    _add_bench(commands.add_parser("bench", help="presets × protocols × models × seeds on corrupted images, as a table"))
    _add_run(
        commands.add_parser(
            "run",
            help="adapt your own model over your own data, with checkpoints",
            epilog="exit status: 0 done, or ended by SIGTERM and saved; 1 failed; 2 wrong usage; 3 done, but batches were "
            "skipped; 130 ended by Ctrl-C and saved",
        )
    )
    report = commands.add_parser("report", help="runs and benchmarks side by side, as one HTML file that loads nothing")
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of driftfilter run or bench")
    report.add_argument("--out", type=Path, metavar="FILE", help="to write to (default: report.html in the first folder)")
    data = commands.add_parser("data", help="where to get CIFAR-10-C, and whether a folder holds it")
    data.add_argument("folder", nargs="?", metavar="FOLDER", help="the folder to check")
    _add_inspect(commands.add_parser("inspect", help="what adaptation would change in a model, and what it would cost"))
    listing = commands.add_parser("list", help="every building block and preset, with one line each")
    listing.add_argument("--json", action="store_true", help="as JSON: role, name, summary, fields with their defaults")
    parsed = parser.parse_args(arguments)
    if parsed.version:
        return _version()
    if parsed.command == "demo":
        return _demo(parsed)
    if parsed.command == "reproduce":
        return _reproduce(parsed)
    if parsed.command == "bench":
        return _bench(parsed, sys.argv[1:] if arguments is None else arguments)
    if parsed.command == "run":
        return _adapt(parsed, sys.argv[1:] if arguments is None else arguments)
    if parsed.command == "report":
        return _report(parsed.runs, parsed.out)
    if parsed.command == "data":
        return _data(parsed)
    if parsed.command == "inspect":
        return _inspect(parsed)
    if parsed.command == "list":
        return _list(parsed.json)
    parser.print_help()
    return 2


def _add_bench(bench: argparse.ArgumentParser) -> None:
    """Its options; those not given are left to ``app.bench.Options``."""
    bench.argument_default = argparse.SUPPRESS
    add = bench.add_argument
    add("--quick", action="store_true", help="4 corruptions of the shipped images in batches of 100: minutes on a CPU")
    add("--presets", metavar="A,B", help="names, with options as in cotta:copies=4,lr=0.001 (default: those of --quick)")
    add("--protocols", metavar="A,B", help="reset (default), continual, gradual, mixed, correlated, recurring")
    add("--models", metavar="A,B", help="shipped networks, or name=weights.safetensors (default resnet20)")
    add("--seeds", metavar="N", help="of generated corruptions, order, draws: how many, or a list: 4,7 (default 1)")
    add("--data", metavar="PATH", help="CIFAR-10-C folder, .npz or image folder (default: corruptions are generated)")
    add("--clean", metavar="PATH", help="CIFAR-10 test images, folder or .npz (default: the shipped first 2,000)")
    add("--source", metavar="PATH", help=".npz of source images, for presets with a source posterior (default: none)")
    add("--corruptions", metavar="A,B", help="all (default: the 15), extra (the 4 for tuning), or names")
    add("--severity", type=_count, metavar="N", help="1 to 5 (default 5)")
    add("--batch", type=_count, metavar="N", help="samples a step (default 200)")
    add("--images", type=_count, metavar="N", help="a corruption (default: all)")
    add("--order", choices=("given", "shuffled"), help="of the corruptions (default given)")
    add("--shuffled", action="store_true", help="images of a corruption in random order, by the seed")
    add("--rounds", type=_count, metavar="N", help="of the protocols that have rounds")
    add("--window", type=_count, metavar="N", help="of the adapter, for small batches: samples it looks back on (default 0)")
    add("--device", metavar="NAME", help="auto (default), cpu or cuda")
    add("--precision", choices=("float32", "tf32", "bf16"), help="(default: tf32 on a GPU, float32 on a CPU)")
    add("--before", action="store_true", help="also the accuracy before the update on the same batch")
    add(
        "--probe-every",
        type=_count,
        metavar="N",
        help="steps between two looks at clean images; one more at the end (default: none)",
    )
    add(
        "--out",
        type=_folder,
        default="runs/bench",
        metavar="DIR",
        help="to write to and go on from; processes may share it (runs/bench)",
    )
    add("--list", action="store_true", default=False, help="print the tasks and which are done; run nothing")


def _add_run(run: argparse.ArgumentParser) -> None:
    """Its options; those not given are left to ``app.run.Options``."""
    run.argument_default = argparse.SUPPRESS
    add = run.add_argument
    add("model", metavar="MODEL", help="package.module:factory (called without arguments), or resnet20, resnet20_gn")
    add("data", metavar="DATA", help=".npy [n, ...], .npz with x or images, a folder of pictures, or - for lines of JSON")
    add("--weights", metavar="FILE", help=".safetensors, or .pt that holds tensors only (default: as the factory makes it)")
    add("--preset", metavar="NAME", help="with options as in tent:lr=0.001 (default driftfilter)")
    add("--recipe", metavar="FILE", help="TOML of a recipe, instead of a preset")
    add(
        "--set", action="append", metavar="PATH=VALUE", help="a field of the recipe, as in transition.dynamics.rho=0.99; repeat"
    )
    add("--source", metavar="FILE", help="source samples, as DATA, for recipes with a source posterior")
    add("--labels", metavar="FILE", help=".npy, or .npz with labels or y: for the accuracy, never for adapting")
    add("--batch", type=_count, metavar="N", help="samples a step (default 200)")
    add("--window", type=_count, metavar="N", help="samples the adapter looks back on, for small batches (default 0)")
    add("--update-every", type=_count, metavar="N", help="steps between two updates (default 1)")
    add("--seed", type=int, metavar="S", help="of all draws (default 0)")
    add("--device", metavar="NAME", help="auto (default), cpu or cuda")
    add("--layout", choices=("auto", "first", "last"), help="of image channels (auto: 8-bit [n, h, w, 3] are last)")
    add("--scale", type=float, metavar="X", help="factor of all values (default: 1/255 for 8-bit images, else 1)")
    add("--range", metavar="LOW,HIGH", help="a batch with values outside, after scaling, is bad (default: any finite value)")
    add("--integers", metavar="A,B", help="parts of a JSON object that are integers, such as input_ids")
    add("--predictions", choices=("npz", "csv"), help="predictions.npz in the end (default), or .csv that grows")
    add("--checkpoint-every", type=_count, metavar="N", help="steps between two saves (default: only when it ends)")
    add("--keep", type=_count, metavar="K", help="checkpoints to keep (default 1)")
    add("--resume", action="store_true", help="go on from the checkpoint in --out; from the beginning where there is none")
    add("--live", action="store_true", help="on resuming, stdin goes on where it stopped (default: it starts again)")
    add("--on-bad-batch", choices=("stop", "skip"), help="not finite, out of range, of another shape (default stop)")
    add("--baseline", action="store_true", help="also predict with the model as it is, for the report: one more forward pass")
    add("--classes", metavar="FILE", help="names of the classes, one a line, for the report (default: their numbers)")
    add("--quiet", action="store_true", default=False, help="no progress, only warnings and errors")
    add("--out", type=_folder, default=Path("runs/run"), metavar="DIR", help="to write to (default runs/run)")


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="package.module:factory (called without arguments), or a shipped network's name")
    add("--weights", type=Path, metavar="FILE", help=".safetensors, or .pt that holds tensors only")
    add("--input", type=_shape, metavar="A,B", help="shape of a sample, as in 3,32,32: has steps timed on random inputs")
    add("--batch", type=_count, default=200, metavar="N", help="samples a step (default 200)")
    add("--names", action="store_true", help="list every parameter of every subset")
    add("--json", action="store_true", help="as JSON")


def _shape(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"must be sizes such as 3,32,32, got {text!r}")
    return tuple(map(int, parts))


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return int(text)


def _folder(text: str) -> Path:
    path = Path(text)
    there = next(each for each in (path, *path.parents, Path()) if each.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"must be a folder, or where one can be made, got the file {str(there)!r}")
    return path


def _version() -> int:
    from driftfilter import __version__

    print(f"driftfilter {__version__}")
    return 0


def _demo(parsed: argparse.Namespace) -> int:
    from driftfilter.app.experiments.linear import Linear
    from driftfilter.app.experiments.reproduce import reproduce

    out, example = parsed.out, Linear()
    figures = find_spec("matplotlib") is not None
    print("2-D logistic regression; both classes drift diagonally by 3 while no label is ever seen")
    print(f"{example.source_samples} labeled source samples, {example.steps} single-sample steps, {parsed.seeds} seeds\n")
    seeds = range(FIRST_SEED, FIRST_SEED + parsed.seeds)
    print(reproduce(("linear",), seeds, out, os.cpu_count() or 1, _progress, figures=figures)["linear"])
    print(f"\nwrote {out / 'linear'}\n")
    if find_spec("torchmetrics") is None:
        print("the image stream needs torchmetrics: pip install 'driftfilter[bench]'")
        return 0
    failed = _run([*DEMO_BENCH, "--out", str(out / "images")])
    return failed or _report([out / "images"])


def _bench(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    given = {key: value for key, value in vars(parsed).items() if key not in ("version", "command", "quick", "out", "list")}
    from driftfilter.app import bench, plots, tables
    from driftfilter.app.workers import worker

    me = worker()
    try:
        made, tasks = bench.prepare(bench.Options(**{**(bench.QUICK if "quick" in parsed else {}), **given}))
    except (ValueError, OSError, ImportError) as error:
        return _failed("bench", error, 2)
    folder = parsed.out
    done = bench.done(made, tasks, folder)
    if parsed.list:
        print("\n".join(f"{'done' if ready else 'to do'}  {task}" for ready, task in zip(done, tasks, strict=True)))
        return 0
    if any(done):
        print(f"resumed: {sum(done)} of {len(done)} done", file=sys.stderr)
    try:
        with tables.progress() as display:
            command = shlex.join(["driftfilter", *arguments])
            documents = bench.run(made, tasks, folder, display, command, me.first(len(tasks)))
    except KeyboardInterrupt:
        print(f"interrupted: the same command goes on from {folder}", file=sys.stderr)
        return 130
    failed = [document for document in documents if document is not None and "error" in document]
    shown = [*bench.finished(made, tasks, folder), *failed]
    own = {tables.condition(document["settings"]) for document in documents if document is not None}
    for table in tables.write(shown, folder):
        if own & table.conditions:
            tables.show(table)
            print()
    for line in plots.write(shown, folder):
        print(line, file=sys.stderr)
    for line in bench.undone(made, tasks, documents, folder):
        print(line, file=sys.stderr)
    if shown:
        print(f"wrote {folder}")
    # Among several workers what one leaves is another's; torchrun would end them all for a status that is not 0.
    return 1 if failed or (None in documents and me.workers == 1) else 0


def _adapt(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    given = {key: value for key, value in vars(parsed).items() if key not in ("version", "command", "quiet")}
    from driftfilter.app import run, telling

    with telling.warnings_in_one_line():
        try:
            made = run.prepare(run.Options(**given))
        except (ValueError, OSError, ImportError) as error:
            return _failed("run", error, 2)
        try:
            with telling.progress(parsed.quiet) as watch:
                ending = run.run(made, watch, telling.warn, shlex.join(["driftfilter", *arguments]))
        except (ValueError, OSError, RuntimeError) as error:
            return _failed("run", error, 1)
        except KeyboardInterrupt:
            return _failed("run", "interrupted twice: nothing was saved since the last checkpoint", 130)
    return telling.conclude(ending, parsed.out)


def _report(folders: Sequence[Path], out: Path | None = None) -> int:
    from driftfilter.app import report

    try:
        print(f"wrote {report.write(folders, out)}")
    except (report.ReportError, OSError) as error:
        return _failed("report", error, 1)
    return 0


def _failed(command: str, error: object, status: int) -> int:
    print(f"driftfilter {command}: error: {error}", file=sys.stderr)
    return status


def _data(parsed: argparse.Namespace) -> int:
    from driftfilter.app import data

    if parsed.folder is None:
        print(data.explain())
        return 0
    report, good = data.check(Path(parsed.folder))
    print(report)
    return 0 if good else 1


def _progress(name: str, done: int, total: int, what: str = "seed") -> None:
    """On a terminal one line that changes, elsewhere one line at the end."""
    line = f"  {name}: {what} {done}/{total}"
    if sys.stderr.isatty():
        print(f"\r{line:<40}", end="" if done < total else "\n", file=sys.stderr, flush=True)
    elif done == total:
        print(line, file=sys.stderr, flush=True)


def _reproduce(parsed: argparse.Namespace) -> int:
    if not parsed.no_figures and find_spec("matplotlib") is None:
        print("figures need matplotlib: pip install 'driftfilter[report]', or give --no-figures", file=sys.stderr)
        return 1
    from driftfilter.app.experiments.reproduce import reproduce

    names = EXAMPLES if parsed.example == "all" else (parsed.example,)
    seeds = range(parsed.first_seed, parsed.first_seed + parsed.seeds)
    out = parsed.out
    start = time.perf_counter()
    tables = reproduce(names, seeds, out, parsed.workers, _progress, figures=not parsed.no_figures)
    for name, table in tables.items():
        print(f"{name}\n\n{table}\n")
    print(f"wrote {', '.join(str(out / name) for name in tables)} in {time.perf_counter() - start:.0f} s")
    return 0


def _inspect(parsed: argparse.Namespace) -> int:
    from driftfilter.app import inspection

    try:
        found = inspection.inspect(parsed.model, parsed.weights, parsed.input, parsed.batch)
    except (ValueError, OSError, TypeError) as error:
        return _failed("inspect", error, 2)
    print(json.dumps(found.to_dict(), indent=1) if parsed.json else "\n".join(inspection.lines(found, parsed.names)))
    return 0


def _list(as_json: bool) -> int:
    from driftfilter.presets import PRESETS
    from driftfilter.recipe import VARIANTS

    table: dict[str, Mapping[str, object]] = {**VARIANTS, "preset": PRESETS}
    entries = [(role, name, entry) for role, named in table.items() for name, entry in named.items()]
    if as_json:
        print(json.dumps([_entry(*each) for each in entries], indent=1))
        return 0
    for role, named in table.items():
        print(role)
        for name, entry in named.items():
            print(f"  {name:<24} {textwrap.shorten(_summary(entry), 120, placeholder=' …')}")
    return 0


def _summary(entry: object) -> str:
    return " ".join((entry.__doc__ or "").strip().partition("\n\n")[0].split())


def _entry(role: str, name: str, entry: object) -> dict[str, object]:
    """A line of the list as data; what a field is when it is not given, as Python writes it."""
    given = inspect.signature(entry).parameters.values()  # type: ignore[arg-type]
    fields = {each.name: "" if each.default is each.empty else repr(each.default) for each in given}
    return {"role": role, "name": name, "summary": _summary(entry), "fields": fields}


if __name__ == "__main__":
    sys.exit(main())

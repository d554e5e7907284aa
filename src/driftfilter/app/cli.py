"""The command line; torch is imported only by the commands that need it, so that help is immediate."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

EXAMPLES = ("dynamics", "linear", "moons", "pinwheel")
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
    demo.add_argument("--out", default="runs/demo", metavar="DIR", help="where to write (default runs/demo)")
    again = commands.add_parser("reproduce", help="the paper's examples: figures, metrics.json and a table for each")
    again.add_argument("example", choices=(*EXAMPLES, "all"), help="which example")
    again.add_argument("--seeds", type=_count, default=20, metavar="N", help="number of seeds (default 20)")
    again.add_argument("--first-seed", type=int, default=FIRST_SEED, metavar="S", help=f"the first of them ({FIRST_SEED})")
    again.add_argument("--out", default="runs/reproduce", metavar="DIR", help="where to write (default runs/reproduce)")
    again.add_argument(
        "--workers", type=_count, default=os.cpu_count() or 1, metavar="N", help="processes (default: one a core)"
    )
    again.add_argument("--no-figures", action="store_true", help="numbers only, without matplotlib")
    commands.add_parser("list", help="every building block and preset, with one line each")
    parsed = parser.parse_args(arguments)
    if parsed.version:
        return _version()
    if parsed.command == "demo":
        return _demo(parsed)
    if parsed.command == "reproduce":
        return _reproduce(parsed)
    if parsed.command == "list":
        return _list()
    parser.print_help()
    return 2


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return int(text)


def _version() -> int:
    from driftfilter import __version__

    print(f"driftfilter {__version__}")
    return 0


def _demo(parsed: argparse.Namespace) -> int:
    from driftfilter.app.experiments.images import ImageStream
    from driftfilter.app.experiments.linear import Linear
    from driftfilter.app.experiments.reproduce import reproduce

    out, example, stream = Path(parsed.out), Linear(), ImageStream()
    figures = find_spec("matplotlib") is not None
    print("2-D logistic regression; both classes drift diagonally by 3 while no label is ever seen")
    print(f"{example.source_samples} labeled source samples, {example.steps} single-sample steps, {parsed.seeds} seeds\n")
    seeds = range(FIRST_SEED, FIRST_SEED + parsed.seeds)
    print(reproduce(("linear",), seeds, out, os.cpu_count() or 1, _progress, figures=figures)["linear"])
    print(f"\nthe shipped ResNet-20 on {stream.images} CIFAR-10 images with noise, batches of {stream.batch}, no labels\n")
    print(stream.run(out / "images", lambda done, total: _progress("images", done, total, "preset")))
    print(f"\nwrote {out / 'linear'} and {out / 'images'}")
    return 0


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
    out = Path(parsed.out)
    start = time.perf_counter()
    tables = reproduce(names, seeds, out, parsed.workers, _progress, figures=not parsed.no_figures)
    for name, table in tables.items():
        print(f"{name}\n\n{table}\n")
    print(f"wrote {', '.join(str(out / name) for name in tables)} in {time.perf_counter() - start:.0f} s")
    return 0


def _list() -> int:
    from driftfilter.presets import PRESETS
    from driftfilter.recipe import VARIANTS

    table: dict[str, Mapping[str, object]] = {**VARIANTS, "preset": PRESETS}
    for role, entries in table.items():
        print(role)
        for name, entry in entries.items():
            summary = (entry.__doc__ or "").strip().partition("\n\n")[0]
            print(f"  {name:<24} {textwrap.shorten(summary, 120, placeholder=' …')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The command line; torch is imported only by the commands that need it, so that help is immediate."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence


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
    demo = commands.add_parser("demo", help="the paper's linear example: a drifting stream, frozen model against filter")
    demo.add_argument("--seeds", type=_count, default=20, metavar="N", help="number of seeds (default 20)")
    commands.add_parser("list", help="every building block and preset, with one line each")
    parsed = parser.parse_args(arguments)
    if parsed.version:
        return _version()
    if parsed.command == "demo":
        return _demo(parsed.seeds)
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


def _demo(seeds: int) -> int:
    import torch

    from driftfilter.app.experiments.linear import HEADER, Linear, run_seeds, summarize

    torch.set_num_threads(1)  # the matrices are 3 by 3
    example = Linear()
    print("2-D logistic regression; both classes drift diagonally by 3 while no label is ever seen")
    print(f"{example.source_samples} labeled source samples, {example.steps} single-sample steps, {seeds} seeds\n")

    def progress(done: int) -> None:
        if sys.stderr.isatty():
            print(f"\r  seed {done}/{seeds}", end="" if done < seeds else "\r" + " " * 20 + "\r", file=sys.stderr, flush=True)

    start = time.perf_counter()
    frozen, adapted = run_seeds(example, range(seeds), progress)
    elapsed = time.perf_counter() - start
    print(HEADER)
    print(summarize("frozen source", frozen))
    print(summarize("driftfilter", adapted))
    print(f"\nmean ± sd over seeds; {seeds * example.steps} steps in {elapsed:.1f} s")
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

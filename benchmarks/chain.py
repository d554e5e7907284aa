"""What a chain of labels costs beside a step: its two passes in NumPy and compiled.

    python benchmarks/chain.py [--samples 200] [--classes 10 100 1000] [--rounds 30] [--json FILE]

Times are processor time of whole calls of a ``LabelChain`` on one thread, log-probabilities in and
out, the best of several rounds. "first" is the first compiled call of the process: numba's import,
and code from the cache or compiled anew.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import driftfilter as df
from driftfilter.compiled import sticky_chain
from figures import write


def clock(call: Callable[[], Any]) -> float:
    """Milliseconds of processor time that a call takes."""
    begun = time.process_time()
    call()
    return 1e3 * (time.process_time() - begun)


def measure(samples: int, classes: int, rounds: int) -> dict[str, float]:
    draws = torch.Generator().manual_seed(0)
    alone = (3 * torch.randn(samples, classes, generator=draws)).log_softmax(-1)
    chain = df.LabelChain()
    known = chain(alone, None)[1]
    calls = {
        "NumPy": lambda: chain(alone, known),
        "compiled": lambda: chain(alone, known, sticky_chain.smooth),
    }
    first = clock(calls["compiled"])
    best = {name: min(clock(call) for _ in range(rounds)) for name, call in calls.items()}
    return {"classes": classes, **best, "first": first}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--classes", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for classes in arguments.classes:
        rows.append(measure(arguments.samples, classes, arguments.rounds))
        print("; ".join(f"{name} {value:.3g}" for name, value in rows[-1].items()), "(ms)")
    write(arguments.json, {"samples": arguments.samples, "ms": rows}, "numpy", "numba")


if __name__ == "__main__":
    main()

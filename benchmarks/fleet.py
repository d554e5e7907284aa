"""One step of 10,000 streams beside the cost of moving their beliefs through memory; ratios from one run.

    python benchmarks/fleet.py [--streams 10000] [--rounds 15] [--json FILE]

A head of 64 features and 10 classes a stream, diagonal covariance, one observation each. The roofline is torch.addcmul on
tensors of the beliefs' size, once for the means and once for the variances: the same bytes are read and written.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

import driftfilter as df
from figures import write

WIDTH, CLASSES = 64, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()

    d, generator = WIDTH * CLASSES, torch.Generator().manual_seed(0)
    transition = df.Transition(df.MeanReversion(0.99), df.Isotropic(1e-3))
    filt = df.Filter(df.LinearHead(CLASSES), transition, inference=df.Linearized(df.EmpiricalFisher(centered=False)))
    belief = df.Belief(0.1 * torch.randn(d, generator=generator), df.Diagonal(torch.full((d,), 0.1)))
    fleet = df.Fleet(filt, belief, range(arguments.streams))
    x = torch.randn(arguments.streams, 1, WIDTH, generator=generator)
    mean, variance = torch.rand(2, arguments.streams, d, generator=generator)
    new_mean, new_variance = torch.zeros_like(mean), torch.zeros_like(variance)

    def roofline() -> None:
        torch.addcmul(mean, variance, mean, out=new_mean)
        torch.addcmul(variance, mean, variance, out=new_variance)

    cases: dict[str, Callable[[], object]] = {"addcmul": roofline, "Fleet.step": lambda: fleet.step(x)}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for round_ in range(arguments.rounds + 2):  # the first two warm up
        for name, case in cases.items():
            begun = time.perf_counter()
            case()
            if round_ >= 2:
                times[name].append(1e3 * (time.perf_counter() - begun))
    best = {name: min(values) for name, values in times.items()}
    where = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    date = datetime.date.today().isoformat()
    moved = 4 * mean.numel() * mean.element_size()
    print(f"{arguments.streams:,} streams of {WIDTH}x{CLASSES}, {where}, {date}: {moved / 1e6:.0f} MB read and written a step")
    for name, value in best.items():
        print(f"{name:<12}{value:>9.1f} ms{value / best['addcmul']:>7.2f}{moved / value / 1e6:>8.1f} GB/s")
    write(arguments.json, {"streams": arguments.streams, "bytes": moved, "ms": best}, "numba")


if __name__ == "__main__":
    main()

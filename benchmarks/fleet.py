"""One step of 10,000 streams beside the cost of moving their beliefs through memory; ratios from
one run. Growth with streams.

    python benchmarks/fleet.py [--streams 10000] [--rounds 40] [--json FILE]

A head of 64 features and 10 classes a stream, diagonal covariance, one observation each. The
roofline is torch.addcmul on tensors of the beliefs' size, once for the means and once for the
variances: the same bytes are read and written. "torch alone" is what a fleet does without numba,
and on other devices. Times are the best of the rounds, for what a busy machine adds is not the
step's; memory is what the fleet holds between steps, with the buffers that the next one writes.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

import driftfilter as df
from figures import exponent, write

WIDTH, CLASSES = 64, 10
SIZES = [100, 300, 1_000, 3_000, 10_000, 30_000]


def streams(count: int) -> tuple[df.Fleet, Tensor]:
    """A fleet, and one observation of each stream [count, 1, WIDTH]."""
    d, generator = WIDTH * CLASSES, torch.Generator().manual_seed(0)
    transition = df.Transition(df.MeanReversion(0.99), df.Isotropic(1e-3))
    filt = df.Filter(
        df.LinearHead(CLASSES),
        transition,
        inference=df.Linearized(df.EmpiricalFisher(centered=False)),
    )
    belief = df.Belief(
        0.1 * torch.randn(d, generator=generator), df.Diagonal(torch.full((d,), 0.1))
    )
    return df.Fleet(filt, belief, range(count)), torch.randn(count, 1, WIDTH, generator=generator)


def roofline(count: int) -> Callable[[], object]:
    mean, variance = torch.rand(2, count, WIDTH * CLASSES)
    new_mean, new_variance = torch.zeros_like(mean), torch.zeros_like(variance)

    def move() -> None:
        torch.addcmul(mean, variance, mean, out=new_mean)
        torch.addcmul(variance, mean, variance, out=new_variance)

    return move


def step(fleet: df.Fleet, x: Tensor, compiled: bool = True) -> object:
    if compiled:
        return fleet.step(x)
    with mock.patch("driftfilter.compiled.fleet.find_spec", return_value=None):
        return fleet.step(x)


def best(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Shortest time of each case in ms; cases take turns, and the first two rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds + 2):
        for name, case in cases.items():
            begun = time.perf_counter()
            case()
            times[name].append(1e3 * (time.perf_counter() - begun))
    return {name: min(values[2:]) for name, values in times.items()}


def held(fleet: df.Fleet) -> int:
    """Bytes of the tensors of a fleet."""
    parts = [
        part
        for value in vars(fleet).values()
        for part in (value if isinstance(value, tuple) else (value,))
    ]
    return sum(part.numel() * part.element_size() for part in parts if isinstance(part, Tensor))


def growth(rounds: int) -> tuple[list[float], list[float]]:
    """Milliseconds of a step and bytes of a fleet against the number of streams."""
    times, memory = [], []
    for size in SIZES:
        fleet, x = streams(size)
        times.append(
            best({"step": partial(step, fleet, x)}, rounds * (10 if size < 3_000 else 1))["step"]
        )
        memory.append(float(held(fleet)))
    return times, memory


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()

    fleet, x = streams(arguments.streams)
    other, _ = streams(arguments.streams)
    cases: dict[str, Callable[[], object]] = {
        "addcmul": roofline(arguments.streams),
        "Fleet.step": lambda: step(fleet, x),
    }
    shortest = best(cases, arguments.rounds)
    shortest |= best(
        {"torch alone": lambda: step(other, x, compiled=False)}, max(3, arguments.rounds // 4)
    )
    where = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    date = datetime.date.today().isoformat()
    moved = 4 * arguments.streams * WIDTH * CLASSES * x.element_size()
    print(
        f"{arguments.streams:,} streams of {WIDTH}x{CLASSES}, {where}, {date}: {moved / 1e6:.0f} "
        "MB read and written a step"
    )
    for name, value in shortest.items():
        print(
            f"{name:<12}{value:>9.1f} "
            f"ms{value / shortest['addcmul']:>7.2f}{moved / value / 1e6:>8.1f} GB/s"
        )
    times, memory = growth(max(3, arguments.rounds // 2))
    cells = "  ".join(f"{size:,}: {value:.2f}" for size, value in zip(SIZES, times, strict=True))
    print(f"growth, ms    {cells}; exponent {exponent(SIZES, times):.2f}")
    print(
        f"memory        {memory[-1] / SIZES[-1]:,.0f} bytes a stream; exponent "
        f"{exponent(SIZES, memory):.2f}"
    )
    curve = {"against": "streams", "sizes": SIZES, "ms": times, "peak bytes": memory}
    write(
        arguments.json,
        {"streams": arguments.streams, "bytes": moved, "ms": shortest, "growth": [curve]},
        "numba",
    )


if __name__ == "__main__":
    main()

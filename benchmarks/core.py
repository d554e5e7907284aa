"""Cost of the core: single steps, and growth in parameters d, batch n, rank and classes k; one thread.

    python benchmarks/core.py [--json FILE] [--quick]

"beyond the gradients" is the time of an update (curvature, conditioning, mean step) on per-sample gradient rows that are
already there, less the time of handing out those rows. Memory is that of the largest tensor which an update makes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import driftfilter as df
from driftfilter.predictive import Pullback
from driftfilter.randomness import Randomness


class GivenRows:
    """A model whose per-sample gradients are already there: what remains is the filter's own work."""

    linear = False

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __call__(self, theta: Tensor, inputs: Tensor) -> Tensor:
        return inputs

    def pullback(self, theta: Tensor, inputs: Tensor) -> tuple[Tensor, Pullback]:
        return inputs, self.Rows(self.rows)

    def pushforward(self, theta: Tensor, inputs: Tensor, tangents: Tensor) -> Tensor:
        raise RuntimeError("no prediction from given rows")

    class Rows:
        def __init__(self, rows: Tensor) -> None:
            self.rows = rows

        def __call__(self, cotangents: Tensor) -> Tensor:
            return self.rows.clone()

        def total(self, cotangents: Tensor) -> Tensor:
            return self.rows.sum(0)


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def update_milliseconds(case: tuple[Callable[[], object], Callable[[], object], str], budget: float) -> float:
    update, hand_out, _ = case
    return milliseconds(update, budget) - milliseconds(hand_out, budget / 2)


def milliseconds(call: Callable[[], object], budget: float = 1.0) -> float:
    """Median time of a call in ms, over about ``budget`` seconds after a warm-up."""
    for _ in range(3):
        call()
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - begun < budget:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * sorted(times)[len(times) // 2]


def beyond_gradients(
    d: int, n: int, structure: str, rank: int, k: int = 10
) -> tuple[Callable[[], object], Callable[[], object], str]:
    """One Linearized(EmpiricalFisher()) update from an isotropic prior in float32, without the gradients."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(n, d, generator=generator) / math.sqrt(d)
    covariance: df.Covariance = df.Diagonal(torch.full((d,), 0.02))
    if structure == "LowRank":
        covariance = df.LowRank.isotropic(0.02, d, rank)
    elif structure == "Full":
        covariance = df.Full(0.02 * torch.eye(d))
    prior = df.Belief(torch.zeros(d), covariance)
    randomness = Randomness(0, 0, torch.device("cpu"))
    logits = torch.randn(n, k, generator=generator)
    energy, _ = df.Gibbs()(GivenRows(rows), prior.mean, logits, {}, randomness)
    inference = df.Linearized(df.EmpiricalFisher())
    return (
        lambda: inference(prior, energy, {}, randomness),
        lambda: energy.evaluation.rows(),
        f"{structure}, d = {d:,}, n = {n}, rank = {rank}",
    )


def eager_step(logits: object, curvature: object) -> Callable[[], object]:
    """One whole step at d = 3, one sample, full covariance, float64: adapt, predict from the posterior."""
    filt = df.Filter(
        logits=logits,  # type: ignore[arg-type]
        transition=df.Transition(df.MeanReversion(0.99), df.Isotropic(1e-3)),
        inference=df.Linearized(curvature),  # type: ignore[arg-type]
    )
    mean = torch.tensor([0.1, 1.0, -1.0], dtype=torch.float64)
    state = filt.init(df.Belief(mean, df.Full(0.5 * torch.eye(3, dtype=torch.float64))))
    stream = torch.randn(1000, 1, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    position = 0

    def step() -> None:
        nonlocal state, position
        state, _, _ = filt.step(state, stream[position % len(stream)])
        position += 1

    return step


def head_step(k: int) -> tuple[Callable[[], object], Callable[[], object], str]:
    """One whole step of a head on 32 features, 16 samples, with the curvature of the loss: n k rows of 32 k parameters."""
    generator = torch.Generator().manual_seed(0)
    filt = df.Filter(logits=df.LinearHead(k), inference=df.Linearized(df.Hessian()))
    state = filt.init(df.Belief(torch.randn(32 * k, generator=generator) / 8, df.Diagonal(torch.full((32 * k,), 0.02))))
    features = torch.randn(16, 32, generator=generator)
    return lambda: filt.step(state, features), lambda: None, f"LinearHead, k = {k}"


def plain_function(theta: Tensor, inputs: Tensor) -> Tensor:
    scores = inputs @ theta
    return torch.stack((torch.zeros_like(scores), scores), -1)


def exponent(sizes: list[int], times: list[float]) -> float:
    """Least-squares slope of log time against log size, over the upper half where overhead no longer counts."""
    half = len(sizes) // 2
    x = torch.tensor(sizes[half:], dtype=torch.float64).log()
    y = torch.tensor(times[half:], dtype=torch.float64).log()
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="a tenth of the time, for a first look")
    arguments = parser.parse_args()
    budget = 0.1 if arguments.quick else 1.0
    torch.set_num_threads(1)
    machine = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, one thread"
    figures: dict[str, object] = {
        "date": datetime.date.today().isoformat(),
        "machine": machine,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    print(", ".join(f"{key} {value}" for key, value in figures.items()))

    print(f"\n{'one update beyond the gradients, float32':<62}{'ms':>9}{'bar':>8}")
    d = 17_952
    for structure, rank, bar in (("LowRank", 200, "15"), ("LowRank", 10, ""), ("Diagonal", 0, "")):
        case = beyond_gradients(d, 200, structure, rank)
        name = case[2]
        with LargestTensor() as largest:  # type: ignore[no-untyped-call]
            case[0]()
        figures[name] = update_milliseconds(case, budget)
        figures[f"{name}: largest tensor / d²"] = largest.elements / d**2
        print(f"{name:<62}{figures[name]:>9.2f}{bar:>8}   largest tensor {largest.elements / d**2:.4f} d²")

    print(f"\n{'one eager step, d = 3, one sample, float64':<62}{'µs':>9}{'bar':>8}")
    cases: list[tuple[str, object, object, str]] = [
        (
            "LinearHead, Linearized(EmpiricalFisher(centered=False))",
            df.LinearHead(2),
            df.EmpiricalFisher(centered=False),
            "200",
        ),
        ("LinearHead, Linearized(Hessian())", df.LinearHead(2), df.Hessian(), "200"),
        (
            "plain function, Linearized(EmpiricalFisher(centered=False))",
            plain_function,
            df.EmpiricalFisher(centered=False),
            "2000",
        ),
        ("plain function, Linearized(Hessian())", plain_function, df.Hessian(), "2000"),
    ]
    for name, logits, curvature, bar in cases:
        figures[name] = 1e3 * milliseconds(eager_step(logits, curvature), budget)
        print(f"{name:<62}{figures[name]:>9.0f}{bar:>8}")

    print(f"\n{'growth, ms (base d = 4,096, n = 64, rank = 32)':<34}{'sizes and times':<78}{'exponent':>9}{'memory':>8}")
    sweeps: list[tuple[str, str, list[int]]] = [
        ("LowRank", "d", [1024, 2048, 4096, 8192, 16384, 32768]),
        ("LowRank", "n", [16, 32, 64, 128, 256, 512]),
        ("LowRank", "rank", [2, 4, 8, 16, 32]),
        ("Diagonal", "d", [1024, 4096, 16384, 65536, 262144]),
        ("Diagonal", "n", [16, 32, 64, 128, 256, 512]),
        ("Full", "d", [64, 128, 256, 512, 1024, 2048]),
        ("LinearHead", "k", [4, 8, 16, 32, 64]),
    ]
    for structure, axis, sizes in sweeps:
        times, elements = [], []
        for size in sizes:
            settings = {"d": 4096, "n": 64, "rank": 32, axis: size}
            rows = (settings["d"], settings["n"], structure, settings["rank"])
            case = head_step(size) if axis == "k" else beyond_gradients(*rows)
            with LargestTensor() as largest:  # type: ignore[no-untyped-call]
                case[0]()
            times.append(update_milliseconds(case, budget / 4))
            elements.append(float(largest.elements))
        slope, memory = exponent(sizes, times), exponent(sizes, elements)
        figures[f"{structure} against {axis}"] = {"sizes": sizes, "ms": times, "exponent": slope, "memory exponent": memory}
        cells = "  ".join(f"{size}: {value:.2f}" for size, value in zip(sizes, times, strict=True))
        print(f"{structure + ' against ' + axis:<34}{cells:<78}{slope:>9.2f}{memory:>8.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

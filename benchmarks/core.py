"""Cost of the core: single steps, beside posteriors' too, and growth in parameters d, batch n, rank
and classes k; one thread.

    python benchmarks/core.py [--json FILE] [--quick]

"beyond the gradients" is the time of an update (curvature, conditioning, mean step) on per-sample
gradient rows that are already there, less the time of handing out those rows. Memory is what
tensors made by an update, the rows handed out among them, take at most at one time. The extended
Kalman filters of posteriors take part where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import driftfilter as df
from driftfilter.base.randomness import Randomness
from driftfilter.model.predictive import Pullback
from figures import exponent, header, write

NOISE, START = 1e-3, 0.1  # variances of the random walk beside posteriors


class GivenRows(df.PredictiveModel):
    """A model whose per-sample gradients are already there: what remains is the filter's own
    work.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __call__(self, theta: Tensor, inputs: Tensor) -> Tensor:
        return inputs

    def pullback(self, theta: Tensor, inputs: Tensor) -> tuple[Tensor, Pullback]:
        return inputs, self.Rows(self.rows)

    def pushforward(self, theta: Tensor, inputs: Tensor, tangents: Tensor) -> Tensor:
        raise RuntimeError("no prediction from given rows")

    class Rows(Pullback):
        def __init__(self, rows: Tensor) -> None:
            self.rows = rows

        def __call__(self, cotangents: Tensor) -> Tensor:
            return self.rows.clone()

        def total(self, cotangents: Tensor) -> Tensor:
            return self.rows.sum(0)


class Memory(TorchDispatchMode):
    """Bytes of the tensors that operations made and that are still there, at most; and the elements
    of the largest.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest, self.peak, self.now = 0, 0, 0
        self.live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor):
                self.largest = max(self.largest, value.numel())
                self.made(value.untyped_storage())
        return result

    def made(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.live:  # a view has the storage of its base
            self.live[key] = weakref.ref(storage, lambda _: self.freed(key)), storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)

    def freed(self, key: int) -> None:
        self.now -= self.live.pop(key)[1]


def memory_of(call: Callable[[], object]) -> Memory:
    memory = Memory()
    with memory:
        call()
    return memory


def update_milliseconds(
    case: tuple[Callable[[], object], Callable[[], object], str], budget: float
) -> float:
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
    """One Linearized(EmpiricalFisher()) update in float32 without the gradients; isotropic prior
    unless it carries rows.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(n, d, generator=generator) / math.sqrt(d)
    covariance: df.Covariance = df.Diagonal(torch.full((d,), 0.02))
    if structure == "LowRank":
        covariance = df.LowRank.isotropic(0.02, d, rank)
    elif structure == "LowRank, carrying its rank":
        covariance = df.LowRank(
            torch.full((d,), 50.0), torch.randn(rank, d, generator=generator) / math.sqrt(d), rank
        )
    elif structure == "Full":
        covariance = df.Full(0.02 * torch.eye(d))
    prior = df.Belief(torch.zeros(d), covariance)
    randomness = Randomness(0, 0, torch.device("cpu"))
    logits = torch.randn(n, k, generator=generator)
    energy, _ = df.Gibbs()(GivenRows(rows), prior.mean, logits, {}, randomness)
    inference = df.Linearized(df.EmpiricalFisher())
    return (
        lambda: inference(prior, energy, {}, randomness),
        lambda: energy.evaluation.rows,
        f"{structure}, d = {d:,}, n = {n}, rank = {rank}",
    )


def eager_step(logits: object, curvature: object) -> Callable[[], object]:
    """One whole step at d = 3, one sample, full covariance, float64: adapt, predict from the
    posterior.
    """
    filt = df.Filter(
        logits=logits,  # type: ignore[arg-type]
        transition=df.Transition(df.MeanReversion(0.99), df.Isotropic(1e-3)),
        inference=df.Linearized(curvature),  # type: ignore[arg-type]
    )
    mean = torch.tensor([0.1, 1.0, -1.0], dtype=torch.float64)
    state = filt.init(df.Belief(mean, df.Full(0.5 * torch.eye(3, dtype=torch.float64))))
    stream = torch.randn(
        1000, 1, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    position = 0

    def step() -> None:
        nonlocal state, position
        state, _, _ = filt.step(state, stream[position % len(stream)])
        position += 1

    return step


def head_step(k: int) -> tuple[Callable[[], object], Callable[[], object], str]:
    """One whole step of a head on 32 features, 16 samples, with the curvature of the loss: n k rows
    of 32 k parameters.
    """
    generator = torch.Generator().manual_seed(0)
    filt = df.Filter(logits=df.LinearHead(k), inference=df.Linearized(df.Hessian()))
    state = filt.init(
        df.Belief(
            torch.randn(32 * k, generator=generator) / 8, df.Diagonal(torch.full((32 * k,), 0.02))
        )
    )
    features = torch.randn(16, 32, generator=generator)
    return lambda: filt.step(state, features), lambda: None, f"LinearHead, k = {k}"


def plain_function(theta: Tensor, inputs: Tensor) -> Tensor:
    scores = inputs @ theta
    return torch.stack((torch.zeros_like(scores), scores), -1)


def entropies(theta: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    logits = plain_function(theta, inputs)
    logs = logits.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1), logits


def kalman(structure: str, d: int) -> Any:
    """The extended Kalman filter of posteriors with this covariance.

    Its dense one has Λ - ε F where Λ + ε F is meant; ε = -1 and the energy in place of the
    log-likelihood make it right.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of tensordict, about its next version
        ekf = importlib.import_module("posteriors").ekf
    if structure == "Full":
        eye = torch.eye(d, dtype=torch.float64)
        return ekf.dense_fisher.build(
            entropies, -1.0, NOISE * eye, per_sample=True, init_cov=START * eye
        )

    def log_likelihood(theta: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        losses, logits = entropies(theta, inputs)
        return -losses, logits

    return ekf.diag_fisher.build(
        log_likelihood, 1.0, NOISE**0.5, per_sample=True, init_sds=START**0.5
    )


Walk = Callable[
    [], tuple[Tensor, Tensor, Tensor]
]  # mean, variances and last log-probabilities at the end of a stream


def walks(structure: str, d: int, stream: Tensor) -> dict[str, Walk]:
    """The same filter over the same stream, step by step, predicting after each: a random walk,
    entropy, uncentred Fisher.
    """
    mean = torch.randn(d, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / d**0.5
    variances = torch.full((d,), START, dtype=torch.float64)
    belief = df.Belief(
        mean, df.Full(variances.diag()) if structure == "Full" else df.Diagonal(variances)
    )

    transform = kalman(structure, d)

    def theirs() -> tuple[Tensor, Tensor, Tensor]:
        state = transform.init(mean)
        for inputs in stream:
            state, _ = transform.update(state, inputs)
            logs = plain_function(state.params, inputs).log_softmax(-1)
        return state.params, state.cov.diagonal() if structure == "Full" else state.sd_diag**2, logs

    def ours(logits: Any) -> tuple[Tensor, Tensor, Tensor]:
        transition = df.Transition(df.RandomWalk(), df.Isotropic(NOISE))
        filt = df.Filter(
            logits, transition, inference=df.Linearized(df.EmpiricalFisher(centered=False))
        )
        state = filt.init(belief)
        for inputs in stream:
            state, prediction, _ = filt.step(state, inputs)
        return state.belief.mean, state.belief.covariance.variance(), prediction.log_probabilities

    return {
        "posteriors": theirs,
        "plain function": lambda: ours(plain_function),
        "LinearHead": lambda: ours(df.LinearHead(2)),
    }


def beside_posteriors(budget: float) -> list[dict[str, Any]]:
    """Steps of the same filter here and there, µs; none where posteriors is not installed."""
    if importlib.util.find_spec("posteriors") is None:
        print("\nposteriors is not installed: not compared")
        return []
    print("\none step of the same filter, one sample, float64, µs")
    found = []
    for structure, d in (("Full", 3), ("Full", 108), ("Diagonal", 3), ("Diagonal", 108)):
        stream = torch.randn(
            100, 1, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        cases = walks(structure, d, stream)
        for name, walk in cases.items():
            torch.testing.assert_close(
                walk(), cases["LinearHead"](), atol=1e-9, rtol=1e-9, msg=f"{name}, {structure}, {d}"
            )
        times = {
            name: 1e3 * milliseconds(walk, budget) / len(stream) for name, walk in cases.items()
        }
        found.append({"covariance": structure, "d": d, "µs": times})
        print(
            f"{structure + ', d = ' + str(d):<20}"
            + "; ".join(f"{name} {spent:.0f}" for name, spent in times.items())
        )
    return found


def updates(budget: float) -> list[dict[str, Any]]:
    print(f"\n{'one update beyond the gradients, float32':<62}{'ms':>9}{'bar':>8}")
    d, n, found = 17_952, 200, []
    for structure, rank, bar in (("LowRank", 200, "15"), ("LowRank", 10, ""), ("Diagonal", 0, "")):
        case = beyond_gradients(d, n, structure, rank)
        memory, spent = memory_of(case[0]), update_milliseconds(case, budget)
        sizes = {"covariance": structure, "d": d, "n": n, "rank": rank}
        found.append(
            {**sizes, "ms": spent, "largest tensor": memory.largest, "peak bytes": memory.peak}
        )
        print(f"{case[2]:<62}{spent:>9.2f}{bar:>8}   largest tensor {memory.largest / d**2:.4f} d²")
    return found


def eager_steps(budget: float) -> list[dict[str, Any]]:
    print(f"\n{'one eager step, d = 3, one sample, float64':<62}{'µs':>9}{'bar':>8}")
    found = []
    curvatures: dict[str, df.Curvature] = {  # by the names under which they are kept
        "EmpiricalFisher(centered=False, scale=1.0)": df.EmpiricalFisher(centered=False),
        "Hessian()": df.Hessian(),
    }
    for model, logits, bar in (
        ("LinearHead", df.LinearHead(2), "200"),
        ("plain function", plain_function, "2000"),
    ):
        for name, curvature in curvatures.items():
            spent = 1e3 * milliseconds(eager_step(logits, curvature), budget)
            found.append({"model": model, "curvature": name, "µs": spent})
            print(f"{model + ', ' + name:<62}{spent:>9.0f}{bar:>8}")
    return found


SWEEPS: list[tuple[str, str, list[int]]] = [
    ("LowRank", "d", [1024, 2048, 4096, 8192, 16384, 32768]),
    ("LowRank", "n", [16, 32, 64, 128, 256, 512]),
    ("LowRank, carrying its rank", "rank", [16, 32, 64, 128, 256, 512]),
    ("Diagonal", "d", [1024, 4096, 16384, 65536, 262144]),
    ("Diagonal", "n", [16, 32, 64, 128, 256, 512]),
    ("Full", "d", [64, 128, 256, 512, 1024, 2048]),
    ("LinearHead", "k", [4, 8, 16, 32, 64]),
]
BASE = {"d": 4096, "n": 64, "rank": 32}


def growth(budget: float) -> list[dict[str, Any]]:
    print(
        f"\n{'growth, ms (base d = 4,096, n = 64, rank = 32)':<47}{'sizes and times':<78}"
        f"{'exponent':>9}{'memory':>8}"
    )
    found = []
    for structure, axis, sizes in SWEEPS:
        times, peaks = [], []
        for size in sizes:
            settings = {**BASE, axis: size}
            rows = (settings["d"], settings["n"], structure, settings["rank"])
            case = head_step(size) if axis == "k" else beyond_gradients(*rows)
            peaks.append(memory_of(case[0]).peak)
            times.append(update_milliseconds(case, budget / 4))
        found.append(
            {
                "covariance": structure,
                "against": axis,
                "sizes": sizes,
                "ms": times,
                "peak bytes": peaks,
            }
        )
        cells = "  ".join(f"{size}: {value:.2f}" for size, value in zip(sizes, times, strict=True))
        print(
            f"{structure + ' against ' + axis:<47}{cells:<78}"
            f"{exponent(sizes, times):>9.2f}{exponent(sizes, peaks):>8.2f}"
        )
    return found


def measured(budget: float) -> dict[str, Any]:
    """All figures, each over about ``budget`` seconds."""
    return {
        "updates": updates(budget),
        "eager steps": eager_steps(budget),
        "beside posteriors": beside_posteriors(budget),
        "growth": growth(budget),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the time, for a first look"
    )
    arguments = parser.parse_args()
    budget = 0.1 if arguments.quick else 1.0
    torch.set_num_threads(1)
    print(", ".join(f"{key} {value}" for key, value in header("posteriors").items()))
    write(arguments.json, measured(budget), "posteriors")


if __name__ == "__main__":
    main()

"""Long runs: does memory stay flat, does the covariance stay positive definite, does float32 stay
with float64?

    python benchmarks/soak.py [--cases head reverting network resnet20] [--steps 100000] \
        [--images-steps 5000] [--json FILE]

"head" is a linear head of 30 parameters under a full covariance, with all of the recipe written
out: mean reversion, stationary noise, the entropy's curvature. "network" is a small trained network
with batch norm under the default preset, "reverting" the same with more mean reversion (ρ = 0.9).
All meet the same stream in float32 and in float64, side by side; its classes swing about the source
and never stop. "resnet20" is the shipped network under the default preset, on batches of 16
corrupted images, in float32 alone.

A filter that learns from its own predictions forgets a rounding error only if it reverts faster
than it reinforces itself. "head" and "reverting" do: they must stay within rounding. The default on
batches of 16 does so only on the whole: for some steps it magnifies differences, which must stay
small and must not grow with time.

Memory is that of the whole process (resident pages), read at every hundredth of the run; growth is
the most it has been after the first tenth, over what it was then. ``tensors`` are those alive at
the end, less those after the first tenth.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app import models, streams
from driftfilter.app.corruptions import corrupt

FEATURES, CLASSES, BATCH = 10, 4, 16
GROWTH = 1.0  # percent
WITHIN = {
    "head": 1e-4,
    "reverting": 1e-4,
    "network": 0.05,
}  # the largest difference of a probability, float32 - float64


class Run(NamedTuple):
    """A filter on its way: adapts to a batch and predicts it."""

    step: Callable[[Tensor], Tensor]  # [n, ...] -> probabilities [n, k]
    belief: Callable[[], df.Belief]


def centers(turn: float) -> Tensor:
    """Of the classes [k, features], after some turn of each pair of features: the source is at 0,
    and they swing about it.
    """
    start = 2 * torch.randn(
        CLASSES, FEATURES, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    angle = torch.tensor(turn, dtype=torch.float64).sin() * 0.5
    even, odd = start[:, ::2], start[:, 1::2]
    return torch.cat(
        (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()), 1
    )


def vectors(steps: int) -> Iterator[Tensor]:
    """Batches [n, features] in float64: classes that drift to and fro, their shares uneven, and
    gusts of noise.
    """
    generator = torch.Generator().manual_seed(2)
    for step in range(steps):
        where = centers(step / 500)
        labels = torch.randint(CLASSES, (BATCH,), generator=generator)
        noise = torch.randn(BATCH, FEATURES, generator=generator, dtype=torch.float64)
        yield where[labels] + noise * (1.0 if step // 700 % 3 else 2.0)


def source_batch(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    noise = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    return centers(0.0)[labels] + noise, labels


def trained(model: nn.Module, rounds: int = 300) -> nn.Module:
    """In float64, so that the float32 run starts from its rounded weights."""
    inputs, labels = source_batch(512)
    optimizer = torch.optim.Adam(model.double().train().parameters(), 0.02, weight_decay=1e-2)
    for _ in range(rounds):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model.eval()


def head(dtype: torch.dtype) -> Run:
    torch.manual_seed(0)
    layer = nn.Linear(FEATURES, CLASSES, bias=False)
    trained(layer)
    weight = layer.weight.detach()
    mean = (weight[1:] - weight[:1]).flatten().to(dtype)  # class 0 is fixed at 0: 30 parameters
    filt = df.Filter(
        logits=df.LinearHead(CLASSES),
        transition=df.Transition(df.MeanReversion(0.99), df.Stationary()),
        observation=df.Gibbs(df.Entropy()),
        inference=df.Linearized(df.Hessian()),
        prediction=df.LinearizedProbit(),
    )
    state = filt.init(df.Belief(mean, df.Full(0.1 * torch.eye(len(mean), dtype=dtype))))

    def step(batch: Tensor) -> Tensor:
        nonlocal state
        state, prediction, _ = filt.step(state, batch.to(dtype))
        return prediction.probabilities

    return Run(step, lambda: state.belief)


def network(dtype: torch.dtype, **options: Any) -> Run:
    torch.manual_seed(0)
    layers = nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES)
    adapter = df.adapt(trained(nn.Sequential(*layers)).to(dtype), **options)
    return Run(lambda batch: adapter(batch.to(dtype)).exp(), lambda: adapter.belief)


def reverting(dtype: torch.dtype) -> Run:
    return network(dtype, rho=0.9)


def images(steps: int) -> Iterator[Tensor]:
    """Batches of 16 of the shipped pictures, under one corruption after the other."""
    pictures = streams.sample_images().images[:640]
    made = [corrupt(pictures, name) for name in ("gaussian_noise", "contrast", "fog", "pixelate")]
    batches = [batch for domain in made for batch in domain.split(16)]
    return (batches[step % len(batches)] for step in range(steps))


def resnet20(dtype: torch.dtype) -> Run:
    adapter = df.adapt(models.load("resnet20").to(dtype))
    return Run(lambda batch: adapter(batch.to(dtype)).exp(), lambda: adapter.belief)


class Case(NamedTuple):
    """What runs, on what, and in which precisions, the first one measured against the second."""

    make: Callable[[torch.dtype], Run]
    batches: Callable[[int], Iterator[Tensor]]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)


CASES = {
    "head": Case(head, vectors),
    "reverting": Case(reverting, vectors),
    "network": Case(network, vectors),
    "resnet20": Case(resnet20, images, (torch.float32,)),
}


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


def eigenvalues(belief: df.Belief) -> Tensor:
    """Of the covariance [d], in float64, ascending."""
    unit = torch.eye(belief.dimension, dtype=belief.mean.dtype)
    values: Tensor = torch.linalg.eigvalsh(belief.covariance.apply(unit).double())
    return values


def soak(name: str, steps: int) -> dict[str, Any]:
    """One run and what was seen of it, every hundredth of the way."""
    case, begun = CASES[name], time.perf_counter()
    runs = [case.make(dtype) for dtype in case.dtypes]
    apart = torch.full((steps,), torch.nan)  # its pages are there from the beginning
    memory, smallest, condition, sums, tensors = [], [], [], 0.0, 0
    warm, every = steps // 10, max(1, steps // 100)
    for number, batch in enumerate(case.batches(steps), 1):
        answers = [run.step(batch) for run in runs]
        apart[number - 1] = (answers[0].double() - answers[-1]).abs().max()
        if number % every:
            continue
        if number == warm:
            tensors = live_tensors()
        memory.append(resident())
        values = eigenvalues(runs[0].belief())
        smallest.append(values[0].item())
        condition.append((values[-1] / values[0]).item())
        sums = max(sums, (answers[0].double().sum(-1) - 1).abs().max().item())
    after = memory[len(memory) // 10 - 1 :]
    return {
        "steps": steps,
        "parameters": runs[0].belief().dimension,
        "seconds": round(time.perf_counter() - begun, 1),
        "resident MB": round(after[0] / 1e6, 1),
        "growth %": round(100 * (max(after) / after[0] - 1), 3),
        "tensors": live_tensors() - tensors,
        "smallest eigenvalue": min(smallest),
        "largest condition": round(max(condition), 2),
        "sums to one within": sums,
        **(differences(apart) if len(runs) > 1 else dict.fromkeys(differences(apart))),
    }


def differences(apart: Tensor) -> dict[str, float]:
    """Between the probabilities of two precisions, the largest of each step [steps]."""
    first, second = apart.tensor_split(2)
    return {
        "float32 - float64, median": apart.median().item(),
        "first half, largest": first.max().item(),
        "second half, largest": second.max().item(),
    }


def wrong(name: str, row: dict[str, Any]) -> list[str]:
    """The figures that are not as they should be."""
    difference = max(row[f"{half} half, largest"] or 0.0 for half in ("first", "second"))
    bad = {
        "growth %": row["growth %"] >= GROWTH,
        "tensors": row["tensors"] > 0,
        "smallest eigenvalue": not row["smallest eigenvalue"] > 0,
        "sums to one within": not row["sums to one within"] < 1e-6,
        "float32 - float64": not difference <= WITHIN.get(name, 0.0),
    }
    return [f"{name}: {figure}" for figure, failed in bad.items() if failed]


def shown(value: Any) -> str:
    return (
        "-"
        if value is None
        else f"{value:.2g}"
        if isinstance(value, float) and abs(value) < 0.1
        else f"{value:,}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--images-steps", type=int, default=5_000, help="of resnet20")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    where = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    rows: dict[str, dict[str, Any]] = {}
    for name in arguments.cases:
        rows[name] = soak(name, arguments.images_steps if name == "resnet20" else arguments.steps)
        if arguments.json:  # what is known so far
            arguments.json.write_text(json.dumps({**where, "cases": rows}, indent=1) + "\n")
    print(", ".join(f"{key} {value}" for key, value in where.items()) + "\n")
    print(f"{'':<32}" + "".join(f"{name:>14}" for name in rows))
    for figure in next(iter(rows.values())):
        print(f"{figure:<32}" + "".join(f"{shown(row[figure]):>14}" for row in rows.values()))
    bad = [figure for name, row in rows.items() for figure in wrong(name, row)]
    print(f"\nWRONG: {bad}" if bad else "\nall as it should be")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

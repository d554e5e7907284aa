"""What a few labels gain, and what a bank of settings loses against the best one in hindsight.

    python benchmarks/labels.py images --models resnet20 vit_s4=WEIGHTS … --clean CIFAR10_TEST.npz \
        [--corruptions extra] [--images 1000] [--weight 1] \
        [--ways none ask random late all] [--json FILE]
    python benchmarks/labels.py linear [--seeds 20] [--first 3000] [--weight 1] [--json FILE]
    python benchmarks/labels.py bank --models resnet20 --clean CIFAR10_TEST.npz [--images 400] \
        [--corruptions extra] [--json FILE]
    python benchmarks/labels.py streams [--seeds 5] [--first 3000] [--json FILE]

images: the default in one stream of all corruptions that is never reset, batches of 200; one label
a batch, the one that ``ask`` names, a random one, the one asked for 20 batches ago, or all of them,
which is what labels can gain at most. linear: the paper's linear example with nine in ten samples
of class 1, one label in 20, of the most doubtful sample of these or of a random one; balanced
accuracy over the stream and of the last belief. bank: nine settings around the default on streams
of one corruption each. streams: nine settings around the paper's own (β and the noise of the bias,
or ρ) on its linear and moons examples.
``--corruptions extra``: the four on which constants are chosen.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app.corruptions import CORRUPTIONS, EXTRA, corrupt
from driftfilter.app.paper.linear import Linear
from driftfilter.app.paper.moons import Moons
from driftfilter.app.streams import open_cifar10
from driftfilter.app.tune import make_bank
from figures import write
from search_default import Row, open_models

SIZE, LATE = 200, 20  # samples of a batch, batches by which a label is late


def open_stream(arguments: argparse.Namespace) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Batches of every corruption, one after the other."""
    data = open_cifar10(arguments.clean)
    images, labels = data.images[: arguments.images], data.labels[: arguments.images]
    for name in EXTRA if arguments.corruptions == "extra" else CORRUPTIONS:
        pairs = zip(corrupt(images, name, 5, seed=0).split(SIZE), labels.split(SIZE), strict=True)
        yield from ((name, batch, own) for batch, own in pairs)


def follow(model: nn.Module, way: str, arguments: argparse.Namespace) -> Row:
    """Accuracy by corruption of one way to have labels."""
    adapter, generator = df.adapt(model), torch.Generator().manual_seed(0)
    right: dict[str, list[float]] = {}
    waiting: list[tuple[Tensor, Tensor, int]] = []
    begun = time.process_time()
    for number, (name, batch, labels) in enumerate(open_stream(arguments)):
        found = (adapter(batch).argmax(-1) == labels).double().mean()
        right.setdefault(name, []).append(float(found))
        if way == "all":
            adapter.learn(batch, labels, arguments.weight)
        if way in ("none", "all"):
            continue
        chosen = torch.randint(len(batch), (1,), generator=generator)
        place = int(chosen if way == "random" else adapter.ask())
        waiting.append((batch[place][None], labels[place][None], number * SIZE + place))
        if len(waiting) > (LATE if way == "late" else 0):
            inputs, label, own = waiting.pop(0)
            adapter.learn(inputs, label, arguments.weight, numbers=[own])
    by_corruption = {name: round(fmean(each), 4) for name, each in right.items()}
    mean, seconds = fmean(by_corruption.values()), time.process_time() - begun
    return {"way": way, "accuracy": round(mean, 4), "seconds": round(seconds), **by_corruption}


def measure_images(arguments: argparse.Namespace) -> list[Row]:
    rows = []
    for (name, model), way in itertools.product(open_models(arguments), arguments.ways):
        rows.append({"network": name, **follow(model, way, arguments)})
        print(rows[-1], flush=True)
    return rows


def balance(predicted: Tensor, labels: Tensor) -> float:
    return fmean(float((predicted[labels == own] == own).double().mean()) for own in (0, 1))


def follow_linear(seed: int, way: str, weight: float, every: int = 20) -> tuple[float, float]:
    """Balanced accuracy over the stream, and of the last belief."""
    example = Linear(share=0.9)
    problem, filt = example.problem(seed), example.filter()
    state, predicted = filt.init(example.source(problem.source), seed), []
    generator = torch.Generator().manual_seed(seed)
    recent: list[tuple[float, Tensor, Tensor]] = []
    for batch, labels in zip(*problem.stream, strict=True):
        state, prediction, _ = filt.step(state, batch)
        predicted.append(prediction.labels)
        doubt = float(torch.special.entr(prediction.probabilities).sum())
        recent.append((doubt, batch, labels))
        if len(recent) == every and way != "none":
            place = int(torch.randint(every, (1,), generator=generator))
            chosen = max(recent, key=lambda own: own[0]) if way == "ask" else recent[place]
            state, _ = filt.learn(state, chosen[1], chosen[2], weight)
        recent = recent if len(recent) < every else []
    last = filt.predict(state, problem.current[-1].inputs).labels
    whole = balance(torch.cat(predicted), problem.stream.labels.flatten())
    return whole, balance(last, problem.current[-1].labels)


def measure_linear(arguments: argparse.Namespace) -> list[Row]:
    rows = []
    for way in ("none", "ask", "random"):
        seeds = range(arguments.first, arguments.first + arguments.seeds)
        found = [follow_linear(seed, way, arguments.weight) for seed in seeds]
        stream, end = (round(fmean(each), 4) for each in zip(*found, strict=True))
        rows.append({"way": way, "stream": stream, "end": end, "seeds": arguments.seeds})
        print(rows[-1], flush=True)
    return rows


def judge(bank: df.Bank, stream: Iterator[tuple[Tensor, Tensor]]) -> Row:
    """Accuracy of a bank beside that of its members."""
    own, members, seconds = [], [], [0.0, 0.0]
    for batch, labels in stream:
        begun = time.process_time()
        each = [member(batch) for member in bank.members]
        middle = time.process_time()
        bank.note(each)
        both = bank._join(each, bank.weights)
        seconds = [seconds[0] + middle - begun, seconds[1] + time.process_time() - middle]
        own.append(float((both.argmax(-1) == labels).double().mean()))
        members.append([float((logs.argmax(-1) == labels).double().mean()) for logs in each])
    settings = torch.tensor(members).mean(0)
    return {
        "bank": round(fmean(own), 4),
        "best": round(float(settings.max()), 4),
        "default": round(float(settings[0]), 4),
        "worst": round(float(settings.min()), 4),
        "weights": [round(weight, 3) for weight in bank.weights.tolist()],
        "seconds of members, of the bank": [round(each, 2) for each in seconds],
    }


def measure_bank(arguments: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for name, model in open_models(arguments):
        for corruption, group in itertools.groupby(open_stream(arguments), lambda own: own[0]):
            if arguments.only and corruption not in arguments.only:
                continue
            stream = ((batch, labels) for _, batch, labels in group)
            row = judge(make_bank(model)[1], stream)
            rows.append({"network": name, "stream": corruption, **row})
            print(rows[-1], flush=True)
    return rows


def settings_of(example: Any) -> Iterator[df.Filter]:
    """Nine filters around an example's own, which is the first: β and the noise, or ρ."""
    linear = isinstance(example, Linear)
    others = [{"bias_variance": own} for own in (0.01, 0.001, 0.1)]
    others = others if linear else [{"rho": own} for own in (0.99, 0.9, 0.999)]
    for factor, other in itertools.product((1.0, 0.25, 4.0), others):
        yield replace(example, beta=factor * example.beta, **other).filter()


def measure_streams(arguments: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for example in (Linear(), Moons()):
        found = []
        for seed in range(arguments.first, arguments.first + arguments.seeds):
            problem = example.problem(seed)
            belief = example.source(problem.source)
            bank = df.Bank([(own, own.init(belief, seed)) for own in settings_of(example)])
            found.append(judge(bank, zip(*problem.stream, strict=True)))
        means = {name: round(fmean(row[name] for row in found), 4) for name in list(found[0])[:4]}
        worst = min(row["bank"] - row["best"] for row in found)
        rows.append({"stream": type(example).__name__, **means, "worst loss": round(worst, 4)})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measures = {
        "images": measure_images,
        "linear": measure_linear,
        "bank": measure_bank,
        "streams": measure_streams,
    }
    parser.add_argument("what", choices=list(measures))
    parser.add_argument("--clean", type=Path)
    parser.add_argument("--models", nargs="+", default=["resnet20"])
    parser.add_argument("--corruptions", choices=["all", "extra"], default="all")
    parser.add_argument("--only", nargs="+", default=[], help="these corruptions (bank)")
    parser.add_argument("--ways", nargs="+", default=["none", "ask", "random", "late"])
    parser.add_argument("--images", type=int, default=1000, help="of a corruption")
    parser.add_argument("--weight", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=3000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    write(arguments.json, {"rows": measures[arguments.what](arguments)}, "numpy")


if __name__ == "__main__":
    main()

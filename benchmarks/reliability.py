"""What the monitor does under faults, on the ResNets and images that ship with the package.

    python benchmarks/reliability.py [poison] [collapse] [healthy] [zipf] [--seeds 5] [--batch 50] \
        [--presets driftfilter driftfilter:variance=.1,momentum=.5 …] [--json FILE]

Poison: 40 genuine batches, 100 of garbage, 20 genuine ones to recover, then 40 that are judged;
beside the same stream without garbage. Collapse: streams on which TENT breaks down; where the first
alarm comes (the monitor only records) against where the accuracy over the last 1,000 images has
first fallen 5 points below its best. Healthy: false alarms over five passes of a stream, and what a
guarded and an unguarded adapter score on a stream whose corruption changes. Zipf: clean images
whose classes are uniform at first; then the r-th most common has a share in proportion to r^-s.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app import models
from driftfilter.app.corruptions import CORRUPTIONS, corrupt
from driftfilter.app.streams import sample_images
from orders import chosen

Batch = tuple[Tensor, Tensor]  # images [n, 3, 32, 32], labels [n]
FALL, JUDGED = 0.05, 1000  # what counts as fallen, and the images that an accuracy is taken over


def shuffled(images: Tensor, labels: Tensor, batch: int, seed: int, passes: int = 1) -> list[Batch]:
    """Full batches, in another order each pass."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(labels), generator=generator) for _ in range(passes)]
    return [
        (images[at], labels[at])
        for order in orders
        for at in order.split(batch)
        if len(at) == batch
    ]


def in_runs(images: Tensor, labels: Tensor, batch: int, seed: int) -> list[Batch]:
    """One class after the other."""
    generator = torch.Generator().manual_seed(seed)
    order, classes = (
        torch.randperm(len(labels), generator=generator),
        torch.randperm(10, generator=generator),
    )
    order = order[classes[labels[order]].argsort(stable=True)]
    return [(images[at], labels[at]) for at in order.split(batch) if len(at) == batch]


# Poison


def adversarial(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """FGSM at 8/255 against the source model."""
    images = images.clone().requires_grad_()
    nn.functional.cross_entropy(model(images), labels).backward()
    assert images.grad is not None
    return (images + 8 / 255 * images.grad.sign()).clamp(0, 1).detach()


def poisons(
    model: nn.Module, images: Tensor, labels: Tensor, n: int, count: int = 100
) -> dict[str, Callable[[], list[Batch]]]:
    """Batches of garbage by name; labels are what an accuracy would be held against."""
    generator = torch.Generator().manual_seed(7)
    unknown = torch.zeros(n, dtype=torch.long)

    def colours() -> Tensor:
        return torch.rand(n, 3, 1, 1, generator=generator).expand(n, 3, 32, 32).contiguous()

    def one_class() -> Iterator[Batch]:
        cats = (labels == 3).nonzero().squeeze(1)
        for _ in range(count):
            at = cats[torch.randint(len(cats), (n,), generator=generator)]
            yield images[at], labels[at]

    def attacked() -> Iterator[Batch]:
        for x, y in shuffled(images, labels, n, 11, -(-count * n // len(labels)))[:count]:
            yield adversarial(model, x, y), y

    return {
        "noise": lambda: [
            (torch.rand(n, 3, 32, 32, generator=generator), unknown) for _ in range(count)
        ],
        "constant (one grey)": lambda: [(torch.full((n, 3, 32, 32), 0.5), unknown)] * count,
        "constant (colours)": lambda: [(colours(), unknown) for _ in range(count)],
        "one class": lambda: list(one_class()),
        "adversarial": lambda: list(attacked()),
    }


def start(model: nn.Module, preset: str, monitor: df.Monitor | None) -> df.Adapter:
    """Options stand behind the name: NAME:option=value,…"""
    name, options = chosen(preset)
    return df.adapt(model, name, monitor=monitor, **options)


def scores(adapter: df.Adapter, stream: list[Batch]) -> list[float]:
    """Accuracy of every batch."""
    return [(adapter(x).argmax(-1) == y).double().mean().item() for x, y in stream]


def mean(values: list[float]) -> float:
    """In points."""
    return 100 * statistics.fmean(values)


def poison(labels: Tensor, images: Tensor, n: int, presets: list[str]) -> list[dict[str, object]]:
    """Points on the last genuine batches, with and without garbage before them."""
    model = models.load("resnet20")
    before = shuffled(images, labels, n, 1)[:40]
    after = shuffled(images, labels, n, 2, 2)[:60]
    kinds, rows = poisons(model, images, labels, n), []
    cases = [(preset, monitor) for preset in presets for monitor in (df.Monitor(), None)]
    garbage = {kind: make() for kind, make in kinds.items()}
    print(
        f"{'poison':<22}{'preset':<14}{'guard':<8}{'first 20':>9}"
        f"{'after':>8}{'unpoisoned':>12}{'difference':>12}{'events':>8}"
    )
    for preset, monitor in cases:
        clean = scores(start(model, preset, monitor), before + after)
        for kind, batches in garbage.items():
            adapter = start(model, preset, monitor)
            score = scores(adapter, before + batches + after)[-len(after) :]
            first, last, wanted = (
                mean(score[:20]),
                mean(score[20:]),
                mean(clean[-len(after) + 20 :]),
            )
            row = {
                "poison": kind,
                "preset": preset,
                "guard": monitor is not None,
                "first": first,
                "after": last,
                "unpoisoned": wanted,
                "events": len(adapter.events),
            }
            rows.append(row)
            guard = "yes" if monitor else "no"
            print(
                f"{kind:<22}{preset:<14}{guard:<8}{first:>9.1f}"
                f"{last:>8.1f}{wanted:>12.1f}{last - wanted:>+12.1f}"
                f"{len(adapter.events):>8}",
                flush=True,
            )
    return rows


# Collapse


class Fault(NamedTuple):
    """A stream on which TENT breaks down."""

    name: str
    model: str
    lr: float
    stream: Callable[[int], list[Batch]]


def faults(labels: Tensor, data: dict[str, Tensor]) -> list[Fault]:
    """Labels that begin to come in runs and ten passes, both without batch normalisation; learning
    rate × 10.

    And what is no collapse: under batch statistics, labels in runs spoil these, and with them any
    model at once.
    """
    blur, noise, pixels = (
        data[name][:1000] for name in ("defocus_blur", "gaussian_noise", "pixelate")
    )
    y = labels[:1000]

    def into_runs(images: Tensor, n: int) -> Callable[[int], list[Batch]]:
        return lambda seed: shuffled(images, y, n, seed) + in_runs(images, y, n, seed)

    return [
        Fault("correlated labels", "resnet20_gn", 1e-3, into_runs(pixels, 50)),
        Fault(
            "10 passes",
            "resnet20_gn",
            1e-3,
            lambda seed: shuffled(pixels[:300], y[:300], 50, seed, 10),
        ),
        Fault("learning rate × 10", "resnet20", 1e-2, lambda seed: shuffled(blur, y, 20, seed, 3)),
        Fault("runs, batch norm", "resnet20", 1e-3, into_runs(noise, 100)),
    ]


def fallen(score: list[float], size: int) -> int | None:
    """The first batch at which the accuracy over the last images is 5 points below its best."""
    span, best = max(1, JUDGED // size), 0.0
    for at in range(span, len(score) + 1):
        now = statistics.fmean(score[at - span : at])
        best = max(best, now)
        if now <= best - FALL:
            return at - 1
    return None


def collapse(labels: Tensor, data: dict[str, Tensor], seeds: int) -> list[dict[str, object]]:
    """Batch of the first alarm against the batch of the fall."""
    rows = []
    print(
        f"{'stream':<22}{'seed':>5}{'batches':>9}{'alarm at':>13}{'by':>16}"
        f"{'fallen at':>11}{'last accuracy':>15}{'guarded':>9}"
    )
    for name, network, lr, make in faults(labels, data):
        model = models.load(network)
        for seed in range(seeds):
            stream = make(seed)
            adapter = df.adapt(model, "tent", lr=lr, monitor=df.Monitor.recording())
            score = scores(adapter, stream)
            guard = df.adapt(model, "tent", lr=lr, monitor=df.Monitor())
            guarded = scores(guard, stream) if seed == 0 else [math.nan]
            first = adapter.events[0] if adapter.events else None
            span = max(1, JUDGED // len(stream[0][1]))
            row = {
                "stream": name,
                "seed": seed,
                "alarm": first and first.step,
                "signal": first and first.signal,
                "fallen": fallen(score, len(stream[0][1])),
                "last": mean(score[-span:]),
                "guarded": mean(guarded[-span:]),
                "batches": len(score),
            }
            rows.append(row)
            print(
                f"{name:<22}{seed:>5}{len(score):>9}{row['alarm']!s:>13}{row['signal']!s:>16}{row['fallen']!s:>11}"
                f"{row['last']:>15.1f}{row['guarded']:>9.1f}",
                flush=True,
            )
    return rows


# Healthy


def healthy(
    labels: Tensor, data: dict[str, Tensor], n: int, seeds: int, presets: list[str]
) -> list[dict[str, object]]:
    """Alarms where there should be none, and what they cost where the corruption changes."""
    model = models.load("resnet20")
    rows: list[dict[str, object]] = []
    names = list(data)[:seeds]
    print(f"{'five passes of':<22}{'preset':<14}{'batches':>9}{'false alarms':>14}")
    for preset in presets:
        for seed, name in enumerate(names):
            adapter = start(model, preset, df.Monitor())
            stream = shuffled(data[name][:300], labels[:300], n, seed, 5)
            scores(adapter, stream)
            rows.append(
                {
                    "corruption": name,
                    "preset": preset,
                    "alarms": len(adapter.events),
                    "batches": len(stream),
                }
            )
            print(f"{name:<22}{preset:<14}{len(stream):>9}{len(adapter.events):>14}", flush=True)
    print(f"\n{'one corruption after the other':<32}{'guarded':>9}{'unguarded':>11}{'events':>8}")
    stream = [
        batch
        for name, images in data.items()
        for batch in shuffled(images[:200], labels[:200], n, 3)
    ]
    for preset in presets:
        guarded, plain = (start(model, preset, guard) for guard in (df.Monitor(), None))
        row = {
            "preset": preset,
            "guarded": mean(scores(guarded, stream)),
            "unguarded": mean(scores(plain, stream)),
            "events": len(guarded.events),
        }
        rows.append(row)
        print(
            f"{preset:<32}{row['guarded']:>9.1f}{row['unguarded']:>11.1f}{row['events']:>8}",
            flush=True,
        )
    return rows


# Clean images of other classes


def zipf(images: Tensor, labels: Tensor, n: int, exponent: float, seed: int) -> list[Batch]:
    """1,000 images of uniform classes, then 5,000 whose shares are as r^-s, drawn with
    replacement.
    """
    generator = torch.Generator().manual_seed(seed)
    shares = torch.arange(1.0, 11.0).pow(-exponent)[torch.randperm(10, generator=generator)]
    places = [(labels == label).nonzero().squeeze(1) for label in range(10)]
    stream = []
    for batch in range(6000 // n):
        of = torch.ones(10) if batch < 1000 // n else shares
        classes = torch.multinomial(of, n, replacement=True, generator=generator).tolist()
        drawn = torch.rand(n, generator=generator).tolist()
        at = torch.stack(
            [
                places[label][int(u * len(places[label]))]
                for label, u in zip(classes, drawn, strict=True)
            ]
        )
        stream.append((images[at], labels[at]))
    return stream


def skewed(images: Tensor, labels: Tensor, seeds: int) -> list[dict[str, object]]:
    """Alarms of lost classes where only the stream has lost them."""
    model, rows = models.load("resnet20"), []
    cases: list[tuple[str, dict[str, Any], int]] = [
        ("driftfilter", {}, 100),
        ("driftfilter", {"shift": 0.0}, 50),
        ("tent", {}, 50),
    ]
    print(f"{'preset':<24}{'batch':>6}{'s':>5}{'seed':>5}{'classes_lost at':>24}")
    for preset, options, n in cases:
        for exponent in (1.0, 2.0, 2.5):
            for seed in range(seeds):
                adapter = df.adapt(model, preset, monitor=df.Monitor(), **options)
                scores(adapter, zipf(images, labels, n, exponent, seed))
                lost = [event.step for event in adapter.events if event.signal == "classes_lost"]
                name = f"{preset} {options or ''}"
                print(f"{name:<24}{n:>6}{exponent:>5}{seed:>5}{lost!s:>24}", flush=True)
                rows.append(
                    {"preset": name, "batch": n, "exponent": exponent, "seed": seed, "lost": lost}
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=["poison", "collapse", "healthy"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument(
        "--presets", nargs="+", default=["driftfilter", "tent"], help="poison and healthy"
    )
    parser.add_argument(
        "--corruption", default="gaussian_noise", choices=list(CORRUPTIONS), help="under poison"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    begun, n = time.perf_counter(), arguments.batch
    images, labels = sample_images()
    few = {arguments.corruption, "gaussian_noise", "defocus_blur", "pixelate"}
    wanted = [name for name in CORRUPTIONS if "healthy" in arguments.parts or name in few]
    data = {name: corrupt(images, name, 5, 0) for name in wanted}
    where, date = (
        f"{platform.machine()}, {torch.get_num_threads()} threads",
        datetime.date.today().isoformat(),
    )
    print(f"severity 5, batch {n}, {where}, torch {torch.__version__}, {date}")
    figures: dict[str, object] = {
        "where": where,
        "date": date,
        "batch": n,
        "torch": torch.__version__,
    }
    parts: dict[str, Callable[[], list[dict[str, object]]]] = {
        "poison": lambda: poison(labels, data[arguments.corruption], n, arguments.presets),
        "collapse": lambda: collapse(labels, data, arguments.seeds),
        "healthy": lambda: healthy(labels, data, n, arguments.seeds, arguments.presets),
        "zipf": lambda: skewed(images, labels, arguments.seeds),
    }
    for part in arguments.parts:
        print(f"\n{part}\n")
        figures[part] = parts[part]()
    print(f"\n{time.perf_counter() - begun:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""A step of the default's parts on one sample beside the forward pass alone; ratios from one run.

    python benchmarks/single.py [--models resnet20,resnet20_gn] [--weights FOLDER] \
        [--rounds 300] [--json FILE]

Images that ship with the package, under speckle noise, one at a time in a shuffled order: `center`
predicts each by its own step, without a backward pass. Every case sees the same image before the
next one comes, in random order; times are medians and means in ms, ratios the medians of those to
the forward pass beside a step.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app import corruptions, models, streams
from figures import write


def cases_on(source: nn.Module) -> dict[str, Callable[[Tensor], object]]:
    return {
        "forward pass": source,
        "center": df.adapt(source, "center"),
        "center, no monitor": df.adapt(source, "center", monitor=None),
    }


@torch.no_grad()
def measure(source: nn.Module, images: Tensor, rounds: int) -> dict[str, dict[str, float]]:
    """Median and mean ms, and median ratio, of every case."""
    cases = cases_on(source)
    times: dict[str, list[float]] = {name: [] for name in cases}
    order = random.Random(0)
    for number in range(rounds + 20):  # the first twenty warm up
        image = images[number % len(images)][None]
        for name, step in order.sample(list(cases.items()), len(cases)):
            begun = time.perf_counter()
            step(image)
            times[name].append(1e3 * (time.perf_counter() - begun))
    kept = {name: values[20:] for name, values in times.items()}
    base = kept["forward pass"]
    return {
        name: {
            "ms": statistics.median(values),
            "mean ms": statistics.fmean(values),
            "ratio": statistics.median(
                own / plain for own, plain in zip(values, base, strict=True)
            ),
        }
        for name, values in kept.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, help="folder of weights that do not ship")
    parser.add_argument("--models", default="resnet20,resnet20_gn")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    pixels = streams.sample_images().images
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    images = corruptions.corrupt(pixels[order], "speckle_noise", 5)
    figures = {}
    for name in arguments.models.split(","):
        folder = arguments.weights
        source = models.load(name, folder and folder / f"{name}.safetensors").eval()
        figures[name] = measure(source, images, arguments.rounds)
        for case, found in figures[name].items():
            print(f"{name:<14}{case:<24}{found['ms']:>9.2f} ms{found['ratio']:>8.2f}")
    write(arguments.json, figures)


if __name__ == "__main__":
    main()

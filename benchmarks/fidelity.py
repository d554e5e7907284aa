"""Our corruptions against the published ones: source and bn accuracy (in points), severity 5.

    python benchmarks/fidelity.py --assets DIR [--model resnet20] [--device cpu] [--images 1000] \
        [--batch 200] [--seeds 3]

DIR holds data/cifar10_test.npz, data/cifar10c_severity5_first1000.npz and models/NAME.safetensors.
Up to 1,000 images, ours are held against the published arrays of the same images; all 10,000,
against the reference values of the assets if there are any. The published arrays are themselves one
draw: a difference is to be judged by the deviation between our seeds, printed after ±.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import driftfilter as df
from driftfilter.app import models
from driftfilter.app.corruptions import CORRUPTIONS, FROST_TEXTURE, corrupt

POLICIES = ("source", "bn")
# All 10,000 images, batch 200, published generator; in the order of CORRUPTIONS.
REFERENCE = {
    ("wrn28_10", "source"): (
        22.9,
        28.8,
        25.7,
        59.4,
        45.8,
        65.6,
        64.4,
        76.2,
        62.0,
        75.8,
        90.7,
        42.7,
        71.2,
        40.6,
        69.2,
    ),
    ("wrn28_10", "bn"): (
        68.4,
        69.6,
        60.9,
        87.1,
        63.4,
        85.4,
        87.5,
        82.0,
        81.2,
        85.7,
        91.2,
        88.3,
        74.9,
        78.3,
        71.1,
    ),
}
REFERENCE_MEAN = {
    ("wrn28_10", "source"): 56.06,
    ("wrn28_10", "bn"): 78.34,
    ("resnet26_w32", "source"): 52.44,
    ("resnet26_w32", "bn"): 74.70,
}
WITHIN = 2.5  # points


def as_images(array: np.ndarray, device: str) -> Tensor:
    """[n, 3, h, w] in [0, 1] of bytes [n, h, w, 3]."""
    return torch.from_numpy(array).to(device).permute(0, 3, 1, 2).float().div(255).contiguous()


def accuracy(adapter: df.Adapter, images: Tensor, labels: Tensor, batch: int) -> float:
    """Points, from a reset adapter."""
    adapter.reset()
    predicted = torch.cat([adapter(piece).argmax(-1) for piece in images.split(batch)])
    return 100 * (predicted == labels).double().mean().item()


def cell(scores: list[float], reference: float | None) -> str:
    """Reference, mean of ours, deviation between seeds, difference."""
    ours = statistics.mean(scores)
    deviation = f"±{statistics.stdev(scores):4.2f}" if len(scores) > 1 else ""
    wanted, difference = (
        ("-", "") if reference is None else (f"{reference:.1f}", f"{ours - reference:+.1f}")
    )
    return f"{wanted:>11}{ours:>7.1f}{deviation:>7}{difference:>7}"


def verdict(policy: str, rows: list[tuple[float, float | None]], reference: float | None) -> str:
    """How many (ours, reference) are near, and the means."""
    differences = [abs(ours - wanted) for ours, wanted in rows if wanted is not None]
    mean = statistics.mean(ours for ours, _ in rows)
    parts = [
        f"mean {mean:.2f}"
        + ("" if reference is None else f" against {reference:.2f} ({mean - reference:+.2f})")
    ]
    if differences:
        near = sum(difference <= WITHIN for difference in differences)
        parts.append(f"{near} of {len(differences)} corruptions within {WITHIN} points")
    return f"{policy}: " + ", ".join(parts)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--model", default="resnet20", choices=list(models.ARCHITECTURES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--corruptions", nargs="+", default=list(CORRUPTIONS), choices=list(CORRUPTIONS)
    )
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    warnings.simplefilter("ignore")
    data, device, batch = arguments.assets / "data", arguments.device, arguments.batch
    with np.load(data / "cifar10_test.npz") as test:
        images = as_images(test["images"][: arguments.images], device)
        labels = torch.from_numpy(test["labels"][: arguments.images]).long().to(device)
    published = np.load(data / "cifar10c_severity5_first1000.npz") if len(images) <= 1000 else None
    model = models.load(
        arguments.model, arguments.assets / "models" / f"{arguments.model}.safetensors"
    ).to(device)
    adapters = {policy: df.adapt(model, policy) for policy in POLICIES}

    def reference(name: str, policy: str) -> float | None:
        if published is not None:
            return accuracy(
                adapters[policy], as_images(published[name][: len(images)], device), labels, batch
            )
        known = REFERENCE.get((arguments.model, policy)) if len(images) == 10_000 else None
        return None if known is None else known[list(CORRUPTIONS).index(name)]

    print(
        f"{arguments.model}, {len(images)} images, batch {batch}, severity 5, "
        f"seeds 0 to {arguments.seeds - 1},"
        f" frost {FROST_TEXTURE}, {platform.machine()} {device}, torch {torch.__version__},"
        f" {datetime.date.today().isoformat()}\n"
    )
    columns = f"{'published':>11}{'ours':>7}{'':>7}{'diff':>7}"
    print(f"{'':<18}" + "".join(f"{policy:>32}" for policy in POLICIES))
    print(f"{'corruption':<18}{columns}{columns}{'generate':>10}")
    rows: dict[str, list[tuple[float, float | None]]] = {policy: [] for policy in POLICIES}
    for name in arguments.corruptions:
        begun = time.perf_counter()
        made = [corrupt(images, name, 5, seed) for seed in range(arguments.seeds)]
        made[-1].sum().item()  # waits for the device
        seconds = (time.perf_counter() - begun) / arguments.seeds
        line = f"{name:<18}"
        for policy, adapter in adapters.items():
            scores, wanted = (
                [accuracy(adapter, stream, labels, batch) for stream in made],
                reference(name, policy),
            )
            rows[policy].append((statistics.mean(scores), wanted))
            line += cell(scores, wanted)
        print(f"{line}{seconds:>9.2f}s", flush=True)
    print()
    for policy in POLICIES:
        known = [value for _, value in rows[policy] if value is not None]
        whole = len(images) == 10_000 and len(arguments.corruptions) == len(CORRUPTIONS)
        total = REFERENCE_MEAN.get((arguments.model, policy)) if whole else None
        print(verdict(policy, rows[policy], total or (statistics.mean(known) if known else None)))


if __name__ == "__main__":
    main()

"""Our corruptions against the published ones: source and bn accuracy (in points), severity 5.

    python benchmarks/fidelity.py --assets DIR [--model resnet20] [--device cpu] [--images 1000] \
        [--batch 200] [--seeds 3]

DIR holds data/cifar10_test.npz, data/cifar10c_severity5_first1000.npz and models/NAME.safetensors.
Up to 1,000 images, ours are held against the published arrays of the same images; all 10,000,
against the reference values of the assets if there are any. The published arrays are themselves one
draw: a difference is to be judged by the deviation between our seeds, printed after ±.

    python benchmarks/fidelity.py --pictures DIR --weights resnet50.safetensors [--images 100] \
        [--json FILE]

Holds the 224-pixel corruptions against those of the published package (``pip install imagenet-c``)
on pictures DIR/<class from 0>/*.JPEG, one of a class: RMS and mean of the change (of 255), the
share of its energy above a quarter cycle a pixel, and the accuracy of a ResNet-50.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import driftfilter as df
from driftfilter.app import models
from driftfilter.app.corruptions import CORRUPTIONS, EXTRA, FROST_TEXTURE, corrupt
from figures import write

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
    parser.add_argument("--assets", type=Path)
    parser.add_argument("--pictures", type=Path, help="ImageNet mode: DIR/<class>/*.JPEG")
    parser.add_argument(
        "--weights", type=Path, help="ImageNet mode: ResNet-50, torchvision's names"
    )
    parser.add_argument("--model", default="resnet20", choices=list(models.ARCHITECTURES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, help="1000, or 100 pictures of ImageNet")
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="ImageNet mode: also write the figures there")
    parser.add_argument(
        "--corruptions", nargs="+", default=list(CORRUPTIONS), choices=[*CORRUPTIONS, *EXTRA]
    )
    arguments = parser.parse_args()
    if arguments.pictures is None and arguments.assets is None:
        parser.error("one of --assets and --pictures is required")
    if arguments.pictures is not None and arguments.weights is None:
        parser.error("--pictures needs --weights")
    arguments.images = arguments.images or (1000 if arguments.pictures is None else 100)
    return arguments


def open_pictures(folder: Path, count: int) -> tuple[np.ndarray, Tensor]:
    """Bytes [n, 224, 224, 3] (resized to 256, middle kept) and labels [n], spread over classes."""
    from PIL import Image

    classes = sorted(int(each.name) for each in folder.iterdir() if each.name.isdigit())
    if not classes:
        raise SystemExit(f"--pictures must hold folders named by class from 0, got {folder}")
    chosen = classes[:: max(1, len(classes) // count)][:count]
    made = []
    for label in chosen:
        picture = Image.open(min((folder / str(label)).iterdir())).convert("RGB")
        factor = 256 / min(picture.size)
        width, height = (round(side * factor) for side in picture.size)
        left, top = (width - 224) // 2, (height - 224) // 2
        resized = picture.resize((width, height), Image.Resampling.BILINEAR)
        made.append(np.asarray(resized.crop((left, top, left + 224, top + 224))))
    return np.stack(made), torch.tensor(chosen)


def describe_change(made: Tensor, clean: Tensor) -> tuple[float, float, float]:
    """RMS and mean of the change of 255, and the share of its energy above .25 cycles a pixel."""
    change = 255 * (made - clean)
    rise, run = torch.fft.fftfreq(224)[:, None], torch.fft.fftfreq(224)
    energy = torch.fft.fft2(change).abs().square().mean((0, 1))
    fine = (energy * (torch.hypot(rise, run) > 0.25).to(energy)).sum() / energy.sum()
    return change.square().mean().sqrt().item(), change.mean().item(), fine.item()


@torch.no_grad()
def compare_imagenet(arguments: argparse.Namespace) -> None:
    """Print a line for each corruption, theirs / ours, and write them to a file."""
    try:
        import imagenet_c
    except ImportError as error:
        raise SystemExit(f"ImageNet mode needs the package imagenet-c, got: {error}") from error
    bytes_, labels = open_pictures(arguments.pictures, arguments.images)
    network = models.load("resnet50_imagenet", arguments.weights)
    network, labels = network.to(arguments.device), labels.to(arguments.device)
    clean = as_images(bytes_, arguments.device)

    def score(images: Tensor) -> float:
        predicted = torch.cat([network(part).argmax(1) for part in images.split(25)])
        return 100 * (predicted == labels).double().mean().item()

    def measure(made: Tensor) -> dict[str, float]:
        names = ("rms", "mean", "fine")
        found = dict(zip(names, describe_change(made, clean), strict=True))
        return {**found, "accuracy": score(made)}

    clean_score, rows = score(clean), []
    print(f"{len(clean)} pictures, severity 5, frost {FROST_TEXTURE}, clean {clean_score:.1f}")
    print(f"{'theirs / ours':<18}{'rms':>15}{'mean':>15}{'fine':>15}{'accuracy':>15}{'ms':>8}")
    np.random.seed(0)  # noqa: NPY002 (what the package draws from)
    for name in arguments.corruptions:
        theirs = np.stack([imagenet_c.corrupt(x, 5, corruption_name=name) for x in bytes_])
        begun = time.perf_counter()
        both = (as_images(theirs, arguments.device), corrupt(clean, name, 5, 0))
        both[1].sum().item()  # waits for the device
        spent = 1000 * (time.perf_counter() - begun) / len(clean)
        rows.append(
            {
                "corruption": name,
                "theirs": measure(both[0]),
                "ours": measure(both[1]),
                "ms": spent,
            }
        )
        print(describe_row(rows[-1]), flush=True)
    figures = {"images": len(clean), "frost": FROST_TEXTURE, "clean": clean_score, "rows": rows}
    write(arguments.json, figures, "numpy")


def describe_row(row: dict[str, Any]) -> str:
    """A line: theirs / ours."""
    one, other = row["theirs"], row["ours"]
    forms = (("rms", ".1f"), ("mean", "+.1f"), ("fine", ".3f"), ("accuracy", ".1f"))
    parts = [f"{f'{one[key]:{form}} / {other[key]:{form}}':>15}" for key, form in forms]
    return f"{row['corruption']:<18}{''.join(parts)}{row['ms']:>8.1f}"


def main() -> None:
    arguments = parsed()
    warnings.simplefilter("ignore")
    if arguments.pictures is not None:
        return compare_imagenet(arguments)
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

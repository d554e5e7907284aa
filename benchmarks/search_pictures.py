"""The default on pictures of a thousand classes, with one number of its recipe changed at a time.

    python benchmarks/search_pictures.py --data ILSVRC2012_img_val_subset \
        --model resnet50_imagenet=WEIGHTS,resize=128,crop=128 \
        [--shifts speckle_noise=4 gaussian_blur=3] [--images 1920] [--batch 64] \
        [--cases bn tent driftfilter driftfilter:statistics.late=1 …] [--json FILE]

Nothing here sees the fifteen corruptions that are reported. A case is a preset, with fields of its
recipe by their paths; it begins anew for each corruption. At 128 pixels a step takes a third of the
time. Labels, and so the classes of a batch, come in random order. Beside the whole stream stand
pieces of five batches.
"""

from __future__ import annotations

import argparse
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app.corruptions import corrupt
from driftfilter.app.metrics import quality
from driftfilter.app.networks.load_model import open_model
from driftfilter.app.readers.stored import CLEAN, Samples
from driftfilter.app.streams import Layout, open_domains
from driftfilter.presets import for_model
from driftfilter.recipe import change
from figures import write

Row = dict[str, Any]
SHIFTS = ("speckle_noise=4", "gaussian_blur=3")
CASES = (
    *("source", "bn", "tent", "driftfilter", "driftfilter:statistics.late=1"),
    *("driftfilter:source.variance=0.4", "driftfilter:statistics.late=1:source.variance=0.4"),
)
PIECE = 5  # batches


def make_recipe(model: nn.Module, case: str) -> df.Recipe:
    """The recipe of a case: a preset, and fields that are set."""
    name, *changes = case.split(":")
    recipe = for_model(model, name, {})
    for each in changes:
        path, _, text = each.partition("=")
        recipe = change(recipe, path, text)
    return recipe


def follow(model: nn.Module, case: str, batches: list[Tensor]) -> list[Tensor]:
    """Log-probabilities of each batch."""
    if case == "source":
        with torch.no_grad():
            return [model(batch).log_softmax(-1) for batch in batches]
    adapter = df.adapt(model, make_recipe(model, case), speed="fast", monitor=None)
    return [adapter(batch) for batch in batches]


def judge(outputs: list[Tensor], labels: Tensor) -> Row:
    """Quality of the stream, and the accuracy of its pieces."""
    found = quality(torch.cat(outputs).float(), labels)
    sizes = [len(each) for each in outputs]
    right = [
        (each.argmax(-1) == own).float()
        for each, own in zip(outputs, labels.split(sizes), strict=True)
    ]
    pieces = [torch.cat(right[at : at + PIECE]) for at in range(0, len(right), PIECE)]
    row = {name: round(getattr(found, name), 4) for name in ("accuracy", "nll", "ece")}
    return {**row, "pieces": [round(piece.mean().item(), 4) for piece in pieces]}


def as_images(samples: Samples) -> Tensor:
    """Pictures [n, 3, h, w] in [0, 1]."""
    assert isinstance(samples, Tensor)
    return samples.float() / 255


def search(arguments: argparse.Namespace) -> list[Row]:
    """A row for each corruption and case."""
    network = open_model(arguments.model)
    layout = Layout(fitted=network.prepare is not None)
    data = open_domains(arguments.data, layout=layout).prepared(network.prepare)
    order = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(5))
    index, rows = order[: arguments.images], []
    take = partial(data.take, CLEAN, device=torch.device("cpu"))
    clean = [as_images(take(part)) for part in index.split(arguments.batch)]
    for text in arguments.shifts:
        name, _, severity = text.partition("=")
        batches = [corrupt(each, name, int(severity or 5), seed) for seed, each in enumerate(clean)]
        for case in arguments.cases:
            found = judge(follow(network.module, case, batches), data.labels[index])
            rows.append({"shift": text, "case": case, **found})
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--shifts", nargs="*", default=list(SHIFTS))
    parser.add_argument("--images", type=int, default=1920)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = search(arguments)
    if arguments.json is not None:
        write(arguments.json, {"rows": rows, "images": arguments.images, "batch": arguments.batch})


if __name__ == "__main__":
    main()

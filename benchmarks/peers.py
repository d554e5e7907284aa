"""Published classes beside our presets, and where the two differ: settings, draws, augmentations.

    python benchmarks/peers.py --peers CHECKOUT --clean CIFAR10_TEST.npz \
        --source CIFAR10_TRAIN.npz [--data CORRUPTED.npz] [--models resnet20 wrn28_10=WEIGHTS] \
        [--methods tent eata …] [--corruptions …] [--images 1000] [--batch 200] [--seeds 1] \
        [--copies 32] [--json FILE]

CHECKOUT is one of mariodoebler/test-time-adaptation, whose classes run as they are, with the
settings of their cfgs/cifar10_c. The stream is the fifteen corruptions at severity 5 one after the
other, never reset, each batch predicted as the method predicts. In order: "theirs"; "preset", with
the options that give it their settings (SETTINGS); of methods that augment also "their views": the
preset with the transforms of their code in place of ours, which draw from the random numbers that
theirs draw from, begun at the same seed. A preset that is the method then differs by its other
draws alone, if it has any. For each: error in percent, share of samples that get the label that
theirs gives, and the largest difference of a probability from theirs. --copies: augmented copies of
CoTTA, of both.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app.bench.peers import Checkout, Peer, open_checkout
from driftfilter.app.corruptions import CORRUPTIONS
from driftfilter.app.streams import Shift, open_cifar10, open_domains
from figures import write
from search_default import open_models

Row = dict[str, Any]
Batches = list[tuple[str, Tensor, Tensor]]  # corruption, images, labels

# Options that give a preset their settings where it has others.
SETTINGS: dict[str, Callable[[argparse.Namespace], Row]] = {
    "tent": lambda _: {},
    "eata": lambda _: {},
    "sar": lambda _: {"lr": 1e-3},
    "roid": lambda a: {"batch_size": a.batch},
    "cmf": lambda a: {"batch_size": a.batch},
    "rotta": lambda _: {},
    "cotta": lambda a: {"copies": a.copies},
}


def open_batches(arguments: argparse.Namespace) -> Batches:
    """The stream."""
    clean = open_cifar10(arguments.clean)
    data = open_domains(arguments.data, clean)
    cpu = torch.device("cpu")
    parts = torch.arange(arguments.images).split(arguments.batch)
    return [
        (name, torch.as_tensor(data.take(Shift(name, 5), at, cpu)).float() / 255, data.labels[at])
        for name in arguments.corruptions
        for at in parts
    ]


def run(adapter: Callable[[Tensor], Tensor], batches: Batches) -> Tensor:
    """Probabilities [N, k] of the stream."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.cat([adapter(images).detach().exp() for _, images, _ in batches])


def build(
    checkout: Checkout, method: str, model: nn.Module, source: df.SourceData, seed: int, a: Any
) -> Peer:
    options = {"N_AUGMENTATIONS": a.copies} if method == "cotta" else {}
    return checkout.build(method, options, model, 10, a.batch, seed, source)


def adapters(
    checkout: Checkout, method: str, model: nn.Module, source: df.SourceData, seed: int, a: Any
) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Theirs and ours by name; each is to be used before the next, for they share random
    numbers.
    """
    peer = build(checkout, method, model, source, seed, a)
    yield "theirs", peer
    options = SETTINGS[method](a)
    data = source if method == "eata" else None
    yield "preset", df.adapt(model, method, data=data, seed=seed, **options)
    own = peer._method
    views = getattr(own, "transform", None) or getattr(own, "tta_transform", None)
    if views is not None:
        torch.manual_seed(seed)
        given: Row = {"augmentation": lambda images, _: views(images)}
        yield "their views", df.adapt(model, method, data=data, seed=seed, **options, **given)


def compare(name: str, model: nn.Module, a: argparse.Namespace) -> Iterator[Row]:
    """One method with one seed at a time."""
    batches, checkout = open_batches(a), open_checkout(str(a.peers))
    labels = torch.cat([labels for _, _, labels in batches])
    where = [name for name, images, _ in batches for _ in range(len(images))]
    found = np.load(a.source)
    pixels = torch.from_numpy(found["images"]).permute(0, 3, 1, 2).float() / 255
    source = df.SourceData(pixels, torch.from_numpy(found["labels"]).long())
    for method in a.methods:
        for seed in range(a.seeds):
            theirs: Tensor | None = None
            for who, adapter in adapters(checkout, method, model, source, seed, a):
                begun = time.process_time()
                p = run(adapter, batches)
                theirs = p if theirs is None else theirs
                wrong = (p.argmax(-1) != labels).double()
                by_domain = {
                    corruption: round(
                        100 * float(wrong[[each == corruption for each in where]].mean()), 2
                    )
                    for corruption in a.corruptions
                }
                row = {
                    "network": name,
                    "method": method,
                    "seed": seed,
                    "who": who,
                    "error": round(100 * float(wrong.mean()), 2),
                    "same label": round(
                        float((p.argmax(-1) == theirs.argmax(-1)).double().mean()), 4
                    ),
                    "largest difference": float(f"{(p - theirs).abs().max():.2g}"),
                    "errors": by_domain,
                    "seconds": round(time.process_time() - begun, 1),
                }
                print({k: v for k, v in row.items() if k != "errors"}, flush=True)
                yield row


def summarize(rows: list[Row]) -> list[Row]:
    """Errors and differences from theirs in points, over seeds."""
    found = []
    for network, method in dict.fromkeys((row["network"], row["method"]) for row in rows):
        some = [row for row in rows if (row["network"], row["method"]) == (network, method)]
        own = {row["seed"]: row["error"] for row in some if row["who"] == "theirs"}
        summary: Row = {"network": network, "method": method, "seeds": len(own)}
        for who in dict.fromkeys(row["who"] for row in some):
            each = [row for row in some if row["who"] == who]
            summary[who] = round(statistics.fmean(row["error"] for row in each), 2)
            if who != "theirs":
                apart = [row["error"] - own[row["seed"]] for row in each]
                summary[f"{who} - theirs"] = round(statistics.fmean(apart), 2)
                summary[f"{who}, same label"] = min(row["same label"] for row in each)
        print(summary, flush=True)
        found.append(summary)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--clean", type=Path, required=True)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="corrupted images (default: generated)")
    parser.add_argument("--models", nargs="+", default=["resnet20"])
    parser.add_argument("--methods", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--corruptions", nargs="+", default=list(CORRUPTIONS))
    parser.add_argument("--images", type=int, default=1000, help="of a corruption")
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--copies", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[Row] = []
    for name, model in open_models(arguments):
        for row in compare(name, model, arguments):
            rows.append(row)
            settings = {"images": arguments.images, "batch": arguments.batch}
            figures = {**settings, "copies": arguments.copies, "rows": rows}
            write(arguments.json, figures, "numpy")
    figures["summary"] = summarize(rows)
    write(arguments.json, figures, "numpy")


if __name__ == "__main__":
    main()

"""Streams by the order of their labels: shuffled, in runs, sorted, one class common.

    python benchmarks/orders.py --models resnet20 vit_s4=WEIGHTS … --clean CIFAR10_TEST.npz \
        [--corruptions extra | pairs | reported | NAME …] [--images 1000] [--batch 64] \
        [--orders shuffled runs correlated sorted imbalanced] \
        [--methods frozen chain without default] [--presets lame …] [--late 1 .3] \
        [--skews 0 .001 .01 .1] [--biases 20 40 80] [--seeds 1] [--json FILE]

Every stream is one corruption at severity 5, from the source, guarded as by default. "chain" is
the frozen network with a chain of labels (``LabelChain``), "without" the default without one,
"default" the default; ``--late`` (``Ema.late``), ``--skews`` and ``--biases`` (``LabelChain.skew``,
``bias``) give more of it. The settings of the chain and ``late`` were decided on the four extra
corruptions, with ResNet-20, the ViT and WRN-16-4. ``--seeds``: orders of the same images, in
"imbalanced" with other common classes; the mean of all.

"pairs" are extra corruptions one on top of the other ("A+B" is B of A), on which the network is
wrong more often; they decided when shares of classes count (class_shares.py).

Runs are of 8 samples; the other orders are protocols of the bench, "correlated" with a slot for
every 100 samples, as for all 10,000.
"""

from __future__ import annotations

import argparse
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app.bench.protocols import (
    AnyProtocol,
    Continual,
    Correlated,
    Imbalanced,
    Sorted,
    StreamSettings,
)
from driftfilter.app.corruptions import CORRUPTIONS, EXTRA, corrupt
from driftfilter.app.streams import open_cifar10
from figures import write
from search_default import Row, average, judge, open_models

RUN = 8  # samples of a class
PAIRS = (
    "gaussian_blur+speckle_noise",
    "spatter+speckle_noise",
    "spatter+gaussian_blur",
    "saturate+speckle_noise",
    "saturate+spatter",
)
ORDERS = ("shuffled", "runs", "correlated", "sorted", "imbalanced")


def order(labels: Tensor, name: str, seed: int = 0) -> Tensor:
    """The samples of a stream, by number."""
    settings = StreamSettings(("fog",), batch=len(labels), shuffled=True, seed=seed)
    plans: dict[str, AnyProtocol] = {
        "shuffled": Continual(),
        "sorted": Sorted(),
        "imbalanced": Imbalanced(),
        "correlated": Correlated(slots=max(2, len(labels) // 100)),
    }
    if name in plans:
        return plans[name](settings, labels).samples()[0]
    index = Sorted()(settings, labels).samples()[0]
    classes = labels[index].unique_consecutive(return_counts=True)[1]
    runs = [run for own in index.split(classes.tolist()) for run in own.split(RUN)]
    turns = torch.randperm(len(runs), generator=torch.Generator().manual_seed(seed))
    return torch.cat([runs[turn] for turn in turns.tolist()])


def corrupt_by(images: Tensor, name: str) -> Tensor:
    """Images of a domain: "clean", a corruption, or several joined by "+", one after the other."""
    parts = [] if name == "clean" else name.split("+")
    for seed, part in enumerate(parts):
        images = corrupt(images, part, 5, seed=seed)
    return images


def make(model: nn.Module, method: str) -> df.Adapter:
    if method == "frozen":
        return df.adapt(model, "source")
    if method == "chain":
        return df.adapt(model, "source", labels=df.LabelChain())
    if method in ("default", "without"):
        return df.adapt(model) if method == "default" else df.adapt(model, labels=None)
    if method.startswith("late "):
        statistics = df.Ema(0.5, 4.0, 0.45, float(method.removeprefix("late ")))
        return df.adapt(model, statistics=statistics)
    if method.startswith("skew "):
        skew, bias = map(float, method.removeprefix("skew ").split(", bias "))
        return df.adapt(model, labels=df.LabelChain(tables=False, skew=skew, bias=bias))
    return df.adapt(model, method)


def measure(arguments: argparse.Namespace) -> list[Row]:
    data = open_cifar10(arguments.clean)
    images, labels = data.images[: arguments.images], data.labels[: arguments.images]
    sets = {"extra": ("clean", *EXTRA), "pairs": PAIRS, "reported": tuple(CORRUPTIONS)}
    names = [one for name in arguments.corruptions for one in sets.get(name, (name,))]
    domains = {one: corrupt_by(images, one) for one in names}
    methods = [*arguments.methods, *arguments.presets, *(f"late {c:g}" for c in arguments.late)]
    pairs = product(arguments.skews, arguments.biases)
    methods += [f"skew {skew:g}, bias {bias:g}" for skew, bias in pairs]
    rows: list[Row] = []
    for name, model in open_models(arguments):
        for stream in arguments.orders:
            streams = [order(labels, stream, seed) for seed in range(arguments.seeds)]
            for method in methods:
                found: dict[str, Any] = {}
                events = 0
                for domain, inputs in domains.items():
                    judged = []
                    for index in streams:
                        adapter = make(model, method)
                        parts = index.split(arguments.batch)
                        outputs = torch.cat([adapter(inputs[part]) for part in parts])
                        judged.append(judge(outputs, labels[index]))
                        events += sum(event.response != "record" for event in adapter.events)
                    found[domain] = average(judged)
                mean = average([row for domain, row in found.items() if domain != "clean"])
                worst = min(found, key=lambda domain: float(found[domain]["accuracy"]))
                row = {"network": name, "order": stream, "method": method, **mean}
                row |= {"worst": worst, "worst_accuracy": found[worst]["accuracy"]}
                row |= {"clean": found.get("clean"), "alarms": events, "batch": arguments.batch}
                row |= {"images": arguments.images, "seeds": arguments.seeds}
                rows.append(row)
                print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--clean", type=Path, required=True)
    parser.add_argument("--corruptions", nargs="+", default=["extra"])
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=list(ORDERS))
    parser.add_argument("--methods", nargs="*", default=["frozen", "chain", "without", "default"])
    parser.add_argument("--presets", nargs="*", default=[])
    parser.add_argument("--late", type=float, nargs="*", default=[])
    parser.add_argument("--skews", type=float, nargs="*", default=[])
    parser.add_argument("--biases", type=float, nargs="*", default=[40.0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", df.AlarmWarning)
    write(arguments.json, {"rows": measure(arguments)}, "numpy")


if __name__ == "__main__":
    main()

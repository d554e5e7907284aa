"""Streams by the order of their labels and domains: shuffled, in runs, sorted, mixed, returning.

    python benchmarks/orders.py --models resnet20 vit_s4=WEIGHTS … --clean CIFAR10_TEST.npz \
        [--corruptions extra | pairs | reported | NAME …] [--images 1000] [--batch 64] \
        [--orders shuffled runs correlated sorted imbalanced] \
        [--orders correlated_continual published mixed recurring] \
        [--methods frozen chain without default data forgetful] \
        [--presets lame lame:affinity=rbf driftfilter:variance=.1,momentum=.5 …] \
        [--late 1 .3] [--skews 0 .001 .01 .1] [--biases 20 40 80] [--seeds 1] \
        [--source CIFAR10_TRAIN.npz] [--visits 20] [--bfloat16] [--json FILE]

Every stream is one corruption at severity 5, from the source, guarded as by default; but
"correlated_continual", "published" (each sorted by class), "mixed" and "recurring" (all
corruptions, again and again) are one stream of all of them, never reset. "chain" is the frozen
network with a chain of labels (``LabelChain``), "without" the default without one, "default" the
default, "forgetful" the default without a memory of domains (``Domains``), "data" the default that
was given the inputs of ``--source``; ``--late`` (``Ema.late``), ``--skews`` and ``--biases``
(``LabelChain.skew``, ``bias``) give more of it. The settings of the chain and ``late`` were decided
on the four extra corruptions, with ResNet-20, the ViT and WRN-16-4. ``--seeds``: orders of the same
images, in "imbalanced" with other common classes; the mean of all.

"pairs" are extra corruptions one on top of the other ("A+B" is B of A), on which the network is
wrong more often; they decided when shares of classes count (class_shares.py).

Runs are of 8 samples; the other orders are protocols of the bench, "correlated" with a slot for
every 100 samples, as for all 10,000. "published" is the setting `correlated` of
github:mariodoebler/test-time-adaptation for CIFAR-10-C (batches of 200 there, all 10,000 images).
Rows of ``--json`` that were not measured again are kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app.bench.prepare import parse_choices
from driftfilter.app.bench.protocols import (
    AnyProtocol,
    Continual,
    Correlated,
    Imbalanced,
    Mixed,
    Sorted,
    StreamPlan,
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
TOGETHER = ("correlated_continual", "published", "mixed", "recurring")  # all in one stream
SETS = {"extra": ("clean", *EXTRA), "pairs": PAIRS, "reported": tuple(CORRUPTIONS)}
KEY = ("network", "order", "method", "batch", "images", "domains")  # of a row


def chosen(text: str) -> tuple[str, dict[str, Any]]:
    """A preset and its options, of NAME:option=value,…"""
    (choice,) = parse_choices(text)
    return choice.name, dict(choice.options)


def order(labels: Tensor, name: str, seed: int = 0) -> Tensor:
    """The samples of a stream, by number."""
    settings = StreamSettings(("fog",), batch=len(labels), shuffled=True, seed=seed)
    plans: dict[str, AnyProtocol] = {
        "shuffled": Continual(),
        "sorted": Sorted(),
        "imbalanced": Imbalanced(),
        "correlated": _correlated(labels),
    }
    if name in plans:
        return plans[name](settings, labels).samples()[0]
    index = Sorted()(settings, labels).samples()[0]
    classes = labels[index].unique_consecutive(return_counts=True)[1]
    runs = [run for own in index.split(classes.tolist()) for run in own.split(RUN)]
    turns = torch.randperm(len(runs), generator=torch.Generator().manual_seed(seed))
    return torch.cat([runs[turn] for turn in turns.tolist()])


def _correlated(labels: Tensor) -> Correlated:
    return Correlated(slots=max(2, len(labels) // 100))


def plan(
    arguments: argparse.Namespace, name: str, domains: list[str], labels: Tensor
) -> StreamPlan:
    """One stream of all domains."""
    settings = StreamSettings(tuple(domains), batch=arguments.batch, shuffled=True)
    plans: dict[str, AnyProtocol] = {
        "correlated_continual": _correlated(labels),
        "published": Sorted(),
        "mixed": Mixed(),
        "recurring": Continual(arguments.visits),
    }
    return plans[name](settings, labels)


def corrupt_by(images: Tensor, name: str) -> Tensor:
    """Images of a domain: "clean", a corruption, or several joined by "+", one after the other."""
    parts = [] if name == "clean" else name.split("+")
    for seed, part in enumerate(parts):
        images = corrupt(images, part, 5, seed=seed)
    return images


def make(model: nn.Module, method: str, arguments: argparse.Namespace) -> df.Adapter:
    quick = {"autocast": torch.bfloat16, "channels_last": True} if arguments.bfloat16 else {}
    options: dict[str, Any] = quick
    preset = {"frozen": "source", "chain": "source"}.get(method, method)
    if method == "chain":
        options["labels"] = df.LabelChain()
    if method == "without":
        options["labels"] = None
    if method == "forgetful":
        options["domains"] = None
    if method == "data":
        options["data"] = open_cifar10(arguments.source).images.to(arguments.device)
    if method.startswith("late "):
        options["statistics"] = df.Ema(0.5, 4.0, 0.45, float(method.removeprefix("late ")))
    if method.startswith("skew "):
        skew, bias = map(float, method.removeprefix("skew ").split(", bias "))
        options["labels"] = df.LabelChain(tables=False, skew=skew, bias=bias)
    ours = ("default", "without", "forgetful", "data")
    if method in ours or method.startswith(("late ", "skew ")):
        return df.adapt(model, **options)
    name, own = chosen(preset)
    return df.adapt(model, name, **own, **options)


def acting(adapter: df.Adapter) -> int:
    """How many alarms have acted."""
    return sum(event.response != "record" for event in adapter.events)


def follow_each(
    model: nn.Module, method: str, arguments: argparse.Namespace, stream: str, data: Data
) -> Row:
    """A stream for each domain, from the source, in as many orders as there are seeds."""
    orders = [order(data.labels, stream, seed) for seed in range(arguments.seeds)]
    found: dict[str, Row] = {}
    events = 0
    for domain, inputs in data.domains.items():
        judged = []
        for index in orders:
            adapter = make(model, method, arguments)
            outputs = torch.cat([adapter(inputs[part]) for part in index.split(arguments.batch)])
            judged.append(judge(outputs, data.labels[index]))
            events += acting(adapter)
        found[domain] = average(judged)
    return summarize(found) | {"alarms": events, "seeds": arguments.seeds}


def follow_all(
    model: nn.Module, method: str, arguments: argparse.Namespace, plan: StreamPlan, data: Data
) -> Row:
    """One stream of all domains, with the accuracy of each visit and of each fourth of it."""
    adapter, inputs = make(model, method, arguments), list(data.domains.values())
    outputs = []
    for step in plan.steps:
        places = zip(step.domain.tolist(), step.index.tolist(), strict=True)
        outputs.append(adapter(torch.stack([inputs[domain][at] for domain, at in places])))
    predicted, (index, domain) = torch.cat(outputs), plan.samples()
    visit = torch.cat([torch.full_like(step.index, step.round) for step in plan.steps])
    found = {
        name: judge(predicted[domain == at], data.labels[index[domain == at]])
        for at, name in enumerate(data.domains)
    }
    right = (predicted.argmax(-1).cpu() == data.labels[index]).double()
    visits = [round(float(right[visit == each].mean()), 4) for each in visit.unique()]
    quarters = [round(float(part.mean()), 4) for part in right.chunk(4)]
    more = {"alarms": acting(adapter), "visits": visits, "quarters": quarters}
    return summarize(found) | more


def summarize(found: dict[str, Row]) -> Row:
    """Means over the corruptions, the worst of them, and the clean images."""
    worst = min(found, key=lambda domain: float(found[domain]["accuracy"]))
    return {
        **average([row for domain, row in found.items() if domain != "clean"]),
        "worst": worst,
        "worst_accuracy": found[worst]["accuracy"],
        "clean": found.get("clean"),
        "each": {domain: row["accuracy"] for domain, row in found.items()},
    }


class Data(NamedTuple):
    domains: dict[str, Tensor]  # inputs [n, …] by name
    labels: Tensor  # [n]


def open_data(arguments: argparse.Namespace) -> Data:
    data = open_cifar10(arguments.clean)
    images, labels = data.images[: arguments.images], data.labels[: arguments.images]
    names = [one for name in arguments.corruptions for one in SETS.get(name, (name,))]
    inputs = {one: corrupt_by(images, one).to(arguments.device) for one in names}
    return Data(inputs, labels)


def measure(arguments: argparse.Namespace) -> list[Row]:
    data = open_data(arguments)
    methods = [*arguments.methods, *arguments.presets, *(f"late {c:g}" for c in arguments.late)]
    pairs = itertools.product(arguments.skews, arguments.biases)
    methods += [f"skew {skew:g}, bias {bias:g}" for skew, bias in pairs]
    rows: list[Row] = []
    for name, model in open_models(arguments):
        for stream, method in itertools.product(arguments.orders, methods):
            if stream in TOGETHER:
                steps = plan(arguments, stream, list(data.domains), data.labels)
                found = follow_all(model, method, arguments, steps, data)
            else:
                found = follow_each(model, method, arguments, stream, data)
            row = {"network": name, "order": stream, "method": method, **found}
            row |= {"batch": arguments.batch, "images": arguments.images}
            row |= {"domains": " ".join(arguments.corruptions), "bfloat16": arguments.bfloat16}
            rows.append(row)
            print(row, flush=True)
    return rows


def keep_others(path: Path | None, rows: list[Row]) -> list[Row]:
    """With the rows of a file that are not measured here."""
    if path is None or not path.exists():
        return rows
    new = [[row[name] for name in KEY] for row in rows]
    old = json.loads(path.read_text(encoding="utf-8"))["figures"]["rows"]
    return [row for row in old if [row[name] for name in KEY] not in new] + rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--clean", type=Path, required=True)
    parser.add_argument("--corruptions", nargs="+", default=["extra"])
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--orders", nargs="+", choices=ORDERS + TOGETHER, default=list(ORDERS))
    parser.add_argument("--methods", nargs="*", default=["frozen", "chain", "without", "default"])
    parser.add_argument("--presets", nargs="*", default=[])
    parser.add_argument("--late", type=float, nargs="*", default=[])
    parser.add_argument("--source", type=Path, help="images for the method data")
    parser.add_argument("--visits", type=int, default=20, help="of each corruption, recurring")
    parser.add_argument("--bfloat16", action="store_true", help="autocast, channels last")
    parser.add_argument("--skews", type=float, nargs="*", default=[])
    parser.add_argument("--biases", type=float, nargs="*", default=[40.0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", df.AlarmWarning)
    rows = measure(arguments)
    write(arguments.json, {"rows": keep_others(arguments.json, rows)}, "numpy")


if __name__ == "__main__":
    main()

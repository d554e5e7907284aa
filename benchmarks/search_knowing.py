"""The searches behind what is known of accuracy, labels and settings; nothing here sees the fifteen
corruptions that are reported.

    python benchmarks/search_knowing.py follow --models resnet20 vit_s4=WEIGHTS … \
        --clean CIFAR10_TEST.npz --source CIFAR10_TRAIN.npz --keep FOLDER \
        [--first 1000] [--images 2000]
    python benchmarks/search_knowing.py estimate --keep FOLDER [--json FILE]
    python benchmarks/search_knowing.py ceiling --keep FOLDER [--labels 10 50 1000] [--json FILE]
    python benchmarks/search_knowing.py spread --models resnet20 --clean CIFAR10_TEST.npz \
        [--images 800] [--spreads 2 4 8] [--json FILE]

follow: the default in one stream of clean images, speckle noise, Gaussian blur, saturation and
spatter at severity 5 that is never reset; FOLDER gets what it said of each batch. estimate: the
mean absolute error of the estimate over windows of 1,000, in points, by its constants, each alone
at other values; without source data and with what the source says of 500 inputs. ceiling: what
labels can gain after the last layer. On one half of a domain offsets of the classes, a map of the
centred logits, the head's rows or corrections of what is near a label are fitted to so many random
labels, with the ridge that is best on the other half, and judged there. spread: nine settings
around the default, and the correlation of their mutual information with accuracy, by the common
spread of the logits, and without one.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import driftfilter as df
from driftfilter.adapter import bank as bank_module
from driftfilter.adapter.bank import BankState, add_predictions
from driftfilter.app.corruptions import EXTRA, corrupt
from driftfilter.app.streams import open_cifar10
from driftfilter.app.tune import make_bank
from driftfilter.inference import accuracy
from driftfilter.inference.accuracy import (
    Expectation,
    Opinions,
    SecondOpinion,
    SourceCalibration,
    confidence,
)
from estimate import open_source
from figures import write
from search_default import Row, open_models

SIZE, WINDOW = 200, 1000
OTHERS = {  # of the estimate's constants
    "_WEIGHT": [0.0, 1.0, 3.0, 6.0],
    "_HEAVIEST": [1.0, 1.1, 1.25, 1.5],
    "_OFF": [0.1, 0.15, 0.2, 0.3],
    "_SHARE": [0.0, 0.3, 0.5, 0.7, 1.0],
    "_AT_HOME": [0.0, 0.03, 0.05, 0.08],
    "_SLOPE": [1.6, 2.0, 2.2, 2.4, 2.8],
}
NEED_SOURCE = ("_SHARE", "_AT_HOME", "_SLOPE")
RIDGES = (1000.0, 100.0, 30.0, 10.0, 3.0, 1.0)
NEAR = 0.1  # of labels that act on their neighbours, 1 - cos of features


def open_domains(arguments: argparse.Namespace) -> Iterator[tuple[str, Tensor, Tensor]]:
    data = open_cifar10(arguments.clean)
    some = slice(arguments.first, arguments.first + arguments.images)
    images, labels = data.images[some], data.labels[some]
    yield "clean", images, labels
    yield from ((name, corrupt(images, name, 5, seed=0), labels) for name in EXTRA)


# What the default says


def follow(arguments: argparse.Namespace) -> list[Row]:
    """Keep what the default says of each batch, and what enters its last layer."""
    rows, source = [], open_source(arguments).images[:500]
    for name, model in open_models(arguments):
        adapter, kept = df.adapt(model), []
        with torch.no_grad():
            logits = torch.cat([model(each) for each in source.split(SIZE)])
        at_home = confidence(logits.log_softmax(-1)).mean()
        for domain, images, labels in open_domains(arguments):
            for x, y in zip(images.split(SIZE), labels.split(SIZE), strict=True):
                logs = adapter(x)
                second = adapter._now.expectation.second
                plain, features = look(adapter, x)
                kept.append(
                    {
                        "domain": domain,
                        "labels": y,
                        "logs": logs,
                        "features": features,
                        "plain": plain,
                        "at home": at_home,
                        "stay": torch.tensor(adapter._now.expectation.stay),
                        "second": None if second is None else tuple(second),
                    }
                )
            own = [each for each in kept if each["domain"] == domain]
            right = fmean(float((e["logs"].argmax(-1) == e["labels"]).double().mean()) for e in own)
            rows.append({"network": name, "domain": domain, "accuracy": round(right, 4)})
            print(rows[-1], flush=True)
        arguments.keep.mkdir(parents=True, exist_ok=True)
        torch.save(kept, arguments.keep / f"{name}.pt")
    return rows


def look(adapter: df.Adapter, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Plain confidences [n] after the step, and what enters the last layer [n, D]."""
    state = adapter.state
    with torch.no_grad():
        network = adapter._now.bound.filter._bind(state)[1]  # type: ignore[union-attr]
        network = getattr(network, "model", network)  # without the offsets of classes
        logits, features = network.logits_and_features(state.belief.mean, inputs)
    return confidence(logits.log_softmax(-1)), features


def open_kept(arguments: argparse.Namespace) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for path in sorted(arguments.keep.glob("*.pt")):
        yield path.stem, torch.load(path)


# Constants of the estimate


def judge(windows: list[list[dict[str, Any]]], with_source: bool) -> Row:
    """Mean absolute error, in points, and how often the band covers."""
    errors, covered = [], []
    for window in windows:
        logs, plain = (torch.cat([each[key] for each in window]) for key in ("logs", "plain"))
        last = window[-1]
        second = None if last["second"] is None else SecondOpinion(*last["second"])
        source = SourceCalibration(None, float(last["at home"])) if with_source else None
        opinions = Opinions.of(logs, plain)
        found = Expectation(opinions, source, float(last["stay"]), second).estimate
        right = logs.argmax(-1) == torch.cat([each["labels"] for each in window])
        truth = float(right.double().mean())
        errors.append(abs(found.accuracy - truth))
        covered.append(found.low <= truth <= found.high)
    return {"error": round(100 * fmean(errors), 2), "covered": round(fmean(covered), 3)}


def search_estimate(arguments: argparse.Namespace) -> list[Row]:
    rows = []
    for name, kept in open_kept(arguments):
        parts = [list(group) for _, group in itertools.groupby(kept, lambda each: each["domain"])]
        per = WINDOW // SIZE
        windows = [own[at : at + per] for own in parts for at in range(0, len(own) - per + 1, per)]
        for (constant, values), with_source in itertools.product(OTHERS.items(), (False, True)):
            if constant in NEED_SOURCE and not with_source:
                continue
            for value in values:
                with mock.patch.object(accuracy, constant, value):
                    found = judge(windows, with_source)
                row = {"network": name, "windows": len(windows), "source": with_source}
                rows.append({**row, "constant": constant, "value": value, **found})
                print(rows[-1], flush=True)
    return rows


# What labels can gain after the last layer


def describe(kind: str, logs: Tensor, features: Tensor, labelled: Tensor) -> Tensor:
    """The inputs [n, m] of a map to corrections of the logits.

    Neighbours: how near a sample is to each that has a label, exp((cos - 1) / 0.1) of centred
    features, so that a label acts on the samples around it.
    """
    one = torch.ones(len(logs), 1)
    if kind == "offsets":
        return one
    if kind == "neighbours":
        unit = functional.normalize(features - features.mean(0), dim=-1)
        return ((unit @ unit[labelled].T - 1) / NEAR).exp()
    own = features if kind == "head" else logs - logs.mean(-1, keepdim=True)
    own = own - own.mean(0)
    return torch.cat((one, own / own.square().sum(-1).mean().sqrt()), 1)


def fit(inputs: Tensor, logs: Tensor, labels: Tensor, ridge: float) -> Tensor:
    """The map [m, k] of least cross-entropy of the labels, with ``ridge`` / 2 times its square."""
    found = torch.zeros(inputs.shape[1], logs.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([found], max_iter=60, line_search_fn="strong_wolfe")

    def close() -> Tensor:
        optimizer.zero_grad()
        energy = functional.cross_entropy(logs + inputs @ found, labels, reduction="sum")
        (energy + ridge / 2 * found.square().sum()).backward()
        return energy

    with torch.enable_grad():
        optimizer.step(close)
    return found.detach()


def measure_ceiling(arguments: argparse.Namespace) -> list[Row]:
    rows = []
    for (name, kept), kind in itertools.product(
        open_kept(arguments), ("offsets", "logits", "head", "neighbours")
    ):
        gains: dict[tuple[int, float], list[float]] = {}
        names = [each["domain"] for each in kept if each["domain"] != "clean"]
        for domain in dict.fromkeys(names):
            own = [each for each in kept if each["domain"] == domain]
            logs, labels, features = (
                torch.cat([each[key] for each in own]).float()
                for key in ("logs", "labels", "features")
            )
            labels = labels.long()
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
            rest = order[len(order) // 2 :]
            before = (logs[rest].argmax(-1) == labels[rest]).double().mean()
            for count, ridge in itertools.product(arguments.labels, RIDGES):
                few = order[: min(count, len(order) // 2)]
                inputs = describe(kind, logs, features, few)
                moved = logs[rest] + inputs[rest] @ fit(inputs[few], logs[few], labels[few], ridge)
                after = (moved.argmax(-1) == labels[rest]).double().mean()
                gains.setdefault((count, ridge), []).append(100 * float(after - before))
        for count in arguments.labels:
            best = max(RIDGES, key=lambda ridge: fmean(gains[count, ridge]))
            each = [round(gain, 1) for gain in gains[count, best]]
            row = {"network": name, "fitted": kind, "labels": count, "ridge": best}
            rows.append({**row, "gain": round(fmean(gains[count, best]), 2), "each": each})
            print(rows[-1], flush=True)
    return rows


# The bank's common spread


def search_spread(arguments: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for name, model in open_models(arguments):
        found: dict[str, list[float]] = {}
        for domain, images, labels in open_domains(arguments):
            if domain == "clean":
                continue
            logs, right = run_members(model, images, labels)
            for spread in (*arguments.spreads, None):
                information = inform(logs, spread)
                r = float(np.corrcoef(information, right)[0, 1])
                found.setdefault(str(spread), []).append(round(r, 3))
        rows += [{"network": name, "spread": key, "r": each} for key, each in found.items()]
        print(*rows, sep="\n", flush=True)
    return rows


def run_members(
    model: nn.Module, images: Tensor, labels: Tensor
) -> tuple[list[Tensor], list[float]]:
    """What nine settings say of each batch [m, n, k], and how accurate each is."""
    members = make_bank(model)[1].members
    logs = [torch.stack([member(x) for member in members]).double() for x in images.split(SIZE)]
    whole = torch.cat(logs, 1).argmax(-1)
    return logs, (whole == labels).double().mean(1).tolist()


def inform(logs: list[Tensor], spread: float | None) -> list[float]:
    """I of each setting over a stream, at a common spread of the logits, or as they are."""
    if spread is None:
        p = torch.cat(logs, 1).exp()
        inner = torch.special.entr(p).sum(-1).mean(1)
        plain: list[float] = (torch.special.entr(p.mean(1)).sum(-1) - inner).tolist()
        return plain
    state = BankState.start(len(logs[0]), logs[0].shape[-1])
    with mock.patch.object(bank_module, "_SPREAD", spread):
        for batch in logs:
            state = add_predictions(state, batch, 1.0)
    found: list[float] = state.information.tolist()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    searches = {
        "follow": follow,
        "estimate": search_estimate,
        "ceiling": measure_ceiling,
        "spread": search_spread,
    }
    parser.add_argument("what", choices=list(searches))
    parser.add_argument("--models", nargs="+", default=["resnet20"])
    parser.add_argument("--clean", type=Path)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--keep", type=Path, help="the folder of what was said")
    parser.add_argument("--images", type=int, default=2000, help="of a domain")
    parser.add_argument("--first", type=int, default=1000, help="the first of them")
    parser.add_argument("--labels", type=int, nargs="+", default=[10, 50, 1000])
    parser.add_argument("--spreads", type=float, nargs="+", default=[2.0, 4.0, 8.0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    write(arguments.json, {"rows": searches[arguments.what](arguments)}, "numpy")


if __name__ == "__main__":
    main()

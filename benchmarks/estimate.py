"""Accuracy without labels against the truth, and what the uncertainty of each sample is worth.

    python benchmarks/estimate.py --models resnet20 vit_s4=WEIGHTS … --clean CIFAR10_TEST.npz \
        --source CIFAR10_TRAIN.npz [--domains extra] [--protocols reset continual] \
        [--data no inputs yes] [--images 1000] [--window 1000] [--batch 200] [--no-tent] \
        [--bfloat16] [--json FILE]

Constants were chosen on ``--domains extra`` (clean images, speckle noise, Gaussian blur, saturation
and spatter); ``fifteen`` is what is reported. For windows of samples: the mean absolute error
of ``adapter.estimate`` in points and how often its interval covers, without source data, with 500
inputs, and with these and their labels (networks without batch norm are aligned by them); on the
same predictions their mean confidence, ATC (the threshold of the confidence above which as many
source samples lie as are right) and AETTA's formula (dropout of 0.4 before the last layer, ten
draws, α = 3); and the mean confidence of ``tent`` against its own accuracy.

``--samples N`` judges uncertainties in place of that: accuracy at 80 % coverage and AUROC of errors
by the confidence at the mean (MAP), that of the default, and that of ``adapter.uncertainty``; AUROC
of foreign images (uniform noise, digits in CIFAR's frame) among clean ones.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app.corruptions import CORRUPTIONS, EXTRA, corrupt
from driftfilter.app.metrics import risk_coverage
from driftfilter.app.streams import open_cifar10
from driftfilter.base.randomness import Randomness
from driftfilter.inference.accuracy import confidence
from driftfilter.inference.prediction import Query, join_predictions
from figures import write
from search_default import open_models

DROPOUT, DRAWS, ALPHA = 0.4, 10, 3.0  # AETTA's, for CIFAR-10-C
COVERAGE = 16  # of 20 parts: 80 %
Row = dict[str, Any]


class Source(NamedTuple):
    """Source images with labels, and what a frozen network says of them."""

    images: Tensor  # [n, 3, 32, 32]
    labels: Tensor  # [n]

    def threshold(self, model: nn.Module, batch: int, half: bool = False) -> float:
        """ATC's: as many samples are more confident as are right."""
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
            logits = torch.cat([model(each) for each in self.images.split(batch)]).float()
        wrong = int((logits.argmax(-1) != self.labels).sum())
        return float(confidence(logits.log_softmax(-1)).sort()[0][wrong])


# Estimates


class Window:
    """What is said of the samples of one window."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []
        self.labels: list[Tensor] = []
        self.dropped: list[Tensor] = []  # labels under dropout [s, n]
        self.mean: list[Tensor] = []  # predictions under dropout, on average [k]

    def judge(self, estimate: df.Estimate, threshold: float) -> Row:
        """Truth and estimates."""
        logp, labels = torch.cat(self.outputs), torch.cat(self.labels)
        sure, said = confidence(logp), logp.argmax(-1)
        disagreement = (torch.cat(self.dropped, 1) != said).double().mean()
        mean = torch.stack(self.mean).mean(0)
        entropy = -(mean * mean.log()).sum() / math.log(len(mean))
        aetta = 1 - min(1.0, float(entropy) ** -ALPHA * float(disagreement))
        return {
            "truth": float((said == labels).double().mean()),
            "estimate": estimate.accuracy,
            "low": estimate.low,
            "high": estimate.high,
            "confidence": float(sure.mean()),
            "atc": float((sure > threshold).double().mean()),
            "aetta": aetta,
        }


def drop_features(
    adapter: df.Adapter,
    model: nn.Module,
    inputs: Tensor,
    generator: torch.Generator,
    half: bool = False,
) -> tuple[Tensor, Tensor]:
    """Labels of the adapted network under dropout of its features [s, n], and its mean prediction
    [k].
    """
    state = adapter.state
    filt = adapter._now.bound.filter  # type: ignore[union-attr]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
        network = filt._bind(state)[1]
        network = getattr(network, "model", network)  # without the offsets of classes
        _, features = network.logits_and_features(state.belief.mean, inputs)
    features = features.float()
    head = [each for each in model.modules() if isinstance(each, nn.Linear)][-1]
    masks = torch.rand(DRAWS, *features.shape, generator=generator) >= DROPOUT
    with torch.no_grad():
        logits = head(features * masks / (1 - DROPOUT))
    return logits.argmax(-1), logits.softmax(-1).mean((0, 1))


Domain = tuple[str, Tensor, Tensor]  # its name, images, labels


def open_stream(arguments: argparse.Namespace) -> list[Domain]:
    """The domains of a stream, one after the other."""
    return _open_stream(arguments.clean, arguments.images, arguments.domains)


@cache
def _open_stream(clean: Path, count: int, kind: str) -> list[Domain]:
    data = open_cifar10(clean)
    images, labels = data.images[:count], data.labels[:count]
    names = ["clean", *EXTRA] if kind == "extra" else list(CORRUPTIONS)
    return [
        (name, images if name == "clean" else corrupt(images, name, 5, seed=0), labels)
        for name in names
    ]


def open_source(arguments: argparse.Namespace) -> Source:
    found = np.load(arguments.source)
    images = (
        torch.from_numpy(found["images"]).permute(0, 3, 1, 2).to(arguments.device).float() / 255
    )
    return Source(images, torch.from_numpy(found["labels"]).long())


def speed_of(arguments: argparse.Namespace) -> Literal["exact", "fast"]:
    return "fast" if arguments.bfloat16 else "exact"


def follow(
    arguments: argparse.Namespace, model: nn.Module, source: Source, protocol: str, data: str
) -> Iterator[Row]:
    """The windows of the default on a stream."""
    inputs, labels = source.images[:500], source.labels[:500]
    given = {"no": None, "inputs": inputs, "yes": (inputs, labels)}[data]
    threshold = source.threshold(model, arguments.batch, arguments.bfloat16)
    generator, adapter = torch.Generator().manual_seed(0), None
    for name, images, labels in open_stream(arguments):
        if adapter is None or protocol == "reset":
            adapter = df.adapt(model, data=given, speed=speed_of(arguments))
        pairs = zip(images.split(arguments.batch), labels.split(arguments.batch), strict=True)
        window, seen = Window(), 0
        for x, y in pairs:
            window.outputs.append(adapter(x))
            window.labels.append(y)
            dropped, mean = drop_features(adapter, model, x, generator, arguments.bfloat16)
            window.dropped.append(dropped)
            window.mean.append(mean)
            seen += len(y)
            if seen >= arguments.window:
                yield {"domain": name, **window.judge(adapter.estimate, threshold)}
                window, seen = Window(), 0


def follow_tent(arguments: argparse.Namespace, model: nn.Module, protocol: str) -> Iterator[Row]:
    """Truth and mean confidence of the windows of tent."""
    adapter = None
    for name, images, labels in open_stream(arguments):
        if adapter is None or protocol == "reset":
            adapter = df.adapt(model, "tent", speed=speed_of(arguments))
        for x, y in zip(
            images.split(arguments.window), labels.split(arguments.window), strict=True
        ):
            logp = torch.cat([adapter(each) for each in x.split(arguments.batch)])
            truth = float((logp.argmax(-1) == y).double().mean())
            yield {"domain": name, "truth": truth, "confidence": float(confidence(logp).mean())}


def average_error(windows: list[Row], name: str) -> float:
    """Mean absolute error in points."""
    return round(100 * statistics.fmean(abs(row[name] - row["truth"]) for row in windows), 2)


def judge_estimates(arguments: argparse.Namespace) -> list[Row]:
    source, rows = open_source(arguments), []
    for name, model in open_models(arguments):
        for protocol in arguments.protocols:
            tent = []
            if not arguments.no_tent:
                tent = list(follow_tent(arguments, model, protocol))
            for data in arguments.data:
                windows = list(follow(arguments, model, source, protocol, data))
                covered = [row["low"] <= row["truth"] <= row["high"] for row in windows]
                row: Row = {
                    "network": name,
                    "protocol": protocol,
                    "labelled source data": data == "yes",
                    "source data": data,
                    "windows": len(windows),
                    "truth": round(statistics.fmean(each["truth"] for each in windows), 4),
                    "covered": round(statistics.fmean(covered), 3),
                    **{
                        each: average_error(windows, each)
                        for each in ("estimate", "confidence", "atc", "aetta")
                    },
                    "half width": round(
                        50 * statistics.fmean(each["high"] - each["low"] for each in windows), 2
                    ),
                }
                row |= {"tent": average_error(tent, "confidence")} if tent else {}
                print({key: value for key, value in row.items() if key != "each"}, flush=True)
                rows.append({**row, "each": [_round(each) for each in windows]})
    return rows


def _round(row: Row) -> Row:
    return {
        key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()
    }


# Uncertainty of each sample


def rank(scores: Tensor, positive: Tensor) -> float:
    """AUROC: how often a positive sample has the larger score, ties half."""
    order = torch.from_numpy(np.unique(scores.double().numpy(), return_inverse=True)[1])
    counts = torch.bincount(order).double()
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[order]
    n = int(positive.sum())
    found = (ranks[positive].sum() - n * (n + 1) / 2) / (n * (len(scores) - n))
    return round(float(found), 4)


def draw_digits(count: int) -> Tensor:
    """Handwritten digits of scikit-learn in CIFAR's frame [n, 3, 32, 32]."""
    from sklearn.datasets import load_digits

    small = torch.from_numpy(load_digits().images[:count]).float()[:, None] / 16
    large = nn.functional.interpolate(small, (32, 32), mode="bilinear")
    return large.expand(-1, 3, -1, -1).contiguous()


def score(adapter: df.Adapter, images: Tensor, batch: int, draws: int) -> dict[str, df.Prediction]:
    """Predictions of images by each rule, nothing adapted."""
    filt, state = adapter._now.bound.filter, adapter.state  # type: ignore[union-attr]
    found: dict[str, list[df.Prediction]] = {"map": [], "default": [], "each sample": []}
    at_mean = df.MAP()
    for x in images.split(batch):
        _, model = filt._bind(state)
        query = Query(model, x, Randomness(0, 0, x.device))
        with torch.no_grad():
            found["map"].append(at_mean(state.belief, query))
        found["default"].append(adapter.predict(x))
        found["each sample"].append(adapter.uncertainty(x, draws=draws))
    return {name: join_predictions(each) for name, each in found.items()}


def judge_uncertainties(arguments: argparse.Namespace) -> list[Row]:
    arguments.images, rows = arguments.samples, []
    generator = torch.Generator().manual_seed(0)
    foreign = {
        "noise": torch.rand(200, 3, 32, 32, generator=generator),
        "digits": draw_digits(200),
    }
    for name, model in open_models(arguments):
        cells: dict[str, list[tuple[float, float]]] = {}
        for _, images, labels in open_stream(arguments):
            adapter = df.adapt(model, speed=speed_of(arguments))
            for x in images.split(arguments.batch):
                adapter(x)
            for rule, found in score(adapter, images, arguments.batch, arguments.draws).items():
                covered = risk_coverage(found.log_probabilities, labels)[COVERAGE - 1]
                wrong = found.labels != labels
                told = (covered, rank(-found.confidence, wrong))
                cells.setdefault(rule, []).append(told)
                if rule == "each sample":
                    by_information = rank(found.mutual_information, wrong)
                    cells.setdefault("mutual information", []).append((0.0, by_information))
        row: Row = {"network": name, "samples": arguments.samples, "draws": arguments.draws}
        for rule, each in cells.items():
            row[rule] = {"auroc of errors": round(statistics.fmean(pair[1] for pair in each), 4)}
            if rule != "mutual information":
                covered = 100 * statistics.fmean(pair[0] for pair in each)
                row[rule]["accuracy at 80 %"] = round(covered, 2)
        row["foreign"] = judge_foreign(arguments, model, foreign)
        print(row, flush=True)
        rows.append(row)
    return rows


def judge_foreign(
    arguments: argparse.Namespace, model: nn.Module, foreign: dict[str, Tensor]
) -> dict[str, Any]:
    """AUROC of foreign images among clean ones, after a stream of clean ones."""
    images = open_cifar10(arguments.clean).images[: arguments.samples]
    adapter, found = df.adapt(model, speed=speed_of(arguments)), {}
    for x in images.split(arguments.batch):
        adapter(x)
    for kind, others in foreign.items():
        # Mixed batches: half of each is foreign.
        n = min(len(images), len(others))
        mixed = torch.stack((images[:n], others[:n]), 1).flatten(0, 1)
        strange = torch.arange(2 * n) % 2 == 1
        told = score(adapter, mixed, arguments.batch, arguments.draws)
        found[kind] = {
            **{rule: rank(each.entropy, strange) for rule, each in told.items()},
            "mutual information": rank(told["each sample"].mutual_information, strange),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--clean", type=Path, required=True)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--domains", choices=["extra", "fifteen"], default="fifteen")
    parser.add_argument("--protocols", nargs="+", default=["reset"])
    parser.add_argument("--data", nargs="+", choices=["no", "inputs", "yes"], default=["no", "yes"])
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--window", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--samples", type=int, default=0, help="judge uncertainties on so many")
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--no-tent", action="store_true")
    parser.add_argument("--bfloat16", action="store_true", help="the model runs in it")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*published rate.*")
    judge = judge_uncertainties if arguments.samples else judge_estimates
    write(arguments.json, {"rows": judge(arguments)}, "numpy")


if __name__ == "__main__":
    main()

"""The temperature that `Moderated` finds without labels, against the best ones with labels.

    python benchmarks/temperature.py [--batches 400,200,100,50] [--images 400] [--json FILE]

The default on ResNet-20 and images that ship with the package, under each of the 15 corruptions at
severity 5, none of which the scale was chosen on. Beside the NLL: by how much the variance along
the loss from rows of the network exceeds that from the Jacobian of each sample's own logits.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import driftfilter as df
from driftfilter.app import corruptions, models, streams
from driftfilter.base.randomness import Randomness
from figures import write

SCALES = [0.001 * number for number in (1, 2, 3, *range(4, 17), 18, 20, 25, 30, 40)]
TEMPERATURES = [0.6 + 0.02 * number for number in range(171)]
LIMIT = df.Moderated().limit


class Stream(NamedTuple):
    """One corruption as the default saw it."""

    logits: Tensor  # [n, k]
    variances: Tensor  # [n, 1], v at a scale of 1
    labels: Tensor  # [n]

    def nll(self, temperature: float | Tensor) -> float:
        return torch.nn.functional.cross_entropy(self.logits / temperature, self.labels).item()

    def moderated(self, scale: float) -> float:
        """NLL at the temperature of a scale."""
        return self.nll((1 + math.pi / 4 * scale * self.variances).sqrt().clamp(max=LIMIT))


def default() -> tuple[df.Network, df.Recipe]:
    """The network and the default for it, with all of the variance to be seen."""
    model = models.load("resnet20").eval()
    recipe = df.presets.for_model(model, "driftfilter", {}, [])
    recipe = replace(recipe, prediction=df.Moderated(scale=1.0, limit=1e6))
    return df.Network(model, recipe.parameters, recipe.statistics), recipe


def pass_through(images: Tensor, labels: Tensor, batch: int) -> Stream:
    network, recipe = default()
    filt = recipe.filter(network)
    state = filt.init(recipe.source(network, network.mean()))
    logits, variances = [], []
    for part in images.split(batch):
        state, prediction, _ = filt.step(state, part)
        spread = prediction.logit_variance[:, :1]
        variances.append(spread)
        logits.append(prediction.log_probabilities * (1 + math.pi / 4 * spread).sqrt())
    return Stream(torch.cat(logits), torch.cat(variances), labels)


def excess(images: Tensor) -> float:
    """Σ_i g_iᵀ Σ g_i of rows, over that of each sample's own slopes."""
    network, recipe = default()
    source = recipe.source(network, network.mean())
    energy, _ = recipe.observation(
        network, source.mean, images, {}, Randomness(0, 0, torch.device("cpu"))
    )
    evaluation = energy.evaluation
    _, pullback = network.pullback(source.mean, images)
    rows, own = evaluation.rows, pullback.apart(evaluation.slopes().sum(0))
    sums = [(each * source.covariance.apply(each)).sum().item() for each in (rows, own)]
    return float(sums[0] / sums[1])


def least(values: list[float], of: Callable[[float], float]) -> dict[str, float]:
    """The value with the least NLL."""
    nll, value = min((of(value), value) for value in values)
    return {"value": value, "nll": nll}


def judge(seen: list[Stream]) -> dict[str, object]:
    def mean(of: Callable[[Stream], float]) -> float:
        return statistics.fmean(of(stream) for stream in seen)

    return {
        "temperature 1": mean(lambda stream: stream.nll(1.0)),
        "moderated": mean(lambda stream: stream.moderated(df.Moderated().scale)),
        "each by labels": mean(lambda stream: min(map(stream.nll, TEMPERATURES))),
        "all by labels": least(TEMPERATURES, lambda T: mean(lambda stream: stream.nll(T))),
        "best scale": least(SCALES, lambda s: mean(lambda stream: stream.moderated(s))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", default="400,200,100,50")
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    images, labels = (part[: arguments.images] for part in streams.sample_images())
    corrupted = {name: corruptions.corrupt(images, name, 5) for name in corruptions.CORRUPTIONS}
    batches = {}
    for batch in map(int, arguments.batches.split(",")):
        seen = [pass_through(stream, labels, batch) for stream in corrupted.values()]
        batches[str(batch)] = judge(seen)
        print(f"{batch:>4} {batches[str(batch)]}", flush=True)
    ratios = {name: excess(stream[:50]) for name, stream in corrupted.items()}
    print(f"rows over slopes: {min(ratios.values()):.1f} to {max(ratios.values()):.1f}")
    write(arguments.json, {"images": len(images), "batches": batches, "excess": ratios})


if __name__ == "__main__":
    main()

"""Claims about networks: same-step prediction, a carried posterior, the margin of opgd over tent.

    python benchmarks/claims.py [--images 500] [--batch 100] [--seeds 1] [--rows "A;B"] \
        [--json FILE]

The shipped ResNet-20 on the 15 corruptions at severity 5 of the first images of the shipped test
set. ``reset``: the network is the source again for each corruption. ``continual``: one stream.
A row of ``opgd`` renews Σ = σ² I before each step, as the paper does; a carried one keeps Σ and
moves it by another noise.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app import metrics, models
from driftfilter.app.corruptions import CORRUPTIONS, corrupt
from driftfilter.app.streams import sample_images

VARIANCE = 0.1  # of opgd
CARRIED = {
    "carried, W = σ² I / 10": df.Transition(df.RandomWalk(), df.Isotropic(VARIANCE / 10)),
    "carried, W = σ² I / 100": df.Transition(df.RandomWalk(), df.Isotropic(VARIANCE / 100)),
    "carried, discount 0.9": df.Transition(df.RandomWalk(), df.Discount(0.9)),
    "carried, reversion 0.99": df.Transition(df.MeanReversion(0.99), df.Stationary()),
}


def recipes() -> dict[str, df.Recipe]:
    """The rows of the table."""
    opgd = df.presets.get("opgd", variance=VARIANCE)
    return {
        **{name: df.presets.get(name) for name in ("source", "bn", "tent")},
        "opgd": opgd,
        "opgd, predicted after the step": replace(opgd, predict_from="posterior"),
        **{f"opgd, {name}": replace(opgd, transition=move) for name, move in CARRIED.items()},
    }


def run(model: nn.Module, recipe: df.Recipe, streams: Sequence[Sequence[Tensor]]) -> Tensor:
    """Log-probabilities of streams of batches, the network the source at the start of each."""
    adapter = df.adapt(model, recipe, monitor=None)
    rows = []
    for stream in streams:
        adapter.reset()
        rows += [adapter(batch) for batch in stream]
    return torch.cat(rows)


def measure(log_probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    return {
        "accuracy": metrics.accuracy(log_probabilities, labels),
        "nll": metrics.negative_log_likelihood(log_probabilities, labels),
        "ece": metrics.calibration_error(log_probabilities, labels),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rows", type=lambda text: text.split(";"), default=list(recipes()))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    images, labels = sample_images()
    clean, truth = images[: given.images], labels[: given.images].repeat(len(CORRUPTIONS))
    model, found = models.load("resnet20"), []
    for seed in range(given.seeds):
        streams = [corrupt(clean, name, 5, seed).split(given.batch) for name in CORRUPTIONS]
        orders = {"reset": streams, "continual": [[b for stream in streams for b in stream]]}
        for name in given.rows:
            for order, parts in orders.items():
                score = measure(run(model, recipes()[name], parts), truth)
                found.append({"row": name, "order": order, "seed": seed, **score})
                print(
                    f"{name:<34}{order:<11}{score['accuracy']:>8.4f}{score['nll']:>8.3f}"
                    f"{score['ece']:>8.4f}",
                    flush=True,
                )
    if given.json:
        about: dict[str, Any] = {"images": given.images, "batch": given.batch, "rows": found}
        given.json.write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

"""The search that decided the default with source data for networks without batch norm.

    python benchmarks/search_aligned.py --models resnet26_gn=WEIGHTS vit_s4=WEIGHTS … \
        --clean CIFAR10_TEST.npz --source CIFAR10_TRAIN.npz [--images 1000] [--batch 200] \
        [--samples 500] [--scales .01 .02 .03 .05] [--json FILE]

Statistics of the source data stand behind the norms (networks/alignment.py). Nothing here sees the
fifteen corruptions that are reported: clean images, speckle noise, Gaussian blur, saturation and
spatter at severity 5. For each network: S, how far the source network finds the first batch of a
domain (``Ema.shift``), also of clean images sorted by class; then accuracy, NLL and ECE of the
frozen network, of the default without source data and of the aligned one, by the scale of its
temperature (``Moderated``), which changes neither steps nor classes.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.inference.prediction import SLOPES
from driftfilter.networks.batch_trust import SHIFT
from figures import write
from search_default import average, follow, judge, open_domains, open_models

LIMIT = 4.0  # of a temperature


def measure_shift(model: nn.Module, source: Tensor, inputs: Tensor) -> float:
    """S of one batch."""
    recipe = df.Recipe(df.NormAffine(), df.Ema(0.5, 4.0, 1e9), inference=df.Frozen(), align=True)
    adapter = df.adapt(model, recipe, data=source, monitor=None)
    adapter(inputs)
    total, samples, _ = adapter.state.memory[SHIFT].tolist()
    return float(total / samples)


def temper(log_probabilities: Tensor, before: float, after: float) -> Tensor:
    """The same logits at another temperature."""
    return (log_probabilities * before / after).log_softmax(-1)


def follow_aligned(
    model: nn.Module, source: Tensor, inputs: Tensor, batch: int, scales: list[float]
) -> dict[float, Tensor]:
    """Log-probabilities of a stream by the scale of the temperature."""
    recipe = df.presets.get("driftfilter", norms="aligned")
    recipe = replace(recipe, prediction=df.Moderated(scale=1.0, limit=1e6))
    adapter = df.adapt(model, recipe, data=source, monitor=None)
    found: dict[float, list[Tensor]] = {scale: [] for scale in scales}
    for each in inputs.split(batch):
        own = adapter(each)
        along, length = adapter.state.memory[SLOPES].tolist()
        variance = math.pi / 4 * along / max(length, 1e-30)
        for scale, outputs in found.items():
            wanted = min(LIMIT, math.sqrt(1 + scale * variance))
            outputs.append(temper(own, math.sqrt(1 + variance), wanted))
    return {scale: torch.cat(outputs) for scale, outputs in found.items()}


def search(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    domains, labels = open_domains(arguments)
    pixels = np.load(arguments.source)["images"][: arguments.samples]
    source = torch.from_numpy(pixels).permute(0, 3, 1, 2).float().to(arguments.device) / 255
    rows: list[dict[str, Any]] = []
    for name, model in open_models(arguments):
        first = {domain: images[: arguments.batch] for domain, images in domains.items()}
        first["sorted"] = domains["clean"][labels.argsort(stable=True)[: arguments.batch]]
        shifts = {each: round(measure_shift(model, source, x), 3) for each, x in first.items()}
        print(f"{name:<14}S", shifts, flush=True)
        found: dict[str, dict[str, Any]] = {}
        for domain, images in domains.items():
            streams = {
                "frozen": follow(model, None, images, arguments.batch),
                "default": follow(
                    model, df.presets.for_model(model, "driftfilter", {}), images, arguments.batch
                ),
            }
            given = (source, images, arguments.batch, arguments.scales)
            aligned = follow_aligned(model, *given)
            streams |= {f"aligned, scale {scale:g}": own for scale, own in aligned.items()}
            for method, outputs in streams.items():
                found.setdefault(method, {})[domain] = judge(outputs, labels)
        for method, cells in found.items():
            extra = average([cells[each] for each in cells if each != "clean"])
            rows.append(
                {"network": name, "method": method, "clean": cells["clean"], "extra": extra}
            )
            print(f"{name:<14}{method:<22}clean {cells['clean']}  extra {extra}", flush=True)
        rows.append({"network": name, "shifts": shifts})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--clean", type=Path, required=True)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=500, help="of the source")
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--scales", type=float, nargs="+", default=[0.01, 0.02, 0.03, 0.05])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    write(arguments.json, {"rows": search(arguments)}, "numpy")


if __name__ == "__main__":
    main()

"""One adaptation step on a network beside a minimal hand-written TENT step; ratios from one run.

    python benchmarks/step.py [--model resnet20] [--weights FILE] [--batch 200] [--device cpu] [--rounds 9] [--json FILE]

The hand-written step is forward, entropy, backward and torch's Adam on the norm parameters, nothing else. Every case
adapts to the same batch and predicts before the step, as TENT does.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app import models


def hand_written_tent(source: nn.Module, images: Tensor) -> Callable[[], object]:
    model = copy.deepcopy(source)
    parameters: list[Tensor] = []
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.GroupNorm)):
            if isinstance(module, nn.BatchNorm2d):
                module.track_running_stats, module.running_mean, module.running_var = False, None, None
            parameters += [parameter.requires_grad_() for parameter in module.parameters()]
    optimizer = torch.optim.Adam(parameters, 1e-3)

    def step() -> Tensor:
        logits: Tensor = model(images)
        loss = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return logits

    return step


def adapted(source: nn.Module, images: Tensor, preset: str) -> Callable[[], object]:
    adapter = df.adapt(source, preset)
    return lambda: adapter(images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet20", choices=list(models.ARCHITECTURES))
    parser.add_argument("--weights", type=Path, help="weights file for a network that does not ship with the package")
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()

    shipped = arguments.weights is not None or arguments.model in models.SHIPPED
    source = models.load(arguments.model, arguments.weights) if shipped else models.build(arguments.model)
    source = source.to(arguments.device)
    images = torch.rand(arguments.batch, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(arguments.device)
    cases: dict[str, Callable[[], object]] = {"hand-written TENT": hand_written_tent(source, images)}
    for preset in ("tent", "opgd_diag", "opgd"):
        cases[preset] = adapted(source, images, preset)
    times: dict[str, list[float]] = {name: [] for name in cases}
    peaks: dict[str, float] = {}
    order = random.Random(0)  # a step pays for the memory that the one before it gave back to the system
    for round_ in range(arguments.rounds + 2):  # the first two warm up; cases take turns, so that noise hits them alike
        for name, step in order.sample(list(cases.items()), len(cases)):
            if arguments.device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
            step()
            if arguments.device == "cuda":
                torch.cuda.synchronize()
                peaks[name] = torch.cuda.max_memory_allocated() / 2**20
            if round_ >= 2:
                times[name].append(1e3 * (time.perf_counter() - begun))
    medians = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    base = medians["hand-written TENT"]
    where = (
        torch.cuda.get_device_name()
        if arguments.device == "cuda"
        else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    date = datetime.date.today().isoformat()
    print(f"{arguments.model}, batch {arguments.batch}, {where}, torch {torch.__version__}, {date}\n")
    print(f"{'one step':<40}{'ms':>9}{'ratio':>8}" + (f"{'peak MiB':>10}{'ratio':>8}" if peaks else ""))
    for name, median in medians.items():
        memory = f"{peaks[name]:>10.0f}{peaks[name] / peaks['hand-written TENT']:>8.2f}" if peaks else ""
        print(f"{name:<40}{median:>9.1f}{median / base:>8.2f}{memory}")
    if arguments.json:
        figures = {"model": arguments.model, "where": where, "date": date, "ms": medians, "peak MiB": peaks}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

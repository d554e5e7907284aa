"""One adaptation step on a network beside a minimal hand-written TENT step; ratios from one run.

    python benchmarks/step.py [--model resnet20] [--weights FILE] [--batch 200] [--device cpu] [--rounds 9] [--json FILE]

The hand-written step is forward, entropy, backward and torch's Adam on the norm parameters, nothing else. Every case
adapts to the same batch and predicts before the step, as TENT does, or with Gaussian logits where its name says so. "Fast":
on a GPU bfloat16 autocast, channels last, and cuDNN tries its algorithms; the others are as torch has it by itself (TF32
convolutions). "Tuned": TF32 with the latter two. Times are medians, which leave out the monitor's probe of every few batches.
Peak memory is that of the process: captured graphs keep theirs, so that with graphs it tells nothing of one case.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app import models
from figures import write


class VisionTransformer(nn.Module):
    """ViT-B/16 by its sizes: 12 layers of width 768, 12 heads, 1,000 classes, images of 224 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 768, 16, 16)
        self.places = nn.Parameter(torch.randn(1, 196, 768) / 50)
        layer = nn.TransformerEncoderLayer(768, 12, 3072, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 12, nn.LayerNorm(768), enable_nested_tensor=False)
        self.head = nn.Linear(768, 1000)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).mT + self.places
        logits: Tensor = self.head(self.layers(tokens).mean(1))
        return logits


def hand_written_tent(source: nn.Module, images: Tensor) -> Callable[[], object]:
    model = copy.deepcopy(source)
    parameters: list[Tensor] = []
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)):
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


def adapted(source: nn.Module, images: Tensor, preset: str, **options: Any) -> Callable[[], object]:
    adapter = df.adapt(source, preset, **options)
    return lambda: adapter(images)


def tuned(step: Callable[[], object], bf16: bool) -> Callable[[], object]:
    """A step for which cuDNN tries its algorithms, under autocast if wanted."""

    def run() -> None:
        before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
        try:
            with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                step()
        finally:
            torch.backends.cudnn.benchmark = before

    return run


def cases_on(source: nn.Module, images: Tensor) -> dict[str, Callable[[], object]]:
    cases = {"hand-written TENT": hand_written_tent(source, images)}
    cases |= {preset: adapted(source, images, preset) for preset in ("tent", "opgd_diag", "opgd", "driftfilter")}
    if images.device.type == "cpu":
        layouts: dict[str, dict[str, Any]] = {
            "driftfilter, channels last": {},
            "driftfilter, channels last, no monitor": {"monitor": None},
        }
        more = {name: adapted(source, images, "driftfilter", channels_last=True, **own) for name, own in layouts.items()}
        return cases | more
    last = torch.channels_last
    source, images = copy.deepcopy(source).to(memory_format=last), images.contiguous(memory_format=last)  # type: ignore[call-overload]
    cases["hand-written TENT, tuned"] = tuned(hand_written_tent(source, images), bf16=False)
    fast = {
        "tent, fast": adapted(source, images, "tent"),
        "driftfilter, fast": adapted(source, images, "driftfilter"),
        "driftfilter, fast, no monitor": adapted(source, images, "driftfilter", monitor=None),
        "driftfilter, fast, graphs": adapted(source, images, "driftfilter", cuda_graphs=True),
        "driftfilter, fast, graphs, no monitor": adapted(source, images, "driftfilter", cuda_graphs=True, monitor=None),
        "driftfilter_aug, fast": adapted(source, images, "driftfilter_aug"),
        "driftfilter_aug, fast, graphs": adapted(source, images, "driftfilter_aug", cuda_graphs=True),
    }
    return cases | {name: tuned(step, bf16=True) for name, step in fast.items()}


def network(name: str, weights: Path | None) -> nn.Module:
    """A network of this name, with random weights where it has no others."""
    if name == "vit_b":
        return VisionTransformer()
    shipped = weights is not None or name in models.SHIPPED
    return models.load(name, weights) if shipped else models.build(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet20", choices=[*models.ARCHITECTURES, "vit_b"])
    parser.add_argument("--weights", type=Path, help="weights file for a network that does not ship with the package")
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()

    source = network(arguments.model, arguments.weights).eval().to(arguments.device)
    pixels = 224 if arguments.model == "vit_b" else 32
    images = torch.rand(arguments.batch, 3, pixels, pixels, generator=torch.Generator().manual_seed(0)).to(arguments.device)
    cases = cases_on(source, images)
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
    figures = {"model": arguments.model, "batch": arguments.batch, "ms": medians, "peak MiB": peaks}
    write(arguments.json, figures, device=arguments.device)


if __name__ == "__main__":
    main()

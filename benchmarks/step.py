"""One adaptation step on a network beside a minimal hand-written TENT step; ratios from one run.

    python benchmarks/step.py [--model resnet20] [--weights FILE] [--batch 200] [--device cpu] \
        [--rounds 9] [--json FILE]

The hand-written step is forward, entropy, backward and torch's Adam on the norm parameters, nothing
else. Every case adapts to the same batch and predicts before the step, as TENT does. "Fast": on a
GPU bfloat16 autocast, channels last, and cuDNN tries its algorithms; the others are as torch has it
by itself (TF32 convolutions). "Tuned": TF32 with the latter two. With batch norm `driftfilter`
predicts with Gaussian logits of the variance that its update shows (Moderated), without it at a
temperature of 2, unless a case says otherwise. Times are medians, which leave out the monitor's
probe of every few batches, and means, which do not. Peak memory on a GPU is what torch took from it
in four steps in a process of the case's own, captured graphs included.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app import models
from figures import write


class VisionTransformer(nn.Module):
    """ViT-B/16 by its sizes: 12 layers of width 768, 12 heads, 1,000 classes, images of 224
    pixels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 768, 16, 16)
        self.places = nn.Parameter(torch.randn(1, 196, 768) / 50)
        layer = nn.TransformerEncoderLayer(
            768, 12, 3072, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, 12, nn.LayerNorm(768), enable_nested_tensor=False
        )
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
                module.track_running_stats, module.running_mean, module.running_var = (
                    False,
                    None,
                    None,
                )
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


def trying_algorithms(step: Callable[[], object]) -> Callable[[], object]:
    """A step for which cuDNN tries its algorithms."""

    def run() -> None:
        before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
        try:
            step()
        finally:
            torch.backends.cudnn.benchmark = before

    return run


def tuned_tent(source: nn.Module, images: Tensor) -> Callable[[], object]:
    last = torch.channels_last
    model = copy.deepcopy(source).to(memory_format=last)  # type: ignore[call-overload]
    return trying_algorithms(hand_written_tent(model, images.contiguous(memory_format=last)))


def cases_on(source: nn.Module, images: Tensor) -> dict[str, Callable[[], Callable[[], object]]]:
    """How each case is made."""
    cases: dict[str, Callable[[], Callable[[], object]]] = {
        "hand-written TENT": partial(hand_written_tent, source, images),
        **{
            preset: partial(adapted, source, images, preset)
            for preset in ("tent", "opgd_diag", "opgd", "driftfilter")
        },
    }
    if images.device.type == "cpu":
        last = partial(adapted, source, images, "driftfilter", channels_last=True)
        return cases | {
            "driftfilter, channels last": last,
            "driftfilter, channels last, no monitor": partial(last, monitor=None),
            "driftfilter, channels last, MAP": partial(last, prediction=df.MAP()),
        }
    cases["hand-written TENT, tuned"] = partial(tuned_tent, source, images)

    def fast(preset: str, **options: Any) -> Callable[[], Callable[[], object]]:
        every: dict[str, Any] = {"channels_last": True, "autocast": torch.bfloat16, **options}
        return lambda: trying_algorithms(adapted(source, images, preset, **every))

    graphs: dict[str, Any] = {"cuda_graphs": True}
    return cases | {
        "tent, fast": fast("tent"),
        "driftfilter, fast": fast("driftfilter"),
        "driftfilter, fast, no monitor": fast("driftfilter", monitor=None),
        "driftfilter, fast, graphs": fast("driftfilter", **graphs),
        "driftfilter, fast, graphs, no monitor": fast("driftfilter", monitor=None, **graphs),
        "driftfilter, fast, graphs, MAP": fast("driftfilter", prediction=df.MAP(), **graphs),
        "driftfilter, fast, graphs, 4 draws of logits": fast(
            "driftfilter", prediction=df.LinearizedGaussian(4), **graphs
        ),
        "driftfilter_aug, fast": fast("driftfilter_aug"),
        "driftfilter_aug, fast, graphs": fast("driftfilter_aug", **graphs),
    }


def network(name: str, weights: Path | None) -> nn.Module:
    """A network of this name, with random weights where it has no others."""
    if name == "vit_b":
        return VisionTransformer()
    shipped = weights is not None or name in models.SHIPPED
    return models.load(name, weights) if shipped else models.build(name)


def peak(name: str) -> float:
    """MiB that torch takes from the GPU for one case, in a process of its own."""
    told = subprocess.run(
        [sys.executable, *sys.argv, "--only", name], capture_output=True, text=True, check=True
    )
    return float(told.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="resnet20", choices=[*models.ARCHITECTURES, "vit_b"])
    parser.add_argument(
        "--weights",
        type=Path,
        help="weights file for a network that does not ship with the package",
    )
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", help="run one case, and print the memory that it took on the GPU")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()

    source = network(arguments.model, arguments.weights).eval().to(arguments.device)
    pixels = 224 if arguments.model == "vit_b" else 32
    images = torch.rand(
        arguments.batch, 3, pixels, pixels, generator=torch.Generator().manual_seed(0)
    ).to(arguments.device)
    possible = cases_on(source, images)
    if arguments.only:
        step = possible[arguments.only]()
        for _ in range(4):  # as ever, captured, replayed
            step()
        print(torch.cuda.max_memory_reserved() / 2**20)
        return
    cases = {name: make() for name, make in possible.items()}
    times: dict[str, list[float]] = {name: [] for name in cases}
    order = random.Random(
        0
    )  # a step pays for the memory that the one before it gave back to the system
    for round_ in range(
        arguments.rounds + 3
    ):  # the first three warm up; cases take turns, so that noise hits them alike
        for name, step in order.sample(list(cases.items()), len(cases)):
            if arguments.device == "cuda":
                torch.cuda.synchronize()
            begun = time.perf_counter()
            step()
            if arguments.device == "cuda":
                torch.cuda.synchronize()
            if round_ >= 3:
                times[name].append(1e3 * (time.perf_counter() - begun))
    medians = {name: statistics.median(values) for name, values in times.items()}
    means = {name: statistics.fmean(values) for name, values in times.items()}
    peaks: dict[str, float] = {}
    if arguments.device == "cuda":
        with ThreadPoolExecutor(5) as pool:
            peaks = dict(zip(cases, pool.map(peak, cases), strict=True))
    base = medians["hand-written TENT"]
    where = (
        torch.cuda.get_device_name()
        if arguments.device == "cuda"
        else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    date = datetime.date.today().isoformat()
    print(
        f"{arguments.model}, batch {arguments.batch}, {where}, torch {torch.__version__}, {date}\n"
    )
    print(
        f"{'one step':<46}{'ms':>9}{'ratio':>8}{'mean':>9}"
        + (f"{'peak MiB':>10}{'ratio':>8}" if peaks else "")
    )
    for name, median in medians.items():
        memory = (
            f"{peaks[name]:>10.0f}{peaks[name] / peaks['hand-written TENT']:>8.2f}" if peaks else ""
        )
        print(f"{name:<46}{median:>9.1f}{median / base:>8.2f}{means[name]:>9.1f}{memory}")
    figures = {
        "model": arguments.model,
        "batch": arguments.batch,
        "ms": medians,
        "mean ms": means,
        "peak MiB": peaks,
    }
    write(arguments.json, figures, device=arguments.device)


if __name__ == "__main__":
    main()

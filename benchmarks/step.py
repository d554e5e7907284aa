"""One adaptation step on a network beside a minimal hand-written TENT step; ratios from one run.

    python benchmarks/step.py [--model resnet20] [--weights FILE] [--batch 200] [--device cpu] \
        [--rounds 9] [--cases PATTERN] [--memory PATTERN] [--json FILE]

The hand-written step is forward, entropy, backward and torch's Adam on the norm parameters, nothing
else; "forward alone" and "forward and backward alone" are the floor. Every case adapts to the same
batches, the images that ship with the package under speckle noise (for a ViT-B at 224 pixels),
never the same batch twice, and predicts before the step, as TENT does. Without more words a case is
what `df.adapt(model, preset)` does by itself. On a GPU "fast" is bfloat16 autocast and channels
last as options, without graphs unless they are named, and cuDNN tries its algorithms; the others
are as torch has it by itself (TF32 convolutions). "Tuned": TF32, channels last, and cuDNN tries its
algorithms. With batch norm `driftfilter` predicts with Gaussian logits of the variance that its
update shows (Moderated), without it at a temperature of 2, unless a case says otherwise. Times are
those of the clock on a GPU and of the processor on a CPU, medians, which leave out what comes in
every few batches, such as the monitor's probe, and means, which do not. Peak memory on a GPU is
what torch took from it in twelve steps in a process of the case's own, captured graphs included.
Below the table stands who has met more than one domain, and which measures for speed are off.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app import corruptions, models, streams
from figures import write

Step: TypeAlias = Callable[[Tensor], object]


BASE = "hand-written TENT"
WARM = 16  # rounds before: a graph is captured in the fourth


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


def with_parameters(source: nn.Module) -> tuple[nn.Module, list[Tensor]]:
    """A copy that normalises by the batch, and its norm parameters; no others have gradients."""
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
    return model, parameters


def entropy(logits: Tensor) -> Tensor:
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()


def hand_written_tent(source: nn.Module) -> Step:
    model, parameters = with_parameters(source)
    optimizer = torch.optim.Adam(parameters, 1e-3)

    def step(images: Tensor) -> Tensor:
        logits: Tensor = model(images)
        loss = entropy(logits)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return logits

    return step


def forward_and_backward(source: nn.Module) -> Step:
    model, parameters = with_parameters(source)
    return lambda images: torch.autograd.grad(entropy(model(images)), parameters)


def adapted(source: nn.Module, preset: str, **options: Any) -> Step:
    return df.adapt(source, preset, **options)


def trying_algorithms(step: Step) -> Step:
    """A step for which cuDNN tries its algorithms."""

    def run(images: Tensor) -> None:
        before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
        try:
            step(images)
        finally:
            torch.backends.cudnn.benchmark = before

    return run


def tuned_tent(source: nn.Module) -> Step:
    last = torch.channels_last
    model = copy.deepcopy(source).to(memory_format=last)  # type: ignore[call-overload]
    step = hand_written_tent(model)
    return trying_algorithms(lambda images: step(images.contiguous(memory_format=last)))


def cases_on(source: nn.Module, device: str) -> dict[str, Callable[[], Step]]:
    """How each case is made."""
    default = partial(adapted, source, "driftfilter")
    plain: dict[str, Any] = {"channels_last": False, "cuda_graphs": False}
    cases: dict[str, Callable[[], Step]] = {
        BASE: partial(hand_written_tent, source),
        "forward alone": lambda: torch.no_grad()(source),
        "forward and backward alone": partial(forward_and_backward, source),
        **{preset: partial(adapted, source, preset) for preset in ("tent", "opgd_diag", "opgd")},
        "driftfilter": default,
        "driftfilter, speed='fast'": partial(default, speed="fast"),
        "driftfilter, without measures for speed": partial(default, **plain),
    }
    if device == "cpu":
        return cases | {
            "driftfilter, no monitor": partial(default, monitor=None),
            "driftfilter, MAP": partial(default, prediction=df.MAP()),
        }
    cases["hand-written TENT, tuned"] = partial(tuned_tent, source)

    def fast(preset: str, **options: Any) -> Callable[[], Step]:
        half: dict[str, Any] = {"channels_last": True, "autocast": torch.bfloat16}
        every = half | {"cuda_graphs": False} | options
        return lambda: trying_algorithms(adapted(source, preset, **every))

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


def batches_of(model: str, size: int, device: str, count: int) -> list[Tensor]:
    """Batches that cases see one after the other. The same ones again would look like clusters of
    samples to whoever looks for domains: images come back with other noise, in another order.
    """
    generator = torch.Generator().manual_seed(0)
    if model == "vit_b":
        pixels = streams.sample_images().images[: size * count]
        batches = [
            pixels[at] for at in torch.randint(len(pixels), (count, size), generator=generator)
        ]
        return [
            nn.functional.interpolate(each + 0.1 * torch.rand(each.shape), (224, 224)).to(device)
            for each in batches
        ]
    pixels = streams.sample_images().images
    found: list[Tensor] = []
    while len(found) < count:
        seed, order = len(found), torch.randperm(len(pixels), generator=generator)
        images = corruptions.corrupt(pixels[order], "speckle_noise", 5, seed)
        found += [part.to(device) for part in images.split(size) if len(part) == size]
    return found


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


def now(device: str) -> float:
    """Seconds: of the processor, or of the clock once a GPU has done all that it was given."""
    if not device.startswith("cuda"):
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


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
    parser.add_argument("--cases", default="", help="a pattern of cases beside the first (all)")
    parser.add_argument("--memory", default="", help="a pattern of cases whose memory counts (all)")
    parser.add_argument("--only", help="run one case, and print the memory that it took on the GPU")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()

    source = network(arguments.model, arguments.weights).eval().to(arguments.device)
    count = arguments.rounds + WARM
    batches = batches_of(arguments.model, arguments.batch, arguments.device, count)
    possible = cases_on(source, torch.device(arguments.device).type)
    if arguments.only:
        step = possible[arguments.only]()
        for number in range(12):  # as ever, captured, replayed
            step(batches[number % len(batches)])
        print(torch.cuda.max_memory_reserved() / 2**20)
        return
    chosen = (name for name in possible if name == BASE or re.search(arguments.cases, name))
    cases = {name: possible[name]() for name in chosen}
    times: dict[str, list[float]] = {name: [] for name in cases}
    order = random.Random(
        0
    )  # a step pays for the memory that the one before it gave back to the system
    for round_ in range(
        arguments.rounds + WARM
    ):  # the first ones warm up; cases take turns, so that noise hits them alike
        images = batches[round_ % len(batches)]
        for name, step in order.sample(list(cases.items()), len(cases)):
            begun = now(arguments.device)
            step(images)
            if round_ >= WARM:
                times[name].append(1e3 * (now(arguments.device) - begun))
    medians = {name: statistics.median(values) for name, values in times.items()}
    means = {name: statistics.fmean(values) for name, values in times.items()}
    peaks: dict[str, float] = {}
    if arguments.device == "cuda":
        counted = [name for name in cases if re.search(arguments.memory, name)]
        with ThreadPoolExecutor(5) as pool:
            peaks = dict(zip(counted, pool.map(peak, counted), strict=True))
    base = medians[BASE]
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
        known = name in peaks and BASE in peaks
        memory = f"{peaks[name]:>10.0f}{peaks[name] / peaks[BASE]:>8.2f}" if known else ""
        print(f"{name:<46}{median:>9.1f}{median / base:>8.2f}{means[name]:>9.1f}{memory}")
    for name, step in cases.items():
        if isinstance(step, df.Adapter):
            refused = [str(each) for each in step.measures if not each.is_on]
            print(f"{name}: {len(step.domains)} domain(s), off: {', '.join(refused) or 'nothing'}")
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

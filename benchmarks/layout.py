"""Whether channels last and bfloat16 pay on a CPU, network by network; ratios from one run.

    python benchmarks/layout.py [--models resnet20,resnet20_gn] [--weights FOLDER] [--batch 32] \
        [--rounds 7] [--json FILE]

The pass that a step needs: forward by the batch's statistics, entropy, backward to the norm
parameters; and a forward pass alone. "First" is torch's own layout, "input last" lays out the
images alone, "both last" the weights of convolutions too. Processor time, cases in random order;
the rule of networks/layout.py was chosen by it.
"""

from __future__ import annotations

import argparse
import random
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from driftfilter.app import models
from driftfilter.networks.shared_copy import _in_plain_format
from figures import header, write
from step import Step, entropy, with_parameters

WARM = 2


def one_pass(
    source: nn.Module, last: bool = False, weights: bool = False, half: bool = False
) -> Step:
    model, parameters = with_parameters(source)
    for layer in model.modules():
        if isinstance(layer, nn.GroupNorm):  # as twins have it: torch's crashes the process
            layer.register_forward_pre_hook(_in_plain_format)
    if weights:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def step(images: Tensor) -> None:
        if last:
            images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            logits = model(images).float()
        torch.autograd.grad(entropy(logits), parameters)

    return step


def forward(source: nn.Module, last: bool) -> Step:
    def step(images: Tensor) -> None:
        if last:
            images = images.contiguous(memory_format=torch.channels_last)
        with torch.no_grad():
            source(images)

    return step


def measure(source: nn.Module, images: Tensor, rounds: int) -> dict[str, float]:
    """Least ms of every case."""
    one = partial(one_pass, source)
    cases = {
        "first": one(),
        "input last": one(last=True),
        "both last": one(last=True, weights=True),
        "bfloat16, first": one(half=True),
        "bfloat16, input last": one(last=True, half=True),
        "forward, first": forward(source, last=False),
        "forward, input last": forward(source, last=True),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    order = random.Random(0)
    for number in range(rounds + WARM):
        for name, step in order.sample(list(cases.items()), len(cases)):
            begun = time.process_time()
            step(images)
            if number >= WARM:
                times[name].append(1e3 * (time.process_time() - begun))
    return {name: min(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="resnet20,resnet20_gn")
    parser.add_argument("--weights", type=Path, help="folder of weights that do not ship")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(", ".join(f"{key} {value}" for key, value in header().items()))
    images = torch.rand(arguments.batch, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    found = {}
    for name in arguments.models.split(","):
        folder = arguments.weights
        shipped = name in models.SHIPPED
        own = None if shipped or folder is None else folder / f"{name}.safetensors"
        known = shipped or own is not None  # timing needs no trained weights
        source = (models.load(name, own) if known else models.build(name)).eval()
        found[name] = measure(source, images, arguments.rounds)
        base = found[name]["first"]
        cells = (f"{case} {spent:.1f} ({spent / base:.2f})" for case, spent in found[name].items())
        print(f"{name}, batch {arguments.batch}: {', '.join(cells)}", flush=True)
    write(arguments.json, {"batch": arguments.batch, "ms": found})


if __name__ == "__main__":
    main()

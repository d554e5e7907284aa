"""Predictions of many adapters over one network: ``df.predict_together`` beside one adapter's
prediction of a batch as large as one of theirs, all of theirs one after the other, and a forward
pass of all samples; and the memory of the last adapter.

    python benchmarks/together.py [--model resnet20] [--device cpu] [--adapters 100] [--batch 1]
        [--preset driftfilter] [--rounds 10] [--json FILE]

Adapters have seen two batches of 16 each. Times are medians, cases taking turns; memory is that of
tensors alone, each storage once.
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

import driftfilter as df
from driftfilter.app import models
from figures import write


def held() -> int:
    """Bytes of all tensors that there are, on whatever device."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = [each for each in gc.get_objects() if isinstance(each, Tensor)]
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in every
    }
    return sum(storages.values())


def measured(cases: dict[str, Callable[[], object]], rounds: int, device: str) -> dict[str, float]:
    """Median milliseconds of each case; the first two rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds + 2):
        for name, case in cases.items():
            begun = time.perf_counter()
            case()
            if device != "cpu":
                torch.cuda.synchronize()
            times[name].append(1e3 * (time.perf_counter() - begun))
    return {name: median(values[2:]) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="resnet20", help="a name of driftfilter.app.models")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--preset", default="driftfilter")
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    device, n = arguments.device, arguments.batch
    shipped = arguments.model in models.SHIPPED
    model = models.load(arguments.model) if shipped else models.ARCHITECTURES[arguments.model]()
    model = model.eval().to(device)
    adapters, bytes_held = [], [held()]
    for _ in range(arguments.adapters):
        adapters.append(df.adapt(model, arguments.preset))
        for _ in range(2):
            adapters[-1](torch.rand(16, 3, 32, 32, device=device))
        if len(adapters) >= arguments.adapters - 1:
            bytes_held.append(held())
    batches = list(torch.rand(arguments.adapters, n, 3, 32, 32, device=device))

    def forward() -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(torch.cat(batches))
        return logits

    one, several = adapters[0], list(zip(adapters, batches, strict=True))
    cases: dict[str, Callable[[], object]] = {
        "one": lambda: one.predict(batches[0]),
        "together": lambda: df.predict_together(adapters, batches),
        "one by one": lambda: [adapter.predict(batch) for adapter, batch in several],
        "forward pass of all": forward,
    }
    times = measured(cases, arguments.rounds, device)
    last = bytes_held[-1] - bytes_held[-2]
    print(f"{arguments.adapters} adapters, {arguments.preset}, {n} samples each, {device}")
    for name, value in times.items():
        print(f"{name:<22}{value:>9.2f} ms{value / times['one']:>8.1f}")
    print(f"the last adapter: {last / 2**20:.3f} MiB of tensors")
    figures = {"adapters": arguments.adapters, "batch": n, "preset": arguments.preset, "ms": times}
    write(arguments.json, {**figures, "model": arguments.model, "bytes of the last": last})


if __name__ == "__main__":
    main()

"""One stream over several processes on the CPU: time of a step beside one process, and what is
exchanged.

    python benchmarks/distributed.py [--ranks 2] [--batch 200] [--steps 8] [--model resnet20] \
        [--json FILE]

The same batches in one process and then divided evenly over gloo ranks of one thread each; medians
over the steps after the first two. Bytes are what a rank sends in a step: each tensor once,
whatever way the backend takes. The check is the time in which a rank works out the checksums of its
state.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import driftfilter as df
from driftfilter.app import models
from driftfilter.distributed.ranks import ProcessRanks
from driftfilter.distributed.stream import digest
from figures import write

PRESETS = ("tent", "opgd_diag", "opgd", "driftfilter")


class Count:
    """Messages and bytes that pass through the ranks' two collectives."""

    def __init__(self) -> None:
        self.messages, self.bytes = 0, 0
        gather, total = ProcessRanks.gather, ProcessRanks.total
        ProcessRanks.gather = lambda ranks, tensor: gather(ranks, self.seen(tensor))  # type: ignore[assignment, method-assign]
        ProcessRanks.total = lambda ranks, tensor: total(ranks, self.seen(tensor))  # type: ignore[assignment, method-assign]

    def seen(self, tensor: Tensor) -> Tensor:
        self.messages, self.bytes = (
            self.messages + 1,
            self.bytes + tensor.numel() * tensor.element_size(),
        )
        return tensor


def measured(preset: str, arguments: argparse.Namespace, rank: int, ranks: int) -> dict[str, Any]:
    count = Count()
    adapter = df.adapt(models.build(arguments.model), preset, monitor=None, distributed=ranks > 1)
    generator, times = torch.Generator().manual_seed(0), []
    checks, group = [], adapter._ranks
    for step in range(arguments.steps + 2):
        batch = torch.rand(arguments.batch, 3, 32, 32, generator=generator).tensor_split(ranks)[
            rank
        ]
        if step == 2:
            count.messages = count.bytes = 0
        start = time.perf_counter()
        adapter(batch)
        times.append(time.perf_counter() - start)
        if group is not None:
            known, start = group.digests, time.perf_counter()
            digest(group, adapter._now.to_compare(adapter.recipe))
            checks.append(time.perf_counter() - start)
            group.digests = known  # the next call does it again
    each = {"messages": count.messages // arguments.steps, "bytes": count.bytes // arguments.steps}
    check = 1000 * statistics.median(checks[2:] or [0.0])
    return {"milliseconds": 1000 * statistics.median(times[2:]), "check": check, **each}


def work(rank: int, ranks: int, folder: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meeting{ranks}", rank=rank, world_size=ranks
        )
    found = {}
    for preset in PRESETS:
        torch.manual_seed(0)
        found[preset] = measured(preset, arguments, rank, ranks)
    if rank == 0:
        Path(folder, f"{ranks}.json").write_text(json.dumps(found), encoding="utf-8")
    if ranks > 1:  # neither ends before the other is done
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--model", default="resnet20", choices=list(models.ARCHITECTURES))
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, arguments.ranks):
            spawn(work, (ranks, folder, arguments), ranks)
        one, several = (
            json.loads(Path(folder, f"{ranks}.json").read_text()) for ranks in (1, arguments.ranks)
        )
    print(
        f"{arguments.model}, batch {arguments.batch}, one thread a rank, "
        f"{platform.processor() or platform.machine()}"
    )
    print(
        f"preset        1 rank ms  {arguments.ranks} ranks ms  speed-up  check ms  messages  bytes "
        "sent by a rank"
    )
    for preset in PRESETS:
        alone, shared = one[preset]["milliseconds"], several[preset]["milliseconds"]
        sent = several[preset]
        print(
            f"{preset:12}  {alone:9.1f}  {shared:10.1f}  {alone / shared:8.2f}  "
            f"{sent['check']:8.2f}  {sent['messages']:8}  {sent['bytes']:,}"
        )
    figures = {
        "model": arguments.model,
        "batch": arguments.batch,
        "ranks": arguments.ranks,
        "one": one,
        "several": several,
    }
    write(arguments.json, figures, threads=1)


if __name__ == "__main__":
    main()

"""A benchmark small enough for tests: a network, data, tasks, and a display that remembers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from driftfilter.app.bench import bench
from driftfilter.app.bench.prepare import parse_choices
from driftfilter.app.bench.protocols import StreamSettings
from driftfilter.app.bench.task import Bench, Task, run_task
from driftfilter.app.machine import Machine
from driftfilter.app.networks.load_model import NamedNetwork
from driftfilter.app.streams import Generated, Images
from driftfilter.app.terminal import Shown

CPU = torch.device("cpu")
NAMES = ("gaussian_noise", "contrast", "brightness")


def uniform(*shape: int, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


class Tiny(nn.Module):
    """Four classes by pooled colours; batch norm gives the presets something to adapt."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.norm, self.head = nn.AvgPool2d(16), nn.BatchNorm1d(12), nn.Linear(12, 4)
        with torch.no_grad():
            self.head.weight.copy_(uniform(4, 12, seed=1) * 4 - 2)
            self.head.bias.zero_()
        self.norm.running_mean.fill_(0.5)  # type: ignore[union-attr]
        self.norm.running_var.fill_(0.01)  # type: ignore[union-attr]

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.pool(images).flatten(1)))
        return logits


class Broken(Tiny):
    def forward(self, images: Tensor) -> Tensor:
        raise RuntimeError("out of order")


def task_of(preset: str = "tent:lr=0.05", protocol: str = "reset", seed: int = 0) -> Task:
    return Task(parse_choices(preset)[0], parse_choices(protocol)[0], "tiny", seed)


def result_of(shared: Bench, *args: Any) -> dict[str, Any]:
    result: dict[str, Any] = run_task(shared, task_of(*args))["result"]
    return result


def accuracies(result: dict[str, Any]) -> dict[str, float]:
    return {row["corruption"]: row["accuracy"] for row in result["domains"]}


class Log:
    """A display that remembers."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.seen: list[tuple[int, int | None, str]] = []

    def __call__(self, title: str) -> Shown:
        self.begun.append(title)
        return Shown(self.watch, self.end)

    def watch(self, done: int, total: int | None, note: Callable[[], str]) -> None:
        self.seen.append((done, total, note()))

    def end(self, line: str) -> None:
        self.ended.append(line)


def make_data() -> Generated:
    """70 images of four colours, labeled by the network itself."""
    images = nn.functional.interpolate(uniform(70, 3, 4, 4, seed=2), size=(32, 32))
    return Generated(Images(images, Tiny().eval()(images).argmax(-1)))


def make_bench(data: Generated) -> Bench:
    """On the three corruptions, in batches of 20."""
    return Bench(
        data,
        {"tiny": NamedNetwork("tiny", Tiny().eval(), "0" * 64)},
        StreamSettings(NAMES, batch=20),
        Machine(CPU),
    )


def run_all(
    shared: Bench, folder: Path, *tasks: Task, command: str = ""
) -> tuple[list[dict[str, Any]], Log]:
    log = Log()
    documents = bench.run(shared, tasks, folder, log, command)
    return [document for document in documents if document is not None], log

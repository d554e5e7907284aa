"""One task of the benchmark: a preset on a model through one stream, and what is measured."""

import platform
import statistics
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

import driftfilter as df
from driftfilter.app.bench.evaluate import evaluate, pick_examples
from driftfilter.app.bench.follow import follow
from driftfilter.app.bench.outputs import Outputs, examine, require_classes, take_few
from driftfilter.app.bench.peers import PREFIX, SIZE, Checkout, Peer
from driftfilter.app.bench.protocols import PROTOCOLS, AnyProtocol, StreamPlan, StreamSettings
from driftfilter.app.images.files import digest
from driftfilter.app.machine import Machine
from driftfilter.app.networks.load_model import NamedNetwork
from driftfilter.app.parameter_shift import measure_shift
from driftfilter.app.readers.stored import CLEAN, Preparation
from driftfilter.app.streams import Domains
from driftfilter.app.terminal import Watch
from driftfilter.base.checks import Count, check_fields, nearest, require
from driftfilter.model.losses import as_loss

WARM_UP = 5  # steps that are not timed


class Choice(NamedTuple):
    """A name and options, written ``name:option=value,option=value``."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.name + "".join(
            f"{',' if i else ':'}{key}={value}" for i, (key, value) in enumerate(self.options)
        )


class SourceImages(NamedTuple):
    """Samples for the recipes whose source posterior, or loss, is made of source samples."""

    images: Tensor  # [n, 3, h, w], 8 bits
    labels: Tensor | None  # [n]
    path: str
    sha256: str  # of their file

    def describe(self) -> dict[str, Any]:
        """What a report says of these samples."""
        return {
            "path": self.path,
            "images": len(self.images),
            "labeled": self.labels is not None,
            "sha256": self.sha256,
        }

    def place(self, machine: Machine) -> df.SourceData:
        """The samples as the adapter takes them."""
        return df.SourceData(
            machine.pixels(self.images),
            None if self.labels is None else self.labels.to(machine.device),
        )


class Task(NamedTuple):
    """One stream from beginning to end."""

    preset: Choice
    protocol: Choice
    model: str
    seed: int
    batch: int | None = None  # None: the bench's, as for images
    images: int | None = None

    def __str__(self) -> str:
        batch = "" if self.batch is None else f" · batch {self.batch}"
        return f"{self.preset} · {self.protocol} · {self.model}{batch} · seed {self.seed}"

    @property
    def peer(self) -> str | None:
        """Name of the published method, if the preset is one; it has no recipe."""
        name = self.preset.name
        return name.removeprefix(PREFIX) if name.startswith(PREFIX) else None

    def recipe(self) -> df.Recipe:
        """Recipe of the preset; an error names what is not known."""
        return df.presets.get(self.preset.name, **dict(self.preset.options))

    def set_up(self, stream: StreamSettings) -> StreamSettings:
        """The stream with this seed, and with what else this task has of its own."""
        batch, images = self.batch or stream.batch, self.images or stream.images
        return replace(stream, seed=self.seed, batch=batch, images=images)

    def plan(self, stream: StreamSettings, data: Domains) -> StreamPlan:
        """Plan of the protocol, with what this task has of its own."""
        protocol = build_protocol(self.protocol)
        return protocol(self.set_up(stream), data.labels, data.members)


def build_protocol(choice: Choice) -> AnyProtocol:
    """The protocol of this name, with its options."""
    known = list(PROTOCOLS)
    require(
        choice.name in known,
        "protocol",
        choice.name,
        f"one of {known}{nearest(choice.name, known)}",
    )
    cls = PROTOCOLS[choice.name]
    possible = [item.name for item in fields(cls)]
    for key, _ in choice.options:
        require(
            key in possible,
            f"option of protocol {choice.name!r}",
            key,
            f"one of {possible}{nearest(key, possible)}",
        )
    return cls(**dict(choice.options))


@final
@dataclass(frozen=True, eq=False)
class Bench:
    """What all tasks share.

    ``window``: samples the adapter looks back on. ``before``: also predict every batch before the
    update. ``probe_every`` so many steps, and after the last, predict clean images (0: never).
    ``outputs`` is what is known of the models.
    """

    data: Domains
    networks: Mapping[str, NamedNetwork]
    stream: StreamSettings
    machine: Machine
    window: Count = 0
    before: bool = False
    probe_every: Count = 0
    source: SourceImages | None = None
    peers: Checkout | None = None
    outputs: dict[str, Outputs] = field(default_factory=dict, init=False, repr=False)
    _prepared: dict[Preparation | None, Domains] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        check_fields(self, "")
        if self.probe_every:
            self.data.require(CLEAN)

    @cached_property
    def source_data(self) -> df.SourceData | None:
        """The source samples on the machine of the tasks; cached, for it moves all of them."""
        return None if self.source is None else self.source.place(self.machine)

    def open_data(self, model: str) -> Domains:
        """The data as a network takes them; what is made of them is kept for the next task."""
        prepare = self.networks[model].prepare
        if prepare not in self._prepared:
            self._prepared[prepare] = self.data.prepared(prepare)
        return self._prepared[prepare]

    @property
    def path(self) -> str:
        """Where the data lie, as a report says it."""
        return str(self.data.path)

    @cached_property
    def description(self) -> dict[str, str]:
        """What a report says of the data; cached, for it reads all of them."""
        return self.data.describe()


def settings(bench: Bench, task: Task) -> dict[str, Any]:
    """All that determines a result, JSON-ready."""
    chosen, stream = build_protocol(task.protocol), task.set_up(bench.stream)
    return {
        "preset": str(task.preset),
        **_describe_method(bench, task),
        "protocol": {"name": str(task.protocol), **asdict(chosen)},
        "model": task.model,
        "weights_sha256": bench.networks[task.model].weights,
        "normalisation": "inside the model",
        "transform": bench.networks[task.model].describe_inputs(),
        "outputs": bench.networks[task.model].outputs,
        "stream": {
            **asdict(stream),
            "images": stream.images or len(bench.data.labels),
            "corruptions": list(stream.corruptions),
        },
        "data": bench.description,
        "window": bench.window,
        "before": bench.before,
        "probe_every": bench.probe_every,
        "source_data": bench.source.describe()
        if bench.source is not None and _wants_data(task)
        else None,
        **bench.machine.settings(),
        "versions": _versions(),
    }


def _describe_method(bench: Bench, task: Task) -> dict[str, str]:
    """The recipe, or of a peer their class, settings and files."""
    if task.peer is not None:
        batch = task.set_up(bench.stream).batch
        described = find_peers(bench.peers).describe(task.peer, dict(task.preset.options), batch)
        return {"recipe": described, "statistics": "theirs", "predict_from": "theirs"}
    recipe = task.recipe()
    modules = bench.networks[task.model].module.modules()
    normalized = any(isinstance(each, _BatchNorm) for each in modules)
    return {
        "recipe": repr(recipe),
        "statistics": str(recipe.statistics) if normalized else "none",
        "predict_from": recipe.predict_from,
    }


def find_peers(peers: Checkout | None) -> Checkout:
    """The checkout, known to be given."""
    require(peers is not None, "peers", None, f"a folder, for presets named {PREFIX}…")
    assert peers is not None
    return peers


@cache
def _versions() -> dict[str, str]:
    """Versions of what computes the results; ``code`` is a hash of this package's own code, which
    changes between versions.
    """
    return {
        "driftfilter": df.__version__,
        "code": digest(sorted(Path(df.__file__).parent.rglob("*.py")))[:12],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _wants_data(task: Task) -> bool:
    """Whether source samples would change a result; a peer gets them if there are any."""
    if task.peer is not None:
        return True
    recipe = task.recipe()
    loss = as_loss("Recipe.observation.loss", recipe.observation.loss)
    return recipe.measures_source or isinstance(recipe.source, df.Laplace) or loss.needs_source


def run_task(bench: Bench, task: Task, watch: Watch | None = None) -> dict[str, Any]:
    """Settings and results of a task, JSON-ready."""
    start = time.perf_counter()
    if bench.machine.cuda:
        torch.cuda.reset_peak_memory_stats(bench.machine.device)
    plan = task.plan(bench.stream, bench.data)
    with warnings.catch_warnings(record=True) as caught, bench.machine.ready():
        warnings.simplefilter("default")
        data = bench.open_data(task.model).with_seed(task.seed)
        fit = require_fit(bench, task, plan)
        adapter = _adapt(bench, task) if task.peer is None else _adapt_peer(bench, task, *fit)
        trace = follow(bench, adapter, data, plan, watch)
        moved = (
            []  # of a peer it is not known which of its weights are its parameters
            if isinstance(adapter, Peer)
            else measure_shift(adapter, bench.networks[task.model].module)
        )
    timed = trace.milliseconds[WARM_UP:] or trace.milliseconds
    return {
        "settings": settings(bench, task),
        "result": {
            **evaluate(trace, plan, bench),
            "probe": trace.probe,
            "alarms": trace.alarms,
            "movement": moved,
            "examples": pick_examples(trace, plan, data, bench.machine.device),
            "ms_per_step": statistics.median(timed),
            "steps": len(plan.steps),
            "timed_steps": len(timed),
            **bench.machine.peak_memory(),
            "seconds": time.perf_counter() - start,
            "warnings": sorted({str(item.message) for item in caught}),
        },
    }


def _adapt(bench: Bench, task: Task) -> df.Adapter:
    return df.adapt(
        bench.networks[task.model].module,
        task.preset.name,
        data=bench.source_data if _wants_data(task) else None,
        seed=task.seed,
        window=bench.window,
        monitor=df.Monitor.recording(),  # methods as published: an alarm changes nothing
        **dict(task.preset.options),
    )


def _adapt_peer(bench: Bench, task: Task, k: int, size: list[int]) -> Peer:
    machine = bench.machine
    require(size == [SIZE, SIZE], "image size for a peer", size, f"{SIZE} x {SIZE}")
    require(
        machine.cuda == torch.cuda.is_available(),
        "device for a peer",
        str(machine.device),
        "cuda if there is one: their code takes it",
    )
    return find_peers(bench.peers).build(
        str(task.peer),
        dict(task.preset.options),
        bench.networks[task.model].module,
        k,
        task.set_up(bench.stream).batch,
        task.seed,
        bench.source_data,
    )


def require_fit(bench: Bench, task: Task, plan: StreamPlan) -> Outputs:
    """Classes of the task's model, which is asked with the first samples, and height and width of
    an image; raise unless the model takes the data and has its classes.
    """
    if task.model not in bench.outputs:
        samples = take_few(bench.open_data(task.model), plan, bench.machine)
        module = bench.networks[task.model].module
        bench.outputs[task.model] = examine(task.model, module, samples, bench.machine)
    found, data = bench.outputs[task.model], bench.data
    given = [(f"data {bench.path}", data.labels)]
    require_classes(task.model, found.classes, given, data.counted)
    if bench.source is not None and bench.source.labels is not None and _wants_data(task):
        source = [(f"source {bench.source.path}", bench.source.labels)]
        require_classes(task.model, found.classes, source)
    return found

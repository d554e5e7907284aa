"""One task of the benchmark: a preset on a model through one stream, and what is measured."""

import platform
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

import driftfilter as df
from driftfilter.app.bench.evaluate import Trace, evaluate, pick_examples
from driftfilter.app.bench.peers import PREFIX, SIZE, Checkout, Peer
from driftfilter.app.bench.protocols import PROTOCOLS, AnyProtocol, Step, StreamPlan, StreamSettings
from driftfilter.app.images.files import digest
from driftfilter.app.machine import Machine
from driftfilter.app.networks.load_model import NamedNetwork
from driftfilter.app.parameter_shift import measure_shift
from driftfilter.app.readers.stored import CLEAN, Preparation, Samples, join
from driftfilter.app.streams import Domains
from driftfilter.app.terminal import Watch
from driftfilter.base.checks import Count, check_fields, nearest, require
from driftfilter.model.losses import as_loss

WARM_UP = 5  # steps that are not timed
PROBED = 500  # clean images


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
        k, size = _require_classes(bench, task, data, plan)
        adapter = _adapt(bench, task) if task.peer is None else _adapt_peer(bench, task, k, size)
        trace = _follow(bench, adapter, data, plan, watch)
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


def _require_classes(
    bench: Bench, task: Task, data: Domains, plan: StreamPlan
) -> tuple[int, list[int]]:
    """Classes of the model, which is asked with one sample, and height and width of an image; raise
    unless the model has the classes of the data.
    """
    first = plan.steps[0]
    image = data.take(plan.domains[int(first.domain[0])], first.index[:1], bench.machine.device)
    with torch.no_grad():
        outputs = call(bench.networks[task.model].module, bench.machine.inputs(image))
    shape = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    require(
        isinstance(outputs, Tensor) and outputs.dim() == 2 and len(outputs) == 1,
        f"output of model {task.model!r} for one sample",
        shape,
        "logits [1, classes]",
    )
    k = outputs.shape[-1]
    given = [(f"data {bench.description['path']}", bench.data.labels)]
    if bench.source is not None and bench.source.labels is not None and _wants_data(task):
        given.append((f"source {bench.source.path}", bench.source.labels))
    for name, labels in given:
        highest = int(labels.max())
        require(
            highest < k,
            f"labels of {name}",
            f"up to {highest}",
            f"below {k}, the classes of model {task.model!r}",
        )
    return k, list(image.shape[2:]) if isinstance(image, Tensor) else []


def _follow(
    bench: Bench, adapter: df.Adapter | Peer, data: Domains, plan: StreamPlan, watch: Watch | None
) -> Trace:
    """Take the adapter through all steps.

    The device is never waited for here, except by the watch and the probe when they look.
    """
    labels, machine = data.labels, bench.machine
    # A peer predicts as its code does: it is not asked.
    ask = (
        bench.before
        and not isinstance(adapter, Peer)
        and adapter.recipe.predict_from == "posterior"
    )
    clock, probe = _Clock(machine), _Probe(bench, data, len(plan.steps))
    outputs: list[Tensor] = []
    before: list[Tensor] = []
    right, seen, alarms = torch.zeros((), dtype=torch.int64, device=machine.device), 0, 0
    for number, step in enumerate(plan.steps):
        probe(adapter, number)  # before a reset, which would undo what it looks at
        if step.reset:
            alarms += len(adapter.events)
            adapter.reset()
        images = _take_batch(data, plan, step, machine)
        if ask:
            with machine.autocast():
                before.append(call(adapter.predict, images).labels)
        with clock, machine.autocast():
            outputs.append(call(adapter, images))
        if watch is not None:
            right = right + (outputs[-1].argmax(-1) == labels[step.index].to(machine.device)).sum()
            seen += len(step.index)
            watch(number + 1, len(plan.steps), partial(_describe, right / seen))
    probe(adapter, len(plan.steps))
    alarms += len(adapter.events)
    return Trace(
        torch.cat(outputs),
        torch.cat(before) if before else None,
        clock.milliseconds(),
        probe.accuracies(),
        alarms,
    )


def _describe(share: Tensor) -> str:
    return f"accuracy {share.item():.3f}"


def call(function: Callable[..., Any], samples: Samples) -> Any:
    """A model or an adapter on a batch: several inputs go by their names."""
    return function(samples) if isinstance(samples, Tensor) else function(**samples)


def _take_batch(data: Domains, plan: StreamPlan, step: Step, machine: Machine) -> Samples:
    """A batch as the model takes it, every sample from its own domain."""
    present = step.domain.unique().tolist()
    if len(present) == 1:
        return machine.inputs(data.take(plan.domains[present[0]], step.index, machine.device))
    places = [(step.domain == domain).nonzero().squeeze(1) for domain in present]
    parts = [
        data.take(plan.domains[domain], step.index[at], machine.device)
        for domain, at in zip(present, places, strict=True)
    ]
    return machine.inputs(join(parts, torch.cat(places).argsort().to(machine.device)))


class _Clock:
    """Milliseconds of each use, known at the end.

    On a GPU they are taken from marks in its queue, so that nobody waits.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._marks: list[Any] = []

    def _mark(self) -> None:
        if self._machine.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._machine.device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def __enter__(self) -> None:
        self._mark()

    def __exit__(self, *_: object) -> None:
        self._mark()

    def milliseconds(self) -> list[float]:
        pairs = list(zip(self._marks[::2], self._marks[1::2], strict=True))
        if not self._machine.cuda:
            return [1000 * (end - start) for start, end in pairs]
        torch.cuda.synchronize(self._machine.device)
        return [start.elapsed_time(end) for start, end in pairs]


class _Probe:
    """Accuracy on the first clean images, every so many steps and after the last."""

    def __init__(self, bench: Bench, data: Domains, steps: int) -> None:
        self._every, self._steps, self._machine = bench.probe_every, steps, bench.machine
        self._right: dict[int, Tensor] = {}
        if self._every:
            every = (
                torch.arange(len(data.labels)) if data.members is None else data.members["clean"]
            )
            index = every[:PROBED]
            clean = data.take(CLEAN, index, bench.machine.device)
            self._images = bench.machine.inputs(clean)
            self._labels = data.labels[index].to(bench.machine.device)

    def __call__(self, adapter: df.Adapter | Peer, step: int) -> None:
        if self._every and (step % self._every == 0 or step == self._steps):
            with self._machine.autocast():
                self._right[step] = (
                    (call(adapter.predict, self._images).labels == self._labels).double().mean()
                )

    def accuracies(self) -> list[dict[str, float]]:
        return [{"step": step, "accuracy": share.item()} for step, share in self._right.items()]

"""``driftfilter run``: adapt a user's own model over a user's own data, and go on where a run was ended or killed.

A run writes to one folder: what a checkpoint covers is a prefix of its journals, and what lies beyond is cut off on resuming.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import driftfilter as df
from driftfilter.app import summary
from driftfilter.app.bench import choices
from driftfilter.app.claims import claimed, holder
from driftfilter.app.feed import Batch, Feed, Form, Shapes, open_feed, open_labels, require_shapes, shapes_of
from driftfilter.app.files import Integers
from driftfilter.app.journal import Journal, Predictions, columns
from driftfilter.app.machine import Machine, machine_of
from driftfilter.app.own import open_model
from driftfilter.app.stopping import Stop
from driftfilter.app.task import peak_memory
from driftfilter.checks import require
from driftfilter.inputs import Inputs
from driftfilter.recipe import changed, to_dict

STATE = "state.safetensors"


@final
@dataclass(frozen=True)
class Options:
    """What ``driftfilter run`` can be told, as it is written there."""

    model: str
    data: str
    out: Path
    weights: str | None = None
    preset: str | None = None
    recipe: str | None = None
    set: Sequence[str] = ()
    source: str | None = None
    labels: str | None = None
    batch: int = 200
    window: int = 0
    update_every: int = 1
    seed: int = 0
    device: str = "auto"
    layout: Literal["auto", "first", "last"] = "auto"
    scale: float | None = None
    range: str | None = None
    integers: str = ""
    predictions: Literal["npz", "csv"] = "npz"
    checkpoint_every: int = 0
    keep: int = 1
    resume: bool = False
    live: bool = False
    on_bad_batch: Literal["stop", "skip"] = "stop"
    baseline: bool = False
    classes: str | None = None

    def settled(self) -> dict[str, Any]:
        """What must not change between the parts of a run, beside the model and the recipe, which a checkpoint knows."""
        names = ("batch", "seed", "layout", "scale", "range", "integers", "predictions", "baseline")
        return {**{name: getattr(self, name) for name in names}, "labels": "none" if self.labels is None else "given"}


class Tally(NamedTuple):
    """How far a run is."""

    step: int = 0
    rows: int = 0
    skipped: int = 0  # steps
    right: int = 0
    judged: int = 0  # samples whose label is known
    classes: int = 0  # 0: not known yet
    shapes: Shapes | None = None  # of a sample

    @property
    def accuracy(self) -> float | None:
        """Of the samples so far whose label is known."""
        return self.right / self.judged if self.judged else None


@final
@dataclass(frozen=True, eq=False)
class Made:
    """All that a run needs."""

    options: Options
    adapter: df.Adapter
    feed: Feed
    form: Form
    labels: Integers | None
    machine: Machine
    model: nn.Module
    source: df.Adapter | None = None  # the model as it is, where a baseline is asked for
    classes: tuple[str, ...] = ()  # their names

    @property
    def dtype(self) -> str:
        """Of what is written."""
        return "float64" if self.form.dtype == torch.float64 else "float32"


class BadBatchError(ValueError):
    """A batch that no model can be adapted to; the state is as if it had not come."""


# What the options say


def prepare(options: Options) -> Made:
    """All that is needed; a wrong option or missing file is an error here, before anything is written."""
    started = (options.out / "config.json").exists()
    allowed = "a folder without a run (or give --resume, to go on with that one)"
    require(options.resume or not started, "--out", str(options.out), allowed)
    machine = machine_of(options.device)
    feed = open_feed(options.data, frozenset(filter(None, options.integers.split(","))))
    labels = feed.labels if options.labels is None else open_labels(Path(options.labels), feed.count)
    model = machine.place(open_model(options.model, None if options.weights is None else Path(options.weights)))
    within = None if options.range is None else _range(options.range)
    form = Form(_dtype(model), machine.device, options.layout, options.scale, within)
    source = df.adapt(model, "source") if options.baseline else None
    classes = () if options.classes is None else summary.open_classes(Path(options.classes))
    return Made(options, _adapter(options, model, form), feed, form, labels, machine, model, source, classes)


def _dtype(model: nn.Module) -> torch.dtype:
    return next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)


def _range(text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        low, high = math.nan, math.nan
    require(low < high, "--range", text, "LOW,HIGH: two numbers, the lower one first")
    return low, high


def _adapter(options: Options, model: nn.Module, form: Form) -> df.Adapter:
    own: dict[str, Any] = {"seed": options.seed, "window": options.window, "update_every": options.update_every}
    if options.source is not None:
        source = open_feed(options.source)
        require(source.count is not None, "--source", options.source, "a file or folder")
        known = None if source.labels is None else torch.from_numpy(source.labels).to(form.device)
        own["data"] = df.SourceData(form(next(source.batches(source.count or 1, 0)).read()), known)
    if options.recipe is not None:
        require(options.preset is None, "--preset", options.preset, "left out where there is a --recipe")
        return _changed(df.adapt(model, _recipe(Path(options.recipe)), **own), options.set, model, own)
    (chosen, *others) = choices(options.preset or "driftfilter")
    require(not others, "--preset", options.preset, "one preset, as in tent:lr=0.001")
    return _changed(df.adapt(model, chosen.name, **own, **dict(chosen.options)), options.set, model, own)


def _changed(adapter: df.Adapter, settings: Sequence[str], model: nn.Module, own: dict[str, Any]) -> df.Adapter:
    """The adapter, or one whose recipe has some fields set, each written PATH=VALUE."""
    recipe = adapter.recipe
    for setting in settings:
        path, sign, text = setting.partition("=")
        require(bool(path and sign), "--set", setting, "PATH=VALUE, as in transition.dynamics.rho=0.99")
        try:
            recipe = changed(recipe, path, text)
        except (ValueError, TypeError) as error:
            raise ValueError(f"--set {setting}: {error}") from error
    return df.adapt(model, recipe, **own) if settings else adapter


def _recipe(path: Path) -> df.Recipe:
    require(path.is_file(), "--recipe", str(path), "a TOML file that is there")
    try:
        recipe = df.from_toml(path.read_text(encoding="utf-8"))
    except (ValueError, TypeError) as error:
        raise ValueError(f"--recipe {path}: {error}") from error
    require(isinstance(recipe, df.Recipe), f"--recipe {path}", type(recipe).__name__, 'of kind = "Recipe"')
    return recipe  # type: ignore[no-any-return]


# The run


@final
@dataclass(frozen=True)
class Ending:
    """How a run ended."""

    tally: Tally
    predictions: Path
    begun: int  # the step it began with
    signal: int | None = None
    error: str = ""


Watch = Callable[[Tally, int | None], None]  # told after every step how far it is, of how many samples


def run(made: Made, watch: Watch, warn: Callable[[str], None], command: str = "") -> Ending:
    """From the beginning, or from the checkpoint, to the end of the data, a signal or a bad batch; then the state is saved."""
    options, stop = made.options, Stop()
    options.out.mkdir(parents=True, exist_ok=True)
    with claimed(options.out / STATE) as mine, ExitStack() as stack:
        if not mine:
            raise ValueError(f"--out {options.out} is in use: {holder(options.out / STATE)}")
        first, sizes = _resumed(made)
        batches = made.feed.batches(options.batch, 0 if options.live else first.rows)
        files = _opened(made, first, sizes, stack)
        _write_config(made, command)
        summary.clear(options.out)
        with made.machine.ready(), stop.listening():
            last, error = _followed(files, first, stop.each(batches), watch, warn)
            files.save(last)
            ending = Ending(last, files.said.export(), first.step, stop.signal, error)
            _summed_up(files, ending)
            return ending


def _summed_up(files: _Files, ending: Ending) -> None:
    """For the report."""
    made, source, out = files.made, files.source, files.made.options.out
    if source is not None:
        source.export()
    finished = summary.Finished(files.said.logs(), None if source is None else source.logs(), made.labels, made.classes)
    why = summary.write_examples(out, finished, made.feed, made.form)
    memory, what = peak_memory(made.machine)
    ended = {"signal": ending.signal, "error": ending.error, "no_examples": why, "tally": ending.tally._asdict()}
    others = {**ended, "peak_memory_mb": memory, "peak_memory_of": what}
    summary.write(out, finished, made.adapter, made.model, others)


class _Files(NamedTuple):
    made: Made
    steps: Journal
    said: Predictions
    source: Predictions | None

    def save(self, tally: Tally) -> None:
        """The journals first: a checkpoint must not cover what is not on the disk."""
        sizes = {"steps": self.steps.sync(), "predictions": self.said.journal.sync()}
        sizes |= {} if self.source is None else {"baseline": self.source.journal.sync()}
        notes = {"settled": self.made.options.settled(), "tally": tally._asdict(), "sizes": sizes}
        df.save(self.made.adapter, self.made.options.out / STATE, self.made.options.keep, notes)


def _opened(made: Made, tally: Tally, sizes: dict[str, int], stack: ExitStack) -> _Files:
    """The journals, cut to what the checkpoint covers."""
    steps = stack.enter_context(closing(Journal(made.options.out / "steps.jsonl", sizes.get("steps", 0))))

    def said(stem: str) -> Predictions:
        known = (tally.rows, tally.classes, sizes.get(stem, 0))
        found = Predictions(made.options.out, made.options.predictions, made.dtype, *known, stem)
        stack.enter_context(closing(found.journal))
        return found

    return _Files(made, steps, said("predictions"), None if made.source is None else said("baseline"))


def _followed(
    files: _Files, tally: Tally, batches: Iterable[Batch], watch: Watch, warn: Callable[[str], None]
) -> tuple[Tally, str]:
    """One step after the other: how far it came, and which bad batch ended it."""
    options = files.made.options
    for batch in batches:
        try:
            tally, line = _stepped(files, tally, batch)
        except BadBatchError as bad:
            if options.on_bad_batch == "stop":
                return tally, f"step {tally.step} (samples {tally.rows} to {tally.rows + batch.rows - 1}): {bad}"
            warn(f"step {tally.step} skipped: {bad}")
            for said in filter(None, (files.said, files.source)):
                said.skip(batch.rows)
            line = {"step": tally.step, "n": batch.rows, "skipped": str(bad)}
            tally = tally._replace(step=tally.step + 1, rows=tally.rows + batch.rows, skipped=tally.skipped + 1)
        files.steps.append((json.dumps(line) + "\n").encode())
        if options.checkpoint_every and tally.step % options.checkpoint_every == 0:
            files.save(tally)
        watch(tally, files.made.feed.count)
    return tally, ""


def _resumed(made: Made) -> tuple[Tally, dict[str, int]]:
    """How far the checkpoint is, and the sizes of the journals then; the adapter goes on from it."""
    path = made.options.out / STATE
    if not made.options.resume or not path.exists():
        return Tally(), {}
    notes = df.load(made.adapter, path)
    require("tally" in notes, str(path), "a checkpoint of something else", "one of driftfilter run")
    settled = json.loads(json.dumps(made.options.settled()))
    for name, before in {"baseline": False, **notes["settled"]}.items():
        allowed = f"{before!r}, as it was when the run began (or give another --out)"
        require(settled[name] == before, f"--{name}", settled[name], allowed)
    return Tally(**notes["tally"]), notes["sizes"]


def _write_config(made: Made, command: str) -> None:
    """What was asked for, what it means, and with what it was run; for the reader, nothing depends on it."""
    try:
        recipe: Any = to_dict(made.adapter.recipe)
    except ValueError:
        recipe = repr(made.adapter.recipe)
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(made.options).items()}
    document = {
        "command": command,
        "options": options,
        "recipe": recipe,
        "samples": made.feed.count,
        "model": made.adapter.fingerprint._asdict(),
        "machine": made.machine.settings(),
        "versions": {"driftfilter": df.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    summary.write_json(made.options.out / "config.json", document)


def _stepped(files: _Files, tally: Tally, batch: Batch) -> tuple[Tally, dict[str, Any]]:
    """Adapt to a batch and predict it: how far the run is then, and its line in the log."""
    made = files.made
    begun, before, known = time.perf_counter(), made.adapter.last_info, made.adapter.events
    inputs, logs, source, apart = _predicted(made, tally, batch)
    _require_classes(made, tally, logs.shape[1])
    files.said.append(logs)
    right, judged = _judged(made, tally, logs)
    after = tally._replace(right=tally.right + right, judged=tally.judged + judged, classes=logs.shape[1])
    after = after._replace(step=tally.step + 1, rows=tally.rows + batch.rows, shapes=shapes_of(inputs))
    info = made.adapter.last_info
    new = info is not None and info is not before
    line = {
        "step": tally.step,
        "n": batch.rows,
        "energy": _number(info.energy) if info is not None and new else None,
        "used": int((info.weights != 0).sum()) if info is not None and new else 0,
        "entropy": _number(columns(logs).entropy.mean()),
        **({} if after.accuracy is None else {"accuracy": after.accuracy, "judged": judged, "right": right}),
        **({"alarms": alarms} if (alarms := _since(known, made.adapter.events)) else {}),
        "ms": round(1000 * (time.perf_counter() - begun - apart), 3),
    }
    if source is not None and files.source is not None:
        files.source.append(source)
        line |= {"baseline_entropy": _number(columns(source).entropy.mean())}
        line |= {} if after.accuracy is None else {"baseline_right": _judged(made, tally, source)[0]}
    return after, line


def _since(known: tuple[df.Event, ...], events: tuple[df.Event, ...]) -> list[str]:
    """Events that were not there before; neither their number tells, for old ones are dropped, nor equality with old ones."""
    old = set(map(id, known))
    return [str(event) for event in events if id(event) not in old]


def _number(value: Any) -> float | None:
    """For JSON, which knows no NaN."""
    return float(value) if math.isfinite(value) else None


class _Said(NamedTuple):
    inputs: Inputs
    logs: NDArray[Any]  # log-probabilities [n, k]
    source: NDArray[Any] | None  # of the model as it is [n, k], where asked for
    apart: float  # seconds that took


def _predicted(made: Made, tally: Tally, batch: Batch) -> _Said:
    """Of a batch; the adapter, which comes last, as it was where that fails."""
    try:
        inputs = made.form(batch.read())
        require_shapes(inputs, tally.shapes)
        named = inputs if isinstance(inputs, dict) else {}
        given = () if named else (inputs,)
        begun, source = time.perf_counter(), None
        if made.source is not None:
            source = made.source.predict(*given, **named).log_probabilities.cpu().numpy().astype(made.dtype)
        apart = time.perf_counter() - begun
        return _Said(inputs, made.adapter(*given, **named).cpu().numpy().astype(made.dtype), source, apart)
    except torch.OutOfMemoryError:
        raise  # nothing is wrong with the batch
    except (ValueError, TypeError) as error:
        raise BadBatchError(str(error)) from error
    except (RuntimeError, IndexError) as error:
        raise BadBatchError(f"the model failed: {str(error).partition(chr(10))[0]}") from error


def _require_classes(made: Made, tally: Tally, k: int) -> None:
    """Raise at the first batch where labels or names are not of the model's k classes."""
    if tally.classes:
        return
    highest = -1 if made.labels is None else int(made.labels.max())
    require(highest < k, "labels", f"up to {highest}", f"below {k}, the classes of the model")
    require(
        len(made.classes) in (0, k), "--classes", f"{len(made.classes)} names", f"{k} names, one for each class of the model"
    )


def _judged(made: Made, tally: Tally, logs: NDArray[Any]) -> tuple[int, int]:
    """How many of these samples are right, of how many whose label is known."""
    if made.labels is None:
        return 0, 0
    known = made.labels[tally.rows : tally.rows + len(logs)]
    return int(np.sum(logs[: len(known)].argmax(1) == known)), len(known)

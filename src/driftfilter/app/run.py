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
from driftfilter.app.bench import choices
from driftfilter.app.claims import claimed, holder
from driftfilter.app.feed import Batch, Feed, Form, Shapes, open_feed, open_labels, require_shapes, shapes_of
from driftfilter.app.files import Integers
from driftfilter.app.journal import Journal, Predictions, columns
from driftfilter.app.machine import Machine, machine_of
from driftfilter.app.own import open_model
from driftfilter.app.stopping import Stop
from driftfilter.checks import require
from driftfilter.inputs import Inputs
from driftfilter.recipe import changed, to_dict
from driftfilter.whole import whole_file

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

    def settled(self) -> dict[str, Any]:
        """What must not change between the parts of a run, beside the model and the recipe, which a checkpoint knows."""
        names = ("batch", "seed", "layout", "scale", "range", "integers", "predictions")
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
    return Made(options, _adapter(options, model, form), feed, form, labels, machine)


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
        with made.machine.ready(), stop.listening():
            last, error = _followed(files, first, stop.each(batches), watch, warn)
            files.save(last)
            return Ending(last, files.said.export(), first.step, stop.signal, error)


class _Files(NamedTuple):
    made: Made
    steps: Journal
    said: Predictions

    def save(self, tally: Tally) -> None:
        """The journals first: a checkpoint must not cover what is not on the disk."""
        sizes = {"steps": self.steps.sync(), "predictions": self.said.journal.sync()}
        notes = {"settled": self.made.options.settled(), "tally": tally._asdict(), "sizes": sizes}
        df.save(self.made.adapter, self.made.options.out / STATE, self.made.options.keep, notes)


def _opened(made: Made, tally: Tally, sizes: dict[str, int], stack: ExitStack) -> _Files:
    """The journals, cut to what the checkpoint covers."""
    out, kind = made.options.out, made.options.predictions
    steps = stack.enter_context(closing(Journal(out / "steps.jsonl", sizes.get("steps", 0))))
    said = Predictions(out, kind, made.dtype, tally.rows, tally.classes, sizes.get("predictions", 0))
    stack.enter_context(closing(said.journal))
    return _Files(made, steps, said)


def _followed(
    files: _Files, tally: Tally, batches: Iterable[Batch], watch: Watch, warn: Callable[[str], None]
) -> tuple[Tally, str]:
    """One step after the other: how far it came, and which bad batch ended it."""
    options = files.made.options
    for batch in batches:
        try:
            tally, line = _stepped(files.made, tally, batch, files.said)
        except BadBatchError as bad:
            if options.on_bad_batch == "stop":
                return tally, f"step {tally.step} (samples {tally.rows} to {tally.rows + batch.rows - 1}): {bad}"
            warn(f"step {tally.step} skipped: {bad}")
            files.said.skip(batch.rows)
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
    for name, before in notes["settled"].items():
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
    with whole_file(made.options.out / "config.json") as file:
        file.write((json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())


def _stepped(made: Made, tally: Tally, batch: Batch, said: Predictions) -> tuple[Tally, dict[str, Any]]:
    """Adapt to a batch and predict it: how far the run is then, and its line in the log."""
    begun, before, known = time.perf_counter(), made.adapter.last_info, made.adapter.events
    inputs, logs = _predicted(made, tally, batch)
    said.append(logs)
    after = _judged(made, tally, logs)._replace(
        step=tally.step + 1, rows=tally.rows + batch.rows, classes=logs.shape[1], shapes=shapes_of(inputs)
    )
    info = made.adapter.last_info
    new = info is not None and info is not before
    line = {
        "step": tally.step,
        "n": batch.rows,
        "energy": _number(info.energy) if info is not None and new else None,
        "used": int((info.weights != 0).sum()) if info is not None and new else 0,
        "entropy": _number(columns(logs).entropy.mean()),
        **({} if after.accuracy is None else {"accuracy": after.accuracy}),
        **({"alarms": alarms} if (alarms := _since(known, made.adapter.events)) else {}),
        "ms": round(1000 * (time.perf_counter() - begun), 3),
    }
    return after, line


def _since(known: tuple[df.Event, ...], events: tuple[df.Event, ...]) -> list[str]:
    """Events that were not there before; neither their number tells, for old ones are dropped, nor equality with old ones."""
    old = set(map(id, known))
    return [str(event) for event in events if id(event) not in old]


def _number(value: Any) -> float | None:
    """For JSON, which knows no NaN."""
    return float(value) if math.isfinite(value) else None


def _predicted(made: Made, tally: Tally, batch: Batch) -> tuple[Inputs, NDArray[Any]]:
    """The inputs of a batch and their log-probabilities [n, k]; the adapter as it was where that fails."""
    try:
        inputs = made.form(batch.read())
        require_shapes(inputs, tally.shapes)
        logs = made.adapter(**inputs) if isinstance(inputs, dict) else made.adapter(inputs)
        return inputs, logs.cpu().numpy().astype(made.dtype)
    except torch.OutOfMemoryError:
        raise  # nothing is wrong with the batch
    except (ValueError, TypeError) as error:
        raise BadBatchError(str(error)) from error
    except (RuntimeError, IndexError) as error:
        raise BadBatchError(f"the model failed: {str(error).partition(chr(10))[0]}") from error


def _judged(made: Made, tally: Tally, logs: NDArray[Any]) -> Tally:
    """With the labels of these samples, as far as they are known."""
    if made.labels is None:
        return tally
    if not tally.classes:
        highest = int(made.labels.max())
        require(highest < logs.shape[1], "labels", f"up to {highest}", f"below {logs.shape[1]}, the classes of the model")
    known = made.labels[tally.rows : tally.rows + len(logs)]
    right = int(np.sum(logs[: len(known)].argmax(1) == known))
    return tally._replace(right=tally.right + right, judged=tally.judged + len(known))

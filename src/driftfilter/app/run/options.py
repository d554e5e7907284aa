"""What ``driftfilter run`` can be told, and all that a run needs by that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import nn

import driftfilter as df
from driftfilter.app.bench.bench import choices
from driftfilter.app.images.files import Integers
from driftfilter.app.machine import Machine, machine_of
from driftfilter.app.run import summary
from driftfilter.app.run.load_model import open_model
from driftfilter.app.run.reader import Feed, Form, open_feed, open_labels
from driftfilter.base.checks import require
from driftfilter.recipe import change


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
    stdin_continues: bool = False
    on_bad_batch: Literal["stop", "skip"] = "stop"
    baseline: bool = False
    classes: str | None = None

    def settled(self) -> dict[str, Any]:
        """What must not change between the parts of a run, beside the model and the recipe, which a
        checkpoint knows.
        """
        names = ("batch", "seed", "layout", "scale", "range", "integers", "predictions", "baseline")
        return {
            **{name: getattr(self, name) for name in names},
            "labels": "none" if self.labels is None else "given",
        }


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


def prepare(options: Options) -> Made:
    """All that is needed; a wrong option or missing file is an error here, before anything is
    written.
    """
    started = (options.out / "config.json").exists()
    allowed = "a folder without a run (or give --resume, to go on with that one)"
    require(options.resume or not started, "--out", str(options.out), allowed)
    for option in ("stdin_continues", "integers"):
        given = getattr(options, option)
        require(
            not given or options.data == "-",
            f"--{option.replace('_', '-')}",
            options.data,
            "left out unless DATA is -",
        )
    machine = machine_of(options.device)
    feed = open_feed(options.data, frozenset(filter(None, options.integers.split(","))))
    labels = (
        feed.labels if options.labels is None else open_labels(Path(options.labels), feed.count)
    )
    model = machine.place(
        open_model(options.model, None if options.weights is None else Path(options.weights))
    )
    within = None if options.range is None else _range(options.range)
    form = Form(_dtype(model), machine.device, options.layout, options.scale, within)
    source = df.adapt(model, "source") if options.baseline else None
    classes = () if options.classes is None else summary.open_classes(Path(options.classes))
    return Made(
        options, _adapter(options, model, form), feed, form, labels, machine, model, source, classes
    )


def _dtype(model: nn.Module) -> torch.dtype:
    return next(
        (each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32
    )


def _range(text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        low, high = math.nan, math.nan
    require(low < high, "--range", text, "LOW,HIGH: two numbers, the lower one first")
    return low, high


def _adapter(options: Options, model: nn.Module, form: Form) -> df.Adapter:
    own: dict[str, Any] = {
        "seed": options.seed,
        "window": options.window,
        "update_every": options.update_every,
    }
    if options.source is not None:
        source = open_feed(options.source)
        require(source.count is not None, "--source", options.source, "a file or folder")
        known = None if source.labels is None else torch.from_numpy(source.labels).to(form.device)
        own["data"] = df.SourceData(form(next(source.batches(source.count or 1, 0)).read()), known)
    if options.recipe is not None:
        require(
            options.preset is None, "--preset", options.preset, "left out where there is a --recipe"
        )
        return _changed(
            df.adapt(model, _recipe(Path(options.recipe)), **own), options.set, model, own
        )
    (chosen, *others) = choices(options.preset or "driftfilter")
    require(not others, "--preset", options.preset, "one preset, as in tent:lr=0.001")
    return _changed(
        df.adapt(model, chosen.name, **own, **dict(chosen.options)), options.set, model, own
    )


def _changed(
    adapter: df.Adapter, settings: Sequence[str], model: nn.Module, own: dict[str, Any]
) -> df.Adapter:
    """The adapter, or one whose recipe has some fields set, each written PATH=VALUE."""
    recipe = adapter.recipe
    for setting in settings:
        path, sign, text = setting.partition("=")
        require(
            bool(path and sign), "--set", setting, "PATH=VALUE, as in transition.dynamics.rho=0.99"
        )
        try:
            recipe = change(recipe, path, text)
        except (ValueError, TypeError) as error:
            raise ValueError(f"--set {setting}: {error}") from error
    return df.adapt(model, recipe, **own) if settings else adapter


def _recipe(path: Path) -> df.Recipe:
    require(path.is_file(), "--recipe", str(path), "a TOML file that is there")
    try:
        recipe = df.from_toml(path.read_text(encoding="utf-8"))
    except (ValueError, TypeError) as error:
        raise ValueError(f"--recipe {path}: {error}") from error
    require(
        isinstance(recipe, df.Recipe),
        f"--recipe {path}",
        type(recipe).__name__,
        'of kind = "Recipe"',
    )
    return recipe  # type: ignore[no-any-return]

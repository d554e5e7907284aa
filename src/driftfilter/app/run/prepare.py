"""From the options of ``driftfilter run`` to all that a run needs."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import driftfilter as df
from driftfilter.app.bench.prepare import parse_choices
from driftfilter.app.images.files import Integers
from driftfilter.app.machine import Machine, choose_machine
from driftfilter.app.networks.load_model import open_model
from driftfilter.app.run import summary
from driftfilter.app.run.late_labels import LateLabels
from driftfilter.app.run.options import AdapterOptions, RunOptions
from driftfilter.app.run.reader import Feed, Form, open_feed, open_labels
from driftfilter.base.checks import require
from driftfilter.inference.linearized import choose_for_labels
from driftfilter.recipe import change


class PreparedRun(NamedTuple):
    """All that a run needs."""

    options: RunOptions
    adapter: df.Adapter
    feed: Feed
    form: Form
    labels: Integers | None
    machine: Machine
    model: nn.Module
    source: df.Adapter | None = None  # the model as it is, if a baseline is asked for
    classes: tuple[str, ...] = ()  # their names
    late: LateLabels | None = None  # labels to learn

    @property
    def dtype(self) -> str:
        """Type of the numbers that are written."""
        return "float64" if self.form.dtype == torch.float64 else "float32"


def prepare(options: RunOptions) -> PreparedRun:
    """All that is needed; a wrong option or a missing file is an error here, before anything is
    written.
    """
    require_free(options)
    for option in ("stdin_continues", "integers"):
        require(
            not getattr(options, option) or options.data == "-",
            f"--{option.replace('_', '-')}",
            options.data,
            "left out unless DATA is -",
        )
    machine = choose_machine(options.device)
    feed = open_feed(options.data, frozenset(filter(None, options.integers.split(","))))
    labels, late = feed.labels, None
    if options.labels is not None and options.labels_are_late:
        late = LateLabels.open(Path(options.labels), feed)
    elif options.labels is not None:
        labels = open_labels(Path(options.labels), feed.count)
    weights = None if options.weights is None else Path(options.weights)
    model = machine.place(open_model(options.model, weights).module)
    within = None if options.range is None else parse_range(options.range)
    form = Form(find_dtype(model), machine.device, options.layout, options.scale, within)
    steps = {"window": options.window, "update_every": options.update_every}
    adapter = build_adapter(options, model, form, **steps)
    if late is not None:
        choose_for_labels(adapter.recipe.inference)  # refused now, not at every label
    return PreparedRun(
        options=options,
        feed=feed,
        form=form,
        labels=labels,
        machine=machine,
        model=model,
        source=df.adapt(model, "source", speed=options.speed) if options.baseline else None,
        classes=() if options.classes is None else summary.open_classes(Path(options.classes)),
        adapter=adapter,
        late=late,
    )


def require_free(options: RunOptions) -> None:
    """Raise if there is a run in the folder that is not to be resumed."""
    require(
        options.resume or not (options.out / "config.json").exists(),
        "--out",
        str(options.out),
        "a folder without a run (or give --resume, to go on with that one)",
    )


def find_dtype(model: nn.Module) -> torch.dtype:
    """The type of a model's numbers."""
    return next(
        (each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32
    )


def parse_range(text: str) -> tuple[float, float]:
    """Two bounds, written LOW,HIGH."""
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        low, high = math.nan, math.nan
    require(low < high, "--range", text, "LOW,HIGH: two numbers, the lower one first")
    return low, high


def build_adapter(
    options: AdapterOptions, model: nn.Module, form: Form, **steps: Any
) -> df.Adapter:
    """The adapter of a preset or a recipe, with the fields that --set names; ``steps``: further
    arguments of ``adapt``.
    """
    own: dict[str, Any] = {"seed": options.seed, "speed": options.speed, **steps}
    if options.source is not None:
        source = open_feed(options.source)
        require(source.count is not None, "--source", options.source, "a file or folder")
        known = None if source.labels is None else torch.from_numpy(source.labels).to(form.device)
        own["data"] = df.SourceData(form(next(source.batches(source.count or 1, 0)).read()), known)
    if options.recipe is not None:
        require(
            options.preset is None, "--preset", options.preset, "left out if there is a --recipe"
        )
        adapter = df.adapt(model, _read_recipe(Path(options.recipe)), **own)
    else:
        (chosen, *more) = parse_choices(options.preset or "driftfilter")
        require(not more, "--preset", options.preset, "one preset, as in tent:lr=0.001")
        adapter = df.adapt(model, chosen.name, **own, **dict(chosen.options))
    recipe = _set_fields(adapter.recipe, options.set)
    return df.adapt(model, recipe, **own) if options.set else adapter


def _set_fields(recipe: df.Recipe, settings: Sequence[str]) -> df.Recipe:
    """The recipe with some fields set, each written PATH=VALUE."""
    for setting in settings:
        path, sign, text = setting.partition("=")
        require(
            bool(path and sign), "--set", setting, "PATH=VALUE, as in transition.dynamics.rho=0.99"
        )
        try:
            recipe = change(recipe, path, text)
        except (ValueError, TypeError) as error:
            option = "" if "." in path else f" (an option of a preset: --preset NAME:{setting})"
            raise ValueError(f"--set {setting}: {error}{option}") from error
    return recipe


def _read_recipe(path: Path) -> df.Recipe:
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

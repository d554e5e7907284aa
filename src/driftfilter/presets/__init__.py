"""The table of presets by name: published methods (published.py, weight_filters.py and
more_published.py), the paper's and ours (ours.py).

``for_model`` gives the recipe of one for a model.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from driftfilter.base.checks import nearest, require, warn
from driftfilter.networks.alignment import find_alignable
from driftfilter.networks.parameters import NormAffine
from driftfilter.presets.more_published import MORE
from driftfilter.presets.ours import OURS, UNUSED, Norms
from driftfilter.presets.published import PUBLISHED
from driftfilter.recipe import Recipe

PRESETS: dict[str, Callable[..., Recipe]] = {
    preset.__name__: preset for preset in (*PUBLISHED, *MORE, *OURS)
}

# At their published rates only for networks with batch normalisation: they push every sample,
# certain or not, and on the shipped network with group normalisation they fall below the source
# (docs/presets.md).
FOR_BATCH_NORM = (
    *("tent", "pl", "rpl", "conjugate", "ewc", "slr", "roid", "cmf", "slwi", "ssa", "bacs"),
    *("come", "deyo", "santa"),
)

# Presets that ask what norms a network has, and what they do then.
BY_NORMS = ("driftfilter", "driftfilter_aug")
_REASONS = {
    "batch": "it has batch norm: statistics are carried, logits centred, norm parameters adapt",
    "measured": "it has batch norm: statistics are carried, logits centred, norm parameters adapt, "
    "while the stream is farther from the source data than chance moves it",
    "aligned": "it has norm layers but no batch norm, and there are source data: their statistics "
    "are carried behind the norms, logits centred, norm parameters adapt",
    "other": "it has norm layers but no batch norm: logits are centred, norm parameters adapt "
    "(inputs of the source, data=, would give its norms statistics too, tables excepted)",
    "none": "it has no norm layer with parameters: logits are centred, the last layer adapts",
    "frozen": "it has quantised layers, which no gradient passes, or neither norm parameters nor a "
    "linear layer: logits are centred, that is all",
}


def explain(model: nn.Module, data: bool = False) -> str:
    """What the default does with a network, and why; ``data``: there are source data, no table."""
    return _REASONS[find_norms(model, data)]


def for_model(
    model: nn.Module,
    name: str,
    options: Mapping[str, Any],
    beside: Sequence[str] = (),
    data: bool = False,
) -> Recipe:
    """The recipe of a preset, with what is safe for the norms of a network unless an option says
    otherwise; ``data``: whether there are source data, other than tables.
    """
    layers = list(model.modules()) if isinstance(model, nn.Module) else []
    by_batch = any(isinstance(layer, _BatchNorm) for layer in layers)
    by_group = any(isinstance(layer, nn.GroupNorm) for layer in layers) and not by_batch
    if name in FOR_BATCH_NORM and "lr" not in options and by_group:
        warn(
            f"{name!r} at its published rate was seen to lose accuracy under group norm "
            "(docs/presets.md); lower lr"
        )
    fitting = {"norms": find_norms(model, data)} if name in BY_NORMS and layers else {}
    return recipe_of(name, {**fitting, **options}, beside)


def find_norms(model: nn.Module, data: bool = False) -> Norms:
    """Which norms a network has whose parameters could be adapted: "batch" if there is one of
    batch normalisation ("measured" with source ``data``), "aligned" if others can have statistics
    of source ``data``, "other" or "none"; "frozen" if it has quantised layers, or neither norms nor
    a linear layer.
    """
    if any(".quantized" in type(layer).__module__ for layer in model.modules()):
        return "frozen"
    if not NormAffine()(model):
        has_head = any(isinstance(layer, nn.Linear) for layer in model.modules())
        return "none" if has_head else "frozen"
    if any(isinstance(layer, _BatchNorm) for layer in model.modules()):
        return "measured" if data else "batch"
    return "aligned" if data and find_alignable(model) else "other"


def names() -> list[str]:
    """The names of all presets."""
    return list(PRESETS)


def get(name: str, **options: Any) -> Recipe:
    """The recipe of a preset, with some of its hyper-parameters, or fields of the recipe, changed.

    >>> get("tent", lr=0.01).inference
    GradientStep(rule=Adam(lr=0.01, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0), anchor=0.0,
                 radius=0.0, reference=0, keep_gradient=False)
    """
    return recipe_of(name, options)


def recipe_of(name: str, options: Mapping[str, Any], beside: Sequence[str] = ()) -> Recipe:
    """The recipe of a preset with options; the error about an unknown one names those ``beside``
    the preset's, too.
    """
    require(
        isinstance(name, str) and name in PRESETS,
        "preset",
        name,
        f"one of {names()}{nearest(str(name), names())}",
    )
    signature = inspect.signature(PRESETS[name])
    own = {key: value for key, value in options.items() if key in signature.parameters}
    others = {key: value for key, value in options.items() if key not in own}
    unused = UNUSED.get(own.get("norms", "batch"), ()) if name in BY_NORMS else ()
    for key in (each for each in own if each in unused):
        used = [each for each in signature.parameters if each not in unused]
        warn(
            f"option {key!r} of preset {name!r}, {own[key]!r}, does nothing for a network with "
            f"norms={own['norms']!r}: those that do are {used}"
        )
    known_fields = [item.name for item in fields(Recipe)]
    for key in others:
        possible = [*signature.parameters, *known_fields, *beside]
        require(
            key in known_fields,
            f"option of preset {name!r}",
            key,
            f"one of {possible}{nearest(key, possible)}",
        )
    return replace(PRESETS[name](**own), **others)

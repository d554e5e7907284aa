"""``driftfilter inspect``: what adaptation would change in a model, and what it would cost."""

import re
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import driftfilter as df
from driftfilter.adapter.speed import Speed
from driftfilter.app import profiling
from driftfilter.app.models import ARCHITECTURES
from driftfilter.app.networks.load_model import NamedNetwork, open_model
from driftfilter.app.profiling import Profile
from driftfilter.base.checks import require
from driftfilter.networks.layers import is_norm

SUBSETS: tuple[df.Selection, ...] = (df.NormAffine(), df.Head(), df.AllParameters())
TIMED = ("source", "tent", "driftfilter")  # presets: no update, a plain one, the default
REPEATS = 5


class Subset(NamedTuple):
    """What a selection takes of a model."""

    selection: str
    tensors: int
    numbers: int  # d
    names: list[str]
    problem: str = ""  # why it takes nothing

    def memory(self) -> dict[str, float]:
        """Megabytes of a belief over it in float32, by covariance; beside it, a batch of n has n d
        numbers of gradients.
        """
        d = self.numbers
        return {
            "diagonal": 8 * d / 1e6,
            "low rank 10": 4 * 12 * d / 1e6,
            "full": 4 * (d + d * d) / 1e6,
        }


class Inspection(NamedTuple):
    """All that is known of a model without data."""

    model: str
    transform: str  # of samples, in words
    parameters: int
    norms: dict[str, int]  # layers by kind
    batch_norm: bool
    subsets: list[Subset]
    milliseconds: dict[str, float]  # a step of a preset on random inputs; empty: not timed
    batch: int
    default: str  # what the default preset does with it, and why
    profile: Profile | None = None  # the parts of a step, if somebody asks

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        subsets = [{**subset._asdict(), "memory_mb": subset.memory()} for subset in self.subsets]
        profile = None if self.profile is None else self.profile.to_dict()
        return {**self._asdict(), "profile": profile, "subsets": subsets}


def inspect(
    text: str,
    weights: Any,
    shape: tuple[int, ...] | None,
    batch: int,
    speed: Speed = "exact",
    profiled: bool = False,
) -> Inspection:
    """Inspect a model given by name or ``package.module:factory``; steps are timed, and the default
    is ``profiled`` if somebody asks, if the shape of an input is known.
    """
    opened = open_model(text, weights)
    model = opened.module
    shape = _guess_shape(opened) if shape is None else shape
    require(
        shape is not None or not profiled,
        "--profile",
        "no shape",
        "with --input, the shape of a sample, as in --input 3,32,32",
    )
    norms = Counter(type(layer).__name__ for layer in model.modules() if is_norm(layer))
    return Inspection(
        opened.name,
        opened.describe_inputs(),
        sum(parameter.numel() for parameter in model.parameters()),
        dict(norms),
        any(isinstance(layer, _BatchNorm) for layer in model.modules()),
        [_subset(model, each) for each in SUBSETS],
        {} if shape is None else _time(model, torch.rand(batch, *shape), speed),
        batch,
        df.presets.explain(model),
        _profile(model, batch, shape, speed) if profiled and shape is not None else None,
    )


def _profile(model: nn.Module, batch: int, shape: tuple[int, ...], speed: Speed) -> Profile:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about accuracy, which random inputs have none of
        return profiling.profile(model, profiling.make_batches(batch, shape), speed=speed)


def _guess_shape(opened: NamedNetwork) -> tuple[int, ...] | None:
    """Shape of an image as the network takes it; None if nobody says it."""
    crop = opened.transform.crop or opened.transform.resize
    if crop is not None:
        return (3, crop, crop) if isinstance(crop, int) else (3, *crop)
    return (3, 32, 32) if re.split("[=,]", opened.name)[0] in ARCHITECTURES else None


def _subset(model: nn.Module, selection: df.Selection) -> Subset:
    try:
        chosen = df.select(model, selection)
    except ValueError as error:
        return Subset(str(selection), 0, 0, [], str(error))
    return Subset(
        str(selection), len(chosen), sum(piece.numel() for piece in chosen.values()), list(chosen)
    )


def _time(model: nn.Module, inputs: Tensor, speed: Speed) -> dict[str, float]:
    """Median milliseconds of the model itself and of a step of some presets."""
    with torch.no_grad():
        try:
            logits = model(inputs)
        except (RuntimeError, ValueError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"--input {list(inputs.shape[1:])} must be the shape of a sample, but the model "
                f"failed: {reason}"
            ) from error
    require(
        isinstance(logits, Tensor) and logits.dim() == 2,
        "MODEL",
        type(logits).__name__,
        "one that returns logits [n, k]",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about accuracy, which random inputs have none of
        adapters = {name: df.adapt(model, name, speed=speed) for name in TIMED}
    calls: dict[str, Callable[[Tensor], Any]] = {"model": torch.no_grad()(model), **adapters}
    return {name: _median(call, inputs) for name, call in calls.items()}


def _median(call: Callable[[Tensor], Any], inputs: Tensor) -> float:
    call(inputs)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call(inputs)
        times.append(1000 * (time.perf_counter() - start))
    return sorted(times)[REPEATS // 2]


def describe(found: Inspection, names: bool) -> list[str]:
    """What was found, as lines for a terminal."""
    norms = ", ".join(f"{count} {kind}" for kind, count in found.norms.items()) or "none"
    out = [
        f"{found.model}: {found.parameters:,} parameters; norm layers: {norms}",
        f"transform: {found.transform}",
        f"the default: {found.default}",
        "",
        f"{'subset':<26}{'tensors':>8}{'numbers':>13}   belief in MB: diagonal, low rank 10, full",
    ]
    for subset in found.subsets:
        sizes = ", ".join(f"{size:,.3g}" for size in subset.memory().values())
        out.append(
            f"{subset.selection:<26}{subset.tensors:>8}{subset.numbers:>13,}   "
            f"{subset.problem or sizes}"
        )
        out.extend(f"    {name}" for name in subset.names if names)
    if not found.milliseconds:
        return [
            *out,
            "",
            "cost: give the shape of a sample, as in --input 3,32,32, to have it timed",
        ]
    base = found.milliseconds["model"]
    times = (f"{name} {ms:.1f} ms ({ms / base:.1f}×)" for name, ms in found.milliseconds.items())
    out += ["", f"cost of a batch of {found.batch} on this machine: {', '.join(times)}"]
    return out if found.profile is None else [*out, "", *profiling.describe(found.profile)]

"""Everything a filter remembers as named tensors, and back: what a checkpoint holds."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from driftfilter.base.checks import LATE, require, require_finite, require_squarable, unchecked
from driftfilter.base.inputs import Inputs
from driftfilter.base.memory import require_forms
from driftfilter.base.tensors import have_same_values, map_tensors
from driftfilter.filtering import FilterState
from driftfilter.gaussian.belief import Belief
from driftfilter.gaussian.covariance import Covariance

_MEMORY = "memory."
RECENT = "recent."  # samples that a window or the next update still needs


def to_tensors(state: FilterState, with_source: bool = True) -> dict[str, Tensor]:
    """The state as tensors by name."""
    seed = (state.seed + (1 << 63)) % (1 << 64) - (1 << 63)  # its lower 64 bits are all that counts
    counts = {"step": torch.tensor(state.step), "seed": torch.tensor(seed)}
    memory = {_MEMORY + name: value for name, value in state.memory.items()}
    source = source_to_tensors(state) if with_source else {}
    return {**counts, **_flat("belief", state.belief), **source, **memory}


def source_to_tensors(state: FilterState) -> dict[str, Tensor]:
    """The source of a state as tensors by name."""
    return _flat("source", state.source)


def from_tensors(tensors: Mapping[str, Tensor], like: FilterState) -> FilterState:
    """The state that named tensors describe, of the structure of another one; refused unless all of
    it is there, of the right kind and finite.
    """
    for name, value in tensors.items():
        if value.is_floating_point():
            require_finite(
                f"state {name!r}", value.masked_fill(value == torch.inf, 0.0)
            )  # empty supports have entropy ∞
    belief, source = _built("belief", like.belief, tensors), _built("source", like.source, tensors)
    for name, each in (("belief", belief), ("source", source)):
        require_squarable(f"state '{name}.mean'", each.mean)
        variance = each.covariance.variance()
        require_finite(f"state '{name}.covariance'", variance)
        require(
            bool((variance >= 0).all()),
            f"state '{name}.covariance'",
            variance.min().item(),
            "of variances >= 0",
        )
    kept = {
        name.removeprefix(_MEMORY): value
        for name, value in tensors.items()
        if name.startswith(_MEMORY)
    }
    _require_memory(kept, like)
    flat, known = _flat("source", source), _flat("source", like.source)
    return FilterState(
        belief,
        like.source if have_same_values(flat, known) else source,  # one for all states on a model
        like.parameters,
        read_count("seed", tensors, low=None),
        read_count("step", tensors),
        map_tensors(kept, lambda value: value.to(belief.mean, copy=True)),
    )


def _require_memory(memory: Mapping[str, Tensor], like: FilterState) -> None:
    """Raise unless what is remembered has the form that was declared for its name, and what the
    other state remembers already, as of the source, has the form that it has there.
    """
    require_forms(memory, _MEMORY, like.belief.dimension)
    for name, mine in like.memory.items():
        require(name in memory, "state", f"no {_MEMORY + name!r}", "complete")
        _require_like(_MEMORY + name, memory[name], mine)


def read_count(name: str, tensors: Mapping[str, Tensor], low: int | None = 0) -> int:
    """The whole number under a name, which must be there; of at least ``low``."""
    found = _one(name, tensors)
    fits = found.dim() == 0 and found.dtype == torch.int64
    require(fits, f"state {name!r}", f"{list(found.shape)} {found.dtype}", "one number of int64")
    require(low is None or found.item() >= (low or 0), f"state {name!r}", found.item(), ">= 0")
    return int(found)


def _one(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    if name not in tensors:  # the words take longer than the rest of it
        require(False, "state", f"no {name!r}", f"complete, not only {sorted(tensors)}")
    return tensors[name]


def _flat(name: str, value: Any) -> dict[str, Tensor]:
    """The tensors and numbers in a dataclass, by the path of their fields."""
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, (bool, int, float)):
        return {name: torch.tensor(value)}
    parts = (
        enumerate(value)
        if isinstance(value, tuple)
        else ((item.name, getattr(value, item.name)) for item in fields(value))
    )
    return {
        key: tensor
        for position, part in parts
        for key, tensor in _flat(f"{name}.{position}", part).items()
    }


def _require_like(name: str, found: Tensor, value: Tensor, grows: bool = False) -> None:
    """Raise unless a tensor has the shape of another one (but for its rows if it ``grows``), and
    numbers of the same kind: float32 and float64 may take each other's place.
    """
    floating = (torch.float32, torch.float64)
    alike = found.dtype == value.dtype or (found.dtype in floating and value.is_floating_point())
    fits = found.dim() == value.dim() and found.shape[grows:] == value.shape[grows:]
    if alike and fits:
        return
    require(alike, f"state {name!r}", f"{found.dtype}", f"of {value.dtype}")
    shape, allowed = list(found.shape), list(value.shape)
    require(fits, f"state {name!r}", f"shape {shape}", f"of shape {allowed}")


def _built(name: str, value: Any, tensors: Mapping[str, Tensor], grows: bool = False) -> Any:
    """A dataclass like another one with the tensors and numbers of this name.

    ``grows``: the number of rows of a tensor may differ.
    """
    if isinstance(value, Tensor):
        found = _one(name, tensors)
        _require_like(name, found, value, grows)
        return found.to(value, copy=True)
    if isinstance(value, (bool, int, float)):
        found = _one(name, tensors)
        _require_like(name, found, torch.tensor(value))
        most = tensors["belief.mean"].numel()  # a whole number is one of directions
        fits = type(value) is not int or 0 <= found.item() <= most
        require(fits, f"state {name!r}", found.item(), f"from 0 to {most}")
        return type(value)(found.item())
    if isinstance(value, tuple):
        return tuple(
            _built(f"{name}.{position}", part, tensors) for position, part in enumerate(value)
        )
    assert is_dataclass(value)
    growing = value.grows if isinstance(value, Covariance) else ()
    parts = {
        item.name: _built(
            f"{name}.{item.name}", getattr(value, item.name), tensors, item.name in growing
        )
        for item in fields(value)
    }
    return Belief(**parts) if isinstance(value, Belief) else unchecked(type(value), **parts)


def samples_to_tensors(recent: Inputs | None) -> dict[str, Tensor]:
    """Recent samples by name, for a checkpoint."""
    if recent is None:
        return {}
    if isinstance(recent, Tensor):
        return {f"{RECENT}[]": recent}
    items = recent.items() if isinstance(recent, Mapping) else enumerate(recent)
    named = ((f"[{key}]" if isinstance(key, int) else key, part) for key, part in items)
    return {f"{RECENT}{name}": part for name, part in named if isinstance(part, Tensor)}


def samples_from_tensors(tensors: Mapping[str, Tensor]) -> Inputs | None:
    """Recent samples by what the model takes them by, a name or a place; what were no tensors the
    next batch brings along.
    """
    recent = {
        name.removeprefix(RECENT): value
        for name, value in tensors.items()
        if name.startswith(RECENT)
    }
    if not recent or "[]" in recent:  # no name that a model could take
        return recent.get("[]")
    return {
        int(name[1:-1]) if name.startswith("[") else name: value for name, value in recent.items()
    }


def kinds(variant: Any) -> str:
    """What a recipe is made of, without its numbers: a checkpoint of one kind says nothing to a
    filter of another.
    """
    if isinstance(variant, tuple):
        return "[" + ", ".join(map(kinds, variant)) + "]"
    if not is_dataclass(variant):
        return (
            variant
            if isinstance(variant, str)
            else ""
            if isinstance(variant, (int, float))
            else type(variant).__name__
        )
    # Checkpoints of before say nothing of a field that came later; a word there changes how a
    # batch is looked at, not what is remembered.
    parts = [
        kinds(value)
        for item in fields(variant)
        for value in (getattr(variant, item.name),)
        if item.metadata != LATE or not (value == item.default or isinstance(value, str))
    ]
    return f"{type(variant).__name__}({', '.join(part for part in parts if part)})"

"""Everything a filter remembers as named tensors, and back: what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from driftfilter.belief import Belief
from driftfilter.checks import require, require_finite, unchecked
from driftfilter.filtering import FilterState


def to_tensors(state: FilterState) -> dict[str, Tensor]:
    """The state as tensors by name."""
    counts = {"step": torch.tensor(state.step), "seed": torch.tensor(state.seed & ((1 << 63) - 1))}
    memory = {f"memory.{name}": value for name, value in state.memory.items()}
    return {**counts, **_flat("belief", state.belief), **_flat("source", state.source), **memory}


def from_tensors(tensors: Mapping[str, Tensor], like: FilterState) -> FilterState:
    """The state that named tensors describe, of the structure of another one; refused unless all of it is there and finite."""
    for name, value in tensors.items():
        if value.is_floating_point():
            require_finite(f"state {name!r}", value.masked_fill(value == torch.inf, 0.0))  # empty supports have entropy ∞
    belief, source = _built("belief", like.belief, tensors), _built("source", like.source, tensors)
    fits = belief.dimension == source.dimension == like.belief.dimension
    require(fits, "state 'belief.mean'", f"{belief.dimension} values", f"{like.belief.dimension} values")
    memory = {name.removeprefix("memory."): value for name, value in tensors.items() if name.startswith("memory.")}
    return FilterState(belief, source, like.parameters, int(_one("seed", tensors)), int(_one("step", tensors)), memory)


def _one(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    require(name in tensors, "state", f"no {name!r}", f"complete, not only {sorted(tensors)}")
    return tensors[name]


def _flat(name: str, value: Any) -> dict[str, Tensor]:
    """The tensors and numbers in a dataclass, by the path of their fields."""
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, (bool, int, float)):
        return {name: torch.tensor(value)}
    parts = enumerate(value) if isinstance(value, tuple) else ((item.name, getattr(value, item.name)) for item in fields(value))
    return {key: tensor for position, part in parts for key, tensor in _flat(f"{name}.{position}", part).items()}


def _built(name: str, value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The same dataclass with the tensors and numbers of this name."""
    if isinstance(value, Tensor):
        return _one(name, tensors).to(value)
    if isinstance(value, (bool, int, float)):
        return type(value)(_one(name, tensors).item())
    if isinstance(value, tuple):
        return tuple(_built(f"{name}.{position}", part, tensors) for position, part in enumerate(value))
    assert is_dataclass(value)
    parts = {item.name: _built(f"{name}.{item.name}", getattr(value, item.name), tensors) for item in fields(value)}
    return Belief(**parts) if isinstance(value, Belief) else unchecked(type(value), **parts)


def moved(value: Any, change: Any) -> Any:
    """A state, belief or covariance with every floating tensor changed, for another device or dtype."""
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: moved(part, change) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(moved(part, change) for part in value)
    if is_dataclass(value):
        return unchecked(type(value), **{item.name: moved(getattr(value, item.name), change) for item in fields(value)})
    return value

"""Tensors inside of values: moved to another device or dtype; and texts as tensors."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from driftfilter.base.checks import require, unchecked


def as_tensor(text: str) -> Tensor:
    """A text as a tensor of bytes, for a checkpoint holds nothing else."""
    data = bytearray(text.encode())
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def as_text(tensor: Tensor) -> str:
    """The text in a tensor of bytes."""
    found = f"{list(tensor.shape)} {tensor.dtype}"
    require(tensor.dtype == torch.uint8 and tensor.dim() == 1, "a text", found, "bytes [n]")
    return bytes(tensor.tolist()).decode()


def have_same_values(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether named tensors are of the same names, dtypes, devices and values."""
    return one.keys() == other.keys() and all(
        (mine := one[name]).dtype == theirs.dtype
        and mine.device == theirs.device
        and torch.equal(mine, theirs)
        for name, theirs in other.items()
    )


def map_tensors(value: Any, change: Any) -> Any:
    """A state, belief or covariance with every floating tensor changed, for another device or
    dtype.
    """
    return map_all(value, lambda tensor: change(tensor) if tensor.is_floating_point() else tensor)


def map_all(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A value with every tensor in it changed, each in its turn: the fields of dataclasses, the
    parts of tuples and mappings.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: map_all(part, change) for name, part in value.items()}
    if isinstance(value, tuple):
        parts = [map_all(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if is_dataclass(value):
        return unchecked(
            type(value),
            **{item.name: map_all(getattr(value, item.name), change) for item in fields(value)},
        )
    return value


def list_tensors(value: Any) -> list[Tensor]:
    """The tensors in a value, in the order in which ``map_all`` changes them."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_all(value, note)
    return found

"""Tensors inside of values: moved to another device or dtype; and texts as tensors."""

from collections.abc import Mapping
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
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: map_tensors(part, change) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map_tensors(part, change) for part in value)
    if is_dataclass(value):
        return unchecked(
            type(value),
            **{item.name: map_tensors(getattr(value, item.name), change) for item in fields(value)},
        )
    return value

"""Files that were made to mislead: tensors and headers that no save would write, under a checksum
that is right.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from driftfilter.storage.sealed import seal

Change = Callable[[Tensor], Tensor]


def header_of(data: bytes) -> dict[str, Any]:
    """The header of a sealed file."""
    length = int.from_bytes(data[:8], "little")
    found: dict[str, Any] = json.loads(
        json.loads(data[8 : 8 + length])["__metadata__"]["driftfilter"]
    )
    return found


def reseal(
    data: bytes, tensors: Mapping[str, Tensor | None] | None = None, **changes: Any
) -> bytes:
    """A sealed file with other tensors (None: without) and other fields of its header."""
    header = {name: value for name, value in header_of(data).items() if name != "sha256"}
    both = {**load(data), **(tensors or {})}
    kept = {name: value for name, value in both.items() if value is not None}
    return b"".join(seal({**header, **changes}, kept))


def first(value: float) -> Change:
    """Another first number."""

    def change(tensor: Tensor) -> Tensor:
        other = tensor.clone()
        other.view(-1)[:1] = value
        return other

    return change


# What may be done to any tensor of numbers.
CHANGES: dict[str, Change] = {
    "int8": lambda tensor: tensor.to(torch.int8),
    "bool": lambda tensor: tensor != 0,
    "complex": lambda tensor: tensor.to(torch.complex64),
    "half": lambda tensor: tensor.half(),
    "NaN": first(torch.nan),
    "infinite": first(-torch.inf),
    "no rows": lambda tensor: tensor[:0] if tensor.dim() else tensor.new_empty(0),
    "a row less": lambda tensor: tensor[:-1] if tensor.dim() else tensor.expand(2),
    "a row more": lambda tensor: (
        torch.cat((tensor, tensor[:1])) if tensor.dim() else tensor.expand(1, 1)
    ),
    "a dimension more": lambda tensor: tensor[None],
    "flat": lambda tensor: tensor.reshape(-1) if tensor.dim() != 1 else tensor[:, None],
}

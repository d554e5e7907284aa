"""Files that were made to mislead: tensors and headers that no save would write, under a checksum
that is right.
"""

import hashlib
import json
import re
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
        whole = int(value) if abs(value) < 2**60 else 77
        other.view(-1)[:1] = value if other.is_floating_point() else whole
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


def resum(header: bytes, rest: bytes) -> bytes:
    """A sealed file of these bytes of a header, and those after it, with a checksum that is right
    if there is still a place for it.
    """
    data = len(header).to_bytes(8, "little") + header + rest
    found = re.search(rb'\\"sha256\\":\\"([0-9a-f]{64})\\"}"}', data)
    if found is None:
        return data
    blank = data[: found.start(1)] + b"0" * 64 + data[found.end(1) :]
    digest = hashlib.sha256(blank).hexdigest().encode()
    return data[: found.start(1)] + digest + data[found.end(1) :]

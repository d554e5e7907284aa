"""Tensors in a file that is refused if a single bit of it has changed.

A safetensors file that any reader of the format can open. Its metadata hold one JSON header under
"driftfilter"; the last entry of it is the SHA-256 of the whole file, those 64 digits read as zeros.
Nothing is ever pickled.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load as read_tensors, save as tensor_bytes
from torch import Tensor

from driftfilter import __version__

FORMAT = 1  # of the header; "format" and "sha256" keep their place and meaning in every later one
_BLANK = b"0" * 64
# Only the end of the header has that last quote.
_CHECKSUM = re.compile(rb'\\"sha256\\":\\"([0-9a-f]{64})\\"}"}')


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, or that an adapter must not go on from.

    The message says which file, and why.
    """


def seal(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[Any]:
    """A safetensors file with a header and the checksum of it all, in pieces."""
    text = json.dumps({**header, "sha256": _BLANK.decode()}, separators=(",", ":"))
    own = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    data = memoryview(tensor_bytes(own, {"driftfilter": text}))
    found = _CHECKSUM.search(data)
    assert found is not None
    return [data[: found.start(1)], hashlib.sha256(data).hexdigest().encode(), data[found.end(1) :]]


def unseal(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a file; raise unless every bit is as it was written."""
    length = int.from_bytes(data[:8], "little")
    found = _CHECKSUM.search(data, 8, min(8 + length, len(data)))
    if found is None:
        raise ValueError(
            "it is no checkpoint of driftfilter, or truncated or altered: it has no header with "
            "a checksum"
        )
    view = memoryview(data)
    rest = hashlib.sha256(view[: found.start(1)])
    for piece in (_BLANK, view[found.end(1) :]):
        rest.update(piece)
    if rest.hexdigest().encode() != found[1]:
        raise ValueError("it is truncated or altered: its checksum is not that of its content")
    header: dict[str, Any] = json.loads(
        json.loads(data[8 : 8 + length])["__metadata__"]["driftfilter"]
    )
    if header["format"] > FORMAT:
        written = f"driftfilter {header.get('library', '(unknown)')}"
        raise ValueError(
            f"it is of format {header['format']}, written by {written}; this is {__version__}, "
            f"format {FORMAT}"
        )
    # Copies in memory of torch's own: where numbers lie can change the last bit of a product.
    return header, {name: tensor.clone() for name, tensor in read_tensors(data).items()}

"""Tensors in a file that is refused if a single bit of it has changed.

A safetensors file that any reader of the format can open. Its metadata hold one JSON header under
"driftfilter"; the last entry of it is the SHA-256 of the whole file, those 64 digits read as zeros.
Nothing is ever pickled.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_tensors, save as tensor_bytes
from torch import Tensor

from driftfilter import __version__
from driftfilter.base.checks import require

FORMAT = 1  # of the header; "format" and "sha256" keep their place and meaning in every later one
_BLANK = b"0" * 64
# Only the end of the header has that last quote.
_CHECKSUM = re.compile(rb'\\"sha256\\":\\"([0-9a-f]{64})\\"}"}')


# What a file that is none of ours may raise while it is read; the reader makes one error of them.
FAILURES = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
    SafetensorError,
)


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
    header = parse_object(parse_object(data[8 : 8 + length])["__metadata__"]["driftfilter"])
    known = header.get("format")
    whole = isinstance(known, int) and not isinstance(known, bool) and known > 0
    require(whole, "its format", known, "an integer > 0")
    if header["format"] > FORMAT:
        written = f"driftfilter {header.get('library', '(unknown)')}"
        raise ValueError(
            f"it is of format {header['format']}, written by {written}; this is {__version__}, "
            f"format {FORMAT}"
        )
    # Copies in memory of torch's own: where numbers lie can change the last bit of a product.
    return header, {name: tensor.clone() for name, tensor in read_tensors(data).items()}


def parse_object(text: bytes | str) -> dict[str, Any]:
    """A JSON object in which no name stands twice: readers differ in which one they take."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = Counter(name for name, _ in pairs)
            twice = [name for name, count in names.items() if count > 1][:1]
            require(not twice, "a JSON object", f"{twice} twice", "of fields named once each")
        return found

    found = json.loads(text, object_pairs_hook=once)
    require(isinstance(found, dict), "JSON", type(found).__name__, "an object")
    return found  # type: ignore[no-any-return]

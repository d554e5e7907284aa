"""What a tenant knows, packed while it rests: every bit, in about half of the bytes.

Named tensors are put beside what they came from (the start of the filter for the belief, the belief
for snapshots and other domains), by exclusive or of their bits: what has hardly moved is mostly
zeros. Their bytes are then sorted by significance, and compressed (zlib).
"""

import json
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftfilter.adapter.state import AdapterState
from driftfilter.recipe import Recipe
from driftfilter.storage.state_tensors import to_tensors

_LEVEL = 6  # of compression: higher ones take longer and save little
_SOURCE = "source."  # repeated in no pack


class Packed(NamedTuple):
    """Named tensors in few bytes."""

    data: bytes  # names, dtypes and shapes as a line of JSON, then the numbers
    moved: bool  # whether the source is the tenant's own, and packed, too


def pack(state: AdapterState, recipe: Recipe, watched: bool) -> Packed:
    """All that a checkpoint would hold of a state on a CPU."""
    assert state.bound is not None
    start = state.bound.start
    moved = state.current.source is not start.source
    every = state.to_tensors(recipe, watched)
    kept = {name: tensor for name, tensor in every.items() if moved or not name.startswith(_SOURCE)}
    known, pieces = to_tensors(start), []
    for name, tensor in kept.items():
        bits = bits_of(tensor)
        other = _find_like(name, bits, kept, known)
        pieces.append(_by_significance(bits if other is None else bits ^ other))
    forms = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in kept.items()]
    line = json.dumps(forms).encode() + b"\n"
    return Packed(zlib.compress(b"".join((line, *pieces)), _LEVEL), moved)


def unpack(packed: Packed, state: AdapterState) -> dict[str, Tensor]:
    """The named tensors again; ``state``: any on the same filter."""
    assert state.bound is not None
    known, data = to_tensors(state.bound.start), zlib.decompress(packed.data)
    line = data.partition(b"\n")[0]
    found, place = dict[str, Tensor](), len(line) + 1
    for name, dtype, shape in json.loads(line):
        empty = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        bits = bits_of(empty)
        piece = np.frombuffer(data, np.uint8, bits.nbytes, place)
        place += bits.nbytes
        whole = piece.reshape(bits.itemsize, -1).T.copy().view(bits.dtype)[:, 0]
        other = _find_like(name, bits, found, known)
        bits[...] = whole if other is None else whole ^ other
        found[name] = empty
    if not packed.moved:
        found |= {name: known[name].clone() for name in known if name.startswith(_SOURCE)}
    return found


def bits_of(tensor: Tensor) -> NDArray[np.unsignedinteger]:
    """The numbers of a tensor as whole ones [m]; of a contiguous one in the same memory."""
    flat = tensor.detach().contiguous().reshape(-1)
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[flat.element_size()]
    return flat.view(torch.uint8).numpy().view(kind)


def _by_significance(bits: NDArray[np.unsignedinteger]) -> bytes:
    return np.ascontiguousarray(bits.view(np.uint8).reshape(-1, bits.itemsize).T).tobytes()


def _find_like(
    name: str,
    bits: NDArray[np.unsignedinteger],
    before: Mapping[str, Tensor],
    known: Mapping[str, Tensor],
) -> NDArray[np.unsignedinteger] | None:
    """What a tensor came from: of the same name in the start, or, if it is one of a snapshot or
    another domain, in the state itself, which comes first.
    """
    like = known.get(name)
    if like is None:
        for part in ("belief.", "memory."):
            place = name.find(part)
            if place > 0:
                like = before.get(name[place:])
    if like is None:
        return None
    found = bits_of(like)
    fits = found.dtype == bits.dtype and found.shape == bits.shape
    return found if fits else None

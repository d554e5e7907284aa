"""What a step leaves in the log of a store: the tensors that are a tenant's own, with its number
and its answer, beside a context that all tenants of one model share.

    content   a line of JSON (notes, form of the answer, names, dtypes and shapes), then the numbers
    context   a checkpoint of what is shared: recipe, model, the source's posterior

Both together say what a file of ``df.save`` says, and ``to_checkpoint`` makes that of them. A
content without a context is such a file.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import driftfilter as df
from driftfilter.adapter.checkpoint import decode, describe, join_parts, require_fit
from driftfilter.adapter.state import AdapterState
from driftfilter.app.serve.packing import bits_of
from driftfilter.base.checks import require
from driftfilter.storage.sealed import seal, unseal

_KNOWN = 8  # contexts that were read last


class Stored(NamedTuple):
    """What a store has of a tenant."""

    content: bytes
    context: bytes = b""  # empty: the content is a checkpoint


class Notes(NamedTuple):
    """What is said of a step beside the state."""

    tenant: str
    sequence: int
    digest: str
    answer: NDArray[Any] | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON data, for a checkpoint."""
        return {**self._asdict(), "answer": _pack(self.answer)}

    @classmethod
    def from_dict(cls, notes: Mapping[str, Any]) -> "Notes":
        """From JSON data."""
        answer = _unpack(notes["answer"])
        return cls(str(notes.get("tenant", "")), notes["sequence"], notes["digest"], answer)


class Recorder:
    """Records of the tenants of one adapter."""

    def __init__(self, adapter: df.Adapter) -> None:
        self._adapter = adapter
        self._mine: tuple[AdapterState, bytes] | None = None  # the context of states like one
        self._read: dict[bytes, Mapping[str, Tensor]] = {}  # shared tensors of contexts that fit

    def encode(self, state: AdapterState, notes: Notes) -> Stored:
        """The record of a step."""
        context = self._find_context(state)
        tensors = state.own_tensors(self._adapter.monitor is not None)
        if state.has_own_source:
            shared = state.shared_tensors(self._adapter.recipe)
            tensors |= {name: value for name, value in shared.items() if name not in tensors}
        forms = [(name, str(each.dtype)[6:], tuple(each.shape)) for name, each in tensors.items()]
        answer = notes.answer
        form = None if answer is None else (answer.dtype.str, answer.shape)
        head = {**notes._asdict(), "answer": form, "tensors": forms}
        data = b"" if answer is None else answer.tobytes()
        line = json.dumps(head, separators=(",", ":")).encode()
        return Stored(b"".join((line, b"\n", data, *map(_bytes_of, tensors.values()))), context)

    def _find_context(self, state: AdapterState) -> bytes:
        """What states on one filter share."""
        known = self._mine
        if known is None or known[0].bound is not state.bound or known[0].found is not state.found:
            fresh = AdapterState(state.bound, state.found)
            shared = fresh.shared_tensors(self._adapter.recipe)
            context = b"".join(seal(describe(self._adapter), shared))
            known = self._mine = fresh, context
        return known[1]

    def load(self, stored: Stored) -> Notes:
        """Have the adapter know what a record says; raise one of ``FAILURES`` if it does not fit,
        and change nothing.
        """
        if not stored.context:
            return Notes.from_dict(decode(self._adapter, stored.content))
        shared = self._read_context(stored.context)
        notes, tensors = _split(stored.content)
        self._adapter.load_state_dict({**shared, **tensors})
        return notes

    def _read_context(self, context: bytes) -> Mapping[str, Tensor]:
        found = self._read.get(context)
        if found is None:
            header, found = unseal(context)
            require_fit({**header, "notes": {}}, self._adapter)
            if len(self._read) >= _KNOWN:
                self._read.clear()
            self._read[context] = found
        return found


def to_checkpoint(stored: Stored) -> bytes:
    """A record as the content of a file of ``df.save``."""
    if not stored.context:
        return stored.content
    header, shared = unseal(stored.context)
    notes, tensors = _split(stored.content)
    kept = {name: value for name, value in header.items() if name != "sha256"}
    return b"".join(join_parts(kept, {**shared, **tensors}, notes.to_dict()))


def _split(content: bytes) -> tuple[Notes, dict[str, Tensor]]:
    line = content.partition(b"\n")[0]
    head, place = json.loads(line), len(line) + 1
    answer = None
    if head["answer"] is not None:
        dtype, shape = head["answer"]
        size = int(np.prod(shape, dtype=np.int64))
        answer = np.frombuffer(content, np.dtype(dtype), size, place).reshape(shape).copy()
        place += answer.nbytes
    tensors = _read_tensors(head["tensors"], content, place)
    return Notes(head["tenant"], head["sequence"], head["digest"], answer), tensors


def _read_tensors(forms: Sequence[Any], data: bytes, place: int) -> dict[str, Tensor]:
    """Named tensors, in memory of torch's own: where numbers lie can change the last bit of a
    product.
    """
    found = {}
    for name, dtype, shape in forms:
        empty = torch.empty(shape, dtype=getattr(torch, dtype))
        bits = bits_of(empty)
        bits[...] = np.frombuffer(data, bits.dtype, bits.size, place)
        place += bits.nbytes
        found[name] = empty
    require(place == len(data), "a record", f"{len(data)} bytes", f"of {place}")
    return found


def _bytes_of(tensor: Tensor) -> Any:
    """The numbers of a tensor as bytes, in the same memory if they lie together on the CPU."""
    tensor = tensor.detach().cpu()
    plain = tensor if tensor.dtype != torch.bfloat16 else tensor.view(torch.int16)
    return np.ascontiguousarray(plain.numpy())


def _pack(answer: NDArray[Any] | None) -> dict[str, Any] | None:
    if answer is None:
        return None
    data = base64.b64encode(np.ascontiguousarray(answer).tobytes()).decode()
    return {"dtype": answer.dtype.str, "shape": list(answer.shape), "data": data}


def _unpack(packed: Mapping[str, Any] | None) -> NDArray[Any] | None:
    if packed is None:
        return None
    data = np.frombuffer(base64.b64decode(packed["data"]), np.dtype(packed["dtype"]))
    return data.reshape(packed["shape"])

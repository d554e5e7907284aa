"""Arrays in requests and answers: JSON, or NumPy's .npy. Nothing is unpickled or evaluated, and no
memory is taken that the body itself does not have.
"""

import hashlib
import io
import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from driftfilter.app.run.reader import Form
from driftfilter.app.serve.problems import ProblemError
from driftfilter.app.serve.shard import Reply
from driftfilter.app.terminal import finite
from driftfilter.base.inputs import Inputs
from driftfilter.storage.sealed import parse_object

NPY, JSON = "application/x-npy", "application/json"
_LAST = 2**53  # whole numbers that every JSON reader keeps
_DEPTH = 40  # of brackets in JSON
_DIMENSIONS = 32  # that every NumPy knows
_HEADS = 64  # of .npy arrays, those seen last


class Body(NamedTuple):
    """What a body says."""

    inputs: Inputs
    labels: Tensor | None
    sequence: int | None
    digest: str


def read_body(
    data: bytes, kind: str, sequence: str | None, form: Form, integers: frozenset[str]
) -> Body:
    """The samples in a body, and their number in the stream, from it or from a header."""
    kind = kind.partition(";")[0].strip().lower()
    document: dict[str, Any] = {}
    if kind == NPY:
        raw: Any = read_npy(data)
    elif kind == JSON:
        document = _read_json(data)
        raw = _read_inputs(document, integers)
    else:
        raise ProblemError(415, "Content-Type", kind, f"{JSON} or {NPY}")
    number = _read_number(sequence, document.get("sequence"))
    try:
        inputs = form(raw)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ProblemError(422, "inputs", _shape(raw), "an array [n, ...]", str(error)) from error
    digest = hashlib.sha256(kind.encode() + b"\n" + data).hexdigest()[:32]
    return Body(inputs, _read_labels(document), number, digest)


def _shape(raw: Any) -> str:
    parts = raw if isinstance(raw, Mapping) else {"": raw}
    return "; ".join(
        f"{name} {list(part.shape)} {part.dtype}".strip() for name, part in parts.items()
    )


def read_npy(data: bytes) -> NDArray[Any]:
    """The array of numbers in a .npy file; its header must say as many bytes as follow."""
    try:
        head = _take_head(data)
        shape, columns_first, dtype = _read_head(head)
    except Exception as error:  # NumPy reads it as Python's tokens, which fail in many ways
        told = f"a .npy array of version 1 or 2 ({error})"
        raise ProblemError(400, "body", f"{len(data)} bytes", told) from error
    rest = memoryview(data)[len(head) :]
    if dtype.kind not in "biuf" or dtype.hasobject:
        raise ProblemError(400, "dtype", dtype, "one of booleans, integers or floating numbers")
    size = math.prod(shape) * dtype.itemsize
    if size != len(rest):
        raise ProblemError(400, "body", f"{len(rest)} bytes", f"{size} bytes for shape {shape}")
    array = np.frombuffer(rest, dtype).reshape(shape, order="F" if columns_first else "C")
    return array.astype(dtype.newbyteorder("="))


def _take_head(data: bytes) -> bytes:
    """What comes before the numbers in a .npy file, by the length that it says."""
    start = 12 if data[6:7] == b"\x02" else 10  # by the version
    return data[: start + int.from_bytes(data[8:start], "little")]


@lru_cache(_HEADS)  # NumPy takes longer to read it than to make the array, and it rarely differs
def _read_head(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether columns come first, and dtype."""
    file = io.BytesIO(head)
    version = npy.read_magic(file)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
    shape, columns_first, dtype = read(file)
    _require_lengths(shape)
    return shape, columns_first, dtype


def _require_lengths(shape: tuple[int, ...]) -> None:
    """What NumPy can make an array of, be it empty."""
    fits = all(type(length) is int and 0 <= length < _LAST for length in shape)
    if not fits or len(shape) > _DIMENSIONS or math.prod(filter(None, shape)) >= _LAST:
        raise ValueError(f"no array has the shape {str(shape)[:80]}")


def _read_json(data: bytes) -> dict[str, Any]:
    if _nested(data) > _DEPTH:
        raise ProblemError(400, "body", "deep", f"JSON of at most {_DEPTH} brackets in each other")
    try:
        return parse_object(data)
    except (ValueError, RecursionError) as error:
        told = f"a JSON object ({error})"[:300]
        raise ProblemError(400, "body", f"{len(data)} bytes", told) from error


def _nested(data: bytes) -> int:
    """Brackets in each other at the beginning of a text: only there can it be as deep as long."""
    head = data[:4096]
    return head.count(b"[") + head.count(b"{") - head.count(b"]") - head.count(b"}")


def _read_inputs(document: dict[str, Any], integers: frozenset[str]) -> Any:
    if "inputs" not in document:
        raise ProblemError(400, "inputs", None, "an array [n, ...], or an object of them")
    found = document["inputs"]
    if isinstance(found, dict):
        if not found:
            raise ProblemError(400, "inputs", "{}", "of at least one array")
        return {name: _array(name, part, name in integers) for name, part in found.items()}
    return _array("inputs", found, "inputs" in integers)


def _array(name: str, part: Any, whole: bool) -> NDArray[Any]:
    try:
        if not isinstance(part, list):
            raise ValueError(f"it is a {type(part).__name__}")
        _require_numbers(part)
        array = np.array(part)
        if array.dtype.kind not in "iuf" or (whole and array.dtype.kind == "f"):
            raise ValueError(f"its numbers are {array.dtype}")
        with np.errstate(over="ignore"):  # what is not finite is refused later
            return array.astype(np.int64 if whole else np.float32)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        allowed = f"an array [n, ...] of {'integers' if whole else 'numbers'} ({error})"
        raise ProblemError(400, name, type(part).__name__, allowed) from error


def _require_numbers(part: list[Any]) -> None:
    """Of one text among numbers NumPy would give each of them the room of that text."""
    kinds = set(map(type, part))
    if kinds == {list}:
        for own in part:
            _require_numbers(own)
    elif not kinds <= {int, float}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(f"there is {names} in it")


def _read_labels(document: dict[str, Any]) -> Tensor | None:
    if "labels" not in document:
        return None
    labels = document["labels"]
    plain = isinstance(labels, list) and all(type(label) is int for label in labels)
    if not plain or not all(-1 <= label < _LAST for label in labels):
        raise ProblemError(400, "labels", type(labels).__name__, "a list of whole numbers")
    return torch.tensor(labels, dtype=torch.int64)


def _read_number(header: str | None, field: Any) -> int | None:
    """The number of a request, from its header or its body; None: the next one."""
    if header is not None:
        if not (header.isascii() and header.isdigit() and len(header) < 17):
            raise ProblemError(400, "Sequence", header, f"a whole number from 1 to {_LAST}")
        if field is not None and field != int(header):
            raise ProblemError(400, "sequence", field, f"that of the header, {header}")
        field = int(header)
    if field is None:
        return None
    if type(field) is not int or not 1 <= field <= _LAST:
        raise ProblemError(400, "sequence", field, f"a whole number from 1 to {_LAST}")
    return field


def read_sequence(header: str | None) -> int | None:
    """The number of a request without a body."""
    return _read_number(header, None)


def write_npy(array: NDArray[Any]) -> bytes:
    """An array as a .npy file."""
    array = np.ascontiguousarray(array)
    return _write_head(array.shape, array.dtype) + array.tobytes()


@lru_cache(_HEADS)
def _write_head(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    file = io.BytesIO()
    descr = npy.dtype_to_descr(dtype)
    npy.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


def write_json(tenant: str, reply: Reply) -> bytes:
    """An answer as JSON; float32 numbers keep every bit."""
    document: dict[str, Any] = {"tenant": tenant, "sequence": reply.sequence}
    if reply.facts is not None:
        document |= reply.facts
    if reply.log_probabilities is not None:
        logs = reply.log_probabilities
        document |= {"labels": logs.argmax(1).tolist(), "log_probabilities": logs.tolist()}
    if reply.repeated:
        document["repeated"] = True
    return json.dumps(finite(document), separators=(",", ":")).encode()

"""Checkpoints: what an adapter has learned in a file that is written whole, and refused if a
single bit has changed.

A safetensors file that any reader of the format can open. Its metadata hold one JSON header under
"driftfilter"; the last entry of it is the SHA-256 of the whole file, those 64 digits read as zeros.
Nothing is ever pickled.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from driftfilter import __version__
from driftfilter.base.checks import require, require_count
from driftfilter.recipe import from_dict, to_dict
from driftfilter.storage.atomic import atomic_file, earlier

if TYPE_CHECKING:
    from driftfilter.adapter.adapter import Adapter
from driftfilter.storage.sealed import FAILURES, FORMAT, CheckpointError, seal, unseal

# Fields of a header that an adapter reads, and what they are.
_HEADER: dict[str, tuple[type, ...]] = {
    "recipe": (dict, str),
    "adapter": (dict,),
    "model": (dict,),
    "notes": (dict,),
}


class Fingerprint(NamedTuple):
    """What tells a model from others, wherever it is placed."""

    architecture: str  # SHA-256 of the names, shapes and dtypes of parameters and buffers
    weights: str  # of their values


def save(
    adapter: Adapter, path: str | Path, keep: int = 1, notes: Mapping[str, Any] | None = None
) -> None:
    """Write what the adapter has learned to a file, which is there whole or as it was; the last
    ``keep`` files stay.

    Of ``state.safetensors`` the one before is kept as ``state.1.safetensors``, and so on.
    ``notes``, JSON data such as the place in a stream, come back from ``load``.
    """
    require_count("save: keep", keep, 1)
    path, encoded = Path(path), encode(adapter, notes)
    try:
        with atomic_file(path, keep) as file:
            file.writelines(encoded)
    except OSError as error:
        before = "; the checkpoint that was there is as it was" if path.is_file() else ""
        raise CheckpointError(
            f"{path} could not be written: {error.strerror or error}{before}"
        ) from error


def encode(adapter: Adapter, notes: Mapping[str, Any] | None = None) -> list[Any]:
    """The content of a file of ``save``, in pieces."""
    return join_parts(describe(adapter), adapter.state_dict(), notes)


def describe(adapter: Adapter) -> dict[str, Any]:
    """What a checkpoint says of the adapter, whatever has been learned."""
    return {
        "format": FORMAT,
        "library": __version__,
        "recipe": adapter.plain_recipe,
        "adapter": _options(adapter),
        "model": adapter.fingerprint._asdict(),
    }


def join_parts(
    header: Mapping[str, Any], tensors: Mapping[str, Tensor], notes: Mapping[str, Any] | None
) -> list[Any]:
    """The content of a file from what ``describe`` said, named tensors and notes, in pieces."""
    counts = {"step": int(tensors["step"]), "seed": int(tensors["seed"])}
    return seal({**header, **counts, "notes": notes or {}}, tensors)


def load(adapter: Adapter, path: str | Path, strict: bool = True) -> dict[str, Any]:
    """Go on from a file of ``save``; returns its notes. What does not fit raises
    ``CheckpointError`` and changes nothing.

    The model must be the same, bit for bit, and so must the recipe; with ``strict=False`` its
    numbers and its prediction may be others.
    """
    path = Path(path)
    try:
        return decode(adapter, path.read_bytes(), strict)
    except FAILURES as error:
        reason = error.strerror if isinstance(error, OSError) else error
        older = f"; the one before it is {earlier(path, 1)}" if earlier(path, 1).is_file() else ""
        raise CheckpointError(f"{path} was not loaded: {reason}{older}") from error


def decode(adapter: Adapter, data: bytes, strict: bool = True) -> dict[str, Any]:
    """Go on from the content of a file, as ``load`` does; raise one of ``FAILURES`` if it does not
    fit, and change nothing.
    """
    header, tensors = unseal(data)
    require_fit(header, adapter, strict)
    for name in ("step", "seed"):
        told, held = header.get(name), tensors[name].tolist() if name in tensors else None
        require(told is None or told == held, f"its {name}", told, f"{held}, as in its tensors")
    adapter.load_state_dict(tensors)
    notes: dict[str, Any] = header["notes"]
    return notes


def fingerprint(model: nn.Module) -> Fingerprint:
    """What tells the parameters and buffers, as they are now, from others."""
    shapes, values = hashlib.sha256(), hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        shapes.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        values.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return Fingerprint(shapes.hexdigest(), values.hexdigest())


def require_fit(header: Mapping[str, Any], adapter: Adapter, strict: bool = True) -> None:
    """Raise unless what a checkpoint says of its adapter fits this one."""
    for name, kinds in _HEADER.items():
        require(name in header, "its header", sorted(header), f"complete, with {name!r}")
        require(isinstance(header[name], kinds), f"its {name}", header[name], f"of {kinds}")
    theirs, mine = Fingerprint(**header["model"]), adapter.fingerprint
    what = (
        "names, shapes or dtypes of parameters or buffers"
        if theirs.architecture != mine.architecture
        else "weights"
    )
    if theirs != mine:
        raise ValueError(f"it was saved with another model, of other {what}")
    if not strict:
        return
    recipe = adapter.plain_recipe
    there = recipe if header["recipe"] == recipe else _complete(header["recipe"])
    pairs = (
        (there, recipe),
        (header["adapter"], _options(adapter)),
    )
    for difference in (_difference(there, here) for there, here in pairs):
        if difference is not None:
            name, there, here = difference
            raise ValueError(
                f"it was saved with another recipe: {name or 'recipe'} was {there!r}, here it is "
                f"{here!r}"
            )


def _options(adapter: Adapter) -> dict[str, int]:
    return {"update_every": adapter.update_every, "window": adapter.window}


def _complete(recipe: Any) -> Any:
    """The data of a recipe with the defaults of fields that its classes have got since; Laplace
    posteriors were fitted under the stream's statistics before they had a choice.
    """
    try:
        if recipe["source"]["kind"] == "Laplace":
            recipe = {**recipe, "source": {"statistics": "stream", **recipe["source"]}}
        return plain(from_dict(recipe))
    except (
        ValueError,
        AttributeError,
        TypeError,
        KeyError,
    ):  # text, or of classes that are not here
        return recipe


def plain(recipe: Any) -> Any:
    """A recipe as JSON data; one with parts of the user's own as text, without addresses in
    memory.
    """
    try:
        return json.loads(json.dumps(to_dict(recipe)))
    except ValueError:
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(recipe))


def _difference(there: Any, here: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """The first field in which two data differ, and what it is in each."""
    if isinstance(there, dict) and isinstance(here, dict) and there.get("kind") == here.get("kind"):
        keys: Iterable[str] = dict.fromkeys((*there, *here))
        pairs = ((there.get(key), here.get(key), f"{name}.{key}".lstrip(".")) for key in keys)
        return next((found for pair in pairs if (found := _difference(*pair)) is not None), None)
    if isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        parts = (
            (one, other, f"{name}[{place}]")
            for place, (one, other) in enumerate(zip(there, here, strict=True))
        )
        return next((found for part in parts if (found := _difference(*part)) is not None), None)
    if there == here:
        return None
    same = itertools.takewhile(
        lambda pair: pair[0] == pair[1], zip(str(there), str(here), strict=False)
    )
    start = sum(1 for _ in same)
    return name, _short(there, start), _short(here, start)


def _short(value: Any, start: int) -> Any:
    """A short form for messages: a variant's name, or a text about the place of a difference."""
    if isinstance(value, str) and len(value) > 80:
        return value[max(0, start - 40) : start + 40]
    return value["kind"] if isinstance(value, dict) and "kind" in value else value

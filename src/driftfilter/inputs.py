"""What a model is called with: one tensor, several, or tensors by name; the first tensor says how many samples there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from driftfilter.checks import require_finite

Inputs: TypeAlias = Any  # a tensor [n, ...], a tuple of what the model takes by place, or a mapping by name


def _parts(inputs: Inputs) -> Iterator[tuple[str, Any]]:
    if isinstance(inputs, Tensor):
        yield "inputs", inputs
    elif isinstance(inputs, Mapping):
        yield from ((f"inputs[{name!r}]", part) for name, part in inputs.items())
    elif isinstance(inputs, (tuple, list)):
        yield from ((f"inputs[{position}]", part) for position, part in enumerate(inputs))
    else:
        raise ValueError(f"inputs must be a tensor [n, ...], or a tuple or dict of them, got {type(inputs).__name__}")


def batch_size(inputs: Inputs) -> int:
    """n, the length of the first tensor."""
    return next(int(part.shape[0]) for _, part in _parts(inputs) if isinstance(part, Tensor))


def checked(inputs: Inputs) -> Inputs:
    """The inputs, refused if unusable, as tensors that may enter a graph."""
    tensors = [(name, part) for name, part in _parts(inputs) if isinstance(part, Tensor)]
    if not tensors:
        raise ValueError(f"inputs must be a tensor [n, ...], or a tuple or dict of them, got a {type(inputs).__name__}")
    name, first = tensors[0]
    if first.dim() == 0 or first.shape[0] == 0:
        raise ValueError(f"{name} must be a batch [n, ...] with n >= 1, got shape {list(first.shape)}")
    for name, part in tensors:
        if part.is_floating_point():
            require_finite(name, part if isinstance(inputs, Tensor) else part.masked_fill(part.isinf(), 0.0))  # masks hold -inf
    if not any(part.is_inference() for _, part in tensors):
        return inputs
    return each(inputs, lambda part: part.clone() if part.is_inference() else part)


def joined(pieces: Sequence[Inputs]) -> Inputs:
    """Batches one after the other as one batch."""
    first = pieces[0]
    if isinstance(first, Tensor):
        return torch.cat([piece for piece in pieces if isinstance(piece, Tensor)])
    keys: list[Any] = list(first) if isinstance(first, Mapping) else list(range(len(first)))
    columns: dict[Any, list[Any]] = {key: [piece[key] for piece in pieces] for key in keys}
    together = {key: torch.cat(column) if isinstance(column[0], Tensor) else column[0] for key, column in columns.items()}
    return together if isinstance(first, Mapping) else tuple(together.values())


def samples(inputs: Inputs, start: int, stop: int) -> Inputs:
    """Some samples of a batch; what does not go sample by sample stays whole."""
    n = batch_size(inputs)
    return each(inputs, lambda part: part[start:stop] if part.dim() and part.shape[0] == n else part)


def split(inputs: Inputs, size: int) -> list[Inputs]:
    """A batch cut into batches of this size, the last one shorter."""
    return [samples(inputs, start, start + size) for start in range(0, batch_size(inputs), size)]


def each(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """The inputs with every tensor changed; what is not a tensor stays."""
    if isinstance(inputs, Tensor):
        return change(inputs)
    if isinstance(inputs, Mapping):
        return {name: change(part) if isinstance(part, Tensor) else part for name, part in inputs.items()}
    return tuple(change(part) if isinstance(part, Tensor) else part for part in inputs)

"""Bytes that a value takes in memory, beside what it shares with the network it stands on."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from driftfilter.adapter.state import AdapterState

_TENSOR = 700  # bytes of a tensor beside its numbers, in Python and in torch
_OBJECTS = 6000  # of a state without its tensors: tuples, dataclasses, numbers


def bytes_of(state: AdapterState) -> int:
    """Bytes of what a tenant knows; those of its filter's start and model are not counted."""
    bound = state.bound
    shared = set() if bound is None else {_place(tensor) for tensor in _tensors(bound.start)}
    if bound is not None:
        shared |= {_place(tensor) for tensor in bound.found.values()}
    own = {_place(each): each for each in _tensors(state._replace(bound=None))}
    sizes = [
        tensor.untyped_storage().nbytes() for place, tensor in own.items() if place not in shared
    ]
    return sum(sizes) + _TENSOR * len(sizes) + _OBJECTS


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a value of named tuples, dataclasses, mappings and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors(part)
    elif is_dataclass(value):
        for item in fields(value):
            yield from _tensors(getattr(value, item.name))

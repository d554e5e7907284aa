"""One pass over the batches of several streams, for the part of a network that none of them adapts.

Each batch is then known by identity, as long as its tensors live and are not written to. Torch may
compute one sample alone by other products than several together, which changes the last bit: a pass
has at least two samples. What is found of a batch then does not depend on its company, but for the
rounding of matrix products, which torch computes by the number of their rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from driftfilter.base.inputs import Inputs, batch_size, join_batches, sample
from driftfilter.networks.row_check import tolerance_of
from driftfilter.networks.shared_copy import Local


class Kept(NamedTuple):
    """What is known of a batch, for as long as its tensors live and are not written to."""

    names: tuple[str, ...]
    tensors: list[weakref.ref[Tensor]]
    versions: list[int]
    value: Tensor  # [n, D]

    @classmethod
    def of(cls, inputs: Inputs, tensors: list[Tensor], value: Tensor) -> Kept:
        """What is known of inputs made of these tensors."""
        versions = [tensor._version for tensor in tensors]
        return cls(_names(inputs), [weakref.ref(tensor) for tensor in tensors], versions, value)

    def is_alive(self) -> bool:
        """Whether somebody could still ask."""
        return all(tensor() is not None for tensor in self.tensors)

    def belongs_to(self, inputs: Inputs, tensors: list[Tensor]) -> bool:
        """Whether it is known of these inputs."""
        same = _names(inputs) == self.names and len(tensors) == len(self.tensors)
        return same and all(
            kept() is tensor and tensor._version == version
            for tensor, kept, version in zip(tensors, self.tensors, self.versions, strict=False)
        )


def _names(inputs: Inputs) -> tuple[str, ...]:
    return tuple(inputs) if isinstance(inputs, Mapping) else ()


def counted_tensors(inputs: Inputs) -> list[Tensor] | None:
    """The tensors of a batch; None if there is anything else, or one whose changes torch does
    not count.
    """
    parts = (
        [inputs]
        if isinstance(inputs, Tensor)
        else list(inputs.values() if isinstance(inputs, Mapping) else inputs)
    )
    counted = all(isinstance(part, Tensor) and not part.is_inference() for part in parts)
    return parts if counted else None


class _Latest(Local):
    def __init__(self) -> None:
        self.known: dict[int, Kept] = {}  # by the identity of the first tensor


@final
class SharedPass:
    """What passes of this thread have told of each of their batches."""

    def __init__(self) -> None:
        self._local = _Latest()
        self._allowed: bool | None = None  # None: not proven yet

    def run(self, ask: Callable[[Inputs], Tensor], batches: Sequence[Inputs]) -> bool:
        """Ask about batches of one form at once. False if samples are coupled, or torch cannot
        tell whether a batch is written to: nothing is known of them then.
        """
        self._local.known = {
            place: kept for place, kept in self._local.known.items() if kept.is_alive()
        }
        parts = [counted_tensors(batch) for batch in batches]
        if self._allowed is False or any(not part for part in parts):
            return False
        together, sizes = join_batches(batches), [batch_size(batch) for batch in batches]
        found = _ask_several(ask, together)
        if self._allowed is None and len(batches) > 1:
            self._allowed = _agree(_ask_several(ask, batches[0]), found[: sizes[0]])
            if not self._allowed:
                return False
        for batch, tensors, own in zip(batches, parts, found.split(sizes), strict=True):
            assert tensors
            self._local.known[id(tensors[0])] = Kept.of(batch, tensors, own.clone())
        return True

    def find(self, inputs: Inputs) -> Tensor | None:
        """What is known of a batch [n, D]; None of one that was not in the pass."""
        if not self._local.known:  # nearly always
            return None
        tensors = counted_tensors(inputs)
        kept = self._local.known.get(id(tensors[0])) if tensors else None
        return kept.value if kept is not None and kept.belongs_to(inputs, tensors or []) else None


def _ask_several(ask: Callable[[Inputs], Tensor], inputs: Inputs) -> Tensor:
    """Ask about a batch, of one sample as if it were two."""
    if batch_size(inputs) > 1:
        return ask(inputs)
    return ask(sample(inputs, torch.zeros(2, dtype=torch.long)))[:1]


def _agree(alone: Tensor, together: Tensor) -> bool:
    """Whether a batch alone is what it is among others."""
    apart = (alone - together).abs().max()
    scale = 1e-6 + float(alone.abs().max())
    return bool(apart <= tolerance_of(alone.dtype, alone.device) * scale)

"""Corruptions made of pictures that lie in files, a block of them at a time."""

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

import torch
from torch import Tensor
from typing_extensions import Self

from driftfilter.app.corruptions import (
    CORRUPTIONS,
    EXTRA,
    FROST_TEXTURE,
    SEVERITIES,
    corrupt,
    require_pixels,
)
from driftfilter.app.readers.stored import (
    CLEAN,
    Preparation,
    Samples,
    Shift,
    Stored,
    require_index,
    require_known,
)
from driftfilter.base.checks import require_count
from driftfilter.base.randomness import mix_seeds

# What can be made here.
MADE = (
    CLEAN,
    *(Shift(name, severity) for name in (*CORRUPTIONS, *EXTRA) for severity in SEVERITIES),
)
BLOCK = 64  # pictures that are corrupted together
KEPT = 2 << 30  # bytes of corrupted pictures


@final
@dataclass(frozen=True, eq=False)
class Corrupted:
    """Corruptions made here of clean pictures in files, block by block.

    Samples b B … (b + 1) B - 1 under a shift are ``corrupt`` of these pictures with a seed of the
    block's own, whatever batch asks for them. What was made last stays in memory, 8 bits a value.
    """

    clean: Stored
    seed: int = 0
    _made: "OrderedDict[tuple[Shift, int, torch.device], Tensor]" = field(
        default_factory=OrderedDict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        require_count("seed", self.seed, 0)

    @property
    def labels(self) -> Tensor:
        """Labels [N], on the CPU."""
        return self.clean.labels

    @property
    def members(self) -> None:
        """None: every sample comes under every shift."""
        return None

    @property
    def path(self) -> Path:
        """Where the clean pictures lie."""
        return self.clean.path

    @property
    def counted(self) -> tuple[str, ...] | None:
        """Names of the classes if the labels count them (``Stored``)."""
        return self.clean.counted

    @property
    def shifts(self) -> tuple[str, ...]:
        """Every corruption, and clean."""
        return tuple(dict.fromkeys(shift.corruption for shift in MADE))

    def describe(self) -> dict[str, str]:
        """What a report says of the data, which is the same for all seeds."""
        return {**self.clean.describe(), "kind": "generated of pictures", "frost": FROST_TEXTURE}

    def with_labels(self, labels: Tensor) -> Self:
        """The pictures with other labels [N]."""
        return replace(self, clean=self.clean.with_labels(labels))

    def with_seed(self, seed: int) -> Self:
        """The pictures under the corruptions of this seed."""
        return self if seed == self.seed else replace(self, seed=seed)

    def prepared(self, prepare: Preparation | None) -> Self:
        """The pictures as a model takes them: corruptions come after resizing and cropping."""
        return self if prepare is None else replace(self, clean=self.clean.prepared(prepare))

    def require(self, shift: Shift) -> None:
        """Raise unless the shift can be taken."""
        require_known(shift, MADE)

    def take(self, shift: Shift, index: Tensor, device: torch.device) -> Samples:
        """Samples ``index`` [n] under the shift: uint8 [n, 3, h, w] on the device."""
        self.require(shift)
        require_index(index, len(self.labels))
        if shift == CLEAN:
            return self.clean.take(CLEAN, index, device)
        blocks = {
            number: self._block(shift, number, device)
            for number in (index // BLOCK).unique().tolist()
        }
        rows = [blocks[each // BLOCK][each % BLOCK] for each in index.tolist()]
        return torch.stack(rows)

    def _block(self, shift: Shift, number: int, device: torch.device) -> Tensor:
        key = shift, number, device
        if key not in self._made:
            last = min(len(self.labels), (number + 1) * BLOCK)
            pixels = self.clean.take(CLEAN, torch.arange(number * BLOCK, last), device)
            assert isinstance(pixels, Tensor)  # of pictures
            images = pixels.float() / 255
            require_pixels(str(self.clean.path), images)
            made = corrupt(images, *shift, mix_seeds(self.seed, number))
            self._made[key] = (255 * made).round().byte()
            while len(self._made) > 1 and sum(each.nbytes for each in self._made.values()) > KEPT:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return self._made[key]

"""Corruptions made of pictures that lie in files, a block of them at a time."""

import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from driftfilter.app import corruptions
from driftfilter.app.corruptions import (
    CORRUPTIONS,
    EXTRA,
    FROST_TEXTURE,
    SEVERITIES,
    corrupt,
    require_pixels,
)
from driftfilter.app.images.files import digest, open_array, require_images
from driftfilter.app.readers.stored import (
    CLEAN,
    Preparation,
    Samples,
    Shift,
    Stored,
    move,
    require_index,
    require_known,
)
from driftfilter.base.checks import require_count
from driftfilter.base.randomness import mix_seeds
from driftfilter.storage.atomic import atomic_file

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
    All of it stays in files of the folder ``keep`` if there is one, for other processes, too.
    """

    clean: Stored
    seed: int = 0
    keep: Path | None = None
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
            self._made[key] = self._find(shift, number, device)
            while len(self._made) > 1 and sum(each.nbytes for each in self._made.values()) > KEPT:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return self._made[key]

    def _find(self, shift: Shift, number: int, device: torch.device) -> Tensor:
        """A block from its file, or made and written there."""
        if self.keep is None:
            return self._make(shift, number, device)
        file = self.keep / self._name(device) / f"{'-'.join(map(str, shift))}-{number}.npy"
        if not file.is_file():
            made = self._make(shift, number, device)
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(file) as opened:
                np.save(opened, made.permute(0, 2, 3, 1).contiguous().cpu().numpy())
            return made
        expected = len(self._list(number))
        return move(np.array(require_images(str(file), open_array(file), expected)), device)

    def _make(self, shift: Shift, number: int, device: torch.device) -> Tensor:
        pixels = self.clean.take(CLEAN, self._list(number), device)
        assert isinstance(pixels, Tensor)  # of pictures
        images = pixels.float() / 255
        require_pixels(str(self.clean.path), images)
        made = corrupt(images, *shift, mix_seeds(self.seed, number))
        return (255 * made).round().byte()

    def _list(self, number: int) -> Tensor:
        """The samples of a block."""
        return torch.arange(number * BLOCK, min(len(self.labels), (number + 1) * BLOCK))

    def _name(self, device: torch.device) -> str:
        """A name for all that determines what is made, beside shift and block."""
        cuda = device.type == "cuda"
        chosen = {
            "pictures": self._pictures,
            "prepare": _describe(self.clean.prepare),
            "seed": self.seed,
            "block": BLOCK,
            "device": torch.cuda.get_device_name(device) if cuda else device.type,
            "torch": torch.__version__,
            "code": _hash_code(),
        }
        return hashlib.sha256(json.dumps(chosen).encode()).hexdigest()[:16]

    @cached_property
    def _pictures(self) -> str:
        """The hash of the pictures; cached, for it looks at all of them."""
        return self.clean.describe()["sha256"]


def _describe(prepare: Preparation) -> str:
    """What is done to pictures, in the same words in every process."""
    return getattr(prepare, "__qualname__", None) or repr(prepare)


@cache
def _hash_code() -> str:
    """A hash of the code that makes corruptions."""
    file = Path(corruptions.__file__)
    return digest([file, *sorted((file.parent / "images").glob("*.py"))])

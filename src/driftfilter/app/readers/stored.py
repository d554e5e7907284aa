"""Data that lie in files: numbered samples, the shifts under which they come, and what a model is
given of them.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from typing_extensions import Self

from driftfilter.app.corruptions import require_severity
from driftfilter.app.images.files import Bytes, Integers
from driftfilter.base.checks import nearest, require


class Images(NamedTuple):
    """Images with the labels that only the evaluation sees."""

    images: Tensor  # [n, 3, h, w], RGB in [0, 1]
    labels: Tensor  # [n]


class Shift(NamedTuple):
    """A domain: what happened to the samples, and how badly (0 for clean, else 1 to 5)."""

    corruption: str
    severity: int = 5


CLEAN = Shift("clean", 0)


def shift_of(corruption: str, severity: int) -> Shift:
    """The shift of a name at a severity, which clean samples do not have."""
    require_severity(severity)
    return CLEAN if corruption == CLEAN.corruption else Shift(corruption, severity)


Arrays: TypeAlias = NDArray[Any] | dict[str, NDArray[Any]]  # [n, ...], or by a model's names
# As they lie in files: an array [n, ...], arrays by name, pictures of any size, or texts.
Raw: TypeAlias = Arrays | list[Bytes] | list[str]
Rows: TypeAlias = Callable[[Integers], Raw]  # sample numbers [n] -> samples
Preparation: TypeAlias = Callable[[Raw], Arrays]  # what a model makes of samples
# A batch: images are 8 bits [n, 3, h, w]; several inputs come by the names the model takes.
Samples: TypeAlias = Tensor | dict[str, Tensor]


def stack(raw: Raw) -> Arrays:
    """Samples as one array: what a model gets that has no preparation of its own."""
    if not isinstance(raw, list):
        return raw
    pictures = [each for each in raw if not isinstance(each, str)]
    require(
        len(pictures) == len(raw),
        "samples",
        "texts",
        "arrays, or a model with a tokenizer: hf:FOLDER",
    )
    sizes = sorted({each.shape[:2] for each in pictures})
    require(
        len(sizes) == 1,
        "pictures",
        f"of sizes {sizes[:3]}",
        "of one size, or a model that says how to resize and crop them",
    )
    return np.stack(pictures)


def join(parts: Sequence[Samples], order: Tensor) -> Samples:
    """Batches as one, its samples in an order [n]; arrays by name are filled up with 0, as texts of
    unlike lengths are.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])[order]
    named = [part for part in parts if isinstance(part, dict)]
    return {name: _stack_up([part[name] for part in named])[order] for name in first}


def _stack_up(parts: Sequence[Tensor]) -> Tensor:
    """Arrays [n, ...] one after the other; those [n, length] may have any lengths."""
    if parts[0].dim() != 2:
        return torch.cat([*parts])
    longest = max(part.shape[1] for part in parts)
    return torch.cat([functional.pad(part, (0, longest - part.shape[1])) for part in parts])


@final
@dataclass(frozen=True, eq=False)
class Stored:
    """N samples that lie in files, read as they are asked for.

    ``rows`` reads samples by number under each shift. ``members`` are the sample numbers of each
    name of a shift; None: all come under every shift, as in CIFAR-10-C. ``prepare`` makes of
    samples what a model takes. ``counted`` are the names of the classes if the labels count them in
    this order, for want of anything that says which output of a model is which. ``how`` says what
    else determines the samples, beside the files.
    """

    kind: str
    path: Path
    labels: Tensor  # [N]
    rows: Mapping[Shift, Rows]
    sha256: Callable[[], str]
    members: Mapping[str, Tensor] | None = None
    prepare: Preparation = field(default=stack)
    counted: tuple[str, ...] | None = None
    how: str = ""

    @property
    def shifts(self) -> tuple[str, ...]:
        """The names found."""
        return tuple(dict.fromkeys(shift.corruption for shift in self.rows))

    @cached_property
    def _hash(self) -> str:
        return self.sha256()

    @cached_property
    def _hash_labels(self) -> str:
        found = hashlib.sha256(self.labels.numpy().tobytes())
        for name, index in (self.members or {}).items():
            found.update(f"{name} {index.tolist()}".encode())
        return found.hexdigest()

    def describe(self) -> dict[str, str]:
        """What a report says of the data."""
        return {
            "kind": self.kind,
            "path": str(self.path),
            "frost": "as stored",
            "sha256": self._hash,
            "labels_sha256": self._hash_labels,
            **({"read": self.how} if self.how else {}),
        }

    def with_labels(self, labels: Tensor) -> Self:
        """The samples with other labels [N], which somebody has given the model's numbers."""
        return replace(self, labels=labels, counted=None)

    def with_seed(self, seed: int) -> Self:
        """Itself: what is stored has no seed."""
        return self

    def prepared(self, prepare: Preparation | None) -> Self:
        """The data as a model takes them; None: as they lie."""
        return self if prepare is None else replace(self, prepare=prepare)

    def require(self, shift: Shift) -> None:
        """Raise unless the shift can be taken."""
        require_known(shift, self.rows, f" in {self.path}")

    def take(self, shift: Shift, index: Tensor, device: torch.device) -> Samples:
        """Samples ``index`` [n] under the shift, on the device."""
        self.require(shift)
        require_index(index, len(self.labels))
        found = self.prepare(self.rows[shift](index.cpu().numpy()))
        if isinstance(found, dict):
            return {name: move(array, device) for name, array in found.items()}
        return move(found, device)


def move(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array on the device; 8 bits [n, h, w, 3] are pixels, and become [n, 3, h, w]."""
    rows = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":  # from pinned memory, or the copy would wait for the steps before it
        rows = rows.pin_memory()
    there = rows.to(device, non_blocking=True)
    pixels = rows.dtype == torch.uint8 and rows.dim() == 4
    return there.permute(0, 3, 1, 2).contiguous() if pixels else there


def require_known(shift: Shift, known: Collection[Shift], where: str = "") -> None:
    """Raise unless a shift is among those known, and say which are."""
    if shift in known:  # the rest is for the message
        return
    names = list(dict.fromkeys(each.corruption for each in known))
    name, severity = shift
    require(
        name in names, "shift", name, f"one of {', '.join(names)}{where}{nearest(str(name), names)}"
    )
    severities = sorted(each.severity for each in known if each.corruption == name)
    require(
        shift in known,
        "severity",
        severity,
        f"one of {', '.join(map(str, severities))} for {name!r}{where}",
    )


def require_index(index: Tensor, count: int) -> None:
    """Raise unless ``index`` [n] are numbers of samples below ``count``."""
    require(
        index.dim() == 1 and index.dtype == torch.int64,
        "index",
        f"{index.dtype} {list(index.shape)}",
        "int64 [n]",
    )
    if len(index):
        low, high = int(index.min()), int(index.max())
        require(
            low >= 0 and high < count, "index", [low, high], f"sample numbers from 0 to {count - 1}"
        )

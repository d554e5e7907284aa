"""The data of streams: images under many shifts, made here or read from files."""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from driftfilter.app.corruptions import FROST_TEXTURE, corrupt, require_pixels
from driftfilter.app.images.files import (
    holds_clean,
    list_arrays,
    open_batch,
    open_images,
    require_labels,
)
from driftfilter.app.readers.classes import ClassNumbers
from driftfilter.app.readers.columns import Columns
from driftfilter.app.readers.corrupted import MADE, Corrupted
from driftfilter.app.readers.folders import open_folders
from driftfilter.app.readers.published import open_npz, open_published
from driftfilter.app.readers.records import open_records
from driftfilter.app.readers.rows import SUFFIXES
from driftfilter.app.readers.stored import (
    CLEAN as CLEAN,
    Images as Images,
    Preparation,
    Shift as Shift,
    Stored,
    require_index,
    require_known,
    shift_of as shift_of,
)
from driftfilter.app.readers.windows import INPUTS, holds_windows, open_windows
from driftfilter.app.samples import open_sample
from driftfilter.base.checks import require, require_count


@final
@dataclass(frozen=True, eq=False)
class Generated:
    """Corruptions made here of clean images [N, 3, h, w], each shift once and for all N:
    ``corrupt(images, …, seed)``.

    What was made stays in memory, 8 bits a value, on the device it was asked for. ``path`` is that
    of the clean images.
    """

    clean: Images
    seed: int = 0
    path: str = "generated"
    _seeded: "dict[int, Generated]" = field(default_factory=dict, init=False, repr=False)
    _made: dict[tuple[Shift, torch.device], Tensor] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        images, labels = self.clean
        require_pixels("clean.images", images)
        require_labels("clean.labels", labels.cpu().numpy(), len(images))
        require_count("seed", self.seed, 0)

    @property
    def labels(self) -> Tensor:
        """Labels [N], on the CPU."""
        return self.clean.labels.long().cpu()

    @property
    def members(self) -> None:
        """None: every sample comes under every shift."""
        return None

    @property
    def counted(self) -> None:
        """None: the labels are given."""
        return None

    @property
    def shifts(self) -> tuple[str, ...]:
        """Every corruption, and clean."""
        return tuple(dict.fromkeys(shift.corruption for shift in MADE))

    def describe(self) -> dict[str, str]:
        """What a report says of the data, which is the same for all seeds."""
        images = self._bytes(CLEAN, torch.device("cpu"))
        content = images.numpy().tobytes() + self.labels.numpy().tobytes()
        return {
            "kind": "generated",
            "path": self.path,
            "frost": FROST_TEXTURE,
            "sha256": hashlib.sha256(content).hexdigest(),
        }

    def with_labels(self, labels: Tensor) -> Self:
        """The images with other labels [N]."""
        return replace(self, clean=self.clean._replace(labels=labels))

    def with_seed(self, seed: int) -> Self:
        """The images under the corruptions of this seed, cached with all that is made of them."""
        if seed != self.seed and seed not in self._seeded:
            self._seeded[seed] = replace(self, seed=seed)
        return self if seed == self.seed else self._seeded[seed]

    def prepared(self, prepare: Preparation | None) -> Self | Corrupted:
        """The images as a model takes them; None: as they are."""
        if prepare is None:
            return self
        images = self._bytes(CLEAN, torch.device("cpu")).permute(0, 2, 3, 1).numpy()
        clean = Stored(
            "generated",
            Path(self.path),
            self.labels,
            {CLEAN: images.__getitem__},
            lambda: self.describe()["sha256"],
            prepare=prepare,
        )
        return Corrupted(clean, self.seed)

    def require(self, shift: Shift) -> None:
        """Raise unless the shift can be taken."""
        require_known(shift, MADE)

    def take(self, shift: Shift, index: Tensor, device: torch.device) -> Tensor:
        """Samples ``index`` [n] under the shift: uint8 [n, 3, h, w] on the device."""
        self.require(shift)
        require_index(index, len(self.clean.labels))
        if (shift, device) not in self._made:
            self._made[shift, device] = self._bytes(shift, device)
        return self._made[shift, device][index.to(device)]

    def _bytes(self, shift: Shift, device: torch.device) -> Tensor:
        images = self.clean.images.to(device)
        made = (
            images
            if shift == CLEAN
            else corrupt(images, shift.corruption, shift.severity, self.seed)
        )
        return (255 * made).round().byte()


# N numbered samples; under a shift come all of them, or its members.
Domains: TypeAlias = Generated | Corrupted | Stored


def sample_images() -> Images:
    """The first 2,000 images of the CIFAR-10 test set, which ship with the package."""
    with open_sample("cifar10_test_first2000.npz") as path:
        return open_cifar10(path)


def open_cifar10(path: Path | str) -> Images:
    """Test images of CIFAR-10 or CIFAR-100: from the folder of its python version, or "images"
    [n, h, w, 3] and "labels" of an ``.npz``.
    """
    path = Path(path)
    batch = path / ("test_batch" if (path / "test_batch").is_file() else "test")
    images, labels = open_batch(batch) if path.is_dir() else open_images(path)
    if labels is None:
        raise ValueError(f"{path} must be an .npz with 'labels', got none")
    pixels = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
    return Images(pixels.float() / 255, torch.from_numpy(labels))


@final
@dataclass(frozen=True)
class Layout:
    """How data lie in files, as far as the files do not say it.

    ``severity`` is that of data that does not name its own: an ``.npz`` of corruptions, folders
    without severities. ``names`` are the shifts that must be there and alone are opened; None: the
    15 corruptions of CIFAR-10-C, or all folders. ``severities`` are those of folders that are
    opened; None: all. ``columns`` says what the columns of rows mean, and ``numbers`` which label a
    class folder has. ``fitted``: the models bring pictures to one size.
    """

    severity: int = 5
    names: Collection[str] | None = None
    severities: Collection[int] | None = None
    columns: Columns = field(default_factory=Columns)
    numbers: ClassNumbers | None = None
    fitted: bool = False


def open_domains(
    path: Path | str | None,
    clean: Images | None = None,
    seed: int = 0,
    layout: Layout | None = None,
    clean_path: str = "generated",
    keep: Path | None = None,
) -> Domains:
    """The data at a path, by what lies there; without a path, corruptions made of ``clean`` or of
    the images that ship.

    Of pictures that lie in class folders alone corruptions are made, too, which stay in the folder
    ``keep`` if there is one. ``clean_path`` is what reports say of ``clean``.
    """
    found = _open(path, clean, seed, layout or Layout(), clean_path)
    if keep is None:
        return found
    allowed = "left out: it is for corruptions made of class folders of pictures"
    require(isinstance(found, Corrupted), "keep", str(keep), allowed)
    assert isinstance(found, Corrupted)
    return replace(found, keep=keep)


def _open(
    path: Path | str | None, clean: Images | None, seed: int, layout: Layout, clean_path: str
) -> Domains:
    if path is None:
        return Generated(sample_images() if clean is None else clean, seed, clean_path)
    path = Path(path)
    require(path.exists(), "path", str(path), "a file or folder of data")
    if path.is_file():
        return _open_file(path, clean, seed, layout)
    if (path / "test_batch").is_file() or (path / "test").is_file():
        return Generated(open_cifar10(path), seed, str(path))
    if holds_windows(path):
        return open_windows(path, layout.severity)
    if any(path.glob("*.npy")):
        return open_published(path, clean, layout.names)
    found = open_folders(
        path, layout.severity, layout.numbers, layout.fitted, layout.names, layout.severities
    )
    return Corrupted(found, seed) if found.shifts == (CLEAN.corruption,) else found


def _open_file(path: Path, clean: Images | None, seed: int, layout: Layout) -> Domains:
    if path.suffix in SUFFIXES:
        return open_records(path, layout.columns, layout.severity, layout.numbers, layout.fitted)
    names = list_arrays(path)
    if INPUTS in names:
        return open_windows(path, layout.severity)
    if holds_clean(path):
        return Generated(open_cifar10(path), seed, str(path))
    return open_npz(path, clean, layout.severity)

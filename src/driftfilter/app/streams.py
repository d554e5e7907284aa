"""The data of streams: images under many shifts, made here or read from files."""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftfilter.app.corruptions import (
    CORRUPTIONS,
    EXTRA,
    FROST_TEXTURE,
    SEVERITIES,
    corrupt,
    require_pixels,
    require_severity,
)
from driftfilter.app.images.files import (
    Bytes,
    Integers,
    digest,
    holds_clean,
    open_array,
    open_arrays,
    open_batch,
    open_images,
    picture,
    pictures,
    pictures_by_class,
    require_images,
    require_labels,
    require_one_size,
    severity_labels,
    subfolders,
)
from driftfilter.base.checks import nearest, require, require_count


class Images(NamedTuple):
    """Images with the labels that only the evaluation sees."""

    images: Tensor  # [n, 3, h, w], RGB in [0, 1]
    labels: Tensor  # [n]


class Shift(NamedTuple):
    """A domain: what happened to the images, and how badly (0 for clean, else 1 to 5)."""

    corruption: str
    severity: int = 5


CLEAN = Shift("clean", 0)


def shift_of(corruption: str, severity: int) -> Shift:
    """The shift of a name at a severity, which clean images do not have."""
    require_severity(severity)
    return CLEAN if corruption == CLEAN.corruption else Shift(corruption, severity)


# What can be made here.
MADE = (
    CLEAN,
    *(Shift(name, severity) for name in (*CORRUPTIONS, *EXTRA) for severity in SEVERITIES),
)


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

    def with_seed(self, seed: int) -> Self:
        """The images under the corruptions of this seed, cached with all that is made of them."""
        if seed != self.seed and seed not in self._seeded:
            self._seeded[seed] = replace(self, seed=seed)
        return self if seed == self.seed else self._seeded[seed]

    def require(self, shift: Shift) -> None:
        """Raise unless the shift can be taken."""
        _require_known(shift, MADE)

    def take(self, shift: Shift, index: Tensor, device: torch.device) -> Tensor:
        """Samples ``index`` [n] under the shift: uint8 [n, 3, h, w] on the device."""
        self.require(shift)
        _require_index(index, len(self.clean.labels))
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


Rows: TypeAlias = Callable[[Integers], Bytes]  # sample numbers [n] -> images [n, h, w, 3]


@final
@dataclass(frozen=True, eq=False)
class Stored:
    """Shifted images that lie in files, read as they are asked for; ``open_published``,
    ``open_npz`` and ``open_folders`` make it.
    """

    kind: str
    path: Path
    labels: Tensor  # [N]
    rows: Mapping[Shift, Rows]
    sha256: Callable[[], str]

    @property
    def shifts(self) -> tuple[str, ...]:
        """The names found."""
        return tuple(dict.fromkeys(shift.corruption for shift in self.rows))

    def describe(self) -> dict[str, str]:
        """What a report says of the data."""
        return {
            "kind": self.kind,
            "path": str(self.path),
            "frost": "as stored",
            "sha256": self.sha256(),
        }

    def with_seed(self, seed: int) -> Self:
        """Itself: what is stored has no seed."""
        return self

    def require(self, shift: Shift) -> None:
        """Raise unless the shift can be taken."""
        _require_known(shift, self.rows, f" in {self.path}")

    def take(self, shift: Shift, index: Tensor, device: torch.device) -> Tensor:
        """Samples ``index`` [n] under the shift: uint8 [n, 3, h, w] on the device."""
        self.require(shift)
        _require_index(index, len(self.labels))
        rows = torch.from_numpy(np.ascontiguousarray(self.rows[shift](index.cpu().numpy())))
        if (
            device.type == "cuda"
        ):  # from pinned memory, or the copy would wait for the steps before it
            rows = rows.pin_memory()
        return rows.to(device, non_blocking=True).permute(0, 3, 1, 2).contiguous()


# N samples that come in one order under every shift.
Domains: TypeAlias = Generated | Stored


def _require_known(shift: Shift, known: Collection[Shift], where: str = "") -> None:
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


def _require_index(index: Tensor, count: int) -> None:
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


def open_published(
    folder: Path, clean: Images | None = None, names: Collection[str] | None = None
) -> Stored:
    """CIFAR-10-C as published: <name>.npy [5N, 32, 32, 3] and labels.npy [5N], severity s in rows
    (s-1)N … sN.

    All of ``names`` must be there, and no other is read; None: the 15, and of the four extra
    corruptions what is there. ``clean``: the images they were made of, for "clean".
    """
    known = [*CORRUPTIONS, *EXTRA]
    for name in names or ():
        require(
            name in (CLEAN.corruption, *known),
            "shift",
            name,
            f"one of {', '.join(known)}{nearest(name, known)}",
        )
    path = folder / "labels.npy"
    labels = severity_labels(path)
    there = [name for name in known if name in CORRUPTIONS or (folder / f"{name}.npy").is_file()]
    found = there if names is None else [name for name in names if name != CLEAN.corruption]
    paths = {name: folder / f"{name}.npy" for name in found}
    images = _require_alike(
        {str(each): open_array(each) for each in paths.values()}, 5 * len(labels)
    )
    rows = {
        Shift(name, each): _block(block, each, len(labels))
        for name, block in zip(found, images, strict=True)
        for each in SEVERITIES
    }
    return Stored(
        "CIFAR-10-C",
        folder,
        torch.from_numpy(labels),
        rows | _clean_rows(clean, labels),
        lambda: digest([path, *paths.values()]),
    )


def _block(images: Bytes, severity: int, count: int) -> Rows:
    return lambda index: images[(severity - 1) * count + index]


def _clean_rows(clean: Images | None, labels: Integers) -> dict[Shift, Rows]:
    """The first N clean images as rows, once their labels are known to be the same."""
    if clean is None:
        return {}
    require(
        np.array_equal(clean.labels[: len(labels)].cpu().numpy(), labels),
        "clean.labels",
        "others",
        f"the {len(labels)} labels of the shifted images, in their order",
    )
    images = (255 * clean.images[: len(labels)]).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    return {CLEAN: lambda index: images[index]}


def open_npz(file: Path, clean: Images | None = None, severity: int = 5) -> Stored:
    """Images of an ``.npz`` file: one array [N, h, w, 3] for each corruption, all of this severity,
    and "labels" [N].

    If it has no labels they are those of the first N images of ``clean``, of which the arrays were
    made.
    """
    found = open_arrays(file)
    inside = found.pop("labels", None)
    require(bool(found), str(file), "none", "an .npz with an array of images for each corruption")
    images = _require_alike({f"{file}: {name}": array for name, array in found.items()})
    known = _find_labels(file, inside, clean, len(images[0]))
    rows = {
        shift_of(name, severity): array.__getitem__
        for name, array in zip(found, images, strict=True)
    }
    return Stored(
        "arrays",
        file,
        torch.from_numpy(known),
        _clean_rows(clean, known) | rows,
        lambda: digest([file]),
    )


def _require_alike(arrays: Mapping[str, NDArray[Any]], count: int | None = None) -> list[Bytes]:
    """Arrays of images [n, h, w, 3] by name, known to be of one shape."""
    images = [require_images(name, array, count) for name, array in arrays.items()]
    for name, array in zip(arrays, images, strict=True):
        require(
            array.shape == images[0].shape,
            name,
            list(array.shape),
            f"{list(images[0].shape)}, as {next(iter(arrays))} is",
        )
    return images


def _find_labels(
    file: Path, inside: NDArray[Any] | None, clean: Images | None, count: int
) -> Integers:
    """Labels [count] of an ``.npz`` file: those inside, else those of the clean images."""
    if inside is not None:
        return require_labels(f"{file}: labels", inside, count)
    if clean is None:
        raise ValueError(f'{file} must be given with labels: "labels" inside, or clean images')
    return require_labels("clean.labels", clean.labels[:count].cpu().numpy(), count)


def open_folders(root: Path, severity: int = 5) -> Stored:
    """Pictures in folders: root/<shift>/<class>/*.png, root/<shift>/<severity>/<class>/*.png or,
    clean, root/<class>/*.png.

    Classes count from 0 by name; samples are shuffled once, always alike, so that the first so many
    are of all classes. Every shift holds the same pictures by class and name, all of one size: the
    header of each is read at once, its pixels when asked for. ``severity`` is that of shifts
    without one. The hash is of names and sizes.
    """
    found = {
        shift: pictures_by_class(folder) for shift, folder in _shift_folders(root, severity).items()
    }
    first = next(iter(found.values()))
    for shift, classes in found.items():
        _require_same(root, shift, classes, first)
    paths = {
        shift: [path for each in classes.values() for path in each]
        for shift, classes in found.items()
    }
    require_one_size([path for each in paths.values() for path in each])
    labels = np.repeat(np.arange(len(first)), [len(each) for each in first.values()])
    order = np.random.default_rng(0).permutation(len(labels))
    rows = {
        shift: _read_pictures([each[sample] for sample in order]) for shift, each in paths.items()
    }
    return Stored(
        "folders", root, torch.from_numpy(labels[order]), rows, lambda: _hash_names(root, paths)
    )


def _shift_folders(root: Path, severity: int) -> dict[Shift, Path]:
    """Folder of the class folders of each shift, found from how deep the pictures lie."""
    first = next(pictures(root), None)
    depth = 0 if first is None else len(first.relative_to(root).parts) - 1
    expected = (
        "CIFAR-10-C (<corruption>.npy), CIFAR-10's python version (test_batch), or pictures in "
        "root/<shift>/<class>/*.png, "
        "root/<shift>/<severity>/<class>/*.png or root/<class>/*.png"
    )
    require(depth in (1, 2, 3), str(root), "no picture" if first is None else str(first), expected)
    if depth == 1:
        return {CLEAN: root}
    if depth == 2:
        return {shift_of(each.name, severity): each for each in subfolders(root)}
    levels = [level for each in subfolders(root) for level in subfolders(each)]
    for level in levels:
        allowed = "0" if level.parent.name == CLEAN.corruption else "12345"
        require(
            level.name in tuple(allowed),
            str(level),
            level.name,
            f"named after a severity, one of {', '.join(allowed)}",
        )
    return {Shift(level.parent.name, int(level.name)): level for level in levels}


def _require_same(
    root: Path, shift: Shift, classes: dict[str, list[Path]], first: dict[str, list[Path]]
) -> None:
    """Raise unless a shift has the classes, and in each the pictures by name, of the first one."""
    require(
        list(classes) == list(first),
        f"{root}: classes of {shift}",
        list(classes),
        f"those of the first shift, {list(first)}",
    )
    for name, paths in classes.items():
        stems, expected = [path.stem for path in paths], [path.stem for path in first[name]]
        require(
            stems == expected,
            f"{root}: class {name!r} of {shift}",
            sorted(set(stems) ^ set(expected))[:3],
            "the same pictures by name as in the first shift",
        )


def _read_pictures(paths: list[Path]) -> Rows:
    return lambda index: np.stack([picture(paths[each]) for each in index])


def _hash_names(root: Path, paths: Mapping[Shift, Iterable[Path]]) -> str:
    lines = [
        f"{path.relative_to(root).as_posix()} {path.stat().st_size}"
        for each in paths.values()
        for path in each
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def sample_images() -> Images:
    """The first 2,000 images of the CIFAR-10 test set, which ship with the package."""
    with as_file(files("driftfilter.app") / "assets" / "cifar10_test_first2000.npz") as path:
        return open_cifar10(path)


def open_cifar10(path: Path | str) -> Images:
    """CIFAR-10's test images: from the folder of its python version, or "images" [n, 32, 32, 3] and
    "labels" of an ``.npz``.
    """
    path = Path(path)
    images, labels = open_batch(path / "test_batch") if path.is_dir() else open_images(path, 10)
    if labels is None:
        raise ValueError(f"{path} must be an .npz with 'labels', got none")
    pixels = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
    return Images(pixels.float() / 255, torch.from_numpy(labels))


def open_domains(
    path: Path | str | None,
    clean: Images | None = None,
    seed: int = 0,
    severity: int = 5,
    names: Collection[str] | None = None,
    clean_path: str = "generated",
) -> Domains:
    """The data at a path, by what lies there; without a path, corruptions made of ``clean`` or of
    the images that ship.

    ``severity`` is that of data that does not name its own: an ``.npz`` of corruptions, folders
    without severities. ``names`` are the corruptions that CIFAR-10-C must have, None for the 15;
    ``clean_path`` is what reports say of ``clean``.
    """
    if path is None:
        return Generated(sample_images() if clean is None else clean, seed, clean_path)
    path = Path(path)
    require(path.exists(), "path", str(path), "a file or folder of data")
    if path.is_file() and not holds_clean(path):
        return open_npz(path, clean, severity)
    if path.is_file() or (path / "test_batch").is_file():
        return Generated(open_cifar10(path), seed, str(path))
    return (
        open_published(path, clean, names)
        if any(path.glob("*.npy"))
        else open_folders(path, severity)
    )

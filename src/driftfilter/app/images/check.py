"""``driftfilter data``: where to get CIFAR-10-C, and whether a folder holds what it should."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from driftfilter.app.corruptions import CORRUPTIONS, EXTRA
from driftfilter.app.images.files import (
    digest,
    open_array,
    picture,
    pictures,
    require_images,
    severity_labels,
)
from driftfilter.app.readers.published import open_published
from driftfilter.app.streams import open_cifar10, open_domains

# md5 of the archives, as published with them.
ARCHIVES = {
    "CIFAR-10-C.tar": "56bf5dcef84df0e2308c6dcbcbbd8499",
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
}


class Finding(NamedTuple):
    """What was found about one file."""

    name: str
    ok: bool
    text: str


def explain() -> str:
    """Text that says where to get CIFAR-10-C, and which other data can be used."""
    return f"""\
Nothing has to be fetched: without a path, streams are made of the 2,000 CIFAR-10 test images
that ship with driftfilter.

CIFAR-10-C (Hendrycks & Dietterich, "Benchmarking Neural Network Robustness to Common
Corruptions and Perturbations", 2019)
  from   https://zenodo.org/records/2535967
  file   CIFAR-10-C.tar, 2.9 GB, md5 {ARCHIVES["CIFAR-10-C.tar"]}
  unpack tar xf CIFAR-10-C.tar: a folder of 19 corruptions, <name>.npy, and labels.npy

CIFAR-10, python version (Krizhevsky, 2009): the clean test images
  from   https://www.cs.toronto.edu/~kriz/cifar.html
  file   cifar-10-python.tar.gz, 163 MB, md5 {ARCHIVES["cifar-10-python.tar.gz"]}
  unpack tar xf cifar-10-python.tar.gz: a folder cifar-10-batches-py with test_batch in it

Data of your own
  arrays   an .npz with a uint8 array [n, h, w, 3] for each shift, and "labels" [n] from 0
  pictures root/<shift>/<class>/*.png, root/<shift>/<severity>/<class>/*.png (as ImageNet-C)
           or root/<class>/*.png

Check a folder or a file, unpacked or not, with: driftfilter data FOLDER"""


def describe(path: Path | str, found: Sequence[Finding]) -> str:
    """Findings as text, with a verdict."""
    wrong = sum(not finding.ok for finding in found)
    lines = [f"{'ok   ' if ok else 'WRONG'}  {name:<24} {text}" for name, ok, text in found]
    verdict = (
        "all is as it should be" if not wrong else f"{wrong} of {len(found)} not as they should be"
    )
    return "\n".join([*lines, f"{path}: {verdict}"])


def find(path: Path) -> Iterator[Finding]:
    """What there is to say of every file of a folder, or of one file."""
    archives = [
        file
        for file in (path, *(path / name for name in ARCHIVES))
        if file.name in ARCHIVES and file.is_file()
    ]
    yield from (_look(file.name, partial(_archive, file)) for file in archives)
    arrays, batch = path.is_dir() and any(path.glob("*.npy")), (path / "test_batch").is_file()
    if arrays:
        yield from _check_published(path)
    if batch:
        yield _look(
            "test_batch",
            lambda: f"{len(open_cifar10(path).labels)} images{_hash(path / 'test_batch')}",
        )
    if not (archives or arrays or batch):
        yield _look(path.name, partial(_other, path))


def _look(name: str, describe: Callable[[], str]) -> Finding:
    try:
        return Finding(name, True, describe())
    except (ValueError, OSError, ImportError) as error:
        return Finding(name, False, str(error))


def _archive(file: Path) -> str:
    found, expected = digest([file], "md5"), ARCHIVES[file.name]
    if found != expected:
        raise ValueError(f"{file} must have md5 {expected}, got {found}")
    return f"md5 {found}, as published (unpack it)"


def _check_published(folder: Path) -> Iterator[Finding]:
    """Every file of CIFAR-10-C by itself, so that all that is wrong is said at once; then all of
    them together.
    """
    labels = folder / "labels.npy"
    yield _look(
        labels.name,
        lambda: f"{5 * len(severity_labels(labels))} labels, five times the same{_hash(labels)}",
    )
    for name in (*CORRUPTIONS, *EXTRA):
        file = folder / f"{name}.npy"
        if name in CORRUPTIONS or file.is_file():
            yield _look(file.name, partial(_images, file))
        else:
            yield Finding(file.name, True, "not there, and not needed")
    yield _look(
        "all together",
        lambda: f"{len(open_published(folder).labels)} images at each severity (published: 10000)",
    )


def _images(file: Path) -> str:
    array = require_images(str(file), open_array(file))
    return f"{array.dtype} {list(array.shape)}{_hash(file)}"


def _other(path: Path) -> str:
    """An ``.npz`` file or folders of pictures, every one of which is read."""
    domains = open_domains(path)
    if path.is_dir():
        for file in pictures(path):
            picture(file)
    found = domains.describe()
    return (
        f"{found['kind']}: {len(domains.labels)} samples under {', '.join(domains.shifts)}; "
        f"sha256 {found['sha256']}"
    )


def _hash(file: Path) -> str:
    return f"; sha256 {digest([file])}"

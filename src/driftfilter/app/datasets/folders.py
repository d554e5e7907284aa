"""Data sets of folders of pictures: how much a path resembles one, and what is missing or damaged
there.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from driftfilter.app.corruptions import CORRUPTIONS, EXTRA, SEVERITIES
from driftfilter.app.datasets.findings import Finding, Look, judge, name_some, ratio, try_to
from driftfilter.app.images.files import enter, pictures_in, subfolders
from driftfilter.app.readers.folders import ANNOTATIONS, find_pictures
from driftfilter.base.checks import require


def _list_classes(folder: Path) -> dict[str, list[Path]]:
    """Pictures by class; classes may be empty."""
    found = {}
    for each in subfolders(enter(folder)):
        names = pictures_in(each)
        inner = each if names else enter(each)
        found[each.name] = [inner / name for name in names or pictures_in(inner)]
    return found


@final
@dataclass(frozen=True)
class CorruptedFolders:
    """ImageNet-C or Tiny-ImageNet-C: <corruption>/<severity>/<class>/*.JPEG, perhaps with a folder
    for each group of corruptions.
    """

    classes: int
    pictures: int  # of a class

    def resembles(self, path: Path) -> float:
        levels = [
            level
            for folder in self._find(path).values()
            for level in subfolders(folder)
            if level.name in map(str, SEVERITIES)
        ]
        return ratio(len(subfolders(levels[0])), self.classes) if levels else 0

    def _find(self, path: Path) -> dict[str, Path]:
        """Folders of corruptions by name."""
        if not path.is_dir():
            return {}
        groups = [path, *subfolders(path)]
        known = (*CORRUPTIONS, *EXTRA)
        return {
            each.name: each for group in groups for each in subfolders(group) if each.name in known
        }

    def check(self, path: Path, look: Look) -> Iterator[Finding]:
        found = self._find(path)
        # Of all corruptions and severities: each must have all.
        names = {
            each.name
            for folder in found.values()
            for level in subfolders(folder)
            for each in subfolders(level)
        }
        for name in (*CORRUPTIONS, *EXTRA):
            if name in found:
                yield self._check(found[name], names, look)
            else:
                needed = name in CORRUPTIONS
                yield Finding(
                    name, not needed, "missing" if needed else "not there, and not needed"
                )

    def _check(self, folder: Path, names: set[str], look: Look) -> Finding:
        wrong: list[str] = []
        for severity in SEVERITIES:
            level = folder / str(severity)
            if not level.is_dir():
                wrong.append(f"severity {severity} is missing")
                continue
            own = [
                *_check_classes(_list_classes(level), names, self.classes, self.pictures),
                *_check_whole(level, look),
            ]
            wrong += [f"severity {severity}: {each}" for each in own]
        return judge(
            folder.name,
            wrong,
            f"{len(SEVERITIES)} severities x {self.classes} classes x {self.pictures} pictures",
        )


def _check_classes(
    found: Mapping[str, Collection[Path]], names: set[str], classes: int, pictures: int | None
) -> Iterator[str]:
    """What is wrong with the classes of a folder, of which ``names`` are known from others."""
    missing = names - {*found}
    if missing:
        yield f"{len(missing)} classes are missing ({name_some(missing)})"
    if len(found) + len(missing) != classes:
        yield f"{len(found)} of {classes} classes"
    short = [
        f"{name} {len(own)}" for name, own in found.items() if pictures not in (None, len(own))
    ]
    if short:
        yield f"{len(short)} classes without {pictures} pictures ({name_some(short)})"
    empty = [name for name, own in found.items() if not own]
    if empty and pictures is None:
        yield f"{len(empty)} classes without pictures ({name_some(empty)})"


def _check_whole(folder: Path, look: Look) -> Iterator[str]:
    """What is wrong with the pictures under a folder."""
    paths = [path for own in _list_classes(folder).values() for path in own]
    damaged = look.find_damaged(paths)
    if damaged:
        yield f"{len(damaged)} pictures are damaged ({name_some(damaged)})"


@final
@dataclass(frozen=True)
class DomainFolders:
    """PACS, Office, DomainNet: <domain>/<class>/*.jpg, with so many pictures in each domain."""

    domains: Mapping[str, int]
    classes: int

    def resembles(self, path: Path) -> float:
        every = subfolders(path) if path.is_dir() else []
        there = [each for each in every if each.name in self.domains]
        classes = {each.name for folder in there for each in subfolders(enter(folder))}
        return len(there) / len(self.domains) * ratio(len(classes), self.classes)

    def check(self, path: Path, look: Look) -> Iterator[Finding]:
        there = {
            name: _list_classes(path / name) for name in self.domains if (path / name).is_dir()
        }
        names = {each for found in there.values() for each in found}
        for name, count in self.domains.items():
            if name not in there:
                yield Finding(name, False, "missing")
                continue
            found, own = there[name], sum(map(len, there[name].values()))
            wrong = [
                *_check_classes(found, names, self.classes, None),
                *_check_whole(path / name, look),
            ]
            if own != count:
                wrong.insert(0, f"{own} of {count} pictures")
            yield judge(name, wrong, f"{self.classes} classes, {count} pictures")


@final
@dataclass(frozen=True)
class ClassFolders:
    """ImageNet's relatives: <class>/*, with so many pictures in all, or in each class."""

    classes: int
    pictures: int
    each: int | None = None
    prefix: str = ""  # of the names of pictures

    def resembles(self, path: Path) -> float:
        if not path.is_dir():
            return 0
        found = {each.name: pictures_in(each) for each in subfolders(path)}
        names = [name for own in found.values() for name in own]
        right = [name for name in names if name.startswith(self.prefix)]
        return ratio(len(found), self.classes) * ratio(len(right), self.pictures)

    def check(self, path: Path, look: Look) -> Iterator[Finding]:
        found = _list_classes(path)
        numbered = all(name.isdecimal() for name in found)
        names = {str(number) for number in range(self.classes)} if numbered else {*found}
        wrong = list(_check_classes(found, names, self.classes, self.each))
        yield judge("classes", wrong, f"{self.classes}")
        count = sum(map(len, found.values()))
        wrong = [] if count == self.pictures else [f"{count} of {self.pictures}"]
        yield judge("pictures", [*wrong, *_check_whole(path, look)], f"{count}")


@final
@dataclass(frozen=True)
class AnnotatedFolder:
    """Tiny-ImageNet: train/<class>/images/*.JPEG, and val/images/*.JPEG with their classes in a
    file.
    """

    classes: int
    train: int  # pictures of a class
    val: int  # pictures

    def resembles(self, path: Path) -> float:
        return float((self._find(path) / "val" / ANNOTATIONS).is_file())

    def _find(self, path: Path) -> Path:
        """The folder above "val", which the bench is given."""
        return path.parent if path.name == "val" else path

    def check(self, path: Path, look: Look) -> Iterator[Finding]:
        path = self._find(path)
        yield try_to("val", lambda: self._check_val(path / "val", look))
        if (path / "train").is_dir():
            found = _list_classes(path / "train")
            wrong = [
                *_check_classes(found, {*found}, self.classes, self.train),
                *_check_whole(path / "train", look),
            ]
            text = f"{self.classes} classes x {self.train} pictures"
            yield judge("train", wrong, text)
        else:
            yield Finding("train", True, "not there, and needed for training alone")

    def _check_val(self, folder: Path, look: Look) -> str:
        found = find_pictures(folder)
        classes = Counter(each.name for each in found)
        count = f"{len(found)} pictures of {len(classes)} classes"
        whole = len(found) == self.val and len(classes) == self.classes
        require(whole, str(folder), count, f"{self.val} pictures of {self.classes} classes")
        damaged = look.find_damaged([each.path for each in found])
        require(not damaged, str(folder), f"damaged: {name_some(damaged)}", "of whole pictures")
        return count

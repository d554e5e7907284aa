"""Which label the name of a class has."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeAlias

from driftfilter.base.checks import nearest, require

ClassNumbers: TypeAlias = Mapping[str, int]  # labels by the name of a class


def number_classes(
    where: Path, names: Collection[str], numbers: ClassNumbers | None
) -> dict[str, int]:
    """Labels by the name of the class: those of ``numbers`` or, without them, the names themselves
    if all are whole numbers, else counted from 0 by name.
    """
    if numbers is not None:
        for name in sorted(names):
            require(
                name in numbers,
                f"class of {where}",
                name,
                f"one of the {len(numbers)} of --classes{nearest(name, list(numbers))}",
            )
        return {name: numbers[name] for name in sorted(names)}
    if all(name.isdecimal() for name in names):
        return {name: int(name) for name in sorted(names, key=int)}
    return {name: number for number, name in enumerate(sorted(names))}


def list_counted(known: ClassNumbers, numbers: ClassNumbers | None) -> tuple[str, ...] | None:
    """The names in the order of their labels if these were counted, else None."""
    counted = numbers is None and not all(name.isdecimal() for name in known)
    return tuple(known) if counted else None


def read_classes(path: Path) -> dict[str, int]:
    """Labels by the name of a class, from a file of names in the order of the labels: a line each
    (what follows a space is left out), a JSON list, or a JSON object {name: label} or
    {label: [name, …]}.
    """
    require(path.is_file(), "--classes", str(path), "a file that is there")
    try:
        pairs = _parse(path.read_text(encoding="utf-8-sig"))
    except (ValueError, TypeError, IndexError, OSError, RecursionError) as error:
        raise ValueError(
            f"--classes {path} must be names of classes in the order of their labels, a line each "
            f"or as JSON, got {error}"
        ) from error
    names = [name for name, _ in pairs]
    require(
        bool(names) and len(set(names)) == len(names) and min(number for _, number in pairs) >= 0,
        f"--classes {path}",
        names[:3],
        "names of classes, each once, with labels from 0",
    )
    return dict(pairs)


def _parse(text: str) -> list[tuple[str, int]]:
    """Names with their labels."""
    found = json.loads(text) if text.lstrip()[:1] in ("[", "{") else None
    if found is None:
        found = [line.split()[0] for line in text.splitlines() if line.strip()]
    if isinstance(found, list):
        return [(str(name), number) for number, name in enumerate(found)]
    if all(isinstance(value, list) for value in found.values()):
        return [(str(value[0]), int(key)) for key, value in found.items()]
    return [(str(key), int(value)) for key, value in found.items()]

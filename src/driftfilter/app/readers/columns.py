"""What the columns of rows mean."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import final

from typing_extensions import Self

from driftfilter.base.checks import nearest, require

# What stands in a file under its own name if no other is given.
USUAL = ("label", "domain", "path", "text")
NAMED = re.compile(r"\{([^{}]*)\}")  # a column's cell in a path


@final
@dataclass(frozen=True)
class Columns:
    """The column for each meaning; "" is the column of that very name, if there is one. Those not
    named here are a sample's numbers.

    ``path`` holds pictures, beside the file: a column, or a pattern with columns in it
    ("train/{file}.png"). ``text`` holds texts. ``domain`` names the shift of a row. ``time`` is
    what rows are sorted by. ``where`` ("split:test") keeps the rows with this value in a column.
    ``drop`` are columns that nobody reads ("id+note"); nor is one without a name read.
    """

    label: str = ""
    domain: str = ""
    path: str = ""
    text: str = ""
    time: str = ""
    where: str = ""
    drop: str = ""

    def __str__(self) -> str:
        given = ((each.name, getattr(self, each.name)) for each in fields(self))
        return ",".join(f"{meaning}={column}" for meaning, column in given if column)

    @classmethod
    def parse(cls, text: str | None) -> Self:
        """Columns from ``label=y,domain=center,where=split:test``."""
        known = [each.name for each in fields(cls)]
        found: dict[str, str] = {}
        for part in filter(None, (text or "").split(",")):
            key, sign, value = part.partition("=")
            require(
                bool(sign and value) and key in known,
                "--columns",
                part,
                f"MEANING=COLUMN, with a meaning of {', '.join(known)}{nearest(key, known)}",
            )
            found[key] = value
        made = cls(**found)
        require(
            not made.where or all(made.where.partition(":")),
            "--columns where",
            made.where,
            "COLUMN:VALUE, as in split:test",
        )
        require(
            not (made.path and made.text), "--columns text", made.text, "left out: path is given"
        )
        return made

    def find(self, path: Path, names: Sequence[str]) -> Self:
        """The columns of a file that has these, "" for what it does not have; raise if one that was
        given is not there, or none holds the labels.
        """
        for meaning, column in self._list_given():
            _require_column(path, names, meaning, column)
        dropped = self.drop.split("+")
        usual = {
            meaning: meaning
            for meaning in USUAL
            if not getattr(self, meaning) and meaning in names and meaning not in dropped
        }
        if self.path or self.text:  # whichever is given
            usual.pop("path", None)
            usual.pop("text", None)
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        found = type(self)(**{**given, **usual})
        _require_column(path, names, "label", found.label or "label")
        return found

    def _list_given(self) -> list[tuple[str, str]]:
        """Meanings and columns that were given."""
        simple = [(name, getattr(self, name)) for name in ("label", "domain", "text", "time")]
        paths = NAMED.findall(self.path) or [self.path]
        found = [
            *simple,
            *(("path", name) for name in paths),
            ("where", self.where.partition(":")[0]),
            *(("drop", name) for name in self.drop.split("+")),
        ]
        return [(meaning, column) for meaning, column in found if column]

    def ignored(self) -> set[str]:
        """Columns that are no part of a sample; one without a name is none."""
        column = self.where.partition(":")[0]
        return {"", self.label, self.domain, self.time, column, *self.drop.split("+")}


def _require_column(path: Path, names: Sequence[str], meaning: str, column: str) -> None:
    require(
        column in names,
        f"{path}: column of the {meaning}",
        column,
        f"one of {list(names[:12])}{nearest(column, names)} (--columns {meaning}=COLUMN)",
    )

"""What is found about the parts of a data set, and how its pictures are looked at."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, final

from driftfilter.app.images.files import digest, is_whole
from driftfilter.app.readers.together import do_together

BLOCK = 512  # pictures that are looked at together


class Finding(NamedTuple):
    """What was found about one part of a data set."""

    name: str
    ok: bool
    text: str


@final
@dataclass(frozen=True)
class Look:
    """How pictures are looked at: their first and last bytes, or ``decode`` all of them.

    ``seen`` is told how many more were looked at.
    """

    decode: bool = False
    seen: Callable[[int], None] = lambda count: None

    def find_damaged(self, paths: Collection[Path]) -> list[Path]:
        """Those that are no whole pictures."""
        paths, damaged = list(paths), list[Path]()
        for start in range(0, len(paths), BLOCK):
            some = paths[start : start + BLOCK]
            whole = do_together(partial(is_whole, decode=self.decode), some)
            damaged += [path for path, right in zip(some, whole, strict=True) if not right]
            self.seen(len(some))
        return damaged


class Contents(Protocol):
    """What a whole data set contains."""

    def resembles(self, path: Path) -> float:
        """From 0, another data set, to 1."""
        ...

    def check(self, path: Path, look: Look) -> Iterator[Finding]:
        """What there is to say of every part."""
        ...


def try_to(name: str, describe: Callable[[], str]) -> Finding:
    """What ``describe`` says, or why it cannot."""
    try:
        return Finding(name, True, describe())
    except (ValueError, OSError, ImportError) as error:
        return Finding(name, False, str(error))


def hash_of(file: Path) -> str:
    """The end of a line about a file."""
    return f"; sha256 {digest([file])}"


def name_some(names: Iterable[object]) -> str:
    """The first of several, and how many there are."""
    every = sorted(map(str, names))
    return ", ".join(every[:3]) + (f" and {len(every) - 3} more" if len(every) > 3 else "")


def judge(name: str, wrong: Collection[str], text: str) -> Finding:
    """All that is wrong about a part, else what it has."""
    return Finding(name, not wrong, "; ".join(wrong) or text)


def ratio(a: float, b: float) -> float:
    """The smaller by the larger of two counts."""
    return min(a, b) / max(a, b, 1)

"""``driftfilter data``: which data sets there are, and whether a path holds all of one."""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from driftfilter.app.datasets.findings import Finding, Look, try_to
from driftfilter.app.datasets.table import DATA_SETS, LAYOUTS, DataSet
from driftfilter.app.images.files import digest, pictures
from driftfilter.app.streams import Layout, open_domains
from driftfilter.base.checks import nearest, require

WIDTH = 100  # of a line
LIKE = 0.6  # what a path must have of a data set to be taken for it
LIKE_BY_NAME = 0.2  # and if it is called so


def explain() -> str:
    """What there is to get, and which other data can be used: a short list."""
    sets = _list({name: each.title for name, each in DATA_SETS.items()})
    layouts = _list(LAYOUTS)
    return f"""\
Nothing has to be fetched: without a path, streams are made of the 2,000 CIFAR-10 test images
that ship with driftfilter.

Published data sets: driftfilter data NAME says where to get one, its licence and its layout
{sets}

Data of your own, for driftfilter bench --data PATH
{layouts}

Check a folder or a file, unpacked or not, with: driftfilter data FOLDER"""


def _list(rows: Mapping[str, str]) -> str:
    """Names and what they are, in lines of a terminal's width."""
    width = max(map(len, DATA_SETS)) + 4
    return "\n".join(
        textwrap.fill(f"  {name}".ljust(width) + text, WIDTH, subsequent_indent=" " * width)
        for name, text in rows.items()
    )


def describe(path: Path | str, found: Sequence[Finding]) -> str:
    """Findings as text, with a verdict."""
    wrong = sum(not finding.ok for finding in found)
    lines = [f"{'ok   ' if ok else 'WRONG'}  {name:<24} {text}" for name, ok, text in found]
    verdict = (
        "all is as it should be" if not wrong else f"{wrong} of {len(found)} not as they should be"
    )
    return "\n".join([*lines, f"{path}: {verdict}"])


def recognise(path: Path) -> str | None:
    """The name of the data set that a path resembles most; None if it resembles none.

    Its own name decides between data sets that are alike.
    """
    likeness = {name: each.contents.resembles(path) for name, each in DATA_SETS.items()}
    called = [name for name, each in DATA_SETS.items() if _is_called(path, name, each)]
    found = [name for name in called if likeness[name] >= LIKE_BY_NAME]
    found = found or [name for name, each in likeness.items() if each >= LIKE]
    return max(found, key=likeness.__getitem__, default=None)


def _is_called(path: Path, name: str, data: DataSet) -> bool:
    names = {_plain(each) for each in (name, data.path, *data.aliases)}
    return _plain(path.resolve().name) in names


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find(path: Path, name: str | None = None, look: Look | None = None) -> Iterator[Finding]:
    """What there is to say of every part of the data set ``name`` at a path; of archives there
    alone if it has nothing else. None: any other data that can be read.
    """
    look = look or Look()
    archives = {each.name: each.md5 for data in DATA_SETS.values() for each in data.archives}
    found = [
        file
        for file in (path, *(path / each for each in archives))
        if archives.get(file.name) and file.is_file()
    ]
    yield from (
        try_to(file.name, partial(_check_archive, file, archives[file.name])) for file in found
    )
    if name is not None:
        try:
            yield from DATA_SETS[name].contents.check(path, look)
        except (ValueError, OSError) as error:  # such as a folder that may not be read
            yield Finding(path.name, False, str(error))
    elif not found:
        yield try_to(path.name, partial(_check_other, path, look))


def _check_archive(file: Path, expected: str) -> str:
    found = digest([file], "md5")
    require(found == expected, str(file), f"md5 {found}", f"of md5 {expected}, as published")
    return f"md5 {found}, as published (unpack it)"


def _check_other(path: Path, look: Look) -> str:
    """Data of the user's own, every picture of which is looked at."""
    guess = nearest(str(path), list(DATA_SETS))
    require(path.exists(), "path", str(path), f"a file or folder of data, or a data set{guess}")
    domains = open_domains(path, layout=Layout(fitted=True))
    if path.is_dir():
        damaged = look.find_damaged(list(pictures(path)))
        require(not damaged, str(path), f"damaged: {', '.join(map(str, damaged[:3]))}", "whole")
    found = domains.describe()
    return (
        f"{found['kind']}: {len(domains.labels)} samples under {', '.join(domains.shifts)}; "
        f"sha256 {found['sha256']}"
    )

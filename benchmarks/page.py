"""docs/benchmarks.md from page.md.jinja beside this file (the prose) and results/*.json (every
figure).

    python benchmarks/page.py [--check] [--results FOLDER] [--page FILE]

Writes the page; with --check it exits with 1 where the page is not what template and results give.
Ratios and exponents are computed here, from times and sizes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any

import jinja2

from driftfilter.app.bench.matrix import Matrix, compare, markdown
from driftfilter.app.bench.tables import group
from figures import exponent

HERE = Path(__file__).parent
RESULTS, PAGE, TEMPLATE = HERE / "results", HERE.parent / "docs" / "benchmarks.md", "page.md.jinja"


class MissingError(Exception):
    """The template asks for a figure that is not there. No LookupError: jinja2 would make an empty
    value of it.
    """


class Named(dict[str, Any]):
    """A dict that knows where it stands, to say so where a key is missing."""

    def __init__(self, where: str, values: dict[str, Any]) -> None:
        super().__init__({key: named(f"{where}, {key}", value) for key, value in values.items()})
        self.where = where

    def __missing__(self, key: str) -> Any:
        raise MissingError(
            f"{self.where} has no {key!r}; it has {', '.join(map(repr, self)) or 'nothing'}"
        )


def named(where: str, value: Any) -> Any:
    if isinstance(value, dict):
        return Named(where, value)
    return (
        [named(f"{where} {number}", each) for number, each in enumerate(value)]
        if isinstance(value, list)
        else value
    )


def read(folder: Path) -> Named:
    """Every result of a folder, by the name of its file."""
    found = Named(str(folder), {})
    for path in sorted(folder.glob("*.json")):
        found[path.name] = Named(path.name, json.loads(path.read_text(encoding="utf-8")))
    return found


def one(entries: list[Named], **wanted: Any) -> Named:
    """The only entry of a list with these values."""
    fitting = [
        entry for entry in entries if all(entry[key] == value for key, value in wanted.items())
    ]
    if len(fitting) != 1:
        where = entries[0].where if entries else "an empty list"
        raise MissingError(f"{len(fitting)} entries with {wanted}, one is needed ({where} and on)")
    return fitting[0]


def judged(entries: list[Named], **wanted: Any) -> str:
    """Accuracy (NLL, ECE) of the only entry of a list with these values; – if there is none."""
    fitting = [
        entry for entry in entries if all(entry[key] == value for key, value in wanted.items())
    ]
    if not fitting:
        return "–"
    found = one(fitting)
    return f"{share(found['accuracy'])} ({share(found['nll'])}, {share(found['ece'])})"


def share(value: float | None) -> str:
    """.558: three digits, no zero before the point, halves up; – for None."""
    if value is None:
        return "–"
    return f"{Decimal(repr(value)).quantize(Decimal('.001'), ROUND_HALF_UP):f}".removeprefix("0")


def number(value: float, digits: int = 0) -> str:
    return f"{value:,.{digits}f}"


def made(record: Named) -> str:
    """Command, machine, versions and date of a result, and what else has to be said about it."""
    threads = (
        f", {record['threads']} thread{'s' * (record['threads'] > 1)}" if record["threads"] else ""
    )
    hidden = ("driftfilter", "code", "torchmetrics")  # in the file
    versions = ", ".join(
        f"{name} {version}" for name, version in record["versions"].items() if name not in hidden
    )
    remarks = "".join(f"; {record[name]}" for name in ("note", "transcribed") if name in record)
    return (
        f"`{record['command']}`: {record['machine']}{threads}, {versions}, "
        f"{record['date']}{remarks}."
    )


def compared(tasks: list[Named]) -> str:
    """Tables of a matrix: presets against the frozen network by network, protocol, batch size."""
    stream, preset = itemgetter("model", "protocol", "batch", "images"), itemgetter("preset")
    cells = [
        cell
        for alike in group(tasks, stream)
        for cell in compare(
            stream(alike[0]),
            {preset(seeds[0]): [each["mean"] for each in seeds] for seeds in group(alike, preset)},
        )
    ]
    return markdown(Matrix([], cells))


@cache
def template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"share": share, "number": number}
    environment.globals |= {"one": one, "made": made, "exponent": exponent, "zip": zip}
    environment.globals |= {"compared": compared, "judged": judged}
    return environment.get_template(TEMPLATE)


def render(folder: Path) -> str:
    return wrap(template().render(results=read(folder)))


def wrap(page: str) -> str:
    """Paragraphs and items of lists in lines of at most 100 characters; commands stay whole."""
    blocks = re.split(
        r"(^```.*?^```$|\n\s*\n|\n(?=- )|\n(?=\|)|(?<=\|)\n)", page, flags=re.M | re.S
    )
    kept = ("|", "#", "<", "```")
    return "".join(b if b.startswith(kept) or len(b) <= 100 else fill(b) for b in blocks)


def fill(block: str) -> str:
    begun = "- " if block.startswith("- ") else ""
    whole = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), block.removeprefix(begun))
    filled = textwrap.fill(
        " ".join(whole.split(" ")).replace("\n", " "),
        100,
        initial_indent=begun,
        subsequent_indent=" " * len(begun),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace("\0", " ") + "\n" * block.endswith("\n")


def difference(page: str, wanted: str) -> str:
    """The first line in which two texts differ; empty where they are equal."""
    for line, (there, given) in enumerate(zip_longest(page.splitlines(), wanted.splitlines()), 1):
        if there != given:
            return f"line {line} is\n  {there}\nand should be\n  {given}"
    return "" if page == wanted else "its end of file differs"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit with 1 where the page would change",
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    try:
        wanted = render(arguments.results)
    except (MissingError, jinja2.TemplateError, OSError, ValueError) as error:
        sys.exit(f"benchmarks/{TEMPLATE}: {error}")
    if not arguments.check:
        arguments.page.write_text(wanted, encoding="utf-8")
    elif differs := difference(arguments.page.read_text(encoding="utf-8"), wanted):
        source = f"benchmarks/{TEMPLATE} and {arguments.results} give"
        sys.exit(
            f"{arguments.page} is not what {source}: {differs}\nRun: python benchmarks/page.py"
        )


if __name__ == "__main__":
    main()

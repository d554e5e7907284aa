"""The pages with figures: docs/**/X.md from pages/**/X.md.jinja beside this file (the prose) and
results/*.json (every figure), docs/figures/*.svg from the same results and pictures.py.

    python benchmarks/page.py [--check] [--results FOLDER] [--docs FOLDER]

Writes them; with --check it exits with 1 where one is not what template and results give. Ratios
and exponents are computed here, from times and sizes.
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
from statistics import fmean, stdev
from typing import Any

import jinja2

from driftfilter.app.bench.matrix import Matrix, compare, markdown
from driftfilter.app.bench.tables import group
from figures import exponent
from pictures import PICTURES, natural_rows

HERE = Path(__file__).parent
RESULTS, PAGES, DOCS = HERE / "results", HERE / "pages", HERE.parent / "docs"
SUFFIX = ".jinja"
FIGURES = "figures"  # the folder of the pictures
MORE = "lab/more.md.jinja"  # rendered last: the results that no other page has taken
OURS = ("driftfilter", "source")
MEASURES = ("accuracy", "ece", "nll", "brier")


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


class Results(Named):
    """Every result of a folder by the name of its file; ``taken`` are those that were asked for."""

    def __init__(self, where: str) -> None:
        super().__init__(where, {})
        self.taken: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.taken.add(name)
        return super().__getitem__(name)


def read(folder: Path) -> Results:
    found = Results(str(folder))
    for path in sorted(folder.glob("*.json")):
        found[path.name] = Named(path.name, json.loads(path.read_text(encoding="utf-8")))
    return found


def fitting(entries: list[Named], **wanted: Any) -> list[Named]:
    """The entries of a list with these values."""
    return [entry for entry in entries if all(entry[key] == value for key, value in wanted.items())]


def one(entries: list[Named], **wanted: Any) -> Named:
    """The only entry of a list with these values."""
    found = fitting(entries, **wanted)
    if len(found) != 1:
        where = entries[0].where if entries else "an empty list"
        raise MissingError(f"{len(found)} entries with {wanted}, one is needed ({where} and on)")
    return found[0]


def judged(entries: list[Named], **wanted: Any) -> str:
    """Accuracy (NLL, ECE) of the only entry of a list with these values; – if there is none."""
    if not fitting(entries, **wanted):
        return "–"
    found = one(entries, **wanted)
    return f"{share(found['accuracy'])} ({share(found['nll'])}, {share(found['ece'])})"


def spread(values: list[float]) -> str:
    """.851, or .851 ± .002 of several seeds."""
    deviation = f" ± {share(stdev(values))}" if len(values) > 1 else ""
    return share(fmean(values)) + deviation


def quality(tasks: list[Named]) -> str:
    """Cells of a table: accuracy, ECE, NLL and Brier score of a method, over its seeds."""
    cells = [
        spread([task["mean"][name] for task in tasks])
        if tasks and all(name in task["mean"] for task in tasks)
        else "–"
        for name in MEASURES
    ]
    return " | ".join(cells)


def bench_table(record: Named) -> str:
    """A record of tasks.py as a table: a row for each method on each stream, the best first."""
    stream, preset = itemgetter("model", "protocol", "batch", "images"), itemgetter("preset")
    lines = [
        "| network | protocol | batch | images | method | accuracy | ECE | NLL | Brier |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for alike in group(record["figures"], stream):
        methods = sorted(
            group(alike, preset),
            key=lambda seeds: -accuracy(seeds),
        )
        network, protocol, batch, images = stream(alike[0])
        lines += [
            f"| `{network}` | {protocol} | {batch} | {number(images)} | `{preset(seeds[0])}` "
            f"| {quality(seeds)} |"
            for seeds in methods
        ]
    return "\n".join(lines)


def scale_rows(record: Named, title: str) -> str:
    """Rows of a record of tasks.py: the frozen network, the best of others' methods and ours."""
    lines = []
    for alike in group(record["figures"], itemgetter("model", "protocol", "images")):
        methods = {seeds[0]["preset"]: seeds for seeds in group(alike, itemgetter("preset"))}
        ours = [name for name in methods if name.startswith("driftfilter")]
        if not ours:
            continue
        others = [name for name in methods if not name.startswith(OURS)]
        best = max(others, key=lambda name: accuracy(methods[name]), default=None)
        lines += [
            f"| {title}, {number(alike[0]['images'])} images | {alike[0]['protocol']} | `{name}` "
            f"| {quality(methods[name])} |"
            for name in ("source", best, *ours)
            if name in methods
        ]
    return "\n".join(lines)


def verdict(record: Named, title: str) -> str:
    """How far the default is from the frozen network and from the best of others' methods."""
    parts = []
    for alike in group(record["figures"], itemgetter("model", "protocol", "images")):
        found = {
            seeds[0]["preset"]: accuracy(seeds) for seeds in group(alike, itemgetter("preset"))
        }
        own = found.get("driftfilter")
        others = {name: value for name, value in found.items() if not name.startswith(OURS)}
        best = max(others, key=lambda name: others[name], default=None)
        stream = f"{title}, {alike[0]['protocol']}"
        if own is not None and best is not None:
            parts.append(f"{stream}: {apart(own - others[best])} `{best}`.")
    return " ".join(parts)


def apart(difference: float) -> str:
    return f"{abs(100 * difference):.1f} points {'below' if difference < 0 else 'above'}"


def accuracy(seeds: list[Named]) -> float:
    return fmean(task["mean"]["accuracy"] for task in seeds)


def any_table(figures: Any) -> str:
    """Figures of any form: a table of each list of entries, one of what stands alone."""
    if isinstance(figures, list):
        columns = list(dict.fromkeys(key for row in figures for key in row))
        cells = [[plain(row.get(key)) for key in columns] for row in figures]
        rows = [columns, ["---"] * len(columns), *cells]
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)
    tables = {key: value for key, value in figures.items() if is_table(value)}
    alone = [f"| {key} | {plain(value)} |" for key, value in figures.items() if key not in tables]
    parts = ["\n".join(["| | |", "|---|---|", *alone])] if alone else []
    return "\n\n".join([*parts, *(f"{key}:\n\n{any_table(tables[key])}" for key in tables)])


def is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def plain(value: Any) -> str:
    """A value of any kind in a cell."""
    if isinstance(value, dict):
        return "; ".join(f"{key} {plain(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(plain, value))
    return f"{value:.4g}" if isinstance(value, float) else "–" if value is None else str(value)


def share(value: float | None) -> str:
    """.558: three digits, no zero before the point, halves up; – for None."""
    if value is None:
        return "–"
    return f"{Decimal(repr(value)).quantize(Decimal('.001'), ROUND_HALF_UP):f}".removeprefix("0")


def summed(summary: Named | None, name: str = "accuracy") -> str:
    """A mean, with its deviation over seeds if there were several; – for None."""
    if summary is None:
        return "–"
    deviation = summary.get("deviation", {}).get(name, 0)
    return share(summary[name]) + (f" ± {share(deviation)}" if deviation else "")


def shares(values: list[float]) -> str:
    return ", ".join(map(share, values))


def points(difference: float) -> str:
    """A difference of accuracies: +2.1 of a hundred."""
    return f"{100 * difference:+.1f}"


def number(value: float, digits: int = 0) -> str:
    return f"{value:,.{digits}f}"


def code(name: str) -> str:
    """A case of a benchmark as code up to its first comma, but for steps written by hand."""
    preset, comma, rest = name.partition(",")
    return name if name.startswith("hand") else f"`{preset}`{comma}{rest}"


def made(record: Named) -> str:
    """Command, machine, versions and date of a result, and what else has to be said about it."""
    threads = (
        f", {record['threads']} thread{'s' * (record['threads'] > 1)}" if record["threads"] else ""
    )
    hidden = ("driftfilter", "code", "torchmetrics")  # in the file
    versions = ", ".join(
        f"{name} {version}" for name, version in record["versions"].items() if name not in hidden
    )
    remarks = "".join(
        f"; {record[name].removesuffix('.')}"
        for name in ("note", "transcribed")
        if record.get(name)
    )
    return (
        f"`{record['command']}`: {record['machine']}{threads}, {versions}, "
        f"{record['date']}{remarks}."
    )


def brief(record: Named) -> str:
    """Command, machine and date of a result."""
    return f"`{record['command']}`: {record['machine']}, {record['date']}"


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
def environment() -> jinja2.Environment:
    made_ready = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made_ready.filters |= {"share": share, "shares": shares, "number": number, "points": points}
    made_ready.tests["contains"] = lambda whole, part: part in whole
    made_ready.globals |= {"one": one, "fitting": fitting, "made": made, "brief": brief}
    made_ready.globals |= {"compared": compared, "judged": judged, "quality": quality}
    made_ready.globals |= {"spread": spread, "bench_table": bench_table, "code": code}
    made_ready.globals |= {"scale_rows": scale_rows, "any_table": any_table}
    made_ready.globals |= {"verdict": verdict, "natural_rows": natural_rows}
    made_ready.globals |= {"summed": summed, "mean": fmean}
    made_ready.globals |= {"exponent": exponent, "zip": zip}
    return made_ready


def render(folder: Path) -> dict[str, str]:
    """Every page and picture that the results of a folder give, by its place below docs."""
    results = read(folder)
    pictures = {f"{FIGURES}/{name}.svg": draw(results) for name, draw in PICTURES.items()}
    pages = {
        name: environment().get_template(name).render(results=results)
        for name in sorted(environment().list_templates(), key=lambda name: (name == MORE, name))
    }
    return {name.removesuffix(SUFFIX): wrap(page) for name, page in pages.items()} | pictures


def wrap(page: str) -> str:
    """Paragraphs and items of lists in lines of at most 100 characters; commands stay whole."""
    blocks = re.split(
        r"(^```.*?^```$|\n\s*\n|\n(?=- )|\n(?=\|)|(?<=\|)\n|(?<=<br>)\n)", page, flags=re.M | re.S
    )
    kept = ("|", "#", "<", "```", "!")
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


def check(wanted: dict[str, str], docs: Path, results: Path) -> None:
    """Exits with the first file that is not what templates and results give."""
    again = "Run: python benchmarks/page.py"
    for name, text in wanted.items():
        path = docs / name
        differs = difference(path.read_text(encoding="utf-8") if path.exists() else "", text)
        if differs:
            source = f"benchmarks/pages, pictures.py and {results} give"
            sys.exit(f"{path} is not what {source}: {differs}\n{again}")
    for path in (docs / FIGURES).glob("*.svg"):
        if f"{FIGURES}/{path.name}" not in wanted:
            sys.exit(f"{path}: pictures.py draws no such picture; remove it")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit with 1 where a page or picture would change",
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=DOCS)
    arguments = parser.parse_args()
    try:
        wanted = render(arguments.results)
    except (MissingError, jinja2.TemplateError, OSError, ValueError) as error:
        sys.exit(f"benchmarks/pages: {error}")
    if arguments.check:
        check(wanted, arguments.docs, arguments.results)
        return
    for name, text in wanted.items():
        path = arguments.docs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

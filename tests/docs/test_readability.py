"""Pages for readers are plain and short: sentences, lines, pages; and every public name has its
place in the reference.
"""

import re
import tomllib
from pathlib import Path
from statistics import fmean

import pytest

import driftfilter as df

DOCS = Path(__file__).parents[2] / "docs"
MENU = (DOCS.parent / "mkdocs.yml").read_text()
WORDS = 20  # of a sentence, on average
LONGEST = 200  # lines of a page
WIDEST = 100  # characters of a line


def section(title: str) -> list[str]:
    """Pages of a part of the menu, those of parts within it too."""
    below = MENU.split(f"\n  - {title}:\n", 1)[1].split("\n  - ", 1)[0]
    return re.findall(r": ([\w/-]+\.md)$", below, re.MULTILINE)


def prose(text: str) -> list[str]:
    """Paragraphs and items of lists, without code, tables, headings and targets of links."""
    text = re.sub(r"\A---\n.*?^---$", "", text, flags=re.DOTALL | re.MULTILINE)  # for the theme
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(#|\||!\[|    \S).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    blocks = re.split(r"\n\s*\n|^- |^\d+\. ", re.sub(r"`[^`]*`", "code", text), flags=re.MULTILINE)
    return [" ".join(block.split()) for block in blocks if block.strip()]


def sentences(text: str) -> list[str]:
    found = [part for block in prose(text) for part in re.split(r"(?<=[.!?])\s+", block)]
    return [each for each in found if len(each.split()) > 1]


def test_sentences_are_told_apart() -> None:
    text = (
        "# A title\n\nOne two three. Four `x = 1. 2` six?\n- a [link to](b.md) here\n\n| a | b |\n"
    )
    assert sentences(text) == ["One two three.", "Four code six?", "a link to here"]


def written(name: str) -> str:
    """The text of a page; of a tutorial, which is a script, its cells of text."""
    page = DOCS / name
    if page.exists():
        return page.read_text()
    script = page.with_suffix(".py").read_text()
    return "\n\n".join(re.findall(r'^# %% \[markdown\]\n"""\n(.*?)"""', script, re.S | re.M))


PLAIN = [
    "../README.md",
    "index.md",
    *(
        page
        for part in ("Start", "Tutorials", "Concepts", "Guides", "Choosing")
        for page in section(part)
    ),
]


@pytest.mark.parametrize("name", PLAIN)
def test_sentences_are_short(name: str) -> None:
    lengths = [len(each.split()) for each in sentences(written(name))]
    assert fmean(lengths) < WORDS


@pytest.mark.parametrize("name", PLAIN)
def test_no_sentence_is_long(name: str) -> None:
    longest = max(sentences(written(name)), key=lambda each: len(each.split()))
    assert len(longest.split()) <= 2 * WORDS, longest


MEASURED = re.compile(r"(?<![\w.])\.\d{2,3}\b|\d (?:ms|µs|points)\b")


@pytest.mark.parametrize(
    ("text", "found"),
    [("from .558 to", 1), ("gains 1.8 points", 1), ("takes 12 ms", 1), ("Python 3.10, `a.12`", 0)],
)
def test_measured_figures_are_noticed(text: str, found: int) -> None:
    assert len(MEASURED.findall(" ".join(prose(text)))) == found


@pytest.mark.parametrize(
    "name",
    ["index.md", *(page for part in ("Start", "Concepts", "Guides") for page in section(part))],
)
def test_measured_figures_stand_on_pages_made_from_results(name: str) -> None:
    """By benchmarks/page.py: Benchmarks, Choosing and the laboratory."""
    text = written(name)
    rows = re.findall(r"^\|.*$", text, flags=re.MULTILINE)
    assert [each for each in [*prose(text), *rows] if MEASURED.search(each)] == []


def to_be_read() -> list[str]:
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    return sorted(pages - set(section("Laboratory")))


@pytest.mark.parametrize("name", to_be_read())
def test_pages_and_lines_are_short(name: str) -> None:
    lines = (DOCS / name).read_text().splitlines()
    assert len(lines) <= LONGEST
    kept = ("|", "!", "`", "    ", "# ")  # tables, pictures, commands
    code = False
    for line in lines:
        code ^= line.startswith("```")
        assert code or line.startswith(kept) or len(line) <= WIDEST, line


def test_the_readme_is_short() -> None:
    assert len((DOCS.parent / "README.md").read_text().splitlines()) < LONGEST / 2


def test_every_extra_is_on_the_page_that_installs() -> None:
    text = (DOCS.parent / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    page = (DOCS / "start" / "install.md").read_text()
    assert {name for name in extras if f"`{name}`" not in page} == {"dev", "docs"}


def test_every_public_name_is_in_the_reference_once() -> None:
    listed = [
        name
        for page in sorted((DOCS / "reference").glob("*.md"))
        for name in re.findall(
            r"^::: driftfilter\.(?:_api\.)?(\w+)$", page.read_text(), re.MULTILINE
        )
    ]
    assert sorted(listed) == sorted(df.__all__)

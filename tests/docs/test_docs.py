"""Every Python block of the documentation runs, and every command can be given as it stands; the
main ones run too.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from safetensors.torch import save_file

from driftfilter.app.cli import main
from driftfilter.app.streams import sample_images

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SLOW = [
    "README.md",
    "index.md",
    "see.md",
    "sklearn.md",
    "speed.md",
    "small-filters.md",
    "building-blocks.md",
]
BLOCKS = [
    pytest.param(
        block,
        id=f"{page.name}-{position}",
        marks=pytest.mark.slow if page.name in SLOW else (),
    )
    for page in PAGES
    for position, block in enumerate(
        re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    )
]


def commands(page: Path) -> list[str]:
    """Lines of blocks, fenced or indented, that begin with ``driftfilter``; not those with
    something left out (…).
    """
    lines = re.findall(
        r"^ *(driftfilter [a-z]+\b.*)$",
        "\n".join(_blocks(page.read_text().replace("\\\n", " "))),
        re.MULTILINE,
    )
    return [line for line in lines if "…" not in line]


def _blocks(text: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [
        *(block for language, block in fenced if language != "python"),
        *re.findall(r"^    driftfilter .*$", text, re.MULTILINE),
    ]


COMMANDS = [
    pytest.param(command, id=f"{page.name}-{position}")
    for page in PAGES
    for position, command in enumerate(commands(page))
]
RUN_WHOLE = ["README.md", "see.md", "report.md", "checkpoints.md"]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "mlflow",
        "wandb",
    ):  # what a page may show and nobody has to have; test_callbacks looks at what they are told
        monkeypatch.setitem(sys.modules, name, MagicMock())
    exec(compile(block, "documentation", "exec"), {"__name__": "documentation"})


class Parsed(BaseException):
    """A command was understood; it is not carried out."""


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_understood(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *args: Any) -> Any:
        parse(self, *args)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(Parsed):
        main(shlex.split(command, comments=True)[1:])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the commands of the pages suppose to be there: models of one's own, their weights and
    data.
    """
    code = (
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), "
        "nn.Linear(3600, 10))\n"
        "make_model = make\n"
    )
    for package, module in (("my_package", "models"), ("mypackage", "mymodule")):
        (tmp_path / package).mkdir()
        (tmp_path / package / f"{module}.py").write_text(code)
    found: dict[str, Any] = {}
    exec(code, found)
    save_file(found["make"]().state_dict(), tmp_path / "w.safetensors")
    images, labels = (tensor[:100].numpy() for tensor in sample_images())
    np.save(tmp_path / "data.npy", images)
    for name in ("data.npz", "drift.npz"):
        np.savez(tmp_path / name, x=images, labels=labels)
    (tmp_path / "names.txt").write_text("\n".join("abcdefghij"))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN_WHOLE)
def test_commands_for_models_of_your_own_run(name: str, folder: Path) -> None:
    (page,) = [page for page in PAGES if page.name == name]
    given = [
        command for command in commands(page) if command.split()[1] in ("inspect", "run", "report")
    ]
    assert given
    for command in given:
        arguments = [
            sys.executable,
            "-m",
            "driftfilter.app.cli",
            *shlex.split(command, comments=True)[1:],
        ]
        source = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(
            arguments, cwd=folder, env=source, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def anchors(page: Path) -> set[str]:
    """What can stand after # in a link to a page, of headings without accents."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_exist() -> None:
    others = [ROOT / "CHANGELOG.md", ROOT / "samples" / "README.md"]
    for page in [*PAGES, *others, *sorted((ROOT / "docs" / "tutorials").glob("*.py"))]:
        text = page.read_text()
        if page.suffix == ".py":  # a tutorial: its cells of text
            text = "".join(re.findall(r'^"""\n(.*?)"""', text, re.DOTALL | re.MULTILINE))
        for target, anchor in re.findall(r"\]\(([^)#:]+)(?:#([^)]+))?\)", text):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(page.parent / target), (
                f"{page.name} links to {target}#{anchor}"
            )


def test_every_page_is_in_the_menu() -> None:
    menu = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    docs = ROOT / "docs"
    pages = [page for page in PAGES if page.is_relative_to(docs)]
    tutorials = [path.with_suffix(".md") for path in (docs / "tutorials").glob("*.py")]
    assert menu == {str(page.relative_to(docs)) for page in [*pages, *tutorials]}


def test_pages_named_in_the_code_exist() -> None:
    code = [
        path
        for folder in ("src", "tests", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
    ]
    named = {
        (path.name, page)
        for path in code
        for page in re.findall(r"\bdocs/[\w/-]+\.(?:md|svg|png)\b", path.read_text())
    }
    assert named
    assert [each for each in sorted(named) if not (ROOT / each[1]).exists()] == []

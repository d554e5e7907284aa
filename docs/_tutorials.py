"""For the site: the scripts of docs/tutorials become pages, with what they print and draw.

A script has cells as jupytext reads them: ``# %%`` begins code, ``# %% [markdown]`` a text in
triple quotes. Every build executes them.
"""

import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent / "tutorials"


class Cell(NamedTuple):
    """A piece of a tutorial."""

    is_code: bool
    text: str


def split(script: str) -> list[Cell]:
    """The cells of a script."""
    _, *parts = re.split(r"^# %%(.*)\n", script, flags=re.MULTILINE)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [
        Cell(True, text.strip())
        if "markdown" not in kind
        else Cell(False, text.strip().strip('"\n'))
        for kind, text in pairs
    ]


def build(path: Path) -> dict[str, str]:
    """Files of the site for a tutorial: its page, its pictures, what it wrote, and a notebook."""
    cells, name = split(path.read_text(encoding="utf-8")), path.stem
    files = {f"{name}.ipynb": _notebook(cells)}
    namespace: dict[str, Any] = {"__name__": "__main__"}
    download = f"[As a notebook]({name}.ipynb), [as a script]({name}.py)."
    blocks = [_linked(cells[0].text), download]
    with _in_an_empty_folder() as folder:
        for cell in cells[1:]:
            if not cell.is_code:
                blocks.append(_linked(cell.text))
                continue
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(cell.text, path.name, "exec"), namespace)
            blocks.append(f"```python\n{cell.text}\n```")
            if printed.getvalue():
                blocks.append(f'```text title="prints"\n{printed.getvalue().rstrip()}\n```')
            for picture in _pictures():
                drawn = f"{name}-{len(files)}.svg"
                files[drawn] = picture
                blocks.append(f"![Drawn by the lines above]({drawn})")
        for page in sorted(folder.glob("*.html")):
            files[f"{name}-{page.name}"] = page.read_text(encoding="utf-8")
            blocks.append(f"It wrote [{page.name}]({name}-{page.name}).")
    return {f"{name}.md": "\n\n".join(blocks) + "\n", **files}


@contextlib.contextmanager
def _in_an_empty_folder() -> Iterator[Path]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


def _linked(text: str) -> str:
    """Links to other tutorials lead to their pages."""
    return re.sub(r"\]\((\w+)\.py\)", r"](\1.md)", text)


def _pictures() -> list[str]:
    """The open figures, as SVG; they are closed."""
    import matplotlib.pyplot as plt

    found = []
    for number in plt.get_fignums():
        drawn = io.StringIO()
        plt.figure(number).savefig(drawn, format="svg", bbox_inches="tight")
        found.append(drawn.getvalue())
    plt.close("all")
    return found


def _notebook(cells: list[Cell]) -> str:
    """The cells as a notebook that has not been executed."""
    return json.dumps(
        {
            "cells": [
                {
                    "cell_type": "code" if cell.is_code else "markdown",
                    "id": f"cell-{place}",
                    "metadata": {},
                    "source": cell.text,
                    **({"execution_count": None, "outputs": []} if cell.is_code else {}),
                }
                for place, cell in enumerate(cells)
            ],
            "metadata": {"kernelspec": {"display_name": "Python", "name": "python3"}},
            "nbformat": 4,
            "nbformat_minor": 5,
        },
        indent=1,
    )


# What mkdocs calls


def on_files(files: Any, *, config: Any) -> Any:
    """Add what the tutorials make to the files of the site."""
    import matplotlib
    from mkdocs.structure.files import File

    matplotlib.use("Agg")
    for path in sorted(FOLDER.glob("*.py")):
        for name, content in build(path).items():
            files.append(File.generated(config, f"tutorials/{name}", content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links of other pages to a tutorial, which is a script in the repository; and no line of a
    table ends at a ±.
    """
    linked = re.sub(r"(\]\((?:\.\./)*tutorials/\w+)\.py\)", r"\1.md)", markdown)
    return re.sub(r"^\|.*$", lambda row: row[0].replace(" ± ", "\u00a0±\u00a0"), linked, flags=re.M)

"""Every Python block of the documentation runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{position}")
    for page in PAGES
    for position, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mlflow", "wandb"):  # what a page may show and nobody has to have; test_callbacks looks at what they are told
        monkeypatch.setitem(sys.modules, name, MagicMock())
    exec(compile(block, "documentation", "exec"), {"__name__": "documentation"})


def test_links_between_pages_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"

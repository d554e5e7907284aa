"""Every tutorial and every script in examples/ runs, says nothing on stderr, and shows what it
claims; and tutorials become pages.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    path.stem: path
    for folder in ("docs/tutorials", "examples")
    for path in sorted((ROOT / folder).glob("*.py"))
}
# Least gain in accuracy, and in nats of NLL, of each line over "frozen"; None: no such number is
# printed. Set below what was seen (the scripts are seeded): they notice that an example has broken,
# and are no evidence of how much adaptation gains.
CLAIMS: dict[str, dict[str, tuple[float, float | None]]] = {
    "first_stream": {"adapted": (0.4, None)},
    "new_method": {"tent": (0.2, 2.0), "filtered": (0.2, 2.0)},
    "own_cnn": {"adapted": (0.5, 1.5)},
    "read_report": {"good": (0.2, 1.5)},
    "resume": {"adapted": (0.4, None)},
    "table": {"adapted": (0.15, 0.7)},
    "tenants": {"one for each": (0.07, 0.15)},
    "texts": {"adapted": (0.02, 0.05)},
    "vit": {"adapted": (0.03, 0.05), "variance=0.1": (0.07, 0.15)},
}
BESIDE = {  # what else it prints
    "first_stream": "after loading: 10",
    "new_method": "the same from TOML: True",
    "read_report": "wrote report.html",
    "resume": "the same bit for bit: True",
    "tenants": "the same answer: True  taken before: True",
    "vit": "blocks.layers.0.norm1.weight  LayerNorm",
}


def test_every_script_has_its_claim() -> None:
    assert sorted(CLAIMS) == sorted(SCRIPTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLAIMS)
def test_script_shows_what_it_claims(name: str, tmp_path: Path) -> None:
    if name == "texts":
        pytest.importorskip("transformers", reason="transformers comes with `make docs`")
    done = subprocess.run(
        [sys.executable, SCRIPTS[name]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = re.findall(r"^(.+?) +accuracy ([\d.]+)(?:  NLL ([\d.]+))?$", done.stdout, re.MULTILINE)
    numbers = {line: (float(accuracy), float(nll or "nan")) for line, accuracy, nll in lines}
    frozen = numbers["frozen"]
    for line, (accuracy, nll) in CLAIMS[name].items():
        assert numbers[line][0] - frozen[0] > accuracy, done.stdout
        assert nll is None or frozen[1] - numbers[line][1] > nll, done.stdout
    assert BESIDE.get(name, "") in done.stdout


def hook() -> ModuleType:
    """What makes pages of tutorials."""
    spec = importlib.util.spec_from_file_location("tutorials", ROOT / "docs" / "_tutorials.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SMALL = '''# %% [markdown]
"""
# Title

[Other](other.py), [page](../page.md).
"""

# %%
from pathlib import Path

print(1 + 1)
Path("found.html").write_text("<p>")

# %% [markdown]
"""
End.
"""
'''


def test_a_tutorial_becomes_a_page_with_what_it_prints_and_writes(tmp_path: Path) -> None:
    script = tmp_path / "small.py"
    script.write_text(SMALL)
    before = Path.cwd()
    files = hook().build(script)
    assert Path.cwd() == before
    assert files["small-found.html"] == "<p>"
    page = files["small.md"]
    assert page.startswith("# Title\n\n[Other](other.md), [page](../page.md).\n\n")
    assert '```text title="prints"\n2\n```\n\nEnd.' in page
    cells = json.loads(files["small.ipynb"])["cells"]
    assert [cell["cell_type"] for cell in cells] == ["markdown", "code", "markdown"]
    assert cells[2]["source"] == "End."


def test_a_tutorial_that_fails_fails_the_build(tmp_path: Path) -> None:
    script = tmp_path / "small.py"
    script.write_text('# %% [markdown]\n"""\n# T\n"""\n\n# %%\nraise KeyError(\'gone\')\n')
    with pytest.raises(KeyError, match="gone"):
        hook().build(script)


@pytest.mark.parametrize("name", sorted(set(SCRIPTS) - {"resume"}))
def test_the_first_cell_is_a_title_and_no_text_is_lost(name: str) -> None:
    cells = hook().split(SCRIPTS[name].read_text())
    assert cells[0].text.startswith("# ")
    assert not any('"""' in cell.text for cell in cells if not cell.is_code)

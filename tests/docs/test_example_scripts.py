"""Every script in examples/ runs, says nothing on stderr, and shows what its docstring claims."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "examples"
# Least gain in accuracy, and in nats of NLL, of each line over "frozen"; None: no such number is
# printed. Set below what was seen (the scripts are seeded): they notice that an example has broken,
# and are no evidence of how much adaptation gains.
CLAIMS: dict[str, dict[str, tuple[float, float | None]]] = {
    "own_cnn": {"adapted": (0.5, 1.5)},
    "resume": {"adapted": (0.4, None)},
    "serving": {"one for each": (0.07, 0.15)},
    "tabular": {"adapted": (0.15, 0.7)},
    "text": {"adapted": (0.02, 0.3)},
    "vit": {"adapted": (0.03, 0.05), "variance=0.1": (0.07, 0.15)},
}
BESIDE = {  # what else it prints
    "resume": "the same bit for bit: True",
    "serving": "kB a tenant",
    "vit": "blocks.layers.0.norm1.weight  LayerNorm",
}


def test_every_script_has_its_claim() -> None:
    assert sorted(CLAIMS) == sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", CLAIMS)
def test_script_shows_what_it_claims(name: str) -> None:
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py"], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = re.findall(r"^(.+?) +accuracy ([\d.]+)(?:  NLL ([\d.]+))?$", done.stdout, re.MULTILINE)
    numbers = {line: (float(accuracy), float(nll or "nan")) for line, accuracy, nll in lines}
    frozen = numbers["frozen"]
    for line, (accuracy, nll) in CLAIMS[name].items():
        assert numbers[line][0] - frozen[0] > accuracy, done.stdout
        assert nll is None or frozen[1] - numbers[line][1] > nll, done.stdout
    assert BESIDE.get(name, "") in done.stdout

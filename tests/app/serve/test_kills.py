"""The service killed under load, by the benchmark that does it at length (benchmarks/serve.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import driftfilter as df

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "serve.py"


def _run(what: str, out: Path, *options: str) -> dict[str, object]:
    for name in ("starlette", "uvicorn", "httpx", "prometheus_client"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    env = {**os.environ, "PYTHONPATH": str(Path(df.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), what, *options, "--json", str(out)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, object] = json.loads(out.read_text())[what]["result"]
    return found


def test_no_step_is_lost_or_taken_twice(tmp_path: Path) -> None:
    options = ("--kills", "2", "--tenants", "6", "--steps", "6", "--clients", "3", "--pause", "0.4")
    found = _run("kills", tmp_path / "found.json", *options)
    assert found["kills"] == 2
    for each in found["rounds"]:  # type: ignore[attr-defined]
        assert each["answers_different"] == 0
        assert each["tenants_with_another_state"] == 0

"""Runs killed at random moments, by the benchmark that does it at length (benchmarks/crash.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import driftfilter as df

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "crash.py"


def test_killed_runs_resume_and_damage_is_refused(tmp_path: Path) -> None:
    options = [
        "--kills",
        "12",
        "--flips",
        "60",
        "--truncations",
        "10",
        "--steps",
        "12",
        "--json",
        str(tmp_path / "found.json"),
    ]
    env = {**os.environ, "PYTHONPATH": str(Path(df.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        check=False,
        capture_output=True,
        text=True,
        env=env,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    kills = found["kills"]
    assert kills["kills"] == 12
    assert kills["runs"] >= 1
    assert (kills["does not load"], kills["differ"], kills["failed"]) == (0, 0, 0)
    assert found["corruption"] == {
        "flips refused": 60,
        "flips in the header refused": 15,
        "truncations refused": 10,
        "adapter touched": 0,
    }

"""Runs in one folder from two containers: one of them at a time, and no file to remove by hand.

``benchmarks/crash.py --containers`` does the same many times.
"""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE

import pytest

import driftfilter as df
from containers import CONTAINER, require_containers
from own_model import BATCH, MODEL, as_lines, assert_equal, run, samples


def started(name: str) -> subprocess.Popen[bytes]:
    """A run in a container of this host name."""
    own = [sys.executable, "-m", "driftfilter.app.cli", "run", MODEL, "-", "--out", "o"]
    own += ["--preset", "tent:lr=0.01", "--batch", str(BATCH), "--checkpoint-every", "1"]
    code = f"hostname {name}; exec {shlex.join([*own, '--resume'])}"
    env = {**os.environ, "PYTHONPATH": str(Path(df.__file__).parents[1])}
    command = [*CONTAINER, "sh", "-c", code]
    return subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=env)


@pytest.mark.slow
def test_two_containers_in_one_folder_and_a_killed_one_that_gets_another_name(
    folder: Path,
) -> None:
    require_containers()
    assert run("--out", "whole") == 0
    first, log = started("box"), folder / "o" / "steps.jsonl"
    assert first.stdin is not None
    first.stdin.write(as_lines(samples()[:33]))
    first.stdin.flush()
    deadline = time.monotonic() + 100
    while not (log.exists() and log.read_bytes().count(b"\n") == 3):
        assert time.monotonic() < deadline, first.communicate()
        time.sleep(0.01)
    _, told = (second := started("box")).communicate(as_lines(samples()))
    assert second.returncode == 1
    assert b"--out o is in use: claimed by process 1 on host box; it is free as soon as" in told
    first.kill()
    first.communicate()
    assert (folder / "o" / "state.claim").exists()
    _, told = (third := started("other")).communicate(as_lines(samples()))
    assert (third.returncode, told) == (0, b"")
    assert_equal("o", "whole")
    assert not (folder / "o" / "state.claim").exists()

"""Stdout and stderr that nobody reads, that are closed, full or not in UTF-8: the work is done all
the same, and the status is true.
"""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import driftfilter as df
from own_model import MODEL, N, predictions, run, steps, summary

# A line on stderr a step, so that a reader that goes away is noticed half-way.
LOUD = """
import sys
import run_network
from torch import nn

class Loud(nn.Module):
    def forward(self, x):
        print("loud", file=sys.stderr, flush=True)
        return x

def make():
    return nn.Sequential(Loud(), run_network.make())
"""
pytestmark = pytest.mark.slow
RUN = f"run {MODEL} x.npy --preset tent:lr=0.01 --batch 10 --out o"
ENV = {**os.environ, "PYTHONPATH": str(Path(df.__file__).parents[1])}


def shell(command: str, redirected: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """A command of driftfilter, its stdout and stderr redirected; its status is told on fd 9."""
    code = f"{{ {sys.executable} -m driftfilter.app.cli {command}; echo $? >&9; }} {redirected}"
    return subprocess.run(
        ["bash", "-c", f"exec 9>status; {code}"], check=True, env={**ENV, **variables}
    )


def status() -> int:
    return int(Path("status").read_text())


def assert_whole(out: str = "o") -> None:
    assert run("--out", "whole") == 0
    assert [line["step"] for line in steps(out)] == [0, 1, 2, 3, 4]
    assert summary(out)["tally"]["rows"] == N
    assert (
        predictions(out)["probabilities"].tobytes()
        == predictions("whole")["probabilities"].tobytes()
    )


@pytest.mark.parametrize(
    ("redirected", "options", "expected"),
    [
        ("2>&1 | head -1 >/dev/null", "", 0),
        (">&- 2>&-", "", 0),
        (">&- 2>&- <&-", "", 0),
        ("2>/dev/full", "", 0),
        (">/dev/full", "", 1),
        # The document is a result, so that it must have a reader.
        ("2>/dev/null | true", "--json", 1),
        (">&- 2>&-", "--json", 1),
    ],
)
def test_a_run_goes_on_without_a_reader(
    redirected: str, options: str, expected: int, folder: Path
) -> None:
    (folder / "loud.py").write_text(LOUD)
    shell(RUN.replace(MODEL, "loud:make") + f" {options}", redirected)
    assert status() == expected
    assert_whole()


def test_a_bad_batch_is_told_by_the_status_alone(folder: Path) -> None:
    rows = np.load("x.npy")
    rows[13] = np.nan
    np.save("x.npy", rows)
    shell(RUN, ">&- 2>&-")
    assert status() == 1
    shell(f"{RUN} --resume --on-bad-batch skip", ">&- 2>&-")
    assert status() == 3


@pytest.mark.parametrize("options", ["", "--live"])
def test_a_terminal_that_goes_away(options: str, folder: Path) -> None:
    """Writing to it is an error then."""
    (folder / "gone.py").write_text(
        "import os, run_network\n\ndef make():\n    os.close(int(os.environ['MASTER']))\n"
        "    return run_network.make()\n"
    )
    master, terminal = pty.openpty()
    command = [sys.executable, "-m", "driftfilter.app.cli", *RUN.split(), *options.split()]
    command[4] = "gone:make"
    process = subprocess.Popen(
        command, stderr=terminal, pass_fds=(master,), env={**ENV, "MASTER": str(master)}
    )
    os.close(master)
    os.close(terminal)
    assert process.wait() == 0
    assert_whole()


def test_stdin_that_is_closed(folder: Path) -> None:
    shell(RUN.replace("x.npy", "-"), "<&- 2>told")
    assert status() == 2
    assert "; stdin is closed, got '-'" in Path("told").read_text()


def test_a_list_of_which_the_beginning_is_enough(folder: Path) -> None:
    shell("list", "2>told | true")
    assert (status(), Path("told").read_bytes()) == (0, b"")
    shell("list", ">/dev/full 2>told")
    assert status() == 1
    assert Path("told").read_text() == (
        "driftfilter: error: stdout was not written: No space left on device\n"
    )


COMMANDS = {
    "list": "list",
    "list as data": "list --json",
    "help": "--help",
    "data": "data",
    "a wrong choice": "run x y --predictions ×",
    "tasks": "bench --quick --list --out ö",
    "inspect": f"inspect {MODEL}",
    "run": RUN.replace("--out o", "--out ö×"),
    "run as data": RUN.replace("--out o", "--out ö× --json"),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_a_stdout_that_knows_ascii_only(case: str, folder: Path) -> None:
    shell(COMMANDS[case], ">said 2>told", PYTHONIOENCODING="ascii", LC_ALL="C.UTF-8")
    assert status() == (2 if "wrong" in case else 0), Path("told").read_text()
    assert "Traceback" not in Path("told").read_text("ascii")
    said = Path("said").read_text("ascii")
    if "--json" in COMMANDS[case]:
        found = json.loads(said)
        assert case != "run as data" or found["out"] == "ö×"

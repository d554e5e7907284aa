"""Mutated files of every kind, a few hundred; 10,000 by benchmarks/fuzz.py --files."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

import file_fuzzing
from crafting import CHANGES, first, reseal
from file_fuzzing import KINDS, fuzz


def test_mutated_files_are_refused_or_work() -> None:
    counts, failures = fuzz(0, 70, [*KINDS])
    assert failures == {}
    assert sum(counts.values()) == 70 * len(KINDS)
    for kind in KINDS:
        assert counts[f"{kind}: refused"] > 20
        assert counts[f"{kind}: works"] > 0


def test_a_crash_of_the_child_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "dying.py"
    script.write_text(
        "import os, signal, sys\n"
        "for number in range(int(sys.argv[3]), 5):\n"
        "    print('begun', flush=True)\n"
        "    if number == 2:\n"
        "        os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    print('\"works\"', flush=True)\n"
    )
    monkeypatch.setattr(file_fuzzing, "__file__", str(script))
    counts, failures = fuzz(0, 5, ["npy"])
    assert failures == {"npy 2": "FAILED: the process ended with status -11"}
    assert counts == {"npy: works": 4, "npy: FAILED:": 1}


def test_crafted_fleets_are_refused(tmp_path: Path) -> None:
    """Each in a child: the kernels would write outside of what too few rows hold."""
    names, number = ("mean", "values", "low", "step", "seed"), 0
    for full, data in zip((True, False), file_fuzzing.fleets(), strict=True):
        tensors = load(data)
        changes = {**CHANGES, "3e38": first(3e38), "negative": first(-3.0)}
        for name in names:
            crafted = [(what, make(tensors[name])) for what, make in changes.items()]
            whole = not tensors[name].is_floating_point()
            right: tuple[str, ...] = ("NaN", "infinite", "3e38") if whole else ()
            right += ("negative",) if name in ("mean", "low", "seed") else ()
            right += ("3e38",) if name == "low" else ()  # bounds too high are brought down
            kept = [(what, value) for what, value in crafted if what not in right]
            for value in (*(value for _, value in kept), None):
                (tmp_path / f"{number}-{name}-{full}").write_bytes(reseal(data, {name: value}))
                number += 1
        streams: Any
        for streams in (None, "abcde", [*"abcd"], [*"abcdd"], [1.5, *"bcde"], [True, *"bcde"], {}):
            (tmp_path / f"{number}-{full}").write_bytes(reseal(data, streams=streams))
            number += 1
        filt: Any
        for filt in (None, "", [], "Filter()"):
            (tmp_path / f"{number}-{full}").write_bytes(reseal(data, fleet=filt))
            number += 1
    script = (
        "import sys, warnings; from pathlib import Path; from file_fuzzing import use_fleet\n"
        "warnings.simplefilter('ignore')\n"
        "for path in sorted(Path(sys.argv[1]).iterdir()):\n"
        "    print(path.name, use_fleet(path, path.name.endswith('True')), flush=True)\n"
    )
    paths = os.pathsep.join(map(str, sys.path))
    told = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stdout[-200:] + told.stderr[-2000:]
    ended = [line.split(" ", 1)[1] for line in told.stdout.splitlines()]
    assert set(ended) == {"refused"}, [line for line in told.stdout.splitlines() if "works" in line]
    assert len(ended) == number > 120


def test_a_bound_that_promises_too_much_is_brought_down(tmp_path: Path) -> None:
    data, path = file_fuzzing.fleets()[0], tmp_path / "fleet"
    path.write_bytes(reseal(data, {"low": load(data)["low"] + 1e3}))
    mine = file_fuzzing.fleet()
    mine.load(path)
    values = load(data)["values"].double()
    assert torch.equal(mine._tensors()["low"], torch.linalg.eigvalsh(values)[:, 0])

"""What every benchmark writes, in one form that page.py reads: command, machine, threads, versions,
date and figures.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import driftfilter as df


def machine(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return (
        f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores"
    )


def command() -> str:
    """What was called, without the file the figures go to."""
    given = sys.argv[1:]
    if "--json" in given:
        place = given.index("--json")
        given = given[:place] + given[place + 2 :]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *given])


def installed(packages: Sequence[str]) -> dict[str, str]:
    there = [name for name in packages if importlib.util.find_spec(name)]
    return {name: importlib.metadata.version(name) for name in there}


def header(*packages: str, device: str = "cpu", threads: int | None = None) -> dict[str, Any]:
    """Where and how figures came about; ``packages``: whose versions matter beside torch's, where
    they are installed.
    """
    versions = {
        "python": platform.python_version(),
        "driftfilter": df.__version__,
        "torch": torch.__version__,
    }
    return {
        "command": command(),
        "machine": machine(device),
        "threads": threads or torch.get_num_threads(),
        "versions": versions | installed(packages),
        "date": datetime.date.today().isoformat(),
    }


def write(
    path: Path | None, figures: Any, *packages: str, device: str = "cpu", threads: int | None = None
) -> None:
    """The figures under their header, as JSON; nowhere if there is no path."""
    if path is not None:
        record = {**header(*packages, device=device, threads=threads), "figures": figures}
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """b of values ≈ a sizes^b by least squares of the logarithms, over the upper half, where
    overhead no longer counts.
    """
    half = len(sizes) // 2
    logs = [[math.log(number) for number in numbers[half:]] for numbers in (sizes, values)]
    return statistics.linear_regression(*logs).slope

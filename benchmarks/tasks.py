"""The tasks of ``driftfilter bench`` as one small file of means, for the page of benchmarks.

driftfilter bench --presets tent,driftfilter --out runs/bench python benchmarks/tasks.py runs/bench
--command "driftfilter bench --presets tent,driftfilter" --json FILE

Several folders or single files may be given. The date is that of the files.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 8) for name, value in values.items()}


def by_round(visits: list[dict[str, Any]]) -> list[float]:
    """Mean accuracy of the visits of each round."""
    rounds = groupby(visits, key=lambda visit: visit["round"])
    return [round(fmean(visit["accuracy"] for visit in group), 8) for _, group in rounds]


def figures(task: dict[str, Any]) -> dict[str, Any]:
    """Settings that tell tasks apart, and means."""
    settings, result = task["settings"], task["result"]
    stream = settings["stream"]
    return {
        "preset": settings["preset"],
        "protocol": settings["protocol"]["name"],
        "model": settings["model"].partition("=")[0],
        **{name: stream[name] for name in ("batch", "images", "seed")},
        **{name: settings[name] for name in ("window", "precision")},
        "accuracy": rounded(
            {domain["corruption"]: domain["accuracy"] for domain in result["domains"]}
        ),
        "mean": rounded(result["mean"]),
        "pooled": rounded({"ece": result["pooled"]["ece"]}),
        "rounds": by_round(result["visits"]),
        "steps": result["steps"],
    }


def joined(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values)))


def record(paths: list[Path], command: str, note: str) -> dict[str, Any]:
    tasks = [json.loads(path.read_text()) for path in paths]
    versions = [task["settings"]["versions"] for task in tasks]
    return {
        "command": command,
        **({"note": note} if note else {}),
        "machine": joined(task["settings"]["device"] for task in tasks),
        "threads": None,  # tasks do not say
        "versions": {
            name: joined(each[name] for each in versions if name in each) for name in versions[-1]
        },
        "date": joined(
            datetime.date.fromtimestamp(path.stat().st_mtime).isoformat() for path in paths
        ),
        "figures": [figures(task) for task in tasks],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="+", type=Path, help="folders of tasks, or files")
    parser.add_argument(
        "--command", required=True, help="how they were made, without the paths of a machine"
    )
    parser.add_argument(
        "--note", default="", help="what differs from that command, if anything does"
    )
    parser.add_argument("--json", required=True, type=Path)
    arguments = parser.parse_args()
    paths = [
        path
        for source in arguments.sources
        for path in ([source] if source.is_file() else sorted(source.glob("*_seed*.json")))
    ]
    text = json.dumps(
        record(paths, arguments.command, arguments.note), indent=1, ensure_ascii=False
    )
    arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

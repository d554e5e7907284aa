"""A plot of long streams: the accuracy of every visit to a corruption, round after round, from
``driftfilter bench``.

driftfilter bench --protocols continual:rounds=10 --presets tent,driftfilter --out runs/long
python benchmarks/rounds.py runs/long [--out rounds.png]
"""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from pathlib import Path
from statistics import fmean

import matplotlib.pyplot as plt

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("rounds.png"))
    arguments = parser.parse_args()
    tasks = [
        json.loads(path.read_text())
        for folder in arguments.folders
        for path in sorted(folder.glob("*.json"))
    ]
    figure, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
    for task, colour in zip(tasks, COLOURS, strict=False):
        name, visits = task["settings"]["preset"], task["result"]["visits"]
        rounds = [list(group) for _, group in groupby(visits, key=lambda visit: visit["round"])]
        means = [fmean(visit["accuracy"] for visit in group) for group in rounds]
        steps = sum(visit["steps"] for visit in visits)
        axes.plot(
            [at / len(rounds[0]) for at in range(len(visits))],
            [v["accuracy"] for v in visits],
            color=colour,
            alpha=0.35,
        )
        axes.plot(
            [at + 0.5 for at in range(len(means))],
            means,
            "o-",
            color=colour,
            label=f"{name}, mean of a round",
        )
        print(f"{name}, {steps:,} steps: " + ", ".join(f"{mean:.3f}" for mean in means))
    axes.set(
        xlabel="rounds over all corruptions, never reset",
        ylabel="accuracy",
        ylim=(0, 1),
        xlim=(0, None),
    )
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower left")
    figure.savefig(arguments.out, dpi=130)


if __name__ == "__main__":
    main()

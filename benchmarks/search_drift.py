"""The search behind what an estimate makes of tables whose confidences move away from their home;
nothing here is a stream that is reported.

    python benchmarks/search_drift.py follow --data DIR --keep FOLDER [--norms batch group none]
    python benchmarks/search_drift.py estimate --keep FOLDER [--json FILE]

follow: the default on tables that drift, in batches of 64; FOLDER gets what it said. DIR has, of
github:vlosing/driftDatasets, sea/SEA_training_{data,class}.csv and, each .data and .labels, 2CDT,
2CHT, keystroke, outdoorStream, transientChessboard. Beside them are scikit-learn's digits, wine and
breast cancer (drawn often, with a little noise), and two tables of ``make_classification``, changed
more and more: a part of the features is scaled, moved, noisy, or was constant when the network
learned and is not any more; or the classes' shares change, and nothing else.
estimate: mean absolute error in points and how often the band covers, by the constants.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits, load_wine, make_classification
from torch import Tensor, nn

import driftfilter as df
from driftfilter.inference import accuracy
from driftfilter.inference.accuracy import Expectation, Opinions, SecondOpinion, SourceCalibration
from figures import write
from natural_data import CLEAN, NORMS, Rows, Task, shuffle, split, standardize, trained
from search_default import Row
from search_knowing import look

BATCH, ROWS, WINDOW = 64, 8000, 1000
OTHERS: dict[str, list[float]] = {  # of the estimate's constants
    "_AWAY": [0.0, 0.2, 0.3, 0.4, 0.5, 0.6],
    "_OFF_TABLE": [0.2, 0.3, 0.4, 0.5, 0.6],
    "HOME": [250, 500, 1000],
    "_LEAST_VARIANCE": [1e-6, 1e-4, 1e-3, 4e-3, 1e-2],
}
KINDS = ("scaled", "moved", "noisy", "awake", "shares")
READY = {"sea": "sea/SEA_training", "outdoor": "outdoorStream", "chess": "transientChessboard"}
READY |= {name: name for name in ("2CDT", "2CHT", "keystroke")}
CHANGED = [
    f"{table} {kind}"
    for table, kind in itertools.product(("digits", "wine", "cancer", "two", "five"), KINDS)
]


def read(folder: Path, name: str) -> Rows:
    """A stream that others collected, thinned to so many rows, in its order."""
    commas = name.startswith("sea")
    ends = ("_data.csv", "_class.csv") if commas else (".data", ".labels")
    inputs, labels = (
        torch.from_numpy(np.loadtxt(folder / f"{name}{end}", delimiter="," if commas else None))
        for end in ends
    )
    some = slice(0, ROWS * 5 // 4 if "Chess" in name else None)
    classes = labels.long().unique(return_inverse=True)[1]
    return Rows(inputs[some].float(), classes[some])


def in_time(rows: Rows, generator: torch.Generator) -> Task:
    """The first fifth trains, or 400 rows, the rest is the stream."""
    first = max(400, len(rows.labels) // 5)
    train, clean = split(rows.take(torch.arange(first)), first // 5, generator)
    later = rows.take(torch.arange(first, len(rows.labels))).thin(ROWS)
    return Task(train, {CLEAN: clean, "later": later}, "mlp", 30)


def draw(name: str, generator: torch.Generator) -> tuple[Rows, float]:
    """Rows of a table in a drawn order, and how noisy repeated ones are, in deviations."""
    if name in ("two", "five"):
        k = {"two": 2, "five": 5}[name]
        x, y = make_classification(
            10_000, 12, n_informative=8, n_classes=k, flip_y=0.08, class_sep=1.2, random_state=k
        )
        return shuffle(Rows(torch.from_numpy(x).float(), torch.from_numpy(y)), generator), 0.0
    load = {"digits": load_digits, "wine": load_wine, "cancer": load_breast_cancer}[name]
    x, y = load(return_X_y=True)
    rows = Rows(torch.from_numpy(x).float(), torch.from_numpy(y).long())
    return shuffle(rows, generator), 0.3


def change(kind: str, name: str, generator: torch.Generator) -> Task:
    """A table that is changed more and more, from nothing at the beginning."""
    rows, noise = draw(name, generator)
    held = len(rows.labels) * 6 // 10
    spread = rows.inputs.std(0).clamp(min=1e-3)
    touched = torch.rand(rows.inputs.shape[1], generator=generator) < 0.3
    touched[0] = True
    train, rest = split(rows, held, generator)
    clean, later = split(rest, len(rest.labels) * 2 // 3, generator)
    later = later.take(torch.randint(len(later.labels), (ROWS * 5 // 8,), generator=generator))
    n = len(later.labels)
    t = torch.linspace(0, 1, n)[:, None] * touched
    x = later.inputs + noise * spread * torch.randn(later.inputs.shape, generator=generator)
    sign = torch.randn(len(spread), generator=generator).sign()
    if kind == "scaled":
        center = train.inputs.mean(0)
        x = center + (x - center) * (1 + 3 * t)
    if kind == "moved":
        x = x + 3 * sign * spread * t
    if kind == "noisy":
        x = x + 3 * spread * t * torch.randn(x.shape, generator=generator)
    if kind == "awake":  # constant until now
        still = train.inputs.mean(0)
        train = Rows(torch.where(touched, still, train.inputs), train.labels)
        clean = Rows(torch.where(touched, still, clean.inputs), clean.labels)
        asleep = (torch.arange(n)[:, None] < n * 2 // 5) & touched
        x = torch.where(asleep, still, x)
    later = Rows(x, later.labels)
    if kind == "shares":  # the first class grows rare, then common
        wanted = torch.linspace(-2, 2, n).exp()
        keep = torch.where(later.labels == 0, wanted, torch.ones(n))
        later = later.take((torch.rand(n, generator=generator) * 7.4 < keep * 3).nonzero()[:, 0])
    return Task(train, {CLEAN: clean, "later": later}, "mlp", 30)


def make(folder: Path, name: str, generator: torch.Generator) -> Task:
    """A stream that others collected, or a table and how it is changed."""
    table, _, kind = name.partition(" ")
    if kind:
        return change(kind, table, generator)
    return in_time(read(folder, READY[table]), generator)


def follow(arguments: argparse.Namespace) -> list[Row]:
    """Keep what the default says of each batch."""
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    (arguments.keep / "networks").mkdir(parents=True, exist_ok=True)
    for name, norm in itertools.product((*READY, *CHANGED), arguments.norms):
        task = standardize(make(arguments.data, name, torch.Generator().manual_seed(0)))
        model = trained(task, norm, 0, arguments.keep / "networks" / f"{name}-{norm}.pt")
        clean, stream = task.streams[CLEAN], task.streams["later"]
        inputs, labels = clean.inputs[:500], clean.labels[:500]
        given: Row = {"no": None, "inputs": inputs, "yes": (inputs, labels)}
        kept = {data: run(model, stream, own) for data, own in given.items()}
        torch.save({"labels": stream.labels, **kept}, arguments.keep / f"{name}-{norm}.pt")
        right = float((kept["no"]["logs"].argmax(-1) == stream.labels).double().mean())
        rows.append({"table": name, "norm": norm, "accuracy": round(right, 4)})
        print(rows[-1], flush=True)
    return rows


def run(model: nn.Module, rows: Rows, data: Any) -> Row:
    """Log-probabilities, plain confidences, and what else is known after each batch."""
    adapter, logs, plain, others = df.adapt(model, data=data), [], [], []
    for x in rows.inputs.split(BATCH):
        logs.append(adapter(x))
        plain.append(look(adapter, x)[0])
        others.append(adapter._now.expectation._replace(opinions=None))
    told = [(each.stay, each.second, each.source) for each in others]
    return {"logs": torch.cat(logs), "plain": torch.cat(plain), "others": told}


# Constants


def judge(labels: Tensor, said: Row) -> list[Row]:
    """The windows of one stream: the truth, the estimate and its band."""
    size = min(WINDOW, len(labels) // 3)
    known: Opinions | None = None
    found: list[Row] = []
    parts: list[Tensor] = [said["logs"], said["plain"], labels]
    pieces = [part.split(BATCH) for part in parts]
    right, judged = [], 0
    for number, (stay, second, source) in enumerate(said["others"]):
        logs, plain, truth = (batches[number] for batches in pieces)
        new = Opinions.of(logs, plain, table=True)
        known = new if known is None else known.extend(new)
        right.append((logs.argmax(-1) == truth).double())
        judged += len(truth)
        if judged < size:
            continue
        own = None if second is None else SecondOpinion(*second)
        calibration = None if source is None else SourceCalibration(*source)
        estimate = Expectation(known, calibration, stay, own).estimate
        true = float(torch.cat(right).mean())
        inside = estimate.low <= true <= estimate.high
        width = (estimate.high - estimate.low) / 2
        row = {"off": abs(estimate.accuracy - true), "covered": inside, "half width": width}
        found.append(row)
        right, judged = [], 0
    return found


def search(arguments: argparse.Namespace) -> list[Row]:
    kept = {
        path.stem: torch.load(path, weights_only=False)
        for path in sorted(arguments.keep.glob("*.pt"))
    }
    rows: list[Row] = []
    for (constant, values), data in itertools.product(OTHERS.items(), ("no", "inputs", "yes")):
        for value in values:
            with mock.patch.object(accuracy, constant, value):
                each = {name: judge(said["labels"], said[data]) for name, said in kept.items()}
            for norm in (*NORMS, "all"):
                own = [
                    row
                    for name, windows in each.items()
                    for row in windows
                    if norm in (name.rpartition("-")[2], "all")
                ]
                means = {key: round(fmean(row[key] for row in own), 4) for key in own[0]}
                about = {"constant": constant, "value": value, "data": data, "norm": norm}
                rows.append({**about, "windows": len(own), **means})
                if norm == "all":
                    print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    searches = {"follow": follow, "estimate": search}
    parser.add_argument("what", choices=list(searches))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--norms", nargs="+", default=list(NORMS), choices=list(NORMS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    write(arguments.json, {"rows": searches[arguments.what](arguments)}, "numpy", "scikit-learn")


if __name__ == "__main__":
    main()

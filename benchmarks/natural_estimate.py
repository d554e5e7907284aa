"""Accuracy without labels against the truth, on streams whose shift is natural.

    python benchmarks/natural_estimate.py --data DIR [--tasks har elec …] [--norms …] [--seeds 1] \
        [--batch 64] [--window 1000] [--rows 12800] [--json FILE]

Streams and networks are those of natural.py, and what is compared is that of estimate.py, in
windows of --window samples: ``adapter.estimate`` without source data and with 500 labelled samples
that the network was not trained on ("clean" of natural.py), mean confidence, ATC (its threshold
from all of "clean"), AETTA's formula, and the mean confidence of ``tent`` against its own accuracy.
Mean absolute errors in points, over windows, norms and seeds, and how many windows the interval
covers. Nothing was chosen on these streams.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import driftfilter as df
from driftfilter.inference.accuracy import confidence
from estimate import Source, Window, average_error, drop_features
from figures import write
from natural_data import CLEAN, NORMS, TASKS, Rows, load, trained

Row = dict[str, Any]
TABLES = ("elec", "weather", "gas")
ESTIMATES = ("estimate", "confidence", "atc", "aetta")
LABELLED = 500  # samples of the source


def follow(model: nn.Module, source: Source, rows: Rows, data: bool, a: Any) -> Iterator[Row]:
    """The whole windows of the default on a stream."""
    given = (source.images[:LABELLED], source.labels[:LABELLED]) if data else None
    threshold = source.threshold(model, a.batch)
    generator, adapter = torch.Generator().manual_seed(0), df.adapt(model, data=given)
    for inputs, labels in zip(
        rows.inputs.split(a.window), rows.labels.split(a.window), strict=True
    ):
        if len(labels) < a.window:
            return
        window = Window()
        window.labels.append(labels)
        for some in inputs.split(a.batch):
            window.outputs.append(adapter(some))
            dropped, mean = drop_features(adapter, model, some, generator)
            window.dropped.append(dropped)
            window.mean.append(mean)
        yield window.judge(adapter.estimate, threshold)


def follow_tent(model: nn.Module, rows: Rows, a: Any) -> Iterator[Row]:
    """Truth and mean confidence of tent."""
    adapter = df.adapt(model, "tent")
    for inputs, labels in zip(
        rows.inputs.split(a.window), rows.labels.split(a.window), strict=True
    ):
        if len(labels) < a.window:
            return
        logp = torch.cat([adapter(some) for some in inputs.split(a.batch)])
        truth = float((logp.argmax(-1) == labels).double().mean())
        yield {"truth": truth, "confidence": float(confidence(logp).mean())}


def judge(name: str, norm: str, seed: int, a: argparse.Namespace) -> Iterator[Row]:
    """All windows of one network: of the streams that have a shift."""
    task = load(name, a.data, seed)
    model = trained(task, norm, seed, a.data / "networks" / f"{name}-{norm}-{seed}.pt")
    shown = "layer" if norm == "group" and task.shape == "mlp" else norm
    source = Source(*task.streams[CLEAN])
    for stream, rows in task.streams.items():
        if stream == CLEAN:
            continue
        rows = rows.thin(a.rows)
        about: Row = {"task": name, "stream": stream, "norm": shown, "seed": seed}
        for data in (False, True):
            torch.manual_seed(seed)
            found = list(follow(model, source, rows, data, a))
            yield {**about, "by": "data" if data else "default", "windows": found}
        try:
            yield {**about, "by": "tent", "windows": list(follow_tent(model, rows, a))}
        except ValueError as error:  # no norm layers
            yield {**about, "by": "tent", "windows": [], "refused": str(error)}


def summarize(title: Row, some: list[Row]) -> Row:
    """Errors in points over all windows of some networks."""
    row: Row = dict(title)
    for by in ("default", "data"):
        windows = [each for record in some if record["by"] == by for each in record["windows"]]
        if not windows:
            continue
        covered = [each["low"] <= each["truth"] <= each["high"] for each in windows]
        row[by] = {
            "windows": len(windows),
            "truth": round(statistics.fmean(each["truth"] for each in windows), 4),
            **{name: average_error(windows, name) for name in ESTIMATES},
            "covered": round(statistics.fmean(covered), 3),
            "half width": round(
                50 * statistics.fmean(each["high"] - each["low"] for each in windows), 2
            ),
        }
    tent = [each for record in some if record["by"] == "tent" for each in record["windows"]]
    row["tent"] = average_error(tent, "confidence") if tent else None
    return row


def report(records: list[Row]) -> list[Row]:
    """By stream and norm, then over tables, over images and signals, and over all."""
    names = ("task", "stream", "norm")
    keys = dict.fromkeys(tuple(record[name] for name in names) for record in records)
    rows = []
    for key in keys:
        some = [record for record in records if tuple(record[name] for name in names) == key]
        rows.append(summarize(dict(zip(names, key, strict=True)), some))
    parts: dict[str, list[Row]] = {
        "tables": [record for record in records if record["task"] in TABLES],
        "others": [record for record in records if record["task"] not in TABLES],
        "all": records,
    }
    rows += [summarize({"task": name}, some) for name, some in parts.items() if some]
    for row in rows:
        print(row, flush=True)
    return rows


def _round(windows: list[Row]) -> list[Row]:
    return [{name: round(value, 4) for name, value in each.items()} for each in windows]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder that natural_data.py names"
    )
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--norms", nargs="+", default=list(NORMS), choices=list(NORMS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--window", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=12_800, help="of a stream, at most")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    records = [
        record
        for name in arguments.tasks
        for norm in arguments.norms
        for seed in range(arguments.seeds)
        for record in judge(name, norm, seed, arguments)
    ]
    figures = {
        **{name: getattr(arguments, name) for name in ("batch", "window", "rows")},
        "summary": report(records),
        "records": [{**each, "windows": _round(each["windows"])} for each in records],
    }
    write(arguments.json, figures, "numpy")


if __name__ == "__main__":
    main()

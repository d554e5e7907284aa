"""Frozen network, default and presets on streams whose shift is natural.

    python benchmarks/natural.py --data DIR [--batch 64] [--seeds 1] [--tasks elec har] \
        [--methods frozen default] [--beside FILE …] [--rows 1280] [--jobs 2] [--json FILE]

Digits from one office's scans to another's (MNIST, USPS), electricity prices and weather in the
order of time, movements of people the network has not seen, gas sensors that age, digits spoken by
others. Each task trains three networks of one shape, with batch norm, with group norm (layer norm
in an MLP) and without norm layers, and keeps them in DIR/networks: delete that folder to train
again. "clean" is held-out data of the source. A seed draws the training rows, the weights and, of
the digits and the people, who is in the stream; tables show mean ± deviation over seeds. A stream
above --rows is thinned to blocks of 64 consecutive rows. The best preset is the one of highest
accuracy on the stream, which nobody can know beforehand. --methods without_labels without_domains
…: the default without a part of it; driftfilter:variance=.1,momentum=.5: with options. What DIR
holds: natural_data.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app.metrics import quality
from figures import write
from lockout import PARTS
from natural_data import CLEAN, NORMS, TASKS, Rows, load, trained
from orders import chosen

PRESETS = ("bn", "tent", "eata", "shot_im", "opgd", "opgd_diag", "head_ekf", "t3a")
METHODS = ("frozen", "default", "data", *PRESETS)  # data: the default with source data
METRICS = ("accuracy", "nll", "brier", "ece")


def start(model: nn.Module, method: str, source: Rows) -> Callable[[Tensor], Tensor]:
    if method == "frozen":
        return lambda inputs: model(inputs).log_softmax(-1)
    if method == "default" or method in PARTS:
        return df.adapt(model, **PARTS.get(method, {}))
    some = source.inputs[torch.randperm(len(source.labels))[:2_000]]
    if method == "data":
        return df.adapt(model, data=some)
    name, options = chosen(method)
    return df.adapt(model, name, data=some if name == "eata" else None, **options)


def measure(model: nn.Module, method: str, source: Rows, rows: Rows, batch: int) -> dict[str, Any]:
    """Quality of the predictions for a stream, or why there are none."""
    outputs: list[Tensor] = []
    begun = time.perf_counter()
    try:
        predict = start(model, method, source)
        with torch.set_grad_enabled(method != "frozen"):
            for inputs in rows.inputs.split(batch):
                outputs += [predict(inputs).detach()]
    except ValueError as error:
        return {"failed" if outputs else "refused": str(error)}
    found = quality(torch.cat(outputs), rows.labels)
    values: dict[str, Any] = {name: round(getattr(found, name), 6) for name in METRICS}
    if isinstance(predict, df.Adapter):  # alarms that act
        acts = [event.signal for event in predict.events if event.response != "record"]
        values["alarms"] = dict(Counter(acts))
    return {**values, "n": found.n, "seconds": round(time.perf_counter() - begun, 2)}


def compare(name: str, norm: str, seed: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All methods on the streams of one task, with one network."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    task = load(name, arguments.data, seed)
    path = arguments.data / "networks" / f"{name}-{norm}-{seed}.pt"
    model = trained(task, norm, seed, path)
    shown = "layer" if norm == "group" and task.shape == "mlp" else norm
    records = []
    for stream, method in itertools.product(task.streams, arguments.methods):
        torch.manual_seed(seed)
        rows = task.streams[stream].thin(arguments.limit)
        about = {"task": name, "stream": stream, "norm": shown, "seed": seed, "method": method}
        records.append(about | measure(model, method, task.train, rows, arguments.batch))
    return records


# Reporting


class Row(NamedTuple):
    """One network on one stream, over all seeds."""

    task: str
    stream: str
    norm: str
    methods: dict[str, list[dict[str, Any]]]  # a record for each seed

    def values(self, method: str, metric: str) -> list[float]:
        """One for each seed; none if a seed has no predictions."""
        records = self.methods.get(method, [])
        found = [record[metric] for record in records if metric in record]
        return found if len(found) == len(records) else []

    def mean(self, method: str, metric: str) -> float | None:
        """Over seeds; None if a seed has no predictions."""
        found = self.values(method, metric)
        return fmean(found) if found else None

    def deviation(self, method: str, metric: str) -> float:
        """Over seeds; 0 for one."""
        found = self.values(method, metric)
        return stdev(found) if len(found) > 1 else 0.0

    def summary(self, method: str | None) -> dict[str, Any] | None:
        """Means over seeds, and deviations."""
        if method is None or self.mean(method, "accuracy") is None:
            return None
        means = {metric: round(fmean(self.values(method, metric)), 4) for metric in METRICS}
        deviations = {metric: round(self.deviation(method, metric), 4) for metric in METRICS}
        return {**means, "deviation": deviations}

    def compared(self) -> dict[str, Any]:
        """Frozen, default and best preset."""
        best, records = self.best(), next(iter(self.methods.values()))
        counts = [record["n"] for record in records if "n" in record]
        return {
            "task": self.task,
            "stream": self.stream,
            "norm": self.norm,
            "seeds": len(records),
            "n": max(counts, default=0),
            "frozen": self.summary("frozen"),
            "default": self.summary("default"),
            "best preset": best,
            "best": self.summary(best),
        }

    def why_not(self, method: str) -> str:
        """Why a method has no figures."""
        reasons = [name for record in self.methods.get(method, []) for name in record]
        return next((name for name in reasons if name in ("refused", "failed")), "-")

    def best(self) -> str | None:
        """The preset of highest accuracy."""
        scores = {name: self.mean(name, "accuracy") for name in PRESETS}
        there = {name: score for name, score in scores.items() if score is not None}
        return max(there, key=lambda name: there[name], default=None)

    def gain(self, metric: str, over: str | None = "frozen") -> float:
        """The default's value minus another's; NaN if one of them has none."""
        own, other = self.mean("default", metric), over and self.mean(over, metric)
        return float("nan") if own is None or not isinstance(other, float) else own - other

    def title(self) -> str:
        return f"{self.task:<9}{self.stream:<9}{self.norm:<7}"


def gather(records: Sequence[dict[str, Any]]) -> list[Row]:
    rows: dict[tuple[str, str, str], Row] = {}
    for record in records:
        key = record["task"], record["stream"], record["norm"]
        row = rows.setdefault(key, Row(*key, {}))
        row.methods.setdefault(record["method"], []).append(record)
    return list(rows.values())


def table(rows: Sequence[Row], metric: str) -> Iterator[str]:
    measured = dict.fromkeys(name for row in rows for name in row.methods)
    known = [name for name in (*METHODS, *PARTS) if name in measured]
    methods = [*known, *(name for name in measured if name not in known)]
    yield f"{metric:<25}" + "".join(f" {name:>12}" for name in methods) + "  best preset"
    for row in rows:
        values = {name: row.mean(name, metric) for name in methods}
        cells = (
            f"{value:>7.3f}±{row.deviation(name, metric):.3f}"
            if value is not None
            else f"{row.why_not(name):>13}"
            for name, value in values.items()
        )
        yield row.title() + "".join(cells) + f"  {row.best() or '-'}"


def alarms(rows: Sequence[Row]) -> Iterator[str]:
    """What the default's monitor acted upon, over all seeds."""
    yield "alarms of the default that act"
    for row in rows:
        found: Counter[str] = Counter()
        for record in row.methods.get("default", []):
            found.update(record.get("alarms", {}))
        yield row.title() + (", ".join(f"{name} {n}" for name, n in found.items()) or "none")


def verdict(rows: Sequence[Row]) -> Iterator[str]:
    """What the default has to show, and the rows that do not show it."""
    shifted = [row for row in rows if row.stream != CLEAN]
    clean = [row for row in rows if row.stream == CLEAN]
    claims: list[tuple[str, list[Row], Callable[[Row], float]]] = [
        ("shifted: -.01 to the best preset", shifted, lambda row: row.gain("accuracy", row.best())),
        ("shifted: -.005 to frozen", shifted, lambda row: row.gain("accuracy")),
        ("clean: accuracy -.005 to frozen", clean, lambda row: row.gain("accuracy")),
        ("clean: NLL +.005 to frozen", clean, lambda row: -row.gain("nll")),
        ("clean: ECE +.005 to frozen", clean, lambda row: -row.gain("ece")),
    ]
    for claim, among, gain in claims:
        least = -0.01 if "best" in claim else -0.005
        bad = [(gain(row), row) for row in among if not gain(row) >= least]
        but = ", but not" if bad else ""
        yield f"{claim}, at worst: {len(among) - len(bad)} of {len(among)} rows{but}"
        for value, row in bad:
            loss = "refused" if math.isnan(value) else f"worse by {-value:.3f}"
            yield f"    {row.title()}{loss}"


def read(arguments: argparse.Namespace, measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What earlier runs have that was not measured now."""
    names = ("task", "stream", "norm", "seed", "method")
    found = {tuple(record[name] for name in names): record for record in measured}
    for path in arguments.beside:
        figures = json.loads(path.read_text())["figures"]
        if any(figures[name] != getattr(arguments, name) for name in ("batch", "limit")):
            raise SystemExit(f"{path} is of other --batch or --rows")
        for record in figures["records"]:
            found.setdefault(tuple(record[name] for name in names), record)
    return list(found.values())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of the files named above")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument(
        "--norms",
        nargs="+",
        default=list(NORMS),
        choices=list(NORMS),
        help="group: in an MLP layer norm",
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--rows", type=int, default=40_000, dest="limit", help="of a stream, at most"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    parser.add_argument(
        "--beside", type=Path, nargs="*", default=[], help="take what is not measured from --jsons"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    begun = time.perf_counter()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    parts = list(itertools.product(arguments.tasks, arguments.norms, seeds))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, context) as pool:
        waiting = [pool.submit(compare, *part, arguments) for part in parts]
        records = [record for each in waiting for record in each.result()]
    records = read(arguments, records)
    rows = gather(records)
    print(f"batches of {arguments.batch}, {arguments.seeds} seeds, at most {arguments.limit} rows")
    for metric in METRICS:
        print("", *table(rows, metric), sep="\n")
    print("", *alarms(rows), sep="\n")
    print("", *verdict(rows), f"\n{time.perf_counter() - begun:.0f} s", sep="\n")
    figures = {
        "batch": arguments.batch,
        "limit": arguments.limit,
        "rows": [row.compared() for row in rows],
        "records": records,
    }
    write(arguments.json, figures, "numpy", threads=1)


if __name__ == "__main__":
    main()

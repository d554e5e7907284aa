"""Texts of another kind: a MiniLM tuned on reviews of books meets those of films and goods.

    python benchmarks/sources.py reviews --data REVIEWS --encoder MINILM --out FOLDER
    python benchmarks/reviews.py --model FOLDER [--rows 500] [--batch 64] [--seeds 1] \
        [--methods frozen default data tent opgd] [--json FILE]

Reviews of each kind by themselves, the adapter reset for each ("reset"), and dvd, electronics and
kitchen one after the other ("continual"), each thinned to --rows that a seed draws; "clean" are
held-out reviews of books. "data" is the default with 200 reviews of books without labels, of those
that the network was tuned on. Tokens are inputs by name.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

import driftfilter as df
from driftfilter.app.metrics import quality
from driftfilter.app.networks.load_model import NamedNetwork, open_model
from figures import write
from sources import KINDS

METHODS = ("frozen", "default", "data", "tent", "opgd")
METRICS = ("accuracy", "nll", "brier", "ece")
SOURCE = 200  # reviews of it that are given
Tokens = dict[str, Tensor]
Row = dict[str, Any]


def tokenize(network: NamedNetwork, texts: list[str]) -> Tokens:
    """Arrays by name [n, length], as long as the longest text."""
    assert network.tokens is not None
    found = network.tokens(texts)
    assert isinstance(found, dict)
    return {name: torch.as_tensor(each) for name, each in found.items()}


def read(folder: Path, kind: str) -> list[Row]:
    lines = (folder / "reviews.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["domain"] == kind]


def thin(rows: list[Row], count: int, seed: int) -> list[Row]:
    """So many of them, drawn, in a drawn order."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return [rows[at] for at in order[:count].tolist()]


def start(network: NamedNetwork, method: str, a: argparse.Namespace, seed: int) -> Any:
    """What is called with tokens and gives log-probabilities."""
    if method == "frozen":
        return lambda **tokens: network.module(**tokens).log_softmax(-1)
    if method == "data":
        rows = thin(read(a.model, "source"), SOURCE, seed)
        texts = [
            [row["text"] for row in rows[at : at + a.batch]] for at in range(0, SOURCE, a.batch)
        ]
        data = df.SourceData([tokenize(network, some) for some in texts])
        return df.adapt(network.module, data=data)
    return df.adapt(network.module, "driftfilter" if method == "default" else method)


def follow(network: NamedNetwork, predict: Any, rows: list[Row], a: Any) -> Tensor:
    """Log-probabilities [n, k]; nothing is differentiated here."""
    outputs = []
    for first in range(0, len(rows), a.batch):
        texts = [row["text"] for row in rows[first : first + a.batch]]
        outputs.append(predict(**tokenize(network, texts)).detach())
    return torch.cat(outputs)


def measure(network: NamedNetwork, a: argparse.Namespace) -> Iterator[Row]:
    """All methods on all streams."""
    kinds = [kind for kind in KINDS if kind != a.source]
    for seed in range(a.seeds):
        streams = {kind: thin(read(a.model, kind), a.rows, seed) for kind in ("clean", *kinds)}
        streams["continual"] = [row for kind in kinds for row in streams[kind]]
        for method in a.methods:
            for stream, rows in streams.items():
                torch.manual_seed(seed)
                begun = time.process_time()
                predict = start(network, method, a, seed)
                with torch.set_grad_enabled(method != "frozen"):
                    logp = follow(network, predict, rows, a)
                found = quality(logp, torch.tensor([row["label"] for row in rows]))
                row: Row = {"stream": stream, "seed": seed, "method": method, "n": len(rows)}
                row |= {name: round(getattr(found, name), 4) for name in METRICS}
                row["seconds"] = round(time.process_time() - begun, 1)
                print(row, flush=True)
                yield row


def summarize(rows: list[Row]) -> list[Row]:
    """Means and deviations over seeds."""
    found = []
    for stream, method in dict.fromkeys((row["stream"], row["method"]) for row in rows):
        some = [row for row in rows if (row["stream"], row["method"]) == (stream, method)]
        values = {name: [row[name] for row in some] for name in METRICS}
        several = len(some) > 1
        found.append(
            {"stream": stream, "method": method, "seeds": len(some), "n": some[0]["n"]}
            | {name: round(fmean(each), 4) for name, each in values.items()}
            | {
                "deviation": {
                    name: round(stdev(each), 4) if several else 0.0 for name, each in values.items()
                }
            }
        )
        print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of sources.py")
    parser.add_argument("--source", default="books", choices=KINDS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--rows", type=int, default=500, help="of a kind")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    network = open_model(f"hf:{arguments.model}")
    rows: list[Row] = []
    settings = {"batch": arguments.batch, "rows": arguments.rows}
    for row in measure(network, arguments):
        rows.append(row)
        write(arguments.json, {**settings, "records": rows}, "numpy", "transformers")
    figures = {**settings, "summary": summarize(rows), "records": rows}
    write(arguments.json, figures, "numpy", "transformers")


if __name__ == "__main__":
    main()

"""Whether smoothed labels are found in source data without labels, and what taking them off gains.

    python benchmarks/smoothing.py [--seeds 5] [--json FILE] [--models vit_s4=WEIGHTS … \\
        --clean CIFAR10_TEST.npz --source CIFAR10_TRAIN.npz] [--images 300]

Networks for scikit-learn's digits and wines, and for classes that nobody can tell well, trained on
labels smoothed by ε and on plain ones: ε found in training rows and in held-out ones
(inference/smoothed_labels.py), by how many of the surest samples it is looked for in, and NLL and
ECE of held-out rows before and after. With --models: the default with source data on clean images,
speckle noise, blur, saturation and spatter at severity 5, in batches of 200, with what it finds and
without.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits, load_wine
from torch import Tensor, nn

import driftfilter as df
from driftfilter.inference import smoothed_labels
from driftfilter.inference.prediction import SMOOTHING
from driftfilter.inference.smoothed_labels import find_smoothing, unsmooth
from figures import write
from search_default import average, judge, open_domains, open_models

Row = dict[str, Any]
SMOOTHED = (0.0, 0.05, 0.1, 0.2)
SURE = (0.5, 0.75, 0.9)


def make(task: str) -> tuple[Tensor, Tensor, int]:
    """Rows, labels, and epochs of training."""
    if task == "vague":  # five classes, right about 45 % of the time at best
        rows = torch.randn(3000, 8)
        logits = 0.5 * rows @ torch.randn(8, 5)
        return rows, torch.distributions.Categorical(logits=logits).sample(), 8
    data = load_wine() if task == "wine" else load_digits()
    rows = torch.tensor(data.data).float()
    rows = (rows - rows.mean(0)) / rows.std(0).clamp_min(1.0)
    noise = {"digits": 0.0, "noisy digits": 3.0, "wine": 1.0}[task]
    return rows + noise * torch.randn_like(rows), torch.tensor(data.target), 25


def train(rows: Tensor, labels: Tensor, epochs: int, epsilon: float) -> nn.Module:
    k = int(labels.max()) + 1
    model = nn.Sequential(
        nn.Linear(rows.shape[1], 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, k)
    )
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    loss = nn.CrossEntropyLoss(label_smoothing=epsilon)
    for _ in range(epochs):
        for at in torch.randperm(len(labels)).split(50):
            optimizer.zero_grad()
            loss(model(rows[at]), labels[at]).backward()
            optimizer.step()
    return model.eval()


def compare(task: str, epsilon: float, seed: int) -> Row:
    torch.manual_seed(seed)
    rows, labels, epochs = make(task)
    order = torch.randperm(len(labels))
    source, held = order[: 6 * len(order) // 10], order[6 * len(order) // 10 :]
    model = train(rows[source], labels[source], epochs, epsilon)
    with torch.no_grad():
        known, logs = model(rows[source]), model(rows[held]).log_softmax(-1)
    found: Row = {}
    for sure in SURE:
        smoothed_labels._SURE = sure
        found[f"found {sure:g}"] = float(find_smoothing(known))
        found[f"held out {sure:g}"] = float(find_smoothing(logs))
    smoothed_labels._SURE = 0.75
    smoothing = find_smoothing(known)
    after = unsmooth(logs, smoothing) if smoothing > 0 else logs
    return {**found, "before": judge(logs, labels[held]), "after": judge(after, labels[held])}


def search(seeds: int) -> list[Row]:
    rows = []
    for task, epsilon in itertools.product(("digits", "noisy digits", "wine", "vague"), SMOOTHED):
        each = [compare(task, epsilon, seed) for seed in range(seeds)]
        means: Row = {key: fmean(row[key] for row in each) for key in each[0] if "found" in key}
        means |= {key: fmean(row[key] for row in each) for key in each[0] if "held" in key}
        means |= {key: average([row[key] for row in each]) for key in ("before", "after")}
        rows.append({"task": task, "smoothed": epsilon, **means})
        numbers = " ".join(f"{value:.3f}" for value in means.values() if isinstance(value, float))
        print(f"{task:<14}{epsilon:<6g}{numbers}  {means['before']} {means['after']}", flush=True)
    return rows


def follow(arguments: argparse.Namespace) -> list[Row]:
    domains, labels = open_domains(arguments)
    pixels = np.load(arguments.source)["images"][:500]
    source = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    rows = []
    for name, model in open_models(arguments):
        cells: dict[str, dict[str, Row]] = {"with": {}, "without": {}}
        smoothing = 0.0
        for (domain, images), method in itertools.product(domains.items(), cells):
            adapter = df.adapt(model, data=source, monitor=None)
            state = adapter.state_dict()
            place = next((key for key in state if key.endswith(SMOOTHING)), None)
            smoothing = 0.0 if place is None else float(state[place])
            if method == "without" and place is not None:
                del state[place]
                adapter.load_state_dict(state)
            outputs = torch.cat([adapter(each) for each in images.split(200)])
            cells[method][domain] = judge(outputs, labels)
        for method, found in cells.items():
            extra = average([row for domain, row in found.items() if domain != "clean"])
            about = {"network": name, "smoothing": smoothing, "method": method}
            rows.append({**about, "clean": found["clean"], "extra": extra})
            print(name, f"{smoothing:.4f}", method, found["clean"], extra, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--models", nargs="+", help="NAME=WEIGHTS, or NAME")
    parser.add_argument("--clean", type=Path, help="CIFAR-10's test images")
    parser.add_argument("--source", type=Path, help="training images")
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures: Row = {"small": search(arguments.seeds)}
    if arguments.models:
        figures["large"] = follow(arguments)
    write(arguments.json, figures, "numpy", "scikit-learn")


if __name__ == "__main__":
    main()

"""A frozen scikit-learn classifier against the same one in AdaptiveClassifier, on shifted tables.

    python benchmarks/tabular.py [--seeds 20] [--batch 32] [--predict-first] \
        [--data digits breast_cancer] [--json FILE]

Half of the rows train StandardScaler and classifier, the others come as a stream, in batches that
are adapted to without labels and then predicted (before, with --predict-first). A seed draws the
split and the shift. Gains are adaptive minus frozen, accuracy in points, log loss (NLL) in nats,
with the standard error over seeds and the seeds at least as good. Defaults of AdaptiveClassifier
were chosen on other data: synthetic tables, wine and iris.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import sklearn
import torch
from numpy.typing import NDArray
from scipy.linalg import expm
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from driftfilter.sklearn import AdaptiveClassifier

Array: TypeAlias = NDArray[Any]
Shift: TypeAlias = Callable[[Array, np.random.Generator], Array]  # of standardised rows [n, D]


def rotated(rows: Array, rng: np.random.Generator) -> Array:
    """By at most 20 degrees, in random planes."""
    generator = rng.normal(size=(rows.shape[1],) * 2)
    generator -= generator.T
    turned: Array = rows @ expm(generator / np.linalg.norm(generator, 2) * np.deg2rad(20)).T
    return turned


def drifting(rows: Array, rng: np.random.Generator) -> Array:
    """An offset that grows from none to two standard deviations."""
    return rows + np.linspace(0, 2, len(rows))[:, None] * rng.normal(size=rows.shape[1])


SHIFTS: dict[str, Shift] = {
    "none": lambda rows, rng: rows,
    "offset": lambda rows, rng: rows + rng.normal(size=rows.shape[1]),
    "scaling": lambda rows, rng: rows * np.exp(rng.normal(0, 0.5, rows.shape[1])),
    "drift": drifting,
    "rotation": rotated,
    "noise": lambda rows, rng: rows + 0.7 * rng.normal(size=rows.shape),
    "by class": lambda rows, rng: (
        rows
    ),  # unshifted, but class after class: against what adaptation assumes
}
DATA = {"digits": load_digits, "breast_cancer": load_breast_cancer}


def classifiers(seed: int) -> dict[str, Any]:
    return {
        "logistic": LogisticRegression(max_iter=2000),
        "MLP": MLPClassifier((32,), max_iter=300, tol=1e-3, random_state=seed),
    }


def score(probabilities: Array, labels: Array) -> tuple[float, float]:
    """Accuracy in points, and mean negative log probability of the label."""
    right = probabilities[np.arange(len(labels)), labels]
    return 100 * float((probabilities.argmax(1) == labels).mean()), float(
        -np.log(np.maximum(right, 1e-15)).mean()
    )


def streamed(model: AdaptiveClassifier, rows: Array, batch: int, predict_first: bool) -> Array:
    """Probabilities [n, k] of a stream, each batch after (or before) it was adapted to."""
    outputs = []
    for start in range(0, len(rows), batch):
        piece = rows[start : start + batch]
        if predict_first:
            outputs.append(model.predict_proba(piece))
            model.partial_fit(piece)
        else:
            outputs.append(model.partial_fit(piece).predict_proba(piece))
    return np.concatenate(outputs)


def compared(
    data: str, seed: int, batch: int, predict_first: bool
) -> dict[tuple[str, str, str], list[float]]:
    """[accuracy, NLL] of the frozen classifier, then of the adaptive one, by data, classifier and
    shift.
    """
    X, y = DATA[data](return_X_y=True)
    train, test, known, labels = train_test_split(
        X, y, test_size=0.5, stratify=y, random_state=seed
    )
    spread = train.std(0) + (train.std(0) == 0)
    results = {}
    for name, classifier in classifiers(seed).items():
        pipeline = make_pipeline(StandardScaler(), classifier).fit(train, known)
        for shift, apply in SHIFTS.items():
            order = (
                np.argsort(labels, kind="stable") if shift == "by class" else np.arange(len(labels))
            )
            moved = apply(
                (test - train.mean(0)) / spread, np.random.default_rng(seed)
            ) * spread + train.mean(0)
            stream, wanted = moved[order], labels[order]
            adaptive = streamed(
                AdaptiveClassifier(pipeline, batch_size=batch), stream, batch, predict_first
            )
            results[data, name, shift] = [
                *score(pipeline.predict_proba(stream), wanted),
                *score(adaptive, wanted),
            ]
    return results


def line(key: tuple[str, str, str], values: Array) -> str:
    """One row of the table from [seeds, 4]."""
    means, gains = values.mean(0), values[:, 2:] - values[:, :2]
    errors = gains.std(0, ddof=1) / len(gains) ** 0.5 if len(gains) > 1 else np.zeros(2)
    good = (gains[:, 0] >= 0).sum(), (gains[:, 1] <= 0).sum()
    accuracy = (
        f"{means[0]:>8.2f}{means[2]:>9.2f}{gains[:, 0].mean():>+8.2f} "
        f"±{errors[0]:<5.2f}{good[0]:>3}"
    )
    loss = (
        f"{means[1]:>9.3f}{means[3]:>9.3f}{gains[:, 1].mean():>+9.3f} "
        f"±{errors[1]:<6.3f}{good[1]:>3}"
    )
    return f"{key[0]:<14}{key[1]:<10}{key[2]:<10}{accuracy}{loss}"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--predict-first", action="store_true")
    parser.add_argument("--data", nargs="+", default=list(DATA), choices=list(DATA))
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    collected: dict[tuple[str, str, str], list[list[float]]] = {}
    for data in arguments.data:
        for seed in range(arguments.seeds):
            for key, values in compared(
                data, seed, arguments.batch, arguments.predict_first
            ).items():
                collected.setdefault(key, []).append(values)
    order = (
        "predicted, then adapted to" if arguments.predict_first else "adapted to, then predicted"
    )
    where = f"{platform.machine()}, scikit-learn {sklearn.__version__}, torch {torch.__version__}"
    date = datetime.date.today().isoformat()
    print(
        f"batches of {arguments.batch} {order}, seeds 0 to {arguments.seeds - 1}, {where}, {date}\n"
    )
    print(f"{'':<34}{'accuracy':^36}{'NLL':^40}")
    half = f"{'frozen':>8}{'adaptive':>9}{'gain':>8}{'':<7}{'≥':>3}"
    print(
        f"{'data':<14}{'classifier':<10}{' shift':<10}{half}"
        f"{'frozen':>9}{'adaptive':>9}{'gain':>9}{'':<8}{'≤':>3}"
    )
    for key, rows in sorted(collected.items(), key=lambda item: item[0][:2]):
        print(line(key, np.array(rows)))
    if arguments.json:
        figures = {
            " / ".join(key): np.array(rows).mean(0).tolist() for key, rows in collected.items()
        }
        head = {
            "where": where,
            "date": date,
            "order": order,
            "batch": arguments.batch,
            "seeds": arguments.seeds,
        }
        columns = ["frozen accuracy", "frozen NLL", "adaptive accuracy", "adaptive NLL"]
        arguments.json.write_text(
            json.dumps({**head, "columns": columns, "means": figures}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

"""What a run writes at its end, for its report: how good it was, what moved, a few samples to look
at.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import driftfilter as df
from driftfilter.app import metrics
from driftfilter.app.images.files import Integers
from driftfilter.app.parameter_shift import measure_shift
from driftfilter.app.run.predictions import columns
from driftfilter.app.run.reader import Feed, Form, StoredFeed
from driftfilter.app.terminal import finite
from driftfilter.app.thumbnails import VALUES, find_extremes, is_image, thumbnail
from driftfilter.base.checks import require
from driftfilter.inference import accuracy
from driftfilter.storage.atomic import atomic_file, write_atomic

FORMAT = 1  # of summary.json
PIECES, COMMON = 60, 10  # of a stream, and classes, whose shares are kept
SUMMARY, MOVEMENT, EXAMPLES = "summary.json", "movement.json", "examples.npz"


def open_classes(path: Path) -> tuple[str, ...]:
    """The names of the classes, one a line."""
    require(path.is_file(), "--classes", str(path), "a text file that is there")
    try:
        names = tuple(line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines())
    except UnicodeDecodeError as error:
        raise ValueError(f"--classes {path} must be a text file in UTF-8, got {error}") from error
    require(
        bool(names) and all(names),
        "--classes",
        str(path),
        "a text file with one name a line, none of them empty",
    )
    return names


class Finished(NamedTuple):
    """What is known at the end of a run."""

    logs: NDArray[Any]  # log-probabilities [n, k], NaN if skipped
    source: NDArray[Any] | None  # of the frozen source [n, k]; None: not recorded
    labels: Integers | None  # [n] or fewer, if they are known
    classes: Sequence[str] = ()  # names [k]; none: numbers


def clear(out: Path) -> None:
    """Remove what an earlier end of the run has written, before the run goes on."""
    for name in (SUMMARY, MOVEMENT, EXAMPLES):
        (out / name).unlink(missing_ok=True)


def write(
    out: Path, finished: Finished, adapter: df.Adapter, model: nn.Module, others: dict[str, Any]
) -> dict[str, Any]:
    """Write movement.json and, last of all, summary.json with ``others`` in it; what that holds."""
    document = {"format": FORMAT, **others, **summary(finished)}
    write_json(out / MOVEMENT, measure_shift(adapter, model))
    write_json(out / SUMMARY, document)
    return document


def summary(finished: Finished) -> dict[str, Any]:
    """Quality after and before adapting, and the classes, JSON-ready; None for what cannot be
    known.
    """
    logs, source = finished.logs, finished.source
    usable = ~np.isnan(logs).any(1)
    return {
        "quality": {
            "after": _quality(logs, finished.labels),
            "before": _quality(source, finished.labels),
        },
        "changed": None if source is None else _share((logs.argmax(1) != source.argmax(1))[usable]),
        "classes": _classes(finished, usable),
        "shares": _shares(finished, usable),
    }


def _share(chosen: NDArray[Any]) -> float | None:
    return float(chosen.mean()) if len(chosen) else None


def _quality(logs: NDArray[Any] | None, labels: Integers | None) -> dict[str, Any] | None:
    """Quality on the samples with a prediction and a label; None if there are none."""
    if logs is None or labels is None:
        return None
    known = logs[: len(labels)]
    usable = ~np.isnan(known).any(1)
    if not usable.any():
        return None
    logp, truth = torch.from_numpy(known[usable]), torch.from_numpy(labels[: len(known)][usable])
    return {
        **finite(metrics.quality(logp, truth)._asdict()),
        "bins": metrics.reliability(logp, truth)._asdict(),
        "covered": metrics.risk_coverage(logp, truth),
    }


def _classes(finished: Finished, usable: NDArray[Any]) -> list[dict[str, Any]]:
    """How often each class was predicted, after and before, and how often it was right if labels
    are known.
    """
    if not usable.any():
        return []  # and so nobody knows how many classes there are
    k = finished.logs.shape[1]
    said = (
        {"": finished.logs}
        if finished.source is None
        else {"": finished.logs, "baseline_": finished.source}
    )
    labels = None if finished.labels is None else finished.labels[: len(usable)]
    counts: dict[str, list[int]] = {}
    for prefix, logs in said.items():
        predicted = np.where(usable, np.where(np.isnan(logs), 0, logs).argmax(1), -1)
        counts[prefix + "predicted"] = _counts(predicted[usable], k)
        if labels is not None:
            counts[prefix + "right"] = _counts(labels[predicted[: len(labels)] == labels], k)
    if labels is not None:
        counts["labeled"] = _counts(labels[usable[: len(labels)]], k)
    return [
        {"name": name, **{key: found[place] for key, found in counts.items()}}
        for place, name in enumerate(finished.classes or map(str, range(k)))
    ]


def _shares(finished: Finished, usable: NDArray[Any]) -> dict[str, list[float]]:
    """How often the most common classes are predicted in each of so many equal pieces of the
    stream, by name.
    """
    if not usable.any():
        return {}
    predicted = finished.logs[usable].argmax(1)
    pieces = [each for each in np.array_split(predicted, PIECES) if len(each)]
    names = finished.classes or list(map(str, range(finished.logs.shape[1])))
    counts = np.bincount(predicted, minlength=len(names))
    common = np.sort(np.argsort(-counts, kind="stable")[:COMMON])
    return {
        names[label]: [round(float((each == label).mean()), 4) for each in pieces]
        for label in common
        if counts[label]
    }


def _counts(labels: NDArray[Any], k: int) -> list[int]:
    return list(np.bincount(labels, minlength=k).tolist())


def write_examples(out: Path, finished: Finished, feed: Feed, form: Form) -> str:
    """Write the most and the least certain samples, read again, to examples.npz; else say why
    there are none.
    """
    if not isinstance(feed, StoredFeed):
        return "the data cannot be read again"
    said = columns(finished.logs)
    most, least = find_extremes(said.entropy)
    rows = np.concatenate((most, least))
    try:
        values = [_show_sample(form, feed, int(row)) for row in rows]
    except Exception as error:  # files can have changed in any way
        return f"the data could not be read again: {error}"
    if not values or len({(value.shape, value.dtype) for value in values}) > 1:
        return "there are no samples of one shape to show"
    with atomic_file(out / EXAMPLES) as file:
        np.savez(
            file,
            values=np.stack(values),
            row=rows,
            most=np.arange(len(rows)) < len(most),
            truth=_at(finished.labels, rows),
            label=said.label[rows],
            probability=said.probability[rows],
            entropy=said.entropy[rows],
        )
    return ""


def _at(labels: Integers | None, rows: NDArray[Any]) -> NDArray[Any]:
    """Labels of these rows, -1 if they are not known."""
    if labels is None:
        return np.full(len(rows), -1)
    known = rows < len(labels)
    return np.where(known, labels[np.where(known, rows, 0)], -1)


def _show_sample(form: Form, feed: StoredFeed, row: int) -> NDArray[Any]:
    """A thumbnail [h, w, 3] of 8 bits, or the first numbers of a sample [v]."""
    inputs = form(feed.take(row, row + 1))
    assert not isinstance(inputs, dict)  # only lines of JSON have parts
    sample = inputs[0].cpu().numpy()
    return thumbnail(sample) if is_image(sample) else sample.astype(np.float64).ravel()[:VALUES]


def summarize_estimates(path: Path) -> dict[str, Any] | None:
    """Expected accuracy over a whole run by its lines of steps.jsonl, JSON-ready; None if there is
    none.

    Means of the estimates after every thousand samples and at the end, weighted by the samples
    since the one before. ``least``: the lowest of them, ``at`` its step.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    found = list(_windows([json.loads(line) for line in lines]))
    total = sum(n for n, _ in found)
    if not total:
        return None
    worst = min((step for _, step in found), key=lambda step: step["estimate"])
    means = {
        name: sum(n * step[f"estimate{part}"] for n, step in found) / total
        for name, part in (("accuracy", ""), ("low", "_low"), ("high", "_high"))
    }
    return {**means, "samples": total, "least": worst["estimate"], "at": worst["step"]}


def _windows(steps: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The step that ends each window, with its samples."""
    n, last = 0, None
    for step in steps:
        if step.get("estimate") is None:
            continue
        n, last = n + step["n"], step
        if n >= accuracy.WINDOW:
            yield n, step
            n, last = 0, None
    if last is not None:
        yield n, last


def write_json(path: Path, document: Any) -> None:
    """Write a document as JSON, whole or not at all."""
    write_atomic(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")

"""How good a task of the benchmark was: quality by domain and along the stream, and a few samples
to look at.
"""

from __future__ import annotations

import base64
import itertools
import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from driftfilter.app import metrics
from driftfilter.app.bench.protocols import Step, StreamPlan
from driftfilter.app.downsample import downsample
from driftfilter.app.readers.stored import Samples, Shift
from driftfilter.app.streams import Domains
from driftfilter.app.thumbnails import VALUES, find_extremes, is_image, png, thumbnail

if TYPE_CHECKING:
    from driftfilter.app.bench.task import Bench


class Trace(NamedTuple):
    """What is recorded along a stream."""

    log_probabilities: Tensor  # [samples, k]
    # Classes predicted before the update [samples]; None: not asked for, or the prediction itself.
    before: Tensor | None
    milliseconds: list[float]  # a step
    probe: list[dict[str, float]]  # accuracy on clean images by step
    alarms: int


def evaluate(trace: Trace, plan: StreamPlan, bench: Bench) -> dict[str, Any]:
    """Quality by domain, over all samples, and along the stream."""
    index, domain = plan.samples()
    logp, labels = trace.log_probabilities, bench.data.labels[index].to(bench.machine.device)
    right = (logp.argmax(-1) == labels).cpu()
    before = right if trace.before is None else (trace.before == labels).cpu()
    rows = []
    for number, shift in enumerate(plan.domains):
        here = domain == number
        if here.any():
            at = here.to(logp.device)
            row = {**shift._asdict(), **metrics.quality(logp[at], labels[at])._asdict()}
            rows.append({**row, "before": _share(before[here])} if bench.before else row)
    found: dict[str, Any] = {
        "domains": rows,
        "mean": {
            name: statistics.fmean(row[name] for row in rows)
            for name in ("accuracy", "nll", "brier", "ece")
        },
        "pooled": metrics.quality(logp, labels)._asdict(),
        "bins": metrics.reliability(logp, labels)._asdict(),
        "visits": _visits(plan, right),
        "along": _pieces(plan, right, metrics.entropy(logp).cpu()),
    }
    if bench.before:
        found["before"] = {
            "accuracy": _share(before),
            "how": "the prediction itself (predict_from='prior')"
            if trace.before is None
            else "predicted before each update",
        }
    return found


def pick_examples(
    trace: Trace, plan: StreamPlan, data: Domains, device: torch.device
) -> list[dict[str, Any]]:
    """The most and the least certain samples of the stream, as thumbnails."""
    index, domain = plan.samples()
    logp = trace.log_probabilities.double().cpu()
    most, least = find_extremes(metrics.entropy(logp).numpy())
    found: list[dict[str, Any]] = []
    for place in (*most.tolist(), *least.tolist()):
        shift, row = plan.domains[int(domain[place])], index[place : place + 1]
        found.append(
            {
                "row": int(row),
                "truth": int(data.labels[row]),
                "where": shift.corruption,
                "most": len(found) < len(most),
                "label": int(logp[place].argmax()),
                "probability": logp[place].max().exp().item(),
                **_show(data.take(shift, row, device)),
            }
        )
    return found


def _show(samples: Samples) -> dict[str, Any]:
    """A picture of one sample, or its first numbers."""
    inputs = samples if isinstance(samples, Tensor) else next(iter(samples.values()))
    sample = inputs[0].cpu().numpy()
    if is_image(sample):
        return {"png": base64.b64encode(png(thumbnail(sample))).decode()}
    return {"png": "", "values": sample.astype(float).ravel()[:VALUES].tolist()}


def _share(right: Tensor) -> float:
    return right.double().mean().item()


def _visits(plan: StreamPlan, right: Tensor) -> list[dict[str, Any]]:
    """Accuracy along the stream: an entry for each row of steps of one round in one domain.

    Steps that mix domains count as one domain.
    """

    def place(step: Step) -> tuple[int, Shift]:
        first = plan.domains[int(step.domain[0])]
        mixed = not bool((step.domain == step.domain[0]).all())
        return step.round, first._replace(corruption="mixed") if mixed else first

    visits, at = [], 0
    for (number, shift), steps in itertools.groupby(plan.steps, place):
        sizes = [len(step.index) for step in steps]
        samples = right[at : at + sum(sizes)]
        at += sum(sizes)
        visits.append(
            {
                **shift._asdict(),
                "round": number,
                "steps": len(sizes),
                "n": len(samples),
                "accuracy": _share(samples),
            }
        )
    return visits


def _pieces(plan: StreamPlan, right: Tensor, entropy: Tensor) -> list[dict[str, Any]]:
    """The stream in as many pieces as a report draws."""
    sizes = [len(step.index) for step in plan.steps]
    return downsample(
        [
            {"n": n, "judged": n, "right": int(known.sum()), "entropy": said.mean().item()}
            for n, known, said in zip(sizes, right.split(sizes), entropy.split(sizes), strict=True)
        ]
    )

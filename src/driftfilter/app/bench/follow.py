"""An adapter taken along a stream, and what is recorded meanwhile."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import driftfilter as df
from driftfilter.app.bench.evaluate import Trace
from driftfilter.app.bench.outputs import call
from driftfilter.app.bench.peers import Peer
from driftfilter.app.bench.protocols import Step, StreamPlan
from driftfilter.app.machine import Machine
from driftfilter.app.readers.stored import CLEAN, Samples, join
from driftfilter.app.streams import Domains
from driftfilter.app.terminal import Watch

if TYPE_CHECKING:
    from driftfilter.app.bench.task import Bench

PROBED = 500  # clean images


def follow(
    bench: Bench, adapter: df.Adapter | Peer, data: Domains, plan: StreamPlan, watch: Watch | None
) -> Trace:
    """Take the adapter through all steps.

    The device is never waited for here, except by the watch and the probe when they look.
    """
    labels, machine = data.labels, bench.machine
    # A peer predicts as its code does: it is not asked.
    ask = (
        bench.before
        and not isinstance(adapter, Peer)
        and adapter.recipe.predict_from == "posterior"
    )
    clock, probe = _Clock(machine), _Probe(bench, data, len(plan.steps))
    outputs: list[Tensor] = []
    before: list[Tensor] = []
    right, seen, alarms = torch.zeros((), dtype=torch.int64, device=machine.device), 0, 0
    for number, step in enumerate(plan.steps):
        probe(adapter, number)  # before a reset, which would undo what it looks at
        if step.reset:
            alarms += len(adapter.events)
            adapter.reset()
        images = _take_batch(data, plan, step, machine)
        if ask:
            with machine.autocast():
                before.append(call(adapter.predict, images).labels)
        with clock, machine.autocast():
            outputs.append(call(adapter, images))
        if watch is not None:
            right = right + (outputs[-1].argmax(-1) == labels[step.index].to(machine.device)).sum()
            seen += len(step.index)
            watch(number + 1, len(plan.steps), partial(_describe, right / seen))
    probe(adapter, len(plan.steps))
    alarms += len(adapter.events)
    return Trace(
        torch.cat(outputs),
        torch.cat(before) if before else None,
        clock.milliseconds(),
        probe.accuracies(),
        alarms,
    )


def _describe(share: Tensor) -> str:
    return f"accuracy {share.item():.3f}"


def _take_batch(data: Domains, plan: StreamPlan, step: Step, machine: Machine) -> Samples:
    """A batch as the model takes it, every sample from its own domain."""
    present = step.domain.unique().tolist()
    if len(present) == 1:
        return machine.inputs(data.take(plan.domains[present[0]], step.index, machine.device))
    places = [(step.domain == domain).nonzero().squeeze(1) for domain in present]
    parts = [
        data.take(plan.domains[domain], step.index[at], machine.device)
        for domain, at in zip(present, places, strict=True)
    ]
    return machine.inputs(join(parts, torch.cat(places).argsort().to(machine.device)))


class _Clock:
    """Milliseconds of each use, known at the end.

    On a GPU they are taken from marks in its queue, so that nobody waits.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._marks: list[Any] = []

    def _mark(self) -> None:
        if self._machine.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._machine.device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def __enter__(self) -> None:
        self._mark()

    def __exit__(self, *_: object) -> None:
        self._mark()

    def milliseconds(self) -> list[float]:
        pairs = list(zip(self._marks[::2], self._marks[1::2], strict=True))
        if not self._machine.cuda:
            return [1000 * (end - start) for start, end in pairs]
        torch.cuda.synchronize(self._machine.device)
        return [start.elapsed_time(end) for start, end in pairs]


class _Probe:
    """Accuracy on the first clean images, every so many steps and after the last."""

    def __init__(self, bench: Bench, data: Domains, steps: int) -> None:
        self._every, self._steps, self._machine = bench.probe_every, steps, bench.machine
        self._right: dict[int, Tensor] = {}
        if self._every:
            every = (
                torch.arange(len(data.labels)) if data.members is None else data.members["clean"]
            )
            index = every[:PROBED]
            clean = data.take(CLEAN, index, bench.machine.device)
            self._images = bench.machine.inputs(clean)
            self._labels = data.labels[index].to(bench.machine.device)

    def __call__(self, adapter: df.Adapter | Peer, step: int) -> None:
        if self._every and (step % self._every == 0 or step == self._steps):
            with self._machine.autocast():
                self._right[step] = (
                    (call(adapter.predict, self._images).labels == self._labels).double().mean()
                )

    def accuracies(self) -> list[dict[str, float]]:
        return [{"step": step, "accuracy": share.item()} for step, share in self._right.items()]

"""Callbacks, which are called after every step of an adapter or of ``driftfilter run``, and two
that write it down.

The state is whole before the first call. A callback that fails, fails the caller's call; the
adapter stays whole, and alarms are still raised.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, final

from torch import Tensor

from driftfilter.base.checks import require
from driftfilter.filtering import StepInfo
from driftfilter.inference.accuracy import Estimate, Expectation
from driftfilter.monitor.drift_tests import summary
from driftfilter.monitor.state import Event, Signals
from driftfilter.storage.append_log import AppendLog, whole_lines


@final
@dataclass(frozen=True, eq=False)
class StepRecord:
    """What happened in one step; properties are worked out on first use."""

    number: int  # calls before it, of the adapter or its update: 0, 1, 2, …
    samples: int  # n
    ms: float  # of the call, by the clock on the wall
    info: StepInfo | None = None  # None: no update was due, or made
    # [n, k], not what the caller got but a copy; None: nothing was predicted.
    log_probabilities: Tensor | None = None
    signals: Signals = field(default_factory=Signals)  # all NaN without a monitor
    events: tuple[Event, ...] = ()  # alarms of this step
    right: int = 0  # samples of this step predicted right, among those judged
    judged: int = 0  # samples of this step whose labels are known
    accuracy: float | None = None  # over all samples so far whose labels are known
    notes: Mapping[str, Any] = field(default_factory=dict)  # what else is to be logged, JSON-ready
    domains: Mapping[int, int] = field(default_factory=dict)  # samples of each domain, by number
    # What the estimate of the accuracy is worked out from.
    expectation: Expectation = field(default_factory=Expectation)

    @cached_property
    def _summary(self) -> list[float]:
        """[k + 3], see ``drift_tests.summary``; the only look at the device."""
        return (
            [] if self.log_probabilities is None else list(summary(self.log_probabilities).tolist())
        )

    @cached_property
    def estimate(self) -> Estimate:
        """Expected accuracy over the last thousand samples, these ones among them."""
        return self.expectation.estimate

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of each class among the predicted labels [k]; empty if nothing was predicted."""
        return tuple(count / self.samples for count in self._summary[:-3])

    @property
    def largest_share(self) -> float:
        """Share of the class predicted most often; NaN if nothing was predicted."""
        return max(self.shares, default=math.nan)

    @property
    def entropy(self) -> float:
        """Mean predictive entropy (1/n) Σ H(p_i) in nats; NaN if nothing was predicted."""
        return self._summary[-2] / self._summary[-3] if self._summary else math.nan

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: a line of a journal."""
        begun: dict[str, Any] = {"step": self.number, "n": self.samples}
        if self.info is None and self.log_probabilities is None:
            return {**begun, **self.notes}
        known = {"accuracy": self.accuracy, "judged": self.judged, "right": self.right}
        return {
            **begun,
            "energy": None if self.info is None else _number(self.info.energy),
            "used": 0 if self.info is None else int((self.info.weights != 0).sum()),
            "entropy": _number(self.entropy),
            "largest_share": _number(self.largest_share),
            "distance": _number(self.signals.distance),
            **({} if self.accuracy is None else known),
            **_write_estimate(self.estimate),
            **({"domains": dict(self.domains)} if self.domains else {}),
            **({"alarms": list(map(str, self.events))} if self.events else {}),
            "ms": round(self.ms, 3),
            **self.notes,
        }

    def numbers(self) -> dict[str, float]:
        """What a chart over steps can show."""
        return {
            name: value
            for name, value in {**self.to_dict(), "alarms": len(self.events)}.items()
            if isinstance(value, (int, float)) and name != "step"
        }


def _write_estimate(estimate: Estimate) -> dict[str, float]:
    """JSON-ready; empty if nothing is known."""
    if not estimate.samples:
        return {}
    return {
        "estimate": estimate.accuracy,
        "estimate_low": estimate.low,
        "estimate_high": estimate.high,
    }


def _number(value: Any) -> float | None:
    """For JSON, which knows no NaN."""
    return float(value) if math.isfinite(value) else None


class Callback(Protocol):
    """An object with a method that is called after every step."""

    def on_step(self, step: StepRecord) -> None:
        """Take note of a step; the adapter has its new state already."""


def require_callbacks(callbacks: Iterable[Callback]) -> list[Callback]:
    """The callbacks as a list; raise if one has no ``on_step``."""
    require(isinstance(callbacks, Iterable), "adapt: callbacks", callbacks, "a list of callbacks")
    found = list(callbacks)
    for each in found:
        require(
            callable(getattr(each, "on_step", None)) and not isinstance(each, type),
            "adapt: callbacks",
            each,
            "objects with a method on_step(step)",
        )
    return found


@final
class JsonLines:
    """A line of JSON a step, which others can read at once.

    Lines are added to the whole lines of the file, or to its first ``size`` bytes.
    """

    def __init__(self, path: str | Path, size: int | None = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.journal = AppendLog(path, whole_lines(path) if size is None else size)

    def on_step(self, step: StepRecord) -> None:
        self.journal.append((json.dumps(step.to_dict()) + "\n").encode())

    def close(self) -> None:
        """End the file."""
        self.journal.close()


@final
class TensorBoard:
    """Curves for TensorBoard under ``driftfilter/``, one for each number of a step; alarms as
    text, too.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "callbacks.TensorBoard needs tensorboard: pip install 'driftfilter[tensorboard]'"
            ) from error
        self._writer = SummaryWriter(str(folder))

    def on_step(self, step: StepRecord) -> None:
        for name, value in step.numbers().items():
            self._writer.add_scalar(f"driftfilter/{name}", value, step.number)
        for event in step.events:
            self._writer.add_text("driftfilter/alarms", str(event), step.number)

    def close(self) -> None:
        """Write what waits, and end the file."""
        self._writer.close()

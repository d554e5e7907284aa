"""What a monitor says and remembers: events and the state between two steps, with its form in a
checkpoint.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor
from typing_extensions import Self

from driftfilter.base.checks import require, require_shape, require_squarable
from driftfilter.base.tensors import as_tensor, as_text, map_tensors
from driftfilter.filtering import FilterState
from driftfilter.inference.accuracy import SecondOpinion
from driftfilter.monitor.drift_tests import Signals as Signals  # beside events, for who reads both
from driftfilter.storage.sealed import parse_object
from driftfilter.storage.state_tensors import from_tensors, to_tensors

MONITOR = "monitor."  # in a checkpoint
KEPT = 1000  # events
_TENSORS = (
    *("history", "recent", "known", "later", "pairs", "apart", "trial", "waiting"),
    *("asked", "answered", "runs"),
)
_LABELS = ("pairs", "apart")  # those of labels
# What is told in JSON, with what it must be: a type, or a list or an object of one.
_PLAIN: dict[str, Any] = {
    "batches": int,
    "age": float,
    "away": float,
    "trying": bool,
    "alarmed": [str],
    "frozen": bool,
    "lasting": {"": float},
    "warned": [str],
    "gathered": int,
    "turns": int,
}
# What concerns a belief, or what was known at its time, and not the stream.
_OF_BELIEF = (
    *("good", "newer", "known", "later", "age", "away"),
    *("trying", "trial", "pairs", "apart", "turns"),
)
_TOLD: dict[str, Any] = {**_PLAIN, "signals": [float], "events": [list]}
_EVENT = (int, str, float, float, str)


# What a response does, in words.
DONE = {
    "record": "recorded",
    "warn": "warned",
    "inflate": "the belief was widened",
    "probation": "the belief is on probation",
    "revert": "went back to the last good belief",
    "reset": "went back to the source",
    "freeze": "adaptation is frozen",
}


@final
@dataclass(frozen=True)
class Event:
    """An alarm, and what was done about it."""

    step: int  # batches that the monitor had seen before
    signal: str
    value: float
    threshold: float
    response: str

    def __str__(self) -> str:
        bounds = f"{self.value:.3g} beyond {self.threshold:.3g}"
        return f"{self.signal} {bounds}: {DONE.get(self.response, self.response)}"


@final
@dataclass(frozen=True, eq=False)
class MonitorState:
    """All that a monitor remembers; an immutable value. Summaries [k + 3]: see history. Whatever is
    counted lies on the CPU.
    """

    batches: int = 0
    history: Tensor | None = None  # [k + 3], of batches taken for good
    recent: Tensor | None = None  # [k + 3], the window
    pairs: Tensor | None = None  # [2, w], what the belief and the source called the same samples
    apart: Tensor | None = None  # [2, w], the same with the source under its own statistics
    asked: Tensor | None = None  # [k + 3], what the source predicted for the last 50 k samples
    answered: Tensor | None = None  # [k + 3], what it predicted in batches taken for good
    runs: Tensor | None = None  # [k + 3], of labels in the history (label_runs.py)
    good: FilterState | None = None  # what to go back to; None: the start of the stream
    newer: FilterState | None = None  # takes its place when the next snapshot is due
    # [k + 3], the history at the time of the good state: what the window is compared with.
    known: Tensor | None = None
    later: Tensor | None = None  # [k + 3], that at the time of the newer one
    # Ticks since that snapshot; a tick is a batch, or as many small ones as fill a window.
    age: float = 0.0
    # Ticks since the stream left the history: batches kept out of it, or on probation.
    away: float = 0.0
    trying: bool = False  # on probation: the belief goes on adapting, and the good one waits
    trial: Tensor | None = None  # [k + 3], what the good belief predicts meanwhile
    waiting: Tensor | None = None  # [k + 3], samples that have not been judged yet
    gathered: int = 0  # their number
    alarmed: tuple[str, ...] = ()  # signals out of bounds in the last step
    frozen: bool = False
    turns: int = 0  # batches of the belief's own domain, by which it is compared now and then
    # Ticks for which something lasts that is told if it goes on (see Monitor), by name.
    lasting: Mapping[str, float] = field(default_factory=dict)
    warned: tuple[str, ...] = ()  # what has been told
    signals: Signals = field(default_factory=Signals)
    events: tuple[Event, ...] = ()

    @property
    def reference(self) -> Tensor | None:
        """[k + 3], the history without the latest batches, once there is so much."""
        return self.history if self.known is None else self.known

    @property
    def second_opinion(self) -> SecondOpinion | None:
        """What the belief and the source say of the same samples; None before enough of them."""
        if self.pairs is None or math.isnan(self.signals.classes_lost):
            return None
        return SecondOpinion(self.pairs, self.signals.classes_lost)

    @property
    def of_belief(self) -> dict[str, Any]:
        """What concerns the belief by name: another domain's has its own."""
        return {name: getattr(self, name) for name in _OF_BELIEF}

    def move_to(self, mean: Tensor) -> Self:
        """States where a mean is, and in its dtype; what is counted, on the CPU."""

        def there(state: FilterState | None) -> FilterState | None:
            return None if state is None else map_tensors(state, lambda tensor: tensor.to(mean))

        tensors: dict[str, Any] = {name: tensor.cpu() for name, tensor in self._tensors().items()}
        return replace(self, **tensors, good=there(self.good), newer=there(self.newer))

    def map_states(self, change: Callable[[FilterState], FilterState]) -> Self:
        """With other states to go back to."""
        good, newer = (
            None if state is None else change(state) for state in (self.good, self.newer)
        )
        return replace(self, good=good, newer=newer)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name in _TENSORS if (tensor := getattr(self, name)) is not None}

    def to_tensors(self) -> dict[str, Tensor]:
        """As named tensors, for a checkpoint; the source of the states is not repeated."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        plain |= {
            "signals": list(self.signals),
            "events": [list(asdict(event).values()) for event in self.events],
        }
        found = self._tensors()
        for name, state in (("good", self.good), ("newer", self.newer)):
            tensors = {} if state is None else to_tensors(state, with_source=False)
            found |= {f"{name}.{key}": value for key, value in tensors.items()}
        return {
            MONITOR + name: value
            for name, value in {"told": as_tensor(json.dumps(plain)), **found}.items()
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], like: FilterState) -> Self:
        """What named tensors describe, for states of the structure and source of another one; a
        fresh one of none.
        """
        own = {
            name.removeprefix(MONITOR): value
            for name, value in tensors.items()
            if name.startswith(MONITOR)
        }
        if "told" not in own:
            return cls()
        plain = _read_plain(own["told"])
        plain |= {
            "turns": plain.get("turns", plain["batches"]),
            "alarmed": tuple(plain["alarmed"]),
            "warned": tuple(plain.get("warned", ())),
            "signals": Signals(*plain["signals"]),
            "events": tuple(Event(*event) for event in plain["events"]),
        }
        source = {name: value for name, value in tensors.items() if name.startswith("source.")}
        states: dict[str, Any] = {}
        for name in ("good", "newer"):
            parts = {
                key.removeprefix(f"{name}."): value
                for key, value in own.items()
                if key.startswith(f"{name}.")
            }
            states[name] = from_tensors({**parts, **source}, like) if parts else None
        found: dict[str, Any] = {name: own[name].clone() for name in _TENSORS if name in own}
        _require_fit(found)
        return cls(**plain, **states, **found).move_to(like.belief.mean)

    def since(self, before: Self) -> tuple[Event, ...]:
        """New events; neither their number tells, for old ones are dropped, nor equality with old
        ones.
        """
        if self.events is before.events:  # nearly always
            return ()
        old = set(map(id, before.events))
        return tuple(event for event in self.events if id(event) not in old)

    def log(self, *events: Event) -> Self:
        """With more events; the last thousand are kept."""
        return replace(self, events=(*self.events, *events)[-KEPT:]) if events else self


def _read_plain(told: Tensor) -> dict[str, Any]:
    """What is told in JSON; refused unless every field is of its type."""
    plain = parse_object(as_text(told))
    for name, value in plain.items():
        kind = _TOLD.get(name)
        require(_is(value, kind), f"state '{MONITOR}told': {name}", value, f"of type {kind}")
    for event in plain["events"]:
        fits = len(event) == len(_EVENT) and all(map(_is, event, _EVENT))
        require(fits, f"state '{MONITOR}told': events", event, f"of types {_EVENT}")
    return plain


def _is(value: Any, kind: Any) -> bool:
    """Whether JSON data are of a type: a whole number may stand for a real one, not a truth
    value.
    """
    if isinstance(kind, list):
        return isinstance(value, list) and all(_is(each, kind[0]) for each in value)
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(_is(each, kind[""]) for each in value.values())
    return type(value) is kind or (kind is float and type(value) is int)


def _require_fit(found: Mapping[str, Tensor]) -> None:
    """Raise unless summaries [k + 3] are finite and of one length, and the labels of pairs below
    k.
    """
    others = (*_LABELS, "runs")
    summaries = {name: tensor for name, tensor in found.items() if name not in others}
    for name, tensor in summaries.items():
        if tensor.is_floating_point():
            require_squarable(f"state {MONITOR + name!r}", tensor)
            least = tensor.amin().item() if tensor.numel() else 0.0
            require(least > -1e-6, f"state {MONITOR + name!r}", least, "sums of numbers >= 0")
    lengths = {tuple(tensor.shape) for tensor in summaries.values()}
    real = all(tensor.dtype in (torch.float32, torch.float64) for tensor in summaries.values())
    require(
        len(lengths) <= 1 and all(len(shape) == 1 and shape[0] > 3 for shape in lengths) and real,
        f"state '{MONITOR}…'",
        f"shapes {sorted(map(list, lengths))}",
        "summaries of one length [k + 3], of real numbers",
    )
    classes = lengths.pop()[0] - 3 if lengths else 0
    for name, tensor in summaries.items():  # no mean entropy is above ln k
        samples, total = tensor[-3].item(), tensor[-2].item()
        most = 1.001 * samples * math.log(max(classes, 2)) + 1e-6
        require(total <= most, f"state {MONITOR + name!r}", f"Σ H = {total:g}", f"<= {most:g}")
    if "runs" in found:
        field, runs = f"state '{MONITOR}runs'", found["runs"]
        require_shape(field, runs, "[k + 3]", classes + 3)
        require(runs.dtype == torch.float64, field, runs.dtype, "torch.float64")
        require_squarable(field, runs)
        fits = float(runs[:-1].amin()) >= 0 and -1 <= float(runs[-1]) < classes
        require(fits, field, runs.tolist(), "sums of numbers >= 0, then a label")
    for name in _LABELS:
        pairs = found.get(name)
        require(
            pairs is None
            or (
                pairs.dim() == 2
                and len(pairs) == 2
                and pairs.dtype == torch.int64
                and bool(((pairs >= 0) & (pairs < (classes or math.inf))).all())
            ),
            f"state '{MONITOR}{name}'",
            "" if pairs is None else f"{list(pairs.shape)}",
            f"two rows of labels below {classes}",
        )

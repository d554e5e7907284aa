"""What a report shows, as plain data: entries side by side on a stream, and the frozen source
beside them.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from driftfilter.app.calibration import ReliabilityDiagram
from driftfilter.app.downsample import merge

MEASURES = ("accuracy", "ece", "nll", "brier")
DRAWN = 60  # pieces of a line


class ReportError(ValueError):
    """What a folder holds cannot be reported; says which file, and why."""


class ShownSample(NamedTuple):
    """A sample to look at."""

    most: bool  # of the most certain
    label: str
    truth: str  # empty: not known
    probability: float
    where: str
    image: str = ""  # a PNG in base64
    values: Sequence[float] = ()


class Cost(NamedTuple):
    """Time and memory of a stream; None if not recorded."""

    steps: int
    samples: int
    ms: float | None  # the median step
    seconds: float | None
    memory_mb: float | None
    memory_of: str


class Entry(NamedTuple):
    """One way of predicting a stream."""

    name: str
    where: str  # its folder
    quality: Mapping[str, float | None]  # by measure; empty: no labels
    along: Sequence[Mapping[str, Any]]  # see ``app.along``
    spread: Mapping[str, float] = {}  # standard deviation over seeds
    bins: ReliabilityDiagram | None = None
    covered: Sequence[float] = ()  # accuracy among the most confident 1/m, 2/m, … m/m
    parts: Mapping[str, float] = {}  # accuracy by shift, or by stretch
    alarms: Sequence[tuple[int, str]] = ()
    movement: Sequence[Mapping[str, Any]] = ()
    examples: Sequence[ShownSample] = ()
    no_examples: str = "not recorded"
    classes: Sequence[Mapping[str, Any]] = ()
    shares: Mapping[str, Sequence[float]] = {}  # of classes, in equal pieces of the stream
    changed: float | None = None  # share of the predictions that are not the source's
    cost: Cost | None = None
    configuration: Mapping[str, str] = {}
    environment: Mapping[str, str] = {}
    notes: Sequence[str] = ()

    @property
    def entropy(self) -> float | None:
        """Mean predictive entropy over all samples; None if it is not recorded."""
        return merge(self.along).get("entropy")


class StreamReport(NamedTuple):
    """Entries that have seen the same samples."""

    title: str
    says: str  # what was run, in one sentence
    entries: Sequence[Entry]
    source: Entry | None  # the frozen model; None: not recorded
    part: str  # what the parts are: "shift", "stretch of the stream"
    marks: Sequence[tuple[int, str]] = ()  # the steps with which parts begin

    @property
    def all(self) -> list[Entry]:
        """All entries, the frozen source first."""
        return [*([] if self.source is None else [self.source]), *self.entries]


def read_json(path: Path) -> Any:
    """What a file holds; an error names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ReportError(f"{path} could not be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path} is damaged: it must hold JSON, got {error}") from error


def plural(count: int, what: str) -> str:
    """A number of things."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as lines: names with dots, values as text; what is not set is left out."""
    lines: dict[str, str] = {}
    for key, value in document.items():
        if isinstance(value, dict):
            lines |= flat(value, f"{prefix}{key}.")
        elif value not in (None, "", [], False):
            lines[prefix + key] = (
                value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            )
    return lines

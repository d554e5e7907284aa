"""The rows of an example's table, honest ones beside the good ones, and the example's claims."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import driftfilter as df
from driftfilter.app.paper.linear import Linear
from driftfilter.app.paper.moons import Moons
from driftfilter.app.paper.pinwheel import Pinwheel
from driftfilter.app.paper.trial import (
    Example,
    Runner,
    Scores,
    Trial,
    run_changed,
    run_clipped,
    run_filter,
    run_frozen,
    run_smoothed,
    run_supervised,
)

SOURCE, FILTER, SMOOTHED = "frozen source", "filter", "smoothed"
LINEARIZED = df.Linearized(df.Hessian())


class Case(NamedTuple):
    """A row of the table."""

    name: str
    example: Example
    runner: Runner


def _pair(name: str, example: Example) -> list[Case]:
    return [
        Case(f"{name}, source", example, run_frozen),
        Case(f"{name}, filter", example, run_filter),
    ]


def _variants(example: Example) -> list[Case]:
    """Choices that the paper leaves open, or argues for."""
    return [
        Case("before the step", example, run_changed(predict_from="prior")),
        Case(SMOOTHED, example, run_smoothed),
        Case("raw Hessian", example, run_clipped("never")),
    ]


def _against_linearized(example: Example, hot: Moons | Pinwheel) -> list[Case]:
    """BONG with too large a temperature, the linearised update with both, and the other order of
    clipping.
    """
    linearized, name = run_changed(inference=LINEARIZED), f"beta {hot.beta:.0f}"
    return [
        Case(name, hot, run_filter),
        Case("linearized", example, linearized),
        Case(f"linearized, {name}", hot, linearized),
        Case("clip before", example, run_clipped("before")),
    ]


def linear(example: Linear) -> list[Case]:
    """Rows of the linear example."""
    ratio = df.Gibbs(df.SoftLikelihoodRatio(), df.Constant(example.beta))
    return [
        Case(SOURCE, example, run_frozen),
        Case(FILTER, example, run_filter),
        Case("labels (bound)", example, run_supervised),
        *_pair("no shift", replace(example, shift=0.0)),
        *_pair("share 0.9", replace(example, share=0.9)),
        Case("beta 100", replace(example, beta=100.0), run_filter),
        Case("likelihood ratio", replace(example, steps=200), run_changed(observation=ratio)),
        Case("BONG", example, run_changed(inference=df.Bong(df.Hessian(), samples=0, nodes=15))),
        *_variants(example),
    ]


def moons(example: Moons) -> list[Case]:
    """Rows of the two moons."""
    return [
        Case(SOURCE, example, run_frozen),
        Case(FILTER, example, run_filter),
        Case("filter, diagonal", replace(example, structure="diagonal"), run_filter),
        Case("filter, low rank", replace(example, structure="low rank"), run_filter),
        Case("labels (bound)", example, run_supervised),
        *_pair("no shift", replace(example, end=example.start)),
        *_pair("share 0.9", replace(example, share=0.9)),
        *_against_linearized(example, replace(example, beta=10_000.0)),
        *_variants(example),
    ]


def pinwheel(example: Pinwheel) -> list[Case]:
    """Rows of the pinwheel, growing and rotating."""
    return [
        Case(SOURCE, example, run_frozen),
        Case(FILTER, example, run_filter),
        Case("filter, diagonal", replace(example, structure="diagonal"), run_filter),
        Case("filter, low rank", replace(example, structure="low rank"), run_filter),
        Case("labels (bound)", example, run_supervised),
        *_pair("rotated", rotate(example)),
        *_pair("no shift", replace(example, radius=1.0)),
        *_pair("share 0.9", replace(example, share=0.9)),
        *_against_linearized(example, replace(example, beta=30_000.0)),
        *_variants(example),
    ]


def rotate(example: Pinwheel) -> Pinwheel:
    """The second variant: the blades turn by π/2 where they are."""
    return replace(example, radius=1.0, turn=math.pi / 2)


def run_all(cases: Sequence[Case], seed: int) -> dict[str, Trial]:
    """Every case on one seed; cases of the same settings share the draw and the source."""
    runs = {}
    for case in cases:
        problem = case.example.problem(seed)
        runs[case.name] = case.runner(
            case.example, case.example.source(problem.source), problem, seed
        )
    return runs


Table: TypeAlias = "Mapping[str, Sequence[Scores]]"  # case -> scores over seeds


class Claim(NamedTuple):
    """A statement with its bar."""

    text: str
    value: Callable[[Table], float]
    bar: float
    at_least: bool = True

    def is_met(self, table: Table) -> bool:
        """Whether the bar is reached."""
        return self.value(table) >= self.bar if self.at_least else self.value(table) <= self.bar


def _mean(case: str, field: str) -> Callable[[Table], float]:
    return lambda table: sum(getattr(scores, field) for scores in table[case]) / len(table[case])


def _gain(case: str, source: str, field: str) -> Callable[[Table], float]:
    return lambda table: _mean(case, field)(table) - _mean(source, field)(table)


def _worst(case: str, source: str) -> Callable[[Table], float]:
    """Least advantage of a case over its source in stream accuracy, over seeds."""
    return lambda table: min(
        a.accuracy - b.accuracy for a, b in zip(table[case], table[source], strict=True)
    )


def _common(case: str, source: str) -> list[Claim]:
    return [
        Claim(f"{case}: NLL less the source's", _gain(case, source, "nll"), 0.0, at_least=False),
        Claim(f"{case}: ECE less the source's", _gain(case, source, "ece"), 0.0, at_least=False),
    ]


def _control() -> list[Claim]:
    ours, source = "no shift, filter", "no shift, source"
    return [
        Claim(
            "no shift: mean accuracy against the source", _gain(ours, source, "accuracy"), -0.005
        ),
        Claim("no shift: worst seed against its source", _worst(ours, source), -0.005),
    ]


CLAIMS: dict[str, list[Claim]] = {
    "linear": [
        Claim("filter: stream accuracy", _mean(FILTER, "accuracy"), 0.97),
        *_common(FILTER, SOURCE),
        *_control(),
    ],
    "moons": [
        Claim("filter: stream accuracy", _mean(FILTER, "accuracy"), 0.975),
        Claim("filter: end accuracy", _mean(FILTER, "end_accuracy"), 0.88),
        *_common(FILTER, SOURCE),
        *_control(),
    ],
    "pinwheel": [
        Claim("filter: stream accuracy", _mean(FILTER, "accuracy"), 0.965),
        Claim("filter: end accuracy", _mean(FILTER, "end_accuracy"), 0.86),
        Claim("filter: worst seed against its source", _worst(FILTER, SOURCE), -0.01),
        Claim("rotated: stream accuracy", _mean("rotated, filter", "accuracy"), 0.98),
        *_common(FILTER, SOURCE),
        *_common("rotated, filter", "rotated, source"),
        *_control(),
    ],
}

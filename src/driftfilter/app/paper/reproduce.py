"""All of the paper's examples by one command: runs over seeds, figures, metrics.json and a table
for each.
"""

import json
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

import driftfilter as df
from driftfilter.app.paper import cases
from driftfilter.app.paper.animation import animate
from driftfilter.app.paper.cases import CLAIMS, FILTER, SMOOTHED, SOURCE, Case
from driftfilter.app.paper.dynamics import DynamicsExample
from driftfilter.app.paper.linear import Linear
from driftfilter.app.paper.moons import Moons
from driftfilter.app.paper.pinwheel import Pinwheel
from driftfilter.app.paper.trial import (
    TIMES,
    Doubt,
    Example,
    Scores,
    Trial,
    doubt,
    is_alarmed,
    run_filter,
)
from driftfilter.storage.atomic import write_atomic

STREAMS: dict[str, Example] = {"linear": Linear(), "moons": Moons(), "pinwheel": Pinwheel()}
Progress: TypeAlias = Callable[[str, int, int], None]  # example, seeds done, seeds


class Result(NamedTuple):
    """One seed of one example; what crosses from a worker."""

    seed: int
    runs: dict[str, Trial]  # without beliefs
    doubts: dict[str, Doubt]  # of source and filter, and of the rotated pair if there is one


def cases_of(name: str, example: Example) -> list[Case]:
    """The rows of an example's table."""
    return getattr(cases, name)(example)  # type: ignore[no-any-return]


def run_seed(name: str, example: Example, seed: int) -> Result:
    """Every case of an example on one seed."""
    with _one_thread():
        rows = cases_of(name, example)
        runs = cases.run_all(rows, seed)
        doubts = {
            case.name: doubt(case.example, case.example.problem(seed), runs[case.name].beliefs)
            for case in rows
            if case.name in (SOURCE, FILTER) or case.name.startswith("rotated")
        }
    return Result(seed, {name: run._replace(beliefs=[]) for name, run in runs.items()}, doubts)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices are small: a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run_seeds(
    examples: Mapping[str, Example], seeds: Sequence[int], workers: int, progress: Progress
) -> dict[str, list[Result]]:
    """All seeds of all examples, by processes; the order of the results does not depend on who was
    first.
    """
    jobs = [(name, example, seed) for name, example in examples.items() for seed in seeds]
    done: dict[str, list[Result]] = {name: [] for name in examples}
    for name, result in _compute(jobs, workers):
        done[name].append(result)
        progress(name, len(done[name]), len(seeds))
    return {name: sorted(results, key=lambda result: result.seed) for name, results in done.items()}


def _compute(
    jobs: Sequence[tuple[str, Example, int]], workers: int
) -> Iterator[tuple[str, Result]]:
    if workers == 1:
        yield from ((job[0], run_seed(*job)) for job in jobs)
        return
    with ProcessPoolExecutor(
        workers, mp_context=get_context("spawn")
    ) as pool:  # a fork would copy torch's locked threads
        names = {pool.submit(run_seed, *job): job[0] for job in jobs}
        for future in as_completed(names):
            yield names[future], future.result()


def reproduce(
    names: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    workers: int = os.cpu_count() or 1,
    progress: Progress = lambda name, done, total: None,
    examples: Mapping[str, Example] = STREAMS,
    dynamics: DynamicsExample = DynamicsExample(),  # noqa: B008  # frozen
    figures: bool = True,
) -> dict[str, str]:
    """Write figures, metrics.json and table.txt of each example under ``out``; the tables by
    example.
    """
    tables = {}
    if "dynamics" in names:
        tables["dynamics"] = _write_dynamics(dynamics, seeds[0], out / "dynamics", figures)
    chosen = {name: examples[name] for name in names if name in examples}
    for name, results in run_seeds(chosen, seeds, workers, progress).items():
        tables[name] = _write_stream(name, chosen[name], results, out / name, figures)
    return tables


def write(folder: Path, measured: Mapping[str, Any], table: str) -> str:
    """Write metrics.json and table.txt of an example; the table."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.json").write_text(
        json.dumps(measured, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    (folder / "table.txt").write_text(table + "\n", encoding="utf-8")
    return table


def _write_dynamics(example: DynamicsExample, seed: int, folder: Path, figures: bool) -> str:
    priors = example.run(seed)
    rows = {}
    lines = [
        f"{'transition':<18}{'intercept sd':>14}{'slope sd':>10}{'paths: mean':>14}"
        f"{'variance':>10}   (largest z-score)"
    ]
    for name, prior in priors.items():
        sd = prior.covariance[-1].diagonal().sqrt().tolist()
        means, variances = prior.disagreement()
        rows[name] = {
            "end_mean": prior.mean[-1].tolist(),
            "end_sd": sd,
            "z_means": means,
            "z_variances": variances,
        }
        lines.append(f"{name:<18}{sd[0]:>14.3f}{sd[1]:>10.3f}{means:>14.2f}{variances:>10.2f}")
    lines.append(
        f"prior after {example.steps} steps without data; {example.paths} drawn paths against "
        "the filter's own moments"
    )
    if figures:
        from driftfilter.app.paper.figures import draw_dynamics, save

        save(draw_dynamics(priors), folder / "dynamics")
    measured = {
        "example": "dynamics",
        "version": df.__version__,
        "seed": seed,
        "settings": asdict(example),
        "transitions": rows,
    }
    return write(folder, measured, "\n".join(lines))


def _write_stream(
    name: str, example: Example, results: Sequence[Result], folder: Path, figures: bool
) -> str:
    rows = cases_of(name, example)
    scores = {
        case.name: [run.scores for result in results if (run := result.runs[case.name]).scores]
        for case in rows
    }
    measured = {
        "example": name,
        "version": df.__version__,
        "seeds": [result.seed for result in results],
        "predict_from": example.filter().predict_from,
        "settings": asdict(example),  # type: ignore[call-overload]  # every example is a dataclass
        "cases": {case.name: _measure(case, results) for case in rows},
        "uncertainty": {
            "times": TIMES,
            "measures": ["predictive entropy", "mutual information"],
            "means": _doubts(results),
        },
        "claims": [
            {
                "claim": claim.text,
                "value": claim.value(scores),
                "bar": claim.bar,
                "met": claim.is_met(scores),
            }
            for claim in CLAIMS[name]
        ],
        "seconds": {
            case.name: statistics.fmean(result.runs[case.name].seconds for result in results)
            for case in rows
        },
    }
    if figures:
        _draw_stream(name, example, results, folder)
    return write(folder, measured, _table(rows, measured))


def _measure(case: Case, results: Sequence[Result]) -> dict[str, Any]:
    runs = [result.runs[case.name] for result in results]
    scores = [run.scores for run in runs if run.scores]
    return {
        "scores": {field: [getattr(score, field) for score in scores] for field in Scores._fields},
        "windows": [run.windows for run in runs],
        "collapsed": [score.end_accuracy < case.example.chance for score in scores],
        "alarmed": [is_alarmed(case.example, score) for score in scores],
        "refused_at": [run.refused_at for run in runs],
    }


def _doubts(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """Means over seeds, [times, 2] for each place."""
    return {
        name: {
            place: torch.tensor(
                [getattr(result.doubts[name], place) for result in results], dtype=torch.float64
            )
            .mean(0)
            .tolist()
            for place in Doubt._fields
        }
        for name in results[0].doubts
    }


def _table(rows: Sequence[Case], measured: Mapping[str, Any]) -> str:
    heads = "".join(f"{head:>16}" for head in ("stream acc.", "end acc.", "NLL", "ECE"))
    lines = [f"{'':<24}{heads}{'least share':>13}{'collapsed':>11}{'alarms':>8}{'ms/step':>9}"]
    results, seconds = measured["cases"], measured["seconds"]
    lines += [
        f"{case.name:<24}" + _cells(results[case.name], seconds[case.name] / case.example.steps)
        for case in rows
    ]
    lines.append("")
    for name, places in measured["uncertainty"]["means"].items():
        for place, series in places.items():
            values = "  ".join(f"{entropy:.3f}/{mutual:.3f}" for entropy, mutual in series)
            lines.append(f"uncertainty {name + ', ' + place:<26}{values}")
    times = ", ".join(f"{time:.0%}" for time in TIMES)
    lines.append(f"(predictive entropy/mutual information in nats, at {times} of the stream)\n")
    lines += [
        f"claim  {claim['claim']:<44}{claim['value']:>8.3f}  (bar {claim['bar']:g}) "
        f"{'met' if claim['met'] else 'NOT MET'}"
        for claim in measured["claims"]
    ]
    seeds = measured["seeds"]
    lines += [
        f"\nmean ± sd over seeds {seeds[0]} to {seeds[-1]}; predictions from the "
        f"{measured['predict_from']}",
        "collapsed: end accuracy at chance level or below",
        "alarms, without labels: a class has vanished from the predictions, or the mean has run "
        "away from the source",
    ]
    return "\n".join(lines)


def _cells(measured: Mapping[str, Any], seconds: float) -> str:
    refused = [step for step in measured["refused_at"] if step is not None]
    note = (
        f"   refused in {len(refused)}/{len(measured['refused_at'])}, first at step "
        f"{min(refused)}: not positive definite"
        if refused
        else ""
    )
    if not measured["scores"]["accuracy"]:
        return note
    values = {
        field: torch.tensor(numbers, dtype=torch.float64)
        for field, numbers in measured["scores"].items()
    }
    shown = [values[field] for field in ("accuracy", "end_accuracy", "nll", "ece")]
    cells = "".join(f"{f' {v.mean():.3f} ± {v.std(correction=0):.3f}':>16}" for v in shown)
    count, collapsed, alarms = (
        len(values["accuracy"]),
        sum(measured["collapsed"]),
        sum(measured["alarmed"]),
    )
    cells += f"{values['least_share'].mean():>13.2f}{collapsed:>8}/{count:<2}{alarms:>5}/{count:<2}"
    return cells + f"{1000 * seconds:>9.2f}" + note


def _draw_stream(name: str, example: Example, results: Sequence[Result], folder: Path) -> None:
    from driftfilter.app.paper import figures

    seed = results[0].seed
    shown = (
        {name: example}
        if not isinstance(example, Pinwheel)
        else {name: example, "rotated": cases.rotate(example)}
    )
    for title, variant in shown.items():
        with _one_thread():
            problem = variant.problem(seed)
            run = run_filter(variant, variant.source(problem.source), problem, seed)
            figures.save(figures.draw_boundaries(variant, problem, run.beliefs), folder / title)
        labels = (SOURCE, FILTER) if title == name else ("rotated, source", "rotated, filter")
        others = ("labels (bound)", SMOOTHED) if title == name else ()
        figure = figures.draw_over_time(results, *labels, others)
        figures.save(figure, folder / f"{title}_over_time")
    if isinstance(example, Linear):
        with _one_thread():
            moving = animate(example, seed)
        write_atomic(folder / f"{name}_moving.svg", moving)

"""``driftfilter check``: whether a finished run is as good as a pipeline asks for.

A check that cannot be judged, because nothing is known of it, fails. Torch is not imported here.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from driftfilter.app.report.content import ReportError
from driftfilter.app.report.runs import RunFolder, read_run
from driftfilter.app.run.options import CheckOptions
from driftfilter.app.terminal import Output
from driftfilter.storage.atomic import write_atomic

_CONTROL = {place: None for place in range(32) if chr(place) not in "\t\n\r"}  # not in XML


class Check(NamedTuple):
    """One thing that was asked for."""

    name: str
    limit: float
    value: float | None  # None: it cannot be judged
    holds: bool
    text: str  # what is known, in words


def find_checks(options: CheckOptions, run: RunFolder) -> list[Check]:
    """What was asked for of a run, judged."""
    quality, tally = run.summary["quality"]["after"] or {}, run.summary["tally"]
    expected, unlabeled = run.summary.get("estimate"), "no labels were given"
    alarms = sum(len(step.get("alarms", ())) for step in run.steps)
    known = {
        "min_accuracy_estimate": (
            _number(expected and expected["accuracy"]),
            "no estimate was recorded",
            expected and _describe(expected),
        ),
        "min_accuracy": (_number(quality.get("accuracy")), unlabeled, None),
        "max_ece": (_number(quality.get("ece")), unlabeled, None),
        "max_alarms": (float(alarms), "", None),
        "max_skipped": (float(tally["skipped"]), "", None),
    }
    return [
        _judge(name, float(limit), *known[name])
        for name in known
        if (limit := getattr(options, name)) is not None
    ]


def _number(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _judge(name: str, limit: float, value: float | None, why: str, more: str | None) -> Check:
    title = name.partition("_")[2].replace("_", " ")
    if value is None:
        return Check(name, limit, None, False, f"{title} cannot be judged: {why}")
    least = name.startswith("min")
    holds = value >= limit if least else value <= limit
    bound = f"{'at least' if least else 'at most'} {limit:g}"
    beside = f" ({more})" if more else ""
    return Check(name, limit, value, holds, f"{title} {value:.4g}, asked for {bound}{beside}")


def _describe(expected: Mapping[str, Any]) -> str:
    return (
        f"{expected['low']:.3f} to {expected['high']:.3f}; "
        f"lowest {expected['least']:.3f} at step {expected['at']}"
    )


def write_junit(path: Path, folder: Path, checks: Sequence[Check]) -> None:
    """Write checks as a test suite, in the XML that pipelines read."""
    failures = sum(not check.holds for check in checks)
    suite = ElementTree.Element(
        "testsuite",
        name=f"driftfilter check {folder}".translate(_CONTROL),
        tests=str(len(checks)),
        failures=str(failures),
        errors="0",
        skipped="0",
    )
    for check in checks:
        case = ElementTree.SubElement(
            suite, "testcase", classname="driftfilter.check", name=check.name
        )
        if not check.holds:
            ElementTree.SubElement(case, "failure", message=check.text).text = check.text
    whole = ElementTree.Element("testsuites")
    whole.append(suite)
    ElementTree.indent(whole)
    text = ElementTree.tostring(whole, encoding="unicode")
    write_atomic(path, f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n')


def check_run(options: CheckOptions, output: Output) -> tuple[int, dict[str, Any]]:
    """Judge a run: the exit status, and the checks as data. A folder that cannot be read raises
    ReportError.
    """
    try:
        run = read_run(options.run)
        if run.summary.get("error"):
            raise ReportError(f"{options.run} holds a run that failed: {run.summary['error']}")
        checks = find_checks(options, run)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, ReportError):
            raise
        raise ReportError(
            f"{options.run} is of another version of driftfilter, or damaged: "
            f"{type(error).__name__} {error}"
        ) from error
    for check in checks:
        output.say(f"{'ok    ' if check.holds else 'FAILED'}  {check.text}")
    if options.junit is not None:
        write_junit(options.junit, options.run, checks)
    ok = all(check.holds for check in checks)
    return 0 if ok else 1, {
        "run": str(options.run),
        "ok": ok,
        "checks": [check._asdict() for check in checks],
    }

"""A folder of ``driftfilter run`` as an entry of a report."""

import base64
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from driftfilter.app.bench.tables import group
from driftfilter.app.calibration import ReliabilityDiagram
from driftfilter.app.downsample import downsample
from driftfilter.app.images.arrays import open_arrays
from driftfilter.app.report.content import (
    DRAWN,
    MEASURES,
    Cost,
    Entry,
    ReportError,
    ShownSample,
    StreamReport,
    flat,
    plural,
    read_json,
)
from driftfilter.app.thumbnails import png

FORMAT = 1  # of summary.json that is understood
PARTS = 8
# A class dominates the predictions above this share, if a fair one is so many times smaller.
ONE_CLASS, TIMES_FAIR = 0.6, 1.5
WORSE = 0.01  # accuracy lost against the frozen model that is said at the top


# What alarms mean, by the signal that an alarm's text begins with.
MEANING = {
    "classes_lost": "the predictions have lost classes",
    "share_gained": "one class has gained many predictions",
    "uncertainty": "the predictions have become uncertain",
    "distance": "the belief is far from the source",
    "divergence": "the belief is far from the source",
    "marginal_entropy": "few classes are predicted",
    "largest_share": "one class has most of the predictions",
    "predictive_entropy": "the entropy of the predictions is unusual",
    "effective_samples": "few samples count",
    "energy": "the energy is unusual",
    "expected_error": "the expected accuracy is low",
    "one_class": "nearly all predictions are of one class",
    "reverts": "the belief goes back again and again",
    "unchanged": "adapting changes nothing",
}


class RunFolder(NamedTuple):
    """What a folder holds."""

    folder: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    movement: Sequence[Mapping[str, Any]]

    @property
    def used(self) -> list[Mapping[str, Any]]:
        """The steps that were not skipped."""
        return [step for step in self.steps if "skipped" not in step]


def read_run(folder: Path) -> RunFolder:
    """A run that has ended; else an error says what is wrong with it."""
    config = read_json(folder / "config.json")
    if not (folder / "summary.json").exists():
        raise ReportError(
            f"{folder} holds a run that has not ended (or one of an older driftfilter): there is "
            "no summary.json; the same "
            "command with --resume brings it to its end"
        )
    summary = read_json(folder / "summary.json")
    known = summary.get("format") if isinstance(summary, dict) else None
    if known != FORMAT:
        written = (
            config.get("versions", {}).get("driftfilter", "unknown")
            if isinstance(config, dict)
            else "unknown"
        )
        raise ReportError(
            f"{folder / 'summary.json'} is of format {known!r}, of driftfilter {written}; known "
            f"here is {FORMAT}"
        )
    run = RunFolder(
        folder,
        config,
        summary,
        read_lines(folder / "steps.jsonl"),
        read_json(folder / "movement.json"),
    )
    if not run.used:
        raise ReportError(f"{folder} holds an empty run: no sample was predicted")
    return run


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The steps of a run, a line each; an error names the file."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise ReportError(f"{path} could not be read: {error}") from error
    try:
        return [json.loads(line) for line in lines]
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path} is damaged: every line must hold JSON, got {error}") from error


def streams(runs: Sequence[RunFolder]) -> list[StreamReport]:
    """Streams of a report: runs that adapted the same model to the same data side by side."""
    return [_stream(alike) for alike in group(runs, _same)]


def _same(run: RunFolder) -> str:
    return json.dumps(
        [run.config["model"], run.config["options"]["data"], run.summary["tally"]["rows"]]
    )


def _stream(runs: Sequence[RunFolder]) -> StreamReport:
    names = [_name(run) for run in runs]
    entries = [
        _entry(run, name if names.count(name) == 1 else f"{name} · {run.folder.name}")
        for name, run in zip(names, runs, strict=True)
    ]
    source = next(
        (
            _source(run)
            for run in runs
            if run.summary["quality"]["before"]
            or any("baseline_entropy" in step for step in run.steps)
        ),
        None,
    )
    options = runs[0].config["options"]
    data = "stdin" if options["data"] == "-" else Path(options["data"]).name
    return StreamReport(
        f"{options['model']} on {data}",
        _sentence(runs, names, data),
        entries,
        source,
        "stretch of the stream",
    )


def _name(run: RunFolder) -> str:
    options = run.config["options"]
    return Path(options["recipe"]).stem if options["recipe"] else options["preset"] or "driftfilter"


def _sentence(runs: Sequence[RunFolder], names: Sequence[str], data: str) -> str:
    tally, options = runs[0].summary["tally"], runs[0].config["options"]
    who = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    batches = sorted({run.config["options"]["batch"] for run in runs})
    return (
        f"{who} adapted {options['model']} to {tally['rows']:,} unlabeled samples of {data}, "
        f"{' or '.join(map(str, batches))} at a time, on {runs[0].config['machine']['device']}."
    )


def _entry(run: RunFolder, name: str) -> Entry:
    config, summary, tally = run.config, run.summary, run.summary["tally"]
    quality, used = summary["quality"]["after"], run.used
    times = [step["ms"] for step in used]
    options = {
        key: value for key, value in config["options"].items() if key not in ("model", "data")
    }
    recipe = config["recipe"] if isinstance(config["recipe"], dict) else {"repr": config["recipe"]}
    examples, why = _examples(run)
    return Entry(
        name,
        str(run.folder),
        {} if quality is None else {each: quality[each] for each in MEASURES},
        downsample(used, DRAWN),
        bins=None if quality is None else ReliabilityDiagram(**quality["bins"]),
        covered=() if quality is None else quality.get("covered", ()),
        parts=_parts(used, "right"),
        alarms=_alarms(run),
        movement=run.movement,
        examples=examples,
        no_examples=why,
        classes=summary["classes"],
        shares=summary.get("shares", {}),
        changed=summary["changed"],
        cost=Cost(
            len(used),
            tally["rows"],
            statistics.median(times),
            sum(times) / 1000,
            summary["peak_memory_mb"],
            summary["peak_memory_of"],
        ),
        configuration={
            "command": config["command"],
            "model": config["options"]["model"],
            "data": config["options"]["data"],
            **flat(options),
            **flat(recipe, "recipe."),
        },
        environment={
            **flat(config["machine"]),
            **flat(config["versions"]),
            "model weights": config["model"]["weights"][:12],
        },
        notes=_notes(run),
    )


def _alarms(run: RunFolder) -> list[tuple[int, str]]:
    """Steps and texts of the alarms, what they mean first."""
    texts = [(step["step"], str(text)) for step in run.steps for text in step.get("alarms", ())]
    return [
        (step, f"{MEANING[name]} ({text})" if (name := text.split(" ", 1)[0]) in MEANING else text)
        for step, text in texts
    ]


def _notes(run: RunFolder) -> list[str]:
    summary, tally, count = run.summary, run.summary["tally"], run.config["samples"]
    notes = {
        f"ended by a signal after {tally['rows']:,} of {count or 'unknown'} samples": (
            summary["signal"]
        ),
        f"ended by a bad batch: {summary['error']}": summary["error"],
        f"{tally['skipped']} of {tally['step']} steps were skipped: their batches were bad": (
            tally["skipped"]
        ),
    }
    return [*(text for text, known in notes.items() if known), *_remark(run)]


def _remark(run: RunFolder) -> Iterator[str]:
    """What happened to the predictions, if it is out of the ordinary, in a sentence each."""
    classes, tally = run.summary["classes"], run.summary["tally"]
    for prefix, who in (("", "It"), ("baseline_", "The frozen model")):
        counts = [(each.get(f"{prefix}predicted", 0), each["name"]) for each in classes]
        most, name = max(counts, default=(0, ""))
        share = most / max(1, sum(count for count, _ in counts))
        if share > ONE_CLASS and share * len(classes) > TIMES_FAIR:
            known = [each["labeled"] for each in classes if "labeled" in each]
            right = f", {max(known) / max(1, sum(known)):.1%} have one label" if known else ""
            yield f"{who} predicted {name} for {share:.1%} of the samples{right}."
    if run.summary["changed"] == 0:
        yield "No prediction differs from the frozen model's: nothing was adapted, or to no effect."
    now, then = (run.summary["quality"][when] for when in ("after", "before"))
    if now and then and then["accuracy"] - now["accuracy"] > WORSE:
        yield (
            f"It is less accurate than the frozen model: {now['accuracy']:.1%} against "
            f"{then['accuracy']:.1%}."
        )
    alarms = _alarms(run)
    if alarms:
        steps = len({step for step, _ in alarms})
        text = f"{plural(len(alarms), 'alarm')} in {steps} of {tally['step']} steps"
        yield f"{text}; the first, at step {alarms[0][0]:,}: {alarms[0][1]}."


def _source(run: RunFolder) -> Entry:
    """The frozen model, as the run has recorded it."""
    quality, used = run.summary["quality"]["before"], run.used
    names = {"n": "n", "judged": "judged", "baseline_entropy": "entropy", "baseline_right": "right"}
    steps = [{new: step[old] for old, new in names.items() if old in step} for step in used]
    return Entry(
        "frozen source",
        str(run.folder),
        {} if quality is None else {each: quality[each] for each in MEASURES},
        downsample(steps, DRAWN),
        bins=None if quality is None else ReliabilityDiagram(**quality["bins"]),
        covered=() if quality is None else quality.get("covered", ()),
        parts=_parts(used, "baseline_right"),
        no_examples="",
    )


def _parts(steps: Sequence[Mapping[str, Any]], right: str) -> dict[str, float]:
    """Accuracy by stretch of equally many steps, as far as labels are known."""
    pieces = downsample(
        [{**step, "right": step[right]} for step in steps if step.get("judged") and right in step],
        PARTS,
    )
    return {
        f"step {piece['step']}"
        if piece["steps"] == 1
        else f"steps {piece['step']}–{piece['step'] + piece['steps'] - 1}": piece["right"]
        / piece["judged"]
        for piece in pieces
    }


def _examples(run: RunFolder) -> tuple[list[ShownSample], str]:
    """Samples to look at, and why there are none."""
    path = run.folder / "examples.npz"
    if not path.exists():
        return [], run.summary["no_examples"] or "not recorded"
    try:
        found = open_arrays(path)
    except (ValueError, OSError) as error:
        raise ReportError(f"{path} is damaged: {error}") from error
    names = [each["name"] for each in run.summary["classes"]]
    images = found["values"].ndim == 4
    return [
        ShownSample(
            bool(found["most"][place]),
            names[found["label"][place]],
            names[found["truth"][place]] if found["truth"][place] >= 0 else "",
            float(found["probability"][place]),
            f"row {found['row'][place]}",
            base64.b64encode(png(value)).decode() if images else "",
            () if images else [float(number) for number in value if math.isfinite(number)],
        )
        for place, value in enumerate(found["values"])
    ], ""

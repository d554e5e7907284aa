"""``driftfilter run``: adapt a user's own model over a user's own data, and go on where a run was
ended or killed.

A run writes to one folder: what a checkpoint covers is a prefix of its logs, and what lies beyond
is cut off on resuming.
"""

import json
import platform
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import Self

import driftfilter as df
from driftfilter.app.bench.locks import Claim, claim, describe_holder
from driftfilter.app.run import summary
from driftfilter.app.run.consumed import STEPS, Reads, require_same, sum_labels
from driftfilter.app.run.predictions import Predictions, columns
from driftfilter.app.run.prepare import PreparedRun, require_free
from driftfilter.app.run.reader import (
    Batch,
    Lines,
    Place,
    Shapes,
    StoredFeed,
    require_shapes,
    shapes_of,
)
from driftfilter.app.run.signals import Stop
from driftfilter.base.checks import require
from driftfilter.base.inputs import Inputs
from driftfilter.callbacks import JsonLines
from driftfilter.recipe import to_dict

STATE = "state.safetensors"
HELD = 60 << 20  # bytes of stdin that a checkpoint holds; safetensors has a limit of 100 MB


class Tally(NamedTuple):
    """How far a run is."""

    step: int = 0
    rows: int = 0
    skipped: int = 0  # steps
    right: int = 0
    judged: int = 0  # samples whose label is known
    classes: int = 0  # 0: not known yet
    shapes: Shapes | None = None  # of a sample

    @property
    def accuracy(self) -> float | None:
        """Accuracy on the samples so far whose label is known."""
        return self.right / self.judged if self.judged else None

    def after(self, step: df.StepRecord) -> Self:
        """The tally with one more step."""
        return self._replace(
            step=self.step + 1,
            rows=self.rows + step.samples,
            skipped=self.skipped + ("skipped" in step.notes),
            right=self.right + step.right,
            judged=self.judged + step.judged,
        )


class BadBatchError(ValueError):
    """A batch that no model can be adapted to; the state is as if it had not come."""


class Ending(NamedTuple):
    """How a run ended."""

    tally: Tally
    predictions: Path
    begun: int  # the step it began with
    signal: int | None = None
    error: str = ""
    lost: str = ""  # samples that were read and will not be seen
    estimate: df.Estimate | None = None  # of the accuracy, at the end
    alarms: tuple[str, ...] = ()  # signals of this call's alarms, the last thousand
    frozen: float | None = None  # accuracy of the frozen model, if that and labels are recorded


# Makes, from how far a run is when it begins and how many samples there are, a context whose
# callback is told of every step.
Follow: TypeAlias = Callable[[Tally, int | None], AbstractContextManager[df.Callback]]


def run(
    made: PreparedRun, follow: Follow, warn: Callable[[str], None], command: str = ""
) -> Ending:
    """Adapt from the beginning, or from the checkpoint, to the end of the data, a signal or a bad
    batch; then save the state.
    """
    options, stop = made.options, Stop()
    options.out.mkdir(parents=True, exist_ok=True)
    with claim(options.out / STATE) as mine, ExitStack() as stack:
        if mine is None:
            raise ValueError(
                f"--out {options.out} is in use: {describe_holder(options.out / STATE)}"
            )
        require_free(options)  # another run may have been here since it was prepared
        first, notes = _resume(made)
        if isinstance(made.feed, Lines):
            made.feed.begin(_find_place(made, first, notes, warn), stop.wait)
        require_same(made, first.rows, notes)
        if made.late is not None and "learned" in notes:
            made.late.require_same(notes["learned"], first.rows)
        batches = made.feed.batches(options.batch, first.rows)
        files = _open_files(made, mine, first, notes.get("sizes", {}), stack)
        _write_config(made, command)
        summary.clear(options.out)
        with made.machine.ready(), stop.listen(), follow(first, made.feed.count) as callback:
            own = mine.each(files.reads.each(stop.each(batches)))
            last, error = _adapt(files, first, own, (files.steps, callback), warn)
            lost = files.save(last, ended=True)
            ending = Ending(
                last,
                files.predictions.export(),
                first.step,
                stop.signal,
                error,
                lost,
                made.adapter.estimate,
                tuple(event.signal for event in made.adapter.events),
            )
            return ending._replace(frozen=_summarize(files, ending))


class _Files(NamedTuple):
    made: PreparedRun
    claim: Claim
    reads: Reads
    steps: JsonLines
    predictions: Predictions
    source: Predictions | None

    def save(self, tally: Tally, ended: bool = False) -> str:
        """Write a checkpoint, the logs first: it must not cover what is not on the disk.

        Returns which samples it could not hold, though stdin goes on after them.
        """
        self.claim.check()
        logs = {"steps": self.steps.journal, "predictions": self.predictions.log}
        logs |= {} if self.source is None else {"baseline": self.source.log}
        stdin, lost = self._note_stdin(tally, ended)
        notes = {
            "settled": self.made.options.fixed(),
            "tally": tally._asdict(),
            "sizes": {name: log.sync() for name, log in logs.items()},
            "sums": {name: log.sum for name, log in logs.items()},
            "labels": sum_labels(self.made.labels, tally.rows),
            **({} if self.made.late is None else {"learned": self.made.late.sum(tally.rows)}),
            **stdin,
        }
        df.save(self.made.adapter, self.made.options.out / STATE, self.made.options.keep, notes)
        return lost

    def _note_stdin(self, tally: Tally, ended: bool) -> tuple[dict[str, Any], str]:
        """What was read and not stepped, for the checkpoint, or why it is lost."""
        if not isinstance(self.made.feed, Lines):
            return {}, ""
        place = self.made.feed.place(tally.rows, ended)
        if len(place.rest) <= HELD:
            return {"stdin": {**place.to_dict(), "ended": ended}}, ""
        lost = (
            f"{len(place.rest)} bytes of stdin were read and not stepped, and are lost: a "
            f"checkpoint holds {HELD} (a smaller --batch reads less ahead)"
        )
        stdin = {**Place(place.first).to_dict(), "ended": False}
        return {"stdin": stdin}, lost if self.made.options.stdin_continues else ""


def _summarize(files: _Files, ending: Ending) -> float | None:
    """Write what the report needs; the accuracy of the frozen model, if it is known."""
    made, source, out = files.made, files.source, files.made.options.out
    if source is not None:
        source.export()
    finished = summary.Finished(
        files.predictions.logs(),
        None if source is None else source.logs(),
        made.labels,
        made.classes,
    )
    others = {
        "signal": ending.signal,
        "error": ending.error,
        "no_examples": summary.write_examples(out, finished, made.feed, made.form),
        "tally": ending.tally._asdict(),
        "estimate": summary.summarize_estimates(out / STEPS),
        **made.machine.peak_memory(),
    }
    quality = summary.write(out, finished, made.adapter, made.model, others)["quality"]["before"]
    return None if quality is None else quality["accuracy"]


def _open_files(
    made: PreparedRun, mine: Claim, tally: Tally, sizes: dict[str, int], stack: ExitStack
) -> _Files:
    """The logs, cut to what the checkpoint covers."""
    steps = stack.enter_context(closing(JsonLines(made.options.out / STEPS, sizes.get("steps", 0))))

    def open_predictions(stem: str) -> Predictions:
        found = Predictions(
            made.options.out,
            made.options.predictions,
            made.dtype,
            tally.rows,
            tally.classes,
            sizes.get(stem, 0),
            stem,
        )
        stack.enter_context(closing(found.log))
        return found

    return _Files(
        made,
        mine,
        Reads(made.dtype),
        steps,
        open_predictions("predictions"),
        None if made.source is None else open_predictions("baseline"),
    )


def _adapt(
    files: _Files,
    tally: Tally,
    batches: Iterable[Batch],
    callbacks: Sequence[df.Callback],
    warn: Callable[[str], None],
) -> tuple[Tally, str]:
    """Take one step after the other: how far it came, and which bad batch ended it."""
    options = files.made.options
    files.made.adapter.callbacks.append(latest := _Latest())
    for batch in batches:
        try:
            tally, record = _step(files, tally, batch, latest)
        except BadBatchError as bad:
            # A device without memory is no fault of the batch.
            full = isinstance(bad.__cause__, torch.OutOfMemoryError)
            if options.on_bad_batch == "stop" or full:
                return (
                    tally,
                    f"step {tally.step} (samples {tally.rows} to {tally.rows + batch.rows - 1}): "
                    f"{bad}",
                )
            warn(f"step {tally.step} skipped: {bad}")
            for predictions in filter(None, (files.predictions, files.source)):
                predictions.skip(batch.rows)
            record = df.StepRecord(tally.step, batch.rows, 0.0, notes={"skipped": str(bad)})
            tally = tally.after(record)
        record = _learn(files.made, tally, record, warn)
        for callback in callbacks:
            callback.on_step(record)
        if options.checkpoint_every and tally.step % options.checkpoint_every == 0:
            files.save(tally)
    return tally, ""


def _learn(
    made: PreparedRun, tally: Tally, record: df.StepRecord, warn: Callable[[str], None]
) -> df.StepRecord:
    """Learn the labels that are due after a step; its record says how many."""
    if made.late is None or not isinstance(made.feed, StoredFeed):
        return record
    span = tally.rows - record.samples, tally.rows
    learned = made.late.learn(made.adapter, made.feed, made.form, span, warn)
    return replace(record, notes={**record.notes, "learned": learned}) if learned else record


class _Latest:
    """The record that the adapter gave last, which knows neither labels nor skipped steps."""

    record: df.StepRecord

    def on_step(self, step: df.StepRecord) -> None:
        self.record = step


def _resume(made: PreparedRun) -> tuple[Tally, dict[str, Any]]:
    """Load the checkpoint into the adapter: how far it is, and all of its notes."""
    path = made.options.out / STATE
    if not made.options.resume or not path.exists():
        return Tally(), {}
    notes = df.load(made.adapter, path)
    require("tally" in notes, str(path), "a checkpoint of something else", "one of driftfilter run")
    fixed = json.loads(json.dumps(made.options.fixed()))
    for name, before in {"baseline": False, **notes["settled"]}.items():
        require(
            fixed[name] == before,
            f"--{name}",
            fixed[name],
            f"{before!r}, as it was when the run began (or give another --out)",
        )
    return Tally(**notes["tally"]), notes


def _find_place(
    made: PreparedRun, tally: Tally, notes: dict[str, Any], warn: Callable[[str], None]
) -> Place:
    """Where stdin is: at its beginning, or where the checkpoint left it."""
    if not made.options.stdin_continues:
        return Place()
    if "stdin" not in notes:  # a checkpoint of other data, or from before there was a place
        return Place(tally.rows)
    place = Place.from_dict(str(made.options.out / STATE), notes["stdin"], tally.rows)
    if not notes["stdin"].get("ended"):
        warn(
            "the run did not end by itself: samples that it read after the checkpoint of step "
            f"{tally.step} may be lost"
        )
    return place


def _write_config(made: PreparedRun, command: str) -> None:
    """Write what was asked for, what it means, and with what it is run, for the reader."""
    try:
        recipe: Any = to_dict(made.adapter.recipe)
    except ValueError:
        recipe = repr(made.adapter.recipe)
    document = {
        "command": command,
        "options": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(made.options).items()
        },
        "recipe": recipe,
        "samples": made.feed.count,
        "model": made.adapter.fingerprint._asdict(),
        "machine": made.machine.settings(),
        "versions": {
            "driftfilter": df.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    summary.write_json(made.options.out / "config.json", document)


def _step(
    files: _Files, tally: Tally, batch: Batch, latest: _Latest
) -> tuple[Tally, df.StepRecord]:
    """Adapt to a batch and predict it: how far the run is then, and the record of the step."""
    made, begun = files.made, time.perf_counter()
    inputs, logs, source, apart = _predict(made, tally, batch)
    _require_classes(made, tally, logs.shape[1])
    files.predictions.append(logs)
    right, judged = _count_right(made, tally, logs)
    ms = 1000 * (time.perf_counter() - begun - apart)
    notes: dict[str, Any] = {"inputs": files.reads.latest}
    if source is not None and files.source is not None:
        files.source.append(source)
        notes |= {"baseline_entropy": float(columns(source).entropy.mean())}
        notes |= (
            {"baseline_right": _count_right(made, tally, source)[0]}
            if tally.judged + judged
            else {}
        )
    record = replace(
        latest.record, number=tally.step, ms=ms, right=right, judged=judged, notes=notes
    )
    after = tally.after(record)._replace(classes=logs.shape[1], shapes=shapes_of(inputs))
    return after, replace(record, accuracy=after.accuracy)


def _predict(
    made: PreparedRun, tally: Tally, batch: Batch
) -> tuple[Inputs, NDArray[Any], NDArray[Any] | None, float]:
    """Inputs of a batch, its log-probabilities [n, k], those of the model as it is if asked for,
    and the seconds that these took.

    The adapter comes last, so that it is as it was if anything fails. The code of a model can fail
    in any way, also by SystemExit; only an interrupt is none of its own.
    """
    failed = "the samples could not be read"
    try:
        raw, failed = batch.read(), "the model failed"
        inputs = made.form(raw)
        require_shapes(inputs, tally.shapes)
        named = inputs if isinstance(inputs, dict) else {}
        given = () if named else (inputs,)
        begun, source = time.perf_counter(), None
        if made.source is not None:
            source = (
                made.source.predict(*given, **named)
                .log_probabilities.cpu()
                .numpy()
                .astype(made.dtype)
            )
        apart = time.perf_counter() - begun
        logs = made.adapter(*given, **named).cpu().numpy().astype(made.dtype)
        return inputs, logs, source, apart
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise BadBatchError(_explain(error) or f"{failed}: {_name(error)}") from error


def _explain(error: BaseException) -> str:
    """What an error says that needs no name beside it; empty if it is of another kind."""
    try:
        return str(error) if isinstance(error, (ValueError, TypeError)) else ""
    except Exception:  # a model's own error can fail in this, too
        return ""


def _name(error: BaseException) -> str:
    (told, *_) = "".join(traceback.format_exception_only(error)).splitlines()
    return told


def _require_classes(made: PreparedRun, tally: Tally, k: int) -> None:
    """Raise at the first batch unless labels and names are of the model's k classes."""
    if tally.classes:
        return
    highest = -1 if made.labels is None else int(made.labels.max())
    require(highest < k, "labels", f"up to {highest}", f"below {k}, the classes of the model")
    require(
        len(made.classes) in (0, k),
        "--classes",
        f"{len(made.classes)} names",
        f"{k} names, one for each class of the model",
    )


def _count_right(made: PreparedRun, tally: Tally, logs: NDArray[Any]) -> tuple[int, int]:
    """How many of these samples are right, of how many whose label is known."""
    if made.labels is None:
        return 0, 0
    known = made.labels[tally.rows : tally.rows + len(logs)]
    return int(np.sum(logs[: len(known)].argmax(1) == known)), len(known)

"""The image benchmark: presets × protocols × models × seeds, one JSON a task, so that what was
interrupted goes on.

A task's file is named after what determines its result, and written whole or not at all; a file
that is there is not run again.
"""

import hashlib
import json
import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from driftfilter.app.bench.locks import claim, describe_holder
from driftfilter.app.bench.task import Bench, Task, run_task, settings
from driftfilter.app.terminal import Display
from driftfilter.storage.atomic import write_atomic


def path_of(folder: Path, made: Mapping[str, Any]) -> Path:
    """Path of the task with these settings: a readable name and a hash of all of them."""
    digest = hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:10]
    parts = (
        made["preset"],
        made["protocol"]["name"],
        made["model"],
        f"seed{made['stream']['seed']}",
        digest,
    )
    return folder / ("_".join(re.sub(r"[^\w.=-]+", "-", part) for part in parts) + ".json")


def read_document(path: Path, made: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a whole file of these settings holds; None if there is none."""
    document = _read(path) or {}
    return document if document.get("settings") == json.loads(json.dumps(made)) else None


def run(
    bench: Bench,
    tasks: Sequence[Task],
    folder: Path,
    display: Display,
    command: str = "",
    first: int = 0,
) -> list[dict[str, Any] | None]:
    """A document for each task, of settings and ``result``, or of settings and ``error`` if it
    failed; what is done is not run again.

    A document keeps the ``command`` that made it. The ``first`` task is the one to begin with;
    those before it come last.

    None for what another process is at. What others had claimed is looked at again as long as there
    was something to do.
    """
    documents: list[dict[str, Any] | None] = [None] * len(tasks)
    moved = True
    while moved and None in documents:
        moved = False
        for number in (*range(first, len(tasks)), *range(first)):
            if documents[number] is None:
                place = f"{number + 1} of {len(tasks)}"
                documents[number] = _find_or_run(
                    bench, tasks[number], folder, display, command, place
                )
                moved = moved or documents[number] is not None
    return documents


def _find_or_run(
    bench: Bench, task: Task, folder: Path, display: Display, command: str, place: str
) -> dict[str, Any] | None:
    """The document of a task; None if another process is at it."""
    made = settings(bench, task)
    path = path_of(folder, made)
    document = read_document(path, made)
    if document is not None:
        return document
    with claim(path) as mine:
        if not mine:
            return None
        # Another may have ended it between the look and the claim.
        return read_document(path, made) or _try(bench, task, path, display, command, place)


def _try(
    bench: Bench, task: Task, path: Path, display: Display, command: str, place: str
) -> dict[str, Any]:
    failure = path.with_suffix(".failed.txt")
    title = f"{place}: {task}"
    shown = display(title)
    try:
        document = {"command": command, **run_task(bench, task, shown.watch)}
    except Exception as error:  # of whatever kind: the other tasks go on
        reason = f"{type(error).__name__}: {error}"
        write_atomic(failure, traceback.format_exc())
        shown.end(f"{title}: failed, {reason} (see {failure})")
        return {"command": command, "settings": settings(bench, task), "error": reason}
    write_atomic(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    failure.unlink(missing_ok=True)
    result = document["result"]
    shown.end(f"{title}: accuracy {result['mean']['accuracy']:.4f} in {result['seconds']:.0f} s")
    return document


def are_done(bench: Bench, tasks: Sequence[Task], folder: Path) -> list[bool]:
    """Whether each task has its file."""
    each = (settings(bench, task) for task in tasks)
    return [read_document(path_of(folder, made), made) is not None for made in each]


def describe_undone(
    bench: Bench, tasks: Sequence[Task], documents: Sequence[Any], folder: Path
) -> list[str]:
    """A line for each task that ``run`` left to another process."""
    return [
        f"not done: {task}, {describe_holder(path_of(folder, settings(bench, task)))}"
        for task, document in zip(tasks, documents, strict=True)
        if document is None
    ]


def read_finished(bench: Bench, tasks: Sequence[Task], folder: Path) -> list[dict[str, Any]]:
    """The documents of all that is finished in the folder: first those of these tasks, in their
    order, then those of others like them.
    """
    kind = set(settings(bench, tasks[0]))
    own = [path_of(folder, settings(bench, task)) for task in tasks]
    found = map(_read, (*own, *sorted(set(folder.glob("*.json")) - set(own))))
    return [document for document in found if document and set(document["settings"]) == kind]


def _read(path: Path) -> dict[str, Any] | None:
    """What a file of a task holds; None if it is none."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8-sig"))
        return document if isinstance(document["settings"], dict) and "result" in document else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None

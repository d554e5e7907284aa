"""The image benchmark: presets × protocols × models × seeds, one JSON a task, so that what was
interrupted goes on.

A task's file is named after what determines its result, and written whole or not at all; a file
that is there is not run again.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Literal, Protocol, final

import torch

from driftfilter.app import metrics, models
from driftfilter.app.bench.locks import claimed, holder
from driftfilter.app.bench.protocols import Stream
from driftfilter.app.bench.task import (
    Bench,
    Choice,
    Network,
    Source,
    Task,
    Watch,
    protocol,
    run_task,
    settings,
)
from driftfilter.app.corruptions import CORRUPTIONS, EXTRA
from driftfilter.app.images.files import digest, open_arrays, require_images, require_labels
from driftfilter.app.machine import Machine, machine_of
from driftfilter.app.streams import Domains, cifar10, open_domains
from driftfilter.base.checks import nearest, require
from driftfilter.storage.atomic import write_whole

# In the order of accuracy they are expected to have.
QUICK_PRESETS = "source,bn,tent,driftfilter,driftfilter_aug"

# What the options say


def choices(text: str) -> tuple[Choice, ...]:
    """``a,b:x=1,y=2,c``: separated by commas; what has an ``=`` and no ``:`` is a further option of
    the one before.
    """
    found: list[Choice] = []
    for part in filter(None, re.split("[,;]", text.replace(" ", ""))):
        name, colon, option = part.partition(":")
        if not colon and "=" in part:
            require(bool(found), "option", part, "after a name: name:option=value")
            option = part
        else:
            found.append(Choice(name))
        if colon or option:
            key, _, value = option.partition("=")
            require(
                bool(key and value),
                "option",
                part,
                f"option=value, as in {found[-1].name}:option=value",
            )
            found[-1] = replace(found[-1], options=(*found[-1].options, (key, _value(value))))
    require(bool(found), "list of names", text, "name,name:option=value,…")
    return tuple({str(choice): choice for choice in found}.values())  # each once


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def load_network(text: str, machine: Machine) -> Network:
    """``name`` of a network that ships with the package, or ``name=weights.safetensors``."""
    name, _, path = text.partition("=")
    known = list(models.ARCHITECTURES)
    require(name in known, "model", name, f"one of {known}{nearest(name, known)}")
    require(not path or Path(path).is_file(), f"weights of model {name!r}", path, "a file")
    module = machine.place(models.load(name, Path(path) if path else None))
    with as_file(files("driftfilter.app") / "assets" / f"{name}.safetensors") as shipped:
        weights = (Path(path) if path else shipped).read_bytes()
    return Network(
        f"{name}={Path(path).stem}" if path else name, module, hashlib.sha256(weights).hexdigest()
    )


def seeds(text: str) -> tuple[int, ...]:
    """``3``: 0, 1 and 2; ``4,7``: these two."""
    parts = [part for part in text.split(",") if part]
    require(
        bool(parts) and all(part.isdigit() for part in parts),
        "seeds",
        text,
        "a number of seeds, or a list: 4,7",
    )
    numbers = tuple(int(part) for part in parts)
    require("," in text or numbers[0] > 0, "seeds", text, "at least 1")
    require(
        "," not in text or len(set(numbers)) == len(numbers),
        "seeds",
        text,
        "distinct: each is run once",
    )
    return numbers if "," in text else tuple(range(numbers[0]))


def corruption_names(text: str) -> tuple[str, ...] | None:
    """A list of names; ``extra``: the four for tuning; None for ``all``."""
    if text == "all":
        return None
    return (
        tuple(EXTRA) if text == "extra" else tuple(filter(None, text.replace(" ", "").split(",")))
    )


def all_names(data: Domains) -> tuple[str, ...]:
    """The 15 of CIFAR-10-C, or what the data have instead."""
    others = tuple(name for name in data.shifts if name not in ("clean", *EXTRA))
    return tuple(CORRUPTIONS) if set(CORRUPTIONS) <= set(data.shifts) else others


def open_source(path: Path) -> Source:
    """An ``.npz`` with "images" [n, h, w, 3], 8 bits, and, where they are known, "labels" [n]."""
    found = open_arrays(path)
    require("images" in found, str(path), list(found), "an .npz with 'images'")
    images = require_images(f"{path}: images", found["images"])
    labels = (
        require_labels(f"{path}: labels", found["labels"], len(images))
        if "labels" in found
        else None
    )
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    return Source(
        pixels, None if labels is None else torch.from_numpy(labels), str(path), digest([path])
    )


@final
@dataclass(frozen=True)
class Options:
    """What ``driftfilter bench`` can be told, as it is written there."""

    presets: str = QUICK_PRESETS
    protocols: str = "reset"
    models: str = "resnet20"
    seeds: str = "1"
    data: str | None = None
    clean: str | None = None
    source: str | None = None
    corruptions: str = "all"
    severity: int = 5
    batch: int = 200
    images: int | None = None
    order: Literal["given", "shuffled"] = "given"
    shuffled: bool = False
    rounds: int | None = None
    window: int = 0
    device: str = "auto"
    precision: str | None = None
    before: bool = False
    probe_every: int = 0


QUICK: dict[str, Any] = {
    "corruptions": "gaussian_noise,defocus_blur,contrast,jpeg_compression",
    "batch": 100,
}


def prepare(options: Options) -> tuple[Bench, tuple[Task, ...]]:
    """All that is needed, and every task; a wrong option or missing file is an error here, before
    anything runs.
    """
    metrics.torchmetrics()
    machine, presets = machine_of(options.device, options.precision), choices(options.presets)
    protocols = tuple(_with_rounds(choice, options.rounds) for choice in choices(options.protocols))
    networks = {
        made.name: made
        for made in (load_network(text, machine) for text in options.models.split(","))
    }
    require(
        len(networks) == len(set(options.models.split(","))),
        "models",
        options.models,
        "files of distinct names",
    )
    each = itertools.product(networks, protocols, presets, seeds(options.seeds))
    tasks = tuple(Task(preset, chosen, model, seed) for model, chosen, preset, seed in each)
    clean = None if options.clean is None else cifar10(Path(options.clean))
    names = corruption_names(options.corruptions)
    data = open_domains(
        options.data, clean, 0, options.severity, names, options.clean or "generated"
    )
    shared = {
        item.name: getattr(options, item.name)
        for item in fields(Stream)
        if hasattr(options, item.name)
    }
    stream = Stream(**{**shared, "corruptions": all_names(data) if names is None else names})
    source = None if options.source is None else open_source(Path(options.source))
    bench = Bench(
        data, networks, stream, machine, options.window, options.before, options.probe_every, source
    )
    for task in tasks:
        task.recipe()
        for shift in task.plan(stream, data.labels).domains:
            data.require(shift)
    return bench, tasks


def _with_rounds(choice: Choice, rounds: int | None) -> Choice:
    """Of the protocols that have rounds."""
    cls = type(protocol(choice))
    takes = (
        rounds is not None
        and "rounds" in [item.name for item in fields(cls)]
        and "rounds" not in dict(choice.options)
    )
    return replace(choice, options=(*choice.options, ("rounds", rounds))) if takes else choice


# The run folder


def path_of(folder: Path, made: Mapping[str, Any]) -> Path:
    """Where the task with these settings is written: a readable name and a hash of all of them."""
    digest = hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:10]
    parts = (
        made["preset"],
        made["protocol"]["name"],
        made["model"],
        f"seed{made['stream']['seed']}",
        digest,
    )
    return folder / ("_".join(re.sub(r"[^\w.=-]+", "-", part) for part in parts) + ".json")


def read_done(path: Path, made: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a whole file of these settings holds; None where there is none."""
    document = _document(path)
    return (
        document
        if document is not None and document["settings"] == json.loads(json.dumps(made))
        else None
    )


class Display(Protocol):
    """Where progress is shown."""

    def begin(self, title: str) -> Watch | None:
        """A task starts; what it should tell after every step."""

    def end(self, line: str) -> None:
        """It has ended."""


def run(
    bench: Bench,
    tasks: Sequence[Task],
    folder: Path,
    display: Display,
    command: str = "",
    first: int = 0,
) -> list[dict[str, Any] | None]:
    """A document for each task, of settings and ``result``, or ``error`` where it failed; what is
    done is not run again.

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
                document = _had(
                    bench, tasks[number], folder, display, command, f"{number + 1} of {len(tasks)}"
                )
                documents[number], moved = document, moved or document is not None
    return documents


def _had(
    bench: Bench, task: Task, folder: Path, display: Display, command: str, place: str
) -> dict[str, Any] | None:
    """The document of a task, found or made here."""
    made = settings(bench, task)
    path = path_of(folder, made)
    document = read_done(path, made)
    if document is not None:
        return document
    with claimed(path) as mine:
        if not mine:
            return None
        # Another may have ended it between the look and the claim.
        return read_done(path, made) or _tried(bench, task, path, display, command, place)


def _tried(
    bench: Bench, task: Task, path: Path, display: Display, command: str, place: str
) -> dict[str, Any]:
    failure = path.with_suffix(".failed.txt")
    try:
        document = {"command": command, **run_task(bench, task, display.begin(f"{place}: {task}"))}
    except Exception as error:  # of whatever kind: the other tasks go on
        write_whole(failure, traceback.format_exc())
        display.end(f"{place}: {task}: failed, {type(error).__name__}: {error} (see {failure})")
        return {
            "command": command,
            "settings": settings(bench, task),
            "error": f"{type(error).__name__}: {error}",
        }
    write_whole(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    failure.unlink(missing_ok=True)
    result = document["result"]
    display.end(
        f"{place}: {task}: accuracy {result['mean']['accuracy']:.4f} in {result['seconds']:.0f} s"
    )
    return document


def done(bench: Bench, tasks: Sequence[Task], folder: Path) -> list[bool]:
    """Which tasks have their file."""
    made = [settings(bench, task) for task in tasks]
    return [read_done(path_of(folder, each), each) is not None for each in made]


def undone(
    bench: Bench, tasks: Sequence[Task], documents: Sequence[Any], folder: Path
) -> list[str]:
    """A line for each task that ``run`` left to another process."""
    left = [task for task, document in zip(tasks, documents, strict=True) if document is None]
    return [f"not done: {task}, {holder(path_of(folder, settings(bench, task)))}" for task in left]


def finished(bench: Bench, tasks: Sequence[Task], folder: Path) -> list[dict[str, Any]]:
    """The documents of all that is finished in the folder: first of these tasks, in their order,
    then of others like them.
    """
    kind = set(settings(bench, tasks[0]))
    own = [path_of(folder, settings(bench, task)) for task in tasks]
    others = sorted(set(folder.glob("*.json")) - set(own))
    found = [_document(path) for path in (*own, *others)]
    return [
        document for document in found if document is not None and set(document["settings"]) == kind
    ]


def _document(path: Path) -> dict[str, Any] | None:
    """What a file of a task holds; None where it is none."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return document if isinstance(document["settings"], dict) and "result" in document else None
    except (OSError, ValueError, KeyError, TypeError):
        return None

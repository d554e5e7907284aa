"""The image benchmark: presets × protocols × models × seeds, one JSON a task, so that what was interrupted goes on.

A task's file is named after what determines its result, and written whole or not at all; a file that is there is not run again.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import os
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Literal, Protocol, final

import torch

from driftfilter.app import metrics, models
from driftfilter.app.corruptions import CORRUPTIONS, EXTRA
from driftfilter.app.protocols import Stream
from driftfilter.app.streams import Domains, cifar10, open_domains
from driftfilter.app.task import Bench, Choice, Network, Task, Watch, protocol, run_task, settings
from driftfilter.checks import nearest, require

# In the order of accuracy they are expected to have.
QUICK_PRESETS = "source,bn,tent,opgd_diag,shot_im"

# What the options say


def choices(text: str) -> tuple[Choice, ...]:
    """``a,b:x=1,y=2,c``: separated by commas; what has an ``=`` and no ``:`` is a further option of the one before."""
    found: list[Choice] = []
    for part in filter(None, re.split("[,;]", text.replace(" ", ""))):
        name, _, option = part.partition(":")
        if not option and "=" in part:
            require(bool(found), "option", part, "after a name: name:option=value")
            option = part
        else:
            found.append(Choice(name))
        if option:
            key, _, value = option.partition("=")
            found[-1] = replace(found[-1], options=(*found[-1].options, (key, _value(value))))
    require(bool(found), "list of names", text, "name,name:option=value,…")
    return tuple({str(choice): choice for choice in found}.values())  # each once


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def load_network(text: str, device: torch.device) -> Network:
    """``name`` of a network that ships with the package, or ``name=weights.safetensors``."""
    name, _, path = text.partition("=")
    known = list(models.ARCHITECTURES)
    require(name in known, "model", name, f"one of {known}{nearest(name, known)}")
    require(not path or Path(path).is_file(), f"weights of model {name!r}", path, "a file")
    module = models.load(name, Path(path) if path else None).to(device)
    with as_file(files("driftfilter.app") / "data" / f"{name}.safetensors") as shipped:
        weights = (Path(path) if path else shipped).read_bytes()
    return Network(f"{name}={Path(path).stem}" if path else name, module, hashlib.sha256(weights).hexdigest())


def seeds(text: str) -> tuple[int, ...]:
    """``3``: 0, 1 and 2; ``4,7``: these two."""
    parts = [part for part in text.split(",") if part]
    require(bool(parts) and all(part.isdigit() for part in parts), "seeds", text, "a number of seeds, or a list: 4,7")
    numbers = tuple(int(part) for part in parts)
    require("," in text or numbers[0] > 0, "seeds", text, "at least 1")
    return numbers if "," in text else tuple(range(numbers[0]))


def corruption_names(text: str, data: Domains) -> tuple[str, ...]:
    """``all``: the 15 of CIFAR-10-C, or what the data have instead; ``extra``: the four for tuning; or a list of names."""
    if text == "all":
        others = tuple(name for name in data.shifts if name not in ("clean", *EXTRA))
        return tuple(CORRUPTIONS) if set(CORRUPTIONS) <= set(data.shifts) else others
    return tuple(EXTRA) if text == "extra" else tuple(filter(None, text.replace(" ", "").split(",")))


def device_of(text: str) -> torch.device:
    """``auto``: the GPU where there is one."""
    found = torch.cuda.is_available()
    require(text in ("auto", "cpu") or (text.partition(":")[0] == "cuda" and found), "device", text, "there: auto, cpu or cuda")
    return torch.device("cuda" if text == "auto" and found else "cpu" if text == "auto" else text)


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
    corruptions: str = "all"
    severity: int = 5
    batch: int = 200
    images: int | None = None
    order: Literal["given", "shuffled"] = "given"
    shuffled: bool = False
    rounds: int | None = None
    window: int = 0
    device: str = "auto"
    tf32: bool | None = None
    before: bool = False
    probe_every: int = 0


QUICK: dict[str, Any] = {"corruptions": "gaussian_noise,defocus_blur,contrast,jpeg_compression", "batch": 100}


def prepare(options: Options) -> tuple[Bench, tuple[Task, ...]]:
    """All that is needed, and every task; a wrong option or missing file is an error here, before anything runs."""
    metrics.torchmetrics()
    device, presets = device_of(options.device), choices(options.presets)
    protocols = tuple(_with_rounds(choice, options.rounds) for choice in choices(options.protocols))
    if options.tf32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.tf32
    networks = {made.name: made for made in (load_network(text, device) for text in options.models.split(","))}
    require(len(networks) == len(set(options.models.split(","))), "models", options.models, "files of distinct names")
    each = itertools.product(networks, protocols, presets, seeds(options.seeds))
    tasks = tuple(Task(preset, chosen, model, seed) for model, chosen, preset, seed in each)
    clean = None if options.clean is None else cifar10(Path(options.clean))
    data = open_domains(options.data, clean, severity=options.severity)
    shared = {item.name: getattr(options, item.name) for item in fields(Stream) if hasattr(options, item.name)}
    stream = Stream(**{**shared, "corruptions": corruption_names(options.corruptions, data)})
    bench = Bench(data, networks, stream, device, options.window, options.before, options.probe_every)
    for task in tasks:
        task.recipe()
        for shift in task.plan(stream, data.labels).domains:
            data.require(shift)
    return bench, tasks


def _with_rounds(choice: Choice, rounds: int | None) -> Choice:
    """Of the protocols that have rounds."""
    cls = type(protocol(choice))
    takes = rounds is not None and "rounds" in [item.name for item in fields(cls)] and "rounds" not in dict(choice.options)
    return replace(choice, options=(*choice.options, ("rounds", rounds))) if takes else choice


# The run folder


def path_of(folder: Path, made: Mapping[str, Any]) -> Path:
    """Where the task with these settings is written: a readable name and a hash of all of them."""
    digest = hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:10]
    parts = (made["preset"], made["protocol"]["name"], made["model"], f"seed{made['stream']['seed']}", digest)
    return folder / ("_".join(re.sub(r"[^\w.=-]+", "-", part) for part in parts) + ".json")


def read_done(path: Path, made: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a whole file of these settings holds; None where there is none."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return document if document["settings"] == json.loads(json.dumps(made)) and "result" in document else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or as it was, whatever happens meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


class Display(Protocol):
    """Where progress is shown."""

    def begin(self, title: str) -> Watch | None:
        """A task starts; what it should tell after every step."""

    def end(self, line: str) -> None:
        """It has ended."""


def run(bench: Bench, tasks: Sequence[Task], folder: Path, display: Display) -> list[dict[str, Any]]:
    """A document for each task, of settings and ``result``, or ``error`` where it failed; what is done is not run again."""
    documents = []
    for number, task in enumerate(tasks, 1):
        made = settings(bench, task)
        document = read_done(path_of(folder, made), made)
        if document is None:
            document = _tried(bench, task, folder, display, f"{number} of {len(tasks)}")
        documents.append(document)
    return documents


def _tried(bench: Bench, task: Task, folder: Path, display: Display, place: str) -> dict[str, Any]:
    made = settings(bench, task)
    path = path_of(folder, made)
    failure = path.with_suffix(".failed.txt")
    try:
        document = run_task(bench, task, display.begin(f"{place}: {task}"))
    except Exception as error:  # of whatever kind: the other tasks go on
        write_whole(failure, traceback.format_exc())
        display.end(f"{place}: {task}: failed, {type(error).__name__}: {error} (see {failure})")
        return {"settings": made, "error": f"{type(error).__name__}: {error}"}
    write_whole(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    failure.unlink(missing_ok=True)
    result = document["result"]
    display.end(f"{place}: {task}: accuracy {result['mean']['accuracy']:.4f} in {result['seconds']:.0f} s")
    return document


def done(bench: Bench, tasks: Sequence[Task], folder: Path) -> list[bool]:
    """Which tasks have their file."""
    made = [settings(bench, task) for task in tasks]
    return [read_done(path_of(folder, each), each) is not None for each in made]

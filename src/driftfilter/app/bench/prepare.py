"""From the options of the benchmark to its tasks: what they name is read and checked here."""

import ast
import itertools
import re
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from driftfilter.app.bench.options import BenchOptions
from driftfilter.app.bench.outputs import keep_outputs, take_few
from driftfilter.app.bench.peers import open_checkout
from driftfilter.app.bench.protocols import Gradual, StreamSettings
from driftfilter.app.bench.task import (
    Bench,
    Choice,
    SourceImages,
    Task,
    build_protocol,
    require_fit,
    settings,
)
from driftfilter.app.corruptions import CORRUPTIONS, EXTRA
from driftfilter.app.images.files import digest, open_images
from driftfilter.app.machine import Machine, choose_machine
from driftfilter.app.networks.load_model import NamedNetwork, open_model, split_models
from driftfilter.app.readers.classes import read_classes
from driftfilter.app.readers.columns import Columns
from driftfilter.app.readers.stored import Stored
from driftfilter.app.streams import CLEAN, Domains, Layout, open_cifar10, open_domains
from driftfilter.base.checks import require

# In a matrix: batches below so many samples see so many images of a corruption.
SMALL_BATCH, FEW_IMAGES = 8, 500


def prepare(options: BenchOptions) -> tuple[Bench, tuple[Task, ...]]:
    """All that is needed, and every task.

    A wrong option or a missing file is an error here, before anything runs.
    """
    machine = choose_machine(options.device, options.precision)
    presets = parse_choices(f"source,{options.presets}" if options.matrix else options.presets)
    protocols = [_set_rounds(each, options.rounds) for each in parse_choices(options.protocols)]
    networks = {each.name: each for each in _load_networks(options.models, machine)}
    require(
        len(networks) == len(split_models(options.models)),
        "models",
        options.models,
        "files of distinct names",
    )
    names = _parse_corruptions(options.corruptions)
    data = open_domains(
        options.data,
        None if options.clean is None else open_cifar10(options.clean),
        layout=Layout(
            options.severity,
            names,
            _list_severities(options.severity, protocols),
            Columns.parse(options.columns),
            None if options.classes is None else read_classes(Path(options.classes)),
            fitted=all(each.prepare is not None for each in networks.values()),
        ),
        clean_path=options.clean or "generated",
        keep=options.keep,
    )
    shared = {
        item.name: getattr(options, item.name)
        for item in fields(StreamSettings)
        if hasattr(options, item.name)
    }
    stream = StreamSettings(
        **{**shared, "corruptions": _default_corruptions(data) if names is None else names}
    )
    each = itertools.product(
        networks, protocols, _parse_batches(options), presets, parse_seeds(options.seeds)
    )
    tasks = tuple(
        Task(preset, chosen, model, seed, batch, _limit_images(options, batch, len(data.labels)))
        for model, chosen, batch, preset, seed in each
    )
    bench = Bench(
        data,
        networks,
        stream,
        machine,
        options.window,
        options.before,
        options.probe_every,
        None if options.source is None else open_source(Path(options.source)),
        None if options.peers is None else open_checkout(options.peers),
    )
    if options.subset:
        bench = _keep_present(bench, tasks)
    for task in tasks:
        plan = task.plan(stream, bench.data)
        for shift in plan.domains:
            bench.data.require(shift)
        require_fit(bench, task, plan)
        settings(bench, task)
    return bench, tasks


def _keep_present(bench: Bench, tasks: Iterable[Task]) -> Bench:
    """The models with the logits of those classes alone that the data have, and labels of these."""
    require(
        bench.source is None or bench.source.labels is None,
        "subset",
        True,
        "left out if the source has labels, which count all classes",
    )
    present = bench.data.labels.unique()
    networks = {}
    for task in {each.model: each for each in tasks}.values():
        plan, network = task.plan(bench.stream, bench.data), bench.networks[task.model]
        classes = require_fit(bench, task, plan).classes
        samples = take_few(bench.open_data(task.model), plan, bench.machine)
        networks[task.model] = network._replace(
            module=keep_outputs(
                network.module, present.to(bench.machine.device), bench.machine.inputs(samples)
            ),
            outputs=f"{len(present)} of {classes}: {present.tolist()}",
        )
    labels = torch.searchsorted(present, bench.data.labels)
    return replace(bench, data=bench.data.with_labels(labels), networks=networks)


def parse_choices(text: str) -> tuple[Choice, ...]:
    """Names with options, each once, from ``a,b:x=1,y=2,c``.

    A part with ``=`` but no ``:`` is a further option of the name before it.
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
            found[-1] = found[-1]._replace(options=(*found[-1].options, (key, _parse_value(value))))
    require(bool(found), "list of names", text, "name,name:option=value,…")
    return tuple({str(choice): choice for choice in found}.values())


def _parse_value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def parse_seeds(text: str) -> tuple[int, ...]:
    """``3``: 0, 1 and 2; ``4,7``: these two."""
    parts = [part for part in text.split(",") if part]
    require(
        bool(parts) and all(part.isdigit() for part in parts),
        "seeds",
        text,
        "a number of seeds, or a list: 4,7",
    )
    numbers = tuple(map(int, parts))
    require("," in text or numbers[0] > 0, "seeds", text, "at least 1")
    require(
        "," not in text or len(set(numbers)) == len(numbers),
        "seeds",
        text,
        "distinct: each is run once",
    )
    return numbers if "," in text else tuple(range(numbers[0]))


def _parse_batches(options: BenchOptions) -> tuple[int | None, ...]:
    """The batch sizes of the tasks, each once; None is that of the stream."""
    if options.batches is None:
        return (None,)
    parts = options.batches.replace(" ", "").split(",")
    known = all(part.isdigit() and int(part) > 0 for part in parts)
    require(known, "batches", options.batches, "batch sizes, as in 200,16,1")
    return tuple(dict.fromkeys(map(int, parts)))


def _limit_images(options: BenchOptions, batch: int | None, count: int) -> int | None:
    """Images a corruption in a matrix, whose small batches would take hours of ``count`` images;
    None is what the stream has.
    """
    small = options.matrix and options.images is None and (batch or options.batch) < SMALL_BATCH
    return min(FEW_IMAGES, count) if small else None


def _parse_corruptions(text: str) -> tuple[str, ...] | None:
    """Names; the four for tuning if the text is ``extra``, None if it is ``all``."""
    if text == "all":
        return None
    names = (part.strip() for part in text.split(","))
    return tuple(EXTRA) if text == "extra" else tuple(filter(None, names))


def _list_severities(severity: int, protocols: Iterable[Choice]) -> tuple[int, ...]:
    """Those that the protocols ask for."""
    gradual = any(isinstance(build_protocol(each), Gradual) for each in protocols)
    return tuple(range(1, severity + 1)) if gradual else (severity,)


def _default_corruptions(data: Domains) -> tuple[str, ...]:
    """The 15 of CIFAR-10-C, or what the data have instead; of folders of corruptions, which may be
    unpacked in part, some of the 15 must be asked for.
    """
    shifts = [each for each in data.shifts if each != CLEAN.corruption]
    found = [each for each in shifts if each not in EXTRA]
    missing = [each for each in CORRUPTIONS if each not in found]
    if isinstance(data, Stored) and data.kind == "folders" and {*found} <= {*CORRUPTIONS}:
        require(
            not missing or not found,
            f"corruptions of {data.path}",
            f"all but {', '.join(missing)}",
            f"the 15, or named: --corruptions {','.join(found)}",
        )
    return tuple((found or shifts) if missing else CORRUPTIONS)


def _load_networks(text: str, machine: Machine) -> Iterable[NamedNetwork]:
    """The networks of a list (``split_models``), on the machine."""
    for each in split_models(text):
        opened = open_model(each)
        yield opened._replace(module=machine.place(opened.module))


def open_source(path: Path) -> SourceImages:
    """Samples of an ``.npz`` with "images" [n, h, w, 3], 8 bits, and perhaps "labels" [n]."""
    images, labels = open_images(path)
    return SourceImages(
        torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(),
        None if labels is None else torch.from_numpy(labels),
        str(path),
        digest([path]),
    )


def _set_rounds(choice: Choice, rounds: int | None) -> Choice:
    """The protocol with this many rounds if it has rounds and its options do not say how many."""
    takes = (
        rounds is not None
        and "rounds" in [item.name for item in fields(build_protocol(choice))]
        and "rounds" not in dict(choice.options)
    )
    return choice._replace(options=(*choice.options, ("rounds", rounds))) if takes else choice

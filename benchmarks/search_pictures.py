"""Presets on pictures, with one number of a recipe changed at a time.

    python benchmarks/search_pictures.py --data ILSVRC2012_img_val_subset \
        --model resnet50_imagenet=WEIGHTS [--shifts speckle_noise gaussian_blur=3] \
        [--images 5000] [--batch 64] [--protocols reset continual] [--workers 1] \
        [--cases bn tent driftfilter driftfilter:statistics.late=1 …] [--json FILE] \
        [--source CIFAR10_TRAIN.npz]
    python benchmarks/search_pictures.py --data CIFAR10_TEST.npz --model wrn28_10=WEIGHTS \
        --batch 200 …

A search sees the four extra corruptions. `--shifts reported` are the fifteen that are reported,
once all is chosen. A case is a preset, with options of it by their names, such as `balance=1`, and
fields of its recipe by their paths; `T=1.5` has the loss see its logits divided by so much. The
model begins anew for each corruption, or goes through all of them, one after the other. Images, and
so the classes of a batch, come in random order; "sorted" are clean ones class by class. There is no
monitor unless `--watched`. With `--source` adapters have source inputs (`data=`). Several workers
share a GPU, which one alone leaves waiting for Python, and streams that one has made.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
import warnings
from dataclasses import fields, replace
from functools import partial
from inspect import signature
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, multiprocessing, nn

import driftfilter as df
from driftfilter.app.corruptions import CORRUPTIONS, EXTRA
from driftfilter.app.metrics import quality
from driftfilter.app.networks.load_model import open_model
from driftfilter.app.readers.stored import CLEAN, shift_of
from driftfilter.app.streams import Layout, open_cifar10, open_domains
from driftfilter.presets import PRESETS, for_model
from driftfilter.recipe import change
from figures import write

Row = dict[str, Any]
Streams = dict[str, tuple[list[Tensor], Tensor]]  # batches of 8 bits, and labels, by corruption
SORTED = "sorted"  # clean images, class by class
REPORTED = "reported"  # the fifteen corruptions
METRICS = ("accuracy", "nll", "brier", "ece")
CASES = ("source", "bn", "tent", "driftfilter", "driftfilter:statistics.late=1")


def _read_option(text: str) -> Any:
    """A number, or a bare word as a text."""
    try:
        return json.loads(text)
    except ValueError:
        return None if text == "None" else text


def make_recipe(model: nn.Module, case: str, with_data: bool = False) -> df.Recipe:
    """The recipe of a case: a preset, and fields that are set."""
    name, *changes = case.split(":")
    pairs = [(path, text) for path, _, text in (each.partition("=") for each in changes)]
    known = {item.name for item in fields(df.Recipe)}
    own = set(signature(PRESETS[name]).parameters) - known
    options = {path: _read_option(text) for path, text in pairs if path in own}
    recipe, temperature = for_model(model, name, options, data=with_data), 1.0
    for path, text in pairs:
        if path == "T":
            temperature = float(text)
        elif path not in own:
            recipe = change(recipe, path, text)
    if temperature == 1:
        return recipe
    loss: Any = recipe.observation.loss
    if getattr(loss, "each_view", False):  # agreement of views stays as it is
        own, *others = loss.terms
        tempered: Any = replace(loss, terms=(df.Softened(own, temperature), *others))
    else:
        tempered = df.Softened(loss, temperature)
    return replace(recipe, observation=replace(recipe.observation, loss=tempered))


def follow(
    model: nn.Module, case: str, batches: list[Tensor], watched: bool, source: Tensor | None = None
) -> list[Tensor]:
    """Log-probabilities of each batch."""
    scaled = (batch.float() / 255 for batch in batches)
    if case == "source":
        with torch.no_grad():
            return [model(batch).float().log_softmax(-1) for batch in scaled]
    options: dict[str, Any] = {} if watched else {"monitor": None}
    if source is not None:
        options["data"] = source
    recipe = make_recipe(model, case, source is not None) if ":" in case else case
    adapter = df.adapt(model, recipe, speed="fast", **options)
    return [adapter(batch).float() for batch in scaled]


def judge(outputs: list[Tensor], labels: Tensor) -> Row:
    """Quality of a stream, and the accuracy of its first five batches and of the last five."""
    found = quality(torch.cat(outputs).cpu(), labels)
    row = {name: round(getattr(found, name), 4) for name in METRICS}
    sizes = [len(each) for each in outputs]
    right = [
        float((each.argmax(-1).cpu() == own).float().mean())
        for each, own in zip(outputs, labels.split(sizes), strict=True)
    ]
    return {**row, "first": round(fmean(right[:5]), 4), "last": round(fmean(right[-5:]), 4)}


def make_streams(arguments: argparse.Namespace) -> Streams:
    """Batches under each corruption on the device, with labels."""
    device, network = torch.device(arguments.device), open_model(arguments.model)
    if arguments.data.suffix == ".npz":
        data: Any = open_domains(None, open_cifar10(arguments.data))
    else:
        layout = Layout(fitted=network.prepare is not None)
        data = open_domains(arguments.data, layout=layout).prepared(network.prepare)
    order = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(5))
    index = order[: arguments.images]
    streams: Streams = {}
    for text in arguments.shifts:
        name, _, severity = text.partition("=")
        is_clean = name in (CLEAN.corruption, SORTED)
        shift = CLEAN if is_clean else shift_of(name, int(severity or 5))
        own = index[data.labels[index].argsort(stable=True)] if name == SORTED else index
        take = partial(data.take, shift, device=device)
        streams[text] = [take(part) for part in own.split(arguments.batch)], data.labels[own]
    return streams


def open_source(arguments: argparse.Namespace) -> Tensor | None:
    """Source inputs on the device, if there are any."""
    if arguments.source is None:
        return None
    pixels = torch.from_numpy(np.load(arguments.source)["images"]).permute(0, 3, 1, 2)
    return pixels.float().to(arguments.device) / 255


def try_case(
    model: nn.Module,
    streams: Streams,
    case: str,
    protocol: str,
    watched: bool,
    source: Tensor | None,
) -> Row:
    """The row of a case: each corruption, and the mean of them all."""
    begun = time.perf_counter()
    run = partial(follow, model, case, watched=watched, source=source)
    if protocol == "reset":
        outputs = {name: run(batches) for name, (batches, _) in streams.items()}
    else:
        every = [batch for batches, _ in streams.values() for batch in batches]
        rest = iter(run(every))
        outputs = {name: [next(rest) for _ in batches] for name, (batches, _) in streams.items()}
    found = {name: judge(each, streams[name][1]) for name, each in outputs.items()}
    mean = {key: round(fmean(row[key] for row in found.values()), 4) for key in METRICS}
    seconds = round(time.perf_counter() - begun, 1)
    return {"case": case, "protocol": protocol, "mean": mean, **found, "seconds": seconds}


def work(arguments: argparse.Namespace, kept: str, jobs: Any, rows: Any) -> None:
    """Take cases until there are none, on streams that are kept in a file."""
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.set_num_threads(1 if arguments.workers > 1 else torch.get_num_threads())
    opened: tuple[nn.Module, Streams, Tensor | None] | None = None
    while (job := jobs.get()) is not None:
        try:
            if opened is None:
                model = open_model(arguments.model).module.to(arguments.device).eval()
                # Images are on the device, labels on the host.
                opened = model, torch.load(kept), open_source(arguments)
            case, protocol = job
            model, streams, source = opened
            rows.put(try_case(model, streams, case, protocol, arguments.watched, source))
        except Exception as error:
            rows.put({"case": job[0], "protocol": job[1], "error": repr(error)[:300]})
        gc.collect()  # adapters, whose graphs and networks know each other
        torch.cuda.empty_cache()


def search(arguments: argparse.Namespace) -> list[Row]:
    """A row for each case and protocol."""
    context = multiprocessing.get_context("spawn")
    jobs, queue = context.Queue(), context.Queue()
    pairs = [(case, protocol) for protocol in arguments.protocols for case in arguments.cases]
    workers = min(arguments.workers, len(pairs))
    for job in [*pairs, *[None] * workers]:
        jobs.put(job)
    folder = tempfile.TemporaryDirectory()
    kept = f"{folder.name}/streams.pt"
    torch.save(make_streams(arguments), kept)
    arguments_of = (arguments, kept, jobs, queue)
    processes = [context.Process(target=work, args=arguments_of) for _ in range(workers)]
    for process in processes:
        process.start()
    rows: list[Row] = []
    while len(rows) < len(pairs):
        rows.append(queue.get())
        row = rows[-1]
        pieces = [f"{name} {row[name]['accuracy']:.4f}" for name in arguments.shifts if name in row]
        print(row["case"], row["protocol"], row.get("mean", row.get("error")), *pieces, flush=True)
        write(arguments.json, describe(arguments, rows), device=arguments.device)
    for process in processes:
        process.join()
    folder.cleanup()
    return rows


def describe(arguments: argparse.Namespace, rows: list[Row]) -> dict[str, Any]:
    network = arguments.model.partition("=")[0]
    about = {"network": network, "images": arguments.images, "batch": arguments.batch}
    return {**about, "rows": sorted(rows, key=lambda row: (row["protocol"], row["case"]))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--shifts", nargs="*", default=list(EXTRA))
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--protocols", nargs="*", default=["reset"])
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--watched", action="store_true", help="with the default's monitor")
    parser.add_argument("--source", type=Path, help=".npz of source images")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.shifts == [REPORTED]:
        arguments.shifts = list(CORRUPTIONS)
    search(arguments)


if __name__ == "__main__":
    main()

"""Mutated files: each must be refused by a clear error, or load and work; nothing may crash, and
nothing may be half changed.

Files are made and read in a child process, so that a crash of it is seen:

    python tests/file_fuzzing.py FIRST LAST SKIP KIND...

prints a line before and after each. ``fuzz`` reads these; benchmarks/fuzz.py does so at
length.
"""

import copy
import functools
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load as read_tensors
from torch import Tensor

import driftfilter as df
from crafting import header_of
from driftfilter.app import report
from driftfilter.app.images.arrays import open_array, open_arrays
from driftfilter.app.report.content import ReportError
from driftfilter.app.run.reader import open_feed, open_labels
from file_mutations import (
    Rng,
    arrays,
    mutate_archive,
    mutate_array,
    mutate_document,
    mutate_sealed,
    mutate_text,
)
from fuzzing import CLASSES, FEW, batch, made, same

MEMORY = 12 << 30  # bytes of addresses that a child may have
SECONDS = 60  # for one file


class Kind(NamedTuple):
    """A kind of file."""

    originals: Callable[[], list[bytes]]
    mutate: Callable[[bytes, Rng], bytes]
    use: Callable[[Path], str]  # how it ended; raises if it should not have ended so
    suffix: str


# Sealed files: those of adapters and fleets

PRESETS = ("driftfilter", "tent", "rotta", "t3a", "cotta", "opgd", "tttpp", "head_ekf")
WINDOWED = ("tent",)


def adapter(preset: str) -> df.Adapter:
    data = df.SourceData(batch(8, 99), torch.arange(8) % CLASSES)
    options: dict[str, Any] = {**FEW.get(preset, {})}
    if preset in WINDOWED:
        options["window"] = 9
    return df.adapt(made("batch_norm"), preset, data=data, **options)


@functools.cache
def waiting(preset: str) -> df.Adapter:
    """An adapter that has seen two batches."""
    one = adapter(preset)
    for seed in range(2):
        one(batch(9, seed))
    return one


def checkpoints() -> list[bytes]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for preset in PRESETS:
            one = copy.deepcopy(waiting(preset))
            one(batch(9, 2))
            df.save(one, Path(folder) / "a", notes={"preset": preset})
            found.append((Path(folder) / "a").read_bytes())
    return found


def tensors_of(one: df.Adapter) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in one.state_dict().items()}


def use_checkpoint(path: Path, preset: str = "") -> str:
    """Load a file of an adapter; if that goes well, predict, adapt, save and load again."""
    mine = adapter_for(path) if not preset else copy.deepcopy(waiting(preset))
    before = tensors_of(mine)
    try:
        df.load(mine, path)
    except df.CheckpointError as error:
        assert same(tensors_of(mine), before), "half changed"
        return refused(error, path)
    return use_adapter(mine, path)


def adapter_for(path: Path) -> df.Adapter:
    """The adapter that a file was made by, as far as it says so."""
    try:
        preset = header_of(path.read_bytes())["notes"]["preset"]
    except Exception:
        preset = None
    return copy.deepcopy(waiting(preset if preset in PRESETS else "tent"))


def use_adapter(mine: df.Adapter, path: Path) -> str:
    before = tensors_of(mine)
    try:
        mine.predict(batch(5, 3))
        mine(batch(9, 4))
    except (df.NotFiniteError, df.NotPositiveDefiniteError):
        monitored = ("monitor.told",)  # which notes that a batch was refused
        after = {name: value for name, value in tensors_of(mine).items() if name not in monitored}
        kept = {name: value for name, value in before.items() if name not in monitored}
        assert same(after, kept), "half changed by a step"
        return "works until numbers are too large"
    df.save(mine, path.with_name("again"))
    try:
        df.load(mine, path.with_name("again"))
    except df.CheckpointError as error:  # a moment of Adam out of all proportion did it
        if "must be of numbers up to" not in str(error):
            raise
        return "works until numbers are too large"
    return "works"


def fleet(streams: Iterable[str] = ("x",), full: bool = True) -> df.Fleet:
    filt = df.Filter(df.LinearHead(3), inference=df.Linearized(df.GaussNewton()))
    covariance = df.Full(torch.eye(6)) if full else df.Diagonal(torch.ones(6))
    return df.Fleet(filt, df.Belief(torch.linspace(-1, 1, 6), covariance), streams)


def features(streams: int) -> Tensor:
    return torch.randn(streams, 2, 3, generator=torch.Generator().manual_seed(0))


def fleets() -> list[bytes]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for full in (True, False):
            one = fleet("abcde", full)
            one.step(features(5))
            one.save(Path(folder) / "a")
            found.append((Path(folder) / "a").read_bytes())
    return found


def use_fleet(path: Path, full: bool | None = None) -> str:
    try:
        wide = len(read_tensors(path.read_bytes())["values"].shape) == 3
    except Exception:
        wide = True
    mine = fleet("xy", wide if full is None else full)
    mine.step(features(2))
    before = contents(mine)
    try:
        mine.load(path)
    except df.CheckpointError as error:
        assert same(contents(mine), before), "half changed"
        mine.step(features(2))
        return refused(error, path)
    if not len(mine):
        return "works"
    before = contents(mine)
    try:
        mine.step(features(len(mine)))
    except (df.NotFiniteError, df.NotPositiveDefiniteError):
        assert same(contents(mine), before), "half changed by a step"
        return "works until numbers are too large"
    mine.save(path.with_name("again"))
    mine.load(path.with_name("again"))
    return "works"


def contents(mine: df.Fleet) -> dict[str, Any]:
    return {"streams": tuple(mine.streams)} | {
        name: value.clone() for name, value in mine._tensors().items()
    }


# Arrays


def use_array(path: Path) -> str:
    try:
        found = open_array(path)
        assert int(np.asarray(found).size) == found.size
    except ValueError as error:
        return refused(error, path)
    return use_feed(path)


def use_feed(path: Path) -> str:
    """Take what a file holds for samples and for labels."""
    ended = []
    for work in (lambda: read_all(path), lambda: open_labels(path, None)):
        try:
            work()
            ended.append("works")
        except ValueError as error:
            ended.append(refused(error, path))
    return max(ended)


def read_all(path: Path) -> None:
    feed = open_feed(str(path))
    for piece in feed.batches(4, 0):
        piece.read()


def refused(error: Exception, path: Path | None = None) -> str:
    assert path is None or str(path) in str(error), f"names no file: {error}"
    assert len(str(error)) > 10, f"says nothing: {error!r}"
    return "refused"


def archives() -> list[bytes]:
    found = []
    for save in (np.savez, np.savez_compressed):
        file = io.BytesIO()
        x, y = np.arange(24, dtype=np.float32).reshape(6, 4), np.arange(6) % 3
        save(file, x=x, labels=y)
        found.append(file.getvalue())
    return found


def use_archive(path: Path) -> str:
    try:
        open_arrays(path)
    except ValueError as error:
        return refused(error, path)
    return use_feed(path)


# Text


def recipes() -> list[bytes]:
    names = ("driftfilter", "tent", "cotta", "opgd", "rotta", "t3a")
    return [df.to_toml(df.presets.get(name)).encode() for name in names]


def use_recipe(path: Path) -> str:
    from driftfilter.app.run.prepare import _read_recipe

    try:
        recipe = _read_recipe(path)
    except ValueError as error:
        return refused(error, path)
    assert df.from_toml(df.to_toml(recipe)) == recipe
    return "works"


@functools.cache
def run_files() -> dict[str, bytes]:
    """The files of a run that a report is made of."""
    import own_model
    from driftfilter.app.cli import main

    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            sys.path.insert(0, folder)
            Path("run_network.py").write_text(own_model.MODULE)
            np.save("x.npy", own_model.samples())
            np.save("y.npy", own_model.LABELS)
            options = ["--baseline", "--labels", "y.npy", "--out", "o", "--quiet"]
            assert main(["run", own_model.MODEL, "x.npy", "--preset", "tent", *options]) == 0
            names = ("config.json", "summary.json", "steps.jsonl", "movement.json", "examples.npz")
            return {name: (Path("o") / name).read_bytes() for name in names}
        finally:
            os.chdir(here)


def run_documents() -> list[bytes]:
    """Each file of a run after its name."""
    return [name.encode() + b"\n" + data for name, data in run_files().items()]


def use_document(path: Path) -> str:
    """A report of the run that has this file."""
    name, _, text = path.read_bytes().partition(b"\n")
    folder = path.parent / "run"
    folder.mkdir(exist_ok=True)
    for each, held in run_files().items():
        (folder / each).write_bytes(text if each.encode() == name else held)
    (folder / "report.html").unlink(missing_ok=True)
    try:
        report.write([folder])
    except ReportError as error:
        assert not (folder / "report.html").exists(), "half written"
        return refused(error, folder)
    return "works"


KINDS: dict[str, Kind] = {
    "checkpoint": Kind(checkpoints, mutate_sealed, use_checkpoint, ".safetensors"),
    "fleet": Kind(fleets, mutate_sealed, use_fleet, ".safetensors"),
    "npy": Kind(arrays, mutate_array, use_array, ".npy"),
    "npz": Kind(archives, mutate_archive, use_archive, ".npz"),
    "toml": Kind(recipes, mutate_text, use_recipe, ".toml"),
    "json": Kind(run_documents, mutate_document, use_document, ".json"),
}


# The child, and who watches it


def work(first: int, last: int, skip: int, names: list[str]) -> None:
    """Make and use files, all but the first so many, and print how each ended."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    originals = functools.cache(lambda name: KINDS[name].originals())
    with tempfile.TemporaryDirectory() as folder:
        for name, number in list_files(first, last, names)[skip:]:
            kind, rng = KINDS[name], random.Random(f"{name} {number}")
            path = Path(folder) / f"file{kind.suffix}"
            path.write_bytes(kind.mutate(rng.choice(originals(name)), rng))
            print("begun", flush=True)
            signal.alarm(SECONDS)
            try:
                ended = kind.use(path)
            except BaseException as error:  # whatever it is, the others go on
                ended = f"FAILED {type(error).__name__}: {error}"[:300]
            signal.alarm(0)
            print(json.dumps(ended), flush=True)


def list_files(first: int, last: int, names: list[str]) -> list[tuple[str, int]]:
    return [(name, number) for name in names for number in range(first, last)]


def fuzz(first: int, last: int, names: list[str]) -> tuple[Counter[str], dict[str, str]]:
    """How files ended, counted by kind; and those that should not have ended so."""
    counts, failures = Counter[str](), dict[str, str]()
    source = str(Path(df.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    files, done = list_files(first, last, names), 0
    while done < len(files):
        command = [sys.executable, __file__, *map(str, (first, last, done)), *names]
        child = subprocess.run(command, env=environment, capture_output=True, check=False)
        lines = child.stdout.decode().splitlines()
        died = lines[-1:] == ["begun"]
        if child.returncode and not died:
            raise RuntimeError(child.stderr.decode()[-2000:])
        ends = [json.loads(line) for line in lines if line != "begun"]
        if died:
            ends.append(f"FAILED: the process ended with status {child.returncode}")
        for (name, number), ended in zip(files[done : done + len(ends)], ends, strict=True):
            counts[f"{name}: {ended.partition(' ')[0] if 'FAILED' in ended else ended}"] += 1
            if "FAILED" in ended:
                failures[f"{name} {number}"] = ended
        done += len(ends)
    return counts, failures


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])

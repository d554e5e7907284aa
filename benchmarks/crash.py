"""Kills, bit flips, truncations and full disks against the checkpoints of ``driftfilter run``.

    python benchmarks/crash.py [--model small|resnet20] [--kills 200] [--flips 2000] \
        [--truncations 200] [--json FILE]
    python benchmarks/crash.py --containers 20 [--steps 40]

Runs with a checkpoint at every step are killed (SIGKILL) at random moments and resumed, over and
over; after every kill the newest checkpoint must load, and every run that reaches its end must have
predicted, bit for bit, what an unbroken one did. A kill "in a save" left the file being written
behind, one "in a step" did not. Children are forked from this process, which has imported torch but
never used it, so that a run costs no start. ``--containers`` measures something else, and only
that: two containers' worth of namespaces in one folder (benchmarks/two_containers.py).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import driftfilter as df
import two_containers
from driftfilter.app import cli
from driftfilter.app.run.options import RunOptions
from driftfilter.app.run.prepare import PreparedRun, prepare
from driftfilter.app.run.run import STATE

# Everything is adapted by Adam, so that a checkpoint is of some megabytes and a good part of the
# time goes into saves.
NETWORK = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    layers = (nn.Linear(20, 800), nn.BatchNorm1d(800), nn.ReLU(), nn.Linear(800, 800), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(800, 10))
"""


def recipe() -> str:
    chosen = df.presets.get("tent", lr=1e-3, parameters=df.AllParameters(), prediction=df.MAP())
    return df.to_toml(chosen)


def command(folder: Path, model: str, out: str, steps: int) -> list[str]:
    """Of a run in the folder, which holds all it needs."""
    common = [
        "--out",
        str(folder / out),
        "--checkpoint-every",
        "1",
        "--keep",
        "2",
        "--resume",
        "--quiet",
    ]
    if model == "small":
        size = ["--batch", "32", "--recipe", str(folder / "recipe.toml")]
        return ["run", "crash_network:make", str(folder / "x.npy"), *size, *common]
    return ["run", "resnet20", str(folder / "x.npy"), "--batch", "20", "--preset", "tent", *common]


def furnish(folder: Path, model: str, steps: int) -> None:
    rng = np.random.default_rng(0)
    if model == "small":
        (folder / "crash_network.py").write_text(NETWORK)
        (folder / "recipe.toml").write_text(recipe())
        np.save(folder / "x.npy", rng.normal(size=(32 * steps, 20)).astype(np.float32))
    else:
        np.save(folder / "x.npy", rng.integers(0, 256, (20 * steps, 32, 32, 3), dtype=np.uint8))


def forked(work: Callable[[], int], log: Path) -> int:
    """The process that does the work; its output goes to a file."""
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        with (
            log.open("a") as file,
            contextlib.redirect_stdout(file),
            contextlib.redirect_stderr(file),
        ):
            try:
                status = work()
            except BaseException:
                traceback.print_exc()
    finally:
        os._exit(status)


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def make(folder: Path, model: str, steps: int) -> PreparedRun:
    """What such a run adapts with, for looking at a checkpoint."""
    given = command(folder, model, "look", steps)
    options = dict(zip(given[3::2], given[4::2], strict=False))
    recipe, preset = options.get("--recipe"), options.get("--preset")
    out, batch = folder / "look", int(options["--batch"])
    return prepare(
        RunOptions(given[1], given[2], recipe=recipe, preset=preset, out=out, batch=batch)
    )


def same(one: Path, other: Path) -> bool:
    with np.load(one / "predictions.npz") as first, np.load(other / "predictions.npz") as second:
        equal = all(first[name].tobytes() == second[name].tobytes() for name in first.files)
    return equal and steps_of(one) == steps_of(other)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "ms"} for line in lines]


def kills(folder: Path, model: str, count: int, steps: int, rng: random.Random) -> dict[str, Any]:
    """Kill and resume until there were so many kills and the last run is whole."""
    log = folder / "log.txt"

    def start(out: str) -> int:
        return forked(lambda: cli.main(command(folder, model, out, steps)), log)

    def loads(out: str) -> int:
        return forked(
            lambda: df.load(make(folder, model, steps).adapter, folder / out / STATE) is None, log
        )

    begun = time.perf_counter()
    if ended(start("unbroken")) != 0:
        sys.exit(f"the unbroken run failed:\n{log.read_text()}")
    seconds = time.perf_counter() - begun
    found = {
        "kills": 0,
        "in a save": 0,
        "before the first checkpoint": 0,
        "does not load": 0,
        "runs": 0,
        "differ": 0,
        "failed": 0,
    }
    while found["kills"] < count:
        out = f"run{found['runs']}"
        while True:
            child, patience = (
                start(out),
                rng.uniform(0, 0.6 * seconds) if found["kills"] < count else 600.0,
            )
            until = time.perf_counter() + patience
            while (over := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.perf_counter() < until:
                time.sleep(0.0002)
            if over != (0, 0):
                found["failed"] += os.waitstatus_to_exitcode(over[1]) != 0
                break
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            found["kills"] += 1
            found["in a save"] += any((folder / out).glob(f".{STATE}.*.part"))
            there = (folder / out / STATE).exists()
            found["before the first checkpoint"] += not there
            found["does not load"] += there and ended(loads(out)) != 0
        found["runs"] += 1
        found["differ"] += not same(folder / out, folder / "unbroken")
        shutil.rmtree(folder / out)
    size = (folder / "unbroken" / STATE).stat().st_size
    return {
        **found,
        "checkpoint bytes": size,
        "unbroken seconds": round(seconds, 2),
        "log": log.read_text()[-2000:],
    }


def corruption(
    folder: Path, model: str, flips: int, truncations: int, steps: int, rng: random.Random
) -> dict[str, Any]:
    """Every damage must be refused as such, the adapter as it was."""
    path = folder / "damaged.safetensors"
    good = (folder / "unbroken" / STATE).read_bytes()
    adapter = make(folder, model, steps).adapter
    before = {name: value.clone() for name, value in adapter.state_dict().items()}
    damages = [("flips", position) for position in rng.sample(range(8 * len(good)), flips)]
    header = range(8 * (8 + int.from_bytes(good[:8], "little")))
    damages += [("flips in the header", position) for position in rng.sample(header, flips // 4)]
    damages += [("truncations", length) for length in rng.sample(range(len(good)), truncations)]
    found: dict[str, int] = {}
    for kind, place in damages:
        data = bytearray(good)
        if kind == "truncations":
            del data[place:]
        else:
            data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        try:
            df.load(adapter, path)
            result = "loaded"
        except df.CheckpointError as error:
            result = "refused" if "altered" in str(error) else f"refused otherwise: {error}"
        found[f"{kind} {result}"] = found.get(f"{kind} {result}", 0) + 1
    touched = [
        name for name, value in adapter.state_dict().items() if not torch.equal(value, before[name])
    ]
    path.write_bytes(good)
    df.load(adapter, path)  # what was damaged was whole
    return {**found, "adapter touched": len(touched)}


def disk(folder: Path, model: str, steps: int) -> dict[str, str]:
    """Saves to a disk that is full and to one that cannot be written to; both are mounted in
    memory, which needs root.
    """
    place, adapter = folder / "disk", make(folder, model, steps).adapter
    df.load(adapter, folder / "unbroken" / STATE)
    size = (folder / "unbroken" / STATE).stat().st_size
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={int(1.5 * size) // 1024}k", "tmpfs", str(place)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        return {"disk": "not measured: may not mount"}
    found, path = {}, place / STATE
    try:
        df.save(adapter, path)
        before = path.read_bytes()
        for name, prepare_disk in (
            ("full", []),
            ("read-only", ["mount", "-o", "remount,ro", str(place)]),
        ):
            if prepare_disk:
                subprocess.run(prepare_disk, check=True)
            try:
                df.save(adapter, path)
                found[name] = "WRONG: no error"
            except df.CheckpointError as error:
                whole = path.read_bytes() == before and [each.name for each in place.iterdir()] == [
                    STATE
                ]
                found[name] = (
                    f"{'intact' if whole else 'WRONG'}: {str(error).replace(str(folder), '…')}"
                )
    finally:
        subprocess.run(["umount", str(place)], check=True)
    return found


def shared_folder(folder: Path, model: str, count: int, steps: int, rng: random.Random) -> int:
    """Containers in one folder: one at a time, each run whole and equal to an unbroken one."""
    if reason := two_containers.permitted():
        print(f"not measured: {reason}")
        return 0

    def own(out: str) -> list[str]:
        return command(folder, model, out, steps)

    if ended(forked(lambda: cli.main(own("unbroken")), folder / "log.txt")) != 0:
        sys.exit(f"the unbroken run failed:\n{(folder / 'log.txt').read_text()}")
    wrong = 0
    for name, found in (
        ("one mount", two_containers.one_mount(folder, own, count, steps, rng)),
        ("a mount each", two_containers.a_mount_each(folder, own, max(count // 7, 1), steps, rng)),
    ):
        outs = found.pop("outs", [])
        whole = [out for out in outs if (out / "predictions.npz").exists()]
        found["never ended"] = len(outs) - len(whole)
        found["differ"] = sum(not same(out, folder / "unbroken") for out in whole)
        wrong += found["differ"] + found["never ended"] + found.get("ended wrong", 0)
        print(name, *(f"  {key:<28} {value}" for key, value in found.items()), sep="\n")
    print("WRONG" if wrong else "all as they should be")
    return 1 if wrong else 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="small", choices=("small", "resnet20"))
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--flips", type=int, default=2000)
    parser.add_argument("--truncations", type=int, default=200)
    parser.add_argument("--steps", type=int, default=40, help="of the unbroken run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--containers", type=int, default=0, help="trials with two in one folder")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    arguments = parsed()
    torch.set_num_threads(1)  # of children too: threads do not outlive a fork
    rng, begun = random.Random(arguments.seed), time.perf_counter()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        sys.path.insert(0, text)
        furnish(folder, arguments.model, arguments.steps)
        if arguments.containers:
            own = (arguments.model, arguments.containers, arguments.steps, rng)
            return shared_folder(folder, *own)
        result: dict[str, Any] = {
            "kills": kills(folder, arguments.model, arguments.kills, arguments.steps, rng)
        }
        damage = (arguments.flips, arguments.truncations, arguments.steps, rng)
        result["corruption"] = corruption(folder, arguments.model, *damage)
        result["disk"] = disk(folder, arguments.model, arguments.steps)
    log = result["kills"].pop("log")
    where = {
        "model": arguments.model,
        "seed": arguments.seed,
        "machine": platform.machine(),
        "torch": torch.__version__,
    }
    document = {
        **where,
        "date": datetime.date.today().isoformat(),
        "seconds": round(time.perf_counter() - begun),
        **result,
    }
    print(
        ", ".join(
            f"{name} {value}" for name, value in document.items() if not isinstance(value, dict)
        ),
        "\n",
    )
    for part, rows in result.items():
        print(part)
        print("\n".join(f"  {name:<32} {value}" for name, value in rows.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    bad = [name for name in ("does not load", "differ", "failed") if result["kills"][name]]
    wrong = [
        name
        for name in result["corruption"]
        if not name.endswith(" refused") and name != "adapter touched"
    ]
    harmed = result["corruption"]["adapter touched"] or any(
        value.startswith("WRONG") for value in result["disk"].values()
    )
    if bad or wrong or harmed:
        print(f"WRONG: {bad} {wrong}\n{log}")
    return 1 if bad or wrong or harmed else 0


if __name__ == "__main__":
    sys.exit(main())

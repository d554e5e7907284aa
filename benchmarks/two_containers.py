"""Two containers' worth of namespaces (``unshare``) in one folder of ``driftfilter run``: a part of
``benchmarks/crash.py``.

A trial with one mount: two containers of one host name start the same run together, the one that
has the folder is killed at a random step, two more, of other names, go on together. With a
mount each (overlays of one folder, whose locks the kernel does not share): a second container
starts while the first one runs, the first one is killed, a third one goes on.
"""

from __future__ import annotations

import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--uts", "--kill-child")


class Box:
    """A container that runs a command of ``driftfilter``."""

    def __init__(self, folder: Path, command: list[str], name: str, mount: int | None) -> None:
        own = shlex.join([sys.executable, "-m", "driftfilter.app.cli", *command])
        upper, work = folder / "upper", folder / f"work{mount}"
        parts = f"lowerdir={folder}/lower,upperdir={upper},workdir={work},index=off"
        mounted = f"mount -t overlay overlay -o {parts} {folder}/shared || exit 40; "
        code = f"hostname {name}; {'' if mount is None else mounted}exec {own}"
        self.log = folder / f"log-{time.monotonic_ns()}.txt"
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                [*CONTAINER, "sh", "-c", code],
                stdout=file,
                stderr=file,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
            )
        self.begun = time.monotonic()

    def ended(self) -> tuple[int, float]:
        """Status, and the seconds it took."""
        return self.process.wait(), time.monotonic() - self.begun

    def was_refused(self) -> bool:
        return self.process.wait() == 1 and "is in use" in self.log.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def permitted() -> str:
    """Why there can be no containers; empty if there can."""
    try:
        tried = subprocess.run([*CONTAINER, "true"], check=False, capture_output=True, text=True)
    except FileNotFoundError:
        return "there is no unshare"
    return tried.stderr.strip() if tried.returncode else ""


def until_step(out: Path, count: int, boxes: list[Box]) -> None:
    """Wait until a run has taken so many steps, or all have ended."""
    log = out / "steps.jsonl"
    while any(box.process.poll() is None for box in boxes):
        if log.exists() and log.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.002)


def one_mount(
    folder: Path, command: Callable[[str], list[str]], count: int, steps: int, rng: random.Random
) -> dict[str, Any]:
    """Trials with one mount; the caller compares the ``outs``."""
    found: dict[str, Any] = {"trials": count, "refused": 0, "kills": 0, "ended wrong": 0}
    found |= {"longest until the end, s": 0.0, "outs": []}
    for trial in range(count):
        out = f"box{trial}"
        boxes = [Box(folder, command(out), "box", None) for _ in range(2)]
        until_step(folder / out, rng.randrange(1, steps), boxes)
        for box in boxes:
            if box.process.poll() is None and not _is_refusing(box):
                box.kill()
                found["kills"] += 1
        found["refused"] += sum(box.was_refused() for box in boxes)
        again = [Box(folder, command(out), name, None) for name in ("other", "third")]
        for box in again:
            status, seconds = box.ended()
            found["refused"] += box.was_refused()
            found["ended wrong"] += status != 0 and not box.was_refused()
            found["longest until the end, s"] = max(found["longest until the end, s"], seconds)
        found["ended wrong"] += all(box.was_refused() for box in again)
        found["outs"].append(folder / out)
    found["longest until the end, s"] = round(found["longest until the end, s"], 1)
    return found


def _is_refusing(box: Box) -> bool:
    return "is in use" in box.log.read_text()


def a_mount_each(
    folder: Path, command: Callable[[str], list[str]], count: int, steps: int, rng: random.Random
) -> dict[str, Any]:
    """Trials with a mount for each container."""
    found: dict[str, Any] = {
        "trials": count,
        "refused": 0,
        "kills": 0,
        "ended wrong": 0,
        "outs": [],
    }
    for name in ("lower", "upper", "shared"):
        (folder / name).mkdir(exist_ok=True)
    for trial in range(count):
        for number in range(3):
            (folder / f"work{3 * trial + number}").mkdir()
        out = f"shared/each{trial}"
        first = Box(folder, command(out), "box", 3 * trial)
        until_step(folder / "upper" / f"each{trial}", rng.randrange(1, steps // 4), [first])
        if first.process.poll() == 40:
            return {"not measured": first.log.read_text()}
        second = Box(folder, command(out), "box", 3 * trial + 1)
        second.ended()
        found["refused"] += second.was_refused()
        found["kills"] += first.process.poll() is None
        first.kill()
        status, seconds = Box(folder, command(out), "other", 3 * trial + 2).ended()
        found["ended wrong"] += status != 0
        found["seconds until the end"] = round(seconds, 1)
        found["outs"].append(folder / "upper" / f"each{trial}")
    return found

"""The shape of the code: its size, and how far a batch travels through it.

    python benchmarks/shape.py

Statements: logical lines of src and tests without docstrings, however they are wrapped. The way of
a batch: modules of the package that run in one steady call, calls from one module into another, and
how deep calls lie in each other.
"""

from __future__ import annotations

import sys
import tokenize
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import driftfilter as df

ROOT = Path(__file__).parents[1]
PACKAGE = str(Path(df.__file__).parent)
BETWEEN = {
    tokenize.NL,
    tokenize.COMMENT,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def statements(folder: Path) -> int:
    """Logical lines of all files, without docstrings and comments."""
    count = 0
    for path in folder.rglob("*.py"):
        kinds: list[int] = []
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type == tokenize.NEWLINE:
                    count += kinds != [tokenize.STRING]
                    kinds = []
                elif token.type not in BETWEEN:
                    kinds.append(token.type)
    return count


def way(call: Callable[[], Any]) -> tuple[int, int, int]:
    """Modules, crossings and depth of one call."""
    modules: set[str] = set()
    depth = crossings = deepest = 0

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth, crossings, deepest
        file = frame.f_code.co_filename
        if event not in ("call", "return") or not file.startswith(PACKAGE):
            return
        if event == "return":
            depth -= 1
            return
        depth += 1
        deepest = max(deepest, depth)
        modules.add(file)
        caller = frame.f_back
        if caller is not None and caller.f_code.co_filename.startswith(PACKAGE):
            crossings += caller.f_code.co_filename != file

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(modules), crossings, deepest


def convolutional(norms: int = 4) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (3, *[8] * (norms - 1)):
        layers += [nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()


def steady_adapter() -> Callable[[], Any]:
    """The default on a network of four batch norms, after its first batches."""
    adapter, images = df.adapt(convolutional()), torch.rand(64, 3, 12, 12)
    for _ in range(4):
        adapter(images)
    return lambda: adapter(images)


def steady_filter() -> Callable[[], Any]:
    """A filter on a linear head."""
    filt = df.Filter(df.LinearHead(3), inference=df.Linearized(df.Hessian()))
    state, inputs = filt.init(df.Belief(torch.zeros(12), df.Full(torch.eye(12)))), torch.randn(8, 4)
    for _ in range(3):
        state, _, _ = filt.step(state, inputs)
    return lambda: filt.step(state, inputs)


def main() -> None:
    for folder in ("src", "tests"):
        print(f"{folder}: {statements(ROOT / folder):,} statements")
    for name, call in (("adapter(x)", steady_adapter()), ("Filter.step", steady_filter())):
        modules, crossings, depth = max(
            way(call) for _ in range(8)
        )  # some have the monitor's probe
        print(f"{name}: {modules} modules, {crossings} crossings, depth {depth}")


if __name__ == "__main__":
    main()

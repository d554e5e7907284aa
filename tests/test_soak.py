"""Some thousand steps, by the benchmark that takes a hundred thousand (benchmarks/soak.py)."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from soak import CASES, eigenvalues, live_tensors, vectors

WARM = 300


@pytest.mark.parametrize(("name", "steps", "within"), [("head", 2500, 1e-5), ("reverting", 1000, 1e-4)])
def test_memory_is_flat_and_float32_stays_with_float64(name: str, steps: int, within: float) -> None:
    single, double = (CASES[name].make(dtype) for dtype in (torch.float32, torch.float64))
    tracemalloc.start()
    try:
        for number, batch in enumerate(vectors(steps)):
            if number == WARM:
                tensors, (before, _) = live_tensors(), tracemalloc.get_traced_memory()
            found, exact = single.step(batch), double.step(batch)
            torch.testing.assert_close(found.double(), exact, rtol=0, atol=within)
            if number % 250 == 0:
                assert eigenvalues(single.belief())[0] > 0
        del batch, found, exact
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert live_tensors() <= tensors
    assert grown < 4 * (steps - WARM)  # bytes: less than a pointer a step

"""Some thousand steps, by the benchmark that takes a hundred thousand (benchmarks/soak.py)."""

import gc
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from soak import CASES, eigenvalues, live_tensors, vectors

pytestmark = pytest.mark.slow

WARM = 200


def live_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize(
    ("name", "steps", "within"), [("head", 1500, 1e-5), ("reverting", 600, 1e-4)]
)
def test_memory_is_flat_and_float32_stays_with_float64(
    name: str, steps: int, within: float
) -> None:
    single, double = (CASES[name].make(dtype) for dtype in (torch.float32, torch.float64))
    apart = torch.zeros(steps, dtype=torch.float64)
    for number, batch in enumerate(vectors(steps)):
        apart[number] = (single.step(batch).double() - double.step(batch)).abs().max()
        if number == WARM:
            tensors, objects = live_tensors(), live_objects()
        if number % 250 == 0:
            assert eigenvalues(single.belief())[0] > 0
    assert live_tensors() <= tensors + 2
    assert live_objects() < objects + (steps - WARM) // 10  # a leak would be of one a step or more
    assert 0 < apart.max() < within

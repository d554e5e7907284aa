"""The claims of the paper's examples, each with the bar its documentation states."""

from __future__ import annotations

import pytest
import torch

from driftfilter.app.paper.linear import Linear
from driftfilter.app.paper.trial import Scores, run_pairs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def linear() -> tuple[torch.Tensor, torch.Tensor]:
    frozen, adapted = run_pairs(Linear(), range(20))
    return torch.tensor(frozen), torch.tensor(adapted)


def column(scores: torch.Tensor, name: str) -> torch.Tensor:
    return scores[:, Scores._fields.index(name)]


def test_linear_example_follows_the_drift(linear: tuple[torch.Tensor, torch.Tensor]) -> None:
    frozen, adapted = linear
    assert column(adapted, "accuracy").mean() >= 0.97
    assert column(adapted, "end_accuracy").mean() >= 0.96
    assert column(adapted, "nll").mean() <= 0.09
    assert column(frozen, "accuracy").mean() == pytest.approx(0.75, abs=0.03)
    assert column(frozen, "end_accuracy").mean() == pytest.approx(0.51, abs=0.03)


def test_linear_example_never_collapses(linear: tuple[torch.Tensor, torch.Tensor]) -> None:
    _, adapted = linear
    assert column(adapted, "end_accuracy").min() > 0.9


def test_the_control_without_drift_stays_at_the_source() -> None:
    frozen, adapted = run_pairs(Linear(shift=0.0, steps=300), range(5))
    assert (
        column(torch.tensor(adapted), "accuracy").mean()
        >= column(torch.tensor(frozen), "accuracy").mean() - 0.005
    )


def test_a_run_is_determined_by_its_seed() -> None:
    example = Linear(steps=50, test_samples=100)
    assert run_pairs(example, [3]) == run_pairs(example, [3])
    assert run_pairs(example, [3]) != run_pairs(example, [4])

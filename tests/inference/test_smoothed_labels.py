"""Smoothed labels: the formulas against what smoothing does, written out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.inference.prediction import SMOOTHING
from driftfilter.inference.smoothed_labels import find_smoothing, unsmooth


def smoothed(p: Tensor, epsilon: float) -> Tensor:
    return (1 - epsilon) * p + epsilon / p.shape[-1]


def certain(n: int, k: int) -> Tensor:
    """One-hot p [n, k]."""
    return torch.eye(k, dtype=torch.float64)[torch.arange(n) % k]


@pytest.mark.parametrize("epsilon", [0.02, 0.1, 0.25])
def test_what_was_added_is_taken_off(epsilon: float) -> None:
    """Exactly, where no probability is below half of the floor."""
    p = torch.distributions.Dirichlet(torch.ones(6, dtype=torch.float64)).sample((200,))
    p = p[p.min(-1).values > epsilon / 6]
    found = unsmooth(smoothed(p, epsilon).log(), torch.tensor(epsilon, dtype=torch.float64))
    torch.testing.assert_close(found.exp(), p)


def test_below_the_floor_probabilities_go_to_0_smoothly_and_labels_stay() -> None:
    epsilon, k = torch.tensor(0.1, dtype=torch.float64), 10
    floor = float(epsilon) / k

    def ratio(s: Tensor) -> Tensor:
        """q(s) over q of a class with all the rest."""
        both = torch.stack((s, 1 - s, *[torch.full_like(s, 1e-9)] * (k - 2)), -1)
        found = unsmooth(both.log(), epsilon)
        return (found[:, 0] - found[:, 1]).exp() * (1 - s - floor)

    joint, step = torch.tensor([1.5 * floor], dtype=torch.float64), 1e-6 * floor
    values = [float(ratio(joint + move)) for move in (-2 * step, -step, 0, step, 2 * step)]
    assert values[2] == pytest.approx(floor / 2, rel=1e-9)
    slopes = (values[1] - values[0]) / step, (values[4] - values[3]) / step
    assert slopes == pytest.approx((1.0, 1.0), rel=1e-4)
    low = torch.linspace(1e-6, 3 * floor, 400, dtype=torch.float64)
    q = ratio(low)
    assert bool((q > 0).all() and (q.diff() > 0).all())
    logits = torch.randn(500, k, dtype=torch.float64).log_softmax(-1)
    assert torch.equal(unsmooth(logits, epsilon).argmax(-1), logits.argmax(-1))


@pytest.mark.parametrize("epsilon", [0.05, 0.1, 0.2])
def test_smoothing_is_found_without_labels(epsilon: float) -> None:
    """From noisy logits of a network that is sure of most samples, and unsure of some."""
    generator = torch.Generator().manual_seed(0)
    p = certain(4000, 10)
    unsure = torch.rand(4000, generator=generator) < 0.15
    p[unsure] = 0.5 * (p[unsure] + p[unsure].roll(1, 0))
    noise = 0.3 * torch.randn(4000, 10, dtype=torch.float64, generator=generator)
    found = float(find_smoothing(smoothed(p, epsilon).log() + noise))
    assert 0.8 * epsilon < found < 1.1 * epsilon
    exact = float(find_smoothing(smoothed(certain(40, 10), epsilon).log()))
    assert exact == pytest.approx(epsilon, rel=1e-9)
    half = find_smoothing(smoothed(certain(40, 10), epsilon).log().half())
    assert float(half) == pytest.approx(epsilon, rel=1e-2)
    assert half.dtype == torch.float32


def test_plain_labels_few_classes_and_doubt_are_not_taken_for_smoothing() -> None:
    generator = torch.Generator().manual_seed(1)
    plain = 4 * torch.randn(1000, 10, generator=generator)
    assert find_smoothing(plain) == 0
    assert find_smoothing(0.2 * plain) == 0  # unsure of everything
    assert find_smoothing(smoothed(certain(40, 4), 0.1).log()) == 0
    barred = smoothed(certain(40, 10), 0.1).log()
    barred[:, 3] = -torch.inf  # a class that is never given anything is above no floor
    assert find_smoothing(barred) == 0
    assert torch.isfinite(find_smoothing(torch.zeros(7, 10)))


def network() -> tuple[nn.Module, Tensor]:
    """A classifier that says (1 - ε) p + ε/k with ε = 0.1 of certain inputs, and its inputs."""
    norm, head = nn.LayerNorm(8), nn.Linear(8, 8)
    layers = nn.Sequential(norm, head).double().eval()
    inputs = torch.eye(8, dtype=torch.float64).repeat(8, 1)
    with torch.no_grad():
        outputs = norm(inputs[:8])
        wanted = smoothed(torch.eye(8, dtype=torch.float64), 0.1).log()
        head.weight.copy_((torch.linalg.pinv(outputs) @ wanted).T)
        head.bias.copy_((wanted - outputs @ head.weight.T).mean(0))
        torch.testing.assert_close(layers(inputs[:8]).log_softmax(-1), wanted)
    return layers, inputs


def test_an_adapter_with_source_data_predicts_without_the_smoothing(tmp_path: Path) -> None:
    model, inputs = network()
    options: dict[str, Any] = {"labels": None, "centering": None, "domains": None}
    options["norms"] = "other"
    plain = df.adapt(model, monitor=None, **options)
    adapter = df.adapt(model, data=inputs, monitor=None, **options)
    smoothing = adapter.state.memory[SMOOTHING]
    assert float(smoothing) == pytest.approx(0.1, rel=1e-6)
    assert SMOOTHING not in plain.state.memory
    found, other = adapter(inputs), plain(inputs)
    torch.testing.assert_close(found, unsmooth(other, smoothing))
    assert found.exp().max() > 0.98
    assert other.exp().max() < 0.92
    df.save(adapter, tmp_path / "state")
    again = df.adapt(model, data=inputs, monitor=None, **options)
    df.load(again, tmp_path / "state")
    assert torch.equal(
        again.predict(inputs).log_probabilities, adapter.predict(inputs).log_probabilities
    )
    adapter.reset()
    assert torch.equal(adapter.state.memory[SMOOTHING], smoothing)


@pytest.mark.parametrize("labelled", [True, False])
def test_an_estimate_does_not_count_the_smoothing_twice(labelled: bool) -> None:
    """Source data say how sure the source is: as it is after the correction."""
    model, inputs = network()
    options: dict[str, Any] = {"labels": None, "centering": None, "domains": None}
    options["norms"] = "other"
    data = (inputs, torch.arange(64) % 8) if labelled else inputs
    adapter = df.adapt(model, data=data, monitor=None, **options)
    adapter(inputs)
    calibration = adapter._now.expectation.source
    assert calibration is not None
    assert calibration.corrected
    found = adapter.estimate.accuracy
    assert found == pytest.approx(float(adapter(inputs).exp().amax(-1).mean()), abs=0.01)

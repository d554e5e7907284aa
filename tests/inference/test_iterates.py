"""Filters of the parameters that an optimiser proposes, step by step against other ways to write
them down, over streams longer than those of the presets.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

import driftfilter as df
import published.gradient_steps as by_hand
from driftfilter.base.randomness import Randomness
from driftfilter.model.observation import Energy
from oracles import array
from small import refuses

SOURCE = df.Belief(torch.linspace(-1, 1, 6).double(), df.Diagonal(torch.full((6,), 0.5).double()))
INPUTS = torch.tensor([[0.2, 1.0, -0.4], [-1.0, 0.3, 0.8], [0.5, 0.5, 0.1]]).double()
RANDOMNESS = Randomness(5, 0, torch.device("cpu"))


def energy_at(theta: Tensor) -> Energy:
    return df.Gibbs()(df.LinearHead(2), theta, INPUTS, {}, RANDOMNESS, SOURCE)[0]


def stream(
    upkeep: df.Upkeep, steps: list[Tensor], dtype: torch.dtype = torch.float64
) -> list[tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]]:
    """Parameters before a step, as proposed and afterwards, and the memory, of every step."""
    mean, found, memory = SOURCE.mean.to(dtype), [], dict[str, Tensor]()
    source = df.Belief(mean, df.Diagonal(torch.full((6,), 0.5, dtype=dtype)))
    for step in steps:
        energy = energy_at(mean.double())._replace(anchor=mean, source=source)
        proposed = df.Belief(mean + step.to(dtype), source.covariance)
        after, kept = upkeep(proposed, energy, memory, RANDOMNESS)
        assert after.covariance is proposed.covariance
        assert after.mean.dtype == dtype
        memory = dict(kept)
        found.append((mean, proposed.mean, after.mean, memory))
        mean = after.mean
    return found


def some_steps(count: int, scale: float = 0.1) -> list[Tensor]:
    """Steps of which every seventh is much longer than the others."""
    drawn = torch.randn(count, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    long = torch.where(torch.arange(count) % 7 == 6, 6.0, 1.0)
    return list(scale * (drawn + 0.5) * long.unsqueeze(1))


@pytest.mark.parametrize(
    ("process", "floor"), [(0.005, 0.89), (2000.0, 0.0), (5000.0, 0.6), (1e9, 0.3)]
)
def test_continual_momentum_is_its_kalman_filter(process: float, floor: float) -> None:
    """A Kalman filter of scalar variance that observes the proposal, with a floor on the prior's
    share, which is all of it from 0.9999 on.
    """
    rho, source = 0.8, array(SOURCE.mean)
    hidden, variance = source, 0.0
    q, gains = min(process * 6 / 38400, 1.0), []
    for _, proposal, after, memory in stream(
        df.ContinualMomentum(rho, process, floor), some_steps(4, 0.5)
    ):
        proposed = array(proposal)
        hidden, variance = rho * hidden + (1 - rho) * source, rho**2 * variance + q
        gain = min(variance / (variance + 1 - q), 1 - floor)  # 1 - b
        gain = gain if gain > 1e-4 else 0.0
        gains.append(gain)
        hidden, variance = hidden + gain * (proposed - hidden), (1 - gain) * variance
        np.testing.assert_allclose(array(after), rho * proposed + (1 - rho) * hidden, rtol=1e-12)
        np.testing.assert_allclose(array(memory["upkeep.hidden"]), hidden, rtol=1e-12)
        np.testing.assert_allclose(memory["upkeep.variance"].item(), variance, rtol=1e-12)
    assert (gains[-1] == 1 - floor) is (process > 2000)  # both sides of the floor
    assert (gains[-1] == 0) is (process < 1)


@pytest.mark.parametrize("process", [0.5, 2000.0])
@pytest.mark.parametrize(("limit", "cut"), [(2.0, 2.0), (1.0, 5.0), (2.0, 1.0)])
def test_latent_weights_cut_steps_that_their_density_does_not_expect(
    process: float, limit: float, cut: float
) -> None:
    plain = by_hand.LatentFilter(0.9, process, 0.8, limit, cut)
    found = stream(df.LatentWeights(0.9, process, 0.8, limit, cut), some_steps(40))
    for before, proposed, after, memory in found:
        torch.testing.assert_close(
            after, plain(before, proposed, SOURCE.mean), rtol=1e-10, atol=1e-12
        )
        torch.testing.assert_close(memory["upkeep.hidden"], plain.hidden, rtol=1e-10, atol=1e-12)
        assert memory["upkeep.variance"].item() == pytest.approx(plain.variance, rel=1e-10)
    assert 2 < sum(plain.surprises) < 20
    assert not any(plain.surprises[:2])


def test_latent_weights_that_are_never_surprised_are_a_kalman_filter() -> None:
    """Dense: N(φ; μ, P I) predicted and updated by the proposal, in matrices."""
    rho, process, q = 0.9, 3000.0, 3000.0 * 6 / 38400
    mean, covariance, eye = array(SOURCE.mean), np.zeros((6, 6)), np.eye(6)
    for _, proposal, after, memory in stream(
        df.LatentWeights(rho, process, gain=1.0, limit=1e9), some_steps(12)
    ):
        mean = rho * mean + (1 - rho) * array(SOURCE.mean)
        covariance = rho**2 * covariance + q * eye
        gain = covariance @ np.linalg.inv(covariance + (1 - q) * eye)
        mean, covariance = mean + gain @ (array(proposal) - mean), (eye - gain) @ covariance
        np.testing.assert_allclose(array(memory["upkeep.hidden"]), mean, rtol=1e-12)
        np.testing.assert_allclose(
            memory["upkeep.variance"].item() * eye, covariance, rtol=1e-12, atol=1e-15
        )
        np.testing.assert_allclose(array(after), array(proposal), rtol=1e-12)


@pytest.mark.parametrize("moves", [1, 5])
@pytest.mark.parametrize("variance", [1e-4, 1e-2, 1.0])
def test_a_steady_state_scales_steps_by_the_variance_of_moves(moves: int, variance: float) -> None:
    plain = by_hand.SteadyFilter(variance, moves, 0.9, 0.7, 0.2)
    found = stream(df.SteadyState(variance, moves, 0.9, 0.7, 0.2), some_steps(60))
    for before, proposed, after, _ in found:
        torch.testing.assert_close(
            after, plain(before, proposed, SOURCE.mean), rtol=1e-9, atol=1e-12
        )
    assert plain.sizes[: moves + 1] == [1.0] * (moves + 1)
    assert plain.steady is (variance < 1)


@pytest.mark.parametrize("upkeep", [df.LatentWeights(), df.SteadyState(moves=2)])
def test_single_precision_and_steps_of_nothing(upkeep: df.Upkeep) -> None:
    nothing = [torch.zeros(6)] * 4
    for _, _, after, _ in stream(upkeep, [*nothing, *some_steps(4), *nothing], torch.float32):
        assert after.isfinite().all()


test_refusals = refuses(
    [
        (
            lambda: df.ContinualMomentum(rho=2.0),
            r"ContinualMomentum.rho must be a finite number in \[0, 1\], got 2.0",
        ),
        (
            lambda: df.ContinualMomentum(process=-1.0),
            "ContinualMomentum.process must be a finite number.*got -1.0",
        ),
        (
            lambda: df.ContinualMomentum(floor=1.1),
            r"ContinualMomentum.floor must be a finite number in \[0, 1\], got 1.1",
        ),
        (lambda: df.LatentWeights(cut=0.5), "LatentWeights.cut must be a finite number.*got 0.5"),
        (lambda: df.LatentWeights(limit=0.0), "LatentWeights.limit must be .*got 0.0"),
        (lambda: df.SteadyState(moves=0), "SteadyState.moves must be an integer >= 1, got 0"),
        (lambda: df.SteadyState(variance=0.0), "SteadyState.variance must be .*got 0.0"),
    ]
)

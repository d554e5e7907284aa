"""The uncertainty of each sample, against enumeration, quadrature and dense algebra."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

import driftfilter as df
from driftfilter.inference.prediction import join_predictions
from driftfilter.model.predictive import logit_covariance
from driftfilter.networks.network import Network

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.1, 0.0, 0.2], [5.0, -3.0, 0.0]], dtype=torch.float64)


def entropy(p: Tensor) -> Tensor:
    return -torch.xlogy(p, p).sum(-1)


def quadrature(logits: Tensor, variance: float, degree: int = 12) -> tuple[Tensor, Tensor]:
    """E p [n, k] and E H(p) [n] for independent Gaussian logits, by a grid of Gauss-Hermite."""
    points, weights = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(degree))
    weights = weights / weights.sum()
    mean, inside = torch.zeros_like(logits), torch.zeros(len(logits), dtype=torch.float64)
    for place in product(range(degree), repeat=logits.shape[1]):
        at = list(place)
        p = (logits + variance**0.5 * points[at]).softmax(-1)
        weight = weights[at].prod()
        mean, inside = mean + weight * p, inside + weight * entropy(p)
    return mean, inside


def test_entropy_is_that_of_the_probabilities() -> None:
    found = df.Prediction(LOGITS.log_softmax(-1), torch.zeros_like(LOGITS))
    torch.testing.assert_close(found.entropy, entropy(LOGITS.softmax(-1)))
    certain = df.Prediction(torch.eye(2).log(), torch.zeros(2, 2))
    assert certain.entropy.tolist() == [0, 0]
    assert certain.mutual_information.tolist() == [0, 0]


@pytest.mark.parametrize("variance", [1e-3, 1e-2])
def test_mutual_information_is_right_to_second_order(variance: float) -> None:
    mean, inside = quadrature(LOGITS, variance)
    found = df.Prediction(LOGITS.log_softmax(-1), torch.full_like(LOGITS, variance))
    exact = entropy(mean) - inside
    torch.testing.assert_close(found.mutual_information, exact, rtol=10 * variance, atol=1e-9)


def test_mutual_information_is_at_most_the_entropy() -> None:
    found = df.Prediction(LOGITS.log_softmax(-1), torch.full_like(LOGITS, 1e6))
    assert torch.equal(found.mutual_information, found.entropy)


@pytest.mark.parametrize("rule", [df.LinearizedGaussian(400), df.MonteCarlo(400)])
def test_mutual_information_by_draws_is_that_of_enumeration(rule: df.PredictionRule) -> None:
    filt = df.Filter(df.LinearHead(3), prediction=rule)
    inputs = torch.tensor([[1.0, 0.5], [0.0, 0.0], [-2.0, 1.0]], dtype=torch.float64)
    mean = torch.tensor([1.0, 0, 0, 0.5, -1.0, 0.2], dtype=torch.float64)
    state = filt.init(df.Belief(mean, df.Diagonal(torch.full((6,), 0.3, dtype=torch.float64))))
    found = filt.predict(state, inputs)
    draws = mean + 0.3**0.5 * torch.randn(
        100_000, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    p = torch.einsum("nd,skd->snk", inputs, draws.reshape(-1, 3, 2)).softmax(-1)
    exact = entropy(p.mean(0)) - entropy(p).mean(0)
    torch.testing.assert_close(found.mutual_information, exact, atol=0.02, rtol=0.15)
    assert exact[1] == pytest.approx(0)  # features of 0: no parameter matters
    assert found.mutual_information[1] < 1e-12
    assert found.expected_entropy is not None


def test_accepted_samples_are_the_largest_set_of_that_risk() -> None:
    generator = torch.Generator().manual_seed(0)
    for risk in (0.0, 0.05, 0.2, 0.4, 1.0):
        logp = (2 * torch.randn(9, 3, generator=generator)).log_softmax(-1)
        found = df.Prediction(logp, torch.zeros_like(logp)).accept(risk)
        doubt = (1 - logp.exp().amax(-1).double()).tolist()
        sizes = [
            sum(chosen)
            for chosen in product((0, 1), repeat=9)
            if sum(chosen) == 0
            or sum(d for d, c in zip(doubt, chosen, strict=True) if c) <= risk * sum(chosen)
        ]
        assert int(found.sum()) == max(sizes)
        kept = [d for d, c in zip(doubt, found.tolist(), strict=True) if c]
        assert sum(kept) <= risk * len(kept) + 1e-12
        left = [d for d, c in zip(doubt, found.tolist(), strict=True) if not c]
        assert max(kept, default=0) <= min(left, default=1)


@pytest.mark.parametrize("risk", [-0.1, 1.1, float("nan"), "0.1"])
def test_risk_is_a_share(risk: float) -> None:
    with pytest.raises(ValueError, match="risk"):
        df.Prediction(LOGITS.log_softmax(-1), torch.zeros_like(LOGITS)).accept(risk)


def small(norm: str) -> torch.nn.Module:
    torch.manual_seed(2)
    layer = {"batch": torch.nn.BatchNorm1d(6), "layer": torch.nn.LayerNorm(6)}[norm]
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 6), layer, torch.nn.Tanh(), torch.nn.Linear(6, 3)
    )
    return model.double().eval()


def dense(network: Network, mean: Tensor, values: Tensor, x: Tensor) -> Tensor:
    """J_i Σ J_iᵀ [n, k, k] by one backward pass after the other."""
    logits, pullback = network.exact.pullback(mean, x)
    return logit_covariance(df.Diagonal(values), logits, pullback)


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_variance_of_each_sample_is_that_of_the_jacobian(norm: str) -> None:
    network = Network(small(norm))
    filt = df.Filter(network)
    values = torch.linspace(0.1, 1.0, 12, dtype=torch.float64)
    state = filt.init(df.Belief(network.mean(), df.Diagonal(values)))
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = filt.uncertainty(state, x, draws=4000)
    exact = dense(network, state.belief.mean, values, x).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(found.logit_variance, exact, rtol=0.12, atol=1e-6)
    assert found.mutual_information.unique().numel() == 7  # of each sample, not of the batch


@pytest.mark.parametrize("variance", [None, 0.2])
def test_moderated_shares_out_the_variance_of_the_batch(variance: float | None) -> None:
    network, rule = Network(small("batch")), df.Moderated(scale=0.3, variance=variance)
    filt = df.Filter(network, prediction=rule, inference=df.Linearized(df.EmpiricalFisher()))
    values = torch.linspace(0.1, 1.0, 12, dtype=torch.float64)
    state = filt.init(df.Belief(network.mean(), df.Diagonal(values)))
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    before = filt.uncertainty(state, x)
    assert float(before.logit_variance.max()) == 0  # nothing is known of its size yet
    state, _, _ = filt.step(state, x)
    found, plain = filt.uncertainty(state, x, draws=4000), filt.predict(state, x)
    v = float(plain.logit_variance[0, 0])
    assert v > 0
    assert float(found.logit_variance.mean()) == pytest.approx(v)
    belief = state.belief.covariance.variance()
    used = belief if variance is None else torch.full_like(belief, variance)
    centre = torch.eye(3, dtype=torch.float64) - 1 / 3
    covariance = centre @ dense(network, state.belief.mean, used, x) @ centre
    exact = covariance.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(found.logit_variance, v * exact / exact.mean(), rtol=0.15, atol=1e-4)
    logits = network(state.belief.mean, x)
    cooled = logits / (1 + torch.pi / 4 * found.logit_variance.mean(-1, keepdim=True)).sqrt()
    torch.testing.assert_close(found.log_probabilities, cooled.log_softmax(-1))
    assert torch.equal(found.labels, plain.labels)


def test_moderated_of_each_sample_keeps_to_its_limit() -> None:
    network, rule = Network(small("batch")), df.Moderated(scale=1e6, limit=1.5)
    filt = df.Filter(network, prediction=rule, inference=df.Linearized(df.EmpiricalFisher()))
    start = df.Belief(network.mean(), df.Diagonal(torch.ones(12, dtype=torch.float64)))
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    state, _, _ = filt.step(filt.init(start), x)
    logits, found = network(state.belief.mean, x), filt.uncertainty(state, x)
    gaps = [each.amax(-1) - each.amin(-1) for each in (logits, found.log_probabilities)]
    assert float((gaps[0] / gaps[1]).max()) <= 1.5 + 1e-9


@pytest.mark.parametrize("preset", ["center", "driftfilter_aug", "head_ekf", "bong_lowrank"])
def test_every_kind_of_belief_tells(preset: str) -> None:
    adapter = df.adapt(df_images(), preset)
    x = torch.rand(20, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    adapter(x)
    found = adapter.uncertainty(x)
    assert bool(found.mutual_information.isfinite().all())
    assert bool((found.mutual_information >= 0).all())


def df_images() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = (torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
    return torch.nn.Sequential(
        *layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(4, 3)
    ).eval()


def test_adapter_tells_the_uncertainty_of_each_sample_and_stays_as_it_is() -> None:
    model, x = small("batch").float(), torch.randn(2, 64, 4)
    adapter = df.adapt(model)
    adapter(x[0])
    before = {name: value.clone() for name, value in adapter.state_dict().items()}
    found = adapter.uncertainty(x[1], draws=4)
    assert found.log_probabilities.shape == (64, 3)
    assert len(found.mutual_information.unique()) > 32
    assert len(adapter.predict(x[1]).logit_variance.unique()) == 1
    again = adapter.uncertainty(x[1], draws=4)
    assert torch.equal(found.log_probabilities, again.log_probabilities)
    after = adapter.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    with pytest.raises(ValueError, match="draws"):
        adapter.uncertainty(x[1], draws=0)


def test_point_mass_has_no_uncertainty() -> None:
    adapter = df.adapt(small("batch").float(), "tent")
    adapter(torch.randn(32, 4))
    assert float(adapter.uncertainty(torch.randn(8, 4)).logit_variance.max()) == 0


def test_joined_predictions_keep_what_they_know() -> None:
    made = df.Prediction(LOGITS.log_softmax(-1), LOGITS.square(), torch.arange(3.0))
    joined = join_predictions([made.pick(slice(0, 1)), made.pick(slice(1, 3))])
    assert joined.expected_entropy is not None
    assert torch.equal(joined.expected_entropy, torch.arange(3.0))
    assert torch.equal(joined.log_probabilities, made.log_probabilities)
    plain = df.Prediction(LOGITS.log_softmax(-1), LOGITS.square())
    assert join_predictions([made, plain]).expected_entropy is None

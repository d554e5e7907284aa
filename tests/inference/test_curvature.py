"""Curvature factors against brute force: autograd Jacobians, one sample and one view at a time,
clipped in NumPy.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from driftfilter import (
    VARIANTS,
    Consistency,
    Constant,
    Entropy,
    EntropyGate,
    GaussianNoise,
    GeneralizedCrossEntropy,
    InformationMaximization,
    Loss,
    MarginalEntropy,
    MarginalLikelihood,
    Product,
    PseudoLabel,
    Reliability,
    SoftLikelihoodRatio,
    Sum,
    Weighting,
)
from driftfilter.base.randomness import Randomness
from driftfilter.inference.curvature import (
    Curvature,
    EmpiricalFisher,
    GaussNewton,
    Hessian,
    LogitMetric,
    NoCurvature,
)
from driftfilter.model.expansion import Expansion
from driftfilter.model.observation import Energy, Gibbs
from driftfilter.model.predictive import Lifted, LinearHead, PredictiveModel, ReadOut
from small import normal, perceptron, refuses

MODELS: dict[str, tuple[PredictiveModel, int]] = {
    "head": (LinearHead(3), 6),
    "logistic": (LinearHead(2, intercept=True), 3),
    "network": (Lifted(perceptron), 15),
    "read-out": (ReadOut(Lifted(perceptron), normal(15, 18, seed=7) / 8), 18),
}
WEIGHTING = Product((Reliability(3.0), EntropyGate(0.8)))  # all weights differ, some are 0


def for_every_energy(test: Callable[..., None]) -> Callable[..., None]:
    for_losses: Callable[..., None] = pytest.mark.parametrize(
        "loss",
        [
            Entropy(),
            SoftLikelihoodRatio(),
            PseudoLabel(threshold=0.5),
            InformationMaximization(),
            GeneralizedCrossEntropy(),
            MarginalLikelihood(),
            Consistency(GaussianNoise(0.5), copies=2),
            MarginalEntropy(GaussianNoise(0.5), copies=3),
            Sum(
                (
                    Entropy(),
                    Consistency(GaussianNoise(0.5), target="soft"),
                    MarginalEntropy(copies=2),
                ),
                (0.5, 2.0, 1.5),
            ),
        ],
        ids=lambda loss: type(loss).__name__,
    )(test)
    for_both: Callable[..., None] = pytest.mark.parametrize(
        ("model", "d"), MODELS.values(), ids=MODELS.keys()
    )(for_losses)
    return for_both


def energy_of(
    model: PredictiveModel, d: int, loss: Loss, weighting: Weighting = WEIGHTING
) -> Energy:
    theta, inputs = normal(d, seed=1), 3 * normal(6, 2, seed=2)
    return Gibbs(loss, weighting)(model, theta, inputs, {}, Randomness(0, 0, torch.device("cpu")))[
        0
    ]


def jacobians(energy: Energy) -> Tensor:
    """[v, n, k, d], one backward pass a number."""
    blocks = []
    for view in energy.views:
        leaf = energy.anchor.clone().requires_grad_()
        logits = energy.model(leaf, view)
        rows = [
            torch.autograd.grad(value, leaf, retain_graph=True, materialize_grads=True)[0]
            for value in logits.flatten()
        ]
        blocks.append(torch.stack(rows).reshape(*logits.shape, -1))
    return torch.stack(blocks)


def clipped(matrix: Tensor) -> Tensor:
    values, vectors = np.linalg.eigh(matrix.numpy())
    return torch.tensor(vectors @ np.diag(np.maximum(values, 0)) @ vectors.T)


def brute_force(energy: Energy, metric: Callable[[int, int], Tensor]) -> Tensor:
    """Σ_i a_i Σ_v J_ivᵀ M_iv J_iv."""
    j, a = jacobians(energy), energy.samples.coefficients
    total = torch.zeros(j.shape[-1], j.shape[-1], dtype=torch.float64)
    for v in range(j.shape[0]):
        for i in range(j.shape[1]):
            total += a[i] * j[v, i].mT @ metric(v, i) @ j[v, i]
    return total


def assert_curvature(curvature: Curvature, energy: Energy, exact: Tensor) -> None:
    """g = Σ a_i J_iᵀ ∇ℓ_i and FᵀF = the matrix given."""
    gradient, factor = curvature(energy.evaluation)
    expected = torch.einsum(
        "n,vnk,vnkd->d",
        energy.samples.coefficients,
        energy.evaluation.expansion.gradient,
        jacobians(energy),
    )
    torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-12)
    assert factor.shape[1] == len(gradient)
    torch.testing.assert_close(factor.mT @ factor, exact, rtol=1e-10, atol=1e-12)


# ------------------------------------------------------------------ each curvature by brute force


@for_every_energy
def test_hessian(model: PredictiveModel, d: int, loss: Loss) -> None:
    energy = energy_of(model, d, loss)
    hessian = energy.evaluation.expansion.hessian()
    assert_curvature(Hessian(), energy, brute_force(energy, lambda v, i: clipped(hessian[v, i])))


@for_every_energy
def test_gauss_newton(model: PredictiveModel, d: int, loss: Loss) -> None:
    """With the softmax metric of every view, as much of it as the view counts in the loss."""
    energy = energy_of(model, d, loss)
    shares = energy.evaluation.expansion.shares
    assert len(shares) == len(energy.views)

    def metric(v: int, i: int) -> Tensor:
        p, share = energy.evaluation.logits[v, i].softmax(-1), shares[v]
        return (share if isinstance(share, float) else share[i]) * (
            torch.diag(p) - torch.outer(p, p)
        )

    assert_curvature(GaussNewton(), energy, brute_force(energy, metric))


@for_every_energy
@pytest.mark.parametrize("centered", [True, False])
def test_empirical_fisher(model: PredictiveModel, d: int, loss: Loss, centered: bool) -> None:
    """λ² Σ a_i (g_i - ḡ)(g_i - ḡ)ᵀ, g_i summed over the views of a sample; uncentred it is that
    plus (Σ a) λ² ḡ ḡᵀ.
    """
    energy, scale = energy_of(model, d, loss), 1.7
    rows = torch.einsum("vnk,vnkd->nd", energy.evaluation.expansion.gradient, jacobians(energy))
    a = energy.samples.coefficients
    mean = (
        sum((a[i] * rows[i] for i in range(len(a))), torch.zeros(d, dtype=torch.float64)) / a.sum()
    )
    exact = torch.zeros(d, d, dtype=torch.float64)
    for i in range(len(a)):
        exact += scale**2 * a[i] * torch.outer(rows[i] - mean, rows[i] - mean)
    if not centered:
        exact += scale**2 * a.sum() * torch.outer(mean, mean)
    assert_curvature(EmpiricalFisher(centered, scale), energy, exact)


@for_every_energy
def test_no_curvature(model: PredictiveModel, d: int, loss: Loss) -> None:
    energy = energy_of(model, d, loss)
    assert_curvature(NoCurvature(), energy, torch.zeros(d, d, dtype=torch.float64))
    assert NoCurvature()(energy.evaluation)[1].shape == (0, d)


# ------------------------------------------------------------------ closed forms and limits


def test_the_fisher_with_unit_weights_is_the_centred_one_plus_the_mean_gradient() -> None:
    energy = energy_of(LinearHead(3), 6, Entropy(), Constant(1.0))
    (gradient, whole), (_, centred) = (
        EmpiricalFisher(centered)(energy.evaluation) for centered in (False, True)
    )
    torch.testing.assert_close(
        whole.mT @ whole,
        centred.mT @ centred + torch.outer(gradient, gradient),
        rtol=1e-12,
        atol=1e-14,
    )


@pytest.mark.parametrize("beta", [1.0, 0.3, 7.0])
@pytest.mark.parametrize("name", ["head", "network", "read-out"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_centred_fisher_of_one_sample_is_exactly_zero(
    beta: float, name: str, dtype: torch.dtype
) -> None:
    model, d = MODELS[name]
    if isinstance(model, ReadOut):
        model = ReadOut(model.model, model.matrix.to(dtype))
    theta, inputs = normal(d).to(dtype), normal(1, 2, seed=2).to(dtype)
    energy = Gibbs(Entropy(), Constant(beta))(
        model, theta, inputs, {}, Randomness(0, 0, torch.device("cpu"))
    )[0]
    gradient, factor = EmpiricalFisher()(energy.evaluation)
    assert factor.abs().max() == 0
    torch.testing.assert_close(gradient, energy.evaluation.gradient())
    assert EmpiricalFisher(centered=False)(energy.evaluation)[1].abs().max() > 0
    assert (
        EmpiricalFisher().minimum,
        EmpiricalFisher(centered=False).minimum,
        Hessian().minimum,
    ) == (2, 1, 1)


def test_one_sample_with_a_weight_among_others_carries_no_centred_fisher_either() -> None:
    inputs = torch.tensor([[7.0, 5.0], [0.1, 0.0], [0.0, 0.2]], dtype=torch.float64)
    energy = Gibbs(Entropy(), EntropyGate(0.5, beta=0.3))(
        LinearHead(2),
        torch.ones(2, dtype=torch.float64),
        inputs,
        {},
        Randomness(0, 0, torch.device("cpu")),
    )[0]
    assert energy.samples.used == 1
    assert EmpiricalFisher()(energy.evaluation)[1].abs().max() < 1e-15


@pytest.mark.parametrize("f", [0.0, 1.0, 1.54, 1.55, 3.0, -3.0, 30.0, -30.0])
def test_hessian_of_binary_entropy(f: float) -> None:
    """ℓ'' = -s (1 + f (1 - 2p)), s = p (1 - p), or 0 where that is negative: |f| < 1.5434."""
    theta, inputs = (
        torch.tensor([f / 2], dtype=torch.float64),
        torch.tensor([[2.0]], dtype=torch.float64),
    )
    energy = Gibbs(Entropy(), Constant(3.0))(
        LinearHead(2), theta, inputs, {}, Randomness(0, 0, torch.device("cpu"))
    )[0]
    p, q = 1 / (1 + math.exp(-f)), 1 / (1 + math.exp(f))
    second = -p * q * (1 + f * (q - p))
    gradient, factor = Hessian()(energy.evaluation)
    assert (second < 0) == (abs(f) < 1.5434)
    assert (factor.mT @ factor).item() == pytest.approx(
        3.0 * 2.0**2 * max(second, 0.0), rel=1e-11, abs=1e-14
    )
    assert gradient.item() == pytest.approx(3.0 * 2.0 * -f * p * q, rel=1e-12, abs=1e-16)


def test_gauss_newton_is_the_hessian_of_cross_entropy() -> None:
    for name in MODELS:
        energy = energy_of(*MODELS[name], PseudoLabel(), Reliability())
        (_, one), (_, other) = Hessian()(energy.evaluation), GaussNewton()(energy.evaluation)
        torch.testing.assert_close(one.mT @ one, other.mT @ other, rtol=1e-11, atol=1e-13)


def test_a_concave_loss_has_no_positive_curvature() -> None:
    energy = energy_of(*MODELS["head"], MarginalLikelihood(), Constant())
    _, factor = Hessian()(energy.evaluation)
    assert (factor.mT @ factor).abs().max() < 1e-14


def test_roots_of_leading_dimensions_are_a_loop() -> None:
    """As quadrature over the logits needs them, [v, m, n, k]."""
    loss = Sum((Entropy(), Consistency(copies=2)))
    evaluation = energy_of(*MODELS["head"], loss, Constant()).evaluation
    logits, targets = normal(3, 4, 6, 3), loss.targets(normal(6, 3, seed=1))

    def at(points: Tensor) -> tuple[Tensor, Expansion]:
        return points, loss.expand(points, targets, torch.ones(6))

    for curvature in (Hessian(), GaussNewton()):
        assert isinstance(curvature, LogitMetric)
        points, expansion = at(logits)
        roots = curvature.roots(replace(evaluation, expansion=expansion, logits=points))
        for m in range(4):
            points, expansion = at(logits[:, m])
            alone = curvature.roots(replace(evaluation, expansion=expansion, logits=points))
            torch.testing.assert_close(roots[:, m] @ roots[:, m].mT, alone @ alone.mT)
    assert not isinstance(EmpiricalFisher(), LogitMetric)
    assert not isinstance(NoCurvature(), LogitMetric)


# ------------------------------------------------------------------ always finite, always positive
# semi-definite

CURVATURES: list[Curvature] = [
    *(cls() for cls in VARIANTS["curvature"].values()),
    EmpiricalFisher(centered=False),
]
numbers = st.one_of(
    st.floats(-5, 5), st.sampled_from([0.0, 50.0, -50.0, 200.0, -200.0, 1e4, 1e5, -1e30, 1e30])
)
logit_rows = st.integers(2, 4).flatmap(
    lambda k: st.lists(st.lists(numbers, min_size=k, max_size=k), min_size=1, max_size=4)
)


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(rows=logit_rows, double=st.booleans())
def test_factors_are_finite_and_positive_semi_definite_for_any_logits(
    rows: list[list[float]], double: bool
) -> None:
    """θ are the logits themselves, so that FᵀF is the curvature in logit space."""
    theta = torch.tensor(rows, dtype=torch.float64 if double else torch.float32)
    n, k = theta.shape
    model = Lifted(lambda t, x: x @ t.view(n, k))
    for loss in (cls() for cls in VARIANTS["loss"].values()):
        if loss.sees_features or loss.needs_source:
            continue  # a plain function has none
        for weighting in (Constant(), EntropyGate()):
            inputs = torch.eye(n, dtype=theta.dtype)
            energy = Gibbs(loss, weighting)(
                model, theta.flatten(), inputs, {}, Randomness(0, 0, torch.device("cpu"))
            )[0]
            for curvature in CURVATURES:
                gradient, factor = curvature(energy.evaluation)
                assert torch.cat((gradient, factor.flatten())).isfinite().all()
                matrix = (factor.mT @ factor).double()
                assert torch.linalg.eigvalsh(matrix).min() >= -1e-6 * max(
                    1.0, matrix.abs().max().item()
                )


test_refusals_name_field_value_and_range = refuses(
    [
        (
            lambda: EmpiricalFisher(scale=0.0),
            r"EmpiricalFisher.scale must be a finite number in \(0, inf\), got 0.0",
        ),
        (
            lambda: EmpiricalFisher(scale=math.inf),
            r"EmpiricalFisher.scale must be a finite number in \(0, inf\), got inf",
        ),
        (
            lambda: EmpiricalFisher(centered="false"),  # type: ignore[arg-type]
            "EmpiricalFisher.centered must be True or False, got 'false'",
        ),
    ]
)

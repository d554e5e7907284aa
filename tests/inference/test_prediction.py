"""Prediction rules against the predictive integral by quadrature, J Σ Jᵀ by dense algebra and
closed formulas.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import driftfilter as df
from driftfilter.base.randomness import Randomness
from driftfilter.inference.prediction import PredictionRule, Query
from driftfilter.model.predictive import (
    Lifted,
    LogitFunction,
    PredictiveModel,
    Pullback,
    PullbackAround,
    ReadOut,
    lift,
)
from small import refuses

RANDOMNESS = Randomness(3, 0, torch.device("cpu"))
MEAN = torch.tensor([0.9, -0.4], dtype=torch.float64)
MATRIX = torch.tensor([[1.5, 0.6], [0.6, 0.8]], dtype=torch.float64)
INPUTS = torch.tensor([[1.0, 0.5], [-0.7, 1.6], [2.0, -1.5]], dtype=torch.float64)

STRUCTURES: dict[str, Callable[[], df.Covariance]] = {
    "full": lambda: df.Full(MATRIX),
    "diagonal": lambda: df.Diagonal(MATRIX.diagonal().clone()),
    "low rank": lambda: df.LowRank(
        torch.tensor([0.5, 0.9], dtype=torch.float64), MATRIX[:1], rank=2
    ),
    "blocks": lambda: df.Blocks((df.Diagonal(MATRIX[0, :1]), df.Full(MATRIX[1:, 1:]))),
}


def predict(
    rule: PredictionRule,
    covariance: df.Covariance,
    logits: LogitFunction | PredictiveModel,
    x: Tensor,
) -> df.Prediction:
    mean = (
        MEAN
        if covariance.dimension == 2
        else torch.cat((MEAN, torch.zeros(2, dtype=torch.float64)))
    )
    return rule(df.Belief(mean, covariance), Query(lift(logits), x, RANDOMNESS))


def binary(theta: Tensor, inputs: Tensor) -> Tensor:
    """Two features, the logit of class 0 fixed at 0: θ in 2-D."""
    score = inputs @ theta
    return torch.stack((torch.zeros_like(score), score), -1)


def three_classes(theta: Tensor, inputs: Tensor) -> Tensor:
    """One feature, the logit of class 0 fixed at 0: θ in 2-D."""
    scores = inputs[:, :1] * theta
    return torch.cat((torch.zeros_like(scores[:, :1]), scores), -1)


def curved(theta: Tensor, inputs: Tensor) -> Tensor:
    """Nonlinear in θ, three classes."""
    return torch.stack(
        (
            torch.tanh(inputs @ theta),
            theta[0] * theta[1] + inputs[:, 0],
            torch.sin(inputs[:, 1] * theta[1]),
        ),
        -1,
    )


LINEAR = pytest.mark.parametrize(
    ("head", "plain", "inputs"),
    [(df.LinearHead(2), binary, INPUTS), (df.LinearHead(3), three_classes, INPUTS[:, :1])],
    ids=["2 classes", "3 classes"],
)


def grid(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Trapezoid rule for N(MEAN, matrix): points [m, 2] and weights [m]."""
    line = torch.linspace(-8, 8, 121, dtype=torch.float64)
    points = torch.cartesian_prod(line, line)
    return MEAN + points @ torch.linalg.cholesky(matrix).mT, torch.softmax(
        -points.square().sum(-1) / 2, 0
    )


def integral(plain: LogitFunction, matrix: Tensor, inputs: Tensor) -> Tensor:
    """∫ softmax f(θ) N(θ) dθ [n, k]."""
    theta, weights = grid(matrix)
    return torch.einsum(
        "m,mnk->nk", weights, torch.func.vmap(plain, (0, None))(theta, inputs).softmax(-1)
    )


def logit_covariance(plain: LogitFunction, matrix: Tensor, inputs: Tensor) -> Tensor:
    """J Σ Jᵀ [n, k, k]."""
    J: Tensor = torch.func.jacrev(plain)(MEAN, inputs)
    return J @ matrix @ J.mT


def assert_normalized(prediction: df.Prediction) -> None:
    total = prediction.probabilities.sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-12)
    assert torch.equal(prediction.labels, prediction.probabilities.argmax(-1))


@LINEAR
def test_map_is_the_softmax_at_the_mean(
    head: df.LinearHead, plain: LogitFunction, inputs: Tensor
) -> None:
    prediction = predict(df.MAP(), df.Full(MATRIX), head, inputs)
    torch.testing.assert_close(
        prediction.probabilities, plain(MEAN, inputs).softmax(-1), rtol=0, atol=1e-14
    )
    assert torch.equal(prediction.logit_variance, torch.zeros_like(prediction.probabilities))
    assert_normalized(prediction)


@LINEAR
@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(df.MonteCarlo(samples=20_000), marks=pytest.mark.slow),
        df.LinearizedGaussian(samples=20_000),
    ],
    ids=repr,
)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_draws_integrate_the_predictive(
    structure: str, rule: PredictionRule, head: df.LinearHead, plain: LogitFunction, inputs: Tensor
) -> None:
    covariance = STRUCTURES[structure]()
    prediction = predict(rule, covariance, head, inputs)
    exact = integral(plain, covariance.dense(), inputs)
    # Probabilities of 10,000 antithetic pairs: a standard error below 0.5 / √10,000 each.
    torch.testing.assert_close(
        prediction.probabilities, exact, rtol=0, atol=5 * 0.5 / math.sqrt(10_000)
    )
    assert (exact - plain(MEAN, inputs).softmax(-1)).abs().max() > 0.08
    variance = logit_covariance(plain, covariance.dense(), inputs).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(
        prediction.logit_variance, variance, rtol=5 * math.sqrt(2 / 10_000), atol=1e-12
    )
    assert_normalized(prediction)


@pytest.mark.slow
def test_monte_carlo_of_a_curved_model() -> None:
    prediction = predict(df.MonteCarlo(samples=10_000), df.Full(MATRIX), curved, INPUTS)
    torch.testing.assert_close(
        prediction.probabilities, integral(curved, MATRIX, INPUTS), rtol=0, atol=0.02
    )
    theta, weights = grid(MATRIX)
    logits = torch.func.vmap(curved, (0, None))(theta, INPUTS)
    mean = torch.einsum("m,mnk->nk", weights, logits)
    variance = torch.einsum("m,mnk->nk", weights, (logits - mean).square())
    torch.testing.assert_close(prediction.logit_variance, variance, rtol=0.1, atol=1e-12)


def test_linearized_gaussian_of_a_curved_model_is_the_integral_of_its_tangent() -> None:
    prediction = predict(df.LinearizedGaussian(samples=40_000), df.Full(MATRIX), curved, INPUTS)
    J: Tensor = torch.func.jacrev(curved)(MEAN, INPUTS)

    def tangent(theta: Tensor, inputs: Tensor) -> Tensor:
        return curved(MEAN, inputs) + J @ (theta - MEAN)

    torch.testing.assert_close(
        prediction.probabilities, integral(tangent, MATRIX, INPUTS), rtol=0, atol=0.02
    )
    variance = logit_covariance(curved, MATRIX, INPUTS).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(prediction.logit_variance, variance, rtol=0.05, atol=1e-12)
    assert (integral(curved, MATRIX, INPUTS) - integral(tangent, MATRIX, INPUTS)).abs().max() > 0.05


@pytest.mark.parametrize(
    "plain", [binary, three_classes, curved], ids=["binary", "three", "curved"]
)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("form", ["pairwise", "per_class"])
def test_probit_follows_its_formula(form: str, structure: str, plain: LogitFunction) -> None:
    covariance = STRUCTURES[structure]()
    rule = df.LinearizedProbit("pairwise" if form == "pairwise" else "per_class")
    prediction = predict(rule, covariance, plain, INPUTS)
    V, f = logit_covariance(plain, covariance.dense(), INPUTS), plain(MEAN, INPUTS)
    expected = torch.zeros_like(f)
    for i in range(len(f)):
        for c in range(f.shape[1]):
            if form == "per_class":
                expected[i, c] = math.exp(f[i, c] / math.sqrt(1 + math.pi * V[i, c, c] / 8))
            else:
                gaps = [
                    (f[i, c] - f[i, j], V[i, c, c] + V[i, j, j] - 2 * V[i, c, j])
                    for j in range(f.shape[1])
                ]
                expected[i, c] = 1 / sum(
                    math.exp(-gap / math.sqrt(1 + math.pi * v / 8)) for gap, v in gaps
                )
    torch.testing.assert_close(
        (prediction.probabilities, prediction.logit_variance),
        (expected / expected.sum(-1, keepdim=True), V.diagonal(dim1=-2, dim2=-1)),
        rtol=0,
        atol=1e-12,
    )
    assert_normalized(prediction)


def test_pairwise_probit_of_two_classes_is_the_sigmoid_of_kappa_f() -> None:
    prediction = predict(df.LinearizedProbit(), df.Full(MATRIX), df.LinearHead(2), INPUTS)
    f, v = INPUTS @ MEAN, (INPUTS @ MATRIX * INPUTS).sum(-1)
    torch.testing.assert_close(
        prediction.probabilities[:, 1],
        torch.sigmoid(f / torch.sqrt(1 + math.pi * v / 8)),
        rtol=0,
        atol=1e-13,
    )
    torch.testing.assert_close(
        prediction.probabilities, integral(binary, MATRIX, INPUTS), rtol=0, atol=0.02
    )


@pytest.mark.parametrize(
    "shift", [lambda theta: 7.0, lambda theta: 3.0 * theta.sum()], ids=["constant", "moves with θ"]
)
def test_only_the_per_class_probit_sees_a_shift_of_the_logits(
    shift: Callable[[Tensor], Tensor | float],
) -> None:
    def shifted(theta: Tensor, inputs: Tensor) -> Tensor:
        return curved(theta, inputs) + shift(theta)

    for rule, same in (
        (df.LinearizedProbit(), True),
        (df.LinearizedProbit("per_class"), False),
        (df.LinearizedGaussian(), True),
    ):
        first, second = (
            predict(rule, df.Full(MATRIX), plain, INPUTS).probabilities
            for plain in (curved, shifted)
        )
        assert torch.allclose(first, second, rtol=0, atol=1e-10) is same


RULES: list[PredictionRule] = [
    df.MAP(),
    df.MonteCarlo(),
    df.LinearizedGaussian(),
    df.LinearizedProbit(),
    df.LinearizedProbit("per_class"),
]


@pytest.mark.parametrize(
    "rule", [df.MonteCarlo(20_000), df.LinearizedGaussian(20_000), df.LinearizedProbit()], ids=repr
)
def test_hidden_states_enter_through_the_read_out_only(rule: PredictionRule) -> None:
    """θ = E s of a local trend: the prediction is that of the marginal belief over θ."""
    layout = df.LocalTrend(order=1).layout(2)
    assert layout is not None
    spread = torch.block_diag(MATRIX, 4 * torch.eye(2, dtype=torch.float64))
    spread[0, 3] = spread[3, 0] = 0.7
    prediction = predict(rule, df.Full(spread), ReadOut(df.LinearHead(2), layout.read_out), INPUTS)
    torch.testing.assert_close(
        prediction.probabilities, integral(binary, MATRIX, INPUTS), rtol=0, atol=0.02
    )
    variance = logit_covariance(binary, MATRIX, INPUTS).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(prediction.logit_variance, variance, rtol=0.05, atol=1e-12)
    assert_normalized(prediction)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_no_spread_is_the_map(rule: PredictionRule) -> None:
    narrow = predict(rule, df.Full(1e-18 * MATRIX), curved, INPUTS)
    torch.testing.assert_close(
        narrow.probabilities, curved(MEAN, INPUTS).softmax(-1), rtol=0, atol=1e-8
    )
    assert narrow.logit_variance.max() < 1e-15


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_probabilities_stay_finite_at_saturated_logits(rule: PredictionRule) -> None:
    prediction = predict(rule, df.Full(1e4 * MATRIX), df.LinearHead(2), 1e4 * INPUTS)
    assert torch.isfinite(prediction.log_probabilities).all()
    assert_normalized(prediction)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_logits_known_to_the_caller_are_used(rule: PredictionRule) -> None:
    belief = df.Belief(MEAN, df.Full(MATRIX))
    query = Query(df.LinearHead(2), INPUTS, RANDOMNESS)
    known = query._replace(known=df.LinearHead(2)(MEAN, INPUTS)[None])
    assert torch.equal(rule(belief, query).log_probabilities, rule(belief, known).log_probabilities)


test_settings_out_of_range_are_refused = refuses(
    [
        (df.MonteCarlo, {"samples": 0}, "MonteCarlo.samples must be an integer >= 1, got 0"),
        (
            df.LinearizedGaussian,
            {"samples": 2.5},
            "LinearizedGaussian.samples must be an integer >= 1, got 2.5",
        ),
        (
            df.LinearizedProbit,
            {"form": "both"},
            "LinearizedProbit.form must be 'pairwise' or 'per_class', got 'both'",
        ),
        (
            df.Tempered,
            {"temperature": 0.0},
            r"Tempered.temperature must be a finite number in \(0, inf\), got 0.0",
        ),
        (df.Tempered, {"over_views": 1}, "Tempered.over_views must be True or False, got 1"),
        (
            df.Moderated,
            {"scale": -1.0},
            r"Moderated.scale must be a finite number in \[0, inf\), got -1.0",
        ),
        (
            df.Moderated,
            {"limit": 0.5},
            r"Moderated.limit must be a finite number in \[1, inf\), got 0.5",
        ),
        (df.Moderated, {"samples": 0}, "Moderated.samples must be an integer >= 1, got 0"),
        (
            df.Moderated,
            {"over_views": None},
            "Moderated.over_views must be True or False, got None",
        ),
    ],
    lambda rule, settings: rule(**settings),
)


@pytest.mark.parametrize("n", [3, 1])
def test_prior_correction_scales_the_logits_by_the_smoothed_mean_prediction(n: int) -> None:
    logits = curved(MEAN, INPUTS[:n])
    p = [sum(row[c] for row in logits.softmax(-1).tolist()) / n for c in range(3)]
    s = max(1 / n, 1 / 3) / max(p)
    ratios = torch.tensor([(share + s) / (1 + 3 * s) for share in p], dtype=torch.float64)
    prediction = predict(df.PriorCorrection(), df.Full(MATRIX), curved, INPUTS[:n])
    torch.testing.assert_close(
        prediction.probabilities, (logits * ratios).softmax(-1), rtol=1e-12, atol=0
    )
    assert prediction.logit_variance.abs().max() == 0
    assert_normalized(prediction)


def test_from_teacher_is_the_softmax_of_the_teachers_logits() -> None:
    belief, taught = (
        df.Belief(MEAN, df.Full(MATRIX)),
        torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64),
    )
    prediction = df.FromTeacher()(belief, Query(lift(curved), INPUTS[:1], RANDOMNESS, None, taught))
    exponents = taught.exp()
    torch.testing.assert_close(
        prediction.probabilities, exponents / exponents.sum(), rtol=1e-12, atol=0
    )
    with pytest.raises(
        ValueError,
        match=r"Filter.prediction must be another rule if the observation has no teacher",
    ):
        df.FromTeacher()(belief, Query(lift(curved), INPUTS, RANDOMNESS))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tempered_divides_the_logits(temperature: float) -> None:
    logits = curved(MEAN, INPUTS)
    prediction = predict(df.Tempered(temperature), df.Full(MATRIX), curved, INPUTS)
    powered = logits.softmax(-1) ** (1 / temperature)
    torch.testing.assert_close(
        prediction.probabilities, powered / powered.sum(-1, keepdim=True), rtol=1e-12, atol=0
    )
    assert torch.equal(prediction.labels, logits.argmax(-1))


def test_tempered_is_the_mean_over_gaussian_logits_of_one_variance() -> None:
    """Two classes, by quadrature over the difference of their logits, whose variance is twice that
    of one.
    """
    prediction = predict(df.Tempered(1.8), df.Full(MATRIX), df.LinearHead(2), INPUTS)
    variance = prediction.logit_variance
    assert variance.max() == variance.min()
    gaps = df.LinearHead(2)(MEAN, INPUTS) @ torch.tensor([-1.0, 1.0], dtype=torch.float64)
    nodes, mass = np.polynomial.hermite_e.hermegauss(60)
    spread = (2 * variance[0, 0]).sqrt() * torch.from_numpy(nodes)
    exact = ((gaps[:, None] + spread).sigmoid() @ torch.from_numpy(mass)) / mass.sum()
    torch.testing.assert_close(prediction.probabilities[:, 1], exact, rtol=0, atol=0.02)


def test_tempered_over_views_averages_their_logits() -> None:
    belief, views = df.Belief(MEAN, df.Full(MATRIX)), (INPUTS, INPUTS.flip(0), 2 * INPUTS)
    query = Query(lift(curved), INPUTS, RANDOMNESS, views=lambda: views)
    mean = torch.stack([curved(MEAN, view) for view in views]).mean(0)
    rule = df.Tempered(1.5, over_views=True)
    known = query._replace(known=torch.stack([curved(MEAN, view) for view in views]), views=None)
    for asked, logits in (
        (query, mean),
        (known, mean),
        (Query(lift(curved), INPUTS, RANDOMNESS), curved(MEAN, INPUTS)),
    ):
        torch.testing.assert_close(
            rule(belief, asked).log_probabilities, (logits / 1.5).log_softmax(-1)
        )


def moderating(logits: LogitFunction | PredictiveModel, **settings: Any) -> df.Filter:
    return df.Filter(
        logits,
        transition=df.Transition(df.MeanReversion(0.9), df.Isotropic(0.1)),
        observation=df.Gibbs(df.Entropy(), df.Reliability(2.0)),
        inference=df.Linearized(df.EmpiricalFisher(centered=False)),
        prediction=df.Moderated(**{"limit": 1e6, **settings}),
        predict_from="prior",
    )


def sums_of(belief: df.Belief, inputs: Tensor) -> tuple[float, float]:
    """Σ gᵀ Σ g and Σ |u|² of a batch of the curved model, times n², by autograd for each sample
    alone.
    """
    along, length = 0.0, 0.0
    for x in inputs:
        leaf = belief.mean.clone().requires_grad_()
        f = curved(leaf, x[None])
        p = f.softmax(-1).detach()
        weight = 2 * (1 + (p * p.log()).sum() / math.log(3))
        entropy = -(f.softmax(-1) * f.log_softmax(-1)).sum()
        (u,) = torch.autograd.grad(weight * entropy, f, retain_graph=True)
        (g,) = torch.autograd.grad(weight * entropy, leaf)
        along, length = (
            along + (g @ belief.covariance.dense() @ g).item(),
            length + (u @ u.T).item(),
        )
    return along, length


def prior_of(filt: df.Filter, state: df.FilterState) -> df.Belief:
    return filt.transition(state.belief, state.source)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_moderated_has_the_variance_of_the_logits_along_the_loss(structure: str) -> None:
    filt = moderating(curved, scale=0.7, samples=2)
    state = filt.init(df.Belief(MEAN, STRUCTURES[structure]()))
    along, length = sums_of(prior_of(filt, state), INPUTS)
    _, prediction, _ = filt.step(state, INPUTS)
    variance = 0.7 * along / length
    expected = (
        curved(prior_of(filt, state).mean, INPUTS) / math.sqrt(1 + math.pi / 4 * variance)
    ).log_softmax(-1)
    torch.testing.assert_close(
        (prediction.logit_variance, prediction.log_probabilities),
        (torch.full((3, 3), variance, dtype=torch.float64), expected),
        rtol=1e-9,
        atol=0,
    )


def test_moderated_by_a_variance_of_its_own() -> None:
    filt = moderating(curved, scale=0.7, samples=2, variance=0.3)
    state = filt.init(df.Belief(MEAN, df.Full(MATRIX)))
    same = 0.3 * torch.eye(len(MEAN), dtype=torch.float64)
    along, length = sums_of(df.Belief(prior_of(filt, state).mean, df.Full(same)), INPUTS)
    _, prediction, _ = filt.step(state, INPUTS)
    expected = torch.full((3, 3), 0.7 * along / length, dtype=torch.float64)
    torch.testing.assert_close(prediction.logit_variance, expected, rtol=1e-9, atol=0)


def test_moderated_is_the_probit_of_one_sample_of_two_classes() -> None:
    filt = moderating(df.LinearHead(2), scale=0.3)
    state = filt.init(df.Belief(MEAN, df.Full(MATRIX)))
    prior = prior_of(filt, state)
    scaled = df.Belief(prior.mean, df.Full(0.3 * prior.covariance.dense()))
    for x in INPUTS:
        expected = df.LinearizedProbit()(scaled, Query(df.LinearHead(2), x[None], RANDOMNESS))
        _, prediction, _ = filt.step(state, x[None])
        torch.testing.assert_close(
            prediction.log_probabilities, expected.log_probabilities, rtol=1e-9, atol=0
        )


def test_moderated_fades_the_sums_of_small_batches() -> None:
    filt = moderating(curved, scale=1.0, samples=10)
    state = filt.init(df.Belief(MEAN, df.Full(MATRIX)))
    along, length = 0.0, 0.0
    for batch in (
        INPUTS,
        2 * INPUTS,
        INPUTS[:2],
        3 * INPUTS[:1],
    ):  # each sample counts once, in whatever company
        now, fading = sums_of(prior_of(filt, state), batch), 1 - len(batch) / 10
        along, length = fading * along + now[0], fading * length + now[1]
        state, prediction, _ = filt.step(state, batch)
        assert prediction.logit_variance.max().item() == pytest.approx(along / length, rel=1e-9)
    resting = filt.predict(state, 3 * INPUTS)  # no batch to learn from: that of the last one
    assert resting.logit_variance.max().item() == pytest.approx(along / length, rel=1e-9)
    large = INPUTS.repeat(4, 1)
    now = sums_of(prior_of(filt, state), large)
    _, prediction, _ = filt.step(state, large)
    assert prediction.logit_variance.max().item() == pytest.approx(now[0] / now[1], rel=1e-9)


def test_moderated_before_the_first_batch_is_map_and_never_beyond_its_limit() -> None:
    filt = moderating(curved, scale=1e9, limit=1.5)
    state = filt.init(df.Belief(MEAN, df.Full(MATRIX)))
    assert torch.equal(
        filt.predict(state, INPUTS).log_probabilities, curved(MEAN, INPUTS).log_softmax(-1)
    )
    _, prediction, _ = filt.step(state, INPUTS)
    torch.testing.assert_close(
        prediction.log_probabilities,
        (curved(prior_of(filt, state).mean, INPUTS) / 1.5).log_softmax(-1),
    )


def test_moderated_learns_in_an_update_too_and_asks_for_rows_once() -> None:
    asked = []

    class Counted(PullbackAround):
        def __call__(self, cotangents: Tensor) -> Tensor:
            asked.append(cotangents)
            return self.inner(cotangents)

        def total(self, cotangents: Tensor) -> Tensor:
            return self.inner.total(cotangents)

    class Counting(Lifted):  # type: ignore[misc]  # final
        def pullback(self, theta: Tensor, inputs: Any) -> tuple[Tensor, Pullback]:
            logits, pull = super().pullback(theta, inputs)
            return logits, Counted(pull)

    filt = moderating(Counting(curved))
    start = filt.init(df.Belief(MEAN, df.Diagonal(MATRIX.diagonal().clone())))
    stepped, _, _ = filt.step(start, INPUTS)
    assert len(asked) == 1
    updated, _ = filt.update(start, INPUTS)
    assert torch.equal(stepped.memory["prediction.slopes"], updated.memory["prediction.slopes"])
    plain, _, _ = moderating(curved, scale=0.0).step(start, INPUTS)
    assert torch.equal(stepped.belief.mean, plain.belief.mean)


def test_rows_are_worked_out_once_and_sum_to_the_gradient() -> None:
    """Whoever asks after inference gets the rows that it had, unchanged by the curvature."""
    filt, belief = moderating(curved), df.Belief(MEAN, df.Full(MATRIX))
    energy, _ = filt.observation(lift(curved), belief.mean, INPUTS, {}, RANDOMNESS, keeps_rows=True)
    other, _ = filt.observation(lift(curved), belief.mean, INPUTS, {}, RANDOMNESS)
    total = other.evaluation.gradient()
    for curvature in (df.EmpiricalFisher(), df.EmpiricalFisher(centered=False)):
        curvature(energy.evaluation)
    assert torch.equal(energy.evaluation.rows, other.evaluation.rows)
    assert energy.evaluation.rows is energy.evaluation.rows
    torch.testing.assert_close(energy.evaluation.gradient(), total, rtol=1e-12, atol=1e-15)


def test_moderated_learns_nothing_of_logits_from_a_loss_of_other_outputs() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 3)
    ).eval()
    plain = df.adapt(model, "driftfilter", prediction=df.Moderated())
    other = df.adapt(
        model, "driftfilter", prediction=df.Moderated(), observed=lambda outputs: 3 * outputs
    )
    for adapter in (plain, other):
        adapter(torch.randn(16, 4))
    assert "prediction.slopes" in plain.state.memory
    assert "prediction.slopes" not in other.state.memory
    x = torch.randn(8, 4)
    assert other.predict(x).logit_variance.max() == 0 < plain.predict(x).logit_variance.max()


def test_a_batch_without_weight_leaves_predictions_as_they_are() -> None:
    logits = torch.zeros(4, 3)
    filt = df.Filter(
        df.LinearHead(3),
        observation=df.Gibbs(weighting=df.EntropyGate(1e-6)),
        prediction=df.Moderated(),
        predict_from="prior",
    )
    state = filt.init(df.Belief(torch.zeros(6), df.Diagonal(torch.ones(6))))
    _, prediction, _ = filt.step(state, torch.randn(4, 2, generator=torch.Generator()))
    torch.testing.assert_close(prediction.log_probabilities, logits.log_softmax(-1))

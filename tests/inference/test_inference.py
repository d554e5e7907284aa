"""Inference against dense algebra, quadrature over θ, scipy's optimum and torch.optim."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

import driftfilter as df
from driftfilter.base.randomness import Purpose, Randomness
from driftfilter.gaussian.covariance import antithetic
from driftfilter.inference.curvature import Clip
from driftfilter.inference.linearized import Bounds, Inference, newton_step, take_expectation
from driftfilter.model.observation import Energy
from driftfilter.model.predictive import LogitFunction, PredictiveModel, lift
from small import assert_same, moments, normal, refuses

BETA = 2.5
RANDOMNESS = Randomness(0, 0, torch.device("cpu"))


def spread(dimension: int, scale: float = 1.0) -> Tensor:
    root = normal(dimension, dimension, seed=9)
    return scale * (root @ root.mT / dimension + 0.5 * torch.eye(dimension, dtype=torch.float64))


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Problem(NamedTuple):
    """A classifier linear in θ, written out independently of LinearHead."""

    classes: int
    rows: int  # classes with a row in θ: all, or all but class 0
    mean: Tensor
    matrix: Tensor
    inputs: Tensor

    def logits(self, theta: Tensor) -> Tensor:
        """[m, d] -> [m, n, k]."""
        scores = torch.einsum("mrd,nd->mnr", theta.unflatten(-1, (self.rows, -1)), self.inputs)
        return torch.cat(
            (scores.new_zeros(*scores.shape[:2], self.classes - self.rows), scores), -1
        )

    def jacobian(self) -> Tensor:
        """[n, k, d]."""
        return self.logits(torch.eye(len(self.mean), dtype=torch.float64)).movedim(0, -1)


SPREAD = vector(1.0, 0.3, 0.3, 0.8).view(2, 2)
PROBLEMS = {
    "1d": Problem(2, 1, vector(0.8), vector(1.2)[:, None], vector(1.5, -0.9)[:, None]),
    "2d": Problem(
        2, 1, vector(0.8, -0.4), SPREAD, vector(1.2, 0.5, -0.6, 1.4, 0.8, -1.1).view(3, 2)
    ),
    "3 classes": Problem(3, 2, vector(0.7, -0.5), SPREAD, vector(1.4, -1.0, 0.8)[:, None]),
    "all rows": Problem(2, 2, vector(0.7, -0.5), SPREAD, vector(1.4, -1.0)[:, None]),
}


def entropy(logits: Tensor, target: Tensor) -> Tensor:
    p = logits.softmax(-1)
    return -(p * p.log()).sum(-1)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return -(target * logits.log_softmax(-1)).sum(-1)


LossFunction = Callable[[Tensor, Tensor], Tensor]
CONVEX: tuple[df.Loss, LossFunction] = (df.PseudoLabel(), cross_entropy)
LOSSES = pytest.mark.parametrize(
    ("loss", "function"), [CONVEX, (df.Entropy(), entropy)], ids=["convex", "indefinite"]
)


def raw_derivatives(
    function: LossFunction, logits: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradient and Hessian in the logits [..., k], by automatic differentiation."""
    flat, labels = logits.flatten(0, -2), targets.expand_as(logits).flatten(0, -2)
    gradient = torch.func.vmap(torch.func.grad(function))(flat, labels)
    hessian = torch.func.vmap(torch.func.hessian(function))(flat, labels)
    return gradient.reshape(logits.shape), hessian.reshape(*logits.shape, -1)


def positive_part(matrices: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrices)
    positive: Tensor = (vectors * values.clamp_min(0)[..., None, :]) @ vectors.mT
    return positive


def derivatives(function: LossFunction, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient and positive part of the Hessian in the logits [..., k]."""
    gradient, hessian = raw_derivatives(function, logits, targets)
    return gradient, positive_part(hessian)


def hard_labels(logits: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()


def gaussian_grid(mean: Tensor, matrix: Tensor, points: int) -> tuple[Tensor, Tensor]:
    """Trapezoid rule for N(mean, matrix) over θ: points [m, d] and weights [m]."""
    line = torch.linspace(-8.5, 8.5, points, dtype=torch.float64)
    grid = torch.cartesian_prod(*[line] * len(mean)).reshape(-1, len(mean))
    return mean + grid @ torch.linalg.cholesky(matrix).mT, torch.softmax(
        -grid.square().sum(-1) / 2, 0
    )


def expected(
    p: Problem, function: LossFunction, mean: Tensor, matrix: Tensor, clip: Clip = "after"
) -> tuple[Tensor, Tensor]:
    """E_q[∇E] [d] and E_q[curvature] [d, d] under q = N(mean, matrix), by quadrature over θ itself;
    each sample's curvature clipped after or before it is averaged, or never.
    """
    theta, weights = gaussian_grid(mean, matrix, 30_001 if len(mean) == 1 else 161)
    gradient, hessian = raw_derivatives(
        function, p.logits(theta), hard_labels(p.logits(p.mean[None])[0])
    )
    J, scale = p.jacobian(), BETA / len(p.inputs)
    g = scale * torch.einsum("m,mnk,nkd->d", weights, gradient, J)
    hessian = positive_part(hessian) if clip == "before" else hessian
    average = torch.einsum("m,mnkl->nkl", weights, hessian)
    average = positive_part(average) if clip == "after" else average
    return g, scale * torch.einsum("nkd,nkl,nle->de", J, average, J)


def energy(
    logits: LogitFunction | PredictiveModel, loss: df.Loss, mean: Tensor, inputs: Tensor
) -> Energy:
    return df.Gibbs(loss, df.Constant(beta=BETA))(lift(logits), mean, inputs, {}, RANDOMNESS)[0]


def infer(rule: Inference, p: Problem, loss: df.Loss, structure: str = "full") -> df.Belief:
    prior = df.Belief(p.mean, STRUCTURES[structure](p.matrix))
    return rule(
        prior, energy(df.LinearHead(p.classes), loss, prior.mean, p.inputs), {}, RANDOMNESS
    )[0]


def low_rank(matrix: Tensor) -> df.LowRank:
    """The same covariance, its precision split into a diagonal and a factor."""
    precision = torch.linalg.inv(matrix)
    floor = torch.linalg.eigvalsh(precision)[0].item() / 2
    diagonal = torch.full((len(matrix),), floor, dtype=torch.float64)
    return df.LowRank(
        diagonal, torch.linalg.cholesky(precision - torch.diag(diagonal)).mT, len(matrix)
    )


def blocks(matrix: Tensor) -> df.Blocks:
    half = len(matrix) // 2
    return df.Blocks((df.Full(matrix[:half, :half]), low_rank(matrix[half:, half:])))


CLIPS: tuple[Clip, ...] = ("after", "before", "never")
STRUCTURES: dict[str, Callable[[Tensor], df.Covariance]] = {
    "full": df.Full,
    "diagonal": lambda matrix: df.Diagonal(matrix.diagonal().clone()),
    "low rank": low_rank,
    "blocks": blocks,
}


def project(structure: str, matrix: Tensor) -> Tensor:
    """The entries of a covariance, or of a precision, that a structure keeps."""
    half, ones = len(matrix) // 2, torch.ones_like(matrix)
    masks: dict[str, Tensor] = {
        "diagonal": torch.diag(ones[0]),
        "blocks": torch.block_diag(ones[:half, :half], ones[half:, half:]),
    }
    return matrix * masks.get(structure, ones)


def updated(p: Problem, g: Tensor, H: Tensor, structure: str = "full") -> tuple[Tensor, Tensor]:
    """The information form: Σ⁻¹ = (Σ⁻)⁻¹ + H within the structure, μ = μ⁻ - Σ g."""
    covariance: Tensor = torch.linalg.inv(
        torch.linalg.inv(project(structure, p.matrix)) + project(structure, H)
    )
    return p.mean - covariance @ g, covariance


def assert_belief(belief: df.Belief, mean: Tensor, matrix: Tensor, atol: float) -> None:
    torch.testing.assert_close(moments(belief), (mean, matrix), rtol=0, atol=atol)


def network(theta: Tensor, inputs: Tensor) -> Tensor:
    """A nonlinear classifier of 3 classes with 2·2 + 2·3 = 10 parameters."""
    return torch.tanh(inputs @ theta[:4].view(2, 2)) @ theta[4:].view(2, 3)


def linear(theta: Tensor, inputs: Tensor) -> Tensor:
    return inputs @ theta.view(3, 2).mT


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    "curvature",
    [
        df.Hessian(),
        df.GaussNewton(),
        df.EmpiricalFisher(scale=1.7),
        df.EmpiricalFisher(centered=False),
        df.NoCurvature(),
    ],
    ids=repr,
)
@LOSSES
@pytest.mark.parametrize("model", ["linear", "network"])
def test_linearized_is_the_information_form(
    model: str, loss: df.Loss, function: LossFunction, curvature: df.Curvature, structure: str
) -> None:
    plain, d = (linear, 6) if model == "linear" else (network, 10)
    mean, matrix, inputs = normal(d, seed=3), spread(d), 1.5 * normal(5, 2, seed=4)
    logits = plain(mean, inputs)
    gradient, hessian = derivatives(function, logits, hard_labels(logits))
    J = torch.func.jacrev(plain)(mean, inputs)  # [n, k, d]
    rows, p = torch.einsum("nk,nkd->nd", gradient, J), logits.softmax(-1)
    centered = rows - rows.mean(0)
    H = {
        "Hessian(clip='after')": torch.einsum("nkd,nkl,nle->de", J, hessian, J),
        "GaussNewton()": torch.einsum(
            "nkd,nkl,nle->de", J, torch.diag_embed(p) - p[:, :, None] * p[:, None, :], J
        ),
        "EmpiricalFisher(centered=True, scale=1.7)": 1.7**2 * centered.mT @ centered,
        "EmpiricalFisher(centered=False, scale=1.0)": rows.mT @ rows,
        "NoCurvature()": torch.zeros(d, d, dtype=torch.float64),
    }[repr(curvature)] * (BETA / 5)
    prior = df.Belief(mean, STRUCTURES[structure](matrix))
    e = energy(df.LinearHead(3) if model == "linear" else plain, loss, mean, inputs)
    posterior, memory = df.Linearized(curvature)(prior, e, {"kept": mean}, RANDOMNESS)
    assert_belief(
        posterior,
        *updated(Problem(3, 3, mean, matrix, inputs), BETA * rows.mean(0), H, structure),
        atol=1e-10,
    )
    assert type(posterior.covariance) is type(prior.covariance)
    assert list(memory) == ["kept"]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("share", [0.3, 3.0])
def test_a_radius_shortens_the_step_in_the_metric_of_the_whole_curvature(
    structure: str, share: float
) -> None:
    """Δ times r / sqrt(Δᵀ H Δ) where that is below 1, H without the structure's projection; the
    covariance as without.
    """
    p = PROBLEMS["2d"]
    logits = p.logits(p.mean[None])[0]
    gradient, hessian = derivatives(cross_entropy, logits, hard_labels(logits))
    J, scale = p.jacobian(), BETA / len(p.inputs)
    g = scale * torch.einsum("nk,nkd->d", gradient, J)
    H = scale * torch.einsum("nkd,nkl,nle->de", J, hessian, J)
    mean, covariance = updated(p, g, H, structure)
    step = mean - p.mean
    radius = share * (step @ H @ step).sqrt().item()
    posterior = infer(df.Linearized(df.Hessian(), radius), p, df.PseudoLabel(), structure)
    assert_belief(posterior, p.mean + min(1.0, share) * step, covariance, atol=1e-12)
    without = infer(df.Linearized(df.NoCurvature()), p, df.PseudoLabel(), structure)
    assert torch.equal(
        infer(df.Linearized(df.NoCurvature(), radius), p, df.PseudoLabel(), structure).mean,
        without.mean,
    )


@pytest.mark.parametrize(("reference", "share"), [(0, 1.0), (2, 1.0), (8, None)])
def test_a_radius_is_smaller_for_samples_that_tell_less(
    reference: int, share: float | None
) -> None:
    """r n/N for n < N, as a root mean square change of a sample's loss times the root of β n/N."""
    p, radius = PROBLEMS["2d"], 1e-3
    n = len(p.inputs)
    share = n / reference if share is None else share
    observation = df.Gibbs(df.PseudoLabel(), df.Constant(BETA), reference=reference)
    rule = df.Linearized(df.EmpiricalFisher(centered=False), radius)
    filt = df.Filter(df.LinearHead(p.classes), observation=observation, inference=rule)
    state = filt.init(df.Belief(p.mean, df.Full(p.matrix)))
    moved = filt.step(state, p.inputs)[0].belief.mean - p.mean
    logits = p.logits(p.mean[None])[0]
    gradient, _ = derivatives(cross_entropy, logits, hard_labels(logits))
    slopes = torch.einsum("nk,nkd->nd", gradient, p.jacobian())
    change = (slopes @ moved).square().mean().sqrt().item()
    assert change == pytest.approx(radius * (share / BETA) ** 0.5, rel=1e-6)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(("stride", "reach"), [(0.3, 2.5), (0.3, 1e9), (1.0, 1e9), (0.001, 1e9)])
@pytest.mark.parametrize("reference", [0, 12])
@pytest.mark.parametrize("radius", [0.0, 0.1])
def test_a_reach_lengthens_steps_that_hardly_change_the_parameters(
    structure: str, stride: float, reach: float, reference: int, radius: float
) -> None:
    """To a share of the size of the parameters, by the reach at most and less for few samples; then
    comes the radius.
    """
    p = PROBLEMS["2d"]
    n = len(p.inputs)
    logits, J = p.logits(p.mean[None])[0], p.jacobian()
    gradient, hessian = derivatives(cross_entropy, logits, hard_labels(logits))
    scale, share = BETA / max(n, reference), min(1, n / max(reference, 1))
    H = scale * torch.einsum("nkd,nkl,nle->de", J, hessian, J)
    g = scale * torch.einsum("nk,nkd->d", gradient, J)
    mean, covariance = updated(p, g, H, structure)
    step = mean - p.mean
    longer = stride * share * (p.mean @ p.mean).sqrt() / (step @ step).sqrt()
    step = step * min(max(1.0, longer.item()), reach)
    if radius:
        step = step * min(1.0, radius * share / (step @ H @ step).sqrt().item())
    prior = df.Belief(p.mean, STRUCTURES[structure](p.matrix))
    observation = df.Gibbs(df.PseudoLabel(), df.Constant(BETA), reference=reference)
    rule = df.Linearized(df.Hessian(), radius, reach, stride)
    there, _ = observation(df.LinearHead(p.classes), prior.mean, p.inputs, {}, RANDOMNESS)
    posterior, _ = rule(prior, there, {}, RANDOMNESS)
    assert_belief(posterior, p.mean + step, covariance, atol=1e-10)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("limit", [1.0, 0.05, 0.001])
@pytest.mark.parametrize("reference", [0, 12])
@pytest.mark.parametrize("radius", [0.0, 0.01])
def test_a_limit_shortens_steps_to_a_share_of_the_parameters(
    structure: str, limit: float, reference: int, radius: float
) -> None:
    """Of few samples by the root of what they tell; then comes the radius."""
    p = PROBLEMS["2d"]
    n = len(p.inputs)
    logits, J = p.logits(p.mean[None])[0], p.jacobian()
    gradient, hessian = derivatives(cross_entropy, logits, hard_labels(logits))
    scale, share = BETA / max(n, reference), min(1, n / max(reference, 1))
    H = scale * torch.einsum("nkd,nkl,nle->de", J, hessian, J)
    g = scale * torch.einsum("nk,nkd->d", gradient, J)
    mean, covariance = updated(p, g, H, structure)
    step = mean - p.mean
    most = limit * math.sqrt(share) * math.hypot(*p.mean.tolist())
    length = math.hypot(*step.tolist())
    assert (length > most) is (limit < 1)  # so that it is seen to do something, and nothing
    step = step * min(1.0, most / length)
    if radius:
        step = step * min(1.0, radius * share / (step @ H @ step).sqrt().item())
    prior = df.Belief(p.mean, STRUCTURES[structure](p.matrix))
    observation = df.Gibbs(df.PseudoLabel(), df.Constant(BETA), reference=reference)
    rule = df.Linearized(df.Hessian(), radius, limit=limit)
    there, _ = observation(df.LinearHead(p.classes), prior.mean, p.inputs, {}, RANDOMNESS)
    posterior, _ = rule(prior, there, {}, RANDOMNESS)
    assert_belief(posterior, p.mean + step, covariance, atol=1e-10)


def test_a_reach_counts_samples_that_tell_little_for_less() -> None:
    """Where the source is at home, or in runs, the least length is a share of what it was."""
    p = PROBLEMS["2d"]
    prior = df.Belief(p.mean, df.Full(1e-9 * p.matrix))
    rule = df.Linearized(df.Hessian(), reach=1e12, stride=0.5)
    there = energy(df.LinearHead(p.classes), df.PseudoLabel(), prior.mean, p.inputs)
    for share in (1.0, 0.25):
        object.__setattr__(there.evaluation.pullbacks[0], "novelty", share)
        moved = rule(prior, there, {}, RANDOMNESS)[0].mean - p.mean
        assert moved.norm().item() == pytest.approx(share * 0.5 * p.mean.norm().item())


def test_labels_take_no_longer_steps() -> None:
    p, y = PROBLEMS["2d"], torch.tensor([1, 0, 1])
    found = []
    for reach in (1.0, 1e9):
        rule = df.Linearized(df.EmpiricalFisher(centered=False), reach=reach, stride=1.0)
        filt = df.Filter(df.LinearHead(p.classes), inference=rule)
        state = filt.init(df.Belief(p.mean, df.Full(1e-6 * p.matrix)))
        found.append(filt.learn(state, p.inputs, y)[0].belief.mean)
    assert_same(*found)


def test_labels_are_held_to_a_limit_whatever_they_weigh() -> None:
    p, y = PROBLEMS["2d"], torch.tensor([1, 0, 1])
    for limit, weights in ((0.01, (1.0, 1000.0)), (1.0, (1e-4,))):
        rule = df.Linearized(df.EmpiricalFisher(centered=False), limit=limit)
        filt = df.Filter(df.LinearHead(p.classes), inference=rule)
        state = filt.init(df.Belief(p.mean, df.Full(p.matrix)))
        for weight in weights:
            moved = filt.learn(state, p.inputs, y, weight)[0].belief.mean - p.mean
            share = (moved.norm() / p.mean.norm()).item()
            assert share == pytest.approx(0.01) if limit < 1 else 0 < share < 0.5


def test_a_reach_of_one_is_the_newton_step_bit_for_bit() -> None:
    p, curvature = PROBLEMS["2d"], df.EmpiricalFisher()
    prior = df.Belief(p.mean, df.Full(p.matrix))
    there = energy(df.LinearHead(2), df.Entropy(), prior.mean, p.inputs)
    plain = newton_step(prior, *curvature(there.at(prior.mean)), Bounds(0.2))
    posterior, _ = df.Linearized(curvature, 0.2, 1.0)(prior, there, {}, RANDOMNESS)
    assert_same(moments(posterior), moments(plain))
    longer, _ = df.Linearized(curvature, 0.0, 4.0, 1.0)(prior, there, {}, RANDOMNESS)
    assert not torch.equal(longer.mean, newton_step(prior, *curvature(there.at(prior.mean))).mean)


def test_a_reach_from_nothing_or_with_a_point_mass_stays_finite() -> None:
    p = PROBLEMS["2d"]
    for q in (p._replace(mean=0 * p.mean), p._replace(matrix=1e-200 * p.matrix)):
        posterior = infer(df.Linearized(df.NoCurvature(), 0.0, 4.0), q, df.Entropy())
        assert posterior.mean.isfinite().all()


@pytest.mark.parametrize(
    "rule",
    [df.Linearized(df.Hessian()), df.Bong(nodes=9), df.Variational(nodes=9, rate=1, iterations=1)],
)
def test_low_rank_moves_the_mean_before_it_truncates(rule: Inference) -> None:
    p = Problem(3, 3, normal(9, seed=3), spread(9, 0.2), normal(6, 3, seed=4))
    prior = df.Belief(p.mean, df.LowRank.isotropic(0.3, 9, 2, like=p.mean))
    exact = df.Belief(p.mean, df.Full(0.3 * torch.eye(9, dtype=torch.float64)))
    e = energy(df.LinearHead(3), df.PseudoLabel(), p.mean, p.inputs)
    truncated, whole = rule(prior, e, {}, RANDOMNESS)[0], rule(exact, e, {}, RANDOMNESS)[0]
    torch.testing.assert_close(truncated.mean, whole.mean, rtol=0, atol=1e-10)
    assert isinstance(truncated.covariance, df.LowRank)
    assert truncated.covariance.factor.shape[0] == 2
    precisions = [torch.linalg.inv(belief.covariance.dense()) for belief in (truncated, whole)]
    torch.testing.assert_close(
        precisions[0].diagonal(), precisions[1].diagonal(), rtol=1e-10, atol=0
    )
    assert not torch.allclose(precisions[0], precisions[1], atol=1e-3)


@LOSSES
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize(
    "name", ["1d", "2d", pytest.param("3 classes", marks=pytest.mark.slow), "all rows"]
)
def test_bong_with_nodes_is_quadrature_over_parameters(
    name: str, clip: Clip, loss: df.Loss, function: LossFunction
) -> None:
    p = PROBLEMS[name]
    directions = 2 if name in ("3 classes", "all rows") else 1
    rule = df.Bong(df.Hessian(clip), nodes=301 if directions == 2 else 20_001)
    posterior = infer(rule, p, loss)
    # Curvature that is clipped before it is averaged has kinks, where a rule of spacing h is off by
    # h²; only a line can be cut finely enough.
    kinks = clip == "before" and loss is not CONVEX[0] and name != "1d"
    atol = 1e-4 if kinks else 1e-8
    assert_belief(posterior, *updated(p, *expected(p, function, p.mean, p.matrix, clip)), atol=atol)
    assert (
        posterior.mean - infer(df.Linearized(df.Hessian()), p, loss).mean
    ).abs().max() > 100 * atol


@pytest.mark.parametrize("structure", STRUCTURES)
def test_bong_with_nodes_for_every_structure(structure: str) -> None:
    p = PROBLEMS["2d"]
    g, H = expected(p, cross_entropy, p.mean, project(structure, p.matrix))
    assert_belief(
        infer(df.Bong(nodes=81), p, df.PseudoLabel(), structure),
        *updated(p, g, H, structure),
        atol=1e-8,
    )


@pytest.mark.parametrize(("nodes", "atol"), [(7, 5e-3), (9, 1e-3), (21, 1e-5), (41, 1e-11)])
def test_few_nodes_reach_no_farther_than_they_resolve(nodes: int, atol: float) -> None:
    p = PROBLEMS["2d"]
    exact = updated(p, *expected(p, cross_entropy, p.mean, p.matrix))
    assert_belief(infer(df.Bong(nodes=nodes), p, df.PseudoLabel()), *exact, atol=atol)


@pytest.mark.parametrize(
    "rule", [df.Bong(samples=0), df.Variational(samples=0, rate=1, iterations=1)], ids=repr
)
def test_expectation_at_the_mean_is_the_linearized_update(rule: Inference) -> None:
    p = PROBLEMS["3 classes"]
    exact = infer(df.Linearized(df.Hessian()), p, df.Entropy())
    assert_belief(infer(rule, p, df.Entropy()), exact.mean, exact.covariance.dense(), atol=1e-12)


@LOSSES
@pytest.mark.parametrize("name", ["1d", "2d", "3 classes"])
def test_bong_with_draws_approaches_quadrature(
    name: str, loss: df.Loss, function: LossFunction
) -> None:
    p = PROBLEMS[name]._replace(matrix={"1d": 0.1}.get(name, 0.2) * PROBLEMS[name].matrix)
    exact = updated(p, *expected(p, function, p.mean, p.matrix))
    assert_belief(infer(df.Bong(samples=2000), p, loss), *exact, atol=1e-3)
    assert (infer(df.Linearized(df.Hessian()), p, loss).mean - exact[0]).abs().max() > 2e-3


CURVATURES = [*map(df.Hessian, CLIPS), df.GaussNewton()]
ALL_ROWS = Problem(3, 3, 0.5 * normal(6, seed=3), spread(6, 0.3), normal(4, 2, seed=4))


@pytest.mark.parametrize(
    "loss",
    [df.PseudoLabel(), df.Entropy(), df.InformationMaximization()],
    ids=["convex", "indefinite", "coupled"],
)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("curvature", CURVATURES, ids=repr)
def test_draws_on_a_linear_model_are_those_of_a_plain_function(
    curvature: df.Curvature, structure: str, loss: df.Loss
) -> None:
    """A model known to be linear averages metrics before it pulls back; a function takes every draw
    apart. Rows of a head with one row a class are orthogonal: the positive part of a sample's
    Hessian is the same in its logits and in θ.
    """
    p = ALL_ROWS
    prior = df.Belief(p.mean, STRUCTURES[structure](p.matrix))
    plain = lift(lambda theta, inputs: df.LinearHead(p.classes)(theta, inputs))
    rule = df.Bong(curvature, samples=7)

    def step(model: PredictiveModel) -> df.Belief:
        return rule(prior, energy(model, loss, prior.mean, p.inputs), {}, RANDOMNESS)[0]

    if curvature == df.Hessian("never") and structure in ("low rank", "blocks"):
        for model in (plain, df.LinearHead(p.classes)):
            with pytest.raises(ValueError, match="LowRank cannot carry negative curvature"):
                step(model)
        return
    assert_belief(step(df.LinearHead(p.classes)), *moments(step(plain)), atol=1e-12)


def draws_of(prior: df.Belief, samples: int) -> Tensor:
    """The draws of θ that inference takes."""
    generator = RANDOMNESS.generator(Purpose.INFERENCE)
    return prior.mean + antithetic(prior.covariance, samples, generator)


@pytest.mark.parametrize("rule", [df.Bong, df.Variational])
@pytest.mark.parametrize("structure", ["full", "diagonal"])
@pytest.mark.parametrize("clip", CLIPS)
def test_draws_on_a_network_average_what_its_jacobians_make_of_the_hessian(
    clip: Clip, structure: str, rule: type[df.Bong] | type[df.Variational]
) -> None:
    """Σ_i clip(mean_s J_isᵀ h_is J_is), Σ_i mean_s J_isᵀ clip(h_is) J_is or nothing clipped, draw
    by draw, with dense matrices over θ.
    """
    mean, matrix, inputs = 0.7 * normal(10, seed=3), spread(10, 0.1), 1.5 * normal(5, 2, seed=4)
    prior = df.Belief(mean, STRUCTURES[structure](matrix))
    g, H = torch.zeros(10).double(), torch.zeros(5, 10, 10).double()
    for theta in draws_of(prior, 6):
        gradient, hessian = raw_derivatives(
            entropy, network(theta, inputs), torch.zeros(3).double()
        )
        J = torch.func.jacrev(network)(theta, inputs)
        hessian = positive_part(hessian) if clip == "before" else hessian
        g += BETA / 30 * torch.einsum("nk,nkd->d", gradient, J)
        H += BETA / 30 * torch.einsum("nkd,nkl,nle->nde", J, hessian, J)
    least = torch.linalg.eigvalsh(H).min().item()
    assert least >= -1e-15 if clip == "before" else least < -0.01
    H = positive_part(H) if clip == "after" else H
    once = {} if rule is df.Bong else {"rate": 1, "iterations": 1}
    posterior, _ = rule(df.Hessian(clip), samples=6, **once)(
        prior, energy(network, df.Entropy(), mean, inputs), {}, RANDOMNESS
    )
    p = Problem(3, 3, mean, matrix, inputs)
    assert_belief(posterior, *updated(p, g, H.sum(0), structure), atol=1e-11)


@pytest.mark.parametrize("structure", ["full", "diagonal"])
def test_clipping_before_is_never_less_curvature_than_after(structure: str) -> None:
    """E clip(H) ≥ clip(E H) ≥ E H, in dense precisions; on this batch strictly."""
    never, after, before = (
        torch.linalg.inv(
            infer(
                df.Bong(df.Hessian(clip), nodes=41), ALL_ROWS, df.Entropy(), structure
            ).covariance.dense()
        )
        for clip in ("never", "after", "before")
    )
    for less, more in ((never, after), (after, before)):
        gap = torch.linalg.eigvalsh(more - less)
        assert gap[0] > -1e-9
        assert gap[-1] > 0.01


@pytest.mark.parametrize("structure", ["full", "diagonal"])
@pytest.mark.parametrize(
    "rule",
    [
        df.Linearized(df.Hessian("never")),
        df.Bong(df.Hessian("never"), samples=6),
        df.Bong(df.Hessian("never"), nodes=9),
        df.Variational(df.Hessian("never"), nodes=9),
    ],
    ids=repr,
)
def test_a_raw_hessian_that_leaves_no_precision_is_refused(rule: Inference, structure: str) -> None:
    """At a tie entropy has the curvature -1/4 in the logit, which is more than a wide prior has."""
    p = PROBLEMS["1d"]._replace(mean=vector(0.0))
    narrow, wide = (p._replace(matrix=vector(each)[:, None]) for each in (0.3, 10.0))
    assert infer(rule, narrow, df.Entropy(), structure).covariance.variance() > 0.3
    with pytest.raises(df.NotPositiveDefiniteError, match=r"is not positive definite.*'after'"):
        infer(rule, wide, df.Entropy(), structure)


def optimum(p: Problem, structure: str = "full") -> tuple[Tensor, Tensor]:
    """The Gaussian that minimises E_q[E] + KL(q ‖ prior) for pseudo-label cross-entropy: scipy on a
    grid of θ.
    """
    d, precision = len(p.mean), torch.linalg.inv(project(structure, p.matrix))
    targets = hard_labels(p.logits(p.mean[None])[0])
    grid, weights = gaussian_grid(
        torch.zeros_like(p.mean), torch.eye(d, dtype=torch.float64), 401 if d == 1 else 61
    )
    below = project(structure, torch.ones(d, d, dtype=torch.float64)).tril(-1).bool()

    def unpack(x: Tensor) -> tuple[Tensor, Tensor]:
        root = torch.diag(x[d : 2 * d].exp())
        return x[:d], root.masked_scatter(below, x[2 * d :])

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        leaf = torch.tensor(x, requires_grad=True)
        mean, root = unpack(leaf)
        loss = (weights[:, None] * cross_entropy(p.logits(mean + grid @ root.mT), targets)).sum()
        deviation = mean - p.mean
        divergence = (
            (precision * (root @ root.mT)).sum() + deviation @ precision @ deviation
        ) / 2 - leaf[d : 2 * d].sum()
        value = BETA / len(p.inputs) * loss + divergence
        value.backward()
        assert leaf.grad is not None
        return value.item(), leaf.grad.numpy()

    start = np.concatenate((p.mean.numpy(), np.zeros(d + int(below.sum()))))
    best = minimize(objective, start, jac=True, method="BFGS", options={"gtol": 1e-9})
    mean, root = unpack(torch.tensor(best.x))
    return mean, root @ root.mT


def divergence(belief: df.Belief, mean: Tensor, matrix: Tensor) -> float:
    """KL(belief ‖ N(mean, matrix))."""
    ratio, shift = torch.linalg.solve(matrix, belief.covariance.dense()), mean - belief.mean
    value = (
        ratio.trace() - len(mean) - torch.logdet(ratio) + shift @ torch.linalg.solve(matrix, shift)
    )
    return float(value) / 2


@pytest.mark.parametrize("rate", [0.3, 1.0])
@pytest.mark.parametrize(
    ("name", "structure"),
    [
        ("1d", "full"),
        ("2d", "full"),
        pytest.param("3 classes", "full", marks=pytest.mark.slow),
        ("2d", "diagonal"),
        ("2d", "low rank"),
    ],
)
def test_variational_converges_to_the_optimum(name: str, structure: str, rate: float) -> None:
    """Under Diagonal that is the mean-field problem."""
    p = PROBLEMS[name]
    best = optimum(p, structure)
    posterior = infer(df.Variational(nodes=81, rate=rate), p, df.PseudoLabel(), structure)
    assert divergence(posterior, *best) < 1e-9
    assert divergence(infer(df.Bong(nodes=81), p, df.PseudoLabel(), structure), *best) > 1e-4
    if structure == "diagonal":
        assert (best[0] - optimum(p)[0]).abs().max() > 1e-3


def test_variational_with_draws_approaches_the_optimum() -> None:
    p = PROBLEMS["2d"]._replace(matrix=0.2 * PROBLEMS["2d"].matrix)
    assert_belief(
        infer(df.Variational(samples=1000, rate=1.0), p, df.PseudoLabel()), *optimum(p), atol=1e-3
    )


@pytest.mark.parametrize("structure", ["full", "diagonal"])
def test_damped_variational_steps_follow_their_formula(structure: str) -> None:
    """P ← (1 - r) P + r (P⁻ + E_q[FᵀF]), then μ ← μ - r P⁻¹ (P⁻(μ - μ⁻) + E_q[g])."""
    p, rate = PROBLEMS["2d"], 0.3
    mean, before = p.mean, torch.linalg.inv(project(structure, p.matrix))
    precision = before
    for iterations in (1, 2, 3):
        g, H = expected(p, cross_entropy, mean, torch.linalg.inv(precision))
        precision = (1 - rate) * precision + rate * (before + project(structure, H))
        mean = mean - rate * torch.linalg.solve(precision, before @ (mean - p.mean) + g)
        rule = df.Variational(nodes=81, rate=rate, iterations=iterations)
        assert_belief(
            infer(rule, p, df.PseudoLabel(), structure),
            mean,
            torch.linalg.inv(precision),
            atol=1e-8,
        )


@pytest.mark.parametrize("rate", [0.3, 1.0])
@pytest.mark.parametrize("name", ["1d", "2d"])
@pytest.mark.parametrize("clip", CLIPS)
def test_variational_fixed_point_for_an_indefinite_loss(clip: Clip, name: str, rate: float) -> None:
    """Σ⁻¹ = (Σ⁻)⁻¹ + E_q[H] and (Σ⁻)⁻¹(μ - μ⁻) + E_q[g] = 0 with q the posterior itself, whatever
    the rate and whenever H is clipped.
    """
    p = PROBLEMS[name]
    rule = df.Variational(df.Hessian(clip), nodes=1001, rate=rate, iterations=300)
    posterior = infer(rule, p, df.Entropy())
    matrix = posterior.covariance.dense()
    g, H = expected(p, entropy, posterior.mean, matrix, clip)
    torch.testing.assert_close(
        torch.linalg.inv(matrix), torch.linalg.inv(p.matrix) + H, rtol=0, atol=1e-4
    )
    torch.testing.assert_close(
        torch.linalg.solve(p.matrix, p.mean - posterior.mean), g, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_variational_goes_on_while_only_the_covariance_moves(rate: float) -> None:
    """At a mean of 0 the expected gradient of entropy is 0 by symmetry: the mean never moves."""
    p = PROBLEMS["2d"]._replace(mean=vector(0, 0))
    rule = df.Variational(df.Hessian("before"), nodes=1001, rate=rate, iterations=300)
    posterior = infer(rule, p, df.Entropy())
    H = expected(p, entropy, p.mean, posterior.covariance.dense(), "before")[1]
    assert_belief(posterior, p.mean, torch.linalg.inv(torch.linalg.inv(p.matrix) + H), atol=1e-5)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    ("bong", "first"),
    [
        (df.Bong(nodes=21), df.Variational(nodes=21, rate=1.0, iterations=1)),
        (df.Bong(samples=7), df.Variational(samples=7, rate=1.0, iterations=1)),
    ],
    ids=["nodes", "draws"],
)
def test_first_full_variational_step_is_bong(
    bong: df.Bong, first: df.Variational, structure: str
) -> None:
    p = PROBLEMS["3 classes"]
    exact = infer(bong, p, df.Entropy(), structure)
    assert_belief(
        infer(first, p, df.Entropy(), structure), exact.mean, exact.covariance.dense(), atol=1e-12
    )


def test_nodes_integrate_each_view_and_sample_over_its_own_spread() -> None:
    """A clean batch of zeros has logits without variance, its augmented views do not."""
    p = PROBLEMS["3 classes"]._replace(
        mean=vector(0.4, -0.3), inputs=torch.zeros(4, 1, dtype=torch.float64)
    )
    assert_belief(infer(df.Bong(nodes=31), p, df.Entropy()), p.mean, p.matrix, atol=0)
    shifted = vector(0.5, -1.0, 2.0, 0.0)[:, None]
    loss = df.Consistency(lambda inputs, generator: inputs + shifted, "cross_entropy", "soft")
    q = p._replace(inputs=shifted)
    theta, weights = gaussian_grid(p.mean, p.matrix, 161)
    gradient, hessian = derivatives(
        cross_entropy, q.logits(theta), torch.full((4, 3), 1 / 3, dtype=torch.float64)
    )
    J = q.jacobian()
    g = BETA / 4 * torch.einsum("m,mnk,nkd->d", weights, gradient, J)
    H = BETA / 4 * torch.einsum("m,mnkl,nkd,nle->de", weights, hessian, J, J)
    assert_belief(infer(df.Bong(nodes=81), p, loss), *updated(p, g, H), atol=1e-8)


@pytest.mark.parametrize(
    ("logits", "loss", "curvature", "nodes", "message"),
    [
        (
            linear,
            df.Entropy(),
            df.Hessian(),
            7,
            "nodes must be 0 unless the model is linear in θ .*use samples, got 7",
        ),
        (
            df.LinearHead(3),
            df.InformationMaximization(),
            df.Hessian(),
            7,
            "nodes must be 0 for losses that couple .*got 7",
        ),
        (
            df.LinearHead(3),
            df.Sum(),
            df.Hessian(),
            7,
            "nodes must be 0 for losses that couple .*got 7",
        ),
        (
            df.LinearHead(3),
            df.Entropy(),
            df.EmpiricalFisher(),
            7,
            r"nodes must be 0 for EmpiricalFisher\(.*use samples, got 7",
        ),
        (
            df.LinearHead(3),
            df.Entropy(),
            df.Hessian(),
            47,
            "nodes must be at most 46 for 3 logit directions.*got 47",
        ),
    ],
)
@pytest.mark.parametrize("rule", [df.Bong, df.Variational])
def test_nodes_are_refused_where_they_cannot_work(
    rule: type[df.Bong] | type[df.Variational],
    logits: LogitFunction | PredictiveModel,
    loss: df.Loss,
    curvature: df.Curvature,
    nodes: int,
    message: str,
) -> None:
    prior = df.Belief(normal(6), df.Full(spread(6)))
    with pytest.raises(ValueError, match=message):
        rule(curvature, nodes=nodes)(
            prior, energy(logits, loss, prior.mean, normal(4, 2)), {}, RANDOMNESS
        )


@pytest.mark.parametrize(
    ("rule", "reference"),
    [
        (df.SGD(0.3), lambda theta: torch.optim.SGD([theta], 0.3)),
        (df.SGD(0.3, momentum=0.9), lambda theta: torch.optim.SGD([theta], 0.3, momentum=0.9)),
        (
            df.SGD(0.3, 0.9, nesterov=True),
            lambda theta: torch.optim.SGD([theta], 0.3, momentum=0.9, nesterov=True),
        ),
        (
            df.Adam(0.1, (0.8, 0.95), 1e-3),
            lambda theta: torch.optim.Adam([theta], 0.1, (0.8, 0.95), 1e-3),
        ),
        (
            df.SGD(0.3, 0.9, nesterov=True, weight_decay=0.2),
            lambda theta: torch.optim.SGD(
                [theta], 0.3, momentum=0.9, nesterov=True, weight_decay=0.2
            ),
        ),
        (
            df.Adam(0.1, weight_decay=0.3),
            lambda theta: torch.optim.Adam([theta], 0.1, weight_decay=0.3),
        ),
        (
            df.AdamW(0.1, (0.8, 0.95), weight_decay=0.3),
            lambda theta: torch.optim.AdamW([theta], 0.1, (0.8, 0.95), weight_decay=0.3),
        ),
    ],
    ids=["SGD", "momentum", "nesterov", "Adam", "SGD with decay", "Adam with decay", "AdamW"],
)
def test_gradient_step_is_the_optimizer_of_torch(
    rule: Any, reference: Callable[[Tensor], torch.optim.Optimizer]
) -> None:
    filt = df.Filter(
        network,
        df.Transition(df.RandomWalk(), df.NoNoise()),
        df.Gibbs(df.Entropy(), df.Constant(BETA)),
        df.GradientStep(rule),
    )
    state = filt.init(df.Belief(normal(10, seed=5), df.Full(spread(10))))
    theta = normal(10, seed=5).requires_grad_()
    optimizer = reference(theta)
    for step in range(20):
        inputs = normal(4, 2, seed=100 + step)
        optimizer.zero_grad()
        (BETA * entropy(network(theta, inputs), inputs).mean()).backward()
        optimizer.step()
        state, _, _ = filt.step(state, inputs)
        assert_belief(state.belief, theta.detach(), spread(10), atol=1e-12)
    assert (theta - normal(10, seed=5)).abs().max() > 0.1


def test_plain_sgd_is_the_filter_without_curvature_from_an_isotropic_prior() -> None:
    prior = df.Belief(normal(10), df.Diagonal(torch.full((10,), 0.3, dtype=torch.float64)))
    e = energy(network, df.Entropy(), prior.mean, normal(4, 2, seed=1))
    linearized, _ = df.Linearized(df.NoCurvature())(prior, e, {}, RANDOMNESS)
    stepped, _ = df.GradientStep(df.SGD(0.3))(prior, e, {}, RANDOMNESS)
    torch.testing.assert_close(stepped.mean, linearized.mean, rtol=0, atol=1e-15)
    assert stepped.covariance is prior.covariance


test_settings_out_of_range_are_refused = refuses(
    [
        (
            df.Linearized,
            {"radius": -1.0},
            "Linearized.radius must be a finite number in [0, inf), got -1.0",
        ),
        (
            df.Linearized,
            {"reach": 0.5},
            "Linearized.reach must be a finite number in [1, inf), got 0.5",
        ),
        (df.Bong, {"samples": -1}, "Bong.samples must be an integer >= 0, got -1"),
        (df.Bong, {"nodes": 2.0}, "Bong.nodes must be an integer >= 0, got 2.0"),
        (
            df.Bong,
            {"nodes": 6},
            "Bong.nodes must be 0 (none) or at least 7, below which the rule is rough, got 6",
        ),
        (
            df.Bong,
            {"curvature": 8},
            "Bong.curvature must be of role 'curvature', such as Hessian(), got 8",
        ),
        (
            df.Linearized,
            {"curvature": df.Hessian},
            "Linearized.curvature must be of role 'curvature', such as Hessian(), got <class",
        ),
        (
            df.Linearized,
            {"curvature": df.Entropy()},
            "Linearized.curvature must be of role 'curvature', such as Hessian(), got Entropy()",
        ),
        (
            df.GradientStep,
            {"rule": df.Adam},
            "GradientStep.rule must be of role 'optimizer', such as SGD() or Adam(), got <class",
        ),
        (
            df.GradientStep,
            {"rule": 1e-3},
            "GradientStep.rule must be of role 'optimizer', such as SGD() or Adam(), got 0.001",
        ),
        (
            df.Variational,
            {"rate": 0.0},
            "Variational.rate must be a finite number in (0, 1], got 0.0",
        ),
        (
            df.Variational,
            {"rate": 1.5},
            "Variational.rate must be a finite number in (0, 1], got 1.5",
        ),
        (
            df.Variational,
            {"iterations": 0},
            "Variational.iterations must be an integer >= 1, got 0",
        ),
        (
            df.Variational,
            {"tolerance": math.nan},
            "Variational.tolerance must be a finite number in [0, inf), got nan",
        ),
        (df.SGD, {"lr": 0}, "SGD.lr must be a finite number in (0, inf), got 0"),
        (df.SGD, {"momentum": 1.0}, "SGD.momentum must be a finite number in [0, 1), got 1.0"),
        (df.SGD, {"nesterov": True}, "SGD.nesterov must be False without momentum, got True"),
        (df.Adam, {"betas": 0.9}, "Adam.betas must be two numbers, got 0.9"),
        (df.Adam, {"betas": (0.9, 1.0)}, "Adam.betas must be a finite number in [0, 1), got 1.0"),
        (df.Adam, {"eps": 0.0}, "Adam.eps must be a finite number in (0, inf), got 0.0"),
    ],
    lambda rule, settings: rule(**settings),
    exact=True,
)


@pytest.mark.slow
def test_variational_reaches_the_mean_field_optimum_of_correlated_features() -> None:
    """A projected precision makes the undamped and the half-damped iteration diverge here."""
    generator = torch.Generator().manual_seed(0)
    inputs = 1.5 + 0.3 * torch.randn(40, 20, generator=generator, dtype=torch.float64)
    prior = df.Belief(
        0.1 * torch.randn(20, generator=generator, dtype=torch.float64),
        df.Diagonal(torch.ones(20).double()),
    )
    batch = df.Gibbs(df.PseudoLabel(), df.Constant(40.0))(
        df.LinearHead(2), prior.mean, inputs, {}, RANDOMNESS
    )[0]
    rule = df.Variational(nodes=21, iterations=2000)
    posterior, memory = rule(prior, batch, {}, RANDOMNESS)
    assert memory["inference.residual"] < rule.tolerance
    gradient, factor, _ = take_expectation(posterior, batch, rule.curvature, 0, 21, RANDOMNESS)
    assert (posterior.mean - prior.mean + gradient).abs().max() < 1e-4  # P⁻ (μ - μ⁻) + E_q[g] = 0
    torch.testing.assert_close(
        posterior.covariance.precision(), 1 + factor.square().sum(0), rtol=1e-4, atol=0
    )


def tied_to_the_source(
    observation: df.Gibbs, mean: Tensor, inputs: Tensor, source: df.Belief
) -> Energy:
    return observation(lift(network), mean, inputs, {}, RANDOMNESS, source)[0]


@pytest.mark.parametrize("matrix", ["full", "diagonal"])
def test_an_anchor_is_the_gradient_of_a_quadratic_around_the_source(matrix: str) -> None:
    dense = spread(10) if matrix == "full" else torch.diag(spread(10).diagonal())
    covariance = df.Full(dense) if matrix == "full" else df.Diagonal(dense.diagonal().clone())
    source, inputs, theta = (
        df.Belief(normal(10, seed=5), covariance),
        normal(4, 2),
        normal(10, seed=6).requires_grad_(),
    )
    away = theta - source.mean
    (
        entropy(network(theta, inputs), inputs).mean()
        + 0.7 / 2 * away @ torch.linalg.inv(dense) @ away
    ).backward()
    assert theta.grad is not None
    prior = df.Belief(theta.detach(), df.Full(spread(10)))
    rule = df.GradientStep(df.SGD(0.1), anchor=0.7, keep_gradient=True)
    posterior, memory = rule(
        prior, tied_to_the_source(df.Gibbs(), prior.mean, inputs, source), {}, RANDOMNESS
    )
    assert_belief(posterior, theta.detach() - 0.1 * theta.grad, spread(10), atol=1e-12)
    torch.testing.assert_close(memory["inference.gradient"], theta.grad, rtol=1e-11, atol=1e-13)
    with pytest.raises(
        ValueError, match=r"GradientStep.anchor must be 0 if the energy does not know the source"
    ):
        rule(prior, energy(lift(network), df.Entropy(), prior.mean, inputs), {}, RANDOMNESS)


def test_a_radius_takes_the_gradient_at_the_worst_point_of_the_samples_still_kept() -> None:
    gate = df.Gibbs(df.Entropy(), df.EntropyGate(0.9, weighted=False), over="kept")
    inputs, theta, limit = (
        normal(12, 2),
        normal(10, seed=8),
        0.9 * math.log(len(network(normal(10), normal(1, 2))[0])),
    )

    def mean_entropy(point: Tensor, chosen: Tensor) -> Tensor:
        return entropy(network(point, inputs), inputs)[chosen].mean()

    first = entropy(network(theta, inputs), inputs) < limit
    slope = torch.func.grad(mean_entropy)(theta, first)
    sharp = theta + 0.5 * slope / slope.norm()
    second = first & (entropy(network(sharp, inputs), inputs) < limit)
    assert 0 < second.sum() < first.sum() < 12
    prior = df.Belief(theta, df.Full(spread(10)))
    posterior, memory = df.GradientStep(df.SGD(0.1), radius=0.5)(
        prior, tied_to_the_source(gate, theta, inputs, prior), {}, RANDOMNESS
    )
    assert_belief(
        posterior,
        theta - 0.1 * torch.func.grad(mean_entropy)(sharp, second),
        spread(10),
        atol=1e-12,
    )
    torch.testing.assert_close(
        memory["inference.loss"], mean_entropy(sharp, second), rtol=1e-12, atol=0
    )
    far = df.GradientStep(df.SGD(0.1, momentum=0.9), radius=1.5)
    assert not (
        first & (entropy(network(theta + 1.5 * slope / slope.norm(), inputs), inputs) < limit)
    ).any()
    still, memory = far(
        prior,
        tied_to_the_source(gate, theta, inputs, prior),
        {"inference.velocity": slope},
        RANDOMNESS,
    )
    assert still is prior  # every sample has left
    assert memory["inference.loss"].isnan()
    assert memory["inference.velocity"] is slope


def test_frozen_gives_back_the_prior() -> None:
    prior, memory = df.Belief(normal(10), df.Full(spread(10))), {"other": normal(1)}
    posterior, after = df.Frozen()(
        prior, energy(lift(network), df.Entropy(), prior.mean, normal(4, 2)), memory, RANDOMNESS
    )
    assert posterior is prior
    assert after is memory

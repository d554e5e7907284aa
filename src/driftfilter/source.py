"""The source posterior p(θ_S given D_S): what labeled source data say about the parameters before the stream."""

from __future__ import annotations

import torch
from torch import Tensor

from driftfilter.belief import Belief
from driftfilter.checks import require, require_finite
from driftfilter.covariance import Covariance, Diagonal, Full
from driftfilter.curvature import Hessian
from driftfilter.losses import PseudoLabel
from driftfilter.lowrank import LowRank
from driftfilter.observation import Energy, Evaluation, Gibbs, Samples, evaluate, pulled_back
from driftfilter.predictive import LogitFunction, PredictiveModel, lift


@torch.no_grad()
def fit_laplace(
    logits: LogitFunction | PredictiveModel, prior: Belief, inputs: Tensor, labels: Tensor, iterations: int = 100
) -> Belief:
    """Laplace approximation N(θ*, Λ⁻¹): the mode θ* by Newton's method from the prior's mean, Λ the Hessian there.

    Λ = Λ_prior + Σ_i J_iᵀ (diag p_i - p_i p_iᵀ) J_i, a *sum* over the source samples (the paper calls Λ⁻¹ the Hessian);
    exact for linear heads, generalised Gauss–Newton for others. ``labels`` [n] are class indices; the covariance keeps the
    prior's structure. Raises if the mode is not reached in ``iterations`` steps.
    """
    require(isinstance(prior, Belief), "prior", prior, "a Belief")
    energy = _labeled(lift(logits), prior, inputs, labels)
    exact = _exact(prior.covariance)
    mean, evaluation = prior.mean, energy.evaluation
    for _ in range(iterations):
        gradient, factor = Hessian()(evaluation)
        slope = exact.solve(mean - prior.mean) + gradient
        step = exact.condition(factor).apply(slope)
        decrement = (step @ slope).item()  # squared length of the step in posterior standard deviations
        if decrement <= max(1e-12, 0.1 * torch.finfo(mean.dtype).eps):
            _, factor = Hessian()(energy.at(mean - step))
            return Belief(mean - step, prior.covariance.condition(factor).truncate())
        mean, evaluation = _backtracked(prior.mean, exact, energy, mean, evaluation, step, decrement)
    raise ValueError(
        f"iterations must be enough to reach the mode, got {iterations}: the next Newton step is still"
        f" {decrement**0.5:g} posterior standard deviations long (gradient norm {slope.norm().item():g})"
    )


def _labeled(model: PredictiveModel, prior: Belief, inputs: Tensor, labels: Tensor) -> Energy:
    """The energy Σ_i -log p(y_i given x_i, θ) of labeled samples."""
    sample = isinstance(inputs, Tensor) and inputs.dim() >= 1 and inputs.shape[0] >= 1
    require(sample, "inputs", getattr(inputs, "shape", type(inputs).__name__), "a tensor [n, ...] with n >= 1")
    require_finite("inputs", inputs)
    require(isinstance(labels, Tensor), "labels", type(labels).__name__, "a tensor of integers")
    pulled = pulled_back(model, prior.mean, inputs)
    classes = pulled[0].shape[-1]
    whole = labels.shape == inputs.shape[:1] and not labels.is_floating_point()
    require(whole, "labels", f"{labels.dtype} of shape {list(labels.shape)}", f"integers of shape [{len(inputs)}]")
    inside = int(labels.min()) >= 0 and int(labels.max()) < classes
    require(inside, "labels", f"values from {int(labels.min())} to {int(labels.max())}", f"in [0, {classes - 1}]")
    targets = torch.nn.functional.one_hot(labels.long(), classes).to(prior.mean)
    ones = prior.mean.new_ones(len(inputs))
    samples = Samples(targets, ones, ones, len(inputs))
    loss = PseudoLabel()  # cross-entropy to the targets it is given
    return Energy(Gibbs(loss), model, (inputs,), samples, prior.mean, evaluate(loss, [pulled], samples))


def _exact(covariance: Covariance) -> Covariance:
    """The same covariance in a structure that conditions without projection: the mode must not depend on the structure."""
    if isinstance(covariance, Diagonal):
        return LowRank(covariance.values.reciprocal(), covariance.values.new_zeros(0, covariance.dimension), 0)
    return covariance if isinstance(covariance, LowRank) else Full(covariance.dense())


def _backtracked(
    center: Tensor, prior: Covariance, energy: Energy, mean: Tensor, evaluation: Evaluation, step: Tensor, decrement: float
) -> tuple[Tensor, Evaluation]:
    """The first of μ - step, μ - step/2, … that lowers the negative log posterior enough (Armijo's rule)."""

    def objective(point: Tensor, at: Evaluation) -> float:
        return at.expansion.value.sum().item() + 0.5 * ((point - center) @ prior.solve(point - center)).item()

    before = objective(mean, evaluation)
    rounding = 10 * torch.finfo(mean.dtype).eps * abs(before)
    for halvings in range(40):
        size = 0.5**halvings
        moved = mean - size * step
        after = energy.at(moved)
        if objective(moved, after) <= before - 1e-4 * size * decrement + rounding:
            return moved, after
    raise ValueError(f"logits must be smooth in theta: no step along the Newton direction lowers the objective {before:g}")

"""The source posterior p(θ_S given D_S): what labeled source data say about the parameters before the stream."""

from __future__ import annotations

import torch
from torch import Tensor

from driftfilter.belief import Belief
from driftfilter.checks import require, require_finite
from driftfilter.curvature import Hessian
from driftfilter.inference import Variational
from driftfilter.losses import PseudoLabel
from driftfilter.observation import Energy, Samples, evaluate, pulled_back
from driftfilter.predictive import LogitFunction, PredictiveModel, lift
from driftfilter.randomness import Randomness


@torch.no_grad()
def fit_laplace(
    logits: LogitFunction | PredictiveModel, prior: Belief, inputs: Tensor, labels: Tensor, iterations: int = 100
) -> Belief:
    """Laplace approximation N(θ*, Λ⁻¹): the mode θ* by Newton's method from the prior's mean, Λ the Hessian there.

    Λ = Λ_prior + Σ_i J_iᵀ (diag p_i - p_i p_iᵀ) J_i, a *sum* over the source samples (the paper calls Λ⁻¹ the Hessian).
    ``labels`` [n] are class indices; the covariance keeps the prior's structure.
    """
    require_finite("inputs", inputs)
    model = lift(logits)
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
    energy = Energy(model, loss, (inputs,), samples, prior.mean, evaluate(loss, [pulled], samples))
    newton = Variational(Hessian(), samples=0, rate=1.0, iterations=iterations, tolerance=1e-9)
    return newton(prior, energy, {}, Randomness(0, 0, prior.mean.device))[0]

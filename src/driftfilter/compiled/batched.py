"""One step of many streams in batched torch algebra, on any device: the same rules as one filter,
with a dimension more.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from driftfilter.base.checks import NotFiniteError, NotPositiveDefiniteError, require
from driftfilter.compiled.terms import KAPPA, Motion
from driftfilter.gaussian.belief import Belief
from driftfilter.gaussian.covariance import identity_like, symmetrize
from driftfilter.inference.curvature import EmpiricalFisher, GaussNewton, Hessian
from driftfilter.inference.prediction import LinearizedProbit, Prediction, Tempered
from driftfilter.model.losses import Loss

if TYPE_CHECKING:
    from driftfilter.filtering import Filter


def batched_step(
    filt: Filter, motion: Motion, source: Belief, x: Tensor, mean: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Means [m, d] and covariances [m, d] or [m, d, d] after a batch [m, n, D] each;
    log-probabilities and variances.
    """
    loss: Loss = filt.observation.loss  # type: ignore[assignment]  # as_loss in Gibbs
    require(
        not loss.is_coupled,
        "Fleet: the loss",
        loss,
        "one of each sample alone where numba is not used",
    )
    mean, values = _moved(motion, mean, values)
    classes: int = filt.logits.classes  # type: ignore[union-attr]
    prior = _logits(mean, x, classes)
    _require(_finite(prior.flatten(1)), NotFiniteError, "the model's logits must be finite")
    targets = loss.targets(prior)
    selected = loss.selected(targets)
    weights, _ = filt.observation.weighting(
        prior, torch.ones_like(prior[..., 0]) if selected is None else selected, {}
    )
    used = weights.count_nonzero(-1)
    over = used if filt.observation.over == "kept" else torch.full_like(used, x.shape[1])
    coefficients = weights / over.clamp_min(max(filt.observation.reference, 1))[:, None]
    coefficients = (
        coefficients * (used >= filt.needed)[:, None]
    )  # with none of them a stream learns nothing
    expansion = loss.expand(prior[None], targets, weights)
    rows = _factor(filt.inference.curvature, expansion, prior, x, coefficients, mean.shape[1])
    slope = _summed(expansion.gradient[0] * coefficients[..., None], x, mean.shape[1])
    after, left = _conditioned(mean, values, rows, slope, filt)
    _require(_finite(after), NotFiniteError, "the posterior mean must be finite")
    posterior = filt.predict_from == "posterior"
    logits = _logits(after, x, classes) if posterior else prior
    prediction = _predicted(filt.prediction, logits, left if posterior else values, x)
    return after, left, prediction.log_probabilities, prediction.logit_variance


def _require(good: Tensor, error: type[Exception], what: str) -> None:
    """Raise where a stream fails a check [m]."""
    if not bool(good.all()):
        raise error(
            f"{what}; not so for {int((~good).sum())} of {len(good)} streams, the first at place "
            f"{int(good.int().argmin())}"
        )


def _finite(rows: Tensor) -> Tensor:
    """Whether the numbers of each row [m, ...] are finite; a finite sum proves it, at the cost of
    one reduction.
    """
    proven = torch.isfinite(rows.sum(1))
    return proven if bool(proven.all()) else torch.isfinite(rows).all(1)


def _moved(motion: Motion, mean: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The transition: means and covariances of all streams."""
    arrays = [torch.from_numpy(array).to(mean) for array in motion[:4]]
    (gain, drift, diagonal, kappa, origin), matrix, factor, noise = arrays
    prior = torch.addcmul(drift, mean, gain)
    pulled = motion.vectors[KAPPA].any()
    extra = (
        torch.addcmul(diagonal, kappa, (mean - origin).square())
        if pulled
        else diagonal.expand_as(mean)
    )
    if values.dim() == 2:
        return prior, torch.addcmul(extra, values, factor[0])
    if matrix.numel():
        prior, values = prior + mean @ matrix.mT, matrix @ values @ matrix.mT
    values = values * factor + torch.diag_embed(extra)
    return prior, symmetrize(values + noise if noise.numel() else values)


def _logits(mean: Tensor, x: Tensor, classes: int) -> Tensor:
    """[m, n, k]."""
    logits = x @ mean.unflatten(1, (-1, x.shape[-1])).mT
    return logits if logits.shape[-1] == classes else torch.nn.functional.pad(logits, (1, 0))


def _own(cotangents: Tensor, x: Tensor, d: int) -> Tensor:
    """Those of the classes that have parameters: the first one may have none."""
    return cotangents[..., cotangents.shape[-1] - d // x.shape[-1] :]


def _pulled(cotangents: Tensor, x: Tensor, d: int) -> Tensor:
    """Rows J_iᵀ c_i: [m, n, k] -> [m, n, d]."""
    return (_own(cotangents, x, d)[..., None] * x[..., None, :]).flatten(-2)


def _summed(cotangents: Tensor, x: Tensor, d: int) -> Tensor:
    """Σ_i J_iᵀ c_i: [m, n, k] -> [m, d]."""
    return (_own(cotangents, x, d).mT @ x).flatten(1)


def _factor(
    curvature: Any, expansion: Any, logits: Tensor, x: Tensor, coefficients: Tensor, d: int
) -> Tensor:
    """F [m, rows, d]."""
    scale = coefficients.sqrt()[..., None]
    if isinstance(curvature, EmpiricalFisher):
        gradient, scale = expansion.gradient[0], curvature.scale * scale
        if not curvature.centered:
            return _pulled(gradient * scale, x, d)
        shares = coefficients / coefficients.sum(1, keepdim=True).clamp_min(
            torch.finfo(x.dtype).tiny
        )
        middle = _summed(gradient * shares[..., None], x, d)
        return (_pulled(gradient, x, d) - middle[:, None]) * scale
    if isinstance(curvature, Hessian):
        root = expansion.root()[0]
    elif isinstance(curvature, GaussNewton):
        p = logits.softmax(-1)
        share = torch.as_tensor(expansion.shares[0]).to(p).expand(p.shape[:-1])
        root = (
            torch.diag_embed(p.sqrt()) - p[..., :, None] * p.sqrt()[..., None, :]
        ) * share.sqrt()[..., None, None]
    else:
        return x.new_zeros(len(x), 0, d)
    return torch.cat([_pulled(column * scale, x, d) for column in root.unbind(-1)], 1)


def _conditioned(
    mean: Tensor, values: Tensor, rows: Tensor, slope: Tensor, filt: Filter
) -> tuple[Tensor, Tensor]:
    """Σ = ((Σ⁻)⁻¹ + FᵀF)⁻¹ and μ = μ⁻ - Σ g of all streams."""
    radius: float = filt.inference.radius  # type: ignore[attr-defined]
    if values.dim() == 2:
        energy = rows[:, 0].square() if rows.shape[1] == 1 else rows.square().sum(1)
        left = values / energy.mul_(values).add_(1)
        _require(left.amin(1) > 0, NotPositiveDefiniteError, "variances must stay positive")
        step = slope.mul_(left)
    else:
        cross = rows.double() @ values.double()
        root, status = torch.linalg.cholesky_ex(
            cross @ rows.double().mT + identity_like(cross @ rows.double().mT)
        )
        _require(status == 0, NotPositiveDefiniteError, "I + F Σ Fᵀ must be positive definite")
        whitened = torch.linalg.solve_triangular(root, cross, upper=False)
        exact = symmetrize(values.double() - whitened.mT @ whitened)
        step = (exact @ slope.double()[..., None])[..., 0].to(mean.dtype)
        left = exact.to(mean.dtype)
        definite = torch.linalg.cholesky_ex(left)[1] == 0
        _require(
            definite, NotPositiveDefiniteError, "the posterior covariance must be positive definite"
        )
    if radius:
        length = (
            (rows @ step[..., None])[..., 0]
            .norm(dim=1, keepdim=True)
            .clamp_min(torch.finfo(step.dtype).tiny)
        )
        step = step * (radius / length).clamp_max(1.0)
    return mean - step, left


def _predicted(rule: Any, logits: Tensor, values: Tensor, x: Tensor) -> Prediction:
    if not isinstance(rule, LinearizedProbit):
        temperature = rule.temperature if isinstance(rule, Tempered) else 1.0
        variance = 4 / math.pi * max(temperature**2 - 1, 0.0)
        return Prediction((logits / temperature).log_softmax(-1), torch.full_like(logits, variance))
    k, d = logits.shape[-1], values.shape[1]
    units = identity_like(logits).expand(*logits.shape[:-1], k, k)
    jacobian = torch.stack([_pulled(unit, x, d) for unit in units.unbind(-1)], -2)  # [m, n, k, d]
    moved = jacobian * values[:, None, None] if values.dim() == 2 else jacobian @ values[:, None]
    return rule.of(logits, moved @ jacobian.mT)

"""Curvature: the second derivative of the energy as a factor F [m, d], H ≈ FᵀF, positive
semi-definite unless a raw Hessian is asked for.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias, final, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from driftfilter.base.checks import LATE, Checked, Positive, register
from driftfilter.gaussian.covariance import positive_root
from driftfilter.model.observation import Evaluation

# When negative curvature is cut off, seen from an expectation over θ.
Clip: TypeAlias = Literal["after", "before", "never"]


class Quadratic(NamedTuple):
    """An energy to second order in θ: its gradient, and H = FᵀF - NᵀN."""

    gradient: Tensor  # g [d]
    factor: Tensor  # F [m, d]
    negative: Tensor | None = None  # N [l, d]; None if H is positive semi-definite


class Curvature(Protocol):
    """Gradient and curvature of an energy at one point."""

    @property
    def minimum(self) -> int:
        """Samples below which there is no curvature."""
        return 1

    def __call__(self, evaluation: Evaluation) -> tuple[Tensor, ...]:
        """g [d] and F [m, d]; a third, N [l, d], only if H = FᵀF - NᵀN may be indefinite."""


@runtime_checkable
class LogitMetric(Curvature, Protocol):
    """A curvature Σ_i a_i J_iᵀ M_i J_i that comes from a k×k metric M_i = R_i R_iᵀ in the logits of
    each sample.
    """

    @property
    def clip(self) -> Clip:
        """When negative eigenvalues of M are set to 0; all the same if it has none."""
        return "before"

    def roots(self, evaluation: Evaluation) -> Tensor:
        """R [v, ..., n, k, r], R Rᵀ = the positive part of M."""

    def metric(self, evaluation: Evaluation) -> Tensor:
        """M [v, ..., n, k, k] as an expectation averages it."""
        roots = self.roots(evaluation)
        return roots @ roots.mT

    def factors(self, evaluation: Evaluation, metric: Tensor) -> tuple[Tensor, ...]:
        """F of metrics M [v, n, k, k], and N if nothing is to be clipped."""
        parts = (metric, -metric) if self.clip == "never" else (metric,)
        return tuple(evaluation.factor(positive_root(part, averaged=True)) for part in parts)

    def __call__(self, evaluation: Evaluation) -> tuple[Tensor, ...]:
        gradient = evaluation.gradient()
        if self.clip == "never":
            return gradient, *self.factors(evaluation, self.metric(evaluation))
        return gradient, evaluation.factor(self.roots(evaluation))


@final
@dataclass(frozen=True)
class Hessian(Checked, LogitMetric):
    """Σ_i (w_i/n) J_iᵀ clip(∇²_f ℓ_i) J_i: each sample's k×k logit Hessian with negative
    eigenvalues set to 0.

    Exact for a linear head but for the clipping (entropy's Hessian is indefinite); for a network it
    leaves out the second derivative of f. ``clip`` says when an expectation over θ (``Bong``,
    ``Variational``) clips: "after" it, clip(E_q[∇²ℓ_i]), "before" it, E_q[clip ∇²ℓ_i], which is
    never smaller, or "never", E_q[∇²ℓ_i] as it is. At one point "after" and "before" are the same.
    With "never" a posterior may have no positive definite precision, and is then refused.

    If batch statistics couple the samples of a batch, J_i is still the derivative of sample i's own
    logits, which takes n k backward passes a batch, not k; with statistics="source" it takes k.

    "after" clips in the logits of each sample if the model is linear in θ. Otherwise the Jacobian
    changes from draw to draw, and the positive part of each sample's average is taken in θ.
    """

    clip: Clip = field(default="after", metadata=LATE)

    def roots(self, evaluation: Evaluation) -> Tensor:
        return evaluation.expansion.root()

    def metric(self, evaluation: Evaluation) -> Tensor:
        if self.clip == "before":
            return super().metric(evaluation)
        return evaluation.expansion.hessian()


@final
@dataclass(frozen=True)
class GaussNewton(LogitMetric):
    """Generalised Gauss–Newton with the softmax metric: Σ_i (w_i/n) J_iᵀ (diag p_i - p_i p_iᵀ) J_i.

    If batch statistics couple the samples of a batch, J_i is still the derivative of sample i's own
    logits, which takes n k backward passes a batch, not k; with statistics="source" it takes k.
    """

    def roots(self, evaluation: Evaluation) -> Tensor:
        """diag(√p) - p √pᵀ."""
        p = evaluation.class_logits.softmax(-1)
        root = p.sqrt()
        samples = p.new_ones(p.shape[-2])
        shares = torch.stack(
            [samples * share for share in evaluation.expansion.shares]
        ).sqrt()  # [v, n]
        scale = shares.reshape(len(shares), *[1] * (p.dim() - 3), -1, 1, 1)
        roots = (torch.diag_embed(root) - p[..., :, None] * root[..., None, :]) * scale
        features = evaluation.logits.shape[-1] - p.shape[-1]  # these have no metric
        return functional.pad(roots, (0, 0, 0, features)) if features else roots


@final
@dataclass(frozen=True)
class EmpiricalFisher(Checked, Curvature):
    """F_i = λ √(w_i/n) (g_i - ḡ), g_i = ∇ℓ_i and ḡ their weighted mean (0 when not ``centered``).

    With w_i = β this is F_i = √(β λ²/n) (g_i - ḡ); ``scale`` is λ. Centred, a single sample carries
    no curvature. Where batch statistics couple the samples, a row cannot be told from the weights
    of others: from rows r_i that sum to the gradient g of the energy, F_i = λ (r_i - g/n) / √ā, ā
    the mean of w_i/n, which for equal weights is the same.
    """

    centered: bool = True
    scale: Positive = 1.0

    @property
    def minimum(self) -> int:
        return 2 if self.centered else 1

    def __call__(self, evaluation: Evaluation) -> tuple[Tensor, Tensor]:
        rows = evaluation.rows  # a_i g_i, a_i = w_i/n
        gradient = rows.sum(0)
        if self.centered and rows.shape[0] == 1:
            return gradient, torch.zeros_like(rows)
        weights = evaluation.coefficients.clamp_min(torch.finfo(rows.dtype).tiny)
        if evaluation.is_coupled:
            weights = weights.mean().expand_as(weights)
        if self.centered:
            add = torch.addcmul if evaluation.keeps_rows else Tensor.addcmul_
            rows = add(rows, weights[:, None], gradient / weights.sum(), value=-1.0)
        elif evaluation.keeps_rows:
            rows = rows.clone()
        return gradient, rows.mul_((self.scale * weights.rsqrt())[:, None])


@final
@dataclass(frozen=True)
class NoCurvature(Curvature):
    """F = 0: the covariance does not learn from the batch; the mean step is Σ⁻ g."""

    def __call__(self, evaluation: Evaluation) -> tuple[Tensor, Tensor]:
        gradient = evaluation.gradient()
        return gradient, gradient.new_zeros(0, len(gradient))


register(curvature=(Hessian, EmpiricalFisher, GaussNewton, NoCurvature))

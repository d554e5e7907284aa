"""Inference: from the prior N(μ⁻, Σ⁻) and the energy of a batch to the posterior N(μ, Σ)."""

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple, Protocol, TypeAlias, final, runtime_checkable

import torch
from torch import Tensor

from driftfilter.base.checks import (
    Checked,
    Count,
    Interval,
    NotNegative,
    Role,
    register,
    require,
    require_count,
    require_finite,
    unchecked,
)
from driftfilter.base.randomness import Purpose, Randomness
from driftfilter.gaussian.belief import Belief
from driftfilter.gaussian.covariance import Covariance, antithetic, positive_root
from driftfilter.inference.curvature import (
    Curvature,
    EmpiricalFisher,
    Hessian,
    LogitMetric,
    NoCurvature,
)
from driftfilter.model.observation import Energy, Evaluation
from driftfilter.model.predictive import logit_covariance
from driftfilter.model.weighting import Memory

# Prior variance of the logits, in units of their own, from which a step is as long as it should be.
_FREE = 15.0


@runtime_checkable
class Inference(Protocol):
    """A posterior from a prior and an energy."""

    @property
    def curvature(self) -> Curvature:
        """The curvature it uses, which says how many samples it needs."""

    def __call__(
        self, prior: Belief, energy: Energy, memory: Memory, randomness: Randomness
    ) -> tuple[Belief, Memory]:
        """The posterior, and the memory with what the rule wants to keep."""


@final
@dataclass(frozen=True)
class Frozen:
    """The posterior is the prior: nothing is learned from the batch."""

    curvature = NoCurvature()

    def __call__(
        self, prior: Belief, energy: Energy, memory: Memory, randomness: Randomness
    ) -> tuple[Belief, Memory]:
        return prior, memory


def newton_step(prior: Belief, gradient: Tensor, factor: Tensor, radius: float = 0.0) -> Belief:
    """Σ = ((Σ⁻)⁻¹ + FᵀF)⁻¹, μ = μ⁻ - Σ g, shortened to abs(F Σ g) <= radius if > 0; the mean moves
    before Σ is truncated.

    Dense and diagonal beliefs may have a leading dimension: as many steps at once.
    """
    covariance = prior.covariance.condition(factor)
    step = covariance.apply(gradient)
    if radius:
        along = torch.mv(factor, step) if step.dim() == 1 else (factor @ step[..., None])[..., 0]
        length = along.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(step.dtype).tiny)
        step = step * (radius / length).clamp_max(1.0)
    mean = prior.mean - step
    require_finite("the posterior mean", mean)
    return unchecked(Belief, mean=mean, covariance=covariance.truncate())


@final
@dataclass(frozen=True)
class Linearized(Checked):
    """Second-order expansion of the energy at the prior mean: an extended Kalman step, one Newton
    step.

    ``radius`` r > 0 is a trust region: the mean's step Δ is shortened to |F Δ| ≤ r, so that the
    quadratic energy changes by at most ½ r² nats beside its slope. A diagonal Σ does not see how
    parameters act together, and oversteps without it.

    ``reach`` > 1: the step is up to so many times as long if the prior hardly lets the logits move:
    by min(reach, 15 σ² / v), at least 1, with v the prior variance of the logits along the loss
    (``variance_along``) and σ² the mean square of the logits' deviations from their mean over
    classes. (Of the networks tried, v / σ² is 1 to 4 in a vision transformer and 15 to 44 in
    residual networks with group norm, at the variance of the default.)
    """

    curvature: Annotated[Curvature, Role("curvature", "Hessian()")] = field(
        default_factory=EmpiricalFisher
    )
    radius: NotNegative = 0.0
    reach: Annotated[float, Interval(1, math.inf, open_high=True)] = 1.0

    def __call__(
        self, prior: Belief, energy: Energy, memory: Memory, randomness: Randomness
    ) -> tuple[Belief, Memory]:
        evaluation = energy.at(prior.mean)
        gradient, factor = self.curvature(evaluation)
        if self.reach > 1:
            gradient = gradient * self._lengthen(prior, evaluation)
        return newton_step(prior, gradient, factor, self.radius), memory

    def _lengthen(self, prior: Belief, evaluation: Evaluation) -> Tensor:
        """By how much the step is lengthened, a scalar []."""
        along, length = variance_along(prior.covariance, evaluation)
        logits = evaluation.class_logits[0]
        square = (logits - logits.mean(-1, keepdim=True)).square().mean()
        tiny = torch.finfo(along.dtype).tiny
        longer: Tensor = _FREE * square * length / along.clamp_min(tiny)
        return longer.clamp(1, self.reach)


def variance_along(covariance: Covariance | float, evaluation: Evaluation) -> Tensor:
    """Σ_i g_iᵀ Σ g_i and Σ_i |u_i|² [2] of gradient rows g_i = J_iᵀ u_i, u_i = (w_i / n) ∇_f ℓ_i:
    their ratio is the variance of the logits along the loss. A number σ² stands for σ² I.
    """
    rows, slopes = evaluation.rows, evaluation.slopes().sum(0)
    spread = rows * covariance if isinstance(covariance, float) else covariance.apply(rows)
    along = torch.dot(rows.flatten(), spread.flatten())
    return torch.stack((along, slopes.square().sum()))


def take_expectation(
    belief: Belief,
    energy: Energy,
    curvature: Curvature,
    samples: int,
    nodes: int,
    randomness: Randomness,
) -> tuple[Tensor, Tensor]:
    """E_q[g] [d] and F [m, d] with FᵀF = E_q[FᵀF] under q = belief, by quadrature, by draws or
    (neither) at the mean.
    """
    if samples == 0 and nodes == 0:
        return curvature(energy.at(belief.mean))
    if nodes:
        return _integrate(belief, energy, curvature, nodes)
    draws = antithetic(belief.covariance, samples, randomness.generator(Purpose.INFERENCE))
    if energy.model.linear and isinstance(curvature, LogitMetric) and not energy.loss.is_coupled:
        # The Jacobian is the same at every draw: average k×k metrics first, and one pullback serves
        # them all.
        center = energy.at(belief.mean)
        moves = torch.stack(
            [model.pushforward(belief.mean, view, draws) for model, view in energy.looks]
        )  # [v, s, n, k]
        weights = moves.new_full((samples,), 1 / samples)
        return _average_over(center.logits[:, None] + moves, weights, center, energy, curvature)
    pieces = [curvature(energy.at(belief.mean + draw)) for draw in draws]
    gradient = torch.stack([gradient for gradient, _ in pieces]).mean(0)
    return gradient, torch.cat([factor for _, factor in pieces]) / math.sqrt(samples)


def _integrate(
    belief: Belief, energy: Energy, curvature: Curvature, nodes: int
) -> tuple[Tensor, Tensor]:
    """For a model linear in θ the logits of sample i are N(f_i, J_i Σ J_iᵀ): integrate over those k
    numbers instead.

    Trapezoid rule in the eigenvectors of J Σ Jᵀ: on analytic integrands it converges faster than
    Gauss–Hermite, which at a logit sd of 3 is off by 1e-3 with 20 nodes. A clipped Hessian has
    kinks, where any rule converges slowly (1e-4 or so).
    """
    require(
        energy.model.linear,
        "nodes",
        nodes,
        "0 unless the model is linear in θ (LinearHead); use samples",
    )
    require(
        not energy.loss.is_coupled,
        "nodes",
        nodes,
        "0 for losses that couple samples or views; use samples",
    )
    require(isinstance(curvature, LogitMetric), "nodes", nodes, f"0 for {curvature}; use samples")
    assert isinstance(curvature, LogitMetric)
    center = energy.at(belief.mean)
    views = zip(center.logits, center.pullbacks, strict=True)
    covariance = torch.stack([logit_covariance(belief.covariance, f, pull) for f, pull in views])
    return _average_over(*_logit_cloud(center.logits, covariance, nodes), center, energy, curvature)


def _average_over(
    logits: Tensor, weights: Tensor, center: Evaluation, energy: Energy, curvature: LogitMetric
) -> tuple[Tensor, Tensor]:
    """E[g] and F over logits [v, m, n, k] with weights [m], if the model's Jacobian is that of the
    center everywhere.
    """
    expansion = energy.loss.expand(logits, energy.samples.targets, energy.samples.weights)
    evaluation = replace(center, expansion=expansion, logits=logits)
    cotangents = torch.einsum("m,vmnk->vnk", weights, evaluation.expansion.gradient)
    roots = curvature.roots(evaluation)
    metric = torch.einsum("m,vmnkr,vmnlr->vnkl", weights, roots, roots)
    return evaluation.gradient(cotangents), evaluation.factor(positive_root(metric))


def _logit_cloud(logits: Tensor, covariance: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Quadrature points [v, m, n, k] of Gaussian logits with means [v, n, k], covariances [v, n, k,
    k], and weights [m].

    The nodes reach √(π (nodes - 1)) standard deviations, where cutting off the tails costs as much
    as the spacing, or 8.5.
    """
    values, vectors = (part.to(logits.dtype) for part in torch.linalg.eigh(covariance.double()))
    # Directions without variance in any sample (class 0 of a reduced head) need no nodes.
    rounding = 10 * logits.shape[-1] * torch.finfo(logits.dtype).eps * values[..., -1:]
    active = max(1, int((values > rounding).flatten(0, -2).any(0).sum()))
    most = int(100_000 ** (1 / active))
    require(
        nodes <= most,
        "nodes",
        nodes,
        f"at most {most} for {active} logit directions; or use samples",
    )
    root = (vectors * values.clamp_min(0).sqrt()[..., None, :])[
        ..., values.shape[-1] - active :
    ]  # [v, n, k, active]
    reach = min(8.5, math.sqrt(math.pi * (nodes - 1)))
    line = torch.linspace(-reach, reach, nodes, dtype=logits.dtype, device=logits.device)
    density = torch.softmax(-line.square() / 2, 0)
    grid = torch.cartesian_prod(*[torch.arange(nodes, device=logits.device)] * active).reshape(
        -1, active
    )
    return logits[:, None] + torch.einsum("ma,vnka->vmnk", line[grid], root), density[grid].prod(-1)


class Quadrature(NamedTuple):
    """A number of quadrature nodes: none, or enough for the rule to be fine."""

    least: int

    def check(self, field: str, value: Any) -> None:
        require_count(field, value, 0)
        require(
            value == 0 or value >= self.least,
            field,
            value,
            f"0 (none) or at least {self.least}, below which the rule is rough",
        )


Nodes: TypeAlias = Annotated[int, Quadrature(least=7)]


@final
@dataclass(frozen=True)
class Bong(Checked):
    """Bayesian online natural gradient: the linearised update with E_q[g] and E_q[FᵀF], q = the
    prior N(μ⁻, Σ⁻).

    Expectations by ``samples`` antithetic draws of θ or, for a model linear in θ, by ``nodes``
    quadrature points for each logit direction; with 0 of both at the mean, which is the linearised
    update.
    """

    curvature: Annotated[Curvature, Role("curvature", "Hessian()")] = field(default_factory=Hessian)
    samples: Count = 8
    nodes: Nodes = 0

    def __call__(
        self, prior: Belief, energy: Energy, memory: Memory, randomness: Randomness
    ) -> tuple[Belief, Memory]:
        rules = (self.curvature, self.samples, self.nodes)
        return newton_step(prior, *take_expectation(prior, energy, *rules, randomness)), memory


register(inference=(Linearized, Bong, Frozen))

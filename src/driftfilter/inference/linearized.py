"""Inference: from the prior N(μ⁻, Σ⁻) and the energy of a batch to the posterior N(μ, Σ)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple, Protocol, TypeAlias, final, runtime_checkable

import torch
from torch import Tensor

from driftfilter.base.checks import (
    LATE,
    Checked,
    Count,
    Fraction,
    Interval,
    NotNegative,
    NotPositiveDefiniteError,
    Role,
    register,
    require,
    require_count,
    require_finite,
    unchecked,
)
from driftfilter.base.randomness import Purpose, Randomness
from driftfilter.gaussian.belief import Belief
from driftfilter.gaussian.covariance import Covariance, antithetic, positive_factor, signed_root
from driftfilter.gaussian.diagonal import Diagonal
from driftfilter.gaussian.lowrank import exact_form
from driftfilter.inference.curvature import (
    Curvature,
    EmpiricalFisher,
    Hessian,
    LogitMetric,
    NoCurvature,
    Quadratic,
)
from driftfilter.model.closed_forms import share_of
from driftfilter.model.observation import Energy, Evaluation
from driftfilter.model.predictive import logit_covariance
from driftfilter.model.weighting import Memory


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


def condition_on(covariance: Covariance, factor: Tensor, negative: Tensor | None) -> Covariance:
    """(Σ⁻¹ + FᵀF - NᵀN)⁻¹, refused if that is not positive definite."""
    conditioned = covariance.condition(factor)
    if negative is None:
        return conditioned
    try:
        return conditioned.remove(negative)
    except NotPositiveDefiniteError as error:
        raise NotPositiveDefiniteError(
            f"{error}; Hessian(clip='never') has taken more than the prior has: "
            "Hessian(clip='after') keeps the positive part"
        ) from error


class Bounds(NamedTuple):
    """Between what the mean's step is kept: it is lengthened to ``least``, by ``reach`` at most,
    and then shortened to ``most``, and until abs(F Δ) <= ``radius``, if that is not 0.
    """

    radius: float = 0.0
    least: Tensor | None = None  # of its length, a scalar []
    reach: float = 1.0
    most: Tensor | None = None  # of its length, a scalar []


UNBOUNDED = Bounds()


def newton_step(
    prior: Belief,
    gradient: Tensor,
    factor: Tensor,
    bounds: Bounds = UNBOUNDED,
    negative: Tensor | None = None,
) -> Belief:
    """Σ = ((Σ⁻)⁻¹ + FᵀF - NᵀN)⁻¹, μ = μ⁻ - Σ g within bounds; the mean moves before Σ is truncated.
    There is no N unless it is given.

    Dense and diagonal beliefs may have a leading dimension: as many steps at once.
    """
    covariance = condition_on(prior.covariance, factor, negative)
    step = covariance.apply(gradient)
    tiny = torch.finfo(step.dtype).tiny
    if bounds.least is not None:
        length = step.norm(dim=-1, keepdim=True).clamp_min(tiny)
        step = step * (bounds.least / length).clamp(1, bounds.reach)
    if bounds.most is not None:
        length = step.norm(dim=-1, keepdim=True).clamp_min(tiny)
        step = step * (bounds.most / length).clamp_max(1.0)
    if bounds.radius:
        along = torch.mv(factor, step) if step.dim() == 1 else (factor @ step[..., None])[..., 0]
        length = along.norm(dim=-1, keepdim=True).clamp_min(tiny)
        step = step * (bounds.radius / length).clamp_max(1.0)
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
    parameters act together, and oversteps without it. If the energy says that n samples tell less
    than N (``Gibbs.reference``), it is r n/N for them.

    ``reach`` > 1: a step that hardly changes the network is lengthened, up to so many times, until
    abs(Δ) is a share ``stride`` · n/N of the size of the parameters, abs(μ⁻). n is the whole batch,
    whatever has a weight. One prior variance does not fit all networks: under that of the default a
    ResNet-50 moved by 0.02 % of their size a step, where small networks move by 0.2 to 1.5 %. The
    share is less for samples that count less, in runs or where the source is at home
    (``Pullback.novelty``), and labels take no longer steps (``Filter.learn``).

    ``limit`` > 0: no step is longer than a share ``limit`` · √(n/N) of the size of the parameters.
    Steps into the unknown add up like a random walk: N/n of them, each √(n/N) as long, go as far as
    one of N samples. In networks of a few hundred parameters the radius does not see a step that is
    too long, and in those of thousands it shortens steps that are not. Labels are held to it, too:
    those of one call move the parameters by a share ``limit`` at most, whatever they weigh
    (``Filter.learn``). Parameters that are all 0 do not move.
    """

    curvature: Annotated[Curvature, Role("curvature", "Hessian()")] = field(
        default_factory=EmpiricalFisher
    )
    radius: NotNegative = 0.0
    reach: Annotated[float, Interval(1, math.inf, open_high=True)] = 1.0
    stride: Fraction = field(default=0.004, metadata=LATE)
    limit: Fraction = field(default=0.0, metadata=LATE)

    def __call__(
        self, prior: Belief, energy: Energy, memory: Memory, randomness: Randomness
    ) -> tuple[Belief, Memory]:
        evaluation = energy.at(prior.mean)
        gradient, factor, negative = Quadratic(*self.curvature(evaluation))
        bounds = self._bound(prior, energy, evaluation.pullbacks[0].novelty)
        return newton_step(prior, gradient, factor, bounds, negative), memory

    def _bound(self, prior: Belief, energy: Energy, novelty: Tensor | float) -> Bounds:
        share = share_of(len(energy.samples.weights), energy.observation.reference)
        bounds = Bounds(share * self.radius)
        if self.reach == 1 and self.limit == 0:
            return bounds
        size = prior.mean.norm()
        if self.reach > 1:
            bounds = bounds._replace(least=self.stride * share * novelty * size, reach=self.reach)
        if self.limit > 0:
            bounds = bounds._replace(most=self.limit * share**0.5 * size)
        return bounds


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
) -> Quadratic:
    """E_q[g] [d] and E_q[H] = FᵀF - NᵀN under q = belief, by quadrature, by draws or (neither) at
    the mean. The curvature says whether negative parts are clipped before or after averaging.
    """
    if samples == 0 and nodes == 0:
        return Quadratic(*curvature(energy.at(belief.mean)))
    if nodes:
        return _integrate(belief, energy, curvature, nodes)
    draws = antithetic(belief.covariance, samples, randomness.generator(Purpose.INFERENCE))
    if energy.model.linear and isinstance(curvature, LogitMetric):
        # The Jacobian is the same at every draw: average k×k metrics first, and one pullback serves
        # them all.
        center = energy.at(belief.mean)
        moves = torch.stack(
            [model.pushforward(belief.mean, view, draws) for model, view in energy.looks]
        )  # [v, s, n, k]
        weights = moves.new_full((samples,), 1 / samples)
        return _average_over(center.logits[:, None] + moves, weights, center, energy, curvature)
    evaluations = (energy.at(belief.mean + draw) for draw in draws)
    if isinstance(curvature, LogitMetric) and curvature.clip == "after":
        return _clip_average(evaluations, curvature, samples)
    return _average([Quadratic(*curvature(evaluation)) for evaluation in evaluations])


def _average(pieces: Sequence[Quadratic]) -> Quadratic:
    """The mean of energies to second order."""
    scale = 1 / math.sqrt(len(pieces))
    negatives = [piece.negative for piece in pieces if piece.negative is not None]
    return Quadratic(
        torch.stack([piece.gradient for piece in pieces]).mean(0),
        torch.cat([piece.factor for piece in pieces]) * scale,
        torch.cat(negatives) * scale if negatives else None,
    )


def _clip_average(
    evaluations: Iterable[Evaluation], curvature: LogitMetric, samples: int
) -> Quadratic:
    """The mean over draws, and of each sample (and view) the positive part of its mean Hessian in
    θ, from signed rows √(w_i/n) J_iᵀ R_i of every draw.
    """
    gradients, rows, signs = [], [], []
    for evaluation in evaluations:
        root, sign = signed_root(curvature.metric(evaluation))
        gradients.append(evaluation.gradient())
        rows.append(torch.stack(evaluation.pull_roots(root)))  # [v, k, n, d]
        signs.append(sign)  # [v, n, k]
    stacked = torch.cat(rows, 1).transpose(1, 2) / math.sqrt(samples)  # [v, n, s k, d]
    factor = positive_factor(stacked, torch.cat(signs, -1)).flatten(0, -2)
    return Quadratic(torch.stack(gradients).mean(0), factor)


def _integrate(belief: Belief, energy: Energy, curvature: Curvature, nodes: int) -> Quadratic:
    """For a model linear in θ the logits of sample i are N(f_i, J_i Σ J_iᵀ): integrate over those k
    numbers instead.

    Trapezoid rule in the eigenvectors of J Σ Jᵀ: on analytic integrands it converges faster than
    Gauss–Hermite, which at a logit sd of 3 is off by 1e-3 with 20 nodes. A Hessian clipped before
    it is averaged has kinks, where any rule converges slowly (1e-4 or so).
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
) -> Quadratic:
    """E[g] and E[H] over logits [v, m, n, k] with weights [m], if the model's Jacobian is that of
    the center everywhere.
    """

    def look(points: Tensor) -> tuple[Tensor, Tensor]:
        expansion = energy.loss.expand(points, energy.samples.targets, energy.samples.weights)
        evaluation = replace(center, expansion=expansion, logits=points)
        return expansion.gradient, curvature.metric(evaluation)

    if energy.loss.is_coupled:  # every point is a batch of its own
        each = [look(points) for points in logits.unbind(1)]
        gradients, metrics = (torch.stack(parts, 1) for parts in zip(*each, strict=True))
    else:
        gradients, metrics = look(logits)
    cotangents = torch.einsum("m,vmnk->vnk", weights, gradients)
    average = torch.einsum("m,vmnkl->vnkl", weights, metrics)
    return Quadratic(center.gradient(cotangents), *curvature.factors(center, average))


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
    """Bayesian online natural gradient: the linearised update with E_q[g] and E_q[H], q = the
    prior N(μ⁻, Σ⁻).

    H is the curvature; a ``Hessian`` is clipped after it is averaged, unless its ``clip`` says
    otherwise. Expectations by ``samples`` antithetic draws of θ or, for a model linear in θ, by
    ``nodes`` quadrature points for each logit direction; with 0 of both at the mean, which is the
    linearised update.
    """

    curvature: Annotated[Curvature, Role("curvature", "Hessian()")] = field(default_factory=Hessian)
    samples: Count = 8
    nodes: Nodes = 0

    def __call__(
        self, prior: Belief, energy: Energy, memory: Memory, randomness: Randomness
    ) -> tuple[Belief, Memory]:
        rules = (self.curvature, self.samples, self.nodes)
        gradient, factor, negative = take_expectation(prior, energy, *rules, randomness)
        return newton_step(prior, gradient, factor, negative=negative), memory


def follows_energy(inference: Inference) -> bool:
    """Whether it learns from an energy: not if nothing, nor if it moves prototypes by features."""
    return not isinstance(inference, Frozen) and not getattr(inference, "of_features", False)


def choose_for_labels(inference: Inference) -> Inference:
    """The inference with which labels are learned: its own, but a centred Fisher, to which one
    sample says nothing, is not centred; refused if it learns nothing.
    """
    allowed = "one that learns from an energy, such as Linearized(), if labels are to be learned"
    require(follows_energy(inference), "inference", inference, allowed)
    if isinstance(inference, Linearized) and inference.reach > 1:
        inference = replace(inference, reach=1.0)
    curvature = inference.curvature
    if not isinstance(curvature, EmpiricalFisher) or not curvature.centered:
        return inference
    free: Any = replace(curvature, centered=False)
    return replace(inference, curvature=free)  # type: ignore[type-var]  # a dataclass with it


def learn_exactly(
    inference: Inference, prior: Belief, energy: Energy, memory: Memory, randomness: Randomness
) -> tuple[Belief, Memory]:
    """The posterior of an energy of few samples: the mean moves by all of its curvature, if the
    covariance is diagonal, too, and keeps of it what its structure can.

    A diagonal alone does not see that a sample moves all parameters together: each would take the
    whole way.
    """
    plain = isinstance(inference.curvature, NoCurvature)
    if plain or not prior.covariance.is_diagonal:
        return inference(prior, energy, memory, randomness)
    exact = unchecked(Belief, mean=prior.mean, covariance=exact_form(prior.covariance))
    posterior, memory = inference(exact, energy, memory, randomness)
    covariance = Diagonal(posterior.covariance.truncate().variance())
    return unchecked(Belief, mean=posterior.mean, covariance=covariance), memory


register(inference=(Linearized, Bong, Frozen))

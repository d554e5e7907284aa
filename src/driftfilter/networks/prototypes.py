"""Class prototypes on features, as a predictive model and as the state of a filter.

    gaussian           f_k = a_k - κ/2 |z - w_k|²
    von_mises_fisher   f_k = a_k + κ A_D(γ_k) ρ_k·h      h = z/|z|, w_k = γ_k ρ_k,
                                                         A_D(γ) = I_{D/2}(γ) / I_{D/2-1}(γ)
    inner_product      f_k = a_k + κ z·w_k/|w_k|

z are features, relative to a center. θ is w_1, …, w_k one after the other or, with class weights
a_k = log π_k (up to a constant), [a_1, w_1], …, [a_k, w_k].
"""

import math
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor
from torch.nn import functional

from driftfilter.base.checks import (
    Checked,
    Count,
    NotNegative,
    Positive,
    PositiveCount,
    register,
    require,
    require_finite,
    require_shape,
    unchecked,
)
from driftfilter.base.memory import remembered
from driftfilter.base.randomness import Randomness
from driftfilter.gaussian.belief import Belief
from driftfilter.inference.curvature import NoCurvature
from driftfilter.model.losses import one_hot
from driftfilter.model.observation import Energy
from driftfilter.model.predictive import BesideFeatures, PredictiveModel, Pullback
from driftfilter.model.weighting import Memory, entropy
from driftfilter.networks.features import Backbone, OnFeatures

_STEPS = 64  # of the recurrence: a relative error of 5e-11 at worst, near γ = 1000


def bessel_ratios(concentration: Tensor, dimension: int) -> tuple[Tensor, Tensor]:
    """A_D(γ) / γ and A_{D+2}(γ) / γ, A_D = I_{D/2} / I_{D/2-1}, for γ >= 0 of any shape.

    q_D = 1 / (D + γ² q_{D+2}) backwards, a stable direction, from an order where Amos's bound, put
    once through the Riccati equation of the ratio, is accurate.
    """
    square = concentration.double().square()
    order = dimension / 2 + _STEPS
    low, high = order - 0.5, order + 0.5
    root = (low * high + square).sqrt()
    shrink = 1 - low * (root + high) / (root * (low + root).square())
    ratio = shrink / (low + (low * low + square * shrink).sqrt())
    following = ratio
    for step in range(_STEPS, 0, -1):
        following, ratio = ratio, (square * ratio).add_(dimension + 2 * (step - 1)).reciprocal_()
    return ratio.to(concentration.dtype), following.to(concentration.dtype)


# In the memory of Supports:
SUPPORTS = remembered(
    "inference.supports", "k", "s", "D", beside="inference.entropies"
)  # features [k, s, D], s as many as the class that has most
ENTROPIES = remembered(
    "inference.entropies", "k", "s", beside="inference.supports"
)  # theirs; infinite if a place is empty

Family = Literal["gaussian", "von_mises_fisher", "inner_product"]


@final
@dataclass(frozen=True, eq=False)
class PrototypeHead(Checked, PredictiveModel):
    """p(y given z, θ) of prototypes w_k, closed forms throughout; ``concentration`` is κ.

    ``weight`` and ``bias`` are the source head's: what it says about a sample labels it if a
    method asks for that. ``intercept`` puts a_k before w_k in θ; without it all classes weigh the
    same. ``center`` is subtracted from features: a head does not see a part that all classes share,
    but prototypes do (see Prototypes). ``filed``: a row of the source head stands for the class
    that the head calls it, which need not be its own (T3A).
    """

    weight: Tensor  # [k, D]
    bias: Tensor | None = None  # [k]
    family: Family = "gaussian"
    concentration: Positive = 1.0
    intercept: bool = False
    center: Tensor | None = None  # [D]
    filed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_shape("PrototypeHead.weight", self.weight, "[k, D]", None, None)
        if self.bias is not None:
            require_shape("PrototypeHead.bias", self.bias, f"[{self.classes}]", self.classes)
        if self.center is not None:
            width = self.weight.shape[1]
            require_shape("PrototypeHead.center", self.center, f"[{width}]", width)

    @property
    def classes(self) -> int:
        """k."""
        return self.weight.shape[0]

    def relative(self, features: Tensor) -> Tensor:
        """Features relative to the center [n, D]."""
        return features if self.center is None else features - self.center.to(features)

    def source_logits(self, features: Tensor) -> Tensor:
        """Logits of the source head [n, k]."""
        bias = None if self.bias is None else self.bias.to(features)
        return functional.linear(features, self.weight.to(features), bias)

    @property
    def row_logits(self) -> Tensor:
        """Logits of the source head for its own rows, as if they were features [k, k]."""
        rows = self.weight if self.center is None else self.weight + self.center
        return self.source_logits(rows)

    @property
    def row_labels(self) -> Tensor:
        """The class [k] that each row of the source head stands for."""
        logits = self.row_logits
        return logits.argmax(-1) if self.filed else torch.arange(len(logits), device=logits.device)

    def split(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Class weights a [..., k] and prototypes w [..., k, D] of θ [..., d]."""
        width = self.weight.shape[1] + self.intercept
        length = theta.shape[-1]
        require(
            length == self.classes * width,
            "belief",
            f"{length} parameters",
            f"over {self.classes * width} parameters",
        )
        rows = theta.unflatten(-1, (self.classes, width))
        if self.intercept:
            return rows[..., 0], rows[..., 1:]
        return rows.new_zeros(rows.shape[:-1]), rows

    def join(self, intercepts: Tensor, prototypes: Tensor) -> Tensor:
        """θ [..., d] of class weights [..., k] and prototypes [..., k, D]."""
        return (
            torch.cat((intercepts.unsqueeze(-1), prototypes), -1) if self.intercept else prototypes
        ).flatten(-2)

    def _jacobian(self, theta: Tensor, inputs: Tensor) -> "_Jacobian":
        require(
            inputs.dim() == 2, "inputs", f"shape {list(inputs.shape)}", "of shape [n, features]"
        )
        features = self.relative(inputs.to(theta.dtype))
        a, w = self.split(theta)
        kappa, squares = self.concentration, w.square().sum(-1)
        if self.family == "gaussian":
            # From the differences: expanding the square would cancel if both are far from 0.
            distances = torch.cdist(features, w, compute_mode="donot_use_mm_for_euclid_dist")
            logits = a - kappa / 2 * distances.square()
            along, own = torch.full_like(a, kappa), torch.full_like(logits, -kappa)
            return _Jacobian(self, logits, features, w, along, own)
        if self.family == "von_mises_fisher":
            features = functional.normalize(features, dim=-1)
            ratio, following = bessel_ratios(squares.sqrt(), w.shape[-1])
            along, slope = (
                kappa * ratio,
                kappa * ratio * (following - ratio),
            )  # d(A/γ)/dγ = A/γ (A_{D+2} - A_D)
        else:
            along = kappa / squares.sqrt().clamp_min(1e-12)
            slope = -along / squares.clamp_min(1e-24)
        products = features @ w.mT
        return _Jacobian(self, a + along * products, features, w, along, slope * products)

    def with_features(self) -> PredictiveModel:
        return BesideFeatures(self)

    def __call__(self, theta: Tensor, inputs: Tensor) -> Tensor:
        return self._jacobian(theta, inputs).logits

    def pullback(self, theta: Tensor, inputs: Tensor) -> tuple[Tensor, Pullback]:
        jacobian = self._jacobian(theta, inputs)
        return jacobian.logits, jacobian

    def pushforward(self, theta: Tensor, inputs: Tensor, tangents: Tensor) -> Tensor:
        return self._jacobian(theta, inputs).push(tangents)


@dataclass(eq=False)
class _Jacobian(Pullback):
    """∂f_k/∂w_k = along_k x_n + own_nk w_k, of every family; ∂f_k/∂a_k = 1."""

    head: PrototypeHead
    logits: Tensor  # [n, k]
    features: Tensor  # x [n, D]: z, or h for directions
    prototypes: Tensor  # [k, D]
    along: Tensor  # [k]
    own: Tensor  # [n, k]

    def __call__(self, cotangents: Tensor) -> Tensor:
        outward = (cotangents * self.along).unsqueeze(-1) * self.features.unsqueeze(1)
        return self.head.join(
            cotangents, outward + (cotangents * self.own).unsqueeze(-1) * self.prototypes
        )

    def total(self, cotangents: Tensor) -> Tensor:
        outward = (cotangents * self.along).mT @ self.features
        inward = (cotangents * self.own).sum(0).unsqueeze(-1) * self.prototypes
        return self.head.join(cotangents.sum(0), outward + inward)

    def push(self, tangents: Tensor) -> Tensor:
        a, w = self.head.split(tangents)  # [s, k], [s, k, D]
        outward = self.along * (self.features @ w.mT)
        return a.unsqueeze(1) + outward + self.own * (w * self.prototypes).sum(-1).unsqueeze(1)


@final
@dataclass(frozen=True)
class Prototypes(Checked):
    """Class prototypes on the features of a network, starting from the rows of its last layer.

    Gaussian prototypes start where their logits are those of the source head: w_k = W_k/κ + v, with
    the v that leaves the classes equal weights (exactly so if the rows of W are affinely
    independent; ``intercept`` takes up the rest). Directions start at ``strength`` · W_k/|W_k|, the
    row counting as much as that many samples of concentration 1.

    ``centered`` ones are relative to the mean feature of the first batch. Rows of a head are class
    means up to a vector that all classes share; features after a ReLU have a large one, and without
    a center the first prototype to find it takes every sample.

    ``filed``: directions start as sums of the rows that the head itself calls by their class, each
    of length 1, as T3A files them. A class whose row is called another starts at 0.
    """

    family: Family = "gaussian"
    concentration: Positive = 1.0
    strength: Positive = 1.0
    intercept: bool = False
    centered: bool = False
    name: str = ""  # of the last layer; empty: the one that gives the logits
    filed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.family != "gaussian" and self.strength == 1
        allowed = "False for Gaussian prototypes and for a strength other than 1"
        require(fits or not self.filed, "Prototypes.filed", self.filed, allowed)

    def build(self, backbone: Backbone, center: Tensor | None = None) -> tuple[OnFeatures, Tensor]:
        """The predictive model of raw inputs, for features relative to a center [D], and where θ
        starts [d].
        """
        head = PrototypeHead(
            backbone.weight,
            backbone.bias,
            self.family,
            self.concentration,
            self.intercept,
            center,
            self.filed,
        )
        if self.family == "gaussian":
            return OnFeatures(backbone, head), _match(head)
        rows = self.strength * functional.normalize(head.weight, dim=-1)
        rows = torch.zeros_like(rows).index_add(0, head.row_labels, rows)
        return OnFeatures(backbone, head), head.join(rows.new_zeros(len(rows)), rows)


def _match(head: PrototypeHead) -> Tensor:
    """θ of Gaussian prototypes whose logits differ from the source head's by a number that is the
    same for all classes.

    W_k·z + b_k = κ z·w_k - κ/2 |w_k|² + a_k + (any function of z), w_k = W_k/κ + v, a_k = b_k +
    |W_k|²/2κ + W_k·v; b_k are the logits at the center.
    """
    rows = head.weight.double()
    center = rows.new_zeros(rows.shape[1]) if head.center is None else head.center.double()
    weights = rows.square().sum(-1) / (2 * head.concentration) + head.source_logits(center)
    shift = -torch.linalg.pinv(rows - rows.mean(0)) @ (weights - weights.mean())
    return head.join(
        torch.log_softmax(weights + rows @ shift, -1), rows / head.concentration + shift
    ).to(head.weight.dtype)


def _head_and_features(energy: Energy) -> tuple[PrototypeHead, Tensor]:
    """The prototypes' model and the features of the batch [n, D]."""
    model, features = energy.model, energy.views[0]
    if isinstance(model, OnFeatures):
        features = model.features(features)
        model = model.model
    require(
        isinstance(model, PrototypeHead),
        "the model",
        type(model).__name__,
        "a PrototypeHead, alone or on features",
    )
    assert isinstance(model, PrototypeHead)
    return model, features.to(energy.anchor.dtype)


@final
@dataclass(frozen=True)
class Supports(Checked):
    """w_k = Σ of the supports of class k: its source prototype and the directions h = z/|z| that
    the source head calls k.

    Each class keeps the ``capacity`` supports of lowest entropy under the source head (0: all).
    With all of them the sum is the conjugate update of von Mises–Fisher prototypes, and the
    transition may forget; with a capacity the supports themselves are the state, in the memory, and
    the transition of θ has no say. The covariance stays. A sample of weight w counts w times. With
    inner products and ``predict_from="posterior"`` this is T3A.
    """

    capacity: Count = 100
    curvature = NoCurvature()
    of_features = True  # not of an energy, and so not of labels

    def __call__(
        self, prior: Belief, energy: Energy, memory: Memory, randomness: Randomness
    ) -> tuple[Belief, Memory]:
        head, features = _head_and_features(energy)
        require(
            head.family != "gaussian",
            "Supports: the prototypes' family",
            head.family,
            "'inner_product' or 'von_mises_fisher'",
        )
        a, w = head.split(prior.mean)
        logits = head.source_logits(features)
        directions = functional.normalize(
            head.relative(features), dim=-1
        ) * energy.samples.weights.unsqueeze(-1)
        if self.capacity == 0:
            w = w + one_hot(logits).mT @ directions
        else:
            memory = self._kept(
                self._buffer(head, w, memory),
                directions,
                logits.argmax(-1),
                entropy(logits),
                energy.samples.weights,
            )
            w = memory[SUPPORTS].sum(1)
        return unchecked(Belief, mean=head.join(a, w), covariance=prior.covariance), memory

    def _buffer(self, head: PrototypeHead, prototypes: Tensor, memory: Memory) -> dict[str, Tensor]:
        """A copy of the memory; before the first batch, with the source prototypes as supports."""
        if SUPPORTS in memory:
            return dict(memory)
        supports = prototypes.new_zeros(head.classes, 0, prototypes.shape[-1])
        empty = prototypes.new_full((head.classes, 0), math.inf)
        rows = prototypes  # one a class, unless they are filed: then of length 1, see Prototypes
        if head.filed:
            rows = functional.normalize(head.weight.to(prototypes), dim=-1)
        uncertain = entropy(head.row_logits.to(prototypes))
        return self._kept(
            {**memory, SUPPORTS: supports, ENTROPIES: empty},
            rows,
            head.row_labels,
            uncertain,
            torch.ones_like(uncertain),
        )

    def _kept(
        self,
        memory: dict[str, Tensor],
        directions: Tensor,
        labels: Tensor,
        uncertain: Tensor,
        weights: Tensor,
    ) -> dict[str, Tensor]:
        """The buffer [k, s] with more samples, each class's lowest entropies first, and with room
        for as many as one class has: of a thousand classes most have few.
        """
        before = memory[SUPPORTS]
        came = torch.bincount(labels[weights > 0], minlength=len(before))
        held = memory[ENTROPIES].isfinite().sum(1) + came
        room = max(before.shape[1], min(self.capacity, int(held.max())))
        supports = before.new_zeros(len(before), room, before.shape[2])
        supports[:, : before.shape[1]] = before
        entropies = before.new_full((len(before), room), math.inf)
        entropies[:, : before.shape[1]] = memory[ENTROPIES]
        for label in labels[weights > 0].unique().tolist():
            chosen = (labels == label) & (weights > 0)
            every = torch.cat((entropies[label], uncertain[chosen]))
            lowest = every.sort(stable=True).indices[:room]
            entropies[label] = every[lowest]
            supports[label] = torch.cat((supports[label], directions[chosen]))[lowest]
        return {**memory, SUPPORTS: supports, ENTROPIES: entropies}


@final
@dataclass(frozen=True)
class Mixture(Checked):
    """Prototypes as the components of a mixture that features come from: expectation-maximisation
    from the prior.

    Shares λ_nk ∝ exp E_q[f_k(z_n)] under the posterior so far, or the source head's label
    (``labels`` "source"); given them

        gaussian           Σ_k⁻¹ = (Σ⁻_k)⁻¹ + κ Σ_n λ_nk I,
                           w_k = w⁻_k + Σ_k κ Σ_n λ_nk (z_n - w⁻_k)
        von_mises_fisher   w_k = b_k + κ Σ_n λ_nk h_n,   b_k = w⁻_k or,
                           with a ``transition_concentration`` τ, τ A_D(γ⁻_k) ρ⁻_k

    and, with a ``pseudo_count`` c and prototypes that have class weights, π_k = (c π⁻_k + Σ_n λ_nk)
    / (c + n). A sample of weight w counts w times; the sum is not divided by n, so β = 1 is Bayes'
    rule. The transition of directions is no Gaussian one, which is why it stands here; their
    covariance stays (γ_k says how sure they are). This is STAD with a window of one.
    """

    iterations: PositiveCount = 3
    labels: Literal["posterior", "source"] = "posterior"
    transition_concentration: NotNegative = 0.0  # 0: nothing is forgotten
    pseudo_count: NotNegative = 0.0  # 0: class weights stay
    curvature = NoCurvature()
    of_features = True  # not of an energy, and so not of labels

    def __call__(
        self, prior: Belief, energy: Energy, memory: Memory, randomness: Randomness
    ) -> tuple[Belief, Memory]:
        head, features = _head_and_features(energy)
        require(
            head.family != "inner_product",
            "Mixture: the prototypes' family",
            head.family,
            "'gaussian' or 'von_mises_fisher'",
        )
        gaussian = head.family == "gaussian"
        prior = prior if gaussian else self._forgotten(prior, head)
        posterior = prior
        for _ in range(self.iterations):
            shares = (
                one_hot(head.source_logits(features))
                if self.labels == "source"
                else _expected_logits(head, posterior, features).softmax(-1)
            ) * energy.samples.weights.unsqueeze(-1)
            posterior = (_gaussian_update if gaussian else _directional_update)(
                prior, head, head.relative(features), shares
            )
            posterior = self._weigh(posterior, prior, head, shares)
        require_finite("the posterior mean", posterior.mean)
        return posterior, memory

    def _forgotten(self, prior: Belief, head: PrototypeHead) -> Belief:
        if self.transition_concentration == 0:
            return prior
        a, w = head.split(prior.mean)
        ratio, _ = bessel_ratios(w.norm(dim=-1, keepdim=True), w.shape[-1])
        return unchecked(
            Belief,
            mean=head.join(a, self.transition_concentration * ratio * w),
            covariance=prior.covariance,
        )

    def _weigh(
        self, posterior: Belief, prior: Belief, head: PrototypeHead, shares: Tensor
    ) -> Belief:
        """The posterior with the class weights of these shares."""
        if self.pseudo_count == 0 or not head.intercept:
            return posterior
        before = head.split(prior.mean)[0].softmax(-1)
        weights = (self.pseudo_count * before + shares.sum(0)) / (self.pseudo_count + shares.sum())
        mean = head.join(
            weights.clamp_min(torch.finfo(weights.dtype).tiny).log(), head.split(posterior.mean)[1]
        )
        return unchecked(Belief, mean=mean, covariance=posterior.covariance)


def _expected_logits(head: PrototypeHead, belief: Belief, features: Tensor) -> Tensor:
    """E_q[f_k(z_n)] [n, k]: f of directions is an expectation already, A_D(γ) ρ being the mean
    direction.
    """
    logits = head(belief.mean, features)
    if head.family != "gaussian":
        return logits
    return logits - head.concentration / 2 * head.split(belief.covariance.variance())[1].sum(-1)


def _gaussian_update(
    prior: Belief, head: PrototypeHead, features: Tensor, shares: Tensor
) -> Belief:
    _, w = head.split(prior.mean)
    counts = shares.sum(0)
    pull = head.concentration * (shares.mT @ features - counts.unsqueeze(-1) * w)
    information = (head.concentration * counts).unsqueeze(-1).expand_as(w)
    none = torch.zeros_like(counts)
    covariance = prior.covariance.inform(head.join(none, information))
    mean = prior.mean + covariance.apply(head.join(none, pull))
    return unchecked(Belief, mean=mean, covariance=covariance.truncate())


def _directional_update(
    prior: Belief, head: PrototypeHead, features: Tensor, shares: Tensor
) -> Belief:
    a, w = head.split(prior.mean)
    moved = w + head.concentration * (shares.mT @ functional.normalize(features, dim=-1))
    return unchecked(Belief, mean=head.join(a, moved), covariance=prior.covariance)


register(inference=(Supports, Mixture), parameters=(Prototypes,))

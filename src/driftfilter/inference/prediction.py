"""Prediction: class probabilities of a batch from a Gaussian belief over parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, Protocol, final, runtime_checkable

import torch
from torch import Tensor

from driftfilter.base.checks import (
    Checked,
    Interval,
    NotNegative,
    Positive,
    PositiveCount,
    register,
    require,
    require_number,
)
from driftfilter.base.inputs import Inputs
from driftfilter.base.memory import remembered
from driftfilter.base.randomness import Purpose, Randomness
from driftfilter.gaussian.belief import Belief
from driftfilter.gaussian.covariance import antithetic
from driftfilter.gaussian.diagonal import Diagonal
from driftfilter.inference.accuracy import Estimate, Expectation, Opinions, confidence
from driftfilter.inference.linearized import variance_along
from driftfilter.inference.smoothed_labels import find_smoothing, unsmooth
from driftfilter.model.closed_forms import kappa, variance_at
from driftfilter.model.observation import Energy
from driftfilter.model.predictive import PredictiveModel, logit_covariance
from driftfilter.model.survey import SOURCE, SourceSamples
from driftfilter.model.weighting import Memory, entropy

_TINY = 1e-30  # in place of a sum of weights that are all 0
SLOPES = remembered("prediction.slopes", "2")  # Σ_i g_iᵀ Σ⁻ g_i and Σ_i |u_i|², see Moderated
SMOOTHING = remembered(f"{SOURCE}smoothing")  # ε [], see Moderated


@final
@dataclass(frozen=True, eq=False)
class Prediction:
    """Class probabilities, and how uncertain the logits were."""

    log_probabilities: Tensor  # [n, k]
    logit_variance: Tensor  # [n, k]; 0 if the rule ignores the covariance
    expected_entropy: Tensor | None = None  # [n], E_q H(p), if the rule has draws of θ from q
    # [n], confidences at the mean without the rule's temperature; None: those of the probabilities.
    plain: Tensor | None = None

    @property
    def probabilities(self) -> Tensor:
        """p(y given x) [n, k]; rows sum to one."""
        return self.log_probabilities.exp()

    @property
    def labels(self) -> Tensor:
        """The most likely class [n]."""
        return self.log_probabilities.argmax(-1)

    @property
    def confidence(self) -> Tensor:
        """The probability of the most likely class [n]."""
        return confidence(self.log_probabilities)

    @cached_property
    def on_host(self) -> tuple[Tensor, Tensor]:
        """Log-probabilities [n, k] and plain confidences [n] on the CPU, by one look there."""
        plain = self.plain_confidence
        if self.log_probabilities.device.type == "cpu":
            return self.log_probabilities, plain
        both = torch.cat((self.log_probabilities, plain[:, None]), 1).cpu()
        return both[:, :-1], both[:, -1]

    def retold(self, log_probabilities: Tensor) -> Prediction:
        """The same with other log-probabilities [n, k], which lie on the CPU; what is plain of each
        sample stays.
        """
        there = log_probabilities.to(self.log_probabilities, non_blocking=True)
        told = replace(self, log_probabilities=there, plain=self.plain_confidence)
        told.__dict__["on_host"] = log_probabilities, self.on_host[1]
        return told

    @property
    def plain_confidence(self) -> Tensor:
        """The confidence [n] at the mean parameters, without the rule's temperature."""
        return self.confidence if self.plain is None else self.plain

    @property
    def entropy(self) -> Tensor:
        """H(p) [n] in nats, all of the uncertainty about a label."""
        found: Tensor = torch.special.entr(self.probabilities).sum(-1)
        return found

    @property
    def mutual_information(self) -> Tensor:
        """H(E_q p) - E_q H(p) [n] in nats: the part that knowing the parameters would remove.

        By draws if the rule has made any. Else to second order in the variance v_c of the logits,
        ½ Σ_c v_c p_c (1 - p_c), as if they were independent; at most the entropy. Sample by sample
        it tells what the rule does: ``Moderated`` has one variance for a batch, and
        ``Adapter.uncertainty`` one for each sample.
        """
        if self.expected_entropy is not None:
            return (self.entropy - self.expected_entropy).clamp_min(0)
        p = self.probabilities
        return torch.minimum((self.logit_variance * p * (1 - p)).sum(-1) / 2, self.entropy)

    @property
    def estimate(self) -> Estimate:
        """Expected accuracy over these samples, of as many as there are."""
        return Expectation(Opinions.of(self.log_probabilities.flatten(0, -2))).estimate

    def accept(self, risk: float) -> Tensor:
        """Which samples [n] to accept so that the expected error among them is at most ``risk``.

        The largest set S, the most confident first, with (1/|S|) Σ_{i ∈ S} (1 - c_i) <= risk; none
        if the most confident sample is above it.
        """
        require_number("Prediction.accept: risk", risk, 0, 1)
        doubt, order = (1 - self.confidence.double()).sort(stable=True)
        count = torch.arange(1, len(doubt) + 1, device=doubt.device)
        taken = doubt.cumsum(0) <= risk * count  # a mean of sorted numbers only grows
        return torch.zeros_like(taken).scatter(0, order, taken)

    def pick(self, index: Any) -> Prediction:
        """The prediction of some samples."""
        expected, plain = self.expected_entropy, self.plain
        return Prediction(
            self.log_probabilities[index],
            self.logit_variance[index],
            None if expected is None else expected[index],
            None if plain is None else plain[index],
        )


def join_predictions(predictions: Sequence[Prediction]) -> Prediction:
    """Predictions of batches, one after the other."""
    if len(predictions) == 1:
        return predictions[0]
    expected = [each.expected_entropy for each in predictions if each.expected_entropy is not None]
    plain = [each.plain for each in predictions if each.plain is not None]
    return Prediction(
        torch.cat([each.log_probabilities for each in predictions]),
        torch.cat([each.logit_variance for each in predictions]),
        torch.cat(expected) if len(expected) == len(predictions) else None,
        torch.cat(plain) if len(plain) == len(predictions) else None,
    )


class Query(NamedTuple):
    """What is to be predicted."""

    model: PredictiveModel
    inputs: Inputs  # [n, ...]
    randomness: Randomness
    # Logits at the mean [v, n, k] of every view of the loss, if the caller has them already.
    known: Tensor | None = None
    taught: Tensor | None = None  # logits of the teacher [n, k], if there is one
    # What the loss looks at, clean inputs first.
    views: Callable[[], tuple[Inputs, ...]] | None = None
    # What the rule has learned from batches (``learn``).
    memory: Memory = {}  # noqa: RUF012  # nobody writes it

    def logits(self, belief: Belief) -> Tensor:
        """Logits at the mean [n, k]."""
        return self.model(belief.mean, self.inputs) if self.known is None else self.known[0]

    def view_logits(self, belief: Belief) -> Tensor:
        """Logits at the mean of every view of the loss [v, n, k]."""
        if self.known is not None:
            return self.known
        views = (self.inputs,) if self.views is None else self.views()
        return torch.stack([self.model(belief.mean, view) for view in views])

    def draws(self, belief: Belief, samples: int) -> Tensor:
        """Deviations of θ from the mean [samples, d]."""
        return antithetic(belief.covariance, samples, self.draw(Purpose.PREDICTION))

    def draw(self, purpose: Purpose) -> torch.Generator:
        """The generator for a purpose."""
        return self.randomness.generator(purpose)


@runtime_checkable
class PredictionRule(Protocol):
    """p(y given x) = ∫ p(y given x, θ) N(θ; μ, Σ) dθ, one way or another.

    A rule of your own inherits from it and has ``__call__``.
    """

    def __call__(self, belief: Belief, query: Query) -> Prediction:
        """The prediction of the inputs in question."""

    @property
    def over_views(self) -> bool:
        """Whether the rule predicts from all views of the loss."""
        return False

    @property
    def learns(self) -> bool:
        """Whether the rule learns from batches; the energy then keeps its gradient rows for it."""
        return False

    def learn(self, prior: Belief, energy: Energy, memory: Memory) -> Memory:
        """The memory with what the rule keeps of a batch, after inference."""
        return memory

    def survey(
        self,
        model: PredictiveModel,
        theta: Tensor,
        data: Iterable[tuple[Inputs, Tensor | None]] | None,
    ) -> Memory:
        """What the rule remembers of source data, seen by the model at θ_S."""
        return {}

    def of_each(self, belief: Belief, query: Query, draws: int) -> Prediction:
        """The prediction with an uncertainty of each sample, by products of the Jacobian with so
        many draws: Gaussian logits, unless the rule knows better.
        """
        return LinearizedGaussian(draws)(belief, query)


@final
@dataclass(frozen=True)
class MAP(PredictionRule):
    """softmax f(μ): the covariance is ignored."""

    def __call__(self, belief: Belief, query: Query) -> Prediction:
        logits = query.logits(belief)
        return Prediction(logits.log_softmax(-1), torch.zeros_like(logits))


@final
@dataclass(frozen=True)
class Tempered(Checked, PredictionRule):
    """softmax(f(μ) / T): what Gaussian logits of one variance v everywhere come to, T = √(1 + π v /
    4) by the probit approximation of each pair of classes, without a derivative. The most likely
    class is that of f.

    ``over_views``: f is the mean of the logits over the views of the loss (an image and its mirror
    image, say).
    """

    temperature: Positive = 2.0
    over_views: bool = False

    def __call__(self, belief: Belief, query: Query) -> Prediction:
        logits = query.view_logits(belief).mean(0) if self.over_views else query.logits(belief)
        return Prediction(
            (logits / self.temperature).log_softmax(-1),
            torch.full_like(logits, variance_at(self.temperature)),
        )


@final
@dataclass(frozen=True)
class Moderated(Checked, PredictionRule):
    """softmax(f(μ) / T), T a temperature found without labels from the belief's variance of the
    logits along the loss.

    With u_i = (w_i / n) ∇_f ℓ_i and g_i = J_iᵀ u_i, the slopes of a batch in logits and in
    parameters, and ``scale`` s,

        T² = 1 + π v / 4,   v = s Σ_i g_iᵀ Σ⁻ g_i / Σ_i |u_i|²
                           (= s Σ_i u_iᵀ (J_i Σ⁻ J_iᵀ) u_i / Σ_i |u_i|²)

    It is no posterior predictive: one T for all samples of a batch, and s is chosen, not derived.
    It is a good temperature: on 15 corruptions that s was not chosen on, NLL was .820, by the best
    temperature of each corruption with labels .816, without one .936 (ResNet-20, batches of 200,
    docs/lab/defaults.md). The s of least NLL does not move with the batch size: .011 for batches of
    400, 200 and 100, .012 for 50.

    g_i are the rows of network.py. If batch statistics couple the samples, they hold parts of other
    samples' slopes, and v is 3.1 to 5.5 times what stands in brackets (ResNet-20); s = 0.01 is for
    such rows. For a point mass v is 0. The update has these gradients already if its curvature is
    the empirical Fisher: the prediction then costs no pass more. One sample of two classes is
    predicted as by ``LinearizedProbit`` from s Σ⁻. With more classes the variance along u is taken
    for that of all directions, with more samples the batch's for that of each. The most likely
    class is that of f.

    ``variance`` σ²: v is that of parameters known up to σ² each, σ² I in place of Σ⁻. For a prior
    that is wide on purpose, and says how far a step may go rather than how sure one is.

    With source data (``Filter.init``, adapt: data) that show a network trained on smoothed labels,
    what the smoothing has put on other classes is taken off softmax(f(μ) / T)
    (smoothed_labels.py): such a network is not as sure as it is right, which no T >= 1 mends.

    T is at most ``limit``. Batches of n < ``samples`` fade the sums of those before by 1 - n /
    samples, and add their own. Inputs predicted without adapting to them have the T of the last
    batch; T = 1 before the first one, and if the loss sees other outputs than the logits.
    """

    scale: NotNegative = 0.01
    limit: Annotated[float, Interval(1, math.inf)] = 4.0
    samples: PositiveCount = 100
    over_views: bool = False
    variance: Positive | None = None
    learns = True

    def learn(self, prior: Belief, energy: Energy, memory: Memory) -> Memory:
        """The memory with the two sums of a batch, with w_i in place of w_i / n: batches count by
        their samples.
        """
        if not energy.observes_logits:
            return memory
        samples = energy.samples
        divisor = (samples.weights.sum() / samples.coefficients.sum().clamp_min(_TINY)).square()
        covariance = prior.covariance if self.variance is None else float(self.variance)
        sums = divisor * variance_along(covariance, energy.evaluation)
        fading = 1 - len(samples.weights) / self.samples
        if fading > 0 and SLOPES in memory:
            sums = sums + fading * memory[SLOPES]
        return {**memory, SLOPES: sums}

    def survey(
        self,
        model: PredictiveModel,
        theta: Tensor,
        data: Iterable[tuple[Inputs, Tensor | None]] | None,
    ) -> Memory:
        """ε of smoothed labels, if there is any."""
        if data is None:
            return {}
        logits = SourceSamples(model.by_source, theta, data, features=False).gather().logits
        smoothing = find_smoothing(logits)
        return {SMOOTHING: smoothing} if smoothing > 0 else {}

    def __call__(self, belief: Belief, query: Query) -> Prediction:
        logits, variance = self._logits(belief, query), self._variance(query.memory, belief)
        return Prediction(
            _soften(logits, variance.to(logits.dtype), query.memory),
            variance.to(logits.dtype).expand_as(logits).clone(),
            plain=confidence(logits.log_softmax(-1)),
        )

    def of_each(self, belief: Belief, query: Query, draws: int) -> Prediction:
        """softmax(f_i(μ) / T_i), T_i² = 1 + π v_i / 4: v is shared out among the samples.

        v_ic = v V_ic / V̄ with V_i the variances of the logits of a sample, less their mean over
        classes, by ``draws`` from Σ (or σ² I): (1/s) Σ_δ (C J_i δ)², and V̄ their mean over the
        batch. v_i is the mean of v_ic over classes. On average samples are as uncertain as the
        batch.
        """
        logits, generator = self._logits(belief, query), query.draw(Purpose.PREDICTION)
        covariance = belief.covariance
        if self.variance is not None:
            covariance = Diagonal(torch.full_like(belief.mean, self.variance))
        moves = query.model.pushforward(
            belief.mean, query.inputs, covariance.sample(draws, generator)
        )
        found = (moves - moves.mean(-1, keepdim=True)).square().mean(0)
        mean = found.mean().clamp_min(torch.finfo(found.dtype).tiny)
        variance = self._variance(query.memory, belief).to(logits.dtype) * found / mean
        own = variance.mean(-1, keepdim=True).clamp_max(variance_at(self.limit))
        plain = confidence(logits.log_softmax(-1))
        return Prediction(_soften(logits, own, query.memory), variance, plain=plain)

    def _logits(self, belief: Belief, query: Query) -> Tensor:
        return query.view_logits(belief).mean(0) if self.over_views else query.logits(belief)

    def _variance(self, memory: Memory, belief: Belief) -> Tensor:
        """v [] of the last batch."""
        along, length = memory[SLOPES] if SLOPES in memory else belief.mean.new_zeros(2)
        ratio: Tensor = self.scale * along / length.clamp_min(torch.finfo(length.dtype).tiny)
        return ratio.clamp(0, variance_at(self.limit))


def _soften(logits: Tensor, variance: Tensor, memory: Memory) -> Tensor:
    """log softmax(f / T) [n, k], T = √(1 + π v / 4), without what smoothed labels have added."""
    tempered = (logits / torch.sqrt(1 + math.pi / 4 * variance)).log_softmax(-1)
    smoothing = memory.get(SMOOTHING)
    return tempered if smoothing is None else unsmooth(tempered, smoothing.to(tempered))


@final
@dataclass(frozen=True)
class FromTeacher(PredictionRule):
    """softmax ȳ of the observation's teacher: what the loss was trained towards is also what is
    predicted.
    """

    def __call__(self, belief: Belief, query: Query) -> Prediction:
        require(
            query.taught is not None,
            "Filter.prediction",
            self,
            "another rule if the observation has no teacher",
        )
        assert query.taught is not None
        return Prediction(query.taught.log_softmax(-1), torch.zeros_like(query.taught))


@final
@dataclass(frozen=True)
class PriorCorrection(PredictionRule):
    """softmax(f(μ) ⊙ r), r = (p̄ + s) / (1 + s k) the smoothed mean prediction of the batch, s =
    max(1/n, 1/k) / max p̄.

    ROID's correction as its code has it: it scales logits, so a shift of the logits changes it.
    """

    def __call__(self, belief: Belief, query: Query) -> Prediction:
        logits = query.logits(belief)
        n, k = logits.shape
        mean = logits.softmax(-1).mean(0)
        smoothing = max(1 / n, 1 / k) / mean.max()
        ratio = (mean + smoothing) / (1 + smoothing * k)
        return Prediction((logits * ratio).log_softmax(-1), torch.zeros_like(logits))


def _average(logits: Tensor) -> Tensor:
    """log of the mean softmax over draws, [s, n, k] -> [n, k]."""
    return logits.log_softmax(-1).logsumexp(0) - math.log(len(logits))


def _mean_entropy(logits: Tensor) -> Tensor:
    """Mean over draws of the entropy of each softmax, [s, n, k] -> [n]."""
    return entropy(logits).mean(0)


@final
@dataclass(frozen=True)
class MonteCarlo(Checked, PredictionRule):
    """Mean over s draws of θ of softmax f(θ); antithetic pairs."""

    samples: PositiveCount = 32

    def __call__(self, belief: Belief, query: Query) -> Prediction:
        draws = belief.mean + query.draws(belief, self.samples)
        logits = torch.stack([query.model(draw, query.inputs) for draw in draws])
        return Prediction(_average(logits), logits.var(0, correction=0), _mean_entropy(logits))


@final
@dataclass(frozen=True)
class LinearizedGaussian(Checked, PredictionRule):
    """Gaussian logits f(μ) + J δ, δ ~ N(0, Σ), averaged after the softmax.

    One Jacobian-vector product a draw whatever k; keeps the correlation between logits.
    """

    samples: PositiveCount = 32

    def __call__(self, belief: Belief, query: Query) -> Prediction:
        logits = query.logits(belief)
        moves = query.model.pushforward(
            belief.mean, query.inputs, query.draws(belief, self.samples)
        )
        drawn = logits + moves
        return Prediction(_average(drawn), moves.square().mean(0), _mean_entropy(drawn))


@final
@dataclass(frozen=True)
class LinearizedProbit(Checked, PredictionRule):
    """Closed form for Gaussian logits N(f, V), V = J Σ Jᵀ, with κ(v) = (1 + π v / 8)^(-1/2).

    ``pairwise``: p_c ∝ 1 / Σ_j exp(-κ(V_cc + V_jj - 2 V_cj) (f_c - f_j)), invariant to a shift of
    the logits and for k = 2 the usual probit approximation. ``per_class``: softmax(κ(V_cc) f_c),
    the paper's form; it is *not* shift invariant, ignores correlations, and cost 4.7 points of
    accuracy on CIFAR-10-C where Gaussian logits cost none.

    V_i is exact also if batch statistics couple the samples of a batch, which then takes n k
    backward passes, not k: ``LinearizedGaussian`` asks for the same J by one product a draw.
    """

    form: Literal["pairwise", "per_class"] = "pairwise"

    def __call__(self, belief: Belief, query: Query) -> Prediction:
        logits, pullback = query.model.exact.pullback(belief.mean, query.inputs)
        return self.of(logits, logit_covariance(belief.covariance, logits, pullback))

    def of(self, logits: Tensor, covariance: Tensor) -> Prediction:
        """The prediction for Gaussian logits with means [..., k] and covariances [..., k, k]."""
        variance = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0)
        if self.form == "per_class":
            return Prediction((kappa(variance) * logits).log_softmax(-1), variance)
        gaps = logits[..., :, None] - logits[..., None, :]
        spread = (variance[..., :, None] + variance[..., None, :] - 2 * covariance).clamp_min(0)
        return Prediction((-torch.logsumexp(-kappa(spread) * gaps, -1)).log_softmax(-1), variance)


register(
    prediction=(
        MAP,
        MonteCarlo,
        Tempered,
        Moderated,
        LinearizedGaussian,
        LinearizedProbit,
        PriorCorrection,
        FromTeacher,
    )
)

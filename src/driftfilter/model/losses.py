"""Unsupervised losses in logit space: value, gradient and Hessian of ℓ_i in the k logits of sample
i; no model.

A loss sees logits [v, ..., n, k]: the clean inputs first, then augmented views if it asks for
them. What must not be differentiated (pseudo-labels, targets) is fixed once a step, at the prior
mean.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, TypeAlias, final

import torch
from torch import Tensor

from driftfilter.base.checks import (
    LATE,
    Checked,
    FractionBelowOne,
    NotNegative,
    Positive,
    PositiveCount,
    PositiveFraction,
    register,
    require,
    require_number,
    require_role,
    unchecked,
)
from driftfilter.base.inputs import Inputs
from driftfilter.base.memory import remembered
from driftfilter.gaussian.covariance import positive_root
from driftfilter.model.closed_forms import (
    FLOOR,
    bounded_likelihood_ratio,
    cross_entropy,
    entropy,
    generalized_cross_entropy,
    generalized_value,
    information,
)
from driftfilter.model.expansion import (
    Expansion,
    differentiate,
    hessians,
    invariant_root,
    log_softmax,
    pad_features,
    separable,
)
from driftfilter.model.survey import SourceSamples
from driftfilter.model.weighting import Memory

Targets: TypeAlias = "Tensor | tuple[Targets, ...] | None"
_LARGE = 1e15  # of logits whose squares are summed
_INFORMATION = remembered("loss.information", "k+1")  # m and σ² of RunningInformation


class Loss(Protocol):
    """A loss of unlabeled samples. The defaults fit a loss of the clean logits alone."""

    @property
    def minimum(self) -> int:
        """Samples below which the loss is constant."""
        return 1

    @property
    def copies(self) -> int:
        """Augmented views of each sample."""
        return 0

    @property
    def is_coupled(self) -> bool:
        """Whether samples, or the views of a sample, enter jointly."""
        return False

    @property
    def sees_features(self) -> bool:
        """Whether it looks at features too: its logits are then outputs [..., k + D]."""
        return False

    @property
    def needs_source(self) -> bool:
        """Whether it must see source data before the stream (``survey``)."""
        return False

    def survey(self, source: SourceSamples) -> Memory:
        """What to remember of the source, under names that begin with "source."."""
        return {}

    def remember(self, memory: Memory) -> "Loss":
        """The loss with what it needs of the memory before a batch is looked at."""
        return self

    def divide(self, features: int) -> "Loss":
        """The loss for outputs whose last so many columns are features."""
        return self

    def views(self, inputs: Inputs, generator: Callable[[], torch.Generator]) -> tuple[Inputs, ...]:
        """The inputs the loss looks at, clean ones first."""
        return (inputs,)

    def recall(self, logits: Tensor, memory: Memory) -> tuple["Loss", Memory]:
        """The loss with what it remembers of earlier batches, for one with clean logits [n, k] at
        the prior mean; and the memory with this batch in it.
        """
        return self, memory

    def targets(self, logits: Tensor) -> Targets:
        """What is fixed at the prior mean, from the clean logits [n, k] there."""
        return None

    def selected(self, targets: Targets) -> Tensor | None:
        """1 for samples the loss looks at, 0 for others [n]; None for all."""
        return None

    def expand(self, logits: Tensor, targets: Targets, weights: Tensor) -> Expansion:
        """The loss at logits [v, ..., n, k], for samples of these weights [n]."""


def one_hot(logits: Tensor) -> Tensor:
    """The most likely class, 1 there and 0 elsewhere."""
    return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)


@final
@dataclass(frozen=True)
class Entropy(Loss):
    """H(p) = -Σ p log p: decision boundaries belong where data are rare. Its Hessian is indefinite
    near ties.
    """

    def expand(self, logits: Tensor, targets: Targets, weights: Tensor) -> Expansion:
        logp = log_softmax(logits)
        p = logp.exp()
        return separable(None, p, *entropy(p, logp))


def _soft_likelihood_ratio(logits: Tensor) -> Tensor:
    logp = log_softmax(logits)
    k = logits.shape[-1]
    eye = torch.eye(k, dtype=torch.bool, device=logits.device)
    others = (
        logp[..., None, :].expand(*logp.shape[:-1], k, k).masked_fill(eye, -torch.inf).logsumexp(-1)
    )
    return -(logp.exp() * (logp - others)).sum(-1)


@final
@dataclass(frozen=True)
class SoftLikelihoodRatio(Checked, Loss):
    """-Σ p log(p / (1 - p)): gradients do not vanish for confident samples.

    It is unbounded below while its curvature vanishes: on a linear model the parameters run away
    and the filter collapses, so use it with a bounded partner or a strong prior (docs/gotchas.md).
    A ``ceiling`` below 1 bounds it as ROID's code does: p above the ceiling counts as the ceiling
    and is not differentiated, and 1e-5 is added to the odds.
    """

    ceiling: PositiveFraction = 1.0

    def expand(self, logits: Tensor, targets: Targets, weights: Tensor) -> Expansion:
        require(
            logits.shape[-1] >= 2,
            "SoftLikelihoodRatio: logits",
            f"{logits.shape[-1]} class",
            "of 2 classes or more",
        )
        logp = log_softmax(logits)
        p = logp.exp()
        if self.ceiling < 1:
            value, first, second = bounded_likelihood_ratio(p, self.ceiling)
            return separable(value.sum(-1), p, first, second)
        top = one_hot(logits).bool()
        # log(1 - p): the largest class by the sum of the others, the rest (p <= 1/2) directly;
        # nothing cancels.
        others = logp.masked_fill(top, -torch.inf)
        rest = others.logsumexp(-1, keepdim=True)
        odds = logp - torch.where(top, rest, torch.log1p(-p.masked_fill(top, 0.0)))
        mean_odds = (p * odds).sum(-1, keepdim=True)
        # Σ_{c≠j} p_c p_j / (1 - p_c), with the largest class (whose p/(1 - p) may overflow) apart.
        ratios = odds.masked_fill(top, -torch.inf).exp()
        pulled = p * (ratios.sum(-1, keepdim=True) - ratios)
        share = (p * top).sum(-1, keepdim=True) * others.softmax(-1)
        gradient = pulled + share - p - p * (odds - mean_odds)
        hessian = hessians(_soft_likelihood_ratio, logits)
        return Expansion(
            -mean_odds.squeeze(-1), gradient, hessian, lambda: invariant_root(hessian())
        )


@final
@dataclass(frozen=True)
class PseudoLabel(Checked, Loss):
    """-log p_ŷ with ŷ the most likely class at the prior mean; samples less confident than
    ``threshold`` are left out.
    """

    threshold: FractionBelowOne = 0.0

    def targets(self, logits: Tensor) -> Tensor:
        return one_hot(logits) * (logits.softmax(-1).amax(-1, keepdim=True) >= self.threshold)

    def selected(self, targets: Targets) -> Tensor | None:
        assert isinstance(targets, Tensor)
        return targets.sum(-1) if self.threshold > 0 else None

    def expand(self, logits: Tensor, targets: Targets, weights: Tensor) -> Expansion:
        assert isinstance(targets, Tensor)
        logp = log_softmax(logits)
        value, first, second = cross_entropy(logp, targets)
        p = logp.exp()
        return separable(value.sum(-1), p, first.expand_as(p), second, (targets.sum(-1),))


@final
@dataclass(frozen=True)
class GeneralizedCrossEntropy(Checked, Loss):
    """(1 - p_ŷ^q) / q, between cross-entropy (q -> 0) and mean absolute error (q = 1): robust to
    wrong labels.
    """

    q: PositiveFraction = 0.8

    def targets(self, logits: Tensor) -> Tensor:
        return one_hot(logits)

    def expand(self, logits: Tensor, targets: Targets, weights: Tensor) -> Expansion:
        assert isinstance(targets, Tensor)
        logp = log_softmax(logits)
        first, second = generalized_cross_entropy(logp, self.q)
        value = (targets * generalized_value(logp, self.q)).sum(-1)
        return separable(value, logp.exp(), targets * first, targets * second)


@final
@dataclass(frozen=True)
class InformationMaximization(Loss):
    """mean_i H(p_i) - H(p̄): confident samples, diverse batch.

    Not a mean of per-sample terms: ℓ_i = -KL(p_i ‖ p̄) with p̄ not differentiated has exactly the
    same gradient. The Hessian is the sample's own block of the batch's, p̄ moving along. Constant
    for a single sample.
    """

    minimum = 2
    is_coupled = True

    def expand(self, logits: Tensor, targets: Targets, weights: Tensor) -> Expansion:
        logp = log_softmax(logits)
        p = logp.exp()
        tiny = torch.finfo(weights.dtype).tiny
        shares = (weights / weights.sum().clamp_min(tiny))[:, None]
        mean = (shares * p).sum(-2, keepdim=True)
        return separable(None, p, *information(p, logp, shares, mean, tiny))


@final
@dataclass(frozen=True)
class RunningInformation(Checked, Loss):
    """-KL(p_i ‖ m) with p_i = softmax(s f_i): confident samples, a diverse stream; not constant for
    a single sample.

    m is the mean of p over the last ``window`` samples, uniform before the first, and not
    differentiated: a batch of as many samples has the gradient of ``InformationMaximization``.
    s = ``spread`` / σ from ``least`` to 8, σ² the mean square of the logits' deviations from their
    mean over classes in that window: small logits, as those of a network trained with smooth labels
    are, are seen as if they had the usual spread, and with ``least`` below 1 large ones, too.
    ``spread`` 0: s = 1.
    """

    window: PositiveCount = 200
    spread: NotNegative = 4.0
    least: PositiveFraction = field(default=1.0, metadata=LATE)

    def recall(self, logits: Tensor, memory: Memory) -> tuple[Loss, Memory]:
        state = self._follow(logits, memory.get(_INFORMATION))
        return unchecked(RunningInformation, **{**self.__dict__, "_state": state}), {
            **memory,
            _INFORMATION: state,
        }

    def _follow(self, logits: Tensor, known: Tensor | None) -> Tensor:
        """m and σ² after a batch [k + 1]."""
        n, k = logits.shape
        share = min(1.0, n / self.window)
        deviations = logits - logits.mean(-1, keepdim=True)
        square = deviations.clamp(-_LARGE, _LARGE).square().mean()
        if known is None:
            known = torch.cat((logits.new_full((k,), 1 / k), square[None]))
        square = torch.lerp(known[k], square, share)
        mean = torch.lerp(known[:k], (self._scale(square) * logits).softmax(-1).mean(0), share)
        return torch.cat((mean, square[None]))

    def _scale(self, square: Tensor) -> Tensor:
        """s, a scalar [], from ``least`` to 8."""
        if self.spread == 0:
            return torch.ones_like(square)
        scale = self.spread * square.clamp_min(torch.finfo(square.dtype).tiny).rsqrt()
        return scale.clamp(self.least, 8)

    def targets(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        state = self.__dict__.get("_state")
        state = self._follow(logits, None) if state is None else state
        return state[:-1].expand_as(logits), self._scale(state[-1]).expand(len(logits), 1)

    def expand(self, logits: Tensor, targets: Targets, weights: Tensor) -> Expansion:
        mean, scale = targets  # type: ignore[misc]
        assert isinstance(mean, Tensor)
        assert isinstance(scale, Tensor)
        logp = log_softmax(scale * logits)
        p = logp.exp()
        none, tiny = torch.zeros_like(scale), torch.finfo(p.dtype).tiny
        inner = separable(None, p, *information(p, logp, none, mean, tiny))
        return Expansion(
            inner.value,
            scale * inner.gradient,
            lambda: scale[..., None].square() * inner.hessian(),
            lambda: scale[..., None] * inner.root(),
        )


@final
@dataclass(frozen=True)
class ConjugatePseudoLabel(Checked, Loss):
    """Conjugate of poly-cross-entropy, the loss of the source: log Σ exp f - y·f + ε y·(1 - p),

    y = (I + ε (diag p - p pᵀ))⁻¹ p, differentiated through y; ε = 0, plain cross-entropy, gives
    exactly the entropy.
    """

    epsilon: NotNegative = 1.0

    def _value(self, logits: Tensor) -> Tensor:
        logp = logits.log_softmax(-1)
        p = logp.exp()
        scaled = p / (
            1 + self.epsilon * p
        )  # Sherman–Morrison on I + ε diag p - ε p pᵀ: y = scaled up to a factor, Σy = 1
        label = scaled / scaled.sum(-1, keepdim=True)
        return (label * (self.epsilon * (1 - p) - logp.clamp_min(FLOOR))).sum(-1)

    def expand(self, logits: Tensor, targets: Targets, weights: Tensor) -> Expansion:
        return differentiate(self._value, logits)


@final
@dataclass(frozen=True)
class MarginalLikelihood(Loss):
    """-log Σ_k exp f_k, for prototype heads whose logits are log π_k + log p(features given class
    k).

    The exact negative log marginal likelihood of the mixture; its logit Hessian is negative
    semi-definite, so give it an EmpiricalFisher or GaussNewton curvature.
    """

    def expand(self, logits: Tensor, targets: Targets, weights: Tensor) -> Expansion:
        p = logits.softmax(-1)

        def hessian() -> Tensor:
            return p[..., :, None] * p[..., None, :] - torch.diag_embed(p)

        return Expansion(-logits.logsumexp(-1), -p, hessian, lambda: positive_root(hessian()))


@final
@dataclass(frozen=True)
class Sum(Checked, Loss):
    """Σ_j c_j ℓ_j; terms that need augmented views get their own, and a function logits [n, k] ->
    [n] is a term too.

    ``each_view``: a term that needs none is the mean of its values at every view, those of other
    terms included.
    """

    terms: tuple[Loss, ...] = (Entropy(), InformationMaximization())
    coefficients: tuple[float, ...] = ()
    each_view: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.terms, (tuple, list)), "Sum.terms", self.terms, "a tuple of losses")
        self.__dict__.update(
            terms=tuple(as_loss("Sum.terms", term) for term in self.terms),
            coefficients=tuple(self.coefficients) or (1.0,) * len(self.terms),
        )
        require(len(self.terms) > 0, "Sum.terms", self.terms, "one loss or more")
        require(
            len(self.coefficients) == len(self.terms),
            "Sum.coefficients",
            self.coefficients,
            f"one for each of the {len(self.terms)} terms",
        )
        for coefficient in self.coefficients:
            require_number("Sum.coefficients", coefficient, 0, math.inf)
        require(
            sum(isinstance(term, RunningInformation) for term in self.terms) <= 1,
            "Sum.terms",
            self.terms,
            "with one RunningInformation at most: they share their memory",
        )

    @property
    def minimum(self) -> int:
        return min(term.minimum for term in self.terms)

    @property
    def copies(self) -> int:
        return sum(term.copies for term in self.terms)

    @property
    def is_coupled(self) -> bool:
        return any(term.is_coupled for term in self.terms)

    @property
    def sees_features(self) -> bool:
        return any(term.sees_features for term in self.terms)

    @property
    def needs_source(self) -> bool:
        return any(term.needs_source for term in self.terms)

    def survey(self, source: SourceSamples) -> Memory:
        found: dict[str, Tensor] = {}
        for term in self.terms:
            for name, value in term.survey(source).items():
                same = name not in found or torch.equal(found[name], value)
                require(same, "Sum.terms", f"two that remember {name!r} of the source", "one each")
                found[name] = value
        return found

    def remember(self, memory: Memory) -> Loss:
        return self._with(tuple(term.remember(memory) for term in self.terms))

    def divide(self, features: int) -> Loss:
        terms = tuple(term.divide(features) for term in self.terms)
        return unchecked(Sum, **{**self.__dict__, "terms": terms, "_features": features})

    def _with(self, terms: tuple[Loss, ...]) -> "Sum":
        if all(new is old for new, old in zip(terms, self.terms, strict=True)):
            return self
        return unchecked(Sum, **{**self.__dict__, "terms": terms})

    def _seen_by(self, term: Loss, outputs: Tensor) -> Tensor:
        """The columns that a term sees: all, or the logits alone."""
        columns = self.__dict__.get("_features", 0)
        return outputs if term.sees_features else outputs[..., : outputs.shape[-1] - columns]

    def views(self, inputs: Inputs, generator: Callable[[], torch.Generator]) -> tuple[Inputs, ...]:
        shared = cache(generator)  # one for all terms, so that their augmentations differ
        return (inputs, *(view for term in self.terms for view in term.views(inputs, shared)[1:]))

    def recall(self, logits: Tensor, memory: Memory) -> tuple[Loss, Memory]:
        terms: list[Loss] = []
        for term in self.terms:
            recalled, memory = term.recall(self._seen_by(term, logits), memory)
            terms.append(recalled)
        return self._with(tuple(terms)), memory

    def targets(self, logits: Tensor) -> Targets:
        return tuple(term.targets(self._seen_by(term, logits)) for term in self.terms)

    def selected(self, targets: Targets) -> Tensor | None:
        assert isinstance(targets, tuple)
        masks = [term.selected(target) for term, target in zip(self.terms, targets, strict=True)]
        known = [mask for mask in masks if mask is not None]
        return torch.stack(known).amax(0) if len(known) == len(masks) else None

    def expand(self, logits: Tensor, targets: Targets, weights: Tensor) -> Expansion:
        assert isinstance(targets, tuple)
        views = len(logits)
        values, gradients = list(torch.zeros_like(logits[..., 0])), list(torch.zeros_like(logits))
        shares: list[float | Tensor] = [0.0] * views
        pieces: list[tuple[float, list[int], Expansion]] = []
        for coefficient, index, term, target in self._parts(views, targets):
            # Views are taken one by one: a list of places would stop a GPU's queue.
            own = logits if index == [*range(views)] else torch.stack([logits[i] for i in index])
            piece = term.expand(self._seen_by(term, own), target, weights)
            piece = pad_features(piece, logits.shape[-1] - piece.gradient.shape[-1])
            value, gradient = coefficient * piece.value, coefficient * piece.gradient
            for place, view in enumerate(index):
                values[view] = values[view] + value[place]
                gradients[view] = gradients[view] + gradient[place]
                shares[view] += coefficient * piece.shares[place]
            pieces.append((coefficient, index, piece))

        def hessian() -> Tensor:
            total = logits.new_zeros(*logits.shape, logits.shape[-1])
            for coefficient, index, piece in pieces:
                total[index] += coefficient * piece.hessian()
            return total

        both = torch.stack(values), torch.stack(gradients)
        return Expansion(*both, hessian, lambda: positive_root(hessian()), tuple(shares))

    def _parts(
        self, views: int, targets: tuple[Targets, ...]
    ) -> Iterator[tuple[float, list[int], Loss, Targets]]:
        """Every term with the views that it sees, and what it counts there."""
        start = 1
        for term, coefficient, target in zip(self.terms, self.coefficients, targets, strict=True):
            if self.each_view and term.copies == 0:
                yield from ((coefficient / views, [view], term, target) for view in range(views))
            else:
                yield coefficient, [0, *range(start, start + term.copies)], term, target
            start += term.copies


@final
@dataclass(frozen=True)
class Custom(Loss):
    """Any differentiable function of the clean logits, [n, k] -> [n], sample by sample (called on
    batches of one).
    """

    function: Callable[[Tensor], Tensor]

    def expand(self, logits: Tensor, targets: Targets, weights: Tensor) -> Expansion:
        expansion = differentiate(self.function, logits)
        values = expansion.value[0]
        together = self.function(logits[0]) if logits.dim() == 3 and logits.shape[1] > 1 else values
        require(
            together.shape == values.shape
            and torch.allclose(together, values, rtol=1e-3, atol=1e-5),
            "the loss function",
            self.function,
            "one of each sample alone: here the others change its value",
        )
        return expansion


@final
@dataclass(frozen=True)
class Softened(Checked, Loss):
    """ℓ(f / T): a loss as it is of softer predictions, softmax(f / T), T the ``temperature``.

    A network is surer of what it sees under a shift than it is right, and a loss that rests on its
    predictions learns from samples that it is wrong about as if they were certain. Gradient and
    Hessian are those in f: 1/T and 1/T² times the loss's own at f / T. Weights of samples are those
    of the logits as they are.
    """

    loss: Loss | Callable[[Tensor], Tensor] = field(default_factory=Entropy)
    temperature: Positive = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        inner = as_loss("Softened.loss", self.loss)
        self.__dict__.update(loss=inner)
        plain = inner.copies == 0 and not inner.sees_features and not inner.needs_source
        allowed = "a loss of the clean logits alone, without views, features or source samples"
        require(plain, "Softened.loss", inner, allowed)

    @property
    def _inner(self) -> Loss:
        return self.loss  # type: ignore[return-value]  # as_loss in __post_init__

    @property
    def minimum(self) -> int:
        return self._inner.minimum

    @property
    def is_coupled(self) -> bool:
        return self._inner.is_coupled

    def _with(self, inner: Loss) -> Loss:
        if inner is self.loss:
            return self
        return unchecked(Softened, loss=inner, temperature=self.temperature)

    def remember(self, memory: Memory) -> Loss:
        return self._with(self._inner.remember(memory))

    def recall(self, logits: Tensor, memory: Memory) -> tuple[Loss, Memory]:
        inner, memory = self._inner.recall(logits / self.temperature, memory)
        return self._with(inner), memory

    def targets(self, logits: Tensor) -> Targets:
        return self._inner.targets(logits / self.temperature)

    def selected(self, targets: Targets) -> Tensor | None:
        return self._inner.selected(targets)

    def expand(self, logits: Tensor, targets: Targets, weights: Tensor) -> Expansion:
        by = self.temperature
        inner = self._inner.expand(logits / by, targets, weights)
        return inner._replace(
            gradient=inner.gradient / by,
            hessian=lambda: inner.hessian() / by**2,
            root=lambda: inner.root() / by,
        )


def as_loss(field: str, loss: Any) -> Loss:
    """A loss as it is; a function logits [n, k] -> [n] as a custom one."""
    require_role(field, loss, "loss", "Entropy() or a function logits [n, k] -> [n]")
    if not hasattr(loss, "expand"):
        return Custom(loss)
    counted = type(loss).views is Loss.views or type(loss).copies is not Loss.copies
    require(counted, f"{field}.copies", loss.copies, "the number of views beside the inputs")
    own: Loss = loss
    return own


register(
    loss=(
        Entropy,
        SoftLikelihoodRatio,
        PseudoLabel,
        InformationMaximization,
        RunningInformation,
        GeneralizedCrossEntropy,
        ConjugatePseudoLabel,
        MarginalLikelihood,
        Sum,
        Softened,
    )
)

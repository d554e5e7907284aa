"""The observation model p(X_t given θ) = exp(-E(θ)), E(θ) = (1/n) Σ_i w_i ℓ_i(θ): a Gibbs
pseudo-likelihood.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal, NamedTuple, final

import torch
from torch import Tensor

from driftfilter.base.checks import (
    LATE,
    Checked,
    Count,
    Fraction,
    PositiveCount,
    Role,
    can_wait,
    check_later,
    register,
    require,
    require_finite,
    unchecked,
)
from driftfilter.base.inputs import Inputs
from driftfilter.base.memory import remembered
from driftfilter.base.randomness import Purpose, Randomness
from driftfilter.gaussian.belief import Belief
from driftfilter.model.expansion import Expansion
from driftfilter.model.losses import Entropy, Loss, Targets, as_loss
from driftfilter.model.predictive import PredictiveModel, Pullback
from driftfilter.model.some_samples import SomeSamples
from driftfilter.model.survey import SourceSamples
from driftfilter.model.views import Augmentation, ImageViews, augment
from driftfilter.model.weighting import Batch, Constant, Memory, Weighting, look_at, looks

TEACHER = remembered("teacher", "d")  # φ
_TEACHERS = "teacher."  # in the memory: what the model carries for the teacher


@final
@dataclass(frozen=True)
class Teacher(Checked):
    """Targets from a slow average φ of the adapted parameters: φ ← a φ + (1 - a) θ after each step,
    from φ = θ_S.

    ȳ = f(x; φ), or its mean over augmented copies if the source is unsure of the batch:
    mean_i max_c p_c(x_i; θ_S) < ``confidence``. With ``own_statistics`` the teacher carries
    statistics of batch norm of its own, by the same rule (RoTTA; for ``confidence`` 0 only);
    otherwise it has the student's.
    """

    momentum: Fraction = 0.999
    augmentation: Annotated[Augmentation, Role("augmentation", "ImageViews()")] = field(
        default_factory=ImageViews
    )
    copies: PositiveCount = 32
    confidence: Fraction = 0.92
    own_statistics: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.confidence == 0 or not self.own_statistics,
            "Teacher.confidence",
            self.confidence,
            "0 for a teacher with statistics of its own",
        )

    def observe(
        self,
        model: PredictiveModel,
        inputs: Inputs,
        memory: Memory,
        source: Belief,
        randomness: Randomness,
        classes: int | None = None,
    ) -> tuple[Tensor, Memory]:
        """ȳ [n, k] for a batch that is learned from, and the memory with what the teacher keeps of
        it; ``classes`` k, if features stand beside the logits.
        """
        if not self.own_statistics:
            return self.logits(model, inputs, memory, source, randomness, classes), memory
        teacher = memory.get(TEACHER, source.mean)
        outputs, pullback = self._recall(model, memory).pullback(teacher, inputs)
        kept = {_TEACHERS + name: value for name, value in pullback.memory.items()}
        return outputs, {**memory, **kept}

    def _recall(self, model: PredictiveModel, memory: Memory) -> PredictiveModel:
        """The model with the teacher's own statistics, if it has any yet."""
        own = {
            name.removeprefix(_TEACHERS): value
            for name, value in memory.items()
            if name.startswith(_TEACHERS)
        }
        return model.recall(own) if self.own_statistics else model

    def logits(
        self,
        model: PredictiveModel,
        inputs: Inputs,
        memory: Memory,
        source: Belief,
        randomness: Randomness,
        classes: int | None = None,
    ) -> Tensor:
        """ȳ [n, k], or with features beside it if there are more outputs than ``classes``."""
        teacher, model = memory.get(TEACHER, source.mean), self._recall(model, memory)
        is_sure = self.confidence == 0
        if not is_sure:
            own = model(source.mean, inputs)[:, :classes].softmax(-1)
            is_sure = own.amax(-1).mean().item() >= self.confidence
        if is_sure:  # the source
            return model(teacher, inputs)
        generator = randomness.generator(Purpose.TEACHER)

        def draw(batch: Inputs) -> tuple[Inputs, ...]:
            return (augment(self.augmentation, batch, generator),)

        copies = (model.draw_views(draw, inputs)[0] for _ in range(self.copies))
        total = model(teacher, next(copies))
        for copy in copies:
            total = total + model(teacher, copy)
        return total / self.copies

    def __call__(
        self, belief: Belief, energy: Energy, memory: Memory, randomness: Randomness
    ) -> tuple[Belief, Memory]:
        """The upkeep of the teacher: one step closer to θ."""
        teacher = memory.get(TEACHER, energy.require_source().mean)
        return belief, {**memory, TEACHER: torch.lerp(belief.mean, teacher, self.momentum)}


@final
@dataclass(frozen=True)
class Gibbs(Checked):
    """A loss and a weighting; the temperature β is the weighting's.

    E = Σ_i w_i ℓ_i / n (``over`` "batch") or divided by the number of samples with a positive
    weight ("kept"); by no less than ``reference``, so that a batch of fewer samples tells less.
    ``loss`` may be any function logits [n, k] -> [n]. Targets of the loss (pseudo-labels) are those
    of the parameters themselves at the prior mean, or of a ``teacher``. Views that the loss asks
    for are of the whole batch, or (``augmented`` "kept") of the samples with a weight alone: batch
    statistics of a view are then those of these samples, as in ROID's code. With an
    ``augmentation`` the loss sees augmented inputs, and the teacher the inputs as they are.
    """

    loss: Loss | Callable[[Tensor], Tensor] = field(default_factory=Entropy)
    weighting: Annotated[Weighting, Role("weighting", "Constant(1.0)")] = field(
        default_factory=Constant
    )
    over: Literal["batch", "kept"] = "batch"
    teacher: Teacher | None = None
    reference: Count = 0
    augmented: Literal["batch", "kept"] = field(default="batch", metadata=LATE)
    augmentation: Annotated[Augmentation, Role("augmentation", "ImageViews()")] | None = field(
        default=None, metadata=LATE
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.__dict__.update(loss=as_loss("Gibbs.loss", self.loss), _looks=looks(self.weighting))
        require(
            self.teacher is None or isinstance(self.teacher, Teacher),
            "Gibbs.teacher",
            self.teacher,
            "a Teacher or None",
        )
        require(
            self.augmented == "batch" or not self.loss.needs_source,  # type: ignore[union-attr]
            "Gibbs.augmented",
            self.augmented,
            f"'batch' for {self.loss}, which looks at source samples",
        )

    def __call__(
        self,
        model: PredictiveModel,
        theta: Tensor,
        inputs: Inputs,
        memory: Memory,
        randomness: Randomness,
        source: Belief | None = None,
        keeps_rows: bool = False,
    ) -> tuple[Energy, Memory]:
        """The energy of a batch, with weights and targets fixed at the prior mean θ.

        ``keeps_rows``: somebody asks for the gradient rows at θ after inference.
        """
        remembered, plain = self.remember(memory), model.observing
        own: Loss = remembered.loss  # type: ignore[assignment]  # as_loss in __post_init__
        seen = plain.with_features() if own.sees_features else plain
        shown = inputs if self.augmentation is None else self._augment(model, inputs, randomness)
        outputs, pullback = pull_back(seen, theta, shown)
        k = outputs.shape[1] - pullback.feature_columns
        taught = None
        if self.teacher is not None:
            require(source is not None, "source", source, "the source belief if there is a teacher")
            assert source is not None
            taught, memory = self.teacher.observe(seen, inputs, memory, source, randomness, k)
        own = own.divide(pullback.feature_columns) if own.sees_features else own
        loss, memory = own.recall(outputs, memory)
        targets = loss.targets(outputs if taught is None else taught)
        batch = Batch(plain, theta, shown, randomness, source)
        logits = outputs[:, :k] if pullback.feature_columns else outputs
        weights, used, memory = self.weigh(logits, loss.selected(targets), memory, batch)
        some = self._choose_some(seen, weights)
        views = remembered.views(model if some is None else some, shown, randomness)
        others = [pull_back(some or seen, theta, view) for view in views[1:]]
        weights = weights * pullback.novelty
        samples = Samples(targets, weights, self.coefficients(weights, used), used)
        evaluation = evaluate(loss, [(outputs, pullback), *others], samples, keeps_rows)
        told = taught if taught is None else taught[:, :k]
        fixed = (remembered._with(loss), seen, views, samples, theta, evaluation, source, told)
        known = plain is model and shown is inputs and pullback.predicts
        told_by = (known, some, randomness, plain)
        return Energy(*fixed, *told_by), {**memory, **pullback.memory}

    def _augment(self, model: PredictiveModel, inputs: Inputs, randomness: Randomness) -> Inputs:
        """The inputs as the loss sees them."""
        assert self.augmentation is not None
        augmentation, generator = self.augmentation, randomness.generator(Purpose.STUDENT)
        return model.draw_views(lambda batch: (augment(augmentation, batch, generator),), inputs)[0]

    def survey(
        self,
        model: PredictiveModel,
        theta: Tensor,
        data: Iterable[tuple[Inputs, Tensor | None]] | None,
    ) -> Memory:
        """What the loss remembers of source data, seen by the model at θ_S."""
        loss: Loss = self.loss  # type: ignore[assignment]  # as_loss in __post_init__
        if not loss.needs_source:
            return {}
        require(data is not None, "data", None, f"source samples, which {loss} needs")
        assert data is not None
        return loss.survey(SourceSamples(model.observing, theta, data, loss.sees_features))

    def remember(self, memory: Memory) -> Gibbs:
        """The observation with what the loss needs of the memory before it looks at a batch."""
        loss: Loss = self.loss  # type: ignore[assignment]  # as_loss in __post_init__
        return self._with(loss.remember(memory))

    def _with(self, loss: Loss) -> Gibbs:
        if loss is self.loss:
            return self
        return unchecked(Gibbs, **{**self.__dict__, "loss": loss})

    def _choose_some(self, model: PredictiveModel, weights: Tensor) -> SomeSamples | None:
        """The model of the samples to augment, by their weights [n]; None if it is all of them."""
        if self.augmented == "batch":
            return None
        index = weights.nonzero().squeeze(1)
        return SomeSamples(model, index, len(weights)) if 0 < len(index) < len(weights) else None

    def views(
        self, model: PredictiveModel, inputs: Inputs, randomness: Randomness
    ) -> tuple[Inputs, ...]:
        """What the loss looks at: the inputs, then augmented ones if it asks for them."""
        loss: Loss = self.loss  # type: ignore[assignment]  # as_loss in __post_init__
        if loss.copies == 0:
            return (inputs,)

        def draw(batch: Inputs) -> tuple[Inputs, ...]:
            return loss.views(batch, lambda: randomness.generator(Purpose.VIEWS))[1:]

        return (inputs, *model.draw_views(draw, inputs))

    def weigh(
        self, logits: Tensor, start: Tensor | None, memory: Memory, batch: Batch
    ) -> tuple[Tensor, int | Tensor, Memory]:
        """Weights [n] of samples from their logits [n, k], how many have one (a tensor [] if a look
        would stop a GPU's queue), and the weighting's memory.
        """
        if start is None and isinstance(self.weighting, Constant):  # nothing to look at
            return logits.new_full(logits.shape[:1], self.weighting.beta), logits.shape[0], memory
        start = logits.new_ones(logits.shape[0]) if start is None else start
        weighting = look_at(batch, self.weighting) if self.__dict__["_looks"] else self.weighting
        weights, memory = weighting(logits, start, memory)
        if can_wait(weights):
            check_later(weights.amin().sqrt(), partial(_require_weights, weights, self.weighting))
            return weights, weights.count_nonzero(), memory
        _require_weights(weights, self.weighting)
        return weights, int(weights.count_nonzero()), memory

    def coefficients(self, weights: Tensor, used: int | Tensor) -> Tensor:
        """w_i / n [n], or over another number of samples."""
        least = max(self.reference, 1)
        if self.over == "batch":
            return weights / max(weights.shape[0], least)
        return weights / (used.clamp_min(least) if isinstance(used, Tensor) else max(used, least))

    def weigh_again(
        self, samples: Samples, logits: Tensor, batch: Batch, novelty: Tensor | float = 1.0
    ) -> Samples:
        """The samples with the weights that their logits at another θ give to those that had one;
        no memory is kept.
        """
        weights, used, _ = self.weigh(logits, (samples.weights > 0).to(logits.dtype), {}, batch)
        weights = weights * novelty
        return Samples(samples.targets, weights, self.coefficients(weights, used), used)


def _require_weights(weights: Tensor, weighting: Weighting) -> None:
    """Raise for a weight below 0."""
    if not (weights >= 0).all():
        least = weights.min().item()
        raise ValueError(f"the weights of the samples must be >= 0, got {least:g} from {weighting}")


def pull_back(model: PredictiveModel, theta: Tensor, inputs: Inputs) -> tuple[Tensor, Pullback]:
    """The model's logits, checked, and its pullback."""
    logits, pullback = model.pullback(theta, inputs)
    n = model.count_samples(inputs)
    if logits.dim() != 2 or logits.shape[0] != n or logits.shape[1] < 1:
        raise ValueError(
            f"the model's logits must be of shape [{n}, k], got shape {list(logits.shape)}"
        )
    require_finite("the model's logits", logits)
    if not isinstance(pullback, Pullback):
        given = type(pullback).__name__
        require(False, "the model's pullback", given, "a Pullback (driftfilter.model.predictive)")
    return logits, pullback


class Samples(NamedTuple):
    """What is fixed for the samples of a batch, at the prior mean."""

    targets: Targets
    weights: Tensor  # [n], w_i
    coefficients: Tensor  # [n], w_i / n, or over another number of samples (see Gibbs)
    used: int | Tensor  # samples with a weight, a number or a tensor []


class Energy(NamedTuple):
    """E(θ) of one batch, as a function of θ."""

    observation: Gibbs
    model: PredictiveModel
    views: tuple[Inputs, ...]
    samples: Samples
    anchor: Tensor  # [d], the prior mean
    evaluation: Evaluation  # there
    source: Belief | None = None  # where the stream started
    taught: Tensor | None = None  # the teacher's logits [n, k]
    observes_logits: bool = True  # False: the loss sees other outputs, or inputs, than predictions
    some: SomeSamples | None = None  # of whom augmented views are, if not of all samples
    randomness: Randomness | None = None  # of the step
    plain: PredictiveModel | None = None  # the model without features beside the logits

    @property
    def loss(self) -> Loss:
        """ℓ."""
        return self.observation.loss  # type: ignore[return-value]  # as_loss in Gibbs

    def at(self, theta: Tensor) -> Evaluation:
        """The energy and its derivatives at θ."""
        if theta is self.anchor:
            return self.evaluation
        return evaluate(self.loss, self._pull_back(theta), self.samples)

    def reweigh_at(self, theta: Tensor) -> Evaluation:
        """The energy with the weights of samples worked out again at θ.

        Samples that were left out stay out, others may leave.
        """
        pulled, first = self._pull_back(theta), self.evaluation.pullbacks[0]
        assert self.randomness is not None
        batch = Batch(self.plain or self.model, theta, self.views[0], self.randomness, self.source)
        logits = pulled[0][0]
        logits = logits[:, : logits.shape[1] - first.feature_columns]
        samples = self.observation.weigh_again(self.samples, logits, batch, first.novelty)
        return evaluate(self.loss, pulled, samples)

    def known_logits(self, theta: Tensor) -> Tensor | None:
        """Logits to predict with at θ, of every view [v, n, k], if they are there already."""
        if theta is not self.anchor or not self.observes_logits:
            return None
        return self.evaluation.class_logits

    def require_source(self) -> Belief:
        """The belief that the stream started from."""
        require(self.source is not None, "Energy.source", self.source, "the source belief")
        assert self.source is not None
        return self.source

    @property
    def looks(self) -> list[tuple[PredictiveModel, Inputs]]:
        """Every view with the model of its samples."""
        clean, *others = self.views
        return [(self.model, clean), *((self.some or self.model, view) for view in others)]

    def _pull_back(self, theta: Tensor) -> list[tuple[Tensor, Pullback]]:
        return [pull_back(model, theta, view) for model, view in self.looks]


def evaluate(
    loss: Loss, pulled: list[tuple[Tensor, Pullback]], samples: Samples, keeps_rows: bool = False
) -> Evaluation:
    """A loss at the logits of each view, with the way back to parameters."""
    views = [logits for logits, _ in pulled]
    logits = torch.stack(views) if len(views) > 1 else views[0].unsqueeze(0)
    expansion = loss.expand(logits, samples.targets, samples.weights)
    pullbacks = [pullback for _, pullback in pulled]
    return Evaluation(expansion, logits, pullbacks, samples.coefficients, keeps_rows)


@final
@dataclass(frozen=True, eq=False)
class Evaluation:
    """E to second order at one θ: the loss in logit space and the way back to parameters."""

    expansion: Expansion
    logits: Tensor  # [v, ..., n, k], or [v, ..., n, k + D] with features for a loss that sees them
    pullbacks: list[Pullback]  # one for each view
    coefficients: Tensor  # [n]
    keeps_rows: bool = False  # rows are worked out once, for several rules of the step

    def value(self) -> Tensor:
        """E, a scalar []."""
        return self.coefficients @ self.expansion.value.sum(0)

    @property
    def class_logits(self) -> Tensor:
        """The logits without features that may stand beside them [v, ..., n, k]."""
        columns = self.pullbacks[0].feature_columns
        return self.logits[..., : self.logits.shape[-1] - columns] if columns else self.logits

    @property
    def is_coupled(self) -> bool:
        """Whether batch statistics tie samples together: a row then holds a part of others'."""
        return any(pull.is_coupled for pull in self.pullbacks)

    @property
    def rows(self) -> Tensor:
        """(w_i / n) ∇ℓ_i of every sample [n, d]; they sum to ∇E, also if samples are coupled.

        They come from a backward pass. If the evaluation keeps them, they are to be read only.
        """
        rows: Tensor | None = self.__dict__.get("_rows")
        if rows is None:
            pieces: list[Tensor] = []
            for pull, slopes in zip(self.pullbacks, self.slopes(), strict=True):
                pieces.append(pull(slopes))
            rows = _sum(pieces)
            if self.keeps_rows:
                self.__dict__["_rows"] = rows
        return rows

    def slopes(self, cotangents: Tensor | None = None) -> Tensor:
        """(w_i / n) c_i [v, n, k], for the loss's own logit gradients c or others."""
        own = self.expansion.gradient if cotangents is None else cotangents
        return own * self.coefficients.unsqueeze(1)

    def gradient(self, cotangents: Tensor | None = None) -> Tensor:
        """∇E = Σ_i (w_i / n) J_iᵀ c_i [d], for the loss's logit gradients c [v, n, k] or others."""
        if cotangents is None and self.keeps_rows:
            return self.rows.sum(0)
        slopes = self.slopes(cotangents)
        return _sum([pull.total(own) for pull, own in zip(self.pullbacks, slopes, strict=True)])

    def factor(self, roots: Tensor) -> Tensor:
        """F [m, d] with FᵀF = Σ_i (w_i / n) J_iᵀ (R_i R_iᵀ) J_i, for roots R of logit-space metrics
        [v, n, k, r].
        """
        pieces = [rows.flatten(0, 1) for rows in self.pull_roots(roots)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def pull_roots(self, roots: Tensor) -> list[Tensor]:
        """√(w_i / n) J_iᵀ R_i of each view [r, n, d], for R [v, n, k, r]: r backward passes, or n r
        if samples are coupled.
        """
        weighted = roots.permute(0, 3, 1, 2) * self.coefficients.sqrt().unsqueeze(1)  # [v, r, n, k]
        return [pull.apart(weighted.select(0, view)) for view, pull in enumerate(self.pullbacks)]


def _sum(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.stack(pieces).sum(0)


register(teacher=(Teacher,), observation=(Gibbs,))

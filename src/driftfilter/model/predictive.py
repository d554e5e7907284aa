"""The predictive model p(y given x, θ) = softmax(f(x; θ)): the only part that knows a network.

Losses live in logit space. The model pulls cotangents of the logits back to parameter rows and
pushes parameter tangents forward to logits; nothing else knows whether it is a linear head, a plain
function or a network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol, TypeAlias, final, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from driftfilter.base.checks import Checked, PositiveCount, register, require
from driftfilter.base.inputs import Inputs, batch_size
from driftfilter.base.sharding import current, place_samples, take_samples
from driftfilter.gaussian.covariance import Covariance

Draw: TypeAlias = Callable[[Inputs], tuple[Inputs, ...]]
LogitFunction: TypeAlias = Callable[
    [Tensor, Inputs], Tensor
]  # (theta [d], inputs [n, ...]) -> logits [n, k]


class Pullback(ABC):
    """Jᵀ c at one (θ, inputs); inherit from it for defaults of ``is_coupled`` and ``memory``."""

    # Whether batch statistics tie samples together: a row then holds a part of others'.
    is_coupled: bool = False
    # Whether the logits are those of a prediction: some statistics differ while a pass learns.
    predicts: bool = True
    # Statistics of the model itself to carry to the next step, such as running means.
    memory: Mapping[str, Tensor] = MappingProxyType({})
    # How far the batch is of another domain than the source's, 0 to 1; multiplies its weights.
    novelty: Tensor | float = 1.0
    # D if the last D columns of the outputs are features, beside the logits (``with_features``).
    feature_columns: int = 0

    @abstractmethod
    def __call__(self, cotangents: Tensor) -> Tensor:
        """Per-sample rows J_iᵀ c_i: [..., n, k] -> [..., n, d]."""

    @abstractmethod
    def total(self, cotangents: Tensor) -> Tensor:
        """Their sum Σ_i J_iᵀ c_i, without the rows: [n, k] -> [d]."""

    def apart(self, cotangents: Tensor) -> Tensor:
        """J_iᵀ c_i of every sample, J_i the derivative of its own logits: [..., n, k] -> [..., n,
        d]. If samples are coupled, that takes a backward pass for each of them.
        """
        if not self.is_coupled:
            rows = self(cotangents)
            if not self.is_coupled:  # the rows may have told
                return rows
        questions = cotangents.reshape(-1, *cotangents.shape[-2:])
        found = torch.stack([self._each(question) for question in questions])
        return found.reshape(*cotangents.shape[:-1], -1)

    def _each(self, cotangents: Tensor) -> Tensor:
        """J_iᵀ c_i [n, d], one total after the other."""
        alone = torch.diag_embed(cotangents.mT).movedim(0, -1)  # [n, n, k]
        return torch.stack([self.total(question) for question in alone])


@runtime_checkable
class PredictiveModel(Protocol):
    """Logits with their derivatives in both directions.

    A model of your own inherits from it and has ``__call__``, ``pullback`` and ``pushforward``; the
    other members have defaults.
    """

    @property
    def linear(self) -> bool:
        """Whether f is linear in θ, so that the Jacobian is the same at every θ."""
        return False

    @property
    def shapes(self) -> Mapping[str, torch.Size] | None:
        """Shapes of the pieces of θ by name, in their order; None if θ is one vector."""
        return None

    @property
    def observing(self) -> PredictiveModel:
        """The model as the loss sees it: itself, unless it has outputs for the loss alone."""
        return self

    @property
    def exact(self) -> PredictiveModel:
        """The model whose pullback is the derivative of the logits, as predictions need it: itself,
        unless it learns by another one (``Ema``).
        """
        return self

    @property
    def by_source(self) -> PredictiveModel:
        """The model with the source's batch statistics: itself, if it has no others."""
        return self

    @property
    def settled(self) -> PredictiveModel:
        """The model with the statistics that it carries, to which the batch at hand adds nothing:
        itself, if it carries none.
        """
        return self

    def with_features(self) -> PredictiveModel:
        """The model with its features beside the logits, outputs [n, k + D]."""
        allowed = "a network with a linear head, or a head on features, for a rule that sees them"
        require(False, "the model", type(self).__name__, allowed)
        return self

    def logits_and_features(self, theta: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Logits [n, k] and the features [n, D] that the last layer makes them of."""
        outputs, pullback = self.with_features().pullback(theta, inputs)
        k = outputs.shape[1] - pullback.feature_columns
        return outputs[:, :k], outputs[:, k:]

    def recall(self, memory: Mapping[str, Tensor]) -> PredictiveModel:
        """The model with the statistics of its own that a filter's memory holds."""
        return self

    def share_pass(self, batches: Sequence[Inputs]) -> bool:
        """Ask the part of the model that has no θ about several batches at once; each of them is
        known then as long as it lives. False: there is no such part, or samples are coupled.
        """
        return False

    def count_samples(self, inputs: Inputs) -> int:
        """Samples of a batch: rows of its logits, of all ranks if it is in shards."""
        shards = current()
        if shards is not None:
            return sum(shards.sizes)
        return len(inputs) if isinstance(inputs, Tensor) else batch_size(inputs)

    def draw_views(self, draw: Draw, inputs: Inputs) -> tuple[Inputs, ...]:
        """Views that ``draw`` makes of a batch, with the draws of the whole batch."""
        return tuple(take_samples(view) for view in draw(place_samples(inputs)))

    def __call__(self, theta: Tensor, inputs: Inputs) -> Tensor:
        """Logits [n, k]."""

    def pullback(self, theta: Tensor, inputs: Inputs) -> tuple[Tensor, Pullback]:
        """Logits [n, k] and the pullback there."""

    def pushforward(self, theta: Tensor, inputs: Inputs, tangents: Tensor) -> Tensor:
        """J v for rows v [s, d] -> [s, n, k], J the derivative of the logits."""


def logit_covariance(covariance: Covariance, logits: Tensor, pullback: Pullback) -> Tensor:
    """J_i Σ J_iᵀ of every sample [n, k, k], the covariance of the linearised logits.

    It takes k backward passes, or n k if samples are coupled.
    """
    k = logits.shape[-1]
    units = torch.eye(k, dtype=logits.dtype, device=logits.device)
    jacobian = pullback.apart(units[:, None, :].expand(k, len(logits), k))  # [k, n, d]
    return torch.einsum("knd,lnd->nkl", jacobian, covariance.apply(jacobian))


def lift(function: LogitFunction | PredictiveModel) -> PredictiveModel:
    """A plain function as a predictive model; a predictive model as it is."""
    allowed = "a function (theta, inputs) -> logits or a PredictiveModel"
    require(
        callable(function) and not isinstance(function, type), "Filter.logits", function, allowed
    )
    if isinstance(function, PredictiveModel):
        return function
    require(
        not hasattr(function, "pullback"),
        "Filter.logits",
        "a model with a pullback that lacks members of PredictiveModel",
        f"{allowed}: inherit from it for defaults",
    )
    require(
        not isinstance(function, torch.nn.Module),
        "Filter.logits",
        type(function).__name__,
        f"{allowed}; for a module write lambda theta, inputs: torch.func.functional_call(module, "
        "parameters(theta), inputs)",
    )
    return Lifted(function)


@final
@dataclass(frozen=True)
class LinearHead(Checked, PredictiveModel):
    """f = Φ Wᵀ, θ = W row by row (class-major), closed forms throughout.

    θ of length k·D gives every class a row; θ of length (k-1)·D fixes the logit of class 0 at 0,
    which for k = 2 is logistic regression, p(y = 1) = σ(φ·θ). With ``intercept`` a constant 1 is
    put before the features.

    >>> import torch
    >>> LinearHead(classes=2)(torch.tensor([1.0, -1.0]), torch.tensor([[2.0, 0.5]]))
    tensor([[0.0000, 1.5000]])
    """

    classes: PositiveCount
    intercept: bool = False
    linear = True

    def _features(self, inputs: Tensor, theta: Tensor) -> tuple[Tensor, int]:
        """Features [n, D], and the first class that has a row in θ: 1 if class 0 is fixed at 0,
        else 0.
        """
        if inputs.dim() != 2:
            raise ValueError(
                f"inputs must be of shape [n, features], got shape {list(inputs.shape)}"
            )
        if inputs.dtype != theta.dtype:
            inputs = inputs.to(theta.dtype)
        if self.intercept:
            inputs = torch.cat((inputs.new_ones(len(inputs), 1), inputs), -1)
        width, length = inputs.shape[1], theta.shape[-1]
        first = self.classes - length // width if width else -1
        if first not in (0, 1) or length % width:
            raise ValueError(
                f"the belief must be over {(self.classes - 1) * width} or {self.classes * width} "
                "parameters"
                f" for {self.classes} classes and {width} features, got {length}"
            )
        return inputs, first

    def _logits(self, theta: Tensor, features: Tensor, first: int) -> Tensor:
        """[..., d] -> [..., n, k]."""
        width = features.shape[1]
        if theta.dim() == 1:
            logits = functional.linear(features, theta.view(-1, width))
        else:
            logits = features @ theta.unflatten(-1, (-1, width)).mT
        return torch.cat((logits.new_zeros(*logits.shape[:-1], 1), logits), -1) if first else logits

    def with_features(self) -> PredictiveModel:
        return BesideFeatures(self)

    def __call__(self, theta: Tensor, inputs: Tensor) -> Tensor:
        return self._logits(theta, *self._features(inputs, theta))

    def pullback(self, theta: Tensor, inputs: Tensor) -> tuple[Tensor, Pullback]:
        features, first = self._features(inputs, theta)
        return self._logits(theta, features, first), _LinearPullback(features, first)

    def pushforward(self, theta: Tensor, inputs: Tensor, tangents: Tensor) -> Tensor:
        return self._logits(tangents, *self._features(inputs, theta))


class _LinearPullback(Pullback):
    def __init__(self, features: Tensor, first: int) -> None:
        self.features = features  # [n, D]
        self.first = first  # class that has the first row in θ

    def __call__(self, cotangents: Tensor) -> Tensor:
        own = cotangents.narrow(-1, self.first, cotangents.shape[-1] - self.first)
        return (own.unsqueeze(-1) * self.features.unsqueeze(1)).flatten(-2)

    def total(self, cotangents: Tensor) -> Tensor:
        own = cotangents.narrow(-1, self.first, cotangents.shape[-1] - self.first)
        return torch.mm(own.t(), self.features).view(-1)


@final
@dataclass(frozen=True)
class Lifted(PredictiveModel):
    """A plain function (theta, inputs) -> logits, differentiated by torch.

    Each row of the batch is taken to depend on its own input only: per-sample rows call the
    function on batches of one, so a function that couples samples (batch statistics) needs a
    predictive model of its own.
    """

    function: LogitFunction

    def __call__(self, theta: Tensor, inputs: Tensor) -> Tensor:
        logits = self.function(theta, inputs)
        if (
            not isinstance(logits, Tensor)
            or logits.dim() != 2
            or logits.shape[0] != inputs.shape[0]
        ):
            got = (
                f"shape {list(logits.shape)}"
                if isinstance(logits, Tensor)
                else type(logits).__name__
            )
            raise ValueError(
                "the model's logits must be a tensor of shape [n, k], for n = "
                f"{inputs.shape[0]}, got {got}"
            )
        return logits.to(theta.dtype)

    def pullback(self, theta: Tensor, inputs: Tensor) -> tuple[Tensor, Pullback]:
        with torch.enable_grad():
            leaf = theta.detach().requires_grad_()
            if inputs.shape[0] == 1:
                copies = leaf[None]
                logits = self(copies[0], inputs)
            else:
                copies = leaf.expand(inputs.shape[0], -1)
                logits = torch.func.vmap(lambda row, x: self(row, x[None])[0])(copies, inputs)
        return logits.detach(), _LiftedPullback(leaf, copies, logits)

    def pushforward(self, theta: Tensor, inputs: Tensor, tangents: Tensor) -> Tensor:
        def push(tangent: Tensor) -> Tensor:
            moved: Tensor = torch.func.jvp(lambda point: self(point, inputs), (theta,), (tangent,))[
                1
            ]
            return moved

        return torch.func.vmap(push)(tangents)


class _LiftedPullback(Pullback):
    def __init__(self, leaf: Tensor, copies: Tensor, logits: Tensor) -> None:
        self.leaf = leaf  # [d]
        self.copies = copies  # [n, d], the same θ once per sample
        self.logits = logits  # [n, k], with its graph

    def _gradient(self, at: Tensor, cotangents: Tensor) -> Tensor:
        batched = cotangents.dim() > 2
        flat = cotangents.flatten(0, -3) if batched else cotangents
        gradient: Tensor | None = None
        if self.logits.requires_grad:
            (gradient,) = torch.autograd.grad(
                self.logits,
                at,
                flat,
                retain_graph=True,
                is_grads_batched=batched,
                allow_unused=True,
            )
        if gradient is None:
            raise ValueError(
                "the model's logits must be differentiable in theta, got logits without a "
                "gradient: the function does not"
                " use theta, detaches it, or runs under torch.no_grad or torch.inference_mode"
            )
        return gradient.unflatten(0, cotangents.shape[:-2]) if batched else gradient

    def __call__(self, cotangents: Tensor) -> Tensor:
        return self._gradient(self.copies, cotangents)

    def total(self, cotangents: Tensor) -> Tensor:
        return self._gradient(self.leaf, cotangents)


@dataclass(frozen=True, eq=False)
class ModelAround(PredictiveModel):
    """A model around another one, which answers for what the outer one does not change."""

    model: PredictiveModel

    @property
    def linear(self) -> bool:
        return self.model.linear

    @property
    def observing(self) -> PredictiveModel:
        seen = self.model.observing
        return self if seen is self.model else replace(self, model=seen)

    @property
    def exact(self) -> PredictiveModel:
        exact = self.model.exact
        return self if exact is self.model else replace(self, model=exact)

    @property
    def by_source(self) -> PredictiveModel:
        inner = self.model.by_source
        return self if inner is self.model else replace(self, model=inner)

    @property
    def settled(self) -> PredictiveModel:
        inner = self.model.settled
        return self if inner is self.model else replace(self, model=inner)

    def with_features(self) -> PredictiveModel:
        return replace(self, model=self.model.with_features())

    def recall(self, memory: Mapping[str, Tensor]) -> PredictiveModel:
        recalled = self.model.recall(memory)
        return self if recalled is self.model else replace(self, model=recalled)

    def share_pass(self, batches: Sequence[Inputs]) -> bool:
        return self.model.share_pass(batches)

    def count_samples(self, inputs: Inputs) -> int:
        return self.model.count_samples(inputs)

    def draw_views(self, draw: Draw, inputs: Inputs) -> tuple[Inputs, ...]:
        return self.model.draw_views(draw, inputs)


class PullbackAround(Pullback):
    """A pullback around another one, which says what the inner one says of the model."""

    def __init__(self, inner: Pullback) -> None:
        self.inner, self.memory = inner, inner.memory
        self.novelty, self.feature_columns = inner.novelty, inner.feature_columns
        self.predicts = inner.predicts

    @property
    def is_coupled(self) -> bool:  # type: ignore[override]  # the inner rows may tell later
        return self.inner.is_coupled


@final
@dataclass(frozen=True, eq=False)
class BesideFeatures(ModelAround):
    """A head with the features that it stands on, its inputs [n, D], beside its logits."""

    def __call__(self, theta: Tensor, inputs: Tensor) -> Tensor:
        logits = self.model(theta, inputs)
        return torch.cat((logits, inputs.to(logits.dtype)), -1)

    def pullback(self, theta: Tensor, inputs: Tensor) -> tuple[Tensor, Pullback]:
        logits, inner = self.model.pullback(theta, inputs)
        beside = _BesidePullback(inner, inputs.shape[-1])
        return torch.cat((logits, inputs.to(logits.dtype)), -1), beside

    def pushforward(self, theta: Tensor, inputs: Tensor, tangents: Tensor) -> Tensor:
        moves = self.model.pushforward(theta, inputs, tangents)
        return functional.pad(moves, (0, inputs.shape[-1]))  # features do not depend on θ


class _BesidePullback(PullbackAround):
    def __init__(self, inner: Pullback, features: int) -> None:
        super().__init__(inner)
        self.feature_columns = features

    def __call__(self, cotangents: Tensor) -> Tensor:
        return self.inner(cotangents[..., : -self.feature_columns])

    def total(self, cotangents: Tensor) -> Tensor:
        return self.inner.total(cotangents[..., : -self.feature_columns])


@final
@dataclass(frozen=True, eq=False)
class ReadOut(ModelAround):
    """A model on the augmented state s of a dynamic with hidden states: parameters are θ = E s."""

    matrix: Tensor  # E [d, states]

    def __call__(self, theta: Tensor, inputs: Inputs) -> Tensor:
        return self.model(theta @ self.matrix.mT, inputs)

    def pullback(self, theta: Tensor, inputs: Inputs) -> tuple[Tensor, Pullback]:
        logits, inner = self.model.pullback(theta @ self.matrix.mT, inputs)
        return logits, _ReadOutPullback(inner, self.matrix)

    def pushforward(self, theta: Tensor, inputs: Inputs, tangents: Tensor) -> Tensor:
        return self.model.pushforward(theta @ self.matrix.mT, inputs, tangents @ self.matrix.mT)


class _ReadOutPullback(PullbackAround):
    def __init__(self, inner: Pullback, matrix: Tensor) -> None:
        super().__init__(inner)
        self.matrix = matrix  # [d, states]

    def __call__(self, cotangents: Tensor) -> Tensor:
        return self.inner(cotangents) @ self.matrix

    def total(self, cotangents: Tensor) -> Tensor:
        return self.inner.total(cotangents) @ self.matrix


register(model=(LinearHead,))

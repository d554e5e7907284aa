"""The predictive model p(y given x, θ) = softmax(f(x; θ)): the only part that knows a network.

Losses live in logit space. The model pulls cotangents of the logits back to parameter rows and
pushes parameter tangents forward to logits; nothing else knows whether it is a linear head, a plain
function or a network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, final, runtime_checkable

import torch
from torch import Tensor

from driftfilter.base.checks import Checked, PositiveCount, require
from driftfilter.base.inputs import Inputs
from driftfilter.gaussian.covariance import Covariance

LogitFunction: TypeAlias = Callable[
    [Tensor, Inputs], Tensor
]  # (theta [d], inputs [n, ...]) -> logits [n, k]


class Pullback(Protocol):
    """Jᵀ c at one (θ, inputs)."""

    def __call__(self, cotangents: Tensor) -> Tensor:
        """Per-sample rows J_iᵀ c_i: [..., n, k] -> [..., n, d], a tensor the caller may change."""

    def total(self, cotangents: Tensor) -> Tensor:
        """Their sum Σ_i J_iᵀ c_i, without the rows: [n, k] -> [d]."""


@runtime_checkable
class PredictiveModel(Protocol):
    """Logits with their derivatives in both directions."""

    @property
    def linear(self) -> bool:
        """Whether f is linear in θ, so that the Jacobian is the same at every θ."""

    def __call__(self, theta: Tensor, inputs: Inputs) -> Tensor:
        """Logits [n, k]."""

    def pullback(self, theta: Tensor, inputs: Inputs) -> tuple[Tensor, Pullback]:
        """Logits [n, k] and the pullback there."""

    def pushforward(self, theta: Tensor, inputs: Inputs, tangents: Tensor) -> Tensor:
        """J v for rows v [s, d] -> [s, n, k]."""


def recalled(model: PredictiveModel, memory: Mapping[str, Tensor]) -> PredictiveModel:
    """The model with the statistics of its own that a filter's memory holds (running means); most
    have none.

    Such a model has a method ``recall``, and its pullbacks the ``memory`` to keep after a step.
    """
    recall = getattr(model, "recall", None)
    if recall is None:
        return model
    with_statistics: PredictiveModel = recall(memory)
    return with_statistics


def observing(model: PredictiveModel) -> PredictiveModel:
    """The model as the loss sees it: itself, unless it has outputs for the loss alone."""
    seen: PredictiveModel = getattr(model, "observing", model)
    return seen


def logit_covariance(covariance: Covariance, logits: Tensor, pullback: Pullback) -> Tensor:
    """J_i Σ J_iᵀ of every sample [n, k, k], the covariance of the linearised logits."""
    k = logits.shape[-1]
    units = torch.eye(k, dtype=logits.dtype, device=logits.device)[:, None, :].expand(
        k, len(logits), k
    )
    jacobian = pullback(units)  # [k, n, d]
    return torch.einsum("knd,lnd->nkl", jacobian, covariance.apply(jacobian))


def lift(function: LogitFunction | PredictiveModel) -> PredictiveModel:
    """A plain function as a predictive model; a predictive model as it is."""
    allowed = "a function (theta, inputs) -> logits or a PredictiveModel"
    require(
        callable(function) and not isinstance(function, type), "Filter.logits", function, allowed
    )
    missing = [
        name
        for name in ("linear", "pushforward")
        if hasattr(function, "pullback") and not hasattr(function, name)
    ]
    require(not missing, "Filter.logits", f"a model with a pullback but without {missing}", allowed)
    module = isinstance(function, torch.nn.Module) and not hasattr(function, "pullback")
    hint = (
        f"{allowed}; for a module write lambda theta, inputs: torch.func.functional_call(module, "
        "parameters(theta), inputs)"
    )
    require(not module, "Filter.logits", type(function).__name__, hint)
    return function if isinstance(function, PredictiveModel) else Lifted(function)


@final
@dataclass(frozen=True)
class LinearHead(Checked):
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
        """Features [n, D], and the first class that has a row in θ: 1 where class 0 is fixed at 0,
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
            logits = torch.nn.functional.linear(features, theta.view(-1, width))
        else:
            logits = features @ theta.unflatten(-1, (-1, width)).mT
        return torch.cat((logits.new_zeros(*logits.shape[:-1], 1), logits), -1) if first else logits

    def __call__(self, theta: Tensor, inputs: Tensor) -> Tensor:
        return self._logits(theta, *self._features(inputs, theta))

    def pullback(self, theta: Tensor, inputs: Tensor) -> tuple[Tensor, Pullback]:
        features, first = self._features(inputs, theta)
        return self._logits(theta, features, first), _LinearPullback(features, first)

    def pushforward(self, theta: Tensor, inputs: Tensor, tangents: Tensor) -> Tensor:
        return self._logits(tangents, *self._features(inputs, theta))


class _LinearPullback(NamedTuple):
    features: Tensor  # [n, D]
    first: int  # class that has the first row in θ

    def __call__(self, cotangents: Tensor) -> Tensor:
        own = cotangents.narrow(-1, self.first, cotangents.shape[-1] - self.first)
        return (own.unsqueeze(-1) * self.features.unsqueeze(1)).flatten(-2)

    def total(self, cotangents: Tensor) -> Tensor:
        own = cotangents.narrow(-1, self.first, cotangents.shape[-1] - self.first)
        return torch.mm(own.t(), self.features).view(-1)


@final
@dataclass(frozen=True)
class Lifted:
    """A plain function (theta, inputs) -> logits, differentiated by torch.

    Each row of the batch is taken to depend on its own input only: per-sample rows call the
    function on batches of one, so a function that couples samples (batch statistics) needs a
    predictive model of its own.
    """

    function: LogitFunction
    linear = False

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


class _LiftedPullback(NamedTuple):
    leaf: Tensor  # [d]
    copies: Tensor  # [n, d], the same θ once per sample
    logits: Tensor  # [n, k], with its graph

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


@final
@dataclass(frozen=True, eq=False)
class ReadOut:
    """A model on the augmented state s of a dynamic with hidden states: parameters are θ = E s."""

    model: PredictiveModel
    matrix: Tensor  # E [d, states]

    @property
    def linear(self) -> bool:
        return self.model.linear

    def __call__(self, theta: Tensor, inputs: Inputs) -> Tensor:
        return self.model(theta @ self.matrix.mT, inputs)

    @property
    def observing(self) -> ReadOut:
        """The same on the model as the loss sees it; itself where that is no other."""
        seen = observing(self.model)
        return self if seen is self.model else ReadOut(seen, self.matrix)

    def recall(self, memory: Mapping[str, Tensor]) -> ReadOut:
        """The same on the model with the statistics in this memory."""
        return ReadOut(recalled(self.model, memory), self.matrix)

    def pullback(self, theta: Tensor, inputs: Inputs) -> tuple[Tensor, Pullback]:
        logits, inner = self.model.pullback(theta @ self.matrix.mT, inputs)
        return logits, _ReadOutPullback(inner, self.matrix)

    def pushforward(self, theta: Tensor, inputs: Inputs, tangents: Tensor) -> Tensor:
        return self.model.pushforward(theta @ self.matrix.mT, inputs, tangents @ self.matrix.mT)


@dataclass(frozen=True, eq=False)
class AroundPullback:
    """What a pullback around another one says of the model: what the inner one does."""

    inner: Pullback

    @property
    def is_coupled(self) -> bool:
        """Whether the model's samples are coupled."""
        return bool(getattr(self.inner, "is_coupled", False))

    @property
    def memory(self) -> Mapping[str, Tensor]:
        """What the model itself wants to keep after the step."""
        kept: Mapping[str, Tensor] = getattr(self.inner, "memory", {})
        return kept


@final
@dataclass(frozen=True, eq=False)
class _ReadOutPullback(AroundPullback):
    matrix: Tensor  # [d, states]

    def __call__(self, cotangents: Tensor) -> Tensor:
        return self.inner(cotangents) @ self.matrix

    def total(self, cotangents: Tensor) -> Tensor:
        return self.inner.total(cotangents) @ self.matrix

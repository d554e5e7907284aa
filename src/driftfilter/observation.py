"""The observation model p(X_t given θ) = exp(-E(θ)), E(θ) = (1/n) Σ_i w_i ℓ_i(θ): a Gibbs pseudo-likelihood."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, final

import torch
from torch import Tensor

from driftfilter.checks import require, require_finite, require_role
from driftfilter.expansion import Expansion
from driftfilter.losses import Entropy, Loss, Targets, as_loss
from driftfilter.predictive import PredictiveModel, Pullback
from driftfilter.randomness import Purpose, Randomness
from driftfilter.weighting import Constant, Memory, Weighting


@final
@dataclass(frozen=True)
class Gibbs:
    """A loss and a weighting; the temperature β is the weighting's.

    E = Σ_i w_i ℓ_i / n (``over`` "batch") or divided by the number of samples with a positive weight ("kept").
    ``loss`` may be any function logits [n, k] -> [n].
    """

    loss: Loss | Callable[[Tensor], Tensor] = field(default_factory=Entropy)
    weighting: Weighting = field(default_factory=Constant)
    over: Literal["batch", "kept"] = "batch"

    def __post_init__(self) -> None:
        require(self.over in ("batch", "kept"), "Gibbs.over", self.over, "'batch' or 'kept'")
        object.__setattr__(self, "loss", as_loss("Gibbs.loss", self.loss))
        require_role("Gibbs.weighting", self.weighting, "weighting", "Constant(1.0)")

    def __call__(
        self, model: PredictiveModel, theta: Tensor, inputs: Tensor, memory: Memory, randomness: Randomness
    ) -> tuple[Energy, Memory]:
        """The energy of a batch, with weights and targets fixed at the prior mean θ."""
        loss: Loss = self.loss  # type: ignore[assignment]  # as_loss in __post_init__
        views = loss.views(inputs, lambda: randomness.generator(Purpose.VIEWS))
        pulled = [pulled_back(model, theta, view) for view in views]
        logits = pulled[0][0]
        targets = loss.targets(logits)
        selected = loss.selected(targets)
        if selected is None and isinstance(self.weighting, Constant):  # the common case: nothing to look at
            weights, used = logits.new_full(logits.shape[:1], self.weighting.beta), logits.shape[0]
        else:
            start = logits.new_ones(logits.shape[0]) if selected is None else selected
            weights, memory = self.weighting(logits, start, memory)
            if not (weights >= 0).all():
                raise ValueError(f"the weights of the samples must be >= 0, got {weights.min().item():g} from {self.weighting}")
            used = int(weights.count_nonzero())
        coefficients = weights / (weights.shape[0] if self.over == "batch" else max(used, 1))
        samples = Samples(targets, weights, coefficients, used)
        return Energy(model, loss, views, samples, theta, evaluate(loss, pulled, samples)), memory


def pulled_back(model: PredictiveModel, theta: Tensor, inputs: Tensor) -> tuple[Tensor, Pullback]:
    """The model's pullback, its logits checked."""
    logits, pullback = model.pullback(theta, inputs)
    if logits.dim() != 2 or logits.shape[0] != inputs.shape[0] or logits.shape[1] < 1:
        raise ValueError(f"the model's logits must be of shape [{len(inputs)}, k], got shape {list(logits.shape)}")
    require_finite("the model's logits", logits)
    return logits, pullback


class Samples(NamedTuple):
    """What is fixed for the samples of a batch, at the prior mean."""

    targets: Targets
    weights: Tensor  # [n], w_i
    coefficients: Tensor  # [n], w_i / n
    used: int  # samples with a weight


class Energy(NamedTuple):
    """E(θ) of one batch, as a function of θ."""

    model: PredictiveModel
    loss: Loss
    views: tuple[Tensor, ...]
    samples: Samples
    anchor: Tensor  # [d], the prior mean
    evaluation: Evaluation  # there

    def at(self, theta: Tensor) -> Evaluation:
        """The energy and its derivatives at θ."""
        if theta is self.anchor:
            return self.evaluation
        return evaluate(self.loss, [pulled_back(self.model, theta, view) for view in self.views], self.samples)


def evaluate(loss: Loss, pulled: list[tuple[Tensor, Pullback]], samples: Samples) -> Evaluation:
    """A loss at the logits of each view, with the way back to parameters."""
    views = [logits for logits, _ in pulled]
    logits = torch.stack(views) if len(views) > 1 else views[0].unsqueeze(0)
    expansion = loss.expand(logits, samples.targets, samples.weights)
    return Evaluation(expansion, logits, [pullback for _, pullback in pulled], samples.coefficients)


class Evaluation(NamedTuple):
    """E to second order at one θ: the loss in logit space and the way back to parameters."""

    expansion: Expansion
    logits: Tensor  # [v, ..., n, k]
    pullbacks: list[Pullback]  # one for each view
    coefficients: Tensor  # [n]

    def rows(self, scale: Tensor) -> Tensor:
        """s_i ∇ℓ_i of every sample [n, d], for scales s [n]: applied to k cotangents, not to d gradients."""
        weighted = self.expansion.gradient * scale.unsqueeze(1)
        return _total([pull(weighted.select(0, view)) for view, pull in enumerate(self.pullbacks)])

    def gradient(self, cotangents: Tensor | None = None) -> Tensor:
        """∇E = Σ_i (w_i / n) J_iᵀ c_i [d], for the loss's own logit gradients c [v, n, k] or others."""
        weighted = (self.expansion.gradient if cotangents is None else cotangents) * self.coefficients.unsqueeze(1)
        return _total([pull.total(weighted.select(0, view)) for view, pull in enumerate(self.pullbacks)])

    def factor(self, roots: Tensor) -> Tensor:
        """F [m, d] with FᵀF = Σ_i (w_i / n) J_iᵀ (R_i R_iᵀ) J_i, for roots R of logit-space metrics [v, n, k, r]."""
        weighted = roots.permute(0, 3, 1, 2) * self.coefficients.sqrt().unsqueeze(1)  # [v, r, n, k]
        pieces = [pull(weighted.select(0, view)).flatten(0, 1) for view, pull in enumerate(self.pullbacks)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _total(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.stack(pieces).sum(0)

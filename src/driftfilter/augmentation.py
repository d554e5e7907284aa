"""Losses of augmented views: the same label under a change that should not matter."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor

from driftfilter.checks import require, require_count, require_number, require_role
from driftfilter.expansion import FLOOR, Expansion, log_softmax, separable
from driftfilter.losses import Loss, Targets, one_hot

Augmentation: TypeAlias = Callable[[Tensor, torch.Generator], Tensor]  # (inputs, generator) -> inputs

_TARGET_FLOOR = math.log(1e-4)  # of log t in symmetric cross-entropy


@final
@dataclass(frozen=True)
class GaussianNoise:
    """Augmentation: inputs plus N(0, scale²) noise."""

    scale: float = 0.1

    def __post_init__(self) -> None:
        require_number("GaussianNoise.scale", self.scale, 0, math.inf)

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        require(inputs.is_floating_point(), "inputs of GaussianNoise", inputs.dtype, "floating point")
        noise = torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype, device=inputs.device)
        return inputs + self.scale * noise


def _augmented(augmentation: Augmentation, inputs: Tensor, views: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    drawn = tuple(augmentation(inputs.clone(), generator) for _ in range(views))
    for view in drawn:
        if not isinstance(view, Tensor) or view.shape[:1] != inputs.shape[:1]:
            got = f"shape {list(view.shape)}" if isinstance(view, Tensor) else type(view).__name__
            raise ValueError(f"the augmentation must give a tensor of {len(inputs)} samples, as many as the inputs, got {got}")
    return (inputs, *drawn)


@final
@dataclass(frozen=True)
class Consistency(Loss):
    """Augmented views should get the label of the clean input: mean over views of a divergence D(p_view, target).

    ``brier`` Σ (p - t)², ``cross_entropy`` -Σ t log p, ``symmetric`` half of it and half of -Σ p log t; the target t
    is the most likely class (``hard``) or the probabilities (``soft``) of the clean input at the prior mean. There log t
    is no less than log 1e-4, which stands for a hard label's log 0.
    """

    augmentation: Augmentation = field(default_factory=GaussianNoise)
    divergence: Literal["brier", "cross_entropy", "symmetric"] = "brier"
    target: Literal["hard", "soft"] = "hard"
    copies: int = 1

    def __post_init__(self) -> None:
        names = ("brier", "cross_entropy", "symmetric")
        require(self.divergence in names, "Consistency.divergence", self.divergence, f"one of {names}")
        require(self.target in ("hard", "soft"), "Consistency.target", self.target, "'hard' or 'soft'")
        require_count("Consistency.copies", self.copies, 1)
        require_role("Consistency.augmentation", self.augmentation, "augmentation", "GaussianNoise(0.1)")

    def views(self, inputs: Tensor, generator: Callable[[], torch.Generator]) -> tuple[Tensor, ...]:
        return _augmented(self.augmentation, inputs, self.copies, generator())

    def targets(self, logits: Tensor) -> Tensor:
        return one_hot(logits) if self.target == "hard" else logits.softmax(-1)

    def expand(self, logits: Tensor, targets: Targets, weights: Tensor) -> Expansion:
        assert isinstance(targets, Tensor)
        logp = log_softmax(logits)
        p = logp.exp()
        share = torch.full_like(p[..., :1], 1 / self.copies)
        share[0] = 0.0
        t = targets.expand_as(p)
        if self.divergence == "brier":
            value, first, second = (p - t).square(), 2 * p * (p - t), 2 * p * p
        else:
            value, first, second = -t * logp, -t, t
        if self.divergence == "symmetric":
            reverse = -p * t.log().clamp_min(_TARGET_FLOOR)
            value, first, second = (value + reverse) / 2, (first + reverse) / 2, second / 2
        shares = (0.0, *[1 / self.copies] * self.copies)
        return separable((value * share).sum(-1), p, first * share, second * share, shares)


@final
@dataclass(frozen=True)
class MarginalEntropy(Loss):
    """H(p̄_i), p̄_i the mean prediction over augmented views of input i: confident and alike under augmentation.

    Computed as the mean over views of -Σ p log p̄ with p̄ not differentiated: the same value and gradient. The Hessian is
    that of each view alone, p̄ moving along.
    """

    augmentation: Augmentation = field(default_factory=GaussianNoise)
    copies: int = 8

    @property
    def is_coupled(self) -> bool:
        return True

    def __post_init__(self) -> None:
        require_count("MarginalEntropy.copies", self.copies, 1)
        require_role("MarginalEntropy.augmentation", self.augmentation, "augmentation", "GaussianNoise(0.1)")

    def views(self, inputs: Tensor, generator: Callable[[], torch.Generator]) -> tuple[Tensor, ...]:
        return _augmented(self.augmentation, inputs, self.copies, generator())

    def expand(self, logits: Tensor, targets: Targets, weights: Tensor) -> Expansion:
        p = log_softmax(logits).exp()
        share = torch.full_like(p[..., :1], 1 / self.copies)
        share[0] = 0.0
        mean = (share * p).sum(0, keepdim=True)
        first = -share * p * mean.log().clamp_min(FLOOR)
        second = -(share * p).square() / mean.clamp_min(torch.finfo(p.dtype).tiny)
        return separable(None, p, first, second, (0.0, *[1 / self.copies] * self.copies))

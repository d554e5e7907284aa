"""The entropy of an opinion: shares of the classes, and one for not knowing."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from driftfilter.base.checks import register
from driftfilter.gaussian.covariance import positive_root
from driftfilter.model.expansion import Expansion, separable
from driftfilter.model.losses import Loss, Targets

_ADDED = 1e-7  # to every share, as the authors of COME have it


@final
@dataclass(frozen=True)
class OpinionEntropy(Loss):
    """-Σ_c b_c log b_c - u log u of a subjective-logic opinion: beliefs b_c = exp f_c / (S + k) and
    uncertainty u = k / (S + k), S = Σ exp f_c (COME).

    It is the entropy of a softmax over k + 1 logits, the last one log k. The length |f| of a
    sample's logits is fixed at the prior mean, so that only their direction is learned: no sample
    becomes certain by larger logits alone. 1e-7 is added to each share, as in the authors' code.
    """

    def targets(self, logits: Tensor) -> Tensor:
        return _divide(logits)[0]

    def expand(self, logits: Tensor, targets: Targets, weights: Tensor) -> Expansion:
        assert isinstance(targets, Tensor)
        clean, k = logits[:1], logits.shape[-1]
        length, direction = _divide(clean)
        ratio = targets / length.where(length > 0, torch.inf)  # c / r, with 0 in the place of 1 / 0
        opinion = _entropy(targets * direction)

        def along(vectors: Tensor) -> Tensor:
            return (vectors * direction).sum(-1, keepdim=True)

        def project(vectors: Tensor) -> Tensor:
            return vectors - along(vectors) * direction

        own = opinion.gradient[..., :k]

        def hessian() -> Tensor:
            """(c/r)² P H P - c/r² (g nᵀ + n gᵀ + (g·n) (I - 3 n nᵀ)), P = I - n nᵀ."""
            n, inner = direction.unsqueeze(-1), opinion.hessian()[..., :k, :k]
            inner = inner - n @ (n.mT @ inner)
            inner = inner - (inner @ n) @ n.mT
            outer, slope = own.unsqueeze(-1) @ n.mT, along(own).unsqueeze(-1)
            eye = torch.eye(k, dtype=logits.dtype, device=logits.device)
            bend = outer + outer.mT + slope * (eye - 3 * n @ n.mT)
            scale = (ratio / length.where(length > 0, torch.inf)).unsqueeze(-1)
            return ratio.unsqueeze(-1).square() * inner - scale * bend

        return Expansion(
            opinion.value, ratio * project(own), hessian, lambda: positive_root(hessian())
        )


def _divide(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Lengths r [..., 1] and directions n [..., k]; both are 0 if a length is next to nothing."""
    largest = vectors.abs().amax(-1, keepdim=True)
    some = largest > torch.finfo(vectors.dtype).tiny ** 0.5
    largest = largest.where(some, 1.0)
    scaled = vectors.where(some, 0.0) / largest  # its squares do not overflow
    length = scaled.norm(dim=-1, keepdim=True)
    return length * largest, scaled / length.where(some, 1.0)


def _entropy(logits: Tensor) -> Expansion:
    """The entropy over the classes and the unknown, logits [..., k] -> of k + 1 logits."""
    unknown = torch.full_like(logits[..., :1], math.log(logits.shape[-1]))
    p = torch.cat((logits, unknown), -1).softmax(-1)
    shares = p + _ADDED
    value = -(shares * shares.log()).sum(-1)
    return separable(value, p, -p * (shares.log() + 1), -p.square() / shares)


register(loss=(OpinionEntropy,))

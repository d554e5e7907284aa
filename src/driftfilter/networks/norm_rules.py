"""Statistics of batch normalisation by a rule of one's own, and two published ones.

A rule is asked at every layer, for every batch: by which moments to normalise, and which to carry
on. It is differentiated as it stands. What is carried lives in the filter's memory. A pass that
learns (of a loss, a teacher) may carry on other moments than it was given; one that only predicts
changes nothing.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, final, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from driftfilter.base.checks import Checked, Fraction, NotNegative, register

MeanVariance: TypeAlias = tuple[Tensor, Tensor]


class NormCall(NamedTuple):
    """What a layer sees of a batch."""

    inputs: Tensor  # [n, c, ...]
    carried: MeanVariance  # [c] each, the source's before the first batch
    learning: bool  # False: the pass only predicts
    eps: float  # of the layer, added to variances

    def moments(self, correction: int = 0) -> MeanVariance:
        """Mean and variance [c] of the batch; ``correction`` 1: the unbiased variance."""
        others = [dim for dim in range(self.inputs.dim()) if dim != 1]
        return _moments(self.inputs, others, correction, self.carried[0])

    def sample_moments(self, correction: int = 0) -> MeanVariance:
        """Mean and variance [n, c] of each sample over its positions."""
        others = list(range(2, self.inputs.dim()))
        return _moments(self.inputs, others, correction, self.carried[0])

    @property
    def positions(self) -> int:
        """Values of a channel in one sample."""
        return math.prod(self.inputs.shape[2:])


@runtime_checkable
class NormRule(Protocol):
    """Statistics of one's own."""

    def normalize_by(self, call: NormCall) -> tuple[MeanVariance, MeanVariance]:
        """Mean and variance to normalise by, [c] or [n, c] each; and those to carry on, [c]."""


def _moments(inputs: Tensor, dims: list[int], correction: int, like: Tensor) -> MeanVariance:
    wide = torch.promote_types(like.dtype, torch.float32)
    values, count = inputs.to(wide), math.prod(inputs.shape[dim] for dim in dims)
    mean = values.mean(dims, keepdim=True)
    # One value has no unbiased variance, and the biased one is 0.
    spread = (values - mean).square().sum(dims) / max(count - correction, 1)
    return mean.squeeze(dims), spread


def _lerp(carried: MeanVariance, batch: MeanVariance, share: float) -> MeanVariance:
    """(1 - share) m + share m_b of both, without the spread between the means."""
    mean, variance = (
        (1 - share) * old.to(new) + share * new for old, new in zip(carried, batch, strict=True)
    )
    return mean, variance


@final
@dataclass(frozen=True)
class RobustStatistics(Checked):
    """RoTTA's: m ← (1 - momentum) m + momentum m_b and the same of variances (biased), by which a
    batch that is learned from is normalised, and which are carried on; predictions are by those
    carried.

    Unlike ``Ema``, the blend has no term for the spread between the means, is differentiated with
    the batch's share in it, and batches that are predicted have no part in it.
    """

    momentum: Fraction = 0.05

    def normalize_by(self, call: NormCall) -> tuple[MeanVariance, MeanVariance]:
        if not call.learning:
            return call.carried, call.carried
        blend = _lerp(call.carried, call.moments(), self.momentum)
        return blend, blend


@final
@dataclass(frozen=True)
class InstanceAware(Checked):
    """NOTE's instance-aware batch norm: each sample is normalised by its own moments where they are
    farther from the layer's than chance explains, less what chance explains.

        m_i = m + S(m̂_i - m, k √((v + ε) / s)),   v_i = [v + S(v̂_i - v, k (v + ε) √(2 / (s - 1)))]₊

    m̂_i and v̂_i are those of the s positions of sample i, S(x, λ) = sign(x) [|x| - λ]₊, ``width``
    is k. m and v are the batch's in a pass that learns, else those carried, which follow the
    batches with share ``momentum``. A layer that sees one value a sample is normalised by m and v.
    Variances are unbiased.
    """

    width: NotNegative = 4.0
    momentum: Fraction = 0.01

    def normalize_by(self, call: NormCall) -> tuple[MeanVariance, MeanVariance]:
        base = carried = call.carried
        if call.learning:
            base = call.moments(correction=1)
            carried = _lerp(call.carried, base, self.momentum)
        size = call.positions
        if size <= 1:
            return base, carried
        mean, variance = base
        own_mean, own_variance = call.sample_moments(correction=1)
        spread = variance + call.eps
        near = self.width * (spread / size).sqrt()
        alike = self.width * spread * math.sqrt(2 / (size - 1))
        adjusted = variance + _shrink(own_variance - variance, alike)
        return (mean + _shrink(own_mean - mean, near), functional.relu(adjusted)), carried


def _shrink(values: Tensor, by: Tensor) -> Tensor:
    """sign(x) [|x| - λ]₊."""
    return functional.relu(values - by) - functional.relu(-values - by)


register(statistics=(RobustStatistics, InstanceAware))

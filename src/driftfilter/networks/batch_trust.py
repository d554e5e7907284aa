"""Whether a batch comes from another domain, by the moments at the first batch norm of a network.

A model that a change of domain has broken predicts few classes, and so does one that sees labels in
runs: what is predicted cannot tell them apart. The first layer can. A change of classes moves its
means by about what lies between samples, and a change of light, contrast or range farther.

Noise and blur are seen by deeper layers only, and only if those before them normalise by the
source's statistics: the batch's own take the change away. Now and then a batch passes through the
source network as it was, and all layers but the last, which sees the classes, say how far off it is
(``Probe``).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from torch import Tensor, maximum

from driftfilter.base.checks import Checked, Fraction, NotNegative, register, unchecked
from driftfilter.base.memory import remembered
from driftfilter.base.randomness import Randomness
from driftfilter.gaussian.belief import Belief
from driftfilter.model.observation import Energy
from driftfilter.model.weighting import Memory

# In the memory, if Ema asks for it: sums of n S and n over the batches probed, which fade over 32
# samples, and the batches since the last one probed, -1 if no layer can tell [3].
SHIFT = remembered("network.shift", "3")
_FAR = 9.0  # squared deviations by which no class shifts a table
_LEAST = 0.05  # of a channel's variance, what lies between samples at least
_SOME = 8  # samples whose scatter looks like a shift
_LITTLE = 0.01  # of a batch counts in any case
_CLASSES = 10  # of networks whose doubt is known
_ENOUGH = 16  # samples whose moments may take the place of the carried ones


def moment_shift(
    carried: tuple[Tensor, Tensor], batch: tuple[Tensor, Tensor], means: Tensor
) -> Tensor:
    """S [], how far a batch's moments m_b, v_b [c] are from the carried ones m, v, in units of what
    a change of classes may do; ``means`` [n, c] are those of every sample.

        S = mean over channels of (m_b - m)² / (r max(v, v_b)) + (1 - r) ln²(v_b / v),
        r = variance of the means / v_b, between 0.05 and 1

    A batch of one class has (m_b - m)² of the size of the variance between samples, which is r v;
    the log-variance within samples scatters by about 1. Observed: clean batches of one class have S
    of 0.05 to 0.7 (digits, CIFAR-10), images dimmed to half 2.3 to 3.9, to a fifth 8 to 15.
    """
    return _move(*carried, *batch, means.var(0, correction=0)).mean()


def _move(
    mean: Tensor, variance: Tensor, own_mean: Tensor, own_variance: Tensor, scatter: Tensor
) -> Tensor:
    """What ``moment_shift`` is the mean of [c]; ``scatter``: the variance of the means."""
    between = (scatter / own_variance).clamp(_LEAST, 1)
    shift = (own_mean - mean).square() / (between * maximum(variance, own_variance))
    spread = (1 - between) * (own_variance / variance).log().square()
    return shift + spread


def mean_shift(carried: tuple[Tensor, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """S [] of a layer that sees one value a sample: a table, of which a class may be any part.

        S = mean over channels of (m_b - m)² / 9 max(v, v_b)

    A class alone may have next to no variance, so that this says nothing, and was seen with a mean
    1.1 deviations away (root mean square; 2.7 with drift). A single row that is far off has its
    part in v_b.
    """
    (mean, variance), (own_mean, own_variance) = carried, batch
    return ((own_mean - mean).square() / maximum(variance, own_variance)).mean() / _FAR


def evidence_of_change(shift: Tensor, samples: int) -> Tensor:
    """The least share [] of a batch of n with shift S: G min(1, n/16), G = S / (1 + 8/n) - 1
    between 0 and 1.
    """
    found: Tensor = (shift / (1 + _SOME / samples) - 1).clamp(0, 1)
    return found * min(1.0, samples / _ENOUGH)


def novelty(shift: Tensor, limit: float) -> Tensor:
    """How far a stream with shift S is of another domain than the source's, a scalar []:
    2 (S / limit - 1) between 0.01 and 1. At the least, what moderates predictions is still known.
    """
    return (2 * (shift / limit - 1)).clamp(_LITTLE, 1)


def doubt_of(logits: Tensor, diversity: Tensor) -> Tensor:
    """u = (1 - mean of max p) / (1 + 2 (1 - D)²) / max(1, ln k / ln 10) of a source's logits [n, k]
    whose classes have diversity D, a scalar []: how unsure it is, of so many classes. A batch of
    few classes, which may be the hard ones, tells less.
    """
    unsure = 1 - logits.float().softmax(-1).amax(-1).mean()
    usual = max(1.0, math.log(logits.shape[-1]) / math.log(_CLASSES))
    return unsure / (usual * _fewness(diversity.to(unsure)))


def _fewness(diversity: Tensor) -> Tensor:
    """By what is divided what a batch of few classes tells of its domain."""
    return 1 + 2 * (1 - diversity).square()


class Probe:
    """What the batch norms of a source network say of a batch."""

    def __init__(self) -> None:
        # What ``moment_shift`` takes of each layer [c], in the order of their calls.
        self.layers: list[tuple[Tensor, ...]] = []
        self.reference: Tensor | None = None  # N [], if the source's moments are of N samples

    def hear(
        self, carried: tuple[Tensor, Tensor], batch: tuple[Tensor, Tensor], means: Tensor
    ) -> None:
        """Note what ``moment_shift`` takes of a layer; it is worked out of all layers at once."""
        self.layers.append((*carried, *batch, means.var(0, correction=0)))

    def answer(self, samples: int, diversity: Tensor) -> Tensor | None:
        """S [] of a batch of n in which the source sees classes of diversity D; None if no layer
        knew.

            S = (max over l of the mean of S_1, …, S_l - 1/n) / (1 + 2 (1 - D)²)

        By chance the mean of a batch is off by 1/n of the variance between samples. The last layer
        is left out. Compared with N source samples, 1/n + 1/N is taken off, and S is divided by
        1 + 8/n more: a limit near to what is normal must bear what a few samples scatter.
        """
        known = self.layers[:-1] or self.layers
        if not known:
            return None
        moved = _move(*map(torch.cat, zip(*known, strict=True)))
        shifts = torch.stack([own.mean() for own in moved.split([len(mean) for mean, *_ in known])])
        means = shifts.cumsum(0) / torch.arange(1, len(known) + 1, device=shifts.device)
        found = means.max() - 1 / samples
        if self.reference is not None:
            found = (found - 1 / self.reference.to(found)) / (1 + _SOME / samples)
        return found / _fewness(diversity.to(means))


Made = TypeVar("Made")


class Witness:
    """What the first batch norm of a pass says of its batch; all norms of the network share one."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Another pass begins."""
        self.was_asked = False
        self.least: Tensor | None = None  # share of the batch; None: nothing is known
        self._made: dict[tuple[str, int, int], tuple[object, Any]] = {}

    def answer(self, shift: Tensor, samples: int) -> None:
        """Note the shift of a batch."""
        self.least = evidence_of_change(shift, samples)
        self._made.clear()

    def once(self, what: str, of: object, samples: int, make: Callable[[], Made]) -> Made:
        """What the first norm of the pass has made of an object, for all norms that have it too."""
        key = (what, id(of), samples)
        if key not in self._made:
            self._made[key] = of, make()  # the object is kept, or another might get its identity
        made: Made = self._made[key][1]
        return made


@final
@dataclass(frozen=True)
class ForgetAtHome(Checked):
    """While the stream is of the source's domain, what other domains have taught is forgotten:

        μ ← μ₀ + keep · (μ - μ₀)   if S <= shift

    after each step, S the shift that the source sees (``Ema.shift``, which must be on): there
    nothing is learned, and the source is what is right. A mean that reverts by ρ = 0.995 a step
    takes 140 steps for a half of the way. ``shift`` 0: never.
    """

    shift: NotNegative = 0.45
    keep: Fraction = 0.5

    def __call__(
        self, belief: Belief, energy: Energy, memory: Memory, randomness: Randomness
    ) -> tuple[Belief, Memory]:
        known = memory.get(SHIFT)
        if known is None or self.shift == 0:
            return belief, memory
        source = energy.require_source().mean
        home = (known[1] > 0) & (known[0] <= self.shift * known[1])
        kept = torch.where(home, self.keep, 1.0).to(source)
        mean = torch.lerp(source, belief.mean, kept)
        return unchecked(Belief, mean=mean, covariance=belief.covariance), memory


register(upkeep=(ForgetAtHome,))

"""Labels that come in runs, as a hidden Markov chain: p(y_t given all that the stream has shown).

    stickiness   s_t = s_{t-1}, or with probability ε a new one, drawn from ρ
    label        y_t = y_{t-1} with probability s_t, else drawn from b
    evidence     p(x_t given y_t) ∝ p(y_t given x_t) / b(y_t)

p(y given x) is what any classifier predicts for a sample alone, and b what it has predicted for
the stream so far, on average. A classifier that is off towards some classes has these in b as well,
so that it does not look like a stream in which they last; and with s = 0 the labels are those of
the classifier. Filtering and smoothing are exact for the two hidden states together
(sticky_chain.py, where the new label is drawn from w = b and l = p(y given x) / b).
"""

from dataclasses import dataclass
from typing import Annotated, final

import numpy as np
import torch
from torch import Tensor

from driftfilter.base.checks import Checked, Interval, Positive, register, require, require_finite
from driftfilter.base.memory import remembered
from driftfilter.model import sticky_chain
from driftfilter.model.sticky_chain import Array, Smoother, Stickiness

RUNS = remembered("labels.runs")  # in the memory of a filter: how often a label stays []
_TINY = 1e-300
_ROUNDING = 1e-6
_MANY = 2.0**53  # more samples than any stream has


@final
@dataclass(frozen=True)
class LabelChain(Checked):
    """A filter of the labels of a stream whose neighbours may share them; see the top of this file.

    ``stays``: the values that the stickiness s may have, the first of them 0; ``independent``: the
    share of that one in ρ, those above 0 have the rest in equal parts; ``switch``: ε; ``count``:
    predictions of equal shares that b starts from; ``window``: samples whose predictions are in b;
    ``tables``: whether an adapter puts rows of tables in order, too.

    Given its label, a sample is taken to tell nothing of the next one. Neighbours in a series of
    measurements often do, and a model that is wrong of one is wrong of the other: electricity
    prices lost 3 to 11 points, so the default leaves tables as they are.

    Samples are taken in the order of the batch. Each is predicted from all of its own batch and of
    those before. It works on the log-probabilities of any classifier:

    >>> import torch, driftfilter as df
    >>> chain, known = df.LabelChain(), None
    >>> alone = torch.tensor([[0.7, 0.3], [0.4, 0.6], [0.7, 0.3]]).log().repeat(20, 1)
    >>> for batch in alone.split(6):
    ...     together, known = chain(batch, known)
    >>> together.shape
    torch.Size([6, 2])
    """

    stays: tuple[float, ...] = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
    independent: Annotated[float, Interval(0, 1, open_low=True, open_high=True)] = 0.99
    switch: Annotated[float, Interval(0, 1, open_low=True)] = 0.001
    count: Positive = 1.0
    window: Positive = 2000.0
    tables: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        stays = tuple(self.stays)
        numbers = all(isinstance(s, (int, float)) and 0 <= s < 1 for s in stays)
        fits = numbers and len(stays) > 1 and stays[0] == 0 and list(stays) == sorted(set(stays))
        require(fits, "LabelChain.stays", self.stays, "0 and larger numbers below 1, in order")
        object.__setattr__(self, "stays", tuple(float(s) for s in stays))

    def __call__(
        self,
        log_probabilities: Tensor,
        known: Tensor | None,
        smooth: Smoother = sticky_chain.smooth,
    ) -> tuple[Tensor, Tensor]:
        """log p(y given the stream) [n, k] from log p(y given x) [n, k], and what is known after
        the batch; ``smooth``: what runs the two passes.
        """
        k = log_probabilities.shape[1] if log_probabilities.dim() == 2 else 0
        found = f"{list(log_probabilities.shape)} {log_probabilities.dtype}"
        fits = k > 0 and log_probabilities.is_floating_point()
        require(fits, "LabelChain: log_probabilities", found, "floating [n, k] of k > 0 classes")
        given = log_probabilities.detach().to("cpu", torch.float64).softmax(-1)
        require_finite("LabelChain: probabilities", given)
        probabilities = given.numpy()
        alpha, counts = self._unpack(known, k)
        if len(probabilities) == 0:
            return log_probabilities, self._pack(alpha, counts)
        counts = counts * max(0.0, 1 - len(probabilities) / self.window)
        before = counts + np.concatenate((np.zeros((1, k)), probabilities.cumsum(0)))
        shares = before[:-1] + self.count / k
        shares /= shares.sum(1, keepdims=True)
        passes = smooth(alpha, probabilities / shares, probabilities, self._stickiness())
        told = torch.from_numpy(np.log(np.maximum(passes.smoothed, _TINY))).to(log_probabilities)
        return told, self._pack(passes.filtered[-1], before[-1])

    def _stickiness(self) -> Stickiness:
        """s and ρ [j], and ε."""
        s = np.array(self.stays)
        rho = np.full(len(s), (1 - self.independent) / (len(s) - 1))
        rho[0] = self.independent
        return Stickiness(s, rho, self.switch)

    def _unpack(self, known: Tensor | None, k: int) -> tuple[Array, Array]:
        """p(s, y) [j, k] and the sums of predictions [k]."""
        if known is None:
            rho = self._stickiness().shares
            return np.repeat(rho[:, None] / k, k, 1), np.zeros(k)
        shape = [len(self.stays) + 1, k + 1]
        fits = list(known.shape) == shape
        require(fits, "LabelChain: known", f"shape {list(known.shape)}", f"of shape {shape}")
        values = known.to("cpu", torch.float64).numpy()
        stays = tuple(values[:-1, -1].tolist())
        require(stays == self.stays, "LabelChain: known", f"stays {stays}", f"of {self.stays}")
        return values[:-1, :-1], values[-1, :-1]

    def _pack(self, alpha: Array, counts: Array) -> Tensor:
        """[j + 1, k + 1]: p(s, y) with the values of s beside it, and the sums below it."""
        rows = np.concatenate((alpha, counts[None]))
        return torch.from_numpy(np.column_stack((rows, (*self.stays, 0.0))))


def stay(known: Tensor) -> Tensor:
    """How often a label stays [], the mean of s by what a chain knows."""
    return known[:-1, :-1].sum(1) @ known[:-1, -1]


def is_of(chain: LabelChain | None, known: Tensor) -> bool:
    """Whether it is this chain that knows it."""
    return chain is not None and tuple(known[:-1, -1].tolist()) == chain.stays


def require_known(field: str, value: Tensor, classes: int | None) -> Tensor:
    """A copy of what a chain knows; raise unless it may be that, of so many classes if that is
    known.
    """
    fits = value.dtype == torch.float64 and value.dim() == 2 and min(value.shape) > 1
    fits = fits and bool((value >= 0).all() and value.isfinite().all())
    fits = fits and bool((value[:-1, -1] < 1).all())
    fits = fits and abs(float(value[:-1, :-1].sum()) - 1) < _ROUNDING
    fits = fits and float(value[-1].sum()) < _MANY
    fits = fits and value.shape[1] == (classes or value.shape[1] - 1) + 1
    found = f"{list(value.shape)} {value.dtype}"
    of = "k" if classes is None else classes
    allowed = f"torch.float64 [j + 1, k + 1], what a LabelChain knows of {of} classes"
    require(fits, field, found, allowed)
    return value.to("cpu", copy=True)


register(labels=(LabelChain,))

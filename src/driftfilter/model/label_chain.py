"""Labels that come in runs, as a hidden Markov chain: p(y_t given all that the stream has shown).

    stickiness   s_t = s_{t-1}, or with probability ε a new one, drawn from ρ
    label        y_t = y_{t-1} with probability s_t, else drawn from b
    evidence     p(x_t given y_t) ∝ p(y_t given x_t) / b(y_t)

p(y given x) is what any classifier predicts for a sample alone, and b what it has predicted for
the stream so far, on average. A classifier that is off towards some classes has these in b as well,
so that it does not look like a stream in which they last; and with s = 0 the labels are those of
the classifier. Filtering and smoothing are exact for the two hidden states together
(sticky_chain.py, where the new label is drawn from w = b and l = p(y given x) / b).

The shares of the classes may be the stream's own (class_shares.py); what the chain says is then
corrected for them.
"""

from dataclasses import dataclass, field
from typing import Annotated, final

import numpy as np
import torch
from torch import Tensor

from driftfilter.base.checks import (
    LATE,
    Checked,
    Interval,
    Positive,
    register,
    require,
    require_finite,
)
from driftfilter.base.memory import remembered
from driftfilter.model import sticky_chain
from driftfilter.model.class_shares import CountUp, Shares, count_up_by_rows
from driftfilter.model.sticky_chain import Array, Smoother, Stickiness

RUNS = remembered("labels.runs")  # in the memory of a filter: how often a label stays []
_TINY = 1e-300
_ROUNDING = 1e-6
_IN_RUNS = 0.25  # how often a label stays, from which runs survive a change of domain
_MANY = 2.0**53  # more samples than any stream has


@final
@dataclass(frozen=True)
class LabelChain(Checked):
    """A filter of the labels of a stream whose neighbours may share them; see the top of this file.

    ``stays``: the values that the stickiness s may have, the first of them 0; ``independent``: the
    share of that one in ρ, those above 0 have the rest in equal parts; ``switch``: ε; ``count``:
    predictions of equal shares that b starts from; ``window``: samples whose predictions are in b;
    ``tables``: whether an adapter puts rows of tables in order, too.

    ``skew``: the probability ρ before the first sample that the classes have shares of their own in
    this stream; 0: never. ``bias``: κ, a classifier that is off towards some classes does not look
    like that while it is off as if shares were drawn from Dirichlet(κ, …, κ) (class_shares.py has
    the formulas).

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
    skew: Annotated[float, Interval(0, 1, open_high=True)] = field(default=0.0, metadata=LATE)
    bias: Positive = field(default=40.0, metadata=LATE)

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
        count_up: CountUp = count_up_by_rows,
    ) -> tuple[Tensor, Tensor]:
        """log p(y given the stream) [n, k] from log p(y given x) [n, k], and what is known after
        the batch; ``smooth``, ``count_up``: what runs the passes over its samples.
        """
        k = log_probabilities.shape[1] if log_probabilities.dim() == 2 else 0
        found = f"{list(log_probabilities.shape)} {log_probabilities.dtype}"
        fits = k > 0 and log_probabilities.is_floating_point()
        require(fits, "LabelChain: log_probabilities", found, "floating [n, k] of k > 0 classes")
        given = log_probabilities.detach().to("cpu", torch.float64).numpy()
        with np.errstate(invalid="ignore", under="ignore"):  # of what is refused
            probabilities = np.exp(given - given.max(1, keepdims=True, initial=-np.inf))
            probabilities /= probabilities.sum(1, keepdims=True)
        require_finite("LabelChain: probabilities", torch.from_numpy(probabilities))
        alpha, counts, shares = self._unpack(known, k)
        if len(probabilities) == 0:
            return log_probabilities, self._pack(alpha, counts, shares)
        counts = counts * max(0.0, 1 - len(probabilities) / self.window)
        before = counts + np.concatenate((np.zeros((1, k)), probabilities.cumsum(0)))
        predicted = before[:-1] + self.count / k
        predicted /= predicted.sum(1, keepdims=True)
        passes = smooth(alpha, probabilities / predicted, probabilities, self._stickiness())
        smoothed = passes.smoothed
        if self.skew:
            single = float(passes.filtered[-1, 0].sum())  # p(s = 0): labels that come one by one
            shares = shares.follow(probabilities, single, self.bias, count_up)
            smoothed = smoothed * shares.correct(self.skew)
            smoothed /= smoothed.sum(1, keepdims=True)
        told = torch.from_numpy(np.log(np.maximum(smoothed, _TINY)))
        told = told.to(log_probabilities, non_blocking=True)
        return told, self._pack(passes.filtered[-1], before[-1], shares)

    def forget(self, known: Tensor) -> Tensor:
        """What is known after a change of domain: nothing, unless labels are known to come in runs,
        which go on. A classifier that begins to prefer some classes looks like one that sees runs
        of them, unless b, what it has predicted so far, is of the same domain.
        """
        if float(stay(known)) > _IN_RUNS:
            return known
        k = (known.shape[1] - 4) // 5 if self.skew else known.shape[1] - 1
        return self._pack(*self._unpack(None, k))

    def _stickiness(self) -> Stickiness:
        """s and ρ [j], and ε."""
        s = np.array(self.stays)
        rho = np.full(len(s), (1 - self.independent) / (len(s) - 1))
        rho[0] = self.independent
        return Stickiness(s, rho, self.switch)

    def _unpack(self, known: Tensor | None, k: int) -> tuple[Array, Array, Shares]:
        """p(s, y) [j, k], the sums of predictions [k], and what is known of the shares."""
        if known is None:
            rho = self._stickiness().shares
            return np.repeat(rho[:, None] / k, k, 1), np.zeros(k), Shares.start(k)
        shape = [len(self.stays) + 1, 5 * k + 4 if self.skew else k + 1]
        fits = list(known.shape) == shape
        require(fits, "LabelChain: known", f"shape {list(known.shape)}", f"of shape {shape}")
        values = known.to("cpu", torch.float64).numpy()
        last = tuple(values[:, -1].tolist())
        if not is_of(self, known):  # the words take longer than the rest of it
            require(False, "LabelChain: known", f"stays and skew {last}", f"of {self}")
        shares = Shares.unpack(values[-1, k:-1]) if self.skew else Shares.start(k)
        return values[:-1, :k], values[-1, :k], shares

    def _pack(self, alpha: Array, counts: Array, shares: Shares) -> Tensor:
        """[j + 1, k + 1]: p(s, y) with the values of s beside it, and the sums below it, with
        ``skew`` beside them. If that is not 0, [j + 1, 5k + 4]: before the last column stand 4k + 3
        with what is known of the shares in the last row, and 0 above it.
        """
        rows = np.concatenate((alpha, counts[None]))
        if self.skew:
            row = shares.pack()
            rows = np.concatenate((rows, np.zeros((len(rows), len(row)))), 1)
            rows[-1, len(counts) :] = row
        return torch.from_numpy(np.column_stack((rows, (*self.stays, self.skew))))


def stay(known: Tensor) -> Tensor:
    """How often a label stays [], the mean of s by what a chain knows."""
    return known[:-1, :-1].sum(1) @ known[:-1, -1]


def is_of(chain: LabelChain | None, known: Tensor) -> bool:
    """Whether it is this chain that knows it."""
    return chain is not None and tuple(known[:, -1].tolist()) == (*chain.stays, chain.skew)


def require_known(field: str, value: Tensor, classes: int | None) -> Tensor:
    """A copy of what a chain knows; raise unless it may be that, of so many classes if that is
    known.
    """
    fits = value.dtype == torch.float64 and value.dim() == 2 and min(value.shape) > 1
    fits = fits and bool((value >= 0).all() and value.isfinite().all())
    fits = fits and bool((value[:, -1] < 1).all())
    fits = fits and abs(float(value[:-1, :-1].sum()) - 1) < _ROUNDING
    fits = fits and float(value[-1].sum()) < _MANY
    columns = value.shape[-1] - 1 if fits else 0
    if fits and value[-1, -1] > 0:  # what is known of shares stands before it
        k = (columns - 3) // 5
        fits = columns == 5 * k + 3 > 3 and not value[:-1, k:-1].any() and bool(value[-1, -2] > 0)
        columns = k
    fits = fits and columns == (classes or columns)
    found = f"{list(value.shape)} {value.dtype}"
    of = "k" if classes is None else classes
    allowed = f"torch.float64 [j + 1, k + 1], what a LabelChain knows of {of} classes"
    require(fits, field, found, allowed)
    return value.to("cpu", copy=True)


register(labels=(LabelChain,))

"""How accurate predictions are, without labels: what they themselves expect.

A calibrated prediction is right as often as it is confident. Over n samples with confidences c_i =
max_y p_i(y), their mean c, the mean prediction p̄ and the shares l of the predicted labels

    error   e = (1 - c) w - g,  w = (H(p̄) / H(l))^α, from 1 to 1.25
    floor   e >= D (1 - exp(-L))            if there is a second opinion
    band    1 - e ± z √( s Σ_i c_i (1 - c_i) / n² + (κ e)² )

With source data that have no labels, half of it is what the drop of the confidence says, by the
confidences at the mean parameters, without a temperature and before labels are put in order: c° in
the stream, c_S of the source on its own data,

    error   e = ½ (1 - c) w + ½ (0.05 + 2.2 (c_S - c°)),   the second part >= 0

for a network that was trained with smoothed labels is right more often than it is confident at the
source, and less often under a shift, while the drop of its confidence says as much as that of
others. It does not count if predictions are without what smoothed labels have added (``unsmooth``),
nor of tables, whose H says it already.

g is how much more often the source is right on labelled data of its own than it is confident, 0
without such data; of a source that is too little confident only what is above δ counts, for most
often these data are what it was trained on, and flatter it.

The weight w is AETTA's, against overconfidence: a network that is lost gives many samples the same
few labels. Theirs is (ln k / H(p̄))^α, which takes classes to come equally often; here p̄, which is
calibrated if p_i is, says how often they come.

A network of few columns stays sure of itself where a network of images loses confidence. So rows of
a table [n, features] have a home: source data, or without these the first half thousand of the
stream. H is the distance of Hellinger between the confidences now and at home, as if these were
Gaussian with means c, c' and variances v, v' of 0.001 or more. It is added before the
floor, with a larger κ,

    error   e + 0.4 H,  H² = 1 - √(2 √(v v') / (v + v')) exp(-(c - c')² / (4 (v + v'))),  κ = 0.5

whether the network is less sure than at home, or surer.

D says on how many samples the belief and the source disagree, and L how many nats of entropy the
belief's labels have lost against the source's on the same samples (``Monitor``: classes_lost): a
model that has collapsed is confident, and its confidence tells nothing. s = (1 + R) / (1 - R) if
labels stay with probability R, for samples in runs are wrong together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from typing_extensions import Self

from driftfilter.base.checks import require, require_count, require_finite
from driftfilter.base.light import as_torch, count, join, lighten, match, total

WINDOW = 1000  # samples, or a block more
BLOCK = 100  # samples that are summed up together, or a batch if that is larger
ENOUGH = 1000  # labelled samples of the source
_ONE_CLASS = 5  # columns of the sums: its probability is 1, which says nothing
_Z = 1.96  # of a normal distribution, for 95 %
_WEIGHT = 3.0  # α, as AETTA has it
_HEAVIEST = 1.25
_FLATTERS = 0.03  # δ
# Of the error by the drop of the confidence: its share, how often a source is wrong on new data of
# its own, and points of accuracy for each point of confidence (benchmarks/search_knowing.py).
_SHARE, _AT_HOME, _SLOPE = 0.5, 0.05, 2.2
# κ: how far the error is off under a shift, as a part of it, without labelled source data and with
# them (benchmarks/estimate.py).
_OFF, _LESS_OFF = 0.2, 0.15
# Of tables: samples of the home, points of accuracy for each point of H, and κ
# (benchmarks/search_drift.py).
HOME = 500
_AWAY, _OFF_TABLE = 0.4, 0.5
_LEAST_VARIANCE = 1e-3  # of confidences: those of networks that are always sure hardly vary


@final
@dataclass(frozen=True)
class Estimate:
    """Expected accuracy over the last samples, with an interval; of none nothing is known."""

    accuracy: float  # NaN if there are no samples
    low: float
    high: float
    samples: int

    def __str__(self) -> str:
        if not self.samples:
            return "unknown"
        return f"{self.accuracy:.3f} ({self.low:.3f} to {self.high:.3f})"

    @classmethod
    def of(cls, log_probabilities: Tensor, last: int = WINDOW) -> Estimate:
        """The estimate from log-probabilities [..., k] alone, over the ``last`` samples."""
        require_count("Estimate.of: last", last, 1)
        shape = list(log_probabilities.shape)
        require(len(shape) > 1, "Estimate.of: log_probabilities", shape, "of shape [..., k]")
        return Expectation(Opinions.of(log_probabilities.flatten(0, -2)[-last:])).estimate


class SecondOpinion(NamedTuple):
    """What a belief and its source say of the same samples."""

    labels: Tensor  # [2, w], by the belief and by the source
    lost: float  # L, nats of entropy that the belief's labels have lost

    @property
    def floor(self) -> float:
        """D (1 - exp(-L)), D the share of samples with two labels."""
        disagreement = float((self.labels[0] != self.labels[1]).double().mean())
        return disagreement * (1 - math.exp(-max(0.0, self.lost)))


class Home(NamedTuple):
    """Confidences of rows of a table that a network is at home with, summed up."""

    sums: Tensor  # [2]: Σ c_i, Σ c_i²
    samples: int

    def measure(self, sure: float, squares: float) -> float:
        """H to confidences with that mean and that mean square."""
        own, own_squares = (self.sums / self.samples).tolist()
        here, there = (
            max(square - mean**2, _LEAST_VARIANCE)
            for mean, square in ((sure, squares), (own, own_squares))
        )
        alike = math.sqrt(2 * math.sqrt(here * there) / (here + there))
        alike *= math.exp(-((sure - own) ** 2) / (4 * (here + there)))
        return math.sqrt(max(0.0, 1 - alike))


class SourceCalibration(NamedTuple):
    """How right and how sure the source is on data of its own."""

    accuracy: float | None  # None: they have no labels
    confidence: float  # c_S
    home: Home | None = None  # if they are rows of a table: how they are predicted
    corrected: bool = False  # whether predictions are without what smoothed labels have added

    def correct(self, error: float, plain: float) -> float:
        """The error that is expected in a stream with a plain confidence c°."""
        if self.accuracy is None:
            if self.corrected or self.home is not None:
                return error
            told = max(0.0, _AT_HOME + _SLOPE * (self.confidence - plain))
            return (1 - _SHARE) * error + _SHARE * told
        gap = self.accuracy - self.confidence
        return error - (max(0.0, gap - _FLATTERS) if gap > 0 else gap)

    @classmethod
    def of(
        cls, found: Tensor, home: Home | None = None, corrected: bool = False
    ) -> SourceCalibration:
        """From how sure it is of samples, and whether it is right if they have labels, [n, 1 or
        2].
        """
        sure, *right = found.mean(0).tolist()
        return cls(right[0] if right else None, sure, home, corrected)


class Opinions(NamedTuple):
    """Predictions of the last samples, summed up in blocks, the newest last; an immutable value."""

    # [b, 2k + 3]: Σ p_i [k], samples by predicted label [k], Σ c_i, Σ c_i², Σ c°_i
    sums: Tensor
    counts: tuple[int, ...]  # samples of each block
    home: Home | None = None  # the first ones; None: these are not rows of a table

    @classmethod
    def of(
        cls, log_probabilities: Tensor, plain: Tensor | None = None, table: bool = False
    ) -> Opinions:
        """One block of log-probabilities [n, k], and plain confidences [n] if these are others."""
        wide = log_probabilities.double()
        best, labels = wide.max(-1)
        known = lighten(wide.exp().sum(0))
        sure = lighten(best.exp())
        labels = count(match(labels, known), wide.shape[1], known)
        own = sure if plain is None else lighten(plain.double())
        moments = (total(sure), total(sure * sure), total(own))
        sums = as_torch(join(known, labels, moments, like=known))
        home = Home(sums[-3:-1].clone(), len(wide)) if table else None
        return cls(sums[None], (len(wide),), home)

    def extend(self, new: Opinions) -> Opinions:
        """With a block behind it, in the last one if that is small; what is older than a thousand
        samples is dropped.
        """
        sums, counts = torch.cat((self.sums.to(new.sums), new.sums)), (*self.counts, *new.counts)
        if len(counts) > 1 and joins(*counts[-2:]):
            sums = torch.cat((sums[:-2], sums[-2:].sum(0, keepdim=True)))
            counts = (*counts[:-2], sum(counts[-2:]))
        while is_old(sum(counts[1:])):
            sums, counts = sums[1:], counts[1:]
        home = self.home
        if home is not None and new.home is not None and home.samples < HOME:
            home = Home(
                home.sums.to(new.home.sums) + new.home.sums, home.samples + new.home.samples
            )
        return Opinions(sums, counts, home)

    def to_tensors(self) -> dict[str, Tensor]:
        """As named tensors, for a checkpoint."""
        found = {"sums": self.sums.contiguous(), "counts": torch.tensor(self.counts)}
        if self.home is not None:
            count = self.home.sums.new_tensor([self.home.samples])
            found["home"] = torch.cat((count, self.home.sums))
        return found

    @classmethod
    def from_tensors(
        cls, prefix: str, own: Mapping[str, Tensor], classes: int | None = None
    ) -> Self:
        """What named tensors describe; refused unless it may be that, of so many classes if that
        is known.
        """
        there = f"{prefix}counts" in own
        require(there, f"state {prefix + 'counts'!r}", None, "there, beside the sums")
        sums, counts = own[f"{prefix}sums"], own[f"{prefix}counts"]
        found = f"{list(sums.shape)} {sums.dtype}, {list(counts.shape)} {counts.dtype}"
        fits = sums.dtype == torch.float64 and counts.dtype == torch.int64 and sums.dim() == 2
        fits = fits and 0 < len(sums) == counts.numel() and counts.dim() == 1
        fits = fits and sums.shape[1] >= 5 and sums.shape[1] % 2 == 1
        require(fits, f"state {prefix + 'sums'!r}", found, "torch.float64 [b, 2k + 3], and [b]")
        require_finite(f"state {prefix + 'sums'!r}", sums)
        k = (sums.shape[1] - 3) // 2
        require(classes in (None, k), f"state {prefix + 'sums'!r}", k, f"of {classes} classes")
        most = 1.001 * counts.double() + 1e-6
        parts = (sums[:, :k].sum(1), sums[:, k : 2 * k].sum(1), *sums[:, 2 * k :].T)
        fits = bool((counts > 0).all() and (sums >= -1e-6).all())
        fits = fits and all(bool((part <= most).all()) for part in parts)
        allowed = "sums of as many probabilities as there are samples"
        require(fits, f"state {prefix + 'sums'!r}", sums, allowed)
        home = _read_home(f"{prefix}home", own)
        return cls(sums.clone(), tuple(counts.tolist()), home)


def _read_home(name: str, own: Mapping[str, Tensor]) -> Home | None:
    """What a named tensor (n, Σ c_i, Σ c_i²) describes; None if there is none."""
    if name not in own:
        return None
    found = own[name]
    form = f"{list(found.shape)} {found.dtype}"
    fits = found.dtype == torch.float64 and found.shape == (3,)
    require(fits, f"state {name!r}", form, "torch.float64 [3]")
    require_finite(f"state {name!r}", found)
    count, sure, squares = found.tolist()
    fits = count >= 1 and count == int(count) and 0 <= squares <= sure <= 1.001 * count
    require(fits, f"state {name!r}", found, "a number of samples, and sums of their confidences")
    return Home(found[1:].clone(), int(count))


class Expectation(NamedTuple):
    """What an estimate is worked out from."""

    opinions: Opinions | None = None
    source: SourceCalibration | None = None
    stay: float = 0.0  # R
    second: SecondOpinion | None = None

    @property
    def home(self) -> Home | None:
        """Of the source data, or without these the first samples of the stream."""
        if self.source is not None and self.source.home is not None:
            return self.source.home
        return None if self.opinions is None else self.opinions.home

    @property
    def estimate(self) -> Estimate:
        """The formulas at the top of this file."""
        n = 0 if self.opinions is None else sum(self.opinions.counts)
        if self.opinions is None or not n or self.opinions.sums.shape[1] == _ONE_CLASS:
            return Estimate(math.nan, 0.0, 1.0, 0)
        means = (self.opinions.sums.sum(0) / n).tolist()  # the only look there
        *shares, sure, squares, plain = means
        k = len(shares) // 2
        error = (1 - sure) * _weigh(_entropy(shares[:k]), _entropy(shares[k:]))
        error = error if self.source is None else self.source.correct(error, plain)
        home = self.home
        error += 0.0 if home is None else _AWAY * home.measure(sure, squares)
        if self.second is not None:
            error = max(error, self.second.floor)
        error = min(max(error, 0.0), 1.0)
        chance = (1 + self.stay) / (1 - self.stay) * max(0.0, sure - squares) / n
        known = self.source is not None and self.source.accuracy is not None
        off = (_OFF_TABLE if home is not None else _LESS_OFF if known else _OFF) * error
        reach = _Z * math.sqrt(chance + off**2)
        return Estimate(1 - error, max(0.0, 1 - error - reach), min(1.0, 1 - error + reach), n)


def joins(last: Any, new: Any) -> Any:
    """Whether so many new samples belong to the last block of so many."""
    return last + new <= BLOCK


def is_old(newer: Any) -> Any:
    """Whether a block is dropped, by how many samples have come after it."""
    return newer >= WINDOW


def _weigh(expected: float, said: float) -> float:
    """(H(p̄) / H(l))^α, from 1 to 1.25: one label for all samples may be right."""
    if expected <= said:
        return 1.0
    return min(_HEAVIEST, math.pow(expected / max(said, 1e-12), _WEIGHT))


def _entropy(shares: list[float]) -> float:
    return -sum(share * math.log(share) for share in shares if share > 0)


def confidence(log_probabilities: Tensor) -> Tensor:
    """max_y p(y given x) of log-probabilities [..., k]: [...]."""
    return log_probabilities.amax(-1).exp()

"""Domains that come back, and domains mixed in a batch: a switching state-space model.

    domain      z_t = z_{t-1} with probability s, else any of those known; s is hidden, too
    signature   φ_t given z_t ~ t_5(m_z, C_z), how the sample looks (appearance.py)
    the rest    a filter of its own for each domain: belief, statistics, offsets

Given m and C the domains of a batch are filtered and smoothed exactly (sticky_chain.py). Each
sample then belongs to its most likely domain, and m and C are the moments of the samples that do.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from itertools import combinations
from typing import Annotated, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from driftfilter.base.checks import (
    LATE,
    AtLeast,
    Checked,
    Fraction,
    Interval,
    Positive,
    register,
    require,
    require_finite,
)
from driftfilter.model import sticky_chain
from driftfilter.model.clusters import (
    PRIOR,
    Moments,
    distance,
    find_clusters,
    find_moments,
    log_density,
    regularize,
)
from driftfilter.model.sticky_chain import Smoother, Stickiness

SOURCE = -1  # the origin of a domain that begins as the source
_STAYS = Stickiness(np.array((0.0, 0.5, 0.9, 0.99, 0.999)), np.full(5, 0.2), 0.001)
_LIKELIER = 3.0  # nats by which another domain must be likelier for a single sample
_ENOUGH = 64  # samples by which a domain is known, or judged
_PLENTY = 3 * _ENOUGH  # samples by which a stream is known to be of several at a time
_SOME = _ENOUGH // 2  # samples that a cluster has at least
_STRAYS = 0.1  # of samples, whose domain may be a mistake
_FOLDS = 4  # parts of which each is explained by the others
_MEMORY = 2000.0  # samples on which moments rest at most
_TINY = 1e-300
_EACH = 24  # samples a dimension by which clusters are told
_TRIES = 5  # at the border between two clusters
_LONGEST = 2**8  # times as many samples as at first until clusters are looked for again


@final
@dataclass(frozen=True)
class Domains(Checked):
    """A memory of at most ``most`` domains of a stream, each with a filter state of its own.

    Samples are looked at in blocks of 64 or more, in a larger batch at once. Each is given to the
    domain that most likely is its own (model/domains.py); all are given to one if nine of ten are
    of one, or if a Gaussian of their own explains each fourth of them, by the other three, better
    than the domains that are known. 64 samples that a domain has got are then held to it by how far
    their Gaussian N(m_b, C_b) is from its own, per dimension D of the signatures:

        KL(N(m_b, (C_b + C) / 2) ‖ N(m, C)) / D <= ``limit``

    A class alone has 0.11 at most, another corruption 0.15 to 40 if it is not slight (CIFAR-10,
    benchmarks/search_domains.py). If they are too far they go to another domain that explains them,
    or make a new one. That begins on the way from the source to the belief of its neighbour, by the
    share ``carry``, if this is within ``near``; else with the source's, and always with the
    source's statistics.

    24 D samples of a domain are looked at for two clusters, along the direction in which they have
    the smallest kurtosis: below ``kurtosis`` there are two, and a domain for each, of which one
    begins on the way to the belief of the other. If there are not, the domain is looked at again
    after twice as many samples.

    If there are more than ``most``, two become one that are one by the first rule; if there are no
    such two, the one not seen for longest is forgotten.

    Images have signatures; other samples, signals of sensors among them, are all of one domain.
    """

    most: Annotated[int, AtLeast(2)] = 24
    limit: Positive = 0.13
    near: Annotated[float, Interval(0, np.inf)] = 100.0
    kurtosis: Annotated[float, Interval(1, 3)] = 1.8
    carry: Fraction = field(default=1.0, metadata=LATE)

    def start(self, width: int) -> KnownDomains:
        """What is known before the first sample, with signatures of this width: one domain, of
        which nothing is.
        """
        nothing = torch.zeros(width, width, dtype=torch.float64)
        counts = (0, 0.0, nothing[:1].sum(0), nothing, 0, 0, 0, _EACH * width)
        alpha = torch.from_numpy(_STAYS.shares.copy())
        return _pack([_Domain(*counts, nothing[:0].float(), alpha, 0)], 1)

    def divide(
        self, signatures: Tensor, known: KnownDomains, smooth: Smoother = sticky_chain.smooth
    ) -> Division:
        """The domains of a batch by the signatures [n, D] of its samples, float64, and what is
        known then.
        """
        n, block = len(signatures), torch.cat((known.block, signatures))
        if n >= _ENOUGH > len(known.block):  # they tell enough without those that wait
            known, block = known.assume_current(), signatures
        if len(block) < _ENOUGH:
            return known.wait(block, known.recall(signatures, smooth))
        found = known.assign(block, smooth)
        draft = _Draft(known, block, found)
        if draft.is_one(found.evidence):
            draft.unite()
        elif len(block) < _PLENTY and not known.mixed:
            return known.wait(block, found.owners.mode().values.repeat(n))
        draft.take()
        for domain in tuple(draft.domains):
            draft.judge(domain, self)
        for domain in tuple(draft.domains):
            draft.split(domain, self.kurtosis)
        while len(draft.domains) > self.most:
            draft.forget(self.limit)
        return draft.finish(n)


class Division(NamedTuple):
    """A batch divided among domains."""

    owners: Tensor  # [n], the place of each sample's domain among those known now
    known: KnownDomains
    # Of each domain known now, the place before: its own, that of the one it began as, or SOURCE.
    origins: tuple[int, ...]


class Assignment(NamedTuple):
    """Whose samples are."""

    owners: Tensor  # [n], the most likely domain of each
    alpha: Tensor  # [j, K], p(s, z) after the last one
    evidence: float  # log p(all of them), but for what all domains have in common


@final
@dataclass(frozen=True, eq=False)
class KnownDomains:
    """What is known of K domains; an immutable value of tensors on the CPU."""

    names: Tensor  # [K], numbers that stay with a domain
    counts: Tensor  # [K], samples on which moments rest; 0 if the only domain is not known yet
    means: Tensor  # m [K, D]
    covariances: Tensor  # [K, D, D]
    seen: Tensor  # [K], number of the last sample
    waiting: Tensor  # [K], samples at the end of its pool that have not been judged
    fresh: Tensor  # [K], samples since clusters were looked for
    due: Tensor  # [K], and those after which they are looked for again
    # [p, D], the latest signatures of each domain that are still to be read, one domain after the
    # other
    pool: Tensor
    sizes: Tensor  # [K], how many of them are whose
    alpha: Tensor  # [j, K], p(s, z) after the last sample
    born: Tensor  # [], how many domains there have been
    current: Tensor  # [], the place of the domain that samples belong to for now
    mixed: Tensor  # [], 1 if they belong to several
    block: Tensor  # [b, D], signatures that have not been looked at yet

    def wait(self, block: Tensor, owners: Tensor) -> Division:
        """Samples that are too few to be looked at, and belong to domains known before [n]."""
        known = replace(self, block=block, current=owners.mode().values)
        return Division(owners, known, tuple(range(len(self.counts))))

    def assume_current(self) -> KnownDomains:
        """What has not been looked at yet is of the domain at hand."""
        if len(self.block) == 0:
            return self
        domains = _unpack(self, self.alpha)
        domains[int(self.current)].take(self.block, int(self.seen.max()) + len(self.block))
        known = _pack(domains, int(self.born))
        return replace(known, current=self.current, mixed=self.mixed)

    def assign(self, signatures: Tensor, smooth: Smoother = sticky_chain.smooth) -> Assignment:
        """The domains of samples with signatures [n, D], by all of them."""
        width, own = self.means.shape[1], signatures.shape[1]
        require(own == width, "signatures", f"{own} numbers a sample", f"{width}, as before")
        require_finite("signatures", signatures)
        if len(self.counts) == 1:
            return Assignment(torch.zeros(len(signatures), dtype=torch.int64), self.alpha, 0.0)
        density = self.log_density(signatures)
        most = density.amax(1, keepdim=True)
        likelihood = (density - most).exp().clamp_min(_TINY).numpy()
        passes = smooth(self.alpha.numpy(), likelihood, likelihood / len(self.counts), _STAYS)
        evidence = float(most.sum()) + float(np.log(passes.evidence).sum())
        owners = torch.from_numpy(passes.smoothed.argmax(1))
        return Assignment(owners, torch.from_numpy(passes.filtered[-1]), evidence)

    def recall(self, signatures: Tensor, smooth: Smoother = sticky_chain.smooth) -> Tensor:
        """Whose samples with signatures [n, D] are [n] if nothing is learned of them: fewer than 64
        are of the domain at hand, others of one, unless the stream is of several at a time.
        """
        if not self.mixed and len(signatures) < _ENOUGH:
            return self.current.repeat(len(signatures))
        owners = self.assign(signatures, smooth).owners
        return owners if self.mixed else owners.mode().values.repeat(len(owners))

    def place(self, signatures: Tensor) -> Tensor:
        """Whose each sample is [n], wherever in the stream it was, by its signature [n, D] alone:
        of the domain at hand, unless another one is likelier by more than 3 nats.
        """
        density = self.log_density(signatures)
        highest, owners = density.max(-1)
        ahead = highest - density[:, int(self.current)] > _LIKELIER
        return torch.where(ahead, owners, self.current)

    def log_density(self, signatures: Tensor) -> Tensor:
        """log t_5(φ; m, C) [n, K], up to a constant."""
        return log_density(signatures, (self.means, regularize(self.covariances, self.counts)))

    def to_tensors(self) -> dict[str, Tensor]:
        """By name, for a checkpoint."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], prefix: str) -> KnownDomains:
        """What named tensors describe; refused, with the prefix of their names, unless they fit
        together.
        """
        names = [item.name for item in fields(cls)]
        missing = [name for name in names if name not in tensors]
        require(not missing, f"state {prefix!r}…", f"no {missing}", "complete")
        known = cls(**{name: tensors[name].to("cpu", copy=True) for name in names})
        _require_forms(known, prefix)
        _require_sense(known, prefix)
        return known


def _require_forms(known: KnownDomains, prefix: str) -> None:
    """Raise unless tensors have their shapes and dtypes, and are finite and, if whole, >= 0."""
    k, width = known.names.numel(), known.means.shape[-1] if known.means.dim() else 0
    shapes: dict[str, tuple[int, ...]] = {"means": (k, width), "covariances": (k, width, width)}
    shapes |= {"alpha": (len(_STAYS.values), k), "born": (), "current": (), "mixed": ()}
    shapes |= {name: (*getattr(known, name).shape[:1], width) for name in ("pool", "block")}
    real = {"counts", "means", "covariances", "alpha", "block"}
    for name, value in known.to_tensors().items():
        shape = shapes.get(name, (k,))
        dtype = torch.float64 if name in real else torch.int64
        dtype = torch.float32 if name == "pool" else dtype
        fits = tuple(value.shape) == shape and value.dtype == dtype and k > 0 and width > 0
        fits = fits and bool(value.isfinite().all())
        fits = fits and (value.is_floating_point() or bool((value >= 0).all()))
        found = f"{list(value.shape)} {value.dtype}"
        require(fits, f"state {prefix + name!r}", found, f"{dtype} {list(shape)}, finite")


def _require_sense(known: KnownDomains, prefix: str) -> None:
    """Raise unless the parts of what is known fit together."""
    k, counts = len(known.names), known.counts
    holds = {
        "sizes": int(known.sizes.sum()) == len(known.pool),
        "waiting": bool((known.waiting <= known.sizes).all()),
        "alpha": abs(float(known.alpha.sum()) - 1) < 1e-6 and bool((known.alpha >= 0).all()),
        "current": int(known.current) < k,
        "mixed": int(known.mixed) < 2,
        "block": len(known.block) < _PLENTY,
        "names": len(known.names.unique()) == k and bool((known.names < known.born).all()),
        "counts": bool((counts > 0).all()) or (k == 1 and float(counts[0]) == 0),
        "covariances": torch.equal(known.covariances, known.covariances.mT),
    }
    factors = torch.linalg.cholesky_ex(regularize(known.covariances, counts.clamp_min(0)))
    holds["covariances"] &= not bool(factors.info.any())
    wrong = [name for name, fits in holds.items() if not fits]
    allowed = "what a memory of domains knows, of one piece"
    require(not wrong, f"state {prefix!r}…", f"{wrong} that do not fit the rest", allowed)


@dataclass(eq=False)
class _Domain:
    """A domain while a batch is divided; see ``KnownDomains``."""

    name: int
    count: float
    mean: Tensor  # [D]
    covariance: Tensor  # [D, D]
    seen: int
    waiting: int
    fresh: int
    due: int
    pool: Tensor  # [m, D]
    alpha: Tensor  # [j]
    origin: int
    came: int = 0  # samples with this block
    before: int = 0  # number of the last sample before it

    @property
    def moments(self) -> Moments:
        """m [D] and C [D, D]."""
        count = torch.tensor(self.count, dtype=torch.float64)
        return self.mean, regularize(self.covariance, count)

    @property
    def needed(self) -> Tensor:
        """The end of the pool [m, D]: what waits, and what will still be there when clusters are
        looked for again. All before that is pushed out unread.
        """
        later = _EACH * len(self.mean) - (self.due - self.fresh)
        count = min(len(self.pool), max(self.waiting, later, 0))
        return self.pool[len(self.pool) - count :]

    def take(self, signatures: Tensor, clock: int) -> None:
        """Get samples [n, D], of which the last one has this number."""
        most = _EACH * len(self.mean)
        self.pool = torch.cat((self.pool, signatures.float()))[-most:]
        self.came = min(len(signatures), most)
        self.waiting = min(self.waiting + len(signatures), len(self.pool))
        self.fresh += len(signatures)
        self.before, self.seen = self.seen, clock

    def fit(self, signatures: Tensor) -> None:
        """Rest on these samples [n, D] alone."""
        self.count = 0.0
        self.absorb(signatures)

    def absorb(self, signatures: Tensor) -> None:
        """Rest on these samples [n, D] as well."""
        self.count = min(self.count, _MEMORY)
        self.pool_moments(len(signatures), find_moments(signatures))

    def settle(self) -> None:
        """Rest on all samples that wait as well."""
        self.absorb(self.pool[-self.waiting :].double())
        self.waiting = 0

    def pool_moments(self, count: float, others: Moments) -> None:
        """Rest on so many samples with these moments as well."""
        mean, covariance = others
        share, apart = count / (self.count + count), mean - self.mean
        spread = share * (1 - share) * torch.outer(apart, apart)
        self.covariance = (1 - share) * self.covariance + share * covariance + spread
        self.mean, self.count = self.mean + share * apart, self.count + count


class _Draft:
    """The domains while a block of samples is divided among them."""

    def __init__(self, known: KnownDomains, signatures: Tensor, found: Assignment) -> None:
        self.domains = _unpack(known, found.alpha)
        self.signatures = signatures
        self.owners = known.names[found.owners]  # names [n]
        self.born, self.clock = int(known.born), int(known.seen.max())

    def _pick(self, domain: _Domain) -> Tensor:
        """The samples of a domain in the block [n]."""
        return self.owners == domain.name

    def _find_common(self) -> _Domain:
        """The domain that most samples have."""
        name = int(self.owners.mode().values)
        return next(domain for domain in self.domains if domain.name == name)

    def is_one(self, evidence: float) -> bool:
        """Whether all samples are of one domain (see ``Domains``), by log p(all of them) if they
        are of those known.
        """
        common, n = self._find_common(), len(self.signatures)
        if float((~self._pick(common)).sum()) < _STRAYS * n:
            return True
        part, likelihood = torch.arange(n) % _FOLDS, 0.0
        usual = common.moments[1]
        for fold in range(_FOLDS):
            mean, covariance = find_moments(self.signatures[part != fold])
            own = (n * regularize(covariance, usual.new_tensor(n)) + PRIOR * usual) / (n + PRIOR)
            left = self.signatures[part == fold]
            likelihood += float(log_density(left, (mean[None], own[None])).sum())
        return likelihood > evidence

    def unite(self) -> None:
        """Give all samples to the domain that most of them have."""
        common = self._find_common()
        for domain in self.domains:
            if domain is not common:
                self._rename(domain, common)

    def take(self) -> None:
        """Give every domain the signatures of its samples."""
        for domain in self.domains:
            places = self._pick(domain).nonzero()[:, 0]
            if len(places):
                domain.take(self.signatures[places], self.clock + int(places[-1]) + 1)

    def judge(self, domain: _Domain, rule: Domains) -> None:
        """Hold samples that a domain has got to what is known of it, if they are enough: those of
        this batch, or all that wait.
        """
        count = domain.came if domain.came >= _ENOUGH else domain.waiting
        if count < _ENOUGH:
            return
        new = domain.pool[-count:].double()
        if domain.count == 0:
            domain.settle()
            return
        moments = find_moments(new)
        nearest, far = domain, distance(moments, domain.moments)
        if far > rule.limit:
            pairs = [(distance(moments, each.moments), each) for each in self.domains]
            far, nearest = min(pairs, key=lambda pair: pair[0])
        if far > rule.limit:
            nearest = self._add(domain, nearest.origin if far <= rule.near else SOURCE)
            nearest.count = 0.0
        if nearest is domain:
            domain.settle()
        else:
            self._hand_over(domain, nearest, count)
            nearest.absorb(new)

    def _add(self, like: _Domain, origin: int) -> _Domain:
        """A domain without samples."""
        child = replace(
            like,
            name=self.born,
            waiting=0,
            fresh=0,
            due=_EACH * len(like.mean),
            pool=like.pool[:0],
            alpha=0 * like.alpha,
            origin=origin,
            came=0,
        )
        self.born += 1
        self.domains.append(child)
        return child

    def _hand_over(self, giver: _Domain, taker: _Domain, count: int) -> None:
        """The last samples of a domain, and those of the block, are another one's; they come
        before those that wait there.
        """
        most, known = _EACH * len(giver.mean), len(taker.pool) - taker.waiting
        parts = (taker.pool[:known], giver.pool[-count:], taker.pool[known:])
        taker.pool = torch.cat(parts)[-most:]
        giver.pool = giver.pool[:-count]
        taker.seen, giver.seen = max(taker.seen, giver.seen), giver.before
        taker.fresh += count
        giver.waiting, giver.fresh = giver.waiting - count, max(0, giver.fresh - count)
        self._rename(giver, taker)

    def _rename(self, giver: _Domain, taker: _Domain) -> None:
        self.owners = self.owners.masked_fill(self._pick(giver), taker.name)
        taker.alpha, giver.alpha = taker.alpha + giver.alpha, 0 * giver.alpha

    def split(self, domain: _Domain, limit: float) -> None:
        """Make two domains of one that has two clusters."""
        least = _EACH * len(domain.mean)
        if domain.fresh < domain.due or len(domain.pool) < least:
            return
        pool, domain.fresh = domain.pool.double(), 0
        kurtosis, side = find_clusters(pool)
        if kurtosis >= limit or not _is_cut(side):
            domain.due = min(2 * domain.due, _LONGEST * least)
            return
        child, domain.due = self._add(domain, domain.origin), least
        for _ in range(_TRIES):
            domain.fit(pool[~side])
            child.fit(pool[side])
            again = _prefer(domain, child, pool)
            if torch.equal(again, side) or not _is_cut(again):
                break
            side = again
        child.pool, domain.pool = domain.pool[side], domain.pool[~side]
        domain.waiting = 0
        moved = self._pick(domain) & _prefer(domain, child, self.signatures)
        self.owners = self.owners.masked_fill(moved, child.name)
        if bool(moved[-1]):
            child.alpha, domain.alpha = domain.alpha, child.alpha

    def forget(self, limit: float) -> None:
        """One domain less: two that are the same become one, or the one not seen for longest
        goes.
        """
        one, other = min(combinations(self.domains, 2), key=_distance_between)
        apart = _distance_between((one, other))
        if apart <= limit:
            kept, gone = (one, other) if one.count >= other.count else (other, one)
            kept.pool_moments(gone.count, (gone.mean, gone.covariance))
            kept.seen = max(kept.seen, gone.seen)
            self._rename(gone, kept)
            self.domains.remove(gone)
            return
        gone = min(self.domains, key=lambda each: each.seen)
        self.domains.remove(gone)
        own = self._pick(gone)
        if bool(own.any()):
            nearest = log_density(self.signatures[own], _gather(self.domains)).argmax(1)
            self.owners[own] = torch.tensor([each.name for each in self.domains])[nearest]

    def finish(self, n: int) -> Division:
        """What is known now, and whose the last n samples are."""
        known = _pack(self.domains, self.born)
        places = (self.owners[:, None] == known.names).nonzero()[:, 1]
        current, origins = places.mode().values, tuple(each.origin for each in self.domains)
        mixed = (places != current).any().long()
        return Division(places[-n:], replace(known, current=current, mixed=mixed), origins)


def _distance_between(pair: tuple[_Domain, _Domain]) -> float:
    """The larger of the distances of two domains from each other."""
    one, other = (each.moments for each in pair)
    return max(distance(one, other), distance(other, one))


def _is_cut(side: Tensor) -> bool:
    """Whether samples on both sides [n] are enough for a cluster."""
    return _SOME <= int(side.sum()) <= len(side) - _SOME


def _prefer(domain: _Domain, child: _Domain, signatures: Tensor) -> Tensor:
    """Which signatures [n, D] are rather of the child [n]."""
    density = log_density(signatures, _gather([domain, child]))
    return density[:, 1] > density[:, 0]


def _gather(domains: list[_Domain]) -> Moments:
    """m [K, D] and C [K, D, D]."""
    means, covariances = zip(*(each.moments for each in domains), strict=True)
    return torch.stack(means), torch.stack(covariances)


def _unpack(known: KnownDomains, alphas: Tensor) -> list[_Domain]:
    """One domain at a time, with p(s, z) [j, K]."""
    numbers = (known.names, known.counts, known.seen, known.waiting, known.fresh, known.due)
    rows = list(zip(*(part.tolist() for part in numbers), strict=True))
    pools, domains = known.pool.split(known.sizes.tolist()), []
    for place, (name, count, seen, waiting, fresh, due) in enumerate(rows):
        mean, covariance = known.means[place], known.covariances[place]
        order = (seen, waiting, fresh, due, pools[place], alphas[:, place], place)
        domains.append(_Domain(name, count, mean, covariance, *order))
    return domains


def _pack(domains: list[_Domain], born: int) -> KnownDomains:
    """What is known, of one domain at a time."""
    alpha = torch.stack([each.alpha for each in domains], 1)
    total, pools = float(alpha.sum()), [each.needed for each in domains]
    return KnownDomains(
        names=torch.tensor([each.name for each in domains]),
        counts=torch.tensor([each.count for each in domains], dtype=torch.float64),
        means=torch.stack([each.mean for each in domains]),
        covariances=torch.stack([each.covariance for each in domains]),
        seen=torch.tensor([each.seen for each in domains]),
        waiting=torch.tensor([each.waiting for each in domains]),
        fresh=torch.tensor([each.fresh for each in domains]),
        due=torch.tensor([each.due for each in domains]),
        pool=torch.cat(pools),
        sizes=torch.tensor([len(pool) for pool in pools]),
        alpha=alpha / total if total > 0 else torch.full_like(alpha, 1 / alpha.numel()),
        born=torch.tensor(born),
        current=torch.tensor(0),
        mixed=torch.tensor(0),
        block=domains[0].mean.new_zeros(0, len(domains[0].mean)),
    )


register(domains=(Domains,))

"""The memory of domains: the chain of domains against a sum over all paths, its densities and
distances against SciPy's and torch's, and which domain samples are given to.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_t
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

import driftfilter as df
from driftfilter.model.clusters import (
    distance,
    find_clusters,
    find_moments,
    log_density,
    regularize,
)
from driftfilter.model.domains import _STAYS, SOURCE, KnownDomains, _Domain
from oracles import array

WIDTH = 10


def draw(name: int, n: int, seed: int = 0) -> Tensor:
    """Signatures of a domain: Gaussians far from each other."""
    random = torch.Generator().manual_seed(1000 * name + seed)
    shape = torch.Generator().manual_seed(name)
    mean = 8 * torch.randn(WIDTH, generator=shape, dtype=torch.float64)
    mix = torch.randn(WIDTH, WIDTH, generator=shape, dtype=torch.float64) / 2
    return mean + torch.randn(n, WIDTH, generator=random, dtype=torch.float64) @ mix


def follow(
    rule: df.Domains, batches: list[Tensor], known: KnownDomains | None = None
) -> tuple[list[list[int]], KnownDomains]:
    """The names of each batch's samples."""
    known, found = known or rule.start(WIDTH), []
    for batch in batches:
        division = rule.divide(batch, known)
        known = division.known
        found.append(known.names[division.owners].tolist())
    return found, known


def know(*names: int) -> KnownDomains:
    """These domains, one after the other."""
    return follow(df.Domains(), [draw(name, 200) for name in names])[1]


def test_domains_are_a_sum_over_all_paths() -> None:
    known = know(0, 1, 2)
    random = np.random.default_rng(0)
    alpha = random.dirichlet(np.ones(15)).reshape(5, 3)
    known = replace(known, alpha=torch.from_numpy(alpha))
    # samples between the domains: none is certain
    places = torch.from_numpy(random.dirichlet(np.ones(3), 3))
    signatures = places @ known.means
    density = array(known.log_density(signatures))
    joint, total, last = np.zeros((3, 3)), 0.0, np.zeros((5, 3))
    states = list(product(range(5), range(3)))
    for path in product(states, repeat=4):
        weight = alpha[path[0]]
        for t in range(3):
            (old, before), (s, z) = path[t], path[t + 1]
            weight *= (1 - _STAYS.switch) * (s == old) + _STAYS.switch * _STAYS.shares[s]
            stays = _STAYS.values[s]
            weight *= (stays * (z == before) + (1 - stays) / 3) * np.exp(density[t, z])
        for t in range(3):
            joint[t, path[t + 1][1]] += weight
        last[path[-1]] += weight
        total += weight
    found = known.assign(signatures)
    assert found.evidence == pytest.approx(np.log(total), rel=1e-10)
    np.testing.assert_allclose(array(found.alpha), last / total, rtol=1e-9, atol=1e-15)
    assert found.owners.tolist() == joint.argmax(1).tolist()


def test_densities_are_students() -> None:
    signatures, moments = draw(3, 5), find_moments(draw(0, 50))
    found = log_density(signatures, (moments[0][None], moments[1][None]))[:, 0]
    student = multivariate_t(array(moments[0]), array(moments[1]) * 3 / 5, df=5)
    expected = student.logpdf(array(signatures))
    np.testing.assert_allclose(array(found - found[0]), expected - expected[0], rtol=1e-10)
    # the constant is that of every domain
    other = find_moments(draw(1, 50))
    pairs = (torch.stack((moments[0], other[0])), torch.stack((moments[1], other[1])))
    both = log_density(signatures, pairs)
    ratio = multivariate_t(array(other[0]), array(other[1]) * 3 / 5, df=5).logpdf(array(signatures))
    np.testing.assert_allclose(array(both[:, 1] - both[:, 0]), ratio - expected, rtol=1e-9)


def test_distances_are_divergences_of_gaussians() -> None:
    batch, known = find_moments(draw(0, 30)), find_moments(draw(1, 40))
    found = distance(batch, known)
    one = MultivariateNormal(batch[0], (batch[1] + known[1]) / 2)
    other = MultivariateNormal(known[0], known[1])
    assert found == pytest.approx(float(kl_divergence(one, other)) / WIDTH)


def test_moments_are_those_of_all_samples_of_a_domain() -> None:
    batches = [draw(0, 70, seed) for seed in range(3)]
    known = follow(df.Domains(), batches)[1]
    mean, covariance = find_moments(torch.cat(batches).float().double())
    torch.testing.assert_close(known.means[0], mean)
    torch.testing.assert_close(known.covariances[0], covariance)
    assert known.counts.tolist() == [210]
    prior = 32 / 242
    expected = covariance * (1 - prior)
    expected += torch.diag(covariance.diagonal() * (prior + 1e-3) + 1e-4)
    torch.testing.assert_close(regularize(known.covariances, known.counts)[0], expected)


@pytest.mark.parametrize("size", [200, 64, 16, 1])
def test_domains_are_known_again(size: int) -> None:
    order = [0, 1, 2, 1, 0, 2]
    batches = [part for name in order for part in draw(name, 256, len(order)).split(size)]
    found, known = follow(df.Domains(), batches)
    visits = np.array([name for batch in found for name in batch]).reshape(len(order), 256)
    # few samples are of the domain before until 64 have come
    late = visits[:, 64:] if size < 64 else visits
    assert [sorted(set(visit.tolist())) for visit in late] == [[0], [1], [2], [1], [0], [2]]
    assert known.names.tolist() == [0, 1, 2]
    assert not known.mixed


def test_a_new_domain_begins_as_the_source_or_as_its_neighbour() -> None:
    rule, first, known = df.Domains(near=0.3), draw(0, 200), know(0)
    far = rule.divide(draw(1, 200), known)
    assert far.origins == (0, SOURCE)
    moved = first.mean(0) + 1.8 * (first - first.mean(0))
    near = rule.divide(moved, known)
    assert near.origins == (0, 0)
    assert near.owners.tolist() == [1] * 200
    assert replace(rule, near=0.0).divide(moved, known).origins == (0, SOURCE)


def test_a_part_of_a_domain_is_no_other_one() -> None:
    """A class is a part of what a domain shows: one half of it, along any direction."""
    known = know(0)
    signatures = draw(0, 800, seed=9)
    for direction in torch.eye(WIDTH, dtype=torch.float64):
        along = signatures @ direction
        found, _ = follow(df.Domains(), [signatures[along > along.median()][:200]], known)
        assert set(found[0]) == {0}


@pytest.mark.parametrize("size", [200, 32])
def test_mixed_domains_fall_apart_and_samples_find_their_own(size: int) -> None:
    signatures = torch.cat([draw(name, 600) for name in range(3)])
    order = torch.randperm(1800, generator=torch.Generator().manual_seed(0))
    batches = list(signatures[order].split(size))
    found, known = follow(df.Domains(), batches)
    assert bool(known.mixed)
    names, truth = torch.tensor([name for names in found for name in names]), order // 600
    late = torch.arange(1800) > 900
    for name in range(3):
        own = names[late & (truth == name)]
        assert float((own == own.mode().values).double().mean()) > 0.95
    assert len(known.names) == 3


@pytest.mark.parametrize("size", [300, 100, 48])
def test_batches_of_domains_that_are_known_are_divided(size: int) -> None:
    signatures = torch.cat([draw(name, 200, seed=3) for name in range(3)])
    order = torch.randperm(600, generator=torch.Generator().manual_seed(0))
    found, known = follow(df.Domains(), list(signatures[order].split(size)), know(0, 1, 2))
    names = torch.tensor([name for names in found for name in names])
    late = torch.arange(600) >= 300  # with 192 samples, and the batch that brings the last of them
    assert torch.equal(names[late], order[late] // 200)
    assert known.names.tolist() == [0, 1, 2]


def test_one_gaussian_does_not_fall_apart() -> None:
    batches = [draw(0, 200, seed) for seed in range(20)]
    _, known = follow(df.Domains(), batches)
    assert known.names.tolist() == [0]
    assert int(known.due) > 24 * WIDTH  # looked at, and in vain


def test_clusters_are_found_where_the_variance_is_small() -> None:
    """Along an axis whose variance is a hundredth of the others', which no principal axis shows."""
    random = torch.Generator().manual_seed(0)
    signatures = torch.randn(432, 18, generator=random, dtype=torch.float64)
    kurtosis = find_clusters(signatures)[0]
    assert 1.85 < kurtosis < 2.1
    side = torch.rand(432, generator=random) > 0.4
    signatures[:, 3] = signatures[:, 3] / 20 + 0.4 * side
    signatures = signatures @ torch.linalg.qr(signatures[:18].clone())[0]
    kurtosis, found = find_clusters(signatures)
    assert kurtosis < 1.5
    agreement = float((found == side).double().mean())
    assert max(agreement, 1 - agreement) > 0.95


def test_samples_that_are_all_the_same_are_no_clusters() -> None:
    signatures = torch.ones(432, 18, dtype=torch.float64)
    kurtosis, side = find_clusters(signatures)
    assert kurtosis == torch.inf
    assert not side.any()
    names, known = follow(df.Domains(), [draw(0, 1).repeat(200, 1)] * 4)
    assert {name for batch in names for name in batch} == {0}
    assert known.counts.tolist() == [800]


def test_the_budget_merges_what_is_one_and_forgets_what_is_oldest() -> None:
    rule = df.Domains(most=2)
    found, known = follow(rule, [draw(name, 200) for name in (0, 1, 2, 1)])
    assert [set(names) for names in found] == [{0}, {1}, {2}, {1}]
    assert known.names.tolist() == [1, 2]
    # two that are alike, as a stricter rule has made them
    strict = df.Domains(limit=0.02, near=0.0)
    first = draw(0, 200)
    wider = first.mean(0) + 1.4 * (first - first.mean(0))
    alike, known = follow(strict, [first, wider, draw(1, 200)])
    assert [set(names) for names in alike] == [{0}, {1}, {2}]
    division = rule.divide(draw(1, 200), known)
    assert division.known.names.tolist() == [0, 2]
    assert division.known.counts.tolist() == [400, 400]
    mean, covariance = find_moments(torch.cat((first, wider)).float().double())
    torch.testing.assert_close(division.known.means[0], mean)
    torch.testing.assert_close(division.known.covariances[0], covariance)


@pytest.mark.parametrize("size", [16, 70])
def test_signatures_that_nobody_will_read_are_not_kept(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against domains that keep all of the latest: new ones, mixed ones, one that falls apart."""
    random, batches = np.random.default_rng(size), list[Tensor]()
    for step in range(4000 // size):
        own = random.integers(0, 1 + step * size // 800, 1 if step % 9 else 2)
        pieces = [draw(int(name), size // len(own), 100 + step) for name in own]
        batches.append(torch.cat(pieces)[torch.from_numpy(random.permutation(size))])
    found, known = follow(df.Domains(), batches)
    with monkeypatch.context() as patch:
        patch.setattr(_Domain, "needed", property(lambda domain: domain.pool))
        expected, every = follow(df.Domains(), batches)
    assert found == expected
    assert len(known.names) > 1
    assert len(known.pool) < len(every.pool)
    for name in ("means", "covariances", "alpha", "fresh", "due", "waiting"):
        assert torch.equal(getattr(known, name), getattr(every, name))
    ends = [
        pool[len(pool) - kept :]
        for pool, kept in zip(
            every.pool.split(every.sizes.tolist()), known.sizes.tolist(), strict=True
        )
    ]
    assert torch.equal(known.pool, torch.cat(ends))


def test_what_is_known_is_kept_in_tensors() -> None:
    known = follow(df.Domains(), [draw(0, 200), draw(1, 210), draw(1, 30)])[1]
    again = KnownDomains.from_tensors(known.to_tensors(), "domains.known.")
    batch = torch.cat((draw(0, 100, 5), draw(1, 100, 5)))
    one, other = (df.Domains().divide(batch, each) for each in (known, again))
    assert torch.equal(one.owners, other.owners)
    for name, value in one.known.to_tensors().items():
        assert torch.equal(value, other.known.to_tensors()[name])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("names", torch.tensor([0, 0])),
        ("counts", torch.tensor([200.0, -1.0], dtype=torch.float64)),
        ("counts", torch.tensor([200.0, 100.0])),
        ("covariances", -torch.eye(WIDTH, dtype=torch.float64).expand(2, WIDTH, WIDTH)),
        ("alpha", torch.ones(5, 2, dtype=torch.float64)),
        ("alpha", torch.ones(4, 2, dtype=torch.float64) / 8),
        ("sizes", torch.tensor([1, 1])),
        ("waiting", torch.tensor([999, 0])),
        ("current", torch.tensor(2)),
        ("mixed", torch.tensor(2)),
        ("means", torch.full((2, WIDTH), torch.nan, dtype=torch.float64)),
        ("pool", torch.zeros(3, WIDTH + 1)),
        ("pool", torch.tensor(0.0)),
        ("block", torch.zeros(500, WIDTH, dtype=torch.float64)),
    ],
)
def test_crafted_tensors_are_refused(name: str, value: Tensor) -> None:
    tensors = {**know(0, 1).to_tensors(), name: value}
    with pytest.raises(ValueError, match=r"^state 'domains\.known\.") as error:
        KnownDomains.from_tensors(tensors, "domains.known.")
    assert name in str(error.value)


@pytest.mark.parametrize("most", [1, 2.5])
def test_the_budget_is_a_number_of_domains(most: float) -> None:
    with pytest.raises(ValueError, match=r"^Domains\.most must be an integer >= 2"):
        df.Domains(most=most)  # type: ignore[arg-type]


def test_a_missing_part_is_refused() -> None:
    tensors = know(0, 1).to_tensors()
    del tensors["seen"]
    with pytest.raises(ValueError, match="seen"):
        KnownDomains.from_tensors(tensors, "domains.known.")


def test_signatures_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match=r"signatures must be 10, as before, got '?5 numbers"):
        know(0, 1).assign(torch.zeros(3, 5, dtype=torch.float64))

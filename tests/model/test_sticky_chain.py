"""The passes of a state that lasts: exact against a sum over all paths of its two hidden states."""

from itertools import product

import numpy as np
import pytest

from driftfilter.model.sticky_chain import Stickiness, smooth
from oracles import Array

STICKY = Stickiness(np.array([0.0, 0.6, 0.95]), np.array([0.5, 0.3, 0.2]), 0.1)


def draw(n: int, k: int, seed: int = 0) -> tuple[Array, Array, Array]:
    """p(s_0, z_0) [3, k], l [n, k] and w [n, k], none of them a nice one."""
    random = np.random.default_rng(seed)
    start = random.dirichlet(np.ones(3 * k)).reshape(3, k)
    return start, random.gamma(0.5, 3.0, (n, k)), random.dirichlet(np.ones(k), n)


def by_enumeration(
    start: Array, likelihood: Array, weights: Array, sticky: Stickiness
) -> tuple[Array, Array, Array]:
    """p(s_t, z_t given x_1, …, x_t) [n, j, k], p(x_1, …, x_t) [n] and p(z_t given all) [n, k]: sums
    over paths (s_0, z_0), …, (s_n, z_n) of products of plain conditional probabilities.
    """
    (n, k), j = likelihood.shape, len(sticky.values)
    filtered, total, smoothed = np.zeros((n, j, k)), np.zeros(n), np.zeros((n, k))
    for length in range(1, n + 1):
        for path in product(product(range(j), range(k)), repeat=length + 1):
            weight = start[path[0]]
            for t in range(length):
                (old, last), (s, z) = path[t], path[t + 1]
                weight *= (1 - sticky.switch) * (s == old) + sticky.switch * sticky.shares[s]
                stays = sticky.values[s]
                weight *= stays * (z == last) + (1 - stays) * weights[t, z]
                weight *= likelihood[t, z]
            filtered[(length - 1, *path[-1])] += weight
            total[length - 1] += weight
            if length == n:
                smoothed[np.arange(n), [z for _, z in path[1:]]] += weight
    return filtered / total[:, None, None], total, smoothed / total[-1]


@pytest.mark.parametrize("k", [1, 2])
def test_passes_are_a_sum_over_all_paths(k: int) -> None:
    start, likelihood, weights = draw(4, k)
    found = smooth(start, likelihood, weights * likelihood, STICKY)
    filtered, total, smoothed = by_enumeration(start, likelihood, weights, STICKY)
    np.testing.assert_allclose(found.filtered, filtered, rtol=1e-12)
    np.testing.assert_allclose(found.evidence.cumprod(), total, rtol=1e-12)
    np.testing.assert_allclose(found.smoothed, smoothed, rtol=1e-12)


def test_a_chain_is_the_same_in_one_batch_and_in_two() -> None:
    start, likelihood, weights = draw(9, 4)
    whole = smooth(start, likelihood, weights * likelihood, STICKY)
    first = smooth(start, likelihood[:5], (weights * likelihood)[:5], STICKY)
    rest = smooth(first.filtered[-1], likelihood[5:], (weights * likelihood)[5:], STICKY)
    np.testing.assert_array_equal(np.concatenate((first.filtered, rest.filtered)), whole.filtered)
    np.testing.assert_array_equal(np.concatenate((first.evidence, rest.evidence)), whole.evidence)
    np.testing.assert_array_equal(rest.smoothed, whole.smoothed[5:])

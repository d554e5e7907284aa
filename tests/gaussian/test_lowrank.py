import math

import numpy as np
import pytest
import torch
from torch import Tensor

import driftfilter as df
from driftfilter.gaussian.covariance import Gain, Noise
from oracles import (
    Allocations,
    Array,
    Moments,
    array,
    assert_equal,
    assert_moments,
    assert_represents,
    dense_map,
    kalman_update,
    normals,
    tensor,
)
from small import refuses

SIZE = 7


def low_rank(rows: int, rank: int, seed: int = 0, size: int = SIZE) -> df.LowRank:
    return df.LowRank(
        tensor(np.exp(normals(size, seed=seed))), tensor(normals(rows, size, seed=seed + 1)), rank
    )


def precision(covariance: df.LowRank) -> Array:
    """The definition, diag(u) + WᵀW."""
    factor = array(covariance.factor)
    matrix: Array = np.diag(array(covariance.diagonal)) + factor.T @ factor
    return matrix


def truncated(diagonal: Array, factor: Array, rank: int) -> Array:
    """Best approximation of WᵀW by rank r in the metric u⁻¹ (Eckart and Young), the diagonal of the
    rest kept.
    """
    scale = np.sqrt(diagonal)
    _, values, rows = np.linalg.svd(factor / scale)
    values, rows = values[:rank, None], rows[: min(rank, len(values))]
    kept = (rows * values * scale).T @ (rows * values * scale)
    matrix: Array = kept + np.diag(diagonal + np.diag(factor.T @ factor - kept))
    return matrix


@pytest.mark.parametrize("rank", [0, 1, 3, 5, 6, 7])
@pytest.mark.parametrize("rows", [1, 5, 12])
def test_truncate_keeps_the_best_directions_and_the_diagonal(rows: int, rank: int) -> None:
    exact = low_rank(2, rank).condition(tensor(normals(rows, SIZE, seed=5)))
    short = exact.truncate()
    assert short.factor.shape[0] <= rank
    assert_equal(torch.tensor(np.diag(precision(short))), np.diag(precision(exact)), 1e-13)
    assert_equal(
        torch.tensor(precision(short)), truncated(array(exact.diagonal), array(exact.factor), rank)
    )
    assert_equal(short.dense(), np.linalg.inv(precision(short)))


@pytest.mark.parametrize("seed", [1, 5, 6, 8, 9])
def test_truncate_rows_of_very_different_size_in_float32(seed: int) -> None:
    """A few samples that count, many saturated ones: an eigensolver in float32 does not converge on
    these.
    """
    rows = torch.zeros(109, 2)
    rows[0] = torch.tensor([-0.5, -0.125])
    random = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(108, generator=random)[:9] + 1
    rows[chosen] = torch.randn(9, 2, generator=random) * 10.0 ** (
        -20 * torch.rand(9, 1, generator=random)
    )
    short = df.LowRank(torch.tensor([1.0, 0.5]), rows, 1).truncate()
    assert_equal(
        torch.tensor(precision(short)), truncated(np.array([1.0, 0.5]), array(rows), 1), 1e-5
    )


def test_truncate_within_the_rank_changes_nothing() -> None:
    covariance = low_rank(3, 3)
    assert covariance.truncate() is covariance


@pytest.mark.parametrize("rank", [0, 2, SIZE])
def test_operations_of_a_truncated_covariance(rank: int) -> None:
    """After truncation it is an ordinary covariance: everything is exact about what it then stands
    for.
    """
    covariance = low_rank(SIZE, rank).truncate()
    dense = np.linalg.inv(precision(covariance))
    assert_represents(covariance, dense)
    assert_equal(covariance.marginal(slice(2, 5)).dense(), dense[2:5, 2:5])
    assert_equal(covariance.marginal(torch.tensor([6, 0])).dense(), dense[np.ix_([6, 0], [6, 0])])
    draws = covariance.sample(40_000, torch.Generator().manual_seed(1))
    assert_moments(array(draws), np.zeros(SIZE), dense)


GAINS: dict[str, Gain] = {
    "number": 0.8,
    "negative": -0.8,
    "zero": 0.0,
    "vector": tensor(np.array([0.5, -0.5, 0.0, 1.0, 1.5, -2.0, 0.9])),
}
NOISES: dict[str, Noise] = {
    "number": 0.4,
    "vector": tensor(np.array([0.5, 1.0, 0.1, 2.0, 0.2, 1.0, 0.3])),
    "LowRank": low_rank(3, 3, seed=20),
    "Blocks": df.Blocks(
        (
            low_rank(1, 1, seed=21, size=2),
            df.Diagonal(tensor(np.ones(2))),
            low_rank(2, 3, seed=22, size=3),
        )
    ),
}


def moved(covariance: df.LowRank, gain: Gain, noise: Noise) -> Array:
    G = dense_map(gain, SIZE)
    added = dense_map(noise if isinstance(noise, (float, Tensor)) else noise.dense(), SIZE)
    matrix: Array = G @ np.linalg.inv(precision(covariance)) @ G.T + added
    return matrix


@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("rank", [0, 2, 4, SIZE])
def test_propagate_is_exact_up_to_the_truncation(gain: str, noise: str, rank: int) -> None:
    """The exact result, then truncated: diag(Σ⁻¹) is that of the exact matrix at any rank, all of
    it at full rank.
    """
    prior = low_rank(rank, rank)
    result = prior.propagate(GAINS[gain], NOISES[noise])
    exact = moved(prior, GAINS[gain], NOISES[noise])
    assert result.factor.shape[0] <= rank
    assert_equal(torch.tensor(np.diag(precision(result))), np.diag(np.linalg.inv(exact)))
    if rank == SIZE or noise in ("number", "vector"):  # diagonal noise does not raise the rank
        assert_equal(result.dense(), exact)


@pytest.mark.parametrize("rank", [0, 2, SIZE])
def test_stationary_noise_keeps_a_low_rank_source(rank: int) -> None:
    source = df.Belief(tensor(normals(SIZE, seed=9)), low_rank(rank, rank))
    after = df.Transition(df.MeanReversion(0.7), df.Stationary())(source, source)
    assert_equal(after.covariance.dense(), array(source.covariance.dense()))


@pytest.mark.parametrize("isotropic", [True, False])
@pytest.mark.parametrize("rows", [79, 80, 121])
def test_many_rows_and_columns(rows: int, isotropic: bool) -> None:
    """Sizes where the Gram matrix is put together from panels: Σ⁻¹ Σ v = v by the definition of
    Σ⁻¹.
    """
    size = 2500
    diagonal = np.full(size, 2.0) if isotropic else np.exp(normals(size, seed=0))
    factor, vectors = normals(rows, size, seed=1), normals(3, size, seed=2)
    posterior = df.LowRank(tensor(diagonal), torch.zeros(0, size).double(), 10).condition(
        tensor(factor)
    )
    mapped = array(posterior.apply(tensor(vectors)))
    assert_equal(torch.tensor(mapped * diagonal + mapped @ factor.T @ factor), vectors)
    _, values, directions = np.linalg.svd(factor / np.sqrt(diagonal), full_matrices=False)
    kept = directions[:10] * values[:10, None] * np.sqrt(diagonal)
    short = posterior.truncate()
    expected = vectors @ kept.T @ kept + vectors * (
        diagonal + np.square(factor).sum(0) - np.square(kept).sum(0)
    )
    assert_equal(short.solve(tensor(vectors)), expected, 1e-9)


def test_never_forms_a_square_matrix() -> None:
    """d = 4,000: the largest tensor of a whole step is the rows, far below d²."""
    size, rows, rank = 4000, 20, 10
    source = df.LowRank.isotropic(0.5, size, rank)
    factor, vectors = torch.randn(rows, size), torch.randn(4, size)
    with Allocations() as allocations:
        posterior = source.condition(factor)
        posterior.apply(vectors)
        posterior.variance()
        posterior.sample(8, torch.Generator().manual_seed(0))
        short = posterior.truncate()
        short.condition(factor).truncate().solve(vectors)
        short.marginal(slice(0, size // 2))
        prior = short.propagate(0.99, 1e-4).propagate(
            torch.full((size,), 0.9), torch.full((size,), 0.1)
        )
        prior.propagate(0.9, short.propagate(math.sqrt(1 - 0.9**2), 0.0)).sample(
            8, torch.Generator().manual_seed(0)
        )
    assert rows * size <= allocations.largest <= (rows + rank) * size


def test_the_monitor_sees_a_square_matrix() -> None:
    with Allocations() as allocations:
        df.LowRank.isotropic(1.0, 100, 2).dense()
    assert allocations.largest >= 100 * 100


@pytest.mark.slow
def test_a_full_rank_stream_is_the_kalman_filter() -> None:
    """Through the filter, 100 steps of 1 to 9 observations of variance 1, mean and covariance."""
    filt = df.Filter(
        lambda theta, inputs: inputs[:, -1:] - inputs[:, :-1] @ theta[:, None],
        df.Transition(df.MeanReversion(0.95), df.Isotropic(0.05)),
        df.Gibbs(lambda logits: 0.5 * logits.square().sum(-1)),
        df.Linearized(df.Hessian()),
    )
    mean = normals(SIZE, seed=1)
    state = filt.init(df.Belief(tensor(mean), low_rank(0, SIZE)))
    exact = Moments(mean, array(state.belief.covariance.dense()))
    for step in range(100):
        count = 1 + step % 9
        design, targets = normals(count, SIZE, seed=step), normals(count, seed=1000 + step)
        state, _, _ = filt.step(state, tensor(np.sqrt(count) * np.column_stack([design, targets])))
        prior = Moments(
            0.95 * exact.mean + 0.05 * mean, 0.95**2 * exact.covariance + 0.05 * np.eye(SIZE)
        )
        exact = kalman_update(prior, design, targets, 1.0)
        assert_equal(state.belief.mean, exact.mean)
        assert_equal(state.belief.covariance.dense(), exact.covariance)


ONES, NONE, HUGE = torch.ones(3), torch.zeros(0, 3), torch.full((1, 3), 1e25)
GOOD = df.LowRank(ONES, torch.ones(1, 3), 2)
FACTOR = r"LowRank.factor must be of shape \[r, 3\], got 'shape \[{}\]'"


test_what_cannot_be_is_refused = refuses(
    [
        (
            lambda: df.LowRank(ONES, NONE, 4),
            r"LowRank.rank must be an integer in \[0, 3\] \(d\), got 4",
        ),
        (
            lambda: df.LowRank(ONES, NONE, -1),
            r"LowRank.rank must be an integer in \[0, 3\] \(d\), got -1",
        ),
        (
            lambda: df.LowRank(ONES, NONE, True),
            r"LowRank.rank must be an integer in \[0, 3\] \(d\), got True",
        ),
        (lambda: df.LowRank(ONES, NONE, 1.5), r"LowRank.rank must be an integer .* got 1.5"),  # type: ignore[arg-type]
        (lambda: df.LowRank(ONES, torch.ones(2, 4), 1), FACTOR.format("2, 4")),
        (lambda: df.LowRank(ONES, torch.ones(3), 1), FACTOR.format("3")),
        (
            lambda: df.LowRank(torch.eye(3), NONE, 1),
            r"LowRank.diagonal must be of shape \[d\], got shape \[3, 3\]",
        ),
        (
            lambda: df.LowRank(ONES - 1, NONE, 1),
            "LowRank.diagonal must be > 0, got a smallest value of 0",
        ),
        (
            lambda: df.LowRank(ONES - 2, NONE, 1),
            "LowRank.diagonal must be > 0, got a smallest value of -1",
        ),
        (
            lambda: df.LowRank(ONES * math.inf, NONE, 1),
            r"LowRank.diagonal must be finite, got inf at index \[0\] \(3 of 3",
        ),
        (
            lambda: df.LowRank(ONES, torch.ones(1, 3) * math.nan, 1),
            r"LowRank.factor must be finite, got nan at index \[0, 0\]",
        ),
        (
            lambda: df.LowRank(ONES, NONE.double(), 1),
            "LowRank.factor must be torch.float32, got torch.float64",
        ),
        (
            lambda: df.LowRank(ONES.half(), NONE.half(), 1),
            "LowRank.diagonal must be float32 or float64, got torch.float16",
        ),
        (lambda: df.LowRank.isotropic(0.0, 3, 1), "variance must be a finite number > 0, got 0.0"),
        (
            lambda: df.LowRank.isotropic(math.inf, 3, 1),
            "variance must be a finite number > 0, got inf",
        ),
        (
            lambda: GOOD.propagate(torch.eye(3), 0.1),
            "LowRank cannot carry a dynamic that mixes coordinates; use Full",
        ),
        (
            lambda: GOOD.propagate(1.0, torch.eye(3)),
            "LowRank cannot carry noise given as a matrix; use Full",
        ),
        (
            lambda: GOOD.propagate(1.0, df.Full(torch.eye(3))),
            "LowRank cannot carry noise that correlates .* use Full",
        ),
        (
            lambda: GOOD.precision(),
            "LowRank cannot carry a dense precision; use Full, or a source without low-rank part",
        ),
        (
            lambda: GOOD.propagate(0.0, 0.0),
            "a gain of 0 without noise leaves no covariance: add noise",
        ),
        (
            lambda: GOOD.propagate(ONES - ONES, 0.0),
            "a gain of 0 without noise leaves no covariance: add noise",
        ),
        (
            lambda: GOOD.propagate(torch.tensor([0.0, 1, 1]), torch.tensor([0.0, 1, 1])),
            "a gain of 0 without noise leaves",
        ),
        (
            lambda: df.LowRank.isotropic(1.0, 3, 2).condition(HUGE).apply(ONES),
            "I . F diag.w. Fᵀ is not finite: it overflowed",
        ),
    ]
)

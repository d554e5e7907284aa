"""The covariance of a weight matrix, against np.kron and dense inverses."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
from oracles import (
    Array,
    array,
    assert_equal,
    assert_represents,
    normals,
    spd,
    tensor,
)
from small import refuses

P, Q = 3, 4
SIZE = P * Q


def precision_of(left: Array, right: Array, damping: float) -> Array:
    matrix: Array = np.kron(left, right) + damping * np.eye(len(left) * len(right))
    return matrix


def example(seed: int = 0) -> tuple[df.Kronecker, Array]:
    """A ⊗ B + λ I, and its precision."""
    left, right = spd(P, seed, 0.1), spd(Q, seed + 1, 0.1)
    return df.Kronecker.from_factors(tensor(left), tensor(right), 0.3), precision_of(
        left, right, 0.3
    )


def general(seed: int = 0) -> df.Kronecker:
    """Eigenvalues that are no outer product."""
    left, right = (np.linalg.qr(normals(size, size, seed=seed + size))[0] for size in (P, Q))
    return df.Kronecker(tensor(left), tensor(right), tensor(0.2 + normals(P, Q, seed=seed) ** 2))


def dense_precision(covariance: df.Kronecker) -> Array:
    basis = np.kron(array(covariance.left), array(covariance.right))
    matrix: Array = basis @ np.diag(array(covariance.values).ravel()) @ basis.T
    return matrix


def partial_traces(matrix: Array, rows: int = P, columns: int = Q) -> tuple[Array, Array]:
    blocks = matrix.reshape(rows, columns, rows, columns)
    return np.einsum("aibi->ab", blocks), np.einsum("aiaj->ij", blocks)


def assert_has(covariance: df.Covariance, precision: Array, tolerance: float = 1e-10) -> None:
    assert_equal(covariance.precision(), precision, tolerance)
    assert_represents(covariance, np.linalg.inv(precision), tolerance)


def test_reading_operations_match_dense_algebra() -> None:
    covariance, precision = example()
    assert_has(covariance, precision)
    assert_has(general(), dense_precision(general()))
    assert_has(
        df.Kronecker.isotropic(0.5, P, Q, torch.zeros(0, dtype=torch.float64)), 2 * np.eye(SIZE)
    )


def test_marginal_is_the_block_of_the_covariance() -> None:
    covariance = general()
    dense = np.linalg.inv(dense_precision(covariance))
    for index in (
        slice(2, 9),
        torch.tensor([7, 1, 4]),
        torch.arange(SIZE) % 2 == 0,
        torch.arange(SIZE).flip(0),
    ):
        chosen = np.arange(SIZE)[index if isinstance(index, slice) else index.numpy()]
        assert_equal(covariance.marginal(index).dense(), dense[np.ix_(chosen, chosen)])
    assert covariance.marginal(slice(None)) is covariance


@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (5, 1)])
def test_vectors_are_conditioned_exactly(rows: int, columns: int) -> None:
    covariance = df.Kronecker.isotropic(0.5, rows, columns, torch.zeros(0, dtype=torch.float64))
    precision = 2 * np.eye(5)
    for seed in range(4):
        factor = normals(1 + 2 * seed, 5, seed=seed)
        covariance = covariance.condition(tensor(factor)).truncate()
        precision = precision + factor.T @ factor
        assert_has(covariance, precision, 1e-9)


def test_a_row_that_is_a_product_is_exact_on_an_isotropic_prior() -> None:
    first, second = normals(P, seed=1), normals(Q, seed=2)
    row = np.kron(first, second)[None]
    prior = df.Kronecker.isotropic(0.5, P, Q, torch.zeros(0, dtype=torch.float64))
    assert_has(prior.condition(tensor(row)), 2 * np.eye(SIZE) + row.T @ row)


def test_kronecker_curvature_is_exact_in_any_batches() -> None:
    """B ⊗ (A₁ + A₂ + …), as of a layer whose outputs have the same curvature for every input; and
    with the parts swapped.
    """
    for swapped in (False, True):
        prior = df.Kronecker.isotropic(
            0.5, *((Q, P) if swapped else (P, Q)), torch.zeros(0, dtype=torch.float64)
        )
        root, precision = np.linalg.cholesky(spd(P, 3)).T, 2 * np.eye(SIZE)
        covariance = prior
        for seed in range(3):
            inputs = normals(2, Q, seed=seed)
            factor = np.kron(inputs, root) if swapped else np.kron(root, inputs)
            covariance = covariance.condition(tensor(factor))
            precision = precision + factor.T @ factor
            assert_has(covariance, precision)
    assert_has(prior, 2 * np.eye(SIZE))  # a value: unchanged
    assert prior.condition(torch.zeros(0, SIZE, dtype=torch.float64)) is prior


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_condition_keeps_partial_traces_and_the_diagonal_in_its_basis(rows: int) -> None:
    covariance = general()
    precision = dense_precision(covariance)
    totals = precision
    for seed in range(3):
        factor = normals(rows, SIZE, seed=10 + seed)
        conditioned = precision + factor.T @ factor
        totals = totals + factor.T @ factor
        covariance = covariance.condition(tensor(factor))
        precision = dense_precision(covariance)
        basis = np.kron(array(covariance.left), array(covariance.right))
        assert_equal(covariance.values.flatten(), np.diag(basis.T @ conditioned @ basis))
        for actual, expected in zip(partial_traces(precision), partial_traces(totals), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-10)
    assert np.abs(precision - totals).max() > 0.1  # a projection: not the sum itself


@pytest.mark.parametrize("gain", [1.0, 0.7, -1.3, 0.0])
@pytest.mark.parametrize("noise", [0.0, 0.4])
def test_numbers_move_it_exactly(gain: float, noise: float) -> None:
    covariance = general()
    if gain == noise == 0:
        with pytest.raises(df.NotPositiveDefiniteError, match="a gain of 0 without noise"):
            covariance.propagate(gain, noise)
        return
    dense = gain**2 * np.linalg.inv(dense_precision(covariance)) + noise * np.eye(SIZE)
    assert_has(covariance.propagate(gain, noise), np.linalg.inv(dense), 1e-9)


def test_kronecker_noise() -> None:
    covariance, other = general(), general(5)
    dense = np.linalg.inv(dense_precision(covariance))
    assert_has(
        covariance.propagate(0.7, covariance.propagate(0.5, 0.0)),
        np.linalg.inv((0.49 + 0.25) * dense),
        1e-9,
    )
    isotropic = df.Kronecker.isotropic(0.5, P, Q, torch.zeros(0, dtype=torch.float64))
    assert_has(
        covariance.propagate(0.7, isotropic), np.linalg.inv(0.49 * dense + 0.5 * np.eye(SIZE)), 1e-9
    )
    moved = covariance.propagate(0.7, other).dense()
    expected = 0.49 * dense + np.linalg.inv(dense_precision(other))
    for actual, wanted in zip(partial_traces(array(moved)), partial_traces(expected), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-10)
    assert np.abs(array(moved) - expected).max() > 1e-3  # a projection


@pytest.mark.parametrize(
    ("gain", "noise", "message"),
    [
        (torch.ones(SIZE), 0.0, "a dynamic that moves coordinates differently"),
        (torch.eye(SIZE), 0.0, "a dynamic that moves coordinates differently"),
        (1.0, torch.ones(SIZE), "noise that is neither isotropic nor Kronecker of the same shape"),
        (
            1.0,
            df.Full(torch.eye(SIZE)),
            "noise that is neither isotropic nor Kronecker of the same shape",
        ),
        (
            1.0,
            df.Kronecker.isotropic(1.0, Q, P),
            "noise that is neither isotropic nor Kronecker of the same shape",
        ),
    ],
)
def test_what_it_cannot_carry_is_refused(gain: Any, noise: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"Kronecker cannot carry {message}; use Full or Diagonal"):
        general().propagate(gain, noise)


test_bad_fields_are_named = refuses(
    [
        (
            lambda: df.Kronecker(torch.eye(2), torch.eye(3), torch.ones(2)),
            "Kronecker.values must be of shape",
        ),
        (
            lambda: df.Kronecker(torch.eye(3), torch.eye(3), torch.ones(2, 3)),
            r"Kronecker.left must be of shape \[2, 2\]",
        ),
        (
            lambda: df.Kronecker(torch.eye(2), torch.ones(3, 3), torch.ones(2, 3)),
            "Kronecker.right must be orthogonal",
        ),
        (
            lambda: df.Kronecker(torch.eye(2), torch.eye(3), torch.zeros(2, 3)),
            "Kronecker.values must be > 0, got a smallest",
        ),
        (
            lambda: df.Kronecker(torch.eye(2), torch.eye(3).double(), torch.ones(2, 3)),
            "Kronecker.right must be torch.float32",
        ),
        (
            lambda: df.Kronecker(torch.eye(2), torch.eye(3), torch.full((2, 3), torch.nan)),
            "Kronecker.values must be finite",
        ),
        (
            lambda: df.Kronecker.isotropic(0.0, 2, 3),
            "Kronecker.variance must be a finite number > 0",
        ),
    ]
)


def test_overflow_is_an_error() -> None:
    with pytest.raises(df.NotPositiveDefiniteError, match="overflowed"):
        df.Kronecker.isotropic(1.0, 2, 3).condition(torch.full((1, 6), 1e30))


def test_float32_follows_float64() -> None:
    single, double = (
        df.Kronecker.isotropic(0.5, P, Q, torch.zeros(0, dtype=dtype))
        for dtype in (torch.float32, torch.float64)
    )
    for seed in range(5):
        factor = normals(6, SIZE, seed=seed)
        single = single.condition(tensor(factor, torch.float32)).propagate(0.9, 0.01)
        double = double.condition(tensor(factor)).propagate(0.9, 0.01)
    assert single.dtype == torch.float32
    assert_equal(single.dense(), array(double.dense()), 1e-5)


@pytest.mark.parametrize(
    "noise", [df.Stationary(), df.Isotropic(0.01), df.Discount(0.95), df.Reset(0.1)], ids=repr
)
def test_filter_of_a_logistic_regression_equals_the_dense_one(noise: Any) -> None:
    """One row of weights is conditioned exactly; from an isotropic source so is the stationary
    noise.
    """
    stream = tensor(normals(6, 8, 4, seed=3))
    results = []
    for covariance in (
        df.Kronecker.isotropic(0.5, 1, 4, stream.new_zeros(0)),
        df.Full(0.5 * torch.eye(4, dtype=torch.float64)),
    ):
        filt = df.Filter(
            df.LinearHead(2),
            df.Transition(df.MeanReversion(0.9), noise),
            inference=df.Linearized(df.Hessian()),
        )
        state = filt.init(df.Belief(torch.ones(4, dtype=torch.float64), covariance))
        state, outputs = filt.run(state, stream)
        results.append(
            (state.belief.mean, state.belief.covariance.dense(), outputs.log_probabilities)
        )
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


def test_stationary_noise_keeps_a_correlated_source() -> None:
    covariance, precision = example()
    source = df.Belief(torch.zeros(SIZE, dtype=torch.float64), covariance)
    moved = source
    for _ in range(3):
        moved = df.Transition(df.MeanReversion(0.8), df.Stationary())(moved, source)
    assert_has(moved.covariance, precision, 1e-9)


def linear(seed: int, scale: float) -> df.Network:
    torch.manual_seed(seed)
    layer = nn.Linear(Q, P, bias=False).double()
    with torch.no_grad():
        layer.weight.mul_(scale)
    return df.Network(layer, df.AllParameters())


@pytest.mark.parametrize(
    ("samples", "scale"), [(1, 1.0), (50, 0.0)], ids=["one sample", "independent of the inputs"]
)
def test_laplace_of_one_layer_is_the_dense_curvature(samples: int, scale: float) -> None:
    """Where KFAC is exact: one sample, or outputs whose curvature does not depend on the inputs
    (weights of 0).
    """
    network, inputs = linear(0, scale), tensor(normals(samples, Q, seed=4))
    belief = df.Laplace("kronecker", precision=0.2)(
        network, network.mean(), df.SourceData(inputs, batch_size=8)
    )
    theta = network.mean()
    curvature: Tensor = torch.autograd.functional.hessian(
        lambda point: -network(point, inputs).log_softmax(-1)[:, 0].sum(), theta
    )
    assert_has(belief.covariance, array(curvature) + 0.2 * np.eye(SIZE), 1e-9)
    assert torch.equal(belief.mean, theta)


def kfac(model: nn.Sequential, position: int, inputs: Tensor) -> Array:
    """(1/n) (Σ_i G_i) ⊗ (Σ_i a_i a_iᵀ) of a layer [pq, pq]: inputs a, Gauss–Newton curvature G of
    the outputs.
    """
    entering: Tensor = model[:position](inputs).detach()
    outputs = model[position](entering).detach().requires_grad_()
    jacobian: Tensor = torch.autograd.functional.jacobian(
        lambda at: model[position + 1 :](at).sum(0), outputs
    )  # [k, n, p]
    p = model(inputs).softmax(-1)
    metric = torch.einsum(
        "knp,nkl,lnq->pq", jacobian, torch.diag_embed(p) - p[:, :, None] * p[:, None, :], jacobian
    )
    return np.kron(array(metric), array(entering.mT @ entering)) / len(inputs)


@pytest.mark.parametrize("batch_size", [200, 10])
@pytest.mark.parametrize("position", [0, 2, 4])
def test_laplace_of_a_network_is_closer_to_the_dense_curvature_than_kfac(
    position: int, batch_size: int
) -> None:
    """The approximation measured, in KL to the dense posterior: below KFAC's, a fraction of the
    diagonal's.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 4)
    ).double()
    inputs = tensor(normals(200, 6, seed=1) @ normals(6, 6, seed=2))
    network = df.Network(model, df.ByName((f"{position}.weight",)))

    def dense(structure: Any, size: int) -> Array:
        belief = df.Laplace(structure, precision=0.5)(
            network, network.mean(), df.SourceData(inputs, batch_size=size)
        )
        return array(belief.covariance.dense())

    exact = np.linalg.inv(dense("full", 200))

    def divergence(covariance: Array) -> float:
        return float(
            0.5
            * (np.trace(exact @ covariance) - len(exact) - np.linalg.slogdet(exact @ covariance)[1])
        )

    kronecker, whole = (
        divergence(dense("kronecker", batch_size)),
        divergence(dense("kronecker", 200)),
    )
    product = np.linalg.inv(kfac(model, position, inputs) + 0.5 * np.eye(len(exact)))
    assert 1e-6 < kronecker < 0.4 * divergence(dense("diagonal", 200))
    assert kronecker < divergence(product)
    assert kronecker < 1.1 * whole  # batches cost little


def test_laplace_of_all_parameters_has_a_part_for_each() -> None:
    """Weights keep the partial traces of their block of the dense curvature, biases and scales its
    diagonal.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 4)).double()
    network, inputs = df.Network(model, df.AllParameters()), tensor(normals(30, 6, seed=1))
    full, parts = (
        df.Laplace(structure, precision=0.5)(
            network, network.mean(), df.SourceData(inputs, batch_size=7)
        )
        for structure in ("full", "kronecker")
    )
    assert isinstance(parts.covariance, df.Blocks)
    exact, start = np.linalg.inv(array(full.covariance.dense())), 0
    for part, shape in zip(parts.covariance.parts, network.shapes.values(), strict=True):
        block = exact[start : start + shape.numel(), start : start + shape.numel()]
        start += shape.numel()
        if len(shape) == 1:
            assert_equal(part.precision(), np.diag(block))
            continue
        for ours, wanted in zip(
            partial_traces(array(part.precision()), *shape),
            partial_traces(block, *shape),
            strict=True,
        ):
            np.testing.assert_allclose(ours, wanted, rtol=1e-9, atol=1e-9)


def test_convolutions_are_matrices_of_outputs_by_patches() -> None:
    stub: Any = SimpleNamespace(
        shapes={"weight": torch.Size((4, 3, 3, 3)), "bias": torch.Size((4,))}
    )
    belief = df.Gaussian(0.5, "kronecker")(stub, torch.zeros(112))
    assert isinstance(belief.covariance, df.Blocks)
    first, second = belief.covariance.parts
    assert isinstance(first, df.Kronecker)
    assert first.values.shape == (4, 27)
    assert isinstance(second, df.Diagonal)

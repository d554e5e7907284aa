import math
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import driftfilter as df
from driftfilter.base.tensors import map_tensors
from driftfilter.gaussian.covariance import (
    Gain,
    Noise,
    antithetic,
    positive_factor,
    positive_root,
    signed_root,
)
from driftfilter.gaussian.structures import STRUCTURES as STRUCTURE_NAMES
from oracles import (
    EVERY_STRUCTURE,
    STRUCTURES,
    Example,
    array,
    assert_equal,
    assert_moments,
    assert_represents,
    conditioned,
    dense_map,
    normals,
    spd,
    tensor,
)
from small import assert_same, refuses

SIZE = 6
every_structure = pytest.mark.parametrize("name", STRUCTURES)
really_every = pytest.mark.parametrize("name", EVERY_STRUCTURE)


@really_every
def test_reading_operations_match_dense_algebra(name: str) -> None:
    example = EVERY_STRUCTURE[name](0)
    assert_represents(example.covariance, example.dense)


@really_every
def test_spectrum_is_that_of_the_precision(name: str) -> None:
    example = EVERY_STRUCTURE[name](0)
    if "LowRank" in name or name == "mixed Blocks":
        with pytest.raises(
            ValueError, match="LowRank cannot carry a marginal likelihood; use Full"
        ):
            example.covariance.spectrum()
        return
    assert_equal(
        example.covariance.spectrum().sort()[0], np.linalg.eigvalsh(np.linalg.inv(example.dense))
    )


@really_every
@pytest.mark.parametrize("other", EVERY_STRUCTURE)
def test_relative_trace_of_any_pair_of_structures(name: str, other: str) -> None:
    one, two = EVERY_STRUCTURE[name](0), EVERY_STRUCTURE[other](7)
    expected = np.trace(np.linalg.solve(one.dense, two.dense))
    assert_equal(one.covariance.relative_trace(two.covariance), expected)


@really_every
@pytest.mark.parametrize("information", [0.7, 0.0, -0.5], ids=["more", "none", "less"])
def test_inform_by_a_number_shifts_the_precision(name: str, information: float) -> None:
    """A part of the smallest eigenvalue may be taken away, too."""
    example = EVERY_STRUCTURE[name](3)
    precision = np.linalg.inv(example.dense)
    shift = information * np.linalg.eigvalsh(precision)[0]
    informed = example.covariance.inform(float(shift))
    assert type(informed) is type(example.covariance)
    assert_represents(informed, np.linalg.inv(precision + shift * np.eye(SIZE)))
    assert_equal(example.covariance.dense(), example.dense)


@really_every
def test_inform_by_a_vector_conditions_on_each_coordinate(name: str) -> None:
    example, information = EVERY_STRUCTURE[name](3), np.array([0.0, 0.5, 1.0, 0.2, 3.0, 0.0])
    informed = example.covariance.inform(tensor(information))
    expected = example.covariance.condition(tensor(np.diag(np.sqrt(information))))
    assert type(informed) is type(expected)
    assert_represents(informed, array(expected.dense()))
    if name not in ("Kronecker", "layers"):  # which project
        precision = np.linalg.inv(example.dense) + np.diag(information)
        assert_equal(informed.dense(), np.linalg.inv(precision))


@pytest.mark.parametrize("structure", STRUCTURE_NAMES)
def test_isotropic_by_name(structure: str) -> None:
    shapes = {str(size): torch.Size(size) for size in ((2, 3), (4,), (), (2, 1, 2))}
    mean = torch.zeros(15, dtype=torch.float64)
    covariance = STRUCTURE_NAMES[structure].isotropic_like(0.25, mean, 3, shapes)
    assert_represents(covariance, 0.25 * np.eye(15))
    assert getattr(covariance, "rank", 3) == 3
    if structure != "kronecker":
        few = STRUCTURE_NAMES[structure].isotropic_like(0.25, mean[:2], 3)
        assert type(few) is type(covariance) is STRUCTURE_NAMES[structure]
        assert getattr(few, "rank", 2) == 2


@really_every
def test_what_a_structure_says_of_itself(name: str) -> None:
    covariance = EVERY_STRUCTURE[name](0).covariance
    assert covariance.is_diagonal is (name in ("Diagonal", "flat LowRank", "Blocks of Diagonal"))
    assert covariance.is_dense is (name == "Full")
    assert covariance.is_exact is (name in ("Full", "LowRank", "flat LowRank"))
    parts = covariance.independent_parts()
    assert [part.dimension for part in parts] == getattr(covariance, "sizes", [])
    assert bool(parts) is ("Blocks" in name or name == "layers")


@every_structure
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 6, 9])
def test_condition_adds_the_curvature_the_structure_can_hold(name: str, rows: int) -> None:
    example, factor = STRUCTURES[name](1), normals(rows, SIZE, seed=2)
    posterior = example.covariance.condition(tensor(factor))
    assert_represents(posterior, conditioned(example.dense, factor, example.kept))
    assert_represents(posterior.truncate(), conditioned(example.dense, factor, example.kept))
    assert_equal(example.covariance.dense(), example.dense)  # the prior is a value: unchanged


@really_every
@pytest.mark.parametrize("rows", [0, 1, 2, 9])
def test_remove_takes_away_curvature_or_refuses(name: str, rows: int) -> None:
    """(Σ⁻¹ - the entries of NᵀN that the structure keeps)⁻¹, if that is positive definite."""
    example, factor = EVERY_STRUCTURE[name](1), 0.1 * normals(rows, SIZE, seed=2)
    if name in ("LowRank", "flat LowRank", "mixed Blocks", "Kronecker", "layers"):
        with pytest.raises(ValueError, match="cannot carry negative curvature; use Full, Diagonal"):
            example.covariance.remove(tensor(factor))
        return
    precision = np.linalg.inv(example.dense) - example.kept * (factor.T @ factor)
    assert np.linalg.eigvalsh(precision)[0] > 0.05
    left = example.covariance.remove(tensor(factor))
    assert type(left) is type(example.covariance)
    assert_represents(left, np.linalg.inv(precision))
    assert_represents(left.truncate(), np.linalg.inv(precision))
    assert_equal(example.covariance.dense(), example.dense)
    if rows:
        with pytest.raises(df.NotPositiveDefiniteError, match="less negative curvature"):
            example.covariance.remove(tensor(60 * factor))


@pytest.mark.parametrize("structure", ["full", "diagonal"])
def test_remove_undoes_condition_in_float32(structure: str) -> None:
    start = STRUCTURE_NAMES[structure].isotropic_like(0.5, torch.zeros(SIZE))
    factor = tensor(normals(4, SIZE, seed=2), torch.float32)
    back = start.condition(factor).remove(factor).truncate()
    assert back.dtype == torch.float32
    torch.testing.assert_close(back.dense(), start.dense(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", sorted(EVERY_STRUCTURE.keys() - {"LowRank", "mixed Blocks"}))
def test_precision_is_a_vector_only_if_diagonal(name: str) -> None:
    example = EVERY_STRUCTURE[name](3)
    precision = np.linalg.inv(example.dense)
    expected = np.diag(precision) if example.covariance.is_diagonal else precision
    assert_equal(example.covariance.precision(), expected)


GAINS: dict[str, Gain] = {
    "one": 1.0,
    "number": 0.7,
    "negative": -1.3,
    "zero": 0.0,
    "signs": tensor(np.array([0.5, -0.5, 2.0, 1.0, 1.5, -2.0])),
    "vector": tensor(np.array([0.5, -0.5, 0.0, 1.0, 1.5, -2.0])),
}
NOISES: dict[str, Noise] = {
    "none": 0.0,
    "number": 0.3,
    "vector": tensor(np.array([0.5, 0.0, 0.1, 0.0, 0.2, 1.0])),
    "Diagonal": df.Diagonal(tensor(np.arange(1.0, 7.0))),
    "Blocks of Diagonal": df.Blocks(
        (df.Diagonal(tensor(np.arange(1.0, 3.0))), df.Diagonal(tensor(np.arange(1.0, 5.0))))
    ),
}


def assert_propagates(example: Example, gain: Gain, noise: Noise) -> None:
    G = dense_map(gain, SIZE)
    added = dense_map(noise if isinstance(noise, (float, Tensor)) else noise.dense(), SIZE)
    assert_represents(example.covariance.propagate(gain, noise), G @ example.dense @ G.T + added)
    assert_equal(example.covariance.dense(), example.dense)


NOTHING_LEFT = [
    ("zero", "none"),
    ("vector", "none"),
    ("zero", "vector"),
]  # a gain of 0 without noise


@every_structure
@pytest.mark.parametrize(
    ("gain", "noise"), [pair for pair in product(GAINS, NOISES) if pair not in NOTHING_LEFT]
)
def test_propagate_diagonal_gain_and_noise(name: str, gain: str, noise: str) -> None:
    assert_propagates(STRUCTURES[name](4), GAINS[gain], NOISES[noise])


@every_structure
@pytest.mark.parametrize("gain", GAINS)
def test_propagate_with_noise_of_the_same_structure(name: str, gain: str) -> None:
    """As Stationary() makes it: a number of times the source covariance."""
    assert_propagates(STRUCTURES[name](5), GAINS[gain], STRUCTURES[name](6).covariance)


@pytest.mark.parametrize("name", ["Full", "Blocks of Full", "mixed Blocks", "nested Blocks"])
def test_propagate_with_matrices_that_fit_the_structure(name: str) -> None:
    """Mixed blocks take the diagonal pieces of a matrix where a part is diagonal or low rank."""
    example, mixing = STRUCTURES[name](7), np.zeros((SIZE, SIZE))
    mixing[:2, :2] = 1.0
    fits = example.kept if name != "mixed Blocks" else np.maximum(mixing, np.eye(SIZE))
    gain, noise = normals(SIZE, SIZE, seed=8) * fits, spd(SIZE, seed=9) * fits
    assert_propagates(example, tensor(gain), tensor(noise))
    assert_propagates(example, tensor(gain), 0.1)
    assert_propagates(example, 0.9, tensor(noise))


def test_propagate_across_blocks_of_other_sizes() -> None:
    example = STRUCTURES["Blocks of Full"](0)
    noise = df.Blocks(
        (df.Full(tensor(spd(1, 1))), df.Full(tensor(spd(1, 2))), df.Full(tensor(spd(4, 3))))
    )
    assert_propagates(example, 0.5, noise)


@every_structure
@pytest.mark.parametrize(
    "index",
    [slice(0, 6), slice(1, 4), slice(4, None), torch.tensor([0, 2, 5]), torch.arange(6) % 2 == 1],
    ids=["whole", "slice", "tail", "index", "mask"],
)
def test_marginal_is_the_block_of_the_covariance(name: str, index: slice | Tensor) -> None:
    example = STRUCTURES[name](10)
    chosen = array(torch.arange(SIZE)[index]).astype(int)
    assert_represents(example.covariance.marginal(index), example.dense[np.ix_(chosen, chosen)])


@really_every
def test_sample_has_the_covariance(name: str) -> None:
    example = EVERY_STRUCTURE[name](11)
    draws = example.covariance.sample(40_000, torch.Generator().manual_seed(0))
    assert draws.shape == (40_000, SIZE)
    assert_moments(array(draws), np.zeros(SIZE), example.dense)


@pytest.mark.parametrize("samples", [1, 2, 7, 8])
def test_antithetic_draws_come_in_pairs_of_the_right_covariance(samples: int) -> None:
    example = STRUCTURES["Full"](12)
    draws = antithetic(example.covariance, samples, torch.Generator().manual_seed(0))
    half = (samples + 1) // 2
    assert draws.shape == (samples, SIZE)
    first = example.covariance.sample(half, torch.Generator().manual_seed(0))
    assert_same(draws, torch.cat((first, -first[: samples - half])))


def test_positive_root_sets_negative_eigenvalues_to_zero() -> None:
    rotation = np.linalg.qr(normals(3, 3, seed=0))[0]
    matrix = rotation @ np.diag([-2.0, 0.5, 3.0]) @ rotation.T
    root = positive_root(tensor(np.stack([matrix, -matrix])))
    expected = [
        rotation @ np.diag(values) @ rotation.T for values in ([0.0, 0.5, 3.0], [2.0, 0.0, 0.0])
    ]
    assert_equal(root @ root.mT, np.stack(expected), 1e-12)


def test_the_root_of_an_average_has_no_noise_of_the_size_of_its_rounding() -> None:
    row = normals(1, 4, seed=0)
    matrix = tensor(row.T @ row) + 1e-17 * torch.eye(4, dtype=torch.float64)
    assert positive_root(matrix, averaged=True).count_nonzero() == 4
    assert positive_root(matrix).abs().max(0).values[:3].max() > 1e-10


def test_a_signed_root_is_the_whole_matrix() -> None:
    matrices = normals(2, 4, 4, seed=0)
    matrices = matrices + matrices.swapaxes(-1, -2)
    root, signs = signed_root(tensor(matrices))
    assert_equal((root * signs[..., None, :]) @ root.mT, matrices, 1e-12)


@pytest.mark.parametrize("rows", [3, 9], ids=["few", "more than columns"])
def test_positive_factor_is_the_positive_part_of_signed_rows(rows: int) -> None:
    each, signs = normals(2, rows, 5, seed=0), np.sign(normals(2, rows, seed=1))
    factor = positive_factor(tensor(each), tensor(signs))
    whole = np.einsum("bmd,bm,bme->bde", each, signs, each)
    values, vectors = np.linalg.eigh(whole)
    assert values.min() < -0.5
    expected = np.einsum("bdj,bj,bej->bde", vectors, np.maximum(values, 0), vectors)
    assert factor.shape == (2, min(rows, 5), 5)
    assert_equal(factor.mT @ factor, expected, 1e-12)


@every_structure
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_sequence_of_moves_and_batches_stays_positive_definite(
    name: str, data: st.DataObject
) -> None:
    """Against the same recursion on dense matrices in double precision, from any order of
    operations.
    """
    example = STRUCTURES[name](13)
    covariance, dense = example.covariance, example.dense
    for _ in range(data.draw(st.integers(1, 6))):
        if data.draw(st.booleans()):
            size = data.draw(st.floats(1e-3, 1e3))
            factor = (
                normals(data.draw(st.integers(1, 8)), SIZE, seed=data.draw(st.integers(0, 99)))
                * size
            )
            covariance, dense = (
                covariance.condition(tensor(factor)).truncate(),
                conditioned(dense, factor, example.kept),
            )
        else:
            gain = data.draw(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 1.05]))
            noise = data.draw(st.floats(1e-3, 1.0))
            covariance, dense = (
                covariance.propagate(gain, noise),
                gain * gain * dense + noise * np.eye(SIZE),
            )
        assert covariance.variance().min() > 0
        torch.linalg.cholesky(covariance.dense())
        assert_equal(covariance.dense(), dense, 1e-8)


@pytest.mark.parametrize("rows", [1, 3, 30])
@pytest.mark.parametrize(
    "gain", [1.03, tensor(np.linspace(1.01, 1.05, 21))], ids=["number", "vector"]
)
def test_forgetting_for_long_does_not_blow_up_rounding_errors(gain: Gain, rows: int) -> None:
    """Against the recursion of the precision, P ← G⁻¹ P G⁻¹ + FᵀF, which forgets its errors.

    An antisymmetric error of the covariance would grow by G² a step, in 400 steps by 10¹⁰. At d =
    21 the products of vectorised code are not symmetric to the last bit.
    """
    covariance = df.Full(tensor(spd(21, 16) + 1e-7 * np.triu(np.ones((21, 21)), 1)))
    precision = np.linalg.inv(array(covariance.matrix))
    scale = np.full(21, gain) if isinstance(gain, float) else array(gain)
    for factor in normals(400, rows, 21, seed=17):
        covariance = covariance.propagate(gain, 0.0).condition(tensor(factor))
        precision = precision / np.outer(scale, scale) + factor.T @ factor
    assert torch.equal(covariance.matrix, covariance.matrix.mT)
    assert_equal(covariance.dense(), np.linalg.inv(precision), 1e-11)


@every_structure
@pytest.mark.parametrize("rows", [1, 3, 6, 20])
@pytest.mark.parametrize("exponent", [1, 3, 5, 9, 15, 19, 25, 38])
def test_float32_never_loses_positive_definiteness(name: str, rows: int, exponent: int) -> None:
    """Either an error, or a valid covariance: at least 1 / precision, at most the prior, nearly 0
    along what was seen.
    """
    example = STRUCTURES[name](14)
    factor = (tensor(normals(rows, SIZE, seed=15)).clamp(-3, 3) * 10.0**exponent).float()
    directions = torch.nn.functional.normalize(factor.double()).float()
    try:
        posterior = map_tensors(example.covariance, Tensor.float).condition(factor)
        seen = (posterior.apply(directions) * directions).sum(-1)
        variance, posterior = posterior.variance(), posterior.truncate()
    except df.NotPositiveDefiniteError:
        return
    assert_valid(posterior)
    energy = np.square(array(factor))
    assert (array(variance) > 0.5 / (np.diag(np.linalg.inv(example.dense)) + energy.sum(0))).all()
    assert (array(variance) <= 1.001 * np.diag(example.dense)).all()
    assert (array(seen) <= SIZE / energy.sum(1) + 1e-3).all()


def assert_valid(covariance: Any) -> None:
    """The checks of the constructor, which results of the algebra do not run."""
    for part in covariance.independent_parts():
        assert_valid(part)
    replace(covariance)


def full(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


EYE = torch.eye(2, dtype=torch.float64)
ONES = torch.ones(2, dtype=torch.float64)
PAIR = df.Blocks((df.Diagonal(ONES[:1]), df.Diagonal(ONES[:1])))


test_what_cannot_be_is_refused = refuses(
    [
        (lambda: df.Full(full((1.0, 2.0), (2.0, 1.0))), "Full.matrix is not positive definite"),
        (lambda: df.Full(full((1.0, 0.0), (0.0, 0.0))), "Full.matrix is not positive definite"),
        (
            lambda: df.Full(full((1.0, 0.2), (0.1, 1.0))),
            r"Full.matrix must be symmetric, got 'asymmetry 0.1",
        ),
        (
            lambda: df.Full(full((1.0, math.nan), (0.0, 1.0))),
            r"Full.matrix must be finite, got nan at index \[0, 1\]",
        ),
        (
            lambda: df.Full(full((math.inf, 0.0), (0.0, 1.0))),
            r"Full.matrix must be finite, got inf at index \[0, 0\]",
        ),
        (
            lambda: df.Full(torch.ones(2, 3)),
            r"Full.matrix must be of shape \[d, d\], got shape \[2, 3\]",
        ),
        (lambda: df.Full(torch.ones(2)), r"Full.matrix must be of shape \[d, d\], got shape \[2\]"),
        (
            lambda: df.Full(torch.ones(0, 0)),
            r"Full.matrix must be of shape \[d, d\], got shape \[0, 0\]",
        ),
        (
            lambda: df.Full(torch.eye(2, dtype=torch.float16)),
            "Full.matrix must be float32 or float64, got torch.float16",
        ),
        (lambda: df.Full([[1.0]]), r"Full.matrix must be a tensor of shape \[d, d\], got list"),  # type: ignore[arg-type]
        (
            lambda: df.Diagonal(full((1.0,))),
            r"Diagonal.values must be of shape \[d\], got shape \[1, 1\]",
        ),
        (
            lambda: df.Diagonal(torch.tensor([1.0, 0.0])),
            "Diagonal.values must be > 0, got a smallest value of 0",
        ),
        (
            lambda: df.Diagonal(torch.tensor([1.0, -2.0])),
            "Diagonal.values must be > 0, got a smallest value of -2",
        ),
        (
            lambda: df.Diagonal(torch.tensor([math.nan])),
            r"Diagonal.values must be finite, got nan at index \[0\]",
        ),
        (
            lambda: df.Diagonal(torch.tensor([1, 2])),
            "Diagonal.values must be float32 or float64, got torch.int64",
        ),
        (lambda: df.Blocks(()), r"Blocks.parts must be one covariance or more, got \(\)"),
        (lambda: df.Blocks((EYE,)), "Blocks.parts must be one covariance or more"),  # type: ignore[arg-type]
        (
            lambda: df.Blocks((df.Diagonal(ONES), df.Diagonal(ONES.float()))),
            r"Blocks.parts must be covariances of one dtype, got \[torch.float64, torch.float32\]",
        ),
        (
            lambda: PAIR.marginal(torch.tensor([1, 0])),
            "Blocks.marginal index must be in ascending order",
        ),
        (
            lambda: df.Diagonal(ONES).propagate(EYE, 0.0),
            "Diagonal cannot carry a dynamic that mixes .* use Full or Blocks",
        ),
        (
            lambda: df.Diagonal(ONES).propagate(1.0, EYE),
            "Diagonal cannot carry noise that correlates .* use Full or Blocks",
        ),
        (
            lambda: df.Diagonal(ONES).propagate(1.0, df.Full(EYE)),
            "Diagonal cannot carry noise .* use Full or Blocks",
        ),
        (
            lambda: PAIR.propagate(1 + EYE, 0.0),
            "Blocks cannot carry a dynamic that mixes blocks; use Full, or blocks that",
        ),
        (
            lambda: PAIR.propagate(1.0, 1 + EYE),
            "Blocks cannot carry noise that correlates blocks; use Full, or blocks that",
        ),
        (
            lambda: PAIR.propagate(1.0, df.Full(1 + EYE)),
            "Blocks cannot carry noise that correlates blocks; use Full",
        ),
        (
            lambda: df.Diagonal(1e-300 * ONES).condition(1e200 * EYE),
            "no posterior variance is left",
        ),
        (
            lambda: df.Full(EYE).condition(1e200 * EYE[:1]),
            r"1 \+ F Σ Fᵀ must be positive and finite, got inf",
        ),
        (
            lambda: df.Full(EYE).propagate(0.0, 0.0).condition(EYE[:1]),
            "the covariance is not positive definite",
        ),
        (
            lambda: df.Blocks.isotropic_like(1.0, torch.zeros(2)),
            "Blocks cannot carry a start by its name; use",
        ),
    ]
)


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_float32_keeps_the_mean_step_where_the_data_are_strong(rows: int) -> None:
    """Σ g for g in the span of F: a Σ rounded to float32 would leave a tenth of it wrong."""
    factor = 1e3 * torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))
    gradient = torch.randn(rows, generator=torch.Generator().manual_seed(9)) @ factor
    posterior = df.Full(torch.eye(6)).condition(factor)
    exact = (
        torch.linalg.inv(torch.eye(6).double() + factor.double().mT @ factor.double())
        @ gradient.double()
    )
    assert (posterior.apply(gradient).double() - exact).norm() < 1e-5 * exact.norm()
    assert posterior.dtype == posterior.apply(gradient).dtype == torch.float32
    torch.testing.assert_close(posterior.truncate().dense(), posterior.dense())

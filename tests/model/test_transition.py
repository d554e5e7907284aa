from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

import driftfilter as df
from oracles import (
    MOTIONS,
    NOISES,
    Array,
    Moments,
    Part,
    System,
    array,
    assert_covariance,
    assert_equal,
    assert_moments,
    belief,
    conditioned,
    kalman_update,
    normals,
    spd,
    tensor,
)
from small import moments, refuses

SOURCE = Moments(normals(3, seed=1), spd(3, 2))
BLOCKS = [
    (Part("LocalTrend 1", "Isotropic", 1), Part("MeanReversion", "Discount", 2)),
    (Part("RandomWalk", "Discount", 1), Part("PrecisionReversion", "Stationary", 2)),
    (Part("RandomWalk", "Reset", 1), Part("RandomWalk", "NoNoise", 2)),
    (Part("Seasonal Nyquist", "FullNoise", 2), Part("MeanReversion", "Restore", 1)),
    (Part("Affine matrix", "Reset", 2), Part("LocalTrend 2", "Discount", 1)),
]


def can_pair(motion: str, noise: str) -> bool:
    if noise == "Stationary":
        return motion not in ("LocalTrend 1", "LocalTrend 2")
    return noise != "Restore" or motion == "MeanReversion"


PAIRS = [
    (Part(motion, noise, 3),)
    for motion, noise in product(MOTIONS, NOISES)
    if can_pair(motion, noise)
]
STREAMS = [
    ("RandomWalk", "Isotropic"),
    ("MeanReversion", "Stationary"),
    ("MeanReversion", "Restore"),
    ("PrecisionReversion", "Stationary"),
    ("LocalTrend 1", "FullNoise"),
    ("LocalTrend 2", "Isotropic"),
    ("Seasonal 1", "Discount"),
    ("Seasonal 3", "NoNoise"),
    ("Seasonal Nyquist", "Isotropic"),
    ("Affine number", "Reset"),
    ("Affine vector", "NoNoise"),
    ("Affine matrix", "Discount"),
]


def title(parts: tuple[Part, ...]) -> str:
    return " + ".join(f"{part.motion}, {part.noise}" for part in parts)


def assert_belief(actual: df.Belief, expected: Moments, tolerance: float = 1e-10) -> None:
    assert_equal(actual.mean, expected.mean, tolerance)
    assert_equal(actual.covariance.dense(), expected.covariance, tolerance)


# The filter against the exact Kalman filter -------------------------------------------------------


def residual(theta: Tensor, inputs: Tensor) -> Tensor:
    """y - h·θ for inputs [h, y], as a single logit."""
    return inputs[:, -1:] - inputs[:, :-1] @ theta[:, None]


def half_square(logits: Tensor) -> Tensor:
    return 0.5 * logits.square().sum(-1)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [*[(Part(*pair, 3),) for pair in STREAMS], *BLOCKS], ids=title)
def test_linear_gaussian_stream_is_the_kalman_filter(parts: tuple[Part, ...]) -> None:
    """200 steps of 1, 2 or 5 observations of variance 1/4; inputs carry √n/σ, since the energy is a
    batch mean.
    """
    system = System(parts, SOURCE)
    filt = df.Filter(
        residual, system.transition(), df.Gibbs(half_square), df.Linearized(df.Hessian())
    )
    state, exact = filt.init(belief(SOURCE)), system.source
    for step in range(200):
        count = (1, 2, 5)[step % 3]
        design, targets = (
            normals(count, 3, seed=step),
            np.sin(step / 9) + normals(count, seed=1000 + step),
        )
        inputs = np.sqrt(count / 0.25) * np.column_stack([design, targets])
        state, _, info = filt.step(state, tensor(inputs))
        exact = kalman_update(system.predict(exact), design @ system.read_out, targets, 0.25)
        assert info.informative
        assert_belief(state.belief, exact)


def test_the_streams_cover_every_dynamic_and_noise() -> None:
    assert {motion for motion, _ in STREAMS} == set(MOTIONS) - {"LocalTrend 0"}
    assert {noise for _, noise in STREAMS} == set(NOISES)


# One move, every dynamic with every noise and every structure -------------------------------------


@pytest.mark.parametrize("parts", [*PAIRS, *BLOCKS], ids=title)
def test_moves_mean_and_covariance(parts: tuple[Part, ...]) -> None:
    """From a belief that is not the source, several times over."""
    system = System(parts, SOURCE)
    transition, source = system.transition(), belief(system.source)
    exact = Moments(
        system.source.mean + 0.5,
        conditioned(
            system.source.covariance, normals(2, len(system.source.mean), seed=3), np.ones(1)
        ),
    )
    moving = belief(exact)
    for _ in range(5):
        moving, exact = transition(moving, source), system.predict(exact)
        assert_belief(moving, exact)


SIMPLE = ["RandomWalk", "MeanReversion", "PrecisionReversion", "Affine number", "Affine vector"]
SPLIT = [
    (Part("RandomWalk", "Discount", 2), Part("PrecisionReversion", "Stationary", 4)),
    (Part("MeanReversion", "Stationary", 2), Part("MeanReversion", "Restore", 4)),
    (Part("Affine vector", "Isotropic", 2), Part("RandomWalk", "Reset", 4)),
    (Part("MeanReversion", "Discount", 2), Part("Affine number", "Discount", 4)),
]
VARIANCES = np.array([0.5, 1.0, 2.0, 0.8, 1.5, 0.7])
STRUCTURED: dict[str, df.Covariance] = {
    "Diagonal": df.Diagonal(tensor(VARIANCES)),
    "LowRank": df.LowRank(tensor(1 / VARIANCES), torch.zeros(0, 6).double(), rank=6),
    "Blocks of Full": df.Blocks((df.Full(tensor(spd(2, 0))), df.Full(tensor(spd(4, 1))))),
    "mixed Blocks": df.Blocks((df.Full(tensor(spd(2, 0))), df.Diagonal(tensor(VARIANCES[2:])))),
}


@pytest.mark.parametrize("structure", STRUCTURED)
@pytest.mark.parametrize(
    "parts",
    [
        *[
            (Part(*pair, 6),)
            for pair in product(SIMPLE, NOISES)
            if pair[1] != "FullNoise" and can_pair(*pair)
        ],
        *SPLIT,
    ],
    ids=title,
)
def test_moves_every_structure(structure: str, parts: tuple[Part, ...]) -> None:
    """What a structure can carry it carries exactly: no correlation is lost or made up."""
    covariance = STRUCTURED[structure]
    source = df.Belief(tensor(normals(6, seed=5)), covariance)
    system = System(parts, Moments(array(source.mean), array(covariance.dense())))
    moving = df.Belief(
        source.mean + 1, covariance.condition(tensor(normals(3, 6, seed=6))).truncate()
    )
    exact = Moments(array(moving.mean), array(moving.covariance.dense()))
    for _ in range(3):
        moving, exact = system.transition()(moving, source), system.predict(exact)
        assert type(moving.covariance) is type(covariance)
        assert_belief(moving, exact)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in MOTIONS
        if name.startswith(("LocalTrend", "Seasonal")) and name != "LocalTrend 0"
    ],
)
def test_blocks_of_full_carry_hidden_states_part_by_part(name: str) -> None:
    """As Full does, when the parts of the dynamic are the blocks of the belief."""
    blocks = df.Blocks((df.Full(tensor(spd(1, 0))), df.Full(tensor(spd(2, 1)))))
    parameters = Moments(normals(3, seed=2), array(blocks.dense()))
    system = System((Part("RandomWalk", "Isotropic", 1), Part(name, "Discount", 2)), parameters)
    source = system.transition().augment(df.Belief(tensor(parameters.mean), blocks))
    assert_belief(source, system.source)
    moving, exact = source, system.source
    for _ in range(3):
        moving, exact = system.transition()(moving, source), system.predict(exact)
        assert_belief(moving, exact)


def test_noise_leaves_the_covariance_symmetric_to_the_last_bit() -> None:
    """Conditioning would keep an asymmetry for ever."""
    noise = df.FullNoise((spd(3, 0) + 1e-6 * np.triu(np.ones((3, 3)), 1)).tolist())
    matrix = df.Transition(noise=noise)(belief(SOURCE), belief(SOURCE)).covariance.dense()
    assert torch.equal(matrix, matrix.mT)


# Hidden states ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parts", [*[(Part(name, "NoNoise", 3),) for name in MOTIONS], *BLOCKS], ids=title
)
def test_parameters_read_out_of_the_augmented_belief(parts: tuple[Part, ...]) -> None:
    """Before the first step they are as given; harmonics add their prior variance to the
    parameter.
    """
    system = System(parts, SOURCE)
    transition = system.transition()
    augmented, matrix = transition.augment(belief(SOURCE)), transition.read_out(3)
    assert_belief(augmented, system.source)
    if matrix is None:
        assert augmented.dimension == 3
        return
    assert_equal(matrix, system.read_out)
    assert_equal(matrix @ augmented.mean, SOURCE.mean)
    waves = [sum(motion.read_out[1:]) * 0.3**2 for motion in system.motions]
    added = np.diag(np.repeat(waves, [part.size for part in parts]))
    assert_equal(matrix @ augmented.covariance.dense() @ matrix.mT, SOURCE.covariance + added)


# Prior paths --------------------------------------------------------------------------------------


def assert_paths(transition: df.Transition, source: df.Belief, kept: Array | None) -> None:
    """Moments of sampled paths are those of repeated moves, and two steps covary as the gain says
    (``kept`` = √keep G).
    """
    paths = array(transition.sample_states(source, steps=3, count=20_000, seed=7))
    assert paths.shape == (20_000, 4, source.dimension)
    moving = source
    for step in range(4):
        exact = Moments(array(moving.mean), array(moving.covariance.dense()))
        assert_moments(paths[:, step], *exact)
        moving = transition(moving, source)
        if kept is not None and step < 3:
            now, then = paths[:, step] - exact.mean, paths[:, step + 1] - array(moving.mean)
            assert_covariance(then, now, kept @ exact.covariance)


@pytest.mark.parametrize("parts", [*PAIRS, *BLOCKS], ids=title)
def test_sampled_paths_have_the_moments_of_the_filter(parts: tuple[Part, ...]) -> None:
    system = System(parts, SOURCE)
    resets = np.repeat([part.noise == "Reset" for part in parts], system.states)
    assert_paths(
        system.transition(), belief(system.source), np.where(resets[:, None], 0.0, system.gain)
    )


@pytest.mark.parametrize("structure", STRUCTURED)
@pytest.mark.parametrize(
    "parts", [(Part("MeanReversion", "Stationary", 6),), *SPLIT[1:]], ids=title
)
def test_sampled_paths_of_every_structure(structure: str, parts: tuple[Part, ...]) -> None:
    covariance = STRUCTURED[structure].condition(tensor(normals(2, 6, seed=8)))
    source = df.Belief(tensor(normals(6, seed=5)), covariance)
    system = System(parts, Moments(array(source.mean), array(covariance.dense())))
    assert_paths(system.transition(), source, None)


def test_sampled_paths_are_reproducible() -> None:
    transition = df.Transition(df.MeanReversion(0.9), df.Isotropic(0.1))
    first, again, other = (
        transition.sample_paths(belief(SOURCE), 4, 2, seed=seed) for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# Stochastic restore -------------------------------------------------------------------------------


def test_restore_has_the_moments_of_the_mixture_over_all_jumps() -> None:
    """Sum over the 2³ outcomes of which parameters jump back to the source."""
    rho, before = 0.7, Moments(np.array([1.0, -2.0, 0.5]), spd(3, 4))
    mean, second = np.zeros(3), np.zeros((3, 3))
    for stays in product([0.0, 1.0], repeat=3):
        stay = np.array(stays)
        weight = np.prod(np.where(stay == 1, rho, 1 - rho))
        center = stay * before.mean + (1 - stay) * SOURCE.mean
        mean += weight * center
        second += weight * (np.outer(stay, stay) * before.covariance + np.outer(center, center))
    restored = df.Transition(df.MeanReversion(rho), df.Restore())(belief(before), belief(SOURCE))
    assert_belief(restored, Moments(mean, second - np.outer(mean, mean)), 1e-12)


def test_restore_has_the_moments_of_simulated_jumps() -> None:
    """Five steps of real jumps: the draws are not Gaussian, their mean and covariance are those of
    the filter.
    """
    rng = np.random.default_rng(0)
    before = Moments(np.array([1.0, -2.0, 0.5]), spd(3, 4))
    draws = rng.multivariate_normal(before.mean, before.covariance, 100_000)
    moving, transition = belief(before), df.Transition(df.MeanReversion(0.7), df.Restore())
    for _ in range(5):
        draws = np.where(rng.random(draws.shape) < 0.7, draws, SOURCE.mean)
        moving = transition(moving, belief(SOURCE))
        assert_moments(draws, array(moving.mean), array(moving.covariance.dense()))


# Refusals -----------------------------------------------------------------------------------------

THREE = belief(SOURCE)
DIAGONAL = df.Belief(torch.zeros(3), df.Diagonal(torch.full((3,), 1e-6)))
LOW_RANK = df.Belief(torch.zeros(3), df.LowRank.isotropic(1.0, 3, 2))
CORRELATED = df.Belief(torch.zeros(3), df.LowRank(torch.ones(3), torch.ones(1, 3), 2))
ONE_BLOCK = df.Belief(THREE.mean, df.Blocks((THREE.covariance,)))
TREND = df.Transition(df.LocalTrend())
SINGULAR = df.Transition(noise=df.FullNoise(((1.0, 1.0), (1.0, 1.0))))
STATES = (
    "whose hidden states correlate with the parameters; use Full, or Blocks of Full with "
    "BlockDynamics of the same sizes"
)


def parts(*sizes: int) -> df.Transition:
    return df.Transition(df.BlockDynamics(sizes, tuple(df.Transition() for _ in sizes)))


test_what_cannot_be_is_refused = refuses(
    [
        (lambda: TREND.augment(DIAGONAL), f"Diagonal cannot carry LocalTrend, {STATES}"),
        (lambda: TREND.augment(LOW_RANK), f"LowRank cannot carry LocalTrend, {STATES}"),
        (lambda: TREND.augment(ONE_BLOCK), f"Blocks cannot carry LocalTrend, {STATES}"),
        (
            lambda: df.Transition(df.Seasonal()).augment(DIAGONAL),
            f"Diagonal cannot carry Seasonal, {STATES}",
        ),
        (
            lambda: df.Transition(df.BlockDynamics((1, 2), (df.Transition(), TREND))).augment(
                ONE_BLOCK
            ),
            f"Blocks cannot carry BlockDynamics, {STATES}",
        ),
        (lambda: df.Filter(residual, TREND).init(DIAGONAL), "Diagonal cannot carry LocalTrend"),
        (
            lambda: TREND(THREE, THREE),
            "source belief must be over the augmented state, a multiple of 2 .* got 'dimension 3'",
        ),
        (
            lambda: df.Transition(df.RandomWalk(), df.FullNoise(spd(3, 0).tolist()))(
                DIAGONAL, DIAGONAL
            ),
            "Diagonal cannot carry noise that correlates coordinates; use Full or Blocks",
        ),
        (
            lambda: df.Transition(df.RandomWalk(), df.FullNoise(spd(3, 0).tolist()))(
                LOW_RANK, LOW_RANK
            ),
            "LowRank cannot carry noise given as a matrix; use Full, or diagonal noise",
        ),
        (
            lambda: df.Transition(df.BlockDynamics((1, 2), (df.Transition(), SINGULAR)))(
                DIAGONAL, DIAGONAL
            ),
            "Diagonal cannot carry noise that correlates coordinates; use Full or Blocks",
        ),
        (
            lambda: df.Transition(df.RandomWalk(), df.FullNoise(spd(2, 0).tolist()))(THREE, THREE),
            r"FullNoise.matrix must be of length 3 .* got 'shape \[2, 2\]'",
        ),
        (
            lambda: df.FullNoise(((1.0, 0.2), (0.1, 1.0))),
            "FullNoise.matrix must be symmetric, got 'asymmetry 0.1'",
        ),
        (
            lambda: df.FullNoise(((1.0, 2.0), (2.0, 1.0))),
            "FullNoise.matrix must be positive semi-definite, got 'smallest eigenvalue -1'",
        ),
        (
            lambda: df.FullNoise((1.0, -2.0)),
            r"FullNoise.matrix must be positive semi-definite, got 'smallest eigenvalue -2'",
        ),
        (
            lambda: df.FullNoise(((1.0, 2.0),)),
            r"FullNoise.matrix must be a matrix \[d, d\] or a vector .* got 'shape \[1, 2\]'",
        ),
        (
            lambda: df.FullNoise(((1.0, 0.0), (1.0,))),
            "FullNoise.matrix must be .* rows of equal length, got",
        ),
        (
            lambda: df.Isotropic(-1.0),
            r"Isotropic.variance must be a finite number in \[0, inf\), got -1.0",
        ),
        (
            lambda: df.Isotropic(np.nan),
            r"Isotropic.variance must be a finite number in \[0, inf\), got nan",
        ),
        (lambda: df.Discount(0.0), r"Discount.delta must be a finite number in \(0, 1\], got 0.0"),
        (
            lambda: df.Discount(1.01),
            r"Discount.delta must be a finite number in \(0, 1\], got 1.01",
        ),
        (lambda: df.Reset(0.0), r"Reset.variance must be a finite number in \(0, inf\), got 0.0"),
        (
            lambda: df.Transition(df.Affine(-1.1), df.Stationary())(THREE, THREE),
            r"Stationary: the gain must be at most 1 in size \(a stable dynamic\), got -1.1",
        ),
        (
            lambda: df.Transition(df.Affine((0.5, 0.5, 1.5)), df.Stationary())(DIAGONAL, DIAGONAL),
            "Stationary: the gain must be one with G Σ₀ Gᵀ <= Σ₀, got 'a dynamic that is not "
            "stable .*noise -1.25 of",
        ),
        (
            lambda: df.Transition(df.LocalTrend(), df.Stationary())(
                TREND.augment(THREE), TREND.augment(THREE)
            ),
            "Stationary: the gain must be one with G Σ₀ Gᵀ <= Σ₀",
        ),
        (
            lambda: df.Transition(df.PrecisionReversion(0.1), df.Stationary())(
                CORRELATED, CORRELATED
            ),
            "LowRank cannot carry a dense precision; use Full, or a source without low-rank part",
        ),
        (
            lambda: df.Transition(df.PrecisionReversion(), df.Restore())(THREE, THREE),
            r"Restore: the gain must be a number in \[0, 1\), which is 1 - p \(use MeanReversion\)",
        ),
        (
            lambda: parts(1, 1)(THREE, THREE),
            r"BlockDynamics.sizes must be sizes that add up to the 3 .* got \(1, 1\)",
        ),
        (
            lambda: parts(2, 2).augment(THREE),
            r"BlockDynamics.sizes must be sizes that add up to 3 .* got \(2, 2\)",
        ),
        (
            lambda: df.BlockDynamics((), ()),
            r"BlockDynamics.sizes must be one or more integers >= 1, got \(\)",
        ),
        (
            lambda: df.BlockDynamics((0,), (df.Transition(),)),
            r"BlockDynamics.sizes must be .* got \(0,\)",
        ),
        (
            lambda: df.BlockDynamics((1, 2), (df.Transition(),)),
            "BlockDynamics.parts must be 2 transitions",
        ),
        (
            lambda: df.BlockDynamics((3,), (df.RandomWalk(),)),  # type: ignore[arg-type]
            r"BlockDynamics.parts must be 1 transitions, one for each size, got "
            r"\(RandomWalk\(\),\)",
        ),
        (
            lambda: df.Transition(parts(3).dynamics, df.Isotropic())(THREE, THREE),
            r"Transition.noise must be NoNoise\(\) under BlockDynamics, .* got Isotropic",
        ),
        (
            lambda: df.Transition(df.Isotropic()),  # type: ignore[arg-type]
            "Transition.dynamics must be of role .dynamics., such as",
        ),
        (
            lambda: df.Transition(df.RandomWalk),  # type: ignore[arg-type]
            "Transition.dynamics must be of role .dynamics., such as",
        ),
        (
            lambda: df.Transition(noise=df.RandomWalk()),  # type: ignore[arg-type]
            "Transition.noise must be of role .noise., such as",
        ),
        (
            lambda: TREND.sample_paths(THREE, -1, 1),
            "sample_paths: steps must be an integer >= 0, got -1",
        ),
        (
            lambda: TREND.sample_paths(THREE, 1, 0),
            "sample_paths: count must be an integer >= 1, got 0",
        ),
    ]
)


@pytest.mark.parametrize(
    "covariance",
    [
        df.Full(torch.eye(3).double()),
        df.Diagonal(torch.ones(3).double()),
        df.LowRank.isotropic(1.0, 3, 1, torch.zeros(1).double()),
    ],
    ids=lambda covariance: type(covariance).__name__,
)
def test_a_vector_of_noise_is_the_diagonal_of_its_matrix(covariance: df.Covariance) -> None:
    source, variances = df.Belief(tensor(SOURCE.mean), covariance), (0.1, 0.0, 2.0)
    moved = df.Transition(df.MeanReversion(0.5), df.FullNoise(variances))(source, source)
    assert_equal(moved.covariance.dense(), np.diag([0.35, 0.25, 2.25]))


@pytest.mark.parametrize(
    "dynamics", [df.RandomWalk(), df.LocalTrend(2), df.Seasonal(6, 3)], ids=repr
)
def test_paths_of_the_parameters_are_read_out_of_those_of_the_states(dynamics: df.Dynamics) -> None:
    transition = df.Transition(dynamics, df.Isotropic(0.1))
    states = transition.sample_states(transition.augment(belief(SOURCE)), 3, 5, seed=1)
    matrix = transition.read_out(3)
    expected = states if matrix is None else torch.einsum("ds,cts->ctd", matrix, states)
    assert_equal(transition.sample_paths(belief(SOURCE), 3, 5, seed=1), array(expected))


@pytest.mark.parametrize("structure", ["full", "diagonal", "low_rank", "blocks"])
def test_a_reset_without_a_variance_is_to_the_source(structure: str) -> None:
    """The mean goes its way, the covariance is the source's again, whatever a batch has made of
    it.
    """
    matrix = torch.diag(torch.tensor([0.5, 0.2, 0.9], dtype=torch.float64))
    if structure in ("full", "blocks"):
        matrix[1, 2] = matrix[2, 1] = 0.1
    built: dict[str, df.Covariance] = {
        "full": df.Full(matrix),
        "diagonal": df.Diagonal(matrix.diagonal()),
        "low_rank": df.LowRank(
            matrix.diagonal().reciprocal(), torch.tensor([[0.3, 0.0, 1.0]]).double(), rank=2
        ),
        "blocks": df.Blocks((df.Diagonal(matrix[0, :1]), df.Full(matrix[1:, 1:]))),
    }
    covariance = built[structure]
    mean = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    source = df.Belief(mean, covariance)
    moved = df.Belief(
        2 * mean, covariance.condition(torch.tensor([[0.0, 3.0, 1.0]], dtype=torch.float64))
    )
    prior = df.Transition(df.MeanReversion(0.9), df.Reset(None))(moved, source)
    torch.testing.assert_close(moments(prior), (1.9 * mean, covariance.dense()))

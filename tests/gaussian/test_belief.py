import math

import numpy as np
import pytest
import torch
from torch import Tensor

import driftfilter as df
from driftfilter.gaussian.structures import STRUCTURES as STRUCTURE_NAMES
from oracles import EVERY_STRUCTURE, STRUCTURES, Allocations, array, assert_equal, normals, tensor
from small import refuses


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("index", [slice(0, 2), torch.tensor([1, 2, 5])], ids=["slice", "index"])
def test_marginal_picks_mean_and_block(name: str, index: slice | Tensor) -> None:
    example, mean = STRUCTURES[name](0), normals(6, seed=1)
    part = df.Belief(tensor(mean), example.covariance).marginal(index)
    chosen = array(torch.arange(6)[index]).astype(int)
    assert part.dimension == len(chosen)
    assert_equal(part.mean, mean[chosen])
    assert_equal(part.covariance.dense(), example.dense[np.ix_(chosen, chosen)])


def test_large_finite_values_are_finite() -> None:
    """Their sum overflows, they do not."""
    mean = torch.full((4,), 3e38)
    assert torch.equal(df.Belief(mean, df.Diagonal(torch.ones(4))).mean, mean)


@pytest.mark.parametrize("name", EVERY_STRUCTURE)
@pytest.mark.parametrize("other", EVERY_STRUCTURE)
def test_the_divergence_is_that_of_dense_normals(name: str, other: str) -> None:
    belief, source = (
        df.Belief(tensor(normals(6, seed=seed)), EVERY_STRUCTURE[structure](seed).covariance)
        for structure, seed in ((name, 0), (other, 1))
    )
    one, two = (
        torch.distributions.MultivariateNormal(
            each.mean, each.covariance.dense(), validate_args=False
        )
        for each in (belief, source)
    )
    exact = torch.distributions.kl_divergence(one, two)
    torch.testing.assert_close(df.kl_divergence(belief, source), exact, rtol=1e-9, atol=1e-12)


def test_the_divergence_of_point_masses() -> None:
    mean = torch.ones(3)
    point, spread = df.PointMass()(None, mean), df.Belief(mean, df.Diagonal(mean))  # type: ignore[arg-type]
    moved = df.Belief(mean + 1, point.covariance)
    assert point.covariance.is_degenerate
    assert df.kl_divergence(point, point) == 0
    assert (
        df.kl_divergence(moved, point)
        == df.kl_divergence(spread, point)
        == df.kl_divergence(point, spread)
        == math.inf
    )


@pytest.mark.parametrize("structure", ["diagonal", "low_rank", "kronecker"])
def test_the_divergence_forms_no_matrix(structure: str) -> None:
    """From data that source and belief have both seen: d² would be 1,600 times d."""
    mean, shapes = torch.zeros(1640), {"weight": torch.Size((40, 40)), "bias": torch.Size((40,))}
    start = STRUCTURE_NAMES[structure].isotropic_like(0.5, mean, 4, shapes)
    seen = [torch.tensor(normals(3, 1640, seed=seed), dtype=torch.float32) for seed in (0, 1)]
    source = df.Belief(mean, start.condition(seen[0]))
    belief = df.Belief(mean + 1, source.covariance.condition(seen[1]))
    with Allocations() as allocations:
        divergence = df.kl_divergence(belief, source)
    assert 0 < divergence < math.inf
    assert allocations.largest <= 6 * 1640


ONES = torch.ones(2)
UNIT = df.Diagonal(ONES)


test_what_cannot_be_is_refused = refuses(
    [
        (
            lambda: df.Belief(torch.ones(3), UNIT),
            "Belief.covariance must be of dimension 3, as the mean, got 'dimension 2'",
        ),
        (
            lambda: df.Belief(torch.ones(1, 2), UNIT),
            r"Belief.mean must be of shape \[d\], got shape \[1, 2\]",
        ),
        (
            lambda: df.Belief(torch.ones(0), UNIT),
            r"Belief.mean must be of shape \[d\], got shape \[0\]",
        ),
        (
            lambda: df.Belief([1.0, 1.0], UNIT),  # type: ignore[arg-type]
            r"Belief.mean must be a tensor of shape \[d\], got list",
        ),
        (
            lambda: df.Belief(torch.ones(2).long(), UNIT),
            "Belief.mean must be float32 or float64, got torch.int64",
        ),
        (
            lambda: df.Belief(torch.ones(2).bfloat16(), UNIT),
            "Belief.mean must be float32 or float64, got torch.bfloat16",
        ),
        (
            lambda: df.Belief(ONES.double(), UNIT),
            "Belief.covariance must be torch.float64, as the mean, got torch.float32",
        ),
        (
            lambda: df.Belief(ONES, df.Full(torch.eye(2).double())),
            "Belief.covariance must be torch.float32, as the mean",
        ),
        (
            lambda: df.Belief(ONES, df.LowRank.isotropic(1.0, 2, 1, like=ONES.double())),
            "Belief.covariance must be torch.float32, as the mean, got torch.float64",
        ),
        (
            lambda: df.Belief(torch.tensor([0.0, math.nan]), UNIT),
            r"Belief.mean must be finite, got nan at index \[1\] \(1 of 2 values\)",
        ),
        (
            lambda: df.Belief(torch.tensor([math.inf, -math.inf]), UNIT),
            r"Belief.mean must be finite, got inf at index \[0\] \(2 of 2 values\)",
        ),
        (
            lambda: df.Belief(ONES, torch.eye(2)),  # type: ignore[arg-type]
            r"Belief.covariance must be a covariance such as Full\(matrix\), got tensor",
        ),
    ]
)

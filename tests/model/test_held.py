"""Beliefs changed by hand: inflated, set and held coordinates, against dense algebra."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import driftfilter as df
from oracles import assert_equal, normals, spd, tensor

SIZE = 6
RESET = df.Transition(df.RandomWalk(), df.Reset())
WHERE = torch.tensor([False, True, True, False, False, True])


def beliefs() -> list[df.Belief]:
    mean, wide = tensor(normals(SIZE, seed=0)), tensor(normals(2, SIZE, seed=1))
    low = df.LowRank(torch.linspace(1, 2, SIZE).double(), wide, 4)
    covariances = (
        df.Full(tensor(spd(SIZE, seed=2))),
        df.Diagonal(torch.linspace(1, 3, SIZE).double()),
        low,
        df.Blocks((df.Full(tensor(spd(2, seed=3))), df.Full(tensor(spd(4, seed=4))))),
    )
    return [df.Belief(mean, covariance) for covariance in covariances]


def filter_of(**parts: Any) -> df.Filter:
    transition = df.Transition(df.MeanReversion(0.9), df.Isotropic(0.1))
    return df.Filter(df.LinearHead(3), transition=transition, **parts)


@pytest.mark.parametrize("belief", beliefs(), ids=lambda own: type(own.covariance).__name__)
def test_inflated_coordinates(belief: df.Belief) -> None:
    filt = filter_of()
    state = filt.init(belief)
    after = filt.intervene(state, WHERE, inflate=4.0)
    root = np.where(WHERE.numpy(), 2.0, 1.0)
    expected = belief.covariance.dense().numpy() * np.outer(root, root)
    assert_equal(after.belief.covariance.dense(), expected)
    assert torch.equal(after.belief.mean, belief.mean)


@pytest.mark.parametrize("belief", beliefs(), ids=lambda own: type(own.covariance).__name__)
@pytest.mark.parametrize(
    "parts",
    [
        {"inference": df.Linearized(df.Hessian())},
        {"inference": df.GradientStep(df.Adam(lr=0.1))},
        {"inference": df.Bong(df.EmpiricalFisher(), 4)},
    ],
)
def test_held_coordinates_stay_and_others_move(belief: df.Belief, parts: dict[str, Any]) -> None:
    filt, inputs = filter_of(**parts), tensor(normals(8, 2, seed=5))
    moving = filt.step(filt.init(belief), inputs)[0]  # Adam has momentum to lose
    state = filt.intervene(moving, WHERE, freeze=True)
    dense, apart = moving.belief.covariance.dense().numpy(), WHERE.numpy()
    kept = np.outer(~apart, ~apart) | np.eye(SIZE, dtype=bool)
    expected = np.where(kept, dense, 0.0)
    assert_equal(state.belief.covariance.dense(), expected)
    after = filt.elapse(filt.step(state, inputs)[0], 2.0)
    after = filt.learn(after, inputs, torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]))[0]
    after = filt.run(after, [inputs, inputs])[0]
    assert torch.equal(after.belief.mean[WHERE], moving.belief.mean[WHERE])
    variances = after.belief.covariance.variance(), moving.belief.covariance.variance()
    torch.testing.assert_close(variances[0][WHERE], variances[1][WHERE], rtol=1e-12, atol=0)
    assert (after.belief.mean != moving.belief.mean)[~WHERE].all()
    free = filt.intervene(after, WHERE, freeze=False)
    assert (filt.step(free, inputs)[0].belief.mean != after.belief.mean).all()


def test_others_learn_as_if_the_held_were_constants() -> None:
    belief, inputs = beliefs()[0], tensor(normals(8, 2, seed=5))
    filt = df.Filter(
        df.LinearHead(3),
        df.Transition(df.RandomWalk(), df.NoNoise()),
        inference=df.Linearized(df.Hessian()),
    )
    after = filt.step(filt.intervene(filt.init(belief), WHERE, freeze=True), inputs)[0]

    def logits(free: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        theta = belief.mean * WHERE + free @ torch.eye(SIZE).double()[~WHERE]
        return df.LinearHead(3)(theta, batch)

    small = df.Filter(logits, filt.transition, inference=filt.inference)
    free = belief.covariance.dense()[~WHERE][:, ~WHERE]
    alone = small.step(small.init(df.Belief(belief.mean[~WHERE], df.Full(free))), inputs)[0]
    torch.testing.assert_close(after.belief.mean[~WHERE], alone.belief.mean)
    own = after.belief.covariance.dense()[~WHERE][:, ~WHERE]
    torch.testing.assert_close(own, alone.belief.covariance.dense())


def test_a_renewed_covariance_is_inflated_once() -> None:
    """Reset noise forgets a covariance before a batch teaches by it: the next prior has the
    factors.
    """
    renewed = df.Transition(df.RandomWalk(), df.Reset(None))
    filt = df.Filter(df.LinearHead(3), renewed, inference=df.Linearized(df.NoCurvature()))
    belief, inputs = beliefs()[1], tensor(normals(8, 2, seed=5))
    state = filt.init(belief)
    plain, (first, again) = (
        filt.step(state, inputs)[0],
        (
            filt.intervene(state, WHERE, inflate=4.0),
            filt.intervene(filt.intervene(state, WHERE, inflate=2.0), WHERE, inflate=2.0),
        ),
    )
    ratio = torch.where(WHERE, 4.0, 1.0).double()
    for own in (first, again):
        after = filt.step(own, inputs)[0]
        moves = after.belief.mean - belief.mean, plain.belief.mean - belief.mean
        torch.testing.assert_close(moves[0], ratio * moves[1])  # μ⁻ - Σ g
        later = filt.elapse(after, 1.0).belief.covariance.variance()
        torch.testing.assert_close(later, belief.covariance.variance())


def test_means_that_are_set() -> None:
    filt, belief = filter_of(), beliefs()[1]
    state = filt.init(belief)
    assert filt.intervene(state, WHERE, mean=1.5).belief.mean[WHERE].tolist() == [1.5] * 3
    new = filt.intervene(state, WHERE, mean=torch.arange(6.0)).belief.mean
    assert torch.equal(new, torch.where(WHERE, torch.arange(6.0).double(), belief.mean))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inflate": 0.0}, r"inflate must be a finite number in \(0, inf\), got 0"),
        ({"mean": float("nan")}, "mean must be a finite number"),
        ({"mean": torch.zeros(2)}, r"mean must be a number, or of shape \[6\]"),
        ({"freeze": 1}, "freeze must be True or False, got 1"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    filt = filter_of()
    state = filt.init(beliefs()[1])
    with pytest.raises(ValueError, match=message):
        filt.intervene(state, WHERE, **options)
    with pytest.raises(ValueError, match=r"where must be a mask \[6\]"):
        filt.intervene(state, WHERE[:3], inflate=2.0)


@pytest.mark.parametrize("options", [{"freeze": True}, {"inflate": 2.0}])
def test_smoothing_refuses_what_the_transition_does_not_know(options: dict[str, Any]) -> None:
    filt = filter_of() if "freeze" in options else replace(filter_of(), transition=RESET)
    state = filt.intervene(filt.init(beliefs()[0]), WHERE, mean=0.7, **options)
    with pytest.raises(ValueError, match=r"Filter\.smooth: states must be without interventions"):
        filt.smooth([state])

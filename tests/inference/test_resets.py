"""What happens to the belief between two steps: restores and resets, against their formulas in
NumPy (test_iterates.py has the filters of proposals).
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import driftfilter as df
from driftfilter.base.randomness import Purpose, Randomness
from driftfilter.model.observation import Energy
from driftfilter.model.weighting import Memory
from small import assert_same, refuses

SOURCE = df.Belief(torch.linspace(-1, 1, 6).double(), df.Diagonal(torch.full((6,), 0.5).double()))
LEARNED = df.Belief(
    SOURCE.mean + torch.tensor([0.3, -0.2, 0.1, 0.4, -0.5, 0.6]).double(),
    df.Full(0.2 * torch.eye(6).double()),
)
INPUTS = torch.tensor([[0.2, 1.0, -0.4], [-1.0, 0.3, 0.8], [0.5, 0.5, 0.1]]).double()


def energy(observation: df.Gibbs | None = None, source: df.Belief | None = SOURCE) -> Energy:
    observation = observation or df.Gibbs()
    return observation(df.LinearHead(2), LEARNED.mean, INPUTS, {}, randomness(0), source)[0]


def randomness(step: int, seed: int = 5) -> Randomness:
    return Randomness(seed, step, torch.device("cpu"))


def kept_up(
    upkeep: df.Upkeep, memory: Memory, step: int = 0, **others: Any
) -> tuple[df.Belief, Memory]:
    return upkeep(LEARNED, others.get("energy") or energy(), memory, randomness(step))


NOTHING = df.Gibbs(df.PseudoLabel(threshold=0.9999))  # no sample is that sure
every = pytest.mark.parametrize(
    "upkeep",
    [
        df.ResetEvery(1),
        df.ResetBelow(100.0),
        df.RestoreRandomly(0.5),
        df.RestoreIrrelevant(0.5),
        df.ContinualMomentum(0.5),
        df.LatentWeights(0.5),
        df.SteadyState(pull=0.5),
    ],
    ids=lambda upkeep: type(upkeep).__name__,
)


@pytest.mark.parametrize("steps", [1, 3])
def test_reset_every_so_many_steps(steps: int) -> None:
    memory = {"weighting.mean_prediction": torch.ones(2)}
    for step in range(7):
        belief, after = kept_up(df.ResetEvery(steps), memory, step)
        if (step + 1) % steps == 0:
            assert belief is SOURCE
            assert after == {}
        else:
            assert belief is LEARNED
            assert after is memory


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_reset_below_a_running_loss(momentum: float) -> None:
    """Losses that fall: the running mean falls below 0.5 where its formula says so, and starts
    again after.
    """
    losses, running = (
        [1.0, 0.9, 0.3, 0.01, 0.02, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 2.0, 0.4],
        None,
    )
    memory: Memory = {"other": torch.ones(1)}
    resets = []
    for loss in losses:
        memory = {**memory, "inference.loss": torch.tensor(loss, dtype=torch.float64)}
        belief, memory = kept_up(df.ResetBelow(0.5, momentum), memory)
        running = loss if running is None else momentum * running + (1 - momentum) * loss
        resets.append(running < 0.5)
        assert (belief is SOURCE) is resets[-1]
        assert (memory == {}) is resets[-1]
        assert "inference.loss" not in memory
        if resets[-1]:
            running = None
        else:
            assert memory["upkeep.loss"].item() == pytest.approx(running, rel=1e-14)
    assert set(resets) == {True, False}


@pytest.mark.parametrize("keep", [False, True])
def test_a_reset_may_keep_the_optimisers_memory(keep: bool) -> None:
    of_optimizer = {f"inference.{name}": torch.ones(1) for name in ("velocity", "first", "count")}
    memory = {**of_optimizer, "inference.loss": torch.tensor(0.1).double(), "other": torch.ones(1)}
    belief, after = kept_up(df.ResetBelow(0.5, keep_optimizer=keep), memory)
    assert belief is SOURCE
    assert after == (of_optimizer if keep else {})


def test_reset_below_takes_the_energy_where_no_rule_leaves_a_loss() -> None:
    _, memory = kept_up(df.ResetBelow(-1.0), {}, energy=energy())
    p = (INPUTS @ LEARNED.mean.view(2, 3).T).softmax(-1)
    expected = -(p * p.log()).sum(-1).mean()
    torch.testing.assert_close(memory["upkeep.loss"], expected, rtol=1e-12, atol=0)


def test_a_step_without_information_leaves_the_running_loss() -> None:
    memory = {"upkeep.loss": torch.tensor(0.7).double()}
    everyone_left = {
        **memory,
        "inference.loss": torch.tensor(torch.nan).double(),
    }  # at the sharp point
    for belief, after in (
        kept_up(df.ResetBelow(0.5), memory, energy=energy(NOTHING)),
        kept_up(df.ResetBelow(0.5), everyone_left),
    ):
        assert belief is LEARNED
        assert after == memory


@pytest.mark.parametrize("probability", [0.0, 0.4, 1.0])
def test_restore_randomly_draws_every_parameter(probability: float) -> None:
    counts = np.zeros(6)
    for step in range(400):
        belief, _ = kept_up(df.RestoreRandomly(probability), {}, step)
        back = (belief.mean == SOURCE.mean).numpy()
        np.testing.assert_array_equal(
            belief.mean.numpy(), np.where(back, SOURCE.mean.numpy(), LEARNED.mean.numpy())
        )
        drawn = torch.rand(6, generator=randomness(step).generator(Purpose.UPKEEP)) < probability
        np.testing.assert_array_equal(back, drawn.numpy())
        assert belief.covariance is LEARNED.covariance
        counts += back
    error = 5 * np.sqrt(probability * (1 - probability) / 400)
    assert (np.abs(counts / 400 - probability) <= error).all()


@pytest.mark.parametrize("quantile", [0.0, 0.03, 0.4, 0.5, 1.0])
def test_restore_irrelevant_below_the_quantile_of_the_squared_gradient(quantile: float) -> None:
    gradient = torch.tensor([0.5, -0.1, 0.3, -2.0, 0.0, 1.0]).double()
    belief, _ = kept_up(df.RestoreIrrelevant(quantile), {"inference.gradient": gradient})
    squares = gradient.numpy() ** 2
    mask = squares < np.quantile(squares, quantile)
    np.testing.assert_array_equal(
        belief.mean.numpy(), np.where(mask, SOURCE.mean.numpy(), LEARNED.mean.numpy())
    )
    assert belief.covariance is LEARNED.covariance


@pytest.mark.slow
def test_restore_irrelevant_of_more_parameters_than_torch_quantile_takes() -> None:
    size = 2**24 + 3
    gradient = torch.arange(size, dtype=torch.float32).flip(0)
    belief = df.Belief(torch.ones(size), df.Diagonal(torch.ones(size)))
    source = df.Belief(torch.zeros(size), belief.covariance)
    after, _ = df.RestoreIrrelevant(0.5)(
        belief, energy(source=source), {"inference.gradient": gradient}, randomness(0)
    )
    assert abs(int((after.mean == 0).sum()) - size // 2) <= 2


def test_restore_irrelevant_without_a_gradient() -> None:
    old = {"inference.gradient": torch.arange(6).double()}  # of an earlier step
    for memory in ({}, old):
        assert kept_up(df.RestoreIrrelevant(0.5), memory, energy=energy(NOTHING))[0] is LEARNED
    with pytest.raises(
        ValueError,
        match=r"the gradient in the memory must be there: GradientStep\(keep_gradient=True\)",
    ):
        kept_up(df.RestoreIrrelevant(0.5), {})


@every
def test_without_a_source_there_is_nothing_to_go_back_to(upkeep: df.Upkeep) -> None:
    memory = {"inference.gradient": torch.arange(6).double()}
    with pytest.raises(ValueError, match=r"Energy\.source must be the source belief"):
        kept_up(upkeep, memory, energy=energy()._replace(source=None))


@every
def test_neither_beliefs_nor_memory_are_changed(upkeep: df.Upkeep) -> None:
    memory: dict[str, Tensor] = {
        "inference.gradient": torch.arange(6).double(),
        "inference.loss": torch.tensor(0.1).double(),
    }
    before = [tensor.clone() for tensor in (LEARNED.mean, SOURCE.mean, *memory.values())]
    belief, _ = kept_up(upkeep, memory)
    assert not torch.equal(belief.mean, LEARNED.mean)
    assert_same(before, [LEARNED.mean, SOURCE.mean, *memory.values()])
    assert set(memory) == {"inference.gradient", "inference.loss"}


@every
def test_upkeep_comes_after_the_prediction(upkeep: df.Upkeep) -> None:
    """The prediction of a step is that of a filter without upkeep, from posterior and prior alike;
    the state is not.
    """
    rule = df.GradientStep(df.SGD(0.3), keep_gradient=True)
    plain = df.Filter(df.LinearHead(2), df.Transition(), df.Gibbs(), rule)
    for filt in (plain, replace(plain, predict_from="prior")):
        state = filt.init(SOURCE, seed=5)
        state, _, _ = filt.step(state, INPUTS)
        without, expected, _ = filt.step(state, INPUTS.flip(0))
        after, prediction, _ = replace(filt, upkeep=upkeep).step(state, INPUTS.flip(0))
        assert torch.equal(prediction.log_probabilities, expected.log_probabilities)
        assert not torch.equal(after.belief.mean, without.belief.mean)


def test_several_upkeeps_come_one_after_the_other() -> None:
    """CMF's filter on the proposal, then CoTTA's restore of what it gives; and both are saved."""
    pair = (df.ContinualMomentum(0.5, process=1000.0), df.RestoreRandomly(0.5))
    rule = df.GradientStep(df.SGD(0.1))
    plain = df.Filter(df.LinearHead(2), df.Transition(), df.Gibbs(), rule)
    filt = replace(plain, upkeep=pair)
    state = filt.init(SOURCE, seed=5)
    for step in range(3):
        without, expected, _ = plain.step(state, INPUTS)
        belief, memory = pair[0](without.belief, energy(), without.memory, randomness(step))
        belief, memory = pair[1](belief, energy(), memory, randomness(step))
        state, prediction, _ = filt.step(state, INPUTS)
        assert_same((state.belief.mean, state.memory), (belief.mean, memory))
        assert torch.equal(prediction.log_probabilities, expected.log_probabilities)
    other = replace(plain, upkeep=pair[::-1])
    reverse, _, _ = other.step(other.init(SOURCE, seed=5), INPUTS)
    first, _, _ = filt.step(filt.init(SOURCE, seed=5), INPUTS)
    assert not torch.equal(reverse.memory["upkeep.hidden"], first.memory["upkeep.hidden"])


def test_several_upkeeps_in_a_recipe() -> None:
    pair = (df.ContinualMomentum(0.5), df.ResetEvery(7))
    recipe = df.presets.get("tent", upkeep=list(pair))
    assert recipe.upkeep == pair
    read = df.from_toml(df.to_toml(recipe))
    assert (read, repr(read)) == (recipe, repr(recipe))


test_refusals_name_field_value_and_range = refuses(
    [
        (
            lambda: df.Recipe(upkeep=()),
            r"Filter.upkeep must be an upkeep, a tuple of one or more, or None, got \(\)",
        ),
        (
            lambda: df.Recipe(upkeep=(df.ResetEvery(3), df.MAP())),
            r"Filter.upkeep must be of role 'upkeep', such as ResetEvery.*, got MAP\(\)",
        ),
        (
            lambda: df.Recipe(upkeep=(df.ResetBelow(0.1), df.ResetBelow(0.2))),
            "Filter.upkeep must be with one of a kind: they share their memory",
        ),
        (lambda: df.ResetEvery(0), "ResetEvery.steps must be an integer >= 1, got 0"),
        (lambda: df.ResetBelow("low"), "ResetBelow.loss must be a finite number.*got 'low'"),  # type: ignore[arg-type]
        (
            lambda: df.ResetBelow(momentum=1.0),
            r"ResetBelow.momentum must be a finite number in \[0, 1\), got 1.0",
        ),
        (
            lambda: df.RestoreRandomly(1.5),
            r"RestoreRandomly.probability must be a finite number in \[0, 1\], got 1.5",
        ),
        (
            lambda: df.RestoreIrrelevant(-0.1),
            r"RestoreIrrelevant.quantile must be a finite number in \[0, 1\], got -0.1",
        ),
    ]
)

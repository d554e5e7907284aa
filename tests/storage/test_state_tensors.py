"""What an adapter knows as named tensors: a stream that is saved and resumed goes on bit for
bit.
"""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.base.randomness import Purpose, Randomness
from driftfilter.base.tensors import as_tensor, as_text, map_tensors
from driftfilter.storage.state_tensors import from_tensors, kinds, to_tensors
from small import Written, assert_same, contents, feed, few_copies

Tensors = dict[str, Tensor]


def backwards() -> nn.Module:
    """Registers its head first."""
    torch.manual_seed(0)
    return Written(
        lambda own, x: own.head(own.middle(own.bn(own.conv(x)).relu().mean((2, 3))).relu()),
        head=nn.Linear(5, 3),
        conv=nn.Conv2d(3, 6, 3),
        bn=nn.BatchNorm2d(6),
        middle=nn.Linear(6, 5),
    )


def images(seed: int, count: int = 4) -> Tensor:
    return torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def adapter(preset: str, **options: Any) -> df.Adapter:
    data = df.SourceData(images(9, 12), torch.arange(12) % 3)
    return df.adapt(backwards(), preset, data=data, **options, **few_copies(preset))


def stored(state: Tensors) -> Tensors:
    """Through a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    read: Tensors = torch.load(file, weights_only=True)
    return read


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"least": 0},
    "least": {"least": 10},
    "window": {"window": 9},
    "update_every": {"update_every": 2},
}
CASES = [(preset, "plain") for preset in df.presets.names()]
CASES += [
    (preset, way)
    for preset in ("tent", "eata", "stad", "head_ekf", "opgd", "driftfilter")
    for way in ("window", "update_every", "least")
]


@pytest.mark.parametrize(("preset", "way"), CASES)
@pytest.mark.parametrize("batches", [0, 3])
def test_a_resumed_stream_goes_on_bit_for_bit(preset: str, way: str, batches: int) -> None:
    """Alone and inside another module; before the first batch too. The resumed adapter had seen
    another stream.
    """
    running, alone, other = (adapter(preset, **OPTIONS[way]) for _ in range(3))
    feed(running, map(images, range(batches)))
    inside = nn.ModuleDict({"linear": nn.Linear(2, 2), "it": other})
    alone(images(20))
    assert alone.load_state_dict(stored(running.state_dict())) == ([], [])
    parent = nn.ModuleDict({"linear": nn.Linear(2, 2), "it": running})
    assert inside.load_state_dict(stored(parent.state_dict())) == ([], [])
    assert torch.equal(
        inside["linear"].get_parameter("weight"), parent["linear"].get_parameter("weight")
    )
    for seed in (10, 11):
        expected = running(images(seed))
        assert_same((alone(images(seed)), inside["it"](images(seed))), (expected, expected))
    assert_same(alone.state_dict(), running.state_dict())


def test_recent_samples_of_several_inputs_are_resumed() -> None:
    """By name and by place, beside what is no tensor and what does not go sample by sample."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

        def forward(self, scale: float, inputs: Tensor, mask: Tensor, gate: Tensor) -> Any:
            return self.head(self.norm(self.first(inputs @ mask)) * gate) * scale

    def batch(seed: int, named: bool) -> Any:
        generator = torch.Generator().manual_seed(seed)
        inputs, gate = torch.randn(2, 4, generator=generator), torch.rand(2, 6, generator=generator)
        parts = {"scale": 2.0, "inputs": inputs, "mask": torch.eye(4).tril(), "gate": gate}
        return parts if named else tuple(parts.values())

    def ask(adapter: Callable[..., Any], x: Any) -> Any:
        return adapter(**x) if isinstance(x, dict) else adapter(*x)

    for named in (True, False):
        running, resumed = (df.adapt(Gated(), "tent", lr=0.01, window=5) for _ in range(2))
        for seed in range(3):
            ask(running, batch(seed, named))
        resumed.load_state_dict(stored(running.state_dict()))
        resumed.load_state_dict(stored(resumed.state_dict()))
        for seed in range(3, 6):
            assert torch.equal(ask(running, batch(seed, named)), ask(resumed, batch(seed, named)))
        filt = df.presets.get("tent", lr=0.01).filter(df.Network(Gated()))
        whole = [batch(seed, True) for seed in (3, 4, 5, 6)]
        seen = {name: torch.cat([part[name] for part in whole])[-5:] for name in ("inputs", "gate")}
        expected = filt.predict(running.state, {**whole[0], **seen}).log_probabilities[-2:]
        assert torch.equal(ask(running.predict, batch(6, named)).log_probabilities, expected)


def test_negative_and_large_seeds_replay() -> None:
    for seed in (-1, -(2**63), 2**63 + 5, 2**64 - 1, 7):
        running, resumed = adapter("bong_diag", seed=seed), adapter("bong_diag")
        running(images(0))
        resumed.load_state_dict(running.state_dict())
        drawn = [
            torch.randn(
                3,
                generator=Randomness(it.state.seed, 1, torch.device("cpu")).generator(
                    Purpose.INFERENCE
                ),
            )
            for it in (running, resumed)
        ]
        assert torch.equal(*drawn)
        assert torch.equal(running(images(1)), resumed(images(1)))


def test_a_checkpoint_of_float32_in_a_float64_adapter() -> None:
    running, wide = adapter("tent"), adapter("tent").double()
    feed(running, map(images, range(2)))
    wide.load_state_dict(running.state_dict())
    assert {
        value.dtype for value in to_tensors(wide.state).values() if value.is_floating_point()
    } == {torch.float64}
    torch.testing.assert_close(
        wide(images(3).double()).float(), running(images(3)), rtol=0, atol=1e-5
    )


def test_loading_keeps_no_tensor_of_the_checkpoint() -> None:
    running, resumed = adapter("tent"), adapter("tent")
    running(images(0))
    saved = {name: value.clone() for name, value in running.state_dict().items()}
    resumed.load_state_dict(saved)
    for value in saved.values():
        value.zero_()
    assert torch.equal(resumed(images(1)), running(images(1)))
    assert str(resumed.signals) == str(running.signals)  # what the monitor remembers, too


# What is refused


def without(name: str) -> Callable[[Tensors], Any]:
    return lambda state: {key: value for key, value in state.items() if key != name}


def with_(name: str, value: Any) -> Callable[[Tensors], Any]:
    return lambda state: {**state, name: value(state[name]) if callable(value) else value}


def nan(value: Tensor) -> Tensor:
    changed = value.clone()
    changed.view(-1)[3] = torch.nan
    return changed


WRONG: dict[str, tuple[str, Callable[[Tensors], Any], str]] = {
    "nothing": (
        "tent",
        lambda state: {},
        "state 'recipe' must be the same as the adapter's, Recipe.*got 'none'",
    ),
    "a model's": (
        "tent",
        lambda state: backwards().state_dict(),
        "state 'recipe' must be the same",
    ),
    "no mean": (
        "tent",
        without("belief.mean"),
        "state must be complete, .* got \"no 'belief.mean'\"",
    ),
    "no step": ("tent", without("step"), "got \"no 'step'\""),
    "no source": (
        "opgd",
        without("source.covariance.diagonal"),
        "got \"no 'source.covariance.diagonal'\"",
    ),
    "NaN": (
        "tent",
        with_("belief.mean", nan),
        r"state 'belief.mean' must be finite, got nan at index \[3\]",
    ),
    "NaN in the memory": (
        "tent",
        with_("memory.inference.first", nan),
        "state 'memory.inference.first' must be finite",
    ),
    "NaN in the window": ("tent", with_("recent.[]", nan), "inputs must be finite, got nan"),
    "NaN center": ("stad", with_("model.center", nan), "state 'model.center' must be finite"),
    "another size": (
        "tent",
        with_("belief.mean", torch.zeros(5)),
        r"'belief.mean' must be of shape \[12\], got 'shape \[5\]'",
    ),
    "another covariance": (
        "opgd_diag",
        with_("belief.covariance.values", torch.ones(1)),
        r"must be of shape \[12\]",
    ),
    "another factor": (
        "opgd",
        with_("belief.covariance.factor", torch.ones(2, 3)),
        r"factor' must be of shape \[\d+, 12\]",
    ),
    "negative variance": (
        "opgd_diag",
        with_("source.covariance.values", lambda v: -v),
        "must be of variances >= 0, got -0.0",
    ),
    "no tensor": (
        "tent",
        with_("step", 3),
        r"state must be the state_dict of an adapter, got \"\['step'\] that are no tensors",
    ),
    "another head": (
        "head_ekf",
        with_("model.head", as_tensor("haed")),
        "must be the name of a linear layer.* got 'haed'",
    ),
    "another recipe": (
        "tent",
        lambda _: adapter("eta").state_dict(),
        r"state 'recipe' must be .*Entropy\(.*got 'Recipe",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_checkpoint_leaves_no_trace(case: str) -> None:
    preset, change, message = WRONG[case]
    running, untouched = adapter(preset, window=9), adapter(preset, window=9)
    for it in (running, untouched):
        it(images(0))
    state = running.state_dict()
    with pytest.raises(ValueError, match=message):
        running.load_state_dict(change(state))
    assert_same(running.state_dict(), state)
    assert torch.equal(running(images(1)), untouched(images(1)))


def test_hyperparameters_and_predictions_may_change_between_runs() -> None:
    running, slower = (
        adapter("tent"),
        adapter("tent", lr=1e-5, prediction=df.MonteCarlo(4), predict_from="posterior"),
    )
    running(images(0))
    slower.load_state_dict(running.state_dict())
    assert torch.equal(
        slower.predict(images(1)).log_probabilities, running.predict(images(1)).log_probabilities
    )
    slower.update(images(1))
    running.update(images(1))
    assert not torch.equal(slower.belief.mean, running.belief.mean)


# The parts


STRUCTURES: dict[str, df.Covariance] = {
    "full": df.Full(torch.eye(6)),
    "diagonal": df.Diagonal(torch.ones(6)),
    "blocks": df.Blocks((df.Full(torch.eye(2)), df.Diagonal(torch.ones(4)))),
    "low rank": df.LowRank(torch.ones(6), torch.zeros(0, 6), 4),
    "kronecker": df.Kronecker.isotropic(1.0, 3, 2, torch.zeros(6)),
}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_state_is_what_its_tensors_say(structure: str) -> None:
    filt = df.Filter(df.LinearHead(3), df.Transition(), inference=df.Linearized(df.Hessian()))
    start = filt.init(df.Belief(torch.linspace(-1, 1, 6), STRUCTURES[structure]), seed=3)
    state, _, _ = filt.step(start, images(0)[:, 0, 0, :2])
    again = from_tensors(stored(to_tensors(state)), start)
    assert_same((to_tensors(again), contents(again)), (to_tensors(state), contents(state)))
    assert type(again.belief.covariance) is type(state.belief.covariance)
    assert (again.seed, again.step, again.parameters) == (3, 1, 6)
    assert not torch.equal(again.belief.mean, start.belief.mean)


def test_hidden_states_are_a_part_of_a_state() -> None:
    transition = df.Transition(df.LocalTrend(1), df.Discount(0.9))
    filt = df.Filter(df.LinearHead(3), transition, inference=df.Linearized(df.Hessian()))
    start = filt.init(df.Belief(torch.linspace(-1, 1, 6), df.Full(torch.eye(6))))
    state, _, _ = filt.step(start, images(0)[:, 0, 0, :2])
    again = from_tensors(to_tensors(state), start)
    assert (again.parameters, again.belief.dimension) == (6, 12)
    following = [
        filt.step(each, images(1)[:, 0, 0, :2])[1].probabilities for each in (again, state)
    ]
    assert torch.equal(*following)


def test_moved_changes_floating_tensors_only() -> None:
    value = {"a": torch.ones(2), "b": (torch.arange(3), df.Diagonal(torch.ones(1))), "c": 3}
    changed = map_tensors(value, lambda tensor: tensor.double())
    assert changed["a"].dtype == changed["b"][1].values.dtype == torch.float64
    assert changed["b"][0] is value["b"][0]  # type: ignore[index]
    assert changed["c"] == 3


@pytest.mark.parametrize("text", ["", "layer4.0.fc", "Σ ü"])
def test_texts_as_tensors(text: str) -> None:
    assert as_text(as_tensor(text)) == text


def test_kinds_tell_structures_and_not_numbers() -> None:
    get = df.presets.get
    assert kinds(get("tent")) == kinds(get("tent", lr=1.0))
    different = {name: kinds(get(name)) for name in df.presets.names()}
    assert "Adam" in different["tent"]
    assert "source" in kinds(df.Recipe(statistics="source"))
    assert different["tent"] != different["eta"] != different["rdumb"]
    assert kinds(get("head_ekf", structure="full")) != kinds(get("head_ekf"))

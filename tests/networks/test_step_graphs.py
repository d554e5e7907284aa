"""Whole steps as recordings: what a recording may not do, and that it changes no result.

Without a GPU a recording is imitated by the function itself, on copies, where nobody may look at
a number.
"""

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import driftfilter as df
from driftfilter.base import light
from driftfilter.networks import step_graphs
from driftfilter.networks.batch_trust import SHIFT
from driftfilter.networks.step_graphs import STEPS, StepGraphs

LOOKS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "unique", "lift_fresh")


class NobodyLooks(TorchDispatchMode):
    """Whoever looks at a number would stop a GPU's queue, and break a recording."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        assert name not in LOOKS, f"{name} looks at a number"
        return func(*args, **(kwargs or {}))


class Imitation:
    """A recording without a GPU: static copies in, the function on them, copies out."""

    made = 0

    def __init__(self, call: Callable[[list[Tensor]], list[Tensor]], given: Sequence[Tensor]):
        self.call, self.given = call, [own.clone() for own in given]
        self.once = [own.clone() for own in self.call(self.given)]
        type(self).made += 1

    def __call__(self, given: Sequence[Tensor]) -> list[Tensor]:
        for own, new in zip(self.given, given, strict=True):
            own.copy_(new)
        with NobodyLooks():  # type: ignore[no-untyped-call]
            told = self.call(self.given)
        return [own.clone() for own in told]


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> type[Imitation]:
    monkeypatch.setattr(step_graphs, "Recording", Imitation)
    monkeypatch.setattr(step_graphs, "possible", lambda mean, inputs: True)
    monkeypatch.setattr(step_graphs, "is_there", lambda asked: True)
    monkeypatch.setattr(light, "_KNOWN", ())  # as on a GPU, where rules stay with torch
    Imitation.made = 0
    return Imitation


pytestmark = pytest.mark.filterwarnings("ignore:adapt. cuda_graphs is ignored")  # on a CPU


def network(norm: Callable[[int], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        norm(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        norm(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    ).eval()


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(2, channels),
}


def stream(batches: int, n: int = 24, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(n, 3, 12, 12, generator=generator) * 0.5 for _ in range(batches)]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("recipe", ["driftfilter", "driftfilter_aug", "center", "opgd_diag"])
def test_recorded_steps_are_the_ordinary_ones(
    norm: str, recipe: str, recordings: type[Imitation]
) -> None:
    """Predictions, belief, statistics and what the monitor sees, over steps of every kind."""
    model = network(NORMS[norm])
    plain = df.adapt(model, recipe, cuda_graphs=False)
    recorded = df.adapt(model, recipe, cuda_graphs=True)
    for batch in stream(18):
        assert torch.equal(plain(batch), recorded(batch))
    assert recordings.made >= 1
    one, other = plain.state, recorded.state
    assert torch.equal(one.belief.mean, other.belief.mean)
    assert torch.equal(one.belief.covariance.variance(), other.belief.covariance.variance())
    assert one.memory.keys() == other.memory.keys()
    assert all(torch.equal(one.memory[name], other.memory[name]) for name in one.memory)
    assert one.step == other.step
    assert str(plain.signals) == str(recorded.signals)  # NaN is not itself


def test_what_is_not_finite_is_the_ordinary_steps_business(recordings: type[Imitation]) -> None:
    adapter = df.adapt(network(nn.BatchNorm2d), cuda_graphs=True)
    for batch in stream(10):
        adapter(batch)
    before = adapter.state
    broken = stream(1)[0]
    broken[0, 0, 0, 0] = torch.inf
    with pytest.raises(ValueError, match="inputs must be finite"):
        adapter(broken)
    assert adapter.state.step == before.step
    assert torch.equal(adapter.state.belief.mean, before.belief.mean)


class Overflowing(nn.Module):
    """Logits that are infinite for dark images."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network(nn.BatchNorm2d)

    def forward(self, images: Tensor) -> Tensor:
        dark = (images.mean((1, 2, 3)) < 0.01).float()
        logits: Tensor = self.inner(images)
        return logits + (1e38 * dark)[:, None] * 1e38


def test_logits_that_are_not_finite_are_refused_by_name(recordings: type[Imitation]) -> None:
    adapter = df.adapt(Overflowing().eval(), domains=None, cuda_graphs=True)
    for batch in stream(10):
        adapter(batch)
    with pytest.raises(ValueError, match="logits"):
        adapter(0 * stream(1)[0])


class Brightness(nn.Module):
    """A network that is the surer the brighter images are, and knows nothing of black ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network(nn.BatchNorm2d)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.inner(images)
        return 100 * images.mean() * logits


def test_too_few_samples_of_a_weight_are_told(recordings: type[Imitation]) -> None:
    gated = df.Gibbs(df.Entropy(), df.EntropyGate(0.99))
    recipe = df.presets.get("opgd_diag", observation=gated)
    model = Brightness().eval()
    plain = df.adapt(model, recipe, cuda_graphs=False)
    recorded = df.adapt(model, recipe, cuda_graphs=True)
    for batch in (*stream(8), 0 * stream(1)[0], *stream(2)):
        assert torch.equal(plain(batch), recorded(batch))
        assert plain.last_info is not None
        assert recorded.last_info is not None
        assert recorded.last_info.reason == plain.last_info.reason
        assert recorded.last_info.informative is bool(batch.any())
    assert recordings.made >= 1


class Counting(nn.Module):
    """A network that Python steers by the numbers it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network(nn.BatchNorm2d)

    def forward(self, images: Tensor) -> Tensor:
        bright = float(images.mean()) > 0.25
        logits: Tensor = self.inner(images)
        return logits if bright else 0.5 * logits


def test_a_network_that_cannot_be_recorded_runs_as_ever(
    recordings: type[Imitation], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Counting().eval()
    plain = df.adapt(model, cuda_graphs=False)
    adapter = df.adapt(model, cuda_graphs=True)
    bound = adapter._ready(stream(1)[0]).bound
    assert bound is not None
    assert bound.graphs is not None
    noted: dict[str, str] = {}
    monkeypatch.setattr(bound.graphs, "_refused", noted)  # as if nobody had asked for graphs
    for batch in stream(8):
        assert torch.equal(plain(batch), adapter(batch))
    assert "looks at a number" in noted[STEPS]


class Stepping(nn.Module):
    """A network that is another one whenever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = network(nn.BatchNorm2d), 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        logits: Tensor = self.inner(images)
        return logits * (1 + 0.5 * self.calls)


def test_a_network_that_answers_otherwise_is_not_replayed(
    recordings: type[Imitation], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = df.adapt(Stepping().eval(), cuda_graphs=True)
    bound = adapter._ready(stream(1)[0]).bound
    assert bound is not None
    assert bound.graphs is not None
    noted: dict[str, str] = {}
    monkeypatch.setattr(bound.graphs, "_refused", noted)
    for batch in stream(8):
        adapter(batch)
    assert "answers otherwise" in noted[STEPS]


def test_what_is_copied_or_pickled_records_anew(recordings: type[Imitation]) -> None:
    adapter = df.adapt(network(nn.BatchNorm2d), cuda_graphs=True)
    *batches, last = stream(8)
    for batch in batches:
        adapter(batch)
    copies = [copy.deepcopy(adapter), pickle.loads(pickle.dumps(adapter))]
    told = adapter(last)
    assert all(torch.equal(each(last), told) for each in copies)
    adapter.restore(copy.deepcopy(adapter.snapshot()))
    wanted = copies[0](last)
    assert torch.equal(adapter(last), wanted)


def test_a_recording_is_for_one_source(recordings: type[Imitation]) -> None:
    """A checkpoint brings its own, to which everything reverts."""
    model = network(nn.BatchNorm2d)
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for layer in moved.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.weight.mul_(1.5)
    other = df.adapt(moved, cuda_graphs=False)
    batches = stream(20)
    other(batches[0])
    plain = df.adapt(model, cuda_graphs=False)
    recorded = df.adapt(model, cuda_graphs=True)
    for number, batch in enumerate(batches):
        if number == 9:
            plain.load_state_dict(other.state_dict())
            recorded.load_state_dict(other.state_dict())
        assert torch.equal(plain(batch), recorded(batch))
    assert torch.equal(plain.belief.mean, recorded.belief.mean)


def test_inputs_that_are_written_to_are_another_batch(recordings: type[Imitation]) -> None:
    """A step that was begun is of what the inputs were then."""
    adapter = df.adapt(network(nn.BatchNorm2d), cuda_graphs=True)
    *batches, last = stream(10)
    for batch in batches:
        adapter(batch)
    bound, state = adapter._now.bound, adapter.state
    assert bound is not None
    assert bound.graphs is not None
    for batch in batches:
        bound.step(state, batch, None)  # until it is recorded
    wanted = bound.filter.step(state, 0.5 * last)[1]
    bound.begin(state, last, None)
    assert bound.graphs._begun is not None
    last.mul_(0.5)
    found = bound.step(state, last, None)[1]
    assert torch.equal(found.log_probabilities, wanted.log_probabilities)


def test_single_samples_between_batches_probe_as_ever(recordings: type[Imitation]) -> None:
    """A sample alone leaves the shift, and whose turn it is, as they were."""
    model = network(nn.BatchNorm2d)
    plain = df.adapt(model, cuda_graphs=False, least=0)
    recorded = df.adapt(model, cuda_graphs=True, least=0)
    for batch in stream(16):
        for part in (batch, batch[:1]):
            assert torch.equal(plain(part), recorded(part))
    assert torch.equal(plain.state.memory[SHIFT], recorded.state.memory[SHIFT])


@pytest.mark.parametrize("recipe", ["opgd", "lame"])
def test_who_asks_for_graphs_gets_what_can_be_had(recipe: str, recordings: type[Imitation]) -> None:
    model = network(nn.BatchNorm2d)
    plain = df.adapt(model, recipe, cuda_graphs=False)
    recorded = df.adapt(model, recipe, cuda_graphs=True)
    for batch in stream(8):
        assert torch.equal(plain(batch), recorded(batch))


def test_recipes_that_count_steps_in_python_are_left_alone() -> None:
    can = StepGraphs.can_record
    head = df.LinearHead(3)
    assert can(df.Filter(head))
    assert not can(df.Filter(head, inference=df.GradientStep(df.Adam())))
    assert not can(df.Filter(head, observation=df.Gibbs(teacher=df.Teacher())))


@pytest.mark.filterwarnings("ignore::driftfilter.monitor.monitor.AlarmWarning")
def test_domains_that_return_are_recorded_too(recordings: type[Imitation]) -> None:
    """A state of another domain has another shift, which the host does not know."""
    model = network(nn.BatchNorm2d)
    plain = df.adapt(model, cuda_graphs=False)
    recorded = df.adapt(model, cuda_graphs=True)
    dark = [0.1 * batch for batch in stream(6, 70, seed=3)]
    light_ones = stream(6, 70, seed=2)
    for batch in (*light_ones, *dark, *light_ones, *dark):
        assert torch.equal(plain(batch), recorded(batch))
    assert plain.domains == recorded.domains
    assert len(plain.domains) > 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("n", [24, 1])
@pytest.mark.parametrize("recipe", ["driftfilter", "driftfilter_aug", "center", "opgd_diag"])
def test_graphs_on_a_gpu_are_the_ordinary_steps(norm: str, n: int, recipe: str) -> None:
    model = network(NORMS[norm]).cuda()
    plain = df.adapt(model, recipe, cuda_graphs=False)
    recorded = df.adapt(model, recipe)
    for batch in stream(40, n):
        torch.testing.assert_close(
            plain(batch.cuda()), recorded(batch.cuda()), rtol=1e-3, atol=1e-4
        )
    bound = recorded._ready(None).bound
    assert bound is not None
    assert bound.graphs is not None
    assert not bound.refused, bound.refused
    assert bound.graphs._known
    for name, own in plain.state.memory.items():
        other = recorded.state.memory[name]
        torch.testing.assert_close(own, other, rtol=1e-2, atol=1e-3, msg=f"{name}: {own} {other}")

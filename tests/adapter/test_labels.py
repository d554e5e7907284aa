"""Labels for an adapter: learned, asked for, refused, saved; parameters changed by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.adapter.labels import choose_samples
from driftfilter.model.held import HELD
from driftfilter.networks.network import STATISTICS


def network() -> nn.Module:
    torch.manual_seed(0)
    inner = (nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(*inner, nn.Flatten(), nn.Linear(6, 3)).eval()


def images(seed: int, n: int = 20, shift: float = 0.0) -> Tensor:
    return torch.rand(n, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) + shift


def started(recipe: str = "driftfilter", **options: Any) -> df.Adapter:
    adapter = df.adapt(network(), recipe, **options)
    for seed in range(3):
        adapter(images(seed))
    return adapter


def tensors(adapter: df.Adapter) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in adapter.state_dict().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("recipe", ["driftfilter", "opgd", "tent", "head_ekf", "driftfilter_aug"])
def test_a_label_makes_itself_likelier_and_nothing_else_changes(recipe: str) -> None:
    adapter, own = started(recipe), images(7, 4)
    label = adapter.predict(own).log_probabilities.argmin(-1)
    before, state = adapter.predict(own).log_probabilities, adapter.state
    info = adapter.learn(own, label)
    after = adapter.predict(own).log_probabilities
    index = torch.arange(4)
    assert (after[index, label] > before[index, label]).float().mean() > 0.5
    assert info.losses.shape == (1, 4)
    assert adapter.state.step == state.step
    known = state.memory.get(STATISTICS)
    assert known is None or torch.equal(adapter.state.memory[STATISTICS], known)


def test_the_same_as_the_filter_learns() -> None:
    adapter, own = started(domains=None), images(7, 2)
    bound = adapter._now.bound
    assert bound is not None
    expected, _ = bound.filter.learn(adapter.state, own, torch.tensor([0, 2]), 1.0)
    adapter.learn(own, torch.tensor([0, 2]))
    assert torch.equal(adapter.belief.mean, expected.belief.mean)


def test_settled_statistics_do_not_see_the_other_labels() -> None:
    """Logits of labelled samples are those of carried statistics, whoever else is learned."""
    adapter = started(domains=None)
    bound = adapter._now.bound
    assert bound is not None
    model = bound.filter._bind(adapter.state)[1].settled
    own, theta = images(7, 5), adapter.belief.mean
    each = torch.cat([model(theta, one[None]) for one in own])
    torch.testing.assert_close(model(theta, own), each)
    torch.testing.assert_close(model.pullback(theta, own)[0], each)
    assert not model.pullback(theta, own)[1].memory
    assert not model.pullback(theta, own)[1].is_coupled


def test_labels_go_to_the_domain_they_look_like() -> None:
    adapter = df.adapt(network(), domains=df.Domains())
    for seed in range(4):
        adapter(images(seed, 60))
    for seed in range(4, 8):
        adapter(images(seed, 60, 3.0))
    assert len(adapter.domains) == 2
    before = adapter._now
    adapter.learn(images(20, 1), 0)  # late: of the first domain
    after = adapter._now
    assert before.domains is not None
    assert after.domains is not None
    assert after.domains.active == before.domains.active
    assert torch.equal(after.current.belief.mean, before.current.belief.mean)
    (other,) = {0, 1} - {after.domains.active}
    states = [each.domains.slots[other].state for each in (before, after) if each.domains]
    assert states[0] is not None
    assert states[1] is not None
    assert not torch.equal(states[0].belief.mean, states[1].belief.mean)


def test_numbers_count_once() -> None:
    adapter = started()
    adapter.learn(images(0, 2), torch.tensor([0, 1]), numbers=[0, 59])
    before = tensors(adapter)
    for numbers, message in (
        ([59], "each learned once"),
        ([1, 1], "each learned once"),
        ([60], "of samples that have come since the stream began, 0 to 59"),
        ([-1], "of samples that have come"),
        ([0.5], "numbers must be integers"),
    ):
        own = images(0, len(numbers))
        with pytest.raises(ValueError, match=message):
            adapter.learn(own, torch.zeros(len(numbers), dtype=torch.long), numbers=numbers)
        assert_same(before, tensors(adapter))
    adapter.learn(images(0, 1), 0, numbers=[1])
    adapter.reset()  # a new stream: its samples are counted from 0
    with pytest.raises(ValueError, match="of samples that have come"):
        adapter.learn(images(0, 1), 0, numbers=[1])


def test_without_numbers_a_label_counts_as_often_as_it_is_given() -> None:
    once, twice = started(domains=None), started(domains=None)
    once.learn(images(7, 1), 0)
    twice.learn(images(7, 1), 0)
    assert torch.equal(once.belief.mean, twice.belief.mean)
    twice.learn(images(7, 1), 0)
    assert not torch.equal(once.belief.mean, twice.belief.mean)


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        (torch.tensor([3]), {}, r"labels must be in \[0, 2\], got 'values from 3 to 3'"),
        (torch.tensor([-1]), {}, r"labels must be in \[0, 2\]"),
        (torch.tensor([0, 1]), {}, r"labels must be integers of shape \[1\]"),
        ("cat", {}, "labels must be a tensor of integers, got 'str'"),
        (0, {"weight": -1.0}, "weight must be a finite number"),
    ],
)
def test_wrong_labels_leave_all_as_it_was(labels: Any, options: Any, message: str) -> None:
    adapter = started()
    before = tensors(adapter)
    with pytest.raises(ValueError, match=message):
        adapter.learn(images(7, 1), labels, **options)
    with pytest.raises(ValueError, match="finite"):
        adapter.learn(images(7, 1) * torch.nan, 0)
    kept = [name for name in before if not name.startswith("monitor.")]  # that is an event
    now = tensors(adapter)
    assert all(torch.equal(before[name], now[name]) for name in kept)


def test_a_recipe_that_learns_nothing_refuses() -> None:
    adapter = started("center")
    with pytest.raises(ValueError, match="one that learns from an energy"):
        adapter.learn(images(7, 1), 0)


def test_saved_and_resumed_bit_for_bit(tmp_path: Path) -> None:
    adapter = started()
    adapter.learn(images(0, 2), torch.tensor([0, 1]), numbers=[3, 4])
    adapter.intervene("1.weight", inflate=2.0, freeze=True)
    df.save(adapter, tmp_path / "a.safetensors")
    other = df.adapt(network())
    df.load(other, tmp_path / "a.safetensors")
    for each in (adapter, other):
        each(images(9))
        each.learn(images(1, 1), 2, numbers=[5])
    assert_same(tensors(adapter), tensors(other))
    with pytest.raises(ValueError, match="each learned once"):
        other.learn(images(0, 1), 0, numbers=[4])
    assert other.events == adapter.events


# Which samples to ask about


def test_ask_names_the_most_doubtful_of_each_class() -> None:
    p = torch.tensor([[0.34, 0.33, 0.33], [0.36, 0.32, 0.32], [0.1, 0.8, 0.1], [0.98, 0.01, 0.01]])
    assert choose_samples(p.log(), 1).tolist() == [0]
    # 2 is of another class: ln 2 or so is more than half of ln 3.
    assert choose_samples(p.log(), 3).tolist() == [0, 2, 1]
    assert sorted(choose_samples(p.log(), 4).tolist()) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="at most 4, the samples of the last batch"):
        choose_samples(p.log(), 5)


def test_ask_is_about_the_last_batch() -> None:
    adapter = df.adapt(network())
    with pytest.raises(ValueError, match="called after"):
        adapter.ask()
    logs = adapter(images(0))
    entropies = torch.special.entr(logs.exp()).sum(-1)
    assert adapter.ask().tolist() == [int(entropies.argmax())]
    logs.zero_()  # the caller's own
    assert adapter.ask().tolist() == [int(entropies.argmax())]
    adapter.update(images(1))  # predicts nothing
    with pytest.raises(ValueError, match="called after"):
        adapter.ask()


# By hand


@pytest.mark.parametrize("monitor", [None, df.Monitor()])
def test_interventions_by_name(monitor: df.Monitor | None) -> None:
    adapter = started(monitor=monitor, domains=None)
    before = adapter.belief.covariance.variance().clone()
    adapter.intervene("1.weight", inflate=3.0)
    ratio = adapter.belief.covariance.variance() / before
    torch.testing.assert_close(ratio, torch.tensor([3.0] * 6 + [1.0] * 6))
    event = adapter.events[-1]
    assert (event.signal, event.value, event.response) == ("intervention", 6.0, "record")
    adapter.intervene(["1.*"], mean="source")
    assert torch.equal(adapter.belief.mean, torch.cat((torch.ones(6), torch.zeros(6))))
    adapter.intervene("1.bias", mean=torch.arange(6.0), freeze=True)
    variance = adapter.belief.covariance.variance().clone()
    for seed in range(4):
        adapter(images(seed, shift=2.0))
    assert adapter.belief.mean[6:].tolist() == list(range(6))
    assert torch.equal(adapter.belief.covariance.variance()[6:], variance[6:])
    assert (adapter.belief.mean[:6] != 1).all()
    adapter.intervene("1.bias", freeze=False)
    adapter(images(5, shift=2.0))
    assert (adapter.belief.mean[6:] != torch.arange(6.0)).any()


def test_interventions_reach_every_domain() -> None:
    adapter = df.adapt(network(), domains=df.Domains())
    for seed in range(8):
        adapter(images(seed, 60, 0.0 if seed < 4 else 3.0))
    adapter.intervene("1.bias", mean=0.25)
    domains = adapter._now.domains
    assert domains is not None
    states = [slot.state for slot in domains.slots if slot.state is not None]
    assert len(states) == 2
    assert all((state.belief.mean[6:] == 0.25).all() for state in states)


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (
            "1.weigth",
            {"inflate": 2.0},
            r"adapted parameter.*did you mean '1.weight'",
        ),
        ("5.*", {"inflate": 2.0}, "the name of an adapted parameter"),
        ([], {"inflate": 2.0}, "one name or more"),
        ("1.*", {}, "inflate, mean or freeze"),
        ("1.*", {"mean": "start"}, "'source'"),
        ("1.bias", {"mean": torch.zeros(3)}, r"intervene: mean must be \[6\], as '1.bias'"),
    ],
)
def test_wrong_interventions(names: Any, options: Any, message: str) -> None:
    adapter = started()
    before = tensors(adapter)
    with pytest.raises(ValueError, match=message):
        adapter.intervene(names, **options)
    assert_same(before, tensors(adapter))


# Where labels, domains, monitors and copies meet


def two_domains() -> df.Adapter:
    """The stream has just moved from one domain to another, and the network has just probed."""
    adapter = df.adapt(network(), domains=df.Domains())
    for seed in range(6):
        adapter(images(seed, 60, 0.0 if seed < 5 else 3.0))
    assert len(adapter.domains) == 2
    return adapter


def test_labels_of_another_domain_leave_the_one_at_hand_as_it_was() -> None:
    adapter = two_domains()
    before = adapter.state
    adapter.learn(images(20, 1), 0)
    assert torch.equal(adapter.belief.mean, before.belief.mean)
    assert_same(dict(before.memory), dict(adapter.state.memory))


def test_each_label_takes_its_weight_to_its_domain() -> None:
    own, labels = torch.cat((images(20, 1), images(21, 2, 3.0))), torch.tensor([0, 1, 2])
    weights = torch.tensor([0.5, 1.0, 2.0])
    together, apart = two_domains(), two_domains()
    together.learn(own, labels, weight=weights)
    apart.learn(own[:1], labels[:1], weight=0.5)
    apart.learn(own[1:], labels[1:], weight=weights[1:])
    assert_same(tensors(together), tensors(apart))


@pytest.mark.parametrize("recipe", ["t3a", "stad", "stad_vmf"])
def test_prototypes_by_features_refuse_labels_and_freezing(recipe: str) -> None:
    """They would count the class that they predict themselves, whatever the label."""
    adapter = started(recipe)
    before = tensors(adapter)
    with pytest.raises(ValueError, match="one that learns from an energy"):
        adapter.learn(images(7, 1), 0)
    with pytest.raises(ValueError, match="freeze must be None with"):
        adapter.intervene("*", freeze=True)
    assert_same(before, tensors(adapter))
    adapter(images(8))


def test_a_monitor_goes_back_to_a_belief_with_the_intervention_in_it() -> None:
    adapter = started(domains=None, monitor=df.Monitor(lag=1))
    for seed in range(3, 12):
        adapter(images(seed))
    assert adapter._now.watch.good is not None
    adapter.intervene("1.bias", mean=0.25, freeze=True)
    watch = adapter._now.watch
    for state in (watch.good, watch.newer, adapter.state):
        assert state is not None
        assert (state.belief.mean[6:] == 0.25).all()
        assert state.memory[HELD][0].tolist() == [0.0] * 6 + [1.0] * 6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"numbers": ["a"]}, r"numbers must be integers of shape \[1\], got \['a'\]"),
        ({"numbers": [2**70]}, r"numbers must be integers of shape \[1\]"),
        ({"numbers": [None]}, r"numbers must be integers of shape \[1\], got \[None\]"),
        ({"labels": 10**30}, "labels must be a class index, got 10"),
        ({"labels": torch.tensor([7], dtype=torch.uint64)}, r"labels must be in \[0, 2\]"),
        ({"weight": torch.ones(3)}, r"weight must be finite numbers > 0, one or of shape \[1\]"),
        ({"weight": torch.ones(1, 1)}, r"weight must be finite numbers > 0, one or of shape"),
    ],
)
def test_errors_name_the_argument(call: dict[str, Any], message: str) -> None:
    adapter = started()
    before = tensors(adapter)
    with pytest.raises(ValueError, match=message):
        adapter.learn(images(7, 1), **{"labels": 0, **call})
    assert_same(before, tensors(adapter))


def test_factors_beyond_the_dtype_and_no_names() -> None:
    adapter = started()
    with pytest.raises(ValueError, match="inflate must be"):
        adapter.intervene("1.bias", inflate=1e40)
    with pytest.raises(ValueError, match="intervene: names must be one name or more"):
        adapter.intervene(None, freeze=True)  # type: ignore[arg-type]

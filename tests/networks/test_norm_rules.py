"""Batch norm by a rule of one's own, RoTTA's and NOTE's: against plain layers, carried from step
to step in the state, differentiated, and refused where it cannot work.
"""

import math
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
from published.gradient_steps import flat, network, norms, stream
from published.more_methods import InstanceAwareNorm, RobustNorm, replace_norms
from small import assert_same, normal, refuses

MODEL, STREAM = network(), stream()
STATISTICS = "network.statistics"


def flat_norms(model: nn.Module) -> Tensor:
    return flat(norms(deepcopy(model)))


RULES: dict[str, tuple[Any, Any]] = {
    "robust": (df.RobustStatistics(0.3), lambda layer: RobustNorm(layer, 0.3)),
    "instance-aware": (
        df.InstanceAware(0.5, 0.2),
        lambda layer: InstanceAwareNorm(layer, 0.5, 0.2),
    ),
    "hardly aware": (df.InstanceAware(50.0, 0.2), lambda layer: InstanceAwareNorm(layer, 50, 0.2)),
}
every_rule = pytest.mark.parametrize("name", RULES)


@every_rule
def test_passes_that_learn_and_passes_that_predict(name: str) -> None:
    """Logits, gradients and rows of a network of plain layers, whose statistics go on as its."""
    rule, layer = RULES[name]
    model: Any = df.Network(MODEL, statistics=rule)
    theta, plain = flat_norms(MODEL), replace_norms(MODEL, layer)
    parameters = [p for n, p in plain.named_parameters() if n.startswith(("norm1", "layer4"))]
    memory: dict[str, Tensor] = {}
    for step, batch in enumerate(STREAM):
        plain.eval()
        torch.testing.assert_close(model(theta, batch), plain(batch).detach())
        again = model.pullback(theta, batch)  # a pass that learns leaves the model as it is
        plain.train()
        logits = plain(batch)
        outputs, pull = model.pullback(theta, batch)
        torch.testing.assert_close(outputs, logits.detach())
        assert torch.equal(outputs, again[0])
        cotangents = normal(*logits.shape, seed=step)
        gradient = torch.autograd.grad(logits, parameters, cotangents)
        torch.testing.assert_close(pull.total(cotangents), flat(gradient))
        torch.testing.assert_close(again[1](cotangents).sum(0), flat(gradient))
        memory = dict(pull.memory)
        expected = [part for each in plain.modules() for part in getattr(each, "carried", ())]
        torch.testing.assert_close(memory[STATISTICS], torch.cat(expected))
        model = model.recall(memory)


def test_an_instance_aware_norm_is_batch_norm_where_chance_explains_a_sample() -> None:
    """With a wide margin; with none, each sample is normalised by itself."""
    batch = STREAM[0]
    theta = flat_norms(MODEL)
    wide = df.Network(MODEL, statistics=df.InstanceAware(1e6))
    torch.testing.assert_close(wide(theta, batch), MODEL(batch).detach())
    layer = nn.BatchNorm2d(3).double().eval()
    alone = nn.Sequential(layer, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    none = df.Network(alone, statistics=df.InstanceAware(0.0))
    instance = nn.functional.instance_norm(batch).mean((2, 3))
    torch.testing.assert_close(none(flat_norms(alone), batch), instance, rtol=0, atol=1e-6)


def test_one_value_a_sample_and_one_sample() -> None:
    table = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double().eval()
    rows, theta = normal(6, 3), torch.cat([*table[1].parameters()]).detach()
    for rule in (df.InstanceAware(), df.RobustStatistics(1.0)):
        model = df.Network(table, statistics=rule)
        torch.testing.assert_close(model(theta, rows), table(rows).detach())
        outputs, pull = model.pullback(theta, rows[:1])
        assert outputs.isfinite().all()
        assert pull.memory[STATISTICS].isfinite().all()


@dataclass(frozen=True)
class Geometric:
    """One of a user's own: deviations go half of the way to the batch's, in their logarithms."""

    share: float = 0.5

    def normalize_by(self, call: df.NormCall) -> Any:
        mean, variance = call.moments()
        old = call.carried[1]
        blend = torch.exp((1 - self.share) * old.log() + self.share * variance.log())
        return (mean, blend), ((mean, blend) if call.learning else call.carried)


@pytest.mark.parametrize(
    "rule", [df.RobustStatistics(0.3), df.InstanceAware(1.0, 0.2), Geometric()], ids=repr
)
def test_a_stream_goes_on_bit_for_bit_from_a_checkpoint(rule: Any, tmp_path: Path) -> None:
    before = {key: value.clone() for key, value in MODEL.state_dict().items()}
    adapter, other = (df.adapt(MODEL, "tent", lr=0.02, statistics=rule) for _ in range(2))
    first = adapter(STREAM[0])
    adapter(STREAM[1])
    df.save(adapter, tmp_path / "state.safetensors")
    df.load(other, tmp_path / "state.safetensors")
    assert torch.equal(adapter(STREAM[2]), other(STREAM[2]))
    assert_same(adapter.state_dict(), other.state_dict())
    assert_same(dict(MODEL.state_dict()), before)
    adapter.reset()
    assert torch.equal(adapter(STREAM[0]), first)


def test_a_rule_of_a_user_s_own_does_what_it_says() -> None:
    model = df.Network(MODEL, statistics=Geometric())
    plain, theta = deepcopy(MODEL), flat_norms(MODEL)
    outputs, pull = model.pullback(theta, STREAM[0])
    entering, found = STREAM[0], []
    for layer in plain.children():
        if isinstance(layer, nn.BatchNorm2d):
            variance, mean = torch.var_mean(entering, (0, 2, 3), correction=0)
            assert layer.running_var is not None
            blend = (layer.running_var * variance).sqrt()
            found += [mean, blend]
            layer.running_mean, layer.running_var = mean.detach(), blend.detach()
        entering = layer(entering)
    torch.testing.assert_close(outputs, entering.detach())
    torch.testing.assert_close(pull.memory[STATISTICS], torch.cat(found).detach())
    assert math.isfinite(pull.total(torch.ones_like(outputs)).sum().item())


test_what_cannot_work_is_refused = refuses(
    [
        (
            lambda: df.adapt(MODEL, "tent", statistics=df.RobustStatistics(), distributed=True),
            "adapt: recipe must be of statistics that ranks can add up",
        ),
        (
            lambda: df.Backbone(MODEL, "head", statistics=df.InstanceAware()),
            "Backbone: statistics must be 'batch', 'source' or PseudoCount.count., got Instance",
        ),
        (
            lambda: df.Network(MODEL, statistics=df.InstanceAware),  # type: ignore[arg-type]
            "Network: statistics must be .* or a NormRule, got <class",
        ),
        (
            lambda: df.InstanceAware(-1.0),
            r"InstanceAware.width must be a finite number in \[0, inf\), got -1.0",
        ),
    ]
)


def test_cuda_graphs_are_ignored_aloud() -> None:
    with pytest.warns(UserWarning, match="cuda_graphs is ignored: batch norms have statistics of"):
        df.adapt(MODEL, "tent", statistics=df.RobustStatistics(), cuda_graphs=True)

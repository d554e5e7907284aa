"""Statistics behind layers that keep none: an identity on the source, the source's moments on the
stream, held against formulas written out.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.networks.alignment import align, find_alignable
from driftfilter.networks.batch_trust import SHIFT
from driftfilter.networks.shared_copy import twin
from small import assert_same


class Tokens(nn.Module):
    """Two norms over the last dimension of [n, tokens, c], one of them behind attention."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = norm(6), norm(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        hidden = inputs + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.head(self.second(hidden).mean(1))  # type: ignore[no-any-return]


def images(norm: nn.Module) -> nn.Sequential:
    first = nn.Conv2d(2, 4, 3, padding=1)
    return nn.Sequential(first, norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer": (lambda: Tokens(nn.LayerNorm), (5, 6)),
    "rms": (lambda: Tokens(nn.RMSNorm), (5, 6)),
    "group": (lambda: images(nn.GroupNorm(2, 4)), (2, 4, 4)),
    "instance": (lambda: images(nn.InstanceNorm2d(4, affine=True)), (2, 4, 4)),
    "instance without parameters": (lambda: images(nn.InstanceNorm2d(4)), (2, 4, 4)),
    "table": (
        lambda: nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)),
        (5,),
    ),
    "encoder": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), nn.Flatten(), nn.Linear(30, 3)
        ),
        (5, 6),
    ),
}
every = pytest.mark.parametrize("name", NETWORKS)


def make(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A network in float64 with parameters of no special value, source data, and a stream."""
    torch.manual_seed(0)
    build, shape = NETWORKS[name]
    model = build().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    source = torch.randn(40, *shape, dtype=torch.float64)
    return model, source, 1.7 * torch.randn(24, *shape, dtype=torch.float64) + 0.5


def outputs_of(model: nn.Module, layers: list[nn.Module], inputs: Tensor) -> list[Tensor]:
    """What some layers give [n, c, ...], with what stands behind them."""
    found: list[Tensor] = []
    handles = [layer.register_forward_hook(lambda *call: found.append(call[2])) for layer in layers]
    with torch.no_grad():
        model(inputs)
    for handle in handles:
        handle.remove()
    last = [isinstance(layer, (nn.LayerNorm, nn.RMSNorm)) for layer in layers]
    return [
        each.movedim(-1, 1) if ends and each.dim() > 2 else each
        for each, ends in zip(found, last, strict=True)
    ]


def moments_of(values: Tensor) -> tuple[Tensor, Tensor]:
    flat = values.movedim(1, -1).flatten(0, -2)
    return flat.mean(0), flat.var(0, correction=0)


@every
def test_on_the_source_an_aligned_network_is_the_network(name: str) -> None:
    model, source, stream = make(name)
    frozen = twin(model)
    align(frozen, None, source.split(16))
    recipe = df.Recipe(df.Smallest(), "source", inference=df.Frozen(), align=True)
    adapter = df.adapt(model, recipe, data=source)
    with torch.no_grad():
        torch.testing.assert_close(frozen(stream), model(stream), atol=1e-12, rtol=0)
        torch.testing.assert_close(
            adapter(stream), model(stream).log_softmax(-1), atol=1e-12, rtol=0
        )


@every
def test_behind_each_layer_a_batch_has_the_moments_of_the_source(name: str) -> None:
    model, source, stream = make(name)
    frozen = twin(model)
    layers = find_alignable(frozen)
    names = {layer: each for each, layer in frozen.named_modules()}
    same = [model.get_submodule(names[layer]) for layer in layers]
    wanted = outputs_of(model, same, source)
    align(frozen, None, source.split(7))
    network = df.Network(frozen, df.NormAffine(), "batch")
    own = network._own().module
    found = outputs_of(own, [own.get_submodule(names[layer]) for layer in layers], stream)
    assert len(layers) > 0
    for got, expected in zip(found, wanted, strict=True):
        mean, variance = moments_of(got)
        own_mean, own_variance = moments_of(expected)
        torch.testing.assert_close(mean, own_mean, atol=1e-5, rtol=0)
        torch.testing.assert_close(
            variance, own_variance, atol=2e-3, rtol=0
        )  # up to ε = 1e-5 of batch norm


@pytest.mark.parametrize("statistics", ["batch", "source", df.Ema(1.0)], ids=str)
@every
def test_rows_sum_to_the_gradient_of_the_batch(name: str, statistics: object) -> None:
    model, source, stream = make(name)
    frozen = twin(model)
    align(frozen, None, source.split(16))
    network = df.Network(frozen, df.NormAffine(), statistics)  # type: ignore[arg-type]
    theta = network.mean()
    logits, pullback = network.pullback(theta, stream)
    cotangents = torch.randn_like(logits)

    def value(point: Tensor) -> Tensor:
        return (network(point, stream) * cotangents).sum()

    steps = torch.eye(len(theta), dtype=torch.float64)[:: max(1, len(theta) // 7)]
    rows = pullback(cotangents)
    assert rows.shape == (len(stream), len(theta))
    for step in steps:
        slope = (value(theta + 1e-5 * step) - value(theta - 1e-5 * step)) / 2e-5
        torch.testing.assert_close(rows.sum(0) @ step, slope, atol=1e-5, rtol=0)


def test_scale_and_shift_behind_a_norm_are_adapted_in_place_of_its_own() -> None:
    model, source, _ = make("layer")
    frozen = twin(model)
    align(frozen, None, source.split(16))
    names = df.NormAffine()(frozen)
    assert names == [
        f"{norm}.behind.{part}" for norm in ("first", "second") for part in ("weight", "bias")
    ]


def test_source_data_choose_alignment_and_print_it() -> None:
    model, source, stream = make("group")
    assert not df.adapt(model).recipe.align
    adapter = df.adapt(model, data=source)
    assert adapter.recipe.align
    assert "there are source data" in " ".join(str(adapter).split())
    by_batch = images(nn.BatchNorm2d(4)).double().eval()
    by_data = df.adapt(by_batch, data=source)
    assert not by_data.recipe.align
    assert by_data.recipe == df.presets.get("driftfilter", norms="measured")
    assert "source data" in str(by_data)
    assert df.adapt(by_batch).recipe == df.presets.get("driftfilter")
    adapter(stream)
    model, source, _ = make("table")
    assert not df.adapt(model, data=source).recipe.align  # clean tables were seen to lose


def test_a_users_model_stays_as_it_is() -> None:
    model, source, stream = make("layer")
    before, hooks = (
        copy.deepcopy(model.state_dict()),
        [len(m._forward_hooks) for m in model.modules()],
    )
    adapter = df.adapt(model, data=source)
    adapter(stream)
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert model.state_dict().keys() == before.keys()
    for name, value in model.state_dict().items():
        assert_same(value, before[name])


def test_moments_are_measured_once_and_travel_with_a_checkpoint(tmp_path: Path) -> None:
    model, source, stream = make("group")
    passes = []

    class Counted(list[Tensor]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            passes.append(1)
            return super().__iter__()

    data = df.SourceData(Counted(source.split(16)))
    adapter = df.adapt(model, data=data, monitor=None)
    passes.clear()
    adapter.predict(stream)
    adapter(stream)
    adapter.reset()
    first = adapter(stream)
    # moments, shares of classes, smoothed labels, and whether there are labels at all
    assert len(passes) == 4
    path = tmp_path / "state.safetensors"
    df.save(adapter, path)
    other = df.adapt(model, data=source + 1, monitor=None)  # other data: the file's moments hold
    df.load(other, path)
    assert_same(other(stream), adapter(stream))
    assert_same(other.state_dict()["model.moments"], adapter.state_dict()["model.moments"])
    assert first.shape == (24, 3)


def test_a_model_that_is_written_to_is_measured_again() -> None:
    model, source, _ = make("group")
    adapter = df.adapt(model, data=source, monitor=None)
    before = adapter.state_dict()["model.moments"]
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    after = adapter.state_dict()["model.moments"]
    assert (after - before).abs().max() > 1e-4
    assert_same(after, df.adapt(model, data=source).state_dict()["model.moments"])


def test_layers_that_see_tokens_first_are_left_alone() -> None:
    layer = nn.TransformerEncoderLayer(6, 2, 8)  # [tokens, n, c]
    assert find_alignable(nn.Sequential(layer)) == []
    assert df.presets.find_norms(nn.Sequential(layer, nn.Linear(6, 3)), data=True) == "other"


def test_what_cannot_be_aligned_is_refused() -> None:
    model, source, _ = make("group")
    recipe = df.presets.get("driftfilter", norms="aligned")
    cases: list[tuple[nn.Module, df.Recipe, Any, str]] = [
        (model, recipe, None, "adapt: data must be source inputs"),
        (nn.Linear(4, 3), df.Recipe(align=True), source[:, 0, 0], "Recipe.align must be False"),
        (model, recipe, df.SourceData([]), "adapt: data must be one sample or more"),
        (model, recipe, source * torch.nan, r"moments of source data \(adapt: data\)"),
    ]
    for given, chosen, data, message in cases:
        with pytest.raises(ValueError, match=message):
            df.adapt(given, chosen, data=data).state_dict()


class Functional(nn.Module):
    """Uses the parameters of one norm without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read = nn.LayerNorm(6), nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.called(inputs)
        hidden = nn.functional.layer_norm(2 * hidden, (6,), self.read.weight, self.read.bias)
        return self.head(hidden.mean(1))  # type: ignore[no-any-return]


def test_a_norm_that_is_read_and_not_called_stays_as_it_is() -> None:
    torch.manual_seed(0)
    model = Functional().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    source = torch.randn(40, 5, 6, dtype=torch.float64)
    frozen = twin(model)
    moments = align(frozen, None, source.split(16))
    assert len(moments) == 12
    with torch.no_grad():
        torch.testing.assert_close(frozen(source), model(source), atol=1e-12, rtol=0)
    assert "read.weight" in dict(frozen.named_parameters())


def test_what_is_written_to_a_model_later_is_seen() -> None:
    model, source, stream = make("group")
    recipe = df.Recipe(df.Head(), "source", inference=df.Frozen(), align=True)
    adapter = df.adapt(model, recipe, data=source, monitor=None)
    adapter(stream)
    with torch.no_grad():
        for parameter in model.get_submodule("1").parameters():
            parameter.mul_(1.5)
        expected = model(stream).log_softmax(-1)
    torch.testing.assert_close(adapter(stream), expected, atol=1e-9, rtol=0)


def test_a_posterior_of_ones_own_is_refused_for_it_is_over_other_parameters() -> None:
    model, source, _ = make("group")
    belief = df.Belief(df.Network(model).mean(), df.Diagonal(torch.ones(8, dtype=torch.float64)))
    with pytest.raises(ValueError, match=r"Recipe\.source must be another one"):
        df.adapt(model, data=source, source=df.Given(belief))


# Batch norms, whose shift is measured from source data


def deep() -> tuple[nn.Sequential, Tensor, Tensor]:
    """Two batch norms whose running statistics are not what they see, source data and a stream."""
    torch.manual_seed(0)
    norms = nn.BatchNorm2d(4), nn.BatchNorm2d(5)
    model = nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), norms[0], nn.ReLU()),
        *(nn.Conv2d(4, 5, 3, padding=1), norms[1], nn.ReLU()),
        *(nn.Flatten(), nn.Linear(80, 3)),
    )
    model = model.double().eval()
    source = torch.randn(40, 2, 4, 4, dtype=torch.float64)
    with torch.no_grad():
        for place, norm in zip((1, 4), norms, strict=True):
            mean, variance = moments_of(model[:place](source))
            norm._buffers.update(running_mean=mean, running_var=2.5 * variance)
    return model, source, 1.3 * torch.randn(24, 2, 4, 4, dtype=torch.float64) + 0.4


MEASURED = df.Recipe(df.NormAffine(), df.Ema(0.5, 4.0, 1e9, baseline="data"), inference=df.Frozen())


def shift_of(adapter: df.Adapter, inputs: Tensor) -> float:
    adapter(inputs)
    total, samples, _ = adapter.state.memory[SHIFT].tolist()
    return float(total / samples)


def test_the_shift_is_told_from_moments_of_source_data() -> None:
    """By the formulas of batch_trust.py, written out: of two layers the last is left out."""
    model, source, stream = deep()
    with torch.no_grad():
        seen, own = model[0](source), model[0](stream)
        p = model(stream).softmax(-1).mean(0)
    mean, variance = moments_of(seen)
    own_mean, own_variance = moments_of(own)
    variance, own_variance = variance + 1e-5, own_variance + 1e-5
    r = (own.mean((2, 3)).var(0, correction=0) / own_variance).clamp(0.05, 1)
    far = (own_mean - mean) ** 2 / (r * torch.maximum(variance, own_variance))
    wide = (1 - r) * (own_variance / variance).log() ** 2
    shown = 3 * (1 - (1 - 1 / 3) ** 24)
    diversity = (torch.special.entr(p).sum().exp() / shown).clamp(max=1)
    by_chance = 1 / 24 + 1 / 40
    expected = ((far + wide).mean() - by_chance) / (1 + 2 * (1 - diversity) ** 2) / (1 + 8 / 24)
    adapter = df.adapt(model, MEASURED, data=df.SourceData(source, batch_size=7), monitor=None)
    assert shift_of(adapter, stream) == pytest.approx(float(expected), rel=1e-5)
    plain = df.adapt(model, replace(MEASURED, statistics=df.Ema(0.5, 4.0, 1e9)), monitor=None)
    assert shift_of(plain, stream) != pytest.approx(float(expected), rel=0.1)


def test_source_data_have_no_shift_from_themselves() -> None:
    model, source, _ = deep()
    adapter = df.adapt(model, MEASURED, data=source, monitor=None)
    assert -2 / 40 <= shift_of(adapter, source) < 0


def test_a_baseline_changes_no_prediction_of_the_source_and_no_model() -> None:
    model, source, stream = deep()
    before = copy.deepcopy(model.state_dict())
    adapter = df.adapt(model, replace(MEASURED, statistics="source"), monitor=None)
    measured = df.adapt(model, "driftfilter", data=source, monitor=None)
    measured(stream)
    assert model.state_dict().keys() == before.keys()
    for name, value in model.state_dict().items():
        assert_same(value, before[name])
    with torch.no_grad():
        torch.testing.assert_close(adapter(stream), model(stream).log_softmax(-1))


class Counting(nn.Module):
    """A layer that writes to a buffer of its own."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return inputs


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.GroupNorm(2, 4)], ids=repr)
def test_measuring_counts_for_no_layer_that_counts_its_calls(norm: nn.Module) -> None:
    counting = Counting()
    model = nn.Sequential(counting, *images(norm)).double().eval()
    source = torch.randn(20, 2, 4, 4, dtype=torch.float64)
    df.adapt(model, data=source, monitor=None)(source)
    assert counting.calls == 0


def test_at_home_by_its_data_a_network_stays_as_it_is() -> None:
    """Though its running statistics are far from what it sees: with these alone it moves."""
    model, source, _ = deep()
    home = df.adapt(model, data=source, monitor=None, labels=None, centering=None)
    away = df.adapt(model, monitor=None, labels=None, centering=None)
    with torch.no_grad():
        expected = model(source).argmax(-1)
    assert torch.equal(home(source).argmax(-1), expected)
    start = home.state.source.mean
    moved = [(each.state.belief.mean - start).norm() for each in (home, away) if each(source).any()]
    assert moved[0] < 0.05 * moved[1]


def test_a_baseline_travels_with_a_checkpoint(tmp_path: Path) -> None:
    model, source, stream = deep()
    adapter = df.adapt(model, data=source, monitor=None)
    adapter(stream)
    df.save(adapter, tmp_path / "state")
    other = df.adapt(model, data=source + 9, monitor=None)
    df.load(other, tmp_path / "state")
    for _ in range(6):
        assert torch.equal(adapter(stream), other(stream))


def test_a_baseline_needs_source_data() -> None:
    model, _, _ = deep()
    with pytest.raises(ValueError, match="adapt: data must be source inputs"):
        df.adapt(model, MEASURED)
    with pytest.raises(ValueError, match="no samples"):
        df.adapt(model, MEASURED, data=df.SourceData([]))(torch.zeros(4, 2, 4, 4))

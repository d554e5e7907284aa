"""Offsets of classes: against a plain loop in NumPy, in closed form, and what a filter with them
keeps, predicts and saves.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.model.centering import CENTER, Centered, Known
from driftfilter.model.predictive import PredictiveModel, lift
from oracles import Array, ClassOffsets, array, tensor
from small import Written, assert_same, normal, perceptron, refuses

THETA = normal(15)
AS_THEY_ARE: PredictiveModel = lift(lambda theta, logits: logits + 0 * theta[0])


def centre(model: Centered, batches: Any) -> tuple[Tensor, Tensor]:
    """Centred logits of a stream whose samples are their own logits, and what is known after it."""
    memory: dict[str, Tensor] = {}
    found = []
    for batch in batches:
        logits, pullback = model.recall(memory).pullback(torch.zeros(1).double(), batch)
        memory = dict(pullback.memory)
        found.append(logits)
    return torch.cat(found), memory[CENTER]


def labelled(labels: Tensor, classes: int = 3, noise: float = 1.0) -> Tensor:
    """Logits of samples that belong to these classes, 3 above the others."""
    return 3.0 * torch.eye(classes).double()[labels] + noise * normal(len(labels), classes, seed=5)


def moved(samples: int, seed: int) -> Tensor:
    """Logits of three classes in turns, with an offset."""
    labels = torch.randperm(samples, generator=torch.Generator().manual_seed(seed)) % 3
    noise = 0.7 * normal(samples, 3, seed=seed)
    return 3.0 * torch.eye(3).double()[labels] + noise + torch.tensor([3.0, 0.0, -1.0]).double()


def shares_of(source: tuple[float, ...]) -> Array:
    return np.array(source) if source else np.full(3, 1 / 3)


# ------------------------------------------------------------------ the rule


@pytest.mark.parametrize("source", [(), (0.6, 0.3, 0.1)], ids=["equal", "shares"])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (7, 1, 40, 3, 12), (60, 5)])
@pytest.mark.parametrize("rule", [df.Centering(), df.Centering(5.0, 50, 0.2)], ids=repr)
def test_a_stream_is_centred_as_by_a_loop(
    rule: df.Centering, sizes: tuple[int, ...], source: tuple[float, ...]
) -> None:
    """One batch is larger than the shorter window, which then holds nothing older."""
    plain = ClassOffsets(shares_of(source), rule.count, rule.window, rule.temperature, bool(source))
    model = Centered(
        AS_THEY_ARE, rule, torch.tensor(source, dtype=torch.float64) if source else None
    )
    memory: dict[str, Tensor] = {}
    zero = torch.zeros(1).double()
    for step, size in enumerate(sizes):
        batch = moved(size, step)
        now = model.recall(memory)
        logits, pullback = now.pullback(zero, batch)
        asked = plain.predict(array(batch))  # a prediction knows nothing of its own batch
        np.testing.assert_allclose(now(zero, batch), asked, rtol=1e-10, atol=1e-12)
        expected = plain.center(array(batch))
        np.testing.assert_allclose(logits, expected, rtol=1e-10, atol=1e-12)
        memory = dict(pullback.memory)
        runs = plain.runs
        known = [*plain.seen[0], *plain.seen[1], *plain.predicted[0], *plain.predicted[1]]
        known += [plain.squares, plain.samples, *plain.entropies]
        known += [*runs.counts, runs.pairs, runs.equal, float(runs.last or 0)]
        np.testing.assert_allclose(memory[CENTER], known, rtol=1e-10)
    if sizes[0] > 1:  # something is taken off
        assert (logits - batch).abs().max() > 1e-3


def test_of_one_batch_at_a_high_temperature_the_mean_logit_is_taken_off() -> None:
    """softmax is linear there: each round takes C / (count + C) of what is left, C = t n, and g of
    both is taken off.
    """
    batch = moved(80, 0)
    rule, plain = df.Centering(30.0, 2000, 1e6), ClassOffsets(shares_of(()), 30.0, 2000, 1e6)
    logits, known = centre(Centered(AS_THEY_ARE, rule), [batch])
    plain.center(array(batch))
    trusted = known[:3].sum()
    assert 20 < trusted <= 80
    assert plain.needed() > 0.2
    mean = (batch - batch.mean(1, keepdim=True)).mean(0)
    left = mean * (30 / (30 + trusted)) ** 2
    expected = batch - plain.needed() * (mean - left)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("temperature", "left"), [(0.75, 0.25), (20.0, 0.1)])
def test_a_constant_on_one_class_is_taken_off_in_time(temperature: float, left: float) -> None:
    """A shuffled stream with 2 on class 0 becomes the one without it, nearly so at the temperature
    of the default; a balanced stream stays as it is.
    """
    labels = torch.randperm(3000, generator=torch.Generator().manual_seed(0)) % 3
    clean, model = labelled(labels), Centered(AS_THEY_ARE, df.Centering(temperature=temperature))
    moved = clean + torch.tensor([2.0, 0.0, 0.0]).double()
    found, same = (centre(model, logits.split(25))[0] for logits in (moved, clean))
    off = (found - found.mean(1, keepdim=True)) - (same - same.mean(1, keepdim=True))
    size = off.abs().amax(1) / (4 / 3)  # as a share of what was added
    assert size[-1] < left < 0.5 * size[0]
    torch.testing.assert_close(same[1000:], clean[1000:], rtol=0, atol=0.2)
    wrong = [(logits.argmax(1) != labels).double().mean() for logits in (moved, found, clean)]
    assert wrong[1] - wrong[2] < 0.2 * (wrong[0] - wrong[2])


@pytest.mark.parametrize("size", [1, 25])
def test_labels_in_runs_count_less(size: int) -> None:
    runs = labelled((torch.arange(30).repeat_interleave(64)) % 10, 10, 0.3)
    order = torch.randperm(len(runs), generator=torch.Generator().manual_seed(1))
    (_, shuffled), (found, known) = (
        centre(Centered(AS_THEY_ARE), logits.split(size)) for logits in (runs[order], runs)
    )
    assert known[:10].sum() < 0.3 * shuffled[:10].sum()
    assert (found - runs).abs().max() < 0.3


@pytest.mark.parametrize("shares", [(0.8, 0.1, 0.1), (0.5, 0.5, 0.0), (1.0, 0.0, 0.0)])
def test_classes_that_are_not_equally_frequent_are_left_alone(shares: tuple[float, ...]) -> None:
    labels = torch.tensor(np.random.default_rng(0).choice(3, 1200, p=shares))
    logits = labelled(labels, noise=0.7)
    found, _ = centre(Centered(AS_THEY_ARE), logits.split(40))
    assert ((found.argmax(1) == labels) >= (logits.argmax(1) == labels)).double().mean() > 0.99


@pytest.mark.parametrize(("bias", "least", "most"), [(0.0, 0.0, 0.0), (2.0, 0.3, 0.6)])
def test_of_a_thousand_classes_few_are_seen_of_each(bias: float, least: float, most: float) -> None:
    """1,536 samples of 1,000 classes, 64 at a time: no offsets if the classifier has none, and
    those that it has are found though most classes were seen once or never.
    """
    k, generator = 1000, torch.Generator().manual_seed(0)
    labels = torch.randint(k, (1536,), generator=generator)
    groups = torch.randn(len(labels), k // 10, generator=generator).repeat_interleave(10, 1)
    logits = 1.2 * torch.randn(len(labels), k, generator=generator) + 1.5 * groups
    logits += bias * torch.randn(k, generator=generator)
    logits[torch.arange(len(labels)), labels] += 9.0
    found, _ = centre(Centered(AS_THEY_ARE, df.Centering()), logits.double().split(64))
    before, after = ((each.argmax(-1) == labels).double().mean() for each in (logits, found))
    assert least <= after - before <= most


def test_derivatives_are_those_of_the_model_inside() -> None:
    """Also after a stream, when offsets are not zero."""
    inputs, inner = normal(6, 2, seed=3), lift(perceptron)
    model = Centered(inner, df.Centering(count=2.0))
    memory = dict(model.pullback(THETA, inputs)[1].memory)
    _logits, pullback = model.recall(memory).pullback(THETA, inputs)
    _plain, own = inner.pullback(THETA, inputs)
    cotangents, tangents = normal(4, 6, 3, seed=8), normal(5, 15, seed=9)
    assert_same(pullback(cotangents), own(cotangents))
    assert_same(pullback.total(cotangents[0]), own.total(cotangents[0]))
    assert_same(
        model.pushforward(THETA, inputs, tangents), inner.pushforward(THETA, inputs, tangents)
    )
    assert model.linear is inner.linear
    assert Centered(df.LinearHead(2)).linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e5, 1e30])
def test_extreme_logits_stay_finite(size: float, dtype: torch.dtype) -> None:
    model: Any = Centered(AS_THEY_ARE)
    memory: dict[str, Tensor] = {}
    for batch in (size * torch.eye(3, dtype=dtype), torch.full((1, 3), size, dtype=dtype)):
        logits, pullback = model.recall(memory).pullback(torch.zeros(1, dtype=dtype), batch)
        memory = dict(pullback.memory)
        assert logits.dtype == memory[CENTER].dtype == dtype
        assert logits.isfinite().all()
        assert memory[CENTER].isfinite().all()


test_refusals_name_field_value_and_range = refuses(
    [
        (lambda: df.Centering(count=0.0), r"Centering.count must be .* in \(0, inf\), got 0.0"),
        (lambda: df.Centering(window=0), r"Centering.window must be an integer >= 1, got 0"),
        (lambda: df.Centering(temperature=-1.0), r"Centering.temperature must be .*, got -1.0"),
        (
            lambda: df.Recipe(centering=0.5),  # type: ignore[arg-type]
            r"Recipe.centering must be a Centering or None, got 0.5",
        ),
    ]
)


# ------------------------------------------------------------------ in an adapter


def classifier() -> nn.Sequential:
    """Three classes of vectors [n, 3]; a sample is its own logits, up to a norm's parameters."""
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3)).double()
    with torch.no_grad():
        for layer in ("0", "2"):
            model.get_parameter(f"{layer}.weight").copy_(2.0 * torch.eye(3))
            model.get_parameter(f"{layer}.bias").zero_()
    return model.eval()


def adapter(preset: str = "source", **options: Any) -> df.Adapter:
    return df.adapt(
        classifier(), preset, **{"centering": df.Centering(), "monitor": None, **options}
    )


def stream(seed: int, batches: int = 6, size: int = 9) -> list[Tensor]:
    moved = normal(batches * size, 3, seed=seed) + torch.tensor([1.5, 0.0, 0.0]).double()
    return list(moved.split(size))


def test_an_adapter_predicts_from_centred_logits() -> None:
    """Of a model that learns nothing else; ``predict`` changes nothing, and knows what earlier
    batches have told.
    """
    adapted, plain = adapter(), ClassOffsets(shares_of(()), 30.0, 2000, 0.75)
    for batch in stream(2):
        before = adapted.state
        asked = adapted.predict(batch).log_probabilities
        assert adapted.state is before
        own = array(classifier()(batch).detach())
        torch.testing.assert_close(asked, tensor(plain.predict(own)).log_softmax(1))
        torch.testing.assert_close(adapted(batch), tensor(plain.center(own)).log_softmax(1))


@pytest.mark.parametrize("preset", ["source", "opgd_diag"])
def test_what_was_saved_goes_on_as_if_never_stopped(preset: str, tmp_path: Path) -> None:
    running, batches = adapter(preset), stream(3)
    for batch in batches[:3]:
        running(batch)
    df.save(running, tmp_path / "state.safetensors")
    loaded = adapter(preset)
    df.load(loaded, tmp_path / "state.safetensors")
    for batch in batches[3:]:
        assert_same(loaded(batch), running(batch))
    assert_same(loaded.state.memory[CENTER], running.state.memory[CENTER])


def test_source_data_tell_the_shares_to_keep() -> None:
    """A source whose classes are not equally frequent stays as it is: by its own data and, as
    offsets would cut through clusters, without any and by those of a balanced one.
    """
    rng = np.random.default_rng(0)
    labels = torch.tensor(rng.choice(3, 2400, p=[0.6, 0.3, 0.1]))
    inputs = labelled(labels, noise=0.7)
    logits = classifier()(inputs).detach()
    balanced = labelled(torch.arange(600) % 3, noise=0.7)
    told, alone = adapter(data=df.SourceData(inputs)), adapter()
    misled = adapter(data=df.SourceData(balanced))
    off = {
        name: torch.cat(
            [adapted(batch) - logits.log_softmax(1)[at : at + 40] for at, batch in steps]
        ).abs()
        for name, adapted in (("told", told), ("alone", alone), ("misled", misled))
        for steps in [[(at, inputs[at : at + 40]) for at in range(0, 2400, 40)]]
    }
    assert off["told"][-400:].max() < 0.2
    assert off["alone"][-400:].max() < 0.2
    assert off["misled"][-400:].max() < 0.2


def test_source_data_wait_for_a_batch_that_tells_where_the_head_is() -> None:
    """Of a network that registers its head first; its state can be saved before."""
    torch.manual_seed(0)
    first = Written(
        lambda own, x: own.head(own.body(x).relu()), head=nn.Linear(4, 3), body=nn.Linear(3, 4)
    ).double()
    data = df.SourceData(normal(40, 3, seed=4))
    told, alone = (df.adapt(first.eval(), data=given) for given in (data, None))
    assert told.recipe.centering is not None
    told.load_state_dict(told.state_dict())
    for adapted in (told, alone):
        adapted(normal(20, 3, seed=6) + 1.0)
    known = [adapted.state.memory[CENTER] for adapted in (told, alone)]
    assert (known[0] - known[1]).abs().max() > 1e-3  # its shares are those of the data


def test_source_shares_are_taken_at_the_temperature_of_the_rule() -> None:
    logits = normal(50, 3) + torch.tensor([1.0, 0.0, 0.0]).double()
    found = df.SourceData(logits, batch_size=20).mean_prediction(
        AS_THEY_ARE, torch.zeros(1).double(), 0.6
    )
    scale = 0.6 * (logits - logits.mean(1, keepdim=True)).square().mean().sqrt()
    expected = ((logits / scale).softmax(1).sum(0) + 1 / 3) / 51
    torch.testing.assert_close(found, expected)


def test_a_batch_of_the_source_s_domain_tells_of_no_offsets() -> None:
    logits = moved(60, 0)
    centred, known = Centered(AS_THEY_ARE)._center(logits, 0.0)
    torch.testing.assert_close(centred, logits)
    assert not Known.of(known, logits).rounds.any()

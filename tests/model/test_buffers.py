"""Buffers: which samples stay, against lists by class; updates of what is kept; what is saved."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import driftfilter as df
from driftfilter.base.randomness import Purpose, Randomness
from driftfilter.model.buffers import AGE, COUNTS, LABEL, UNCERTAINTY
from driftfilter.storage.state_tensors import kinds
from published.gradient_steps import network, stream
from published.more_methods import CategoryMemory
from small import assert_same, refuses

MODEL, STREAM = network(), stream(6)
NOISE = df.GaussianNoise(0.2)


def predictions(samples: int, classes: int, seed: int, skew: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(samples, classes, generator=generator, dtype=torch.float64)
    logits[:, 0] += skew
    return logits.log_softmax(-1)


def draws(seed: int) -> torch.Generator:
    return Randomness(seed, 0, torch.device("cpu")).generator(Purpose.BUFFER)


@pytest.mark.parametrize(("classes", "capacity"), [(4, 8), (3, 10), (5, 3)])
@pytest.mark.parametrize("skew", [0.0, 3.0])
def test_category_balance_against_lists_of_classes(
    classes: int, capacity: int, skew: float
) -> None:
    """Batch after batch: the same samples in the same order, with their ages and entropies."""
    buffer = df.CategoryBalanced(capacity, timeliness=0.7, uncertainty=1.3)
    plain = CategoryMemory(capacity, classes, 0.7, 1.3)
    known: Mapping[str, Tensor] = {}
    kept: list[int] = []
    for step in range(5):
        said = predictions(7, classes, step, skew)
        p = said.exp()
        for i in range(7):
            unsure = -(p[i] * (p[i] + 1e-6).log()).sum().item()
            plain.add(torch.tensor(7 * step + i), int(p[i].argmax()), unsure)
        places, known = buffer.choose(known, said, draws(step))
        names = [*kept, *range(7 * step, 7 * step + 7)]
        kept = [names[place] for place in places.tolist()]
        items = [(label, *item) for label, own in enumerate(plain.lists) for item in own]
        assert kept == [int(image) for _, image, _, _ in items]
        assert known[LABEL].tolist() == [label for label, *_ in items]
        assert known[AGE].tolist() == [age for *_, age in items]
        np.testing.assert_allclose(known[UNCERTAINTY], [unsure for _, _, unsure, _ in items])
        assert len(kept) <= capacity
    assert plain.replaced > 0


def test_a_balanced_reservoir_keeps_as_many_of_each_class() -> None:
    """Of a stream in which one class is ten times as frequent."""
    buffer = df.PredictionBalanced(12)
    known: Mapping[str, Tensor] = {}
    for step in range(60):
        labels = torch.where(torch.arange(11) < 10, 0, 1 + step % 3)
        said = torch.full((11, 4), -9.0).scatter(1, labels[:, None], 0.0).log_softmax(-1)
        _, known = buffer.choose(known, said, draws(step))
    assert torch.bincount(known[LABEL], minlength=4).tolist() == [3, 3, 3, 3]
    assert known[COUNTS].tolist() == [600, 20, 20, 20]


def test_a_reservoir_of_one_class_is_uniform_over_the_stream() -> None:
    """Algorithm R: each of 40 samples stays with probability 5/40."""
    buffer, stays = df.PredictionBalanced(5), np.zeros(40)
    said = torch.tensor([[0.0, -9.0]]).log_softmax(-1).expand(8, 2)
    for seed in range(600):
        known: Mapping[str, Tensor] = {}
        kept: list[int] = []
        for step in range(5):
            places, known = buffer.choose(known, said, draws(1000 * step + seed))
            names = [*kept, *range(8 * step, 8 * step + 8)]
            kept = [names[place] for place in places.tolist()]
        stays[kept] += 1
    assert stays.sum() == 600 * 5
    assert abs(stays / 600 - 5 / 40).max() < 5 * np.sqrt(5 / 40 * 35 / 40 / 600)


# ------------------------------------------------------------------ in an adapter


def adapter_of(preset: str, **options: Any) -> df.Adapter:
    own = {"augmentation": NOISE} if preset == "rotta" else {}
    rules: dict[str, Any] = {"lr": 0.02, "capacity": 8, "every": 6, **own, **options}
    return df.adapt(MODEL, preset, monitor=None, **rules)


buffered = pytest.mark.parametrize("preset", ["rotta", "note"])


@buffered
@pytest.mark.parametrize("size", [1, 5, 12])
def test_updates_come_every_so_many_samples_however_they_are_batched(
    preset: str, size: int
) -> None:
    """And each batch is predicted before its samples enter."""
    adapter = adapter_of(preset, chunk=0)
    images = torch.cat(STREAM)[:36]
    for seen, batch in enumerate(images.split(size)):
        expected = adapter.predict(batch).log_probabilities
        assert torch.equal(adapter(batch), expected)
        assert adapter.state.step == min((seen + 1) * size, 36) // 6
    assert adapter.state.step == 6
    assert (adapter.belief.mean - adapter.state.source.mean).abs().max() > 1e-3
    assert not any(name.startswith("sample.") for name in adapter.state.memory)


def test_one_by_one_is_as_in_a_batch_within_an_update() -> None:
    """Predictions of NOTE do not see each other; there is room for all samples."""
    one, other = adapter_of("note", capacity=36), adapter_of("note", capacity=36)
    for images in torch.cat(STREAM)[:36].split(6):
        together = other(images)
        alone = torch.cat([one(image) for image in images.split(1)])
        torch.testing.assert_close(alone, together, rtol=1e-9, atol=1e-12)


@buffered
@pytest.mark.parametrize("calls", [1, 3])
def test_a_stream_goes_on_bit_for_bit_from_a_checkpoint(
    preset: str, calls: int, tmp_path: Path
) -> None:
    """In the middle between two updates: samples, what is known of them and how many there were."""
    before = {key: value.clone() for key, value in MODEL.state_dict().items()}
    adapter, other = adapter_of(preset), adapter_of(preset)
    batches = torch.cat(STREAM).split(7)
    other(batches[5])
    for batch in batches[:calls]:
        adapter(batch)
    df.save(adapter, tmp_path / "state.safetensors")
    df.load(other, tmp_path / "state.safetensors")
    for batch in batches[calls:]:
        assert torch.equal(adapter(batch), other(batch))
    assert_same(adapter.state_dict(), other.state_dict())
    assert_same(dict(MODEL.state_dict()), before)
    fresh = adapter_of(preset)
    adapter.reset()
    for batch in batches:
        assert torch.equal(adapter(batch), fresh(batch))


@buffered
def test_update_adapts_to_the_buffer_at_once(preset: str) -> None:
    adapter = adapter_of(preset, capacity=40)
    info = adapter.update(STREAM[0][:5])
    assert (info.step, adapter.state.step, len(info.weights)) == (0, 1, 5)
    info = adapter.update(STREAM[0][5:6])  # the sixth: an update is due
    assert (info.step, adapter.state.step, len(info.weights)) == (1, 2, 6)


def test_callers_may_write_to_what_they_gave() -> None:
    adapter, other = adapter_of("note"), adapter_of("note")
    for batch in torch.cat(STREAM).split(4):
        given = batch.clone()
        expected = other(batch)
        assert torch.equal(adapter(given), expected)
        given.zero_()


@dataclass(frozen=True)
class Certain:
    """One of a user's own: the samples that were the most certain when they came."""

    capacity: int = 5
    every: int = 4

    def choose(
        self, known: Mapping[str, Tensor], log_probabilities: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        tops = log_probabilities.amax(-1)
        tops = torch.cat((known["top"], tops)) if known else tops
        places = tops.argsort(descending=True)[: self.capacity]
        return places, {"top": tops[places]}


def test_a_buffer_of_a_user_s_own(tmp_path: Path) -> None:
    recipe = df.presets.get("tent", lr=0.02, buffer=Certain())
    adapter, other = (df.adapt(MODEL, recipe, monitor=None) for _ in range(2))
    plain = df.adapt(MODEL, "tent", lr=0.02, monitor=None)
    images, tops = torch.zeros(0, 3, 6, 6).double(), torch.zeros(0).double()
    for batch in torch.cat(STREAM).split(4):
        said = adapter(batch)
        torch.testing.assert_close(said, plain.predict(batch).log_probabilities)
        images, tops = torch.cat((images, batch)), torch.cat((tops, said.amax(1)))
        order = tops.argsort(descending=True)[:5]
        images, tops = images[order], tops[order]
        plain.update(images)
        torch.testing.assert_close(adapter.belief.mean, plain.belief.mean)
    df.save(adapter, tmp_path / "state.safetensors")
    df.load(other, tmp_path / "state.safetensors")
    assert_same(adapter.state_dict(), other.state_dict())


def test_recent_samples_weigh_more() -> None:
    rule, logits = df.Recency(span=4.0, beta=3.0), torch.zeros(3, 2).double()
    ages = torch.tensor([0, 4, 40])
    weights, _ = rule(logits, torch.tensor([1.0, 2.0, 1.0]).double(), {"sample.age": ages})
    faded = (-ages.double() / 4).exp()
    expected = 3 * torch.tensor([1.0, 2.0, 1.0]).double() * faded / (1 + faded)
    torch.testing.assert_close(weights, expected)
    assert rule(logits, torch.ones(3).double(), {})[0].tolist() == [1.5] * 3


# ------------------------------------------------------------------ teacher and student


def test_the_student_sees_augmented_inputs_and_the_teacher_the_inputs() -> None:
    """The energy is the cross-entropy of the one's view to the other's prediction."""
    randomness = Randomness(3, 5, torch.device("cpu"))
    teacher = df.Teacher(momentum=0.9, copies=1, confidence=0.0)
    loss = df.Consistency(None, "cross_entropy", "soft", copies=0)
    rule = df.Gibbs(loss, teacher=teacher, augmentation=NOISE)
    model = df.LinearHead(3)
    theta, inputs = torch.randn(12).double(), torch.randn(6, 4).double()
    source = df.Belief(torch.randn(12).double(), df.Full(torch.eye(12).double()))
    energy, _ = rule(model, theta, inputs, {}, randomness, source)
    view = NOISE(inputs, randomness.generator(Purpose.STUDENT))
    target = model(source.mean, inputs).softmax(1)
    expected = -(target * model(theta, view).log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(energy.evaluation.value(), expected)
    assert energy.known_logits(theta) is None  # predictions are of the inputs
    filt = df.Filter(model, observation=rule, predict_from="prior")
    state = filt.init(source)
    _, prediction, _ = filt.step(state, inputs)
    prior = filt.transition(source, source)
    torch.testing.assert_close(prediction.probabilities, model(prior.mean, inputs).softmax(1))


test_what_cannot_work_is_refused = refuses(
    [
        (
            lambda: df.adapt(MODEL, "rotta", window=9),
            "adapt: window must be left out with a buffer.*, got 9",
        ),
        (
            lambda: df.adapt(MODEL, "note", update_every=2),
            "adapt: update_every must be left out with a buffer.*, got 2",
        ),
        (
            lambda: df.presets.get("rotta", least=3),
            "Recipe.least must be 0 with a buffer, .*, got 3",
        ),
        (
            lambda: df.presets.get("tent", buffer=df.CategoryBalanced),
            "Recipe.buffer must be a Buffer, such as CategoryBalanced.., or None, got <class",
        ),
        (
            lambda: df.presets.get("tent", buffer=df.MAP()),
            "Recipe.buffer must be a Buffer, .*, got MAP",
        ),
        (
            lambda: df.CategoryBalanced(capacity=0),
            "CategoryBalanced.capacity must be an integer >= 1, got 0",
        ),
        (
            lambda: df.Teacher(own_statistics=True),
            "Teacher.confidence must be 0 for a teacher with statistics of its own, got 0.92",
        ),
        (
            lambda: df.Fleet(
                df.Filter(df.LinearHead(2), observation=df.Gibbs(augmentation=NOISE)),
                df.Belief(torch.zeros(2), df.Full(torch.eye(2))),
            ),
            "Fleet: filt must be a filter of closed forms, but the loss sees augmented inputs",
        ),
    ]
)


def test_a_recipe_is_of_the_kind_it_was_before_buffers() -> None:
    """Checkpoints of before go on; those with a buffer say so."""
    recipe = df.presets.get("tent")
    assert kinds(recipe).endswith("prior, NoneType, NoneType)")  # of upkeep and centring
    buffered = kinds(replace(recipe, buffer=df.CategoryBalanced()))
    assert buffered.endswith("CategoryBalanced())")
    assert "Gibbs(Entropy(), Constant(), batch, NoneType)" in kinds(recipe)

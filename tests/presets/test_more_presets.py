"""More presets are the updates their authors published: step by step against plain loops."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
import published.gradient_steps as by_hand
import published.more_methods as more
from driftfilter.base.randomness import Purpose, Randomness
from driftfilter.presets.more_published import MORE

SEED = 3
MODEL, STREAM = by_hand.network(), by_hand.stream()


def mean_of(adapter: df.Adapter) -> Tensor:
    return adapter.belief.mean


class Case(NamedTuple):
    """A preset on a stream, and what its authors' loop does there."""

    adapter: df.Adapter
    batches: list[Tensor]
    steps: list[by_hand.Step]
    read: Callable[[df.Adapter], Tensor] = mean_of
    learns: bool = True


def adapter_of(preset: str, model: nn.Module = MODEL, **options: Any) -> df.Adapter:
    return df.adapt(model, preset, seed=SEED, **options)


def draws_of(purpose: Purpose, step: int) -> torch.Generator:
    return Randomness(SEED, step, torch.device("cpu")).generator(purpose)


def come() -> Case:
    steps = by_hand.descend(MODEL, STREAM, more.come_loss, by_hand.adam(0.02))
    return Case(adapter_of("come", lr=0.02), STREAM, list(steps))


def deyo() -> Case:
    def draws(step: int, samples: int) -> Tensor:
        return torch.rand(samples, 9, generator=draws_of(Purpose.WEIGHTING, step))

    rules: dict[str, Any] = {"lr": 0.02, "drop": 0.05, "margin": 0.6, "limit": 0.8}
    steps = list(more.deyo_loop(MODEL, STREAM, **rules, cuts=3, draws=draws))
    assert all(0 < step.kept < int(step.note.split()[0]) < 12 for step in steps)
    return Case(adapter_of("deyo", **rules, patches=3), STREAM, steps)


def lame(affinity: str) -> Case:
    steps = list(more.lame_loop(MODEL, STREAM, affinity, 3))
    assert all(2 < step.kept < 99 and step.note == "moved" for step in steps)
    adapter = adapter_of("lame", affinity=affinity, neighbours=3)
    return Case(adapter, STREAM, steps, learns=False)


NOISE = df.GaussianNoise(0.2)


def noisy_views(copies: int) -> Callable[[Tensor, int], list[Tensor]]:
    def views(images: Tensor, step: int) -> list[Tensor]:
        generator = draws_of(Purpose.VIEWS, step)
        return [NOISE(images, generator) for _ in range(copies)]

    return views


def santa() -> Case:
    images = by_hand.stream(4, seed=5)
    labels = torch.arange(48).split(12)
    data = [(batch, own % 4) for batch, own in zip(images, labels, strict=True)]
    rules: dict[str, Any] = {"lr": 0.02, "anchoring": 0.7, "contrast": 1.3, "temperature": 0.3}
    views = noisy_views(1)
    steps = list(
        more.santa_loop(
            MODEL, STREAM, data, **rules, augment=lambda images, step: views(images, step)[0]
        )
    )
    assert all(step.kept > 1 for step in steps)  # samples have different prototypes
    adapter = adapter_of("santa", **rules, augmentation=NOISE, data=df.SourceData(data))
    return Case(adapter, STREAM, steps)


def shot(window: int = 20) -> Case:
    """With a window of more than a batch and of less."""
    steps = list(more.shot_loop(MODEL, STREAM, 0.02, 0.5, window))
    assert max(step.kept for step in steps) > 0  # a centroid says otherwise
    return Case(adapter_of("shot", lr=0.02, weight=0.5, recent=window), STREAM, steps)


def tttpp(queue: int = 0) -> Case:
    data = by_hand.stream(4, seed=5)
    rules: dict[str, Any] = {"lr": 0.02, "scale": 0.3, "temperature": 0.5}
    loop = more.tttpp_loop(MODEL, STREAM, data, **rules, window=queue or 12, views=noisy_views(2))
    steps = list(loop)
    assert [step.kept for step in steps] == ([12, 20, 20] if queue else [12, 12, 12])
    options: dict[str, Any] = {"augmentation": NOISE, "data": df.SourceData(data)}
    return Case(adapter_of("tttpp", **rules, queue=queue, **options), STREAM, steps)


def rotta() -> Case:
    rules: dict[str, Any] = {"lr": 0.02, "capacity": 8, "every": 6, "momentum": 0.2}

    def augment(images: Tensor, update: int) -> Tensor:
        return NOISE(images, draws_of(Purpose.STUDENT, update))

    loop = more.rotta_loop(
        MODEL, STREAM, **rules, slowness=0.7, timely=0.8, certain=1.2, augment=augment
    )
    steps = list(loop)
    assert steps[-1].kept > 4  # samples take the places of others
    assert steps[-1].note != "0 refused"
    options: dict[str, Any] = {"slowness": 0.7, "timeliness": 0.8, "uncertainty": 1.2}
    return Case(adapter_of("rotta", **rules, **options, augmentation=NOISE), STREAM, steps)


def note() -> Case:
    def draws(seen: int) -> list[list[float]]:
        generator = draws_of(Purpose.BUFFER, seen)
        numbers: list[list[float]] = torch.rand(
            6, 3, generator=generator, dtype=torch.float64
        ).tolist()
        return numbers

    rules: dict[str, Any] = {"lr": 0.02, "capacity": 8, "every": 6, "width": 0.5, "momentum": 0.2}
    steps = list(more.note_loop(MODEL, STREAM, **rules, draws=draws))
    assert steps[-1].kept > 4
    assert steps[-1].note != "0 refused"
    return Case(adapter_of("note", **rules), STREAM, steps)


CASES: dict[str, Callable[[], Case]] = {
    "rotta": rotta,
    "note": note,
    "santa": santa,
    "shot": shot,
    "shot within a batch": lambda: shot(5),
    "tttpp": tttpp,
    "tttpp with a queue": lambda: tttpp(20),
    "come": come,
    "deyo": deyo,
    "lame": lambda: lame("knn"),
    "lame rbf": lambda: lame("rbf"),
    "lame linear": lambda: lame("linear"),
}


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_a_preset_is_its_authors_loop(name: str) -> None:
    """After one, two and three batches: parameters and probabilities."""
    case = CASES[name]()
    before = [parameter.clone() for parameter in MODEL.parameters()]
    assert len(case.batches) == len(case.steps) == 3
    case.adapter(case.batches[0])
    start = case.adapter.state.source.mean
    case.adapter.reset()
    for batch, step in zip(case.batches, case.steps, strict=True):
        assert_close(case.adapter(batch).exp(), step.probabilities)
        assert_close(case.read(case.adapter), step.parameters)
    moved = max((step.parameters - start).abs().max().item() for step in case.steps)
    assert moved > 1e-4 if case.learns else moved == 0
    assert all(
        torch.equal(one, other) for one, other in zip(before, MODEL.parameters(), strict=True)
    )


def test_every_preset_has_a_loop() -> None:
    assert {preset.__name__ for preset in MORE} <= set(CASES)

"""An adapter in the place of a model: what it may change, what it must remember, and what it
refuses.
"""

import copy
import math
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app import models, streams
from driftfilter.app.corruptions import corrupt
from driftfilter.storage.state_tensors import to_tensors
from small import assert_same, few_copies, refuses

presets = pytest.mark.parametrize("preset", df.presets.names())
Tensors = dict[str, Tensor]


class Counting(nn.Module):
    """Counts its calls in a buffer, whatever its mode, and passes its inputs on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.get_buffer("calls").add_(1)
        return inputs


def network() -> nn.Sequential:
    """In training mode, with statistics that are not the initial ones."""
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        Counting(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    model = nn.Sequential(*layers, nn.Dropout(0.5), nn.Linear(6, 4)).train()
    with torch.no_grad():
        model(2 * torch.randn(64, 3, 6, 6) + 1)
    return model


def images(count: int = 4, seed: int = 1) -> Tensor:
    return torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def adapter(preset: str, model: nn.Module | None = None, **options: Any) -> df.Adapter:
    data = df.SourceData(
        images(16, 9), torch.arange(16) % 4
    )  # those that have no use for it leave it
    options = {"least": 0, **few_copies(preset), **options}  # a step on every batch, however small
    return df.adapt(network() if model is None else model, preset, data=data, **options)


def snapshot(model: nn.Module) -> tuple[Tensors, list[Any]]:
    """Everything about a module that a caller could notice."""
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors.update(
        {
            f"{name}.grad": p.grad.clone()
            for name, p in model.named_parameters()
            if p.grad is not None
        }
    )
    rest = [
        (
            name,
            layer.training,
            sorted(vars(layer)),
            list(layer._forward_hooks.items()),
            list(layer._forward_pre_hooks.items()),
        )
        for name, layer in model.named_modules()
    ]
    flags = [(id(p), p.requires_grad, p.data_ptr(), p.dtype) for p in model.parameters()]
    return tensors, [rest, flags, [id(buffer) for buffer in model.buffers()]]


def assert_unchanged(model: nn.Module, before: tuple[Tensors, list[Any]]) -> None:
    (tensors, rest), (tensors_before, rest_before) = snapshot(model), before
    assert_same(tensors, tensors_before)
    assert rest == rest_before


# What must not change


@presets
def test_the_model_stays_as_it_was(preset: str) -> None:
    model = network()
    model(images()).sum().backward()
    model[0].requires_grad_(False)
    model[-1].register_forward_hook(lambda *_: None)
    before, adapted = snapshot(model), adapter(preset, model)
    adapted(images())
    adapted.predict(images())
    adapted.update(images(seed=2))
    adapted.load_state_dict(adapted.state_dict())
    adapted.reset()
    adapted.train()
    adapted.double()
    adapted(images())
    assert_unchanged(model, before)
    assert list(adapted.parameters()) == list(adapted.buffers()) == list(adapted.children()) == []


class Following(nn.Module):
    """Writes to the statistics of torch's own batch norm within it, whatever its mode: by itself,
    and by training mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(6)

    def forward(self, inputs: Tensor) -> Any:
        self.norm.get_buffer("running_mean").mul_(0.9)
        self.norm.train()
        return self.norm(inputs)


@pytest.mark.parametrize("preset", ["source", "bn", "tent", "driftfilter", "t3a"])
def test_no_buffer_is_shared_with_the_model_for_any_layer_may_write_to_any(preset: str) -> None:
    model = network().eval()
    model[1] = Following().eval()
    with torch.no_grad():
        model(images())  # is as if in training mode since
    before, adapted = snapshot(model), adapter(preset, model)
    adapted(images())
    adapted.predict(images())
    assert_unchanged(model, before)


@presets
def test_predictions_and_other_adapters_change_nothing(preset: str) -> None:
    """A stream with predictions (the first before any batch) and another adapter of the same model
    in between.
    """
    model, batches = network(), [images(seed=seed) for seed in (1, 2, 3)]
    alone = adapter(preset, copy.deepcopy(model).eval())
    expected = [alone(batch) for batch in batches]
    disturbed, other = adapter(preset, model), adapter(preset, model)
    for position, batch in enumerate(batches):
        before = to_tensors(disturbed.state)
        disturbed.predict(images(5, 10 + position))
        assert_same(to_tensors(disturbed.state), before)
        other(images(5, 20 + position))
        assert torch.equal(disturbed(batch), expected[position])
    assert_same(to_tensors(disturbed.state), to_tensors(alone.state))


PRIOR = [name for name in df.presets.names() if df.presets.get(name).predict_from == "prior"]


@pytest.mark.parametrize("preset", PRIOR)
def test_a_prediction_before_the_step_is_what_the_step_says(preset: str) -> None:
    """But for offsets, which see the batch in a step only, and the order of labels."""
    adapted = adapter(preset, centering=None, labels=None)
    said, stepped = adapted.predict(images()), adapted(images())
    if isinstance(
        adapted.recipe.prediction, df.Moderated
    ):  # the step knows the temperature that the batch asks for
        along, length = adapted.state.memory["prediction.slopes"].tolist()
        temperature = math.sqrt(1 + math.pi / 4 * 0.01 * along / length)
        assert temperature > 1
        stepped = (temperature * stepped).log_softmax(1)
    torch.testing.assert_close(stepped, said.log_probabilities, rtol=0, atol=1e-6)
    torch.testing.assert_close(said.probabilities.sum(1), torch.ones(4))


@pytest.mark.parametrize(
    "preset",
    [
        name
        for name in df.presets.names()
        if name not in PRIOR and isinstance(df.presets.get(name).prediction, df.MAP)
    ],
)
def test_a_prediction_after_the_step_is_what_the_step_said(preset: str) -> None:
    adapted = adapter(preset)
    one = images(1 if adapted.recipe.chunk else 8)
    said = adapted(one)
    torch.testing.assert_close(adapted.predict(one).log_probabilities, said, rtol=0, atol=1e-6)


@presets
def test_update_learns_what_forward_learns(preset: str) -> None:
    one, other = adapter(preset), adapter(preset)
    for seed in (1, 2):
        one(images(seed=seed))
        info = other.update(images(seed=seed))
        assert_same(to_tensors(one.state), to_tensors(other.state))
    assert one.last_info is not None
    assert one.last_info.step == info.step == one.state.step - 1
    assert torch.equal(one.last_info.weights, info.weights)


@presets
def test_reset_forgets_everything(preset: str) -> None:
    later = 1 if df.presets.get(preset).buffer else 2
    used, fresh = (adapter(preset, update_every=later) for _ in range(2))
    for seed in (1, 2, 3):
        used(images(seed=seed))
    used.reset()
    assert used.last_info is None
    assert_same(to_tensors(used.state), to_tensors(fresh.state))
    for seed in (4, 5, 6):
        assert torch.equal(used(images(seed=seed)), fresh(images(seed=seed)))
    assert_same(to_tensors(used.state), to_tensors(fresh.state))


@pytest.mark.parametrize("preset", ["tent", "opgd", "stad", "head_ekf", "memo"])
def test_copies_and_pickles_go_on_alike_and_alone(preset: str) -> None:
    original = adapter(preset, window=12)
    original(images(seed=1))
    before = to_tensors(original.state)
    copies = [copy.deepcopy(original), pickle.loads(pickle.dumps(original))]
    outputs = [each(images(seed=2)) for each in copies]
    assert_same(to_tensors(original.state), before)
    expected = original(images(seed=2))
    assert all(torch.equal(output, expected) for output in outputs)


def test_seeds() -> None:
    def twice(
        one: df.Adapter,
    ) -> Tensor:  # it predicts before a step, so that the first draws show in the second batch
        return torch.stack([one(images()) for _ in range(2)])

    first, same, other = (twice(adapter("bong_diag", seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_time_without_data_moves_the_belief_as_transitions_do() -> None:
    """And nothing else; before the first batch it moves nothing."""
    waiting = adapter("opgd_diag")
    waiting.elapse(5)
    assert_same(waiting.belief.mean, adapter("opgd_diag").belief.mean)
    recipe = replace(
        df.presets.get("opgd_diag"),
        transition=df.Transition(df.MeanReversion(0.9), df.Isotropic(1e-4)),
    )
    waiting = df.adapt(network(), recipe)
    waiting(images(seed=1))
    before = waiting.state
    waiting.elapse(2.5)
    state = waiting.state
    mean = before.source.mean + 0.9**2.5 * (before.belief.mean - before.source.mean)
    noise = 1e-4 * (1 - 0.9**5) / (1 - 0.9**2)
    torch.testing.assert_close(state.belief.mean, mean)
    torch.testing.assert_close(
        state.belief.covariance.variance(), 0.9**5 * before.belief.covariance.variance() + noise
    )
    assert (state.step, state.memory) == (before.step, before.memory)
    with pytest.raises(ValueError, match="dt must be a finite number"):
        waiting.elapse(-1)


# Streams of few samples


def by_hand(preset: str, **options: Any) -> tuple[df.Filter, df.FilterState]:
    """The filter of a preset on a network, without an adapter."""
    recipe, model = df.presets.get(preset, **options), df.Network(network())
    filt = recipe.filter(model)
    return filt, filt.init(recipe.source(model, model.mean()), 0)


@pytest.mark.parametrize("preset", ["tent", "opgd_diag"])
@pytest.mark.parametrize("size", [1, 3, 9])
@pytest.mark.filterwarnings("ignore::driftfilter.NoInformationWarning")  # of the first sample alone
def test_a_window_is_the_filter_on_the_last_samples(preset: str, size: int) -> None:
    stream, window = images(18), 6
    adapted, (filt, state) = adapter(preset, window=window), by_hand(preset)
    for stop in range(size, 19, size):
        new, seen = stream[stop - size : stop], stream[max(0, stop - max(window, size)) : stop]
        before = filt.predict(state, seen).log_probabilities[-size:]
        assert torch.equal(adapted.predict(new).log_probabilities, before)
        state, expected, _ = filt.step(state, seen)
        assert torch.equal(adapted(new), expected.log_probabilities[-size:])
    assert_same(to_tensors(adapted.state), to_tensors(state))


def test_update_every_adapts_to_all_samples_since_the_last_time() -> None:
    batches = [images(4, seed) for seed in range(5)]
    adapted, (filt, state) = adapter("tent", update_every=2), by_hand("tent")
    for first, second in ((0, 1), (2, 3)):
        assert torch.equal(
            adapted(batches[first]), filt.predict(state, batches[first]).log_probabilities
        )
        assert adapted.state.step == state.step
        state, prediction, _ = filt.step(state, torch.cat((batches[first], batches[second])))
        assert torch.equal(adapted(batches[second]), prediction.log_probabilities[-4:])
    assert_same(to_tensors(adapted.state), to_tensors(state))


WAITING: dict[str, Any] = {"least": 10}


@pytest.mark.parametrize("preset", ["tent", "opgd_diag"])
def test_small_batches_are_predicted_at_once_and_adapted_to_together(preset: str) -> None:
    """At the tenth sample or later, all since the last step are one batch; a batch of ten waits for
    nobody.
    """
    adapted, (filt, state) = adapter(preset, **WAITING), by_hand(preset)
    stream, start = images(60), 0
    for count, size in enumerate((1, 4, 4, 3, 9, 9, 10, 12, 2)):
        stop = start + size
        gathered = {3: 12, 5: 18, 6: 10, 7: 12}.get(count)
        if gathered is None:  # too few yet
            expected, before = filt.predict(state, stream[start:stop]), adapted.state
            assert torch.equal(adapted(stream[start:stop]), expected.log_probabilities)
            assert_same(to_tensors(adapted.state), to_tensors(before))
        else:
            state, expected, info = filt.step(state, stream[stop - gathered : stop])
            said = expected.log_probabilities[-size:]
            assert torch.equal(adapted(stream[start:stop]), said)
            assert adapted.last_info is not None
            assert torch.equal(adapted.last_info.weights, info.weights)
        assert_same(to_tensors(adapted.state), to_tensors(state))
        start = stop
    assert state.step == 4


def test_samples_that_wait_are_saved() -> None:
    running, resumed = adapter("tent", **WAITING), adapter("tent", **WAITING)
    for seed in (1, 2):
        running(images(4, seed))
    assert running.state.step == 0
    resumed.load_state_dict(running.state_dict())
    for seed in (3, 4, 5):
        assert torch.equal(resumed(images(4, seed)), running(images(4, seed)))
    assert running.state.step == 1
    assert_same(resumed.state_dict(), running.state_dict())


def test_update_waits_for_no_sample_more() -> None:
    """It adapts to those that have gathered, too; ``predict`` and ``reset`` do not."""
    adapted, (filt, state) = adapter("tent", **WAITING), by_hand("tent")
    adapted(images(4, 9))
    adapted.reset()
    adapted(images(4, 1))
    adapted.predict(images(8, 7))
    adapted.update(images(3, 2))
    state, _ = filt.update(state, torch.cat((images(4, 1), images(3, 2))))
    adapted.update(images(2, 3))
    state, _ = filt.update(state, images(2, 3))
    assert_same(to_tensors(adapted.state), to_tensors(state))


@pytest.mark.filterwarnings("ignore::driftfilter.NoInformationWarning")  # of the first sample alone
def test_a_window_does_not_wait() -> None:
    one, other = adapter("tent", window=6, **WAITING), adapter("tent", window=6)
    for seed in range(4):
        assert torch.equal(one(images(2, seed)), other(images(2, seed)))
    assert one.state.step == other.state.step == 4


def test_samples_that_wait_and_every_second_batch() -> None:
    """A step comes when both are satisfied, to all samples since the last one."""
    adapted, (filt, state) = adapter("tent", update_every=2, **WAITING), by_hand("tent")
    for seed in range(4):
        adapted(images(4, seed))
        assert adapted.state.step == (seed == 3)
    state, _ = filt.update(state, torch.cat([images(4, seed) for seed in range(4)]))
    assert_same(to_tensors(adapted.state), to_tensors(state))


def test_what_is_kept_is_not_the_callers_tensor() -> None:
    """A stream may reuse one buffer for all its batches."""
    one, other, buffer = (
        adapter("tent", window=8),
        adapter("tent", window=8),
        torch.empty(4, 3, 6, 6),
    )
    for seed in (1, 2, 3):
        buffer.copy_(images(4, seed))
        assert torch.equal(one(buffer), other(images(4, seed)))


def test_a_chunk_is_a_batch_of_its_own() -> None:
    whole, cut = adapter("tent", chunk=3), adapter("tent")
    batch = images(8)
    said = torch.cat([cut.predict(piece).log_probabilities for piece in batch.split(3)])
    assert_same(
        (whole.predict(batch).log_probabilities, whole(batch)),
        (said, torch.cat([cut(piece) for piece in batch.split(3)])),
    )
    assert_same(to_tensors(whole.state), to_tensors(cut.state))
    assert whole.state.step == 3


@pytest.mark.filterwarnings("ignore::driftfilter.NoInformationWarning")
def test_one_sample_after_many() -> None:
    adapted, (filt, state) = adapter("opgd_diag"), by_hand("opgd_diag")
    for count in (200, 1, 2):
        state, prediction, _ = filt.step(state, images(count, count))
        assert torch.equal(adapted(images(count, count)), prediction.log_probabilities)
    assert_same(to_tensors(adapted.state), to_tensors(state))


# What is refused


class Moody(nn.Module):
    """Answers in another way when the first value of a batch is a certain number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, inputs: Tensor) -> Any:
        logits, mood = self.inner(inputs), int(inputs.flatten()[0])
        answers = {
            101: (logits, logits),
            102: logits[:-1],
            103: logits.flatten(),
            104: torch.cat((logits, logits), 1),
        }
        return logits * torch.nan if mood == 105 else answers.get(mood, logits)


def moody(mood: float) -> Tensor:
    batch = images(seed=4)
    batch[0, 0, 0, 0] = mood
    return batch


BAD: dict[str, tuple[Any, str]] = {
    "NaN": (moody(torch.nan), r"inputs must be finite, got nan at index \[0, 0, 0, 0\]"),
    "channels": (
        images()[:, :2],
        "to have 3 channels, but got 2 channels",
    ),  # the model's own words
    "no samples": (
        images()[:0],
        r"inputs must be a batch \[n, ...\] with n >= 1, got shape \[0, 3, 6, 6\]",
    ),
    "labels": (
        torch.arange(8),
        r"Input type \(long int\) and bias type \(float\) should be the same",
    ),
    "a word": ("images", "inputs must be a tensor .* got str"),
    "a scalar": (torch.tensor(1.0), r"inputs must be a batch .* got shape \[\]"),
    "empty": ({}, "inputs must be a tensor .* got a dict"),
}
MOODS: dict[str, tuple[Any, str]] = {
    "a tuple": (moody(101), r"must return logits, .* got a tuple of 2; give an output function"),
    "a sample short": (moody(102), r"logits must be of shape \[4, k\], got shape \[3, 4\]"),
    "no matrix": (moody(103), r"logits must be of shape \[4, k\], got shape \[16\]"),
    "other classes": (
        moody(104),
        r"the model's logits must be of 4 classes, as before, got 'shape \[4, 8\]'",
    ),
    "NaN logits": (moody(105), "must be finite, got nan"),
}
TRIALS = [
    (preset, case) for case in BAD for preset in ("tent", "opgd_diag", "stad", "head_ekf", "cotta")
]
TRIALS += [
    (preset, case) for case in MOODS for preset in ("tent", "opgd_diag", "bacs")
]  # others see features only


@cache
def untouched(preset: str) -> tuple[dict[int, Any], dict[str, Any]]:
    """Answers to the good batches and the last state, if no bad one comes between."""
    adapted = adapter(preset, Moody())
    return {seed: adapted(images(seed=seed)) for seed in (1, 2)}, to_tensors(adapted.state)


@pytest.mark.parametrize(("preset", "case"), TRIALS)
@pytest.mark.parametrize("method", ["forward", "predict", "update"])
def test_a_bad_batch_leaves_no_trace(preset: str, case: str, method: str) -> None:
    """Neither before the first good one (where any number of classes is good) nor later."""
    (bad, message), model = (BAD | MOODS)[case], Moody()
    before = snapshot(model)
    adapted, (answers, state) = adapter(preset, model), untouched(preset)
    for seed in (1, 2):
        kept = to_tensors(adapted.state)
        if (case, seed) != ("other classes", 1):
            with pytest.raises((ValueError, RuntimeError), match=message):
                getattr(adapted, method)(bad)
        assert_same(to_tensors(adapted.state), kept)
        assert torch.equal(adapted(images(seed=seed)), answers[seed])
    assert_same(to_tensors(adapted.state), state)
    assert_unchanged(model, before)


def mlp(*norms: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), *norms, nn.Tanh(), nn.Linear(6, 3))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no module": (lambda: df.adapt("resnet"), "adapt: model must be a torch module, got 'str'"),  # type: ignore[arg-type]
    "unknown preset": (
        lambda: df.adapt(network(), "tnt"),
        r"preset must be one of .*did you mean 'tent'\?\), got 'tnt'",
    ),
    "misspelt option of its own": (
        lambda: df.adapt(network(), windw=32),
        r"'window', .*did you mean 'window'\?\), got 'windw'",
    ),
    "unknown option": (
        lambda: df.adapt(network(), "tent", rl=1),
        r"option of preset 'tent' must be one of \['lr'.* got 'rl'",
    ),
    "options beside a recipe": (
        lambda: df.adapt(network(), df.Recipe(), lr=1),
        r"options \['lr'\]",
    ),
    "no recipe": (
        lambda: df.adapt(network(), df.Recipe),  # type: ignore[arg-type]
        "adapt: recipe must be the name of a preset or a Recipe",
    ),
    "no norms": (
        lambda: df.adapt(mlp(), "tent"),
        r"must select one parameter or more, got none of 4;.*\['Linear'\], named",
    ),
    "no linear layer": (
        lambda: df.adapt(nn.BatchNorm1d(3), "head_ekf"),
        r"Head.name must be the name of a linear layer",
    ),
    "window": (
        lambda: df.adapt(network(), "tent", window=-1),
        "adapt: window must be an integer >= 0, got -1",
    ),
    "update_every": (
        lambda: df.adapt(network(), update_every=0),
        "adapt: update_every must be an integer >= 1, got 0",
    ),
    "seed": (
        lambda: df.adapt(network(), seed=0.5),  # type: ignore[arg-type]
        "adapt: seed must be an integer, got 0.5",
    ),
    "output": (
        lambda: df.adapt(network(), output=1),  # type: ignore[arg-type]
        "adapt: output must be a function of what the model returns, got 1",
    ),
    "lazy": (
        lambda: df.adapt(nn.Sequential(nn.LazyLinear(3))),
        r"adapt: model must be called once before",
    ),
    "two ways": (
        lambda: df.adapt(nn.DataParallel(network()))(images(), other=images()),
        r"called by place or by name, not both, for this model, got \"1 arguments and "
        r"\['other'\]\"",
    ),
    "twice": (
        lambda: df.adapt(network())(images(), input=images()),
        r"adapter must be called with every argument once, got \"\['input'\] by place too\"",
    ),
    "uncopyable": (
        lambda: adapter("tent", uncopyable()).state,
        "must be one that copy.deepcopy can copy, got Seq",
    ),
}


def uncopyable() -> nn.Module:
    model = network()
    model.lock = (i for i in range(1))  # type: ignore[assignment]  # a generator, which cannot be copied
    return model


test_refusals = refuses(REFUSED.values())


def test_recent_samples_of_another_shape_are_refused() -> None:
    adapted, other = adapter("tent", window=12), adapter("tent", window=12)
    adapted(images())
    other(images())
    with pytest.raises(
        ValueError,
        match=(
            r"inputs must be of one shape .*window, update_every\), got .*\(3, 6, 6\), \(3, 7, 7\)"
        ),
    ):
        adapted(torch.zeros(2, 3, 7, 7))
    assert torch.equal(adapted(images()), other(images()))


# The caller's surroundings


@presets
def test_gradient_modes_of_the_caller_make_no_difference(preset: str) -> None:
    reference = adapter(preset)
    expected = [reference(images(seed=seed)) for seed in (1, 2, 3)]
    for first, second in (
        (torch.inference_mode, torch.enable_grad),
        (torch.no_grad, torch.inference_mode),
    ):
        adapted = adapter(preset)
        with first():
            found = [adapted(images(seed=1))]
        with second():
            found.append(adapted(images(seed=2).requires_grad_()))
        found.append(adapted(images(seed=3)))
        assert_same(found, expected)
        assert not any(output.requires_grad or output.is_inference() for output in found)


def test_the_warning_about_missing_data_points_here() -> None:
    recipe = df.presets.get("bacs")
    makers: list[Any] = [lambda: df.adapt(network(), "eata"), lambda: df.adapt(network(), recipe)]
    for make in makers:
        with pytest.warns(UserWarning, match=r"no source data \(adapt: data=...\)") as caught:
            make()
        assert [warning.filename for warning in caught] == [__file__]
        assert caught[0].lineno == make.__code__.co_firstlineno
    with pytest.raises(
        ValueError, match=r"adapt: data must be source inputs, which Laplace.* needs, got None"
    ):
        df.adapt(network(), df.Recipe(source=df.Laplace()))


def test_the_warning_about_an_uninformative_batch_points_here() -> None:
    asks: list[Any] = [lambda it: it(images(1)), lambda it: it.update(images(1))]
    for ask in asks:
        with pytest.warns(df.NoInformationWarning) as caught:
            ask(adapter("opgd_diag"))
        assert [warning.filename for warning in caught] == [__file__]


def test_threads_that_predict_see_whole_states() -> None:
    """Also with a window, where the samples seen lately must be those of the state."""
    batches, asked, window = [images(4, seed) for seed in range(24)], images(2, 99), 10
    adapted, (filt, state) = adapter("opgd_diag", window=window), by_hand("opgd_diag")
    known, stream = [], torch.empty(0, 3, 6, 6)
    for batch in [None, *batches]:
        if batch is not None:
            stream = torch.cat((stream, batch))
            state, _ = filt.update(state, stream[-window:])
        known.append(
            filt.predict(state, torch.cat((stream, asked))[-window:]).log_probabilities[-2:]
        )
    adapted.predict(asked)

    def ask(_: int) -> list[Tensor]:
        return [adapted.predict(asked).log_probabilities for _ in range(30)]

    with ThreadPoolExecutor(5) as pool:
        updates = pool.submit(lambda: [adapted.update(batch) for batch in batches])
        answers = [answer for each in pool.map(ask, range(4)) for answer in each]
        assert len(updates.result()) == 24
    places = [
        [i for i, each in enumerate(known) if torch.equal(each, answer)] for answer in answers
    ]
    assert all(places)
    assert_same(to_tensors(adapted.state), to_tensors(state))


def test_threads_that_adapt_take_turns() -> None:
    adapted = adapter("tent", update_every=2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda seed: adapted(images(4, seed)), range(30)))
    assert (adapted.state.step, int(adapted.state_dict()["calls"])) == (15, 30)


def test_arguments_by_place_and_by_name_are_those_of_the_model() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

        def forward(self, values: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
            normed = self.norm(values) * scale
            return self.head(normed if mask is None else normed * mask)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, values, mask = Masked().eval(), torch.randn(5, 4), torch.rand(5, 4)
    expected = model(values, 2.0, mask=mask).detach().log_softmax(-1)
    torch.testing.assert_close(df.adapt(model, "tent")(values, 2.0, mask=mask), expected)
    with pytest.raises(TypeError, match="other"):  # as the model itself says
        df.adapt(model, "tent")(values, other=mask)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("name", ["resnet20", "resnet20_gn"])
def test_the_default_holds_in_small_batches(name: str, batch: int) -> None:
    """At the source or above it, with batch norm far above it, under noise that no batch shows in
    full.
    """
    images, labels = (part[:160] for part in streams.sample_images())
    noisy, model = corrupt(images, "speckle_noise"), models.load(name)

    def accuracy(preset: str) -> float:
        adapter = df.adapt(model, preset)
        found = torch.cat([adapter(piece) for piece in noisy.split(batch)])
        return (found.argmax(-1) == labels).double().mean().item()

    gain = accuracy("driftfilter") - accuracy("source")
    assert gain > (0.08 if name == "resnet20" else -0.02)

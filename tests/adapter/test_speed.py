"""One word for speed: what it turns on, what it leaves alone, and what a network does not take."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.adapter.speed import SpeedOptions, has_bfloat16
from driftfilter.networks import cuda_graphs as captured
from driftfilter.networks.layout import Layout, why_not_last
from driftfilter.networks.network import Network
from small import feed, refuses

CPU = torch.device("cpu")


class Convolutional(nn.Module):
    """Two convolutions and batch norms; ``views`` reads their outputs in the order of memory."""

    def __init__(self, views: str = "") -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 8, 3),
            nn.BatchNorm2d(8),
        )
        self.head = nn.Linear(8 * 25, 4)
        self.views = views

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.body(images)
        if self.views == "fails":
            flat = found.view(len(found), -1)
        elif self.views == "others":  # the numbers as they lie in memory
            flat = found.as_strided((len(found), 200), (200, 1))
        else:
            flat = found.flatten(1)
        logits: Tensor = self.head(flat)
        return logits


def model(views: str = "") -> nn.Module:
    torch.manual_seed(0)
    return Convolutional(views).eval()


def stream(count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 3, 9, 9, generator=generator) for _ in range(count)]


def told(adapter: df.Adapter) -> dict[str, tuple[bool, str]]:
    return {name: (is_on, why) for name, is_on, why in adapter.measures}


def layout_of(adapter: df.Adapter) -> Any:
    """The layout of the network inside, once a batch has come."""
    bound = adapter._now.bound
    assert bound is not None
    inner: Any = bound.filter.logits
    while not isinstance(inner, Network):
        inner = inner.model
    return inner.layout


def test_images_go_through_channels_last_without_being_asked() -> None:
    own, batches = model(), stream()
    seen: list[bool] = []
    own.body[3].register_forward_hook(  # type: ignore[index, union-attr]
        lambda *_: seen.append(_[1][0].is_contiguous(memory_format=torch.channels_last))
    )
    one, other = df.adapt(own), df.adapt(model(), channels_last=False)
    for batch in batches:
        torch.testing.assert_close(one(batch), other(batch), rtol=1e-4, atol=1e-4)
    assert seen[-1]
    assert told(one)["channels last"] == (True, "speed='exact'")
    assert told(other)["channels last"] == (False, "as given")
    torch.testing.assert_close(one.belief.mean, other.belief.mean, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("views", "why"),
    [
        ("fails", "the network fails: RuntimeError: view size is not compatible"),
        ("others", "the network's outputs would be others"),
    ],
)
def test_a_network_that_needs_its_channels_first_keeps_them(views: str, why: str) -> None:
    adapter, plain = df.adapt(model(views)), df.adapt(model(views), channels_last=False)
    for batch in stream():
        assert torch.equal(adapter(batch), plain(batch))
    is_on, found = told(adapter)["channels last"]
    assert not is_on
    assert found.startswith(why)
    assert f"channels last off ({why}" in " ".join(str(adapter).split())


def test_the_layout_is_chosen_by_what_the_network_is() -> None:
    grouped = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, groups=4))
    other = nn.Sequential(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3))
    bare = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    assert why_not_last(model()) == ""
    assert why_not_last(nn.Linear(2, 2)) == "fewer than two convolutions of images"
    assert why_not_last(grouped) == "grouped convolutions"
    assert why_not_last(other) == "norms other than batch norms"
    assert why_not_last(bare) == "no batch norms"


def test_the_proof_leaves_a_batch_as_it_is() -> None:
    class Writing(Convolutional):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images.add_(1.0))

    torch.manual_seed(0)
    batch = stream(1)[0]
    wanted = batch.clone()
    layout = Layout(Writing().eval(), lambda module, inputs: module(inputs), {})
    found = layout.arrange(batch)
    assert torch.equal(batch, wanted)
    assert isinstance(found, Tensor)
    assert torch.equal(found, wanted)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_the_layout_copies_no_weights_and_is_proven_once() -> None:
    own = model()
    adapter = df.adapt(own)
    feed(adapter, stream(2))
    bound, layout = adapter._now.bound, layout_of(adapter)
    assert bound is not None
    assert not bound.copied
    assert layout._proven
    layout._ask = None  # asked again, it would fail
    adapter(stream(1)[0])


def test_fast_is_bfloat16_where_the_device_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for has in (True, False):
        monkeypatch.setattr("driftfilter.adapter.speed.has_bfloat16", lambda _, has=has: has)
        adapter = df.adapt(model(), speed="fast")
        assert adapter.autocast == (torch.bfloat16 if has else None)
        why = "speed='fast'" if has else "cpu does not compute in it"
        assert told(adapter)["bfloat16"] == (has, why)
        given = df.adapt(model(), speed="fast", autocast=torch.float32)
        assert given.autocast == torch.float32
        assert told(given)["bfloat16"] == (False, "as given")
        double = df.adapt(model().double(), speed="fast")
        assert double.autocast is None


def test_fast_is_what_its_measures_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("driftfilter.adapter.speed.has_bfloat16", lambda _: True)
    fast = df.adapt(model(), speed="fast")
    named = df.adapt(model(), autocast=torch.bfloat16)
    for batch in stream():
        assert torch.equal(fast(batch), named(batch))


def test_float32_is_float32_even_under_autocast() -> None:
    batch = stream(1)[0]
    wanted = df.adapt(model(), "source")(batch)
    with torch.autocast("cpu", torch.bfloat16):
        plain = df.adapt(model(), "source")(batch)
        given = df.adapt(model(), "source", autocast=torch.float32)(batch)
    assert torch.equal(given, wanted)
    assert not torch.equal(plain, wanted)


def test_a_state_goes_from_one_speed_to_another(tmp_path: Path) -> None:
    one, other = df.adapt(model()), df.adapt(model(), speed="fast", channels_last=False)
    feed(one, stream())
    df.save(one, tmp_path / "state.safetensors")
    df.load(other, tmp_path / "state.safetensors")
    assert torch.equal(one.belief.mean, other.belief.mean)


def test_a_copy_chooses_anew() -> None:
    adapter = df.adapt(model())
    feed(adapter, stream(2))
    other = copy.deepcopy(adapter)
    torch.testing.assert_close(other(stream()[3]), adapter(stream()[3]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("preset", ["head_ekf", "t3a"])
def test_a_head_alone_needs_none(preset: str) -> None:
    why = "only what follows the last layer's inputs is adapted"
    assert told(df.adapt(model(), preset))["channels last"] == (False, why)


def test_graphs_are_for_models_on_a_gpu_without_hooks() -> None:
    own, recipe = model(), df.presets.get("driftfilter")
    options = SpeedOptions()
    cuda = torch.device("cuda")
    assert options._why_no_graphs(own, recipe, CPU) == "the model is on cpu"
    assert options._why_no_graphs(own, recipe, cuda) == ""
    own.register_forward_hook(lambda *_: None)
    assert options._why_no_graphs(own, recipe, cuda).startswith("the network has hooks")
    assert SpeedOptions(distributed=True)._why_no_graphs(model(), recipe, cuda) == (
        "the stream is distributed"
    )


def test_a_device_that_nobody_knows_has_nothing() -> None:
    assert not has_bfloat16(torch.device("meta"))


class Answers:
    """A capture that answers by an ordinary pass, or otherwise."""

    coupled = True
    wrong = 0.0

    def __init__(self, network: Network, theta: Tensor, inputs: Tensor, question: Any) -> None:
        self.question = question

    def run(
        self, network: Network, theta: Tensor, inputs: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        logits, self.pull = network.eager(theta, inputs)
        return logits + self.wrong, dict(self.pull.memory)

    def ask(self, cotangents: Tensor) -> Tensor:
        return captured.answer(self.pull, cotangents, self.question)


def captures_after(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], capture: Any
) -> tuple[captured.Captures, dict[str, str]]:
    """Captures after batches of these sizes, on a device that takes itself for a GPU."""
    monkeypatch.setattr("driftfilter.networks.network.possible", lambda *_: True)
    monkeypatch.setattr(captured, "Capture", capture)
    network = Network(model(), df.NormAffine(), df.Ema())
    network.capturing = "if possible"
    theta = network.mean()
    for size in sizes:
        logits, pull = network.pullback(theta, torch.randn(size, 3, 9, 9))
        pull(torch.ones_like(logits))
    return network._captures(), network.refused


def test_a_shape_is_captured_after_three_batches_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed, _ = captures_after(monkeypatch, [8, 7] * 6, Answers)
    assert sum(mixed._made.values()) == 0
    three, _ = captures_after(monkeypatch, [8] * 3, Answers)
    assert sum(three._made.values()) == 0
    four, refused = captures_after(monkeypatch, [8] * 4, Answers)
    assert sum(four._made.values()) == 1
    assert refused == {}


def test_a_capture_that_nobody_uses_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "_STALE", 5)
    found, _ = captures_after(monkeypatch, [8] * 4 + [7] * 4, Answers)
    assert sorted(found._made.values()) == [1, 1]
    found, _ = captures_after(monkeypatch, [8] * 4 + [7] * 10, Answers)
    assert sorted(found._made.values()) == [0, 1]
    assert len(found._free) == 1


def test_what_cannot_be_captured_runs_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    found, refused = captures_after(monkeypatch, [8] * 6, fail)
    assert sum(found._made.values()) == 0
    assert refused["graphs"].startswith("RuntimeError: operation not permitted")


def test_a_capture_that_answers_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answers, "wrong", 1.0)
    found, refused = captures_after(monkeypatch, [8] * 6, Answers)
    assert sum(found._made.values()) == 0
    assert refused == {"graphs": "the network answers otherwise when it is replayed"}


test_a_wrong_word_is_refused = refuses(
    [
        (
            lambda: df.adapt(model(), speed="faster"),  # type: ignore[arg-type]
            "adapt: speed must be",
        ),
        (
            lambda: df.adapt(model(), speed=None),  # type: ignore[arg-type]
            "adapt: speed must be",
        ),
        (
            lambda: df.adapt(model(), channels_last=2),  # type: ignore[arg-type]
            "adapt: channels_last must be True or False, got 2",
        ),
    ]
)

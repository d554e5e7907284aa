"""Options for speed: autocast, channels last, and passes as CUDA graphs, which on a CPU change
nothing.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.base.inputs import Inputs, pick_logits
from driftfilter.networks import cuda_graphs as captured
from small import feed, refuses

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        )
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Any:
        return self.head(self.body(images).mean((2, 3)))


def model() -> nn.Module:
    torch.manual_seed(0)
    return Convolutional().eval().to(DEVICE)


def stream(sizes: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 3, 9, 9, generator=generator).to(DEVICE) for n in sizes]


def run(preset: str, batches: list[Tensor], graphs: bool, **options: Any) -> tuple[Tensor, ...]:
    adapter = df.adapt(model(), preset, cuda_graphs=graphs, least=0, **options)
    outputs = torch.cat([adapter(batch) for batch in batches])
    return (
        outputs,
        adapter.belief.mean,
        adapter.belief.covariance.variance(),
        adapter.predict(batches[0]).log_probabilities,
    )


@pytest.mark.parametrize(
    "sizes", [[16] * 6, [16, 16, 16, 7, 7, 7, 16, 7]], ids=["one-size", "two-sizes"]
)
@pytest.mark.parametrize(
    "preset",
    ["driftfilter", "driftfilter_aug", "tent", "eata", "opgd", "opgd_diag", "bong_diag", "roid"],
)
@pytest.mark.filterwarnings("ignore:no source data")
def test_a_stream_in_graphs_is_the_stream(preset: str, sizes: list[int]) -> None:
    batches = stream(sizes)
    torch.testing.assert_close(
        run(preset, batches, True), run(preset, batches, False), rtol=1e-4, atol=1e-5
    )


@GPU
def test_graphs_are_used() -> None:
    adapter = df.adapt(model(), "tent", cuda_graphs=True)
    feed(adapter, stream([16] * 3))
    network: Any = adapter._now.bound.filter.logits  # type: ignore[union-attr]
    captures = network._local.captures
    assert [len(free) for free in captures._free.values()] == [1]


TOKENS = torch.zeros(2, 5, dtype=torch.long)
OTHERS: dict[str, tuple[Inputs, Inputs]] = {  # what one capture cannot serve both of
    "order of names": ({"ids": TOKENS, "mask": TOKENS}, {"mask": TOKENS, "ids": TOKENS}),
    "names": ({"ids": TOKENS, "mask": TOKENS}, {"ids": TOKENS, "types": TOKENS}),
    "places": ((TOKENS, None, TOKENS), (TOKENS, TOKENS, None)),
    "values": ((TOKENS, 1), (TOKENS, True)),
    "dtype": (TOKENS, TOKENS.float()),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_capture_is_for_inputs_of_the_same_names_and_places(case: str) -> None:
    one, other = (captured.key_of(torch.zeros(3), inputs, pick_logits) for inputs in OTHERS[case])
    assert one != other
    assert one == captured.key_of(torch.ones(3), OTHERS[case][0], pick_logits)


@GPU
def test_inputs_by_name_may_come_in_any_order() -> None:
    class Named(Convolutional):
        def forward(self, images: Tensor, others: Tensor) -> Any:  # type: ignore[override]
            return super().forward(images + 0.1 * others)

    torch.manual_seed(0)
    own, found = Named().eval().to(DEVICE), []
    for graphs in (True, False):
        adapter, outputs = df.adapt(own, cuda_graphs=graphs), []
        for step, batch in enumerate(stream([16] * 6)):
            named = {"images": batch, "others": -batch.flip(0)}
            outputs.append(adapter(**(named if step < 3 else dict(reversed(named.items())))))
        found.append(torch.cat(outputs))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_captures_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "Capture", lambda *arguments: object())
    captures, network, theta = captured.Captures(), Any, torch.zeros(3)
    keys = [captured.key_of(theta, torch.zeros(n, 2), pick_logits) for n in range(1, 40)]
    for key in keys:
        captures.note(key, "total")
    taken = [captures.take(network, key, theta, theta) for key in keys]  # type: ignore[arg-type]
    assert [found is not None for found in taken] == [True] * 16 + [False] * 23
    assert taken[0] is not None
    captures.give_back(keys[0], "total", taken[0][0])
    assert captures.take(network, keys[0], theta, theta) == taken[0]  # type: ignore[arg-type]


@GPU
def test_under_autocast_too() -> None:
    batches = stream([32] * 5)
    with torch.autocast("cuda", torch.bfloat16):
        found, wanted = run("driftfilter", batches, True), run("driftfilter", batches, False)
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.02)


@GPU
def test_a_model_that_was_changed_in_place_is_seen() -> None:
    batches, found = stream([16] * 5), []
    for graphs in (True, False):
        own = model()
        adapter = df.adapt(own, cuda_graphs=graphs)
        outputs = [adapter(batch) for batch in batches[:3]]
        with torch.no_grad():
            own.head.weight.mul_(0.5)  # type: ignore[union-attr, operator]
        found.append(torch.cat([*outputs, *(adapter(batch) for batch in batches[3:])]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


test_a_wrong_option_is_refused = refuses(
    [
        (
            lambda: df.adapt(model(), cuda_graphs=1),  # type: ignore[arg-type]
            "adapt: cuda_graphs must be True or False, got 1",
        ),
        (
            lambda: df.adapt(model(), channels_last="yes"),  # type: ignore[arg-type]
            "adapt: channels_last must be True or False, got 'yes'",
        ),
        (
            lambda: df.adapt(model(), autocast=torch.float64),
            "adapt: autocast must be torch.bfloat16, torch.float16, torch.float32 or None, got",
        ),
    ]
)


@pytest.mark.parametrize("preset", ["head_ekf", "t3a"])
def test_graphs_for_a_head_are_said_to_do_nothing(preset: str) -> None:
    (batch,) = stream([16])
    with pytest.warns(
        UserWarning,
        match="adapt: cuda_graphs is ignored: no pass over the network is differentiated",
    ) as told:
        adapter = df.adapt(model(), preset, cuda_graphs=True)
    assert [each.filename for each in told] == [__file__]
    assert torch.equal(adapter(batch), df.adapt(model(), preset)(batch))  # and no more is said


def test_graphs_for_a_model_that_was_left_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    own, batch = model().cpu(), stream([16])[0].cpu()
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    wanted = df.adapt(own, cuda_graphs=True)(
        batch
    )  # one script for machines with and without a GPU: nothing to say
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    adapter = df.adapt(own, cuda_graphs=True)  # it may yet be moved
    with pytest.warns(
        UserWarning,
        match="adapt: cuda_graphs is ignored: the model is on cpu, though there is a GPU",
    ) as told:
        assert torch.equal(adapter(batch), wanted)
    assert [each.filename for each in told] == [__file__]
    adapter(batch)
    adapter.reset()
    adapter(batch)  # once


@pytest.mark.parametrize(
    ("device", "options", "ignored"),
    [
        ("mps", {"autocast": torch.bfloat16}, ["autocast"]),
        ("mps", {"autocast": torch.bfloat16, "cuda_graphs": True}, ["cuda_graphs", "autocast"]),
        ("cpu", {"autocast": torch.bfloat16, "cuda_graphs": True}, ["cuda_graphs"]),
        ("cuda", {"autocast": torch.float16, "cuda_graphs": True}, []),
        ("xpu", {}, []),
    ],
    ids=["mps", "mps with graphs", "cpu", "cuda", "xpu without options"],
)
def test_what_a_device_leaves_out_is_said(
    device: str, options: dict[str, Any], ignored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    found = df.adapt(model(), **options)._options.speed.find_ignored(torch.device(device))
    assert [text.split(" ")[1] for text in found] == ignored


def test_channels_last_gives_the_same_and_leaves_the_model_alone() -> None:
    own, batches = model(), stream([16] * 4)
    weights = own.state_dict(keep_vars=True)
    before = {
        name: (tensor.data_ptr(), tensor.stride(), tensor.clone())
        for name, tensor in weights.items()
    }
    one, other = df.adapt(own, channels_last=True), df.adapt(own)
    for batch in batches:
        torch.testing.assert_close(one(batch), other(batch), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        (one.belief.mean, one.predict(batches[0]).probabilities),
        (other.belief.mean, other.predict(batches[0]).probabilities),
        rtol=1e-3,
        atol=1e-4,
    )
    for name, tensor in own.state_dict(keep_vars=True).items():
        assert (tensor.data_ptr(), tensor.stride()) == before[name][:2]
        assert torch.equal(tensor, before[name][2])


def test_channels_last_leaves_volumes_as_they_are() -> None:
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Conv3d(1, 4, 3),
        nn.BatchNorm3d(4),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    own, batch = body.eval().to(DEVICE), torch.randn(8, 1, 5, 5, 5).to(DEVICE)
    assert torch.equal(df.adapt(own, channels_last=True)(batch), df.adapt(own)(batch))


def test_channels_last_sees_what_is_written_to_the_model() -> None:
    own, batches = model(), stream([16] * 4)
    adapters = df.adapt(own, channels_last=True), df.adapt(own)
    for adapter in adapters:
        adapter(batches[0])
    with torch.no_grad():
        own.body[0].weight.mul_(0.5)  # type: ignore[index, union-attr]
    one, other = (adapter(batches[1]) for adapter in adapters)
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_autocast_as_an_option_is_autocast_around_the_call() -> None:
    batches = stream([16] * 3)
    one, other, plain = (
        df.adapt(model(), autocast=torch.bfloat16),
        df.adapt(model()),
        df.adapt(model()),
    )
    for batch in batches:
        with torch.autocast(DEVICE, torch.bfloat16):
            wanted = other(batch)
        found = one(batch)
        assert torch.equal(found, wanted)
        assert not torch.equal(found, plain(batch))
    assert torch.equal(one.belief.mean, other.belief.mean)

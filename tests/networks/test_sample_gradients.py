"""Per-sample rows of every kind of layer, against plain autograd on one sample at a time."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import driftfilter as df
from driftfilter.networks.sample_gradients import _products
from small import Written


class Net(nn.Module):
    """A layer between fixed random maps, so that its flow is not trivial; [n, …] -> [n, 3]."""

    def __init__(
        self, layer: nn.Module, pick: Callable[[Any], Tensor] = lambda result: result
    ) -> None:
        super().__init__()
        self.layer, self.pick = layer, pick

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.pick(self.layer(inputs))).flatten(1)
        mixing = torch.linspace(-1, 1, hidden.shape[1] * 3, dtype=hidden.dtype).sin().view(-1, 3)
        return hidden @ mixing


class Scaled(nn.Module):
    """A layer of a kind that torch does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.scale


class Shifted(nn.Linear):
    """A linear layer that does something else."""

    def forward(self, inputs: Tensor) -> Tensor:
        return 2 * super().forward(inputs) + self.bias.square()


def transformer(batch_first: bool) -> nn.Module:
    """Torch's own encoder, on [tokens, n, 4] or on [n, tokens, 4]."""
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=batch_first)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(4), enable_nested_tensor=False)
    if batch_first:
        return encoder
    return Written(lambda own, x: own.encoder(x.transpose(0, 1)).transpose(0, 1), encoder=encoder)


def share() -> nn.Module:
    """One linear layer used twice, and its weight once more under another name."""
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    two.weight = one.weight
    return Written(
        lambda own, x: own.two(torch.tanh(own.one(torch.tanh(own.one(x))))), one=one, two=two
    )


def alias() -> nn.Module:
    """One layer under two names."""
    layer = nn.Linear(4, 4)
    return Written(lambda own, x: own.two(torch.tanh(own.one(x))), one=layer, two=layer)


def first(result: Any) -> Any:
    return result[0]


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: Net(nn.Linear(4, 5)), (4,)),
    "linear on tokens": (lambda: Net(nn.Linear(4, 5, bias=False)), (2, 3, 4)),
    "conv1d": (lambda: Net(nn.Conv1d(4, 6, 3, padding=1, groups=2)), (4, 7)),
    "conv2d strided": (
        lambda: Net(nn.Conv2d(4, 6, (3, 2), stride=2, padding=(1, 0), dilation=(1, 2), groups=2)),
        (4, 8, 7),
    ),
    "conv2d depthwise": (lambda: Net(nn.Conv2d(4, 8, 3, groups=4, bias=False)), (4, 5, 5)),
    "conv2d same": (lambda: Net(nn.Conv2d(2, 3, (2, 4), padding="same")), (2, 5, 5)),
    "conv2d valid": (lambda: Net(nn.Conv2d(2, 3, 3, padding="valid")), (2, 5, 5)),
    "conv2d circular": (
        lambda: Net(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")),
        (2, 5, 4),
    ),
    "conv2d reflect": (
        lambda: Net(nn.Conv2d(2, 3, 3, padding=(2, 1), padding_mode="reflect", stride=2)),
        (2, 5, 4),
    ),
    "conv3d": (lambda: Net(nn.Conv3d(2, 3, 2, padding=1, stride=(1, 2, 1))), (2, 3, 4, 3)),
    "layer norm": (lambda: Net(nn.LayerNorm((3, 4))), (2, 3, 4)),
    "instance norm tracked": (
        lambda: Net(nn.InstanceNorm1d(3, affine=True, track_running_stats=True)),
        (3, 5),
    ),
    "windows": (  # a layer norm on windows [n · 3, 2, 4] of each sample's six tokens
        lambda: Net(
            Written(
                lambda own, x: own.mix(own.norm(x.reshape(-1, 2, 4))).reshape(len(x), 6, 4),
                norm=nn.LayerNorm(4),
                mix=nn.Linear(4, 4),
            )
        ),
        (6, 4),
    ),
    "shared": (lambda: Net(share()), (4,)),
    "aliased": (lambda: Net(alias()), (4,)),
    "own parameter": (lambda: Net(Scaled()), (4,)),
    "overridden forward": (lambda: Net(Shifted(4, 3)), (4,)),
    "sequence first": (  # on [tokens, n, 4], where no sample can be told from another
        lambda: Net(
            Written(
                lambda own, x: own.norm(x.transpose(0, 1)).transpose(0, 1), norm=nn.LayerNorm(4)
            )
        ),
        (7, 4),
    ),
    "transposed convolution": (lambda: Net(nn.ConvTranspose2d(2, 3, 2)), (2, 3, 3)),
    "attention": (
        lambda: Net(
            Written(
                lambda own, x: own.inner(x, x, x)[0],
                inner=nn.MultiheadAttention(4, 2, batch_first=True),
            )
        ),
        (3, 4),
    ),
    "lstm": (lambda: Net(nn.LSTM(4, 3, num_layers=2, batch_first=True), first), (5, 4)),
    "gru": (lambda: Net(nn.GRU(4, 3, batch_first=True, bidirectional=True), first), (5, 4)),
}
WITHOUT_RULE = (
    "own parameter",
    "overridden forward",
    "sequence first",
    "transposed convolution",
    "attention",
    "lstm",
    "gru",
)


def alone(model: nn.Module, names: list[str], inputs: Tensor, cotangents: Tensor) -> Tensor:
    """Rows from a backward pass for each sample."""
    known = dict(model.named_parameters())
    rows = []
    for sample, cotangent in zip(inputs, cotangents, strict=True):
        gradients = torch.autograd.grad(
            model(sample[None]), [known[name] for name in names], cotangent[None]
        )
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return torch.stack(rows)


def assert_rows(model: nn.Module, inputs: Tensor, selection: df.Selection) -> Tensor:
    """Rows and their total are what backward passes say, which is returned."""
    network = df.Network(model, selection, "source")
    logits, pullback = network.pullback(network.mean(), inputs)
    cotangents = torch.randn_like(logits)
    expected = alone(model.eval(), list(network.shapes), inputs, cotangents)
    torch.testing.assert_close(
        (pullback(cotangents), pullback.total(cotangents)), (expected, expected.sum(0))
    )
    return expected


@pytest.mark.parametrize("case", CASES)
def test_rows_are_the_gradients_of_each_sample_alone(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    if case not in WITHOUT_RULE:
        monkeypatch.delattr(df.Network, "sample_rows")  # they need one backward pass only
    build, shape = CASES[case]
    model, inputs = build().double(), torch.randn(5, *shape, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Using padding='same' with even kernel"
        )  # torch's own
        expected = assert_rows(model, inputs, df.AllParameters())
    assert expected.count_nonzero() > 0.5 * expected.numel()


@pytest.mark.parametrize("selection", [df.NormAffine(), df.AllParameters(), df.LoRA(2)], ids=str)
@pytest.mark.parametrize("batch_first", [True, False])
def test_transformers(batch_first: bool, selection: df.Selection) -> None:
    """With as many tokens as would pass for samples."""
    torch.manual_seed(0)
    model, inputs = (
        Net(transformer(batch_first)).double(),
        torch.randn(3, 6, 4, dtype=torch.float64),
    )
    network = df.Network(model, selection)
    theta = network.mean() + 0.01
    logits, pullback = network.pullback(theta, inputs)
    cotangents, tangent = torch.randn_like(logits), torch.randn_like(theta)
    alone = [
        network.pullback(theta, inputs[i : i + 1])[1].total(cotangents[i : i + 1]) for i in range(3)
    ]
    torch.testing.assert_close(pullback(cotangents), torch.stack(alone))
    slope = (
        network(theta + 1e-5 * tangent, inputs) - network(theta - 1e-5 * tangent, inputs)
    ) / 2e-5
    torch.testing.assert_close(
        (
            pullback.total(cotangents) @ tangent,
            network.pushforward(theta, inputs, tangent[None])[0],
        ),
        ((slope * cotangents).sum(), slope),
        rtol=1e-6,
        atol=1e-7,
    )
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("padding", [None, 2])
def test_embedding_rows(padding: int | None) -> None:
    torch.manual_seed(0)
    model = Net(nn.Embedding(6, 3, padding_idx=padding)).double()
    assert_rows(model, torch.tensor([[1, 1, 2, 4], [2, 0, 5, 5], [3, 3, 3, 3]]), df.AllParameters())


@pytest.mark.parametrize("own", ["weight", "bias"])
def test_one_parameter_of_a_layer(own: str) -> None:
    torch.manual_seed(0)
    model, inputs = Net(nn.Conv2d(2, 3, 3)).double(), torch.randn(4, 2, 5, 5, dtype=torch.float64)
    assert_rows(model, inputs, df.ByName((f"*.{own}",)))


def test_rows_of_convolutions_under_batch_statistics_sum_to_the_gradient_of_the_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3)
    ).double()
    inputs = torch.randn(4, 2, 5, 5, dtype=torch.float64)
    network = df.Network(model, df.AllParameters())
    logits, pullback = network.pullback(network.mean(), inputs)
    cotangents = torch.randn_like(logits)
    expected = torch.autograd.grad(model.train()(inputs), list(model.parameters()), cotangents)
    torch.testing.assert_close(
        pullback(cotangents).sum(0), torch.cat([gradient.flatten() for gradient in expected])
    )


def test_parameters_that_the_network_does_not_use_have_rows_of_zeros() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.register_parameter("spare", nn.Parameter(torch.ones(3)))
    network = df.Network(model, df.AllParameters())
    logits, pullback = network.pullback(network.mean(), torch.randn(5, 4))
    at = dict(
        zip(network.shapes, torch.arange(len(network.mean())).split(network.sizes), strict=True)
    )["spare"]
    assert pullback(torch.ones_like(logits))[:, at].count_nonzero() == 0
    assert pullback.total(torch.ones_like(logits))[at].count_nonzero() == 0


@pytest.mark.parametrize("statistics", ["batch", df.PseudoCount(), df.Ema(1.0)], ids=str)
def test_layers_without_a_rule_beside_batch_statistics_have_a_total_but_no_rows(
    statistics: Any,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    inputs = torch.randn(5, 4, dtype=torch.float64)
    network = df.Network(model, df.AllParameters(), statistics)
    theta = network.mean()
    logits, pullback = network.pullback(theta, inputs)
    total, step = (
        pullback.total(torch.ones_like(logits)),
        1e-6 * functional.one_hot(torch.tensor(1), len(theta)),
    )
    slope = (network(theta + step, inputs) - network(theta - step, inputs)).sum() / 2e-6
    torch.testing.assert_close(total[1], slope, rtol=1e-6, atol=1e-8)
    with pytest.raises(
        ValueError,
        match=r"Network: selection must be .* couple .*, got \"parameters \['0.scale'\]\"",
    ):
        pullback(torch.ones_like(logits))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_products_of_a_large_batch_are_summed_piece_by_piece(layout: torch.memory_format) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randn(203, 16, 20, 20, generator=generator).contiguous(memory_format=layout)
        for _ in range(2)
    )
    assert left.numel() > 1 << 20  # 203 are no multiple of a piece
    for kind in (torch.float32, torch.bfloat16):  # half precision is summed in single
        one, other = left.to(kind), right.to(kind)
        found = _products(one.flatten(2), other.flatten(2), torch.float32)
        wanted = (one.double() * other.double()).sum((2, 3))
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-4)

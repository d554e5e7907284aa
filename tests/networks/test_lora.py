"""Low-rank adaptation: against the same network with its weights written out."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
from small import refuses


def model() -> nn.Sequential:
    torch.manual_seed(0)
    convolutions = (
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Conv2d(4, 4, 2, groups=2),
        nn.Conv2d(4, 3, 2, padding="same", padding_mode="circular", dilation=2),
    )
    return nn.Sequential(
        *convolutions,
        nn.Flatten(2),
        nn.Linear(4, 5, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(15, 3),
    ).double()


NAMES = ["0.weight", "4.weight", "6.weight", "9.weight"]


def images() -> Tensor:
    return torch.randn(5, 2, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def written_out(network: df.Network, theta: Tensor, scale: float) -> nn.Sequential:
    """The network with W + scale · B A in its place."""
    changed = model()
    pieces = dict(zip(network.shapes, theta.split(network.sizes), strict=True))
    with torch.no_grad():
        for name in NAMES:
            weight = changed.get_parameter(name)
            a, b = (pieces[f"{name}.{own}"].view(network.shapes[f"{name}.{own}"]) for own in "AB")
            weight.add_(scale * (b @ a).view_as(weight))
    return changed.eval()


def point(network: df.Network) -> Tensor:
    return network.mean() + 0.3 * torch.randn(
        len(network.mean()), generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )


def test_starts_at_the_network_as_it_is() -> None:
    network = df.Network(model(), df.LoRA(rank=2), "source")
    assert list(network.shapes) == [f"{name}.{own}" for name in NAMES for own in "AB"]
    torch.testing.assert_close(network(network.mean(), images()), model().eval()(images()))
    assert (network.shapes["4.weight.A"], network.shapes["4.weight.B"]) == ((2, 16), (3, 2))


@pytest.mark.parametrize("deviation", [None, 0.5])
def test_draws_of_a(deviation: float | None) -> None:
    layer = nn.Linear(400, 3)
    chosen = df.select(layer, df.LoRA(rank=50, seed=3, deviation=deviation))
    assert chosen["weight.B"].count_nonzero() == 0
    torch.testing.assert_close(
        chosen["weight.A"].std().item(), deviation or 1 / 20, rtol=0.02, atol=0
    )
    assert abs(chosen["weight.A"].mean()) < 0.02
    assert torch.equal(
        chosen["weight.A"], df.select(layer, df.LoRA(50, seed=3, deviation=deviation))["weight.A"]
    )
    assert not torch.equal(
        chosen["weight.A"], df.select(layer, df.LoRA(50, seed=4, deviation=deviation))["weight.A"]
    )


def test_layers_of_the_same_shape_get_draws_of_their_own() -> None:
    chosen = df.select(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), df.LoRA())
    assert not torch.equal(chosen["0.weight.A"], chosen["1.weight.A"])


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_logits_and_rows(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(df.Network, "sample_rows")
    network = df.Network(model(), df.LoRA(rank=2, scale=scale), "source")
    theta = point(network)
    reference = written_out(network, theta, scale)
    logits, pullback = network.pullback(theta, images())
    torch.testing.assert_close(logits, reference(images()))
    cotangents = torch.randn_like(logits)
    pieces = dict(zip(network.shapes, theta.split(network.sizes), strict=True))
    rows, weights = [], [reference.get_parameter(name) for name in NAMES]
    for sample, cotangent in zip(images(), cotangents, strict=True):
        parts = []
        gradients = torch.autograd.grad(reference(sample[None]), weights, cotangent[None])
        for name, gradient in zip(NAMES, gradients, strict=True):  # d/dA = Bᵀ dW, d/dB = dW Aᵀ
            a, b = (pieces[f"{name}.{own}"].view(network.shapes[f"{name}.{own}"]) for own in "AB")
            parts += [scale * b.mT @ gradient.flatten(1), scale * gradient.flatten(1) @ a.mT]
        rows.append(torch.cat([part.flatten() for part in parts]))
    torch.testing.assert_close(
        (pullback(cotangents), pullback.total(cotangents)),
        (torch.stack(rows), torch.stack(rows).sum(0)),
    )


@pytest.mark.parametrize("statistics", ["batch", df.PseudoCount(), df.Ema(1.0)], ids=str)
def test_derivatives_under_batch_statistics(statistics: Any) -> None:
    network = df.Network(model(), df.LoRA(rank=1), statistics)
    theta = point(network)
    tangent = torch.randn_like(theta)
    logits, pullback = network.pullback(theta, images())
    slope = (
        network(theta + 1e-5 * tangent, images()) - network(theta - 1e-5 * tangent, images())
    ) / 2e-5
    total = pullback.total(torch.ones_like(logits))
    torch.testing.assert_close(
        (network.pushforward(theta, images(), tangent[None])[0], total @ tangent),
        (slope, slope.sum()),
        rtol=1e-6,
        atol=1e-7,
    )
    torch.testing.assert_close(pullback(torch.ones_like(logits)).sum(0), total)


def test_derivatives_under_carried_statistics_agree() -> None:
    """The pushforward is that of the values; a network that learns has another pullback
    (batch_norm.py), in which the total and the rows are held against each other.
    """
    network = df.Network(model(), df.LoRA(rank=1), df.Ema())
    theta = point(network)
    tangent = torch.randn_like(theta)
    logits, learned = network.pullback(theta, images())
    cotangents = torch.randn_like(logits)
    torch.testing.assert_close(learned(cotangents).sum(0), learned.total(cotangents))
    pushed = network.pushforward(theta, images(), tangent[None])[0]
    _, pullback = network.exact.pullback(theta, images())
    total = pullback.total(cotangents)
    assert not torch.allclose(total, learned.total(cotangents))
    torch.testing.assert_close(
        ((pushed * cotangents).sum(), pullback(cotangents).sum(0)), (total @ tangent, total)
    )


def test_the_first_linearised_step_leaves_the_belief_over_a_at_its_prior() -> None:
    network = df.Network(model(), df.LoRA(rank=2))
    start = df.Belief(network.mean(), df.Diagonal(torch.full_like(network.mean(), 0.1)))
    filt = df.Filter(
        network,
        df.Transition(df.RandomWalk(), df.NoNoise()),
        inference=df.Linearized(df.GaussNewton()),
    )
    state, _, _ = filt.step(filt.init(start), images())
    named = zip(
        network.shapes,
        network.mean().split(network.sizes),
        state.belief.mean.split(network.sizes),
        strict=True,
    )
    assert [torch.equal(before, after) for _, before, after in named] == [True, False] * 4
    spread = state.belief.covariance.variance().split(network.sizes)
    assert [bool((variance == 0.1).all()) for variance in spread] == [True, False] * 4


test_refusals = refuses(
    [
        (lambda: df.LoRA(rank=0), "LoRA.rank must be an integer >= 1, got 0"),
        (
            lambda: df.LoRA(targets="fc"),  # type: ignore[arg-type]
            "LoRA.targets must be a tuple of one pattern or more, got 'fc'",
        ),
        (lambda: df.LoRA(scale=0.0), r"LoRA.scale must be a finite number in \(0, inf\), got 0.0"),
        (lambda: df.LoRA(seed=-1), "LoRA.seed must be an integer >= 0, got -1"),
        (
            lambda: df.LoRA(deviation=0.0),
            r"LoRA.deviation must be a finite number in \(0, inf\), got 0.0",
        ),
        (
            lambda: df.select(model(), df.LoRA(targets=("1",))),
            r"must select one parameter or more, .* 'Conv2d', 'Linear'",
        ),
    ]
)

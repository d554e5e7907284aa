"""Networks as predictive models, against plain autograd on the user's own module."""

import copy
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app import models
from driftfilter.app.streams import sample_images
from driftfilter.base.randomness import Randomness
from small import Written, refuses


def tokens() -> nn.Module:
    """A token-wise network: layer norm, RMS norm and linear layers on [n, tokens, width]."""
    return Written(
        lambda own, x: own.head(own.second(torch.tanh(own.inner(own.first(x))))).mean(1),
        first=nn.LayerNorm(4),
        inner=nn.Linear(4, 6),
        second=nn.RMSNorm(6),
        head=nn.Linear(6, 3),
    )


def images(norm: Callable[[int], nn.Module]) -> nn.Module:
    first, second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 3)
    return nn.Sequential(
        first, norm(4), nn.Tanh(), second, norm(6), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)
    )


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch norm 1d": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)),
        (4,),
    ),
    "batch norm 2d": (lambda: images(nn.BatchNorm2d), (3, 6, 6)),
    "group norm": (lambda: images(lambda channels: nn.GroupNorm(2, channels)), (3, 6, 6)),
    "instance norm": (
        lambda: images(lambda channels: nn.InstanceNorm2d(channels, affine=True)),
        (3, 6, 6),
    ),
    "tokens": (tokens, (5, 4)),
}
LAYERS = df.ByName(("*norm*", "1.*", "4.weight", "first.*", "second.*", "head.*", "inner.*"))
cases = pytest.mark.parametrize("case", CASES)


def setting(case: str) -> tuple[nn.Module, Tensor]:
    """A network in float64 with parameters and statistics that are not the initial ones, and a
    batch.
    """
    torch.manual_seed(0)
    build, shape = CASES[case]
    model = build().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        model.train()(torch.randn(32, *shape, dtype=torch.float64))
    return model, torch.randn(5, *shape, dtype=torch.float64)


def selected(model: nn.Module, network: df.Network) -> list[nn.Parameter]:
    known = dict(model.named_parameters())
    return [known[name] for name in network.shapes]


def flat(gradients: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients])


@cases
@pytest.mark.parametrize("statistics", ["batch", "source"])
def test_logits_are_those_of_the_module(case: str, statistics: Literal["batch", "source"]) -> None:
    model, inputs = setting(case)
    network = df.Network(model, LAYERS, statistics)
    reference = copy.deepcopy(model).train(statistics == "batch")
    torch.testing.assert_close(network(network.mean(), inputs), reference(inputs))
    moved = network.mean() + 0.1
    with torch.no_grad():
        for parameter in selected(reference, network):
            parameter.add_(0.1)
    torch.testing.assert_close(network(moved, inputs), reference(inputs))


@cases
def test_rows_are_the_gradients_of_each_sample_alone(case: str) -> None:
    """With fixed statistics samples do not see each other: a batch of one gives its row."""
    model, inputs = setting(case)
    network = df.Network(model, LAYERS, "source")
    logits, pullback = network.pullback(network.mean(), inputs)
    cotangents = torch.randn(2, *logits.shape, dtype=torch.float64)
    alone = model.eval()
    for cotangent, rows in zip(cotangents, pullback(cotangents), strict=True):
        for sample in range(len(inputs)):
            expected = flat(
                torch.autograd.grad(
                    alone(inputs[sample : sample + 1]),
                    selected(alone, network),
                    cotangent[sample : sample + 1],
                )
            )
            torch.testing.assert_close(rows[sample], expected)


@cases
@pytest.mark.parametrize("statistics", ["batch", "source"])
def test_rows_sum_to_the_gradient_of_the_batch(
    case: str, statistics: Literal["batch", "source"]
) -> None:
    model, inputs = setting(case)
    network = df.Network(model, LAYERS, statistics)
    logits, pullback = network.pullback(network.mean(), inputs)
    cotangents = torch.randn_like(logits)
    reference = copy.deepcopy(model).train(statistics == "batch")
    expected = flat(
        torch.autograd.grad(reference(inputs), selected(reference, network), cotangents)
    )
    torch.testing.assert_close(
        (pullback.total(cotangents), pullback(cotangents).sum(0)), (expected, expected)
    )
    torch.testing.assert_close(
        pullback(cotangents), pullback(cotangents)
    )  # a second pass does not add to the first


def test_rows_under_batch_statistics_are_those_of_the_own_scale_and_shift_of_each_sample() -> None:
    model, inputs = setting("batch norm 2d")
    network = df.Network(model)
    first, norm1, _, second, norm2, _, _, head = model.children()
    copies = [
        parameter.detach().expand(5, -1).clone().requires_grad_()
        for parameter in selected(model, network)
    ]

    def affine(values: Tensor, norm: nn.Module, weight: Tensor, bias: Tensor) -> Tensor:
        plain = nn.functional.batch_norm(values, None, None, training=True, eps=norm.eps)  # type: ignore[arg-type]
        return plain * weight[:, :, None, None] + bias[:, :, None, None]

    hidden = torch.tanh(affine(first(inputs), norm1, copies[0], copies[1]))
    logits = head(torch.tanh(affine(second(hidden), norm2, copies[2], copies[3])).flatten(1))
    cotangents = torch.randn_like(logits)
    expected = torch.cat(torch.autograd.grad(logits, copies, cotangents), 1)
    torch.testing.assert_close(network.pullback(network.mean(), inputs)[1](cotangents), expected)


@cases
@pytest.mark.parametrize("statistics", ["batch", "source"])
def test_pushforward_is_the_slope_of_the_logits(
    case: str, statistics: Literal["batch", "source"]
) -> None:
    model, inputs = setting(case)
    network = df.Network(model, LAYERS, statistics)
    theta, tangents = network.mean(), torch.randn(2, len(network.mean()), dtype=torch.float64)
    with torch.no_grad():
        for tangent, got in zip(
            tangents, network.pushforward(theta, inputs, tangents), strict=True
        ):
            difference = network(theta + 1e-5 * tangent, inputs) - network(
                theta - 1e-5 * tangent, inputs
            )
            torch.testing.assert_close(got, difference / 2e-5, rtol=1e-6, atol=1e-7)


@cases
def test_the_module_is_left_as_it_was(case: str) -> None:
    model, inputs = setting(case)
    model.train()
    next(model.parameters()).requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    flags = [(module.training, len(module._forward_hooks)) for module in model.modules()]
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    network, other = df.Network(model, LAYERS), df.Network(model, LAYERS, "source")
    filt = df.Filter(network, observation=df.Gibbs(df.Entropy()))
    start = df.Belief(network.mean(), df.Diagonal(torch.full_like(network.mean(), 0.1)))
    untouched = other(other.mean(), inputs)
    state, _, _ = filt.step(filt.init(start), inputs)
    assert not torch.equal(state.belief.mean, network.mean())
    assert torch.equal(other(other.mean(), inputs), untouched)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [(module.training, len(module._forward_hooks)) for module in model.modules()] == flags
    assert [parameter.requires_grad for parameter in model.parameters()] == wanted
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_layer_that_is_used_twice_gets_both_contributions() -> None:
    torch.manual_seed(0)
    model = Written(
        lambda own, x: own.head(own.norm(torch.tanh(own.norm(x)))),
        norm=nn.LayerNorm(4),
        head=nn.Linear(4, 2),
    ).double()
    inputs = torch.randn(3, 4, dtype=torch.float64)
    network = df.Network(model)
    logits, pullback = network.pullback(network.mean(), inputs)
    expected = flat(
        torch.autograd.grad(model(inputs), selected(model, network), torch.ones_like(logits))
    )
    torch.testing.assert_close(pullback(torch.ones_like(logits)).sum(0), expected)


test_refusals = refuses(
    [
        (
            lambda: df.Network(nn.Linear(2, 2)),
            "NormAffine.* must select one parameter or more, got none of 2",
        ),
        (lambda: df.Network(3), "Network: model must be a torch module, got 3"),  # type: ignore[arg-type]
        (
            lambda: df.Network(nn.LayerNorm(2), statistics="none"),  # type: ignore[arg-type]
            "Network: statistics must be 'batch', 'source', PseudoCount.count., Ema.momentum., "
            "RunningStatistics.momentum. or a NormRule, got 'none'",
        ),
        (
            lambda: df.Network(nn.LayerNorm(2))(torch.zeros(3), torch.zeros(1, 2)),
            "belief must be over 4 parameters, got",
        ),
    ]
)


@pytest.mark.slow
def test_adaptation_of_a_shipped_network_under_noise() -> None:
    """source < batch statistics < the filter, on 600 images with pixel noise."""
    images, labels = sample_images()
    noise = 0.1 * torch.randn(600, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    stream, truth = (images[:600] + noise).clamp(0, 1).split(100), labels[:600]
    model = models.load("resnet20")
    network = df.Network(model)
    start = df.Belief(network.mean(), df.Diagonal(torch.full_like(network.mean(), 0.02)))
    filt = df.Filter(
        network,
        df.Transition(df.RandomWalk(), df.Reset(0.02)),
        df.Gibbs(df.InformationMaximization(), df.Constant(2.0)),
        df.Linearized(df.EmpiricalFisher()),
    )
    with torch.no_grad():
        source = torch.cat([model(batch) for batch in stream]).argmax(-1)
        statistics = torch.cat([network(network.mean(), batch) for batch in stream]).argmax(-1)
    _, outputs = filt.run(filt.init(start), stream)
    accuracies = [
        (guess == truth).float().mean().item() for guess in (source, statistics, outputs.labels)
    ]
    assert accuracies[0] + 0.2 < accuracies[1] < accuracies[2]


@pytest.mark.parametrize("centered", [True, False])
def test_the_fisher_of_weighted_samples_that_batch_statistics_couple(centered: bool) -> None:
    """The gradient is the slope of the energy; rows that sum to it make the factor, by the mean
    weight.
    """
    model, inputs = setting("batch norm 2d")
    network = df.Network(model, statistics="batch")
    theta, observation = network.mean(), df.Gibbs(df.Entropy(), df.Reliability(2.0))
    energy, _ = observation(network, theta, inputs, {}, Randomness(0, 0, theta.device))
    gradient, factor = df.EmpiricalFisher(centered, scale=1.5)(energy.evaluation)
    weights = energy.samples.coefficients
    assert weights.max() > 1.1 * weights.min()
    leaf = theta.clone().requires_grad_()
    expected = torch.autograd.grad(
        (weights * torch.special.entr(network(leaf, inputs).softmax(-1)).sum(-1)).sum(), leaf
    )[0]
    torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-10)
    rows = factor * weights.mean().sqrt() / 1.5 + (gradient / len(weights) if centered else 0)
    torch.testing.assert_close(rows.sum(0), expected, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(
        rows,
        energy.evaluation.pullbacks[0](energy.evaluation.expansion.gradient[0] * weights[:, None]),
    )


class Twice(torch.autograd.Function):
    """A function that torch cannot map over several tangents."""

    @staticmethod
    def forward(inputs: Tensor) -> Tensor:
        return 2 * inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return 2 * tangent


def test_products_of_several_tangents_are_those_of_each_alone() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(45, 3)
    )
    doubled = Written(
        lambda own, x: own.head(Twice.apply(own.norm(x))),  # type: ignore[no-untyped-call]
        norm=nn.LayerNorm(4),
        head=nn.Linear(4, 3),
    )
    for model, inputs in ((plain, torch.randn(6, 2, 5, 5)), (doubled, torch.randn(6, 4))):
        network = df.Network(model.double().eval())
        theta, inputs = network.mean(), inputs.double()
        tangents = torch.randn(7, len(theta), dtype=torch.float64)
        step = 1e-6 * tangents
        wanted = torch.stack(
            [
                (network(theta + each, inputs) - network(theta - each, inputs)) / 2e-6
                for each in step
            ]
        )
        torch.testing.assert_close(
            network.pushforward(theta, inputs, tangents), wanted, rtol=1e-6, atol=1e-7
        )

"""One pass for several batches says of each what a pass of its own says."""

import pytest
import torch
from torch import Tensor, nn

from driftfilter.networks.features import Backbone, build_head
from driftfilter.networks.network import Network
from driftfilter.networks.parameters import NoParameters, NormAffine
from small import conv, normal, tabular


class Counted(nn.Module):
    """A module that counts its calls."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.calls = module, [0]

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls[0] += 1
        return self.module(inputs)  # type: ignore[no-any-return]


def _batches(*sizes: int) -> list[Tensor]:
    return [normal(size, 4, seed=place, dtype=torch.float32) for place, size in enumerate(sizes)]


def test_a_network_without_parameters_shares_and_notices_writes() -> None:
    counted = Counted(tabular().eval())
    network = Network(counted, NoParameters(), "source")
    theta, batches = network.mean(), _batches(3, 1, 5)
    expected = [network(theta, batch.clone()) for batch in batches]
    assert network.share_pass(batches)
    calls = counted.calls[0]
    for batch, alone in zip(batches, expected, strict=True):
        torch.testing.assert_close(network(theta, batch), alone)
        torch.testing.assert_close(network.pullback(theta, batch)[0], alone)
    assert counted.calls[0] == calls
    batches[0].mul_(2)  # another batch now
    torch.testing.assert_close(network(theta, batches[0]), counted(batches[0]))
    with torch.no_grad():
        single = network(theta, batches[1])
    assert network.share_pass([batches[1]])  # alone: the same bits as in company
    assert torch.equal(network(theta, batches[1]), single)


def test_a_head_shares_its_backbone() -> None:
    counted = Counted(tabular().eval())
    model, theta = build_head(Backbone(counted, "module.3"))
    batches = _batches(3, 2)
    expected = [model(theta, batch.clone()) for batch in batches]
    assert model.share_pass(batches)
    calls = counted.calls[0]
    for batch, alone in zip(batches, expected, strict=True):
        torch.testing.assert_close(model(theta, batch), alone)
    assert counted.calls[0] == calls


class Mixing(nn.Module):
    """Samples see the mean of their batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(inputs - inputs.mean(0))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "network",
    [
        Network(tabular().eval(), NoParameters(), "batch"),
        Network(tabular().eval(), NormAffine(), "source"),
        Network(Mixing(), NoParameters(), "source"),
    ],
    ids=["batch statistics", "adapted parameters", "a module that mixes"],
)
def test_what_depends_on_its_company_is_not_shared(network: Network) -> None:
    batches = _batches(3, 2)
    expected = network(network.mean(), batches[0].clone())
    assert not network.share_pass(batches)
    assert torch.equal(network(network.mean(), batches[0]), expected)


def test_images_too() -> None:
    network = Network(conv(lambda: nn.GroupNorm(2, 6)).eval(), NoParameters(), "source")
    batches = [normal(2, 3, 8, 8, seed=seed, dtype=torch.float32) for seed in range(3)]
    expected = [network(network.mean(), batch.clone()) for batch in batches]
    assert network.share_pass(batches)
    for batch, alone in zip(batches, expected, strict=True):
        torch.testing.assert_close(network(network.mean(), batch), alone)

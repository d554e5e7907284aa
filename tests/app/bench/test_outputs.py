"""A network's logits for some of its classes, against all of its logits."""

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app.bench.outputs import Selected, keep_outputs
from small_models import Pictures, six_classes, tokens

KEPT = torch.tensor([1, 3, 5])


def images(n: int = 6) -> Tensor:
    return torch.rand(n, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_a_head_keeps_some_rows() -> None:
    network = six_classes()
    before = {name: each.clone() for name, each in network.state_dict().items()}
    cut = keep_outputs(network, KEPT, images())
    assert isinstance(cut, Pictures)
    assert (cut.head.out_features, len(cut.head.weight)) == (3, 3)
    assert torch.allclose(cut(images()), network(images())[:, KEPT], atol=1e-6)
    assert all(torch.equal(each, before[name]) for name, each in network.state_dict().items())


class Scaled(Pictures):
    """Something comes after its last linear layer."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * torch.arange(1.0, 7)


class Convolved(nn.Module):
    """It has no linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Conv2d(3, 6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.last(inputs).mean((2, 3))
        return logits


@pytest.mark.parametrize("network", [Scaled(6).eval(), Convolved().eval()], ids=["after", "none"])
def test_other_networks_leave_logits_out(network: nn.Module) -> None:
    cut = keep_outputs(network, KEPT, images())
    assert isinstance(cut, Selected)
    assert torch.equal(cut(images()), network(images())[:, KEPT])


def test_several_inputs_by_name() -> None:
    inputs = {"input_ids": torch.tensor([[1, 2], [3, 4]]), "attention_mask": torch.ones(2, 2)}
    cut = keep_outputs(tokens(), torch.tensor([2, 0]), inputs)
    assert torch.allclose(cut(**inputs), tokens()(**inputs)[:, [2, 0]], atol=1e-6)


@pytest.mark.parametrize("preset", ["tent", "t3a", "driftfilter"])
def test_presets_adapt_what_is_left(preset: str) -> None:
    """Also those that stand on the last linear layer; probabilities are among three classes."""
    adapter = df.adapt(keep_outputs(six_classes(), KEPT, images()), preset)
    for _ in range(2):
        logp = adapter(images())
        assert logp.shape == (6, 3)
        assert logp.exp().sum(-1) == pytest.approx(1.0, abs=1e-5)

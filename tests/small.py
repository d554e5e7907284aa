"""What many tests share: draws, small networks, what a state holds, and exact comparison."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def perceptron(theta: Tensor, inputs: Tensor) -> Tensor:
    """Logits [n, 3] of a 2-3-3 network with 15 parameters."""
    return torch.tanh(inputs @ theta[:6].view(2, 3)) @ theta[6:15].view(3, 3)


def conv(
    norm: Callable[[], nn.Module] = lambda: nn.BatchNorm2d(6),
    wrap: Callable[[Any], Any] = lambda layer: layer,
) -> nn.Module:
    """Three classes of images [n, 3, h, w]."""
    last = nn.AdaptiveAvgPool2d(1), nn.Flatten(), wrap(nn.Linear(6, 3))
    return nn.Sequential(wrap(nn.Conv2d(3, 6, 3)), norm(), nn.ReLU(), *last)


def tabular(seed: int = 0, width: int = 6) -> nn.Sequential:
    """Three classes of rows [n, 4]; in training mode."""
    torch.manual_seed(seed)
    layers = nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3)
    return nn.Sequential(*layers)


def few_copies(preset: str) -> dict[str, Any]:
    """Options for presets that draw copies of a batch: few, to be quick; and for those with a
    buffer: small, so that every batch of four is an update.
    """
    if preset in ("rotta", "note"):
        return {"capacity": 6, "every": 4}
    return {"copies": 2} if preset in ("cotta", "petal", "memo", "lora") else {}


def feed(adapter: Callable[..., object], batches: Iterable[Tensor]) -> None:
    """Batches one after the other, what is said to them thrown away."""
    for batch in batches:
        adapter(batch)


def moments(belief: df.Belief) -> tuple[Tensor, Tensor]:
    """Mean and dense covariance."""
    return belief.mean, belief.covariance.dense()


class Written(nn.Module):
    """Layers by name, and a forward pass that is a function of the module and its inputs."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **layers: nn.Module) -> None:
        super().__init__()
        self.written = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, inputs: Tensor) -> Any:
        return self.written(self, inputs)


def contents(state: df.FilterState) -> list[Tensor]:
    """Copies of everything in a state."""
    parts = *moments(state.belief), *moments(state.source), *state.memory.values()
    return [part.clone() for part in parts]


def stream(chain: df.LabelChain, alone: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """What a chain of labels makes of log-probabilities [n, k], batch by batch, and what it knows
    then.
    """
    known, found = None, []
    for part in alone.split(batch):
        together, known = chain(part, known)
        found.append(together)
    assert known is not None
    return torch.cat(found), known


def assert_same(actual: Any, expected: Any) -> None:
    """Bit for bit: tensors, or sequences and mappings of them."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def _call(function: Callable[..., object], *args: object) -> object:
    return function(*args)


def refuses(
    cases: Iterable[tuple[Any, ...]], by: Callable[..., object] = _call, exact: bool = False
) -> Callable[..., None]:
    """A test that ``by`` raises a ValueError: each case is its arguments and then the message, a
    pattern unless ``exact``.
    """

    @pytest.mark.parametrize("case", cases)
    def test(case: tuple[object, ...]) -> None:
        *arguments, message = case
        with pytest.raises(ValueError, match=re.escape(str(message)) if exact else str(message)):
            by(*arguments)

    return test

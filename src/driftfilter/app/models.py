"""The source networks: residual networks for CIFAR-10 whose weights ship with the package, and
their larger kin.

All take RGB images in [0, 1], [n, 3, 32, 32], and normalise inside the forward pass.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from driftfilter.base.checks import require

Norm: TypeAlias = Callable[[int], nn.Module]

MEAN = (0.4914, 0.4822, 0.4465)
DEVIATION = (0.2470, 0.2435, 0.2616)


def _conv(inside: int, outside: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, size, stride, padding=size // 2, bias=False)


class _Block(nn.Module):
    """relu(norm₂(conv₂(relu(norm₁(conv₁ x)))) + shortcut x)."""

    def __init__(self, inside: int, outside: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(inside, outside, 3, stride), norm(outside)
        self.conv2, self.norm2 = _conv(outside, outside, 3), norm(outside)
        self.shortcut = (
            nn.Sequential(OrderedDict(conv=_conv(inside, outside, 1, stride), norm=norm(outside)))
            if stride != 1 or inside != outside
            else nn.Identity()
        )

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.norm1(self.conv1(inputs)))
        return torch.relu(self.norm2(self.conv2(hidden)) + self.shortcut(inputs))


class _PreactivationBlock(nn.Module):
    """conv₂(relu(norm₂(conv₁ h))) + (shortcut h if shapes differ, else x), h = relu(norm₁ x)."""

    def __init__(self, inside: int, outside: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.norm1, self.conv1 = norm(inside), _conv(inside, outside, 3, stride)
        self.norm2, self.conv2 = norm(outside), _conv(outside, outside, 3)
        self.shortcut = (
            _conv(inside, outside, 1, stride) if stride != 1 or inside != outside else None
        )

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.norm1(inputs))
        skip = inputs if self.shortcut is None else self.shortcut(hidden)
        return self.conv2(torch.relu(self.norm2(self.conv1(hidden)))) + skip  # type: ignore[no-any-return]


class ResidualNetwork(nn.Module):
    """Stem, three groups of blocks, global average pooling and a linear head.

    Post-activation (ResNet) or pre-activation (Wide ResNet, norm after the last block instead of
    after the stem).
    """

    mean: Tensor
    deviation: Tensor

    def __init__(
        self,
        widths: tuple[int, int, int, int],
        depth: int,
        norm: Norm,
        preactivation: bool,
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.preactivation = preactivation
        self.register_buffer("mean", torch.tensor(MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor(DEVIATION).view(3, 1, 1), persistent=False)
        block = _PreactivationBlock if preactivation else _Block
        self.stem = _conv(3, widths[0], 3)
        if not preactivation:
            self.norm = norm(widths[0])
        self.blocks, inside = nn.ModuleList(), widths[0]
        for group, outside in enumerate(widths[1:]):
            for position in range(depth):
                self.blocks.append(
                    block(inside, outside, 2 if group > 0 and position == 0 else 1, norm)
                )
                inside = outside
        if preactivation:
            self.norm = norm(inside)
        self.head = nn.Linear(inside, classes)

    def features(self, inputs: Tensor) -> Tensor:
        """What the head sees [n, width]."""
        hidden: Tensor = self.stem((inputs - self.mean) / self.deviation)
        if not self.preactivation:
            hidden = torch.relu(self.norm(hidden))
        for block in self.blocks:
            hidden = block(hidden)
        if self.preactivation:
            hidden = torch.relu(self.norm(hidden))
        return hidden.mean((2, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.features(inputs))  # type: ignore[no-any-return]


ARCHITECTURES: dict[str, Callable[[], ResidualNetwork]] = {
    "resnet20": lambda: ResidualNetwork((16, 16, 32, 64), 3, nn.BatchNorm2d, preactivation=False),
    "resnet20_gn": lambda: ResidualNetwork(
        (16, 16, 32, 64), 3, partial(nn.GroupNorm, 8), preactivation=False
    ),
    "resnet26_w32": lambda: ResidualNetwork(
        (32, 32, 64, 128), 4, nn.BatchNorm2d, preactivation=False
    ),
    "wrn28_10": lambda: ResidualNetwork((16, 160, 320, 640), 4, nn.BatchNorm2d, preactivation=True),
}
SHIPPED = ("resnet20", "resnet20_gn")


def build(name: str) -> ResidualNetwork:
    """An untrained network in eval mode."""
    require(name in ARCHITECTURES, "model name", name, f"one of {list(ARCHITECTURES)}")
    return ARCHITECTURES[name]().eval()


def load(name: str, weights: Path | None = None) -> ResidualNetwork:
    """A trained network in eval mode, float32; ``weights`` for those that do not ship with the
    package.
    """
    network = build(name)
    require(
        weights is not None or name in SHIPPED,
        "model name",
        name,
        f"one of {SHIPPED}, or give its weights file",
    )
    with as_file(files("driftfilter.app") / "assets" / f"{name}.safetensors") as shipped:
        tensors = load_file(shipped if weights is None else weights)
    missing, unexpected = network.load_state_dict(tensors, strict=False)
    missing = [key for key in missing if not key.endswith("num_batches_tracked")]
    require(
        not missing and not unexpected,
        "weights",
        f"missing {missing}, unexpected {unexpected}",
        f"those of {name}",
    )
    return network

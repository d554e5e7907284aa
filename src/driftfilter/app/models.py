"""The source networks for CIFAR-10: residual networks, two of whose weights ship with the package,
and a vision transformer; one of each for Tiny-ImageNet, and a ResNet-50 for ImageNet.

All take RGB images in [0, 1], [n, 3, 32, 32] (Tiny-ImageNet: 64 x 64, ImageNet: 224 x 224), and
normalise inside the forward pass.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from driftfilter.app.samples import open_sample
from driftfilter.base.checks import require

Norm: TypeAlias = Callable[[int], nn.Module]

MEAN = (0.4914, 0.4822, 0.4465)
DEVIATION = (0.2470, 0.2435, 0.2616)
KERAS_MEAN = (123.68, 116.779, 103.939)  # of RGB in [0, 255]


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
    """Stem, groups of blocks of widths[1:], global average pooling and a linear head.

    Post-activation (ResNet) or pre-activation (Wide ResNet, norm after the last block instead of
    after the stem).
    """

    mean: Tensor
    deviation: Tensor

    def __init__(
        self,
        widths: tuple[int, ...],
        depth: int,
        norm: Norm,
        preactivation: bool,
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.preactivation = preactivation
        _register_moments(self)
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


class _PooledBlock(nn.Module):
    """x + conv₂(relu(norm₂(conv₁(relu(norm₁ x))))); a new shape is reached by average pooling and
    zeros for the new channels.
    """

    def __init__(self, inside: int, outside: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.bn1, self.conv1 = norm(inside), _conv(inside, outside, 3, stride)
        self.bn2, self.conv2 = norm(outside), _conv(outside, outside, 3)
        self.stride, self.added = stride, outside - inside

    def forward(self, inputs: Tensor) -> Tensor:
        skip = inputs
        if self.stride != 1:
            skip = functional.avg_pool2d(inputs, self.stride)
        if self.added:
            skip = functional.pad(skip, (0, 0, 0, 0, 0, self.added))
        hidden = self.conv1(torch.relu(self.bn1(inputs)))
        return self.conv2(torch.relu(self.bn2(hidden))) + skip  # type: ignore[no-any-return]


class PooledResidualNetwork(nn.Module):
    """The pre-activation ResNet-26 with group norm of the published correlated protocol; its
    inputs are scaled to [-1, 1].
    """

    def __init__(self, width: int = 16, depth: int = 4, groups: int = 8, classes: int = 10) -> None:
        super().__init__()
        norm = partial(nn.GroupNorm, groups)
        self.conv1, inside = _conv(3, width, 3), width
        for group in (1, 2, 3):
            outside, blocks = width * 2 ** (group - 1), []
            for position in range(depth):
                stride = 2 if group > 1 and position == 0 else 1
                blocks.append(_PooledBlock(inside, outside, stride, norm))
                inside = outside
            self.add_module(f"layer{group}", nn.Sequential(*blocks))
        self.bn, self.fc = norm(inside), nn.Linear(inside, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.conv1((inputs - 0.5) / 0.5)
        for group in (1, 2, 3):
            hidden = self.get_submodule(f"layer{group}")(hidden)
        return self.fc(torch.relu(self.bn(hidden)).mean((2, 3)))  # type: ignore[no-any-return]


class _Bottleneck(nn.Module):
    """relu(bn₃(conv₃(relu(bn₂(conv₂(relu(bn₁(conv₁ x))))))) + shortcut x); conv₁, 1 × 1, has the
    stride.
    """

    def __init__(self, inside: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(inside, width, 1, stride), norm(width)
        self.conv2, self.bn2 = _conv(width, width, 3), norm(width)
        self.conv3, self.bn3 = _conv(width, 4 * width, 1), norm(4 * width)
        self.downsample = (
            nn.Sequential(_conv(inside, 4 * width, 1, stride), norm(4 * width))
            if stride != 1 or inside != 4 * width
            else nn.Identity()
        )

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.bn1(self.conv1(inputs)))
        hidden = self.bn3(self.conv3(torch.relu(self.bn2(self.conv2(hidden)))))
        return torch.relu(hidden + self.downsample(inputs))


class BottleneckNetwork(nn.Module):
    """The ResNet-50 for ImageNet as Keras has it, under torchvision's names: batch norm with
    ε = 0.001, inputs 255 (x - mean) without a division.
    """

    mean: Tensor

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        norm = partial(nn.BatchNorm2d, eps=1e-3)
        moments = torch.tensor(KERAS_MEAN).view(3, 1, 1) / 255
        self.register_buffer("mean", moments, persistent=False)
        self.conv1, self.bn1, inside = _conv(3, 64, 7, 2), norm(64), 64
        for group, depth in enumerate((3, 4, 6, 3)):
            width, blocks = 64 * 2**group, []
            for position in range(depth):
                stride = 2 if group > 0 and position == 0 else 1
                blocks.append(_Bottleneck(inside, width, stride, norm))
                inside = 4 * width
            self.add_module(f"layer{group + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(inside, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.bn1(self.conv1(255 * (inputs - self.mean))))
        hidden = functional.max_pool2d(hidden, 3, 2, padding=1)
        for group in (1, 2, 3, 4):
            hidden = self.get_submodule(f"layer{group}")(hidden)
        return self.fc(hidden.mean((2, 3)))  # type: ignore[no-any-return]


class _AttentionBlock(nn.Module):
    """x + proj(attention(qkv(norm₁ x))), then x + fc₂(gelu(fc₁(norm₂ x)))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.proj, self.norm2 = nn.Linear(width, width), nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(inputs)).unflatten(-1, (3, self.heads, -1))
        mixed = functional.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4))
        hidden = inputs + self.proj(mixed.transpose(1, 2).flatten(-2))
        return hidden + self.fc2(functional.gelu(self.fc1(self.norm2(hidden))))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """Patches, learned positions, attention blocks with layer norm, mean over tokens, head."""

    mean: Tensor
    deviation: Tensor

    def __init__(
        self,
        width: int = 256,
        depth: int = 8,
        heads: int = 8,
        patch: int = 4,
        classes: int = 10,
        size: int = 32,
    ) -> None:
        super().__init__()
        _register_moments(self)
        self.patch = nn.Conv2d(3, width, patch, patch)
        self.pos = nn.Parameter(torch.zeros(1, (size // patch) ** 2, width))
        self.blocks = nn.ModuleList(_AttentionBlock(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.patch((inputs - self.mean) / self.deviation).flatten(2).mT + self.pos
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden).mean(1))  # type: ignore[no-any-return]


def _register_moments(network: nn.Module) -> None:
    """Mean and deviation [3, 1, 1] of CIFAR-10's training images, which no weight file has."""
    for name, values in (("mean", MEAN), ("deviation", DEVIATION)):
        network.register_buffer(name, torch.tensor(values).view(3, 1, 1), persistent=False)


_BY_GROUP = partial(nn.GroupNorm, 8)
ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "resnet20": lambda: ResidualNetwork((16, 16, 32, 64), 3, nn.BatchNorm2d, preactivation=False),
    "resnet20_gn": lambda: ResidualNetwork((16, 16, 32, 64), 3, _BY_GROUP, preactivation=False),
    "resnet26_w32": lambda: ResidualNetwork(
        (32, 32, 64, 128), 4, nn.BatchNorm2d, preactivation=False
    ),
    "resnet26_gn": PooledResidualNetwork,
    "wrn16_4_gn": lambda: ResidualNetwork((16, 64, 128, 256), 2, _BY_GROUP, preactivation=True),
    "wrn28_10": lambda: ResidualNetwork((16, 160, 320, 640), 4, nn.BatchNorm2d, preactivation=True),
    "vit_s4": VisionTransformer,
    "resnet18_tiny": lambda: ResidualNetwork(
        (64, 64, 128, 256, 512), 2, nn.BatchNorm2d, preactivation=False, classes=200
    ),
    "vit_s8_tiny": lambda: VisionTransformer(patch=8, classes=200, size=64),
    "resnet50_imagenet": BottleneckNetwork,
}
SHIPPED = ("resnet20", "resnet20_gn")


def build(name: str) -> nn.Module:
    """An untrained network in eval mode."""
    require(name in ARCHITECTURES, "model name", name, f"one of {list(ARCHITECTURES)}")
    return ARCHITECTURES[name]().eval()


def load(name: str, weights: Path | None = None) -> nn.Module:
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
    if weights is not None:
        tensors = load_file(weights)
    else:
        with open_sample(f"{name}.safetensors") as shipped:
            tensors = load_file(shipped)
    missing, unexpected = network.load_state_dict(tensors, strict=False)
    missing = [key for key in missing if not key.endswith("num_batches_tracked")]
    require(
        not missing and not unexpected,
        "weights",
        f"missing {missing}, unexpected {unexpected}",
        f"those of {name}",
    )
    return network

"""Networks for `--models small_models:NAME`: small, each for another kind of data, some of them
broken.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

CLASSES, COLUMNS, CHANNELS, WORDS = 3, 4, 2, 20


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().eval()


class Pictures(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.pool, self.norm = nn.AdaptiveAvgPool2d(2), nn.BatchNorm1d(12)
        self.norm.running_mean = torch.full((12,), 0.5)
        self.norm.running_var = torch.full((12,), 3e-4)  # of means of 256 uniform values
        self.head = nn.Linear(12, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.pool(images).flatten(1)))
        return logits


class Windows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter, self.norm = nn.Conv1d(CHANNELS, 5, 3), nn.BatchNorm1d(5)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, windows: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.filter(windows)).relu().mean(-1))
        return logits


class Tokens(nn.Module):
    """Takes tokens and a mask by name."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, 6), nn.LayerNorm(6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        weights = attention_mask[..., None].float()
        mean = (self.words(input_ids) * weights).sum(1) / weights.sum(1)
        logits: Tensor = self.head(self.norm(mean))
        return logits


class Broken(Pictures):
    """Pictures, with something done to the logits."""

    def __init__(self, harm: Callable[[Tensor], Any]) -> None:
        super().__init__(CLASSES)
        self.harm = harm

    def forward(self, images: Tensor) -> Any:
        return self.harm(super().forward(images))


def pictures() -> nn.Module:
    return _seeded(lambda: Pictures(CLASSES))


def six_classes() -> nn.Module:
    return _seeded(lambda: Pictures(6))


def ten_classes() -> nn.Module:
    return _seeded(lambda: Pictures(10))


def table() -> nn.Module:
    return _seeded(
        lambda: nn.Sequential(
            nn.Linear(COLUMNS, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)
        )
    )


def windows() -> nn.Module:
    return _seeded(Windows)


def tokens() -> nn.Module:
    return _seeded(Tokens)


def flat() -> nn.Module:
    return _seeded(lambda: Broken(lambda logits: logits.argmax(-1)))


def transposed() -> nn.Module:
    return _seeded(lambda: Broken(lambda logits: logits.T))


def averaged() -> nn.Module:
    return _seeded(lambda: Broken(lambda logits: logits.mean(0, keepdim=True)))


def unknown() -> nn.Module:
    return _seeded(lambda: Broken(lambda logits: logits / 0 * 0))


def named() -> nn.Module:
    return _seeded(lambda: Broken(lambda logits: {"scores": logits}))

"""What is done to pictures before a network sees them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from driftfilter.app.readers.fit import Fit, Size as Size
from driftfilter.base.checks import nearest, require

Channels: TypeAlias = tuple[float, ...]

NAMED: dict[str, dict[str, Channels]] = {
    "mean": {"imagenet": (0.485, 0.456, 0.406)},
    "deviation": {"imagenet": (0.229, 0.224, 0.225)},
}
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")


@final
@dataclass(frozen=True)
class Transform:
    """Resize, centre crop, then (x - mean) / deviation for RGB x in [0, 1].

    Whoever reads the pictures does the geometry. ``resize`` is the shorter side, or height and
    width of a picture that loses its proportions. The last step is inside the network
    (``Normalized``), so that it takes [0, 1]. None leaves a step out.
    """

    resize: Size | None = None
    crop: Size | None = None
    mean: Channels | None = None
    deviation: Channels | None = None
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        require(
            self.interpolation in INTERPOLATIONS,
            "interpolation",
            self.interpolation,
            f"one of {INTERPOLATIONS}{nearest(self.interpolation, INTERPOLATIONS)}",
        )

    def __str__(self) -> str:
        steps = []
        if self.resize is not None:
            side = "shorter side" if isinstance(self.resize, int) else "height x width"
            steps.append(f"resize {side} to {_say(self.resize)} ({self.interpolation})")
        if self.crop is not None:
            steps.append(f"centre crop {_say(self.crop)}")
        if self.mean is not None or self.deviation is not None:
            mean, deviation = self.mean or (0.0,), self.deviation or (1.0,)
            steps.append(f"(x - {_list(mean)}) / {_list(deviation)} inside the network")
        return ", ".join(steps) or "none (RGB in [0, 1] as it is)"

    @property
    def fit(self) -> Fit | None:
        """What is done to pictures; None: nothing."""
        if self.resize is None and self.crop is None:
            return None
        return Fit(self.resize, self.crop, self.interpolation)

    def wrap(self, network: nn.Module) -> nn.Module:
        """The network with the last step inside, itself if there is none."""
        if self.mean is None and self.deviation is None:
            return network
        return Normalized(network, self.mean or (0.0,), self.deviation or (1.0,))


OPTIONS = tuple(item.name for item in fields(Transform))


def change_transform(given: Transform, options: Mapping[str, str]) -> Transform:
    """The transform with what ``options`` say, each a text such as 256, 224x224 or imagenet."""
    return replace(given, **{key: _parse(key, text) for key, text in options.items()})


def _parse(key: str, text: str) -> Any:
    if text == "none" and key != "interpolation":
        return None
    if key in ("resize", "crop"):
        sides = text.split("x")
        known = len(sides) <= 2 and all(side.isdigit() and int(side) > 0 for side in sides)
        require(known, key, text, "pixels, as in 256 or 224x224 (height, width), or none")
        return int(text) if len(sides) == 1 else (int(sides[0]), int(sides[1]))
    if key in NAMED and text not in NAMED[key]:
        return _parse_channels(key, text)
    return NAMED[key][text] if key in NAMED else text


def _parse_channels(key: str, text: str) -> Channels:
    try:
        found = tuple(map(float, text.split("/")))
    except ValueError:
        found = ()
    known = len(found) in (1, 3) and all(abs(each) < float("inf") for each in found)
    positive = key != "deviation" or min(found, default=0) > 0
    require(
        known and positive,
        key,
        text,
        f"one of {list(NAMED[key])}, none, or a number for each of R/G/B, as in 0.5/0.5/0.5"
        + (" (positive)" if key == "deviation" else ""),
    )
    return found


def _say(size: Size) -> str:
    return str(size) if isinstance(size, int) else f"{size[0]}x{size[1]}"


def _list(channels: Channels) -> str:
    return "/".join(f"{each:g}" for each in channels)


class Normalized(nn.Module):
    """network((x - mean) / deviation) of RGB x in [0, 1] [n, 3, h, w]."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, network: nn.Module, mean: Channels, deviation: Channels) -> None:
        super().__init__()
        self.network = network
        kind = next((each.dtype for each in network.parameters() if each.is_floating_point()), None)
        for name, values in (("mean", mean), ("deviation", deviation)):
            buffer = torch.tensor(values, dtype=kind).view(-1, 1, 1)
            self.register_buffer(name, buffer, persistent=False)

    def forward(self, inputs: Tensor) -> Any:
        return self.network((inputs - self.mean) / self.deviation)

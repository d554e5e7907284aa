"""Transforms: what they say, what a text makes of them, and the step inside the network."""

import pytest
import torch
from torch import nn

import driftfilter as df
from driftfilter.app.networks.transform import Normalized, Transform, change_transform
from small import refuses


def test_a_transform_says_its_steps() -> None:
    assert str(Transform()) == "none (RGB in [0, 1] as it is)"
    whole = Transform(256, (224, 192), (0.5,), (0.25,), "bicubic")
    assert str(whole) == (
        "resize shorter side to 256 (bicubic), centre crop 224x192, (x - 0.5) / 0.25 inside the "
        "network"
    )


def test_options_change_what_they_name_and_nothing_else() -> None:
    given = Transform(256, 224, (0.5,), (0.5,))
    assert change_transform(given, {}) == given
    assert change_transform(given, {"resize": "64x48", "mean": "none"}) == Transform(
        (64, 48), 224, None, (0.5,)
    )
    assert change_transform(Transform(), {"mean": "imagenet", "deviation": "1/2/3"}) == Transform(
        mean=(0.485, 0.456, 0.406), deviation=(1.0, 2.0, 3.0)
    )


test_wrong_values_are_refused = refuses(
    [
        ("resize", "big", "resize must be pixels, as in 256 or 224x224"),
        ("crop", "0", "crop must be pixels"),
        ("crop", "1x2x3", "crop must be pixels"),
        ("mean", "imagnet", r"mean must be one of \['imagenet'\]"),
        ("mean", "0.5/0.5", "mean must be .* a number for each of R/G/B"),
        ("mean", "nan", "mean must be"),
        ("deviation", "0", r"deviation must be .*\(positive\)"),
        ("interpolation", "bicubi", "did you mean 'bicubic'"),
    ],
    by=lambda key, text: change_transform(Transform(), {key: text}),
)


def test_the_last_step_is_inside_the_network() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    assert Transform(256).wrap(network) is network
    wrapped = Transform(mean=(0.1, 0.2, 0.3), deviation=(0.5, 1.0, 2.0)).wrap(network)
    images = torch.rand(3, 3, 2, 2)
    by_hand = images.clone()
    for channel, (mean, deviation) in enumerate(((0.1, 0.5), (0.2, 1.0), (0.3, 2.0))):
        by_hand[:, channel] = (images[:, channel] - mean) / deviation
    torch.testing.assert_close(wrapped(images), network(by_hand))
    assert set(wrapped.state_dict()) == {f"network.{name}" for name in network.state_dict()}
    assert list(df.select(wrapped, df.Head())) == ["network.3.weight", "network.3.bias"]
    assert list(df.select(wrapped, df.NormAffine())) == ["network.2.weight", "network.2.bias"]


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_the_step_has_the_type_of_the_network(kind: torch.dtype) -> None:
    wrapped = Normalized(nn.Conv2d(3, 1, 1).to(kind), (0.5,), (0.5,))
    assert wrapped(torch.rand(1, 3, 2, 2, dtype=kind)).dtype == kind

"""The corruptions against closed formulas, scipy, colorsys and pillow; their interface, scale and
refusals.
"""

import colorsys
import io
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage, stats
from torch import Tensor

from driftfilter.app.corruptions import CORRUPTIONS, EXTRA, FROST_TEXTURE, _shuffle, corrupt
from driftfilter.app.images.constants import SETS, find_set
from driftfilter.app.streams import sample_images

NAMES = [*CORRUPTIONS, *EXTRA]
SEVERITIES = [1, 2, 3, 4, 5]


@cache
def _images(n: int, size: int = 32) -> Tensor:
    images = sample_images().images[:n]
    if size == 32:
        return images
    larger = torch.nn.functional.interpolate(images, size=(size, size), mode="bilinear")
    return (255 * larger).round() / 255


def _arrays(images: Tensor) -> np.ndarray:
    """[n, h, w, 3], bytes."""
    return (255 * images).round().permute(0, 2, 3, 1).numpy().astype(np.uint8)


def _difference(made: Tensor, expected: np.ndarray) -> np.ndarray:
    return np.asarray(np.abs(_arrays(made).astype(int) - expected.astype(int)))


def _assert_near(made: Tensor, expected: np.ndarray, share: float) -> None:
    """Nowhere more than a unit of 255 apart, and that in this share of the values at most."""
    wrong = _difference(made, expected)
    assert wrong.max() <= 1
    assert (wrong > 0).mean() < share


def test_the_published_fifteen_and_the_four_extras_are_there() -> None:
    assert (len(CORRUPTIONS), len(EXTRA), len(set(NAMES))) == (15, 4, 19)
    assert all(function.__name__ == name for name, function in (CORRUPTIONS | EXTRA).items())
    assert FROST_TEXTURE == "procedural"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [32, 64, 96])
def test_shape_range_and_eight_bits(name: str, size: int) -> None:
    images = _images(3, size)
    kept = images.clone()
    for severity in SEVERITIES:
        made = corrupt(images, name, severity)
        assert made.shape == images.shape
        assert made.dtype == torch.float32
        assert 0 <= made.min() <= made.max() <= 1
        torch.testing.assert_close(255 * made, (255 * made).round(), rtol=0, atol=1e-4)
        assert (made != images).any()
    assert torch.equal(images, kept)


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_decides_and_the_dtype_does_not(name: str) -> None:
    images = _images(4)
    made = corrupt(images, name, 4, seed=7)
    assert torch.equal(made, corrupt(images, name, 4, seed=7))
    double = corrupt(images.double(), name, 4, seed=7)
    assert double.dtype == torch.float64
    assert torch.equal(double, (255 * made.double()).round() / 255)
    fixed = {
        "defocus_blur",
        "zoom_blur",
        "brightness",
        "contrast",
        "pixelate",
        "jpeg_compression",
        "gaussian_blur",
        "saturate",
    }
    assert torch.equal(made, corrupt(images, name, 4, seed=8)) == (name in fixed)


@pytest.mark.parametrize("name", NAMES)
def test_rectangles_and_single_images(name: str) -> None:
    made = corrupt(_images(1, 64)[..., :40], name)
    assert made.shape == (1, 3, 64, 40)
    assert made.isfinite().all()


# Not monotone by the published constants: saturate (grey first, then vivid), spatter (water, then
# mud), glass (the fourth blurs less than the third), elastic (less affine, more local), snow (the
# fourth has fewer flakes than the third) and frost (the fourth only darkens the image under the
# frost of the third).
NOT_MONOTONE = ("saturate", "spatter", "glass_blur", "elastic_transform", "snow", "frost")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_MONOTONE])
def test_severity_is_distance_from_the_clean_image(name: str) -> None:
    images = _images(200)
    distances = [
        (corrupt(images, name, severity) - images).square().mean().item() for severity in SEVERITIES
    ]
    assert distances == sorted(distances), distances
    assert distances[4] > 1.1 * distances[0]


@pytest.mark.parametrize("severity", SEVERITIES)
def test_contrast_shrinks_about_the_channel_means(severity: int) -> None:
    x = _arrays(_images(5)) / 255
    factor = [0.75, 0.5, 0.4, 0.3, 0.15][severity - 1]
    mean = x.mean((1, 2), keepdims=True)
    expected = np.floor(255 * ((x - mean) * factor + mean))
    # float32 where a value is all but whole
    _assert_near(corrupt(_images(5), "contrast", severity), expected, 0.005)


def _hsv(image: np.ndarray, change: str, severity: int) -> np.ndarray:
    rise = [0.05, 0.1, 0.15, 0.2, 0.3][severity - 1]
    factor, shift = [(0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2)][severity - 1]
    made = []
    for rgb in image.reshape(-1, 3) / 255:
        h, s, v = colorsys.rgb_to_hsv(*rgb)
        v, s = (min(v + rise, 1), s) if change == "brightness" else (v, min(factor * s + shift, 1))
        made.append(colorsys.hsv_to_rgb(h, s, v))
    return np.floor(255 * np.array(made) + 1e-6).reshape(image.shape)


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("change", ["brightness", "saturate"])
def test_hsv_changes_against_colorsys(change: str, severity: int) -> None:
    images = _images(2).clone()
    images[0, :, 0, :3] = torch.tensor(
        [0.0, 128 / 255, 1.0]
    )  # black, grey and white, where hue is not defined
    expected = np.stack([_hsv(x, change, severity) for x in _arrays(images)])
    _assert_near(corrupt(images, change, severity), expected, 0.01)


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("severity", SEVERITIES)
def test_gaussian_blur_against_scipy(severity: int, size: int) -> None:
    sigma = [0.4, 0.6, 0.7, 0.8, 1.0][severity - 1] * size / 32
    x = _arrays(_images(3, size)) / 255
    _assert_near(
        corrupt(_images(3, size), "gaussian_blur", severity, constants="cifar"),
        np.floor(255 * ndimage.gaussian_filter(x, (0, sigma, sigma, 0), mode="nearest") + 1e-3),
        0.005,
    )


def test_defocus_at_severity_5_is_a_mirrored_box() -> None:
    x = _arrays(_images(3)) / 255
    expected = np.floor(255 * ndimage.uniform_filter(x, (1, 3, 3, 1), mode="mirror") + 1e-3)
    assert _difference(corrupt(_images(3), "defocus_blur"), expected).max() == 0


@pytest.mark.parametrize("severity", SEVERITIES)
def test_pixelate_against_pillow(severity: int) -> None:
    small = int(32 * [0.95, 0.9, 0.85, 0.75, 0.65][severity - 1])
    box = Image.Resampling.BOX
    made = [
        Image.fromarray(x).resize((small, small), box).resize((32, 32), box)
        for x in _arrays(_images(20))
    ]
    assert (
        _difference(
            corrupt(_images(20), "pixelate", severity), np.stack([np.array(x) for x in made])
        ).max()
        == 0
    )


def test_pixelate_keeps_the_number_of_cells_of_a_larger_image() -> None:
    made = corrupt(_images(1, 96), "pixelate", constants="cifar")[0, 0]
    assert (made[1:] != made[:-1]).any(1).sum().item() + 1 == 20


@pytest.mark.parametrize("size", [32, 40])
@pytest.mark.parametrize("severity", SEVERITIES)
def test_jpeg_against_pillow(severity: int, size: int) -> None:
    expected = []
    for image in _arrays(_images(20, size)):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=[80, 65, 58, 50, 40][severity - 1])
        expected.append(np.array(Image.open(file)))
    wrong = _difference(
        corrupt(_images(20, size), "jpeg_compression", severity), np.stack(expected)
    )
    assert (
        wrong.mean() < 0.3
    )  # of 255: libjpeg's integer arithmetic decides halves, and a coefficient moves 64 pixels
    assert (wrong <= 1).mean() > 0.92


def _published_zoom(image: np.ndarray, factor: float) -> np.ndarray:
    kept = math.ceil(32 / factor)
    top = (32 - kept) // 2
    made = ndimage.zoom(image[top : top + kept, top : top + kept], (factor, factor, 1), order=1)
    trim = (made.shape[0] - 32) // 2
    return np.asarray(made[trim : trim + 32, trim : trim + 32])


@pytest.mark.parametrize("severity", SEVERITIES)
def test_zoom_blur_against_scipy(severity: int) -> None:
    factors = np.arange(1, [1.06, 1.11, 1.16, 1.21, 1.26][severity - 1], 0.01)
    x = _arrays(_images(3)) / 255
    made = [
        (image + sum(_published_zoom(image, factor) for factor in factors)) / (len(factors) + 1)
        for image in x
    ]
    expected = np.floor(255 * np.stack(made) + 1e-3)
    _assert_near(corrupt(_images(3), "zoom_blur", severity), expected, 0.005)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_moments_of_the_noises(severity: int) -> None:
    level, flat = 102 / 255, torch.full((100, 3, 32, 32), 102 / 255)
    expected = {
        "gaussian_noise": [0.04, 0.06, 0.08, 0.09, 0.10][severity - 1],
        "shot_noise": math.sqrt(level / [500, 250, 100, 75, 50][severity - 1]),
        "speckle_noise": [0.06, 0.1, 0.12, 0.16, 0.2][severity - 1] * level,
    }
    for (
        name,
        deviation,
    ) in (
        expected.items()
    ):  # ⌊⌋ costs half a unit of the mean, and beats against the steps of shot noise
        noise = corrupt(flat, name, severity) - flat
        near = pytest.approx(
            math.hypot(deviation, 1 / 255 / math.sqrt(12)),
            rel=0.03 if name == "shot_noise" else 0.01,
        )
        assert noise.std().item() == near
        assert abs(noise.mean().item() + 0.5 / 255) < 0.1 / 255 + 5 * deviation / math.sqrt(
            flat.numel()
        )
    share = [0.01, 0.02, 0.03, 0.05, 0.07][severity - 1]
    struck = corrupt(flat, "impulse_noise", severity)
    for value in (0.0, 1.0):
        assert stats.binomtest(int((struck == value).sum()), flat.numel(), share / 2).pvalue > 1e-6
    assert ((struck == flat) | (struck == 0) | (struck == 1)).all()


def test_motion_blur_of_a_point_is_a_half_gaussian_to_the_left() -> None:
    images = torch.zeros(50, 3, 33, 33)
    images[..., 16, 16] = 1
    made = corrupt(images, "motion_blur")
    assert (made[..., 17:] == 0).all()  # ±45° never points back
    heaviest = 1 / np.exp(-((np.arange(21) / (2.5 * 33 / 32)) ** 2) / 2).sum()
    assert made[..., 16, 16].unique().numpy() * 255 == pytest.approx([math.floor(255 * heaviest)])


@pytest.mark.parametrize("severity", SEVERITIES)
def test_motion_blur_is_a_sum_of_shifted_copies_at_some_angle(severity: int) -> None:
    """Against the formula pixel by pixel, borders repeated, at the angles that the same seed
    draws.
    """
    radius, sigma = [(6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5)][severity - 1]
    angles = np.deg2rad(
        90 * torch.rand(3, generator=torch.Generator().manual_seed(5)).double().numpy() - 45
    )
    weights = np.exp(-((np.arange(2 * radius + 1) / sigma) ** 2) / 2)
    expected = np.zeros((3, 32, 32, 3))
    for sums, image, angle in zip(expected, _arrays(_images(3)), angles, strict=True):
        for i, weight in enumerate(weights / weights.sum()):
            rows = np.clip(np.arange(32) + math.ceil(i * math.sin(angle) - 0.5), 0, 31)
            columns = np.clip(np.arange(32) + math.ceil(i * math.cos(angle) - 0.5), 0, 31)
            sums += weight * image[rows][:, columns]
    made = corrupt(_images(3), "motion_blur", severity, seed=5)
    _assert_near(made, np.floor(expected + 1e-3), 0.002)


def test_glass_moves_only_whole_pixels_of_the_neighbourhood() -> None:
    y, x = np.mgrid[:32, :32]
    images = torch.from_numpy(np.stack([y, x, 0 * x]) / 255).float()[None]
    made = _arrays(corrupt(images, "glass_blur", 1))[0].astype(int)
    for axis, start in enumerate((y, x)):
        move = made[..., axis] - start
        assert set(np.unique(move)) == {-1, 0}
        assert (move[:2] == 0).all()
        assert (move[:, :2] == 0).all()
        assert 0.4 < -move[2:, 2:].mean() < 0.6


@pytest.mark.slow
def test_fog_of_a_flat_image_is_the_plasma_between_its_ends() -> None:
    made = corrupt(torch.full((20, 3, 32, 32), 0.5), "fog")
    assert torch.equal(made[:, 0], made[:, 2])
    torch.testing.assert_close(
        made.amin((1, 2, 3)), torch.full((20,), math.floor(255 * 0.5 * 0.5 / 2) / 255)
    )
    torch.testing.assert_close(
        made.amax((1, 2, 3)), torch.full((20,), math.floor(255 * 2.0 * 0.5 / 2) / 255)
    )


def test_elastic_at_severity_1_is_affine() -> None:
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    images = (torch.stack([y, x, y + x]) * 4 / 255).expand(20, -1, -1, -1).contiguous()
    # Far from the mirrored borders.
    made = 255 * corrupt(images, "elastic_transform", 1)[:, :, 10:22, 10:22]
    assert (made.diff(dim=2).diff(dim=2).abs() <= 1.01).all()  # linear, but for the rounding
    assert (made[1:] - made[:-1]).abs().amax((1, 2, 3)).min() > 1


@pytest.mark.parametrize("name", list(SETS))
def test_each_set_has_every_corruption_at_five_severities(name: str) -> None:
    table = SETS[name].table
    assert sorted(table) == sorted(NAMES)
    for corruption, constants in table.items():
        assert len(constants) == 5
        assert len({len(row) for row in constants}) == 1, corruption
        assert len(set(constants)) == 5, corruption


def test_the_size_chooses_the_set() -> None:
    sizes = {32: "cifar", 45: "cifar", 46: "tiny_imagenet", 64: "tiny_imagenet"}
    sizes |= {119: "tiny_imagenet", 120: "imagenet", 224: "imagenet", 299: "imagenet"}
    assert {size: find_set(size) for size in sizes} == sizes
    for size, name in ((32, "cifar"), (64, "tiny_imagenet"), (160, "imagenet")):
        made = [corrupt(_images(2, size), "fog", 3, 1, each) for each in (None, *SETS)]
        assert [torch.equal(made[0], each) for each in made[1:]] == [name == each for each in SETS]


@pytest.mark.parametrize("name", NAMES)
def test_at_224_pixels(name: str) -> None:
    images = _images(2, 224)
    made = [corrupt(images, name, severity, seed=2) for severity in (1, 5)]
    for each in made:
        assert each.shape == images.shape
        assert 0 <= each.min() <= each.max() <= 1
    assert torch.equal(made[1], corrupt(images, name, 5, seed=2))
    change = [(each - images).square().mean().item() for each in made]
    if name not in ("elastic_transform", "saturate", "spatter"):
        assert change[1] > 1.1 * change[0] > 0


def test_closed_forms_at_224_pixels() -> None:
    images = _images(2, 224)
    x = _arrays(images) / 255
    mean = x.mean((1, 2), keepdims=True)
    _assert_near(corrupt(images, "contrast"), np.floor(255 * (0.05 * (x - mean) + mean)), 0.005)
    value = x.max(3, keepdims=True)
    raised = np.floor(255 * x / value * np.minimum(value + 0.5, 1) + 1e-3)
    _assert_near(corrupt(images, "brightness"), raised, 0.01)
    cells = x.reshape(2, 56, 4, 56, 4, 3).mean((2, 4)).repeat(4, 1).repeat(4, 2)
    assert np.abs(_arrays(corrupt(images, "pixelate")) - 255 * cells).max() < 1.01
    blurred = ndimage.gaussian_filter(x, (0, 6, 6, 0), mode="nearest")
    _assert_near(corrupt(images, "gaussian_blur"), np.floor(255 * blurred + 1e-3), 0.005)
    flat = torch.full((2, 3, 224, 224), 102 / 255)
    noise = corrupt(flat, "gaussian_noise", 1) - flat  # .4 is 5 deviations from 0
    assert noise.std().item() == pytest.approx(math.hypot(0.08, 1 / 255 / math.sqrt(12)), rel=0.01)
    for name in ("zoom_blur", "defocus_blur", "motion_blur", "glass_blur", "elastic_transform"):
        assert (corrupt(flat, name) - flat).abs().max() <= 1.01 / 255, name


def test_defocus_at_224_pixels_against_scipy() -> None:
    """The disc of radius 10, blurred within its own square of 21 pixels, mirrored at its edge."""
    line = np.arange(-10, 11)
    disc = (line[:, None] ** 2 + line**2 <= 100).astype(float)
    kernel = ndimage.gaussian_filter(disc / disc.sum(), 0.5, truncate=4, mode="mirror")
    x = _arrays(_images(1, 224)) / 255
    expected = ndimage.correlate(x, kernel[None, :, :, None], mode="mirror")
    _assert_near(corrupt(_images(1, 224), "defocus_blur"), np.floor(255 * expected + 1e-3), 0.02)


def test_convolutions_are_exact_whatever_a_model_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, convolve = [], torch.nn.functional.conv2d

    def watch(*arguments: Any, **options: Any) -> Tensor:
        seen.append(torch.backends.cudnn.allow_tf32)
        return convolve(*arguments, **options)

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(torch.nn.functional, "conv2d", watch)
    corrupt(_images(1), "defocus_blur")
    assert not seen[-1]  # the first is that of the kernel, on the CPU
    assert torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("delta", [1, 2, 4])
def test_glass_copies_as_the_loop_over_pixels_does(delta: int) -> None:
    images = torch.rand(2, 3, 40, 36, generator=torch.Generator().manual_seed(0))
    made = _shuffle(images, delta, torch.Generator().manual_seed(1))
    draws = torch.rand(2, 2, 40, 36, generator=torch.Generator().manual_seed(1))
    dy, dx = (draws * 2 * delta).long() - delta
    expected = images.clone()
    for i in range(2):
        for h in range(40 - delta, delta, -1):
            for w in range(36 - delta, delta, -1):
                expected[i, :, h, w] = expected[i, :, h + dy[i, h, w], w + dx[i, h, w]]
    assert torch.equal(made, expected)


BAD: dict[str, tuple[Callable[[], Tensor], str]] = {
    "name": (
        lambda: corrupt(_images(1), "gausian_noise"),
        "name must be one of .*did you mean 'gaussian_noise'",
    ),
    "severity 0": (
        lambda: corrupt(_images(1), "fog", 0),
        "severity must be an integer from 1 to 5, got 0",
    ),
    "severity 6": (
        lambda: corrupt(_images(1), "fog", 6),
        "severity must be an integer from 1 to 5, got 6",
    ),
    "severity true": (
        lambda: corrupt(_images(1), "fog", True),
        "severity must be an integer from 1 to 5, got True",
    ),
    "seed": (lambda: corrupt(_images(1), "fog", seed=-1), "seed must be an integer >= 0"),
    "bytes": (
        lambda: corrupt(255 * _images(1), "fog"),
        r"images must be in \[0, 1\] \(divide 8-bit values by 255\)",
    ),
    "negative": (lambda: corrupt(_images(1) - 1, "fog"), r"images must be in \[0, 1\]"),
    "nan": (lambda: corrupt(_images(1) * math.nan, "fog"), "images must be finite"),
    "layout": (
        lambda: corrupt(_images(1).permute(0, 2, 3, 1), "fog"),
        r"\[n, 3, h, w\] \(RGB, channels before pixels\)",
    ),
    "one image": (lambda: corrupt(_images(1)[0], "fog"), r"got shape \[3, 32, 32\]"),
    "integers": (
        lambda: corrupt((_images(1) > 0.5).to(torch.uint8), "fog"),
        "float32 or float64, got torch.uint8",
    ),
    "constants": (
        lambda: corrupt(_images(1), "fog", constants="imagenett"),
        "constants must be one of cifar, tiny_imagenet, imagenet.*did you mean 'imagenet'",
    ),
    "small": (lambda: corrupt(_images(1)[..., :31], "fog"), "at least 32 pixels high and wide"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_refusals_say_what_is_allowed(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call()

"""The random layers: the laws of the fog's plasma and of the frost, the shading of water; warps and
JPEG by themselves.
"""

import io
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from torch import Generator, Tensor

from driftfilter.app.images import weather as textures
from driftfilter.app.images.constants import CIFAR_FROST
from driftfilter.app.images.image_filters import affine_grid, pixel_grid, sample
from driftfilter.app.images.jpeg import recompress


@cache
def _made(n: int, size: int = 32) -> Tensor:
    return textures.frost(torch.zeros(n, 3, size, size), CIFAR_FROST, Generator().manual_seed(0))


def _octaves(heights: np.ndarray) -> list[float]:
    """Deviation, at each octave from the coarsest, of a middle [n] from the mean of its four
    corners (wrapped around).
    """
    found, step = [], 32
    while step >= 2:
        corners, middles = (
            heights[:, ::step, ::step],
            heights[:, step // 2 :: step, step // 2 :: step],
        )
        rows = corners + np.roll(corners, -1, 1)
        found.append(float((middles - (rows + np.roll(rows, -1, 2)) / 4).std()))
        step //= 2
    return found


@pytest.mark.parametrize("decay", [3.0, 1.75])
def test_each_octave_of_the_plasma_is_decay_squared_weaker(decay: float) -> None:
    heights = textures.plasma(torch.zeros(1000, 3, 32, 32), decay, Generator().manual_seed(0))
    assert heights.shape == (1000, 1, 32, 32)
    assert torch.equal(heights.amin((2, 3)), torch.zeros(1000, 1))
    assert torch.equal(heights.amax((2, 3)), torch.ones(1000, 1))
    ratios = [a / b for a, b in pairwise(_octaves(heights[:, 0].double().numpy())[1:])]
    assert ratios == pytest.approx([decay**2] * 3, rel=0.03)


def test_frost_comes_in_five_colours_as_likely() -> None:
    levels = 255 * _made(4000).mean((2, 3))  # [n, 3]
    palette = torch.tensor([row[:3] for row in CIFAR_FROST]).float()
    kind = torch.cdist(levels, palette).argmin(1)
    shares = kind.bincount(minlength=5) / len(kind)
    assert shares.numpy() == pytest.approx([0.2] * 5, abs=0.04)  # the two palest overlap
    for i in range(3):
        assert levels[kind == i].mean(0).numpy() == pytest.approx(palette[i].numpy(), abs=1.0)


def test_frost_has_the_contrast_and_the_spectrum_of_its_kind() -> None:
    made = 255 * _made(4000).double()
    palette = torch.tensor([row[:3] for row in CIFAR_FROST]).double()
    kind = torch.cdist(made.mean((2, 3)), palette).argmin(1)
    frequency = torch.hypot(torch.fft.fftfreq(32)[:, None], torch.fft.fftfreq(32))
    low, high = ((frequency > a) & (frequency < b) for a, b in ((0.05, 0.1), (0.3, 0.5)))
    for i, (*_, spread, knee, _bend) in enumerate(CIFAR_FROST[:3]):
        layers = made[kind == i].mean(1)
        assert layers.std((1, 2)).median().item() == pytest.approx(spread, rel=0.03)
        power = torch.fft.fft2(layers).abs().square().mean(0)
        wanted = 1 + (knee / frequency) ** 2
        # The patches mix neighbouring frequencies, which flattens the spectrum.
        steepness = (power[low].mean() / power[high].mean()) / (
            wanted[low].mean() / wanted[high].mean()
        )
        assert 0.6 < steepness.item() < 1.05


def test_frost_of_a_larger_image_keeps_level_and_contrast() -> None:
    small, large = _made(2000), _made(500, 64)
    assert large.shape == (500, 3, 64, 64)
    assert large.mean((0, 2, 3)).numpy() == pytest.approx(small.mean((0, 2, 3)).numpy(), abs=0.02)
    assert large.std((2, 3)).mean().item() == pytest.approx(
        small.std((2, 3)).mean().item(), rel=0.06
    )


@pytest.mark.parametrize("reach", [3, 20, 60])
def test_distance_up_to_a_reach_against_scipy(reach: int) -> None:
    marks = torch.rand(5, 1, 32, 40, generator=Generator().manual_seed(0)) < 0.02
    expected = np.stack([ndimage.distance_transform_edt(~plane.numpy()) for plane in marks[:, 0]])
    torch.testing.assert_close(
        textures._distance(marks, reach)[:, 0].double(),
        torch.from_numpy(expected).clamp(max=reach),
        rtol=0,
        atol=1e-5,
    )


def test_equalised_levels_are_ranks() -> None:
    levels = torch.tensor([[0, 0, 7, 7], [7, 9, 9, 200]]).float()[None, None]
    expected = torch.tensor([[0, 0, 128, 128], [128, 212, 212, 255]]).float()[
        None, None
    ]  # 255 (rank - 2) / 6
    assert torch.equal(textures._equalise(levels), expected)


def _shaded(liquid: np.ndarray) -> np.ndarray:
    """The published shading [h, w] of drops [h, w], with a steep wet pixel for an edge."""
    slopes = [np.abs(ndimage.sobel(liquid, axis, mode="nearest")) for axis in (0, 1)]
    far = np.minimum(
        ndimage.distance_transform_edt(~((slopes[0] + slopes[1] > 150) & (liquid > 0))), 20
    )
    levels = np.floor(ndimage.uniform_filter(far, 3, mode="mirror") + 1e-6)
    rank = np.searchsorted(np.sort(levels.ravel()), levels, side="right")
    equal = np.round(255 * (rank - rank.min()) / (levels.size - rank.min()))
    relief = np.clip(
        ndimage.correlate(equal, np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]), mode="mirror"),
        0,
        255,
    )
    shade = liquid * np.round(ndimage.uniform_filter(relief, 3, mode="mirror"))
    return np.asarray(shade / shade.max())


def test_water_is_shaded_as_published_where_it_is_wet() -> None:
    liquid = torch.zeros(1, 1, 32, 32)
    liquid[..., 8:20, 10:24] = 180
    liquid[..., 24:29, 3:9] = 200
    assert textures.water(liquid)[0, 0].numpy() == pytest.approx(
        _shaded(liquid[0, 0].double().numpy()), abs=0.006
    )
    assert torch.equal(textures.water(0 * liquid), 0 * liquid)


def test_the_affine_map_takes_moved_points_back() -> None:
    images = torch.rand(2, 3, 32, 32, generator=Generator().manual_seed(0))
    y, x = affine_grid(
        images, torch.tensor([2.0, -3.0]).expand(2, 3, 2)
    )  # all three by 2 to the right and 3 up
    rows, columns = pixel_grid(images)
    torch.testing.assert_close(y, (rows + 3.0).expand(2, -1, -1), rtol=0, atol=1e-4)
    torch.testing.assert_close(x, (columns - 2.0).expand(2, -1, -1), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("edges", "mode"), [(True, "reflect"), (False, "mirror")])
def test_sampling_against_scipy(edges: bool, mode: str) -> None:
    random = Generator().manual_seed(0)
    images = torch.rand(2, 3, 32, 32, generator=random)
    y, x = torch.rand(2, 2, 32, 32, generator=random) * 40 - 4
    made = sample(images, y, x, edges)
    for i in range(2):
        for channel in range(3):
            expected = ndimage.map_coordinates(
                images[i, channel].numpy(), [y[i].numpy(), x[i].numpy()], order=1, mode=mode
            )
            assert made[i, channel].numpy() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("quality", [10, 40, 75, 95])
def test_recompression_against_pillow_at_other_qualities(quality: int) -> None:
    frost = (255 * _made(8)).round()
    expected = []
    for image in frost.permute(0, 2, 3, 1).numpy().astype(np.uint8):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=quality)
        expected.append(np.array(Image.open(file)).astype(int))
    wrong = np.abs(recompress(frost, quality).permute(0, 2, 3, 1).numpy() - np.stack(expected))
    assert wrong.mean() < 0.3
    assert (wrong <= 1).mean() > 0.92

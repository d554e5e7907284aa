"""Samples to look at: which ones, and pictures that another program reads."""

import io

import numpy as np
import pytest

from driftfilter.app.thumbnails import PIXELS, find_extremes, is_image, png, thumbnail

PIXEL = np.random.default_rng(0).integers(0, 256, (3, 20, 31), dtype=np.uint8)


def test_extremes_are_the_ends_of_the_order() -> None:
    most, least = find_extremes(np.array([0.5, np.nan, 0.1, 0.9, 0.1, 0.7]), 2)
    assert (most.tolist(), least.tolist()) == ([2, 4], [3, 5])


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, ([], [])), (1, ([0], [])), (3, ([0, 1], [2])), (4, ([0, 1], [3, 2]))],
)
def test_no_sample_is_shown_twice(count: int, expected: tuple[list[int], list[int]]) -> None:
    most, least = find_extremes(np.arange(count) / 10)
    assert (most.tolist(), least.tolist()) == expected


def test_small_images_keep_their_pixels_and_floats_are_the_same() -> None:
    assert (thumbnail(PIXEL) == PIXEL.transpose(1, 2, 0)).all()
    assert (thumbnail(PIXEL.astype(np.float32) / 255) == PIXEL.transpose(1, 2, 0)).all()


def test_large_images_are_means_over_squares() -> None:
    image = np.random.default_rng(1).random((1, 2 * PIXELS, PIXELS + 2))
    expected = image[0].reshape(PIXELS, 2, PIXELS // 2 + 1, 2).mean((1, 3))
    assert (thumbnail(image)[..., 1] == np.round(255 * expected)).all()
    assert (
        thumbnail(np.zeros((3, 3000, 2))).shape[0] <= PIXELS
    )  # so narrow that nothing is left of its squares


def test_other_floats_are_stretched() -> None:
    assert thumbnail(np.array([[[-2.0, 0.0], [1.0, 3.0]]]))[..., 0].tolist() == [
        [0, 102],
        [153, 255],
    ]
    assert (thumbnail(np.full((3, 4, 4), 7.0)) == 0).all()  # nothing to stretch


@pytest.mark.parametrize(
    ("shape", "image"),
    [
        ((3, 8, 8), True),
        ((1, 2, 2), True),
        ((28, 28), True),
        ((5,), False),
        ((2, 8, 8), False),
        ((4, 6), False),
        ((3, 0, 8), False),
    ],
    ids=str,
)
def test_what_is_an_image(shape: tuple[int, ...], image: bool) -> None:
    assert is_image(np.zeros(shape)) == image


def test_a_png_is_read_by_another_program() -> None:
    reader = pytest.importorskip("PIL.Image")
    pixels = PIXEL.transpose(1, 2, 0)
    with reader.open(io.BytesIO(png(pixels))) as found:
        assert found.format == "PNG"
        assert (np.asarray(found) == pixels).all()

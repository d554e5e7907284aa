"""The constants of the published corruptions, one set for each size of image they were made for.

Each corruption has five tuples, of severities 1 to 5; lengths are in pixels of images of the set's
size. The names of the numbers stand where they are unpacked, in ``driftfilter.app.corruptions``.
"""

import math
from typing import Any, NamedTuple, TypeAlias

Constants: TypeAlias = tuple[Any, ...]  # of one severity


class Published(NamedTuple):
    """A set of constants."""

    size: int  # pixels, of the images that they were published for
    table: dict[str, tuple[Constants, ...]]  # by corruption, then by severity


def find_set(size: int) -> str:
    """The name of the set whose size is nearest to this one in ratio: cifar up to 45 pixels,
    tiny_imagenet up to 119, imagenet above.
    """
    return min(SETS, key=lambda name: abs(math.log(size / SETS[name].size)))


def _each(*values: float) -> tuple[Constants, ...]:
    return tuple((value,) for value in values)


# Kinds of frost, as likely: mean red, green and blue and their common deviation between crops,
# deviation within a crop (all of 255), knee of the spectrum (cycles a pixel) and bend of the values
# (skewness / 6). For cifar measured on the published images less the images under them; else on
# crops of the generator's photographs, two of which are the same picture.
CIFAR_FROST = (
    (96, 108, 120, 10, 32.0, 0.2, 0.08),
    (74, 147, 164, 10, 14.0, 0.4, 0.06),
    (142, 157, 169, 11, 26.5, 0.13, -0.03),
    (190, 193, 202, 5, 20.5, 0.18, -0.17),
    (204, 209, 219, 5, 16.0, 0.22, -0.17),
)
TINY_IMAGENET_FROST = (
    (78, 148, 164, 9.7, 13.8, 0.37, 0.06),
    *[(198, 202, 211, 6.2, 19.1, 0.20, -0.15)] * 2,
    (144, 159, 172, 7.3, 23.5, 0.11, -0.04),
    (101, 112, 124, 12.1, 30.2, 0.31, 0.05),
)
IMAGENET_FROST = (
    (78, 148, 164, 9.5, 15.3, 0.24, 0.07),
    *[(198, 202, 211, 5.8, 20.8, 0.48, -0.17)] * 2,
    (145, 159, 172, 6.6, 26.3, 0.14, -0.03),
    (101, 112, 124, 11.4, 33.8, 0.53, 0.07),
)

_CIFAR: dict[str, tuple[Constants, ...]] = {
    "gaussian_noise": _each(0.04, 0.06, 0.08, 0.09, 0.10),
    "shot_noise": _each(500, 250, 100, 75, 50),
    "impulse_noise": _each(0.01, 0.02, 0.03, 0.05, 0.07),
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1)),
    "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    "motion_blur": ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5)),
    "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
    "snow": (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "frost": (
        (1, 0.2, CIFAR_FROST),
        (1, 0.3, CIFAR_FROST),
        (0.9, 0.4, CIFAR_FROST),
        (0.85, 0.4, CIFAR_FROST),
        (0.75, 0.45, CIFAR_FROST),
    ),
    "fog": ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75)),
    "brightness": _each(0.05, 0.1, 0.15, 0.2, 0.3),
    "contrast": _each(0.75, 0.5, 0.4, 0.3, 0.15),
    "elastic_transform": (
        (32 * 0, 32 * 0, 32 * 0.08),
        (32 * 0.05, 32 * 0.2, 32 * 0.07),
        (32 * 0.08, 32 * 0.06, 32 * 0.06),
        (32 * 0.1, 32 * 0.04, 32 * 0.05),
        (32 * 0.1, 32 * 0.03, 32 * 0.03),
    ),
    "pixelate": _each(0.95, 0.9, 0.85, 0.75, 0.65),
    "jpeg_compression": _each(80, 65, 58, 50, 40),
    "speckle_noise": _each(0.06, 0.1, 0.12, 0.16, 0.2),
    "gaussian_blur": _each(0.4, 0.6, 0.7, 0.8, 1.0),
    "saturate": ((0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2)),
    "spatter": (
        (0.62, 0.1, 0.7, 0.7, 0.5, False),
        (0.65, 0.1, 0.8, 0.7, 0.5, False),
        (0.65, 0.3, 1.0, 0.69, 0.5, False),
        (0.65, 0.1, 0.7, 0.69, 0.6, True),
        (0.65, 0.1, 0.5, 0.68, 0.6, True),
    ),
}
_TINY_IMAGENET: dict[str, tuple[Constants, ...]] = {
    "gaussian_noise": _each(0.04, 0.08, 0.12, 0.15, 0.18),
    "shot_noise": _each(250, 100, 50, 30, 15),
    "impulse_noise": _each(0.01, 0.02, 0.05, 0.08, 0.14),
    "defocus_blur": ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)),
    "glass_blur": ((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2)),
    "motion_blur": ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
    "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
    "snow": (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.8),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.8),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.7),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.65),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
    ),
    "frost": (
        (1, 0.3, TINY_IMAGENET_FROST),
        (0.9, 0.4, TINY_IMAGENET_FROST),
        (0.8, 0.45, TINY_IMAGENET_FROST),
        (0.75, 0.5, TINY_IMAGENET_FROST),
        (0.7, 0.55, TINY_IMAGENET_FROST),
    ),
    "fog": ((0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75)),
    "brightness": _each(0.1, 0.2, 0.3, 0.4, 0.5),
    "contrast": _each(0.4, 0.3, 0.2, 0.1, 0.05),
    "elastic_transform": (
        (64 * 0, 64 * 0, 64 * 0.08),
        (64 * 0.05, 64 * 0.3, 64 * 0.06),
        (64 * 0.1, 64 * 0.08, 64 * 0.06),
        (64 * 0.1, 64 * 0.03, 64 * 0.03),
        (64 * 0.16, 64 * 0.03, 64 * 0.02),
    ),
    "pixelate": _each(0.9, 0.8, 0.7, 0.6, 0.5),
    "jpeg_compression": _each(65, 58, 50, 40, 25),
    "speckle_noise": _each(0.15, 0.2, 0.25, 0.3, 0.35),
    "gaussian_blur": _each(0.5, 0.75, 1, 1.25, 1.5),
    "saturate": ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (30, 0.2)),
    "spatter": (
        (0.62, 0.1, 0.7, 0.7, 0.6, False),
        (0.65, 0.1, 0.8, 0.7, 0.6, False),
        (0.65, 0.3, 1, 0.69, 0.6, False),
        (0.65, 0.1, 0.7, 0.68, 0.6, True),
        (0.65, 0.1, 0.5, 0.67, 0.6, True),
    ),
}
_IMAGENET: dict[str, tuple[Constants, ...]] = {
    "gaussian_noise": _each(0.08, 0.12, 0.18, 0.26, 0.38),
    "shot_noise": _each(60, 25, 12, 5, 3),
    "impulse_noise": _each(0.03, 0.06, 0.09, 0.17, 0.27),
    "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    "zoom_blur": ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
    "snow": (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
    "frost": (
        (1, 0.4, IMAGENET_FROST),
        (0.8, 0.6, IMAGENET_FROST),
        (0.7, 0.7, IMAGENET_FROST),
        (0.65, 0.7, IMAGENET_FROST),
        (0.6, 0.75, IMAGENET_FROST),
    ),
    "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
    "brightness": _each(0.1, 0.2, 0.3, 0.4, 0.5),
    "contrast": _each(0.4, 0.3, 0.2, 0.1, 0.05),
    "elastic_transform": (  # 244, not 224: as published
        (244 * 2, 244 * 0.7, 244 * 0.1),
        (244 * 2, 244 * 0.08, 244 * 0.2),
        (244 * 0.05, 244 * 0.01, 244 * 0.02),
        (244 * 0.07, 244 * 0.01, 244 * 0.02),
        (244 * 0.12, 244 * 0.01, 244 * 0.02),
    ),
    "pixelate": _each(0.6, 0.5, 0.4, 0.3, 0.25),
    "jpeg_compression": _each(25, 18, 15, 10, 7),
    "speckle_noise": _each(0.15, 0.2, 0.35, 0.45, 0.6),
    "gaussian_blur": _each(1, 2, 3, 4, 6),
    "saturate": ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),
    "spatter": (
        (0.65, 0.3, 4, 0.69, 0.6, False),
        (0.65, 0.3, 3, 0.68, 0.6, False),
        (0.65, 0.3, 2, 0.68, 0.5, False),
        (0.65, 0.3, 1, 0.65, 1.5, True),
        (0.67, 0.4, 1, 0.65, 1.5, True),
    ),
}
SETS = {
    "cifar": Published(32, _CIFAR),
    "tiny_imagenet": Published(64, _TINY_IMAGENET),
    "imagenet": Published(224, _IMAGENET),
}

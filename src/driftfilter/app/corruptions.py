"""The 15 + 4 corruptions of CIFAR-10-C at severities 1 to 5, with the constants of the published
generator.

The constants are those for 32-pixel images. Larger images are corrupted as if the picture had been
enlarged: lengths in pixels (blur radii and deviations, displacements, zooms of noise layers, cells
of the pixelation) grow by min(h, w) / 32; amplitudes, thresholds, mixing weights and JPEG qualities
stay. The generator's frost photographs are not shipped: see ``frost``.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Generator, Tensor

from driftfilter.app.images import weather as textures
from driftfilter.app.images.image_filters import (
    SIZE,
    affine_grid,
    blur,
    correlate,
    disc,
    enlargement,
    pixel_grid,
    resize,
    sample,
    streak,
    take,
    to_bytes,
    zoom,
)
from driftfilter.app.images.jpeg import recompress
from driftfilter.app.images.weather import normal, uniform
from driftfilter.base.checks import (
    nearest,
    require,
    require_count,
    require_finite,
    require_floating,
    require_shape,
)

Corruption: TypeAlias = Callable[
    [Tensor, int, Generator], Tensor
]  # images [n, 3, h, w], severity, generator -> [n, 3, h, w]

SEVERITIES = (1, 2, 3, 4, 5)
FROST_TEXTURE = "procedural"  # to be said in every report with frost in it
PIXELS = 512 * SIZE**2  # corrupted at a time, which bounds the memory


def corrupt(images: Tensor, name: str, severity: int = 5, seed: int = 0) -> Tensor:
    """Corrupted images [n, 3, h, w] of RGB images [n, 3, h, w] in [0, 1], cut down to 8 bits: ⌊255
    x⌋ / 255, as published.

    The same images and seed give the same corruption on the same kind of device; all is computed in
    float32 there.
    """
    known = list(_ALL)
    require(name in known, "name", name, f"one of {', '.join(known)}{nearest(str(name), known)}")
    require_severity(severity)
    require_count("seed", seed, 0)
    require_pixels("images", images)
    generator = torch.Generator(images.device).manual_seed(seed)
    parts = images.float().split(max(1, PIXELS // images[0, 0].numel()))
    made = [to_bytes(_ALL[name](part, severity, generator)) for part in parts]
    return torch.cat(made).to(images.dtype) / 255


def require_severity(severity: int) -> None:
    """Raise unless this is a severity."""
    known = type(severity) is int and severity in SEVERITIES
    require(known, "severity", severity, "an integer from 1 to 5")


def require_pixels(field: str, images: Tensor) -> None:
    """Raise unless these are RGB images [n, 3, h, w] in [0, 1] that can be corrupted."""
    require_shape(field, images, "[n, 3, h, w] (RGB, channels before pixels)", None, 3, None, None)
    require_floating(field, images)
    require(
        min(images.shape[2:]) >= SIZE,
        field,
        list(images.shape),
        f"at least {SIZE} pixels high and wide",
    )
    require_finite(field, images)
    low, high = images.min().item(), images.max().item()
    require(low >= 0 and high <= 1, field, [low, high], "in [0, 1] (divide 8-bit values by 255)")


def gaussian_noise(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """x + σ ε, ε ~ N(0, 1) per value; [n, 3, h, w]."""
    return images + (0.04, 0.06, 0.08, 0.09, 0.10)[severity - 1] * normal(images.shape, generator)


def shot_noise(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """Poisson(r x) / r per value; [n, 3, h, w]."""
    rate = (500, 250, 100, 75, 50)[severity - 1]
    return torch.poisson(rate * images, generator) / rate


def impulse_noise(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """A share of the values replaced by 0 or 1, as likely; [n, 3, h, w]."""
    share = (0.01, 0.02, 0.03, 0.05, 0.07)[severity - 1]
    draw = uniform(images.shape, generator)
    return torch.where(draw < share, (draw < share / 2).float(), images)


def speckle_noise(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """x + σ x ε, ε ~ N(0, 1) per value; [n, 3, h, w]."""
    return images + (0.06, 0.1, 0.12, 0.16, 0.2)[severity - 1] * images * normal(
        images.shape, generator
    )


def gaussian_blur(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """x * N(0, σ²), borders repeated; [n, 3, h, w]."""
    return blur(images, (0.4, 0.6, 0.7, 0.8, 1.0)[severity - 1] * enlargement(images))


def defocus_blur(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """x * k, k a disc of some radius, itself blurred against aliasing; borders mirrored; [n, 3, h,
    w].
    """
    radius, alias = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1))[severity - 1]
    grown = enlargement(images)
    return correlate(images, disc(radius * grown, alias * grown, math.ceil(grown)))


def glass_blur(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """Blur, then each pixel copies one at a random offset in {-δ, …, δ-1}² (t times over), then
    blur; [n, 3, h, w].

    The generator means to swap the two pixels, but its swap of views copies: that is what the
    published images show.
    """
    sigma, times = ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))[severity - 1]
    sigma, delta = sigma * enlargement(images), max(1, round(enlargement(images)))
    made = to_bytes(blur(images, sigma)) / 255
    for _ in range(times):
        made = _shuffle(made, delta, generator)
    return blur(made, sigma)


def motion_blur(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """A half Gaussian along a line at an angle in ±45°; [n, 3, h, w]."""
    radius, sigma = ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5))[severity - 1]
    return streak(images, radius, sigma, 90 * uniform((len(images),), generator) - 45)


def zoom_blur(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """Mean of the image and of its zooms by 1, 1.01, …; [n, 3, h, w]."""
    # Rounded as numpy's ranges are: the first two reach one step further, and the last digit
    # decides the size of some zooms.
    steps = (7, 12, 16, 21, 26)[severity - 1]
    zooms = [zoom(images, 1 + step * (1.01 - 1)) for step in range(steps)]
    return (images + torch.stack(zooms).sum(0)) / (steps + 1)


def snow(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """m x + (1-m) max(x, 1.5 grey(x) + 0.5) + s + rot180(s), s thresholded noise drawn out
    downwards; [n, 3, h, w].
    """
    loc, deviation, factor, threshold, radius, sigma, mix = (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    )[severity - 1]
    noise = loc + deviation * normal((len(images), 1, *images.shape[2:]), generator)
    layer = zoom(noise, factor * enlargement(images))
    layer = to_bytes(layer * (layer >= threshold)) / 255
    layer = (
        255 * streak(layer, radius, sigma, -45 - 90 * uniform((len(images),), generator))
    ).round() / 255
    pale = torch.maximum(images, 1.5 * _grey(images) + 0.5)
    return mix * images + (1 - mix) * pale + layer + layer.rot90(2, (2, 3))


def frost(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """a x + b f, f a texture of frost; [n, 3, h, w].

    The generator crops five photographs; here f is procedural (``FROST_TEXTURE``), with the
    colours, contrasts, spectra and skewness of their crops: see ``textures.frost``.
    """
    weight, strength = ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))[severity - 1]
    return weight * images + strength * textures.frost(images, generator)


def fog(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """(x + s p) m / (m + s), m = max x of the image and p a plasma in [0, 1]; [n, 3, h, w]."""
    strength, decay = ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))[severity - 1]
    highest = images.amax((1, 2, 3), keepdim=True)
    return (
        (images + strength * textures.plasma(images, decay, generator))
        * highest
        / (highest + strength)
    )


def brightness(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """HSV value v raised to min(v + c, 1): the colour is proportional to v; [n, 3, h, w]."""
    value = images.amax(1, keepdim=True)
    raised = (value + (0.05, 0.1, 0.15, 0.2, 0.3)[severity - 1]).clamp(max=1)
    return torch.where(value > 0, images / value.clamp(min=1e-12), 1.0) * raised


def saturate(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """HSV saturation s made clip(a s + b): x' = v - (v - x) s'/s, and a grey pixel counts as red;
    [n, 3, h, w].
    """
    factor, shift = ((0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2))[severity - 1]
    value = images.amax(1, keepdim=True)
    gap = value - images.amin(1, keepdim=True)
    saturation = gap / value.clamp(min=1e-12)
    red = images.new_tensor([0.0, 1.0, 1.0])[:, None, None]
    direction = torch.where(gap > 0, (value - images) / gap.clamp(min=1e-12), red)
    return value - value * (factor * saturation + shift).clamp(0, 1) * direction


def contrast(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """c (x - m) + m, m the mean of each channel; [n, 3, h, w]."""
    mean = images.mean((2, 3), keepdim=True)
    return (0.75, 0.5, 0.4, 0.3, 0.15)[severity - 1] * (images - mean) + mean


def elastic_transform(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """x at A(p) + d(p): a random affine map A, then smooth random displacements d; [n, 3, h, w]."""
    alpha = (0, 0.05, 0.08, 0.1, 0.1)[severity - 1]
    sigma, jitter = ((0, 0.08), (0.2, 0.07), (0.06, 0.06), (0.04, 0.05), (0.03, 0.03))[severity - 1]
    size = min(images.shape[2:])
    y, x = pixel_grid(images)
    moved = jitter * size * (2 * uniform((len(images), 3, 2), generator) - 1)
    made = sample(images, *affine_grid(images, moved), edges=False)
    if alpha == 0:
        return made
    noise = 2 * uniform((len(images), 2, *images.shape[2:]), generator) - 1
    moves = alpha * size * blur(noise, sigma * size, mirrored=True, truncate=3)
    return sample(made, y + moves[:, 0], x + moves[:, 1], edges=True)


def pixelate(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """Shrunk to a share of the pixels by a box filter and enlarged again, each in 8 bits; [n, 3, h,
    w].
    """
    share = (0.95, 0.9, 0.85, 0.75, 0.65)[severity - 1] / enlargement(images)
    height, width = images.shape[2:]
    return resize(resize(images, int(height * share), int(width * share)), height, width)


def spatter(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """Drops of blurred, thresholded noise: x + m·water (severities 1 to 3) or (1-m) x + m·mud; [n,
    3, h, w].

    The generator shades water by Canny edges; here an edge is a wet pixel with a steep Sobel
    gradient.
    """
    loc, deviation, sigma, threshold, strength = (
        (0.62, 0.1, 0.7, 0.7, 0.5),
        (0.65, 0.1, 0.8, 0.7, 0.5),
        (0.65, 0.3, 1.0, 0.69, 0.5),
        (0.65, 0.1, 0.7, 0.69, 0.6),
        (0.65, 0.1, 0.5, 0.68, 0.6),
    )[severity - 1]
    noise = loc + deviation * normal((len(images), 1, *images.shape[2:]), generator)
    liquid = zoom(blur(noise, sigma), enlargement(images))
    liquid = liquid * (liquid >= threshold)
    if severity <= 3:
        return images + strength * textures.water(to_bytes(liquid)) * _colour(images, 175, 238, 238)
    mud = blur((liquid > threshold).float(), strength * enlargement(images))
    mud = mud * (mud >= 0.8)
    return (1 - mud) * images + mud * _colour(images, 63, 42, 20)


def jpeg_compression(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """Through JPEG at a quality and back; [n, 3, h, w]."""
    return recompress(to_bytes(images), (80, 65, 58, 50, 40)[severity - 1]) / 255


CORRUPTIONS: dict[str, Corruption] = {
    "gaussian_noise": gaussian_noise,
    "shot_noise": shot_noise,
    "impulse_noise": impulse_noise,
    "defocus_blur": defocus_blur,
    "glass_blur": glass_blur,
    "motion_blur": motion_blur,
    "zoom_blur": zoom_blur,
    "snow": snow,
    "frost": frost,
    "fog": fog,
    "brightness": brightness,
    "contrast": contrast,
    "elastic_transform": elastic_transform,
    "pixelate": pixelate,
    "jpeg_compression": jpeg_compression,
}
# Meant for choosing hyper-parameters, never for reporting.
EXTRA: dict[str, Corruption] = {
    "speckle_noise": speckle_noise,
    "gaussian_blur": gaussian_blur,
    "saturate": saturate,
    "spatter": spatter,
}
_ALL = CORRUPTIONS | EXTRA


def _grey(images: Tensor) -> Tensor:
    return (images * images.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)


def _colour(images: Tensor, *rgb: int) -> Tensor:
    return images.new_tensor(rgb)[:, None, None] / 255


def _shuffle(images: Tensor, delta: int, generator: Generator) -> Tensor:
    """Each pixel but those near the border from a random offset in {-δ, …, δ-1}²."""
    n, _, height, width = images.shape
    y, x = pixel_grid(images)
    inside = (y > delta) & (y <= height - delta) & (x > delta) & (x <= width - delta)
    dy, dx = ((uniform((2, n, height, width), generator) * 2 * delta).long() - delta) * inside
    return take(images, y + dy, x + dx)

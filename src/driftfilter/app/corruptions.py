"""The 15 + 4 corruptions of CIFAR-10-C, Tiny-ImageNet-C and ImageNet-C at severities 1 to 5, with
the constants of the published generators.

There is a set of constants for images of 32, 64 and 224 pixels: see ``images.constants``. Images of
another size take the nearest set, and are corrupted as if a picture of the set's size had been
enlarged: lengths in pixels (blur radii and deviations, displacements, zooms of noise layers, cells
of the pixelation) grow by min(h, w) / size; amplitudes, thresholds, mixing weights and JPEG
qualities stay. The generators' frost photographs are not shipped: see ``frost``.
"""
# mypy: no-warn-return-any
# (constants are numbers, or tuples of numbers: what is made of them is Any to mypy)

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Generator, Tensor

from driftfilter.app.images import weather as textures
from driftfilter.app.images.constants import SETS, Constants, find_set
from driftfilter.app.images.image_filters import (
    affine_grid,
    blur,
    correlate,
    disc,
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
    [Tensor, Constants, float, Generator], Tensor
]  # images [n, 3, h, w], constants, enlargement, generator -> [n, 3, h, w]

SEVERITIES = (1, 2, 3, 4, 5)
FROST_TEXTURE = "procedural"  # to be said in every report with frost in it
SMALLEST = 32  # pixels
PIXELS = 512 * 32**2  # corrupted at a time, which bounds the memory


def corrupt(
    images: Tensor, name: str, severity: int = 5, seed: int = 0, constants: str | None = None
) -> Tensor:
    """Corrupted images [n, 3, h, w] of RGB images [n, 3, h, w] in [0, 1], cut down to 8 bits: ⌊255
    x⌋ / 255, as published.

    ``constants`` names the published set, "cifar", "tiny_imagenet" or "imagenet"; without it the
    size min(h, w) decides: 32 pixels for cifar, 64 for tiny_imagenet, 224 for imagenet, and the
    nearest in ratio for others (cifar below 46, imagenet from 120 on). The same images and seed
    give the same corruption on the same kind of device; all is computed in float32 there.
    """
    known = list(_ALL)
    require(name in known, "name", name, f"one of {', '.join(known)}{nearest(str(name), known)}")
    require_severity(severity)
    require_count("seed", seed, 0)
    require_pixels("images", images)
    size = min(images.shape[2:])
    chosen = find_set(size) if constants is None else constants
    sets = f"one of {', '.join(SETS)}{nearest(str(chosen), list(SETS))}"
    require(chosen in SETS, "constants", constants, sets)
    published = SETS[chosen]
    values, grown = published.table[name][severity - 1], size / published.size
    generator = torch.Generator(images.device).manual_seed(seed)
    parts = images.float().split(max(1, PIXELS // images[0, 0].numel()))
    made = [to_bytes(_ALL[name](part, values, grown, generator)) for part in parts]
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
        min(images.shape[2:]) >= SMALLEST,
        field,
        list(images.shape),
        f"at least {SMALLEST} pixels high and wide",
    )
    require_finite(field, images)
    low, high = images.min().item(), images.max().item()
    require(low >= 0 and high <= 1, field, [low, high], "in [0, 1] (divide 8-bit values by 255)")


def gaussian_noise(
    images: Tensor, constants: Constants, grown: float, generator: Generator
) -> Tensor:
    """x + σ ε, ε ~ N(0, 1) per value; [n, 3, h, w]."""
    return images + constants[0] * normal(images.shape, generator)


def shot_noise(images: Tensor, constants: Constants, grown: float, generator: Generator) -> Tensor:
    """Poisson(r x) / r per value; [n, 3, h, w]."""
    (rate,) = constants
    return torch.poisson(rate * images, generator) / rate


def impulse_noise(
    images: Tensor, constants: Constants, grown: float, generator: Generator
) -> Tensor:
    """A share of the values replaced by 0 or 1, as likely; [n, 3, h, w]."""
    (share,) = constants
    draw = uniform(images.shape, generator)
    return torch.where(draw < share, (draw < share / 2).float(), images)


def speckle_noise(
    images: Tensor, constants: Constants, grown: float, generator: Generator
) -> Tensor:
    """x + σ x ε, ε ~ N(0, 1) per value; [n, 3, h, w]."""
    return images + constants[0] * images * normal(images.shape, generator)


def gaussian_blur(
    images: Tensor, constants: Constants, grown: float, generator: Generator
) -> Tensor:
    """x * N(0, σ²), borders repeated; [n, 3, h, w]."""
    return blur(images, constants[0] * grown)


def defocus_blur(
    images: Tensor, constants: Constants, grown: float, generator: Generator
) -> Tensor:
    """x * k, k a disc of some radius, itself blurred against aliasing; borders mirrored; [n, 3, h,
    w].
    """
    radius, alias = constants
    return correlate(images, disc(radius * grown, alias * grown, grown))


def glass_blur(images: Tensor, constants: Constants, grown: float, generator: Generator) -> Tensor:
    """Blur, then each pixel copies one at a random offset in {-δ, …, δ-1}² (t times over), then
    blur; [n, 3, h, w].

    The generator means to swap the two pixels, but its swap of views copies: that is what the
    published images show.
    """
    sigma, delta, times = constants
    sigma, delta = sigma * grown, max(1, round(delta * grown))
    made = to_bytes(blur(images, sigma)) / 255
    for _ in range(times):
        made = _shuffle(made, delta, generator)
    return blur(made, sigma)


def motion_blur(images: Tensor, constants: Constants, grown: float, generator: Generator) -> Tensor:
    """A half Gaussian along a line at an angle in ±45°; [n, 3, h, w]."""
    radius, sigma = constants
    degrees = 90 * uniform((len(images),), generator) - 45
    return streak(images, radius * grown, sigma * grown, degrees)


def zoom_blur(images: Tensor, constants: Constants, grown: float, generator: Generator) -> Tensor:
    """Mean of the image and of its zooms by 1, 1 + step, … below a last one; [n, 3, h, w]."""
    stop, step = constants
    # Rounded as numpy's ranges are: some reach one step further, and the last digit decides the
    # size of some zooms.
    count = math.ceil((stop - 1) / step)
    zooms = [zoom(images, 1 + i * (1 + step - 1)) for i in range(count)]
    return (images + torch.stack(zooms).sum(0)) / (count + 1)


def snow(images: Tensor, constants: Constants, grown: float, generator: Generator) -> Tensor:
    """m x + (1-m) max(x, 1.5 grey(x) + 0.5) + s + rot180(s), s thresholded noise drawn out
    downwards; [n, 3, h, w].
    """
    loc, deviation, factor, threshold, radius, sigma, mix = constants
    noise = loc + deviation * normal((len(images), 1, *images.shape[2:]), generator)
    layer = zoom(noise, factor * grown)
    layer = to_bytes(layer * (layer >= threshold)) / 255
    degrees = -45 - 90 * uniform((len(images),), generator)
    layer = (255 * streak(layer, radius * grown, sigma * grown, degrees)).round() / 255
    pale = torch.maximum(images, 1.5 * _grey(images) + 0.5)
    return mix * images + (1 - mix) * pale + layer + layer.rot90(2, (2, 3))


def frost(images: Tensor, constants: Constants, grown: float, generator: Generator) -> Tensor:
    """a x + b f, f a texture of frost; [n, 3, h, w].

    The generator crops five photographs; here f is procedural (``FROST_TEXTURE``), with the
    colours, contrasts, spectra and skewness of their crops: see ``textures.frost``.
    """
    weight, strength, kinds = constants
    return weight * images + strength * textures.frost(images, kinds, generator)


def fog(images: Tensor, constants: Constants, grown: float, generator: Generator) -> Tensor:
    """(x + s p) m / (m + s), m = max x of the image and p a plasma in [0, 1]; [n, 3, h, w]."""
    strength, decay = constants
    highest = images.amax((1, 2, 3), keepdim=True)
    return (
        (images + strength * textures.plasma(images, decay, generator))
        * highest
        / (highest + strength)
    )


def brightness(images: Tensor, constants: Constants, grown: float, generator: Generator) -> Tensor:
    """HSV value v raised to min(v + c, 1): the colour is proportional to v; [n, 3, h, w]."""
    value = images.amax(1, keepdim=True)
    raised = (value + constants[0]).clamp(max=1)
    return torch.where(value > 0, images / value.clamp(min=1e-12), 1.0) * raised


def saturate(images: Tensor, constants: Constants, grown: float, generator: Generator) -> Tensor:
    """HSV saturation s made clip(a s + b): x' = v - (v - x) s'/s, and a grey pixel counts as red;
    [n, 3, h, w].
    """
    factor, shift = constants
    value = images.amax(1, keepdim=True)
    gap = value - images.amin(1, keepdim=True)
    saturation = gap / value.clamp(min=1e-12)
    red = images.new_tensor([0.0, 1.0, 1.0])[:, None, None]
    direction = torch.where(gap > 0, (value - images) / gap.clamp(min=1e-12), red)
    return value - value * (factor * saturation + shift).clamp(0, 1) * direction


def contrast(images: Tensor, constants: Constants, grown: float, generator: Generator) -> Tensor:
    """c (x - m) + m, m the mean of each channel; [n, 3, h, w]."""
    mean = images.mean((2, 3), keepdim=True)
    return constants[0] * (images - mean) + mean


def elastic_transform(
    images: Tensor, constants: Constants, grown: float, generator: Generator
) -> Tensor:
    """x at A(p) + d(p): a random affine map A, then smooth random displacements d; [n, 3, h, w]."""
    alpha, sigma, jitter = (grown * length for length in constants)
    y, x = pixel_grid(images)
    moved = jitter * (2 * uniform((len(images), 3, 2), generator) - 1)
    made = sample(images, *affine_grid(images, moved), edges=False)
    if alpha == 0:
        return made
    noise = 2 * uniform((len(images), 2, *images.shape[2:]), generator) - 1
    moves = alpha * blur(noise, sigma, mirrored=True, truncate=3)
    return sample(made, y + moves[:, 0], x + moves[:, 1], edges=True)


def pixelate(images: Tensor, constants: Constants, grown: float, generator: Generator) -> Tensor:
    """Shrunk to a share of the pixels by a box filter and enlarged again, each in 8 bits; [n, 3, h,
    w].
    """
    share = constants[0] / grown
    height, width = images.shape[2:]
    return resize(resize(images, int(height * share), int(width * share)), height, width)


def spatter(images: Tensor, constants: Constants, grown: float, generator: Generator) -> Tensor:
    """Drops of blurred, thresholded noise: x + m·water (severities 1 to 3) or (1-m) x + m·mud; [n,
    3, h, w].

    The generator shades water by Canny edges; here an edge is a wet pixel with a steep Sobel
    gradient.
    """
    loc, deviation, sigma, threshold, strength, muddy = constants
    noise = loc + deviation * normal((len(images), 1, *images.shape[2:]), generator)
    liquid = zoom(blur(noise, sigma), grown)
    liquid = liquid * (liquid >= threshold)
    if not muddy:
        shade = textures.water(to_bytes(liquid), round(20 * grown))
        return images + strength * shade * _colour(images, 175, 238, 238)
    mud = blur((liquid > threshold).float(), strength * grown)
    mud = mud * (mud >= 0.8)
    return (1 - mud) * images + mud * _colour(images, 63, 42, 20)


def jpeg_compression(
    images: Tensor, constants: Constants, grown: float, generator: Generator
) -> Tensor:
    """Through JPEG at a quality and back; [n, 3, h, w]."""
    return recompress(to_bytes(images), constants[0]) / 255


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
    """Each pixel but those near the border copies one at a random offset in {-δ, …, δ-1}², from the
    last pixel to the first.

    A pixel that copies one after it gets what that one has copied: such chains are followed to
    their ends all at once, by doubling, so the result is that of the loop over pixels.
    """
    n, _, height, width = images.shape
    y, x = pixel_grid(images)
    inside = (y > delta) & (y <= height - delta) & (x > delta) & (x <= width - delta)
    dy, dx = ((uniform((2, n, height, width), generator) * 2 * delta).long() - delta) * inside
    here = (y * width + x).flatten()
    source = ((y + dy) * width + x + dx).flatten(1)  # [n, h·w]
    chained = (source > here) & inside.flatten()[source]
    link = torch.where(chained, source, here)
    while not torch.equal(further := link.gather(1, link), link):
        link = further
    source = source.gather(1, link).view(n, height, width)
    return take(images, source // width, source % width)

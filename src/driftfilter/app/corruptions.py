"""The 15 + 4 corruptions of CIFAR-10-C at severities 1 to 5, with the constants of the published generator.

The constants are those for 32-pixel images. Larger images are corrupted as if the picture had been enlarged: lengths in pixels
(blur radii and deviations, displacements, zooms of noise layers, cells of the pixelation) grow by min(h, w) / 32; amplitudes,
thresholds, mixing weights and JPEG qualities stay. The generator's frost photographs are not shipped: see ``frost``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Generator, Tensor

from driftfilter.checks import nearest, require, require_count, require_finite, require_floating, require_shape

Corruption: TypeAlias = Callable[[Tensor, int, Generator], Tensor]  # images [n, 3, h, w], severity, generator -> [n, 3, h, w]

FROST_TEXTURE = "procedural"  # to be said in every report with frost in it
SIZE = 32  # pixels, of the images the constants are for
PIXELS = 512 * SIZE**2  # corrupted at a time, which bounds the memory


def corrupt(images: Tensor, name: str, severity: int = 5, seed: int = 0) -> Tensor:
    """Corrupted images [n, 3, h, w] of RGB images [n, 3, h, w] in [0, 1], cut down to 8 bits: ⌊255 x⌋ / 255, as published.

    The same images and seed give the same corruption on the same kind of device; all is computed in float32 there.
    """
    _check(images, name, severity, seed)
    generator = torch.Generator(images.device).manual_seed(seed)
    parts = images.float().split(max(1, PIXELS // images[0, 0].numel()))
    made = [_bytes(_ALL[name](part, severity, generator)) for part in parts]
    return torch.cat(made).to(images.dtype) / 255


def _check(images: Tensor, name: str, severity: int, seed: int) -> None:
    known = list(_ALL)
    require(name in known, "name", name, f"one of {', '.join(known)}{nearest(str(name), known)}")
    require(type(severity) is int and 1 <= severity <= 5, "severity", severity, "an integer from 1 to 5")
    require_count("seed", seed, 0)
    require_shape("images", images, "[n, 3, h, w] (RGB, channels before pixels)", None, 3, None, None)
    require_floating("images", images)
    require(min(images.shape[2:]) >= SIZE, "images", list(images.shape), f"at least {SIZE} pixels high and wide")
    require_finite("images", images)
    low, high = images.min().item(), images.max().item()
    require(low >= 0 and high <= 1, "images", [low, high], "in [0, 1] (divide 8-bit values by 255)")


def gaussian_noise(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """x + σ ε, ε ~ N(0, 1) per value; [n, 3, h, w]."""
    return images + (0.04, 0.06, 0.08, 0.09, 0.10)[severity - 1] * _normal(images.shape, generator)


def shot_noise(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """Poisson(r x) / r per value; [n, 3, h, w]."""
    rate = (500, 250, 100, 75, 50)[severity - 1]
    return torch.poisson(rate * images, generator) / rate


def impulse_noise(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """A share of the values replaced by 0 or 1, as likely; [n, 3, h, w]."""
    share = (0.01, 0.02, 0.03, 0.05, 0.07)[severity - 1]
    draw = _uniform(images.shape, generator)
    return torch.where(draw < share, (draw < share / 2).float(), images)


def speckle_noise(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """x + σ x ε, ε ~ N(0, 1) per value; [n, 3, h, w]."""
    return images + (0.06, 0.1, 0.12, 0.16, 0.2)[severity - 1] * images * _normal(images.shape, generator)


def gaussian_blur(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """x * N(0, σ²), borders repeated; [n, 3, h, w]."""
    return _blur(images, (0.4, 0.6, 0.7, 0.8, 1.0)[severity - 1] * _scale(images))


def defocus_blur(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """x * k, k a disc of some radius, itself blurred against aliasing; borders mirrored; [n, 3, h, w]."""
    radius, alias = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1))[severity - 1]
    scale = _scale(images)
    return _filter(images, _disc(radius * scale, alias * scale, math.ceil(scale)).to(images.device))


def glass_blur(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """Blur, then each pixel copies one at a random offset in {-δ, …, δ-1}² (t times over), then blur; [n, 3, h, w].

    The generator means to swap the two pixels, but its swap of views copies: that is what the published images show.
    """
    sigma, times = ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))[severity - 1]
    sigma, delta = sigma * _scale(images), max(1, round(_scale(images)))
    made = _bytes(_blur(images, sigma)) / 255
    for _ in range(times):
        made = _shuffle(made, delta, generator)
    return _blur(made, sigma)


def motion_blur(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """A half Gaussian along a line at an angle in ±45°; [n, 3, h, w]."""
    radius, sigma = ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5))[severity - 1]
    return _streak(images, radius, sigma, 90 * _uniform((len(images),), generator) - 45)


def zoom_blur(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """Mean of the image and of its zooms by 1, 1.01, …; [n, 3, h, w]."""
    # Rounded as numpy's ranges are: the first two reach one step further, and the last digit decides the size of some zooms.
    steps = (7, 12, 16, 21, 26)[severity - 1]
    zooms = [_zoom(images, 1 + step * (1.01 - 1)) for step in range(steps)]
    return (images + torch.stack(zooms).sum(0)) / (steps + 1)


def snow(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """m x + (1-m) max(x, 1.5 grey(x) + 0.5) + s + rot180(s), s thresholded noise drawn out downwards; [n, 3, h, w]."""
    loc, deviation, zoom, threshold, radius, sigma, mix = (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    )[severity - 1]
    noise = loc + deviation * _normal((len(images), 1, *images.shape[2:]), generator)
    layer = _zoom(noise, zoom * _scale(images))
    layer = _bytes(layer * (layer >= threshold)) / 255
    layer = (255 * _streak(layer, radius, sigma, -45 - 90 * _uniform((len(images),), generator))).round() / 255
    pale = torch.maximum(images, 1.5 * _grey(images) + 0.5)
    return mix * images + (1 - mix) * pale + layer + layer.rot90(2, (2, 3))


def frost(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """a x + b f, f a texture of frost; [n, 3, h, w].

    The generator crops photographs; here f is procedural (``FROST_TEXTURE``): bluish ridged noise of spectrum 1/frequency whose
    level, spread and tint vary between images as those of the crops do.
    """
    weight, strength = ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))[severity - 1]
    return weight * images + strength * _frost_texture(images, generator)


def fog(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """(x + s p) m / (m + s), m = max x of the image and p a plasma in [0, 1]; [n, 3, h, w]."""
    strength, decay = ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))[severity - 1]
    highest = images.amax((1, 2, 3), keepdim=True)
    return (images + strength * _plasma(images, decay, generator)) * highest / (highest + strength)


def brightness(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """HSV value v raised to min(v + c, 1): the colour is proportional to v; [n, 3, h, w]."""
    value = images.amax(1, keepdim=True)
    raised = (value + (0.05, 0.1, 0.15, 0.2, 0.3)[severity - 1]).clamp(max=1)
    return torch.where(value > 0, images / value.clamp(min=1e-12), 1.0) * raised


def saturate(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """HSV saturation s made clip(a s + b): x' = v - (v - x) s'/s, and a grey pixel counts as red; [n, 3, h, w]."""
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
    y, x = _grid(images)
    made = _sample(images, *_affine(images, jitter * size, generator), edges=False)
    if alpha == 0:
        return made
    noise = 2 * _uniform((len(images), 2, *images.shape[2:]), generator) - 1
    moves = alpha * size * _blur(noise, sigma * size, mirrored=True, truncate=3)
    return _sample(made, y + moves[:, 0], x + moves[:, 1], edges=True)


def pixelate(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """Shrunk to a share of the pixels by a box filter and enlarged again, each in 8 bits; [n, 3, h, w]."""
    share = (0.95, 0.9, 0.85, 0.75, 0.65)[severity - 1] / _scale(images)
    height, width = images.shape[2:]
    small = _resize(images, int(height * share), int(width * share))
    return _resize(small, height, width)


def spatter(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """Drops of blurred, thresholded noise: x + m·water (severities 1 to 3) or (1-m) x + m·mud; [n, 3, h, w].

    The generator shades water by Canny edges; here an edge is a wet pixel with a steep Sobel gradient.
    """
    loc, deviation, sigma, threshold, strength = (
        (0.62, 0.1, 0.7, 0.7, 0.5),
        (0.65, 0.1, 0.8, 0.7, 0.5),
        (0.65, 0.3, 1.0, 0.69, 0.5),
        (0.65, 0.1, 0.7, 0.69, 0.6),
        (0.65, 0.1, 0.5, 0.68, 0.6),
    )[severity - 1]
    noise = loc + deviation * _normal((len(images), 1, *images.shape[2:]), generator)
    liquid = _zoom(_blur(noise, sigma), _scale(images))
    liquid = liquid * (liquid >= threshold)
    if severity <= 3:
        return images + strength * _water(_bytes(liquid)) * _colour(images, 175, 238, 238)
    mud = _blur((liquid > threshold).float(), strength * _scale(images))
    mud = mud * (mud >= 0.8)
    return (1 - mud) * images + mud * _colour(images, 63, 42, 20)


def jpeg_compression(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """Through JPEG at a quality and back: YCbCr, chroma halved, cosine transform of 8×8 blocks, quantised; [n, 3, h, w]."""
    quality = (80, 65, 58, 50, 40)[severity - 1]
    height, width = images.shape[2:]
    padded = F.pad(_bytes(images), (0, -width % 16, 0, -height % 16), mode="replicate")
    luma, blue, red = (_TO_YCC.to(images) @ padded.flatten(2)).view_as(padded).unbind(1)
    luma = _quantise(luma.round(), _LUMA, quality)
    blue, red = (_double(_quantise(_halve((part + 128).round()), _CHROMA, quality)) - 128 for part in (blue, red))
    shift = (-0.344136 * blue - 0.714136 * red).round()
    made = torch.stack([luma + (1.402 * red).round(), luma + shift, luma + (1.772 * blue).round()], 1)
    return made[..., :height, :width] / 255


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


def _scale(images: Tensor) -> float:
    """How many pixels a pixel of the published images has become."""
    return min(images.shape[2:]) / SIZE


def _bytes(images: Tensor) -> Tensor:
    """⌊255 x⌋ in [0, 255]; the margin keeps float32 from losing a unit where 255 x is whole."""
    return (images.clamp(0, 1) * 255 + 1e-3).floor()


def _grey(images: Tensor) -> Tensor:
    return (images * images.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)


def _colour(images: Tensor, *rgb: int) -> Tensor:
    return images.new_tensor(rgb)[:, None, None] / 255


def _normal(shape: tuple[int, ...], generator: Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def _uniform(shape: tuple[int, ...], generator: Generator) -> Tensor:
    return torch.rand(shape, generator=generator, device=generator.device)


def _grid(images: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column [h, w] of each pixel."""
    height, width = images.shape[2:]
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return y.to(images.device), x.to(images.device)


def _both(images: Tensor, matrix: Callable[[int], Tensor]) -> Tensor:
    """A x Bᵀ, a linear map along each axis: ``matrix`` gives it [out, size] for the size of the axis."""
    rows, columns = (matrix(size).to(images) for size in images.shape[2:])
    return rows @ images @ columns.T


def _blur(images: Tensor, sigma: float, mirrored: bool = False, truncate: float = 4) -> Tensor:
    """Gaussian blur cut at ``truncate`` deviations; borders repeated (aaa|abc) or mirrored (cba|abc)."""
    reach = int(truncate * sigma + 0.5)

    def matrix(size: int) -> Tensor:
        places = torch.arange(size)[:, None] + torch.arange(-reach, reach + 1)
        turned = places % (2 * size)
        places = torch.minimum(turned, 2 * size - 1 - turned) if mirrored else places.clamp(0, size - 1)
        return torch.zeros(size, size).scatter_add(1, places, _bell(sigma, reach).expand(size, -1))

    return _both(images, matrix)


def _bell(sigma: float, reach: int) -> Tensor:
    """exp(-i² / 2σ²), normalised; [2 reach + 1]."""
    return torch.softmax(-(torch.arange(-reach, reach + 1) ** 2) / (2 * sigma**2), 0)


def _disc(radius: float, alias: float, reach: int) -> Tensor:
    """A disc of total weight 1, blurred; [k, k]."""
    whole = math.ceil(radius) + reach
    line = torch.arange(-whole, whole + 1)
    disc = (line[:, None] ** 2 + line**2 <= radius**2).float()
    bell = _bell(alias, reach)
    return F.conv2d((disc / disc.sum())[None, None], torch.outer(bell, bell)[None, None], padding=reach)[0, 0]


def _filter(images: Tensor, kernel: Tensor, mode: str = "reflect") -> Tensor:
    """Correlation of each channel with a kernel [k, k], borders mirrored about the last pixel."""
    reach = len(kernel) // 2
    padded = F.pad(images, (reach,) * 4, mode=mode)
    channels = images.shape[1]
    return F.conv2d(padded, kernel.to(images).expand(channels, 1, -1, -1), groups=channels)


def _take(images: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """The pixels at rows and columns [n, h, w], clamped to the image."""
    height, width = images.shape[2:]
    places = y.clamp(0, height - 1) * width + x.clamp(0, width - 1)
    return images.flatten(2).gather(2, places.flatten(1)[:, None].expand(-1, images.shape[1], -1)).view_as(images)


def _shuffle(images: Tensor, delta: int, generator: Generator) -> Tensor:
    """Each pixel but those near the border from a random offset in {-δ, …, δ-1}²."""
    n, _, height, width = images.shape
    y, x = _grid(images)
    inside = (y > delta) & (y <= height - delta) & (x > delta) & (x <= width - delta)
    offsets = (_uniform((2, n, height, width), generator) * 2 * delta).long() - delta
    dy, dx = offsets * inside
    return _take(images, y + dy, x + dx)


def _streak(images: Tensor, radius: float, sigma: float, degrees: Tensor) -> Tensor:
    """Σ_i k_i x(p + i u), i = 0 … 2r, k a half Gaussian and u the direction of an angle [n], to the nearest pixel."""
    reach = 2 * math.ceil(radius * _scale(images))
    weights = torch.softmax(-(torch.arange(reach + 1) ** 2) / (2 * (sigma * _scale(images)) ** 2), 0).tolist()
    y, x = _grid(images)
    down, right = degrees.deg2rad().sin()[:, None, None], degrees.deg2rad().cos()[:, None, None]
    made = torch.zeros_like(images)
    for i, weight in enumerate(weights):
        made += weight * _take(images, y + (i * down - 0.5).ceil().long(), x + (i * right - 0.5).ceil().long())
    return made


def _zoom(images: Tensor, factor: float) -> Tensor:
    """The middle of the image enlarged to its size, linearly between pixel centres."""

    def matrix(size: int) -> Tensor:
        kept = math.ceil(size / factor)
        out = round(kept * factor)
        places = (size - kept) // 2 + (torch.arange(size) + (out - size) // 2) * ((kept - 1) / (out - 1))
        return (1 - (places[:, None] - torch.arange(size)).abs()).clamp(min=0)

    return _both(images, matrix)


def _resize(images: Tensor, height: int, width: int) -> Tensor:
    """Box filter over whole pixels, as pillow's, rounded to 8 bits after each axis."""

    def matrix(size: int, out: int) -> Tensor:
        step = size / out
        centre, reach = (torch.arange(out).double()[:, None] + 0.5) * step, max(step, 1) / 2
        pixel = torch.arange(size)
        inside = (pixel >= (centre - reach + 0.5).floor()) & (pixel < (centre + reach + 0.5).floor())
        return inside / inside.sum(1, keepdim=True)

    wide = (255 * images @ matrix(images.shape[3], width).to(images).T + 1e-3).round()
    return (matrix(images.shape[2], height).to(images) @ wide + 1e-3).round() / 255


def _frost_texture(images: Tensor, generator: Generator) -> Tensor:
    """level + spread · ridged noise + tint, with 1/f noise: white noise times |frequency|^(-1/2); [n, 3, h, w]."""
    n, _, height, width = images.shape
    rise, run = torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)
    falloff = torch.hypot(rise, run).clamp(min=1 / max(height, width)).rsqrt().to(images.device)
    layers = torch.fft.irfft2(torch.fft.rfft2(_normal((n, 2, height, width), generator)) * falloff, s=(height, width))
    layers = layers / layers.std((2, 3), keepdim=True)
    ridged = layers[:, :1] - layers[:, 1:].abs()
    ridged = (ridged - ridged.mean((2, 3), keepdim=True)) / ridged.std((2, 3), keepdim=True)
    level, blueness, spread = _uniform((3, n, 1, 1, 1), generator)
    level = 0.42 + 0.46 * level
    red = torch.where(blueness < 0.2, -0.25, -0.04)  # one photograph in five is deep blue
    tint = torch.cat([red, 0 * red, 0.045 + 0 * red], 1)
    texture: Tensor = level + (0.14 - 0.1 * level) * (0.6 + 0.8 * spread) * ridged + tint
    return texture.clamp(0, 1)


def _plasma(images: Tensor, decay: float, generator: Generator) -> Tensor:
    """Diamond-square noise that wraps around, each octave decay² weaker, in [0, 1]; [n, 1, h, w]."""
    n, _, height, width = images.shape
    step = size = 2 ** math.ceil(math.log2(max(height, width)))
    plasma = images.new_zeros(n, size, size)
    wobble = 1.0

    def near(total: Tensor) -> Tensor:
        return total / 4 + wobble * (2 * _uniform(tuple(total.shape), generator) - 1)

    while step >= 2:
        half = step // 2
        corners = plasma[:, ::step, ::step]
        pairs = corners + corners.roll(-1, 1)
        plasma[:, half::step, half::step] = near(pairs + pairs.roll(-1, 2))
        middles = plasma[:, half::step, half::step]
        plasma[:, ::step, half::step] = near(middles + middles.roll(1, 1) + corners + corners.roll(-1, 2))
        plasma[:, half::step, ::step] = near(middles + middles.roll(1, 2) + corners + corners.roll(-1, 1))
        step, wobble = half, wobble / decay**2
    plasma = plasma - plasma.amin((1, 2), keepdim=True)
    return (plasma / plasma.amax((1, 2), keepdim=True))[:, None, :height, :width]


def _affine(images: Tensor, jitter: float, generator: Generator) -> tuple[Tensor, Tensor]:
    """Rows and columns [n, h, w] under the map that takes three jittered points back to where they were."""
    height, width = images.shape[2:]
    third = min(height, width) // 3
    corners = images.new_tensor([[1, 1], [1, -1], [-1, -1]]) * third + images.new_tensor([width // 2, height // 2])
    moved = corners + jitter * (2 * _uniform((len(images), 3, 2), generator) - 1)
    back = torch.linalg.solve(F.pad(moved, (0, 1), value=1), corners.expand(len(images), -1, -1))  # [n, 3, 2]
    y, x = _grid(images)
    points = torch.stack([x, y, torch.ones_like(x)], -1).to(images)
    x, y = torch.einsum("hwi,nij->jnhw", points, back)
    return y, x


def _sample(images: Tensor, y: Tensor, x: Tensor, edges: bool) -> Tensor:
    """Linear interpolation at rows and columns [n, h, w], mirrored about the edges or about the centres of the last pixels."""
    height, width = images.shape[2:]
    y, x = ((2 * y + 1) / height - 1, (2 * x + 1) / width - 1) if edges else (2 * y / (height - 1) - 1, 2 * x / (width - 1) - 1)
    return F.grid_sample(images, torch.stack([x, y], -1), padding_mode="reflection", align_corners=not edges)


def _water(liquid: Tensor) -> Tensor:
    """Shading of drops [n, 1, h, w] in 0 … 255: an emboss of the equalised distance to their edges, at most 1."""
    slope = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]])
    steep = _filter(liquid, slope, "replicate").abs() + _filter(liquid, slope.T, "replicate").abs() > 150
    far = _distance(steep & (liquid > 0)).clamp(max=20 * _scale(liquid))
    box, emboss = torch.full((3, 3), 1 / 9), torch.tensor([[-2.0, -1, 0], [-1, 0, 1], [0, 1, 2]])
    relief = _filter(_equalise(_filter(far, box).floor()), emboss).clamp(0, 255)
    shade = liquid * _filter(relief, box).round()
    return shade / shade.amax((2, 3), keepdim=True).clamp(min=1e-12)


def _distance(marks: Tensor) -> Tensor:
    """Euclidean distance [n, 1, h, w] to the nearest mark, one axis after the other."""
    squares = torch.where(marks, 0.0, 1e6)
    for axis in (2, 3):
        line = torch.arange(marks.shape[axis], device=marks.device)
        squares = (squares.transpose(axis, 3)[..., None, :] + (line[:, None] - line) ** 2).amin(-1).transpose(axis, 3)
    return squares.sqrt()


def _equalise(levels: Tensor) -> Tensor:
    """Levels [n, 1, h, w] in 0 … 255 replaced by their rank, spread evenly over 0 … 255."""
    flat = levels.long().clamp(0, 255).flatten(1)
    ranks = levels.new_zeros(len(flat), 256).scatter_add(1, flat, torch.ones_like(flat, dtype=levels.dtype)).cumsum(1)
    rank = ranks.gather(1, flat)
    lowest = rank.amin(1, keepdim=True)
    return (255 * (rank - lowest) / (flat.shape[1] - lowest).clamp(min=1)).round().view_as(levels)


# JPEG, as libjpeg does it: the tables of the standard's annex K, row by row.
_LUMA = (
    *(16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55, 14, 13, 16, 24, 40, 57, 69, 56),
    *(14, 17, 22, 29, 51, 87, 80, 62),
    *(18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92),
    *(49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99),
)
_CHROMA = (17, 18, 24, 47, *[99] * 4, 18, 21, 26, 66, *[99] * 4, 24, 26, 56, *[99] * 5, 47, 66, *[99] * 38)
_TO_YCC = torch.tensor([[0.299, 0.587, 0.114], [-0.168735892, -0.331264108, 0.5], [0.5, -0.418687589, -0.081312411]])


def _quantise(values: Tensor, table: tuple[int, ...], quality: int) -> Tensor:
    """Bytes [n, h, w] with the cosine transform of each 8×8 block rounded to multiples of the table at this quality."""
    n, height, width = values.shape
    percent = 5000 // quality if quality < 50 else 200 - 2 * quality
    steps = ((torch.tensor(table).view(8, 8) * percent + 50) // 100).clamp(1, 255).to(values)
    line = torch.arange(8).double()
    cosine = torch.cos(math.pi / 8 * (line + 0.5) * line[:, None]) / 2
    cosine[0] /= math.sqrt(2)
    cosine = cosine.to(values)
    blocks = values.view(n, height // 8, 8, width // 8, 8).transpose(2, 3) - 128
    fine = 4 * math.sqrt(8)  # libjpeg's integers between the two axes, and 8 to the unit after them: they decide many halves
    scaled = (cosine @ (fine * blocks @ cosine.T).round() * (8 / fine)).round() / (8 * steps)
    kept = scaled.sign() * (scaled.abs() + 0.5 + 1e-5).floor() * steps
    made = ((fine * cosine.T @ kept).round() @ cosine / fine + 128 + 0.5 + 1e-4).floor().clamp(0, 255)
    return made.transpose(2, 3).reshape_as(values)


def _halve(values: Tensor) -> Tensor:
    """Mean of 2×2 bytes [n, h, w], halves rounded down and up in turn along a row."""
    total = 4 * F.avg_pool2d(values[:, None], 2)[:, 0]
    return ((total + 1 + torch.arange(total.shape[2], device=values.device) % 2) / 4).floor()


def _double(values: Tensor) -> Tensor:
    """Enlarged [n, h, w] -> [n, 2h, 2w] with weights 3/4 and 1/4, halves rounded up and down in turn along a row."""
    made = 16 * F.interpolate(values[:, None], scale_factor=2.0, mode="bilinear")[:, 0]
    return ((made.round() + 8 - torch.arange(made.shape[2], device=values.device) % 2) / 16).floor()

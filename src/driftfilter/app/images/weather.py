"""Random layers of weather and water laid over images, [n, 1 or 3, h, w] in [0, 1]."""

import math
from typing import TypeAlias

import torch
from torch import Generator, Tensor

from driftfilter.app.images.image_filters import correlate

Kinds: TypeAlias = tuple[tuple[float, ...], ...]


def normal(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """N(0, 1) on the device of the generator."""
    return torch.randn(shape, generator=generator, device=generator.device)


def uniform(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """U[0, 1) on the device of the generator."""
    return torch.rand(shape, generator=generator, device=generator.device)


_PATCHINESS = 0.4  # of the contrast within a crop: the deviation of its logarithm


def frost(images: Tensor, kinds: Kinds, generator: Generator) -> Tensor:
    """colour + shift + spread · u, u = (v + b (v² - 1)) e^w; [n, 3, h, w].

    Gaussian v of power 1 + (knee / frequency)² and w of power 1 / frequency², standardised; one
    kind for each image, of those measured: see ``constants.CIFAR_FROST``.
    """
    n, _, height, width = images.shape
    kind = torch.randint(len(kinds), (n,), generator=generator, device=generator.device)
    *colour, shift, spread, knee, bend = images.new_tensor(kinds)[kind].T[
        ..., None, None, None
    ]  # each [n, 1, 1, 1]
    frequency = _frequency(height, width).to(images.device)
    fine, broad = normal((2, n, 1, height, width), generator)
    layer = _color(fine, 1 + (knee / frequency) ** 2)
    layer = _standardize(
        (layer + bend * (layer**2 - 1)) * (_PATCHINESS * _color(broad, frequency**-2)).exp()
    )
    level, contrast = normal((2, n, 1, 1, 1), generator)
    texture: Tensor = (
        torch.cat(colour, 1) + shift * level + spread * (0.15 * contrast).exp() * layer
    )
    return (texture / 255).clamp(0, 1)


def _frequency(height: int, width: int) -> Tensor:
    """Cycles per pixel [h, w // 2 + 1] of the waves of a real image; the mean counts as the longest
    wave.
    """
    rise, run = torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)
    return torch.hypot(rise, run).clamp(min=1 / max(height, width))


def _color(noise: Tensor, power: Tensor) -> Tensor:
    """White noise [n, 1, h, w] given a spectrum [n or 1, 1, h, w // 2 + 1], standardised."""
    return _standardize(torch.fft.irfft2(torch.fft.rfft2(noise) * power.sqrt(), s=noise.shape[2:]))


def _standardize(layer: Tensor) -> Tensor:
    """Mean 0 and deviation 1 in each image [n, 1, h, w]."""
    return (layer - layer.mean((2, 3), keepdim=True)) / layer.std((2, 3), keepdim=True)


def plasma(images: Tensor, decay: float, generator: Generator) -> Tensor:
    """Diamond-square noise that wraps around, each octave decay² weaker, in [0, 1]; [n, 1, h,
    w].
    """
    n, _, height, width = images.shape
    step = size = 2 ** math.ceil(math.log2(max(height, width)))
    heights = images.new_zeros(n, size, size)
    wobble = 1.0

    def near(total: Tensor) -> Tensor:
        return total / 4 + wobble * (2 * uniform(tuple(total.shape), generator) - 1)

    while step >= 2:
        half = step // 2
        corners = heights[:, ::step, ::step]
        pairs = corners + corners.roll(-1, 1)
        heights[:, half::step, half::step] = near(pairs + pairs.roll(-1, 2))
        middles = heights[:, half::step, half::step]
        heights[:, ::step, half::step] = near(
            middles + middles.roll(1, 1) + corners + corners.roll(-1, 2)
        )
        heights[:, half::step, ::step] = near(
            middles + middles.roll(1, 2) + corners + corners.roll(-1, 1)
        )
        step, wobble = half, wobble / decay**2
    heights = heights - heights.amin((1, 2), keepdim=True)
    return (heights / heights.amax((1, 2), keepdim=True))[:, None, :height, :width]


def water(liquid: Tensor, reach: int = 20) -> Tensor:
    """Shading of drops [n, 1, h, w] in 0 … 255: an emboss of the equalised distance to their edges
    (cut at ``reach``), at most 1.
    """
    slope = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]])
    steep = (
        correlate(liquid, slope, "replicate").abs() + correlate(liquid, slope.T, "replicate").abs()
        > 150
    )
    far = _distance(steep & (liquid > 0), reach)
    box, emboss = torch.full((3, 3), 1 / 9), torch.tensor([[-2.0, -1, 0], [-1, 1, 1], [0, 1, 2]])
    relief = correlate(_equalise((correlate(far, box) + 1e-3).floor()), emboss).clamp(0, 255)
    shade = liquid * correlate(relief, box).round()
    return shade / shade.amax((2, 3), keepdim=True).clamp(min=1e-12)


def _distance(marks: Tensor, reach: int) -> Tensor:
    """min(Euclidean distance to the nearest mark, reach) [n, 1, h, w], one axis after the other."""
    squares = torch.where(marks, 0.0, float(reach**2))
    for axis in (2, 3):
        nearest = squares.clone()
        for move in range(1, min(reach, marks.shape[axis])):
            kept = marks.shape[axis] - move
            low, high = (squares.narrow(axis, start, kept) + move**2 for start in (0, move))
            for start, part in ((move, low), (0, high)):
                place = nearest.narrow(axis, start, kept)
                torch.minimum(place, part, out=place)
        squares = nearest
    return squares.sqrt()


def _equalise(levels: Tensor) -> Tensor:
    """Levels [n, 1, h, w] in 0 … 255 replaced by their rank, spread evenly over 0 … 255."""
    flat = levels.long().clamp(0, 255).flatten(1)
    ranks = (
        levels.new_zeros(len(flat), 256)
        .scatter_add(1, flat, torch.ones_like(flat, dtype=levels.dtype))
        .cumsum(1)
    )
    rank = ranks.gather(1, flat)
    lowest = rank.amin(1, keepdim=True)
    return (255 * (rank - lowest) / (flat.shape[1] - lowest).clamp(min=1)).round().view_as(levels)

"""How samples look: a few numbers a sample that tell domains apart, not classes.

Of an image x [c, h, w] with m the mean of its channels,

    mean of each channel, or of all if there are more than four;   log v, v the variance of x;
    log(energy / v + 1e-4) of m and of x - m: all of it, and that of its differences between
    neighbours (Haar wavelets) at three scales, along one axis and along both

Noise adds energy to small scales, blur takes it away, fog and contrast change v, light the means,
colour x - m. A class has no such signature of its own: what images show varies within each class
nearly as much as over all of them. Signals of sensors are otherwise: a walk has another energy than
rest, so that domains would be classes. They have no signature, nor do tables and tokens.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from driftfilter.base.inputs import Inputs, batch_size, tensors

# What calls a function of one tensor, somehow.
Run: TypeAlias = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]

_SCALES = 3
_LEAST = 2**_SCALES  # of the sides of an image
_FLOOR = 1e-4  # of the variance, an energy that is none
_TINY = 1e-12
_CHANNELS = 4  # whose means are told one by one
_MOST = 1e15  # a value beyond it, whose square might be infinite, is taken for it


def run_at_once(function: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
    """The function of it."""
    return function(given)


def describe(inputs: Inputs, run: Run = run_at_once) -> Tensor | None:
    """Signatures [n, D], on the CPU in float64 and finite, D = 9 for one channel, c + 15 for up to
    four and 16 for more. None if the samples are no images [n, c, h, w], floating or uint8, of at
    least eight values a side.

    Of several inputs the first one is looked at that has several numbers a sample: what comes after
    it may be a mask. ``run`` calls what is worked out where the images are.
    """
    n = batch_size(inputs)
    images = next((each for each in tensors(inputs) if each.dim() > 1 and len(each) == n), None)
    if images is None or images.dim() != 4 or min(images.shape[2:]) < _LEAST:
        return None
    if not images.is_floating_point() and images.dtype != torch.uint8:
        return None
    channels = images.shape[1]
    told = run(_measure, images.detach()).cpu()  # the only look there
    means, between, squares = told.split((channels, 1, told.shape[1] - channels - 1), 1)
    whole, grey = (_energies(own) for own in (squares[:, 0::2], squares[:, 1::2]))
    variance = whole[:, :1] + between + _TINY
    parts = grey if channels == 1 else torch.cat((grey, whole - grey), 1)
    shares = parts.clamp_min(0) / variance + _FLOOR
    if means.shape[1] > _CHANNELS:
        means = means.mean(1, keepdim=True)
    return torch.cat((means, variance.log(), shares.log()), 1).to(torch.float64)


def _measure(images: Tensor) -> Tensor:
    """Means of the channels, their variance, and the squares of ``_find_squares`` [n, c + 21]."""
    images = images.float().clamp(-_MOST, _MOST)
    means = images.flatten(2).mean(2)  # [n, c]
    columns = (means, means.var(1, correction=0)[:, None])
    squares = torch.stack(_find_squares(images.sub_(means[:, :, None, None])), 1)  # of a copy
    return torch.cat((*columns, squares), 1)


def _find_squares(images: Tensor) -> list[Tensor]:
    """Mean squares [n] of images [n, c, h, w] and of the means of their channels, and both of half
    the sums of neighbours: scale by scale along one axis, the other one and both.
    """
    found = _squares(images)
    for _ in range(_SCALES):
        one, other = _halve(images, 2), _halve(images, 3)
        images = _halve(one, 3)
        found += [*_squares(one), *_squares(other), *_squares(images)]
    return found


def _energies(squares: Tensor) -> Tensor:
    """Mean squares of all, then of differences between neighbours, scale by scale [n, 7], by those
    of all and of half the sums [n, 10].

    A mean square is that of half the sums of neighbours plus that of half their differences, so
    that only sums are needed.
    """
    own, half = squares[:, :-1:3], squares[:, 3::3]
    sides = squares[:, 1::3] + squares[:, 2::3]
    differences = torch.stack((sides - 2 * half, own - sides + half), 2)
    return torch.cat((squares[:, :1], differences.flatten(1)), 1)


def _halve(images: Tensor, axis: int) -> Tensor:
    """Half the sums of neighbours along an axis; an odd one at its end is left out."""
    one, other = images.unfold(axis, 2, 2).unbind(-1)
    return (one + other).mul_(0.5)


def _squares(images: Tensor) -> list[Tensor]:
    """Mean squares [n] of images [n, c, h, w], and of the means of their channels."""
    return [images.square().mean((1, 2, 3)), images.mean(1).square().mean((1, 2))]

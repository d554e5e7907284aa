"""How samples look: a few numbers a sample that tell domains apart, not classes.

Of an image or a signal x [c, …] with m the mean of its channels,

    mean of each channel;   log v, v the variance of x;
    log(energy / v + 1e-4) of m and of x - m: all of it, and that of its differences between
    neighbours (Haar wavelets) at three scales, along one axis and along both

Noise adds energy to small scales, blur takes it away, fog and contrast change v, light the means,
colour x - m. A class has no such signature of its own: what images show varies within each class
nearly as much as over all of them. Tables and tokens have none at all.
"""

import torch
from torch import Tensor
from torch.nn import functional

from driftfilter.base.inputs import Inputs, tensors

_SCALES = 3
_LEAST = 2**_SCALES  # of the sides of an image
_FLOOR = 1e-4  # of the variance, an energy that is none
_TINY = 1e-12


def describe(inputs: Inputs) -> Tensor | None:
    """Signatures [n, D], on the CPU in float64, D = 9 for one channel and c + 15 for c (signals: 6
    and c + 9); None if the samples are no images [n, c, h, w] or signals [n, c, t] of at least
    eight values a side.
    """
    images = next((part for part in tensors(inputs) if part.is_floating_point()), None)
    if images is None or images.dim() not in (3, 4) or min(images.shape[2:]) < _LEAST:
        return None
    images = images.detach().float()
    means = images.flatten(2).mean(2)  # [n, c]
    images = images - means.view(*means.shape, *[1] * (images.dim() - 2))
    whole, grey = _energies(images)
    between = means.var(1, correction=0)
    variance = whole[:, 0] + between + _TINY
    parts = grey if images.shape[1] == 1 else torch.cat((grey, whole - grey), 1)
    shares = parts.clamp_min(0) / variance[:, None] + _FLOOR
    return torch.cat((means, variance.log()[:, None], shares.log()), 1).to("cpu", torch.float64)


def _energies(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean squares of images [n, c, …] and of the means of their channels: of all, then of
    differences between neighbours, scale by scale [n, 7] (signals: [n, 4]).

    A mean square is that of half the sums of neighbours plus that of half their differences, so
    that only sums are needed.
    """
    found = [_squares(images)]
    for _ in range(_SCALES):
        own = _squares(images)
        if images.dim() == 3:
            images = functional.avg_pool1d(images, 2)
            found.append(own - _squares(images))
            continue
        one, other = (functional.avg_pool2d(images, size) for size in ((2, 1), (1, 2)))
        images = functional.avg_pool2d(one, (1, 2))
        both, sides = _squares(images), _squares(one) + _squares(other)
        found += [sides - 2 * both, own - sides + both]
    whole, grey = torch.stack(found, 2)
    return whole, grey


def _squares(images: Tensor) -> Tensor:
    """Mean squares of images [n, c, …], and of the means of their channels [2, n]."""
    flat = images.flatten(2)
    return torch.stack((flat.square().mean((1, 2)), flat.mean(1).square().mean(1)))

"""Linear filters, zooms and warps of batches of images [n, c, h, w], on the device they are on."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def to_bytes(images: Tensor) -> Tensor:
    """⌊255 x⌋ in [0, 255]; the margin keeps float32 from losing a unit if 255 x is whole."""
    return (images.clamp(0, 1) * 255 + 1e-3).floor()


def pixel_grid(images: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column [h, w] of each pixel."""
    height, width = images.shape[2:]
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return y.to(images.device), x.to(images.device)


def _both(images: Tensor, matrix: Callable[[int], Tensor]) -> Tensor:
    """A x Bᵀ, a linear map along each axis: ``matrix`` gives it [out, size] for the size of the
    axis.
    """
    rows, columns = (matrix(size).to(images) for size in images.shape[2:])
    return rows @ images @ columns.T


def blur(images: Tensor, sigma: float, mirrored: bool = False, truncate: float = 4) -> Tensor:
    """Gaussian blur cut at ``truncate`` deviations; borders repeated (aaa|abc) or mirrored
    (cba|abc).
    """
    reach = int(truncate * sigma + 0.5)

    def matrix(size: int) -> Tensor:
        places = torch.arange(size)[:, None] + torch.arange(-reach, reach + 1)
        turned = places % (2 * size)
        places = (
            torch.minimum(turned, 2 * size - 1 - turned) if mirrored else places.clamp(0, size - 1)
        )
        return torch.zeros(size, size).scatter_add(1, places, _bell(sigma, reach).expand(size, -1))

    return _both(images, matrix)


def _bell(sigma: float, reach: int) -> Tensor:
    """exp(-i² / 2σ²), normalised; [2 reach + 1]."""
    return torch.softmax(-(torch.arange(-reach, reach + 1) ** 2) / (2 * sigma**2), 0)


def disc(radius: float, alias: float, grown: float = 1) -> Tensor:
    """A disc of total weight 1, blurred over one pixel (two if the radius is above 8); [k, k].

    As published, a radius of 8 or more leaves no margin: the blur mirrors the disc there.
    """
    reach = math.ceil(grown) * (1 if radius <= 8 * grown else 2)
    whole = min(math.ceil(max(radius, 8 * grown)), math.ceil(radius) + reach)
    line = torch.arange(-whole, whole + 1)
    inside = (line[:, None] ** 2 + line**2 <= radius**2).float()
    bell = _bell(alias, reach)
    padded = F.pad((inside / inside.sum())[None, None], (reach,) * 4, mode="reflect")
    return F.conv2d(padded, torch.outer(bell, bell)[None, None])[0, 0]


def correlate(images: Tensor, kernel: Tensor, mode: str = "reflect") -> Tensor:
    """Correlation of each channel with a kernel [k, k], borders mirrored about the last pixel."""
    padded, channels = F.pad(images, (len(kernel) // 2,) * 4, mode=mode), images.shape[1]
    kernels = kernel.to(images).expand(channels, 1, -1, -1)
    with _exactly():
        return F.conv2d(padded, kernels, groups=channels)


@contextmanager
def _exactly() -> Iterator[None]:
    """Convolutions of float32 in float32, whatever a model's may be in."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def take(images: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """The pixels at rows and columns [n, h, w], clamped to the image."""
    height, width = images.shape[2:]
    places = y.clamp(0, height - 1) * width + x.clamp(0, width - 1)
    return (
        images.flatten(2)
        .gather(2, places.flatten(1)[:, None].expand(-1, images.shape[1], -1))
        .view_as(images)
    )


def streak(images: Tensor, radius: float, sigma: float, degrees: Tensor) -> Tensor:
    """Σ_i k_i x(p + i u), i = 0 … 2r, k a half Gaussian and u the direction of an angle [n], to the
    nearest pixel.
    """
    reach = 2 * math.ceil(radius)
    weights = torch.softmax(-(torch.arange(reach + 1) ** 2) / (2 * sigma**2), 0).tolist()
    y, x = pixel_grid(images)
    down, right = degrees.deg2rad().sin()[:, None, None], degrees.deg2rad().cos()[:, None, None]
    made = torch.zeros_like(images)
    for i, weight in enumerate(weights):
        made += weight * take(
            images, y + (i * down - 0.5).ceil().long(), x + (i * right - 0.5).ceil().long()
        )
    return made


def zoom(images: Tensor, factor: float) -> Tensor:
    """The middle of the image enlarged to its size, linearly between pixel centres."""

    def matrix(size: int) -> Tensor:
        kept = math.ceil(size / factor)
        out = round(kept * factor)
        places = (size - kept) // 2 + (torch.arange(size) + (out - size) // 2) * (
            (kept - 1) / (out - 1)
        )
        return (1 - (places[:, None] - torch.arange(size)).abs()).clamp(min=0)

    return _both(images, matrix)


def resize(images: Tensor, height: int, width: int) -> Tensor:
    """Box filter over whole pixels, as pillow's, rounded to 8 bits after each axis."""

    def matrix(size: int, out: int) -> Tensor:
        step = size / out
        centre, reach = (torch.arange(out).double()[:, None] + 0.5) * step, max(step, 1) / 2
        pixel = torch.arange(size)
        inside = (pixel >= (centre - reach + 0.5).floor()) & (
            pixel < (centre + reach + 0.5).floor()
        )
        return inside / inside.sum(1, keepdim=True)

    wide = (255 * images @ matrix(images.shape[3], width).to(images).T + 1e-3).round()
    return (matrix(images.shape[2], height).to(images) @ wide + 1e-3).round() / 255


def affine_grid(images: Tensor, moves: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns [n, h, w] under the map that takes three points, moved by [n, 3, 2], back to
    where they were.
    """
    height, width = images.shape[2:]
    third = min(height, width) // 3
    corners = images.new_tensor([[1, 1], [1, -1], [-1, -1]]) * third + images.new_tensor(
        [width // 2, height // 2]
    )
    back = torch.linalg.solve(
        F.pad(corners + moves, (0, 1), value=1), corners.expand(len(images), -1, -1)
    )  # [n, 3, 2]
    y, x = pixel_grid(images)
    points = torch.stack([x, y, torch.ones_like(x)], -1).to(images)
    x, y = torch.einsum("hwi,nij->jnhw", points, back)
    return y, x


def sample(images: Tensor, y: Tensor, x: Tensor, edges: bool) -> Tensor:
    """Linear interpolation at rows and columns [n, h, w], mirrored about the edges or about the
    centres of the last pixels.
    """
    height, width = images.shape[2:]
    y, x = (
        ((2 * y + 1) / height - 1, (2 * x + 1) / width - 1)
        if edges
        else (2 * y / (height - 1) - 1, 2 * x / (width - 1) - 1)
    )
    return F.grid_sample(
        images, torch.stack([x, y], -1), padding_mode="reflection", align_corners=not edges
    )

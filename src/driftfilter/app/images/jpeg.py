"""JPEG there and back, as libjpeg does it by default: integers, chroma halved."""

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

# The tables of the standard's annex K, row by row.
_LUMA = (
    *(
        16,
        11,
        10,
        16,
        24,
        40,
        51,
        61,
        12,
        12,
        14,
        19,
        26,
        58,
        60,
        55,
        14,
        13,
        16,
        24,
        40,
        57,
        69,
        56,
    ),
    *(14, 17, 22, 29, 51, 87, 80, 62),
    *(18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92),
    *(49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99),
)
_CHROMA = (
    17,
    18,
    24,
    47,
    *[99] * 4,
    18,
    21,
    26,
    66,
    *[99] * 4,
    24,
    26,
    56,
    *[99] * 5,
    47,
    66,
    *[99] * 38,
)
_TO_YCC = torch.tensor(
    [[0.299, 0.587, 0.114], [-0.168735892, -0.331264108, 0.5], [0.5, -0.418687589, -0.081312411]]
)


def recompress(pixels: Tensor, quality: int) -> Tensor:
    """Bytes [n, 3, h, w] through JPEG and back: YCbCr, chroma halved, cosine transform of 8×8
    blocks, quantised.
    """
    height, width = pixels.shape[2:]
    padded = F.pad(pixels, (0, -width % 16, 0, -height % 16), mode="replicate")
    luma, blue, red = (_TO_YCC.to(pixels) @ padded.flatten(2)).view_as(padded).unbind(1)
    luma = _quantise(luma.round(), _LUMA, quality)
    blue, red = (
        _double(_quantise(_halve((part + 128).round()), _CHROMA, quality)) - 128
        for part in (blue, red)
    )
    shift = (-0.344136 * blue - 0.714136 * red).round()
    parts = [luma + (1.402 * red).round(), luma + shift, luma + (1.772 * blue).round()]
    return torch.stack(parts, 1)[..., :height, :width].clamp(0, 255)


def _quantise(values: Tensor, table: tuple[int, ...], quality: int) -> Tensor:
    """Bytes [n, h, w] with the cosine transform of each 8×8 block rounded to multiples of the table
    at this quality.
    """
    n, height, width = values.shape
    percent = 5000 // quality if quality < 50 else 200 - 2 * quality
    steps = ((torch.tensor(table).view(8, 8) * percent + 50) // 100).clamp(1, 255).to(values)
    line = torch.arange(8).double()
    cosine = torch.cos(math.pi / 8 * (line + 0.5) * line[:, None]) / 2
    cosine[0] /= math.sqrt(2)
    cosine = cosine.to(values)
    blocks = values.view(n, height // 8, 8, width // 8, 8).transpose(2, 3) - 128
    fine = 4 * math.sqrt(8)
    # libjpeg has integers between the two axes, and 8 to the unit after: they decide many halves.
    scaled = (cosine @ (fine * blocks @ cosine.T).round() * (8 / fine)).round() / (8 * steps)
    kept = scaled.sign() * (scaled.abs() + 0.5 + 1e-5).floor() * steps
    made = (
        ((fine * cosine.T @ kept).round() @ cosine / fine + 128 + 0.5 + 1e-4).floor().clamp(0, 255)
    )
    return made.transpose(2, 3).reshape_as(values)


def _halve(values: Tensor) -> Tensor:
    """Mean of 2×2 bytes [n, h, w], halves rounded down and up in turn along a row."""
    total = 4 * F.avg_pool2d(values[:, None], 2)[:, 0]
    return ((total + 1 + torch.arange(total.shape[2], device=values.device) % 2) / 4).floor()


def _double(values: Tensor) -> Tensor:
    """Enlarged [n, h, w] -> [n, 2h, 2w] with weights 3/4 and 1/4, halves rounded up and down in
    turn along a row.
    """
    made = 16 * F.interpolate(values[:, None], scale_factor=2.0, mode="bilinear")[:, 0]
    return ((made.round() + 8 - torch.arange(made.shape[2], device=values.device) % 2) / 16).floor()

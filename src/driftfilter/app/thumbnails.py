"""A handful of samples to look at: the most and the least certain, as thumbnails of 8 bits or as
rows of numbers.
"""

import math
import struct
import zlib
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]

EACH = 6  # most certain, and as many least certain
PIXELS = 64  # of the longer side of a thumbnail
VALUES = 8  # of a row


def find_extremes(entropy: NDArray[Any], each: int = EACH) -> tuple[NDArray[Any], NDArray[Any]]:
    """The samples of lowest and of highest entropy [n], no sample twice; those without one (NaN)
    are left out.
    """
    order = np.argsort(entropy, kind="stable")[: int(np.isfinite(entropy).sum())]
    count = min(each, (len(order) + 1) // 2)
    return order[:count], order[max(count, len(order) - each) :][::-1]


def is_image(sample: NDArray[Any]) -> bool:
    """Whether a sample has height and width: [h, w], or [c, h, w] with 1, 3 or 4 channels."""
    return min(sample.shape) > 0 and (
        (sample.ndim == 3 and sample.shape[0] in (1, 3, 4))
        or (sample.ndim == 2 and min(sample.shape) > 7)
    )


def thumbnail(sample: NDArray[Any]) -> Bytes:
    """Pixels [h, w, 3] of an image, shrunk by means over squares; floats outside [0, 1] are
    stretched over what they span.
    """
    image = np.moveaxis(sample[None] if sample.ndim == 2 else sample, 0, 2)
    small = _shrink(_scale(image), math.ceil(max(image.shape[:2]) / PIXELS))
    colors = small[..., :3] if small.shape[2] >= 3 else small[..., :1].repeat(3, 2)
    return np.round(255 * colors).astype(np.uint8)


def _scale(image: NDArray[Any]) -> NDArray[np.float64]:
    """Values of an image in [0, 1]."""
    if image.dtype == np.uint8:
        return image / 255.0
    values = np.nan_to_num(image.astype(np.float64))
    low, high = values.min(), values.max()
    return values if low >= 0 and high <= 1 else (values - low) / max(high - low, 1e-300)


def _shrink(image: NDArray[np.float64], factor: int) -> NDArray[np.float64]:
    height, width = (size - size % factor for size in image.shape[:2])
    if factor == 1 or not height or not width:
        return image[:PIXELS, :PIXELS]  # a line of pixels has no squares
    blocks = image[:height, :width].reshape(height // factor, factor, width // factor, factor, -1)
    return np.asarray(blocks.mean((1, 3)))


def png(pixels: Bytes) -> bytes:
    """A PNG file of pixels [h, w, 3]."""
    height, width, _ = pixels.shape
    lines = np.concatenate(
        (np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)), 1
    )  # 0: no filter
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0),
        b"IDAT": zlib.compress(lines.tobytes(), 9),
        b"IEND": b"",
    }
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks.items()
    )

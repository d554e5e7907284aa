"""What a model makes of samples as they lie in files: pictures of one size, tokens of texts."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import numpy as np

from driftfilter.app.images.files import Bytes
from driftfilter.app.readers.stored import Arrays, Raw, stack
from driftfilter.app.readers.together import do_together
from driftfilter.base.checks import require

Size: TypeAlias = int | tuple[int, int]  # of the shorter side, or height and width


@final
@dataclass(frozen=True)
class Fit:
    """Pictures resized and cropped about their centre, as Pillow does it; all else stays as it is.

    ``resize`` is the shorter side, or height and width. None leaves a step out.
    """

    resize: Size | None = None
    crop: Size | None = None
    interpolation: str = "bilinear"

    def __call__(self, raw: Raw) -> Arrays:
        if isinstance(raw, list):
            return stack(do_together(self._fit_picture, raw))
        if isinstance(raw, dict) or raw.dtype != np.uint8:
            return raw
        return np.stack(do_together(self._fit, list(raw)))

    def _fit_picture(self, sample: Any) -> Any:  # a text stays one, for an error to name
        return sample if isinstance(sample, str) else self._fit(sample)

    def _fit(self, pixels: Bytes) -> Bytes:
        """The picture [h, w, 3], resized and cropped."""
        height, width = self._find_size(*pixels.shape[:2])
        if (height, width) != pixels.shape[:2]:
            from PIL import Image

            how = Image.Resampling[self.interpolation.upper()]
            resized = Image.fromarray(pixels).resize((width, height), how)
            pixels = np.asarray(resized)
        if self.crop is None:
            return pixels
        tall, wide = (self.crop, self.crop) if isinstance(self.crop, int) else self.crop
        require(
            tall <= height and wide <= width,
            "crop",
            self.crop,
            f"within the resized picture, {height} x {width}",
        )
        top, left = round((height - tall) / 2), round((width - wide) / 2)
        return pixels[top : top + tall, left : left + wide]

    def _find_size(self, height: int, width: int) -> tuple[int, int]:
        if self.resize is None:
            return height, width
        if not isinstance(self.resize, int):
            return self.resize
        short = min(height, width)
        return int(self.resize * height / short), int(self.resize * width / short)


@final
@dataclass(frozen=True)
class Tokens:
    """Texts as a tokenizer's arrays by name; all else stays as it is."""

    name: str  # of the tokenizer, by which two are told apart
    encode: Callable[[list[str]], Arrays] = field(compare=False, repr=False)

    def __call__(self, raw: Raw) -> Arrays:
        if not isinstance(raw, list):
            return raw
        texts: list[Any] = [each for each in raw if isinstance(each, str)]
        require(len(texts) == len(raw), "samples", "pictures", "texts, for a model of texts")
        return self.encode(texts)

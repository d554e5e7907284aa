"""What is done to samples before a model gets them."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from driftfilter.app.readers.fit import Fit, Tokens
from driftfilter.app.readers.together import do_together
from small_data import pixels


@pytest.mark.parametrize("size", [(40, 60), (60, 40), (37, 37)])
def test_resize_and_crop_are_those_of_pillow(size: tuple[int, int]) -> None:
    """The shorter side to 32 with the proportions kept, then the middle 24 x 24."""
    found = Fit(32, 24, "bicubic")([pixels(0, size), pixels(1, size)])
    assert isinstance(found, np.ndarray)
    height, width = (int(32 * side / min(size)) for side in size)
    for seed, each in enumerate(found):
        image = Image.fromarray(pixels(seed, size))
        whole = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
        top, left = round((height - 24) / 2), round((width - 24) / 2)
        assert np.array_equal(each, whole[top : top + 24, left : left + 24])


def test_pictures_of_unlike_sizes_become_one_array() -> None:
    found = Fit((20, 30))([pixels(0, (9, 12)), pixels(1, 40)])
    assert isinstance(found, np.ndarray)
    assert found.shape == (2, 20, 30, 3)
    with pytest.raises(ValueError, match="crop must be within the resized picture, 9 x 12, got 10"):
        Fit(None, 10)([pixels(0, (9, 12))])


def test_only_pictures_are_fitted() -> None:
    windows = np.zeros((2, 3, 4), np.float32)
    assert Fit(32)(windows) is windows
    assert Fit(32)({"x": windows}) == {"x": windows}
    with pytest.raises(ValueError, match="samples must be arrays, or a model with a tokenizer"):
        Fit(32)(["a text"])


def test_texts_are_tokenised_and_pictures_are_not() -> None:
    tokens = Tokens("words", lambda texts: {"n": np.array([len(text.split()) for text in texts])})
    found = tokens(["one", "one two"])
    assert isinstance(found, dict)
    assert found["n"].tolist() == [1, 2]
    with pytest.raises(ValueError, match="samples must be texts, for a model of texts"):
        tokens([pixels(0)])


def test_together_keeps_the_order_and_tells_of_errors() -> None:
    assert do_together(lambda number: number**2, range(100)) == [i**2 for i in range(100)]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        do_together(lambda name: Path(name).read_text(), ["nowhere", "nowhere"])

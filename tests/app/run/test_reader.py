"""From files and lines to what a model takes."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from driftfilter.app.run.reader import Form, Lines, StoredFeed, open_feed, open_labels, shapes_of


def numbers(*shape: int, dtype: Any = np.float32) -> NDArray[Any]:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


@pytest.mark.parametrize("start", [0, 4, 7])
def test_batches_of_an_array(start: int, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", numbers(7, 2))
    feed = open_feed(str(tmp_path / "x.npy"))
    found = [(batch.rows, batch.read()) for batch in feed.batches(3, start)]
    assert [rows for rows, _ in found] == {0: [3, 3, 1], 4: [3], 7: []}[start]
    assert np.array_equal(
        np.concatenate([numbers(0, 2), *(part for _, part in found)]), numbers(7, 2)[start:]
    )
    with pytest.raises(
        ValueError, match="samples must be at least the 8 that the checkpoint has seen, got 7"
    ):
        feed.batches(3, 8)


def test_arrays_of_an_npz(tmp_path: Path) -> None:
    path, labels, own = tmp_path / "x.npz", np.array([0, 1, 1]), numbers(3, 2)
    np.savez(path, a=own, b=own, y=labels)
    with pytest.raises(
        ValueError, match=r"must be an .npz with 'x' or 'images'.* got \['a', 'b'\]"
    ):
        open_feed(str(path))
    cases: list[dict[str, Any]] = [{"x": own, "other": own + 1}, {"images": own}, {"mine": own}]
    for arrays in cases:
        np.savez(path, **arrays, y=labels)
        feed = open_feed(str(path))
        assert np.array_equal(Form()(next(feed.batches(3, 0)).read()).numpy(), numbers(3, 2))
        assert feed.labels is not None
        assert feed.labels.tolist() == labels.tolist()


@pytest.mark.parametrize(
    "array", [np.ones(3), np.ones((0, 2)), np.array([["a"]]), np.ones((2, 2), complex)], ids=str
)
def test_arrays_that_are_no_samples(array: NDArray[Any], tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(ValueError, match="must be an array of numbers"):
        open_feed(str(tmp_path / "x.npy"))


def test_lines_by_name() -> None:
    lines = [b'{"ids": [1, 2], "gate": [0.5]}', b"", b"  ", b'{"ids": [3, 4], "gate": [1]}']
    text = b"\n".join((*lines, b'{"ids": [5, 6], "gate": [2]}\n'))
    (batch,) = list(Lines(io.BytesIO(text), frozenset({"ids"})).batches(2, 1))
    raw = batch.read()
    assert isinstance(raw, dict)
    inputs = Form()(raw)
    assert torch.equal(inputs["ids"], torch.tensor([[3, 4], [5, 6]]))
    assert torch.equal(inputs["gate"], torch.tensor([[1.0], [2.0]]))
    assert shapes_of(inputs) == {"ids": [2], "gate": [1]}
    with pytest.raises(
        ValueError,
        match="stdin: samples must be at least the 4 that the checkpoint has seen, got 3",
    ):
        next(Lines(io.BytesIO(text)).batches(2, 4))


IMAGES = numbers(2, 6, 5, 3, dtype=np.uint8)
FORMS: dict[str, tuple[Form, NDArray[Any], NDArray[Any]]] = {
    "8-bit images": (
        Form(),
        IMAGES,
        IMAGES.transpose(0, 3, 1, 2).astype(np.float32) / np.float32(255),
    ),
    "channels first": (
        Form(),
        numbers(2, 3, 4, 5, dtype=np.uint8),
        numbers(2, 3, 4, 5) / np.float32(255),
    ),
    "both look like channels": (
        Form(),
        numbers(2, 3, 4, 3, dtype=np.uint8),
        numbers(2, 3, 4, 3) / np.float32(255),
    ),
    "told to be last": (
        Form(layout="last"),
        numbers(2, 3, 4, 3),
        numbers(2, 3, 4, 3).transpose(0, 3, 1, 2),
    ),
    "told to be first": (Form(layout="first"), IMAGES, IMAGES / np.float32(255)),
    "gray": (Form(), numbers(2, 4, 5, dtype=np.uint8), numbers(2, 4, 5) / np.float32(255)),
    "bytes, no image": (Form(), numbers(2, 4, dtype=np.uint8), numbers(2, 4, dtype=np.int64)),
    "integers": (Form(), numbers(2, 4, dtype=np.int32), numbers(2, 4, dtype=np.int64)),
    "scaled integers": (Form(scale=0.5), numbers(2, 4, dtype=np.int32), numbers(2, 4) / 2),
    "scaled images": (Form(scale=1.0), IMAGES, IMAGES.transpose(0, 3, 1, 2).astype(np.float32)),
    "float64": (Form(), numbers(2, 4, dtype=np.float64), numbers(2, 4)),
    "float64 model": (Form(torch.float64), numbers(2, 4), numbers(2, 4, dtype=np.float64)),
    "half": (Form(), numbers(2, 4, dtype=np.float16), numbers(2, 4)),
}


@pytest.mark.parametrize("case", FORMS)
def test_forms(case: str) -> None:
    form, raw, expected = FORMS[case]
    tensor = form(raw)
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % 64 == 0
    assert tensor.numpy().dtype == expected.dtype
    assert np.array_equal(tensor.numpy(), expected)


def test_other_byte_order(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", numbers(3, 2).astype(">f4"))
    assert np.array_equal(
        Form()(next(open_feed(str(tmp_path / "x.npy")).batches(3, 0)).read()).numpy(), numbers(3, 2)
    )


def test_bounds() -> None:
    form = Form(within=(0.0, 5.0))
    form(numbers(2, 3))
    with pytest.raises(ValueError, match=r"inputs must be in \[0, 5\], got '6 at index \[1, 2\]'"):
        form(numbers(2, 3) + 1)


def test_pictures_in_the_order_of_their_names(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name, value in (("b.png", 2), ("a.png", 1), ("c.jpg", 3), (".d.png", 4)):
        image.fromarray(np.full((4, 5, 3), value, np.uint8)).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no picture")
    feed = open_feed(str(tmp_path))
    assert isinstance(feed, StoredFeed)
    assert feed.take(0, 3)[:, 0, 0, 0].tolist() == [1, 2, 3]
    (tmp_path / "b.png").write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"b\.png must be a picture that can be read"):
        feed.take(0, 2)
    image.fromarray(np.zeros((4, 6, 3), np.uint8)).save(tmp_path / "b.png")
    with pytest.raises(
        ValueError,
        match=r"samples of a batch must be of one shape, got 'shapes \[\[4, 5, 3\], \[4, 6, 3\]\]'",
    ):
        feed.take(0, 2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="must be a folder of pictures"):
        open_feed(str(tmp_path / "empty"))


def test_labels(tmp_path: Path) -> None:
    np.save(tmp_path / "y.npy", np.array([0, 2], np.uint8))
    np.savez(tmp_path / "y.npz", y=np.array([0, 2]))
    for name in ("y.npy", "y.npz"):
        assert open_labels(tmp_path / name, 2).tolist() == [0, 2]
        with pytest.raises(ValueError, match="must be 3 integer labels"):
            open_labels(tmp_path / name, 3)
    np.savez(tmp_path / "z.npz", z=np.array([0, 2]))
    with pytest.raises(ValueError, match=r"must be an \.npz with 'labels' or 'y'"):
        open_labels(tmp_path / "z.npz", 2)

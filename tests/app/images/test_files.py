"""CIFAR-10's pickles, genuine and hostile."""

import pickle
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from driftfilter.app.images.files import digest, open_batch
from driftfilter.app.streams import Generated, open_cifar10, open_domains

DATA = np.random.default_rng(0).integers(0, 256, (6, 3072), dtype=np.uint8)
LABELS = [3, 0, 9, 1, 1, 5]


_PICKLER: Any = vars(pickle)[
    "_Pickler"
]  # the one written in Python, which can be told how to write


class _Python2(_PICKLER):  # type: ignore[misc]
    """Writes strings and bytes as Python 2 wrote its strings, and numpy's old module names, as in
    the published file.
    """

    dispatch: ClassVar = dict(_PICKLER.dispatch)

    def save_string(self, text: Any) -> None:
        """BINSTRING, whatever the kind of string."""
        content = text.encode() if isinstance(text, str) else bytes(text)
        self.write(pickle.BINSTRING + len(content).to_bytes(4, "little") + content)
        self.memoize(text)

    dispatch[str] = dispatch[bytes] = save_string


def _as_python2(value: Any) -> bytes:
    buffer = BytesIO()
    _Python2(buffer, protocol=2).dump(value)
    return buffer.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


@pytest.mark.parametrize("kind", ["python2", "bytes", "strings"])
def test_batches_are_read(tmp_path: Path, kind: str) -> None:
    batch = {
        "batch_label": "testing batch 1 of 1",
        "labels": LABELS,
        "data": DATA,
        "filenames": ["a.png"] * 6,
    }
    contents = {
        "python2": lambda: _as_python2(batch),
        "bytes": lambda: pickle.dumps(
            {key.encode(): value for key, value in batch.items()}, protocol=2
        ),
        "strings": lambda: pickle.dumps(batch),
    }
    (tmp_path / "test_batch").write_bytes(contents[kind]())
    images, labels = open_cifar10(tmp_path)
    assert torch.equal(
        (255 * images).round().long(), torch.from_numpy(DATA).view(6, 3, 32, 32).long()
    )
    assert labels.tolist() == LABELS
    assert isinstance(open_domains(tmp_path), Generated)


class _Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("harm"),)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({"data": DATA, "labels": _Harm()}), "a pickle that wants pathlib"),
        (pickle.dumps({"data": DATA}), "KeyError: 'labels'"),
        (pickle.dumps([1, 2]), "AttributeError"),
        (
            pickle.dumps({"data": DATA, "labels": LABELS})[:-500],
            "must be a batch of CIFAR-10's or CIFAR-100's python version",
        ),
        (b"no pickle", "must be a batch of CIFAR-10's or CIFAR-100's python version"),
        (
            pickle.dumps({"data": DATA / 255, "labels": LABELS}),
            "got 'data of float64 \\[6, 3072\\]'",
        ),
        (
            pickle.dumps({"data": DATA[:, :100], "labels": LABELS}),
            "got 'data of uint8 \\[6, 100\\]'",
        ),
        (
            pickle.dumps({"data": DATA, "labels": LABELS[:5]}),
            "labels must be 6 integer labels .* got \\[5\\]",
        ),
        (
            pickle.dumps({"data": DATA, "labels": [*LABELS[:5], 10]}),
            "labels must be .* from 0 to 10 - 1, got 'labels from 0 to 10'",
        ),
    ],
    ids=["harm", "no-labels", "list", "truncated", "text", "floats", "shape", "length", "range"],
)
def test_other_pickles_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_batch").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        open_batch(tmp_path / "test_batch")
    assert "test_batch" in str(caught.value)
    assert not (tmp_path / "harm").exists()


def test_digest_is_that_of_the_contents(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a" * 3_000_000)
    (tmp_path / "b").write_bytes(b"bc")
    (tmp_path / "both").write_bytes(b"a" * 3_000_000 + b"bc")
    assert digest([tmp_path / "a", tmp_path / "b"]) == digest([tmp_path / "both"])
    assert digest([tmp_path / "b"], "md5") == "5360af35bde9ebd8f01f492dc059593c"

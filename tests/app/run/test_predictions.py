"""Files that only grow, and what is said of predictions."""

import resource
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from scipy.special import entr, log_softmax

from driftfilter.app.run.predictions import Predictions, columns
from driftfilter.storage.append_log import AppendLog

LOGS = log_softmax(np.random.default_rng(0).normal(size=(7, 3)) * 3, axis=1)


def test_a_journal_is_cut_to_what_is_covered(tmp_path: Path) -> None:
    path = tmp_path / "a"
    journal = AppendLog(path)
    journal.append(b"one ")
    size = journal.sync()
    journal.append(b"two ")
    assert path.read_bytes() == b"one two "  # before it is closed
    journal.close()
    again = AppendLog(path, size)
    again.append(b"three")
    assert (path.read_bytes(), again.sync()) == (b"one three", 9)
    again.close()
    with pytest.raises(
        ValueError,
        match="must be of at least the 10 bytes that the checkpoint covers, got '9 bytes'",
    ):
        AppendLog(path, 10)
    assert path.read_bytes() == b"one three"


def test_a_journal_that_cannot_grow_is_named(tmp_path: Path) -> None:
    journal, (soft, hard) = AppendLog(tmp_path / "a"), resource.getrlimit(resource.RLIMIT_FSIZE)
    journal.append(b"good")
    resource.setrlimit(resource.RLIMIT_FSIZE, (6, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*/a'"):
            journal.append(b"too long")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    journal.close()
    AppendLog(tmp_path / "a", 4).close()
    assert (tmp_path / "a").read_bytes() == b"good"


def test_columns() -> None:
    logs = LOGS.copy()
    logs[2] = np.nan
    logs[4] = [0, -np.inf, -np.inf]
    said = columns(logs)
    probabilities = np.exp(logs)
    assert said.label.tolist() == [
        -1 if i == 2 else int(probabilities[i].argmax()) for i in range(7)
    ]
    np.testing.assert_array_equal(said.probability, probabilities.max(1))
    np.testing.assert_allclose(said.entropy, entr(probabilities).sum(1), rtol=1e-12, atol=0)
    assert said.entropy[4] == 0


@pytest.mark.parametrize("kind", ["npz", "csv"])
@pytest.mark.parametrize("first", [0, 2], ids=["at-once", "later"])
def test_predictions_across_a_resume(
    kind: Literal["npz", "csv"], first: int, tmp_path: Path
) -> None:
    """Skipped samples keep their rows, before the number of classes is known and after; a resume
    may come in between.
    """

    def opened(rows: int, classes: int, size: int) -> Predictions:
        return Predictions(tmp_path, kind, "float64", rows, classes, size)

    said = opened(0, 0, 0)
    said.skip(first)
    size = said.log.sync()
    said.log.close()
    said = opened(first, 0, size)
    said.append(LOGS[:4])
    size = said.log.sync()
    said.append(LOGS[:1])  # lost
    said.log.close()
    said = opened(first + 4, 3, size)
    said.skip(2)
    said.append(LOGS[4:])
    path = said.export()
    said.log.close()
    empty = np.full((1, 3), np.nan)
    expected = columns(np.concatenate([*[empty] * first, LOGS[:4], empty, empty, LOGS[4:]]))
    if kind == "npz":
        with np.load(path) as found:
            for name, values in expected._asdict().items():
                np.testing.assert_array_equal(found[name], values)
    else:
        table = np.genfromtxt(path, delimiter=",", names=True)
        assert table["row"].tolist() == list(range(first + 9))
        for name in ("label", "probability", "entropy"):
            np.testing.assert_array_equal(table[name], getattr(expected, name))
        np.testing.assert_array_equal(
            np.stack([table[f"p{k}"] for k in range(3)], 1), expected.probabilities
        )


def test_nothing_but_skipped_samples(tmp_path: Path) -> None:
    said = Predictions(tmp_path, "npz", "float32", 0, 0, 0)
    said.skip(3)
    with np.load(said.export()) as found:
        assert found["label"].tolist() == [-1, -1, -1]
        assert np.isnan(found["probability"]).all()
    said.log.close()


def test_another_number_of_classes(tmp_path: Path) -> None:
    said = Predictions(tmp_path, "npz", "float32", 0, 0, 0)
    said.append(LOGS)
    with pytest.raises(
        ValueError, match="the model's classes must be 3, as they were before, got 2"
    ):
        said.append(LOGS[:, :2])
    said.log.close()

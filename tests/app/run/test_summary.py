"""What a run records for its report: the frozen source, quality, classes, samples to look at."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from driftfilter.app import metrics
from own_model import (
    BATCH,
    LABELS,
    N,
    assert_equal,
    bad,
    expected,
    network,
    predictions,
    run,
    samples,
    saving_only,
    steps,
    summary,
)

NAMES = ("left", "right", "über <b>")


@pytest.fixture
def folder(folder: Path) -> Path:
    """The current folder, with names of the classes in it, too."""
    (folder / "names.txt").write_text("\n".join(NAMES) + "\n", encoding="utf-8")
    return folder


def frozen() -> NDArray[Any]:
    """Log-probabilities [n, k] of the model as it is."""
    with torch.no_grad():
        logs: NDArray[Any] = network()(torch.from_numpy(samples())).log_softmax(-1).numpy()
    return logs


FULL = ("--baseline", "--labels", "y.npy", "--classes", "names.txt")


def test_the_frozen_source_is_recorded_and_changes_nothing(folder: Path) -> None:
    assert run("--out", "with", *FULL) == 0
    assert run("--out", "without", "--labels", "y.npy") == 0
    assert (
        predictions("with")["probabilities"].tobytes()
        == predictions("without")["probabilities"].tobytes()
    )
    np.testing.assert_allclose(
        predictions("with", "baseline")["probabilities"], np.exp(frozen()), rtol=1e-5
    )
    right = frozen().argmax(1) == LABELS
    assert [line["baseline_right"] for line in steps("with")] == [
        int(right[i : i + BATCH].sum()) for i in range(0, N, BATCH)
    ]
    assert not Path("without/baseline.npz").exists()
    assert summary("without")["quality"]["before"] is None


@pytest.mark.parametrize("kind", ["npz", "csv"])
def test_quality_before_and_after(kind: str, folder: Path) -> None:
    assert run("--out", "o", *FULL, "--predictions", kind) == 0
    found, truth = summary("o"), torch.from_numpy(LABELS)
    for side, logs in (
        ("after", expected(list(torch.from_numpy(samples()).split(BATCH)))),
        ("before", frozen()),
    ):
        quality, logp = found["quality"][side], torch.from_numpy(logs)
        assert quality["n"] == N
        assert quality["accuracy"] == pytest.approx((logs.argmax(1) == LABELS).mean(), rel=1e-12)
        assert quality["nll"] == pytest.approx(-logs[np.arange(N), LABELS].mean(), rel=1e-5)
        assert quality["ece"] == pytest.approx(metrics.calibration_error(logp, truth), abs=1e-6)
        assert sum(quality["bins"]["samples"]) == N
    changed = predictions("o")["label"] != frozen().argmax(1) if kind == "npz" else None
    assert changed is None or found["changed"] == changed.mean()
    truths: NDArray[Any] = LABELS
    for place, row in enumerate(found["classes"]):
        assert row["name"] == NAMES[place]
        assert row["labeled"] == (truths == place).sum()
        assert row["baseline_predicted"] == (frozen().argmax(1) == place).sum()
        assert row["baseline_right"] == int(
            np.sum((frozen().argmax(1) == place) & (truths == place))
        )
    assert sum(row["right"] for row in found["classes"]) == round(
        N * found["quality"]["after"]["accuracy"]
    )


def test_without_labels_there_is_no_quality(folder: Path) -> None:
    assert run("--out", "o", "--baseline") == 0
    assert summary("o")["quality"] == {"after": None, "before": None}
    assert [row.keys() for row in summary("o")["classes"]] == [
        {"name", "predicted", "baseline_predicted"}
    ] * 3
    assert [row["name"] for row in summary("o")["classes"]] == ["0", "1", "2"]


def test_skipped_samples_are_left_out(folder: Path) -> None:
    np.save("bad.npy", bad("nan"))
    assert run("--out", "o", *FULL, "--on-bad-batch", "skip", data="bad.npy") == 3
    kept = np.delete(np.arange(N), slice(BATCH, 2 * BATCH))
    assert np.isnan(predictions("o", "baseline")["probability"][BATCH : 2 * BATCH]).all()
    found = summary("o")
    assert found["quality"]["after"]["n"] == found["quality"]["before"]["n"] == len(kept)
    assert found["quality"]["before"]["accuracy"] == pytest.approx(
        (frozen().argmax(1) == LABELS)[kept].mean()
    )
    assert sum(row["labeled"] for row in found["classes"]) == len(kept)
    with np.load("o/examples.npz") as examples:
        assert not set(examples["row"]) & set(range(BATCH, 2 * BATCH))


def test_a_run_of_bad_batches_alone(folder: Path) -> None:
    np.save("bad.npy", np.full((4, 5), np.nan, np.float32))
    np.save("y.npy", LABELS[:4])
    assert run("--out", "o", *FULL, "--on-bad-batch", "skip", data="bad.npy") == 3
    assert summary("o")["classes"] == []
    assert summary("o")["quality"] == {"after": None, "before": None}


@pytest.mark.parametrize("kind", ["npz", "csv"])
@pytest.mark.parametrize("covered", [0, 2])
def test_a_resumed_run_records_the_same(
    covered: int, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It failed in a save, with more in its journals than the checkpoint covers."""
    options = [*FULL, "--predictions", kind, "--checkpoint-every", "1"]
    assert run("--out", "whole", *options) == 0
    with saving_only(covered, monkeypatch):
        assert run("--out", "o", *options) == 1
    assert not Path("o/summary.json").exists()
    assert run("--out", "o", "--resume", *options) == 0
    for name in (f"baseline.{'part' if kind == 'npz' else 'csv'}", "movement.json"):
        assert (Path("o") / name).read_bytes() == (Path("whole") / name).read_bytes()
    if kind == "npz":
        assert_equal("o", "whole")
    one, other = ({**summary(out), "peak_memory_mb": 0} for out in ("o", "whole"))
    assert one == other


def test_an_old_summary_does_not_outlast_a_run_that_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("--out", "o") == 0
    np.save("x.npy", np.concatenate((samples(), samples())))

    with saving_only(0, monkeypatch):
        assert run("--out", "o", "--resume") == 1
    assert not any(
        (Path("o") / name).exists() for name in ("summary.json", "movement.json", "examples.npz")
    )


def test_a_run_goes_on_with_its_baseline_or_without(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--out", "o") == 0
    assert run("--out", "o", "--resume", "--baseline") == 1
    assert "--baseline must be False, as it was when the run began" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        (b"a\nb\n", 1, "--classes must be 3 names, one for each class of the model, got '2 names'"),
        (b"a\n\nb\n", 2, "one name a line, none of them empty"),
        (b"", 2, "one name a line, none of them empty"),
        (b"\xff\xfe\n", 2, "must be a text file in UTF-8"),
        (None, 2, "a text file that is there"),
    ],
    ids=["too few", "empty line", "empty", "bytes", "missing"],
)
def test_wrong_names(
    text: bytes | None, status: int, reason: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (folder / "wrong.txt").write_bytes(text)
    assert run("--out", "o", "--classes", "wrong.txt") == status
    assert reason in capsys.readouterr().err


def test_rows_to_look_at_are_those_of_the_data(folder: Path) -> None:
    assert run("--out", "o", *FULL) == 0
    order = np.argsort(predictions("o")["entropy"], kind="stable")
    with np.load("o/examples.npz") as found:
        assert found["row"].tolist() == [*order[:6], *order[:-7:-1]]
        assert found["most"].tolist() == [True] * 6 + [False] * 6
        assert (found["values"] == samples()[found["row"]]).all()
        assert (found["truth"] == LABELS[found["row"]]).all()
        assert (found["probability"] == predictions("o")["probability"][found["row"]]).all()


@pytest.mark.parametrize("layout", ["bytes", "floats"])
def test_thumbnails_are_the_pixels_of_the_data(layout: str, folder: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    np.save(
        "p.npy",
        pixels if layout == "bytes" else pixels.transpose(0, 3, 1, 2).astype(np.float32) / 255,
    )
    assert run("--out", "o", model="resnet20", data="p.npy", batch=4) == 0
    with np.load("o/examples.npz") as found:
        assert sorted(found["row"]) == list(range(6))
        assert (found["values"] == pixels[found["row"]]).all()
        assert (found["truth"] == -1).all()

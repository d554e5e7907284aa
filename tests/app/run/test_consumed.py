"""A resumed run goes on with the data, labels and logs that it had, or not at all."""

import io
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import driftfilter as df
from driftfilter.app.run import consumed
from driftfilter.app.run.reader import StoredFeed
from own_model import BATCH, LABELS, N, as_lines, assert_equal, run, samples, saving_only, steps

OPTIONS = ["--labels", "y.npy", "--baseline", "--checkpoint-every", "1"]


def begin(covered: int, monkeypatch: pytest.MonkeyPatch, out: str = "o") -> dict[str, bytes]:
    """A run whose last checkpoint covers so many steps; its folder."""
    with saving_only(covered, monkeypatch):
        assert run("--out", out, *OPTIONS) == 1
    return contents(out)


def contents(out: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(out).iterdir()}


def flip(path: str, place: int) -> None:
    data = bytearray(Path(path).read_bytes())
    data[place] ^= 4
    Path(path).write_bytes(data)


def put(array: NDArray[Any], name: str = "x.npy") -> None:
    np.save(name, array)


def changed(place: int) -> NDArray[Any]:
    array = samples()
    array[place, 3] = np.nextafter(array[place, 3], 9)
    return array


def other_checkpoint() -> None:
    """Of a run that is alike, and further."""
    assert run("--out", "other", *OPTIONS) == 0
    shutil.copy("other/state.safetensors", "o/state.safetensors")
    shutil.copy("other/predictions.part", "o/predictions.part")
    shutil.copy("other/baseline.part", "o/baseline.part")
    text = Path("other/steps.jsonl").read_bytes()
    Path("o/steps.jsonl").write_bytes(Path("o/steps.jsonl").read_bytes() + text)


CHANGES: dict[str, tuple[Callable[[], None], str]] = {
    "one number": (
        lambda: put(changed(13)),
        "samples 10 to 19 of the data must be those of step 1",
    ),
    "the last": (lambda: put(changed(29)), "samples 20 to 29 of the data must be those of step 2"),
    "order": (lambda: put(samples()[::-1]), "samples 0 to 9 of the data must be those of step 0"),
    "scale": (lambda: put(samples() * 2), "samples 0 to 9 of the data must be those of step 0"),
    "shape": (lambda: put(samples()[:, :4]), "samples 0 to 9 of the data must be those of step 0"),
    "integers": (lambda: put(samples().astype(int)), "samples 0 to 9 of the data must be those"),
    "labels": (
        lambda: put((LABELS + (np.arange(N) == 7)) % 3, "y.npy"),
        "labels of the first 30 samples must be as they were when the run began (checksum ",
    ),
    "predictions": (
        lambda: flip("o/predictions.part", 50),
        "o/predictions.part must be the 360 bytes that the checkpoint covers (checksum ",
    ),
    "baseline": (lambda: flip("o/baseline.part", 0), "o/baseline.part must be the 360 bytes that"),
    "steps": (lambda: flip("o/steps.jsonl", 99), "o/steps.jsonl must be the "),
    "another run's": (other_checkpoint, "o/steps.jsonl must be the "),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_changed_is_named_and_the_folder_stays_as_it_is(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(3, monkeypatch)
    change, message = CHANGES[case]
    change()
    before = contents("o")
    capsys.readouterr()
    assert run("--out", "o", "--resume", *OPTIONS) == 1
    told = capsys.readouterr().err
    assert message in told
    assert "got 'others (checksum " in told
    assert contents("o") == before


def test_what_the_run_has_not_seen_may_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(3, monkeypatch)
    put(np.concatenate((samples()[:30], changed(35)[30:], samples()[:4])))
    put(np.concatenate((LABELS[:30], (LABELS[30:] + 1) % 3, LABELS[:4])), "y.npy")
    with Path("o/predictions.part").open("ab") as file:
        file.write(b"what a killed run has left")
    assert run("--out", "o", "--resume", *OPTIONS) == 0
    assert run("--out", "whole", *OPTIONS) == 0
    without = [[line["inputs"] for line in steps(out)] for out in ("o", "whole")]
    assert without[0] == without[1]


def test_doubles_that_are_the_same_to_the_model_are_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("--out", "whole", *OPTIONS) == 0
    begin(3, monkeypatch)
    put(samples().astype(np.float64))
    assert run("--out", "o", "--resume", *OPTIONS) == 0
    assert_equal("o", "whole")


def test_lines_that_are_passed_over_are_those_of_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if a part of the run ended in the middle of a batch."""

    def part(array: NDArray[Any], *options: str) -> int:
        stdin = SimpleNamespace(buffer=io.BytesIO(as_lines(array)))
        monkeypatch.setattr(sys, "stdin", stdin)
        return run("--out", "o", *options, data="-")

    assert part(samples()[:15]) == 0
    assert part(samples()[15:23], "--resume", "--stdin-continues") == 0
    before = contents("o")
    assert part(changed(18), "--resume") == 1
    assert "samples 15 to 22 of the data must be those of step 2" in capsys.readouterr().err
    assert part(samples()[:21], "--resume") == 1
    assert "stdin: samples must be at least the 23 that" in capsys.readouterr().err
    assert contents("o") == before
    assert part(samples(), "--resume") == 0
    assert [line["n"] for line in steps("o")] == [10, 5, 8, 10, 10, 3]


def test_a_checkpoint_of_an_earlier_version_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("--out", "whole", *OPTIONS) == 0
    save = df.save

    def without(adapter: df.Adapter, path: Path, keep: int, notes: dict[str, Any]) -> None:
        old = {name: notes[name] for name in ("settled", "tally", "sizes")}
        save(adapter, path, keep, old)

    with monkeypatch.context() as patched:
        patched.setattr(df, "save", without, raising=False)
        begin(3, patched)
    assert run("--out", "o", "--resume", *OPTIONS) == 0
    assert_equal("o", "whole")


def test_reading_again_takes_no_longer_than_a_share_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps that are looked at are spread, and the last one is among them."""
    seen, now = [], 0.0

    def take(first: int, last: int) -> NDArray[Any]:
        nonlocal now
        now += 0.5  # seconds
        seen.append(first // BATCH)
        return np.arange(first, last)[:, None]

    clock = SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr(consumed, "time", clock)
    lines = [
        {"step": step, "n": BATCH, "ms": 1000.0}
        | {"inputs": consumed.sum_samples(np.arange(BATCH * step, BATCH * (step + 1))[:, None], "")}
        for step in range(1000)
    ]
    consumed._require_data(StoredFeed("x", 10_000, take), lines, "float32")
    assert 18 <= len(seen) <= 22  # 10 of 1,000 seconds
    assert seen[-1] == 999
    assert max(np.diff(seen)) < 70


# Links


@pytest.mark.parametrize("name", ["steps.jsonl", "predictions.part", "predictions.csv"])
@pytest.mark.parametrize("is_there", [True, False])
def test_logs_are_not_written_through_links(
    name: str, is_there: bool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("o").mkdir()
    if is_there:
        Path("precious").write_text("precious\n")
    Path("o", name).symlink_to(Path("precious").absolute())
    kind = "csv" if name.endswith("csv") else "npz"
    assert run("--out", "o", "--predictions", kind) == 1
    told = capsys.readouterr().err
    assert "a symbolic link to " in told
    assert "which is not written through" in told
    assert f"o/{name}" in told
    assert Path("precious").exists() == is_there
    assert not is_there or Path("precious").read_text() == "precious\n"


def test_other_files_of_a_run_take_the_place_of_links(folder: Path) -> None:
    Path("o").mkdir()
    Path("precious").write_text("precious")
    names = ("state.safetensors", "predictions.npz", "summary.json", "movement.json")
    for name in names:
        Path("o", name).symlink_to(Path("precious").absolute())
    assert run("--out", "o") == 0
    assert Path("precious").read_text() == "precious"
    assert not any(Path("o", name).is_symlink() for name in names)
    Path("elsewhere").mkdir()
    Path("link").symlink_to("elsewhere")  # a folder may be one
    assert run("--out", "link") == 0
    assert Path("elsewhere/predictions.npz").exists()

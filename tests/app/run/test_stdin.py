"""Lines on stdin that go on over several parts of a run: every sample is seen exactly once."""

import io
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import driftfilter as df
from driftfilter.app.run.reader import Lines, Place
from own_model import (
    BATCH,
    MODEL,
    N,
    as_lines,
    assert_equal,
    predictions,
    run,
    samples,
    saving_only,
    steps,
    summary,
)


class Pieces(io.RawIOBase):
    """Bytes that come in pieces; with some of them comes a signal."""

    def __init__(self, pieces: list[bytes], signals: frozenset[int] = frozenset()) -> None:
        self._pieces, self._signals, self._read = pieces, signals, 0

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        """Stay open: the next part of a run goes on with it."""

    def readinto(self, buffer: Any, /) -> int:
        self._read += 1
        if self._read - 1 in self._signals:
            signal.raise_signal(signal.SIGTERM)
        piece = self._pieces.pop(0) if self._pieces else b""
        assert len(piece) <= len(buffer)
        buffer[: len(piece)] = piece
        return len(piece)


class Stdin:
    """What is left of the pieces is there for the next part of a run."""

    def __init__(self, pieces: list[bytes], signals: frozenset[int] = frozenset()) -> None:
        self._raw = Pieces(pieces, signals)

    @property
    def buffer(self) -> io.BufferedReader:
        return io.BufferedReader(self._raw)


def cut(data: bytes, longest: int, rng: random.Random) -> list[bytes]:
    pieces: list[bytes] = []
    while data:
        size = rng.randint(1, longest)
        pieces, data = [*pieces, data[:size]], data[size:]
    return pieces


def parts(*options: str) -> Iterator[int]:
    """Statuses of the parts of a run, until it is at the end."""
    for _ in range(10):
        yield run("--out", "o", "--resume", "--stdin-continues", *options, data="-")
        if not summary("o")["signal"]:
            return


@pytest.mark.parametrize("longest", [1, 40, 700, 6000], ids="pieces up to {}".format)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("end", ["\n", "", "\r\n\n"], ids=["line", "no newline", "empty line"])
def test_every_sample_is_seen_once(
    longest: int, seed: int, end: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow writers and bursts, cut in the middle of lines, with stops at any of the pieces."""
    rng = random.Random(seed)
    pieces = cut(as_lines(samples()).rstrip() + end.encode(), longest, rng)
    stops = frozenset(rng.sample(range(len(pieces) + 1), min(4, len(pieces))))
    monkeypatch.setattr(sys, "stdin", Stdin(pieces, stops))
    assert set(parts()) == {0}
    assert run("--out", "whole") == 0
    assert_equal("o", "whole")


def test_a_stop_between_two_batches_of_a_backlog(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All has been read, nothing is left on stdin."""
    monkeypatch.setattr(sys, "stdin", Stdin([as_lines(samples())], frozenset({0})))
    assert list(parts()) == [0, 0]
    assert run("--out", "whole") == 0
    assert_equal("o", "whole")


def test_a_bad_batch_is_there_for_the_next_part(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = as_lines(samples()).splitlines(keepends=True)
    lines[13] = b"[1, 2,\n"
    rest = b"".join(lines)
    monkeypatch.setattr(sys, "stdin", Stdin([rest[:1500], rest[1500:]]))
    options = ("--out", "o", "--resume", "--stdin-continues")
    for _ in range(2):
        assert run(*options, data="-") == 1
    assert len(steps("o")) == 1
    assert run(*options, "--on-bad-batch", "skip", data="-") == 3
    np.save("bad.npy", np.where(np.arange(N)[:, None] == 13, np.nan, samples()))
    assert run("--out", "whole", "--on-bad-batch", "skip", data="bad.npy") == 3
    assert predictions("o")["label"].tolist() == predictions("whole")["label"].tolist()


def test_after_a_kill_no_line_is_made_of_two(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines that were read after the last checkpoint are lost; the run says so."""
    lines = as_lines(samples())
    pieces = [lines[:2100], lines[2100:2500], lines[2500:]]
    monkeypatch.setattr(sys, "stdin", Stdin(pieces))
    with saving_only(1, monkeypatch):
        assert run("--out", "o", "--checkpoint-every", "1", data="-") == 1
    capsys.readouterr()
    options = ("--out", "o", "--resume", "--stdin-continues", "--on-bad-batch", "skip")
    assert run(*options, data="-") == 3
    assert (
        "warning: the run did not end by itself: samples that it read after the checkpoint of step "
        "1 may be lost" in capsys.readouterr().err
    )
    assert [line["n"] for line in steps("o") if "skipped" in line] == [BATCH]


def test_a_stop_while_samples_are_passed_over() -> None:
    """Stdin starts again, is left before its place is reached, and goes on after that."""
    data = b"".join(b"[%d]\n" % number for number in range(10))
    stream = io.BufferedReader(Pieces([data[:10], data[10:14], data[14:]]))
    lines, waits = Lines(stream), iter((True, True, False))
    lines.begin(Place(), lambda stream: next(waits))
    assert list(lines.batches(2, 7)) == []
    place = lines.place(7, ended=True)
    assert place == Place(3, b"[3")
    lines = Lines(stream)
    lines.begin(place, lambda stream: True)
    assert [str(batch.read()) for batch in lines.batches(2, 7)] == ["[[7.]\n [8.]]", "[[9.]]"]


def test_a_checkpoint_that_knows_no_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save("begin.npy", samples()[:20])
    assert run("--out", "o", data="begin.npy") == 0
    monkeypatch.setattr(sys, "stdin", Stdin([as_lines(samples()[20:])]))
    assert run("--out", "o", "--resume", "--stdin-continues", data="-") == 0
    assert run("--out", "whole") == 0
    assert_equal("o", "whole")


def test_more_than_a_checkpoint_holds(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The status says that samples are lost; where stdin starts again none are."""
    monkeypatch.setattr("driftfilter.app.run.run.HELD", 100)
    for out, options, status in (("a", ["--stdin-continues"], 1), ("b", [], 0)):
        monkeypatch.setattr(sys, "stdin", Stdin([as_lines(samples())], frozenset({0})))
        assert run("--out", out, *options, data="-") == status
        assert (
            "bytes of stdin were read and not stepped, and are lost"
            in (told := capsys.readouterr().err)
        ) == bool(status)
        assert "SIGTERM: saved" in told


@pytest.mark.parametrize(
    "found",
    [
        [],
        {"first": 0},
        {"first": "0", "rest": ""},
        {"first": 9, "rest": ""},
        {"first": -1, "rest": ""},
        {"first": 0, "rest": "?"},
        {"first": 0, "rest": 3},
    ],
    ids=str,
)
def test_a_place_that_is_none(found: object) -> None:
    with pytest.raises(ValueError, match="state: stdin must be the number of a sample up to 8"):
        Place.from_dict("state", found, 8)
    assert Place.from_dict("state", Place(8, b"[1, 2").to_dict(), 8) == Place(8, b"[1, 2")


def test_several_readers_of_one_stream() -> None:
    """Lines that one generator has read and not given are there for the next."""
    lines = Lines(io.BytesIO(b"".join(b"[%d]\n" % number for number in range(10))))
    for first in (0, 3):
        batch = next(lines.batches(3, 0))
        raw = batch.read()
        assert isinstance(raw, np.ndarray)
        assert raw[:, 0].tolist() == [first, first + 1, first + 2]
    assert [each.rows for each in lines.batches(3, 7)] == [3]


# Real processes, signals and pipes


def feed(writer: io.FileIO, data: bytes, kind: str) -> None:
    """Write half lines slowly, or bursts, or all at once."""
    longest, pause = {"slow": (70, 0.005), "bursts": (900, 0.05), "backlog": (1 << 30, 0)}[kind]
    with writer:
        for piece in cut(data, longest, random.Random(0)):
            writer.write(piece)
            time.sleep(pause)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["slow", "bursts", "backlog"])
def test_parts_of_a_run_on_one_pipe(kind: str, folder: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(2000 if kind == "backlog" else 300, 5))
    np.save("x.npy", rows.astype(np.float64))
    assert run("--out", "whole") == 0
    (reading, writing), data = os.pipe(), as_lines(rows).rstrip()
    writer = threading.Thread(target=feed, args=(io.FileIO(writing, "w"), data, kind))
    code = [sys.executable, "-m", "driftfilter.app.cli", "run", MODEL, "-", "--out", "o"]
    options = ["--preset", "tent:lr=0.01", "--batch", "10", "--resume", "--stdin-continues"]
    env = {**os.environ, "PYTHONPATH": str(Path(df.__file__).parents[1])}
    log, stops, told = Path("o/steps.jsonl"), [2, 7], b"SIGTERM: saved"
    writer.start()
    while b"SIGTERM: saved" in told:
        process = subprocess.Popen(
            [*code, *options], stdin=reading, stderr=subprocess.PIPE, env=env
        )
        while stops and process.poll() is None:
            if log.exists() and log.read_bytes().count(b"\n") >= stops[0]:
                process.terminate()
                stops.pop(0)
                break
            time.sleep(0.002)
        told = process.communicate(timeout=100)[1]
        assert process.returncode == 0, told
    writer.join()
    os.close(reading)
    assert not stops
    assert_equal("o", "whole")

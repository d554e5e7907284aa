"""Models and readers that fail in any way: the batch is bad, what was done before it is saved."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from own_model import MODULE, batches, expected, predictions, run, samples, steps, summary

FAILING = f"""{MODULE}
import asyncio
import os

class OwnError(Exception):
    pass

class MuteError(ValueError):
    def __str__(self):
        raise RuntimeError("no text")

class Failing(nn.Module):
    def forward(self, x):
        if (x > 50).any():
            raise eval(os.environ["RAISED"])
        return x

def fail():
    return nn.Sequential(Failing(), make())

def leave():
    raise SystemExit(0)
"""
RAISED = {
    "AssertionError": "AssertionError()",
    "KeyError: 'a'": "KeyError('a')",
    "AttributeError: no b": "AttributeError('no b')",
    "ZeroDivisionError: c": "ZeroDivisionError('c')",
    "OSError: [Errno 5] d": "OSError(5, 'd')",
    "BrokenPipeError: [Errno 32] e": "BrokenPipeError(32, 'e')",
    "failing_network.OwnError: one": "OwnError('one\\ntwo')",
    "failing_network.MuteError: <exception str() failed>": "MuteError()",
    "ValueError": "ValueError()",
    "RuntimeError: g": "RuntimeError('g')",
    "MemoryError": "MemoryError()",
    "StopIteration": "StopIteration()",
    "asyncio.exceptions.CancelledError": "asyncio.CancelledError()",
    "SystemExit: 0": "SystemExit(0)",
}


@pytest.fixture
def failing(folder: Path) -> str:
    """A model that fails at the third batch."""
    (folder / "failing_network.py").write_text(FAILING)
    rows = samples()
    rows[23] = 100
    np.save("x.npy", rows)
    return "failing_network:fail"


@pytest.mark.parametrize("told", RAISED)
def test_a_model_that_fails(
    told: str, failing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAISED", RAISED[told])
    assert run("--out", "o", model=failing) == 1
    message = f"the model failed: {told}"
    assert f"error: step 2 (samples 20 to 29): {message}\n" in capsys.readouterr().err
    assert [line["step"] for line in steps("o")] == [0, 1]
    assert summary("o")["error"].endswith(message)
    assert run("--out", "o", "--resume", "--on-bad-batch", "skip", model=failing) == 3
    assert steps("o")[2]["skipped"] == message
    logs = expected([*batches()[:2], *batches()[3:]])
    found = np.delete(predictions("o")["probabilities"], slice(20, 30), 0)
    assert found.tobytes() == np.exp(logs).tobytes()


def test_a_device_without_memory_is_no_bad_batch(
    failing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is skipped, and the steps before it are saved."""
    monkeypatch.setenv("RAISED", "torch.OutOfMemoryError('full')")
    assert run("--out", "o", "--on-bad-batch", "skip", model=failing) == 1
    assert "the model failed: torch.OutOfMemoryError: full" in capsys.readouterr().err
    assert summary("o")["tally"]["step"] == 2


def test_an_interrupt_stays_a_stop(
    failing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAISED", "KeyboardInterrupt()")
    assert run("--out", "o", "--on-bad-batch", "skip", model=failing) == 130
    assert "error: interrupted" in capsys.readouterr().err


def test_a_factory_that_leaves(failing: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--out", "o", model="failing_network:leave") == 1
    assert "error: the code of the model raised SystemExit: 0" in capsys.readouterr().err


def test_a_picture_that_is_a_bomb(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    (folder / "pictures").mkdir()
    for place, each in enumerate(pixels):
        image.fromarray(each).save(folder / "pictures" / f"{place}.png")
    image.new("RGB", (99, 99)).save(folder / "pictures" / "3.png")
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 2000)
    assert run("--out", "o", model="resnet20", data="pictures", batch=2) == 1
    assert "pictures/3.png must be a picture that can be read, got Image size (9801 pixels)" in (
        capsys.readouterr().err
    )
    options = ("--out", "o", "--resume", "--on-bad-batch", "skip")
    assert run(*options, model="resnet20", data="pictures", batch=2) == 3
    assert (predictions("o")["label"] == -1).tolist() == [False, False, True, True, False, False]


CUTTING = f"""{MODULE}
import os

class Cutting(nn.Module):
    def forward(self, x):
        os.truncate("cut.npy", int(os.environ["LEFT"]))
        return x

def cut():
    return nn.Sequential(Cutting(), make())
"""


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("left", [0, 1000])
def test_a_file_that_is_cut_while_it_is_read(
    left: int,
    order: Literal["C", "F"],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A look at its map would kill the process, or find zeros in its last page."""
    (folder / "cutting_network.py").write_text(CUTTING)
    monkeypatch.setenv("LEFT", str(left))
    np.save("cut.npy", np.asarray(samples(), order=order))
    length = (folder / "cut.npy").stat().st_size
    assert run("--out", "o", model="cutting_network:cut", data="cut.npy") == 1
    assert (
        f"step 1 (samples 10 to 19): cut.npy must be {length} bytes long, as it was at the "
        f"beginning, got '{left} bytes'" in capsys.readouterr().err
    )
    assert summary("o")["tally"]["step"] == 1
    assert "could not be read again: cut.npy must be" in summary("o")["no_examples"]

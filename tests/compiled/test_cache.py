"""Compiled code that cannot be read, written or made: one warning, and the same results."""

import os
import resource
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import driftfilter as df
from covered import assert_close
from driftfilter.compiled import plan
from small import moments

numba = pytest.importorskip("numba")


def double(x: float) -> float:
    return 2 * x


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where compiled code is kept, with some in it."""
    from driftfilter.compiled import cache

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "_told", [])
    assert fresh()(2.0) == 4.0
    return tmp_path


def fresh() -> Any:
    """The kernel as another process has it."""
    from driftfilter.compiled.rules import kernel

    return kernel(double)


def files(folder: Path, suffix: str) -> list[Path]:
    found = list(folder.rglob(f"*{suffix}"))
    assert found
    return found


def test_whole_files_are_used(folder: Path) -> None:
    again = fresh()
    assert again(3.0) == 6.0
    assert sum(again.stats.cache_hits.values()) == 1


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "a bit in the middle": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
    ),
    "another kind": lambda data: b"not compiled code" * 9,
    "longer": lambda data: data + b"\0",
}


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_compiled_anew(folder: Path, damage: str, suffix: str) -> None:
    for path in files(folder, suffix):
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.warns(UserWarning, match="compiled code was not read from the cache") as told:
        assert fresh()(3.0) == 6.0
    assert len(told) == 1
    test_whole_files_are_used(folder)  # they have been written again


def test_a_folder_in_the_place_of_a_file(folder: Path) -> None:
    for path in (*files(folder, ".nbi"), *files(folder, ".nbc")):
        path.unlink()
        path.mkdir()
    with pytest.warns(UserWarning, match="compiled code was not"):
        assert fresh()(3.0) == 6.0


def test_a_full_disk_leaves_the_cache_out(folder: Path) -> None:
    for path in (*files(folder, ".nbi"), *files(folder, ".nbc")):
        path.unlink()
    before, limit = signal.getsignal(signal.SIGXFSZ), resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert fresh()(3.0) == fresh()(3.0) == 6.0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert ["not written to the cache: OSError" in str(each.message) for each in told] == [True]
    assert not [path for path in folder.rglob("*.nb*") if path.is_file()]


def broken(*arguments: Any) -> Any:
    raise OSError(28, os.strerror(28))


def build(classes: int) -> df.Filter:
    inference = df.Linearized(df.GaussNewton())
    return df.Filter(df.LinearHead(classes), inference=inference)


ENTRIES = {
    "logistic": ("driftfilter.compiled.logistic.scan_rank_one", 2, 1, True),
    "full": ("driftfilter.compiled.full.scan_full", 3, 2, True),
    "diagonal": ("driftfilter.compiled.diagonal.scan_diagonal", 3, 2, False),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_stream_goes_on_eagerly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, classes, n, full = ENTRIES[name]
    d = 3 * (classes - 1)
    covariance = df.Full(torch.eye(d)) if full else df.Diagonal(torch.ones(d))
    filt, belief = build(classes), df.Belief(torch.linspace(-1, 1, d), covariance)
    x = torch.randn(80, n, 3, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(where, broken)
    monkeypatch.setattr(plan, "_failures", [])
    with pytest.warns(UserWarning, match="the eager path takes over: OSError") as told:
        state, outputs = filt.run(filt.init(belief), x)
    assert len(told) == 1
    filt.run(filt.init(belief), x)  # a second warning would be an error
    assert outputs.compiled == 0
    expected, _ = filt.run(filt.init(belief), iter(x))
    assert_close(moments(state.belief), moments(expected.belief), 0.0)


FLEETS = {
    "abreast": ("driftfilter.compiled.logistic_lanes.each_abreast", 2, 1, True, 3),
    "rank one": ("driftfilter.compiled.fleet_kernels.each_rank_one", 2, 1, True, 40),
    "full": ("driftfilter.compiled.fleet_kernels.each_full", 3, 2, True, 3),
    "diagonal": ("driftfilter.compiled.fleet_kernels.each_diagonal", 3, 2, False, 3),
}


@pytest.mark.parametrize("name", FLEETS)
def test_a_fleet_goes_on_eagerly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, classes, n, full, width = FLEETS[name]
    d = width * (classes - 1)
    covariance = df.Full(torch.eye(d)) if full else df.Diagonal(torch.ones(d))
    filt, belief = build(classes), df.Belief(torch.linspace(-1, 1, d), covariance)
    fleet = df.Fleet(filt, belief, ["a", "b"])
    x = torch.randn(2, n, width, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(where, broken)
    monkeypatch.setattr(plan, "_failures", [])
    with pytest.warns(UserWarning, match="the eager path takes over: OSError") as told:
        fleet.step(x)
    assert len(told) == 1
    fleet.step(x)  # a second warning would be an error
    state = filt.init(belief)
    for _ in range(2):
        state, *_ = filt.step(state, x[1])
    assert fleet.state("b").step == 2
    assert_close(moments(fleet.state("b").belief), moments(state.belief), 1e-5)

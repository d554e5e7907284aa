"""Checkpoints in files: what is written is read back bit for bit, and nothing else is."""

import errno
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from torch import Tensor, nn

import crafting
import driftfilter as df
from driftfilter.adapter.checkpoint import _complete, fingerprint, plain
from driftfilter.base.tensors import as_text
from driftfilter.storage.atomic import atomic_file
from driftfilter.storage.sealed import FORMAT
from small import assert_same, feed, normal, tabular


def batch(seed: int) -> Tensor:
    return normal(8, 4, seed=seed, dtype=torch.float32)


def adapter(preset: str = "tent", batches: int = 0, **options: Any) -> df.Adapter:
    made = df.adapt(tabular(), preset, **options)
    feed(made, map(batch, range(batches)))
    return made


def header_of(path: Path) -> dict[str, Any]:
    return crafting.header_of(path.read_bytes())


def rewritten(path: Path, tensors: dict[str, Tensor] | None = None, **changes: Any) -> None:
    """The same file with another header or other tensors, and a checksum that is right."""
    path.write_bytes(crafting.reseal(path.read_bytes(), tensors, **changes))


@pytest.mark.parametrize("preset", ["tent", "opgd_diag"])
def test_a_file_from_before_a_field_was_there_is_read_as_if_it_had_its_default(
    preset: str, tmp_path: Path
) -> None:
    running, path = adapter(preset, 2), tmp_path / "state.safetensors"
    df.save(running, path)
    recipe = header_of(path)["recipe"]
    recipe = {name: value for name, value in recipe.items() if name not in ("centering", "least")}
    recipe["inference"].pop("reach", None)
    kind = as_text(load(path.read_bytes())["recipe"])
    assert kind.endswith("posterior, NoneType)")  # of upkeep alone, as it was
    rewritten(path, recipe=recipe)
    resumed = adapter(preset)
    df.load(resumed, path)
    assert_same(resumed.state_dict(), running.state_dict())
    with pytest.raises(df.CheckpointError, match="least was 0, here it is 3"):
        df.load(adapter(preset, least=3), path)
    with pytest.raises(df.CheckpointError, match="centering"):
        df.load(adapter(preset, centering=df.Centering()), path)


@pytest.mark.parametrize("batches", [0, 3])
@pytest.mark.parametrize("preset", ["tent", "driftfilter", "opgd", "t3a"])
@pytest.mark.parametrize(
    "options", [{}, {"window": 12}, {"update_every": 2}], ids=["plain", "window", "update_every"]
)
def test_a_loaded_adapter_goes_on_bit_for_bit(
    preset: str, batches: int, options: dict[str, Any], tmp_path: Path
) -> None:
    running, resumed = (
        adapter(preset, batches, seed=5, **options),
        adapter(preset, 1, seed=5, **options),
    )
    notes = {
        "row": 17,
        "sha256": "0" * 64,
        "text": 'Σ"\\"sha256\\":\\"',
        "deep": [{"sha256": "1" * 64}],
    }
    df.save(running, tmp_path / "it.safetensors", notes=notes)
    assert df.load(resumed, str(tmp_path / "it.safetensors")) == notes
    assert_same(resumed.state_dict(), running.state_dict())
    for seed in range(10, 12):
        assert torch.equal(resumed(batch(seed)), running(batch(seed)))
    assert_same(resumed.state_dict(), running.state_dict())


def test_the_file_is_plain_safetensors_with_a_header(tmp_path: Path) -> None:
    running, path = adapter("eta", 3, seed=5, window=9), tmp_path / "state.safetensors"
    df.save(running, path)
    assert_same(load_file(path), running.state_dict())
    header = header_of(path)
    assert (header["format"], header["library"], header["step"], header["seed"]) == (
        FORMAT,
        df.__version__,
        3,
        5,
    )
    assert header["recipe"]["kind"] == "Recipe"
    assert header["adapter"] == {"update_every": 1, "window": 9}
    assert [each.name for each in tmp_path.iterdir()] == ["state.safetensors"]
    before = path.read_bytes()
    df.save(running, path)
    assert path.read_bytes() == before


def test_any_reader_may_force_it(tmp_path: Path) -> None:
    running, other = adapter("tent", 2), df.adapt(tabular(seed=1), "tent")
    df.save(running, tmp_path / "a")
    other.load_state_dict(load_file(tmp_path / "a"))
    assert torch.equal(other.belief.mean, running.belief.mean)


# What is refused


@dataclass(frozen=True)
class Own:
    """A weighting that is in no table."""

    factor: float = 1.0
    memory: Callable[[], int] = lambda: 3

    def __call__(self, logits: Tensor, weights: Tensor, memory: Any) -> tuple[Tensor, Any]:
        return weights * self.factor, memory


def own(factor: float) -> df.Adapter:
    return df.adapt(tabular(), df.Recipe(observation=df.Gibbs(df.Entropy(), Own(factor))))


def retrained() -> df.Adapter:
    model = tabular()
    model[1].get_buffer("running_mean").add_(1e-6)
    return df.adapt(model, "tent")


OTHERS: dict[str, tuple[Callable[[], df.Adapter], str]] = {
    "architecture": (
        lambda: df.adapt(tabular(width=7), "tent"),
        "another model, of other names, shapes or dtypes of parameters or buffers",
    ),
    "dtype": (
        lambda: df.adapt(tabular().double(), "tent"),
        "another model, of other names, shapes or dtypes",
    ),
    "weights": (
        lambda: df.adapt(tabular(seed=1), "tent"),
        "it was saved with another model, of other weights",
    ),
    "buffers": (retrained, "another model, of other weights"),
    "number": (
        lambda: adapter("tent", lr=0.5),
        r"another recipe: inference\.rule\.lr was 0\.001, here it is 0\.5",
    ),
    "kind": (lambda: adapter("eta"), r"another recipe: .* was '\w+', here it is '\w+'"),
    "prediction": (
        lambda: adapter("tent", prediction=df.MonteCarlo(4)),
        "prediction was 'MAP', here it is 'MonteCarlo'",
    ),
    "window": (lambda: adapter("tent", window=4), "window was 0, here it is 4"),
    "own part": (lambda: own(1.0), "another recipe: recipe was 'Recipe', here it is"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_does_not_fit_is_refused_by_reason(case: str, tmp_path: Path) -> None:
    other, reason = OTHERS[case]
    path, untouched = tmp_path / "state.safetensors", other()
    df.save(adapter("tent", 2), path)
    before = {name: value.clone() for name, value in untouched.state_dict().items()}
    with pytest.raises(df.CheckpointError, match=f"state.safetensors was not loaded: .*{reason}"):
        df.load(untouched, path)
    assert all(torch.equal(value, before[name]) for name, value in untouched.state_dict().items())


def test_numbers_and_prediction_may_differ_where_asked(tmp_path: Path) -> None:
    running, other = (
        adapter("tent", 2),
        adapter("tent", lr=0.5, prediction=df.MonteCarlo(4), window=4),
    )
    df.save(running, tmp_path / "a")
    df.load(other, tmp_path / "a", strict=False)
    assert torch.equal(other.belief.mean, running.belief.mean)
    for wrong, reason in (
        (adapter("eta"), "state 'recipe' must be the same"),
        (df.adapt(tabular(1), "tent"), "another model"),
    ):
        with pytest.raises(df.CheckpointError, match=reason):
            df.load(wrong, tmp_path / "a", strict=False)


def test_recipes_with_parts_of_ones_own(tmp_path: Path) -> None:
    df.save(own(1.0), tmp_path / "a")
    assert df.load(own(1.0), tmp_path / "a") == {}
    with pytest.raises(
        df.CheckpointError,
        match=r"another recipe: recipe was '.*Own\(factor=1\.0.*', here it is '.*Own\(factor=2\.0",
    ):
        df.load(own(2.0), tmp_path / "a")


def test_contents_that_no_adapter_may_go_on_from(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"

    def fresh() -> None:
        df.save(adapter("tent", 2), path)

    def refused(reason: str) -> None:
        with pytest.raises(df.CheckpointError, match=f"state.safetensors was not loaded: {reason}"):
            df.load(adapter(), path)

    fresh()
    rewritten(path)
    df.load(adapter(), path)  # the way of rewriting is right
    mean = load(path.read_bytes())["belief.mean"]
    rewritten(path, {"belief.mean": mean.masked_fill(torch.arange(len(mean)) == 3, torch.nan)})
    refused(r"state 'belief.mean' must be finite, got nan at index \[3\]")
    fresh()
    rewritten(path, {"belief.mean": mean[:5]})
    refused("state 'belief.mean' must be of shape")
    fresh()
    rewritten(path, format=FORMAT + 1, library="9.9")
    refused(
        f"it is of format {FORMAT + 1}, written by driftfilter 9.9; this is {df.__version__}, "
        f"format {FORMAT}"
    )
    save_file({"x": torch.ones(2)}, path)
    refused("it is no checkpoint of driftfilter")
    path.write_bytes(b"")
    refused("it is no checkpoint of driftfilter")
    torch.save({"x": torch.ones(2)}, path)
    refused("it is no checkpoint of driftfilter")
    path.unlink()
    refused("No such file or directory")
    path.mkdir()
    refused("Is a directory")


@pytest.mark.slow
def test_every_kind_of_byte_is_covered(tmp_path: Path) -> None:
    """All bits of the length, the header's beginning and end, the checksum and some of the tensors;
    and truncations.
    """
    path = tmp_path / "state.safetensors"
    df.save(adapter("tent", 2), path)
    data, waiting = path.read_bytes(), adapter()
    waiting(batch(7))
    before = {name: value.clone() for name, value in waiting.state_dict().items()}
    end, rng = 8 + int.from_bytes(data[:8], "little"), random.Random(0)
    digest = data.index(b'\\"sha256\\"')
    bits = [
        *range(8 * 10),
        *range(8 * (digest - 2), 8 * (digest + 90)),
        *range(8 * (end - 3), 8 * (end + 3)),
    ]
    altered = [data + b"\0"]
    for bit in [*bits, *rng.sample(range(8 * len(data)), 300)]:
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        altered.append(bytes(changed))
    lengths = [0, 1, 8, end, len(data) - 1, *rng.sample(range(len(data)), 30)]
    for content in [*altered, *(data[:length] for length in lengths)]:
        path.write_bytes(content)
        with pytest.raises(df.CheckpointError, match="truncated or altered"):
            df.load(waiting, path)
    assert all(torch.equal(value, before[name]) for name, value in waiting.state_dict().items())


# Saving that fails


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("where", ["os.fsync", "os.replace", "pathlib.Path.open"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS], ids=["disk-full", "read-only"])
def test_a_save_that_fails_leaves_the_old_file(
    where: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, running = tmp_path / "state.safetensors", adapter("tent", 1)
    df.save(running, path)
    before = path.read_bytes()
    running(batch(8))
    with monkeypatch.context() as patched:
        patched.setattr(where, failing(number))
        with pytest.raises(df.CheckpointError) as caught:
            df.save(running, path)
    reason = (
        f"could not be written: {os.strerror(number)}; the checkpoint that was there is as it was"
    )
    assert (str(caught.value), path.read_bytes()) == (f"{path} {reason}", before)
    assert [each.name for each in tmp_path.iterdir()] == ["state.safetensors"]


def test_a_file_that_outgrows_what_may_be_written(tmp_path: Path) -> None:
    """The system itself stops the writing halfway."""
    path, running = tmp_path / "state.safetensors", adapter("tent", 1)
    df.save(running, path)
    before, (soft, hard) = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        with pytest.raises(
            df.CheckpointError,
            match=r"could not be written: File too large; the checkpoint that was there",
        ):
            df.save(running, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["state.safetensors"]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        df.CheckpointError, match=r"nowhere/a could not be written: No such file or directory$"
    ):
        df.save(adapter(), tmp_path / "nowhere" / "a")
    with pytest.raises(ValueError, match="save: keep must be an integer >= 1, got 0"):
        df.save(adapter(), tmp_path / "a", keep=0)


# Which files stay


def steps(folder: Path) -> dict[str, int]:
    return {path.name: header_of(path)["step"] for path in sorted(folder.iterdir())}


def test_the_last_k_stay(tmp_path: Path) -> None:
    running, path = adapter(), tmp_path / "a.safetensors"
    df.save(running, tmp_path / "a.7.safetensors")
    for seed in range(5):
        running(batch(seed))
        df.save(running, path, keep=3)
    assert steps(tmp_path) == {
        "a.safetensors": 5,
        "a.1.safetensors": 4,
        "a.2.safetensors": 3,
        "a.7.safetensors": 0,
    }
    running(batch(6))
    df.save(running, path, keep=2)
    assert steps(tmp_path) == {"a.safetensors": 6, "a.1.safetensors": 5, "a.7.safetensors": 0}
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        df.CheckpointError, match=r"altered.*; the one before it is .*a\.1\.safetensors"
    ):
        df.load(running, path)
    df.load(running, tmp_path / "a.1.safetensors")
    assert running.state.step == 5


@pytest.mark.slow
@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_is_there_at_every_moment_of_a_save(
    keep: int, links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before each call that changes a folder; the save after that is a good one."""
    path, calls = (
        tmp_path / "a.safetensors",
        ("os.replace", "os.link", "os.fsync", "os.unlink", "shutil.copyfile"),
    )
    if not links:
        monkeypatch.setattr("os.link", failing(errno.EPERM))
    running = adapter()
    for moment in range(12):
        died = killed_save(running, path, keep, moment, calls)
        if path.exists():
            assert header_of(path)["step"] in (running.state.step, running.state.step - 1)
            df.load(adapter(), path)
        df.save(running, path, keep)
        assert not list(tmp_path.glob(".*"))
        assert header_of(path)["step"] == running.state.step
        running(batch(moment))
    assert not died  # so many moments a save does not have


def killed_save(
    running: df.Adapter, path: Path, keep: int, moment: int, calls: tuple[str, ...]
) -> bool:
    """Save in a child that kills itself before its n-th call; whether it did."""
    child = os.fork()
    if child == 0:
        count = 0

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                if count == moment:
                    os.kill(os.getpid(), 9)
                count += 1
                return function(*args, **kwargs)

            return call

        import shutil

        modules = {"os": os, "shutil": shutil}
        for call in calls:
            module, name = call.split(".")
            setattr(modules[module], name, counted(getattr(modules[module], name)))
        df.save(running, path, keep)
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0


def test_parts_of_killed_processes_are_swept(tmp_path: Path) -> None:
    """Whatever processes have their numbers now; a part that is being written is locked."""
    token = "0123456789abcdef"
    stale = [f".a.{os.getppid()}-new.part", ".a.1-old.part", f".a.{token}.part"]
    kept = [".a.part", f".b.{token}.part", ".a.x-new.part", f"a.{token}.part", f".a.{token}x.part"]
    for name in (*stale, *kept):
        (tmp_path / name).write_text("half")
    with atomic_file(tmp_path / "a") as file:
        (written,) = {path.name for path in tmp_path.iterdir()} - set(kept)
        save = "import sys, pathlib; from driftfilter.storage.atomic import write_atomic;"
        code = f"{save} write_atomic(pathlib.Path(sys.argv[1]), 'theirs')"
        subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], check=True)
        assert (tmp_path / written).exists()
        file.write(b"ours")
    assert (tmp_path / "a").read_text() == "ours"
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "a"}


class Spread(nn.Module):
    """Needs two samples or more: of one alone the spread is not a number."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / x.std(0)


@pytest.mark.parametrize("options", [{"window": 8}, {"update_every": 2}])
def test_recent_samples_of_a_model_that_one_sample_is_too_few_for(
    options: dict[str, Any], tmp_path: Path
) -> None:
    running, resumed = (
        df.adapt(nn.Sequential(Spread(), tabular()), "tent", **options) for _ in range(2)
    )
    feed(running, map(batch, range(3)))
    df.save(running, tmp_path / "state.safetensors")
    df.load(resumed, tmp_path / "state.safetensors")
    assert torch.equal(resumed(batch(3)), running(batch(3)))


def test_a_link_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "a").symlink_to(tmp_path / "precious")
    df.save(adapter(), tmp_path / "a")
    assert (tmp_path / "precious").read_text() == "precious"
    df.load(adapter(), tmp_path / "a")


# The fingerprint


def test_fingerprints_tell_models_apart() -> None:
    reference = fingerprint(tabular())
    assert fingerprint(tabular().train()) == reference
    for other in (tabular(seed=1), tabular(width=7), tabular().double(), tabular().bfloat16()):
        assert fingerprint(other).weights != reference.weights
    moved = tabular()
    # Another layout of the same values.
    moved[0].get_parameter("weight").data = (
        moved[0].get_parameter("weight").data.t().contiguous().t()
    )
    assert fingerprint(moved) == reference
    assert fingerprint(tabular(seed=1)).architecture == reference.architecture
    assert fingerprint(tabular().double()).architecture != reference.architecture


def test_the_fingerprint_follows_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tabular()
    running, calls = df.adapt(model, "tent"), 0

    def counted(module: nn.Module) -> Any:
        nonlocal calls
        calls += 1
        return fingerprint(module)

    monkeypatch.setattr("driftfilter.adapter.adapter.fingerprint", counted)
    running(batch(0))
    first = running.fingerprint
    assert running.fingerprint == first == fingerprint(tabular())
    running(batch(1))
    assert (running.fingerprint, calls) == (first, 1)
    with torch.no_grad():
        model[3].get_parameter("bias").add_(1)
    assert running.fingerprint != first
    assert running.fingerprint == fingerprint(model)


@pytest.mark.parametrize(("preset", "goes_on"), [("eata", True), ("petal", False)])
def test_a_posterior_of_before_was_fitted_under_the_streams_statistics(
    preset: str, goes_on: bool
) -> None:
    now = plain(df.presets.get(preset))
    source = {name: value for name, value in now["source"].items() if name != "statistics"}
    assert (_complete({**now, "source": source}) == now) is goes_on

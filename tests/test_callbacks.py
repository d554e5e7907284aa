"""Callbacks: what they are told, when, and what the writers write."""

import copy
import json
import math
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.special import entr
from torch import Tensor, nn

import driftfilter as df
from driftfilter import callbacks
from driftfilter.callbacks import JsonLines, TensorBoard
from small import assert_same, feed, normal, tabular


def network() -> nn.Module:
    return tabular(width=8).eval()


def batch(number: int, n: int = 16) -> Tensor:
    return normal(n, 4, seed=number, dtype=torch.float32)


class Kept(list[df.StepRecord]):
    def on_step(self, step: df.StepRecord) -> None:
        self.append(step)


def adapted(*given: df.Callback, **options: Any) -> df.Adapter:
    return df.adapt(network(), "driftfilter", callbacks=given, **options)


def watched(*given: df.Callback, **options: Any) -> tuple[Kept, df.Adapter]:
    """What is told, and an adapter that tells it."""
    told = Kept()
    return told, adapted(told, *given, **options)


# What is told


def test_a_step_is_told_as_it_was() -> None:
    (told, adapter), alone = watched(), adapted()
    for number in range(3):
        logs = adapter(batch(number))
        assert torch.equal(logs, alone(batch(number)))  # to be watched changes nothing
        step, p = told[number], logs.exp().double().numpy()
        assert (step.number, step.samples, step.events, step.accuracy) == (number, 16, (), None)
        assert step.entropy == pytest.approx(entr(p).sum(1).mean(), rel=1e-6)
        assert step.shares == tuple((p.argmax(1) == label).mean() for label in range(3))
        assert step.largest_share == max(step.shares)
        assert step.info is not None
        assert step.info is adapter.last_info
        assert step.signals is adapter.signals
        assert step.ms > 0
        line = step.to_dict()
        used = sum(weight != 0 for weight in step.info.weights.tolist())
        expected = (step.info.energy.item(), used, adapter.signals.distance)
        assert (line["energy"], line["used"], line["distance"]) == expected


def test_a_step_without_update_and_an_update_without_prediction() -> None:
    told, adapter = watched(update_every=2)
    feed(adapter, map(batch, range(4)))
    assert [step.number for step in told] == [0, 1, 2, 3]
    for step in told:
        without = (step.info is None, step.to_dict()["energy"] is None)
        assert (*without, math.isnan(step.signals.distance)) == (step.number % 2 == 0,) * 3
    told, adapter = watched()
    for number in range(2):
        info = adapter.update(batch(number))
    assert [step.number for step in told] == [0, 1]
    assert told[1].info is info
    assert (told[1].samples, told[1].shares, math.isnan(told[1].entropy)) == (16, (), True)
    assert told[1].to_dict()["entropy"] is None


def test_numbers_go_on_after_a_checkpoint() -> None:
    adapter, (told, other) = adapted(), watched()
    feed(adapter, map(batch, range(3)))
    other.load_state_dict(adapter.state_dict())
    other(batch(3))
    assert told[0].number == 3
    other.reset()
    other(batch(3))
    assert told[1].number == 0


@pytest.mark.parametrize(
    "options",
    [{}, {"update_every": 2}, {"chunk": 5}, {"window": 20}],
    ids=["plain", "every", "chunk", "window"],
)
def test_numbers_count_calls_of_either_kind(options: dict[str, Any]) -> None:
    told, adapter = watched(**options)
    calls: list[Callable[..., Any]] = [
        adapter,
        adapter,
        adapter.update,
        adapter.update,
        adapter,
        adapter.update,
        adapter,
    ]
    for number, call in enumerate(calls):
        call(batch(number))
        adapter.predict(batch(number))  # changes nothing, and is not told
    assert [step.number for step in told] == list(range(7))


def test_numbers_go_on_while_an_adapter_is_frozen() -> None:
    told, adapter = watched(monitor=df.Monitor(distance=1e-6, on_parameters="freeze"))
    for number in range(2):
        adapter(batch(number))
        adapter.update(batch(number))
    assert [step.info is None for step in told] == [False, True, True, True]
    assert [step.number for step in told] == [0, 1, 2, 3]


def test_numbers_go_on_after_a_checkpoint_of_updates_and_calls() -> None:
    adapter, (told, other) = adapted(update_every=2), watched(update_every=2)
    for call in (adapter, adapter.update, adapter):
        call(batch(0))
    saved = adapter.state_dict()
    other.load_state_dict(saved)
    other(batch(1))
    assert told[0].number == 3
    del saved["number"]  # of a version that did not count
    other.load_state_dict(saved)
    other(batch(1))
    assert told[1].number == 2  # at least so many there were


def test_what_is_told_and_what_is_returned_are_apart() -> None:
    class Writes:
        def on_step(self, step: df.StepRecord) -> None:
            assert step.log_probabilities is not None
            step.log_probabilities.zero_()

    (told, adapter), wanted = watched(), adapted()(batch(0))
    assert torch.equal(adapted(Writes())(batch(0)), wanted)
    adapter(batch(0)).zero_()
    assert told[0].log_probabilities is not None
    assert torch.equal(told[0].log_probabilities, wanted)
    assert told[0].entropy == pytest.approx(
        entr(wanted.exp().double().numpy()).sum(1).mean(), rel=1e-6
    )


def test_events_are_those_of_the_step() -> None:
    told, adapter = watched(monitor=df.Monitor(distance=1e-6))
    feed(adapter, map(batch, range(4)))
    assert told[0].events
    assert tuple(event for step in told for event in step.events) == adapter.events
    assert told[0].to_dict()["alarms"] == [str(event) for event in told[0].events]
    assert told[0].numbers()["alarms"] == len(told[0].events)
    assert told[3].numbers()["alarms"] == len(told[3].events)


def test_a_callback_that_fails_leaves_a_whole_state() -> None:
    class Fails:
        def on_step(self, step: df.StepRecord) -> None:
            raise df.NotFiniteError(f"no more after {step.number}")

    adapter, alone, told = adapted(Fails()), adapted(), Kept()
    adapter.callbacks.append(told)
    for call in (adapter, adapter.update):
        with pytest.raises(df.NotFiniteError, match="no more"):
            call(batch(0))
    alone(batch(0))
    alone.update(batch(0))
    assert_same(adapter.state_dict(), alone.state_dict())
    assert adapter.events == ()  # the numbers of the stream were finite
    assert told == []


class Refuses:
    def on_step(self, step: df.StepRecord) -> None:
        raise OSError("no space left")


def test_an_alarm_is_given_though_a_callback_fails() -> None:
    adapter = adapted(Refuses(), monitor=df.Monitor(distance=1e-6, on_parameters="warn"))
    with (
        pytest.warns(df.AlarmWarning, match="distance is"),
        pytest.raises(OSError, match="no space left"),
    ):
        adapter(batch(0))
    adapter.callbacks.clear()
    adapter(batch(1))  # it goes on: told once


def test_an_alarm_that_is_an_error_does_not_hide_the_callback_s() -> None:
    told, adapter = watched(Refuses(), monitor=df.Monitor(distance=1e-6, on_parameters="warn"))
    with pytest.raises(df.AlarmWarning) as caught:  # warnings are errors in these tests
        adapter(batch(0))
    assert isinstance(caught.value.__context__, OSError)
    assert len(told) == 1


def test_a_refused_batch_is_not_told() -> None:
    told, adapter = watched()
    with pytest.raises(df.NotFiniteError):
        adapter(batch(0) * math.nan)
    assert told == []


def test_nothing_is_computed_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise AssertionError("computed")

    monkeypatch.setattr(callbacks, "summary", fails)
    told, adapter = watched()
    adapter(batch(0))  # nor before it is asked for
    with pytest.raises(AssertionError, match="computed"):
        _ = told[0].entropy
    monkeypatch.setattr("driftfilter.adapter.state.StepRecord", fails)
    adapted()(batch(0))


def test_a_copy_tells_nobody(tmp_path: Path) -> None:
    writer = JsonLines(tmp_path / "steps.jsonl")
    adapter = adapted(writer)
    for other in (copy.deepcopy(adapter), pickle.loads(pickle.dumps(adapter))):
        other(batch(0))
        assert other.callbacks == []
    assert (tmp_path / "steps.jsonl").read_bytes() == b""
    writer.close()


@pytest.mark.parametrize("wrong", [print, Kept, 3], ids=["function", "class", "number"])
def test_what_cannot_be_told_is_refused(wrong: Any) -> None:
    with pytest.raises(
        ValueError, match=r"adapt: callbacks must be objects with a method on_step\(step\), got"
    ):
        df.adapt(network(), "tent", callbacks=[wrong])
    with pytest.raises(ValueError, match="adapt: callbacks must be a list of callbacks, got 3"):
        df.adapt(network(), "tent", callbacks=3)  # type: ignore[arg-type]


# The writers


@pytest.mark.slow
def test_they_are_found_by_the_short_name() -> None:
    code = (
        "import driftfilter as df, sys; assert df.callbacks.JsonLines; sys.exit('tensorboard' "
        "in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines_are_added_to_what_is_there(tmp_path: Path) -> None:
    path, told = tmp_path / "new" / "steps.jsonl", Kept()
    for number in range(2):
        writer = JsonLines(path)
        adapted(writer, told)(batch(number))
        writer.close()
    assert lines_of(path) == [step.to_dict() for step in told]
    JsonLines(path, size=0).close()
    assert path.read_bytes() == b""


def test_lines_know_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    writer = JsonLines(path)
    adapted(writer, monitor=None).update(batch(0))
    writer.close()
    (line,) = path.read_text().splitlines()
    assert "NaN" not in line
    assert (json.loads(line)["distance"], json.loads(line)["entropy"]) == (None, None)


def test_tensorboard_has_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer, told = TensorBoard(tmp_path), Kept()
    feed(adapted(writer, told, monitor=df.Monitor(distance=1e-6)), map(batch, range(3)))
    writer.close()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    for name in ("energy", "entropy", "largest_share", "distance", "ms", "alarms", "n", "used"):
        curve = [(each.step, each.value) for each in found.Scalars(f"driftfilter/{name}")]
        assert curve == [
            (step.number, pytest.approx(step.numbers()[name], rel=1e-6)) for step in told
        ]
    assert "driftfilter/step" not in found.Tags()["scalars"]
    assert found.Tensors("driftfilter/alarms/text_summary")[0].step == 0


def test_tensorboard_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'driftfilter[tensorboard]'")):
        TensorBoard(tmp_path)


# Recipes of the documentation


class Told:
    """A module that remembers how it was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def called(*args: Any, **kwargs: Any) -> SimpleNamespace:
            self.calls.append((name, args, kwargs))
            return SimpleNamespace(log=self.log)

        return called

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


@pytest.mark.parametrize(("module", "call"), [("mlflow", "log_metrics"), ("wandb", "log")])
def test_recipes(module: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Told()
    monkeypatch.setitem(sys.modules, module, fake)
    monkeypatch.chdir(tmp_path)
    of_docs(module)
    logged = fake.of(call)
    assert [kwargs["step"] for _, kwargs in logged] == list(range(len(logged)))
    assert len(logged) >= 2
    for (numbers,), _ in logged:
        assert all(
            isinstance(value, (int, float)) and math.isfinite(value) for value in numbers.values()
        )
        assert any(name.endswith("entropy") for name in numbers)


def of_docs(module: str) -> dict[str, Any]:
    """What the block of the page that imports a module leaves behind."""
    page = (Path(__file__).parent.parent / "docs" / "callbacks.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (block,) = (each for each in blocks if f"import {module}" in each)
    assert len(block[block.index("class ") :].split("\n\n\n")[0].splitlines()) < 15
    left: dict[str, Any] = {"__name__": "documentation"}
    exec(compile(block, "documentation", "exec"), left)
    return left


@pytest.mark.filterwarnings("ignore")  # of packages that are not ours
def test_mlflow_itself_has_the_numbers_of_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    of_docs("mlflow")
    run = mlflow.active_run().info
    mlflow.end_run()
    assert run.run_name == "camera 7"
    history = mlflow.MlflowClient().get_metric_history(run.run_id, "entropy")
    assert [each.step for each in history] == [0, 1, 2]
    assert all(0 < each.value < math.log(3) + 1e-6 for each in history)


@pytest.mark.filterwarnings("ignore")
def test_wandb_itself_has_the_numbers_of_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    left = of_docs("wandb")
    run = left["adapter"].callbacks[0].run
    assert run.step == 2
    assert 0 < run.summary["driftfilter/entropy"] < math.log(3) + 1e-6
    run.finish()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_lines_go_on_after_a_line_that_a_crash_has_torn(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"ste')
    writer = JsonLines(path)
    adapted(writer)(batch(0))
    writer.close()
    assert [line["step"] for line in lines_of(path)] == [0, 1, 0]

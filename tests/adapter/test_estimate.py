"""What an adapter expects of its own accuracy: shown everywhere, saved, resumed and forgotten."""

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import driftfilter as df
from driftfilter.callbacks import JsonLines
from driftfilter.inference.accuracy import WINDOW, Expectation, Opinions, SourceCalibration
from driftfilter.monitor.monitor import AlarmWarning
from small import normal, tabular


def batch(seed: int, n: int = 50) -> Tensor:
    return normal(n, 4, seed=seed, dtype=torch.float32)


class Records:
    """A callback that remembers."""

    def __init__(self) -> None:
        self.steps: list[df.StepRecord] = []

    def on_step(self, step: df.StepRecord) -> None:
        self.steps.append(step)


@pytest.mark.parametrize("preset", ["driftfilter", "tent", "source", "opgd_diag"])
def test_estimate_is_that_of_what_was_returned(preset: str) -> None:
    told = Records()
    adapter = df.adapt(tabular(), preset, callbacks=[told])
    assert adapter.estimate.samples == 0
    outputs = torch.cat([adapter(batch(seed)) for seed in range(5)])
    found = adapter.estimate
    assert found.samples == 250
    assert found.accuracy == pytest.approx(df.Estimate.of(outputs).accuracy, abs=1e-6)
    assert told.steps[-1].estimate == found
    assert told.steps[0].estimate.samples == 50
    assert told.steps[-1].to_dict()["estimate"] == found.accuracy


def test_estimate_is_of_the_last_thousand_samples() -> None:
    adapter = df.adapt(tabular(), "source")
    outputs = torch.cat([adapter(batch(seed, 125)) for seed in range(12)])
    assert adapter.estimate.samples == WINDOW
    opinions = Opinions.of(outputs[-WINDOW:])
    home = Opinions.of(outputs[:500], table=True).home
    expected = Expectation(opinions._replace(home=home)).estimate
    assert adapter.estimate.accuracy == pytest.approx(expected.accuracy, abs=1e-6)


def test_only_rows_of_tables_have_a_home() -> None:
    adapter = df.adapt(tabular())
    adapter(batch(0))
    assert adapter._now.opinions is not None
    assert adapter._now.opinions.home is not None
    assert adapter._now.opinions.home.samples == 50
    adapter.reset()
    assert adapter._now.opinions is None
    network = torch.nn.Sequential(
        torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(48, 3)
    )
    images = df.adapt(network.eval())
    images(normal(20, 3, 4, 4, seed=0, dtype=torch.float32))
    assert images._now.opinions is not None
    assert images._now.opinions.home is None


def test_predictions_alone_are_not_counted_and_updates_are() -> None:
    adapter = df.adapt(tabular())
    adapter.predict(batch(0))
    adapter.uncertainty(batch(0))
    assert adapter.estimate.samples == 0
    adapter.update(batch(0))
    assert adapter.estimate.samples == 50


def test_reset_forgets_it() -> None:
    adapter = df.adapt(tabular())
    adapter(batch(0))
    adapter.reset()
    assert adapter.estimate.samples == 0


@pytest.mark.parametrize("preset", ["driftfilter", "tent"])
def test_estimate_is_resumed_bit_for_bit(preset: str, tmp_path: Path) -> None:
    running, path = df.adapt(tabular(), preset), tmp_path / "state.safetensors"
    for seed in range(3):
        running(batch(seed))
    df.save(running, path)
    resumed = df.adapt(tabular(), preset)
    df.load(resumed, path)
    assert resumed.estimate == running.estimate
    assert torch.equal(resumed(batch(9)), running(batch(9)))
    assert resumed.estimate == running.estimate


def test_checkpoint_from_before_has_no_estimate() -> None:
    running = df.adapt(tabular())
    running(batch(0))
    state = {name: t for name, t in running.state_dict().items() if "opinions" not in name}
    resumed = df.adapt(tabular())
    resumed.load_state_dict(state)
    assert resumed.estimate.samples == 0
    assert torch.equal(resumed(batch(1)), running(batch(1)))
    assert resumed.estimate.samples == 50


def test_labelled_source_data_correct_it() -> None:
    model, x = tabular(), batch(7, 300)
    with torch.no_grad():
        said = model(x).argmax(-1)
    right, wrong = (df.adapt(model, "source", data=(x, y)) for y in (said, (said + 1) % 3))
    plain, blind = df.adapt(model, "source"), df.adapt(model, "source", data=x)
    for adapter in (right, wrong, plain, blind):
        adapter(batch(0, 200))
    with torch.no_grad():
        sure = copy.deepcopy(model).eval()(x).softmax(-1).amax(-1).mean().item()
    alone = df.adapt(model, "source").predict(x).log_probabilities
    calibration = SourceCalibration(None, sure, Opinions.of(alone, table=True).home)
    by_hand = Expectation(blind._now.opinions, calibration).estimate
    assert blind.estimate.accuracy == pytest.approx(by_hand.accuracy, abs=1e-5)
    assert blind.estimate != plain.estimate
    assert wrong.estimate.accuracy < plain.estimate.accuracy < right.estimate.accuracy


def test_estimate_survives_a_refused_batch() -> None:
    adapter = df.adapt(tabular())
    adapter(batch(0))
    before = adapter.estimate
    with pytest.raises(ValueError, match="finite"):
        adapter(torch.full((50, 4), math.nan))
    assert adapter.estimate == before


def test_alarm_tells_if_fewer_are_expected_to_be_right() -> None:
    adapter = df.adapt(tabular(), "source", monitor=df.Monitor(error=0.01, on_error="warn"))
    adapter(batch(0, 100))
    assert not adapter.events  # it is judged by the samples before
    with pytest.warns(AlarmWarning, match="expected_error"):
        adapter(batch(1, 100))
    (event,) = adapter.events
    assert (event.signal, event.threshold, event.response) == ("expected_error", 0.01, "warn")
    assert event.value == adapter.signals.expected_error
    adapter(batch(2, 100))
    assert len(adapter.events) == 1  # told when it begins


def test_without_a_threshold_nothing_is_asked() -> None:
    adapter = df.adapt(tabular())
    for seed in range(4):
        adapter(batch(seed))
    assert math.isnan(adapter.signals.expected_error)


def test_alarm_changes_no_step() -> None:
    monitor = df.Monitor(error=0.01, on_error="record")
    plain, told = df.adapt(tabular()), df.adapt(tabular(), monitor=monitor)
    for seed in range(8):
        assert torch.equal(told(batch(seed, 80)), plain(batch(seed, 80)))
    assert "expected_error" in [event.signal for event in told.events]


def test_detector_may_follow_it() -> None:
    class Counting:
        def __init__(self) -> None:
            self.drift_detected, self.seen = False, 0

        def update(self, x: float) -> None:
            self.seen += 1
            self.drift_detected = self.seen == 2

    adapter = df.adapt(tabular(), monitor=df.Monitor(detectors={"expected_error": Counting()}))
    for seed in range(4):
        adapter(batch(seed, 80))
    assert "detector of expected_error" in [event.signal for event in adapter.events]


def test_error_is_a_share_and_nothing_is_done_about_it() -> None:
    with pytest.raises(ValueError, match="error"):
        df.Monitor(error=1.5)
    with pytest.raises(ValueError, match="on_error"):
        df.Monitor(error=0.5, on_error="reset")  # type: ignore[arg-type]


def test_lines_have_it(tmp_path: Path) -> None:
    writer = JsonLines(tmp_path / "steps.jsonl")
    adapter = df.adapt(tabular(), callbacks=[writer])
    adapter(batch(0))
    writer.close()
    text = (tmp_path / "steps.jsonl").read_text()
    assert f'"estimate": {adapter.estimate.accuracy}' in text
    assert f'"estimate_low": {adapter.estimate.low}' in text


def test_filter_and_fleet_tell_it_of_their_predictions() -> None:
    filt = df.Filter(df.LinearHead(2), inference=df.Linearized(df.Hessian()))
    belief = df.Belief(torch.tensor([1.0, -1.0]), df.Full(torch.eye(2)))
    batches = normal(6, 40, 2, seed=1, dtype=torch.float32)
    _, outputs = filt.run(filt.init(belief), batches)
    assert outputs.estimate == df.Estimate.of(outputs.log_probabilities)
    assert outputs[0].estimate.samples == 40
    fleet = df.Fleet(filt, belief, streams=["north"])
    found = fleet.step({"north": batches[0]})["north"].estimate
    assert found.accuracy == pytest.approx(outputs[0].estimate.accuracy, abs=1e-5)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda own: pickle.loads(pickle.dumps(own))])
def test_a_copy_estimates_the_same(again: Any) -> None:
    model, x = tabular(), batch(7, 300)
    with torch.no_grad():
        said = model(x).argmax(-1)
    adapter = df.adapt(model, "source", data=(x, (said + 1) % 3))
    adapter(batch(0, 200))
    assert again(adapter).estimate == adapter.estimate


def test_uncertainty_that_is_not_finite_is_refused_as_predictions_are() -> None:
    adapter = df.adapt(tabular().eval())
    adapter(batch(0))
    for call in (adapter.predict, adapter.uncertainty):
        with pytest.raises(ValueError, match=r"log-probabilities .* must be finite"):
            call(batch(1) * 1e30)


@pytest.mark.parametrize("classes", [3, 5])
def test_opinions_of_other_classes_or_half_of_them_are_refused(classes: int) -> None:
    running, resumed = df.adapt(tabular()), df.adapt(tabular())
    for seed in range(3):
        running(batch(seed))
    state = dict(running.state_dict())
    if classes == 3:
        del state["opinions.counts"]
    else:
        other = Opinions.of(normal(150, classes, seed=1).log_softmax(-1))
        state |= {f"opinions.{name}": value for name, value in other.to_tensors().items()}
    with pytest.raises(ValueError, match=r"state 'opinions\."):
        resumed.load_state_dict(state)
    assert resumed.estimate.samples == 0


def test_plain_confidence_is_that_at_the_mean_before_labels_are_in_order() -> None:
    """Of the default, whose predictions have a temperature and a chain of labels behind them."""
    adapter = df.adapt(tabular(), labels=df.LabelChain())
    for seed in range(3):
        adapter(batch(seed))
    state, x = adapter.state, batch(7)
    found = adapter.predict(x)
    assert adapter._now.bound is not None
    model = adapter._now.bound.filter._bind(state)[1]
    with torch.no_grad():
        expected = model(state.belief.mean, x).softmax(-1).amax(-1)
    torch.testing.assert_close(found.plain_confidence, expected)
    assert (found.confidence < expected).any()
    before = adapter._now.opinions
    adapter(x)
    after = adapter._now.opinions
    assert before is not None
    assert after is not None
    gained = float(after.sums[:, -1].sum() - before.sums[:, -1].sum())
    assert gained == pytest.approx(float(expected.double().sum()), abs=0.5)
    assert found.pick(slice(0, 3)).plain is not None

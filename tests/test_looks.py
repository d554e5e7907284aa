"""Checks on a GPU: few looks at the device in a step, and what is refused is refused in the same
words. Tensors here lie on the CPU, and say that they do not.
"""

import copy
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import driftfilter as df
from driftfilter.base.checks import finite_at_the_end
from driftfilter.monitor.monitor import _numbers
from small import conv, normal

LOOKS = ("item", "tolist", "__bool__", "__int__", "__float__", "cpu", "nonzero")


class Looks(TorchFunctionMode):
    """Counts what the host asks of a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in LOOKS
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Weights:
    """Weights as they are given, for the first samples."""

    values: tuple[float, ...]

    def __call__(self, logits: Tensor, weights: Tensor, memory: Any) -> tuple[Tensor, Any]:
        return logits.new_tensor(self.values), memory


def make(weighting: Any = None, inference: Any = None) -> tuple[df.Filter, df.FilterState]:
    filt = df.Filter(
        df.LinearHead(3),
        observation=df.Gibbs(df.InformationMaximization(), weighting or df.Reliability(2.0)),
        inference=inference or df.Linearized(df.EmpiricalFisher(centered=False)),
    )
    belief = df.Belief(torch.linspace(-1, 1, 12), df.Diagonal(torch.ones(12)))
    return filt, filt.init(belief, seed=3)


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))


BATCH = normal(4, 4, dtype=torch.float32)


class Elsewhere(Tensor):
    """A tensor of another device, which cannot be stacked with those of the host."""

    device = property(lambda _: torch.device("cuda", 0))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.stack, torch.cat) and len({type(each) for each in args[0]}) > 1:
            raise RuntimeError("Expected all tensors to be on the same device")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_a_monitor_reads_numbers_of_each_device_together() -> None:
    there = [torch.tensor(value).as_subclass(Elsewhere) for value in (2.0, 5.0)]
    named = {"a": torch.tensor(1.0), "b": there[0], "c": 3.0, "d": torch.tensor(4), "e": there[1]}
    with Looks() as looks:
        assert _numbers(named) == {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0, "e": 5.0}
    assert looks.count <= 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("size", [40, 8, 1])
def test_the_default_with_its_monitor_on_a_gpu_is_that_of_a_cpu(size: int) -> None:
    model, batches = conv().eval(), normal(80, 3, 8, 8, dtype=torch.float32).split(size)
    here, there = df.adapt(model), df.adapt(copy.deepcopy(model).cuda())
    for batch in batches:
        torch.testing.assert_close(there(batch.cuda()).cpu(), here(batch), rtol=1e-2, atol=1e-2)


def test_a_step_looks_twice_at_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    filt, state = make()
    wanted = filt.step(state, BATCH)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    with Looks() as looks:
        found = filt.step(state, BATCH)
    assert looks.count == 2  # samples with a weight, and all checks together
    assert torch.equal(found[0].belief.mean, wanted[0].belief.mean)
    assert torch.equal(found[1].log_probabilities, wanted[1].log_probabilities)
    with Looks() as looks:
        filt.predict(state, BATCH)
    assert looks.count == 1


@pytest.mark.parametrize(
    ("weights", "inference", "reason"),
    [
        ((0.0, 0.0, 0.0, 0.0), None, "no sample passed the weighting"),
        ((1.0, 0.0, 0.0, 0.0), df.Linearized(df.EmpiricalFisher()), "1 sample with a weight"),
    ],
)
@pytest.mark.filterwarnings("ignore:no information in the batch")
def test_a_batch_that_says_nothing_changes_nothing(
    weights: tuple[float, ...], inference: Any, reason: str, as_gpu: None
) -> None:
    filt, state = make(Weights(weights), inference)
    new, _, info = filt.step(state, BATCH)
    assert not info.informative
    assert info.reason.startswith(reason)
    assert torch.equal(new.belief.mean, state.belief.mean)


@dataclass(frozen=True)
class Fails:
    """An inference that cannot do without samples."""

    curvature = df.NoCurvature()

    def __call__(self, prior: Any, energy: Any, memory: Any, randomness: Any) -> Any:
        raise RuntimeError("no samples")


def test_an_inference_that_fails_for_want_of_samples(as_gpu: None) -> None:
    filt, state = make(Weights((0.0,) * 4), Fails())
    assert filt.step(state, BATCH)[2].reason == "no sample passed the weighting"
    filt, state = make(Weights((1.0,) * 4), Fails())
    with pytest.raises(RuntimeError, match="no samples"):
        filt.step(state, BATCH)


@pytest.mark.parametrize("worst", [-1.0, math.nan])
def test_weights_below_zero_are_refused(worst: float, as_gpu: None) -> None:
    filt, state = make(Weights((1.0, worst, 1.0, 1.0)))
    with pytest.raises(ValueError, match=f"weights of the samples must be >= 0, got {worst:g}"):
        filt.step(state, BATCH)


def test_no_variance_left_is_refused_at_the_end(as_gpu: None) -> None:
    with (
        pytest.raises(df.NotPositiveDefiniteError, match="no posterior variance is left"),
        finite_at_the_end(),
    ):
        left = df.Diagonal(torch.ones(3)).condition(torch.full((1, 3), 1e30))
    assert left.values.tolist() == [0.0, 0.0, 0.0]


def test_inputs_that_are_not_finite_are_refused(as_gpu: None) -> None:
    filt, state = make()
    batch = BATCH.clone()
    batch[1, 2] = math.inf
    for call in (filt.step, filt.predict):
        with pytest.raises(ValueError, match="inputs must be finite, got inf at index"):
            call(state, batch)


def test_predictions_come_to_the_host_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the monitor, the chain of labels, the estimate and what was predicted last."""
    prediction = df.Prediction(BATCH.log_softmax(-1), torch.zeros_like(BATCH))
    told, sure = prediction.on_host
    assert told is prediction.log_probabilities
    assert torch.equal(sure, prediction.plain_confidence)
    other = prediction.retold(told.flip(0))
    assert torch.equal(other.log_probabilities, told.flip(0))
    assert torch.equal(other.on_host[0], told.flip(0))
    assert torch.equal(other.on_host[1], sure)  # of each sample by itself
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5))
    adapter, count = df.adapt(network.eval(), monitor=df.Monitor(probe=1000)), [0]
    on_host = vars(df.Prediction)["on_host"]

    def look(prediction: df.Prediction) -> Any:
        count[0] += 1
        return on_host.func(prediction)

    images = normal(16, 3, 8, 8, dtype=torch.float32)
    adapter(images)
    seen = cached_property(look)
    seen.__set_name__(df.Prediction, "on_host")
    monkeypatch.setattr(df.Prediction, "on_host", seen)
    adapter(images)
    assert count == [1]

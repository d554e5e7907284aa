"""Rules written for two libraries give the same numbers in both, of any dtype."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import driftfilter as df
from driftfilter.base import light
from driftfilter.model.centering import CENTER
from driftfilter.monitor.state import MonitorState
from small import normal


def stream(dtype: torch.dtype) -> list[Tensor]:
    moved = 2 * normal(60, 5, seed=3) + torch.tensor([2.0, 0.0, 0.0, 0.0, 0.0]).double()
    return list(moved.to(dtype).split([1] * 20 + [7, 1, 32]))


def run(dtype: torch.dtype, source: bool) -> tuple[Tensor, Tensor, MonitorState]:
    head = torch.nn.Linear(5, 5).to(dtype)
    with torch.no_grad():
        head.weight.copy_(torch.eye(5))
        head.bias.zero_()
    data = normal(50, 5, seed=4).to(dtype) if source else None
    adapter = df.adapt(head, "center", data=data)
    found = torch.cat([adapter(batch) for batch in stream(dtype)])
    return found, adapter.state.memory[CENTER], adapter._now.watch


@pytest.mark.parametrize("source", [False, True])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_a_stream_in_torch_alone_is_the_same(
    dtype: torch.dtype, close: float, source: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = run(dtype, source)
    assert not isinstance(light.lighten(own[0]), Tensor)
    monkeypatch.setattr(light, "_KNOWN", ())  # as on a GPU
    other = run(dtype, source)
    assert isinstance(light.lighten(own[0]), Tensor)
    for one, two in zip(own[:2], other[:2], strict=True):
        assert one.dtype == two.dtype == dtype
        torch.testing.assert_close(one, two, rtol=close, atol=close)
    for name in ("history", "recent"):
        one, two = (getattr(each[2], name) for each in (own, other))
        torch.testing.assert_close(one, two, rtol=close, atol=close)
    for mine, theirs in zip(own[2].signals, other[2].signals, strict=True):
        assert mine == pytest.approx(theirs, rel=100 * close, abs=close, nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_numbers_and_vectors(dtype: torch.dtype) -> None:
    known: Any = light.lighten(torch.tensor([0.5, 0.25, 0.0, 0.25], dtype=dtype))
    assert isinstance(known, Tensor) is (dtype == torch.bfloat16)
    assert light.as_torch(known).dtype == dtype
    assert float(light.total(known)) == 1
    assert float(light.entropy(known)) == pytest.approx(1.5 * math.log(2), rel=1e-2)
    assert [float(each) for each in light.numbers(known)] == [0.5, 0.25, 0.0, 0.25]
    joined = light.as_torch(light.join(known, [1.0, light.total(known)], like=known))
    assert joined.dtype == dtype
    assert joined.tolist() == [0.5, 0.25, 0.0, 0.25, 1.0, 1.0]
    labels = light.match(torch.tensor([2, 0, 2]), known)
    assert light.as_torch(light.count(labels, 4, known)).tolist() == [1, 0, 2, 0]
    assert light.as_torch(light.xlogy(known, known))[2] == 0
    assert float(light.clip(light.total(known), 0.0, 0.5)) == 0.5

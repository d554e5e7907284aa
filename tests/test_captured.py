"""Passes as CUDA graphs give what ordinary ones give; on a CPU the option changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU()
        )
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(images).mean((2, 3)))
        return logits


def model() -> nn.Module:
    torch.manual_seed(0)
    return Convolutional().eval().to(DEVICE)


def stream(sizes: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 3, 9, 9, generator=generator).to(DEVICE) for n in sizes]


def run(preset: str, batches: list[Tensor], graphs: bool, **options: Any) -> tuple[Tensor, ...]:
    adapter = df.adapt(model(), preset, cuda_graphs=graphs, **options)
    outputs = torch.cat([adapter(batch) for batch in batches])
    return outputs, adapter.belief.mean, adapter.belief.covariance.variance(), adapter.predict(batches[0]).log_probabilities


@pytest.mark.parametrize("sizes", [[16] * 6, [16, 16, 16, 7, 7, 7, 16, 7]], ids=["one-size", "two-sizes"])
@pytest.mark.parametrize("preset", ["driftfilter", "driftfilter_aug", "tent", "eata", "opgd", "opgd_diag", "bong_diag", "roid"])
@pytest.mark.filterwarnings("ignore:no source data")
def test_a_stream_in_graphs_is_the_stream(preset: str, sizes: list[int]) -> None:
    batches = stream(sizes)
    for one, other in zip(run(preset, batches, True), run(preset, batches, False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@GPU
def test_graphs_are_used() -> None:
    adapter = df.adapt(model(), cuda_graphs=True)
    for batch in stream([16] * 3):
        adapter(batch)
    captures = adapter._now.bound.filter.logits._local.captures  # type: ignore[union-attr]
    assert [len(free) for free in captures._free.values()] == [1]


@GPU
def test_under_autocast_too() -> None:
    batches = stream([32] * 5)
    with torch.autocast("cuda", torch.bfloat16):
        found, wanted = run("driftfilter", batches, True), run("driftfilter", batches, False)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.02)


@GPU
def test_a_model_that_was_changed_in_place_is_seen() -> None:
    batches, found = stream([16] * 5), []
    for graphs in (True, False):
        own = model()
        adapter = df.adapt(own, cuda_graphs=graphs)
        outputs = [adapter(batch) for batch in batches[:3]]
        with torch.no_grad():
            own.head.weight.mul_(0.5)  # type: ignore[union-attr, operator]
        found.append(torch.cat([*outputs, *(adapter(batch) for batch in batches[3:])]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_a_wrong_option_is_refused() -> None:
    with pytest.raises(ValueError, match="adapt: cuda_graphs must be True or False, got 1"):
        df.adapt(model(), cuda_graphs=1)

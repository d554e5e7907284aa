"""Kernels for batch norms: against plain sums, and the whole layer against the path by torch's own
operations.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
import driftfilter.networks.triton_batch_norm as kernels
from driftfilter.networks import sample_gradients
from driftfilter.networks.batch_norm import TwinBatchNorm

GPU = pytest.mark.skipif(
    not torch.cuda.is_available() or not kernels.available, reason="needs a GPU and Triton"
)
LAYOUTS = {"channels_first": torch.contiguous_format, "channels_last": torch.channels_last}

C = 40  # more than a tile of channels
SHAPE, SHARE, TRUST, EPS = (5, C, 6, 7), 0.5, 0.7, 1e-5


class Example(NamedTuple):
    """Inputs of a batch norm in double precision, and what its formulas say of them."""

    x: Tensor
    delta: Tensor  # gradient at the outputs
    carried: tuple[Tensor, Tensor]
    weight: Tensor

    @property
    def moments(self) -> Tensor:
        """Mean, variance and 1 / σ of the blend, mean and 1 / σ of the batch [5, c]."""
        mean, carried = self.carried
        variance, own = torch.var_mean(self.x, (0, 2, 3), correction=0)
        shift, share = own - mean, SHARE * TRUST
        mixed = carried + share * (variance - carried + (1 - share) * shift**2)
        roots = (mixed + EPS).rsqrt(), (variance + EPS).rsqrt()
        return torch.stack((mean + share * shift, mixed, roots[0], own, roots[1]))

    def sums(self, mean: Tensor) -> Tensor:
        """Σ δ and Σ δ (x - mean) over positions [2, m, c]."""
        off = self.x - mean.view(-1, 1, 1)
        return torch.stack((self.delta.sum((2, 3)), (self.delta * off).sum((2, 3))))

    @property
    def totals(self) -> Tensor:
        """Σ δ, Σ δ x̂, Σ δ (x - batch mean) and the slope w r [4, c]."""
        mean, _, scale, own, own_scale = self.moments
        every, about = self.sums(mean).sum(1)
        shifted = about + (mean - own) * every
        return torch.stack((every, about * scale, shifted, self.weight * scale / own_scale))


def example(dtype: torch.dtype, layout: torch.memory_format) -> Example:
    torch.manual_seed(0)
    x, delta = (
        torch.randn(SHAPE).to(dtype).contiguous(memory_format=layout).double() for _ in range(2)
    )
    return Example(
        x,
        delta,
        (torch.randn(C).double(), torch.rand(C).double() + 0.5),
        torch.randn(C).double(),
    )


def assert_close(one: Tensor, other: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance)


def check_kernels() -> None:
    """Every kernel against the formulas; runs in Triton's interpreter, in a process of its own."""
    for dtype in (torch.float32, torch.bfloat16):
        for layout in LAYOUTS.values():
            case = example(dtype, layout)
            x, delta = (part.to(dtype).contiguous(memory_format=layout) for part in case[:2])
            mean, variance = (part.float() for part in case.carried)
            moments = kernels.blend(x, (mean, variance), torch.tensor(TRUST), SHARE, EPS)
            assert_close(moments, case.moments)
            sums = kernels.sample_sums(delta, x, moments[0])
            assert_close(sums, case.sums(case.moments[0]))
            found = torch.empty(4, C)
            kernels._totals[2,](sums, case.weight.float(), moments, found, 5, C, C=32, M=128)
            assert_close(found, case.totals, 1e-3)
    check_blends()


def novel(case: Example) -> TwinBatchNorm:
    """A layer that blends carried, source's and batch's moments."""
    layer = TwinBatchNorm(C, eps=EPS)
    layer.own_check = lambda self, inputs: None
    layer.blend, layer.trust, layer.novelty = df.Ema(SHARE), TRUST, torch.tensor(0.3)
    layer.carried = (case.carried[0].float(), case.carried[1].float())
    return layer


def check_blends() -> None:
    """The kernels' way through a layer blends as torch's does; what comes after is for a GPU."""
    case = example(torch.float32, torch.contiguous_format)
    by_torch, by_kernel = novel(case), novel(case)
    by_torch(case.x.float())
    with (
        mock.patch.object(TwinBatchNorm, "_fits_kernels", return_value=True),
        mock.patch("driftfilter.networks.batch_norm.Renormalized"),
    ):
        by_kernel(case.x.float())
    assert isinstance(by_kernel.moments.sums, kernels.SampleSums)
    torch.testing.assert_close(by_kernel.blended, by_torch.blended, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (Linux only)")
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU see below")
def test_kernels_in_tritons_interpreter() -> None:
    paths = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    done = subprocess.run(
        [sys.executable, "-c", f"import {Path(__file__).stem} as test; test.check_kernels()"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("layout", LAYOUTS)
def test_torchs_own_path_follows_the_formulas_of_the_kernels(layout: str) -> None:
    case = example(torch.float64, LAYOUTS[layout])
    layer = TwinBatchNorm(C, eps=EPS).double()
    layer.own_check = lambda self, inputs: None
    layer.blend, layer.trust, layer.carried = df.Ema(SHARE), TRUST, case.carried
    with torch.no_grad():
        layer.weight.copy_(case.weight)
    x = case.x.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(layer(x), x, case.delta)
    mean, _, scale, own, own_scale = case.moments
    assert_close(torch.stack((*layer.blended, layer.moments.scale)), case.moments[:3], 1e-9)
    rows = sample_gradients.batch_norm_rows(
        sample_gradients.Call(layer, case.x, layer.moments), case.delta
    )
    sums = case.sums(mean)
    assert_close(rows["bias"](), sums[0], 1e-9)
    assert_close(rows["weight"](), sums[1] * scale, 1e-9)
    every, _, shifted, slope = (part.view(-1, 1, 1) for part in case.totals)
    own, own_scale = own.view(-1, 1, 1), own_scale.view(-1, 1, 1)
    off = every + (case.x - own) * own_scale**2 * shifted
    assert_close(slopes, slope * own_scale * (case.delta - off / (x.numel() // C)), 1e-9)


def test_nothing_but_a_gpu_takes_the_kernels() -> None:
    assert not kernels.fits(torch.zeros(2, 3, 4, 4))


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 70, 3),
        nn.BatchNorm2d(70),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(70, 10),
    )
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.weight, 1.0, 0.2)
            nn.init.normal_(layer.bias, 0.0, 0.2)
            assert layer.running_mean is not None
            layer.running_mean.normal_()
    return model.cuda()


def looked_at(
    statistics: df.Ema | str, images: Tensor, layout: torch.memory_format, bf16: bool
) -> tuple[Tensor, ...]:
    """Logits, rows and total gradient, and the statistics carried on."""
    net = df.Network(network().to(memory_format=layout), statistics=statistics)  # type: ignore[arg-type, call-overload]
    images = images.contiguous(memory_format=layout)
    cotangents = torch.randn(len(images), 10, generator=torch.Generator().manual_seed(1)).cuda()
    with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
        logits, pull = net.pullback(net.mean(), images)
        _, again = net.pullback(net.mean(), images)
        rows, total = pull(cotangents), again.total(cotangents)
        carried = pull.memory.get("network.statistics", torch.zeros(1))
        return logits, rows, total, carried, net(net.mean(), images)


STATISTICS = [df.Ema(0.3), df.Ema(0.5, 4.0), df.Ema(0.5, 4.0, 100.0), "batch", "source"]


@GPU
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("statistics", STATISTICS, ids=str)
def test_a_network_is_the_same_with_and_without_kernels(
    layout: str, statistics: df.Ema | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    images = torch.randn(12, 3, 9, 9, generator=torch.Generator().manual_seed(2)).cuda()
    found = looked_at(statistics, images, LAYOUTS[layout], bf16=False)
    monkeypatch.setattr(kernels, "available", False)
    wanted = looked_at(statistics, images, LAYOUTS[layout], bf16=False)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    pairs = [(found[1].sum(0), found[2])]
    if not (isinstance(statistics, df.Ema) and statistics.shift):  # which a step alone asks about
        pairs.append((found[0], found[4]))
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@GPU
def test_in_half_precision_the_difference_is_that_of_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = torch.randn(64, 3, 9, 9, generator=torch.Generator().manual_seed(2)).cuda()
    found = looked_at(df.Ema(0.5, 4.0), images, torch.channels_last, bf16=True)
    monkeypatch.setattr(kernels, "available", False)
    exact = looked_at(df.Ema(0.5, 4.0), images, torch.channels_last, bf16=False)
    for one, other in zip(found, exact, strict=True):
        assert (one - other).norm() < 0.02 * other.norm()

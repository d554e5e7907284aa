"""Kernels for batch norms: against plain sums, and the whole layer against the path by torch's own
operations.
"""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
import driftfilter.networks.triton_batch_norm as kernels

GPU = pytest.mark.skipif(
    not torch.cuda.is_available() or not kernels.available, reason="needs a GPU and Triton"
)
LAYOUTS = {"channels_first": torch.contiguous_format, "channels_last": torch.channels_last}

INTERPRETED = """
import torch
import driftfilter.networks.triton_batch_norm as kernels

torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16):
    for layout in (torch.contiguous_format, torch.channels_last):
        shape = (5, 70, 6, 7)
        x, delta = (
            torch.randn(shape).to(dtype).contiguous(memory_format=layout) for _ in range(2)
        )
        mean = torch.randn(70)
        total, spread = kernels.sample_sums(delta, x, mean)
        wide, centered = delta.double(), x.double() - mean.double().view(-1, 1, 1)
        torch.testing.assert_close(total.double(), wide.sum((2, 3)), rtol=1e-5, atol=1e-5)
        product = (wide * centered).sum((2, 3))
        torch.testing.assert_close(spread.double(), product, rtol=1e-5, atol=1e-5)

        carried, trust, eps = torch.rand(70) + 0.5, torch.tensor(0.7), 1e-5
        moments = kernels.blend(x, (mean, carried), trust, 0.5, eps)
        variance, own = torch.var_mean(x.double(), (0, 2, 3), correction=0)
        shift, share = own - mean, 0.35
        mixed = carried + share * (variance - carried + (1 - share) * shift**2)
        roots = (mixed + eps).rsqrt(), (variance + eps).rsqrt()
        wanted = torch.stack((mean + share * shift, mixed, roots[0], own, roots[1]))
        torch.testing.assert_close(moments.double(), wanted, rtol=1e-4, atol=1e-5)

        weight, found = torch.randn(70), torch.empty(4, 70)
        sums = torch.stack((total, spread))
        kernels._totals[3,](sums, weight, moments, found, 5, 70, C=32, M=128)
        every, about = total.sum(0), spread.sum(0)
        slope = weight * moments[2] / moments[4]
        shifted = about + (moments[0] - moments[3]) * every
        wanted = torch.stack((every, about * moments[2], shifted, slope))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
"""


@pytest.mark.skipif(
    not kernels.available or torch.cuda.is_available(), reason="needs Triton; on a GPU see below"
)
def test_kernels_in_tritons_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


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


@GPU
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("statistics", [df.Ema(0.3), df.Ema(0.5, 4.0), "batch", "source"], ids=str)
def test_a_network_is_the_same_with_and_without_kernels(
    layout: str, statistics: df.Ema | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    images = torch.randn(12, 3, 9, 9, generator=torch.Generator().manual_seed(2)).cuda()
    found = looked_at(statistics, images, LAYOUTS[layout], bf16=False)
    monkeypatch.setattr(kernels, "available", False)
    for one, other in zip(
        found, looked_at(statistics, images, LAYOUTS[layout], bf16=False), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1].sum(0), found[2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[0], found[4], rtol=1e-4, atol=1e-5)


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

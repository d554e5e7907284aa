"""Batch renormalisation in one pass, against its formula and autograd in float64."""

import pytest
import torch
from torch import Tensor, nn

from driftfilter.networks.batch_norm import Ema, prepare
from driftfilter.networks.renormalized import fits_cpu, renormalize_on_cpu

FORMATS = {"first": torch.contiguous_format, "last": torch.channels_last}
EPS = 1e-3


def case(dtype: torch.dtype, layout: str) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    inputs = 2 * torch.randn(7, 3, 4, 5, generator=generator, dtype=dtype) + 1
    flow = torch.randn(inputs.shape, generator=generator, dtype=dtype)
    weight, bias, mean = torch.randn(3, 3, generator=generator, dtype=dtype)
    variance = torch.rand(3, generator=generator, dtype=dtype) + 0.5
    laid = inputs.contiguous(memory_format=FORMATS[layout])
    return laid, flow, weight, bias, mean, variance


def by_formula(
    inputs: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    """((x - m_b) / σ_b · r + d) w + b, r and d without a derivative."""
    shape = (1, -1, 1, 1)
    own_mean = inputs.mean((0, 2, 3))
    own_scale = (inputs.var((0, 2, 3), correction=0) + EPS).rsqrt()
    scale = (variance + EPS).rsqrt()
    r, d = (scale / own_scale).detach(), ((own_mean - mean) * scale).detach()
    own = (inputs - own_mean.view(shape)) * own_scale.view(shape)
    return (own * r.view(shape) + d.view(shape)) * weight.view(shape) + bias.view(shape)


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_derivatives_are_those_of_the_formula(dtype: torch.dtype, layout: str) -> None:
    inputs, flow, weight, bias, mean, variance = case(dtype, layout)
    leaves = [part.clone().requires_grad_() for part in (inputs, weight, bias)]
    wide = [part.double().clone().requires_grad_() for part in (inputs, weight, bias)]
    batch = (inputs.mean((0, 2, 3)), inputs.var((0, 2, 3), correction=0))
    x, w, b = leaves
    outputs = renormalize_on_cpu(x, (w, b), batch, (mean, variance), EPS)
    wanted = by_formula(wide[0], wide[1], wide[2], mean.double(), variance.double())
    tolerance = 1e-4 if dtype == torch.float32 else 1e-9
    torch.testing.assert_close(outputs.double(), wanted, rtol=tolerance, atol=tolerance)
    found = torch.autograd.grad(outputs, leaves, flow)
    exact = torch.autograd.grad(wanted, wide, flow.double())
    for own, other in zip(found, exact, strict=True):
        torch.testing.assert_close(own.double(), other, rtol=tolerance, atol=tolerance)
    assert outputs.is_contiguous(memory_format=FORMATS[layout])


def test_bfloat16_is_normalised_in_float32() -> None:
    inputs, flow, weight, bias, mean, variance = case(torch.float32, "last")
    batch = (inputs.mean((0, 2, 3)), inputs.var((0, 2, 3), correction=0))
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        x, w = inputs.to(dtype).requires_grad_(), weight.clone().requires_grad_()
        assert fits_cpu(x, w, bias)
        outputs = renormalize_on_cpu(x, (w, bias), batch, (mean, variance), EPS)
        assert outputs.dtype == dtype
        gradients = torch.autograd.grad(outputs, (x, w), flow.to(dtype))
        found.append([part.float() for part in (outputs, *gradients)])
    torch.testing.assert_close(*found, rtol=0.05, atol=0.1)


def test_a_batch_norm_takes_it_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = case(torch.float32, "first")[0]
    layer = nn.BatchNorm2d(3).eval()
    (norm,) = prepare(nn.Sequential(layer), Ema(0.3))
    outputs = norm(inputs)
    assert "RenormalizedOnCpu" in type(outputs.grad_fn).__name__
    plain = nn.BatchNorm2d(3, affine=False).eval()
    (other,) = prepare(nn.Sequential(plain), Ema(0.3))
    assert not fits_cpu(inputs, other.weight, other.bias)
    torch.testing.assert_close(other(inputs), outputs.detach(), rtol=1e-5, atol=1e-5)

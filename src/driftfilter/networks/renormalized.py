"""Batch renormalisation on a CPU by torch's own kernels, with the batch's moments worked out once.

As a batch norm with another scale and shift (batch_norm.py) torch would work out the moments of
the batch a second time. Forward it is a batch norm in evaluation mode, by the blended moments;
backward that of training, by the batch's.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def fits_cpu(inputs: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether torch's kernels take inputs with this scale and shift."""
    if weight is None or bias is None or inputs.device.type != "cpu":
        return False
    alike = inputs.dtype == weight.dtype == bias.dtype
    mixed = inputs.dtype == torch.bfloat16 and weight.dtype == bias.dtype == torch.float32
    known = mixed or (alike and inputs.dtype in (torch.float32, torch.float64))
    return known and not torch._C._are_functorch_transforms_active()


class RenormalizedOnCpu(torch.autograd.Function):
    """(x - m) / σ · w + b, differentiated as ((x - m_b) / σ_b · r + d) w + b with r and d fixed;
    ``batch`` and ``blend`` are mean and variance [c].
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor,
        batch: tuple[Tensor, Tensor],
        blend: tuple[Tensor, Tensor],
        eps: float,
    ) -> Tensor:
        """One pass."""
        ctx.save_for_backward(inputs, weight)
        ctx.batch, ctx.blend, ctx.eps = batch, blend, eps
        return _normalize(inputs, weight, bias, blend, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, flow: Tensor) -> tuple[Tensor | None, ...]:
        """dx = w r / σ_b (δ - mean δ - x̂_b mean δ x̂_b), dw = r Σ δ x̂_b + d Σ δ, db = Σ δ."""
        inputs, weight = ctx.saved_tensors
        (mean, variance), (own_mean, own_variance) = ctx.blend, ctx.batch
        scale, own_scale = (variance + ctx.eps).rsqrt(), (own_variance + ctx.eps).rsqrt()
        r, d = scale / own_scale, (own_mean - mean) * scale
        wanted = [ctx.needs_input_grad[0], True, True]
        gradient, centered, total = torch.ops.aten.native_batch_norm_backward(
            flow,
            inputs,
            weight * r,
            None,
            None,
            own_mean,
            own_scale,
            True,
            ctx.eps,
            wanted,
        )
        found = gradient if ctx.needs_input_grad[0] else None
        return found, r * centered + d * total, total, None, None, None


def renormalize_on_cpu(
    inputs: Tensor,
    affine: tuple[Tensor, Tensor],
    batch: tuple[Tensor, Tensor],
    blend: tuple[Tensor, Tensor],
    eps: float,
) -> Tensor:
    """Renormalise by a scale and a shift [c]; see ``RenormalizedOnCpu``."""
    if not torch.is_grad_enabled():
        return _normalize(inputs, *affine, blend, eps)
    outputs: Tensor = RenormalizedOnCpu.apply(inputs, *affine, batch, blend, eps)  # type: ignore[no-untyped-call]
    return outputs


def _normalize(
    inputs: Tensor, weight: Tensor, bias: Tensor, blend: tuple[Tensor, Tensor], eps: float
) -> Tensor:
    """Not a number where the variance is infinite: (x - m) / ∞ would hide an overflow."""
    told = bias + 0 * blend[1]
    outputs: Tensor = torch.native_batch_norm(inputs, weight, told, *blend, False, 0.0, eps)[0]
    return outputs

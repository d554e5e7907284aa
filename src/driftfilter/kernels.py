"""Kernels for batch norms on a GPU: what a step asks of each layer in one pass over its memory.

Triton, where torch has it; elsewhere ``available`` is False and the same is worked out by torch's own operations.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl

    available = True
except ImportError:  # torch for CPUs, or for Windows
    available = False

Moments: TypeAlias = tuple[Tensor, Tensor]  # mean and 1 / standard deviation [c]
_CHANNELS, _POSITIONS = 64, 32  # of a tile


if available:

    @triton.jit  # type: ignore[untyped-decorator]
    def _sums(flow, inputs, mean, total, spread, c, s, channel_step, position_step, C: tl.constexpr, S: tl.constexpr):  # type: ignore[no-untyped-def]
        """One sample, C channels: Σ δ and Σ δ (x - mean) over the positions."""
        sample, channels = tl.program_id(0), tl.program_id(1) * C + tl.arange(0, C)
        inside = channels < c
        center = tl.load(mean + channels, inside, 0.0)
        start = sample.to(tl.int64) * c * s
        first, second = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
        for position in range(0, s, S):
            positions = position + tl.arange(0, S)
            at = start + positions[:, None] * position_step + channels[None, :] * channel_step
            there = (positions < s)[:, None] & inside[None, :]
            delta = tl.load(flow + at, there, 0.0).to(tl.float32)
            value = tl.load(inputs + at, there, 0.0).to(tl.float32)
            first += tl.sum(delta, 0)
            second += tl.sum(delta * (value - center[None, :]), 0)
        out = sample * c + channels
        tl.store(total + out, first, inside)
        tl.store(spread + out, second, inside)


def fits(inputs: Tensor) -> bool:
    """Whether the kernels take such inputs of a batch norm: on a GPU, dense, in single or half precision."""
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    return available and inputs.is_cuda and inputs.dtype in kinds and _layout(inputs) is not None


def _layout(values: Tensor) -> torch.memory_format | None:
    if values.is_contiguous():
        return torch.contiguous_format
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(values.dim())
    return wanted if wanted is not None and values.is_contiguous(memory_format=wanted) else None


def dense(flow: Tensor, inputs: Tensor) -> Tensor:
    """A gradient in the layout of the inputs."""
    layout = _layout(inputs)
    assert layout is not None
    return flow.contiguous(memory_format=layout)


def sample_sums(flow: Tensor, inputs: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_s δ and Σ_s δ (x - mean) over the positions s of every sample: [m, c] both, in float32; of δ, x [m, c, …], mean [c]."""
    flow = dense(flow, inputs)
    m, c = inputs.shape[:2]
    s = inputs[0, 0].numel()
    total, spread = torch.empty((2, m, c), dtype=torch.float32, device=inputs.device)
    steps = (s, 1) if inputs.is_contiguous() else (1, c)
    tile: dict[str, Any] = {"C": _CHANNELS, "S": _POSITIONS}
    _sums[m, triton.cdiv(c, _CHANNELS)](flow, inputs, mean.float(), total, spread, c, s, *steps, **tile)
    return total, spread


class SampleSums:
    """The sums of one call of a layer, which its rows and its own backward pass share."""

    def __init__(self, inputs: Tensor, mean: Tensor) -> None:
        self.inputs, self.mean = inputs, mean
        self._known: tuple[int, tuple[Tensor, Tensor]] | None = None

    def of(self, flow: Tensor) -> tuple[Tensor, Tensor]:
        """Those of this gradient at the outputs; worked out once."""
        if self._known is None or self._known[0] != flow.data_ptr():
            self._known = (flow.data_ptr(), sample_sums(flow, self.inputs, self.mean))
        return self._known[1]

    def forget(self) -> None:
        """The gradient has gone, and another may come to lie where it was."""
        self._known = None


class Renormalized(torch.autograd.Function):
    """(x - mean) / σ · w + b with the derivative of batch renormalisation (see statistics): one pass forward, two back."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor, batch: Moments, moments: Moments, sums: SampleSums
    ) -> Tensor:
        """``batch`` and ``moments``: those of the batch and of the blend."""
        ctx.save_for_backward(inputs, weight)
        ctx.batch, ctx.moments, ctx.sums = batch, moments, sums
        outputs: Tensor = torch.batch_norm_elemt(inputs, weight, bias, *moments, 0.0)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, flow: Tensor) -> tuple[Tensor | None, ...]:
        """r and d fixed: dx = w r / σ_b (δ - mean δ - x̂_b mean δ x̂_b)."""
        inputs, weight = ctx.saved_tensors
        flow = dense(flow, inputs)
        (batch_mean, batch_scale), (mean, scale) = ctx.batch, ctx.moments
        total, spread = (part.sum(0) for part in ctx.sums.of(flow))
        ctx.sums.forget()
        gradient = None
        if ctx.needs_input_grad[0]:
            slope = weight * (scale / batch_scale)
            centered = spread + (mean - batch_mean) * total
            count = torch.full((1,), inputs.numel() // inputs.shape[1], dtype=torch.int32, device=inputs.device)
            gradient = torch.batch_norm_backward_elemt(flow, inputs, batch_mean, batch_scale, slope, total, centered, count)
        return gradient, spread * scale, total, None, None, None

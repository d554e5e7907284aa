"""Kernels for batch norms on a GPU: what a step asks of each layer, in few passes over its memory.

They need Triton, and torch for GPUs or Triton's interpreter (TRITON_INTERPRET=1); without them
``fits`` is False and torch's own operations do the work (batch_norm.py, sample_gradients.py).
Layouts: a tensor [m, c, …] is seen as m samples of s positions of c channels, channels first or
last.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

available = bool(torch.version.cuda or torch.version.hip or os.environ.get("TRITON_INTERPRET"))
if available:  # else importing Triton is a second lost
    try:
        import triton
        import triton.language as tl
    except ImportError:  # torch for Windows
        available = False

_CHANNELS, _POSITIONS = 32, 128  # of a tile
_PARTS = 128  # in which the samples of a batch are summed up at once


if available:

    @triton.jit  # type: ignore[untyped-decorator]
    def _sample_sums(  # type: ignore[no-untyped-def]
        flow,
        inputs,
        mean,
        sums,
        m,
        c,
        s,
        channel_step,
        position_step,
        C: tl.constexpr,
        S: tl.constexpr,
    ):
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
        tl.store(sums + out, first, inside)
        tl.store(sums + m * c + out, second, inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def _part_sums(  # type: ignore[no-untyped-def]
        inputs,
        center,
        parts,
        m,
        c,
        s,
        channel_step,
        position_step,
        P: tl.constexpr,
        C: tl.constexpr,
        S: tl.constexpr,
    ):
        """Every P-th sample, C channels: Σ (x - center) and its square; a center near the mean
        keeps the digits.
        """
        part, channels = tl.program_id(0), tl.program_id(1) * C + tl.arange(0, C)
        inside = channels < c
        middle = tl.load(center + channels, inside, 0.0)
        first, second = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
        start = part.to(tl.int64) * c * s
        for _ in range(part, m, P):
            for position in range(0, s, S):
                positions = position + tl.arange(0, S)
                at = start + positions[:, None] * position_step + channels[None, :] * channel_step
                there = (positions < s)[:, None] & inside[None, :]
                value = tl.load(inputs + at, there, 0.0).to(tl.float32)
                off = tl.where(there, value - middle[None, :], 0.0)
                first += tl.sum(off, 0)
                second += tl.sum(off * off, 0)
            start += P * c * s
        tl.store(parts + part * c + channels, first, inside)
        tl.store(parts + (P + part) * c + channels, second, inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def _blend(  # type: ignore[no-untyped-def]
        parts, center, variance, trust, out, c, count, share, eps, P: tl.constexpr, C: tl.constexpr
    ):
        """C channels: the batch's moments from the parts, and their mixture with the carried ones
        (see batch_norm.py).
        """
        channels = tl.program_id(0) * C + tl.arange(0, C)
        inside = channels < c
        at = tl.arange(0, P)[:, None] * c + channels[None, :]
        shift = tl.sum(tl.load(parts + at, inside[None, :], 0.0), 0) / count
        square = tl.sum(tl.load(parts + P * c + at, inside[None, :], 0.0), 0) / count
        own = tl.maximum(square - shift * shift, 0.0)
        old = tl.load(center + channels, inside, 0.0)
        spread = tl.load(variance + channels, inside, 1.0)
        part = share * tl.load(trust)
        mixed = spread + part * (own - spread + (1 - part) * shift * shift)
        tl.store(out + channels, old + part * shift, inside)
        tl.store(out + c + channels, mixed, inside)
        tl.store(out + 2 * c + channels, 1 / tl.sqrt(mixed + eps), inside)
        tl.store(out + 3 * c + channels, old + shift, inside)
        tl.store(out + 4 * c + channels, 1 / tl.sqrt(own + eps), inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def _totals(sums, weight, blend, out, m, c, C: tl.constexpr, M: tl.constexpr):  # type: ignore[no-untyped-def]
        """C channels: the sums of all samples, about the blend's mean and the batch's, and the
        slope w r.
        """
        channels = tl.program_id(0) * C + tl.arange(0, C)
        inside = channels < c
        total, spread = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
        for sample in range(0, m, M):
            samples = sample + tl.arange(0, M)
            at, there = (
                samples[:, None] * c + channels[None, :],
                (samples < m)[:, None] & inside[None, :],
            )
            total += tl.sum(tl.load(sums + at, there, 0.0), 0)
            spread += tl.sum(tl.load(sums + m * c + at, there, 0.0), 0)
        mean, scale = (
            tl.load(blend + channels, inside, 0.0),
            tl.load(blend + 2 * c + channels, inside, 0.0),
        )
        own_mean, own_scale = (
            tl.load(blend + 3 * c + channels, inside, 0.0),
            tl.load(blend + 4 * c + channels, inside, 1.0),
        )
        tl.store(out + channels, total, inside)
        tl.store(out + c + channels, spread * scale, inside)
        tl.store(out + 2 * c + channels, spread + (mean - own_mean) * total, inside)
        tl.store(
            out + 3 * c + channels,
            tl.load(weight + channels, inside, 0.0) * scale / own_scale,
            inside,
        )


def fits(inputs: Tensor) -> bool:
    """Whether the kernels take inputs of a batch norm: on a GPU, dense, in single or half
    precision.
    """
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    return available and inputs.is_cuda and inputs.dtype in kinds and _layout(inputs) is not None


def _layout(values: Tensor) -> torch.memory_format | None:
    if values.is_contiguous():
        return torch.contiguous_format
    wanted = {4: torch.channels_last, 5: torch.channels_last_3d}.get(values.dim())
    return wanted if wanted is not None and values.is_contiguous(memory_format=wanted) else None


def _dense(flow: Tensor, inputs: Tensor) -> Tensor:
    """A gradient in the layout of the inputs."""
    layout = _layout(inputs)
    assert layout is not None
    return flow.contiguous(memory_format=layout)


def _steps(values: Tensor) -> tuple[int, int, int, int, int]:
    """m, c, s, and how far the next channel and the next position are."""
    m, c = values.shape[:2]
    s = values.numel() // (m * c)
    return m, c, s, *((s, 1) if values.is_contiguous() else (1, c))


def sample_sums(flow: Tensor, inputs: Tensor, mean: Tensor) -> Tensor:
    """Σ_s δ and Σ_s δ (x - mean) over the positions s of every sample [2, m, c], in float32; δ, x
    [m, c, …], mean [c].
    """
    flow, steps = _dense(flow, inputs), _steps(inputs)
    m, c = steps[:2]
    sums = torch.empty((2, m, c), dtype=torch.float32, device=inputs.device)
    _sample_sums[m, triton.cdiv(c, _CHANNELS)](
        flow, inputs, mean.float(), sums, *steps, C=_CHANNELS, S=_POSITIONS
    )
    return sums


def blend(
    inputs: Tensor, carried: tuple[Tensor, Tensor], trust: Tensor, share: float, eps: float
) -> Tensor:
    """The moments of a batch [m, c, …] mixed with carried ones at the share α = share · trust:
    [5, c], see batch_norm.py.

    Mean, variance and 1 / σ of the mixture; mean and 1 / σ of the batch.
    """
    steps = _steps(inputs)
    m, c, s = steps[:3]
    parts = torch.empty((2, _PARTS, c), dtype=torch.float32, device=inputs.device)
    found = torch.empty((5, c), dtype=torch.float32, device=inputs.device)
    tiles = triton.cdiv(c, _CHANNELS)
    _part_sums[_PARTS, tiles](
        inputs, carried[0], parts, *steps, P=_PARTS, C=_CHANNELS, S=_POSITIONS
    )
    _blend[tiles,](
        parts, *carried, trust, found, c, float(m * s), share, eps, P=_PARTS, C=_CHANNELS
    )
    return found


class SampleSums:
    """The sums of one call of a layer, which its rows and its own backward pass share."""

    def __init__(self, inputs: Tensor, mean: Tensor) -> None:
        self.inputs, self.mean = inputs, mean
        self._known: tuple[int, Tensor] | None = None

    def of(self, flow: Tensor) -> Tensor:
        """Sums of a gradient at the outputs [2, m, c], worked out once."""
        if self._known is None or self._known[0] != flow.data_ptr():
            self._known = (flow.data_ptr(), sample_sums(flow, self.inputs, self.mean))
        return self._known[1]

    def forget(self) -> None:
        """Forget the gradient: another one may come to lie where it was."""
        self._known = None


class Renormalized(torch.autograd.Function):
    """(x - mean) / σ · w + b with the derivative of batch renormalisation (see batch_norm.py);
    ``moments``: of ``blend``.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor, moments: Tensor, sums: SampleSums
    ) -> Tensor:
        """One pass."""
        ctx.save_for_backward(inputs, weight)
        ctx.moments, ctx.sums = moments, sums
        mean, _, scale, _, _ = moments
        return torch.batch_norm_elemt(inputs, weight, bias, mean, scale, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, flow: Tensor) -> tuple[Tensor | None, ...]:
        """With r and d fixed, dx = w r / σ_b (δ - mean δ - x̂_b mean δ x̂_b): two passes, of which
        rows need the first too.
        """
        inputs, weight = ctx.saved_tensors
        flow, sums = _dense(flow, inputs), ctx.sums.of(flow)
        ctx.sums.forget()
        m, c = inputs.shape[:2]
        found = torch.empty((4, c), dtype=torch.float32, device=inputs.device)
        _totals[triton.cdiv(c, _CHANNELS),](
            sums, weight, ctx.moments, found, m, c, C=_CHANNELS, M=_POSITIONS
        )
        total, own, centered, slope = found
        gradient = None
        if ctx.needs_input_grad[0]:
            count = torch.full((1,), inputs.numel() // c, dtype=torch.int32, device=inputs.device)
            _, _, _, batch_mean, batch_scale = ctx.moments
            gradient = torch.batch_norm_backward_elemt(
                flow, inputs, batch_mean, batch_scale, slope, total, centered, count
            )
        return gradient, own, total, None, None

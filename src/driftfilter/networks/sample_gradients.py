"""Per-sample gradient rows of one layer's parameters, from what flowed into it and the gradient at
its outputs.

A rule looks at one call of a layer: inputs [m, …] and flow δ [m, …], and gives rows [m, *shape] of
the layer's own parameters. A layer may see m = g·n inputs for n samples (windows, frames), those of
one sample next to each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional, grad as convolutions
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from driftfilter.networks.batch_norm import Moments, is_plain
from driftfilter.networks.triton_batch_norm import SampleSums, fits

Rows: TypeAlias = dict[str, Callable[[], Tensor]]  # by parameter name, worked out when asked for

_CONVOLUTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: convolutions.conv1d_weight,
    nn.Conv2d: convolutions.conv2d_weight,
    nn.Conv3d: convolutions.conv3d_weight,
}


class Call(NamedTuple):
    """One call of a layer."""

    module: Any
    inputs: Tensor  # [m, …]
    moments: Moments | None  # by which a batch norm normalised them

    def cast(self, flow: Tensor, dtype: torch.dtype) -> tuple[Call, Tensor]:
        """The same and the gradient at its outputs in θ's dtype, where they were in half precision.

        A batch norm on a GPU sees to that itself.
        """
        if flow.is_cuda and isinstance(self.module, _BatchNorm):
            return self, flow
        lower = self.inputs.is_floating_point() and self.inputs.dtype != dtype
        return self._replace(inputs=self.inputs.to(dtype)) if lower else self, flow.to(dtype)


def per_sample(values: Tensor, samples: int) -> Tensor:
    """[m, …] -> [n, …], the sum of the m / n inputs of each sample."""
    return values if len(values) == samples else values.unflatten(0, (samples, -1)).sum(1)


def _products(left: Tensor, right: Tensor) -> Tensor:
    """Σ_s a b of [m, c, s], a few samples at a time so that the products stay in the cache."""
    if left.numel() < 1 << 20:
        whole: Tensor = torch.linalg.vecdot(left, right)
        return whole
    pieces = zip(left.split(8), right.split(8), strict=True)
    return torch.cat([torch.linalg.vecdot(one, other) for one, other in pieces])


def _linear(call: Call, flow: Tensor) -> Rows:
    deltas, values = flow.reshape(len(flow), -1, flow.shape[-1]), positions(call)
    return {"weight": lambda: deltas.mT @ values, "bias": lambda: deltas.sum(1)}


def positions(call: Call) -> Tensor:
    """Inputs of a linear layer [m, s, in], s the positions of a sample."""
    return call.inputs.reshape(len(call.inputs), -1, call.inputs.shape[-1])


def padded(module: _ConvNd, inputs: Tensor) -> Tensor:
    """Inputs of a convolution with the padding that it puts around them."""
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return functional.pad(inputs, module._reversed_padding_repeated_twice, mode)


def convolution_weight_rows(call: Call, flow: Tensor, filters: int) -> Tensor:
    """Rows [m, filters, …] of a convolution's weight: one grouped convolution that takes every
    sample as a group.
    """
    module, inputs = call.module, padded(call.module, call.inputs)
    shape = (len(inputs) * filters, module.in_channels // module.groups, *module.kernel_size)
    gradient = next(rule for kind, rule in _CONVOLUTIONS.items() if isinstance(module, kind))
    flat: Tensor = gradient(
        inputs.flatten(0, 1).unsqueeze(0),
        shape,
        flow.flatten(0, 1).unsqueeze(0),
        stride=module.stride,
        dilation=module.dilation,
        groups=len(inputs) * module.groups,
    )
    rows: Tensor = flat.unflatten(0, (-1, filters))
    return rows


def _convolution(call: Call, flow: Tensor) -> Rows:
    return {
        "weight": lambda: convolution_weight_rows(call, flow, call.module.out_channels),
        "bias": lambda: flow.flatten(2).sum(-1),
    }


def _embedding(call: Call, flow: Tensor) -> Rows:
    def weight() -> Tensor:
        module, words = call.module, call.inputs.flatten(1)  # [m, s]
        deltas = flow.reshape(*words.shape, -1)
        rows = flow.new_zeros(len(words), module.num_embeddings, deltas.shape[-1])
        rows.scatter_add_(1, words.unsqueeze(-1).expand_as(deltas), deltas)
        if module.padding_idx is not None:
            rows[:, module.padding_idx] = 0
        return rows

    return {"weight": weight}


def _batch_norm(call: Call, flow: Tensor) -> Rows:
    """Σ_s δ x̂ and Σ_s δ over the positions s of each sample, x̂ = (x - mean) / deviation, without
    forming x̂.
    """
    module = call.module
    mean, scale, sums = call.moments or Moments(
        module.running_mean, (module.running_var + module.eps).rsqrt()
    )
    if sums is not None or fits(call.inputs):
        total, spread = (sums or SampleSums(call.inputs, mean)).of(flow)
        return {"weight": lambda: spread * scale, "bias": lambda: total}
    if flow.is_cuda:
        return _batch_norm_on_gpu(call.inputs, flow, mean, scale)
    deltas, values = (
        flow.reshape(*flow.shape[:2], -1),
        call.inputs.reshape(*call.inputs.shape[:2], -1),
    )
    total = deltas.sum(-1)
    return {
        "weight": lambda: (_products(deltas, values) - total * mean) * scale,
        "bias": lambda: total,
    }


def _batch_norm_on_gpu(inputs: Tensor, flow: Tensor, mean: Tensor, scale: Tensor) -> Rows:
    """The same from torch's own reduction, Σ δ and Σ δ (x - mean) in one pass, with each sample's
    channels as channels.

    In another layout than channels first, or in half precision, by plain sums in the dtype of the
    moments: the reduction would need a copy in the layout that it knows.
    """
    m, c = flow.shape[:2]
    if not (
        flow.dtype == mean.dtype == inputs.dtype and flow.is_contiguous() and inputs.is_contiguous()
    ):

        def summed(values: Tensor) -> Tensor:
            return (
                values.flatten(2).sum(2, dtype=mean.dtype)
                if values.dim() > 2
                else values.to(mean.dtype)
            )

        centers = mean.view(-1, *[1] * (inputs.dim() - 2))
        return {
            "weight": lambda: summed(flow * (inputs - centers)) * scale,
            "bias": lambda: summed(flow),
        }
    flat = (flow.reshape(1, m * c, -1), inputs.reshape(1, m * c, -1))
    moments = (mean.to(flow.dtype).repeat(m), scale.to(flow.dtype).repeat(m))
    total, spread, _, _ = torch.batch_norm_backward_reduce(
        *flat, *moments, None, True, False, False
    )
    return {"weight": lambda: spread.view(m, c) * scale, "bias": lambda: total.view(m, c)}


def _norm_by(
    normalize: Callable[[Any, Tensor], Tensor], channels_first: bool
) -> Callable[[Call, Tensor], Rows]:
    """δ x̂ and δ, summed over positions, where x̂ is what the layer gives before its scale and
    shift.
    """

    def summed(values: Tensor, shape: torch.Size) -> Tensor:
        return (
            values.flatten(2).sum(-1)
            if channels_first
            else values.reshape(len(values), -1, *shape).sum(1)
        )

    def rule(call: Call, flow: Tensor) -> Rows:
        shape = call.module.weight.shape
        return {
            "weight": lambda: summed(flow * normalize(call.module, call.inputs), shape),
            "bias": lambda: summed(flow, shape),
        }

    return rule


def _instance(module: Any, inputs: Tensor) -> Tensor:
    fixed = module.track_running_stats
    return functional.instance_norm(
        inputs, module.running_mean, module.running_var, None, None, not fixed, 0.0, module.eps
    )


_INSTANCE = _norm_by(_instance, True)
_LAYER = _norm_by(
    lambda module, x: functional.layer_norm(x, module.normalized_shape, eps=module.eps), False
)
_RMS = _norm_by(
    lambda module, x: functional.rms_norm(x, module.normalized_shape, eps=module.eps), False
)
_GROUP = _norm_by(
    lambda module, x: functional.group_norm(x, module.num_groups, eps=module.eps), True
)

_RULES: dict[type[nn.Module], Callable[[Call, Tensor], Rows]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    nn.Embedding: _embedding,
    nn.LayerNorm: _LAYER,
    nn.RMSNorm: _RMS,
    nn.GroupNorm: _GROUP,
    nn.InstanceNorm1d: _INSTANCE,
    nn.InstanceNorm2d: _INSTANCE,
    nn.InstanceNorm3d: _INSTANCE,
    _BatchNorm: _batch_norm,
}


def layer_rows(call: Call, flow: Tensor) -> Rows:
    """Rows of the parameters of a layer that has a rule."""
    rule = rule_of(call.module)
    assert rule is not None
    return rule(call, flow)


def rule_of(module: nn.Module) -> Callable[[Call, Tensor], Rows] | None:
    """The rule of a layer; None for a layer of another kind, or one that changed what its kind
    does.
    """
    for kind, rule in _RULES.items():
        if isinstance(module, kind):
            own = is_plain(module) or type(module).forward is kind.forward
            return rule if own and not _counts_words(module) else None
    return None


def _counts_words(module: nn.Module) -> bool:
    """Whether an embedding's gradient depends on more than the words of one sample."""
    return isinstance(module, nn.Embedding) and (
        module.scale_grad_by_freq or module.max_norm is not None
    )

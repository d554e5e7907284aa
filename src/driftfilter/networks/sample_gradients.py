"""Per-sample gradient rows of one layer's parameters, from what flowed into it and the gradient at
its outputs.

A rule looks at one call of a layer: inputs [m, …] and flow δ [m, …], and gives rows [m, *shape] of
the layer's own parameters. A layer may see m = g·n inputs for n samples (windows, frames), those of
one sample next to each other.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional, grad as convolutions
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from driftfilter.networks.batch_norm import Moments
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


Rule: TypeAlias = Callable[[Call, Tensor], Rows]  # of one kind of layer


def layer_rows(call: Call, flow: Tensor, rule: Rule, names: Iterable[str]) -> dict[str, Tensor]:
    """Rows [m, …] of the parameters of a layer with these names, if the rule has them."""
    work, found = rule(call, flow), {}
    for name in names:
        if name in work:
            found[name] = work[name]()
    return found


def cast_call(call: Call, flow: Tensor, dtype: torch.dtype) -> tuple[Call, Tensor]:
    """A call and the gradient at its outputs in θ's dtype, if they are in half precision.

    A batch norm sees to that itself, a few samples at a time.
    """
    half = flow.dtype in (torch.bfloat16, torch.float16) and call.inputs.dtype == flow.dtype
    if isinstance(call.module, _BatchNorm) and (flow.is_cuda or half):
        return call, flow
    lower = call.inputs.is_floating_point() and call.inputs.dtype != dtype
    return call._replace(inputs=call.inputs.to(dtype)) if lower else call, flow.to(dtype)


_PIECE = 8  # samples at a time, whose products stay in the cache


def _products(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Σ_s a b of [m, c, s] in a dtype, a few samples at a time, by one memory for the products."""
    if left.numel() < 1 << 20:
        whole: Tensor = torch.linalg.vecdot(left.to(dtype), right.to(dtype))
        return whole
    sums = left.new_empty(left.shape[:2], dtype=dtype)
    products = torch.empty_like(left[:_PIECE], dtype=dtype)
    for own, one, other in zip(
        sums.split(_PIECE), left.split(_PIECE), right.split(_PIECE), strict=True
    ):
        torch.mul(one.to(dtype), other.to(dtype), out=products[: len(one)])
        torch.sum(products[: len(one)], -1, out=own)
    return sums


def linear_rows(call: Call, flow: Tensor) -> Rows:
    """δᵀ x and δ, summed over positions."""
    deltas, values = flow.reshape(len(flow), -1, flow.shape[-1]), positions(call)
    return {"weight": lambda: deltas.mT @ values, "bias": lambda: deltas.sum(1)}


def positions(call: Call) -> Tensor:
    """Inputs of a linear layer [m, s, in], s the positions of a sample."""
    return call.inputs.reshape(len(call.inputs), -1, call.inputs.shape[-1])


def pad_inputs(module: _ConvNd, inputs: Tensor) -> Tensor:
    """Inputs of a convolution with the padding that it puts around them."""
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return functional.pad(inputs, module._reversed_padding_repeated_twice, mode)


def convolution_weight_rows(call: Call, flow: Tensor, filters: int) -> Tensor:
    """Rows [m, filters, …] of a convolution's weight: one grouped convolution that takes every
    sample as a group.
    """
    module, inputs = call.module, pad_inputs(call.module, call.inputs)
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


def convolution_rows(call: Call, flow: Tensor) -> Rows:
    """The gradient of a convolution for every sample, and δ summed over positions."""
    return {
        "weight": lambda: convolution_weight_rows(call, flow, call.module.out_channels),
        "bias": lambda: flow.flatten(2).sum(-1),
    }


def embedding_rows(call: Call, flow: Tensor) -> Rows:
    """δ added up for every word of a sample."""

    def weight() -> Tensor:
        module, words = call.module, call.inputs.flatten(1)  # [m, s]
        deltas = flow.reshape(*words.shape, -1)
        rows = flow.new_zeros(len(words), module.num_embeddings, deltas.shape[-1])
        rows.scatter_add_(1, words.unsqueeze(-1).expand_as(deltas), deltas)
        if module.padding_idx is not None:
            rows[:, module.padding_idx] = 0
        return rows

    return {"weight": weight}


def batch_norm_rows(call: Call, flow: Tensor) -> Rows:
    """Σ_s δ x̂ and Σ_s δ over the positions s of each sample, x̂ = (x - mean) / deviation, without
    forming x̂.
    """
    module = call.module
    mean, scale, sums = call.moments or Moments(
        module.running_mean, (module.running_var + module.eps).rsqrt()
    )
    alike = mean.dim() == 1  # for all samples
    if sums is not None or (alike and flow.is_cuda and fits(call.inputs)):
        total, spread = (sums or SampleSums(call.inputs, mean)).of(flow)
        return {"weight": lambda: spread * scale, "bias": lambda: total}
    if alike and flow.is_cuda:
        return _batch_norm_on_gpu(call.inputs, flow, mean, scale)
    deltas, values = (
        flow.reshape(*flow.shape[:2], -1),
        call.inputs.reshape(*call.inputs.shape[:2], -1),
    )
    wide = torch.promote_types(flow.dtype, mean.dtype)
    total = deltas.sum(-1, dtype=wide)
    return {
        "weight": lambda: (_products(deltas, values, wide) - total * mean) * scale,
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


def _norm_by(normalize: Callable[[Any, Tensor], Tensor], channels_first: bool) -> Rule:
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


instance_norm_rows = _norm_by(
    lambda module, x: functional.instance_norm(
        x,
        module.running_mean,
        module.running_var,
        use_input_stats=not module.track_running_stats,
        momentum=0.0,
        eps=module.eps,
    ),
    True,
)
layer_norm_rows = _norm_by(
    lambda module, x: functional.layer_norm(x, module.normalized_shape, eps=module.eps), False
)
rms_norm_rows = _norm_by(
    lambda module, x: functional.rms_norm(x, module.normalized_shape, eps=module.eps), False
)
group_norm_rows = _norm_by(
    lambda module, x: functional.group_norm(x, module.num_groups, eps=module.eps), True
)

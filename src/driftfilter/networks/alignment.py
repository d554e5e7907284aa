"""Statistics for layers that keep none: with source data, every norm has what batch norm has.

Layer, group, instance and RMS norm normalise each sample by itself, and nobody has written down
what the source's channels looked like behind them. A change of domain moves means and scales of
these channels all the same. From source data their moments m_S, v_S are known, and a batch norm
that does nothing stands behind each layer x̂ with its own scale γ and shift β:

    w (x̂ - m) / √(v + ε) + b,   w = γ √(v_S + ε),  b = β + γ m_S

is γ x̂ + β for m = m_S and v = v_S. With moments of the stream in their place, which a recipe's
``statistics`` carry, mean and scale of every channel are the source's again, without a backward
pass. w and b are what is adapted in place of γ and β.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from driftfilter.base.checks import require, require_finite
from driftfilter.base.inputs import Inputs, arguments, each
from driftfilter.networks.autocast import as_called, cast, dtype_of
from driftfilter.networks.layers import find_layer, is_norm
from driftfilter.networks.shared_copy import find_sequence_first

MOMENTS = "moments"  # among what is found of a model: see align


class Behind(_BatchNorm):
    """The batch norm behind a layer, an identity until ``start``; inputs are [n, c, ...]."""

    channels_last: bool  # the layer's own outputs are [n, ..., c]

    def __init__(self, layer: nn.Module, like: Tensor) -> None:
        wide = torch.promote_types(like.dtype, torch.float32)  # of half precision too
        super().__init__(_count_channels(layer), device=like.device, dtype=wide)
        found = find_layer(layer)
        self.channels_last = found is not None and found.channels_last
        with torch.no_grad():
            for name in ("weight", "bias"):
                if layer._parameters.get(name) is not None:
                    getattr(self, name).copy_(layer._parameters[name])
        self.requires_grad_(False).eval()
        self._take(torch.zeros_like(self.weight), torch.ones_like(self.weight))

    def _take(self, mean: Tensor, variance: Tensor) -> None:
        """Normalise by a mean and √(v + ε) = √variance [c]."""
        self.running_mean = mean.to(self.weight)
        self.running_var = (variance - self.eps).to(self.weight)

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def start(self, mean: Tensor, variance: Tensor) -> None:
        """Take m_S and v_S [c] for the moments of the source."""
        with torch.no_grad():
            mean, squared = mean.to(self.weight), variance.to(self.weight) + self.eps
            self.bias.add_(self.weight * mean)
            self.weight.mul_(squared.sqrt())
        self._take(mean, squared)


class _Moments(NamedTuple):
    """Mean and variance of all values of each channel so far."""

    values: int
    mean: Tensor  # [c]
    variance: Tensor  # [c]

    @classmethod
    def of(cls, values: Tensor) -> Self:
        """Those of values [n, c, ...]."""
        others = [dim for dim in range(values.dim()) if dim != 1]
        variance, mean = torch.var_mean(values.double(), others, correction=0)
        return cls(values.numel() // values.shape[1], mean, variance)

    def join(self, other: _Moments) -> _Moments:
        """Those of both."""
        values = self.values + other.values
        share, shift = other.values / values, other.mean - self.mean
        spread = torch.lerp(self.variance, other.variance, share)
        variance = spread + share * (1 - share) * shift.square()
        return _Moments(values, self.mean + share * shift, variance)


def find_alignable(module: nn.Module) -> list[nn.Module]:
    """Norm layers of torch whose outputs have no statistics, other than batch norms."""
    apart = tuple(find_sequence_first(module))  # whose samples are not in the first dimension
    return [
        layer
        for name, layer in module.named_modules()
        if is_norm(layer)
        and find_layer(layer) is not None
        and _has_channels(layer)
        and not (apart and name.startswith(apart))
    ]


def _has_channels(norm: nn.Module) -> bool:
    """Whether a norm keeps no statistics, and works on one dimension of what it sees."""
    if isinstance(norm, _BatchNorm):
        return False
    return not isinstance(norm, (nn.LayerNorm, nn.RMSNorm)) or len(norm.normalized_shape) == 1


def _count_channels(norm: Any) -> int:
    if isinstance(norm, (nn.LayerNorm, nn.RMSNorm)):
        return int(norm.normalized_shape[0])
    return int(norm.num_channels if isinstance(norm, nn.GroupNorm) else norm.num_features)


def _pass_on(layer: nn.Module, args: Any, outputs: Tensor) -> Tensor:
    """Hook of a layer with statistics behind it."""
    behind: Any = layer.behind
    if not behind.channels_last or outputs.dim() == 2:
        return behind(outputs)  # type: ignore[no-any-return]
    return behind(outputs.movedim(-1, 1)).movedim(1, -1)  # type: ignore[no-any-return]


def align(module: nn.Module, moments: Tensor | None, data: Iterable[Inputs]) -> Tensor:
    """Put statistics behind the layers of a twin, in place; m_S, then v_S, of every layer
    [2 · channels] are measured on source data unless they are given, and returned.
    """
    layers = find_alignable(module)
    require(
        len(layers) > 0,
        "Recipe.align",
        True,
        f"False for {type(module).__name__}: no layer of it could have statistics behind it",
    )
    first = next(module.parameters())
    behind = [_attach(layer, next(layer.parameters(recurse=False), first)) for layer in layers]
    sizes = [norm.num_features for norm in behind for _ in range(2)]
    if moments is None:
        moments = _measure(module, behind, data)
    fits = moments.dim() == 1 and len(moments) == sum(sizes)
    require(fits, "moments of the source", list(moments.shape), f"[{sum(sizes)}]")
    pieces = iter(moments.split(sizes))
    for norm in behind:
        norm.start(next(pieces), next(pieces))
    return moments


def _attach(layer: nn.Module, like: Tensor) -> Behind:
    """Put an identity behind a norm, whose scale and shift move there."""
    behind = Behind(layer, like)
    layer._parameters.update(dict.fromkeys(layer._parameters))
    layer.add_module("behind", behind)
    layer.register_forward_hook(_pass_on)
    return behind


@torch.no_grad()
def _measure(module: nn.Module, behind: list[Behind], data: Iterable[Inputs]) -> Tensor:
    """m_S and v_S of every layer [2 · channels]; 0 and 1 if no sample reaches it."""
    found: dict[nn.Module, _Moments] = {}

    def listen(norm: nn.Module, args: tuple[Tensor, ...]) -> None:
        own = _Moments.of(args[0])
        found[norm] = found[norm].join(own) if norm in found else own

    dtype, handles = dtype_of(module), [norm.register_forward_pre_hook(listen) for norm in behind]
    batches = 0
    with as_called():
        for inputs in data:
            batches += 1
            args, kwargs = arguments(each(inputs, lambda tensor: cast(tensor, dtype)))
            module(*args, **kwargs)
    for handle in handles:
        handle.remove()
    require(batches > 0, "adapt: data", "no samples", "one sample or more")
    parts: list[Tensor] = []
    for norm in behind:
        nothing = torch.zeros(norm.num_features, dtype=torch.float64, device=norm.weight.device)
        own = found.get(norm, _Moments(0, nothing, nothing + 1))
        parts += [own.mean, own.variance]
    moments = torch.cat(parts).to(behind[0].weight)
    require_finite("moments of source data (adapt: data)", moments)
    return moments

"""Statistics for layers that keep none: with source data, every norm has what batch norm has.

Layer, group, instance and RMS norm normalise each sample by itself, and nobody has written down
what the source's channels looked like behind them. A change of domain moves means and scales of
these channels all the same. From source data their moments m_S, v_S are known, and a batch norm
that does nothing stands behind each layer x̂ with its own scale γ and shift β:

    w (x̂ - m) / √(v + ε) + b,   w = γ √(v_S + ε),  b = β + γ m_S

is γ x̂ + β for m = m_S and v = v_S. With moments of the stream in their place, which a recipe's
``statistics`` carry, mean and scale of every channel are the source's again, without a backward
pass. w and b are what is adapted in place of γ and β.

Batch norms have statistics, but of training. What source data are in the network as it is now, from
which the stream may be how far away (``Ema.baseline``), is measured the same way (``compare``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import Self

from driftfilter.base.checks import require, require_finite
from driftfilter.base.inputs import Inputs, arguments, batch_size, each
from driftfilter.networks.autocast import as_called, cast, dtype_of
from driftfilter.networks.batch_norm import SEEN
from driftfilter.networks.layers import find_layer, is_norm
from driftfilter.networks.shared_copy import find_sequence_first, private

MOMENTS = "moments"  # among what is found of a model: see align and compare


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

    The first batch of the data says which layers are called: of others, whose parameters the module
    may use in a way of its own, nothing changes.
    """
    call, batches, first = _begin(module, data)
    layers = _find_called(module, find_alignable(module), call, first)
    require(
        len(layers) > 0,
        "Recipe.align",
        True,
        f"False (norms='other') for {type(module).__name__}, which calls no norm layer that could "
        "have statistics behind it",
    )
    like = next(module.parameters())
    behind = [_attach(layer, next(layer.parameters(recurse=False), like)) for layer in layers]
    sizes = [norm.num_features for norm in behind for _ in range(2)]
    if moments is None:
        moments = _measure(module, behind, call, chain((first,), batches))
    _require_moments(moments, sizes)
    pieces = iter(moments.split(sizes))
    for norm in behind:
        norm.start(next(pieces), next(pieces))
    return moments


class _Call(NamedTuple):
    """How a module is called with source data."""

    device: torch.device
    dtype: torch.dtype

    def __call__(self, module: nn.Module, inputs: Inputs) -> None:
        there = each(inputs, lambda part: cast(part.to(self.device), self.dtype))
        args, kwargs = arguments(there)
        with torch.no_grad(), as_called():
            module(*args, **kwargs)


def compare(module: nn.Module, moments: Tensor | None, data: Iterable[Inputs]) -> Tensor:
    """Note on the batch norms of a twin what enters them from source data, in place: mean and
    variance of each, and then how many samples [2 · channels + 1], are measured unless they are
    given, and returned.
    """
    call, batches, first = _begin(module, data)
    own = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    known = [layer for layer in own if layer.running_mean is not None]
    called = _find_called(module, known, call, first)
    norms = [layer for layer in known if layer in called]
    seen: list[int] = []

    def count(inputs: Inputs) -> Inputs:
        seen.append(batch_size(inputs))
        return inputs

    if moments is None:
        found = _measure(module, norms, call, map(count, chain((first,), batches)))
        moments = torch.cat((found, found.new_tensor([sum(seen)])))
    sizes = [norm.num_features for norm in norms for _ in range(2)]
    _require_moments(moments[:-1], sizes)
    pieces, device = iter(moments[:-1].split(sizes)), call.device
    for norm in norms:
        for name, value in zip(SEEN, (next(pieces), next(pieces), moments[-1]), strict=True):
            norm.register_buffer(name, value.to(device), persistent=False)
    return moments


def _begin(module: nn.Module, data: Iterable[Inputs]) -> tuple[_Call, Iterator[Inputs], Inputs]:
    """How the module is called, batches of source data, and the first of them, which is taken."""
    batches = iter(data)
    first = next(batches, None)
    require(first is not None, "adapt: data", "no samples", "one sample or more")
    assert first is not None
    return _Call(next(module.parameters()).device, dtype_of(module)), batches, first


def _require_moments(moments: Tensor, sizes: list[int]) -> None:
    fits = moments.dim() == 1 and len(moments) == sum(sizes)
    require(fits, "moments of the source", list(moments.shape), f"[{sum(sizes)}]")


def _find_called(
    module: nn.Module, layers: Sequence[nn.Module], call: _Call, inputs: Inputs
) -> list[nn.Module]:
    """Those of the layers that a pass goes through, with a dimension of samples before others."""
    found: set[nn.Module] = set()
    own, theirs = _copy(module, layers)

    def note(layer: nn.Module, args: Any, outputs: Any) -> None:
        if isinstance(outputs, Tensor) and outputs.dim() > 1:
            found.add(theirs[layer])

    for layer in theirs:
        layer.register_forward_hook(note)
    call(own, inputs)
    return [layer for layer in layers if layer in found]


def _copy(
    module: nn.Module, layers: Sequence[nn.Module]
) -> tuple[nn.Module, dict[nn.Module, nn.Module]]:
    """A module to call with source data, for one that counts its calls must not count ours; and
    which layer each of its own stands for.
    """
    own, names = private(module), {layer: name for name, layer in module.named_modules()}
    return own, {own.get_submodule(names[layer]): layer for layer in layers}


def _attach(layer: nn.Module, like: Tensor) -> Behind:
    """Put an identity behind a norm, whose scale and shift move there."""
    behind = Behind(layer, like)
    layer._parameters.update(dict.fromkeys(layer._parameters))
    layer.add_module("behind", behind)
    layer.register_forward_hook(_pass_on)
    return behind


def _measure(
    module: nn.Module, norms: Sequence[_BatchNorm], call: _Call, data: Iterable[Inputs]
) -> Tensor:
    """m_S and v_S of what enters every layer [2 · channels], in float32 at least."""
    found: dict[nn.Module, _Moments] = {}
    own, theirs = _copy(module, norms)

    def listen(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        norm, new = theirs[layer], _Moments.of(args[0])
        found[norm] = found[norm].join(new) if norm in found else new

    for layer in theirs:
        layer.register_forward_pre_hook(listen)
    for inputs in data:
        call(own, inputs)
    parts = [part for norm in norms for part in (found[norm].mean, found[norm].variance)]
    dtypes = [norm.running_mean.dtype for norm in norms if norm.running_mean is not None]
    wide = torch.promote_types(dtypes[0] if dtypes else torch.float32, torch.float32)
    device = next(module.parameters()).device
    moments = torch.cat([torch.empty(0, device=device), *parts]).to(device, wide)
    require_finite("moments of source data (adapt: data)", moments)
    return moments

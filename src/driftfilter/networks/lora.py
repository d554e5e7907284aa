"""Low-rank adaptation: θ is the two factors of a change of chosen weights, W_eff = W + scale · B
A.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from driftfilter.base.checks import Checked, Count, Positive, PositiveCount, register, require
from driftfilter.networks.parameters import Chosen, matches
from driftfilter.networks.sample_gradients import (
    Call,
    Rule,
    convolution_weight_rows,
    pad_inputs,
    positions,
)


@final
@dataclass(frozen=True)
class LoRA(Checked):
    """New parameters B [out, r] = 0 and A [r, in] ~ N(0, deviation²) for every linear layer and 2d
    convolution of these names.

    W_eff = W + scale · B A, so that adaptation starts at the network as it is. ``targets``: shell
    patterns of layer names; grouped convolutions are left out. ``deviation``: None for 1 / √in. A
    starts at its draw from the seed, the mean of its prior. While B = 0 the gradient of A vanishes,
    so that a linearised first step leaves the belief over A at its prior.
    """

    rank: PositiveCount = 4
    targets: tuple[str, ...] = ("*",)
    scale: Positive = 1.0
    seed: Count = 0
    deviation: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            isinstance(self.targets, (tuple, list)) and len(self.targets) > 0,
            "LoRA.targets",
            self.targets,
            "a tuple of one pattern or more",
        )
        object.__setattr__(self, "targets", tuple(self.targets))

    def __call__(self, model: nn.Module) -> Chosen:
        known, generator = dict(model.named_parameters()), torch.Generator().manual_seed(self.seed)
        weights: dict[str, Tensor] = {}
        pieces: dict[str, Tensor] = {}
        kinds: dict[str, str] = {}
        for layer, module in model.named_modules():
            name = f"{layer}.weight" if layer else "weight"
            dense = isinstance(module, nn.Conv2d) and module.groups == 1
            if (
                (dense or isinstance(module, nn.Linear))
                and matches(layer, self.targets)
                and name in known
            ):
                weights[name] = known[name]
                pieces.update(zip(_names(name), self._draw(known[name], generator), strict=True))
                kinds.update(dict.fromkeys(_names(name), type(module).__name__))
        return _Factors(pieces, kinds, weights, self.scale)

    def _draw(self, weight: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A [r, in] and B [out, r]."""
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        width = weight[0].numel()
        deviation = 1 / math.sqrt(width) if self.deviation is None else self.deviation
        drawn = deviation * torch.randn(self.rank, width, generator=generator, dtype=torch.float64)
        return drawn.to(weight.device, dtype), torch.zeros(
            len(weight), self.rank, device=weight.device, dtype=dtype
        )


def _names(target: str) -> list[str]:
    return [f"{target}.A", f"{target}.B"]


class _Factors(Chosen):
    """Factors A and B of the change of each weight."""

    def __init__(
        self,
        pieces: Mapping[str, Tensor],
        kinds: Mapping[str, str],
        weights: Mapping[str, Tensor],
        scale: float,
    ) -> None:
        super().__init__(pieces, kinds)
        self.weights, self.scale = dict(weights), scale

    @property
    def targets(self) -> set[str]:
        return set(self.weights)

    def pieces_of(self, target: str) -> list[str]:
        return _names(target)

    def replacements(self, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        changed = {}
        for target, weight in self.weights.items():
            a, b = (pieces[name] for name in _names(target))
            changed[target] = weight.detach() + (self.scale * (b @ a)).view(weight.shape).to(
                weight.dtype
            )
        return changed

    def rows(
        self,
        call: Call,
        flow: Tensor,
        rule: Rule,
        targets: Mapping[str, str],
        pieces: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """dB_i = δᵀ (x Aᵀ) and dA_i = (δ B)ᵀ x, without the rows [n, out, in] of the weight."""
        names = _names(targets["weight"])
        a, b = (pieces[name].detach() for name in names)
        found = (_linear if isinstance(call.module, nn.Linear) else _convolution)(call, flow, a, b)
        return {name: self.scale * rows for name, rows in zip(names, found, strict=True)}


def _linear(call: Call, flow: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    deltas, values = flow.reshape(len(flow), -1, flow.shape[-1]), positions(call)
    return (deltas @ b).mT @ values, deltas.mT @ (values @ a.mT)


def _convolution(call: Call, flow: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    module, rank = call.module, len(a)
    filters = a.view(rank, module.in_channels, *module.kernel_size)
    inner = functional.conv2d(
        pad_inputs(module, call.inputs), filters, stride=module.stride, dilation=module.dilation
    )
    narrow = torch.einsum("or,nohw->nrhw", b, flow)
    return convolution_weight_rows(call, narrow, rank).flatten(2), flow.flatten(2) @ inner.flatten(
        2
    ).mT


register(parameters=(LoRA,))

"""Images with their channels last, in which many networks are faster, and the proof that one takes
them so.

Only what goes in is laid out anew: torch's convolutions hand the layout on, and weights stay the
module's own tensors.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from driftfilter.base.inputs import Inputs, each, samples, tensors
from driftfilter.networks.layers import is_norm
from driftfilter.networks.row_check import tolerance_of
from driftfilter.networks.shared_copy import in_channels_last, private

Ask: TypeAlias = Callable[[nn.Module, Inputs], Tensor]  # logits of a module for inputs as they are
LAYOUT = "channels last"


def why_not_last(model: nn.Module) -> str:
    """Why images with channels last would not help a network; empty if they do.

    They do if it has two convolutions or more, ordinary ones, and no norms but batch norms. torch's
    group and instance norms, and grouped convolutions, want channels first.
    """
    layers = list(model.modules())
    convolutions = [layer for layer in layers if isinstance(layer, nn.Conv2d)]
    if len(convolutions) < 2:
        return "fewer than two convolutions of images"
    if any(layer.groups > 1 for layer in convolutions):
        return "grouped convolutions"
    norms = [layer for layer in layers if is_norm(layer)]
    if not norms or not all(isinstance(layer, _BatchNorm) for layer in norms):
        return "norms other than batch norms" if norms else "no batch norms"
    return ""


@final
class Layout:
    """Images go through a network channels last, once it has shown that this changes nothing but
    rounding: its first two go both ways, forward and backward, through a copy. Why it does not is
    noted in ``refused``.
    """

    def __init__(self, base: nn.Module, ask: Ask, refused: MutableMapping[str, str]) -> None:
        self._base, self._ask, self._refused = base, ask, refused
        self._proven = False

    def arrange(self, inputs: Inputs) -> Inputs:
        """Inputs as they go into the module."""
        if LAYOUT in self._refused or torch._C._are_functorch_transforms_active():
            return inputs
        if not any(part.dim() == 4 for part in tensors(inputs)):
            return inputs
        if not self._proven:
            self._prove(inputs)
            return self.arrange(inputs)
        return each(inputs, in_channels_last)

    def _prove(self, inputs: Inputs) -> None:
        try:
            differs = self._differs(inputs)
        except Exception as error:  # whatever a module of somebody's own does
            self._refused[LAYOUT] = f"the network fails: {_first_line(error)}"
            return
        if differs:
            self._refused[LAYOUT] = "the network's outputs would be others"
        self._proven = not differs

    def _differs(self, inputs: Inputs) -> bool:
        few = samples(inputs, 0, 2)
        own = private(self._base)
        vectors = [each for each in own.parameters() if each.dim() == 1]
        with torch.inference_mode(False), torch.enable_grad():
            for vector in vectors:
                vector.requires_grad_()
            plain = self._ask(own, each(few, torch.clone))  # a module may write to its inputs
            last = self._ask(own, each(each(few, torch.clone), in_channels_last))
            if last.requires_grad:
                torch.autograd.grad(last.sum(), vectors, allow_unused=True)
        scale = 1e-6 + float(plain.detach().abs().max())
        apart = float((plain.detach() - last.detach()).abs().max())
        return not apart <= tolerance_of(plain.dtype, plain.device) * scale


def _first_line(error: Any) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:120]

"""What makes a step faster, by one word: which measures are on for a model where it is, and why
not.

"exact" takes all that changes no result beyond rounding, "fast" half precision too. Whoever names a
measure decides it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, final

import torch
from torch import nn

from driftfilter.base.checks import check_fields, require, warn
from driftfilter.networks.autocast import AUTOCAST, dtype_of
from driftfilter.networks.cuda_graphs import GRAPHS
from driftfilter.networks.layout import LAYOUT, why_not_last
from driftfilter.networks.norm_rules import NormRule
from driftfilter.networks.parameters import Head
from driftfilter.networks.prototypes import Prototypes
from driftfilter.recipe import Recipe

Speed: TypeAlias = Literal["exact", "fast"]
BFLOAT16 = "bfloat16"
_HEAD = "only what follows the last layer's inputs is adapted"


class Measure(NamedTuple):
    """One measure for speed."""

    name: str
    is_on: bool
    why: str

    def __str__(self) -> str:
        return f"{self.name} {'on' if self.is_on else 'off'} ({self.why})"


@final
@dataclass(frozen=True)
class SpeedOptions:
    """The options of ``adapt`` that are about speed; None leaves one to ``speed``."""

    speed: Speed = "exact"
    autocast: torch.dtype | None = None
    channels_last: bool | None = None
    cuda_graphs: bool | None = None
    distributed: bool = False  # other processes have the rest of each batch

    def __post_init__(self) -> None:
        check_fields(self, "adapt: ")
        require(
            self.autocast in (None, torch.bfloat16, torch.float16, torch.float32),
            "adapt: autocast",
            self.autocast,
            "torch.bfloat16, torch.float16, torch.float32 or None",
        )
        require(
            not (self.cuda_graphs and self.distributed),
            "adapt: cuda_graphs",
            self.cuda_graphs,
            "False if a stream is distributed",
        )

    def require_use(self, recipe: Recipe) -> None:
        """Warn of graphs that were asked for and do nothing for a recipe."""
        if self.cuda_graphs and isinstance(recipe.parameters, (Head, Prototypes)):
            warn(
                "adapt: cuda_graphs is ignored: no pass over the network is differentiated "
                "if its head alone is adapted"
            )
        if self.cuda_graphs and isinstance(recipe.statistics, NormRule):
            warn("adapt: cuda_graphs is ignored: batch norms have statistics of your own")

    def measure(
        self, model: nn.Module, recipe: Recipe, refused: Mapping[str, str] | None = None
    ) -> tuple[Measure, Measure, Measure]:
        """Channels last, graphs and bfloat16 for a model where it is; ``refused``: what it has
        shown not to take.
        """
        device = next((each.device for each in model.parameters()), torch.device("cpu"))
        refused = refused or {}
        half = None if self.autocast is None else self.autocast == torch.bfloat16
        layout, graphs, narrow = (
            self._decide(name, given, refused.get(name) or why)
            for name, given, why in (
                (LAYOUT, self.channels_last, self._why_first(model, recipe, device)),
                (GRAPHS, self.cuda_graphs, self._why_no_graphs(model, recipe, device)),
                (BFLOAT16, half, self._why_single(model, device)),
            )
        )
        return layout, graphs, narrow

    def _decide(self, name: str, given: bool | None, why_not: str) -> Measure:
        if given is not None:
            return Measure(name, given, "as given")
        return Measure(name, not why_not, why_not or f"speed={self.speed!r}")

    def autocast_for(self, model: nn.Module) -> torch.dtype | None:
        """The precision of the model's own operations; None: as the caller has it."""
        if self.autocast is not None or self.speed == "exact":
            return self.autocast
        device = next((each.device for each in model.parameters()), torch.device("cpu"))
        return None if self._why_single(model, device) else torch.bfloat16

    def _why_first(self, model: nn.Module, recipe: Recipe, device: torch.device) -> str:
        if device.type not in ("cpu", "cuda"):
            return f"nobody has measured it on {device.type}"
        if isinstance(recipe.parameters, (Head, Prototypes)):
            return _HEAD
        return why_not_last(model)

    def _why_no_graphs(self, model: nn.Module, recipe: Recipe, device: torch.device) -> str:
        if device.type != "cuda":
            return f"the model is on {device.type}"
        if isinstance(recipe.parameters, (Head, Prototypes)):
            return _HEAD
        if isinstance(recipe.statistics, NormRule):
            return "batch norms have statistics of your own"
        if self.distributed:
            return "the stream is distributed"
        if any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.modules()):
            return "the network has hooks, which a graph does not call"
        return ""

    def _why_single(self, model: nn.Module, device: torch.device) -> str:
        if self.speed == "exact":
            return "speed='fast' turns it on"
        if (dtype := dtype_of(model)) != torch.float32:
            return f"the model is in {dtype}"
        return "" if has_bfloat16(device) else f"{device.type} does not compute in it"

    def find_ignored(self, device: torch.device) -> list[str]:
        """Options that do nothing for a model there; a script that runs without a GPU too is not
        told so on such a machine.
        """
        found = []
        if self.cuda_graphs and device.type != "cuda" and torch.cuda.is_available():
            found.append(
                f"adapt: cuda_graphs is ignored: the model is on {device.type}, though there is "
                "a GPU"
            )
        half = self.autocast not in (None, torch.float32)
        if half and device.type not in AUTOCAST:
            found.append(
                f"adapt: autocast is ignored: the model is on {device.type}, not on one of "
                f"{AUTOCAST}"
            )
        return found


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device multiplies in bfloat16 by itself."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    ask = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # not torch's public interface
    return device.type == "cpu" and ask is not None and bool(ask())

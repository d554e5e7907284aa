"""Which parameters of a network are adapted: a selection names them, in the order of the network's own list."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol, TypeAlias, final

from torch import nn

from driftfilter.checks import require

NORMS: tuple[type[nn.Module], ...] = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.RMSNorm,
)

Parameters: TypeAlias = dict[str, nn.Parameter]


class Selection(Protocol):
    """A subset of a network's parameters, θ_t ⊆ θ_S."""

    def __call__(self, model: nn.Module) -> list[str]:
        """Names of the selected parameters."""


def _own(name: str, module: nn.Module) -> list[str]:
    prefix = f"{name}." if name else ""
    return [prefix + own for own, _ in module.named_parameters(recurse=False)]


@final
@dataclass(frozen=True)
class NormAffine:
    """Scale and shift of every normalisation layer: few, and enough to undo most covariate shifts."""

    def __call__(self, model: nn.Module) -> list[str]:
        norms = [(name, module) for name, module in model.named_modules() if isinstance(module, NORMS)]
        return [parameter for name, module in norms for parameter in _own(name, module)]


@final
@dataclass(frozen=True)
class Head:
    """Weight and bias of one linear layer: the last one registered, or the one of this name."""

    name: str = ""

    def __call__(self, model: nn.Module) -> list[str]:
        linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        known = self.name in linear or (not self.name and len(linear) > 0)
        require(known, "Head.name", self.name, f"the name of a linear layer, one of {list(linear)}")
        name = self.name or list(linear)[-1]
        return _own(name, linear[name])


@final
@dataclass(frozen=True)
class AllParameters:
    """Every parameter of the network."""

    def __call__(self, model: nn.Module) -> list[str]:
        return [name for name, _ in model.named_parameters()]


@final
@dataclass(frozen=True)
class ByName:
    """Parameters whose name matches one of these shell patterns, such as "blocks.8.*" or "*.bias"."""

    patterns: tuple[str, ...] = ("*",)

    def __post_init__(self) -> None:
        listed = isinstance(self.patterns, (tuple, list)) and len(self.patterns) > 0
        require(listed, "ByName.patterns", self.patterns, "a tuple of one pattern or more")
        object.__setattr__(self, "patterns", tuple(self.patterns))

    def __call__(self, model: nn.Module) -> list[str]:
        names = [name for name, _ in model.named_parameters()]
        return [name for name in names if any(fnmatchcase(name, pattern) for pattern in self.patterns)]


def select(model: nn.Module, selection: Selection) -> Parameters:
    """The selected parameters by name; selecting nothing is an error that lists what could be selected."""
    known = dict(model.named_parameters())
    names = selection(model)
    if not names:
        kinds = sorted({type(module).__name__ for module in model.modules() if any(True for _ in module.parameters(False))})
        raise ValueError(
            f"{selection} must select one parameter or more, got none of {len(known)}; the network has parameters in {kinds},"
            f" named {list(known)[:6]}{' …' if len(known) > 6 else ''}"
        )
    return {name: known[name] for name in names}

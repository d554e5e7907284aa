"""Which parameters of a network are adapted: a selection names them, in the order of the network's
own list.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol, final

import torch
from torch import Tensor, nn

from driftfilter.base.checks import register, require
from driftfilter.networks.layers import is_norm
from driftfilter.networks.sample_gradients import Call, Rule, layer_rows


class Chosen(dict[str, Tensor]):
    """What is adapted: the pieces of θ by name, as they start; printed as a table.

    Parameters of the network, or whatever a selection makes them of: ``replacements`` gives the
    network's tensors at a θ.
    """

    def __init__(self, pieces: Mapping[str, Tensor], kinds: Mapping[str, str]) -> None:
        super().__init__(pieces)
        self.kinds = dict(kinds)  # layer type of every piece

    @property
    def targets(self) -> set[str]:
        """Names of the network's parameters that depend on θ."""
        return set(self)

    def start(self) -> Tensor:
        """θ [d], in float32 or, if a piece is, in float64."""
        dtype = (
            torch.float64
            if any(piece.dtype == torch.float64 for piece in self.values())
            else torch.float32
        )
        return torch.cat([piece.detach().flatten().to(dtype) for piece in self.values()])

    def replacements(self, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The network's tensors for pieces of θ, in the network's dtypes."""
        return {
            name: piece if piece.dtype == self[name].dtype else piece.to(self[name].dtype)
            for name, piece in pieces.items()
        }

    def pieces_of(self, target: str) -> list[str]:
        """Names of the pieces that a parameter of the network is made of."""
        return [target]

    def rows(
        self,
        call: Call,
        flow: Tensor,
        rule: Rule,
        targets: Mapping[str, str],
        pieces: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Rows [m, ...] of the pieces behind the parameters of a layer, at one call of it.

        ``targets``: the layer's own names of these parameters -> theirs in the network.
        """
        return {targets[own]: rows for own, rows in layer_rows(call, flow, rule, targets).items()}

    def __str__(self) -> str:
        lines = [
            (name, self.kinds[name], str(list(piece.shape)), f"{piece.numel():,}")
            for name, piece in self.items()
        ]
        total = ("total", "", "", f"{sum(piece.numel() for piece in self.values()):,}")
        table = [("parameter", "layer", "shape", "count"), *lines, total]
        widths = [max(len(line[column]) for line in table) for column in range(4)]
        return "\n".join(
            f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {shape:<{widths[2]}}  {count:>{widths[3]}}"
            for name, kind, shape, count in table
        )


class Selection(Protocol):
    """A subset of a network's parameters, θ_t ⊆ θ_S, or new ones that they are made of."""

    def __call__(self, model: nn.Module) -> list[str] | Chosen:
        """Names of the selected parameters, or what is adapted in their place."""


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name matches one of these shell patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _own(name: str, module: nn.Module) -> list[str]:
    return [f"{name}.{own}" if name else own for own, _ in module.named_parameters(recurse=False)]


@final
@dataclass(frozen=True)
class NormAffine:
    """Scale and shift of every normalisation layer: few, and enough to undo most covariate shifts.

    ``exclude``: shell patterns of layer names to leave out, such as "layer4.*".
    """

    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(
            isinstance(self.exclude, (tuple, list)),
            "NormAffine.exclude",
            self.exclude,
            "a tuple of patterns",
        )
        object.__setattr__(self, "exclude", tuple(self.exclude))

    def __call__(self, model: nn.Module) -> list[str]:
        return [
            parameter
            for name, module in model.named_modules()
            if is_norm(module) and not matches(name, self.exclude)
            for parameter in _own(name, module)
        ]


@final
@dataclass(frozen=True)
class Head:
    """Weight and bias of one linear layer: the last one registered, or the one of this name."""

    name: str = ""

    def layer(self, model: nn.Module) -> str:
        """The layer's name."""
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        if self.name not in linear and (self.name or not linear):
            hint = "" if linear else "; a network without one has adapt(model, 'center')"
            raise ValueError(
                f"Head.name must be the name of a linear layer, one of {linear}, got "
                f"{self.name!r}{hint}"
            )
        return self.name or linear[-1]

    def __call__(self, model: nn.Module) -> list[str]:
        name = self.layer(model)
        return _own(name, model.get_submodule(name))


@final
@dataclass(frozen=True)
class AllParameters:
    """Every parameter of the network."""

    def __call__(self, model: nn.Module) -> list[str]:
        return [name for name, _ in model.named_parameters()]


@final
@dataclass(frozen=True)
class ByName:
    """Parameters whose name matches one of these shell patterns, such as "blocks.8.*" or
    "*.bias".
    """

    patterns: tuple[str, ...] = ("*",)

    def __post_init__(self) -> None:
        require(
            isinstance(self.patterns, (tuple, list)) and len(self.patterns) > 0,
            "ByName.patterns",
            self.patterns,
            "a tuple of one pattern or more",
        )
        object.__setattr__(self, "patterns", tuple(self.patterns))

    def __call__(self, model: nn.Module) -> list[str]:
        return [name for name, _ in model.named_parameters() if matches(name, self.patterns)]


@final
@dataclass(frozen=True)
class Smallest:
    """The smallest parameter of the network, in the place of none: for recipes that learn nothing,
    on any network that has one.
    """

    def __call__(self, model: nn.Module) -> list[str]:
        known = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.is_floating_point()
        }
        return [min(known, key=lambda name: known[name].numel())] if known else []


@final
@dataclass(frozen=True)
class NoParameters:
    """No parameter of the network: θ is one number, 0, that it does not read. For recipes that
    learn nothing, on any network, quantised ones without a floating parameter too; a forward pass
    leaves no graph.
    """

    def __call__(self, model: nn.Module) -> Chosen:
        # Where the logits are; quantised layers hide their tensors from ``parameters``.
        known = next((each for each in model.parameters() if each.is_floating_point()), None)
        like = torch.zeros(1) if known is None else known.detach()
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return _Unread({"none": like.new_zeros(1, dtype=dtype)}, {"none": "none"})


class _Unread(Chosen):
    """A piece that no parameter of the network is made of."""

    @property
    def targets(self) -> set[str]:
        return set()

    def replacements(self, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {}


def select(model: nn.Module, selection: Selection) -> Chosen:
    """The selected parameters by name; selecting nothing is an error that lists what could be
    selected.

    >>> print(select(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), NormAffine()))
    parameter  layer      shape  count
    1.weight   LayerNorm  [4]        4
    1.bias     LayerNorm  [4]        4
    total                            8
    """
    known = dict(model.named_parameters())
    chosen = selection(model)
    if not chosen:
        kinds = sorted(
            {
                type(module).__name__
                for module in model.modules()
                if any(True for _ in module.parameters(False))
            }
        )
        hint = ""
        if isinstance(selection, NormAffine):
            has_head = any(isinstance(module, nn.Linear) for module in model.modules())
            preset = (
                "'head_ekf') adapts the last linear layer" if has_head else "'center') none of them"
            )
            hint = f"; adapt(model, {preset}"
        raise ValueError(
            f"{selection} must select one parameter or more, got none of {len(known)}; the "
            f"network has parameters in {kinds},"
            f" named {list(known)[:6]}{' …' if len(known) > 6 else ''}{hint}"
        )
    if isinstance(chosen, Chosen):
        return chosen
    tied = [name for name in chosen if name not in known]
    require(
        not tied, str(selection), tied, f"of parameters of the network, such as {list(known)[:6]}"
    )
    return Chosen(
        {name: known[name] for name in chosen},
        {name: type(model.get_submodule(name.rpartition(".")[0])).__name__ for name in chosen},
    )


register(parameters=(NormAffine, Head, AllParameters, ByName, Smallest, NoParameters))

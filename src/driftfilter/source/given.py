"""A source posterior from elsewhere: a Gaussian over the adapted parameters, or over more."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from driftfilter.base.checks import require
from driftfilter.base.tensors import map_tensors
from driftfilter.gaussian.belief import Belief
from driftfilter.model.predictive import PredictiveModel
from driftfilter.networks.network import Network
from driftfilter.source.posterior import SourceData


@final
@dataclass(frozen=True, eq=False, repr=False)
class Given:
    """N(μ, Σ) as it is given: a belief over the adapted parameters, in their order (``Network``:
    ``shapes``).

    ``over``: what the belief is over, if that is more than is adapted: a Network of the same model,
    or shapes by name. The other parameters are integrated out (``marginal_source``). They stay as
    the model has them, and the adapted ones start at μ. A recipe with it does not go to TOML.

    >>> import torch, driftfilter as df
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)).eval()
    >>> belief = df.Belief(df.Network(model).mean(), df.Diagonal(torch.full((16,), 0.01)))
    >>> adapter = df.adapt(model, "opgd_diag", source=df.Given(belief))
    """

    belief: Belief
    over: Network | Mapping[str, torch.Size] | None = None

    def __post_init__(self) -> None:
        require(isinstance(self.belief, Belief), "Given.belief", self.belief, "a Belief")
        if self.over is None:
            return
        require(
            isinstance(self.over, (Network, Mapping)),
            "Given.over",
            type(self.over).__name__,
            "a Network, or shapes by name",
        )
        shapes = self.over.shapes if isinstance(self.over, Network) else self.over
        count = sum(torch.Size(shape).numel() for shape in shapes.values())
        require(
            count == self.belief.dimension,
            "Given.belief",
            f"dimension {self.belief.dimension}",
            f"of dimension {count}, as what it is over",
        )

    def __repr__(self) -> str:
        """By a digest: a checkpoint must tell one posterior from another."""
        found, parts = hashlib.sha256(), []

        def add(tensor: Tensor) -> Tensor:
            parts.append(tensor.detach().cpu().contiguous().reshape(-1))
            return tensor

        map_tensors(self.belief, add)
        for part in parts:
            found.update(part.view(torch.uint8).numpy().data)
        kind = type(self.belief.covariance).__name__
        return f"Given({kind}, {self.belief.dimension} parameters, {found.hexdigest()[:16]})"

    def __call__(
        self, model: PredictiveModel, mean: Tensor, data: SourceData | None = None
    ) -> Belief:
        belief = self.belief
        if self.over is not None:
            wide = self.over.shapes if isinstance(self.over, Network) else self.over
            require(
                model.shapes is not None,
                "Given.over",
                "shapes by name",
                "None for a head or prototypes, whose parameters have no names",
            )
            assert model.shapes is not None
            belief = _pick(wide, model.shapes, belief, "Given.over")
        require(
            belief.dimension == len(mean),
            "Given.belief",
            f"over {belief.dimension} parameters",
            f"over the {len(mean)} that are adapted, or say what it is over (Given.over)",
        )
        placed: Belief = map_tensors(belief, lambda tensor: tensor.to(mean))
        return Belief(placed.mean, placed.covariance)


def marginal_source(wide: Network, network: Network, belief: Belief) -> Belief:
    """The belief over the parameters of ``network``, from one over the parameters of ``wide``,
    which has them and others.

    Its covariance is the block of Σ: the other parameters are integrated out. A Laplace fit on
    ``network`` itself has the inverse of the block of Λ, smaller, as if the other parameters were
    known.
    """
    return _pick(wide.shapes, network.shapes, belief, "marginal_source: network")


def _pick(
    wide: Mapping[str, torch.Size], narrow: Mapping[str, torch.Size], belief: Belief, field: str
) -> Belief:
    """The marginal over the parameters ``narrow`` of a belief over the parameters ``wide``."""
    missing = [name for name in narrow if name not in wide]
    require(not missing, field, f"parameters {missing}", f"with parameters of wide, {list(wide)}")
    others: list[Any] = [
        f"{name} {list(wide[name])}" for name in narrow if list(wide[name]) != list(narrow[name])
    ]
    require(not others, field, others, "of the shapes that the network has")
    sizes = [torch.Size(shape).numel() for shape in wide.values()]
    places = dict(zip(wide, torch.arange(sum(sizes)).split(sizes), strict=True))
    index = torch.cat([torch.arange(0), *(places[name] for name in narrow)])
    return belief.marginal(index.to(belief.mean.device))

"""Initialisation p(θ_0 given θ_S): which parameters the stream adapts, where they start, and the model that reads them.

Adapted parameters are a part of the source's (θ_0 = the block of θ_S) or new ones beside them (disjoint: LoRA starts at
W + 0, prototypes at the rows of the head).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from driftfilter.features import Backbone, build_head, find_head
from driftfilter.inputs import Inputs
from driftfilter.network import Network
from driftfilter.parameters import Head, Selection, select
from driftfilter.predictive import PredictiveModel
from driftfilter.prototypes import Prototypes
from driftfilter.statistics import Statistics


class Start(NamedTuple):
    """A model and the parameters it starts from."""

    model: PredictiveModel
    mean: Tensor  # θ_0 [d]
    buffers: Mapping[str, Tensor] = {}  # what the model has taken from the example, to build it again without one


def check(module: nn.Module, parameters: Selection | Prototypes) -> None:
    """Raise where nothing could be selected; needs no values, so that a module on the meta device will do."""
    select(module, Head(parameters.name) if isinstance(parameters, Prototypes) else parameters)


def wants_example(parameters: Selection | Prototypes) -> bool:
    """Whether a batch tells more about the parameters than the module does."""
    on_features = isinstance(parameters, (Head, Prototypes)) and not parameters.name
    return on_features or (isinstance(parameters, Prototypes) and parameters.centered)


@torch.no_grad()
def initialize(
    module: nn.Module,
    parameters: Selection | Prototypes,
    statistics: Statistics = "batch",
    output: Callable[[Any], Tensor] | None = None,
    example: Inputs | None = None,
    buffers: Mapping[str, Tensor] | None = None,
) -> Start:
    """The predictive model of the selected parameters and θ_0.

    ``example``, a batch, lets the head be found from the graph of a forward pass; without it, it is the last linear layer
    registered, which the first batch has to confirm.
    """
    if not isinstance(parameters, (Head, Prototypes)):
        network = Network(module, parameters, statistics, output)
        return Start(network, network.mean())
    name = parameters.name
    if not name and example is not None:
        name = find_head(module, example, output)
    backbone = Backbone(module, Head(name).layer(module), output, statistics)
    if isinstance(parameters, Head):
        return Start(*build_head(backbone))
    center = (buffers or {}).get("center")
    if center is None and parameters.centered and example is not None:
        center = backbone(example).mean(0)
    return Start(*parameters.build(backbone, center), {} if center is None else {"center": center})

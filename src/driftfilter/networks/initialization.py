"""Initialisation p(θ_0 given θ_S): which parameters the stream adapts, where they start, and the
model that reads them.

Adapted parameters are a part of the source's (θ_0 = the block of θ_S) or new ones beside them
(disjoint: LoRA starts at W + 0, prototypes at the rows of the head).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from driftfilter.base.checks import require, warn
from driftfilter.base.inputs import Inputs, batch_size
from driftfilter.base.sharding import total_samples
from driftfilter.base.tensors import as_tensor, as_text
from driftfilter.model.predictive import PredictiveModel
from driftfilter.networks.batch_norm import Statistics
from driftfilter.networks.features import Backbone, build_head, find_head
from driftfilter.networks.network import Network
from driftfilter.networks.parameters import Head, Selection, select
from driftfilter.networks.prototypes import Prototypes
from driftfilter.networks.shared_copy import require_values


class Start(NamedTuple):
    """A model and the parameters it starts from."""

    model: PredictiveModel
    mean: Tensor  # θ_0 [d]
    found: Mapping[
        str, Tensor
    ] = {}  # what an example has told, to build the model again without one


def check(module: nn.Module, parameters: Selection | Prototypes | None) -> None:
    """Raise if nothing could be selected; needs no values, so that a module on the meta device
    will do. None: of layers that are yet to come.
    """
    require(
        not isinstance(module, torch.jit.ScriptModule),
        "adapt: model",
        type(module).__name__,
        "a module in Python: adapt it before torch.jit.script or trace",
    )
    lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    require(
        not lazy,
        "adapt: model",
        f"parameters {lazy[:4]} without a shape",
        "called once before: it has lazy layers",
    )
    if parameters is not None:
        select(module, Head(parameters.name) if isinstance(parameters, Prototypes) else parameters)


def find_wanted(parameters: Selection | Prototypes) -> set[str]:
    """What only a batch can tell: the "head", a layer's name, and the "center", the mean feature
    [D] of the first batch.
    """
    head = {"head"} if isinstance(parameters, (Head, Prototypes)) and not parameters.name else set()
    return head | (
        {"center"} if isinstance(parameters, Prototypes) and parameters.centered else set()
    )


@torch.no_grad()
def initialize(
    module: nn.Module,
    parameters: Selection | Prototypes,
    statistics: Statistics = "batch",
    output: Callable[[Any], Tensor] | None = None,
    example: Inputs | None = None,
    found: Mapping[str, Tensor] | None = None,
    observed: Callable[[Any], Tensor] | None = None,
) -> Start:
    """The predictive model of the selected parameters and θ_0.

    ``example``, a batch, lets the head be found from the graph of a forward pass; without it, it is
    the last linear layer registered, which the first batch has to confirm. What has been ``found``
    before stands.
    """
    require_values(module)
    if not isinstance(parameters, (Head, Prototypes)):
        network = Network(module, parameters, statistics, output, observed)
        return Start(network, network.mean())
    require(
        observed is None,
        "adapt: observed",
        observed,
        "None if only a head is adapted: no loss can see more of it",
    )
    told = {
        name: tensor for name, tensor in (found or {}).items() if name in find_wanted(parameters)
    }
    if example is not None and "head" in find_wanted(parameters) - set(told):
        told["head"] = as_tensor(find_head(module, example, output))
    name = as_text(told["head"]) if "head" in told else parameters.name
    backbone = Backbone(module, Head(name).layer(module), output, statistics)
    if isinstance(parameters, Head):
        return Start(*build_head(backbone), told)
    if example is not None and "center" in find_wanted(parameters) - set(told):
        n = total_samples(batch_size(example))
        if n < 4:  # one sample would be its own center
            warn(
                f"centered prototypes take the mean feature of the first batch, of {n} samples "
                "here: give more, or a window"
            )
        told["center"] = backbone(example).mean(0)
    if "center" in told:
        told["center"] = told["center"].to(backbone.weight)
    return Start(*parameters.build(backbone, told.get("center")), told)

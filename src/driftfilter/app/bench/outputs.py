"""What a network says of the first samples of the data, and whether both fit together."""

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from driftfilter.app.bench.protocols import StreamPlan
from driftfilter.app.machine import Machine
from driftfilter.app.readers.stored import CLEAN, Samples
from driftfilter.app.streams import Domains
from driftfilter.base.checks import require
from driftfilter.networks.features import find_head

FEW = 2  # samples that a network is asked with: enough to see which dimension they are


class Outputs(NamedTuple):
    """Classes of a network, and the size of the images it was given: [] if they are none."""

    classes: int
    size: list[int]


def call(function: Callable[..., Any], samples: Samples) -> Any:
    """A model or an adapter on a batch: several inputs go by their names."""
    return function(samples) if isinstance(samples, Tensor) else function(**samples)


def take_few(data: Domains, plan: StreamPlan, machine: Machine) -> Samples:
    """The first samples of the data, clean ones if there are any."""
    if CLEAN.corruption in data.shifts:
        index = torch.arange(len(data.labels)) if data.members is None else data.members["clean"]
        return data.take(CLEAN, index[:FEW], machine.device)
    first = plan.steps[0]
    own = first.index[first.domain == first.domain[0]]
    return data.take(plan.domains[int(first.domain[0])], own[:FEW], machine.device)


def examine(name: str, network: nn.Module, samples: Samples, machine: Machine) -> Outputs:
    """What the network says of a few samples; raise unless these are finite logits [n, k]."""
    inputs = machine.inputs(samples)
    parts = [inputs] if isinstance(inputs, Tensor) else list(inputs.values())
    n = len(parts[0])
    try:
        with torch.no_grad():
            outputs = call(network, inputs)
    except Exception as error:  # the user's code can fail in any way
        given = " and ".join(f"{each.dtype} {list(each.shape)}" for each in parts)
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"model {name!r} must take the samples of the data ({given}), got "
            f"{type(error).__name__}: {reason}"
        ) from error
    shape = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    right = isinstance(outputs, Tensor) and outputs.dim() == 2 and len(outputs) == n
    title = f"output of model {name!r} for {n} samples"
    require(right, title, shape, f"logits [{n}, classes]")
    require(bool(outputs.isfinite().all()), title, "NaN or infinity", "finite")
    size = list(samples.shape[2:]) if isinstance(samples, Tensor) else []
    return Outputs(outputs.shape[-1], size)


def require_classes(
    model: str,
    classes: int,
    given: Iterable[tuple[str, Tensor]],
    counted: tuple[str, ...] | None = None,
) -> None:
    """Raise unless a model of so many classes has those of all labels, and as many as there are if
    nothing but their names tells which output is whose.
    """
    for name, labels in given:
        highest = int(labels.max())
        require(
            highest < classes,
            f"labels of {name}",
            f"up to {highest}",
            f"below {classes}, the classes of model {model!r}",
        )
        require(
            counted is None or len(counted) == classes,
            f"classes of {name}, which have names but no numbers,",
            len(counted or ()),
            f"as many as the {classes} of model {model!r}, or numbered by --classes FILE",
        )


@final
class Selected(nn.Module):
    """Some of the logits of a network [n, k], in the order of ``outputs``."""

    outputs: Tensor

    def __init__(self, network: nn.Module, outputs: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("outputs", outputs, persistent=False)

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        return self.network(*inputs, **named)[:, self.outputs]  # type: ignore[no-any-return]


def keep_outputs(network: nn.Module, outputs: Tensor, inputs: Samples) -> nn.Module:
    """A network with these logits alone: a copy whose last linear layer has no others or, if that
    is not what it comes to on these inputs, one that leaves the others out.
    """
    chosen = Selected(network, outputs).eval()
    with torch.no_grad():
        expected = call(chosen, inputs)
    try:
        cut = _cut_head(network, find_head(network, inputs), outputs)
        with torch.no_grad():
            found = call(cut, inputs)
    except (ValueError, RuntimeError, TypeError, AttributeError, IndexError):
        return chosen  # its logits come from no linear layer, or not from this one alone
    alike = found.shape == expected.shape and torch.allclose(found, expected, 1e-3, 1e-4)
    return cut if alike else chosen


def _cut_head(network: nn.Module, head: str, outputs: Tensor) -> nn.Module:
    cut = copy.deepcopy(network)
    layer = cut.get_submodule(head)
    assert isinstance(layer, nn.Linear)
    layer.weight = nn.Parameter(layer.weight.detach()[outputs].clone())
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias.detach()[outputs].clone())
    layer.out_features = len(outputs)
    return cut.eval()

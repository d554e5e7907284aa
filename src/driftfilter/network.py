"""A torch module as a predictive model: a flat θ for the selected parameters, everything else frozen.

The user's module is never changed: it is called through a twin, a module tree of its own that shares its tensors.
Per-sample gradient rows of normalisation and linear layers come from one backward pass, from what flows in and out of
each layer. With batch statistics the samples of a batch are coupled: row i is then the part of the batch's gradient
that enters through sample i's own scale and shift (rows still sum to the exact batch gradient).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from driftfilter.checks import require
from driftfilter.parameters import NORMS, NormAffine, Selection, select
from driftfilter.predictive import Pullback

_INSTANCE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def twin(model: nn.Module) -> nn.Module:
    """A module tree of its own that shares every parameter and buffer, in evaluation mode."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared).eval()


def _normalized(module: nn.Module, inputs: Tensor) -> Tensor:
    """What a normalisation layer gives before its scale and shift."""
    if isinstance(module, _BatchNorm):
        batch = module.running_mean is None
        return functional.batch_norm(inputs, module.running_mean, module.running_var, training=batch, eps=module.eps)
    if isinstance(module, nn.GroupNorm):
        return functional.group_norm(inputs, module.num_groups, eps=module.eps)
    if isinstance(module, nn.LayerNorm):
        return functional.layer_norm(inputs, module.normalized_shape, eps=module.eps)
    if isinstance(module, nn.RMSNorm):
        return functional.rms_norm(inputs, module.normalized_shape, eps=module.eps)
    assert isinstance(module, _INSTANCE)
    return functional.instance_norm(inputs, eps=module.eps)


def _per_sample(values: Tensor, shape: torch.Size, channels_first: bool) -> Tensor:
    """Σ over all positions of each sample: [n, …] -> [n, *shape]."""
    if channels_first:
        return values.flatten(2).sum(-1) if values.dim() > 2 else values
    return values.reshape(len(values), -1, *shape).sum(1)


def _layer_rows(module: nn.Module, inputs: Tensor, flow: Tensor) -> dict[str, Tensor]:
    """Rows [n, …] of a layer's own parameters, from its inputs and the gradient at its outputs."""
    if isinstance(module, nn.Linear):
        flat, into = flow.reshape(len(flow), -1, flow.shape[-1]), inputs.reshape(len(inputs), -1, inputs.shape[-1])
        return {"weight": flat.mT @ into, "bias": flat.sum(1)}
    weight = module.weight
    assert isinstance(weight, Tensor)
    channels_first = not isinstance(module, (nn.LayerNorm, nn.RMSNorm))
    scaled = flow * _normalized(module, inputs)
    return {
        "weight": _per_sample(scaled, weight.shape, channels_first),
        "bias": _per_sample(flow, weight.shape, channels_first),
    }


class _Tape(NamedTuple):
    """Rows of one backward pass, by parameter name; hooks write here while ``wanted`` holds something."""

    rows: dict[str, Tensor]
    wanted: list[bool]


@final
class Network:
    """p(y given x, θ) of a module, θ the selected parameters one after the other.

    ``statistics``: batch normalisation by the "batch" it sees or by the running statistics of the "source". ``output`` picks
    the logits out of what the module returns.
    """

    linear = False

    def __init__(
        self,
        model: nn.Module,
        selection: Selection | None = None,
        statistics: Literal["batch", "source"] = "batch",
        output: Callable[[Any], Tensor] | None = None,
    ) -> None:
        require(isinstance(model, nn.Module), "Network: model", model, "a torch module")
        require(statistics in ("batch", "source"), "Network: statistics", statistics, "'batch' or 'source'")
        self.module = twin(model)
        self.output = output
        parameters = select(self.module, selection or NormAffine())
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.sizes = [parameter.numel() for parameter in parameters.values()]
        self._start = torch.cat([parameter.detach().flatten() for parameter in parameters.values()]).clone()
        self._tape: _Tape | None = None
        for module in self.module.modules():
            if statistics == "batch" and isinstance(module, _BatchNorm):
                module.track_running_stats, module.running_mean, module.running_var = False, None, None
        self._watch()

    def mean(self) -> Tensor:
        """θ of the module as it was given [d]."""
        return self._start.clone()

    def _watch(self) -> None:
        owners = {name: name.rpartition(".")[0] for name in self.shapes}
        modules = dict(self.module.named_modules())
        strange = sorted({owner for owner in owners.values() if not isinstance(modules[owner], (*NORMS, nn.Linear))})
        require(not strange, "Network: selection", f"parameters of {strange}", "parameters of normalisation and linear layers")
        for owner in dict.fromkeys(owners.values()):
            modules[owner].register_forward_hook(self._record(owner))

    def _record(self, owner: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
            tape = self._tape
            if tape is None or not outputs.requires_grad:
                return
            into = inputs[0].detach()

            def flowing(flow: Tensor) -> None:
                if not tape.wanted:
                    return
                for name, rows in _layer_rows(module, into, flow).items():
                    key = f"{owner}.{name}" if owner else name
                    if key in self.shapes:
                        tape.rows[key] = tape.rows[key] + rows if key in tape.rows else rows

            outputs.register_hook(flowing)

        return hook

    def _pieces(self, theta: Tensor) -> dict[str, Tensor]:
        require(
            theta.shape[-1] == sum(self.sizes), "belief", f"{theta.shape[-1]} parameters", f"over {sum(self.sizes)} parameters"
        )
        pieces = theta.split(self.sizes)
        return {name: piece.view(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}

    def _forward(self, pieces: dict[str, Tensor], inputs: Tensor) -> Tensor:
        result = torch.func.functional_call(self.module, pieces, (inputs,))
        logits: Tensor = result if self.output is None else self.output(result)
        return logits

    def __call__(self, theta: Tensor, inputs: Tensor) -> Tensor:
        return self._forward(self._pieces(theta), inputs)

    def pullback(self, theta: Tensor, inputs: Tensor) -> tuple[Tensor, Pullback]:
        tape = _Tape({}, [])
        with torch.enable_grad():
            leaves = {name: piece.detach().requires_grad_() for name, piece in self._pieces(theta).items()}
            self._tape = tape
            try:
                logits = self._forward(leaves, inputs)
            finally:
                self._tape = None
        return logits.detach(), _NetworkPullback(logits, leaves, tape)

    def pushforward(self, theta: Tensor, inputs: Tensor, tangents: Tensor) -> Tensor:
        def along(tangent: Tensor) -> Tensor:
            moved: Tensor = torch.func.jvp(lambda point: self(point, inputs), (theta,), (tangent,))[1]
            return moved

        return torch.stack([along(tangent) for tangent in tangents])


class _NetworkPullback(NamedTuple):
    logits: Tensor  # [n, k], with its graph
    leaves: dict[str, Tensor]
    tape: _Tape

    def total(self, cotangents: Tensor) -> Tensor:
        gradients = torch.autograd.grad(self.logits, list(self.leaves.values()), cotangents, retain_graph=True)
        return torch.cat([gradient.flatten() for gradient in gradients])

    def __call__(self, cotangents: Tensor) -> Tensor:
        flat = cotangents.reshape(-1, *cotangents.shape[-2:])
        rows = torch.stack([self._rows(each) for each in flat])
        return rows.reshape(*cotangents.shape[:-1], -1)

    def _rows(self, cotangents: Tensor) -> Tensor:
        self.tape.rows.clear()
        self.tape.wanted.append(True)
        try:
            self.total(cotangents)
        finally:
            self.tape.wanted.pop()
        return torch.cat([self.tape.rows[name].flatten(1) for name in self.leaves], 1)

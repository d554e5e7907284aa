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
    """A module tree of its own in evaluation mode, on the memory of every parameter and buffer; its parameters are frozen."""
    shared: dict[int, Tensor] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():  # frozen, or a backward pass would work out gradients that nobody asks for
        shared[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
    return copy.deepcopy(model, shared).eval()


class _BatchStatistics(_BatchNorm):
    """Batch normalisation by the statistics of the batch, which it keeps for whoever wants the rows."""

    statistics: tuple[Tensor, Tensor] | None = None  # mean and 1 / standard deviation of each channel [c]

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.is_cuda:  # cuDNN is faster but keeps them to itself, and they are quickly worked out again there
            return functional.batch_norm(inputs, None, None, self.weight, self.bias, training=True, eps=self.eps)
        outputs, mean, scale = torch.native_batch_norm(inputs, self.weight, self.bias, None, None, True, 0.0, self.eps)
        self.statistics = (mean.detach(), scale.detach())
        return outputs


def _batch_norm_rows(module: _BatchNorm, inputs: Tensor, flow: Tensor) -> dict[str, Tensor]:
    """Σ_s δ x̂ and Σ_s δ over the positions s of each sample, x̂ = (x - mean) / deviation, without forming x̂."""
    if isinstance(module, _BatchStatistics):
        mean, scale = module.statistics or torch.batch_norm_stats(inputs, module.eps)
    else:
        assert module.running_mean is not None
        assert module.running_var is not None
        mean, scale = module.running_mean, (module.running_var + module.eps).rsqrt()
    deltas, values = flow.reshape(*flow.shape[:2], -1), inputs.reshape(*inputs.shape[:2], -1)
    total = deltas.sum(-1)
    return {"weight": (torch.linalg.vecdot(deltas, values) - total * mean) * scale, "bias": total}


def _normalized(module: nn.Module, inputs: Tensor) -> Tensor:
    """What a normalisation layer gives before its scale and shift."""
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
        return values.flatten(2).sum(-1)
    return values.reshape(len(values), -1, *shape).sum(1)


def _layer_rows(module: nn.Module, inputs: Tensor, flow: Tensor) -> dict[str, Tensor]:
    """Rows [n, …] of a layer's own parameters, from its inputs and the gradient at its outputs."""
    if isinstance(module, nn.Linear):
        flat, into = flow.reshape(len(flow), -1, flow.shape[-1]), inputs.reshape(len(inputs), -1, inputs.shape[-1])
        return {"weight": flat.mT @ into, "bias": flat.sum(1)}
    if isinstance(module, _BatchNorm):
        return _batch_norm_rows(module, inputs, flow)
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


class _Graph(NamedTuple):
    """A forward pass that can be differentiated once more."""

    logits: Tensor  # [n, k]
    leaves: dict[str, Tensor]
    tape: _Tape


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
                if module.affine:
                    module.__class__ = _BatchStatistics  # the twin's own layer: the same one, with its statistics at hand
        self._watch()

    def mean(self) -> Tensor:
        """θ of the module as it was given [d]."""
        return self._start.clone()

    def _watch(self) -> None:
        owners = {name: name.rpartition(".")[0] for name in self.shapes}
        modules = dict(self.module.named_modules())
        strange = sorted(
            {owner for owner in owners.values() if not isinstance(modules[owner], (*NORMS, _BatchStatistics, nn.Linear))}
        )
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

    def _graph(self, theta: Tensor, inputs: Tensor) -> _Graph:
        tape = _Tape({}, [])
        with torch.enable_grad():
            leaves = {name: piece.detach().requires_grad_() for name, piece in self._pieces(theta).items()}
            self._tape = tape
            try:
                return _Graph(self._forward(leaves, inputs), leaves, tape)
            finally:
                self._tape = None

    def pullback(self, theta: Tensor, inputs: Tensor) -> tuple[Tensor, Pullback]:
        graph = self._graph(theta, inputs)
        return graph.logits.detach(), _NetworkPullback(graph, lambda: self._graph(theta, inputs))

    def pushforward(self, theta: Tensor, inputs: Tensor, tangents: Tensor) -> Tensor:
        def along(tangent: Tensor) -> Tensor:
            moved: Tensor = torch.func.jvp(lambda point: self(point, inputs), (theta,), (tangent,))[1]
            return moved

        return torch.stack([along(tangent) for tangent in tangents])


@final
class _NetworkPullback:
    """Most rules ask once: the graph's memory is freed as the backward pass goes, and a second question runs a new forward."""

    def __init__(self, graph: _Graph, renew: Callable[[], _Graph]) -> None:
        self._fresh: _Graph | None = graph
        self._renew = renew

    def _take(self) -> _Graph:
        graph, self._fresh = self._fresh or self._renew(), None
        return graph

    def total(self, cotangents: Tensor) -> Tensor:
        return _backward(self._take(), cotangents, retain=False)

    def __call__(self, cotangents: Tensor) -> Tensor:
        graph = self._take()
        flat = cotangents.reshape(-1, *cotangents.shape[-2:])
        rows = [_rows(graph, each, retain=position + 1 < len(flat)) for position, each in enumerate(flat)]
        return (
            torch.stack(rows).reshape(*cotangents.shape[:-1], -1)
            if len(rows) > 1
            else rows[0].reshape(*cotangents.shape[:-1], -1)
        )


def _backward(graph: _Graph, cotangents: Tensor, retain: bool) -> Tensor:
    gradients = torch.autograd.grad(graph.logits, list(graph.leaves.values()), cotangents, retain_graph=retain)
    return torch.cat([gradient.flatten() for gradient in gradients])


def _rows(graph: _Graph, cotangents: Tensor, retain: bool) -> Tensor:
    graph.tape.rows.clear()
    graph.tape.wanted.append(True)
    try:
        _backward(graph, cotangents, retain)
    finally:
        graph.tape.wanted.pop()
    return torch.cat([graph.tape.rows[name].flatten(1) for name in graph.leaves], 1)

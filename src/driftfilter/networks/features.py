"""Frozen features: the network up to its last linear layer, and predictive models that stand on
what enters it.

The backbone runs once a batch without gradients; everything that is adapted lives after it, where
derivatives have closed forms. The user's module is never changed: it is called through twins, one
for each thread.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from driftfilter.base.checks import require, require_finite
from driftfilter.base.inputs import Inputs, arguments, batch_size, each, pick_logits, require_logits
from driftfilter.base.sharding import (
    current,
    gather_samples,
)
from driftfilter.filtering import outside_inference_mode
from driftfilter.model.predictive import LinearHead, PredictiveModel, Pullback
from driftfilter.networks.autocast import as_called, cast, dtype_of
from driftfilter.networks.batch_norm import (
    Ema,
    RunningStatistics,
    Statistics,
    TwinBatchNorm,
    prepare,
    require_statistics,
    share,
)
from driftfilter.networks.norm_rules import NormRule
from driftfilter.networks.shared_copy import Local, ordinary, private
from driftfilter.networks.shared_pass import Kept, SharedPass, counted_tensors

# Picks the logits out of what the module returns.
Output: TypeAlias = "Callable[[Any], Tensor] | None"


def _logits(model: nn.Module, inputs: Inputs, output: Output) -> Tensor:
    """One forward pass, refused unless it gives logits [n, k]."""
    with as_called():
        args, kwargs = arguments(each(inputs, lambda part: cast(ordinary(part), dtype_of(model))))
        logits = (output or pick_logits)(model(*args, **kwargs))
    require_logits(logits, batch_size(inputs))
    return logits


def _wide(tensor: Tensor) -> Tensor:
    """In float32, or in float64 if it is so already: half precision cannot carry a belief."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def find_head(model: nn.Module, inputs: Inputs, output: Output = None) -> str:
    """Name of the linear layer that gives the logits: the first one met on the way back from them.

    It is read off the autograd graph of one forward pass in evaluation mode, so the order of
    registration does not matter.
    """
    with torch.inference_mode(False), torch.enable_grad():
        copy = private(model)
        layers = _linear_layers(copy)
        owners: dict[int, str] = {}  # the layer of every parameter behind a weight, by identity
        for name, layer in layers.items():
            for own, parameter in layer.named_parameters():  # several, if it is parametrised
                if own != "bias":
                    parameter.requires_grad_()
                    owners.setdefault(id(parameter), name)
        logits = _logits(copy, inputs, output)
    for found in _parameters_behind(logits):
        if id(found) in owners:
            return owners[id(found)]
    raise ValueError(
        "the model must compute its logits from a linear layer, got logits that no such layer "
        "leads to by differentiable"
        f" steps; its linear layers are {list(layers)}"
    )


def _parameters_behind(logits: Tensor) -> Iterator[Tensor]:
    """Parameters that a tensor was computed from, the nearest first (breadth first)."""
    waiting, seen = deque([logits.grad_fn]), {logits.grad_fn}
    while waiting:
        node = waiting.popleft()
        if node is None:
            continue
        if hasattr(node, "variable"):
            yield node.variable
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                waiting.append(following)


def catch_features(head: nn.Module, seen: list[Tensor]) -> RemovableHandle:
    """Leave in ``seen`` what enters a layer, in each forward pass."""
    return head.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(args[0] if args else kwargs["input"]),
        with_kwargs=True,
    )


def take_features(head: str, seen: list[Tensor]) -> Tensor:
    """What entered the layer of this name in a forward pass [n, D]; refused unless it was called
    once, with a vector a sample.
    """
    require(
        len(seen) == 1,
        "Backbone: head",
        head,
        f"used once a forward pass, not {len(seen)} times",
    )
    features = seen.pop()
    require(
        features.dim() == 2,
        f"what enters the head {head!r}",
        f"shape {list(features.shape)}",
        "of shape [n, D]: one vector a sample, no tokens",
    )
    return features


class _Copy(NamedTuple):
    """A thread's own network; each forward pass leaves in ``seen`` what entered the head."""

    module: nn.Module
    norms: list[TwinBatchNorm]
    seen: list[Tensor]


class _Local(Local):
    """The network of a thread, and the features of its latest batches."""

    def __init__(self) -> None:
        self.copy: _Copy | None = None
        self.recent: deque[Kept] = deque(maxlen=8)  # a batch and its augmented views


@final
class Backbone:
    """Inputs -> features z [n, D], what enters the linear layer ``head`` of a frozen network in
    evaluation mode.

    The logits must be z Wᵀ + b and nothing after it; the first batch proves it. ``statistics`` are
    those of its batch norms, as in Network; carried ones (Ema, RunningStatistics, a NormRule) are
    not a part of
    features.
    """

    def __init__(
        self, model: nn.Module, head: str, output: Output = None, statistics: Statistics = "source"
    ) -> None:
        require(isinstance(model, nn.Module), "Backbone: model", model, "a torch module")
        layers = _linear_layers(model)
        require(
            head in layers,
            "Backbone: head",
            head,
            f"the name of a linear layer, one of {list(layers)}",
        )
        require_statistics(statistics)
        require(
            not isinstance(statistics, (Ema, RunningStatistics, NormRule)),
            "Backbone: statistics",
            statistics,
            "'batch', 'source' or PseudoCount(count)",
        )
        self.head, self.output, self.statistics = head, output, statistics
        with outside_inference_mode():
            self._module = private(model)
            layer = _linear_layers(self._module)[head]
            self.weight = _wide(layer.weight.detach().clone())  # W [k, D]
            self.bias = None if layer.bias is None else _wide(layer.bias.detach().clone())  # b [k]
        self._local = _Local()
        self._proven = False

    @property
    def by_source(self) -> "Backbone":
        """The backbone whose batch norms use the running statistics of the source."""
        if self.statistics == "source":
            return self
        return Backbone(self._module, self.head, self.output)

    def __call__(self, inputs: Inputs) -> Tensor:
        with outside_inference_mode():
            copy = self._copy()
            copy.seen.clear()
            share(copy.norms, current())
            logits = _logits(copy.module, inputs, self.output)
            features = take_features(self.head, copy.seen).detach().to(self.weight.dtype)
            if not self._proven:
                self._prove(features, logits)
        return gather_samples(features)

    def _copy(self) -> _Copy:
        """This thread's network: hooks write to it, so that threads cannot share one."""
        copy: _Copy | None = self._local.copy
        if copy is None:
            module = private(self._module)
            seen: list[Tensor] = []
            copy = self._local.copy = _Copy(module, prepare(module, self.statistics), seen)
            catch_features(module.get_submodule(self.head), seen)
        return copy

    def _prove(self, features: Tensor, logits: Tensor) -> None:
        """Raise unless the logits are those of the head."""
        require_finite(f"what enters the head {self.head!r}", features)
        expected = functional.linear(features, self.weight, self.bias)
        rounding = torch.finfo(logits.dtype).eps ** 0.5 * (1 + expected.abs().max().item())
        require(
            expected.shape == logits.shape
            and torch.allclose(expected.to(logits.dtype), logits, rtol=0, atol=rounding),
            f"the model's logits, with the head {self.head!r},",
            f"logits of shape {list(logits.shape)}"
            + ("" if expected.shape != logits.shape else " with other values"),
            "its output as it is: nothing may follow the head (such as a temperature, a softmax "
            "or a mean)",
        )
        self._proven = True


@final
class OnFeatures(PredictiveModel):
    """A model p(y given z, θ) on the features z of a backbone, as a predictive model of the raw
    inputs.

    The features of the last few batches are kept (by identity), so that all a step asks about a
    batch runs the backbone once. Writing to a batch through torch is noticed; writing to it behind
    torch's back, through NumPy, is not.
    """

    def __init__(self, backbone: Callable[[Inputs], Tensor], model: PredictiveModel) -> None:
        require(
            callable(backbone),
            "OnFeatures: backbone",
            backbone,
            "a Backbone, or a function inputs -> features [n, D]",
        )
        require(
            isinstance(model, PredictiveModel),
            "OnFeatures: model",
            model,
            "a PredictiveModel such as LinearHead(10)",
        )
        self.backbone, self.model = backbone, model
        self._local, self._shared = _Local(), SharedPass()

    @property
    def linear(self) -> bool:
        return self.model.linear

    @property
    def by_source(self) -> PredictiveModel:
        backbone = self.backbone
        inner = backbone.by_source if isinstance(backbone, Backbone) else backbone
        return self if inner is backbone else OnFeatures(inner, self.model)

    def with_features(self) -> PredictiveModel:
        beside = OnFeatures(self.backbone, self.model.with_features())
        beside._local, beside._shared = self._local, self._shared  # features known already
        return beside

    def features(self, inputs: Inputs) -> Tensor:
        """z [n, D]."""
        tensors = counted_tensors(inputs)
        if tensors is None:
            return self.backbone(inputs)
        shared = self._shared.find(inputs)
        if shared is not None:
            return shared
        recent: deque[Kept] = self._local.recent
        for kept in recent:
            if kept.belongs_to(inputs, tensors):
                return kept.value
        features = self.backbone(inputs)
        recent.append(Kept.of(inputs, tensors, features))
        return features

    def share_pass(self, batches: Sequence[Inputs]) -> bool:
        backbone = self.backbone
        apart = isinstance(backbone, Backbone) and backbone.statistics == "source"
        return apart and self._shared.run(backbone, batches)

    def __call__(self, theta: Tensor, inputs: Inputs) -> Tensor:
        return self.model(theta, self.features(inputs))

    def pullback(self, theta: Tensor, inputs: Inputs) -> tuple[Tensor, Pullback]:
        return self.model.pullback(theta, self.features(inputs))

    def pushforward(self, theta: Tensor, inputs: Inputs, tangents: Tensor) -> Tensor:
        return self.model.pushforward(theta, self.features(inputs), tangents)


def build_head(backbone: Backbone) -> tuple[OnFeatures, Tensor]:
    """The last layer as a model linear in θ on frozen features, and θ of the source head [d].

    θ is as LinearHead reads it: [b_c, w_c] class by class, or w_c if it has no bias.
    """
    weight, bias = backbone.weight, backbone.bias
    rows = weight if bias is None else torch.cat((bias[:, None], weight), 1)
    head = LinearHead(len(weight), intercept=bias is not None)
    return OnFeatures(backbone, head), rows.flatten().clone()

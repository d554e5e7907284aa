"""What an adapter has learned as a plain network, for places without this library.

The adapted parameters take the place of the model's, carried statistics that of its batch norms'
running ones, and class offsets δ and the temperature T enter the last linear layer:

    W ← W / T,   b ← (b - δ) / T

so that log softmax of its outputs is what ``adapter.predict`` says. It cannot hold what depends on
more than the sample at hand: the chain of labels, domains other than the last one, statistics that
come from the batch (``Ema`` blends some in; an export has the carried ones alone), draws.
"""

from __future__ import annotations

import copy
import io
import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save as tensor_bytes
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from driftfilter.base.checks import require, warn
from driftfilter.base.inputs import Inputs, arguments, batch_size
from driftfilter.inference.prediction import MAP, SMOOTHING, Moderated, Tempered
from driftfilter.model.centering import Centered
from driftfilter.model.predictive import LinearHead, PredictiveModel
from driftfilter.networks.features import Backbone, OnFeatures, find_head
from driftfilter.networks.network import Network
from driftfilter.storage.atomic import atomic_file

if TYPE_CHECKING:
    from driftfilter.adapter.adapter import Adapter

_SUFFIXES = (".onnx", ".pt", ".pth", ".safetensors")


def export(adapter: Adapter, path: str | Path, example: Inputs | None = None) -> None:
    """Write the adapted network to a file: .onnx, or a state dict as .safetensors, .pt or .pth."""
    path = Path(path)
    require(path.suffix in _SUFFIXES, "export: path", str(path), f"a file of one of {_SUFFIXES}")
    module = build_adapted(adapter, example)
    if path.suffix == ".onnx":
        require(example is not None, "export: example", None, "a batch, by which ONNX is traced")
        data = _trace(module, example)
    else:
        data = _encode(module.state_dict(), path.suffix)
    with atomic_file(path) as file:
        file.write(data)


def _encode(tensors: Mapping[str, Tensor], suffix: str) -> bytes:
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    if suffix == ".safetensors":
        return tensor_bytes(own)
    file = io.BytesIO()
    torch.save(own, file)
    return file.getvalue()


def build_adapted(adapter: Adapter, example: Inputs | None = None) -> nn.Module:
    """A copy of the model with what the adapter has learned; the model itself stays as it is.

    ``example``, a batch of inputs, is needed if class offsets or a temperature must find the last
    layer.
    """
    snapshot = adapter.snapshot()
    bound, state = snapshot.bound, snapshot.current
    assert bound is not None
    module = copy.deepcopy(adapter.model).eval()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    model, offsets = _take_offsets(bound.filter.logits, state.memory)
    tensors = _find_tensors(adapter, model, state.belief.mean[: state.parameters])
    own = dict((*module.named_parameters(), *module.named_buffers()))
    with torch.no_grad():
        for name, value in tensors.items():
            own[name].copy_(value)
        temperature = _find_temperature(adapter, example)
        if temperature != 1.0 or offsets is not None:
            _scale_head(adapter, module, example, temperature, offsets)
    return module


def _take_offsets(model: Any, memory: Mapping[str, Tensor]) -> tuple[Any, Tensor | None]:
    """The model behind the centring, with what a memory carries, and the offsets δ [k]."""
    recalled = model.recall(memory)
    if not isinstance(recalled, Centered):
        return recalled, None
    known = recalled.known
    if known is None:
        return recalled.model, None
    classes = (len(known) - 7) // 5
    zeros = known.new_zeros(1, classes)
    silent = Centered(_Silent(zeros), recalled.rule, recalled.source, known)
    return recalled.model, -silent(known, zeros)[0]


class _Silent(PredictiveModel):
    """A model whose logits are 0."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def __call__(self, theta: Tensor, inputs: Inputs) -> Tensor:
        return self._logits

    def pullback(self, theta: Tensor, inputs: Inputs) -> Any:
        raise NotImplementedError

    def pushforward(self, theta: Tensor, inputs: Inputs, tangents: Tensor) -> Tensor:
        raise NotImplementedError


def _find_tensors(adapter: Adapter, model: Any, theta: Tensor) -> dict[str, Tensor]:
    """Parameters and buffers of the module by name, as they have been adapted."""
    recipe = adapter.recipe
    require(not recipe.align, "export: recipe", "norms='aligned'", "of norms that the model has")
    if isinstance(model, OnFeatures):
        return _find_head_tensors(model, theta, adapter.model)
    require(isinstance(model, Network), "export: recipe", recipe.parameters, "of the network's own")
    return {**model.adapted_parameters(theta), **model.adapted_statistics()}


def _find_head_tensors(model: OnFeatures, theta: Tensor, module: nn.Module) -> dict[str, Tensor]:
    head, backbone = model.model, model.backbone
    fits = isinstance(head, LinearHead) and isinstance(backbone, Backbone)
    require(fits, "export: recipe", type(head).__name__, "of a linear head (no prototypes)")
    assert isinstance(backbone, Backbone)
    allowed = "'source': an export sees no batch to take them from"
    alone = not any(isinstance(layer, _BatchNorm) for layer in module.modules())
    known = alone or backbone.statistics == "source"
    require(known, "export: statistics", backbone.statistics, allowed)
    rows = theta.view(len(backbone.weight), -1)
    if backbone.bias is None:
        return {f"{backbone.head}.weight": rows}
    return {f"{backbone.head}.weight": rows[:, 1:], f"{backbone.head}.bias": rows[:, 0]}


def _find_temperature(adapter: Adapter, example: Inputs | None) -> float:
    """T of the prediction, the same for all samples."""
    rule = adapter.recipe.prediction
    if isinstance(rule, MAP):
        return 1.0
    if isinstance(rule, Tempered):
        return float(rule.temperature)
    if not isinstance(rule, Moderated):
        warn(f"export: {rule} is left out: the network predicts by the mean of the belief alone")
        return 1.0
    require(example is not None, "export: example", None, f"a batch: {rule} has a temperature")
    if SMOOTHING in adapter.snapshot().current.memory:
        warn(
            "export: what smoothed labels have added is left in: the network is less sure than "
            "predictions of the adapter"
        )
    args, named = arguments(example)
    variance = float(adapter.predict(*args, **named).logit_variance[0, 0])
    return math.sqrt(1 + math.pi / 4 * variance)


def _scale_head(
    adapter: Adapter,
    module: nn.Module,
    example: Inputs | None,
    temperature: float,
    offsets: Tensor | None,
) -> None:
    """Put offsets and temperature into the last linear layer, and prove that they are there."""
    require(example is not None, "export: example", None, "a batch, to find the last layer")
    name = find_head(module, example, adapter.output)
    head = module.get_submodule(name)
    assert isinstance(head, nn.Linear)
    moves = offsets is not None and bool((offsets - offsets[0]).abs().max() > 0)
    require(
        head.bias is not None or not moves,
        f"export: the last layer {name!r}",
        "without a bias",
        "one with a bias, which takes the offsets of the classes",
    )
    before = _logits(adapter, module, example)
    head.weight.div_(temperature)
    if head.bias is not None:
        head.bias.copy_((head.bias - (0.0 if offsets is None else offsets)) / temperature)
    after = _logits(adapter, module, example)
    wanted = (before - (offsets if moves and offsets is not None else 0.0)) / temperature
    close = torch.allclose(after, wanted, rtol=1e-3, atol=1e-3 * (1 + float(wanted.abs().max())))
    require(close, f"export: the layer {name!r}", "followed by others", "the last one")


def _logits(adapter: Adapter, module: nn.Module, inputs: Inputs) -> Tensor:
    args, named = arguments(inputs)
    return adapter.output(module(*args, **named))


def _trace(module: nn.Module, example: Inputs) -> bytes:
    """The module as an ONNX graph for batches of any size."""
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        told = f"export: ONNX needs {' and '.join(missing)}: pip install 'driftfilter[onnx]'"
        raise ModuleNotFoundError(told)
    args, named = arguments(example)
    require(batch_size(example) > 1, "export: example", batch_size(example), "of >= 2 samples")
    sizes = torch.export.Dim("batch")

    def free(part: Any) -> Any:
        return {0: sizes} if isinstance(part, Tensor) else None

    shapes = tuple(map(free, args)) if args else {key: free(part) for key, part in named.items()}
    with warnings.catch_warnings(), _quiet("torch.onnx"):
        warnings.simplefilter("ignore")  # torch's own, about itself
        program = torch.onnx.export(
            module, args, kwargs=named or None, dynamic_shapes=shapes, dynamo=True, verbose=False
        )
    assert program is not None
    return program.model_proto.SerializeToString()  # type: ignore[no-any-return]


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Only errors of a logger, for the time of a block."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

"""What a model is called with: one tensor, several, or tensors by name; the first tensor says how
many samples there are.

And the logits in what it returns.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from driftfilter.base.checks import require, require_finite

# A tensor [n, ...], a tuple of what the model takes by place, or a mapping by name.
Inputs: TypeAlias = Any


def parts(inputs: Inputs) -> Iterator[tuple[str, Any]]:
    """What the inputs consist of, tensors or not, each with its name in an error."""
    if isinstance(inputs, Tensor):
        yield "inputs", inputs
    elif isinstance(inputs, Mapping):
        yield from ((f"inputs[{name!r}]", part) for name, part in inputs.items())
    elif isinstance(inputs, (tuple, list)):
        yield from ((f"inputs[{position}]", part) for position, part in enumerate(inputs))
    else:
        hint = " (torch.as_tensor makes one of it)" if hasattr(inputs, "__array__") else ""
        raise ValueError(
            "inputs must be a tensor [n, ...], or a tuple or dict of them, got "
            f"{type(inputs).__name__}{hint}"
        )


def batch_size(inputs: Inputs) -> int:
    """n, the length of the first tensor."""
    if isinstance(inputs, Tensor):
        return inputs.shape[0]
    return next(int(part.shape[0]) for _, part in parts(inputs) if isinstance(part, Tensor))


def is_table(inputs: object) -> bool:
    """Whether samples are rows of numbers [n, features]."""
    return isinstance(inputs, Tensor) and inputs.dim() == 2 and inputs.is_floating_point()


def check_inputs(inputs: Inputs) -> Inputs:
    """The inputs, refused if unusable, as tensors that may enter a graph."""
    if isinstance(inputs, Tensor):  # nearly always, and a small filter feels every loop
        _require_batch("inputs", inputs)
        if inputs.is_floating_point():
            require_finite("inputs", inputs)
        return inputs.clone() if inputs.is_inference() else inputs
    tensors = [(name, part) for name, part in parts(inputs) if isinstance(part, Tensor)]
    if not tensors:
        raise ValueError(
            "inputs must be a tensor [n, ...], or a tuple or dict of them, got a "
            f"{type(inputs).__name__}"
        )
    _require_batch(*tensors[0])
    for name, part in tensors:
        if part.is_floating_point():
            require_finite(name, part.masked_fill(part.isinf(), 0.0))  # masks hold -inf
    if not any(part.is_inference() for _, part in tensors):
        return inputs
    return each(inputs, lambda part: part.clone() if part.is_inference() else part)


def _require_batch(name: str, part: Tensor) -> None:
    if part.dim() == 0 or part.shape[0] == 0:
        raise ValueError(
            f"{name} must be a batch [n, ...] with n >= 1, got shape {list(part.shape)}"
        )


def can_join(one: Inputs, other: Inputs) -> bool:
    """Whether two batches have samples of the same shapes, so that they may become one."""
    try:
        join_batches([each(one, _first), each(other, _first)])
    except ValueError:
        return False
    return True


def _first(part: Tensor) -> Tensor:
    return part[:1] if part.dim() else part


def join_batches(pieces: Sequence[Inputs]) -> Inputs:
    """Batches one after the other as one batch; what does not go sample by sample is that of the
    last one.
    """
    last, n = pieces[-1], batch_size(pieces[-1])
    if isinstance(last, Tensor):
        return _concatenate("inputs", pieces)
    together = {
        key: _concatenate(f"inputs[{key!r}]", [piece[key] for piece in pieces])
        if _counts(last[key], n)
        else last[key]
        for key in (list(last) if isinstance(last, Mapping) else list(range(len(last))))
    }
    return together if isinstance(last, Mapping) else tuple(together.values())


def _counts(part: Any, samples: int) -> bool:
    """Whether a part of the inputs goes sample by sample."""
    return isinstance(part, Tensor) and part.dim() > 0 and part.shape[0] == samples


def _concatenate(name: str, pieces: Sequence[Tensor]) -> Tensor:
    shapes = sorted({tuple(piece.shape[1:]) for piece in pieces})
    together = "if several batches are adapted to at once (window, update_every)"
    require(
        len(shapes) == 1,
        name,
        f"samples of shapes {shapes}",
        f"of one shape but for their number, {together}",
    )
    # Torch would turn integers into floating numbers, and a model take what it refuses alone.
    kinds = sorted(
        {"floating" if piece.is_floating_point() else str(piece.dtype) for piece in pieces}
    )
    require(
        len(kinds) == 1,
        name,
        f"samples of dtypes {kinds}",
        f"all floating or all of one dtype, {together}",
    )
    return torch.cat(list(pieces))


def samples(inputs: Inputs, start: int, stop: int) -> Inputs:
    """Some samples of a batch; what does not go sample by sample stays whole."""
    n = batch_size(inputs)
    return each(inputs, lambda part: part[start:stop] if _counts(part, n) else part)


def sample(inputs: Inputs, index: Tensor) -> Inputs:
    """Samples of a batch by their indices [m]; what does not go sample by sample stays whole."""
    n = batch_size(inputs)
    return each(inputs, lambda part: part.index_select(0, index) if _counts(part, n) else part)


def split_batch(inputs: Inputs, size: int) -> list[Inputs]:
    """A batch cut into batches of this size, the last one shorter."""
    return [samples(inputs, start, start + size) for start in range(0, batch_size(inputs), size)]


def each(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """The inputs with every tensor changed; what is not a tensor stays."""
    if isinstance(inputs, Tensor):
        return change(inputs)
    args, kwargs = arguments(inputs)
    if isinstance(inputs, Mapping):
        return {
            name: change(part) if isinstance(part, Tensor) else part
            for name, part in kwargs.items()
        }
    return tuple(change(part) if isinstance(part, Tensor) else part for part in args)


def tensors(inputs: Inputs) -> list[Tensor]:
    """The tensors among the inputs, in their order."""
    return [part for _, part in parts(inputs) if isinstance(part, Tensor)]


def arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the module."""
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    raise ValueError(
        "inputs must be a tensor, a tuple, a list or a mapping of tensors, got "
        f"{type(inputs).__name__}"
    )


def join_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """The inputs of a call in the place of the model's: by place or, if some came
    by name, all by name.
    """
    if not args or not kwargs:
        return kwargs or (args[0] if len(args) == 1 else args)
    taken = list(inspect.signature(model.forward).parameters.values())[: len(args)]
    require(
        len(taken) == len(args)
        and all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in taken),
        "adapter",
        f"{len(args)} arguments and {list(kwargs)}",
        "called by place or by name, not both, for this model",
    )
    placed = {parameter.name: value for parameter, value in zip(taken, args, strict=True)}
    twice = sorted(set(placed) & set(kwargs))
    require(not twice, "adapter", f"{twice} by place too", "called with every argument once")
    return {**placed, **kwargs}


def pick_logits(result: Any) -> Tensor:
    """The logits in what a module returns."""
    if isinstance(result, (tuple, list)) and len(result) == 1:
        result = result[0]
    if not isinstance(result, Tensor):
        result = (
            result.get("logits", result)
            if isinstance(result, Mapping)
            else getattr(result, "logits", result)
        )
    if isinstance(result, Tensor):
        return result
    keys = f" with keys {list(result)}" if isinstance(result, Mapping) else ""
    length = f" of {len(result)}" if isinstance(result, (tuple, list)) else ""
    raise ValueError(
        "the module must return logits, or something with .logits or ['logits'], got a "
        f"{type(result).__name__}{length}{keys};"
        " give an output function that picks them (output=...)"
    )


def require_logits(logits: Any, samples: int) -> None:
    """Raise unless logits are a tensor [samples, k]."""
    got = f"shape {list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
    if (
        not isinstance(logits, Tensor)
        or logits.dim() != 2
        or len(logits) != samples
        or logits.shape[1] < 1
    ):
        raise ValueError(f"the model's logits must be of shape [{samples}, k], got {got}")


def doubt(logits: Tensor) -> str:
    """What is wrong with logits [n, k] that a classifier would hardly give, and what to do about
    it; empty for others.
    """
    if logits.shape[1] == 1:
        return (
            "the model returns one logit, so its only class is certain: if it is that of the "
            "second of two classes, give"
            " adapt output=lambda result: torch.cat((torch.zeros_like(result), result), -1)"
        )
    rounding = 16 * torch.finfo(logits.dtype).eps if logits.is_floating_point() else 0.0
    if bool((logits >= 0).all() and ((logits.sum(-1) - 1).abs() <= rounding).all()):
        return (
            "the model returns probabilities, which are taken for logits: leave its softmax "
            "out, or give adapt"
            " output=lambda result: result.clamp_min(1e-12).log()"
        )
    return ""

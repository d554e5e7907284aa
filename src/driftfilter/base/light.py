"""Rules on a handful of numbers, written once for two libraries: NumPy on a CPU, where a call takes
a third of the time of torch's, and torch elsewhere, where a look at a number stops the queue.

A rule that takes what ``lighten`` gives works with vectors, arrays of the one or the other, and
with numbers: floats, or tensors [].
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Vector: TypeAlias = Any  # a NumPy array or a tensor
Number: TypeAlias = Any  # a float or a tensor []

_KNOWN = (torch.float32, torch.float64)


def lighten(tensor: Tensor) -> Vector:
    """A tensor for rules on a handful of numbers, on the same memory; one of several, under
    ``torch.func.vmap``, stays a tensor.
    """
    is_light = tensor.device.type == "cpu" and tensor.dtype in _KNOWN
    is_light = is_light and not torch._C._functorch.is_batchedtensor(tensor)
    return tensor.detach().numpy() if is_light else tensor.detach()


def as_torch(vector: Vector) -> Tensor:
    """A vector as a tensor, on the same memory."""
    return vector if isinstance(vector, Tensor) else torch.from_numpy(vector)


def match(tensor: Tensor, like: Vector) -> Vector:
    """A tensor in the library of another vector."""
    return tensor if isinstance(like, Tensor) else tensor.numpy()


def number(value: Tensor, like: Vector) -> Number:
    """A tensor [] as a number in the library of another vector."""
    return value if isinstance(like, Tensor) else value.item()


def numbers(vector: Vector) -> list[Number]:
    """The entries of a vector."""
    return list(vector.unbind()) if isinstance(vector, Tensor) else vector.tolist()


def total(vector: Vector) -> Number:
    """Σ of the entries."""
    return vector.sum() if isinstance(vector, Tensor) else float(vector.sum())


def log(vector: Vector) -> Vector:
    """The natural logarithm of every entry."""
    return vector.log() if isinstance(vector, Tensor) else np.log(vector)


def stack(*vectors: Vector) -> Vector:
    """Vectors as rows."""
    return torch.stack(vectors) if isinstance(vectors[0], Tensor) else np.array(vectors)


def xlogy(factors: Vector, vector: Vector) -> Vector:
    """x ln y of every entry, 0 · ln 0 = 0."""
    return match(torch.xlogy(as_torch(factors), as_torch(vector)), factors)


def entropy(shares: Vector) -> Number:
    """-Σ s ln s, 0 · ln 0 = 0."""
    return number(torch.special.entr(as_torch(shares)).sum(), shares)


def clip(value: Number, low: float, high: float) -> Number:
    """A number within bounds."""
    return value.clamp(low, high) if isinstance(value, Tensor) else min(max(value, low), high)


def root(value: Number) -> Number:
    """√ of a number >= 0."""
    return value.sqrt() if isinstance(value, Tensor) else value**0.5


def join(*pieces: Vector | Sequence[Number], like: Vector) -> Vector:
    """Vectors, and lists of numbers, one after the other, in the dtype of another vector."""
    if not isinstance(like, Tensor):
        return np.concatenate([np.asarray(piece, like.dtype) for piece in pieces])
    vectors = [
        piece if isinstance(piece, Tensor) else torch.stack([_scalar(each, like) for each in piece])
        for piece in pieces
    ]
    return torch.cat([vector.to(like) for vector in vectors])


def _scalar(value: Number, like: Tensor) -> Tensor:
    return value.to(like) if isinstance(value, Tensor) else like.new_full((), value)


def count(labels: Vector, classes: int, like: Vector) -> Vector:
    """How often each of k classes is among labels [n]: [k], in the dtype of another vector."""
    if not isinstance(like, Tensor):
        return np.bincount(labels, minlength=classes).astype(like.dtype)
    return like.new_zeros(classes).scatter_add(0, labels, like.new_ones(labels.shape))

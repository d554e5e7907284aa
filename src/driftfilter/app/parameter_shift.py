"""How far a stream moves the parameters: the mean of the belief against the source, by layer."""

import math
from typing import Any

import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.filtering import FilterState
from driftfilter.networks.parameters import select


def measure_shift(adapter: df.Adapter, model: nn.Module) -> list[dict[str, Any]]:
    """Shift Δ = μ_T - μ_0 of each layer with parameters in θ, JSON-ready.

    Root mean squares of Δ/σ_0 and Δ, and |Δ|/|μ_0|; None if σ_0 = 0 or μ_0 = 0.
    """
    state = adapter.state
    start, now, variance = _read(state, adapter.recipe.transition.read_out(state.parameters))
    rows, at = [], 0
    for layer, size in _layers(adapter, model, len(start)).items():
        piece = slice(at, at + size)
        rows.append(
            {
                "layer": layer,
                "parameters": size,
                **_compare(now[piece] - start[piece], start[piece], variance[piece]),
            }
        )
        at += size
    return rows


def _read(state: FilterState, matrix: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """μ_0, μ_T and σ_0² of the parameters [d].

    If the belief is over more states z than these, θ = R z with the matrix R.
    """
    means = state.source.mean.double(), state.belief.mean.double()
    if matrix is None:
        return *means, state.source.covariance.variance().double()
    rows = matrix.to(state.source.mean)
    return (
        rows.double() @ means[0],
        rows.double() @ means[1],
        (state.source.covariance.apply(rows) * rows).sum(1).double(),
    )


def _layers(adapter: df.Adapter, model: nn.Module, size: int) -> dict[str, int]:
    """How many parameters of θ each layer has, in their order."""
    chosen = adapter.recipe.parameters
    if isinstance(chosen, (df.Head, df.Prototypes)):
        return {chosen.name or "head": size}
    sizes: dict[str, int] = {}
    for name, piece in select(model, chosen).items():
        layer = name.rpartition(".")[0] or name
        sizes[layer] = sizes.get(layer, 0) + piece.numel()
    return sizes


def _compare(change: Tensor, start: Tensor, variance: Tensor) -> dict[str, float | None]:
    length, size = (torch.linalg.vector_norm(each).item() for each in (change, start))
    spread = bool((variance > 0).all())
    return {
        "sigmas": (change.square() / variance).mean().sqrt().item() if spread else None,
        "rms": length / math.sqrt(len(change)),
        "relative": length / size if size else None,
    }

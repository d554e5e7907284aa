"""Parameters by name, for changes of the belief by hand."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from driftfilter.adapter.bind import BoundFilter
from driftfilter.base.checks import nearest, require
from driftfilter.model.predictive import ModelAround, PredictiveModel


def _find_shapes(bound: BoundFilter) -> dict[str, torch.Size]:
    """Shapes of the pieces of θ by name; one vector without names is called "theta"."""
    model: PredictiveModel = bound.filter.logits  # type: ignore[assignment]  # lifted
    while isinstance(model, ModelAround):
        model = model.model
    state = bound.start
    alike = state.parameters == state.belief.dimension
    allowed = "without hidden states (trend, seasons) for parameters to be named"
    require(alike, "intervene: the transition", bound.filter.transition.dynamics, allowed)
    return dict(model.shapes or {"theta": torch.Size([state.parameters])})


def find_where(bound: BoundFilter, names: str | Iterable[str]) -> Tensor:
    """The coordinates [d] of the parameters of these names or patterns."""
    shapes = _find_shapes(bound)
    some = isinstance(names, Iterable)
    require(some, "intervene: names", names, "one name or more")
    patterns = [names] if isinstance(names, str) else list(names)
    require(len(patterns) > 0, "intervene: names", patterns, "one name or more")
    for pattern in patterns:
        text = isinstance(pattern, str)
        known = text and any(fnmatchcase(name, pattern) for name in shapes)
        allowed = f"the name of an adapted parameter, or a pattern such as {next(iter(shapes))!r}"
        hint = nearest(pattern, list(shapes)) if text else ""
        require(known, "intervene: names", pattern, allowed + hint)
    parts = [
        torch.full((shape.numel(),), any(fnmatchcase(name, pattern) for pattern in patterns))
        for name, shape in shapes.items()
    ]
    return torch.cat(parts).to(bound.start.belief.mean.device)


def spread_mean(
    bound: BoundFilter, where: Tensor, mean: Tensor | float | str | None, source: Tensor
) -> Tensor | float | None:
    """New means as a number, or of all coordinates [d]."""
    if mean is None or not isinstance(mean, (str, Tensor)):
        return mean
    if isinstance(mean, str):
        require(mean == "source", "intervene: mean", mean, "a number, a tensor or 'source'")
        return source
    pieces, place = source.clone(), 0
    for name, shape in _find_shapes(bound).items():
        stop = place + shape.numel()
        if where[place]:
            found = f"shape {list(mean.shape)}"
            require(mean.shape == shape, "intervene: mean", found, f"{list(shape)}, as {name!r}")
            pieces[place:stop] = mean.flatten().to(source)
        place = stop
    return pieces

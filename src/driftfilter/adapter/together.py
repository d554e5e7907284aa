"""Predictions of many adapters over one network, in one pass: ``df.predict_together``."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from driftfilter.adapter.adapter import Adapter
from driftfilter.base.checks import require, unchecked
from driftfilter.base.inputs import Inputs, check_inputs
from driftfilter.base.randomness import Randomness
from driftfilter.filtering import FilterState
from driftfilter.gaussian.belief import Belief
from driftfilter.inference.prediction import (
    MAP,
    SLOPES,
    SMOOTHING,
    Moderated,
    Prediction,
    Query,
)
from driftfilter.model.appearance import describe
from driftfilter.model.centering import Centered
from driftfilter.model.predictive import PredictiveModel
from driftfilter.networks.batch_norm import Ema
from driftfilter.networks.network import Network

# Samples of a pass: more of them fit into no near cache of a CPU, or take memory for nothing. With
# fewer adapters than these in it, it takes as long as their own passes (benchmarks/together.py).
_MOST_ON_CPU, _MOST, _FEWEST = 64, 1024, 32


class _Look(NamedTuple):
    """A batch as an adapter takes it, and how its samples look."""

    inputs: Tensor
    signatures: Tensor | None = None


class _Asked(NamedTuple):
    """One adapter's part of a pass: what differs between adapters is tensors."""

    network: Network  # as the adapter's state recalls it
    centered: Centered | None  # what takes offsets off its logits
    carried: tuple[Tensor, ...]  # what its norms blend a batch with
    rule: MAP | Moderated
    state: FilterState
    inputs: Tensor  # [n, ...]

    @property
    def form(self) -> Any:
        """What parts of one pass have in common."""
        network = self.network
        samples = (self.inputs.shape, self.inputs.dtype, self.inputs.device)
        passes = (network.statistics, network.output, tuple(network.shapes), self.rule)
        centered = self.centered and (self.centered.rule, frozenset(self.offsets))
        known = (len(self.carried), frozenset(self.memory), self.state.belief.mean.dtype)
        return samples, passes, centered, known

    @property
    def offsets(self) -> dict[str, Tensor]:
        """What offsets are made of."""
        given = {} if self.centered is None else vars(self.centered)
        return {name: given[name] for name in ("source", "known") if given.get(name) is not None}

    @property
    def memory(self) -> dict[str, Tensor]:
        """What the rule has learned."""
        return {
            name: self.state.memory[name]
            for name in (SLOPES, SMOOTHING)
            if name in self.state.memory
        }


def predict_together(adapters: Sequence[Adapter], batches: Sequence[Inputs]) -> list[Prediction]:
    """``[adapter.predict(batch) for adapter, batch in zip(adapters, batches)]`` to rounding, in one
    pass for all adapters over one network that have batches of one shape.

    Convolutions and matrix products are of all samples at once; norms have the scales, shifts and
    statistics of each adapter. It changes nothing.

    Asked one by one are adapters whose prediction is more than one pass with one θ (a window,
    pieces, several processes, a batch of several domains, a rule other than ``MAP`` and
    ``Moderated``), networks that ``torch.func.vmap`` does not take, and batches that are large by
    themselves: above 2 samples on a CPU, 32 elsewhere.

    >>> import torch, driftfilter as df
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8),
    ...                             torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
    >>> adapters = [df.adapt(model, "tent") for _ in range(3)]
    >>> found = df.predict_together(adapters, list(torch.randn(3, 2, 4)))
    >>> [prediction.log_probabilities.shape for prediction in found][0]
    torch.Size([2, 3])
    """
    given, several = list(adapters), list(batches)
    allowed = f"as many as adapters, {len(given)}"
    require(len(given) == len(several), "predict_together: batches", len(several), allowed)
    pairs = list(zip(given, several, strict=True))
    found: dict[int, Prediction] = {}
    groups: dict[Any, list[tuple[int, _Asked]]] = {}
    for place, ((adapter, _), look) in enumerate(zip(pairs, _look(pairs), strict=True)):
        asked = None if look is None else _ask(adapter, look)
        if asked is not None:
            key = (id(adapter.model), adapter.autocast, asked.form)
            groups.setdefault(key, []).append((place, asked))
    for group in groups.values():
        samples = _MOST_ON_CPU if group[0][1].inputs.is_cpu else _MOST
        step = samples // len(group[0][1].inputs)
        pays = len(group) > 1 and step >= _FEWEST
        for begin in range(0, len(group) if pays else 0, max(step, 1)):
            part = group[begin : begin + step]
            answers = _pass(given[part[0][0]], [asked for _, asked in part])
            found |= {place: answer for (place, _), answer in zip(part, answers, strict=False)}
    for place, (adapter, batch) in enumerate(pairs):
        if place not in found:
            found[place] = adapter.predict(batch)
    return [found[place] for place in range(len(given))]


def _look(pairs: Sequence[tuple[Adapter, Inputs]]) -> list[_Look | None]:
    """Batches as their adapters take them, and how their samples look, found for all of one shape
    at once; None for adapters that look back, or divide what they are given.
    """
    looks: list[_Look | None] = []
    alike: dict[Any, list[int]] = {}
    for place, (adapter, batch) in enumerate(pairs):
        alone = adapter._ranks is not None or adapter.window or adapter.recipe.chunk
        if alone or not isinstance(batch, Tensor):
            looks.append(None)
            continue
        inputs = adapter._laid_out(check_inputs(batch))
        assert isinstance(inputs, Tensor)
        looks.append(_Look(inputs))
        if adapter.recipe.domains is not None:
            form = (inputs.shape, inputs.dtype, inputs.device)
            alike.setdefault(form, []).append(place)
    for places in alike.values():
        own = [look for place in places if (look := looks[place]) is not None]
        with pairs[places[0]][0]._apart():
            signatures = describe(torch.cat([look.inputs for look in own]))
        if signatures is not None:
            pieces = signatures.split([len(look.inputs) for look in own])
            for place, look, piece in zip(places, own, pieces, strict=True):
                looks[place] = look._replace(signatures=piece)
    return looks


def _ask(adapter: Adapter, look: _Look) -> _Asked | None:
    """What an adapter would pass through its network; None if that is not all of its prediction."""
    with adapter._apart():
        now = adapter._ready(look.inputs)
        if now.domains is not None and look.signatures is not None:
            groups = now.recall(look.signatures)
            if len(groups) > 1:
                return None
            now = now.enter(groups[0].place)
        assert now.bound is not None
        filt, state = now.bound.filter, now.current
        rule, network = filt.prediction, filt._bind(state)[1]
    centered = network if isinstance(network, Centered) else None
    network = network if centered is None else centered.model
    plain = isinstance(rule, MAP) or (isinstance(rule, Moderated) and not rule.over_views)
    if not plain or filt.observation.teacher is not None or not isinstance(network, Network):
        return None
    if not isinstance(network.statistics, (str, Ema)):
        return None
    with adapter._apart():
        carried = network.carried() or ()
    return _Asked(network, centered, carried, rule, state, look.inputs)  # type: ignore[arg-type]


def _pass(adapter: Adapter, group: list[_Asked]) -> list[Prediction]:
    """The predictions of several adapters by one pass; none if the network cannot have it, or a
    number is not finite, of which its own adapter will say more.
    """
    first = group[0]
    varying: dict[str, Any] = {
        "mean": torch.stack([asked.state.belief.mean for asked in group]),
        "inputs": torch.stack([asked.inputs for asked in group]),
        "memory": {
            name: torch.stack([asked.memory[name] for asked in group]) for name in first.memory
        },
        "offsets": {
            name: torch.stack([asked.offsets[name] for asked in group]) for name in first.offsets
        },
        "carried": tuple(
            torch.stack(parts) for parts in zip(*(asked.carried for asked in group), strict=True)
        ),
    }
    covariance = first.state.belief.covariance  # neither rule looks at it
    network = copy.copy(first.network.exact)  # whose norms are plain operations
    network.layout = None  # torch lays out what it folds together

    def predict(own: dict[str, Any]) -> tuple[Tensor, ...]:
        model: PredictiveModel = network
        if own["carried"]:
            model = network.carrying(*own["carried"])
        if first.centered is not None:
            model = replace(first.centered, model=model, **own["offsets"])
        belief = unchecked(Belief, mean=own["mean"], covariance=covariance)
        randomness = Randomness(0, 0, own["mean"].device)
        query = Query(model, own["inputs"], randomness, memory=own["memory"])
        answer = first.rule(belief, query)
        return answer.log_probabilities, answer.logit_variance, answer.plain_confidence

    with adapter._apart():
        try:
            found = torch.func.vmap(predict)(varying)
        except RuntimeError:
            return []
        if not bool(found[0].isfinite().all()):
            return []
    return [
        Prediction(logs, variance, plain=plain)
        for logs, variance, plain in zip(*found, strict=True)
    ]

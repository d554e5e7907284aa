"""The front door: ``adapter = driftfilter.adapt(model, "eata")``, then ``adapter(x)`` where ``model(x)`` stood.

The user's module is never changed. An adapter is a module without parameters of its own; what it has learned is a filter
state, a value that is replaced whole at the end of a step, so that predictions in other threads see only whole states.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

import driftfilter.presets as presets
from driftfilter.belief import Belief
from driftfilter.checkpoint import from_tensors, moved, to_tensors
from driftfilter.checks import require, require_count
from driftfilter.filtering import Filter, FilterState, StepInfo
from driftfilter.inference import GradientStep
from driftfilter.initialization import check, initialize, wants_example
from driftfilter.inputs import Inputs, batch_size, checked, each, joined, samples, split
from driftfilter.prediction import Prediction
from driftfilter.recipe import Recipe
from driftfilter.source import Laplace, PointMass, SourceData
from driftfilter.twins import twin


def adapt(model: nn.Module, recipe: str | Recipe = "opgd_diag", **options: Any) -> Adapter:
    """A module that takes the place of ``model`` and adapts to the unlabeled inputs it sees.

    ``recipe`` is the name of a preset or a Recipe. Options of the adapter: ``data`` (source inputs, with labels or without,
    for recipes with a source posterior), ``output`` (picks the logits out of what the model returns), ``seed``,
    ``update_every`` and ``window``. Any other option is one of the preset's, such as ``lr``.

    >>> import torch, driftfilter as df
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> adapter = df.adapt(model.eval(), "tent", lr=0.01)
    >>> adapter(torch.randn(16, 4)).shape  # log-probabilities
    torch.Size([16, 3])
    """
    own = {name: options.pop(name) for name in ("data", "output", "seed", "update_every", "window") if name in options}
    if isinstance(recipe, str):
        recipe = presets.get(recipe, **options)
    else:
        require(not options, "adapt", f"options {list(options)}", "given in the recipe where it is not a preset's name")
    return Adapter(model, recipe, **own)


class _Bound(NamedTuple):
    """A filter on the model as it was when it was read, and the state to start from."""

    module: nn.Module  # a frozen twin, for whose sake the user's tensors are kept alive
    filter: Filter
    start: FilterState
    final: bool  # whether a batch could tell nothing more about the parameters


@final
class Adapter(nn.Module):
    """A classifier that adapts while it predicts; see ``adapt``.

    ``update_every`` m: predict every batch at once, adapt on every m-th one to all samples since the last time.
    ``window`` w: adapt to, and take batch statistics over, the last w samples, for streams of single samples.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        data: SourceData | Tensor | tuple[Tensor, Tensor] | None = None,
        output: Callable[[Any], Tensor] | None = None,
        seed: int = 0,
        update_every: int = 1,
        window: int = 0,
    ) -> None:
        super().__init__()
        require(isinstance(model, nn.Module), "adapt: model", type(model).__name__, "a torch module")
        require(isinstance(recipe, Recipe), "adapt: recipe", recipe, "the name of a preset or a Recipe")
        require_count("adapt: update_every", update_every, 1)
        require_count("adapt: window", window, 0)
        require(output is None or callable(output), "adapt: output", output, "a function of what the model returns")
        check(model, recipe.parameters)
        self.recipe = _possible(recipe, data is not None)
        self.update_every, self.window, self.seed = update_every, window, seed
        self._data, self._output = _as_source_data(data), output
        self._model = [model]  # in a list, or it would become a part of this module, and its parameters ours
        self._bound: _Bound | None = None
        self._state: FilterState | None = None
        self._found: Mapping[str, Tensor] = {}  # what the model has taken from the first batch
        self._recent: Inputs | None = None  # samples seen lately, for a window or until the next update
        self._calls = 0
        self._lock = threading.RLock()  # of updates; predictions need none
        self.last_info: StepInfo | None = None

    # What users call

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Adapt to a batch and predict it: log-probabilities [n, k], which are valid logits too."""
        inputs = checked(_as_inputs(args, kwargs))
        with self._lock:
            pieces = split(inputs, self.recipe.chunk) if self.recipe.chunk else [inputs]
            state, recent, calls, infos = self._start(inputs), self._recent, self._calls, [self.last_info]
            outputs = []
            for piece in pieces:
                calls += 1
                seen, recent = self._seen(piece, recent)
                state, prediction, info = self._step(state, piece, seen, calls % self.update_every == 0)
                infos.append(info or infos[-1])
                if calls % self.update_every == 0 and not self.window:
                    recent = None
                outputs.append(prediction.log_probabilities)
            self._state, self._recent, self._calls, self.last_info = state, recent, calls, infos[-1]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def predict(self, *args: Any, **kwargs: Any) -> Prediction:
        """Predict a batch with the belief as it stands; changes nothing, and may run while another thread updates."""
        inputs = checked(_as_inputs(args, kwargs))
        state = self._start(inputs)
        return self._predicted(state, inputs, self._seen(inputs, self._recent)[0] if self.window else inputs)

    def update(self, *args: Any, **kwargs: Any) -> StepInfo:
        """Adapt to a batch now, without predicting it."""
        inputs = checked(_as_inputs(args, kwargs))
        with self._lock:
            state = self._start(inputs)
            seen, recent = self._seen(inputs, self._recent)
            state, info = self._filter.update(state, seen)
            self._state, self._recent, self.last_info = state, recent if self.window else None, info
        return info

    def reset(self) -> None:
        """Back to the source, as if no batch had come."""
        with self._lock:
            self._state, self._recent, self._calls, self.last_info = None, None, 0, None

    @property
    def state(self) -> FilterState:
        """All that has been learned; an immutable value."""
        return self._start(None)

    @property
    def belief(self) -> Belief:
        """The belief over the adapted parameters."""
        return self.state.belief

    def extra_repr(self) -> str:
        return f"{type(self._model[0]).__name__}, {self.recipe}"

    # The steps

    def _step(
        self, state: FilterState, inputs: Inputs, seen: Inputs, adapting: bool
    ) -> tuple[FilterState, Prediction, StepInfo | None]:
        if not adapting:
            return state, self._predicted(state, inputs, seen if self.window else inputs), None
        state, prediction, info = self._filter.step(state, seen)
        return state, _last(prediction, batch_size(inputs)), info

    def _predicted(self, state: FilterState, inputs: Inputs, seen: Inputs) -> Prediction:
        return _last(self._filter.predict(state, seen), batch_size(inputs))

    def _seen(self, inputs: Inputs, recent: Inputs | None) -> tuple[Inputs, Inputs | None]:
        """What an update sees, this batch last, and what of it to keep."""
        if not self.window and self.update_every == 1:
            return inputs, None
        together = inputs if recent is None else joined([recent, inputs])
        if not self.window:
            return together, together
        total, wanted = batch_size(together), max(self.window, batch_size(inputs))
        kept = samples(together, total - wanted, total) if total > wanted else together
        return kept, kept

    # Binding to the model

    @property
    def _filter(self) -> Filter:
        assert self._bound is not None
        return self._bound.filter

    def _start(self, example: Inputs | None) -> FilterState:
        """The state now; the model is read on first use, and again where the user has moved it since."""
        if not self._is_bound(example):
            with self._lock:
                if not self._is_bound(example):
                    self._bind(example)
        assert self._bound is not None
        state = self._state
        return self._bound.start if state is None else state

    def _is_bound(self, example: Inputs | None) -> bool:
        bound = self._bound
        if bound is None or (example is not None and not bound.final):
            return False
        return _same_place(bound.module, self._model[0])

    def _bind(self, example: Inputs | None) -> None:
        recipe, frozen = self.recipe, twin(self._model[0])
        start = initialize(frozen, recipe.parameters, recipe.statistics, self._output, example, self._found)
        model, mean, self._found = start
        filt = recipe.filter(model)
        with torch.inference_mode(False):
            first = filt.init(recipe.source(model, mean, self._data), self.seed)
        if self._state is not None:
            self._state = moved(self._state, lambda tensor: tensor.to(mean.device))
        final = example is not None or not wants_example(recipe.parameters)
        self._bound = _Bound(frozen, filt, first, final)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Adapter:
        """``to``, ``cuda``, ``double``: the adapter takes a copy of the model along; the user's stays where it is."""
        with self._lock:
            state = self.state
            self._model = [twin(self._model[0])._apply(fn)]
            self._bound = None
            self._state = None
            fresh = self.state  # binds to the copy
            dtype = fresh.belief.mean.dtype
            self._state = moved(state, lambda tensor: fn(tensor).to(dtype))
            self._recent = None if self._recent is None else each(self._recent, fn)
        return self

    # Saving

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, tensor in to_tensors(self.state).items():
            destination[prefix + name] = tensor.detach()
        destination[f"{prefix}calls"] = torch.tensor(self._calls)
        others = {**_named(self._recent), **{_MODEL + name: tensor for name, tensor in self._found.items()}}
        for name, tensor in others.items():
            destination[prefix + name] = tensor.detach()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        with self._lock:
            kept = {name: value for name, value in own.items() if not name.startswith((_RECENT, _MODEL)) and name != "calls"}
            state = from_tensors(kept, self._start(None))
            calls = int(own.get("calls", torch.tensor(0)))
            self._found = {name.removeprefix(_MODEL): value for name, value in own.items() if name.startswith(_MODEL)}
            self._bound = None if self._found else self._bound
            self._state, self._recent, self._calls = state, _unnamed(own), calls

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock())


_RECENT, _MODEL = "recent.", "model."  # in a checkpoint: recent samples, and buffers of the model


def _named(recent: Inputs | None) -> dict[str, Tensor]:
    """Recent samples by name, for a checkpoint."""
    if recent is None:
        return {}
    if isinstance(recent, Tensor):
        return {f"{_RECENT}tensor": recent}
    items = recent.items() if isinstance(recent, Mapping) else ((f"[{at}]", part) for at, part in enumerate(recent))
    return {f"{_RECENT}{name}": part for name, part in items if isinstance(part, Tensor)}


def _unnamed(tensors: Mapping[str, Tensor]) -> Inputs | None:
    recent = {name.removeprefix(_RECENT): value for name, value in tensors.items() if name.startswith(_RECENT)}
    if not recent or "tensor" in recent:
        return recent.get("tensor")
    return tuple(recent.values()) if all(name.startswith("[") for name in recent) else recent


def _as_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """What the model is to be called with, from what the adapter was called with."""
    require(
        not (args and kwargs), "adapter", f"{len(args)} arguments and {list(kwargs)}", "called by place or by name, not both"
    )
    return kwargs or (args[0] if len(args) == 1 else args)


def _as_source_data(data: SourceData | Tensor | tuple[Tensor, Tensor] | None) -> SourceData | None:
    if data is None or isinstance(data, SourceData):
        return data
    return SourceData(*data) if isinstance(data, tuple) else SourceData(data)


def _possible(recipe: Recipe, data: bool) -> Recipe:
    """The recipe, or the nearest one where there are no source data for its posterior."""
    if data or not isinstance(recipe.source, Laplace):
        return recipe
    anchored = isinstance(recipe.inference, GradientStep)
    require(anchored, "adapt: data", None, f"source inputs, which {recipe.source} needs")
    warnings.warn(
        "no source data (adapt: data=...): the source posterior that anchors the parameters is left out", stacklevel=5
    )
    return replace(recipe, source=PointMass(), inference=replace(recipe.inference, anchor=0.0))


def _same_place(ours: nn.Module, theirs: nn.Module) -> bool:
    """Whether the user's tensors are still the ones that were read."""
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return all(one.data_ptr() == other.data_ptr() and one.device == other.device for one, other in pairs)


def _last(prediction: Prediction, samples: int) -> Prediction:
    if len(prediction.log_probabilities) == samples:
        return prediction
    return Prediction(prediction.log_probabilities[-samples:], prediction.logit_variance[-samples:])

"""The filter of an adapter on the user's model, and whether it is still the filter of that model.

A model is read when it is first needed, and again if the user has moved it since, or written to
it before anything was learned. Nothing is changed in it: the filter stands on a twin.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from operator import is_
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from typing_extensions import Self

from driftfilter.adapter.speed import SpeedOptions
from driftfilter.base.checks import require, warn
from driftfilter.base.inputs import Inputs, each, is_table
from driftfilter.base.sharding import among
from driftfilter.base.tensors import map_tensors
from driftfilter.distributed.stream import shard_model
from driftfilter.filtering import Filter, FilterState, StepInfo
from driftfilter.inference.accuracy import ENOUGH, Opinions, SourceCalibration, confidence
from driftfilter.inference.optimizers import GradientStep
from driftfilter.inference.prediction import SMOOTHING, Prediction
from driftfilter.inference.smoothed_labels import unsmooth
from driftfilter.model.losses import Sum, as_loss
from driftfilter.model.predictive import PredictiveModel
from driftfilter.networks.alignment import MOMENTS, align, compare
from driftfilter.networks.initialization import find_wanted, initialize
from driftfilter.networks.network import Network
from driftfilter.networks.shared_copy import twin
from driftfilter.networks.step_graphs import Measure, StepGraphs
from driftfilter.recipe import Recipe
from driftfilter.source.given import Given
from driftfilter.source.posterior import Laplace, PointMass, SourceData


def fit_recipe(recipe: Recipe, data: SourceData | None) -> Recipe:
    """The recipe, or the nearest one if there are no source data for its posterior or its loss."""
    require(
        data is not None or not recipe.measures_source,
        "adapt: data",
        None,
        "source inputs, of which Recipe.align (norms='aligned') or Ema(baseline='data') "
        "(norms='measured') takes the statistics",
    )
    require(
        not (recipe.align and isinstance(recipe.source, Given)),
        "Recipe.source",
        recipe.source,
        "another one with Recipe.align, which adapts other parameters than the model's (or give "
        "norms='other')",
    )
    return recipe if data is not None else _without_anchor(_without_source_terms(recipe))


def _without_anchor(recipe: Recipe) -> Recipe:
    if not isinstance(recipe.source, Laplace):
        return recipe
    require(
        isinstance(recipe.inference, GradientStep),
        "adapt: data",
        None,
        f"source inputs, which {recipe.source} needs",
    )
    warn(
        "no source data (adapt: data=...): the source posterior that anchors the parameters is "
        "left out"
    )
    return replace(recipe, source=PointMass(), inference=replace(recipe.inference, anchor=0.0))


def _without_source_terms(recipe: Recipe) -> Recipe:
    loss = as_loss("Recipe.observation.loss", recipe.observation.loss)
    if not loss.needs_source:
        return recipe
    pairs = zip(loss.terms, loss.coefficients, strict=True) if isinstance(loss, Sum) else ()
    kept = [(term, coefficient) for term, coefficient in pairs if not term.needs_source]
    require(len(kept) > 0, "adapt: data", None, f"source inputs, which {loss} needs")
    assert isinstance(loss, Sum)
    names = [type(term).__name__ for term in loss.terms if term.needs_source]
    warn(f"no source data (adapt: data=...): {' and '.join(names)} are left out of the loss")
    terms, coefficients = zip(*kept, strict=True)
    rest = replace(loss, terms=terms, coefficients=coefficients)
    return replace(recipe, observation=replace(recipe.observation, loss=rest))


class Links(NamedTuple):
    """The tree of a module as plain references: walking it by torch's own methods takes as long as
    a small network.
    """

    tables: tuple[dict[str, Any], ...]  # of parameters, buffers and modules
    names: tuple[str, ...]
    values: tuple[Any, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """What every module has under every name now."""
        found = [
            (table, name, value)
            for module in model.modules()
            for table in (module._parameters, module._buffers, module._modules)
            for name, value in table.items()
        ]
        tables, names, values = zip(*found, strict=True) if found else ((), (), ())
        return cls(tables, names, values)

    def hold(self) -> bool:
        """Whether it still has all of it."""
        return all(map(is_, map(dict.get, self.tables, self.names), self.values))


class ModelSnapshot(NamedTuple):
    """A model, and all by which a change of it is noticed."""

    model: nn.Module  # the user's, or the copy that an adapter takes along
    links: Links  # its tree: what every module has under every name
    owned: tuple[Tensor, ...]  # its parameters and buffers
    values: tuple[
        Tensor, ...
    ]  # theirs, kept so that no other tensor can take their place in memory
    places: list[int]  # where these are
    versions: list[int]  # how often they had been written to

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """The model as it is now."""
        owned = (*model.parameters(), *model.buffers())
        values = tuple(tensor.detach() for tensor in owned)
        return cls(model, Links.of(model), owned, values, _places(values), _versions(values))

    def holds(self, values: bool) -> bool:
        """Whether the model's tensors are where they were and, if ``values`` matter, have not been
        written to since.
        """
        return (
            self.links.hold()
            and _places(self.owned) == self.places
            and (not values or self.versions == _versions(self.owned))
        )


class BoundFilter(NamedTuple):
    """A filter on the model as it was when it was read, and the state to start from."""

    filter: Filter
    by_source: Filter  # the same under the source's own batch-norm statistics
    start: FilterState
    found: Mapping[str, Tensor]  # what batches and source data have told about the model
    final: bool  # whether a batch could tell nothing more
    copied: bool  # whether some weights are copies, which do not see what is written to the model
    read: ModelSnapshot
    refused: Mapping[str, str]  # measures for speed that the model has shown not to take -> why
    recipe: Recipe
    # How sure the source is on data of its own, and how right if they have labels; None without.
    calibration: SourceCalibration | None = None
    graphs: StepGraphs | None = None  # whole steps as CUDA graphs

    def begin(self, state: FilterState, inputs: Inputs, measure: Measure | None) -> None:
        """Start a step that will most likely be asked for, if that takes no time here."""
        if self.graphs is not None:
            self.graphs.begin(state, inputs, measure)

    def step(
        self, state: FilterState, inputs: Inputs, measure: Measure | None
    ) -> tuple[FilterState, Prediction, StepInfo]:
        """``Filter.step``; somebody may want to ``measure`` what it leads to."""
        if self.graphs is None:
            return self.filter.step(state, inputs)
        return self.graphs.step(state, inputs, measure)

    def measured(self, info: StepInfo) -> Mapping[str, float] | None:
        """What was measured of a step; None if nobody has looked yet."""
        return None if self.graphs is None else self.graphs.measured(info)

    def predict(self, filt: Filter, state: FilterState, inputs: Inputs) -> Prediction:
        """``Filter.predict`` of one of the two filters."""
        if self.graphs is None:
            return filt.predict(state, inputs)
        return self.graphs.predict(filt, state, inputs)

    def fits(self, model: nn.Module, example: Inputs | None, learned: bool) -> bool:
        """Whether this would be the filter on the model now, be it that something was ``learned``
        from its values or not.
        """
        if model is not self.read.model or (example is not None and not self.final):
            return False
        return self.read.holds(values=self.copied or not learned)

    def is_exact(self) -> bool:
        """Whether the model has not been written to since it was read."""
        return self.read.holds(values=True)

    def taking(self, state: FilterState) -> FilterState:
        """What was learned on the model before, where the model is now."""
        size, new = state.belief.dimension, self.start.belief.dimension
        require(
            size == new,
            "adapt: model",
            f"{new} adapted parameters",
            f"as it was, with {size}, until reset() is called",
        )
        there: FilterState = map_tensors(state, lambda tensor: tensor.to(self.start.belief.mean))
        return there


@final
@dataclass(frozen=True, eq=False)
class FilterOptions:
    """How a model is read: by a recipe, and by those options of ``adapt`` that a filter depends
    on.
    """

    recipe: Recipe
    data: SourceData | None
    output: Callable[[Any], Tensor] | None
    observed: Callable[[Any], Tensor] | None
    seed: int
    speed: SpeedOptions

    def __post_init__(self) -> None:
        for name in ("output", "observed"):
            given = getattr(self, name)
            require(
                given is None or callable(given),
                f"adapt: {name}",
                given,
                "a function of what the model returns",
            )
        require(
            isinstance(self.seed, Integral) and not isinstance(self.seed, bool),
            "adapt: seed",
            self.seed,
            "an integer",
        )
        self.speed.require_use(self.recipe)

    def __call__(
        self, model: nn.Module, found: Mapping[str, Tensor], example: Inputs | None
    ) -> BoundFilter:
        """The filter on the model as it is now, by what earlier batches told about it, and an
        example if there is one.
        """
        recipe, read, speed = self.recipe, ModelSnapshot.of(model), self.speed
        frozen = twin(model, bool(speed.channels_last))
        picks = (self.output, example, found, self.observed)
        measured = self._measure(frozen, found) if recipe.measures_source else {}
        logits, mean, told = initialize(frozen, recipe.parameters, recipe.statistics, *picks)
        refused: dict[str, str] = {}
        if isinstance(logits, Network):
            refused = self._quicken(logits, model)
        final = find_wanted(recipe.parameters) <= set(
            told
        )  # or a batch must tell where the head is
        with among(None):  # source data are the same on all ranks
            shares = None
            if recipe.centering is not None and self.data is not None and final:
                temperature = recipe.centering.temperature
                shares = self.data.mean_prediction(logits, mean, temperature)
            whole = recipe.filter(logits, shares)
            both = (
                shard_model(each) if speed.distributed else each
                for each in (logits, logits.by_source)
            )
            filt, apart = (recipe.filter(each, shares) for each in both)
            source = recipe.source(logits, mean, self.data)
            loss = as_loss("Recipe.observation.loss", recipe.observation.loss)
            known = final or loss.needs_source
            start = whole.init(source, self.seed, self.data if known else None)
            calibration = None
            if final:
                calibration = self._calibrate(logits.by_source, mean, start, apart)
        for reason in speed.find_ignored(start.belief.mean.device):
            warn(reason)
        graphs = None
        if isinstance(logits, Network) and logits.capturing != "no" and StepGraphs.can_record(filt):
            noted = refused if logits.capturing == "if possible" else None
            graphs, logits.capturing = StepGraphs((filt, apart), logits, noted), "no"
        copied = bool(speed.channels_last) or recipe.measures_source
        told_now = {**told, **measured}
        return BoundFilter(
            filt,
            apart,
            start,
            told_now,
            final,
            copied,
            read,
            refused,
            recipe,
            calibration,
            graphs,
        )

    def _quicken(self, network: Network, model: nn.Module) -> dict[str, str]:
        """Turn on what makes passes over a network faster; what it will turn out not to take."""
        layout, graphs, _ = self.speed.measure(model, self.recipe)
        if layout.is_on and self.speed.channels_last is None:
            network.lay_out()
        if graphs.is_on:
            network.capturing = "if possible" if self.speed.cuda_graphs is None else "yes"
        return network.refused

    def _calibrate(
        self, model: PredictiveModel, mean: Tensor, start: FilterState, by_source: Filter
    ) -> SourceCalibration | None:
        """How sure the source is on the first of its data. If they have labels: how right, too, and
        how sure without what smoothed labels have added, as predictions are. If they are a table:
        how they are predicted at the start.
        """
        found: list[Tensor] = []
        said: list[Tensor] = []
        smoothing = start.memory.get(SMOOTHING)
        for given, labels in self.data or ():
            if sum(map(len, found)) >= ENOUGH:
                break
            inputs = each(given, lambda part: part.to(mean.device))
            if is_table(inputs):
                said.append(by_source.predict(start, inputs).log_probabilities)
            logs = model(mean, inputs).log_softmax(-1)
            if labels is not None and smoothing is not None:
                logs = unsmooth(logs, smoothing.to(logs))
            told = [confidence(logs).double()]
            if labels is not None:
                told.append((logs.argmax(-1) == labels.to(logs.device)).double())
            found.append(torch.stack(told, 1))
        home = Opinions.of(torch.cat(said), table=True).home if said else None
        corrected = smoothing is not None
        return SourceCalibration.of(torch.cat(found), home, corrected) if found else None

    def _measure(self, frozen: nn.Module, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Put statistics behind the layers of a twin, or beside those of its batch norms: of the
        source data, unless a checkpoint has brought them.
        """
        assert self.data is not None
        inputs = (inputs for inputs, _ in self.data)
        put = align if self.recipe.align else compare
        with among(None):
            return {MOMENTS: put(frozen, found.get(MOMENTS), inputs)}


def _places(tensors: Iterable[Tensor]) -> list[int]:
    """Addresses, which no two devices share: before each step, so it must not take long."""
    return list(map(Tensor.data_ptr, tensors))


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]

"""The filter of an adapter on the user's model, and whether it is still the filter of that model.

A model is read when it is first needed, and again if the user has moved it since, or written to
it before anything was learned. Nothing is changed in it: the filter stands on a twin.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, NamedTuple, Self, final

import torch
from torch import Tensor, nn

from driftfilter.base.checks import check_fields, require, warn
from driftfilter.base.inputs import Inputs, each
from driftfilter.base.sharding import among
from driftfilter.base.tensors import map_tensors
from driftfilter.distributed.stream import shard_model
from driftfilter.filtering import Filter, FilterState
from driftfilter.inference.accuracy import ENOUGH, SourceCalibration, confidence
from driftfilter.inference.optimizers import GradientStep
from driftfilter.model.losses import Sum, as_loss
from driftfilter.model.predictive import PredictiveModel
from driftfilter.networks.alignment import MOMENTS, align
from driftfilter.networks.autocast import AUTOCAST
from driftfilter.networks.initialization import find_wanted, initialize
from driftfilter.networks.network import Network
from driftfilter.networks.norm_rules import NormRule
from driftfilter.networks.parameters import Head
from driftfilter.networks.prototypes import Prototypes
from driftfilter.networks.shared_copy import twin
from driftfilter.recipe import Recipe
from driftfilter.source.given import Given
from driftfilter.source.posterior import Laplace, PointMass, SourceData


def fit_recipe(recipe: Recipe, data: SourceData | None) -> Recipe:
    """The recipe, or the nearest one if there are no source data for its posterior or its loss."""
    require(
        data is not None or not recipe.align,
        "adapt: data",
        None,
        "source inputs, of which Recipe.align (norms='aligned') takes the statistics",
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
    """The tree of a module: what every module has under every name."""

    tables: tuple[dict[str, Any], ...]
    names: tuple[str, ...]
    values: tuple[Any, ...]


class ModelSnapshot(NamedTuple):
    """A model, and all by which a change of it is noticed."""

    model: nn.Module  # the user's, or the copy that an adapter takes along
    links: Links
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
        return cls(model, _links(model), owned, values, _places(values), _versions(values))

    def holds(self, values: bool) -> bool:
        """Whether the model's tensors are where they were and, if ``values`` matter, have not been
        written to since.
        """
        return (
            all(
                map(
                    operator.is_,
                    map(dict.get, self.links.tables, self.links.names),
                    self.links.values,
                )
            )
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
    recipe: Recipe
    # How right and how sure the source is on data of its own with labels; None without them.
    calibration: SourceCalibration | None = None

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
    autocast: torch.dtype | None
    channels_last: bool
    cuda_graphs: bool
    distributed: bool  # other processes have the rest of each batch

    def __post_init__(self) -> None:
        check_fields(self, "adapt: ")
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
        require(
            self.autocast in (None, torch.bfloat16, torch.float16),
            "adapt: autocast",
            self.autocast,
            "torch.bfloat16, torch.float16 or None",
        )
        require(
            not (self.cuda_graphs and self.distributed),
            "adapt: cuda_graphs",
            self.cuda_graphs,
            "False if a stream is distributed",
        )
        if self.cuda_graphs and isinstance(self.recipe.parameters, (Head, Prototypes)):
            warn(
                "adapt: cuda_graphs is ignored: no pass over the network is differentiated "
                "if its head alone is adapted"
            )

        if self.cuda_graphs and isinstance(self.recipe.statistics, NormRule):
            warn("adapt: cuda_graphs is ignored: batch norms have statistics of your own")

    def __call__(
        self, model: nn.Module, found: Mapping[str, Tensor], example: Inputs | None
    ) -> BoundFilter:
        """The filter on the model as it is now, by what earlier batches told about it, and an
        example if there is one.
        """
        recipe, read = self.recipe, ModelSnapshot.of(model)
        frozen = twin(model, self.channels_last)
        picks = (self.output, example, found, self.observed)
        aligned = self._align(frozen, found) if recipe.align else {}
        logits, mean, told = initialize(frozen, recipe.parameters, recipe.statistics, *picks)
        if isinstance(logits, Network):
            logits.capturing = self.cuda_graphs
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
                shard_model(each) if self.distributed else each
                for each in (logits, logits.by_source)
            )
            filt, apart = (recipe.filter(each, shares) for each in both)
            start = whole.init(recipe.source(logits, mean, self.data), self.seed, self.data)
            calibration = None
            if final:
                calibration = self._calibrate(logits.by_source, mean)
        for reason in self.find_ignored(start.belief.mean.device):
            warn(reason)
        copied = self.channels_last or recipe.align
        known = {**told, **aligned}
        return BoundFilter(filt, apart, start, known, final, copied, read, recipe, calibration)

    def _calibrate(self, model: PredictiveModel, mean: Tensor) -> SourceCalibration | None:
        """How right and how sure the source is on the first of its data that have labels."""
        found: list[Tensor] = []
        for inputs, labels in self.data or ():
            if labels is None or sum(map(len, found)) >= ENOUGH:
                break
            logs = model(mean, each(inputs, lambda part: part.to(mean.device))).log_softmax(-1)
            right = logs.argmax(-1) == labels.to(logs.device)
            found.append(torch.stack((right.double(), confidence(logs).double()), 1))
        return SourceCalibration.of(torch.cat(found)) if found else None

    def _align(self, frozen: nn.Module, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Put statistics behind the layers of a twin: those of the source data, unless a
        checkpoint has brought them.
        """
        assert self.data is not None
        inputs = (inputs for inputs, _ in self.data)
        with among(None):
            return {MOMENTS: align(frozen, found.get(MOMENTS), inputs)}

    def find_ignored(self, device: torch.device) -> list[str]:
        """Options that do nothing for a model there; a script that runs without a GPU too is not
        told so on such a machine.
        """
        found = []
        if self.cuda_graphs and device.type != "cuda" and torch.cuda.is_available():
            found.append(
                f"adapt: cuda_graphs is ignored: the model is on {device.type}, though there is "
                "a GPU"
            )
        if self.autocast is not None and device.type not in AUTOCAST:
            found.append(
                f"adapt: autocast is ignored: the model is on {device.type}, not on one of "
                f"{AUTOCAST}"
            )
        return found


def _links(model: nn.Module) -> Links:
    """The tree of a module as plain references: walking it by torch's own methods takes as long as
    a small network.
    """
    found = [
        (table, name, value)
        for module in model.modules()
        for table in (module._parameters, module._buffers, module._modules)
        for name, value in table.items()
    ]
    return Links(*map(tuple, zip(*found, strict=True))) if found else Links((), (), ())


def _places(tensors: Iterable[Tensor]) -> list[int]:
    """Addresses, which no two devices share: before each step, so it must not take long."""
    return list(map(Tensor.data_ptr, tensors))


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]

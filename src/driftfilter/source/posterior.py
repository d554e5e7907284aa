"""p(θ_S given D_S), the source posterior: what source data say about the parameters.

A source takes a model and its parameters, and perhaps data, and gives the belief before the stream.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple, Protocol, final, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import Self

from driftfilter.base.checks import (
    LATE,
    Checked,
    Count,
    NotNegative,
    Positive,
    PositiveCount,
    Role,
    register,
    require,
    require_number,
    require_shape,
    unchecked,
)
from driftfilter.base.inputs import Inputs, batch_size, each, is_table
from driftfilter.base.randomness import Purpose, Randomness
from driftfilter.gaussian.belief import Belief
from driftfilter.gaussian.covariance import Covariance
from driftfilter.gaussian.diagonal import Diagonal
from driftfilter.gaussian.lowrank import exact_form
from driftfilter.gaussian.structures import STRUCTURES
from driftfilter.inference.curvature import Curvature, GaussNewton, Hessian, LogitMetric
from driftfilter.model.labelled import Labeling, label_energy
from driftfilter.model.observation import Energy, Evaluation
from driftfilter.model.predictive import LogitFunction, PredictiveModel, lift
from driftfilter.source.marginal_likelihood import marginal_precision, reweight

BUDGET = 1 << 27  # numbers in a factor of the curvature


@final
@dataclass(frozen=True, eq=False)
class SourceData(Checked):
    """Source samples in batches, with class indices or without.

    ``inputs``: one tensor [N, ...], cut into batches of ``batch_size`` with its ``labels`` [N]; or
    batches one after the other, such as a data loader gives: a tensor [n, ...], a mapping of what
    the model takes by name, or a pair of one and its labels. They are read again if the model
    has changed: give a list or a loader, not an iterator.

    >>> import torch
    >>> [len(inputs) for inputs, _ in SourceData(torch.zeros(5, 3), batch_size=2)]
    [2, 2, 1]
    """

    inputs: Tensor | Iterable[Inputs | tuple[Inputs, Tensor]]
    labels: Tensor | None = None
    batch_size: PositiveCount = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            isinstance(self.inputs, Iterable)
            and not (isinstance(self.inputs, Tensor) and self.inputs.dim() == 0),
            "SourceData.inputs",
            type(self.inputs).__name__,
            "a tensor [N, ...] or an iterable of batches",
        )
        if self.labels is not None:
            require(
                isinstance(self.inputs, Tensor) and isinstance(self.labels, Tensor),
                "SourceData.labels",
                type(self.labels).__name__,
                "a tensor beside a tensor, or in pairs with batches",
            )
            assert isinstance(self.inputs, Tensor)
            count = len(self.inputs)
            require_shape("SourceData.labels", self.labels, f"[{count}]", count)

    @classmethod
    def of(cls, data: Self | Tensor | tuple[Tensor, Tensor] | None) -> Self | None:
        """Inputs [N, ...], alone or with their labels [N], as source data; None stays None."""
        if data is None or isinstance(data, SourceData):
            return data
        return cls(*data) if isinstance(data, tuple) else cls(data)

    @property
    def is_table(self) -> bool:
        """Whether samples are rows of numbers, by the first batch."""
        first = next(iter(self), (None, None))[0]
        return is_table(first)

    def mean_prediction(self, model: PredictiveModel, theta: Tensor, temperature: float) -> Tensor:
        """The mean of softmax(f / T) over all samples [k], with one sample of equal shares.

        T = ``temperature`` · σ, as in ``Centering``: shares are compared at one temperature.
        """
        own = (each(inputs, lambda part: part.to(theta.device)) for inputs, _ in self)
        found = [model(theta, inputs) for inputs in own]
        require(len(found) > 0, "adapt: data", "no samples", "one sample or more")
        logits = torch.cat(found)
        deviations = logits - logits.mean(-1, keepdim=True)
        sigma = deviations.square().mean().sqrt().clamp(torch.finfo(logits.dtype).tiny ** 0.5, 4.0)
        together = (deviations / (temperature * sigma)).softmax(-1)
        return (together.sum(0) + 1 / together.shape[1]) / (len(together) + 1)

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor | None]]:
        if isinstance(self.inputs, Tensor):
            pieces = self.inputs.split(self.batch_size)
            labels = (
                [None] * len(pieces) if self.labels is None else self.labels.split(self.batch_size)
            )
            yield from zip(pieces, labels, strict=True)
            return
        for batch in self.inputs:
            pair = (batch, None) if isinstance(batch, (Tensor, Mapping)) else batch
            # A loader without labels gives lists of one.
            require(
                isinstance(pair, (tuple, list)) and len(pair) in (1, 2),
                "SourceData.inputs",
                type(batch).__name__,
                "batches [n, ...] or pairs of inputs and labels",
            )
            yield pair[0], pair[1] if len(pair) == 2 else None


@runtime_checkable
class Source(Protocol):
    """A belief over the parameters before the stream."""

    def __call__(
        self, model: PredictiveModel, mean: Tensor, data: SourceData | None = None
    ) -> Belief:
        """N(mean, Σ_S) for the source parameters [d], with a Σ_S that may use source data."""


@final
@dataclass(frozen=True)
class PointMass:
    """N(θ_S, 0): the parameters are known; a transition with noise, or a reset, spreads them."""

    def __call__(
        self, model: PredictiveModel, mean: Tensor, data: SourceData | None = None
    ) -> Belief:
        return Belief(mean, unchecked(Diagonal, values=torch.zeros_like(mean)))


@final
@dataclass(frozen=True)
class Gaussian(Checked):
    """N(θ_S, σ² I), in the structure that the filter is to carry; ``rank`` is that of "low_rank".

    ``structure`` is a name in the table ``driftfilter.gaussian.structures``. The variance of layer
    l of L, in the order in which the module has them, l = 0, 1, …, is

        σ² s_l² (1 - l/L)^a

    with a = ``taper``: the deeper a layer, the less a shift of the inputs is a reason to move it.
    ``relative``: s_l is the size of the layer's own parameters, the largest root mean square of
    one of its tensors (at least a tenth of the root mean square over layers), so that σ is a
    relative change; otherwise s_l = 1. Both are for a network, "diagonal" and "low_rank".
    """

    variance: Positive = 0.01
    structure: str = "diagonal"
    rank: Count = 10
    taper: NotNegative = 0.0
    relative: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_structure("Gaussian", self.structure)
        require(
            self.structure in ("diagonal", "low_rank") or not (self.taper or self.relative),
            "Gaussian.structure",
            self.structure,
            "'diagonal' or 'low_rank' with a taper or a relative variance",
        )

    def __call__(
        self, model: PredictiveModel, mean: Tensor, data: SourceData | None = None
    ) -> Belief:
        structure = STRUCTURES[self.structure]
        if not (self.taper or self.relative):
            alike = structure.isotropic_like(self.variance, mean, self.rank, model.shapes)
            return Belief(mean, alike)
        layers = _Layers.of(model)
        variances = self.variance * layers.depths().to(mean).pow(self.taper)
        if self.relative:
            variances = variances * layers.squares(mean)
        widest = float(variances.max())
        covariance = structure.isotropic_like(widest, mean, self.rank, model.shapes)
        return Belief(
            mean, covariance.inform(layers.spread((1 / variances - 1 / widest).clamp_min(0)))
        )


class _Layers(NamedTuple):
    """The layers with parameters in θ, in the order of the module."""

    places: list[int]  # of each tensor its layer
    sizes: list[int]  # numbers in each tensor

    @classmethod
    def of(cls, model: PredictiveModel) -> Self:
        shapes, missing = model.shapes, "a model without named parameters"
        require(shapes is not None, "Gaussian.taper or relative", missing, "0 and False for it")
        assert shapes is not None
        names = [name.rpartition(".")[0] for name in shapes]
        places = {name: place for place, name in enumerate(dict.fromkeys(names))}
        return cls([places[name] for name in names], [shape.numel() for shape in shapes.values()])

    def depths(self) -> Tensor:
        """1 - l/L of every layer [L]."""
        count = max(self.places) + 1
        return 1 - torch.arange(count, dtype=torch.float64) / count

    def squares(self, mean: Tensor) -> Tensor:
        """s² of every layer [L]."""
        own = torch.stack([piece.square().mean() for piece in mean.split(self.sizes)])
        largest = own.new_zeros(max(self.places) + 1)
        largest = largest.scatter_reduce(0, own.new_tensor(self.places).long(), own, "amax")
        average = largest.mean()
        floor = torch.where(average > 0, average / 100, torch.ones_like(average))
        return torch.maximum(largest, floor)

    def spread(self, values: Tensor) -> Tensor:
        """Values of the layers [L] as values of their parameters [d]."""
        places, sizes = (torch.tensor(part, device=values.device) for part in self)
        return values[places].repeat_interleave(sizes)


def _require_structure(name: str, structure: str) -> None:
    known = isinstance(structure, str) and structure in STRUCTURES
    require(known, f"{name}.structure", structure, f"one of {list(STRUCTURES)}")


def _require_choice(name: str, value: str | float, *words: str) -> None:
    """Raise unless a field is one of the words or a number > 0."""
    if isinstance(value, str):
        require(value in words, name, value, f"a number or one of {list(words)}")
    else:
        require_number(name, value, 0, math.inf, open_low=True)


@final
@dataclass(frozen=True)
class Laplace(Checked):
    """N(θ_S, Λ⁻¹), Λ = λ I + c Σ_i H_i: the curvature of source data at parameters trained already,
    which stay the mean.

    ``curvature`` H_i of the cross-entropy -log p(y_i given x_i, θ), batch by batch, in a structure
    of bounded memory. ``per`` "batch" takes in its place (ḡ_b ḡ_bᵀ), ḡ_b the gradient of the mean
    loss of batch b: with scale="mean" EATA's Fisher F_j = mean over batches of ḡ_bj², whose size
    depends on that of the batches. ``scale``: "sum" is c = 1, the posterior of the data given (the
    paper's); "mean" is c = 1/N for N samples (or batches, if ``per`` is "batch"), EATA's; a
    number M is c = M/N, for N samples that stand for M. ``precision``: λ, or "marginal_likelihood",
    the λ of greatest evidence under the prior N(0, I/λ) (not for "low_rank"). ``labels``: "given";
    "predicted", the most likely class; "drawn" from the model's probabilities with ``seed``, which
    makes the empirical Fisher an estimate of the Fisher information. Gauss–Newton and Hessian do
    not depend on them. "kronecker" needs a Network, and keeps what a Kronecker part can of each
    weight matrix. ``statistics``: the data pass with the batch statistics of the "source", under
    which the parameters were trained to be a mode; or as the "stream" will, with those that the
    model adapts with, as EATA's authors have it. Gauss–Newton then takes k passes for each sample.
    """

    structure: str = "diagonal"
    rank: Count = 10
    curvature: Annotated[Curvature, Role("curvature", "GaussNewton()")] = field(
        default_factory=GaussNewton
    )
    per: Literal["sample", "batch"] = "sample"
    scale: Literal["sum", "mean"] | float = "sum"
    precision: Literal["marginal_likelihood"] | float = 1.0
    labels: Literal["given", "predicted", "drawn"] = "given"
    seed: Count = 0
    statistics: Literal["source", "stream"] = field(default="source", metadata=LATE)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_structure("Laplace", self.structure)
        # Centring is a matter of one batch: its sum would depend on how the data were cut.
        require(
            self.curvature.minimum == 1,
            "Laplace.curvature",
            self.curvature,
            "that of single samples, such as EmpiricalFisher(centered=False)",
        )
        _require_choice("Laplace.scale", self.scale, "sum", "mean")
        _require_choice("Laplace.precision", self.precision, "marginal_likelihood")
        require(
            STRUCTURES[self.structure].has_spectrum or not isinstance(self.precision, str),
            "Laplace.structure",
            self.structure,
            "another one for the marginal likelihood",
        )

    @torch.no_grad()
    def __call__(
        self, model: PredictiveModel, mean: Tensor, data: SourceData | None = None
    ) -> Belief:
        require(data is not None, "Laplace: data", data, "SourceData(inputs, labels)")
        assert data is not None
        model = model.by_source if self.statistics == "source" else model
        start = 1.0 if isinstance(self.precision, str) else float(self.precision)
        covariance = STRUCTURES[self.structure].isotropic_like(
            1 / start, mean, self.rank, model.shapes
        )
        count = 0
        for step, (inputs, labels) in enumerate(data):
            labeling = self._labeling(labels, Randomness(self.seed, step, mean.device))
            for rows in self._rows(
                label_energy(model, mean, inputs, labeling).evaluation, len(mean)
            ):
                covariance = covariance.condition(rows).truncate()
            count += batch_size(inputs) if self.per == "sample" else 1
        require(count > 0, "Laplace: data", "no batch", "one batch or more")
        # c, for N samples or batches.
        number = 1.0 if isinstance(self.scale, str) else float(self.scale)
        weight = 1.0 if self.scale == "sum" else number / count
        precision = (
            marginal_precision(covariance, start, mean, weight)
            if isinstance(self.precision, str)
            else start
        )
        return Belief(mean, reweight(covariance, start, precision, weight))

    def _rows(self, evaluation: Evaluation, dimension: int) -> Iterator[Tensor]:
        """Factors F [m, d] of bounded memory, whose FᵀF add up to the curvature of a batch."""
        samples = len(evaluation.coefficients)
        if self.per == "batch":
            yield evaluation.gradient()[None] / samples
        elif isinstance(self.curvature, LogitMetric):
            # A row for every sample and class is too many if there are many classes.
            most = max(1, BUDGET // (samples * dimension))
            for roots in self.curvature.roots(evaluation).split(most, -1):
                yield evaluation.factor(roots)
        else:
            yield self.curvature(evaluation)[1]

    def _labeling(self, labels: Tensor | None, randomness: Randomness) -> Labeling:
        indifferent = self.per == "sample" and isinstance(self.curvature, (GaussNewton, Hessian))
        if self.labels == "predicted" or (labels is None and indifferent):
            return lambda logits: logits.argmax(-1)
        if self.labels == "drawn":
            generator = randomness.generator(Purpose.INFERENCE)
            return lambda logits: torch.multinomial(logits.softmax(-1), 1, generator=generator)[
                :, 0
            ]
        require(
            labels is not None,
            "Laplace.labels",
            self.labels,
            "'predicted' or 'drawn' for data without labels",
        )
        return lambda logits: labels  # type: ignore[return-value]  # not None here


@torch.no_grad()
def fit_laplace(
    logits: LogitFunction | PredictiveModel,
    prior: Belief,
    inputs: Tensor,
    labels: Tensor,
    iterations: int = 100,
    statistics: Literal["source", "stream"] = "source",
) -> Belief:
    """Laplace approximation N(θ*, Λ⁻¹): the mode θ* by Newton's method from the prior's mean, Λ the
    Hessian there.

    Λ = Λ_prior + Σ_i J_iᵀ (diag p_i - p_i p_iᵀ) J_i, a *sum* over the source samples (the paper
    calls Λ⁻¹ the Hessian); exact for linear heads, generalised Gauss–Newton for others. ``labels``
    [n] are class indices; the covariance keeps the prior's structure. Batch norms use the
    statistics of the "source", or as in the "stream" those of the model (``Laplace``). Raises if
    the mode is not reached in ``iterations`` steps.
    """
    require(isinstance(prior, Belief), "prior", prior, "a Belief")
    known = statistics in ("source", "stream")
    require(known, "fit_laplace: statistics", statistics, "'source' or 'stream'")
    model = lift(logits)
    model = model.by_source if statistics == "source" else model
    energy = label_energy(model, prior.mean, inputs, lambda _: labels)
    exact = exact_form(prior.covariance)
    mean, evaluation = prior.mean, energy.evaluation
    for _ in range(iterations):
        gradient, factor = Hessian()(evaluation)
        slope = exact.solve(mean - prior.mean) + gradient
        step = exact.condition(factor).apply(slope)
        decrement = (step @ slope).item()  # its squared length in posterior standard deviations
        if decrement <= max(1e-12, 0.1 * torch.finfo(mean.dtype).eps):
            _, factor = Hessian()(energy.at(mean - step))
            return Belief(mean - step, prior.covariance.condition(factor).truncate())
        mean, evaluation = _backtrack(prior.mean, exact, energy, mean, evaluation, step, decrement)
    raise ValueError(
        f"iterations must be enough to reach the mode, got {iterations}: the next Newton step is "
        f"still {decrement**0.5:g} posterior standard deviations long (gradient norm "
        f"{slope.norm().item():g})"
    )


def _backtrack(
    center: Tensor,
    prior: Covariance,
    energy: Energy,
    mean: Tensor,
    evaluation: Evaluation,
    step: Tensor,
    decrement: float,
) -> tuple[Tensor, Evaluation]:
    """The first of μ - step, μ - step/2, … that lowers -log posterior enough (Armijo's rule)."""

    def objective(point: Tensor, at: Evaluation) -> float:
        return (
            at.expansion.value.sum().item()
            + 0.5 * ((point - center) @ prior.solve(point - center)).item()
        )

    before = objective(mean, evaluation)
    rounding = 10 * torch.finfo(mean.dtype).eps * abs(before)
    for halvings in range(40):
        size = 0.5**halvings
        moved = mean - size * step
        after = energy.at(moved)
        if objective(moved, after) <= before - 1e-4 * size * decrement + rounding:
            return moved, after
    raise ValueError(
        "logits must be smooth in theta: no step along the Newton direction lowers the "
        f"objective {before:g}"
    )


register(source=(PointMass, Gaussian, Laplace))

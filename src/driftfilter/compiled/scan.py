"""Whole streams in compiled code: what ``Filter.run`` does with a linear head if numba is
installed.

The compiled step (full.py) is the eager one in closed form. What it cannot take, a step that warns,
raises or needs more care with rounding, it hands back: the eager path takes that step from the same
state, and the scan goes on after it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar, final

import numpy as np
import torch
from torch import Tensor

from driftfilter.base.checks import unchecked
from driftfilter.compiled.plan import (
    Uncovered,
    give_up,
    require_covered,
    require_working,
    translate_rules,
    translate_transition,
)
from driftfilter.compiled.terms import INFORMATION, HeadArrays, MotionArrays, Rules
from driftfilter.filtering import Filter, FilterState, Outputs, StepInfo
from driftfilter.gaussian.belief import Belief
from driftfilter.gaussian.diagonal import Diagonal
from driftfilter.gaussian.full import Full
from driftfilter.inference.prediction import Prediction
from driftfilter.model.losses import Loss
from driftfilter.model.predictive import LinearHead

STEPS = 64  # below which compiled code does not pay for being loaded
WORK = 4_000_000  # multiplications a step above which libraries of linear algebra are faster

T = TypeVar("T")


def why_eager(filt: Filter, state: FilterState, batches: Iterable[Any]) -> str:
    """Why ``filt.run(state, batches)`` would not run in compiled code; empty if it would."""
    try:
        _plan(filt, state, batches)
    except Uncovered as reason:
        return str(reason)
    return ""


def run(
    filt: Filter, state: FilterState, batches: Iterable[Any]
) -> tuple[FilterState, Outputs] | None:
    """Run the stream in compiled code; None if it is not covered."""
    try:
        plan = _plan(filt, state, batches)
    except Uncovered:
        return None
    return _Scan(filt, plan).run(state)


class ScanPlan(NamedTuple):
    """A stream made ready for the compiled step."""

    batches: Any  # as they were given
    features: Tensor  # [samples, D] float64, of all usable batches
    offsets: Any  # [steps + 1] first sample of each batch; a range if all are of one size
    sizes: tuple[int, int]  # of the smallest and the largest batch
    odd: list[int]  # batches that only the eager path can judge, then the number of steps
    rules: Rules
    motion: MotionArrays
    head: HeadArrays
    is_rank_one: bool  # whether all is along x: every batch is one sample


def is_along_x(rules: Rules, motion: MotionArrays, head: HeadArrays, width: int) -> bool:
    """Whether a sample is one logit xᵀμ, whose loss is its own, and the transition no matrix
    product.
    """
    one_logit = head.first == 1 and len(head.read_out) == 0 and motion.vectors.shape[1] == width
    simple = len(motion.matrix) == 0 and motion.factor.shape == (1, 1)
    return one_logit and simple and all(term[0] != INFORMATION for term in rules.terms.tolist())


def _plan(filt: Filter, state: FilterState, batches: Iterable[Any]) -> ScanPlan:
    if not isinstance(batches, (Tensor, list, tuple)):
        raise Uncovered("batches come from an iterator: give one tensor, a list or a tuple")
    count = batches.shape[0] if isinstance(batches, Tensor) and batches.dim() else len(batches)
    if count < STEPS:
        raise Uncovered(f"{count} steps are fewer than {STEPS}")
    if find_spec("numba") is None:
        raise Uncovered("numba is not installed (pip install driftfilter[fast])")
    require_working()
    head = require_head(filt, state)
    kept = translate(filt, state)
    features, offsets, sizes, odd = _gather(batches, head.intercept, state.belief.mean.dtype)
    width, parameters = features.shape[1], state.parameters
    first = head.classes - parameters // width if width else -1
    if first not in (0, 1) or parameters % width:
        raise Uncovered("the features do not fit the belief")
    _require_small(state, sizes[1], head.classes - first)
    own = HeadArrays(first, kept.read_out)
    is_single = sizes == (1, 1) and isinstance(state.belief.covariance, Full)
    is_rank_one = is_single and is_along_x(kept.rules, kept.motion, own, width)
    return ScanPlan(
        batches, features, offsets, sizes, odd, kept.rules, kept.motion, own, is_rank_one
    )


class SourcePlan(NamedTuple):
    """What of a plan depends on the filter and the source only; a stream has one source."""

    source: Belief
    rules: Rules
    motion: MotionArrays
    read_out: Any  # [parameters, d], or [0, 0]
    low: float  # a lower bound of the eigenvalues of the source's covariance, if it is full


def translate(filt: Filter, state: FilterState) -> SourcePlan:
    """The plan of a filter, worked out once for a source."""
    kept: SourcePlan | None = filt.__dict__["_motion"]
    if kept is None or not _is_same(kept.source, state.source):
        source, matrix = state.source, filt.transition.read_out(state.parameters)
        read_out = (
            np.zeros((0, 0)) if matrix is None else np.ascontiguousarray(matrix.double().numpy())
        )
        low = _find_lowest(source.covariance) if isinstance(source.covariance, Full) else 0.0
        kept = SourcePlan(
            source,
            translate_rules(filt),
            translate_transition(filt.transition, source),
            read_out,
            low,
        )
        object.__setattr__(filt, "_motion", kept)
    return kept


def _is_same(one: Belief, other: Belief) -> bool:
    """Whether two states start from one belief, of which each has a mean of its own."""
    return one is other or (
        one.covariance is other.covariance
        and one.mean.dtype == other.mean.dtype
        and torch.equal(one.mean, other.mean)
    )


def find_limits(dtype: torch.dtype) -> tuple[float, float, float]:
    """Rounding error of a number, and the variances between which a kernel in double precision
    decides what is proper.
    """
    numbers = torch.finfo(dtype)
    return numbers.eps, 4 * numbers.tiny, numbers.max / 4


def _find_lowest(covariance: Full) -> float:
    return float(np.linalg.eigvalsh(covariance.dense().numpy())[0])


def require_head(filt: Filter, state: FilterState) -> LinearHead:
    """The linear head of a filter whose belief the compiled step can carry."""
    model, belief = filt.logits, state.belief
    require_covered("model", model)
    assert isinstance(model, LinearHead)
    if model.classes < 2:
        raise Uncovered("the model has one class")
    require_covered("covariance", belief.covariance)
    if type(state.source.covariance) is not type(belief.covariance):
        raise Uncovered("belief and source have covariances of different structure")
    if not belief.mean.is_cpu:
        raise Uncovered(f"the belief is on {belief.mean.device}, not on the CPU")
    return model


def _require_small(state: FilterState, n: int, own: int) -> None:
    d, p = state.belief.dimension, n * own
    work = d * d * p + d * p * p if isinstance(state.belief.covariance, Full) else 4 * d * n
    if work > WORK:
        raise Uncovered(
            f"a step on {n} samples with {d} parameters is large enough for libraries of linear "
            "algebra"
        )


def _gather(
    batches: Any, intercept: bool, dtype: torch.dtype
) -> tuple[Tensor, Any, tuple[int, int], list[int]]:
    """Features of all usable batches [samples, D], the first sample of each [steps + 1], their
    sizes, the batches left out.
    """
    offsets: Any
    if isinstance(batches, Tensor):
        if batches.dim() != 3 or 0 in batches.shape or not _is_plain(batches):
            raise Uncovered(
                "the stream is not a real tensor [steps, n, D] on the CPU, but of shape "
                f"{list(batches.shape)}"
            )
        n = batches.shape[1]
        features, offsets, least, most, odd = (
            batches.flatten(0, 1),
            range(0, len(batches) * n + 1, n),
            n,
            n,
            [],
        )
    else:
        widths = {
            batch.shape[-1] for batch in batches if isinstance(batch, Tensor) and batch.dim() == 2
        }
        if len(widths) != 1:
            raise Uncovered("the batches are not tensors [n, D] of one width")
        (width,) = widths
        fit = [_is_usable(batch, width) for batch in batches]
        odd = [position for position, good in enumerate(fit) if not good]
        sizes = np.array(
            [batch.shape[0] if good else 0 for batch, good in zip(batches, fit, strict=True)]
        )
        good_ones = [batch for batch, good in zip(batches, fit, strict=True) if good]
        if not good_ones:
            raise Uncovered("no batch is a tensor [n, D] on the CPU")
        features = torch.cat([batch.detach().to(dtype) for batch in good_ones])
        offsets, least, most = (
            np.concatenate(([0], np.cumsum(sizes))),
            int(sizes.min()),
            int(sizes.max()),
        )
    if features.dtype != torch.float64 or dtype != torch.float64:
        features = features.to(dtype).double()
    if intercept:
        features = torch.cat((features.new_ones(len(features), 1), features), 1)
    return features.contiguous(), offsets, (least, most), [*odd, len(batches)]


def _is_usable(batch: Any, width: int) -> bool:
    """Whether a batch is a real tensor [n, width] on the CPU; what its numbers are the compiled
    step sees itself.
    """
    return (
        isinstance(batch, Tensor)
        and _is_plain(batch)
        and batch.dim() == 2
        and batch.shape[0] > 0
        and batch.shape[1] == width
    )


def _is_plain(batch: Tensor) -> bool:
    return batch.is_cpu and not batch.is_complex() and batch.layout is torch.strided


@final
class _Scan:
    """One stream under way."""

    def __init__(self, filt: Filter, plan: ScanPlan) -> None:
        self.filter, self.plan, self.classes = filt, plan, filt.logits.classes  # type: ignore[union-attr]
        self.out = np.empty((len(plan.features), 2 * self.classes + 3))  # see ScanRecord
        self.used = np.empty(len(plan.batches), np.int64)
        self.eager: dict[int, tuple[Prediction, StepInfo]] = {}
        self.failed = False  # compiled code could not be had

    def run(self, state: FilterState) -> tuple[FilterState, Outputs]:
        begun, t, patience, count = state.step, 0, 1, len(self.plan.batches)
        while t < count:
            stop = next(position for position in self.plan.odd if position >= t)
            ready = stop > t and not self.failed
            reached, state = self._run_compiled(state, t, stop) if ready else (t, state)
            # If it refuses again and again, ask less often.
            patience = 1 if reached > t else min(2 * patience, 256)
            t = min(reached + patience, count)
            for position in range(reached, t):
                state = self._step_eagerly(state, position)
        return state, self._collect(state, begun)

    def _step_eagerly(self, state: FilterState, t: int) -> FilterState:
        state, prediction, info = self.filter.step(state, self.plan.batches[t])
        self.eager[t] = (prediction, info)
        return state

    def _run_compiled(self, state: FilterState, begin: int, stop: int) -> tuple[int, FilterState]:
        """Steps from begin on, up to the first one that is refused: which that is, and the state
        before it.
        """
        try:
            end, belief = self._advance(state.belief, begin, stop)
            if begin < end < stop:  # the covariance is already spoilt by the step that was refused
                _, belief = self._advance(state.belief, begin, end)
        except Exception as error:
            self.failed = True
            give_up(error)
            return begin, state
        if end == begin:
            return begin, state
        return end, FilterState(
            belief,
            state.source,
            state.parameters,
            state.seed,
            state.step + end - begin,
            state.memory,
        )

    def _advance(self, belief: Belief, begin: int, end: int) -> tuple[int, Belief]:
        if not isinstance(belief.covariance, Full):
            return self._advance_diagonal(belief, begin, end)
        values = belief.covariance.dense()
        kept: SourcePlan = self.filter.__dict__["_motion"]
        low = kept.low if belief is kept.source else _find_lowest(belief.covariance)
        bounds = np.array([low, *find_limits(values.dtype)])
        if self.plan.is_rank_one:
            return self._advance_rank_one(belief, values, bounds, begin, end)
        from driftfilter.compiled.full import scan_full

        mean, values = _copy(belief.mean), _copy(values)
        moving: Any = (mean.numpy(), values.numpy(), bounds)
        reached = scan_full(*self._stream(begin, end), *moving, *self._record(belief))
        return reached, unchecked(Belief, mean=mean, covariance=unchecked(Full, matrix=values))

    def _advance_rank_one(
        self, belief: Belief, values: Tensor, bounds: Any, begin: int, end: int
    ) -> tuple[int, Belief]:
        from driftfilter.compiled.logistic import FEW, scan_rank_one, workspaces

        plan, dtype = self.plan, values.dtype
        mean, values = _copy(belief.mean, torch.float64), _copy(values, torch.float64)
        stream: Any = (plan.rules, plan.motion, plan.features.numpy(), begin, end)
        moving: Any = (mean.numpy(), values.numpy(), bounds, *workspaces(len(mean)))
        record: Any = (
            self._warned,
            self.out,
            self.used,
            (0,) * len(mean) if len(mean) <= FEW else (),
        )
        reached = scan_rank_one(*stream, *moving, *record)
        if dtype != torch.float64:
            mean, values = mean.to(dtype), values.to(dtype)
        return reached, unchecked(Belief, mean=mean, covariance=unchecked(Full, matrix=values))

    def _advance_diagonal(self, belief: Belief, begin: int, end: int) -> tuple[int, Belief]:
        from driftfilter.compiled.diagonal import scan_diagonal

        mean, values = _copy(belief.mean), _copy(belief.covariance.variance())
        same: Any = [mean.numpy(), values.numpy()] * 2
        reached = scan_diagonal(*self._stream(begin, end), *same, *self._record(belief))
        return reached, unchecked(Belief, mean=mean, covariance=unchecked(Diagonal, values=values))

    def _stream(self, begin: int, end: int) -> Any:
        plan = self.plan
        equal = isinstance(plan.offsets, range)
        offsets = np.arange(0, plan.offsets.stop, plan.offsets.step) if equal else plan.offsets
        return plan.rules, plan.motion, plan.head, plan.features.numpy(), offsets, begin, end

    def _record(self, belief: Belief) -> Any:
        from driftfilter.compiled.workspace import allocate

        plan, full = self.plan, isinstance(belief.covariance, Full)
        space = allocate(
            plan.rules,
            plan.sizes[1],
            self.classes,
            belief.dimension,
            plan.head,
            full,
            len(plan.motion.matrix) > 0,
        )
        return space, self._warned, self.out, self.used

    @property
    def _warned(self) -> bool:
        return bool(self.filter.__dict__["_warned"])

    def _collect(self, state: FilterState, begun: int) -> Outputs:
        dtype, out = state.belief.mean.dtype, torch.from_numpy(self.out)
        out = out if dtype == torch.float64 else out.to(dtype)
        kept = (self.plan.offsets, self.used, self.eager, begun, self.plan.is_rank_one)
        record = ScanRecord(self.filter, out, self.classes, *kept)
        predictions, infos = (
            LazySequence(record.prediction, len(self.used)),
            LazySequence(record.info, len(self.used)),
        )
        together = None if self.eager else (record.log_probabilities, record.logit_variance)
        return Outputs(predictions, infos, together, len(self.used) - len(self.eager))


def _copy(values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous copy that a kernel may change."""
    values = values.clone(memory_format=torch.contiguous_format)
    return values if dtype is None or dtype == values.dtype else values.to(dtype)


@final
@dataclass(frozen=True, eq=False)
class ScanRecord:
    """What every step of a scan left behind, samples one after the other; predictions and infos are
    views of it.
    """

    filter: Filter
    # [samples, 2 k + 3]: log-probabilities, logit variances, loss (or logit), weight, coefficient
    out: Tensor
    classes: int
    offsets: Any  # [steps + 1]
    used: Any  # [steps]
    eager: dict[int, tuple[Prediction, StepInfo]]
    begun: int  # step count before the first
    by_logit: bool  # whether the logit of class 1 stands in place of the loss

    @cached_property
    def losses(self) -> Tensor:
        """ℓ of every sample [samples], from its logit only when asked for."""
        column = self.out[:, 2 * self.classes]
        if not self.by_logit:
            return column
        loss: Loss = self.filter.observation.loss  # type: ignore[assignment]  # as_loss in Gibbs
        logits = torch.stack((torch.zeros_like(column), column), 1)
        return loss.expand(logits[None], loss.targets(logits), self.out[:, -2]).value[0]

    @property
    def log_probabilities(self) -> Tensor:
        """[samples, k]."""
        return self.out[:, : self.classes]

    @property
    def logit_variance(self) -> Tensor:
        """[samples, k]."""
        return self.out[:, self.classes : 2 * self.classes]

    def prediction(self, t: int) -> Prediction:
        """The prediction of the batch at this place."""
        if t in self.eager:
            return self.eager[t][0]
        rows = self._rows(t)
        return Prediction(self.log_probabilities[rows], self.logit_variance[rows])

    def info(self, t: int) -> StepInfo:
        """What the step at this place did."""
        if t in self.eager:
            return self.eager[t][1]
        rows = self._rows(t)
        weights, coefficients = self.out[rows, -2:].unbind(1)
        reason = self.filter.reason(int(self.used[t]))
        return StepInfo(
            self.begun + t, not reason, reason, self.losses[rows][None], weights, coefficients
        )

    def _rows(self, t: int) -> slice:
        return slice(int(self.offsets[t]), int(self.offsets[t + 1]))


@final
class LazySequence(Sequence[T]):
    """Items that are made when they are asked for."""

    def __init__(self, make: Callable[[int], T], length: int) -> None:
        self._make, self._length = make, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        places = range(self._length)[index]
        return (
            [self._make(place) for place in places]
            if isinstance(places, range)
            else self._make(places)
        )

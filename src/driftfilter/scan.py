"""Whole streams in compiled code: what ``Filter.run`` does with a linear head where numba is installed.

The compiled step (compiled_steps.py) is the eager one in closed form. What it cannot take, a step that warns, raises or needs
more care with rounding, it hands back: the eager path takes that step from the same state, and the scan goes on after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar, final

import numpy as np
import torch
from torch import Tensor

from driftfilter.belief import Belief
from driftfilter.checks import unchecked
from driftfilter.covariance import Diagonal, Full
from driftfilter.filtering import Filter, FilterState, Outputs, StepInfo
from driftfilter.kernel_terms import Head, Motion, Rules
from driftfilter.prediction import Prediction
from driftfilter.predictive import LinearHead
from driftfilter.scan_plan import Uncovered, motion_of, rules_of

STEPS = 64  # below which compiled code does not pay for being loaded
WORK = 4_000_000  # multiplications a step above which libraries of linear algebra are faster

T = TypeVar("T")


def why_eager(filt: Filter, state: FilterState, batches: Iterable[Any]) -> str:
    """Why ``filt.run(state, batches)`` would not run in compiled code; empty where it would."""
    try:
        _plan(filt, state, batches)
    except Uncovered as reason:
        return str(reason)
    return ""


def run(filt: Filter, state: FilterState, batches: Iterable[Any]) -> tuple[FilterState, Outputs] | None:
    """The stream in compiled code; None where it is not covered."""
    try:
        plan = _plan(filt, state, batches)
    except Uncovered:
        return None
    return _Scan(filt, plan).run(state)


class Plan(NamedTuple):
    """A stream made ready for the compiled step."""

    batches: Any  # as they were given
    features: Tensor  # [samples, D] float64, of all usable batches
    offsets: Any  # [steps + 1] first sample of each batch
    odd: list[int]  # batches that only the eager path can judge, then the number of steps
    rules: Rules
    motion: Motion
    head: Head

    @property
    def is_rank_one(self) -> bool:
        """Whether every batch is one sample of logistic regression, and the transition no matrix product."""
        simple = len(self.head.read_out) == 0 and len(self.motion.matrix) == 0 and self.motion.factor.shape == (1, 1)
        one_logit = self.head.first == 1 and self.features.shape[1] == self.motion.vectors.shape[1]
        return simple and one_logit and bool((np.diff(self.offsets) == 1).all())


def _plan(filt: Filter, state: FilterState, batches: Iterable[Any]) -> Plan:
    if not isinstance(batches, (Tensor, list, tuple)):
        raise Uncovered("batches come from an iterator: give one tensor, a list or a tuple")
    count = batches.shape[0] if isinstance(batches, Tensor) and batches.dim() else len(batches)
    if count < STEPS:
        raise Uncovered(f"{count} steps are fewer than {STEPS}")
    _require_numba()
    head = head_of(filt, state)
    rules = rules_of(filt)
    features, offsets, odd = _gathered(batches, head.intercept, state.belief.mean.dtype)
    width, parameters = features.shape[1], state.parameters
    first = head.classes - parameters // width if width else -1
    if first not in (0, 1) or parameters % width:
        raise Uncovered("the features do not fit the belief")
    _require_small(state, int(np.diff(offsets).max(initial=0)), head.classes - first)
    matrix = filt.transition.read_out(parameters)
    read_out = np.zeros((0, 0)) if matrix is None else np.ascontiguousarray(matrix.double().numpy())
    motion = _motion(filt, state.source)
    return Plan(batches, features, offsets, odd, rules, motion, Head(first, read_out))


def _motion(filt: Filter, source: Belief) -> Motion:
    """The transition for the kernels; kept, since a stream has one source only."""
    kept: tuple[Belief, Motion] | None = filt.__dict__["_motion"]
    if kept is None or kept[0] is not source:
        kept = (source, motion_of(filt.transition, source))
        object.__setattr__(filt, "_motion", kept)
    return kept[1]


def _require_numba() -> None:
    if find_spec("numba") is None:
        raise Uncovered("numba is not installed (pip install driftfilter[fast])")


def head_of(filt: Filter, state: FilterState) -> LinearHead:
    """The linear head of a filter whose belief the compiled step can carry."""
    model = filt.logits
    if type(model) is not LinearHead or model.classes < 2:
        raise Uncovered("the model is not a LinearHead of 2 classes or more")
    belief = state.belief
    if type(belief.covariance) not in (Full, Diagonal) or type(state.source.covariance) is not type(belief.covariance):
        raise Uncovered(f"the covariance is {type(belief.covariance).__name__}, not Full or Diagonal")
    if belief.mean.device.type != "cpu":
        raise Uncovered(f"the belief is on {belief.mean.device}, not on the CPU")
    return model


def _require_small(state: FilterState, n: int, own: int) -> None:
    d, p = state.belief.dimension, n * own
    work = d * d * p + d * p * p if isinstance(state.belief.covariance, Full) else 4 * d * n
    if work > WORK:
        raise Uncovered(f"a step on {n} samples with {d} parameters is large enough for libraries of linear algebra")


def _gathered(batches: Any, intercept: bool, dtype: torch.dtype) -> tuple[Tensor, Any, list[int]]:
    """Features of all usable batches [samples, D], the first sample of each [steps + 1], and the batches left out."""
    if isinstance(batches, Tensor):
        if batches.dim() != 3 or 0 in batches.shape or not _usable(batches[0], batches.shape[2]):
            raise Uncovered(f"the stream is not a real tensor [steps, n, D] on the CPU, but of shape {list(batches.shape)}")
        features, sizes, odd = batches.flatten(0, 1), np.full(len(batches), batches.shape[1]), []
    else:
        widths = {batch.shape[-1] for batch in batches if isinstance(batch, Tensor) and batch.dim() == 2}
        if len(widths) != 1:
            raise Uncovered("the batches are not tensors [n, D] of one width")
        (width,) = widths
        fit = [_usable(batch, width) for batch in batches]
        odd = [position for position, good in enumerate(fit) if not good]
        sizes = np.array([batch.shape[0] if good else 0 for batch, good in zip(batches, fit, strict=True)])
        good_ones = [batch for batch, good in zip(batches, fit, strict=True) if good]
        if not good_ones:
            raise Uncovered("no batch is a tensor [n, D] on the CPU")
        features = torch.cat([batch.detach().to(dtype) for batch in good_ones])
    features = features.detach().to(dtype).double()
    if intercept:
        features = torch.cat((features.new_ones(len(features), 1), features), 1)
    return features.contiguous(), np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes))), [*odd, len(batches)]


def _usable(batch: Any, width: int) -> bool:
    """Whether a batch is a real tensor [n, width] on the CPU; what its numbers are the compiled step sees itself."""
    if not isinstance(batch, Tensor) or batch.device.type != "cpu" or batch.is_complex() or batch.layout is not torch.strided:
        return False
    return batch.dim() == 2 and batch.shape[0] > 0 and batch.shape[1] == width


@final
class _Scan:
    """One stream under way."""

    def __init__(self, filt: Filter, plan: Plan) -> None:
        self.filter, self.plan, self.classes = filt, plan, filt.logits.classes  # type: ignore[union-attr]
        self.out = torch.zeros(len(plan.features), 2 * self.classes + 3, dtype=torch.float64)  # see Record
        self.used = np.zeros(len(plan.batches), np.int64)
        self.eager: dict[int, tuple[Prediction, StepInfo]] = {}

    def run(self, state: FilterState) -> tuple[FilterState, Outputs]:
        begun, t, patience, count = state.step, 0, 1, len(self.plan.batches)
        while t < count:
            stop = next(position for position in self.plan.odd if position >= t)
            reached, state = self._compiled(state, t, stop) if stop > t else (t, state)
            patience = 1 if reached > t else min(2 * patience, 256)  # where it refuses again and again, ask less often
            t = min(reached + patience, count)
            for position in range(reached, t):
                state = self._eagerly(state, position)
        return state, self._outputs(state, begun)

    def _eagerly(self, state: FilterState, t: int) -> FilterState:
        state, prediction, info = self.filter.step(state, self.plan.batches[t])
        self.eager[t] = (prediction, info)
        return state

    def _compiled(self, state: FilterState, begin: int, stop: int) -> tuple[int, FilterState]:
        """Steps from begin on, up to the first one that is refused: which that is, and the state before it."""
        end, belief = self._advance(state.belief, begin, stop)
        if begin < end < stop:  # the covariance is already spoilt by the step that was refused
            _, belief = self._advance(state.belief, begin, end)
        if end == begin:
            return begin, state
        return end, FilterState(belief, state.source, state.parameters, state.seed, state.step + end - begin, state.memory)

    def _advance(self, belief: Belief, begin: int, end: int) -> tuple[int, Belief]:
        from driftfilter import compiled_diagonal, compiled_parts, compiled_rank_one, compiled_steps

        plan, full, d = self.plan, isinstance(belief.covariance, Full), belief.dimension
        n = int(np.diff(plan.offsets)[begin:end].max())
        space = compiled_parts.room(n, self.classes, d, plan.head, full, len(plan.motion.matrix) > 0)
        mean = belief.mean.clone(memory_format=torch.contiguous_format)
        values = belief.covariance.dense() if isinstance(belief.covariance, Full) else belief.covariance.variance()
        values = values.clone(memory_format=torch.contiguous_format)
        stream: Any = (plan.rules, plan.motion, plan.head, plan.features.numpy(), plan.offsets, begin, end)
        record: Any = (space, bool(self.filter.__dict__["_warned"]), self.out.numpy(), self.used)
        if full:
            bounds = np.array([torch.linalg.eigvalsh(values)[0].item(), torch.finfo(values.dtype).eps])
            moving: Any = (mean.numpy(), values.numpy(), bounds)
            if plan.is_rank_one:
                few: Any = (plan.rules, plan.motion, plan.features.numpy(), begin, end)
                reached = compiled_rank_one.scan_rank_one(*few, *moving, *record)
            else:
                reached = compiled_steps.scan_full(*stream, *moving, *record)
            return reached, unchecked(Belief, mean=mean, covariance=unchecked(Full, matrix=values))
        same: Any = [mean.numpy(), values.numpy()] * 2
        reached = compiled_diagonal.scan_diagonal(*stream, *same, *record)
        return reached, unchecked(Belief, mean=mean, covariance=unchecked(Diagonal, values=values))

    def _outputs(self, state: FilterState, begun: int) -> Outputs:
        record = Record(
            self.filter, self.out.to(state.belief.mean.dtype), self.classes, self.plan.offsets, self.used, self.eager, begun
        )
        predictions, infos = Recorded(record.prediction, len(self.used)), Recorded(record.info, len(self.used))
        together = None if self.eager else (record.log_probabilities, record.logit_variance)
        return Outputs(predictions, infos, together, len(self.used) - len(self.eager))


@final
@dataclass(frozen=True, eq=False)
class Record:
    """What every step of a scan left behind, samples one after the other; predictions and infos are views of it."""

    filter: Filter
    out: Tensor  # [samples, 2 k + 3]: log-probabilities, logit variances, loss, weight, coefficient
    classes: int
    offsets: Any  # [steps + 1]
    used: Any  # [steps]
    eager: dict[int, tuple[Prediction, StepInfo]]
    begun: int  # step count before the first

    @property
    def log_probabilities(self) -> Tensor:
        """[samples, k]."""
        return self.out[:, : self.classes]

    @property
    def logit_variance(self) -> Tensor:
        """[samples, k]."""
        return self.out[:, self.classes : 2 * self.classes]

    def prediction(self, t: int) -> Prediction:
        """Of the batch at this place."""
        if t in self.eager:
            return self.eager[t][0]
        rows = self._rows(t)
        return Prediction(self.log_probabilities[rows], self.logit_variance[rows])

    def info(self, t: int) -> StepInfo:
        """Of the step at this place."""
        if t in self.eager:
            return self.eager[t][1]
        losses, weights, coefficients = self.out[self._rows(t), -3:].unbind(1)
        reason = self.filter.reason(int(self.used[t]))
        return StepInfo(self.begun + t, not reason, reason, losses[None], weights, coefficients)

    def _rows(self, t: int) -> slice:
        return slice(int(self.offsets[t]), int(self.offsets[t + 1]))


@final
class Recorded(Sequence[T]):
    """Items that are made when they are asked for."""

    def __init__(self, make: Callable[[int], T], length: int) -> None:
        self._make, self._length = make, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        places = range(self._length)[index]
        return [self._make(place) for place in places] if isinstance(places, range) else self._make(places)

"""Many streams at once: one belief for each camera, hospital or tenant, over the features of one
shared backbone.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias, cast, final

import numpy as np
import torch
from torch import Tensor

from driftfilter.base.checks import require, require_finite, unchecked
from driftfilter.compiled.batched import step_batched
from driftfilter.compiled.fleet_file import read, require_plain
from driftfilter.compiled.fleet_opinions import COUNTS, SUMS, FleetOpinions
from driftfilter.compiled.plan import Uncovered, give_up, require_working
from driftfilter.compiled.scan import find_limits, is_along_x, require_head, translate
from driftfilter.compiled.terms import HeadArrays, MotionArrays
from driftfilter.filtering import Filter, FilterState
from driftfilter.gaussian.belief import Belief
from driftfilter.gaussian.diagonal import Diagonal
from driftfilter.gaussian.full import Full
from driftfilter.inference.accuracy import Estimate, Expectation
from driftfilter.inference.prediction import Prediction
from driftfilter.storage.atomic import atomic_file
from driftfilter.storage.sealed import FAILURES, CheckpointError, seal

StreamName: TypeAlias = Hashable
Beliefs: TypeAlias = tuple[
    Tensor, Tensor, Tensor
]  # means [m, d], covariances, lower bounds of their eigenvalues [m]
Predictions: TypeAlias = tuple[
    Tensor, Tensor
]  # log-probabilities and logit variances [m, steps, n, k]


@final
class Fleet:
    """S independent filters of one recipe, each with its own belief, step count and seed, advanced
    together.

    The filter is one that ``Filter.run`` compiles (docs/guides/small-filters.md): LinearHead, Full
    or Diagonal beliefs, Linearized inference. Streams start at ``belief``, which is the source of
    all. A call that fails changes no stream. ``estimates``: keep what ``estimate`` needs, 22
    (2k + 3) numbers a stream; without them nothing is kept, and steps of small beliefs take less
    time.

    >>> import torch, driftfilter as df
    >>> filt = df.Filter(df.LinearHead(2), inference=df.Linearized(df.Hessian()))
    >>> belief = df.Belief(torch.tensor([1.0, -1.0]), df.Full(torch.eye(2)))
    >>> fleet = df.Fleet(filt, belief, streams=["north", "south"])
    >>> fleet.step({"south": torch.tensor([[2.0, 0.5]])})["south"].labels
    tensor([1])
    >>> fleet.state("south").step, fleet.state("north").step
    (1, 0)
    """

    def __init__(
        self,
        filt: Filter,
        belief: Belief,
        streams: Iterable[StreamName] = (),
        seed: int = 0,
        estimates: bool = False,
    ) -> None:
        self.filter, self._start = filt, filt.init(belief, seed)
        try:
            self._head = require_head(filt, self._start)
            kept = translate(filt, self._start)
        except Uncovered as reason:
            raise ValueError(
                f"Fleet: filt must be a filter of closed forms, but {reason}"
            ) from None
        require(
            filt.transition.read_out(belief.dimension) is None,
            "Fleet: transition",
            filt.transition,
            "without hidden states",
        )
        self._rules, self._motion = kept.rules, kept.motion
        self._full = isinstance(belief.covariance, Full)
        self._rows: dict[StreamName, int] = {}
        d, like = belief.dimension, belief.mean
        self._mean, self._values = (
            like.new_empty(0, d),
            like.new_empty(0, *([d, d] if self._full else [d])),
        )
        self._low = torch.empty(
            0, dtype=torch.float64
        )  # lower bounds of the covariances' eigenvalues, see full.py
        self._steps, self._seeds = (
            torch.empty(0, dtype=torch.int64),
            torch.empty(0, dtype=torch.int64),
        )
        self._spare: tuple[Tensor, Tensor] | None = None
        require(isinstance(estimates, bool), "Fleet: estimates", estimates, "True or False")
        self._opinions = FleetOpinions.start(0, self._head.classes) if estimates else None
        self.add(streams)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, stream: object) -> bool:
        return stream in self._rows

    @property
    def streams(self) -> list[StreamName]:
        """Names of the streams."""
        return list(self._rows)

    def add(self, streams: Iterable[StreamName], seed: int | None = None) -> None:
        """New streams, which start at the source; seeds count up from the given one, or from the
        fleet's.
        """
        new = list(streams)
        known = [stream for stream in new if stream in self._rows] if self._rows else []
        require(
            not known and len(set(new)) == len(new),
            "Fleet.add: streams",
            known or new,
            "new, each named once",
        )
        first = (self._start.seed if seed is None else seed) + (len(self) if seed is None else 0)
        belief = self._start.belief
        values = belief.covariance.dense() if self._full else belief.covariance.variance()
        low = (
            torch.linalg.eigvalsh(values.double())[:1]
            if self._full
            else torch.zeros(1, dtype=torch.float64)
        )
        self._mean = torch.cat((self._mean, belief.mean.expand(len(new), -1)))
        self._values = torch.cat((self._values, values.expand(len(new), *values.shape)))
        self._low = torch.cat((self._low, low.cpu().expand(len(new))))
        self._steps = torch.cat((self._steps, torch.zeros(len(new), dtype=torch.int64)))
        self._seeds = torch.cat((self._seeds, torch.arange(first, first + len(new))))
        if self._opinions is not None:
            fresh = FleetOpinions.start(len(new), self._head.classes)
            self._opinions = self._opinions.join(fresh)
        self._rows.update(zip(new, count(len(self._rows))))
        self._spare = None

    def drop(self, streams: Iterable[StreamName]) -> None:
        """Forget streams."""
        gone = set(self._indices(list(streams)).tolist())
        kept = [(stream, row) for stream, row in self._rows.items() if row not in gone]
        index = torch.tensor([row for _, row in kept], dtype=torch.int64)
        self._mean, self._values = self._mean[index], self._values[index]
        self._low, self._steps, self._seeds = (
            self._low[index],
            self._steps[index],
            self._seeds[index],
        )
        self._rows = {stream: position for position, (stream, _) in enumerate(kept)}
        self._opinions = None if self._opinions is None else self._opinions.pick(index)
        self._spare = None

    def state(self, stream: StreamName) -> FilterState:
        """What one stream has learned, as the state of a filter of its own."""
        return self._state(int(self._indices([stream])[0]))

    def estimate(self, stream: StreamName) -> Estimate:
        """Expected accuracy of one stream over its last thousand samples, with an interval, without
        labels (docs/knowing.md).
        """
        allowed = "True, so that what was predicted is kept"
        require(self._opinions is not None, "Fleet: estimates", False, allowed)
        assert self._opinions is not None
        return Expectation(self._opinions.of(int(self._indices([stream])[0]))).estimate

    def _state(self, row: int) -> FilterState:
        mean, values = self._mean[row].clone(), self._values[row].clone()
        covariance = (
            unchecked(Full, matrix=values) if self._full else unchecked(Diagonal, values=values)
        )
        belief = unchecked(Belief, mean=mean, covariance=covariance)
        counts = (int(self._seeds[row]), int(self._steps[row]))
        return FilterState(belief, self._start.source, self._start.parameters, *counts)

    def _indices(self, streams: Sequence[StreamName]) -> Tensor:
        """Rows of streams [m]; refused if one is not known, or named twice."""
        unknown = [stream for stream in streams if stream not in self._rows]
        require(
            not unknown,
            "Fleet: streams",
            unknown[:3],
            f"streams that were added, of which there are {len(self)}",
        )
        require(len(set(streams)) == len(streams), "Fleet: streams", streams, "named once each")
        return torch.tensor([self._rows[stream] for stream in streams], dtype=torch.int64)

    def _are_all(self, rows: Tensor) -> bool:
        """Whether rows are those of all streams, in order."""
        return len(rows) == len(self) and torch.equal(rows, torch.arange(len(self)))

    @torch.no_grad()
    def step(
        self, batches: Mapping[Any, Tensor] | Tensor, streams: Sequence[StreamName] | None = None
    ) -> Any:
        """Adapt some streams to a batch each and predict it.

        A mapping stream -> features [n, D] gives a mapping stream -> Prediction; features [m, n, D]
        of ``streams`` (all if none are named) give one Prediction of tensors [m, n, k].
        """
        if isinstance(batches, Mapping):
            require(
                streams is None, "Fleet.step: streams", streams, "left out if batches are named"
            )
            return self._step_mapping(batches)
        prediction = self.run(
            batches.unsqueeze(1) if isinstance(batches, Tensor) and batches.dim() == 3 else batches,
            streams,
        )
        return Prediction(prediction.log_probabilities[:, 0], prediction.logit_variance[:, 0])

    def _step_mapping(self, batches: Mapping[Any, Tensor]) -> dict[StreamName, Prediction]:
        require(len(batches) > 0, "Fleet.step: batches", batches, "for one stream or more")
        groups: dict[int, list[StreamName]] = {}
        for stream, batch in batches.items():
            allowed = isinstance(batch, Tensor) and batch.dim() == 2
            require(
                allowed,
                f"Fleet.step: batch of {stream!r}",
                getattr(batch, "shape", batch),
                "a tensor [n, D]",
            )
            groups.setdefault(batch.shape[0], []).append(stream)
        done = []
        for streams in groups.values():
            features = torch.stack([batches[stream] for stream in streams])[:, None]
            done.append((streams, *self._advance(features, streams)))
        predictions: dict[StreamName, Prediction] = {}
        for streams, rows, after, out in done:  # every group has gone well
            self._commit(rows, after, out[0])
            predictions |= {
                stream: Prediction(out[0][i, 0], out[1][i, 0]) for i, stream in enumerate(streams)
            }
        return {stream: predictions[stream] for stream in batches}

    @torch.no_grad()
    def run(self, features: Tensor, streams: Sequence[StreamName] | None = None) -> Prediction:
        """Adapt to several batches of each stream, features [m, steps, n, D], and predict each;
        tensors [m, steps, n, k].
        """
        rows, after, (logp, variance) = self._advance(
            features, None if streams is None else list(streams)
        )
        self._commit(rows, after, logp)
        return Prediction(logp, variance)

    def _advance(
        self, features: Tensor, streams: Sequence[StreamName] | None
    ) -> tuple[Tensor, Beliefs, Predictions]:
        """Rows of the streams (None: all), their beliefs after the batches and predictions; nothing
        is changed yet.
        """
        rows = torch.arange(len(self)) if streams is None else self._indices(streams)
        self._require_features(features, len(rows))
        features = features.to(self._mean)
        done = self._advance_compiled(features, rows) if self._is_compiled() else None
        return rows, *(self._advance_batched(features, rows) if done is None else done)

    def _is_compiled(self) -> bool:
        """Whether streams advance in compiled code."""
        try:
            require_working()
        except Uncovered:
            return False
        return find_spec("numba") is not None and self._mean.device.type == "cpu"

    def _require_features(self, features: Any, m: int) -> None:
        require(
            isinstance(features, Tensor), "Fleet: features", type(features).__name__, "a tensor"
        )
        shape, allowed = (
            list(features.shape),
            f"[{m}, n, D] ([{m}, steps, n, D] for run) with n >= 1 for {m} streams",
        )
        require(
            features.dim() == 4 and shape[0] == m > 0 and min(shape) > 0,
            "Fleet: features",
            f"shape {shape}",
            allowed,
        )
        width, length, k = (
            shape[-1] + self._head.intercept,
            self._start.parameters,
            self._head.classes,
        )
        fits = length in (width * k, width * (k - 1))
        require(
            fits,
            "Fleet: features",
            f"{shape[-1]} wide",
            f"of the width that {length} parameters of {k} classes have",
        )
        require_finite("Fleet: features", features)

    def _commit(self, rows: Tensor, after: Beliefs, log_probabilities: Tensor) -> None:
        (mean, values, low), steps = after, log_probabilities.shape[1]
        if self._opinions is not None:
            self._opinions.extend(rows, log_probabilities)
        if self._are_all(rows):
            self._spare = (self._mean, self._values)  # the next step writes where this one read
            self._mean, self._values, self._low = mean, values, low
            self._steps += steps
        else:
            self._mean[rows], self._values[rows], self._low[rows] = mean, values, low
            self._steps[rows] += steps

    def _advance_batched(self, features: Tensor, rows: Tensor) -> tuple[Beliefs, Predictions]:
        bound = self.filter.transition.bind(self._start.source)
        mean, values, out = self._mean, self._values, []
        if not self._are_all(rows):
            index = rows.to(mean.device)
            mean, values = mean[index], values[index]
        for batch in features.unbind(1):
            mean, values, *predicted = step_batched(self.filter, bound, batch, mean, values)
            out.append(predicted)
        logp, variance = (torch.stack(parts, 1) for parts in zip(*out, strict=True))
        return (mean, values, self._low[rows]), (logp, variance)

    def _advance_compiled(
        self, features: Tensor, rows: Tensor
    ) -> tuple[Beliefs, Predictions] | None:
        """All streams in compiled code, on torch's threads; a stream that refuses a step takes it
        eagerly. None if compiled code could not be had.
        """
        try:
            from driftfilter.compiled import fleet_kernels, logistic, logistic_lanes
            from driftfilter.compiled.workspace import allocate
        except Exception as error:
            give_up(error)
            return None

        given = features
        if self._head.intercept:
            features = torch.cat((features.new_ones(*features.shape[:-1], 1), features), -1)
        m, per, n, width = features.shape
        k, d, whole = self._head.classes, self._start.parameters, len(rows) == len(self)
        mean, values = self._spare or (torch.empty_like(self._mean), torch.empty_like(self._values))
        if not whole:
            mean, values = mean[:m].clone(), values[:m].clone()
        fixed = torch.tensor(find_limits(mean.dtype), dtype=torch.float64).expand(m, 3)
        bounds = torch.cat((self._low[rows, None], fixed), 1)
        # Rounding does no harm without a matrix to invert.
        single = not self._full and mean.dtype == torch.float32
        dtype = np.float32 if single else np.float64
        head = HeadArrays(k - d // width, np.zeros((0, 0), dtype))
        is_rank_one = self._full and n == 1 and is_along_x(self._rules, self._motion, head, width)
        abreast = is_rank_one and d <= logistic_lanes.ABREAST
        out = np.empty(
            (m * per, 4) if abreast else (m * per * n, 2 * k + 3), np.float64 if abreast else dtype
        )
        used, reached = np.zeros(0 if abreast else m * per, np.int64), np.zeros(m, np.int64)
        flat: Any = (
            features.reshape(-1, width).to(torch.float32 if single else torch.float64).numpy()
        )
        motion = _to_single(self._motion) if single else self._motion
        offsets = np.arange(0 if is_rank_one else m * per + 1) * n
        stream: Any = (self._rules, motion, head, flat, offsets, per)
        beliefs: Any = [tensor.numpy() for tensor in (rows, self._mean, self._values, mean, values)]
        warned, kernels = bool(self.filter.__dict__["_warned"]), cast(Any, fleet_kernels)

        def work(begin: int, end: int) -> None:
            few: Any = (self._rules, motion, flat, per, begin, end, *beliefs, bounds.numpy())
            if abreast:
                record: Any = (*logistic_lanes.workspaces(d), warned, out, reached)
                own: Any = logistic_lanes.as_few(motion)
                cast(Any, logistic_lanes).each_abreast(*few, *record, own)
                return
            if is_rank_one:
                kernels.each_rank_one(*few, *logistic.workspaces(d), warned, out, used, reached)
                return
            space = allocate(
                self._rules, n, k, d, head, self._full, len(self._motion.matrix) > 0, dtype
            )
            record = (space, warned, out, used, reached)
            if self._full:
                kernels.each_full(*stream, begin, end, *beliefs, bounds.numpy(), *record)
            else:
                kernels.each_diagonal(*stream, begin, end, *beliefs, *record)

        try:
            _share_out(work, m)
        except Exception as error:
            give_up(error)
            return None
        results = torch.from_numpy(out).to(mean.dtype).reshape(m, per, n, -1)
        logp, variance = results[..., :k], results[..., k : 2 * k]
        for position in np.flatnonzero(reached == 0).tolist():
            state, outputs = self.filter.run(
                self._state(int(rows[position])), list(given[position])
            )
            covariance = state.belief.covariance
            mean[position], bounds[position, 0] = state.belief.mean, 0.0
            values[position] = covariance.dense() if self._full else covariance.variance()
            if self._full:
                bounds[position, 0] = torch.linalg.eigvalsh(values[position].double())[0]
            logp[position] = outputs.log_probabilities.reshape(per, n, k)
            variance[position] = outputs.logit_variance.reshape(per, n, k)
        return (mean, values, bounds[:, 0].clone()), (logp, variance)

    def save(self, path: str | Path, keep: int = 1) -> None:
        """Write all streams to a file, which is there whole or as it was; the last ``keep`` files
        stay.
        """
        names = require_plain("Fleet.save: streams", [*self._rows])
        header = {"format": 1, "fleet": repr(self.filter), "streams": names}
        with atomic_file(Path(path), keep) as file:
            file.writelines(seal(header, self._tensors()))

    def _tensors(self) -> dict[str, Tensor]:
        """All that streams have, a row each, by its name in a file."""
        return {
            "mean": self._mean,
            "values": self._values,
            "low": self._low,
            "step": self._steps,
            "seed": self._seeds,
            **({} if self._opinions is None else self._opinions.to_tensors()),
        }

    def load(self, path: str | Path) -> None:
        """Go on from a file of ``save`` by a fleet of the same filter; what does not fit raises and
        changes nothing.
        """
        try:
            names, tensors = read(Path(path), repr(self.filter), self._tensors())
        except FAILURES as error:
            raise CheckpointError(f"{path} was not loaded: {error}") from error
        device = self._mean.device  # on which there may be no room for them
        mean, values = (tensors[name].to(device) for name in ("mean", "values"))
        if self._opinions is not None:
            self._opinions = FleetOpinions(tensors[SUMS], tensors[COUNTS])
        self._mean, self._values, self._low = mean, values, tensors["low"]
        self._steps, self._seeds = tensors["step"], tensors["seed"]
        self._rows = {stream: row for row, stream in enumerate(names)}
        self._spare = None


def _to_single(motion: MotionArrays) -> MotionArrays:
    """Arrays of a transition in single precision."""
    vectors, matrix, factor, noise = (part.astype(np.float32) for part in motion[:4])
    return motion._replace(vectors=vectors, matrix=matrix, factor=factor, noise=noise)  # type: ignore[arg-type]


def _share_out(work: Any, count: int) -> None:
    """Call work(begin, end) for parts of a range on torch's threads."""
    threads = max(1, min(torch.get_num_threads(), count // 64))
    if threads == 1:
        work(0, count)
        return
    edges = [count * part // threads for part in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, edges[:-1], edges[1:]))

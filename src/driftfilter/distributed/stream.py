"""One stream over several processes: every rank sees a shard of each batch, and all of them hold
the same belief.

Logits [n, k] are gathered, so that weights, losses, class marginals and alarms are worked out from
the whole batch on each rank; gradients [d] are summed, their rows [n, d] gathered if a curvature
needs them. Batch normalisation exchanges its moments (batch_norm.py). The rest of the library does
not know: a belief that is updated by the same numbers stays the same.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from driftfilter.base.checks import NotFiniteError, NotPositiveDefiniteError, require
from driftfilter.base.inputs import Inputs, batch_size, check_inputs, each
from driftfilter.base.sharding import Shards, among, current
from driftfilter.distributed.ranks import ProcessRanks, RankError
from driftfilter.model.predictive import (
    ModelAround,
    PredictiveModel,
    Pullback,
    PullbackAround,
)
from driftfilter.model.weighting import looks
from driftfilter.networks.features import OnFeatures
from driftfilter.networks.norm_rules import NormRule
from driftfilter.recipe import Recipe

TIMEOUT = timedelta(seconds=30)  # until a rank that does not answer is given up


@final
@dataclass(frozen=True, eq=False)
class Sharded(ModelAround):
    """A model of this rank's samples as one of all ranks' samples: logits of all, and their
    derivatives.

    Jᵀ c = Σ_r J_rᵀ c_r over the shards r; for this process alone it is the model itself.
    """

    def __call__(self, theta: Tensor, inputs: Inputs) -> Tensor:
        return _whole().cat(self.model(theta, inputs))

    def pullback(self, theta: Tensor, inputs: Inputs) -> tuple[Tensor, Pullback]:
        logits, inner = self.model.pullback(theta, inputs)
        return _whole().cat(logits), _ShardedPullback(inner)

    def pushforward(self, theta: Tensor, inputs: Inputs, tangents: Tensor) -> Tensor:
        return _whole().cat(self.model.pushforward(theta, inputs, tangents), 1)


class _ShardedPullback(PullbackAround):
    def __call__(self, cotangents: Tensor) -> Tensor:
        shards = _whole()
        return shards.cat(self.inner(shards.own(cotangents, -2)), -2)

    def total(self, cotangents: Tensor) -> Tensor:
        shards = _whole()
        return shards.ranks.total(self.inner.total(shards.own(cotangents)))


def _whole() -> Shards:
    shards = current()
    assert shards is not None, "a sharded model is called within a call of its adapter only"
    return shards


def shard_model(model: PredictiveModel) -> PredictiveModel:
    """The model over all ranks' samples; a head stands on features, which are gathered already
    (features.py).
    """
    return model if isinstance(model, OnFeatures) else Sharded(model)


# Meeting


def join(
    distributed: bool | dist.ProcessGroup, recipe: Recipe, window: int, update_every: int
) -> ProcessRanks | None:
    """The ranks of a stream: those of a process group or, for True, of a new one of all processes
    with a timeout of 30 s.
    """
    if distributed is False:
        return None
    require(
        distributed is True or isinstance(distributed, dist.ProcessGroup),
        "adapt: distributed",
        distributed,
        "True, False or a process group",
    )
    apart = "run an adapter of its own in each process"
    require(
        recipe.chunk == 0,
        "adapt: recipe",
        f"chunk={recipe.chunk}",
        f"without chunks, each a step of its own; {apart}",
    )
    require(
        recipe.buffer is None,
        "adapt: recipe",
        recipe.buffer,
        f"a recipe without a buffer, which would keep samples of other ranks; {apart}",
    )
    require(
        not isinstance(recipe.statistics, NormRule),
        "adapt: recipe",
        recipe.statistics,
        f"of statistics that ranks can add up, not by a rule of one's own; {apart}",
    )
    require(
        not looks(recipe.observation.weighting),
        "adapt: recipe",
        recipe.observation.weighting,
        f"a recipe whose weighting sees logits alone, not inputs of other ranks; {apart}",
    )
    require(
        window == 0,
        "adapt: window",
        window,
        f"0 if a stream is distributed: it is for streams of few samples; {apart}",
    )
    require(
        update_every == 1,
        "adapt: update_every",
        update_every,
        "1 if a stream is distributed: a checkpoint of one rank would lack the samples that "
        "others wait with",
    )
    require(
        dist.is_available() and dist.is_initialized(),
        "adapt: distributed",
        distributed,
        "False until torch.distributed.init_process_group() has been called",
    )
    return (
        ProcessRanks(dist.new_group(timeout=TIMEOUT), own=True)
        if distributed is True
        else ProcessRanks(distributed)
    )


def require_same(ranks: ProcessRanks, facts: Mapping[str, Any]) -> None:
    """Raise, on every rank, unless all of these are the same on all ranks."""
    digests = [hashlib.sha256(str(fact).encode()).digest()[:8] for fact in facts.values()]
    own = [int.from_bytes(digest, "little", signed=True) for digest in digests]
    every = ranks.gather(torch.tensor(own, device=ranks.device)).tolist()
    for rank, theirs in enumerate(every):
        wrong = [
            name for name, mine, first in zip(facts, theirs, every[0], strict=True) if mine != first
        ]
        require(
            not wrong,
            "adapt: distributed",
            f"another {' and '.join(wrong)} on rank {rank} than on rank 0",
            "of one kind",
        )


@contextmanager
def share_call(
    ranks: ProcessRanks, inputs: Inputs, call: str, facts: Mapping[str, int]
) -> Iterator[Inputs]:
    """A call of all ranks, each with a shard that may be empty; refused on all of them if it is
    on one, or facts differ.

    The inputs are new tensors (what is known of a batch must not depend on the rank), a sample that
    does not count for none.
    """
    problem: Exception | None = None
    try:
        samples, inputs = _count_samples(inputs)
    except Exception as error:  # to be raised when the others know
        problem, samples = error, 0
    own = torch.tensor(
        [problem is not None, samples, _CALLS.index(call), *facts.values()], device=ranks.device
    )
    failed, sizes, calls, *known = ranks.gather(own).T.tolist()
    if problem is not None:
        raise problem
    refusing = [rank for rank, refuses in enumerate(failed) if refuses]
    require(
        not refusing,
        "inputs",
        f"a shard that rank {refusing} refused",
        "usable on every rank: nothing was changed",
    )
    for what, numbers in {
        "call": [_CALLS[number] for number in calls],
        **dict(zip(facts, known, strict=True)),
    }.items():
        require(
            len(set(numbers)) == 1,
            f"the {what} of the ranks",
            numbers,
            "the same on all: what one calls, resets or loads, all do",
        )
    require(
        sum(sizes) > 0,
        "inputs",
        "no sample on any rank",
        "a batch [n, ...] with n >= 1 over all ranks",
    )
    try:
        with among(Shards(ranks, tuple(sizes))):
            yield inputs
    except (NotFiniteError, NotPositiveDefiniteError, RankError):
        raise  # of numbers that all ranks have: they raise it too
    except BaseException as error:  # an interruption too
        ranks.leave(f"{type(error).__name__}: {error}")
        raise


_CALLS = ("adapter(x)", "predict", "update")


def _count_samples(inputs: Inputs) -> tuple[int, Inputs]:
    """How many samples there are, and inputs to compute with: zeros for one sample if there is
    none.
    """
    samples = batch_size(inputs)
    if samples == 0:
        filled = each(
            inputs,
            lambda part: (
                part.new_zeros(1, *part.shape[1:]) if part.dim() and not len(part) else part
            ),
        )
        return 0, check_inputs(filled)
    return samples, each(check_inputs(inputs), lambda part: part.view_as(part))


# What a stream goes on by, as a checkpoint names it: what it is, and how its names begin.
_KINDS = (
    ("belief", "belief.mean"),
    ("covariance", "belief."),
    ("statistics", "memory.network."),
    ("memory", "memory."),
    ("source", "source."),
    ("monitor", "monitor."),
    ("state", ""),
)


def digest(ranks: ProcessRanks, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Checksums (CRC-32) of named tensors, with their names, dtypes and shapes, by what they are.

    States are values: the bits of a tensor that the call before had too are not read again.
    """
    new = [tensor for tensor in tensors.values() if id(tensor) not in ranks.digests]
    sums = (
        (id(tensor), (tensor, crc32(bits))) for tensor, bits in zip(new, _read(new), strict=True)
    )
    known = {**ranks.digests, **dict(sums)}
    ranks.digests = {id(tensor): known[id(tensor)] for tensor in tensors.values()}
    found = dict.fromkeys((kind for kind, _ in _KINDS), 0)
    for name, tensor in sorted(tensors.items()):
        kind = next(kind for kind, start in _KINDS if name.startswith(start))
        told = f"{name} {tensor.dtype} {list(tensor.shape)} {known[id(tensor)][1]}"
        found[kind] = crc32(told.encode(), found[kind])
    return found


def _read(tensors: Sequence[Tensor]) -> list[memoryview]:
    """Their bytes; those on a GPU come in one copy, because each would wait for its queue."""
    flat = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    away = [part for part in flat if part.is_cuda]
    if away:
        here = iter(torch.cat(away).cpu().split([len(part) for part in away]))
        flat = [next(here) if part.is_cuda else part for part in flat]
    return [part.numpy().data for part in flat]

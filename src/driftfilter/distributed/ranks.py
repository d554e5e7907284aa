"""The processes of one stream, and what happens when one of them is gone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Self


class RankError(RuntimeError):
    """Another rank is gone, or did not answer in time: the call has changed nothing, and no other
    can follow.
    """


@final
class ProcessRanks:
    """The processes of one stream; ``own``: nobody else uses their group."""

    def __init__(self, group: dist.ProcessGroup, own: bool = False) -> None:
        self._group, self._own = group, own
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.device = torch.device(
            "cuda" if "nccl" in dist.get_backend(group) else "cpu"
        )  # where small numbers travel
        self._failed = ""
        # Checksums of the tensors of the last call, by id; the tensors are kept, so that an id
        # stays theirs.
        self.digests: dict[int, tuple[Tensor, int]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # the same processes

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "an adapter of a distributed stream belongs to its processes: save it with "
            "driftfilter.save"
        )

    def gather(self, tensor: Tensor) -> Tensor:
        """What every rank has, of one shape [...] everywhere: [ranks, ...]."""
        pieces = [
            torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for _ in range(self.size)
        ]
        with self._answering():
            dist.all_gather(pieces, tensor.contiguous(), group=self._group)
        return torch.stack(pieces)

    def total(self, tensor: Tensor) -> Tensor:
        """Its sum over the ranks, the same to the last bit on each."""
        summed = tensor.clone(memory_format=torch.contiguous_format)
        with self._answering():
            dist.all_reduce(summed, group=self._group)
        return summed

    def leave(self, reason: str) -> None:
        """Take no further part: this rank failed in the middle of a call, and the others wait for
        what will not come.

        Where nobody else uses the group its connections are closed, which tells them at once.
        """
        self._failed = reason
        if self._own:
            self._own = False
            dist.destroy_process_group(self._group)
            del self._group

    @contextmanager
    def _answering(self) -> Iterator[None]:
        if self._failed:
            raise RankError(
                f"rank {self.rank} of {self.size} is alone since a call before failed: "
                f"{self._failed}"
            )
        try:
            yield
        except RuntimeError as error:
            self._failed = str(error).partition("\n")[0]
            raise RankError(
                f"rank {self.rank} of {self.size} got no answer from another rank: it has ended "
                "or failed, or was too slow;"
                f" the belief is that before this call, and may be saved ({self._failed})"
            ) from error

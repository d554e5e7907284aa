"""A network's passes as CUDA graphs: for batches of one shape, a forward and a backward pass are
one launch each.

Small batches wait for Python to launch hundreds of kernels. The first batch of a shape runs as
ever, the second is captured, all others are replayed with their own θ, inputs and carried
statistics. A capture serves one pullback at a time. Shapes that come when there are captures enough
run as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

import torch
from torch import Tensor

from driftfilter.base.inputs import Inputs, each, parts, tensors
from driftfilter.model.predictive import Pullback
from driftfilter.networks.autocast import autocast_of_model

if TYPE_CHECKING:
    from driftfilter.networks.network import Network, NetworkPullback

Question: TypeAlias = Literal["rows", "total"]
Key: TypeAlias = tuple[Any, ...]
_PLAIN = (type(None), bool, int, float, str)
_MOST = 16  # captures of a thread, each with memory of its own: texts may come in any length
_WARM = 3  # passes before a capture: cuDNN's trials and kernels' compilation cannot be captured


def key_of(theta: Tensor, inputs: Inputs, output: Callable[..., Any]) -> Key:
    """What a capture is good for: batches of one shape, dtype and layout in the same places, under
    one autocast.
    """
    return (
        theta.dtype,
        theta.device,
        # Of a tensor its form, of anything else all of it.
        *(
            (name, part.shape, part.stride(), part.dtype)
            if isinstance(part, Tensor)
            else (name, type(part), part)
            for name, part in parts(inputs)
        ),
        autocast_of_model(),
        output,
    )


def possible(theta: Tensor, inputs: Inputs) -> bool:
    """Whether all of a batch is on the GPU, but for plain values, by which captures can be told
    apart.
    """
    return theta.is_cuda and all(
        part.is_cuda if isinstance(part, Tensor) else isinstance(part, _PLAIN)
        for _, part in parts(inputs)
    )


@final
class Capture:
    """One forward pass and the backward pass that answers one kind of question."""

    def __init__(self, network: Network, theta: Tensor, inputs: Inputs, question: Question) -> None:
        self.theta, self.inputs = theta.clone(), each(inputs, torch.clone)
        carried = network.carried()
        self.statistics = None if carried is None else tuple(part.clone() for part in carried)
        static = network if self.statistics is None else network.carrying(*self.statistics)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM):
                logits, pull = static.eager(self.theta, self.inputs)
                answer(pull, torch.randn_like(logits), question)
        torch.cuda.current_stream().wait_stream(stream)
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.forward, capture_error_mode="thread_local"):
            self.logits, pull = static.eager(self.theta, self.inputs)
        self.memory, self.coupled = pull.memory, pull.is_coupled
        self.cotangents = torch.zeros_like(self.logits)
        with torch.cuda.graph(
            self.backward, pool=self.forward.pool(), capture_error_mode="thread_local"
        ):
            self.answer = answer(pull, self.cotangents, question)

    def run(
        self, network: Network, theta: Tensor, inputs: Inputs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits [n, k], and what the network carries on."""
        self.theta.copy_(theta)
        for own, given in zip(tensors(self.inputs), tensors(inputs), strict=True):
            own.copy_(given)
        if self.statistics is not None:
            carried = network.carried()
            assert carried is not None
            for own, given in zip(self.statistics, carried, strict=True):
                own.copy_(given)
        self.forward.replay()
        return self.logits.clone(), {name: value.clone() for name, value in self.memory.items()}

    def ask(self, cotangents: Tensor) -> Tensor:
        """Rows [n, d] or their total [d], of the pass that ran last."""
        self.cotangents.copy_(cotangents)
        self.backward.replay()
        return self.answer.clone()


def answer(pull: NetworkPullback, cotangents: Tensor, question: Question) -> Tensor:
    """Rows or total of an ordinary pullback."""
    return pull(cotangents) if question == "rows" else pull.total(cotangents)


@final
class Captures:
    """Those of one thread, by what they are good for, and what was asked lately."""

    def __init__(self) -> None:
        self._free: dict[tuple[Key, Question], list[Capture]] = {}
        self._made = 0
        self._asked: dict[Key, Question | None] = {}

    def note(self, key: Key, question: Question | None) -> None:
        """What a pullback was asked; None: several things, which no capture answers."""
        self._asked[key] = question

    def take(
        self, network: Network, key: Key, theta: Tensor, inputs: Inputs
    ) -> tuple[Capture, Question] | None:
        """One that is free, or a new one; None if it is not yet known what will be asked, or
        there are enough.
        """
        question = self._asked.get(key)
        if question is None:
            return None
        free = self._free.setdefault((key, question), [])
        if not free:
            if self._made >= _MOST:
                return None
            free.append(Capture(network, theta, inputs, question))
            self._made += 1
        return free.pop(), question

    def give_back(self, key: Key, question: Question, capture: Capture) -> None:
        """It is free for another pass."""
        self._free[key, question].append(capture)


@final
class CapturedPullback(Pullback):
    """Answers the question that the capture is for, once; any other by an ordinary pass."""

    def __init__(
        self,
        network: Network,
        theta: Tensor,
        inputs: Inputs,
        captures: Captures,
        key: Key,
        taken: tuple[Capture, Question],
    ) -> None:
        self._network, self._theta, self._inputs = network, theta, inputs
        self._captures, self._key = captures, key
        self._taken: tuple[Capture, Question] | None = taken
        self.logits, self.memory = taken[0].run(network, theta, inputs)
        self.is_coupled = taken[0].coupled

    def _answer(self, cotangents: Tensor, question: Question) -> Tensor:
        if self._taken is None or cotangents.dim() != 2 or self._taken[1] != question:
            self._captures.note(self._key, question if cotangents.dim() == 2 else None)
            return answer(self._network.eager(self._theta, self._inputs)[1], cotangents, question)
        found = self._taken[0].ask(cotangents)
        self._release()
        return found

    def _release(self) -> None:
        if self._taken is not None:
            (capture, question), self._taken = self._taken, None
            self._captures.give_back(self._key, question, capture)

    def __call__(self, cotangents: Tensor) -> Tensor:
        return self._answer(cotangents, "rows")

    def total(self, cotangents: Tensor) -> Tensor:
        return self._answer(cotangents, "total")

    def __del__(self) -> None:
        self._release()

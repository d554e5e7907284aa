"""A network's passes as CUDA graphs: for batches of one shape, a forward and a backward pass are
one launch each.

Small batches wait for Python to launch hundreds of kernels. The first batch of a shape runs as
ever, the second is captured, all others are replayed with their own θ, inputs and carried
statistics. A capture serves one pullback at a time, and between two of them passes that only
predict, such as a monitor's probes. Shapes that come when there are captures enough run as ever,
and a capture that no batch has used for long is freed.

If nobody has asked for graphs, a shape is captured only after three batches of it in a row, and
what the capture answers is held against an ordinary pass. A network that cannot be captured, or
answers otherwise, runs as ever from then on.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

import torch
from torch import Tensor

from driftfilter.base.inputs import Inputs, each, parts, tensors
from driftfilter.model.predictive import Pullback
from driftfilter.networks.autocast import autocast_of_model
from driftfilter.networks.row_check import tolerance_of

if TYPE_CHECKING:
    from driftfilter.networks.network import Network, NetworkPullback

Question: TypeAlias = Literal["rows", "total"]
Key: TypeAlias = tuple[Any, ...]
_PLAIN = (type(None), bool, int, float, str)
_MOST = 16  # captures of a thread, each with memory of its own: texts may come in any length
_WARM = 3  # passes before a capture: cuDNN's trials and kernels' compilation cannot be captured
_REPEATS = 3  # batches of a shape in a row before a capture that nobody has asked for
_STALE = 200  # batches after which a capture that none of them used is freed
GRAPHS = "graphs"


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


def try_capture(
    network: Network, theta: Tensor, inputs: Inputs, question: Question
) -> tuple[Capture | None, str]:
    """A capture that answers as an ordinary pass does, or why there is none."""
    stream = torch.cuda.current_stream() if theta.is_cuda else None
    try:
        made = Capture(network, theta, inputs, question)
    except Exception as error:  # whatever a module of somebody's own does
        if stream is not None:
            torch.cuda.set_stream(stream)  # a capture that fails stays on its own
        return None, f"{type(error).__name__}: {error}".splitlines()[0][:120]
    logits, _ = made.run(network, theta, inputs)
    cotangents = torch.randn_like(logits)
    found = (logits, made.ask(cotangents))
    logits, pull = network.eager(theta, inputs)
    pairs = zip(found, (logits, answer(pull, cotangents, question)), strict=True)
    if all(_agree(own, wanted) for own, wanted in pairs):
        return made, ""
    return None, "the network answers otherwise when it is replayed"


def _agree(own: Tensor, wanted: Tensor) -> bool:
    tolerance = tolerance_of(wanted.dtype, wanted.device)
    return bool((own - wanted).abs().max() <= tolerance * (1e-6 + wanted.abs().max()))


@final
class Captures:
    """Those of one thread, by what they are good for, and what was asked lately.

    ``refused``: where it is noted why graphs do not fit the network; None if somebody has asked for
    them, and is to see what goes wrong.
    """

    def __init__(self, refused: MutableMapping[str, str] | None = None) -> None:
        self._free: dict[tuple[Key, Question], list[Capture]] = {}
        self._made: dict[tuple[Key, Question], int] = {}
        self._used: dict[tuple[Key, Question], int] = {}  # by which batch lately
        self._asked: dict[Key, Question | None] = {}
        self._refused = refused
        self._batches = 0
        self._last: tuple[Key, int] | None = None  # the latest shape, how often in a row

    def note(self, key: Key, question: Question | None) -> None:
        """What a pullback was asked; None: several things, which no capture answers."""
        self._asked[key] = question

    def take(
        self, network: Network, key: Key, theta: Tensor, inputs: Inputs
    ) -> tuple[Capture, Question] | None:
        """One that is free, or a new one; None if it is not yet known what will be asked, or
        there are enough.
        """
        repeats = self._count(key)
        question = self._asked.get(key)
        if question is None:
            return None
        own = (key, question)
        free = self._free.setdefault(own, [])
        if not free:
            made = None
            if sum(self._made.values()) < _MOST:
                made = self._make(network, theta, inputs, question, repeats)
            if made is None:
                return None
            self._made[own] = self._made.get(own, 0) + 1
            free.append(made)
        self._used[own] = self._batches
        return free.pop(), question

    def replay(self, network: Network, key: Key, theta: Tensor, inputs: Inputs) -> Tensor | None:
        """Logits [n, k] of a pass that nobody pulls back, by one that is free; none is made."""
        question = self._asked.get(key)
        free = None if question is None else self._free.get((key, question))
        return free[-1].run(network, theta, inputs)[0] if free else None

    def _make(
        self, network: Network, theta: Tensor, inputs: Inputs, question: Question, repeats: int
    ) -> Capture | None:
        if self._refused is None:
            return Capture(network, theta, inputs, question)
        if GRAPHS in self._refused or repeats <= _REPEATS:
            return None
        made, why = try_capture(network, theta, inputs, question)
        if made is None:
            self._refused[GRAPHS] = why
        return made

    def _count(self, key: Key) -> int:
        """How often this shape has come in a row; captures that nobody uses go."""
        self._batches += 1
        repeats = self._last[1] + 1 if self._last is not None and self._last[0] == key else 1
        self._last = key, repeats
        for own in [own for own, used in self._used.items() if self._batches - used > _STALE]:
            self._made[own] -= len(self._free.pop(own, ()))  # one that is out comes back
            del self._used[own]
        return repeats

    def give_back(self, key: Key, question: Question, capture: Capture) -> None:
        """It is free for another pass."""
        self._free.setdefault((key, question), []).append(capture)
        self._used.setdefault((key, question), self._batches)


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

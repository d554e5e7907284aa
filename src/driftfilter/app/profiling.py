"""Where the time of a step goes on somebody's own network, and what would help."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.adapter.adapter import Adapter
from driftfilter.adapter.speed import BFLOAT16, Measure, Speed, has_bfloat16
from driftfilter.networks import cuda_graphs, network
from driftfilter.networks.features import OnFeatures
from driftfilter.networks.parameters import Chosen
from driftfilter.networks.prototypes import Prototypes
from driftfilter.networks.step_graphs import StepGraphs

_WARM, _STEPS = 4, 8  # steps before, and those measured: a round of what comes now and then
_RECORDING = 12  # steps before on a GPU, where the fifth is recorded
_MUCH = 0.1  # of a step is worth a word
_LEAST = 8  # of the sides of images that are made smooth
Seam: TypeAlias = tuple[Any, str, str]  # a class, its method, and the part of a step that it is

# What is called within one of the last three is theirs.
PARTS = {
    "graph": "the whole step as one CUDA graph",
    "forward": "the pass that learns",
    "backward": "its gradient",
    "rows": "gradients of single samples",
    "conditioning": "the new belief from rows or gradient",
    "statistics": "how far the batch is from the source, by its own pass in every fourth step",
    "monitor": "alarms, with passes of the source now and then",
    "domains": "which domain each sample is of",
    "labels": "labels in runs, expected accuracy",
    "rest": "prediction, checks, Python",
}
_WHOLE = ("statistics", "monitor", "domains", "labels")


class Profile(NamedTuple):
    """Milliseconds of a step."""

    preset: str
    batch: int
    device: str
    parts: dict[str, float]  # by the names of PARTS
    forward: float  # the model alone
    both: float | None  # with a backward pass to the adapted parameters; None: there are none
    measures: tuple[Measure, ...]
    advice: list[str]

    @property
    def step(self) -> float:
        """The whole step."""
        return sum(self.parts.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        measures = [measure._asdict() for measure in self.measures]
        return {**self._asdict(), "measures": measures, "step": self.step}


class _Stopwatch:
    """Time by part; what is called within a part is another's, unless the part is told whole."""

    def __init__(self, device: torch.device) -> None:
        self.spent = dict.fromkeys(PARTS, 0.0)
        self._stack, self._device = ["rest"], device
        self._last = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def enter(self, part: str) -> None:
        """A part begins."""
        self._count()
        self._stack.append(self._stack[-1] if self._stack[-1] in _WHOLE else part)

    def leave(self) -> None:
        """It ends."""
        self._count()
        self._stack.pop()

    def take(self, call: Callable[[Tensor], Any], inputs: Tensor) -> float:
        """Seconds of something that is no part of a step."""
        self._count()
        call(inputs)
        spent, self._last = self._now() - self._last, self._now()
        return spent

    def _count(self) -> None:
        now = self._now()
        self.spent[self._stack[-1]] += now - self._last
        self._last = now


def profile(
    model: nn.Module, batches: Sequence[Tensor], preset: str = "driftfilter", speed: Speed = "exact"
) -> Profile:
    """The parts of a step on batches of one size, one after the other; means over eight steps after
    four to warm up.
    """
    adapter, device = df.adapt(model, preset, speed=speed), batches[0].device
    warm = _RECORDING if device.type == "cuda" else _WARM
    for step in range(warm):
        adapter(batches[step % len(batches)])
    # An inference is of any class.
    seams: list[Seam] = [*_SEAMS, (type(adapter.recipe.inference), "__call__", "conditioning")]
    floors = [torch.no_grad()(model), _by_hand(model, adapter.recipe)]
    spent = [0.0, 0.0]
    with _timing(seams, device) as watch:
        for step in range(_STEPS):  # in turn, so that what else runs on the machine hits all alike
            batch = batches[(warm + step) % len(batches)]
            adapter(batch)
            for place, floor in enumerate(floors):
                spent[place] += 0.0 if floor is None else watch.take(floor, batch)
    parts = {name: 1000 * own / _STEPS for name, own in watch.spent.items()}
    forward, both = (1000 * own / _STEPS for own in spent)
    found = Profile(
        preset,
        len(batches[0]),
        device.type,
        parts,
        forward,
        None if floors[1] is None else both,
        adapter.measures,
        [],
    )
    return found._replace(advice=_advise(found, device))


_SEAMS: list[Seam] = [
    (StepGraphs, "begin", "graph"),
    (StepGraphs, "step", "graph"),
    (network.Network, "_graph", "forward"),
    (network.Network, "__call__", "forward"),
    (network.Network, "_memory", "statistics"),
    (network.Network, "probe", "statistics"),
    (network.NetworkPullback, "__call__", "rows"),
    (network.NetworkPullback, "total", "backward"),
    (network._Graph, "backward", "backward"),
    (Chosen, "rows", "rows"),
    (cuda_graphs.CapturedPullback, "__init__", "forward"),
    (cuda_graphs.CapturedPullback, "_answer", "backward"),
    (OnFeatures, "features", "forward"),
    (Adapter, "_watch", "monitor"),
    (Adapter, "_divide", "domains"),
    (Adapter, "_put_in_order", "labels"),
    (Adapter, "_believe", "labels"),
]


@contextmanager
def _timing(seams: Sequence[Seam], device: torch.device) -> Iterator[_Stopwatch]:
    """Have methods tell a stopwatch when they begin and end."""
    watch = _Stopwatch(device)
    before = [(kind, name, kind.__dict__[name]) for kind, name, _ in seams if name in vars(kind)]
    parts = {(kind, name): part for kind, name, part in seams}
    try:
        for kind, name, method in before:
            setattr(kind, name, _told(method, watch, parts[kind, name]))
        yield watch
    finally:
        for kind, name, method in before:
            setattr(kind, name, method)


def _told(method: Callable[..., Any], watch: _Stopwatch, part: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        watch.enter(part)
        try:
            return method(*args, **kwargs)
        finally:
            watch.leave()

    return run


def make_batches(
    batch: int, shape: tuple[int, ...], count: int = _RECORDING + _STEPS
) -> list[Tensor]:
    """Random samples; images are smooth, of several brightnesses, for noise alone, and batches that
    come again, are taken for several domains.
    """
    generator = torch.Generator().manual_seed(0)
    if len(shape) != 3 or min(shape[1:]) < _LEAST:
        return [torch.rand(batch, *shape, generator=generator) for _ in range(count)]
    coarse = [max(2, side // 4) for side in shape[1:]]
    found = []
    for _ in range(count):
        pixels = torch.rand(batch, shape[0], *coarse, generator=generator)
        smooth = nn.functional.interpolate(pixels, shape[1:], mode="bilinear")
        noise = torch.randn(batch, *shape, generator=generator) / 20
        contrast = torch.randn(batch, 1, 1, 1, generator=generator).mul(0.2).exp()
        light = 0.1 * torch.randn(batch, 1, 1, 1, generator=generator)
        found.append((smooth - 0.5 + noise) * contrast + 0.5 + light)
    return found


def _by_hand(model: nn.Module, recipe: df.Recipe) -> Callable[[Tensor], None] | None:
    """A forward and a backward pass to the adapted parameters; None if nothing is adapted so."""
    if isinstance(recipe.inference, df.Frozen) or isinstance(recipe.parameters, Prototypes):
        return None
    own = copy.deepcopy(model).requires_grad_(False)
    names = df.select(own, recipe.parameters)
    wanted = [tensor.requires_grad_() for name, tensor in own.named_parameters() if name in names]

    def run(batch: Tensor) -> None:
        with torch.enable_grad():
            logs = own(batch).log_softmax(-1)
            torch.autograd.grad(-(logs.exp() * logs).sum(-1).mean(), wanted, allow_unused=True)

    return run


def _advise(found: Profile, device: torch.device) -> list[str]:
    """What would make the step shorter, the surest first."""
    on = {measure.name for measure in found.measures if measure.is_on}
    floor = found.forward if found.both is None else found.both
    advice = []
    if BFLOAT16 not in on and has_bfloat16(device):
        advice.append("speed='fast': the model in bfloat16")
    own = found.parts["rest"] + found.parts["conditioning"] + found.parts["labels"]
    if own > 0.5 * floor:
        advice.append(
            "larger batches, or update_every=: what the filter does beside the passes takes "
            f"{own:.3g} ms"
        )
    shares = {name: spent / found.step for name, spent in found.parts.items()}
    optional = {
        "monitor": "monitor=None: no alarms",
        "domains": "domains=None: one belief for all domains",
        "labels": "labels=None: samples in no order",
        "statistics": "shift=0.0: statistics follow the stream at home, too",
    }
    advice += [
        f"{what} ({shares[name]:.0%} of the step)"
        for name, what in optional.items()
        if shares[name] > _MUCH
    ]
    return advice or ["nothing that is not on already; the network itself takes the time"]


def describe(found: Profile) -> list[str]:
    """A profile as lines for a terminal."""
    whole = found.step
    lines = [
        f"a step of {found.preset!r}, batches of {found.batch} on {found.device}, "
        f"{torch.get_num_threads()} threads",
        *(
            f"  {name:<14}{found.parts[name]:>9.2f} ms{found.parts[name] / whole:>6.0%}  {what}"
            for name, what in PARTS.items()
        ),
        f"  {'whole':<14}{whole:>9.2f} ms",
    ]
    floor = f"floor: forward pass alone {found.forward:.2f} ms"
    if found.both is not None:
        floor += (
            f", forward and backward alone {found.both:.2f} ms: the step takes "
            f"{whole / found.both:.2f} ×"
        )
    else:
        floor += f": the step takes {whole / found.forward:.2f} ×"
    return [
        *lines,
        floor,
        f"for speed: {', '.join(map(str, found.measures))}",
        *(f"would help: {each}" for each in found.advice),
    ]

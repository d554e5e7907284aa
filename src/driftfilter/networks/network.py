"""A torch module as a predictive model: a flat θ for the selected parameters, everything else
frozen.

The user's module is never changed: it is called through a twin, a module tree of its own that
shares its tensors, one for each thread. Per-sample gradient rows come from one backward pass, from
what flows in and out of each layer. With batch statistics the samples of a batch are coupled: row i
is then the part of the batch's gradient that enters through sample i's own use of a parameter (rows
still sum to the exact batch gradient). Parameters of layers without a rule for rows get theirs from
a forward pass for each sample, which needs samples that are not coupled.

Rows suppose that a parameter is used by its layer only, and that the first dimension of what a
layer sees is that of the samples, or a multiple of it with those of a sample together. The first
backward pass proves it (row_check.py); if it does not hold, as in a head tied to an embedding by
a functional call or a layer that sees tokens first, rows come from a forward pass for each sample
too. Layers beside a recurrent or attention layer that is not ``batch_first`` are taken to see
sequences first.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn

from driftfilter.base.checks import require, warn
from driftfilter.base.inputs import (
    Inputs,
    arguments,
    batch_size,
    doubt,
    each,
    pick_logits,
    require_logits,
    sample,
)
from driftfilter.base.memory import remembered
from driftfilter.base.sharding import gather_samples, total_samples
from driftfilter.model.label_chain import RUNS
from driftfilter.model.label_runs import trust_in_shares
from driftfilter.model.predictive import PredictiveModel, Pullback
from driftfilter.networks.autocast import as_called, cast, dtype_of, forward_mode
from driftfilter.networks.batch_norm import (
    Ema,
    RunningStatistics,
    Statistics,
    diversity,
    require_statistics,
)
from driftfilter.networks.batch_trust import SHIFT, doubt_of, novelty
from driftfilter.networks.cuda_graphs import CapturedPullback, Captures, Question, key_of, possible
from driftfilter.networks.features import catch_features, find_head, take_features
from driftfilter.networks.layout import Layout
from driftfilter.networks.norm_rules import NormRule
from driftfilter.networks.parameters import Chosen, NormAffine, Selection, select
from driftfilter.networks.row_check import some, tolerance_of, wrong_rows
from driftfilter.networks.sample_gradients import cast_call
from driftfilter.networks.shared_copy import (
    Local,
    Pattern,
    Record,
    Twin,
    pattern_of,
    require_values,
    twin,
)
from driftfilter.networks.shared_pass import SharedPass

Memory: TypeAlias = Mapping[str, Tensor]
_TOGETHER = 4  # tangents that share a forward pass; more of them take as long and more memory
# In the memory: means, then variances, of every batch norm [2 · channels].
STATISTICS = remembered("network.statistics", "c")
# In the memory, if Ema asks for it: D of the last batch observed [].
DIVERSITY = remembered("network.diversity")
_WINDOW = 32
_EVERY = 4  # batches of which one is probed
_NOTING = threading.Lock()  # of copies of a network in several threads
_VIEWS = 8  # shifts that are known at a time, each view of a batch has one


def ask_at_once(memory: Memory) -> Memory:
    """A memory by which the next batch is probed, whenever the last one was."""
    if SHIFT not in memory or memory[SHIFT][2] < 0:
        return memory
    known = memory[SHIFT].clone()
    known[2] = 0
    return {**memory, SHIFT: known}


class Facts(NamedTuple):
    """What the host knows of a shift (``SHIFT``), and Python decides by."""

    is_known: bool  # whether a batch has been probed
    place: int  # batches since then, -1 if no layer can tell

    def decide(self, stepping: bool) -> tuple[bool, ...]:
        """What a step, or a prediction, does by it."""
        return (self.is_known, self.place == 0, self.place < 0) if stepping else (self.is_known,)

    def follow(self, before: Facts | None, recorded: Facts | None) -> Facts:
        """What is known after a step on a state, if these are known after the same step on another
        one of which ``recorded`` was known before: Python decides the same of both.
        """
        if before is None or recorded is None or self.place < 0:
            return self
        return Facts(self.is_known, (before.place + self.place - recorded.place) % _EVERY)


class _Looked(NamedTuple):
    """A shift (``SHIFT``) and what decides the way of a batch, known to the host."""

    shift: Tensor
    is_known: bool  # whether a batch has been probed
    place: int  # batches since then, -1 if no layer can tell


@dataclass
class _Graph:
    """A forward pass that can be differentiated once more."""

    logits: Tensor  # [n, k]
    leaves: dict[str, Tensor]  # pieces of θ
    tensors: dict[str, Tensor]  # the module's, made of them
    own: Twin
    records: list[Record]
    memory: Memory

    def backward(self, cotangents: Tensor, retain: bool = False) -> dict[str, Tensor | None]:
        """Gradients by piece; None if a piece was not used."""
        leaves = list(self.leaves.values())
        with self.own.holding(self.tensors):  # checkpointed segments run again
            gradients = torch.autograd.grad(
                self.logits, leaves, cotangents, retain_graph=retain, allow_unused=True
            )
        return dict(zip(self.leaves, gradients, strict=True))


@final
class Network(PredictiveModel):
    """p(y given x, θ) of a module, θ the selected parameters one after the other.

    ``statistics``: batch normalisation by the "batch" it sees, by the running statistics of the
    "source", or by a blend of both, ``PseudoCount``, ``Ema`` or ``RunningStatistics``. A layer that
    sees one value a channel has no variance, and uses the source's; one without running statistics
    always uses the batch's. ``output`` picks the logits out of what the module returns; without it
    they are the result, its ``logits``, or its only element. ``observed`` picks what the loss sees,
    if that is something else [n, any]: the outputs of a head of its own for self-supervision, or
    logits and features side by side. The diversity of a batch (``Ema``) is that of the logits even
    then. Inputs are a tensor, a tuple or list (positional arguments) or a mapping (keyword
    arguments). θ is float32, or float64 if the module is; floating inputs get the module's dtype
    except under autocast.
    """

    def __init__(
        self,
        model: nn.Module,
        selection: Selection | None = None,
        statistics: Statistics = "batch",
        output: Callable[[Any], Tensor] | None = None,
        observed: Callable[[Any], Tensor] | None = None,
    ) -> None:
        require(isinstance(model, nn.Module), "Network: model", model, "a torch module")
        require_statistics(statistics)
        self.statistics = statistics
        # Whether what is carried depends on no trust in a batch.
        self._carries_all = isinstance(statistics, (NormRule, RunningStatistics))
        # What is asked for; and the logits of classes, always.
        self.output = self._classifying = output or pick_logits
        self._base = twin(model)  # never called: every thread takes its own twin of it
        self.chosen: Chosen = select(self._base, selection or NormAffine())
        self._shapes = {name: tensor.shape for name, tensor in self.chosen.items()}
        self.sizes = [tensor.numel() for tensor in self.chosen.values()]
        self._dtype = dtype_of(self._base)
        self._observed = observed
        self._classes: list[int] = []  # k, once it is known
        self._watched: list[int] = []  # the same of what the loss sees
        self._start = self.chosen.start()
        self._carried: Tensor | None = None
        self._trust: Tensor | float = 1.0
        if isinstance(statistics, Ema) and statistics.late < 1:
            self._trust = statistics.trust(self._start.new_ones(()), 0.0)
        self._stay: Tensor | float = 0.0  # how often a label is that of the sample before
        self._novelty: Tensor | float = 1.0
        self._looked: _Looked | None = None  # the shift, if one is known
        self._latest: list[_Looked] = []  # shifts that were looked at, the newest last
        self._settled = False  # whether batch norms blend nothing with what is carried
        self._exact = False  # whether it has the derivative of its logits under Ema, too
        self.capturing: Literal["no", "yes", "if possible"] = "no"  # passes as CUDA graphs
        self.layout: Layout | None = None  # of images, if it may be another one than theirs
        self.refused: dict[str, str] = {}  # what this module does not take -> why
        self._featuring = False  # features beside the logits
        self._head: list[str] = []  # the layer that they enter, once it is known
        self._local, self._shared = Local(), SharedPass()

    def mean(self) -> Tensor:
        """θ of the module as it was given [d]."""
        require_values(self._base)
        return self._start.clone()

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Shapes of the pieces of θ by name, in their order."""
        return self._shapes

    @property
    def observing(self) -> Network:
        """The network as the loss sees it."""
        if self._observed is None:
            return self
        other = copy.copy(self)
        other.output, other._observed, other._classes = self._observed, None, self._watched
        return other

    @property
    def exact(self) -> Network:
        """The network whose pullback is the derivative of the logits: under ``Ema`` that of the
        blend as it stands, with its shares held fixed, not that of batch renormalisation; under a
        ``NormRule`` that of a pass which predicts, not of one which learns.
        """
        if self._exact or not isinstance(self.statistics, (Ema, NormRule)):
            return self
        other = copy.copy(self)
        other._exact = True
        return other

    @property
    def by_source(self) -> Network:
        """The network whose batch norms use the running statistics of the source."""
        if self.statistics == "source":
            return self
        other = copy.copy(self)
        other.statistics, other._carries_all = "source", False
        other.capturing, other._local = "no", Local()
        other._carried, other._trust, other._novelty, other._looked = None, 1.0, 1.0, None
        other._stay = 0.0
        return other

    @property
    def settled(self) -> Network:
        """The network that normalises by the statistics it carries, or without any by the source's,
        whatever the batch has; with the "batch"'s own there is none.
        """
        if isinstance(self.statistics, str):
            return self
        other = copy.copy(self)
        other._settled = True
        return other

    def with_features(self) -> Network:
        """The network with what enters its last linear layer beside its outputs."""
        other = copy.copy(self)
        other._featuring = True
        return other

    def logits_and_features(self, theta: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        outputs = self.with_features()(theta, inputs)
        return outputs[:, : self._classes[0]], outputs[:, self._classes[0] :]

    def recall(self, memory: Memory) -> Network:
        """The model with the statistics that a memory carries; itself if it carries none."""
        if self._carries_all and STATISTICS in memory:
            return self.carrying(memory[STATISTICS], 1.0)
        if not isinstance(self.statistics, Ema) or STATISTICS not in memory:
            return self
        stay, found = memory.get(RUNS, 0.0), memory.get(DIVERSITY)
        trust = self._trust if found is None else self.statistics.trust(found, stay)
        other = self.carrying(memory[STATISTICS], trust, stay)
        asked = SHIFT in memory and self.statistics.shift > 0
        return other._knowing(self._look(memory[SHIFT])) if asked else other

    def carrying(
        self,
        statistics: Tensor,
        trust: Tensor | float,
        stay: Tensor | float = 0.0,
        novelty: Tensor | float = 1.0,
    ) -> Network:
        """The model with these statistics [2 · channels], trust in the next batch, how often a
        label stays, and the batch's novelty.
        """
        width, count = self._own().width, statistics.numel()
        if count != width:
            require(False, "carried statistics", f"{count} values", f"{width} values")
        other = copy.copy(self)
        other._carried, other._trust = statistics, trust
        other._stay, other._novelty = stay, novelty
        return other

    def _look(self, shift: Tensor) -> _Looked:
        """A shift with what the host must know of it; the one that the last batch left is known,
        for a look stops a GPU's queue.
        """
        for latest in self._latest:
            if latest.shift is shift:
                return latest
        _, samples, count = shift.tolist()
        return self._note(_Looked(shift, samples > 0, int(count)))

    def _note(self, looked: _Looked) -> _Looked:
        with _NOTING:
            self._latest[:] = [*self._latest[1 - _VIEWS :], looked]
        return looked

    def known_facts(self, memory: Memory) -> Facts | None:
        """What the host knows of a memory's shift; None if nothing depends on one."""
        asked = isinstance(self.statistics, Ema) and self.statistics.shift > 0
        if not asked or SHIFT not in memory:
            return None
        looked = self._look(memory[SHIFT])
        return Facts(looked.is_known, looked.place)

    def note_facts(self, memory: Memory, facts: Facts | None) -> None:
        """Know it of a memory whose shift nobody has to look at."""
        if facts is not None:
            self._note(_Looked(memory[SHIFT], *facts))

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """Passes are no graphs of their own in this block."""
        before, self.capturing = self.capturing, "no"
        try:
            yield
        finally:
            self.capturing = before

    def _knowing(self, looked: _Looked) -> Network:
        """The model that knows how far the stream is from the source (``SHIFT``)."""
        assert isinstance(self.statistics, Ema)
        other, shift = copy.copy(self), looked.shift
        other._looked = self._note(looked)
        if looked.is_known:
            other._novelty = novelty(shift[0] / shift[1], self.statistics.shift)
        return other

    def adapted_parameters(self, theta: Tensor) -> dict[str, Tensor]:
        """The module's parameters by name that θ makes, such as W + B A of a LoRA."""
        found = self.chosen.replacements(self._pieces(theta)) if self.chosen.targets else {}
        return {name: tensor for name, tensor in found.items() if name in self.chosen.targets}

    def adapted_statistics(self) -> dict[str, Tensor]:
        """The running statistics by name that a memory carries in the place of the source's;
        refused if they come from the batch.
        """
        own, rule = self._own(), self.statistics
        allowed = "'source', Ema or RunningStatistics: those of a batch come with it"
        carried = isinstance(rule, (Ema, RunningStatistics))
        fits = carried or not own.norms
        require(fits, "export: statistics", rule, allowed)
        if not own.blending or self._carried is None:
            return {}
        named = [
            (name, module) for name, module in own.module.named_modules() if module in own.blending
        ]
        sizes = [norm.num_features for norm in own.blending for _ in range(2)]
        pieces = iter(self._carried.split(sizes))
        return {
            f"{name}.{buffer}": next(pieces)
            for name, _ in sorted(named, key=lambda pair: own.blending.index(pair[1]))
            for buffer in ("running_mean", "running_var")
        }

    def share_pass(self, batches: Sequence[Inputs]) -> bool:
        read = self.chosen.targets or self._observed is not None or self._featuring
        if read or self.statistics != "source" or self._own().coupled:
            return False
        with torch.no_grad():
            return self._shared.run(lambda inputs: self(self._start, inputs), batches)

    def probe(self, inputs: Inputs) -> Network:
        """The model that knows of one more batch; every fourth passes through the source."""
        rule = self.statistics
        if not isinstance(rule, Ema) or rule.shift == 0 or not self._own().blending:
            return self
        looked = self._looked or _Looked(self._start.new_zeros(3), False, 0)
        known, is_known, place = looked
        samples, (*sums, count) = total_samples(batch_size(inputs)), known.unbind()
        if place < 0 or samples == 1:
            return self
        if place == 0:
            own, pieces = self._own(), self.chosen.replacements(self._pieces(self._start))
            with (
                torch.no_grad(),
                as_called(),
                own.probing() as probe,
                own.holding(pieces) as module,
            ):
                logits = self._classifying(self._ask(module, inputs))
            logits = gather_samples(logits)
            classes = diversity(logits)
            shift = probe.answer(samples, classes)
            if shift is not None and rule.doubt > 0:
                unsure = doubt_of(logits, classes).to(shift)
                shift = torch.maximum(shift, rule.shift / rule.doubt * unsure)
            fading = max(0.0, 1 - samples / _WINDOW)
            if shift is None:
                return self._knowing(_Looked(torch.stack((*sums, count - 1)), is_known, -1))
            # Far is far: a source that overflows is, and one batch must not count for many.
            far = 2 * rule.shift
            shift = shift.nan_to_num(far, far).clamp_max(far)
            found = torch.stack((samples * shift, torch.full_like(shift, samples)))
            sums, is_known = list(fading * known[:2] + found.to(known)), True
        now = torch.stack((*sums, torch.remainder(count + 1, _EVERY)))
        return self._knowing(_Looked(now, is_known, (place + 1) % _EVERY))

    def carried(self) -> tuple[Tensor, ...] | None:
        """The statistics that the next batch is blended with, the trust in it [2], how often a
        label stays, and its novelty if that is known; None if nothing is blended.
        """
        own = self._own()
        if not own.blending:
            return None
        statistics = own.start() if self._carried is None else self._carried
        trust, stay = (
            value.float()
            if isinstance(value, Tensor)
            else statistics.new_full((), value, dtype=torch.float32)
            for value in (self._trust, self._stay)
        )
        known = (self._novelty,) if isinstance(self._novelty, Tensor) else ()
        return statistics, trust.expand(2), stay, *known

    def _own(self) -> Twin:
        own: Twin | None = getattr(self._local, "twin", None)
        if own is None:
            require_values(self._base)
            own = self._local.twin = Twin(self._base, self.chosen.targets, self.statistics)
        return own

    def _pieces(self, theta: Tensor) -> dict[str, Tensor]:
        if theta.shape[-1] != (length := sum(self.sizes)):
            require(False, "belief", f"{theta.shape[-1]} parameters", f"over {length} parameters")
        named = zip(self._shapes.items(), theta.split(self.sizes), strict=True)
        return {
            name: piece if len(shape) == 1 else piece.view(shape) for (name, shape), piece in named
        }

    def _forward(
        self,
        own: Twin,
        tensors: dict[str, Tensor],
        inputs: Inputs,
        dtype: torch.dtype,
        learning: bool = False,
    ) -> tuple[Tensor, Any]:
        """Logits [n, k], and what the module returned, of which they are a part."""
        shared = None if self._featuring else self._shared.find(inputs)
        if shared is not None:
            return shared.to(dtype), None
        own.carry(self._carried, self._trust, self._novelty, self._exact, learning, self._settled)
        if own.measured and not self._settled:
            still = {name: tensor.detach() for name, tensor in tensors.items()}
            with torch.no_grad(), as_called(), own.measuring(), own.holding(still) as module:
                self._ask(module, inputs)
        seen: list[Tensor] = []
        with as_called(), own.holding(tensors) as module, self._catching(module, inputs, seen):
            outputs = self._ask(module, inputs)
            logits = self.output(outputs)
        samples = len(inputs) if isinstance(inputs, Tensor) else batch_size(inputs)
        self._require_logits(logits, samples)
        if self._featuring:
            logits = torch.cat((logits, take_features(self._head[0], seen).to(logits.dtype)), -1)
        return logits.to(dtype), outputs

    @contextmanager
    def _catching(self, module: nn.Module, inputs: Inputs, seen: list[Tensor]) -> Iterator[None]:
        """Catch what enters the last linear layer, if features are asked for."""
        if not self._featuring:
            yield
            return
        if not self._head:
            self._head.append(find_head(self._base, inputs, self._classifying))
        handle = catch_features(module.get_submodule(self._head[0]), seen)
        try:
            yield
        finally:
            handle.remove()

    def _ask(self, module: nn.Module, inputs: Inputs) -> Any:
        """What the module returns for inputs in its dtype, and its layout."""
        inputs = each(inputs, lambda tensor: cast(tensor, self._dtype))
        return _call(module, inputs if self.layout is None else self.layout.arrange(inputs))

    def lay_out(self) -> None:
        """Let images go through channels last, if the module takes them so."""

        def ask(module: nn.Module, inputs: Inputs) -> Tensor:
            return self._classifying(_call(module, inputs))

        self.layout = Layout(self._base, ask, self.refused)

    def _require_logits(self, logits: Any, samples: int) -> None:
        require_logits(logits, samples)
        if not self._classes:
            self._classes.append(logits.shape[1])
            if self.output is self._classifying and (wrong := doubt(logits.detach())):
                warn(wrong)
        if logits.shape[1] != (k := self._classes[0]):
            require(
                False,
                "the model's logits",
                f"shape {list(logits.shape)}",
                f"of {k} classes, as before",
            )

    def _memory(self, own: Twin, logits: Tensor, outputs: Any) -> Memory:
        if self._settled:
            return {}
        if self._carries_all and own.blending:
            return {STATISTICS: own.carried()}
        rule = self.statistics
        if not isinstance(rule, Ema) or not own.blending:
            return {}
        if rule.diversity == 0:
            return {STATISTICS: own.carried()}
        classes = logits[:, : self._classes[0]]
        if self.output is not self._classifying:
            with as_called():
                classes = self._classifying(outputs)
            require_logits(classes, len(logits))
        found = diversity(gather_samples(classes.detach().to(logits.dtype)))
        trust = (rule.trust(found, self._stay) * self._trust) ** 0.5
        return {STATISTICS: own.carried(trust), DIVERSITY: found}

    def __call__(self, theta: Tensor, inputs: Inputs) -> Tensor:
        return self._forward(
            self._own(), self.chosen.replacements(self._pieces(theta)), inputs, theta.dtype
        )[0]

    def _graph(self, theta: Tensor, inputs: Inputs) -> _Graph:
        own = self._own()
        records: list[Record] = []
        with torch.set_grad_enabled(bool(self.sizes)):  # or nothing is to be differentiated
            leaves = {
                name: piece.requires_grad_() for name, piece in self._pieces(theta.detach()).items()
            }
            tensors = self.chosen.replacements(leaves)
            own.records = records
            try:
                logits, outputs = self._forward(own, tensors, inputs, theta.dtype, not self._exact)
            finally:
                own.records = None
        return _Graph(logits, leaves, tensors, own, records, self._memory(own, logits, outputs))

    def pullback(
        self, theta: Tensor, inputs: Inputs
    ) -> tuple[Tensor, NetworkPullback | CapturedPullback]:
        still = self._exact or self._settled  # predictions look at no source
        known = self if still else self.probe(inputs)
        logits, pull = known._pull(theta, inputs)
        if known._looked is not None and not self._settled:
            pull.memory = {**pull.memory, SHIFT: known._looked.shift}
            pull.novelty = known._novelty * trust_in_shares(known._stay)
        return logits, pull

    def _pull(
        self, theta: Tensor, inputs: Inputs
    ) -> tuple[Tensor, NetworkPullback | CapturedPullback]:
        plain = not self._featuring and not self._carries_all
        plain = plain and not self._exact and not self._settled
        if self.capturing == "no" or not plain or not possible(theta, inputs):
            return self.eager(theta, inputs)
        captures = self._captures()
        key = (key_of(theta, inputs, self.output), isinstance(self._novelty, Tensor))
        taken = captures.take(self, key, theta, inputs)
        if taken is None:
            logits, pull = self.eager(theta, inputs)
            pull.asked = lambda question: captures.note(key, question)
            return logits, pull
        captured = CapturedPullback(self, theta, inputs, captures, key, taken)
        return captured.logits, captured

    def _captures(self) -> Captures:
        """Those of this thread."""
        known: Captures | None = self._local.__dict__.get("captures")
        if known is None:
            refused = self.refused if self.capturing == "if possible" else None
            known = self._local.__dict__["captures"] = Captures(refused)
        return known

    def eager(self, theta: Tensor, inputs: Inputs) -> tuple[Tensor, NetworkPullback]:
        """A pullback by a pass of its own."""
        graph = self._graph(theta, inputs)
        return graph.logits.detach(), NetworkPullback(self, theta, inputs, graph)

    def pushforward(self, theta: Tensor, inputs: Inputs, tangents: Tensor) -> Tensor:
        exact = self.exact

        def along(tangent: Tensor) -> Tensor:
            found = torch.func.jvp(lambda point: exact(point, inputs), (theta,), (tangent,))
            moved: Tensor = found[1]
            return moved

        with forward_mode():
            try:
                with warnings.catch_warnings():  # of layers that torch can only map one at a time
                    warnings.simplefilter("ignore")
                    mapped: Tensor = torch.func.vmap(along, chunk_size=_TOGETHER)(tangents)
                return mapped
            except RuntimeError:  # a layer that torch cannot map
                return torch.stack([along(tangent) for tangent in tangents])

    @property
    def proofs(self) -> dict[Pattern, list[str]]:
        """What is known about rows, by how a batch went through the layers: the pieces whose rows
        would be wrong.
        """
        known: dict[Pattern, list[str]] = self._local.__dict__.setdefault("proofs", {})
        return known

    @property
    def mixing(self) -> set[Pattern]:
        """Ways of a batch through the layers on which the module itself couples its samples."""
        known: set[Pattern] = self._local.__dict__.setdefault("mixing", set())
        return known

    @property
    def is_coupled(self) -> bool:
        """Whether batch statistics tie samples together."""
        own = self._own()
        return own.coupled_when_settled if self._settled else own.coupled

    def couples(self, theta: Tensor, inputs: Inputs, logits: Tensor) -> bool:
        """Whether the samples of a batch with these logits are coupled, by batch statistics or in a
        way of the module's own.
        """
        if self.is_coupled or len(logits) == 1:
            return self.is_coupled
        first = torch.zeros(1, dtype=torch.long, device=logits.device)
        apart = (self(theta, sample(inputs, first)) - logits[:1]).abs().max()
        return bool(apart > tolerance_of(self._dtype, logits.device) * (1e-6 + logits.abs().max()))

    def sample_rows(
        self, theta: Tensor, inputs: Inputs, logits: Tensor, cotangents: Tensor, names: list[str]
    ) -> Tensor:
        """Rows [n, d] of any parameters, by a forward pass for each sample: for the parameters
        named, which have no rule.
        """
        require(
            not self.couples(theta, inputs, logits),
            "Network: selection",
            f"parameters {names}",
            "parameters of normalisation, linear, convolution and embedding layers (with "
            "torch's own forward), and used by"
            " these alone, if batch statistics or the module itself couple the samples; use "
            "statistics='source', or an"
            " inference without per-sample gradients such as GradientStep",
        )

        def energy(point: Tensor, index: Tensor, cotangent: Tensor) -> Tensor:
            return (self(point, sample(inputs, index.view(1))) * cotangent).sum()

        gradient, indices = (
            torch.func.grad(energy),
            torch.arange(len(cotangents), device=cotangents.device),
        )
        try:
            with (
                warnings.catch_warnings(),
                torch.compiler.set_stance("force_eager"),
            ):  # of layers torch maps one at a time
                warnings.simplefilter("ignore")
                rows: Tensor = torch.func.vmap(gradient, in_dims=(None, 0, 0))(
                    theta, indices, cotangents
                )
        except RuntimeError:  # a layer that torch cannot map, such as a GRU
            pairs = zip(indices, cotangents, strict=True)
            with torch.compiler.set_stance("force_eager"):
                rows = torch.stack(
                    [gradient(theta, index, cotangent) for index, cotangent in pairs]
                )
        return rows


def _call(module: nn.Module, inputs: Inputs) -> Any:
    if isinstance(inputs, Tensor):
        return module(inputs)
    args, kwargs = arguments(inputs)
    return module(*args, **kwargs)


@final
class NetworkPullback(Pullback):
    """Most rules ask once: the graph's memory is freed as the backward pass goes, and a second
    question runs a new forward.
    """

    def __init__(self, network: Network, theta: Tensor, inputs: Inputs, graph: _Graph) -> None:
        self._network, self._theta, self._inputs = network, theta, inputs
        self._fresh: _Graph | None = graph
        self.memory = graph.memory  # what the network carries to the next step
        self.is_coupled = network.is_coupled
        self.feature_columns = graph.logits.shape[1] - network._classes[0]
        self.predicts = network._exact or not isinstance(network.statistics, NormRule)
        self.asked: Callable[[Question | None], None] = lambda question: (
            None
        )  # who wants to know what is asked

    def _take(self) -> _Graph:
        graph, self._fresh = self._fresh or self._network._graph(self._theta, self._inputs), None
        return graph

    def total(self, cotangents: Tensor) -> Tensor:
        self.asked("total")
        return self._totals(cotangents[None])[0]

    def _each(self, cotangents: Tensor) -> Tensor:
        self.asked(None)
        return self._totals(torch.diag_embed(cotangents.mT).movedim(0, -1))

    def _totals(self, questions: Tensor) -> Tensor:
        """Gradients [m, d] of cotangents [m, n, k], by one forward pass."""
        graph = self._take()
        graph.records.clear()  # or they would hold the layers' inputs beyond their turn
        if not graph.logits.requires_grad:  # no parameter is read
            return self._theta.new_zeros(len(questions), len(self._theta))
        found: list[Tensor] = []
        for cotangents in questions:
            gradients = graph.backward(cotangents, retain=len(found) + 1 < len(questions))
            pairs = [(gradients[name], leaf) for name, leaf in graph.leaves.items()]
            pieces = (torch.zeros_like(leaf) if own is None else own for own, leaf in pairs)
            found.append(torch.cat([piece.flatten() for piece in pieces]))
        return torch.stack(found)

    def __call__(self, cotangents: Tensor) -> Tensor:
        self.asked("rows" if cotangents.dim() == 2 else None)
        graph = self._take()
        if not graph.logits.requires_grad:
            return self._theta.new_zeros(*cotangents.shape[:-1], len(self._theta))
        flat = cotangents.reshape(-1, *cotangents.shape[-2:])
        pattern = (
            self._network.output,
            self.feature_columns,
            *pattern_of(graph.records, len(graph.logits)),
        )
        known, coupled = pattern in self._network.proofs, self._network.is_coupled
        if not known and len(graph.logits) > 1 and not coupled:
            self._prove(graph, flat, pattern)
        self.is_coupled = coupled or pattern in self._network.mixing
        rows: list[Tensor] = []
        for own in flat:
            rows.append(self._rows(graph, own, pattern, retain=len(rows) + 1 < len(flat)))
        return (torch.stack(rows) if len(rows) > 1 else rows[0]).reshape(*cotangents.shape[:-1], -1)

    def _prove(self, graph: _Graph, flat: Tensor, pattern: Pattern) -> None:
        """Ask about some samples only: they must get all of the gradient, and others none of it."""
        cotangents, asked = some(flat)
        if not cotangents.any():  # would prove nothing
            return
        rows, gradients, without = self._sweep(graph, cotangents, retain=True)
        tolerance = tolerance_of(self._network._dtype, flat.device)
        astray = wrong_rows(rows, gradients, tolerance, asked)
        if astray and self._network.couples(self._theta, self._inputs, graph.logits.detach()):
            astray = wrong_rows(rows, gradients, tolerance)
            self._network.mixing.add(pattern)
        self._network.proofs[pattern] = [*without, *astray]

    def _rows(self, graph: _Graph, cotangents: Tensor, pattern: Pattern, retain: bool) -> Tensor:
        proofs, n = self._network.proofs, len(cotangents)
        wrong = proofs.get(pattern)
        if not wrong:
            rows, gradients, wrong = self._sweep(graph, cotangents, retain)
            if pattern not in proofs and cotangents.any():
                wrong += wrong_rows(
                    rows, gradients, tolerance_of(self._network._dtype, cotangents.device)
                )
                proofs[pattern] = wrong
        if wrong:
            return self._network.sample_rows(
                self._theta, self._inputs, graph.logits.detach(), cotangents, wrong
            )
        return torch.cat(
            [
                rows[name].reshape(n, -1) if name in rows else leaf.new_zeros(n, leaf.numel())
                for name, leaf in graph.leaves.items()
            ],
            1,
        )

    def _sweep(
        self, graph: _Graph, cotangents: Tensor, retain: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor | None], list[str]]:
        """Rows by piece, the whole gradients that the same backward pass gives, and pieces that
        have these but no rows.
        """
        rows: dict[str, Tensor] = {}
        lost: set[str] = set()  # used in places in which no sample can be told from another
        handles = [
            record.node.register_prehook(self._collector(graph, record, rows, lost, retain))
            for record in graph.records
        ]
        try:
            gradients = graph.backward(cotangents, retain)
        finally:
            for handle in handles:
                handle.remove()
        used = [name for name, gradient in gradients.items() if gradient is not None]
        return rows, gradients, [name for name in used if name not in rows or name in lost]

    def _collector(
        self, graph: _Graph, record: Record, rows: dict[str, Tensor], lost: set[str], retain: bool
    ) -> Callable[[tuple[Tensor | None, ...]], None]:
        dtype, samples, chosen = graph.logits.dtype, len(graph.logits), self._network.chosen

        def collect(flows: tuple[Tensor | None, ...]) -> None:
            flow, call = flows[record.position], record.call
            if flow is None or call is None:
                return
            if not retain:
                record.call = None
            if len(flow) % samples or (record.sequence_first and flow.dim() > 2):
                for target in record.targets.values():
                    lost.update(chosen.pieces_of(target))
                return
            with torch.autocast(flow.device.type, enabled=False):
                if flow.dtype != dtype or call.inputs.dtype != dtype:
                    call, flow = cast_call(call, flow, dtype)
                for name, own in chosen.rows(
                    call, flow, record.rule, record.targets, graph.leaves
                ).items():
                    if len(own) != samples:  # several inputs a sample, such as frames
                        own = own.unflatten(0, (samples, -1)).sum(1)
                    own = own.to(dtype)
                    rows[name] = rows[name] + own if name in rows else own

        return collect

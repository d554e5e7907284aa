"""The twin of a module: a module tree of its own on the same tensors, whose parameters are replaced
for the time of a call.
"""

import copy
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from driftfilter.base.checks import require
from driftfilter.base.sharding import Shards, current
from driftfilter.networks.batch_norm import (
    Ema,
    RunningStatistics,
    Statistics,
    Together,
    TwinBatchNorm,
    prepare,
    share,
)
from driftfilter.networks.batch_trust import Probe, Witness
from driftfilter.networks.layers import find_layer
from driftfilter.networks.sample_gradients import Call, Rule


def twin(model: nn.Module, channels_last: bool = False) -> nn.Module:
    """A module tree of its own in evaluation mode, on the memory of every parameter and buffer; its
    parameters are frozen.

    ``channels_last``: weights of convolutions are copied into that layout.
    """
    with torch.inference_mode(False):
        shared: dict[int, Any] = {id(buffer): ordinary(buffer) for buffer in model.buffers()}
        # Frozen, or a backward pass would work out gradients that nobody asks for.
        shared |= {
            id(parameter): nn.Parameter(ordinary(parameter.detach()), requires_grad=False)
            for parameter in model.parameters()
        }
        # Tensors with a history among the attributes of layers, such as the weight under
        # torch.nn.utils.weight_norm.
        shared |= {
            id(value): value.detach()
            for layer in model.modules()
            for value in vars(layer).values()
            if isinstance(value, Tensor) and value.grad_fn is not None
        }
        try:
            found = copy.deepcopy(model, shared).eval()
            return found._apply(in_channels_last) if channels_last else found
        except TypeError as error:
            raise ValueError(
                f"the model must be one that copy.deepcopy can copy, got {type(model).__name__}: "
                f"{error}"
            ) from error


class Local(threading.local):
    """What a thread keeps to itself; a copy made by pickle or copy.deepcopy starts empty."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


def in_channels_last(values: Tensor) -> Tensor:
    """Images, and weights of their convolutions, in that layout; anything else as it is."""
    return values.contiguous(memory_format=torch.channels_last) if values.dim() == 4 else values


def private(model: nn.Module) -> nn.Module:
    """A twin with buffers of its own too, all of them: a layer that counts its calls must not count
    ours.

    Which layers write is not to be known beforehand: one of torch's writes to its statistics if a
    module around it sets it to training mode, and that module may write to them itself.
    """
    own = twin(model)
    for module in own.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.detach().clone()
    return own


def ordinary(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy of one made under torch.inference_mode, which could not enter a
    graph.
    """
    return tensor.clone() if tensor.is_inference() else tensor


def require_values(model: nn.Module) -> None:
    """Raise for a module on the meta device."""
    empty = [
        name
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, Tensor) and tensor.is_meta
    ]
    require(
        not empty,
        "Network: model",
        f"{empty[:4]} on the meta device",
        "a module with values: load its weights first",
    )


Pattern: TypeAlias = tuple[Any, ...]


@dataclass
class Record:
    """One call of a layer whose rows may be wanted."""

    owner: str
    rule: Rule  # of its rows
    targets: Mapping[str, str]  # its own names of parameters -> theirs in the network
    call: Call | None  # None once its rows are worked out
    node: Any  # of the outputs in the graph
    position: int  # of the outputs among what the node gives
    sequence_first: bool  # it may see [tokens, n, …]


def pattern_of(records: Sequence[Record], samples: int) -> Pattern:
    """How a batch of n samples went through the layers: which were called, with how many inputs a
    sample.

    A layer that sees tokens first does so with another number when n changes, and is looked at
    again.
    """
    return (
        samples > 1,
        *(
            (record.owner, len(record.call.inputs) / samples)
            for record in records
            if record.call is not None
        ),
    )


_EARLY = 0.45  # of the layers see the domain rather than the classes


class Twin:
    """A twin of one thread: its tensors are replaced for the time of a call."""

    def __init__(self, base: nn.Module, targets: set[str], statistics: Statistics) -> None:
        self.module = private(base)
        self.norms: list[TwinBatchNorm] = prepare(self.module, statistics)
        # Those that blend a batch's statistics with carried ones.
        self.blending = [norm for norm in self.norms if norm.blend is not None]
        self.width = sum(2 * norm.num_features for norm in self.blending)  # of what is carried
        # Those whose running statistics see a batch before it is normalised by them.
        self.measured = [norm for norm in self.norms if isinstance(norm.blend, RunningStatistics)]
        self._witness = Witness()
        if isinstance(statistics, Ema) and statistics.diversity > 0 and statistics.momentum > 0:
            for norm in self.blending:
                norm.witness = self._witness
        self._early = math.ceil(_EARLY * len(self.blending))
        self._together: Together | None = None
        if self.blending and self.blending[0].witness is not None and Together.fits(self.blending):
            self._together = Together(self.blending, self._early)
            for norm in self.blending:
                norm.together = self._together
        self.coupled = any(
            isinstance(layer, TwinBatchNorm)
            or (isinstance(layer, _BatchNorm) and layer.running_mean is None)
            for layer in self.module.modules()
        )
        # Whether they still are if what is carried is normalised by as it is.
        self.coupled_when_settled = self.coupled and len(self.blending) < len(self.norms)
        self.records: list[Record] | None = None
        self._shards: Shards | None = None
        canonical = {id(parameter): name for name, parameter in self.module.named_parameters()}
        self.slots: list[tuple[str, nn.Module, str]] = []
        self.names: dict[
            tuple[str, str], str
        ] = {}  # (owner, own name) -> the parameter's name in θ
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            target = canonical[id(parameter)]
            if target in targets:
                owner, _, own = name.rpartition(".")
                self.slots.append((target, self.module.get_submodule(owner), own))
                self.names[owner, own] = target
        self._watch()
        for layer in self.module.modules():
            if isinstance(layer, nn.GroupNorm):
                layer.register_forward_pre_hook(_in_plain_format)

    def _watch(self) -> None:
        """Record the calls of layers that hold a piece of θ and have a rule for rows."""
        sequences = tuple(find_sequence_first(self.module))
        layers = {
            self.module.get_submodule(owner): owner for owner, _ in self.names
        }  # one layer may have several names
        for layer, owner in layers.items():
            known = find_layer(layer)
            if known is not None:
                suspect = known.channels_last and owner.startswith(sequences)
                layer.register_forward_hook(
                    self._recorder(owner, known.rule, suspect), with_kwargs=True
                )

    def _recorder(self, owner: str, rule: Rule, suspect: bool) -> Callable[..., None]:
        targets = {own: name for (layer, own), name in self.names.items() if layer == owner}

        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Tensor
        ) -> None:
            if self.records is None or outputs.grad_fn is None:
                return
            inputs = args[0] if args else next(iter(kwargs.values()))
            moments = module.moments if isinstance(module, TwinBatchNorm) else None
            call = Call(module, inputs.detach(), moments)
            node, position = outputs.grad_fn, outputs.output_nr
            self.records.append(Record(owner, rule, targets, call, node, position, suspect))

        return hook

    def carry(
        self,
        statistics: Tensor | None,
        trust: Tensor | float,
        novelty: Tensor | float,
        exact: bool = False,
        learning: bool = False,
        settled: bool = False,
    ) -> None:
        """Blend with these statistics, the mean and then the variance of each layer; with the
        source's if there are none.

        The share of a batch is multiplied by the trust in it; its novelty is its part of what is
        blended. ``exact``: the blend is differentiated as it stands, of whatever kind it is.
        ``learning`` tells rules of one's own whether a pass learns. ``settled``: what is carried is
        normalised by as it is.
        """
        norms = self.blending
        sizes = [norm.num_features for norm in norms for _ in range(2)]
        pieces: Any = iter(() if statistics is None else statistics.split(sizes))
        for norm, own in zip(norms, self._share_out(trust), strict=True):
            assert norm.running_mean is not None
            assert norm.running_var is not None
            carried = (
                (norm.running_mean, norm.running_var)
                if statistics is None
                else (next(pieces), next(pieces))
            )
            norm.__dict__.update(  # a module's own __setattr__ takes as long as a kernel
                carried=carried,
                trust=own,
                novelty=novelty,
                exact=exact,
                learning=learning,
                settled=settled,
                blended=carried,  # should it not be called
                believed=None,
            )
        self._witness.forget()
        if self._together is not None:
            self._together.forget()
        self._divide()

    def _share_out(self, trust: Tensor | float) -> Sequence[Tensor | float]:
        """The trust of each layer, of one for all or of two [2] for early layers and late ones."""
        count, early = len(self.blending), self._early
        if not isinstance(trust, Tensor) or trust.dim() == 0:
            return [trust] * count
        return [trust[0]] * early + [trust[1]] * (count - early)

    def _divide(self) -> None:
        if (shards := current()) is not self._shards:
            share(self.norms, shards)
            self._shards = shards

    @contextmanager
    def probing(self) -> Iterator[Probe]:
        """Batch norms use the source's statistics, and tell how far a batch is from them."""
        self._divide()
        probe = Probe()
        for norm in self.blending:
            norm.__dict__["probe"] = probe
        try:
            yield probe
        finally:
            for norm in self.blending:
                norm.__dict__["probe"] = None

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Batch norms normalise by the batch, whose moments enter their running statistics."""
        for norm in self.measured:
            norm.__dict__["measures"] = True
        try:
            yield
        finally:
            for norm in self.measured:
                norm.__dict__["measures"] = False

    def start(self) -> Tensor:
        """The source's statistics, in the order of those carried."""
        return torch.cat(
            [
                part
                for norm in self.blending
                for part in (norm.running_mean, norm.running_var)
                if part is not None
            ]
        )

    def carried(self, trust: Tensor | float | None = None) -> Tensor:
        """The statistics to carry on, after a call: those it normalised by, or with another trust
        in its batch.
        """
        if trust is None:
            blends = [norm.blended for norm in self.blending]
        else:
            each = self._share_out(trust)
            if self._together is not None:
                groups = dict.fromkeys((0, min(self._early, len(each) - 1)))
                told = self._together.carry_on([each[place] for place in groups])
                if told is not None:
                    return told
            own = zip(self.blending, each, strict=True)
            blends = [norm.carry_on(trust) for norm, trust in own]
        return torch.cat([part.detach() for blend in blends for part in blend])

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[nn.Module]:
        """The module with these tensors in the place of its parameters."""
        before = [(module, own, module._parameters[own]) for _, module, own in self.slots]
        try:
            for target, module, own in self.slots:
                _place(module, own, tensors[target])
            yield self.module
        finally:
            for module, own, parameter in before:
                _place(module, own, parameter)


def _in_plain_format(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """torch's group norm on a CPU crashes the process if channels-last inputs meet an expanded
    gradient, as a mean gives.
    """
    first = args[0] if args else None
    if not isinstance(first, Tensor) or first.device.type != "cpu" or first.is_contiguous():
        return None
    return (first.contiguous(), *args[1:])


def find_sequence_first(model: nn.Module) -> set[str]:
    """Beginnings of the names of layers near an attention or recurrent layer that takes [tokens, n,
    …].
    """
    found = [
        name
        for name, layer in model.named_modules()
        if getattr(layer, "batch_first", True) is False
    ]
    places = {name.rpartition(".")[0] for name in found}
    stacks = (nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer)
    around = {
        name
        for name, layer in model.named_modules()
        if isinstance(layer, stacks) and any(f.startswith(name) for f in found)
    }
    return {f"{place}." if place else "" for place in places | around}


def _place(module: nn.Module, own: str, tensor: Tensor | None) -> None:
    module._parameters[own] = tensor  # type: ignore[assignment]  # torch.func.functional_call does the same
    if isinstance(module, nn.RNNBase):  # reads its parameters from a list of its own
        module._flat_weights[module._flat_weights_names.index(own)] = tensor

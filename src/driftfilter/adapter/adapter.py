"""The front door: ``adapter = driftfilter.adapt(model, "eata")``, then ``adapter(x)`` where
``model(x)`` stood.

The user's module is never changed. An adapter is a module without parameters of its own; what it
has learned is a filter state, a value that is replaced whole at the end of a step, so that
predictions in other threads see only whole states.
"""

from __future__ import annotations

import inspect
import math
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

import torch
from torch import Tensor, nn

import driftfilter.presets as presets
from driftfilter.adapter.bind import BoundFilter, FilterOptions, fit_recipe
from driftfilter.adapter.checkpoint import Fingerprint, fingerprint, plain
from driftfilter.adapter.intervene import find_where, spread_mean
from driftfilter.adapter.labels import WEIGHT, choose_samples
from driftfilter.adapter.pipelines import Pipeline, model_of, with_classifier
from driftfilter.adapter.speed import Measure as SpeedMeasure, Speed, SpeedOptions
from driftfilter.adapter.state import AdapterState, Group, merge, read_found, without_samples
from driftfilter.base.checks import (
    NotFiniteError,
    NotPositiveDefiniteError,
    require,
    require_count,
    warn,
)
from driftfilter.base.fork_lock import ForkLock
from driftfilter.base.inputs import (
    Inputs,
    arguments,
    batch_size,
    can_join,
    check_inputs,
    each,
    is_table,
    join_arguments,
    pick_logits,
    samples,
    split_batch,
    tensors,
)
from driftfilter.base.sharding import current, gather_samples
from driftfilter.base.tensors import have_same_values
from driftfilter.callbacks import Callback, require_callbacks
from driftfilter.distributed.stream import digest, join, require_same, share_call
from driftfilter.filtering import Filter, FilterState, StepInfo
from driftfilter.gaussian.belief import Belief
from driftfilter.inference.accuracy import Estimate
from driftfilter.inference.linearized import Frozen
from driftfilter.inference.optimizers import GradientStep
from driftfilter.inference.prediction import Prediction, join_predictions
from driftfilter.model.appearance import describe, run_at_once
from driftfilter.model.labelled import require_labels
from driftfilter.model.predictive import PredictiveModel
from driftfilter.monitor.monitor import MEANINGS, AlarmWarning, Beside, Monitor, fresh_detectors
from driftfilter.monitor.state import Event, Signals
from driftfilter.networks.autocast import full_precision
from driftfilter.networks.initialization import check
from driftfilter.networks.prototypes import Prototypes
from driftfilter.networks.shared_copy import in_channels_last, twin
from driftfilter.networks.step_graphs import Measure
from driftfilter.recipe import Recipe
from driftfilter.source.posterior import SourceData

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # not in every build of torch

_DEFAULT = Monitor()
_WIDTH = 96  # of a line of print(adapter), beside its margin


def _choose_monitor(recipe: Recipe) -> Monitor:
    """The monitor of a recipe if nobody asks for one: it acts on Gaussian filters and on class
    offsets (ours, the paper's), and records for all others.

    A published method is what its authors wrote: the mean takes an optimiser's step, features move
    prototypes, or nothing is learned. A reset would make another method of it.
    """
    stays = isinstance(recipe.inference, Frozen) and recipe.centering is None
    follows = isinstance(recipe.parameters, Prototypes)  # what it predicts changes at once
    published = stays or follows or isinstance(recipe.inference, GradientStep)
    return Monitor.recording() if published else _DEFAULT


def adapt(  # noqa: PLR0913  # what editors complete
    model: nn.Module | Pipeline,
    recipe: str | Recipe = "driftfilter",
    *,
    data: SourceData | Tensor | tuple[Tensor, Tensor] | None = None,
    output: Callable[[Any], Tensor] | None = None,
    observed: Callable[[Any], Tensor] | None = None,
    seed: int = 0,
    update_every: int = 1,
    window: int = 0,
    monitor: Monitor | None = _DEFAULT,
    callbacks: Iterable[Callback] = (),
    speed: Speed = "exact",
    autocast: torch.dtype | None = None,
    channels_last: bool | None = None,
    cuda_graphs: bool | None = None,
    distributed: bool | ProcessGroup = False,
    **options: Any,
) -> Adapter:
    """A module that takes the place of ``model`` and adapts to the unlabeled inputs it sees.

    The default reads the order of samples: if neighbours share labels, what ``adapter(x)`` says of
    a sample depends on those before it and on the rest of its batch. ``labels=None`` turns it off.

    Args:
        model: a torch module that gives class logits, or a pipeline of transformers that classifies
            texts or images. Of a pipeline the model is adapted, and ``adapter.pipeline`` is called
            as the pipeline was.
        recipe: the name of a preset, or a Recipe.
        data: source inputs, with labels or without, for a source posterior, a loss that needs them
            or aligned norms.
        output: picks the logits out of what the model returns.
        observed: picks what the loss sees, if that is something else.
        seed: of all that is drawn at random.
        update_every: predict every batch at once, and adapt on every m-th one to all samples since
            the last time.
        window: adapt to the last so many samples, for streams of single samples.
        monitor: a Monitor, or None for no alarms. By default Gaussian filters are guarded, and
            published methods are left as their authors wrote them: their alarms are recorded.
        callbacks: told after every step.
        speed: "exact" does all that changes no result beyond rounding. "fast" also runs the model
            in bfloat16 if the device computes in it. ``print(adapter)`` says what is on.
        autocast: a dtype, the precision of the model's own operations. This and the next two
            follow ``speed`` unless they are given.
        channels_last: images in that layout, with a copy of convolution weights.
        cuda_graphs: passes over batches of a shape seen before are one launch each. For models
            without steps on the CPU; without a GPU nothing.
        distributed: True, or a process group: every process gets a shard of each batch, and all
            hold the same belief.
        options: those of the preset, such as ``lr``, or fields of the recipe, such as
            ``source=df.Given(belief)`` for a posterior of your own.

    >>> import torch, driftfilter as df
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    >>> adapter = df.adapt(model.eval(), "tent", lr=0.01)
    >>> adapter(torch.randn(16, 4)).shape  # log-probabilities
    torch.Size([16, 3])
    """
    pipeline = None
    if not isinstance(model, nn.Module) and isinstance(model, Pipeline):
        pipeline, model = model, model_of(model)
    why, source = "", SourceData.of(data)
    if isinstance(recipe, str):
        can_align = source is not None and recipe in presets.BY_NORMS and not source.is_table
        if recipe in presets.BY_NORMS and "norms" not in options and isinstance(model, nn.Module):
            why = f"{recipe!r} for this network: {presets.explain(model, can_align)}"
        own = list(inspect.signature(adapt).parameters)[2:-1]  # an unknown option is held to them
        recipe = presets.for_model(model, recipe, options, own, can_align)
    else:
        require(
            not options,
            "adapt",
            f"options {list(options)}",
            "given in the recipe if that is not a preset's name",
        )
    require(isinstance(model, nn.Module), "adapt: model", type(model).__name__, "a torch module")
    require(isinstance(recipe, Recipe), "adapt: recipe", recipe, "the name of a preset or a Recipe")
    chosen = FilterOptions(
        fit_recipe(recipe, source),
        source,
        output,
        observed,
        seed,
        SpeedOptions(speed, autocast, channels_last, cuda_graphs, distributed is not False),
    )
    adapter = Adapter(model, chosen, update_every, window, monitor, callbacks, distributed, why)
    adapter._pipeline = pipeline
    return adapter


@final
class Adapter(nn.Module):
    """A classifier that adapts while it predicts; see ``adapt``.

    ``update_every`` m: predict every batch at once, adapt on every m-th one to all samples since
    the last time. ``window`` w: adapt to, and take batch statistics over, the last w samples, for
    streams of single samples. Without either, a recipe may wait for its ``least`` samples.
    """

    def __init__(
        self,
        model: nn.Module,
        chosen: FilterOptions,
        update_every: int,
        window: int,
        monitor: Monitor | None,
        callbacks: Iterable[Callback],
        distributed: bool | ProcessGroup,
        why: str = "",
    ) -> None:
        super().__init__()
        self.why = why  # this recipe, if it was chosen by what the network is
        require_count("adapt: update_every", update_every, 1)
        require_count("adapt: window", window, 0)
        if chosen.recipe.buffer is not None:
            allowed = "left out with a buffer, which says itself what updates are made of, and when"
            require(window == 0, "adapt: window", window, allowed)
            require(update_every == 1, "adapt: update_every", update_every, allowed)
        require(
            monitor is None or isinstance(monitor, Monitor),
            "adapt: monitor",
            monitor,
            "a Monitor or None",
        )
        # A module of torch.compile would compile every twin anew.
        model = getattr(model, "_orig_mod", model)
        check(model, None if chosen.recipe.align else chosen.recipe.parameters)
        self._options, self.recipe, self.seed = chosen, chosen.recipe, chosen.seed
        self.update_every, self.window = update_every, window
        # A window looks back on earlier samples itself, ranks must not keep samples apart, and
        # pieces of a batch stay as small as they are.
        together = not window and distributed is False and not self.recipe.chunk
        self._least = self.recipe.least if together else 0
        self.monitor = _choose_monitor(self.recipe) if monitor is _DEFAULT else monitor
        self._detectors = fresh_detectors(self.monitor)  # beside the state
        self.callbacks = require_callbacks(callbacks)
        self.channels_last = bool(chosen.speed.channels_last)
        self._pipeline: Pipeline | None = None  # whose model it is
        # In a list, or it would become a part of this module, and its parameters ours.
        self._model = [model]
        self._now = AdapterState()
        self._known: tuple[BoundFilter, Fingerprint] | None = None
        self._plain: Any = None  # the recipe as data, once it is asked for
        self._lock = ForkLock()  # of updates; predictions need none
        self._ranks = join(distributed, self.recipe, window, update_every)
        if self._ranks is not None:
            same = {
                "model": fingerprint(model),
                "recipe": plain(self.recipe),
                "seed": self.seed,
                "monitor": None
                if self.monitor is None
                else (replace(self.monitor, detectors={}), sorted(self.monitor.detectors)),
                "choice of source data": chosen.data is not None,
                "version of torch": torch.__version__,
            }
            require_same(self._ranks, same)

    # What users call

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Adapt to a batch and predict it: log-probabilities [n, k], which are valid logits too."""
        begun, found, shares = time.perf_counter(), list[Prediction](), Counter[int]()
        with self._lock, self._apart():
            with self._noting(), self._given("adapter(x)", args, kwargs) as inputs:
                now = self._ready(inputs)
                for piece in self._pieces(inputs):
                    before = now
                    now, prediction = self._put_in_order(*self._step_each(now, piece), piece)
                    now = self._believe(now, prediction, piece)
                    found.append(prediction)
                    shares.update(now.count_domains(before))
            together = join_predictions(found)
            self._finish(now, begun, len(together.log_probabilities), together, shares)
        return together.log_probabilities

    def predict(self, *args: Any, **kwargs: Any) -> Prediction:
        """Predict a batch with the belief as it stands.

        It changes nothing, and may run while another thread updates.
        """
        with self._apart(), self._given("predict", args, kwargs) as inputs:
            now = self._ready(inputs)
            found = [self._predict_each(now, piece) for piece in self._pieces(inputs)]
            return join_predictions(found)

    def uncertainty(self, *args: Any, draws: int = 4, **kwargs: Any) -> Prediction:
        """Predict a batch with the belief as it stands, with an uncertainty for each sample.

        ``draws`` products with the Jacobian beside the forward pass (``Filter.uncertainty``). It
        changes nothing, and may run while another thread updates.
        """
        require_count("Adapter.uncertainty: draws", draws, 1)
        with self._apart(), self._given("uncertainty", args, kwargs) as inputs:
            now = self._ready(inputs)
            found = [self._predict_each(now, piece, draws) for piece in self._pieces(inputs)]
            return join_predictions(found)

    def update(self, *args: Any, **kwargs: Any) -> StepInfo:
        """Adapt to a batch now, without returning predictions; the last info of several pieces.

        A monitor sees what the step would have predicted.
        """
        begun, shares = time.perf_counter(), Counter[int]()
        with self._lock, self._apart():
            with self._noting(), self._given("update", args, kwargs) as inputs:
                now = self._ready(inputs)
                for piece in self._pieces(inputs):
                    before = now
                    now, info = self._update(now, piece)
                    shares.update(now.count_domains(before))
            self._finish(now, begun, batch_size(inputs), None, shares)
        return info

    def learn(
        self,
        inputs: Inputs,
        labels: Tensor | int,
        weight: float | Tensor | None = None,
        numbers: Any = None,
    ) -> StepInfo:
        """Learn the labels [n] of samples [n, ...], of the last batch or of one long ago.

        The belief as it stands is conditioned on E = Σ_i w_i -log p(y_i given x_i, θ), w_i the
        ``weight``, one for all or [n], by the recipe's own inference; no time passes, and
        statistics, offsets and the chain of labels stay. Of several domains each sample teaches the
        one that it looks like. ``numbers`` [n] of the samples in the stream, counted from 0: one
        that was learned before, or has not come, is refused. Without them a label that is given
        twice counts twice. ``reset`` forgets it all.
        """
        allowed = "not distributed: labels are learned on one process"
        require(self._ranks is None, "adapt: distributed", True, allowed)
        with self._lock, self._apart(), self._noting():
            args, kwargs = arguments(inputs)
            own = self._laid_out(check_inputs(join_arguments(self._model[0], args, kwargs)))
            labels = require_labels(labels, batch_size(own))
            now = self._ready(own)
            taught = now.taught.note(numbers, batch_size(own))
            now, info = self._learn(now, own, labels, WEIGHT if weight is None else weight)
            self._now = now._replace(taught=taught)
        return info

    def ask(self, n: int = 1) -> Tensor:
        """The places [n] in the last batch of the samples whose labels would help most.

        One after the other, that of the largest H(p) / (1 + m): H the entropy of what was predicted
        for it by ``adapter(x)``, m the number of those chosen before of the same predicted class.
        Kept for it are the log-probabilities [n, k] of the last batch; no inputs, and not in
        checkpoints.
        """
        last = self._now.taught.last
        require(last is not None, "ask", "no batch", "called after adapter(x)")
        assert last is not None
        return choose_samples(last, n)

    def intervene(
        self,
        names: str | Iterable[str],
        inflate: float | None = None,
        mean: Tensor | float | Literal["source"] | None = None,
        freeze: bool | None = None,
    ) -> None:
        """Change the belief over some parameters by hand, because something has happened: a camera
        was cleaned, a sensor replaced.

        ``names``: of parameters, or patterns such as "blocks.0.*". ``inflate`` f: their covariance
        is f times what it was, so that the next batches teach more. ``mean``: their new means, a
        number for all, a tensor of the shape of each, or those of the "source". ``freeze``: True,
        means and variances stay as they are now, whatever comes, until False. In every domain that
        is remembered. It is an event ("intervention") with the number of values concerned.
        """
        given = inflate is not None or mean is not None or freeze is not None
        require(given, "intervene", "nothing to do", "inflate, mean or freeze")
        with self._lock, self._apart():
            now = self._ready(None)
            assert now.bound is not None
            where = find_where(now.bound, names)
            start, filt = now.bound.start.belief.mean, now.bound.filter
            means = spread_mean(now.bound, where, mean, start)
            new = now.map_states(lambda own: filt.intervene(own, where, inflate, means, freeze))
            event = Event(now.watch.batches, "intervention", float(where.sum()), 0.0, "record")
            self._now = new._replace(watch=new.watch.log(event))

    def elapse(self, dt: float) -> None:
        """Let time pass without data: the belief moves as the transition says over ``dt`` units.

        A step is one unit of time or, if time goes by samples (``Transition``), as the default's
        does, n/N of one. After a gap of g units between two batches ``elapse`` of g less that comes
        before the second. Before the first batch nothing moves. Of several domains the last
        one moves: the time of a domain is that of its own batches.
        """
        with self._lock, self._apart():
            now = self._ready(None)
            assert now.bound is not None
            state = now.bound.filter.elapse(now.current, dt)
            self._now = now if now.state is None else now._replace(state=state)

    def reset(self) -> None:
        """Back to the source, as if no batch had come."""
        with self._lock:
            self._now = self._now.start_anew()
            self._detectors = fresh_detectors(self.monitor)

    def resume(self) -> None:
        """Adapt again after an alarm whose response was to freeze."""
        with self._lock:
            self._now = self._now._replace(watch=replace(self._now.watch, frozen=False))

    def snapshot(self) -> AdapterState:
        """All that calls have changed, an immutable value to go back to (``restore``); what no
        later call reads is left out.
        """
        return self._ready(None).rest()

    def restore(self, snapshot: AdapterState) -> None:
        """Go on from a ``snapshot`` of this adapter: as many streams as there are snapshots share
        one network, by turns. Detectors of a monitor, which are no part of it, begin anew.
        """
        is_one = isinstance(snapshot, AdapterState)
        require(is_one, "restore: snapshot", type(snapshot).__name__, "what snapshot() returned")
        other = self.recipe if snapshot.bound is None else snapshot.bound.recipe
        same = other is self.recipe or plain(other) == self.plain_recipe
        if not same:  # the words take longer than the rest of it
            require(False, "restore: snapshot", f"of the recipe {other}", "of the adapter's own")
        with self._lock:
            before, self._now = self._now, snapshot
            try:
                if snapshot.bound is not None and snapshot.bound.read.model is not self.model:
                    self._ready(None)  # taken before the model moved, or on another one
            except BaseException:
                self._now = before
                raise
            self._detectors = fresh_detectors(self.monitor)

    def export(self, path: str | Path, example: Inputs | None = None) -> None:
        """Write the adapted network as a plain one: ``.onnx``, or a state dict (``.safetensors``,
        ``.pt``), whose log softmax is what ``predict`` says. ``example`` is a batch of inputs, for
        ONNX, class offsets and temperatures. What it cannot hold: adapter/export.py.
        """
        from driftfilter.adapter.export import export

        with self._apart():
            export(self, path, example)

    @property
    def model(self) -> nn.Module:
        """The user's model, or the copy that the adapter took along to another device."""
        return self._model[0]

    @property
    def pipeline(self) -> Any:
        """A copy of the pipeline that was given, which adapts to what it is called with; the given
        one is as it was. ``adapter.pipeline(texts, batch_size=16)``.
        """
        require(self._pipeline is not None, "adapter.pipeline", "no pipeline", "given to adapt")
        assert self._pipeline is not None
        return with_classifier(self._pipeline, self)

    @property
    def output(self) -> Callable[[Any], Tensor]:
        """What picks the logits out of what the model returns."""
        return self._options.output or pick_logits

    def share_pass(self, batches: Sequence[Inputs]) -> bool:
        """Run the network once for the next batches of several streams, if the recipe adapts
        nothing before its last layer and no samples are coupled; False if it does not.

        What is predicted for each of them is the same to rounding. Batches are of samples of one
        shape; each is known by identity, in this thread, as long as it lives.
        """
        if self._ranks is not None or self.channels_last or self.window or self.recipe.chunk:
            return False
        with self._apart():
            bound = self._ready(None).bound
            assert bound is not None
            model, checked = bound.filter.logits, [check_inputs(batch) for batch in batches]
            return bound.final and isinstance(model, PredictiveModel) and model.share_pass(checked)

    @property
    def state(self) -> FilterState:
        """All that has been learned, of several domains in the last one; an immutable value."""
        return self._ready(None).current

    @property
    def belief(self) -> Belief:
        """The belief over the adapted parameters."""
        return self.state.belief

    @property
    def last_info(self) -> StepInfo | None:
        """What the last update did; None before the first."""
        return self._now.info

    @property
    def events(self) -> tuple[Event, ...]:
        """The alarms since the stream began, the last thousand of them."""
        return self._now.watch.events

    @property
    def signals(self) -> Signals:
        """What the monitor saw in the last update."""
        return self._now.watch.signals

    @property
    def estimate(self) -> Estimate:
        """Expected accuracy over the last thousand samples, with an interval, without labels
        (docs/knowing.md).
        """
        now = self._now if self._now.opinions is None else self._ready(None)  # a copy reads anew
        return now.expectation.estimate

    @property
    def domains(self) -> tuple[tuple[int, int], ...]:
        """The domains that are remembered: the number of each, which stays with it, and on how many
        samples what is known of it rests.
        """
        if self._now.domains is None:
            return ()
        known = self._now.domains.known
        return tuple(zip(known.names.tolist(), known.counts.long().tolist(), strict=True))

    @property
    def plain_recipe(self) -> Any:
        """The recipe as JSON data, as checkpoints have it."""
        if self._plain is None:
            self._plain = plain(self.recipe)
        return self._plain

    @property
    def fingerprint(self) -> Fingerprint:
        """What tells the model from others; worked out again only if it has been written to
        since.
        """
        bound, known = self._ready(None).bound, self._known
        assert bound is not None
        if known is None or known[0] is not bound or not bound.is_exact():
            known = self._known = bound, fingerprint(self._model[0])
        return known[1]

    def extra_repr(self) -> str:
        watched = "no monitor" if self.monitor is None else f"monitor: {self.monitor.summary}"
        speed = f"for speed: {', '.join(map(str, self.measures))}"
        parts = (type(self._model[0]).__name__, self.why, self.recipe.describe(), watched, speed)
        lines = "\n".join(filter(None, parts)).splitlines()
        return "\n".join(textwrap.fill(line, _WIDTH, subsequent_indent="  ") for line in lines)

    @property
    def measures(self) -> tuple[SpeedMeasure, ...]:
        """What makes steps faster: which measures are on, and why."""
        bound = self._now.bound
        refused = None if bound is None else bound.refused
        return self._options.speed.measure(self._model[0], self.recipe, refused)

    @property
    def autocast(self) -> torch.dtype | None:
        """The precision of the model's own operations; None: as the caller has it."""
        return self._options.speed.autocast_for(self._model[0])

    # The steps

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """No gradients, inference mode or autocast, whatever the caller is under.

        Only the model sees the autocast.
        """
        with full_precision(self.autocast), torch.inference_mode(False), torch.no_grad():
            yield

    @contextmanager
    def _given(self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Inputs]:
        """The inputs of a call, checked; if the stream is distributed, for a call of all
        ranks.
        """
        inputs, now = join_arguments(self._model[0], args, kwargs), self._now
        if self._ranks is None:
            yield self._laid_out(check_inputs(inputs))
            return
        step = 0 if now.state is None else now.state.step
        facts = {"step": step, **digest(self._ranks, now.to_compare(self.recipe))}
        with share_call(self._ranks, inputs, call, facts) as own:
            yield self._laid_out(own)

    def _laid_out(self, inputs: Inputs) -> Inputs:
        return each(inputs, in_channels_last) if self.channels_last else inputs

    def _pieces(self, inputs: Inputs) -> list[Inputs]:
        return split_batch(inputs, self.recipe.chunk) if self.recipe.chunk else [inputs]

    def _describe(self, now: AdapterState, inputs: Inputs) -> Tensor | None:
        """How the samples of all ranks look [n, D]; None if nobody wants to know, or can."""
        graphs = None if now.bound is None else now.bound.graphs
        run = run_at_once if graphs is None else graphs.run
        own = None if self.recipe.domains is None else describe(inputs, run)
        if own is None or self._ranks is None:
            return own
        return gather_samples(own.to(tensors(inputs)[0].device)).cpu()

    def _divide(self, now: AdapterState, inputs: Inputs) -> tuple[AdapterState, list[Group]]:
        """A batch by the domains of its samples."""
        rule, signatures = self.recipe.domains, self._describe(now, inputs)
        if rule is None or signatures is None:
            return now, [Group(0 if now.domains is None else now.domains.active)]
        now, groups = now.divide(rule, signatures, self.recipe.labels)
        return now, self._keep_together(groups)

    def _keep_together(self, groups: list[Group]) -> list[Group]:
        """The groups of a batch; if ranks have parts of it, one for all: the largest."""
        if self._ranks is None or len(groups) == 1:
            return groups
        return [Group(max(groups, key=lambda own: own.size).place)]

    def _step_each(self, now: AdapterState, inputs: Inputs) -> tuple[AdapterState, Prediction]:
        """One call for the samples of each domain."""
        if self._steps_now(now, inputs):
            assert now.bound is not None
            now.bound.begin(now.current, inputs, self._measure)  # most often the domain is the same
        now, groups = self._divide(now, inputs)
        found = []
        for own in groups:
            now, prediction = self._step(now.enter(own.place), own.pick(inputs))
            found.append(prediction)
        return now, merge(groups, found)

    def _predict_each(self, now: AdapterState, inputs: Inputs, draws: int = 0) -> Prediction:
        """A prediction of the samples of each domain that is known; with ``draws``, of each
        sample's uncertainty.
        """
        if now.domains is None or (signatures := self._describe(now, inputs)) is None:
            return self._predict(now, inputs, draws)
        groups = self._keep_together(now.recall(signatures))
        found = [self._predict(now.enter(own.place), own.pick(inputs), draws) for own in groups]
        return merge(groups, found)

    @property
    def _measure(self) -> Measure | None:
        """What a monitor wants to know of every step."""
        return None if self.monitor is None else self.monitor.measure

    def _steps_now(self, now: AdapterState, inputs: Inputs) -> bool:
        """Whether a batch is adapted to as it is, if it is of the domain at hand."""
        gathers = self.window or self.update_every > 1 or self.recipe.buffer is not None
        waits = now.recent is not None or batch_size(inputs) < self._least
        return not (gathers or waits or now.watch.frozen or self._ranks is not None)

    def _step(self, now: AdapterState, inputs: Inputs) -> tuple[AdapterState, Prediction]:
        """One call: a step, or a prediction alone until the time for one has come, or while the
        monitor has it frozen.
        """
        if self.recipe.buffer is not None:
            return self._fill(now, inputs)
        now = self._make_room(now, inputs)
        seen, recent = now.seen(inputs, self.window, self._waits(now, inputs))
        calls = now.calls + 1
        if self.monitor is not None and now.watch.frozen:
            return now._replace(recent=recent if self.window else None, calls=calls), self._predict(
                now, inputs
            )
        if calls % self.update_every or batch_size(seen) < self._least:
            return now._replace(recent=recent, calls=calls), self._predict(now, inputs)
        now = now._replace(recent=recent if self.window else None, calls=calls)
        return self._adapt(now, seen, inputs)[:2]

    def _adapt(
        self, now: AdapterState, seen: Inputs, inputs: Inputs
    ) -> tuple[AdapterState, Prediction, StepInfo]:
        """A step, watched, and its prediction of the inputs, the last of what it has seen."""
        assert now.bound is not None
        state, prediction, info = now.bound.step(now.current, seen, self._measure)
        own = self._take_own(prediction, seen, inputs)
        new = own if self.window else prediction  # what no step has seen before
        said = None if self.monitor is None else new.on_host[0]
        return self._watch(now, state, info, said, seen), own, info

    def _update(self, now: AdapterState, inputs: Inputs) -> tuple[AdapterState, StepInfo]:
        """A step on a batch that nobody wants predicted but a monitor, or a chain of labels."""
        now, groups = self._divide(now, inputs)
        found: list[Prediction] = []
        for own in groups:
            now, prediction, info = self._update_one(now.enter(own.place), own.pick(inputs))
            found += [] if prediction is None else [prediction]
        if len(found) == len(groups):
            now = self._believe(*self._put_in_order(now, merge(groups, found), inputs), inputs)
        return now, info

    def _update_one(
        self, now: AdapterState, inputs: Inputs
    ) -> tuple[AdapterState, Prediction | None, StepInfo]:
        """A step on samples of one domain, with what it predicts if somebody wants that."""
        if self.recipe.buffer is not None:
            return self._fill_now(now, inputs)
        prediction = None
        if now.watch.frozen and self.recipe.labels is not None:
            prediction = self._predict(now, inputs)
        seen, recent = now.seen(inputs, self.window, self._waits(now, inputs))
        now = now._replace(recent=recent if self.window else None)
        if now.watch.frozen or (self.monitor is None and self.recipe.labels is None):
            assert now.bound is not None
            state, info = now.bound.filter.update(now.current, seen)
            return self._watch(now, state, info, None, seen), prediction, info
        return self._adapt(now, seen, inputs)

    def _learn(
        self, now: AdapterState, inputs: Inputs, labels: Tensor, weight: float | Tensor
    ) -> tuple[AdapterState, StepInfo]:
        """Labels of the samples of each domain that is known; the stream is where it was."""
        signatures = None if now.domains is None else self._describe(now, inputs)
        active = 0 if now.domains is None else now.domains.active
        groups = [Group(active)] if signatures is None else now.place(signatures)
        for own in groups:
            now = now.enter(own.place, visiting=True)
            assert now.bound is not None
            some, share = labels, weight
            if own.which is not None:
                some = labels[own.which]
                share = weight[own.which] if isinstance(weight, Tensor) and weight.dim() else weight
            state, info = now.bound.filter.learn(now.current, own.pick(inputs), some, share)
            now = now._replace(state=state)
        return now.enter(active, visiting=True), info

    def _put_in_order(
        self, now: AdapterState, prediction: Prediction, inputs: Inputs
    ) -> tuple[AdapterState, Prediction]:
        """What is predicted of samples that follow each other in the stream; if that is
        distributed, the ranks' one after the other.
        """
        chain = self.recipe.labels
        if chain is None or (is_table(inputs) and not chain.tables):
            return now, prediction
        shards, every = current(), prediction.log_probabilities
        alone = prediction.on_host[0] if shards is None else gather_samples(every).cpu()
        now, together = now.put_in_order(chain, alone)
        return now, prediction.retold(together if shards is None else together[shards.mine])

    def _believe(self, now: AdapterState, prediction: Prediction, inputs: Inputs) -> AdapterState:
        """With what is predicted, by all ranks."""
        if current() is None:
            return now.believe(*prediction.on_host, is_table(inputs))
        plain = prediction.plain_confidence[:, None]
        both = gather_samples(torch.cat((prediction.log_probabilities, plain), 1)).cpu()
        return now.believe(both[:, :-1], both[:, -1], is_table(inputs))

    def _fill(self, now: AdapterState, inputs: Inputs) -> tuple[AdapterState, Prediction]:
        """Predict a batch, then offer its samples to the buffer, of which an update is made
        whenever one is due.
        """
        buffer = self.recipe.buffer
        assert buffer is not None
        prediction, calls = self._predict(now, inputs), now.calls + 1
        now = now._replace(calls=calls)
        if self.monitor is not None and now.watch.frozen:
            return now, prediction
        start, n = 0, batch_size(inputs)
        while start < n:
            stop = min(n, start + buffer.every - now.offered % buffer.every)
            piece, said = samples(inputs, start, stop), prediction.log_probabilities[start:stop]
            now = now.keep(piece, said, buffer, self.seed)
            if now.offered % buffer.every == 0:
                now = self._adapt_to_kept(now, piece, said)
            start = stop
        return now, prediction

    def _fill_now(
        self, now: AdapterState, inputs: Inputs
    ) -> tuple[AdapterState, Prediction, StepInfo]:
        """Offer samples to the buffer, and adapt to it even if no update is due."""
        before = now.info
        now, prediction = self._fill(now, inputs)
        if now.watch.frozen:
            assert now.bound is not None
            return now, prediction, now.bound.filter.update(now.current, inputs)[1]
        if now.info is before:
            now = self._adapt_to_kept(now, inputs, prediction.log_probabilities)
        assert now.info is not None
        return now, prediction, now.info

    def _adapt_to_kept(self, now: AdapterState, new: Inputs, said: Tensor) -> AdapterState:
        """A step on the samples in the buffer, watched by what was said of the new ones [n, k]."""
        assert now.bound is not None
        state, info = now.bound.filter.update(now.of_buffer, now.recent)
        return self._watch(now, without_samples(state), info, said, new)

    def _make_room(self, now: AdapterState, inputs: Inputs) -> AdapterState:
        """Adapt to samples that wait for others, if these are of another shape."""
        waiting = now.recent
        if waiting is None or not self._least or self.update_every > 1:
            return now
        if can_join(waiting, inputs):
            return now
        return self._adapt(now._replace(recent=None), waiting, waiting)[0]

    def _waits(self, now: AdapterState, inputs: Inputs) -> bool:
        """Whether samples gather until a step."""
        few = now.recent is not None or batch_size(inputs) < self._least
        return self.update_every > 1 or (self._least > 0 and few)

    def _watch(
        self,
        now: AdapterState,
        state: FilterState,
        info: StepInfo,
        new: Tensor | None,
        seen: Inputs,
    ) -> AdapterState:
        """With the state of a step, or the one that the monitor goes back to."""
        if self.monitor is None:
            return now._replace(state=state, info=info)
        if now.watch.frozen:
            return now
        assert now.bound is not None
        past, bound, start, monitor = now.watch, now.bound, now.bound.start, self.monitor
        new = None if new is None else new.cpu()  # it counts labels, for which a host is faster
        learns = not isinstance(self.recipe.inference, Frozen)
        waits = None if learns or new is None else monitor.wait(past, new)
        if waits is not None:
            return now._replace(state=state, info=info, watch=waits)

        def ask(other: FilterState | None, by: Filter = bound.filter) -> Tensor | None:
            """What another state predicts for the samples that the step predicted."""
            if other is None:
                return None
            log_probabilities = bound.predict(by, other, seen).on_host[0]
            return log_probabilities if new is None else log_probabilities[-len(new) :]

        probe = ask(monitor.choose_probe(past, state, new))
        apart = ask(monitor.choose_apart(past, state, new), now.bound.by_source)
        expected = now.expectation if monitor.expects else None
        beside = Beside(learns, expected, bound.measured(info))
        observed = monitor.observe(past, state, info, new, probe, self._detectors, apart, beside)
        trial = ask(monitor.choose_trial(past, start, observed))
        watch, state = monitor.respond(past, start, state, observed, trial)
        return now._replace(state=state, info=info, watch=watch)

    def _finish(
        self,
        now: AdapterState,
        begun: float,
        samples: int,
        predicted: Prediction | None,
        shares: Mapping[int, int],
    ) -> None:
        """A call is over: what it changed is for all to see, callbacks are told and, even if one
        fails, warnings given.
        """
        # Ranks have shards of different sizes, and learn no labels: they number no samples.
        numbered = samples if self._ranks is None else 0
        told = None if predicted is None else predicted.on_host[0]
        before, taught = self._now, now.taught.follow(numbered, told)
        self._now = now._replace(number=before.number + 1, taught=taught)
        try:
            if self.callbacks:
                ms = 1000 * (time.perf_counter() - begun)
                said = None if predicted is None else predicted.log_probabilities
                record = now.make_record(before, samples, ms, said, shares)
                for callback in tuple(self.callbacks):
                    callback.on_step(record)
        finally:
            for event in now.watch.since(before.watch):
                if event.response == "warn":
                    beyond = f"{event.value:.3g}, beyond {event.threshold:.3g} (batch {event.step})"
                    hint = MEANINGS.get(event.signal, "")
                    warn(f"{event.signal} is {beyond}{hint}", AlarmWarning)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """A call that fails for numbers that are not finite changes nothing, but is an event."""
        try:
            yield
        except (NotFiniteError, NotPositiveDefiniteError):
            watch = self._now.watch
            event = Event(watch.batches, "not_finite", math.inf, math.inf, "record")
            if self.monitor is not None:
                self._now = self._now._replace(watch=watch.log(event))
            raise

    def _predict(self, now: AdapterState, inputs: Inputs, draws: int = 0) -> Prediction:
        seen = now.seen(inputs, self.window, False)[0] if self.window else inputs
        assert now.bound is not None
        filt, state = now.bound.filter, now.current
        if draws:
            found = filt.uncertainty(state, seen, draws)
        else:
            found = now.bound.predict(filt, state, seen)
        return self._take_own(found, seen, inputs)

    def _take_own(self, prediction: Prediction, seen: Inputs, inputs: Inputs) -> Prediction:
        """What is predicted for these inputs, the last ones of those seen or, if the stream is
        distributed, this rank's.
        """
        if self._ranks is None and seen is inputs:
            return prediction
        shards = current()
        mine = slice(-batch_size(inputs), None) if shards is None else shards.mine
        return prediction.pick(mine)

    # Reading the model

    def _ready(self, example: Inputs | None) -> AdapterState:
        """What is known now; the model is read on first use, and again if it has moved since.

        What an example tells is not kept here, but with the state of the step that saw it.
        """
        now = self._now
        if self._fits(now, example):
            return now
        with self._lock, self._apart():
            now = self._now
            if not self._fits(now, example):
                # Source data are measured again if the model may be another one.
                found = now.told if now.state is None else now.found
                now = now.on(self._options(self._model[0], found, example))
                if set(now.told) == set(self._now.told):
                    self._now = now
        return now

    def _fits(self, now: AdapterState, example: Inputs | None) -> bool:
        return now.bound is not None and now.bound.fits(
            self._model[0], example, learned=now.state is not None
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Adapter:
        """``to``, ``cuda``, ``double``: the adapter takes a copy of the model along; the user's
        stays where it is.
        """
        with self._lock:
            self._model = [twin(self._model[0])._apply(fn)]
            self._now = self._now.map_samples(fn)  # the states follow when the copy is read
        return self

    # Saving

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        tensors = self._ready(None).to_tensors(self.recipe, watched=self.monitor is not None)
        destination.update({prefix + name: tensor.detach() for name, tensor in tensors.items()})

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = {
            name.removeprefix(prefix): value
            for name, value in state_dict.items()
            if name.startswith(prefix)
        }
        wrong = [name for name, value in own.items() if not isinstance(value, Tensor)]
        require(not wrong, "state", f"{wrong} that are no tensors", "the state_dict of an adapter")
        with self._lock, self._apart():
            self._now = self._load(own)
            self._detectors = fresh_detectors(self.monitor)

    def _load(self, own: Mapping[str, Tensor]) -> AdapterState:
        """What named tensors describe; refused unless all of it is there and of this recipe."""
        found, bound = read_found(own, self.recipe), self._ready(None).bound
        assert bound is not None
        if not have_same_values(found, bound.found):
            bound = self._options(self._model[0], found, None)
        now = AdapterState.from_tensors(own, bound, self.monitor is not None, self.recipe)
        slots = () if now.domains is None else now.domains.slots
        for recent in (now.recent, *(slot.recent for slot in slots)):
            if isinstance(recent, Tensor) and self._ranks is None:
                # The model must take them: together, for one alone may be too few for it.
                bound.filter.predict(now.current, recent.to(now.current.belief.mean.device))
        return now

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name != "_lock"}
        # The model is read again; whom to tell, a copy does not know: two would write to one file.
        return {**kept, "_now": self._now._replace(bound=None), "_known": None, "callbacks": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=ForkLock())

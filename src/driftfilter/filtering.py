"""The filter: one step is transition, inference, prediction. Read this file first.

    prior      = transition(belief)             N(G μ + c, G Σ Gᵀ + W)
    energy     = observation(prior mean)        E = Σ w_i ℓ_i / n
    posterior  = inference(prior, energy)       ∝ prior · exp(-E)
    prediction = rule(posterior or prior)       ∫ p(y given x, θ) N(θ) dθ
    posterior  = upkeep(posterior)              restores and resets, if there are any

State goes in; state, prediction and info come out. Nothing is changed in place.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from numbers import Integral
from typing import Annotated, Any, Literal, NamedTuple, final

import torch
from torch import Tensor
from typing_extensions import Self

from driftfilter.base.checks import (
    Checked,
    NotPositiveDefiniteError,
    Role,
    check_later,
    checks_of_a_trial,
    finite_at_the_end,
    may_look,
    require,
    require_count,
    require_finite,
    require_number,
    warn,
    without_looking,
)
from driftfilter.base.inputs import Inputs, batch_size, check_inputs
from driftfilter.base.randomness import Randomness
from driftfilter.base.sharding import total_samples
from driftfilter.gaussian.belief import Belief
from driftfilter.inference.linearized import (
    Inference,
    Linearized,
    choose_for_labels,
    learn_exactly,
)
from driftfilter.inference.outputs import Outputs as Outputs
from driftfilter.inference.prediction import (
    MAP,
    Prediction,
    PredictionRule,
    Query,
)
from driftfilter.inference.resets import Upkeep, as_upkeeps
from driftfilter.inference.smoothing import smooth_beliefs
from driftfilter.model.dynamics import MeanReversion
from driftfilter.model.held import (
    HELD,
    INFLATED,
    free_others,
    hold,
    inflate as inflate_belief,
    note_held,
)
from driftfilter.model.labelled import label_energy
from driftfilter.model.losses import Loss
from driftfilter.model.noise import Reset, Stationary
from driftfilter.model.observation import Energy, Gibbs
from driftfilter.model.predictive import (
    LogitFunction,
    PredictiveModel,
    ReadOut,
    lift,
)
from driftfilter.model.transition import BoundTransition, Transition
from driftfilter.model.weighting import Memory


def _without_gradients() -> AbstractContextManager[Any]:
    """No gradients, and no torch.inference_mode, whose tensors a model cannot differentiate."""
    if torch.is_inference_mode_enabled():
        return outside_inference_mode()
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """No gradients, but tensors that may enter a graph later."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class NoInformationWarning(UserWarning):
    """A batch too small for the loss or the curvature: only the transition was applied."""


@final
@dataclass(frozen=True, eq=False)
class FilterState:
    """Everything a filter remembers."""

    belief: Belief  # over the parameters, with the hidden states of the dynamic
    source: Belief  # where the stream started: what reversion and stationary noise refer to
    parameters: int  # of the belief's dimensions; the others are hidden states
    seed: int
    step: int = 0
    memory: Memory = field(default_factory=dict)  # named statistics of weighting and inference

    def after(self, belief: Belief, memory: Memory) -> Self:
        """The state one step later."""
        return FilterState(belief, self.source, self.parameters, self.seed, self.step + 1, memory)


class StepInfo(NamedTuple):
    """What a step did; diagnostics only, no step depends on them."""

    step: int
    informative: bool  # False: the batch carried no information and only the transition was applied
    reason: str  # why not, empty otherwise
    losses: Tensor  # [views, n], ℓ_i at the prior mean, by view
    weights: Tensor  # [n], w_i of every sample; 0 if it was left out
    coefficients: Tensor  # [n], w_i / n

    @classmethod
    def of(cls, step: int, reason: str, energy: Energy) -> Self:
        """The diagnostics of a step."""
        losses, samples = energy.evaluation.expansion.value, energy.samples
        return cls(step, not reason, reason, losses, samples.weights, samples.coefficients)

    @property
    def energy(self) -> Tensor:
        """E at the prior mean, a scalar []."""
        return self.coefficients @ self.losses.sum(0)


@final
@dataclass(frozen=True)
class Filter(Checked):
    """A Gaussian filter over the parameters of a classifier, on a stream without labels.

    ``predict_from``: "posterior" predicts a batch after adapting to it, "prior" before. ``upkeep``:
    what else happens to the belief between two steps (restores and resets); several in a tuple, one
    after the other.

    >>> import torch, driftfilter as df
    >>> filt = df.Filter(logits=df.LinearHead(classes=2), inference=df.Linearized(df.Hessian()))
    >>> state = filt.init(df.Belief(torch.tensor([1.0, -1.0]), df.Full(torch.eye(2))), seed=0)
    >>> state, prediction, info = filt.step(state, torch.tensor([[2.0, 0.5], [-1.0, 1.0]]))
    >>> prediction.labels
    tensor([1, 0])
    """

    logits: LogitFunction | PredictiveModel
    transition: Transition = field(
        default_factory=lambda: Transition(MeanReversion(), Stationary())
    )
    observation: Gibbs = field(default_factory=Gibbs)
    inference: Annotated[Inference, Role("inference", "Linearized()")] = field(
        default_factory=Linearized
    )
    prediction: Annotated[PredictionRule, Role("prediction", "MAP()")] = field(default_factory=MAP)
    predict_from: Literal["prior", "posterior"] = "posterior"
    upkeep: Upkeep | tuple[Upkeep, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            isinstance(self.transition, Transition),
            "Filter.transition",
            self.transition,
            "a Transition",
        )
        require(
            isinstance(self.observation, Gibbs), "Filter.observation", self.observation, "a Gibbs"
        )
        allowed = "of role 'inference', with a curvature, such as Linearized()"
        require(isinstance(self.inference, Inference), "Filter.inference", self.inference, allowed)
        allowed = "of role 'prediction', such as MAP(); a rule of your own inherits PredictionRule"
        fits = isinstance(self.prediction, PredictionRule)
        require(fits, "Filter.prediction", self.prediction, allowed)
        over_views, whole = self.prediction.over_views, self.observation.augmented == "batch"
        allowed = "'batch' if the prediction is over views, which all samples then need"
        given = self.observation.augmented, self.observation.augmentation
        require(whole or not over_views, "Gibbs.augmented", given[0], allowed)
        allowed = "None if the prediction is over views, which are those of the loss"
        require(given[1] is None or not over_views, "Gibbs.augmentation", given[1], allowed)
        upkeeps = (self.observation.teacher, *as_upkeeps("Filter.upkeep", self.upkeep))
        loss: Loss = self.observation.loss  # type: ignore[assignment]  # as_loss in Gibbs
        self.__dict__.update(
            logits=lift(self.logits),
            _upkeeps=tuple(each for each in upkeeps if each is not None),
            _needed=max(loss.minimum, self.inference.curvature.minimum),
            _learns=self.prediction.learns,
            _bound=None,
            _motion=None,
            _warned=False,
        )

    def init(
        self,
        belief: Belief,
        seed: int = 0,
        data: Iterable[tuple[Inputs, Tensor | None]] | None = None,
    ) -> FilterState:
        """The state before the first batch, from a belief over the parameters: the source.

        ``data``: source inputs with labels or None (``SourceData``), for losses and predictions
        that remember something of them.
        """
        require(isinstance(belief, Belief), "Filter.init: belief", belief, "a Belief")
        require(
            isinstance(seed, Integral) and not isinstance(seed, bool),
            "Filter.init: seed",
            seed,
            "an integer",
        )
        with _without_gradients():
            mean = belief.mean.detach().clone()  # often a model's own, which may be trained on
            source = self.transition.augment(Belief(mean, belief.covariance))
            self.transition(source, source)  # refuses now what a structure cannot carry
            self._require_parts_of_time(source)
            state = FilterState(source, source, belief.dimension, int(seed))
            model = self._bind(state)[1]
            memory = {
                **self.observation.survey(model, source.mean, data),
                **self.prediction.survey(model, source.mean, data),
            }
        return replace(state, memory=memory)

    def _require_parts_of_time(self, source: Belief) -> None:
        """Raise if time goes by samples, and the transition has no part of a unit."""
        if self.transition.samples > 1:
            try:
                self.transition.bind(source).over(self.transition.time_of(1))
            except ValueError as error:
                raise ValueError(f"Transition.samples must be 0 here: {error}") from None

    def step(
        self, state: FilterState, inputs: Inputs, dt: float = 1.0
    ) -> tuple[FilterState, Prediction, StepInfo]:
        """Adapt to one unlabeled batch [n, ...] and predict it.

        ``dt``: time since the step before. What the transition says is of one unit of time; over
        a whole dt it is as many transitions one after the other (docs/equations.md). If time goes
        by samples (``Transition.samples``), dt counts in what the batch takes.
        """
        with _without_gradients(), _checking_on(state):
            state, prediction, info = self._one_step(state, inputs, dt, predicting=True)
        assert prediction is not None
        return state, prediction, info

    def try_step(
        self, state: FilterState, inputs: Inputs
    ) -> tuple[FilterState, Prediction, StepInfo, Tensor]:
        """``step`` that looks at no number on a device, and a number [] that is finite if all is
        well; if it is not, nothing of it counts, and ``step`` says why.
        """
        with _without_gradients(), without_looking() as told:
            state, prediction, info = self._one_step(state, inputs, 1.0, predicting=True)
        assert prediction is not None
        return state, prediction, info, _sum_up(told, prediction)

    def update(
        self, state: FilterState, inputs: Inputs, dt: float = 1.0
    ) -> tuple[FilterState, StepInfo]:
        """Adapt to one unlabeled batch [n, ...] without predicting it: the state is ``step``'s."""
        with _without_gradients(), _checking_on(state):
            state, _, info = self._one_step(state, inputs, dt, predicting=False)
        return state, info

    def learn(
        self,
        state: FilterState,
        inputs: Inputs,
        labels: Tensor,
        weight: float | Tensor = 1.0,
    ) -> tuple[FilterState, StepInfo]:
        """Learn the labels [n] of samples [n, ...]: the belief as it stands is conditioned on

            E(θ) = Σ_i w_i -log p(y_i given x_i, θ),   w_i the ``weight``, one for all or [n],

        by the filter's own inference. No time passes, and nothing else that the filter remembers
        changes: batch norm keeps its statistics. With ``Linearized(Hessian())`` on a linear head it
        is the supervised extended Kalman step, one Newton step towards the Laplace posterior.
        """
        with _without_gradients(), _checking_on(state):
            rule, held = choose_for_labels(self.inference), state.memory.get(HELD)
            model = free_others(self._bind(state)[1], held).settled
            randomness = Randomness(state.seed, state.step, state.belief.mean.device)
            inputs, mean = check_inputs(inputs), state.belief.mean
            weights = _require_weights(weight, batch_size(inputs))
            energy = label_energy(model, mean, inputs, lambda _: labels, weights)
            energy = energy._replace(source=state.source, randomness=randomness)
            belief, memory = learn_exactly(rule, state.belief, energy, state.memory, randomness)
            if held is not None:
                belief = hold(belief, held)
        return replace(state, belief=belief, memory=memory), StepInfo.of(state.step, "", energy)

    def intervene(
        self,
        state: FilterState,
        where: Tensor,
        inflate: float | None = None,
        mean: Tensor | float | None = None,
        freeze: bool | None = None,
    ) -> FilterState:
        """Change the belief by hand, on the coordinates of a mask [d].

        ``inflate`` f: Σ ← D Σ D, D² = f there and 1 elsewhere, so that the block of Σ is f times
        what it was (and that of the next prior, if the noise is ``Reset``); ``mean``: the new
        means, a number or [d]; ``freeze``: True, means and variances there stay as they are then,
        independent of all others, until False.
        """
        _require_state(state)
        d = state.belief.dimension
        fits = isinstance(where, Tensor) and where.dtype == torch.bool and where.shape == (d,)
        require(fits and bool(where.any()), "where", where, f"a mask [{d}] of True and False")
        known = state.memory.get(HELD)
        is_held = torch.zeros_like(where) if known is None else known[0] > 0
        belief, memory = state.belief, dict(state.memory)
        with _without_gradients():
            if inflate is not None:
                require_number("inflate", inflate, 0, math.inf, open_low=True)
                most = torch.finfo(belief.mean.dtype).max
                require(inflate <= most, "inflate", inflate, f"at most {most:g}")
                factors = torch.where(where, float(inflate), 1.0).to(belief.mean)
                belief = inflate_belief(belief, factors)
                if isinstance(self.transition.noise, Reset):  # or nothing would learn by it
                    memory[INFLATED] = factors * memory.get(INFLATED, 1.0)
            if mean is not None:
                belief = Belief(_set_mean(belief.mean, where, mean), belief.covariance)
            if freeze is not None:
                require(isinstance(freeze, bool), "freeze", freeze, "True or False")
                moves = getattr(self.inference, "of_features", False)
                require(not moves, "freeze", freeze, f"None with {self.inference}, of features")
                is_held = is_held | where if freeze else is_held & ~where
            memory.pop(HELD, None)
            if is_held.any():
                memory[HELD] = note_held(belief, is_held)
                belief = hold(belief, memory[HELD])
        return replace(state, belief=belief, memory=memory)

    def elapse(self, state: FilterState, dt: float) -> FilterState:
        """Let time pass without data: the belief moves as the transition says over ``dt``.

        ``step`` after it moves the belief by its own dt more.
        """
        _require_state(state)
        with _without_gradients():
            belief = self._bind(state, dt)[0](state.belief)
            if belief.covariance is not state.belief.covariance:
                _require_proper(belief, state.source)
            if HELD in state.memory:
                belief = hold(belief, state.memory[HELD])
        return replace(state, belief=belief)

    def _one_step(
        self, state: FilterState, inputs: Inputs, dt: float, predicting: bool
    ) -> tuple[FilterState, Prediction | None, StepInfo]:
        inputs = check_inputs(inputs)
        passed = self.transition.time_of(total_samples(batch_size(inputs)))
        transition, model = self._bind(state, dt, passed)
        randomness = Randomness(state.seed, state.step, state.belief.mean.device)
        prior, held = transition(state.belief), state.memory.get(HELD)
        if INFLATED in state.memory:
            prior = inflate_belief(prior, state.memory[INFLATED])
            rest = {name: own for name, own in state.memory.items() if name != INFLATED}
            state = replace(state, memory=rest)
        if held is not None:
            prior, model = hold(prior, held), free_others(model, held)
        energy, memory = self.observation(
            model,
            prior.mean,
            inputs,
            state.memory,
            randomness,
            state.source,
            self.__dict__["_learns"],
        )
        posterior, memory, reason = self._infer(prior, energy, memory, randomness)
        if posterior.covariance is prior.covariance is not state.belief.covariance:
            _require_proper(prior, state.source)
        prediction = None
        if predicting:
            belief = posterior if self.predict_from == "posterior" else prior
            known, views = energy.known_logits(belief.mean), lambda: energy.views
            prediction = self._predict(
                belief, Query(model, inputs, randomness, known, energy.taught, views, memory)
            )
        for upkeep in self.__dict__["_upkeeps"]:
            posterior, memory = upkeep(posterior, energy, memory, randomness)
        if held is not None:
            posterior, memory = hold(posterior, held), {**memory, HELD: held}
        return state.after(posterior, memory), prediction, StepInfo.of(state.step, reason, energy)

    def _infer(
        self, prior: Belief, energy: Energy, memory: Memory, randomness: Randomness
    ) -> tuple[Belief, Memory, str]:
        """The posterior, what is remembered with it, and why a batch says nothing if it does not.

        A GPU is asked how many samples have a weight once the inference is on its queue; if too few
        have one, that is dropped.
        """
        used = energy.samples.used
        if not isinstance(used, Tensor):
            if reason := self._why_uninformative(energy):
                return prior, memory, reason
            return *self._condition(prior, energy, memory, randomness), ""
        if not may_look():
            enough = torch.where(used >= self.needed, 0.0, math.inf)
            check_later(enough, lambda: None)
            return *self._condition(prior, energy, memory, randomness), ""
        with checks_of_a_trial() as forget:
            try:
                posterior, learned = self._condition(prior, energy, memory, randomness)
            except Exception:
                if not (reason := self._why_uninformative(energy)):
                    raise
            else:
                reason = self._why_uninformative(energy)
            if reason:
                forget()
                return prior, memory, reason
        return posterior, learned, ""

    def _condition(
        self, prior: Belief, energy: Energy, memory: Memory, randomness: Randomness
    ) -> tuple[Belief, Memory]:
        """The posterior, and the memory with what inference and prediction learn of the batch."""
        posterior, memory = self.inference(prior, energy, memory, randomness)
        if self.__dict__["_learns"]:
            memory = self.prediction.learn(prior, energy, memory)
        return posterior, memory

    def predict(self, state: FilterState, inputs: Inputs) -> Prediction:
        """Predict inputs [n, ...] with the belief as it stands, without adapting to them."""
        with _checking_on(state):
            return self._predict_alone(state, inputs)

    def try_predict(self, state: FilterState, inputs: Inputs) -> tuple[Prediction, Tensor]:
        """``predict`` that looks at no number on a device, as ``try_step``."""
        with without_looking() as told:
            prediction = self._predict_alone(state, inputs)
        return prediction, _sum_up(told, prediction)

    def _predict_alone(self, state: FilterState, inputs: Inputs) -> Prediction:
        with _without_gradients():
            randomness = Randomness(state.seed, state.step, state.belief.mean.device)
            _, model = self._bind(state)
            inputs, teacher, taught = check_inputs(inputs), self.observation.teacher, None
            if teacher is not None:
                taught = teacher.logits(model, inputs, state.memory, state.source, randomness)
            observation = self.observation.remember(state.memory)
            views = partial(observation.views, model, inputs, randomness)
            return self._predict(
                state.belief, Query(model, inputs, randomness, None, taught, views, state.memory)
            )

    def uncertainty(self, state: FilterState, inputs: Inputs, draws: int = 4) -> Prediction:
        """Predict inputs [n, ...] with the belief as it stands, with an uncertainty of each sample.

        Beside the forward pass it takes one product with the Jacobian for each of the ``draws``
        from the belief, whatever the number of classes. What becomes of them is up to the
        prediction rule: Gaussian logits f(μ) + J δ (``LinearizedGaussian``), or for ``Moderated`` a
        temperature of each sample.
        """
        _require_state(state)
        require_count("Filter.uncertainty: draws", draws, 1)
        randomness = Randomness(state.seed, state.step, state.belief.mean.device)
        with _without_gradients():
            _, model = self._bind(state)
            inputs, observation = check_inputs(inputs), self.observation.remember(state.memory)
            views = partial(observation.views, model, inputs, randomness)
            query = Query(model, inputs, randomness, views=views, memory=state.memory)
            return _require_predicted(self.prediction.of_each(state.belief, query, draws))

    def run(
        self,
        state: FilterState,
        batches: Iterable[Inputs],
        dt: float | Iterable[float] = 1.0,
        keep_states: bool = False,
    ) -> tuple[FilterState, Outputs]:
        """A whole stream: batches [n, ...] one after the other, or one tensor [steps, n, ...].

        ``dt``: time between steps (see ``step``), a number or one for each batch.
        ``keep_states``: for ``smooth``. Without these, long streams of a linear head run in
        compiled code if numba is installed (docs/guides/small-filters.md).
        """
        from driftfilter.compiled import scan

        _require_state(state)
        with _without_gradients():
            is_plain = isinstance(dt, (int, float)) and dt == 1 and not keep_states
            is_plain = is_plain and HELD not in state.memory and INFLATED not in state.memory
            done = scan.run(self, state, batches) if is_plain else None
            if done is not None:
                return done
            predictions: list[Prediction] = []
            infos: list[StepInfo] = []
            states, times = [state], []
            for batch, time in _pair_with_times(batches, dt):
                state, prediction, info = self.step(state, batch, time)
                predictions.append(prediction)
                infos.append(info)
                if keep_states:
                    states.append(state)
                    times.append(time)
        kept = (states, times) if keep_states else ()
        return state, Outputs(predictions, infos, None, 0, *kept)

    def smooth(
        self, filtered: Outputs | Sequence[FilterState], dt: float | Iterable[float] = 1.0
    ) -> list[FilterState]:
        """States of a stream with the belief that all of the stream gives, later batches too.

        ``filtered`` is what ``run(…, keep_states=True)`` gave, or states one after the other, with
        the ``dt`` between them. The last state stays as it is. What has passed is labelled anew by
        ``predict(smoothed[t + 1], batches[t])``.
        """
        if isinstance(filtered, Outputs):
            allowed = "of run(…, keep_states=True)"
            require(len(filtered.states) > 0, "Filter.smooth: outputs", "no states", allowed)
            states, dt = filtered.states, filtered.times
        else:
            states = list(filtered)
        self._require_a_stream(states)
        with _without_gradients():
            pairs = list(_pair_with_times(states[:-1], dt))
            transitions = [self._bind(state, time)[0] for state, time in pairs]
            beliefs = smooth_beliefs([state.belief for state in states], transitions)
        each = zip(states, beliefs, strict=True)
        return [replace(state, belief=belief) for state, belief in each]

    def _require_a_stream(self, states: Sequence[FilterState]) -> None:
        """Raise unless these are states of one stream, one after the other."""
        require(len(states) > 0, "Filter.smooth: states", states, "one FilterState or more")
        for state in states:
            _require_state(state)
        allowed = "None to smooth: it changes beliefs in ways that the transition does not know"
        require(not self.upkeep, "Filter.upkeep", self.upkeep, allowed)
        held = any(HELD in state.memory or INFLATED in state.memory for state in states)
        each = self.transition.samples
        allowed = "0 to smooth: states do not know how many samples made them"
        require(each == 0, "Transition.samples", each, allowed)
        allowed = "without interventions, which the transition does not know either"
        require(not held, "Filter.smooth: states", "frozen or inflated ones", allowed)
        steps, (first, *others) = [state.step for state in states], states
        fit = steps == list(range(steps[0], steps[0] + len(steps))) and all(
            torch.equal(state.source.mean, first.source.mean) for state in others
        )
        require(fit, "Filter.smooth: states", f"steps {steps}", "one stream's, one after the other")

    def _predict(self, belief: Belief, query: Query) -> Prediction:
        """The rule's prediction; logits that are not finite at its parameters are refused."""
        return _require_predicted(self.prediction(belief, query))

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_bound": None, "_motion": None}  # worked out after unpickling

    def _bind(
        self, state: FilterState, dt: float = 1.0, unit: float = 1.0
    ) -> tuple[BoundTransition, PredictiveModel]:
        """Transition over dt times a unit, and model for a state; a stream has one source, for
        which both are kept.
        """
        _require_state(state)
        require_number("dt", dt, 0, math.inf)
        bound: tuple[Belief, BoundTransition, PredictiveModel] | None = self.__dict__["_bound"]
        if bound is None or bound[0] is not state.source:
            model: PredictiveModel = self.logits  # type: ignore[assignment]  # lifted
            matrix = self.transition.read_out(state.parameters)
            if matrix is not None:
                model = ReadOut(model, matrix.to(state.source.mean))
            bound = (state.source, self.transition.bind(state.source), model)
            object.__setattr__(self, "_bound", bound)
        _, transition, model = bound
        return transition.over(dt * unit), model.recall(state.memory) if state.memory else model

    def require_recalled(self, state: FilterState) -> None:
        """Raise if the model or the loss cannot go on from what a state remembers."""
        self._bind(state)
        self.observation.remember(state.memory)

    def _why_uninformative(self, energy: Energy) -> str:
        """Why a batch can say nothing about the parameters; empty if it can.

        The first batch that is too small for the rules gives a warning.
        """
        used = int(energy.samples.used)
        reason = self.reason(used)
        if reason and used and not self.__dict__["_warned"]:
            object.__setattr__(self, "_warned", True)
            advice = (
                "use larger batches (adapt: window=32), EmpiricalFisher(centered=False) or "
                "Hessian(), or another loss"
            )
            message = f"no information in the batch, transition only: {reason}; {advice}"
            warn(message, NoInformationWarning)
        return reason

    @property
    def needed(self) -> int:
        """Samples with a weight below which a batch says nothing."""
        needed: int = self.__dict__["_needed"]
        return needed

    def reason(self, used: int) -> str:
        """Why a batch with this many samples of a weight says nothing; empty if it says
        something.
        """
        if used >= self.needed:
            return ""
        if used == 0:
            return "no sample passed the weighting"
        return (
            f"{used} sample with a weight, {type(self.observation.loss).__name__} under "
            f"{self.inference} needs {self.needed}"
        )


def _pair_with_times(
    batches: Iterable[Inputs], dt: float | Iterable[float]
) -> Iterator[tuple[Inputs, float]]:
    """Batches, each with the time since the one before."""
    times = dt.tolist() if isinstance(dt, Tensor) else dt
    if not isinstance(times, Iterable):
        yield from ((batch, times) for batch in batches)
        return
    missing: Any = object()
    for batch, time in zip_longest(batches, times, fillvalue=missing):
        fits = batch is not missing and time is not missing
        require(fits, "dt", "more numbers or fewer", "a number, or one for each batch")
        yield batch, time


def _set_mean(before: Tensor, where: Tensor, mean: Tensor | float) -> Tensor:
    """Means [d] with new ones on a mask [d]."""
    if not isinstance(mean, Tensor):
        require_number("mean", mean, -math.inf, math.inf)
        return torch.where(where, float(mean), before)
    found = f"{mean.dtype} of shape {list(mean.shape)}"
    require(mean.shape == before.shape, "mean", found, f"a number, or of shape {[len(before)]}")
    require_finite("mean", mean[where])
    return torch.where(where, mean.to(before), before)


def _require_predicted(prediction: Prediction) -> Prediction:
    """The prediction, if its logits are finite."""
    require_finite(
        "log-probabilities (the model's logits at the parameters predicted with)",
        prediction.log_probabilities,
    )
    return prediction


def _require_weights(weight: float | Tensor, samples: int) -> float | Tensor:
    """A weight of labels, or one for each, if it is finite and above 0."""
    if isinstance(weight, Tensor):
        fits = weight.is_floating_point() and bool((weight > 0).all() and weight.isfinite().all())
        fits = fits and weight.shape in ((), (samples,))
        require(fits, "weight", weight, f"finite numbers > 0, one or of shape [{samples}]")
        return weight
    require_number("weight", weight, 0, math.inf, open_low=True)
    return weight


def _require_state(state: object) -> None:
    if not isinstance(state, FilterState):
        require(False, "state", type(state).__name__, "a FilterState (see Filter.init)")


def _sum_up(told: Sequence[Tensor], prediction: Prediction) -> Tensor:
    """A number [] that is finite if all of them are."""
    if not told:
        return prediction.log_probabilities.new_zeros(())
    return torch.stack([own.to(prediction.log_probabilities) for own in told]).sum()


def _checking_on(state: FilterState) -> AbstractContextManager[None]:
    """On a GPU, checks of numbers wait for the end of a step: each look would stop its queue."""
    _require_state(state)
    return finite_at_the_end() if state.belief.mean.is_cuda else nullcontext()


def _require_proper(belief: Belief, source: Belief) -> None:
    """Raise if a transition without data has left no covariance, or an infinite one;
    conditioning checks its own.

    A stream that starts from a point mass may stay one.
    """
    low, high = torch.stack(belief.covariance.variance().aminmax()).tolist()
    if low == 0 and high < math.inf and source.covariance.variance().min().item() == 0:
        return
    if not 0 < low <= high < math.inf:
        raise NotPositiveDefiniteError(
            f"variances must be finite and > 0, got {low:g} to {high:g} after the transition: a "
            "gain of 0 without noise, or a"
            " discount of directions that no batch informs"
        )

"""Alarms for a stream: the signals of every step against their history, and what is done when one
is out of bounds.

Nothing here knows labels. What the stream looks like (predicted classes, how certain) is judged
against the batches before, in units that account for the number of samples n and of classes k; what
became of the parameters, against the source.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeAlias, final, get_args

import torch
from torch import Tensor

from driftfilter.base.checks import (
    Checked,
    Interval,
    Positive,
    PositiveCount,
    PositiveFraction,
    require,
)
from driftfilter.base.light import Number, as_torch, clip, lighten, match, total
from driftfilter.filtering import FilterState, StepInfo
from driftfilter.gaussian.belief import deviation, kl_divergence
from driftfilter.inference.accuracy import Expectation
from driftfilter.model.centering import CENTER
from driftfilter.model.label_chain import RUNS
from driftfilter.model.label_runs import count_labels, start_counts, stickiness
from driftfilter.model.weighting import LABELS
from driftfilter.monitor.drift_tests import (
    LONG,
    SHORT,
    STEADY,
    Evidence,
    Signals,
    add_pairs,
    compare,
    count_lost,
    dominant,
    doubt,
    extend,
    fade,
    gather,
    shape_of,
    summary,
)
from driftfilter.monitor.state import Event, MonitorState
from driftfilter.networks.batch_trust import SHIFT

Response: TypeAlias = Literal[
    "record", "warn", "inflate", "probation", "revert", "reset", "freeze"
]  # mildest first
_USUAL = 50  # samples of a batch
_HALF = math.log(2)  # of the effective number of classes lost, in nats
_MANY = 4 * SHORT  # samples that tell of a loss of statistics
_FEW = SHORT // 8  # samples below which a model that cannot collapse is not judged
_LASTS = 20.0  # ticks after which it is told
_PAIRS = 8  # pairs of which what they have lost is remembered, two of each of the last streams
OF_MODEL = ("classes_lost", "distance", "divergence")  # what no stream is to blame for

# What lasts, in words.
MEANINGS = {
    "expected_error": ": fewer of the last thousand predictions are expected to be right than you"
    " ask for",
    "one_class": ": nearly all samples are predicted to be of one class; unless they are, compare"
    " with the frozen model",
    "reverts": " ticks: every step is taken back, the model does not adapt",
    "unchanged": " ticks: no parameter has changed, the model does not adapt",
}


class AlarmWarning(UserWarning):
    """An alarm whose response is to warn."""


class Detector(Protocol):
    """A drift detector as in river: ADWIN, PageHinkley, KSWIN."""

    drift_detected: bool

    def update(self, x: float) -> Any:
        """Take the next value."""


class Beside(NamedTuple):
    """What is known beside a step."""

    learns: bool = False  # whether the recipe means to change parameters
    expected: Expectation | None = None  # of the accuracy before it, if that is wanted
    measured: Mapping[str, float] | None = None  # what ``Monitor.measure`` gives, if it was read

    @property
    def expected_error(self) -> float:
        """1 - the expected accuracy, of enough samples; else NaN."""
        if self.expected is None or (told := self.expected.estimate).samples < SHORT:
            return math.nan
        return 1 - told.accuracy


@final
@dataclass(frozen=True)
class Monitor(Checked):
    """Alarms, their thresholds and what is done about them.

        classes_lost    H(b) - H(a) - D >= classes, a and b the classes that the belief and the
                        source (with the batch-norm statistics of now) predict for the same samples:
                        the last 50 k of every ``probe``-th batch, and of fewer if batches are
                        larger than 50 samples (of every eighth at 200), which tell as much. D, the
                        source's doubt, is the rise of its mean predictive entropy above that in
                        the history: a source that does not know its way spreads classes. Every
                        second
                        time it is also asked with its own statistics: carried ones that
                        have collapsed lose classes for both. There H(b) - H(a) >= ln 2 of at least
                        256 samples (100 of two classes), since a source may spread the classes of a
                        new domain. Statistics of a stream of few classes spread these over others
                        for the source: if that with its own agrees with the belief on more samples,
                        the smaller of the two losses counts
        share_gained    G_c / N >= share, G_c = N KL(s ‖ m) + M KL(q ‖ m) of a class with share s in
                        a window of N = max(n, 64) samples, q in the history of M, pooled m, against
                        all others; of the class that gained most. Recorded from half of it on
        uncertainty     the mean predictive entropy of the window rises by so many standard
                        deviations of a sample
        distance, divergence (off by default: it costs up to d³)
                        of the belief from the source, in units of a prior that is most often
                        chosen, not learned: by default an alarm is recorded only
        expected_error (off by default)
                        1 - the expected accuracy over the last thousand samples before the batch
                        (``Adapter.estimate``) >= error, of 64 samples or more

    Of the first three the difference must also be no chance: a tail below ``false_alarm``, bounded
    by Chernoff (classes_lost: under exchangeable labels, a share: under χ² with one degree of
    freedom, of k). N samples in runs tell as much as N (1 - R) / (1 + R) others, R how often a
    label stays in the history, or by the chain of labels if that says more (not of classes lost,
    for what has collapsed predicts runs).

    A collapse of the model and a change of the stream look alike in what is predicted, but not
    beside the source: that sees the same stream, and does not collapse. A share gained, or
    uncertainty, is a change of the stream, or garbage.

    Responses, mildest first; of several alarms the strongest is done: "record" (an event), "warn",
    "inflate" (the covariance, ×``inflation``), "probation" (go on, but ask the last good belief now
    and then, and revert to it as soon as what it predicts is as certain as its history and of such
    classes: the stream is back), "revert" (to the last good belief, a snapshot ``lag`` to 2
    ``lag`` ticks old, batch after batch; of a share gained if a chain of labels puts the stream in
    order, probation in its place), "reset" (to the source; on probation, to the last good belief),
    "freeze" (revert, and adapt no more until ``resume``). Carried batch-norm statistics stay those
    of now, whatever the belief goes back to: they have a guard of their own (``Ema``), and old ones
    would hold a model in a domain that is gone. They go back if they are what has lost the classes.
    After ``patience`` ticks off the history the stream has changed for good: what came lately
    becomes the history, and a belief on probation the good one. What the model does is never
    accepted so. A tick is a batch, or as many small ones as fill a window. Samples of a model
    that learns nothing (``Frozen``), which cannot collapse, are judged eight at a time.
    ``detectors``: signal -> detector (river).

    What lasts for 20 ticks is told once, by a warning (by an event alone if ``on_labels`` is
    "record"): "one_class", 90 % of the samples are predicted to be of the same class (99 % of two
    classes); "reverts", every step was taken back; "unchanged", the parameters are still the
    source's to the last bit.
    """

    classes: Positive = 0.03
    share: Positive = 0.5
    uncertainty: Positive = 0.4
    distance: Positive = 3.0
    divergence: Positive | None = None
    false_alarm: Annotated[float, Interval(0, 1, open_low=True, open_high=True)] = 1e-4
    probe: PositiveCount = 2
    lag: PositiveCount = 5
    patience: PositiveCount = 200
    inflation: Annotated[float, Interval(1, math.inf, open_low=True)] = 4.0
    on_collapse: Response = "reset"
    on_labels: Response = "revert"
    on_uncertainty: Response = "probation"
    on_parameters: Response = "record"
    on_detector: Response = "record"
    detectors: Mapping[str, Detector] = field(default_factory=dict, hash=False)
    error: PositiveFraction | None = None
    on_error: Literal["record", "warn"] = "warn"

    def __post_init__(self) -> None:
        super().__post_init__()
        for signal, detector in self.detectors.items():
            require(
                signal in Signals._fields,
                "Monitor.detectors",
                signal,
                f"a signal: one of {Signals._fields}",
            )
            require(
                hasattr(detector, "update") and hasattr(detector, "drift_detected"),
                f"Monitor.detectors[{signal!r}]",
                detector,
                "a detector with update(value) and drift_detected",
            )

    @classmethod
    def recording(cls) -> Monitor:
        """One that changes nothing."""
        return cls(on_collapse="record", on_labels="record", on_uncertainty="record")

    @property
    def summary(self) -> str:
        """What is done about alarms, in a few words."""
        responses = {signal: response for signal, (_, response) in self._bounds.items()}
        acting = [
            f"{signal} → {response}"
            for signal, response in responses.items()
            if _severity(response) > _severity("warn")
        ]
        return ", ".join(acting) or "alarms are recorded, and change nothing"

    @property
    def expects(self) -> bool:
        """Whether somebody wants to know the expected error."""
        return self.error is not None or _EXPECTED in self.detectors

    def wait(self, past: MonitorState, log_probabilities: Tensor) -> MonitorState | None:
        """What is remembered if samples [n, k] of a model that learns nothing gather until there
        are enough to judge, an eighth of a window; None if there are.
        """
        n = past.gathered + len(log_probabilities)
        if n >= _FEW:
            return None
        waiting = gather(past.waiting, summary(log_probabilities))
        runs = _count_runs(past.runs, log_probabilities)
        past = replace(past, batches=past.batches + 1, turns=past.turns + 1)
        return replace(past, waiting=waiting, gathered=n, runs=runs)

    # The adapter calls these five in turn, and makes the predictions that those called "choose" ask
    # for.

    def choose_probe(
        self, past: MonitorState, state: FilterState, log_probabilities: Tensor | None
    ) -> FilterState | None:
        """A state whose prediction of this batch is to be compared: the source's, now and then."""
        if log_probabilities is None:
            return None
        due = (past.turns + 1) % self._turns(log_probabilities) == 0
        if not due or torch.equal(state.belief.mean, state.source.mean):
            return None
        return replace(state, belief=state.source)

    def choose_apart(
        self, past: MonitorState, state: FilterState, log_probabilities: Tensor | None
    ) -> FilterState | None:
        """The source with its own batch-norm statistics, every second time, if others are
        carried.
        """
        if log_probabilities is None or not any(name.startswith(_NETWORK) for name in state.memory):
            return None
        if (past.turns + 1) % (2 * self._turns(log_probabilities)):
            return None
        return replace(state, belief=state.source, memory=_without_statistics(state.memory))

    def _turns(self, log_probabilities: Tensor) -> int:
        """Batches from one probe to the next."""
        return math.ceil(self.probe * max(1.0, len(log_probabilities) / _USUAL))

    def observe(
        self,
        past: MonitorState,
        state: FilterState,
        info: StepInfo,
        log_probabilities: Tensor | None,
        probe: Tensor | None,
        detectors: Mapping[str, Detector],
        apart: Tensor | None = None,
        known: Beside | None = None,
    ) -> Observed:
        """The signals of a step that led to ``state``.

        ``log_probabilities`` [n, k] are what it predicted (None: nothing), ``probe`` what the state
        of ``choose_probe`` predicts, ``apart`` that of ``choose_apart``; ``known``: what
        is known beside it.
        """
        known = known or Beside()
        named = dict(known.measured or self.measure(state, info))
        named |= {_EXPECTED: known.expected_error}
        moved = named.pop(_MOVED)
        if log_probabilities is None:
            signals = Signals(**_numbers(named))
            alarms = self._out_of_bounds(signals, Evidence()) | _detect(detectors, signals)
            return Observed(signals, alarms, False, None, past.recent, past.pairs, 0)
        classes = log_probabilities.shape[1]
        batch = gather(past.waiting, summary(log_probabilities))
        samples = past.gathered + len(log_probabilities)
        recent = fade(past.recent, batch, samples, STEADY)
        probed = None if probe is None else summary(probe)
        asked = past.asked
        if probed is not None:
            asked = fade(asked, probed, len(log_probabilities), LONG * classes)
        pairs, own = (
            known if other is None else add_pairs(known, log_probabilities, other)
            for known, other in ((past.pairs, probe), (past.apart, apart))
        )
        history = past.reference
        against = {} if history is None else compare(recent, history)
        against |= {"stay": state.memory[RUNS]} if RUNS in state.memory else {}
        against |= {} if past.runs is None else {"stayed": stickiness(lighten(past.runs))}
        against |= {} if pairs is None else _count_lost(pairs, classes)
        if asked is not None and past.answered is not None:
            against["doubt"] = doubt(asked, past.answered)
        beside = dominant(recent) | {_MOVED: moved}
        if own is not None:
            beside |= {_APART + name: value for name, value in _count_lost(own, classes).items()}
        numbers = _numbers(named | shape_of(batch) | against | beside)  # the only look there
        told = {name: numbers.pop(name) for name in beside}
        found = _beside_both({name: numbers.pop(name) for name in against}, told)
        evidence = Evidence.of(found, classes)
        told["learns"] = float(known.learns)
        signals = Signals(*evidence.signals, **numbers)
        early = self._certain(evidence)[1] and signals.share_gained >= self.share / 2
        alarms = self._out_of_bounds(signals, evidence)
        lost = apart is not None and self._have_collapsed(told, classes)
        if lost:
            signals = signals._replace(classes_lost=told[_APART + "lost"])
            alarms["classes_lost"] = _HALF
        alarms |= _detect(detectors, signals)
        return Observed(
            signals,
            alarms,
            early,
            batch,
            recent,
            pairs,
            samples,
            own,
            lost,
            told,
            asked,
            probed,
            _count_runs(past.runs, log_probabilities),
            RUNS in state.memory,
        )

    def _have_collapsed(self, found: Mapping[str, float], classes: int) -> bool:
        """Whether it is the statistics that lose classes."""
        return (
            found.get(_APART + "pairs", 0) >= min(_MANY, LONG * classes)
            and found[_APART + "lost"] >= _HALF
            and found[_APART + "lost_tail"] >= -math.log(self.false_alarm)
        )

    def choose_trial(
        self, past: MonitorState, start: FilterState, seen: Observed
    ) -> FilterState | None:
        """The last good state, if a step on probation is one to try it on."""
        worst = self._worst(past, seen)
        on_probation = worst == "probation" or (past.trying and _severity(worst) <= _PROBATION)
        due = (past.turns + 1) % self.lag == 0
        if not (on_probation and due) or seen.batch is None or past.history is None:
            return None
        return start if past.good is None else past.good

    def _worst(self, past: MonitorState, seen: Observed) -> Response:
        responses = (self._response_to(signal, past, seen) for signal in seen.alarms)
        return max(responses, key=_severity, default="record")

    def measure(self, state: FilterState, info: StepInfo) -> dict[str, Number]:
        """How far the belief is, and its parameters at most; effective number of samples and energy
        of the update.
        """
        weights = lighten(info.weights)
        squares = clip(total(weights * weights), 1e-30, math.inf)
        found: dict[str, Number] = {
            "distance": deviation(state.belief.mean, state.source),
            "effective_samples": total(weights) ** 2 / squares,
            "energy": info.energy,
            _MOVED: _movement(state),
        }
        if self.divergence is not None:
            found["divergence"] = kl_divergence(state.belief, state.source) / state.belief.dimension
        return found

    def _out_of_bounds(self, signals: Signals, evidence: Evidence) -> dict[str, float]:
        """Signals beyond their thresholds, with these."""
        sure = dict(zip(Signals._fields, self._certain(evidence), strict=False))
        return {
            name: limit
            for name, (limit, _) in self._bounds.items()
            if getattr(signals, name) >= limit and sure.get(name, True)
        }

    @property
    def _bounds(self) -> dict[str, tuple[float, Response]]:
        """The alarms: signal -> its threshold, and what is done about it."""
        return {
            "classes_lost": (self.classes, self.on_collapse),
            "share_gained": (self.share, self.on_labels),
            "uncertainty": (self.uncertainty, self.on_uncertainty),
            "distance": (self.distance, self.on_parameters),
            "divergence": (self.divergence or math.inf, self.on_parameters),
            _EXPECTED: (self.error or math.inf, self.on_error),
        }

    def _certain(self, evidence: Evidence) -> list[bool]:
        """Whether classes lost, a share gained and a rise of uncertainty are no chance."""
        return [tail >= -math.log(self.false_alarm) for tail in evidence.tails]

    def response(self, signal: str, trying: bool = False) -> Response:
        """What is done about an alarm of this signal; on probation a good belief waits, which is
        better than the source.
        """
        _, response = self._bounds.get(signal, (math.inf, self.on_detector))
        return "revert" if trying and response == "reset" else response

    def _response_to(self, signal: str, past: MonitorState, seen: Observed) -> Response:
        """What is done about an alarm of a step. Labels that a chain puts in order teach what they
        should: a share gained may be garbage, but need not be taken back at once.
        """
        response = self.response(signal, past.trying)
        gained = signal == "share_gained" and seen.ordered
        return "probation" if gained and response == "revert" else response

    def respond(
        self,
        past: MonitorState,
        start: FilterState,
        state: FilterState,
        seen: Observed,
        trial: Tensor | None,
    ) -> tuple[MonitorState, FilterState]:
        """What the monitor remembers after a step, and the state to go on with.

        ``trial`` [n, k]: what the state of ``choose_trial`` predicts.
        """
        acts = {signal: self._response_to(signal, past, seen) for signal in seen.alarms}
        worst = self._worst(past, seen)
        now = replace(
            past,
            batches=past.batches + 1,
            turns=past.turns + 1,
            recent=seen.recent,
            waiting=None if seen.batch is not None else past.waiting,
            gathered=0 if seen.batch is not None else past.gathered,
            pairs=seen.pairs,
            apart=past.apart if seen.apart is None else seen.apart,
            asked=past.asked if seen.asked is None else seen.asked,
            signals=seen.signals,
            alarmed=(*seen.alarms, *((_EARLY,) if seen.early else ())),
        ).log(*self._notice(past, seen), *_report(past, seen, acts))
        now = self._tell(now, seen, _severity(worst) > _PROBATION)
        good = start if past.good is None else past.good
        if _severity(worst) > _PROBATION:
            now = replace(now, trying=False, trial=None, frozen=worst == "freeze")
            now = self._away(now, seen, state)
            if acts.get("classes_lost") == "reset":  # what a collapsed model predicts is no history
                now = replace(now, history=None, known=None, recent=None)
            after = start if worst == "reset" else good
            return _back(now, worst), _restore(after, state, statistics=seen.statistics_lost)
        if worst == "probation" or past.trying:
            return self._try(replace(now, trying=True), seen, state, good, trial)
        if worst == "inflate":
            covariance = state.belief.covariance.propagate(math.sqrt(self.inflation), 0.0)
            state = replace(state, belief=replace(state.belief, covariance=covariance))
        return self._take(now, seen, state), state

    def _notice(self, past: MonitorState, seen: Observed) -> list[Event]:
        """That labels begin to come in runs: to be known early, and too little to act upon."""
        return (
            [
                Event(
                    past.batches,
                    "share_gained",
                    seen.signals.share_gained,
                    self.share / 2,
                    "record",
                )
            ]
            if seen.early and "share_gained" not in seen.alarms and _EARLY not in past.alarmed
            else []
        )

    def _tell(self, now: MonitorState, seen: Observed, back: bool) -> MonitorState:
        """With what goes on for long, told once."""
        if seen.batch is None:
            return now
        label, share = seen.beside["dominant"], seen.beside["dominance"]
        most = _MOST if len(seen.batch) > 2 + 3 else _MOST_OF_TWO
        holds = {
            f"{_ONE_CLASS} {label:.0f}": share >= most,  # of another class it begins anew
            "reverts": back,
            "unchanged": seen.beside["learns"] > 0 and seen.beside[_MOVED] == 0,
        }
        lasting = {
            name: now.lasting.get(name, 0.0) + seen.ticks for name, there in holds.items() if there
        }
        response = "record" if self.on_labels == "record" else "warn"
        for name, ticks in lasting.items():
            signal = name.split()[0]
            if ticks >= _LASTS and signal not in now.warned:
                value = (share, most) if signal == _ONE_CLASS else (ticks, _LASTS)
                event = Event(now.batches - 1, signal, *value, response)
                now = replace(now, warned=(*now.warned, signal)).log(event)
        return replace(now, lasting=lasting)

    def _take(self, now: MonitorState, seen: Observed, state: FilterState) -> MonitorState:
        """With the batch in the history and, if one is due and nothing is wrong, a snapshot of
        the state.
        """
        if seen.batch is not None:
            now = replace(now, history=extend(now.history, seen.batch, seen.samples), away=0.0)
            now = replace(now, runs=seen.runs)
        if seen.probed is not None:
            now = replace(now, answered=extend(now.answered, seen.probed, seen.samples))
        if any(signal != _EXPECTED for signal in seen.alarms):
            return now
        age = now.age + seen.ticks
        if age < self.lag:
            return replace(now, age=age)
        return replace(
            now, good=now.newer, known=now.later, newer=state, later=now.history, age=0.0
        )

    def _try(
        self,
        now: MonitorState,
        seen: Observed,
        state: FilterState,
        good: FilterState,
        trial: Tensor | None,
    ) -> tuple[MonitorState, FilterState]:
        """A step on probation: back to the good belief if that is at home again."""
        history = now.reference
        if trial is not None and history is not None:
            known = summary(trial)
            if seen.samples < 3 * SHORT // 4:  # too few to judge by
                known = fade(now.trial, known, seen.samples)
            now, rose = replace(now, trial=known), self._at_home(known, history)
            if rose is not None:
                event = Event(now.batches - 1, "uncertainty", rose, self.uncertainty / 2, "revert")
                now = replace(now, trying=False, trial=None, away=0.0, recent=known).log(event)
                domain = {SHIFT: state.memory[SHIFT]} if SHIFT in state.memory else {}
                memory = {**good.memory, **domain}  # an old one would take a new domain for none
                return _back(now, "revert"), replace(good, step=state.step, memory=memory)
        return self._away(now, seen, state), state

    def _at_home(self, trial: Tensor, history: Tensor) -> float | None:
        """The rise of uncertainty of the good belief, if enough samples say that it is none, nor a
        share gained.
        """
        found = compare(trial, history)
        samples, rose = float(found["window"]), float(found["rise"])
        gained = float(found["g_class"]) / samples
        home = rose < self.uncertainty / 2 and gained < self.share / 2
        return rose if samples >= SHORT / 2 and home else None

    def _away(self, now: MonitorState, seen: Observed, state: FilterState) -> MonitorState:
        """One more batch that is not in the history; after enough of them the window becomes the
        history.
        """
        away = now.away + seen.ticks
        if now.recent is None or (
            not now.trying and all(signal in OF_MODEL for signal in seen.alarms)
        ):
            return now
        if away < self.patience:
            return replace(now, away=away)
        event = Event(
            now.batches - 1,
            next(iter(seen.alarms), "uncertainty"),
            away,
            float(self.patience),
            "accept",
        )
        if now.trying:
            now = replace(now, good=state, newer=state, age=0.0, trying=False, trial=None)
        now = replace(now, history=now.recent, known=None, later=None, away=0.0)
        return replace(now, answered=now.asked, runs=seen.runs).log(event)


def _beside_both(found: dict[str, float], told: Mapping[str, float]) -> dict[str, float]:
    """What was found beside the source under the statistics of now; if that under its own agrees
    with the belief on more samples, not more classes are lost than beside this one.
    """
    agrees = told.get(_APART + "agreed", 0.0) > found.get("agreed", 1.0)
    if not agrees or told[_APART + "pairs"] < SHORT:
        return found
    return {**found, "lost": min(found["lost"], told[_APART + "lost"])}


def _report(past: MonitorState, seen: Observed, acts: Mapping[str, str]) -> list[Event]:
    """Events of the alarms: every time if the belief goes back, else when one begins."""
    values, known = (
        seen.signals._asdict(),
        [*past.alarmed, *(_OF_TRIAL if past.trying else ())],
    )
    return [
        Event(past.batches, name, values[name.removeprefix(_DETECTOR)], seen.alarms[name], response)
        for name, response in acts.items()
        if name not in known or _severity(response) > _PROBATION
    ]


def _restore(good: FilterState, state: FilterState, statistics: bool) -> FilterState:
    """A good belief after the step of a bad one; carried batch-norm statistics stay those of now,
    unless they go back too, and what is known of the classes of the stream stays in any case.
    """
    kept = _OF_STREAM if statistics else (*_OF_STREAM, _NETWORK)
    carried = {name: value for name, value in state.memory.items() if name.startswith(kept)}
    if statistics:
        return replace(good, step=state.step, memory={**good.memory, **carried})
    return replace(good, step=state.step, memory={**_without_statistics(good.memory), **carried})


def _without_statistics(memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in memory.items() if not name.startswith(_NETWORK)}


def _back(now: MonitorState, response: str) -> MonitorState:
    """After the belief went back: a newer one is no good, and pairs tell of another one."""
    good = None if response == "reset" else now.good
    return replace(
        now,
        good=good,
        newer=good,
        later=now.known,
        history=now.reference,
        age=0.0,
        pairs=None,
        apart=None if "classes_lost" in now.alarmed else now.apart,
    )


def _severity(response: str) -> int:
    return get_args(Response).index(response)


_PROBATION = _severity("probation")
_DETECTOR = "detector of "
_EXPECTED = "expected_error"  # what users ask for, and nothing that is done about
_NETWORK = "network."  # what a network carries, in the memory
_OF_STREAM = (CENTER, LABELS, RUNS)  # of the classes that the stream has shown
_APART = "apart, "
_ONE_CLASS, _MOST, _MOST_OF_TWO = "one_class", 0.9, 0.99
_EARLY = "share_gained, half of it"
_MOVED = "moved"
_OF_TRIAL = ("uncertainty", "share_gained")  # what may put a belief on probation


def fresh_detectors(monitor: Monitor | None) -> dict[str, Detector]:
    """Copies of its own for an adapter: they change in place."""
    return (
        {}
        if monitor is None
        else {name: copy.deepcopy(detector) for name, detector in monitor.detectors.items()}
    )


def _detect(detectors: Mapping[str, Detector], signals: Signals) -> dict[str, float]:
    """Alarms of detectors that have been given the signals; they have no threshold that could be
    named.
    """
    alarms = {}
    for name, value in signals._asdict().items():
        if name in detectors and not math.isnan(value):
            detectors[name].update(value)
            if detectors[name].drift_detected:
                alarms[_DETECTOR + name] = math.inf
    return alarms


class Observed(NamedTuple):
    """What a monitor saw in a step."""

    signals: Signals
    alarms: dict[str, float]  # signal -> threshold
    early: bool  # whether a share has gained half of what is an alarm
    batch: Tensor | None  # [k + 3], its summary
    recent: Tensor | None  # [k + 3], the window with it
    pairs: Tensor | None  # [2, w], with it if it was probed
    samples: int
    apart: Tensor | None = None  # [2, w], the same beside the source's own statistics
    statistics_lost: bool = False  # whether these lose classes that the source's own do not
    beside: Mapping[str, float] = {}  # what is told if it lasts
    asked: Tensor | None = None  # [k + 3], what the source predicts lately
    probed: Tensor | None = None  # [k + 3], what it predicts for this batch
    runs: Tensor | None = None  # [k + 3], of labels, with the batch
    ordered: bool = False  # whether a chain of labels puts the stream in order

    @property
    def ticks(self) -> float:
        """1, or the part of a window that a small batch fills."""
        return 1.0 if self.batch is None else min(1.0, self.samples / SHORT)


@lru_cache(maxsize=_PAIRS)
def _count_lost(pairs: Tensor, classes: int) -> Mapping[str, float]:
    """``count_lost`` of pairs, which are the same from one probe to the next, by their identity."""
    return _numbers(count_lost(pairs, classes))


def _count_runs(runs: Tensor | None, log_probabilities: Tensor) -> Tensor:
    """[k + 3], labels in the order of the stream with those of a batch (label_runs.py)."""
    known = start_counts(log_probabilities.shape[1], log_probabilities.double())
    counts = lighten(known if runs is None else runs)
    labels = match(log_probabilities.argmax(-1), counts)
    return as_torch(count_labels(counts, labels))


def _movement(state: FilterState) -> Number:
    """The largest change of a parameter since the source."""
    mean, start = state.belief.mean, state.source.mean
    return 0.0 if mean is start else (mean - start).abs().max()


def _numbers(named: dict[str, Number]) -> dict[str, float]:
    """Numbers by name. Those of one device are read together, for each look stops a GPU's queue."""
    places: dict[torch.device, dict[str, Tensor]] = {}
    for name, value in named.items():
        if isinstance(value, Tensor):
            places.setdefault(value.device, {})[name] = value.double()
    read: dict[str, float] = {}
    for there in places.values():
        read.update(zip(there, torch.stack(list(there.values())).tolist(), strict=True))
    return {name: read[name] if name in read else float(named[name]) for name in named}

"""The monitor: signals against independent formulas, alarms that hold for any class count, and what
each response does.
"""

import itertools
import math
import warnings
from dataclasses import FrozenInstanceError, replace
from types import SimpleNamespace
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.model.label_chain import RUNS
from driftfilter.monitor.drift_tests import (
    LONG,
    SHORT,
    Evidence,
    add_pairs,
    bernstein,
    compare,
    count_lost,
    doubt,
    extend,
    fade,
    improbability,
    summary,
)
from driftfilter.monitor.state import MonitorState
from driftfilter.presets.more_published import MORE
from driftfilter.presets.published import PUBLISHED
from driftfilter.storage.state_tensors import to_tensors
from small import assert_same, feed


def network(classes: int = 4) -> nn.Module:
    """Classes by the sign of inputs; batch norm gives the presets something to adapt."""
    torch.manual_seed(0)
    head = nn.Linear(16, classes)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), head)
    with torch.no_grad():
        model(torch.randn(256, 8))
        head.weight.mul_(4)
    return model.eval()


def inputs(seed: int, n: int = 64) -> Tensor:
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))


def garbage(seed: int, n: int = 64) -> Tensor:
    """One sample over and over: one class is predicted, whatever the statistics."""
    return inputs(seed, 1).expand(n, 8).contiguous() * 3


def adapter(preset: str = "tent", **options: Any) -> df.Adapter:
    guarded: dict[str, Any] = {"statistics": "source", "monitor": df.Monitor()}
    return df.adapt(network(), preset, **{**guarded, **options})


def log_probabilities(labels: Tensor, classes: int, certainty: float = 0.9) -> Tensor:
    """Predictions of these classes, all as certain."""
    rest = (1 - certainty) / (classes - 1)
    return torch.full((len(labels), classes), rest).scatter(1, labels[:, None], certainty).log()


def bits(adapted: df.Adapter) -> dict[str, Tensor]:
    return to_tensors(adapted.state)


# Signals


@pytest.mark.parametrize(("n", "m", "k"), [(64, 500, 2), (100, 80, 10), (500, 2000, 30)])
def test_the_g_statistic_is_scipys(n: int, m: int, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    new, old = (torch.randint(k, (size,), generator=generator) for size in (n, m))
    batch, history = (summary(log_probabilities(labels, k)) for labels in (new, old))
    table = torch.stack((new.bincount(minlength=k), old.bincount(minlength=k))).numpy()
    single = [
        scipy.stats.chi2_contingency(
            [[a, n - a], [b, m - b]], correction=False, lambda_="log-likelihood"
        ).statistic
        / 2
        for a, b in table.T
        if a / n > b / m
    ]
    assert float(compare(batch, history)["g_class"]) == pytest.approx(max(single), rel=1e-9)


def test_the_chance_is_bounded_by_the_chi_square_tail() -> None:
    for statistic in (0.0, 0.3, 0.5, 1.0, 5.0, 50.0):
        exact, bound = -scipy.stats.chi2.logsf(2 * statistic, 1), improbability(statistic)
        assert 0 <= bound <= exact
        assert bound >= exact - math.log(2 * statistic + 1) - 1


def labels_in_pairs(k: int, w: int, changed: float, seed: int = 0) -> Tensor:
    """[2, w], labels of which a part is drawn anew, on both sides alike: exchangeable."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randint(k, (w,), generator=generator).expand(2, w).clone()
    anew = torch.rand(2, w, generator=generator) < changed
    pairs[anew] = torch.randint(k, (int(anew.sum()),), generator=generator)
    return pairs


@pytest.mark.parametrize("k", [2, 10, 100])
def test_classes_lost_is_the_difference_of_entropies(k: int) -> None:
    pairs = labels_in_pairs(k, 200 * k, 0.1)
    some = torch.rand(200 * k, generator=torch.Generator().manual_seed(1)) < 0.3
    pairs[0, some] = pairs[0, some] // 2
    own, source = (scipy.stats.entropy(row.bincount(minlength=k)) for row in pairs)
    assert source - own > 0.002
    assert count_lost(pairs, k)["lost"].item() == pytest.approx(source - own, rel=0.02)
    assert count_lost(pairs.flip(0), k)["lost"].item() == pytest.approx(own - source, rel=0.02)


def test_the_chance_of_classes_lost_is_bounded_over_all_exchanges() -> None:
    pairs = torch.tensor(
        [[0, 0, 0, 1, 0, 2, 0, 0, 1, 2, 0, 0], [1, 2, 1, 0, 0, 1, 2, 3, 1, 2, 3, 1]]
    )
    found = count_lost(pairs, 4)
    swaps = [torch.tensor(each).bool() for each in itertools.product((0, 1), repeat=12)]
    values = torch.stack(
        [count_lost(torch.where(swap, pairs.flip(0), pairs), 4)["lost"] for swap in swaps]
    )
    chance = (values >= found["lost"] - 1e-12).double().mean().item()
    assert 0.01 < chance < 0.2
    assert 0.5 < found["lost_tail"].item() <= -math.log(chance)


def test_labels_that_stay_tell_nothing_and_pairs_are_bounded() -> None:
    pairs = labels_in_pairs(10, 600, 0.0)
    assert count_lost(pairs, 10)["lost"].item() == count_lost(pairs, 10)["lost_tail"].item() == 0
    first, second = (log_probabilities(row, 10) for row in labels_in_pairs(10, 400, 0.5))
    joined = add_pairs(add_pairs(None, first, second), second, first)
    assert joined.shape == (2, LONG * 10)
    assert torch.equal(joined[:, -400:], torch.stack((second.argmax(1), first.argmax(1))))
    assert torch.equal(joined[:, :100], torch.stack((first.argmax(1), second.argmax(1)))[:, -100:])


def test_the_rise_of_uncertainty_is_in_deviations_of_a_sample() -> None:
    logits = torch.randn(300, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    old, new = (logits[:200] * 4).log_softmax(-1), (logits[200:] * 2).log_softmax(-1)
    before, after = (scipy.stats.entropy(part.exp().numpy(), axis=1) for part in (old, new))
    assert float(compare(summary(new), summary(old))["rise"]) == pytest.approx(
        (after.mean() - before.mean()) / before.std(), rel=1e-9
    )


def test_the_window_fades_and_classes_of_the_history_do_not() -> None:
    k, n = 3, 20
    batches = [summary(log_probabilities(torch.full((n,), label % k), k)) for label in range(40)]
    recent, history = None, None
    for batch in batches:
        recent, history = fade(recent, batch, n), extend(history, batch, n)
    assert recent is not None
    assert history is not None
    assert history[:k].sum().item() == 40 * n
    weights = (1 - n / SHORT) ** torch.arange(40, dtype=torch.float64).flip(0)
    torch.testing.assert_close(recent, torch.stack(batches).mul(weights[:, None]).sum(0))
    assert history[k].item() == pytest.approx(
        4 * LONG * k * (1 - (1 - n / (4 * LONG * k)) ** 40), rel=1e-9
    )


def test_signals_of_a_step() -> None:
    adapted = adapter("driftfilter", monitor=df.Monitor(divergence=100.0))
    logp = adapted(inputs(0))
    signals, state, info = adapted.signals, adapted.state, adapted.last_info
    assert info is not None
    shares = logp.argmax(-1).bincount(minlength=4) / 64
    moved = (state.belief.mean - state.source.mean) / state.source.covariance.variance().sqrt()
    expected = {
        "distance": moved.square().mean().sqrt().item(),
        "divergence": df.kl_divergence(state.belief, state.source).item() / state.belief.dimension,
        "marginal_entropy": scipy.stats.entropy(shares),
        "largest_share": shares.max().item(),
        "predictive_entropy": scipy.stats.entropy(logp.exp().numpy(), axis=1).mean(),
        "effective_samples": (info.weights.sum().square() / info.weights.square().sum()).item(),
        "energy": info.energy.item(),
    }
    for name, value in expected.items():
        assert getattr(signals, name) == pytest.approx(value, rel=1e-4), name
    assert all(
        math.isnan(getattr(signals, name)) for name in set(df.Signals._fields) - set(expected)
    )
    adapted.update(inputs(1))
    assert adapted.signals.largest_share > 0
    assert adapted.signals.distance > 0


# False alarms


@pytest.mark.slow
@pytest.mark.parametrize("k", [2, 10, 1000])
@pytest.mark.parametrize("n", [1, 16, 256])
@pytest.mark.parametrize("skew", [0.0, 1.0], ids=["balanced", "skewed"])
def test_a_stationary_stream_is_no_alarm(k: int, n: int, skew: float) -> None:
    """Classes from one distribution, any certainty, a third of the labels apart from the source's:
    none in 400 batches.
    """
    generator = torch.Generator().manual_seed(0)
    labels, other = torch.multinomial(
        (torch.arange(k) + 1.0).pow(-skew), 800 * n, replacement=True, generator=generator
    ).view(2, 400, n)
    certainty = torch.rand(400, n, generator=generator) * 0.4 + 0.55
    source = torch.where(torch.rand(400, n, generator=generator) < 1 / 3, other, labels)
    assert not alarms(labels, certainty, k, source)


@pytest.mark.parametrize("k", [2, 10])
@pytest.mark.parametrize("stays", [0.8, 0.95])
def test_runs_that_the_history_has_are_no_alarm(k: int, stays: float) -> None:
    """Labels of a Markov chain, and certainties that last as they do, 200 batches; one class after
    them is an alarm unless runs are so long that it is one of them.
    """
    generator = torch.Generator().manual_seed(0)
    n, batches = SHORT, 200
    leaves = torch.rand(n * batches, generator=generator) >= stays
    drawn = torch.randint(k, (n * batches,), generator=generator)
    certain = torch.rand(n * batches, generator=generator) * 0.4 + 0.55
    place = torch.where(leaves, torch.arange(n * batches), 0).cummax(0).values
    labels, sure = drawn[place].view(batches, n), certain[place].view(batches, n)
    assert not [step for step, signal in alarms(labels, sure, k) if "half" not in signal]
    one = torch.cat((labels, torch.zeros(8, n, dtype=torch.long)))
    found = alarms(one, torch.cat((sure, sure[:8])), k)
    told = [step for step, signal in found if signal == "share_gained"]
    assert (told[:1] == [batches]) == (stays == 0.8 and k == 10)


def test_samples_in_runs_tell_as_much_as_fewer() -> None:
    """The tails of (1 - R) / (1 + R) as many samples, by the formulas of the tests themselves."""
    found = {"past": 500.0, "window": 64.0, "g_class": 40.0, "rise": 0.8, "usual": 0.3}
    found |= {"spread": 0.4, "told": 128.0, "lately": 500.0, "pairs": 99.0, "lost": 0.2}
    found |= {"lost_tail": 20.0, "stayed": 0.6, "doubt": 0.05}
    for stay, part in ((0.0, 0.25), (0.6, 0.25), (0.9, 0.1 / 1.9)):
        evidence = Evidence.of({**found, "stay": stay}, 10)
        samples = part * 128 * 500 / 628
        tails = (
            0.25 * 20,
            improbability(part * 40) - math.log(10),
            bernstein(0.8, samples, (math.log(10) - 0.3) / 0.4),
        )
        assert evidence.tails == pytest.approx(tails)
        assert evidence.signals == pytest.approx((0.15, 40 / 64, 0.8))


def test_what_a_source_in_doubt_spreads_is_no_loss() -> None:
    """From a tenth on half of the labels are the first; the source, less and less sure, gives some
    of them to others.
    """
    generator, k, n = torch.Generator().manual_seed(0), 10, 50
    steps = 120
    common = torch.rand(steps, n, generator=generator) < 0.5
    common[:20] = False
    labels = torch.randint(k, (steps, n), generator=generator) * ~common
    spread = torch.rand(steps, n, generator=generator) < torch.linspace(0, 0.3, steps)[:, None]
    other = torch.where(spread, torch.randint(k, (steps, n), generator=generator), labels)

    def step_on(doubtful: bool) -> list[int]:
        monitor, watch, found = df.Monitor.recording(), MonitorState(), []
        for step in range(steps):
            sure = 0.9 - (0.5 * step / steps if doubtful else 0.0)
            asked = torch.full((n, k), (1 - sure) / (k - 1))
            asked.scatter_(1, other[step][:, None], sure)
            logp = log_probabilities(labels[step], k)
            watch, _ = watch_step(monitor, watch, logp, asked.log())
            found += [step] if "classes_lost" in watch.alarmed else []
        return found

    assert step_on(doubtful=False)
    assert not step_on(doubtful=True)


def test_doubt_is_the_rise_of_the_mean_entropy_in_nats() -> None:
    before = torch.tensor([[0.9, 0.1], [0.5, 0.5]]).log()
    after = torch.tensor([[0.6, 0.4], [0.7, 0.3], [0.5, 0.5]]).log()
    entropies = [-(each.exp() * each).sum(-1).mean().item() for each in (before, after)]
    rose = float(doubt(summary(after), summary(before)))
    assert rose == pytest.approx(entropies[1] - entropies[0])
    assert float(doubt(summary(before), summary(after))) == 0


START = df.Filter(df.LinearHead(2)).init(df.Belief(torch.zeros(2), df.Diagonal(torch.ones(2))))
MOVED = replace(START, belief=df.Belief(torch.ones(2), df.Diagonal(torch.ones(2))))
INFO = df.StepInfo(0, True, "", torch.zeros(1, 1), torch.ones(1), torch.ones(1))


def watch_step(
    monitor: df.Monitor, watch: MonitorState, logp: Tensor, asked: Tensor
) -> tuple[MonitorState, df.FilterState]:
    """A step as an adapter has it watched, if other states predict ``asked``."""
    probe = asked if monitor.choose_probe(watch, MOVED, logp) else None
    seen = monitor.observe(watch, MOVED, INFO, logp, probe, {})
    trial = asked if monitor.choose_trial(watch, START, seen) else None
    return monitor.respond(watch, START, MOVED, seen, trial)


def alarms(
    labels: Tensor, certainty: Tensor, k: int, source: Tensor | None = None
) -> list[tuple[int, str]]:
    """Steps and signals of the alarms, of predictions [steps, n] without a model, and those of the
    source.
    """
    monitor, watch = df.Monitor.recording(), MonitorState()
    found = []
    for step, (row, sure) in enumerate(zip(labels, certainty, strict=True)):
        rest = ((1 - sure) / (k - 1)).clamp_min(1e-12)
        logp = rest[:, None].expand(-1, k).scatter(1, row[:, None], sure[:, None]).log()
        asked = logp if source is None else log_probabilities(source[step], k)
        watch, _ = watch_step(monitor, watch, logp, asked)
        found += [(step, signal) for signal in watch.alarmed]
    return found


@pytest.mark.parametrize("k", [2, 10, 300])
@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.slow), 16, 256])
def test_one_class_is_an_alarm_at_once(k: int, n: int) -> None:
    generator = torch.Generator().manual_seed(0)
    before = max(8, -(-max(10 * k, 16 * SHORT) // n))
    labels = torch.randint(k, (before + -(-5 * SHORT // n), n), generator=generator)
    labels[before:] = 0
    found = alarms(labels, torch.full(labels.shape, 0.9), k)
    assert found
    assert found[0][0] >= before  # nor is anything noticed before
    first = next(step for step, signal in found if signal == "share_gained")
    assert (first - before + 1) * n <= max(n, 4 * SHORT if k == 2 else SHORT)


def test_half_of_a_share_is_recorded_once_and_nothing_is_done() -> None:
    labels = torch.randint(10, (60, 50), generator=torch.Generator().manual_seed(0))
    labels[40:, :18] = 0  # 0.28 nats: from a tenth to four tenths
    monitor, watch = df.Monitor(), MonitorState()
    for row in labels:
        logp = log_probabilities(row, 10)
        watch, after = watch_step(monitor, watch, logp, logp)
        assert after is MOVED
    events = [(event.signal, event.response, event.threshold) for event in watch.events]
    assert events[:1] == [("share_gained", "record", 0.25)]
    assert {response for _, response, _ in events} == {"record"}
    assert watch.events[0].step in (40, 41)
    assert 0.25 <= watch.events[0].value < 0.5


@pytest.mark.parametrize(("k", "n"), [(2, 1), (2, 200), (10, 20), (10, 200), (100, 200)])
def test_classes_that_only_the_belief_loses_are_a_collapse(k: int, n: int) -> None:
    """Two in five labels go to the lower half of the classes; where the source's do so too, it is
    the stream.
    """
    generator, steps = torch.Generator().manual_seed(0), max(40, 160 * k // n)
    labels = torch.randint(k, (steps, n), generator=generator)
    moved = torch.where(torch.rand(steps, n, generator=generator) < 0.4, labels // 2, labels)
    moved[: steps // 4] = labels[: steps // 4]
    certainty = torch.rand(steps, n, generator=generator) * 0.4 + 0.55
    found = alarms(moved, certainty, k, labels)
    assert {signal for _, signal in found} == {"classes_lost"}
    assert found[0][0] >= steps // 4
    assert not alarms(moved, certainty, k, moved)
    assert not alarms(
        labels, certainty, k, moved
    )  # the source predicts fewer classes: the belief has gained them


def test_a_harder_stream_is_uncertainty_alone() -> None:
    labels = torch.randint(10, (60, 100), generator=torch.Generator().manual_seed(0))
    sure = torch.full(labels.shape, 0.9)
    sure[:, ::2] = 0.8
    sure[30:] = 0.6
    found = alarms(labels, sure, 10)
    assert (found[0], {signal for _, signal in found}) == ((30, "uncertainty"), {"uncertainty"})


# Responses


def poisoned(
    monitor: df.Monitor | None, preset: str = "tent", count: int = 5, **options: Any
) -> df.Adapter:
    adapted = adapter(preset, monitor=monitor, **options)
    feed(adapted, map(inputs, range(30)))
    assert not adapted.events
    feed(adapted, map(garbage, range(100, 100 + count)))
    return adapted


def test_reverting_goes_back_to_a_belief_before_the_alarm_and_stays_there() -> None:
    adapted, plain = adapter(monitor=df.Monitor()), adapter(monitor=None)
    beliefs = []
    for seed in range(30):
        assert torch.equal(adapted(inputs(seed)), plain(inputs(seed)))
        beliefs.append(plain.belief.mean)
    for seed in range(3):
        adapted(garbage(seed + 100))
        assert [torch.equal(adapted.belief.mean, mean) for mean in beliefs].index(True) in range(
            30 - 2 * 5 - 1, 30 - 5
        )
        assert adapted.state.step == 31 + seed
    assert {event.response for event in adapted.events} == {"revert"}
    assert [event.step for event in adapted.events if event.signal == "share_gained"] == [
        30,
        31,
        32,
    ]
    adapted(inputs(200))
    assert adapted.events[-1].step == 32
    assert not any(torch.equal(adapted.belief.mean, mean) for mean in beliefs)


def test_recording_changes_nothing_but_the_log() -> None:
    watched, plain = poisoned(df.Monitor.recording()), poisoned(None)
    assert_same(bits(watched), bits(plain))
    assert watched.events
    assert {event.response for event in watched.events} == {"record"}
    assert not plain.events


def test_warning_says_once_what_is_wrong() -> None:
    adapted = poisoned(df.Monitor(on_labels="warn", on_uncertainty="record"), count=0)
    with pytest.warns(df.AlarmWarning, match="beyond"):
        adapted(garbage(100))
    with warnings.catch_warnings():
        warnings.simplefilter("error", df.AlarmWarning)
        adapted(garbage(101))
    assert_same(bits(adapted), bits(poisoned(None, count=2)))


def test_inflating_multiplies_the_covariance() -> None:
    options = {"transition": df.Transition(df.RandomWalk(), df.NoNoise())}
    monitor = df.Monitor(on_labels="inflate", on_uncertainty="record", inflation=9.0)
    inflated, plain = (poisoned(each, "opgd_diag", 1, **options) for each in (monitor, None))
    torch.testing.assert_close(
        inflated.belief.covariance.variance(), 9 * plain.belief.covariance.variance()
    )
    assert torch.equal(inflated.belief.mean, plain.belief.mean)


def test_resetting_goes_back_to_the_source() -> None:
    adapted = poisoned(df.Monitor(on_labels="reset"), count=1)
    assert torch.equal(adapted.belief.mean, adapted.state.source.mean)
    assert [event.response for event in adapted.events] == ["reset"] * len(adapted.events) != []


def test_freezing_stops_until_told_to_go_on() -> None:
    adapted = poisoned(df.Monitor(on_labels="freeze"), count=1)
    before, logp = bits(adapted), adapted(inputs(50))
    adapted.update(inputs(51))
    assert logp.shape == (64, 4)
    assert_same(bits(adapted), before)
    adapted.resume()
    adapted(inputs(50))
    assert not torch.equal(bits(adapted)["belief.mean"], before["belief.mean"])


@pytest.mark.parametrize(
    "options", [{}, {"window": 96}, {"update_every": 2}], ids=["plain", "window", "update_every"]
)
def test_a_frozen_adapter_predicts_by_the_belief_it_keeps(options: dict[str, Any]) -> None:
    """Not by that of a step which is thrown away, and no step is told."""
    told: list[df.StepRecord] = []
    watcher = SimpleNamespace(on_step=told.append)
    monitor = df.Monitor(distance=1e-9, on_parameters="freeze")
    adapted = adapter(
        "opgd", predict_from="posterior", monitor=monitor, callbacks=[watcher], **options
    )
    while not adapted.events:
        adapted(inputs(len(told)))
    last = adapted.last_info
    for seed in range(50, 53):
        expected = adapted.predict(inputs(seed)).log_probabilities
        assert torch.equal(adapted(inputs(seed)), expected)
        assert told[-1].info is None
    adapted.update(inputs(53))
    assert told[-1].info is None
    assert adapted.last_info is last


def test_the_strongest_of_several_responses_is_done() -> None:
    monitor = df.Monitor(on_labels="freeze", distance=1e-9, classes=9.0)
    adapted = adapter("driftfilter", monitor=monitor, labels=None)
    feed(adapted, map(inputs, range(30)))
    assert [(event.signal, event.response) for event in adapted.events] == [("distance", "record")]
    adapted(garbage(100))
    before = bits(adapted)
    adapted(inputs(31))
    assert_same(bits(adapted), before)


def test_a_collapse_goes_back_to_the_source_and_begins_anew() -> None:
    """Tent far too fast, on inputs that stay the same."""
    adapted, plain = (adapter(lr=0.1, monitor=monitor) for monitor in (df.Monitor(), None))
    counts = {}
    for name, each in (("guarded", adapted), ("plain", plain)):
        for seed in range(60):
            labels = each(inputs(seed)).argmax(-1)
        counts[name] = labels.bincount(minlength=4).max().item()
    events = [(event.signal, event.response) for event in adapted.events]
    assert events[0] == ("classes_lost", "reset")
    assert all(
        event.value >= 0.03 == event.threshold
        for event in adapted.events
        if event.signal == "classes_lost"
    )
    assert counts["plain"] > 50 > counts["guarded"]
    first, again = adapted.events[0].step, adapter(lr=0.1)
    feed(again, map(inputs, range(first + 1)))
    assert torch.equal(again.belief.mean, again.state.source.mean)
    assert again.state.step == first + 1


@pytest.mark.parametrize(("samples", "every"), [(20, 2), (50, 2), (64, 3), (100, 4)])
def test_the_source_is_asked_now_and_then_with_the_statistics_of_now(
    samples: int, every: int
) -> None:
    options = {"statistics": df.PseudoCount(16), "labels": None}
    start = adapter("driftfilter", **options, monitor=df.Monitor(probe=2))
    asked = []
    predict = df.Filter.predict

    def noted(self: df.Filter, state: df.FilterState, batch: Tensor) -> df.Prediction:
        asked.append(state)
        return predict(self, state, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(df.Filter, "predict", noted)
        for seed in range(2 * every):
            start(torch.cat((inputs(seed), inputs(seed + 50)))[:samples])
            assert len(asked) == (seed + 1) // every
            if (seed + 1) % every == 0:
                assert asked[-1].belief is start.state.source
                assert asked[-1].memory is start.state.memory
        feed(adapter("source"), map(inputs, range(2)))
    assert len(asked) == 2  # a belief that is the source is not compared with itself


def blurred(seed: int) -> Tensor:
    """Inputs close to zero: the model is unsure of all of them."""
    return inputs(seed) * 0.05


def test_on_probation_the_belief_adapts_and_goes_back_when_the_stream_does() -> None:
    adapted, plain = adapter(monitor=df.Monitor(share=50.0)), adapter(monitor=None)
    for seed in range(30):
        assert torch.equal(adapted(inputs(seed)), plain(inputs(seed)))
    for seed in range(20):
        assert torch.equal(adapted(blurred(seed)), plain(blurred(seed)))
    assert [event.response for event in adapted.events] == ["probation"]
    feed(adapted, map(inputs, range(30, 45)))
    assert [event.response for event in adapted.events] == ["probation", "revert"]
    assert adapted.events[-1].step in range(50, 65)
    feed(adapted, map(inputs, range(45, 70)))
    assert len(adapted.events) == 2


@pytest.mark.parametrize("ordered", [True, False])
def test_a_share_gained_is_on_probation_if_a_chain_orders_the_labels(ordered: bool) -> None:
    """It goes on while one class is common, and back once the good belief sees classes as before;
    without a chain every step is taken back.
    """
    monitor, watch = df.Monitor(), MonitorState()
    state = replace(MOVED, memory={RUNS: torch.tensor(0.0).double()} if ordered else {})
    generator, k, n = torch.Generator().manual_seed(0), 10, 64
    labels = torch.randint(k, (70, n), generator=generator)
    labels[30:45, : 2 * n // 3] = 0
    after = []
    for row in labels:
        logp = log_probabilities(row, k)
        seen = monitor.observe(watch, state, INFO, logp, None, {})
        trial = logp if monitor.choose_trial(watch, START, seen) else None
        watch, next_state = monitor.respond(watch, START, state, seen, trial)
        after.append(next_state)
    acts = [(event.step, event.response) for event in watch.events if event.response != "record"]
    if not ordered:
        assert acts == [(step, "revert") for step in range(30, 45)]
        return
    assert [response for _, response in acts] == ["probation", "revert"]
    assert acts[0][0] == 30
    assert acts[1][0] in range(45, 45 + 2 * monitor.lag)
    assert all(each is state for each in after[:45])
    assert torch.equal(after[acts[1][0]].belief.mean, state.belief.mean)  # of the last snapshot


@pytest.mark.parametrize("stream", ["garbage", "blurred"])
def test_after_enough_patience_the_stream_is_the_new_history(stream: str) -> None:
    adapted = poisoned(
        df.Monitor(patience=15), "source" if stream == "garbage" else "tent", count=0
    )
    bring = {"garbage": lambda _: garbage(100), "blurred": blurred}[stream]
    with pytest.warns(df.AlarmWarning, match="one_class is 1, beyond 0.9"):
        feed(adapted, map(bring, range(40)))
    accepted = [event for event in adapted.events if event.response == "accept"]
    assert accepted[0].step == 30 + 14
    first = adapted.events.index(accepted[0])
    assert len(adapted.events[:first]) > 0
    assert not [event for event in adapted.events[first + 1 :] if event.signal == "share_gained"]


def test_parameters_far_from_the_source_are_never_accepted() -> None:
    adapted = adapter(
        "driftfilter", monitor=df.Monitor(distance=0.01, patience=2, on_parameters="revert")
    )
    feed(adapted, map(inputs, range(12)))
    assert {(event.signal, event.response) for event in adapted.events} == {("distance", "revert")}
    assert adapted.events[-1].value >= adapted.events[-1].threshold == 0.01


# What the adapter does with it


@pytest.mark.parametrize(
    "options", [{}, {"window": 32}, {"update_every": 3}], ids=["plain", "window", "update_every"]
)
@pytest.mark.parametrize("preset", ["tent", "driftfilter", "t3a", "stad", "head_ekf", "opgd"])
def test_without_alarms_nothing_changes(preset: str, options: dict[str, Any]) -> None:
    watched, plain = (
        df.adapt(network(), preset, monitor=monitor, **options) for monitor in (df.Monitor(), None)
    )
    for seed in range(12):
        n = 4 if "window" in options else 32
        assert torch.equal(watched(inputs(seed, n)), plain(inputs(seed, n)))
    assert {event.response for event in watched.events} <= {"record"}
    assert_same(bits(watched), bits(plain))


@pytest.mark.slow
def test_a_resumed_run_is_that_of_an_unbroken_one() -> None:
    stream = [*map(inputs, range(30)), *map(garbage, range(100, 103)), *map(inputs, range(30, 36))]
    stream += [*map(blurred, range(12)), *map(inputs, range(40, 50))]
    for cut in (3, 31, 45, 53):
        whole, first, second = adapter(), adapter(), adapter()
        feed(whole, stream)
        feed(first, stream[:cut])
        second.load_state_dict(first.state_dict())
        assert second.events == first.events
        feed(second, stream[cut:])
        assert second.events == whole.events
        assert {event.response for event in whole.events} == {"revert", "probation"}
        assert list(whole.state_dict()) == list(second.state_dict())
        assert_same(whole.state_dict(), second.state_dict())


def test_a_state_without_a_monitor_starts_a_history() -> None:
    plain, watched = adapter(monitor=None), poisoned(df.Monitor())
    plain(inputs(0))
    assert not any(name.startswith("monitor.") for name in plain.state_dict())
    watched.load_state_dict(plain.state_dict())
    assert watched.events == ()
    plain.load_state_dict(poisoned(df.Monitor()).state_dict())
    assert plain.events == ()


def test_a_reset_clears_the_log() -> None:
    adapted = poisoned(df.Monitor())
    adapted.reset()
    assert adapted.events == ()
    assert all(math.isnan(value) for value in adapted.signals)


def test_values_that_are_not_finite_are_an_error_and_an_event() -> None:
    adapted = adapter()
    adapted(inputs(0))
    before = bits(adapted)
    for call in (adapted, adapted.update):
        with pytest.raises(df.NotFiniteError, match="finite"):
            call(inputs(1).fill_(math.nan))
    assert_same(bits(adapted), before)
    assert [(event.signal, event.response, event.step) for event in adapted.events] == [
        ("not_finite", "record", 1)
    ] * 2


class Jump:
    """A detector of values above a bound, with river's two names."""

    def __init__(self, bound: float) -> None:
        self.bound, self.drift_detected, self.seen = bound, False, 0

    def update(self, x: float) -> None:
        self.drift_detected, self.seen = x > self.bound, self.seen + 1

    def __repr__(self) -> str:
        return f"Jump({self.bound})"  # in ids of tests


def test_detectors_are_asked_and_copied() -> None:
    detector = Jump(0.9)
    adapted = poisoned(
        df.Monitor(on_labels="record", detectors={"largest_share": detector}, on_detector="reset"),
        count=1,
    )
    event = adapted.events[-1]
    assert (event.signal, event.response, event.value) == (
        "detector of largest_share",
        "reset",
        1.0,
    )
    assert torch.equal(adapted.belief.mean, adapted.state.source.mean)
    assert detector.seen == 0


def test_a_detector_of_river() -> None:
    detectors = {
        "predictive_entropy": pytest.importorskip("river.drift").PageHinkley(threshold=1.0)
    }
    adapted = adapter("source", monitor=replace(df.Monitor.recording(), detectors=detectors))
    feed(adapted, map(inputs, range(60)))
    assert not [event for event in adapted.events if event.signal.startswith("detector")]
    feed(adapted, map(blurred, range(30)))
    assert next(
        event.step for event in adapted.events if event.signal == "detector of predictive_entropy"
    ) in range(60, 70)


def test_only_the_last_thousand_events_are_kept() -> None:
    event = df.Event(0, "distance", 1.0, 0.5, "record")
    watch = MonitorState().log(*[event] * 999)
    assert len(watch.log(event, replace(event, step=1), replace(event, step=2)).events) == 1000
    assert watch.log(event, replace(event, step=2)).events[-1].step == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("classes", 0.0),
        ("uncertainty", (1.0,)),
        ("share", -1.0),
        ("distance", math.nan),
        ("divergence", 0.0),
        ("false_alarm", 1.0),
        ("probe", 0),
        ("lag", 0),
        ("patience", 0.5),
        ("inflation", 1.0),
        ("on_labels", "panic"),
        ("on_collapse", "stop"),
        ("on_detector", None),
        ("detectors", {"energie": Jump(1)}),
        ("detectors", {"energy": 3}),
    ],
    ids=str,
)
def test_wrong_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"Monitor.{name}"):
        df.Monitor(**{name: value})


def test_a_monitor_is_a_value() -> None:
    assert df.Monitor() == df.Monitor()
    assert eval(repr(df.Monitor()), {"Monitor": df.Monitor}) == df.Monitor()
    assert hash(df.Monitor()) == hash(df.Monitor())
    with pytest.raises(FrozenInstanceError):
        df.Monitor().share = 1.0  # type: ignore[misc]
    with pytest.raises(ValueError, match="adapt: monitor"):
        df.adapt(network(), "tent", monitor="on")  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0.01, 0.1, 0.4])
@pytest.mark.parametrize("samples", [64, 500])
def test_the_tail_of_a_rise_is_below_the_exact_one_of_rare_events(
    share: float, samples: int
) -> None:
    """Samples that are 0 or 1, their number binomial: -ln P(mean >= share + t), by scipy."""
    deviation = math.sqrt(share * (1 - share))
    for count in range(
        math.ceil(samples * share) + 1, samples // 2 + samples // 4, max(1, samples // 16)
    ):
        rise = (count / samples - share) / deviation
        exact = -scipy.stats.binom.logsf(count - 1, samples, share)
        assert 0 < bernstein(rise, samples, 1 / deviation) <= exact
    assert bernstein(-0.1, samples, 1.0) == 0


@pytest.mark.slow
def test_rare_hard_samples_are_no_rise_of_uncertainty() -> None:
    """Independent samples, one in a hundred uncertain, the others nearly sure: 30 streams of 60
    batches, no alarm.
    """
    for seed in range(30):
        draw = torch.Generator().manual_seed(seed)
        hard = torch.rand(60, 64, generator=draw) < 0.01
        wrong = torch.where(hard, 0.05 + 0.4 * torch.rand(60, 64, generator=draw), 1e-6).double()
        history, window = None, None
        for batch in wrong:
            p = (batch / 3)[:, None].repeat(1, 4)
            p[torch.arange(64), torch.randint(0, 4, (64,), generator=draw)] = 1 - batch
            found = summary(p.log())
            window = fade(window, found, 64)
            if history is not None:
                evidence = Evidence.of(
                    {name: float(value) for name, value in compare(window, history).items()}, 4
                )
                assert evidence.tails[2] < -math.log(1e-4)
            history = extend(history, found, 64)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("history", lambda value: value * math.nan, "monitor.history.* must be finite"),
        ("history", lambda value: value[:-1], "monitor.* must be summaries of one length"),
        ("pairs", lambda value: value + 99, "monitor.pairs.* must be two rows of labels below 4"),
        ("runs", lambda value: value[:-1], r"monitor.runs.* must be of shape \[k \+ 3\]"),
        ("runs", lambda value: -value, "monitor.runs.* must be sums of numbers >= 0"),
        ("runs", lambda value: value.float(), "monitor.runs.* must be torch.float64"),
        ("answered", lambda value: value * math.inf, "monitor.answered.* must be finite"),
    ],
)
def test_a_state_with_a_damaged_history_is_refused(name: str, change: Any, message: str) -> None:
    first, second = adapter(), adapter()
    feed(first, map(inputs, range(9)))
    state = first.state_dict()
    state[f"monitor.{name}"] = change(state[f"monitor.{name}"])
    with pytest.raises(ValueError, match=message):
        second.load_state_dict(state)


@pytest.mark.parametrize("preset", df.presets.names())
def test_published_methods_are_only_recorded_by_default(preset: str) -> None:
    """Also as a Recipe; what is asked for wins."""
    published = preset in {method.__name__ for method in (*PUBLISHED, *MORE)}
    expected = df.Monitor.recording() if published else df.Monitor()
    for recipe in (preset, df.presets.get(preset)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are no source data
            found = df.adapt(network(), recipe)
            asked, none = (
                df.adapt(network(), recipe, monitor=monitor) for monitor in (df.Monitor(), None)
            )
        assert (found.monitor, asked.monitor, none.monitor) == (expected, df.Monitor(), None)
        done = "change nothing" if published else "classes_lost → reset"
        assert done in repr(found)
        assert "classes_lost → reset" in repr(asked)
        assert "no monitor" in repr(none)


def test_a_published_method_goes_its_own_way_through_alarms() -> None:
    plain = df.adapt(network(), "tent", statistics="source", monitor=None)
    as_it_comes = df.adapt(network(), "tent", statistics="source")
    for adapted in (plain, as_it_comes):
        feed(adapted, map(inputs, range(30)))
        feed(adapted, map(garbage, range(100, 105)))
    assert {event.signal for event in as_it_comes.events} >= {"share_gained"}
    assert_same(bits(as_it_comes), bits(plain))


# What is carried, and what lasts


def carrying(**options: Any) -> df.Adapter:
    guarded: dict[str, Any] = {"statistics": df.Ema(0.5, 4.0), "monitor": df.Monitor()}
    return df.adapt(network(), "tent", **{**guarded, **options})


def test_going_back_keeps_the_statistics_of_now() -> None:
    adapted = carrying()
    feed(adapted, map(inputs, range(30)))
    good = {name: value.clone() for name, value in adapted.state.memory.items()}
    adapted(garbage(100))
    assert adapted.events[-1].response == "revert"
    memory = adapted.state.memory
    assert not torch.equal(memory["network.statistics"], good["network.statistics"])
    assert memory["network.diversity"] < 0.7 < good["network.diversity"]  # it is not forgotten


def test_the_monitor_sees_updates_too() -> None:
    called, updated = adapter(), adapter()
    for seed in range(30):
        called(inputs(seed))
        updated.update(inputs(seed))
    for seed in range(3):
        called(garbage(seed + 100))
        updated.update(garbage(seed + 100))
    assert [event.response for event in updated.events] == ["revert"] * len(updated.events)
    assert updated.events == called.events != ()
    assert torch.equal(updated.belief.mean, called.belief.mean)


def broken_statistics(adapted: df.Adapter) -> None:
    """Carried variances so large that the bias is left, and the class that it is for."""
    state = adapted.state_dict()
    state["memory.network.statistics"][16:] = 1e6
    state["memory.network.diversity"].fill_(1e-3)
    adapted.load_state_dict(state)


def test_statistics_that_lose_classes_go_back_to_the_source() -> None:
    """Under them the source loses the same classes: only its own statistics tell."""
    recipe = df.presets.get("bn", statistics=df.Ema(0.5, 4.0))
    model: Any = network()
    model[3].weight.data.mul_(8)
    model[3].bias.data[0] += 5
    lost, held = (
        df.adapt(model, recipe, monitor=monitor)
        for monitor in (df.Monitor(share=50.0, uncertainty=50.0), None)
    )
    for each in (lost, held):
        each(inputs(0))
        broken_statistics(each)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", df.AlarmWarning)
            feed(each, map(inputs, range(1, 40)))
    event = next(event for event in lost.events if event.signal == "classes_lost")
    assert (event.response, event.threshold) == ("reset", math.log(2))
    assert event.value >= math.log(2)
    assert [event.signal for event in lost.events if event.response == "warn"] == ["one_class"]
    variances = [each.state.memory["network.statistics"][16:].max() for each in (lost, held)]
    assert variances[0] < 1e3
    assert variances[1] > 1e5


@pytest.mark.parametrize("statistics", [df.Ema(0.5, 4.0), df.RunningStatistics(0.5)])
def test_the_source_with_its_own_statistics_is_the_model_itself(statistics: Any) -> None:
    """Not one that blends the batch: that of few classes would spread them for it."""
    adapted, model, asked = carrying(statistics=statistics), network(), []
    observe = df.Monitor.observe

    def noted(self: df.Monitor, *args: Any) -> Any:
        asked.append(args[6])
        return observe(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(df.Monitor, "observe", noted)
        for seed in range(12):
            adapted(garbage(seed) + inputs(seed) / 4)
            if asked[-1] is not None:
                expected = model(garbage(seed) + inputs(seed) / 4).log_softmax(-1)
                torch.testing.assert_close(asked[-1], expected)
    assert sum(each is not None for each in asked) == 2


@pytest.mark.parametrize(("agrees", "alarm"), [(True, False), (False, True)])
def test_a_source_that_statistics_mislead_is_no_witness(agrees: bool, alarm: bool) -> None:
    """Half of the samples are of one class; under the statistics of now the source spreads them."""
    generator, k = torch.Generator().manual_seed(0), 4
    own = (torch.rand(400, generator=generator) < 0.5) * torch.randint(
        k, (400,), generator=generator
    )
    spread = torch.randint(k, (400,), generator=generator)
    apart = torch.stack((own, own if agrees else spread.roll(1)))
    now = torch.stack((own, spread))
    watch = MonitorState(pairs=now, apart=apart)
    logp = log_probabilities(own[:64], k)
    seen = df.Monitor().observe(watch, MOVED, INFO, logp, None, {})
    assert ("classes_lost" in seen.alarms) == alarm
    assert seen.signals.classes_lost == pytest.approx(
        0 if agrees else float(count_lost(now, k)["lost"])
    )


@pytest.mark.parametrize(
    ("signal", "make", "batch"),
    [
        ("one_class", lambda: adapter("source"), lambda seed: garbage(100)),
        ("reverts", adapter, lambda seed: garbage(seed) if seed > 30 else inputs(seed)),
        ("unchanged", lambda: adapter(inference=df.GradientStep(df.SGD(1e-60))), inputs),
    ],
    ids=["one_class", "reverts", "unchanged"],
)
def test_what_lasts_is_told_once(signal: str, make: Any, batch: Any) -> None:
    adapted = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        feed(adapted, map(batch, range(80)))
    told = [event for event in adapted.events if event.response == "warn"]
    assert [event.signal for event in told].count(signal) == 1
    assert sum(f"{signal} is" in str(each.message) for each in caught) == 1
    again = make()
    again.load_state_dict(adapted.state_dict())
    feed(again, map(batch, range(80, 120)))  # a warning would be an error
    assert again.events[: len(adapted.events)] == adapted.events


def test_a_rule_that_learns_nothing_may_change_nothing() -> None:
    feed(adapter("source"), map(inputs, range(40)))


def test_single_samples_of_a_model_that_learns_nothing_are_judged_eight_at_a_time() -> None:
    """As one batch of them; a checkpoint in between has those that wait."""
    head = torch.nn.Linear(4, 3)
    inputs = torch.randn(29, 4, generator=torch.Generator().manual_seed(0))
    whole, other = df.adapt(head, "center"), df.adapt(head, "center")
    seen = []
    for number, sample in enumerate(inputs):
        log_probabilities = whole(sample[None])
        seen.append(summary(log_probabilities))
        judged = 8 * ((number + 1) // 8)
        assert whole._now.watch.batches == number + 1
        assert whole._now.watch.gathered == number + 1 - judged
        assert math.isnan(whole.signals.largest_share) is (judged == 0)
        if judged:
            history = whole._now.watch.history
            assert history is not None
            expected = torch.stack(seen[:judged]).sum(0)
            torch.testing.assert_close(history[:-3], expected[:-3])
    other.load_state_dict(whole.state_dict())
    for sample in torch.cat((inputs[3:9], inputs[:5])):
        assert torch.equal(whole(sample[None]), other(sample[None]))
        assert str(whole.signals) == str(other.signals)  # some are NaN
        assert whole._now.watch.gathered == other._now.watch.gathered
    steady = df.adapt(head, "head_ekf", predict_from="prior")
    steady(inputs[:2])
    assert steady._now.watch.gathered == 0  # what learns is judged at once

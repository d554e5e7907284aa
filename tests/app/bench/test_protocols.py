"""Plans against independent counting."""

from collections import Counter
from itertools import groupby, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from driftfilter.app.bench.protocols import (
    PROTOCOLS,
    AnyProtocol,
    Clean,
    Continual,
    Correlated,
    Episodic,
    Gradual,
    Imbalanced,
    Mixed,
    Recurring,
    Returning,
    Sorted,
    StreamPlan,
    StreamSettings,
)
from driftfilter.app.corruptions import CORRUPTIONS
from driftfilter.app.streams import CLEAN, Shift
from small import refuses

NAMES = ("fog", "snow", "frost")
LABELS = torch.arange(1000) * 7 % 10

streams = st.builds(
    StreamSettings,
    corruptions=st.sampled_from([NAMES, ("fog",), (*NAMES, "clean"), tuple(CORRUPTIONS)]),
    severity=st.integers(1, 5),
    batch=st.integers(1, 30),
    images=st.one_of(st.none(), st.integers(1, 40)),
    order=st.sampled_from(["given", "shuffled"]),
    shuffled=st.booleans(),
    seed=st.integers(0, 3),
)
protocols = st.sampled_from(
    [
        Episodic(),
        Continual(),
        Gradual(),
        Mixed(),
        Correlated(),
        Correlated(0.5, 3),
        Sorted(),
        Recurring(),
        Recurring(7),
    ]
)


def _pairs(plan: StreamPlan) -> list[tuple[Shift, int]]:
    """Shift and sample number of everything in the plan, in order."""
    return [
        (plan.domains[domain], sample)
        for step in plan.steps
        for domain, sample in zip(step.domain.tolist(), step.index.tolist(), strict=True)
    ]


def _same(left: StreamPlan, right: StreamPlan) -> bool:
    sizes = [len(step.index) for step in left.steps] == [len(step.index) for step in right.steps]
    return sizes and _pairs(left) == _pairs(right)


@pytest.mark.slow
@given(streams, protocols)
@settings(max_examples=200, deadline=None)
def test_each_sample_comes_once_under_each_corruption(
    stream: StreamSettings, protocol: AnyProtocol
) -> None:
    plan = protocol(stream, torch.arange(40) % 4)
    images = 40 if stream.images is None else stream.images
    counts = Counter((shift.corruption, sample) for shift, sample in _pairs(plan))
    assert counts == Counter(
        (name, sample) for name in stream.corruptions for sample in range(images)
    )
    assert all(step.index.dtype == step.domain.dtype == torch.int64 for step in plan.steps)
    assert all(1 <= len(step.index) <= stream.batch for step in plan.steps)
    assert len(set(plan.domains)) == len(plan.domains)
    assert {shift for shift, _ in _pairs(plan)} == set(plan.domains)


@given(streams, protocols)
@settings(max_examples=50, deadline=None)
def test_a_plan_is_a_function_of_its_fields(stream: StreamSettings, protocol: AnyProtocol) -> None:
    labels = torch.arange(40) % 4
    assert _same(protocol(stream, labels), protocol(stream, labels))


@pytest.mark.slow
@given(streams, protocols)
@settings(max_examples=50, deadline=None)
def test_severities_are_those_of_the_stream(stream: StreamSettings, protocol: AnyProtocol) -> None:
    highest = {"clean": 0} | dict.fromkeys(CORRUPTIONS, stream.severity)
    for corruption, severity in protocol(stream, torch.arange(40) % 4).domains:
        gradual = isinstance(protocol, Gradual) and 1 <= severity <= stream.severity
        assert severity == highest[corruption] or gradual


def test_reset_starts_each_corruption_from_the_source() -> None:
    plan = Episodic()(StreamSettings(NAMES, batch=300), LABELS)
    assert [step.reset for step in plan.steps] == [True, False, False, False] * 3
    assert [len(step.index) for step in plan.steps] == [300, 300, 300, 100] * 3
    assert plan.domains == (Shift("fog"), Shift("snow"), Shift("frost"))
    assert [step.domain.unique().tolist() for step in plan.steps] == [[0]] * 4 + [[1]] * 4 + [
        [2]
    ] * 4
    assert _pairs(plan)[:1000] == [(Shift("fog"), sample) for sample in range(1000)]


@pytest.mark.parametrize("name", [name for name in PROTOCOLS if name != "reset"])
def test_the_others_never_reset(name: str) -> None:
    assert not any(step.reset for step in PROTOCOLS[name]()(StreamSettings(NAMES), LABELS).steps)


def test_clean_shows_the_images_without_corruption_once() -> None:
    plan = Clean()(StreamSettings(NAMES, batch=30, images=100, shuffled=True, seed=1), LABELS)
    assert plan.domains == (CLEAN,)
    assert [len(step.index) for step in plan.steps] == [30, 30, 30, 10]
    assert sorted(sample for _, sample in _pairs(plan)) == list(range(100))


def test_continual_is_reset_without_resets_and_repeats() -> None:
    stream = StreamSettings(NAMES, batch=64, shuffled=True)
    once, apart = Continual()(stream, LABELS), Episodic()(stream, LABELS)
    assert _same(once, apart)
    again = Continual(rounds=3)(stream, LABELS)
    assert _pairs(again) == 3 * _pairs(once)
    assert len(again.steps) == 3 * len(once.steps)
    assert [step.round for step in again.steps] == [
        number for number in range(3) for _ in once.steps
    ]


def test_gradual_severities_rise_and_fall() -> None:
    plan = Gradual()(StreamSettings(NAMES, batch=10, images=100), LABELS)
    stages = [shift for shift, _ in groupby(shift for shift, _ in _pairs(plan))]
    assert stages == [
        Shift(name, severity) for name in NAMES for severity in (1, 2, 3, 4, 5, 4, 3, 2, 1)
    ]
    sizes = [len(list(group)) for _, group in groupby(shift for shift, _ in _pairs(plan))]
    assert max(sizes) - min(sizes) == 1
    assert len(plan.domains) == 15


def test_mixed_batches_hold_all_corruptions() -> None:
    plan = Mixed()(StreamSettings(batch=200), LABELS)
    assert all(len(step.domain.unique()) == 15 for step in plan.steps)
    assert len(plan.steps) == 75
    # Uniformly mixed: the count of a corruption in a batch is hypergeometric, of variance 200/15 ·
    # 14/15 but for a percent.
    counts = torch.stack([step.domain.bincount(minlength=15) for step in plan.steps]).double()
    assert (counts.var(0, unbiased=True) / (200 / 15 * 14 / 15)).mean() == pytest.approx(
        1, abs=0.15
    )


def _changes(plan: StreamPlan, labels: torch.Tensor) -> float:
    """The share of neighbouring samples whose labels differ."""
    found = [labels[sample].item() for _, sample in _pairs(plan)]
    return float(np.mean([left != right for left, right in pairwise(found)]))


def test_correlated_labels_change_seldom() -> None:
    stream = StreamSettings(NAMES, shuffled=True)
    shuffled = _changes(Continual()(stream, LABELS), LABELS)
    assert shuffled == pytest.approx(0.9, abs=0.03)
    weak, strong = (_changes(Correlated(each)(stream, LABELS), LABELS) for each in (10.0, 0.01))
    usual = _changes(Correlated()(stream, LABELS), LABELS)
    assert strong < usual < weak <= shuffled
    assert strong < 0.1
    assert usual < 0.25


def test_correlated_batches_hold_few_classes() -> None:
    labels = torch.arange(10000) % 10
    stream = StreamSettings(("fog",), batch=200)
    plans = Correlated()(stream, labels), Continual()(stream, labels)
    entropy = [_entropy(plan, labels) for plan in plans]
    assert entropy[1] == pytest.approx(np.log(10), abs=1e-6)
    assert entropy[0] < 0.8 * np.log(10)


def _entropy(plan: StreamPlan, labels: torch.Tensor) -> float:
    """Mean entropy of the labels of a batch."""
    shares = [labels[step.index].bincount(minlength=10) / len(step.index) for step in plan.steps]
    return float(
        torch.stack([torch.distributions.Categorical(share).entropy() for share in shares]).mean()
    )


def test_one_slot_brings_each_class_whole_in_an_order_of_its_own() -> None:
    pairs = _pairs(Correlated(slots=1)(StreamSettings(NAMES), LABELS))
    runs = [label for label, _ in groupby(LABELS[sample].item() for _, sample in pairs[:1000])]
    assert sorted(runs) == list(range(10))
    orders = {
        tuple(dict.fromkeys(LABELS[sample].item() for _, sample in pairs[start : start + 1000]))
        for start in (0, 1000, 2000)
    }
    assert len(orders) == 3


def test_correlated_visits_differ() -> None:
    pairs = _pairs(Correlated()(StreamSettings(NAMES), LABELS))
    first, second = (
        [sample for shift, sample in pairs if shift.corruption == name] for name in NAMES[:2]
    )
    assert first != second


def test_sorted_samples_come_class_by_class() -> None:
    pairs = _pairs(Sorted()(StreamSettings(NAMES, shuffled=True), LABELS))
    for start in (0, 1000, 2000):
        part = [LABELS[sample].item() for _, sample in pairs[start : start + 1000]]
        assert part == sorted(part)
        assert len({sample for _, sample in pairs[start : start + 1000]}) == 1000


@pytest.mark.parametrize("ratio", [1.0, 10.0])
def test_imbalanced_shares_fall_to_the_ratio(ratio: float) -> None:
    plan = Imbalanced(ratio)(StreamSettings(NAMES, batch=50), LABELS)
    pairs = _pairs(plan)
    common = []
    for name in NAMES:
        samples = [sample for shift, sample in pairs if shift.corruption == name]
        counts = Counter(LABELS[sample].item() for sample in samples)
        falling = sorted(counts.values(), reverse=True)
        assert falling == [round(100 * ratio ** (-place / 9)) for place in range(10)]
        assert len(set(samples)) == len(samples)
        assert samples != sorted(samples)
        common.append(counts.most_common(1)[0][0])
    assert ratio == 1 or len(set(common)) > 1
    few = Imbalanced(1000.0)(StreamSettings(("fog",)), LABELS[:20])
    assert len(few.samples()[0]) == 2 + 9  # one at least


def test_clean_images_come_after_every_corruption() -> None:
    plan = Returning()(StreamSettings(NAMES, batch=100), LABELS)
    visits = [
        (shift, [sample for _, sample in group])
        for shift, group in groupby(_pairs(plan), lambda pair: pair[0])
    ]
    assert [shift for shift, _ in visits] == [
        shift for name in NAMES for shift in (Shift(name), CLEAN)
    ]
    halves = [list(range(500)), list(range(500, 1000))]
    assert [samples for _, samples in visits] == halves * 3


def test_recurring_shifts_return_with_new_samples() -> None:
    plan = Recurring(rounds=4)(StreamSettings(NAMES, batch=100), LABELS)
    visits = [
        (shift.corruption, [sample for _, sample in group])
        for shift, group in groupby(_pairs(plan), lambda pair: pair[0])
    ]
    assert [name for name, _ in visits] == list(NAMES) * 4
    assert [samples for name, samples in visits if name == "snow"] == [
        list(range(250 * r, 250 * r + 250)) for r in range(4)
    ]
    assert len(plan.domains) == 3


def test_order_and_shuffling_follow_the_seed() -> None:
    def domains(seed: int) -> tuple[Shift, ...]:
        return Continual()(StreamSettings(order="shuffled", seed=seed), LABELS).domains

    assert set(domains(0)) == set(domains(1)) == {Shift(name) for name in CORRUPTIONS}
    assert domains(0) != domains(1)
    first, second = (
        Continual()(StreamSettings(NAMES, shuffled=True, seed=seed), LABELS) for seed in (0, 1)
    )
    assert first.domains == second.domains
    assert _pairs(first) != _pairs(second)
    assert _pairs(first)[:1000] != [
        (Shift("fog"), sample) for _, sample in _pairs(first)[1000:2000]
    ]


test_refused_streams = refuses(
    [
        ({"corruptions": ()}, "corruptions must be a tuple of distinct names"),
        ({"corruptions": ("fog", "fog")}, "corruptions must be a tuple of distinct names"),
        ({"corruptions": "fog"}, "corruptions must be a tuple"),
        ({"severity": 0}, "severity must be an integer from 1 to 5, got 0"),
        ({"severity": 6}, "severity must be an integer from 1 to 5, got 6"),
        ({"batch": 0}, "batch must be an integer >= 1, got 0"),
        ({"images": 0}, "images must be an integer >= 1, got 0"),
        ({"order": "random"}, "order must be 'given' or 'shuffled', got 'random'"),
        ({"shuffled": 1}, "shuffled must be True or False, got 1"),
        ({"seed": -1}, "seed must be an integer >= 0, got -1"),
    ],
    by=lambda fields: StreamSettings(**fields),
)


test_refused_protocols = refuses(
    [
        (lambda: Continual(0), "rounds must be an integer >= 1"),
        (lambda: Recurring(0), "rounds must be an integer >= 1"),
        (lambda: Correlated(0.0), "concentration must be a finite number"),
        (lambda: Imbalanced(0.5), "ratio must be"),
        (lambda: Correlated(slots=0), "slots must be an integer >= 1"),
        (
            lambda: Continual()(StreamSettings(images=1001), LABELS),
            "images must be at most 1000, the samples there are, got 1001",
        ),
    ],
)

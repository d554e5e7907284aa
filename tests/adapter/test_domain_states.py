"""An adapter with a memory of domains: a state for each, which comes back with its domain; samples
of several domains in one batch; saved and resumed bit for bit.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.model.appearance import describe
from driftfilter.networks.network import STATISTICS
from small import assert_same, conv


def images(domain: str, n: int, seed: int = 0) -> Tensor:
    """Images [n, 3, 16, 16] that are smooth, in noise or in the dark."""
    random = torch.Generator().manual_seed(seed)
    small = torch.rand(n, 3, 4, 4, generator=random)
    smooth = nn.functional.interpolate(small, size=16, mode="bilinear")
    noise = 0.4 * torch.randn(n, 3, 16, 16, generator=random)
    fine = 0.02 * torch.randn(n, 3, 16, 16, generator=random)
    return {"smooth": smooth + fine, "noise": smooth + noise, "dark": 0.1 * smooth + fine}[domain]


def network() -> nn.Module:
    torch.manual_seed(0)
    return conv().eval()


def adapter(preset: str = "driftfilter", **options: Any) -> df.Adapter:
    options = {"domains": df.Domains(near=0.0), "labels": None, "monitor": None, **options}
    return df.adapt(network(), preset, **options)


VISITS = ["smooth", "noise", "dark", "noise", "smooth"]


def visits(size: int = 100, each: int = 2) -> list[tuple[str, Tensor]]:
    return [
        (domain, images(domain, size, seed=10 * number + batch))
        for number, domain in enumerate(VISITS)
        for batch in range(each)
    ]


def test_every_domain_has_an_adapter_of_its_own() -> None:
    """TENT with a memory of domains is a TENT for each domain: bit for bit."""
    together = adapter("tent")
    alone = {domain: adapter("tent", domains=None) for domain in set(VISITS)}
    for domain, batch in visits():
        assert_same(together(batch), alone[domain](batch))
    assert len(together.domains) == 3


def test_samples_of_several_domains_are_divided() -> None:
    """Once domains are known a batch of all of them is as many batches."""
    together = adapter("tent")
    alone = {domain: adapter("tent", domains=None) for domain in set(VISITS)}
    for domain, batch in visits():
        together(batch)
        alone[domain](batch)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    parts = {domain: images(domain, 100, seed=77) for domain in ("smooth", "noise", "dark")}
    mixed = torch.cat(list(parts.values()))[order]
    expected = torch.cat([alone[domain](batch) for domain, batch in parts.items()])[order]
    before = together.state_dict()
    predicted = together.predict(mixed)
    assert_same(list(together.state_dict().values()), list(before.values()))
    found = together(mixed)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert predicted.log_probabilities.shape == found.shape
    later = images("dark", 40, seed=5)  # few samples, but the stream is known to be mixed
    groups = together.predict(torch.cat((later, images("noise", 40, seed=6))))
    near = alone["dark"].predict(later).log_probabilities
    torch.testing.assert_close(groups.log_probabilities[:40], near, rtol=1e-4, atol=1e-5)


def test_a_domain_that_returns_finds_its_statistics() -> None:
    one = adapter()
    seen: dict[str, Tensor] = {}
    for number, (domain, batch) in enumerate(visits(each=3)):
        if number % 3 == 0 and domain in seen:
            signatures = describe(batch)
            assert signatures is not None
            state = one._now.enter(one._now.recall(signatures)[0].place).current
            assert_same(state.memory[STATISTICS], seen[domain])
        one(batch)
        seen[domain] = one.state.memory[STATISTICS].clone()


@pytest.mark.parametrize("carry", [1.0, 0.5, 0.0])
def test_a_new_domain_begins_with_a_belief_and_statistics_of_the_source(carry: float) -> None:
    """With a share of what its neighbour has learned: of the way from the source to its mean."""
    rule = df.Domains(carry=carry)
    one, before = adapter(domains=rule), adapter(domains=None)
    for seed in range(3):
        one(images("smooth", 100, seed))
        before(images("smooth", 100, seed))
    signatures = describe(images("noise", 100))
    assert signatures is not None
    now, groups = one._now.divide(rule, signatures)
    state, start = now.enter(groups[0].place).current, now.bound.start if now.bound else None
    assert start is not None
    moved = before.belief.mean - start.belief.mean
    torch.testing.assert_close(state.belief.mean, start.belief.mean + carry * moved)
    assert moved.abs().max() > 1e-3
    assert state.memory.keys() == start.memory.keys()
    fresh = adapter(domains=None)
    fresh(images("noise", 100))
    assert STATISTICS in one.state.memory
    one(images("noise", 100))
    assert_same(one.state.memory[STATISTICS][:4], fresh.state.memory[STATISTICS][:4])


def test_a_new_domain_forgets_what_a_classifier_has_predicted_elsewhere() -> None:
    """A classifier that prefers other classes in the dark sees no runs of them: the chain of labels
    begins anew there, and then knows what it is told. In several domains at once it goes on.
    """
    chain = df.LabelChain()
    chained, plain = adapter("center", labels=chain), adapter("center")
    known = None
    for number, (_, batch) in enumerate(visits()):
        if number in (2, 4, 6, 8):  # the first batch of a visit
            known = None
        told, known = chain(plain(batch), known)
        torch.testing.assert_close(chained(batch), told, rtol=1e-5, atol=1e-6)
    mixed = torch.cat([images(domain, 100, seed=7) for domain in ("smooth", "noise", "dark")])
    for batch in (mixed, images("dark", 60, seed=8)):
        told, known = chain(plain(batch), known)
        torch.testing.assert_close(chained(batch), told, rtol=1e-5, atol=1e-6)


def test_runs_that_a_chain_knows_go_on_in_another_domain() -> None:
    """Unless labels come one by one, in which case nothing is known any more."""
    for chain in (df.LabelChain(), df.LabelChain(skew=0.1)):
        random = torch.Generator().manual_seed(0)
        labels = torch.randint(5, (60,), generator=random)
        told = nn.functional.one_hot(labels, 5).double()
        for repeats, goes_on in ((1, False), (10, True)):
            p = (0.8 * told + 0.04).repeat_interleave(repeats, 0).log()
            known = chain(p, None)[1]
            after = chain.forget(known)
            fresh = chain(p[:7], None)[0]
            assert torch.equal(after, known) == goes_on
            assert torch.equal(chain(p[:7], after)[0], fresh) != goes_on


@pytest.mark.parametrize("size", [100, 24])
@pytest.mark.parametrize("preset", ["driftfilter", "tent", "center"])
def test_saved_and_resumed_bit_for_bit(preset: str, size: int) -> None:
    batches = [batch for _, batch in visits(size, each=4)]
    batches += [torch.cat((images("smooth", 60, 1), images("dark", 60, 2)))[::7] for _ in range(9)]
    options: dict[str, Any] = {"labels": df.LabelChain(), "monitor": df.Monitor()}
    whole = adapter(preset, **options)
    expected = [whole(batch) for batch in batches]
    one = adapter(preset, **options)
    for number, batch in enumerate(batches):
        if number % 3 == 2:
            state = one.state_dict()
            one = adapter(preset, **options)
            one.load_state_dict(state)
        assert_same(one(batch), expected[number])
    own, other = one.state_dict(), whole.state_dict()
    assert own.keys() == other.keys()
    assert_same([own[name] for name in own], [other[name] for name in own])


def test_update_and_call_leave_the_same() -> None:
    called, updated = adapter(), adapter()
    for _, batch in visits():
        called(batch)
        updated.update(batch)
    own, other = called.state_dict(), updated.state_dict()
    # Not the calls that a step could follow, nor what was predicted: an update predicts nothing.
    names = [name for name in own if not name.endswith("calls") and "opinions" not in name]
    assert_same([own[name] for name in names], [other[name] for name in names])


def test_steps_count_on_and_a_reset_forgets_domains() -> None:
    one = adapter()
    for number, (_, batch) in enumerate(visits()):
        one(batch)
        assert one.state.step == number + 1
    assert [name for name, _ in one.domains] == [0, 1, 2]
    one.reset()
    assert one.domains == ()
    assert not any(name.startswith("domains") for name in one.state_dict())


def test_callbacks_are_told_of_domains() -> None:
    told: list[dict[int, int]] = []

    class Listener:
        def on_step(self, step: df.StepRecord) -> None:
            told.append(dict(step.domains))

    one = adapter(callbacks=[Listener()])
    for _, batch in visits(each=1):
        one(batch)
    assert told == [{0: 100}, {1: 100}, {2: 100}, {1: 100}, {0: 100}]
    one(images("dark", 100)[..., :4])  # too small to have a look
    assert told.pop() == {}
    pieces = adapter(callbacks=[Listener()], chunk=70)
    for _, batch in visits(each=1)[:2]:
        pieces(batch)
        pieces.update(batch)
    assert [sum(counts.values()) for counts in told[5:]] == [100] * 4


def test_other_samples_are_of_one_domain() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).eval()
    batches = torch.randn(5, 80, 4)
    one, other = (df.adapt(model, domains=rule) for rule in (df.Domains(), None))
    for batch in batches:
        assert_same(one(batch), other(batch))
    assert one.domains == ()


def test_masks_are_no_images() -> None:
    """Beside tokens, with -inf where nothing is to be looked at."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.norm, self.head = (
                nn.Embedding(20, 6),
                nn.LayerNorm(6),
                nn.Linear(6, 3),
            )

        def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
            found: Tensor = self.head(
                self.norm((mask[:, 0].softmax(-1) @ self.table(tokens))[:, 0])
            )
            return found

    torch.manual_seed(0)
    one, mask = df.adapt(Pooled().eval()), torch.zeros(80, 1, 12, 12)
    mask[..., 9:] = -torch.inf
    for _ in range(3):
        assert one(torch.randint(0, 20, (80, 12)), mask).isfinite().all()
    assert one.domains == ()


@pytest.mark.parametrize("size", [40, 100])
def test_huge_values_leave_nothing_behind_that_fails_later(size: int) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, inputs: Tensor) -> Tensor:
            found: Tensor = self.inner(inputs.clamp(-9, 9))
            return found

    one = df.adapt(Scaled().eval())
    one(1e30 * images("noise", size))
    for seed in range(4):
        assert one(images("smooth", size, seed)).isfinite().all()


def test_images_that_are_all_the_same() -> None:
    one = adapter()
    for _ in range(8):
        assert one(torch.full((100, 3, 16, 16), 0.5)).isfinite().all()
    assert one.domains == ((0, 800),)


def test_a_state_of_another_device_or_dtype_takes_its_domains_along() -> None:
    one = adapter()
    for _, batch in visits(size=72):
        one(batch)
    one = one.double()
    found = one(images("noise", 72, 3).double())
    assert found.dtype == torch.float64
    assert len(one.domains) == 3


def test_domains_and_a_buffer_do_not_go_together() -> None:
    with pytest.raises(ValueError, match=r"Recipe.domains must be None with a buffer"):
        adapter("center", buffer=df.CategoryBalanced())


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("domains.1.state.memory.network.statistics", torch.zeros(0)),
        ("domains.1.recent.[]", torch.rand(5, 7, 16, 16)),
    ],
)
def test_states_that_wait_are_held_to_the_model(name: str, wrong: Tensor) -> None:
    one = adapter()
    for _, batch in visits():
        one(batch)
    assert one.domains[1][0] == 1
    assert int(one.state_dict()["domains.active"]) == 0
    state = {**one.state_dict(), name: wrong}
    with pytest.raises((ValueError, RuntimeError)):
        one.load_state_dict(state)


@pytest.mark.parametrize("name", ["domains.active", "domains.shares", "domains.1.calls"])
def test_crafted_states_are_refused(name: str) -> None:
    one = adapter()
    for _, batch in visits():
        one(batch)
    state = one.state_dict()
    before = {key: value.clone() for key, value in state.items()}
    for wrong in (torch.tensor(-3), torch.zeros(2)):
        with pytest.raises(ValueError, match=name.split(".")[-1]):
            one.load_state_dict({**state, name: wrong})
        assert_same(list(one.state_dict().values()), list(before.values()))


def test_states_of_before_go_into_the_default() -> None:
    """What was saved without a chain of labels, domains and ``ForgetAtHome`` is one domain's."""
    old = df.adapt(network(), labels=None, domains=None, upkeep=None)
    for _, batch in visits()[:3]:
        old(batch)
    new = df.adapt(network())
    new.load_state_dict(old.state_dict())
    assert_same(new.belief.mean, old.belief.mean)
    for _, batch in visits():
        new(batch)
    assert len(new.domains) == 3


def test_a_monitor_compares_every_domain_with_the_source() -> None:
    """Two in every batch, and a comparison in every second batch of each: not always the same."""
    one = adapter("tent", monitor=df.Monitor(probe=2))
    for _, batch in visits():
        one(batch)
    for seed in range(10):
        one(torch.cat((images("smooth", 40, seed), images("dark", 40, seed + 50))))
    smooth, noise, dark = (one._now.enter(place).watch for place in range(3))
    for watch in (smooth, dark):
        assert watch.pairs is not None
        assert watch.pairs.shape[1] == 50 * 3  # as many as are kept
    assert smooth.turns + noise.turns + dark.turns == smooth.batches == dark.batches


def test_probation_is_of_one_domain() -> None:
    one = adapter("tent", monitor=df.Monitor())
    for domain in ("smooth", "dark"):
        for seed in range(20):
            one(images(domain, 100, seed))
    one._now = one._now._replace(watch=replace(one._now.watch, trying=True))
    one(images("smooth", 100, 77))
    assert not one._now.watch.trying
    assert one._now.watch.good is not None
    again = adapter("tent", monitor=df.Monitor())
    again.load_state_dict(one.state_dict())
    for each in (one, again):
        each(images("dark", 100, 78))
        assert each._now.watch.trying
    assert_same(again.belief.mean, one.belief.mean)

"""Several settings abreast: weights against the formula, saved, whole or not at all."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return nn.Sequential(*layers).eval()


def batch(seed: int, n: int = 30) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))


def bank_of(**options: Any) -> df.Bank:
    betas = (0.5, 2.0, 8.0)
    return df.Bank([df.adapt(network(), "opgd", beta=beta) for beta in betas], **options)


def information(logs: Tensor) -> float:
    """I of log-probabilities at the spread of 4, sample by sample."""
    f = logs.double()
    deviations = f - f.mean(-1, keepdim=True)
    p = (4 * deviations / deviations.square().mean().sqrt()).softmax(-1)
    entropies = [-sum(q * q.log() for q in row) for row in p]
    mean = p.mean(0)
    return float(-(mean * mean.log()).sum() - sum(entropies) / len(entropies))


def test_weights_follow_the_formula() -> None:
    bank = bank_of(window=30, rate=50.0, switch=0.01)
    alone = [df.adapt(network(), "opgd", beta=beta) for beta in (0.5, 2.0, 8.0)]
    weights = torch.full((3,), 1 / 3).double()
    for seed in range(4):
        mixed, each = bank(batch(seed)), [own(batch(seed)) for own in alone]
        kept = (1 - 0.01) ** 30
        prior = kept * weights + (1 - kept) / 3
        told = torch.tensor([information(own) for own in each], dtype=torch.float64)
        weights = (prior.log() + 50 * told).softmax(0)
        torch.testing.assert_close(bank.weights, weights)
        torch.testing.assert_close(bank.information, told)
        expected = sum(w * own.double().exp() for w, own in zip(weights, each, strict=True))
        torch.testing.assert_close(mixed.double().exp(), expected, rtol=1e-5, atol=1e-6)
    assert bank.best == int(weights.argmax())


def test_a_window_fades() -> None:
    bank = bank_of(window=60)
    bank(batch(0))
    first = bank._now
    bank(batch(1))
    assert first is not None
    assert bank._now is not None
    assert float(first.samples) == 30
    assert float(bank._now.samples) == 45


def test_temperatures_count_for_nothing() -> None:
    bank, logs = bank_of(), torch.randn(20, 5).log_softmax(-1)
    bank.note([logs, (3 * logs).log_softmax(-1), (0.2 * logs).log_softmax(-1)])
    torch.testing.assert_close(bank.weights, torch.full((3,), 1 / 3).double())


def test_the_best_is_found_and_lost_again() -> None:
    bank = bank_of(predict="pick", window=100)
    sure = 6 * torch.eye(3).repeat(10, 1)
    unsure = sure + 3 * torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    same = torch.eye(3)[:1].repeat(30, 1) + 0.01 * unsure
    said = [each.log_softmax(-1) for each in (sure, unsure, same)]
    for place in (0, 2, 1):
        order = [said[(own - place) % 3] for own in range(3)]
        for _ in range(10):
            bank.note(order)
        assert bank.best == place
    assert bank.predict(batch(0)).shape == (30, 3)


def test_saved_and_resumed_bit_for_bit() -> None:
    one, other = bank_of(), bank_of()
    for seed in range(3):
        one(batch(seed))
    other.load_state_dict({name: value.clone() for name, value in one.state_dict().items()})
    assert torch.equal(one(batch(5)), other(batch(5)))
    assert torch.equal(one.weights, other.weights)
    before = other.state_dict()
    broken = {**one.state_dict(), "members.2.calls": torch.tensor(-1)}
    with pytest.raises(ValueError, match="calls"):
        other.load_state_dict(broken)
    after = other.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    one.reset()
    assert torch.equal(one(batch(0)), bank_of()(batch(0)))


def test_a_bank_of_filters() -> None:
    belief = df.Belief(torch.zeros(4).double(), df.Full(torch.eye(4).double()))
    filters = [
        df.Filter(df.LinearHead(2), observation=df.Gibbs(df.Entropy(), df.Constant(beta)))
        for beta in (0.5, 2.0)
    ]
    pairs = [(filt, filt.init(belief)) for filt in filters]
    bank, again = df.Bank(pairs), df.Bank(pairs)
    for seed in range(3):
        logs = bank(batch(seed).double())
    _, prediction, _ = filters[0].step(pairs[0][1], batch(0).double())
    assert logs.shape == (30, 2)
    again.load_state_dict(bank.state_dict())
    assert torch.equal(again(batch(4).double()), bank(batch(4).double()))
    bank.reset()
    alone = df.Bank(pairs[:1])
    assert torch.allclose(alone(batch(0).double()), prediction.log_probabilities)


def test_a_member_that_fails_leaves_all_as_they_were() -> None:
    bank = bank_of()
    bank(batch(0))
    before = bank.state_dict()
    bank.members[2] = df.adapt(network(), "opgd", output=lambda found: found["none"])
    with pytest.raises(Exception, match=r"none|indices"):
        bank(batch(1))
    after = bank.state_dict()
    own = [name for name in before if not name.startswith("members.2")]
    assert all(torch.equal(before[name], after[name]) for name in own)


@pytest.mark.parametrize(
    ("members", "options", "message"),
    [
        ([], {}, "Bank: members must be one adapter or filter, or more"),
        ([nn.Linear(1, 1)], {}, r"adapters, or pairs \(Filter, its state\), got 'Linear'"),
        (None, {"window": 0}, "Bank: window must be an integer >= 1"),
        (None, {"predict": "best"}, "'mix' or 'pick'"),
        (None, {"switch": 1.0}, "Bank: switch"),
        (None, {"rate": -1.0}, "Bank: rate"),
    ],
)
def test_mistakes(members: Any, options: Any, message: str) -> None:
    given = [df.adapt(network(), "opgd")] if members is None else members
    with pytest.raises(ValueError, match=message):
        df.Bank(given, **options)


def test_predictions_of_each_member_or_none() -> None:
    bank, logs = bank_of(), torch.randn(20, 3).log_softmax(-1)
    for each, message in (
        ([logs], "Bank: predictions must be 3, as many as there are members, got '1 of them'"),
        ([logs[0]] * 3, r"Bank: predictions must be of one shape \[n, k\]"),
        ([logs[:0]] * 3, r"Bank: predictions must be of one shape \[n, k\]"),
    ):
        with pytest.raises(ValueError, match=message):
            bank.note(each)
    assert bank._now is None


def test_what_users_write_to_is_their_own() -> None:
    bank = bank_of()
    bank(batch(0))
    before = bank.weights
    bank.weights.zero_()
    bank.state_dict()["bank.weights"].zero_()
    assert torch.equal(bank.weights, before)
    broken = {**bank.state_dict(), "bank.weights": 2 * before}
    with pytest.raises(ValueError, match=r"state 'bank.weights' must be a sum of 1"):
        bank.load_state_dict(broken)
    assert torch.equal(bank.weights, before)


def test_members_are_several() -> None:
    adapter = df.adapt(network(), "opgd")
    with pytest.raises(ValueError, match="got 'the same adapter twice'"):
        df.Bank([adapter, adapter])
    with pytest.raises(ValueError, match="Bank: members must be one adapter or filter, or more"):
        df.Bank(adapter)  # type: ignore[arg-type]

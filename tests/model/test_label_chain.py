"""The chain of labels: exact against a sum over all paths of its two hidden states, nothing in a
shuffled stream, much in runs; and what an adapter with it predicts, keeps and saves.
"""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import driftfilter as df
from driftfilter.model.label_chain import RUNS, stay
from oracles import Array, array
from small import assert_same, normal, stream, tabular


def by_enumeration(chain: df.LabelChain, streams: list[Array]) -> tuple[list[Array], float]:
    """p(y_t given all batches so far) [n, k] for the samples of each batch, and the mean of s after
    the last one: sums over all paths (s_1, y_1), …, of products of plain conditional probabilities.
    """
    k, j = streams[0].shape[1], len(chain.stays)
    rho = [chain.independent] + [(1 - chain.independent) / (j - 1)] * (j - 1)
    found, seen, shares = [], np.zeros((0, k)), np.zeros((0, k))
    counts, mean = np.zeros(k), 0.0
    for batch in streams:
        counts = counts * max(0.0, 1 - len(batch) / chain.window)
        for p in batch:
            b = counts + chain.count / k
            shares, counts = np.vstack((shares, b / b.sum())), counts + p
        seen = np.vstack((seen, batch))
        joint, stays, total = np.zeros(seen.shape), 0.0, 0.0
        for path in product(product(range(j), range(k)), repeat=len(seen)):
            weight = 1.0
            for t, (s, y) in enumerate(path):
                # the first sample follows a state in which every label is as likely
                before = path[t - 1] if t else None
                same = [s == before[0]] if before else [s == other for other in range(j)]
                odds = [1.0] if before else rho
                move = sum(
                    chance * ((1 - chain.switch) * is_same + chain.switch * rho[s])
                    for chance, is_same in zip(odds, same, strict=True)
                )
                kept = float(y == before[1]) if before else 1 / k
                drawn = chain.stays[s] * kept + (1 - chain.stays[s]) * shares[t, y]
                weight *= move * drawn * seen[t, y] / shares[t, y]
            for t, (_, y) in enumerate(path):
                joint[t, y] += weight
            stays += weight * chain.stays[path[-1][0]]
            total += weight
        found.append(joint[-len(batch) :] / total)
        mean = stays / total
    return found, mean


@pytest.mark.parametrize("sizes", [(4,), (1, 1, 2), (2, 2)])
@pytest.mark.parametrize(
    "chain",
    [
        df.LabelChain((0.0, 0.9), 0.5, 1e-9, 1.0, 100.0),
        df.LabelChain((0.0, 0.7), 0.8, 0.3, 2.0, 3.0),
    ],
    ids=["no switch", "switches, forgets"],
)
def test_labels_are_those_of_a_sum_over_all_paths(
    chain: df.LabelChain, sizes: tuple[int, ...]
) -> None:
    """Of two values of s and three classes, smoothed over each batch, with what was before."""
    batches = normal(sum(sizes), 3, seed=3).log_softmax(-1).split(list(sizes))
    known, found = None, []
    for batch in batches:
        together, known = chain(batch, known)
        found.append(array(together.exp()))
    assert known is not None
    expected, mean = by_enumeration(chain, [array(batch.exp()) for batch in batches])
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-12)
    np.testing.assert_allclose(float(stay(known)), mean, rtol=1e-12)


def test_a_stream_that_never_stays_is_what_the_classifier_says() -> None:
    chain = df.LabelChain((0.0, 1e-12), 1 - 1e-12)
    alone = normal(50, 4, seed=1).log_softmax(-1)
    torch.testing.assert_close(chain(alone, None)[0], alone, rtol=0, atol=1e-9)


def classify(labels: Tensor, right: float, bias: Tensor, seed: int = 0) -> Tensor:
    """log p(y given x) [n, k] of a classifier that knows a label by a logit of so much."""
    noise = normal(len(labels), len(bias), seed=seed)
    return (right * torch.eye(len(bias)).double()[labels] + noise + bias).log_softmax(-1)


def accuracy(log_probabilities: Tensor, labels: Tensor) -> float:
    return float((log_probabilities.argmax(-1) == labels).double().mean())


OTHER = df.LabelChain(tuple(place / 8 for place in range(8)))
BIASED = torch.tensor([2.5, 0.0, 0.0, 0.0, -1.0]).double()
SHUFFLED = torch.randint(5, (2000,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("batch", [1, 50])
@pytest.mark.parametrize("bias", [0 * BIASED, BIASED], ids=["fair", "biased"])
def test_a_shuffled_stream_loses_nothing(bias: Tensor, batch: int) -> None:
    """Nor does one whose classifier says the same class again and again, which looks like runs."""
    alone = classify(SHUFFLED, 2.0, bias)
    together, known = stream(df.LabelChain(), alone, batch)
    assert accuracy(together, SHUFFLED) > accuracy(alone, SHUFFLED) - 0.003
    assert float(stay(known)) < 0.05


@pytest.mark.parametrize(("batch", "least"), [(1, 0.15), (50, 0.25)])
@pytest.mark.parametrize("length", [10, 100])
def test_runs_are_seen(length: int, batch: int, least: float) -> None:
    labels = SHUFFLED[: 2000 // length].repeat_interleave(length)
    alone = classify(labels, 2.0, BIASED)
    together, known = stream(df.LabelChain(), alone, batch)
    assert accuracy(together, labels) > accuracy(alone, labels) + least
    assert float(stay(known)) > 0.7


def test_bad_settings_are_refused() -> None:
    for stays in ((), (0.0,), (0.5, 0.9), (0.0, 1.0), (0.0, 0.9, 0.5), (0.0, "a")):
        with pytest.raises(ValueError, match=r"LabelChain\.stays"):
            df.LabelChain(stays)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"LabelChain\.independent"):
        df.LabelChain(independent=1.0)
    with pytest.raises(ValueError, match=r"LabelChain\.switch"):
        df.LabelChain(switch=0.0)  # a stickiness that underflows would never come back
    with pytest.raises(ValueError, match=r"Recipe\.labels"):
        df.Recipe(labels=True)  # type: ignore[arg-type]
    known = df.LabelChain()(normal(3, 4).log_softmax(-1), None)[1]
    for chain, classes in ((df.LabelChain(), 5), (OTHER, 4)):
        with pytest.raises(ValueError, match="LabelChain: known"):
            chain(normal(3, classes).log_softmax(-1), known)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(3),
        torch.zeros(2, 0),
        torch.zeros(2, 2, dtype=torch.long),
        torch.tensor([[torch.nan, 0.0]]),
        torch.full((2, 3), -torch.inf),
    ],
    ids=["flat", "no class", "integers", "nan", "impossible"],
)
def test_no_log_probabilities_are_refused(wrong: Tensor) -> None:
    with pytest.raises(ValueError, match=r"LabelChain: (log_)?probabilities"):
        df.LabelChain()(wrong, None)


def test_impossible_classes_are_none_of_a_stream() -> None:
    """-inf for a class, as of masked logits, is no wrong number."""
    alone = torch.tensor([[0.0, 0.0, -torch.inf]]).repeat(9, 1).log_softmax(-1)
    together, known = df.LabelChain()(alone, None)
    torch.testing.assert_close(together.exp(), alone.exp())
    assert bool(known.isfinite().all())


# ------------------------------------------------------------------ in an adapter


def adapter(preset: str = "source", **options: Any) -> df.Adapter:
    return df.adapt(tabular(), preset, labels=df.LabelChain(), **options)


BATCHES = normal(160, 4, seed=2).float().split(20)


def test_an_adapter_puts_its_own_predictions_in_order() -> None:
    plain = df.adapt(tabular(), "source")
    alone, ordered = torch.cat([plain(x) for x in BATCHES]), adapter()
    together, known = stream(df.LabelChain(), alone, 20)
    assert_same(torch.cat([ordered(x) for x in BATCHES]), together)
    stays = ordered.state.memory[RUNS]
    torch.testing.assert_close(stays.double(), stay(known), rtol=1e-6, atol=0)


@pytest.mark.parametrize("preset", ["driftfilter", "tent", "center", "buffer"])
def test_update_and_call_leave_the_same(preset: str) -> None:
    def make() -> df.Adapter:
        if preset == "buffer":
            return adapter("center", buffer=df.CategoryBalanced())
        return adapter(preset)

    called, updated = make(), make()
    for x in BATCHES:
        called(x)
        updated.update(x)
    own, other = called.state_dict(), updated.state_dict()
    assert_same(own["labels"], other["labels"])


@pytest.mark.parametrize("window", [0, 30])
def test_update_and_call_leave_the_same_while_frozen(window: int) -> None:
    at_once = df.Monitor(distance=1e-9, on_parameters="freeze")
    called, updated = (adapter("driftfilter", window=window, monitor=at_once) for _ in range(2))
    for x in BATCHES:
        called(x)
        updated.update(x)
    assert called._now.watch.frozen
    assert_same(called.state_dict()["labels"], updated.state_dict()["labels"])


def test_the_default_leaves_tables_as_they_are() -> None:
    ordered, plain = df.adapt(tabular()), df.adapt(tabular(), labels=None)
    for x in BATCHES:
        assert_same(ordered(x), plain(x))
    assert "labels" not in ordered.state_dict()


def test_a_prediction_alone_knows_no_order() -> None:
    ordered, plain = adapter("center"), df.adapt(tabular(), "center", labels=None)
    for x in BATCHES:
        ordered(x)
        plain(x)
    before = ordered.state_dict()["labels"]
    first, second = (each.predict(BATCHES[0]).log_probabilities for each in (ordered, plain))
    assert_same(first, second)
    assert_same(ordered.state_dict()["labels"], before)


def test_a_stream_goes_on_after_saving(tmp_path: Path) -> None:
    whole, first, second = adapter("driftfilter"), adapter("driftfilter"), adapter("driftfilter")
    expected = [whole(x) for x in BATCHES]
    for x in BATCHES[:3]:
        first(x)
    df.save(first, tmp_path / "s.safetensors")
    df.load(second, tmp_path / "s.safetensors")
    assert_same(torch.stack([second(x) for x in BATCHES[3:]]), torch.stack(expected[3:]))
    whole.reset()
    assert_same(torch.stack([whole(x) for x in BATCHES]), torch.stack(expected))


def test_files_from_before_start_the_chain_anew(tmp_path: Path) -> None:
    """A checkpoint of the same recipe without labels has all but what the chain knows; it is
    another recipe, so one has to ask for it.
    """
    old, new = df.adapt(tabular(), "tent"), adapter("tent")
    old(BATCHES[0])
    df.save(old, tmp_path / "s.safetensors")
    with pytest.raises(df.CheckpointError, match="labels was None, here it is 'LabelChain'"):
        df.load(new, tmp_path / "s.safetensors")
    df.load(new, tmp_path / "s.safetensors", strict=False)
    alone = old(BATCHES[1])
    assert_same(new(BATCHES[1]), df.LabelChain()(alone, None)[0])


@pytest.mark.parametrize(
    "wrong",
    [
        torch.ones(9, 4),
        torch.full((9, 4), torch.nan).double(),
        -torch.ones(9, 4).double(),
        torch.ones(4).double(),
        torch.zeros(9, 4).double(),
        torch.cat((torch.full((8, 4), 1 / 24), torch.full((1, 4), 1e30))).double(),
        torch.full((9, 5), 1 / 32).double(),
    ],
    ids=["no chances", "nan", "negative", "flat", "nothing", "too many", "a class more"],
)
def test_crafted_labels_are_refused(wrong: Tensor) -> None:
    ordered = adapter("tent")
    ordered(BATCHES[0])
    before = ordered.state_dict()
    with pytest.raises(ValueError, match="labels"):
        ordered.load_state_dict({**before, "labels": wrong})
    assert_same(ordered.state_dict()["labels"], before["labels"])


def test_what_another_chain_knew_is_left_out(tmp_path: Path) -> None:
    """A file of one chain, loaded without one and with another: labels stay as often as these say,
    not as the file said.
    """
    old = adapter("driftfilter")
    for x in BATCHES[:3]:
        old(x)
    df.save(old, tmp_path / "s.safetensors")
    plain, other = (df.adapt(tabular(), "driftfilter", labels=each) for each in (None, OTHER))
    for new in (plain, other):
        df.load(new, tmp_path / "s.safetensors", strict=False)
        assert "labels" not in new.state_dict()
        assert RUNS not in new.state.memory
    assert_same(other(BATCHES[3]), OTHER(plain(BATCHES[3]), None)[0])
    assert RUNS not in plain.state.memory


def test_stickiness_comes_back_in_one_long_batch() -> None:
    """Beliefs that fall below any float are none to come back from; a slight ε keeps them."""
    labels = torch.cat((torch.arange(2000) * 7 % 4, torch.arange(2000) // 400 % 4))
    alone = (4.0 * torch.nn.functional.one_hot(labels, 4)).log_softmax(-1)
    together, known = df.LabelChain(switch=1e-12)(alone, None)
    assert bool(together.isfinite().all())
    assert float(stay(known)) > 0.9

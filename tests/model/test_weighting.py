"""Weightings against their formulas in NumPy; what they remember, and that they never divide by
zero.
"""

import copy
import math
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from driftfilter import VARIANTS, GaussianNoise, PatchShuffle, ProbabilityDrop
from driftfilter.base.randomness import Purpose, Randomness
from driftfilter.model.losses import Entropy
from driftfilter.model.observation import Gibbs
from driftfilter.model.predictive import LinearHead, lift
from driftfilter.model.weighting import (
    Batch,
    CertaintyDiversity,
    Constant,
    DiversityGate,
    EntropyGate,
    Memory,
    Product,
    Reliability,
    RunGate,
    Weighting,
    entropy,
    look_at,
    looks,
)
from oracles import LabelRuns
from small import assert_same, refuses

NAME = "weighting.mean_prediction"
WEIGHTINGS: list[Weighting] = [
    *(cls() for name, cls in VARIANTS["weighting"].items() if name != "ProbabilityDrop"),
    ProbabilityDrop(GaussianNoise(0.5), drop=-1.0),
    Product((Reliability(), ProbabilityDrop(GaussianNoise(0.5), drop=-1.0))),
    EntropyGate(fraction=1.0, beta=2.0),
    Product((Reliability(beta=3.0), DiversityGate(similarity=1.0, momentum=0.0), Constant(0.5))),
]
IDENTITY = lift(lambda theta, inputs: inputs)
RANDOMNESS = Randomness(3, 7, torch.device("cpu"))
every_weighting = pytest.mark.parametrize("weighting", WEIGHTINGS, ids=repr)


def batch(n: int = 8, k: int = 4, scale: float = 3.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(
        n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def softmax(logits: Tensor) -> npt.NDArray[np.float64]:
    x = np.exp(logits.numpy() - logits.numpy().max(-1, keepdims=True))
    return np.asarray(x / x.sum(-1, keepdims=True))


def entropies(logits: Tensor) -> npt.NDArray[np.float64]:
    p = softmax(logits)
    return -np.asarray((p * np.log(p)).sum(-1))


def weigh(
    weighting: Weighting, logits: Tensor, before: Tensor | None = None, memory: Memory | None = None
) -> tuple[Tensor, Memory]:
    start = torch.ones(len(logits), dtype=logits.dtype) if before is None else before
    # At inputs that are their own logits, if it looks at all.
    weighting = look_at(Batch(IDENTITY, logits[0], logits, RANDOMNESS, None), weighting)
    return weighting(logits, start, {} if memory is None else memory)


# ------------------------------------------------------------------ formulas


@pytest.mark.parametrize("k", [2, 3, 10])
@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_formulas_of_the_weightings_without_memory(k: int, beta: float) -> None:
    logits, before = batch(20, k), torch.rand(20, dtype=torch.float64)
    h, start = entropies(logits), before.numpy()
    gate = 0.4 * math.log(k)
    expected: list[tuple[Weighting, Any]] = [
        (Constant(beta), start * beta),
        (Reliability(beta), start * beta * (1 - h / math.log(k))),
        (EntropyGate(0.4, beta), start * np.where(h < gate, beta * np.exp(gate - h), 0.0)),
    ]
    assert 0 < (h < gate).sum() < 20
    for weighting, values in expected:
        weights, memory = weigh(weighting, logits, before)
        np.testing.assert_allclose(weights.numpy(), values, rtol=1e-12, atol=1e-15)
        assert memory == {}


def test_entropy_is_exact_from_a_tie_to_saturation() -> None:
    f = torch.tensor([0.0, 1.0, 30.0, 700.0, 1e30], dtype=torch.float64)
    s = torch.sigmoid(-f)
    exact = torch.nn.functional.softplus(-f) + f * s  # log(1 + e⁻ᶠ) + f σ(-f)
    torch.testing.assert_close(entropy(torch.stack((f, 0 * f), -1)), exact, rtol=1e-12, atol=1e-15)


def test_the_most_uncertain_sample_has_no_reliability_and_a_certain_one_all_of_it() -> None:
    for k in (2, 3, 10, 1000):
        weights, _ = weigh(
            Reliability(beta=5.0), torch.stack((torch.zeros(k), 60 * torch.eye(k)[0])).double()
        )
        assert 0 <= weights[0] < 1e-12
        assert abs(weights[1] - 5.0) < 1e-12


def test_an_entropy_on_the_gate_is_outside() -> None:
    """H = ln k exactly, fraction 1: H < E₀ fails."""
    assert weigh(EntropyGate(fraction=1.0), torch.zeros(1, 2, dtype=torch.float64))[0].item() == 0.0


# ------------------------------------------------------------------ the diversity gate and its
# memory


def running_mean(
    batches: list[Tensor], similarity: float, momentum: float, start: Tensor
) -> list[tuple[Any, Any]]:
    """(weights, p̄ after the batch) of every batch, sample by sample."""
    mean, steps = None, []
    for logits in batches:
        p, kept = softmax(logits), []
        for i, row in enumerate(p):
            alike = (
                mean is not None
                and abs(row @ mean) / (math.sqrt(row @ row) * math.sqrt(mean @ mean)) >= similarity
            )
            kept.append(0.0 if alike else float(start[i]))
        passed = p[np.array(kept) > 0]
        if len(passed):
            mean = (
                passed.mean(0)
                if mean is None
                else momentum * mean + (1 - momentum) * passed.mean(0)
            )
        steps.append((kept, mean))
    return steps


@pytest.mark.parametrize("similarity", [0.2, 0.6, 1.0])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 1.0])
def test_diversity_gate_over_a_stream(similarity: float, momentum: float) -> None:
    batches = [batch(6, 3, seed=seed) for seed in range(12)]
    start = torch.tensor(
        [1.0, 0.0, 0.5, 2.0, 0.0, 1.0], dtype=torch.float64
    )  # two samples were dropped before
    memory: Memory = {}
    dropped = 0
    for logits, (kept, mean) in zip(
        batches, running_mean(batches, similarity, momentum, start), strict=True
    ):
        weights, memory = weigh(DiversityGate(similarity, momentum), logits, start, memory)
        np.testing.assert_allclose(weights.numpy(), kept, rtol=1e-12)
        np.testing.assert_allclose(memory[NAME].numpy(), mean, rtol=1e-12)
        dropped += sum(weight == 0 for weight in kept) - 2
    assert dropped > 0 or similarity == 1.0


def test_an_empty_gate_leaves_the_memory_as_it_was() -> None:
    logits = batch()
    none = torch.zeros(len(logits), dtype=torch.float64)
    weights, after = weigh(DiversityGate(), logits, none)
    assert torch.equal(weights, none)
    assert after == {}
    memory = {NAME: torch.tensor([0.7, 0.1, 0.1, 0.1], dtype=torch.float64)}
    weights, after = weigh(DiversityGate(similarity=1e-6), logits, None, memory)
    assert weights.count_nonzero() == 0
    assert after[NAME] is memory[NAME]


# ------------------------------------------------------------------ products


def test_a_product_multiplies_and_later_factors_see_what_earlier_ones_kept() -> None:
    logits = torch.tensor(
        [[8.0, 0.0, 0.0], [0.0, 8.0, 0.0], [0.1, 0.0, 0.0]], dtype=torch.float64
    )  # the last is uncertain
    p = torch.tensor(softmax(logits))
    first, diverse = EntropyGate(fraction=0.5, beta=2.0), DiversityGate()
    gated, _ = weigh(first, logits)
    weights, memory = weigh(Product((first, diverse)), logits)
    torch.testing.assert_close(weights, gated)
    assert weights[2] == 0
    torch.testing.assert_close(memory[NAME], p[:2].mean(0))
    weights, memory = weigh(
        Product((diverse, first)), logits
    )  # the other way round the gate remembers all three
    torch.testing.assert_close((weights, memory[NAME]), (gated, p.mean(0)))


def test_a_product_of_constants_and_a_nested_one() -> None:
    logits = batch()
    nested = Product((Constant(2.0), Product((Constant(3.0), Reliability(0.5)))))
    np.testing.assert_allclose(
        weigh(nested, logits)[0].numpy(), 3.0 * (1 - entropies(logits) / math.log(4)), rtol=1e-12
    )


# ------------------------------------------------------------------ every weighting


@every_weighting
@pytest.mark.parametrize("n", [1, 7])
@pytest.mark.parametrize("k", [1, 2, 10])
@pytest.mark.parametrize("value", [0.0, 50.0, -1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_single_constant_and_extreme_batches_are_finite(
    weighting: Weighting, n: int, k: int, value: float, dtype: torch.dtype
) -> None:
    memory: Memory = {}
    spike = value * torch.eye(k, dtype=dtype)[0]
    for row in (spike, torch.full((k,), value, dtype=dtype), spike):
        weights, memory = weigh(weighting, row.expand(n, k), None, memory)
        assert (weights.shape, weights.dtype) == ((n,), dtype)
        assert (weights.isfinite() & (weights >= 0)).all()
        torch.testing.assert_close(weights, weights[:1].expand(n), rtol=1e-5, atol=1e-6)
        assert all(kept.isfinite().all() for kept in memory.values())


@given(st.lists(st.lists(st.floats(-1e30, 1e30), min_size=3, max_size=3), min_size=1, max_size=5))
def test_weights_are_finite_and_not_negative_for_any_logits(rows: list[list[float]]) -> None:
    logits = torch.tensor(rows, dtype=torch.float64)
    for weighting in WEIGHTINGS:
        memory: Memory = {}
        for _ in range(2):
            weights, memory = weigh(weighting, logits, None, memory)
            assert (weights.isfinite() & (weights >= 0)).all()


@every_weighting
def test_neither_arguments_nor_memory_are_changed(weighting: Weighting) -> None:
    logits, before = batch(), torch.rand(8, dtype=torch.float64)
    held = {
        NAME: torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64),
        "another.rule": torch.tensor(7.0),
    }
    same = copy.deepcopy((logits, before, held))
    weights, after = weigh(weighting, logits, before, MappingProxyType(held))
    again, _ = weigh(weighting, logits, before, MappingProxyType(held))
    assert_same((weights, logits, before, held), (again, *same))
    assert after["another.rule"] is held["another.rule"]


test_refusals_name_field_value_and_range = refuses(
    [
        (
            lambda: Constant(beta=0.0),
            r"Constant.beta must be a finite number in \(0, inf\), got 0.0",
        ),
        (
            lambda: Constant(beta=math.nan),
            r"Constant.beta must be a finite number in \(0, inf\), got nan",
        ),
        (
            lambda: Reliability(beta=-1.0),
            r"Reliability.beta must be a finite number in \(0, inf\), got -1.0",
        ),
        (
            lambda: EntropyGate(fraction=0.0),
            r"EntropyGate.fraction must be a finite number in \(0, 1\], got 0.0",
        ),
        (
            lambda: EntropyGate(beta=math.inf),
            r"EntropyGate.beta must be a finite number in \(0, inf\), got inf",
        ),
        (
            lambda: DiversityGate(similarity=1.5),
            r"DiversityGate.similarity must be a finite number in \(0, 1\], got 1.5",
        ),
        (
            lambda: DiversityGate(momentum=-0.1),
            r"DiversityGate.momentum must be a finite number in \[0, 1\], got -0.1",
        ),
        (
            lambda: Product((RunGate(), RunGate(2.0))),
            r"Product.factors must be with one RunGate at most: they share their memory, got",
        ),
        (
            lambda: Product(()),
            r"Product.factors must be a tuple of one weighting or more, got \(\)",
        ),
        (
            lambda: Product((0.5,)),  # type: ignore[arg-type]
            r"Product.factors must be of role .weighting., such as .*, got 0.5",
        ),
        (
            lambda: Product((Constant,)),  # type: ignore[arg-type]
            r"Product.factors must be of role .weighting., such as .*, got <class",
        ),
        (
            lambda: weigh(DiversityGate(), batch(k=3), None, weigh(DiversityGate(), batch(k=4))[1]),
            "logits must be 4 classes as before, got '3 classes'",
        ),
    ]
)


# ------------------------------------------------------------------ gates without weights,
# certainty and diversity


def test_a_gate_that_does_not_weigh_keeps_or_drops() -> None:
    logits = batch(30, 5)
    kept = entropies(logits) < 0.5 * math.log(5)
    assert 0 < kept.sum() < 30
    weights, memory = weigh(
        EntropyGate(0.5, beta=1.5, weighted=False), logits, torch.full((30,), 2.0).double()
    )
    np.testing.assert_array_equal(weights.numpy(), 3.0 * kept)
    assert memory == {}


@pytest.mark.parametrize("temperature", [1 / 3, 2.0])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_certainty_and_diversity_over_a_stream(temperature: float, momentum: float) -> None:
    """Each scaled to [0, 1] in its batch, from a uniform running mean; below the mean diversity a
    sample is left out.
    """
    running, memory = np.full(4, 0.25), None
    for seed in range(4):
        logits = batch(9, 4, seed=seed)
        p, certain = softmax(logits), -entropies(logits)
        diverse = 1 - p @ running / np.linalg.norm(p, axis=1) / np.linalg.norm(running)
        d, c = (
            (values - values.min()) / (values.max() - values.min()) for values in (diverse, certain)
        )
        expected = 2.0 * np.exp(d * c / temperature) * (d >= d.mean())
        weights, memory = weigh(
            CertaintyDiversity(temperature, momentum, 2.0), logits, memory=memory
        )
        running = momentum * running + (1 - momentum) * p.mean(0)
        np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-10)
        np.testing.assert_allclose(memory[NAME].numpy(), running, rtol=1e-13)
        assert 0 < (expected > 0).sum() < 9


def test_certainty_and_diversity_of_samples_that_are_all_alike() -> None:
    """Nothing tells them apart, so that every one counts the same."""
    for n in (1, 5):
        weights, _ = weigh(CertaintyDiversity(beta=3.0), batch(1, 4).expand(n, 4))
        assert weights.tolist() == [3.0] * n


# ------------------------------------------------------------------ labels in runs


def test_run_gate_over_a_stream() -> None:
    """Every sample of a batch has β t, t of the labels so far, its own included."""
    plain, memory = LabelRuns(4), None
    for step, n in enumerate((3, 1, 8, 20)):
        logits, before = batch(n, 4, seed=step), torch.rand(n, dtype=torch.float64)
        plain.count(logits.argmax(-1).tolist())
        weights, memory = weigh(RunGate(1.5), logits, before, memory)
        np.testing.assert_allclose(weights, 1.5 * plain.trust() * before, rtol=1e-12)


def test_run_gate_closes_for_labels_in_runs() -> None:
    labels = torch.arange(400) % 4
    kept = {}
    for name, order in (("turns", labels), ("runs", labels.sort().values)):
        memory: Memory = {}
        for part in (9.0 * torch.eye(4)[order]).split(20):
            weights, memory = weigh(RunGate(), part, None, memory)
        kept[name] = weights.max().item()
    assert kept["runs"] < 0.1
    assert kept["turns"] == 1


# ------------------------------------------------------------------ weightings that look again


class Counting:
    """A linear head that notes the batches it is asked about."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, theta: Tensor, inputs: Tensor) -> Tensor:
        self.seen.append(inputs)
        return LinearHead(3)(theta, inputs.flatten(1))


@pytest.mark.parametrize("before", [None, torch.tensor([1.0, 0.0, 2.0, 1.0] * 5).double()])
@pytest.mark.parametrize("drop", [-1.0, 0.05])
def test_what_the_likely_class_loses_by_shuffled_patches(
    before: Tensor | None, drop: float
) -> None:
    """The formula in NumPy, sample by sample; the model sees the certain samples alone."""
    generator = torch.Generator().manual_seed(4)
    images = torch.randn(20, 2, 4, 4, generator=generator).double()
    theta, model = torch.randn(3 * 32, generator=generator).double(), Counting()
    rule = ProbabilityDrop(PatchShuffle(2), drop, fraction=0.3, limit=0.6, beta=1.5)
    logits = LinearHead(3)(theta, images.flatten(1))
    start = torch.ones(20).double() if before is None else before
    weights, memory = rule.look(Batch(model, theta, images, RANDOMNESS, None))(logits, start, {})  # type: ignore[arg-type]
    h, p, size = entropies(logits), softmax(logits), math.log(3)
    certain = [i for i in range(20) if start[i] > 0 and h[i] < 0.6 * size]
    shuffled = PatchShuffle(2)(images[certain], RANDOMNESS.generator(Purpose.WEIGHTING))
    (seen,) = model.seen
    assert torch.equal(seen, shuffled)
    after = softmax(LinearHead(3)(theta, shuffled.flatten(1)))
    expected = np.zeros(20)
    for place, i in enumerate(certain):
        lost = p[i].max() - after[place][p[i].argmax()]
        if lost > drop:
            expected[i] = start[i] * 1.5 * (math.exp(0.3 * size - h[i]) + math.exp(lost))
    assert 0 < (expected > 0).sum() < 20
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-12, atol=1e-15)
    assert memory == {}


def test_a_weighting_that_looks_is_known_inside_of_a_product() -> None:
    looking = ProbabilityDrop(GaussianNoise())
    assert [looks(looking), looks(Constant())] == [True, False]
    assert looks(Product((Constant(), Product((looking,)))))
    assert not looks(Product((Constant(), EntropyGate())))
    with pytest.raises(ValueError, match="ProbabilityDrop must be asked to look at a batch, got"):
        looking(5 * torch.eye(3), torch.ones(3), {})


def test_samples_are_looked_at_again_where_they_are_weighed_again() -> None:
    """At the sharp point of SAM: the weights there, of the samples that had one."""
    generator = torch.Generator().manual_seed(4)
    inputs, theta = torch.randn(20, 4, generator=generator).double(), torch.randn(12).double()
    rule = Gibbs(Entropy(), ProbabilityDrop(lambda images, _: images.roll(1, -1), 0.0))
    there = theta + 0.5 * torch.randn(12, generator=generator).double()
    first, _ = rule(LinearHead(3), theta, inputs, {}, RANDOMNESS)
    fresh, _ = rule(LinearHead(3), there, inputs, {}, RANDOMNESS)
    kept = first.samples.weights > 0
    expected = fresh.samples.coefficients * kept
    torch.testing.assert_close(first.reweigh_at(there).coefficients, expected)
    assert not torch.equal(expected, first.samples.coefficients)

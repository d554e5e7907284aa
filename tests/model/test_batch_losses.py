"""Losses of a whole batch, of its features and of source data: plain formulas, and derivatives by
finite differences through a network.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import driftfilter as df
from driftfilter.base.randomness import Purpose, Randomness
from driftfilter.inference.curvature import GaussNewton
from driftfilter.model.expansion import couple
from driftfilter.model.losses import Loss, as_loss
from driftfilter.model.observation import Energy
from driftfilter.model.survey import SourceBatch
from published.more_methods import coral, covariance, supervised_contrast
from small import assert_same, normal, refuses

RANDOMNESS = Randomness(5, 3, torch.device("cpu"))
NOISE = df.GaussianNoise(0.3)


# ------------------------------------------------------------------ any function of a batch


def coupled_sum(outputs: Tensor) -> Tensor:
    """Every sample and view meets every other [n]."""
    mean = outputs.mean((0, 1))
    return ((outputs - mean).sin() * outputs.roll(1, 1)).sum((0, 2)) + mean.square().sum()


@pytest.mark.parametrize("number", [False, True])
@pytest.mark.parametrize("weights", [(1.0,) * 5, (0.5, 0.0, 2.0, 1.0, 0.0)])
def test_derivatives_of_a_coupled_function(number: bool, weights: tuple[float, ...]) -> None:
    """Rows sum to the gradient of the weighted loss, blocks are those of its Hessian; samples
    without a weight are not there.
    """
    w = torch.tensor(weights).double()
    kept, outputs = w > 0, normal(2, 5, 3, seed=1)

    def function(seen: Tensor) -> Tensor:
        return coupled_sum(seen).mean() if number else coupled_sum(seen)

    def total(inside: Tensor) -> Tensor:
        values = function(inside)
        return (w[kept] * values).sum() if values.dim() else w.sum() * values

    found = couple(function, outputs, w)
    inside = outputs[:, kept].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(total(inside), inside)
    torch.testing.assert_close((w[:, None] * found.gradient)[:, kept], gradient)
    assert (found.gradient[:, ~kept] == 0).all()
    assert (w @ found.value.sum(0)).item() == pytest.approx(total(inside).item(), rel=1e-12)
    hessian = torch.autograd.functional.hessian(total, inside.detach())
    blocks = found.hessian()
    places = kept.nonzero()[:, 0].tolist()
    for view in range(2):
        for place, i in enumerate(places):
            expected = hessian[view, place, :, view, place] / w[i]
            torch.testing.assert_close(blocks[view, i], expected)
    assert (blocks[:, ~kept] == 0).all()
    root = found.root()
    values, vectors = torch.linalg.eigh(blocks)
    positive = vectors @ torch.diag_embed(values.clamp_min(0)) @ vectors.mT
    torch.testing.assert_close(root @ root.mT, positive, rtol=1e-9, atol=1e-12)


def test_too_few_samples_have_no_coupled_loss() -> None:
    outputs, weights = normal(1, 3, 2), torch.tensor([0.0, 1.0, 0.0]).double()
    found = couple(lambda seen: seen.var(1).sum(), outputs, weights)
    parts = (found.value, found.gradient, found.hessian())
    assert all((part == 0).all() for part in parts)


def test_a_loss_of_a_batch_written_by_a_user_is_the_library_s() -> None:
    """Information maximisation: gradient and the blocks of its Hessian."""

    def information(seen: df.Seen) -> Tensor:
        p = seen.logits[0].softmax(-1)
        return (p * p.log()).sum(-1).mean().neg() + (p.mean(0) * p.mean(0).log()).sum()

    theta, inputs = normal(12), normal(6, 4, seed=1)
    mine, theirs = (
        df.Gibbs(loss, df.Constant(2.0))(df.LinearHead(3), theta, inputs, {}, RANDOMNESS)[0]
        for loss in (df.BatchLoss(information), df.InformationMaximization())
    )
    torch.testing.assert_close(mine.evaluation.gradient(), theirs.evaluation.gradient())
    torch.testing.assert_close(
        mine.evaluation.expansion.hessian(), theirs.evaluation.expansion.hessian()
    )
    assert mine.evaluation.value().item() == pytest.approx(theirs.evaluation.value().item())


# ------------------------------------------------------------------ through a network


def network() -> nn.Sequential:
    torch.manual_seed(0)
    head = nn.Linear(5, 4)
    head.weight.data *= 4  # some samples are certain, some are not
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), head).double().eval()


NETWORK = network()
DATA = [(normal(8, 3, seed=seed), torch.arange(8) % 4) for seed in (11, 12, 13)]
MODEL = df.Network(NETWORK, df.AllParameters(), "source")
THETA, INPUTS = MODEL.mean(), 1.5 * normal(7, 3, seed=2)


def features_of(inputs: Tensor) -> Tensor:
    found: Tensor = NETWORK[1](NETWORK[0](inputs)).detach()
    return found


def energies(loss: Any, weighting: Any = None, steps: int = 1, **others: Any) -> list[Energy]:
    """The energies of a stream of batches at θ_S, with what the loss remembers."""
    rule = df.Gibbs(loss, weighting or df.Constant(), **others)
    memory, found = rule.survey(MODEL, THETA, DATA), []
    for step in range(steps):
        energy, memory = rule(MODEL, THETA, INPUTS + 0.3 * step, memory, RANDOMNESS)
        found.append(energy)
    return found


def drawn(copies: int, inputs: Tensor = INPUTS) -> list[Tensor]:
    generator = RANDOMNESS.generator(Purpose.VIEWS)
    return [NOISE(inputs, generator) for _ in range(copies)]


def agreeing(seen: df.Seen) -> Tensor:
    """One that uses all that a loss is given."""
    apart = (seen.logits[0] - seen.fixed).square().sum(-1)
    return apart + (seen.features[1] - seen.source["center"]).square().mean() + seen.logits.mean()


EVERY: dict[str, Callable[[], Loss]] = {
    "alignment": df.MomentAlignment,
    "alignment with a queue": lambda: df.MomentAlignment(window=12),
    "contrast": lambda: df.Contrast(NOISE),
    "contrast of copies": lambda: df.Contrast(NOISE, 3, clean=False, temperature=0.7),
    "contrast with prototypes": lambda: df.Contrast(NOISE, 2, prototypes=True, temperature=0.4),
    "centroids": lambda: df.CentroidLabel(window=10),
    "replay": lambda: df.SourceReplay(samples=10),
    "one's own": lambda: df.BatchLoss(
        agreeing, NOISE, 1, True, lambda source: {"center": moments(source)["mean"]}
    ),
    "sum": lambda: df.Sum(
        (
            df.Entropy(),
            df.SourceReplay(),
            df.Contrast(NOISE, prototypes=True),
            df.Sum((df.CentroidLabel(), df.InformationMaximization()), (0.3, 1.0)),
        ),
        (0.5, 2.0, 1.5, 0.7),
    ),
    "sum at each view": lambda: df.Sum(
        (df.PseudoLabel(), df.Contrast(NOISE)), (0.5, 2.0), each_view=True
    ),
}


@pytest.mark.parametrize("gated", ["", "batch", "kept"])
@pytest.mark.parametrize("name", EVERY)
def test_gradients_through_a_network_are_slopes_of_the_energy(name: str, gated: str) -> None:
    """At the prior mean and elsewhere; rows sum to it. Views are of the whole batch, or of the
    samples kept alone.
    """
    loss, weighting = EVERY[name](), df.EntropyGate(0.91) if gated else None
    if gated == "kept" and loss.replays:
        return
    energy = energies(loss, weighting, steps=2, augmented=gated or "batch")[-1]
    assert 2 < energy.samples.used < 7 if gated else energy.samples.used == 7
    for theta in (THETA, THETA + 0.1 * normal(len(THETA), seed=4)):
        evaluation, tangent, h = energy.at(theta), normal(len(theta), seed=5), 1e-5
        ahead, behind = (energy.at(theta + sign * h * tangent).value() for sign in (1, -1))
        slope = ((ahead - behind) / (2 * h)).item()
        assert (evaluation.gradient() @ tangent).item() == pytest.approx(slope, rel=1e-6, abs=1e-8)
        torch.testing.assert_close(evaluation.rows.sum(0), evaluation.gradient())
    known = energy.known_logits(energy.anchor)
    assert known is not None
    torch.testing.assert_close(known[0], NETWORK(INPUTS + 0.3).detach())


@pytest.mark.parametrize("window", [0, 12])
def test_alignment_with_the_moments_of_the_source(window: int) -> None:
    first, *others = (features_of(inputs) for inputs, _ in DATA)
    usual = np.mean([coral(covariance(first), covariance(other)).item() for other in others])
    shift = np.mean([(first.mean(0) - other.mean(0)).square().mean().item() for other in others])
    source, before = torch.cat(others), torch.zeros(0, 5).double()
    for step, energy in enumerate(energies(df.MomentAlignment(window), steps=3)):
        features = features_of(INPUTS + 0.3 * step)
        seen = torch.cat((features, before[-5:])) if window else features
        expected = coral(covariance(source), covariance(seen)).item() / usual
        apart = (source.mean(0) - seen.mean(0)).square().mean().item()
        value = energy.evaluation.value().item()
        assert value == pytest.approx(expected + apart / shift / 2, rel=1e-10)
        before = torch.cat((before, features))


def test_one_batch_of_source_data_is_two_halves() -> None:
    rule = df.Gibbs(df.MomentAlignment())
    whole, halves = (
        rule.survey(MODEL, THETA, [(batch, None) for batch in data])
        for data in ([INPUTS], INPUTS.chunk(2))
    )
    assert_same(dict(whole), dict(halves))


@pytest.mark.parametrize(("copies", "clean"), [(1, True), (3, True), (2, False)])
@pytest.mark.parametrize("prototypes", [False, True])
def test_contrast_is_that_of_supervised_contrastive_learning(
    copies: int, clean: bool, prototypes: bool
) -> None:
    loss = df.Contrast(NOISE, copies, clean, prototypes, 0.3)
    clean_features = features_of(INPUTS)
    groups = [clean_features] * clean + [features_of(view) for view in drawn(copies)]
    if prototypes:
        source = torch.cat([features_of(inputs) for inputs, _ in DATA])
        means = torch.stack([source[torch.arange(24) % 4 == c].mean(0) for c in range(4)])
        alike = functional.cosine_similarity(clean_features[:, None], means[None], dim=-1)
        groups.insert(0, means[alike.argmax(1)])
    (energy,) = energies(loss)
    expected = supervised_contrast(torch.stack(groups, 1), 0.3).item()
    assert energy.evaluation.value().item() == pytest.approx(expected, rel=1e-10)


def test_classes_without_source_samples_have_no_prototype() -> None:
    loss = df.Contrast(NOISE, prototypes=True)
    data = [(inputs, torch.full((8,), 2)) for inputs, _ in DATA]
    memory = df.Gibbs(loss).survey(MODEL, THETA, data)
    only = torch.cat([features_of(inputs) for inputs, _ in DATA]).mean(0)
    torch.testing.assert_close(memory["source.prototypes"][2], only)
    nearest = loss.remember(memory)._nearest(features_of(INPUTS))  # type: ignore[attr-defined]
    torch.testing.assert_close(nearest, only.expand_as(nearest))
    without = df.Gibbs(loss).survey(MODEL, THETA, [(inputs, None) for inputs, _ in DATA])
    called = torch.cat([NETWORK(inputs) for inputs, _ in DATA]).argmax(1)
    features = torch.cat([features_of(inputs) for inputs, _ in DATA])
    for label in called.unique():
        mean = features[called == label].mean(0)
        torch.testing.assert_close(without["source.prototypes"][label], mean)


def test_source_samples_come_one_after_the_other() -> None:
    images, labels = torch.cat([inputs for inputs, _ in DATA])[:10], torch.arange(8).repeat(2)[:10]
    for step, energy in enumerate(energies(df.SourceReplay(10), steps=4)):
        places = torch.arange(7 * step, 7 * step + 7) % 10
        assert torch.equal(energy.views[1], images[places])
        expected = functional.cross_entropy(NETWORK(images[places]), labels[places] % 4)
        assert energy.evaluation.value().item() == pytest.approx(expected.item(), rel=1e-12)


def test_source_samples_without_labels_have_what_the_model_calls_them() -> None:
    loss = df.Gibbs(df.SourceReplay(20))
    memory = loss.survey(MODEL, THETA, [(inputs, None) for inputs, _ in DATA])
    assert len(memory["source.inputs"]) == 20
    expected = NETWORK(memory["source.inputs"]).argmax(1)
    assert torch.equal(memory["source.labels"], expected)


def test_the_softmax_metric_is_that_of_the_logits_alone() -> None:
    (energy,) = energies(df.Sum((df.Entropy(), df.CentroidLabel())))
    (plain,) = energies(df.Sum((df.Entropy(), df.PseudoLabel())))
    found, expected = (GaussNewton()(each.evaluation)[1] for each in (energy, plain))
    torch.testing.assert_close(found.mT @ found, expected.mT @ expected)


# ------------------------------------------------------------------ in an adapter


def ttt_plus_plus(seen: df.Seen) -> Tensor:
    clean, one, two = seen.features
    z = functional.normalize(torch.cat((one, two)), dim=-1)
    alike = (z @ z.T / 0.5).fill_diagonal_(-torch.inf)
    contrast = functional.cross_entropy(alike, torch.arange(len(z)).roll(len(one)))
    spread = (clean.T.cov() - seen.source["covariance"]).square().mean() / 4
    shift = (clean.mean(0) - seen.source["mean"]).square().mean() / 2
    loss: Tensor = contrast + spread + shift
    return loss


def moments(source: SourceBatch) -> Mapping[str, Tensor]:
    assert source.features is not None
    return {"mean": source.features.mean(0), "covariance": source.features.T.cov()}


OWN = df.BatchLoss(ttt_plus_plus, NOISE, 2, features=True, source=moments)
RECIPES: dict[str, Callable[[], df.Recipe]] = {
    "one's own": lambda: df.presets.get("tttpp", observation=df.Gibbs(OWN)),
    "santa": lambda: df.presets.get("santa", augmentation=NOISE),
    "shot": lambda: df.presets.get("shot", recent=30, lr=0.02),
    "tttpp": lambda: df.presets.get("tttpp", augmentation=NOISE, queue=20),
    "replay": lambda: df.presets.get(
        "tent", observation=df.Gibbs(df.Sum((df.Entropy(), df.SourceReplay(15))))
    ),
}


def with_norm() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4)
    return nn.Sequential(*layers).double().eval()


STREAM = [1.5 * normal(9, 3, seed=seed) for seed in range(6)]


@pytest.mark.parametrize("name", RECIPES)
def test_a_stream_goes_on_bit_for_bit_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    """What is remembered of the source and of earlier batches is in the state, and the model stays
    as it is.
    """
    model = with_norm()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    source = df.SourceData(DATA)
    adapter = df.adapt(model, RECIPES[name](), data=source)
    for batch in STREAM[:3]:
        adapter(batch)
    df.save(adapter, tmp_path / "state.safetensors")
    other = df.adapt(with_norm(), RECIPES[name](), data=df.SourceData(DATA[::-1]))
    df.load(other, tmp_path / "state.safetensors")  # with what the first one knows of the source
    for batch in STREAM[3:]:
        assert torch.equal(other(batch), adapter(batch))
    assert_same(other.state_dict(), adapter.state_dict())
    assert (adapter.belief.mean - adapter.state.source.mean).abs().max() > 1e-4
    assert_same(dict(model.state_dict()), before)


@pytest.mark.parametrize("upkeep", [df.ResetEvery(2), df.ResetBelow(1e9, momentum=0.0)])
def test_a_reset_leaves_what_is_of_the_source(upkeep: Any) -> None:
    recipe = replace(RECIPES["tttpp"](), upkeep=upkeep)
    adapter = df.adapt(with_norm(), recipe, data=df.SourceData(DATA))
    start = adapter.state.memory
    assert set(start) == {
        "source.mean",
        "source.covariance",
        "source.discrepancies",
    }
    for batch in STREAM[:2]:
        adapter(batch)
    assert_same(dict(adapter.state.memory), dict(start))
    adapter(STREAM[2])


@pytest.mark.parametrize("preset", ["santa", "tttpp"])
def test_without_source_data_terms_that_need_them_are_left_out(preset: str) -> None:
    with pytest.warns(UserWarning, match="no source data .* (Contrast|MomentAlignment) are left"):
        adapter = df.adapt(with_norm(), preset, augmentation=NOISE)
    loss = as_loss("loss", adapter.recipe.observation.loss)
    assert isinstance(loss, df.Sum)
    assert not loss.needs_source
    assert len(loss.terms) == 1
    adapter(STREAM[0])
    assert (adapter.belief.mean != adapter.state.source.mean).any()


test_what_is_missing_is_named = refuses(
    [
        (
            lambda: df.adapt(with_norm(), df.presets.get("tent", observation=df.Gibbs(OWN))),
            "adapt: data must be source inputs, which BatchLoss.* needs, got None",
        ),
        (
            lambda: df.Filter(df.LinearHead(2), observation=df.Gibbs(df.MomentAlignment())).init(
                df.Belief(torch.zeros(4), df.Full(torch.eye(4)))
            ),
            r"data must be source samples, which MomentAlignment\(.* needs, got None",
        ),
        (
            lambda: df.Gibbs(df.MomentAlignment())(MODEL, THETA, INPUTS, {}, RANDOMNESS),
            "state must be one of Filter.init with data=…, which MomentAlignment needs, got",
        ),
        (
            lambda: df.Gibbs(OWN)(MODEL, THETA, INPUTS, {}, RANDOMNESS),
            "state must be one of Filter.init with data=…, got 'nothing of the source'",
        ),
        (
            lambda: df.Gibbs(df.MomentAlignment()).survey(MODEL, THETA, [(INPUTS[:2], None)]),
            "source data must be two batches or more of two samples or more, .* got '2 samples in",
        ),
        (
            lambda: df.Gibbs(df.BatchLoss(lambda seen: seen.logits))(
                MODEL, THETA, INPUTS, {}, RANDOMNESS
            ),
            "a loss of a batch must give one number, or one for each of its 7 samples, got shape",
        ),
        (lambda: df.BatchLoss(3), "BatchLoss.function must be a function, got 3"),  # type: ignore[arg-type]
        (
            lambda: df.BatchLoss(ttt_plus_plus, copies=2),
            "BatchLoss.copies must be 0 without an augmentation, 1 or more with one, got 2",
        ),
        (
            lambda: df.Gibbs(df.Sum((df.Entropy(), df.SourceReplay())), augmented="kept"),
            "Gibbs.augmented must be 'batch' for a loss of source samples, .* got 'kept'",
        ),
        (
            lambda: df.Filter(
                df.LinearHead(2),
                observation=df.Gibbs(df.SourceReplay()),
                prediction=df.Tempered(over_views=True),
            ),
            "Filter.prediction must be not over views, one of which is of source samples",
        ),
        (
            lambda: df.Contrast(clean=False),
            "Contrast.copies must be 2 or more if they are the only views, got 1",
        ),
        (
            lambda: df.Consistency(divergence="reverse"),
            "Consistency.target must be 'soft' for the divergence 'reverse', got 'hard'",
        ),
    ]
)

"""Parts that were built apart and meet in one filter: each held against what it is alone."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.base.randomness import Randomness

STEP = df.GradientStep(df.SGD(1e-12))  # moves next to nothing


def images(norm: nn.Module) -> tuple[Any, Tensor, Tensor]:
    """A small network in float64, inputs and labels."""
    torch.manual_seed(0)
    pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), *pooled).double().eval()
    return model, torch.rand(32, 3, 12, 12).double(), torch.randint(0, 3, (32,))


def spread(mean: Tensor, variance: float = 1.0) -> df.Belief:
    return df.Belief(mean, df.Diagonal(torch.full_like(mean, variance)))


@pytest.mark.parametrize("statistics", [df.RobustStatistics(0.3), df.InstanceAware()], ids=str)
@pytest.mark.parametrize(
    "parts", [{"predict_from": "prior"}, {"prediction": df.LinearizedProbit()}], ids=str
)
def test_a_step_predicts_by_the_statistics_of_predictions(
    statistics: Any, parts: dict[str, Any]
) -> None:
    model, inputs, _ = images(nn.BatchNorm2d(8))
    network = df.Network(model, statistics=statistics)
    filt = df.Filter(network, df.Transition(), inference=STEP, **parts)
    state = filt.init(spread(network.mean(), 1e-9))
    shifted = 2 * inputs[:12] + 1
    found = filt.step(state, shifted)[1].log_probabilities
    expected = network(network.mean(), shifted).log_softmax(-1)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


class Mixing(nn.Module):
    """Samples that the module itself ties together."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs)).relu()
        return self.last(hidden - hidden.mean(0, keepdim=True))  # type: ignore[no-any-return]


def test_gaussian_logits_of_samples_that_are_tied_are_the_same_when_centred() -> None:
    torch.manual_seed(0)
    model, inputs = Mixing().double().eval(), torch.randn(6, 4).double()
    recipes = [
        df.Recipe(
            statistics="source",
            source=df.Gaussian(0.01),
            centering=centering,
            prediction=df.LinearizedProbit(),
        )
        for centering in (None, df.Centering())
    ]
    plain, centred = (
        df.adapt(model, recipe, monitor=None).predict(inputs).logit_variance for recipe in recipes
    )
    assert plain.min() > 0
    torch.testing.assert_close(centred, plain)


def test_weights_that_are_worked_out_again_do_not_see_features() -> None:
    model, inputs, _ = images(nn.GroupNorm(2, 8))
    network = df.Network(model, statistics="source")
    mean, weighting = network.mean(), df.ProbabilityDrop(drop=-1, limit=1.0, fraction=1.0)

    def loss(seen: df.Seen) -> Tensor:
        return seen.logits[0].log_softmax(-1)[:, 0].mean()

    for features in (False, True):
        rule = df.Gibbs(df.BatchLoss(loss, features=features), weighting)
        randomness = Randomness(0, 0, torch.device("cpu"))
        energy, _ = rule(network, mean, inputs[:8], {}, randomness, spread(mean))
        again = energy.reweigh_at(mean.clone()).coefficients
        torch.testing.assert_close(again, energy.samples.coefficients)


def test_a_teacher_is_as_sure_with_features_beside_its_logits() -> None:
    model, inputs, _ = images(nn.GroupNorm(2, 8))
    network = df.Network(model, statistics="source")
    sure = float(network(network.mean(), inputs[:8]).softmax(-1).amax(-1).mean())
    teacher = df.Teacher(confidence=sure - 0.01, copies=4)
    source, randomness = spread(network.mean()), Randomness(0, 0, torch.device("cpu"))
    beside = network.with_features()
    taught, _ = teacher.observe(beside, inputs[:8], {}, source, randomness, classes=3)
    torch.testing.assert_close(taught[:, :3], network(network.mean(), inputs[:8]))


def test_what_cannot_be_together_is_refused() -> None:
    model, inputs, labels = images(nn.GroupNorm(2, 8))
    network = df.Network(model, statistics="source")
    with pytest.raises(ValueError, match=r"Gibbs\.augmented must be 'batch' for SourceReplay"):
        df.Gibbs(df.SourceReplay(32), augmented="kept")
    views = df.Gibbs(df.Consistency(df.Mirror()), augmentation=df.ImageViews())
    with pytest.raises(ValueError, match=r"Gibbs\.augmentation must be None if the prediction"):
        df.Filter(network, df.Transition(), views, STEP, df.Tempered(1.0, over_views=True))

    def term(value: float) -> df.BatchLoss:
        source = {"mean": torch.tensor(value)}
        return df.BatchLoss(lambda seen: seen.logits[0].sum(), source=lambda batch: source)

    both = df.Gibbs(df.Sum((term(1.0), term(2.0))))
    recipe = df.Recipe(statistics="source", observation=both, inference=STEP)
    with pytest.raises(ValueError, match=r"two that remember 'source\.mean'"):
        df.adapt(model, recipe, data=(inputs, labels))(inputs[:8])


def test_statistics_of_ones_own_that_are_not_finite_never_enter_the_state() -> None:
    class Broken:
        def normalize_by(self, call: Any) -> Any:
            mean, variance = call.carried
            return call.carried, (mean * torch.nan if call.learning else mean, variance)

    model, inputs, _ = images(nn.BatchNorm2d(8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter = df.adapt(model, df.Recipe(statistics=Broken(), inference=STEP))
    with pytest.raises(ValueError, match=r"that .* carries on"):
        adapter(inputs[:8])
    assert adapter.state.step == 0

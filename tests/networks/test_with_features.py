"""Features beside the logits, for losses and predictions that look at both: values and derivatives
in both directions, of every model that has them.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.model.centering import Centered
from driftfilter.model.predictive import PredictiveModel, ReadOut, lift
from published.gradient_steps import by_batch, network
from small import normal, refuses

MODEL = network()
IMAGES = torch.rand(7, 3, 6, 6, generator=torch.Generator().manual_seed(2)).double()
ROWS = normal(7, 4, seed=3)


def plain(model: nn.Module) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Logits and features of a network, whose last layer is named head."""
    body, head = deepcopy(model), model.get_submodule("head")
    setattr(body, "head", nn.Identity())  # noqa: B010
    return lambda images: (head(body(images)), body(images))


def flat_norms(model: nn.Module) -> Tensor:
    layers = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    return torch.cat([piece.detach() for layer in layers for piece in (layer.weight, layer.bias)])


PROTOTYPES = df.PrototypeHead(normal(3, 4, seed=5))
CASES: dict[str, Callable[[], tuple[PredictiveModel, Tensor, Tensor]]] = {
    "head": lambda: (df.LinearHead(3), normal(12), ROWS),
    "head with intercept": lambda: (df.LinearHead(3, intercept=True), normal(15), ROWS),
    "read-out": lambda: (ReadOut(df.LinearHead(3), normal(12, 14, seed=9)), normal(14), ROWS),
    "prototypes": lambda: (PROTOTYPES, normal(12), ROWS),
    "on features": lambda: (
        df.OnFeatures(df.Backbone(MODEL, "head"), df.LinearHead(4)),
        normal(24),
        IMAGES,
    ),
    "batch statistics": lambda: (df.Network(MODEL), flat_norms(MODEL), IMAGES),
    "source statistics": lambda: (
        df.Network(MODEL, statistics="source"),
        flat_norms(MODEL),
        IMAGES,
    ),
    "all parameters": lambda: (
        df.Network(MODEL, df.AllParameters(), "source"),
        torch.cat([parameter.detach().flatten() for parameter in MODEL.parameters()]),
        IMAGES,
    ),
}
every_model = pytest.mark.parametrize("name", CASES)


@every_model
def test_both_stand_side_by_side_and_move_with_the_parameters(name: str) -> None:
    """Values, sums and rows of pulled cotangents, and pushed tangents, by finite differences."""
    model, theta, inputs = CASES[name]()
    both = model.with_features()
    logits, features = model.logits_and_features(theta, inputs)
    outputs, pullback = both.pullback(theta, inputs)
    k, width = logits.shape[1], features.shape[1]
    assert pullback.feature_columns == width
    torch.testing.assert_close(outputs, torch.cat((logits, features), 1))
    torch.testing.assert_close(both(theta, inputs), outputs)
    torch.testing.assert_close(model(theta, inputs), logits)
    tangent, cotangents = normal(len(theta), seed=6), normal(7, k + width, seed=7)
    h = 1e-6
    slope = (both(theta + h * tangent, inputs) - both(theta - h * tangent, inputs)) / (2 * h)
    torch.testing.assert_close(
        both.pushforward(theta, inputs, tangent[None])[0], slope, rtol=1e-6, atol=1e-8
    )
    total = pullback.total(cotangents)
    assert (total @ tangent).item() == pytest.approx((cotangents * slope).sum().item(), rel=1e-6)
    rows = both.pullback(theta, inputs)[1](cotangents)
    torch.testing.assert_close(rows.sum(0), total)


@pytest.mark.parametrize("statistics", ["batch", "source"])
def test_features_of_a_network_are_what_enters_its_last_layer(statistics: Any) -> None:
    model = df.Network(MODEL, statistics=statistics)
    found = model.logits_and_features(flat_norms(MODEL), IMAGES)
    expected = plain(by_batch(MODEL) if statistics == "batch" else MODEL)(IMAGES)
    torch.testing.assert_close(found, tuple(part.detach() for part in expected))


def test_features_come_after_what_the_loss_observes() -> None:
    """A second head of a user's own, and the features that both heads stand on."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head, self.turns = nn.LayerNorm(4), nn.Linear(4, 3), nn.Linear(4, 5)

        def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
            features = self.norm(rows)
            return self.head(features), self.turns(features)

    torch.manual_seed(0)
    two = Two().double().eval()
    model = df.Network(two, output=lambda heads: heads[0], observed=lambda heads: heads[1])
    theta, features = model.mean(), two.norm(ROWS).detach()
    outputs, pullback = model.observing.with_features().pullback(theta, ROWS)
    expected = torch.cat((two.turns(features), features), 1).detach()
    torch.testing.assert_close((outputs, pullback.feature_columns), (expected, 4))
    torch.testing.assert_close(model.logits_and_features(theta, ROWS)[1], features)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, rows: Tensor) -> Tensor:
        logits: Tensor = self.head(self.head(self.norm(rows)))
        return logits


class Tokens(Twice):
    def forward(self, rows: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(rows)[:, None].expand(-1, 2, -1)).mean(1)
        return logits


def ask(model: Any, theta: Tensor | None = None) -> None:
    model.logits_and_features(model.mean() if theta is None else theta, ROWS.float())


test_models_without_features_say_so = refuses(
    [
        (
            lambda: ask(lift(lambda theta, rows: rows @ theta.view(4, 3)), normal(12)),
            "the model must be a network with a linear head, .* got 'Lifted'",
        ),
        (
            lambda: ask(Centered(df.LinearHead(3)), normal(12)),
            "Recipe.centering must be None for a rule that sees features, got Centering",
        ),
        (
            lambda: ask(df.Network(Twice())),
            "Backbone: head must be used once a forward pass, not 2 times, got 'head'",
        ),
        (
            lambda: ask(df.Network(Tokens())),
            r"what enters the head 'head' must be of shape \[n, D\].*, got 'shape \[7, 2, 4\]'",
        ),
        (
            lambda: ask(df.Network(nn.Sequential(nn.LayerNorm(4)))),
            "the model must compute its logits from a linear layer",
        ),
    ]
)

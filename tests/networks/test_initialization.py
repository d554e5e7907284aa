"""Where the adapted parameters start, and what a batch can tell about the model."""

from typing import Any

import pytest
import torch
from torch import nn

import driftfilter as df
from driftfilter.base.tensors import as_text
from driftfilter.networks.initialization import check, find_wanted, initialize
from small import Written, assert_same, refuses


def backwards() -> nn.Module:
    """Registers its head first."""
    torch.manual_seed(0)
    return Written(
        lambda own, x: own.head(own.norm(own.first(x)).relu()),
        head=nn.Linear(6, 3),
        norm=nn.LayerNorm(6),
        first=nn.Linear(4, 6),
    )


BATCH = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
CHOICES: dict[str, tuple[Any, set[str]]] = {
    "norms": (df.NormAffine(), set()),
    "all": (df.AllParameters(), set()),
    "lora": (df.LoRA(2), set()),
    "head": (df.Head(), {"head"}),
    "named head": (df.Head("head"), set()),
    "prototypes": (df.Prototypes(), {"head"}),
    "centered": (df.Prototypes(centered=True), {"head", "center"}),
    "named and centered": (df.Prototypes(centered=True, name="head"), {"center"}),
}
choices = pytest.mark.parametrize("choice", CHOICES)


@choices
def test_what_a_batch_tells_is_found_once_and_stands(choice: str) -> None:
    parameters, wants = CHOICES[choice]
    assert find_wanted(parameters) == wants
    model = backwards()
    start = initialize(model, parameters, "source", None, BATCH)
    assert set(start.found) == wants
    if "head" in wants:
        assert as_text(start.found["head"]) == "head"
    if "center" in wants:
        torch.testing.assert_close(start.found["center"], df.Backbone(model, "head")(BATCH).mean(0))
    for example in (None, BATCH + 1):
        again = initialize(model, parameters, "source", None, example, start.found)
        assert_same(
            (again.mean, again.model(again.mean, BATCH)),
            (start.mean, start.model(start.mean, BATCH)),
        )
        assert again.found.keys() == start.found.keys()


@choices
def test_adaptation_starts_at_the_model(choice: str) -> None:
    """Up to a number that all classes share, which probabilities do not see."""
    model = backwards()
    start = initialize(model, CHOICES[choice][0], "source", None, BATCH)
    found, expected = start.model(start.mean, BATCH).log_softmax(-1), model(BATCH).log_softmax(-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_without_a_batch_the_head_is_the_last_layer_registered() -> None:
    start = initialize(backwards(), df.Head(), "source")
    assert (start.mean.shape, start.found) == ((6 * (4 + 1),), {})


test_a_first_batch_with_infinite_features_is_refused = refuses(
    [(BATCH * 1e38, "what enters the head 'head' must be finite")],
    lambda x: initialize(backwards(), df.Prototypes(centered=True), "source", None, x),
)


@choices
def test_values_are_needed_only_to_start(choice: str) -> None:
    with torch.device("meta"):
        model = backwards()
    check(model, CHOICES[choice][0])
    with pytest.raises(
        ValueError,
        match=r"must be a module with values: load its weights first, got .* on the meta device",
    ):
        initialize(model, CHOICES[choice][0], "source", None, BATCH)


REFUSED: dict[str, tuple[nn.Module, Any, str]] = {
    "no norms": (
        nn.Linear(2, 3),
        df.NormAffine(),
        r"must select one parameter or more, got none of 2; .* \['Linear'\], named",
    ),
    "no such head": (
        backwards(),
        df.Prototypes(name="haed"),
        r"Head.name must be .* \['head', 'first'\], got 'haed'",
    ),
    "lazy": (
        nn.LazyLinear(3),
        df.AllParameters(),
        r"must be called once before: .* got \"parameters \['weight', 'bias'\]",
    ),
}


test_refusals = refuses(REFUSED.values(), check)


def test_a_center_from_hardly_any_samples_is_worth_a_warning() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    with pytest.warns(UserWarning, match="the mean feature of the first batch, of 1 samples here"):
        initialize(model, df.Prototypes(centered=True), "source", None, torch.randn(1, 4))

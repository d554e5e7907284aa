"""Many adapters over one network in one pass: what each would have said by itself."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import driftfilter as df
from driftfilter.adapter import together


def network(norm: type[nn.Module] = nn.BatchNorm2d) -> nn.Module:
    torch.manual_seed(0)
    norms = [nn.GroupNorm(2, 6) if norm is nn.GroupNorm else norm(6) for _ in range(2)]
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        norms[0],
        nn.ReLU(),
        nn.Conv2d(6, 6, 3),
        norms[1],
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    ).eval()


@pytest.fixture(autouse=True)
def whatever_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let batches of any size go together."""
    monkeypatch.setattr(together, "_FEWEST", 1)


def several(recipe: str, norm: type[nn.Module], count: int = 4, **options: Any) -> list[df.Adapter]:
    """Adapters over one network that have seen streams of their own."""
    model, adapters = network(norm), []
    for place in range(count):
        torch.manual_seed(place)
        adapter = df.adapt(model, recipe, **options)
        for _ in range(3):
            adapter(torch.randn(16, 3, 8, 8) + 0.5 * place)
        adapters.append(adapter)
    return adapters


@pytest.mark.filterwarnings("ignore:.tent. at its published rate")
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.GroupNorm])
@pytest.mark.parametrize("recipe", ["driftfilter", "tent", "opgd_diag", "center", "source"])
@pytest.mark.parametrize("n", [1, 5])
def test_all_say_what_each_says_alone(recipe: str, norm: type[nn.Module], n: int) -> None:
    adapters = several(recipe, norm)
    batches = [torch.randn(n, 3, 8, 8) + 0.5 * place for place in range(len(adapters))]
    before = [copy.deepcopy(adapter.state_dict()) for adapter in adapters]
    found = df.predict_together(adapters, batches)
    for adapter, batch, prediction, kept in zip(adapters, batches, found, before, strict=True):
        alone = adapter.predict(batch)
        for one, other in (
            (prediction.log_probabilities, alone.log_probabilities),
            (prediction.logit_variance, alone.logit_variance),
            (prediction.plain_confidence, alone.plain_confidence),
        ):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
        after = adapter.state_dict()
        same = (torch.equal(kept[name], value) for name, value in after.items() if name in kept)
        assert list(kept) == list(after)
        assert all(same)


def test_they_go_through_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters, sizes = several("driftfilter", nn.BatchNorm2d), list[int]()
    whole = together._pass

    def noted(adapter: df.Adapter, group: list[Any]) -> list[df.Prediction]:
        sizes.append(len(group))
        return whole(adapter, group)

    monkeypatch.setattr(together, "_pass", noted)
    df.predict_together(adapters, [torch.randn(2, 3, 8, 8)] * 4)
    df.predict_together(adapters, [torch.randn(2 + place // 2, 3, 8, 8) for place in range(4)])
    assert sizes == [4, 2, 2]


def test_others_are_asked_one_by_one() -> None:
    model = network()
    adapters = [
        df.adapt(model, "tent", window=8),
        df.adapt(model, "tent"),
        df.adapt(model, "cotta"),
    ]
    batches = [torch.randn(4, 3, 8, 8) for _ in adapters]
    for adapter, batch, found in zip(
        adapters, batches, df.predict_together(adapters, batches), strict=True
    ):
        alone = adapter.predict(batch).log_probabilities
        torch.testing.assert_close(found.log_probabilities, alone, atol=2e-5, rtol=1e-4)


def test_refused() -> None:
    with pytest.raises(ValueError, match="as many as adapters, 1"):
        df.predict_together([df.adapt(network(), "tent")], [])


class Looking(nn.Module):
    """Looks at a number, which no pass of several lets it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if float(x.abs().sum()) >= 0 else -x


def test_a_network_that_cannot_is_asked_one_by_one() -> None:
    model = nn.Sequential(network(), Looking()).eval()
    adapters = [df.adapt(model, "tent") for _ in range(2)]
    batches = list(torch.randn(2, 2, 3, 8, 8))
    for adapter, batch, found in zip(
        adapters, batches, df.predict_together(adapters, batches), strict=True
    ):
        alone = adapter.predict(batch).log_probabilities
        torch.testing.assert_close(found.log_probabilities, alone, atol=0, rtol=0)


def test_what_is_not_finite_is_refused() -> None:
    adapters = several("tent", nn.BatchNorm2d, 2)
    batches = [torch.randn(2, 3, 8, 8), torch.full((2, 3, 8, 8), 1e38)]
    with pytest.raises(ValueError, match="finite"):
        df.predict_together(adapters, batches)

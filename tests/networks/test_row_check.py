"""Rows that layers alone would get wrong: a parameter used twice, samples in another order, samples
coupled out of sight.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import driftfilter as df
from driftfilter.networks.row_check import some, wrong_rows
from small import Written

Forward = Callable[[Any, Tensor], Any]


def written(forward: Forward) -> nn.Module:
    """Layers, and a forward pass written by hand."""
    words, first = nn.Embedding(9, 6), nn.Linear(6, 6)
    return Written(forward, words=words, first=first, norm=nn.LayerNorm(6), head=nn.Linear(6, 3))


def tied(model: Any, words: Tensor) -> Any:
    return functional.linear(model.norm(model.words(words)).mean(1), model.words.weight)


def used_twice(model: Any, inputs: Tensor) -> Any:
    return model.head(model.norm(inputs).mean(1)) * model.norm.weight.sum()


def tokens_first(model: Any, inputs: Tensor) -> Any:
    return model.head(model.norm(model.first(inputs.transpose(0, 1))).mean(0))


def sorted_inside(model: Any, inputs: Tensor) -> Any:
    order = inputs[:, 0, 0].argsort()
    return model.head(model.norm(inputs[order]).mean(1))[order.argsort()]


def centered(model: Any, inputs: Tensor) -> Any:
    flat = model.first(inputs.mean(1))
    return model.head(model.norm(flat - flat.mean(0)))


def checkpointed(model: Any, inputs: Tensor) -> Any:
    inner = checkpoint(lambda values: model.norm(model.first(values)), inputs, use_reentrant=False)
    return model.head(inner.mean(1))


def network(forward: Forward) -> df.Network:
    torch.manual_seed(0)
    return df.Network(written(forward).double(), df.AllParameters(), "source")


def batch(samples: int = 4, tokens: int = 4) -> Tensor:
    return torch.randn(
        samples, tokens, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


WORDS = torch.tensor([[1, 2, 3], [4, 5, 6], [1, 1, 8]])
KINDS = [
    (tied, WORDS),
    (used_twice, batch()),
    (tokens_first, batch()),
    (sorted_inside, batch()),
    (checkpointed, batch()),
]


def assert_rows(model: df.Network, theta: Tensor, inputs: Tensor) -> None:
    """Rows equal the gradients of batches of one."""
    logits, pullback = model.pullback(theta, inputs)
    cotangents = torch.randn_like(logits)
    single = [
        model.pullback(theta, x[None])[1].total(c[None])
        for x, c in zip(inputs, cotangents, strict=True)
    ]
    torch.testing.assert_close(pullback(cotangents), torch.stack(single))


@pytest.mark.parametrize(
    ("forward", "inputs"), KINDS, ids=[forward.__name__ for forward, _ in KINDS]
)
def test_rows_are_those_of_single_samples(forward: Forward, inputs: Tensor) -> None:
    model = network(forward)
    theta = model.mean() + 0.1
    for _ in range(2):  # when it is proved, and when it is known
        assert_rows(model, theta, inputs)


def test_a_layer_that_sees_tokens_first_is_looked_at_again_when_their_number_fits_the_batch() -> (
    None
):
    model = network(tokens_first)
    theta = model.mean()
    for samples, tokens in ((1, 4), (3, 4), (4, 4), (2, 8)):
        assert_rows(model, theta, batch(samples, tokens))


def test_samples_that_the_module_couples_keep_rows_that_add_up() -> None:
    model = network(centered)
    logits, pullback = model.pullback(model.mean(), batch())
    cotangents = torch.randn_like(logits)
    total = model.pullback(model.mean(), batch())[1].total(cotangents)
    torch.testing.assert_close(pullback(cotangents).sum(0), total)


def test_coupled_samples_and_a_parameter_used_twice_are_refused_by_name() -> None:
    def both(model: Any, inputs: Tensor) -> Any:
        return centered(model, inputs) * model.norm.weight.sum()

    logits, pullback = network(both).pullback(network(both).mean(), batch())
    with pytest.raises(ValueError, match=r"norm\.weight"):
        pullback(torch.randn_like(logits))


def test_a_proven_network_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(lambda own, inputs: own.head(own.norm(inputs).mean(1)))
    whole, passes = torch.autograd.grad, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        passes.append(kwargs)
        return whole(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    for _ in range(3):
        logits, pullback = model.pullback(model.mean(), batch())
        pullback(torch.randn_like(logits))
    assert len(passes) == 1 + 3


def test_a_batch_without_cotangents_proves_nothing() -> None:
    model = network(used_twice)
    logits, pullback = model.pullback(model.mean(), batch())
    assert pullback(torch.zeros_like(logits)).abs().max() == 0
    assert not model.proofs


def test_gradients_that_are_rounding_are_not_held_against_themselves() -> None:
    rows = {"large": torch.ones(2, 3), "rounding": torch.tensor([[1e-9], [-2e-9]])}
    gradients = {"large": torch.full((3,), 2.0), "rounding": torch.tensor([5e-9]), "unused": None}
    assert wrong_rows(rows, gradients, 0.01) == []
    assert wrong_rows(rows, {**gradients, "large": torch.full((3,), 2.2)}, 0.01) == ["large"]
    assert wrong_rows(rows, gradients, 0.01, torch.tensor([True, False])) == ["large"]


def test_the_weightiest_sample_is_asked_about_and_another_is_not() -> None:
    cotangents = torch.zeros(2, 3, 2)
    cotangents[1, 2], cotangents[0, 0] = 3.0, 1.0
    only, asked = some(cotangents)
    assert asked.tolist()[2]
    assert not asked.all()
    assert only.tolist() == [[0, 0], [0, 0], [3, 3]]


def test_a_tied_head_adapts_with_per_sample_curvature() -> None:
    torch.manual_seed(0)
    model = written(tied).double().eval()
    recipe = df.presets.get("opgd_diag", parameters=df.AllParameters(), statistics="source")
    adapter = df.adapt(model, recipe)
    adapter(WORDS)
    theta = df.adapt(model, recipe).belief.mean.requires_grad_()
    p = df.Network(model, df.AllParameters(), "source")(theta, WORDS).softmax(-1)
    losses = -(p * (p.log() - p.mean(0).detach().log())).sum(-1)
    rows = torch.stack(
        [
            torch.autograd.grad(loss, theta, retain_graph=True, allow_unused=True)[0]
            for loss in losses
        ]
    )
    gradient, spread = 2 * rows.mean(0), 2 * (rows - rows.mean(0)).square().mean(0)
    expected = theta.detach() - gradient / (1 / 0.08 + spread)
    torch.testing.assert_close(adapter.belief.mean, expected, rtol=1e-5, atol=1e-8)

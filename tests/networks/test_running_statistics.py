"""The published BN-EMA: running statistics as torch's own layers keep them, in training mode for a
first pass over a batch and in evaluation mode for the second.
"""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
import published.gradient_steps as by_hand
from small import assert_same, normal

STATISTICS = df.RunningStatistics(0.3)


class Twice(nn.Module):
    """A table; one batch norm is used by two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.norm = nn.Linear(4, 5), nn.Linear(5, 5), nn.BatchNorm1d(5)
        self.last, self.head = nn.BatchNorm1d(5, affine=False), nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs)).tanh()
        logits: Tensor = self.head(self.last(self.norm(self.second(hidden)).tanh()))
        return logits


MODELS = {"images": by_hand.network(), "table": Twice().double().eval()}
STREAMS = {
    "images": by_hand.stream(4),
    "table": [2 * normal(9, 4, seed=seed) + 1 for seed in range(4)],
}


def with_momentum(model: nn.Module) -> nn.Module:
    copy = deepcopy(model)
    for layer in copy.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.momentum = 0.3
    return copy


every = pytest.mark.parametrize("kind", MODELS)


@every
def test_predictions_are_those_of_torchs_layers(kind: str) -> None:
    """Of a step and of ``predict``, which leaves no trace; so does a copy that goes on."""
    plain, stream = with_momentum(MODELS[kind]), STREAMS[kind]
    before = deepcopy(MODELS[kind].state_dict())
    adapter = df.adapt(MODELS[kind], "bn_ema", momentum=0.3)
    for place, batch in enumerate(stream):
        plain.train()(batch)
        expected = plain.eval()(batch).detach().log_softmax(-1)
        found = adapter.predict(batch).log_probabilities, adapter(batch)
        torch.testing.assert_close(found, (expected, expected), rtol=1e-10, atol=1e-12)
        if place == 1:
            other = df.adapt(MODELS[kind], "bn_ema", momentum=0.3)
            other.load_state_dict(adapter.state_dict())
            adapter = other
    carried = [
        part
        for layer in plain.modules()
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)
        for part in (layer.running_mean, layer.running_var)
        if part is not None
    ]
    torch.testing.assert_close(
        adapter.state.memory["network.statistics"], torch.cat(carried), rtol=1e-10, atol=1e-12
    )
    assert_same(before, MODELS[kind].state_dict())
    adapter.reset()
    assert "network.statistics" not in adapter.state.memory


@every
def test_a_gradient_step_takes_the_statistics_as_they_are(kind: str) -> None:
    plain, stream = with_momentum(MODELS[kind]), STREAMS[kind]
    plain.requires_grad_(False)
    names = df.select(plain, df.NormAffine())
    parameters = [plain.get_parameter(name).requires_grad_() for name in names]
    rule = torch.optim.Adam(parameters, 0.02)
    adapter = df.adapt(MODELS[kind], "tent", lr=0.02, statistics=STATISTICS)
    for batch in stream:
        with torch.no_grad():
            plain.train()(batch)
        logits = plain.eval()(batch)
        by_hand.minimise(rule, by_hand.tent_loss(logits))
        torch.testing.assert_close(
            adapter(batch), logits.detach().log_softmax(-1), rtol=1e-8, atol=1e-10
        )
        torch.testing.assert_close(
            adapter.belief.mean, by_hand.flat(parameters), rtol=1e-8, atol=1e-10
        )


def test_rows_are_those_of_each_sample_under_fixed_statistics() -> None:
    model, batch = MODELS["images"], STREAMS["images"][0]
    network = df.Network(model, statistics=STATISTICS)
    theta, cotangents = network.mean(), normal(12, 4, seed=3)
    logits, pull = network.pullback(theta, batch)
    still = with_momentum(model)
    still.train()(batch)
    still.eval()
    source = df.Network(still, statistics="source")
    expected, other = source.pullback(theta, batch)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(pull(cotangents), other(cotangents), rtol=1e-9, atol=1e-11)
    tangents = normal(3, len(theta), seed=4)
    torch.testing.assert_close(
        network.pushforward(theta, batch, tangents),
        source.pushforward(theta, batch, tangents),
        rtol=1e-9,
        atol=1e-11,
    )


def test_one_value_a_channel_leaves_the_statistics() -> None:
    model, row = MODELS["table"], normal(1, 4)
    adapter = df.adapt(model, "bn_ema")
    expected = model(row).detach().log_softmax(-1)
    torch.testing.assert_close(adapter(row), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(adapter(row), expected, rtol=1e-10, atol=1e-12)


def test_half_precision_is_normalised_in_float32() -> None:
    model = deepcopy(MODELS["images"]).half()
    adapter = df.adapt(model, "bn_ema")
    for batch in STREAMS["images"]:
        assert adapter(batch.half()).isfinite().all()
    assert adapter.state.memory["network.statistics"].dtype == torch.float32


def test_features_have_no_running_statistics() -> None:
    with pytest.raises(ValueError, match=r"Backbone: statistics must be 'batch', 'source' or"):
        df.Backbone(MODELS["images"], "head", statistics=STATISTICS)
    with pytest.raises(ValueError, match=r"RunningStatistics.momentum must be .* got 1.5"):
        df.RunningStatistics(1.5)

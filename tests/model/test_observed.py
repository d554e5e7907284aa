"""Outputs for the loss alone: what is learned from need not be what is predicted."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.model.expansion import Expansion, log_softmax, separable
from driftfilter.model.losses import Targets


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.classes, self.turns = nn.Linear(5, 3), nn.Linear(5, 4)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(inputs)
        return self.classes(features), self.turns(features)


@dataclass(frozen=True)
class Rotation(df.Loss):
    @property
    def copies(self) -> int:
        return 3

    def views(self, inputs: Tensor, generator: object) -> tuple[Tensor, ...]:
        return tuple(torch.rot90(inputs, turn, (2, 3)) for turn in range(4))

    def expand(self, logits: Tensor, targets: Targets, weights: Tensor) -> Expansion:
        logp = log_softmax(logits)
        right = torch.eye(4, dtype=logits.dtype).unsqueeze(1).expand_as(logp) / 4
        return separable(-(right * logp).sum(-1), logp.exp(), -right, right, (0.25,) * 4)


def network() -> TwoHeads:
    torch.manual_seed(3)
    return TwoHeads().double().eval()


def images() -> Tensor:
    return torch.randn(7, 2, 8, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def hand_written(model: TwoHeads, batch: Tensor, lr: float) -> tuple[Tensor, Tensor]:
    """One SGD step of the norm parameters on the turn head, by autograd; probabilities before it,
    parameters after.
    """
    own = copy.deepcopy(model)
    norm = own.body[1]
    assert isinstance(norm, nn.BatchNorm2d)
    norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None
    probabilities = own(batch)[0].softmax(-1).detach()
    losses = [
        nn.functional.cross_entropy(
            own(torch.rot90(batch, turn, (2, 3)))[1], torch.full((len(batch),), turn)
        )
        for turn in range(4)
    ]
    torch.stack(losses).mean().backward()
    steps = [
        parameter.detach() - lr * parameter.grad
        for parameter in norm.parameters()
        if parameter.grad is not None
    ]
    return probabilities, torch.cat(steps)


@pytest.mark.parametrize("predict_from", ["prior", "posterior"])
def test_test_time_training_learns_from_one_head_and_predicts_with_the_other(
    predict_from: str,
) -> None:
    model, batch = network(), images()
    rule = df.GradientStep(df.SGD(0.5))
    recipe = df.presets.get(
        "tent", observation=df.Gibbs(Rotation()), inference=rule, predict_from=predict_from
    )
    adapter = df.adapt(
        model, recipe, output=lambda heads: heads[0], observed=lambda heads: heads[1]
    )
    probabilities, parameters = hand_written(model, batch, 0.5)
    predicted = adapter(batch).exp()
    torch.testing.assert_close(adapter.belief.mean, parameters, rtol=1e-9, atol=1e-12)
    if predict_from == "prior":
        torch.testing.assert_close(predicted, probabilities)
    else:
        torch.testing.assert_close(predicted, adapter.predict(batch).probabilities)
        assert not torch.allclose(predicted, probabilities)


def test_a_loss_of_logits_and_features() -> None:
    """Rows of the empirical Fisher of a joint function equal autograd's, sample by sample, with
    source statistics.
    """
    model, batch = network(), images()

    def loss(observed: Tensor) -> Any:
        first, second = observed.split([3, 4], -1)
        return first.logsumexp(-1) + second.square().sum(-1)

    net = df.Network(
        model,
        statistics="source",
        output=lambda heads: heads[0],
        observed=lambda heads: torch.cat(heads, -1),
    )
    filt = df.Filter(
        net,
        df.Transition(),
        df.Gibbs(loss, df.Constant(2.0)),
        df.Linearized(df.EmpiricalFisher(centered=False)),
    )
    start = filt.init(df.Belief(net.mean(), df.Full(0.3 * torch.eye(10, dtype=torch.float64))))
    state, prediction, _ = filt.step(start, batch)
    rows = []
    for sample in batch:
        own = copy.deepcopy(model)
        loss(torch.cat(own(sample[None]), -1)).backward()
        rows.append(torch.cat([parameter.grad.flatten() for parameter in own.body[1].parameters()]))  # type: ignore[union-attr]
    factor = torch.stack(rows) * (2.0 / 7) ** 0.5
    covariance = torch.linalg.inv(torch.eye(10, dtype=torch.float64) / 0.3 + factor.mT @ factor)
    torch.testing.assert_close(
        (state.belief.covariance.dense(), state.belief.mean),
        (covariance, net.mean() - covariance @ (torch.stack(rows).mean(0) * 2.0)),
    )
    assert prediction.probabilities.shape == (7, 3)


def test_only_functions_pick_outputs_and_heads_have_no_more_to_show() -> None:
    with pytest.raises(
        ValueError, match="adapt: observed must be a function of what the model returns, got 3"
    ):
        df.adapt(network(), "tent", observed=3)  # type: ignore[arg-type]
    adapter = df.adapt(
        network(), "head_ekf", output=lambda heads: heads[0], observed=lambda heads: heads[1]
    )
    with pytest.raises(ValueError, match="adapt: observed must be None if only a head is adapted"):
        adapter(images())


def test_outputs_for_the_loss_under_a_dynamic_with_hidden_states() -> None:
    """A trend of every parameter: the loss still sees its own outputs, here those of four turns and
    not of three classes.
    """
    seen: list[int] = []

    def loss(observed: Tensor) -> Tensor:
        seen.append(observed.shape[-1])
        return observed.logsumexp(-1)

    net = df.Network(
        TwoHeads().double().eval(),
        statistics="source",
        output=lambda heads: heads[0],
        observed=lambda heads: heads[1],
    )
    filt = df.Filter(net, df.Transition(df.LocalTrend(order=1), df.Isotropic(0.01)), df.Gibbs(loss))
    state = filt.init(
        df.Belief(net.mean(), df.Full(0.1 * torch.eye(len(net.mean()), dtype=torch.float64)))
    )
    state, prediction, _ = filt.step(state, torch.randn(6, 2, 5, 5, dtype=torch.float64))
    assert (set(seen), prediction.probabilities.shape) == ({4}, (6, 3))

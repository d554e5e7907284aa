"""Statistics of batch normalisation: formulas written out, carried from step to step, and their
gradients.
"""

import copy
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import driftfilter as df
from driftfilter.base.randomness import Purpose, Randomness
from driftfilter.gaussian.covariance import antithetic
from driftfilter.model.label_chain import RUNS
from driftfilter.networks.batch_norm import diversity
from driftfilter.networks.batch_trust import (
    SHIFT,
    Probe,
    doubt_of,
    evidence_of_change,
    moment_shift,
    novelty,
)
from driftfilter.networks.network import DIVERSITY, STATISTICS
from small import Written, assert_same, normal, refuses

KINDS: list[Any] = ["batch", "source", df.PseudoCount(3.0), df.Ema(0.3)]
kinds = pytest.mark.parametrize("statistics", KINDS, ids=str)
exact = pytest.mark.parametrize(
    "statistics", [*KINDS[:3], df.Ema(1.0)], ids=str
)  # those with the derivative of their values


def trained(*layers: nn.Module) -> nn.Sequential:
    """A network in float64 whose statistics are not the initial ones."""
    torch.manual_seed(0)
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        for layer in model.modules():
            if (
                isinstance(layer, nn.modules.batchnorm._BatchNorm)
                and layer.running_mean is not None
            ):
                assert layer.running_var is not None
                layer.running_mean.normal_()
                layer.running_var.uniform_(0.5, 2.0)
    return model


def convolutional() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3),
        nn.Tanh(),
        nn.Conv2d(3, 4, 2),
        nn.BatchNorm2d(4),
        nn.Tanh(),
    )
    return trained(*layers, nn.Flatten(), nn.Linear(16, 3))


def images(samples: int = 5, seed: int = 1) -> Tensor:
    return torch.randn(
        samples, 2, 5, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def blended(
    values: Tensor, mean: Tensor, variance: Tensor, share: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Moments of a mixture: of the draws with probability 1 - α from the first, α from the
    batch.
    """
    columns = values.transpose(0, 1).flatten(1)
    batch, second = columns.mean(1), columns.square().mean(1)
    mixed = (1 - share) * mean + share * batch
    return mixed, (1 - share) * (variance + mean.square()) + share * second - mixed.square()


def renormalized(values: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    """Batch normalisation, corrected to other moments by an r and a d that have no derivative."""
    wide = [1, -1, *[1] * (values.dim() - 2)]
    columns = values.transpose(0, 1).flatten(1)
    batch, deviation = columns.mean(1), (columns.var(1, correction=0) + eps).sqrt()
    r, d = (
        (deviation / (variance + eps).sqrt()).detach(),
        ((batch - mean) / (variance + eps).sqrt()).detach(),
    )
    return (values - batch.view(wide)) / deviation.view(wide) * r.view(wide) + d.view(wide)


def reference(
    model: nn.Sequential,
    inputs: Tensor,
    share: float | Tensor,
    carried: list[tuple[Tensor, Tensor]] | None = None,
    renormalizing: bool = False,
    carrying: float | Tensor | None = None,
) -> Any:
    """Logits and blended statistics, layer by layer; these by another share, if there is one."""
    found: list[tuple[Tensor, Tensor]] = []
    hidden = inputs
    for layer in model:
        if not isinstance(layer, nn.modules.batchnorm._BatchNorm):
            hidden = layer(hidden)
            continue
        assert layer.running_mean is not None
        assert layer.running_var is not None
        before = carried[len(found)] if carried else (layer.running_mean, layer.running_var)
        mean, variance = blended(hidden, *before, share)
        kept = blended(hidden, *before, share if carrying is None else carrying)
        found.append(kept)
        wide = [-1, *[1] * (hidden.dim() - 2)]
        scaled = (hidden - mean.view(wide)) / (variance + layer.eps).sqrt().view(wide)
        if renormalizing:
            scaled = renormalized(hidden, mean, variance, layer.eps)
        hidden = (
            scaled * layer.weight.view(wide) + layer.bias.view(wide) if layer.affine else scaled
        )
    return hidden, found


def dense(affine: bool) -> nn.Sequential:
    return trained(nn.Linear(50, 3), nn.BatchNorm1d(3, affine=affine), nn.Tanh(), nn.Linear(3, 3))


MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "convolutional": convolutional,
    "bare": lambda: trained(
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3, affine=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(27, 3),
    ),
    "dense": lambda: trained(nn.Flatten(), *dense(True)),
    "dense_bare": lambda: trained(nn.Flatten(), *dense(False)),
}


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize(
    ("statistics", "share"), [(df.PseudoCount(3.0), 5 / 8), (df.Ema(0.3), 0.3)], ids=str
)
def test_logits_and_gradient_of_a_blend(statistics: Any, share: float, case: str) -> None:
    model, inputs = MODELS[case](), images()
    network = df.Network(model, df.AllParameters(), statistics)
    logits, pullback = network.pullback(network.mean(), inputs)
    torch.testing.assert_close(logits, reference(model, inputs, share)[0], rtol=1e-10, atol=1e-10)
    expected = reference(model, inputs, share, renormalizing=isinstance(statistics, df.Ema))[0]
    cotangents, known = torch.randn_like(logits), dict(model.named_parameters())
    gradients = torch.autograd.grad(expected, [known[name] for name in network.shapes], cotangents)
    gradient = torch.cat([each.flatten() for each in gradients])
    torch.testing.assert_close(pullback.total(cotangents), gradient, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(pullback(cotangents).sum(0), gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("statistics", "share"), [(df.PseudoCount(2.0), 4 / 6), (df.Ema(0.3), 0.3)], ids=str
)
def test_rows_of_a_blend_are_those_of_the_own_scale_and_shift_of_each_sample(
    statistics: Any, share: float
) -> None:
    model, inputs = trained(nn.BatchNorm1d(3)), torch.randn(4, 3, dtype=torch.float64)
    network = df.Network(model, statistics=statistics)
    layer: Any = model[0]
    mean, variance = blended(inputs, layer.running_mean, layer.running_var, share)
    cotangents = torch.randn(4, 3, dtype=torch.float64)
    expected = torch.cat(
        (cotangents * (inputs - mean) / (variance + layer.eps).sqrt(), cotangents), 1
    )
    torch.testing.assert_close(network.pullback(network.mean(), inputs)[1](cotangents), expected)


def test_ema_carries_its_statistics() -> None:
    model = convolutional()
    network = df.Network(model, statistics=df.Ema(0.3))
    theta, carried = network.mean(), None
    memory: Mapping[str, Tensor] = {}
    for step in range(3):
        inputs, model_now = images(seed=step), network.recall(memory)
        logits, pullback = model_now.pullback(theta, inputs)
        expected, carried = reference(model, inputs, 0.3, carried)
        torch.testing.assert_close((logits, model_now(theta, inputs)), (expected, expected))
        memory = pullback.memory
        torch.testing.assert_close(
            memory["network.statistics"], torch.cat([part for pair in carried for part in pair])
        )
    start = reference(model, inputs, 0.3)[0]
    torch.testing.assert_close(
        network(theta, inputs), start
    )  # the network itself remembers nothing
    assert not torch.allclose(start, expected)


@pytest.mark.parametrize("statistics", KINDS[:3], ids=str)
def test_other_statistics_carry_nothing(statistics: Any) -> None:
    network = df.Network(convolutional(), statistics=statistics)
    _, pullback = network.pullback(network.mean(), images())
    assert pullback.memory == {}
    assert network.recall({"network.statistics": torch.zeros(14)}) is network


def test_statistics_of_another_network_are_refused() -> None:
    network = df.Network(convolutional(), statistics=df.Ema())
    with pytest.raises(ValueError, match="carried statistics must be 14 values, got '3 values'"):
        network.recall({"network.statistics": torch.zeros(3)})(network.mean(), images())


def test_the_ends_of_the_blends_are_batch_and_source() -> None:
    model, inputs = convolutional(), images()
    theta = df.Network(model).mean()
    ends: Any = ("batch", "source")
    blends = (df.PseudoCount(0.0), df.PseudoCount(1e15), df.Ema(1.0), df.Ema(0.0))
    batch, source, *found = (
        df.Network(model, statistics=kind)(theta, inputs) for kind in (*ends, *blends)
    )
    torch.testing.assert_close(found, [batch, source] * 2)


@kinds
def test_pushforward_is_the_slope_of_the_logits(statistics: Any) -> None:
    network, inputs = df.Network(convolutional(), statistics=statistics), images()
    theta, tangent = network.mean(), torch.randn(len(network.mean()), dtype=torch.float64)
    difference = network(theta + 1e-5 * tangent, inputs) - network(theta - 1e-5 * tangent, inputs)
    torch.testing.assert_close(
        network.pushforward(theta, inputs, tangent[None])[0],
        difference / 2e-5,
        rtol=1e-6,
        atol=1e-7,
    )


@kinds
def test_pushforward_is_the_adjoint_of_the_pullback(statistics: Any) -> None:
    network, inputs = df.Network(convolutional(), df.AllParameters(), statistics), images()
    theta, tangent = network.mean(), torch.randn(len(network.mean()), dtype=torch.float64)
    logits, pullback = network.exact.pullback(theta, inputs)
    cotangents = torch.randn_like(logits)
    pushed = network.pushforward(theta, inputs, tangent[None])[0]
    torch.testing.assert_close(
        (pushed * cotangents).sum(), pullback.total(cotangents) @ tangent, rtol=1e-10, atol=1e-10
    )


@exact
def test_total_is_the_slope_of_the_logits(statistics: Any) -> None:
    network, inputs = df.Network(convolutional(), df.AllParameters(), statistics), images()
    theta, tangent = network.mean(), torch.randn(len(network.mean()), dtype=torch.float64)
    logits, pullback = network.pullback(theta, inputs)
    cotangents = torch.randn_like(logits)
    difference = network(theta + 1e-5 * tangent, inputs) - network(theta - 1e-5 * tangent, inputs)
    torch.testing.assert_close(
        pullback.total(cotangents) @ tangent,
        (difference * cotangents).sum() / 2e-5,
        rtol=1e-6,
        atol=1e-7,
    )
    torch.testing.assert_close(pullback(cotangents).sum(0), pullback.total(cotangents))


def slopes(network: df.PredictiveModel, theta: Tensor, inputs: Tensor) -> Tensor:
    """The Jacobian of the logits of each sample [n, k, d], by finite differences."""
    moves = 1e-5 * torch.eye(len(theta), dtype=theta.dtype)
    ahead, behind = (
        torch.stack([network(point, inputs) for point in (theta + moves, theta - moves)[side]], -1)
        for side in (0, 1)
    )
    return (ahead - behind) / 2e-5


CARRIED = [df.Ema(0.3, diversity=2.0), df.Ema(0.4, diversity=3.0, shift=0.1)]
settings_of = {
    "images": (convolutional, images),
    "rows": (
        lambda: trained(
            *(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh()),
            *(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)),
        ),
        lambda samples=6, seed=1: normal(samples, 4, seed=seed),
    ),
}


@pytest.mark.parametrize("statistics", [*KINDS, *CARRIED], ids=str)
@pytest.mark.parametrize("case", settings_of)
@pytest.mark.parametrize("hidden", [False, True], ids=["parameters", "with velocities"])
def test_gaussian_logits_are_those_of_finite_differences(
    hidden: bool, case: str, statistics: Any
) -> None:
    """V_i = J_i Σ J_iᵀ of each sample, by a J that moves the parameters one by one; also after a
    batch whose statistics are carried.
    """
    build, draw = settings_of[case]
    network, inputs = df.Network(build(), statistics=statistics), draw()
    filt = df.Filter(
        network,
        df.Transition(df.LocalTrend(), df.Isotropic(0.01)) if hidden else df.Transition(),
        prediction=df.LinearizedProbit(),
    )
    d = len(network.mean())
    root = normal(d, d, seed=3)
    belief = df.Belief(network.mean(), df.Full(0.05 * (root @ root.mT / d + torch.eye(d).double())))
    state, _ = filt.update(filt.init(belief), draw(seed=2))
    _, model = filt._bind(state)
    J = slopes(model, state.belief.mean, inputs)
    V = torch.einsum("nkd,de,nle->nkl", J, state.belief.covariance.dense(), J)
    expected = df.LinearizedProbit().of(model(state.belief.mean, inputs), V)
    found = filt.predict(state, inputs)
    close: Any = torch.testing.assert_close
    close(found.logit_variance, expected.logit_variance, rtol=1e-6, atol=1e-9)
    close(found.log_probabilities, expected.log_probabilities, rtol=1e-6, atol=1e-8)
    drawn = df.LinearizedGaussian(6)
    moves = Randomness(state.seed, state.step, torch.device("cpu")).generator(Purpose.PREDICTION)
    moved = torch.einsum("nkd,sd->snk", J, antithetic(state.belief.covariance, 6, moves))
    found = replace(filt, prediction=drawn).predict(state, inputs)
    close(found.logit_variance, moved.square().mean(0), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("statistics", "share"),
    [("batch", 1.0), ("source", 0.0), (df.PseudoCount(3.0), 5 / 8), (df.Ema(0.3), 0.3)],
    ids=str,
)
@pytest.mark.parametrize("curvature", [df.GaussNewton(), df.Hessian()], ids=repr)
@pytest.mark.parametrize("selection", [df.NormAffine(), df.AllParameters()], ids=repr)
def test_curvature_of_coupled_samples_has_the_jacobian_of_each(
    selection: Any, curvature: df.Curvature, statistics: Any, share: float
) -> None:
    """Σ_i J_iᵀ M_i J_i / n with the whole Jacobian of each sample's logits, by automatic
    differentiation of the layers written out (under Ema that of renormalisation).
    """
    model, inputs = convolutional(), images()
    with torch.no_grad():
        model.get_parameter("7.weight").mul_(6)  # surer, so that entropy has some curvature
    network = df.Network(model, selection, statistics)
    named = dict(model.named_parameters())
    chosen = [named[name] for name in network.shapes]
    logits, _ = reference(model, inputs, share, renormalizing=isinstance(statistics, df.Ema))
    rows = [
        torch.cat([part.flatten() for part in torch.autograd.grad(each, chosen, retain_graph=True)])
        for each in logits.view(-1)
    ]
    J = torch.stack(rows).view(*logits.shape, -1)
    logits = logits.detach()
    metric = torch.func.vmap(torch.func.hessian(lambda f: f.logsumexp(-1)))(logits)
    if isinstance(curvature, df.Hessian):
        metric = torch.func.vmap(
            torch.func.hessian(lambda f: torch.special.entr(f.softmax(-1)).sum())
        )(logits)
        values, vectors = torch.linalg.eigh(metric)
        metric = (vectors * values.clamp_min(0)[:, None, :]) @ vectors.mT
    expected = torch.einsum("nkd,nkl,nle->de", J, metric, J) / len(inputs)
    energy, _ = df.Gibbs(df.Entropy())(
        network, network.mean(), inputs, {}, Randomness(0, 0, torch.device("cpu"))
    )
    _, factor, *_ = curvature(energy.evaluation)
    assert expected.diagonal().max() > 1e-3
    torch.testing.assert_close(factor.mT @ factor, expected, rtol=1e-9, atol=1e-11)


def test_gaussian_logits_of_a_module_that_couples_samples_itself() -> None:
    """No batch norm: the module subtracts the mean of the batch."""
    model = Written(
        lambda own, x: own.head(own.norm(own.first(x)) - own.norm(own.first(x)).mean(0)),
        first=nn.Linear(4, 5),
        norm=nn.LayerNorm(5),
        head=nn.Linear(5, 3),
    ).double()
    network, inputs = df.Network(model), normal(6, 4)
    belief = df.Belief(network.mean(), df.Diagonal(torch.full((10,), 0.2).double()))
    filt = df.Filter(network, prediction=df.LinearizedProbit())
    J = slopes(network, network.mean(), inputs)
    for _ in range(2):  # the first time proves it
        found = filt.predict(filt.init(belief), inputs).logit_variance
        torch.testing.assert_close(found, 0.2 * J.square().sum(-1), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("shape", [(3,), (3, 1, 1)], ids=str)
def test_one_value_a_channel_has_no_variance_and_uses_the_source(shape: tuple[int, ...]) -> None:
    norm = nn.BatchNorm1d(3) if len(shape) == 1 else nn.BatchNorm2d(3)
    model, inputs = trained(norm, nn.Flatten()), torch.randn(1, *shape, dtype=torch.float64)
    batch, source = df.Network(model), df.Network(model, statistics="source")
    torch.testing.assert_close(batch(batch.mean(), inputs), model.eval()(inputs))
    cotangents = torch.randn(1, 3, dtype=torch.float64)
    rows = [network.pullback(network.mean(), inputs)[1](cotangents) for network in (batch, source)]
    torch.testing.assert_close(rows[0], rows[1])
    assert rows[0].count_nonzero() == rows[0].numel()


def test_one_value_a_channel_has_the_derivative_of_its_values_under_ema() -> None:
    model, inputs = MODELS["dense"](), images(1)
    network = df.Network(model, df.AllParameters(), df.Ema(0.3))
    logits, pullback = network.pullback(network.mean(), inputs)
    expected = reference(model, inputs, 0.3)[0]
    torch.testing.assert_close(logits, expected)
    cotangents = torch.randn_like(logits)
    gradients = torch.autograd.grad(expected, list(model.parameters()), cotangents)
    gradient = torch.cat([each.flatten() for each in gradients])
    torch.testing.assert_close(pullback.total(cotangents), gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("statistics", ["batch", "source", df.PseudoCount(), df.Ema()], ids=repr)
def test_an_image_that_is_no_batch_is_refused_as_by_the_module_itself(statistics: Any) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    ).eval()
    image = torch.randn(3, 6, 6)  # four rows are left of it, as many as there are channels
    with pytest.raises(ValueError, match="expected 4D input") as own:
        model(image)
    with pytest.raises(ValueError, match=re.escape(str(own.value))):
        df.adapt(model, "tent", statistics=statistics)(image)


@kinds
def test_layers_without_running_statistics_use_those_of_the_batch(statistics: Any) -> None:
    model = trained(nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 2))
    inputs, network = (
        torch.randn(4, 3, dtype=torch.float64),
        df.Network(model, statistics=statistics),
    )
    logits, pullback = network.pullback(network.mean(), inputs)
    torch.testing.assert_close(logits, model(inputs))
    gradients = torch.autograd.grad(
        model(inputs), list(model[0].parameters()), torch.ones_like(logits)
    )
    torch.testing.assert_close(pullback(torch.ones_like(logits)).sum(0), torch.cat(gradients))


@kinds
def test_layers_without_scale_and_shift(statistics: Any) -> None:
    model = trained(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2))
    inputs, network = (
        torch.randn(4, 3, dtype=torch.float64),
        df.Network(model, df.Head(), statistics),
    )
    layer: Any = model[0]
    share = (
        {"batch": 1.0, "source": 0.0}[statistics]
        if isinstance(statistics, str)
        else statistics.share(4)
    )
    mean, variance = blended(inputs, layer.running_mean, layer.running_var, share)
    torch.testing.assert_close(
        network(network.mean(), inputs), model[1]((inputs - mean) / (variance + layer.eps).sqrt())
    )


@kinds
def test_the_statistics_of_the_module_are_left_as_they_were(statistics: Any) -> None:
    model = convolutional()
    before = copy.deepcopy(model.state_dict())
    network = df.Network(model, statistics=statistics)
    logits, pullback = network.pullback(network.mean(), images())
    pullback(torch.ones_like(logits))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(type(layer).__module__.startswith("torch") for layer in model)


class Activated(nn.BatchNorm1d):
    """As timm's BatchNormAct2d: what torch's forward does, and an activation."""

    def forward(self, inputs: Tensor) -> Tensor:
        own = self.training or self.running_mean is None
        moments = (None, None) if own else (self.running_mean, self.running_var)
        return functional.batch_norm(
            inputs, *moments, self.weight, self.bias, own, 0.1, self.eps
        ).relu()


class Inherited(nn.BatchNorm1d):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).relu()


@pytest.mark.parametrize("layer", [Activated, Inherited])
@kinds
def test_a_batch_norm_with_a_forward_of_its_own(
    layer: Callable[[int], nn.Module], statistics: Any
) -> None:
    model, inputs = trained(layer(3), nn.Linear(3, 2)), torch.randn(4, 3, dtype=torch.float64)
    plain = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2)).double()
    plain.load_state_dict(
        {name.replace("1.", "2.", 1): tensor for name, tensor in model.state_dict().items()}
    )
    own, other = df.Network(model, statistics=statistics), df.Network(plain, statistics=statistics)
    for batch in (inputs, inputs[:1]):
        (logits, pullback), (expected, expected_pullback) = (
            each.pullback(own.mean(), batch) for each in (own, other)
        )
        torch.testing.assert_close(logits, expected)
        cotangents = torch.randn_like(logits)
        torch.testing.assert_close(
            (pullback(cotangents), pullback.memory),
            (expected_pullback(cotangents), expected_pullback.memory),
        )
    tangents = torch.randn(2, own.mean().numel(), dtype=torch.float64)
    torch.testing.assert_close(
        own.pushforward(own.mean(), inputs, tangents),
        other.pushforward(own.mean(), inputs, tangents),
    )
    assert model[0].running_mean is not None  # the user's layer is as it was
    assert "inner" not in dict(model[0].named_modules())


def test_a_batch_norm_that_normalises_by_hand_has_a_total_but_neither_rows_nor_a_blend() -> None:
    class ByHand(nn.BatchNorm1d):
        def forward(self, inputs: Tensor) -> Tensor:
            variance, mean = torch.var_mean(inputs, 0, correction=0)
            return (inputs - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias

    model, inputs = trained(ByHand(3), nn.Linear(3, 2)), torch.randn(4, 3, dtype=torch.float64)
    batch = df.Network(model)
    logits, pullback = batch.pullback(batch.mean(), inputs)
    with pytest.raises(ValueError, match=r"couple .* got \"parameters \['0.weight', '0.bias'\]\""):
        pullback(torch.ones_like(logits))
    with pytest.raises(ValueError, match="statistics must be 'batch' or 'source' for 0, a ByHand"):
        df.Network(model, statistics=df.Ema()).pullback(batch.mean(), inputs)


test_refusals = refuses(
    [
        (
            lambda: df.PseudoCount(-1.0),
            r"PseudoCount.count must be a finite number in \[0, inf\), got -1.0",
        ),
        (lambda: df.PseudoCount(math.inf), r"PseudoCount.count must be a finite number"),
        (lambda: df.Ema(1.5), r"Ema.momentum must be a finite number in \[0, 1\], got 1.5"),
        (
            lambda: df.Ema(0.1, -1.0),
            r"Ema.diversity must be a finite number in \[0, inf\), got -1.0",
        ),
        (
            lambda: df.Ema(0.1, math.nan),
            r"Ema.diversity must be a finite number in \[0, inf\), got nan",
        ),
    ]
)


def effective_share(logits: Tensor) -> Tensor:
    """D, with the entropy written out: effective classes over those that as many balanced draws
    show.
    """
    n, k = logits.shape
    mean = logits.softmax(-1).mean(0)
    return ((-(mean * mean.log()).sum()).exp() / (k * (1 - (1 - 1 / k) ** n))).clamp(max=1)


def full_share(samples: int, momentum: float = 0.5) -> float:
    """α at D = 1: fewer than 64 samples count in proportion."""
    return momentum * min(1.0, samples / 64)


SHARE = full_share(len(images()))


def diverse(model: nn.Module, momentum: float = 0.5, diversity: float = 4.0, **changes: Any) -> Any:
    recipe = df.presets.get("tent", statistics=df.Ema(momentum, diversity), **changes)
    return df.adapt(model, recipe)


def unbalanced() -> nn.Sequential:
    """A network that sees more of one class."""
    model = convolutional()
    bias: Tensor = model[-1].bias  # type: ignore[assignment]
    bias.data[0] += 2
    return model


def kept(adapter: Any) -> tuple[Tensor, Tensor]:
    """Carried statistics and D."""
    state = adapter.state_dict()
    return state["memory.network.statistics"], state["memory.network.diversity"]


def move_to(model: nn.Sequential, theta: Tensor) -> nn.Sequential:
    """A copy with these parameters of its batch norms."""
    own = copy.deepcopy(model)
    norms = [layer for layer in own if isinstance(layer, nn.BatchNorm2d)]
    nn.utils.vector_to_parameters(
        theta, [parameter for layer in norms for parameter in layer.parameters()]
    )
    return own


def layer_shift(values: Tensor, mean: Tensor, variance: Tensor, eps: float) -> float:
    """S for what a batch norm sees [n, c, …], channel by channel."""
    shifts = []
    for channel in range(values.shape[1]):
        own = values[:, channel].flatten(1)
        before, after = variance[channel].item() + eps, own.var(correction=0).item() + eps
        between = min(1.0, max(0.05, own.mean(1).var(correction=0).item() / after))
        off = (own.mean().item() - mean[channel].item()) ** 2 / (between * max(before, after))
        shifts.append(off + (1 - between) * math.log(after / before) ** 2)
    return sum(shifts) / len(shifts)


def least_share(values: Tensor, mean: Tensor, variance: Tensor, eps: float) -> float:
    """G min(1, n/16) for what the first batch norm sees [n, c, …]."""
    n = len(values)
    gone = layer_shift(values, mean, variance, eps) / (1 + 8 / n) - 1
    return min(1.0, max(0.0, gone)) * min(1.0, n / 16)


def follow(
    model: nn.Sequential,
    inputs: Tensor,
    trust: Tensor | float = 1.0,
    carried: list[tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]], Tensor]:
    """Logits, statistics carried on, and D, of a batch after one with this D⁴."""
    full, hidden = full_share(len(inputs)), inputs
    for layer in model:
        if isinstance(layer, nn.BatchNorm2d):
            break
        hidden = layer(hidden)
    assert isinstance(layer, nn.BatchNorm2d)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    before = carried[0] if carried else (layer.running_mean, layer.running_var)
    least = least_share(hidden, *before, layer.eps)
    share = torch.as_tensor(full * trust).clamp(min=least)
    found = effective_share(reference(model, inputs, share, carried)[0])
    kept = (full * (trust * found**4) ** 0.5).clamp(min=least)
    return *reference(model, inputs, share, carried, carrying=kept), found


@pytest.mark.parametrize("change", ["none", "light"])
def test_the_share_of_a_batch_follows_the_diversity_unless_the_domain_has_changed(
    change: str,
) -> None:
    model = unbalanced()
    adapter, trust, carried = (
        diverse(model, inference=df.GradientStep(df.SGD(0.1))),
        torch.tensor(1.0).double(),
        None,
    )
    norm: Any = model[1]
    seen = torch.cat([images(20, seed) for seed in range(4)])
    norm.running_var, norm.running_mean = torch.var_mean(model[0](seen).detach(), (0, 2, 3))
    for step in range(4):
        inputs, theta = images(20, seed=step), adapter.belief.mean
        inputs = inputs * 0.1 + 2 if change == "light" and step == 2 else inputs
        found, own = adapter(inputs), move_to(model, theta)
        before = carried
        logits, carried, diversity_of_it = follow(own, inputs, trust, carried)
        torch.testing.assert_close(found, logits.log_softmax(-1))
        statistics, found_share = kept(adapter)
        torch.testing.assert_close(
            (statistics, found_share),
            (torch.cat([part for pair in carried for part in pair]), diversity_of_it),
        )
        assert found_share.shape == ()
        if before is not None:  # there the share is 1, or by the diversity alone
            alone = reference(own, inputs, full_share(20) * trust, before)[0]
            changed = change == "light" and step >= 2
            assert torch.allclose(logits, alone) != changed
        trust = diversity_of_it**4
        assert trust < 0.9
    assert not torch.equal(adapter.belief.mean, theta)


def one_class(bias: float) -> nn.Sequential:
    """A batch norm and a head that, with a large bias, sees one class everywhere."""
    model = trained(nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(50, 4))
    head: Any = model[2]
    head.weight.data.zero_()
    head.bias.data.copy_(torch.tensor([bias, 0.0, 0.0, 0.0]))
    return model


@pytest.mark.parametrize("bias", [0.0, 60.0], ids=["all_classes", "one_class"])
def test_a_batch_of_one_class_lowers_the_share_of_the_next(bias: float) -> None:
    found = 1.0 if bias == 0 else 0.25 / (1 - 0.75 ** len(images()))
    model = one_class(bias)
    layer: Any = model[0]
    layer.running_mean.zero_()  # the images': no change of domain
    layer.running_var.fill_(1)
    adapter = diverse(model, inference=df.Frozen())
    first = blended(images(seed=1), layer.running_mean, layer.running_var, SHARE * found**2)
    adapter(images(seed=1))
    torch.testing.assert_close(
        (kept(adapter)[0], kept(adapter)[1].item()), (torch.cat(first), found)
    )
    adapter(images(seed=2))
    torch.testing.assert_close(
        kept(adapter)[0], torch.cat(blended(images(seed=2), *first, SHARE * found**4))
    )


@pytest.mark.parametrize(
    ("diversity", "weight"), [(0.0, 0.9**20), (4.0, (1 - 0.1 / 64) ** 20)], ids=str
)
def test_single_samples_stay_near_the_source(diversity: float, weight: float) -> None:
    model = one_class(60.0)
    adapter = diverse(model, 0.1, diversity, inference=df.Frozen())
    layer: Any = model[0]
    for _ in range(20):
        adapter(torch.full((1, 2, 5, 5), 7.0, dtype=torch.float64))
    mean = adapter.state_dict()["memory.network.statistics"][:2]
    torch.testing.assert_close(
        (mean - 7) / (layer.running_mean - 7), torch.full((2,), weight, dtype=torch.float64)
    )


def test_without_diversity_none_is_kept() -> None:
    adapter = diverse(unbalanced(), diversity=0.0)
    adapter(images())
    assert [name for name in adapter.state_dict() if "network" in name] == [
        "memory.network.statistics"
    ]


def test_a_checkpoint_carries_the_diversity() -> None:
    first, second = diverse(unbalanced()), diverse(unbalanced())
    for seed in range(2):
        first(images(seed=seed))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for seed in range(2, 4):
        assert torch.equal(first(images(seed=seed)), second(images(seed=seed)))
        assert_same(kept(first), kept(second))
    without = {
        name: value
        for name, value in first.state_dict().items()
        if name != "memory.network.diversity"
    }
    second.load_state_dict(without)  # D = 1 then, so that it was D that the others had in common
    assert not torch.equal(first(images(seed=4)), second(images(seed=4)))


def test_predict_uses_the_diversity_kept_and_keeps_none() -> None:
    model = unbalanced()
    adapter = diverse(model, inference=df.Frozen())
    adapter(images(seed=0))
    before = {name: value.clone() for name, value in adapter.state_dict().items()}
    _, carried, found = follow(model, images(seed=0))
    expected = follow(model, images(seed=1), found**4, carried)[0].softmax(-1)
    for _ in range(2):
        torch.testing.assert_close(adapter.predict(images(seed=1)).probabilities, expected)
    assert all(torch.equal(value, before[name]) for name, value in adapter.state_dict().items())


def test_reset_forgets_the_diversity() -> None:
    adapter = diverse(unbalanced())
    first = adapter(images(seed=0))
    adapter(images(seed=1))
    adapter.reset()
    assert not [name for name in adapter.state_dict() if "network" in name]
    assert torch.equal(adapter(images(seed=0)), first)


class Sides(nn.Module):
    """Logits of classes, and others for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.side = unbalanced(), nn.Linear(3, 2).double()

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.body(inputs)
        return logits, 9 * self.side(logits)


def test_the_diversity_is_that_of_the_classes_where_the_loss_sees_something_else() -> None:
    model = Sides()
    network = df.Network(
        model, None, df.Ema(0.5, 4.0), lambda sides: sides[0], lambda sides: sides[1]
    )
    seen, pullback = network.observing.pullback(network.mean(), images())
    logits, carried, found = follow(model.body, images())
    torch.testing.assert_close(
        (seen, pullback.memory["network.diversity"]), (9 * model.side(logits), found)
    )
    recalled = network.recall(pullback.memory).observing.pullback(network.mean(), images(seed=2))[1]
    expected = follow(model.body, images(seed=2), found**4, carried)[2]
    torch.testing.assert_close(recalled.memory["network.diversity"], expected)


def test_the_diversity_is_of_the_belief_s_precision_under_autocast() -> None:
    model, inputs = unbalanced().float(), images().float()
    network = df.Network(model, statistics=df.Ema(0.5, 4.0))
    expected = network.pullback(network.mean(), inputs)[1].memory["network.diversity"]
    with torch.autocast("cpu", torch.bfloat16):
        found = network.pullback(network.mean(), inputs)[1].memory["network.diversity"]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0)
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_moments_under_autocast_are_those_of_the_same_values(layout: torch.memory_format) -> None:
    """The kernel's moments of half-precision values, and that they are in single precision."""
    torch.manual_seed(0)
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), *pool).eval()
    inputs = (3 + 0.2 * torch.randn(16, 3, 12, 12)).contiguous(memory_format=layout)
    network = df.Network(model, statistics=df.Ema(1.0))
    with torch.autocast("cpu", torch.bfloat16):
        carried = network.pullback(network.mean(), inputs)[1].memory[STATISTICS]
        values = model[0](inputs)
    assert values.dtype == torch.bfloat16
    variance, mean = torch.var_mean(values.double(), (0, 2, 3), correction=0)
    expected = torch.cat((mean, variance)).float()
    torch.testing.assert_close(carried[: len(expected)], expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(("k", "n"), [(10, 200), (100, 64), (1000, 200), (1000, 64), (2, 1)])
def test_balanced_labels_have_the_full_share_whatever_the_number_of_classes(k: int, n: int) -> None:
    """Confident predictions of n labels drawn uniformly from k classes: about as many classes as
    there can be.
    """
    labels = torch.randint(k, (n,), generator=torch.Generator().manual_seed(0))
    assert 0.8 < diversity(50.0 * functional.one_hot(labels, k).double()).item() <= 1.0
    same = 50.0 * functional.one_hot(torch.zeros(n, dtype=torch.long), k).double()
    assert n == 1 or diversity(same).item() < 2 / min(n, k)


# Lock-out


def classifier() -> tuple[nn.Sequential, Callable[..., tuple[Tensor, Tensor]]]:
    """A network that tells where a bright bar is, and batches of such images at another light; its
    statistics are the clean images', and at a tenth of the light it sees one class only.
    """

    def batch(seed: int, slope: float = 1.0, shift: float = 0.0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(4, (32,), generator=generator)
        pixels = 0.3 * torch.rand(32, 1, 8, 8, generator=generator)
        pixels[torch.arange(32), 0, 2 * labels] += 1
        return slope * pixels + shift, labels

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 4),
    )
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(100):
        inputs, labels = batch(1000 + step)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model.eval(), batch


def accuracy(adapter: Any, batches: list[tuple[Tensor, Tensor]]) -> float:
    hits = [(adapter(inputs).argmax(-1) == labels).double().mean() for inputs, labels in batches]
    return torch.stack(hits).mean().item()


@pytest.mark.parametrize(("slope", "shift"), [(0.1, 0.0), (0.3, 0.9), (1.0, 2.0)])
@pytest.mark.parametrize("monitor", [df.Monitor(), None], ids=["guarded", "not_guarded"])
def test_a_change_of_light_does_not_lock_the_adapter_out(
    slope: float, shift: float, monitor: df.Monitor | None
) -> None:
    model, batch = classifier()
    adapter = df.adapt(model, monitor=monitor)
    clean, changed = map(batch, range(10)), [batch(seed, slope, shift) for seed in range(20, 30)]
    assert accuracy(adapter, list(clean)) > 0.95
    assert accuracy(model, changed) < 0.5
    assert accuracy(adapter, changed) > 0.93  # one batch may look like a run of one class


def test_a_change_of_light_moves_the_first_layer_farther_than_one_class_does() -> None:
    model, batch = classifier()
    norm: Any = model[1]

    def evidence(inputs: Tensor) -> float:
        with torch.no_grad():
            values = model[0](inputs)
        variance, mean = torch.var_mean(values, (0, 2, 3), correction=0)
        carried, means = (norm.running_mean, norm.running_var), values.mean((2, 3))
        shift = moment_shift(carried, (mean, variance), means)
        return evidence_of_change(shift, len(inputs)).item()

    inputs, labels = map(torch.cat, zip(*map(batch, range(8)), strict=True))
    assert [evidence(inputs[labels == label][:32]) for label in range(4)] == [0.0] * 4
    assert evidence(inputs[:32]) == 0
    assert [evidence(light) for light in (0.1 * inputs, 0.3 * inputs + 0.9, inputs + 2)] == [1] * 3
    assert 0 < evidence(0.1 * inputs[:8]) <= 0.5  # few samples count in part


def table(seed: int, samples: int = 64) -> Tensor:
    return torch.randn(samples, 4, generator=torch.Generator().manual_seed(seed)).double()


def carried_after(*batches: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance [4] of a batch norm that sees a table."""
    model = trained(nn.BatchNorm1d(4), nn.Linear(4, 3))
    norm: Any = model[0]
    norm.running_mean.zero_()
    norm.running_var.fill_(1)
    adapter = diverse(model, inference=df.Frozen())
    for each in batches:
        adapter(each)
    mean, variance = kept(adapter)[0].split(4)
    return mean, variance


def test_one_broken_row_does_not_rescale_a_table() -> None:
    broken = table(0)
    broken[7, 2] = 1e6
    assert carried_after(broken)[1].max() < 0.5 * 100 / 64 + 2  # as if it were 10 deviations off


def test_a_table_that_is_far_off_takes_the_place_of_the_old_one() -> None:
    mean, variance = carried_after(table(0) + 20)
    torch.testing.assert_close(mean, 20 + table(0).mean(0))
    torch.testing.assert_close(variance, table(0).var(0, correction=0))


# Whether a stream has left the source's domain ---------------------------------------------------


def three_norms() -> nn.Sequential:
    layers = [
        part
        for inputs in (2, 3, 3)
        for part in (nn.Conv2d(inputs, 3, 2), nn.BatchNorm2d(3), nn.Tanh())
    ]
    return trained(*layers, nn.Flatten(), nn.Linear(12, 4)).eval()


def source_shift(model: nn.Sequential, inputs: Tensor) -> float:
    """S of a batch: what each norm of the frozen network sees, the last one left out."""
    shifts, hidden, n = [], inputs, len(inputs)
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.BatchNorm2d):
                assert layer.running_mean is not None
                assert layer.running_var is not None
                moments = (layer.running_mean, layer.running_var)
                shifts.append(layer_shift(hidden, *moments, layer.eps))
            hidden = layer(hidden)
    means = [sum(shifts[:count]) / count for count in range(1, len(shifts))]
    classes = effective_share(hidden).item()
    return (max(means) - 1 / n) / (1 + 2 * (1 - classes) ** 2)


def test_every_fourth_batch_passes_through_the_source() -> None:
    model = three_norms()
    network = df.Network(model, statistics=df.Ema(0.5, 4.0, 2.0))
    theta = network.mean() + 0.1  # asked is the source, not what became of it
    memory: dict[str, Tensor] = {}
    weight = total = 0.0
    for step in range(9):
        inputs = images(20, seed=step) * (1 + step / 8)
        pullback = network.recall(memory).pullback(theta, inputs)[1]
        memory = dict(pullback.memory)
        if step % 4 == 0:  # 20 samples of a window of 32
            total = 0.375 * total + 20 * min(4.0, source_shift(model, inputs))  # twice the limit
            weight = 0.375 * weight + 20
        expected = torch.tensor([total, weight, (step + 1) % 4]).double()
        torch.testing.assert_close(memory["network.shift"], expected)
        far = min(1.0, max(0.01, 2 * (total / weight / 2.0 - 1)))
        torch.testing.assert_close(pullback.novelty, torch.tensor(far, dtype=torch.float64))


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("far", [0.0, 0.2, 1.0])
def test_what_is_blended_is_a_mixture_of_carried_source_and_batch(share: float, far: float) -> None:
    model = trained(nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(50, 4))
    norm: Any = model[0]
    values, carried = images(), (torch.tensor([0.3, -2.0]).double(), torch.ones(2).double())
    parts = [
        (1 - share, *carried),
        (share * (1 - far), norm.running_mean, norm.running_var),
        (share * far, values.mean((0, 2, 3)), values.var((0, 2, 3), correction=0)),
    ]
    mean = sum(weight * own for weight, own, _ in parts)
    square = sum(weight * (spread + own**2) for weight, own, spread in parts)
    network = df.Network(model, statistics=df.Ema(share)).carrying(
        torch.cat(carried), 1.0, novelty=torch.tensor(far, dtype=torch.float64)
    )
    memory = network.pullback(network.mean(), values)[1].memory
    torch.testing.assert_close(
        memory["network.statistics"], torch.cat((mean, square - mean**2)), rtol=1e-12, atol=1e-12
    )


def test_a_first_layer_that_is_far_off_counts_before_the_source_is_asked() -> None:
    model, batch = classifier()
    network = df.Network(model, statistics=df.Ema(0.5, 4.0, 0.45))
    start = network.carried()
    assert start is not None
    dark = 0.1 * batch(0)[0]
    found = network.carrying(start[0], 1.0, novelty=torch.tensor(0.01))(network.mean(), dark)
    by_batch = df.Network(model, statistics="batch")
    torch.testing.assert_close(found, by_batch(by_batch.mean(), dark))


def test_what_a_network_says_of_its_layers() -> None:
    probe = Probe()
    assert probe.answer(10, torch.tensor(1.0)) is None  # a table

    def hear(shift: float, channels: int) -> None:
        """A layer whose mean alone has moved, by so much in the variance of samples' means."""
        zeros, ones = torch.zeros(channels), torch.ones(channels)
        probe.hear((zeros, ones), (shift**0.5 * ones, ones), torch.stack((ones, -ones)))

    hear(0.6, 3)
    found = probe.answer(10, torch.tensor(1.0))
    torch.testing.assert_close(found, torch.tensor(0.5))  # the only layer, the last one or not
    hear(1.8, 5)
    hear(9.0, 2)
    found = probe.answer(10, torch.tensor(0.5))
    torch.testing.assert_close(found, torch.tensor(1.1 / 1.5))
    steps = [novelty(torch.tensor(shift), 0.4).item() for shift in (0.0, 0.4, 0.5, 0.6, 3.0)]
    assert steps == pytest.approx([0.01, 0.01, 0.5, 1.0, 1.0])


def test_early_layers_follow_runs_of_labels_and_late_ones_do_not() -> None:
    """Of three batch norms the first two are early: what they see, and by how much each then moves,
    written out.
    """
    model, stay, diverse_as = three_norms().requires_grad_(False), 0.8, 0.6
    hidden = values = images(20)
    for layer in model:  # a source that is near
        if isinstance(layer, nn.BatchNorm2d):
            variance, mean = torch.var_mean(hidden, (0, 2, 3), correction=0)
            layer.running_mean, layer.running_var = mean + 0.1 * variance.sqrt(), 1.1 * variance
        hidden = layer(hidden)
    rule = df.Ema(0.5, 4.0, late=0.3)
    network = df.Network(model, statistics=rule)
    start = network.carried()
    assert start is not None
    known = {
        STATISTICS: start[0],
        DIVERSITY: torch.tensor(diverse_as).double(),
        RUNS: torch.tensor(stay).double(),
    }
    trusts = [diverse_as ** (4 * (1 - stay))] * 2
    trusts += [0.3 * diverse_as**4 * (21 * (1 - stay) / (21 - 19 * stay)) ** 2]
    hidden, trust = values, iter(trusts)
    least = None
    for layer in model:
        if isinstance(layer, nn.BatchNorm2d):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            before = layer.running_mean, layer.running_var
            if least is None:
                least = least_share(hidden, *before, layer.eps)
            share = max(least, full_share(20) * next(trust))
            variance, mean = torch.var_mean(hidden, (0, 2, 3), correction=0)
            off = mean - before[0]
            spread = before[1] + share * (variance - before[1] + (1 - share) * off**2)
            moments = (before[0] + share * off, spread, layer.weight, layer.bias)
            hidden = functional.batch_norm(hidden, *moments, eps=layer.eps)
        else:
            hidden = layer(hidden)
    assert least is not None
    assert least < full_share(20) * trusts[-1]
    torch.testing.assert_close(network.recall(known)(network.mean(), values), hidden)


def test_novelty_multiplies_the_weights_of_samples() -> None:
    recipe = df.presets.get("opgd", beta=3.0, statistics=df.Ema(0.5, 4.0, 1e9))
    network = df.Network(three_norms(), statistics=recipe.statistics)
    energy, _ = recipe.observation(
        network, network.mean(), images(20), {}, Randomness(0, 0, torch.device("cpu"))
    )
    torch.testing.assert_close(energy.samples.weights, torch.full((20,), 0.03).double())


@pytest.mark.parametrize("order", ["mixed", "sorted"])
def test_on_the_source_s_own_domain_a_network_stays_what_it_was(order: str) -> None:
    model, batch = classifier()
    inputs, labels = map(torch.cat, zip(*map(batch, range(8)), strict=True))
    at = labels.argsort(stable=True) if order == "sorted" else torch.arange(len(labels))
    adapter = df.adapt(model)
    found = torch.cat([adapter(inputs[each]) for each in at.split(32)])
    with torch.no_grad():
        frozen = model(inputs[at])
    assert (found.argmax(-1) == frozen.argmax(-1)).double().mean() > 0.99


def test_a_table_is_never_told_apart_from_the_source() -> None:
    model = trained(nn.BatchNorm1d(4), nn.Linear(4, 3))
    network = df.Network(model, statistics=df.Ema(0.5, 4.0, 0.45))
    pullback = network.pullback(network.mean(), table(0))[1]
    assert pullback.novelty == 1
    assert pullback.memory["network.shift"].tolist() == [0, 0, -1]  # and not asked again
    again = network.recall(pullback.memory).pullback(network.mean(), table(1))[1]
    assert again.novelty == 1


def _shift_model() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    end = (nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    model = nn.Sequential(*layers, *end)
    with torch.no_grad():
        for _ in range(30):
            model(torch.randn(64, 3, 8, 8))
    return model.eval()


def _images(generator: torch.Generator, scale: float = 1.0) -> Tensor:
    return torch.randn(64, 3, 8, 8, generator=generator) * scale


@pytest.mark.parametrize("scale", [500.0, 20000.0])
def test_half_precision_blends_in_float32_and_survives_a_source_that_overflows(
    scale: float,
) -> None:
    generator = torch.Generator().manual_seed(0)
    adapter = df.adapt(_shift_model().half(), monitor=None)
    for _ in range(6):
        inputs = _images(generator, scale).clamp(-6e4, 6e4).half()
        assert adapter(inputs).isfinite().all()


def test_a_state_of_a_stream_that_asked_for_shift_does_not_hold_back_one_that_does_not() -> None:
    generator = torch.Generator().manual_seed(0)
    model = _shift_model()
    asking, other = df.adapt(model, monitor=None), df.adapt(model, shift=0.0, monitor=None)
    for _ in range(5):
        asking(_images(generator))
    other.load_state_dict(asking.state_dict())
    start = other.state.memory[STATISTICS]
    for _ in range(5):
        other(_images(generator, 1.3))
    assert (other.state.memory[STATISTICS] - start).abs().max() > 0.02


def _sure(model: nn.Module) -> nn.Module:
    """The same labels, of which it is certain: who is unsure is never at home (``Ema.doubt``)."""
    with torch.no_grad():
        list(model.parameters())[-1].mul_(1e4)
        list(model.parameters())[-2].mul_(1e4)
    return model


def test_doubt_is_how_unsure_a_source_is_of_so_many_classes() -> None:
    p = torch.tensor([[0.7, 0.2, 0.1], [0.4, 0.4, 0.2]])
    one = torch.tensor(1.0)
    assert doubt_of(p.log(), one).item() == pytest.approx(0.45)
    few = doubt_of(p.log(), torch.tensor(0.5))
    assert few.item() == pytest.approx(0.45 / 1.5)
    many = torch.zeros(4, 1000)
    assert doubt_of(many, one).item() == pytest.approx(0.999 / 3)


def test_an_unsure_source_is_away_from_home_whatever_the_moments_say() -> None:
    generator, found = torch.Generator().manual_seed(0), []
    batch, recipe = _images(generator), df.presets.get("driftfilter", domains=None)
    for model in (_shift_model(), _sure(_shift_model())):
        adapter = df.adapt(model, recipe, monitor=None)
        adapter(batch)
        sums = adapter.state.memory[SHIFT]
        found.append((sums[0] / sums[1]).item())
    unsure, sure = found
    assert sure < 0.45 < unsure
    plain = replace(recipe, statistics=replace(recipe.statistics, doubt=0.0))
    adapter = df.adapt(_shift_model(), plain, monitor=None)
    adapter(batch)
    sums = adapter.state.memory[SHIFT]
    assert (sums[0] / sums[1]).item() < 0.45


def test_one_far_batch_counts_as_one_and_single_samples_are_not_probed() -> None:
    generator = torch.Generator().manual_seed(0)
    adapter = df.adapt(_sure(_shift_model()), monitor=None, domains=None)
    adapter.update(_images(generator)[:1])
    assert SHIFT not in adapter.state.memory
    shifts = []
    for place in range(17):
        adapter.update(_images(generator, 1e6 if place == 4 else 1.0)[:16])
        sums = adapter.state.memory[SHIFT]
        shifts.append((sums[0] / sums[1]).item())
        assert sums[2] == (place + 1) % 4
    assert max(shifts) <= 0.9 + 1e-6
    assert shifts[4] > 0.3
    assert shifts[12] < 0.45


@pytest.mark.parametrize(
    ("known", "kept"),
    [(None, 1.0), ((0.0, 0.0, 1.0), 1.0), ((3.0, 10.0, 2.0), 0.25), ((7.0, 10.0, 2.0), 1.0)],
)
def test_at_home_a_part_of_what_was_learned_is_kept(known: Any, kept: float) -> None:
    """μ₀ + keep (μ - μ₀) if S = 0.3 is below the limit of 0.5; bit for bit μ if it is 0.7 or not
    known.
    """
    source, learned = (
        df.Belief(
            torch.randn(6, generator=torch.Generator().manual_seed(seed)),
            df.Diagonal(torch.ones(6)),
        )
        for seed in (0, 1)
    )
    inputs, at = torch.eye(3), Randomness(0, 0, torch.device("cpu"))
    energy = df.Gibbs()(df.LinearHead(2), learned.mean, inputs, {}, at, source)[0]
    memory = {} if known is None else {SHIFT: torch.tensor(known)}
    assert df.ForgetAtHome(0.0)(learned, energy, memory, at) == (learned, memory)
    belief, after = df.ForgetAtHome(0.5, 0.25)(learned, energy, memory, at)
    assert after is memory
    assert belief.covariance is learned.covariance
    expected = source.mean + kept * (learned.mean - source.mean)
    torch.testing.assert_close(belief.mean, expected)
    assert torch.equal(belief.mean, learned.mean) == (kept == 1)


def test_back_in_its_domain_the_default_is_the_source_within_ten_batches() -> None:
    generator, model = torch.Generator().manual_seed(0), _sure(_shift_model())
    adapter = df.adapt(model, monitor=None)
    for _ in range(12):
        adapter(_images(generator, 3.0))
    far = (adapter.belief.mean - adapter.state.source.mean).norm()
    for _ in range(10):
        adapter(_images(generator))
    left = (adapter.belief.mean - adapter.state.source.mean).norm()
    assert far > 1e-5
    assert left < 0.05 * far


@pytest.mark.parametrize("rule", [df.Moderated(), df.Moderated(variance=1), df.LinearizedProbit()])
def test_rules_that_ask_for_gradients_of_no_parameters_get_zeros(rule: Any) -> None:
    model = _shift_model()
    inputs = _images(torch.Generator().manual_seed(0))
    found = df.adapt(model, "center", prediction=rule)(inputs)
    torch.testing.assert_close(found, df.adapt(model, "center")(inputs))

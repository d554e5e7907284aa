"""A loss, a noise and a covariance structure of a user's own, added to the tables at run time.

Nothing in the package knows them. They must work in a filter, in an adapter, in TOML, in the list
of the command line and in checkpoints; mean and covariance are held against plain formulas.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app.cli import main
from driftfilter.compiled.scan import STEPS
from driftfilter.gaussian.covariance import Gain, Index, Noise, Shapes
from driftfilter.gaussian.structures import STRUCTURES
from driftfilter.model.dynamics import Spread, SpreadRule
from driftfilter.model.expansion import Expansion, log_softmax, separable
from driftfilter.model.losses import Loss, Targets
from oracles import array, assert_equal, assert_represents, normals, tensor
from small import assert_same, moments, refuses


@final
@dataclass(frozen=True)
class GiniImpurity(Loss):
    """1 - Σ p²: entropy's polynomial cousin."""

    def expand(self, logits: Tensor, targets: Targets, weights: Tensor) -> Expansion:
        p = log_softmax(logits).exp()
        square = p * p  # g(p) = -p², so p g' = -2p² and p² g'' = -2p²
        return separable(1 - square.sum(-1), p, -2 * square, -2 * square)


@final
@dataclass(frozen=True, eq=False)
class Scalar(df.Covariance):
    """v I: one number for all d coordinates; 1/v ← 1/v + tr(FᵀF) / d keeps the trace of Σ⁻¹."""

    value: Tensor  # [], v
    size: int

    @property
    def dimension(self) -> int:
        return self.size

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    @classmethod
    def isotropic_like(
        cls, variance: float, mean: Tensor, rank: int = 0, shapes: Shapes = None
    ) -> "Scalar":
        return cls(mean.new_tensor(variance), len(mean))

    def dense(self) -> Tensor:
        return self.value * torch.eye(self.size).to(self.value)

    def apply(self, vectors: Tensor) -> Tensor:
        return vectors * self.value

    def solve(self, vectors: Tensor) -> Tensor:
        return vectors / self.value

    def condition(self, factor: Tensor) -> "Scalar":
        return Scalar(1 / (1 / self.value + factor.square().sum() / self.size), self.size)

    def propagate(self, gain: Gain, noise: Noise) -> "Scalar":
        added = noise.value if isinstance(noise, Scalar) else noise
        assert isinstance(gain, float)
        assert isinstance(added, (float, Tensor))
        return Scalar(gain * gain * self.value + added, self.size)

    def marginal(self, index: Index) -> "Scalar":
        return Scalar(self.value, len(torch.arange(self.size)[index]))


@final
@dataclass(frozen=True)
class Breathing:
    """W = c tanh diag(Σ): a noise that is not affine in the belief, as compiled code has it."""

    scale: float = 0.01

    def __call__(self, gain: Gain, source: df.Belief) -> SpreadRule:
        return lambda belief: Spread(1.0, self.scale * belief.covariance.variance().tanh())


RHO, BETA, VARIANCE = 0.9, 2.0, 0.25


@pytest.fixture(autouse=True)
def recipe(monkeypatch: pytest.MonkeyPatch) -> df.Recipe:
    """One of the user's own parts, which stand in the tables while a test runs."""
    monkeypatch.setitem(df.VARIANTS["loss"], "GiniImpurity", GiniImpurity)
    monkeypatch.setitem(df.VARIANTS["noise"], "Breathing", Breathing)
    monkeypatch.setitem(STRUCTURES, "scalar", Scalar)
    return df.Recipe(
        source=df.Gaussian(VARIANCE, structure="scalar"),
        transition=df.Transition(df.MeanReversion(RHO), df.Stationary()),
        observation=df.Gibbs(GiniImpurity(), df.Constant(BETA)),
        inference=df.Linearized(df.GaussNewton()),
    )


class Expected(NamedTuple):
    """N(mean, v I) and the logits at the mean."""

    mean: Tensor
    variance: float
    logits: Tensor


def step(logits: Callable[[Tensor], Tensor], before: Expected, source: Tensor) -> Expected:
    """A step of the recipe from derivatives that autograd takes of plain functions."""
    mean = RHO * before.mean + (1 - RHO) * source
    variance = RHO**2 * before.variance + (1 - RHO**2) * VARIANCE

    def energy(theta: Tensor) -> Tensor:
        return BETA * (1 - logits(theta).softmax(-1).square().sum(-1)).mean()

    gradient: Tensor = torch.func.grad(energy)(mean)
    jacobian: Tensor = torch.func.jacrev(logits)(mean)  # [n, k, d]
    p = logits(mean).softmax(-1)
    metric = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    curvature = BETA / len(p) * torch.einsum("nkd,nkl,nld->", jacobian, metric, jacobian).item()
    variance = 1 / (1 / variance + curvature / len(mean))
    mean = mean - variance * gradient
    return Expected(mean, variance, logits(mean).detach())


def assert_is(belief: df.Belief, expected: Expected) -> None:
    assert isinstance(belief.covariance, Scalar)
    assert_equal(belief.mean, array(expected.mean))
    assert belief.covariance.value.item() == pytest.approx(expected.variance, rel=1e-10)


def start(mean: Tensor) -> Expected:
    return Expected(mean, VARIANCE, torch.empty(0))


BATCHES = tensor(normals(4, 7, 2, seed=0))
HEAD = df.LinearHead(3)
THETA = tensor(normals(6, seed=1))


def test_the_structure_does_what_every_structure_does() -> None:
    """What it leaves out comes from the dense fallback."""
    scalar = Scalar(torch.tensor(0.3, dtype=torch.float64), 6)
    assert_represents(scalar, 0.3 * np.eye(6))
    assert_equal(scalar.precision(), np.eye(6) / 0.3)
    assert_equal(scalar.spectrum(), np.full(6, 1 / 0.3))
    assert_equal(scalar.inform(0.5).dense(), np.eye(6) / (1 / 0.3 + 0.5))
    with pytest.raises(
        ValueError, match=r"Scalar.inform: information must be a number >= 0, got -1"
    ):
        scalar.inform(-1.0)
    assert scalar.truncate() is scalar
    other = df.Diagonal(tensor(np.arange(1.0, 7.0)))
    assert scalar.relative_trace(other).item() == pytest.approx(21 / 0.3)
    informed = df.Blocks((scalar, other)).condition(tensor(np.ones((1, 12)))).variance()[:6]
    assert_equal(informed, np.full(6, 1 / (1 / 0.3 + 1)))


def test_in_a_filter_step_by_step_and_in_one_run(recipe: df.Recipe) -> None:
    filt = recipe.filter(HEAD)
    state = first = filt.init(recipe.source(HEAD, THETA))
    expected = start(THETA)
    predictions = []
    for batch in BATCHES:
        state, prediction, _ = filt.step(state, batch)
        expected = step(lambda theta, batch=batch: HEAD(theta, batch), expected, THETA)  # type: ignore[misc]
        assert_is(state.belief, expected)
        assert_equal(prediction.log_probabilities, array(expected.logits.log_softmax(-1)))
        predictions.append(prediction.log_probabilities)
    last, outputs = filt.run(first, BATCHES)
    assert_same(
        (last.belief.mean, outputs.log_probabilities), (state.belief.mean, torch.cat(predictions))
    )
    source, reached = state.source, state.belief
    size, ratio = reached.dimension, expected.variance / VARIANCE
    moved = (reached.mean - THETA).square().sum().item() / VARIANCE
    divergence = 0.5 * (size * (ratio - 1 - math.log(ratio)) + moved)
    assert df.kl_divergence(reached, source).item() == pytest.approx(divergence, rel=1e-9)


@pytest.mark.parametrize("structure", [df.Full, df.Diagonal])
def test_a_run_takes_compiled_code_only_for_what_it_knows(structure: type[df.Covariance]) -> None:
    """The loss and the noise are in the table, and yet not the compiler's."""
    for transition, loss in (
        (df.Transition(), GiniImpurity()),
        (df.Transition(df.MeanReversion(RHO), Breathing()), df.Entropy()),
    ):
        filt = df.Filter(HEAD, transition, df.Gibbs(loss), df.Linearized(df.GaussNewton()))
        state = first = filt.init(df.Belief(THETA, structure.isotropic_like(VARIANCE, THETA)))
        stream = BATCHES.repeat(STEPS // len(BATCHES) + 1, 1, 1)
        for batch in stream:
            state, _, _ = filt.step(state, batch)
        last, _ = filt.run(first, stream)
        assert_same(moments(last.belief), moments(state.belief))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
    return model.eval()


def test_in_an_adapter_from_toml_saved_and_resumed(recipe: df.Recipe, tmp_path: Path) -> None:
    read = df.from_toml(df.to_toml(recipe))
    assert read == recipe
    model = network()
    adapter = df.adapt(model, read)
    mean = torch.cat([*model[1].parameters()]).detach()
    expected = start(mean)
    for batch in BATCHES[:2]:
        said = adapter(batch)

        def logits(theta: Tensor, batch: Tensor = batch) -> Tensor:
            entering = model[0](batch)
            spread = entering.var(0, correction=0) + 1e-5
            normalised = (entering - entering.mean(0)) * spread.rsqrt()
            found: Tensor = model[3]((normalised * theta[:5] + theta[5:]).tanh())
            return found

        expected = step(logits, expected, mean)
        assert_is(adapter.belief, expected)
        assert_equal(said, array(expected.logits.log_softmax(-1)))

    df.save(adapter, tmp_path / "state.safetensors")
    resumed = df.adapt(network(), read)
    df.load(resumed, tmp_path / "state.safetensors")
    assert isinstance(resumed.belief.covariance, Scalar)
    for batch in BATCHES[2:]:
        assert torch.equal(resumed(batch), adapter(batch))
    assert_same(resumed.state_dict(), adapter.state_dict())


def test_a_laplace_source_in_a_structure_of_your_own() -> None:
    data = df.SourceData(BATCHES.flatten(0, 1), batch_size=8)
    belief, dense = (
        df.Laplace(structure, precision=0.5)(HEAD, THETA, data) for structure in ("scalar", "full")
    )
    trace = torch.linalg.inv(dense.covariance.dense()).trace().item()
    assert isinstance(belief.covariance, Scalar)
    assert belief.covariance.value.item() == pytest.approx(6 / trace, rel=1e-9)


test_roles_are_checked = refuses(
    [
        (
            lambda: df.Linearized(GiniImpurity()),  # type: ignore[arg-type]
            r"Linearized.curvature must be of role 'curvature'",
        ),
        (
            lambda: df.from_toml('kind = "Gibbs"\nloss = { kind = "MAP" }'),
            r"Gibbs.loss must be a variant of role loss.*GiniImpurity",
        ),
        (lambda: df.from_toml('kind = "GiniImpurty"'), r"did you mean 'GiniImpurity'"),
        (
            lambda: df.Gaussian(structure="scalr"),
            r"Gaussian.structure must be one of .*'scalar'.*'scalr'",
        ),
    ]
)


def test_roles_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert (
        "GiniImpurity             1 - Σ p²: entropy's polynomial cousin." in capsys.readouterr().out
    )


def test_what_left_the_table_is_unknown(recipe: df.Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    text = df.to_toml(recipe)
    monkeypatch.delitem(df.VARIANTS["loss"], "GiniImpurity")
    with pytest.raises(ValueError, match="kind must be the name of a variant, got 'GiniImpurity'"):
        df.from_toml(text)
    with pytest.raises(ValueError, match="GiniImpurity is not in the table of variants"):
        df.to_toml(recipe)

"""The source posterior against a general-purpose optimiser, automatic differentiation, quadrature
and dense algebra.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import dblquad
from scipy.optimize import minimize, minimize_scalar
from torch import Tensor, nn

import driftfilter as df
from driftfilter.networks.features import build_head
from driftfilter.source import posterior as source
from oracles import Allocations
from small import assert_same, moments, refuses


def problem(classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(60, 2, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, classes, (60,), generator=generator)


def negative_log_posterior(
    theta: Tensor, inputs: Tensor, labels: Tensor, head: df.LinearHead, precision: float
) -> Tensor:
    logp = head(theta, inputs).log_softmax(-1)
    return -logp.gather(-1, labels[:, None]).sum() + 0.5 * precision * theta @ theta


@pytest.mark.parametrize(("classes", "parameters"), [(2, 3), (2, 6), (3, 6), (3, 9)])
def test_mode_and_hessian_of_the_log_posterior(classes: int, parameters: int) -> None:
    inputs, labels = problem(classes)
    head = df.LinearHead(classes, intercept=True)
    prior = df.Belief(
        torch.zeros(parameters, dtype=torch.float64),
        df.Full(torch.eye(parameters, dtype=torch.float64) / 2),
    )
    belief = df.fit_laplace(head, prior, inputs, labels)

    def objective(values: np.ndarray) -> tuple[float, np.ndarray]:
        theta = torch.tensor(values, requires_grad=True)
        value = negative_log_posterior(theta, inputs, labels, head, 2.0)
        (gradient,) = torch.autograd.grad(value, theta)
        return value.item(), gradient.numpy()

    mode = minimize(
        objective, np.zeros(parameters), jac=True, method="BFGS", options={"gtol": 1e-9}
    ).x
    np.testing.assert_allclose(belief.mean.numpy(), mode, atol=1e-7)
    hessian = torch.autograd.functional.hessian(
        lambda theta: negative_log_posterior(theta, inputs, labels, head, 2.0), belief.mean
    )
    torch.testing.assert_close(
        belief.covariance.dense(), torch.linalg.inv(hessian), rtol=1e-8, atol=1e-10
    )


def test_structure_of_the_prior_is_kept() -> None:
    inputs, labels = problem(2)
    head = df.LinearHead(2, intercept=True)
    prior = df.Belief(
        torch.zeros(3, dtype=torch.float64), df.Diagonal(torch.ones(3, dtype=torch.float64))
    )
    belief = df.fit_laplace(head, prior, inputs, labels)
    full = df.fit_laplace(
        head, df.Belief(prior.mean, df.Full(torch.eye(3, dtype=torch.float64))), inputs, labels
    )
    torch.testing.assert_close(
        belief.mean, full.mean, rtol=0, atol=1e-7
    )  # the mode does not depend on the structure
    torch.testing.assert_close(
        belief.covariance.precision(), full.covariance.precision().diagonal(), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 1]), r"labels must be integers of shape \[60\]"),
        (torch.zeros(60), "labels must be integers"),
        ([0] * 60, "labels must be a tensor of integers, got 'list'"),
        (torch.full((60,), 2), r"labels must be in \[0, 1\], got 'values from 2 to 2'"),
    ],
)
def test_bad_labels(labels: Any, message: str) -> None:
    inputs, _ = problem(2)
    prior = df.Belief(
        torch.zeros(2, dtype=torch.float64), df.Full(torch.eye(2, dtype=torch.float64))
    )
    with pytest.raises(ValueError, match=message):
        df.fit_laplace(df.LinearHead(2), prior, inputs, labels)


@pytest.mark.parametrize("structure", ["Full", "Diagonal", "Blocks", "LowRank"])
def test_the_mode_is_reached_under_every_structure_with_correlated_features(structure: str) -> None:
    """Undamped or projected Newton steps diverge here: the mode must be one, and the same for
    all.
    """
    generator = torch.Generator().manual_seed(1)
    inputs = 1 + 0.3 * torch.randn(100, 20, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 2, (100,), generator=generator)
    ones = torch.ones(20, dtype=torch.float64)
    structures: dict[str, df.Covariance] = {
        "Full": df.Full(torch.diag(ones)),
        "Diagonal": df.Diagonal(ones),
        "Blocks": df.Blocks((df.Full(torch.diag(ones[:10])), df.Diagonal(ones[10:]))),
        "LowRank": df.LowRank(ones, torch.zeros(0, 20, dtype=torch.float64), 3),
    }
    covariance = structures[structure]
    belief = df.fit_laplace(df.LinearHead(2), df.Belief(0 * ones, covariance), inputs, labels)
    theta = belief.mean.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(
        negative_log_posterior(theta, inputs, labels, df.LinearHead(2), 1.0), theta
    )
    assert gradient.norm() < 1e-6
    assert type(belief.covariance) is type(covariance)


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 1, 2, 3, 4])
def test_a_small_network_reaches_a_mode(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(100, 2, generator=generator, dtype=torch.float64)
    labels = (inputs.prod(-1) > 0).long()

    def network(theta: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x @ theta[:8].reshape(2, 4)) @ theta[8:].reshape(4, 2)

    start = 0.5 * torch.randn(16, generator=generator, dtype=torch.float64)
    prior = df.Belief(start, df.Full(torch.eye(16, dtype=torch.float64)))
    belief = df.fit_laplace(network, prior, inputs, labels, iterations=1000)
    theta = belief.mean.clone().requires_grad_()
    logp = network(theta, inputs).log_softmax(-1)
    objective = -logp.gather(-1, labels[:, None]).sum() + 0.5 * (theta - start).square().sum()
    (gradient,) = torch.autograd.grad(objective, theta)
    assert gradient.norm() < 1e-5


def test_a_mode_that_is_not_reached_is_an_error() -> None:
    inputs, _ = problem(2)
    prior = df.Belief(
        torch.zeros(2, dtype=torch.float64), df.Full(1e4 * torch.eye(2, dtype=torch.float64))
    )
    with pytest.raises(
        ValueError, match="iterations must be enough to reach the mode, got 1: the next Newton step"
    ):
        df.fit_laplace(df.LinearHead(2), prior, 5 * inputs, (inputs[:, 0] > 0).long(), iterations=1)


anything: Any = df  # for values that the types forbid
EVIDENT = df.Laplace("diagonal", precision="marginal_likelihood")
HEAD = df.LinearHead(3, intercept=True)
THETA = torch.tensor([0.3, -1.0, 0.5, 0.0, 0.8, -0.4, -0.2, 0.1, 0.6], dtype=torch.float64)


def losses(theta: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    values: Tensor = nn.functional.cross_entropy(HEAD(theta, inputs), labels, reduction="none")
    return values


def hessian(inputs: Tensor, labels: Tensor) -> Tensor:
    matrix: Tensor = torch.autograd.functional.hessian(
        lambda theta: losses(theta, inputs, labels).sum(), THETA
    )
    return matrix


def gradients(inputs: Tensor, labels: Tensor) -> Tensor:
    """Per-sample gradients [n, d] by automatic differentiation."""
    rows: Tensor = torch.autograd.functional.jacobian(
        lambda theta: losses(theta, inputs, labels), THETA
    )
    return rows


def precision(belief: df.Belief) -> Tensor:
    matrix: Tensor = torch.linalg.inv(belief.covariance.dense())
    return matrix


def close(actual: Any, expected: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def perceptron(seed: int = 0) -> nn.Sequential:
    """Batch and layer norms between linear layers, trained statistics, in float64."""
    torch.manual_seed(seed)
    layers = (
        nn.Linear(2, 4),
        nn.BatchNorm1d(4),
        nn.Tanh(),
        nn.Linear(4, 5),
        nn.LayerNorm(5),
        nn.Tanh(),
        nn.Linear(5, 3),
    )
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        model.train()(torch.randn(64, 2, dtype=torch.float64))
    model.eval()
    return model


def test_source_data_in_batches() -> None:
    inputs, labels = problem(3)
    batches = list(df.SourceData(inputs, labels, batch_size=25))
    assert [len(batch) for batch, _ in batches] == [25, 25, 10]
    assert torch.equal(torch.cat([batch for batch, _ in batches]), inputs)
    assert torch.equal(torch.cat([batch for _, batch in batches if batch is not None]), labels)
    assert [batch for _, batch in df.SourceData(inputs)] == [None]
    pairs: list[Any] = list(df.SourceData([(inputs[:3], labels[:3]), inputs[3:]]))
    assert_same((pairs[0][0], pairs[0][1], pairs[1][0]), (inputs[:3], labels[:3], inputs[3:]))
    assert pairs[1][1] is None
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs, labels), batch_size=32
    )
    assert [len(batch) for batch, _ in df.SourceData(loader)] == [32, 28]


test_refusals_name_the_field = refuses(
    [
        (
            lambda: df.SourceData(torch.zeros(4, 2), batch_size=0),
            "SourceData.batch_size must be an integer >= 1, got 0",
        ),
        (
            lambda: df.SourceData(torch.zeros(4, 2), torch.zeros(3)),
            r"SourceData.labels must be of shape \[4\]",
        ),
        (
            lambda: df.SourceData([torch.zeros(4, 2)], torch.zeros(4)),
            "SourceData.labels must be a tensor beside a tensor",
        ),
        (lambda: anything.SourceData(3), "SourceData.inputs must be a tensor"),
        (lambda: list(anything.SourceData(["x"])), "SourceData.inputs must be batches"),
        (lambda: anything.Gaussian(variance=0), "Gaussian.variance must be"),
        (lambda: anything.Gaussian(structure="dense"), "Gaussian.structure must be one of"),
        (lambda: anything.Laplace(scale="all"), "Laplace.scale must be a number or one of"),
        (lambda: anything.Laplace(precision=0.0), "Laplace.precision must be a finite number in"),
        (lambda: anything.Laplace(labels="none"), "Laplace.labels must be one of"),
        (
            lambda: anything.Laplace(curvature=df.Entropy()),
            "Laplace.curvature must be of role 'curvature'",
        ),
        (
            lambda: anything.Laplace(curvature=df.EmpiricalFisher()),
            "Laplace.curvature must be that of single samples",
        ),
        (
            lambda: anything.Laplace("low_rank", precision="marginal_likelihood"),
            "Laplace.structure must be another one",
        ),
        (lambda: anything.Laplace()(HEAD, THETA), "Laplace: data must be SourceData"),
        (
            lambda: anything.Laplace()(HEAD, THETA, df.SourceData([])),
            "Laplace: data must be one batch or more",
        ),
        (
            lambda: anything.Gaussian(structure="kronecker")(HEAD, THETA),
            "structure must be 'full', 'diagonal' or 'low_rank'",
        ),
        (lambda: df.Gaussian(taper=-1.0), "Gaussian.taper must be a finite number"),
        (
            lambda: df.Gaussian(structure="full", taper=1.0),
            "Gaussian.structure must be 'diagonal' or 'low_rank' with a taper or a relative",
        ),
        (
            lambda: df.Gaussian(taper=1.0)(HEAD, THETA),
            "Gaussian.taper or relative must be 0 and False for it, got 'a model without named",
        ),
        (
            lambda: EVIDENT(HEAD, 0 * THETA, df.SourceData(problem(3)[0])),
            "Laplace: mean must be other than 0",
        ),
        (
            lambda: replace(EVIDENT, curvature=df.NoCurvature(), labels="predicted")(
                HEAD, THETA, df.SourceData(problem(3)[0])
            ),
            "Laplace: data must be data that inform the parameters",
        ),
    ]
)


def test_point_mass_and_gaussian() -> None:
    network = df.Network(perceptron(), df.AllParameters(), statistics="source")
    mean = network.mean()
    belief = df.PointMass()(network, mean)
    close(belief.mean, mean)
    assert not belief.covariance.dense().any()
    for structure in ("full", "diagonal", "low_rank", "kronecker"):
        belief = df.Gaussian(0.25, structure)(network, mean)
        close(moments(belief), (mean, 0.25 * torch.eye(len(mean), dtype=torch.float64)))
    assert isinstance(belief.covariance, df.Blocks)
    kinds = ["Kronecker" if len(shape) == 2 else "Diagonal" for shape in network.shapes.values()]
    assert [type(part).__name__ for part in belief.covariance.parts] == kinds


@pytest.mark.parametrize("curvature", [df.GaussNewton(), df.Hessian()], ids=repr)
@pytest.mark.parametrize("labeled", [True, False])
def test_laplace_adds_the_hessian_of_every_batch(curvature: df.Curvature, labeled: bool) -> None:
    inputs, labels = problem(3)
    data = df.SourceData(inputs, labels if labeled else None, batch_size=7)
    expected = 2 * torch.eye(9, dtype=torch.float64) + hessian(inputs, labels)
    structures: Any = (("full", 9), ("diagonal", 9), ("low_rank", 9), ("low_rank", 2))
    full, diagonal, everything, small = (
        df.Laplace(structure, rank, curvature=curvature, precision=2.0)(HEAD, THETA, data)
        for structure, rank in structures
    )
    close(
        (full.mean, precision(full), precision(diagonal), precision(everything)),
        (THETA, expected, torch.diag(expected.diagonal()), expected),
    )
    assert isinstance(small.covariance, df.LowRank)
    assert len(small.covariance.factor) == 2
    close(precision(small).diagonal(), expected.diagonal())


def two_norms(affine: bool = True) -> nn.Sequential:
    """A network whose second batch norm sees what the first one's parameters do."""
    torch.manual_seed(1)
    layers = nn.Linear(2, 4), nn.BatchNorm1d(4, affine=affine), nn.Tanh(), nn.Linear(4, 4)
    model = nn.Sequential(*layers, nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        model.train()(3 + 2 * torch.randn(64, 2, dtype=torch.float64))
    return model.eval()


def gauss_newton(model: nn.Module, names: Any, batches: Any) -> Tensor:
    """Σ_i J_iᵀ (diag p_i - p_i p_iᵀ) J_i [d, d] of a module as it is, by its dense Jacobian."""
    chosen = {name: model.get_parameter(name).detach() for name in names}
    total: Tensor = torch.tensor(0.0, dtype=torch.float64)
    for batch in batches:

        def logits(own: dict[str, Tensor], batch: Tensor = batch) -> Tensor:
            found: Tensor = torch.func.functional_call(model, own, batch)
            return found

        pieces = torch.func.jacrev(logits)(chosen)
        J = torch.cat([piece.flatten(2) for piece in pieces.values()], -1)
        p = logits(chosen).softmax(-1)
        metric = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        total = total + torch.einsum("nkd,nkl,nle->de", J, metric, J)
    return total


@pytest.mark.parametrize("kind", ["batch", df.PseudoCount(8), df.Ema(0.3), "source"], ids=str)
@pytest.mark.parametrize("curvature", [df.GaussNewton(), df.Hessian()], ids=repr)
def test_laplace_is_fitted_under_the_statistics_of_the_source(kind: Any, curvature: Any) -> None:
    """Whatever the stream has: the parameters were trained for these. Of each sample alone, so that
    how the data are cut does not matter.
    """
    (inputs, labels), model = problem(3), two_norms()
    for selection in (df.NormAffine(), df.AllParameters()):
        network = df.Network(model, selection, kind)
        rule = df.Laplace("full", curvature=curvature, precision=0.5)
        found = [
            rule(network, network.mean(), df.SourceData(inputs, labels, size)) for size in (7, 20)
        ]
        expected = gauss_newton(model, network.shapes, [inputs]) + 0.5 * torch.eye(
            len(network.mean()), dtype=torch.float64
        )
        close([precision(belief) for belief in found], [expected] * 2)
        diagonal = df.Laplace(curvature=curvature, precision=0.5)(
            network, network.mean(), df.SourceData(inputs, labels, 20)
        )
        close(diagonal.covariance.precision(), expected.diagonal())


@pytest.mark.parametrize("curvature", [df.GaussNewton(), df.Hessian()], ids=repr)
def test_laplace_under_the_statistics_of_the_stream_if_asked(curvature: Any) -> None:
    """The whole Jacobian of each sample in its batch, which moves the moments of the others."""
    (inputs, labels), model = problem(3), two_norms()
    network = df.Network(model, df.AllParameters(), "batch")
    rule = df.Laplace("full", curvature=curvature, precision=0.5, statistics="stream")
    belief = rule(network, network.mean(), df.SourceData(inputs, labels, 20))
    batched = two_norms()
    for layer in batched:
        if isinstance(layer, nn.BatchNorm1d):
            layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
    eye = torch.eye(len(network.mean()), dtype=torch.float64)
    close(precision(belief), gauss_newton(batched, network.shapes, inputs.split(20)) + 0.5 * eye)
    source = gauss_newton(model, network.shapes, [inputs])
    assert not torch.allclose(precision(belief), source + 0.5 * eye, rtol=0.1)


def test_laplace_of_a_head_has_the_features_of_the_source() -> None:
    (inputs, labels), model = problem(3), two_norms()
    head, theta = build_head(df.Backbone(model, "6", statistics="batch"))
    features = torch.cat((torch.ones(len(inputs), 1).double(), model[:-1](inputs).detach()), 1)
    plain = df.LinearHead(3)
    data = df.SourceData(inputs, labels, 20)
    expected = df.Laplace("full")(plain, theta, df.SourceData(features, labels))
    close(moments(df.Laplace("full")(head, theta, data)), moments(expected))
    stream = df.Laplace("full", statistics="stream")(head, theta, data)
    assert not torch.allclose(precision(stream), precision(expected), rtol=0.1)


def test_fit_laplace_finds_the_mode_under_the_statistics_of_the_source() -> None:
    (inputs, labels), model = problem(3), two_norms()
    network, still = (df.Network(model, df.NormAffine(), kind) for kind in ("batch", "source"))
    start = network.mean()
    prior = df.Belief(start, df.Full(0.1 * torch.eye(len(start), dtype=torch.float64)))
    expected = df.fit_laplace(still, prior, inputs, labels)
    close(moments(df.fit_laplace(network, prior, inputs, labels)), moments(expected))
    stream = df.fit_laplace(network, prior, inputs, labels, statistics="stream")
    assert not torch.allclose(stream.mean, expected.mean, rtol=1e-2)
    with pytest.raises(ValueError, match="fit_laplace: statistics must be 'source' or 'stream'"):
        anything.fit_laplace(network, prior, inputs, labels, statistics="batch")


@pytest.mark.parametrize("preset", ["bacs", "petal"])
def test_presets_with_a_laplace_have_the_posterior_of_the_trained_network(preset: str) -> None:
    (inputs, labels), model = problem(3), two_norms()
    views: dict[str, Any] = (
        {"augmentation": df.GaussianNoise()} if preset == "petal" else {}
    )  # no images
    data = df.SourceData(inputs, labels, 20)
    adapter = df.adapt(model, preset, data=data, monitor=None, **views)
    names = [name for name, _ in model.named_parameters()]
    names = [name for name in names if name[0] in "14"] if preset == "bacs" else names
    start = 100.0 if preset == "bacs" else 1.0
    expected = gauss_newton(model, names, [inputs]).diagonal() + start
    close(adapter.belief.covariance.precision(), expected)


def test_many_classes_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for every sample and class would be 50 · 20 rows of 60 numbers."""
    head, inputs = df.LinearHead(20, intercept=True), problem(2)[0][:50]
    theta = torch.linspace(-1, 1, 60, dtype=torch.float64)
    whole = df.Laplace()(head, theta, df.SourceData(inputs))
    monkeypatch.setattr(source, "BUDGET", 5_000)
    with Allocations() as allocations:
        belief = df.Laplace()(head, theta, df.SourceData(inputs))
    assert allocations.largest < 50 * 20 * 60 / 2
    close(belief.covariance.variance(), whole.covariance.variance())
    network = df.Network(perceptron(), df.AllParameters())  # asked for one column at a time
    parts = df.Laplace("full")(network, network.mean(), df.SourceData(inputs, batch_size=25))
    monkeypatch.undo()
    close(
        precision(parts),
        precision(
            df.Laplace("full")(network, network.mean(), df.SourceData(inputs, batch_size=25))
        ),
    )


def test_laplace_with_the_empirical_fisher_of_each_labeling() -> None:
    inputs, labels = problem(3)
    data = df.SourceData(inputs, labels, batch_size=7)
    fisher = df.EmpiricalFisher(centered=False)
    for labeling, used in (("given", labels), ("predicted", HEAD(THETA, inputs).argmax(-1))):
        rows = gradients(inputs, used)
        belief = anything.Laplace("full", curvature=fisher, labels=labeling)(HEAD, THETA, data)
        close(precision(belief), torch.eye(9, dtype=torch.float64) + rows.mT @ rows)
    with pytest.raises(
        ValueError, match="must be 'predicted' or 'drawn' for data without labels, got 'given'"
    ):
        df.Laplace(curvature=fisher)(HEAD, THETA, df.SourceData(inputs))


def test_drawn_labels_estimate_the_fisher_information_and_replay() -> None:
    inputs, _ = problem(3)
    data = df.SourceData(inputs, batch_size=7)
    many = df.SourceData(inputs.repeat(200, 1), batch_size=3000)
    drawn = df.Laplace(
        "full", curvature=df.EmpiricalFisher(centered=False), labels="drawn", scale="mean", seed=3
    )
    torch.manual_seed(0)
    first = precision(drawn(HEAD, THETA, data))
    torch.manual_seed(1)
    assert torch.equal(precision(drawn(HEAD, THETA, data)), first)
    estimate = precision(drawn(HEAD, THETA, many)) - torch.eye(9, dtype=torch.float64)
    exact = hessian(inputs, torch.zeros(60, dtype=torch.long)) / 60
    assert (estimate - exact).abs().max() < 0.03 * exact.abs().max()  # 12,000 draws
    assert (
        first - torch.eye(9, dtype=torch.float64) - exact
    ).abs().max() > 0.03 * exact.abs().max()  # 60 draws


@pytest.mark.parametrize("structure", ["full", "diagonal", "low_rank"])
def test_scale_multiplies_the_curvature_and_not_the_prior(structure: Any) -> None:
    inputs, labels = problem(3)
    data = df.SourceData(inputs, labels, batch_size=7)
    eye = torch.eye(9, dtype=torch.float64)
    total = precision(df.Laplace(structure, rank=9, precision=0.3)(HEAD, THETA, data)) - 0.3 * eye
    for scale, factor in (("mean", 1 / 60), (1.0, 1 / 60), (600.0, 10.0)):
        belief = anything.Laplace(structure, rank=9, precision=0.3, scale=scale)(HEAD, THETA, data)
        close(precision(belief), 0.3 * eye + factor * total)


def test_eata_fisher_is_the_mean_of_squared_batch_gradients() -> None:
    """The loop of EATA's own code, on a network with batch statistics."""
    model, inputs = perceptron(), problem(3)[0]
    network = df.Network(model, df.NormAffine(), statistics="batch")
    chosen = df.Laplace(
        per="batch", labels="predicted", scale="mean", precision=1e-10, statistics="stream"
    )
    belief = chosen(network, network.mean(), df.SourceData(inputs, batch_size=20))

    reference = perceptron()
    reference[1].train()
    norms = [*reference[1].parameters(), *reference[4].parameters()]
    fisher = torch.zeros(18, dtype=torch.float64)
    for batch in inputs.split(20):
        outputs = reference(batch)
        loss = nn.functional.cross_entropy(outputs, outputs.max(1)[1])
        fisher += torch.cat([g.flatten() for g in torch.autograd.grad(loss, norms)]).square() / 3
    assert fisher.min() > 1e-8
    close(belief.covariance.precision(), fisher, 1e-9)
    per_sample = df.Laplace(
        "diagonal", curvature=df.EmpiricalFisher(centered=False), labels="predicted", scale="mean"
    )
    other = (
        per_sample(
            network, network.mean(), df.SourceData(inputs, batch_size=20)
        ).covariance.precision()
        - 1
    )
    assert other.sum() > 1.5 * fisher.sum()  # another quantity: signs cancel inside a batch


def dense_log_evidence(lam: float, curvature: Tensor, mean: Tensor, log_likelihood: float) -> float:
    """log p(D given θ) + log N(θ; 0, I/λ) - log N(θ; θ, Λ⁻¹), by torch's densities."""
    eye = torch.eye(len(mean), dtype=torch.float64)
    prior = torch.distributions.MultivariateNormal(0 * mean, precision_matrix=lam * eye)
    posterior = torch.distributions.MultivariateNormal(mean, precision_matrix=lam * eye + curvature)
    return float(log_likelihood + prior.log_prob(mean) - posterior.log_prob(mean))


@pytest.mark.parametrize("structure", ["full", "diagonal", "kronecker"])
@pytest.mark.parametrize("scale", ["sum", "mean", 600.0])
def test_prior_precision_of_greatest_evidence(structure: Any, scale: Any) -> None:
    inputs, labels = problem(3)
    network = df.Network(perceptron(), df.ByName(("3.*", "6.*")), statistics="source")
    mean, data = network.mean(), df.SourceData(inputs, labels)
    fixed = df.Laplace(structure, scale=scale)(network, mean, data)
    curvature = precision(fixed) - torch.eye(len(mean), dtype=torch.float64)
    best = minimize_scalar(
        lambda log_lam: -dense_log_evidence(np.exp(log_lam), curvature, mean, 0.0),
        bounds=(-12, 12),
        method="bounded",
        options={"xatol": 1e-10},
    )
    belief = df.Laplace(structure, scale=scale, precision="marginal_likelihood")(
        network, mean, data
    )
    found = (precision(belief) - curvature).diagonal()
    assert -11 < best.x < 11
    torch.testing.assert_close(found, torch.full_like(found, np.exp(best.x)), rtol=1e-6, atol=1e-7)
    close(belief.mean, mean)


def test_log_evidence_against_quadrature() -> None:
    """Two parameters, 300 samples: the integral of the likelihood under the prior, up to Laplace's
    O(1/n).
    """
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(300, 2, generator=generator, dtype=torch.float64)
    chance = torch.sigmoid(inputs @ torch.tensor([1.0, -0.5], dtype=torch.float64))
    labels = (torch.rand(300, generator=generator, dtype=torch.float64) < chance).long()
    head, lam = df.LinearHead(2), 0.7
    prior = df.Belief(
        torch.zeros(2, dtype=torch.float64), df.Full(torch.eye(2, dtype=torch.float64) / lam)
    )
    mode = df.fit_laplace(head, prior, inputs, labels).mean
    belief = df.Laplace("full", precision=lam)(head, mode, df.SourceData(inputs, labels))

    def log_likelihood(theta: Tensor) -> float:
        return -nn.functional.cross_entropy(head(theta, inputs), labels, reduction="sum").item()

    peak = log_likelihood(mode)

    def joint(y: float, x: float) -> float:
        theta = torch.tensor([x, y], dtype=torch.float64)
        return (
            float(np.exp(log_likelihood(theta) - peak - 0.5 * lam * float(theta @ theta)))
            * lam
            / (2 * np.pi)
        )

    reach = 7 * belief.covariance.variance().sqrt()
    (left, bottom), (right, top) = (mode - reach).tolist(), (mode + reach).tolist()
    integral, _ = dblquad(joint, left, right, bottom, top, epsabs=0, epsrel=1e-4)
    curvature = precision(belief) - lam * torch.eye(2, dtype=torch.float64)
    assert dense_log_evidence(lam, curvature, mode, peak) == pytest.approx(
        np.log(integral) + peak, abs=0.01
    )


EVIDENCE = "marginal_likelihood"


@pytest.mark.parametrize(
    ("structure", "precision"),
    [
        ("full", 0.5),
        ("diagonal", 0.5),
        ("low_rank", 0.5),
        ("kronecker", 0.5),
        ("full", EVIDENCE),
        ("kronecker", EVIDENCE),
    ],
)
def test_float32_follows_float64_and_the_model_stays(structure: Any, precision: Any) -> None:
    model = perceptron()
    before = [value.clone() for value in model.state_dict().values()]
    inputs, labels = problem(3)
    results = []
    for dtype in (torch.float64, torch.float32):
        network = df.Network(model.to(dtype), df.ByName(("1.*", "3.*")), statistics="source")
        chosen = df.Laplace(structure, rank=3, precision=precision)
        belief = chosen(
            network, network.mean(), df.SourceData(inputs.to(dtype), labels, batch_size=7)
        )
        assert belief.mean.dtype == belief.covariance.dtype == dtype
        results.append(belief.covariance.dense().double())
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    for value, old in zip(model.state_dict().values(), before, strict=True):
        assert torch.equal(value, old.to(value.dtype))


@pytest.mark.parametrize("structure", ["full", "low_rank", "kronecker", "diagonal"])
def test_marginal_over_the_adapted_subset_is_the_block_of_the_covariance(structure: Any) -> None:
    inputs, labels = problem(3)
    model, data = perceptron(), df.SourceData(inputs, labels, batch_size=20)
    wide = df.Network(model, df.AllParameters(), statistics="source")
    narrow = df.Network(model, df.ByName(("1.bias", "3.weight", "4.*")), statistics="source")
    whole = df.Laplace(structure, rank=6, precision=0.5)(wide, wide.mean(), data)
    marginal = df.marginal_source(wide, narrow, whole)
    kept = torch.tensor([name in narrow.shapes for name in wide.shapes]).repeat_interleave(
        torch.tensor(wide.sizes)
    )
    dense = whole.covariance.dense()
    close(moments(marginal), (narrow.mean(), dense[kept][:, kept]))
    conditional = torch.linalg.inv(torch.linalg.inv(dense)[kept][:, kept])
    if structure in ("full", "low_rank"):
        fitted = df.Laplace("full", precision=0.5)(narrow, narrow.mean(), data).covariance.dense()
        if structure == "full":
            close(fitted, conditional)  # a fit on the subset takes the others as known
        assert (marginal.covariance.variance() > 1.01 * conditional.diagonal()).any()
        assert (marginal.covariance.variance() >= (1 - 1e-9) * conditional.diagonal()).all()
    else:
        close(marginal.covariance.dense(), conditional)  # blocks are independent of each other
    with pytest.raises(
        ValueError, match="marginal_source: network must be with parameters of wide"
    ):
        df.marginal_source(narrow, wide, marginal)


def test_batches_by_name_and_batches_of_one() -> None:
    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = torch.nn.LayerNorm(4), torch.nn.Linear(4, 3)

        def forward(self, values: Tensor) -> Tensor:
            return self.head(self.norm(values))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    network, values, labels = (
        df.Network(Named().double()),
        torch.randn(6, 4, dtype=torch.float64),
        torch.arange(6) % 3,
    )
    laplace = df.Laplace(curvature=df.EmpiricalFisher(centered=False), scale="mean")
    expected = laplace(network, network.mean(), df.SourceData(values, labels)).covariance.variance()
    named = df.SourceData(
        [
            ({"values": half}, own)
            for half, own in zip(values.split(3), labels.split(3), strict=True)
        ]
    )
    torch.testing.assert_close(
        laplace(network, network.mean(), named).covariance.variance(), expected
    )
    loader = [[half] for half in values.split(3)]  # as a data loader without labels gives
    fisher = df.Laplace()(network, network.mean(), df.SourceData(values)).covariance.variance()
    torch.testing.assert_close(
        df.Laplace()(network, network.mean(), df.SourceData(loader)).covariance.variance(), fisher
    )


def test_a_taper_gives_deeper_layers_less_variance() -> None:
    layers = [
        nn.Linear(4, 5),
        nn.BatchNorm1d(5),
        nn.ReLU(),
        nn.Linear(5, 3),
        nn.LayerNorm(3),
        nn.Linear(3, 2),
    ]
    network = df.Network(nn.Sequential(*layers).double().eval(), df.AllParameters())
    belief = df.Gaussian(0.3, taper=2.0)(network, network.mean())
    sizes = [25, 10, 18, 6, 8]  # numbers in each layer that has some, weight and bias
    expected = torch.cat(
        [
            torch.full((size,), 0.3 * (1 - place / 5) ** 2, dtype=torch.float64)
            for place, size in enumerate(sizes)
        ]
    )
    close(belief.covariance.variance(), expected)
    close(
        df.Gaussian(0.3)(network, network.mean()).covariance.variance(),
        torch.full((67,), 0.3, dtype=torch.float64),
    )


def test_a_relative_variance_is_one_of_the_size_of_each_layer() -> None:
    torch.manual_seed(0)
    norms = (nn.LayerNorm(5), nn.GroupNorm(1, 5), nn.BatchNorm1d(5))
    parameters = [parameter for norm in norms for parameter in norm.parameters()]
    for parameter, value in zip(parameters, (0.5, -1.0, 3.0, 0.3, 0.0, 0.0), strict=True):
        nn.init.constant_(parameter, value)
    model = nn.Sequential(nn.Linear(4, 5), *norms, nn.Linear(5, 2)).double().eval()
    network = df.Network(model, df.NormAffine())
    sizes = [1.0, 9.0, 0.0]  # the bias of the first is the larger one
    least = sum(sizes) / 3 / 100
    expected = [0.3 * max(size, least) * (1 - at / 3) ** 2 for at, size in enumerate(sizes)]
    each = torch.tensor(expected, dtype=torch.float64).repeat_interleave(10)
    for structure in ("diagonal", "low_rank"):
        source = df.Gaussian(0.3, structure, taper=2.0, relative=True)
        close(source(network, network.mean()).covariance.dense(), torch.diag(each))
    for parameter in parameters:
        nn.init.zeros_(parameter)
    network = df.Network(model, df.NormAffine())
    belief = df.Gaussian(0.3, relative=True)(network, network.mean())
    close(belief.covariance.variance(), torch.full((30,), 0.3, dtype=torch.float64))

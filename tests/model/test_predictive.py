"""Predictive models: logits and both directions of their Jacobian against loops of autograd and
finite differences.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from driftfilter.gaussian.diagonal import Diagonal
from driftfilter.gaussian.full import Full
from driftfilter.model.predictive import (
    Lifted,
    LinearHead,
    PredictiveModel,
    ReadOut,
    lift,
    logit_covariance,
)
from small import assert_same, normal, refuses

K, D = 3, 4


def linear(theta: Tensor, inputs: Tensor, classes: int = K, intercept: bool = False) -> Tensor:
    """f_c = φ·W_c written with loops; class 0 is fixed at 0 where θ has no row for it."""
    rows = []
    for x in inputs:
        features = [torch.ones((), dtype=theta.dtype), *x] if intercept else list(x)
        count = len(theta) // len(features)
        logits = [torch.zeros((), dtype=theta.dtype)] * (classes - count)
        for c in range(count):
            weights = theta[c * len(features) : (c + 1) * len(features)]
            logits.append(
                sum(
                    (w * phi for w, phi in zip(weights, features, strict=True)),
                    torch.zeros((), dtype=theta.dtype),
                )
            )
        rows.append(torch.stack(logits))
    return torch.stack(rows)


def network(theta: Tensor, inputs: Tensor) -> Tensor:
    """A 4-3-3 network; the last three parameters are not used."""
    hidden = torch.tanh(inputs @ theta[:12].view(4, 3) + theta[12:15])
    return hidden @ theta[15:24].view(3, 3) + theta[24:27].sin()


MATRIX = normal(27, 30, seed=9) / 5
CASES: dict[str, tuple[PredictiveModel, Callable[[Tensor, Tensor], Tensor], int]] = {
    "every class a row": (LinearHead(K), linear, K * D),
    "class 0 fixed": (LinearHead(K), linear, (K - 1) * D),
    "logistic": (LinearHead(2), lambda t, x: linear(t, x, 2), D),
    "intercept": (LinearHead(K, intercept=True), lambda t, x: linear(t, x, K, True), K * (D + 1)),
    "intercept, class 0 fixed": (
        LinearHead(K, intercept=True),
        lambda t, x: linear(t, x, K, True),
        (K - 1) * (D + 1),
    ),
    "lifted linear": (Lifted(linear), linear, K * D),
    "lifted network": (Lifted(network), network, 30),
    "read-out of a head": (
        ReadOut(LinearHead(K), MATRIX[:12]),
        lambda t, x: linear(MATRIX[:12] @ t, x),
        30,
    ),
    "read-out of a network": (
        ReadOut(Lifted(network), MATRIX),
        lambda t, x: network(MATRIX @ t, x),
        30,
    ),
}
every_model = pytest.mark.parametrize(("model", "function", "d"), CASES.values(), ids=CASES.keys())
batches = pytest.mark.parametrize("n", [1, 5])


def jacobian(function: Callable[[Tensor, Tensor], Tensor], theta: Tensor, inputs: Tensor) -> Tensor:
    """[n, k, d], one backward pass a number."""
    leaf = theta.clone().requires_grad_()
    logits = function(leaf, inputs)
    rows = [
        torch.autograd.grad(value, leaf, retain_graph=True, materialize_grads=True)[0]
        for value in logits.flatten()
    ]
    return torch.stack(rows).reshape(*logits.shape, len(theta))


def assert_near(mine: Any, exact: Any) -> None:
    torch.testing.assert_close(mine, exact, rtol=1e-12, atol=1e-13)


# ------------------------------------------------------------------ every model


@every_model
@batches
@pytest.mark.parametrize("recording", [True, False])
def test_logits_and_pullback(model: Any, function: Any, d: int, n: int, recording: bool) -> None:
    theta, inputs = normal(d, seed=1), normal(n, D, seed=2)
    exact = jacobian(function, theta, inputs)
    k = exact.shape[1]
    with torch.set_grad_enabled(recording):
        logits, pullback = model.pullback(theta, inputs)
        assert_near((logits, model(theta, inputs)), (function(theta, inputs),) * 2)
        for shape in ((n, k), (3, n, k), (2, 3, n, k)):
            cotangents = normal(*shape, seed=3)
            rows = pullback(cotangents)
            assert rows.shape == (*shape[:-1], d)
            assert_near(rows, torch.einsum("...nk,nkd->...nd", cotangents, exact))
        assert_near(
            pullback.total(cotangents[0, 0]), torch.einsum("nk,nkd->d", cotangents[0, 0], exact)
        )
        assert torch.is_grad_enabled() == recording
    results = logits, rows, pullback.total(cotangents[0, 0])
    assert not any(result.requires_grad for result in results)


@every_model
@batches
@pytest.mark.parametrize("recording", [True, False])
def test_pushforward(model: Any, function: Any, d: int, n: int, recording: bool) -> None:
    theta, inputs, tangents, h = normal(d, seed=1), normal(n, D, seed=2), normal(6, d, seed=3), 1e-3
    with torch.set_grad_enabled(recording):
        pushed = model.pushforward(theta, inputs, tangents)
        assert torch.is_grad_enabled() == recording
    assert_near(pushed, torch.einsum("nkd,sd->snk", jacobian(function, theta, inputs), tangents))
    for moved, tangent in zip(
        pushed, tangents, strict=True
    ):  # and central differences, error O(h⁴)
        ahead = [function(theta + step * h * tangent, inputs) for step in (-2, -1, 1, 2)]
        slope = (ahead[0] - 8 * ahead[1] + 8 * ahead[2] - ahead[3]) / (12 * h)
        torch.testing.assert_close(moved, slope, rtol=1e-8, atol=1e-9)


@every_model
def test_arguments_stay_as_they_were(model: Any, function: Any, d: int) -> None:
    theta, inputs = normal(d, seed=1), normal(5, D, seed=2)
    before = theta.clone(), inputs.clone()
    _, pullback = model.pullback(theta, inputs)
    cotangents = normal(5, model(theta, inputs).shape[1])
    kept, first = cotangents.clone(), pullback(cotangents)
    pullback.total(cotangents)
    model.pushforward(theta, inputs, normal(2, d))
    assert torch.equal(pullback(cotangents), first)  # a pullback can be used again
    assert_same((cotangents, theta, inputs), (kept, *before))
    assert not theta.requires_grad
    assert theta.grad is None
    assert not inputs.requires_grad


@every_model
@pytest.mark.parametrize("structure", ["full", "diagonal"])
def test_logit_covariance(model: Any, function: Any, d: int, structure: str) -> None:
    theta, inputs, root = normal(d, seed=1), normal(5, D, seed=2), normal(d, d, seed=4)
    matrix = (
        root @ root.mT + torch.eye(d) if structure == "full" else torch.diag(root[0].square() + 0.1)
    )
    covariance = Full(matrix) if structure == "full" else Diagonal(matrix.diagonal())
    exact = torch.einsum("nkd,de,nle->nkl", *(j := jacobian(function, theta, inputs), matrix, j))
    torch.testing.assert_close(
        logit_covariance(covariance, *model.pullback(theta, inputs)), exact, rtol=1e-11, atol=1e-11
    )


def test_linear_says_whether_the_jacobian_depends_on_theta() -> None:
    for model, function, d in CASES.values():
        inputs = normal(3, D, seed=2)
        constant = torch.allclose(
            jacobian(function, normal(d, seed=1), inputs),
            jacobian(function, normal(d, seed=5), inputs),
        )
        assert not model.linear or constant
        assert model.linear == isinstance(getattr(model, "model", model), LinearHead)


# ------------------------------------------------------------------ the linear head


@pytest.mark.parametrize("rows", [K, K - 1])
@pytest.mark.parametrize("intercept", [True, False])
def test_a_head_is_the_lifted_function_of_itself(rows: int, intercept: bool) -> None:
    head = LinearHead(K, intercept)
    lifted, theta, inputs = Lifted(head), normal(rows * (D + intercept)), normal(5, D, seed=1)
    (logits, pullback), (same, other) = head.pullback(theta, inputs), lifted.pullback(theta, inputs)
    cotangents, tangents = normal(2, 5, K, seed=2), normal(4, len(theta))
    assert_near(
        (logits, pullback(cotangents), head.pushforward(theta, inputs, tangents)),
        (same, other(cotangents), lifted.pushforward(theta, inputs, tangents)),
    )


def test_two_classes_with_one_row_are_logistic_regression() -> None:
    theta, inputs = normal(D), normal(6, D, seed=1)
    assert_near(LinearHead(2)(theta, inputs).softmax(-1)[:, 1], torch.sigmoid(inputs @ theta))


def test_an_intercept_alone_is_a_model() -> None:
    assert torch.equal(
        LinearHead(3, intercept=True)(torch.tensor([1.0, 2.0, 3.0]), torch.zeros(2, 0)),
        torch.tensor([[1.0, 2.0, 3.0]] * 2),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8])
def test_inputs_take_the_type_of_the_parameters(dtype: torch.dtype) -> None:
    inputs = torch.tensor([[1, 2], [3, 0]], dtype=dtype)
    for theta in (torch.tensor([0.5, -1.0]), torch.tensor([0.5, -1.0], dtype=torch.float64)):
        assert torch.equal(
            LinearHead(2)(theta, inputs), torch.tensor([[0.0, -1.5], [0.0, 1.5]], dtype=theta.dtype)
        )


test_refusals_say_what_is_wrong = refuses(
    [
        (lambda: LinearHead(0), "LinearHead.classes must be an integer >= 1, got 0"),
        (lambda: LinearHead(2.0), "LinearHead.classes must be an integer >= 1, got 2.0"),  # type: ignore[arg-type]
        (lambda: LinearHead(2, "yes"), "LinearHead.intercept must be True or False, got 'yes'"),  # type: ignore[arg-type]
        (
            lambda: LinearHead(3)(normal(6), normal(4)),
            r"inputs must be of shape \[n, features\], got shape \[4\]",
        ),
        (
            lambda: LinearHead(3)(normal(6), normal(2, 2, 2)),
            r"inputs must be of shape \[n, features\], got shape \[2, 2, 2\]",
        ),
        (
            lambda: LinearHead(3).pullback(normal(7), normal(5, 2)),
            "the belief must be over 4 or 6 parameters for 3 classes and 2 features, got 7",
        ),
        (
            lambda: LinearHead(3, intercept=True)(normal(6), normal(5, 1)[:, :0]),
            "the belief must be over 2 or 3 parameters for 3 classes and 1 features, got 6",
        ),
        (
            lambda: lift(LinearHead),  # type: ignore[arg-type]
            "Filter.logits must be a function .* or a PredictiveModel, got <class",
        ),
        (lambda: lift(3), "Filter.logits must be a function .* or a PredictiveModel, got 3"),  # type: ignore[arg-type]
        (
            lambda: Lifted(lambda t, x: x @ t[:4])(normal(4), normal(5, 4)),
            r"logits must be .* \[n, k\], for n = 5, got shape \[5\]",
        ),
        (
            lambda: Lifted(lambda t, x: x[:2] * t)(normal(4), normal(5, 4)),
            r"logits must be .* for n = 5, got shape \[2, 4\]",
        ),
        (
            lambda: Lifted(lambda t, x: x @ t).pullback(normal(4), normal(5, 4)),
            r"logits must be .* for n = 1, got shape \[1\]",
        ),
        (
            lambda: Lifted(lambda t, x: [0.0])(normal(4), normal(5, 4)),  # type: ignore[arg-type,return-value]
            "logits must be a tensor of shape .*, got list",
        ),
    ]
)


# ------------------------------------------------------------------ lifted functions


def test_lift_leaves_models_alone() -> None:
    head = LinearHead(2)
    assert lift(head) is head
    assert lift(network) == Lifted(network)


LAYER = torch.nn.Linear(D, K, dtype=torch.float64)  # has a gradient, but none in θ


@batches
@pytest.mark.parametrize(
    "function",
    [
        lambda t, x: x[:, :K],
        lambda t, x: LAYER(x),
        lambda t, x: network(t.detach(), x),
        torch.no_grad()(network),
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        lambda pullback, c: pullback(c),
        lambda pullback, c: pullback(c[None]),
        lambda pullback, c: pullback.total(c),
    ],
)
def test_logits_without_a_gradient_are_refused(n: int, function: Any, use: Any) -> None:
    message = "the model's logits must be differentiable in theta, got logits without a gradient"
    with torch.no_grad():
        _, pullback = Lifted(function).pullback(normal(30), normal(n, D))
        with pytest.raises(ValueError, match=message):
            use(pullback, normal(n, K))
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        _, pullback = Lifted(network).pullback(normal(30), normal(n, D))
        with pytest.raises(ValueError, match=message):
            use(pullback, normal(n, K))


def test_inputs_of_any_shape_and_type_go_to_the_function() -> None:
    words = torch.tensor([[0, 2, 2], [1, 1, 3]])  # indices into an embedding that is θ
    model, theta = Lifted(lambda t, x: t.view(4, 2)[x].sum(1).tanh()), normal(8)
    logits, pullback = model.pullback(theta, words)
    assert_near(logits, torch.stack([theta.view(4, 2)[row].sum(0).tanh() for row in words]))
    assert_near(
        pullback(normal(2, 2)),
        torch.einsum("nk,nkd->nd", normal(2, 2), jacobian(model.function, theta, words)),
    )
    images = normal(3, 2, 5, 5, seed=1)
    convolve = Lifted(
        lambda t, x: torch.nn.functional.conv2d(x, t.view(4, 2, 3, 3)).square().mean((2, 3))
    )
    exact = torch.cat([jacobian(convolve.function, normal(72), image[None]) for image in images])
    assert_near(
        convolve.pullback(normal(72), images)[1](normal(3, 4)),
        torch.einsum("nk,nkd->nd", normal(3, 4), exact),
    )


@pytest.mark.parametrize("belief", [torch.float32, torch.float64])
@pytest.mark.parametrize("data", [torch.float32, torch.float64])
def test_logits_come_in_the_type_of_the_parameters(belief: torch.dtype, data: torch.dtype) -> None:
    model = Lifted(lambda t, x: torch.stack((x[:, 0] * t[0], x[:, 1] * t[1]), -1))
    theta, inputs = torch.tensor([1.0, 2.0], dtype=belief), torch.ones(3, 2, dtype=data)
    logits, pullback = model.pullback(theta, inputs)
    results = (
        logits,
        model(theta, inputs),
        pullback(logits),
        pullback.total(logits),
        model.pushforward(theta, inputs, theta[None]),
    )
    assert {result.dtype for result in results} == {belief}

"""Frozen features: the head found from the graph, features against the module cut by hand, models
on top of them.
"""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import driftfilter as df
from driftfilter.networks.features import Backbone, OnFeatures, build_head, find_head
from small import assert_same, normal, refuses


class Convnet(nn.Module):
    """A small convnet whose head is registered first and whose last registered linear layer is
    inside.
    """

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3, bias=bias)
        self.stem, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.inner, self.drop = nn.Linear(4, 5), nn.Dropout(0.5)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def features(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.stem(inputs))).mean((2, 3))
        return torch.tanh(self.drop(self.inner(hidden)))

    def forward(self, inputs: Tensor) -> Any:
        self.calls += 1
        return self.head(self.features(inputs))


class Around(nn.Module):
    """A network with something after it."""

    def __init__(self, inner: nn.Module, after: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.after = inner, after

    def forward(self, inputs: Tensor) -> Any:
        return self.after(self.inner(inputs))


class Two(nn.Module):
    """Two inputs, called by keyword inside."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 3), nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, left: Tensor, right: Tensor, scale: float = 1.0) -> Any:
        return self.head(input=torch.tanh(self.left(left) + scale * self.right(right)))


def convnet(bias: bool = True) -> tuple[Convnet, Tensor]:
    torch.manual_seed(0)
    model = Convnet(bias).double().train()
    model(normal(16, 2, 6, 6, seed=1))  # running statistics that are not the initial ones
    return model, normal(6, 2, 6, 6)


def fingerprint(model: nn.Module) -> list[Any]:
    flags = [(parameter.requires_grad, parameter.grad is None) for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    hooks = [
        (len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()
    ]
    return [flags, modes, hooks, [value.tolist() for value in model.state_dict().values()]]


class Counting:
    """A backbone that counts its calls."""

    def __init__(self, backbone: Callable[[Any], Tensor]) -> None:
        self.backbone, self.calls = backbone, 0

    def __call__(self, inputs: Any) -> Tensor:
        self.calls += 1
        return self.backbone(inputs)


def parametrized() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 3), nn.Tanh(), parametrizations.weight_norm(nn.Linear(3, 2))
    ).double()


FOUND: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "registered first": (lambda: convnet()[0], normal(2, 2, 6, 6), "head"),
    "without bias": (lambda: convnet(False)[0], normal(2, 2, 6, 6), "head"),
    "the module itself": (lambda: nn.Linear(4, 2).double(), normal(2, 4), ""),
    "with something after it": (
        lambda: Around(convnet()[0], lambda f: (f / 2).log_softmax(-1)),
        normal(2, 2, 6, 6),
        "inner.head",
    ),
    "weight norm": (parametrized, normal(2, 4), "2"),
    "positional arguments": (lambda: Two().double(), (normal(2, 4), normal(2, 2)), "head"),
    "keyword arguments": (
        lambda: Two().double(),
        {"right": normal(2, 2), "left": normal(2, 4), "scale": 0.5},
        "head",
    ),
    "under inference tensors": (lambda: convnet()[0], normal(2, 2, 6, 6), "head"),
}


@pytest.mark.parametrize("case", FOUND)
def test_the_head_is_found_and_the_model_left_as_it_was(case: str) -> None:
    build, inputs, name = FOUND[case]
    model = build()
    before = fingerprint(model)
    with torch.inference_mode("inference" in case):
        assert find_head(model, inputs.clone() if "inference" in case else inputs) == name
    assert fingerprint(model) == before


def test_a_frozen_model_has_a_head_too() -> None:
    model, inputs = convnet()
    model.requires_grad_(False)
    assert find_head(model, inputs) == "head"
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_the_output_function_picks_the_logits() -> None:
    model, inputs = convnet()
    wrapped = Around(model, lambda logits: {"logits": logits})

    def pick(result: dict[str, Tensor]) -> Tensor:
        return result["logits"]

    assert find_head(wrapped, inputs, pick) == "inner.head"
    torch.testing.assert_close(
        Backbone(wrapped, "inner.head", pick)(inputs), model.eval().features(inputs)
    )
    assert find_head(wrapped, inputs) == "inner.head"  # "logits" is found without being told
    other = Around(model, lambda logits: {"scores": logits})
    with pytest.raises(ValueError, match=r"must return logits.*got a dict with keys \['scores'\]"):
        find_head(other, inputs)


def test_no_head_is_an_error_that_lists_the_linear_layers() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 6), nn.Flatten())
    with pytest.raises(ValueError, match=r"linear layer.*its linear layers are \[\]"):
        find_head(model, torch.zeros(2, 2, 6, 6))
    cut = Around(convnet()[0], lambda logits: logits.detach())
    with pytest.raises(ValueError, match=r"its linear layers are \['inner.head', 'inner.inner'\]"):
        find_head(cut, normal(2, 2, 6, 6))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_features_are_what_enters_the_head(bias: bool) -> None:
    model, inputs = convnet(bias)
    before, backbone = fingerprint(model), Backbone(model, "head")
    features = backbone(inputs.requires_grad_())
    assert fingerprint(model) == before
    assert not features.requires_grad
    assert torch.equal(features, model.eval().features(inputs.detach()))
    logits = features @ backbone.weight.mT + (0 if backbone.bias is None else backbone.bias)
    torch.testing.assert_close(logits, model(inputs.detach()), rtol=1e-13, atol=1e-13)
    assert (backbone.bias is None) is not bias


@pytest.mark.parametrize("form", ["tuple", "list", "mapping"])
def test_several_inputs(form: str) -> None:
    model, left, right = Two().double(), normal(5, 4), normal(5, 2, seed=1)
    forms: dict[str, Any] = {
        "tuple": (left, right),
        "list": [left, right],
        "mapping": {"right": right, "left": left},
    }
    expected = torch.tanh(model.left(left) + model.right(right)).detach()
    assert torch.equal(Backbone(model, "head")(forms[form]), expected)


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "temperature": (lambda f: f / 2, "nothing may follow the head"),
    "log-softmax": (lambda f: f.log_softmax(-1), "nothing may follow the head"),
    "fewer classes": (lambda f: f[:, :2], r"got 'logits of shape \[6, 2\]'"),
    "not a matrix": (lambda f: f.sum(-1), r"logits must be of shape \[6, k\], got shape \[6\]"),
}


def ask_around(after: Callable[[Tensor], Tensor]) -> None:
    model, inputs = convnet()
    Backbone(Around(model, after), "inner.head")(inputs)


test_a_head_with_something_after_it_is_refused = refuses(REFUSED.values(), ask_around)


def test_tokens_wrong_names_and_unused_heads_are_refused() -> None:
    model, inputs = convnet()
    tokens = Around(nn.Linear(4, 3).double(), lambda f: f.mean(1))
    with pytest.raises(ValueError, match=r"shape \[n, D\].*got 'shape \[2, 7, 4\]'"):
        Backbone(tokens, "inner")(normal(2, 7, 4))
    with pytest.raises(
        ValueError, match=r"Backbone: head must be .* one of \['head', 'inner'\], got 'haed'"
    ):
        Backbone(model, "haed")
    model.spare = nn.Linear(5, 3).double()
    with pytest.raises(ValueError, match="used once a forward pass, not 0 times"):
        Backbone(model, "spare")(inputs)


def test_threads_do_not_disturb_each_other() -> None:
    model, _ = convnet()
    backbone = Backbone(model, "head")
    batches = [normal(4, 2, 6, 6, seed=seed) for seed in range(8)]
    expected = [model.eval().features(batch).detach() for batch in batches]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda batch: [backbone(batch) for _ in range(20)], batches))
    assert_same(found, [[want] * 20 for want in expected])


def test_a_step_runs_the_backbone_once() -> None:
    model, _ = convnet()
    counting = Counting(Backbone(model, "head"))
    _, start = build_head(Backbone(model, "head"))
    on_features = OnFeatures(counting, df.LinearHead(3, intercept=True))
    filt = df.Filter(
        on_features,
        inference=df.Variational(df.Hessian(), samples=0),
        prediction=df.LinearizedGaussian(),
    )
    state = filt.init(df.Belief(start, df.Diagonal(torch.full_like(start, 0.1))))
    for step in range(3):
        state, _, _ = filt.step(state, normal(6, 2, 6, 6, seed=step))
        assert counting.calls == step + 1


def test_features_are_worked_out_again_when_the_inputs_change() -> None:
    model, inputs = convnet()
    counting = Counting(Backbone(model, "head"))
    on_features = OnFeatures(counting, df.LinearHead(3))
    first = on_features.features(inputs)
    assert on_features.features(inputs) is first
    inputs.mul_(2)
    assert torch.equal(on_features.features(inputs), model.eval().features(inputs))
    assert counting.calls == 2
    assert torch.equal(on_features.features(inputs.clone()), on_features.features(inputs))
    assert counting.calls == 3


def test_kept_features_belong_to_their_arguments() -> None:
    counting = Counting(
        lambda inputs: inputs["left"] - inputs["right"] if isinstance(inputs, dict) else inputs[0]
    )
    on_features = OnFeatures(counting, df.LinearHead(2))
    one, two = normal(3, 4), normal(3, 4, seed=1)
    forward = on_features.features({"left": one, "right": two})
    assert torch.equal(on_features.features({"right": one, "left": two}), -forward)
    assert on_features.features({"left": one, "right": two}) is forward
    assert_same((on_features.features((one, two)), on_features.features((one,))), (one, one))
    assert counting.calls == 4


@pytest.mark.slow
def test_stale_inputs_are_not_kept_alive() -> None:
    on_features = OnFeatures(Counting(lambda inputs: inputs * 2), df.LinearHead(2))
    inputs = normal(3, 4)
    alive = weakref.ref(inputs)
    on_features.features(inputs)
    del inputs
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_the_head_on_features_is_the_network(bias: bool) -> None:
    """Logits and both directions of the Jacobian at the source head, against autograd through the
    whole module.
    """
    model, inputs = convnet(bias)
    on_features, start = build_head(Backbone(model, "head"))
    logits, pull = on_features.pullback(start, inputs)
    torch.testing.assert_close(
        (logits, on_features(start, inputs)), (model.eval()(inputs).detach(), logits)
    )
    assert on_features.linear
    cotangents = normal(6, 3, seed=2)
    parameters = [model.head.bias, model.head.weight] if bias else [model.head.weight]
    gradients = torch.autograd.grad(model(inputs), parameters, cotangents)
    expected = torch.cat([gradient.reshape(3, -1) for gradient in gradients], 1).flatten()
    torch.testing.assert_close(
        (pull.total(cotangents), pull(cotangents).sum(0)), (expected, expected)
    )
    tangents = normal(2, len(start), seed=3)
    pushed = on_features.pushforward(start, inputs, tangents)
    torch.testing.assert_close((pushed * cotangents).sum((1, 2)), tangents @ expected)


def test_a_filter_on_raw_inputs_is_the_filter_on_features() -> None:
    model, _ = convnet()
    backbone = Backbone(model, "head")
    on_features, start = build_head(backbone)
    belief = df.Belief(start, df.Full(0.1 * torch.eye(len(start), dtype=torch.float64)))
    batches = [normal(6, 2, 6, 6, seed=step) for step in range(3)]
    raw = df.Filter(on_features, inference=df.Linearized(df.Hessian()))
    plain = df.Filter(df.LinearHead(3, intercept=True), inference=df.Linearized(df.Hessian()))
    state, outputs = raw.run(raw.init(belief), batches)
    other, expected = plain.run(plain.init(belief), [backbone(batch) for batch in batches])
    assert_same(
        (state.belief.mean, state.belief.covariance.dense(), outputs.log_probabilities),
        (other.belief.mean, other.belief.covariance.dense(), expected.log_probabilities),
    )
    assert not torch.equal(state.belief.mean, start)


def test_copies_and_pickles_work() -> None:
    model, inputs = convnet()
    on_features, start = build_head(Backbone(model, "head"))
    expected = on_features(start, inputs)
    assert torch.equal(copy.deepcopy(on_features)(start, inputs), expected)
    assert torch.equal(pickle.loads(pickle.dumps(on_features))(start, inputs), expected)

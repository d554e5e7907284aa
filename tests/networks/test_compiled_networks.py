"""adapt(compile=…): frozen parts of a network through torch.compile, with the results of the
network as it is.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.networks.network import Network
from driftfilter.networks.shared_copy import frozen_parts

BACKEND = "aot_eager"  # needs no compiler of C++
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # torch's own, while it compiles


class Perceptron(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        return out


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), Perceptron(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mix(self.norm(x))
        return out


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8),
        Block(8),
        nn.ModuleList([Block(8)])[0],
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)),
    ).eval()


def stream() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 6, generator=generator) for _ in range(4)]


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("preset", ["tent", "driftfilter", "opgd"])
def test_results_are_those_of_the_model_as_it_is(preset: str) -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    plain, compiled = df.adapt(model, preset), df.adapt(model, preset, compile=BACKEND)
    for batch in stream():
        torch.testing.assert_close(compiled(batch), plain(batch), rtol=1e-4, atol=1e-5)
    assert graphs() > 0
    torch.testing.assert_close(
        compiled.state.belief.mean, plain.state.belief.mean, rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        compiled.state.belief.covariance.dense(),
        plain.state.belief.covariance.dense(),
        rtol=1e-4,
        atol=1e-6,
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(getattr(module, "_compiled_call_impl", None) for module in model.modules())


def test_the_largest_parts_without_adapted_layers_are_compiled() -> None:
    model = network()
    first, second, head = model.get_submodule("1.mix"), model.get_submodule("2.mix"), model[3]
    assert frozen_parts(model, {"1.norm.weight", "2.norm.bias"}) == [first, second, head]
    assert frozen_parts(model, {"1.norm.weight", "3.0.weight"}) == [first, model[2]]
    hooked = network()
    hooked.get_submodule("3.1").register_forward_hook(lambda *_: None)
    assert frozen_parts(hooked, {"1.norm.weight", "2.norm.bias"}) == [
        hooked.get_submodule("1.mix"),
        hooked.get_submodule("2.mix"),
    ]
    normed = nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Sequential(nn.ReLU(), nn.Linear(4, 2))
    )
    assert frozen_parts(normed, set()) == [normed[1]]


def test_jacobian_vector_products_and_rows_of_any_parameter_are_not_compiled() -> None:
    model = network()
    plain = df.adapt(model, "driftfilter", prediction=df.LinearizedGaussian(4))
    compiled = df.adapt(model, "driftfilter", prediction=df.LinearizedGaussian(4), compile=BACKEND)
    for batch in stream()[:2]:
        torch.testing.assert_close(compiled(batch), plain(batch), rtol=1e-4, atol=1e-5)
    inner = Network(model, df.ByName(("1.norm.*",)), "source")
    rows = inner.sample_rows(
        inner.mean(), stream()[0], inner(inner.mean(), stream()[0]), torch.ones(16, 3), []
    )
    assert inner.compile(BACKEND)
    torch.testing.assert_close(
        inner.sample_rows(
            inner.mean(), stream()[0], inner(inner.mean(), stream()[0]), torch.ones(16, 3), []
        ),
        rows,
    )


def test_an_adapter_that_compiles_can_be_copied_and_pickled() -> None:
    adapter = df.adapt(network(), compile=BACKEND)
    expected = [adapter(batch) for batch in stream()][-1]
    for other in (copy.deepcopy(adapter), pickle.loads(pickle.dumps(adapter))):
        other.reset()
        torch.testing.assert_close(
            [other(batch) for batch in stream()][-1], expected, rtol=1e-4, atol=1e-5
        )


def test_a_model_without_such_parts_is_told() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval()
    with pytest.warns(UserWarning, match="adapt: compile is ignored: no part of the model"):
        df.adapt(model, compile=True)(stream()[0])


@pytest.mark.parametrize("wrong", [1, None, torch.compile])
def test_other_values_are_refused(wrong: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"adapt: compile must be True, False or the name of a backend of torch\.compile",
    ):
        df.adapt(network(), compile=wrong)

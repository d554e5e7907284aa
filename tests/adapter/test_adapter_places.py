"""Adapters in other dtypes and places: half precision, autocast, models that move, or get their
values later.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.storage.state_tensors import to_tensors
from small import assert_same, conv


def setting() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    return conv(), [torch.randn(8, 3, 6, 6) for _ in range(3)]


@pytest.mark.parametrize("recipe", ["tent", "opgd_diag", "head_ekf", "stad"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_inputs_of_other_dtypes(recipe: str, dtype: torch.dtype) -> None:
    model, batches = setting()
    one, other = df.adapt(model, recipe), df.adapt(model, recipe)
    for batch in batches:
        assert torch.equal(one(batch.to(dtype)), other(batch.to(dtype).float()))


@pytest.mark.parametrize(
    "recipe", ["tent", "opgd_diag", "opgd", "head_ekf", "stad", "t3a", "cotta"]
)
@pytest.mark.parametrize("way", ["bfloat16 model", "autocast"])
def test_half_precision_stays_near_full_precision(recipe: str, way: str) -> None:
    """The belief is float32 all along."""
    model, batches = setting()
    options: dict[str, Any] = {"copies": 2} if recipe == "cotta" else {}
    half, full = (
        df.adapt(copy.deepcopy(model), recipe, **options),
        df.adapt(model, recipe, **options),
    )
    if way == "bfloat16 model":
        half = df.adapt(copy.deepcopy(model).bfloat16(), recipe, **options)
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            found = half(batch)
        expected = full(batch)
        assert found.dtype == half.belief.mean.dtype == torch.float32
        torch.testing.assert_close(found.exp(), expected.exp(), rtol=0, atol=0.03)
        assert not torch.equal(found, expected)  # it was on


def test_the_algebra_of_the_filter_is_not_under_autocast() -> None:
    """Features that autocast cannot touch: then nothing may differ."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), torch.randn(8, 12)
    plain, automatic = df.adapt(model, "head_ekf"), df.adapt(model, "head_ekf")
    for _ in range(2):
        expected = plain(batch)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(automatic(batch), expected)
            assert torch.is_autocast_enabled("cpu")
        assert torch.equal(plain.belief.covariance.dense(), automatic.belief.covariance.dense())


@pytest.mark.parametrize("recipe", ["tent", "opgd_diag", "head_ekf", "stad"])
def test_a_model_that_moves_takes_the_state_along(recipe: str) -> None:
    model, batches = setting()
    options: dict[str, Any] = {"prediction": df.MAP()}  # draws would differ between dtypes
    adapter, reference = (
        df.adapt(model, recipe, **options),
        df.adapt(copy.deepcopy(model).double(), recipe, **options),
    )
    torch.testing.assert_close(
        adapter(batches[0]), reference(batches[0].double()).float(), rtol=0, atol=1e-4
    )
    model.double()
    for batch in batches[1:]:
        found = adapter(batch.double())
        assert found.dtype == adapter.belief.mean.dtype == torch.float64
        torch.testing.assert_close(found, reference(batch.double()), rtol=0, atol=1e-4)
    torch.testing.assert_close(
        adapter.belief.covariance.variance(),
        reference.belief.covariance.variance(),
        rtol=1e-3,
        atol=1e-6,
    )


def test_an_adapter_moves_without_the_model() -> None:
    model, batches = setting()
    adapter, reference = (
        df.adapt(model, "opgd_diag", window=12),
        df.adapt(copy.deepcopy(model).double(), "opgd_diag", window=12),
    )
    nn.Sequential(adapter).double()  # as a part of another module
    for batch in batches:
        assert torch.equal(adapter(batch.double()), reference(batch.double()))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_half_precision_does_not_round_the_belief() -> None:
    model, batches = setting()
    adapter = df.adapt(model, "opgd_diag")
    adapter(batches[0])
    before = to_tensors(adapter.state)
    adapter.bfloat16()
    assert_same(to_tensors(adapter.state), before)
    assert adapter(batches[1]).isfinite().all()


def test_a_model_without_values_may_get_them_before_the_first_call() -> None:
    source, batches = setting()
    with torch.device("meta"):
        model = conv()
    for recipe in ("tent", "head_ekf"):
        adapter = df.adapt(model, recipe)
        with pytest.raises(
            ValueError,
            match=(
                r"must be a module with values: load its weights first, got .* on the meta device"
            ),
        ):
            adapter(batches[0])
    adapter = df.adapt(model, "tent")
    model.to_empty(device="cpu").load_state_dict(source.state_dict())
    assert torch.equal(adapter(batches[0]), df.adapt(source, "tent")(batches[0]))


def test_weights_loaded_before_the_first_batch_are_where_it_starts() -> None:
    """Even if the adapter had been looked at; and a reset starts from the weights as they are."""
    source, batches = setting()
    model = conv()
    adapter = df.adapt(model, "tent")
    assert adapter.belief.dimension == 12
    for weights in (source, conv()):
        nn.init.uniform_(weights.get_parameter("1.weight"))
        model.load_state_dict(weights.state_dict())
        assert torch.equal(adapter(batches[0]), df.adapt(weights, "tent")(batches[0]))
        adapter.reset()


def test_a_model_that_has_grown_is_refused_until_reset() -> None:
    model, batches = setting()
    adapter = df.adapt(model, df.Recipe(parameters=df.Head("5"), inference=df.Frozen()))
    adapter(batches[0])
    model.set_submodule("5", nn.Linear(6, 4))
    with pytest.raises(
        ValueError,
        match=r"model must be as it was, with 21, until reset\(\) is called, got '28 adapted",
    ):
        adapter(batches[0])
    adapter.reset()
    assert adapter(batches[0]).shape == (8, 4)

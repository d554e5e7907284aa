"""How far parameters have moved, against a belief that was put there by hand."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import driftfilter as df
from driftfilter.app.parameter_shift import measure_shift


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2), nn.BatchNorm1d(2)
    ).eval()


def moved(recipe: df.Recipe) -> tuple[df.Adapter, nn.Module]:
    model = network()
    adapter = df.adapt(model, recipe)
    for seed in range(3):
        adapter(torch.randn(12, 3, generator=torch.Generator().manual_seed(seed)))
    return adapter, model


def test_by_layer_in_sigmas_of_the_prior() -> None:
    adapter, model = moved(df.Recipe(source=df.Gaussian(variance=0.04)))
    rows = measure_shift(adapter, model)
    change = (adapter.belief.mean - adapter.state.source.mean).double()
    assert [(row["layer"], row["parameters"]) for row in rows] == [("1", 8), ("4", 4)]
    for row, piece, start in zip(
        rows, change.split([8, 4]), adapter.state.source.mean.split([8, 4]), strict=True
    ):
        rms = math.sqrt(sum(x * x for x in piece.tolist()) / len(piece))
        assert rms > 0
        assert row["rms"] == pytest.approx(rms, rel=1e-12)
        assert row["sigmas"] == pytest.approx(rms / 0.2, rel=1e-6)
        assert row["relative"] == pytest.approx(
            (piece.norm() / start.double().norm()).item(), rel=1e-12
        )


def test_a_point_mass_has_no_sigmas() -> None:
    rows = measure_shift(*moved(df.presets.get("tent", lr=0.01)))
    assert [row["sigmas"] for row in rows] == [None, None]
    assert all(row["rms"] > 0 for row in rows)


def test_nothing_moves_before_the_first_batch() -> None:
    model = network()
    rows = measure_shift(df.adapt(model, df.Recipe(source=df.Gaussian())), model)
    assert [(row["sigmas"], row["rms"], row["relative"]) for row in rows] == [(0, 0, 0), (0, 0, 0)]


def test_hidden_states_are_read_out() -> None:
    """A trend carries velocities beside the parameters: only what the model sees counts, with its
    own variance.
    """
    trend = df.Transition(df.LocalTrend(order=2), df.Isotropic(1e-4))
    adapter, model = moved(
        df.Recipe(source=df.Gaussian(variance=0.04, structure="full"), transition=trend)
    )
    state = adapter.state
    matrix = trend.read_out(state.parameters)
    assert matrix is not None
    assert state.belief.dimension > state.parameters == 12
    rows = matrix.double()
    change = rows @ (state.belief.mean - state.source.mean).double()
    dense = state.source.covariance.apply(torch.eye(state.belief.dimension)).double()
    variance = (rows @ dense @ rows.T).diagonal()
    found = measure_shift(adapter, model)
    assert found[0]["sigmas"] == pytest.approx(
        (change[:8] ** 2 / variance[:8]).mean().sqrt().item(), rel=1e-5
    )
    assert found[1]["rms"] == pytest.approx(change[8:].square().mean().sqrt().item(), rel=1e-6)


@pytest.mark.parametrize(
    ("parameters", "layers"),
    [
        (df.Head(), {"head": 10}),
        (df.Head("3"), {"3": 10}),
        (df.AllParameters(), {"0": 16, "1": 8, "3": 10, "4": 4}),
        (df.LoRA(rank=1), {"0.weight": 7, "3.weight": 6}),
    ],
    ids=["head", "named head", "all", "lora"],
)
def test_layers_of_other_selections(parameters: object, layers: dict[str, int]) -> None:
    model = network()[:4] if isinstance(parameters, df.Head) else network()
    adapter = df.adapt(model, replace(df.Recipe(), parameters=parameters, source=df.Gaussian()))
    adapter(torch.randn(12, 3, generator=torch.Generator().manual_seed(0)))
    rows = measure_shift(adapter, model)
    assert {row["layer"]: row["parameters"] for row in rows} == layers
    assert sum(row["parameters"] for row in rows) == adapter.state.parameters
    assert all(row["rms"] > 0 for row in rows if not isinstance(parameters, df.LoRA))

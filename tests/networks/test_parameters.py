"""Which parameters a selection names."""

import pytest
import torch
from torch import nn

import driftfilter as df
from driftfilter.networks.layers import NORMS
from small import refuses


def network() -> nn.Module:
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.GroupNorm(2, 8, affine=False)
    )
    return nn.Sequential(
        body, nn.Flatten(), nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False)
    )


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        (df.NormAffine(), ["0.1.weight", "0.1.bias", "3.weight", "3.bias"]),
        (df.NormAffine(exclude=("3",)), ["0.1.weight", "0.1.bias"]),
        (df.NormAffine(exclude=("0.*",)), ["3.weight", "3.bias"]),
        (df.Head(), ["4.weight"]),
        (df.Head("2"), ["2.weight", "2.bias"]),
        (df.AllParameters(), [name for name, _ in network().named_parameters()]),
        (df.ByName(("*.bias",)), ["0.0.bias", "0.1.bias", "2.bias", "3.bias"]),
        (df.ByName(("3.*", "0.1.weight")), ["0.1.weight", "3.weight", "3.bias"]),
    ],
    ids=repr,
)
def test_names_in_the_order_of_the_network(selection: df.Selection, names: list[str]) -> None:
    model = network()
    assert selection(model) == names
    known = dict(model.named_parameters())
    assert all(parameter is known[name] for name, parameter in df.select(model, selection).items())


def test_a_network_that_is_one_layer() -> None:
    assert df.NormAffine()(nn.LayerNorm(3)) == ["weight", "bias"]
    assert df.Head()(nn.Linear(2, 2)) == ["weight", "bias"]


@pytest.mark.parametrize("norm", NORMS)
def test_every_kind_of_norm_is_found(norm: type[nn.Module]) -> None:
    if norm is nn.GroupNorm:
        layer: nn.Module = nn.GroupNorm(2, 4)
    elif issubclass(norm, (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)):
        layer = norm(4, affine=True)
    else:
        layer = norm(4)
    assert df.NormAffine()(layer) == (["weight"] if norm is nn.RMSNorm else ["weight", "bias"])


test_selecting_nothing_says_what_there_is = refuses(
    [
        (
            df.NormAffine(),
            nn.Linear(2, 2),
            r"NormAffine\(exclude=\(\)\) must select .* \['Linear'\].*adapt\(model, 'head_ekf'\)",
        ),
        (
            df.NormAffine(("*",)),
            network(),
            r"NormAffine\(exclude=\('\*',\)\) must select .* named \['0.0.weight', .* …",
        ),
        (
            df.ByName(("head.*",)),
            network(),
            r"must select one parameter or more, got none of 9; .*'BatchNorm2d', 'Conv2d'",
        ),
        (
            df.Head("fc"),
            network(),
            r"Head.name must be the name of a linear layer, one of \['2', '4'\], got 'fc'",
        ),
        (
            df.Head(),
            nn.LayerNorm(2),
            r"Head.name must be the name of a linear layer, one of \[\], got ''",
        ),
        (df.Head(), nn.Conv2d(3, 2, 1), r"got ''; a network without one has adapt\(model, 'cent"),
        (df.NormAffine(), nn.Conv2d(3, 2, 1), r"must select .*; adapt\(model, 'center'\) none"),
    ],
    lambda selection, model: df.select(model, selection),
)


def test_what_is_selected_is_a_dict_that_prints_as_a_table() -> None:
    chosen = df.select(network(), df.ByName(("0.0.*", "4.*")))
    assert isinstance(chosen, dict)
    assert str(chosen).splitlines() == [
        "parameter   layer   shape         count",
        "0.0.weight  Conv2d  [8, 3, 3, 3]    216",
        "0.0.bias    Conv2d  [8]               8",
        "4.weight    Linear  [2, 4]            8",
        "total                               232",
    ]
    assert str(df.select(nn.Linear(1000, 3), df.LoRA(rank=1))).splitlines()[1:] == [
        "weight.A   Linear  [1, 1000]  1,000",
        "weight.B   Linear  [3, 1]         3",
        "total                         1,003",
    ]


def test_a_selection_of_names_that_are_not_there() -> None:
    def odd(model: nn.Module) -> list[str]:
        return ["4.weight", "4.bias"]

    with pytest.raises(
        ValueError,
        match=r"odd.* must be of parameters of the network, such as .*, got \['4.bias'\]",
    ):
        df.select(network(), odd)


test_patterns_are_a_tuple = refuses(
    [
        (
            lambda: df.NormAffine("layer4"),  # type: ignore[arg-type]
            r"NormAffine.exclude must be a tuple of patterns, got 'layer4'",
        ),
        (
            lambda: df.ByName("*.bias"),  # type: ignore[arg-type]
            r"ByName.patterns must be a tuple of one pattern or more, got '\*.bias'",
        ),
    ]
)


def test_no_parameters_leave_no_graph_and_no_row() -> None:
    model = network().double()
    found = df.Network(model, df.NoParameters(), "source")
    inputs, theta = torch.rand(4, 3, 3, 3).double(), found.mean()
    assert theta.tolist() == [0.0]
    assert theta.dtype == torch.float64
    logits, _ = found.pullback(theta, inputs)
    assert torch.equal(logits, model.eval()(inputs))
    assert not found._graph(theta, inputs).logits.requires_grad
    assert torch.equal(found(theta + 1, inputs), logits)

"""Posteriors from elsewhere: handed to an adapter as they are, or their marginal."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
from small import assert_same, moments, normal, refuses, tabular

INPUTS, LABELS = normal(40, 4, dtype=torch.float32), torch.arange(40) % 3
MODEL = tabular().eval()
WIDE = df.Network(MODEL, df.AllParameters())


def full(d: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> df.Belief:
    root = normal(d, d, seed=seed)
    matrix = 0.01 * (root @ root.mT / d + torch.eye(d, dtype=torch.float64))
    return df.Belief(normal(d, seed=seed + 1).to(dtype), df.Full(matrix.to(dtype)))


BELIEFS = {
    "full": lambda: full(12),
    "diagonal": lambda: df.Belief(normal(12).float(), df.Diagonal(torch.rand(12) + 0.1)),
    "low rank": lambda: df.Belief(
        normal(12).float(), df.LowRank(torch.rand(12) + 1, torch.randn(3, 12), 4)
    ),
    "blocks": lambda: df.Belief(
        normal(12).float(), df.Blocks((full(6).covariance, df.Diagonal(torch.rand(6) + 0.1)))
    ),
}


@pytest.mark.parametrize("name", BELIEFS)
def test_an_adapter_starts_from_the_belief_given(name: str) -> None:
    belief = BELIEFS[name]()
    adapter = df.adapt(MODEL, "opgd_diag", source=df.Given(belief), monitor=None)
    assert_same(moments(adapter.belief), moments(belief))
    assert type(adapter.belief.covariance) is type(belief.covariance)
    network = df.Network(MODEL, statistics=adapter.recipe.statistics)
    expected = network(belief.mean, INPUTS).log_softmax(-1)
    torch.testing.assert_close(adapter.predict(INPUTS).log_probabilities, expected)
    adapter(INPUTS)
    assert not torch.equal(adapter.belief.mean, belief.mean)
    adapter.reset()
    assert_same(moments(adapter.belief), moments(belief))


def test_the_step_from_it_is_that_of_a_filter() -> None:
    belief, recipe = full(12), df.presets.get("opgd", beta=2.0)
    adapter = df.adapt(MODEL, "opgd", beta=2.0, source=df.Given(belief), monitor=None)
    filt = recipe.filter(df.Network(MODEL, recipe.parameters, recipe.statistics))
    state, _, _ = filt.step(filt.init(belief), INPUTS)
    adapter(INPUTS)
    assert_same(moments(adapter.belief), moments(state.belief))


@pytest.mark.parametrize("over", [WIDE, WIDE.shapes], ids=["network", "shapes"])
@pytest.mark.parametrize(
    "parameters", [df.NormAffine(), df.ByName(("0.bias", "3.*")), df.AllParameters()], ids=repr
)
def test_a_wider_posterior_gives_its_marginal(parameters: Any, over: Any) -> None:
    """The block of Σ of the named parameters, by their places in the module."""
    belief = full(sum(WIDE.sizes))
    adapter = df.adapt(
        MODEL, "opgd_diag", source=df.Given(belief, over), parameters=parameters, monitor=None
    )
    names = list(df.Network(MODEL, parameters).shapes)
    start, kept = 0, list[int]()
    for name, parameter in MODEL.named_parameters():
        kept += range(start, start + parameter.numel()) if name in names else []
        start += parameter.numel()
    mean, matrix = moments(belief)
    assert_same(moments(adapter.belief), (mean[kept], matrix[kept][:, kept]))


def test_a_laplace_of_everything_in_two_lines() -> None:
    """The variance of the marginal is that of the inverse's block, larger than the block's
    inverse.
    """
    posterior = df.Laplace("full")(WIDE, WIDE.mean(), df.SourceData(INPUTS, LABELS))
    adapter = df.adapt(MODEL, "opgd_diag", source=df.Given(posterior, over=WIDE))
    narrow = df.Network(MODEL)
    fitted = df.Laplace("full")(narrow, narrow.mean(), df.SourceData(INPUTS, LABELS))
    assert_same(moments(adapter.belief), moments(df.marginal_source(WIDE, narrow, posterior)))
    assert (adapter.belief.covariance.variance() > fitted.covariance.variance()).all()


def test_it_goes_where_the_model_is() -> None:
    belief = full(12, dtype=torch.float64)
    adapter = df.adapt(MODEL, "opgd_diag", source=df.Given(belief), monitor=None)
    assert adapter.belief.mean.dtype == adapter.belief.covariance.dtype == torch.float32
    torch.testing.assert_close(adapter.belief.mean, belief.mean.float())


def test_a_head_has_the_order_of_a_linear_head() -> None:
    belief = full(21)
    adapter = df.adapt(MODEL, "head_ekf", source=df.Given(belief), monitor=None)
    assert_same(moments(adapter.belief), moments(belief))


def test_a_checkpoint_tells_one_posterior_from_another(tmp_path: Path) -> None:
    def adapted(belief: df.Belief) -> df.Adapter:
        return df.adapt(MODEL, "opgd_diag", source=df.Given(belief), monitor=None)

    one, path = adapted(full(12)), tmp_path / "state.safetensors"
    one(INPUTS)
    df.save(one, path)
    same = adapted(full(12))
    df.load(same, path)
    assert_same(moments(same.belief), moments(one.belief))
    moved = full(12).mean.clone()
    moved[5] += 1e-6
    with pytest.raises(df.CheckpointError, match="another recipe"):
        df.load(adapted(df.Belief(moved, full(12).covariance)), path)
    with pytest.raises(ValueError, match="Given is not in the table"):
        df.to_toml(one.recipe)


def test_the_belief_and_the_model_stay_as_they_are() -> None:
    belief, before = full(12), [parameter.clone() for parameter in MODEL.parameters()]
    kept = [part.clone() for part in moments(belief)]
    df.adapt(MODEL, "opgd_diag", source=df.Given(belief))(INPUTS)
    assert_same(list(moments(belief)), kept)
    assert_same([parameter.detach() for parameter in MODEL.parameters()], before)


def start(source: df.Given, preset: str = "opgd_diag") -> Tensor:
    return df.adapt(MODEL, preset, source=source).belief.mean


anything: Any = df
test_what_does_not_fit_is_refused = refuses(
    [
        (lambda: anything.Given(torch.zeros(12)), "Given.belief must be a Belief"),
        (lambda: anything.Given(full(12), over=12), "Given.over must be a Network, or shapes by"),
        (
            lambda: df.Given(full(12), over=WIDE),
            "Given.belief must be of dimension 63, as what it is over, got 'dimension 12'",
        ),
        (
            lambda: start(df.Given(full(13))),
            "Given.belief must be over the 12 that are adapted, or say .* got 'over 13 parameters'",
        ),
        (
            lambda: start(df.Given(full(6), over={"1.weight": torch.Size([6])})),
            r"Given.over must be with parameters of wide, \['1.weight'\], got .*1.bias",
        ),
        (
            lambda: start(
                df.Given(full(12), over={"1.weight": torch.Size([2, 3]), "1.bias": torch.Size([6])})
            ),
            "Given.over must be of the shapes that the network has",
        ),
        (
            lambda: start(df.Given(full(63), over=WIDE), "head_ekf"),
            "Given.over must be None for a head or prototypes",
        ),
    ]
)


def test_a_module_of_its_own_order() -> None:
    """Names decide, not places."""
    turned = {name: WIDE.shapes[name] for name in reversed(list(WIDE.shapes))}
    belief = full(63)
    sizes = [shape.numel() for shape in turned.values()]
    pieces = dict(zip(turned, belief.mean.split(sizes), strict=True))
    adapter = df.adapt(MODEL, "opgd_diag", source=df.Given(belief, turned), monitor=None)
    assert_same(adapter.belief.mean, torch.cat((pieces["1.weight"], pieces["1.bias"])))


def test_norms_of_every_kind_take_a_posterior() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3)).eval()
    belief = full(12)
    for preset in ("driftfilter", "bong_diag", "bacs", "tent"):
        adapter = df.adapt(model, preset, source=df.Given(belief), monitor=None)
        assert_same(moments(adapter.belief), moments(belief))
        assert adapter(INPUTS).isfinite().all()

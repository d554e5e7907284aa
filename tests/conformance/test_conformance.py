"""What every variant in the table must do, by standing there: a new one is covered as it is."""

import contextlib
import re
import warnings
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import driftfilter as df
from driftfilter.model.centering import Centered
from small import assert_same, contents, normal

PART = df.Transition(df.MeanReversion(0.9), df.Isotropic(0.01))
EXAMPLES: dict[str, Any] = {  # for variants that have no default, or a slow one
    "LinearHead": df.LinearHead(classes=2),
    "BlockDynamics": df.BlockDynamics(
        sizes=(1, 1), parts=(PART, df.Transition(df.RandomWalk(), df.Discount()))
    ),
    "SumDynamics": df.SumDynamics(
        (df.Transition(df.LocalTrend(velocity=0.1)), df.Transition(df.Seasonal(level=False)))
    ),
    "FullNoise": df.FullNoise(((0.02, 0.005), (0.005, 0.01))),
    "Variational": df.Variational(iterations=3),
    "Contrast": df.Contrast(df.GaussianNoise(), prototypes=True),
    "ProbabilityDrop": df.ProbabilityDrop(df.GaussianNoise(), drop=-1.0, limit=1.0),
}
TABLE = [(role, name) for role, classes in df.VARIANTS.items() for name in classes]
EVERY = pytest.mark.parametrize(("role", "name"), TABLE, ids=[name for _, name in TABLE])
# These have no place inside a Filter: a source makes the belief it starts from, statistics and
# parameters belong to a network, a buffer to an adapter, and a recipe holds all of them
# (tests/source, tests/networks, tests/model/test_buffers.py, tests/presets).
OUTSIDE = ("source", "statistics", "parameters", "buffer", "labels", "domains", "recipe")
STREAMED = [(role, name) for role, name in TABLE if role not in OUTSIDE]
EVERY_STREAMED = pytest.mark.parametrize(
    ("role", "name"), STREAMED, ids=[name for _, name in STREAMED]
)


def example(role: str, name: str) -> Any:
    return EXAMPLES[name] if name in EXAMPLES else df.VARIANTS[role][name]()


def changed(variant: Any) -> list[Any]:
    """Every valid copy with one number or switch changed."""
    copies = []
    for item in fields(variant):
        value = getattr(variant, item.name)
        if isinstance(value, (bool, int, float)):
            other = (
                not value
                if isinstance(value, bool)
                else value + 1
                if isinstance(value, int)
                else value / 2 or 0.5
            )
            with contextlib.suppress(ValueError):
                copies.append(replace(variant, **{item.name: other}))
    return copies


@EVERY
def test_repr_is_code_that_rebuilds_the_variant(role: str, name: str) -> None:
    variant = example(role, name)
    rebuilt = eval(repr(variant), {name: getattr(df, name) for name in dir(df)})
    assert (rebuilt, repr(rebuilt)) == (variant, repr(variant))


@EVERY
def test_equal_by_value_hashable_and_frozen(role: str, name: str) -> None:
    variant = example(role, name)
    same = replace(variant)
    assert same is not variant
    assert (same, hash(same)) == (variant, hash(variant))
    for other in [
        *changed(variant),
        *(example(role, other) for other in df.VARIANTS[role] if other != name),
    ]:
        assert other != variant
        assert len({variant, same, other}) == 2
    numbers = [
        item.name
        for item in fields(variant)
        if isinstance(getattr(variant, item.name), (int, float))
    ]
    assert bool(changed(variant)) is bool(numbers)
    for item in fields(variant):
        with pytest.raises(FrozenInstanceError):
            setattr(variant, item.name, getattr(variant, item.name))


@EVERY
def test_toml_round_trip(role: str, name: str) -> None:
    for variant in [example(role, name), *changed(example(role, name))]:
        read = df.from_toml(df.to_toml(variant))
        assert (read, repr(read)) == (variant, repr(variant))


@EVERY
def test_unknown_field_names_the_nearest(role: str, name: str) -> None:
    variant = example(role, name)
    for item in fields(variant):
        with pytest.raises(
            ValueError, match=f"{name} has no field '{item.name}x' .did you mean '{item.name}'"
        ):
            df.from_toml(df.to_toml(variant) + f"{item.name}x = 1\n")
    with pytest.raises(ValueError, match=f"{name} has no field 'zzzz'; its fields are"):
        df.from_toml(df.to_toml(variant) + "zzzz = 1\n")


def curved(theta: Tensor, inputs: Tensor) -> Tensor:
    """A plain function, nonlinear in two parameters, three classes."""
    score = torch.tanh(inputs[:, 0] * theta[0]) + inputs[:, 1] * theta[1]
    return torch.stack((score, torch.sin(theta[0] - score), theta[1] - 0.5 * score), -1)


STRUCTURES: dict[str, Callable[[Tensor], df.Covariance]] = {
    "Full": df.Full,
    "Diagonal": lambda matrix: df.Diagonal(matrix.diagonal().clone()),
    "LowRank": lambda matrix: df.LowRank(matrix.diagonal().clone(), 0.5 * matrix[:1], rank=1),
    "Blocks": lambda matrix: df.Blocks((df.Diagonal(matrix[0, :1]), df.Full(matrix[1:, 1:]))),
    "Kronecker": lambda matrix: df.Kronecker.from_factors(
        matrix.inverse(), matrix.new_ones(1, 1), 0.1
    ),
}
NOISE = df.GaussianNoise()


def on_vectors(augmentation: Any) -> Any:
    """An augmentation of vectors, of images 1 pixel high where it wants images."""
    if not isinstance(augmentation, (df.ImageViews, df.Mirror, df.PatchShuffle)):
        return augmentation
    return lambda inputs, generator: augmentation(inputs[:, None, None], generator)[:, 0, 0]


BASES = pytest.mark.parametrize("base", [*STRUCTURES, "lifted"])
PROTOTYPES = {  # inference that needs a model of its own: one class, two features
    df.Supports: {"logits": df.PrototypeHead(torch.tensor([[1.0, -0.5]]), family="inner_product")},
    df.Mixture: {"logits": df.PrototypeHead(torch.tensor([[1.0, -0.5]]))},
}
ROLES: dict[
    str, Callable[[Any], dict[str, Any]]
] = {  # role -> the part of a Filter where a variant of it stands
    "model": lambda variant: {"logits": variant},
    "dynamics": lambda variant: {"transition": df.Transition(variant)},
    "noise": lambda variant: {"transition": df.Transition(df.MeanReversion(0.9), variant)},
    "transition": lambda variant: {"transition": variant},
    "loss": lambda variant: {"observation": df.Gibbs(variant)},
    "centering": lambda variant: {"logits": Centered(df.LinearHead(2), variant)},
    "augmentation": lambda variant: {"observation": df.Gibbs(df.Consistency(on_vectors(variant)))},
    "weighting": lambda variant: {"observation": df.Gibbs(df.Entropy(), variant)},
    "observation": lambda variant: {"observation": variant},
    "teacher": lambda variant: {
        "observation": df.Gibbs(df.PseudoLabel(), teacher=replace(variant, augmentation=NOISE))
    },
    "upkeep": lambda variant: {
        "upkeep": variant,
        "inference": df.GradientStep(df.SGD(0.1), keep_gradient=True),
    },
    "curvature": lambda variant: {"inference": df.Linearized(variant)},
    "inference": lambda variant: {"inference": variant, **PROTOTYPES.get(type(variant), {})},
    "optimizer": lambda variant: {"inference": df.GradientStep(variant)},
    "prediction": lambda variant: {
        "prediction": variant,
        "observation": df.Gibbs(teacher=df.Teacher(augmentation=NOISE)),
    },
}


# A plain function has no features, and says so.
FEATURES = ("LaplacianAdjustment", "MomentAlignment", "Contrast", "CentroidLabel")
# Losses of a head's features, which its parameters do not move.
STILL = ("Frozen", "MomentAlignment", "Contrast")


class Setting(NamedTuple):
    """A filter with one variant in its place."""

    filter: df.Filter
    structure: str
    dtype: torch.dtype
    device: str

    def start(self, scale: float = 1.0, seed: int = 0) -> df.FilterState | None:
        """The first state; None where the structure says that it cannot carry the variant."""
        matrix = torch.tensor([[1.0, 0.25], [0.25, 0.5]], dtype=self.dtype, device=self.device)
        mean = scale * torch.tensor([1.0, -0.5], dtype=self.dtype, device=self.device)
        belief = df.Belief(mean, STRUCTURES[self.structure](matrix))
        try:
            source = 1.5 * normal(3, 5, 2, seed=8).to(mean)
            return self.filter.init(belief, seed, [(batch, None) for batch in source])
        except ValueError as error:
            if self.structure == "Full" or not re.match(
                f"{self.structure} cannot carry .*; use ", str(error)
            ):
                raise
            return None

    def run(self, state: df.FilterState, stream: list[Tensor]) -> tuple[df.FilterState, df.Outputs]:
        """The stream, and a check that what comes out is sound."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", df.NoInformationWarning)
            state, outputs = self.filter.run(state, stream)
        assert_sound(state, outputs, self.dtype, self.device)
        return state, outputs


def setting(role: str, name: str, base: str, dtype: torch.dtype, device: str) -> Setting:
    """``base``: a covariance structure under a linear head, or "lifted"."""
    parts = {
        "logits": curved if base == "lifted" and name not in FEATURES else df.LinearHead(2),
        "inference": df.Linearized(df.Hessian()),
    }
    filt = df.Filter(**{**parts, **ROLES[role](example(role, name))})
    return Setting(filt, "Full" if base == "lifted" else base, dtype, device)


def inputs(dtype: torch.dtype, device: str, samples: int = 6, steps: int = 2) -> list[Tensor]:
    return list((1.5 * normal(steps, samples, 2, seed=5)).to(dtype).to(device))


def assert_sound(
    state: df.FilterState, outputs: df.Outputs, dtype: torch.dtype, device: str
) -> None:
    mean, matrix = state.belief.mean, state.belief.covariance.dense()
    assert mean.dtype == matrix.dtype == outputs.probabilities.dtype == dtype
    assert mean.device.type == matrix.device.type == outputs.probabilities.device.type == device
    assert all(torch.isfinite(part).all() for part in (mean, outputs.log_probabilities))
    for variance in (prediction.logit_variance for prediction in outputs):
        assert (torch.isfinite(variance) & (variance >= 0)).all()
    assert all(
        torch.isfinite(info.losses).all() and (info.weights >= 0).all() for info in outputs.infos
    )
    torch.testing.assert_close(
        outputs.probabilities.sum(-1), torch.ones_like(outputs.labels, dtype=dtype)
    )
    eigenvalues = torch.linalg.eigvalsh(matrix.double())
    assert eigenvalues[0] > -10 * torch.finfo(dtype).eps * eigenvalues[-1]
    assert (state.belief.covariance.variance() > 0).all()


EVERYWHERE = pytest.mark.parametrize(
    "device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
)


@EVERY_STREAMED
@BASES
@EVERYWHERE
def test_deterministic_and_without_side_effects(
    device: str, base: str, role: str, name: str
) -> None:
    one, two = (setting(role, name, base, torch.float64, device) for _ in range(2))
    state, other = one.start(), two.start()
    if state is None or other is None:
        return
    stream = inputs(torch.float64, device)
    before, given = contents(state), [batch.clone() for batch in stream]
    after, outputs = one.run(state, stream)
    assert_same((contents(state), stream), (before, given))
    torch.manual_seed(99)
    again, repeated = two.run(other, stream)
    assert_same(contents(again), contents(after))
    assert torch.equal(repeated.log_probabilities, outputs.log_probabilities)
    binary = outputs.log_probabilities.shape[-1] == 2
    shut = binary and name in (
        "RunGate",
        "OpinionEntropy",
    )  # no direction of logits (0, f) can turn
    still = torch.equal(after.belief.mean, state.belief.mean)
    assert still is (name in STILL or shut)


@EVERY_STREAMED
@BASES
@EVERYWHERE
def test_float32_agrees_with_float64(device: str, base: str, role: str, name: str) -> None:
    """To float32's accuracy; where draws differ between the types, as well as one seed agrees with
    others.
    """

    def result(dtype: torch.dtype, seed: int) -> Tensor:
        variant = setting(role, name, base, dtype, device)
        state = variant.start(seed=seed)
        if state is None:
            return torch.zeros(1)
        state, outputs = variant.run(state, inputs(dtype, device))
        parts = (
            state.belief.mean,
            state.belief.covariance.dense().flatten(),
            outputs.probabilities.flatten(),
        )
        return torch.cat(parts).double()

    single, double = result(torch.float32, 0), result(torch.float64, 0)
    if not torch.allclose(single, double, rtol=2e-5, atol=2e-5):
        others = torch.stack([result(torch.float64, seed) for seed in range(1, 9)])
        assert (
            (single - others.mean(0)).abs() <= 2e-5 * (1 + double.abs()) + 6 * others.std(0)
        ).all()


@EVERY_STREAMED
@BASES
@EVERYWHERE
def test_batch_of_one_and_extreme_inputs_give_finite_results(
    device: str, base: str, role: str, name: str
) -> None:
    for dtype in (torch.float32, torch.float64):
        variant = setting(role, name, base, dtype, device)
        ordinary, other = inputs(dtype, device)
        for means, stream in (
            (1.0, [ordinary[:1], other[:1]]),
            (1.0, [1e4 * other]),
            (1e3, [torch.cat((ordinary, 1e4 * other, 1e-30 * other))]),
            (1.0, [1e-30 * other]),
        ):
            state = variant.start(means)
            if state is not None:
                variant.run(state, stream)

"""The table of variants and TOML: what is read is what was written, and typos are loud."""

import math
import subprocess
import sys
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

import driftfilter as df
from driftfilter.recipe import VARIANTS, abbreviate, change, from_dict, to_dict
from small import refuses


@pytest.mark.parametrize(
    "variant",
    [
        df.Transition(
            df.BlockDynamics(
                (1, 2),
                (
                    df.Transition(
                        df.LocalTrend(order=2, dt=0.5), df.FullNoise(((0.5, 0.1), (0.1, 0.25)))
                    ),
                    df.Transition(df.Affine((0.5, 1e-300), -math.pi), df.Discount(0.9)),
                ),
            ),
            df.NoNoise(),
        ),
        df.Gibbs(
            df.Sum((df.Consistency(df.GaussianNoise(0.3), target="soft"), df.Entropy()), (1, 0.5)),
            df.Product(),
            "kept",
        ),
        df.Variational(df.EmpiricalFisher(False, 0.1 + 0.2), tolerance=5e-324, iterations=10**12),
        df.GradientStep(df.Adam(1e22, (0.0, 0.999))),
        df.LinearHead(3, intercept=True),
    ],
    ids=lambda variant: type(variant).__name__,
)
def test_what_is_read_is_what_was_written(variant: Any) -> None:
    read = df.from_toml(df.to_toml(variant))
    assert (read, repr(read), from_dict(to_dict(variant))) == (variant, repr(variant), variant)


def test_hand_written_toml() -> None:
    text = """
    # a comment
    kind = "Transition"
    [dynamics]
    kind = "BlockDynamics"
    sizes = [1, 2]
    [[dynamics.parts]]
    kind = "Transition"
    noise = { kind = "Isotropic", variance = 0.01 }
    [[dynamics.parts]]
    kind = "Transition"
    [dynamics.parts.dynamics]
    kind = "PrecisionReversion"
    eta = 1e-3
    [dynamics.parts.noise]
    kind = "Stationary"
    """
    bias = df.Transition(df.RandomWalk(), df.Isotropic(0.01))
    weights = df.Transition(df.PrecisionReversion(0.001), df.Stationary())
    assert df.from_toml(text) == df.Transition(df.BlockDynamics((1, 2), (bias, weights)))


def test_a_mark_of_utf8_is_passed_over() -> None:
    text = df.to_toml(df.Recipe())
    assert df.from_toml("\ufeff" + text) == df.from_toml(text) == df.Recipe()


def test_a_field_may_be_set_to_nothing() -> None:
    recipe = df.presets.get("driftfilter")
    assert change(recipe, "labels", "None") == df.presets.get("driftfilter", labels=None)


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 5000 + "]" * 5000,
        "a = " + "{ a = " * 5000 + "1" + " }" * 5000,
        ".".join("a" * 5000) + " = 1",
        'kind = "Recipe"\nupkeep = ' + "[" * 900 + "]" * 900,
    ],
    ids=["lists", "tables", "dots", "within a recipe"],
)
def test_toml_that_is_too_deep(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        df.from_toml(text)
    with pytest.raises(ValueError, match="must be"):
        change(df.Recipe(), "observation.weighting.beta", "[" * 5000 + "]" * 5000)


@pytest.mark.parametrize("name", df.presets.names())
def test_what_is_abbreviated_is_the_same_recipe(name: str) -> None:
    recipe = df.presets.get(name)
    known = {own: each for classes in VARIANTS.values() for own, each in classes.items()}
    assert eval(abbreviate(recipe), known) == recipe
    for line in recipe.describe().splitlines():
        field, _, text = line.partition(": ")
        value = getattr(recipe, field)
        assert (text if isinstance(value, str) else eval(text, known)) == value


def test_fields_left_out_keep_their_defaults() -> None:
    assert df.from_toml('kind = "Gibbs"\nover = "kept"') == df.Gibbs(over="kept")


test_mistakes_are_loud = refuses(
    [
        (
            'kind = "Entropie"',
            r"kind must be the name of a variant, got 'Entropie' \(did you mean 'Entropy'\?\)",
        ),
        ("kind = 3", r"kind must be the name of a variant, got 3, in \{'kind': 3\}"),
        ("beta = 1.0", r"kind must be the name of a variant, got None, in \{'beta': 1.0\}"),
        (
            'kind = "Gibbs"\nweighting = { beta = 2.0 }',
            r"kind must be .*, got None, in \{'beta': 2.0\}",
        ),
        (
            'kind = "MeanReversion"\nrhoo = 0.9',
            r"MeanReversion has no field 'rhoo' \(did you mean 'rho'\?\).*\['rho'\]",
        ),
        ('kind = "Entropy"\nbeta = 0.9', r"Entropy has no field 'beta'; its fields are \[\]"),
        (
            'kind = "LinearHead"\nintercept = true',
            "LinearHead.classes must be given: it has no default",
        ),
        (
            'kind = "MeanReversion"\nrho = 1.5',
            r"MeanReversion.rho must be a finite number in \[0, 1\], got 1.5",
        ),
        (
            'kind = "MeanReversion"\nrho = "0.9"',
            r"MeanReversion.rho must be a finite number in \[0, 1\], got '0.9'",
        ),
        (
            'kind = "MeanReversion"\nrho = true',
            r"MeanReversion.rho must be a finite number in \[0, 1\], got True",
        ),
        (
            'kind = "Gibbs"\nweighting = { kind = "MAP" }',
            r"Gibbs.weighting must be a variant of role weighting.*got MAP\(\)",
        ),
        (
            'kind = "Gibbs"\nweighting = 1.0',
            "Gibbs.weighting must be a variant of role weighting.*'Constant'.*got 1.0",
        ),
        (
            'kind = "Gibbs"\nloss = "Entropy"',
            "Gibbs.loss must be a variant of role loss.*got 'Entropy'",
        ),
        (
            'kind = "Sum"\nterms = [{ kind = "MAP" }]',
            "Sum.terms must be a list of variants of role loss",
        ),
        (
            'kind = "Sum"\nterms = { kind = "Entropy" }',
            "Sum.terms must be a list of variants of role loss",
        ),
        (
            'kind = "Transition"\ndynamics = [{ kind = "RandomWalk" }]',
            "Transition.dynamics must be a variant of role dynamics",
        ),
        ('kind = "Entropy', "expected '\"'|Illegal character|Unterminated"),
    ],
    df.from_toml,
)


@dataclass(frozen=True)
class Entropy:
    """A user's own class under the name of a variant."""


test_what_has_no_name_cannot_be_written = refuses(
    [
        (df.Gibbs(lambda logits: logits[:, 0]), "Custom is not in the table of variants"),
        (Entropy(), "Entropy is not in the table of variants"),
        (
            df.Consistency(lambda inputs, generator: inputs),
            "cannot be written as data: only variants in the table",
        ),
    ],
    df.to_toml,
)


def test_every_name_stands_once_and_is_public() -> None:
    names = [name for classes in VARIANTS.values() for name in classes]
    assert len(set(names)) == len(names)
    for classes in VARIANTS.values():
        for name, cls in classes.items():
            assert getattr(df, name) is cls
            assert cls.__name__ == name
            assert "kind" not in [item.name for item in fields(cls)]


@pytest.mark.parametrize(
    ("base", "role"),
    [(df.Loss, "loss"), (df.PredictionRule, "prediction"), (df.Dynamics, "dynamics")],
)
def test_every_public_class_of_a_role_is_registered(base: type, role: str) -> None:
    public = (getattr(df, name) for name in df.__all__)
    own = {cls.__name__ for cls in public if isinstance(cls, type) and base in cls.__mro__[1:]}
    assert own - {"BatchLoss"} == set(VARIANTS[role])  # that holds a function, as no TOML can


def test_tensors_become_plain_numbers() -> None:
    gain: Tensor = torch.tensor([[0.5, 0.25], [0.0, 1.0]])
    variant = df.Affine(gain, torch.zeros(2))  # taken, and turned into plain numbers
    assert (
        df.from_toml(df.to_toml(variant))
        == variant
        == df.Affine(((0.5, 0.25), (0.0, 1.0)), (0.0, 0.0))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        # All modules with variants, and the package loads it in turn.
        "import driftfilter.recipe as r; assert 'Mixture' in r.VARIANTS['inference']",
        # No module but these: the role of a variant is known as soon as there is one.
        """
from driftfilter.inference.linearized import Linearized
from driftfilter.model.weighting import Constant
try:
    Linearized(curvature=Constant())
except ValueError as error:
    assert "of role 'curvature'" in str(error), error
else:
    raise AssertionError("a weighting was taken for a curvature")
""",
    ],
)
def test_the_table_is_there_whatever_is_imported_first(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)

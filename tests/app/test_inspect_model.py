"""``driftfilter inspect``, ``list --json`` and ``run --set``."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import driftfilter as df
from driftfilter.app import cli
from driftfilter.recipe import change
from small import refuses

SMALL = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))

def bare():
    return nn.Sequential(nn.Linear(4, 3))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "inspected_network.py").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """What a command prints on stdout and stderr."""
    assert cli.main(arguments) == 0
    return capsys.readouterr()


@pytest.mark.usefixtures("folder")
def test_inspect_counts_what_every_subset_takes(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(capsys, "inspect", "inspected_network:make", "--json")[0])
    assert (found["parameters"], found["norms"], found["batch_norm"]) == (
        4 * 8 + 8 + 16 + 8 * 3 + 3,
        {"LayerNorm": 1},
        False,
    )
    by_name = {subset["selection"]: subset for subset in found["subsets"]}
    assert by_name["NormAffine(exclude=())"]["names"] == ["1.weight", "1.bias"]
    assert [subset["numbers"] for subset in found["subsets"]] == [16, 27, 83]
    assert by_name["AllParameters()"]["memory_mb"]["full"] == pytest.approx(4 * (83 + 83**2) / 1e6)
    assert found["milliseconds"] == {}


@pytest.mark.usefixtures("folder")
def test_inspect_prints_names_and_times_where_asked(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("inspect", "inspected_network:make", "--names", "--input", "4", "--batch", "16")
    out, err = said(capsys, *arguments)
    assert "    1.weight" in out
    assert "cost of a batch of 16 on this machine: model " in out
    assert "driftfilter " in out.splitlines()[-1]
    assert err == ""


@pytest.mark.usefixtures("folder")
def test_inspect_says_why_a_subset_takes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = said(capsys, "inspect", "inspected_network:bare")
    assert "NormAffine(exclude=()) must select one parameter or more, got none of 2" in out
    assert "give the shape of a sample" in out


def test_the_list_names_every_variant_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    entries = json.loads(said(capsys, "list", "--json")[0])
    text, _ = said(capsys, "list")
    names = [name for variants in df.VARIANTS.values() for name in variants] + df.presets.names()
    lines = [line.split() for line in text.splitlines() if line.startswith("  ")]
    assert [entry["name"] for entry in entries] == [line[0] for line in lines] == names
    assert all(entry["summary"] for entry in entries)
    assert min(map(len, lines)) > 2
    rho = next(entry for entry in entries if entry["name"] == "MeanReversion")
    assert (rho["role"], rho["fields"]["rho"]) == ("dynamics", repr(df.MeanReversion().rho))
    assert next(entry for entry in entries if entry["name"] == "tent")["role"] == "preset"


# Fields of a recipe by their path


@pytest.mark.parametrize(
    ("path", "text", "read", "expected"),
    [
        ("transition.dynamics.rho", "0.9", lambda recipe: recipe.transition.dynamics.rho, 0.9),
        ("predict_from", "posterior", lambda recipe: recipe.predict_from, "posterior"),
        (
            "observation.loss.loss.coefficients.1",
            "7.0",
            lambda recipe: recipe.observation.loss.loss.coefficients,
            (1.0, 7.0),
        ),
        (
            "observation.loss.loss.terms.0.ceiling",
            "0.5",
            lambda recipe: recipe.observation.loss.loss.terms[0].ceiling,
            0.5,
        ),
        (
            "transition.noise",
            '{ kind = "Discount", delta = 0.9 }',
            lambda recipe: recipe.transition.noise,
            df.Discount(0.9),
        ),
        (
            "upkeep",
            '{ kind = "ResetEvery", steps = 9 }',
            lambda recipe: recipe.upkeep,
            df.ResetEvery(9),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_field_is_changed_and_nothing_else(
    path: str, text: str, read: Any, expected: Any
) -> None:
    recipe = df.presets.get("driftfilter")
    assert read(change(recipe, path, text)) == expected
    assert read(recipe) != expected
    assert change(change(recipe, "chunk", "3"), "chunk", "0") == recipe


test_a_field_that_is_none_is_refused = refuses(
    [
        (
            "transition.dynamic.rho",
            "0.9",
            "one of the fields .* of transition .did you mean 'dynamics'?",
        ),
        ("transition.dynamics.roh", "0.9", "MeanReversion has no field 'roh' .did you mean 'rho'?"),
        ("transition.dynamics.rho", "2.0", "MeanReversion.rho must be .*, got 2.0"),
        ("transition.dynamics.rho.x", "1", "transition.dynamics.rho is 0.97"),
        (
            "observation.loss.loss.coefficients.2",
            "1.0",
            "a place below 2 in observation.loss.loss.coefficients",
        ),
        ("inference", '{ kind = "Entropy" }', "Recipe.inference must be .*inference"),
    ],
    by=lambda path, text: change(df.presets.get("driftfilter"), path, text),
)


def test_a_run_takes_fields_of_the_recipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(
        folder / "x.npy", torch.randn(32, 4, generator=torch.Generator().manual_seed(0)).numpy()
    )
    common = ("run", "inspected_network:make", "x.npy", "--batch", "16", "--quiet", "--out")
    fields = ("--set", "transition.dynamics.rho=0.5", "--set", "predict_from=posterior")
    said(capsys, *common, "one", *fields)
    recipe = json.loads((folder / "one" / "config.json").read_text())["recipe"]
    assert (recipe["transition"]["dynamics"]["rho"], recipe["predict_from"]) == (0.5, "posterior")
    assert recipe["source"]["variance"] == 3.0  # the rest as the preset has it for this model

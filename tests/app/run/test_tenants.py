"""A log of many tenants: each is adapted to as if it were alone."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import driftfilter as df
from driftfilter.app.cli import main
from driftfilter.app.serve.shard import Reply, Request, Shard
from driftfilter.app.serve.store import FolderStore
from own_model import network, samples

NAMES = np.array(["north", "south", "../east"])


def _command(*more: str) -> list[str]:
    return ["run", "run_network:make", "log.npz", "--preset", "center", "--batch", "6", *more]


def _write() -> np.ndarray[tuple[int], np.dtype[np.str_]]:
    owners = NAMES[np.random.default_rng(0).integers(0, 3, len(samples()))]
    np.savez("log.npz", x=samples(), clinic=owners)
    return owners


def test_each_tenant_is_as_if_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    owners = _write()
    command = _command("--tenants", "clinic", "--out", "out", "--json")
    assert main(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["tenants"], told["samples"], told["resumed"]) == (3, len(owners), 0)
    said = np.load("out/predictions.npz")["probabilities"]
    inputs = torch.from_numpy(samples()).float()
    own = {}
    for name in NAMES.tolist():
        rows = np.flatnonzero(owners == name)
        own[name] = df.adapt(network().eval(), "center")
        expected = torch.cat(
            [own[name](inputs[rows[at : at + 6]]) for at in range(0, len(rows), 6)]
        )
        np.testing.assert_allclose(said[rows], expected.exp(), rtol=1e-5, atol=1e-7)
    assert main([*command, "--resume"]) == 0
    assert json.loads(capsys.readouterr().out)["resumed"] == 3
    # A service goes on from there.
    shard = Shard(df.adapt(network().eval(), "center"), FolderStore(Path("out")))
    (found,) = shard.serve([Request("predict", "../east", inputs[:5].clone())])
    assert isinstance(found, Reply)
    assert found.log_probabilities is not None
    expected = own["../east"](inputs[:5])
    np.testing.assert_allclose(found.log_probabilities, expected, rtol=1e-5, atol=1e-6)
    shard.store.close()


def test_mistakes_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write()
    cases = {
        "one of the arrays": ("--tenants", "nobody"),
        "left out with --tenants": ("--tenants", "clinic", "--checkpoint-every", "2"),
        "texts or integers": ("--tenants", "x"),
    }
    for text, options in cases.items():
        assert main(_command(*options, "--out", "out")) == 1
        assert text in capsys.readouterr().err


def test_what_is_passed_over_is_of_this_log_and_recipe(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else predictions of two recipes, or of two logs, would stand side by side."""
    owners = _write()
    command = _command("--tenants", "clinic", "--out", "out")
    assert main(command) == 0
    before = {path: path.read_bytes() for path in Path("out").rglob("*.*") if path.is_file()}
    np.savez("log.npz", x=samples()[::-1], clinic=owners)
    cases: list[tuple[str, list[str]]] = [
        ("a folder without tenants (or give --resume", command),
        ("other samples", [*command, "--resume"]),
    ]
    for text, own in cases:
        assert main(own) == 1
        assert text in capsys.readouterr().err
    _write()
    for text, own in (
        ("another recipe", [*command, "--preset", "tent", "--resume"]),
        ("other samples", [*command, "--batch", "5", "--resume"]),
    ):
        assert main(own) == 1
        assert text in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before
    assert main([*command, "--resume"]) == 0

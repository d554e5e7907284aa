"""The user's own model and weights; code comes in by ``package.module:factory`` and in no other
way.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from driftfilter.app import models
from driftfilter.app.networks.load_model import open_model, open_weights

SOURCE = """
import torch
from torch import nn

def make(): return nn.Linear(3, 2)
def wants(width): return nn.Linear(width, 2)
def fails(): raise KeyError("no such layer")
def three(): return 3
Class = lambda: nn.Dropout()
instance = nn.Linear(3, 2)
number = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    sources = {
        "own_net": SOURCE,
        "own_wants": "import own_missing",
        "own_broken": "def f(:",
        "own_runs": "1 / 0",
    }
    for name, text in sources.items():
        sys.modules.pop(name, None)
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "own_pack").mkdir()
    (tmp_path / "own_pack" / "net.py").write_text(SOURCE)
    return tmp_path


def test_a_factory_in_the_current_folder(here: Path) -> None:
    model = open_model("own_net:make").module
    assert isinstance(model, nn.Linear)
    assert not model.training
    assert isinstance(open_model("own_pack.net:make").module, nn.Linear)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("own_nett:make", "there is no module 'own_nett' installed or in "),
        ("own_pack.nett:make", "there is no module 'own_pack.nett' installed or in "),
        (
            "own_net.sub:make",
            "could not be imported: ModuleNotFoundError: .*'own_net' is not a package|there is "
            "no module",
        ),
        (
            "own_wants:make",
            r"ModuleNotFoundError: No module named 'own_missing' \(.*own_wants.py, line 1\)",
        ),
        ("own_broken:make", r"could not be imported: SyntaxError: .*own_broken.py, line 1"),
        ("own_runs:make", r"could not be imported: ZeroDivisionError: .*own_runs.py, line 1"),
        ("own_net:mkae", r"MODEL must be a factory that own_net has \(did you mean 'make'\?\)"),
        ("own_net:number", r"got 'own_net:number \(a int\)'"),
        (
            "own_net:instance",
            r"must be a function without arguments that returns the model, got 'own_net:instance",
        ),
        (
            "own_net:wants",
            r"could not be made: TypeError: wants\(\) missing 1 required positional argument",
        ),
        ("own_net:fails", r"could not be made: KeyError: 'no such layer' \(.*own_net.py, line 7\)"),
        ("own_net:three", "must return a torch module, got a int"),
        (
            ":make",
            "MODEL must be the name of a shipped network, or package.module:factory, .*got ':make'",
        ),
        ("own_net:", "MODEL must be the name"),
        ("own_net", "MODEL must be the name of a shipped network, or package.module:factory"),
        ("resnet2", r"did you mean 'resnet20'\?"),
    ],
)
def test_mistakes_are_named(text: str, message: str, here: Path) -> None:
    with pytest.raises(ValueError, match=message):
        open_model(text)


def test_shipped_networks() -> None:
    assert torch.equal(
        open_model("resnet20").module.get_parameter("head.weight"),
        models.load("resnet20").get_parameter("head.weight"),
    )


def other_weights() -> dict[str, Tensor]:
    return {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(2)}


def test_weights_of_either_kind(here: Path) -> None:
    save_file(other_weights(), "w.safetensors")
    torch.save(other_weights(), "w.pt")
    torch.save({"state_dict": other_weights(), "epoch": 3}, "w.pth")
    for name in ("w.safetensors", "w.pt", "w.pth"):
        assert torch.equal(
            open_model("own_net:make", Path(name)).module.get_parameter("weight"),
            other_weights()["weight"],
        )


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"weight": torch.ones(2, 3)}, "missing: bias"),
        ({**other_weights(), "c": torch.ones(1)}, "unexpected: c"),
        ({**other_weights(), "bias": torch.ones(3)}, "of another shape: bias"),
        (
            {**other_weights(), "bias": torch.tensor([0.0, torch.nan])},
            "must be finite, got 'NaN or infinity in bias'",
        ),
        ([torch.ones(2)], "must be tensors by name: a state_dict, got 'list'"),
        ({"weight": Evil()}, "must be a whole file of tensors alone, got Weights only load failed"),
    ],
    ids=["missing", "unexpected", "shape", "NaN", "list", "evil"],
)
def test_weights_that_do_not_fit(content: Any, message: str, here: Path) -> None:
    torch.save(content, "w.pt")
    with pytest.raises(ValueError, match=message):
        open_model("own_net:make", Path("w.pt"))
    assert not (here / "evil").exists()


def test_files_that_are_no_weights(here: Path) -> None:
    for name in ("a.safetensors", "a.pt"):
        Path(name).write_bytes(b"nothing of the kind")
        with pytest.raises(
            ValueError, match=f"weights {name} must be a whole file of tensors alone"
        ):
            open_weights(Path(name))
    for name, reason in (
        ("b.pt", "that is there"),
        ("own_net.py", "a .safetensors, .pt or .pth file"),
    ):
        with pytest.raises(ValueError, match=reason):
            open_weights(Path(name))

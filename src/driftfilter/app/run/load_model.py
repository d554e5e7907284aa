"""The user's own model: ``package.module:factory``, which is the only way to have code imported,
and a file of weights.
"""

import importlib
import sys
import traceback
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from driftfilter.app import models
from driftfilter.app.images.arrays import require_bounded
from driftfilter.base.checks import nearest, require

EXPECTED = "the name of a shipped network, or package.module:factory"


def open_model(text: str, weights: Path | None = None) -> nn.Module:
    """A network in evaluation mode: a shipped one by its name, or what ``package.module:factory``
    returns.
    """
    if ":" in text:
        model = _import_model(text)
    else:
        known = list(models.ARCHITECTURES)
        require(text in known, "MODEL", text, f"{EXPECTED}; there are {known}{_guess(text, known)}")
        model = models.load(text) if weights is None else models.build(text)
    if weights is not None:
        _fill(model, open_weights(weights), weights)
    return model.eval()


def _guess(text: str, known: list[str]) -> str:
    """What a name without a colon may be."""
    module, dot, last = text.rpartition(".")
    if not dot or "/" in text:
        return nearest(text, known)
    return f" (did you mean '{module}:{'FACTORY' if last == 'py' else last}'?)"


def _import_model(text: str) -> nn.Module:
    """What the factory of a module returns; the module may lie in the current folder."""
    name, _, attribute = text.partition(":")
    require(bool(name and attribute), "MODEL", text, EXPECTED)
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(name)
    except Exception as error:  # the user's code can fail in any way
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        where = (
            f"there is no module {missing!r} installed or in {Path.cwd()}"
            if missing is not None and f"{name}.".startswith(f"{missing}.")
            else _describe(error)
        )
        raise ValueError(f"MODEL {text!r} could not be imported: {where}") from error
    names = [each for each in vars(module) if not each.startswith("_")]
    require(
        hasattr(module, attribute),
        "MODEL",
        text,
        f"a factory that {name} has{nearest(attribute, names)}",
    )
    return _call(text, getattr(module, attribute))


def _call(text: str, factory: Callable[[], Any]) -> nn.Module:
    require(
        callable(factory) and not isinstance(factory, nn.Module),
        "MODEL",
        f"{text} (a {type(factory).__name__})",
        "a function without arguments that returns the model",
    )
    try:
        model = factory()
    except Exception as error:
        raise ValueError(f"MODEL {text!r} could not be made: {_describe(error)}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"MODEL {text!r} must return a torch module, got a {type(model).__name__}")
    return model


def _describe(error: Exception) -> str:
    """An error in the user's code, and where it is."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = (
        f"{error.filename}, line {error.lineno}"
        if isinstance(error, SyntaxError)
        else f"{last.filename}, line {last.lineno}"
    )
    return f"{type(error).__name__}: {error} ({where})"


def open_weights(path: Path) -> dict[str, Tensor]:
    """Tensors by name of a ``.safetensors`` file, or of a ``.pt``/``.pth`` file that holds nothing
    but tensors.
    """
    require(
        path.is_file(), "--weights", str(path), "a .safetensors, .pt or .pth file that is there"
    )
    require(
        path.suffix in (".safetensors", ".pt", ".pth"),
        "--weights",
        str(path),
        "a .safetensors, .pt or .pth file",
    )
    try:
        if zipfile.is_zipfile(path):
            require_bounded(path)
        found = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except (
        SafetensorError,
        UnpicklingError,
        RuntimeError,
        ValueError,
        EOFError,
        OSError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        zipfile.BadZipFile,
    ) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"--weights {path} must be a whole file of tensors alone, got {reason}"
        ) from error
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]
    tensors = isinstance(found, Mapping) and all(
        isinstance(value, Tensor) for value in found.values()
    )
    require(tensors, f"--weights {path}", type(found).__name__, "tensors by name: a state_dict")
    return dict(found)


def _fill(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Load the weights, and refuse them unless all are there, fit and are finite."""
    own = model.state_dict()
    lists = {
        "missing": [
            name for name in own if name not in tensors and not name.endswith("num_batches_tracked")
        ],
        "unexpected": [name for name in tensors if name not in own],
        "of another shape": [
            name for name in own if name in tensors and own[name].shape != tensors[name].shape
        ],
    }
    wrong = "; ".join(f"{what}: {_some(names)}" for what, names in lists.items() if names)
    require(not wrong, f"--weights {path}", wrong, "those of the model")
    bad = [
        name
        for name, value in tensors.items()
        if value.is_floating_point() and not value.isfinite().all()
    ]
    require(not bad, f"--weights {path}", f"NaN or infinity in {_some(bad)}", "finite")
    model.load_state_dict(tensors, strict=False)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

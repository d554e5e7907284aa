"""A network by its name: one that ships, the user's own ``package.module:factory`` (the only way to
have code imported), or one of timm, torchvision or transformers; and a file of weights.
"""

import hashlib
import importlib
import re
import sys
import traceback
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from driftfilter.app import models
from driftfilter.app.images.arrays import require_bounded
from driftfilter.app.images.files import digest
from driftfilter.app.networks.libraries import (
    make_timm,
    make_torchvision,
    open_huggingface,
    open_tokenizer,
)
from driftfilter.app.networks.transform import OPTIONS, Transform, change_transform
from driftfilter.app.readers.fit import Tokens
from driftfilter.app.readers.stored import Preparation
from driftfilter.app.samples import open_sample
from driftfilter.base.checks import nearest, require

EXPECTED = (
    "the name of a shipped network, or package.module:factory, timm:NAME, torchvision:NAME or "
    "hf:FOLDER"
)
FOLDERS = ("hf", "huggingface")  # prefixes of a folder, which has its weights
LIBRARIES = ("timm", "torchvision")  # prefixes of a name, which needs weights
GEOMETRY = {  # of the networks of ``models``; else none
    "resnet18_tiny": Transform(64, 64),
    "vit_s8_tiny": Transform(64, 64),
    "resnet50_imagenet": Transform(256, 224),
}


class NamedNetwork(NamedTuple):
    """A network in evaluation mode; one of images takes [n, 3, h, w] in [0, 1] and normalises
    inside, after the geometry of ``transform``.
    """

    name: str
    module: nn.Module
    weights: str  # sha256 of their file, or of a folder's network; without a file, of the tensors
    transform: Transform = Transform()
    tokens: Tokens | None = None  # of a network of texts
    outputs: str = "all"  # which of its logits are looked at

    @property
    def prepare(self) -> Preparation | None:
        """What is done to samples before the network gets them; None: nothing."""
        return self.tokens or self.transform.fit

    @property
    def has_transform(self) -> bool:
        """Whether samples are changed before the network sees them."""
        return self.transform != Transform() or self.tokens is not None

    def describe_inputs(self) -> str:
        """What is done to samples, in words."""
        return str(self.transform) if self.tokens is None else "texts by its own tokenizer"


class _Entry(NamedTuple):
    """The parts of ``NAME=WEIGHTS,OPTION=VALUE``."""

    name: str
    weights: Path | None
    options: dict[str, str]

    def __str__(self) -> str:
        weights = "" if self.weights is None else f"={self.weights.stem}"
        return self.name + weights + "".join(f",{key}={each}" for key, each in self.options.items())


def split_models(text: str) -> tuple[str, ...]:
    """The entries of a list ``A,B=WEIGHTS,resize=256,C``, each once: an option of the transform
    belongs to the network before it.
    """
    entries = re.split(rf",(?!(?:{'|'.join(OPTIONS)})=)", text)
    return tuple(dict.fromkeys(entries))


def open_model(text: str, weights: Path | None = None) -> NamedNetwork:
    """The network that ``NAME[=WEIGHTS][,OPTION=VALUE]...`` names, ready to be adapted.

    ``weights`` is the file if the text has none. Options are the fields of ``Transform``.
    """
    entry = _parse_entry(text, weights)
    prefix, colon, rest = entry.name.partition(":")
    if colon and prefix in (*FOLDERS, *LIBRARIES):
        require(bool(rest), "MODEL", text, EXPECTED)
        network, transform = _open_foreign(prefix, rest, entry)
    else:
        network, transform = _open_own(entry)
    if entry.weights is not None:
        _fill(network, open_weights(entry.weights), entry.weights)
    weights_hash = _hash(entry, network)
    try:
        transform = change_transform(transform, entry.options)
    except ValueError as error:
        raise ValueError(f"MODEL {text!r}: {error}") from error
    tokens = open_tokenizer(Path(rest)) if prefix in FOLDERS else None
    return NamedNetwork(str(entry), transform.wrap(network).eval(), weights_hash, transform, tokens)


def _parse_entry(text: str, weights: Path | None) -> _Entry:
    first, *parts = text.split(",")
    options = {}
    for part in parts:
        key, sign, value = part.partition("=")
        known = bool(sign and value) and key in OPTIONS
        require(known, "MODEL", text, f"NAME=WEIGHTS,OPTION=VALUE with options {list(OPTIONS)}")
        options[key] = value
    name, sign, path = first.partition("=")
    if first.partition(":")[0] in FOLDERS and ":" in first:  # a folder may have any name
        name, sign, path = first, "", ""
        require(weights is None, "weights", str(weights), f"left out: {name} has its own")
    require(bool(path) or not sign, "MODEL", text, "NAME=WEIGHTS with a file of weights")
    require(not path or weights is None, "weights", str(weights), f"left out: MODEL is {text!r}")
    return _Entry(name, Path(path) if path else weights, options)


def _open_foreign(prefix: str, rest: str, entry: _Entry) -> tuple[nn.Module, Transform]:
    """A network of a library: with its weights if it is a folder, else without."""
    if prefix in FOLDERS:
        return open_huggingface(entry.name, Path(rest))
    require(
        entry.weights is not None,
        "MODEL",
        entry.name,
        f"given with a file of its weights, as in {entry.name}=weights.safetensors (nothing is "
        "downloaded, and a network without weights is no source)",
    )
    assert entry.weights is not None
    if prefix == "timm":
        return make_timm(rest)
    return make_torchvision(rest, entry.weights.name)


def _open_own(entry: _Entry) -> tuple[nn.Module, Transform]:
    """A factory's network, or one of ``models``: with weights if it ships with them and no others
    are given.
    """
    if ":" in entry.name:
        return _import_model(entry.name), Transform()
    name, known = entry.name, list(models.ARCHITECTURES)
    require(name in known, "MODEL", name, f"{EXPECTED}; there are {known}{_guess(name, known)}")
    for key in ("mean", "deviation"):
        value = entry.options.get(key)
        require(value is None, key, value, f"left out: {name} normalises by itself")
    network = models.load(name) if entry.weights is None else models.build(name)
    return network, GEOMETRY.get(name, Transform())


def _hash(entry: _Entry, network: nn.Module) -> str:
    """What tells one set of weights from another (``NamedNetwork.weights``)."""
    prefix, _, rest = entry.name.partition(":")
    if entry.weights is not None:
        return hashlib.sha256(entry.weights.read_bytes()).hexdigest()
    if prefix in FOLDERS:
        parts = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
        return digest([path for name in parts if (path := Path(rest) / name).is_file()])
    if not rest:
        with open_sample(f"{prefix}.safetensors") as shipped:
            return hashlib.sha256(shipped.read_bytes()).hexdigest()
    found = hashlib.sha256()
    for name, tensor in network.state_dict().items():
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def _guess(text: str, known: list[str]) -> str:
    """What a name without a colon may be."""
    module, dot, last = text.rpartition(".")
    if not dot or "/" in text:
        return nearest(text, [*known, *OPTIONS])
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
    require(path.is_file(), "weights", str(path), "a .safetensors, .pt or .pth file that is there")
    require(
        path.suffix in (".safetensors", ".pt", ".pth"),
        "weights",
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
            f"weights {path} must be a whole file of tensors alone, got {reason}"
        ) from error
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]
    tensors = isinstance(found, Mapping) and all(
        isinstance(value, Tensor) for value in found.values()
    )
    require(tensors, f"weights {path}", type(found).__name__, "tensors by name: a state_dict")
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
    require(not wrong, f"weights {path}", wrong, "those of the model")
    bad = [
        name
        for name, value in tensors.items()
        if value.is_floating_point() and not value.isfinite().all()
    ]
    require(not bad, f"weights {path}", f"NaN or infinity in {_some(bad)}", "finite")
    model.load_state_dict(tensors, strict=False)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

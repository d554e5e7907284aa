"""Published classes beside our presets: methods of a checkout of mariodoebler/test-time-adaptation,
which the user has and which runs as it is.

``peer_NAME`` is the method of ``classification/cfgs/cifar10_c/NAME.yaml`` with the settings written
there. Of their files only those are imported that the method asks for. A package they import at the
top, but which this machine cannot import, is a placeholder in the meantime: its names may be
imported and inherited from, and calling one is an error that names the package.
"""

import ast
import copy
import hashlib
import inspect
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, final
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.base.checks import nearest, require

PREFIX = "peer_"
# Their own modules, and the packages of others that they import.
OWN = ("conf", "methods", "models", "utils", "datasets", "augmentations")
OTHERS = (
    "einops",
    "iopath",
    "open_clip",
    "packaging",
    "PIL",
    "robustbench",
    "timm",
    "torchvision",
    "tqdm",
    "webdataset",
)
CONFIGS = "cfgs/cifar10_c"
SIZE = 32  # of the images their settings are for


class PeerPrediction(NamedTuple):
    """Classes [n] that a peer predicts without an update."""

    labels: Tensor


@final
class Peer:
    """A published method on a copy of a network, with what the bench asks of an adapter."""

    events: tuple[()] = ()  # it has no alarms

    def __init__(self, method: Any) -> None:
        self._method = method

    def __call__(self, images: Tensor) -> Tensor:
        """Log-probabilities [n, k] of a batch in [0, 1] [n, 3, 32, 32], which it adapts to.

        It gets a copy: their code may write into what it is given.
        """
        with _without_gpu():
            logits: Tensor = self._method(images.clone())
        return logits.detach().clone().log_softmax(-1)

    def predict(self, images: Tensor) -> PeerPrediction:
        """Its prediction without an update (their ``forward_sliding_window``), by a copy of it."""
        logits = copy.deepcopy(self._method).forward_sliding_window([images.clone()])
        return PeerPrediction(logits.argmax(-1))

    def reset(self) -> None:
        """Back to the source, as their code does it."""
        self._method.reset()


@final
@dataclass(frozen=True)
class Checkout:
    """A folder with a checkout of their repository."""

    path: Path

    def __post_init__(self) -> None:
        for name in ("conf.py", "methods", "utils/registry.py", CONFIGS):
            found = self.root / name
            require(
                found.exists(),
                "peers",
                str(self.path),
                f"a checkout of mariodoebler/test-time-adaptation, with {found}",
            )

    @property
    def root(self) -> Path:
        """Their code."""
        return self.path / "classification"

    @cached_property
    def version(self) -> dict[str, str | None]:
        """Commit, if the folder is a git checkout, and a hash of the files of code and settings."""
        files = sorted([*self.root.rglob("*.py"), *(self.root / CONFIGS).glob("*.yaml")])
        digest = hashlib.sha256()
        for file in files:
            digest.update(f"{file.relative_to(self.root).as_posix()}\n".encode())
            digest.update(file.read_bytes())
        return {"commit": _read_commit(self.path), "files_sha256": digest.hexdigest()}

    def configure(self, name: str, options: Mapping[str, Any], batch: int) -> Any:
        """Their settings of ``peer_name`` with these options and batch size: a ``CfgNode``."""
        known = sorted(path.stem for path in (self.root / CONFIGS).glob("*.yaml"))
        peers = [f"{PREFIX}{each}" for each in known]
        asked = f"{PREFIX}{name}"
        require(name in known, "preset", asked, f"one of {peers}{nearest(asked, peers)}")
        with _open(self.root):
            config = import_module("conf").cfg.clone()
        config.defrost()
        config.merge_from_file(str(self.root / CONFIGS / f"{name}.yaml"))
        config.TEST.BATCH_SIZE = batch
        for key, value in options.items():
            _set(config, f"option of {asked}", key, value)
        config.freeze()
        return config

    def describe(self, name: str, options: Mapping[str, Any], batch: int) -> str:
        """What determines the method, as one line of JSON."""
        settings = json.loads(json.dumps(_as_dict(self.configure(name, options, batch))))
        return "peer " + json.dumps({"method": name, **self.version, "config": settings})

    def build(
        self,
        name: str,
        options: Mapping[str, Any],
        network: nn.Module,
        classes: int,
        batch: int,
        seed: int,
        source: df.SourceData | None,
    ) -> Peer:
        """Their method on a copy of the network.

        Their code draws from the random numbers of torch, numpy and Python that all share: they
        start at the seed here. Where it reads source images from its own data folder it is given
        ``source``.
        """
        config = self.configure(name, options, batch)
        method, module = self._load(str(config.MODEL.ADAPTATION))
        model = copy.deepcopy(network)
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the generator that their augmentations use
        random.seed(seed)
        if hasattr(module, "get_source_loader"):
            model.model_preprocess = None  # type: ignore[assignment]
            module.__dict__["get_source_loader"] = _give_source(f"{PREFIX}{name}", source)
        with _without_gpu():
            return Peer(_allow_inputs(method(config, model, classes)))

    def _load(self, registered: str) -> tuple[Any, ModuleType]:
        """The class that their registry would find by this name, and its module."""
        for file in sorted((self.root / "methods").glob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and node.name.lower() == registered.lower():
                    with _open(self.root):
                        module = import_module(f"methods.{file.stem}")
                    return getattr(module, node.name), module
        raise ValueError(
            f"{self.root / 'methods'} must have a class for MODEL.ADAPTATION, got {registered!r}"
        )


def open_checkout(path: str) -> Checkout:
    """The checkout in a folder; an error names what is missing there, or on this machine."""
    require(Path(path).is_dir(), "peers", path, "a folder")
    checkout = Checkout(Path(path))
    with _open(checkout.root):
        import_module("conf")
    return checkout


def _read_commit(path: Path) -> str | None:
    command = ["git", "-C", str(path), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        top, commit = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.split("\n")[:2]
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit if Path(top).resolve() == path.resolve() else None


def _as_dict(config: Any) -> Any:
    """The settings as plain dictionaries."""
    return (
        {key: _as_dict(each) for key, each in config.items()}
        if isinstance(config, dict)
        else (config)
    )


def _set(config: Any, argument: str, key: str, value: Any) -> None:
    """Change one setting: ``SECTION.KEY``, or ``KEY`` if only one section has it."""
    leaves = [
        (section, name)
        for section, node in config.items()
        if isinstance(node, dict)
        for name in node
    ]
    found = [leaf for leaf in leaves if key in (".".join(leaf), leaf[1])]
    written = [".".join(leaf) for leaf in found or leaves]
    require(len(found) == 1, argument, key, f"one of {written}{nearest(key, written)}")
    ((section, name),) = found
    old = config[section][name]
    if isinstance(old, float) and type(value) is int:
        value = float(value)
    require(type(value) is type(old), f"{argument}: {key}", value, f"like {old!r}")
    config[section][name] = value


def _allow_inputs(method: Any) -> Any:
    """The method, whose ``loss_calculation`` may be given the inputs: RoTTA's takes none, and their
    code gives them to it unless precision is mixed.
    """
    calculate = getattr(method, "loss_calculation", None)
    if calculate is not None and not inspect.signature(calculate).parameters:
        method.loss_calculation = lambda *_: calculate()
    return method


def _give_source(name: str, source: df.SourceData | None) -> Any:
    """What stands for their ``get_source_loader``: batches of the samples of ``--source``."""

    def get_source_loader(*_: Any, batch_size: int, num_samples: int = -1, **__: Any) -> Any:
        require(source is not None, f"source of {name}", None, "given: --source FILE")
        assert source is not None
        inputs = source.inputs
        require(isinstance(inputs, Tensor), f"source of {name}", type(inputs), "one tensor")
        assert isinstance(inputs, Tensor)
        images = inputs[: len(inputs) if num_samples < 0 else num_samples]
        labels = torch.zeros(len(images)) if source.labels is None else source.labels[: len(images)]
        return None, list(zip(images.split(batch_size), labels.split(batch_size), strict=True))

    return get_source_loader


@contextmanager
def _without_gpu() -> Iterator[None]:
    """On a machine without a GPU ``tensor.cuda()``, which CMF's code calls, gives the tensor."""
    if torch.cuda.is_available():
        yield
    else:
        with patch.object(Tensor, "cuda", lambda self, *_, **__: self):
            yield


@contextmanager
def _open(root: Path) -> Iterator[None]:
    """Their modules can be imported inside, and are gone from ``sys.modules`` outside, as are the
    placeholders; modules of the user that have the same names are put back.
    """
    placeholders = _Placeholders(_find_missing())
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if _top(name) in OWN}
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.path.insert(0, str(root))
    sys.meta_path.insert(0, placeholders)
    # Their ``methods/__init__`` imports every method: the package is here without it.
    methods = ModuleType("methods")
    methods.__path__ = [str(root / "methods")]
    sys.modules["methods"] = methods
    try:
        yield
    except ModuleNotFoundError as error:
        at = "a file of" if _top(error.name or "") in OWN else "a package for"
        raise ValueError(f"peers: {at} {root} is missing: {error.name}") from error
    finally:
        sys.meta_path.remove(placeholders)
        sys.path.remove(str(root))
        sys.dont_write_bytecode = written
        for name in list(sys.modules):
            if _top(name) in OWN or _top(name) in placeholders.reasons:
                del sys.modules[name]
        sys.modules.update(hidden)


def _top(name: str) -> str:
    return name.partition(".")[0]


def _find_missing() -> dict[str, str]:
    """The packages of others that this machine cannot import, and why not."""
    missing = {}
    for name in OTHERS:
        try:
            import_module(name)
        except Exception as error:  # of whatever kind: a package may be there and broken
            missing[name] = f"{type(error).__name__}: {error}"
    return missing


class _Placeholders(MetaPathFinder, Loader):
    """Finds a placeholder for these packages and all their modules."""

    def __init__(self, reasons: dict[str, str]) -> None:
        self.reasons = reasons

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if _top(name) in self.reasons else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _PlaceholderModule(spec.name, self.reasons[_top(spec.name)])

    def exec_module(self, module: ModuleType) -> None:
        pass


class _PlaceholderModule(ModuleType):
    """Has every name, as a placeholder."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name)
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        return _make_placeholder(self.__name__, name, self._reason)


class _PlaceholderType(type):
    """A class to be named and inherited from; an instance of it there is not."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _make_placeholder(cls.__module__, f"{cls.__name__}.{name}", cls._reason)

    def __call__(cls, *_: object, **__: object) -> Any:
        raise ImportError(
            f"the peer uses {cls._asked}, and this machine cannot import "
            f"{_top(cls._asked)} ({cls._reason})"
        )


def _make_placeholder(module: str, name: str, reason: str) -> Any:
    if name.rpartition(".")[2].startswith("__"):
        raise AttributeError(name)
    body = {"__module__": module, "_reason": reason, "_asked": f"{module}.{name}"}
    return _PlaceholderType(name, (), body)

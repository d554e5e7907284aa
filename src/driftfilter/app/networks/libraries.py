"""Networks of timm, torchvision and transformers, from local files alone: nothing is downloaded."""

import importlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from driftfilter.app.networks.transform import Size, Transform
from driftfilter.app.readers.fit import Tokens
from driftfilter.app.readers.stored import Arrays
from driftfilter.base.checks import nearest, require

# What a preprocessor_config.json calls its interpolation, by PIL's numbers.
RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
TOKENS = 256  # of a text at most
HEADS = {
    "ForImageClassification": "AutoModelForImageClassification",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
}


def import_package(name: str, text: str) -> Any:
    """The package that a model ``text`` needs."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a package that does not fit torch fails in any way
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            reason = f"which is not installed: pip install {name}"
        else:
            reason = f"which could not be imported: {type(error).__name__}: {error}"
        raise ValueError(f"MODEL {text!r} needs {name}, {reason}") from error


def make_timm(name: str) -> tuple[nn.Module, Transform]:
    """An untrained network of timm, and the transform its configuration has."""
    timm = import_package("timm", f"timm:{name}")
    known = timm.list_models()
    base = name.partition(".")[0]
    require(base in known, "MODEL", f"timm:{name}", f"one that timm has{nearest(base, known)}")
    try:
        network = timm.create_model(name, pretrained=False)
    except RuntimeError as error:  # a tag that is not there
        raise ValueError(f"MODEL 'timm:{name}' could not be made: {error}") from error
    found = timm.data.resolve_data_config({}, model=network)
    crop = (int(found["input_size"][-2]), int(found["input_size"][-1]))
    share = float(found.get("crop_pct") or 1.0)
    resize: Size = math.floor(min(crop) / share)
    if found.get("crop_mode") == "squash":
        resize = (math.floor(crop[0] / share), math.floor(crop[1] / share))
    return network, Transform(
        resize,
        crop[0] if crop[0] == crop[1] else crop,
        tuple(found["mean"]),
        tuple(found["std"]),
        found.get("interpolation", "bilinear"),
    )


def make_torchvision(name: str, weights: str) -> tuple[nn.Module, Transform]:
    """An untrained classifier of torchvision, and the transform of the published weights whose file
    has the name ``weights``, else of those that torchvision takes by default.
    """
    models = import_package("torchvision", f"torchvision:{name}").models
    known = models.list_models(module=models)
    require(
        name in known,
        "MODEL",
        f"torchvision:{name}",
        f"a classifier that torchvision has{nearest(name, known)}",
    )
    published = models.get_model_weights(name)
    alike = [each for each in published if each.url.rpartition("/")[2] == weights]
    found = (alike[0] if alike else published.DEFAULT).transforms()
    return models.get_model(name, weights=None), Transform(
        found.resize_size[0],
        found.crop_size[0],
        tuple(found.mean),
        tuple(found.std),
        found.interpolation.value,
    )


class Logits(nn.Module):
    """The logits [n, k] of a network of transformers, whose output holds more."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        return self.network(*inputs, **named).logits  # type: ignore[no-any-return]


def open_huggingface(text: str, folder: Path) -> tuple[nn.Module, Transform]:
    """A classifier from a folder with config.json and model.safetensors, and the transform of its
    preprocessor_config.json: none if it has no such file.
    """
    for name in ("config.json", "model.safetensors"):
        there = (folder / name).is_file()
        require(there, "MODEL", text, f"a folder with config.json and model.safetensors ({name})")
    kinds = _read(folder / "config.json").get("architectures") or []
    head = next((HEADS[end] for end in HEADS for kind in kinds if str(kind).endswith(end)), None)
    require(head is not None, f"architectures of {text}", kinds, f"one that ends in {list(HEADS)}")
    transformers = import_package("transformers", text)
    try:
        network, report = getattr(transformers, str(head)).from_pretrained(
            str(folder),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # transformers fails in many ways on a folder that is damaged
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"MODEL {text!r} could not be opened: {type(error).__name__}: {reason}"
        ) from error
    wrong = {key: sorted(map(str, report[key])) for key in ("missing_keys", "mismatched_keys")}
    require(not any(wrong.values()), f"weights of {text}", wrong, "those of its config.json")
    return Logits(network), _read_transform(folder / "preprocessor_config.json")


def open_tokenizer(folder: Path) -> Tokens | None:
    """The tokenizer of a folder, None if it has none: texts are cut at what its network takes."""
    if not (folder / "tokenizer.json").is_file():
        return None
    transformers = import_package("transformers", f"hf:{folder}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    longest = _read(folder / "config.json").get("max_position_embeddings", TOKENS)

    def encode(texts: list[str]) -> Arrays:
        found = tokenizer(
            texts,
            padding=True,
            truncation=True,
            max_length=min(int(longest), int(tokenizer.model_max_length), TOKENS),
            return_tensors="np",
        )
        return {name: np.asarray(array, np.int64) for name, array in found.items()}

    return Tokens(str(folder), encode)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON, got {error}") from error
    require(isinstance(found, dict), str(path), type(found).__name__, "a JSON object")
    return found  # type: ignore[no-any-return]


def _read_transform(path: Path) -> Transform:
    if not path.is_file():
        return Transform()
    found = _read(path)
    scaled = found.get("do_normalize", True)
    return Transform(
        *_read_geometry(found),
        tuple(found["image_mean"]) if scaled and "image_mean" in found else None,
        tuple(found["image_std"]) if scaled and "image_std" in found else None,
        RESAMPLE.get(found.get("resample", 2), "bilinear"),
    )


def _read_geometry(found: Mapping[str, Any]) -> tuple[Size | None, Size | None]:
    """What pictures are resized to, and the crop. A "crop_pct", as ResNet and ConvNeXt have it, is
    the share that is cropped: the size is then what is left, but from 384 pixels on there is no
    crop and pictures lose their proportions.
    """
    size, share = _read_size(found.get("size")), found.get("crop_pct")
    crop = _read_size(found.get("crop_size")) if found.get("do_center_crop") else None
    if not found.get("do_resize", True):
        return None, crop
    if size is None or share is None:
        return size, crop
    side = size if isinstance(size, int) else min(size)
    if "do_center_crop" not in found and side >= 384:
        return (side, side), None
    return int(side / share), crop or side


def _read_size(found: Any) -> Size | None:
    """The shorter side, or height and width; a bare number is a square."""
    if isinstance(found, Mapping):
        if "shortest_edge" in found:
            return int(found["shortest_edge"])
        return int(found["height"]), int(found["width"])
    return None if found is None else (int(found), int(found))

"""Networks of timm, torchvision and transformers: by stand-ins of their shape, and by the packages
themselves if they are there.
"""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import driftfilter as df
from driftfilter.app.networks.libraries import _read_transform
from driftfilter.app.networks.load_model import NamedNetwork, open_model, split_models
from driftfilter.app.networks.transform import Transform

MEAN, STD = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)


def build() -> nn.Module:
    layers = (nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(4, 5)).eval()


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A trained network, whose weights lie in the current folder."""
    monkeypatch.chdir(tmp_path)
    trained = build()
    save_file(trained.state_dict(), "w.safetensors")
    torch.save(trained.state_dict(), "old-1234.pth")
    return trained


def make_timm(**changes: Any) -> Any:
    found = {
        "input_size": (3, 224, 224),
        "interpolation": "bicubic",
        "mean": MEAN,
        "std": STD,
        "crop_pct": 0.95,
        "crop_mode": "center",
        **changes,
    }

    def create_model(name: str, pretrained: bool) -> nn.Module:
        assert not pretrained
        if name.endswith(".none"):
            raise RuntimeError("Invalid pretrained tag (none)")
        return build()

    data = SimpleNamespace(resolve_data_config=lambda given, model: found)
    return SimpleNamespace(
        list_models=lambda: ["resnet18", "vit"], create_model=create_model, data=data
    )


def make_torchvision() -> Any:
    def publish(url: str, side: int) -> Any:
        shown = {"resize_size": [side], "crop_size": [224], "mean": MEAN, "std": STD}
        transforms = SimpleNamespace(**shown, interpolation=SimpleNamespace(value="bilinear"))
        return SimpleNamespace(url=url, transforms=lambda: transforms)

    class Published(list[Any]):
        DEFAULT = publish("somewhere/new-5678.pth", 232)

    def get_model(name: str, weights: None) -> nn.Module:
        return build()

    published = Published([publish("somewhere/old-1234.pth", 256), Published.DEFAULT])
    models = SimpleNamespace(
        list_models=lambda module: ["resnet18"],
        get_model=get_model,
        get_model_weights=lambda name: published,
    )
    return SimpleNamespace(models=models)


def agrees(opened: NamedNetwork, trained: nn.Module) -> bool:
    """Whether it is the trained network after (x - mean) / deviation."""
    images = torch.rand(2, 3, 8, 8)
    mean, deviation = (torch.tensor(each).view(3, 1, 1) for each in (MEAN, STD))
    return torch.allclose(opened.module(images), trained((images - mean) / deviation), atol=1e-6)


def test_timm_has_a_transform_of_its_own(
    weights: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "timm", make_timm())
    opened = open_model("timm:resnet18.a1=w.safetensors")
    assert opened.transform == Transform(235, 224, MEAN, STD, "bicubic")
    assert opened.name == "timm:resnet18.a1=w"
    assert agrees(opened, weights)
    squashed = {"input_size": (3, 64, 32), "crop_pct": 1.0, "crop_mode": "squash"}
    monkeypatch.setitem(sys.modules, "timm", make_timm(**squashed))
    changed = open_model("timm:vit=w.safetensors,interpolation=nearest")
    assert changed.transform == Transform((64, 32), (64, 32), MEAN, STD, "nearest")
    assert changed.name == "timm:vit=w,interpolation=nearest"


def test_torchvision_has_the_transform_of_the_file(
    weights: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", make_torchvision())
    old = open_model("torchvision:resnet18=old-1234.pth")
    assert old.transform == Transform(256, 224, MEAN, STD)
    assert agrees(old, weights)
    assert open_model("torchvision:resnet18", Path("w.safetensors")).transform.resize == 232


@pytest.mark.usefixtures("weights")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("timm:resnet18", "MODEL must be given with a file of its weights, as in timm:resnet18="),
        ("timm:resnet81=w.safetensors", "one that timm has .did you mean 'resnet18'"),
        ("timm:vit.none=w.safetensors", "could not be made: Invalid pretrained tag"),
        ("timm:=w.safetensors", "MODEL must be the name of a shipped network"),
        ("timm:vit=", "MODEL must be NAME=WEIGHTS"),
        ("timm:vit=w.safetensors,reszie=3", "MODEL must be NAME=WEIGHTS,OPTION=VALUE"),
        ("timm:vit=w.safetensors,crop=x", "MODEL 'timm:vit=.*': crop must be pixels"),
        ("torchvision:resnet19=w.safetensors", "torchvision has .did you mean 'resnet18'"),
        ("resnet20,mean=imagenet", "mean must be left out: resnet20 normalises by itself"),
        ("reszie=256", "did you mean 'resize'"),
    ],
)
def test_mistakes_are_named(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", make_timm())
    monkeypatch.setitem(sys.modules, "torchvision", make_torchvision())
    with pytest.raises(ValueError, match=message):
        open_model(text)


@pytest.mark.usefixtures("weights")
def test_weights_are_given_once() -> None:
    with pytest.raises(ValueError, match="weights must be left out: MODEL is"):
        open_model("resnet20=w.safetensors", Path("w.safetensors"))


@pytest.mark.usefixtures("weights")
@pytest.mark.parametrize("name", ["timm", "torchvision"])
def test_a_package_that_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(module: str) -> Any:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(ValueError, match=f"needs {name}, which is not .*: pip install {name}"):
        open_model(f"{name}:resnet18=w.safetensors")


def test_options_belong_to_the_network_before_them() -> None:
    text = "resnet20,a.b:c=w.pt,resize=256,mean=1/2/3,wrn28_10=w.safetensors,resnet20"
    assert split_models(text) == (
        "resnet20",
        "a.b:c=w.pt,resize=256,mean=1/2/3",
        "wrn28_10=w.safetensors",
    )


# Folders of transformers


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = build()

    def forward(self, pixel_values: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.inner(pixel_values), loss=None)


def make_transformers(network: nn.Module, missing: tuple[str, ...] = ()) -> Any:
    def from_pretrained(folder: str, **given: Any) -> Any:
        assert (given["local_files_only"], given["trust_remote_code"]) == (True, False)
        return network, {"missing_keys": missing, "mismatched_keys": ()}

    return SimpleNamespace(
        AutoModelForImageClassification=SimpleNamespace(from_pretrained=from_pretrained)
    )


def write_folder(path: Path, kind: str = "ViTForImageClassification") -> None:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": [kind]}))
    save_file({"a": torch.ones(1)}, path / "model.safetensors")


def test_a_folder_has_weights_and_transform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Classifier().eval()
    monkeypatch.setitem(sys.modules, "transformers", make_transformers(network))
    write_folder(tmp_path / "net")
    plain = open_model(f"hf:{tmp_path}/net")
    assert plain.transform == Transform()
    assert next(iter(df.select(plain.module, df.Head()))).endswith("inner.4.weight")
    settings = {"size": {"shortest_edge": 256}, "crop_size": 224, "do_center_crop": True}
    settings |= {"image_mean": MEAN, "image_std": STD, "resample": 3}
    (tmp_path / "net" / "preprocessor_config.json").write_text(json.dumps(settings))
    opened = open_model(f"huggingface:{tmp_path}/net")
    assert opened.transform == Transform(256, (224, 224), MEAN, STD, "bicubic")
    assert agrees(opened, network.inner)
    assert opened.weights == plain.weights
    for name in ("tokenizer_config.json", "config.json"):  # with others the logits are others
        text = {"architectures": ["ViTForImageClassification"], "hidden_act": "relu"}
        (tmp_path / "net" / name).write_text(json.dumps(text))
        changed = open_model(f"hf:{tmp_path}/net")
        assert changed.weights != plain.weights
        plain = changed


@pytest.mark.parametrize(
    ("settings", "resize", "crop"),
    [
        ({"size": 224, "crop_pct": 0.875, "resample": 3}, 256, 224),  # ResNet-50's, as published
        ({"size": {"shortest_edge": 224}, "crop_pct": 0.875}, 256, 224),
        ({"size": {"shortest_edge": 384}, "crop_pct": 1.0}, (384, 384), None),
        (
            {"size": 224, "crop_pct": 0.9, "do_center_crop": True, "crop_size": 224},
            248,
            (224, 224),
        ),
        ({"size": 224}, (224, 224), None),
        ({"size": 224, "crop_pct": 0.875, "do_resize": False}, None, None),
    ],
)
def test_share_that_is_cropped(
    tmp_path: Path, settings: dict[str, Any], resize: Any, crop: Any
) -> None:
    """By the rules of transformers' ConvNextImageProcessor and PoolFormerImageProcessor."""
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(settings))
    found = _read_transform(path)
    assert (found.resize, found.crop) == (resize, crop)


def test_folders_that_are_no_classifier_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headless = make_transformers(Classifier(), missing=("classifier.weight",))
    monkeypatch.setitem(sys.modules, "transformers", headless)
    write_folder(tmp_path / "encoder", "BertModel")
    write_folder(tmp_path / "headless")
    cases = {
        "nowhere": "MODEL must be a folder with config.json and model.safetensors",
        "encoder": r"architectures of .* must be one that ends in .*got \['BertModel'\]",
        "headless": "weights of .* must be those of its config.json, got .*classifier.weight",
    }
    for name, message in cases.items():
        with pytest.raises(ValueError, match=message):
            open_model(f"hf:{tmp_path}/{name}")


# The packages themselves


def load_package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        pytest.skip(f"{name} cannot be imported: {error}")


@pytest.mark.slow
def test_timm_itself(tmp_path: Path) -> None:
    timm = load_package("timm")
    trained = timm.create_model("resnet18.a1_in1k", pretrained=False).eval()
    save_file(trained.state_dict(), tmp_path / "w.safetensors")
    opened = open_model(f"timm:resnet18.a1_in1k={tmp_path}/w.safetensors,mean=none,deviation=none")
    assert (opened.transform.resize, opened.transform.crop) == (235, 224)
    images = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(opened.module(images), trained(images))


@pytest.mark.slow
def test_torchvision_itself(tmp_path: Path) -> None:
    models = load_package("torchvision").models
    torch.save(models.resnet18(weights=None).state_dict(), tmp_path / "w.pth")
    opened = open_model(f"torchvision:resnet18={tmp_path}/w.pth")
    assert (opened.transform.resize, opened.transform.crop) == (256, 224)


@pytest.mark.slow
def test_transformers_itself(tmp_path: Path) -> None:
    transformers = load_package("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=64, vocab_size=50, num_labels=3)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    opened = open_model(f"hf:{tmp_path}/bert")
    words = {"input_ids": torch.randint(0, 50, (4, 7))}
    assert df.adapt(opened.module)(words).shape == (4, 3)

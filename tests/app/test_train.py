"""benchmarks/train.py on a few images: it learns, goes on where it stopped, and writes what
``models.load`` reads.
"""

import pickle
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from driftfilter.app import models, streams
from driftfilter.app.machine import choose_machine
from driftfilter.app.networks.load_model import open_model
from driftfilter.app.readers.fit import Fit

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import train


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty of the shipped images."""
    path = tmp_path_factory.mktemp("images") / "images.npz"
    shipped = streams.sample_images()
    pixels = (255 * shipped.images[:40]).round().byte().permute(0, 2, 3, 1).numpy()
    np.savez(path, images=pixels, labels=shipped.labels[:40].numpy())
    return path


def _command(images: Path, out: Path, *more: str) -> list[str]:
    data = ["--data", str(images), "--test", str(images), "--out", str(out)]
    return ["resnet20", *data, "--batch", "20", "--epochs", "2", "--device", "cpu", *more]


def test_stopped_and_gone_on_it_gives_the_weights_of_one_run(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = tmp_path / "whole.safetensors", tmp_path / "parts.safetensors"
    train.main(_command(images, whole))
    train.main(_command(images, parts, "--stop-after", "1"))
    assert not parts.exists()
    train.main(_command(images, parts))
    printed = capsys.readouterr().out
    assert "goes on after epoch 1" in printed
    assert "expect some 0.921" in printed
    one, two = load_file(whole), load_file(parts)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    network = models.load("resnet20", whole)
    assert not any(module.training for module in network.modules())
    head = network.get_parameter("head.weight")
    assert torch.equal(head, one["head.weight"])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as Tiny-ImageNet's, with three classes of two pictures, and one of each to test."""
    root, random = tmp_path_factory.mktemp("tiny"), np.random.default_rng(0)
    (root / "val" / "images").mkdir(parents=True)
    lines = []
    for number, name in enumerate(("n02", "n01", "n03")):
        folder = root / "train" / name / "images"
        folder.mkdir(parents=True)
        (folder.parent / f"{name}_boxes.txt").write_text("")
        for place in (folder / "a.JPEG", folder / "b.JPEG", root / f"val/images/{number}.JPEG"):
            Image.fromarray(random.integers(0, 256, (64, 64, 3), np.uint8)).save(place)
        lines.append(f"{number}.JPEG\t{name}\t0\t0\t63\t63\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    return root


def test_tiny_imagenet_s_classes_are_numbered_by_name(tiny: Path) -> None:
    (images, labels), (shown, truth) = train.read_tiny(tiny)
    assert (images.shape, shown.shape) == ((6, 3, 64, 64), (3, 3, 64, 64))
    assert labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert truth.tolist() == [0, 1, 2]
    for number, label in enumerate((1, 0, 2)):
        pixels = np.asarray(Image.open(tiny / f"val/images/{number}.JPEG").convert("RGB"))
        assert np.array_equal(shown[label].permute(1, 2, 0), pixels)


def test_pictures_of_a_class_that_was_not_trained_are_refused(tiny: Path, tmp_path: Path) -> None:
    other = tmp_path / "tiny"
    shutil.copytree(tiny, other)
    shutil.rmtree(other / "train" / "n03")
    with pytest.raises(
        ValueError, match=r"classes of .*val must be those of train/, got \['n03'\]"
    ):
        train.read_tiny(other)


@pytest.mark.parametrize("name", ["resnet18_tiny", "vit_s8_tiny"])
def test_networks_of_tiny_imagenet_go_on_bit_for_bit(
    name: str,
    tiny: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A narrow residual network stands for the ResNet-18, which takes long."""
    narrow = partial(models.ResidualNetwork, (4, 4, 8), 1, nn.BatchNorm2d, False, 200)
    if name == "resnet18_tiny":
        monkeypatch.setitem(models.ARCHITECTURES, name, narrow)
    whole, parts = tmp_path / "whole.safetensors", tmp_path / "parts.safetensors"
    shared = [name, "--data", str(tiny), "--batch", "3", "--epochs", "2", "--device", "cpu"]
    train.main([*shared, "--out", str(whole)])
    train.main([*shared, "--out", str(parts), "--stop-after", "1"])
    train.main([*shared, "--out", str(parts)])
    assert "what to expect is not known" in capsys.readouterr().out
    one, two = load_file(whole), load_file(parts)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[each], two[each]) for each in one)
    opened = open_model(f"{name}={whole}")
    assert opened.module(torch.rand(1, 3, 64, 64)).shape == (1, 200)
    assert opened.transform.fit == Fit(64, 64)


def test_tiny_imagenet_in_arrays_has_200_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "tiny.npz", tmp_path / "weights.safetensors"
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (4, 64, 64, 3), np.uint8)
    np.savez(data, images=pixels, labels=np.array([0, 10, 199, 3]))
    command = ["vit_s8_tiny", "--data", str(data), "--out", str(out), "--epochs", "1"]
    train.main([*command, "--test", str(data), "--batch", "4", "--device", "cpu"])
    assert load_file(out)["head.weight"].shape == (200, 256)
    np.savez(data, images=pixels, labels=np.array([0, 10, 200, 3]))
    with pytest.raises(ValueError, match=r"labels must be .* from 0 to 200 - 1"):
        train.main([*command, "--test", str(data)])
    for test in (["--test", str(tmp_path)], []):
        with pytest.raises(SystemExit):
            train.main([*command, *test])
    capsys.readouterr()
    with pytest.raises(SystemExit):
        train.main([*command, "--data", str(tmp_path), "--test", str(data)])
    assert "left out for a folder of Tiny-ImageNet" in capsys.readouterr().err


def test_each_kind_has_its_own_optimizer() -> None:
    for name, kind in ("resnet20", torch.optim.SGD), ("vit_s4", torch.optim.AdamW):
        optimizer = train.make_optimizer(models.build(name), train.Training(name, lr=0.3))
        assert type(optimizer) is kind
        assert optimizer.param_groups[0]["lr"] == 0.3


def test_a_saved_training_of_another_kind_is_refused(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "weights.safetensors"
    train.main(_command(images, out, "--stop-after", "1"))
    with pytest.raises(ValueError, match=r"weights.safetensors.training must be of .*0.05"):
        train.main(_command(images, out, "--lr", "0.05"))


def test_the_loss_falls_on_images_seen_again(images: Path) -> None:
    pixels, labels = train.read(images, [])
    training = train.Training("resnet20", epochs=8, batch=40, lr=0.05)
    trainer = train.Trainer(training, choose_machine("cpu"))
    losses = [trainer.run_epoch(pixels, labels) for _ in range(8)]
    assert losses[-1] < 0.9 * losses[0]


def test_the_python_version_is_read_batch_by_batch(images: Path, tmp_path: Path) -> None:
    pixels, labels = train.read(images, [])
    flat = pixels.flatten(1).numpy()
    for number in (1, 2):
        some = slice(20 * (number - 1), 20 * number)
        batch = {"data": flat[some], "labels": labels[some].tolist()}
        (tmp_path / f"data_batch_{number}").write_bytes(pickle.dumps(batch))
    found = train.read(tmp_path, ["data_batch_1", "data_batch_2"])
    assert torch.equal(found[0], pixels)
    assert torch.equal(found[1], labels)


def test_augmented_images_are_cut_from_the_reflected_image() -> None:
    images = torch.arange(2 * 3 * 32 * 32).reshape(2, 3, 32, 32).remainder(251).byte()
    made = train.augment(images, torch.Generator().manual_seed(0))
    padded = torch.from_numpy(
        np.pad(images.numpy(), ((0, 0), (0, 0), (4, 4), (4, 4)), mode="reflect")
    )
    for one, large in zip(made, padded, strict=True):
        cuts = [large[:, i : i + 32, j : j + 32] for i in range(9) for j in range(9)]
        assert any(torch.equal(one, cut) or torch.equal(one, cut.flip(2)) for cut in cuts)


def test_the_rate_rises_and_falls_to_nothing() -> None:
    training = train.Training("resnet20", lr=0.2, warm_up=0.1)
    rates = [training.rate(part) for part in (0.05, 0.1, 0.55, 1.0)]
    assert rates == pytest.approx([0.1, 0.2, 0.1, 0.0])

"""benchmarks/train.py on a few images: it learns, goes on where it stopped, and writes what
``models.load`` reads.
"""

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from driftfilter.app import models, streams
from driftfilter.app.machine import choose_machine

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

"""The shipped networks and images are the ones they claim to be."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from driftfilter.app import models
from driftfilter.app.streams import sample_images
from small import refuses


def test_sample_images() -> None:
    images, labels = sample_images()
    assert (images.shape, labels.shape) == ((2000, 3, 32, 32), (2000,))
    assert labels.bincount().tolist() == [196, 198, 195, 199, 198, 185, 216, 193, 217, 203]
    assert [end.item() for end in images.aminmax()] == [0, 1]
    # genuine CIFAR-10 pixels
    torch.testing.assert_close(images.mean((0, 2, 3)), torch.tensor(models.MEAN), rtol=0, atol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "accuracy"), [("resnet20", 0.9208), ("resnet20_gn", 0.8578)])
def test_shipped_networks_reach_their_clean_accuracy(name: str, accuracy: float) -> None:
    """The reference is over 10,000 test images: on 500 of them it may differ by three standard
    errors.
    """
    network = models.load(name)
    images, labels = sample_images()
    with torch.no_grad():
        hits = (network(images[:500]).argmax(-1) == labels[:500]).float().mean().item()
    assert hits == pytest.approx(accuracy, abs=3 * (accuracy * (1 - accuracy) / 500) ** 0.5)
    assert not network.training


@pytest.mark.parametrize(
    ("name", "parameters", "affine"),
    [
        ("resnet20", 272_474, 1_568),
        ("resnet20_gn", 272_474, 1_568),
        ("resnet26_w32", 1_472_554, 4_032),
        ("wrn28_10", 36_479_194, 17_952),
        ("wrn16_4_gn", 2_748_890, 3_616),
        ("resnet26_gn", 366_938, 1_824),
        ("vit_s4", 6_350_090, 8_704),
        ("resnet18_tiny", 11_271_432, 9_600),
        ("vit_s8_tiny", 6_435_784, 8_704),
        ("resnet50_imagenet", 25_557_032, 53_120),
    ],
)
def test_architectures_have_the_published_sizes(name: str, parameters: int, affine: int) -> None:
    with torch.device("meta"):
        network = models.build(name)
    kinds = (nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)
    norms = [module for module in network.modules() if isinstance(module, kinds)]
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters
    assert sum(parameter.numel() for norm in norms for parameter in norm.parameters()) == affine


@pytest.mark.parametrize("name", ["vit_s4", "resnet26_gn", "wrn16_4_gn"])
def test_networks_without_batch_norm_give_a_row_a_sample(name: str) -> None:
    """Each sample's logits depend on that sample alone."""
    network, images = models.build(name), torch.rand(3, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(network(images)[1:2], network(images[1:2]), rtol=1e-4, atol=1e-5)


def test_features_and_head_make_the_logits() -> None:
    network = models.build("resnet20")
    assert isinstance(network, models.ResidualNetwork)
    images = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(network.head(network.features(images)), network(images))


test_unknown_names_are_refused = refuses(
    [
        ("resnet", r"model name must be one of \['resnet20', .*got 'resnet'"),
        ("wrn28_10", "model name must be one of .* or give its weights file, got 'wrn28_10'"),
    ],
    by=models.load,
)


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    save_file({"stem.weight": torch.zeros(16, 3, 3, 3)}, tmp_path / "some.safetensors")
    with pytest.raises(
        ValueError, match=r"weights must be those of resnet20, got .*missing \['norm.weight'"
    ):
        models.load("resnet20", tmp_path / "some.safetensors")


def test_weights_that_are_given_need_no_package(tmp_path: Path) -> None:
    network = models.build("resnet26_gn")
    save_file(network.state_dict(), tmp_path / "some.safetensors")
    found = models.load("resnet26_gn", tmp_path / "some.safetensors")
    torch.testing.assert_close(found.state_dict(), network.state_dict())

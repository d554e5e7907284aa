"""Where the data of streams come from."""

from __future__ import annotations

from importlib.resources import as_file, files
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Images(NamedTuple):
    """Images with the labels that only the evaluation sees."""

    images: Tensor  # [n, 3, 32, 32], RGB in [0, 1]
    labels: Tensor  # [n]


def sample_images() -> Images:
    """The first 2,000 images of the CIFAR-10 test set, which ship with the package."""
    with as_file(files("driftfilter.app") / "data" / "cifar10_test_first2000.npz") as path, np.load(path) as arrays:
        images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
    return Images((images.permute(0, 3, 1, 2).float() / 255).contiguous(), labels.long())

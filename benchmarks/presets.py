"""Accuracy of presets on corrupted images, the model reset for each corruption.

    python benchmarks/presets.py --data CORRUPTED.npz --labels TEST.npz [--model resnet20] [--batch 100] [--images 1000]
        [--corruptions gaussian_noise glass_blur fog jpeg_compression] [--presets source bn tent opgd_diag] [--source TRAIN.npz]

CORRUPTED.npz holds uint8 images [n, 32, 32, 3] under the name of each corruption, TEST.npz the labels; TRAIN.npz source
images for presets with a source posterior, which run without it otherwise.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import driftfilter as df
from driftfilter.app import models

CORRUPTIONS = ["gaussian_noise", "glass_blur", "fog", "jpeg_compression"]


def as_images(array: np.ndarray, device: str) -> Tensor:
    return torch.from_numpy(array).permute(0, 3, 1, 2).float().div(255).contiguous().to(device)


def accuracy(adapter: df.Adapter, images: Tensor, labels: Tensor, batch: int) -> float:
    adapter.reset()
    predicted = torch.cat([adapter(piece).argmax(-1) for piece in images.split(batch)])
    return (predicted == labels).double().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--labels", type=Path, required=True)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--model", default="resnet20", choices=list(models.ARCHITECTURES))
    parser.add_argument("--weights", type=Path, help="weights file for a network that does not ship with the package")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--corruptions", nargs="+", default=CORRUPTIONS)
    parser.add_argument("--presets", nargs="+", default=df.presets.names())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()

    model = models.load(arguments.model, arguments.weights).to(arguments.device)
    labels = torch.from_numpy(np.load(arguments.labels)["labels"][: arguments.images]).long().to(arguments.device)
    data = np.load(arguments.data)
    streams = {name: as_images(data[name][: arguments.images], arguments.device) for name in arguments.corruptions}
    source = None
    if arguments.source is not None:
        training = np.load(arguments.source)
        source = df.SourceData(as_images(training["images"], arguments.device), torch.from_numpy(training["labels"]).long())
    figures: dict[str, dict[str, float]] = {}
    print(f"{arguments.model}, batch {arguments.batch}, {arguments.images} images, {platform.machine()} {arguments.device},"
          f" torch {torch.__version__}, {datetime.date.today().isoformat()}\n")  # fmt: skip
    print(f"{'preset':<14}" + "".join(f"{name[:10]:>11}" for name in streams) + f"{'mean':>9}{'seconds':>9}")
    for name in arguments.presets:
        begun = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapter = df.adapt(model, name, data=source)
            scores = {stream: accuracy(adapter, images, labels, arguments.batch) for stream, images in streams.items()}
        figures[name] = {**scores, "mean": sum(scores.values()) / len(scores)}
        line = "".join(f"{score:>11.3f}" for score in scores.values())
        print(f"{name:<14}{line}{figures[name]['mean']:>9.4f}{time.perf_counter() - begun:>9.1f}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"model": arguments.model, "batch": arguments.batch, **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()

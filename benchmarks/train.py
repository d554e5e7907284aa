"""Train a source network from files you have, for `driftfilter bench` and `reproduce`.

    python benchmarks/train.py wrn28_10 --data cifar-10-batches-py --out wrn28_10.safetensors
    python benchmarks/train.py resnet20 --data train.npz --test test.npz --epochs 100 --out FILE
    python benchmarks/train.py resnet18_tiny --data tiny-imagenet-200 --epochs 100 --out FILE

CIFAR-10: --data is the folder of its python version (data_batch_1 to 5, and test_batch) or an .npz
of "images" [n, 32, 32, 3], 8 bits, and "labels" [n]; --test is the same for the test images, which
are only evaluated. Tiny-ImageNet (names that end in _tiny): --data has train/<wnid>/images/*.JPEG
and val/ with val_annotations.txt, and classes are numbered by name; or --data and --test are such
.npz, of images [n, 64, 64, 3].

Residual networks: SGD with Nesterov momentum .9, learning rate .1, weight decay 5e-4. Transformers:
AdamW, .001 and .05. A linear warm-up and a cosine to 0, random crops (by up to an eighth of the
height) and mirror images.

After every epoch all is written to OUT.training; the same command goes on from there and, on a CPU,
gives the weights that one run would have given. OUT is written at the end:
`models.load(name, Path(OUT))` reads it.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional

from driftfilter.app import models
from driftfilter.app.images.files import open_batch, open_images, picture, require_one_size
from driftfilter.app.machine import Machine, choose_machine
from driftfilter.app.readers.classes import number_classes
from driftfilter.app.readers.folders import find_pictures
from driftfilter.base.checks import require
from driftfilter.storage.atomic import atomic_file


@dataclass(frozen=True)
class Kind:
    """How a network is trained.

    ``expected``: accuracy on the 10,000 test images of the network of this name that the benchmarks
    use; None: this training was never run in full.
    """

    expected: float | None = None
    adam: bool = False  # AdamW, as transformers need, not SGD
    tiny: bool = False  # on Tiny-ImageNet, not CIFAR-10

    @property
    def classes(self) -> int:
        """Of the labels of an .npz."""
        return 200 if self.tiny else 10


KINDS = {
    "resnet20": Kind(0.921),
    "resnet20_gn": Kind(0.858),
    "resnet26_w32": Kind(0.935),
    "wrn16_4_gn": Kind(0.929),
    "wrn28_10": Kind(0.951),
    "vit_s4": Kind(adam=True),
    "resnet18_tiny": Kind(tiny=True),
    "vit_s8_tiny": Kind(adam=True, tiny=True),
}
BORDER = 8  # crops are off by up to this part of the height


@dataclass(frozen=True)
class Training:
    """What determines the weights, beside the images."""

    model: str
    epochs: int = 200
    batch: int = 128
    lr: float = 0.1
    decay: float = 5e-4
    warm_up: float = 0.05  # part of the steps
    seed: int = 0

    def rate(self, part: float) -> float:
        """Learning rate when this part of the steps is done: up to lr, then a cosine to 0."""
        if part < self.warm_up:
            return self.lr * part / self.warm_up
        done = (part - self.warm_up) / (1 - self.warm_up)
        return self.lr * (1 + math.cos(math.pi * done)) / 2


def read(path: Path, batches: Sequence[str], classes: int = 10) -> tuple[Tensor, Tensor]:
    """Images [n, 3, h, w], 8 bits, and labels [n] of an .npz or of these batches of a folder."""
    if path.is_dir():
        parts = [open_batch(path / name) for name in batches]
        images = np.concatenate([part[0] for part in parts])
        labels = np.concatenate([part[1] for part in parts])
    else:
        images, found = open_images(path, classes)
        if found is None:
            raise ValueError(f"{path} must be an .npz with 'labels', got none")
        labels = found
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels)


def read_tiny(root: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images [n, 3, h, w], 8 bits, and labels [n] of train/ and of val/."""
    parts = [find_pictures(root / name) for name in ("train", "val")]
    numbers = number_classes(root, {each.name for each in parts[0]}, None)
    unknown = sorted({each.name for each in parts[1]} - numbers.keys())
    require(not unknown, f"classes of {root / 'val'}", unknown[:3], "those of train/")
    require_one_size([each.path for part in parts for each in part])
    train, val = (
        (
            torch.from_numpy(np.stack([picture(each.path) for each in part])).permute(0, 3, 1, 2),
            torch.tensor([numbers[each.name] for each in part]),
        )
        for part in parts
    )
    return train, val


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Every image [n, 3, h, w] cut at random from itself with a reflected border, half of them
    mirrored.
    """
    n, _, height, width = images.shape
    border = height // BORDER
    padded = functional.pad(images.float(), (border,) * 4, mode="reflect").to(images.dtype)
    down, right, mirrored = (
        torch.randint(limit, (n, 1), generator=generator).to(images.device)
        for limit in (2 * border + 1, 2 * border + 1, 2)
    )
    rows = down + torch.arange(height, device=images.device)  # [n, h]
    columns = right + torch.arange(width, device=images.device)  # [n, w]
    columns = torch.where(mirrored.bool(), columns.flip(1), columns)
    first = torch.arange(n, device=images.device)[:, None, None]
    return padded[first, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def draw_batches(
    images: Tensor, labels: Tensor, training: Training, epoch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of an epoch, which depend on seed and epoch alone; what is left over at its end
    is not used, unless it is all.
    """
    generator = torch.Generator().manual_seed(training.seed * 100_003 + epoch)
    order = torch.randperm(len(labels), generator=generator)
    for number in range(count_steps(len(labels), training)):
        some = order[number * training.batch : (number + 1) * training.batch].to(images.device)
        yield augment(images[some], generator), labels[some]


def count_steps(count: int, training: Training) -> int:
    return max(1, count // training.batch)


def accuracy(network: nn.Module, images: Tensor, labels: Tensor, machine: Machine) -> float:
    """Share of images [n, 3, h, w] whose label is found; labels [n] are on the CPU."""
    network.eval()
    right = 0
    with torch.no_grad():
        for some, truth in zip(images.split(500), labels.split(500), strict=True):
            with machine.autocast():
                found = network(machine.pixels(some)).argmax(-1).cpu()
            right += int((found == truth).sum())
    return right / len(labels)


def make_optimizer(network: nn.Module, training: Training) -> torch.optim.Optimizer:
    """AdamW or SGD, by what the network is."""
    parameters, lr, decay = network.parameters(), training.lr, training.decay
    if KINDS[training.model].adam:
        return torch.optim.AdamW(parameters, lr, weight_decay=decay)
    return torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=decay, nesterov=True)


class Trainer:
    """A network and its optimizer between two epochs."""

    def __init__(self, training: Training, machine: Machine) -> None:
        torch.manual_seed(training.seed)
        self.training, self.machine, self.epoch = training, machine, 0
        self.network = machine.place(models.build(training.model))
        self.optimizer = make_optimizer(self.network, training)

    def run_epoch(self, images: Tensor, labels: Tensor) -> float:
        """Mean loss of one pass over the images."""
        training, machine = self.training, self.machine
        steps = count_steps(len(labels), training)
        total = torch.zeros((), device=machine.device)
        self.network.train()
        for number, (some, truth) in enumerate(draw_batches(images, labels, training, self.epoch)):
            done = (self.epoch * steps + number + 1) / (training.epochs * steps)
            self.optimizer.param_groups[0]["lr"] = training.rate(done)
            with machine.autocast():
                loss = functional.cross_entropy(self.network(machine.pixels(some)), truth)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += loss.detach()
        self.epoch += 1
        return total.item() / steps

    def save(self, path: Path, data: str) -> None:
        """Write all that the next epoch needs."""
        state = {
            "settings": self._settings(data),
            "epoch": self.epoch,
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        written = io.BytesIO()
        torch.save(state, written)
        with atomic_file(path) as file:
            file.write(written.getvalue())

    def load(self, path: Path, data: str) -> None:
        """Go on from what was saved, if it is of the same training."""
        state: dict[str, Any] = torch.load(
            path, map_location=self.machine.device, weights_only=True
        )
        expected = self._settings(data)
        require(
            state["settings"] == expected,
            str(path),
            state["settings"],
            f"of {expected}, or removed",
        )
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch = state["epoch"]

    def write_weights(self, path: Path) -> None:
        """Write what ``models.load`` reads, in float32."""
        tensors = {
            name: tensor.detach().cpu().contiguous()
            for name, tensor in self.network.state_dict().items()
            if not name.endswith("num_batches_tracked")
        }
        with atomic_file(path) as file:
            file.write(save(tensors))

    def _settings(self, data: str) -> str:
        return json.dumps({**asdict(self.training), "data": data})


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    kind = KINDS[options.model]
    names = ("model", "epochs", "batch", "seed")
    training = Training(
        **{name: getattr(options, name) for name in names},
        lr=options.lr or (0.001 if kind.adam else 0.1),
        decay=0.05 if kind.adam else 5e-4,
    )
    machine = choose_machine(options.device, options.precision)
    if kind.tiny and options.data.is_dir():
        (images, labels), (shown, truth) = read_tiny(options.data)
    else:
        batches = [f"data_batch_{number}" for number in range(1, 6)]
        images, labels = read(options.data, batches, kind.classes)
        shown, truth = read(options.test or options.data, ["test_batch"], kind.classes)
    data = f"{len(labels)} images, sum {int(images.sum())}"
    trainer, saved = Trainer(training, machine), Path(f"{options.out}.training")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if saved.exists():
        trainer.load(saved, data)
        print(f"goes on after epoch {trainer.epoch} from {saved}", flush=True)
    images, labels = images.to(machine.device), labels.to(machine.device)
    end = min(training.epochs, trainer.epoch + (options.stop_after or training.epochs))
    with machine.ready():
        while trainer.epoch < end:
            start = time.perf_counter()
            loss = trainer.run_epoch(images, labels)
            trainer.save(saved, data)
            seconds = time.perf_counter() - start
            share = accuracy(trainer.network, shown, truth, machine)
            print(
                f"epoch {trainer.epoch} of {training.epochs}: loss {loss:.3f}, test accuracy "
                f"{share:.4f}, {seconds:.1f} s",
                flush=True,
            )
        if trainer.epoch < training.epochs:
            print("stopped: the same command goes on", flush=True)
            return
        share = accuracy(trainer.network, shown, truth, machine)
    trainer.write_weights(options.out)
    expected = (
        "what to expect is not known: this training was never run in full here"
        if kind.expected is None
        else f"after all of the 50,000 training images expect some {kind.expected:.3f}"
    )
    print(f"wrote {options.out}: accuracy {share:.4f} on {len(truth):,} test images; {expected}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=KINDS)
    parser.add_argument("--data", type=Path, required=True, help="folder, or .npz of CIFAR-10")
    parser.add_argument("--test", type=Path, help="the same (default: --data, if a folder)")
    parser.add_argument("--out", type=Path, required=True, help=".safetensors to write")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, help="(default: .1, of transformers .001)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--precision", choices=("float32", "tf32", "bf16"))
    parser.add_argument("--stop-after", type=int, help="epochs of this call")
    options = parser.parse_args(arguments)
    tiny, folder = KINDS[options.model].tiny, options.data.is_dir()
    if options.test is not None and tiny and folder:
        parser.error("--test must be left out for a folder of Tiny-ImageNet, which has val/")
    if options.test is not None and tiny and options.test.is_dir():
        parser.error("--test must be an .npz for Tiny-ImageNet, as --data is")
    if options.test is None and not folder:
        parser.error("--test must be given if --data is no folder")
    return options


if __name__ == "__main__":
    main()

"""The device of tasks, its precision and its memory layout."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final, get_args

import torch
from torch import Tensor, nn

from driftfilter.app.bench.options import Precision
from driftfilter.app.bench.ranks import worker
from driftfilter.app.readers.stored import Samples
from driftfilter.base.checks import require

PRECISIONS = get_args(Precision)


@final
@dataclass(frozen=True)
class Machine:
    """A device and how it is used.

    float32: no TF32. tf32: for convolutions alone, as torch has it by itself. bf16: the model under
    autocast, TF32 as in tf32. On CUDA cuDNN tries its algorithms for every new shape. Images and
    weights lie channels last on CUDA and, in bf16, on a CPU, too.
    """

    device: torch.device
    precision: str = "float32"

    def __post_init__(self) -> None:
        require(self.precision in PRECISIONS, "precision", self.precision, f"one of {PRECISIONS}")

    @property
    def cuda(self) -> bool:
        """Whether it is an NVIDIA GPU, or one that torch takes for it."""
        return self.device.type == "cuda"

    @property
    def channels_last(self) -> bool:
        """Whether images and weights lie channels last: where that is the faster layout."""
        return self.cuda or self.precision == "bf16"

    def settings(self) -> dict[str, Any]:
        """What of it may change a result, JSON-ready."""
        return {
            "device": torch.cuda.get_device_name(self.device) if self.cuda else self.device.type,
            "precision": self.precision,
            "cudnn_benchmark": self.cuda,
            "layout": "channels last" if self.channels_last else "contiguous",
        }

    def place(self, module: nn.Module) -> nn.Module:
        """The module, moved to the device."""
        there = module.to(self.device)
        return there.to(memory_format=torch.channels_last) if self.channels_last else there  # type: ignore[call-overload]

    def pixels(self, images: Tensor) -> Tensor:
        """8-bit images [n, 3, h, w] as float32 in [0, 1] on the device."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return (images.to(self.device).float() / 255).contiguous(memory_format=layout)

    def inputs(self, samples: Samples) -> Samples:
        """A batch as a model takes it: 8 bits are pixels, all else stays as it is."""
        if isinstance(samples, dict):
            return {name: each.to(self.device) for name, each in samples.items()}
        return self.pixels(samples) if samples.dtype == torch.uint8 else samples.to(self.device)

    def peak_memory(self) -> dict[str, Any]:
        """Megabytes at most in use, and what they are measured on, JSON-ready."""
        if self.cuda:
            size = torch.cuda.max_memory_allocated(self.device)
            what = "the device in this task, the stream's images included"
        else:
            import resource

            size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            size *= 1 if sys.platform == "darwin" else 1024  # bytes there, else kilobytes
            what = "the process since it started"
        return {"peak_memory_mb": size / 1e6, "peak_memory_of": what}

    def autocast(self) -> torch.autocast:
        """Context for one call of the adapter.

        An autocast over many steps would keep a copy of every step's parameters.
        """
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Set the switches of the backends for the time of a block."""
        products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
        before = products.allow_tf32, convolutions.allow_tf32, convolutions.benchmark
        products.allow_tf32, convolutions.allow_tf32, convolutions.benchmark = (
            False,
            self.precision != "float32",
            self.cuda,
        )
        try:
            yield
        finally:
            products.allow_tf32, convolutions.allow_tf32, convolutions.benchmark = before


def choose_machine(device: str, precision: str | None = None) -> Machine:
    """The machine of these options.

    Device ``auto`` is the GPU if there is one. Precision None is tf32 on a GPU and float32 on a
    CPU, for which tf32 is the same.
    """
    found = torch.cuda.is_available()
    known = device in ("auto", "cpu") or (device.partition(":")[0] == "cuda" and found)
    require(known, "device", device, "there: auto, cpu or cuda")
    place = torch.device(
        "cuda" if device == "auto" and found else "cpu" if device == "auto" else device
    )
    # Each worker of a host takes its own GPU.
    if place.type == "cuda" and place.index is None and worker().workers > 1:
        place = torch.device("cuda", worker().local % torch.cuda.device_count())
    exact = place.type != "cuda" and precision in (None, "tf32")
    return Machine(place, "float32" if exact else precision or "tf32")

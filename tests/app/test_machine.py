"""Where tasks run: what each precision switches, and that it is switched back."""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from driftfilter.app.machine import PRECISIONS, Machine, choose_machine

CPU = torch.device("cpu")


def test_on_a_cpu_tf32_is_float32() -> None:
    assert (
        choose_machine("cpu")
        == choose_machine("cpu", "tf32")
        == choose_machine("cpu", "float32")
        == Machine(CPU, "float32")
    )
    assert choose_machine("cpu", "bf16") == Machine(CPU, "bf16")
    assert choose_machine("cpu").settings() == {
        "device": "cpu",
        "precision": "float32",
        "cudnn_benchmark": False,
        "layout": "contiguous",
    }


def test_on_a_gpu_tf32_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_machine("auto") == Machine(torch.device("cuda"), "tf32")
    assert choose_machine("cuda:1", "float32") == Machine(torch.device("cuda:1"), "float32")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    assert choose_machine("auto", "bf16").settings() == {
        "device": "H200",
        "precision": "bf16",
        "cudnn_benchmark": True,
        "layout": "channels last",
    }


@pytest.mark.parametrize("make", [partial(choose_machine, "cpu"), partial(Machine, CPU)])
def test_unknown_precisions_are_refused(make: Callable[[str], Machine]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"precision must be one of {PRECISIONS}")):
        make("fp8")


def _switches() -> tuple[bool, bool, bool]:
    cudnn = torch.backends.cudnn
    return torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_switches_are_set_for_a_task_and_as_they_were_afterwards(
    place: str, precision: str
) -> None:
    before = _switches()
    with Machine(torch.device(place), precision).ready():
        assert _switches() == (False, precision != "float32", place == "cuda")
    assert _switches() == before
    with pytest.raises(KeyError), Machine(torch.device(place), precision).ready():
        raise KeyError
    assert _switches() == before


@pytest.mark.parametrize("precision", PRECISIONS)
def test_only_bf16_is_autocast(precision: str) -> None:
    layer, inputs = nn.Linear(3, 2), torch.ones(4, 3)
    with Machine(CPU, precision).autocast():
        assert layer(inputs).dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
    assert layer(inputs).dtype == torch.float32


@pytest.mark.parametrize("precision", PRECISIONS)
def test_on_a_cpu_only_bf16_lies_channels_last(precision: str) -> None:
    machine = Machine(CPU, precision)
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    placed = machine.place(nn.Conv2d(3, 2, 3))
    for each in (machine.pixels(images), placed.get_parameter("weight")):
        last = each.is_contiguous(memory_format=torch.channels_last)
        assert last == (precision == "bf16")
    name = "channels last" if precision == "bf16" else "contiguous"
    assert machine.settings()["layout"] == name


def test_pixels_are_shares_of_255() -> None:
    images = torch.arange(256, dtype=torch.uint8).view(1, 4, 8, 8).expand(2, -1, -1, -1)[:, :3]
    pixels = Machine(CPU).pixels(images)
    assert pixels.is_contiguous()
    assert torch.equal(pixels, images.float() / 255)

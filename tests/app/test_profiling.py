"""``driftfilter inspect --profile``: the parts of a step."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.adapter.speed import Measure
from driftfilter.app import cli, profiling
from driftfilter.networks.network import Network

NETWORK = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )
"""


class Slow(nn.Module):
    """A network that takes its time in each pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(0.02)
        logits: Tensor = self.body(inputs)
        return logits


def test_time_goes_to_the_part_that_takes_it() -> None:
    batches = profiling.make_batches(32, (4,))
    found = profiling.profile(Slow().eval(), batches)
    assert set(found.parts) == set(profiling.PARTS)
    assert 20 <= found.parts["forward"] <= found.step
    assert found.parts["monitor"] > 0
    assert found.step == pytest.approx(sum(found.parts.values()))
    assert found.both is not None
    assert min(found.forward, found.both) >= 20


def test_what_is_within_the_monitor_is_its_own() -> None:
    watch = profiling._Stopwatch(torch.device("cpu"))
    inner = profiling._told(lambda: time.sleep(0.02), watch, "forward")
    outer = profiling._told(inner, watch, "monitor")
    other = profiling._told(inner, watch, "backward")
    outer()
    other()
    assert watch.spent["monitor"] >= 0.02
    assert watch.spent["forward"] >= 0.02
    assert watch.spent["backward"] < 0.02


def test_methods_are_there_and_are_put_back() -> None:
    before = [(kind, name, kind.__dict__[name]) for kind, name, _ in profiling._SEAMS]
    assert {part for _, _, part in profiling._SEAMS} <= set(profiling.PARTS)

    class Broken(Slow):
        def forward(self, inputs: Tensor) -> Tensor:
            if getattr(Network.__call__, "__name__", "") == "run":
                raise RuntimeError("in the middle")
            return super().forward(inputs)

    with pytest.raises(RuntimeError, match="in the middle"):
        profiling.profile(Broken().eval(), profiling.make_batches(32, (4,)))
    assert [(kind, name, kind.__dict__[name]) for kind, name, _ in before] == before


@pytest.mark.parametrize("preset", ["source", "tent", "opgd", "head_ekf", "t3a", "center"])
def test_every_kind_of_recipe_has_a_profile(preset: str) -> None:
    found = profiling.profile(Slow().eval(), profiling.make_batches(32, (4,)), preset)
    assert (found.both is None) == (preset in ("source", "t3a", "center"))
    lines = profiling.describe(found)
    assert f"a step of {preset!r}, batches of 32 on cpu" in lines[0]
    assert any(line.startswith("would help: ") for line in lines)


def test_random_images_are_of_one_domain() -> None:
    batches = profiling.make_batches(64, (3, 16, 16))
    assert not torch.equal(batches[0], batches[1])
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(784, 3))
    adapter = df.adapt(net.eval())
    for batch in batches:
        adapter(batch)
    assert len(adapter.domains) == 1


def test_advice_names_what_takes_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = dict.fromkeys(profiling.PARTS, 1.0) | {"monitor": 20.0, "forward": 50.0}
    found = profiling.Profile("driftfilter", 16, "cpu", parts, 40.0, 90.0, (), [])
    monkeypatch.setattr(profiling, "has_bfloat16", lambda _: True)
    cpu = torch.device("cpu")
    advice = profiling._advise(found, cpu)
    assert advice == [
        "speed='fast': the model in bfloat16",
        "monitor=None: no alarms (26% of the step)",
    ]
    fast = found._replace(measures=(Measure("bfloat16", True, ""),))
    slow = fast._replace(parts=parts | {"rest": 80.0, "monitor": 0.0})
    assert profiling._advise(slow, cpu)[0].startswith("larger batches, or update_every=")
    plain = fast._replace(parts=parts | {"monitor": 0.0})
    assert profiling._advise(plain, cpu) == [
        "nothing that is not on already; the network itself takes the time"
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "profiled_network.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_inspect_prints_a_profile_and_has_it_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    command = ("inspect", "profiled_network:make", "--input", "3,12,12", "--batch", "16")
    assert cli.main((*command, "--profile", "--speed", "fast")) == 0
    out = capsys.readouterr().out
    assert all(f"  {part} " in out for part in profiling.PARTS)
    assert "floor: forward pass alone" in out
    assert "for speed: channels last on (speed='fast')" in out
    assert cli.main((*command, "--profile", "--json")) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["profile"]
    assert set(found["parts"]) == set(profiling.PARTS)
    assert found["step"] == pytest.approx(sum(found["parts"].values()))
    assert cli.main((*command, "--json")) == 0
    assert json.loads(capsys.readouterr().out)["profile"] is None


@pytest.mark.usefixtures("folder")
def test_a_profile_needs_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(("inspect", "profiled_network:make", "--profile")) == 2
    assert "--profile must be with --input" in capsys.readouterr().err

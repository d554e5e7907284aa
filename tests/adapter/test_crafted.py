"""Checkpoints that were crafted: under a right checksum, with tensors or fields that no save would
write. All are refused, and the adapter is as it was.
"""

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

import driftfilter as df
from crafting import CHANGES, first, header_of, reseal, resum
from file_fuzzing import adapter, tensors_of, waiting
from fuzzing import batch, same

# Of each preset, tensors that are changed in every way.
TENSORS = {
    "driftfilter": (
        "belief.mean belief.covariance.values memory.centering memory.network.statistics "
        "memory.network.shift memory.prediction.slopes monitor.history monitor.recent"
    ),
    "tent": (
        "source.mean memory.inference.first memory.inference.count step seed calls monitor.pairs "
        "recipe monitor.told"
    ),
    "rotta": "memory.teacher buffer.label buffer.age buffer.uncertainty buffer.seen",
    "t3a": "memory.inference.supports memory.inference.entropies",
    "opgd": "belief.covariance.factor belief.covariance.rank belief.covariance.diagonal",
    "tttpp": "memory.source.mean memory.source.covariance memory.inference.velocity",
}
ROWS = ("a row less", "a row more", "no rows")
# The factor of a covariance and pairs of labels have as many rows or columns as came.
HARMLESS = {("belief.covariance.factor", rows) for rows in ROWS}
LARGE = ["driftfilter belief.mean", "tent source.mean", "tent belief.mean", "rotta belief.mean"]
HEADERS: dict[str, Any] = {
    "format": [None, "1", True, -1, 1.5, [], 0],
    "recipe": [None, [], 3, {}, "Recipe"],
    "adapter": [None, [], {"window": "9"}, {}],
    "model": [None, [], {}, {"architecture": 1}, {"weights": "", "architecture": "", "x": 1}],
    "notes": [None, [], "x", 3],
    "step": ["3", 4, [3], -1],
    "seed": ["0", 1, {}],
}


def made(preset: str, path: Path) -> bytes:
    one = copy.deepcopy(waiting(preset))
    one(batch(9, 2))
    df.save(one, path)
    return path.read_bytes()


def assert_refused(preset: str, path: Path, data: bytes) -> None:
    path.write_bytes(data)
    mine = copy.deepcopy(waiting(preset))
    before = tensors_of(mine)
    with pytest.raises(df.CheckpointError, match=re.escape(f"{path} was not loaded: ")):
        df.load(mine, path)
    assert same(tensors_of(mine), before)


def crafted(name: str, value: Tensor) -> Iterator[Tensor]:
    """All that may be done to a tensor, but for what leaves it as it was; of whole numbers another
    one may be right.
    """
    for change, make in CHANGES.items():
        other = make(value)
        right = other.dtype == value.dtype and not value.is_floating_point()
        another = right and change in ("NaN", "infinite")
        if not (another or (name, change) in HARMLESS or same(other, value)):
            yield other


@pytest.mark.parametrize("preset", TENSORS)
def test_tensors_of_another_kind_shape_or_value(preset: str, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    data = made(preset, path)
    tensors = load(data)
    for name in TENSORS[preset].split(" "):
        for other in crafted(name, tensors[name]):
            assert_refused(preset, path, reseal(data, {name: other}))


def test_labels_of_classes_that_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    for preset, name in (("rotta", "buffer.label"), ("tent", "monitor.pairs")):
        data = made(preset, path)
        for label in (-1, 77):
            other = load(data)[name].fill_(label)
            assert_refused(preset, path, reseal(data, {name: other}))


@pytest.mark.parametrize("case", LARGE)
def test_numbers_that_nothing_can_be_worked_out_with(case: str, tmp_path: Path) -> None:
    preset, name = case.split(" ")
    path = tmp_path / "state.safetensors"
    data = made(preset, path)
    assert_refused(preset, path, reseal(data, {name: first(3e38)(load(data)[name])}))


@pytest.mark.parametrize("name", HEADERS)
def test_fields_of_another_type(name: str, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    data = made("tent", path)
    for value in HEADERS[name]:
        if not (value is None and name in ("step", "seed")):
            assert_refused("tent", path, reseal(data, **{name: value}))


TOLD: dict[str, Callable[[str], str]] = {
    "batches": lambda text: re.sub(r'"batches": \d+', '"batches": "3"', text),
    "frozen": lambda text: text.replace('"frozen": false', '"frozen": 0'),
    "alarmed": lambda text: text.replace('"alarmed": []', '"alarmed": "x"'),
    "signals": lambda text: re.sub(r'"signals": \[[^]]*\]', '"signals": ["x"]', text),
    "lasting": lambda text: re.sub(r'"lasting": \{[^}]*\}', '"lasting": {"x": "y"}', text),
    "events": lambda text: text.replace('"events": []', '"events": [[1, 2]]'),
    "twice": lambda text: text.replace('"frozen": false', '"frozen": true, "frozen": false'),
    "unknown": lambda text: text.replace('"frozen"', '"melted"'),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_the_monitor_told(name: str, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    data = made("tent", path)
    text = bytes(load(data)["monitor.told"].tolist()).decode()
    other = TOLD[name](text)
    assert other != text
    assert_refused(
        "tent", path, reseal(data, {"monitor.told": torch.tensor(list(other.encode())).byte()})
    )


def test_names_that_stand_twice(tmp_path: Path) -> None:
    """Readers differ in which one of two they take."""
    path = tmp_path / "state.safetensors"
    data = made("tent", path)
    length = 8 + int.from_bytes(data[:8], "little")
    text = data[8:length]
    found = re.search(rb'"belief\.mean":\{[^}]*\},', text)
    assert found is not None
    twice = {
        "tensor": text.replace(found[0], found[0] * 2, 1),
        "field of a tensor": text.replace(b'"dtype":"F32"', b'"dtype":"F32","dtype":"F32"', 1),
        "header": text.replace(rb"{\"format\":1", rb"{\"format\":1,\"format\":1", 1),
        "inside": text.replace(rb"\"window\":9", rb"\"window\":9,\"window\":9", 1),
    }
    for other in twice.values():
        assert other != text
        changed = resum(other, data[length:])
        assert header_of(changed)["format"] == 1
        assert_refused("tent", path, changed)


@pytest.mark.parametrize("preset", TENSORS)
def test_tensors_that_are_not_there(preset: str, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    data = made(preset, path)
    needed = [
        name
        for name in TENSORS[preset].split(" ")
        if name.startswith(("belief", "source", "step", "seed", "recipe", "memory.inference.first"))
    ]
    for name in needed:
        assert_refused(preset, path, reseal(data, {name: None}))


def test_states_in_memory_are_held_to_the_same(tmp_path: Path) -> None:
    """``load_state_dict`` asks no questions about the model, but all about the tensors."""
    mine = copy.deepcopy(waiting("tent"))
    before, state = tensors_of(mine), dict(adapter("tent").state_dict())
    changes: dict[str, Callable[[Tensor], Tensor]] = {**CHANGES, "3e38": first(3e38)}
    for name, change in changes.items():
        with pytest.raises(ValueError, match=r"belief\.mean"):
            mine.load_state_dict({**state, "belief.mean": change(state["belief.mean"])})
        assert same(tensors_of(mine), before), name

"""A machine that uses an adapter in random ways, beside a shadow that sees only the calls that may
change it.

After every rule the two must be equal bit for bit: so predictions, refused batches, saves, loads
and copies leave no trace, in the state or in what comes later. Run at length by benchmarks/fuzz.py.
"""

import copy
import json
import pickle
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor, nn

import driftfilter as df
from driftfilter.base.tensors import as_text

CLASSES, SHAPE = 4, (3, 4, 4)
FEW: dict[str, dict[str, Any]] = {
    **{name: {"copies": 2} for name in ("cotta", "petal", "memo", "lora")},  # to be quick
    **{name: {"capacity": 9, "every": 6} for name in ("rotta", "note")},
}
GENTLE = {
    name: {"lr": 1e-4} for name in df.presets.FOR_BATCH_NORM
}  # what is warned about under group norm
Outcome = tuple[Tensor, ...] | str  # what a call has returned, or the error it has raised


def convolutional(channels: int, first: nn.Module, second: nn.Module) -> nn.Module:
    layers = nn.Conv2d(3, channels, 3), first, nn.ReLU(), nn.Flatten(), second
    return nn.Sequential(*layers, nn.Linear(4 * channels, CLASSES))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "batch_norm": lambda: convolutional(5, nn.BatchNorm2d(5), nn.BatchNorm1d(20)),
    "group_norm": lambda: convolutional(6, nn.GroupNorm(2, 6), nn.LayerNorm(24)),
    "linear": lambda: nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, CLASSES)),
}
HEADS = (
    "driftfilter",
    "source",
    "bn",
    "cotta",
    "petal",
    "memo",
    "lora",
    "t3a",
    "stad",
    "stad_vmf",
    "head_ekf",
    "head_bong",
)
CASES = [
    f"{model}-{name}"
    for model in MODELS
    for name in (HEADS if model == "linear" else df.presets.names())
]


def made(model: str) -> nn.Module:
    """In training mode, with gradients and with statistics that are not the initial ones."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = MODELS[model]().train()
        network(2 * torch.randn(32, *SHAPE) + 1).square().mean().backward()
    return network


def batch(size: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(size, *SHAPE, generator=torch.Generator().manual_seed(seed))


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything about a module that a caller could notice."""
    parameters = {
        name: (
            p.detach().clone(),
            None if p.grad is None else p.grad.clone(),
            p.requires_grad,
            p.data_ptr(),
        )
        for name, p in model.named_parameters()
    }
    buffers = {name: (buffer.clone(), id(buffer)) for name, buffer in model.named_buffers()}
    layers = {
        name: (layer.training, sorted(vars(layer)), len(layer._forward_hooks))
        for name, layer in model.named_modules()
    }
    return {**parameters, **buffers, **{f"layer {name}": value for name, value in layers.items()}}


def same(one: Any, other: Any) -> bool:
    """Bit for bit, as far as torch.equal goes; NaN (a loss that nothing has told) equals itself."""
    if isinstance(one, Tensor):
        alike = isinstance(other, Tensor) and one.dtype == other.dtype and one.shape == other.shape
        return alike and bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def require_probabilities(log_probabilities: Tensor, samples: int) -> None:
    assert log_probabilities.shape == (samples, CLASSES)
    assert not log_probabilities.isnan().any()
    torch.testing.assert_close(
        log_probabilities.exp().sum(-1), torch.ones(samples), rtol=0, atol=2e-6
    )


def require_proper(belief: df.Belief) -> None:
    """Finite, and positive definite or the point mass that it started as."""
    assert belief.mean.isfinite().all()
    dense = belief.covariance.apply(torch.eye(belief.dimension, dtype=belief.mean.dtype)).double()
    assert dense.isfinite().all()
    torch.testing.assert_close(dense, dense.T, rtol=1e-4, atol=1e-6 * dense.diagonal().max().item())
    if dense.any():
        assert torch.linalg.eigvalsh((dense + dense.T) / 2)[0] > 0


sizes = st.sampled_from([1, 2, 3, 5, 8, 17, 33])
seeds = st.integers(0, 5)
# Constant batches, tiny and large ones, and some whose squares are no longer finite.
scales = st.sampled_from([1.0, 1.0, 1.0, 1.0, 0.0, 1e-20, 1e4, 1e25, 1e38])
batches = st.builds(batch, sizes, seeds, scales)
calls = st.sampled_from(["forward", "update", "predict"])

BAD: dict[str, Callable[[], Any]] = {
    "NaN": lambda: batch(4, 0).index_fill(0, torch.tensor([2]), torch.nan),
    "infinite": lambda: batch(4, 0).index_fill(0, torch.tensor([0]), torch.inf),
    "no samples": lambda: batch(0, 0),
    "a scalar": lambda: torch.tensor(1.0),
    "channels": lambda: batch(4, 0)[:, :2],
    "flat": lambda: batch(4, 0).flatten(1),
    "integers": lambda: torch.ones(4, *SHAPE, dtype=torch.long),
    "complex": lambda: batch(4, 0).to(torch.complex64),
    "a word": lambda: "images",
    "nothing": lambda: (),
    "a list": lambda: [[1.0, 2.0]],
}
OWN = (
    "NaN",
    "infinite",
    "no samples",
    "a scalar",
    "a word",
    "nothing",
    "a list",
)  # in others the model may speak first


class Use(RuleBasedStateMachine):
    """Of one case; benchmarks and tests derive a class for each."""

    case = "batch_norm-driftfilter"
    seen: ClassVar[Counter[str]] = Counter()  # rules, and how calls ended; for reports

    @initialize(
        seed=st.integers(0, 2**40),
        every=st.sampled_from([1, 1, 2, 3]),
        window=st.sampled_from([0, 0, 4, 10]),
        least=st.sampled_from([0, 0, 6]),
    )
    def begin(self, seed: int, every: int, window: int, least: int) -> None:
        self.options: dict[str, Any] = {"seed": seed, "update_every": every, "window": window}
        self.options["least"] = least
        if df.presets.get(self.case.split("-")[1]).buffer is not None:  # which does all of this
            self.options = {"seed": seed}
        self.model = made(self.case.split("-")[0])
        self.before, self.random = snapshot(self.model), torch.get_rng_state()
        self.adapter, self.shadow = self.fresh(), self.fresh(made(self.case.split("-")[0]))
        # An adapter that was copied, and its state then.
        self.left: tuple[df.Adapter, dict[str, Tensor]] | None = None
        self.seen["examples"] += 1

    def fresh(self, model: nn.Module | None = None) -> df.Adapter:
        kind, preset = self.case.split("-")
        chosen: dict[str, Any] = FEW.get(preset, {}) | (
            GENTLE.get(preset, {}) if kind == "group_norm" else {}
        )
        data = df.SourceData(
            batch(8, 99), torch.arange(8) % CLASSES
        )  # those that have no use for it leave it
        return df.adapt(
            self.model if model is None else model, preset, data=data, **self.options, **chosen
        )

    def bits(self, adapter: df.Adapter) -> dict[str, Any]:
        state = {name: value.clone() for name, value in adapter.state_dict().items()}
        told = json.loads(as_text(state.pop("monitor.told")))
        # A batch that is refused leaves an event in the log, and nothing else.
        events = [event for event in told.pop("events") if event[1] != "not_finite"]
        return {**state, "told": repr((told, events))}

    def called(self, adapter: df.Adapter, method: str, inputs: Tensor) -> Outcome:
        """What a call returns; the inputs are the caller's, who writes to them afterwards."""
        own = inputs.clone()
        try:
            result = getattr(adapter, method)(own)
        except ValueError as error:
            self.seen[f"{method} refused"] += 1
            return str(error)
        self.seen[method] += 1
        own.fill_(torch.nan)
        if isinstance(result, df.Prediction):
            return result.log_probabilities, result.logit_variance
        return (
            (result,)
            if isinstance(result, Tensor)
            else (result.losses, result.weights, result.coefficients)
        )

    # Calls that may change the state

    @rule(inputs=batches)
    def step(self, inputs: Tensor) -> None:
        outcome = self.called(self.adapter, "forward", inputs)
        assert same(outcome, self.called(self.shadow, "forward", inputs))
        if not isinstance(outcome, str):
            require_probabilities(outcome[0], len(inputs))

    @rule(inputs=batches)
    def update(self, inputs: Tensor) -> None:
        assert same(
            self.called(self.adapter, "update", inputs), self.called(self.shadow, "update", inputs)
        )

    @rule()
    def reset(self) -> None:
        self.adapter.reset()
        self.shadow.reset()
        assert same(self.bits(self.adapter), self.bits(self.fresh()))
        assert same(
            self.called(self.adapter, "predict", batch(3, 7)),
            self.called(self.fresh(), "predict", batch(3, 7)),
        )

    @rule(inputs=batches, asked=batches)
    def predict_while_stepping(self, inputs: Tensor, asked: Tensor) -> None:
        """Another thread is answered from the state before the step or from that after it."""
        possible = [self.called(self.adapter, "predict", asked)]
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(
                lambda: [self.called(self.adapter, "predict", asked) for _ in range(3)]
            )
            self.step(inputs)
        possible.append(self.called(self.adapter, "predict", asked))
        assert all(any(same(answer, each) for each in possible) for answer in answers.result())

    # Calls that may not

    @rule(inputs=batches, apart=st.booleans())
    def predict(self, inputs: Tensor, apart: bool) -> None:
        outcome = self.called(self.adapter, "predict", inputs)
        if apart:
            with ThreadPoolExecutor(1) as pool:
                assert same(
                    pool.submit(self.called, self.adapter, "predict", inputs).result(), outcome
                )
        if not isinstance(outcome, str):
            require_probabilities(outcome[0], len(inputs))
            assert (outcome[1] >= 0).all()

    @rule(case=st.sampled_from(list(BAD)), method=calls)
    def refuse(self, case: str, method: str) -> None:
        # Torch's own, from within the model.
        errors = ValueError if case in OWN else (ValueError, RuntimeError, IndexError)
        with pytest.raises(errors):
            getattr(self.adapter, method)(BAD[case]())
        self.seen["bad batches refused"] += 1

    # Others in its place

    def replaced(self, other: df.Adapter) -> None:
        """The other goes on; the one that was there must stay as it is."""
        assert same(self.bits(other), self.bits(self.adapter))
        asked = batch(3, 8)
        assert same(
            self.called(other, "predict", asked), self.called(self.adapter, "predict", asked)
        )
        self.left, self.adapter = (self.adapter, self.bits(self.adapter)), other

    @rule(notes=st.dictionaries(st.text(max_size=3), st.integers(), max_size=1))
    def save_and_load(self, notes: dict[str, int]) -> None:
        other = self.fresh()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.safetensors"
            df.save(self.adapter, path, notes=notes)
            assert df.load(other, path) == notes
        self.seen["loads"] += 1
        self.replaced(other)

    @rule(used=st.booleans())
    def state_dict(self, used: bool) -> None:
        other = self.fresh()
        if used:
            other.update(batch(9, 3))
        other.load_state_dict(self.adapter.state_dict())
        self.replaced(other)

    @rule(way=st.sampled_from(["copy", "pickle"]))
    def copied(self, way: str) -> None:
        other = (
            copy.deepcopy(self.adapter)
            if way == "copy"
            else pickle.loads(pickle.dumps(self.adapter))
        )
        self.seen["copies"] += 1
        self.replaced(other)

    @rule(
        kept=st.floats(0, 1, exclude_max=True),
        place=st.floats(0, 1, exclude_max=True),
        damage=st.booleans(),
    )
    def load_damaged(self, kept: float, place: float, damage: bool) -> None:
        """Another adapter's file, with a bit changed or its end missing."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.safetensors"
            df.save(self.fresh(), path)
            data = bytearray(path.read_bytes())
            if damage:
                data[int(place * len(data))] ^= 1
            else:
                del data[int(kept * len(data)) :]
            path.write_bytes(data)
            with pytest.raises(df.CheckpointError, match="truncated or altered"):
                df.load(self.adapter, path)

    @invariant()
    def nothing_else_has_changed(self) -> None:
        if not hasattr(self, "model"):
            return
        self.seen["rules"] += 1
        assert same(self.bits(self.adapter), self.bits(self.shadow))
        assert same(snapshot(self.model), self.before)
        assert torch.equal(torch.get_rng_state(), self.random)
        require_proper(self.adapter.belief)
        if self.left is not None:
            assert same(self.bits(self.left[0]), self.left[1])


def machine(case: str) -> type[Use]:
    """For one case, with counts of its own."""
    return type(f"Use_{case}", (Use,), {"case": case, "seen": Counter()})

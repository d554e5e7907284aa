"""An exported network says what the adapter predicts."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import driftfilter as df
from driftfilter.adapter.export import build_adapted
from driftfilter.model.centering import CENTER, Centered, Known


def _network(norm: type[nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), norm(16), nn.ReLU(), nn.Linear(16, 4))
    for layer in model:
        if isinstance(layer, nn.BatchNorm1d):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            layer.running_mean.normal_(0, 0.1)
            layer.running_var.uniform_(0.5, 1.5)
    return model.eval()


def _batches(count: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(40, 5, generator=generator) * 1.5 + 0.5 for _ in range(count)]


def _adapted(model: nn.Module, recipe: df.Recipe) -> df.Adapter:
    adapter = df.adapt(model, recipe)
    for batch in _batches():
        adapter(batch)
    return adapter


RECIPES = {
    "layer norm": (nn.LayerNorm, df.presets.get("driftfilter", norms="other")),
    "source statistics": (
        nn.BatchNorm1d,
        replace(df.presets.get("tent", lr=0.05), statistics="source"),
    ),
    "running statistics": (
        nn.BatchNorm1d,
        replace(df.presets.get("tent"), statistics=df.RunningStatistics(0.3)),
    ),
    "head": (
        nn.BatchNorm1d,
        replace(df.presets.get("head_ekf"), statistics="source", prediction=df.Tempered(1.7)),
    ),
    "head without batch norm": (
        nn.LayerNorm,
        replace(df.presets.get("head_ekf"), prediction=df.Tempered(1.7)),
    ),
    "offsets": (nn.LayerNorm, df.presets.get("center", count=1.0)),
    "LoRA": (
        nn.LayerNorm,
        replace(df.presets.get("tent", lr=0.05), parameters=df.LoRA(2), statistics="source"),
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_state_dict_predicts_as_the_adapter_does(name: str, tmp_path: Path) -> None:
    norm, recipe = RECIPES[name]
    model, inputs = _network(norm), torch.randn(30, 5)
    source = {key: value.clone() for key, value in model.state_dict().items()}
    adapter = _adapted(model, recipe)
    expected = adapter.predict(inputs).log_probabilities
    if name == "running statistics":  # predict lets a batch into them: only what is carried counts
        carried = replace(recipe, statistics=df.RunningStatistics(0.0))
        frozen = df.adapt(model, carried)
        df.save(adapter, tmp_path / "state.safetensors")
        df.load(frozen, tmp_path / "state.safetensors", strict=False)
        expected = frozen.predict(inputs).log_probabilities
    for suffix in (".safetensors", ".pt"):
        path = tmp_path / f"model{suffix}"
        adapter.export(path, inputs[:3])
        own = load_file(path) if suffix == ".safetensors" else torch.load(path, weights_only=True)
        plain = _network(norm)
        plain.load_state_dict(own)
        with torch.no_grad():
            torch.testing.assert_close(plain(inputs).log_softmax(-1), expected, rtol=0, atol=1e-5)
            assert not torch.allclose(model(inputs).log_softmax(-1), expected, atol=1e-3)
    for key, value in model.state_dict().items():  # the user's model stays as it was
        assert torch.equal(value, source[key])


def test_offsets_are_those_of_centring_by_hand() -> None:
    """δ from the formula of Centering, for counts that are given."""
    adapter = df.adapt(_network(nn.LayerNorm), df.presets.get("center"))
    for batch in _batches():
        adapter(batch)
    snapshot = adapter.snapshot()
    assert snapshot.bound is not None
    centered = snapshot.bound.filter.logits
    assert isinstance(centered, Centered)
    known = Known.of(snapshot.current.memory[CENTER], torch.zeros(1, 4))
    sigma = min((float(known.sums[0]) / float(known.sums[1])) ** 0.5, 4.0)
    expected = torch.zeros(4, dtype=torch.float64)
    for counts in known.rounds:
        c = torch.as_tensor(counts, dtype=torch.float64)
        shares = (30 / 4 + c) / (30 + c.sum())
        expected += 0.75 * sigma * torch.log(shares * 4)
    needed = float(centered._needed(known, centered._trust(known.labels)))
    plain, moved = _network(nn.LayerNorm), build_adapted(adapter, _batches()[0])
    apart = plain.state_dict()["3.bias"] - moved.state_dict()["3.bias"]
    torch.testing.assert_close(apart.double(), needed * expected, rtol=1e-4, atol=1e-5)
    assert needed > 0


def test_what_an_export_cannot_hold_is_refused(tmp_path: Path) -> None:
    inputs = _batches()[0]
    cases = {
        "statistics": df.adapt(_network(), "tent"),
        "prototypes": df.adapt(_network(nn.LayerNorm), "t3a"),
    }
    for name, adapter in cases.items():
        adapter(inputs)
        with pytest.raises(ValueError, match=f"export: .*{name}"):
            adapter.export(tmp_path / "model.pt", inputs)
        assert not (tmp_path / "model.pt").exists()
    adapter = _adapted(_network(nn.LayerNorm), df.presets.get("driftfilter", norms="other"))
    with pytest.raises(ValueError, match="export: example"):
        adapter.export(tmp_path / "model.pt")
    with pytest.raises(ValueError, match="export: path"):
        adapter.export(tmp_path / "model.zip", inputs)


def test_onnx_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = _adapted(_network(nn.LayerNorm), df.presets.get("center"))
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs .*onnxscript: pip install .*\[onnx\]"):
        adapter.export(tmp_path / "model.onnx", _batches()[0])
    assert not (tmp_path / "model.onnx").exists()


def test_a_rule_with_draws_is_left_out_with_a_warning(tmp_path: Path) -> None:
    recipe = replace(df.presets.get("head_ekf"), statistics="source")
    adapter = _adapted(_network(), recipe)
    with pytest.warns(UserWarning, match="export: LinearizedGaussian"):
        adapter.export(tmp_path / "model.pt", _batches()[0])


@pytest.mark.slow
def test_onnx_predicts_as_the_adapter_does(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    adapter = _adapted(_network(nn.LayerNorm), df.presets.get("driftfilter", norms="other"))
    path, inputs = tmp_path / "model.onnx", torch.randn(7, 5)
    adapter.export(path, _batches()[0])
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    expected = adapter.predict(inputs).log_probabilities
    found = torch.from_numpy(found).log_softmax(-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

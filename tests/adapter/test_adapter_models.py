"""Adapters of many kinds of models: each is held against TENT written out with torch.optim, and
against the model itself.
"""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrizations

import driftfilter as df
from driftfilter.networks.layers import NORMS
from small import Written, conv

HEAD = df.Recipe(
    parameters=df.Head(), statistics="source", inference=df.Frozen()
)  # the model itself, through its features


class Patches(nn.Module):
    """A small vision transformer; ``batch_first`` says how its encoder takes the patches."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 1, nn.LayerNorm(8), enable_nested_tensor=False)
        self.embed, self.head, self.batch_first = nn.Linear(9, 8), nn.Linear(8, 3), batch_first

    def forward(self, images: Tensor) -> Any:
        patches = self.embed(images.reshape(len(images), -1, 9))
        hidden = self.encoder(patches if self.batch_first else patches.transpose(0, 1))
        return self.head(hidden.mean(1 if self.batch_first else 0))


def attend(own: Any, images: Tensor) -> Any:
    patches = own.embed(images.reshape(len(images), -1, 9))
    return own.head(own.norm(patches + own.attention(patches, patches, patches)[0]).mean(1))


def drop(own: Any, inputs: Tensor) -> Any:
    """Dropout and stochastic depth."""
    hidden = nn.functional.dropout(own.norm(own.stem(inputs)), 0.5, own.training)
    if not own.training or torch.rand(()) > 0.5:
        hidden = hidden + own.block(hidden).relu()
    return own.head(hidden)


class Words(nn.Module):
    """Token indices and a mask in, an object with logits or a dict of them out."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.words, self.norm, self.head, self.recurrent = (
            nn.Embedding(9, 8),
            nn.LayerNorm(8),
            nn.Linear(8, 3),
            recurrent,
        )
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        words, mask = self.words(input_ids), attention_mask.unsqueeze(-1)
        padding = attention_mask == 0
        hidden = (
            self.lstm(words)[0]
            if self.recurrent
            else self.encoder(words, src_key_padding_mask=padding)
        )
        logits = self.head((self.norm(hidden) * mask).sum(1) / mask.sum(1))
        return (
            {"logits": logits, "hidden": hidden}
            if self.recurrent
            else SimpleNamespace(logits=logits)
        )


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.norm, self.head = (
            nn.Linear(4, 6),
            nn.Linear(3, 6),
            nn.LayerNorm(6),
            nn.Linear(6, 3),
        )

    def forward(self, left: Tensor, right: Tensor) -> Any:
        return self.head(self.norm(self.left(left) + self.right(right)))


def backwards() -> nn.Module:
    """Registers its head first, and one norm under two names, which it uses twice."""
    norm = nn.LayerNorm(6)
    return Written(
        lambda own, x: own.head(own.again(own.last(own.norm(own.first(x)).tanh()))),
        head=nn.Linear(6, 3),
        norm=norm,
        first=nn.Linear(4, 6),
        last=nn.Linear(6, 6),
        again=norm,
    )


def volume() -> nn.Module:
    last = nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(6, 3)
    return nn.Sequential(nn.Conv3d(3, 6, 3), nn.BatchNorm3d(6), nn.ReLU(), *last)


def tabular(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), norm, nn.ReLU(), nn.Linear(6, 3))


def old_weight_norm() -> nn.Module:
    model = conv()
    with pytest.warns(FutureWarning):
        torch.nn.utils.weight_norm(model.get_submodule("0"))
    model(torch.zeros(2, 3, 6, 6))  # leaves a weight with a history behind
    return model


def under_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return conv()


def compiled() -> nn.Module:
    model: Any = torch.compile(conv(), backend="eager")
    assert isinstance(model, nn.Module)
    return model


def images(count: int = 8) -> Tensor:
    return torch.randn(count, 3, 6, 6)


def table(count: int = 8) -> Tensor:
    return torch.randn(count, 4)


def words(count: int = 8) -> dict[str, Tensor]:
    return {
        "attention_mask": torch.ones(count, 5).tril(3),
        "input_ids": torch.randint(0, 9, (count, 5)),
    }


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "table, batch norm": (lambda: tabular(nn.BatchNorm1d(6)), table),
    "table, RMS norm": (lambda: tabular(nn.RMSNorm(6)), table),
    "images, batch norm": (conv, images),
    "images, group norm": (lambda: conv(lambda: nn.GroupNorm(2, 6)), images),
    "images, instance norm": (lambda: conv(lambda: nn.InstanceNorm2d(6, affine=True)), images),
    "images, instance norm with statistics": (
        lambda: conv(lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True)),
        images,
    ),
    "one image": (conv, lambda: images(1)),
    "volumes": (volume, lambda: torch.randn(8, 3, 4, 4, 4)),
    "transformer": (Patches, images),
    "transformer, sequence first": (lambda: Patches(False), images),
    "attention": (
        lambda: Written(
            attend,
            embed=nn.Linear(9, 8),
            attention=nn.MultiheadAttention(8, 2, batch_first=True),
            norm=nn.LayerNorm(8),
            head=nn.Linear(8, 3),
        ),
        images,
    ),
    "LSTM": (lambda: Words(True), words),
    "text transformer": (lambda: Words(False), words),
    "two inputs": (Pair, lambda: (table(), torch.randn(8, 3))),
    "registered backwards, shared norm": (backwards, table),
    "dropout, stochastic depth": (
        lambda: Written(
            drop,
            stem=nn.Linear(4, 6),
            norm=nn.BatchNorm1d(6),
            block=nn.Linear(6, 6),
            head=nn.Linear(6, 3),
        ),
        table,
    ),
    "weight norm": (lambda: conv(wrap=parametrizations.weight_norm), images),
    "spectral norm": (lambda: conv(wrap=parametrizations.spectral_norm), images),
    "old weight norm": (old_weight_norm, images),
    "channels last": (
        lambda: conv().to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        lambda: images().contiguous(memory_format=torch.channels_last),
    ),
    "data parallel": (lambda: nn.DataParallel(conv()), images),
    "nested": (lambda: nn.Sequential(nn.Sequential(conv())), images),
    "compiled": (compiled, images),
    "made under inference mode": (under_inference_mode, images),
}
models = pytest.mark.parametrize("case", MODELS)


def setting(case: str) -> tuple[nn.Module, list[Any]]:
    torch.manual_seed(0)
    build, draw = MODELS[case]
    return build(), [draw() for _ in range(3)]


def given(model: nn.Module, inputs: Any) -> Any:
    """What a module says to inputs by name, by place, or to one."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def called(model: nn.Module, inputs: Any) -> Tensor:
    result = given(model, inputs)
    logits: Tensor = (
        result["logits"] if isinstance(result, dict) else getattr(result, "logits", result)
    )
    return logits


def ordinary(model: nn.Module) -> nn.Module:
    """The same module for the oracle: not compiled, of tensors that a graph may hold, in evaluation
    mode.
    """
    plain = getattr(model, "_orig_mod", model)
    with torch.inference_mode(False):
        for layer in plain.modules():
            for own, parameter in layer._parameters.items():
                if parameter is not None and parameter.is_inference():
                    layer._parameters[own] = nn.Parameter(parameter.clone())
            for own, buffer in layer._buffers.items():
                layer._buffers[own] = (
                    buffer.clone() if buffer is not None and buffer.is_inference() else buffer
                )
    result: nn.Module = plain.eval()
    return result


def tent(model: nn.Module, batches: list[Any], lr: float) -> tuple[list[Tensor], Tensor]:
    """Log-probabilities before each step and the parameters after all: Adam on the mean entropy,
    batch statistics.
    """
    norms = [layer for layer in model.modules() if isinstance(layer, NORMS)]
    for layer in norms:
        if isinstance(layer, _BatchNorm):
            layer.train()
            layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
    chosen = [parameter for layer in norms for parameter in layer.parameters()]
    optimizer, outputs = torch.optim.Adam(chosen, lr), []
    for batch in batches:
        logs = called(model, batch).log_softmax(-1)
        outputs.append(logs.detach())
        optimizer.zero_grad()
        (-(logs.exp() * logs).sum(-1).mean()).backward()
        optimizer.step()
    return outputs, torch.cat([parameter.detach().flatten() for parameter in chosen])


@models
def test_tent_is_tent(case: str) -> None:
    model, batches = setting(case)
    adapter = df.adapt(model, "tent", lr=1e-2)
    found = [given(adapter, batch) for batch in batches]
    expected, parameters = tent(ordinary(setting(case)[0]), batches, 1e-2)
    torch.testing.assert_close(
        (found, adapter.belief.mean), (expected, parameters), rtol=0, atol=2e-4
    )
    assert (
        adapter.belief.mean - df.adapt(model, "tent", lr=1e-2).belief.mean
    ).abs().max() > 1e-2  # it moved


@models
@pytest.mark.parametrize("recipe", ["source", HEAD], ids=["source", "head"])
def test_nothing_learned_is_the_model_in_evaluation_mode(
    case: str, recipe: str | df.Recipe
) -> None:
    model, batches = setting(case)
    adapter, reference = df.adapt(model, recipe), ordinary(setting(case)[0])
    for batch in batches:
        torch.testing.assert_close(
            given(adapter, batch), called(reference, batch).log_softmax(-1), rtol=0, atol=1e-5
        )


@models
@pytest.mark.parametrize("preset", ["opgd", "head_ekf", "stad_vmf"])
@pytest.mark.filterwarnings("ignore::driftfilter.NoInformationWarning")  # of one image
@pytest.mark.filterwarnings("ignore:centered prototypes")
def test_filters_with_a_covariance_run_and_replay(case: str, preset: str) -> None:
    runs = []
    for _ in range(2):
        model, batches = setting(case)
        adapter = df.adapt(model, preset)
        runs.append([given(adapter, batch) for batch in batches])
        assert (adapter.belief.covariance.variance() >= 0).all()
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    assert all(
        one.isfinite().all() and torch.allclose(one.exp().sum(1), torch.ones(len(one)))
        for one in runs[0]
    )


def test_output_picks_the_logits() -> None:
    class Several(Pair):
        def forward(self, left: Tensor, right: Tensor) -> Any:
            return left, super().forward(left, right)

    torch.manual_seed(0)
    model, inputs = Several(), (table(), torch.randn(8, 3))
    for recipe in ("source", HEAD):
        found = df.adapt(model, recipe, output=lambda result: result[1])(*inputs)
        torch.testing.assert_close(found, model(*inputs)[1].log_softmax(-1))


@pytest.mark.parametrize(
    "way",
    [torch.jit.script, lambda model: torch.jit.trace(model, images())],
    ids=["script", "trace"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_refused(way: Any) -> None:
    with pytest.raises(
        ValueError, match=r"adapt: model must be a module in Python: adapt it before torch.jit"
    ):
        df.adapt(way(conv().eval()), "tent")


# Which parameters


@pytest.mark.parametrize(
    "selection",
    [
        df.AllParameters(),
        df.ByName(("0.*", "*.bias")),
        df.Head(),
        df.NormAffine(),
    ],
    ids=str,
)
def test_a_gradient_step_on_any_selection_is_that_of_torch(selection: Any) -> None:
    model, batches = setting("images, batch norm")
    rule = df.GradientStep(df.SGD(0.1))
    recipe = df.Recipe(
        parameters=selection,
        statistics="source",
        observation=df.Gibbs(df.Entropy()),
        inference=rule,
    )
    adapter, reference = df.adapt(model, recipe), copy.deepcopy(model).eval()
    known = dict(reference.named_parameters())
    optimizer = torch.optim.SGD([known[name] for name in df.select(model, selection)], 0.1)
    for batch in batches:
        logs = reference(batch).log_softmax(-1)
        optimizer.zero_grad()
        (-(logs.exp() * logs).sum(-1).mean()).backward()
        optimizer.step()
        torch.testing.assert_close(
            adapter(batch), reference(batch).log_softmax(-1), rtol=0, atol=1e-5
        )


def test_lora_starts_at_the_model_and_learns() -> None:
    model, batches = setting("images, batch norm")
    rule = df.GradientStep(df.SGD(0.5))
    adapter = df.adapt(model, df.Recipe(parameters=df.LoRA(2), statistics="source", inference=rule))
    expected = model.eval()(batches[0]).log_softmax(-1)
    torch.testing.assert_close(
        adapter.predict(batches[0]).log_probabilities, expected, rtol=0, atol=1e-6
    )
    for batch in batches:
        adapter(batch)
    assert not torch.allclose(adapter.predict(batches[0]).log_probabilities, expected, atol=1e-4)

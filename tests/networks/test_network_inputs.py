"""What goes into and comes out of a network: structures, dtypes, memory formats, threads."""

import copy
import pickle
import subprocess
import sys
from collections import UserDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app import models
from small import assert_same


class Pair(nn.Module):
    """Words and a mask in, logits in some structure out."""

    def __init__(self, wrap: Callable[[Tensor], Any] = lambda logits: logits) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.norm, self.head, self.wrap = (
            nn.Embedding(7, 4),
            nn.LayerNorm(4),
            nn.Linear(4, 3),
            wrap,
        )

    def forward(self, ids: Tensor, mask: Tensor, temperature: float = 1.0) -> Any:
        hidden = (self.norm(self.words(ids)) * mask.unsqueeze(-1)).sum(1) / mask.sum(
            1, keepdim=True
        )
        return self.wrap(self.head(hidden) / temperature)


IDS = torch.tensor([[0, 1, 2], [3, 4, 4], [6, 5, 0], [1, 1, 1]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]]).double()


class Encoding(UserDict[str, Any]):
    """A mapping that is not a dict, as tokenizers return."""


INPUTS: dict[str, Any] = {
    "tuple": (IDS, MASK, 2.0),
    "list": [IDS, MASK, 2.0],
    "dict": {"mask": MASK, "ids": IDS, "temperature": 2.0},
    "mapping": Encoding(ids=IDS, mask=MASK, temperature=torch.tensor(2.0, dtype=torch.float64)),
}


@pytest.mark.parametrize("selection", [df.NormAffine(), df.AllParameters()], ids=str)
@pytest.mark.parametrize("kind", INPUTS)
def test_arguments_by_position_and_by_name(kind: str, selection: df.Selection) -> None:
    model = Pair().double()
    network = df.Network(model, selection)
    logits, pullback = network.pullback(network.mean(), INPUTS[kind])
    torch.testing.assert_close(logits, model(IDS, MASK, 2.0))
    parameters = [dict(model.named_parameters())[name] for name in network.shapes]
    cotangents, rows = torch.randn_like(logits), []
    for i in range(4):
        alone = model(IDS[i : i + 1], MASK[i : i + 1], 2.0)
        rows.append(
            torch.cat(
                [
                    each.flatten()
                    for each in torch.autograd.grad(alone, parameters, cotangents[i : i + 1])
                ]
            )
        )
    torch.testing.assert_close(
        (pullback(cotangents), pullback.total(cotangents)),
        (torch.stack(rows), torch.stack(rows).sum(0)),
    )


def test_layers_without_a_rule_with_named_inputs() -> None:
    class Odd(Pair):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.rand(3))

        def forward(self, ids: Tensor, mask: Tensor, temperature: float = 1.0) -> Any:
            return super().forward(ids, mask, temperature) * self.gain

    network = df.Network(Odd().double(), df.ByName(("gain",)))
    other = df.Network(Pair().double())
    cotangents = torch.randn(4, 3, dtype=torch.float64)
    plain = other(other.mean(), INPUTS["dict"])
    torch.testing.assert_close(
        network.pullback(network.mean(), INPUTS["dict"])[1](cotangents), cotangents * plain
    )


@pytest.mark.parametrize(
    ("wrap", "output"),
    [
        (lambda logits: {"logits": logits, "other": IDS}, None),
        (lambda logits: SimpleNamespace(logits=logits), None),
        (lambda logits: (logits,), None),
        (lambda logits: Encoding(logits=logits), None),
        (lambda logits: (IDS, logits), lambda result: result[1]),
    ],
    ids=["dict", "attribute", "tuple", "mapping", "output"],
)
def test_logits_are_picked_out_of_a_structured_output(
    wrap: Callable[[Tensor], Any], output: Any
) -> None:
    plain = df.Network(Pair().double())
    network = df.Network(Pair(wrap).double(), output=output)
    assert torch.equal(network(network.mean(), (IDS, MASK)), plain(plain.mean(), (IDS, MASK)))


@pytest.mark.parametrize(
    ("wrap", "inputs", "message"),
    [
        (
            lambda logits: (logits, IDS),
            (IDS, MASK),
            r"must return logits, or something with .logits .* got a tuple of 2; give",
        ),
        (lambda logits: {"scores": logits}, (IDS, MASK), r"got a dict with keys \['scores'\]"),
        (
            lambda logits: logits[:2],
            (IDS, MASK),
            r"the model's logits must be of shape \[4, k\], got shape \[2, 3\]",
        ),
        (
            lambda logits: logits[:, 0],
            (IDS, MASK),
            r"the model's logits must be of shape \[4, k\], got shape \[4\]",
        ),
        (
            lambda logits: logits,
            3,
            "inputs must be a tensor, a tuple, a list or a mapping of tensors, got int",
        ),
    ],
    ids=["tuple", "keys", "samples", "vector", "inputs"],
)
def test_refusals(wrap: Callable[[Tensor], Any], inputs: Any, message: str) -> None:
    network = df.Network(Pair(wrap).double())
    with pytest.raises(ValueError, match=message):
        network(network.mean(), inputs)


def convolutional(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.SiLU(inplace=True), nn.Dropout2d(dropout)
    second = nn.Conv2d(8, 8, 2), nn.GroupNorm(2, 8), nn.Tanh(), nn.AlphaDropout(dropout)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32, 3))


def images(samples: int = 6) -> Tensor:
    return torch.randn(samples, 2, 5, 5, generator=torch.Generator().manual_seed(1))


def everything(network: df.Network, inputs: Tensor) -> tuple[Tensor, ...]:
    """Logits, rows and total at one θ."""
    logits, pullback = network.pullback(network.mean(), inputs)
    cotangents = torch.linspace(-1, 1, logits.numel()).view_as(logits).to(logits)
    return logits, pullback(cotangents), pullback.total(cotangents)


def assert_near(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> None:
    """To a fraction of the largest entry."""
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype == torch.float32
        assert ((one - other).abs().max() <= tolerance * other.abs().max()).item()


statistics_ = pytest.mark.parametrize(
    "statistics", ["batch", "source", df.PseudoCount(), df.Ema()], ids=str
)
SELECTIONS: list[df.Selection] = [df.NormAffine(), df.AllParameters(), df.LoRA(2)]


@statistics_
@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_module_in_half_precision_under_a_belief_in_float32(
    dtype: torch.dtype, selection: Any, statistics: Any
) -> None:
    half = convolutional().to(dtype)
    single = copy.deepcopy(half).float()
    found = everything(df.Network(half, selection, statistics), images().to(dtype).float())
    expected = everything(df.Network(single, selection, statistics), images().to(dtype).float())
    assert_near(found, expected, 0.03 if dtype == torch.bfloat16 else 0.005)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_inputs_get_the_dtype_of_the_module(dtype: torch.dtype) -> None:
    network = df.Network(convolutional())
    assert_same(
        everything(network, images().to(dtype)), everything(network, images().to(dtype).float())
    )


@statistics_
@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
def test_autocast(selection: df.Selection, statistics: Any) -> None:
    network = df.Network(convolutional(), selection, statistics)
    expected = everything(network, images())
    with torch.autocast("cpu", torch.bfloat16):
        found, half = (everything(network, batch) for batch in (images(), images().bfloat16()))
    for each in (found, half):
        assert_near(each, expected, 0.03)
    assert not torch.equal(found[0], expected[0])  # it was on


@statistics_
@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
def test_channels_last(selection: df.Selection, statistics: Any) -> None:
    expected = everything(df.Network(convolutional(), selection, statistics), images())
    last: nn.Module = convolutional().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for model in (convolutional(), last):
        assert_near(
            everything(
                df.Network(model, selection, statistics),
                images().contiguous(memory_format=torch.channels_last),
            ),
            expected,
            1e-5,
        )
    torch.testing.assert_close(
        df.Network(last, selection).mean(), df.Network(convolutional(), selection).mean()
    )


@pytest.mark.slow
@statistics_
def test_two_threads_at_different_parameters(statistics: Any) -> None:
    network = df.Network(convolutional(), statistics=statistics)
    points = [network.mean() + shift for shift in (0.0, 0.5)]
    cotangents, tangent = torch.randn(6, 3), torch.ones(1, len(points[0]))

    def answers(theta: Tensor) -> tuple[Tensor, ...]:
        logits, pullback = network.pullback(theta, images())
        moved = network.pushforward(theta, images(), tangent)
        return (
            logits,
            network(theta, images()),
            pullback(cotangents),
            pullback.total(cotangents),
            moved,
        )

    expected, barrier = [answers(theta) for theta in points], Barrier(2)

    def hammer(position: int) -> bool:
        barrier.wait()
        found = [answers(points[position]) for _ in range(30)]
        return all(
            torch.equal(one, other)
            for each in found
            for one, other in zip(each, expected[position], strict=True)
        )

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(hammer, (0, 1))) == [True, True]
    assert not torch.equal(expected[0][0], expected[1][0])


def test_threads_see_the_weights_of_the_module() -> None:
    model = convolutional()
    network = df.Network(model)
    with torch.no_grad():
        dict(model.named_parameters())["9.weight"].mul_(2)
    model[-1] = nn.Identity()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(network, network.mean(), images()).result()
    assert torch.equal(other, network(network.mean(), images()))
    assert not torch.allclose(other, df.Network(convolutional())(network.mean(), images()))


def test_a_pullback_answers_in_another_thread() -> None:
    network = df.Network(convolutional())
    logits, pullback = network.pullback(network.mean(), images())
    expected = everything(network, images())[1]
    cotangents = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(pullback, cotangents).result(), expected)


def test_dropout_is_never_on() -> None:
    model = convolutional(dropout=0.5).train()
    assert_same(
        everything(df.Network(model), images()), everything(df.Network(convolutional()), images())
    )
    assert model.training


@statistics_
def test_copies_and_pickles_answer_alike(statistics: Any) -> None:
    network = df.Network(convolutional(), statistics=statistics)
    expected = everything(network, images())
    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert_same(everything(other, images()), expected)


def test_a_module_on_the_meta_device_is_refused_only_where_values_are_needed() -> None:
    with torch.device("meta"):
        model = models.build("resnet20")
    for selection in (None, df.LoRA()):
        network = df.Network(model, selection)
        assert sum(network.sizes) > 0
        for ask in (
            network.mean,
            partial(network, torch.zeros(sum(network.sizes)), torch.zeros(2, 3, 32, 32)),
        ):
            with pytest.raises(
                ValueError,
                match=r"Network: model must be a module with values: .* on the meta device",
            ):
                ask()


def test_networks_of_one_module_are_told_apart() -> None:
    """Two networks share a module's tensors and nothing else."""
    model = convolutional()
    norms, head = df.Network(model), df.Network(model, df.Head(), "source")
    alone = [
        everything(df.Network(copy.deepcopy(model), *rest), images())
        for rest in ((), (df.Head(), "source"))
    ]
    for network, expected in ((norms, alone[0]), (head, alone[1]), (norms, alone[0])):
        assert_same(everything(network, images()), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@statistics_
@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_gpu(memory_format: torch.memory_format, selection: df.Selection, statistics: Any) -> None:
    expected = everything(
        df.Network(convolutional().double(), selection, statistics), images().double()
    )
    network = df.Network(convolutional().double().cuda(), selection, statistics)
    found = everything(network, images().double().cuda().contiguous(memory_format=memory_format))
    torch.testing.assert_close(tuple(part.cpu() for part in found), expected)


@pytest.mark.slow
def test_group_norm_in_channels_last_format_does_not_crash_the_process() -> None:
    """torch's own backward pass does, on a CPU, where the gradient is an expanded tensor: a process
    of its own tries it.
    """
    program = """
import torch, driftfilter as df
from torch.nn import AdaptiveAvgPool2d, Conv2d, Flatten, GroupNorm, Linear, ReLU, Sequential
layers = (Conv2d(3, 16, 3), GroupNorm(8, 16), ReLU(), AdaptiveAvgPool2d(1), Flatten())
model = Sequential(*layers, Linear(16, 3)).eval()
images = torch.rand(2, 3, 8, 8)
plain, other = df.adapt(model, "shot_im"), df.adapt(model, "shot_im")
one, two = plain(images), other(images.to(memory_format=torch.channels_last))
torch.testing.assert_close(one, two)
torch.testing.assert_close(plain.belief.mean, other.belief.mean)
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-500:]


def test_probabilities_are_warned_about_once_and_the_hint_helps() -> None:
    torch.manual_seed(0)
    body, x = (
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval(),
        torch.randn(16, 4),
    )
    adapter = df.adapt(nn.Sequential(body, nn.Softmax(-1)))
    with pytest.warns(UserWarning, match="returns probabilities"):
        adapter(x)
    adapter(x)  # a second warning would be an error
    helped = df.adapt(
        nn.Sequential(body, nn.Softmax(-1)), output=lambda result: result.clamp_min(1e-12).log()
    )
    direct = df.adapt(body)
    for _ in range(3):
        found, expected = direct(x), helped(x)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_one_logit_is_warned_about_and_the_hint_makes_two_classes() -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).eval(),
        torch.randn(16, 4),
    )
    with pytest.warns(UserWarning, match="returns one logit"):
        df.adapt(model, "tent")(x)
    adapter = df.adapt(
        model, "source", output=lambda result: torch.cat((torch.zeros_like(result), result), -1)
    )
    torch.testing.assert_close(adapter(x).exp()[:, 1:], model(x).detach().sigmoid())

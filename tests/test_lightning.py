"""The Lightning callback, with Lightning itself."""

import copy
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import driftfilter as df
from driftfilter.lightning import Adapt
from small import normal, tabular

X = normal(48, 4, seed=0, dtype=torch.float32)
BATCHES = X.split(16)


def make_module(**children: nn.Module) -> Any:
    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = tabular(width=8)
            self.said: list[Tensor] = []
            for name, child in children.items():
                self.add_module(name, child)

        def forward(self, x: Tensor) -> Any:
            return self.net(x)

        def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.said.append(self(batch[0]).clone())
            if self.fails:
                raise RuntimeError("a test that fails")
            self.log("top", self.said[-1].exp().amax(1).mean())

        def predict_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            return self.net(batch[0])

    module: Any = Module()
    module.fails = False
    return module


def make_trainer(callback: Adapt) -> lightning.Trainer:
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    quiet["enable_checkpointing"] = False
    return lightning.Trainer(accelerator="cpu", callbacks=[callback], **quiet)


def loader() -> Any:
    return DataLoader(TensorDataset(X), batch_size=16)


def expect(module: Any) -> list[Tensor]:
    adapter = df.adapt(module.net, "tent", lr=0.1)
    return [adapter(batch) for batch in BATCHES]


pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers and loggers


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "net"])
def test_steps_get_what_an_adapter_says(name: str | None) -> None:
    module, callback = make_module(), Adapt(name, "tent", lr=0.1)
    net, before = module.net, copy.deepcopy(module.state_dict())
    expected, trainer = expect(module), make_trainer(callback)
    trainer.test(module, loader(), verbose=False)
    predicted: Any = trainer.predict(module, loader())  # begins at the source
    for said, given, right in zip(module.said, predicted, expected, strict=True):
        torch.testing.assert_close(said, right)
        torch.testing.assert_close(given, right)
    assert module.net is net
    assert module.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert all(child.training for child in net.modules())  # as before the test
    assert callback.adapter is not None
    assert callback.adapter.estimate.samples == 48


@pytest.mark.slow
def test_a_test_that_fails_leaves_the_module_as_it_was() -> None:
    module, callback = make_module(), Adapt()
    module.fails, net = True, module.net
    with pytest.raises(RuntimeError, match="a test that fails"):
        make_trainer(callback).test(module, loader(), verbose=False)
    assert module.net is net


def test_a_network_that_is_not_known_is_refused() -> None:
    module, trainer = make_module(other=nn.Linear(4, 3), metric=nn.Identity()), lightning.Trainer()
    with pytest.raises(ValueError, match=r"Adapt: network must be one of \['net', 'other'\]"):
        Adapt().on_test_start(trainer, module)
    with pytest.raises(ValueError, match=r"one of \['metric', 'net', 'other'\], got 'nett'"):
        Adapt("nett").on_test_start(trainer, module)

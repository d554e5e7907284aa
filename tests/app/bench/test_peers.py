"""Published classes beside presets: a checkout of their shape, made here."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from driftfilter.app.bench.peers import Checkout, open_checkout

CONF = """
import copy
from pathlib import Path


class Settings(dict):
    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]

    def clone(self):
        return copy.deepcopy(self)

    def defrost(self):
        pass

    freeze = defrost

    def merge_from_file(self, path):
        for line in Path(path).read_text().splitlines():
            section, name, value = line.split()
            self[section][name] = type(self[section][name])(value)


cfg = Settings(
    MODEL=Settings(ADAPTATION="source"),
    OPTIM=Settings(LR=1.0, STEPS=1),
    TEST=Settings(BATCH_SIZE=1),
)
"""

SHIFTING = '''
import torch
from torchvision_that_nobody_has import Compose
from utils.registry import ADAPTATION_REGISTRY


@ADAPTATION_REGISTRY.register()
class Shifting(torch.nn.Module):
    """Adds its rate to the bias after each batch; as in RoTTA's code, the loss takes no inputs and
    is given some.
    """

    def __init__(self, cfg, model, num_classes):
        super().__init__()
        self.cfg, self.model, self.num_classes = cfg, model, num_classes

    def loss_calculation(self):
        return self.cfg.OPTIM.LR

    def forward(self, x):
        with torch.no_grad():
            outputs = self.model(x)
            self.model.bias[0] += self.loss_calculation(x)
            x.zero_()
        return outputs

    def forward_sliding_window(self, x):
        return self.model(x[0])

    def reset(self):
        with torch.no_grad():
            self.model.bias.zero_()
'''

REGISTRY = """
class ADAPTATION_REGISTRY:
    @staticmethod
    def register():
        return lambda cls: cls
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """A folder that looks like theirs, with one method."""
    others = "driftfilter.app.bench.peers.OTHERS"
    monkeypatch.setattr(others, ("torchvision_that_nobody_has",))
    files = {
        "conf.py": CONF,
        "methods/shifting.py": SHIFTING,
        "utils/registry.py": REGISTRY,
        "cfgs/cifar10_c/shift.yaml": "MODEL ADAPTATION shifting\nOPTIM LR 0.5\n",
    }
    for name, text in files.items():
        path = tmp_path / "classification" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return open_checkout(str(tmp_path))


def head() -> nn.Linear:
    layer = nn.Linear(4, 3)
    nn.init.zeros_(layer.bias)
    return layer


def test_a_method_adapts_its_own_copy_and_leaves_inputs_alone(checkout: Checkout) -> None:
    model, inputs = head(), torch.randn(5, 4)
    given = inputs.clone()
    peer = checkout.build("shift", {}, model, 3, batch=5, seed=0, source=None)
    with torch.no_grad():
        before = model(inputs)
    shift = torch.tensor([0.5, 0.0, 0.0])
    assert torch.allclose(peer(inputs), before.log_softmax(-1))
    assert torch.allclose(peer(inputs), (before + shift).log_softmax(-1), atol=1e-6)
    assert torch.equal(inputs, given)
    assert not model.bias.any()
    assert torch.equal(peer.predict(inputs).labels, (before + 2 * shift).argmax(-1))
    peer.reset()
    assert torch.allclose(peer(inputs), before.log_softmax(-1))


def test_options_change_their_settings(checkout: Checkout) -> None:
    config = checkout.configure("shift", {"LR": 2}, batch=7)
    assert (config.OPTIM.LR, config.TEST.BATCH_SIZE) == (2.0, 7)
    with pytest.raises(ValueError, match=r"option of peer_shift must be one of .*OPTIM.LR"):
        checkout.configure("shift", {"LRR": 2}, batch=7)
    with pytest.raises(ValueError, match=r"peer_shift: LR must be like 0.5, got 'fast'"):
        checkout.configure("shift", {"LR": "fast"}, batch=7)


def test_names_and_folders_that_are_not_there(checkout: Checkout, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"preset must be one of .*peer_shift.*got 'peer_shiff'"):
        checkout.configure("shiff", {}, batch=7)
    with pytest.raises(ValueError, match=r"peers must be a folder"):
        open_checkout(str(tmp_path / "none"))
    (tmp_path / "classification" / "conf.py").unlink()
    with pytest.raises(ValueError, match=r"peers must be a checkout of .*conf\.py"):
        open_checkout(str(tmp_path))


def test_a_description_changes_with_their_code(checkout: Checkout, tmp_path: Path) -> None:
    said = checkout.describe("shift", {}, batch=5)
    assert '"LR": 0.5' in said
    with (tmp_path / "classification/methods/shifting.py").open("a") as file:
        file.write("# another line\n")
    assert open_checkout(str(tmp_path)).describe("shift", {}, batch=5) != said


def test_predictions_are_log_probabilities(checkout: Checkout) -> None:
    peer = checkout.build("shift", {}, head(), 3, batch=5, seed=0, source=None)
    total: Tensor = peer(torch.randn(5, 4)).exp().sum(-1)
    assert torch.allclose(total, torch.ones(5))

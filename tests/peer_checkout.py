"""A checkout in the shape of mariodoebler/test-time-adaptation, with small methods of our own."""

import json
from pathlib import Path
from typing import Any

CONF = '''
import copy
import json

class CfgNode(dict):
    """Nested settings by attribute, which can be frozen."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error

    def __setattr__(self, name, value):
        if self.get("frozen"):
            raise AttributeError("frozen")
        self[name] = value

    def clone(self):
        return copy.deepcopy(self)

    def defrost(self):
        pass

    def freeze(self):
        pass

    def merge_from_file(self, path):
        with open(path) as file:
            for section, values in json.load(file).items():
                for key, value in values.items():
                    if key not in self[section]:
                        raise KeyError(f"Non-existent config key: {section}.{key}")
                    self[section][key] = value


cfg = CfgNode(
    MODEL=CfgNode(ADAPTATION="", EPISODIC=False),
    OPTIM=CfgNode(LR=0.5, STEPS=1),
    TEST=CfgNode(BATCH_SIZE=200, RATE=1.0),
    EXTRA=CfgNode(RATE=2.0, NAMES="a"),
)
'''

REGISTRY = """
class Registry:
    def register(self):
        return lambda each: each


ADAPTATION_REGISTRY = Registry()
"""

BASE = '''
import torch
from torch import nn


class TTAMethod(nn.Module):
    """What the methods share: one step a batch, and a way back."""

    def __init__(self, cfg, model, num_classes):
        super().__init__()
        self.cfg, self.model, self.num_classes = cfg, model, num_classes
        self.steps_done = 0
        self.start = {name: each.clone() for name, each in model.state_dict().items()}

    def forward(self, x):
        self.steps_done += 1
        return self.forward_and_adapt([x])

    def reset(self):
        self.steps_done = 0
        self.model.load_state_dict(self.start)
'''

OFFSET = '''
import random

import numpy as np
import torch
from torch import nn

from methods.base import TTAMethod
from utils.registry import ADAPTATION_REGISTRY
from datasets.data_loading import get_source_loader  # what it does not use


@ADAPTATION_REGISTRY.register()
class Offset(TTAMethod):
    """Takes LR times the mean logits of a batch from the bias; writes into what it is given."""

    def __init__(self, cfg, model, num_classes):
        super().__init__(cfg, model, num_classes)
        self.drawn = (torch.rand(1).item(), np.random.rand(), random.random())

    def forward_and_adapt(self, x):
        with torch.no_grad():
            logits = self.model(x[0])
            self.model.head.bias -= self.cfg.OPTIM.LR * logits.mean(0)
            x[0].zero_()
        return logits.cuda()

    @torch.no_grad()
    def forward_sliding_window(self, x):
        return self.model(x[0])
'''

SOURCED = '''
from datasets.data_loading import get_source_loader
from methods.base import TTAMethod


class Sourced(TTAMethod):
    """Counts source images, which it asks their loader for."""

    def __init__(self, cfg, model, num_classes):
        super().__init__(cfg, model, num_classes)
        _, loader = get_source_loader(
            dataset_name="cifar10", batch_size=3, num_samples=5, preprocess=model.model_preprocess
        )
        self.sizes = [len(batch[0]) for batch in loader]

    def forward_and_adapt(self, x):
        return self.model(x[0])
'''

LOADING = """
import webdataset

def get_source_loader(*args, **kwargs):
    raise RuntimeError("reads their own data folder")
"""

FOREIGN = """
import absent_package_of_others
from methods.base import TTAMethod


class Foreign(TTAMethod):
    pass
"""

PLACED = '''
import open_clip
from methods.base import TTAMethod


class Special(open_clip.Model):
    """Inherits from what is not there."""


class Placed(TTAMethod):
    def forward_and_adapt(self, x):
        return open_clip.create_model("name")(x[0])
'''

METHODS = {
    "offset": OFFSET,
    "sourced": SOURCED,
    "foreign": FOREIGN,
    "placed": PLACED,
    "nameless": "",
}


def write_checkout(root: Path, **settings: Any) -> Path:
    """The folder; ``settings`` are sections of offset.yaml."""
    own = root / "classification"
    files = {
        "conf.py": CONF,
        # Theirs imports every method, and all that these need.
        "methods/__init__.py": "raise RuntimeError('imports every method')\n",
        "methods/base.py": BASE,
        "utils/__init__.py": "",
        "utils/registry.py": REGISTRY,
        "datasets/__init__.py": "",
        "datasets/data_loading.py": LOADING,
        **{f"methods/{name}.py": text for name, text in METHODS.items()},
    }
    for name, text in files.items():
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text(text)
    (own / "cfgs" / "cifar10_c").mkdir(parents=True)
    for name in METHODS:
        sections = {"MODEL": {"ADAPTATION": name}, **(settings if name == "offset" else {})}
        (own / "cfgs" / "cifar10_c" / f"{name}.yaml").write_text(json.dumps(sections))
    return root

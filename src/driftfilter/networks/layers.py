"""The one table of layers: which are norms, their rule for per-sample rows, and their layout.

A new kind of layer is one line here, and its rule in sample_gradients.py.
"""

import re
from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from driftfilter.networks.batch_norm import is_plain
from driftfilter.networks.sample_gradients import (
    Rule,
    batch_norm_rows,
    convolution_rows,
    embedding_rows,
    group_norm_rows,
    instance_norm_rows,
    layer_norm_rows,
    linear_rows,
    rms_norm_rows,
)


class Layer(NamedTuple):
    """What is known of one kind of layer."""

    rule: Rule  # of the rows of its parameters
    is_norm: bool = False
    channels_last: bool = False  # it works on the last dimension, whatever stands before it


LAYERS: dict[type[nn.Module], Layer] = {
    nn.Linear: Layer(linear_rows, channels_last=True),
    nn.Conv1d: Layer(convolution_rows),
    nn.Conv2d: Layer(convolution_rows),
    nn.Conv3d: Layer(convolution_rows),
    nn.Embedding: Layer(embedding_rows, channels_last=True),
    nn.LayerNorm: Layer(layer_norm_rows, is_norm=True, channels_last=True),
    nn.RMSNorm: Layer(rms_norm_rows, is_norm=True, channels_last=True),
    nn.GroupNorm: Layer(group_norm_rows, is_norm=True),
    nn.InstanceNorm1d: Layer(instance_norm_rows, is_norm=True),
    nn.InstanceNorm2d: Layer(instance_norm_rows, is_norm=True),
    nn.InstanceNorm3d: Layer(instance_norm_rows, is_norm=True),
    _BatchNorm: Layer(batch_norm_rows, is_norm=True),
}

NORMS = tuple(kind for kind, layer in LAYERS.items() if layer.is_norm)
_NAMED = re.compile(r"(RMS|Layer|Group|Instance|Batch)_?Norm")


def is_norm(module: nn.Module) -> bool:
    """Whether a layer normalises: one of torch's, or one of another library that is named so
    (LlamaRMSNorm, say) and has vectors for parameters and no layers inside.
    """
    if isinstance(module, NORMS):
        return True
    if module._modules or not _NAMED.search(type(module).__name__):
        return False
    own = [each for each in module._parameters.values() if each is not None]
    return len(own) > 0 and all(each.dim() == 1 for each in own)


def find_layer(module: nn.Module) -> Layer | None:
    """What is known of a layer with rows of its own; None for another kind, or a changed one."""
    for kind, layer in LAYERS.items():
        if isinstance(module, kind):
            own = is_plain(module) or type(module).forward is kind.forward
            # The gradient of such an embedding depends on more than the words of one sample.
            shared = isinstance(module, nn.Embedding) and (
                module.scale_grad_by_freq or module.max_norm is not None
            )
            return layer if own and not shared else None
    return None

"""Samples whose labels are known: their energy is the cross-entropy, E(θ) = w Σ_i -log p(y_i given
x_i, θ), a sum, for each label is an observation of its own.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from driftfilter.base.checks import require
from driftfilter.base.inputs import Inputs, batch_size, check_inputs, each
from driftfilter.base.sharding import current
from driftfilter.model.losses import PseudoLabel
from driftfilter.model.observation import Energy, Gibbs, Samples, evaluate, pull_back
from driftfilter.model.predictive import PredictiveModel
from driftfilter.model.weighting import Constant

Labeling: TypeAlias = Callable[[Tensor], Tensor]  # logits [n, k] -> class indices [n]


def require_labels(labels: object, samples: int, field: str = "labels") -> Tensor:
    """The labels, if they are class indices [n]; one sample may have a plain number."""
    if isinstance(labels, int) and not isinstance(labels, bool):
        most = torch.iinfo(torch.int64).max
        require(-most <= labels <= most, field, labels, "a class index")
        labels = torch.tensor([labels])
    require(isinstance(labels, Tensor), field, type(labels).__name__, "a tensor of integers")
    assert isinstance(labels, Tensor)
    whole = not labels.is_floating_point() and not labels.is_complex()
    require(
        labels.shape == (samples,) and whole and labels.dtype != torch.bool,
        field,
        f"{labels.dtype} of shape {list(labels.shape)}",
        f"integers of shape [{samples}]",
    )
    return labels


def require_classes(labels: Tensor, classes: int, field: str = "labels") -> None:
    """Raise unless labels are of k classes."""
    low, high = int(labels.long().min()), int(labels.long().max())
    found, allowed = f"values from {low} to {high}", f"in [0, {classes - 1}]"
    require(0 <= low <= high < classes, field, found, allowed)


def label_energy(
    model: PredictiveModel,
    mean: Tensor,
    inputs: Inputs,
    labeling: Labeling,
    weights: Tensor | float = 1.0,
) -> Energy:
    """Σ_i w_i -log p(y_i given x_i, θ), the labels y_i from the logits at the mean, w [n] or one
    for all.
    """
    # A data loader's inputs are on the CPU.
    inputs = each(check_inputs(inputs), lambda part: part.to(mean.device))
    pulled = pull_back(model, mean, inputs)
    samples = batch_size(inputs) if current() is None else len(pulled[0])
    labels, classes = require_labels(labeling(pulled[0]), samples), pulled[0].shape[-1]
    require_classes(labels, classes)
    targets = functional.one_hot(labels.long().to(mean.device), classes).to(mean)
    own = (mean.new_ones(samples) * weights).to(mean)
    fixed = Samples(targets, samples * own, own, samples)
    loss = PseudoLabel()  # cross-entropy to the targets it is given
    observation = Gibbs(loss, Constant(samples * float(own.mean())))  # whose w / n are these
    return Energy(observation, model, (inputs,), fixed, mean, evaluate(loss, [pulled], fixed))

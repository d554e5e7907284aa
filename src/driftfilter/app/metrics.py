"""How good predictions are: accuracy, likelihood, calibration, collapse, and uncertainty near and
far from the data.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from driftfilter.app.calibration import ReliabilityDiagram as ReliabilityDiagram
from driftfilter.base.checks import require
from driftfilter.base.inputs import Inputs
from driftfilter.gaussian.belief import Belief
from driftfilter.model.predictive import PredictiveModel
from driftfilter.model.weighting import entropy as entropy  # of log-probabilities, too

BINS = 15


def accuracy(log_probabilities: Tensor, labels: Tensor) -> float:
    """Share of labels [n] that are the most likely class of log-probabilities [n, k]."""
    return (log_probabilities.argmax(-1) == labels).double().mean().item()


def negative_log_likelihood(log_probabilities: Tensor, labels: Tensor) -> float:
    """-(1/n) Σ log p_i(y_i), for log-probabilities [n, k] and labels [n]."""
    return -log_probabilities.gather(-1, labels[:, None]).mean().item()


def reliability(log_probabilities: Tensor, labels: Tensor, bins: int = BINS) -> ReliabilityDiagram:
    """Confidence and accuracy in equal bins [low, high) of the confidence, for log-probabilities
    [n, k] and labels [n].
    """
    confidence, predicted = log_probabilities.exp().max(-1)
    edges = torch.linspace(0, 1, bins + 1).to(confidence)[1:-1]  # certainty belongs to the last bin
    place = torch.bucketize(confidence, edges, right=True)
    count = torch.bincount(place, minlength=bins)
    sums = (
        confidence.new_zeros(bins, dtype=torch.float64).index_add(0, place, each.double())
        for each in (confidence, predicted == labels)
    )
    return ReliabilityDiagram(
        count.tolist(), *((each / count.clamp(min=1)).tolist() for each in sums)
    )


def calibration_error(log_probabilities: Tensor, labels: Tensor, bins: int = BINS) -> float:
    """Expected calibration error of log-probabilities [n, k] over equal bins of the confidence.

    Σ_b (n_b/n) |accuracy_b - confidence_b|
    """
    return reliability(log_probabilities, labels, bins).calibration_error()


def brier(log_probabilities: Tensor, labels: Tensor) -> float:
    """Brier score (1/n) Σ_i Σ_c (p_ic - [c = y_i])², from 0 to 2, for log-probabilities [n, k] and
    labels [n].
    """
    probabilities = log_probabilities.double().exp()
    right = probabilities.gather(-1, labels[:, None]).squeeze(-1)
    return (probabilities.square().sum(-1) - 2 * right + 1).mean().item()


def risk_coverage(log_probabilities: Tensor, labels: Tensor, points: int = 20) -> list[float]:
    """Accuracy among the most confident 1/m, 2/m, … m/m of the samples, m = ``points``, or one a
    sample if there are fewer, for log-probabilities [n, k] and labels [n].
    """
    confidence, predicted = log_probabilities.max(-1)
    right = (predicted == labels)[confidence.argsort(descending=True, stable=True)].double()
    points = min(points, len(labels))
    counts = torch.arange(1, points + 1, device=right.device) * len(labels) // points
    return (right.cumsum(0)[counts - 1] / counts).tolist()


class Quality(NamedTuple):
    """What the benchmark says about predictions."""

    accuracy: float
    nll: float
    brier: float
    ece: float  # 15 bins
    n: int  # samples


def quality(log_probabilities: Tensor, labels: Tensor) -> Quality:
    """Quality of log-probabilities [n, k], n >= 1, for labels [n]."""
    n, k = log_probabilities.shape
    require(
        n > 0 and int(labels.max()) < k,
        "labels",
        labels,
        f"of at least one sample and below the {k} classes predicted",
    )
    return Quality(
        accuracy(log_probabilities, labels),
        negative_log_likelihood(log_probabilities.double(), labels),
        brier(log_probabilities, labels),
        calibration_error(log_probabilities, labels),
        n,
    )


def least_share(log_probabilities: Tensor) -> float:
    """k times the smallest share of a class among the predicted ones [n, k]: 1 is balanced, 0 a
    class that vanished.
    """
    k = log_probabilities.shape[-1]
    return (
        k
        * torch.bincount(log_probabilities.argmax(-1), minlength=k).min().item()
        / len(log_probabilities)
    )


class Uncertainty(NamedTuple):
    """Uncertainty about the label of each input [n], in nats."""

    predictive: Tensor  # H(E_q p), all of it
    mutual: Tensor  # H(E_q p) - E_q H(p): the part that knowing θ would remove


def uncertainty(
    model: PredictiveModel, belief: Belief, inputs: Inputs, draws: int = 200, seed: int = 0
) -> Uncertainty:
    """Predictive entropy and mutual information between label and θ, by draws of θ from the
    belief q.
    """
    moves = belief.covariance.sample(draws, torch.Generator(belief.mean.device).manual_seed(seed))
    if model.linear:  # all draws in one product
        logits = model(belief.mean, inputs) + model.pushforward(belief.mean, inputs, moves)
    else:
        logits = torch.stack([model(belief.mean + move, inputs) for move in moves])
    logp = logits.log_softmax(-1)  # [s, n, k]
    predictive = entropy(logp.logsumexp(0) - math.log(draws))
    return Uncertainty(predictive, (predictive - entropy(logp).mean(0)).clamp_min(0))

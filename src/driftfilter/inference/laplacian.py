"""Prediction of a whole batch at once: samples with features alike should get labels alike."""

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor
from torch.nn import functional

from driftfilter.base.checks import Checked, NotNegative, PositiveCount, register
from driftfilter.gaussian.belief import Belief
from driftfilter.inference.prediction import Prediction, PredictionRule, Query

_LEAST = 1e-10  # added to probabilities, as the authors of LAME have it


@final
@dataclass(frozen=True)
class LaplacianAdjustment(Checked, PredictionRule):
    """Labels Y [n, k] of a batch that minimise Σ_i KL(y_i ‖ p_i) - Σ_ij w_ij y_i·y_j (LAME).

    p_i = softmax f_i(μ). The affinities w_ij are those of features z of length one:

        knn      1 if z_j is among the ``neighbours`` nearest to z_i, else 0; w_ii = 0
        rbf      exp(-|z_i - z_j|² / 2 σ²), σ the mean distance to the farthest of the
                 ``neighbours`` nearest ones, of which z_i itself is one
        linear   z_i·z_j

    Fixed points Y ← softmax(log p + W Y) from Y = p, at most ``steps`` of them, until the bound on
    the sum changes by less than ``tolerance`` of itself.
    """

    affinity: Literal["knn", "rbf", "linear"] = "knn"
    neighbours: PositiveCount = 5
    steps: PositiveCount = 100
    tolerance: NotNegative = 1e-8

    def __call__(self, belief: Belief, query: Query) -> Prediction:
        logits, features = query.model.logits_and_features(belief.mean, query.inputs)
        unary = (logits.softmax(-1) + _LEAST).log()
        affinities = self._affinities(functional.normalize(features, dim=-1))
        labels, before = unary.log_softmax(-1), torch.inf
        for step in range(self.steps):
            pairwise = affinities @ labels.exp()
            labels = (unary + pairwise).log_softmax(-1)
            energy = (labels.exp() * (labels - unary - pairwise)).sum().item()
            if step > 1 and abs(energy - before) <= self.tolerance * abs(before):
                break
            before = energy
        return Prediction(labels, torch.zeros_like(labels))

    def _affinities(self, features: Tensor) -> Tensor:
        """W [n, n]."""
        if self.affinity == "linear":
            return features @ features.mT
        distances = torch.cdist(features, features, compute_mode="donot_use_mm_for_euclid_dist")
        n = len(distances)
        if self.affinity == "knn":
            nearest = distances.topk(min(self.neighbours + 1, n), largest=False).indices[:, 1:]
            return torch.zeros_like(distances).scatter_(-1, nearest, 1.0)
        farthest = distances.topk(min(self.neighbours, n), largest=False).values[:, -1]
        width = farthest.mean().clamp_min(torch.finfo(farthest.dtype).tiny ** 0.25)
        return (-distances.square() / (2 * width.square())).exp()


register(prediction=(LaplacianAdjustment,))

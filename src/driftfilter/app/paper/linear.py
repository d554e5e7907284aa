"""2-D logistic regression under a diagonal covariate shift, one sample at a time.

Class means (∓1.5, 0) and standard deviation 0.7; both classes move by s (1, 1) with s from 0 to 3
over the stream. The source posterior is the Laplace approximation from labeled samples under a
unit-precision prior; the bias is a random walk, the weights revert to the source as its precision
says. Parameters are θ = [bias, weight 1, weight 2].
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

import driftfilter as df
from driftfilter.app.paper.trial import Labeled, Problem, draw_labels, draw_problem, unit_prior


@final
@dataclass(frozen=True)
class Linear:
    """The settings of the example; the defaults are the paper's."""

    steps: int = 1000
    source_samples: int = 100
    test_samples: int = 2000
    shift: float = 3.0
    share: float = 0.5  # of class 1 in the stream
    deviation: float = 0.7
    bias_variance: float = 0.01
    eta: float = 0.001
    beta: float = 1.0
    classes: int = 2
    chance: float = 0.55
    window: tuple[tuple[float, float], tuple[float, float]] = ((-6.0, 9.0), (-6.0, 9.0))
    far: float = 2.5
    reach: float = math.inf  # the bias is a random walk, free to leave

    def draw(self, shifts: Tensor, share: float, generator: torch.Generator) -> Labeled:
        """One sample for each shift [...]."""
        labels = draw_labels(tuple(shifts.shape), (1 - share, share), generator)
        noise = torch.randn((*shifts.shape, 2), generator=generator, dtype=shifts.dtype)
        means = torch.stack((1.5 * (2 * labels - 1), torch.zeros_like(labels)), -1)
        return Labeled(means + self.deviation * noise + shifts[..., None], labels)

    def problem(self, seed: int) -> Problem:
        counts, shares = (self.source_samples, self.test_samples), (0.5, self.share)
        return draw_problem(self.draw, (0.0, self.shift), (self.steps, 1), counts, shares, seed)

    def source(self, data: Labeled) -> df.Belief:
        return df.fit_laplace(
            df.LinearHead(2, intercept=True), unit_prior(3, "full"), data.inputs, data.labels
        )

    def filter(self) -> df.Filter:
        bias = df.Transition(df.RandomWalk(), df.Isotropic(self.bias_variance))
        weights = df.Transition(df.PrecisionReversion(self.eta), df.Stationary())
        return df.Filter(
            logits=df.LinearHead(2, intercept=True),
            transition=df.Transition(df.BlockDynamics(sizes=(1, 2), parts=(bias, weights))),
            observation=df.Gibbs(df.Entropy(), df.Constant(self.beta)),
            inference=df.Linearized(df.Hessian()),
            prediction=df.LinearizedProbit(),
        )

"""A pinwheel of three blades that grow outwards, or turn: a consistency filter on polynomial
features, by BONG.

A sample of blade c starts as (r + 0.3 e₁, 0.1 e₂) and is rotated by 2πc/3 + 0.25·exp(first
coordinate) + turn; r goes from 1.0 to 1.9 over the stream (or the turn from 0 to π/2 at r = 1).
Features are the monomials up to degree 7 of x/1.5; the loss is Brier against the hard label of the
clean input on 4 copies with Gaussian noise of sd 0.2.
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

import driftfilter as df
from driftfilter.app.paper.trial import (
    Labeled,
    Problem,
    draw_labels,
    draw_problem,
    polynomial,
    unit_prior,
)


def features(inputs: Tensor) -> Tensor:
    """Degree-7 polynomial features [n, 2] -> [n, 36]."""
    return polynomial(inputs / 1.5, 7)


@final
@dataclass(frozen=True)
class Pinwheel:
    """The settings of the example."""

    steps: int = 150
    batch: int = 15
    source_samples: int = 150
    test_samples: int = 1000
    radius: float = 1.9  # r at the end
    turn: float = 0.0  # rotation of all blades at the end
    share: float = 1 / 3  # of class 2 in the stream
    beta: float = 60.0
    rho: float = 0.99
    noise: float = 0.2  # of the augmentation
    copies: int = 4
    structure: str = "full"
    samples: int = 10
    nodes: int = 0
    classes: int = 3
    chance: float = 0.40
    window: tuple[tuple[float, float], tuple[float, float]] = ((-3.4, 3.4), (-3.4, 3.4))
    far: float = 0.75
    reach: float = 5.0

    def draw(self, fractions: Tensor, share: float, generator: torch.Generator) -> Labeled:
        """One sample for each fraction of the way [...]."""
        labels = draw_labels(
            tuple(fractions.shape), ((1 - share) / 2, (1 - share) / 2, share), generator
        )
        noise = torch.randn((*fractions.shape, 2), generator=generator, dtype=fractions.dtype)
        along = 1 + fractions * (self.radius - 1) + 0.3 * noise[..., 0]
        angle = 2 * math.pi * labels / 3 + 0.25 * along.exp() + fractions * self.turn
        cosine, sine, across = angle.cos(), angle.sin(), 0.1 * noise[..., 1]
        return Labeled(
            torch.stack((cosine * along - sine * across, sine * along + cosine * across), -1),
            labels,
        )

    def problem(self, seed: int) -> Problem:
        ends, shape = (0.0, 1.0), (self.steps, self.batch)
        counts, shares = (self.source_samples, self.test_samples), (1 / 3, self.share)
        return draw_problem(self.draw, ends, shape, counts, shares, seed)

    def source(self, data: Labeled) -> df.Belief:
        return df.fit_laplace(
            df.LinearHead(3),
            unit_prior(108, self.structure, 20),
            features(data.inputs),
            data.labels,
        )

    def filter(self) -> df.Filter:
        loss = df.Consistency(
            df.GaussianNoise(self.noise), divergence="brier", target="hard", copies=self.copies
        )
        return df.Filter(
            logits=df.OnFeatures(features, df.LinearHead(3)),
            transition=df.Transition(df.MeanReversion(self.rho), df.Stationary()),
            observation=df.Gibbs(loss, df.Constant(self.beta)),
            inference=df.Bong(df.Hessian(), samples=self.samples, nodes=self.nodes),
            prediction=df.LinearizedProbit(),
        )

"""Two moons whose density moves along both arcs: an entropy filter on polynomial features, by BONG.

Angle φ = π·Beta(8p, 8(1-p)), p from 0.8 to 0.2 over the stream; class 0 at (cos φ, sin φ), class 1
at (1 - cos φ, 1/2 - sin φ), plus noise. Features are the monomials up to degree 4 of ((x -
0.5)/1.0, (y - 0.25)/0.6).
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
    """Degree-4 polynomial features [n, 2] -> [n, 15]."""
    center, scale = inputs.new_tensor((0.5, 0.25)), inputs.new_tensor((1.0, 0.6))
    return polynomial((inputs - center) / scale, 4)


@final
@dataclass(frozen=True)
class Moons:
    """The settings of the example."""

    steps: int = 200
    batch: int = 10
    source_samples: int = 100
    test_samples: int = 1000
    start: float = 0.8  # p, where along the arcs the data are
    end: float = 0.2
    share: float = 0.5  # of class 1 in the stream
    noise: float = 0.1
    beta: float = 20.0
    rho: float = 0.99
    structure: str = "full"
    nodes: int = 15
    classes: int = 2
    chance: float = 0.55
    window: tuple[tuple[float, float], tuple[float, float]] = ((-2.0, 3.0), (-1.6, 2.1))
    far: float = 0.75
    reach: float = 5.0

    def draw(self, places: Tensor, share: float, generator: torch.Generator) -> Labeled:
        """One sample for each p [...]."""
        labels = draw_labels(tuple(places.shape), (1 - share, share), generator)
        angles = math.pi * _beta(8 * places, 8 * (1 - places), generator)
        upper = torch.stack((angles.cos(), angles.sin()), -1)
        lower = torch.stack((1 - angles.cos(), 0.5 - angles.sin()), -1)
        clean = torch.where(labels[..., None] == 0, upper, lower)
        return Labeled(
            clean + self.noise * torch.randn(clean.shape, generator=generator, dtype=clean.dtype),
            labels,
        )

    def problem(self, seed: int) -> Problem:
        ends, shape = (self.start, self.end), (self.steps, self.batch)
        counts, shares = (self.source_samples, self.test_samples), (0.5, self.share)
        return draw_problem(self.draw, ends, shape, counts, shares, seed)

    def source(self, data: Labeled) -> df.Belief:
        return df.fit_laplace(
            df.LinearHead(2), unit_prior(15, self.structure), features(data.inputs), data.labels
        )

    def filter(self) -> df.Filter:
        return df.Filter(
            logits=df.OnFeatures(features, df.LinearHead(2)),
            transition=df.Transition(df.MeanReversion(self.rho), df.Stationary()),
            observation=df.Gibbs(df.Entropy(), df.Constant(self.beta)),
            inference=df.Bong(df.Hessian(), samples=0, nodes=self.nodes),
            prediction=df.LinearizedProbit(),
        )


def _beta(a: Tensor, b: Tensor, generator: torch.Generator) -> Tensor:
    """Beta(a, b) as a ratio of gammas, from a generator (torch.distributions takes none)."""
    first, second = (
        torch._standard_gamma(part.contiguous(), generator=generator) for part in (a, b)
    )
    return first / (first + second)

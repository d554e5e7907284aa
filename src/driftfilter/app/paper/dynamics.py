"""Prior dynamics of a regression line y = intercept + slope x without data: four transitions, paths
and moments.

The moments are those of the filter's own prior, step by step; the paths are drawn apart from them,
and the largest disagreement between the two is part of the result.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

import driftfilter as df


class Prior(NamedTuple):
    """What a transition says about (intercept, slope) at every step, before any data."""

    mean: Tensor  # [steps + 1, 2]
    covariance: Tensor  # [steps + 1, 2, 2]
    paths: Tensor  # [count, steps + 1, 2]

    def disagreement(self) -> tuple[float, float]:
        """Largest z-score of the paths' sample means, and of their sample variances, over all steps
        after the first.
        """
        count = len(self.paths)
        variance = self.covariance.diagonal(dim1=-2, dim2=-1)[1:]  # [steps, 2]
        means = (self.paths.mean(0)[1:] - self.mean[1:]) / (variance / count).sqrt()
        variances = (self.paths.var(0)[1:] / variance - 1) / (2 / (count - 1)) ** 0.5
        return means.abs().max().item(), variances.abs().max().item()


@final
@dataclass(frozen=True)
class DynamicsExample:
    """The settings of the example."""

    steps: int = 100
    paths: int = 4000
    intercept: float = 0.0
    slope: float = 0.5
    deviation: float = 0.02  # of each parameter at the start
    noise: float = 0.03  # sd of the steps of the random walk and of mean reversion
    velocity: tuple[float, float] = (0.008, -0.006)  # of the trend at the start
    velocity_deviation: float = 0.002  # sd of it
    trend_noise: float = 0.0003  # sd of the steps of the trend and its velocity
    # No divisor of the times drawn: lines would be back at their beginning.
    period: float = 32.0
    amplitude: tuple[float, float] = (0.25, 0.15)  # of the season
    phase: tuple[float, float] = (0.0, math.pi / 2)  # of the season at the start
    season_deviation: float = 0.03  # sd of the season at the start
    season_noise: float = 0.003  # sd of the steps of level and season
    rho: float = 0.95

    def belief(self) -> df.Belief:
        """Belief about both parameters at the start."""
        return df.Belief(
            torch.tensor([self.intercept, self.slope], dtype=torch.float64),
            df.Full(self.deviation**2 * torch.eye(2, dtype=torch.float64)),
        )

    def transitions(self) -> dict[str, df.Transition]:
        """The paper's four transitions."""
        step = df.Isotropic(self.noise**2)
        return {
            "random walk": df.Transition(df.RandomWalk(), step),
            "polynomial trend": df.Transition(
                df.LocalTrend(scale=self.velocity_deviation, velocity=self.velocity),
                df.Isotropic(self.trend_noise**2),
            ),
            "seasonal": df.Transition(
                df.Seasonal(
                    self.period,
                    scale=self.season_deviation,
                    amplitude=self.amplitude,
                    phase=self.phase,
                ),
                df.Isotropic(self.season_noise**2),
            ),
            "mean reversion": df.Transition(df.MeanReversion(self.rho), step),
        }

    def run(self, seed: int) -> dict[str, Prior]:
        """Moments and paths under every transition."""
        return {
            name: _prior(
                transition, transition.augment(self.belief()), self.steps, self.paths, seed
            )
            for name, transition in self.transitions().items()
        }


def _prior(
    transition: df.Transition, source: df.Belief, steps: int, count: int, seed: int
) -> Prior:
    matrix = transition.read_out(2)
    read = torch.eye(2, dtype=torch.float64) if matrix is None else matrix
    bound, beliefs = transition.bind(source), [source]
    for _ in range(steps):
        beliefs.append(bound(beliefs[-1]))
    return Prior(
        torch.stack([read @ state.mean for state in beliefs]),
        torch.stack([read @ state.covariance.dense() @ read.mT for state in beliefs]),
        transition.sample_states(source, steps, count, seed) @ read.mT,
    )

"""Example (a) of the paper: 2-D logistic regression under a diagonal covariate shift, one sample at a time.

Class means (∓1.5, 0) and standard deviation 0.7; both classes move by s (1, 1) with s from 0 to 3 over the stream. The
source posterior is the Laplace approximation from labeled samples under a unit-precision prior; the bias is a random
walk, the weights revert to the source as its precision says. Parameters are θ = [bias, weight 1, weight 2].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

import driftfilter as df


class Labeled(NamedTuple):
    """Samples with the labels that only the evaluation sees."""

    inputs: Tensor  # [n, 2]
    labels: Tensor  # [n]


class Scores(NamedTuple):
    """One run on one stream."""

    accuracy: float  # over the stream
    end_accuracy: float  # of the last state, on fresh samples from where the stream ended
    nll: float  # mean negative log-likelihood over the stream


@final
@dataclass(frozen=True)
class Linear:
    """The settings of the example; the defaults are the paper's."""

    steps: int = 1000
    source_samples: int = 100
    test_samples: int = 2000
    shift: float = 3.0
    deviation: float = 0.7
    bias_variance: float = 0.01
    eta: float = 0.001
    beta: float = 1.0

    def draw(self, shifts: Tensor, generator: torch.Generator) -> Labeled:
        """One sample for each shift [n], classes equally likely."""
        labels = torch.randint(0, 2, shifts.shape, generator=generator)
        noise = torch.randn(len(shifts), 2, generator=generator, dtype=shifts.dtype)
        means = torch.stack((1.5 * (2 * labels - 1), torch.zeros_like(labels)), -1)
        return Labeled(means + self.deviation * noise + shifts[:, None], labels)

    def source(self, data: Labeled) -> df.Belief:
        """The Laplace source posterior."""
        prior = df.Belief(torch.zeros(3, dtype=torch.float64), df.Full(torch.eye(3, dtype=torch.float64)))
        return df.fit_laplace(df.LinearHead(2, intercept=True), prior, data.inputs, data.labels)

    def filter(self) -> df.Filter:
        """The paper's dynamic generalised linear model with entropy as the loss."""
        bias = df.Transition(df.RandomWalk(), df.Isotropic(self.bias_variance))
        weights = df.Transition(df.PrecisionReversion(self.eta), df.Stationary())
        return df.Filter(
            logits=df.LinearHead(2, intercept=True),
            transition=df.Transition(df.BlockDynamics(sizes=(1, 2), parts=(bias, weights))),
            observation=df.Gibbs(df.Entropy(), df.Constant(self.beta)),
            inference=df.Linearized(df.Hessian()),
            prediction=df.LinearizedProbit(),
        )

    def run(self, seed: int) -> tuple[Scores, Scores]:
        """Scores of the frozen source and of the filter on one stream."""
        generator = torch.Generator().manual_seed(seed)
        zeros = torch.zeros(self.source_samples, dtype=torch.float64)
        belief = self.source(self.draw(zeros, generator))
        stream = self.draw(torch.linspace(0, self.shift, self.steps, dtype=torch.float64), generator)
        end = self.draw(torch.full((self.test_samples,), self.shift, dtype=torch.float64), generator)

        filt = self.filter()
        state, outputs = filt.run(filt.init(belief, seed), stream.inputs[:, None])
        adapted = filt.predict(state, end.inputs)
        frozen = filt.init(belief, seed)
        before = filt.predict(frozen, stream.inputs).log_probabilities
        return (
            _scores(before, stream.labels, filt.predict(frozen, end.inputs), end.labels),
            _scores(outputs.log_probabilities, stream.labels, adapted, end.labels),
        )


def _scores(log_probabilities: Tensor, labels: Tensor, end: df.Prediction, end_labels: Tensor) -> Scores:
    return Scores(
        (log_probabilities.argmax(-1) == labels).double().mean().item(),
        (end.labels == end_labels).double().mean().item(),
        -log_probabilities.gather(-1, labels[:, None]).mean().item(),
    )


def run_seeds(
    example: Linear, seeds: Sequence[int], progress: Callable[[int], None] = lambda done: None
) -> tuple[list[Scores], list[Scores]]:
    """Scores of source and filter for every seed; ``progress`` is told how many are done."""
    frozen: list[Scores] = []
    adapted: list[Scores] = []
    for position, seed in enumerate(seeds):
        pair = example.run(seed)
        frozen.append(pair[0])
        adapted.append(pair[1])
        progress(position + 1)
    return frozen, adapted


def summarize(name: str, scores: Sequence[Scores]) -> str:
    """One line of the table: mean ± standard deviation over seeds, worst end accuracy, collapsed seeds."""
    values = torch.tensor(scores, dtype=torch.float64)
    spread = values.std(0) if len(scores) > 1 else torch.zeros(3, dtype=torch.float64)
    cells = [f"{mean:.3f} ± {sd:.3f}" for mean, sd in zip(values.mean(0).tolist(), spread.tolist(), strict=True)]
    worst = values[:, 1].min().item()
    collapsed = int((values[:, 1] < 0.55).sum())
    return f"{name:<14}" + "".join(f"{cell:>18}" for cell in cells) + f"{worst:>12.3f}{collapsed:>7d}/{len(scores)}"


HEADER = f"{'':<14}{'stream accuracy':>18}{'end accuracy':>18}{'NLL':>18}{'worst end':>12}{'collapsed':>10}"

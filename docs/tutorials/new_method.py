# %% [markdown]
"""
# Build a method from blocks

Every method here is a `df.Recipe`: a transition, an energy, an inference, a prediction. You begin
with TENT, change one block after the other, and end with a loss of your own.
"""

# %%
from dataclasses import dataclass, replace
from typing import final

import torch

import driftfilter as df
from driftfilter.app import corruptions, models, streams
from driftfilter.model.expansion import Expansion, log_softmax, separable

# %% [markdown]
"""
## A stream to try them on

Four hundred photographs under noise, in batches of 50.
"""

# %%
shipped = streams.sample_images()
images = corruptions.corrupt(shipped.images[:400], "gaussian_noise", 3)
labels = shipped.labels[:400]
model = models.load("resnet20")


def score(name: str, recipe: df.Recipe) -> None:
    """Accuracy and negative log-likelihood along the stream."""
    adapter = df.adapt(model, recipe)
    found = torch.cat([adapter(batch) for batch in images.split(50)])
    accuracy = (found.argmax(-1) == labels).double().mean()
    print(f"{name:24} accuracy {accuracy:.3f}  NLL {-found[range(400), labels].mean():.3f}")


# %% [markdown]
"""
## Begin with what is published

TENT takes gradient steps on the entropy of its predictions. `df.to_toml` writes down every block.
"""

# %%
tent = df.presets.get("tent")
print(df.to_toml(tent))
score("frozen", df.presets.get("source"))
score("tent", tent)

# %% [markdown]
"""
## Change the inference

A filter steps where a gradient method does. It weighs each step by its uncertainty, which it
carries along. So it needs a source with a spread, and a transition that says how much may change.
"""

# %%
filtered = replace(
    tent,
    source=df.Gaussian(variance=0.1),
    observation=df.Gibbs(df.Entropy(), df.Constant(beta=2.0)),  # beta: how much a sample tells
    transition=df.Transition(df.MeanReversion(rho=0.99), df.Stationary()),
    inference=df.Linearized(df.EmpiricalFisher(centered=True)),
)
score("filtered", filtered)

# %% [markdown]
"""
## Change the weighting and the statistics

Samples whose entropy is high may mislead: `Reliability` gives them less weight. `Ema` carries the
statistics of batch norm from batch to batch. TENT takes those of each batch alone. Not every block
helps on every stream, so look at one change at a time.
"""

# %%
weighted = replace(filtered, observation=df.Gibbs(df.Entropy(), df.Reliability(beta=2.0)))
score("weighted", weighted)
score("carried statistics", replace(filtered, statistics=df.Ema(momentum=0.5)))

# %% [markdown]
"""
## A loss of your own

Any function of the logits is a loss. Gradient and curvature come from it.
"""


# %%
def margin(logits: torch.Tensor) -> torch.Tensor:
    """The second logit relative to the first, [n]."""
    top = logits.topk(2, dim=-1).values
    return torch.exp(top[:, 1] - top[:, 0])


score("margin", replace(filtered, observation=df.Gibbs(margin, df.Constant(beta=2.0))))

# %% [markdown]
"""
## A block with a name

A loss to keep is a frozen dataclass. Its docstring has the formula. `expand` gives the values, and
what the curvature is made of. One line puts it into the table. Then it has TOML, checkpoints and
the command line, as all others do.
"""


# %%
@final
@dataclass(frozen=True)
class Gini(df.Loss):
    """1 - Σ p²: entropy's polynomial cousin."""

    def expand(self, logits: torch.Tensor, targets: object, weights: object) -> Expansion:
        """Its value and derivatives at the logits [n, k]."""
        p = log_softmax(logits).exp()
        square = p * p  # g(p) = -p², so p g' = -2p² and p² g'' = -2p²
        return separable(1 - square.sum(-1), p, -2 * square, -2 * square)


df.VARIANTS["loss"]["Gini"] = Gini
mine = replace(filtered, observation=df.Gibbs(Gini(), df.Constant(beta=2.0)))
score("gini", mine)
print("the same from TOML:", df.from_toml(df.to_toml(mine)) == mine)

# %% [markdown]
"""
## Is it better?

One stream of 400 images tells little. `driftfilter bench` compares methods on many streams, with
calibration and several seeds. [Your own methods](../own-methods.md) has the other kinds of blocks:
weightings that see the inputs, buffers, statistics. [Building blocks](../building-blocks.md) lists
all of them.
"""

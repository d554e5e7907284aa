# %% [markdown]
"""
# A vision transformer

A transformer has no batch norm. So the scales and shifts of its layer norms are what adapts. You
train a tiny one on half of scikit-learn's digits, as 16 patches of 2 × 2 pixels. The other half
comes overexposed.
"""

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn

import driftfilter as df

# %% [markdown]
"""
## Train it
"""

# %%
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32) / 16  # [1797, 8, 8]
labels = torch.tensor(digits.target)


# %%
class ViT(nn.Module):
    """Patches as tokens, a class token, pre-norm transformer blocks."""

    def __init__(self, width: int = 48, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, 17, width))
        block = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images [n, 8, 8] -> logits [n, 10]."""
        patches = images.unfold(1, 2, 2).unfold(2, 2, 2).reshape(len(images), 16, 4)
        tokens = torch.cat((self.token.expand(len(images), -1, -1), self.embed(patches)), 1)
        return self.head(self.norm(self.blocks(tokens + self.position))[:, 0])


# %%
model = ViT()
optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
for _ in range(22):
    for index in torch.randperm(900).split(64):
        loss = nn.functional.cross_entropy(model(images[index]), labels[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
model.eval()

# %% [markdown]
"""
## What would adapt

`df.select` lists the parameters that a choice takes: name, layer, shape and count.
"""

# %%
stream, truth = 0.7 * images[900:] + 0.3, labels[900:]
print(df.select(model, df.NormAffine()))

# %% [markdown]
"""
## Adapt, with two sizes of steps

`variance` is how far the parameters may move: the step size, if you think in gradients. Without
batch norm the default is 0.2. Larger moves farther, and risks more.
"""


# %%
def score(name: str, log_probabilities: torch.Tensor) -> None:
    """Accuracy and negative log-likelihood of predictions [n, 10]."""
    accuracy = (log_probabilities.argmax(-1) == truth).double().mean()
    print(
        f"{name:14} accuracy {accuracy:.3f}  NLL "
        f"{nn.functional.nll_loss(log_probabilities, truth):.3f}"
    )


with torch.no_grad():
    score("frozen", model(stream).log_softmax(-1))
for name, options in {"adapted": {}, "variance=0.1": {"variance": 0.1}}.items():
    adapter = df.adapt(model, **options)
    score(name, torch.cat([adapter(batch) for batch in stream.split(32)]))

# %% [markdown]
"""
## With inputs of the training data

Layer norms keep no statistics of the source. A few hundred training inputs, without labels, tell
the adapter what they were: `data=`. It then also knows how far the stream has shifted.
"""

# %%
adapter = df.adapt(model, data=images[:300])
score("data=", torch.cat([adapter(batch) for batch in stream.split(32)]))

# %% [markdown]
"""
Whether that gains depends on the network and the stream. [See whether it
helps](../start/see.md) on labelled samples of yours.
"""

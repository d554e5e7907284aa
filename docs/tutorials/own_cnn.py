# %% [markdown]
"""
# Your own CNN

You train a small convolutional network on one half of scikit-learn's digits. Its camera then goes
bad: the other half comes under a grey veil and noise, in batches of 32, without labels.
"""

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn

import driftfilter as df

# %% [markdown]
"""
## Train it

This is plain torch. Batch norm is what the adapter will find in it.
"""

# %%
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # [1797, 1, 8, 8]
labels = torch.tensor(digits.target)

model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, stride=2, padding=1),
    nn.BatchNorm2d(64),
    nn.ReLU(),
    nn.Conv2d(64, 64, 3, padding=1),
    nn.BatchNorm2d(64),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(64, 10),
)
optimizer = torch.optim.Adam(model.parameters(), 2e-3)
for _ in range(30):
    for index in torch.randperm(900).split(64):
        loss = nn.functional.cross_entropy(model(images[index]), labels[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
model.eval()  # as you would deploy it

# %% [markdown]
"""
## Let it drift, and adapt

The stream is made of images that the network has never seen. The labels are only for counting.
"""


# %%
def score(name: str, log_probabilities: torch.Tensor, truth: torch.Tensor) -> None:
    """Accuracy and negative log-likelihood of predictions [n, 10]."""
    accuracy = (log_probabilities.argmax(-1) == truth).double().mean()
    print(
        f"{name:8} accuracy {accuracy:.3f}  NLL "
        f"{nn.functional.nll_loss(log_probabilities, truth):.3f}"
    )


stream = 0.6 * images[900:] + 0.2 + 0.1 * torch.randn(897, 1, 8, 8)  # a grey veil, and noise
truth = labels[900:]  # only to count
adapter = df.adapt(model)  # the model itself is never changed
print(adapter)

# %%
with torch.no_grad():
    score("clean", model(images[900:]).log_softmax(-1), truth)
    score("frozen", model(stream).log_softmax(-1), truth)
score("adapted", torch.cat([adapter(batch) for batch in stream.split(32)]), truth)

# %% [markdown]
"""
## For your network

- Put it into the mode in which you deploy it: `model.eval()`.
- Give images as in training, normalised in the same way.
- Batches may have any size. In very small ones adaptation gains less.

Networks without batch norm are next: [a ViT](vit.py).
"""

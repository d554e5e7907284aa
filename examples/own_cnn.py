"""A convolutional network of your own: train it, let its camera go bad, adapt.

Trains a small CNN on scikit-learn's 8x8 digits (10 s), then shows it the other half of them under a
grey veil and noise, in batches of 32 without labels. Prints accuracy and NLL of the network as it
is, and of the network adapted.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import driftfilter as df

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
with torch.no_grad():
    score("clean", model(images[900:]).log_softmax(-1), truth)
    score("frozen", model(stream).log_softmax(-1), truth)
score("adapted", torch.cat([adapter(batch) for batch in stream.split(32)]), truth)

"""Serving: one posterior for each tenant over one model in memory, from a pool of threads.

Four clinics send digits to one network, and the scanner of each is off in a way of its own. Every
clinic has an adapter, which holds a belief over the scales and shifts of the norms; all else is the
shared model. Requests come mixed, and four threads serve them. Prints accuracy and NLL of the model
as it is, of one adapter for all clinics, and of one for each; and how much memory a tenant takes
beside the model.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from sklearn.datasets import load_digits
from torch import nn

import driftfilter as df

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # [1797, 1, 8, 8]
labels = torch.tensor(digits.target)


def block(channels: int, filters: int) -> list[nn.Module]:
    """Convolution, batch norm, ReLU."""
    return [nn.Conv2d(channels, filters, 3, padding=1), nn.BatchNorm2d(filters), nn.ReLU()]


model = nn.Sequential(
    *block(1, 64),
    nn.MaxPool2d(2),
    *block(64, 64),
    *block(64, 128),
    nn.Flatten(),
    nn.Linear(2048, 10),
)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for _ in range(8):
    for index in torch.randperm(900).split(64):
        loss = nn.functional.cross_entropy(model(images[index]), labels[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
model.eval()

# Requests of 16 images of one clinic, whose scanner makes a * image + b; clinics in a random order.
scanners = {"north": (0.5, 0.0), "south": (0.5, 0.5), "east": (1.5, -0.2), "west": (1.0, 0.0)}
requests = [
    (clinic, a * images[index] + b, labels[index])
    for clinic, (a, b) in scanners.items()
    for index in (900 + torch.randperm(896)).split(16)
]
requests = [requests[place] for place in torch.randperm(len(requests)).tolist()]
truth = torch.cat([known for _, _, known in requests])


def serve(adapters: dict[str, df.Adapter]) -> torch.Tensor:
    """All requests by four threads; an adapter takes one batch at a time, different adapters do not
    wait for each other.
    """
    with ThreadPoolExecutor(4) as pool:
        return torch.cat(list(pool.map(lambda request: adapters[request[0]](request[1]), requests)))


def score(name: str, found: torch.Tensor) -> None:
    """Accuracy and negative log-likelihood of log-probabilities [n, 10]."""
    accuracy = (found.argmax(-1) == truth).double().mean()
    print(f"{name:14} accuracy {accuracy:.3f}  NLL {nn.functional.nll_loss(found, truth):.3f}")


shared = df.adapt(model)
tenants = {clinic: df.adapt(model) for clinic in scanners}  # they share the tensors of the model
with torch.no_grad():
    score("frozen", torch.cat([model(batch) for _, batch, _ in requests]).log_softmax(-1))
score("one for all", serve(dict.fromkeys(scanners, shared)))
score("one for each", serve(tenants))

own = sum(
    tensor.nbytes for tensor in tenants["north"].state_dict().values()
)  # what df.save would write
print(
    f"{own / 1000:.0f} kB a tenant, "
    f"{sum(tensor.nbytes for tensor in model.parameters()) / 1000:.0f} kB the model"
)

# %% [markdown]
"""
# Serve tenants

Four clinics send digits to one network. The scanner of each is off in a way of its own. Every
clinic gets a belief of its own over the scales and shifts of the norms. All else is the shared
model.
"""

# %%
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import Request, urlopen

import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import nn

import driftfilter as df

# %% [markdown]
"""
## One network
"""

# %%
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

# %% [markdown]
"""
## Requests of four clinics

A request has 16 images of one clinic, whose scanner makes a · image + b. Clinics come in a random
order.
"""

# %%
scanners = {"north": (0.5, 0.0), "south": (0.5, 0.5), "east": (1.5, -0.2), "west": (1.0, 0.0)}
requests = [
    (clinic, a * images[index] + b, labels[index])
    for clinic, (a, b) in scanners.items()
    for index in (900 + torch.randperm(896)).split(16)
]
requests = [requests[place] for place in torch.randperm(len(requests)).tolist()]
truth = torch.cat([known for _, _, known in requests])

# %% [markdown]
"""
## An adapter for each, in one process

Four threads serve the requests. An adapter takes one batch at a time. Different adapters do not
wait for each other. For comparison there is one adapter for all clinics, too.
"""


# %%
def serve(adapters: dict[str, df.Adapter]) -> torch.Tensor:
    """Predictions of all requests by four threads."""
    with ThreadPoolExecutor(4) as pool:
        return torch.cat(list(pool.map(lambda request: adapters[request[0]](request[1]), requests)))


# %%
def score(name: str, found: torch.Tensor) -> None:
    """Accuracy and negative log-likelihood of log-probabilities [n, 10]."""
    accuracy = (found.argmax(-1) == truth).double().mean()
    print(f"{name:14} accuracy {accuracy:.3f}  NLL {nn.functional.nll_loss(found, truth):.3f}")


# %%
shared = df.adapt(model)
tenants = {clinic: df.adapt(model) for clinic in scanners}  # they share the tensors of the model
with torch.no_grad():
    score("frozen", torch.cat([model(batch) for _, batch, _ in requests]).log_softmax(-1))
score("one for all", serve(dict.fromkeys(scanners, shared)))
score("one for each", serve(tenants))

# %%
own = sum(tensor.nbytes for tensor in tenants["north"].state_dict().values())  # of df.save
whole = sum(tensor.nbytes for tensor in model.parameters())
print(f"{own / 1000:.0f} kB a tenant, {whole / 1000:.0f} kB the model")

# %% [markdown]
"""
## As a service

`driftfilter serve` does this over HTTP, and keeps every belief on the disk. It takes a function
that makes the network, and its weights. Here a small program of a client asks it.
"""

# %%
Path("clinic.py").write_text(
    "from torch import nn\n"
    "def block(channels, filters):\n"
    "    return [nn.Conv2d(channels, filters, 3, padding=1), nn.BatchNorm2d(filters), nn.ReLU()]\n"
    "def make():\n"
    "    return nn.Sequential(*block(1, 64), nn.MaxPool2d(2), *block(64, 64), *block(64, 128),\n"
    "                         nn.Flatten(), nn.Linear(2048, 10))\n"
)
save_file(model.state_dict(), "clinic.safetensors")
COMMAND = "-m driftfilter.app.cli serve clinic:make --weights clinic.safetensors --store tenants"


def start() -> tuple[subprocess.Popen[str], str]:
    """A service, and its address: port 0 is any that is free."""
    service = subprocess.Popen(
        [sys.executable, *COMMAND.split(), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert service.stdout is not None
    return service, re.findall(r"http://\S+:\d+", service.stdout.readline())[0]


def ask(address: str, clinic: str, number: int, batch: torch.Tensor) -> tuple[list[int], bool]:
    """Labels of a batch, and whether this step had been taken before."""
    body = json.dumps({"inputs": batch.tolist(), "sequence": number}).encode()
    request = Request(
        f"{address}/v1/tenants/{clinic}/predict", body, {"Content-Type": "application/json"}
    )
    with urlopen(request, timeout=60) as answer:
        return json.load(answer)["labels"], answer.headers.get("Repeated") == "true"


# %% [markdown]
"""
Every step of a tenant has a number. So a client that got no answer sends the same request once
more, and the step is still taken once. That holds if the service was killed between the two.
"""

# %%
service, address = start()
batches = [batch for clinic, batch, _ in requests if clinic == "south"][:3]
for number, batch in enumerate(batches, start=1):
    found, repeated = ask(address, "south", number, batch)
    print("step", number, found)
service.kill()
service.communicate()

service, address = start()  # on the same store
again, repeated = ask(address, "south", 3, batches[2])
print("the same answer:", again == found, " taken before:", repeated)
service.terminate()
service.communicate()

# %% [markdown]
"""
[Serving](../serving.md) has tokens, limits, several machines, and what happens if something breaks.
"""

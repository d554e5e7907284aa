# %% [markdown]
"""
# First stream

A network was trained on clean photographs. Now a camera goes bad: its contrast fades. You wrap the
network in one line, and it follows. Everything here ships with driftfilter, so nothing is
downloaded.
"""

# %%
import matplotlib.pyplot as plt
import torch

import driftfilter as df
from driftfilter.app import corruptions, models, streams

# %% [markdown]
"""
## A stream that drifts

The stream has ten batches of 50 photographs. The first four are clean. After that the contrast is
low. The labels are only for counting: neither the network nor the adapter sees them.
"""

# %%
shipped = streams.sample_images()
images, labels = shipped.images[:500], shipped.labels[:500]  # [500, 3, 32, 32], [500]
faded = corruptions.corrupt(images[200:], "contrast", 5)
batches = torch.cat((images[:200], faded)).split(50)
truth = labels.split(50)

# %% [markdown]
"""
## Wrap the network

`df.adapt` takes any torch classifier and leaves it as it is. `print(adapter)` says what will adapt,
and why.
"""

# %%
model = models.load("resnet20")
adapter = df.adapt(model)
print(adapter)

# %% [markdown]
"""
## Run both

Calling the adapter adapts to the batch and predicts it. Beside it, the frozen network predicts the
same batch. `adapter.estimate` is the accuracy to expect over the last samples. No label is needed
for it.
"""


# %%
def accuracy(outputs: torch.Tensor, known: torch.Tensor) -> float:
    """Share of samples [n] whose largest output [n, k] is right."""
    return (outputs.argmax(-1) == known).double().mean().item()


frozen, adapted, expected = [], [], []
for batch, known in zip(batches, truth, strict=True):
    with torch.no_grad():
        frozen.append(accuracy(model(batch), known))
    adapted.append(accuracy(adapter(batch), known))
    expected.append(adapter.estimate.accuracy)

# %%
figure, axes = plt.subplots(figsize=(7, 3))
axes.plot(frozen, "--", label="frozen")
axes.plot(adapted, label="adapted")
axes.plot(expected, ":", label="expected, without labels")
axes.axvline(3.5, color="grey", linewidth=0.8)
axes.set(xlabel="batch", ylabel="accuracy", ylim=(0, 1))
axes.legend()

# %%
for name, found in {"frozen": frozen, "adapted": adapted}.items():
    print(f"{name:8} accuracy {sum(found[4:]) / 6:.3f}")  # since the contrast has faded

# %% [markdown]
"""
The estimate is over all samples so far, up to the last thousand. So it falls more slowly than the
accuracy of single batches.

## What else an adapter does

`predict` changes nothing. `save` and `load` keep the whole state. `reset` goes back to the source.
"""

# %%
once, again = (adapter.predict(batches[-1]).probabilities for _ in range(2))
print("predict changes nothing:", torch.equal(once, again))
df.save(adapter, "state.safetensors")
print("steps before a reset:", adapter.state.step)
adapter.reset()
print("after it:", adapter.state.step)
df.load(adapter, "state.safetensors")
print("after loading:", adapter.state.step)

# %% [markdown]
"""
Next: [your own CNN](own_cnn.py), or [see whether it helps](../start/see.md) on your data.
"""

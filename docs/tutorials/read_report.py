# %% [markdown]
"""
# Read a report

`driftfilter run` adapts a model along a file. `driftfilter report` then says what happened, on one
page. Here two methods see the same stream. One of them does well, and one fails. You see how a
report tells them apart.
"""

# %%
import json
from pathlib import Path

import numpy as np

from driftfilter.app import corruptions, streams
from driftfilter.app.cli import main

# %% [markdown]
"""
## A stream in a file

Low contrast, and then noise. Labels lie beside the images. They are not needed: with them the
report knows accuracy.
"""

# %%
shipped = streams.sample_images()
images = shipped.images[:600].clone()
images[:300] = corruptions.corrupt(images[:300], "contrast", 4)
images[300:] = corruptions.corrupt(images[300:], "gaussian_noise", 3)
np.savez("drift.npz", x=images.numpy(), labels=shipped.labels[:600].numpy())

# %% [markdown]
"""
## Two runs and a report

`--baseline` predicts every batch with the frozen model, too. Ask for it: without it a report has
nothing to compare with. The second run has a learning rate that is far too high.
"""

# %%
RUN = "run resnet20 drift.npz --batch 50 --baseline --quiet --out"
main([*RUN.split(), "good"])
main([*RUN.split(), "bad", "--preset", "tent:lr=0.3"])
main(["report", "good", "bad", "--out", "report.html"])

# %% [markdown]
"""
## What to read first

**The sentences at the top.** They say what is out of the ordinary: alarms, a run that predicts one
class for most of the samples, batches that were skipped. If there are none, nothing was noticed.

**The four numbers.** They are of the most accurate run, beside the frozen source. Calibration error
(ECE) says how far confidence is off. If it is .05, of a hundred predictions with a confidence of
80 % some 75 or 85 are right. The same numbers stand in `summary.json`:
"""

# %%
for folder in ("good", "bad"):
    quality = json.loads(Path(folder, "summary.json").read_text())["quality"]
    for name, when in (("frozen", "before"), (folder, "after")):
        print(f"{name:8} accuracy {quality[when]['accuracy']:.3f}  NLL {quality[when]['nll']:.3f}")

# %% [markdown]
"""
## What to look at next

| in the report | what it tells |
|---|---|
| accuracy over time | where a run gains or loses; a fall that stays is a collapse |
| entropy over time | known without labels: near zero all along means too sure |
| expected accuracy | what you would know without labels, beside what labels tell |
| reliability diagrams | outlines above the bars: too sure; below them: too unsure |
| by class | a class that is predicted far too often, or never |
| least certain samples | what the model finds hard, as pictures |
| where the parameters moved | one layer far more than the others: look at its inputs |

## Without labels

Of a stream of yours you know no accuracy. Then look at three things. Does the expected accuracy
stay above that of the frozen model? Do the shares of classes look like yours? Are there alarms? The
shares are in `summary.json`, too:
"""

# %%
for folder in ("good", "bad"):
    classes = json.loads(Path(folder, "summary.json").read_text())["classes"]
    most = max(classes, key=lambda each: each["predicted"])
    print(f"{folder}: {most['predicted'] / 6:.0f} % of all predictions are {most['name']}")

# %% [markdown]
"""
[Reports](../report.md) has all that is in one. [Knowing how good it is](../knowing.md) says how far
to trust the estimate.
"""

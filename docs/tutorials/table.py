# %% [markdown]
"""
# A table with scikit-learn

A fitted scikit-learn pipeline meets rows whose sensors wander off. The table is scikit-learn's
digits: 64 columns, ten classes. Rows come in batches of 32, without labels.
"""

# %%
import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, log_loss
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from driftfilter.sklearn import AdaptiveClassifier

# %% [markdown]
"""
## Fit a pipeline, as ever
"""

# %%
X, y = load_digits(return_X_y=True)
train, rows, known, labels = train_test_split(X, y, test_size=0.5, random_state=0, stratify=y)
pipeline = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(train, known)

# %% [markdown]
"""
## Let the columns drift

By the end every column is off by two standard deviations times a normal draw. Some draws hurt and
some do not, so ten of them are tried. `partial_fit` without labels adapts. The pipeline itself is
never changed.
"""

# %%
frozen, adapted = [], []  # probabilities [n, 10], a drift each
for seed in range(10):
    offset = 2 * np.random.default_rng(seed).normal(size=X.shape[1]) * train.std(0)
    drifting = rows + np.linspace(0, 1, len(rows))[:, None] * offset  # nothing is wrong at first
    frozen.append(pipeline.predict_proba(drifting))
    adaptive = AdaptiveClassifier(pipeline)  # the pipeline itself is never changed
    batches = [drifting[start : start + 32] for start in range(0, len(drifting), 32)]
    adapted.append(
        np.concatenate([adaptive.partial_fit(batch).predict_proba(batch) for batch in batches])
    )


# %%
def score(name: str, drifts: list[np.ndarray]) -> None:
    """Mean accuracy and negative log-likelihood of predictions."""
    accuracy = np.mean([accuracy_score(labels, found.argmax(1)) for found in drifts])
    print(
        f"{name:8} accuracy {accuracy:.3f}  NLL "
        f"{np.mean([log_loss(labels, found) for found in drifts]):.3f}"
    )


score("clean", [pipeline.predict_proba(rows)])
score("frozen", frozen)
score("adapted", adapted)

# %% [markdown]
"""
## Without labels

`estimate_` is the accuracy to expect of the last rows.
"""

# %%
print(adaptive.estimate_)
print(f"true: {accuracy_score(labels, adapted[-1].argmax(1)):.3f}")

# %% [markdown]
"""
[Tables](../sklearn.md) has what can be wrapped, and what to expect: offsets and changes of scale
are undone, rotations are out of reach.
"""

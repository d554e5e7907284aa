"""A table: a scikit-learn classifier whose sensors drift.

Fits a pipeline on half of the rows of scikit-learn's digits, a table of 64 columns here. In the
other half every column wanders off, by the end by two standard deviations times a normal draw; some
draws hurt and some do not, so ten of them are tried. Rows come in batches of 32 without labels.
Prints the mean accuracy and NLL of the pipeline as it is, and of the same pipeline when location
and scale of its columns follow the stream.
"""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, log_loss
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from driftfilter.sklearn import AdaptiveClassifier

X, y = load_digits(return_X_y=True)
train, rows, known, labels = train_test_split(X, y, test_size=0.5, random_state=0, stratify=y)
pipeline = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(train, known)

frozen, adapted = [], []  # probabilities [n, 2], a drift each
for seed in range(10):
    offset = 2 * np.random.default_rng(seed).normal(size=X.shape[1]) * train.std(0)
    drifting = rows + np.linspace(0, 1, len(rows))[:, None] * offset  # nothing is wrong at first
    frozen.append(pipeline.predict_proba(drifting))
    adaptive = AdaptiveClassifier(pipeline)  # the pipeline itself is never changed
    batches = [drifting[start : start + 32] for start in range(0, len(drifting), 32)]
    adapted.append(
        np.concatenate([adaptive.partial_fit(batch).predict_proba(batch) for batch in batches])
    )


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

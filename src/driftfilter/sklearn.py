"""scikit-learn: a fitted classifier that adapts to the unlabeled rows it meets. Needs the extra
``driftfilter[sklearn]``.

The classifier becomes a torch module whose first layer is a batch norm over its inputs. It starts
at the moments of the training data and changes nothing then. ``adapt`` treats the features of a
table as it treats any batch norm.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, clone
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression, SGDClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import get_tags
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn
from typing_extensions import Self

from driftfilter import presets
from driftfilter.adapter.adapter import adapt
from driftfilter.base.checks import require, require_count
from driftfilter.filtering import Filter, FilterState
from driftfilter.inference.accuracy import Estimate
from driftfilter.inference.curvature import Hessian
from driftfilter.inference.linearized import Frozen, Linearized
from driftfilter.model.dynamics import RandomWalk
from driftfilter.model.noise import NoNoise
from driftfilter.model.transition import Transition
from driftfilter.monitor.monitor import Monitor
from driftfilter.networks.batch_norm import Ema
from driftfilter.networks.initialization import initialize
from driftfilter.networks.network import STATISTICS
from driftfilter.networks.parameters import Head
from driftfilter.presets.published import bn
from driftfilter.recipe import Recipe
from driftfilter.source.posterior import Gaussian

Array = NDArray[Any]

_ACTIVATIONS = {"identity": nn.Identity, "logistic": nn.Sigmoid, "tanh": nn.Tanh, "relu": nn.ReLU}
_OUTLYING = 8.0  # deviations from the median
# Chosen on synthetic tables, wine and iris (docs/lab/tabular.md); losses that move weights gained
# nothing there.
_RECIPE = bn(Ema(momentum=0.5, diversity=4.0))
# What labels teach if nothing else moves weights: the last layer, by what they say alone.
_OF_LABELS: dict[str, Any] = {
    "parameters": Head(),
    "source": Gaussian(0.1, "low_rank", 64),
    "transition": Transition(RandomWalk(), NoNoise()),
    "inference": Linearized(Hessian()),
}


class FeatureMoments(NamedTuple):
    """Mean and standard deviation of the features that enter a classifier, over its training
    data.

    Values farther from the median than eight deviations, as the quartiles give them, count as if
    they were there: a few outliers in training must not set the scale for all of a stream.
    """

    mean: Array  # [D]
    deviation: Array  # [D], 1 if a feature does not vary

    @classmethod
    def of(cls, features: Array) -> Self:
        """The moments of features [n, D]."""
        low, middle, high = np.quantile(features, (0.25, 0.5, 0.75), axis=0)
        reach = np.where(high > low, _OUTLYING * (high - low) / 1.349, np.inf)
        features = np.clip(features, middle - reach, middle + reach)
        mean, deviation = features.mean(0), features.std(0)
        return cls(mean, np.where(deviation > 1e-12 * np.abs(mean), deviation, 1.0))


def as_module(classifier: Any, moments: FeatureMoments | None = None) -> nn.Sequential:
    """A fitted classifier as a float64 module: features [n, D] -> logits [n, k], whose softmax is
    its predict_proba.

    With ``moments`` the module takes standardised features z = (x - mean) / deviation, and a batch
    norm comes first.
    """
    weights, biases, activation, softmax = _layers(classifier)
    require(
        len(classifier.classes_) > 1,
        "estimator.classes_",
        classifier.classes_,
        "two classes or more",
    )
    layers: list[nn.Module] = []
    if moments is not None:  # W x + b = (W deviation) z + (b + W mean)
        layers = [nn.BatchNorm1d(len(moments.mean), dtype=torch.float64)]
        biases[0] = biases[0] + weights[0] @ moments.mean
        weights[0] = weights[0] * (moments.deviation * np.sqrt(1 + layers[0].eps))  # type: ignore[operator]
    if len(biases[-1]) == 1:  # p = σ(f) of the second class is the softmax of (0, f)
        weights[-1], biases[-1], softmax = (
            _prepend_zeros(weights[-1]),
            _prepend_zeros(biases[-1]),
            True,
        )
    for place, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        layers += [activation()] * (place > 0) + [_linear(weight, bias)]
    # The softmax of log σ(f) is σ(f_c) / Σ_j σ(f_j), as scikit-learn normalises one-versus-rest.
    return nn.Sequential(*layers, *([] if softmax else [nn.LogSigmoid()])).eval()


def _layers(classifier: Any) -> tuple[list[Array], list[Array], type[nn.Module], bool]:
    """Weights [out, in] and biases [out] of every layer, what comes between them, and whether a
    softmax comes last.
    """
    if isinstance(classifier, MLPClassifier):
        softmax = classifier.out_activation_ == "softmax"
        require(
            softmax or classifier.n_outputs_ == 1,
            "estimator",
            classifier,
            "a classifier of one label a row",
        )
        weights = [np.asarray(weight.T, np.float64) for weight in classifier.coefs_]
        return weights, list(classifier.intercepts_), _ACTIVATIONS[classifier.activation], softmax
    logistic = isinstance(classifier, LogisticRegression)
    require(
        logistic or (isinstance(classifier, SGDClassifier) and classifier.loss == "log_loss"),
        "estimator",
        classifier,
        "LogisticRegression, SGDClassifier(loss='log_loss'), MLPClassifier, or a Pipeline that "
        "ends in one",
    )
    weight = classifier.coef_
    weight = weight.toarray() if hasattr(weight, "toarray") else weight  # after sparsify()
    return (
        [np.asarray(weight, np.float64)],
        [np.broadcast_to(classifier.intercept_, len(weight))],
        nn.Identity,
        logistic,
    )


def _prepend_zeros(rows: Array) -> Array:
    return np.concatenate((np.zeros_like(rows), rows))


def _linear(weight: Array, bias: Array) -> nn.Linear:
    layer: nn.Linear = nn.utils.skip_init(
        nn.Linear, weight.shape[1], weight.shape[0], dtype=torch.float64
    )
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight))
        layer.bias.copy_(torch.tensor(bias))
    return layer


def _parts(estimator: Any) -> tuple[list[Any], Any]:
    """The transformers of a pipeline, and the classifier at its end."""
    if isinstance(estimator, FrozenEstimator):
        return _parts(estimator.estimator)
    if not isinstance(estimator, Pipeline):
        return [], estimator
    *before, (_, last) = estimator.steps
    inner, classifier = _parts(last)
    return [step for _, step in before if step not in (None, "passthrough")] + inner, classifier


def _features(estimator: Any, X: Any) -> Array:
    """What enters the classifier [n, D], checked as the classifier checks it."""
    transformers, classifier = _parts(estimator)
    for transformer in transformers:
        X = transformer.transform(X)
    features: Array = validate_data(classifier, X, reset=False, dtype=np.float64)
    return features


def _moments_of_scaler(estimator: Any) -> FeatureMoments | None:
    """The moments that a StandardScaler in front of the classifier remembers; None without one."""
    transformers, _ = _parts(estimator)
    scaler = transformers[-1] if transformers else None
    scaler = scaler.estimator if isinstance(scaler, FrozenEstimator) else scaler
    if not isinstance(scaler, StandardScaler) or not scaler.with_std:
        return None
    mean = np.zeros_like(scaler.mean_) if scaler.with_mean else scaler.mean_ / scaler.scale_
    return FeatureMoments(mean, np.ones_like(scaler.scale_))


@final
class AdaptiveClassifier(ClassifierMixin, MetaEstimatorMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier that follows a stream of rows without labels.

    Parameters
    ----------
    estimator : LogisticRegression, SGDClassifier(loss="log_loss"), MLPClassifier, or a Pipeline
        Fitted: used as it is, if a StandardScaler stands before the classifier (its moments are
        the reference). Fitted, in a FrozenEstimator: ``fit(X)`` keeps it, and takes the moments of
        X. Otherwise ``fit(X, y)`` fits a clone.
    recipe : Recipe, name of a preset, or None
        What adapts. None, or "driftfilter", whose choice for a table it is: the location and scale
        of every feature follow the stream, the weights stay.
    batch_size : int
        How many rows an update takes, however many come in a call; the rest waits in
        ``waiting_`` for more.

    What ``set_params`` changes counts from the next ``fit``, or ``reset``, on.

    Attributes
    ----------
    classes_, n_features_in_, feature_names_in_ : those of the fitted estimator
    estimator_ : the fitted estimator
    adapter_ : driftfilter.Adapter, whose state is what has been learned

    Examples
    --------
    >>> from sklearn.datasets import load_wine
    >>> from sklearn.linear_model import LogisticRegression
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import StandardScaler
    >>> X, y = load_wine(return_X_y=True)
    >>> model = AdaptiveClassifier(make_pipeline(StandardScaler(), LogisticRegression()).fit(X, y))
    >>> moved = 1.3 * X
    >>> before = model.score(moved, y)
    >>> bool(model.partial_fit(moved).score(moved, y) > before)
    True
    """

    waiting_: Array  # [m, D], m < batch_size: rows that have come, standardised, and wait for more
    taught_: FilterState | None = None  # what labels have taught the last layer; None: nothing

    def __init__(
        self, estimator: Any, recipe: Recipe | str | None = None, batch_size: int = 32
    ) -> None:
        self.estimator = estimator
        self.recipe = recipe
        self.batch_size = batch_size

    # scikit-learn's manner

    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit a clone of the estimator (a FrozenEstimator stays as it is), and take the moments of
        X as the source's.
        """
        estimator = clone(self.estimator).fit(X, y)
        self._start(estimator, FeatureMoments.of(_features(estimator, X)))
        return self

    def partial_fit(self, X: Any, y: Any = None, classes: Any = None) -> Self:
        """Adapt to rows X [n, features] without labels; or, with y [n], learn the labels of rows,
        which then do not count as rows of the stream once more. ``classes``, which scikit-learn's
        own methods ask for, are those of the fitted estimator.

        Without a recipe labels teach the last layer: each call is a supervised Kalman step on a
        Gaussian belief around the fitted weights, which nothing forgets. A recipe that adapts
        parameters learns them by its own inference (``Adapter.learn``).
        """
        self._require_started()
        if classes is not None:
            allowed = f"those of the fitted estimator, {self.classes_.tolist()}"
            fits = np.array_equal(np.unique(classes), self.classes_)
            require(fits, "partial_fit: classes", classes, allowed)
        if y is not None:
            return self._learn(self._inputs(X), self._indices(y))
        rows = np.concatenate((self.waiting_, self._inputs(X)))
        ready = len(rows) - len(rows) % self._size
        if ready:
            self.adapter_.update(torch.from_numpy(rows[:ready]))
            self._frozen = self._freeze_statistics()
        self.waiting_ = rows[ready:]
        return self

    def predict_proba(self, X: Any) -> Array:
        """p(y given x) [n, k] as adapted so far, each row by itself; changes nothing."""
        self._require_started()
        rows, still = torch.from_numpy(self._inputs(X)), self._frozen
        state = self.adapter_.state if self.taught_ is None else self.taught_
        return (
            self.adapter_.predict(rows) if still is None else still.predict(state, rows)
        ).probabilities.numpy()

    def predict(self, X: Any) -> Array:
        """The most likely class of each row [n]."""
        labels: Array = self.classes_[self.predict_proba(X).argmax(1)]
        return labels

    @property
    def estimate_(self) -> Estimate:
        """Expected accuracy over the last thousand rows adapted to, without labels
        (docs/knowing.md).
        """
        self._require_started()
        return self.adapter_.estimate

    def reset(self) -> Self:
        """Back to the source, as if no row had come since ``fit``."""
        self._require_started()
        self._start(self.estimator_, self.moments_)
        return self

    # river's manner

    def learn_one(self, x: Mapping[Any, float], y: Any = None) -> None:
        """Adapt to one row, its values by feature name (by position 0, 1, … if the estimator knows
        no names), or learn its label y.
        """
        self.partial_fit(self._row(x), None if y is None else [y])

    def predict_proba_one(self, x: Mapping[Any, float]) -> dict[Any, float]:
        """The probability of every class for one row."""
        return dict(
            zip(self.classes_.tolist(), self.predict_proba(self._row(x))[0].tolist(), strict=True)
        )

    def predict_one(self, x: Mapping[Any, float]) -> Any:
        """The most likely class of one row."""
        return self.predict(self._row(x)).tolist()[0]

    # What scikit-learn asks about

    @property
    def classes_(self) -> Array:
        """The labels [k], in the order of probabilities."""
        classes: Array = self._fitted_estimator().classes_
        return classes

    @property
    def n_features_in_(self) -> int:
        """How many columns a table has."""
        return int(self._fitted_estimator().n_features_in_)

    @property
    def feature_names_in_(self) -> Array:
        """The names of the columns; an estimator fitted on an array has none."""
        names: Array = self._fitted_estimator().feature_names_in_
        return names

    def __sklearn_is_fitted__(self) -> bool:
        try:
            self._fitted_estimator()
        except NotFittedError:
            return False
        return True

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = get_tags(self.estimator).input_tags.allow_nan
        return tags

    # How it is done

    def _fitted_estimator(self) -> Any:
        """The estimator that adapts: the one fitted here, or the given one if it came fitted."""
        fitted = self.__dict__.get("estimator_")
        if fitted is None:
            check_is_fitted(self.estimator)
            fitted = self.estimator
        return fitted

    def _require_started(self) -> None:
        """Raise unless there is something to adapt; an estimator that came fitted starts here."""
        check_is_fitted(self)
        if "adapter_" not in self.__dict__:
            self._start(self._fitted_estimator(), _moments_of_scaler(self.estimator))

    def _start(self, estimator: Any, moments: FeatureMoments | None) -> None:
        require_count("AdaptiveClassifier.batch_size", self.batch_size, 1)
        require(
            moments is not None,
            "AdaptiveClassifier: the moments of the training data",
            moments,
            "known: put the estimator into a FrozenEstimator and call fit(X) with rows it was "
            "trained on",
        )
        assert moments is not None
        recipe = self.recipe
        guarded: dict[str, Any] = {}
        if recipe in (None, "driftfilter"):  # its losses are for images: docs/lab/tabular.md
            recipe, guarded = _RECIPE, {"monitor": Monitor()}
        elif isinstance(recipe, str):
            recipe = presets.get(recipe)
        require(
            isinstance(recipe, Recipe)
            and (isinstance(recipe.statistics, Ema) or recipe.statistics == "source"),
            "AdaptiveClassifier.recipe",
            self.recipe,
            "a Recipe whose statistics are Ema(...) or 'source', so that each row can be "
            "predicted by itself",
        )
        module = as_module(_parts(estimator)[1], moments)
        self.adapter_ = adapt(module, replace(recipe, chunk=self.batch_size), **guarded)
        self.estimator_, self.moments_ = estimator, moments
        self._module, self._size = module, self.batch_size
        self.waiting_ = np.empty((0, len(moments.mean)))
        self.taught_ = None
        self._frozen = self._freeze_statistics()

    def _inputs(self, X: Any) -> Array:
        """Standardised features z [n, D]."""
        return (_features(self.estimator_, X) - self.moments_.mean) / self.moments_.deviation

    def _indices(self, y: Any) -> Array:
        """The places [n] of labels among the classes."""
        labels = np.asarray(y)
        known = np.isin(labels, self.classes_)
        allowed = f"of the classes {self.classes_.tolist()}"
        require(bool(known.all()), "partial_fit: y", labels[~known][:5].tolist(), allowed)
        places: Array = np.searchsorted(self.classes_, labels)
        return places

    def _learn(self, rows: Array, labels: Array) -> Self:
        """Learn the labels [n] of rows, standardised [n, D]."""
        fits = labels.shape == (len(rows),)
        require(fits, "partial_fit: y", f"shape {labels.shape}", f"of shape [{len(rows)}]")
        inputs, told = torch.from_numpy(rows), torch.from_numpy(labels).long()
        if not isinstance(self.adapter_.recipe.inference, Frozen):
            self.adapter_.learn(inputs, told)
            return self
        filt, state = self._build_head()
        try:
            self.taught_ = filt.learn(self.taught_ or state, inputs, told)[0]
        except ValueError as error:  # something stands behind the last layer, such as one-vs-rest
            problem = f"the last layer of {self.estimator_} cannot be taught: {error}"
            raise ValueError(f"partial_fit: y must be left out, {problem}") from error
        self._frozen = filt
        return self

    def _build_head(self) -> tuple[Filter, FilterState]:
        """A filter of the last layer that learns from labels alone, and its first state."""
        recipe = replace(self.adapter_.recipe, **_OF_LABELS, statistics="source")
        model, mean, _ = initialize(self._carry_moments(), recipe.parameters, "source")
        filt = recipe.filter(model)
        return filt, filt.init(recipe.source(model, mean), self.adapter_.seed)

    def _carry_moments(self) -> nn.Sequential:
        """The module with the moments carried so far as its own."""
        module = copy.deepcopy(self._module)
        carried = self.adapter_.state.memory.get(STATISTICS)
        if carried is not None:
            module[0].running_mean, module[0].running_var = carried.clone().chunk(2)
        return module

    def _freeze_statistics(self) -> Filter | None:
        """A filter on the module with the moments carried so far as its own, so that each row is
        predicted by itself; made once an update.

        None if the recipe carries none: the adapter then predicts rows one by one itself.
        """
        recipe = self.adapter_.recipe
        if self.taught_ is not None:
            return self._build_head()[0]
        if recipe.statistics == "source":
            return None
        return recipe.filter(initialize(self._carry_moments(), recipe.parameters, "source").model)

    def _row(self, x: Mapping[Any, float]) -> Any:
        """One row as a table, in the order of the features."""
        self._require_started()
        names = list(getattr(self, "feature_names_in_", range(self.n_features_in_)))
        require(set(x) == set(names), "x", sorted(map(str, x)), f"a mapping from {names}")
        values = [[x[name] for name in names]]
        if not hasattr(self, "feature_names_in_"):
            return np.array(values)
        import pandas as pd  # the estimator was fitted on a table with names

        return pd.DataFrame(values, columns=names)

"""AdaptiveClassifier: scikit-learn's own checks, its probabilities against the estimator's, its
moments against NumPy's.
"""

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.datasets import load_breast_cancer, load_wine, make_classification
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV, SGDClassifier
from sklearn.metrics import balanced_accuracy_score
from sklearn.model_selection import cross_val_score
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import MinMaxScaler, OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import driftfilter as df
from driftfilter.networks.batch_norm import diversity
from driftfilter.sklearn import AdaptiveClassifier, FeatureMoments, as_module

_UNFITTED = "the check calls partial_fit of an estimator that was never fitted"
EXPECTED_FAILURES = {
    "check_n_features_in_after_fitting": _UNFITTED,
    "check_estimators_partial_fit_n_features": _UNFITTED,
}
ONE_VS_REST = "labels teach a last layer, and one-vs-rest stands behind this one"
CHECKED = [
    AdaptiveClassifier(LogisticRegression()),
    AdaptiveClassifier(
        make_pipeline(StandardScaler(), SGDClassifier(loss="log_loss", random_state=0))
    ),
]


def expected_failures(estimator: Any) -> dict[str, str]:
    """Checks that fail, and why."""
    if isinstance(estimator.estimator, LogisticRegression):
        return EXPECTED_FAILURES
    return {**EXPECTED_FAILURES, "check_fit_score_takes_y": ONE_VS_REST}


@parametrize_with_checks(CHECKED, expected_failed_checks=expected_failures, xfail_strict=True)  # type: ignore[untyped-decorator]
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_what_scikit_learn_checks(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)


def table(classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """300 rows of 6 features with scales far apart, and their labels, which are words."""
    X, y = make_classification(
        300, 6, n_informative=4, n_redundant=1, n_classes=classes, random_state=seed
    )
    return X * np.array([1e-6, 1e-2, 1, 1, 10, 1e3]) + 3, np.array(list("cab"))[y]


def standard(classes: int) -> tuple[np.ndarray, np.ndarray, Pipeline]:
    """The table, and a logistic regression of its standardised features."""
    X, y = table(classes)
    return X, y, make_pipeline(StandardScaler(), LogisticRegression()).fit(X, y)


CLASSIFIERS = {
    "logistic": LogisticRegression(),
    "no_intercept": LogisticRegression(fit_intercept=False),
    "cv": LogisticRegressionCV(
        Cs=2, cv=3, l1_ratios=(0.0,), use_legacy_attributes=False, scoring="accuracy"
    ),
    "sgd": SGDClassifier(loss="log_loss", random_state=0),
    **{
        f"mlp_{name}": MLPClassifier((7, 5), name, max_iter=5, random_state=0)
        for name in ("identity", "tanh", "relu")
    },
    "mlp_logistic": MLPClassifier((), "logistic", max_iter=5, random_state=0),
}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("name", list(CLASSIFIERS))
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("with_moments", [False, True])
def test_module_has_the_classifiers_probabilities(
    name: str, classes: int, with_moments: bool
) -> None:
    X, y = table(classes)
    classifier = make_pipeline(StandardScaler(), clone(CLASSIFIERS[name])).fit(X, y)[-1]
    X = np.random.default_rng(0).normal(1, 3, X.shape)
    moments = FeatureMoments(np.arange(6.0), np.geomspace(0.1, 10, 6)) if with_moments else None
    inputs = X if moments is None else (X - moments.mean) / moments.deviation
    with torch.no_grad():
        probabilities = as_module(classifier, moments)(torch.from_numpy(inputs)).softmax(-1).numpy()
    np.testing.assert_allclose(probabilities, classifier.predict_proba(X), rtol=0, atol=1e-12)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("frozen", [False, True])
def test_without_adaptation_it_is_the_estimator(classes: int, frozen: bool) -> None:
    X, y = table(classes)
    estimator = make_pipeline(MinMaxScaler(), StandardScaler(), LogisticRegression()).fit(X, y)
    model = AdaptiveClassifier(FrozenEstimator(estimator) if frozen else estimator)
    if frozen:
        model.fit(X)
    np.testing.assert_allclose(
        model.predict_proba(X), estimator.predict_proba(X), rtol=0, atol=1e-12
    )
    np.testing.assert_array_equal(model.predict(X), estimator.predict(X))
    np.testing.assert_array_equal(model.classes_, estimator.classes_)
    assert (model.score(X, y), model.n_features_in_) == (estimator.score(X, y), 6)


def test_standardised_sgd_and_sparse_weights() -> None:
    X, y = table(3)
    estimator = make_pipeline(StandardScaler(), SGDClassifier(loss="log_loss", random_state=0)).fit(
        X, y
    )
    dense = AdaptiveClassifier(estimator).predict_proba(X)
    estimator[-1].sparsify()
    np.testing.assert_array_equal(AdaptiveClassifier(estimator).predict_proba(X), dense)


@pytest.mark.parametrize("options", [{}, {"with_mean": False}], ids=["centred", "not_centred"])
def test_a_scaler_remembers_the_moments_of_the_training_data(options: dict[str, bool]) -> None:
    X, y = table(2)
    X[:, 3] = 5.0  # does not vary
    estimator = make_pipeline(StandardScaler(**options), LogisticRegression(max_iter=10_000)).fit(
        X, y
    )
    given = AdaptiveClassifier(estimator).partial_fit(X)
    fitted = AdaptiveClassifier(FrozenEstimator(estimator)).fit(X).partial_fit(X)
    np.testing.assert_allclose(given.moments_, fitted.moments_, atol=1e-9)
    np.testing.assert_allclose(given.predict_proba(X), fitted.predict_proba(X), atol=1e-9)


def followed(estimator: Any, X: np.ndarray, size: int) -> np.ndarray:
    """The probabilities after the whole batches of a stream, by hand: Ema's moments of the features
    of each batch, bounded unless they are far off all together.
    """
    mean, variance, trust = np.zeros(X.shape[1]), np.ones(X.shape[1]), 1.0
    scaler, classifier = estimator
    Z = scaler.transform(X)

    def logits(rows: np.ndarray) -> np.ndarray:
        scores = classifier.decision_function(
            (rows - mean) / np.sqrt(variance + 1e-5) * np.sqrt(1 + 1e-5)
        )
        return (
            np.stack((np.zeros_like(scores), scores), 1) if scores.ndim == 1 else np.asarray(scores)
        )

    for start in range(0, len(Z) - len(Z) % size, size):
        batch, full = Z[start : start + size], 0.5 * min(1, size / 64)
        spread, reach = np.maximum(variance, batch.var(0)) + 1e-5, 10 * np.sqrt(variance + 1e-5)
        far = ((batch.mean(0) - mean) ** 2 / spread).mean() / 9 / (1 + 8 / size) - 1
        least = 0.0 if size == 1 else np.clip(far, 0, 1) * min(1, size / 16)
        bounded = batch.clip(mean - reach, mean + reach)
        own = [(1 - least) * f(bounded, 0) + least * f(batch, 0) for f in (np.mean, np.var)]

        def blend(share: float, own: Any = own, before: Any = (mean, variance)) -> Any:
            shift = own[0] - before[0]
            mixed = (1 - share) * before[1] + share * own[1] + share * (1 - share) * shift**2
            return before[0] + share * shift, mixed

        mean, variance = blend(max(full * trust, least))  # by which the batch is normalised
        found = diversity(torch.from_numpy(logits(batch))).item() ** 4
        mean, variance = blend(max(full * (trust * found) ** 0.5, least))
        trust = found
    return torch.from_numpy(logits(Z)).softmax(-1).numpy()


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("size", [1, 32, 100])
def test_moments_follow_the_stream(classes: int, size: int) -> None:
    X, _, estimator = standard(classes)
    stream = 1.5 * X[:130] + X.std(0)
    model = AdaptiveClassifier(estimator, batch_size=size).partial_fit(stream)
    np.testing.assert_allclose(
        model.predict_proba(stream), followed(estimator, stream, size), rtol=0, atol=1e-9
    )
    assert len(model.waiting_) == 130 % size


def test_how_a_stream_is_cut_into_calls_does_not_matter() -> None:
    X, _, estimator = standard(3)
    whole, cut, single = (AdaptiveClassifier(estimator) for _ in range(3))
    whole.partial_fit(2 * X)
    for piece in np.split(2 * X, [3, 40, 41, 205]):
        cut.partial_fit(piece)
    for row in 2 * X:
        single.learn_one(dict(enumerate(row)))
    expected = whole.predict_proba(X)
    for other in (cut, single):
        np.testing.assert_array_equal(other.predict_proba(X), expected)
    assert np.abs(expected - estimator.predict_proba(X)).max() > 0.01


def test_rows_are_predicted_apart_and_nothing_changes() -> None:
    X, _, estimator = standard(3)
    model = AdaptiveClassifier(estimator).partial_fit(2 * X)
    state, together = model.adapter_.state, model.predict_proba(X)
    apart = np.concatenate([model.predict_proba(row[None]) for row in X[:20]])
    np.testing.assert_allclose(apart, together[:20], rtol=0, atol=1e-12)
    assert model.adapter_.state is state
    assert len(model.waiting_) == len(X) % 32


def test_a_shift_of_location_and_scale_is_undone() -> None:
    X, y = load_breast_cancer(return_X_y=True)
    rng = np.random.default_rng(0)
    train, test = np.split(rng.permutation(len(X)), 2 * [len(X) // 2])[::2]
    estimator = make_pipeline(StandardScaler(), LogisticRegression()).fit(X[train], y[train])
    moved = X[test] * np.exp(rng.normal(0, 0.5, X.shape[1])) + X.std(0) * rng.normal(
        0, 1, X.shape[1]
    )
    model = AdaptiveClassifier(estimator)
    for _ in range(5):
        model.partial_fit(moved)
    assert estimator.score(moved, y[test]) < 0.9
    assert model.score(moved, y[test]) > 0.95
    assert model.reset().score(moved, y[test]) == estimator.score(moved, y[test])


def test_other_recipes() -> None:
    X, _, estimator = standard(2)
    source = AdaptiveClassifier(estimator, recipe="source").partial_fit(2 * X)
    np.testing.assert_allclose(source.predict_proba(X), estimator.predict_proba(X), atol=1e-12)
    head = AdaptiveClassifier(
        estimator, df.presets.get("head_ekf", statistics="source")
    ).partial_fit(2 * X)
    adapter = df.adapt(
        as_module(estimator[-1], FeatureMoments(np.zeros(6), np.ones(6))), head.adapter_.recipe
    )
    rows = torch.from_numpy(estimator[0].transform(2 * X))
    adapter.update(rows[:288])
    np.testing.assert_allclose(
        head.predict_proba(2 * X), adapter.predict(rows).probabilities.numpy(), atol=1e-10
    )
    np.testing.assert_allclose(
        head.adapter_.belief.mean.numpy(), adapter.belief.mean.numpy(), atol=1e-10
    )


def test_parameters_move_where_a_recipe_moves_them() -> None:
    X, _, estimator = standard(3)
    recipe = df.presets.get("tent", statistics=df.Ema(1.0), lr=0.1)
    model = AdaptiveClassifier(estimator, recipe, batch_size=300).partial_fit(2 * X)
    Z = torch.from_numpy(estimator[0].transform(2 * X))
    scale, shift = model.adapter_.belief.mean.split(6)  # of the batch norm
    inputs = (Z - Z.mean(0)) / (Z.var(0, correction=0) + 1e-5).sqrt() * scale + shift
    expected = estimator[-1].predict_proba((inputs * (1 + 1e-5) ** 0.5).numpy())
    np.testing.assert_allclose(model.predict_proba(2 * X), expected, atol=1e-10)
    assert (scale - 1).abs().max() > 0.05


def test_clone_and_parameters() -> None:
    X, y, estimator = standard(2)
    model = AdaptiveClassifier(estimator, batch_size=16).partial_fit(X)
    other = clone(model)
    assert other.get_params()["batch_size"] == 16
    with pytest.raises(NotFittedError):
        other.predict(X)
    kept = clone(AdaptiveClassifier(FrozenEstimator(estimator)))
    np.testing.assert_allclose(
        kept.predict_proba(X), estimator.predict_proba(X), rtol=0, atol=1e-12
    )
    model.set_params(estimator__logisticregression__C=0.1, batch_size=8)
    assert (model.estimator[-1].C, model.reset().adapter_.recipe.chunk) == (0.1, 8)
    assert cross_val_score(clone(model), X, y, cv=3).min() > 0.5


def test_a_fit_leaves_the_given_estimator_alone() -> None:
    X, y = table(2)
    estimator = LogisticRegression(solver="newton-cholesky")
    model = AdaptiveClassifier(estimator).fit(X, y)
    assert not hasattr(estimator, "coef_")
    np.testing.assert_allclose(
        model.predict_proba(X), estimator.fit(X, y).predict_proba(X), rtol=0, atol=1e-10
    )


def test_pickles_in_the_middle_of_a_stream() -> None:
    X, _, estimator = standard(3)
    model = AdaptiveClassifier(estimator).partial_fit(2 * X[:50])
    other = pickle.loads(pickle.dumps(model))
    for each in (model, other):
        each.partial_fit(2 * X[50:])
    np.testing.assert_array_equal(other.predict_proba(X), model.predict_proba(X))


def frame() -> tuple[pd.DataFrame, np.ndarray]:
    X, y = table(2)
    return pd.DataFrame(X, columns=list("pqrstu")).assign(
        kind=np.where(X[:, 2] > 3, "old", "new")
    ), y


def mixed() -> Pipeline:
    columns = make_column_transformer(
        (StandardScaler(), list("pqrstu")), (OneHotEncoder(), ["kind"])
    )
    return make_pipeline(columns, LogisticRegression())


def test_tables_with_names_and_words() -> None:
    X, y = frame()
    model = AdaptiveClassifier(mixed()).fit(X, y)
    np.testing.assert_allclose(
        model.predict_proba(X), mixed().fit(X, y).predict_proba(X), atol=1e-10
    )
    assert list(model.feature_names_in_) == [*"pqrstu", "kind"]
    with pytest.raises(ValueError, match="missing"):
        model.predict(X[["p", "q"]])


def test_one_row_in_rivers_manner() -> None:
    X, y = frame()
    model = AdaptiveClassifier(mixed(), batch_size=4).fit(X, y)
    whole = AdaptiveClassifier(mixed(), batch_size=4).fit(X, y).partial_fit(X.iloc[:4])
    for row in X.iloc[:4].to_dict("records"):
        model.learn_one(dict(reversed(row.items())))
    first = X.iloc[0].to_dict()
    assert model.predict_proba_one(first) == dict(
        zip("ac", whole.predict_proba(X.iloc[:1])[0], strict=True)
    )
    assert model.predict_one(first) == whole.predict(X.iloc[:1])[0]
    with pytest.raises(
        ValueError,
        match=r"x must be a mapping from \['p', 'q', 'r', 's', 't', 'u', 'kind'\], got \['p'\]",
    ):
        model.learn_one({"p": 1.0})


def test_what_it_refuses() -> None:
    X, y = load_wine(return_X_y=True)
    plain, scaled = (
        LogisticRegression(max_iter=5000),
        make_pipeline(StandardScaler(), LogisticRegression()),
    )
    for estimator in (
        RandomForestClassifier(2),
        SGDClassifier(loss="hinge"),
        SGDClassifier(loss="modified_huber"),
    ):
        with pytest.raises(ValueError, match="estimator must be LogisticRegression"):
            AdaptiveClassifier(make_pipeline(StandardScaler(), estimator)).fit(X, y)
    with pytest.raises(
        ValueError, match="moments of the training data must be known: put the estimator"
    ):
        AdaptiveClassifier(make_pipeline(MinMaxScaler(), plain).fit(X, y)).partial_fit(X)
    fitted = scaled.fit(X, y)
    for options, message in (
        ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
        ({"recipe": "tent"}, r"recipe must be a Recipe whose statistics are Ema.* got 'tent'"),
    ):
        with pytest.raises(ValueError, match=message):
            AdaptiveClassifier(fitted, **options).predict(X)
    with pytest.raises(ValueError, match=r"y must be of the classes \[0, 1, 2\], got \[3\]"):
        AdaptiveClassifier(fitted).partial_fit(X[:2], [0, 3])
    with pytest.raises(ValueError, match=r"y must be of shape \[3\]"):
        AdaptiveClassifier(fitted).partial_fit(X[:3], [0, 1])
    with pytest.raises(ValueError, match="two classes or more"):
        AdaptiveClassifier(MLPClassifier((2,), max_iter=1000, tol=1)).fit(X, np.zeros(len(X)))
    several = MLPClassifier((2,), max_iter=1000, tol=1).fit(X, np.stack((y == 0, y > 0), 1))
    with pytest.raises(ValueError, match="one label a row"):
        as_module(several)


def test_a_refused_batch_leaves_the_state_as_it_was() -> None:
    X, _, estimator = standard(2)
    model = AdaptiveClassifier(estimator).partial_fit(X[:40])
    state, waiting = model.adapter_.state, model.waiting_
    bad = X.copy()
    bad[-1, 0] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        model.partial_fit(bad)
    assert model.adapter_.state is state
    assert model.waiting_ is waiting


@pytest.mark.parametrize("share", [0.9, 0.97])
@pytest.mark.parametrize("moved", [0.0, 0.7])
def test_the_default_by_name_keeps_a_rare_class(share: float, moved: float) -> None:
    """Predicting nothing but the larger class has a balanced accuracy of one half."""
    X, y = make_classification(
        3000, 12, n_informative=6, weights=[share], class_sep=1.5, flip_y=0.0, random_state=1
    )
    fitted = make_pipeline(StandardScaler(), LogisticRegression()).fit(X[:1500], y[:1500])
    stream, labels = X[1500:] + moved, y[1500:]
    plain, named = AdaptiveClassifier(fitted), AdaptiveClassifier(fitted, recipe="driftfilter")
    found = []
    for start in range(0, len(stream), 50):
        piece = stream[start : start + 50]
        found.append(named.partial_fit(piece).predict_proba(piece))
        np.testing.assert_array_equal(found[-1], plain.partial_fit(piece).predict_proba(piece))
    before = balanced_accuracy_score(labels, fitted.predict(X[1500:]))
    after = balanced_accuracy_score(labels, np.concatenate(found).argmax(1))
    assert before > 0.75
    assert after > before - 0.03


def test_a_recipe_that_is_given_is_taken_as_it_is() -> None:
    X, y = load_wine(return_X_y=True)
    fitted = make_pipeline(StandardScaler(), LogisticRegression()).fit(X, y)
    recipe = df.presets.get("driftfilter")
    model = AdaptiveClassifier(fitted, recipe=recipe).partial_fit(X)
    assert model.adapter_.recipe == replace(recipe, chunk=32)


def test_expected_accuracy_is_near_the_truth_after_a_shift() -> None:
    X, y, fitted = standard(2)
    model = AdaptiveClassifier(fitted)
    assert model.estimate_.samples == 0
    moved = X * 1.4 + 0.5 * X.std(0)
    model.partial_fit(moved)
    found = model.estimate_
    assert found.samples == len(X) - len(X) % 32
    assert found.low <= model.score(moved, y) <= found.high
    model.reset()
    assert model.estimate_.samples == 0


def test_labels_teach_the_last_layer() -> None:
    """Two classes change their names: nothing but labels can tell."""
    X, y = load_wine(return_X_y=True)
    fitted = make_pipeline(StandardScaler(), LogisticRegression()).fit(X, y)
    model, renamed = AdaptiveClassifier(fitted), np.array([1, 0, 2])[y]
    order = np.random.default_rng(0).permutation(len(y))
    first, rest = order[:60], order[60:]
    assert model.score(X[rest], renamed[rest]) < 0.5
    for place in first:
        model.learn_one(dict(enumerate(X[place])), renamed[place])
    assert model.score(X[rest], renamed[rest]) > 0.8
    moved = pickle.loads(pickle.dumps(model)).partial_fit(1.2 * X[order])
    assert moved.score(1.2 * X[rest], renamed[rest]) > 0.75  # rows go on moving the moments
    assert model.reset().score(X, y) == fitted.score(X, y)


def test_labels_are_learned_as_the_dense_update_says() -> None:
    X, y = load_wine(return_X_y=True)
    fitted = make_pipeline(StandardScaler(), LogisticRegression()).fit(X, y)
    model = AdaptiveClassifier(fitted).partial_fit(X[:3], [2, 2, 2])
    z = (fitted[0].transform(X[:3])) / np.sqrt(1 + 1e-5)  # as the batch norm at the source has it
    rows = np.concatenate((np.ones((3, 1)), z * np.sqrt(1 + 1e-5)), 1)
    head = fitted[1]
    theta = np.concatenate((head.intercept_[:, None], head.coef_), 1).flatten()
    p = fitted.predict_proba(X[:3])
    precision, gradient = np.eye(len(theta)) / 0.1, np.zeros_like(theta)
    for row, own in zip(rows, p, strict=True):
        jacobian = np.kron(np.eye(3), row[None])
        precision += jacobian.T @ (np.diag(own) - np.outer(own, own)) @ jacobian
        gradient += jacobian.T @ (own - np.eye(3)[2])
    moved = (theta - np.linalg.solve(precision, gradient)).reshape(3, -1)
    logits = np.concatenate((np.ones((len(X), 1)), fitted[0].transform(X)), 1) @ moved.T
    expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(model.predict_proba(X), expected, atol=2e-3)


def test_labels_that_cannot_be_learned_are_refused() -> None:
    X, y = load_wine(return_X_y=True)
    model = AdaptiveClassifier(make_pipeline(StandardScaler(), LogisticRegression()).fit(X, y))
    assert model.partial_fit(X[:3], y[:3], classes=[0, 1, 2]) is model
    before = model.predict_proba(X)
    with pytest.raises(ValueError, match=r"partial_fit: classes .* \[0, 1, 2\]"):
        model.partial_fit(X[:3], y[:3], classes=[0, 1])
    with pytest.raises(ValueError, match="partial_fit: y"):
        model.partial_fit(X[:3], [0, 1, 7])
    np.testing.assert_array_equal(model.predict_proba(X), before)
    scored = make_pipeline(StandardScaler(), SGDClassifier(loss="log_loss", random_state=0))
    rest = AdaptiveClassifier(scored.fit(X, y))
    with pytest.raises(ValueError, match="partial_fit: y must be left out, the last layer of"):
        rest.partial_fit(X[:3], y[:3])

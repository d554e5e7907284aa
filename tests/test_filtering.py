"""The filter: its step against an independent NumPy filter and against its own pieces, its contract
on state and errors.
"""

import copy
import io
import math
import pickle
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

import driftfilter as df
from driftfilter.base.randomness import Randomness
from driftfilter.inference.prediction import PredictionRule, Query
from driftfilter.model.predictive import LogitFunction
from small import assert_same, contents, moments, normal, refuses

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SAMPLES = 4


def batches(steps: int, samples: int = SAMPLES, features: int = 2, seed: int = 0) -> Tensor:
    return normal(steps, samples, features, seed=seed)


def belief(scale: float = 1.0, device: str = "cpu") -> df.Belief:
    matrix = scale * torch.tensor([[1.0, 0.3], [0.3, 0.5]], dtype=torch.float64, device=device)
    return df.Belief(torch.tensor([1.2, -0.7], dtype=torch.float64, device=device), df.Full(matrix))


def binary(theta: Tensor, inputs: Tensor) -> Tensor:
    score = inputs @ theta
    return torch.stack((torch.zeros_like(score), score), -1)


def build(
    logits: Any = None,
    loss: df.Loss | None = None,
    inference: df.Inference | None = None,
    prediction: PredictionRule | None = None,
    **others: Any,
) -> df.Filter:
    return df.Filter(
        logits or df.LinearHead(2),
        observation=df.Gibbs(loss or df.Entropy()),
        inference=inference or df.Linearized(df.Hessian()),
        prediction=prediction or df.MAP(),
        **others,
    )


def assert_same_state(first: df.FilterState, second: df.FilterState) -> None:
    assert (first.step, first.seed, list(first.memory)) == (
        second.step,
        second.seed,
        list(second.memory),
    )
    assert_same(contents(first), contents(second))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("predict_from", ["prior", "posterior"])
@pytest.mark.parametrize("logits", [df.LinearHead(2), binary], ids=["head", "lifted"])
def test_filter_is_logistic_regression_by_hand(
    logits: Any, predict_from: Literal["prior", "posterior"], device: str
) -> None:
    """Mean reversion, isotropic noise, binary entropy: ℓ' = -f s, ℓ'' = -s (1 + f (1 - 2p)) clipped
    at 0, s = p (1 - p).
    """
    rho, variance, beta = 0.9, 0.05, 3.0
    filt = df.Filter(
        logits,
        df.Transition(df.MeanReversion(rho), df.Isotropic(variance)),
        df.Gibbs(df.Entropy(), df.Constant(beta)),
        df.Linearized(df.Hessian()),
        predict_from=predict_from,
    )
    stream = 2 * batches(40)
    state, outputs = filt.run(filt.init(belief(device=device)), stream.to(device))

    mean = source = belief().mean.numpy()
    cov, curved = belief().covariance.dense().numpy(), 0
    for x, prediction, info in zip(stream.numpy(), outputs, outputs.infos, strict=True):
        mean, cov = rho * mean + (1 - rho) * source, rho**2 * cov + variance * np.eye(2)
        before, f = mean, x @ mean
        p = 1 / (1 + np.exp(-f))
        s, losses = p * (1 - p), -p * np.log(p) - (1 - p) * np.log(1 - p)
        curvature = np.maximum(-s * (1 + f * (1 - 2 * p)), 0)
        curved += (curvature > 0).any()
        cov = np.linalg.inv(np.linalg.inv(cov) + beta / SAMPLES * (x.T * curvature) @ x)
        mean = mean - beta / SAMPLES * cov @ (x.T @ (-f * s))
        expected = 1 / (1 + np.exp(-x @ (before if predict_from == "prior" else mean)))
        np.testing.assert_allclose(
            prediction.probabilities[:, 1].cpu(), expected, rtol=0, atol=1e-10
        )
        np.testing.assert_allclose(info.losses.cpu(), losses[None], rtol=0, atol=1e-10)
        np.testing.assert_allclose(info.energy.cpu(), beta * losses.mean(), rtol=0, atol=1e-10)
        assert (info.informative, info.reason) == (True, "")
    np.testing.assert_allclose(state.belief.mean.cpu(), mean, rtol=0, atol=1e-10)
    np.testing.assert_allclose(state.belief.covariance.dense().cpu(), cov, rtol=0, atol=1e-10)
    assert curved > 10
    assert state.belief.mean.device.type == outputs.probabilities.device.type == device
    assert outputs.probabilities.shape == (40 * SAMPLES, 2)
    assert torch.equal(outputs.labels, outputs.probabilities.argmax(-1))


EACH_RULE = pytest.mark.parametrize(
    ("inference", "prediction"),
    [
        (df.Linearized(df.EmpiricalFisher()), df.LinearizedProbit()),
        (df.Bong(samples=4), df.MonteCarlo(samples=6)),
        (
            df.Variational(df.GaussNewton(), samples=4, iterations=3),
            df.LinearizedGaussian(samples=6),
        ),
        (df.GradientStep(df.Adam(0.1)), df.MAP()),
    ],
    ids=repr,
)


@EACH_RULE
@pytest.mark.parametrize("predict_from", ["prior", "posterior"])
@pytest.mark.parametrize("device", DEVICES)
def test_step_is_transition_then_inference_then_prediction(
    device: str,
    predict_from: Literal["prior", "posterior"],
    inference: df.Inference,
    prediction: PredictionRule,
) -> None:
    transition = df.Transition(df.MeanReversion(0.9), df.Isotropic(0.01))
    observation = df.Gibbs(
        df.PseudoLabel(), df.Product((df.Reliability(2.0), df.DiversityGate(similarity=0.95)))
    )
    filt = df.Filter(df.LinearHead(2), transition, observation, inference, prediction, predict_from)
    state = filt.init(belief(device=device), seed=7)
    for number, inputs in enumerate(batches(5).to(device)):
        randomness = Randomness(7, number, torch.device(device))
        prior = transition(state.belief, state.source)
        energy, memory = observation(df.LinearHead(2), prior.mean, inputs, state.memory, randomness)
        posterior, memory = inference(prior, energy, memory, randomness)
        chosen = posterior if predict_from == "posterior" else prior
        expected = prediction(chosen, Query(df.LinearHead(2), inputs, randomness))
        filtered = filt.predict(df.FilterState(chosen, state.source, 2, 7, number), inputs)
        state, predicted, info = filt.step(state, inputs)
        assert_same_state(state, df.FilterState(posterior, state.source, 2, 7, number + 1, memory))
        assert_same(
            (predicted.log_probabilities, predicted.logit_variance, predicted.log_probabilities),
            (expected.log_probabilities, expected.logit_variance, filtered.log_probabilities),
        )
        assert info.step == number
        assert torch.equal(info.weights, energy.samples.weights)


@EACH_RULE
def test_run_is_a_loop_of_steps(inference: df.Inference, prediction: PredictionRule) -> None:
    filt, stream = build(inference=inference, prediction=prediction), batches(4)
    looped, predictions = filt.init(belief(), seed=1), []
    for inputs in stream:
        looped, predicted, _ = filt.step(looped, inputs)
        predictions.append(predicted)

    def generated() -> Iterator[Tensor]:
        yield from stream

    for same in (stream, list(stream), generated()):
        state, outputs = filt.run(filt.init(belief(), seed=1), same)
        assert_same_state(state, looped)
        assert torch.equal(
            outputs.log_probabilities, torch.cat([each.log_probabilities for each in predictions])
        )
        assert torch.equal(
            outputs.logit_variance, torch.cat([each.logit_variance for each in predictions])
        )
        assert [info.step for info in outputs.infos] == [0, 1, 2, 3]


def test_batches_may_differ_in_length() -> None:
    filt = build()
    _, outputs = filt.run(filt.init(belief()), [batches(1, samples)[0] for samples in (3, 1, 5)])
    assert [len(prediction.labels) for prediction in outputs] == [3, 1, 5]
    assert outputs.labels.shape == (9,)


@EACH_RULE
def test_seed_decides_every_draw(inference: df.Inference, prediction: PredictionRule) -> None:
    stochastic = isinstance(inference, (df.Bong, df.Variational))
    runs: list[tuple[df.FilterState, df.Outputs]] = []
    for seed in (3, 3, 4):
        torch.manual_seed(len(runs))
        filt = build(inference=inference, prediction=prediction)
        runs.append(filt.run(filt.init(belief(), seed), batches(3)))
    (first, one), (second, two), (third, three) = runs
    assert_same_state(first, second)
    assert_same(one.log_probabilities, two.log_probabilities)
    assert torch.equal(first.belief.mean, third.belief.mean) is not stochastic
    assert torch.equal(one.log_probabilities, three.log_probabilities) is not stochastic


def through_torch_save(state: df.FilterState) -> df.FilterState:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: df.FilterState = torch.load(buffer, weights_only=False)
    return loaded


@EACH_RULE
@pytest.mark.parametrize(
    "save", [copy.deepcopy, through_torch_save, lambda state: pickle.loads(pickle.dumps(state))]
)
def test_saved_state_replays_bit_for_bit(
    save: Callable[[df.FilterState], df.FilterState],
    inference: df.Inference,
    prediction: PredictionRule,
) -> None:
    observation = df.Gibbs(df.Consistency(), df.DiversityGate(0.99))
    filt = df.Filter(
        df.LinearHead(2),
        df.Transition(df.MeanReversion(0.9), df.Restore()),
        observation,
        inference,
        prediction,
    )
    stream = batches(6)
    whole, outputs = filt.run(filt.init(belief(), seed=2), stream)
    half, _ = filt.run(filt.init(belief(), seed=2), stream[:3])
    resumed, rest = pickle.loads(pickle.dumps(filt)).run(save(half), stream[3:])
    assert_same_state(resumed, whole)
    assert torch.equal(rest.log_probabilities, outputs.log_probabilities[3 * SAMPLES :])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("loss", "inference"),
    [
        (df.Entropy(), df.Linearized()),
        (df.Entropy(), df.Bong(df.EmpiricalFisher())),
        (df.InformationMaximization(), df.Linearized(df.Hessian())),
        (df.InformationMaximization(), df.GradientStep()),
    ],
    ids=repr,
)
def test_batch_of_one_without_information_is_a_transition(
    loss: df.Loss, inference: df.Inference, device: str
) -> None:
    filt = build(
        loss=loss,
        inference=inference,
        transition=df.Transition(df.MeanReversion(0.5), df.Isotropic(0.1)),
    )
    state = filt.init(belief(device=device))
    inputs = batches(3, samples=1).to(device)
    with pytest.warns(
        df.NoInformationWarning,
        match=f"transition only: 1 sample .* {type(loss).__name__} .* needs 2",
    ) as caught:
        state, prediction, info = filt.step(state, inputs[0])
    assert [warning.filename for warning in caught] == [__file__]
    assert info.informative is False
    assert "needs 2" in info.reason
    torch.testing.assert_close(state.belief.mean, belief(device=device).mean)
    expected = 0.25 * belief(device=device).covariance.dense() + 0.1 * torch.eye(
        2, dtype=torch.float64, device=device
    )
    torch.testing.assert_close(state.belief.covariance.dense(), expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(
        prediction.probabilities, binary(state.belief.mean, inputs[0]).softmax(-1)
    )
    state, outputs = filt.run(state, inputs[1:])  # a second warning would be an error here
    assert [info.informative for info in outputs.infos] == [False, False]
    state, _, info = filt.step(state, batches(1)[0].to(device))
    assert info.informative
    with pytest.warns(df.NoInformationWarning):
        build(loss=loss, inference=inference).step(state, inputs[0])


def test_empty_gate_is_a_transition_and_no_warning() -> None:
    moves = df.Transition(df.MeanReversion(0.5), df.Isotropic(0.1))
    filt = df.Filter(df.LinearHead(2), moves, df.Gibbs(df.Entropy(), df.EntropyGate(fraction=1e-9)))
    state, _, info = filt.step(filt.init(belief()), batches(1)[0])
    assert_same(moments(state.belief), moments(moves(belief(), belief())))
    assert (info.informative, info.reason) == (False, "no sample passed the weighting")
    assert torch.equal(info.weights, torch.zeros(SAMPLES, dtype=torch.float64))


def test_statistics_of_the_weighting_live_in_the_state() -> None:
    gate = df.DiversityGate(similarity=0.999, momentum=0.75)
    filt = df.Filter(
        df.LinearHead(2),
        observation=df.Gibbs(df.Entropy(), gate),
        inference=df.Linearized(df.NoCurvature()),
    )
    state, running = filt.init(belief()), None
    for inputs in batches(4):
        p = binary(filt.transition(state.belief, state.source).mean, inputs).softmax(-1)
        cosine = (
            torch.zeros(SAMPLES)
            if running is None
            else torch.nn.functional.cosine_similarity(p, running[None])
        )
        kept = p[cosine.abs() < 0.999]
        if len(kept):
            running = kept.mean(0) if running is None else 0.75 * running + 0.25 * kept.mean(0)
        state, _, info = filt.step(state, inputs)
        assert int(info.weights.count_nonzero()) == len(kept)
        torch.testing.assert_close(
            state.memory["weighting.mean_prediction"], running, rtol=0, atol=1e-14
        )


def bad_beyond(limit: float, value: float = math.nan) -> LogitFunction:
    """The logit of class 0 turns bad once θ₀ passes a limit."""

    def logits(theta: Tensor, inputs: Tensor) -> Tensor:
        column = torch.where(theta[0] > limit, value, 0.0).expand(len(inputs))
        return binary(theta, inputs) + torch.stack((column, torch.zeros_like(column)), -1)

    return logits


def steep(theta: Tensor, inputs: Tensor) -> Tensor:
    """A tie with an enormous slope."""
    return binary(theta - theta.detach(), 1e200 * inputs)


GOOD = batches(1)[0]
SPOILED = GOOD.clone()
SPOILED[2, 1] = math.inf
BIG_STEP = df.GradientStep(df.SGD(lr=100.0))


@pytest.mark.parametrize(
    ("filt", "inputs", "message"),
    [
        (build(), SPOILED, "inputs must be finite, got inf at index [2, 1] (1 of 8 values)"),
        (
            build(),
            torch.full_like(GOOD, math.nan),
            "inputs must be finite, got nan at index [0, 0] (8 of 8 values)",
        ),
        (build(), GOOD[:0], "inputs must be a batch [n, ...] with n >= 1, got shape [0, 2]"),
        (build(), GOOD[0, 0], "inputs must be a batch [n, ...] with n >= 1, got shape []"),
        (
            build(),
            GOOD.tolist(),
            "inputs must be a tensor [n, ...], or a tuple or dict of them, got a list",
        ),
        (build(), GOOD[0], "inputs must be of shape [n, features], got shape [2]"),
        (
            build(),
            torch.cat((GOOD, GOOD[:, :1]), 1),
            "the belief must be over 3 or 6 parameters for 2 classes and 3 features",
        ),
        (build(lambda theta, x: x @ theta), GOOD, "the model's logits must be"),
        (build(lambda theta, x: x @ theta), GOOD[:1], "got shape [1]"),
        (
            build(bad_beyond(1.0)),
            GOOD,
            "the model's logits must be finite, got nan at index [0, 0]",
        ),
        (
            build(bad_beyond(1.5), inference=BIG_STEP),
            GOOD,
            "logits at the parameters predicted with) must be finite, got nan",
        ),
        (
            build(bad_beyond(1.5, -math.inf), inference=BIG_STEP),
            GOOD,
            "the parameters predicted with) must be finite",
        ),
        (
            build(bad_beyond(1.3), inference=df.Bong(samples=64)),
            GOOD,
            "the model's logits must be finite, got nan",
        ),
        (build(steep, df.PseudoLabel()), GOOD[:1], "1 + F Σ Fᵀ"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(
    filt: df.Filter, inputs: Any, message: str
) -> None:
    state, _, _ = build().step(build().init(belief()), GOOD)
    held, before = state.belief, contents(state)
    given = inputs.clone() if isinstance(inputs, Tensor) else inputs
    with pytest.raises(ValueError, match=re.escape(message)):
        filt.step(state, inputs)
    assert state.belief is held
    assert state.step == 1
    assert_same(contents(state), before)
    assert not isinstance(inputs, Tensor) or torch.equal(inputs.nan_to_num(), given.nan_to_num())
    build().step(state, GOOD)  # the state is as good as before


test_wrong_parts_are_refused = refuses(
    [
        (
            lambda: build(predict_from="after"),
            "Filter.predict_from must be 'prior' or 'posterior', got 'after'",
        ),
        (
            lambda: build(transition=df.RandomWalk()),
            "Filter.transition must be a Transition, got RandomWalk()",
        ),
        (
            lambda: df.Filter(df.LinearHead(2), observation=df.Entropy()),  # type: ignore[arg-type]
            "Filter.observation must be a Gibbs, got Entropy()",
        ),
        (
            lambda: build(inference=df.MAP()),  # type: ignore[arg-type]
            "Filter.inference must be of role 'inference', such as Linearized(), got MAP()",
        ),
        (
            lambda: build(prediction=df.MAP),  # type: ignore[arg-type]
            "Filter.prediction must be of role 'prediction', such as MAP(), got <class",
        ),
        (
            lambda: build(logits=3),
            "Filter.logits must be a function (theta, inputs) -> logits or a PredictiveModel, "
            "got 3",
        ),
        (lambda: build().init(belief().mean), "Filter.init: belief must be a Belief, got tensor("),  # type: ignore[arg-type]
        (lambda: build().init(belief(), seed=1.5), "Filter.init: seed must be an integer, got 1.5"),  # type: ignore[arg-type]
        (
            lambda: build().init(belief(), seed=True),
            "Filter.init: seed must be an integer, got True",
        ),
        (
            lambda: build().step(belief(), GOOD),  # type: ignore[arg-type]
            "state must be a FilterState (see Filter.init), got 'Belief'",
        ),
        (
            lambda: build().predict(belief(), GOOD),  # type: ignore[arg-type]
            "state must be a FilterState (see Filter.init), got 'Belief'",
        ),
        (
            lambda: build().predict(build().init(belief()), SPOILED),
            "inputs must be finite, got inf at index [2, 1]",
        ),
        (
            lambda: build(bad_beyond(1.0)).predict(build().init(belief()), GOOD),
            "must be finite, got nan",
        ),
        (lambda: belief(-1.0), "Full.matrix is not positive definite"),
        (
            lambda: build(transition=df.Transition(df.LocalTrend())).init(
                df.Belief(GOOD[0], df.Diagonal(torch.ones_like(GOOD[0])))
            ),
            "Diagonal cannot carry LocalTrend",
        ),
        (
            lambda: build(torch.nn.Linear(2, 2)),
            "for a module write lambda theta, inputs: torch.func.functional_call",
        ),
        (
            lambda: build(3.0),
            "Filter.logits must be a function (theta, inputs) -> logits or a PredictiveModel, "
            "got 3.0",
        ),
        (
            lambda: build(
                type("Model", (), {"__call__": None, "pullback": None, "pushforward": None})()
            ),
            "inherit from it for defaults, got 'a model with a pullback",
        ),
    ],
    exact=True,
)


def test_the_model_of_the_caller_is_never_touched() -> None:
    module = torch.nn.Linear(2, 3).double()
    before = [parameter.clone() for parameter in module.parameters()]

    def logits(theta: Tensor, inputs: Tensor) -> Tensor:
        parameters = {"weight": theta[:6].view(3, 2), "bias": theta[6:]}
        result: Tensor = torch.func.functional_call(module, parameters, (inputs,))
        return result

    mean = torch.nn.utils.parameters_to_vector(module.parameters())
    filt = build(
        logits, inference=df.Linearized(df.EmpiricalFisher()), prediction=df.LinearizedGaussian()
    )
    start = filt.init(df.Belief(mean, df.Full(torch.eye(9, dtype=torch.float64))))
    state, _ = filt.run(copy.deepcopy(start), batches(3))
    assert (state.belief.mean - mean).abs().max() > 1e-3
    assert not state.source.mean.requires_grad
    with torch.no_grad():
        mean.zero_()  # the caller may go on with it
    assert_same_state(filt.run(start, batches(3))[0], state)
    for parameter, old in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
        assert parameter.grad is None
        assert parameter.requires_grad


def sources() -> list[df.Belief]:
    return [
        belief(),
        df.Belief(-belief().mean, df.Full(4 * belief().covariance.dense())),
        belief(0.1),
    ]


def test_one_filter_serves_streams_of_several_sources() -> None:
    """What is kept for the last source is never used for another, in turn and in parallel."""
    transition = df.Transition(df.PrecisionReversion(0.05), df.Stationary())

    def alone(source: df.Belief) -> df.FilterState:
        filt = build(transition=transition)
        return filt.run(filt.init(source), batches(30))[0]

    expected = [alone(source) for source in sources()]
    shared = build(transition=transition)
    states = [shared.init(source) for source in sources()]
    for inputs in batches(30):
        states = [shared.step(state, inputs)[0] for state in states]
    with ThreadPoolExecutor(6) as pool:
        runs = list(
            pool.map(lambda source: shared.run(shared.init(source), batches(30))[0], sources() * 4)
        )
    for state, other in zip([*states, *runs], expected * 5, strict=True):
        assert_same_state(state, other)


def test_hidden_states_are_read_out() -> None:
    """A trend without noise or data information drifts by its velocity; predictions see the level
    only.
    """
    filt = build(
        transition=df.Transition(df.LocalTrend(order=1, dt=0.5, scale=0.2), df.NoNoise()),
        predict_from="prior",
    )
    state = filt.init(belief())
    assert (state.parameters, state.belief.dimension) == (2, 4)
    state, _, _ = filt.step(state, GOOD)
    after = state.belief.mean[:2] + 0.5 * state.belief.mean[2:]
    assert state.belief.mean[2:].abs().max() > 1e-3
    _, prediction, _ = filt.step(state, GOOD)
    torch.testing.assert_close(
        (prediction.probabilities, filt.predict(state, GOOD).probabilities),
        (binary(after, GOOD).softmax(-1), binary(state.belief.mean[:2], GOOD).softmax(-1)),
        rtol=0,
        atol=1e-12,
    )


@pytest.mark.parametrize("model", [df.LinearHead(2), binary], ids=["head", "lifted"])
@pytest.mark.parametrize(
    "loss",
    [df.Entropy(), df.ConjugatePseudoLabel(), df.Consistency()],
    ids=lambda loss: type(loss).__name__,
)
def test_inference_mode_changes_nothing(model: Any, loss: df.Loss) -> None:
    filt = df.Filter(model, observation=df.Gibbs(loss), inference=df.Linearized(df.Hessian()))
    start = df.Belief(torch.tensor([1.0, -0.5]), df.Full(torch.eye(2)))
    inputs = normal(4, 2, dtype=torch.float32)
    expected, predicted, _ = filt.step(filt.init(start), inputs)
    with torch.inference_mode():
        state, prediction, _ = filt.step(
            filt.init(start), inputs + 0
        )  # inputs made in inference mode
        later = filt.predict(state, inputs + 0)
    assert_same(
        (state.belief.mean, prediction.probabilities),
        (expected.belief.mean, predicted.probabilities),
    )
    assert not state.belief.mean.is_inference()
    assert not later.log_probabilities.is_inference()


def test_variances_that_a_transition_loses_are_refused() -> None:
    """Also on steps whose batch carries no information, where nothing else looks at the
    covariance.
    """
    start = df.Belief(torch.zeros(2), df.Diagonal(torch.ones(2)))
    filt = df.Filter(df.LinearHead(2), df.Transition(df.MeanReversion(0.0), df.NoNoise()))
    with (
        pytest.warns(df.NoInformationWarning),
        pytest.raises(df.NotPositiveDefiniteError, match="got 0 to 0 after the transition"),
    ):
        filt.step(filt.init(start), torch.ones(1, 2))
    winding = df.Filter(
        df.LinearHead(2),
        df.Transition(df.RandomWalk(), df.Discount(0.1)),
        inference=df.GradientStep(),
    )
    with pytest.raises(df.NotPositiveDefiniteError, match="to inf after the transition"):
        winding.run(winding.init(start), torch.zeros(60, 1, 2))


def test_the_state_does_not_share_memory_with_the_caller() -> None:
    mean, variances, diagonal, factor = (
        torch.zeros(2),
        torch.ones(2),
        torch.ones(2),
        torch.ones(1, 2),
    )
    filt = df.Filter(df.LinearHead(2))
    states = [
        filt.init(df.Belief(mean, c))
        for c in (df.Diagonal(variances), df.LowRank(diagonal, factor, 1))
    ]
    before = [contents(state) for state in states]
    for tensor in (mean, variances, diagonal, factor):
        tensor.fill_(-5.0)
    assert_same([contents(state) for state in states], before)


test_rules_of_ones_own_that_lack_members_are_refused = refuses(
    [
        (
            {"prediction": lambda belief, query: None},
            r"Filter.prediction must be .*inherits PredictionRule",
        ),
        ({"inference": lambda *args: None}, "Filter.inference must be .*with a curvature"),
    ],
    by=lambda parts: df.Filter(df.LinearHead(2), **parts),
)


ONE_LOGIT = {
    f"{role} {name}": (role, kind)
    for role in ("loss", "weighting", "curvature", "inference", "prediction")
    for name, kind in df.VARIANTS[role].items()
    # These need a model or an observation of their own, features, images, or two classes.
    if name
    not in (
        *("Supports", "Mixture", "FromTeacher", "SoftLikelihoodRatio", "MomentAlignment"),
        *("Contrast", "CentroidLabel", "SourceReplay", "ProbabilityDrop", "LaplacianAdjustment"),
    )
}


@pytest.mark.parametrize("case", ONE_LOGIT)
@pytest.mark.parametrize("kind", ["function", "head"])
def test_one_logit_is_a_class_that_is_certain(kind: str, case: str) -> None:
    role, variant = ONE_LOGIT[case]
    rule: Any = variant()
    if role in ("loss", "weighting"):
        pair = (rule,) if role == "loss" else (df.Entropy(), rule)
        parts: dict[str, Any] = {"observation": df.Gibbs(*pair)}
    else:
        parts = {"inference": df.Linearized(rule)} if role == "curvature" else {role: rule}
    function: Any = (lambda theta, x: (x @ theta)[:, None]) if kind == "function" else None
    filt = df.Filter(function or df.LinearHead(1), **parts)
    state = filt.init(df.Belief(normal(2), df.Full(torch.eye(2, dtype=torch.float64))))
    state, prediction, _ = filt.step(state, normal(5, 2, seed=1))
    assert torch.equal(prediction.probabilities, torch.ones(5, 1, dtype=torch.float64))
    if case != "loss MarginalLikelihood":
        assert_same(state.belief.mean, filt.transition(state.source, state.source).mean)

"""Logistic regression on single observations, one stream and many abreast, against the eager
loop.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import driftfilter as df
from covered import CURVATURES, LOSSES, PREDICTIONS, WEIGHTINGS, assert_close, build
from driftfilter.compiled import scan
from small import moments

pytestmark = pytest.mark.slow

pytest.importorskip("numba")

STREAMS, STEPS = 67, 6  # more than a block


@pytest.fixture(autouse=True)
def _short_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "STEPS", 1)


def start(d: int, dtype: torch.dtype = torch.float64) -> df.Belief:
    generator = torch.Generator().manual_seed(d)
    root = torch.randn(d, d, generator=generator, dtype=torch.float64) / math.sqrt(d)
    matrix = 0.3 * root @ root.mT + 0.1 * torch.eye(d, dtype=torch.float64)
    mean = torch.randn(d, generator=generator, dtype=torch.float64)
    return df.Belief(mean.to(dtype), df.Full(matrix.to(dtype)))


def features(d: int, scale: float = 1.5, seed: int = 1) -> Tensor:
    """[streams, steps, 1, d]; the logit of one observation is 0."""
    x = scale * torch.randn(
        STREAMS, STEPS, 1, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    x[1, 2] = 0.0
    return x


def assert_alike(
    filt: df.Filter, d: int, x: Tensor, belief: df.Belief | None = None, tolerance: float = 1e-9
) -> None:
    """A fleet, a compiled run and the eager loop agree: beliefs, predictions and infos."""
    belief = belief or start(d)
    fleet = df.Fleet(filt, belief, range(STREAMS))
    together = fleet.run(x)
    for stream in (0, 1, 63, 64, 66):
        state, infos = filt.init(belief), []
        done, outputs = filt.run(state, x[stream])
        assert outputs.compiled == STEPS
        for t in range(STEPS):
            state, prediction, info = filt.step(state, x[stream, t])
            infos.append(info)
            wanted = prediction.log_probabilities, prediction.logit_variance
            whole = together.log_probabilities[stream, t], together.logit_variance[stream, t]
            assert_close(whole, wanted, tolerance)
            assert_close(
                (outputs[t].log_probabilities, outputs[t].logit_variance), wanted, tolerance
            )
        for own in (done, fleet.state(stream)):
            assert own.step == state.step
            assert_close(moments(own.belief), moments(state.belief), tolerance)
        for ours, info in zip(outputs.infos, infos, strict=True):
            assert (ours.informative, ours.reason) == (info.informative, info.reason)
            for field in ("losses", "weights", "coefficients"):
                assert_close(getattr(ours, field), getattr(info, field), tolerance)


@pytest.mark.parametrize("scale", [1.5, 40.0], ids=["usual", "confident"])
@pytest.mark.parametrize("curvature", [name for name, c in CURVATURES.items() if c.minimum == 1])
@pytest.mark.parametrize("loss", [name for name, loss in LOSSES.items() if loss.minimum == 1])
def test_every_loss_and_curvature(loss: str, curvature: str, scale: float) -> None:
    filt = build(
        observation=df.Gibbs(LOSSES[loss], df.Constant(2.0)),
        inference=df.Linearized(CURVATURES[curvature]),
    )
    assert_alike(filt, 3, features(3, scale), tolerance=1e-8)


@pytest.mark.parametrize("loss", [df.Entropy(), df.PseudoLabel(0.75)], ids=["all", "masked"])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_every_weighting(weighting: str, loss: Any) -> None:
    assert_alike(
        build(observation=df.Gibbs(loss, WEIGHTINGS[weighting], "kept", reference=2)),
        3,
        features(3),
    )


@pytest.mark.parametrize("predict_from", ["prior", "posterior"])
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_every_prediction(prediction: str, predict_from: Any) -> None:
    assert_alike(
        build(prediction=PREDICTIONS[prediction], predict_from=predict_from), 3, features(3)
    )


TRANSITIONS = {
    "random walk": df.Transition(df.RandomWalk(), df.NoNoise()),
    "stationary": df.Transition(df.MeanReversion(0.9), df.Stationary()),
    "discount": df.Transition(df.MeanReversion(0.9), df.Discount(0.8)),
    "reset to source": df.Transition(df.RandomWalk(), df.Reset(None)),
    "restore": df.Transition(df.MeanReversion(0.9), df.Restore()),
    "matrix": df.Transition(df.PrecisionReversion(0.01), df.Stationary()),
    "drift": df.Transition(df.Affine(0.9, (0.1, 0.0, -0.1)), df.FullNoise((0.1, 0.2, 0.3))),
    "full noise": df.Transition(
        df.RandomWalk(), df.FullNoise(((0.2, 0.1, 0.0), (0.1, 0.2, 0.0), (0.0, 0.0, 0.1)))
    ),
}


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_every_transition(transition: str) -> None:
    assert_alike(build(transition=TRANSITIONS[transition]), 3, features(3))


@pytest.mark.parametrize("d", [1, 2, 16, 17, 24])
def test_every_width(d: int) -> None:
    """Odd and even ones, streams abreast and, above 16 parameters, one after the other."""
    inference = df.Linearized(df.EmpiricalFisher(centered=False), radius=0.1)
    assert_alike(build(observation=df.Gibbs(df.PseudoLabel()), inference=inference), d, features(d))


@pytest.mark.parametrize("d", [3, 17])
def test_single_precision_up_to_its_rounding(d: int) -> None:
    assert_alike(build(), d, features(d).float(), start(d, torch.float32), tolerance=2e-5)


@pytest.mark.parametrize(("d", "information"), [(3, 8e14), (17, 2.5e14)])
def test_only_a_stream_that_needs_care_is_taken_eagerly(
    d: int, information: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So much information along one direction leaves a covariance that the eager path can still
    factor, but no bound allows.
    """
    filt = build(
        transition=df.Transition(df.RandomWalk(), df.NoNoise()),
        observation=df.Gibbs(df.PseudoLabel(), df.Constant(4.0)),
        inference=df.Linearized(df.EmpiricalFisher(centered=False)),
    )
    belief, x = df.Belief(0 * start(d).mean, start(d).covariance), features(d)
    x[64] *= (
        math.sqrt(information)
        / x[64, 0].norm()
        * torch.eye(STEPS, 1, dtype=torch.float64)[:, :, None]
    )  # h = β / 4 at first
    called: list[df.FilterState] = []
    run = df.Filter.run

    def counted(self: df.Filter, state: df.FilterState, batches: Any) -> Any:
        called.append(state)
        return run(self, state, batches)

    monkeypatch.setattr(df.Filter, "run", counted)
    fleet = df.Fleet(filt, belief, range(STREAMS))
    together = fleet.run(x)
    assert len(called) == 1
    for stream in (0, 64):
        state = filt.init(belief)
        for t in range(STEPS):
            state, prediction, _ = filt.step(state, x[stream, t])
            assert_close(together.log_probabilities[stream, t], prediction.log_probabilities)
        assert_close(moments(fleet.state(stream).belief), moments(state.belief), 1e-7)


def test_streams_without_information_warn_once() -> None:
    filt, x = build(inference=df.Linearized(df.EmpiricalFisher())), features(3)
    fleet = df.Fleet(filt, start(3), range(STREAMS))
    with pytest.warns(df.NoInformationWarning, match="needs 2") as caught:
        fleet.run(x)
    assert len(caught) == 1
    assert_alike(filt, 3, x)


VANISHING = {
    "vanishes": (df.Transition(df.MeanReversion(0.5), df.NoNoise()), 1.0),
    "explodes": (df.Transition(df.RandomWalk(), df.Discount(0.4)), 0.0),
}


@pytest.mark.parametrize("d", [3, 18])
@pytest.mark.parametrize("case", VANISHING)
def test_single_precision_refuses_what_the_eager_loop_refuses(case: str, d: int) -> None:
    """The kernels work in double precision, where such a covariance is still a good one."""
    transition, scale = VANISHING[case]
    filt, belief = (
        build(transition=transition),
        df.Belief(torch.full((d,), 0.3), df.Full(torch.eye(d))),
    )
    x = scale * torch.randn(128, 1, d, generator=torch.Generator().manual_seed(0))
    states = [filt.init(belief)]

    def eagerly() -> None:
        for batch in x:
            states.append(filt.step(states[-1], batch)[0])

    with pytest.raises(df.NotPositiveDefiniteError):
        eagerly()
    assert 30 < states[-1].step < 128
    with pytest.raises(df.NotPositiveDefiniteError):
        filt.run(filt.init(belief), x)
    fleet = df.Fleet(filt, belief, range(3))
    with pytest.raises(df.NotPositiveDefiniteError):
        fleet.run(x.expand(3, -1, -1, -1))
    assert fleet.state(0).step == 0
    torch.testing.assert_close(fleet.state(0).belief.covariance.dense(), torch.eye(d))

"""The compiled scan against the eager loop: mean, covariance, predictions, infos, warnings, errors
and refusals.
"""

import math
import os
import pickle
import shutil
import subprocess
import sys
import time
import warnings
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import driftfilter as df
from covered import CURVATURES, LOSSES, PREDICTIONS, STRUCTURES, WEIGHTINGS, assert_close, build
from driftfilter.compiled import scan
from driftfilter.model.centering import Centered
from small import assert_same, contents, moments

pytestmark = pytest.mark.slow

pytest.importorskip("numba")

D = 3


@pytest.fixture(autouse=True)
def _short_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "STEPS", 1)


def start(
    d: int, structure: str = "full", dtype: torch.dtype = torch.float64, seed: int = 0
) -> df.Belief:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(d, generator=generator, dtype=torch.float64)
    root = torch.randn(d, d, generator=generator, dtype=torch.float64) / math.sqrt(d)
    matrix = 0.3 * root @ root.mT + 0.1 * torch.eye(d, dtype=torch.float64)
    covariance = (
        df.Full(matrix.to(dtype))
        if structure == "full"
        else df.Diagonal(matrix.diagonal().to(dtype))
    )
    return df.Belief(mean.to(dtype), covariance)


def ragged(
    width: int = D, sizes: tuple[int, ...] = (3, 1, 4, 2, 5, 2), seed: int = 1, scale: float = 1.5
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(n, width, generator=generator, dtype=torch.float64) for n in sizes]


def eagerly(
    filt: df.Filter, state: df.FilterState, stream: Any
) -> tuple[df.FilterState, list[Any], list[df.StepInfo]]:
    predictions, infos = [], []
    for batch in stream:
        state, prediction, info = filt.step(state, batch)
        predictions.append(prediction)
        infos.append(info)
    return state, predictions, infos


def assert_alike(
    filt: df.Filter, belief: df.Belief, stream: Any, eager: int = 0, tolerance: float = 1e-9
) -> df.Outputs:
    """Compiled and eager runs of a stream agree in everything; so many steps are expected to be
    handed back.
    """
    state = filt.init(belief, seed=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", df.NoInformationWarning)
        done, outputs = filt.run(state, stream)
        wanted, predictions, infos = eagerly(filt, state, stream)
    assert outputs.compiled == len(stream) - eager, scan.why_eager(filt, state, stream)
    assert (done.step, done.seed, done.parameters, done.memory) == (
        wanted.step,
        wanted.seed,
        wanted.parameters,
        wanted.memory,
    )
    assert done.source is wanted.source
    assert type(done.belief.covariance) is type(wanted.belief.covariance)
    assert_close(moments(done.belief), moments(wanted.belief), tolerance)
    assert len(outputs) == len(outputs.infos) == len(predictions)
    assert_close(
        [(each.log_probabilities, each.logit_variance) for each in outputs],
        [(each.log_probabilities, each.logit_variance) for each in predictions],
        tolerance,
    )
    for ours, info in zip(outputs.infos, infos, strict=True):
        assert (ours.step, ours.informative, ours.reason) == (
            info.step,
            info.informative,
            info.reason,
        )
        assert ours.losses.shape == info.losses.shape
        values = attrgetter("losses", "weights", "coefficients", "energy")
        assert_close(values(ours), values(info), tolerance)
    assert_close(
        outputs.log_probabilities, torch.cat([p.log_probabilities for p in predictions]), tolerance
    )
    return outputs


HEADS = [(df.LinearHead(2), D), (df.LinearHead(4), 4 * D), (df.LinearHead(3), 2 * D)]
HEAD_NAMES = ["logistic", "four classes", "three reduced"]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(("head", "d"), HEADS, ids=HEAD_NAMES)
@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_and_curvature(
    loss: str, curvature: str, head: df.LinearHead, d: int, structure: str
) -> None:
    filt = build(
        logits=head,
        observation=df.Gibbs(LOSSES[loss], df.Constant(2.0)),
        inference=df.Linearized(CURVATURES[curvature]),
    )
    state = filt.init(start(d, structure))
    with warnings.catch_warnings():  # the first batch that is too small is handed back: it warns
        warnings.simplefilter("ignore", df.NoInformationWarning)
        eagerly(filt, state, ragged())
    assert_alike(filt, start(d, structure), ragged(), tolerance=1e-8)


DYNAMICS = {
    "random walk": df.Transition(df.RandomWalk(), df.NoNoise()),
    "isotropic": df.Transition(df.RandomWalk(), df.Isotropic(0.02)),
    "stationary": df.Transition(df.MeanReversion(0.9), df.Stationary()),
    "discount": df.Transition(df.MeanReversion(0.9), df.Discount(0.8)),
    "reset": df.Transition(df.MeanReversion(0.9), df.Reset(0.2)),
    "reset to source": df.Transition(df.RandomWalk(), df.Reset(None)),
    "restore": df.Transition(df.MeanReversion(0.9), df.Restore()),
    "precision": df.Transition(df.PrecisionReversion(0.01), df.Stationary()),
    "vector": df.Transition(
        df.Affine((0.9, 0.8, 1.0), (0.1, 0.0, -0.1)), df.FullNoise((0.1, 0.2, 0.3))
    ),
    "blocks": df.Transition(
        df.BlockDynamics(
            (1, 1, 1),
            (
                df.Transition(df.MeanReversion(0.9), df.Discount(0.7)),
                df.Transition(df.RandomWalk(), df.Isotropic(0.1)),
                df.Transition(df.MeanReversion(0.8), df.Restore()),
            ),
        )
    ),
}
FULL_DYNAMICS = {
    "matrix": df.Transition(
        df.Affine(((0.9, 0.1, 0.0), (-0.1, 0.9, 0.2), (0.0, 0.0, 1.0)), 0.1), df.Isotropic(0.01)
    ),
    "full noise": df.Transition(
        df.RandomWalk(), df.FullNoise(((0.2, 0.1, 0.0), (0.1, 0.2, 0.0), (0.0, 0.0, 0.1)))
    ),
    "trend": df.Transition(df.LocalTrend(1), df.Discount(0.9)),
    "seasonal": df.Transition(df.Seasonal(12.0, 2), df.Isotropic(0.01)),
    "trend and season": df.Transition(
        df.SumDynamics(
            (
                df.Transition(df.LocalTrend(1, velocity=0.1), df.Discount(0.9)),
                df.Transition(df.Seasonal(12.0, 2, amplitude=0.2, level=False), df.Isotropic(0.01)),
            )
        )
    ),
    "block trend": df.Transition(
        df.BlockDynamics(
            (2, 1),
            (
                df.Transition(df.LocalTrend(1), df.Discount(0.8)),
                df.Transition(df.MeanReversion(0.7), df.Restore()),
            ),
        )
    ),
}


@pytest.mark.parametrize("sizes", [(1,) * 8, (3, 1, 4, 2)], ids=["single", "ragged"])
@pytest.mark.parametrize("name", [*DYNAMICS, *FULL_DYNAMICS])
def test_every_transition_of_a_full_covariance(name: str, sizes: tuple[int, ...]) -> None:
    assert_alike(
        build(
            transition={**DYNAMICS, **FULL_DYNAMICS}[name],
            observation=df.Gibbs(df.PseudoLabel(), df.Constant(2.0)),
        ),
        start(D),
        ragged(sizes=sizes),
    )


def test_two_rows_for_two_classes() -> None:
    assert_alike(build(), start(2 * D), ragged())
    assert_alike(build(), start(2 * D, "diagonal"), ragged(sizes=(1,) * 5))


def test_a_block_that_is_reset_is_left_to_the_eager_path() -> None:
    """No lower bound of the eigenvalues that is one number stands a block without a past beside one
    without noise.
    """
    parts = (
        df.Transition(df.RandomWalk(), df.Reset(0.1)),
        df.Transition(df.MeanReversion(0.9), df.NoNoise()),
    )
    filt = build(transition=df.Transition(df.BlockDynamics((1, 2), parts)))
    assert_alike(filt, start(D), ragged(), eager=6)
    assert_alike(filt, start(D, "diagonal"), ragged())


@pytest.mark.parametrize("name", DYNAMICS)
def test_every_transition_of_a_diagonal_covariance(name: str) -> None:
    assert_alike(build(transition=DYNAMICS[name]), start(D, "diagonal"), ragged())


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("sizes", [(1,) * 8, (3, 1, 4, 2)], ids=["single", "ragged"])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("over", ["batch", "kept"])
def test_every_weighting(weighting: str, over: Any, sizes: tuple[int, ...], structure: str) -> None:
    """Batches of which no sample passes are steps of the transition alone."""
    for loss in (df.Entropy(), df.PseudoLabel(0.75)):
        filt = build(observation=df.Gibbs(loss, WEIGHTINGS[weighting], over, reference=2))
        outputs = assert_alike(filt, start(D, structure), ragged(sizes=sizes))
        kept = [info.informative for info in outputs.infos]
        assert any(kept)
    assert len(sizes) == 4 or not all(kept)


@pytest.mark.parametrize("predict_from", ["prior", "posterior"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize(("head", "d"), HEADS, ids=HEAD_NAMES)
@pytest.mark.parametrize("sizes", [(1,) * 8, (3, 1, 4, 2)], ids=["single", "ragged"])
def test_every_prediction(
    prediction: str,
    predict_from: Any,
    head: df.LinearHead,
    d: int,
    structure: str,
    sizes: tuple[int, ...],
) -> None:
    filt = build(
        logits=head,
        prediction=PREDICTIONS[prediction],
        predict_from=predict_from,
        observation=df.Gibbs(df.PseudoLabel()),
    )
    assert_alike(filt, start(d, structure), ragged(sizes=sizes))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("sizes", [(1,) * 8, (3, 2, 4, 2)], ids=["single", "ragged"])
@pytest.mark.parametrize("name", CURVATURES)
def test_trust_region_shortens_the_same_steps(
    name: str, sizes: tuple[int, ...], structure: str
) -> None:
    curvature = CURVATURES[name]
    if curvature == df.NoCurvature():
        pytest.skip("without a curvature no step is too long")
    if curvature.minimum > min(sizes):
        pytest.skip("a centred Fisher learns nothing from one sample")
    observation = df.Gibbs(df.PseudoLabel(), df.Constant(5.0))
    short = build(observation=observation, inference=df.Linearized(curvature, radius=0.1))
    assert_alike(short, start(D, structure), ragged(sizes=sizes))
    ends = [
        filt.run(filt.init(start(D, structure)), ragged(sizes=sizes))[0].belief.mean
        for filt in (short, build(observation=observation, inference=df.Linearized(curvature)))
    ]
    assert not torch.allclose(ends[0], ends[1])


@pytest.mark.parametrize("structure", STRUCTURES)
def test_intercept_and_a_tensor_of_another_dtype(structure: str) -> None:
    filt = build(logits=df.LinearHead(2, intercept=True))
    stream = torch.randn(7, 2, D - 1, generator=torch.Generator().manual_seed(0))
    assert_alike(filt, start(D, structure), stream)
    assert_alike(filt, start(D, structure), (3 * stream).long())


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("sizes", [(1,) * 30, (3, 1, 4, 2)], ids=["single", "ragged"])
def test_single_precision_up_to_its_rounding(structure: str, sizes: tuple[int, ...]) -> None:
    outputs = assert_alike(
        build(), start(D, structure, torch.float32), ragged(sizes=sizes), tolerance=1e-5
    )
    assert outputs.log_probabilities.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("sizes", [(1,) * 20, (3, 1, 4, 2, 2)], ids=["single", "ragged"])
def test_a_stream_in_two_parts_is_the_stream(
    structure: str, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    filt, stream = build(), ragged(sizes=sizes)
    state = filt.init(start(D, structure, dtype))
    whole, outputs = filt.run(state, stream)
    half, first = filt.run(state, stream[:3])
    rest, second = filt.run(half, stream[3:])
    tolerance = 1e-13 if dtype == torch.float64 else 1e-6
    assert [info.step for info in second.infos] == list(range(3, len(stream)))
    assert_close(moments(whole.belief), moments(rest.belief), tolerance)
    assert_close(
        outputs.log_probabilities,
        torch.cat((first.log_probabilities, second.log_probabilities)),
        tolerance,
    )


def test_nothing_that_was_given_is_changed() -> None:
    filt, stream = build(), torch.stack(ragged(sizes=(2,) * 5))
    state = filt.init(start(D))
    before = contents(state), stream.clone()
    filt.run(state, stream)
    assert_same((contents(state), stream), before)


def test_first_uninformative_batch_warns_once() -> None:
    filt = build(inference=df.Linearized(df.EmpiricalFisher()))
    stream = ragged(sizes=(2, 1, 3, 1, 1))
    with pytest.warns(df.NoInformationWarning, match="needs 2") as caught:
        _, outputs = filt.run(filt.init(start(D)), stream)
    assert len(caught) == 1
    assert [info.informative for info in outputs.infos] == [True, False, True, False, False]
    assert outputs.compiled == 4  # the step that warned was the eager path's
    assert filt.run(filt.init(start(D)), stream)[1].compiled == 5


def assert_same_error(filt: df.Filter, state: df.FilterState, stream: Any) -> None:
    found = []
    for run in (filt.run, partial(eagerly, filt)):
        with pytest.raises(ValueError, match=r".") as caught:
            run(state, stream)
        found.append((caught.type, str(caught.value)))
    assert found[0] == found[1]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    "bad",
    [
        torch.full((1, D), math.nan),
        torch.full((2, D), math.inf),
        torch.zeros(0, D),
        torch.ones(2, D + 1),
        torch.ones(D),
        "no",
    ],
    ids=["nan", "infinite", "empty", "wide", "flat", "text"],
)
def test_a_bad_batch_raises_what_the_eager_step_raises(bad: Any, structure: str) -> None:
    filt = build()
    state = filt.init(start(D, structure))
    stream = [*ragged(sizes=(1,) * 5), bad, *ragged(sizes=(1,) * 2)]
    assert scan.why_eager(filt, state, stream) == "" or isinstance(bad, Tensor)
    assert_same_error(filt, state, stream)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_winding_up_raises_the_same_error(structure: str) -> None:
    """Directions without data grow as δ⁻ᵗ until they overflow; a gate that lets nothing pass leaves
    only the transition.
    """
    closed = df.Gibbs(df.Entropy(), df.EntropyGate(0.5))
    filt = build(transition=df.Transition(df.RandomWalk(), df.Discount(1e-30)), observation=closed)
    state, stream = filt.init(start(D, structure)), [torch.zeros(1, D, dtype=torch.float64)] * 40
    assert_same_error(filt, state, stream)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_parameters_that_run_away_raise_the_same_error(structure: str) -> None:
    filt = build(
        observation=df.Gibbs(df.PseudoLabel(), df.Constant(1e200)),
        inference=df.Linearized(df.NoCurvature()),
    )
    state, stream = (
        filt.init(start(D, structure)),
        [1e200 * batch for batch in ragged(sizes=(1,) * 4)],
    )
    assert_same_error(filt, state, stream)


def test_where_rounding_matters_the_eager_path_takes_the_step() -> None:
    """From variances of 1e-16 and 1 the bound cannot promise a definite matrix; results stay those
    of the eager loop.
    """
    matrix = torch.diag(torch.tensor([1.0, 1e-16, 1.0], dtype=torch.float64))
    belief = df.Belief(torch.ones(D, dtype=torch.float64), df.Full(matrix))
    still = build(
        transition=df.Transition(df.RandomWalk(), df.NoNoise()),
        observation=df.Gibbs(df.PseudoLabel()),
    )
    stream = ragged(sizes=(1,) * 9)
    assert_alike(still, belief, stream, eager=9)
    noisy = build(
        transition=df.Transition(df.RandomWalk(), df.Isotropic(1e-3)),
        observation=df.Gibbs(df.PseudoLabel()),
    )
    assert_alike(noisy, belief, stream, eager=0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"inference": df.Bong()}, "Linearized"),
        ({"inference": df.Linearized(df.Hessian(), reach=4.0)}, "reach"),
        ({"inference": df.Linearized(df.Hessian(), limit=0.5)}, "limit"),
        ({"transition": df.Transition(df.MeanReversion(0.9), samples=9)}, "samples"),
        ({"inference": df.Linearized(df.Hessian("never"))}, "raw"),
        ({"observation": df.Gibbs(df.RunningInformation())}, "RunningInformation"),
        ({"logits": Centered(df.LinearHead(2))}, "LinearHead"),
        ({"observation": df.Gibbs(df.SoftLikelihoodRatio())}, "closed form"),
        ({"observation": df.Gibbs(df.Entropy(), df.DiversityGate())}, "DiversityGate"),
        ({"prediction": df.MonteCarlo()}, "MonteCarlo"),
        ({"upkeep": df.ResetEvery(10)}, "upkeep"),
        ({"logits": lambda theta, x: torch.stack((0 * (x @ theta), x @ theta), -1)}, "LinearHead"),
    ],
    ids=[
        "bong",
        "reach",
        "limit",
        "samples",
        "raw",
        "running",
        "centred",
        "ratio",
        "memory",
        "monte carlo",
        "upkeep",
        "function",
    ],
)
def test_what_is_not_covered_runs_eagerly_and_says_why(change: dict[str, Any], reason: str) -> None:
    filt = build(**change)
    state, stream = filt.init(start(D)), ragged()
    assert reason in scan.why_eager(filt, state, stream)
    assert filt.run(state, stream)[1].compiled == 0


def test_iterators_short_streams_and_other_structures_run_eagerly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    filt, stream = build(), ragged()
    state = filt.init(start(D))
    assert "iterator" in scan.why_eager(filt, state, iter(stream))
    assert filt.run(state, iter(stream))[1].compiled == 0
    low_rank = df.LowRank(
        torch.ones(D, dtype=torch.float64), torch.zeros(0, D, dtype=torch.float64), rank=2
    )
    assert "LowRank" in scan.why_eager(
        filt, filt.init(df.Belief(torch.zeros(D).double(), low_rank)), stream
    )
    monkeypatch.setattr(scan, "STEPS", 64)
    assert "fewer" in scan.why_eager(filt, state, stream)
    monkeypatch.setattr(scan, "STEPS", 1)
    monkeypatch.setattr(scan, "find_spec", lambda name: None)
    assert "numba" in scan.why_eager(filt, state, stream)


def test_outputs_are_a_sequence_that_can_be_sliced_and_pickled() -> None:
    filt, stream = build(), ragged()
    _, outputs = filt.run(filt.init(start(D)), stream)
    assert [len(p.labels) for p in outputs[1:4]] == [1, 4, 2]
    assert_same(
        (outputs[-1].log_probabilities, outputs.probabilities),
        (outputs.log_probabilities[-2:], outputs.log_probabilities.exp()),
    )
    with pytest.raises(IndexError):
        outputs[6]
    again = pickle.loads(pickle.dumps(outputs))
    assert torch.equal(again.log_probabilities, outputs.log_probabilities)
    assert again.infos[2].step == 2


@pytest.mark.parametrize("over", ["kept", "batch"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("classes", [2, 3, 4])
def test_samples_of_a_tie_have_no_weight_anywhere(classes: int, structure: str, over: Any) -> None:
    """Rounding of 1 - H / ln k is not to decide how many samples there are (padded ones, say)."""
    observation = df.Gibbs(df.Entropy(), df.Reliability(), over=over)
    transition = df.Transition(df.RandomWalk(), df.Isotropic(1e-3))
    filt = df.Filter(df.LinearHead(classes), transition, observation, df.Linearized(df.Hessian()))
    x = torch.randn(20, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, 1:] = 0.0
    first = filt.init(start(3 * classes, structure))
    state, _, infos = eagerly(filt, first, x)
    end, outputs = filt.run(first, x)
    fleet = df.Fleet(filt, first.belief, [0])
    fleet.run(x[None])
    assert outputs.compiled == 20
    for other in (end, fleet.state(0)):
        assert_close(moments(other.belief), moments(state.belief))
    for own, eager in zip(outputs.infos, infos, strict=True):
        assert (own.weights[1:] == 0).all()
        assert (eager.weights[1:] == 0).all()
        torch.testing.assert_close(own.coefficients, eager.coefficients, rtol=1e-9, atol=0)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["beside the sources", "NUMBA_CACHE_DIR"])
def test_compiled_code_older_than_a_source_is_forgotten(elsewhere: bool, tmp_path: Path) -> None:
    """A kernel is inlined from several files, numba looks at the outermost one's only."""
    shutil.copytree(
        Path(df.__file__).parent,
        tmp_path / "driftfilter",
        ignore=shutil.ignore_patterns("__pycache__", "app"),
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "NUMBA_CACHE_DIR": str(tmp_path / "cache") if elsewhere else "",
    }
    script = (
        "from driftfilter.compiled.logistic import scan_rank_one; "
        "print(scan_rank_one.stats.cache_path)"
    )

    def imported() -> Path:
        told = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        return Path(told.stdout.strip())

    folder = imported()
    assert folder.is_relative_to(tmp_path)
    ages = {"full.scan-1.nbi": 1.0, "full.scan-2.nbi": time.time() + 60, "mine.scan-1.nbi": 1.0}
    for name, age in ages.items():
        (folder / name).touch()
        os.utime(folder / name, (age, age))
    imported()
    assert [(folder / name).exists() for name in ages] == [False, True, True]

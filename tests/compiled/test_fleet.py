"""A fleet against as many filters of their own; arrivals, errors that change nothing, files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import driftfilter as df
from covered import CURVATURES, LOSSES, PREDICTIONS, STRUCTURES, WEIGHTINGS, assert_close
from driftfilter.compiled import fleet as module
from driftfilter.compiled.fleet_opinions import FleetOpinions
from driftfilter.inference.accuracy import Opinions
from small import moments, refuses

D, NAMES = 3, ["a", "b", "c", "d", "e"]


def build(**parts: Any) -> df.Filter:
    usual: dict[str, Any] = {
        "logits": df.LinearHead(3),
        "transition": df.Transition(df.MeanReversion(0.9), df.Stationary()),
        "observation": df.Gibbs(df.PseudoLabel(), df.EntropyGate(0.9, 2.0)),
        "inference": df.Linearized(df.Hessian()),
        "prediction": df.LinearizedProbit(),
    }
    return df.Filter(**{**usual, **parts})


def start(structure: str, d: int = 3 * D, dtype: torch.dtype = torch.float64) -> df.Belief:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(d, d, generator=generator, dtype=torch.float64)
    matrix = root @ root.mT / d + 0.1 * torch.eye(d, dtype=torch.float64)
    covariance = (
        df.Full(matrix.to(dtype))
        if structure == "full"
        else df.Diagonal(matrix.diagonal().to(dtype))
    )
    return df.Belief(torch.randn(d, generator=generator, dtype=torch.float64).to(dtype), covariance)


def features(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(params=[pytest.param("compiled", marks=pytest.mark.slow), "batched"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "batched":
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    else:
        pytest.importorskip("numba")
    return str(request.param)


def assert_state(
    fleet: df.Fleet, stream: Any, state: df.FilterState, tolerance: float = 1e-9
) -> None:
    mine = fleet.state(stream)
    assert mine.step == state.step
    assert_close(moments(mine.belief), moments(state.belief), tolerance)


VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"observation": df.Gibbs(loss)} for name, loss in LOSSES.items()},
    **{
        name: {"observation": df.Gibbs(df.PseudoLabel(), weighting)}
        for name, weighting in WEIGHTINGS.items()
    },
    **{name: {"inference": df.Linearized(block)} for name, block in CURVATURES.items()},
    **{name: {"prediction": block} for name, block in PREDICTIONS.items()},
    # Fields that are no block of the table.
    "radius": {
        "inference": df.Linearized(df.EmpiricalFisher(centered=False, scale=0.8), radius=0.3)
    },
    "prior": {"inference": df.Linearized(df.GaussNewton()), "predict_from": "prior"},
    "kept": {
        "observation": df.Gibbs(df.PseudoLabel(0.6), df.Reliability(2.0), "kept", reference=2)
    },
    "restore": {
        "transition": df.Transition(df.MeanReversion(0.8), df.Restore()),
        "prediction": df.LinearizedProbit("per_class"),
    },
}


@pytest.mark.filterwarnings("ignore::driftfilter.NoInformationWarning")
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", VARIANTS)
def test_fleet_is_as_many_filters(
    name: str, structure: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    filt = build(**VARIANTS[name])
    # These learn nothing from one sample, and a first step without information is the filter's own.
    if not {df.Linearized(df.EmpiricalFisher()), df.InformationMaximization()} & {
        filt.inference,
        filt.observation.loss,
    }:
        monkeypatch.delattr(df.Filter, "run")  # no stream falls back to its filter
    fleet = df.Fleet(filt, start(structure), NAMES)
    states = {stream: filt.init(start(structure)) for stream in NAMES}
    calls = [(NAMES, 1), (["d", "b"], 2), (NAMES, 2), (NAMES, 1)]
    for position, (arriving, n) in enumerate(calls):
        x = features(len(arriving), n, D, seed=position)
        together = fleet.step(x, arriving)
        for row, stream in enumerate(arriving):
            states[stream], prediction, _ = filt.step(states[stream], x[row])
            assert_close(
                (together.log_probabilities[row], together.logit_variance[row]),
                (prediction.log_probabilities, prediction.logit_variance),
            )
    for stream, state in states.items():
        assert_state(fleet, stream, state)


def test_batches_of_different_sizes(path: str) -> None:
    filt, belief = build(), start("diagonal")
    fleet = df.Fleet(filt, belief, NAMES)
    batches = {"e": features(2, D), "a": features(1, D), "c": features(2, D, seed=5)}
    predictions = fleet.step(batches)
    assert list(predictions) == ["e", "a", "c"]
    for stream, batch in batches.items():
        state, prediction, _ = filt.step(filt.init(belief), batch)
        assert_state(fleet, stream, state)
        assert_close(predictions[stream].log_probabilities, prediction.log_probabilities)
    assert [fleet.state(stream).step for stream in NAMES] == [1, 0, 1, 0, 1]


@pytest.mark.parametrize("structure", ["full", "diagonal"])
@pytest.mark.parametrize("classes", [2, 3])
def test_run_is_steps(classes: int, structure: str, path: str) -> None:
    belief = start(structure, (classes - 1) * (D + 1))
    filt = build(logits=df.LinearHead(classes, intercept=True))
    x = features(5, 4, 1, D)
    whole, stepped = (df.Fleet(filt, belief, NAMES) for _ in range(2))
    together = whole.run(x)
    for t in range(4):
        assert_close(stepped.step(x[:, t]).log_probabilities, together.log_probabilities[:, t])
    for stream in NAMES:
        assert_state(whole, stream, stepped.state(stream))


def test_single_precision_and_threads(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough streams for two threads; compared with filters of their own to 1e-6."""
    filt, belief = build(), start("diagonal", dtype=torch.float32)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    x, fleet = features(150, 1, D).float(), df.Fleet(filt, belief, range(150))
    together = fleet.step(x)
    for stream in (0, 74, 75, 149):
        state, prediction, _ = filt.step(filt.init(belief), x[stream])
        assert_state(fleet, stream, state, 1e-6)
        assert_close(together.log_probabilities[stream], prediction.log_probabilities, 1e-6)


@pytest.mark.parametrize("width", [5, 40])
def test_single_precision_over_many_steps(width: int, path: str) -> None:
    """Widths that fill no vector register, and fill some and a part; twenty steps of entropy, to
    1e-6.
    """
    filt = build(
        observation=df.Gibbs(df.Entropy()),
        inference=df.Linearized(df.EmpiricalFisher(centered=False)),
    )
    belief = df.Belief(features(3 * width).float() / 8, df.Diagonal(torch.full((3 * width,), 0.02)))
    x = features(len(NAMES), 20, 1, width).float()
    fleet, states = df.Fleet(filt, belief, NAMES), {stream: filt.init(belief) for stream in NAMES}
    together = fleet.run(x)
    for row, stream in enumerate(NAMES):
        for t in range(20):
            states[stream], prediction, _ = filt.step(states[stream], x[row, t])
            assert_close(together.log_probabilities[row, t], prediction.log_probabilities, 1e-6)
        assert_state(fleet, stream, states[stream], 1e-6)


@pytest.mark.slow
def test_streams_that_compiled_code_refuses_step_by_themselves() -> None:
    """One gradient less its mean holds no information: the first such step is the filter's own, and
    warns.
    """
    pytest.importorskip("numba")
    filt, belief = (
        build(observation=df.Gibbs(df.Entropy()), inference=df.Linearized(df.EmpiricalFisher())),
        start("diagonal"),
    )
    fleet, x = df.Fleet(filt, belief, NAMES), features(5, 1, D)
    with pytest.warns(df.NoInformationWarning):
        fleet.step(x)
    assert_state(fleet, "c", filt.step(filt.init(belief), x[2])[0])


def test_coupled_losses(path: str) -> None:
    filt = build(observation=df.Gibbs(df.InformationMaximization()))
    fleet, x = df.Fleet(filt, start("full"), NAMES), features(5, 3, D)
    fleet.step(x)
    assert_state(fleet, "c", filt.step(filt.init(start("full")), x[2])[0])


def test_add_and_drop(path: str) -> None:
    filt, belief = build(), start("diagonal")
    fleet, x = df.Fleet(filt, belief, NAMES, seed=7), features(5, 1, D)
    fleet.step(x)
    fleet.drop(["b", "d"])
    fleet.add(["new"], seed=40)
    assert (fleet.streams, len(fleet)) == (["a", "c", "e", "new"], 4)
    assert "b" not in fleet
    assert_state(fleet, "e", filt.step(filt.init(belief), x[4])[0])
    assert [fleet.state(stream).seed for stream in fleet.streams] == [7, 9, 11, 40]
    assert fleet.state("new").step == 0


BAD: dict[str, tuple[Any, Any, str]] = {
    "unknown": (features(2, 1, D), ["a", "z"], "streams that were added"),
    "twice": (features(2, 1, D), ["a", "a"], "named once"),
    "wide": (features(5, 1, D + 1), None, "width"),
    "empty": (features(5, 0, D), None, "n >= 1"),
    "fewer": (features(4, 1, D), None, r"\[5, n, D\]"),
    "nan": (torch.full((5, 1, D), torch.nan), None, "finite"),
    "list": ([1.0], None, "a tensor"),
    "mapping": ({"a": features(D)}, None, r"\[n, D\]"),
    "none": ({}, None, "one stream or more"),
    "one bad batch": ({"a": features(1, D), "b": features(2, D) * torch.nan}, None, "finite"),
    "overflow": (features(5, 1, D) * torch.tensor([1, 1, 1, 1, 1e308])[:, None, None], None, "."),
}


@pytest.mark.parametrize("name", BAD)
def test_an_error_changes_no_stream(name: str, path: str) -> None:
    batches, streams, message = BAD[name]
    fleet = df.Fleet(build(), start("diagonal"), NAMES)
    fleet.step(features(5, 1, D))
    before = {stream: fleet.state(stream) for stream in NAMES}
    with pytest.raises(ValueError, match=message):
        fleet.step(batches, streams)
    for stream in NAMES:
        assert_state(fleet, stream, before[stream], 0.0)


test_refused_filters_and_names = refuses(
    [
        (
            lambda: df.Fleet(build(inference=df.Bong()), start("full")),
            "closed forms, but the inference is Bong",
        ),
        (
            lambda: df.Fleet(build(inference=df.Linearized(reach=2.0)), start("full")),
            "closed forms, but the inference has a reach above 1",
        ),
        (
            lambda: df.Fleet(build(inference=df.Linearized(limit=0.5)), start("full")),
            "closed forms, but the inference has a reach above 1, or a limit",
        ),
        (
            lambda: df.Fleet(build(transition=df.Transition(samples=9)), start("full")),
            "closed forms, but the transition goes by samples",
        ),
        (
            lambda: df.Fleet(build(inference=df.Linearized(df.Hessian("never"))), start("full")),
            "closed forms, but the Hessian is raw",
        ),
        (
            lambda: df.Fleet(build(transition=df.Transition(df.LocalTrend())), start("full")),
            "hidden states",
        ),
        (lambda: df.Fleet(build(), start("full"), ["a", "a"]), "new, each named once"),
    ]
)


def test_a_name_that_is_taken_adds_nothing() -> None:
    fleet = df.Fleet(build(), start("full"), ["a"])
    with pytest.raises(ValueError, match="new, each named once"):
        fleet.add(["b", "a"])
    assert fleet.streams == ["a"]


@pytest.mark.parametrize("structure", ["full", "diagonal"])
def test_saved_and_loaded(structure: str, path: str, tmp_path: Path) -> None:
    file, x = tmp_path / "fleet.safetensors", features(5, 1, D)
    one, other = (df.Fleet(build(), start(structure), streams) for streams in (NAMES, ["x"]))
    one.step(x)
    one.save(file)
    other.load(file)
    assert other.streams == NAMES
    for fleet in (one, other):
        fleet.step({"c": x[0], "d": x[1]})
    for stream in NAMES:
        assert_state(other, stream, one.state(stream), 0.0)


def test_a_device_without_room_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "fleet.safetensors"
    fleet, other = (df.Fleet(build(), start("full"), NAMES) for _ in range(2))
    fleet.step(features(5, 1, D))
    fleet.save(file)

    def fill(*_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", fill)
        with pytest.raises(torch.OutOfMemoryError):
            other.load(file)
    assert [other.state(stream).step for stream in NAMES] == [0] * len(NAMES)


def test_files_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    file = tmp_path / "fleet.safetensors"
    fleet = df.Fleet(build(), start("diagonal"), NAMES)
    fleet.save(file)
    others = [
        df.Fleet(build(prediction=df.MAP()), start("diagonal"), ["x"]),
        df.Fleet(build(), start("full"), ["x"]),
        df.Fleet(build(), start("diagonal", dtype=torch.float32), ["x"]),
    ]
    for other in others:
        with pytest.raises(df.CheckpointError, match="was not loaded"):
            other.load(file)
        assert other.streams == ["x"]
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(df.CheckpointError, match="checksum"):
        fleet.load(file)
    with pytest.raises(ValueError, match="texts or whole numbers"):
        df.Fleet(build(), start("diagonal"), [(1, 2)]).save(file)


def follow(batches: list[Tensor]) -> Opinions:
    """What a filter of its own keeps of what it predicted [n, k]."""
    known = Opinions.of(batches[0])
    for batch in batches[1:]:
        known = known.extend(Opinions.of(batch))
    return known


@pytest.mark.parametrize("sizes", [[1] * 130, [40, 1, 70, 100, 3, 160] * 8, [1500, 2], [101] * 14])
def test_opinions_of_streams_are_those_of_each_alone(sizes: list[int]) -> None:
    """The second of three streams gets every other batch."""
    known = FleetOpinions.start(3, 4)
    given: dict[int, list[Tensor]] = {0: [], 1: []}
    for number, n in enumerate(sizes):
        rows = torch.tensor([0] if number % 2 else [1, 0])
        logs = features(len(rows), 1, n, 4, seed=number).log_softmax(-1)
        known.extend(rows, logs)
        for row, own in zip(rows.tolist(), logs, strict=True):
            given[row].append(own[0])
    for row, batches in given.items():
        found, expected = known.of(row), follow(batches)
        assert found is not None
        assert found.counts == expected.counts
        assert_close(found.sums, expected.sums)
    assert known.of(2) is None


def test_estimate_of_a_stream(path: str, tmp_path: Path) -> None:
    fleet = df.Fleet(build(), start("diagonal"), NAMES, estimates=True)
    whole = fleet.run(features(5, 30, 7, D))
    fleet.step({"b": features(3, D, seed=9)})
    fleet.drop(["a"])
    fleet.add(["new"])
    expected = df.Estimate.of(whole.log_probabilities[2])
    assert fleet.estimate("c").samples == 210
    assert fleet.estimate("c").accuracy == pytest.approx(expected.accuracy, abs=1e-12)
    assert fleet.estimate("c").low == pytest.approx(expected.low, abs=1e-12)
    assert fleet.estimate("b").samples == 213
    assert fleet.estimate("new").samples == 0
    fleet.save(tmp_path / "fleet")
    other = df.Fleet(build(), start("diagonal"), estimates=True)
    other.load(tmp_path / "fleet")
    assert [other.estimate(each) for each in NAMES[1:]] == [
        fleet.estimate(each) for each in NAMES[1:]
    ]
    plain = df.Fleet(build(), start("diagonal"))
    plain.load(tmp_path / "fleet")  # what it does not keep is left out
    with pytest.raises(ValueError, match="Fleet: estimates must be True"):
        plain.estimate("b")
    plain.save(tmp_path / "plain")
    with pytest.raises(df.CheckpointError, match="'opinions'"):
        other.load(tmp_path / "plain")


def test_opinions_that_cannot_be_are_refused(tmp_path: Path) -> None:
    fleet, other = (df.Fleet(build(), start("full"), NAMES, estimates=True) for _ in range(2))
    fleet.step(features(5, 3, D))
    assert fleet._opinions is not None
    for sums, counts in ((1e3, 0), (0.0, -5)):
        kept = fleet._opinions
        fleet._opinions = kept.pick(torch.arange(5))
        fleet._opinions.sums[1, -1] += sums
        fleet._opinions.counts[1, -2] += counts
        fleet.save(tmp_path / "fleet")
        with pytest.raises(df.CheckpointError, match=r"opinions|counts|sums"):
            other.load(tmp_path / "fleet")
        assert other.estimate("b").samples == 0
        fleet._opinions = kept

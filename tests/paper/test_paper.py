"""The paper's examples: their data, their honest rows, what the command writes, and the bars on a
couple of seeds.
"""

import itertools
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from scipy import stats

import driftfilter as df
from driftfilter.app import cli, commands
from driftfilter.app.paper import cases, options, reproduce, trial
from driftfilter.app.paper.dynamics import DynamicsExample, Prior
from driftfilter.app.paper.linear import Linear
from driftfilter.app.paper.moons import Moons
from driftfilter.app.paper.pinwheel import Pinwheel
from driftfilter.app.paper.trial import (
    TIMES,
    Example,
    Runner,
    Scores,
    Trial,
    doubt,
    far_points,
    is_alarmed,
    polynomial,
    run_changed,
    run_clipped,
    run_filter,
    run_frozen,
    run_smoothed,
    run_supervised,
)
from driftfilter.inference.curvature import Clip
from small import moments

SHORT: dict[str, Example] = {
    "linear": Linear(steps=40, test_samples=50),
    "moons": Moons(steps=10, test_samples=50),
    "pinwheel": Pinwheel(steps=8, test_samples=50, samples=2),
}
SEEDS = (2000, 2001)


def run(example: Example, runner: Runner, seed: int) -> Trial:
    problem = example.problem(seed)
    return runner(example, example.source(problem.source), problem, seed)


def scores(example: Example, runner: Runner, seed: int) -> Scores:
    measured = run(example, runner, seed).scores
    assert measured is not None
    return measured


def run_pairs(example: Example, seeds: Sequence[int]) -> tuple[list[Scores], list[Scores]]:
    """Scores of source and filter for every seed."""
    source, ours = (
        [scores(example, runner, seed) for seed in seeds] for runner in (run_frozen, run_filter)
    )
    return source, ours


def test_polynomial_features_are_all_monomials() -> None:
    inputs = torch.randn(5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x, y = inputs.T
    expected = torch.stack(
        [torch.ones_like(x), x, y, x * x, x * y, y * y, x**3, x * x * y, x * y * y, y**3], -1
    )
    torch.testing.assert_close(polynomial(inputs, 3), expected)
    assert polynomial(inputs, 7).shape == (5, 36)


def test_moons_lie_on_their_arcs_at_beta_angles() -> None:
    inputs, labels = Moons(noise=0.0).draw(
        torch.full((4000,), 0.8, dtype=torch.float64), 0.5, torch.Generator().manual_seed(0)
    )
    centers = torch.tensor([[0.0, 0.0], [1.0, 0.5]], dtype=torch.float64)[labels]
    torch.testing.assert_close(
        (inputs - centers).norm(dim=-1), torch.ones(4000, dtype=torch.float64)
    )
    side = torch.where(labels == 0, 1.0, -1.0)[:, None]
    angles = torch.atan2(*((inputs - centers) * side).flip(-1).T) / math.pi
    assert stats.kstest(angles, stats.beta(6.4, 1.6).cdf).pvalue > 0.01


def test_pinwheel_unwinds_to_its_blades() -> None:
    inputs, labels = Pinwheel(turn=0.3).draw(
        torch.full((4000,), 0.5, dtype=torch.float64), 1 / 3, torch.Generator().manual_seed(0)
    )
    radius = inputs.norm(dim=-1)  # of (r + 0.3 e₁, 0.1 e₂): nearly its first coordinate
    angle = (
        torch.atan2(inputs[:, 1], inputs[:, 0])
        - 2 * math.pi * labels / 3
        - 0.15
        - 0.25 * radius.exp()
    )
    assert (radius * torch.sin(angle)).std().item() == pytest.approx(0.1, rel=0.1)
    assert radius.mean().item() == pytest.approx(1.45, abs=0.02)
    assert torch.bincount(labels).tolist() == pytest.approx([4000 / 3] * 3, rel=0.06)


def test_linear_classes_move_together() -> None:
    inputs, labels = Linear().draw(
        torch.full((4000,), 2.0, dtype=torch.float64), 0.9, torch.Generator().manual_seed(0)
    )
    assert labels.double().mean().item() == pytest.approx(0.9, abs=0.02)
    assert inputs[labels == 0].mean(0).tolist() == pytest.approx([0.5, 2.0], abs=0.12)
    assert inputs[labels == 1].mean(0).tolist() == pytest.approx([3.5, 2.0], abs=0.04)


@pytest.fixture(scope="module")
def drawn() -> dict[str, Prior]:
    return DynamicsExample().run(2000)


@pytest.mark.parametrize("name", ["random walk", "polynomial trend", "seasonal", "mean reversion"])
def test_drawn_paths_have_the_moments_of_the_prior(name: str, drawn: dict[str, Prior]) -> None:
    example, prior = DynamicsExample(), drawn[name]
    steps, count = torch.arange(example.steps + 1, dtype=torch.float64), len(prior.paths)
    start, noise = example.deviation**2, example.noise**2
    small, season = example.trend_noise**2, example.season_noise**2
    angle = 2 * math.pi * steps / example.period
    closed = {
        "random walk": start + steps * noise,
        "polynomial trend": start
        + steps**2 * example.velocity_deviation**2
        + small * (steps + (steps - 1) * steps * (2 * steps - 1) / 6),
        "seasonal": start + example.season_deviation**2 + 2 * season * steps,
        "mean reversion": example.rho ** (2 * steps) * start
        + noise * (1 - example.rho ** (2 * steps)) / (1 - example.rho**2),
    }[name]
    for index, value in ((0, example.intercept), (1, example.slope)):
        phase, still = example.phase[index], torch.zeros_like(steps)
        moved = {
            "polynomial trend": example.velocity[index] * steps,
            "seasonal": example.amplitude[index] * ((angle + phase).sin() - math.sin(phase)),
        }
        torch.testing.assert_close(prior.mean[:, index], value + moved.get(name, still))
        torch.testing.assert_close(prior.covariance[:, index, index], closed, rtol=1e-9, atol=1e-12)
    means, variances = prior.disagreement()
    assert means < 4.5, f"{count} paths"
    assert variances < 4.5, f"{count} paths"


def test_disagreement_sees_paths_of_other_moments() -> None:
    prior = DynamicsExample(steps=20).run(0)["random walk"]
    wider = prior.mean + 1.2 * (prior.paths - prior.mean)
    assert prior._replace(paths=prior.paths + 0.1).disagreement()[0] > 10
    assert prior._replace(paths=wider).disagreement()[1] > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "stream", "end"),
    [(Moons(), 0.96, 0.84), (Pinwheel(), 0.93, 0.72), (cases.rotate(Pinwheel()), 0.97, 0.95)],
    ids=["moons", "pinwheel", "rotated"],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_filter_follows_what_the_source_loses(
    example: Example, stream: float, end: float, seed: int
) -> None:
    source, ours = scores(example, run_frozen, seed), scores(example, run_filter, seed)
    assert ours.accuracy >= stream
    assert ours.end_accuracy >= end
    assert ours.accuracy >= source.accuracy + 0.05
    assert ours.nll < source.nll
    assert ours.ece < source.ece
    assert not is_alarmed(example, ours)


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["diagonal", "low rank"])
def test_moons_under_every_structure(structure: str) -> None:
    (source,), (ours,) = run_pairs(Moons(structure=structure), [SEEDS[0]])
    assert ours.accuracy >= 0.95
    assert ours.nll < source.nll


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    [Linear(shift=0.0, steps=300), Moons(end=0.8, steps=50), Pinwheel(radius=1.0, steps=40)],
    ids=["linear", "moons", "pinwheel"],
)
def test_without_a_shift_nothing_is_lost(example: Example) -> None:
    source, ours = run_pairs(example, SEEDS)
    assert min(a.accuracy - b.accuracy for a, b in zip(ours, source, strict=True)) >= -0.005


@pytest.mark.slow
def test_labels_bound_the_filter_from_above() -> None:
    seed, example = SEEDS[0], Moons()
    assert (
        scores(example, run_supervised, seed).end_accuracy
        >= scores(example, run_filter, seed).end_accuracy
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    [Linear(beta=100.0), Moons(beta=100_000.0), Pinwheel(beta=30_000.0)],
    ids=["linear", "moons", "pinwheel"],
)
def test_too_large_a_temperature_raises_the_alarm(example: Example) -> None:
    ours = scores(example, run_filter, SEEDS[0])
    assert ours.accuracy < 0.93
    assert is_alarmed(example, ours)


def test_a_raw_hessian_is_refused() -> None:
    """With the step at which it was, and no half-made scores."""
    measured = run(Pinwheel(steps=100), run_clipped("never"), SEEDS[0])
    assert measured.scores is None
    assert measured.refused_at in range(1, 101)


@pytest.mark.parametrize("example", [Linear(), Moons(), Pinwheel()], ids=lambda each: type(each))
def test_the_raw_hessian_is_of_the_inference_of_the_example(
    example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BONG on the moons and the pinwheel, as in the paper; linearised on the linear model."""
    seen: list[df.Filter] = []
    monkeypatch.setattr(trial, "_run", lambda filt, *others: seen.append(filt))
    run(example, run_clipped("never"), SEEDS[0])
    own = example.filter()
    expected = df.Linearized if isinstance(example, Linear) else df.Bong
    assert isinstance(seen[0].inference, expected)
    assert replace(own.inference, curvature=df.Hessian("never")) == seen[0].inference  # type: ignore[type-var]
    assert replace(seen[0], inference=own.inference, logits=own.logits) == own


def test_orders_of_clipping_agree_where_nothing_is_to_be_clipped() -> None:
    """Cross-entropy is convex: all curvatures give the same run."""
    example, seed = Moons(steps=5), SEEDS[0]
    problem = example.problem(seed)
    belief = example.source(problem.source)
    convex = replace(example.filter(), observation=df.Gibbs(df.PseudoLabel(), df.Constant(5.0)))
    orders: tuple[Clip, ...] = ("after", "before", "never")
    each = (
        replace(convex, inference=df.Bong(df.Hessian(order), samples=0, nodes=15))
        for order in orders
    )
    first, *others = (filt.run(filt.init(belief), problem.stream.inputs)[0].belief for filt in each)
    for other in others:
        torch.testing.assert_close(first.mean, other.mean, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(moments(first)[1], moments(other)[1], rtol=1e-6, atol=1e-9)


def test_a_row_with_other_parts_is_the_filter_with_them() -> None:
    example, seed = Moons(steps=5), SEEDS[0]
    same = run(example, run_changed(predict_from="posterior"), seed)
    assert same.scores == run(example, run_filter, seed).scores
    assert run(example, run_changed(predict_from="prior"), seed).scores != same.scores


def test_the_smoothed_row_ends_where_the_filter_does() -> None:
    example, seed = Moons(steps=20), SEEDS[0]
    ours, filtered = run(example, run_smoothed, seed), run(example, run_filter, seed)
    assert ours.scores is not None
    assert filtered.scores is not None
    assert ours.scores.end_accuracy == filtered.scores.end_accuracy
    torch.testing.assert_close(moments(ours.beliefs[-1]), moments(filtered.beliefs[-1]))
    assert not torch.equal(ours.beliefs[1].mean, filtered.beliefs[1].mean)


def test_the_supervised_bound_is_the_laplace_posterior_of_all_labels_where_nothing_moves() -> None:
    """Without a transition, labels taken in one batch are one fit."""
    example = Moons(steps=1, batch=30, rho=1.0)
    problem = example.problem(SEEDS[0])
    belief = example.source(problem.source)
    ours = run_supervised(example, belief, problem, 0).beliefs[-1]
    whole = df.fit_laplace(
        example.filter().logits, belief, problem.stream.inputs[0], problem.stream.labels[0]
    )
    torch.testing.assert_close(moments(ours), moments(whole))


@pytest.mark.slow
def test_uncertainty_falls_where_the_data_come_and_stays_where_they_do_not() -> None:
    example = Moons()
    problem = example.problem(SEEDS[0])
    near, ahead, far = doubt(example, problem, run(example, run_filter, SEEDS[0]).beliefs)
    assert len(near) == len(ahead) == len(far) == len(TIMES)
    assert ahead[-1][0] < 0.5 * ahead[0][0]
    assert far[-1][0] > 0.5 * far[0][0]
    assert far[-1][1] > 20 * near[-1][1]
    seen = torch.cat((problem.source.inputs, problem.stream.inputs.flatten(0, 1)))
    assert torch.cdist(far_points(example, problem), seen).min() > example.far


def test_alarms() -> None:
    fine = Scores(0.9, 0.9, 0.1, 0.1, 0.5, 1.0)
    assert not is_alarmed(Moons(), fine)
    assert is_alarmed(Moons(), fine._replace(least_share=0.0))
    assert is_alarmed(Moons(), fine._replace(distance=6.0))
    assert not is_alarmed(Linear(), fine._replace(distance=6.0))


def test_claims_are_checked_against_their_bars() -> None:
    good, bad = Scores(0.98, 0.95, 0.1, 0.01, 1.0, 1.0), Scores(0.5, 0.5, 0.9, 0.4, 1.0, 1.0)
    names = (
        "frozen source",
        "filter",
        "no shift, source",
        "no shift, filter",
        "rotated, source",
        "rotated, filter",
    )
    won = {name: [bad if "source" in name else good] for name in names}
    lost = {name: [good if "source" in name else bad] for name in names}
    for claim in itertools.chain(*cases.CLAIMS.values()):
        assert claim.is_met(won), claim.text
        assert not claim.is_met(lost), claim.text


def _metrics(folder: Path, name: str) -> dict[str, object]:
    measured: dict[str, object] = json.loads(
        (folder / name / "metrics.json").read_text(encoding="utf-8")
    )
    measured.pop("seconds", None)  # the only part that differs between runs
    return measured


@pytest.mark.slow
def test_a_run_is_determined_by_its_seeds_however_many_processes(tmp_path: Path) -> None:
    for workers, folder in ((1, "one"), (2, "two")):
        reproduce.reproduce(
            ("moons",), SEEDS, tmp_path / folder, workers, examples=SHORT, figures=False
        )
    one, two = _metrics(tmp_path / "one", "moons"), _metrics(tmp_path / "two", "moons")
    assert (one, one["seeds"]) == (two, list(SEEDS))
    assert not (tmp_path / "one" / "moons" / "moons.png").exists()


@pytest.mark.slow
def test_figures_tables_and_metrics_are_written(tmp_path: Path) -> None:
    done: list[tuple[str, int, int]] = []
    short = DynamicsExample(steps=10, paths=50)
    stems = {
        "dynamics": ["dynamics"],
        "pinwheel": ["pinwheel", "rotated", "pinwheel_over_time", "rotated_over_time"],
    }
    tables = reproduce.reproduce(
        list(stems),
        [5],
        tmp_path,
        1,
        lambda *news: done.append(news),
        examples=SHORT,
        dynamics=short,
    )
    for name, figures in stems.items():
        assert (tmp_path / name / "table.txt").read_text(encoding="utf-8") == tables[name] + "\n"
        assert _metrics(tmp_path, name)["example"] == name
        for stem in figures:
            assert (tmp_path / name / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
            assert "</svg>" in (tmp_path / name / f"{stem}.svg").read_text(encoding="utf-8")
    assert done == [("pinwheel", 1, 1)]
    for case in cases.pinwheel(Pinwheel()):
        assert any(line.startswith(case.name) for line in tables["pinwheel"].splitlines())


@pytest.mark.slow
def test_every_class_has_its_colour_in_the_figure(tmp_path: Path) -> None:
    """Marks are small, and maps of other colours large: none may take its place in the palette."""
    figures = pytest.importorskip("driftfilter.app.paper.figures")
    example = Pinwheel(steps=5)
    problem = example.problem(SEEDS[0])
    beliefs = run(example, run_filter, SEEDS[0]).beliefs
    figures.save(figures.draw_boundaries(example, problem, beliefs), tmp_path / "figure")
    found = Image.open(tmp_path / "figure.png").convert("RGB").getcolors(1 << 20)
    assert found is not None
    pixels = {color: count for count, color in found}
    for color in figures.CLASSES:
        assert pixels.get(tuple(bytes.fromhex(color[1:])), 0) > 200, color


@pytest.mark.slow
def test_figures_are_the_same_file_every_time(tmp_path: Path) -> None:
    short = DynamicsExample(steps=5, paths=20)
    for folder in ("a", "b"):
        reproduce.reproduce(("dynamics",), [5], tmp_path / folder, dynamics=short)
    for name in ("dynamics.png", "dynamics.svg"):
        first, second = (tmp_path / folder / "dynamics" / name for folder in ("a", "b"))
        assert first.read_bytes() == second.read_bytes()


def test_the_command_writes_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.main(
            ["reproduce", "dynamics", "--out", str(tmp_path), "--no-figures", "--first-seed", "3"]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert f"wrote {tmp_path / 'dynamics'}" in printed
    assert "mean reversion" in printed
    assert _metrics(tmp_path, "dynamics")["seed"] == 3


def test_the_command_knows_the_examples() -> None:
    assert ("dynamics", *reproduce.STREAMS, "cifar") == options.EXAMPLES


def test_figures_need_matplotlib_and_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "find_spec", lambda name: None)
    assert cli.main(["reproduce", "dynamics"]) == 1
    assert "driftfilter[report]" in capsys.readouterr().err


@pytest.mark.slow
def test_numbers_alone_do_not_import_matplotlib() -> None:
    code = "import sys, driftfilter.app.paper.reproduce\nassert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# The claims of the linear example, each with the bar its documentation states


@pytest.fixture(scope="module")
def linear() -> tuple[list[Scores], list[Scores]]:
    return run_pairs(Linear(), range(20))


def mean(scores: Sequence[Scores], field: str) -> float:
    return statistics.fmean(getattr(each, field) for each in scores)


@pytest.mark.slow
def test_linear_example_follows_the_drift(linear: tuple[list[Scores], list[Scores]]) -> None:
    source, ours = linear
    assert mean(ours, "accuracy") >= 0.97
    assert mean(ours, "end_accuracy") >= 0.96
    assert mean(ours, "nll") <= 0.09
    assert mean(source, "accuracy") == pytest.approx(0.75, abs=0.03)
    assert mean(source, "end_accuracy") == pytest.approx(0.51, abs=0.03)
    assert min(each.end_accuracy for each in ours) > 0.9  # never collapses


@pytest.mark.slow
def test_the_control_without_drift_stays_at_the_source() -> None:
    source, ours = run_pairs(Linear(shift=0.0, steps=300), range(5))
    assert mean(ours, "accuracy") >= mean(source, "accuracy") - 0.005


def test_a_run_is_determined_by_its_seed() -> None:
    example = Linear(steps=50, test_samples=100)
    assert run_pairs(example, [3]) == run_pairs(example, [3])
    assert run_pairs(example, [3]) != run_pairs(example, [4])

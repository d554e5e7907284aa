"""Pages with figures are what their templates and the results give; and the benchmarks write what
they read.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import driftfilter as df

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import core
import page
import tasks
from figures import exponent
from pictures import PICTURES

NAMES = sorted(path.name for path in page.RESULTS.glob("*.json"))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(page.RESULTS, tmp_path / "results"))


def change(path: Path, how: Callable[[Any], Any]) -> None:
    record = json.loads(path.read_text())
    record["figures"] = how(record["figures"])
    path.write_text(json.dumps(record))


def called(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["page.py", *map(str, arguments)])
    page.main()


def test_pages_are_what_templates_and_results_give(monkeypatch: pytest.MonkeyPatch) -> None:
    called(monkeypatch, "--check")


def scaled(figures: Any) -> Any:
    """Every measured number times 1.37; whole numbers are sizes and seeds."""
    if isinstance(figures, dict):
        return {key: scaled(value) for key, value in figures.items()}
    if isinstance(figures, list):
        return [scaled(value) for value in figures]
    return 1.37 * figures if isinstance(figures, float) else figures


@pytest.mark.parametrize("name", NAMES)
def test_every_result_is_on_a_page(
    name: str, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(results / name, scaled)
    with pytest.raises(SystemExit, match=r"is not what .*line \d+ is\n.*\nand should be\n"):
        called(monkeypatch, "--check", "--results", results)


def test_ratios_and_figures_follow_the_times(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(
        results / "step.json",
        lambda figures: (
            figures | {"ms": figures["ms"] | {"hand-written TENT": 400.0, "tent": 500.0}}
        ),
    )
    called(monkeypatch, "--results", results, "--docs", tmp_path)
    assert "\n| `tent` | 500 | 1.25 |" in (tmp_path / "lab" / "steps.md").read_text()
    assert "\n| `tent` | 500 | 1.25 |" not in (page.DOCS / "lab" / "steps.md").read_text()
    called(monkeypatch, "--check", "--results", results, "--docs", tmp_path)


def tasks_of(**means: list[float]) -> list[page.Named]:
    """Tasks of a bench, of one stream: the accuracies of each preset by seed."""
    stream = {"model": "vit_s4", "protocol": "reset", "batch": 1, "images": 500}
    return [
        page.named(
            "a test",
            {**stream, "preset": preset, "mean": {"accuracy": value, "ece": 0.1, "nll": 2}},
        )
        for preset, values in means.items()
        for value in values
    ]


def test_a_matrix_is_compared_with_the_frozen_network() -> None:
    found = page.compared(tasks_of(source=[0.6], driftfilter=[0.62, 0.64]))
    assert "| preset | network | protocol | batch 1, 500 images |" in found
    assert "\n| driftfilter | vit_s4 | reset | +3.0 |\n" in found
    assert "none of 1 cells is more than 0.5 points below the frozen network" in found


def test_a_bench_is_a_table_with_deviations_over_seeds() -> None:
    record = page.Named("a test", {"figures": tasks_of(source=[0.6], tent=[0.62, 0.64])})
    head, rule, best, last = page.bench_table(record).splitlines()
    assert head.count("|") == rule.count("|") == best.count("|") == last.count("|")
    assert (
        best
        == "| `vit_s4` | reset | 1 | 500 | `tent` | .630 ± .014 | .100 ± .000 | 2.000 ± .000 | – |"
    )
    assert last == "| `vit_s4` | reset | 1 | 500 | `source` | .600 | .100 | 2.000 | – |"


def test_a_new_bench_at_the_scale_of_imagenet_is_taken_up(results: Path) -> None:
    record = json.loads((results / "peers.json").read_text())
    (results / "imagenet-c.json").write_text(json.dumps({**record, "command": "a run of today"}))
    found = page.render(results)
    assert "`a run of today`" in found["benchmarks.md"]
    assert "Accuracy has not been measured there" not in found["benchmarks.md"]
    assert "| ImageNet-C, 400 images |" not in found["benchmarks.md"]  # without ours
    assert "| `resnet20` | continual | 200 | 400 | `peer_tent` | .729 |" in found["lab/scale.md"]


def test_the_default_is_held_to_the_best_of_others() -> None:
    below = page.Named(
        "a test", {"figures": tasks_of(source=[0.3], tent=[0.6], driftfilter=[0.55])}
    )
    assert page.verdict(below, "PACS") == "PACS, reset: 5.0 points below `tent`."
    missing = page.Named("a test", {"figures": tasks_of(source=[0.3], bn=[0.6])})
    assert page.verdict(missing, "ImageNet-C") == ""  # the laboratory has it


def test_a_result_of_no_page_is_shown_as_it_is(results: Path) -> None:
    assert "## new\n" not in page.render(results)["lab/more.md"]
    record = json.loads((results / "peers.json").read_text())
    rows = [{"case": "this", "gain": 0.51234, "each": [1, 2.5]}, {"case": "that", "gain": None}]
    figures = {"images": 100, "rows": rows}
    (results / "new.json").write_text(json.dumps({**record, "figures": figures}))
    found = page.render(results)["lab/more.md"]
    assert "## new\n" in found
    assert "| images | 100 |" in found
    assert "| this | 0.5123 | 1, 2.5 |\n| that | – | – |" in found


def test_a_picture_that_nothing_draws_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called(monkeypatch, "--docs", tmp_path)
    (tmp_path / "figures" / "old.svg").write_text("")
    with pytest.raises(SystemExit, match=r"old\.svg: .* remove it"):
        called(monkeypatch, "--check", "--docs", tmp_path)


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_whole_and_know_light_and_dark(name: str) -> None:
    picture = (page.DOCS / "figures" / f"{name}.svg").read_text()
    ElementTree.fromstring(picture)
    assert "prefers-color-scheme: dark" in picture
    assert len(picture) < 40_000


def test_the_readme_has_figures_of_the_page() -> None:
    told = (page.DOCS.parent / "README.md").read_text().splitlines()
    rows = [line for line in told if re.search(r"\| \.\d{3} \|", line)]
    assert rows
    assert set(rows) <= set((page.DOCS / "benchmarks.md").read_text().splitlines())


def test_the_page_for_readers_is_short() -> None:
    assert len((page.DOCS / "benchmarks.md").read_text().splitlines()) < 200


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_result_is_named(
    name: str, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (results / name).unlink()
    optional = r"|(scale|more|benchmarks|choosing)\.md is not what"  # what may not be there
    with pytest.raises(SystemExit, match=re.escape(f"has no '{name}'") + optional):
        called(monkeypatch, "--check", "--results", results)


def test_a_missing_figure_is_named(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(results / "step.json", lambda figures: {"batch": figures["batch"]})
    with pytest.raises(
        SystemExit, match=re.escape("step.json, figures has no 'ms'; it has 'batch'")
    ):
        called(monkeypatch, "--check", "--results", results)


def test_a_missing_task_is_named(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(
        results / "cifar10c-continual.json",
        lambda figures: [task for task in figures if task["preset"] != "driftfilter"],
    )
    with pytest.raises(
        SystemExit, match=r"0 entries with {'preset': 'driftfilter'}.*cifar10c-continual.json"
    ):
        called(monkeypatch, "--check", "--results", results)


@pytest.mark.parametrize("name", NAMES)
def test_results_say_where_they_come_from(name: str) -> None:
    text = (page.RESULTS / name).read_text(encoding="utf-8")
    assert {"command", "machine", "threads", "versions", "date", "figures"} <= set(json.loads(text))
    assert not re.search(r'[" =](/|~|scratch)', text), "a path of some machine"


@pytest.mark.slow
def test_what_scripts_write_can_be_read(results: Path) -> None:
    scripts = {
        "fleet": ["--streams", "10", "--rounds", "1"],
        "step": ["--batch", "2", "--rounds", "1"],
    }
    env = {**os.environ, "PYTHONPATH": str(Path(df.__file__).parents[1])}
    for name, options in scripts.items():
        file = results / f"{name}.json"
        file.unlink()
        command = [sys.executable, str(page.HERE / f"{name}.py"), *options, "--json", str(file)]
        subprocess.run(command, check=True, capture_output=True, env=env)
        assert (
            json.loads(file.read_text())["command"]
            == f"python benchmarks/{name}.py {' '.join(options)}"
        )
    page.render(results)


@pytest.mark.slow
def test_what_the_core_measures_can_be_read(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        core, "SWEEPS", [(structure, axis, sizes[:4]) for structure, axis, sizes in core.SWEEPS]
    )
    change(results / "core.json", lambda figures: core.measured(0.0))
    page.render(results)


def test_exponent_of_the_upper_half() -> None:
    sizes = [1, 2, 4, 8, 16, 32]
    assert exponent(sizes, [50, 40, 45, *(3 * size**1.7 for size in sizes[3:])]) == pytest.approx(
        1.7, abs=1e-12
    )


def test_memory_counts_what_is_alive_at_one_time() -> None:
    memory = core.Memory()
    with memory:
        rows = torch.zeros(1000)
        more = rows + 1  # 8,000 bytes together
        view = more.view(10, 100)
        del more
        rows = view[0].clone()  # 400 more, then 4,000 less: the view keeps its base
        del view
        assert memory.now == 400
        torch.zeros(500)
    assert ((memory.now, memory.peak, memory.largest), rows.numel()) == ((400, 8400, 1000), 100)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5583, ".558"), (0.8815, ".882"), (2.4979, "2.498"), (None, "–"), (1.0, "1.000")],
)
def test_shares_are_short(value: float | None, text: str) -> None:
    assert page.share(value) == text


def test_a_task_of_bench_becomes_its_means(tmp_path: Path) -> None:
    stream = {"batch": 200, "images": 1000, "seed": 3}
    rest = {"window": 0, "precision": "bf16", "device": "GPU", "versions": {"torch": "2"}}
    settings = {
        "preset": "tent",
        "protocol": {"name": "continual"},
        "model": "net=/home/me/w",
        "stream": stream,
        **rest,
    }
    visits = [
        {"round": number // 2, "accuracy": accuracy}
        for number, accuracy in enumerate((0.5, 0.7, 0.2, 0.3))
    ]
    domains = [{"corruption": "fog", "accuracy": 0.35}, {"corruption": "snow", "accuracy": 0.5}]
    result = {
        "domains": domains,
        "mean": {"accuracy": 0.425},
        "pooled": {"ece": 0.1},
        "visits": visits,
        "steps": 20,
    }
    (tmp_path / "task.json").write_text(json.dumps({"settings": settings, "result": result}))
    record = tasks.record([tmp_path / "task.json"], "driftfilter bench", "")
    (found,) = record["figures"]
    assert (found["rounds"], found["accuracy"]) == ([0.6, 0.25], {"fog": 0.35, "snow": 0.5})
    assert (found["model"], found["protocol"], found["mean"]) == (
        "net",
        "continual",
        {"accuracy": 0.425},
    )
    assert (record["machine"], record["versions"]) == ("GPU", {"torch": "2"})

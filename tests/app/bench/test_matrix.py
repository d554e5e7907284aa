"""The matrix of the benchmark: its tasks, its cells against the numbers of the files, its page."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from driftfilter.app import models, report
from driftfilter.app.bench import matrix
from driftfilter.app.bench.matrix import Cell, Matrix
from driftfilter.app.bench.options import BenchOptions, read_options
from driftfilter.app.bench.prepare import prepare
from driftfilter.app.bench.task import Bench, settings
from driftfilter.app.cli import main
from tiny import run_all, task_of


def make_cell(gain: float, batch: int = 200, preset: str = "tent", excess: float = 0.0) -> Cell:
    numbers = (0.6 + gain, 0.6, 0.1 + excess, 0.1, 0.5, 0.6)
    return Cell("net", "reset", batch, 500, preset, 1, *numbers)


# Tasks


def test_the_tasks_are_the_product_with_the_frozen_network() -> None:
    made, tasks = prepare(read_options(matrix=True, presets="bn,tent", protocols="clean,reset"))
    assert len(tasks) == 2 * 2 * 3 * 3
    assert {task.model for task in tasks} == set(models.SHIPPED)
    assert [task.preset.name for task in tasks[:3]] == ["source", "bn", "tent"]
    assert str(tasks[0]) == "source · clean · resnet20 · batch 200 · seed 0"
    streams = [settings(made, task)["stream"] for task in tasks[:9:3]]
    assert [(each["batch"], each["images"]) for each in streams] == [
        (200, 2000),
        (16, 2000),
        (1, 500),
    ]
    plan = tasks[8].plan(made.stream, made.data)
    assert [len(step.index) for step in plan.steps] == [1] * 500


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({"matrix": True}, [(200, 2000), (16, 2000), (1, 500)]),
        ({"matrix": True, "batch": 4}, [(4, 500)]),
        ({"matrix": True, "batches": "8,7", "images": 30}, [(8, 30), (7, 30)]),
        ({"matrix": True, "quick": True, "batches": "7"}, [(7, 500)]),
        ({"batches": "50, 2,50"}, [(50, 2000), (2, 2000)]),
        ({"batch": 2}, [(2, 2000)]),
    ],
    ids=str,
)
def test_batch_sizes(given: dict[str, Any], sizes: list[tuple[int, int]]) -> None:
    made, tasks = prepare(read_options(**{"models": "resnet20", "presets": "source", **given}))
    found = (settings(made, task)["stream"] for task in tasks)
    assert list(dict.fromkeys((each["batch"], each["images"]) for each in found)) == sizes


@pytest.mark.parametrize("wrong", ["", "0", "16,x", "16,,1", "-1"])
def test_wrong_batch_sizes_are_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="batches must be batch sizes, as in 200,16,1"):
        prepare(BenchOptions(batches=wrong))


# Cells


def test_cells_are_the_numbers_of_the_files(shared: Bench, tmp_path: Path) -> None:
    tasks = [
        task_of(preset, protocol, seed)._replace(batch=batch, images=images)
        for protocol in ("clean", "reset")
        for batch, images in ((20, None), (7, 21))
        for preset in ("source", "tent:lr=0.05")
        for seed in (0, 1)
    ]
    documents, _ = run_all(shared, tmp_path, *tasks, command="driftfilter bench --matrix")
    found = matrix.collect(documents, documents)
    assert [cell[:6] for cell in found.cells] == [
        ("tiny", protocol, batch, images, "tent:lr=0.05", 2)
        for protocol in ("clean", "reset")
        for batch, images in ((20, 70), (7, 21))
    ]
    means = [document["result"]["mean"] for document in documents]
    for place, cell in enumerate(found.cells):
        frozen, own = means[4 * place : 4 * place + 2], means[4 * place + 2 : 4 * place + 4]
        expected = [
            sum(seed[name] for seed in seeds) / 2
            for name in ("accuracy", "ece", "nll")
            for seeds in (own, frozen)
        ]
        assert cell[6:] == pytest.approx(expected)
    assert any(cell.gain for cell in found.cells)
    assert "command: driftfilter bench --matrix" in found.notes

    tables = matrix.write(found, tmp_path)
    assert matrix.read(json.loads((tmp_path / "matrix.json").read_text())) == found
    page = (tmp_path / "matrix.md").read_text()
    points = [f"{100 * cell.gain:+.1f}" for cell in found.cells]
    assert tables[1].head[3:] == ["batch 20, 70 images", "batch 7, 21 images"]
    assert [row[3:] for row in tables[1].rows] == [points[:2], points[2:]]
    assert f"| tent:lr=0.05 | tiny | clean | {points[0]} | {points[1]} |" in page
    assert [row[-2] for row in tables[2].rows] == [
        f"{cell.ece - cell.frozen_ece:+.3f}" for cell in found.cells[::2]
    ]


def test_what_was_measured_otherwise_is_left_out(shared: Bench, tmp_path: Path) -> None:
    tasks = [task_of(preset) for preset in ("source", "tent")]
    own, _ = run_all(shared, tmp_path, *tasks)
    more, _ = run_all(shared, tmp_path, task_of("bn"))
    other, _ = run_all(replace(shared, window=30), tmp_path, *tasks)
    alone, _ = run_all(shared, tmp_path, task_of("tent", "mixed"))
    failed = {"settings": own[0]["settings"], "error": "out of order"}
    found = matrix.collect(own, [*own, *more, *other, *alone, failed])
    assert [(cell.preset, cell.protocol) for cell in found.cells] == [
        ("tent", "reset"),
        ("bn", "reset"),
    ]
    assert found.notes[-1] == "failed: source, tiny, reset, batch 20, seed 0: out of order"
    assert matrix.collect(alone, alone) == Matrix([], [])
    assert matrix.write(Matrix([], []), tmp_path / "nowhere") == []


def test_the_worst_come_first() -> None:
    cells = [make_cell(0.1), make_cell(-0.02, 16), make_cell(0.0, 1), make_cell(0, 8, excess=0.1)]
    worst, gains, _ = matrix.draw_up(Matrix([], [*cells, make_cell(-0.004, preset="bn")]))
    assert worst.notes == [
        "the 5 worst cells; 1 of 5 cells is more than 0.5 points below the frozen network"
    ]
    assert [row[3] for row in worst.rows] == ["16", "200", "8", "1", "200"]
    assert worst.rows[0][4:7] == ["0.580", "0.600", "-2.0"]
    assert worst.rows[2][7:] == ["0.200", "0.100", "0.500", "0.600"]
    assert gains.rows == [
        ["tent", "net", "reset", "+10.0", "-2.0", "+0.0", "+0.0"],
        ["bn", "net", "reset", "-0.4", "–", "–", "–"],
    ]
    mixed = [cells[0]._replace(network=network, protocol=each) for each in "pq" for network in "ba"]
    _, rows = matrix.lay_out(mixed)
    assert [name[1:] for name in rows] == [("b", "p"), ("b", "q"), ("a", "p"), ("a", "q")]
    many = [make_cell(place / 100, 1 + place) for place in range(30)]
    assert len(matrix.draw_up(Matrix([], many))[0].rows) == matrix.WORST


# Command and page


def test_the_command_writes_tables_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        *("bench", "--matrix", "--models", "resnet20", "--corruptions", "contrast"),
        *("--images", "20", "--batches", "10,5", "--presets", "bn", "--out", str(tmp_path)),
    ]
    assert main([*command, "--list"]) == 0
    assert capsys.readouterr().out.count("to do") == 3 * 2 * 2
    assert main(command) == 0
    first = capsys.readouterr()
    assert "accuracy above the frozen network, in points" in first.out
    assert first.out.endswith(f"wrote {tmp_path / 'report.html'}\n")
    assert main([*command, "--json"]) == 0
    again = capsys.readouterr()
    assert "resumed: 12 of 12 done" in again.err
    assert json.loads(again.out)["report"] == str(tmp_path / "report.html")
    shown = (tmp_path / "report.html").read_text()
    assert "1 network × 3 protocols × 2 batch sizes" in shown


def test_the_report_has_heat_maps_and_the_worst_streams(shared: Bench, tmp_path: Path) -> None:
    tasks = [
        task_of(preset)._replace(batch=batch)
        for batch in range(30, 40)
        for preset in ("source", "tent:lr=0.05")
    ]
    documents, _ = run_all(shared, tmp_path, *tasks)
    assert len(report.collect([tmp_path])) == 10
    found = matrix.collect(documents, documents)
    matrix.write(found, tmp_path)
    streams = report.collect([tmp_path])
    assert len(streams) == 8
    worst = [cell.accuracy for cell in matrix.rank(found.cells)[:8]]
    assert [stream.entries[0].quality["accuracy"] for stream in streams] == worst
    page = report.write([tmp_path]).read_text()
    assert page.count('class="heat ') == 2 * 10
    assert page.index("The worst cells") < page.index("Accuracy above the frozen network")
    for cell in found.cells:
        assert f">{100 * cell.gain:+.1f}</text>".replace("-", "−") in page

    (tmp_path / "matrix.json").write_text('{"notes": [], "cells": [{"network": "x"}]}')
    with pytest.raises(report.ReportError, match=r"matrix\.json is of another version"):
        report.collect([tmp_path])

"""Tables of the benchmark against the numbers of its files."""

import copy
import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from driftfilter.app.bench import tables
from driftfilter.app.bench.task import Bench
from tiny import accuracies, run_all, task_of


def test_the_table_shows_the_numbers_of_the_files(shared: Bench, tmp_path: Path) -> None:
    command = "driftfilter bench --quick"
    documents, _ = run_all(shared, tmp_path, task_of("source"), task_of("tent"), command=command)
    (table,) = tables.write(documents, tmp_path)
    assert table.head == [
        "preset",
        "from",
        "statistics",
        "gauss",
        "contr",
        "bright",
        "mean",
        "ECE",
        "NLL",
        "Brier",
        "ms",
    ]
    for row, document in zip(table.rows, documents, strict=True):
        result, mean = document["result"], document["result"]["mean"]
        numbers = [
            *accuracies(result).values(),
            mean["accuracy"],
            mean["ece"],
            mean["nll"],
            mean["brier"],
        ]
        assert row[3:-1] == [f"{number:.3f}" for number in numbers]
        assert row[-1] == f"{result['ms_per_step']:.1f}"
    assert table.rows[0][:3] == ["source", "prior", "source"]
    page = (tmp_path / "table.md").read_text()
    assert "| " + " | ".join(table.rows[1]) + " |" in page
    for said in (
        "inside the model",
        "batch 20",
        "70 images",
        "frost procedural",
        "seed 0 (of corruptions, order, draws)",
        "command: driftfilter bench --quick",
    ):
        assert said in page
    lines = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    assert float(lines[1]["NLL"]) == documents[1]["result"]["mean"]["nll"]
    assert float(lines[0]["contrast"]) == accuracies(documents[0]["result"])["contrast"]
    assert [line["preset"] for line in lines] == ["source", "tent"]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("rows", ("up to 70 samples a domain", "accuracy by domain", "(of order, draws)")),
        ("generated of pictures", ("70 images a corruption", "(of corruptions, order, draws)")),
        ("folders", ("70 images a corruption", "accuracy by corruption", "(of order, draws)")),
    ],
)
def test_what_samples_and_seeds_are(
    shared: Bench, tmp_path: Path, kind: str, said: tuple[str, ...]
) -> None:
    documents, _ = run_all(shared, tmp_path, task_of("source"))
    made = copy.deepcopy(documents)
    made[0]["settings"]["data"]["kind"] = kind
    (table,) = tables.write(made, tmp_path)
    notes = "\n".join(table.notes)
    assert all(each in notes for each in said)


def test_a_table_names_the_commands_of_its_own_rows(shared: Bench, tmp_path: Path) -> None:
    reset = [
        run_all(shared, tmp_path, task_of(name), command=f"first {name}")[0][0]
        for name in ("source", "bn")
    ]
    again, log = run_all(shared, tmp_path, task_of("bn"), command="second")
    assert (again, log.begun) == (reset[1:], [])
    (mixed,), _ = run_all(shared, tmp_path, task_of("bn", "mixed"), command="third")
    assert [json.loads(path.read_text())["command"] for path in tmp_path.glob("bn_mixed*")] == [
        "third"
    ]
    made = tables.tables([*reset, mixed])
    said = [[note for note in table.notes if note.startswith("command")] for table in made]
    first, third = ["command: first source", "command: first bn"], ["command: third"]
    assert said == [first, third, first + third]
    conditions = [tables.condition(document["settings"]) for document in (reset[0], mixed)]
    assert [table.conditions for table in made] == [
        {conditions[0]},
        {conditions[1]},
        set(conditions),
    ]


def test_nothing_is_not_written_over_a_table(tmp_path: Path) -> None:
    (tmp_path / "table.md").write_text("old")
    assert tables.write([], tmp_path) == []
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("table.md", "old")]


def test_what_else_was_asked_for_has_its_column(shared: Bench, tmp_path: Path) -> None:
    documents, _ = run_all(
        replace(shared, before=True, probe_every=4), tmp_path, task_of("conjugate"), task_of("eata")
    )
    (table,) = tables.tables(documents)
    for row, document in zip(table.rows, documents, strict=True):
        result = document["result"]
        cells = dict(zip(table.head, row, strict=True))
        assert cells["before"] == f"{result['before']['accuracy']:.3f}"
        assert cells["clean"] == f"{result['probe'][-1]['accuracy']:.3f}"
    assert documents[1]["result"]["warnings"]  # no source data for its anchor
    assert f"warning of eata: {documents[1]['result']['warnings'][0]}" in table.notes


def test_on_a_terminal_tables_have_rules_or_stay_plain(
    shared: Bench,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    documents, _ = run_all(shared, tmp_path, task_of("source"))
    (table,) = tables.tables(documents)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for width, ruled in ((200, True), (40, False)):
        monkeypatch.setenv("COLUMNS", str(width))
        tables.show(table)
        shown = capsys.readouterr().out
        assert ("━" in shown or "─" in shown) == ruled
        assert all(cell in shown for cell in table.rows[0])


def test_rounds_have_their_columns(shared: Bench, tmp_path: Path) -> None:
    tasks = task_of("tent:lr=1.0", "continual:rounds=3"), task_of("tent", "continual:rounds=1")
    documents, _ = run_all(shared, tmp_path, *tasks)
    long, short, _ = tables.tables(documents)
    visits = [visit["accuracy"] for visit in documents[0]["result"]["visits"]]
    cells = dict(zip(long.head, long.rows[0], strict=True))
    assert cells["first round"] == f"{sum(visits[:3]) / 3:.3f}"
    assert cells["last round"] == f"{sum(visits[6:]) / 3:.3f}"
    assert cells["first round"] != cells["last round"]
    assert not any("round" in name for name in short.head)


def test_the_summary_is_across_protocols(shared: Bench, tmp_path: Path) -> None:
    tasks = [
        task_of(preset, protocol)
        for protocol in ("reset", "mixed")
        for preset in ("source", "tent")
    ]
    documents, _ = run_all(shared, tmp_path, *tasks, task_of("bn", "mixed"))
    *_, summary = tables.write(documents, tmp_path)
    assert summary.head[3:] == ["reset", "mixed"]
    assert [row[:3] for row in summary.rows] == [
        [name, "tiny", ""] for name in ("source", "tent", "bn")
    ]
    means = [document["result"]["mean"] for document in documents]
    shown = [f"{mean['accuracy']:.3f} / {mean['ece']:.3f}" for mean in means]
    assert [row[3:] for row in summary.rows] == [
        [shown[0], shown[2]],
        [shown[1], shown[3]],
        ["", shown[4]],
    ]
    assert "| " + " | ".join(summary.rows[1]) + " |" in (tmp_path / "table.md").read_text()
    lines = list(csv.DictReader(io.StringIO((tmp_path / "summary.csv").read_text())))
    assert [(line["preset"], line["protocol"]) for line in lines] == [
        (document["settings"]["preset"], document["settings"]["protocol"]["name"])
        for document in documents
    ]
    assert [float(line["ece"]) for line in lines] == [mean["ece"] for mean in means]


def test_seeds_are_averaged(shared: Bench, tmp_path: Path) -> None:
    shuffled = replace(shared, stream=replace(shared.stream, shuffled=True))
    documents, _ = run_all(
        shuffled, tmp_path, *(task_of("tent:lr=0.5", "continual", seed) for seed in range(3))
    )
    values = torch.tensor(
        [document["result"]["mean"]["nll"] for document in documents], dtype=torch.float64
    )
    (table,) = tables.tables(documents)
    assert table.rows[0][table.head.index("NLL")] == f"{values.mean():.3f} ± {values.std():.3f}"
    assert values.std() > 1e-4
    assert len(table.rows) == 1


def test_gradual_severities_are_one_column(shared: Bench, tmp_path: Path) -> None:
    documents, _ = run_all(shared, tmp_path, task_of("source", "gradual"))
    result = documents[0]["result"]
    (table,) = tables.tables(documents)
    assert len(result["domains"]) == 15
    rows = [row for row in result["domains"] if row["corruption"] == "contrast"]
    right = sum(row["accuracy"] * row["n"] for row in rows)
    assert table.rows[0][4] == f"{right / 70:.3f}"

"""The command line as a user meets it."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from driftfilter import __version__
from driftfilter.app.bench import task
from driftfilter.app.bench.locks import claim
from driftfilter.app.bench.options import QUICK_PRESETS
from driftfilter.app.cli import main
from driftfilter.app.demo import PRESETS, describe_images


def _table(lines: list[str]) -> dict[str, dict[str, str]]:
    """The rows of a printed table of the benchmark by preset, each by column."""
    start = next(number for number, line in enumerate(lines) if line.startswith("preset "))
    head = re.split(" {2,}", lines[start])
    rows = [re.split(" {2,}", line) for line in lines[start + 1 : lines.index("", start)]]
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


def _percent(lines: list[str], name: str) -> list[float]:
    """The numbers behind a name in the demo's tables."""
    line = next(line for line in lines if line.startswith(f"   {name}  "))
    return [float(number) for number in re.findall(r"([\d.]+) %", line)]


@pytest.mark.slow
def test_demo_prints_two_small_tables_and_says_what_was_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["demo", "--seeds", "1", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 32
    assert max(len(line.replace(str(tmp_path), "runs/demo")) for line in lines) <= 100
    linear = json.loads((tmp_path / "linear" / "metrics.json").read_text())["cases"]
    for name, case in (("frozen classifier", "frozen source"), ("driftfilter", "filter")):
        scores = linear[case]["scores"]
        expected = [scores["accuracy"][0], scores["end_accuracy"][0]]
        assert _percent(lines, name) == pytest.approx([100 * each for each in expected], abs=0.051)
    second = lines[next(at for at, line in enumerate(lines) if line.startswith("2 ")) :]
    for preset in QUICK_PRESETS.split(","):
        (written,) = (tmp_path / "images").glob(f"{preset}_reset_*.json")
        mean = json.loads(written.read_text())["result"]["mean"]
        expected = [100 * mean["accuracy"], 100 * mean["ece"]]
        assert _percent(second, PRESETS[preset]) == pytest.approx(expected, abs=0.051)
    assert f"Report  {tmp_path / 'images' / 'report.html'} (open it in a browser)" in lines
    assert (tmp_path / "images" / "report.html").exists()


def test_demo_goes_without_figures_if_matplotlib_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("driftfilter.app.commands.find_spec", lambda name: None)
    monkeypatch.setattr("driftfilter.app.commands.bench", lambda *_: (1, None))
    asked = []

    def reproduce(*_: object, figures: bool) -> None:
        asked.append(figures)
        scores = {"accuracy": [0.5], "end_accuracy": [0.25]}
        measured = {
            "settings": {"shift": 3.0, "steps": 1000},
            "seeds": [0],
            "cases": {case: {"scores": scores} for case in ("frozen source", "filter")},
        }
        (tmp_path / "linear").mkdir()
        (tmp_path / "linear" / "metrics.json").write_text(json.dumps(measured))

    monkeypatch.setattr("driftfilter.app.paper.reproduce.reproduce", reproduce)
    assert main(["demo", "--seeds", "1", "--out", str(tmp_path)]) == 1
    assert asked == [False]
    assert "right 25.0 % of the time" in capsys.readouterr().out


@pytest.mark.parametrize(("ours", "said"), [(0.75, "25.0 points more"), (0.25, "25.0 points less")])
def test_demo_says_what_was_measured_whatever_that_is(ours: float, said: str) -> None:
    def document(preset: str, accuracy: float) -> dict[str, Any]:
        stream = {"corruptions": ["fog"], "images": 500, "batch": 100}
        settings = {"preset": preset, "model": "net", "stream": stream}
        return {"settings": settings, "result": {"mean": {"accuracy": accuracy, "ece": 0.1}}}

    documents = [document("source", 0.5), document("driftfilter", ours)]
    assert f" of the time, {said} than the frozen network." in "\n".join(describe_images(documents))


SMALL = [
    "bench",
    "--quick",
    "--images",
    "40",
    "--batch",
    "20",
    "--corruptions",
    "contrast",
    "--presets",
    "source,bn",
]


@pytest.mark.slow
def test_bench_runs_lists_and_resumes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = [*SMALL, "--out", str(tmp_path)]
    assert main([*command, "--list"]) == 0
    assert capsys.readouterr().out.split("\n") == [
        "to do  source · reset · resnet20 · seed 0",
        "to do  bn · reset · resnet20 · seed 0",
        "",
    ]
    assert not list(tmp_path.iterdir())
    assert main(command) == 0
    first = capsys.readouterr()
    assert list(_table(first.out.splitlines())) == ["source", "bn"]
    assert f"command: driftfilter {' '.join(command)}" in first.out
    assert [line[:6] for line in first.err.splitlines()] == ["1 of 2", "2 of 2"]
    assert main(command) == 0
    second = capsys.readouterr()
    assert second.err == "resumed: 2 of 2 done\n"
    assert second.out == first.out
    assert main([*command, "--list"]) == 0
    assert capsys.readouterr().out.count("done") == 2


@pytest.mark.slow
def test_bench_interrupted_keeps_what_is_done(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def once(*arguments: Any) -> dict[str, Any]:
        if list(tmp_path.glob("*.json")):
            raise KeyboardInterrupt
        return task.run_task(*arguments)

    monkeypatch.setattr("driftfilter.app.bench.bench.run_task", once)
    assert main([*SMALL, "--out", str(tmp_path)]) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.undo()
    assert main([*SMALL, "--out", str(tmp_path)]) == 0
    assert "resumed: 1 of 2 done" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_share_a_folder(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second runs, from beginning to end, while the first is at its first task: it does all the
    others.
    """
    command = [
        *SMALL,
        "--presets",
        "source,bn,tent",
        "--protocols",
        "continual",
        "--rounds",
        "2",
        "--out",
        str(tmp_path),
    ]
    seconds: list[subprocess.CompletedProcess[str]] = []

    def meanwhile(*arguments: Any) -> dict[str, Any]:
        code = [sys.executable, "-m", "driftfilter.app.cli", *command]
        seconds.append(subprocess.run(code, check=False, capture_output=True, text=True))
        return task.run_task(*arguments)

    monkeypatch.setattr("driftfilter.app.bench.bench.run_task", meanwhile)
    assert main(command) == 0
    (second,), first = seconds, capfd.readouterr()
    assert second.returncode == 1
    *ended, left = second.stderr.splitlines()
    assert [line[:6] for line in ended] == ["2 of 3", "3 of 3"]
    assert left.startswith(
        "not done: source · continual:rounds=2 · resnet20 · seed 0, claimed by process "
    )
    assert f" {os.getpid()} on host {socket.gethostname()};" in left
    assert list(_table(second.stdout.splitlines())) == ["bn", "tent"]
    assert [line[:6] for line in first.err.splitlines()] == ["1 of 3"]
    assert list(_table(first.out.splitlines())) == ["source", "bn", "tent"]
    assert len(list(tmp_path.glob("*.json"))) == 3
    assert not list(tmp_path.glob("*.claim"))
    assert (tmp_path / "stream-continual-rounds=2_resnet20.png").exists()


def test_a_claim_of_another_process_is_named_and_no_table_is_lost(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = [*SMALL, "--presets", "bn", "--out", str(tmp_path)]
    assert main(command) == 0
    (done,) = tmp_path.glob("*.json")
    done.rename(done.with_suffix(".kept"))
    before = (tmp_path / "table.md").read_text()
    capsys.readouterr()
    with claim(done):
        assert main(command) == 1
    shown = capsys.readouterr()
    assert (
        f"claimed by process {os.getpid()} on host {socket.gethostname()}; it is free" in shown.err
    )
    assert shown.out == ""
    assert (tmp_path / "table.md").read_text() == before


@pytest.mark.slow
def test_only_tables_of_the_run_are_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first, second = (
        [*SMALL, "--presets", "bn", "--batch", size, "--out", str(tmp_path)]
        for size in ("20", "10")
    )
    assert main(first) == main(second) == 0
    shown, page = capsys.readouterr().out.split("wrote")[1], (tmp_path / "table.md").read_text()
    for command, here in ((first, False), (second, True)):
        assert (f"command: driftfilter {' '.join(command)}" in shown) == here
        assert f"command: driftfilter {' '.join(command)}" in page


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"driftfilter {__version__}\n"


def test_no_command_prints_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "demo" in capsys.readouterr().out


SILENT = "\n".join(
    [
        "import sys",
        "from driftfilter.app import cli",
        "for command in ('--help', 'bench --help', 'run --help', 'report --help', 'run --bacth'):",
        "    try: cli.main(command.split())",
        "    except SystemExit: pass",
        "assert not {'torch', 'rich'} & set(sys.modules)",
    ]
)
LIGHT = (
    "import sys, driftfilter.app.bench.prepare\n"
    "assert not {'matplotlib', 'rich', 'torchmetrics', 'sklearn'} & set(sys.modules)"
)


@pytest.mark.slow
@pytest.mark.parametrize("code", [SILENT, LIGHT], ids=["help and mistakes", "bench"])
def test_nothing_is_imported_before_it_is_needed(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)

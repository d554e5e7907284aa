"""The command line as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from driftfilter import VARIANTS, __version__
from driftfilter.app.cli import main
from driftfilter.presets import PRESETS


def test_demo_prints_its_tables_and_says_where_they_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["demo", "--seeds", "1", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    adapted, frozen = (next(line.split() for line in lines if line.startswith(name)) for name in ("filter", "frozen source"))
    assert float(adapted[1]) > float(frozen[2])
    scores = {
        line.split()[0]: float(line.split()[1])
        for line in lines
        if line.split()[:1] and len(line.split()) == 5 and line[0] in "sbto"
    }
    assert scores["source"] < scores["bn"] < scores["tent"] < scores["opgd_diag"]
    assert lines[-1] == f"wrote {tmp_path / 'linear'} and {tmp_path / 'images'}"
    assert json.loads((tmp_path / "images" / "metrics.json").read_text())["presets"]["source"]["accuracy"] == scores["source"]
    assert (tmp_path / "linear" / "metrics.json").exists()


def test_list_names_every_variant_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    for name in [name for variants in VARIANTS.values() for name in variants] + list(PRESETS):
        assert any(line.split()[0] == name and len(line.split()) > 2 for line in printed.splitlines() if line.strip())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"driftfilter {__version__}\n"


def test_no_command_prints_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "demo" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--seeds", "0"], "must be an integer >= 1, got '0'"),
        (["demo", "--seeds", "many"], "must be an integer >= 1, got 'many'"),
        (["dmo"], "invalid choice: 'dmo'"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_help_does_not_import_torch() -> None:
    code = "\n".join(
        [
            "import sys",
            "from driftfilter.app import cli",
            "try: cli.main(['--help'])",
            "except SystemExit: pass",
            "assert 'torch' not in sys.modules",
        ]
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_library_does_not_import_what_only_the_app_needs() -> None:
    code = "import sys, driftfilter\nassert not {'matplotlib', 'rich', 'tyro', 'sklearn'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)

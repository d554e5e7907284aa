"""``driftfilter check``: what holds, what does not, and what cannot be judged."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from driftfilter.app.cli import main
from driftfilter.app.run.summary import summarize_estimates
from own_model import run, steps, summary


def check(*arguments: str) -> int:
    return main(["check", "o", *arguments])


@pytest.fixture
def done(folder: Path) -> Path:
    """A run with labels that has ended."""
    assert run("--out", "o", "--labels", "y.npy", "--quiet") == 0
    return folder / "o"


def change(path: Path, **changes: Any) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, **changes}))


ALL = "--min-accuracy-estimate 0 --min-accuracy 0 --max-ece 1 --max-alarms 1000 --max-skipped 0"


@pytest.mark.usefixtures("done")
def test_all_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(*ALL.split()) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 5
    assert all(line.startswith("ok      ") for line in out)
    assert out[0].startswith("ok      accuracy estimate 0.")
    assert "asked for at least 0 (" in out[0]


@pytest.mark.usefixtures("done")
@pytest.mark.parametrize(
    ("option", "limit", "holds"),
    [
        ("--min-accuracy-estimate", "0.99", False),
        ("--min-accuracy", "0.99", False),
        ("--max-ece", "0.0001", False),
        ("--max-skipped", "0", True),
        ("--max-alarms", "100", True),
    ],
)
def test_each_is_judged(
    option: str, limit: str, holds: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(option, limit) == (0 if holds else 1)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("ok" if holds else "FAILED")


def test_limits_hold_if_they_are_met_exactly(done: Path) -> None:
    quality = json.loads((done / "summary.json").read_text())["quality"]["after"]
    assert check("--min-accuracy", repr(quality["accuracy"])) == 0
    assert check("--max-ece", repr(quality["ece"])) == 0


@pytest.mark.usefixtures("folder")
def test_what_cannot_be_judged_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--out", "o", "--quiet") == 0
    assert check("--min-accuracy", "0", "--max-ece", "1", "--max-skipped", "0") == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "FAILED  accuracy cannot be judged: no labels were given"
    assert out[1] == "FAILED  ece cannot be judged: no labels were given"
    assert out[2].startswith("ok")


def test_run_from_before_has_no_estimate(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(done / "summary.json", estimate=None)
    assert check("--min-accuracy-estimate", "0") == 1
    assert "no estimate was recorded" in capsys.readouterr().out


def test_alarms_are_counted(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.loads(line) for line in (done / "steps.jsonl").read_text().splitlines()]
    lines[1]["alarms"], lines[3]["alarms"] = ["one", "two"], ["three"]
    (done / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = sum(len(line.get("alarms", ())) for line in lines)
    assert check("--max-alarms", str(before)) == 0
    assert check("--max-alarms", str(before - 1)) == 1
    assert f"alarms {before}, asked for at most {before - 1}" in capsys.readouterr().out


@pytest.mark.usefixtures("done")
def test_document_has_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--min-accuracy", "0.99", "--max-skipped", "0", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert [each["name"] for each in found["checks"]] == ["min_accuracy", "max_skipped"]
    assert [each["holds"] for each in found["checks"]] == [False, True]
    assert found["checks"][0]["value"] == summary("o")["quality"]["after"]["accuracy"]


@pytest.mark.usefixtures("done")
def test_junit_is_valid_xml() -> None:
    assert check("--min-accuracy", "0.99", "--max-skipped", "0", "--junit", "j.xml") == 1
    suite = ElementTree.fromstring(Path("j.xml").read_bytes()).find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    first, second = suite.findall("testcase")
    assert (first.get("name"), second.get("name")) == ("min_accuracy", "max_skipped")
    failure = first.find("failure")
    assert failure is not None
    assert (failure.get("message") or "").startswith("accuracy 0.")
    assert second.find("failure") is None


def test_junit_takes_any_name_of_a_folder(folder: Path) -> None:
    name = 'a <b> & "c" \x01'
    assert run("--out", name, "--quiet") == 0
    assert main(["check", name, "--max-skipped", "0", "--junit", "j.xml", "--quiet"]) == 0
    suite = ElementTree.fromstring(Path("j.xml").read_bytes()).find("testsuite")
    assert suite is not None
    assert suite.get("name") == 'driftfilter check a <b> & "c" '


@pytest.mark.parametrize("name", ["summary.json", "config.json", "steps.jsonl", "movement.json"])
def test_half_written_files_are_no_run(
    name: str, done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (done / name).read_text()
    (done / name).write_text(whole[: len(whole) // 2])
    assert check("--max-skipped", "0") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("driftfilter check: error: ")
    assert name in err


@pytest.mark.parametrize("document", ["[]", "{}", "null", '{"format": 1}', '{"format": 2}'])
def test_summary_of_something_else_is_no_run(
    document: str, done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (done / "summary.json").write_text(document)
    assert check("--max-skipped", "0") == 1
    assert capsys.readouterr().err.startswith("driftfilter check: error: ")


def test_run_that_has_not_ended_is_told(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (done / "summary.json").unlink()
    assert check("--max-skipped", "0") == 1
    assert "has not ended" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_folder_that_is_none_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--max-skipped", "0") == 1
    assert "o/config.json could not be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--max-alarms", "-1"),
        ("--max-alarms", "0.5"),
        ("--min-accuracy", "80"),
        ("--min-accuracy", "nan"),
        ("--max-ece", "much"),
        ("--junit", "."),
    ],
)
@pytest.mark.usefixtures("done")
def test_wrong_usage(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = check(*arguments)
    except SystemExit as ended:
        status = int(str(ended.code))
    assert status == 2
    assert "error: " in capsys.readouterr().err


def test_estimates_of_a_run_are_means_of_windows_that_do_not_overlap(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    lines = [
        {"step": 0, "n": 600, "estimate": 0.1, "estimate_low": 0.0, "estimate_high": 0.2},
        {"step": 1, "n": 400, "estimate": 0.9, "estimate_low": 0.8, "estimate_high": 1.0},
        {"step": 2, "n": 400, "skipped": "bad"},
        {"step": 3, "n": 1000, "estimate": 0.7, "estimate_low": 0.6, "estimate_high": 0.8},
        {"step": 4, "n": 500, "estimate": 0.4, "estimate_low": 0.2, "estimate_high": 0.6},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = summarize_estimates(path)
    assert found is not None
    assert found["samples"] == 2500
    assert found["accuracy"] == pytest.approx((0.9 * 1000 + 0.7 * 1000 + 0.4 * 500) / 2500)
    assert found["low"] == pytest.approx((0.8 * 1000 + 0.6 * 1000 + 0.2 * 500) / 2500)
    assert (found["least"], found["at"]) == (0.4, 4)
    path.write_text('{"step": 0, "n": 3, "skipped": "bad"}\n')
    assert summarize_estimates(path) is None


@pytest.mark.usefixtures("done")
def test_summary_has_the_estimate_of_the_steps() -> None:
    assert summary("o")["estimate"]["accuracy"] == steps("o")[-1]["estimate"]


def test_a_run_that_failed_is_not_good(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.load("x.npy")
    x[-1] = np.nan
    np.save("x.npy", x)
    assert run("--out", "o", "--on-bad-batch", "stop", "--quiet") == 1
    capsys.readouterr()
    assert check("--min-accuracy-estimate", "0") == 1
    assert "o holds a run that failed: step 4" in capsys.readouterr().err

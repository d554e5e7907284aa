"""Every command: its happy path, its likeliest mistakes, and that --json and --quiet print what
they say and no more.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import driftfilter as df
from driftfilter.app.cli import main
from driftfilter.app.commands import COMMANDS
from driftfilter.app.terminal import finite
from own_model import LABELS, MODEL, N


@pytest.fixture
def folder(folder: Path) -> Path:
    """The current folder, with images and files that are not what they are taken for in it, too."""
    np.savez("images.npz", fog=np.full((4, 32, 32, 3), 7, np.uint8), labels=np.arange(4))
    Path("text.txt").write_text("mine")
    np.save("short.npy", LABELS[:9])
    Path("map.toml").write_text(df.to_toml(df.MAP()))
    return folder


def called(capsys: pytest.CaptureFixture[str], *command: str) -> tuple[int, str, str]:
    capsys.readouterr()
    try:
        status = main(command)
    except SystemExit as ended:
        status = int(ended.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


# Happy paths

RUN = ["run", MODEL, "x.npy", "--labels", "y.npy", "--preset", "tent", "--batch", "10"]
BENCH = [
    "bench",
    "--quick",
    "--images",
    "20",
    "--batch",
    "20",
    "--corruptions",
    "contrast",
    "--presets",
    "source",
]
HAPPY: dict[str, tuple[list[str], str]] = {  # command, and the end of what it says
    "demo": (["demo", "--seeds", "1"], "more presets, more corruptions\n"),
    "reproduce": (["reproduce", "dynamics", "--no-figures"], " s\n"),
    "bench": (BENCH, "wrote runs/bench\n"),
    "bench --list": ([*BENCH, "--list"], "to do  source · reset · resnet20 · seed 0\n"),
    "run": (RUN, "; wrote runs/run/predictions.npz\n"),
    "tune": (["tune", MODEL, "x.npy", "--batch", "10"], "\n"),
    "report": (["report", "done"], "wrote done/report.html\n"),
    "check": (["check", "done", "--max-skipped", "0"], "skipped 0, asked for at most 0\n"),
    "data": (["data", "images.npz"], "images.npz: all is as it should be\n"),
    "data (no folder)": (["data"], "driftfilter data FOLDER\n"),
    "inspect": (["inspect", MODEL], "to have it timed\n"),
    "list": (["list"], "\n"),
}
KEYS: dict[str, set[str]] = {
    "demo": {"out", "linear", "images", "report"},
    "reproduce": {"out", "seconds", "examples"},
    "bench": {"out", "not_done", "results"},
    "bench --list": {"out", "tasks"},
    "run": {
        "samples",
        "steps",
        "skipped",
        "accuracy",
        "estimate",
        "resumed_after",
        "signal",
        "error",
        "predictions",
        "out",
    },
    "tune": {"settings", "chosen", "samples", "batches"},
    "report": {"report"},
    "check": {"run", "ok", "checks"},
    "data": {"path", "name", "ok", "files"},
    "data (no folder)": {"data_sets", "layouts"},
    "inspect": {
        "model",
        "transform",
        "parameters",
        "norms",
        "batch_norm",
        "subsets",
        "milliseconds",
        "batch",
        "default",
        "profile",
    },
}


def test_every_command_is_here() -> None:
    """The service ends by a signal alone: app/serve has its happy path."""
    assert set(COMMANDS) == {"serve", *(name.split()[0] for name in HAPPY)}
    assert set(COMMANDS) == {name.split()[0] for name in MISTAKES}


@pytest.fixture
def _short(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's image stream on one preset; test_cli has the whole of it."""
    monkeypatch.setattr("driftfilter.app.commands.DEMO_BENCH", tuple(BENCH))


@pytest.mark.slow
@pytest.mark.usefixtures("folder", "_short")
@pytest.mark.parametrize("case", HAPPY)
def test_json_is_one_document_and_quiet_is_silent(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, last = HAPPY[case]
    if case in ("report", "check"):
        assert called(capsys, *RUN, "--quiet", "--out", "done")[0] == 0
    again = ["--resume"] if case == "run" else []
    status, out, _ = called(capsys, *command)
    assert status == 0
    assert out.endswith(last)
    status, out, _ = called(capsys, *command, *again, "--json")
    assert status == 0
    document = json.loads(out, parse_constant=_no_constants)
    assert set(document) == KEYS[case] if case in KEYS else isinstance(document, list)
    assert called(capsys, *command, *again, "--quiet") == (0, "", "")


def _no_constants(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_the_documents_say_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = called(capsys, *RUN, "--json", "--out", "o")
    document = json.loads(out)
    last = json.loads(Path("o/steps.jsonl").read_text().splitlines()[-1])
    assert (document["samples"], document["steps"], document["accuracy"]) == (
        N,
        5,
        last["accuracy"],
    )
    _, out, _ = called(capsys, *BENCH, "--json")
    (result,) = json.loads(out)["results"]
    (written,) = Path("runs/bench").glob("source_*.json")
    assert result == finite(json.loads(written.read_text()))
    status, out, err = called(capsys, "data", "nowhere", "--json")
    assert (status, json.loads(out)["ok"], err) == (1, False, "")
    status, out, err = called(capsys, "data", "nowhere", "--quiet")
    assert (status, out) == (1, "")
    assert err.startswith(
        "driftfilter data: error: path must be a file or folder of data, or a data set"
    )
    assert "got 'nowhere'" in err
    status, out, _ = called(capsys, "data", "imagenetc")
    assert (status, "(did you mean 'imagenet-c'?)" in out) == (1, True)


def test_what_a_model_prints_is_no_part_of_the_document(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "loud.py").write_text(
        "import run_network\nmake = lambda: print('loading') or run_network.make()\n"
    )
    status, out, err = called(capsys, "run", "loud:make", *RUN[2:], "--json", "--out", "o")
    assert (status, json.loads(out)["samples"]) == (0, N)
    assert "loading\n" in err


def test_what_json_does_not_know_is_null() -> None:
    found = finite({"a": float("nan"), "b": [1.0, float("inf"), (2, "x", None, True)]})
    assert found == {"a": None, "b": [1.0, None, [2, "x", None, True]]}


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_a_failed_task_is_told_though_quiet(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr("driftfilter.app.bench.bench.run_task", fails)
    assert called(capsys, *BENCH, "--quiet") == (1, "", "failed: source: RuntimeError: no memory\n")
    status, out, _ = called(capsys, *BENCH)
    assert (status, "failed: source, seed 0: RuntimeError: no memory" in out) == (1, True)
    assert not list(Path("runs/bench").glob("*.json"))
    status, out, _ = called(capsys, *BENCH, "--json")
    assert (status, json.loads(out)["results"][0]["error"]) == (1, "RuntimeError: no memory")


@pytest.mark.usefixtures("folder")
def test_a_run_that_ends_badly_says_so_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = called(capsys, "run", "resnet20", "x.npy", "--json", "--out", "o")
    assert status == 1
    assert json.loads(out)["error"] == "step 0 (samples 0 to 45): expected 4D input (got 3D input)"
    assert "it was the first batch: does the model take samples like these?" in err


# Mistakes

MISTAKES: dict[str, tuple[list[str], int, str]] = {
    "check of nothing": (
        ["check", "o"],
        2,
        "nothing to check: give one of --min-accuracy-estimate",
    ),
    "check of a share": (["check", "o", "--max-ece", "5"], 2, "must be a number from 0 to 1"),
    "check of no run": (["check", "none", "--max-alarms", "0"], 1, "none/config.json"),
    "tune data": (["tune", MODEL, "none.npy"], 2, "there is no such file, got 'none.npy'"),
    "tune one batch": (["tune", MODEL, "x.npy"], 2, "DATA must be two batches or more"),
    "serve store": (["serve", MODEL], 2, "--store must be a folder for the tenants, got ''"),
    "serve port": (["serve", MODEL, "--store", "s", "--port", "99999"], 2, "from 0 to 65535"),
    "serve preset": (
        ["serve", MODEL, "--store", "s", "--preset", "tnt"],
        2,
        "did you mean 'tent'?",
    ),
    "demo option": (
        ["demo", "--seed-count", "3"],
        2,
        "unrecognized arguments: --seed-count 3 (did you mean '--seeds'?)",
    ),
    "demo seeds": (
        ["demo", "--seeds", "0"],
        2,
        "argument --seeds: must be an integer >= 1, got '0'",
    ),
    "demo seeds text": (["demo", "--seeds", "many"], 2, "must be an integer >= 1, got 'many'"),
    "demo out": (
        ["demo", "--out", "text.txt"],
        2,
        "must be a folder, or where one can be made, got the file 'text.txt'",
    ),
    "reproduce out": (
        ["reproduce", "linear", "--out", "text.txt/below"],
        2,
        "must be a folder, or where one can be made, got the file 'text.txt'",
    ),
    "reproduce nothing": (["reproduce"], 2, "the following arguments are required: EXAMPLE"),
    "reproduce example": (["reproduce", "linaer"], 2, "cifar, all) (did you mean 'linear'?)"),
    "reproduce option": (
        ["reproduce", "linear", "--no-figure s"],
        2,
        "(did you mean '--no-figures'?)",
    ),
    "bench preset": (["bench", "--presets", "tnt"], 2, "did you mean 'tent'?"),
    "bench option": (
        ["bench", "--quik"],
        2,
        "unrecognized arguments: --quik (did you mean '--quick'?)",
    ),
    "bench corruption": (["bench", "--corruptions", "contrst"], 2, "did you mean 'contrast'?"),
    "bench out": ([*BENCH, "--out", "text.txt"], 2, "got the file 'text.txt'"),
    "bench protocol": ([*BENCH, "--protocols", "mixt"], 2, "did you mean 'mixed'?"),
    "bench model": ([*BENCH, "--models", "resnet2"], 2, "did you mean 'resnet20'?"),
    "bench data": ([*BENCH, "--data", "nowhere"], 2, "nowhere"),
    "bench batch": (["bench", "--batch", "0"], 2, "must be an integer >= 1, got '0'"),
    "bench precision": (["bench", "--precision", "fp8"], 2, "invalid choice: 'fp8'"),
    "bench order": (["bench", "--order", "random"], 2, "invalid choice: 'random'"),
    "bench both": (
        ["bench", "--json", "--quiet"],
        2,
        "argument --quiet: not allowed with argument --json",
    ),
    "run option": (
        [*RUN, "--batch-size", "3"],
        2,
        "unrecognized arguments: --batch-size 3 (did you mean '--batch'?)",
    ),
    "run data": (["run", MODEL], 2, "the following arguments are required: DATA"),
    "run no data": (["run", MODEL, "z.npy"], 2, "there is no such file, got 'z.npy'"),
    "run file": (
        ["run", "run_network.py", "x.npy"],
        2,
        "(did you mean 'run_network:FACTORY'?), got 'run_network.py'",
    ),
    "run dot": (
        ["run", "run_network.make", "x.npy"],
        2,
        "(did you mean 'run_network:make'?), got 'run_network.make'",
    ),
    "run set": ([*RUN, "--set", "inference.rule.ls=1"], 2, "--set inference.rule.ls=1: "),
    "run set option": ([*RUN, "--set", "lr=1"], 2, "(an option of a preset: --preset NAME:lr=1)"),
    "run set nothing": ([*RUN, "--set", "rho"], 2, "--set must be PATH=VALUE"),
    "run live": ([*RUN, "--live", "--quiet"], 2, "--live and --quiet contradict each other"),
    "run labels": (
        ["run", MODEL, "x.npy", "--labels", "text.txt"],
        2,
        "npz file of numbers, got a file of another kind\n",
    ),
    "run stdin": (
        [*RUN, "--stdin-continues"],
        2,
        "--stdin-continues must be left out unless DATA is -, got 'x.npy'",
    ),
    "run integers": (
        [*RUN, "--integers", "ids"],
        2,
        "--integers must be left out unless DATA is -, got 'x.npy'",
    ),
    "run range": (
        [*RUN, "--range", "-1,-2"],
        2,
        "--range must be LOW,HIGH: two numbers, the lower one first, got '-1,-2'",
    ),
    "run with no file": (
        ["run", MODEL, "nowhere.npy"],
        2,
        "there is no such file, got 'nowhere.npy'",
    ),
    "run with no data": (["run", MODEL, "run_network.py"], 2, "DATA must be an .npy or .npz file"),
    "run with no module": (
        ["run", "run_netwrk:make", "x.npy"],
        2,
        "there is no module 'run_netwrk' installed or in ",
    ),
    "run with no factory": (
        ["run", "run_network:mak", "x.npy"],
        2,
        "(did you mean 'make'?), got 'run_network:mak'",
    ),
    "run with no network": (
        ["run", "resnet2", "x.npy"],
        2,
        "(did you mean 'resnet20'?), got 'resnet2'",
    ),
    "run with labels": (
        ["run", MODEL, "x.npy", "--labels", "short.npy"],
        2,
        "short.npy must be 46 integer labels",
    ),
    "run with preset": (["run", MODEL, "x.npy", "--preset", "tnt"], 2, "did you mean 'tent'?"),
    "run with presets": (
        ["run", MODEL, "x.npy", "--preset", "tent,eata"],
        2,
        "--preset must be one preset",
    ),
    "run with both": (
        ["run", MODEL, "x.npy", "--preset", "tent", "--recipe", "x"],
        2,
        "--preset must be left out",
    ),
    "run with recipe": (
        ["run", MODEL, "x.npy", "--recipe", "run_network.py"],
        2,
        "--recipe run_network.py: ",
    ),
    "run with no recipe": (
        ["run", MODEL, "x.npy", "--recipe", "r.toml"],
        2,
        "--recipe must be a TOML file that is there",
    ),
    "run with part": (
        ["run", MODEL, "x.npy", "--recipe", "map.toml"],
        2,
        "must be of kind = \"Recipe\", got 'MAP'",
    ),
    "run with range": (["run", MODEL, "x.npy", "--range", "1"], 2, "--range must be LOW,HIGH"),
    "run with device": (
        ["run", MODEL, "x.npy", "--device", "tpu"],
        2,
        "device must be there: auto, cpu or cuda, got 'tpu'",
    ),
    "report nothing": (["report"], 2, "the following arguments are required: RUN"),
    "report nowhere": (
        ["report", "nowhere"],
        1,
        "RUN must be a folder of driftfilter run or bench, got 'nowhere'",
    ),
    "report empty": (["report", "."], 1, "holds no run"),
    "report out": (
        ["report", ".", "--out", "."],
        2,
        "argument --out: must be a file, got the folder '.'",
    ),
    "data option": (["data", "--check", "."], 2, "unrecognized arguments: --check"),
    "data two": (["data", "x.npy", "y.npy"], 2, "unrecognized arguments: y.npy"),
    "data nowhere": (["data", "nowhere"], 1, "WRONG  nowhere "),
    "data text": (["data", "text.txt"], 1, "WRONG  text.txt "),
    "inspect model": (["inspect", "resnet2"], 2, "(did you mean 'resnet20'?), got 'resnet2'"),
    "inspect factory": (
        ["inspect", "run_network:mak"],
        2,
        "(did you mean 'make'?), got 'run_network:mak'",
    ),
    "inspect input": (
        ["inspect", MODEL, "--input", "5x5"],
        2,
        "argument --input: must be sizes such as 3,32,32, got '5x5'",
    ),
    "inspect shape": (
        ["inspect", MODEL, "--input", "7"],
        2,
        "--input [7] must be the shape of a sample, but the model failed: ",
    ),
    "inspect weights": (
        ["inspect", MODEL, "--weights", "none.safetensors"],
        2,
        "weights must be a .safetensors, .pt or .pth file",
    ),
    "list option": (["list", "--jsn"], 2, "unrecognized arguments: --jsn (did you mean '--json'?)"),
    "list name": (["list", "tent"], 2, "driftfilter list: error: unrecognized arguments: tent\n"),
    "list value": (["list", "--json=3"], 2, "argument --json: ignored explicit argument '3'"),
}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, expected, message = MISTAKES[case]
    before = sorted(Path().rglob("*.[!p]*"))
    status, out, err = called(capsys, *command)
    assert status == expected
    checked = case.startswith("data") and status == 1
    assert message in (out if checked else err)
    assert checked or not out
    assert "Traceback" not in err
    assert err.startswith(f"driftfilter {command[0]}: error: ") or not err
    assert len(err.splitlines()) <= 2
    assert sorted(Path().rglob("*.[!p]*")) == before  # nothing was written


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("dmo", "inspect, list) (did you mean 'demo'?)"),
        ("zzzz", "invalid choice: 'zzzz'"),
        ("--verson", "unrecognized arguments: --verson (did you mean '--version'?)"),
    ],
)
def test_a_command_that_is_none(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = called(capsys, command)
    assert (status, out) == (2, "")
    assert message in err
    assert err.endswith("driftfilter --help says what it can be told\n")


def test_ctrl_c_is_no_traceback(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("driftfilter.app.paper.reproduce.reproduce", interrupted)
    assert called(capsys, "reproduce", "dynamics", "--no-figures") == (
        130,
        "",
        "driftfilter: interrupted\n",
    )

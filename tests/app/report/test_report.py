"""The report of runs and benchmarks: its numbers, its escaping, its errors; and how a browser shows
it.
"""

import html
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import driftfilter as df
from driftfilter.app.bench.task import Bench
from driftfilter.app.cli import main
from driftfilter.app.report import LIMIT, ReportError, collect, write
from driftfilter.app.report.page import percent, render
from driftfilter.app.report.svg import Axis, spanning
from driftfilter.app.report.tasks import _example, _sentence
from own_model import N, run, samples, summary
from tiny import run_all, task_of

EVIL = '<script>alert("x")</script>'
ENV = {**os.environ, "PYTHONPATH": str(Path(df.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def folder(folder: Path) -> Path:
    """The current folder, with names that want to be code in it, too."""
    (folder / "names.txt").write_text(f"left\nright & wrong\n{EVIL}\n")
    return folder


FULL = ("--baseline", "--labels", "y.npy", "--classes", "names.txt")
ODD = "<script>alert(1)<"  # a folder's name


class Page(HTMLParser):
    """The tags of a page, its tables as rows of cells, and its visible text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "img", "br"):
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text += data
        if self._open[-1:] in (["td"], ["th"], ["b"]) and "tr" in self._open:
            self.rows[-1][-1] += data

    def row(self, name: str) -> list[str]:
        """The first row of this name, without it."""
        return next(row[1:] for row in self.rows if row and row[0] == name)


def page(*folders: str) -> Page:
    assert main(["report", *folders, "--out", "page.html"]) == 0
    found = Page(Path("page.html"))
    assert not found._open
    return found


# What it says


def test_numbers_of_a_run_are_those_of_its_files(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--out", "o", *FULL) == 0
    assert main(["report", "o"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "wrote o/report.html"
    shown, found = Page(Path("o/report.html")), summary("o")
    for name, side in (("frozen source", "before"), ("tent:lr=0.01", "after")):
        quality = found["quality"][side]
        expected = [
            f"{100 * quality['accuracy']:.1f}\u00a0%",
            *(f"{quality[key]:.3f}" for key in ("ece", "nll", "brier")),
        ]
        assert shown.row(name)[:4] == expected
    right = [json.loads(line)["right"] for line in Path("o/steps.jsonl").read_text().splitlines()]
    assert shown.row("step 0")[1] == percent(right[0] / 10)
    assert shown.row("step 4")[1] == percent(right[4] / 6)
    left = found["classes"][0]
    assert shown.row("left") == [
        percent(left["predicted"] / N),
        percent(left["baseline_predicted"] / N),
        str(left["labeled"]),
        percent(left["right"] / left["labeled"]),
        percent(left["baseline_right"] / left["labeled"]),
    ]
    moved = json.loads(Path("o/movement.json").read_text())
    assert (
        f"1 {percent(moved[0]['relative'])}" in shown.text
    )  # described for those who do not see the bars
    with np.load("o/examples.npz") as examples:
        first = shown.row(f"row {examples['row'][0]}")
        assert first[1] == percent(float(examples["probability"][0]))
        assert first[3] == f"{samples()[examples['row'][0], 0]:.3f}"
    assert (
        f"adapted {'run_network:make'} to {N} unlabeled samples of x.npy, 10 at a time"
        in shown.text
    )
    assert "No alarms." in shown.text


def test_runs_side_by_side(folder: Path) -> None:
    for out, preset in (("a", "tent:lr=0.01"), ("b", "bn"), ("c", "bn")):
        assert run("--out", out, *FULL, preset=preset) == 0
    np.save("other.npy", samples()[::-1])
    assert run("--out", "d", data="other.npy") == 0
    shown = page("a", "b", "c", "d", "a")
    assert len(collect([Path(each) for each in "abcd"])) == 2
    assert shown.row("bn · b") == shown.row("bn · c") != shown.row("tent:lr=0.01")
    assert "tent:lr=0.01, bn and bn adapted" in shown.text
    assert "bn · b: no parameter moved." in shown.text
    assert len([tag for tag, _ in shown.tags if tag == "section"]) == 2


def test_what_is_not_recorded_is_said(folder: Path) -> None:
    assert run("--out", "o") == 0
    shown = page("o")
    for said in (
        "No labels were given",
        "Frozen source: not recorded (driftfilter run --baseline)",
        "frozen source: not recorded",
    ):
        assert said in shown.text
    assert shown.row("tent:lr=0.01")[:4] == ["–"] * 4
    assert shown.row("tent:lr=0.01")[4] != "–"


@pytest.mark.slow
def test_lines_of_json_have_no_examples(folder: Path) -> None:
    lines = "".join(json.dumps(row.tolist()) + "\n" for row in samples())
    options = [
        "run",
        "run_network:make",
        "-",
        "--preset",
        "bn",
        "--batch",
        "10",
        "--baseline",
        "--quiet",
    ]
    code = f"import sys; from driftfilter.app.cli import main; sys.exit(main({options!r}))"
    subprocess.run([sys.executable, "-c", code], input=lines.encode(), check=True, env=ENV)
    shown = page("runs/run")
    assert "bn: the data cannot be read again." in shown.text
    assert "Predictions changed" in shown.text


def test_alarms_are_marks_and_a_list(folder: Path) -> None:
    assert run("--out", "o", *FULL) == 0
    lines = [json.loads(line) for line in Path("o/steps.jsonl").read_text().splitlines()]
    lines[2]["alarms"] = [f"entropy {EVIL}", "accuracy"]
    Path("o/steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = page("o")
    assert f"tent:lr=0.01, step 2: entropy {EVIL}" in shown.text
    assert "2 alarms" in shown.text
    assert "No alarms." not in shown.text
    flags = [kind for _, attrs in shown.tags if "flag" in (kind := attrs.get("class") or "")]
    # In the legend and in both charts, where one step is one mark, in the colour of its entry.
    assert flags == ["flag fill c0"] * 3
    assert "alarm of tent:lr=0.01" in shown.text


def test_whose_an_alarm_is_can_be_seen(folder: Path) -> None:
    for out, preset, step in (("a", "tent:lr=0.01", 1), ("b", "bn", 1)):
        assert run("--out", out, *FULL, preset=preset) == 0
        lines = [json.loads(line) for line in Path(out, "steps.jsonl").read_text().splitlines()]
        lines[step]["alarms"] = ["accuracy"]
        Path(out, "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = page("a", "b")
    flags = [kind for _, attrs in shown.tags if "flag" in (kind := attrs.get("class") or "")]
    assert sorted(flags) == ["flag fill c0"] * 3 + ["flag fill c1"] * 3
    assert "alarm of tent:lr=0.01" in shown.text
    assert "alarm of bn" in shown.text


def test_the_title_is_the_users(folder: Path) -> None:
    assert run("--out", "o", *FULL) == 0
    assert main(["report", "o", "--title", EVIL, "--out", "page.html"]) == 0
    shown = Page(Path("page.html"))
    assert EVIL in shown.text
    assert f"{EVIL} · driftfilter report" in shown.text


def test_shares_of_classes_over_time_are_those_of_the_predictions(folder: Path) -> None:
    assert run("--out", "o", *FULL) == 0
    with np.load("o/predictions.npz") as found:
        predicted = found["label"]
    shares = summary("o")["shares"]
    names = [each["name"] for each in summary("o")["classes"] if each["predicted"]]
    assert list(shares) == names
    pieces = np.array_split(predicted, 60)
    for place, along in zip(np.unique(predicted), shares.values(), strict=True):
        expected = [(piece == place).mean() for piece in pieces if len(piece)]
        assert along == pytest.approx(expected, abs=1e-4)
    shown = page("o")
    assert f"{names[0]} from {percent(shares[names[0]][0])} to" in shown.text
    changed = summary("o")
    del changed["shares"]  # of a run from before
    Path("o/summary.json").write_text(json.dumps(changed))
    assert "over time" in page("o").text


def test_bars_say_how_uncertain_they_are(folder: Path) -> None:
    assert run("--out", "o", *FULL) == 0
    found = summary("o")["quality"]["after"]["accuracy"]
    error = 1.96 * math.sqrt(found * (1 - found) / N)
    assert f"tent:lr=0.01 {percent(found)} ± {100 * error:.1f}" in page("o").text


def test_an_interrupted_run_says_so(folder: Path) -> None:
    data = samples()
    data[25] = np.nan
    np.save("x.npy", data)
    assert run("--out", "o", *FULL) == 1
    assert "ended by a bad batch: step 2 (samples 20 to 29)" in page("o").text
    assert run("--out", "o", *FULL, "--resume", "--on-bad-batch", "skip") == 3
    shown = page("o")
    assert "1 of 5 steps were skipped" in shown.text
    assert shown.row("tent:lr=0.01")[0] == percent(summary("o")["quality"]["after"]["accuracy"])


def test_a_benchmark(shared: Bench, tmp_path: Path) -> None:
    tasks = [task_of(preset, seed=seed) for preset in ("source", "tent:lr=0.05") for seed in (0, 1)]
    documents, _ = run_all(shared, tmp_path, *tasks)
    path = write([tmp_path])
    assert path == tmp_path / "report.html"
    shown = Page(path)
    results = [document["result"] for document in documents if document is not None]
    for name, (one, other) in {"frozen source": results[:2], "tent:lr=0.05": results[2:]}.items():
        values = [each["mean"]["accuracy"] for each in (one, other)]
        assert (
            shown.row(name)[0]
            == f"{percent(np.mean(values).item())} ± {100 * np.std(values, ddof=1):.1f}"
        )
        rows = [
            row
            for each in (one, other)
            for row in each["domains"]
            if row["corruption"] == "gaussian_noise"
        ]
        share = sum(row["accuracy"] * row["n"] for row in rows) / sum(row["n"] for row in rows)
        assert shown.row("gaussian noise")[0 if name == "frozen source" else 1] == percent(share)
    (stream,) = collect([tmp_path])
    assert stream.source is not None
    assert stream.source.bins is not None
    pooled = [result["bins"] for result in results[:2]]
    assert sum(stream.source.bins.samples) == sum(sum(each["samples"]) for each in pooled)
    images = [attrs["src"] or "" for tag, attrs in shown.tags if tag == "img"]
    assert [each.startswith("data:image/png;base64,") for each in images] == [True] * 12
    pieces = stream.entries[0].along
    right = sum(row["accuracy"] * row["n"] for result in results[2:] for row in result["domains"])
    assert sum(piece["right"] for piece in pieces) == round(right)


def test_results_from_before_there_were_reports(shared: Bench, tmp_path: Path) -> None:
    run_all(shared, tmp_path, task_of("tent"))
    (path,) = tmp_path.glob("*.json")
    document = json.loads(path.read_text())
    for name in ("bins", "along", "movement", "examples"):
        del document["result"][name]
    path.write_text(json.dumps(document))
    shown = Page(write([tmp_path]))
    assert "Not recorded." in shown.text
    assert "tent: not recorded." in shown.text
    assert shown.row("tent")[0] == percent(document["result"]["mean"]["accuracy"])


# What it must not do


def test_every_string_of_the_user_is_escaped(folder: Path) -> None:
    odd = folder / ODD / "script>"
    odd.mkdir(parents=True)
    np.save(odd / "x.npy", samples())
    assert run("--out", str(odd / "o"), *FULL, data=str(odd / "x.npy")) == 0
    shown = page(str(odd / "o"))
    assert "<script" not in shown.source.lower()
    assert "script" not in [tag for tag, _ in shown.tags]
    assert EVIL in shown.text  # the class, as it is written
    assert html.escape(str(odd / "x.npy")) in shown.source
    assert "right & wrong" in shown.text


@pytest.mark.slow
def test_it_is_one_small_file_that_loads_nothing(folder: Path) -> None:
    pixels = np.random.default_rng(0).integers(
        0, 256, (24, 96, 96, 3), dtype=np.uint8
    )  # noise: nothing to compress
    np.save("p.npy", pixels)
    for place in range(8):
        assert run("--out", f"o{place}", model="resnet20", data="p.npy", batch=24, preset="bn") == 0
    shown = page(*(f"o{place}" for place in range(8)))
    assert len(shown.source.encode()) < LIMIT
    assert not re.findall(r"http|url\(|@import", shown.source)
    links = [
        attrs[key] or ""
        for _, attrs in shown.tags
        for key in ("src", "href", "srcset", "data", "action")
        if key in attrs
    ]
    assert all(link.startswith(("data:image/png;base64,", "data:,")) for link in links)
    assert not {"script", "iframe", "object", "embed", "form"} & {tag for tag, _ in shown.tags}


@pytest.mark.slow
def test_a_large_benchmark_keeps_the_pictures_of_the_best(shared: Bench, tmp_path: Path) -> None:
    run_all(shared, tmp_path, task_of("source"), task_of("tent"))
    (first,) = tmp_path.glob("tent_*.json")
    document = json.loads(first.read_text())
    for number in range(60):
        changed = {**document["settings"], "preset": f"tent:lr={number}"}
        mean = {**document["result"]["mean"], "accuracy": number / 60}
        pictures = [
            {**each, "png": each["png"][:1] * 5000} for each in document["result"]["examples"]
        ]
        result = {**document["result"], "mean": mean, "examples": pictures}
        (tmp_path / f"copy{number}.json").write_text(
            json.dumps({"settings": changed, "result": result})
        )
    shown = Page(write([tmp_path]))
    assert len(shown.source.encode()) < LIMIT
    assert "tent:lr=30: left out, so that the page stays small." in shown.text
    assert "tent:lr=59: left out" not in shown.text
    for number in range(200):
        text = (tmp_path / "copy1.json").read_text().replace("tent:lr=1", f"bn:x={number}")
        (tmp_path / f"more{number}.json").write_text(text)
    with pytest.raises(ReportError, match="MB, more than 3: report fewer at once"):
        write([tmp_path])


def test_charts_are_whole_and_described(folder: Path) -> None:
    assert run("--out", "o", *FULL) == 0
    charts = re.findall(r"<svg.*?</svg>", page("o").source, re.S)
    pictures = [ElementTree.fromstring(each) for each in charts]
    described = [each for each in pictures if each.get("role") == "img"]
    assert len(described) >= 6
    for each in described:
        assert all(map(each.findtext, ("title", "desc")))
        numbers = [
            float(x)
            for part in each.iter()
            for x in (part.get(key) for key in ("x", "y", "x1", "y1", "width"))
            if x
        ]
        assert all(-1e-6 <= number <= 640 for number in numbers)
    assert all(each.get("aria-hidden") == "true" for each in pictures if each not in described)
    assert "nan" not in "".join(charts)


@pytest.mark.slow
def test_the_report_needs_no_torch(folder: Path) -> None:
    assert run("--out", "o", *FULL) == 0
    code = (
        "import sys; from driftfilter.app.cli import main; main(['report', 'o']); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, env=ENV).returncode == 0


# Errors


def _holding(name: str, text: str) -> Callable[[Path], object]:
    return lambda out: (out / name).write_text(text)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "unfinished": (lambda out: (out / "summary.json").unlink(), "o holds a run that has not ended"),
    "damaged config": (_holding("config.json", "{"), "o/config.json is damaged: it must hold JSON"),
    "damaged steps": (
        _holding("steps.jsonl", '{"step": 0'),
        "o/steps.jsonl is damaged: every line must hold JSON",
    ),
    "no steps": (lambda out: (out / "steps.jsonl").unlink(), "o/steps.jsonl could not be read"),
    "empty": (_holding("steps.jsonl", ""), "o holds an empty run: no sample was predicted"),
    "damaged examples": (_holding("examples.npz", "PK"), "o/examples.npz is damaged"),
    "newer": (
        _holding("summary.json", '{"format": 99}'),
        "o/summary.json is of format 99, of driftfilter",
    ),
    "another version's": (
        _holding("summary.json", '{"format": 1, "tally": {"rows": 3}}'),
        "o is of another version of driftfilter, or damaged: KeyError",
    ),
    "a list": (
        _holding("config.json", "[]"),
        "o is of another version of driftfilter, or damaged: TypeError",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_run_that_cannot_be_reported(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--out", "o") == 0
    spoil, reason = WRONG[case]
    spoil(Path("o"))
    assert main(["report", "o"]) == 1
    assert f"driftfilter report: error: {reason}" in capsys.readouterr().err
    assert not Path("o/report.html").exists()


TYPES: dict[str, Callable[[dict[str, Any]], object]] = {
    "config.json: versions": lambda found: found.update(versions=[]),
    "config.json: model": lambda found: found.update(model="x"),
    "config.json: options": lambda found: found.update(options=None),
    "config.json: recipe": lambda found: found.update(recipe=3),
    "config.json: data": lambda found: found["options"].update(data=7),
    "summary.json: tally": lambda found: found["tally"].update(rows="46"),
    "summary.json: classes": lambda found: found.update(classes={"a": 1}),
    "summary.json: changed": lambda found: found.update(changed="x"),
    "summary.json: quality": lambda found: found["quality"].update(after=[1]),
    "summary.json: bins": lambda found: found["quality"]["after"]["bins"].update(samples="x"),
    "summary.json: accuracy": lambda found: found["quality"]["after"].update(accuracy="high"),
    "summary.json: memory": lambda found: found.update(peak_memory_mb="x"),
    "steps.jsonl: ms": lambda found: found.update(ms="1"),
    "steps.jsonl: entropy": lambda found: found.update(entropy=[1]),
    "steps.jsonl: alarms": lambda found: found.update(alarms=5),
    "movement.json: relative": lambda found: found.update(relative="x"),
}


@pytest.mark.parametrize("case", TYPES)
def test_fields_of_another_type_are_no_traceback(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A report is made all the same, or an error says whose files it cannot be made of."""
    assert run("--out", "o", *FULL) == 0
    path = Path("o") / case.partition(":")[0]
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    found = json.loads(lines[0])
    TYPES[case](found[0] if isinstance(found, list) else found)
    path.write_text("\n".join([json.dumps(found), *lines[1:]]))
    capsys.readouterr()
    status = main(["report", "o"])
    told = capsys.readouterr().err
    assert (status, told) == (0, "") or (status == 1 and "driftfilter report: error: o" in told)
    assert Path("o/report.html").exists() == (status == 0)


def test_marks_of_utf8_are_passed_over(folder: Path) -> None:
    (folder / "names.txt").write_text("\ufeffleft\nmiddle\nright\n", encoding="utf-8")
    assert run("--out", "o", *FULL) == 0
    assert summary("o")["classes"][0]["name"] == "left"
    for name in ("config.json", "summary.json", "steps.jsonl", "movement.json"):
        path = Path("o") / name
        path.write_text("\ufeff" + path.read_text(encoding="utf-8"), encoding="utf-8")
    assert page("o").row("left")


def test_folders_without_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "empty").mkdir()
    old = '{"settings": {"preset": "tent"}, "result": {}}'
    for name, text in (("damaged", "{"), ("old", old)):
        (folder / name).mkdir()
        (folder / name / "task.json").write_text(text)
    for name, reason in (
        (
            "missing",
            "RUN must be a folder of driftfilter run or bench, got 'missing', which is none",
        ),
        ("empty", "empty holds no run"),
        ("damaged", "damaged/task.json is damaged: it must hold JSON"),
        (
            "old",
            "old/task.json is of another version of driftfilter, or damaged: KeyError 'stream'",
        ),
    ):
        assert main(["report", name]) == 1
        assert reason in capsys.readouterr().err
    assert main(["report", *map(str, range(9))]) == 1
    assert "a report is of 8 folders at most, got 9" in capsys.readouterr().err


# Axes


@pytest.mark.parametrize(
    "values", [(0.1, 0.93), (0.0, 0.0), (12.0, 3400.0), (0.5, 0.5001), (1e-7, 3e-7)], ids=str
)
def test_axes_span_their_values_with_round_numbers(values: tuple[float, float]) -> None:
    low, high = spanning(values)
    assert low <= min(values) + 1e-12
    assert high >= max(values) - 1e-12
    assert high > low
    ticks = Axis("", low, high, str).ticks()
    assert 2 <= len(ticks) <= 11
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)


def test_nothing_to_report_is_still_a_page() -> None:
    assert render([]).startswith("<!doctype html>")


# In a browser

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
    "--disable-extensions",
)


def browse(folder: Path, page: Path, *arguments: str) -> tuple[str, list[str]]:
    """What the browser prints of a page; what the page said on the console, and asked of the
    network.
    """
    assert BROWSER is not None
    log = folder / "net.json"
    own = (
        f"--user-data-dir={folder / 'profile'}",
        "--enable-logging=stderr",
        f"--log-net-log={log}",
    )
    command = [BROWSER, *QUIET, *own, *arguments, page.as_uri()]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    asked = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    # Others are the browser's own, of no page.
    urls = [
        each["url"] for each in asked if str(each.get("network_isolation_key")).startswith("file:")
    ]
    return done.stdout, [*(line for line in done.stderr.splitlines() if "CONSOLE" in line), *urls]


def test_expected_accuracy_and_coverage_are_drawn(folder: Path) -> None:
    assert run("--out", "a", *FULL) == 0
    found = page("a")
    assert "Expected accuracy over time" in found.source
    assert 'class="fill band c0"' in found.source
    assert "tent:lr=0.01, expected from" in found.source
    assert "Accuracy by coverage" in found.text
    assert len(summary("a")["quality"]["after"]["covered"]) == 20


def test_expected_accuracy_needs_no_labels_and_coverage_does(folder: Path) -> None:
    assert run("--out", "a") == 0
    found = page("a")
    assert "Expected accuracy over time" in found.source
    assert "Accuracy by coverage" not in found.text


def test_runs_from_before_there_was_an_estimate_are_drawn(folder: Path) -> None:
    assert run("--out", "a", *FULL) == 0
    lines = [json.loads(line) for line in Path("a/steps.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if "estimate" not in k} for line in lines]
    Path("a/steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    document = summary("a")
    for side in document["quality"].values():
        del side["covered"]
    Path("a/summary.json").write_text(json.dumps(document))
    found = page("a")
    assert "Expected accuracy" not in found.text
    assert "Accuracy by coverage" not in found.text


@pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")
def test_a_browser_shows_it(folder: Path) -> None:
    """At the widths of a desk and of a phone, without an error on the console and without a
    request.
    """
    image = pytest.importorskip("PIL.Image")
    for out, preset in (("a", "tent:lr=0.01"), ("b", "bn")):
        assert run("--out", out, *FULL, preset=preset) == 0
    found = page("a", "b")
    (folder / "seen.html").write_text(
        "<script>console.error(1)</script><img src='http://127.0.0.1:9/x.png'>"
    )
    assert (
        len(browse(folder, folder / "seen.html", "--dump-dom")[1]) == 2
    )  # neither would go unseen
    dom, noticed = browse(folder, folder / "page.html", "--dump-dom")
    assert noticed == []
    browse(folder, folder / "page.html", f"--print-to-pdf={folder / 'page.pdf'}")
    assert 1 <= len(re.findall(rb"/Type */Page\b", (folder / "page.pdf").read_bytes())) <= 4
    (folder / "dom.html").write_text(dom)
    for side, name in (("before", "frozen source"), ("after", "tent:lr=0.01")):
        assert Page(folder / "dom.html").row(name) == found.row(name)
        assert found.row(name)[0] == percent(summary("a")["quality"][side]["accuracy"])
    for width in (1280, 390):
        # No window is narrower than 500: a phone is a frame in it, which says how wide its content
        # is.
        script = "onload = () => document.title = frames[0].document.documentElement.scrollWidth"
        frame = (
            '<iframe src="page.html" '
            f'style="border:0;width:{width}px;height:900px"></iframe><script>{script}</script>'
        )
        (folder / "frame.html").write_text(f'<body style="margin:0">{frame}')
        local, shot = "--allow-file-access-from-files", folder / f"{width}.png"
        dom, noticed = browse(folder, folder / "frame.html", "--dump-dom", local)
        assert noticed == []
        assert f"<title>{width}</title>" in dom  # nothing sticks out
        browse(
            folder,
            folder / "frame.html",
            f"--window-size={width},900",
            f"--screenshot={shot}",
            local,
        )
        with image.open(shot) as picture:
            assert picture.size == (width, 900)
            assert (
                len(picture.convert("RGB").resize((200, 200)).getcolors(1 << 16)) > 50
            )  # no empty page


def test_what_is_out_of_the_ordinary_is_said_in_words(folder: Path) -> None:
    """One class for nearly all samples, alarms, and a belief that changes nothing."""
    assert run("--out", "o", *FULL) == 0
    assert "It predicted" not in page("o").text
    found = summary("o")
    for number, each in enumerate(found["classes"]):
        each["predicted"] = (977, 23)[number] if number < 2 else 0
        each["labeled"] = 500 if number < 2 else 0
    found["changed"] = 0
    found["quality"]["after"]["accuracy"] = 0.125
    found["quality"]["before"]["accuracy"] = 0.5
    Path("o/summary.json").write_text(json.dumps(found))
    lines = [json.loads(line) for line in Path("o/steps.jsonl").read_text().splitlines()]
    lines[1]["alarms"] = [str(df.Event(1, "classes_lost", 0.5, 0.03, "reset"))]
    Path("o/steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = page("o").text
    assert "It predicted left for 97.7% of the samples, 50.0% have one label." in text
    assert "No prediction differs from the frozen model's" in text
    assert "It is less accurate than the frozen model: 12.5% against 50.0%." in text
    assert f"1 alarm in 1 of {len(lines)} steps" in text
    assert (
        "the first, at step 1: the predictions have lost classes (classes_lost 0.5 beyond 0.03: "
        "went back to the source)." in text
    )


@pytest.mark.parametrize(
    ("kind", "path", "outputs", "shown"),
    [
        ("generated", "generated", "all", "cat"),  # the images that ship
        ("CIFAR-10-C", "c", "all", "cat"),
        ("generated", "cifar-100-python", "all", "3"),
        ("generated", "digits.npz", "all", "3"),
        ("CIFAR-10-C", "c", "4 of 10: [0, 2, 4, 6]", "3"),
    ],
)
def test_names_of_classes_are_those_of_the_data(
    kind: str, path: str, outputs: str, shown: str
) -> None:
    made = {"data": {"kind": kind, "path": path}, "outputs": outputs}
    sample = {"most": True, "label": 3, "truth": 3, "probability": 0.5, "where": "fog", "png": ""}
    found = _example(made, sample)
    assert (found.label, found.truth) == (shown, shown)


def test_a_sentence_about_data_of_any_kind() -> None:
    """Rows of a table are no images under corruptions."""
    stream = {"severity": 5, "batch": 4}
    made = {"model": "net", "stream": stream, "protocol": {"name": "reset"}, "device": "cpu"}
    result = {"domains": [{"corruption": "fog"}, {"corruption": "snow"}], "pooled": {"n": 40}}
    said = {
        "rows": "40 unlabeled samples of 2 domains, 4 at a time",
        "folders": "40 unlabeled images under 2 corruptions of severity 5, 4 at a time",
    }
    for kind, text in said.items():
        assert text in _sentence({**made, "data": {"kind": kind}}, result, 1)

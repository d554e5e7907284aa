"""`driftfilter reproduce cifar`: the paper's figures beside the benchmark's, on what ships and on
data of one's own.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import driftfilter as df
from driftfilter.app import cli, models, streams
from driftfilter.app.bench.prepare import open_source
from driftfilter.app.paper import cifar
from driftfilter.app.paper.options import ReproduceOptions

SMALL = ["reproduce", "cifar", "--images", "30", "--batch", "10", "--corruptions", "contrast"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few source images, for a quick Fisher."""
    path = tmp_path_factory.mktemp("source") / "source.npz"
    shipped = cifar._take_shipped().images[:20].permute(0, 2, 3, 1).numpy()
    np.savez(path, images=shipped)
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Path:
    out = tmp_path_factory.mktemp("cifar")
    assert cli.main([*SMALL, "--source", str(source), "--out", str(out)]) == 0
    return out / "cifar"


def _metrics(folder: Path) -> dict[str, Any]:
    measured: dict[str, Any] = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    return measured


def test_figures_are_those_of_the_adapters_beside_the_papers(written: Path, source: Path) -> None:
    """The last of the three batches is predicted after steps that the Fisher has a part in."""
    clean = streams.sample_images()
    data = streams.Generated(clean, 3000)
    images = data.take(streams.Shift("contrast"), torch.arange(30), torch.device("cpu"))
    given = open_source(source).images.float() / 255
    network, cases = models.load("resnet20"), _metrics(written)["cases"]
    assert {name: case["paper"] for name, case in cases.items()} == cifar.PAPER
    for name, case in cases.items():
        known = df.SourceData(given) if name == "eata" else None
        adapter = df.adapt(network, name, data=known, seed=3000, monitor=None)
        logits = torch.cat([adapter(batch.float() / 255) for batch in images.split(10)])
        right = (logits.argmax(-1) == clean.labels[:30]).double().mean().item()
        assert case["corruptions"]["contrast"] == case["accuracy"] == [pytest.approx(right)]
        nll = functional.cross_entropy(logits.double(), clean.labels[:30]).item()
        assert case["nll"] == [pytest.approx(nll, rel=1e-6)]
    assert [name for name, case in cases.items() if case["source_data"]] == ["eata"]
    assert cases["eata"]["source_data"]["images"] == 20


def test_the_table_has_the_papers_column_and_the_margins(written: Path) -> None:
    table = (written / "table.txt").read_text(encoding="utf-8").splitlines()
    cases = _metrics(written)["cases"]
    (start,) = (number for number, line in enumerate(table) if line.startswith("preset "))
    at = table[start].split().index("paper")
    assert table[start].split()[at + 1] == "mean"
    for line, (name, paper) in zip(table[start + 1 :], cifar.PAPER.items(), strict=False):
        cells = line.split()
        shown = f"{cases[name]['accuracy'][0]:.3f}"
        assert (cells[0], cells[at], cells[at + 1]) == (name, f"{paper:.2f}", shown)
    gain = cases["opgd"]["accuracy"][0] - cases["tent"]["accuracy"][0]
    assert f"margin  opgd over tent    paper +0.02   here {gain:+.3f}" in table
    assert (written / "cifar.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_done_is_not_run_again(
    written: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _metrics(written)
    monkeypatch.setattr("driftfilter.app.bench.bench.run_task", None)
    command = [*SMALL, "--source", str(source), "--out", str(written.parent), "--no-figures"]
    assert cli.main(command) == 0
    assert _metrics(written) == before


def test_a_method_that_fails_is_said(
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr("driftfilter.app.bench.bench.run_task", refuse)
    assert cli.main([*SMALL, "--source", str(source), "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "failed: cifar: opgd, seed 3000: RuntimeError: no memory" in printed.err
    assert "margin  opgd over tent    paper +0.02   here failed" in printed.out


def test_without_options_it_is_short_and_fisher_and_stream_are_disjoint() -> None:
    bench, tasks = cifar.prepare(ReproduceOptions("cifar"))
    assert [str(task) for task in tasks] == [
        f"{name} · reset · resnet20 · seed 3000" for name in cifar.PAPER
    ]
    assert (len(bench.stream.corruptions), bench.stream.images) == (4, 1000)
    assert bench.source is not None
    assert bench.source.labels is None
    shipped = (255 * streams.sample_images().images).round().byte()
    assert torch.equal(bench.source.images, shipped[1000:])


def test_all_of_the_data_one_has(tmp_path: Path) -> None:
    shipped = streams.sample_images()
    images = (255 * shipped.images[:30]).round().byte().permute(0, 2, 3, 1).numpy()
    np.savez(tmp_path / "data.npz", fog=images, contrast=images, labels=shipped.labels[:30])
    options = ReproduceOptions("cifar", seeds=2, data=str(tmp_path / "data.npz"))
    bench, tasks = cifar.prepare(options)
    assert bench.stream.corruptions == ("fog", "contrast")
    assert bench.stream.images is None
    assert [(task.preset.name, task.seed) for task in tasks] == list(
        itertools.product(cifar.PAPER, (3000, 3001))
    )


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["cifar", "--data", "nowhere"], "path must be a file or folder of data, got 'nowhere'"),
        (["cifar", "--model", "resnet20,resnet20_gn"], "--model must be one network"),
        (["all", "--model", "resnet2"], "did you mean 'resnet20'?"),
        (["moons", "--batch", "10"], "--batch must be given for cifar or all, got example 'moons'"),
    ],
)
def test_mistakes_are_refused_before_anything_runs(
    command: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["reproduce", *command, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

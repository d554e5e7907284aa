"""Figures of long streams, from documents whose curves are known."""

from pathlib import Path
from typing import Any

import pytest

from driftfilter.app.bench import plots


def _document(
    preset: str, accuracies: list[list[float]], seed: int = 0, batch: int = 20
) -> dict[str, Any]:
    """A stream of visits of 4 steps, the accuracies by round."""
    settings = {
        "preset": preset,
        "recipe": preset,
        "source_data": None,
        "model": "tiny",
        "protocol": {"name": "continual:rounds=3", "rounds": len(accuracies)},
        "stream": {
            "seed": seed,
            "batch": batch,
            "severity": 5,
            "corruptions": ["fog"] * len(accuracies[0]),
        },
    }
    visits = [
        {"round": number, "steps": 4, "accuracy": each}
        for number, part in enumerate(accuracies)
        for each in part
    ]
    return {"settings": settings, "result": {"visits": visits}}


def test_a_curve_is_the_mean_over_seeds_and_visits() -> None:
    first, second = [[0.2, 0.4], [0.6, 0.8]], [[0.4, 0.6], [0.6, 0.8]]
    documents = [
        _document("tent", first),
        _document("tent", second, seed=1),
        _document("bn", first),
    ]
    ((name, (title, curves)),) = plots.streams(documents).items()
    assert name == "continual-rounds=3_tiny"
    assert (
        title
        == "tiny, continual, 2 rounds of 2 corruptions at severity 5, batch 20, mean of 2 seeds"
    )
    assert [preset for preset, _ in curves] == ["tent", "bn"]
    curve = curves[0][1]
    assert curve.visits == pytest.approx([0.3, 0.5, 0.6, 0.8])
    assert curve.rounds == pytest.approx([0.4, 0.7])
    assert (curve.steps, curve.round_steps, curve.length) == ([2, 6, 10, 14], [4, 12], 16)


def test_streams_of_one_round_and_failures_have_no_figure(tmp_path: Path) -> None:
    failed = {**_document("tent", [[0.5], [0.6]]), "error": "none"}
    del failed["result"]
    assert plots.write([_document("tent", [[0.5]]), failed], tmp_path) == []
    assert not list(tmp_path.iterdir())


def test_other_conditions_are_other_figures(tmp_path: Path) -> None:
    documents = [_document("tent", [[0.5], [0.6]], batch=batch) for batch in (10, 20)]
    assert plots.write(documents, tmp_path) == []
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 2
    assert all(name.startswith("stream-continual-rounds=3_tiny_") for name in names)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_without_matplotlib_a_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("driftfilter.app.bench.plots.find_spec", lambda name: None)
    (line,) = plots.write([_document("tent", [[0.5], [0.6]])], tmp_path)
    assert "continual-rounds=3_tiny" in line
    assert "pip install 'driftfilter[report]'" in line
    assert not list(tmp_path.iterdir())


def test_many_presets_are_all_drawn(tmp_path: Path) -> None:
    """More than there are colours."""
    documents = [_document(f"preset{number}", [[0.5], [0.01 * number]]) for number in range(40)]
    assert plots.write(documents, tmp_path) == []
    assert (tmp_path / "stream-continual-rounds=3_tiny.png").exists()

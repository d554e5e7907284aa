"""Which of several processes this is, and what follows from it for the benchmark."""

from pathlib import Path

import pytest
import torch

from driftfilter.app.bench.locks import claim
from driftfilter.app.bench.ranks import Worker, worker
from driftfilter.app.cli import main
from driftfilter.app.machine import choose_machine

ARRAY = {"SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MIN": "10", "SLURM_ARRAY_TASK_STEP": "5"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Worker(0, 1, 0)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, Worker(3, 4, 1)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}, Worker(5, 8, 1)),
        ({**ARRAY, "SLURM_ARRAY_TASK_ID": "15"}, Worker(1, 3, 0)),
        (
            {**ARRAY, "SLURM_ARRAY_TASK_ID": "20", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
            Worker(5, 6, 0),
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"},
            Worker(0, 2, 0),
        ),
        ({"RANK": "", "WORLD_SIZE": "many"}, Worker(0, 1, 0)),
    ],
    ids=["alone", "torchrun", "srun", "array", "array of srun", "torchrun in a job", "unreadable"],
)
def test_the_place_of_a_process(environment: dict[str, str], expected: Worker) -> None:
    assert worker(environment) == expected


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_workers_begin_apart_and_within_the_list(count: int) -> None:
    firsts = [Worker(number, count).first(7) for number in range(count)]
    assert firsts[0] == 0
    assert len(set(firsts)) == count
    assert max(firsts) < 7


def test_each_worker_of_a_host_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    assert choose_machine("auto").device == torch.device("cuda:1")
    assert choose_machine("cuda:0").device == torch.device("cuda:0")
    assert choose_machine("cpu").device == torch.device("cpu")


@pytest.mark.slow
def test_a_worker_begins_at_its_place_and_leaves_the_rest_to_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = [
        "bench",
        "--quick",
        "--images",
        "20",
        "--batch",
        "20",
        "--corruptions",
        "contrast",
        "--out",
        str(tmp_path),
    ]
    command = [*small, "--presets", "source,bn,tent"]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(command) == 0
    assert [line[:6] for line in capsys.readouterr().err.splitlines()] == [
        "2 of 3",
        "3 of 3",
        "1 of 3",
    ]
    (done,) = tmp_path.glob("tent_*.json")
    done.rename(done.with_suffix(".kept"))
    with claim(done):
        assert main(command) == 0
        assert "not done: tent" in capsys.readouterr().err
        monkeypatch.delenv("WORLD_SIZE")
        assert main(command) == 1

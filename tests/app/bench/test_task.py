"""A task of the benchmark: what it measures against the adapter itself."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app.bench import tables
from driftfilter.app.bench.task import Bench, SourceImages, run_task, settings
from driftfilter.app.corruptions import corrupt
from driftfilter.app.machine import Machine
from driftfilter.app.networks.load_model import NamedNetwork
from driftfilter.app.streams import CLEAN, Generated, Shift
from tiny import CPU, NAMES, Log, Tiny, accuracies, result_of, task_of, uniform


def test_a_task_measures_what_the_adapter_predicts(shared: Bench, data: Generated) -> None:
    """By hand: an adapter for each corruption from the source, batches of 20 with a last one of
    10.
    """
    result = result_of(shared)
    logps = []
    for row, name in zip(result["domains"], NAMES, strict=True):
        adapter = df.adapt(Tiny().eval(), "tent", lr=0.05)
        batches = [
            data.take(Shift(name, 5), index, CPU).float() / 255
            for index in torch.arange(70).split(20)
        ]
        logp = torch.cat([adapter(batch) for batch in batches]).double()
        logps.append(logp)
        right = logp.argmax(-1) == data.labels
        likelihood = logp[torch.arange(70), data.labels]
        errors = (logp.exp() - nn.functional.one_hot(data.labels, 4)).square().sum(-1)
        assert (row["corruption"], row["severity"], row["n"]) == (name, 5, 70)
        assert row["accuracy"] == pytest.approx(right.double().mean().item(), abs=1e-6)
        assert row["nll"] == pytest.approx(-likelihood.mean().item(), rel=1e-6)
        assert row["brier"] == pytest.approx(errors.mean().item(), rel=1e-6)
    assert result["mean"]["nll"] == pytest.approx(
        sum(row["nll"] for row in result["domains"]) / 3, rel=1e-12
    )
    pooled = -torch.cat(logps)[torch.arange(210), data.labels.repeat(3)].mean().item()
    assert result["pooled"]["nll"] == pytest.approx(pooled, rel=1e-6)
    assert (result["pooled"]["n"], result["steps"], result["timed_steps"]) == (210, 12, 7)
    assert [(visit["corruption"], visit["steps"], visit["n"]) for visit in result["visits"]] == [
        (n, 4, 70) for n in NAMES
    ]
    for visit in result["visits"]:
        assert visit["accuracy"] == pytest.approx(accuracies(result)[visit["corruption"]], abs=1e-6)


def test_a_reset_stream_is_its_corruptions_alone_and_a_continual_one_is_not(shared: Bench) -> None:
    last = replace(shared, stream=replace(shared.stream, corruptions=NAMES[-1:]))
    alone = result_of(last)["domains"][0]
    assert result_of(shared)["domains"][-1] == alone
    assert result_of(shared, "tent:lr=0.05", "continual")["domains"][-1]["nll"] != pytest.approx(
        alone["nll"], rel=1e-3
    )


def test_visits_of_a_second_round_are_told_apart(shared: Bench) -> None:
    result = result_of(shared, "bn", "continual:rounds=2")
    assert [visit["corruption"] for visit in result["visits"]] == [*NAMES, *NAMES]
    assert [row["n"] for row in result["domains"]] == [140] * 3
    first, second = result["visits"][:3], result["visits"][3:]
    assert [visit.pop("round") for visit in (*first, *second)] == [0, 0, 0, 1, 1, 1]
    assert first == second  # bn learns nothing


def test_rounds_of_a_single_corruption_are_told_apart(shared: Bench) -> None:
    alone = replace(shared, stream=replace(shared.stream, corruptions=NAMES[:1]))
    visits = result_of(alone, "bn", "continual:rounds=3")["visits"]
    assert [(visit["round"], visit["steps"], visit["n"]) for visit in visits] == [
        (number, 4, 70) for number in range(3)
    ]
    visits = result_of(alone, "bn", "recurring:rounds=2")["visits"]
    assert [(visit["round"], visit["steps"], visit["n"]) for visit in visits] == [
        (0, 2, 35),
        (1, 2, 35),
    ]


def test_bf16_calls_the_adapter_under_autocast(shared: Bench, data: Generated) -> None:
    exact, rough = result_of(shared), result_of(replace(shared, machine=Machine(CPU, "bf16")))
    adapter = df.adapt(Tiny().eval(), "tent", lr=0.05)
    for row, name in zip(rough["domains"], NAMES, strict=True):
        adapter.reset()
        logps = []
        for index in torch.arange(70).split(20):
            with torch.autocast("cpu", torch.bfloat16):
                logps.append(adapter(data.take(Shift(name, 5), index, CPU).float() / 255).double())
        assert row["nll"] == pytest.approx(
            -torch.cat(logps)[torch.arange(70), data.labels].mean().item(), rel=1e-6
        )
    assert rough["mean"]["nll"] == pytest.approx(exact["mean"]["nll"], rel=0.05)
    assert rough["mean"]["nll"] != pytest.approx(exact["mean"]["nll"], rel=1e-5)


def test_what_is_predicted_beside_the_steps_is_as_precise(shared: Bench) -> None:
    """Probe and prediction before the update, of a network that tells what it was called under."""
    seen: list[bool] = []

    class Spy(Tiny):
        def forward(self, images: Tensor) -> Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().forward(images)

    networks = {"tiny": NamedNetwork("tiny", Spy().eval(), "0" * 64)}
    spied = replace(
        shared, networks=networks, machine=Machine(CPU, "bf16"), before=True, probe_every=3
    )
    result = result_of(spied, "conjugate")
    assert "before each update" in result["before"]["how"]
    assert len(result["probe"]) == 5
    assert seen[0] is False  # the question how many classes there are
    assert len(seen) > 12 + 12 + 5
    assert all(seen[1:])


def _source(labels: Tensor | None) -> SourceImages:
    return SourceImages(
        (255 * uniform(50, 3, 32, 32, seed=5)).byte(), labels, "train.npz", "3" * 64
    )


def test_source_samples_reach_the_presets_that_want_them(shared: Bench, data: Generated) -> None:
    source = _source(torch.arange(50) % 4)
    given = replace(shared, source=source)
    assert source.labels is not None
    document = run_task(given, task_of("eata:lr=0.5,alpha=100.0"))
    with_data, without = document["result"], result_of(shared, "eata:lr=0.5,alpha=100.0")
    pair = (source.images.float() / 255, source.labels)
    adapter = df.adapt(Tiny().eval(), "eata", lr=0.5, alpha=100.0, data=pair)
    logp = torch.cat(
        [
            adapter(data.take(Shift(NAMES[0], 5), index, CPU).float() / 255)
            for index in torch.arange(70).split(20)
        ]
    )
    expected = -logp.double()[torch.arange(70), data.labels].mean().item()
    assert with_data["domains"][0]["nll"] == pytest.approx(expected, rel=1e-6)
    assert with_data["domains"][0]["nll"] != pytest.approx(without["domains"][0]["nll"], rel=1e-4)
    assert with_data["warnings"] == []
    described = {"path": "train.npz", "images": 50, "labeled": True, "sha256": "3" * 64}
    assert document["settings"]["source_data"] == described
    assert settings(shared, task_of("eata"))["source_data"] is None
    assert settings(given, task_of("tent")) == settings(
        shared, task_of("tent")
    )  # which has no use for them
    assert replace(given, source=_source(None)).source_data.labels is None  # type: ignore[union-attr]
    (table,) = tables.tables([document])
    assert (
        "source data of eata:lr=0.5,alpha=100.0: labeled, 50 images of train.npz, sha256 "
        "333333333333" in table.notes
    )


def test_labels_that_the_model_does_not_have_are_refused(shared: Bench, data: Generated) -> None:
    more = replace(shared, data=Generated(data.clean._replace(labels=data.labels + 1)))
    message = "labels of data generated must be below 4, the classes of model 'tiny', got 'up to 4'"
    with pytest.raises(ValueError, match=message):
        run_task(more, task_of())
    given = replace(shared, source=_source(torch.full((50,), 9)))
    with pytest.raises(ValueError, match=r"labels of source train\.npz must be below 4"):
        run_task(given, task_of("eata"))
    run_task(given, task_of("bn"))  # has no use for them


def test_tasks_share_what_was_made(
    shared: Bench, data: Generated, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def counted(images: Tensor, name: str, *rest: Any) -> Tensor:
        made.append(name)
        return corrupt(images, name, *rest)

    monkeypatch.setattr("driftfilter.app.streams.corrupt", counted)
    fresh = replace(shared, data=Generated(data.clean))
    for preset in ("bn", "tent", "source"):
        run_task(fresh, task_of(preset))
    assert made == list(NAMES)


def test_mixed_samples_come_from_their_own_corruption(shared: Bench) -> None:
    """The source model predicts each sample by itself, so that the order cannot matter."""
    mixed, apart = result_of(shared, "source", "mixed"), result_of(shared, "source", "reset")
    for ours, other in zip(mixed["domains"], apart["domains"], strict=True):
        assert ours.pop("corruption") == other.pop("corruption")
        assert ours == pytest.approx(other, rel=1e-5)
    assert [visit["corruption"] for visit in mixed["visits"]] == ["mixed"]


def test_accuracy_before_the_update(shared: Bench, data: Generated) -> None:
    shared = replace(shared, before=True)
    result = result_of(shared, "conjugate:lr=1.0", "continual")
    adapter, right = df.adapt(Tiny().eval(), "conjugate", lr=1.0), []
    for name in NAMES:
        for index in torch.arange(70).split(20):
            images = data.take(Shift(name, 5), index, CPU).float() / 255
            right.append(adapter.predict(images).labels == data.labels[index])
            adapter(images)
    assert result["before"]["accuracy"] == pytest.approx(
        torch.cat(right).double().mean().item(), abs=1e-12
    )
    assert result["before"]["accuracy"] != pytest.approx(result["pooled"]["accuracy"], abs=1e-3)
    assert result["domains"][0]["before"] == pytest.approx(
        torch.cat(right[:4]).double().mean().item(), abs=1e-12
    )
    free = result_of(shared, "tent")
    assert free["before"]["accuracy"] == pytest.approx(free["pooled"]["accuracy"], abs=1e-6)
    assert "prior" in free["before"]["how"]


def test_the_probe_changes_nothing_and_sees_the_source_at_first(
    shared: Bench, data: Generated
) -> None:
    plain, probed = result_of(shared), result_of(replace(shared, probe_every=5))
    assert probed["domains"] == plain["domains"]
    assert [look["step"] for look in probed["probe"]] == [0, 5, 10, 12]
    clean = data.take(CLEAN, torch.arange(70), CPU).float() / 255
    right = df.adapt(Tiny().eval(), "tent").predict(clean).labels == data.labels
    assert probed["probe"][0]["accuracy"] == right.double().mean().item()
    assert plain["probe"] == []


@pytest.mark.parametrize("every", [4, 100], ids=["at-resets", "at-the-end"])
def test_the_probe_sees_the_adapted_model_before_a_reset_and_at_the_end(
    every: int, shared: Bench, data: Generated
) -> None:
    """Four steps a corruption from the source: after each of them the accuracy is that of an
    adapter by hand.
    """
    looks = result_of(replace(shared, probe_every=every), "tent:lr=3.0")["probe"]
    clean, expected = data.take(CLEAN, torch.arange(70), CPU).float() / 255, {}
    for number, name in enumerate(NAMES, 1):
        adapter = df.adapt(Tiny().eval(), "tent", lr=3.0)
        first = adapter.predict(clean).labels == data.labels
        for index in torch.arange(70).split(20):
            adapter(data.take(Shift(name, 5), index, CPU).float() / 255)
        expected[4 * number] = (adapter.predict(clean).labels == data.labels).double().mean().item()
        assert expected[4 * number] != first.double().mean().item()
    assert [look["step"] for look in looks] == ([0, 4, 8, 12] if every == 4 else [0, 12])
    assert [look["accuracy"] for look in looks[1:]] == [
        expected[look["step"]] for look in looks[1:]
    ]


def test_seeds_have_corruptions_of_their_own(shared: Bench, data: Generated) -> None:
    """The source model, which neither order nor draws can change, on noise of the task's seed; each
    is made once.
    """
    noise = replace(
        shared, stream=replace(shared.stream, corruptions=NAMES[:1]), data=Generated(data.clean)
    )
    for seed in (0, 3):
        images = corrupt(data.clean.images, NAMES[0], 5, seed)
        expected = nn.functional.cross_entropy(Tiny().eval()(images).double(), data.labels).item()
        assert result_of(noise, "source", "reset", seed)["mean"]["nll"] == pytest.approx(
            expected, rel=1e-5
        )
    assert noise.data.with_seed(3) is noise.data.with_seed(3)
    assert noise.data.with_seed(0) is noise.data


def test_the_watch_hears_of_every_step_and_the_accuracy_so_far(shared: Bench) -> None:
    log = Log()
    result = run_task(shared, task_of(), log.watch)["result"]
    assert [seen[:2] for seen in log.seen] == [(step, 12) for step in range(1, 13)]
    assert log.seen[-1][2] == f"accuracy {result['pooled']['accuracy']:.3f}"


def test_settings_say_all_that_a_report_needs(shared: Bench) -> None:
    made = json.loads(json.dumps(settings(shared, task_of("conjugate", "continual:rounds=2", 3))))
    assert (made["preset"], made["predict_from"], made["statistics"]) == (
        "conjugate",
        "posterior",
        "batch",
    )
    assert made["protocol"] == {"name": "continual:rounds=2", "rounds": 2}
    assert made["stream"]["seed"] == 3
    assert made["data"]["frost"] == "procedural"
    assert made["versions"]["driftfilter"] == df.__version__
    assert made["versions"]["numpy"] == np.__version__
    content = b"".join(path.read_bytes() for path in sorted(Path(df.__file__).parent.rglob("*.py")))
    assert made["versions"]["code"] == hashlib.sha256(content).hexdigest()[:12]


def test_statistics_are_none_without_batch_norm(shared: Bench) -> None:
    module = nn.Sequential(nn.Flatten(), nn.LayerNorm(3072), nn.Linear(3072, 4)).eval()
    plain = replace(shared, networks={"tiny": NamedNetwork("tiny", module, "0" * 64)})
    assert settings(plain, task_of("tent"))["statistics"] == "none"

"""One stream over several processes: the belief is that of one process, and what goes wrong on one
rank ends on all.
"""

import copy
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app import models
from driftfilter.app.streams import sample_images
from driftfilter.base.sharding import (
    Shards,
    among,
    gather_samples,
    place_samples,
    take_samples,
    total_samples,
)
from driftfilter.distributed.ranks import ProcessRanks
from small import assert_same, moments, refuses

SHARDS = (
    (15, 9),
    (24, 0),
    (12, 12),
    (0, 24),
    (23, 1),
)  # of 24 samples: uneven and empty ones too, step after step
STEPS = 20
EXACT = ("tent", "eata", "opgd", "opgd_diag", "driftfilter")
EPISODES = ("memo", "lora")  # every sample is a step of its own
LOOKING = ("deyo", "rotta", "note")  # at samples, which other ranks have
OTHERS = [name for name in df.presets.names() if name not in (*EXACT, *EPISODES, *LOOKING)]


# What the ranks do


def _begin(work: Callable[..., Any], rank: int, folder: Path, *args: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2
    )
    torch.save(work(rank, *args), folder / f"{rank}.pt")


def on_two_ranks(work: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """What a function of the rank returns on each of two; None where a process has ended before."""
    spawned = multiprocessing.get_context("spawn")
    ranks = [spawned.Process(target=_begin, args=(work, rank, folder, *args)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300)
    alive = [process for process in ranks if process.is_alive()]
    for process in alive:
        process.kill()
    assert not alive
    files = [folder / f"{rank}.pt" for rank in range(2)]
    return [torch.load(file, weights_only=False) if file.exists() else None for file in files]


def shard(batch: Tensor, step: int, rank: int | None) -> Tensor:
    """A rank's part of a batch; all of it where there are no ranks."""
    if rank is None:
        return batch
    first, _ = SHARDS[step % len(SHARDS)]
    return batch[:first] if rank == 0 else batch[first:]


def failing(call: Callable[[], Any]) -> str:
    """The error of a call, kind and text; empty where there is none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def small() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.BatchNorm2d(6),
        nn.Tanh(),
    )
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)).double()
    with torch.no_grad():
        list(model.parameters())[-2].mul_(20)  # confident enough for gates to let some samples pass
    return model.eval()


def images(batches: int, samples: int, size: int, seed: int = 1) -> list[Tensor]:
    return list(
        torch.rand(
            batches,
            samples,
            3,
            size,
            size,
            generator=torch.Generator().manual_seed(seed),
            dtype=torch.float64,
        )
    )


def pictures() -> list[Tensor]:
    """Noisy CIFAR-10 at half size, in float64: rounding in float32 grows by far more than 1e-5 in
    20 steps.
    """
    clean = nn.functional.avg_pool2d(sample_images().images, 2).double()
    generator = torch.Generator().manual_seed(0)
    drawn = [clean[torch.randint(len(clean), (24,), generator=generator)] for _ in range(STEPS)]
    return [
        (x + 0.05 * torch.randn(x.shape, generator=generator, dtype=x.dtype)).clamp(0, 1)
        for x in drawn
    ]


def streamed(adapter: df.Adapter, batches: list[Tensor], rank: int | None) -> dict[str, Any]:
    outputs = [adapter(shard(batch, step, rank)).exp() for step, batch in enumerate(batches)]
    last = adapter.predict(shard(batches[0], 3, rank)).probabilities
    belief, memory = (
        adapter.belief,
        {name: value.double() for name, value in adapter.state.memory.items()},
    )
    kept = {"mean": belief.mean, "covariance": belief.covariance.variance(), **memory}
    return {"outputs": [*outputs, last], "kept": kept, "signals": torch.tensor(adapter.signals)}


def of_shipped(rank: int | None) -> dict[str, dict[str, Any]]:
    """The five presets on the shipped network, with the monitor."""
    made: dict[str, Any] = {} if rank is None else {"distributed": True}
    model, batches = models.load("resnet20").double(), pictures()
    source: dict[str, Any] = {"eata": {"data": df.SourceData(batches[0])}}
    return {
        preset: streamed(df.adapt(model, preset, **source.get(preset, {}), **made), batches, rank)
        for preset in EXACT
    }


def of_others(rank: int | None) -> dict[str, dict[str, Any]]:
    """All other presets on a small network."""
    made: dict[str, Any] = {} if rank is None else {"distributed": True}
    batches = images(5, 24, 8)
    options: dict[str, dict[str, Any]] = {
        "cotta": {"copies": 2},
        "petal": {"copies": 2, "data": df.SourceData(batches[0], torch.arange(24) % 4)},
        "bacs": {"data": df.SourceData(batches[0], torch.arange(24) % 4)},
        "ewc": {"data": df.SourceData(batches[0])},
        "santa": {"data": df.SourceData(batches[0], torch.arange(24) % 4)},
        "tttpp": {"data": df.SourceData(batches[0], batch_size=12), "queue": 30},
        "bn": {"statistics": df.PseudoCount(16)},
    }
    adapters = {
        preset: df.adapt(small(), preset, **options.get(preset, {}), **made) for preset in OTHERS
    }
    return {preset: streamed(adapter, batches, rank) for preset, adapter in adapters.items()}


def differences(ranks: list[dict[str, Any]], alone: dict[str, Any], tolerance: float) -> list[str]:
    """What is not as it is in one process, or not the same on both ranks to the last bit."""
    found = []
    for name, value in alone["kept"].items():
        scale = value.abs().max().clamp_min(1.0)
        apart = [(rank["kept"][name] - value).abs().max() / scale for rank in ranks]
        found += [f"{name} is off by {max(apart):.1e}"] if max(apart) > tolerance else []
        found += (
            []
            if torch.equal(ranks[0]["kept"][name], ranks[1]["kept"][name])
            else [f"{name} differs between ranks"]
        )
    found += (
        []
        if torch.equal(ranks[0]["signals"].nan_to_num(), ranks[1]["signals"].nan_to_num())
        else ["signals differ"]
    )
    for step, expected in enumerate(alone["outputs"]):
        got = torch.cat([rank["outputs"][step] for rank in ranks])
        off = (
            (got - expected).abs().max() if got.shape == expected.shape else torch.tensor(torch.inf)
        )
        found += [f"prediction {step} is off by {off:.1e}"] if off > tolerance else []
    return found


def other_networks(rank: int | None) -> dict[str, dict[str, Any]]:
    """Layers that see one value a channel, have no running statistics, or no batch statistics at
    all; a loss of its own.
    """
    made: dict[str, Any] = {} if rank is None else {"distributed": True}
    torch.manual_seed(0)
    flat = (
        nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4))
        .double()
        .eval()
    )
    untracked = nn.Sequential(
        nn.Conv2d(3, 4, 2),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.Flatten(),
        nn.Linear(4, 4),
    )
    layered = nn.Sequential(
        nn.Flatten(), nn.Linear(12, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 4)
    )
    every = {
        "flat": flat,
        "untracked": untracked.double().eval(),
        "layered": layered.double().eval(),
    }
    full = df.Recipe(
        source=df.Gaussian(0.1, "full"), observation=df.Gibbs(df.InformationMaximization())
    )
    recipes = {
        "full": full,
        "linearized": df.presets.get("opgd", prediction=df.LinearizedGaussian(4)),
    }
    recipes["probit"] = df.presets.get("opgd", prediction=df.LinearizedProbit())
    recipes["ema probit"] = df.presets.get(
        "opgd", prediction=df.LinearizedProbit(), statistics=df.Ema(0.3)
    )
    recipes["newton"] = replace(full, inference=df.Linearized(df.GaussNewton()))
    recipes["ema"] = df.presets.get("driftfilter")
    recipes["centred"] = df.presets.get("driftfilter", norms="other")
    batches = images(5, 24, 2)
    found = {
        f"{network} {recipe}": streamed(df.adapt(model, recipes[recipe], **made), batches, rank)
        for network, model in every.items()
        for recipe in recipes
    }
    # One sample over all ranks: no layer can take its variance from it.
    single = [(df.adapt(flat, "tent", monitor=None, **made), x[:1]) for x in batches[:2]]
    found["one sample"] = {
        "outputs": [adapter(x if rank in (None, 1) else x[:0]).exp() for adapter, x in single],
        "kept": {"mean": single[0][0].belief.mean},
        "signals": torch.zeros(1),
    }
    return found


def every_stream(rank: int | None) -> dict[str, dict[str, Any]]:
    return {**of_shipped(rank), **of_others(rank), **other_networks(rank)}


@pytest.mark.slow
def test_ranks_hold_the_belief_of_one_process(tmp_path: Path) -> None:
    ranks, alone = on_two_ranks(every_stream, tmp_path), every_stream(None)
    assert None not in ranks
    found = {
        name: differences(
            [rank[name] for rank in ranks], alone[name], 1e-5 if name in EXACT else 1e-9
        )
        for name in alone
    }
    assert not {name: wrong for name, wrong in found.items() if wrong}


# What goes wrong


def disagreeing(rank: int) -> dict[str, str]:
    """Errors of both ranks where one of them does something else; after each of them both go on."""
    model, other = small(), small()
    with torch.no_grad():
        next(other.parameters()).add_(1e-9)
    batch = images(1, 6, 8)[0]
    found = {
        "recipe": failing(lambda: df.adapt(model, "tent", lr=1e-3 * (1 + rank), distributed=True)),
        "model": failing(lambda: df.adapt(other if rank else model, "tent", distributed=True)),
        "seed": failing(lambda: df.adapt(model, "tent", seed=rank, distributed=True)),
        "monitor": failing(
            lambda: df.adapt(
                model, "tent", monitor=df.Monitor(share=0.4 + rank / 10), distributed=True
            )
        ),
    }
    adapter = df.adapt(model, "tent", distributed=True)
    adapter(batch)
    before, broken = adapter.belief.mean, batch.clone()
    broken[2, 0, 0, 0] = torch.nan
    found["shard"] = failing(lambda: adapter(broken if rank else batch))
    found["empty"] = failing(lambda: adapter(batch[:0]))
    found["call"] = failing(lambda: (adapter.update if rank else adapter.predict)(batch))
    assert torch.equal(adapter.belief.mean, before)
    adapter(batch)
    if rank:
        adapter.reset()
    found["step"] = failing(lambda: adapter(batch))
    adapter.reset()
    adapter(batch)
    if rank:  # a state of its own, of the same step
        state = adapter.state_dict()
        adapter.load_state_dict({**state, "belief.mean": state["belief.mean"] + 1e-12})
    found["belief"] = failing(lambda: adapter(batch))
    found |= differing(rank, batch)
    adapter.reset()
    adapter(batch)
    if rank:  # as after an alarm, and a resume() on the other rank alone
        adapter._now = adapter._now._replace(watch=replace(adapter._now.watch, frozen=True))
    found["monitor of a step"] = failing(lambda: adapter(batch))
    adapter.reset()
    assert torch.equal(adapter(batch).isfinite().all(), torch.tensor(True))
    return found


DIFFERENT = {  # what only one rank has: the tensor of a checkpoint, and how it is called
    "belief.covariance.values": "covariance",
    "memory.network.statistics": "statistics",
    "memory.centering": "memory",
    "source.covariance.values": "source",
    "monitor.recent": "monitor",
    "monitor.good.belief.mean": "monitor",
    "seed": "state",
}


def differing(rank: int, batch: Tensor) -> dict[str, str]:
    """Errors where one tensor of the state is another one on a rank, and that all else is as
    before.
    """
    watchful = df.Monitor(lag=1)  # with a good belief soon
    adapter = df.adapt(small(), "driftfilter", monitor=watchful, distributed=True)
    found = {}
    for _ in range(16):
        adapter(batch)
    state = adapter.state_dict()
    for name in DIFFERENT:
        assert name in state, sorted(state)
        changed = state[name] + 1 if name == "seed" else 2 * state[name]
        adapter.load_state_dict({**state, name: changed} if rank else state)
        before = adapter.belief.mean
        found[name] = failing(lambda: adapter(batch))
        assert torch.equal(adapter.belief.mean, before)
    adapter.load_state_dict(state)
    adapter(batch)
    return found


@pytest.mark.slow
def test_ranks_that_disagree_are_told_so_and_go_on(tmp_path: Path) -> None:
    first, second = on_two_ranks(disagreeing, tmp_path)
    texts = {"empty": "no sample on any rank"}
    texts |= {
        what: f"another {what} on rank 1 than on rank 0"
        for what in ("recipe", "model", "seed", "monitor")
    }
    texts |= {
        what: f"the {what} of the ranks must be the same on all"
        for what in ("call", "step", "belief")
    }
    texts |= {
        name: f"the {kind} of the ranks must be the same on all" for name, kind in DIFFERENT.items()
    }
    for what, text in texts.items():
        assert first[what] == second[what]
        assert text in first[what]
    assert "rank [1] refused" in first["shard"]
    assert second["shard"].startswith("NotFiniteError")
    assert "['predict', 'update']" in first["call"]
    assert "the monitor of the ranks must be the same on all" in first["monitor of a step"]


class Mortal(nn.Module):
    """A network that ends its process, or falls asleep, in the middle of the third forward pass of
    a whole shard; passes of two samples are proofs of a layout.
    """

    def __init__(self, rank: int, act: Callable[[], None]) -> None:
        super().__init__()
        self.model, self.calls, self.fatal, self.act = small(), [0], rank == 1, act

    def forward(self, inputs: Tensor) -> Any:
        self.calls[0] += len(inputs) > 2
        hidden = self.model[:3](inputs)
        if self.fatal and self.calls[0] == 3 and len(inputs) > 2:
            self.act()
        return self.model[3:](hidden)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Mortal":
        made = Mortal.__new__(Mortal)
        memo[id(self)] = made
        nn.Module.__init__(made)
        made.model, made.calls, made.fatal, made.act = (
            copy.deepcopy(self.model, memo),
            self.calls,
            self.fatal,
            self.act,
        )
        return made


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def bereaved(
    rank: int, act: Callable[[], None], timeout: float | None, folder: Path
) -> dict[str, Any]:
    group = True if timeout is None else dist.new_group(timeout=timedelta(seconds=timeout))
    adapter = df.adapt(Mortal(rank, act), "tent", monitor=None, distributed=group)
    batch = images(1, 4, 8)[0]
    adapter(batch)
    adapter(batch)
    before = adapter.state
    found: dict[str, Any] = {
        "first": failing(lambda: adapter(batch)),
        "again": failing(lambda: adapter(batch)),
    }
    df.save(adapter, folder / f"{rank}.safetensors")
    if (folder / "sleeper").exists():
        os.kill(int((folder / "sleeper").read_text()), signal.SIGKILL)
    if act is _failed:  # neither ends before the other has seen it
        dist.barrier()
    return {**found, "unchanged": adapter.state is before}


def _failed() -> None:
    raise RuntimeError("out of memory")


class Sleep:
    """Picklable: the rank tells its number before it falls asleep, so that the other can end it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self) -> None:
        (self.folder / "sleeper").write_text(str(os.getpid()))
        time.sleep(600)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["killed", "asleep"])
def test_a_rank_that_is_gone_is_an_error_on_the_others(kind: str, tmp_path: Path) -> None:
    act: Callable[[], None] = _killed if kind == "killed" else Sleep(tmp_path)
    survivor, gone = on_two_ranks(
        bereaved, tmp_path, act, None if kind == "killed" else 2.0, tmp_path
    )
    assert gone is None
    assert survivor["first"].startswith("RankError: rank 0 of 2 got no answer")
    assert survivor["again"].startswith("RankError: rank 0 of 2 is alone")
    assert survivor["unchanged"]
    assert (tmp_path / "0.safetensors").is_file()


@pytest.mark.slow
def test_a_rank_that_fails_in_the_middle_of_a_call_tells_the_others(tmp_path: Path) -> None:
    other, failed = on_two_ranks(bereaved, tmp_path, _failed, None, tmp_path)
    assert failed["first"] == "RuntimeError: out of memory"
    assert failed["again"].startswith(
        "RankError: rank 1 of 2 is alone since a call before failed: RuntimeError"
    )
    assert other["first"].startswith("RankError: rank 0 of 2 got no answer")
    assert failed["unchanged"]
    assert other["unchanged"]


SERVE = """
import os, signal, sys
from pathlib import Path

import torch
import torch.distributed as dist

import driftfilter as df

torch.set_num_threads(1)
folder, dies = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layers = (torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
adapter = df.adapt(torch.nn.Sequential(*layers).eval(), distributed=True)
file = folder / "state.safetensors"
start = df.load(adapter, file)["next"] if file.exists() else 0
batches = torch.randn(30, 16, 4, generator=torch.Generator().manual_seed(1)) + 1
for step in range(start, 30):
    if rank == 1 and step == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    adapter(batches[step].tensor_split(ranks)[rank])
    if rank == 0 and step % 4 == 3:
        df.save(adapter, file, notes={"next": step + 1})
df.save(adapter, folder / f"end{rank}.safetensors")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_torchrun_that_is_given_again_ends_as_one_that_nobody_killed(tmp_path: Path) -> None:
    """The loop of docs/distributed.md; ``--max-restarts`` hangs with gloo."""
    (tmp_path / "serve.py").write_text(SERVE, encoding="utf-8")

    def torchrun(folder: str, dies: int = -1) -> int:
        (tmp_path / folder).mkdir(exist_ok=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", str(tmp_path / "serve.py"), str(tmp_path / folder)]
        done = subprocess.run([*command, str(dies)], capture_output=True, timeout=120, check=False)
        return done.returncode

    assert torchrun("whole") == 0
    assert torchrun("killed", dies=17) != 0
    assert not (tmp_path / "killed" / "end0.safetensors").exists()
    assert torchrun("killed") == 0
    ends = [
        (tmp_path / folder / f"end{rank}.safetensors").read_bytes()
        for folder in ("whole", "killed")
        for rank in (0, 1)
    ]
    assert len(set(ends)) == 1


# In this process


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[ProcessRanks]:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1
    )
    assert dist.group.WORLD is not None
    yield ProcessRanks(dist.group.WORLD)
    dist.destroy_process_group()


@pytest.mark.parametrize("preset", ["opgd", "driftfilter", "driftfilter_aug", "head_ekf"])
def test_one_rank_is_one_process(preset: str, alone: ProcessRanks) -> None:
    """Which waits for no sample more, whatever the recipe says: ranks keep none apart."""
    adapter, plain = df.adapt(small(), preset, distributed=True), df.adapt(small(), preset, least=0)
    for batch in images(3, 6, 8):
        torch.testing.assert_close(adapter(batch), plain(batch), rtol=1e-10, atol=1e-10)
    assert adapter.update(batch).losses.shape[-1] == 6
    plain.update(batch)
    torch.testing.assert_close(
        moments(adapter.belief), moments(plain.belief), rtol=1e-10, atol=1e-10
    )


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = small()

    def forward(self, pixels: Tensor, scale: Tensor) -> Any:
        return self.model(pixels * scale)


def test_inputs_by_name_and_copies_of_an_adapter(alone: ProcessRanks) -> None:
    adapter = df.adapt(Named().eval(), "tent", distributed=True)
    batch, scale = images(1, 6, 8)[0], torch.tensor(0.5).double()
    adapter(pixels=batch, scale=scale)
    assert torch.equal(
        copy.deepcopy(adapter)(pixels=batch, scale=scale), adapter(pixels=batch, scale=scale)
    )
    with pytest.raises(TypeError, match="processes"):
        pickle.dumps(adapter)


def test_moments_of_shards_are_those_of_all_values(alone: ProcessRanks) -> None:
    values = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    variance, mean = torch.var_mean(values, 0, correction=0)
    together = Shards(alone, (7,)).moments(mean, variance, 7, 7)
    torch.testing.assert_close(
        (together[0], together[1]), (values.mean(0), values.var(0, correction=0))
    )
    assert together[2:] == (7, 7)

    def through(values: Tensor) -> Tensor:
        variance, mean = torch.var_mean(values, 0, correction=0)
        return torch.cat(Shards(alone, (7,)).moments(mean, variance, 7, 7)[:2])

    torch.autograd.gradcheck(through, values, check_forward_ad=True)


def test_without_shards_nothing_is_exchanged() -> None:
    batch = torch.arange(6.0).view(3, 2)
    assert gather_samples(batch) is batch
    assert place_samples(batch) is batch
    assert take_samples(batch) is batch
    assert total_samples(3) == 3


def test_samples_are_put_at_their_place_among_all(alone: ProcessRanks) -> None:
    shards = Shards(alone, (3, 2))
    batch, scale = torch.arange(6.0).view(3, 2) + 1, torch.tensor(2.0)
    with among(shards):
        whole, other = place_samples((batch, scale))
        assert other is scale
        assert_same(
            (whole, take_samples((whole, scale))[0]), (torch.cat((batch, torch.zeros(2, 2))), batch)
        )
        assert total_samples(3) == 5


test_what_cannot_be_distributed_is_refused = refuses(
    [
        ({"recipe": "memo"}, r"adapt: recipe must be without chunks.*got 'chunk=1'"),
        ({"recipe": "lora"}, r"adapt: recipe must be without chunks"),
        ({"recipe": "deyo"}, r"adapt: recipe must be a recipe whose weighting sees logits alone"),
        ({"recipe": "rotta"}, r"adapt: recipe must be a recipe without a buffer.*got CategoryBal"),
        ({"window": 32}, r"adapt: window must be 0 if a stream is distributed.*got 32"),
        (
            {"update_every": 2},
            r"adapt: update_every must be 1 if a stream is distributed.*got 2",
        ),
        (
            {"distributed": "gloo"},
            r"adapt: distributed must be True, False or a process group, got 'gloo'",
        ),
        (
            {},
            r"adapt: distributed must be False until torch.distributed.init_process_group\(\) "
            r"has been called",
        ),
    ],
    lambda options: df.adapt(small(), **{"recipe": "tent", "distributed": True, **options}),
)

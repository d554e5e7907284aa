"""Published classes beside our presets, on a checkout that the test writes: nothing of theirs is
here.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app.bench.peers import OWN, Checkout, Peer, open_checkout
from driftfilter.app.bench.task import Bench, run_task, settings
from driftfilter.app.networks.load_model import NamedNetwork
from driftfilter.app.networks.transform import Transform
from driftfilter.app.streams import Generated, Shift
from peer_checkout import write_checkout
from tiny import CPU, NAMES, Tiny, accuracies, task_of, uniform


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return open_checkout(str(write_checkout(tmp_path / "theirs")))


def build(
    checkout: Checkout, name: str = "offset", source: df.SourceData | None = None, **options: Any
) -> Peer:
    seed = options.pop("seed", 0)
    return checkout.build(name, options, Tiny().eval(), 4, 20, seed, source)


def images(seed: int) -> Tensor:
    return uniform(10, 3, 32, 32, seed=seed)


def inside(peer: Peer) -> Any:
    return peer._method


# What it does


def test_their_class_does_what_it_says(checkout: Checkout) -> None:
    """Two batches by hand: log-probabilities, and a bias that moves by LR times the mean logits."""
    peer, network = build(checkout, LR=0.25), Tiny().eval()
    for seed in (1, 2):
        batch = images(seed)
        kept = batch.clone()
        with torch.no_grad():
            logits = network(batch)
            assert torch.allclose(peer(batch), logits.log_softmax(-1), atol=1e-6)
            network.head.bias.sub_(0.25 * logits.mean(0))
        assert torch.equal(batch, kept)  # theirs wrote zeros into what it was given
    assert inside(peer).num_classes == 4


def test_the_network_is_not_theirs(checkout: Checkout) -> None:
    network = Tiny().eval()
    before = {name: each.clone() for name, each in network.state_dict().items()}
    peer = checkout.build("offset", {}, network, 4, 20, 0, None)
    peer(images(1))
    peer(images(2))
    assert all(torch.equal(each, before[name]) for name, each in network.state_dict().items())


def test_a_prediction_changes_nothing(checkout: Checkout) -> None:
    peer, other = build(checkout), build(checkout)
    labels = peer.predict(images(1)).labels
    assert torch.equal(labels, Tiny().eval()(images(1)).argmax(-1))
    assert torch.equal(peer(images(1)), other(images(1)))
    assert inside(peer).steps_done == 1


def test_reset_is_theirs(checkout: Checkout) -> None:
    peer = build(checkout)
    first = peer(images(1))
    assert not torch.equal(peer(images(1)), first)
    peer.reset()
    assert inside(peer).steps_done == 0
    assert torch.equal(peer(images(1)), first)


def test_what_all_draw_from_starts_at_the_seed(checkout: Checkout) -> None:
    """torch, numpy and Python; whatever was drawn before."""
    first = inside(build(checkout, seed=3)).drawn
    torch.rand(5)
    assert inside(build(checkout, seed=3)).drawn == first
    other = inside(build(checkout, seed=4)).drawn
    assert all(one != two for one, two in zip(first, other, strict=True))


def test_source_images_are_those_given(checkout: Checkout) -> None:
    """Theirs asks for 5 in batches of 3."""
    source = df.SourceData(images(1), torch.arange(10) % 4)
    assert inside(build(checkout, "sourced", source)).sizes == [3, 2]
    with pytest.raises(ValueError, match="source of peer_sourced must be given: --source FILE"):
        build(checkout, "sourced")


# Settings


def test_settings_are_those_of_the_file_and_the_options(tmp_path: Path) -> None:
    checkout = open_checkout(str(write_checkout(tmp_path, OPTIM={"LR": 0.125})))
    found = checkout.configure("offset", {"STEPS": 2, "EXTRA.RATE": 3}, 64)
    assert (found.OPTIM.LR, found.OPTIM.STEPS, found.EXTRA.RATE) == (0.125, 2, 3.0)
    assert found.TEST.BATCH_SIZE == 64
    assert type(found.EXTRA.RATE) is float
    described = json.loads(checkout.describe("offset", {"STEPS": 2}, 64).removeprefix("peer "))
    assert (described["method"], described["config"]["OPTIM"]["STEPS"]) == ("offset", 2)
    assert described["commit"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"L": 0.1}, "option of peer_offset must be one of .*'OPTIM.LR'"),
        ({"OPTIM.LRR": 0.1}, "did you mean 'OPTIM.LR'"),
        ({"RATE": 0.1}, r"must be one of \['TEST.RATE', 'EXTRA.RATE'\].*got 'RATE'"),
        ({"LR": "fast"}, "option of peer_offset: LR must be like 0.5, got 'fast'"),
        ({"STEPS": 1.5}, "option of peer_offset: STEPS must be like 1, got 1.5"),
        ({"EPISODIC": 1}, "option of peer_offset: EPISODIC must be like False, got 1"),
    ],
    ids=["unknown", "near", "twice", "text", "share", "switch"],
)
def test_refused_options(checkout: Checkout, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checkout.configure("offset", options, 20)


def test_a_method_that_is_not_there(checkout: Checkout) -> None:
    with pytest.raises(ValueError, match=r"one of \['peer_foreign', .*did you mean 'peer_offset'"):
        build(checkout, "ofset")
    message = r"methods must have a class for MODEL\.ADAPTATION, got 'nameless'"
    with pytest.raises(ValueError, match=message):
        build(checkout, "nameless")


# Checkouts that are none


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"peers must be a folder, got .*nowhere"):
        open_checkout(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("name", ["conf.py", "methods", "utils/registry.py", "cfgs/cifar10_c"])
def test_a_folder_without_a_part(tmp_path: Path, name: str) -> None:
    path = write_checkout(tmp_path) / "classification" / name
    path.rename(tmp_path / "elsewhere")
    message = f"a checkout of mariodoebler/test-time-adaptation, with .*{name}"
    with pytest.raises(ValueError, match=message):
        open_checkout(str(tmp_path))


def test_a_package_that_their_settings_need(tmp_path: Path) -> None:
    conf = write_checkout(tmp_path) / "classification" / "conf.py"
    conf.write_text(f"import absent_yacs\n{conf.read_text()}")
    with pytest.raises(ValueError, match=r"peers: a package for .* is missing: absent_yacs"):
        open_checkout(str(tmp_path))


def test_a_package_that_a_method_needs(checkout: Checkout) -> None:
    """Others do without it."""
    with pytest.raises(ValueError, match="is missing: absent_package_of_others"):
        build(checkout, "foreign")
    build(checkout)


def test_a_file_of_theirs_that_is_missing(checkout: Checkout) -> None:
    (checkout.root / "methods" / "base.py").unlink()
    with pytest.raises(ValueError, match=r"peers: a file of .* is missing: methods\.base"):
        build(checkout)


@pytest.mark.skipif("open_clip" in sys.modules, reason="it is there")
def test_a_placeholder_may_be_named_but_not_used(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They import packages at the top that a method may never come to."""
    monkeypatch.setitem(sys.modules, "open_clip", None)
    peer = build(checkout, "placed")
    message = r"the peer uses open_clip\.create_model, and this machine cannot import open_clip"
    with pytest.raises(ImportError, match=message):
        peer(images(1))


# What is left behind


@pytest.fixture
def own_utils() -> Iterator[ModuleType]:
    module = ModuleType("utils")
    sys.modules["utils"] = module
    yield module
    assert sys.modules.pop("utils") is module


@pytest.mark.parametrize("name", ["offset", "foreign"], ids=["done", "failed"])
def test_their_modules_are_gone_and_the_users_are_back(
    checkout: Checkout, own_utils: ModuleType, name: str
) -> None:
    before, path, finders = set(sys.modules), list(sys.path), list(sys.meta_path)
    try:
        build(checkout, name)
    except ValueError:
        assert name == "foreign"
    assert sys.modules["utils"] is own_utils
    new = {each.partition(".")[0] for each in set(sys.modules) - before}
    assert not new & {*OWN, "webdataset", "open_clip"}
    assert (sys.path, sys.meta_path) == (path, finders)
    assert not list(checkout.path.rglob("__pycache__"))


def test_tensors_know_cuda_as_before(checkout: Checkout) -> None:
    """Theirs calls it without a GPU, where it gives the tensor itself in the meantime."""
    before = Tensor.cuda
    build(checkout)(images(1))
    assert Tensor.cuda is before


# In the bench


def bench_of(shared: Bench, checkout: Checkout) -> Bench:
    return replace(shared, peers=checkout)


def test_a_task_of_theirs_is_measured_like_ours(
    shared: Bench, data: Generated, checkout: Checkout
) -> None:
    """Against their class driven by hand, reset before every corruption."""
    found = run_task(bench_of(shared, checkout), task_of("peer_offset:LR=0.125"))["result"]
    for name in NAMES:
        network, right = Tiny().eval(), list[bool]()
        for index in torch.arange(70).split(20):
            batch = data.take(Shift(name, 5), index, CPU).float() / 255
            with torch.no_grad():
                logits = network(batch)
                network.head.bias.sub_(0.125 * logits.mean(0))
            right += (logits.argmax(-1) == data.labels[index]).tolist()
        assert accuracies(found)[name] == pytest.approx(np.mean(right), abs=1e-6)
    assert (found["movement"], found["alarms"]) == ([], 0)


def test_a_probe_looks_at_what_theirs_would_say(shared: Bench, checkout: Checkout) -> None:
    probed = replace(bench_of(shared, checkout), probe_every=5, before=True)
    plain = run_task(bench_of(shared, checkout), task_of("peer_offset"))["result"]
    result = run_task(probed, task_of("peer_offset"))["result"]
    assert result["domains"][0]["accuracy"] == plain["domains"][0]["accuracy"]
    assert result["probe"][0]["accuracy"] == 1.0  # the labels are the network's own


def test_a_change_of_theirs_is_another_task(shared: Bench, checkout: Checkout) -> None:
    first = settings(bench_of(shared, checkout), task_of("peer_offset"))
    assert (first["statistics"], first["predict_from"]) == ("theirs", "theirs")
    file = checkout.root / "methods" / "offset.py"
    file.write_text(file.read_text() + "\n# another version\n")
    again = settings(bench_of(shared, Checkout(checkout.path)), task_of("peer_offset"))
    assert again["recipe"] != first["recipe"]
    other = settings(bench_of(shared, checkout), task_of("peer_offset:LR=0.1"))
    assert other["recipe"] != first["recipe"]


def test_the_commit_of_a_checkout_is_known(checkout: Checkout) -> None:
    """If the folder is the top of one; this repository, above it, is not theirs."""
    assert checkout.version["commit"] is None

    def git(*words: str) -> str:
        command = ["git", "-C", str(checkout.path), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "theirs")
    assert Checkout(checkout.path).version["commit"] == git("rev-parse", "HEAD")


def test_peers_need_a_checkout(shared: Bench) -> None:
    with pytest.raises(ValueError, match="peers must be a folder, for presets named peer_"):
        settings(shared, task_of("peer_offset"))


class Wide(nn.Module):
    """Takes images of any size."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.mean((2, 3)) @ torch.eye(3, 4)


def test_peers_need_images_of_their_size(shared: Bench, checkout: Checkout) -> None:
    networks = {"tiny": NamedNetwork("tiny", Wide().eval(), "0" * 64, Transform(48))}
    large = replace(bench_of(shared, checkout), networks=networks)
    with pytest.raises(ValueError, match=r"image size for a peer must be 32 x 32, got \[48, 48\]"):
        run_task(large, task_of("peer_offset"))

"""Fixtures of several folders: the current folder of a user, and the small benchmark of tiny.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from driftfilter.app.bench.task import Bench
from driftfilter.app.streams import Generated
from own_model import LABELS, MODULE, samples
from tiny import make_bench, make_data


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model, data and labels in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "run_network.py").write_text(MODULE)
    np.save("x.npy", samples())
    np.save("y.npy", LABELS)
    return tmp_path


@pytest.fixture(scope="module")
def data() -> Generated:
    return make_data()


@pytest.fixture
def shared(data: Generated) -> Bench:
    return make_bench(data)

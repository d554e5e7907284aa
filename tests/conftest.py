"""Fixtures of several folders: the current folder of a user, and the small benchmark of tiny.py.

Nothing heavy is imported before a test asks for it: the process that hands out tests reads this
too.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from driftfilter.app.bench.task import Bench
    from driftfilter.app.streams import Generated


def pytest_collection_finish() -> None:
    gc.freeze()  # or every collection of garbage looks through ten thousand tests


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model, data and labels in it."""
    from own_model import LABELS, MODULE, samples

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "run_network.py").write_text(MODULE)
    np.save("x.npy", samples())
    np.save("y.npy", LABELS)
    return tmp_path


@pytest.fixture(scope="module")
def data() -> Generated:
    from tiny import make_data

    return make_data()


@pytest.fixture
def shared(data: Generated) -> Bench:
    from tiny import make_bench

    return make_bench(data)

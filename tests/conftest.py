"""The small benchmark of tiny.py, for the tests of its parts."""

from __future__ import annotations

import pytest

from driftfilter.app.bench.task import Bench
from driftfilter.app.streams import Generated
from tiny import made_bench, made_data


@pytest.fixture(scope="module")
def data() -> Generated:
    return made_data()


@pytest.fixture
def shared(data: Generated) -> Bench:
    return made_bench(data)

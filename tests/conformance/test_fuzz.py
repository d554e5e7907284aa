"""Adapters in random sequences of calls, a few of them; at length by benchmarks/fuzz.py."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from fuzzing import machine

pytestmark = pytest.mark.slow

BRIEF = settings(
    max_examples=6,
    stateful_step_count=16,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize(
    "case",
    [
        *(
            f"batch_norm-{name}"
            for name in (
                "driftfilter",
                "driftfilter_aug",
                "tent",
                "eata",
                "cotta",
                "opgd",
                "opgd_diag",
                "t3a",
                "deyo",
                "santa",
                "tttpp",
                "rotta",
                "note",
            )
        ),
        *(f"group_norm-{name}" for name in ("driftfilter", "opgd", "sar", "roid", "lame", "shot")),
        *(f"linear-{name}" for name in ("driftfilter", "head_ekf", "cotta", "t3a")),
    ],
)
@pytest.mark.filterwarnings("ignore::driftfilter.NoInformationWarning")
def test_any_sequence_of_calls(case: str) -> None:
    used = machine(case)
    run_state_machine_as_test(used, settings=BRIEF)
    assert used.seen["rules"] >= 50

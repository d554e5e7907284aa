"""Adapters in random sequences of calls, at length: what tests/conformance/test_fuzz.py does in a
moment.

    python benchmarks/fuzz.py [--examples 2000] [--steps 30] [--cases batch_norm-tent ...] \
        [--seed 0] [--minutes 10]
                              [--no-shrink] [--json FILE]

Every example is a new adapter and up to ``steps`` rules (tests/fuzzing.py): steps, updates,
predictions in this and in another thread, resets, saves, loads, copies, damaged files, bad batches.
``examples`` are shared out among the cases, each a network and a preset, in random order; after
``minutes`` no new case is begun. Prints the counts; a failure is printed with the shortest sequence
that shows it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from fuzzing import CASES, machine


def fuzz(
    case: str, examples: int, steps: int, begin: int, shrink: bool
) -> tuple[Counter[str], str]:
    """Counts of what was done, and the failure, empty where there is none."""
    phases = [Phase.generate, *([Phase.shrink] if shrink else [])]
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
    used = machine(case)
    try:
        run_state_machine_as_test(seed(begin)(used), settings=chosen)
    except Exception as error:  # whatever it is, the other cases go on
        return used.seen, "".join(traceback.format_exception(error, limit=-3))
    return used.seen, ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES, metavar="CASE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument(
        "--no-shrink", action="store_true", help="print failures as they were found"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    begun, total, failures = time.perf_counter(), Counter[str](), dict[str, str]()
    each = max(1, arguments.examples // len(arguments.cases))
    cases = random.Random(arguments.seed).sample(arguments.cases, len(arguments.cases))
    for number, case in enumerate(cases):
        if time.perf_counter() - begun > 60 * arguments.minutes:
            print(f"time is up: {cases[number:]} not done")
            break
        seen, failure = fuzz(
            case, each, arguments.steps, arguments.seed + number, not arguments.no_shrink
        )
        total += seen
        print(
            f"{case:<28}{seen['examples']:>6} examples{seen['rules']:>8} "
            f"rules{'  FAILED' if failure else ''}",
            flush=True,
        )
        if failure:
            failures[case] = failure
            print(failure, flush=True)
    where = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    result = {
        **where,
        "seconds": round(time.perf_counter() - begun),
        "seen": dict(sorted(total.items())),
        "failures": failures,
    }
    print("\n" + "\n".join(f"{name:<28}{count:>10,}" for name, count in sorted(total.items())))
    print(f"{'failures':<28}{len(failures):>10}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

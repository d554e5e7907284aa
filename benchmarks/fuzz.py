"""Adapters in random sequences of calls, at length: what tests/conformance/test_fuzz.py does in a
moment.

    python benchmarks/fuzz.py [--examples 2000] [--steps 30] [--cases batch_norm-tent ...] \
        [--seed 0] [--minutes 10]
                              [--no-shrink] [--json FILE]
    python benchmarks/fuzz.py --files 10000 [--seed 0] [--json FILE]

Every example is a new adapter and up to ``steps`` rules (tests/fuzzing.py): steps, updates,
predictions in this and in another thread, resets, saves, loads, copies, damaged files, bad batches.
``examples`` are shared out among the cases, each a network and a preset, in random order; after
``minutes`` no new case is begun. Prints the counts; a failure is printed with the shortest sequence
that shows it.

``--files``: no calls, but so many mutated files (tests/file_fuzzing.py), shared out among
checkpoints, fleets, .npy, .npz, recipes in TOML and the JSON of runs; each is read in a child
process, whose crash would be seen.
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
import file_fuzzing
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


def fuzz_files(count: int, begin: int) -> tuple[Counter[str], dict[str, str]]:
    """Counts of how mutated files ended, and those that should not have ended so."""
    names, first = [*file_fuzzing.KINDS], begin * count
    return file_fuzzing.fuzz(first, first + -(-count // len(names)), names)


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
    parser.add_argument("--files", type=int, default=0, help="mutated files, and nothing else")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    begun, total, failures = time.perf_counter(), Counter[str](), dict[str, str]()
    if arguments.files:
        total, failures = fuzz_files(arguments.files, arguments.seed)
        for name, failure in failures.items():
            print(f"{name}: {failure}")
    each = max(1, arguments.examples // len(arguments.cases))
    cases = random.Random(arguments.seed).sample(arguments.cases, len(arguments.cases))
    for number, case in enumerate([] if arguments.files else cases):
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
    print("\n" + "\n".join(f"{name:<46}{count:>10,}" for name, count in sorted(total.items())))
    print(f"{'failures':<46}{len(failures):>10}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

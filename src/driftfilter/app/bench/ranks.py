"""Which of several processes this one is, as torchrun, srun or an array of SLURM jobs tell it.

They need not know each other: claims (locks.py) see to it that each task is run once. The place of
a process decides with which task it begins and which GPU of its host it takes.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple


class Worker(NamedTuple):
    """One of several processes."""

    number: int = 0
    workers: int = 1
    local: int = 0  # its number among those on its host

    def first(self, tasks: int) -> int:
        """The task it begins with, so that few want the same one."""
        return tasks * self.number // self.workers


def worker(environment: Mapping[str, str] = os.environ) -> Worker:
    """This process among others; the only one if the environment names no others.

    >>> worker({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"})
    Worker(number=3, workers=4, local=1)
    """

    def number(name: str, default: int) -> int:
        text = environment.get(name, "")
        return int(text) if text.isdigit() else default

    if number("WORLD_SIZE", 1) > 1:  # torchrun, perhaps within a SLURM job
        return Worker(number("RANK", 0), number("WORLD_SIZE", 1), number("LOCAL_RANK", 0))
    jobs, tasks = number("SLURM_ARRAY_TASK_COUNT", 1), number("SLURM_NTASKS", 1)
    place = number("SLURM_ARRAY_TASK_ID", 0) - number("SLURM_ARRAY_TASK_MIN", 0)
    job = min(place // max(number("SLURM_ARRAY_TASK_STEP", 1), 1), jobs - 1)
    return Worker(job * tasks + number("SLURM_PROCID", 0), jobs * tasks, number("SLURM_LOCALID", 0))

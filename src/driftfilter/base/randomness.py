"""All randomness comes from (seed, step, purpose), so a resumed run replays bit for bit."""

from enum import IntEnum
from typing import NamedTuple

import torch

from driftfilter.base.checks import may_look, require

_MASK = (1 << 64) - 1


class Purpose(IntEnum):
    """Independent streams of random numbers inside one step."""

    VIEWS = 1
    INFERENCE = 2
    PREDICTION = 3
    TEACHER = 4
    UPKEEP = 5
    WEIGHTING = 6
    STUDENT = 7
    BUFFER = 8


def mix_seeds(*values: int) -> int:
    """A seed of 32 bits for every tuple of integers, alike for none but by chance: of a longer one
    torch's generator on a CPU takes the last 32 bits alone.
    """
    mixed = 0
    for value in values:
        mixed = _mix(mixed ^ (value & _MASK))
    return mixed >> 32


def _mix(value: int) -> int:
    """SplitMix64's finaliser: neighbouring integers give unrelated seeds."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Randomness(NamedTuple):
    """The random numbers of one step; generators are made only when a rule asks for one."""

    seed: int
    step: int
    device: torch.device

    def generator(self, purpose: Purpose) -> torch.Generator:
        """A fresh generator: the same (seed, step, purpose) always gives the same draws."""
        require(may_look(), "a recorded step", "one that draws", "one without random numbers")
        mixed = _mix(_mix(_mix(self.seed & _MASK) ^ self.step) ^ purpose)
        return torch.Generator(device=self.device).manual_seed(mixed >> 1)

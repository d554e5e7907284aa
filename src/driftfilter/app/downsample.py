"""A long stream in pieces of a few steps, as many as a picture can show."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

MOST = 200
_MEANS = ("entropy", "baseline_entropy", "estimate", "estimate_low", "estimate_high")


def downsample(steps: Sequence[Mapping[str, Any]], most: int = MOST) -> list[dict[str, Any]]:
    """Steps, each with ``n`` samples and whatever else is known of it, as ``most`` pieces of
    equally many, JSON-ready.

    Sums of what is counted (n, judged, right, samples by domain), means over the samples of
    entropies and estimates; pieces can be put together again.
    """
    size, first, pieces = max(1, math.ceil(len(steps) / most)), 0, []
    for at in range(0, len(steps), size):
        pieces.append({"step": first, **merge(steps[at : at + size])})
        first += pieces[-1]["steps"]
    return pieces


def merge(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One piece made of several."""
    found: dict[str, Any] = {
        "steps": sum(step.get("steps", 1) for step in steps),
        "n": sum(step["n"] for step in steps),
    }
    for name in ("judged", "right", "baseline_right"):
        if any(name in step for step in steps):
            found[name] = sum(step.get(name, 0) for step in steps)
    for name in _MEANS:
        known = [step for step in steps if step.get(name) is not None]
        if known:
            found[name] = sum(step["n"] * step[name] for step in known) / sum(
                step["n"] for step in known
            )
    domains: dict[str, int] = {}
    for step in steps:
        for name, count in step.get("domains", {}).items():
            domains[name] = domains.get(name, 0) + count
    return {**found, "domains": domains} if domains else found

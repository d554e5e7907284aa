"""Refusals, and what somebody may have meant; without torch, for the command line."""

import difflib
from collections.abc import Iterable
from typing import Any


def require(condition: bool, field: str, value: Any, allowed: str) -> None:
    """Raise ``ValueError`` naming the field unless ``condition`` holds."""
    if not condition:
        raise ValueError(f"{field} must be {allowed}, got {value!r}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that one that is not known resembles, as the end of an error message; empty
    if none does.
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
